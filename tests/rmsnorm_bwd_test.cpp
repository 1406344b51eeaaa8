// rmsnorm_bwd of ref: finite differences of the forward, fp64 from the formula, MXFP8 dy, corners.
#include <gtest/gtest.h>
#include <mxflash/quantize.h>
#include <mxflash/rmsnorm.h>

#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "rmsnorm_bwd_call.h"

namespace mxflash {
namespace {

// sum(dy * y) + sum(dh * h), y = h / sqrt(mean(h^2) + eps) * weight, in fp64: its gradients are dx and dw.
struct Loss {
  int64_t rows, dim;
  double eps;
  std::vector<double> h, weight, dy, dh;

  double operator()() const {
    double sum = 0;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < dim; ++c) {
        const auto i = size_t(r * dim + c);
        sum += dy[i] * h[i] * rstd(r) * weight[size_t(c)] + dh[i] * h[i];
      }
    }
    return sum;
  }
  double rstd(int64_t r) const {
    double squares = 0;
    for (int64_t c = 0; c < dim; ++c) squares += std::pow(h[size_t(r * dim + c)], 2);
    return 1 / std::sqrt(squares / double(dim) + eps);
  }
  // By the parameter x, one of ours; the error is of the order of the fourth power of the step.
  double derivative(double& x) {
    constexpr double kStep = 1e-3;
    const double at = x;
    const auto difference = [&](double step) {
      x = at + step;
      const double up = (*this)();
      x = at - step;
      const double down = (*this)();
      x = at;
      return (up - down) / (2 * step);
    };
    return (4 * difference(kStep) - difference(2 * kStep)) / 3;
  }
};

TEST(RmsnormBwd, EqualsFiniteDifferences) {
  for (const int64_t dim : {1, 2, 8, 33, 100}) {
    constexpr int64_t kRows = 3;
    kit::Random random(5, uint64_t(dim));
    const auto normal = [&](int64_t n) {
      std::vector<float> x(static_cast<size_t>(n));
      kit::fill_normal(random, x);
      return x;
    };
    std::vector<float> h = normal(kRows * dim), weight = normal(dim), dy = normal(kRows * dim),
                       dh = normal(kRows * dim);
    const auto wide = [](const std::vector<float>& x) { return std::vector<double>(x.begin(), x.end()); };
    Loss loss{kRows, dim, 0.25, wide(h), wide(weight), wide(dy), wide(dh)};
    std::vector<float> rstd, dx(h.size()), dw(weight.size());
    for (int64_t r = 0; r < kRows; ++r) rstd.push_back(float(loss.rstd(r)));
    kit::require_ok(kit::call(RmsnormBwd{.h = make_tensor(h.data(), Dtype::f32, kRows, dim),
                                         .weight = make_tensor(weight.data(), Dtype::f32, dim),
                                         .rstd = make_tensor(rstd.data(), Dtype::f32, kRows),
                                         .dy = make_tensor(dy.data(), Dtype::f32, kRows, dim),
                                         .dh = make_tensor(dh.data(), Dtype::f32, kRows, dim),
                                         .dx = make_tensor(dx.data(), Dtype::f32, kRows, dim),
                                         .dw = make_tensor(dw.data(), Dtype::f32, dim),
                                         .backend = "ref"}));
    // rstd is rounded to fp32, and so are the results; terms are of the order of 1, at most 2 / sqrt(eps) times that.
    for (size_t i = 0; i < dx.size(); ++i)
      ASSERT_NEAR(double(dx[i]), loss.derivative(loss.h[i]), 1e-5) << dim << ' ' << i;
    for (size_t c = 0; c < dw.size(); ++c) ASSERT_NEAR(double(dw[c]), loss.derivative(loss.weight[c]), 1e-5) << dim;
  }
}

TEST(RmsnormBwd, RandomCallsAreWithinTheBound) {
  for (uint64_t seed = 1; seed <= 120 && !testing::Test::HasFailure(); ++seed) {
    check_gradient(random_gradient_case(seed), "ref");
  }
}

TEST(RmsnormBwd, TheBoundNoticesAWrongElement) {
  constexpr int64_t kRows = 40, kDim = 1024;
  GradientCall call({.rows = kRows, .dim = kDim, .dx = Dtype::f32});
  const kit::RmsnormGradient exact = kit::exact_rmsnorm_bwd(call.args("ref"));
  GradientCall::Result r = call.run("ref");
  const Tensor dx = make_tensor(r.dx.data(), Dtype::f32, kRows, kDim), dw = make_tensor(r.dw.data(), Dtype::f32, kDim);
  ASSERT_EQ(kit::judge(exact, dx, dw), "");
  for (const auto& [t, at, name] :
       {std::tuple(&dx, 33 * kDim + 7, "dx[33, 7]"), std::tuple(&dw, int64_t(500), "dw[500]")}) {
    const float right = load_float(*t, at);
    store_float(*t, at, right + 0.002f);  // of values of the order of 1
    EXPECT_TRUE(kit::judge(exact, dx, dw).starts_with(name));
    store_float(*t, at, right);
  }
}

// The same as from dy in fp32, to the bit.
TEST(RmsnormBwd, Mxfp8IsWhatItDequantizesTo) {
  for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
    for (const ScaleLayout layout : {ScaleLayout::linear, ScaleLayout::atom128x4}) {
      if (block == MxBlock::square32 && layout == ScaleLayout::atom128x4) continue;
      const int64_t rows = 215, dim = 330;
      GradientCall call({.rows = rows,
                         .dim = dim,
                         .cu_seqlens = {0, 1, 1, 130, 200},
                         .dy = Dtype::e4m3,
                         .dx = Dtype::f32,
                         .block = block,
                         .layout = layout});
      const GradientCall::Result got = call.run("ref");
      RmsnormBwd args = call.args("ref");
      std::vector<float> dy(size_t(rows * dim)), dx(dy.size()), dw(static_cast<size_t>(dim));
      kit::require_ok(
          dequantize({.in = args.dy_mx, .out = make_tensor(dy.data(), Dtype::f32, rows, dim), .seq = args.seq}));
      args.dy_mx = {};
      args.dy = make_tensor(dy.data(), Dtype::f32, rows, dim);
      args.dx = make_tensor(dx.data(), Dtype::f32, rows, dim);
      args.dw = make_tensor(dw.data(), Dtype::f32, dim);
      kit::require_ok(kit::call(args));
      EXPECT_EQ(std::memcmp(dx.data(), got.dx.data(), got.dx.size()), 0);
      EXPECT_EQ(std::memcmp(dw.data(), got.dw.data(), got.dw.size()), 0);
    }
  }
}

TEST(RmsnormBwd, InPlaceIsTheSame) {
  GradientCase c{.rows = 70, .dim = 96, .dx = Dtype::f32, .dh = Dtype::f32};
  const GradientCall::Result apart = GradientCall(c).run("ref");
  c.in_place = true;
  EXPECT_TRUE(GradientCall(c).run("ref") == apart);
}

// Of every backend on the CPU: a NaN stays in its row of dx and in its column of dw.
TEST(RmsnormBwd, NanStaysWhereItIs) {
  for (const char* backend : {"ref", "cpu"}) {
    constexpr int64_t kRows = 70, kDim = 72, kRow = 33, kCol = 5;
    std::vector<float> h(kRows * kDim, 1.0f), weight(kDim, 2.0f), rstd(kRows, 1.0f), dy(h.size(), 0.5f), dx(h.size());
    std::vector<float> dw(weight.size());
    dy[kRow * kDim + kCol] = NAN;
    kit::require_ok(kit::call(RmsnormBwd{.h = make_tensor(h.data(), Dtype::f32, kRows, kDim),
                                         .weight = make_tensor(weight.data(), Dtype::f32, kDim),
                                         .rstd = make_tensor(rstd.data(), Dtype::f32, kRows),
                                         .dy = make_tensor(dy.data(), Dtype::f32, kRows, kDim),
                                         .dx = make_tensor(dx.data(), Dtype::f32, kRows, kDim),
                                         .dw = make_tensor(dw.data(), Dtype::f32, kDim),
                                         .backend = backend}));
    for (int64_t i = 0; i < kRows * kDim; ++i) ASSERT_EQ(std::isnan(dx[size_t(i)]), i / kDim == kRow) << backend;
    for (int64_t c = 0; c < kDim; ++c) ASSERT_EQ(std::isnan(dw[size_t(c)]), c == kCol) << backend;
  }
}

TEST(RmsnormBwd, WithoutRowsDwIsZero) {
  for (const char* backend : {"ref", "cpu"}) {
    std::vector<float> weight(40, 1.0f), dw(40, NAN);
    RmsnormBwd args{.h = make_tensor(nullptr, Dtype::bf16, 0, 40),
                    .weight = make_tensor(weight.data(), Dtype::f32, 40),
                    .rstd = make_tensor(nullptr, Dtype::f32, 0),
                    .dy = make_tensor(nullptr, Dtype::bf16, 0, 40),
                    .dx = make_tensor(nullptr, Dtype::bf16, 0, 40),
                    .dw = make_tensor(dw.data(), Dtype::f32, 40),
                    .backend = backend};
    kit::require_ok(kit::call(args));
    EXPECT_EQ(dw, std::vector<float>(40)) << backend;
    std::fill(dw.begin(), dw.end(), NAN);
    args.dy = {};
    args.dy_mx = make_mx_tensor(nullptr, nullptr, Dtype::e4m3, {}, {}, 0, 1, 40, {});
    args.dy_mx.data = make_tensor(nullptr, Dtype::e4m3, 0, 40);
    kit::require_ok(kit::call(args));
    EXPECT_EQ(dw, std::vector<float>(40)) << backend;
  }
  check_gradient({.rows = 50, .dim = 40, .cu_seqlens = {0, 0, 0}}, "ref");
}

}  // namespace
}  // namespace mxflash
