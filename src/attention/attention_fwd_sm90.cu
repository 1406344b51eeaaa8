// Attention forward on Hopper (sm_90a): FP8 wgmma on operand images. docs/hopper.md tells the why, with measurements.
//
//   s = softmax_scale log2(e) q.k      P = E4M3(2^(s - m + kOffset))      out = sum P v / sum P      lse = ln sum 2^s
//
// over key tiles in ascending order, m a reference that is raised only when a score exceeds it by more than
// kLimit - kOffset binades, so P <= 448. lse is from the unrounded P in fp32. Operands have one power of two for 64
// query rows or 128 keys (mx/operand_image.h), which joins softmax_scale in the one FMA before exp2.
//
// Accumulation. FP8 wgmma keeps about 14 bits of a running sum and truncates, a bias that grows with every step; so out
// and sum P stay in tensor cores for kPromoteTiles key tiles only and are then added, in fp32, to a copy in shared
// memory. Both lose alike, which cancels in their quotient.
//
// CTA: persistent; a work item is a block of 64, 128 or 192 query rows (Config: one, two or three consumers) of one
// head of one sequence; which of them a call takes, schedule_of estimates. In blocks of 64 rows, rows of a group of
// heads may be packed and keys split (attention_split.cuh): partial results are then combined by another kernel.
//   scheduler    a thread of warpgroup 0: takes items from a counter, looks them up, loads their query rows
//   loader       another: loads key and value tiles (bulk copies of images: no tensor maps)
//   consumer w   warpgroups 1..: rows 64 w .. of the item, S and O in registers
// Per key tile a consumer does S = Q K^T (SS), waits, tests the maximum, and then, 32 keys at a time, exponentials and
// O += P V (RS): three quarters of P V run under the warpgroup's own exponentials, the rest under those of the others.
// The accumulators of Q K^T are, packed, A fragments of P V: value images permute tokens to that end.
//
// Barriers (arrivals per phase; s is a stage, b a query buffer, i a slot of items; warps: of all consumers):
//   item_known[i]           1             an item is looked up                   scheduler -> loader
//   item_taken[i]           1             the loader needs it no more            loader -> scheduler
//   item_full[b]            1 + bytes     and its query rows are there           scheduler -> consumers
//   item_free[b]            warps         nobody reads either any more           consumers -> scheduler
//   k_full[s], v_full[s]    1 + bytes     a tile and the scales are there        loader -> consumers
//   k_free[s], v_free[s]    warps         nobody reads it any more               consumers -> loader
// and barrier 1 + w of consumer w's warps where results are quantized from shared memory.
// Memory and registers (head_dim 128, 128; 32 registers for the producers):
//   rows   CTAs of an SM   queries      keys, values   promoted O + state   in all    registers of a consumer
//   192    1               2 x 24 KiB   2 x 32 KiB     96 + 7.5 KiB         217 KiB   160 (S 64, O 64)
//   128    1               2 x 16       3 x 32         64 + 5               199       232
//   64     2               2 x 8        2 x 32         32, in registers     113       224
#include <limits>

#include "attention/attention.h"
#include "attention/attention_fwd_sm90_epilogue.cuh"
#include "attention/attention_fwd_sm90_producer.cuh"
#include "runtime/check.h"
#include "runtime/cuda_backend.h"
#include "runtime/launch.cuh"
#include "runtime/operand_image.cuh"

namespace mxflash {
namespace fwd_sm90 {

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) attention_fwd_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  uint8_t* smem = raw + (1024 - (ptx::shared_address(raw) & 1023)) % 1024;
  if (C::kAligned && smem != raw) __trap();  // there is no room to align it
  const Shared<C> shared{ptx::shared_address(smem)};
  if (threadIdx.x < 64) {
    const uint32_t code = kWeightCodes >> (8 * (threadIdx.x / 16)) & 0xFF;  // 32 bytes a column
    reinterpret_cast<uint32_t*>(smem + C::kWeights)[threadIdx.x] = code * 0x01010101u;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kItems; ++i) {
      ptx::mbarrier_init(shared.item_known(i), 1);
      ptx::mbarrier_init(shared.item_taken(i), 1);
    }
    for (int i = 0; i < kBuffers; ++i) {
      ptx::mbarrier_init(shared.item_full(i), 1);
      ptx::mbarrier_init(shared.item_free(i), C::kConsumerWarps);
    }
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(shared.k_full(i), 1);
      ptx::mbarrier_init(shared.v_full(i), 1);
      ptx::mbarrier_init(shared.k_free(i), C::kConsumerWarps);
      ptx::mbarrier_init(shared.v_free(i), C::kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  clear_slack_rows(p.to, p.items.seq_q);
  ptx::fence_proxy_async();
  __syncthreads();
  // Through a shuffle, so that the compiler knows it to be the same in the whole warp: descriptors are then uniform.
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<32>();
    if (threadIdx.x == 0) schedule<C>(p, shared);
    if (threadIdx.x == 32) load_tiles<C>(p, shared);
  } else {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32 % 4, 0);
    Consumer<C>{{warpgroup - 1, warp}, p, shared}.run();
  }
}

}  // namespace fwd_sm90

namespace {

using namespace fwd_sm90;

// ---- host -----------------------------------------------------------------------------------------------------------

Status supports(const AttentionFwd& a) {
  constexpr const char* op = "attention_fwd";
  MXFLASH_TRY(check_compute_capability(op, "sm90", a.q.data.device.index, 90));
  const AttentionShape s = AttentionShape::of(a);
  if (s.head_dim > kMaxImageDim) {
    return unsupported("%s: sm90: head_dim must be at most 128, got %d", op, int(s.head_dim));
  }
  if (s.head_dim_v > kMaxImageDim) {
    return unsupported("%s: sm90: head_dim_v must be at most 128, got %d", op, int(s.head_dim_v));
  }
  if (!(s.softmax_scale > 0)) {
    return unsupported("%s: sm90: softmax_scale must be positive, got %g", op, s.softmax_scale);
  }
  return check_work_items(op, kSm90.name, s, {"rows", s.num_heads_q, s.total_q, s.max_seqlen_q, s.seq_q, kRows});
}

// How a call is cut into work items.
struct Schedule {
  int warpgroups = kMaxWarpgroups;
  int32_t pack = 1;    // heads of a group in a block
  int32_t splits = 1;  // of a block's keys
};

// The one with the least estimated time, in units of what a 64 x 128 tile of a block of 192 rows takes an SM, a key
// tile of the longest sequence. From capacities: lengths are not known here.
Schedule schedule_of(const AttentionShape& s) {
  // Of 1, 2, 3 warpgroups. Long sequences measure 1.23 and 1.16; chosen so that short ones, whose items cost more than
  // their tiles, get the faster block too (docs/hopper.md).
  constexpr double kTileCost[] = {1.42, 1.27, 1.0};
  constexpr double kLaunch = 6, kSplitRow = 0.15;  // of one more kernel; of a row's partial result
  const double units = multiprocessor_count();
  const auto tiles = double(std::max<int64_t>(ceil_div(s.max_seqlen_k, kImageTile), 1));
  Schedule best;
  double best_cost = std::numeric_limits<double>::infinity();
  const auto blocks = [&](int64_t rows, int64_t pack) {
    const double most = double(s.batch) * double(ceil_div(s.max_seqlen_q * pack, rows));
    if (!s.seq_q.cu_seqlens) return most;
    // Unequal lengths: half a block of each sequence is empty.
    const double mean = double(s.total_q * pack) / double(s.batch) / double(rows);
    return std::min(most, double(s.batch) * std::max(mean + 0.5, 1.0));
  };
  const auto consider = [&](const Schedule& c) {
    const double items = blocks(kRows * c.warpgroups, c.pack) * double(s.num_heads_q / c.pack) * c.splits;
    double cost = std::max(items / units, 1.0) * c.warpgroups * kTileCost[c.warpgroups - 1] / c.splits;
    if (c.pack > 1) cost += kLaunch / tiles;
    if (c.splits > 1) cost += (kLaunch + kSplitRow * c.splits) / tiles;
    if (cost >= best_cost) return;
    best = c;
    best_cost = cost;
  };
  for (int warpgroups = kMaxWarpgroups; warpgroups > 0; --warpgroups) consider({warpgroups});
  for (const int64_t pack : {int64_t(1), s.group}) {
    if (pack < 1) continue;
    // Two CTAs an SM, but no range below kMinSplitTiles.
    const double fill = 2 * units / std::max(blocks(kRows, pack) * double(s.num_heads_q / pack), 1.0);
    const double splits = std::min({fill, double(kMaxSplits), tiles / kMinSplitTiles});
    for (const int32_t n : {1, int32_t(std::max(splits, 1.0))}) consider({1, int32_t(pack), n});
  }
  return best;
}

struct Workspace {
  Schedule schedule;
  AttentionPlan plan;
  ImageShape q_shape, k_shape, v_shape, packed_shape;
  uint8_t *q, *k, *v, *packed_q = nullptr;
  Partials partials;
  size_t used;
  Workspace(void* base, const AttentionFwd& a) {
    const AttentionShape s = AttentionShape::of(a);
    Arena arena(base);
    const auto image = [&](const Tensor& given, ImageRole role, const MxTensor& t, const Jagged& seq) {
      if (given) return static_cast<uint8_t*>(given.data);
      return arena.take<uint8_t>(image_size(role, t.data.shape[0], t.data.shape[1], t.data.shape[2], seq));
    };
    schedule = schedule_of(s);
    plan = AttentionPlan::of(arena, a.seq_q, a.seq_k);
    q = image(a.q_image, ImageRole::query, a.q, a.seq_q);
    k = image(a.k_image, ImageRole::key, a.k, a.seq_k);
    v = image(a.v_image, ImageRole::value, a.v, a.seq_k);
    const int64_t padded_q = padded_token_count(s.total_q, s.seq_q), padded_k = padded_token_count(s.total_k, s.seq_k);
    q_shape = ImageShape::of(ImageRole::query, padded_q, s.num_heads_q, s.head_dim);
    k_shape = ImageShape::of(ImageRole::key, padded_k, s.num_heads_kv, s.head_dim);
    v_shape = ImageShape::of(ImageRole::value, padded_k, s.num_heads_kv, s.head_dim_v);
    packed_shape = q_shape;
    if (schedule.pack > 1) {
      packed_shape.heads = s.num_heads_kv;
      packed_shape.tokens = packed_padded_count(s.total_q, s.seq_q, schedule.pack);
      packed_q = arena.take<uint8_t>(packed_shape.size());
    }
    // A block of packed rows is none of quantization: its results go there once they are rows of heads again.
    if (schedule.splits > 1 || (schedule.pack > 1 && a.out_mx)) {
      partials = {.splits = schedule.splits,
                  .dim = int32_t(v_shape.dim),
                  .heads = s.num_heads_q / schedule.pack,
                  .rows = s.total_out * schedule.pack};
      partials.row = arena.take<PartialRow>(partials.count());
      partials.out = arena.take<float>(partials.count() * partials.dim);
    }
    used = arena.used();
  }
};

size_t workspace(const AttentionFwd& a) {
  const DeviceGuard guard(a.q.data.device.index);
  return Workspace(nullptr, a).used;
}

// Scales of blocks without a token are zero, as the quantizer leaves them; kernels write only the others.
Status clear_scales(const MxTensor& t, Stream stream) {
  return cuda_status(cudaMemsetAsync(t.scale.data, 0, size_t(t.scale.numel()), stream), "attention_fwd: sm90: out_mx");
}

template <class C>
Status launch_kernel(const Params& params, Stream stream) {
  const Launch at{"attention_fwd: sm90",
                  dim3(uint32_t(std::min(C::kCtas * int64_t(multiprocessor_count()), params.items.bound(C::kBlockM)))),
                  C::kThreads, C::kBytes, stream};
  return launch(at, attention_fwd_kernel<C>, params);
}

template <int kWarpgroups>
Status launch_rows(const Params& p, Stream stream) {
  if (p.k_shape.dim == 128) {
    return p.v_shape.dim == 128 ? launch_kernel<Config<kWarpgroups, 128, 128>>(p, stream)
                                : launch_kernel<Config<kWarpgroups, 128, 64>>(p, stream);
  }
  return p.v_shape.dim == 128 ? launch_kernel<Config<kWarpgroups, 64, 128>>(p, stream)
                              : launch_kernel<Config<kWarpgroups, 64, 64>>(p, stream);
}

Status run(const AttentionFwd& a, Stream stream) {
  const DeviceGuard guard(a.q.data.device.index);
  MXFLASH_TRY(guard.status());
  const AttentionShape s = AttentionShape::of(a);
  const Workspace w(a.workspace, a);
  const auto write_image = [&](const MxTensor& operand, const Jagged& seq, ImageRole role, uint8_t* image) {
    return write_operand_image("attention_fwd: sm90: operand image", operand, seq, role, image, nullptr, stream);
  };
  if (!a.q_image) MXFLASH_TRY(write_image(a.q, a.seq_q, ImageRole::query, w.q));
  if (!a.k_image) MXFLASH_TRY(write_image(a.k, a.seq_k, ImageRole::key, w.k));
  if (!a.v_image) MXFLASH_TRY(write_image(a.v, a.seq_k, ImageRole::value, w.v));
  const Schedule& cut = w.schedule;
  const int64_t block_rows = kRows * cut.warpgroups;
  if (cut.pack > 1) {
    MXFLASH_TRY(pack_query_image(w.q, w.q_shape, s.total_q, s.seq_q, cut.pack, w.packed_q, stream));
  }
  const WorkItems items = WorkItems::of(a, s, w.plan, w.k_shape.dim + w.v_shape.dim, block_rows, cut.pack, cut.splits);
  MXFLASH_TRY(items.write_plan(block_rows, stream));
  const RowOutput to = RowOutput::of(a, s);
  const uint8_t* const q = cut.pack > 1 ? w.packed_q : w.q;
  const Params params{.items = items,
                      .to = to,
                      .partials = w.partials,
                      .q = q,
                      .k = w.k,
                      .v = w.v,
                      .q_scale = q + w.packed_shape.scale_offset(0, 0),
                      .k_scale = w.k + w.k_shape.scale_offset(0, 0),
                      .v_scale = w.v + w.v_shape.scale_offset(0, 0),
                      .q_shape = w.packed_shape,
                      .k_shape = w.k_shape,
                      .v_shape = w.v_shape,
                      .scale_log2 = float(s.softmax_scale * double(kLog2e))};
  if (a.out_mx) MXFLASH_TRY(clear_scales(a.out_mx, stream));
  const auto launch_it = cut.warpgroups == 1 ? launch_rows<1> : cut.warpgroups == 2 ? launch_rows<2> : launch_rows<3>;
  MXFLASH_TRY(launch_it(params, stream));
  if (!w.partials.out) return {};
  return combine_partials({.partials = w.partials,
                           .to = to,
                           .seq_out = s.seq_out(),
                           .seq_k = a.seq_k,
                           .total_k = s.total_k,
                           .max_seqlen = s.max_seqlen_q,
                           .mask = a.mask,
                           .pack = cut.pack,
                           .group = int32_t(s.group)},
                          stream);
}

}  // namespace

const Impl<AttentionFwd> kAttentionFwdSm90 = sm90_backend<AttentionFwd>(supports, run, workspace);

}  // namespace mxflash
