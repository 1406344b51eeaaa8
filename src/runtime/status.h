// Building a Status without allocating.
#pragma once

#include <mxflash/types.h>

namespace mxflash {

[[gnu::format(printf, 2, 3)]] Status make_status(StatusCode code, const char* format, ...);

template <class... Args>
Status invalid(const char* format, Args... args) {
  return make_status(StatusCode::invalid_argument, format, args...);
}
template <class... Args>
Status unsupported(const char* format, Args... args) {
  return make_status(StatusCode::unsupported, format, args...);
}

}  // namespace mxflash

// Returns from the enclosing function with the first error.
#define MXFLASH_TRY(expression)                                                        \
  do {                                                                                 \
    if (const ::mxflash::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)
