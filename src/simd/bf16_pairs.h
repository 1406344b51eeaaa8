// BF16 as pairs in 32-bit lanes: even elements in one vector, odd ones in the other. Widening is then a shift and a
// mask, and no element changes its lane.
#pragma once

#include <bit>
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
  I32 both = load(lanes);
#if defined(MXFLASH_ISA_AVX512)
  __asm__("" : "+v"(both));  // one load, not one for each half
#endif
  return {as_float(shift_left<16>(both)), as_float(bit_and(both, broadcast(int32_t(0xFFFF0000))))};
}

// Rounds to nearest even. A NaN stays one if the low half of its bits is zero: those that come from BF16 or from
// arithmetic are, others need canonical_nan first. The object holds the constants.
inline float canonical_nan(float x) { return x == x ? x : std::bit_cast<float>(0x7FC00000); }

#if defined(MXFLASH_ISA_AVX512)
class Bf16Rounding {
 public:
  // Left alone, GCC makes some of the constants anew for every vector.
  Bf16Rounding() { __asm__("" : "+v"(high_), "+v"(one_), "+v"(half_)); }

  MXFLASH_INLINE void store_pair(uint16_t* p, const F32Pair& x) const {
    // 16-bit lanes: a low half above 0x8000, or equal to it below an odd high one, rounds up.
    const I32 even = as_int(x.even), odd = as_int(x.odd);
    const I32 high = _mm512_ternarylogic_epi32(odd, high_, shift_right<16>(even), 0xEA);  // odd & high_ | even >> 16
    const I32 low = _mm512_ternarylogic_epi32(even, high_, shift_left<16>(odd), 0xBA);    // even & ~high_ | odd << 16
    const __mmask32 up = _mm512_cmpgt_epu16_mask(low, _mm512_sub_epi16(half_, _mm512_and_si512(high, one_)));
    _mm512_storeu_si512(p, _mm512_mask_add_epi16(high, up, high, one_));
  }

 private:
  I32 high_ = broadcast(int32_t(0xFFFF0000)), one_ = _mm512_set1_epi16(1), half_ = _mm512_set1_epi16(int16_t(0x8000));
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
    return add(bits, add(odd, broadcast(0x7FFF)));
  }
};
#endif

MXFLASH_ISA_END
