// A call of rmsnorm_bwd with all its tensors in host memory, for every backend (kit/call.h): shapes, dtypes, strides,
// sequences. What no row has is NaN in inputs and poison in outputs.
#pragma once

#include <gtest/gtest.h>
#include <mxflash/backend.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kit/call.h"
#include "kit/random.h"
#include "kit/rmsnorm_gradient.h"
#include "kit/runner.h"
#include "runtime/tensor_access.h"

namespace mxflash {

struct GradientCase {
  int64_t rows = 0, dim = 0;
  std::vector<int32_t> cu_seqlens{};  // rows at and after the last belong to no sequence
  int32_t batch = 1;                  // without cu_seqlens
  Dtype h = Dtype::bf16, weight = Dtype::bf16, dy = Dtype::bf16, dx = Dtype::bf16, dw = Dtype::f32;
  Dtype dh = Dtype::none;
  bool in_place = false;  // dx is dh
  MxBlock block = MxBlock::square32;
  ScaleLayout layout = ScaleLayout::linear;  // of dy e4m3 or e5m2
  int64_t gap = 0;                           // elements between rows
  bool wild = false;                         // rows of any size, with NaN and Inf here and there
  uint64_t seed = 1;
};

inline void PrintTo(const GradientCase& c, std::ostream* os) {
  *os << c.rows << " x " << c.dim << ", batch " << c.batch << ", h " << dtype_name(c.h) << ", weight "
      << dtype_name(c.weight) << ", dy " << dtype_name(c.dy) << ", dh " << dtype_name(c.dh) << ", dx "
      << dtype_name(c.dx) << ", dw " << dtype_name(c.dw) << ", in place " << c.in_place << ", block " << int(c.block)
      << ", layout " << int(c.layout) << ", gap " << c.gap << ", wild " << c.wild << ", seed " << c.seed
      << ", cu_seqlens";
  for (const int32_t start : c.cu_seqlens) *os << ' ' << start;
}

class GradientCall {
 public:
  explicit GradientCall(const GradientCase& c)
      : case_(c),
        h_(matrix(c.h, 0xFF)),
        dh_(c.dh == Dtype::none ? std::vector<uint8_t>() : matrix(c.dh, 0xFF)),
        dy_(matrix(is_mx() ? Dtype::bf16 : c.dy, 0xFF)),
        weight_(size_t(c.dim * dtype_size(c.weight))),
        rstd_(size_t(c.rows), NAN) {
    kit::Random random(c.seed, 11);
    fill(random, h_, c.h);
    fill(random, dy_, is_mx() ? Dtype::bf16 : c.dy);
    if (c.dh != Dtype::none) fill(random, dh_, c.dh);
    for (int64_t i = 0; i < c.dim; ++i) {
      store_float(make_tensor(weight_.data(), c.weight, c.dim), i, float(random.normal()));
    }
    for (int64_t r = 0; r < inside(); ++r) {
      double squares = 0;
      for (int64_t i = 0; i < c.dim; ++i) {
        const double x = double(load_float(view(h_, c.h), r * (c.dim + c.gap) + i));
        squares += x * x;
      }
      rstd_[size_t(r)] = float(1 / std::sqrt(squares / double(c.dim) + 1e-6));
    }
    if (!is_mx()) return;
    const Jagged s = seq();
    mx_ = kit::make_owned_mx(c.dy, c.block, c.layout, c.rows, 1, c.dim, s);
    mx_.view.data = make_tensor(mx_.data.data(), c.dy, c.rows, c.dim);
    kit::require_ok(quantize({.in = view(dy_, Dtype::bf16), .out = mx_.view, .seq = s, .backend = "ref"}));
    // NaN where nothing is: rows of no sequence, scales of padding (no block here is all zeros).
    std::fill(mx_.data.begin() + inside() * c.dim, mx_.data.end(), uint8_t(0x7F));
    std::ranges::replace(mx_.scale, uint8_t(0), uint8_t(0xFF));
  }

  RmsnormBwd args(const char* backend) {
    const GradientCase& c = case_;
    RmsnormBwd a{.h = view(h_, c.h),
                 .weight = make_tensor(weight_.data(), c.weight, c.dim),
                 .rstd = make_tensor(rstd_.data(), Dtype::f32, c.rows),
                 .dx = {},
                 .dw = {},
                 .seq = seq(),
                 .backend = backend};
    if (is_mx()) {
      a.dy_mx = mx_.view;
    } else {
      a.dy = view(dy_, c.dy);
    }
    if (c.dh != Dtype::none) a.dh = view(dh_, c.dh);
    return a;
  }

  struct Result {
    std::vector<uint8_t> dx, dw;
    friend bool operator==(const Result&, const Result&) = default;
  };
  Result run(const char* backend) {
    const GradientCase& c = case_;
    RmsnormBwd a = args(backend);
    Result r{c.in_place ? dh_ : matrix(c.dx, 0xA5), std::vector<uint8_t>(size_t(c.dim * dtype_size(c.dw)), 0xA5)};
    a.dx = view(r.dx, c.in_place ? c.dh : c.dx);
    a.dw = make_tensor(r.dw.data(), c.dw, c.dim);
    if (c.in_place) a.dh = a.dx;
    const Status status = kit::call(a);
    EXPECT_TRUE(status.ok()) << status.message;
    return r;
  }
  // Runs, and holds the results to fp64; gaps between rows stay as they were.
  Result run_and_judge(const char* backend) {
    const GradientCase& c = case_;
    const kit::RmsnormGradient exact = kit::exact_rmsnorm_bwd(args(backend));
    Result r = run(backend);
    const Dtype dx = c.in_place ? c.dh : c.dx;
    EXPECT_EQ(kit::judge(exact, view(r.dx, dx), make_tensor(r.dw.data(), c.dw, c.dim)), "");
    const int64_t size = dtype_size(dx);
    for (int64_t row = 0; row < c.rows; ++row) {
      for (int64_t i = c.dim * size; i < (c.dim + c.gap) * size; ++i) {
        const uint8_t byte = r.dx[size_t(row * (c.dim + c.gap) * size + i)];
        if (byte != (c.in_place ? 0xFF : 0xA5)) {
          ADD_FAILURE() << "written behind row " << row;
          return r;
        }
      }
    }
    return r;
  }

 private:
  bool is_mx() const { return is_fp8_dtype(case_.dy); }
  int64_t inside() const { return case_.cu_seqlens.empty() ? case_.rows : case_.cu_seqlens.back(); }
  Jagged seq() const {
    if (case_.cu_seqlens.empty()) return {.batch = case_.batch};
    return {.cu_seqlens = case_.cu_seqlens.data(),
            .batch = int32_t(case_.cu_seqlens.size()) - 1,
            .max_seqlen = int32_t(case_.rows)};
  }
  std::vector<uint8_t> matrix(Dtype dtype, uint8_t fill) const {
    return std::vector<uint8_t>(size_t(case_.rows * (case_.dim + case_.gap) * dtype_size(dtype)), fill);
  }
  Tensor view(std::vector<uint8_t>& bytes, Dtype dtype) const {
    Tensor t = make_tensor(bytes.data(), dtype, case_.rows, case_.dim);
    t.stride[0] = case_.dim + case_.gap;
    return t;
  }
  void fill(kit::Random& random, std::vector<uint8_t>& bytes, Dtype dtype) const {
    const Tensor t = view(bytes, dtype);
    for (int64_t r = 0; r < inside(); ++r) {
      const int exponent = case_.wild ? int(random.below(20)) - 12 : 0;
      for (int64_t c = 0; c < case_.dim; ++c) {
        // Large tensors want cheap values.
        float x = case_.wild ? std::ldexp(float(random.normal()), exponent)
                             : float(int64_t(random.bits() >> 40) - (1 << 23)) * 0x1p-22f;
        if (case_.wild && random.below(20000) == 0) x = random.below(2) ? NAN : INFINITY;
        store_float(t, r * t.stride[0] + c, x);
      }
    }
  }

  GradientCase case_;
  std::vector<uint8_t> h_, dh_, dy_, weight_;
  std::vector<float> rstd_;
  kit::OwnedMx mx_;
};

// A call of any kind.
inline GradientCase random_gradient_case(uint64_t seed) {
  kit::Random random(seed, 5);
  const auto pick = [&]<class T>(std::initializer_list<T> of) { return of.begin()[random.below(int64_t(of.size()))]; };
  GradientCase c{.seed = seed};
  if (random.below(2)) {
    c.cu_seqlens = {0};
    for (int64_t b = random.below(6) + 1; b > 0; --b) {
      c.cu_seqlens.push_back(c.cu_seqlens.back() + int32_t(random.below(120)));
    }
    c.rows = c.cu_seqlens.back() + random.below(2) * random.below(90);
  } else {
    c.batch = int32_t(random.below(3)) + 1;
    c.rows = c.batch * random.below(150);
  }
  c.dim = random.below(3) ? 8 * (random.below(150) + 1) : random.below(1200) + 1;
  if (random.below(8) == 0) c.dim = 16 * (random.below(500) + 1);
  const auto any_float = [&] { return pick({Dtype::bf16, Dtype::bf16, Dtype::bf16, Dtype::f16, Dtype::f32}); };
  c.h = any_float();
  c.weight = any_float();
  c.dx = any_float();
  c.dw = random.below(2) ? Dtype::f32 : c.weight;
  c.dy = random.below(2) ? any_float() : pick({Dtype::e4m3, Dtype::e5m2});
  if (random.below(2)) c.dh = any_float();
  c.in_place = c.dh != Dtype::none && random.below(2);
  c.block = pick({MxBlock::square32, MxBlock::row32, MxBlock::col32});
  if (c.block != MxBlock::square32 && random.below(2)) c.layout = ScaleLayout::atom128x4;
  c.gap = random.below(3) ? 0 : 8 * random.below(4);
  c.wild = random.below(3) == 0;
  return c;
}

inline void check_gradient(const GradientCase& c, const char* backend) {
  SCOPED_TRACE(testing::PrintToString(c));
  GradientCall call(c);
  const GradientCall::Result first = call.run_and_judge(backend);
  set_num_threads(num_threads() > 1 ? 1 : 3);
  EXPECT_TRUE(call.run(backend) == first) << "another run, another number of threads";
  set_num_threads(0);
}

}  // namespace mxflash
