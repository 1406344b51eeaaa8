#include "kit/runner.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

#include "kit/call.h"
#include "mx/float16.h"

namespace mxflash::kit {
namespace {

constexpr size_t kAlign = 64;

Jagged make_jagged(const std::vector<int32_t>& cu) {
  if (cu.empty()) return {};
  int32_t max = 0;
  for (size_t b = 1; b < cu.size(); ++b) max = std::max(max, cu[b] - cu[b - 1]);
  return {.cu_seqlens = cu.data(), .batch = int32_t(cu.size()) - 1, .max_seqlen = max};
}

// The library reads inputs through a non-const view.
void* mutable_data(std::span<const float> x) { return const_cast<float*>(x.data()); }

double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

FloatOutput::FloatOutput(Dtype dtype, int64_t tokens, int64_t heads, int64_t dim, uint8_t fill)
    : bytes(size_t(tokens * heads * dim * dtype_size(dtype)), fill),
      view(make_tensor(bytes.data(), dtype, tokens, heads, dim)) {}

std::vector<float> FloatOutput::widened() const {
  std::vector<float> x(size_t(view.numel()));
  const auto* half = reinterpret_cast<const uint16_t*>(bytes.data());
  if (view.dtype == Dtype::f32 && !x.empty()) std::memcpy(x.data(), bytes.data(), bytes.size());
  for (size_t i = 0; view.dtype == Dtype::bf16 && i < x.size(); ++i) x[i] = decode_bf16(half[i]);
  for (size_t i = 0; view.dtype == Dtype::f16 && i < x.size(); ++i) x[i] = decode_f16(half[i]);
  return x;
}

void FloatOutput::store(std::span<const float> x) const {
  auto* half = static_cast<uint16_t*>(view.data);
  if (view.dtype == Dtype::f32 && !x.empty()) std::memcpy(view.data, x.data(), x.size_bytes());
  for (size_t i = 0; view.dtype == Dtype::bf16 && i < x.size(); ++i) half[i] = encode_bf16(x[i]);
  for (size_t i = 0; view.dtype == Dtype::f16 && i < x.size(); ++i) half[i] = encode_f16(x[i]);
}

void AlignedBuffer::Free::operator()(void* p) const { ::operator delete(p, std::align_val_t(kAlign)); }

AlignedBuffer::AlignedBuffer(size_t size) : size_(size) {
  if (size == 0) return;
  data_.reset(::operator new(size, std::align_val_t(kAlign)));
  std::memset(data_.get(), 0, size);
}

OwnedMx make_owned_mx(Dtype element, MxBlock block, ScaleLayout layout, int64_t tokens, int64_t heads, int64_t dim,
                      const Jagged& seq) {
  OwnedMx t;
  t.data.resize(size_t(tokens * heads * dim));
  t.scale.resize(size_t(scale_size(block, layout, tokens, heads, dim, seq)));
  t.view = make_mx_tensor(t.data.data(), t.scale.data(), element, block, layout, tokens, heads, dim, seq);
  return t;
}

OwnedMx quantize_floats(std::span<const float> x, int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq,
                        Dtype element, MxBlock block, MxRule rule) {
  OwnedMx t = make_owned_mx(element, block, ScaleLayout::linear, tokens, heads, dim, seq);
  require_ok(quantize(
      {.in = make_tensor(mutable_data(x), Dtype::f32, tokens, heads, dim), .out = t.view, .seq = seq, .rule = rule}));
  return t;
}

std::vector<float> dequantize_to_floats(const MxTensor& t, const Jagged& seq) {
  std::vector<float> x(size_t(t.data.numel()));
  const auto& s = t.data.shape;
  require_ok(dequantize({.in = t, .out = make_tensor(x.data(), Dtype::f32, s[0], s[1], s[2]), .seq = seq}));
  return x;
}

Jagged FloatProblem::seq_q() const { return shared_q ? Jagged{} : make_jagged(cu_seqlens_q); }
Jagged FloatProblem::seq_k() const { return make_jagged(cu_seqlens_k); }

FloatResult run_operator(const FloatProblem& p, const RunOptions& options) {
  const int64_t total_q = p.total_q(), total_k = p.total_k(), total_out = p.total_out();
  FloatResult r;
  r.lse.resize(size_t(p.num_heads_q * total_out));
  const FloatOutput out(options.out_dtype, total_out, p.num_heads_q, p.head_dim_v);
  OperatorFwd fwd{.q = make_tensor(mutable_data(p.q), Dtype::f32, total_q, p.num_heads_q, p.head_dim),
                  .k = make_tensor(mutable_data(p.k), Dtype::f32, total_k, p.num_heads_kv, p.head_dim),
                  .v = make_tensor(mutable_data(p.v), Dtype::f32, total_k, p.num_heads_kv, p.head_dim_v),
                  .out = out.view,
                  .lse = make_tensor(r.lse.data(), Dtype::f32, p.num_heads_q, total_out),
                  .recipe = options.recipe,
                  .seq_q = p.seq_q(),
                  .seq_k = p.seq_k(),
                  .mask = p.mask,
                  .softmax_scale = p.softmax_scale,
                  .shared_q = p.shared_q,
                  .stats = &r.stats,
                  .cpu_math = options.cpu_math,
                  .backend = options.backend};
  AlignedBuffer saved;
  auto start = std::chrono::steady_clock::now();
  require_ok(call(fwd, saved));
  r.fwd_ms = milliseconds_since(start);
  fwd.saved = saved.data();
  fwd.saved_size = r.saved_bytes = saved.size();
  r.out = out.widened();
  if (!options.backward || (p.dout.empty() && total_out > 0)) return r;

  const FloatOutput dq(options.out_dtype, total_q, p.num_heads_q, p.head_dim);
  const FloatOutput dk(options.out_dtype, total_k, p.num_heads_kv, p.head_dim);
  const FloatOutput dv(options.out_dtype, total_k, p.num_heads_kv, p.head_dim_v);
  OperatorBwd bwd{.fwd = fwd,
                  .dout = make_tensor(mutable_data(p.dout), Dtype::f32, total_out, p.num_heads_q, p.head_dim_v),
                  .dq = dq.view,
                  .dk = dk.view,
                  .dv = dv.view,
                  .dq_accum = options.dq_accum};
  if (!p.dlse.empty()) bwd.dlse = make_tensor(mutable_data(p.dlse), Dtype::f32, p.num_heads_q, total_out);
  start = std::chrono::steady_clock::now();
  require_ok(call(bwd));
  r.bwd_ms = milliseconds_since(start);
  r.dq = dq.widened();
  r.dk = dk.widened();
  r.dv = dv.widened();
  return r;
}

}  // namespace mxflash::kit
