// Backward attention on the CPU: how the work is divided. attention_bwd_cpu_kernel.cpp does it.
//
// Three passes: delta of every row; dk, dv and the sums of dq, a task for every run of keys; dq of every row tile. The
// sums of dq have one order (see there), whatever the number of threads and of keys in a task.
#include <algorithm>

#include "attention/attention_cpu.h"
#include "runtime/arena.h"
#include "runtime/cpu_backend.h"
#include "runtime/mx_access.h"
#include "runtime/parallel.h"

namespace mxflash {
namespace {

using namespace cpu;
constexpr int64_t kMostKeys = 512, kLeastKeys = 64;  // of a task
constexpr int64_t kTasksPerWorker = 4;

// Sets what lies in the workspace; returns its size.
size_t divide(BwdProblem& p, void* workspace) {
  const AttentionShape& s = p.shape;
  const int64_t rows = s.num_heads_q * row_tiles_of_head(s.total_out, s.seq_out());
  const int64_t q_tiles = s.num_heads_q * row_tiles_of_head(s.total_q, s.seq_q);
  Arena arena(workspace);
  p.lse_log2 = arena.take<float>(rows * kRowTile);
  p.delta = arena.take<float>(rows * kRowTile);
  p.dq = arena.take<float>(q_tiles * s.head_dim * kRowTile);
  p.last_task = arena.take<int64_t>(q_tiles);
  return arena.used();
}

BwdProblem make_problem(const AttentionBwd& args) {
  return {.args = args,
          .shape = AttentionShape::of(args),
          .fast = is_fast(args.cpu_math),
          .part_keys = kMostKeys,
          .max_parts = 0,
          .lse_log2 = nullptr,
          .delta = nullptr,
          .dq = nullptr,
          .last_task = nullptr};
}

size_t scratch_bytes(const BwdProblem& problem) { return kAttentionBwdKernelsByIsa.in_use().scratch_bytes(problem); }

size_t workspace(const AttentionBwd& args) {
  BwdProblem problem = make_problem(args);
  return divide(problem, nullptr) + size_t(num_threads()) * scratch_bytes(problem);
}

Status run(const AttentionBwd& args, Stream) {
  BwdProblem problem = make_problem(args);
  const AttentionShape& shape = problem.shape;
  const AttentionBwdKernels& kernels = kAttentionBwdKernelsByIsa.in_use();
  const size_t shared = divide(problem, args.workspace), per_worker = scratch_bytes(problem);
  // The workspace was checked, but another thread may have raised num_threads() since.
  const int32_t workers = int32_t(std::min(size_t(num_threads()), (args.workspace_size - shared) / per_worker));
  const auto scratch = [&](int32_t worker) {
    return static_cast<std::byte*>(args.workspace) + shared + size_t(worker) * per_worker;
  };

  const int64_t kv_heads = shape.batch * shape.num_heads_kv;
  while (problem.part_keys > kLeastKeys &&
         kv_heads * ceil_div(shape.max_seqlen_k, problem.part_keys) < workers * kTasksPerWorker) {
    problem.part_keys /= 2;
  }
  problem.max_parts = ceil_div(shape.max_seqlen_k, problem.part_keys);

  // body(b, head, tile, scratch) for every row tile of `batch` query sequences.
  const int64_t heads = shape.num_heads_q, tiles = ceil_div(shape.max_seqlen_q, kRowTile);
  const auto for_row_tiles = [&](int64_t batch, auto body) {
    parallel_for(batch * heads * tiles, workers, [&](int64_t item, int32_t worker) {
      const int64_t b = item / (heads * tiles), tile = item % tiles;
      if (tile * kRowTile < shape.query_sequence(b).length)
        body(problem, b, item / tiles % heads, tile, scratch(worker));
    });
  };
  for_row_tiles(shape.batch, kernels.prepare);

  if (args.dk_mx) clear_uncovered(args.dk_mx, shape.seq_k);
  if (args.dv_mx) clear_uncovered(args.dv_mx, shape.seq_k);
  // The parts of one head far apart, since each waits for the one before; those of a shared query's sequences likewise.
  parallel_for(kv_heads * problem.max_parts, workers, [&](int64_t item, int32_t worker) {
    const int64_t in_batch = shape.shared_q ? problem.max_parts * shape.num_heads_kv : kv_heads * problem.max_parts;
    const int64_t within = item % in_batch, lead = shape.shared_q ? shape.num_heads_kv : kv_heads;
    const int64_t head = within % lead;
    const BwdTask task{.b = shape.shared_q ? item / in_batch : head / shape.num_heads_kv,
                       .kv_head = head % shape.num_heads_kv,
                       .part = within / lead};
    if (task.part * problem.part_keys < shape.key_sequence(task.b).length)
      kernels.attend(problem, task, scratch(worker));
  });

  for_row_tiles(shape.shared_q ? 1 : shape.batch, kernels.store_dq);

  clear_slack_rows(args.dq, shape.seq_q);
  if (args.dk) clear_slack_rows(args.dk, shape.seq_k);
  if (args.dv) clear_slack_rows(args.dv, shape.seq_k);
  return {};
}

}  // namespace

const Impl<AttentionBwd> kAttentionBwdCpu = cpu_backend<AttentionBwd>(run, workspace);

}  // namespace mxflash
