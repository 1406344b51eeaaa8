// What rmsnorm_bwd_cpu.cpp asks of rmsnorm_bwd_cpu_kernel.cpp, which is compiled once per instruction set.
#pragma once

#include "runtime/cpu_isa.h"

namespace mxflash::cpu {

// One row. MX elements have the E8M0 bytes of their blocks, one for 32 channels or one for each.
struct GradientRow {
  const void* h;
  Dtype h_dtype;
  const void* dy;
  Dtype dy_dtype;        // f32, f16, bf16, e4m3 or e5m2
  const uint8_t* scale;  // of the last two
  bool scale_per_channel;
  const float* weight;
  float rstd;
  int64_t dim;
  const void* dh;  // or null
  Dtype dh_dtype;
  void* dx;
  Dtype dx_dtype;
  float* dw;                     // [dim], added to
  const void *next_h, *next_dy;  // of the row after it, to be prefetched, or null
};

struct RmsnormBwdKernels {
  void (*row)(const GradientRow& row);
  // to += from
  void (*add)(const float* from, float* to, int64_t n);
};

}  // namespace mxflash::cpu

MXFLASH_CPU_KERNELS(cpu::RmsnormBwdKernels, kRmsnormBwdKernels)
