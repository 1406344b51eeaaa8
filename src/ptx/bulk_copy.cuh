// One-dimensional bulk copies by the copy engine: PTX ISA, "cp.async.bulk".
#pragma once

#include <cstdint>

namespace mxflash::ptx {

// Global to shared memory; both addresses and the size are multiples of 16. Completes on the mbarrier.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(bar)
               : "memory");
}

}  // namespace mxflash::ptx
