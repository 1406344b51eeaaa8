// rmsnorm_quantize: bit for bit RMSNorm to BF16 and then quantize, with the documented order of the sum.
#include <gtest/gtest.h>
#include <mxflash/rmsnorm.h>

#include <cmath>
#include <vector>

#include "kit/random.h"
#include "kit/runner.h"
#include "mx/float16.h"
#include "rmsnorm/rmsnorm_sum.h"

namespace mxflash {
namespace {

using kit::require_ok;

std::vector<float> normal(int64_t n, uint64_t stream) {
  std::vector<float> x(size_t(n), 0.0f);
  kit::Random random(3, stream);
  kit::fill_normal(random, x);
  return x;
}

std::vector<uint16_t> to_bf16(const std::vector<float>& x) {
  std::vector<uint16_t> y;
  for (const float value : x) y.push_back(encode_bf16(value));
  return y;
}

struct Case {
  int64_t rows, dim;
  bool residual;
  MxBlock block;
};

class RmsnormQuantizeTest : public testing::TestWithParam<Case> {};

TEST_P(RmsnormQuantizeTest, EqualsNormThenQuantize) {
  const auto [rows, dim, with_residual, block] = GetParam();
  std::vector<uint16_t> in = to_bf16(normal(rows * dim, 1)), residual = to_bf16(normal(rows * dim, 2));
  std::vector<float> weight = normal(dim, 3);
  const std::vector<uint16_t> residual_before = residual;
  std::vector<uint16_t> y(in.size());
  std::vector<float> rstd(size_t(rows), 0.0f);
  kit::OwnedMx out = kit::make_owned_mx(Dtype::e4m3, block, ScaleLayout::linear, rows, 1, dim, {});
  MxTensor view = out.view;
  view.data = make_tensor(out.data.data(), Dtype::e4m3, rows, dim);
  RmsnormQuantize args{.in = make_tensor(in.data(), Dtype::bf16, rows, dim),
                       .weight = make_tensor(weight.data(), Dtype::f32, dim),
                       .eps = 1e-5f,
                       .out = view,
                       .y = make_tensor(y.data(), Dtype::bf16, rows, dim),
                       .rstd = make_tensor(rstd.data(), Dtype::f32, rows)};
  if (with_residual) args.residual = make_tensor(residual.data(), Dtype::bf16, rows, dim);
  require_ok(rmsnorm_quantize(args));

  std::vector<float> want(in.size());
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<float> h(size_t(dim), 0.0f);
    double exact = 0;
    for (int64_t c = 0; c < dim; ++c) {
      const auto i = size_t(r * dim + c);
      h[size_t(c)] = decode_bf16(in[i]);
      if (with_residual) {
        h[size_t(c)] = decode_bf16(encode_bf16(h[size_t(c)] + decode_bf16(residual_before[i])));
        EXPECT_EQ(decode_bf16(residual[i]), h[size_t(c)]);
      }
      exact += double(h[size_t(c)]) * double(h[size_t(c)]);
    }
    float lane[1024] = {};
    for (int64_t c = 0; c < dim; ++c) lane[c % 1024] += h[size_t(c)] * h[size_t(c)];
    for (int64_t half = 512; half > 0; half /= 2) {
      for (int64_t l = 0; l < half; ++l) lane[l] += lane[l + half];
    }
    EXPECT_NEAR(lane[0] / exact, 1, 1e-6);
    EXPECT_EQ(rstd[size_t(r)], 1.0f / std::sqrt(lane[0] / float(dim) + 1e-5f));
    for (int64_t c = 0; c < dim; ++c) {
      const auto i = size_t(r * dim + c);
      const uint16_t rounded = encode_bf16(h[size_t(c)] * rstd[size_t(r)] * weight[size_t(c)]);
      EXPECT_EQ(y[i], rounded);
      want[i] = decode_bf16(rounded);
    }
  }
  const kit::OwnedMx expected = kit::quantize_floats(want, rows, 1, dim, {}, Dtype::e4m3, block);
  EXPECT_EQ(out.data, expected.data);
  EXPECT_EQ(out.scale, expected.scale);
  EXPECT_TRUE(with_residual || residual == residual_before);
}

INSTANTIATE_TEST_SUITE_P(Shapes, RmsnormQuantizeTest,
                         testing::Values(Case{1, 128, false, MxBlock::square32}, Case{70, 128, true, MxBlock::square32},
                                         Case{33, 100, false, MxBlock::square32}, Case{40, 1536, true, MxBlock::row32},
                                         Case{5, 4096, false, MxBlock::col32}, Case{2, 16384, true, MxBlock::square32},
                                         Case{3, 1, false, MxBlock::row32}));

// Rows that belong to no sequence: inputs are not read, the residual is not written, outputs are zero.
TEST(RmsnormQuantize, SlackRowsAreZero) {
  constexpr int64_t kRows = 50, kInside = 41, kDim = 64;
  const int32_t cu[] = {0, 33, kInside};
  const Jagged seq{cu, 2, 33};
  for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
    std::vector<float> in = normal(kRows * kDim, 1), residual = normal(kRows * kDim, 2), weight = normal(kDim, 3);
    std::fill(in.begin() + kInside * kDim, in.end(), NAN);
    std::fill(residual.begin() + kInside * kDim, residual.end(), -3.0f);
    std::vector<uint16_t> y(in.size(), 0xFFFF);
    std::vector<float> rstd(size_t(kRows), NAN);
    kit::OwnedMx out = kit::make_owned_mx(Dtype::e4m3, block, ScaleLayout::linear, kRows, 1, kDim, seq);
    std::fill(out.data.begin(), out.data.end(), uint8_t(0xAB));
    std::fill(out.scale.begin(), out.scale.end(), uint8_t(0xAB));
    MxTensor view = out.view;
    view.data = make_tensor(out.data.data(), Dtype::e4m3, kRows, kDim);
    require_ok(rmsnorm_quantize({.in = make_tensor(in.data(), Dtype::f32, kRows, kDim),
                                 .weight = make_tensor(weight.data(), Dtype::f32, kDim),
                                 .residual = make_tensor(residual.data(), Dtype::f32, kRows, kDim),
                                 .out = view,
                                 .y = make_tensor(y.data(), Dtype::bf16, kRows, kDim),
                                 .rstd = make_tensor(rstd.data(), Dtype::f32, kRows),
                                 .seq = seq}));
    for (int64_t r = 0; r < kRows; ++r) {
      const bool inside = r < kInside;
      EXPECT_EQ(rstd[size_t(r)] > 0, inside) << r;
      EXPECT_TRUE(inside || rstd[size_t(r)] == 0) << r;
      for (int64_t c = 0; c < kDim; ++c) {
        const size_t i = size_t(r * kDim + c);
        if (inside) {
          ASSERT_NE(y[i], 0xFFFF);
          continue;
        }
        ASSERT_EQ(y[i], 0);
        ASSERT_EQ(out.data[i], 0);
        ASSERT_EQ(residual[i], -3);
      }
    }
    // 33 + 8 rows: what no block covers has scale 0.
    const size_t height = block == MxBlock::row32 ? 1 : 32, width = block == MxBlock::col32 ? 64 : 2;
    for (size_t r = 0; r < out.scale.size() / width; ++r) {
      const size_t row = r * height;
      const bool covered = row < 33 || (row >= 128 && row < 128 + 8);
      for (size_t c = 0; c < width; ++c) {
        EXPECT_EQ(out.scale[r * width + c] != 0, covered) << "padded row " << row;
        EXPECT_NE(out.scale[r * width + c], 0xAB);
      }
    }
  }
}

TEST(RmsnormQuantize, NanRowStaysInItsBlocks) {
  std::vector<float> in = normal(64 * 64, 1), weight(64, 1.0f);
  in[5] = NAN;
  kit::OwnedMx out = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, 64, 1, 64, {});
  MxTensor view = out.view;
  view.data = make_tensor(out.data.data(), Dtype::e4m3, 64, 64);
  require_ok(rmsnorm_quantize({.in = make_tensor(in.data(), Dtype::f32, 64, 64),
                               .weight = make_tensor(weight.data(), Dtype::f32, 64),
                               .out = view}));
  EXPECT_EQ(out.scale[0], 255);
  EXPECT_EQ(out.scale[1], 255) << "the row's rstd is NaN";
  EXPECT_NE(out.scale[2], 255);
  EXPECT_NE(out.scale[3], 255);
}

}  // namespace
}  // namespace mxflash
