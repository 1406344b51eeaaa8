// Attention forward on Blackwell (sm_100a): the tensor core multiplies MXFP8 with its scales. docs/blackwell.md tells
// the why, and what has been proven without the chip.
//
//   s = softmax_scale log2(e) q.k    P = E4M3(2^(s - m + 8)), scale 2^-8    out = sum P v / sum P    lse = ln sum 2^s
//
// over key tiles in ascending order, m a reference that moves to the row's maximum only when a score exceeds it by more
// than kSlack binades, so P <= 448. lse is from the unrounded P in fp32; out's denominator is the sum of the rounded P,
// which the tensor core adds up as 16 more channels of V that are all one: v = 1 gives out = 1.
//
// CTA: persistent, one an SM; a work item is a block of 256 query rows of one head of one sequence, in two sides of
// 128; of values of more than 128 channels one side, of 128 rows. The key tiles (128) that some row sees are loaded
// once for both sides. Of two sides (of one, correction and the others have the warps from 4 and from 8 on):
//   warps 0-3, 4-7   softmax of side 0, 1: a thread has a row
//   warps 8-11       correction: rescales O, results
//   warp 12, 15      qk, pv: a thread issues the products Q K^T; P V. Warp 12 owns tensor memory
//   warp 13          loader: takes items, loads tiles, expands scales
//   warp 14          repairer: rows that a NaN from behind the mask has got into, once more
// Operands come straight from the packed tensors by the copy engine, one payload for K-major (Q, K) and MN-major (V).
// Of a square block 16 bytes of scales a tile come from memory; the 512 that the tensor core wants are made on chip.
//
// Both sides have one S: softmax lifts its 128 scores into registers at once, and the product of the other side with V
// runs meanwhile. Sides alternate, over the ends of items: S of the next item is made while this one's P V runs.
//
// Barriers (arrivals per phase; i an item slot, b a query buffer, t a stage of the ring, s a side):
//   item_known[i]        1            an item is looked up                          loader -> all
//   item_free[i]         12, 13 warps nobody needs it any more (13 with a mask;     softmax, correction, repairer -> ..
//                                     of one side 8, 9)
//   q_full[b][s]         1 + bytes    query rows and their scales are there         loader -> qk
//   q_free[b]            commit       all products of the item with them are done   qk -> loader
//   k_full[t], v_full[t] 1 (+ bytes)  a tile and its scales are there               loader -> qk, pv
//   k_free[t], v_free[t] commit       all products with it are done                 qk, pv -> loader
//   s_full[s]            commit       S of side s is complete                       qk -> softmax s
//   s_free               4 warps      S is lifted into registers                    softmax -> qk
//   p_full[s]            4 + 4 warps  P is stored; O is rescaled, or free           softmax s, correction -> pv
//   pv_done[s]           commit       O is accumulated, P is read                   pv -> softmax s, correction
//   statistic_full[s]    4 warps      factor, or sum, reference and maximum         softmax s -> correction
//   statistic_free[s]    4 warps      read, and O rescaled                          correction -> softmax s
//   broken_known[s]      4 warps      which rows have met a NaN (with a mask)       correction -> repairer
//   broken_read          1            and of both sides they are made               repairer -> correction
// Memory and registers:
//   head_dim   queries     keys        values + ones    staging  scales  tensor memory   softmax  correction  others
//   128, 128   4 x 16 KiB  3 x 16 KiB  3 x 16 + 4 KiB   34 KiB   5 KiB   508 columns     168      80          96
//   192, 128   4 x 24 KiB  2 x 24 KiB  2 x 16 + 4 KiB   34 KiB   7 KiB   512 columns     168      80          96
//   256, 256   2 x 32 KiB  2 x 32 KiB  2 x 32 + 4 KiB   18 KiB   6 KiB   460 columns     208      80          96
#pragma once

#include "attention/attention_fwd_sm100_correction.cuh"
#include "attention/attention_fwd_sm100_loader.cuh"
#include "attention/attention_fwd_sm100_mma.cuh"
#include "attention/attention_fwd_sm100_repair.cuh"
#include "attention/attention_fwd_sm100_softmax.cuh"

namespace mxflash::fwd_sm100 {

constexpr int kSoftmaxWarps = 4, kCorrectionWarps = 4;  // of a side, of both
template <class C>
struct Warps {  // of the last warpgroup
  static constexpr int kScore = C::kSides * kSoftmaxWarps + kCorrectionWarps, kLoader = kScore + 1,
                       kRepairer = kScore + 2, kValue = kScore + 3;
};

template <class C>
__device__ __forceinline__ void init_barriers(const Params& p, const Shared<C> shared) {
  for (int i = 0; i < kItems; ++i) {
    ptx::mbarrier_init(shared.item_known(i), 1);
    ptx::mbarrier_init(shared.item_free(i), C::kSides * kSoftmaxWarps + kCorrectionWarps + (p.items.has_mask ? 1 : 0));
  }
  for (int i = 0; i < kBuffers; ++i) {
    for (int side = 0; side < C::kSides; ++side) ptx::mbarrier_init(shared.q_full(i, side), 1);
    ptx::mbarrier_init(shared.q_free(i), 1);
  }
  for (int i = 0; i < C::kStages; ++i) {
    ptx::mbarrier_init(shared.k_full(i), 1);
    ptx::mbarrier_init(shared.v_full(i), 1);
    ptx::mbarrier_init(shared.k_free(i), 1);
    ptx::mbarrier_init(shared.v_free(i), 1);
  }
  for (int side = 0; side < C::kSides; ++side) {
    ptx::mbarrier_init(shared.s_full(side), 1);
    ptx::mbarrier_init(shared.p_full(side), kSoftmaxWarps + kCorrectionWarps);
    ptx::mbarrier_init(shared.pv_done(side), 1);
    ptx::mbarrier_init(shared.statistic_full(side), kSoftmaxWarps);
    ptx::mbarrier_init(shared.statistic_free(side), kCorrectionWarps);
    ptx::mbarrier_init(shared.broken_known(side), kCorrectionWarps);
  }
  ptx::mbarrier_init(shared.broken_read(), 1);
  ptx::mbarrier_init(shared.s_free(), kSoftmaxWarps);
  ptx::fence_mbarrier_init();
}

// What stays the same in shared and tensor memory: the columns of ones, and the scales of P.
template <class C>
__device__ __forceinline__ void write_constants(const Params& p, const Shared<C> shared, uint32_t tmem, int warp) {
  if (warp >= 4) return;
  const uint32_t ones = ones_code(p.v.dtype);
  for (int i = int(threadIdx.x) * 16; i < C::kOnesBytes; i += kLanes * 16) {
    ptx::store_shared(shared.base + C::kOnesAt + i, make_uint4(ones, ones, ones, ones));
  }
  ptx::fence_proxy_async();
  const uint32_t scales[4] = {kScaleP, kScaleP, kScaleP, kScaleP};
  const uint32_t lanes = uint32_t(32 * warp) << 16;
  for (int side = 0; side < C::kSides; ++side) ptx::tcgen05_st(tmem + lanes + C::p_scale(side).first, scales);
  ptx::tcgen05_wait_st();
}

template <class C>
__device__ __forceinline__ void attention_fwd(const Params& p) {
  const Shared<C> shared{(ptx::shared_address(ptx::dynamic_shared()) + 1023) / 1024 * 1024};
  // Through a shuffle, so that the compiler knows it to be the same in the whole warp: descriptors are then uniform.
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) init_barriers(p, shared);
  if (warp == Warps<C>::kScore) ptx::tcgen05_alloc<512>(shared.base + C::kTmemBase);
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  const uint32_t tmem = ptx::load_shared<uint32_t>(shared.base + C::kTmemBase);
  write_constants(p, shared, tmem, warp);
  clear_slack_rows(p.to, p.items.seq_q);
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();

  const int row = warp % 4 * 32 + ptx::lane_id();  // of a side: the lane of tensor memory that this thread can reach
  if (warp < C::kSides * kSoftmaxWarps) {
    ptx::setmaxnreg_inc<C::kSoftmaxRegisters>();
    Softmax<C>{p, shared, tmem, warp / kSoftmaxWarps, row}.run();
  } else if (warp < Warps<C>::kScore) {
    ptx::setmaxnreg_dec<C::kCorrectionRegisters>();
    Correction<C>{p, shared, tmem, row}.run();
  } else {
    ptx::setmaxnreg_dec<C::kOtherRegisters>();
    if (warp == Warps<C>::kScore) ScoreIssuer<C>::of(p, shared, tmem).run();
    if (warp == Warps<C>::kValue) ValueIssuer<C>::of(p, shared, tmem).run();
    if (warp == Warps<C>::kLoader) Loader<C>{p, shared, ptx::lane_id()}.run();
    if (warp == Warps<C>::kRepairer) Repairer<C>{p, shared, ptx::lane_id()}.run();
  }

  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  if (warp == Warps<C>::kScore) {
    ptx::tcgen05_relinquish_alloc_permit();
    ptx::tcgen05_dealloc<512>(tmem);
  }
}

}  // namespace mxflash::fwd_sm100
