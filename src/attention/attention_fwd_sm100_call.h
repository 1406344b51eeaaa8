// From a call of attention_fwd to the arguments of the kernel on Blackwell. Apart from its launcher, since simulation
// and emulation call the kernel too.
#pragma once

#include <cinttypes>
#include <cstdio>

#include "attention/attention_fwd_sm100.cuh"

namespace mxflash::fwd_sm100 {

// Calls f(Config) with that of the kernel which takes the call. Dimensions are padded to the kernel's: the copy engine
// writes zeros behind the channels that there are.
template <class F>
auto with_config(const AttentionFwd& a, F&& f) {
  const int64_t dim = a.q.data.shape[2], dim_v = a.v.data.shape[2];
  if (std::max(dim, dim_v) <= 64) return f(Config<64, 64>{});
  if (std::max(dim, dim_v) <= 128) return f(Config<128, 128>{});
  if (dim <= 192 && dim_v <= 128) return f(Config<192, 128>{});
  return f(Config<256, 256>{});
}

// 128 tokens of a head, channels of a swizzle's span; 0 behind the channels and the tokens that there are.
inline TensorTile box_of(const MxTensor& t, ptx::Swizzle swizzle) {
  return TensorTile::of_rows(t.data, kLanes, int32_t(ptx::swizzle_span(swizzle)), swizzle);
}

inline Status check_operand(const char* op, const char* name, const MxTensor& t, MxBlock other, ptx::Swizzle swizzle) {
  const int64_t dim = t.data.shape[2];
  if (dim > 256) return unsupported("%s: sm100: %s.dim must be at most 256, got %" PRId64, op, name, dim);
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
  return check_tensor_tile(what, box_of(t, swizzle));
}

// What the kernel does not take, beside the card.
inline Status check_call(const char* op, const AttentionFwd& a) {
  const AttentionShape s = AttentionShape::of(a);
  MXFLASH_TRY(check_payloads(a));
  return with_config(a, [&]<class C>(C) -> Status {
    MXFLASH_TRY(check_operand(op, "q", a.q, MxBlock::row32, C::kSwizzle));
    MXFLASH_TRY(check_operand(op, "k", a.k, MxBlock::row32, C::kSwizzle));
    MXFLASH_TRY(check_operand(op, "v", a.v, MxBlock::col32, C::kSwizzleV));
    if (!(s.softmax_scale > 0)) {
      return unsupported("%s: sm100: softmax_scale must be positive, got %g", op, s.softmax_scale);
    }
    return check_work_items(op, "sm100", s, {"rows", s.num_heads_q, s.total_q, s.max_seqlen_q, s.seq_q, C::kBlockM});
  });
}

// Where results are to be quantized, a second kernel does it, from fp32.
inline Partials partials_of(Arena& arena, const AttentionFwd& a) {
  if (!a.out_mx) return {};
  const AttentionShape s = AttentionShape::of(a);
  const int dim = with_config(a, []<class C>(C) { return C::kDimV; });
  Partials partials{.dim = dim, .heads = s.num_heads_q, .rows = s.total_out};
  partials.row = arena.take<PartialRow>(partials.count());
  partials.out = arena.take<float>(partials.count() * partials.dim);
  return partials;
}

// Of a kernel with Config C.
template <class C>
Status params_of(const AttentionFwd& a, const AttentionPlan& plan, const Partials& partials, Params& p) {
  const AttentionShape s = AttentionShape::of(a);
  MXFLASH_TRY(make_tensor_map("attention_fwd: sm100: q.data", box_of(a.q, C::kSwizzle), p.q_map));
  MXFLASH_TRY(make_tensor_map("attention_fwd: sm100: k.data", box_of(a.k, C::kSwizzle), p.k_map));
  MXFLASH_TRY(make_tensor_map("attention_fwd: sm100: v.data", box_of(a.v, C::kSwizzleV), p.v_map));
  p.items = WorkItems::of(a, s, plan, C::kDim + C::kDimV, C::kBlockM);
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
