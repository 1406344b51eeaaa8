// Copies of boxes of a tensor in global memory by the copy engine: PTX ISA, "cp.async.bulk.tensor". A box is packed in
// shared memory, swizzled as its map says (ptx/descriptors.h, `swizzled`), and starts at a multiple of 8 spans.
#pragma once

#include <cstdint>

#include "ptx/tensor_map.h"

namespace mxflash::ptx {

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box at elements x, y, z of the map's axes, x the contiguous one; outside of the tensor it is zero. All bytes of
// the box count on the mbarrier.
__device__ __forceinline__ void tensor_load_3d(uint32_t shared, const TensorMap* map, int x, int y, int z,
                                               uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar)
      : "memory");
}
// What of the box is outside of the tensor is not stored; no coordinate may be negative. Part of the thread's next bulk
// group (ptx/bulk_copy.cuh).
__device__ __forceinline__ void tensor_store_3d(const TensorMap* map, int x, int y, int z, uint32_t shared) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
               "r"(x), "r"(y), "r"(z), "r"(shared)
               : "memory");
}

}  // namespace mxflash::ptx
