// fp32 to MX codes in vectors, and the byte moves around it.
//
// One block's width, 32 elements, is the unit: kBlockVectors vectors of fp32, or 32 bytes of codes.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "mx/block.h"
#include "simd/vector.h"

MXFLASH_ISA_BEGIN

inline constexpr int kBlockVectors = int(kMxBlock) / kLanes;
inline constexpr int64_t kStripCols = 128;  // of a tile at a time: 8 KiB of BF16

// ---- bytes ------------------------------------------------------------------------------------------------------

// 32 values in 0..255 to 32 bytes. store_bytes needs no alignment. stream_bytes needs 32 bytes and leaves the line out
// of the cache where the ISA can: for outputs that do not fit there, which then are not read before they are written.
#if defined(MXFLASH_ISA_AVX512)
MXFLASH_INLINE __m256i pack_bytes(const I32* v) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(v[0])), _mm512_cvtepi32_epi8(v[1]), 1);
}
#elif defined(MXFLASH_ISA_AVX2)
MXFLASH_INLINE __m256i pack_bytes(const I32* v) {
  const __m256i words = _mm256_packus_epi32(v[0], v[1]), more = _mm256_packus_epi32(v[2], v[3]);
  const __m256i bytes = _mm256_packus_epi16(words, more);  // fours of bytes: 0 2 4 6 1 3 5 7
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
#endif
#if defined(MXFLASH_ISA_AVX512) || defined(MXFLASH_ISA_AVX2)
MXFLASH_INLINE void store_bytes(uint8_t* p, const I32* v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack_bytes(v));
}
MXFLASH_INLINE void stream_bytes(uint8_t* p, const I32* v) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), pack_bytes(v));
}
// After the last stream_bytes, before another thread is told.
MXFLASH_INLINE void stream_done() { _mm_sfence(); }
#elif defined(MXFLASH_ISA_NEON)
MXFLASH_INLINE void store_bytes(uint8_t* p, const I32* v) {
  for (int i = 0; i < kBlockVectors; i += 4) {
    const uint16x8_t low =
        vcombine_u16(vmovn_u32(vreinterpretq_u32_s32(v[i])), vmovn_u32(vreinterpretq_u32_s32(v[i + 1])));
    const uint16x8_t high =
        vcombine_u16(vmovn_u32(vreinterpretq_u32_s32(v[i + 2])), vmovn_u32(vreinterpretq_u32_s32(v[i + 3])));
    vst1q_u8(p + 4 * i, vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
  }
}
MXFLASH_INLINE void stream_bytes(uint8_t* p, const I32* v) { store_bytes(p, v); }
MXFLASH_INLINE void stream_done() {}
#else
MXFLASH_INLINE void store_bytes(uint8_t* p, const I32* v) {
  for (int i = 0; i < kBlockVectors; ++i) {
    for (int l = 0; l < kLanes; ++l) p[i * kLanes + l] = uint8_t(v[i].lane[l]);
  }
}
MXFLASH_INLINE void stream_bytes(uint8_t* p, const I32* v) { store_bytes(p, v); }
MXFLASH_INLINE void stream_done() {}
#endif

// One vector of fp32, to a multiple of its size.
#if defined(MXFLASH_ISA_AVX512)
MXFLASH_INLINE void stream(float* p, F32 x) { _mm512_stream_ps(p, x); }
#elif defined(MXFLASH_ISA_AVX2)
MXFLASH_INLINE void stream(float* p, F32 x) { _mm256_stream_ps(p, x); }
#else
MXFLASH_INLINE void stream(float* p, F32 x) { store(p, x); }
#endif

// To L2: what is fetched so far ahead would push out of L1 what is worked on.
MXFLASH_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// ---- codes ------------------------------------------------------------------------------------------------------

// What the vectors need to know of an Fp8Format, as template arguments.
struct E4m3 {
  static constexpr Fp8Format format = kE4m3;
};
struct E5m2 {
  static constexpr Fp8Format format = kE5m2;
};

// 2^(127 - b): an element times this is the number that is rounded. b <= 246 for every finite block.
MXFLASH_INLINE float encode_factor(uint8_t b) { return std::bit_cast<float>(uint32_t(254 - b) << 23); }
MXFLASH_INLINE F32 encode_factor(I32 b) { return as_float(shift_left<23>(sub(broadcast(254), b))); }

MXFLASH_INLINE I32 magnitude_bits(F32 x) { return bit_and(as_int(x), broadcast(0x7FFFFFFF)); }

// Scale bytes of blocks with these amax bits: scale_from_amax of mx/e8m0.h.
template <class Element>
MXFLASH_INLINE I32 scale_from_amax(I32 amax, MxRule rule) {
  const I32 up = add(amax, broadcast(rule == MxRule::rceil ? 0x1FFFFF : 0));
  const I32 exponent = max(sub(shift_right<23>(up), broadcast(Element::format.max_exponent)), broadcast(0));
  return select(less(amax, broadcast(0x7F800000)), exponent, broadcast(kE8m0Nan));
}

// Codes of x * factor, rounded to nearest even and saturated. Both steps are exact but for that one rounding: the
// product is one with a power of two (where it is subnormal, the code is zero either way), and adding 2^(23 - mantissa
// bits) times the element's power of two rounds it to the grid of its binade, a carry into the next one included.
template <class Element>
MXFLASH_INLINE I32 encode(F32 x, F32 factor) {
  constexpr Fp8Format f = Element::format;
  constexpr int kShift = 23 - f.mantissa_bits;
  constexpr int32_t kMinNormal = (f.min_exponent() + 127) << 23;
  const F32 y = mul(x, factor);
  const F32 magnitude = min(abs(y), broadcast(std::bit_cast<float>(f.max_bits)));
  const I32 binade = bit_and(as_int(max(magnitude, as_float(broadcast(kMinNormal)))), broadcast(0x7F800000));
  const I32 grid = add(binade, broadcast(kShift << 23));
  const I32 steps = sub(as_int(add(magnitude, as_float(grid))), grid);
  const I32 first = sub(shift_right<kShift>(binade), broadcast(kMinNormal >> kShift));
  return bit_or(add(steps, first), bit_and(shift_right<24>(as_int(y)), broadcast(0x80)));
}

MXFLASH_ISA_END
