// A consumer of the forward kernel on Hopper: a warpgroup with 64 query rows, through all key tiles of a work item.
#pragma once

#include <cfloat>

#include "attention/accumulators.cuh"
#include "attention/attention_fwd_sm90.cuh"
#include "mx/e8m0.h"
#include "ptx/convert.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"

namespace mxflash::fwd_sm90 {

// What a thread keeps of its two rows, r and r + 8 of its warp.
struct RowState {
  float reference[2] = {kUnseen, kUnseen};  // m
  float top[2] = {kOffset, kOffset};        // largest exponent so far, this thread's keys: s - m + kOffset
  float sum[2] = {0, 0};                    // of unrounded P, this thread's keys
};

// Of the copy of O in shared memory: its references, rounded sums and unit.
struct Promoted {
  float4 rows;
  int unit;
};

// 2^(from - to), 0 below fp32's normal numbers: takes a value from one unit to another.
__device__ __forceinline__ float unit_ratio(int from, int to) {
  return __int_as_float(min(max(from - to + kE8m0Bias, 0), 254) << 23);
}

// 2^e as the factor of one FMA; e is clamped to where it, and scores times it, stay normal and finite.
__device__ __forceinline__ float score_scale(float scale_log2, int q_scale, int k_scale) {
  const int e = min(max(q_scale + k_scale - 2 * kE8m0Bias, -126), 90);
  return fmaxf(scale_log2 * __int_as_float((e + 127) << 23), FLT_MIN);
}

template <int kCount>
__device__ __forceinline__ void scale_rows(float (&x)[kCount], float f0, float f1) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) x[j] *= j & 2 ? f1 : f0;
}

template <class C>
struct Consumer : ConsumerWarp {
  static constexpr int kDim = C::kDim, kDimV = C::kDimV, kBlockN = C::kBlockN;
  static constexpr int kScores = kBlockN / 2;  // registers of S
  static constexpr int kAcc = kDimV / 2;       // registers of O

  const Params& p;
  const Shared<C> shared;

  float s[kScores];
  float o[kAcc];
  float rounded[4];  // [2 r]: sum of E4M3 P times the weight of the thread's column, in tensor cores like O
  RowState row;
  int unit, max_unit;  // O is in units of 2^(unit - 127)
  Promoted kept;       // where it stays in registers

  __device__ uint32_t acc_address(int piece) const {
    return shared.base + C::kAcc + warpgroup * (C::kAccBytes / C::kWarpgroups) + piece * 2048 +
           (warp * 32 + ptx::lane_id()) * 16;
  }
  // Where acc_address keeps one element of the warpgroup's 64 rows. Nothing of it is worth a register in the main loop.
  __device__ uint32_t element_address(int r, int channel) const {
    return ptx::hidden(shared.base) + C::kAcc + ptx::hidden(warpgroup) * (C::kAccBytes / C::kWarpgroups) +
           channel / 8 * 2048 + (r / 16 * 32 + r % 8 * 4 + channel % 8 / 2) * 16 + (r % 16 / 8 * 2 + channel % 2) * 4;
  }
  __device__ __forceinline__ void store_accumulators() const {
#pragma unroll
    for (int j = 0; j < kAcc / 4; ++j) {
      ptx::store_shared(acc_address(j), make_float4(o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]));
    }
  }
  __device__ uint32_t state_address() const {
    return shared.base + C::kState + 16 * (warpgroup * 128 + warp * 32 + ptx::lane_id());
  }
  __device__ uint32_t unit_address() const {
    return shared.base + C::kState + 16 * 128 * C::kWarpgroups + 4 * (warpgroup * 128 + warp * 32 + ptx::lane_id());
  }
  // Where results of row `i` of the item's sequence go.
  __device__ __forceinline__ RowPlace place(const Item& item, int i) const {
    if constexpr (C::kSplit) return {item.out_start + i / p.items.pack, item.head * p.items.pack + i % p.items.pack};
    return {int64_t(item.out_start) + i, item.head};
  }
  __device__ __forceinline__ int64_t partial_index(const Item& item, int i) const {
    return p.partials.index(item.split, item.head, int64_t(item.out_start) * p.items.pack + i);
  }

  // S -> exponents where some row does not see all keys, or may not have seen any before: masks, and raises the
  // reference to the exact maximum.
  __device__ __forceinline__ void exponents_exact(const Item& item, int first_key, bool masked, float c);

  // Of some row of the warp. Beside it kOffset would be lost: scores must meet the reference alone first.
  __device__ __forceinline__ bool huge_reference() const {
    return __any_sync(~0u, fmaxf(fabsf(row.reference[0]), fabsf(row.reference[1])) > kHuge);
  }

  __device__ __forceinline__ void exponents(float c, int v_unit) {
    const float shift[2] = {kOffset - row.reference[0], kOffset - row.reference[1]};
    // As signed integers, positive floats compare like floats, and a negative one never beats a positive one.
    int most[2][2] = {};
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[4 * j + e] = fmaf(s[4 * j + e], c, shift[e >> 1]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        most[r][j & 1] =
            ptx::max3(most[r][j & 1], __float_as_int(s[4 * j + 2 * r]), __float_as_int(s[4 * j + 2 * r + 1]));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r][0] = max(most[r][0], most[r][1]);
      row.top[r] = __int_as_float(max(__float_as_int(row.top[r]), most[r][0]));
    }
    const bool high = max(most[0][0], most[1][0]) > __float_as_int(kLimit);
    if (__any_sync(~0u, high || v_unit != unit)) raise(__int_as_float(most[0][0]), __int_as_float(most[1][0]), v_unit);
  }

  // Raises references so that exponents are at most kOffset again, and moves O to a new unit.
  __device__ __forceinline__ void raise(float most0, float most1, int v_unit) {
    const float to_unit = change_unit(v_unit);
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float step = fmaxf(quad_max(r ? most1 : most0) - kOffset, 0.0f);
      row.reference[r] += step;
      row.top[r] -= step;
      factor[r] = ptx::exp2_approx(-step);
      row.sum[r] *= factor[r];
      rounded[2 * r] *= factor[r];
#pragma unroll
      for (int j = 0; j < kScores; ++j) {
        if ((j >> 1 & 1) == r) s[j] -= step;
      }
    }
    scale_rows(o, factor[0] * to_unit, factor[1] * to_unit);
  }

  // Returns the factor from the old unit of O to the new one.
  __device__ __forceinline__ float change_unit(int v_unit) {
    max_unit = max(max_unit, v_unit);
    const int next = max(v_unit, max_unit - kMaxUnitDrop);
    const float factor = unit_ratio(unit, next);
    unit = next;
    return factor;
  }

  __device__ __forceinline__ Promoted promoted() const {
    if constexpr (C::kStateInRegisters) return kept;
    return {ptx::load_shared<float4>(state_address()), ptx::load_shared<int32_t>(unit_address())};
  }
  __device__ __forceinline__ void keep(const Promoted& state) {
    if constexpr (C::kStateInRegisters) {
      kept = state;
    } else {
      ptx::store_shared(state_address(), state.rows);
      ptx::store_shared(unit_address(), state.unit);
    }
  }

  // Chunks of kPromoteTiles tiles: what earlier ones left in shared memory is added to O and to the rounded sum.
  __device__ __forceinline__ void add_promoted() {
    const auto [before, unit_before] = promoted();
    const float to_unit = unit_ratio(unit_before, unit);
    float factor[2] = {ptx::exp2_approx(before.x - row.reference[0]), ptx::exp2_approx(before.y - row.reference[1])};
    rounded[0] = fmaf(before.z, factor[0], rounded[0]);
    rounded[2] = fmaf(before.w, factor[1], rounded[2]);
    factor[0] *= to_unit, factor[1] *= to_unit;
    // All loads before the first use: s is free now.
#pragma unroll
    for (int j = 0; j < kAcc / 4; ++j) {
      const float4 old = ptx::load_shared<float4>(acc_address(j));
      s[4 * j] = old.x, s[4 * j + 1] = old.y, s[4 * j + 2] = old.z, s[4 * j + 3] = old.w;
    }
#pragma unroll
    for (int j = 0; j < kAcc; ++j) o[j] = fmaf(s[j], factor[j >> 1 & 1], o[j]);
  }
  __device__ __forceinline__ void promote(bool first) {
    if (!first) add_promoted();
    keep({make_float4(row.reference[0], row.reference[1], rounded[0], rounded[2]), unit});
    store_accumulators();
  }

  __device__ __forceinline__ void run() {
    Ring<kItems> slot;  // in step with the buffers: kItems is a multiple of kBuffers
    Ring<C::kStages> stage;
    while (true) {
      const int buffer = slot.index() % kBuffers;
      ptx::mbarrier_wait(shared.item_full(buffer), slot.steps / kBuffers & 1);
      const Item& item = shared.item(slot.index());
      if (!item.valid) return;
      attend(item, buffer, stage);
      slot.next();
    }
  }

  __device__ __forceinline__ void attend(const Item& item, int buffer, Ring<C::kStages>& stage) {
    const int first_row = item.first_row + warpgroup * kRows;
    const int end_row = min(first_row + kRows, item.seqlen_q);
    const auto [first, end, whole, whole_end] = row_tiles<C>(p.items, item, first_row, end_row);
    const int last = item.first_tile + item.num_tiles;
    const int q_scale = item.q_scale[warpgroup];
    const uint64_t q_descriptor = ptx::matrix_descriptor(shared.q(buffer) + warpgroup * kRows * kDim, C::kSwizzle);

    row = RowState{};
    unit = max_unit = 0;
#pragma unroll
    for (int j = 0; j < kAcc; ++j) o[j] = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) rounded[j] = 0;

#pragma unroll 1
    for (int tile = item.first_tile; tile < first; ++tile) pass_over(stage);
    int tile = first;
#pragma unroll 1
    while (tile < end) {
      const int chunk = tile, chunk_end = min(tile + kPromoteTiles, end);
#pragma unroll 1
      for (; tile < min(chunk_end, whole); ++tile) {
        step<true>(item, q_descriptor, q_scale, tile, tile + 1 < whole || tile >= whole_end, tile > chunk, stage);
      }
#pragma unroll 1
      for (; tile < min(chunk_end, whole_end); ++tile) {
        step<false>(item, q_descriptor, q_scale, tile, false, tile > chunk, stage);
      }
#pragma unroll 1
      for (; tile < chunk_end; ++tile) {
        step<true>(item, q_descriptor, q_scale, tile, true, tile > chunk, stage);
      }
      if (tile < end) promote(tile - first <= kPromoteTiles);
    }
#pragma unroll 1
    for (; tile < last; ++tile) pass_over(stage);
    if (first_row < end_row) {
      if (end - first > kPromoteTiles) add_promoted();
      write(item);
    }
    release(shared.item_free(buffer));
  }

  // One key tile: S, its exponents, O. kExact: some row may not see all keys (masked), or may not have seen any before.
  template <bool kExact>
  __device__ __forceinline__ void step(const Item& item, uint64_t q_descriptor, int q_scale, int tile, bool masked,
                                       bool accumulate, Ring<C::kStages>& stage) {
    ptx::mbarrier_wait(shared.k_full(stage.index()), stage.parity());
    const uint64_t k_descriptor = ptx::matrix_descriptor(shared.k(stage.index()), C::kSwizzle);
    ptx::fence_registers(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDim / 32; ++k) {
      ptx::wgmma_e4m3(s, ptx::advance(q_descriptor, 32 * k), ptx::advance(k_descriptor, 32 * k), k > 0);
    }
    ptx::wgmma_commit();
    const int v_scale = ptx::load_shared<int32_t>(shared.v_scale(stage.index()));
    const float c = score_scale(p.scale_log2, q_scale, ptx::load_shared<int32_t>(shared.k_scale(stage.index())));
    ptx::fence_registers(s);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(s);
    release(shared.k_free(stage.index()));

    if (kExact || huge_reference()) {
      exponents_exact(item, tile * kBlockN, masked, c);
      if (v_scale != unit) {
        const float factor = change_unit(v_scale);
        scale_rows(o, factor, factor);
      }
    } else {
      exponents(c, v_scale);
    }

    ptx::mbarrier_wait(shared.v_full(stage.index()), stage.parity());
    const uint64_t v_descriptor = ptx::matrix_descriptor(shared.v(stage.index()), ptx::Swizzle::b32);
    const uint64_t weights = ptx::matrix_descriptor(shared.base + C::kWeights, ptx::Swizzle::b32);
    float sum[2][2] = {};
    uint32_t probability[kBlockN / 32][4];
    ptx::fence_registers(o);
    ptx::fence_registers(rounded);
#pragma unroll
    for (int g = 0; g < kBlockN / 32; ++g) {  // 32 keys
#pragma unroll
      for (int j = 16 * g; j < 16 * g + 16; ++j) {
        s[j] = ptx::exp2_approx(s[j]);
        sum[j >> 1 & 1][j & 1] += s[j];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = 16 * g + 8 * (i >> 1) + 2 * (i & 1);
        probability[g][i] = ptx::pack_e4m3(s[j], s[j + 1], s[j + 4], s[j + 5]);
      }
      ptx::wgmma_fence();
      ptx::wgmma_e4m3(o, probability[g], ptx::advance(v_descriptor, 32 * kDimV * g), g > 0 || accumulate);
      ptx::wgmma_e4m3(rounded, probability[g], weights, g > 0 || accumulate);
    }
    ptx::wgmma_commit();
    row.sum[0] += sum[0][0] + sum[0][1];
    row.sum[1] += sum[1][0] + sum[1][1];
    ptx::fence_registers(o);
    ptx::fence_registers(rounded);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(o);
    ptx::fence_registers(rounded);
#pragma unroll
    for (int g = 0; g < kBlockN / 32; ++g) ptx::fence_registers(probability[g]);
    release(shared.v_free(stage.index()));
    stage.next();
  }

  // A tile of other warpgroups: it must be seen to arrive before it is given back.
  __device__ __forceinline__ void pass_over(Ring<C::kStages>& stage) {
    ptx::mbarrier_wait(shared.k_full(stage.index()), stage.parity());
    ptx::mbarrier_wait(shared.v_full(stage.index()), stage.parity());
    release(shared.k_free(stage.index()));
    release(shared.v_free(stage.index()));
    stage.next();
  }

  __device__ __forceinline__ void write(const Item& item);
  __device__ __forceinline__ void write_narrow(const Item& item);
  __device__ __forceinline__ void write_partial(const Item& item);
  __device__ __forceinline__ void write_mx(const Item& item);
  __device__ __forceinline__ void repair(const Item& item);
};

template <class C>
__device__ __forceinline__ void Consumer<C>::exponents_exact(const Item& item, int first_key, bool masked, float c) {
  if (masked) mask_scores<C>(p.items, item, first_key, s);
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = -INFINITY;
#pragma unroll
    for (int j = 0; j < kScores; ++j) {
      if ((j >> 1 & 1) == r) most = fmaxf(most, s[j]);
    }
    most = fmaxf(quad_max(most) * c, kUnseen);
    const float before = row.reference[r], now = fmaxf(before, most);
    row.top[r] = fmaxf(row.top[r] + (before - now), most - now + kOffset);
    row.reference[r] = now;
    factor[r] = ptx::exp2_approx(before - now);
    row.sum[r] *= factor[r];
    rounded[2 * r] *= factor[r];
  }
  if (huge_reference()) {
#pragma unroll
    for (int j = 0; j < kScores; ++j) s[j] = (s[j] * c - row.reference[j >> 1 & 1]) + kOffset;
  } else {
    const float shift[2] = {kOffset - row.reference[0], kOffset - row.reference[1]};
#pragma unroll
    for (int j = 0; j < kScores; ++j) s[j] = fmaf(s[j], c, shift[j >> 1 & 1]);
  }
  scale_rows(o, factor[0], factor[1]);
}

}  // namespace mxflash::fwd_sm90
