// Attention on MXFP8 operands, forward and backward. docs/numerics.md derives every step and its error.
//
// Layout: packed [total, heads, dim]; a dense batch is the case of equal lengths. Symbols in the shapes below:
//   total_q, total_k   tokens of all query / key sequences      num_heads_q = group * num_heads_kv (GQA, MQA)
//   total_out          rows of out, lse, dout: total_q; with shared_q: batch * total_q, sequence-major
//   head_dim           of q and k: a multiple of 8, 8..256      head_dim_v of v and out: likewise, may differ
// Row i of sequence b sees key j iff the mask allows it; Sq, Sk are that sequence's lengths:
//   causal: j <= i + Sk - Sq (bottom-right aligned)
//   window: i + Sk - Sq - window_left <= j <= i + Sk - Sq + window_right, both ends inclusive, negative = open
// A row that sees no key gives out = 0, lse = -inf, and zero gradients.
//
// Below, P and dS are E4M3 (or E5M2), as tensor cores want them. Backend `cpu` keeps them in fp32 or in 14-bit fixed
// point (CpuMath), so its error is never above that of the others. There ds_dtype has no effect, and dq_accum = f16
// rounds the finished sum once, to Inf beyond +-16 as `ref` does.
//
// Backend `sm90` (forward) has operands with one scale a tile, 2^6 in place of 2^8 below, a reference in place of the
// running maximum, and tensor cores that truncate: v = 1 gives out = 1 within 2^-7 (docs/hopper.md). It wants a
// positive softmax_scale and head dimensions up to 128. Backend `sm90_bf16` takes the rest, and, if asked for,
// everything: operands as they are, in BF16; P in BF16 without the 2^8, and out divided by the unrounded sum, so v
// = 1 gives out = 1 within 2^-8. What exceeds BF16's range, 3.4e38, becomes Inf. Its backward takes every call; P and
// dS are BF16, sums fp32: row_exponent, ds_dtype and dq_accum have no effect, and all gradients are deterministic.
//
// Backend `sm100` (forward, never run on silicon) has operands as they are, a reference in place of the running
// maximum, and P rounded to E4M3 at 2^8 (docs/blackwell.md). It wants a positive softmax_scale, and head dimensions
// that are multiples of 16 up to 256.
//
// The backward of `sm90` has a scale for each row of P and of dS, wants what its forward wants, row_exponent, and
// ds_dtype e4m3 (other calls go to `sm90_bf16`, unless `backend` names `sm90`), adds dq up in any order unless it is to
// be deterministic, and keeps dq_accum = f16 in units of its own, which reach beyond +-16. Its tensor cores truncate,
// too: dk and dv whose every term has one sign come out up to 2 % too small, where signs are mixed 0.1 %
// (docs/hopper.md).
//
// The backward of `sm100` (never run on silicon) has the recipe below with sums in fp32 (dq_accum has no effect), and
// all gradients are deterministic. It wants square32 operands whose head dimensions are multiples of 16 up to 256,
// row_exponent, and ds_dtype e4m3 (docs/blackwell.md).
#pragma once

#include <mxflash/mx.h>
#include <mxflash/quantize.h>

namespace mxflash {

struct Mask {
  bool causal = false;
  int32_t window_left = -1;
  int32_t window_right = -1;
};

// Arithmetic of backend `cpu`; others ignore it. docs/cpu.md has the evidence for the default.
enum class CpuMath : int32_t {
  automatic = 0,  // fast where the CPU has dot products of pairs, else exact; MXFLASH_CPU_MATH=exact or fast forces one
  exact,          // as fp32 multiply-adds on the dequantized operands: about 1e-6 off
  fast,           // dot products of pairs: in BF16, or in 14-bit block fixed point; far below E4M3's own error
};
constexpr const char* cpu_math_name(CpuMath math) {
  switch (math) {
    case CpuMath::automatic: return "automatic";
    case CpuMath::exact: return "exact";
    case CpuMath::fast: return "fast";
  }
  return "invalid";
}
CpuMath default_cpu_math();  // what automatic means in this process: exact or fast

// Forward. For each row, over key tiles in ascending order with the running maximum m:
//   s = softmax_scale * log2(e) * q.k        P = E4M3(2^(s - m + 8)), so the scale of P is 2^-8
//   out = sum_j P v / sum_j P                lse = ln sum_j e^(softmax_scale * q.k), from the unrounded P
// The rounded P in out's denominator makes the softmax weights sum to one exactly: v = 1 gives out = 1.
struct AttentionFwd {
  MxTensor q;         // [total_q, num_heads_q, head_dim]
  MxTensor k;         // [total_k, num_heads_kv, head_dim]
  MxTensor v;         // [total_k, num_heads_kv, head_dim_v]; block col32 or square32 on tensor cores, any on `ref`
  Tensor out;         // [total_out, num_heads_q, head_dim_v] f32, f16 or bf16. Optional if out_mx is given
  MxTensor out_mx{};  // optional, of the same shape: out quantized from its fp32 values, rule rceil
  Tensor lse{};       // f32 [num_heads_q, total_out], natural logarithm; optional
  // u8 [num_heads_q, total_out], optional: floor(lse * log2(e) - max_j s), so that P <= 2^-row_exponent in the
  // backward and its E4M3 scale can follow. 0 for a row without keys.
  Tensor row_exponent{};
  // f32 [batch, num_heads_kv, head_dim_v], optional: what smooth_v subtracted from v; added to out. Exact, since the
  // softmax weights sum to one.
  Tensor v_mean{};
  // Optional: u8 [image_size(...)], images of q, k, v as quantize or write_image wrote them. Backend sm90 then reads no
  // payload or scale of that operand, whose data may be null; without, it writes the image into its workspace first.
  // Others ignore them.
  Tensor q_image{}, k_image{}, v_image{};
  Jagged seq_q{}, seq_k{};
  Mask mask{};
  float softmax_scale = 0;  // 0: 1 / sqrt(head_dim)
  bool shared_q = false;    // one query sequence (seq_q.batch == 1, equal lengths) attends to every key sequence
  CpuMath cpu_math = CpuMath::automatic;
  const char* backend = nullptr;
  void* workspace = nullptr;  // aligned to 64 bytes
  size_t workspace_size = 0;
};
// Bytes of workspace that the call needs with the present num_threads(); 0 if it would fail (the call itself says why).
// Follows from shapes, dtypes and cu_seqlens: the other data pointers may still be null.
size_t attention_fwd_workspace(const AttentionFwd& args);
Status attention_fwd(const AttentionFwd& args, Stream stream = nullptr);

// Backward, by recomputation. With P = 2^(s - lse * log2(e)) and dP = dout.v:
//   delta = rowsum((out - v_mean) * dout) - dlse, from the dequantized dout
//   dS = P (dP - delta)       dV = P^ ^T dout       dK = softmax_scale * dS^ ^T q       dQ = softmax_scale * dS^ k
// P^ is P in E4M3 with scale 2^-(8 + r), r the least row_exponent of the 32-row block; dS^ is dS quantized per 32x32
// block (rule rceil). Deterministic, but for dq of `sm90` without `deterministic`.
struct AttentionBwd {
  // Operands whose contraction runs over channels: S = q k^T, dP = dout v^T.
  MxTensor q;     // [total_q, num_heads_q, head_dim]
  MxTensor k;     // [total_k, num_heads_kv, head_dim]
  MxTensor v;     // [total_k, num_heads_kv, head_dim_v]
  MxTensor dout;  // [total_out, num_heads_q, head_dim_v]
  // The same tensors for contractions over tokens (dK = dS^T q, dQ = dS k, dV = P^T dout). Not needed with square32,
  // where one payload serves both; not given: the operand above.
  MxTensor q_col{}, k_col{}, dout_col{};

  Tensor out;             // as written by the forward
  Tensor lse;             // as written by the forward
  Tensor row_exponent{};  // as written by the forward; not given: recomputed, but not by `sm90`
  Tensor v_mean{};        // as given to the forward
  Tensor k_mean{};        // f32 [batch, num_heads_kv, head_dim]: what smooth_k subtracted from k; needed with dlse only
  // f32 [num_heads_q, total_out], optional: gradient that reaches the lse of the caller's own q and k. With k_mean that
  // lse is `lse` + softmax_scale * q.k_mean, and dq gets softmax_scale * dlse * k_mean.
  Tensor dlse{};

  Tensor dq;         // [total_q, num_heads_q, head_dim] f32, f16 or bf16; with shared_q summed over the batch
  Tensor dk{};       // [total_k, num_heads_kv, head_dim]; summed over the group. Optional if dk_mx is given
  Tensor dv{};       // [total_k, num_heads_kv, head_dim_v]; likewise
  MxTensor dk_mx{};  // optional: dk quantized from its fp32 values, rule rceil
  MxTensor dv_mx{};  // optional: likewise

  Dtype ds_dtype = Dtype::e4m3;  // e4m3 or e5m2
  // f32, or f16: the sum over key tiles is kept as fp16 in units of 2^-12, so |dq / softmax_scale| >= 16 becomes Inf
  // (`sm90`: in units with which it cannot, as long as scores are below some thousands; `sm90_bf16`: no effect). Each
  // addition rounds to 11 bits of the running sum: good where keys have no common mean (smooth), or are at most some
  // thousands (docs/hopper.md).
  Dtype dq_accum = Dtype::f32;
  // dq the same bits in every run, on `sm90` too, which then adds key tiles in their order: slower, most so on few long
  // sequences (docs/hopper.md). Everything else is the same bits in every run anyway.
  bool deterministic = false;
  // q and k were rotated by the quantizer with this seed: dq and dk are rotated back.
  bool rotate_qk = false;
  uint64_t rotate_seed = kDefaultRotateSeed;

  Jagged seq_q{}, seq_k{};
  Mask mask{};
  float softmax_scale = 0;  // 0: 1 / sqrt(head_dim)
  bool shared_q = false;
  CpuMath cpu_math = CpuMath::automatic;
  const char* backend = nullptr;
  void* workspace = nullptr;
  size_t workspace_size = 0;
};
size_t attention_bwd_workspace(const AttentionBwd& args);
Status attention_bwd(const AttentionBwd& args, Stream stream = nullptr);

}  // namespace mxflash
