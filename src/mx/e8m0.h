// E8M0 scales: byte b means 2^(b - 127), 255 is NaN.
#pragma once

#include <mxflash/mx.h>

#include <bit>
#include <cstdint>

#include "mx/fp8.h"

namespace mxflash {

inline constexpr uint8_t kE8m0Nan = 255;
inline constexpr int kE8m0Bias = 127;

// 2^(b - 127) as fp32. b = 0 is 2^-127, an fp32 subnormal: a shift into the exponent field alone would give zero.
constexpr float decode_e8m0(uint8_t b) {
  if (b == kE8m0Nan) return std::bit_cast<float>(0x7FC00000u);
  if (b == 0) return std::bit_cast<float>(0x00400000u);
  return std::bit_cast<float>(uint32_t(b) << 23);
}

// The same as fp64, where it and all its products with elements are normal numbers.
constexpr double decode_e8m0_f64(uint8_t b) {
  if (b == kE8m0Nan) return std::bit_cast<double>(uint64_t(0x7FF8000000000000));
  return std::bit_cast<double>(uint64_t(int(b) - kE8m0Bias + 1023) << 52);
}

// Scale byte of a block whose largest magnitude has these fp32 bits (sign cleared). Pass the *largest bit pattern* of
// the block: NaN and Inf sort above every finite value, so one of them anywhere gives 255.
//   rceil: smallest e with amax <= max_element * 2^e. Both formats have max_element = 1.75 * 2^emax, so amax's
//     exponent is rounded up iff its mantissa exceeds .75: one integer add.
//   floor: floor(log2 amax) - emax.
// Clamped below at 2^-127, where blocks keep what E4M3 holds of them; fp32 cannot reach the upper clamp.
constexpr uint8_t scale_from_amax(uint32_t amax_bits, const Fp8Format& f, MxRule rule) {
  if (amax_bits >= 0x7F800000) return kE8m0Nan;
  const int exponent = int((rule == MxRule::rceil ? amax_bits + 0x1FFFFF : amax_bits) >> 23) - f.max_exponent;
  return uint8_t(exponent < 0 ? 0 : exponent);
}

// Payload of x in a block with scale b.
constexpr uint8_t encode_mx(float x, uint8_t b, const Fp8Format& f) {
  return b == kE8m0Nan ? kFp8Nan : encode_fp8(x, f, int(b) - kE8m0Bias);
}

// payload * 2^(b - 127), exact in fp64.
constexpr double decode_mx(uint8_t payload, uint8_t b, const Fp8Format& f) {
  return double(decode_fp8(payload, f)) * decode_e8m0_f64(b);
}

}  // namespace mxflash
