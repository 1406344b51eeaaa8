// Forward attention of sequences with few query rows on the CPU: how the work is divided.
// attention_decode_cpu_kernel.cpp does it.
//
// A task is all rows of some key heads of one sequence, on a part of the keys; a second pass folds the parts in order.
// Parts follow from shapes alone, so results do not depend on the number of threads.
#include <algorithm>

#include "attention/attention_cpu.h"
#include "runtime/parallel.h"

namespace mxflash::cpu {
namespace {

constexpr int64_t kSplitAlign = 128;  // keys: whole blocks
constexpr int64_t kLeastPart = 512;   // keys times heads: less is not worth folding
constexpr int64_t kEnoughTasks = 64;
constexpr int64_t kTogether = 2048;  // channels of k and v of a task's heads: two blocks of keys fit into L2

struct Plan {
  int64_t sequences = 0;  // that have few rows, but some
  int64_t together;       // heads of a task
  int64_t groups;         // of so many heads
  int64_t parts;          // of the keys of the longest sequence
  int64_t part_keys;
  int64_t partial_floats;  // of one head and part

  explicit Plan(const AttentionShape& s) {
    int64_t keys = 1;
    for (int64_t b = 0; b < s.batch; ++b) {
      if (!is_decode(s, b) || s.query_sequence(b).length == 0) continue;
      ++sequences;
      keys = std::max(keys, s.key_sequence(b).length);
    }
    const int64_t heads = std::max<int64_t>(s.num_heads_kv, 1), count = std::max<int64_t>(sequences, 1);
    const auto most_parts = [&](int64_t n) { return ceil_div(keys, std::max(kLeastPart / n, kSplitAlign)); };
    const auto most_tasks = [&](int64_t n) { return count * ceil_div(heads, n) * most_parts(n); };
    // Heads that lie side by side are best read together, but not by few threads.
    together = std::clamp<int64_t>(kTogether / (s.head_dim + s.head_dim_v), 1, heads);
    for (int64_t n = together; n > 1 && most_tasks(together) < kEnoughTasks;) {
      n = ceil_div(n, 2);
      if (most_tasks(n) > most_tasks(together)) together = n;
    }
    groups = ceil_div(heads, together);
    const int64_t wanted = std::min(ceil_div(kEnoughTasks, count * groups), most_parts(together));
    part_keys = wanted > 1 ? round_up(ceil_div(keys, wanted), kSplitAlign) : round_up(keys, kSplitAlign);
    parts = ceil_div(keys, part_keys);
    partial_floats = decode_partial_floats(s);
  }
  int64_t parts_of(const Sequence& keys) const { return std::max<int64_t>(1, ceil_div(keys.length, part_keys)); }
  size_t partial_bytes(const AttentionShape& s) const {
    return parts > 1 ? size_t(s.batch * s.num_heads_kv * parts * partial_floats) * sizeof(float) : 0;
  }
};

}  // namespace

size_t decode_workspace(const FwdProblem& problem) {
  const Plan plan(problem.shape);
  if (plan.sequences == 0) return 0;
  return plan.partial_bytes(problem.shape) +
         size_t(num_threads()) * kAttentionDecodeKernelsByIsa.in_use().scratch_bytes(problem, plan.together);
}

void decode(const FwdProblem& problem) {
  const AttentionShape& shape = problem.shape;
  const AttentionDecodeKernels& kernels = kAttentionDecodeKernelsByIsa.in_use();
  const Plan plan(shape);
  if (plan.sequences == 0) return;
  auto* partials = static_cast<float*>(problem.args.workspace);
  const size_t partial_bytes = plan.partial_bytes(shape), per_worker = kernels.scratch_bytes(problem, plan.together);
  std::byte* scratch = static_cast<std::byte*>(problem.args.workspace) + partial_bytes;
  // The workspace was checked, but another thread may have raised num_threads() since.
  const int32_t workers =
      int32_t(std::min(size_t(num_threads()), (problem.args.workspace_size - partial_bytes) / per_worker));
  const int64_t head_floats = plan.parts * plan.partial_floats;

  parallel_for(shape.batch * plan.groups * plan.parts, workers, [&](int64_t item, int32_t worker) {
    const int64_t part = item % plan.parts, group = item / plan.parts % plan.groups;
    const int64_t b = item / (plan.parts * plan.groups), first = group * plan.together;
    if (!is_decode(shape, b)) return;
    const int64_t parts = plan.parts_of(shape.key_sequence(b));
    if (part >= parts) return;
    float* partial = partials + (b * shape.num_heads_kv + first) * head_floats + part * plan.partial_floats;
    const DecodeTask task{.b = b,
                          .first_head = first,
                          .num_heads = std::min(plan.together, shape.num_heads_kv - first),
                          .first_key = part * plan.part_keys,
                          .end_key = (part + 1) * plan.part_keys,
                          .partial = parts > 1 ? partial : nullptr,
                          .partial_stride = head_floats};
    kernels.attend(problem, task, scratch + size_t(worker) * per_worker);
  });
  if (plan.parts == 1) return;
  parallel_for(shape.batch * shape.num_heads_kv, workers, [&](int64_t item, int32_t worker) {
    const DecodeTask task{.b = item / shape.num_heads_kv,
                          .first_head = item % shape.num_heads_kv,
                          .num_heads = 1,
                          .first_key = 0,
                          .end_key = 0,
                          .partial = nullptr,
                          .partial_stride = 0};
    const int64_t parts = plan.parts_of(shape.key_sequence(task.b));
    if (!is_decode(shape, task.b) || parts == 1) return;
    kernels.combine(problem, task, partials + item * head_floats, parts, scratch + size_t(worker) * per_worker);
  });
}

}  // namespace mxflash::cpu
