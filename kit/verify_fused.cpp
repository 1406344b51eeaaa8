// Operations that add: rmsnorm_quantize, rmsnorm_bwd and gemm_quantize.
#include <mxflash/gemm.h>
#include <mxflash/rmsnorm.h>

#include <cmath>
#include <cstring>

#include "kit/call.h"
#include "kit/random.h"
#include "kit/rmsnorm_gradient.h"
#include "kit/text.h"
#include "kit/verify_bytes.h"

namespace mxflash::kit {
namespace {

constexpr double kBf16 = 0x1p-8, kFp32 = 0x1p-24;  // unit roundoffs

Input normal_input(int64_t size, Dtype dtype, uint64_t stream) {
  Random random(14, stream);
  std::vector<float> x(static_cast<size_t>(size));
  fill_normal(random, x);
  return make_input(x, dtype);
}

}  // namespace

std::string verify_rmsnorm(const std::string& backend, const Place& place) {
  const int64_t dim = place.heads * place.dim;
  const Place p(place.lens, place.slack, 1, dim);
  const Input in = normal_input(p.tokens * dim, Dtype::bf16, 1), weight = normal_input(dim, Dtype::f32, 2);
  const Input residual = normal_input(p.tokens * dim, Dtype::bf16, 3);
  std::vector<uint8_t> y, h, rstd_bytes;
  std::string failure;
  const auto run = [&](const char* name, uint8_t fill) {
    OwnedMx out = make_output(p, Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, fill);
    out.view.data = make_tensor(out.data.data(), Dtype::e4m3, p.tokens, dim);
    h = residual.bytes;
    y.assign(in.bytes.size(), fill);
    rstd_bytes.assign(size_t(p.tokens) * sizeof(float), fill);
    require_ok(call(RmsnormQuantize{.in = in.view(p.tokens, dim),
                                    .weight = weight.view(dim),
                                    .residual = make_tensor(h.data(), Dtype::bf16, p.tokens, dim),
                                    .out = out.view,
                                    .y = make_tensor(y.data(), Dtype::bf16, p.tokens, dim),
                                    .rstd = make_tensor(rstd_bytes.data(), Dtype::f32, p.tokens),
                                    .seq = p.seq,
                                    .backend = name}));
    // Into the comparison with the results.
    for (const std::vector<uint8_t>* bytes : {&y, &h, &rstd_bytes}) {
      out.data.insert(out.data.end(), bytes->begin(), bytes->end());
    }
    return out;
  };
  const OwnedMx t = run_thrice(backend, run, failure);
  std::vector<float> y_values(p.size());
  for (int64_t i = 0; i < p.cu.back() && failure.empty(); ++i) {
    double squares = 0;
    for (int64_t c = 0; c < dim; ++c) squares += std::pow(double(load(h, size_t(i * dim + c), Dtype::bf16)), 2);
    const double rstd = 1 / std::sqrt(squares / double(dim) + 1e-6);
    for (int64_t c = 0; c < dim; ++c) {
      const auto at = size_t(i * dim + c);
      const double sum = double(in.values[at]) + double(residual.values[at]), got_h = double(load(h, at, Dtype::bf16));
      const double want = got_h * rstd * double(weight.values[size_t(c)]);
      y_values[at] = load(y, at, Dtype::bf16);
      if (std::abs(got_h - sum) <= (kBf16 + kFp32) * std::abs(sum) &&
          std::abs(double(y_values[at]) - want) <= (kBf16 + double(dim) * kFp32) * std::abs(want)) {
        continue;
      }
      failure = text("y[%d, %d] must be %.6g, got %.6g", int(i), int(c), want, double(y_values[at]));
      break;
    }
  }
  if (failure.empty()) failure = judge_bytes(t, y_values, p, MxRule::rceil);
  return failure.empty() ? "" : failure + text(" (dim %d)", int(dim));
}

std::string verify_rmsnorm_bwd(const std::string& backend, const Place& place) {
  const int64_t dim = place.heads * place.dim;
  const Place p(place.lens, place.slack, 1, dim);
  const Input h = normal_input(p.tokens * dim, Dtype::bf16, 6), weight = normal_input(dim, Dtype::f32, 7);
  const Input dy = normal_input(p.tokens * dim, Dtype::bf16, 8), dh = normal_input(p.tokens * dim, Dtype::bf16, 9);
  const std::vector<float> rstd(size_t(p.tokens), 0.875f);
  const OwnedMx mx = quantize_floats(dy.values, p.tokens, 1, dim, p.seq);
  std::vector<float> dw(static_cast<size_t>(dim));
  std::vector<uint8_t> dx(h.bytes.size());
  RmsnormBwd args{.h = h.view(p.tokens, dim),
                  .weight = weight.view(dim),
                  .rstd = make_tensor(const_cast<float*>(rstd.data()), Dtype::f32, p.tokens),
                  .dh = dh.view(p.tokens, dim),
                  .dx = make_tensor(dx.data(), Dtype::bf16, p.tokens, dim),
                  .dw = make_tensor(dw.data(), Dtype::f32, dim),
                  .seq = p.seq,
                  .backend = backend.c_str()};
  for (const bool is_mx : {false, true}) {
    args.dy = is_mx ? Tensor{} : dy.view(p.tokens, dim);
    args.dy_mx = is_mx ? mx.view : MxTensor{};
    args.dy_mx.data = is_mx ? make_tensor(mx.view.data.data, mx.view.data.dtype, p.tokens, dim) : Tensor{};
    const RmsnormGradient exact = exact_rmsnorm_bwd(args);
    std::string failure;
    const auto run = [&](uint8_t fill) {
      dx.assign(dx.size(), fill);
      dw.assign(dw.size(), float(fill));
      require_ok(call(args));
      OwnedMx bytes;  // for the comparison of results
      bytes.data = dx;
      bytes.scale.resize(dw.size() * sizeof(float));
      if (!dw.empty()) std::memcpy(bytes.scale.data(), dw.data(), bytes.scale.size());
      return bytes;
    };
    run_twice(run, failure);
    if (failure.empty()) failure = judge(exact, args.dx, args.dw);
    if (!failure.empty()) return failure + text(" (dim %d, dy %s)", int(dim), is_mx ? "MXFP8" : "BF16");
  }
  return "";
}

// Backends may add in another order than ref, so their bits are not compared with those of ref.
std::string verify_gemm(const std::string& backend, const Place& p, int64_t depth) {
  const int64_t n = p.heads * p.dim;
  const Input a = normal_input(p.tokens * depth, Dtype::bf16, 4), b = normal_input(n * depth, Dtype::bf16, 5);
  std::vector<float> c(p.size());
  std::string failure;
  const auto run = [&](uint8_t fill) {
    OwnedMx out = make_output(p, Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, fill);
    require_ok(gemm_quantize({.a = a.view(p.tokens, depth),
                              .b = b.view(n, depth),
                              .out = out.view,
                              .c = make_tensor(c.data(), Dtype::f32, p.tokens, p.heads, p.dim),
                              .seq = p.seq,
                              .backend = backend.c_str()}));
    return out;
  };
  const OwnedMx t = run_twice(run, failure);
  if (failure.empty()) failure = judge_bytes(t, c, p, MxRule::rceil);
  for (int64_t i = 0; i < p.cu.back() * n && failure.empty(); ++i) {
    double want = 0, magnitude = 0;
    for (int64_t k = 0; k < depth; ++k) {
      const double term = double(a.values[size_t(i / n * depth + k)]) * double(b.values[size_t(i % n * depth + k)]);
      want += term;
      magnitude += std::abs(term);
    }
    // An fp32 sum of `depth` products, in any order.
    const double got = double(c[size_t(i)]), bound = double(depth + 1) * kFp32 * magnitude;
    if (std::abs(got - want) <= bound) continue;
    failure = text("c[%d, %d] must be within %.3g of %.9g, got %.9g", int(i / n), int(i % n), bound, want, got);
  }
  return failure.empty() ? "" : failure + text(" (n %d, k %d)", int(n), int(depth));
}

}  // namespace mxflash::kit
