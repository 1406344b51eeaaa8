// gemm with dot products of BF16 pairs, for MXFLASH_ISA_AVX512_BF16.
//
// An FP8 element times a power of two is a BF16 number, and the product of two of them is exact in fp32. So on MX
// operands this is as exact as fp32 multiply-adds, at twice their rate on AMD. What differs: numbers below 2^-126 count
// as zero, and a pair is added as fma(low, low, fma(high, high, acc)).
#pragma once

#include "simd/isa.h"

#if defined(MXFLASH_ISA_AVX512_BF16)
#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "simd/micro_kernel.h"

MXFLASH_ISA_BEGIN

MXFLASH_INLINE F32 dot_bf16(F32 acc, I32 a, I32 b) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));  // for the same reason as in dot16
  return acc;
}

// Lanes of x become the low BF16 halves and those of y the high halves, rounded to nearest even.
MXFLASH_INLINE I32 pack_bf16(F32 x, F32 y) {
  const I32 interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                          21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(y, x));
}
// 2 * kLanes neighbours as kLanes pairs.
MXFLASH_INLINE I32 pack_neighbours_bf16(const float* p) {
  return (__m512i)_mm512_cvtne2ps_pbh(load(p + kLanes), load(p));
}

template <int kRows, int kVectors, bool kScaled>
MXFLASH_INLINE void micro_gemm_bf16(const int32_t* a, int64_t lda, const int32_t* b, int64_t pairs, float factor,
                                    float* c, bool accumulate) {
  F32 x[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) x[r][v] = accumulate ? load(c + r * kPanel + v * kLanes) : broadcast(0.0f);
  }
#pragma GCC unroll 1
  for (int64_t k = 0; k < pairs; ++k) {
    I32 bk[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) bk[v] = load(b + k * kPanel + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const I32 ak = broadcast(a[r * lda + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) x[r][v] = dot_bf16(x[r][v], ak, bk[v]);
    }
  }
  const F32 scale = broadcast(factor);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(c + r * kPanel + v * kLanes, kScaled ? mul(x[r][v], scale) : x[r][v]);
  }
}

// a [rows][lda] and b [depth / 2][kPanel] are pairs; depth is even. C = (C +) factor * A B, with factor 1 to
// accumulate.
inline void gemm_bf16(const int32_t* a, int64_t lda, const int32_t* b, int64_t depth, float factor, float* c,
                      int64_t rows, int64_t lanes, bool accumulate) {
  for (int64_t k = 0; k < depth / 2; k += kDepthBlock) {
    const int64_t rest = depth / 2 - k, block = rest < kDepthBlock ? rest : kDepthBlock;
    const auto block_of = [=](auto scaled) {
      for_blocks(rows, lanes, [=](auto block_rows, auto vectors, int64_t r, int64_t lane) {
        micro_gemm_bf16<block_rows(), vectors(), scaled()>(a + r * lda + k, lda, b + k * kPanel + lane, block, factor,
                                                           c + r * kPanel + lane, accumulate || k > 0);
      });
    };
    if (block == rest && factor != 1) {
      block_of(std::true_type{});
    } else {
      block_of(std::false_type{});
    }
  }
}

MXFLASH_ISA_END
#endif
