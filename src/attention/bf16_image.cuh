// Writing BF16 operand images on the card (mx/bf16_image.h is their definition).
#pragma once

#include <mxflash/mx.h>

#include "mx/bf16_image.h"
#include "runtime/status.h"

namespace mxflash {

// The image of a checked [tokens, heads, dim] operand, from its payload and scales; `shape` has room for it. `image` is
// aligned to 16 bytes.
Status write_bf16_image(const MxTensor& operand, const Jagged& seq, const Bf16ImageShape& shape, uint16_t* image,
                        Stream stream);

}  // namespace mxflash
