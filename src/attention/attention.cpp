// Argument rules and backend lists of attention_fwd and attention_bwd.
#include "attention/attention.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "runtime/check.h"
#include "runtime/cpu_isa.h"
#include "runtime/cuda_backend.h"

namespace mxflash {

#if !MXFLASH_CUDA
const Impl<AttentionFwd> kAttentionFwdSm100 = not_built<AttentionFwd>(kSm100);
const Impl<AttentionFwd> kAttentionFwdSm90 = not_built<AttentionFwd>(kSm90);
const Impl<AttentionFwd> kAttentionFwdSm90Bf16 = not_built<AttentionFwd>(kSm90Bf16);
const Impl<AttentionBwd> kAttentionBwdSm100 = not_built<AttentionBwd>(kSm100);
const Impl<AttentionBwd> kAttentionBwdSm90 = not_built<AttentionBwd>(kSm90);
const Impl<AttentionBwd> kAttentionBwdSm90Bf16 = not_built<AttentionBwd>(kSm90Bf16);
#endif

namespace {

const Impl<AttentionFwd>* const kFwdList[] = {&kAttentionFwdSm100, &kAttentionFwdSm90, &kAttentionFwdSm90Bf16,
                                              &kAttentionFwdCpu, &kAttentionFwdRef};
const Impl<AttentionBwd>* const kBwdList[] = {&kAttentionBwdSm100, &kAttentionBwdSm90, &kAttentionBwdSm90Bf16,
                                              &kAttentionBwdCpu, &kAttentionBwdRef};

constexpr int64_t kMaxSeqlen = int64_t(1) << 30;  // positions in a sequence, and sums of two, are int32 in kernels

Status check_head_dim(const char* op, const char* name, int64_t dim) {
  if (dim % 8 != 0) return invalid("%s: %s must be a multiple of 8, got %" PRId64, op, name, dim);
  if (dim < 8 || dim > 256) return invalid("%s: %s must be between 8 and 256, got %" PRId64, op, name, dim);
  return {};
}

// q, k, v, sequences, mask: what both directions share.
template <class Args>
Status check_operands(const char* op, const Args& a) {
  const Device device = a.q.data.device;
  const struct {
    const char* name;
    const MxTensor& tensor;
  } operands[] = {{"q", a.q}, {"k", a.k}, {"v", a.v}};
  for (const auto& o : operands) {
    if (o.tensor.data.rank != 3) {
      return invalid("%s: %s.data.rank must be 3 [tokens, heads, dim], got %d", op, o.name, o.tensor.data.rank);
    }
  }
  MXFLASH_TRY(check_jagged(op, "seq_q", a.seq_q, a.q.data.shape[0], device));
  MXFLASH_TRY(check_jagged(op, "seq_k", a.seq_k, a.k.data.shape[0], device));
  if (a.shared_q) {
    if (a.seq_q.batch != 1) return invalid("%s: seq_q.batch must be 1 with shared_q, got %d", op, a.seq_q.batch);
    if (a.seq_q.cu_seqlens) {
      return invalid("%s: seq_q.cu_seqlens must be null with shared_q (one query sequence), got address %p", op,
                     static_cast<const void*>(a.seq_q.cu_seqlens));
    }
  } else if (a.seq_q.batch != a.seq_k.batch) {
    return invalid("%s: seq_q.batch must equal seq_k.batch = %d, got %d", op, a.seq_k.batch, a.seq_q.batch);
  }
  for (const auto& o : operands) {
    MXFLASH_TRY(check_mx_tensor({op, o.name}, o.tensor, o.name[0] == 'q' ? a.seq_q : a.seq_k));
    MXFLASH_TRY(check_same_device({op, o.name}, o.tensor.data, device));
  }
  MXFLASH_TRY(check_head_dim(op, "head_dim", a.q.data.shape[2]));
  MXFLASH_TRY(check_head_dim(op, "head_dim_v", a.v.data.shape[2]));
  MXFLASH_TRY(check_extent({op, "k"}, "head_dim", a.k.data.shape[2], a.q.data.shape[2], "that of q"));
  MXFLASH_TRY(check_extent({op, "v"}, "tokens", a.v.data.shape[0], a.k.data.shape[0], "that of k"));
  MXFLASH_TRY(check_extent({op, "v"}, "num_heads", a.v.data.shape[1], a.k.data.shape[1], "that of k"));
  const int64_t heads_q = a.q.data.shape[1], heads_kv = a.k.data.shape[1];
  if (heads_q < 1) return invalid("%s: num_heads_q must be >= 1, got %" PRId64, op, heads_q);
  if (heads_kv < 1 || heads_q % heads_kv != 0) {
    return invalid("%s: num_heads_q = %" PRId64 " must be a multiple of num_heads_kv, got %" PRId64, op, heads_q,
                   heads_kv);
  }
  const int64_t dim = std::max(a.q.data.shape[2], a.v.data.shape[2]);
  if (a.shared_q && !is_small_product({a.seq_k.batch, a.q.data.shape[0], heads_q, dim})) {
    return invalid("%s: out must have fewer than 2^56 elements with shared_q, got %d x %" PRId64 " rows", op,
                   a.seq_k.batch, a.q.data.shape[0]);
  }
  const int64_t longest =
      std::max(longest_sequence(a.q.data.shape[0], a.seq_q), longest_sequence(a.k.data.shape[0], a.seq_k));
  if (longest > kMaxSeqlen) return invalid("%s: sequences must be at most 2^30 tokens long, got %" PRId64, op, longest);
  if (!std::isfinite(a.softmax_scale)) {
    return invalid("%s: softmax_scale must be finite (0 means 1/sqrt(head_dim)), got %g", op, double(a.softmax_scale));
  }
  if (a.cpu_math < CpuMath::automatic || a.cpu_math > CpuMath::fast) {
    return invalid("%s: cpu_math must be automatic, exact or fast, got %d", op, int(a.cpu_math));
  }
  return {};
}

// One value per (head, row of out).
Status check_rows(const TensorRule& rule, const Tensor& t, DtypeSet dtype, const AttentionShape& s, Device device) {
  MXFLASH_TRY(check_tensor(rule, t, 2, dtype));
  MXFLASH_TRY(check_extent(rule, "shape[0]", t.shape[0], s.num_heads_q, "num_heads_q"));
  MXFLASH_TRY(check_extent(rule, "shape[1]", t.shape[1], s.total_out, "total_out"));
  return check_same_device(rule, t, device);
}

Status check_shape(const TensorRule& rule, const Tensor& t, int64_t tokens, int64_t heads, int64_t dim, Device device) {
  MXFLASH_TRY(check_extent(rule, "tokens", t.shape[0], tokens, "from the operands"));
  MXFLASH_TRY(check_extent(rule, "num_heads", t.shape[1], heads, "from the operands"));
  MXFLASH_TRY(check_extent(rule, "dim", t.shape[2], dim, "from the operands"));
  return check_same_device(rule, t, device);
}

Status check_float(const TensorRule& rule, const Tensor& t, int64_t tokens, int64_t heads, int64_t dim, Device device) {
  MXFLASH_TRY(check_tensor(rule, t, 3, DtypeSet::floats));
  return check_shape(rule, t, tokens, heads, dim, device);
}

Status check_mx(const TensorRule& rule, const MxTensor& t, const Jagged& seq, const Tensor& like) {
  if (t.data.rank != 3) return invalid("%s: %s.data.rank must be 3, got %d", rule.op, rule.name, t.data.rank);
  MXFLASH_TRY(check_mx_tensor(rule, t, seq));
  return check_shape(rule, t.data, like.shape[0], like.shape[1], like.shape[2], like.device);
}

// One value per sequence, kv head and channel.
Status check_mean(const TensorRule& rule, const Tensor& t, const AttentionShape& s, int64_t dim, Device device) {
  if (!t) return {};
  MXFLASH_TRY(check_tensor(rule, t, 3, DtypeSet::f32));
  MXFLASH_TRY(check_extent(rule, "batch", t.shape[0], s.batch, "seq_k.batch"));
  return check_shape(rule, t, s.batch, s.num_heads_kv, dim, device);
}

}  // namespace

Status check_payloads(const AttentionFwd& a) {
  const struct {
    const char* name;
    const MxTensor& tensor;
  } operands[] = {{"q", a.q}, {"k", a.k}, {"v", a.v}};
  for (const auto& o : operands) {
    if (o.tensor.data.numel() > 0 && (!o.tensor.data || !o.tensor.scale)) {
      return unsupported("attention_fwd: %s must have data and scale (only backend sm90 reads %s_image), got null",
                         o.name, o.name);
    }
  }
  return {};
}

Status check_attention(const char* op, const AttentionFwd& a) {
  AttentionFwd operands = a;
  if (a.q_image) assume_data(operands.q);
  if (a.k_image) assume_data(operands.k);
  if (a.v_image) assume_data(operands.v);
  MXFLASH_TRY(check_operands(op, operands));
  if (a.q_image) MXFLASH_TRY(check_image({op, "q_image"}, a.q_image, ImageRole::query, a.q.data, a.seq_q));
  if (a.k_image) MXFLASH_TRY(check_image({op, "k_image"}, a.k_image, ImageRole::key, a.k.data, a.seq_k));
  if (a.v_image) MXFLASH_TRY(check_image({op, "v_image"}, a.v_image, ImageRole::value, a.v.data, a.seq_k));
  const AttentionShape s = AttentionShape::of(a);
  const Device device = a.q.data.device;
  if (a.out || !a.out_mx) {
    MXFLASH_TRY(check_float({op, "out", true}, a.out, s.total_out, s.num_heads_q, s.head_dim_v, device));
  }
  if (a.out_mx) {
    if (a.out_mx.data.rank != 3) return invalid("%s: out_mx.data.rank must be 3, got %d", op, a.out_mx.data.rank);
    MXFLASH_TRY(check_mx_tensor({op, "out_mx", true}, a.out_mx, s.seq_out()));
    MXFLASH_TRY(check_shape({op, "out_mx"}, a.out_mx.data, s.total_out, s.num_heads_q, s.head_dim_v, device));
  }
  if (a.lse) MXFLASH_TRY(check_rows({op, "lse", true}, a.lse, DtypeSet::f32, s, device));
  if (a.row_exponent) MXFLASH_TRY(check_rows({op, "row_exponent", true}, a.row_exponent, DtypeSet::u8, s, device));
  return check_mean({op, "v_mean"}, a.v_mean, s, s.head_dim_v, device);
}

Status check_attention(const char* op, const AttentionBwd& a) {
  MXFLASH_TRY(check_operands(op, a));
  const AttentionShape s = AttentionShape::of(a);
  const Device device = a.q.data.device;
  const Jagged seq_out = s.seq_out();
  if (a.dout.data.rank != 3) return invalid("%s: dout.data.rank must be 3, got %d", op, a.dout.data.rank);
  MXFLASH_TRY(check_mx_tensor({op, "dout"}, a.dout, seq_out));
  MXFLASH_TRY(check_shape({op, "dout"}, a.dout.data, s.total_out, s.num_heads_q, s.head_dim_v, device));
  if (a.q_col) MXFLASH_TRY(check_mx({op, "q_col"}, a.q_col, a.seq_q, a.q.data));
  if (a.k_col) MXFLASH_TRY(check_mx({op, "k_col"}, a.k_col, a.seq_k, a.k.data));
  if (a.dout_col) MXFLASH_TRY(check_mx({op, "dout_col"}, a.dout_col, seq_out, a.dout.data));
  MXFLASH_TRY(check_float({op, "out"}, a.out, s.total_out, s.num_heads_q, s.head_dim_v, device));
  MXFLASH_TRY(check_rows({op, "lse"}, a.lse, DtypeSet::f32, s, device));
  if (a.row_exponent) MXFLASH_TRY(check_rows({op, "row_exponent"}, a.row_exponent, DtypeSet::u8, s, device));
  if (a.dlse) MXFLASH_TRY(check_rows({op, "dlse"}, a.dlse, DtypeSet::f32, s, device));
  MXFLASH_TRY(check_mean({op, "k_mean"}, a.k_mean, s, s.head_dim, device));
  MXFLASH_TRY(check_mean({op, "v_mean"}, a.v_mean, s, s.head_dim_v, device));
  MXFLASH_TRY(check_float({op, "dq", true}, a.dq, s.total_q, s.num_heads_q, s.head_dim, device));
  if (a.dk || !a.dk_mx) {
    MXFLASH_TRY(check_float({op, "dk", true}, a.dk, s.total_k, s.num_heads_kv, s.head_dim, device));
  }
  if (a.dv || !a.dv_mx) {
    MXFLASH_TRY(check_float({op, "dv", true}, a.dv, s.total_k, s.num_heads_kv, s.head_dim_v, device));
  }
  if (a.dk_mx) MXFLASH_TRY(check_mx({op, "dk_mx", true}, a.dk_mx, a.seq_k, a.k.data));
  if (a.dv_mx) MXFLASH_TRY(check_mx({op, "dv_mx", true}, a.dv_mx, a.seq_k, a.v.data));
  MXFLASH_TRY(check_dtype({op, "ds_dtype"}, a.ds_dtype, DtypeSet::fp8));
  return check_dtype({op, "dq_accum"}, a.dq_accum, DtypeSet::accumulator);
}

namespace {

AttentionFwd with_data(AttentionFwd a) {
  for (MxTensor* t : {&a.q, &a.k, &a.v, &a.out_mx}) assume_data(*t);
  for (Tensor* t : {&a.out, &a.lse, &a.row_exponent, &a.v_mean, &a.q_image, &a.k_image, &a.v_image}) {
    assume_data(*t);
  }
  return a;
}

AttentionBwd with_data(AttentionBwd a) {
  for (MxTensor* t : {&a.q, &a.k, &a.v, &a.dout, &a.q_col, &a.k_col, &a.dout_col, &a.dk_mx, &a.dv_mx}) assume_data(*t);
  for (Tensor* t : {&a.out, &a.lse, &a.row_exponent, &a.k_mean, &a.v_mean, &a.dlse, &a.dq, &a.dk, &a.dv}) {
    assume_data(*t);
  }
  return a;
}

template <class Args>
size_t impl_workspace(const Impl<Args>* impl, const Args& args) {
  return impl && impl->workspace ? impl->workspace(args) : 0;
}

// From shapes alone.
template <class Args>
size_t workspace_of(const char* op, ImplList<Args> list, const Args& given) {
  const Args args = with_data(given);
  if (!check_attention(op, args).ok()) return 0;
  return impl_workspace(choose(op, list, args, args.q.data.device).impl, args);
}

template <class Args>
Status run(const char* op, ImplList<Args> list, const Args& args, Stream stream) {
  MXFLASH_TRY(check_attention(op, args));
  const Choice<Args> choice = choose(op, list, args, args.q.data.device);
  if (!choice.impl) return choice.status;
  const size_t need = impl_workspace(choice.impl, args);
  MXFLASH_TRY(check_workspace(op, "workspace", args.workspace, args.workspace_size, need));
  return choice.impl->run(args, stream);
}

}  // namespace

CpuMath default_cpu_math() {
  const char* forced = std::getenv("MXFLASH_CPU_MATH");
  for (const CpuMath math : {CpuMath::exact, CpuMath::fast}) {
    if (forced && std::strcmp(forced, cpu_math_name(math)) == 0) return math;
  }
  return cpu_isa_in_use() >= CpuIsa::avx2 ? CpuMath::fast : CpuMath::exact;
}

ImplList<AttentionFwd> attention_fwd_list() { return kFwdList; }
ImplList<AttentionBwd> attention_bwd_list() { return kBwdList; }

size_t attention_fwd_workspace(const AttentionFwd& args) {
  return workspace_of<AttentionFwd>("attention_fwd", kFwdList, args);
}
Status attention_fwd(const AttentionFwd& args, Stream stream) {
  return run<AttentionFwd>("attention_fwd", kFwdList, args, stream);
}

size_t attention_bwd_workspace(const AttentionBwd& args) {
  return workspace_of<AttentionBwd>("attention_bwd", kBwdList, args);
}
Status attention_bwd(const AttentionBwd& args, Stream stream) {
  return run<AttentionBwd>("attention_bwd", kBwdList, args, stream);
}

}  // namespace mxflash
