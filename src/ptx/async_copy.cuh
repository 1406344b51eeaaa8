// Copies of 16 or 4 bytes from global to shared memory that take neither registers nor L1 (those of 16) while they are
// on their way: PTX ISA, "cp.async".
#pragma once

#include <cstdint>

namespace mxflash::ptx {

// L2 fetches the whole line of 128 bytes. Zeros if not `there`; the address is not read then. Both are aligned to 16
// bytes.
__device__ __forceinline__ void async_copy_16(uint32_t shared, const void* global, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(there ? 16 : 0)
               : "memory");
}
// Likewise; aligned to 4 bytes.
__device__ __forceinline__ void async_copy_4(uint32_t shared, const void* global, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(there ? 4 : 0)
               : "memory");
}
// Until this thread's copies are done.
__device__ __forceinline__ void async_copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace mxflash::ptx
