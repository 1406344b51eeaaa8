// What attention kernels share when rows are finished: storing accumulators of any width as rows of out, and the rows
// that belong to no sequence.
#pragma once

#include <cmath>

#include "attention/accumulators.cuh"

namespace mxflash {

// Where a forward's rows go.
struct RowOutput {
  Tensor out;      // as the caller gave it; may have no data
  Tensor out_f32;  // the same rows in fp32, contiguous; without data where nobody wants them
  Tensor lse, row_exponent, v_mean;
  int32_t head_dim_v;
  bool wide_stores;  // out is of 2-byte elements, and its rows are aligned to 16 bytes
};

// Two rows of a quad of threads, r = 0, 1 at tokens row[r] of `out` where present[r]: registers 4 j + 2 r + e are
// channels 8 j + 2 (lane % 4) + e.
struct QuadRows {
  int64_t row[2];
  bool present[2];
};

template <int kAcc>
__device__ __forceinline__ void store_rows_wide(const Tensor& out, int head, int head_dim_v, const QuadRows& rows,
                                                const float (&o)[kAcc]) {
  const int quad = int(threadIdx.x) % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint16_t* to = static_cast<uint16_t*>(out.data) + rows.row[r] * out.stride[0] + head * out.stride[1] + 8 * quad;
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
__device__ __forceinline__ void store_rows(const Tensor& out, int head, int head_dim_v, const QuadRows& rows,
                                           const float (&o)[kAcc]) {
  const int quad = int(threadIdx.x) % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!rows.present[r]) continue;
    const int64_t at = rows.row[r] * out.stride[0] + head * out.stride[1] + 2 * quad;
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
__device__ inline void clear_slack_rows(const RowOutput& to, const Jagged& seq, int64_t total_out, int32_t num_heads) {
  if (!seq.cu_seqlens) return;
  const int64_t first = seq.cu_seqlens[seq.batch], rows = total_out - first;
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t at = thread; at < rows * num_heads; at += step) {
    const int64_t row = first + at % rows, head = at / rows;
    if (to.lse) static_cast<float*>(to.lse.data)[head * to.lse.stride[0] + row] = -INFINITY;
    if (to.row_exponent) static_cast<uint8_t*>(to.row_exponent.data)[head * to.row_exponent.stride[0] + row] = 0;
    for (int c = 0; to.out && c < to.head_dim_v; ++c) {
      store_element(to.out, row * to.out.stride[0] + head * to.out.stride[1] + c, 0);
    }
  }
}

}  // namespace mxflash
