// Attention backward on Hopper (sm_90a): five FP8 wgmma products on records that pre passes write. docs/hopper.md tells
// the why, with measurements; attention_bwd_sm90.cuh has the scales.
//
//   S^T = K Q^T      P8 = 2^(S - lse')      dP^T = V dO^T      dS8 = P8 (dP 2^(u + v_scale) - delta')
//   dV += P8^T dO    dK += dS8^T Q          dQ += dS8 K
//
// A work item is a tile of 128 keys of one key head of one sequence, over all heads of its group and all tiles of 64
// rows that see one of the keys. dK and dV stay in tensor cores, and what is more than these may add up (kPromoteTiles)
// goes to fp32 in the workspace; dQ is added to fp32 or FP16 there by bulk reductions, in any order, or, kOrdered, in
// that of key tiles. dK and dV, and then dQ, are the same bits in each run. Hidden pairs get S = -inf in the tiles that
// a mask or an end of a sequence crosses; rows without a token, or without keys, have lse' = +inf.
//
// CTA: persistent; items come from a counter. Its roles:
//   loader           a thread of warpgroup 0: takes items and loads their records    attention_bwd_sm90_loader.cuh
//   counter          a warp: clears dQ of later items, tells post what is done      attention_bwd_sm90_loader.cuh
//   reducers         kOrdered: two more add dQ, step by step                         attention_bwd_sm90_reducer.cuh
//   warpgroups 1, 2  64 keys each                     attention_bwd_sm90_consumer.cuh, attention_bwd_sm90_epilogue.cuh
// Step i of a warpgroup:
//   dQ(i - 1) = dS8 K, half of the channels, from both warpgroups' dS8   under the first exponentials
//   dP(i)                                                                under the others
//   dV += (A from the registers of P8)
//   dS8 -> registers (A of dK), and transposed by stmatrix into shared memory for dQ
//   dK +=, S(i + 1); each warp adds its part of dQ(i - 1); then all products are waited for
//   seldom: pairs of step i + 1 are hidden, sums get other units, or are emptied; one branch, since jumps cost
// The accumulators of S^T and dP^T are, packed, A fragments of dV and dK: rows are permuted in dO^T and Q^T to that
// end. stmatrix moves pairs of bytes, of keys r and r + 8 of 16: K^T has its keys in that order.
//
// Barriers (arrivals per phase):
//   item_full[b]       1            an item is there                     loader -> the others
//   item_free[b]       9 warps (+2) nobody reads it, its dQ is added     the others -> loader, counter
//   key_full[3]        1 + bytes    K, V, K^T are there                  loader -> warpgroups
//   key_free[3]        8 warps      nobody reads them any more           warpgroups -> loader
//   full[s]            1 + bytes    a row record is there                loader -> warpgroups
//   free[s]            8 warps      nobody reads it any more             warpgroups -> loader
//   ds_full[i % 2]     8 warps      dS8 of step i is there               warpgroup <-> warpgroup
// and where kOrdered
//   dq_full[s]         4 warps      a warpgroup's part of dQ is staged   warpgroup -> its reducer
//   dq_free[s]         1            its slot is free                     reducer -> warpgroup
// dS8(i) may overwrite dS8(i - 2): ds_full of step i - 1 comes after everyone's dQ(i - 2).
// Shared memory (dim 128): keys 48 KiB, kStages row records of 33 KiB, dS8 2 x 8 KiB, dQ 32 KiB (FP16: 2 x 16), results
// 16 KiB, masks 4 KiB: 216 KiB. Registers: 240 for the warpgroups (dK, dV 128; S 32; dP or dQ 32; K 12; lse' or delta'
// 8), 24 for warpgroup 0.
#include "attention/attention_bwd_sm90_consumer.cuh"
#include "attention/attention_bwd_sm90_loader.cuh"
#include "attention/attention_bwd_sm90_reducer.cuh"
#include "attention/work_items.cuh"
#include "mx/rotation.h"
#include "ptx/griddepcontrol.cuh"
#include "runtime/check.h"
#include "runtime/cuda_backend.h"
#include "runtime/launch.cuh"

namespace mxflash {
namespace bwd_sm90 {

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <int kDim, bool kHalf, bool kOrdered>
__global__ void __launch_bounds__(kThreads, 1) attention_bwd_kernel(const __grid_constant__ Params p) {
  using C = Config<kDim, kHalf>;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) {
      ptx::mbarrier_init(C::kKeyFull + 8 * i, 1);
      ptx::mbarrier_init(C::kKeyFree + 8 * i, kWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(C::kDsFull + 8 * i, kWarps);
      ptx::mbarrier_init(C::kItemFull + 8 * i, 1);
      ptx::mbarrier_init(C::kItemFree + 8 * i, kWarps + (kOrdered ? kWarpgroups : 0) + 1);
    }
    for (int i = 0; i < kWarpgroups * C::kDqSlots; ++i) {
      ptx::mbarrier_init(C::kDqFull + 8 * i, kWarps / kWarpgroups);
      ptx::mbarrier_init(C::kDqFree + 8 * i, 1);
    }
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(C::kFull + 8 * i, 1);
      ptx::mbarrier_init(C::kFree + 8 * i, kWarps);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  __syncthreads();
  // Through shuffles, so that the compiler knows them to be the same in the whole warp: descriptors are then uniform.
  const int warpgroup = uniform(int(threadIdx.x) / 128);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<24>();
    if (threadIdx.x / 32 == 3) {
      count_items_done<kDim, kHalf, kOrdered>(p);
    } else if (threadIdx.x == 0) {
      load<kDim, kHalf>(p);
    } else if (kOrdered && (threadIdx.x == 32 || threadIdx.x == 64)) {
      reduce_rows<kDim, kHalf>(p, threadIdx.x / 32 - 1);
    }
  } else {
    ptx::setmaxnreg_inc<240>();
    Warpgroup<kDim, kHalf, kOrdered>{p, warpgroup - 1, uniform(int(threadIdx.x) / 32 % 4), int(threadIdx.x) % 32}.run();
  }
}

}  // namespace bwd_sm90

namespace {

using namespace bwd_sm90;

// ---- host ---------------------------------------------------------------------------------------------------------

Status supports(const AttentionBwd& a) {
  constexpr const char* op = "attention_bwd";
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
  if (!a.row_exponent && s.total_out > 0) {
    return unsupported("%s: sm90: row_exponent must be given, got null", op);
  }
  if (a.ds_dtype != Dtype::e4m3) {
    return unsupported("%s: sm90: ds_dtype must be e4m3, got %s", op, dtype_name(a.ds_dtype));
  }
  const double records = double(s.num_heads_q) * double(padded_token_count(s.total_out, s.seq_out())) / kRows;
  if (records >= double(1 << 30)) {
    return unsupported("%s: sm90: tiles of rows must be fewer than 2^30, got %g", op, records);
  }
  int reserved = 0;
  MXFLASH_TRY(cuda_status(
      cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, a.q.data.device.index), op));
  if (reserved != kReservedBytes) {  // addresses of shared memory are constants
    return unsupported("%s: sm90: shared memory that CUDA reserves for a block must be %d bytes, got %d", op,
                       kReservedBytes, reserved);
  }
  return check_work_items(op, kSm90.name, s, {"keys", s.num_heads_kv, s.total_k, s.max_seqlen_k, s.seq_k, kKeys});
}

// Key tiles of a head, whatever the lengths: not fewer than there are.
int64_t key_tile_bound(const AttentionShape& s) {
  return s.seq_k.cu_seqlens ? s.total_k / kKeys + s.batch : s.batch * ceil_div(s.max_seqlen_k, int64_t(kKeys));
}

// Key heads whose key tiles are taken side by side. One after the other is best for the L2 cache; but where key tiles
// are of unequal length the last heads' long ones must not be left for the end, so up to 16 fill the card twice, or
// some more where else a few would be left over (of many heads, one that fills the card by itself stays alone); and
// where dQ is added in order, CTAs that work on the same head wait for each other. Heads of one sequence, where
// sequences have lengths of their own.
int32_t heads_at_once(const Call& call, bool has_mask) {
  constexpr int64_t kSideBySide = 16;
  const AttentionShape& s = call.shape;
  const int64_t heads = std::max<int64_t>(s.seq_k.cu_seqlens ? s.num_heads_kv : s.batch * s.num_heads_kv, 1);
  const int64_t tiles = std::max<int64_t>(key_tile_bound(s) / std::max<int64_t>(s.batch, 1), 1);  // of a head, about
  const int64_t card = multiprocessor_count();
  const bool alone = !has_mask || (2 * tiles > card && heads * tiles > 8 * card);
  int64_t least = alone ? 1 : std::min(ceil_div(2 * card, tiles), kSideBySide);
  if (call.ordered) least = kSideBySide;
  if (least >= heads) return int32_t(heads);
  const auto missing = [&](int64_t side) { return round_up(heads, side) - heads; };  // in the last ones
  int64_t best = least;
  for (int64_t side = least; side < 2 * least; ++side) {
    if (missing(side) < missing(best)) best = side;
  }
  return int32_t(best);
}

// Key heads whose dQ pre clears: two rounds of items, if the main kernel, which has memory's time to spare, can clear
// the others' ahead. That takes heads one after the other, and as many items for each.
int32_t cleared_heads(const Call& call, bool has_mask) {
  const AttentionShape& s = call.shape;
  if (call.ordered || s.seq_k.cu_seqlens || call.seq_out.cu_seqlens || heads_at_once(call, has_mask) != 1)
    return INT32_MAX;
  const int64_t tiles = ceil_div(s.max_seqlen_k, int64_t(kKeys)), heads = s.batch * s.num_heads_kv;
  if (tiles == 0) return INT32_MAX;
  const int64_t first = ceil_div(2 * int64_t(multiprocessor_count()), tiles);
  return 2 * first <= heads ? int32_t(first) : INT32_MAX;
}

size_t workspace(const AttentionBwd& a) {
  const DeviceGuard guard(a.q.data.device.index);
  size_t used = 0;
  Call(a, nullptr, &used);
  return used;
}

Gradient gradient(const Tensor& given, const MxTensor& mx, float* fp32, int64_t dim, double factor,
                  const AttentionBwd& a, bool rotated) {
  Gradient g{.out = given,
             .dim = int32_t(dim),
             .rotation = rotated && a.rotate_qk ? int32_t(rotation_group(dim)) : 1,
             .factor = float(factor),
             .wide = false,
             .signs = RotationSigns::of(a.rotate_seed)};
  if (mx) {
    g.out = make_tensor(fp32, Dtype::f32, mx.data.shape[0], mx.data.shape[1], mx.data.shape[2]);
    g.out.device = mx.data.device;
  }
  g.wide = g.out.dtype != Dtype::f32 && reinterpret_cast<uintptr_t>(g.out.data) % 16 == 0 && g.out.stride[0] % 8 == 0 &&
           g.out.stride[1] % 8 == 0;
  return g;
}

template <int kDim, bool kHalf>
Status launch_kernel(const Params& params, bool ordered, int grid, Stream stream) {
  const Launch at{.what = "attention_bwd: sm90",
                  .grid = dim3(uint32_t(grid)),
                  .block = dim3(kThreads),
                  .shared_bytes = Config<kDim, kHalf>::kBytes,
                  .stream = stream,
                  .overlaps = true};
  return launch(at, ordered ? attention_bwd_kernel<kDim, kHalf, true> : attention_bwd_kernel<kDim, kHalf, false>,
                params);
}

Status run(const AttentionBwd& a, Stream stream) {
  const DeviceGuard guard(a.q.data.device.index);
  MXFLASH_TRY(guard.status());
  Call call(a, a.workspace);
  const AttentionShape& s = call.shape;
  if (call.w.plan.order) {
    MXFLASH_TRY(write_attention_plan(call.w.plan, call.seq_out, {s.seq_k.cu_seqlens, 1, kKeys}, stream));
  }
  const bool has_mask = a.mask.causal || a.mask.window_left >= 0 || a.mask.window_right >= 0;
  call.cleared_heads = cleared_heads(call, has_mask);
  MXFLASH_TRY(pre(a, call, stream));
  const Params params{
      .rows = call.w.rows,
      .keys = call.w.keys,
      .key_tile = call.w.key_tile,
      .head_scale = call.w.head_scale,
      .dq = call.w.dq,
      .dq_turn = call.w.dq_turn,
      .sums = call.w.sums,
      .gradient = {gradient(a.dv, a.dv_mx, call.w.dv, s.head_dim_v, 1, a, false),
                   gradient(a.dk, a.dk_mx, call.w.dk, s.head_dim, s.softmax_scale, a, true)},
      .out_axis = TokenAxis::of(s.total_out, call.seq_out),
      .k_axis = TokenAxis::of(s.total_k, s.seq_k),
      .mask = a.mask,
      .plan = call.w.plan,
      .heads_kv = int32_t(s.num_heads_kv),
      .group = int32_t(s.group),
      .row_tiles = call.row_tiles,
      .key_tiles = call.key_tiles,
      .max_key_tiles = int32_t(ceil_div(s.max_seqlen_k, kKeys)),
      .cleared_heads = call.cleared_heads,
      .heads_at_once = heads_at_once(call, has_mask),
      .has_mask = has_mask,
      .scale_log2 = float(s.softmax_scale * double(kLog2e)),
  };
  const int64_t items = s.num_heads_kv * key_tile_bound(s);
  const int grid = int(std::min<int64_t>(multiprocessor_count(), items));
  const auto kernel = call.half_dq ? (call.dim == 128 ? launch_kernel<128, true> : launch_kernel<64, true>)
                                   : (call.dim == 128 ? launch_kernel<128, false> : launch_kernel<64, false>);
  MXFLASH_TRY(kernel(params, call.ordered, grid, stream));
  return post(a, call, stream);
}

}  // namespace

const Impl<AttentionBwd> kAttentionBwdSm90 = sm90_backend<AttentionBwd>(supports, run, workspace);

}  // namespace mxflash
