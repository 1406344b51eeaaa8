// ptx/griddepcontrol.cuh in simulation: one grid runs at a time.
#pragma once

namespace mxflash::ptx {

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

}  // namespace mxflash::ptx
