// Runs a kernel's source on the host, every thread a fiber: docs/blackwell.md, "How the simulation works". Kernels are
// compiled as plain C++ with include root src/simulator before src, so that "ptx/..." are the host forms there, and
// with simulator/cuda_builtins.h included ahead of everything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace mxflash::simulator {

enum class Mode {
  eager,     // what is asynchronous is done when it is issued
  deferred,  // tensor cores work later, in the order of issue; copies later in any order; registers and tensor memory
             // hold what tcgen05_ld and _st move only at the wait; warps stall at random
  reordered  // as deferred, but tensor cores take whatever the ISA's pipelining rules leave unordered in any order, and
             // tcgen05_ld and _st move at any time up to the wait
};

struct Launch {
  uint32_t grid = 1;        // CTAs, on axis x
  uint32_t threads = 128;   // of a CTA; a multiple of 32
  size_t shared_bytes = 0;  // dynamic
  Mode mode = Mode::eager;
  uint64_t seed = 1;          // of stalls and orders
  int fault = 0;              // ptx::fault(n) is true for this n
  uint32_t ctas_at_once = 2;  // run side by side, as on multiprocessors of their own
  // For messages: what lies at an offset of a CTA's shared memory. May be empty.
  std::function<std::string(uint32_t offset)> name_of = {};
};

// Runs kernel() in every thread. Empty, or the first rule that was broken, by whom; who waits for what, if nothing
// moves any more.
std::string run(const Launch& launch, const std::function<void()>& kernel);

// How many seeds a test takes that takes `few` by default: MXFLASH_SIM_SOAK times as many.
uint64_t seeds(uint64_t few);

}  // namespace mxflash::simulator
