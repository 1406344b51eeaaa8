// The backends of gemm_quantize.
#pragma once

#include <mxflash/gemm.h>

#include "runtime/dispatch.h"

namespace mxflash {

extern const Impl<GemmQuantize> kGemmQuantizeCpu, kGemmQuantizeRef;

ImplList<GemmQuantize> gemm_quantize_list();

}  // namespace mxflash
