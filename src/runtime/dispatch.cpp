#include "runtime/dispatch.h"

#include <cstdlib>
#include <cstring>

#include "runtime/cuda_backend.h"

namespace mxflash {

const char* forced_backend(const char* named) {
  if (named) return named;
  const char* name = std::getenv("MXFLASH_BACKEND");
  return name && *name ? name : nullptr;
}

bool same_name(const char* a, const char* b) { return std::strcmp(a, b) == 0; }

bool is_variant(const char* name, const char* of) {
  return same_name(name, kSm90Bf16.name) && same_name(of, kSm90.name);
}

Status unknown_backend(const char* op, const char* name, const char* known) {
  return make_status(StatusCode::unavailable, "%s: backend must be one of %s, got '%.40s'", op, known, name);
}

Status wrong_device(const char* op, const char* backend, DeviceType wants, Device got) {
  return unsupported("%s: %s: tensors must be on %s, got %s:%d", op, backend, device_type_name(wants),
                     device_type_name(got.type), got.index);
}

Status no_backend(const char* op, Device device, const char* known) {
  return make_status(StatusCode::unavailable, "%s: no backend for tensors on %s:%d, got only %s", op,
                     device_type_name(device.type), device.index, known);
}

}  // namespace mxflash
