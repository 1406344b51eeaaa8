// Vectors in plain C++, and what the functions of every ISA mean. Nothing here is fast; it runs anywhere.
//
// Pointers need no alignment. Rounding is to nearest even; the compiler must not contract a*b+c.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "mx/e8m0.h"
#include "mx/float16.h"
#include "mx/fp8.h"
#include "simd/exp2.h"
#include "simd/isa.h"

MXFLASH_ISA_BEGIN

inline constexpr int kLanes = 4;
// Accumulators of a micro-kernel: rows x vectors, so that they, the vectors of one step and a broadcast fit the
// registers.
inline constexpr int kMicroRows = 4, kMicroVectors = 2;
inline constexpr bool kFastDot16 = false;  // dot16 has a higher rate than fma

struct F32 {
  float lane[kLanes];
};
struct I32 {
  int32_t lane[kLanes];
};
using Mask = uint32_t;  // bit l: lane l

template <class Result, class Lane>
MXFLASH_INLINE Result each(Lane&& lane) {
  Result r;
  for (int l = 0; l < kLanes; ++l) r.lane[l] = lane(l);
  return r;
}

MXFLASH_INLINE F32 load(const float* p) {
  F32 r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
MXFLASH_INLINE void store(float* p, F32 x) { std::memcpy(p, &x, sizeof x); }
MXFLASH_INLINE I32 load(const int32_t* p) {
  I32 r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
MXFLASH_INLINE void store(int32_t* p, I32 x) { std::memcpy(p, &x, sizeof x); }
MXFLASH_INLINE F32 broadcast(float x) {
  return each<F32>([&](int) { return x; });
}
MXFLASH_INLINE I32 broadcast(int32_t x) {
  return each<I32>([&](int) { return x; });
}
// Lane l is l.
MXFLASH_INLINE I32 iota() {
  return each<I32>([](int l) { return l; });
}

// ---- fp32 -------------------------------------------------------------------------------------------------------

MXFLASH_INLINE F32 add(F32 a, F32 b) {
  return each<F32>([&](int l) { return a.lane[l] + b.lane[l]; });
}
MXFLASH_INLINE F32 sub(F32 a, F32 b) {
  return each<F32>([&](int l) { return a.lane[l] - b.lane[l]; });
}
MXFLASH_INLINE F32 mul(F32 a, F32 b) {
  return each<F32>([&](int l) { return a.lane[l] * b.lane[l]; });
}
MXFLASH_INLINE F32 div(F32 a, F32 b) {
  return each<F32>([&](int l) { return a.lane[l] / b.lane[l]; });
}
MXFLASH_INLINE F32 sqrt(F32 a) {
  return each<F32>([&](int l) { return std::sqrt(a.lane[l]); });
}
// a * b + c, rounded once where the ISA can. Not for results that must be bit-equal everywhere.
MXFLASH_INLINE F32 fma(F32 a, F32 b, F32 c) {
  return each<F32>([&](int l) { return a.lane[l] * b.lane[l] + c.lane[l]; });
}
// If either is NaN: b.
MXFLASH_INLINE F32 max(F32 a, F32 b) {
  return each<F32>([&](int l) { return a.lane[l] > b.lane[l] ? a.lane[l] : b.lane[l]; });
}
MXFLASH_INLINE F32 min(F32 a, F32 b) {
  return each<F32>([&](int l) { return a.lane[l] < b.lane[l] ? a.lane[l] : b.lane[l]; });
}
MXFLASH_INLINE F32 abs(F32 a) {
  return each<F32>([&](int l) { return std::fabs(a.lane[l]); });
}
// 2^x, relative error below 3e-7 for normal results; smaller ones may be 0. -Inf gives 0, 128 and more Inf, NaN NaN.
MXFLASH_INLINE F32 exp2(F32 x) {
  return each<F32>([&](int l) {
    const float n = std::nearbyint(x.lane[l]);
    if (!(std::fabs(n) < 2000)) return x.lane[l] < 0 ? 0.0f : x.lane[l] * 0x1p127f;
    const float r = x.lane[l] - n;
    float p = kExp2Poly[5];
    for (int i = 4; i >= 0; --i) p = p * r + kExp2Poly[i];
    return std::ldexp(p, int(n));
  });
}
MXFLASH_INLINE Mask less(F32 a, F32 b) {  // false if either is NaN
  Mask m = 0;
  for (int l = 0; l < kLanes; ++l) m |= Mask(a.lane[l] < b.lane[l]) << l;
  return m;
}
MXFLASH_INLINE float reduce_add(F32 a) {  // in any order
  float sum = 0;
  for (float x : a.lane) sum += x;
  return sum;
}
MXFLASH_INLINE float reduce_max(F32 a) {
  float m = a.lane[0];
  for (float x : a.lane) m = x > m ? x : m;
  return m;
}

// ---- int32 and masks --------------------------------------------------------------------------------------------

MXFLASH_INLINE I32 add(I32 a, I32 b) {
  return each<I32>([&](int l) { return int32_t(uint32_t(a.lane[l]) + uint32_t(b.lane[l])); });
}
MXFLASH_INLINE I32 sub(I32 a, I32 b) {
  return each<I32>([&](int l) { return int32_t(uint32_t(a.lane[l]) - uint32_t(b.lane[l])); });
}
MXFLASH_INLINE I32 bit_and(I32 a, I32 b) {
  return each<I32>([&](int l) { return a.lane[l] & b.lane[l]; });
}
MXFLASH_INLINE I32 bit_or(I32 a, I32 b) {
  return each<I32>([&](int l) { return a.lane[l] | b.lane[l]; });
}
MXFLASH_INLINE I32 max(I32 a, I32 b) {
  return each<I32>([&](int l) { return a.lane[l] > b.lane[l] ? a.lane[l] : b.lane[l]; });
}
template <int n>
MXFLASH_INLINE I32 shift_left(I32 a) {
  return each<I32>([&](int l) { return int32_t(uint32_t(a.lane[l]) << n); });
}
template <int n>
MXFLASH_INLINE I32 shift_right(I32 a) {  // fills with zeros
  return each<I32>([&](int l) { return int32_t(uint32_t(a.lane[l]) >> n); });
}
MXFLASH_INLINE Mask less(I32 a, I32 b) {
  Mask m = 0;
  for (int l = 0; l < kLanes; ++l) m |= Mask(a.lane[l] < b.lane[l]) << l;
  return m;
}
MXFLASH_INLINE Mask equal(I32 a, I32 b) {
  Mask m = 0;
  for (int l = 0; l < kLanes; ++l) m |= Mask(a.lane[l] == b.lane[l]) << l;
  return m;
}
MXFLASH_INLINE Mask mask_and(Mask a, Mask b) { return a & b; }
MXFLASH_INLINE bool any(Mask m) { return m != 0; }
MXFLASH_INLINE F32 select(Mask m, F32 if_set, F32 if_clear) {
  return each<F32>([&](int l) { return m >> l & 1 ? if_set.lane[l] : if_clear.lane[l]; });
}
MXFLASH_INLINE I32 select(Mask m, I32 if_set, I32 if_clear) {
  return each<I32>([&](int l) { return m >> l & 1 ? if_set.lane[l] : if_clear.lane[l]; });
}
MXFLASH_INLINE int32_t reduce_max(I32 a) {
  int32_t m = a.lane[0];
  for (int32_t x : a.lane) m = x > m ? x : m;
  return m;
}

// ---- conversions ------------------------------------------------------------------------------------------------

MXFLASH_INLINE F32 as_float(I32 a) { return std::bit_cast<F32>(a); }
MXFLASH_INLINE I32 as_int(F32 a) { return std::bit_cast<I32>(a); }
MXFLASH_INLINE F32 to_float(I32 a) {
  return each<F32>([&](int l) { return float(a.lane[l]); });
}
// Nearest, ties to even; |a| < 2^31.
MXFLASH_INLINE I32 round_to_int(F32 a) {
  return each<I32>([&](int l) { return int32_t(std::nearbyint(a.lane[l])); });
}

// kLanes elements of each storage type.
MXFLASH_INLINE F32 load_bf16(const uint16_t* p) {
  return each<F32>([&](int l) { return decode_bf16(p[l]); });
}
MXFLASH_INLINE F32 load_f16(const uint16_t* p) {
  return each<F32>([&](int l) { return decode_f16(p[l]); });
}
MXFLASH_INLINE void store_bf16(uint16_t* p, F32 x) {  // NaN stays NaN
  for (int l = 0; l < kLanes; ++l) p[l] = encode_bf16(x.lane[l]);
}
MXFLASH_INLINE void store_f16(uint16_t* p, F32 x) {
  for (int l = 0; l < kLanes; ++l) p[l] = encode_f16(x.lane[l]);
}
// Unscaled values of kLanes codes; NaN codes give NaN, E5M2's infinities Inf.
MXFLASH_INLINE F32 load_e4m3(const uint8_t* p) {
  return each<F32>([&](int l) { return decode_fp8(p[l], kE4m3); });
}
MXFLASH_INLINE F32 load_e5m2(const uint8_t* p) {
  return each<F32>([&](int l) { return decode_fp8(p[l], kE5m2); });
}
// 2^(b - 127) for kLanes scale bytes; 255 gives NaN.
MXFLASH_INLINE F32 load_e8m0(const uint8_t* p) {
  return each<F32>([&](int l) { return decode_e8m0(p[l]); });
}

// ---- int16 dot product ------------------------------------------------------------------------------------------

// kLanes values, |x| <= 32767.
MXFLASH_INLINE void store_int16(int16_t* p, I32 x) {
  for (int l = 0; l < kLanes; ++l) p[l] = int16_t(x.lane[l]);
}
// Lanes of x, |x| <= 32767, become the low int16 halves and those of y the high halves.
MXFLASH_INLINE I32 pack_int16(I32 x, I32 y) { return bit_or(bit_and(x, broadcast(0xFFFF)), shift_left<16>(y)); }
// acc + low(a) * low(b) + high(a) * high(b), in int32.
MXFLASH_INLINE I32 dot16(I32 acc, I32 a, I32 b) {
  return each<I32>([&](int l) {
    const auto low = [](int32_t x) { return int32_t(int16_t(x)); };
    return acc.lane[l] + low(a.lane[l]) * low(b.lane[l]) + (a.lane[l] >> 16) * (b.lane[l] >> 16);
  });
}

// ---- transpose --------------------------------------------------------------------------------------------------

// dst[c][r] = src[r][c] for r, c in [0, kLanes); strides in elements.
MXFLASH_INLINE void transpose(const float* src, int64_t src_stride, float* dst, int64_t dst_stride) {
  for (int r = 0; r < kLanes; ++r) {
    for (int c = 0; c < kLanes; ++c) dst[c * dst_stride + r] = src[r * src_stride + c];
  }
}

MXFLASH_ISA_END
