// Writing operand images on the card (mx/operand_image.h is their definition).
#pragma once

#include <mxflash/quantize.h>

#include "runtime/status.h"

namespace mxflash {

// The image of a checked [tokens, heads, dim] operand, from its payload and scales. `image` has image_size bytes;
// `stats`, on the card too, may be null. `what` is for messages.
Status write_operand_image(const char* what, const MxTensor& operand, const Jagged& seq, ImageRole role, uint8_t* image,
                           ImageStats* stats, Stream stream);

}  // namespace mxflash
