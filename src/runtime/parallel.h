// A parallel loop for CPU backends.
#pragma once

#include <mxflash/backend.h>

#include <cstdint>

namespace mxflash {

// body(item, worker) for every item in [0, count), in any order, worker in [0, workers). Returns when all are done.
// Items must not depend on each other; a result that is independent of `workers` is the body's duty.
using LoopBody = void (*)(void* context, int64_t item, int32_t worker);
void parallel_for(int64_t count, int32_t workers, LoopBody body, void* context);

template <class Body>
void parallel_for(int64_t count, int32_t workers, Body&& body) {
  parallel_for(
      count, workers, [](void* context, int64_t item, int32_t worker) { (*static_cast<Body*>(context))(item, worker); },
      &body);
}

}  // namespace mxflash
