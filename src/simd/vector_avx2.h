// AVX2 with FMA and F16C: 8 lanes, 16 registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/exp2.h"
#include "simd/isa.h"

MXFLASH_ISA_BEGIN

inline constexpr int kLanes = 8;
inline constexpr int kMicroRows = 6, kMicroVectors = 2;
inline constexpr bool kFastDot16 = true;

using F32 = __m256;
using I32 = __m256i;
using Mask = __m256i;  // lanes of ones or zeros

MXFLASH_INLINE F32 load(const float* p) { return _mm256_loadu_ps(p); }
MXFLASH_INLINE void store(float* p, F32 x) { _mm256_storeu_ps(p, x); }
MXFLASH_INLINE I32 load(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
MXFLASH_INLINE void store(int32_t* p, I32 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
MXFLASH_INLINE F32 broadcast(float x) { return _mm256_set1_ps(x); }
MXFLASH_INLINE I32 broadcast(int32_t x) { return _mm256_set1_epi32(x); }
MXFLASH_INLINE I32 iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

MXFLASH_INLINE F32 as_float(I32 a) { return _mm256_castsi256_ps(a); }
MXFLASH_INLINE I32 as_int(F32 a) { return _mm256_castps_si256(a); }
MXFLASH_INLINE F32 to_float(I32 a) { return _mm256_cvtepi32_ps(a); }
MXFLASH_INLINE I32 round_to_int(F32 a) { return _mm256_cvtps_epi32(a); }

MXFLASH_INLINE I32 add(I32 a, I32 b) { return _mm256_add_epi32(a, b); }
MXFLASH_INLINE I32 sub(I32 a, I32 b) { return _mm256_sub_epi32(a, b); }
MXFLASH_INLINE I32 bit_and(I32 a, I32 b) { return _mm256_and_si256(a, b); }
MXFLASH_INLINE I32 bit_or(I32 a, I32 b) { return _mm256_or_si256(a, b); }
MXFLASH_INLINE I32 max(I32 a, I32 b) { return _mm256_max_epi32(a, b); }
template <int n>
MXFLASH_INLINE I32 shift_left(I32 a) {
  return _mm256_slli_epi32(a, n);
}
template <int n>
MXFLASH_INLINE I32 shift_right(I32 a) {
  return _mm256_srli_epi32(a, n);
}
MXFLASH_INLINE Mask less(I32 a, I32 b) { return _mm256_cmpgt_epi32(b, a); }
MXFLASH_INLINE Mask equal(I32 a, I32 b) { return _mm256_cmpeq_epi32(a, b); }
MXFLASH_INLINE Mask less(F32 a, F32 b) { return as_int(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
MXFLASH_INLINE Mask mask_and(Mask a, Mask b) { return _mm256_and_si256(a, b); }
MXFLASH_INLINE bool any(Mask m) { return !_mm256_testz_si256(m, m); }
MXFLASH_INLINE F32 select(Mask m, F32 if_set, F32 if_clear) { return _mm256_blendv_ps(if_clear, if_set, as_float(m)); }
MXFLASH_INLINE I32 select(Mask m, I32 if_set, I32 if_clear) { return _mm256_blendv_epi8(if_clear, if_set, m); }
MXFLASH_INLINE int32_t reduce_max(I32 a) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1)));
}

MXFLASH_INLINE F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
MXFLASH_INLINE F32 sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
MXFLASH_INLINE F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
MXFLASH_INLINE F32 div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
MXFLASH_INLINE F32 sqrt(F32 a) { return _mm256_sqrt_ps(a); }
MXFLASH_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
MXFLASH_INLINE F32 max(F32 a, F32 b) { return _mm256_max_ps(a, b); }
MXFLASH_INLINE F32 min(F32 a, F32 b) { return _mm256_min_ps(a, b); }
MXFLASH_INLINE F32 abs(F32 a) { return as_float(bit_and(as_int(a), broadcast(0x7FFFFFFF))); }
MXFLASH_INLINE F32 exp2(F32 x) {
  // The sum with 1.5 * 2^23 has round(x) in its low bits.
  const F32 magic = broadcast(12582912.0f), shifted = add(x, magic), r = sub(x, sub(shifted, magic));
  F32 p = broadcast(kExp2Poly[5]);
  p = fma(p, r, broadcast(kExp2Poly[4]));
  p = fma(p, r, broadcast(kExp2Poly[3]));
  p = fma(p, r, broadcast(kExp2Poly[2]));
  p = fma(p, r, broadcast(kExp2Poly[1]));
  p = fma(p, r, broadcast(kExp2Poly[0]));
  // In [-126, 128) the result is normal: the exponent is added to its bits. Below it is 0, for some CPUs take a hundred
  // cycles over a product that underflows. Above, and for NaN, x * 2^127 is Inf or NaN.
  const F32 normal = as_float(add(as_int(p), shift_left<23>(as_int(shifted))));
  const F32 not_small = _mm256_cmp_ps(x, broadcast(-126.0f), _CMP_NLT_UQ);
  const F32 big = _mm256_cmp_ps(x, broadcast(128.0f), _CMP_NLT_UQ);
  return _mm256_blendv_ps(_mm256_and_ps(normal, not_small), mul(x, broadcast(0x1p127f)), big);
}
MXFLASH_INLINE float reduce_add(F32 a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
MXFLASH_INLINE float reduce_max(F32 a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

MXFLASH_INLINE F32 load_bf16(const uint16_t* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return as_float(shift_left<16>(_mm256_cvtepu16_epi32(bits)));
}
MXFLASH_INLINE F32 load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
MXFLASH_INLINE void store_bf16(uint16_t* p, F32 x) {
  const I32 bits = as_int(x), odd = bit_and(shift_right<16>(bits), broadcast(1));
  const I32 rounded = add(bits, add(odd, broadcast(0x7FFF)));
  const Mask nan = as_int(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const I32 high = shift_right<16>(select(nan, bit_or(bits, broadcast(0x400000)), rounded));
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
MXFLASH_INLINE void store_f16(uint16_t* p, F32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
MXFLASH_INLINE F32 load_e4m3(const uint8_t* p) {
  // An E4M3 code shifted into a half is that number times 2^-8, subnormals included; NaN codes would read as 480.
  const __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i half = _mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16(int16_t(0xBF80)));
  const __m128i nan = _mm_cmpeq_epi16(_mm_slli_epi16(codes, 9), _mm_set1_epi16(int16_t(0xFE00)));
  const __m128i quiet = _mm_and_si128(nan, _mm_set1_epi16(0x7E00));
  return mul(_mm256_cvtph_ps(_mm_or_si128(half, quiet)), broadcast(256.0f));
}
MXFLASH_INLINE F32 load_e5m2(const uint8_t* p) {
  const __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtph_ps(_mm_slli_epi16(codes, 8));
}
MXFLASH_INLINE F32 load_e8m0(const uint8_t* p) {
  const I32 bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const I32 bits = max(shift_left<23>(bytes), broadcast(0x00400000));  // byte 0 is 2^-127
  return as_float(bit_or(bits, bit_and(equal(bytes, broadcast(255)), broadcast(0x00400000))));
}

MXFLASH_INLINE void store_int16(int16_t* p, I32 x) {
  const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
MXFLASH_INLINE I32 pack_int16(I32 x, I32 y) { return _mm256_blend_epi16(x, shift_left<16>(y), 0xAA); }
MXFLASH_INLINE I32 dot16(I32 acc, I32 a, I32 b) {
  acc = add(acc, _mm256_madd_epi16(a, b));
  __asm__("" : "+x"(acc));  // else g++ 12 copies accumulators around
  return acc;
}

MXFLASH_INLINE void transpose(const float* src, int64_t src_stride, float* dst, int64_t dst_stride) {
  // Pairs of rows, then fours, within 128-bit halves; then the halves themselves.
  F32 r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = load(src + i * src_stride);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    store(dst + i * dst_stride, _mm256_permute2f128_ps(r[i], r[4 + i], 0x20));
    store(dst + (i + 4) * dst_stride, _mm256_permute2f128_ps(r[i], r[4 + i], 0x31));
  }
}

MXFLASH_ISA_END
