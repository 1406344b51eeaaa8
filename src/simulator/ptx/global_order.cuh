// ptx/global_order.cuh in simulation: global memory is ordered.
#pragma once

#include "simulator/cuda_builtins.h"

namespace mxflash::ptx {

inline int32_t load_relaxed(const int32_t* p) {
  simulator::yield();  // it may be polled
  return *p;
}
inline void store_release(int32_t* p, int32_t v) { *p = v; }
inline void fence_proxy_async_global() {}
inline void reduce_add_float4(float4* p, float4 v) { *p = {p->x + v.x, p->y + v.y, p->z + v.z, p->w + v.w}; }

}  // namespace mxflash::ptx
