// The backends of quantize, dequantize and convert_scales.
#pragma once

#include <mxflash/quantize.h>

#include "runtime/dispatch.h"

namespace mxflash {

extern const Impl<Quantize> kQuantizeRef;
extern const Impl<Dequantize> kDequantizeRef;
extern const Impl<ConvertScales> kConvertScalesRef;

ImplList<Quantize> quantize_list();
ImplList<Dequantize> dequantize_list();
ImplList<ConvertScales> convert_scales_list();

}  // namespace mxflash
