// RMSNorm fused with MXFP8 quantization, and its backward: one pass over memory each.
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

// The backward of y = h * rstd * weight, with xhat = h * rstd and g = dy * weight; roundings of the forward count as
// the identity:
//   dx = rstd * (g - xhat * mean(g * xhat)) (+ dh)     mean over a row, dh rounded only with the sum
//   dw = sum over rows of dy * xhat
// ref computes in fp64, the others in fp32: docs/numerics.md has the bound. The same call gives the same bytes again,
// on the CPU with any number of threads. NaN and Inf in a row reach its dx, and dw where xhat and dy have them.
struct RmsnormBwd {
  Tensor h;          // [rows, dim] f32, f16 or bf16: what the forward normalised, `in` or the `residual` written back
  Tensor weight;     // [dim] f32, f16 or bf16
  Tensor rstd;       // f32 [rows], from the forward
  Tensor dy{};       // [rows, dim] f32, f16 or bf16: either this ...
  MxTensor dy_mx{};  // ... or [rows, dim] e4m3 or e5m2, any block and layout
  Tensor dh{};       // optional: [rows, dim] f32, f16 or bf16, the gradient that reaches h by the residual path
  Tensor dx;         // [rows, dim] f32, f16 or bf16; may be dh: the same data, dtype and strides. No other input
  Tensor dw;         // [dim] f32 or weight's dtype; written, not added to
  Jagged seq{};      // sequences of rows, for the scales of dy_mx; rows of none: not read, dx zero, nothing in dw
  const char* backend = nullptr;
  void* workspace = nullptr;  // rmsnorm_bwd_workspace(args) bytes, aligned to 64
  size_t workspace_size = 0;
};
// Bytes of workspace; depends on shapes only. 0 if the call would refuse the arguments.
size_t rmsnorm_bwd_workspace(const RmsnormBwd& args);
Status rmsnorm_bwd(const RmsnormBwd& args, Stream stream = nullptr);

}  // namespace mxflash
