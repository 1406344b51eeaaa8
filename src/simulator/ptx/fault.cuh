// ptx/fault.cuh in simulation: the fault that the run asks for.
#pragma once

#include "simulator/machine.h"

namespace mxflash::ptx {

inline bool fault(int n) { return simulator::machine->launch.fault == n; }

}  // namespace mxflash::ptx
