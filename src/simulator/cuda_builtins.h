// What nvcc gives every source, for the simulator: included ahead of kernels by the compiler's -include. Functions of
// CUDA's that kernels use, not all that it has.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __device__
#define __host__
#define __global__ inline
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __shared__ static  // CTAs run one at a time then
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __restrict__ __restrict

struct uint2 {
  uint32_t x, y;
};
struct uint3 {
  uint32_t x, y, z;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct int2 {
  int32_t x, y;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  uint32_t x = 1, y = 1, z = 1;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Of the thread that runs.
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}

inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline int32_t __float_as_int(float x) { return std::bit_cast<int32_t>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int32_t x) { return std::bit_cast<float>(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline int __float2int_rd(float x) { return int(std::floor(x)); }
inline int __popc(uint32_t x) { return std::popcount(x); }
inline int __clz(int32_t x) { return std::countl_zero(uint32_t(x)); }
inline int __ffs(int32_t x) { return x ? std::countr_zero(uint32_t(x)) + 1 : 0; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = selector >> (4 * i);
    uint32_t byte = uint32_t(bytes >> (8 * (pick & 7))) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << (8 * i);
  }
  return r;
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return uint32_t((uint64_t(high) << 32 | low) >> (shift & 31));
}
template <class T>
T __ldg(const T* p) {
  return *p;
}

[[noreturn]] void __trap();
void __syncthreads();
void __threadfence();
void __threadfence_block();

namespace mxflash::simulator {
uint64_t shuffle(const char* what, uint32_t mask, uint64_t value, uint32_t from);
uint32_t ballot(const char* what, uint32_t mask, bool predicate);
uint32_t lane();
void yield();

template <class T>
T shuffle_of(const char* what, uint32_t mask, T value, uint32_t from) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = shuffle(what, mask, bits, from);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
}  // namespace mxflash::simulator

inline void __syncwarp(uint32_t mask = ~0u) { mxflash::simulator::ballot("__syncwarp", mask, true); }
inline int __any_sync(uint32_t mask, int p) { return mxflash::simulator::ballot("__any_sync", mask, p) != 0; }
inline int __all_sync(uint32_t mask, int p) { return mxflash::simulator::ballot("__all_sync", mask, p) == ~0u; }
inline uint32_t __ballot_sync(uint32_t mask, int p) { return mxflash::simulator::ballot("__ballot_sync", mask, p); }
template <class T>
T __shfl_sync(uint32_t mask, T value, int lane) {
  return mxflash::simulator::shuffle_of("__shfl_sync", mask, value, uint32_t(lane) & 31);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int bits) {
  return mxflash::simulator::shuffle_of("__shfl_xor_sync", mask, value, mxflash::simulator::lane() ^ uint32_t(bits));
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, uint32_t by) {
  const uint32_t lane = mxflash::simulator::lane();
  return mxflash::simulator::shuffle_of("__shfl_up_sync", mask, value, lane < by ? lane : lane - by);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, uint32_t by) {
  const uint32_t lane = mxflash::simulator::lane();
  return mxflash::simulator::shuffle_of("__shfl_down_sync", mask, value, lane + by > 31 ? lane : lane + by);
}
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value) {
  for (int step = 16; step > 0; step /= 2) value = max(value, __shfl_xor_sync(mask, value, step));
  return value;
}
inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(mask, value, step);
  return value;
}

// Threads only change at waits: nothing comes between.
template <class T, class U>
T atomicAdd(T* p, U v) {
  const T old = *p;
  *p = T(old + T(v));
  return old;
}
template <class T, class U>
T atomicMax(T* p, U v) {
  const T old = *p;
  *p = max(old, T(v));
  return old;
}
