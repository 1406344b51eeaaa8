// Matrix products of small tiles that lie in cache: C[rows][lanes] = or += A[rows][depth] B[depth][lanes].
//
// A row of A is broadcast, element by element, against vectors of B; a block of kMicroRows x kMicroVectors accumulators
// stays in registers over the whole depth. B and C are panels: kPanel lanes a row, so a row of either is contiguous.
// Two arithmetics:
//   gemm        fp32 multiply-adds
//   gemm_fixed  int16 dot products, exact in int32 over groups of 32 along the depth, then scaled and added in fp32
#pragma once

#include <cstdint>
#include <type_traits>

#include "simd/vector.h"

MXFLASH_ISA_BEGIN

inline constexpr int64_t kPanel = 64;          // lanes of a panel
inline constexpr int64_t kGroup = 32;          // elements of the depth that share a scale in gemm_fixed
inline constexpr int64_t kPairs = kGroup / 2;  // pairs of int16 in a group
inline constexpr int64_t kDepthBlock = 64;     // of gemm: a panel slice of 16 KiB stays in L1

// acc += a * b. Left alone, compilers fold broadcasts into every multiply-add as a memory operand, so that the loads
// become the bottleneck, and move accumulators around until some are spilled.
MXFLASH_INLINE void fma_in_place(F32& acc, F32 a, F32 b) {
#if defined(MXFLASH_ISA_AVX512)
  __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
#elif defined(MXFLASH_ISA_AVX2)
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
#else
  acc = fma(a, b, acc);
#endif
}

template <int kRows, int kVectors>
MXFLASH_INLINE void micro_gemm(const float* a, int64_t lda, const float* b, int64_t depth, float* c, bool accumulate) {
  F32 x[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) x[r][v] = accumulate ? load(c + r * kPanel + v * kLanes) : broadcast(0.0f);
  }
#pragma GCC unroll 1  // more makes g++ 12 copy accumulators
  for (int64_t k = 0; k < depth; ++k) {
    F32 bk[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) bk[v] = load(b + k * kPanel + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F32 ak = broadcast(a[r * lda + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) fma_in_place(x[r][v], ak, bk[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(c + r * kPanel + v * kLanes, x[r][v]);
  }
}

// One group of the depth. a [row][kPairs], b [kPairs][kPanel]: pairs of int16. row_scale: one float a row, stride
// row_stride; lane_scale [kPanel].
template <int kRows, int kVectors>
MXFLASH_INLINE void micro_gemm_fixed(const int32_t* a, int64_t lda, const float* row_scale, int64_t row_stride,
                                     const int32_t* b, const float* lane_scale, float* c, bool accumulate) {
  I32 x[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) x[r][v] = broadcast(0);
  }
#pragma GCC unroll(kFastDot16 ? 16 : 1)  // all of them: the first needs no accumulator
  for (int64_t k = 0; k < kPairs; ++k) {
    I32 bk[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) bk[v] = load(b + k * kPanel + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const I32 ak = broadcast(a[r * lda + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) x[r][v] = dot16(x[r][v], ak, bk[v]);
    }
  }
  F32 lanes[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) lanes[v] = load(lane_scale + v * kLanes);
  if (accumulate) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F32 row = broadcast(row_scale[r * row_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        float* p = c + r * kPanel + v * kLanes;
        store(p, fma(to_float(x[r][v]), mul(lanes[v], row), load(p)));
      }
    }
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F32 row = broadcast(row_scale[r * row_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(c + r * kPanel + v * kLanes, mul(to_float(x[r][v]), mul(lanes[v], row)));
    }
  }
}

// Calls body(integral_constant rows, integral_constant vectors, first row, first lane) so that blocks cover rows x
// lanes. lanes is rounded up to whole vectors. Rows are outside, so that B and a few rows of A stay in L1.
template <int kRows, class Body>
MXFLASH_INLINE void for_lane_blocks(int64_t row, int64_t lanes, Body&& body) {
  constexpr auto rows = std::integral_constant<int, kRows>{};
  int64_t lane = 0;
  for (; lane + kMicroVectors * kLanes <= lanes; lane += kMicroVectors * kLanes) {
    body(rows, std::integral_constant<int, kMicroVectors>{}, row, lane);
  }
  if (lane >= lanes) return;
  switch ((lanes - lane + kLanes - 1) / kLanes) {
    case 1: return body(rows, std::integral_constant<int, 1>{}, row, lane);
    case 2: return body(rows, std::integral_constant<int, 2>{}, row, lane);
    case 3: return body(rows, std::integral_constant<int, (kMicroVectors < 3 ? 1 : 3)>{}, row, lane);
    default: return body(rows, std::integral_constant<int, kMicroVectors>{}, row, lane);
  }
}
template <class Body>
MXFLASH_INLINE void for_blocks(int64_t rows, int64_t lanes, Body&& body) {
  int64_t r = 0;
  for (; r + kMicroRows <= rows; r += kMicroRows) for_lane_blocks<kMicroRows>(r, lanes, body);
  for (; r + 4 <= rows && kMicroRows > 4; r += 4) for_lane_blocks<4>(r, lanes, body);
  for (; r + 2 <= rows; r += 2) for_lane_blocks<2>(r, lanes, body);
  for (; r < rows; ++r) for_lane_blocks<1>(r, lanes, body);
}

// a [rows][lda], b [depth][kPanel], c [rows][kPanel].
inline void gemm(const float* a, int64_t lda, const float* b, int64_t depth, float* c, int64_t rows, int64_t lanes,
                 bool accumulate) {
  for (int64_t k = 0; k < depth; k += kDepthBlock) {
    const int64_t block = depth - k < kDepthBlock ? depth - k : kDepthBlock;
    for_blocks(rows, lanes, [&](auto block_rows, auto vectors, int64_t r, int64_t lane) {
      micro_gemm<block_rows(), vectors()>(a + r * lda + k, lda, b + k * kPanel + lane, block, c + r * kPanel + lane,
                                          accumulate || k > 0);
    });
  }
}

// Operands of gemm_fixed: value = int16 * scale, |int16| <= 8192.
struct FixedRows {
  const int32_t* pairs;  // [rows][groups][kPairs]
  const float* scale;    // [rows][groups]
  int64_t groups;        // of a row, as laid out
};
struct FixedPanel {
  const int32_t* pairs;  // [groups][kPairs][kPanel]
  const float* scale;    // [groups][kPanel]
};

// Over the first `groups` groups of both.
inline void gemm_fixed(const FixedRows& a, const FixedPanel& b, int64_t groups, float* c, int64_t rows, int64_t lanes,
                       bool accumulate) {
  for_blocks(rows, lanes, [&](auto block_rows, auto vectors, int64_t r, int64_t lane) {
    for (int64_t g = 0; g < groups; ++g) {
      micro_gemm_fixed<block_rows(), vectors()>(a.pairs + (r * a.groups + g) * kPairs, a.groups * kPairs,
                                                a.scale + r * a.groups + g, a.groups,
                                                b.pairs + g * kPairs * kPanel + lane, b.scale + g * kPanel + lane,
                                                c + r * kPanel + lane, accumulate || g > 0);
    }
  });
}

MXFLASH_ISA_END
