// A softmax warpgroup of the forward kernel on Blackwell: a thread has a query row. It lifts the row's scores from
// tensor memory, and puts P there.
#pragma once

#include "attention/attention_fwd_sm100.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/convert.cuh"
#include "ptx/fault.cuh"
#include "ptx/tcgen05.cuh"

namespace mxflash::fwd_sm100 {

// 2^x of two x on the FMA units, given u = saturate((x + 119) / 128), which clamps x to [-119, 9] at no cost: x is
// rounded to an integer in the low bits of a float, and a cubic has the rest, |rest| <= 1/2. Relative error 7.5e-5. NaN
// is lost on the way: the maximum keeps it.
__device__ __forceinline__ float2 exp2_polynomial(float2 u) {
  constexpr float kRound = 12582912.0f - 119.0f;  // 1.5 * 2^23
  const auto both = [](float x) { return make_float2(x, x); };
  const float2 t = ptx::fma_f32x2(u, both(128.0f), both(kRound));
  const float2 minus_n = ptx::fma_f32x2(t, both(-1.0f), both(kRound));
  const float2 rest = ptx::fma_f32x2(u, both(128.0f), minus_n);
  float2 y = ptx::fma_f32x2(rest, both(0.055171669f), both(0.24261112f));
  y = ptx::fma_f32x2(y, rest, both(0.69326099f));
  y = ptx::fma_f32x2(y, rest, both(0.99992807f));
  return make_float2(__uint_as_float(__float_as_uint(y.x) + (__float_as_uint(t.x) << 23)),
                     __uint_as_float(__float_as_uint(y.y) + (__float_as_uint(t.y) << 23)));
}

template <class C>
struct Softmax {
  const Params& p;
  const Shared<C> shared;
  const uint32_t tmem;
  const int side, row;
  uint32_t tiles = 0, messages = 0;  // so far, of all items

  __device__ __forceinline__ void run() {
    Ring<kItems> slot;
#pragma unroll 1
    while (true) {
      ptx::mbarrier_wait(shared.item_known(slot.index()), slot.parity());
      const Item& item = shared.item(slot.index());
      if (!item.valid) return;
      const int first = item.first[side], end = item.end[side];
      const int i = min(item.first_row + side * kLanes + row, item.seqlen_q - 1);
      const Range keys = visible_keys(p.items.mask, i, i + 1, item.seqlen_q, item.seqlen_k);
      warp_arrive(shared.item_free(slot.index()));
      slot.next();
      if (first < end) attend(first, end, int(keys.first), int(keys.end));
    }
  }

 private:
  // Of this thread's warp: it can reach 32 lanes of tensor memory.
  __device__ __forceinline__ uint32_t at(Columns columns) const {
    return tmem + columns.first + (uint32_t(row / 32 * 32) << 16);
  }

  __device__ __forceinline__ void attend(int first_tile, int end_tile, int first_key, int end_key) {
    const float scale = p.scale_log2;
    float reference = -INFINITY, top = -INFINITY, sum = 0;  // of this row: the largest score so far is top
#pragma unroll 1
    for (int tile = first_tile; tile < end_tile; ++tile, ++tiles) {
      uint32_t s[4][32];
      lift(s);
      const int first = first_key - tile * C::kBlockN, end = end_key - tile * C::kBlockN;
      if (__any_sync(~0u, first > 0 || end < C::kBlockN)) hide(s, first, end);
      const float tile_top = maximum(s);
      const float growth = (tile_top - reference) * scale;
      float factor = 1;
      if (tile_top > reference && growth > kSlack) {
        factor = ptx::exp2_approx(-growth);  // 0 for the first score
        reference = tile_top;
      }
      top = fmaxf(top, tile_top);
      if (tile > first_tile) {
        wait_statistic();
        ptx::store_shared(shared.statistic(side, 0, row), factor);
        warp_arrive(shared.statistic_full(side));
      }
      sum = fmaf(sum, factor, weights(s, reference));
      if (tile_top != tile_top) sum = tile_top;
    }
    wait_statistic();
    ptx::store_shared(shared.statistic(side, 0, row), sum);
    ptx::store_shared(shared.statistic(side, 1, row), reference);
    ptx::store_shared(shared.statistic(side, 2, row), top);
    warp_arrive(shared.statistic_full(side));
  }

  // Until what was published before has been read.
  __device__ __forceinline__ void wait_statistic() {
    if (messages > 0 && !ptx::fault(16)) ptx::mbarrier_wait(shared.statistic_free(side), (messages - 1) & 1);
    ++messages;
  }

  __device__ __forceinline__ void lift(uint32_t (&s)[4][32]) const {
    warp_wait(shared.s_full(side), tiles & 1);
    ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
    for (int c = 0; c < 4; ++c) ptx::tcgen05_ld(at(C::s()) + 32 * c, s[c]);
    if (!ptx::fault(12)) ptx::tcgen05_wait_ld(s[0], s[1], s[2], s[3]);
    ptx::tcgen05_fence_before_thread_sync();
    warp_arrive(shared.s_free());
  }

  // -inf where the row does not see the key: it sees [first, end) of the tile.
  __device__ __forceinline__ static void hide(uint32_t (&s)[4][32], int first, int end) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      // A bit for each key: comparing would take twice the instructions.
      const int low = min(max(first - 32 * c, 0), 32), high = min(max(end - 32 * c, 0), 32);
      const uint32_t below_high = uint32_t((uint64_t(1) << high) - 1), below_low = uint32_t((uint64_t(1) << low) - 1);
      const uint32_t seen = below_high & ~below_low;
#pragma unroll
      for (int i = 0; i < 32; ++i) s[c][i] = seen >> i & 1 ? s[c][i] : 0xFF800000u;
    }
  }

  // NaN if a score is.
  __device__ __forceinline__ static float maximum(const uint32_t (&s)[4][32]) {
    float m[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int i = 0; i < 32; i += 8) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          m[k] = ptx::max3_nan(m[k], __uint_as_float(s[c][i + k]), __uint_as_float(s[c][i + 4 + k]));
        }
      }
    }
    return ptx::max3_nan(ptx::max3_nan(m[0], m[1], m[2]), m[3], -INFINITY);
  }

  // P of a tile goes to tensor memory; returns the sum of its values before they are rounded.
  __device__ __forceinline__ float weights(const uint32_t (&s)[4][32], float reference) {
    const float scale = p.scale_log2;
    const float base = kOffset - (reference == -INFINITY ? 0.0f : reference) * scale;
    const float scale_u = scale * (1.0f / 128), base_u = (base + 119.0f) * (1.0f / 128);
    float2 sum[2] = {{0, 0}, {0, 0}};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      uint32_t codes[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float2 y[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int pair = 2 * i + h;
          const float2 x = make_float2(__uint_as_float(s[c][2 * pair]), __uint_as_float(s[c][2 * pair + 1]));
          if (pair * C::kPolynomial % 16 < C::kPolynomial) {
            y[h] = exp2_polynomial(
                make_float2(ptx::fma_saturate(x.x, scale_u, base_u), ptx::fma_saturate(x.y, scale_u, base_u)));
          } else {
            const float2 z = ptx::fma_f32x2(x, make_float2(scale, scale), make_float2(base, base));
            y[h] = make_float2(ptx::exp2_approx(z.x), ptx::exp2_approx(z.y));
          }
          sum[h] = ptx::add_f32x2(sum[h], y[h]);
        }
        codes[i] = ptx::pack_e4m3(y[0].x, y[0].y, y[1].x, y[1].y);
      }
      if (c == 0 && tiles > 0) {  // no earlier: the exponentials run under the product
        if (!ptx::fault(13)) warp_wait(shared.pv_done(side), (tiles - 1) & 1);
        ptx::tcgen05_fence_after_thread_sync();
      }
      ptx::tcgen05_st(at(C::p(side)) + 8 * c, codes);
    }
    if (!ptx::fault(14)) ptx::tcgen05_wait_st();
    if (!ptx::fault(15)) ptx::tcgen05_fence_before_thread_sync();
    warp_arrive(shared.p_full(side));
    const float2 total = ptx::add_f32x2(sum[0], sum[1]);
    return total.x + total.y;
  }
};

}  // namespace mxflash::fwd_sm100
