#include "runtime/cuda.h"

namespace mxflash {

Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  return make_status(StatusCode::device_error, "%s: %s", what, cudaGetErrorString(error));
}

namespace {

Status compute_capability(int32_t index, int& capability) {
  int major = 0, minor = 0;
  MXFLASH_TRY(cuda_status(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), "cuda device"));
  MXFLASH_TRY(cuda_status(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index), "cuda device"));
  capability = 10 * major + minor;
  return {};
}

// Code for 10.0 is compiled for 10.3, too.
bool serves(int found, int want) { return found == want || (found == 103 && want == 100); }

}  // namespace

Status has_compute_capability(int want) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    return make_status(StatusCode::unavailable, "needs a CUDA device of compute capability %d.%d: %s", want / 10,
                       want % 10, cudaGetErrorString(error));
  }
  int found = 0;
  for (int i = 0; i < count; ++i) {
    MXFLASH_TRY(compute_capability(i, found));
    if (serves(found, want)) return {};
  }
  return make_status(StatusCode::unavailable, "needs a CUDA device of compute capability %d.%d, got %d.%d", want / 10,
                     want % 10, found / 10, found % 10);
}

Status check_compute_capability(const char* op, const char* backend, int32_t index, int want) {
  int found = 0;
  MXFLASH_TRY(compute_capability(index, found));
  if (serves(found, want)) return {};
  return unsupported("%s: %s: device must have compute capability %d.%d, got cuda:%d with %d.%d", op, backend,
                     want / 10, want % 10, index, found / 10, found % 10);
}

int multiprocessor_count() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
  return count;
}

DeviceGuard::DeviceGuard(int32_t index) {
  status_ = cuda_status(cudaGetDevice(&previous_), "cudaGetDevice");
  if (status_.ok() && index != previous_) status_ = cuda_status(cudaSetDevice(index), "cudaSetDevice");
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace mxflash
