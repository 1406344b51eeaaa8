// RMSNorm fused with MXFP8 quantization: one pass over memory.
#pragma once

#include <mxflash/mx.h>

namespace mxflash {

// h = in + residual (rounded to residual's dtype and written back)     or h = in
// rstd = 1 / sqrt(sum(h^2) / dim + eps)     y = BF16(h * rstd * weight)     out = MX(y)
// The sum is defined to the bit (docs/format.md), and quantizing the BF16-rounded y makes `out` identical to
// RMSNorm to BF16 followed by quantize.
struct RmsnormQuantize {
  Tensor in;          // [rows, dim] f32, f16 or bf16
  Tensor weight;      // [dim] f32, f16 or bf16
  Tensor residual{};  // optional, in and out: [rows, dim] f32, f16 or bf16
  float eps = 1e-6f;
  MxTensor out;   // [rows, dim] e4m3 or e5m2
  Tensor y{};     // optional: bf16 [rows, dim]
  Tensor rstd{};  // optional: f32 [rows], for the backward
  Jagged seq{};   // sequences of rows, for the scale layout
  MxRule rule = MxRule::rceil;
  const char* backend = nullptr;
};
Status rmsnorm_quantize(const RmsnormQuantize& args, Stream stream = nullptr);

}  // namespace mxflash
