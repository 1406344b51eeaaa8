// AArch64 NEON: 4 lanes, 32 registers.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "simd/exp2.h"
#include "simd/isa.h"

MXFLASH_ISA_BEGIN

inline constexpr int kLanes = 4;
inline constexpr int kMicroRows = 6, kMicroVectors = 4;
inline constexpr bool kFastDot16 = false;

using F32 = float32x4_t;
using I32 = int32x4_t;
using Mask = uint32x4_t;  // lanes of ones or zeros

MXFLASH_INLINE F32 load(const float* p) { return vld1q_f32(p); }
MXFLASH_INLINE void store(float* p, F32 x) { vst1q_f32(p, x); }
MXFLASH_INLINE I32 load(const int32_t* p) { return vld1q_s32(p); }
MXFLASH_INLINE void store(int32_t* p, I32 x) { vst1q_s32(p, x); }
MXFLASH_INLINE F32 broadcast(float x) { return vdupq_n_f32(x); }
MXFLASH_INLINE I32 broadcast(int32_t x) { return vdupq_n_s32(x); }
MXFLASH_INLINE I32 iota() { return I32{0, 1, 2, 3}; }

MXFLASH_INLINE F32 as_float(I32 a) { return vreinterpretq_f32_s32(a); }
MXFLASH_INLINE I32 as_int(F32 a) { return vreinterpretq_s32_f32(a); }
MXFLASH_INLINE F32 to_float(I32 a) { return vcvtq_f32_s32(a); }
MXFLASH_INLINE I32 round_to_int(F32 a) { return vcvtnq_s32_f32(a); }

MXFLASH_INLINE I32 add(I32 a, I32 b) { return vaddq_s32(a, b); }
MXFLASH_INLINE I32 sub(I32 a, I32 b) { return vsubq_s32(a, b); }
MXFLASH_INLINE I32 bit_and(I32 a, I32 b) { return vandq_s32(a, b); }
MXFLASH_INLINE I32 bit_or(I32 a, I32 b) { return vorrq_s32(a, b); }
MXFLASH_INLINE I32 max(I32 a, I32 b) { return vmaxq_s32(a, b); }
template <int n>
MXFLASH_INLINE I32 shift_left(I32 a) {
  return vshlq_n_s32(a, n);
}
template <int n>
MXFLASH_INLINE I32 shift_right(I32 a) {
  return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), n));
}
MXFLASH_INLINE Mask less(I32 a, I32 b) { return vcltq_s32(a, b); }
MXFLASH_INLINE Mask equal(I32 a, I32 b) { return vceqq_s32(a, b); }
MXFLASH_INLINE Mask less(F32 a, F32 b) { return vcltq_f32(a, b); }
MXFLASH_INLINE Mask mask_and(Mask a, Mask b) { return vandq_u32(a, b); }
MXFLASH_INLINE bool any(Mask m) { return vmaxvq_u32(m) != 0; }
MXFLASH_INLINE F32 select(Mask m, F32 if_set, F32 if_clear) { return vbslq_f32(m, if_set, if_clear); }
MXFLASH_INLINE I32 select(Mask m, I32 if_set, I32 if_clear) { return vbslq_s32(m, if_set, if_clear); }
MXFLASH_INLINE int32_t reduce_max(I32 a) { return vmaxvq_s32(a); }

MXFLASH_INLINE F32 add(F32 a, F32 b) { return vaddq_f32(a, b); }
MXFLASH_INLINE F32 sub(F32 a, F32 b) { return vsubq_f32(a, b); }
MXFLASH_INLINE F32 mul(F32 a, F32 b) { return vmulq_f32(a, b); }
MXFLASH_INLINE F32 div(F32 a, F32 b) { return vdivq_f32(a, b); }
MXFLASH_INLINE F32 sqrt(F32 a) { return vsqrtq_f32(a); }
MXFLASH_INLINE F32 fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }
// Not fmax and fmin, which give NaN if either is.
MXFLASH_INLINE F32 max(F32 a, F32 b) { return select(less(b, a), a, b); }
MXFLASH_INLINE F32 min(F32 a, F32 b) { return select(less(a, b), a, b); }
MXFLASH_INLINE F32 abs(F32 a) { return vabsq_f32(a); }
MXFLASH_INLINE F32 exp2(F32 x) {
  // The sum with 1.5 * 2^23 has round(x) in its low bits.
  const F32 magic = broadcast(12582912.0f), shifted = add(x, magic), r = sub(x, sub(shifted, magic));
  F32 p = broadcast(kExp2Poly[5]);
  p = fma(p, r, broadcast(kExp2Poly[4]));
  p = fma(p, r, broadcast(kExp2Poly[3]));
  p = fma(p, r, broadcast(kExp2Poly[2]));
  p = fma(p, r, broadcast(kExp2Poly[1]));
  p = fma(p, r, broadcast(kExp2Poly[0]));
  // In [-126, 128) the result is normal: the exponent is added to its bits. Below it is 0. Above, and for NaN,
  // x * 2^127 is Inf or NaN.
  const I32 normal = add(as_int(p), shift_left<23>(as_int(shifted)));
  const F32 small = select(less(x, broadcast(-126.0f)), broadcast(0.0f), as_float(normal));
  return select(less(x, broadcast(128.0f)), small, mul(x, broadcast(0x1p127f)));
}
MXFLASH_INLINE float reduce_add(F32 a) { return vaddvq_f32(a); }
MXFLASH_INLINE float reduce_max(F32 a) { return vmaxvq_f32(a); }

MXFLASH_INLINE F32 load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
MXFLASH_INLINE F32 load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
MXFLASH_INLINE void store_bf16(uint16_t* p, F32 x) {
  const I32 bits = as_int(x), odd = bit_and(shift_right<16>(bits), broadcast(1));
  const I32 rounded = add(bits, add(odd, broadcast(0x7FFF)));
  const I32 high = select(vceqq_f32(x, x), rounded, bit_or(bits, broadcast(0x400000)));
  vst1_u16(p, vshrn_n_u32(vreinterpretq_u32_s32(high), 16));
}
MXFLASH_INLINE void store_f16(uint16_t* p, F32 x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
MXFLASH_INLINE uint8x8_t load_bytes(const uint8_t* p) {  // the upper four are 0
  uint32_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return vcreate_u8(bytes);
}
MXFLASH_INLINE F32 from_halves(uint16x8_t bits) { return vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(bits))); }
MXFLASH_INLINE F32 load_e4m3(const uint8_t* p) {
  // An E4M3 code shifted into a half is that number times 2^-8, subnormals included; NaN codes would read as 480.
  const uint16x8_t codes = vreinterpretq_u16_s16(vshll_n_s8(vreinterpret_s8_u8(load_bytes(p)), 7));
  const uint16x8_t nan = vceqq_u16(vshlq_n_u16(codes, 2), vdupq_n_u16(0xFE00));
  const uint16x8_t half = vandq_u16(codes, vdupq_n_u16(0xBF80)), quiet = vandq_u16(nan, vdupq_n_u16(0x7E00));
  return mul(from_halves(vorrq_u16(half, quiet)), broadcast(256.0f));
}
MXFLASH_INLINE F32 load_e5m2(const uint8_t* p) { return from_halves(vshll_n_u8(load_bytes(p), 8)); }
MXFLASH_INLINE F32 load_e8m0(const uint8_t* p) {
  const I32 bytes = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load_bytes(p)))));
  const I32 bits = max(shift_left<23>(bytes), broadcast(0x00400000));  // byte 0 is 2^-127
  return as_float(select(equal(bytes, broadcast(255)), broadcast(0x7FC00000), bits));
}

MXFLASH_INLINE void store_int16(int16_t* p, I32 x) { vst1_s16(p, vmovn_s32(x)); }
MXFLASH_INLINE I32 pack_int16(I32 x, I32 y) {
  return vreinterpretq_s32_s16(vtrn1q_s16(vreinterpretq_s16_s32(x), vreinterpretq_s16_s32(y)));
}
MXFLASH_INLINE I32 dot16(I32 acc, I32 a, I32 b) {
  const int16x8_t a16 = vreinterpretq_s16_s32(a), b16 = vreinterpretq_s16_s32(b);
  const I32 low = vmull_s16(vget_low_s16(a16), vget_low_s16(b16)), high = vmull_high_s16(a16, b16);
  return add(acc, vpaddq_s32(low, high));
}

MXFLASH_INLINE void transpose(const float* src, int64_t src_stride, float* dst, int64_t dst_stride) {
  const F32 r0 = load(src), r1 = load(src + src_stride), r2 = load(src + 2 * src_stride),
            r3 = load(src + 3 * src_stride);
  const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(r0, r1)), b = vreinterpretq_f64_f32(vtrn2q_f32(r0, r1));
  const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(r2, r3)), d = vreinterpretq_f64_f32(vtrn2q_f32(r2, r3));
  store(dst, vreinterpretq_f32_f64(vtrn1q_f64(a, c)));
  store(dst + dst_stride, vreinterpretq_f32_f64(vtrn1q_f64(b, d)));
  store(dst + 2 * dst_stride, vreinterpretq_f32_f64(vtrn2q_f64(a, c)));
  store(dst + 3 * dst_stride, vreinterpretq_f32_f64(vtrn2q_f64(b, d)));
}

MXFLASH_ISA_END
