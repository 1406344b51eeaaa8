// What a kernel that reads FP8 codes straight from memory needs beyond vector.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd/vector.h"

MXFLASH_ISA_BEGIN

// kLanes E4M3 codes, times 2^-8: what load_e4m3 has before it scales, and looks for NaN. A NaN code gives some number.
MXFLASH_INLINE F32 load_small_e4m3(const uint8_t* p) {
#if defined(MXFLASH_ISA_AVX512)
  const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(int16_t(0xBF80))));
#elif defined(MXFLASH_ISA_AVX2)
  const __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16(int16_t(0xBF80))));
#elif defined(MXFLASH_ISA_NEON)
  const uint16x8_t codes = vreinterpretq_u16_s16(vshll_n_s8(vreinterpret_s8_u8(load_bytes(p)), 7));
  return from_halves(vandq_u16(codes, vdupq_n_u16(0xBF80)));
#else
  return each<F32>([&](int l) { return (p[l] & 0x7F) == 0x7F ? 0 : decode_fp8(p[l], kE4m3) * 0x1p-8f; });
#endif
}

// The same address, but the compiler cannot know: what is loaded from it is loaded again for every use, as an operand.
MXFLASH_INLINE const float* forget(const float* p) {
#if defined(MXFLASH_ISA_AVX512)
  __asm__ volatile("" : "+r"(p));
#endif
  return p;
}

// Whether there is a NaN among E4M3 codes.
class NanSearch {
 public:
  static constexpr int64_t kCodes = kLanes * 4;  // of a look
#if defined(MXFLASH_ISA_AVX512)
  // 0x7F is the largest signed byte, 0xFF the largest unsigned one.
  MXFLASH_INLINE NanSearch() : signed_max_(broadcast(0)), unsigned_max_(broadcast(0)) {}
  MXFLASH_INLINE void look(const uint8_t* p) {
    const I32 codes = _mm512_loadu_si512(p);
    signed_max_ = _mm512_max_epi8(signed_max_, codes);
    unsigned_max_ = _mm512_max_epu8(unsigned_max_, codes);
  }
  MXFLASH_INLINE bool found() const {
    return (_mm512_cmpeq_epi8_mask(signed_max_, _mm512_set1_epi8(0x7F)) |
            _mm512_cmpeq_epi8_mask(unsigned_max_, _mm512_set1_epi8(-1))) != 0;
  }

 private:
  I32 signed_max_, unsigned_max_;
#else
  // A carry into bit 7 tells that the bits below it are all ones.
  MXFLASH_INLINE NanSearch() : found_(broadcast(0)) {}
  MXFLASH_INLINE void look(const uint8_t* p) {
    int32_t codes[kLanes];
    std::memcpy(codes, p, sizeof codes);
    found_ = bit_or(found_, add(bit_and(load(codes), broadcast(0x7F7F7F7F)), broadcast(0x01010101)));
  }
  MXFLASH_INLINE bool found() const {
    const I32 bits = bit_and(found_, broadcast(int32_t(0x80808080)));
    return any(less(bits, broadcast(0))) || any(less(broadcast(0), bits));
  }

 private:
  I32 found_;
#endif
};

// Lane l of the result is the sum over the lanes of x[l]. Every lane adds in the same order.
MXFLASH_INLINE F32 sum_each(const F32 (&x)[kLanes]) {
#if defined(MXFLASH_ISA_AVX512)
  // Halves the number of vectors four times: 15 additions and 30 shuffles.
  F32 y[8], z[4], w[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const F32 a = x[i / 4 * 8 + i % 4], b = x[i / 4 * 8 + i % 4 + 4];
    y[i] = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    z[i] = add(_mm512_shuffle_f32x4(y[i], y[i + 4], 0x88), _mm512_shuffle_f32x4(y[i], y[i + 4], 0xDD));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) w[i] = add(_mm512_unpacklo_ps(z[i], z[i + 2]), _mm512_unpackhi_ps(z[i], z[i + 2]));
  return add(_mm512_unpacklo_ps(w[0], w[1]), _mm512_unpackhi_ps(w[0], w[1]));
#elif defined(MXFLASH_ISA_AVX2)
  const F32 low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const F32 high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
#elif defined(MXFLASH_ISA_NEON)
  return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3]));
#else
  return each<F32>([&](int l) { return reduce_add(x[l]); });
#endif
}

MXFLASH_ISA_END
