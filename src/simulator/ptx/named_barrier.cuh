// ptx/named_barrier.cuh in simulation.
#pragma once

#include "simulator/machine.h"

namespace mxflash::ptx {

inline void named_barrier_sync(int id, int threads) { simulator::named_barrier(uint32_t(id), uint32_t(threads), true); }
inline void named_barrier_arrive(int id, int threads) {
  simulator::named_barrier(uint32_t(id), uint32_t(threads), false);
}

}  // namespace mxflash::ptx
