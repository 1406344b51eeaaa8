// What entries for CUDA cards have in common: where they run, and what a build without CUDA says in their place.
#pragma once

#include "runtime/dispatch.h"

namespace mxflash {

struct CudaTarget {
  const char* name;    // of the backend
  const char* target;  // for people
};
inline constexpr CudaTarget kSm90{"sm90", "NVIDIA Hopper, compute capability 9.0"};
inline constexpr CudaTarget kSm100{"sm100", "NVIDIA Blackwell, compute capability 10.0 or 10.3"};
inline constexpr CudaTarget kSm90Bf16{"sm90_bf16", "NVIDIA Hopper, operands exact in BF16 tensor cores"};

#if MXFLASH_CUDA
Status has_compute_capability(int want);
Status check_compute_capability(const char* op, const char* backend, int32_t index, int want);
// For kernels that are the same on every architecture.
template <int kCapability>
Status check_compute_capability(const char* op, int32_t index) {
  static_assert(kCapability == 90 || kCapability == 100);
  return check_compute_capability(op, (kCapability == 90 ? kSm90 : kSm100).name, index, kCapability);
}

template <class Args>
constexpr Impl<Args> sm90_backend(Status (*supports)(const Args&), Status (*run)(const Args&, Stream),
                                  size_t (*workspace)(const Args&) = nullptr, const CudaTarget& t = kSm90) {
  return {.name = t.name,
          .target = t.target,
          .device = DeviceType::cuda,
          .available = [] { return has_compute_capability(90); },
          .supports = supports,
          .workspace = workspace,
          .run = run};
}
template <class Args>
constexpr Impl<Args> sm100_backend(Status (*supports)(const Args&), Status (*run)(const Args&, Stream),
                                   size_t (*workspace)(const Args&) = nullptr) {
  Impl<Args> impl = sm90_backend<Args>(supports, run, workspace, kSm100);
  impl.available = [] { return has_compute_capability(100); };
  return impl;
}
#else
template <class Args>
constexpr Impl<Args> not_built(const CudaTarget& t) {
  return {.name = t.name,
          .target = t.target,
          .device = DeviceType::cuda,
          .available = [] { return make_status(StatusCode::unavailable, "built without CUDA (cmake --preset cuda)"); },
          .supports = nullptr,
          .workspace = nullptr,
          .run = nullptr};
}
#endif

}  // namespace mxflash
