// Forward attention on the CPU: how the work is divided. attention_fwd_cpu_kernel.cpp does it, but for sequences of few
// query rows, which attention_decode_cpu.cpp divides.
//
// A task is up to kMaxSubTiles row tiles of one key head; with few of them the keys are split too, and a second pass
// folds the parts in order. Where the keys are split follows from shapes alone, and rows do not depend on their
// neighbours, so results do not depend on the number of threads.
#include <algorithm>

#include "attention/attention_cpu.h"
#include "attention/out_rows.h"
#include "runtime/arena.h"
#include "runtime/cpu_backend.h"
#include "runtime/parallel.h"
#include "runtime/tensor_access.h"

namespace mxflash {
namespace {

using namespace cpu;
constexpr int64_t kSplitAlign = 128;    // keys: whole tiles and whole groups
constexpr int64_t kLeastPart = 512;     // keys: less is not worth folding
constexpr int64_t kEnoughTasks = 32;    // with fewer row tiles than this, keys are split
constexpr int64_t kTasksPerWorker = 4;  // so that the last ones to finish are close together
constexpr int64_t kCachedDims = 2048;   // row tiles * (head_dim + head_dim_v) that stay in a 1 MiB L2

struct Plan {
  int64_t heads;           // sequences * key heads
  int64_t tiles;           // row tiles of the longest sequence
  int64_t parts;           // of the keys
  int64_t part_keys;       // keys of a part
  int64_t partial_floats;  // of one row tile and part

  explicit Plan(const AttentionShape& s) {
    heads = s.batch * s.num_heads_kv;
    tiles = row_tile_count(s.max_seqlen_q, s.group);
    partial_floats = (s.head_dim_v + 3) * kRowTile;
    const int64_t all = std::max<int64_t>(heads * tiles, 1), keys = std::max<int64_t>(s.max_seqlen_k, 1);
    const int64_t wanted = std::min(ceil_div(kEnoughTasks, all), ceil_div(keys, kLeastPart));
    part_keys = wanted > 1 ? round_up(ceil_div(keys, wanted), kSplitAlign) : keys;
    parts = ceil_div(keys, part_keys);
  }
  size_t partial_bytes() const {
    return parts > 1 ? size_t(parts * heads * tiles * partial_floats) * sizeof(float) : 0;
  }
  Partial partial(float* base, int64_t head, int64_t tile, int64_t part) const {
    float* p = base + ((head * tiles + tile) * parts + part) * partial_floats;
    return {p + 3 * kRowTile, p, p + kRowTile, p + 2 * kRowTile};
  }
};

FwdProblem make_problem(const AttentionFwd& args) { return {args, AttentionShape::of(args), is_fast(args.cpu_math)}; }

size_t scratch_bytes(const FwdProblem& problem) { return kAttentionFwdKernelsByIsa.in_use().scratch_bytes(problem); }

// Row tiles of sequence b.
int64_t tiles_of(const AttentionShape& shape, int64_t b) {
  return is_decode(shape, b) ? 0 : row_tile_count(shape.query_sequence(b).length, shape.group);
}
bool has_tiles(const AttentionShape& shape) {
  for (int64_t b = 0; b < shape.batch; ++b) {
    if (tiles_of(shape, b) > 0) return true;
  }
  return false;
}

size_t workspace(const AttentionFwd& args) {
  const FwdProblem problem = make_problem(args);
  const size_t tiles = Plan(problem.shape).partial_bytes() + size_t(num_threads()) * scratch_bytes(problem);
  return std::max(has_tiles(problem.shape) ? tiles : 0, decode_workspace(problem));
}

void attend_tiles(const FwdProblem& problem) {
  const AttentionFwd& args = problem.args;
  const AttentionShape& shape = problem.shape;
  const AttentionFwdKernels& kernels = kAttentionFwdKernelsByIsa.in_use();
  const Plan plan(shape);
  auto* partials = static_cast<float*>(args.workspace);
  std::byte* scratch = static_cast<std::byte*>(args.workspace) + plan.partial_bytes();
  const size_t per_worker = scratch_bytes(problem);
  // The workspace was checked, but another thread may have raised num_threads() since.
  const int32_t workers =
      int32_t(std::min(size_t(num_threads()), (args.workspace_size - plan.partial_bytes()) / per_worker));

  const int64_t cached = std::max<int64_t>(kCachedDims / (shape.head_dim + shape.head_dim_v), 2);
  const int64_t sub_tiles = std::clamp<int64_t>(plan.heads * plan.tiles * plan.parts / (workers * kTasksPerWorker), 1,
                                                std::min(cached, kMaxSubTiles));
  const int64_t groups = ceil_div(plan.tiles, sub_tiles);

  // Later rows first: with a causal mask they see most.
  parallel_for(groups * plan.heads * plan.parts, workers, [&](int64_t item, int32_t worker) {
    const int64_t part = item % plan.parts, head = item / plan.parts % plan.heads;
    const int64_t first = (groups - 1 - item / (plan.parts * plan.heads)) * sub_tiles;
    const int64_t b = head / shape.num_heads_kv;
    FwdTask task{.b = b,
                 .kv_head = head % shape.num_heads_kv,
                 .first = first,
                 .count = std::min(sub_tiles, tiles_of(shape, b) - first),
                 .first_key = part * plan.part_keys,
                 .end_key = (part + 1) * plan.part_keys,
                 .partial = nullptr};
    if (task.count <= 0) return;
    Partial partial[kMaxSubTiles];
    for (int64_t i = 0; plan.parts > 1 && i < task.count; ++i) {
      partial[i] = plan.partial(partials, head, first + i, part);
      task.partial = partial;
    }
    kernels.attend(problem, task, scratch + size_t(worker) * per_worker);
  });
  if (plan.parts > 1) {
    parallel_for(plan.heads * plan.tiles, workers, [&](int64_t item, int32_t worker) {
      const int64_t head = item / plan.tiles, tile = item % plan.tiles, b = head / shape.num_heads_kv;
      if (tile >= tiles_of(shape, b)) return;
      Partial parts[2 * kEnoughTasks];
      for (int64_t part = 0; part < plan.parts; ++part) parts[part] = plan.partial(partials, head, tile, part);
      const FwdTask task{.b = b,
                         .kv_head = head % shape.num_heads_kv,
                         .first = tile,
                         .count = 1,
                         .first_key = 0,
                         .end_key = 0,
                         .partial = nullptr};
      kernels.combine(problem, task, parts, plan.parts, scratch + size_t(worker) * per_worker);
    });
  }
}

Status run(const AttentionFwd& args, Stream) {
  const FwdProblem problem = make_problem(args);
  clear_uncovered(args, problem.shape);
  if (has_tiles(problem.shape)) attend_tiles(problem);
  decode(problem);
  return {};
}

}  // namespace

const Impl<AttentionFwd> kAttentionFwdCpu = cpu_backend<AttentionFwd>(run, workspace, check_payloads);

}  // namespace mxflash
