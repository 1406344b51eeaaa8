// GEMM with an epilogue that writes MXFP8: a projection whose result the attention reads without another pass.
#pragma once

#include <mxflash/mx.h>

namespace mxflash {

// c = a b^T accumulated in fp32; out = MX(c), quantized from the fp32 accumulators.
struct GemmQuantize {
  Tensor a;      // [m, k] f32, f16 or bf16
  Tensor b;      // [n, k] f32, f16 or bf16 (a linear layer's weight)
  MxTensor out;  // [m, n], or [m, heads, dim] with heads * dim == n; e4m3 or e5m2
  Tensor c{};    // optional: the same shape as out, f32, f16 or bf16
  Jagged seq{};  // sequences of rows of a, for the scale layout
  MxRule rule = MxRule::rceil;
  const char* backend = nullptr;
};
Status gemm_quantize(const GemmQuantize& args, Stream stream = nullptr);

}  // namespace mxflash
