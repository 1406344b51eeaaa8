// The training operator: quantize, attend, and give back results for the caller's own tensors. It only composes
// operations and hands out pieces of `saved` and `workspace`; the arithmetic that is its own is lse's share of k_mean.
#include <mxflash/operator.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>

#include "attention/attention.h"
#include "mx/operand_image.h"
#include "operator/lse_cuda.h"
#include "quantize/quantize.h"
#include "runtime/arena.h"
#include "runtime/check.h"
#include "runtime/cuda_backend.h"
#include "runtime/parallel.h"
#include "runtime/tensor_access.h"

namespace mxflash {
namespace {

bool two_payloads(const Recipe& r) { return r.block != r.block_col; }

int64_t out_rows(const OperatorFwd& a) { return a.shared_q ? a.seq_k.batch * a.q.shape[0] : a.q.shape[0]; }
Jagged out_seq(const OperatorFwd& a) { return a.shared_q ? Jagged{.batch = a.seq_k.batch} : a.seq_q; }

Status check_block(const char* op, const char* name, MxBlock block) {
  if (block >= MxBlock::square32 && block <= MxBlock::col32) return {};
  return invalid("%s: recipe.%s must be square32, row32 or col32, got %d", op, name, int(block));
}

// What the sizes of `saved` and `workspace` follow from.
Status check_operands(const char* op, const OperatorFwd& a) {
  const struct {
    const char* name;
    const Tensor& tensor;
    const char* seq_name;
    const Jagged& seq;
  } operands[] = {{"q", a.q, "seq_q", a.seq_q}, {"k", a.k, "seq_k", a.seq_k}, {"v", a.v, "seq_k", a.seq_k}};
  for (const auto& o : operands) {
    MXFLASH_TRY(check_tensor({.op = op, .name = o.name, .may_broadcast = true}, o.tensor, 3, DtypeSet::floats));
    MXFLASH_TRY(check_same_device({op, o.name}, o.tensor, a.q.device));
    MXFLASH_TRY(check_jagged(op, o.seq_name, o.seq, o.tensor.shape[0], a.q.device));
    MXFLASH_TRY(check_capacity({op, o.name}, o.tensor, o.seq));
  }
  if (a.shared_q && !is_small_product({a.seq_k.batch, a.q.shape[0], a.q.shape[1], a.v.shape[2]})) {
    return invalid("%s: out must have fewer than 2^56 elements with shared_q, got %d x %" PRId64 " rows", op,
                   a.seq_k.batch, a.q.shape[0]);
  }
  MXFLASH_TRY(check_dtype({op, "recipe.element"}, a.recipe.element, DtypeSet::fp8));
  MXFLASH_TRY(check_dtype({op, "recipe.grad_element"}, a.recipe.grad_element, DtypeSet::fp8));
  MXFLASH_TRY(check_rule(op, a.recipe.rule));
  MXFLASH_TRY(check_block(op, "block", a.recipe.block));
  MXFLASH_TRY(check_block(op, "block_col", a.recipe.block_col));
  return {};
}

MxTensor take_mx(Arena& arena, Dtype element, MxBlock block, const Tensor& like, const Jagged& seq) {
  const int64_t tokens = like.shape[0], heads = like.shape[1], dim = like.shape[2];
  const auto layout = ScaleLayout::linear;
  void* data = arena.take<uint8_t>(tokens * heads * dim);
  void* scale = arena.take<uint8_t>(scale_size(block, layout, tokens, heads, dim, seq));
  MxTensor t = make_mx_tensor(data, scale, element, block, layout, tokens, heads, dim, seq);
  t.data.device = t.scale.device = like.device;
  return t;
}

Tensor take_tensor(Arena& arena, Dtype dtype, Device device, auto... extent) {
  Tensor t = make_tensor(nullptr, dtype, extent...);
  t.data = arena.take<uint8_t>(t.numel() * dtype_size(dtype));
  t.device = device;
  return t;
}

// What stays between forward and backward.
struct Saved {
  MxTensor q, k, v;       // contracted over channels
  MxTensor q_col, k_col;  // contracted over tokens, if the recipe has two payloads
  Tensor lse;             // of the operands as quantized: of q and k - k_mean
  Tensor row_exponent;
  Tensor k_mean, v_mean;

  Saved(Arena& arena, const OperatorFwd& a) {
    const Recipe& r = a.recipe;
    const Device device = a.q.device;
    q = take_mx(arena, r.element, r.block, a.q, a.seq_q);
    k = take_mx(arena, r.element, r.block, a.k, a.seq_k);
    v = take_mx(arena, r.element, r.block, a.v, a.seq_k);
    if (two_payloads(r)) {
      q_col = take_mx(arena, r.element, r.block_col, a.q, a.seq_q);
      k_col = take_mx(arena, r.element, r.block_col, a.k, a.seq_k);
    }
    lse = take_tensor(arena, Dtype::f32, device, a.q.shape[1], out_rows(a));
    row_exponent = take_tensor(arena, Dtype::u8, device, a.q.shape[1], out_rows(a));
    if (r.smooth_k) k_mean = take_tensor(arena, Dtype::f32, device, a.seq_k.batch, a.k.shape[1], a.k.shape[2]);
    if (r.smooth_v) v_mean = take_tensor(arena, Dtype::f32, device, a.seq_k.batch, a.v.shape[1], a.v.shape[2]);
  }
};

AttentionFwd attention_args(const OperatorFwd& a, const Saved& saved, const MxTensor& v) {
  return {.q = saved.q,
          .k = saved.k,
          .v = v,
          .out = a.out,
          .lse = saved.lse,
          .row_exponent = saved.row_exponent,
          .v_mean = saved.v_mean,
          .seq_q = a.seq_q,
          .seq_k = a.seq_k,
          .mask = a.mask,
          .softmax_scale = a.softmax_scale,
          .shared_q = a.shared_q,
          .cpu_math = a.cpu_math,
          .backend = a.backend};
}

struct BwdOperands {
  MxTensor dout, dout_col;
  BwdOperands(Arena& arena, const OperatorBwd& a) {
    const Recipe& r = a.fwd.recipe;
    dout = take_mx(arena, r.grad_element, r.block, a.dout, out_seq(a.fwd));
    if (two_payloads(r)) dout_col = take_mx(arena, r.grad_element, r.block_col, a.dout, out_seq(a.fwd));
  }
};

AttentionBwd attention_args(const OperatorBwd& a, const Saved& saved, const BwdOperands& dout) {
  const OperatorFwd& f = a.fwd;
  return {.q = saved.q,
          .k = saved.k,
          .v = saved.v,
          .dout = dout.dout,
          .q_col = saved.q_col,
          .k_col = saved.k_col,
          .dout_col = dout.dout_col,
          .out = f.out,
          .lse = saved.lse,
          .row_exponent = saved.row_exponent,
          .v_mean = saved.v_mean,
          .k_mean = saved.k_mean,
          .dlse = a.dlse,
          .dq = a.dq,
          .dk = a.dk,
          .dv = a.dv,
          .dk_mx = a.dk_mx,
          .dv_mx = a.dv_mx,
          .dq_accum = a.dq_accum == Dtype::none ? Dtype::f32 : a.dq_accum,
          .deterministic = a.deterministic,
          .rotate_qk = f.recipe.rotate_qk,
          .rotate_seed = f.recipe.rotate_seed,
          .seq_q = f.seq_q,
          .seq_k = f.seq_k,
          .mask = f.mask,
          .softmax_scale = f.softmax_scale,
          .shared_q = f.shared_q,
          .cpu_math = f.cpu_math,
          .backend = f.backend};
}

// lse of the caller's k: removing k_mean lowered every score of row i by softmax_scale * q_i . k_mean.
Status write_lse(const OperatorFwd& a, const Saved& saved, [[maybe_unused]] Stream stream) {
  const AttentionShape shape = AttentionShape::of(attention_args(a, saved, saved.v));
#if MXFLASH_CUDA
  if (a.q.device.type == DeviceType::cuda) {
    return write_lse_cuda({.q = a.q, .saved = saved.lse, .k_mean = saved.k_mean, .out = a.lse, .shape = shape}, stream);
  }
#endif
  const auto lse_at = [](const Tensor& lse, int64_t head, int64_t row) { return head * lse.stride[0] + row; };
  parallel_for(shape.num_heads_q, num_threads(), [&](int64_t head, int32_t) {
    for (int64_t row = 0; row < shape.total_out; ++row) {
      store_float(a.lse, lse_at(a.lse, head, row), load_float(saved.lse, lse_at(saved.lse, head, row)));
    }
    for (int64_t b = 0; a.recipe.smooth_k && b < shape.batch; ++b) {
      const Sequence sq = shape.query_sequence(b), so = shape.out_sequence(b);
      const float* mean =
          static_cast<const float*>(saved.k_mean.data) + (b * shape.num_heads_kv + head / shape.group) * shape.head_dim;
      for (int64_t i = 0; i < sq.length; ++i) {
        const int64_t at = lse_at(a.lse, head, so.start + i);
        const float lse = load_float(a.lse, at);
        if (lse == -HUGE_VALF) continue;  // no visible key
        double shift = 0;
        for (int64_t c = 0; c < shape.head_dim; ++c) {
          shift += double(load_float(a.q, row_offset(a.q, sq.start + i, head) + c * a.q.stride[2])) * double(mean[c]);
        }
        store_float(a.lse, at, float(double(lse) + shape.softmax_scale * shift));
      }
    }
  });
  return {};
}

// Whether attention will be that of Hopper's FP8 tensor cores: on a card of a process that has one, and not what only
// the exact kernel can do or is asked for.
bool reads_images(const OperatorFwd& a) {
  const char* forced = forced_backend(a.backend);
  return a.q.device.type == DeviceType::cuda && kAttentionFwdSm90.available().ok() &&
         std::max(a.q.shape[2], a.v.shape[2]) <= kMaxImageDim && a.softmax_scale >= 0 &&
         !(forced && same_name(forced, kSm90Bf16.name));
}

struct FwdWorkspace {
  MxTensor v_col;
  Tensor q_image, k_image, v_image;  // for kernels that read images: written from the same read as `saved`
  size_t used;
  explicit FwdWorkspace(void* base, const OperatorFwd& a) {
    Arena arena(base);
    if (two_payloads(a.recipe)) v_col = take_mx(arena, a.recipe.element, a.recipe.block_col, a.v, a.seq_k);
    if (reads_images(a)) {
      const auto image = [&](ImageRole role, const Tensor& t, const Jagged& seq) {
        return take_tensor(arena, Dtype::u8, t.device, image_size(role, t.shape[0], t.shape[1], t.shape[2], seq));
      };
      q_image = image(ImageRole::query, a.q, a.seq_q);
      k_image = image(ImageRole::key, a.k, a.seq_k);
      v_image = image(ImageRole::value, a.v, a.seq_k);
    }
    used = arena.used();
  }
};

AttentionFwd attention_args(const OperatorFwd& a, const Saved& saved, const FwdWorkspace& workspace) {
  AttentionFwd attention = attention_args(a, saved, two_payloads(a.recipe) ? workspace.v_col : saved.v);
  attention.q_image = workspace.q_image;
  attention.k_image = workspace.k_image;
  attention.v_image = workspace.v_image;
  return attention;
}

// For size queries, and for the backward, which wants the shapes of q, k and v only: their memory may be gone.
OperatorFwd with_data(OperatorFwd a) {
  for (Tensor* t : {&a.q, &a.k, &a.v, &a.out, &a.lse}) assume_data(*t);
  return a;
}

OperatorBwd with_data(OperatorBwd a) {
  a.fwd = with_data(a.fwd);
  for (Tensor* t : {&a.dout, &a.dlse, &a.dq, &a.dk, &a.dv}) assume_data(*t);
  for (MxTensor* t : {&a.dk_mx, &a.dv_mx}) assume_data(*t);
  return a;
}

// The attention call that the operator will make, for its checks and its workspace.
AttentionFwd planned_attention(const OperatorFwd& a) {
  Arena saved_arena(somewhere());
  const Saved saved(saved_arena, a);
  return attention_args(a, saved, FwdWorkspace(somewhere(), a));
}

AttentionBwd planned_attention(const OperatorBwd& a) {
  Arena saved_arena(somewhere()), arena(somewhere());
  return attention_args(a, Saved(saved_arena, a.fwd), BwdOperands(arena, a));
}

// Keys whose sums of dq are as good in FP16 as in fp32, beside what dS in E4M3 loses (docs/hopper.md). With a mean of
// keys that was not taken off, partial sums may rise far above the result, and do so most if they are added in order.
int64_t most_half_keys(const OperatorBwd& a) {
  return int64_t(1) << (a.fwd.recipe.smooth_k ? 17 : a.deterministic ? 12 : 14);
}

// What dq_accum means for this call, which has passed all checks.
Dtype dq_accum_of(const OperatorBwd& a, const AttentionBwd& attention) {
  if (a.dq_accum != Dtype::none) return a.dq_accum;
  const int64_t keys = AttentionShape::of(attention).max_seqlen_k;
  const auto choice = choose("operator_bwd", attention_bwd_list(), attention, a.fwd.q.device);
  return choice.impl == &kAttentionBwdSm90 && keys <= most_half_keys(a) ? Dtype::f16 : Dtype::f32;
}

// All rules but those of `saved` and `workspace`, and attention's too: quantize must not write what it then refuses.
Status check(const char* op, const OperatorFwd& a) {
  MXFLASH_TRY(check_operands(op, a));
  if (a.lse) {
    const TensorRule rule{op, "lse", true};
    MXFLASH_TRY(check_tensor(rule, a.lse, 2, DtypeSet::f32));
    MXFLASH_TRY(check_extent(rule, "shape[0]", a.lse.shape[0], a.q.shape[1], "num_heads_q"));
    MXFLASH_TRY(check_extent(rule, "shape[1]", a.lse.shape[1], out_rows(a), "total_out"));
    MXFLASH_TRY(check_same_device(rule, a.lse, a.q.device));
  }
  const AttentionFwd attention = planned_attention(a);
  MXFLASH_TRY(check_attention(op, attention));
  return choose(op, attention_fwd_list(), attention, a.q.device).status;
}

Status check(const char* op, const OperatorBwd& a) {
  MXFLASH_TRY(check_operands(op, with_data(a.fwd)));
  const TensorRule rule{.op = op, .name = "dout", .may_broadcast = true};
  MXFLASH_TRY(check_tensor(rule, a.dout, 3, DtypeSet::floats));
  MXFLASH_TRY(check_extent(rule, "tokens", a.dout.shape[0], out_rows(a.fwd), "total_out"));
  MXFLASH_TRY(check_capacity(rule, a.dout, out_seq(a.fwd)));
  const AttentionBwd attention = planned_attention(a);
  MXFLASH_TRY(check_attention(op, attention));
  return choose(op, attention_bwd_list(), attention, a.fwd.q.device).status;
}

Status run_fwd(const OperatorFwd& a, const Saved& saved, Stream stream) {
  const Recipe& r = a.recipe;
  const FwdWorkspace workspace(a.workspace, a);
  OperatorStats* stats = a.stats;
  const MxTensor& v_forward = two_payloads(r) ? workspace.v_col : saved.v;
  const Quantize operands[] = {{.in = a.q,
                                .out = saved.q,
                                .out_col = saved.q_col,
                                .seq = a.seq_q,
                                .rule = r.rule,
                                .rotate = r.rotate_qk,
                                .rotate_seed = r.rotate_seed,
                                .image = workspace.q_image,
                                .image_role = ImageRole::query,
                                .stats = stats ? &stats->q : nullptr,
                                .backend = a.backend},
                               {.in = a.k,
                                .out = saved.k,
                                .out_col = saved.k_col,
                                .seq = a.seq_k,
                                .rule = r.rule,
                                .smooth = r.smooth_k,
                                .mean = saved.k_mean,
                                .rotate = r.rotate_qk,
                                .rotate_seed = r.rotate_seed,
                                .image = workspace.k_image,
                                .image_role = ImageRole::key,
                                .stats = stats ? &stats->k : nullptr,
                                .backend = a.backend},
                               {.in = a.v,
                                .out = v_forward,  // what attention multiplies, and the image of
                                .out_col = two_payloads(r) ? saved.v : MxTensor{},
                                .seq = a.seq_k,
                                .rule = r.rule,
                                .smooth = r.smooth_v,
                                .mean = saved.v_mean,
                                .image = workspace.v_image,
                                .image_role = ImageRole::value,
                                .stats = stats ? &stats->v : nullptr,
                                .backend = a.backend}};
  MXFLASH_TRY(quantize_all(operands, stream));
  AttentionFwd attention = attention_args(a, saved, workspace);
  attention.workspace = static_cast<std::byte*>(a.workspace) + workspace.used;
  attention.workspace_size = a.workspace_size - workspace.used;
  return attention_fwd(attention, stream);
}

}  // namespace

size_t operator_saved(const OperatorFwd& args) {
  if (!check_operands("operator_fwd", with_data(args)).ok()) return 0;
  Arena arena(nullptr);
  Saved{arena, args};
  return arena.used();
}

size_t operator_fwd_workspace(const OperatorFwd& args) {
  if (!check("operator_fwd", with_data(args)).ok()) return 0;
  return FwdWorkspace(nullptr, args).used + attention_fwd_workspace(planned_attention(args));
}

Status operator_fwd(const OperatorFwd& args, Stream stream) {
  constexpr const char* op = "operator_fwd";
  MXFLASH_TRY(check(op, args));
  MXFLASH_TRY(check_workspace(op, "saved", args.saved, args.saved_size, operator_saved(args)));
  MXFLASH_TRY(check_workspace(op, "workspace", args.workspace, args.workspace_size, operator_fwd_workspace(args)));
  Arena arena(args.saved);
  const Saved saved(arena, args);
  MXFLASH_TRY(run_fwd(args, saved, stream));
  return args.lse ? write_lse(args, saved, stream) : Status{};
}

size_t operator_bwd_workspace(const OperatorBwd& args) {
  if (!check("operator_bwd", with_data(args)).ok()) return 0;
  Arena arena(nullptr);
  BwdOperands{arena, args};
  AttentionBwd attention = planned_attention(args);
  attention.dq_accum = dq_accum_of(args, attention);
  return arena.used() + attention_bwd_workspace(attention);
}

Status operator_bwd(const OperatorBwd& args, Stream stream) {
  constexpr const char* op = "operator_bwd";
  MXFLASH_TRY(check(op, args));
  const OperatorFwd& fwd = args.fwd;
  MXFLASH_TRY(check_workspace(op, "fwd.saved", fwd.saved, fwd.saved_size, operator_saved(fwd)));
  MXFLASH_TRY(check_workspace(op, "workspace", args.workspace, args.workspace_size, operator_bwd_workspace(args)));
  Arena saved_arena(fwd.saved), arena(args.workspace);
  const Saved saved(saved_arena, fwd);
  const BwdOperands dout(arena, args);
  const Recipe& r = fwd.recipe;
  MXFLASH_TRY(quantize({.in = args.dout,
                        .out = dout.dout,
                        .out_col = dout.dout_col,
                        .seq = out_seq(fwd),
                        .rule = r.rule,
                        .stats = fwd.stats ? &fwd.stats->dout : nullptr,
                        .backend = fwd.backend},
                       stream));
  AttentionBwd attention = attention_args(args, saved, dout);
  attention.dq_accum = dq_accum_of(args, attention);
  attention.workspace = static_cast<std::byte*>(args.workspace) + arena.used();
  attention.workspace_size = args.workspace_size - arena.used();
  return attention_bwd(attention, stream);
}

}  // namespace mxflash
