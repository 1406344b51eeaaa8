// The one way kernels are launched: on a stream that the caller names, every error checked, shared memory asked for.
#pragma once

#include <cuda_runtime.h>

#include "runtime/cuda.h"

namespace mxflash {

struct Launch {
  const char* what;  // for messages: "quantize: sm90"
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  Stream stream = nullptr;
  // It may start before the kernel ahead of it in the stream is done, and says itself where it waits for that
  // (ptx/griddepcontrol.cuh). Only for a kernel behind another one of the same call.
  bool overlaps = false;
};

// An empty grid is no error and launches nothing.
template <class... Params, class... Args>
Status launch(const Launch& l, void (*kernel)(Params...), Args&&... args) {
  if (l.grid.x == 0 || l.grid.y == 0 || l.grid.z == 0) return {};
  if (l.shared_bytes > 48 * 1024) {  // more than the default must be asked for, on each device
    MXFLASH_TRY(cuda_status(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(l.shared_bytes)), l.what));
  }
  cudaLaunchConfig_t config{};
  config.gridDim = l.grid;
  config.blockDim = l.block;
  config.dynamicSmemBytes = l.shared_bytes;
  config.stream = l.stream;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = l.overlaps ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, Params(args)...), l.what);
}

}  // namespace mxflash
