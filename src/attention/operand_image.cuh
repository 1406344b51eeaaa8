// Writing operand images on the card (mx/operand_image.h is their definition).
#pragma once

#include <mxflash/mx.h>

#include "runtime/status.h"

namespace mxflash {

// The image of a checked [tokens, heads, dim] operand, from its payload and scales. `image` has image_size bytes.
Status write_operand_image(const MxTensor& operand, const Jagged& seq, ImageRole role, uint8_t* image, Stream stream);

}  // namespace mxflash
