// Attention backward on Blackwell (sm_100a): block-scaled products on MXFP8 operands as the caller has them. Compiled
// for sm_100a and sm_103a, simulated, and emulated on Hopper; never run on silicon. docs/blackwell.md tells the why.
//
//   pre    lse', delta, P's exponents of every row      attention_bwd_sm100_pre.cuh
//   dkdv   dK, dV; with 256 channels a pass each        attention_bwd_sm100_dkdv.cuh
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
template <int kDim, int kDimV, Sums kSums>
__global__ void __launch_bounds__(kThreads, 1) dkdv_kernel(const __grid_constant__ Params p) {
  dkdv_body<kDim, kDimV, kSums>(p);
}
template <int kDim, int kDimV>
__global__ void __launch_bounds__(kThreads, 1) dq_kernel(const __grid_constant__ Params p) {
  dq_body<kDim, kDimV>(p);
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

dim3 grid_of(const WorkItems& items) {
  return dim3(uint32_t(std::min<int64_t>(multiprocessor_count(), items.bound(kOwnRows))));
}

// behind: a kernel of the same call has been launched.
template <int kDim, int kDimV, Sums kSums>
Status run_keys(const Params& keys, const char* what, bool behind, Stream stream) {
  const Launch dkdv{.what = what,
                    .grid = grid_of(keys.items),
                    .block = kThreads,
                    .shared_bytes = KeysConfig<kDim, kDimV, kSums>::kBytes,
                    .stream = stream,
                    .overlaps = behind};
  return launch(dkdv, dkdv_kernel<kDim, kDimV, kSums>, keys);
}

template <int kDim, int kDimV>
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
  MXFLASH_TRY(launch(pre, pre_kernel<kDimV>, pre_params(a, w)));
  bool behind = pre_grid(s) > 0;
  if constexpr (kOneKeysPass<kDim, kDimV>) {
    MXFLASH_TRY((run_keys<kDim, kDimV, Sums::both>(keys, "attention_bwd: sm100: dk and dv", behind, stream)));
    behind |= grid_of(keys.items).x > 0;
  } else {
    MXFLASH_TRY((run_keys<kDim, kDimV, Sums::dv>(keys, "attention_bwd: sm100: dv", behind, stream)));
    behind |= grid_of(keys.items).x > 0;
    MXFLASH_TRY((run_keys<kDim, kDimV, Sums::dk>(keys, "attention_bwd: sm100: dk", behind, stream)));
  }
  const Launch dq{.what = "attention_bwd: sm100: dq",
                  .grid = grid_of(queries.items),
                  .block = kThreads,
                  .shared_bytes = QueriesConfig<kDim, kDimV>::kBytes,
                  .stream = stream,
                  .overlaps = behind};
  return launch(dq, dq_kernel<kDim, kDimV>, queries);
}

Status run(const AttentionBwd& a, Stream stream) {
  const DeviceGuard guard(a.q.data.device.index);
  MXFLASH_TRY(guard.status());
  return with_kernel_dims(AttentionShape::of(a),
                          [&]<int kDim, int kDimV>() { return run_kernels<kDim, kDimV>(a, stream); });
}

}  // namespace

const Impl<AttentionBwd> kAttentionBwdSm100 = sm100_backend<AttentionBwd>(supports, run, workspace);

}  // namespace mxflash
