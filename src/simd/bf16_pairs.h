// BF16 as pairs in 32-bit lanes: even elements in one vector, odd ones in the other. Widening is then a shift and a
// mask, and no element changes its lane.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd/vector.h"

MXFLASH_ISA_BEGIN

inline constexpr int kPairLanes = 2 * kLanes;  // elements of a pair of vectors

struct F32Pair {
  F32 even, odd;
};
MXFLASH_INLINE F32Pair add(const F32Pair& a, const F32Pair& b) { return {add(a.even, b.even), add(a.odd, b.odd)}; }
MXFLASH_INLINE F32Pair mul(const F32Pair& a, const F32Pair& b) { return {mul(a.even, b.even), mul(a.odd, b.odd)}; }

MXFLASH_INLINE F32Pair load_bf16_pair(const uint16_t* p) {
  int32_t lanes[kLanes];
  std::memcpy(lanes, p, sizeof lanes);
  const I32 both = load(lanes);
  return {as_float(shift_left<16>(both)), as_float(bit_and(both, broadcast(int32_t(0xFFFF0000))))};
}

// Rounds to nearest even; NaN stays NaN. The object holds the constants.
#if defined(MXFLASH_ISA_AVX512)
class Bf16Rounding {
 public:
  // Left alone, GCC makes some of the constants anew for every vector.
  Bf16Rounding() { __asm__("" : "+v"(high_), "+v"(one_), "+v"(half_), "+v"(magnitude_), "+v"(infinity_)); }

  MXFLASH_INLINE void store_pair(uint16_t* p, const F32Pair& x) const {
    // 16-bit lanes: a low half above 0x8000, or equal to it below an odd high one, rounds up.
    const I32 even = as_int(x.even), odd = as_int(x.odd);
    const I32 high = _mm512_ternarylogic_epi32(odd, high_, shift_right<16>(even), 0xEA);  // odd & high | even >> 16
    const I32 low = _mm512_ternarylogic_epi32(even, high_, shift_left<16>(odd), 0xBA);    // even & ~high | odd << 16
    const __mmask32 up = _mm512_cmpgt_epu16_mask(low, _mm512_sub_epi16(half_, _mm512_and_si512(high, one_)));
    I32 rounded = _mm512_mask_add_epi16(high, up, high, one_);
    // NaN could have become Inf or zero.
    if (_mm512_cmpge_epu16_mask(_mm512_and_si512(high, magnitude_), infinity_)) [[unlikely]] {
      const __mmask16 even_nan = _mm512_cmp_ps_mask(x.even, x.even, _CMP_UNORD_Q);
      const __mmask16 odd_nan = _mm512_cmp_ps_mask(x.odd, x.odd, _CMP_UNORD_Q);
      const I32 quiet = bit_or(high, broadcast(0x00400040));
      rounded = _mm512_mask_blend_epi32(even_nan, rounded, _mm512_ternarylogic_epi32(rounded, quiet, high_, 0xE4));
      rounded = _mm512_mask_blend_epi32(odd_nan, rounded, _mm512_ternarylogic_epi32(quiet, rounded, high_, 0xE4));
    }
    _mm512_storeu_si512(p, rounded);
  }

 private:
  I32 high_ = broadcast(int32_t(0xFFFF0000)), one_ = _mm512_set1_epi16(1), half_ = _mm512_set1_epi16(int16_t(0x8000));
  I32 magnitude_ = _mm512_set1_epi16(0x7FFF), infinity_ = _mm512_set1_epi16(0x7F80);
};
#else
class Bf16Rounding {
 public:
  MXFLASH_INLINE void store_pair(uint16_t* p, const F32Pair& x) const {
    const I32 pair = bit_or(shift_right<16>(round(x.even)), bit_and(round(x.odd), broadcast(int32_t(0xFFFF0000))));
    int32_t lanes[kLanes];
    store(lanes, pair);
    std::memcpy(p, lanes, sizeof lanes);
  }

 private:
  // The high half is the result.
  MXFLASH_INLINE static I32 round(F32 x) {
    const I32 bits = as_int(x), odd = bit_and(shift_right<16>(bits), broadcast(1));
    const I32 rounded = add(bits, add(odd, broadcast(0x7FFF)));
    const Mask nan = less(broadcast(0x7F800000), bit_and(bits, broadcast(0x7FFFFFFF)));
    return select(nan, bit_or(bits, broadcast(0x00400000)), rounded);
  }
};
#endif

MXFLASH_ISA_END
