// gemm_quantize: quantizing the fp32 accumulators, and a probe with distinct scales per row and block, where a wrong
// scale index gives a wrong number instead of a slightly lower cosine.
#include <gtest/gtest.h>
#include <mxflash/gemm.h>

#include <cmath>
#include <vector>

#include "kit/random.h"
#include "kit/runner.h"
#include "mx/float16.h"

namespace mxflash {
namespace {

using kit::require_ok;

std::vector<uint16_t> normal_bf16(int64_t n, uint64_t stream) {
  std::vector<float> x(size_t(n), 0.0f);
  kit::Random random(4, stream);
  kit::fill_normal(random, x);
  std::vector<uint16_t> y;
  for (const float value : x) y.push_back(encode_bf16(value));
  return y;
}

TEST(GemmQuantize, EqualsQuantizeOfTheAccumulators) {
  const int64_t m = 75, k = 48, heads = 3, dim = 40, n = heads * dim;
  const std::vector<int32_t> cu = {0, 33, 33, 70};
  const Jagged seq{.cu_seqlens = cu.data(), .batch = 3, .max_seqlen = 37};
  std::vector<uint16_t> a = normal_bf16(m * k, 1), b = normal_bf16(n * k, 2);
  for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
    std::vector<float> c(size_t(m * n), NAN), want(size_t(m * n), 0.0f);
    kit::OwnedMx out = kit::make_owned_mx(Dtype::e4m3, block, ScaleLayout::linear, m, heads, dim, seq);
    require_ok(gemm_quantize({.a = make_tensor(a.data(), Dtype::bf16, m, k),
                              .b = make_tensor(b.data(), Dtype::bf16, n, k),
                              .out = out.view,
                              .c = make_tensor(c.data(), Dtype::f32, m, heads, dim),
                              .seq = seq}));
    for (int64_t i = 0; i < 70; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        float& acc = want[size_t(i * n + j)];
        for (int64_t d = 0; d < k; ++d) acc += decode_bf16(a[size_t(i * k + d)]) * decode_bf16(b[size_t(j * k + d)]);
      }
    }
    EXPECT_EQ(c, want) << "rows of no sequence are zero";
    const kit::OwnedMx expected = kit::quantize_floats(want, m, heads, dim, seq, Dtype::e4m3, block);
    EXPECT_EQ(out.data, expected.data);
    EXPECT_EQ(out.scale, expected.scale);
  }
}

TEST(GemmQuantize, DistinctScalePerRowAndBlock) {
  // a = identity, b[j][i] = 2^((i % 13) - (j / 32)): c[i][j] is that power of two, so every row has its own scale.
  const int64_t m = 64, n = 96;
  std::vector<float> a(size_t(m * m), 0.0f), b(size_t(n * m), 0.0f);
  for (int64_t i = 0; i < m; ++i) a[size_t(i * m + i)] = 1;
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) b[size_t(j * m + i)] = std::ldexp(1.0f, int(i % 13 - j / 32));
  }
  kit::OwnedMx out = kit::make_owned_mx(Dtype::e4m3, MxBlock::row32, ScaleLayout::linear, m, 1, n, {});
  MxTensor view = out.view;
  view.data = make_tensor(out.data.data(), Dtype::e4m3, m, n);
  require_ok(gemm_quantize(
      {.a = make_tensor(a.data(), Dtype::f32, m, m), .b = make_tensor(b.data(), Dtype::f32, n, m), .out = view}));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      EXPECT_EQ(out.data[size_t(i * n + j)], 0x78) << "256 = 2^8 in every block";
      EXPECT_EQ(out.scale[size_t(i * 3 + j / 32)], 127 - 8 + i % 13 - j / 32);
    }
  }
}

}  // namespace
}  // namespace mxflash
