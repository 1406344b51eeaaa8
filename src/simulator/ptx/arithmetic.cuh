// ptx/arithmetic.cuh in simulation. Approximations are the nearest fp32 here.
#pragma once

#include "simulator/cuda_builtins.h"

namespace mxflash::ptx {

inline float flush_subnormal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

inline float log2_approx(float x) { return std::log2(flush_subnormal(x)); }
inline float reciprocal_approx(float x) { return flush_subnormal(1.0f / flush_subnormal(x)); }
inline float fma_ftz(float a, float b, float c) {
  return flush_subnormal(std::fma(flush_subnormal(a), flush_subnormal(b), flush_subnormal(c)));
}
inline float fma_saturate(float a, float b, float c) {
  const float y = fma_ftz(a, b, c);
  return y > 0 ? std::min(y, 1.0f) : 0.0f;  // NaN too
}
inline float max_nan(float a, float b) { return a != a ? a : b != b ? b : std::max(a, b); }
inline float max3_nan(float a, float b, float c) { return max_nan(max_nan(a, b), c); }
inline float2 fma_f32x2(float2 a, float2 b, float2 c) { return {fma_ftz(a.x, b.x, c.x), fma_ftz(a.y, b.y, c.y)}; }
inline float2 add_f32x2(float2 a, float2 b) { return fma_f32x2(a, {1.0f, 1.0f}, b); }
inline float2 mul_f32x2(float2 a, float2 b) { return fma_f32x2(a, b, {-0.0f, -0.0f}); }

}  // namespace mxflash::ptx
