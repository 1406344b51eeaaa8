// ptx/warp.cuh in simulation.
#pragma once

#include "simulator/cuda_builtins.h"
#include "simulator/machine.h"

namespace mxflash::ptx {

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}
inline int lane_id() { return int(simulator::self().lane()); }
// The thread that a run has drawn for this warp.
inline bool elect_one() {
  const simulator::Warp& w = simulator::cta().warps[simulator::self().warp()];
  simulator::exchange("elect_one", 0);
  return w.elected == simulator::self().lane();
}
inline int max3(int a, int b, int c) { return std::max({a, b, c}); }

template <int kRegisters>
void setmaxnreg_inc() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
}
template <int kRegisters>
void setmaxnreg_dec() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
}

inline void fence_proxy_async() { simulator::fence_proxy_async(); }

}  // namespace mxflash::ptx
