// The backends of rmsnorm_quantize.
#pragma once

#include <mxflash/rmsnorm.h>

#include "runtime/dispatch.h"

namespace mxflash {

extern const Impl<RmsnormQuantize> kRmsnormQuantizeSm90, kRmsnormQuantizeCpu, kRmsnormQuantizeRef;

ImplList<RmsnormQuantize> rmsnorm_quantize_list();

}  // namespace mxflash
