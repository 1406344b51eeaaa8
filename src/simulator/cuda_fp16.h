// What kernels use of CUDA's header of this name, in simulation.
#pragma once

#include "mx/float16.h"
#include "simulator/cuda_builtins.h"

struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};
inline __half __float2half_rn(float x) { return {mxflash::encode_f16(x)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float __half2float(__half x) { return mxflash::decode_f16(x.bits); }
