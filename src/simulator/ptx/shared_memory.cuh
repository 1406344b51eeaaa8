// ptx/shared_memory.cuh in simulation.
#pragma once

#include "simulator/machine.h"

namespace mxflash::ptx {

inline uint8_t* dynamic_shared() { return simulator::cta().base + simulator::kSharedBase; }

inline void* shared_pointer(uint32_t address) { return simulator::cta().base + address; }

template <class T>
void store_shared(uint32_t address, T v) {
  simulator::store(address, &v, sizeof v);
}
template <class T>
T load_shared(uint32_t address) {
  T v;
  simulator::load(address, &v, sizeof v);
  return v;
}

}  // namespace mxflash::ptx
