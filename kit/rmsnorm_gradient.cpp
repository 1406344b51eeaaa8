#include "kit/rmsnorm_gradient.h"

#include <mxflash/quantize.h>

#include <algorithm>
#include <cmath>

#include "kit/runner.h"
#include "kit/text.h"
#include "mx/float16.h"

namespace mxflash::kit {
namespace {

constexpr double kFp32 = 0x1p-24;     // unit roundoff
constexpr double kLargest = 0x1p127;  // beyond it fp32 arithmetic may overflow
constexpr double kTiny = 0x1p-140;    // what products that underflow may lose in sum, times 1 + |rstd|

double element(const Tensor& t, int64_t at) {
  switch (t.dtype) {
    case Dtype::bf16: return double(decode_bf16(static_cast<const uint16_t*>(t.data)[at]));
    case Dtype::f16: return double(decode_f16(static_cast<const uint16_t*>(t.data)[at]));
    default: return double(static_cast<const float*>(t.data)[at]);
  }
}
double element(const Tensor& t, int64_t row, int64_t col) { return element(t, row * t.stride[0] + col); }

double rounding(Dtype dtype, double x) {
  switch (dtype) {
    case Dtype::bf16: return 0x1p-8 * std::abs(x);
    case Dtype::f16: return 0x1p-11 * std::abs(x) + 0x1p-25;
    default: return kFp32 * std::abs(x);
  }
}
double largest(Dtype dtype) { return dtype == Dtype::f16 ? 65504 : kLargest; }

std::string judge_element(double got, double want, double bound, Dtype dtype) {
  const double may = bound + rounding(dtype, std::abs(want) + bound);
  if (std::isnan(want) ? std::isnan(got) : std::isinf(want) ? !std::isfinite(got) : std::abs(got - want) <= may) {
    return "";
  }
  if (std::isfinite(want) && !(std::abs(want) + may < largest(dtype))) return "";
  return text(" must be within %.3g of %.9g, got %.9g", may, want, got);
}

}  // namespace

RmsnormGradient exact_rmsnorm_bwd(const RmsnormBwd& args) {
  const int64_t rows = args.h.shape[0], dim = args.h.shape[1];
  const int64_t inside = args.seq.cu_seqlens ? args.seq.cu_seqlens[args.seq.batch] : rows;
  const auto size = size_t(rows * dim);
  RmsnormGradient e{rows, dim, std::vector<double>(size), std::vector<double>(size), {}, {}};
  e.dw.resize(size_t(dim));
  e.dw_bound.resize(size_t(dim));
  std::vector<float> floats(args.dy_mx ? size : 0);
  Tensor dy = args.dy;
  if (args.dy_mx) {
    dy = make_tensor(floats.data(), Dtype::f32, rows, dim);
    require_ok(dequantize({.in = args.dy_mx, .out = dy, .seq = args.seq, .backend = "ref"}));
  }
  // No running sum in fp32 is longer: of a row, 16 or more side by side; of dw, a group of rows, then the groups.
  const double row_chain = double(dim) / 16 + 40;
  const double dw_chain = std::min(double(inside), double(inside) / 64 + 512) + 8;
  std::vector<double> xhat(static_cast<size_t>(dim)), g(xhat.size());
  for (int64_t row = 0; row < inside; ++row) {
    const double rstd = element(args.rstd, row);
    double sum = 0, magnitude = 0;
    for (size_t c = 0; c < xhat.size(); ++c) {
      const double d = element(dy, row, int64_t(c));
      xhat[c] = element(args.h, row, int64_t(c)) * rstd;
      g[c] = d * element(args.weight, int64_t(c));
      sum += g[c] * xhat[c];
      magnitude += std::abs(g[c] * xhat[c]);
      e.dw[c] += d * xhat[c];
      e.dw_bound[c] += dw_chain * kFp32 * std::abs(d * xhat[c]) + kTiny;
    }
    const double mean = sum / double(dim), mean_magnitude = magnitude / double(dim);
    for (size_t c = 0; c < xhat.size(); ++c) {
      const double dh = args.dh ? element(args.dh, row, int64_t(c)) : 0;
      const size_t at = size_t(row * dim) + c;
      e.dx[at] = rstd * (g[c] - xhat[c] * mean) + dh;
      e.dx_bound[at] = kFp32 * (8 * std::abs(rstd * g[c]) + row_chain * std::abs(rstd * xhat[c]) * mean_magnitude +
                                2 * std::abs(dh)) +
                       kTiny * (1 + std::abs(rstd));
    }
  }
  return e;
}

std::string judge(const RmsnormGradient& e, const Tensor& dx, const Tensor& dw) {
  for (int64_t row = 0; row < e.rows; ++row) {
    for (int64_t c = 0; c < e.dim; ++c) {
      const auto at = size_t(row * e.dim + c);
      const std::string failure = judge_element(element(dx, row, c), e.dx[at], e.dx_bound[at], dx.dtype);
      if (!failure.empty()) return text("dx[%d, %d]", int(row), int(c)) + failure;
    }
  }
  for (int64_t c = 0; c < e.dim; ++c) {
    const std::string failure = judge_element(element(dw, c), e.dw[size_t(c)], e.dw_bound[size_t(c)], dw.dtype);
    if (!failure.empty()) return text("dw[%d]", int(c)) + failure;
  }
  return "";
}

}  // namespace mxflash::kit
