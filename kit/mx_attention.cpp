#include "kit/mx_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kit/call.h"
#include "mx/operand_image.h"
#include "mx/scale_layout.h"

namespace mxflash::kit {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr uint8_t kPoisonPayload = 0x7F, kPoisonScale = 0xFF;
constexpr int64_t kSlackQ = 3, kSlackK = 37;  // tokens after the last sequence of a poisoned call

int64_t tokens_of(const OwnedMx& t) { return t.view.data.shape[0]; }
int64_t heads_of(const OwnedMx& t) { return t.view.data.shape[1]; }
int64_t dim_of(const OwnedMx& t) { return t.view.data.shape[2]; }

Jagged jagged(const std::vector<int32_t>& cu, int32_t batch) {
  if (cu.empty()) return {.batch = batch};
  int32_t longest = 0;
  for (size_t b = 1; b < cu.size(); ++b) longest = std::max(longest, cu[b] - cu[b - 1]);
  return {.cu_seqlens = cu.data(), .batch = batch, .max_seqlen = longest};
}

// Everything but the operands.
MxAttention same_call(const MxAttention& a) {
  MxAttention b;
  b.dlse = a.dlse;
  b.cu_seqlens_q = a.cu_seqlens_q;
  b.cu_seqlens_k = a.cu_seqlens_k;
  b.batch = a.batch;
  b.mask = a.mask;
  b.softmax_scale = a.softmax_scale;
  b.shared_q = a.shared_q;
  b.ds_dtype = a.ds_dtype;
  b.dq_accum = a.dq_accum;
  b.deterministic = a.deterministic;
  b.cpu_math = a.cpu_math;
  b.poisoned = a.poisoned;
  return b;
}

// {0, len, 2 len, ...} for what had no cu_seqlens.
std::vector<int32_t> explicit_cu_seqlens(const Jagged& seq, int64_t tokens) {
  std::vector<int32_t> cu{0};
  for (int64_t b = 0; b < seq.batch; ++b) cu.push_back(int32_t(cu.back() + sequence_at(tokens, seq, b).length));
  return cu;
}

int64_t tokens_in_sequences(const Jagged& seq, int64_t tokens) {
  const Sequence last = sequence_at(tokens, seq, seq.batch - 1);
  return last.start + last.length;
}

// The sequences of `from` in a tensor of `tokens` tokens; poison everywhere else.
OwnedMx poisoned_copy(const OwnedMx& from, const Jagged& from_seq, int64_t tokens, const Jagged& seq) {
  const MxTensor& src = from.view;
  const int64_t heads = heads_of(from), dim = dim_of(from);
  OwnedMx to = make_owned_mx(src.data.dtype, src.block, src.layout, tokens, heads, dim, seq);
  std::fill(to.data.begin(), to.data.end(), kPoisonPayload);
  std::fill(to.scale.begin(), to.scale.end(), kPoisonScale);
  const BlockShape block = block_shape(src.block);
  const int64_t src_padded = padded_token_count(tokens_of(from), from_seq), padded = padded_token_count(tokens, seq);
  for (int64_t b = 0; b < seq.batch; ++b) {
    const Sequence s = sequence_at(tokens_of(from), from_seq, b), d = sequence_at(tokens, seq, b);
    std::copy_n(from.data.begin() + s.start * heads * dim, s.length * heads * dim,
                to.data.begin() + d.start * heads * dim);
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t row = 0; row < ceil_div(s.length, block.rows); ++row) {
        for (int64_t col = 0; col < ceil_div(dim, block.cols); ++col) {
          const ScaleIndex at_src{head, s.padded_start / block.rows + row, col};
          const ScaleIndex at_dst{head, d.padded_start / block.rows + row, col};
          to.scale[size_t(scale_offset(src.block, src.layout, padded, dim, at_dst))] =
              from.scale[size_t(scale_offset(src.block, src.layout, src_padded, dim, at_src))];
        }
      }
    }
  }
  return to;
}

// [rows][old_width] -> [rows][new_width], filled up with `fill`.
template <class T>
std::vector<T> widened(const std::vector<T>& x, int64_t rows, int64_t old_width, int64_t new_width, T fill) {
  std::vector<T> y(size_t(rows * new_width), fill);
  for (int64_t r = 0; r < rows; ++r) std::copy_n(x.begin() + r * old_width, old_width, y.begin() + r * new_width);
  return y;
}

// Overwrites what lies behind the sequences, in an input of the backward that the forward wrote.
template <class T>
void poison_slack(const MxAttention& a, int64_t outer, int64_t inner, T poison, std::vector<T>& x) {
  if (!a.poisoned) return;
  for (int64_t o = 0; o < outer; ++o) {
    const auto begin = x.begin() + o * a.total_out() * inner;
    std::fill(begin + a.rows_in_sequences() * inner, begin + a.total_out() * inner, poison);
  }
}

void* mutable_data(const std::vector<float>& x) { return const_cast<float*>(x.data()); }

// Quantizing what an MX tensor dequantizes to gives the same values again, so this is the image of `t`, by backend ref.
struct Image {
  std::vector<uint8_t> bytes;
  Tensor view;
};
Image make_image(const OwnedMx& t, const Jagged& seq, ImageRole role) {
  const std::vector<float> x = ref_dequantize(t.view, seq);
  const OwnedMx again =
      make_owned_mx(t.view.data.dtype, t.view.block, ScaleLayout::linear, tokens_of(t), heads_of(t), dim_of(t), seq);
  Image image;
  image.bytes.assign(size_t(image_size(role, tokens_of(t), heads_of(t), dim_of(t), seq)), 0xFF);
  image.view = make_tensor(image.bytes.data(), Dtype::u8, image.bytes.size());
  require_ok(quantize({.in = make_tensor(mutable_data(x), Dtype::f32, tokens_of(t), heads_of(t), dim_of(t)),
                       .out = again.view,
                       .seq = seq,
                       .image = image.view,
                       .image_role = role,
                       .backend = "ref"}));
  return image;
}

OwnedMx rounded_to_image(const OwnedMx& t, const Jagged& seq, ImageRole role) {
  const int64_t tokens = tokens_of(t), heads = heads_of(t), dim = dim_of(t);
  const int64_t padded = padded_token_count(tokens, seq);
  const Image image = make_image(t, seq, role);
  const ImageShape shape = ImageShape::of(role, padded, heads, dim);
  OwnedMx to = make_owned_mx(Dtype::e4m3, MxBlock::row32, ScaleLayout::linear, tokens, heads, dim, seq);
  for (int64_t b = 0; b < seq.batch; ++b) {
    const Sequence s = sequence_at(tokens, seq, b);
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t i = 0; i < s.length; ++i) {
        const int64_t token = s.padded_start + i;
        for (int64_t c = 0; c < dim; ++c) {
          to.data[size_t(((s.start + i) * heads + head) * dim + c)] = image.bytes[size_t(shape.offset(head, token, c))];
        }
        for (int64_t col = 0; col < ceil_div(dim, int64_t{32}); ++col) {
          to.scale[size_t(scale_offset(MxBlock::row32, ScaleLayout::linear, padded, dim, {head, token, col}))] =
              image.bytes[size_t(shape.scale_offset(head, token))];
        }
      }
    }
  }
  return to;
}

// The same elements as part of a wider tensor of poison: heads lie `kHeadGap` elements apart, tokens as well.
constexpr int64_t kHeadGap = 16;
struct Strided {
  std::vector<uint8_t> bytes;
  Tensor view;
  explicit Strided(const Tensor& t) : view(t) {
    const int64_t size = dtype_size(t.dtype), head = t.shape[2] + kHeadGap, token = t.shape[1] * head + kHeadGap;
    bytes.assign(size_t(t.shape[0] * token * size), kPoisonPayload);
    view.data = bytes.data();
    view.stride = {token, head, 1};
  }
  static void copy(const Tensor& from, const Tensor& to) {
    const int64_t size = dtype_size(from.dtype);
    for (int64_t i = 0; i < from.shape[0]; ++i) {
      for (int64_t h = 0; h < from.shape[1]; ++h) {
        const auto row = [&](const Tensor& t) {
          return static_cast<uint8_t*>(t.data) + (i * t.stride[0] + h * t.stride[1]) * size;
        };
        std::copy_n(row(from), from.shape[2] * size, row(to));
      }
    }
  }
};

OwnedMx poisoned_mx(int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq, MxFormat format = {}) {
  OwnedMx t = make_owned_mx(Dtype::e4m3, format.block, format.layout, tokens, heads, dim, seq);
  std::fill(t.data.begin(), t.data.end(), kPoisonPayload);
  std::fill(t.scale.begin(), t.scale.end(), kPoisonScale);
  return t;
}
OwnedMx make_gradient_mx(const OwnedMx& like, const Jagged& seq) {
  return poisoned_mx(tokens_of(like), heads_of(like), dim_of(like), seq);
}

// Two results [outer][tokens][inner] of which the first `real` tokens lie in sequences.
template <class T>
struct TokenRows {
  const char* name;
  const std::vector<T>&x, &y;
  int64_t outer, x_tokens, y_tokens, inner, real;
  T outside;
};

// "" or the first difference.
template <class T>
std::string compare_rows(const TokenRows<T>& r) {
  const auto at = [&](int64_t o, int64_t n) {
    return std::string(r.name) + "[" + std::to_string(o) + ", token " + std::to_string(n / r.inner) + ", " +
           std::to_string(n % r.inner) + "]";
  };
  const auto is = [](T a, T b) { return std::memcmp(&a, &b, sizeof(T)) == 0; };
  for (int64_t o = 0; o < r.outer; ++o) {
    const T* x = r.x.data() + o * r.x_tokens * r.inner;
    const T* y = r.y.data() + o * r.y_tokens * r.inner;
    for (int64_t n = 0; n < r.real * r.inner; ++n) {
      if (!is(x[n], y[n])) return at(o, n) + ": " + std::to_string(x[n]) + " and " + std::to_string(y[n]);
    }
    for (const auto& [row, tokens] : {std::pair(x, r.x_tokens), std::pair(y, r.y_tokens)}) {
      for (int64_t n = r.real * r.inner; n < tokens * r.inner; ++n) {
        if (!is(row[n], r.outside)) return at(o, n) + " is outside of all sequences and " + std::to_string(row[n]);
      }
    }
  }
  return "";
}

}  // namespace

Jagged MxAttention::seq_q() const { return shared_q ? Jagged{} : jagged(cu_seqlens_q, batch); }
Jagged MxAttention::seq_k() const { return jagged(cu_seqlens_k, batch); }
Jagged MxAttention::seq_out() const { return shared_q ? Jagged{.batch = batch} : seq_q(); }
int64_t MxAttention::rows_in_sequences() const { return tokens_in_sequences(seq_out(), total_out()); }

OwnedMx ref_quantize(std::span<const float> x, int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq,
                     Dtype element, MxBlock block) {
  OwnedMx t = make_owned_mx(element, block, ScaleLayout::linear, tokens, heads, dim, seq);
  const Tensor in = make_tensor(const_cast<float*>(x.data()), Dtype::f32, tokens, heads, dim);
  require_ok(quantize({.in = in, .out = t.view, .seq = seq, .backend = "ref"}));
  return t;
}

std::vector<float> ref_dequantize(const MxTensor& t, const Jagged& seq) {
  std::vector<float> x(size_t(t.data.numel()));
  const auto& s = t.data.shape;
  const Tensor out = make_tensor(x.data(), Dtype::f32, s[0], s[1], s[2]);
  require_ok(dequantize({.in = t, .out = out, .seq = seq, .backend = "ref"}));
  return x;
}

MxAttention quantize_case(const AttentionCase& c, const Operands& x, Dtype grad_element, MxBlock block) {
  const auto equal = [](const std::vector<int32_t>& lens) {
    return std::all_of(lens.begin(), lens.end(), [&](int32_t len) { return len == lens[0]; });
  };
  MxAttention a;
  a.batch = batch(c);
  a.mask = c.mask;
  a.shared_q = c.shared_q;
  a.ds_dtype = grad_element;
  a.dlse = x.dlse;
  if (!c.shared_q && (c.slack_q > 0 || !equal(c.lens_q))) a.cu_seqlens_q = cu_seqlens(c.lens_q);
  if (c.slack_k > 0 || !equal(c.lens_k)) a.cu_seqlens_k = cu_seqlens(c.lens_k);
  a.q = ref_quantize(x.q, total_q(c), c.num_heads_q, c.head_dim, a.seq_q(), Dtype::e4m3, block);
  a.k = ref_quantize(x.k, total_k(c), c.num_heads_kv, c.head_dim, a.seq_k(), Dtype::e4m3, block);
  a.v = ref_quantize(x.v, total_k(c), c.num_heads_kv, c.head_dim_v, a.seq_k(), Dtype::e4m3, block);
  a.dout = ref_quantize(x.dout, total_out(c), c.num_heads_q, c.head_dim_v, a.seq_out(), grad_element, block);
  return a;
}

MxAttention poison_padding(const MxAttention& a) {
  MxAttention b = same_call(a);
  b.poisoned = true;
  if (!a.shared_q) b.cu_seqlens_q = explicit_cu_seqlens(a.seq_q(), tokens_of(a.q));
  b.cu_seqlens_k = explicit_cu_seqlens(a.seq_k(), tokens_of(a.k));
  const int64_t total_q = tokens_of(a.q) + (a.shared_q ? 0 : kSlackQ), total_k = tokens_of(a.k) + kSlackK;
  const int64_t total_out = a.total_out() + (a.shared_q ? 0 : kSlackQ);
  const auto poison_q = [&](const OwnedMx& t) { return poisoned_copy(t, a.seq_q(), total_q, b.seq_q()); };
  const auto poison_k = [&](const OwnedMx& t) { return poisoned_copy(t, a.seq_k(), total_k, b.seq_k()); };
  const auto poison_out = [&](const OwnedMx& t) { return poisoned_copy(t, a.seq_out(), total_out, b.seq_out()); };
  b.q = poison_q(a.q);
  b.k = poison_k(a.k);
  b.v = poison_k(a.v);
  b.dout = poison_out(a.dout);
  if (a.q_col.view) b.q_col = poison_q(a.q_col);
  if (a.k_col.view) b.k_col = poison_k(a.k_col);
  if (a.v_col.view) b.v_col = poison_k(a.v_col);
  if (a.dout_col.view) b.dout_col = poison_out(a.dout_col);
  if (!a.dlse.empty()) {
    b.dlse = widened(a.dlse, heads_of(a.q), a.total_out(), total_out, kNan);
    poison_slack(b, heads_of(b.q), 1, kNan, b.dlse);
  }
  return b;
}

MxAttention expand_squares(const MxAttention& a, ScaleLayout layout) {
  MxAttention b = same_call(a);
  const auto expanded = [&](const OwnedMx& t, const Jagged& seq, MxBlock block) {
    OwnedMx x = make_owned_mx(t.view.data.dtype, block, layout, tokens_of(t), heads_of(t), dim_of(t), seq);
    std::copy(t.data.begin(), t.data.end(), x.data.begin());
    require_ok(convert_scales({.in = t.view, .out = x.view, .seq = seq, .backend = "ref"}));
    return x;
  };
  b.q = expanded(a.q, a.seq_q(), MxBlock::row32);
  b.k = expanded(a.k, a.seq_k(), MxBlock::row32);
  b.v = expanded(a.v, a.seq_k(), MxBlock::row32);
  b.dout = expanded(a.dout, a.seq_out(), MxBlock::row32);
  b.q_col = expanded(a.q, a.seq_q(), MxBlock::col32);
  b.k_col = expanded(a.k, a.seq_k(), MxBlock::col32);
  b.v_col = expanded(a.v, a.seq_k(), MxBlock::col32);
  b.dout_col = expanded(a.dout, a.seq_out(), MxBlock::col32);
  return b;
}

OracleProblem dequantized_problem(const AttentionCase& c, const MxAttention& a) {
  return make_problem(c, {.q = ref_dequantize(a.q.view, a.seq_q()),
                          .k = ref_dequantize(a.k.view, a.seq_k()),
                          .v = ref_dequantize(a.v.view, a.seq_k()),
                          .dout = ref_dequantize(a.dout.view, a.seq_out()),
                          .dlse = a.dlse});
}

MxAttention round_to_images(const MxAttention& a) {
  MxAttention b = same_call(a);
  b.q = rounded_to_image(a.q, a.seq_q(), ImageRole::query);
  b.k = rounded_to_image(a.k, a.seq_k(), ImageRole::key);
  b.v = rounded_to_image(a.v, a.seq_k(), ImageRole::value);
  const MxTensor& dout = a.dout.view;
  b.dout = make_owned_mx(dout.data.dtype, dout.block, dout.layout, a.total_out(), heads_of(a.dout), dim_of(a.dout),
                         a.seq_out());
  b.dout.data = a.dout.data;
  b.dout.scale = a.dout.scale;
  b.dout.view.data.data = b.dout.data.data();
  b.dout.view.scale.data = b.dout.scale.data();
  return b;
}

AttentionResult run_attention(const MxAttention& a, const std::string& fwd_backend, const std::string& bwd_backend,
                              const ForwardOptions& options) {
  const int64_t total_out = a.total_out(), heads_q = heads_of(a.q), dim_v = dim_of(a.v);
  const OwnedMx& v = a.v_col.view ? a.v_col : a.v;
  const FloatOutput out(options.out_dtype, total_out, heads_q, dim_v, 0xFF);  // NaN in any dtype
  AttentionResult r;
  r.out_dtype = options.out_dtype;
  r.lse.assign(size_t(total_out * heads_q), kNan);
  if (options.row_exponent) r.row_exponent.assign(size_t(total_out * heads_q), 0xA5);
  AttentionFwd fwd{.q = a.q.view,
                   .k = a.k.view,
                   .v = v.view,
                   .out = out.view,
                   .lse = make_tensor(r.lse.data(), Dtype::f32, heads_q, total_out),
                   .seq_q = a.seq_q(),
                   .seq_k = a.seq_k(),
                   .mask = a.mask,
                   .softmax_scale = a.softmax_scale,
                   .shared_q = a.shared_q,
                   .cpu_math = a.cpu_math,
                   .backend = fwd_backend.c_str()};
  if (options.out_mx) {
    r.out_mx = poisoned_mx(total_out, heads_q, dim_v, a.seq_out(), *options.out_mx);
    fwd.out_mx = r.out_mx.view;
  }
  if (options.row_exponent) fwd.row_exponent = make_tensor(r.row_exponent.data(), Dtype::u8, heads_q, total_out);
  if (!options.v_mean.empty()) {
    fwd.v_mean = make_tensor(mutable_data(options.v_mean), Dtype::f32, a.seq_k().batch, heads_of(a.v), dim_v);
  }
  Image q_image, k_image, v_image;
  if (options.images) {
    q_image = make_image(a.q, a.seq_q(), ImageRole::query);
    k_image = make_image(a.k, a.seq_k(), ImageRole::key);
    v_image = make_image(v, a.seq_k(), ImageRole::value);
    fwd.q_image = q_image.view;
    fwd.k_image = k_image.view;
    fwd.v_image = v_image.view;
    for (MxTensor* t : {&fwd.q, &fwd.k, &fwd.v}) t->data.data = t->scale.data = nullptr;
  }
  std::vector<Strided> strided;
  if (options.strided) {
    for (Tensor* t : {&fwd.q.data, &fwd.k.data, &fwd.v.data, &fwd.out}) {
      strided.emplace_back(*t);
      Strided::copy(*t, strided.back().view);
      *t = strided.back().view;
    }
  }
  require_ok(call(fwd));
  if (options.strided) Strided::copy(fwd.out, out.view);
  r.out = out.widened();
  if (!bwd_backend.empty()) run_backward(a, bwd_backend, r);
  return r;
}

void run_backward(const MxAttention& a, const std::string& backend, AttentionResult& r) {
  const int64_t total_out = a.total_out(), heads_q = heads_of(a.q), dim_v = dim_of(a.v);
  std::vector<float> out = r.out, lse = r.lse;
  std::vector<uint8_t> row_exponent = r.row_exponent;
  poison_slack(a, 1, heads_q * dim_v, kNan, out);
  const FloatOutput stored(r.out_dtype, total_out, heads_q, dim_v);
  stored.store(out);
  poison_slack(a, heads_q, 1, kNan, lse);
  if (!row_exponent.empty()) poison_slack(a, heads_q, 1, uint8_t(0xFF), row_exponent);
  r.dq.assign(a.q.data.size(), kNan);
  r.dk.assign(a.k.data.size(), kNan);
  r.dv.assign(a.v.data.size(), kNan);
  r.dk_mx = make_gradient_mx(a.k, a.seq_k());
  r.dv_mx = make_gradient_mx(a.v, a.seq_k());
  const auto like = [](std::vector<float>& x, const OwnedMx& t) {
    return make_tensor(x.data(), Dtype::f32, tokens_of(t), heads_of(t), dim_of(t));
  };
  AttentionBwd bwd{.q = a.q.view,
                   .k = a.k.view,
                   .v = a.v.view,
                   .dout = a.dout.view,
                   .q_col = a.q_col.view,
                   .k_col = a.k_col.view,
                   .dout_col = a.dout_col.view,
                   .out = stored.view,
                   .lse = make_tensor(lse.data(), Dtype::f32, heads_q, total_out),
                   .dq = like(r.dq, a.q),
                   .dk = like(r.dk, a.k),
                   .dv = like(r.dv, a.v),
                   .dk_mx = r.dk_mx.view,
                   .dv_mx = r.dv_mx.view,
                   .ds_dtype = a.ds_dtype,
                   .dq_accum = a.dq_accum,
                   .deterministic = a.deterministic,
                   .seq_q = a.seq_q(),
                   .seq_k = a.seq_k(),
                   .mask = a.mask,
                   .softmax_scale = a.softmax_scale,
                   .shared_q = a.shared_q,
                   .cpu_math = a.cpu_math,
                   .backend = backend.c_str()};
  if (!row_exponent.empty()) bwd.row_exponent = make_tensor(row_exponent.data(), Dtype::u8, heads_q, total_out);
  if (!a.dlse.empty()) bwd.dlse = make_tensor(mutable_data(a.dlse), Dtype::f32, heads_q, total_out);
  require_ok(call(bwd));
  r.backward = true;
}

std::string compare_bits(const MxAttention& a, const AttentionResult& x, const MxAttention& b,
                         const AttentionResult& y) {
  const int64_t heads_q = heads_of(a.q), heads_kv = heads_of(a.k), dim = dim_of(a.q), dim_v = dim_of(a.v);
  const int64_t x_out = a.total_out(), y_out = b.total_out(), real_out = a.rows_in_sequences();
  const int64_t x_q = tokens_of(a.q), y_q = tokens_of(b.q), real_q = tokens_in_sequences(a.seq_q(), x_q);
  const int64_t x_k = tokens_of(a.k), y_k = tokens_of(b.k), real_k = tokens_in_sequences(a.seq_k(), x_k);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::string difference;
  const auto check = [&]<class T>(const TokenRows<T>& rows) {
    if (difference.empty()) difference = compare_rows(rows);
  };
  const auto check_keys = [&](const char* name, const std::vector<float>& dx, const std::vector<float>& dy,
                              int64_t row) {
    check(TokenRows<float>{name, dx, dy, 1, x_k, y_k, row, real_k, 0});
  };
  const auto check_mx = [&](const char* name, const OwnedMx& tx, const OwnedMx& ty, int64_t row) {
    check(TokenRows<uint8_t>{name, tx.data, ty.data, 1, x_k, y_k, row, real_k, 0});
    check_keys(name, ref_dequantize(tx.view, a.seq_k()), ref_dequantize(ty.view, b.seq_k()), row);
  };
  check(TokenRows<float>{"out", x.out, y.out, 1, x_out, y_out, heads_q * dim_v, real_out, 0});
  check(TokenRows<float>{"lse", x.lse, y.lse, heads_q, x_out, y_out, 1, real_out, -kInf});
  if (!x.row_exponent.empty())
    check(TokenRows<uint8_t>{"row_exponent", x.row_exponent, y.row_exponent, heads_q, x_out, y_out, 1, real_out, 0});
  if (!x.backward) return difference;
  check(TokenRows<float>{"dq", x.dq, y.dq, 1, x_q, y_q, heads_q * dim, real_q, 0});
  check_keys("dk", x.dk, y.dk, heads_kv * dim);
  check_keys("dv", x.dv, y.dv, heads_kv * dim_v);
  check_mx("dk_mx", x.dk_mx, y.dk_mx, heads_kv * dim);
  check_mx("dv_mx", x.dv_mx, y.dv_mx, heads_kv * dim_v);
  return difference;
}

}  // namespace mxflash::kit
