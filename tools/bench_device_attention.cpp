#include <mxflash/attention.h>
#include <mxflash/operator.h>
#include <mxflash/quantize.h>

#include <memory>
#include <utility>

#include "kit/runner.h"
#include "tools/bench_device.h"
#include "tools/bench_rows.h"

namespace mxflash::tools {
namespace {

using kit::require_ok;

struct Sizes {
  Jagged seq_q, seq_k, seq_out;
  int64_t total_q, total_k, total_out;
  Sizes(const BenchShape& s, Memory& memory) {
    const std::vector<int32_t> lens_of_q = lens_q(s), lens_of_k = lens_k(s);
    seq_q = s.shared_q ? Jagged{} : memory.jagged(lens_of_q, s.jagged);
    seq_k = memory.jagged(lens_of_k, s.jagged);
    seq_out = s.shared_q ? Jagged{.batch = int32_t(s.batch)} : seq_q;
    total_q = kit::sum_of(lens_of_q);
    total_k = kit::sum_of(lens_of_k);
    total_out = s.shared_q ? s.batch * total_q : total_q;
  }
};

// Results at full size can be checked: exact attention there knows no windows.
bool is_checked(const BenchShape& s) { return s.mask.window_left < 0 && s.mask.window_right < 0; }

// Without images the kernel is not timed alone: it takes MXFP8 operands.
bool holds_mx(const std::string& backend, const std::vector<std::string>& modes) {
  return !kit::reads_images(backend) || std::ranges::count(modes, std::string("from_mxfp8")) > 0;
}

double bytes_of_all(std::initializer_list<Tensor> tensors) {
  double sum = 0;
  for (const Tensor& t : tensors) sum += bytes_of(t);
  return sum;
}

// A forward of these operands, with memory for what it leaves.
AttentionFwd forward_of(const BenchShape& s, const Sizes& n, const MxTensor& q, const MxTensor& k, const MxTensor& v,
                        const std::string& backend, Memory& memory) {
  return {.q = q,
          .k = k,
          .v = v,
          .out = memory.tensor(Dtype::bf16, n.total_out, s.num_heads_q, s.head_dim_v),
          .lse = memory.tensor(Dtype::f32, s.num_heads_q, n.total_out),
          .row_exponent = memory.tensor(Dtype::u8, s.num_heads_q, n.total_out),
          .seq_q = n.seq_q,
          .seq_k = n.seq_k,
          .mask = s.mask,
          .shared_q = s.shared_q,
          .backend = backend.c_str()};
}

// How dq is added up; in one order, the deterministic ones, only where the backward is timed alone.
struct SumOfDq {
  const char* mode;
  Dtype dtype;
  bool deterministic = false;
};
constexpr SumOfDq kSumsOfDq[] = {{"dq_f32", Dtype::f32},
                                 {"dq_f16", Dtype::f16},
                                 {"deterministic", Dtype::f16, true},
                                 {"deterministic_f32", Dtype::f32, true}};

}  // namespace

std::vector<DeviceWork> prepare_forward(const BenchShape& s, const std::string& backend,
                                        const std::vector<std::string>& modes, Memory& memory) {
  const Sizes n(s, memory);
  const auto name = std::make_shared<std::string>(backend);
  const Stream stream = memory.stream();

  struct Operand {
    Tensor bf16;
    MxTensor mx;  // with memory where MXFP8 operands are wanted
    Tensor image;
    Jagged seq;
    ImageRole role;
  };
  const bool with_images = kit::reads_images(backend), with_mx = holds_mx(backend, modes);
  const auto operand = [&](Source source, ImageRole role, int64_t tokens, int64_t heads, int64_t dim, Jagged seq) {
    return Operand{.bf16 = memory.random_bf16(source, tokens, heads, dim),
                   .mx = memory.mx(tokens, heads, dim, seq, with_mx),
                   .image = with_images ? memory.image(role, tokens, heads, dim, seq) : Tensor{},
                   .seq = seq,
                   .role = role};
  };
  const Operand q = operand(Source::q, ImageRole::query, n.total_q, s.num_heads_q, s.head_dim, n.seq_q);
  const Operand k = operand(Source::k, ImageRole::key, n.total_k, s.num_heads_kv, s.head_dim, n.seq_k);
  const Operand v = operand(Source::v, ImageRole::value, n.total_k, s.num_heads_kv, s.head_dim_v, n.seq_k);
  const auto quantize_to = [stream](const Operand& o, MxTensor out, bool image) {
    if (image) out.data.data = out.scale.data = nullptr;
    require_ok(quantize({.in = o.bf16,
                         .out = out,
                         .seq = o.seq,
                         .image = image ? o.image : Tensor{},
                         .image_role = o.role,
                         .backend = "sm90"},
                        stream));
  };
  const AttentionFwd fwd = forward_of(s, n, q.mx, k.mx, v.mx, *name, memory);
  const double results = bytes_of_all({fwd.out, fwd.lse, fwd.row_exponent});

  std::vector<DeviceWork> works;
  for (const std::string& mode : modes) {
    if (mode == "kernel" && !with_images) continue;
    AttentionFwd call = fwd;
    double bytes = results;
    if (mode == "from_mxfp8" || !with_images) {
      for (const Operand* o : {&q, &k, &v}) {
        quantize_to(*o, o->mx, false);
        bytes += mode == "from_mxfp8" ? bytes_of(o->mx) : bytes_of(o->bf16);
      }
    } else {
      for (MxTensor* t : {&call.q, &call.k, &call.v}) t->data.data = t->scale.data = nullptr;
      call.q_image = q.image;
      call.k_image = k.image;
      call.v_image = v.image;
      for (const Operand* o : {&q, &k, &v}) {
        quantize_to(*o, o->mx, true);
        bytes += bytes_of(mode == "kernel" ? o->image : o->bf16);
      }
    }
    call.workspace_size = attention_fwd_workspace(call);
    call.workspace = memory.buffer(call.workspace_size).data();
    const bool quantizes = mode == "from_bf16";
    works.push_back({.mode = mode,
                     .enqueue =
                         [=, keeps_name = name] {  // to which call.backend points
                           for (const Operand* o : {&q, &k, &v}) {
                             if (quantizes) quantize_to(*o, o->mx, with_images);
                           }
                           require_ok(attention_fwd(call, stream));
                         },
                     .flops = attention_flops(s, BenchOp::attention_fwd),
                     .bytes = bytes,
                     .workspace_bytes = double(call.workspace_size)});
    if (!is_checked(s)) continue;
    works.back().check = [=, &memory] { return out_error(s, {memory.of(call.out), stream}); };
  }
  return works;
}

// From MXFP8 operands and a forward's results, with all passes, for each way to add dQ up.
std::vector<DeviceWork> prepare_backward(const BenchShape& s, const std::string& backend, Memory& memory) {
  const Sizes n(s, memory);
  const auto name = std::make_shared<std::string>(backend);
  const Stream stream = memory.stream();
  const auto operand = [&](Source source, int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq) {
    const MxTensor mx = memory.mx(tokens, heads, dim, seq, true);
    require_ok(quantize(
        {.in = memory.random_bf16(source, tokens, heads, dim), .out = mx, .seq = seq, .backend = name->c_str()},
        stream));
    return mx;
  };
  const MxTensor q = operand(Source::q, n.total_q, s.num_heads_q, s.head_dim, n.seq_q);
  const MxTensor k = operand(Source::k, n.total_k, s.num_heads_kv, s.head_dim, n.seq_k);
  const MxTensor v = operand(Source::v, n.total_k, s.num_heads_kv, s.head_dim_v, n.seq_k);
  AttentionFwd fwd = forward_of(s, n, q, k, v, *name, memory);
  fwd.workspace_size = attention_fwd_workspace(fwd);
  fwd.workspace = memory.buffer(fwd.workspace_size).data();
  require_ok(attention_fwd(fwd, stream));
  AttentionBwd bwd{.q = fwd.q,
                   .k = fwd.k,
                   .v = fwd.v,
                   .dout = operand(Source::dout, n.total_out, s.num_heads_q, s.head_dim_v, n.seq_out),
                   .out = fwd.out,
                   .lse = fwd.lse,
                   .row_exponent = fwd.row_exponent,
                   .dq = memory.tensor(Dtype::bf16, n.total_q, s.num_heads_q, s.head_dim),
                   .dk = memory.tensor(Dtype::bf16, n.total_k, s.num_heads_kv, s.head_dim),
                   .dv = memory.tensor(Dtype::bf16, n.total_k, s.num_heads_kv, s.head_dim_v),
                   .seq_q = n.seq_q,
                   .seq_k = n.seq_k,
                   .mask = s.mask,
                   .shared_q = s.shared_q,
                   .backend = name->c_str()};
  bwd.workspace_size = attention_bwd_workspace(bwd);  // that of fp32 sums, the larger one
  bwd.workspace = memory.buffer(bwd.workspace_size).data();
  double saved = bytes_of_all({bwd.out, bwd.lse, bwd.row_exponent});
  for (const MxTensor* t : {&bwd.q, &bwd.k, &bwd.v}) saved += bytes_of(*t);
  std::vector<DeviceWork> works;
  for (const SumOfDq& sum : kSumsOfDq) {
    bwd.dq_accum = sum.dtype;
    bwd.deterministic = sum.deterministic;
    // The exact kernels have one way.
    if (!kit::reads_images(backend) && &sum != kSumsOfDq) continue;
    works.push_back({.mode = sum.mode,
                     .enqueue = [bwd, name, stream] { require_ok(attention_bwd(bwd, stream)); },
                     .flops = attention_flops(s, BenchOp::attention_bwd),
                     .bytes = saved + bytes_of(bwd.dout) + bytes_of_all({bwd.dq, bwd.dk, bwd.dv}),
                     .workspace_bytes = double(attention_bwd_workspace(bwd)),
                     .saved_bytes = saved});
    if (!is_checked(s)) continue;
    works.back().check = [=, &memory] {
      return gradient_error(
          s, {memory.of(bwd.out), memory.of(bwd.dq), memory.of(bwd.dk), memory.of(bwd.dv), memory.of(bwd.lse), stream});
    };
  }
  return works;
}

// BF16 in and out: operator_fwd and operator_bwd, by the default recipe and by one that neither rotates nor smooths.
std::vector<DeviceWork> prepare_step(const BenchShape& s, const std::string& backend, Memory& memory) {
  const Sizes n(s, memory);
  const auto name = std::make_shared<std::string>(backend);
  const Stream stream = memory.stream();
  OperatorFwd fwd{.q = memory.random_bf16(Source::q, n.total_q, s.num_heads_q, s.head_dim),
                  .k = memory.random_bf16(Source::k, n.total_k, s.num_heads_kv, s.head_dim),
                  .v = memory.random_bf16(Source::v, n.total_k, s.num_heads_kv, s.head_dim_v),
                  .out = memory.tensor(Dtype::bf16, n.total_out, s.num_heads_q, s.head_dim_v),
                  .seq_q = n.seq_q,
                  .seq_k = n.seq_k,
                  .mask = s.mask,
                  .shared_q = s.shared_q,
                  .backend = name->c_str()};
  const Tensor lse = memory.tensor(Dtype::f32, s.num_heads_q, n.total_out);
  OperatorBwd bwd{.fwd = fwd,
                  .dout = memory.random_bf16(Source::dout, n.total_out, s.num_heads_q, s.head_dim_v),
                  .dq = memory.tensor(Dtype::bf16, n.total_q, s.num_heads_q, s.head_dim),
                  .dk = memory.tensor(Dtype::bf16, n.total_k, s.num_heads_kv, s.head_dim),
                  .dv = memory.tensor(Dtype::bf16, n.total_k, s.num_heads_kv, s.head_dim_v)};
  // Sizes of the default recipe and of fp32 sums, the larger ones.
  fwd.saved_size = operator_saved(fwd);
  fwd.saved = memory.buffer(fwd.saved_size).data();
  bwd.fwd = fwd;
  fwd.workspace_size = bwd.workspace_size = std::max(operator_fwd_workspace(fwd), operator_bwd_workspace(bwd));
  fwd.workspace = bwd.workspace = memory.buffer(fwd.workspace_size).data();
  std::vector<DeviceWork> works;
  for (const bool plain : {false, true}) {
    if (plain) fwd.recipe.rotate_qk = fwd.recipe.smooth_k = fwd.recipe.smooth_v = false;
    bwd.fwd = fwd;
    const double saved = double(operator_saved(fwd)) + bytes_of(fwd.out);
    for (const SumOfDq& sum : kSumsOfDq) {
      bwd.dq_accum = sum.dtype;
      if (sum.deterministic || (!kit::reads_images(backend) && &sum != kSumsOfDq)) continue;
      works.push_back({.mode = (plain ? "plain_" : "") + std::string(sum.mode),
                       .enqueue =
                           [fwd, bwd, name, stream] {
                             require_ok(operator_fwd(fwd, stream));
                             require_ok(operator_bwd(bwd, stream));
                           },
                       .flops = attention_flops(s, BenchOp::training_step),
                       .bytes = bytes_of_all({fwd.q, fwd.k, fwd.v, bwd.dout, bwd.dq, bwd.dk, bwd.dv}) + 2 * saved,
                       .workspace_bytes = double(std::max(operator_fwd_workspace(fwd), operator_bwd_workspace(bwd))),
                       .saved_bytes = saved});
      if (!is_checked(s)) continue;
      works.back().check = [=, &memory] {
        OperatorFwd with_lse = fwd;
        with_lse.lse = lse;
        require_ok(operator_fwd(with_lse, stream));
        return gradient_error(
            s, {memory.of(fwd.out), memory.of(bwd.dq), memory.of(bwd.dk), memory.of(bwd.dv), memory.of(lse), stream});
      };
    }
  }
  return works;
}

double bytes_needed(BenchOp op, const BenchShape& s, const std::string& backend,
                    const std::vector<std::string>& modes) {
  const double q = double(total_tokens_q(s)), k = double(kit::sum_of(lens_k(s)));
  const double hidden = double(s.hidden()), padded = 1.1;  // images and scales
  if (op == BenchOp::rmsnorm_bwd) return q * hidden * (8 + 2 * padded);
  if (!is_attention(op)) return q * hidden * (2 + 3 * padded);
  const double out = s.shared_q ? q * double(s.batch) : q;
  const double operands = q * hidden + k * double(s.num_heads_kv * (s.head_dim + s.head_dim_v));
  if (op == BenchOp::attention_fwd) {  // with MXFP8 also images in the workspace
    return operands * (2 + padded * (holds_mx(backend, modes) ? 3 : 1)) +
           out * double(s.num_heads_q * (2 * s.head_dim_v + 5));
  }
  // BF16, MXFP8, gradients; records and sums of rows and of keys.
  const double rows = out * double(s.num_heads_q), keys = k * double(s.num_heads_kv), dim = double(s.head_dim);
  return 5 * (operands + rows * double(s.head_dim_v)) + padded * (rows * (8 * dim + 32) + keys * 3 * dim);
}

}  // namespace mxflash::tools
