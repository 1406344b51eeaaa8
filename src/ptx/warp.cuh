// Small instructions of a warp or a thread.
#pragma once

#include <cstdint>

namespace mxflash::ptx {

// 2^x, relative error 2^-22, subnormal results flushed to zero: PTX ISA, "ex2".
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Read anew each time: for code whose registers are too precious to keep it.
__device__ __forceinline__ int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// True in one thread of a converged warp: PTX ISA, "elect.sync".
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// max(a, b, c) of signed integers: one VIMNMX3 on sm_90.
__device__ __forceinline__ int max3(int a, int b, int c) { return max(max(a, b), c); }

// Moves registers between the roles of a warp-specialised kernel: PTX ISA, "setmaxnreg". A whole warpgroup calls it.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Orders this thread's earlier shared-memory accesses before later ones of tensor cores and copy engine: PTX ISA,
// "fence.proxy.async".
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8x8 matrices of 16-bit elements: lane l names the row l % 8 of matrix l / 8 and gets elements 2 (l % 4), + 1 of
// row l / 4 of each: PTX ISA, "ldmatrix".
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// Stores four 8x8 matrices of 16-bit elements, transposed: lane l names the row l % 8 of matrix l / 8 and, as in the
// accumulators of a product, holds elements 2 (l % 4), + 1 of column l / 4 of each: PTX ISA, "stmatrix".
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace mxflash::ptx
