// Named barriers: PTX ISA, "bar", "barrier". `threads` counts those that wait and those that only arrive; a multiple of
// 32. Barrier 0 is that of __syncthreads.
#pragma once

#include <cstdint>

namespace mxflash::ptx {

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace mxflash::ptx
