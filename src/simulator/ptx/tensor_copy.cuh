// ptx/tensor_copy.cuh in simulation.
#pragma once

#include "ptx/tensor_map.h"

namespace mxflash::ptx {

inline void prefetch_tensor_map(const TensorMap*) {}
void tensor_load_3d(uint32_t shared, const TensorMap* map, int x, int y, int z, uint32_t bar);
void tensor_store_3d(const TensorMap* map, int x, int y, int z, uint32_t shared);

}  // namespace mxflash::ptx
