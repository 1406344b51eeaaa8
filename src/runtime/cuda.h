// What every CUDA backend needs of the runtime API: errors as Status, devices by architecture, a device guard.
#pragma once

#include <cuda_runtime_api.h>
#include <mxflash/types.h>

#include "runtime/dispatch.h"
#include "runtime/status.h"

namespace mxflash {

// "<what>: <CUDA's text>", and the error is taken off the thread.
Status cuda_status(cudaError_t error, const char* what);

// ok if some device of this process has this compute capability (90, or 100, which 103 is as well: both are compiled
// for), else why not.
Status has_compute_capability(int want);
// ok if device `index` has it.
Status check_compute_capability(const char* op, const char* backend, int32_t index, int want);

// Streaming multiprocessors of the current device.
int multiprocessor_count();

// Makes a device current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  const Status& status() const { return status_; }

 private:
  int previous_ = -1;
  Status status_;
};

}  // namespace mxflash
