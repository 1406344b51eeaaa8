// The functions of simd/vector.h over arrays, one table per ISA (simd_test_kernel.cpp).
#pragma once

#include <cstdint>

#include "runtime/cpu_isa.h"

namespace mxflash {

// n is a multiple of lanes. Operands that a function has not are ignored.
using FloatFunction = void (*)(const float* a, const float* b, const float* c, float* out, int64_t n);
using IntFunction = void (*)(const int32_t* a, const int32_t* b, const int32_t* c, int32_t* out, int64_t n);
template <class In>
using LoadFunction = void (*)(const In* in, float* out, int64_t n);

struct SimdTestKernels {
  int64_t lanes;
  // Masks are seen through select(mask, b, c), or through select(mask, 1, 0) where b is an operand. Reductions fill
  // their vector.
  FloatFunction add, sub, mul, div, sqrt, fma, max, min, abs, exp2, less, reduce_add, reduce_max;
  IntFunction int_add, int_sub, bit_and, bit_or, int_max, shift_left_1, shift_left_31, shift_right_1, shift_right_31,
      int_less, int_equal, int_reduce_max, broadcast, iota, pack_int16, dot16;
  IntFunction positive_and_equal;  // (0 < a and a = b) ? b : c
  IntFunction any_equal;           // 1 or 0
  void (*float_select)(const int32_t* mask, const float* if_set, const float* if_clear, float* out, int64_t n);
  void (*float_broadcast)(const float* in, float* out, int64_t n);
  void (*as_float)(const int32_t* in, float* out, int64_t n);
  void (*as_int)(const float* in, int32_t* out, int64_t n);
  void (*to_float)(const int32_t* in, float* out, int64_t n);
  void (*round_to_int)(const float* in, int32_t* out, int64_t n);
  LoadFunction<uint16_t> load_bf16, load_f16;
  LoadFunction<uint8_t> load_e4m3, load_e5m2, load_e8m0;
  void (*store_bf16)(const float* in, uint16_t* out, int64_t n);
  void (*store_f16)(const float* in, uint16_t* out, int64_t n);
  void (*store_int16)(const int32_t* in, int16_t* out, int64_t n);
  void (*transpose)(const float* src, int64_t src_stride, float* dst, int64_t dst_stride);
};

}  // namespace mxflash

MXFLASH_CPU_KERNELS(mxflash::SimdTestKernels, kSimdTest)
