// From wgmma's accumulators to rows of a tensor: a quad of threads holds a row, thread c of it columns 8 j + 2 c + {0,
// 1}.
#pragma once

#include <mxflash/types.h>

#include "ptx/convert.cuh"

namespace mxflash {

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// One element, rounded to out's dtype.
__device__ __forceinline__ void store_element(const Tensor& out, int64_t offset, float x) {
  switch (out.dtype) {
    case Dtype::bf16: static_cast<uint16_t*>(out.data)[offset] = uint16_t(ptx::pack_bf16(x, 0)); break;
    case Dtype::f16: static_cast<uint16_t*>(out.data)[offset] = uint16_t(ptx::pack_f16(x, 0)); break;
    default: static_cast<float*>(out.data)[offset] = x;
  }
}

// Two elements of a 2-byte dtype, the first in the low half.
__device__ __forceinline__ uint32_t pack_half(Dtype dtype, float x0, float x1) {
  return dtype == Dtype::bf16 ? ptx::pack_bf16(x0, x1) : ptx::pack_f16(x0, x1);
}

// Transposes a 4x4 matrix of words over the threads of a quad: thread c has w[0..3] of row c and gets column c.
__device__ __forceinline__ uint4 transpose_quad(const uint32_t (&w)[4], int c) {
  const bool odd = c & 1, high = c & 2;
  uint32_t x[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(~0u, odd ? w[2 * i] : w[2 * i + 1], 1);
    x[2 * i] = odd ? got : w[2 * i];
    x[2 * i + 1] = odd ? w[2 * i + 1] : got;
  }
  const uint32_t got0 = __shfl_xor_sync(~0u, high ? x[0] : x[2], 2);
  const uint32_t got1 = __shfl_xor_sync(~0u, high ? x[1] : x[3], 2);
  return high ? make_uint4(got0, got1, x[2], x[3]) : make_uint4(x[0], x[1], got0, got1);
}

}  // namespace mxflash
