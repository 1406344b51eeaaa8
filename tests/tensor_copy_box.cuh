// One box of a tensor into shared memory and out again, byte for byte, for tests of tensor maps; and back to the tensor
// `to` at the same place, if that does not begin before the tensor.
#pragma once

#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/warp.cuh"

namespace mxflash::box {

struct Params {
  ptx::TensorMap from, to;
  int x, y, z;
  uint32_t bytes;
  uint32_t* image;  // [bytes / 4]: what lay in shared memory
};

inline constexpr int kThreads = 32;

__global__ void __launch_bounds__(kThreads) box_kernel(const __grid_constant__ Params p) {
  const uint32_t base = (ptx::shared_address(ptx::dynamic_shared()) + 1023) / 1024 * 1024, bar = base + p.bytes;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&p.from);
    ptx::mbarrier_arrive_expect_tx(bar, p.bytes);
    ptx::tensor_load_3d(base, &p.from, p.x, p.y, p.z, bar);
  }
  __syncthreads();
  ptx::mbarrier_wait(bar, 0);
  for (uint32_t i = threadIdx.x; i < p.bytes / 4; i += kThreads) p.image[i] = ptx::load_shared<uint32_t>(base + 4 * i);
  if (threadIdx.x == 0 && p.z >= 0) {
    ptx::tensor_store_3d(&p.to, p.x, p.y, p.z, base);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
}

}  // namespace mxflash::box
