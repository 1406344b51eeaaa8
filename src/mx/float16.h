// BF16 and FP16 conversions to and from fp32 bits: round to nearest even, Inf on overflow, NaN kept (quiet).
#pragma once

#include <bit>
#include <cstdint>

namespace mxflash {

constexpr float decode_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

constexpr uint16_t encode_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

constexpr float decode_f16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 31;
  const uint32_t mantissa = h & 0x3FF;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000 | (mantissa << 13));
  if (exponent == 0) {  // mantissa * 2^-24, exact
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float(mantissa) * std::bit_cast<float>(103u << 23)));
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

constexpr uint16_t encode_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return uint16_t(sign | 0x7E00);
  if (magnitude >= 0x47800000) return uint16_t(sign | 0x7C00);  // 65536 and above
  const int e = int(magnitude >> 23) - 127;
  const int grid = e > -14 ? e : -14;
  const int shift = 13 + (grid - e);
  if (shift > 25) return sign;
  const uint32_t significand = (magnitude & 0x7FFFFF) | 0x800000;
  uint32_t steps = significand >> shift;
  const uint32_t rest = significand & ((1u << shift) - 1);
  const uint32_t half = 1u << (shift - 1);
  if (rest > half || (rest == half && (steps & 1))) ++steps;
  return uint16_t(sign | ((uint32_t(grid + 14) << 10) + steps));  // 65520..65536 carries into Inf
}

}  // namespace mxflash
