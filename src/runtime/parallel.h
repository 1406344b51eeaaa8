// A parallel loop for CPU backends.
#pragma once

#include <mxflash/backend.h>

#include <cstdint>
#include <type_traits>

namespace mxflash {

// body(item, worker) for every item in [0, count), worker in [0, workers). Returns when all are done.
//   Order    Items are handed out one by one in ascending order to threads that already run, so whoever has item i may
//            wait for a lower one: some thread has begun or finished it. Long items should come first.
//   worker   Unique among the bodies of this call that run at the same time: it may index scratch memory.
//   Threads  The caller takes part. Helpers are started once, when first wanted, and sleep when idle. Nested and
//            concurrent calls share them: each takes those that are idle at its start, in the worst case none, and
//            never waits for one. A host's executor (set_parallel_for) replaces all of that; the rest still holds.
// Bodies do not throw, and see the default floating point environment whatever the host has set. Beyond the order,
// items must not depend on each other; a result that is independent of `workers` is the body's duty.
using LoopBody = void (*)(void* context, int64_t item, int32_t worker);
void parallel_for(int64_t count, int32_t workers, LoopBody body, void* context);

template <class Body>
void parallel_for(int64_t count, int32_t workers, Body&& body) {
  parallel_for(
      count, workers,
      [](void* context, int64_t item, int32_t worker) {
        (*static_cast<std::remove_reference_t<Body>*>(context))(item, worker);
      },
      &body);
}

}  // namespace mxflash
