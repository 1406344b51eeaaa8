// Operations that add and then quantize: rmsnorm_quantize and gemm_quantize.
#include <mxflash/gemm.h>
#include <mxflash/rmsnorm.h>

#include <cmath>

#include "kit/random.h"
#include "kit/text.h"
#include "kit/verify_bytes.h"

namespace mxflash::kit {

constexpr double kBf16 = 0x1p-8, kFp32 = 0x1p-24;  // unit roundoffs

// out must be what the quantizer makes of y, and y within roundoff of its definition; bits are judged by ref.
std::string verify_rmsnorm(const std::string& backend) {
  for (const int64_t dim : {64, 328, 2048}) {
    const Place p({33, 0, 70}, 2, 1, dim);
    std::vector<float> x(p.size()), w(static_cast<size_t>(dim)), r(p.size());
    Random random(14, uint64_t(dim));
    for (std::vector<float>* values : {&x, &w, &r}) fill_normal(random, *values);
    const Input in = make_input(x, Dtype::bf16), weight = make_input(w, Dtype::f32);
    const Input residual = make_input(r, Dtype::bf16);
    std::vector<uint8_t> y, sum;
    std::string failure;
    const OwnedMx t = run_thrice(
        backend,
        [&](const char* name, uint8_t fill) {
          OwnedMx out = make_output(p, Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, fill);
          out.view.data = make_tensor(out.data.data(), Dtype::e4m3, p.tokens, dim);
          sum = residual.bytes;
          y.assign(in.bytes.size(), fill);
          require_ok(rmsnorm_quantize({.in = in.view(p.tokens, dim),
                                       .weight = weight.view(dim),
                                       .residual = make_tensor(sum.data(), Dtype::bf16, p.tokens, dim),
                                       .out = out.view,
                                       .y = make_tensor(y.data(), Dtype::bf16, p.tokens, dim),
                                       .seq = p.seq,
                                       .backend = name}));
          return out;
        },
        failure);
    if (!failure.empty()) return failure + text(" (dim %d)", int(dim));
    std::vector<float> y_values(p.size());
    for (int64_t i = 0; i < p.cu.back(); ++i) {
      double squares = 0;
      for (int64_t c = 0; c < dim; ++c) squares += std::pow(double(load(sum, size_t(i * dim + c), Dtype::bf16)), 2);
      const double rstd = 1 / std::sqrt(squares / double(dim) + 1e-6);
      for (int64_t c = 0; c < dim; ++c) {
        const auto at = size_t(i * dim + c);
        const double h = double(in.values[at]) + double(residual.values[at]),
                     got_h = double(load(sum, at, Dtype::bf16));
        const double want = got_h * rstd * double(weight.values[size_t(c)]);
        y_values[at] = load(y, at, Dtype::bf16);
        if (std::abs(got_h - h) > (kBf16 + kFp32) * std::abs(h) ||
            std::abs(double(y_values[at]) - want) > (kBf16 + double(dim) * kFp32) * std::abs(want)) {
          return text("y[%d, %d] must be %.6g, got %.6g (dim %d)", int(i), int(c), want, double(y_values[at]),
                      int(dim));
        }
      }
    }
    if (failure = judge_bytes(t, y_values, p, MxRule::rceil); !failure.empty()) return failure;
  }
  return "";
}

// out must be what the quantizer makes of c, and c within the roundoff of an fp32 sum of its definition. Backends may
// add in another order, so their bits are not compared with those of ref.
std::string verify_gemm(const std::string& backend) {
  constexpr int64_t kDepth = 96;
  for (const Place& p : places()) {
    const int64_t n = p.heads * p.dim;
    std::vector<float> x(size_t(p.tokens * kDepth)), w(size_t(n * kDepth)), c(p.size());
    Random random(15, uint64_t(p.dim));
    fill_normal(random, x);
    fill_normal(random, w);
    const Input a = make_input(x, Dtype::bf16), b = make_input(w, Dtype::bf16);
    std::string failure;
    const OwnedMx t = run_twice(
        [&](uint8_t fill) {
          OwnedMx out = make_output(p, Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, fill);
          require_ok(gemm_quantize({.a = a.view(p.tokens, kDepth),
                                    .b = b.view(n, kDepth),
                                    .out = out.view,
                                    .c = make_tensor(c.data(), Dtype::f32, p.tokens, p.heads, p.dim),
                                    .seq = p.seq,
                                    .backend = backend.c_str()}));
          return out;
        },
        failure);
    if (failure.empty()) failure = judge_bytes(t, c, p, MxRule::rceil);
    for (int64_t i = 0; failure.empty() && i < p.cu.back() * n; ++i) {
      double want = 0, magnitude = 0;
      for (int64_t k = 0; k < kDepth; ++k) {
        const double term = double(a.values[size_t(i / n * kDepth + k)]) * double(b.values[size_t(i % n * kDepth + k)]);
        want += term;
        magnitude += std::abs(term);
      }
      const double got = double(c[size_t(i)]), bound = double(kDepth + 1) * kFp32 * magnitude;
      if (!(std::abs(got - want) <= bound)) {
        failure = text("c[%lld, %d] must be within %.3g of %.9g, got %.9g", static_cast<long long>(i / n), int(i % n),
                       bound, want, got);
      }
    }
    if (!failure.empty()) return failure + text(" (n %d)", int(n));
  }
  return "";
}

}  // namespace mxflash::kit
