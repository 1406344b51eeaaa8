// Distributed shared memory of a cluster: PTX ISA, "mapa" and "st.async".
#pragma once

#include <cstdint>

namespace mxflash::ptx {

// The address, in the shared memory of the cluster's CTA `rank`, of what is at `shared` in this one's.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t shared, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

// Stores 4 bytes there, and counts them on the mbarrier, which is in the same CTA's memory: who waits for it sees them.
__device__ __forceinline__ void store_async(uint32_t address, uint32_t value, uint32_t bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address), "r"(value),
               "r"(bar)
               : "memory");
}

}  // namespace mxflash::ptx
