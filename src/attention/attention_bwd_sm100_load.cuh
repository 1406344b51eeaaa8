// The load warp of both kernels of the backward on Blackwell, and what a stage holds.
//
// Payloads come by TMA, straight from the packed tensors, a copy for each span of channels; a tile that the end of its
// sequence crosses is filled by hand. The scales of a tile are 2 x kDim / 32 bytes in memory. They are expanded here to
// what tcgen05.cp takes: by rows where the contraction runs over channels, transposed where it runs over the tile's
// rows.
#pragma once

#include "attention/attention_bwd_sm100.cuh"

namespace mxflash::bwd_sm100 {

// What a pass of the keys' kernel makes.
enum class Sums { both, dv, dk };

// Offsets in a stage. kDim channels of q or k, kDimV of dout or v.
template <bool kKeys_, int kDim, int kDimV, Sums kSums = Sums::both>
struct Stage {
  static constexpr bool kKeys = kKeys_;
  static constexpr bool kMakesDs = !kKeys || kSums != Sums::dv, kMakesDv = kKeys && kSums != Sums::dk;
  // Then the transposed scales of both operands share words: bytes 0 and 1 are the first one's.
  static constexpr bool kOneColumnTile = kMakesDs && kMakesDv && kDim > 128;
  static constexpr uint32_t kTileBytes = kTileRows * kDim, kTilesBytes = kTileRows * (kDim + kDimV);
  static constexpr uint32_t kFirst = 0, kSecond = kTileBytes;                    // q or k; dout or v
  static constexpr uint32_t kFirstRowScales = kTilesBytes;                       // of S
  static constexpr uint32_t kFirstColumnScales = kFirstRowScales + kScaleBytes;  // of dK or dQ
  static constexpr uint32_t kSecondRowScales =                                   // of dP
      kFirstColumnScales + (kMakesDs ? kGroups<kDim> * kScaleBytes : 0);
  static constexpr uint32_t kSecondColumnScales =  // of dV; these three: keys only
      kSecondRowScales + (kMakesDs ? kScaleBytes : 0);
  static constexpr uint32_t kWeightScales =
      kSecondColumnScales + (kMakesDv && !kOneColumnTile ? kGroups<kDimV> * kScaleBytes : 0);
  static constexpr uint32_t kStatistics = kWeightScales + (kMakesDv ? kScaleBytes : 0);
  static constexpr uint32_t kEnd = kKeys ? kStatistics + uint32_t(sizeof(RowStatistics)) : kSecondColumnScales;
  static constexpr uint32_t kBytes = (kEnd + 1023) / 1024 * 1024;  // swizzled tiles begin at multiples of it
  static constexpr uint32_t kArrivals = 2;  // of full[]: copies are on their way; scales are there
};

// How many stages there are beside `others` bytes.
constexpr int stages_beside(uint32_t others, uint32_t stage_bytes) {
  const int count = int((kSharedLimit - others) / stage_bytes);
  return count < kMostStages ? count : kMostStages;
}

// The scales of a tile, as they are in memory: a word has a group of a block of 32 rows.
template <int kDim, int kDimV>
struct TileScales {
  uint32_t first[kGroups<kDim>][2], second[kGroups<kDimV>][2];
  uint32_t weights;  // of P8, both blocks
};

__device__ __forceinline__ const RowStatistics* statistics_of(const Params& p, const Rows& out, int head, int row) {
  return p.statistics + head * p.statistics_head + (out.padded + row) / kTileRows;
}

template <class C>
__device__ __forceinline__ TileScales<C::kDim, C::kDimV> fetch_scales(const Params& p, const Block& block, int head,
                                                                      int first) {
  TileScales<C::kDim, C::kDimV> s{};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int g = 0; g < kGroups<C::kDim>; ++g) {
      s.first[g][i] = scales_of<C::kDim>(p.streamed[0], head, block.streamed[0], first + 32 * i, g);
    }
#pragma unroll
    for (int g = 0; g < kGroups<C::kDimV>; ++g) {
      s.second[g][i] = scales_of<C::kDimV>(p.streamed[1], head, block.streamed[1], first + 32 * i, g);
    }
    if constexpr (C::Tile::kKeys) {
      const uint32_t pe = statistics_of(p, block.streamed[1], head, first)->exponent[i];
      s.weights |= (uint32_t(kE8m0Bias) - pe) << (8 * i);
    }
  }
  return s;
}

// For a whole warp: scales of 64 rows by rows, two words a group; a tile has room for two groups.
template <int kCount>
__device__ __forceinline__ void put_row_scales(uint32_t tile, const uint32_t (&s)[kCount][2]) {
  put_scales(tile, make_uint4(s[0][0], s[0][1], kCount > 1 ? s[kCount - 1][0] : 0, kCount > 1 ? s[kCount - 1][1] : 0));
}
// And transposed, a tile a group.
template <int kCount>
__device__ __forceinline__ void put_column_scales(uint32_t tile, const uint32_t (&s)[kCount][2]) {
#pragma unroll
  for (int g = 0; g < kCount; ++g) put_scales(tile + g * kScaleBytes, transposed_scales(s[g][0], s[g][1]));
}

// Heads of streamed rows that an own head meets.
__device__ __forceinline__ int streamed_heads(const Params& p) {
  return ptx::fault(kFaultGroup) ? 1 : p.streamed_per_own;
}

// One box of each span.
template <int kDim>
__device__ __forceinline__ void load_tile(uint32_t tile, const ptx::TensorMap* map, int head, int token, uint32_t bar) {
  constexpr int kSpan = span_of(kDim);
#pragma unroll
  for (int s = 0; s < kSpans<kDim>; ++s) {
    ptx::tensor_load_3d(tile + s * kTileRows * kSpan, map, s * kSpan, head, token, bar);
  }
}

// For a whole warp. `full` and `empty` are kStages barriers each.
template <class C>
__device__ __forceinline__ void load_tiles(const Params& p, uint32_t stages, uint32_t full, uint32_t empty) {
  using S = typename C::Tile;
  constexpr uint32_t kStages = C::kStages;
  const int lane = ptx::lane_id();
  uint32_t n = 0;  // tiles so far
  Blocks<S::kKeys> blocks(p);
  for (Block block; blocks.next(block);) {
    const int total = block.num_tiles * streamed_heads(p);
    if (total == 0) continue;
    int head = block.own_head * p.streamed_per_own / p.own_per_streamed, tile = block.first_tile;
    auto next = fetch_scales<C>(p, block, head, tile * kTileRows);
#pragma unroll 1
    for (int i = 0; i < total; ++i, ++n) {
      const auto scales = next;
      const int first = tile * kTileRows, its_head = head;
      if (++tile == block.first_tile + block.num_tiles) tile = block.first_tile, ++head;
      if (i + 1 < total) next = fetch_scales<C>(p, block, head, tile * kTileRows);

      const uint32_t at = n % kStages, stage = stages + at * S::kBytes, bar = full + 8 * at;
      if (n >= kStages && !ptx::fault(kFaultNoEmptyStage)) ptx::mbarrier_wait(empty + 8 * at, (n / kStages - 1) & 1);
      const bool whole = first + kTileRows <= block.streamed[0].length || ptx::fault(kFaultTailBytes);
      if (lane == 0) {
        const uint32_t bytes = (whole ? S::kTilesBytes : 0) + (S::kKeys ? uint32_t(sizeof(RowStatistics)) : 0);
        ptx::mbarrier_arrive_expect_tx(bar, bytes);
        if (whole) {
          load_tile<C::kDim>(stage + S::kFirst, &p.map[0], its_head, block.streamed[0].start + first, bar);
          load_tile<C::kDimV>(stage + S::kSecond, &p.map[1], its_head, block.streamed[1].start + first, bar);
        }
        if constexpr (S::kKeys) {
          ptx::bulk_load(stage + S::kStatistics, statistics_of(p, block.streamed[1], its_head, first),
                         sizeof(RowStatistics), bar);
        }
      }
      __syncwarp();
      if (!whole) {
        fill_tile<C::kDim>(p.streamed[0], its_head, block.streamed[0], first, stage + S::kFirst);
        fill_tile<C::kDimV>(p.streamed[1], its_head, block.streamed[1], first, stage + S::kSecond);
      }
      put_row_scales(stage + S::kFirstRowScales, scales.first);
      if constexpr (S::kOneColumnTile) {
#pragma unroll
        for (int g = 0; g < kGroups<C::kDim>; ++g) {
          const bool both = g < kGroups<C::kDimV>;
          put_scales(stage + S::kFirstColumnScales + g * kScaleBytes,
                     transposed_scales(scales.first[g][0], scales.first[g][1], both ? scales.second[g][0] : 0,
                                       both ? scales.second[g][1] : 0));
        }
      } else if constexpr (S::kMakesDs) {
        put_column_scales(stage + S::kFirstColumnScales, scales.first);
      }
      if constexpr (S::kMakesDs) put_row_scales(stage + S::kSecondRowScales, scales.second);
      if constexpr (S::kMakesDv) {
        if constexpr (!S::kOneColumnTile) put_column_scales(stage + S::kSecondColumnScales, scales.second);
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
template <class C, class Warpgroup, class Products>
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
      load_tiles<C>(p, shared + C::kStageAt, shared + C::kFull, shared + C::kEmpty);
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
