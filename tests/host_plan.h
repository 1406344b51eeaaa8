// The plan of a kernel's work items on the host, for kernels in simulation.
#pragma once

#include <algorithm>
#include <numeric>

#include "attention/work_items.cuh"

namespace mxflash {

// What attention_plan_cuda.cu writes: sequences by falling length, and the blocks of those before each.
inline void write_plan_on_host(const WorkItems& items, int64_t block_rows) {
  const AttentionPlan& plan = items.plan;
  *plan.counter = 0;
  if (!plan.order) return;
  const auto length = [](const Jagged& seq, int32_t b) { return seq.cu_seqlens[b + 1] - seq.cu_seqlens[b]; };
  std::iota(plan.order, plan.order + items.batch, 0);
  std::stable_sort(plan.order, plan.order + items.batch,
                   [&](int32_t a, int32_t b) { return length(items.seq_k, a) > length(items.seq_k, b); });
  if (!plan.first_block) return;
  plan.first_block[0] = 0;
  for (int32_t n = 0; n < items.batch; ++n) {
    const int64_t blocks = ceil_div(int64_t(length(items.seq_q, plan.order[n])), block_rows);
    plan.first_block[n + 1] = plan.first_block[n] + int32_t(blocks);
  }
}

}  // namespace mxflash
