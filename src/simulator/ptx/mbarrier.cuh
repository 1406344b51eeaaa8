// ptx/mbarrier.cuh in simulation.
#pragma once

#include "simulator/machine.h"

namespace mxflash::ptx {

inline uint32_t shared_address(const void* p) {
  return uint32_t(static_cast<const uint8_t*>(p) - simulator::cta().base);
}

inline void mbarrier_init(uint32_t bar, uint32_t arrivals) { simulator::barrier_init(bar, arrivals); }
inline void fence_mbarrier_init() { simulator::barrier_fence_init(); }
inline void mbarrier_arrive(uint32_t bar) { simulator::barrier_arrive(bar); }
inline void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) { simulator::barrier_expect(bar, bytes); }
inline void mbarrier_wait(uint32_t bar, uint32_t parity) { simulator::barrier_wait(bar, parity); }

}  // namespace mxflash::ptx
