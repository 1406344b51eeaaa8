// AVX-512 with VNNI: 16 lanes, 32 registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/exp2.h"
#include "simd/isa.h"

MXFLASH_ISA_BEGIN

inline constexpr int kLanes = 16;
inline constexpr int kMicroRows = 6, kMicroVectors = 4;
inline constexpr bool kFastDot16 = true;

using F32 = __m512;
using I32 = __m512i;
using Mask = __mmask16;

MXFLASH_INLINE F32 load(const float* p) { return _mm512_loadu_ps(p); }
MXFLASH_INLINE void store(float* p, F32 x) { _mm512_storeu_ps(p, x); }
MXFLASH_INLINE I32 load(const int32_t* p) { return _mm512_loadu_si512(p); }
MXFLASH_INLINE void store(int32_t* p, I32 x) { _mm512_storeu_si512(p, x); }
MXFLASH_INLINE F32 broadcast(float x) { return _mm512_set1_ps(x); }
MXFLASH_INLINE I32 broadcast(int32_t x) { return _mm512_set1_epi32(x); }
MXFLASH_INLINE I32 iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

MXFLASH_INLINE F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
MXFLASH_INLINE F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
MXFLASH_INLINE F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
MXFLASH_INLINE F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
MXFLASH_INLINE F32 sqrt(F32 a) { return _mm512_sqrt_ps(a); }
MXFLASH_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
MXFLASH_INLINE F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
MXFLASH_INLINE F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
MXFLASH_INLINE F32 abs(F32 a) { return _mm512_abs_ps(a); }
MXFLASH_INLINE F32 exp2(F32 x) {
  // r = x - round(x) in one instruction, which is also right for -Inf and NaN.
  const F32 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  F32 p = broadcast(kExp2Poly[5]);
  p = fma(p, r, broadcast(kExp2Poly[4]));
  p = fma(p, r, broadcast(kExp2Poly[3]));
  p = fma(p, r, broadcast(kExp2Poly[2]));
  p = fma(p, r, broadcast(kExp2Poly[1]));
  p = fma(p, r, broadcast(kExp2Poly[0]));
  return _mm512_scalef_ps(p, sub(x, r));
}
MXFLASH_INLINE Mask less(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
MXFLASH_INLINE float reduce_add(F32 a) { return _mm512_reduce_add_ps(a); }
MXFLASH_INLINE float reduce_max(F32 a) { return _mm512_reduce_max_ps(a); }

MXFLASH_INLINE I32 add(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
MXFLASH_INLINE I32 sub(I32 a, I32 b) { return _mm512_sub_epi32(a, b); }
MXFLASH_INLINE I32 bit_and(I32 a, I32 b) { return _mm512_and_si512(a, b); }
MXFLASH_INLINE I32 bit_or(I32 a, I32 b) { return _mm512_or_si512(a, b); }
MXFLASH_INLINE I32 max(I32 a, I32 b) { return _mm512_max_epi32(a, b); }
template <int n>
MXFLASH_INLINE I32 shift_left(I32 a) {
  return _mm512_slli_epi32(a, n);
}
template <int n>
MXFLASH_INLINE I32 shift_right(I32 a) {
  return _mm512_srli_epi32(a, n);
}
MXFLASH_INLINE Mask less(I32 a, I32 b) { return _mm512_cmplt_epi32_mask(a, b); }
MXFLASH_INLINE Mask equal(I32 a, I32 b) { return _mm512_cmpeq_epi32_mask(a, b); }
MXFLASH_INLINE Mask mask_and(Mask a, Mask b) { return Mask(a & b); }
MXFLASH_INLINE bool any(Mask m) { return m != 0; }
MXFLASH_INLINE F32 select(Mask m, F32 if_set, F32 if_clear) { return _mm512_mask_blend_ps(m, if_clear, if_set); }
MXFLASH_INLINE I32 select(Mask m, I32 if_set, I32 if_clear) { return _mm512_mask_blend_epi32(m, if_clear, if_set); }
MXFLASH_INLINE int32_t reduce_max(I32 a) { return _mm512_reduce_max_epi32(a); }

MXFLASH_INLINE F32 as_float(I32 a) { return _mm512_castsi512_ps(a); }
MXFLASH_INLINE I32 as_int(F32 a) { return _mm512_castps_si512(a); }
MXFLASH_INLINE F32 to_float(I32 a) { return _mm512_cvtepi32_ps(a); }
MXFLASH_INLINE I32 round_to_int(F32 a) { return _mm512_cvtps_epi32(a); }

MXFLASH_INLINE F32 load_bf16(const uint16_t* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return as_float(shift_left<16>(_mm512_cvtepu16_epi32(bits)));
}
MXFLASH_INLINE F32 load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
MXFLASH_INLINE void store_bf16(uint16_t* p, F32 x) {
  const I32 bits = as_int(x), odd = bit_and(shift_right<16>(bits), broadcast(1));
  I32 rounded = shift_right<16>(add(bits, add(odd, broadcast(0x7FFF))));
  const Mask nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = select(nan, bit_or(shift_right<16>(bits), broadcast(0x40)), rounded);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
MXFLASH_INLINE void store_f16(uint16_t* p, F32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
MXFLASH_INLINE F32 load_e4m3(const uint8_t* p) {
  // An E4M3 code shifted into a half is that number times 2^-8, subnormals included; NaN codes read as 480.
  const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(int16_t(0xBF80)));
  const F32 x = mul(_mm512_cvtph_ps(half), broadcast(256.0f));
  const Mask nan = _mm512_cmp_ps_mask(abs(x), broadcast(480.0f), _CMP_EQ_OQ);
  return select(nan, as_float(broadcast(0x7FC00000)), x);
}
MXFLASH_INLINE F32 load_e5m2(const uint8_t* p) {
  const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtph_ps(_mm256_slli_epi16(codes, 8));
}
MXFLASH_INLINE F32 load_e8m0(const uint8_t* p) {
  const I32 bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  I32 bits = shift_left<23>(bytes);
  bits = select(equal(bytes, broadcast(0)), broadcast(0x00400000), bits);
  return as_float(select(equal(bytes, broadcast(255)), broadcast(0x7FC00000), bits));
}

MXFLASH_INLINE void store_int16(int16_t* p, I32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(x));
}
MXFLASH_INLINE I32 pack_int16(I32 x, I32 y) { return _mm512_mask_blend_epi16(0xAAAAAAAA, x, shift_left<16>(y)); }
MXFLASH_INLINE I32 dot16(I32 acc, I32 a, I32 b) {
  // Not the intrinsic: g++ 12 copies its accumulator around, which halves the rate of a micro-kernel.
  __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}

MXFLASH_INLINE void transpose(const float* src, int64_t src_stride, float* dst, int64_t dst_stride) {
  // Pairs of rows, then fours, within 128-bit quarters; then the quarters themselves.
  I32 r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(src + i * src_stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const I32 a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), b = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD);
    const I32 c = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88), d = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
    _mm512_storeu_si512(dst + i * dst_stride, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_storeu_si512(dst + (i + 8) * dst_stride, _mm512_shuffle_i32x4(a, c, 0xDD));
    _mm512_storeu_si512(dst + (i + 4) * dst_stride, _mm512_shuffle_i32x4(b, d, 0x88));
    _mm512_storeu_si512(dst + (i + 12) * dst_stride, _mm512_shuffle_i32x4(b, d, 0xDD));
  }
}

MXFLASH_ISA_END
