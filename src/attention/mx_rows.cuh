// From fp32 rows to an MX tensor, on the card: out_mx of attention_fwd, dk_mx and dv_mx of attention_bwd.
#pragma once

#include <mxflash/mx.h>

#include "runtime/status.h"

namespace mxflash {

// rows: contiguous f32 [tokens, heads, dim]. Writes the bytes that quantize would, rule rceil: payload, scales and what
// pads them.
Status write_mx_rows(const Tensor& rows, const Jagged& seq, const MxTensor& out, Stream stream);

}  // namespace mxflash
