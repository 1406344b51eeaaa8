// Pairs of BF16 in a register.
#pragma once

#include <cstdint>

namespace mxflash::ptx {

// Of each half the larger magnitude, NaN above all; its sign is that of the product: PTX ISA, "max.NaN.xorsign.abs".
__device__ __forceinline__ uint32_t max_magnitude_bf16x2(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

}  // namespace mxflash::ptx
