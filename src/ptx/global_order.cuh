// Global memory that CTAs of one kernel hand to each other: PTX ISA, "Memory Consistency Model", "ld", "st", "red".
#pragma once

#include <cstdint>

namespace mxflash::ptx {

// A value that is no more than a sign: nothing that this thread reads by ordinary accesses is ordered by it.
__device__ __forceinline__ int32_t load_relaxed(const int32_t* p) {
  int32_t v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// All that this thread has written, or knows to be complete, is there for who reads the value.
__device__ __forceinline__ void store_release(int32_t* p, int32_t v) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void reduce_add_release(int32_t* p, int32_t v) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// What the one who has released this value had written is there.
__device__ __forceinline__ int32_t load_acquire(const int32_t* p) {
  int32_t v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Orders this thread's earlier accesses of global memory before later ones of the copy engine: PTX ISA, "fence.proxy".
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Adds four fp32 to those at `p`, 16 bytes aligned.
__device__ __forceinline__ void reduce_add_float4(float4* p, float4 v) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w)
               : "memory");
}

}  // namespace mxflash::ptx
