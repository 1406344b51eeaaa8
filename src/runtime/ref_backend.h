// What every entry named `ref` has in common: it runs on any CPU and supports every call that passed its checks, unless
// it says which not.
#pragma once

#include "runtime/dispatch.h"

namespace mxflash {

template <class Args>
constexpr Impl<Args> ref_backend(Status (*run)(const Args&, Stream), size_t (*workspace)(const Args&) = nullptr,
                                 Status (*supports)(const Args&) = nullptr) {
  return {.name = "ref",
          .target = "any CPU, the specification",
          .device = DeviceType::cpu,
          .available = [] { return Status{}; },
          .supports = supports ? supports : [](const Args&) { return Status{}; },
          .workspace = workspace,
          .run = run};
}

}  // namespace mxflash
