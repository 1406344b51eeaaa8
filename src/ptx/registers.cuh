// What the compiler may assume of registers.
#pragma once

#include <cstdint>

namespace mxflash::ptx {

// Hides that r keeps its value: what was computed from it before is computed again, and not kept in a register of its
// own until then.
__device__ __forceinline__ void recompute_from(uint32_t& r) { asm volatile("" : "+r"(r)); }
__device__ __forceinline__ void recompute_from(uint4& r) {
  recompute_from(r.x);
  recompute_from(r.y);
  recompute_from(r.z);
  recompute_from(r.w);
}

}  // namespace mxflash::ptx
