// ptx/tcgen05.cuh in simulation.
#pragma once

#include "ptx/descriptors.h"
#include "simulator/machine.h"

namespace mxflash::ptx {

// The thread that a run has drawn for this warp.
inline bool tcgen05_elect() {
  simulator::Warp& w = simulator::cta().warps[simulator::self().warp()];
  simulator::exchange("tcgen05_elect", 0);
  return w.elected == simulator::self().lane();
}

template <uint32_t kColumns>
void tcgen05_alloc(uint32_t shared) {
  static_assert(kColumns >= 32 && kColumns <= 512 && (kColumns & (kColumns - 1)) == 0);
  simulator::allocate(shared, kColumns);
}
inline void tcgen05_relinquish_alloc_permit() { simulator::relinquish(); }
template <uint32_t kColumns>
void tcgen05_dealloc(uint32_t tmem) {
  simulator::deallocate(tmem, kColumns);
}

inline void tcgen05_cp_scales(uint32_t tmem, uint64_t scales) {
  simulator::enqueue_tensor({.op = simulator::TensorOp::copy_scales, .issuer = nullptr, .d = tmem, .a = scales});
}
inline void tcgen05_mma_block_scaled_ss(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t sfa,
                                        uint32_t sfb, bool accumulate) {
  simulator::enqueue_tensor({simulator::TensorOp::multiply_ss, nullptr, d, a, b, instruction, sfa, sfb, accumulate});
}
inline void tcgen05_mma_block_scaled_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction, uint32_t sfa,
                                        uint32_t sfb, bool accumulate) {
  simulator::enqueue_tensor({simulator::TensorOp::multiply_ts, nullptr, d, a, b, instruction, sfa, sfb, accumulate});
}
inline void tcgen05_commit(uint32_t bar) {
  simulator::enqueue_tensor({.op = simulator::TensorOp::commit, .issuer = nullptr, .d = bar});
}

inline void tcgen05_fence_before_thread_sync() { simulator::self().needs_fence_before = false; }
inline void tcgen05_fence_after_thread_sync() { simulator::self().needs_fence_after = false; }

template <int... kCounts>
void tcgen05_wait_ld([[maybe_unused]] uint32_t (&... r)[kCounts]) {
  simulator::wait_loads();
}
inline void tcgen05_wait_st() { simulator::wait_stores(); }

template <int kCount>
void tcgen05_ld(uint32_t tmem, uint32_t (&r)[kCount]) {
  static_assert(kCount >= 1 && kCount <= 128 && (kCount & (kCount - 1)) == 0);
  simulator::load_registers(tmem, r, kCount);
}
template <int kCount>
void tcgen05_st(uint32_t tmem, const uint32_t (&r)[kCount]) {
  static_assert(kCount >= 1 && kCount <= 128 && (kCount & (kCount - 1)) == 0);
  simulator::store_registers(tmem, r, kCount);
}

}  // namespace mxflash::ptx
