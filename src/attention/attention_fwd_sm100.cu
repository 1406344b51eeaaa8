// Backend sm100 of attention_fwd on the host. attention_fwd_sm100_kernel.cuh describes the kernel, docs/blackwell.md
// tells the why.
#include "attention/attention_fwd_sm100_launch.cuh"
#include "runtime/check.h"
#include "runtime/cuda_backend.h"

namespace mxflash {
namespace {

using namespace fwd_sm100;

Status supports(const AttentionFwd& a) {
  constexpr const char* op = "attention_fwd";
  MXFLASH_TRY(check_compute_capability(op, kSm100.name, a.q.data.device.index, 100));
  return check_call(op, a);
}

struct Workspace {
  AttentionPlan plan;
  Partials partials;
  size_t used;
  Workspace(void* base, const AttentionFwd& a) {
    Arena arena(base);
    plan = AttentionPlan::of(arena, a.seq_q, a.seq_k);
    partials = partials_of(arena, a);
    used = arena.used();
  }
};

size_t workspace(const AttentionFwd& a) { return Workspace(nullptr, a).used; }

Status run(const AttentionFwd& a, Stream stream) {
  const DeviceGuard guard(a.q.data.device.index);
  MXFLASH_TRY(guard.status());
  const Workspace w(a.workspace, a);
  Params params;
  MXFLASH_TRY(with_config(a, [&]<class C>(C) { return launch_kernel<C>(a, w.plan, w.partials, params, stream); }));
  if (!a.out_mx) return {};
  // Scales of blocks without a token are zero, as the quantizer leaves them; the kernel writes only the others.
  const auto scales = size_t(a.out_mx.scale.numel());
  MXFLASH_TRY(cuda_status(cudaMemsetAsync(a.out_mx.scale.data, 0, scales, stream), "attention_fwd: sm100: out_mx"));
  return combine_partials(combine_of(a, AttentionShape::of(a), params), stream);
}

}  // namespace

const Impl<AttentionFwd> kAttentionFwdSm100 = sm100_backend<AttentionFwd>(supports, run, workspace);

}  // namespace mxflash
