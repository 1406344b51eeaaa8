// ptx/bulk_copy.cuh in simulation.
#pragma once

#include <memory>

#include "mx/float16.h"
#include "simulator/machine.h"

namespace mxflash::ptx {

inline void check_bulk(const char* what, uint32_t shared, const void* global, uint32_t bytes) {
  if (shared % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16) {
    simulator::fail("%s: addresses and size must be multiples of 16, got shared %u, global %p, %u bytes", what, shared,
                    global, bytes);
  }
}

inline void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t bar) {
  simulator::Cta* const c = &simulator::cta();
  check_bulk("bulk_load", shared, global, bytes);
  simulator::barrier_check_fenced(*c, bar, "bulk_load");
  simulator::enqueue_copy(*c, [=] {
    std::memcpy(simulator::async_write(*c, shared, bytes, "bulk_load"), global, bytes);
    simulator::barrier_complete_bytes(*c, bar, bytes);
  });
}

template <class Write>
void bulk_out(const char* what, void* global, uint32_t shared, uint32_t bytes, Write write) {
  check_bulk(what, shared, global, bytes);
  simulator::Cta* const c = &simulator::cta();
  const auto taken = std::make_shared<std::vector<uint8_t>>(bytes);
  simulator::enqueue_store([=] { std::memcpy(taken->data(), simulator::async_read(*c, shared, bytes, what), bytes); },
                           [=] { write(taken->data()); });
}
inline void bulk_store(void* global, uint32_t shared, uint32_t bytes) {
  bulk_out("bulk_store", global, shared, bytes, [=](const uint8_t* from) { std::memcpy(global, from, bytes); });
}
inline void bulk_reduce_add_f32(void* global, uint32_t shared, uint32_t bytes) {
  bulk_out("bulk_reduce_add_f32", global, shared, bytes, [=](const uint8_t* from) {
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
