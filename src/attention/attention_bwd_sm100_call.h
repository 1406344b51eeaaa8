// From a call of attention_bwd to the parameters of the backward's kernels on Blackwell: host code without CUDA, so
// that simulation runs what the card would.
#pragma once

#include <algorithm>
#include <cstdio>

#include "attention/attention_bwd_sm100_pre.cuh"
#include "runtime/arena.h"
#include "runtime/tensor_map.h"

namespace mxflash::bwd_sm100 {

struct Workspace {
  AttentionPlan plan[2];  // of queries, of keys
  RowStatistics* statistics;
  int64_t statistics_head;
  size_t used;
  Workspace(void* base, const AttentionShape& s) {
    Arena arena(base);
    plan[0] = AttentionPlan::of(arena, s.seq_q, s.seq_k);
    plan[1] = AttentionPlan::of(arena, s.seq_k, s.seq_out());
    if (s.shared_q) plan[0].order = plan[0].first_block = nullptr;  // items are blocks of the one query sequence
    statistics_head = padded_token_count(s.total_out, s.seq_out()) / kTileRows;
    statistics = arena.take<RowStatistics>(s.num_heads_q * statistics_head);
    used = arena.used();
  }
};

// The call from the keys' side: work items take these for rows, and the rows that see them for keys.
inline AttentionShape from_keys(const AttentionShape& s) {
  AttentionShape t = s;
  t.total_q = s.total_k, t.total_k = s.total_out;
  t.num_heads_q = s.num_heads_kv, t.group = 1;
  t.max_seqlen_q = s.max_seqlen_k, t.max_seqlen_k = s.max_seqlen_q;
  t.seq_q = s.seq_k, t.seq_k = s.seq_out();
  t.total_out = s.total_k, t.shared_q = false;
  return t;
}
// From the queries' side: blocks of a shared query are items once, whatever sequences they meet.
inline AttentionShape from_queries(AttentionShape s) {
  if (s.shared_q) s.batch = 1;
  return s;
}

inline Operand operand_of(const MxTensor& t, const Jagged& seq) {
  const int64_t blocks = padded_token_count(t.data.shape[0], seq) / kMxBlock;
  return {.data = static_cast<const uint8_t*>(t.data.data),
          .token_stride = t.data.stride[0],
          .head_stride = t.data.stride[1],
          .scale = static_cast<const uint8_t*>(t.scale.data),
          .scale_head = blocks * ceil_div(t.data.shape[2], kMxBlock),
          .dim = int32_t(t.data.shape[2]),
          .scale_columns = int32_t(ceil_div(t.data.shape[2], kMxBlock)),
          .element = t.data.dtype == Dtype::e5m2 ? ptx::Fp8Code::e5m2 : ptx::Fp8Code::e4m3};
}

inline bool aligned_rows(const Tensor& t) {
  const int64_t size = dtype_size(t.dtype);
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride[0] * size % 16 == 0 && t.stride[1] * size % 16 == 0;
}

inline Gradient gradient_of(const Tensor& out, const MxTensor& mx, const Jagged& seq, double factor,
                            const AttentionBwd& a, bool rotated) {
  const Operand codes = mx ? operand_of(mx, seq) : Operand{};
  const int64_t dim = mx ? mx.data.shape[2] : out.shape[2];
  return {.out = out,
          .wide = out && aligned_rows(out),
          .codes = const_cast<uint8_t*>(codes.data),
          .code_token_stride = codes.token_stride,
          .code_head_stride = codes.head_stride,
          .scale = const_cast<uint8_t*>(codes.scale),
          .scale_head = codes.scale_head,
          .dim = int32_t(dim),
          .scale_columns = codes.scale_columns,
          .factor = float(factor),
          .rotation = rotated && a.rotate_qk ? int32_t(rotation_group(dim)) : 1,
          .signs = RotationSigns::of(a.rotate_seed)};
}

inline PreParams pre_params(const AttentionBwd& a, const Workspace& w) {
  const AttentionShape s = AttentionShape::of(a);
  return {.dout = operand_of(a.dout, s.seq_out()),
          .out = a.out,
          .lse = a.lse,
          .row_exponent = a.row_exponent,
          .dlse = a.dlse,
          .v_mean = a.v_mean,
          .wide = aligned_rows(a.out),
          .axis = {s.seq_out(), s.total_out},
          .batch = s.seq_out().batch,
          .heads = int32_t(s.num_heads_q),
          .group = int32_t(s.group),
          .statistics = w.statistics,
          .statistics_head = w.statistics_head};
}
// CTAs of the pre kernel.
inline int64_t pre_grid(const AttentionShape& s) {
  return padded_token_count(s.total_out, s.seq_out()) / kPreRows * s.num_heads_q;
}

// Channels of the kernels that take a call: of q and k, of v and dout.
struct KernelDims {
  int32_t qk, v;
};
inline KernelDims kernel_dims(const AttentionShape& s) {
  const int64_t most = std::max(s.head_dim, s.head_dim_v);
  if (most <= 64) return {64, 64};
  if (most <= 128) return {128, 128};
  if (s.head_dim <= 192 && s.head_dim_v <= 128) return {192, 128};
  return {256, 256};
}
// f.template operator()<kDim, kDimV>() of these.
template <class F>
auto with_kernel_dims(const AttentionShape& s, F&& f) {
  switch (kernel_dims(s).qk) {
    case 64: return f.template operator()<64, 64>();
    case 128: return f.template operator()<128, 128>();
    case 192: return f.template operator()<192, 128>();
    default: return f.template operator()<256, 256>();
  }
}

// A copy is a span of a tile of one head.
inline TensorTile tile_of(const MxTensor& t, int32_t dim) {
  return TensorTile::of_rows(t.data, kTileRows, span_of(dim), swizzle_of(dim));
}

// ---- what is refused ------------------------------------------------------------------------------------------------

inline Status check_block(const char* name, const MxTensor& t) {
  if (t.block == MxBlock::square32) return {};
  return unsupported("attention_bwd: sm100: %s.block must be square32, got %s", name,
                     t.block == MxBlock::row32 ? "row32" : "col32");
}
// And what the copy engine can take, and 16-byte loads at the end of a sequence.
inline Status check_operand(const char* name, const MxTensor& t, int32_t dim) {
  MXFLASH_TRY(check_block(name, t));
  char what[64];
  std::snprintf(what, sizeof what, "attention_bwd: sm100: %s.data", name);
  return check_tensor_tile(what, tile_of(t, dim));
}
inline Status check_gradient(const char* name, const MxTensor& t) {
  if (!t) return {};
  MXFLASH_TRY(check_block(name, t));
  if (t.data.dtype == Dtype::e4m3) return {};
  return unsupported("attention_bwd: sm100: %s.data.dtype must be e4m3, got %s", name, dtype_name(t.data.dtype));
}

inline Status check_call(const AttentionBwd& a) {
  const AttentionShape s = AttentionShape::of(a);
  const struct {
    const char* name;
    int64_t dim;
  } dims[] = {{"head_dim", s.head_dim}, {"head_dim_v", s.head_dim_v}};
  for (const auto& d : dims) {
    if (d.dim <= 256 && d.dim % 16 == 0) continue;
    return unsupported("attention_bwd: sm100: %s must be a multiple of 16, at most 256, got %d", d.name, int(d.dim));
  }
  if (!a.row_exponent && s.total_out > 0) {
    return unsupported("attention_bwd: sm100: row_exponent must be given, got null");
  }
  if (a.ds_dtype != Dtype::e4m3) {
    return unsupported("attention_bwd: sm100: ds_dtype must be e4m3, got %s", dtype_name(a.ds_dtype));
  }
  if (a.q_col || a.k_col || a.dout_col) {
    return unsupported("attention_bwd: sm100: operands of two payloads are not taken, got %s", a.q_col   ? "q_col"
                                                                                               : a.k_col ? "k_col"
                                                                                                         : "dout_col");
  }
  const KernelDims dim = kernel_dims(s);
  MXFLASH_TRY(check_operand("q", a.q, dim.qk));
  MXFLASH_TRY(check_operand("k", a.k, dim.qk));
  MXFLASH_TRY(check_operand("v", a.v, dim.v));
  MXFLASH_TRY(check_operand("dout", a.dout, dim.v));
  MXFLASH_TRY(check_gradient("dk_mx", a.dk_mx));
  MXFLASH_TRY(check_gradient("dv_mx", a.dv_mx));
  if (const int64_t grid = pre_grid(s); grid >= int64_t(1) << 31) {
    return unsupported("attention_bwd: sm100: blocks of 32 rows must be fewer than 2^31, got %lld",
                       static_cast<long long>(grid));
  }
  MXFLASH_TRY(check_work_items("attention_bwd", "sm100", s,
                               {"rows", s.num_heads_q, s.total_q, s.max_seqlen_q, s.seq_q, kOwnRows}));
  return check_work_items("attention_bwd", "sm100", s,
                          {"keys", s.num_heads_kv, s.total_k, s.max_seqlen_k, s.seq_k, kOwnRows});
}

// ---- parameters -----------------------------------------------------------------------------------------------------

inline Params common_params(const AttentionBwd& a, const Workspace& w) {
  const AttentionShape s = AttentionShape::of(a);
  Params p{};
  p.statistics = w.statistics, p.statistics_head = w.statistics_head;
  p.q = {s.seq_q, s.total_q}, p.out = {s.seq_out(), s.total_out}, p.k = {s.seq_k, s.total_k};
  p.own_per_streamed = p.streamed_per_own = p.sequences = 1;
  p.shared_q = s.shared_q;
  p.scale_log2 = float(s.softmax_scale * double(kLog2e));
  return p;
}

inline WorkItems work_items(const AttentionShape& own, const Mask& mask, const AttentionPlan& plan,
                            int64_t head_bytes) {
  AttentionFwd roles;
  roles.seq_q = own.seq_q, roles.seq_k = own.seq_k, roles.mask = mask;
  return WorkItems::of(roles, own, plan, head_bytes, kOwnRows);
}

inline Status keys_params(const AttentionBwd& a, const Workspace& w, Params& p) {
  const AttentionShape s = AttentionShape::of(a);
  p = common_params(a, w);
  p.own[0] = operand_of(a.k, s.seq_k), p.own[1] = operand_of(a.v, s.seq_k);
  p.streamed[0] = operand_of(a.q, s.seq_q), p.streamed[1] = operand_of(a.dout, s.seq_out());
  p.items = work_items(from_keys(s), transposed(a.mask), w.plan[1], s.group * 2 * s.head_dim);
  p.items.ascending = true;
  p.gradient = gradient_of(a.dk, a.dk_mx, s.seq_k, s.softmax_scale, a, true);
  p.values = gradient_of(a.dv, a.dv_mx, s.seq_k, 1, a, false);
  p.streamed_per_own = int32_t(s.group);
  MXFLASH_TRY(make_tensor_map("attention_bwd: sm100: q.data", tile_of(a.q, kernel_dims(s).qk), p.map[0]));
  return make_tensor_map("attention_bwd: sm100: dout.data", tile_of(a.dout, kernel_dims(s).v), p.map[1]);
}

inline Status queries_params(const AttentionBwd& a, const Workspace& w, Params& p) {
  const AttentionShape s = AttentionShape::of(a);
  p = common_params(a, w);
  p.own[0] = operand_of(a.q, s.seq_q), p.own[1] = operand_of(a.dout, s.seq_out());
  p.streamed[0] = operand_of(a.k, s.seq_k), p.streamed[1] = operand_of(a.v, s.seq_k);
  p.items = work_items(from_queries(s), a.mask, w.plan[0], 2 * s.head_dim);
  p.gradient = gradient_of(a.dq, {}, s.seq_q, s.softmax_scale, a, true);
  if (a.dlse && a.k_mean) p.lse = a.lse, p.dlse = a.dlse, p.k_mean = a.k_mean;
  p.own_per_streamed = int32_t(s.group);
  p.sequences = s.shared_q ? int32_t(s.batch) : 1;
  MXFLASH_TRY(make_tensor_map("attention_bwd: sm100: k.data", tile_of(a.k, kernel_dims(s).qk), p.map[0]));
  return make_tensor_map("attention_bwd: sm100: v.data", tile_of(a.v, kernel_dims(s).v), p.map[1]);
}

}  // namespace mxflash::bwd_sm100
