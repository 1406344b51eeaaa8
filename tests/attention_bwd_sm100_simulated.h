// The three kernels of attention_bwd on Blackwell, one after the other, on the host (simulator/simulator.h).
#pragma once

#include <algorithm>
#include <numeric>
#include <string>

#include "attention/attention_bwd_sm100_call.h"
#include "attention/attention_bwd_sm100_dkdv.cuh"
#include "attention/attention_bwd_sm100_dq.cuh"
#include "attention_bwd_sm100_problem.h"
#include "simulator/simulator.h"

namespace mxflash::kit {

struct Simulation {
  simulator::Mode mode = simulator::Mode::eager;
  uint64_t seed = 1;
  int fault = 0;
  uint32_t grid = 2;  // of the persistent kernels: fewer CTAs than items
};

// What attention_plan_cuda.cu writes: sequences by falling length, and the blocks of those before each.
inline void write_plan(const WorkItems& items) {
  const AttentionPlan& plan = items.plan;
  if (!plan.order) return;
  const auto length = [](const Jagged& seq, int32_t b) { return seq.cu_seqlens[b + 1] - seq.cu_seqlens[b]; };
  std::iota(plan.order, plan.order + items.batch, 0);
  std::stable_sort(plan.order, plan.order + items.batch,
                   [&](int32_t a, int32_t b) { return length(items.seq_k, a) > length(items.seq_k, b); });
  if (!plan.first_block) return;
  plan.first_block[0] = 0;
  for (int32_t n = 0; n < items.batch; ++n) {
    plan.first_block[n + 1] =
        plan.first_block[n] + int32_t(ceil_div(length(items.seq_q, plan.order[n]), int64_t(bwd_sm100::kOwnRows)));
  }
}

template <int kDim>
std::string simulate_kernels(BackwardCall& call, const Simulation& how) {
  using namespace bwd_sm100;
  const AttentionShape s = AttentionShape::of(call.args);
  const Workspace w(call.workspace_of(Workspace(nullptr, s).used), s);
  const PreParams pre = pre_params(call.args, w);
  Params keys{}, queries{};
  require_ok(keys_params(call.args, w, keys));
  require_ok(queries_params(call.args, w, queries));
  write_plan(queries.items), write_plan(keys.items);
  simulator::Launch launch;
  launch.threads = kPreThreads, launch.mode = how.mode, launch.seed = how.seed, launch.fault = how.fault;
  if (pre_grid(s) > 0) {
    launch.grid = uint32_t(pre_grid(s));
    const std::string error = simulator::run(launch, [&] { pre_body<kDim>(pre); });
    if (!error.empty()) return "pre: " + error;
  }
  launch.threads = kThreads, launch.grid = how.grid;
  launch.shared_bytes = KeysConfig<kDim>::kBytes;
  std::string error = simulator::run(launch, [&] { dkdv_body<kDim>(keys); });
  if (!error.empty()) return "dkdv: " + error;
  launch.shared_bytes = QueriesConfig<kDim>::kBytes;
  error = simulator::run(launch, [&] { dq_body<kDim>(queries); });
  return error.empty() ? "" : "dq: " + error;
}

// "", or what the simulator found.
inline std::string simulate(BackwardCall& call, const Simulation& how = {}) {
  return bwd_sm100::kernel_dim(AttentionShape::of(call.args)) == 128 ? simulate_kernels<128>(call, how)
                                                                     : simulate_kernels<64>(call, how);
}

}  // namespace mxflash::kit
