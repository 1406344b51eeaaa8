// Attention backward on Blackwell (sm_100a): block-scaled products on MXFP8 operands as the caller has them. Compiled
// for sm_100a and sm_103a, simulated, and emulated on Hopper; never run on silicon. docs/blackwell.md tells the why.
//
//   pre    lse', delta, P's exponents of every row      attention_bwd_sm100_pre.cuh
//   dkdv   dK, dV                                       attention_bwd_sm100_dkdv.cuh
//   dq     dQ                                           attention_bwd_sm100_dq.cuh
// S and dP are made twice, and in exchange nothing is added up in memory: no atomics, no workspace for dQ, the same
// bits in each run.
#include "attention/attention_bwd_sm100_call.h"
#include "attention/attention_bwd_sm100_dkdv.cuh"
#include "attention/attention_bwd_sm100_dq.cuh"
#include "runtime/check.h"
#include "runtime/cuda_backend.h"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

using namespace bwd_sm100;

template <int kDim>
__global__ void __launch_bounds__(kPreThreads) pre_kernel(const __grid_constant__ PreParams p) {
  pre_body<kDim>(p);
}
template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) dkdv_kernel(const __grid_constant__ Params p) {
  dkdv_body<kDim>(p);
}
template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) dq_kernel(const __grid_constant__ Params p) {
  dq_body<kDim>(p);
}

// ---- host -----------------------------------------------------------------------------------------------------------

Status supports(const AttentionBwd& a) {
  MXFLASH_TRY(check_compute_capability("attention_bwd", kSm100.name, a.q.data.device.index, 100));
  return check_call(a);
}

size_t workspace(const AttentionBwd& a) { return Workspace(nullptr, AttentionShape::of(a)).used; }

Status clear_scales(const MxTensor& t, Stream stream) {
  if (!t || t.scale.numel() == 0) return {};
  return cuda_status(cudaMemsetAsync(t.scale.data, 0, size_t(t.scale.numel()), stream), "attention_bwd: sm100: scales");
}

template <int kDim>
Status run_kernels(const AttentionBwd& a, Stream stream) {
  const AttentionShape s = AttentionShape::of(a);
  const Workspace w(a.workspace, s);
  Params keys, queries;
  MXFLASH_TRY(keys_params(a, w, keys));
  MXFLASH_TRY(queries_params(a, w, queries));
  MXFLASH_TRY(clear_scales(a.dk_mx, stream));
  MXFLASH_TRY(clear_scales(a.dv_mx, stream));
  if (keys.items.plan.order) MXFLASH_TRY(keys.items.write_plan(kOwnRows, stream));
  if (queries.items.plan.order) MXFLASH_TRY(queries.items.write_plan(kOwnRows, stream));
  const Launch pre{.what = "attention_bwd: sm100: statistics of rows",
                   .grid = dim3(uint32_t(pre_grid(s))),
                   .block = kPreThreads,
                   .stream = stream};
  MXFLASH_TRY(launch(pre, pre_kernel<kDim>, pre_params(a, w)));
  const auto grid = [](const WorkItems& items) {
    return dim3(uint32_t(std::min<int64_t>(multiprocessor_count(), items.bound(kOwnRows))));
  };
  const Launch dkdv{.what = "attention_bwd: sm100: dk and dv",
                    .grid = grid(keys.items),
                    .block = kThreads,
                    .shared_bytes = KeysConfig<kDim>::kBytes,
                    .stream = stream,
                    .overlaps = true};
  MXFLASH_TRY(launch(dkdv, dkdv_kernel<kDim>, keys));
  const Launch dq{.what = "attention_bwd: sm100: dq",
                  .grid = grid(queries.items),
                  .block = kThreads,
                  .shared_bytes = QueriesConfig<kDim>::kBytes,
                  .stream = stream,
                  .overlaps = true};
  return launch(dq, dq_kernel<kDim>, queries);
}

Status run(const AttentionBwd& a, Stream stream) {
  const DeviceGuard guard(a.q.data.device.index);
  MXFLASH_TRY(guard.status());
  return kernel_dim(AttentionShape::of(a)) == 128 ? run_kernels<128>(a, stream) : run_kernels<64>(a, stream);
}

}  // namespace

const Impl<AttentionBwd> kAttentionBwdSm100 = sm100_backend<AttentionBwd>(supports, run, workspace);

}  // namespace mxflash
