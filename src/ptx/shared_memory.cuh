// Dynamic shared memory, and accesses of it by 32-bit address: PTX ISA, "ld", "st". An address is aligned to what is
// accessed.
#pragma once

#include <cstdint>

namespace mxflash::ptx {

// The first byte of a CTA's. The launch does not align it to more than 16 bytes.
__device__ __forceinline__ uint8_t* dynamic_shared() {
  extern __shared__ __align__(1024) uint8_t mxflash_dynamic_shared[];
  return mxflash_dynamic_shared;
}

// What an address of shared memory is among all addresses.
__device__ __forceinline__ void* shared_pointer(uint32_t address) { return __cvta_shared_to_generic(address); }

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, int32_t v) { store_shared(address, uint32_t(v)); }
__device__ __forceinline__ void store_shared(uint32_t address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, uint2 v) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// load_shared<T>(address)
template <class T>
__device__ __forceinline__ T load_shared(uint32_t address);

template <>
__device__ __forceinline__ uint32_t load_shared<uint32_t>(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
template <>
__device__ __forceinline__ int32_t load_shared<int32_t>(uint32_t address) {
  return int32_t(load_shared<uint32_t>(address));
}
template <>
__device__ __forceinline__ float load_shared<float>(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
template <>
__device__ __forceinline__ uint2 load_shared<uint2>(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
template <>
__device__ __forceinline__ uint4 load_shared<uint4>(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
template <>
__device__ __forceinline__ float4 load_shared<float4>(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

}  // namespace mxflash::ptx
