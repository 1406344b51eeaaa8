#include "runtime/dispatch.h"

#include <cstdlib>
#include <cstring>

namespace mxflash {

const char* backend_from_environment() {
  const char* name = std::getenv("MXFLASH_BACKEND");
  return name && *name ? name : nullptr;
}

bool same_name(const char* a, const char* b) { return std::strcmp(a, b) == 0; }

Status unknown_backend(const char* op, const char* name, const char* known) {
  return make_status(StatusCode::unavailable, "%s: backend must be one of %s, got '%.40s'", op, known, name);
}

}  // namespace mxflash
