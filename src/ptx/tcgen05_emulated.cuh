// tcgen05 in software on sm_90, for tests: tensor memory is global memory, the warp that issues a product works it out,
// before it goes on. All else of a kernel (copies, mbarriers, registers) is real. A broken rule is a trap; the
// simulator has words for it.
#pragma once

#include <cstdint>

#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tcgen05_semantics.h"
#include "ptx/warp.cuh"

namespace mxflash::ptx {

namespace emulated {

constexpr uint32_t kCtas = 264, kColumns = 512, kLanes = 128;
constexpr uint32_t kPoison = 0xFFFFFFFF;  // NaN as fp32, as FP8 codes and as scales

// Of each CTA of the grid, which has one axis. Lanes are contiguous: those of a warp are one access.
static __device__ uint32_t tensor_memory[kCtas][kColumns][kLanes];

__device__ __forceinline__ void require(bool rule) {
  if (!rule) __trap();
}
__device__ __forceinline__ uint32_t* column(uint32_t c) {
  require(c < kColumns);
  return tensor_memory[blockIdx.x][c];
}
// What lanes of this warp, and others that this one is synchronised with, have done is there for all of its lanes.
__device__ __forceinline__ void order() {
  __threadfence_block();
  __syncwarp();
}
__device__ __forceinline__ uint32_t lane() { return threadIdx.x % 32; }

__device__ __forceinline__ uint32_t load_byte(uint32_t address) {
  return load_shared<uint32_t>(address & ~3u) >> (8 * (address & 3)) & 255;
}
// Elements k .. k + 3 of a row of an operand, the first in the low byte.
__device__ __forceinline__ uint32_t load_codes(const MatrixOperand& m, Major major, uint32_t row, uint32_t k) {
  if (major == Major::k) return load_shared<uint32_t>(operand_address(m, major, row, k));
  uint32_t codes = 0;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) codes |= load_byte(operand_address(m, major, row, k + i)) << (8 * i);
  return codes;
}

__device__ __forceinline__ void decode(Fp8Code code, uint32_t codes, float (&x)[4]) {
  uint32_t low, high;
  if (code == Fp8Code::e4m3) {
    unpack_e4m3(codes, low, high);
  } else {
    unpack_e5m2(codes, low, high);
  }
  x[0] = low_f16(low), x[1] = high_f16(low), x[2] = low_f16(high), x[3] = high_f16(high);
}

// 2^(byte - 127), NaN for 255.
__device__ __forceinline__ float scale(uint32_t word, uint32_t id) {
  const uint32_t byte = word >> (8 * id) & 255;
  return __uint_as_float(byte == 255 ? 0x7FC00000u : byte == 0 ? 0x00400000u : byte << 23);
}
// A word of scales that all four quarters of the lanes must hold.
__device__ __forceinline__ uint32_t scale_word(uint32_t c) {
  const uint32_t* at = column(c) + lane();
  const uint32_t word = at[0];
  require(at[32] == word && at[64] == word && at[96] == word);
  return word;
}

// A lane has rows lane, lane + 32 .. of D; codes_of_a(row, k) are four elements of A.
template <class CodesOfA>
__device__ __forceinline__ void multiply(uint32_t d, CodesOfA&& codes_of_a, uint64_t b, uint32_t instruction,
                                         uint32_t sfa, uint32_t sfb, bool accumulate) {
  order();
  const DecodedInstruction i = decode_instruction(instruction);
  const MatrixOperand operand = decode_matrix(b);
  require(!broken_rule(instruction) && !broken_rule(b, i.b_major));
  require(d + i.n <= kColumns && sfa % 4 == 0 && sfb % (i.n <= 64 ? 2 : 4) == 0);
#pragma unroll 1
  for (uint32_t row = lane(); row < 128; row += 32) {
    uint32_t a[8];
#pragma unroll
    for (uint32_t w = 0; w < 8; ++w) a[w] = codes_of_a(row, 4 * w);
    const float of_row = scale(scale_word(sfa + row / 32), i.sfa_id);
#pragma unroll 1
    for (uint32_t first = 0; first < i.n; first += 32) {
      const uint32_t word = scale_word(sfb + first / 32);
#pragma unroll 1
      for (uint32_t n = first; n < first + 32 && n < i.n; ++n) {
        uint32_t* const to = column(d + n) + row;
        const float before = accumulate ? __uint_as_float(*to) : 0.0f;
        float sum = 0;
#pragma unroll
        for (uint32_t w = 0; w < 8; ++w) {
          float x[4], y[4];
          decode(i.a, a[w], x);
          decode(i.b, load_codes(operand, i.b_major, n, 4 * w), y);
#pragma unroll
          for (int e = 0; e < 4; ++e) sum = __fmaf_rn(x[e], y[e], sum);
        }
        // One factor at a time: each is a power of two, their product may not be an fp32.
        const float of_column = scale(__shfl_sync(~0u, word, int(n % 32)), i.sfb_id);
        *to = __float_as_uint(before + sum * of_row * of_column);
      }
    }
  }
  order();
}

__device__ __forceinline__ uint32_t* own_lane(uint32_t tmem) {
  require(tmem >> 16 == threadIdx.x / 32 % 4 * 32);
  return column(tmem & 0xFFFF) + (tmem >> 16) + lane();
}

}  // namespace emulated

__device__ __forceinline__ bool tcgen05_elect() { return true; }  // the whole warp works

template <uint32_t kColumns>
__device__ __forceinline__ void tcgen05_alloc(uint32_t shared) {
  static_assert(kColumns >= 32 && kColumns <= 512 && (kColumns & (kColumns - 1)) == 0);
  emulated::require(gridDim.x <= emulated::kCtas && gridDim.y == 1 && gridDim.z == 1);
  const uint32_t first = emulated::kColumns - kColumns;
#pragma unroll 1
  for (uint32_t c = first; c < emulated::kColumns; ++c) {
    reinterpret_cast<uint4*>(emulated::column(c))[emulated::lane()] =
        make_uint4(emulated::kPoison, emulated::kPoison, emulated::kPoison, emulated::kPoison);
  }
  if (emulated::lane() == 0) store_shared(shared, first);
  emulated::order();
}
__device__ __forceinline__ void tcgen05_relinquish_alloc_permit() {}
template <uint32_t kColumns>
__device__ __forceinline__ void tcgen05_dealloc(uint32_t tmem) {
  emulated::require(tmem == emulated::kColumns - kColumns);
}

__device__ __forceinline__ void tcgen05_cp_scales(uint32_t tmem, uint64_t scales) {
  emulated::order();
  const MatrixOperand m = decode_matrix(scales);
  emulated::require(!broken_rule(scales, Major::k) && m.swizzle == Swizzle::none && tmem % 4 == 0);
  const uint4 row = load_shared<uint4>(operand_address(m, Major::k, emulated::lane(), 0));
#pragma unroll
  for (uint32_t quarter = 0; quarter < 4; ++quarter) {
    const uint32_t at = 32 * quarter + emulated::lane();
    emulated::column(tmem)[at] = row.x;
    emulated::column(tmem + 1)[at] = row.y;
    emulated::column(tmem + 2)[at] = row.z;
    emulated::column(tmem + 3)[at] = row.w;
  }
  emulated::order();
}

__device__ __forceinline__ void tcgen05_mma_block_scaled_ss(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction,
                                                            uint32_t sfa, uint32_t sfb, bool accumulate) {
  const Major major = decode_instruction(instruction).a_major;
  const MatrixOperand operand = decode_matrix(a);
  emulated::require(!broken_rule(a, major));
  emulated::multiply(
      d, [&](uint32_t row, uint32_t k) { return emulated::load_codes(operand, major, row, k); }, b, instruction, sfa,
      sfb, accumulate);
}
__device__ __forceinline__ void tcgen05_mma_block_scaled_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction,
                                                            uint32_t sfa, uint32_t sfb, bool accumulate) {
  emulated::require(decode_instruction(instruction).a_major == Major::k);
  emulated::multiply(
      d, [&](uint32_t row, uint32_t k) { return emulated::column(a + k / 4)[row]; }, b, instruction, sfa, sfb,
      accumulate);
}

__device__ __forceinline__ void tcgen05_commit(uint32_t bar) {
  emulated::order();
  if (emulated::lane() == 0) mbarrier_arrive(bar);
}

__device__ __forceinline__ void tcgen05_fence_before_thread_sync() { __threadfence_block(); }
__device__ __forceinline__ void tcgen05_fence_after_thread_sync() { __threadfence_block(); }

template <int kCount>
__device__ __forceinline__ void tcgen05_ld(uint32_t tmem, uint32_t (&r)[kCount]) {
  const uint32_t* from = emulated::own_lane(tmem);
  emulated::require((tmem & 0xFFFF) + kCount <= emulated::kColumns);
#pragma unroll
  for (int i = 0; i < kCount; ++i) r[i] = from[i * emulated::kLanes];
}
template <int kCount>
__device__ __forceinline__ void tcgen05_st(uint32_t tmem, const uint32_t (&r)[kCount]) {
  uint32_t* to = emulated::own_lane(tmem);
  emulated::require((tmem & 0xFFFF) + kCount <= emulated::kColumns);
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i * emulated::kLanes] = r[i];
}
template <int... kCounts>
__device__ __forceinline__ void tcgen05_wait_ld([[maybe_unused]] uint32_t (&... r)[kCounts]) {
  emulated::order();
}
__device__ __forceinline__ void tcgen05_wait_st() { emulated::order(); }

}  // namespace mxflash::ptx
