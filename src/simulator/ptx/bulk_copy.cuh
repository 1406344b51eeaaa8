// ptx/bulk_copy.cuh in simulation.
#pragma once

#include "simulator/machine.h"

namespace mxflash::ptx {

inline void check_bulk(const char* what, uint32_t shared, const void* global, uint32_t bytes) {
  if (shared % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16) {
    simulator::fail("%s: addresses and size must be multiples of 16, got shared %u, global %p, %u bytes", what, shared,
                    global, bytes);
  }
}

inline void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t bar) {
  check_bulk("bulk_load", shared, global, bytes);
  simulator::enqueue_load(shared, bytes, bar, "bulk_load", [=](uint8_t* to) { std::memcpy(to, global, bytes); });
}

inline void bulk_store(void* global, uint32_t shared, uint32_t bytes) {
  check_bulk("bulk_store", shared, global, bytes);
  simulator::enqueue_store(shared, bytes, "bulk_store", [=](const uint8_t* from) { std::memcpy(global, from, bytes); });
}
inline void bulk_reduce_add_f32(void* global, uint32_t shared, uint32_t bytes) {
  check_bulk("bulk_reduce_add_f32", shared, global, bytes);
  simulator::enqueue_store(shared, bytes, "bulk_reduce_add_f32", [=](const uint8_t* from) {
    for (uint32_t i = 0; i < bytes / 4; ++i) {
      float x;
      std::memcpy(&x, from + 4 * i, 4);
      static_cast<float*>(global)[i] += x;
    }
  });
}
inline void bulk_commit() { simulator::commit_group(); }
template <int kPending>
void bulk_wait_read() {
  simulator::wait_groups(kPending, true);
}
template <int kPending>
void bulk_wait() {
  simulator::wait_groups(kPending, false);
}

}  // namespace mxflash::ptx
