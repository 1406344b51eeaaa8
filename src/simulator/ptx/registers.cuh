// ptx/registers.cuh in simulation: there are no registers to save.
#pragma once

#include "simulator/cuda_builtins.h"

namespace mxflash::ptx {

inline int hidden(int x) { return x; }
inline uint32_t hidden(uint32_t x) { return x; }
inline float hidden(float x) { return x; }
inline void recompute_from(uint32_t&) {}
inline void recompute_from(uint4&) {}

}  // namespace mxflash::ptx
