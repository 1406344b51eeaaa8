// A tensor map: what the copy engine knows of a tensor (CUtensorMap). Made on the host by runtime/tensor_map.h; a
// kernel takes it as part of a __grid_constant__ parameter and passes its address on (ptx/tensor_copy.cuh).
#pragma once

#include <cstddef>

namespace mxflash::ptx {

struct alignas(64) TensorMap {
  std::byte opaque[128];
};

}  // namespace mxflash::ptx
