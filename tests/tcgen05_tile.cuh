// One 128 x kN tile of a block-scaled product, D = A B^T over kK channels, for tests of tcgen05's three
// implementations.
//   kFrom: A in shared memory, K-major ([128][kK] in memory) or MN-major ([kK][128]); or first written to tensor memory
//   kMnMajorB: B is [kK][kN] in memory, the way V is; else [kN][kK]
//   kSfbColumn: of the columns of a copy, the one that B's scales begin at: 0, or 2 where B has 64 rows
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
  ptx::Fp8Code a_code, b_code;
};

enum class From { shared, shared_mn_major, tensor };

template <int kK_, int kN_, From kFrom_, bool kMnMajorB_, int kSfbColumn_ = 0>
struct Config {
  static constexpr int kK = kK_, kN = kN_;
  static constexpr From kFrom = kFrom_;
  static constexpr bool kMnMajorA = kFrom == From::shared_mn_major, kMnMajorB = kMnMajorB_;
  static constexpr int kSfbColumn = kSfbColumn_;
  static constexpr int kThreads = 128;
  // Rows of an operand in memory are cut into spans of the swizzle, an image each.
  static constexpr int kRowA = kMnMajorA ? 128 : kK, kRowB = kMnMajorB ? kN : kK;
  static constexpr int kRowsA = kMnMajorA ? kK : 128, kRowsB = kMnMajorB ? kK : kN;
  static constexpr int kSpanA = kRowA >= 128 ? 128 : 64, kSpanB = kRowB >= 128 ? 128 : 64;
  static constexpr int kSpansB = (kRowB + kSpanB - 1) / kSpanB;
  static constexpr ptx::Swizzle swizzle(int span) { return span == 128 ? ptx::Swizzle::b128 : ptx::Swizzle::b64; }
  // Atoms of B's scales: rows 0..127, 128..
  static constexpr int kAtomsB = (kN + 127) / 128;
  // Shared memory, in bytes.
  static constexpr uint32_t kA = 0, kB = kA + kRowsA * kSpanA,
                            kSfa = (kB + kSpansB * kRowsB * kSpanB + 1023) / 1024 * 1024, kSfb = kSfa + 512,
                            kBar = kSfb + kAtomsB * 512, kTmem = kBar + 8, kBytes = kTmem + 8;
  // Tensor memory, in columns.
  static constexpr uint32_t kD = 0, kScalesA = kD + kN, kScalesB = kScalesA + 4, kOperandA = kScalesB + 8,
                            kColumns = kN > 128 ? 512 : 256;
  static_assert(kOperandA + kK / 4 <= kColumns);
};

// Rows of `bytes` to swizzled images of kSpan columns each, 16 bytes at a time.
template <int kSpan, int kThreads>
__device__ __forceinline__ void copy_image(uint32_t to, const uint8_t* from, int rows, int bytes,
                                           ptx::Swizzle swizzle) {
  for (int i = int(threadIdx.x); i < rows * bytes / 16; i += kThreads) {
    const int row = i / (bytes / 16), column = i % (bytes / 16) * 16;
    const uint32_t at =
        uint32_t(column / kSpan * rows * kSpan) + ptx::swizzled(uint32_t(row * kSpan + column % kSpan), swizzle);
    ptx::store_shared(to + at, reinterpret_cast<const uint4*>(from)[i]);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads) tile_kernel(const __grid_constant__ Params p) {
  const uint32_t base = (ptx::shared_address(ptx::dynamic_shared()) + 1023) / 1024 * 1024;
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
  const uint32_t bar = base + C::kBar;
  copy_image<C::kSpanA, 128>(base + C::kA, p.a, C::kRowsA, C::kRowA, C::swizzle(C::kSpanA));
  copy_image<C::kSpanB, 128>(base + C::kB, p.b, C::kRowsB, C::kRowB, C::swizzle(C::kSpanB));
  if (warp == 0) {
    copy_image<512, 32>(base + C::kSfa, p.sfa, 1, 512, ptx::Swizzle::none);
    copy_image<512, 32>(base + C::kSfb, p.sfb, C::kAtomsB, 512, ptx::Swizzle::none);
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
  if constexpr (C::kFrom == From::tensor) {
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
    const uint32_t instruction = ptx::tcgen05_instruction({.n = C::kN,
                                                           .a = p.a_code,
                                                           .b = p.b_code,
                                                           .a_major = C::kMnMajorA ? ptx::Major::mn : ptx::Major::k,
                                                           .b_major = C::kMnMajorB ? ptx::Major::mn : ptx::Major::k});
    ptx::tcgen05_cp_scales(tmem + C::kScalesA, ptx::tcgen05_scale_descriptor(base + C::kSfa));
    for (uint32_t i = 0; i < C::kAtomsB; ++i) {
      ptx::tcgen05_cp_scales(tmem + C::kScalesB + 4 * i, ptx::tcgen05_scale_descriptor(base + C::kSfb + 512 * i));
    }
    const uint64_t a = ptx::tcgen05_matrix_descriptor(base + C::kA, C::swizzle(C::kSpanA));
    const uint64_t b = ptx::tcgen05_matrix_descriptor(base + C::kB, C::swizzle(C::kSpanB), C::kRowsB * C::kSpanB,
                                                      ptx::fault(4) ? 2048 : 8 * C::kSpanB);
#pragma unroll
    for (uint32_t i = 0; i < C::kK / 32; ++i) {
      const uint32_t step = ptx::with_scale_ids(instruction, i, ptx::fault(5) ? 0 : i);
      const uint64_t a_step = ptx::advance(a, C::kMnMajorA ? 32 * i * C::kSpanA : 32 * i);
      const uint64_t b_step = ptx::advance(b, C::kMnMajorB ? 32 * i * C::kSpanB : 32 * i);
      if constexpr (C::kFrom == From::tensor) {
        ptx::tcgen05_mma_block_scaled_ts(tmem + C::kD, tmem + C::kOperandA + 8 * i, b_step, step, tmem + C::kScalesA,
                                         tmem + C::kScalesB + C::kSfbColumn, i > 0);
      } else {
        ptx::tcgen05_mma_block_scaled_ss(tmem + C::kD, a_step, b_step, step, tmem + C::kScalesA,
                                         tmem + C::kScalesB + C::kSfbColumn, i > 0);
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
  for (int c = 0; c < C::kN; c += 16) {
    uint32_t d[16];
    ptx::tcgen05_ld(lanes + C::kD + c, d);
    if (!ptx::fault(8)) ptx::tcgen05_wait_ld(d);
#pragma unroll
    for (int i = 0; i < 16; ++i) to[c + i] = __uint_as_float(d[i]);
  }
  if (ptx::fault(8)) ptx::tcgen05_wait_st();
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  if (warp == 0) ptx::tcgen05_dealloc<C::kColumns>(tmem);
}

}  // namespace mxflash::tile
