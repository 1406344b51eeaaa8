// What every entry named `ref` has in common.
#pragma once

#include "runtime/dispatch.h"

namespace mxflash {

inline constexpr const char* kRefTarget = "any CPU, the specification";

inline Status ref_available() { return {}; }

inline Status ref_supports(const char* op, Device device) {
  if (device.type == DeviceType::cpu) return {};
  return unsupported("%s: ref: tensors must be on cpu, got cuda:%d", op, device.index);
}

}  // namespace mxflash
