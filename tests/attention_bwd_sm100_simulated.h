// The three kernels of attention_bwd on Blackwell, one after the other, on the host (simulator/simulator.h).
#pragma once

#include <string>

#include "attention/attention_bwd_sm100_call.h"
#include "attention/attention_bwd_sm100_dkdv.cuh"
#include "attention/attention_bwd_sm100_dq.cuh"
#include "attention_bwd_sm100_problem.h"
#include "host_plan.h"
#include "simulator/simulator.h"

namespace mxflash::kit {

struct Simulation {
  simulator::Mode mode = simulator::Mode::eager;
  uint64_t seed = 1;
  int fault = 0;
  uint32_t grid = 2;  // of the persistent kernels: fewer CTAs than items
};

template <int kDim, int kDimV>
std::string simulate_kernels(BackwardCall& call, const Simulation& how) {
  using namespace bwd_sm100;
  const AttentionShape s = AttentionShape::of(call.args);
  const Workspace w(call.workspace_of(Workspace(nullptr, s).used), s);
  const PreParams pre = pre_params(call.args, w);
  Params keys{}, queries{};
  require_ok(keys_params(call.args, w, keys));
  require_ok(queries_params(call.args, w, queries));
  write_plan_on_host(queries.items, kOwnRows), write_plan_on_host(keys.items, kOwnRows);
  const auto run = [&](const char* name, uint32_t grid, uint32_t threads, size_t shared_bytes, auto&& body) {
    const std::string error = simulator::run({.grid = grid,
                                              .threads = threads,
                                              .shared_bytes = shared_bytes,
                                              .mode = how.mode,
                                              .seed = how.seed,
                                              .fault = how.fault},
                                             body);
    return error.empty() ? "" : std::string(name) + ": " + error;
  };
  const auto run_keys = [&]<Sums kSums>(const char* name) {
    return run(name, how.grid, kThreads, KeysConfig<kDim, kDimV, kSums>::kBytes,
               [&] { dkdv_body<kDim, kDimV, kSums>(keys); });
  };
  std::string error;
  if (pre_grid(s) > 0) error = run("pre", uint32_t(pre_grid(s)), kPreThreads, 0, [&] { pre_body<kDimV>(pre); });
  if constexpr (kOneKeysPass<kDim, kDimV>) {
    if (error.empty()) error = run_keys.template operator()<Sums::both>("dkdv");
  } else {
    if (error.empty()) error = run_keys.template operator()<Sums::dv>("dv");
    if (error.empty()) error = run_keys.template operator()<Sums::dk>("dk");
  }
  if (!error.empty()) return error;
  return run("dq", how.grid, kThreads, QueriesConfig<kDim, kDimV>::kBytes, [&] { dq_body<kDim, kDimV>(queries); });
}

// "", or what the simulator found.
inline std::string simulate(BackwardCall& call, const Simulation& how = {}) {
  return bwd_sm100::with_kernel_dims(AttentionShape::of(call.args),
                                     [&]<int kDim, int kDimV>() { return simulate_kernels<kDim, kDimV>(call, how); });
}

}  // namespace mxflash::kit
