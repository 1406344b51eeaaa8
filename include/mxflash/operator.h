// The training operator: BF16, FP16 or FP32 in and out, MXFP8 inside. It quantizes, calls attention_fwd /
// attention_bwd, and undoes what the recipe did to the operands: outputs and gradients are always those of the
// caller's own q, k, v.
#pragma once

#include <mxflash/attention.h>

namespace mxflash {

struct Recipe {
  Dtype element = Dtype::e4m3;       // of q, k, v
  Dtype grad_element = Dtype::e4m3;  // of dout; dS is E4M3, whose range each block or row of it has to itself
  MxRule rule = MxRule::rceil;
  // Block of operands contracted over channels, and over tokens. Equal: one payload per tensor serves both.
  MxBlock block = MxBlock::square32;
  MxBlock block_col = MxBlock::square32;
  bool rotate_qk = true;  // random-sign Hadamard on q and k: spreads outlier channels
  bool smooth_k = true;   // k minus its per-head mean over the sequence: softmax does not see it
  bool smooth_v = true;   // v minus its per-head mean, added back to out
  uint64_t rotate_seed = kDefaultRotateSeed;
};

// Operand statistics of one call, on the operands' device.
struct OperatorStats {
  QuantizeStats q, k, v, dout;
};

// Whoever will call operator_bwd may ask operator_bwd_workspace before the forward: 0, with arguments that are
// otherwise valid, says that the backend that will be taken, or the one that `backend` names, has no such backward.
struct OperatorFwd {
  Tensor q, k, v;  // shapes as in AttentionFwd; f32, f16 or bf16; the last stride 1 or 0
  Tensor out;
  Tensor lse{};  // f32 [num_heads_q, total_out], of the caller's own q and k; optional
  Recipe recipe{};
  Jagged seq_q{}, seq_k{};
  Mask mask{};
  float softmax_scale = 0;
  bool shared_q = false;
  OperatorStats* stats = nullptr;         // optional: q, k, v are written
  CpuMath cpu_math = CpuMath::automatic;  // like backend, for the backward too
  const char* backend = nullptr;
  // What the backward needs beside `out`: MXFP8 q, k, v, lse and one byte a row. Kept by the caller until the backward;
  // required for inference too. Aligned to 64 bytes, like every workspace.
  void* saved = nullptr;
  size_t saved_size = 0;
  void* workspace = nullptr;
  size_t workspace_size = 0;
};
// Sizes in bytes follow from shapes, dtypes and cu_seqlens (data pointers may still be null). The workspace's is 0 if
// the call would fail; that of `saved` only if q, k, v by themselves or the recipe are wrong.
size_t operator_saved(const OperatorFwd& args);
size_t operator_fwd_workspace(const OperatorFwd& args);
Status operator_fwd(const OperatorFwd& args, Stream stream = nullptr);

struct OperatorBwd {
  // The very arguments of the forward call, with `out` and `saved` as it left them; of q, k, v only the shapes are
  // read. That they are the same cannot be checked: another mask, recipe or cu_seqlens gives gradients of nothing.
  OperatorFwd fwd;
  Tensor dout;    // [total_out, num_heads_q, head_dim_v]; any strides, the last 1 or 0 (an expanded scalar)
  Tensor dlse{};  // f32 [num_heads_q, total_out], optional
  Tensor dq;
  Tensor dk{}, dv{};  // as in AttentionBwd, optional beside dk_mx, dv_mx
  MxTensor dk_mx{}, dv_mx{};
  // As in AttentionBwd. none: f16 where `sm90` adds dq up and no sequence can have more than 2^17 keys with
  // Recipe::smooth_k, or 2^14 without it, 2^12 if deterministic: so many sums are as accurate as in f32, beside the
  // rest of the recipe, and made faster; else f32.
  Dtype dq_accum = Dtype::none;
  bool deterministic = false;  // as in AttentionBwd
  void* workspace = nullptr;
  size_t workspace_size = 0;
};
size_t operator_bwd_workspace(const OperatorBwd& args);
Status operator_bwd(const OperatorBwd& args, Stream stream = nullptr);

}  // namespace mxflash
