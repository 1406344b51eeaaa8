// The backends of quantize, dequantize, convert_scales and write_image.
#pragma once

#include <mxflash/quantize.h>

#include <span>

#include "runtime/dispatch.h"

namespace mxflash {

extern const Impl<Quantize> kQuantizeSm100, kQuantizeSm90, kQuantizeCpu, kQuantizeRef;
extern const Impl<Dequantize> kDequantizeSm100, kDequantizeSm90, kDequantizeCpu, kDequantizeRef;
extern const Impl<ConvertScales> kConvertScalesSm100, kConvertScalesSm90, kConvertScalesCpu, kConvertScalesRef;
extern const Impl<WriteImage> kWriteImageSm90, kWriteImageRef;

// As one call of quantize after the other, for tensors of which none is another's result. On a card the passes of all
// overlap: while means are made, which is memory's time, rows that need none are rotated and rounded.
Status quantize_all(std::span<const Quantize> all, Stream stream);

// Of that, the sm90 backend; all on one device.
Status quantize_cuda(std::span<const Quantize> all, Stream stream);

// Moves bytes only, so one serves every backend whose tensors the host can read.
Status convert_scales_host(const ConvertScales& args, Stream stream);

ImplList<Quantize> quantize_list();
ImplList<Dequantize> dequantize_list();
ImplList<ConvertScales> convert_scales_list();
ImplList<WriteImage> write_image_list();

}  // namespace mxflash
