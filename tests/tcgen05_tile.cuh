// One 128 x kN tile of a block-scaled product, D = A B^T over kK channels, for tests of tcgen05's three
// implementations.
//   kTensorA: A is first written to tensor memory and taken from there
//   kMnMajorB: B lies as [kK][kN], the way V does; else [kN][kK]
// Operands are packed; scales are one atom of 512 bytes for each 128 rows (ptx/descriptors.h,
// tcgen05_scale_descriptor).
#pragma once

#include "ptx/fault.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/warp.cuh"

namespace mxflash::tile {

struct Params {
  const uint8_t *a, *b, *sfa, *sfb;
  float* d;  // [128][kN]
};

template <int kK_, int kN_, bool kTensorA_, bool kMnMajorB_>
struct Config {
  static constexpr int kK = kK_, kN = kN_;
  static constexpr bool kTensorA = kTensorA_, kMnMajorB = kMnMajorB_;
  static constexpr int kThreads = 128;
  static constexpr int kRowB = kMnMajorB ? kN : kK;  // bytes of a row of B in memory
  static constexpr int kRowsB = kMnMajorB ? kK : kN;
  static constexpr ptx::Swizzle kSwizzleA = kK == 128 ? ptx::Swizzle::b128 : ptx::Swizzle::b64;
  static constexpr ptx::Swizzle kSwizzleB = kRowB == 128 ? ptx::Swizzle::b128 : ptx::Swizzle::b64;
  // Shared memory, in bytes.
  static constexpr uint32_t kA = 0, kB = kA + 128 * kK, kSfa = kB + kN * kK, kSfb = kSfa + 512, kBar = kSfb + 512,
                            kTmem = kBar + 8, kBytes = kTmem + 8;
  // Tensor memory, in columns.
  static constexpr uint32_t kD = 0, kScalesA = kD + kN, kScalesB = kScalesA + 4, kOperandA = kScalesB + 8,
                            kColumns = 256;
  static_assert(kOperandA + kK / 4 <= kColumns);
};

// Rows of `bytes` to a swizzled image, 16 bytes at a time.
__device__ __forceinline__ void copy_image(uint32_t to, const uint8_t* from, int rows, int bytes,
                                           ptx::Swizzle swizzle) {
  for (int i = int(threadIdx.x); i < rows * bytes / 16; i += 128) {
    ptx::store_shared(to + ptx::swizzled(uint32_t(i) * 16, swizzle), reinterpret_cast<const uint4*>(from)[i]);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads) tile_kernel(const __grid_constant__ Params p) {
  const uint32_t base = (ptx::shared_address(ptx::dynamic_shared()) + 1023) / 1024 * 1024;
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
  const uint32_t bar = base + C::kBar;
  copy_image(base + C::kA, p.a, 128, C::kK, C::kSwizzleA);
  copy_image(base + C::kB, p.b, C::kRowsB, C::kRowB, C::kSwizzleB);
  if (warp == 0) {
    copy_image(base + C::kSfa, p.sfa, 1, 512, ptx::Swizzle::none);
    copy_image(base + C::kSfb, p.sfb, 1, 512, ptx::Swizzle::none);
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(bar, 1);
      ptx::fence_mbarrier_init();
    }
    ptx::tcgen05_alloc<C::kColumns>(base + C::kTmem);
    ptx::tcgen05_relinquish_alloc_permit();
  }
  if (!ptx::fault(1)) ptx::fence_proxy_async();
  __syncthreads();
  const uint32_t tmem = ptx::load_shared<uint32_t>(base + C::kTmem);
  const uint32_t lanes = tmem + (uint32_t(warp) << 21);
  if constexpr (C::kTensorA) {
    uint32_t row[C::kK / 4];
#pragma unroll
    for (int i = 0; i < C::kK / 4; ++i) row[i] = reinterpret_cast<const uint32_t*>(p.a)[threadIdx.x * (C::kK / 4) + i];
    ptx::tcgen05_st(lanes + C::kOperandA, row);
    if (!ptx::fault(2)) ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before_thread_sync();
    __syncthreads();
  }
  if (!ptx::fault(3)) ptx::tcgen05_fence_after_thread_sync();
  if (warp == 0 && ptx::tcgen05_elect()) {
    constexpr uint32_t instruction =
        ptx::tcgen05_instruction({.n = C::kN, .b_major = C::kMnMajorB ? ptx::Major::mn : ptx::Major::k});
    ptx::tcgen05_cp_scales(tmem + C::kScalesA, ptx::tcgen05_scale_descriptor(base + C::kSfa));
    ptx::tcgen05_cp_scales(tmem + C::kScalesB, ptx::tcgen05_scale_descriptor(base + C::kSfb));
    const uint64_t a = ptx::tcgen05_matrix_descriptor(base + C::kA, C::kSwizzleA);
    const uint64_t b = ptx::fault(4) ? ptx::tcgen05_matrix_descriptor(base + C::kB, C::kSwizzleB, 16, 2048)
                                     : ptx::tcgen05_matrix_descriptor(base + C::kB, C::kSwizzleB);
#pragma unroll
    for (uint32_t i = 0; i < C::kK / 32; ++i) {
      const uint32_t step = ptx::with_scale_ids(instruction, i, ptx::fault(5) ? 0 : i);
      const uint64_t b_step = ptx::advance(b, C::kMnMajorB ? 32 * i * C::kRowB : 32 * i);
      if constexpr (C::kTensorA) {
        ptx::tcgen05_mma_block_scaled_ts(tmem + C::kD, tmem + C::kOperandA + 8 * i, b_step, step, tmem + C::kScalesA,
                                         tmem + C::kScalesB, i > 0);
      } else {
        ptx::tcgen05_mma_block_scaled_ss(tmem + C::kD, ptx::advance(a, 32 * i), b_step, step, tmem + C::kScalesA,
                                         tmem + C::kScalesB, i > 0);
      }
    }
    ptx::tcgen05_commit(bar);
  }
  if (ptx::fault(6)) {  // B overwritten before the product is done
    __syncthreads();
    ptx::store_shared(base + C::kB + threadIdx.x * 16, uint4{0, 0, 0, 0});
    ptx::fence_proxy_async();
  }
  if (!ptx::fault(7)) ptx::mbarrier_wait(bar, 0);
  ptx::tcgen05_fence_after_thread_sync();
  float* const to = p.d + threadIdx.x * C::kN;
#pragma unroll
  for (int c = 0; c < C::kN; c += 32) {
    uint32_t d[32];
    ptx::tcgen05_ld(lanes + C::kD + c, d);
    if (!ptx::fault(8)) ptx::tcgen05_wait_ld(d);
#pragma unroll
    for (int i = 0; i < 32; ++i) to[c + i] = __uint_as_float(d[i]);
  }
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  if (warp == 0) ptx::tcgen05_dealloc<C::kColumns>(tmem);
}

}  // namespace mxflash::tile
