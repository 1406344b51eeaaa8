// A position in a ring of kCount buffers: its index, and the parity of its present phase.
#pragma once

#include <cstdint>

namespace mxflash {

template <int kCount>
struct Ring {
  int position = 0;
  uint32_t phase = 0;
  __device__ int index() const { return position; }
  __device__ uint32_t parity() const { return phase; }
  __device__ void next() {
    if (++position < kCount) return;
    position = 0;
    phase ^= 1;
  }
};
template <int kCount>
requires((kCount & (kCount - 1)) == 0) struct Ring<kCount> {
  uint32_t steps = 0;
  __device__ int index() const { return int(steps % kCount); }
  __device__ uint32_t parity() const { return steps / kCount & 1; }
  __device__ void next() { ++steps; }
};

}  // namespace mxflash
