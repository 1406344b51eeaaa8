// What a warp of a consumer warpgroup does in every attention kernel: it has 16 of the 64 query rows of its warpgroup,
// a quad of threads rows r and r + 8 of them.
#pragma once

#include "attention/work_items.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/warp.cuh"

namespace mxflash {

constexpr int kRows = 64;  // of a warpgroup

struct ConsumerWarp {
  const int warpgroup, warp;  // warp within the warpgroup

  // For the whole warp: what its threads read before, they have read.
  __device__ void release(uint32_t bar) const {
    __syncwarp();
    if (ptx::elect_one()) ptx::mbarrier_arrive(bar);
  }

  // This thread's row `r`, in its sequence.
  __device__ __forceinline__ int row_index(const WorkItem& item, int r) const {
    return item.first_row + warpgroup * kRows + warp * 16 + ptx::lane_id() / 4 + 8 * r;
  }

  // Scores of keys from first_key on, -inf where a row does not see the key.
  template <class C, int kScores>
  __device__ __forceinline__ void mask_scores(const WorkItems& w, const WorkItem& item, int first_key,
                                              float (&s)[kScores]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = min(row_index(item, r), item.seqlen_q - 1);
      const Range keys = row_keys<C>(w, i, i + 1, item.seqlen_q, item.seqlen_k);
      const int column = first_key + 2 * (ptx::lane_id() & 3);  // of this thread's first score
      const int first = int(keys.first) - column, end = int(keys.end) - column;
#pragma unroll
      for (int j = 0; j < kScores; ++j) {
        if ((j >> 1 & 1) != r) continue;
        const int key = 8 * (j >> 2) + (j & 1);
        if (key < first || key >= end) s[j] = -INFINITY;
      }
    }
  }

  // Of these keys, those that the item has.
  template <class C>
  __device__ __forceinline__ Range item_keys(const WorkItem& item, Range keys) const {
    if constexpr (C::kSplit) {
      keys.first = max(keys.first, int64_t(item.first_tile) * C::kBlockN);
      keys.end = min(keys.end, int64_t(item.first_tile + item.num_tiles) * C::kBlockN);
    }
    return keys;
  }

  // Whether some value of a key outside `keys`, in the tiles that the warpgroup's rows read, is poison(token, channel):
  // 0 NaN is NaN, so it got into rows that do not see it. Nothing of it is worth a register in the main loop.
  template <class C, class Poison>
  __device__ __forceinline__ bool hides(const WorkItems& w, const WorkItem& item, Range keys, Poison&& poison) const {
    const int first_row = item.first_row + ptx::hidden(warpgroup) * kRows;
    const Range any = item_keys<C>(
        item, row_keys<C>(w, first_row, min(first_row + kRows, item.seqlen_q), item.seqlen_q, item.seqlen_k));
    const int64_t end = min(round_up(any.end, C::kBlockN), int64_t(item.seqlen_k));
    bool found = false;
#pragma unroll 1
    for (int64_t key = any.first / C::kBlockN * C::kBlockN; key < end; ++key) {
      if (key == keys.first) key = keys.end;
      if (key >= end) break;
#pragma unroll 1
      for (int c = ptx::lane_id(); c < C::kDimV; c += 32) found |= poison(item.k_padded + key, c);
    }
    return __any_sync(~0u, found);
  }
};

// Whether an accumulator is NaN or Inf, in some thread of the warp.
template <int kAcc>
__device__ __forceinline__ bool any_not_finite(const float (&o)[kAcc]) {
  float nan = 0;
#pragma unroll
  for (int j = 0; j < kAcc; ++j) nan = fmaf(o[j], 0.0f, nan);
  return __any_sync(~0u, nan != nan);
}

}  // namespace mxflash
