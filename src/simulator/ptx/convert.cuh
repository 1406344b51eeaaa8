// ptx/convert.cuh in simulation.
#pragma once

#include "mx/fp8.h"
#include "simulator/cuda_builtins.h"

namespace mxflash::ptx {

inline uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  return uint32_t(encode_fp8(x0, kE4m3)) | uint32_t(encode_fp8(x1, kE4m3)) << 8 | uint32_t(encode_fp8(x2, kE4m3)) << 16 |
         uint32_t(encode_fp8(x3, kE4m3)) << 24;
}
// max(a, |b|), NaN if either is.
inline float max_magnitude(float a, float b) {
  return a != a ? a : b != b ? b : std::max(a, std::fabs(b));
}
inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
  return max(a & 0xFFFF, b & 0xFFFF) | max(a & 0xFFFF0000, b & 0xFFFF0000);
}
inline void store_if(bool condition, void* to, uint2 v) {
  if (condition) std::memcpy(to, &v, sizeof v);
}

}  // namespace mxflash::ptx
