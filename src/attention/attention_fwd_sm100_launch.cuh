// The forward kernel on Blackwell, and its launch. Head dimensions above 128 have an object of their own
// (attention_fwd_sm100_wide.cu).
#pragma once

#include "attention/attention_fwd_sm100_call.h"
#include "attention/attention_fwd_sm100_kernel.cuh"
#include "runtime/launch.cuh"

namespace mxflash::fwd_sm100 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) attention_fwd_sm100_kernel(const __grid_constant__ Params p) {
  attention_fwd<C>(p);
}

template <class C>
Status launch_kernel(const AttentionFwd& a, const AttentionPlan& plan, const Partials& partials, Params& params,
                     Stream stream) {
  MXFLASH_TRY(params_of<C>(a, plan, partials, params));
  MXFLASH_TRY(params.items.write_plan(C::kBlockM, stream));
  const int64_t ctas = std::min(int64_t(multiprocessor_count()), params.items.bound(C::kBlockM));
  const Launch at{"attention_fwd: sm100", dim3(uint32_t(ctas)), C::kThreads, C::kBytes, stream};
  return launch(at, attention_fwd_sm100_kernel<C>, params);
}

extern template Status launch_kernel<Config<192, 128>>(const AttentionFwd&, const AttentionPlan&, const Partials&,
                                                       Params&, Stream);
extern template Status launch_kernel<Config<256, 256>>(const AttentionFwd&, const AttentionPlan&, const Partials&,
                                                       Params&, Stream);

}  // namespace mxflash::fwd_sm100
