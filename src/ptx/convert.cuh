// Conversions between fp32, pairs of FP16 and FP8 codes, and maxima that keep NaN.
#pragma once

#include <cstdint>

namespace mxflash::ptx {

// Four E4M3 (or E5M2) codes to two pairs of FP16, exactly; the lowest byte is the low half of `low`: PTX ISA, "cvt".
__device__ __forceinline__ void unpack_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n"
      "}\n"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}
__device__ __forceinline__ void unpack_e5m2(uint32_t codes, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e5m2x2 %0, a;\n"
      "cvt.rn.f16x2.e5m2x2 %1, b;\n"
      "}\n"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

// Four fp32 to E4M3, round to nearest even, saturating; the first in the low byte: PTX ISA, "cvt.rn.satfinite".
__device__ __forceinline__ uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  uint32_t r;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(r)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return r;
}

// Two fp32 to FP16 (BF16), round to nearest even; the first in the low half: PTX ISA, "cvt".
__device__ __forceinline__ uint32_t pack_f16(float x0, float x1) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(x0), "f"(x1));
  return r;
}
__device__ __forceinline__ uint32_t pack_bf16(float x0, float x1) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(x0), "f"(x1));
  return r;
}

// Two pairs of FP16 to four E4M3 codes, round to nearest even, saturating: PTX ISA, "cvt.rn.satfinite".
__device__ __forceinline__ uint32_t pack_e4m3_f16(uint32_t low, uint32_t high) {
  uint32_t codes;
  asm("{\n"
      ".reg .b16 a, b;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 a, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 b, %2;\n"
      "mov.b32 %0, {a, b};\n"
      "}\n"
      : "=r"(codes)
      : "r"(low), "r"(high));
  return codes;
}

// A product of FP16 pairs, subnormal results kept: PTX ISA, "mul{.rnd}.f16x2".
__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Of each half the larger of a and |b|, the number where one is NaN: PTX ISA, "max.f16x2".
__device__ __forceinline__ uint32_t max_magnitude_f16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("{\n.reg .b32 m;\nabs.f16x2 m, %2;\nmax.f16x2 %0, %1, m;\n}\n" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// A pair of FP16 as fp32, exactly.
__device__ __forceinline__ float low_f16(uint32_t pair) {
  float x;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\ncvt.f32.f16 %0, a;\n}\n" : "=f"(x) : "r"(pair));
  return x;
}
__device__ __forceinline__ float high_f16(uint32_t pair) {
  float x;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\ncvt.f32.f16 %0, b;\n}\n" : "=f"(x) : "r"(pair));
  return x;
}

// max(a, |b|), NaN if either is: PTX ISA, "max.NaN".
__device__ __forceinline__ float max_magnitude(float a, float b) {
  float r;
  asm("{\n.reg .f32 m;\nabs.f32 m, %2;\nmax.NaN.f32 %0, %1, m;\n}\n" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Of each BF16 half the larger magnitude, NaN above all; its sign is that of the product: PTX ISA,
// "max.NaN.xorsign.abs".
__device__ __forceinline__ uint32_t max_magnitude_bf16x2(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// The larger of each half, unsigned: PTX ISA, "max.u16x2".
__device__ __forceinline__ uint32_t max_u16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// A store of 8 bytes to global memory under a predicate: a branch would keep what comes before it from overlapping with
// other rows.
__device__ __forceinline__ void store_if(bool condition, void* to, uint2 v) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "@p st.global.v2.b32 [%0], {%1, %2};\n"
      "}\n" ::"l"(to),
      "r"(v.x), "r"(v.y), "r"(int(condition))
      : "memory");
}

}  // namespace mxflash::ptx
