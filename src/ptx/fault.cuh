// Faults that a kernel of Blackwell plants in itself, for tests of its tests: in simulation (simulator/ptx/fault.cuh)
// one of them at a time is switched on; on a card none exists.
#pragma once

namespace mxflash::ptx {

__device__ constexpr bool fault(int) { return false; }

}  // namespace mxflash::ptx
