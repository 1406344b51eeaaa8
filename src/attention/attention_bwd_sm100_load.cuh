// The load warp of both kernels of the backward on Blackwell, and what a stage holds.
//
// Payloads come by TMA, straight from the packed tensors; a tile that the end of its sequence crosses is filled by
// hand. The scales of a tile are 2 x kDim / 32 bytes in memory. They are expanded here to what tcgen05.cp takes: by
// rows where the contraction runs over channels, transposed where it runs over the tile's rows.
#pragma once

#include "attention/attention_bwd_sm100.cuh"

namespace mxflash::bwd_sm100 {

// Offsets in a stage.
template <bool kKeys, int kDim>
struct Stage {
  static constexpr uint32_t kTileBytes = kTileRows * kDim;
  static constexpr uint32_t kFirst = 0, kSecond = kTileBytes;                      // q or k; dout or v
  static constexpr uint32_t kFirstRowScales = 2 * kTileBytes;                      // of S
  static constexpr uint32_t kFirstColumnScales = kFirstRowScales + kScaleBytes;    // of dK or dQ
  static constexpr uint32_t kSecondRowScales = kFirstColumnScales + kScaleBytes;   // of dP
  static constexpr uint32_t kSecondColumnScales = kSecondRowScales + kScaleBytes;  // of dV; these three: keys only
  static constexpr uint32_t kWeightScales = kSecondColumnScales + kScaleBytes;
  static constexpr uint32_t kStatistics = kWeightScales + kScaleBytes;
  static constexpr uint32_t kEnd = kKeys ? kStatistics + uint32_t(sizeof(RowStatistics)) : kSecondColumnScales;
  static constexpr uint32_t kBytes = (kEnd + 1023) / 1024 * 1024;  // swizzled tiles begin at multiples of it
  static constexpr uint32_t kArrivals = 2;  // of full[]: copies are on their way; scales are there
};

// The scales of a tile, as they are in memory: a word has a block of 32 rows.
struct TileScales {
  uint32_t first[2], second[2];
  uint32_t weights;  // of P8, both blocks
};

__device__ __forceinline__ const RowStatistics* statistics_of(const Params& p, const Rows& out, int head, int row) {
  return p.statistics + head * p.statistics_head + (out.padded + row) / kTileRows;
}

template <bool kKeys, int kDim>
__device__ __forceinline__ TileScales fetch_scales(const Params& p, const Block& block, int head, int first) {
  TileScales s{};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    s.first[i] = scales_of<kDim>(p.streamed[0], head, block.streamed[0], first + 32 * i);
    s.second[i] = scales_of<kDim>(p.streamed[1], head, block.streamed[1], first + 32 * i);
    if constexpr (kKeys) {
      const uint32_t pe = statistics_of(p, block.streamed[1], head, first)->exponent[i];
      s.weights |= (uint32_t(kE8m0Bias) - pe) << (8 * i);
    }
  }
  return s;
}

// Heads of streamed rows that an own head meets.
__device__ __forceinline__ int streamed_heads(const Params& p) {
  return ptx::fault(kFaultGroup) ? 1 : p.streamed_per_own;
}

// For a whole warp. `full` and `empty` are kStages barriers each.
template <bool kKeys, int kDim>
__device__ __forceinline__ void load_tiles(const Params& p, uint32_t stages, uint32_t full, uint32_t empty) {
  using S = Stage<kKeys, kDim>;
  const int lane = ptx::lane_id();
  uint32_t n = 0;  // tiles so far
  Blocks<kKeys> blocks(p);
  for (Block block; blocks.next(block);) {
    const int total = block.num_tiles * streamed_heads(p);
    if (total == 0) continue;
    int head = block.own_head * p.streamed_per_own / p.own_per_streamed, tile = block.first_tile;
    TileScales next = fetch_scales<kKeys, kDim>(p, block, head, tile * kTileRows);
#pragma unroll 1
    for (int i = 0; i < total; ++i, ++n) {
      const TileScales scales = next;
      const int first = tile * kTileRows, its_head = head;
      if (++tile == block.first_tile + block.num_tiles) tile = block.first_tile, ++head;
      if (i + 1 < total) next = fetch_scales<kKeys, kDim>(p, block, head, tile * kTileRows);

      const uint32_t at = n % kStages, stage = stages + at * S::kBytes, bar = full + 8 * at;
      if (n >= kStages && !ptx::fault(kFaultNoEmptyStage)) ptx::mbarrier_wait(empty + 8 * at, (n / kStages - 1) & 1);
      const bool whole = first + kTileRows <= block.streamed[0].length || ptx::fault(kFaultTailBytes);
      if (lane == 0) {
        const uint32_t bytes = (whole ? 2 * S::kTileBytes : 0) + (kKeys ? uint32_t(sizeof(RowStatistics)) : 0);
        ptx::mbarrier_arrive_expect_tx(bar, bytes);
        if (whole) {
          ptx::tensor_load_3d(stage + S::kFirst, &p.map[0], 0, its_head, block.streamed[0].start + first, bar);
          ptx::tensor_load_3d(stage + S::kSecond, &p.map[1], 0, its_head, block.streamed[1].start + first, bar);
        }
        if constexpr (kKeys) {
          ptx::bulk_load(stage + S::kStatistics, statistics_of(p, block.streamed[1], its_head, first),
                         sizeof(RowStatistics), bar);
        }
      }
      __syncwarp();
      if (!whole) {
        fill_tile<kDim>(p.streamed[0], its_head, block.streamed[0], first, stage + S::kFirst);
        fill_tile<kDim>(p.streamed[1], its_head, block.streamed[1], first, stage + S::kSecond);
      }
      const auto by_rows = [](const uint32_t(&s)[2]) { return make_uint4(s[0], s[1], 0, 0); };
      put_scales(stage + S::kFirstRowScales, by_rows(scales.first));
      put_scales(stage + S::kFirstColumnScales, transposed_scales(scales.first[0], scales.first[1]));
      put_scales(stage + S::kSecondRowScales, by_rows(scales.second));
      if constexpr (kKeys) {
        put_scales(stage + S::kSecondColumnScales, transposed_scales(scales.second[0], scales.second[1]));
        put_scales(stage + S::kWeightScales,
                   make_uint4(scales.weights, scales.weights, scales.weights, scales.weights));
      }
      if (!ptx::fault(kFaultNoProxyFence)) ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(bar);
    }
  }
  // Nothing may be on its way to a barrier of a CTA that has left.
  for (uint32_t i = n < kStages ? 0 : n - kStages; i < n; ++i) {
    if (!ptx::fault(kFaultNoLastCommit)) ptx::mbarrier_wait(empty + 8 * (i % kStages), i / kStages & 1);
  }
}

// ---- what both kernels are made of ----------------------------------------------------------------------------------

// The CTA's tensor memory, by all threads, behind the initialisation of barriers.
template <class C>
__device__ __forceinline__ uint32_t take_columns(uint32_t shared, int warp) {
  if (warp == kPairWarp) {
    ptx::tcgen05_alloc<C::kColumns>(shared + C::kPointer);
    ptx::tcgen05_relinquish_alloc_permit();
  }
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  return ptx::load_shared<uint32_t>(shared + C::kPointer);
}

// Everyone's part, and tensor memory given back.
template <bool kKeys, class C, class Warpgroup, class Products>
__device__ __forceinline__ void play_roles(const Params& p, uint32_t shared, uint32_t tmem, int warp) {
  if (warp < kPairWarp) {
    ptx::setmaxnreg_inc<144>();
    Warpgroup{p, shared, tmem, warp / 4, {warp % 4}}.run();
  } else {
    ptx::setmaxnreg_dec<80>();
    const Products products{p, shared, tmem};
    if (warp == kPairWarp) {
      if (ptx::tcgen05_elect()) products.run_pairs();
    } else if (warp == kSumWarp) {
      if (ptx::tcgen05_elect()) products.run_sums();
    } else if (warp == kLoadWarp) {
      load_tiles<kKeys, C::kDim>(p, shared + C::kStageAt, shared + C::kFull, shared + C::kEmpty);
    }
  }
  __syncwarp();  // the thread that issued products is back
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  if (warp == kPairWarp) {
    ptx::tcgen05_fence_after_thread_sync();
    ptx::tcgen05_dealloc<C::kColumns>(ptx::load_shared<uint32_t>(shared_base() + C::kPointer));
  }
}

}  // namespace mxflash::bwd_sm100
