// The backends of rmsnorm_quantize and rmsnorm_bwd.
#pragma once

#include <mxflash/rmsnorm.h>

#include "runtime/dispatch.h"

namespace mxflash {

extern const Impl<RmsnormQuantize> kRmsnormQuantizeSm100, kRmsnormQuantizeSm90, kRmsnormQuantizeCpu,
    kRmsnormQuantizeRef;
extern const Impl<RmsnormBwd> kRmsnormBwdSm100, kRmsnormBwdSm90, kRmsnormBwdCpu, kRmsnormBwdRef;

ImplList<RmsnormQuantize> rmsnorm_quantize_list();
ImplList<RmsnormBwd> rmsnorm_bwd_list();

}  // namespace mxflash
