// E4M3 and E5M2 codecs, constexpr, in integer arithmetic: no result depends on the rounding mode, on flush-to-zero
// flags, or on whether the code runs on a CPU or a GPU.
#pragma once

#include <mxflash/types.h>

#include <bit>
#include <cstdint>
#include <limits>

namespace mxflash {

struct Fp8Format {
  int mantissa_bits;
  int bias;
  int max_exponent;   // floor(log2(max))
  uint32_t max_bits;  // the largest finite value, as fp32 bits
  uint8_t max_code;
  bool has_infinity;  // codes with an all-ones exponent are Inf and NaN (IEEE), not numbers

  constexpr int min_exponent() const { return 1 - bias; }  // of the smallest normal number
};

// Functions, because device code must not refer to a host object by address.
constexpr Fp8Format e4m3_format() { return {3, 7, 8, std::bit_cast<uint32_t>(448.0f), 0x7E, false}; }
constexpr Fp8Format e5m2_format() { return {2, 15, 15, std::bit_cast<uint32_t>(57344.0f), 0x7B, true}; }
constexpr Fp8Format fp8_format(Dtype element) { return element == Dtype::e5m2 ? e5m2_format() : e4m3_format(); }

inline constexpr Fp8Format kE4m3 = e4m3_format();  // host code only
inline constexpr Fp8Format kE5m2 = e5m2_format();
inline constexpr uint8_t kFp8Nan = 0x7F;  // in both formats

// Exact value of a code. NaN codes give NaN, E5M2's Inf codes give Inf.
constexpr float decode_fp8(uint8_t code, const Fp8Format& f) {
  const uint32_t sign = uint32_t(code & 0x80) << 24;
  const uint32_t magnitude = code & 0x7F;
  const uint32_t exponent = magnitude >> f.mantissa_bits;
  const uint32_t mantissa = magnitude & ((1u << f.mantissa_bits) - 1);
  if (f.has_infinity && exponent == 31u) {
    return std::bit_cast<float>(sign | 0x7F800000u | (mantissa ? 0x400000u : 0u));
  }
  if (!f.has_infinity && magnitude == kFp8Nan) return std::bit_cast<float>(sign | 0x7FC00000u);
  if (exponent == 0) {  // subnormal: mantissa * 2^(min_exponent - mantissa_bits), exact in fp32
    const float unit = std::bit_cast<float>(uint32_t(127 + f.min_exponent() - f.mantissa_bits) << 23);
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float(mantissa) * unit));
  }
  return std::bit_cast<float>(sign | ((exponent + uint32_t(127 - f.bias)) << 23) |
                              (mantissa << (23 - f.mantissa_bits)));
}

// x * 2^-exponent rounded to nearest even, saturating; NaN gives 0x7F; the sign of zero is kept.
constexpr uint8_t encode_fp8(float x, const Fp8Format& f, int exponent = 0) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint8_t sign = uint8_t((bits >> 24) & 0x80);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return kFp8Nan;
  if (magnitude == 0x7F800000) return uint8_t(sign | f.max_code);
  if (magnitude == 0) return sign;

  // |x| = significand * 2^(e - 23) with significand in [2^23, 2^24), fp32 subnormals normalised.
  uint32_t significand = magnitude & 0x7FFFFF;
  int e = int(magnitude >> 23) - 127;
  if (e == -127) {
    const int shift = std::countl_zero(significand) - 8;
    significand <<= shift;
    e = -126 - shift;
  } else {
    significand |= 0x800000;
  }
  e -= exponent;

  if (e > f.max_exponent) return uint8_t(sign | f.max_code);
  // The result's grid is 2^(grid - mantissa_bits): count its steps in |x| and round the remainder.
  const int grid = e > f.min_exponent() ? e : f.min_exponent();
  const int shift = 23 - f.mantissa_bits + (grid - e);
  if (shift > 25) return sign;  // below half of the smallest subnormal
  uint32_t steps = significand >> shift;
  const uint32_t rest = significand & ((1u << shift) - 1);
  const uint32_t half = 1u << (shift - 1);
  if (rest > half || (rest == half && (steps & 1))) ++steps;
  // A carry out of the mantissa moves into the exponent field by itself.
  const uint32_t code = (uint32_t(grid - f.min_exponent()) << f.mantissa_bits) + steps;
  return uint8_t(sign | (code < f.max_code ? code : f.max_code));
}

}  // namespace mxflash
