// From a call of attention_fwd to the arguments of the kernel on Blackwell. Apart from its launcher, since simulation
// and emulation call the kernel too.
#pragma once

#include <cinttypes>
#include <cstdio>

#include "attention/attention_fwd_sm100.cuh"

namespace mxflash::fwd_sm100 {

// Dimensions are padded to it: the copy engine writes zeros behind the channels that there are.
inline int padded_dim(const AttentionFwd& a) { return std::max(a.q.data.shape[2], a.v.data.shape[2]) <= 64 ? 64 : 128; }

// 128 tokens of a head, `dim` channels; 0 behind the channels and the tokens that there are.
inline TensorTile tile_of(const MxTensor& t, int dim) {
  return TensorTile::of_rows(t.data, kLanes, dim, dim == 128 ? ptx::Swizzle::b128 : ptx::Swizzle::b64);
}

inline Status check_operand(const char* op, const char* name, const MxTensor& t, MxBlock other, int padded_dim) {
  const int64_t dim = t.data.shape[2];
  if (dim > 128) return unsupported("%s: sm100: %s.dim must be at most 128, got %" PRId64, op, name, dim);
  if (dim % 16 != 0) {
    return unsupported("%s: sm100: %s.dim must be a multiple of 16, got %" PRId64, op, name, dim);
  }
  if (t.block != MxBlock::square32 && t.block != other) {
    return unsupported("%s: sm100: %s.block must be square32 or %s, got %d", op, name,
                       other == MxBlock::row32 ? "row32" : "col32", int(t.block));
  }
  if (reinterpret_cast<uintptr_t>(t.scale.data) % 16 != 0) {
    return unsupported("%s: sm100: %s.scale must be aligned to 16 bytes, got address %p", op, name, t.scale.data);
  }
  char what[48];
  std::snprintf(what, sizeof what, "%s: sm100: %s.data", op, name);
  return check_tensor_tile(what, tile_of(t, padded_dim));
}

// What the kernel does not take, beside the card.
inline Status check_call(const char* op, const AttentionFwd& a) {
  const AttentionShape s = AttentionShape::of(a);
  MXFLASH_TRY(check_payloads(a));
  MXFLASH_TRY(check_operand(op, "q", a.q, MxBlock::row32, padded_dim(a)));
  MXFLASH_TRY(check_operand(op, "k", a.k, MxBlock::row32, padded_dim(a)));
  MXFLASH_TRY(check_operand(op, "v", a.v, MxBlock::col32, padded_dim(a)));
  if (!(s.softmax_scale > 0)) {
    return unsupported("%s: sm100: softmax_scale must be positive, got %g", op, s.softmax_scale);
  }
  return check_work_items(op, "sm100", s, {"rows", s.num_heads_q, s.total_q, s.max_seqlen_q, s.seq_q, kBlockM});
}

// Where results are to be quantized, a second kernel does it, from fp32.
inline Partials partials_of(Arena& arena, const AttentionFwd& a) {
  if (!a.out_mx) return {};
  const AttentionShape s = AttentionShape::of(a);
  Partials partials{.dim = padded_dim(a), .heads = s.num_heads_q, .rows = s.total_out};
  partials.row = arena.take<PartialRow>(partials.count());
  partials.out = arena.take<float>(partials.count() * partials.dim);
  return partials;
}

inline Status params_of(const AttentionFwd& a, const AttentionPlan& plan, const Partials& partials, Params& p) {
  const AttentionShape s = AttentionShape::of(a);
  const int dim = padded_dim(a);
  MXFLASH_TRY(make_tensor_map("attention_fwd: sm100: q.data", tile_of(a.q, dim), p.q_map));
  MXFLASH_TRY(make_tensor_map("attention_fwd: sm100: k.data", tile_of(a.k, dim), p.k_map));
  MXFLASH_TRY(make_tensor_map("attention_fwd: sm100: v.data", tile_of(a.v, dim), p.v_map));
  p.items = WorkItems::of(a, s, plan, 2 * dim, kBlockM);
  p.to = RowOutput::of(a, s);
  p.q = Operand::of(a.q, a.seq_q);
  p.k = Operand::of(a.k, a.seq_k);
  p.v = Operand::of(a.v, a.seq_k);
  p.scale_log2 = float(s.softmax_scale * 1.44269504088896341);
  p.partials = partials;
  p.out = a.out;
  if (partials.out) {
    p.out = make_tensor(partials.out, Dtype::f32, s.total_out, s.num_heads_q, s.head_dim_v);
    p.out.stride = {partials.dim, partials.rows * partials.dim, 1, 0};
  }
  const int64_t in_16_bytes = p.out.dtype == Dtype::f32 ? 4 : 8;  // elements
  p.bulk_rows = reinterpret_cast<uintptr_t>(p.out.data) % 16 == 0 && p.out.stride[0] % in_16_bytes == 0 &&
                p.out.stride[1] % in_16_bytes == 0;
  return {};
}

// Of that second kernel.
inline Combine combine_of(const AttentionFwd& a, const AttentionShape& s, const Params& p) {
  return {.partials = p.partials,
          .to = p.to,
          .seq_out = s.seq_out(),
          .seq_k = a.seq_k,
          .total_k = s.total_k,
          .max_seqlen = s.max_seqlen_q,
          .mask = a.mask,
          .pack = 1,
          .group = int32_t(s.group)};
}

}  // namespace mxflash::fwd_sm100
