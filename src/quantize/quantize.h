// The backends of quantize, dequantize, convert_scales and write_image.
#pragma once

#include <mxflash/quantize.h>

#include "runtime/dispatch.h"

namespace mxflash {

extern const Impl<Quantize> kQuantizeSm90, kQuantizeCpu, kQuantizeRef;
extern const Impl<Dequantize> kDequantizeSm90, kDequantizeCpu, kDequantizeRef;
extern const Impl<ConvertScales> kConvertScalesSm90, kConvertScalesCpu, kConvertScalesRef;
extern const Impl<WriteImage> kWriteImageSm90, kWriteImageRef;

// Moves bytes only, so one serves every backend whose tensors the host can read.
Status convert_scales_host(const ConvertScales& args, Stream stream);

ImplList<Quantize> quantize_list();
ImplList<Dequantize> dequantize_list();
ImplList<ConvertScales> convert_scales_list();
ImplList<WriteImage> write_image_list();

}  // namespace mxflash
