// What every entry named `cpu` has in common: it runs on any CPU and supports every call that passed its checks, unless
// it says which not.
#pragma once

#include "runtime/cpu_isa.h"
#include "runtime/dispatch.h"

namespace mxflash {

template <class Args>
constexpr Impl<Args> cpu_backend(Status (*run)(const Args&, Stream), size_t (*workspace)(const Args&) = nullptr,
                                 Status (*supports)(const Args&) = nullptr) {
  return {.name = "cpu",
          .target = "any CPU, with AVX-512, AVX2 or NEON where it has them",
          .device = DeviceType::cpu,
          .available = cpu_isa_status,
          .supports = supports ? supports : [](const Args&) { return Status{}; },
          .workspace = workspace,
          .run = run};
}

}  // namespace mxflash
