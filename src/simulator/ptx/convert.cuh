// ptx/convert.cuh in simulation.
#pragma once

#include "mx/float16.h"
#include "mx/fp8.h"
#include "simulator/cuda_builtins.h"

namespace mxflash::ptx {

inline uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  return uint32_t(encode_fp8(x0, kE4m3)) | uint32_t(encode_fp8(x1, kE4m3)) << 8 |
         uint32_t(encode_fp8(x2, kE4m3)) << 16 | uint32_t(encode_fp8(x3, kE4m3)) << 24;
}
inline void unpack_codes(uint32_t codes, const Fp8Format& f, uint32_t& low, uint32_t& high) {
  const auto half = [&](int i) { return uint32_t(encode_f16(decode_fp8(uint8_t(codes >> (8 * i)), f))); };
  low = half(0) | half(1) << 16;
  high = half(2) | half(3) << 16;
}
inline void unpack_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) { unpack_codes(codes, kE4m3, low, high); }
inline void unpack_e5m2(uint32_t codes, uint32_t& low, uint32_t& high) { unpack_codes(codes, kE5m2, low, high); }
inline float low_f16(uint32_t pair) { return decode_f16(uint16_t(pair)); }
inline float high_f16(uint32_t pair) { return decode_f16(uint16_t(pair >> 16)); }
inline uint32_t pack_f16(float x0, float x1) { return uint32_t(encode_f16(x0)) | uint32_t(encode_f16(x1)) << 16; }
inline uint32_t pack_bf16(float x0, float x1) { return uint32_t(encode_bf16(x0)) | uint32_t(encode_bf16(x1)) << 16; }

// max(a, |b|), NaN if either is.
inline float max_magnitude(float a, float b) { return a != a ? a : b != b ? b : std::max(a, std::fabs(b)); }
inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
  return max(a & 0xFFFF, b & 0xFFFF) | max(a & 0xFFFF0000, b & 0xFFFF0000);
}
inline void store_if(bool condition, void* to, uint2 v) {
  if (condition) std::memcpy(to, &v, sizeof v);
}

}  // namespace mxflash::ptx
