// Built-ins of CUDA in which threads meet.
#include "simulator/cuda_builtins.h"

#include "simulator/machine.h"

void __trap() { mxflash::simulator::fail("__trap"); }
void __syncthreads() { mxflash::simulator::named_barrier(0, uint32_t(mxflash::simulator::cta().threads.size()), true); }
void __threadfence() {}
void __threadfence_block() {}

namespace mxflash::simulator {
namespace {

void check_mask(const char* what, uint32_t mask) {
  if (mask != ~0u) fail("%s with mask %08x: only whole warps are simulated", what, mask);
}

}  // namespace

uint64_t shuffle(const char* what, uint32_t mask, uint64_t value, uint32_t from) {
  check_mask(what, mask);
  return exchange(what, value)[from & 31];
}

uint32_t ballot(const char* what, uint32_t mask, bool predicate) {
  check_mask(what, mask);
  const auto& all = exchange(what, predicate);
  uint32_t bits = 0;
  for (uint32_t i = 0; i < 32; ++i) bits |= uint32_t(all[i]) << i;
  return bits;
}

uint32_t lane() { return self().lane(); }
void yield() {
  if (machine && machine->current) self().fiber.switch_back();
}

}  // namespace mxflash::simulator
