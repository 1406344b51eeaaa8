// What the kernels of rmsnorm_quantize and rmsnorm_bwd have in common: elements and pairs of them, FP8 codes; stripes
// of rows, rstd, and rows of no sequence.
//
// A stripe is 32 rows of the padded token axis (mx/scale_layout.h): whole blocks of every kind, of one sequence or of
// none. All stripes are visited, also those of padding: their rows count as zeros, which gives the scale bytes there
// the zeros that the format asks for, and nothing has to be cleared first. The grid depends on capacities only; lengths
// are read on the device.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <mxflash/rmsnorm.h>

#include "mx/e8m0.h"
#include "mx/float16.h"
#include "mx/scale_layout.h"
#include "ptx/convert.cuh"

namespace mxflash {

inline constexpr int kWarp = 32;
inline constexpr unsigned kFullWarp = 0xFFFFFFFFu;

// Every row starts at a multiple of `bytes`.
inline bool rows_aligned(const Tensor& t, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(t.data) % uintptr_t(bytes) == 0 && t.stride[0] * dtype_size(t.dtype) % bytes == 0;
}

// Pairs of BF16, as fp32 and back.
__device__ inline float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// How the stripes divide into sequences of equal length; with cu_seqlens only their number is known here.
struct StripeGrid {
  int64_t count = 0;
  int64_t length = 0;   // rows of a sequence
  int64_t stripes = 0;  // of a sequence
  static StripeGrid of(const RmsnormQuantize& args) {
    const Jagged& seq = args.seq;
    const int64_t count = padded_token_count(args.in.shape[0], seq) / kMxBlock;
    if (seq.cu_seqlens) return {count, 0, 0};
    return {count, args.in.shape[0] / seq.batch, count / seq.batch};
  }
};

template <class Index>
struct Stripe {
  Index row = 0;  // its first row of the tensors
  int rows = 0;   // that exist; the others are padding
};

// Index is an integer that holds the number of padded rows.
template <class Index>
__device__ inline Stripe<Index> stripe_at(const RmsnormQuantize& args, const StripeGrid& grid, Index index) {
  const Jagged& seq = args.seq;
  const Index padded = index * Index(kMxBlock);
  Index start, length, first;
  if (!seq.cu_seqlens) {
    const Index b = seq.batch == 1 ? 0 : index / Index(grid.stripes);
    length = Index(grid.length);
    start = b * length;
    first = (index - b * Index(grid.stripes)) * Index(kMxBlock);
  } else {  // the last sequence that starts here or before; starts increase
    int b = 0;
    for (int end = seq.batch; end - b > 1;) {
      const int middle = b + (end - b) / 2;
      if (jagged_padded_start(seq.cu_seqlens[middle], middle) <= padded) {
        b = middle;
      } else {
        end = middle;
      }
    }
    const int32_t begin = seq.cu_seqlens[b];
    start = begin;
    length = seq.cu_seqlens[b + 1] - begin;
    first = padded - Index(jagged_padded_start(begin, b));
  }
  const Index rows = length - first;
  return {start + first, int(rows < 0 ? 0 : rows < kMxBlock ? rows : kMxBlock)};
}

// In ref's order; every operation is rounded by itself.
__device__ inline float rstd_of(float sum, int64_t dim, float eps) {
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, float(dim)), eps)));
}

// Bits of 2^(127 - b), the factor that puts a block onto the grid of its elements, in the upper half of an fp32 or as
// BF16. No scale that scale_from_amax gives makes it subnormal, and no product leaves the range of fp32 or BF16; one
// that is subnormal rounds to zero in FP8 as it would unrounded. So multiplication and the hardware's conversion give
// the bytes of encode_mx. b = 255 has no factor: its payload is kFp8Nan throughout.
__device__ inline uint32_t factor_bf16(uint32_t b) { return (254 - b) << 7; }

template <Dtype kElement>
__device__ inline uint32_t pack_fp8(float x0, float x1, float x2, float x3) {
  if constexpr (kElement == Dtype::e4m3) {
    return ptx::pack_e4m3(x0, x1, x2, x3);
  } else {
    return uint32_t(__nv_cvt_float2_to_fp8x2({x0, x1}, __NV_SATFINITE, __NV_E5M2)) |
           uint32_t(__nv_cvt_float2_to_fp8x2({x2, x3}, __NV_SATFINITE, __NV_E5M2)) << 16;
  }
}

template <class T>
__device__ inline T* element_at(const Tensor& t, int64_t row, int64_t col) {
  return static_cast<T*>(t.data) + row * t.stride[0] + col;
}

__device__ inline float load_float(const Tensor& t, int64_t row, int64_t col) {
  switch (t.dtype) {
    case Dtype::bf16: return decode_bf16(*element_at<uint16_t>(t, row, col));
    case Dtype::f16: return decode_f16(*element_at<uint16_t>(t, row, col));
    default: return *element_at<float>(t, row, col);
  }
}

// Rows that belong to no sequence: out, y and rstd are zero there, and the residual stays as it is.
__device__ inline void clear_slack_rows(const RmsnormQuantize& args) {
  if (!args.seq.cu_seqlens) return;
  const int64_t dim = args.in.shape[1];
  for (int64_t row = args.seq.cu_seqlens[args.seq.batch] + int64_t(blockIdx.x); row < args.in.shape[0];
       row += gridDim.x) {
    for (int64_t c = threadIdx.x; c < dim; c += blockDim.x) {
      *element_at<uint8_t>(args.out.data, row, c) = 0;
      if (args.y) *element_at<uint16_t>(args.y, row, c) = 0;
    }
    if (args.rstd && threadIdx.x == 0) static_cast<float*>(args.rstd.data)[row] = 0.0f;
  }
}

}  // namespace mxflash
