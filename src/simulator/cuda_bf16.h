// What kernels use of CUDA's header of this name, in simulation.
#pragma once

#include "mx/float16.h"
#include "simulator/cuda_builtins.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {mxflash::encode_bf16(x)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline float __bfloat162float(__nv_bfloat16 x) { return mxflash::decode_bf16(x.bits); }
