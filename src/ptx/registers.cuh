// What the compiler may assume of registers.
#pragma once

#include <cstdint>

namespace mxflash::ptx {

// The same value, but the compiler does not know: it cannot move what is computed from it, nor keep that in registers.
__device__ __forceinline__ int hidden(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ uint32_t hidden(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ float hidden(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

// Hides that r keeps its value: what was computed from it before is computed again, and not kept in a register of its
// own until then.
__device__ __forceinline__ void recompute_from(uint32_t& r) { r = hidden(r); }
__device__ __forceinline__ void recompute_from(uint4& r) {
  recompute_from(r.x);
  recompute_from(r.y);
  recompute_from(r.z);
  recompute_from(r.w);
}

}  // namespace mxflash::ptx
