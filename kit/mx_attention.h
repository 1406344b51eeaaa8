// An attention call on MX operands with all its memory: what the library is given, and what it gave back. The padding
// around the sequences can be poisoned. All of it is host memory; for backends on a CUDA device, kit/call.h copies it.
#pragma once

#include <mxflash/attention.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kit/cases.h"
#include "kit/operands.h"
#include "kit/oracle.h"
#include "kit/runner.h"

namespace mxflash::kit {

struct MxAttention {
  OwnedMx q, k, v, dout;
  OwnedMx q_col, k_col, v_col, dout_col;            // for contractions over tokens; empty: the operands above
  std::vector<float> dlse;                          // [num_heads_q, total_out], or empty
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_k;  // empty: equal lengths
  int32_t batch = 1;
  Mask mask{};
  float softmax_scale = 0;
  bool shared_q = false;
  Dtype ds_dtype = Dtype::e4m3, dq_accum = Dtype::f32;
  bool deterministic = false;
  CpuMath cpu_math = CpuMath::automatic;
  bool poisoned = false;

  Jagged seq_q() const;
  Jagged seq_k() const;
  Jagged seq_out() const;  // the rows of out, lse, dout
  int64_t total_out() const { return dout.view.data.shape[0]; }
  int64_t rows_in_sequences() const;  // of out
};

// Whatever MXFLASH_BACKEND says: rule rceil, fp32 in and out.
OwnedMx ref_quantize(std::span<const float> x, int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq,
                     Dtype element = Dtype::e4m3, MxBlock block = MxBlock::square32);
std::vector<float> ref_dequantize(const MxTensor& t, const Jagged& seq);

// Quantizes operands (rceil; square32 unless said) with the ref backend. Cases of equal lengths without slack become
// calls without cu_seqlens.
MxAttention quantize_case(const AttentionCase& c, const Operands& operands, Dtype grad_element = Dtype::e4m3,
                          MxBlock block = MxBlock::square32);

// The same call in other memory: always with cu_seqlens (but for a shared query), with tokens after the last sequence,
// and with 0x7F in the payload and 0xFF in the scales of everything that belongs to no sequence.
MxAttention poison_padding(const MxAttention& a);

// The same call with the scale of every square block repeated into row32 and col32 operands, in this layout: the
// values are the same, so the results must be too.
MxAttention expand_squares(const MxAttention& a, ScaleLayout layout);

// What backend sm90 computes with: q, k, v as their operand images hold them (mx/operand_image.h), rounded to one scale
// a tile, as row32 tensors with that scale in all blocks. Dims up to 128.
MxAttention round_to_images(const MxAttention& a);

// The operands as the library sees them, for the oracle.
OracleProblem dequantized_problem(const AttentionCase& c, const MxAttention& a);

struct AttentionResult {
  std::vector<float> out, lse;   // shapes as in AttentionFwd and AttentionBwd
  Dtype out_dtype = Dtype::f32;  // what out was rounded to, and what the backward is given it in
  std::vector<uint8_t> row_exponent;
  std::vector<float> dq, dk, dv;
  OwnedMx out_mx;         // if asked for
  OwnedMx dk_mx, dv_mx;   // square32
  bool backward = false;  // it has run
};

struct MxFormat {
  MxBlock block = MxBlock::square32;
  ScaleLayout layout = ScaleLayout::linear;
};

// What the forward is asked for; not every backend can do all of it.
struct ForwardOptions {
  Dtype out_dtype = Dtype::f32;  // results are widened to fp32
  bool row_exponent = true;      // else the result's is empty
  bool images = false;           // operands as images only, without payloads and scales
  bool strided = false;          // payloads and out are parts of wider tensors
  std::vector<float> v_mean{};   // [batch, num_heads_kv, head_dim_v], or empty
  std::optional<MxFormat> out_mx{};
};

// Forward, then backward; forward alone without a name for the other. Outputs are filled with NaN before, so that a
// missing write shows. Throws StatusError.
AttentionResult run_attention(const MxAttention& a, const std::string& fwd_backend, const std::string& bwd_backend,
                              const ForwardOptions& options = {});

// attention_bwd alone, on the out, lse and row_exponent that `result` has.
void run_backward(const MxAttention& a, const std::string& backend, AttentionResult& result);

// The first difference between the results of two calls that differ in padding only (of what the first has), or "" if
// all bits inside of the sequences are equal and everything outside is what the library promises there: zero, and -inf
// in lse.
std::string compare_bits(const MxAttention& a, const AttentionResult& x, const MxAttention& b,
                         const AttentionResult& y);

}  // namespace mxflash::kit
