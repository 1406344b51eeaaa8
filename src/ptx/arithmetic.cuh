// fp32 arithmetic of one or two values a thread. Pairs are one instruction on sm_100 and two elsewhere; subnormals are
// flushed to zero in both.
#pragma once

#include <cstdint>

namespace mxflash::ptx {

// log2, relative error 2^-22 away from 1: PTX ISA, "lg2".
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x, at most one step off: PTX ISA, "rcp".
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// a b + c clamped to [0, 1]; NaN gives 0: PTX ISA, "fma.sat".
__device__ __forceinline__ float fma_saturate(float a, float b, float c) {
  float y;
  asm("fma.rn.ftz.sat.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000

// The largest, NaN if one is: PTX ISA, "max.NaN".
__device__ __forceinline__ float max3_nan(float a, float b, float c) {
  float r;
  asm("max.NaN.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}

__device__ __forceinline__ uint64_t pack_f32x2(float2 a) {
  uint64_t r;
  asm("mov.b64 %0, {%1, %2};" : "=l"(r) : "f"(a.x), "f"(a.y));
  return r;
}
__device__ __forceinline__ float2 unpack_f32x2(uint64_t a) {
  float2 r;
  asm("mov.b64 {%0, %1}, %2;" : "=f"(r.x), "=f"(r.y) : "l"(a));
  return r;
}
// PTX ISA, "fma.f32x2", "add.f32x2", "mul.f32x2".
__device__ __forceinline__ float2 fma_f32x2(float2 a, float2 b, float2 c) {
  uint64_t r;
  asm("fma.rn.ftz.f32x2 %0, %1, %2, %3;" : "=l"(r) : "l"(pack_f32x2(a)), "l"(pack_f32x2(b)), "l"(pack_f32x2(c)));
  return unpack_f32x2(r);
}
__device__ __forceinline__ float2 add_f32x2(float2 a, float2 b) {
  uint64_t r;
  asm("add.rn.ftz.f32x2 %0, %1, %2;" : "=l"(r) : "l"(pack_f32x2(a)), "l"(pack_f32x2(b)));
  return unpack_f32x2(r);
}
__device__ __forceinline__ float2 mul_f32x2(float2 a, float2 b) {
  uint64_t r;
  asm("mul.rn.ftz.f32x2 %0, %1, %2;" : "=l"(r) : "l"(pack_f32x2(a)), "l"(pack_f32x2(b)));
  return unpack_f32x2(r);
}

#else

__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float max3_nan(float a, float b, float c) { return max_nan(max_nan(a, b), c); }

__device__ __forceinline__ float fma_ftz(float a, float b, float c) {
  float r;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}
__device__ __forceinline__ float2 fma_f32x2(float2 a, float2 b, float2 c) {
  return {fma_ftz(a.x, b.x, c.x), fma_ftz(a.y, b.y, c.y)};
}
__device__ __forceinline__ float2 add_f32x2(float2 a, float2 b) { return fma_f32x2(a, {1.0f, 1.0f}, b); }
__device__ __forceinline__ float2 mul_f32x2(float2 a, float2 b) { return fma_f32x2(a, b, {-0.0f, -0.0f}); }

#endif

}  // namespace mxflash::ptx
