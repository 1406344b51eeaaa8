// Where attention kernels leave finished rows: out at any dtype and stride, lse and row_exponent, and what rows of no
// sequence hold.
#pragma once

#include <cmath>

#include "attention/accumulators.cuh"
#include "attention/attention.h"
#include "attention/attention_out_mx.cuh"

namespace mxflash {

struct RowOutput {
  Tensor out, lse, row_exponent, v_mean;  // as in AttentionFwd
  MxOutput out_mx;
  int64_t total_out;
  int32_t num_heads, head_dim_v;
  bool wide_stores;  // out is there, of 2-byte elements, and its rows are aligned to 16 bytes

  static RowOutput of(const AttentionFwd& a, const AttentionShape& s) {
    return {.out = a.out,
            .lse = a.lse,
            .row_exponent = a.row_exponent,
            .v_mean = a.v_mean,
            .out_mx = MxOutput::of(a.out_mx, s.seq_out()),
            .total_out = s.total_out,
            .num_heads = int32_t(s.num_heads_q),
            .head_dim_v = int32_t(s.head_dim_v),
            .wide_stores = a.out && a.out.dtype != Dtype::f32 && reinterpret_cast<uintptr_t>(a.out.data) % 16 == 0 &&
                           a.out.stride[0] % 8 == 0 && a.out.stride[1] % 8 == 0};
  }
  // [head_dim_v]
  __device__ __forceinline__ const float* mean(int64_t sequence, int64_t kv_head) const {
    return static_cast<const float*>(v_mean.data) + sequence * v_mean.stride[0] + kv_head * v_mean.stride[1];
  }
};

// A row of out, lse and row_exponent.
struct RowPlace {
  int64_t row, head;
};

// What is known of a row but out itself: its lse in binades, and log2 of its sum of P in units of the largest P.
__device__ __forceinline__ void store_statistics(const RowOutput& to, const RowPlace& at, bool visible, float log2_lse,
                                                 float log2_sum) {
  constexpr float kLn2 = 0.69314718055994531f;
  if (to.lse) {
    static_cast<float*>(to.lse.data)[at.head * to.lse.stride[0] + at.row] = visible ? log2_lse * kLn2 : -INFINITY;
  }
  if (to.row_exponent) {
    const float spare = floorf(log2_sum);
    static_cast<uint8_t*>(to.row_exponent.data)[at.head * to.row_exponent.stride[0] + at.row] =
        visible && spare > 0 ? uint8_t(fminf(spare, 255.0f)) : 0;
  }
}

// Two rows of a quad of threads, r = 0, 1 at `at[r]` where present[r]: registers 4 j + 2 r + e are channels 8 j +
// 2 (lane % 4) + e.
struct QuadRows {
  RowPlace at[2];
  bool present[2];
};

// Two-byte elements, rows aligned to 16 bytes.
template <int kAcc>
__device__ __forceinline__ void store_rows_wide(const Tensor& out, int head_dim_v, const QuadRows& rows,
                                                const float (&o)[kAcc]) {
  const int quad = int(threadIdx.x) % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint16_t* to =
        static_cast<uint16_t*>(out.data) + rows.at[r].row * out.stride[0] + rows.at[r].head * out.stride[1] + 8 * quad;
    // Four pieces of 8 channels at a time: a thread of a quad collects one of them and stores its 16 bytes.
#pragma unroll
    for (int j = 0; j < kAcc / 4; j += 4) {
      uint32_t word[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        word[k] = pack_half(out.dtype, o[4 * (j + k) + 2 * r], o[4 * (j + k) + 2 * r + 1]);
      }
      const uint4 piece = transpose_quad(word, quad);
      if (rows.present[r] && 8 * (j + quad) < head_dim_v) *reinterpret_cast<uint4*>(to + 8 * j) = piece;
    }
  }
}

// Any dtype and alignment. Pairs of fp32 go out together where they may.
template <int kAcc>
__device__ __forceinline__ void store_rows(const Tensor& out, int head_dim_v, const QuadRows& rows,
                                           const float (&o)[kAcc]) {
  const int quad = int(threadIdx.x) % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!rows.present[r]) continue;
    const int64_t at = rows.at[r].row * out.stride[0] + rows.at[r].head * out.stride[1] + 2 * quad;
    if (out.dtype == Dtype::f32) {
      float* to = static_cast<float*>(out.data) + at;
      const bool pairs = reinterpret_cast<uintptr_t>(to) % 8 == 0;
#pragma unroll
      for (int j = 0; j < kAcc / 4; ++j) {
        if (8 * j + 2 * quad >= head_dim_v) break;
        const float x = o[4 * j + 2 * r], y = o[4 * j + 2 * r + 1];
        if (pairs) {
          *reinterpret_cast<float2*>(to + 8 * j) = make_float2(x, y);
        } else {
          to[8 * j] = x, to[8 * j + 1] = y;
        }
      }
    } else {
      uint16_t* to = static_cast<uint16_t*>(out.data) + at;
#pragma unroll
      for (int j = 0; j < kAcc / 4; ++j) {
        if (8 * j + 2 * quad >= head_dim_v) break;
        const uint32_t pair = pack_half(out.dtype, o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
        to[8 * j] = uint16_t(pair), to[8 * j + 1] = uint16_t(pair >> 16);
      }
    }
  }
}

// Rows of no sequence, which only a call with cu_seqlens has: out zero, lse -inf, row_exponent 0. All threads of the
// grid share them.
__device__ inline void clear_slack_rows(const RowOutput& to, const Jagged& seq) {
  if (!seq.cu_seqlens) return;
  const int64_t first = seq.cu_seqlens[seq.batch], rows = to.total_out - first;
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t at = thread; at < rows * to.num_heads; at += step) {
    const int64_t row = first + at % rows, head = at / rows;
    store_statistics(to, {row, head}, false, 0, 0);
    for (int c = 0; c < to.head_dim_v; ++c) {
      if (to.out) store_element(to.out, row * to.out.stride[0] + head * to.out.stride[1] + c, 0);
      if (to.out_mx.data) to.out_mx.data[row * to.out_mx.token_stride + head * to.out_mx.head_stride + c] = 0;
    }
  }
}

}  // namespace mxflash
