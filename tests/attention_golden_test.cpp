// Attention results known beforehand: small enough for a hand, or for a scalar program that shares nothing with src/.
#include <gtest/gtest.h>
#include <mxflash/attention.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kit/random.h"
#include "kit/runner.h"

namespace mxflash {
namespace {

using kit::OwnedMx;
using kit::require_ok;

constexpr int64_t kDim = 8;

// One head, one sequence, head_dim 8; values that MXFP8 holds exactly.
struct Small {
  int64_t queries = 1, keys = 2;
  std::vector<float> q, k, v, dout;
  float softmax_scale = 1;
  Dtype ds_dtype = Dtype::e4m3, dq_accum = Dtype::f32;
  std::vector<float> out, lse, dq, dk, dv;

  Small(int64_t num_queries, int64_t num_keys) : queries(num_queries), keys(num_keys) {
    for (auto* x : {&q, &dout, &out, &dq}) x->assign(size_t(queries * kDim), 0.0f);
    for (auto* x : {&k, &v, &dk, &dv}) x->assign(size_t(keys * kDim), 0.0f);
    lse.assign(size_t(queries), 0.0f);
  }

  // The forward is skipped to give the backward an out and lse of the test's own.
  void run(bool forward = true) {
    const OwnedMx mq = mx(q, queries), mk = mx(k, keys), mv = mx(v, keys), mdo = mx(dout, queries);
    AttentionFwd f{.q = mq.view,
                   .k = mk.view,
                   .v = mv.view,
                   .out = tensor(out, queries),
                   .lse = make_tensor(lse.data(), Dtype::f32, 1, queries),
                   .softmax_scale = softmax_scale};
    const kit::AlignedBuffer fwd_workspace(attention_fwd_workspace(f));
    f.workspace = fwd_workspace.data();
    f.workspace_size = fwd_workspace.size();
    if (forward) require_ok(attention_fwd(f));
    AttentionBwd b{.q = mq.view,
                   .k = mk.view,
                   .v = mv.view,
                   .dout = mdo.view,
                   .out = f.out,
                   .lse = f.lse,
                   .dq = tensor(dq, queries),
                   .dk = tensor(dk, keys),
                   .dv = tensor(dv, keys),
                   .ds_dtype = ds_dtype,
                   .dq_accum = dq_accum,
                   .softmax_scale = softmax_scale};
    const kit::AlignedBuffer bwd_workspace(attention_bwd_workspace(b));
    b.workspace = bwd_workspace.data();
    b.workspace_size = bwd_workspace.size();
    require_ok(attention_bwd(b));
  }

 private:
  static Tensor tensor(std::vector<float>& x, int64_t tokens) {
    return make_tensor(x.data(), Dtype::f32, tokens, 1, kDim);
  }
  static OwnedMx mx(std::vector<float>& x, int64_t tokens) {
    OwnedMx t = kit::quantize_floats(x, tokens, 1, kDim, {}, Dtype::e4m3, MxBlock::row32);
    EXPECT_EQ(kit::dequantize_to_floats(t.view, {}), x) << "the test's operands must be exact";
    return t;
  }
};

// ---- by hand ----------------------------------------------------------------------------------------------------

// q = 0: P = 1/2, 1/2. dP = n/32, 0, so delta = n/64 and dS = +-n/128. The block's scale lets its amax use the whole
// range of E4M3, so dS has four bits: from 16 to 32 the odd numbers are ties, which go to a multiple of 4.
TEST(AttentionGolden, DsOfTwoKeysByHand) {
  const struct { float n, rounded; } cases[] = {{16, 16}, {17, 16}, {18, 18}, {19, 20}, {21, 20}, {23, 24}};
  for (const auto& c : cases) {
    Small a(1, 2);
    a.dout[0] = a.dout[1] = 1;
    a.v[0] = 16.0f / 32;  // in two channels, since one cannot hold n
    a.v[1] = (c.n - 16) / 32;
    a.k[0] = 1;
    a.k[1] = -2;
    a.k[8] = 3;
    a.k[10] = 4;
    a.run();
    const float ds = c.rounded / 128;
    EXPECT_FLOAT_EQ(a.lse[0], std::log(2.0f));
    EXPECT_EQ(a.out, (std::vector<float>{0.25f, (c.n - 16) / 64, 0, 0, 0, 0, 0, 0}));
    EXPECT_EQ(a.dq, (std::vector<float>{ds * (1 - 3), -2 * ds, -4 * ds, 0, 0, 0, 0, 0})) << c.n;
    EXPECT_EQ(a.dk, std::vector<float>(16)) << "q = 0";
    EXPECT_EQ(a.dv, (std::vector<float>{0.5f, 0.5f, 0, 0, 0, 0, 0, 0, 0.5f, 0.5f, 0, 0, 0, 0, 0, 0}));
  }
  // E5M2 keeps three bits: 18 and 22 are ties between multiples of 4, and go to a multiple of 8.
  for (const auto& c : {std::pair(18.0f, 16.0f), std::pair(19.0f, 20.0f), std::pair(22.0f, 24.0f)}) {
    Small a(1, 2);
    a.ds_dtype = Dtype::e5m2;
    a.dout[0] = a.dout[1] = 1;
    a.v[0] = 16.0f / 32;
    a.v[1] = (c.first - 16) / 32;
    a.k[0] = 1;
    a.run();
    EXPECT_EQ(a.dq[0], c.second / 128) << c.first;
  }
}

// ---- by another program -----------------------------------------------------------------------------------------

// x to the nearest n * 2^e with n of `bits` bits, ties to even; e at least `least`.
double round_to_bits(double x, int bits, int least) {
  if (x == 0) return 0;
  const int e = std::max(std::ilogb(x) - (bits - 1), least);
  return std::ldexp(std::nearbyint(std::ldexp(x, -e)), e);
}
double round_e4m3(double x) { return round_to_bits(x, 4, -9); }

// dq, dk, dv of `a` (no more than 32 rows and keys: one block of dS) by the formulas of attention.h, from a.out, a.lse.
void scalar_backward(const Small& a, std::vector<double>& dq, std::vector<double>& dk, std::vector<double>& dv) {
  const auto dot = [](const std::vector<float>& x, int64_t i, const std::vector<float>& y, int64_t j) {
    double sum = 0;
    for (int64_t c = 0; c < kDim; ++c) sum += double(x[size_t(i * kDim + c)]) * double(y[size_t(j * kDim + c)]);
    return sum;
  };
  const size_t n = size_t(a.queries * a.keys);
  std::vector<double> p(n), ds(n);
  double amax = 0, least_exponent = 255;
  for (int64_t i = 0; i < a.queries; ++i) {
    double largest = -HUGE_VAL;
    const double delta = dot(a.out, i, a.dout, i);
    for (int64_t j = 0; j < a.keys; ++j) {
      const size_t at = size_t(i * a.keys + j);
      const double score = double(a.softmax_scale) * dot(a.q, i, a.k, j);
      largest = std::max(largest, score);
      p[at] = std::exp(score - double(a.lse[size_t(i)]));
      ds[at] = p[at] * (dot(a.dout, i, a.v, j) - delta);
      amax = std::max(amax, std::abs(ds[at]));
    }
    least_exponent = std::min(least_exponent, std::floor((double(a.lse[size_t(i)]) - largest) / std::log(2.0)));
  }
  int e = -127;  // the least with amax <= 448 * 2^e
  while (amax > std::ldexp(448, e)) ++e;
  const int p_exponent = 8 + int(std::max(least_exponent, 0.0));
  for (double& x : ds) x = std::ldexp(round_e4m3(std::ldexp(x, -e)), e);
  for (double& x : p) x = std::ldexp(round_e4m3(std::ldexp(x, p_exponent)), -p_exponent);
  dq.assign(a.q.size(), 0);
  dk.assign(a.k.size(), 0);
  dv.assign(a.v.size(), 0);
  for (int64_t i = 0; i < a.queries; ++i) {
    for (int64_t j = 0; j < a.keys; ++j) {
      for (int64_t c = 0; c < kDim; ++c) {
        const size_t at = size_t(i * a.keys + j), qi = size_t(i * kDim + c), kj = size_t(j * kDim + c);
        dq[qi] += double(a.softmax_scale) * ds[at] * double(a.k[kj]);
        dk[kj] += double(a.softmax_scale) * ds[at] * double(a.q[qi]);
        dv[kj] += p[at] * double(a.dout[qi]);
      }
    }
  }
}

TEST(AttentionGolden, BackwardEqualsAScalarProgram) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    kit::Random random(seed, 9);
    Small a(1 + random.below(32), 1 + random.below(32));
    a.softmax_scale = 0.25f;
    for (auto* x : {&a.q, &a.k, &a.v, &a.dout}) {
      for (float& value : *x) value = float(random.below(17) - 8) / 8;
    }
    // Many keys alike and a few with a small P: in E4M3 it depends on the exponent that the many allow.
    if (seed >= 20) {
      a = Small(a.queries, 28 + a.keys % 5);
      for (float& value : a.q) value = 1 + float(random.below(3)) / 8;
      for (auto* x : {&a.v, &a.dout}) {
        for (float& value : *x) value = float(random.below(17) - 8) / 8;
      }
      std::fill(a.k.end() - 4 * kDim, a.k.end(), -1.0f);
      a.softmax_scale = 1;
    }
    a.run();
    std::vector<double> dq, dk, dv;
    scalar_backward(a, dq, dk, dv);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", " << a.queries << " x " << a.keys);
    // Both round the same dS and P. What differs is fp64 roundoff and the result's own rounding to fp32.
    const auto expect_equal = [](const std::vector<float>& got, const std::vector<double>& want) {
      double size = 0;
      for (const double x : want) size = std::max(size, std::abs(x));
      for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 0x1p-23 * size) << i;
    };
    expect_equal(a.dq, dq);
    expect_equal(a.dk, dk);
    expect_equal(a.dv, dv);
  }
}

// ---- dq in fp16 ---------------------------------------------------------------------------------------------------

// dq / softmax_scale of one row whose key tiles (of 128 keys) sum to these many units of 2^-12, each below 2^16. With
// q = 0, out = 0 and lse = 0, P = 1 and dS = dout.v = +-2^-12; powers of two in k make up the number.
float accumulated(const std::vector<int64_t>& tiles, Dtype accumulator, float softmax_scale = 1) {
  Small a(1, 128 * int64_t(tiles.size()));
  a.softmax_scale = softmax_scale;
  a.dq_accum = accumulator;
  a.dout[0] = 0x1p-12f;
  for (size_t t = 0; t < tiles.size(); ++t) {
    for (int bit = 0; bit < 16; ++bit) {
      const size_t key = t * 128 + size_t(bit);
      if ((std::abs(tiles[t]) >> bit & 1) == 0) continue;
      a.v[key * kDim] = tiles[t] > 0 ? 1.0f : -1.0f;
      a.k[key * kDim + 3] = std::ldexp(1.0f, bit);
    }
  }
  a.run(/*forward=*/false);
  for (size_t c = 0; c < size_t(kDim); ++c) EXPECT_TRUE(c == 3 || a.dq[c] == 0);
  return a.dq[3] / softmax_scale;
}
float units(int64_t n) { return float(n) * 0x1p-12f; }

TEST(AttentionGolden, HalfAccumulationOfDqIsExactForSmallSums) {
  for (const float scale : {1.0f, 0.125f}) {
    for (const auto& tiles : {std::vector<int64_t>{1}, {-1}, {2048}, {1000, 1047}, {1, 2, 4, 8}, {2047, -2046}}) {
      int64_t sum = 0;
      for (const int64_t t : tiles) sum += t;
      EXPECT_EQ(accumulated(tiles, Dtype::f16, scale), units(sum)) << sum;
      EXPECT_EQ(accumulated(tiles, Dtype::f32, scale), units(sum)) << sum;
    }
  }
}

// The partial sum of a tile and the running sum are each rounded to 11 bits, ties to even.
TEST(AttentionGolden, HalfAccumulationOfDqRoundsPartialAndSum) {
  EXPECT_EQ(accumulated({2049}, Dtype::f16), units(2048));
  EXPECT_EQ(accumulated({2051}, Dtype::f16), units(2052));
  EXPECT_EQ(accumulated({2048, 1}, Dtype::f16), units(2048)) << "the running sum";
  EXPECT_EQ(accumulated({1, 2049}, Dtype::f16), units(2048)) << "the partial sum, or it would be 2050";
  EXPECT_EQ(accumulated({-2048, -3}, Dtype::f16), units(-2052));
  EXPECT_EQ(accumulated({1, 2049}, Dtype::f32), units(2050));
}

// 16 is 2^16 units, the largest fp16 number 65504 of them; what is nearer to 2^16 is Inf, and stays it.
TEST(AttentionGolden, HalfAccumulationOfDqOverflowsAtSixteen) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float scale : {1.0f, 0.125f}) {
    for (const int64_t sign : {1, -1}) {
      const float inf = float(sign) * kInf;
      EXPECT_EQ(accumulated({sign * 65504}, Dtype::f16, scale), units(sign * 65504));
      EXPECT_EQ(accumulated({sign * 65519}, Dtype::f16, scale), units(sign * 65504));
      EXPECT_EQ(accumulated({sign * 65520}, Dtype::f16, scale), inf);
      EXPECT_EQ(accumulated({sign * 32768, sign * 32736}, Dtype::f16, scale), units(sign * 65504));
      EXPECT_EQ(accumulated({sign * 32768, sign * 32768}, Dtype::f16, scale), inf) << "exactly 16";
      EXPECT_EQ(accumulated({sign * 65504, sign * 15}, Dtype::f16, scale), units(sign * 65504));
      EXPECT_EQ(accumulated({sign * 65504, sign * 16}, Dtype::f16, scale), inf);
      EXPECT_EQ(accumulated({sign * 32768, sign * 32768, -sign * 32768}, Dtype::f16, scale), inf) << "stays";
      EXPECT_EQ(accumulated({sign * 32768, sign * 32768}, Dtype::f32, scale), float(sign) * 16);
    }
  }
}

}  // namespace
}  // namespace mxflash
