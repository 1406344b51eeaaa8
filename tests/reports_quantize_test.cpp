// What users of FP8 and MXFP8 libraries reported about quantizers, each as the smallest input that shows it. The number
// in a test's name is its row in docs/reports.md, which also lists what is excluded and why.
#include <gtest/gtest.h>
#include <mxflash/backend.h>
#include <mxflash/gemm.h>
#include <mxflash/quantize.h>
#include <mxflash/rmsnorm.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "kit/random.h"
#include "kit/runner.h"
#include "mx/float16.h"
#include "mx/fp8.h"

namespace mxflash {
namespace {

using kit::OwnedMx;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr MxBlock kBlocks[] = {MxBlock::square32, MxBlock::row32, MxBlock::col32};
constexpr MxRule kRules[] = {MxRule::rceil, MxRule::floor};
const float kBf16Max = decode_bf16(0x7F7F);

struct BlockBytes {
  int scale;
  std::vector<uint8_t> payload;
  std::vector<float> values;  // dequantized
};

// At most 32 values as one block: along the tokens for col32, along the channels otherwise.
BlockBytes quantize_block(const std::vector<float>& x, MxBlock block, MxRule rule = MxRule::rceil,
                          Dtype element = Dtype::e4m3) {
  const auto n = int64_t(x.size());
  const int64_t tokens = block == MxBlock::col32 ? n : 1;
  const OwnedMx t = kit::quantize_floats(x, tokens, 1, n / tokens, {}, element, block, rule);
  return {t.scale[0], t.data, kit::dequantize_to_floats(t.view, {})};
}

// A block of zeros with x in the middle.
std::vector<float> block_with(float x) {
  std::vector<float> block(32, 0.0f);
  block[13] = x;
  return block;
}

TEST(Reports, A0_GoldenScales) {
  const struct {
    float amax;
    int rceil, floor;
    float element;  // what amax becomes under rceil, in units of the scale
  } golden[] = {
      {0, 0, 0, 0},
      {448, 127, 127, 448},
      {std::nextafter(448.0f, kInf), 128, 127, 224},
      {450, 128, 127, 224},
      {465, 128, 127, 240},
      {480, 128, 127, 240},
      {496, 128, 127, 256},
      {std::nextafter(512.0f, 0.0f), 128, 127, 256},
      {512, 128, 128, 256},
      {957, 129, 128, 240},
      {150, 126, 126, 288},
      {1.75f, 119, 119, 448},
      {std::nextafter(1.75f, kInf), 120, 119, 224},
      {960, 129, 128, 240},
      {4096, 131, 131, 256},
      {65504, 135, 134, 256},
      {kBf16Max, 247, 246, 256},
      {2.8094e-36f, 1, 0, 240},
      {5.717605e-35f, 5, 5, 320},
      {6.3e-38f, 0, 0, 11},
      {0x1.cp-119f, 0, 0, 448},
      {std::nextafter(0x1.cp-119f, kInf), 1, 0, 224},
      {0x1p-127f, 0, 0, 1},
      {0x1p-135f, 0, 0, 0x1p-8f},
      {0x1p-136f, 0, 0, 0x1p-9f},
      {0x1.8p-137f, 0, 0, 0x1p-9f},
      {0x1p-137f, 0, 0, 0},
      {0x1p-138f, 0, 0, 0},
      {0x1p-149f, 0, 0, 0},
  };
  for (const auto& g : golden) {
    for (const MxBlock block : kBlocks) {
      for (const float x : {g.amax, -g.amax}) {
        SCOPED_TRACE(testing::Message() << std::hexfloat << x << ", block " << int(block));
        const BlockBytes got = quantize_block(block_with(x), block);
        EXPECT_EQ(got.scale, g.rceil);
        EXPECT_EQ(got.values[13], std::copysign(std::ldexp(g.element, g.rceil - 127), x));
        EXPECT_EQ(got.values[12], 0);
        EXPECT_EQ(quantize_block(block_with(x), block, MxRule::floor).scale, g.floor);
      }
    }
  }
}

TEST(Reports, A0_EveryPowerOfTwoTimes448) {
  for (int k = -110; k <= 109; ++k) {
    const float amax = std::ldexp(448.0f, k);
    EXPECT_EQ(quantize_block(block_with(amax), MxBlock::row32).scale, 127 + k);
    EXPECT_EQ(quantize_block(block_with(std::nextafter(amax, 0.0f)), MxBlock::row32).scale, 127 + k);
    EXPECT_EQ(quantize_block(block_with(std::nextafter(amax, kInf)), MxBlock::row32).scale, 128 + k);
  }
}

TEST(Reports, A0_ElementsRoundToNearestEven) {
  const BlockBytes got = quantize_block({448, 432, -432, 0x1p-10f, -0x1p-10f, 0x1.8p-10f}, MxBlock::row32);
  EXPECT_EQ(got.scale, 127);
  EXPECT_EQ(got.values, (std::vector<float>{448, 448, -448, 0, 0, 0x1p-9f}));
  EXPECT_EQ(got.payload[4], 0x80) << "the sign of zero is kept";
  const BlockBytes saturated = quantize_block({511, -511, 449, 1}, MxBlock::row32, MxRule::floor);
  EXPECT_EQ(saturated.scale, 127);
  EXPECT_EQ(saturated.values, (std::vector<float>{448, -448, 448, 1}));
}

// Our answer where libraries disagree: one NaN or Inf anywhere makes the whole block NaN.
TEST(Reports, A0_NanAndInfPolicy) {
  for (const float bad : {kNan, -kNan, kInf, -kInf}) {
    for (const MxBlock block : kBlocks) {
      for (const MxRule rule : kRules) {
        for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
          std::vector<float> x(32, 3.0f);
          x[31] = bad;
          const BlockBytes got = quantize_block(x, block, rule, element);
          EXPECT_EQ(got.scale, 255);
          EXPECT_EQ(got.payload, std::vector<uint8_t>(32, 0x7F));
        }
      }
    }
  }
}

TEST(Reports, A1_ZeroBlockStaysZero) {
  for (const MxBlock block : kBlocks) {
    for (const MxRule rule : kRules) {
      std::vector<float> x(32, 0.0f);
      x[3] = -0.0f;
      const BlockBytes got = quantize_block(x, block, rule);
      EXPECT_EQ(got.scale, 0);
      for (size_t i = 0; i < 32; ++i) EXPECT_EQ(got.payload[i], i == 3 ? 0x80 : 0x00);
      for (size_t i = 0; i < 32; ++i) EXPECT_EQ(std::bit_cast<uint32_t>(got.values[i]), i == 3 ? 0x80000000u : 0u);
    }
  }
}

TEST(Reports, A2_ScaleCodes0And254And255) {
  std::vector<uint8_t> payload(32, 0x38);  // 1.0
  uint8_t scale[128] = {};
  const MxTensor t =
      make_mx_tensor(payload.data(), scale, Dtype::e4m3, MxBlock::row32, ScaleLayout::linear, 1, 1, 32, {});
  const auto first_value = [&](uint8_t byte) {
    scale[0] = byte;
    return kit::dequantize_to_floats(t, {})[0];
  };
  EXPECT_EQ(first_value(0), 0x1p-127f);
  EXPECT_EQ(first_value(1), 0x1p-126f);
  EXPECT_EQ(first_value(127), 1.0f);
  EXPECT_EQ(first_value(254), 0x1p127f);
  EXPECT_TRUE(std::isnan(first_value(255)));
}

TEST(Reports, A3_TinyBf16BlockKeepsItsValues) {
  const BlockBytes got = quantize_block({2.8094e-36f, 9.1835e-40f}, MxBlock::row32);
  EXPECT_EQ(got.scale, 1);
  EXPECT_EQ(got.values[0], std::ldexp(240.0f, 1 - 127));
  EXPECT_EQ(got.values[1], 0x1.4p-130f) << "subnormal input, not flushed";
}

TEST(Reports, A4_ReciprocalMustNotOverflow) {
  for (const float amax : {6.3e-38f, 1.3e-36f, 0x1p-126f, 1e-23f}) {
    const BlockBytes got = quantize_block({amax, amax / 2, -amax}, MxBlock::row32);
    for (const float value : got.values) EXPECT_TRUE(std::isfinite(value));
    EXPECT_NEAR(got.values[0], amax, amax / 16);
  }
  const BlockBytes tiny = quantize_block({6.3e-38f}, MxBlock::row32);
  EXPECT_EQ(tiny.scale, 0);
  EXPECT_EQ(tiny.values[0], std::ldexp(11.0f, -127));
}

TEST(Reports, A5_InfBlockFollowsOneRuleAndStaysAlone) {
  std::vector<float> x(96);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(i) - 40;
  const OwnedMx clean = kit::quantize_floats(x, 1, 1, 96, {}, Dtype::e4m3, MxBlock::row32);
  x[40] = kInf;
  const OwnedMx got = kit::quantize_floats(x, 1, 1, 96, {}, Dtype::e4m3, MxBlock::row32);
  EXPECT_EQ(got.scale[1], 255);
  for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(got.data[i], i / 32 == 1 ? 0x7F : clean.data[i]) << i;
  EXPECT_EQ(got.scale[0], clean.scale[0]);
  EXPECT_EQ(got.scale[2], clean.scale[2]);
}

TEST(Reports, A6_AmaxIsNotRoundedBeforeTheExponent) {
  for (const MxBlock block : kBlocks) {
    EXPECT_EQ(quantize_block(block_with(std::nextafter(512.0f, 0.0f)), block, MxRule::floor).scale, 127);
  }
}

// Every position in a 32x32 tile, both orientations, both half-precision types.
TEST(Reports, A7_NanIsFoundAtEveryPosition) {
  const struct {
    Dtype dtype;
    uint16_t one, nan;
  } types[] = {{Dtype::bf16, 0x3F80, 0x7FC0}, {Dtype::bf16, 0x3F80, 0xFF81}, {Dtype::f16, 0x3C00, 0x7E00}};
  constexpr int kOneScale = 119;  // 1 = 256 * 2^(119 - 127)
  OwnedMx row = kit::make_owned_mx(Dtype::e4m3, MxBlock::row32, ScaleLayout::linear, 32, 1, 32, {});
  OwnedMx col = kit::make_owned_mx(Dtype::e4m3, MxBlock::col32, ScaleLayout::linear, 32, 1, 32, {});
  OwnedMx square = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, 32, 1, 32, {});
  for (const auto& type : types) {
    for (size_t nan_at = 0; nan_at < 1024; ++nan_at) {
      std::vector<uint16_t> x(1024, type.one);
      x[nan_at] = type.nan;
      const Tensor in = make_tensor(x.data(), type.dtype, 32, 1, 32);
      kit::require_ok(quantize({.in = in, .out = row.view, .out_col = col.view}));
      kit::require_ok(quantize({.in = in, .out = square.view}));
      ASSERT_EQ(square.scale[0], 255) << nan_at;
      for (size_t i = 0; i < 32; ++i) {
        ASSERT_EQ(row.scale[i], i == nan_at / 32 ? 255 : kOneScale) << nan_at;
        ASSERT_EQ(col.scale[i], i == nan_at % 32 ? 255 : kOneScale) << nan_at;
      }
      for (size_t i = 0; i < 1024; ++i) ASSERT_EQ(square.data[i], 0x7F) << nan_at;
    }
  }
}

TEST(Reports, A8_FloorSaturatesAndRceilDoesNot) {
  const BlockBytes floor = quantize_block({957}, MxBlock::row32, MxRule::floor);
  EXPECT_EQ(floor.scale, 128);
  EXPECT_EQ(floor.values[0], 896);
  const BlockBytes rceil = quantize_block({957}, MxBlock::row32, MxRule::rceil);
  EXPECT_EQ(rceil.scale, 129);
  EXPECT_EQ(rceil.values[0], 960);
}

TEST(Reports, A9_RceilIsTheDefaultAndTight) {
  EXPECT_EQ(Quantize{}.rule, MxRule::rceil);
  const BlockBytes got = quantize_block({150}, MxBlock::row32);
  EXPECT_EQ(got.scale, 126) << "127 would waste a binade";
  EXPECT_EQ(got.values[0], 144);
}

TEST(Reports, A10_LargestFiniteInputsAreNotNan) {
  for (const float x : {kBf16Max, std::numeric_limits<float>::max()}) {
    EXPECT_EQ(quantize_block(block_with(x), MxBlock::square32, MxRule::rceil).scale, 247);
    EXPECT_EQ(quantize_block(block_with(x), MxBlock::square32, MxRule::floor).scale, 246);
  }
}

// A million values in blocks of all magnitudes: each backend against the definition, in float64.
TEST(Reports, A11_BytesAreTheSameOnEveryBackend) {
  const BlockBytes clipped = quantize_block({633}, MxBlock::row32);
  EXPECT_EQ(clipped.scale, 128) << "rounding log2(633 / 448) to nearest would give 127 and clip";
  EXPECT_EQ(clipped.values[0], 640);

  constexpr int64_t kRows = 1 << 15, kDim = 32;
  std::vector<float> x(kRows * kDim);
  kit::Random random(11);
  for (int64_t row = 0; row < kRows; ++row) {
    const int exponent = int(random.below(230)) - 130;
    for (int64_t c = 0; c < kDim; ++c) x[row * kDim + c] = float(std::ldexp(random.normal(), exponent));
  }
  OwnedMx t = kit::make_owned_mx(Dtype::e4m3, MxBlock::row32, ScaleLayout::linear, kRows, 1, kDim, {});
  for (int32_t index = 0; index < num_backends(Operation::quantize); ++index) {
    const BackendInfo backend = backend_info(Operation::quantize, index);
    if (!backend.available.ok()) continue;
    SCOPED_TRACE(backend.name);
    kit::require_ok(
        quantize({.in = make_tensor(x.data(), Dtype::f32, kRows, 1, kDim), .out = t.view, .backend = backend.name}));
    for (int64_t row = 0; row < kRows; ++row) {
      double amax = 0;
      for (int64_t c = 0; c < kDim; ++c) amax = std::max(amax, std::abs(double(x[row * kDim + c])));
      int e = std::max(amax > 0 ? std::ilogb(amax) - 9 : -127, -127);
      while (amax > std::ldexp(448, e)) ++e;
      ASSERT_EQ(t.scale[row], e + 127) << "row " << row;
      for (int64_t i = row * kDim; i < (row + 1) * kDim; ++i) {
        const double want = std::ldexp(double(x[i]), -e);
        const double step = std::ldexp(1, std::max(want != 0 ? std::ilogb(want) : -6, -6) - 3);
        ASSERT_EQ(double(decode_fp8(t.data[i], kE4m3)), std::nearbyint(want / step) * step) << x[i];
      }
    }
  }
}

TEST(Reports, A12_FloorUsesTheExponentOfAmaxItself) {
  EXPECT_EQ(quantize_block({2.7f}, MxBlock::row32, MxRule::floor).scale, 120);
  EXPECT_EQ(quantize_block({5.5f}, MxBlock::row32, MxRule::floor).scale, 121);
  EXPECT_EQ(quantize_block({1.2f}, MxBlock::row32, MxRule::floor).scale, 119);
}

TEST(Reports, A13_Fp16ZerosStayZero) {
  for (const uint16_t value : {encode_f16(0.1f), uint16_t(1)}) {  // also the smallest subnormal
    std::vector<uint16_t> x{0, 0, value, value}, back(4, 0xFFFF);
    OwnedMx t = kit::make_owned_mx(Dtype::e4m3, MxBlock::row32, ScaleLayout::linear, 1, 1, 4, {});
    kit::require_ok(quantize({.in = make_tensor(x.data(), Dtype::f16, 1, 1, 4), .out = t.view}));
    kit::require_ok(dequantize({.in = t.view, .out = make_tensor(back.data(), Dtype::f16, 1, 1, 4)}));
    EXPECT_EQ(t.data[0], 0);
    EXPECT_EQ(t.data[1], 0);
    EXPECT_EQ(back[0], 0);
    EXPECT_NEAR(decode_f16(back[3]), decode_f16(value), decode_f16(value) / 16);
  }
}

// Whatever the buffer held before, every byte of it is defined.
TEST(Reports, A15_ScalePaddingIsWrittenToo) {
  const std::vector<int32_t> cu{0, 17, 17, 60};
  const Jagged seq{.cu_seqlens = cu.data(), .batch = 3, .max_seqlen = 43};
  std::vector<float> x(60 * 2 * 40);
  kit::Random random(15);
  kit::fill_normal(random, x);
  for (const MxBlock block : kBlocks) {
    for (const ScaleLayout layout : {ScaleLayout::linear, ScaleLayout::atom128x4}) {
      if (block == MxBlock::square32 && layout == ScaleLayout::atom128x4) continue;
      OwnedMx a = kit::make_owned_mx(Dtype::e4m3, block, layout, 60, 2, 40, seq);
      OwnedMx b = kit::make_owned_mx(Dtype::e4m3, block, layout, 60, 2, 40, seq);
      std::fill(b.scale.begin(), b.scale.end(), uint8_t(0xFF));
      for (OwnedMx* t : {&a, &b}) {
        kit::require_ok(quantize({.in = make_tensor(x.data(), Dtype::f32, 60, 2, 40), .out = t->view, .seq = seq}));
      }
      EXPECT_EQ(a.scale, b.scale);
    }
  }
}

// Tokens of the padded axis before sequence b (include/mxflash/mx.h, padded_tokens).
int64_t padded_start(const std::vector<int32_t>& cu, int64_t b) { return (cu[b] + 128 * b) / 128 * 128; }

// Each group is what it would be alone, whatever stands before it.
TEST(Reports, A16_GroupsEqualStandAloneResults) {
  constexpr int64_t kHeads = 2, kDim = 96;
  for (const std::vector<int32_t>& cu : {std::vector<int32_t>{0, 0, 128}, {0, 33, 128, 128, 129}}) {
    const auto batch = int32_t(cu.size()) - 1;
    const Jagged seq{.cu_seqlens = cu.data(), .batch = batch, .max_seqlen = 128};
    std::vector<float> x(cu.back() * kHeads * kDim);
    kit::Random random(16);
    kit::fill_normal(random, x);
    for (const MxBlock block : kBlocks) {
      const OwnedMx all = kit::quantize_floats(x, cu.back(), kHeads, kDim, seq, Dtype::e4m3, block);
      const int64_t block_rows = block == MxBlock::row32 ? 1 : 32, columns = block == MxBlock::col32 ? kDim : kDim / 32;
      for (int32_t b = 0; b < batch; ++b) {
        SCOPED_TRACE(testing::Message() << "group " << b << " of " << batch << ", block " << int(block));
        const int64_t length = cu[b + 1] - cu[b], first = int64_t(cu[b]) * kHeads * kDim;
        const std::span<const float> own = std::span(x).subspan(first, length * kHeads * kDim);
        const OwnedMx alone = kit::quantize_floats(own, length, kHeads, kDim, {}, Dtype::e4m3, block);
        EXPECT_TRUE(std::equal(alone.data.begin(), alone.data.end(), all.data.begin() + first));
        const auto scale_of = [&](const OwnedMx& t, int64_t start, int64_t head, int64_t row, int64_t column) {
          return t.scale[(head * t.view.scale.shape[1] + start / block_rows + row) * columns + column];
        };
        for (int64_t head = 0; head < kHeads; ++head) {
          for (int64_t row = 0; row * block_rows < length; ++row) {
            for (int64_t c = 0; c < columns; ++c) {
              ASSERT_EQ(scale_of(all, padded_start(cu, b), head, row, c), scale_of(alone, 0, head, row, c));
            }
          }
        }
      }
    }
  }
}

// d = 64 fills two of the four scale columns of an atom, 2880 rows half of the last one: those bytes are never read.
TEST(Reports, A17_ScalePaddingIsIgnored) {
  constexpr int64_t kTokens = 2880, kDim = 64;
  std::vector<float> x(kTokens * kDim);
  kit::Random random(17);
  kit::fill_normal(random, x);
  OwnedMx t = kit::make_owned_mx(Dtype::e4m3, MxBlock::row32, ScaleLayout::atom128x4, kTokens, 1, kDim, {});
  kit::require_ok(quantize({.in = make_tensor(x.data(), Dtype::f32, kTokens, 1, kDim), .out = t.view}));
  const std::vector<float> clean = kit::dequantize_to_floats(t.view, {});
  size_t padding = 0;
  for (uint8_t& byte : t.scale) {
    if (byte != 0) continue;  // no block of normal numbers has scale 0
    byte = 0xFF;
    ++padding;
  }
  EXPECT_EQ(padding, t.scale.size() - kTokens * kDim / 32);
  EXPECT_EQ(kit::dequantize_to_floats(t.view, {}), clean);
}

// RMSNorm fused with quantization is RMSNorm to BF16, then quantization; rstd is kept in fp32.
TEST(Reports, Seen_FusedRmsnormEqualsUnfused) {
  constexpr int64_t kRows = 40, kDim = 1088;
  std::vector<float> x(kRows * kDim), weight(kDim), rstd(kRows);
  kit::Random random(1700);
  kit::fill_normal(random, x);
  kit::fill_normal(random, weight);
  kit::scale_rows_lognormal(random, x, kDim, 3);
  std::vector<uint16_t> y(kRows * kDim), y_unfused(kRows * kDim);
  for (const MxBlock block : kBlocks) {
    OwnedMx fused = kit::make_owned_mx(Dtype::e4m3, block, ScaleLayout::linear, kRows, 1, kDim, {});
    OwnedMx unfused = kit::make_owned_mx(Dtype::e4m3, block, ScaleLayout::linear, kRows, 1, kDim, {});
    MxTensor out = fused.view;
    out.data = make_tensor(fused.data.data(), Dtype::e4m3, kRows, kDim);
    kit::require_ok(rmsnorm_quantize({.in = make_tensor(x.data(), Dtype::f32, kRows, kDim),
                                      .weight = make_tensor(weight.data(), Dtype::f32, kDim),
                                      .out = out,
                                      .y = make_tensor(y.data(), Dtype::bf16, kRows, kDim),
                                      .rstd = make_tensor(rstd.data(), Dtype::f32, kRows)}));
    for (int64_t row = 0; row < kRows; ++row) {
      double sum = 0;
      for (int64_t c = 0; c < kDim; ++c) sum += double(x[row * kDim + c]) * double(x[row * kDim + c]);
      const double want = 1 / std::sqrt(sum / kDim + 1e-6);
      EXPECT_NEAR(rstd[row], want, want * 1e-6) << "a BF16 rstd would be 4000 times as far off";
      for (int64_t c = 0; c < kDim; ++c) {
        y_unfused[row * kDim + c] = encode_bf16(x[row * kDim + c] * rstd[row] * weight[c]);
      }
    }
    EXPECT_EQ(y, y_unfused);
    const Tensor in = make_tensor(y_unfused.data(), Dtype::bf16, kRows, 1, kDim);
    kit::require_ok(quantize({.in = in, .out = unfused.view}));
    EXPECT_EQ(fused.data, unfused.data);
    EXPECT_EQ(fused.scale, unfused.scale);
  }
}

// Integers times a power of two for every row of a and of b: exact sums, another scale in each block.
TEST(Reports, Seen_GemmWithDistinctScalesIsExact) {
  constexpr int64_t kM = 70, kN = 160, kDepth = 48;
  std::vector<float> a(kM * kDepth), b(kN * kDepth), c(kM * kN);
  kit::Random random(3392);
  const auto fill = [&](std::vector<float>& x, int64_t rows_per_scale) {
    for (size_t i = 0; i < x.size(); ++i) {
      const int64_t row = int64_t(i) / kDepth / rows_per_scale;
      x[i] = std::ldexp(float(random.below(17) - 8), int(row * 5 % 11) - 5);
    }
  };
  fill(a, 1);
  fill(b, 32);
  for (int64_t m = 0; m < kM; ++m) {
    for (int64_t n = 0; n < kN; ++n) {
      for (int64_t k = 0; k < kDepth; ++k) c[m * kN + n] += a[m * kDepth + k] * b[n * kDepth + k];
    }
  }
  for (const MxBlock block : kBlocks) {
    OwnedMx got = kit::make_owned_mx(Dtype::e4m3, block, ScaleLayout::linear, kM, 1, kN, {});
    kit::require_ok(gemm_quantize({.a = make_tensor(a.data(), Dtype::f32, kM, kDepth),
                                   .b = make_tensor(b.data(), Dtype::f32, kN, kDepth),
                                   .out = got.view}));
    const OwnedMx want = kit::quantize_floats(c, kM, 1, kN, {}, Dtype::e4m3, block);
    EXPECT_EQ(got.data, want.data);
    EXPECT_EQ(got.scale, want.scale);
  }
}

}  // namespace
}  // namespace mxflash
