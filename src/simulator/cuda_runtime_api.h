// What headers shared with kernels use of CUDA's header of this name, in simulation: memory is the host's, and streams
// are done at once.
#pragma once

#include <mxflash/types.h>

#include <cstring>

enum cudaError_t { cudaSuccess = 0 };
using cudaStream_t = mxflash::Stream;

inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t = nullptr) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
