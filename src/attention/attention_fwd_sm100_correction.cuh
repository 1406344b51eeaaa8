// The correction warpgroup of the forward kernel on Blackwell: a thread has a row of each side. It rescales
// accumulators where the reference has moved, and turns finished ones into results.
#pragma once

#include "attention/attention_fwd_sm100.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/convert.cuh"
#include "ptx/fault.cuh"
#include "ptx/tcgen05.cuh"

namespace mxflash::fwd_sm100 {

template <class C>
struct Correction {
  const Params& p;
  const Shared<C> shared;
  const uint32_t tmem;
  const int row;
  // Parities, a bit for each side: of what softmax publishes, and of products with V.
  uint32_t statistic_phase = 0, product_phase = 0;
  uint32_t broken_phase = 0;

  __device__ __forceinline__ void run() {
    // Accumulators are free for their first item.
    for (int side = 0; side < C::kSides; ++side) warp_arrive(shared.p_full(side));
    Ring<kItems> slot;
#pragma unroll 1
    while (true) {
      ptx::mbarrier_wait(shared.item_known(slot.index()), slot.parity());
      const Item& item = shared.item(slot.index());
      if (!item.valid) break;
      if (p.items.has_mask) {
        ptx::mbarrier_wait(shared.broken_read(), broken_phase ^ 1);
        broken_phase ^= 1;
      }
      const int end = item.first_tile + item.num_tiles;
#pragma unroll 1
      for (int tile = item.first_tile; tile <= end; ++tile) {
#pragma unroll 1
        for (int side = 0; side < C::kSides; ++side) {
          if (tile == item.end[side]) {
            finish(item, side);
          } else if (item.first[side] < tile && tile < item.end[side]) {
            rescale(side);
          }
        }
      }
      warp_arrive(shared.item_free(slot.index()));
      slot.next();
    }
    ptx::bulk_wait_read<0>();
  }

 private:
  __device__ __forceinline__ uint32_t at(Columns columns) const {
    return tmem + columns.first + (uint32_t(row / 32 * 32) << 16);
  }
  // Waits for what softmax publishes next.
  __device__ __forceinline__ void wait_statistic(int side) {
    warp_wait(shared.statistic_full(side), statistic_phase >> side & 1);
    statistic_phase ^= 1u << side;
  }
  // For the accumulator: after the last product so far.
  __device__ __forceinline__ void wait_product(int side) const {
    warp_wait(shared.pv_done(side), product_phase >> side & 1);
  }

  // Before the product of the next tile.
  __device__ __forceinline__ void rescale(int side) {
    wait_statistic(side);
    const float factor = ptx::load_shared<float>(shared.statistic(side, 0, row));
    if (__any_sync(~0u, factor != 1)) {
      if (!ptx::fault(17)) wait_product(side);
      ptx::tcgen05_fence_after_thread_sync();
      const float2 both = make_float2(factor, factor);
#pragma unroll 1
      for (int c = 0; c < C::kAcc; c += 16) {
        uint32_t x[16];
        ptx::tcgen05_ld(at(C::o(side)) + c, x);
        ptx::tcgen05_wait_ld(x);
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
          const float2 y = ptx::mul_f32x2(make_float2(__uint_as_float(x[i]), __uint_as_float(x[i + 1])), both);
          x[i] = __float_as_uint(y.x), x[i + 1] = __float_as_uint(y.y);
        }
        ptx::tcgen05_st(at(C::o(side)) + c, x);
      }
      if (!ptx::fault(18)) ptx::tcgen05_wait_st();
      ptx::tcgen05_fence_before_thread_sync();
    }
    product_phase ^= 1u << side;
    warp_arrive(shared.p_full(side));
    warp_arrive(shared.statistic_free(side));  // in this order: docs/blackwell.md
  }

  // Results of a side's rows.
  __device__ __forceinline__ void finish(const Item& item, int side) {
    const bool computed = item.first[side] < item.end[side];  // else no row of the side sees a key
    const RowPlace place{int64_t(item.out_start) + item.first_row + side * kLanes + row, item.head};
    const bool present = item.first_row + side * kLanes + row < item.seqlen_q;
    float sum = 0, reference = -INFINITY, top = 0, factor = 0;
    if (computed) {
      wait_statistic(side);
      sum = ptx::load_shared<float>(shared.statistic(side, 0, row));
      reference = ptx::load_shared<float>(shared.statistic(side, 1, row));
      top = ptx::load_shared<float>(shared.statistic(side, 2, row));
      if (!ptx::fault(19)) wait_product(side);
      product_phase ^= 1u << side;
      ptx::tcgen05_fence_after_thread_sync();
      float denominator = sum * (1.0f / 256);
      if constexpr (kOnes > 0) {
        uint32_t rounded[1];
        ptx::tcgen05_ld(at(C::o(side)) + C::kDimV, rounded);
        ptx::tcgen05_wait_ld(rounded);
        denominator = __uint_as_float(rounded[0]);
      }
      // A NaN score may have left no trace in P (exp2_polynomial): the sum has it.
      factor = sum != sum ? sum : ptx::reciprocal_approx(denominator);
    }
    const bool visible = reference != -INFINITY || sum != sum;
    if (present) {
      const float log2_sum = log2f(sum) - kOffset;
      const float lse = reference * p.scale_log2 + log2_sum, most = top * p.scale_log2;
      if (p.partials.row) {
        p.partials.row[p.partials.index(0, place.head, place.row)] =
            visible ? PartialRow{lse, most} : PartialRow{-INFINITY, -INFINITY};
      } else {
        store_statistics(p.to, place, visible, lse, log2_sum + (reference - top) * p.scale_log2);
      }
    }
    const float* const mean =
        p.to.v_mean && !p.partials.row ? p.to.mean(item.sequence, item.head / p.items.group) : nullptr;
    float not_finite = 0;  // becomes NaN
#pragma unroll 1
    for (int c = 0; c < C::kDimV; c += 32) {
      uint32_t x[32];
      if (computed) {
        ptx::tcgen05_ld(at(C::o(side)) + c, x);
        ptx::tcgen05_wait_ld(x);
      }
#pragma unroll
      for (int k = 0; k < 32; ++k) {
        x[k] = __float_as_uint(visible ? __uint_as_float(x[k]) * factor : 0.0f);
        not_finite = fmaf(__uint_as_float(x[k]), 0.0f, not_finite);
      }
      if (mean && visible) add_mean(mean + c, p.to.head_dim_v - c, x);
      if (p.out) stage(x, c, place, present);
    }
    ptx::tcgen05_fence_before_thread_sync();
    if (computed) {
      warp_arrive(shared.p_full(side));  // the accumulator is free
      warp_arrive(shared.statistic_free(side));
    }
    // 0 NaN is NaN: values of keys that a row does not see may have got into it.
    if (p.items.has_mask) report(side, present && visible && sum == sum && not_finite != not_finite);
  }

  // Which of the warp's rows are to be made once more, when what it stored is there.
  __device__ __forceinline__ void report(int side, bool broken) const {
    const uint32_t rows = ptx::fault(4) ? 0 : __ballot_sync(~0u, broken);
    if (rows) ptx::bulk_wait<0>();
    if (ptx::elect_one()) ptx::store_shared(shared.broken(side, row / 32), rows);
    warp_arrive(shared.broken_known(side));
  }

  __device__ __forceinline__ static void add_mean(const float* mean, int channels, uint32_t (&x)[32]) {
#pragma unroll
    for (int k = 0; k < 32; ++k) {
      if (k < channels) x[k] = __float_as_uint(__uint_as_float(x[k]) + mean[k]);
    }
  }

  // kPieceBytes of a row at a time go through shared memory, its own thread's: a warp's stores from registers would be
  // 16 bytes of 32 rows each.
  __device__ __forceinline__ void stage(const uint32_t (&x)[32], int c, const RowPlace& place, bool present) const {
    const Tensor& out = p.out;
    const bool wide = out.dtype == Dtype::f32;
    const int piece = C::kPieceBytes / (wide ? 4 : 2);  // channels
    const uint32_t to = shared.staging(row);
    if (c % piece == 0 && !ptx::fault(21)) ptx::bulk_wait_read<0>();
    if (wide) {
#pragma unroll
      for (int k = 0; k < 32; k += 4) {
        ptx::store_shared(to + 4 * (c % piece + k), make_uint4(x[k], x[k + 1], x[k + 2], x[k + 3]));
      }
    } else {
#pragma unroll
      for (int k = 0; k < 32; k += 8) {
        uint32_t pair[4];
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          pair[h] = pack_half(out.dtype, __uint_as_float(x[k + 2 * h]), __uint_as_float(x[k + 2 * h + 1]));
        }
        ptx::store_shared(to + 2 * (c % piece + k), make_uint4(pair[0], pair[1], pair[2], pair[3]));
      }
    }
    if ((c + 32) % piece != 0 && c + 32 < C::kDimV) return;
    const int first = c / piece * piece, channels = min(piece, p.to.head_dim_v - first), size = wide ? 4 : 2;
    if (!ptx::fault(20)) ptx::fence_proxy_async();
    if (present && channels > 0) {
      const int64_t offset = place.row * out.stride[0] + place.head * out.stride[1] + first;
      uint8_t* const line = static_cast<uint8_t*>(out.data) + offset * size;
      if (p.bulk_rows) {
        ptx::bulk_store(line, to, uint32_t(channels * size));
      } else {
        copy_row(line, to, channels * size);
      }
    }
    ptx::bulk_commit();
  }

  // Rows that are not aligned to 16 bytes, or not as long.
  __device__ __forceinline__ static void copy_row(uint8_t* to, uint32_t from, int bytes) {
#pragma unroll 1
    for (int i = 0; i < bytes; i += 4) {
      const uint32_t word = ptx::load_shared<uint32_t>(from + i);
      reinterpret_cast<uint16_t*>(to + i)[0] = uint16_t(word),
                                       reinterpret_cast<uint16_t*>(to + i)[1] = uint16_t(word >> 16);
    }
  }
};

}  // namespace mxflash::fwd_sm100
