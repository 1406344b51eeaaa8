// From fp32 rows of out to out_mx, on the card.
#pragma once

#include <mxflash/mx.h>

#include "runtime/status.h"

namespace mxflash {

// rows: contiguous f32 [tokens, heads, dim]. Writes the bytes that quantize would, rule rceil: payload, scales and what
// pads them.
Status write_mx_rows(const Tensor& rows, const Jagged& seq, const MxTensor& out, Stream stream);

}  // namespace mxflash
