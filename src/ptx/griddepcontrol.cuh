// Kernels that start before the one ahead of them in the stream is done: PTX ISA, "griddepcontrol".
#pragma once

namespace mxflash::ptx {

// Until the grids that this one depends on are complete and their writes visible. Nothing if it was launched without
// such an overlap.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets dependent grids start as soon as every CTA of this one has said so or left; they wait for its results.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace mxflash::ptx
