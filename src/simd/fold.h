// Sum of a vector's lanes in the order of the contract (rmsnorm/rmsnorm_sum.h): lane l += lane l + half, for half the
// lanes, a quarter, ... one.
#pragma once

#include "simd/vector.h"

MXFLASH_ISA_BEGIN

#if defined(MXFLASH_ISA_AVX512) || defined(MXFLASH_ISA_AVX2)
MXFLASH_INLINE float fold_lanes(__m128 x) {
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
MXFLASH_INLINE float fold_lanes(__m256 x) {
  return fold_lanes(_mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
#endif
#if defined(MXFLASH_ISA_AVX512)
MXFLASH_INLINE float fold_lanes(__m512 x) {
  return fold_lanes(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
}
#elif !defined(MXFLASH_ISA_AVX2)
MXFLASH_INLINE float fold_lanes(F32 x) {
  float lane[kLanes];
  store(lane, x);
  for (int half = kLanes / 2; half >= 1; half /= 2) {
    for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
  }
  return lane[0];
}
#endif

MXFLASH_ISA_END
