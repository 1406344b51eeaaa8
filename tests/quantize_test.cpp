// quantize, dequantize and convert_scales: golden blocks bit for bit, block shapes, jagged batches, options.
#include <gtest/gtest.h>
#include <mxflash/backend.h>
#include <mxflash/quantize.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kit/random.h"
#include "kit/runner.h"
#include "mx/float16.h"
#include "mx/rotation.h"
#include "mx/scale_layout.h"

namespace mxflash {
namespace {

using kit::make_owned_mx;
using kit::OwnedMx;
using kit::require_ok;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> normal(int64_t n, uint64_t seed = 7) {
  std::vector<float> x(size_t(n), 0.0f);
  kit::Random random(seed, 1);
  kit::fill_normal(random, x);
  return x;
}

Tensor view(std::vector<float>& x, int64_t tokens, int64_t heads, int64_t dim) {
  return make_tensor(x.data(), Dtype::f32, tokens, heads, dim);
}

// ---- golden blocks ----------------------------------------------------------------------------------------------

struct Golden {
  std::string why;
  std::vector<float> input;
  nlohmann::json json;
};

std::vector<Golden> golden_blocks() {
  std::ifstream file(std::string(MXFLASH_SOURCE_DIR) + "/tests/data/vectors/blocks.json");
  std::vector<Golden> blocks;
  for (const auto& json : nlohmann::json::parse(file)) {
    Golden& g = blocks.emplace_back(Golden{json.at("why"), {}, json});
    for (const auto& bits : json.at("input")) {
      g.input.push_back(std::bit_cast<float>(uint32_t(std::stoul(bits.get<std::string>(), nullptr, 16))));
    }
  }
  return blocks;
}

std::vector<uint8_t> from_hex(const std::string& hex) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i < hex.size(); i += 2) bytes.push_back(uint8_t(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

// A golden block of 32 values is one row of a row32 tensor, one column of a col32 one, and the first row, the first
// column or both halves of a square one.
class GoldenBlocks : public testing::TestWithParam<std::tuple<Dtype, MxRule>> {
 protected:
  Dtype element() const { return std::get<0>(GetParam()); }
  MxRule rule() const { return std::get<1>(GetParam()); }
  nlohmann::json expected(const Golden& g) const {
    return g.json.at(std::string(dtype_name(element())) + (rule() == MxRule::rceil ? "_rceil" : "_floor"));
  }
  OwnedMx run(std::vector<float> x, int64_t tokens, int64_t dim, MxBlock block) const {
    return kit::quantize_floats(x, tokens, 1, dim, {}, element(), block, rule());
  }
};

TEST_P(GoldenBlocks, Row32) {
  for (const Golden& g : golden_blocks()) {
    const OwnedMx q = run(g.input, 1, 32, MxBlock::row32);
    EXPECT_EQ(q.scale[0], expected(g).at("scale")) << g.why;
    EXPECT_EQ(q.data, from_hex(expected(g).at("data"))) << g.why;
  }
}

TEST_P(GoldenBlocks, Col32) {
  for (const Golden& g : golden_blocks()) {
    const OwnedMx q = run(g.input, 32, 1, MxBlock::col32);
    EXPECT_EQ(q.scale[0], expected(g).at("scale")) << g.why;
    EXPECT_EQ(q.data, from_hex(expected(g).at("data"))) << g.why;
  }
}

TEST_P(GoldenBlocks, Square32AnywhereInTheBlock) {
  for (const Golden& g : golden_blocks()) {
    for (const int64_t at : {0, 13, 31}) {
      std::vector<float> row(32 * 32, 0.0f), col(32 * 32, 0.0f);
      for (int64_t i = 0; i < 32; ++i) row[size_t(at * 32 + i)] = col[size_t(i * 32 + at)] = g.input[size_t(i)];
      const std::vector<uint8_t> want = from_hex(expected(g).at("data"));
      const OwnedMx by_row = run(row, 32, 32, MxBlock::square32), by_col = run(col, 32, 32, MxBlock::square32);
      EXPECT_EQ(by_row.scale[0], expected(g).at("scale")) << g.why;
      EXPECT_EQ(by_col.scale[0], expected(g).at("scale")) << g.why;
      for (int64_t i = 0; i < 32; ++i) {
        EXPECT_EQ(by_row.data[size_t(at * 32 + i)], want[size_t(i)]) << g.why;
        EXPECT_EQ(by_col.data[size_t(i * 32 + at)], want[size_t(i)]) << g.why;
      }
      // A block with NaN or Inf is NaN everywhere, the zeros of its other rows included.
      if (by_row.scale[0] == 255) {
        EXPECT_EQ(by_row.data, std::vector<uint8_t>(32 * 32, 0x7F)) << g.why;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenBlocks,
                         testing::Combine(testing::Values(Dtype::e4m3, Dtype::e5m2),
                                          testing::Values(MxRule::rceil, MxRule::floor)),
                         [](const auto& test) {
                           return std::string(dtype_name(std::get<0>(test.param))) +
                                  (std::get<1>(test.param) == MxRule::rceil ? "_rceil" : "_floor");
                         });

// ---- shapes -----------------------------------------------------------------------------------------------------

// quantize against the block definition applied by hand: any block, layout, edge, head, with BF16 and FP16 inputs.
void expect_matches_definition(int64_t tokens, int64_t heads, int64_t dim, MxBlock block, ScaleLayout layout,
                               Dtype in) {
  std::vector<float> x = normal(tokens * heads * dim);
  std::vector<uint16_t> half(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    half[i] = in == Dtype::bf16 ? encode_bf16(x[i]) : encode_f16(x[i]);
    if (in != Dtype::f32) x[i] = in == Dtype::bf16 ? decode_bf16(half[i]) : decode_f16(half[i]);
  }
  void* data = in == Dtype::f32 ? static_cast<void*>(x.data()) : half.data();
  OwnedMx q = make_owned_mx(Dtype::e4m3, block, layout, tokens, heads, dim, {});
  q.scale.assign(q.scale.size(), 0xEE);
  require_ok(quantize({.in = make_tensor(data, in, tokens, heads, dim), .out = q.view}));

  const BlockShape shape = block_shape(block);
  const int64_t padded = padded_token_count(tokens, {});
  std::vector<bool> covered(q.scale.size());
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t0 = 0; t0 < tokens; t0 += shape.rows) {
      for (int64_t c0 = 0; c0 < dim; c0 += shape.cols) {
        uint32_t amax = 0;
        const auto for_block = [&](auto visit) {
          for (int64_t t = t0; t < std::min(t0 + shape.rows, tokens); ++t) {
            for (int64_t c = c0; c < std::min(c0 + shape.cols, dim); ++c) visit(size_t((t * heads + h) * dim + c));
          }
        };
        for_block([&](size_t i) { amax = std::max(amax, magnitude_bits(x[i])); });
        const uint8_t want = scale_from_amax(amax, kE4m3, MxRule::rceil);
        const auto at = size_t(scale_offset(block, layout, padded, dim, {h, t0 / shape.rows, c0 / shape.cols}));
        ASSERT_EQ(q.scale[at], want);
        covered[at] = true;
        for_block([&](size_t i) { ASSERT_EQ(q.data[i], encode_mx(x[i], want, kE4m3)); });
      }
    }
  }
  for (size_t i = 0; i < covered.size(); ++i) {
    ASSERT_TRUE(covered[i] || q.scale[i] == 0) << "padding is zero";
  }
}

TEST(Quantize, MatchesTheBlockDefinition) {
  for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
    for (const int64_t tokens : {1, 31, 32, 33, 129, 200}) {
      for (const int64_t dim : {8, 40, 64, 128, 264}) {
        expect_matches_definition(tokens, 3, dim, block, ScaleLayout::linear, Dtype::f32);
      }
    }
    expect_matches_definition(77, 2, 96, block, ScaleLayout::linear, Dtype::bf16);
    expect_matches_definition(77, 2, 96, block, ScaleLayout::linear, Dtype::f16);
  }
  for (const MxBlock block : {MxBlock::row32, MxBlock::col32}) {
    for (const int64_t dim : {64, 128, 192}) {
      expect_matches_definition(200, 2, dim, block, ScaleLayout::atom128x4, Dtype::f32);
    }
  }
}

TEST(Quantize, JaggedEqualsEachSequenceAlone) {
  const std::vector<int32_t> cu = {0, 33, 33, 34, 163, 164};
  const int64_t heads = 2, dim = 64, slack = 5, tokens = cu.back() + slack;
  std::vector<float> x = normal(tokens * heads * dim);
  std::fill(x.end() - slack * heads * dim, x.end(), kNan);  // must not be read
  const Jagged seq{.cu_seqlens = cu.data(), .batch = 5, .max_seqlen = 129};
  for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
    const OwnedMx all = kit::quantize_floats(x, tokens, heads, dim, seq, Dtype::e4m3, block);
    const ScaleGrid grid = scale_grid(block, padded_token_count(tokens, seq), dim);
    for (int64_t b = 0; b < seq.batch; ++b) {
      const Sequence s = sequence_at(tokens, seq, b);
      const std::span part(x.data() + s.start * heads * dim, size_t(s.length * heads * dim));
      const OwnedMx alone = kit::quantize_floats(part, s.length, heads, dim, {}, Dtype::e4m3, block);
      EXPECT_TRUE(std::equal(alone.data.begin(), alone.data.end(), all.data.begin() + s.start * heads * dim));
      const ScaleGrid alone_grid = scale_grid(block, round_up(s.length, 128), dim);
      const int64_t first = s.padded_start / block_shape(block).rows;
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t r = 0; r < alone_grid.rows; ++r) {
          for (int64_t c = 0; c < grid.cols; ++c) {
            EXPECT_EQ(alone.scale[size_t(linear_offset(alone_grid, {h, r, c}))],
                      all.scale[size_t(linear_offset(grid, {h, first + r, c}))]);
          }
        }
      }
    }
    EXPECT_TRUE(std::all_of(all.data.end() - slack * heads * dim, all.data.end(), [](uint8_t b) { return b == 0; }));
  }
}

TEST(Quantize, StridedInputEqualsItsContiguousCopy) {
  const int64_t tokens = 70, heads = 3, dim = 64;
  std::vector<float> wide = normal(tokens * 5 * 96);  // [tokens, 5, 96], of which heads 1..3, channels 8..71
  Tensor strided = make_tensor(wide.data() + 96 + 8, Dtype::f32, tokens, heads, dim);
  strided.stride = {5 * 96, 96, 1, 0};
  std::vector<float> copy;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t c = 0; c < dim; ++c) copy.push_back(wide[size_t((t * 5 + h + 1) * 96 + 8 + c)]);
    }
  }
  OwnedMx a = make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, tokens, heads, dim, {}), b = a;
  b = make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, tokens, heads, dim, {});
  require_ok(quantize({.in = strided, .out = a.view}));
  require_ok(quantize({.in = view(copy, tokens, heads, dim), .out = b.view}));
  EXPECT_EQ(a.data, b.data);
  EXPECT_EQ(a.scale, b.scale);
}

TEST(Quantize, TwoOutputsFromOneReadEqualTwoCalls) {
  std::vector<float> x = normal(100 * 2 * 96);
  OwnedMx row = make_owned_mx(Dtype::e4m3, MxBlock::row32, ScaleLayout::linear, 100, 2, 96, {});
  OwnedMx col = make_owned_mx(Dtype::e5m2, MxBlock::col32, ScaleLayout::linear, 100, 2, 96, {});
  require_ok(quantize({.in = view(x, 100, 2, 96), .out = row.view, .out_col = col.view}));
  const OwnedMx row_alone = kit::quantize_floats(x, 100, 2, 96, {}, Dtype::e4m3, MxBlock::row32);
  const OwnedMx col_alone = kit::quantize_floats(x, 100, 2, 96, {}, Dtype::e5m2, MxBlock::col32);
  EXPECT_EQ(row.data, row_alone.data);
  EXPECT_EQ(row.scale, row_alone.scale);
  EXPECT_EQ(col.data, col_alone.data);
  EXPECT_EQ(col.scale, col_alone.scale);
}

// ---- options ----------------------------------------------------------------------------------------------------

TEST(Quantize, SmoothAndRotateFollowTheDocumentedOrder) {
  const std::vector<int32_t> cu = {0, 300, 301, 301, 400};
  const Jagged seq{.cu_seqlens = cu.data(), .batch = 4, .max_seqlen = 300};
  const int64_t tokens = 400, heads = 2, dim = 96, group = 32;
  std::vector<float> x = normal(tokens * heads * dim);
  for (float& value : x) value += 3;
  std::vector<float> mean(size_t(4 * heads * dim), kNan);
  OwnedMx q = make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, tokens, heads, dim, seq);
  require_ok(quantize({.in = view(x, tokens, heads, dim),
                       .out = q.view,
                       .seq = seq,
                       .smooth = true,
                       .mean = make_tensor(mean.data(), Dtype::f32, 4, heads, dim),
                       .rotate = true,
                       .rotate_seed = 5}));

  std::vector<float> y(x.size());
  for (int64_t b = 0; b < 4; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t c = 0; c < dim; ++c) {
        float total = 0;
        for (int32_t first = cu[size_t(b)]; first < cu[size_t(b) + 1]; first += 128) {
          float partial = 0;
          for (int32_t t = first; t < std::min(first + 128, cu[size_t(b) + 1]); ++t) {
            partial += x[size_t((t * heads + h) * dim + c)];
          }
          total += partial;
        }
        const int32_t length = cu[size_t(b) + 1] - cu[size_t(b)];
        const float want = length ? total / float(length) : 0.0f;
        EXPECT_EQ(mean[size_t((b * heads + h) * dim + c)], want);
        for (int32_t t = cu[size_t(b)]; t < cu[size_t(b) + 1]; ++t) {
          const auto i = size_t((t * heads + h) * dim + c);
          y[i] = x[i] - want;
        }
      }
    }
  }
  for (int64_t row = 0; row < tokens * heads; ++row) {
    for (int64_t c = 0; c < dim; c += group) rotate(y.data() + row * dim + c, group, 5, c);
  }
  const OwnedMx want = kit::quantize_floats(y, tokens, heads, dim, seq);
  EXPECT_EQ(q.data, want.data);
  EXPECT_EQ(q.scale, want.scale);
}

TEST(Quantize, StatsCountWhatHappened) {
  std::vector<float> x(4 * 32, 0.0f);
  x[0] = 500;       // row 0, rule floor: scale 1, 500 saturates
  x[1] = 0x1p-11f;  // flushed: below half of 2^-9
  x[32] = -3;       // row 1
  x[64] = INFINITY;
  x[65] = 1;
  QuantizeStats stats;
  OwnedMx q = make_owned_mx(Dtype::e4m3, MxBlock::row32, ScaleLayout::linear, 4, 1, 32, {});
  require_ok(quantize({.in = view(x, 4, 1, 32), .out = q.view, .rule = MxRule::floor, .stats = &stats}));
  EXPECT_EQ(stats.amax, 500);
  EXPECT_EQ(stats.saturated, 1);
  EXPECT_EQ(stats.flushed, 1);
  EXPECT_EQ(stats.nonfinite, 1);
  EXPECT_EQ(stats.total, 128);
}

TEST(Quantize, DoesNotDependOnTheThreadCount) {
  std::vector<float> x = normal(500 * 4 * 64);
  set_num_threads(1);
  const OwnedMx one = kit::quantize_floats(x, 500, 4, 64, {});
  set_num_threads(7);
  const OwnedMx seven = kit::quantize_floats(x, 500, 4, 64, {});
  set_num_threads(0);
  EXPECT_EQ(one.data, seven.data);
  EXPECT_EQ(one.scale, seven.scale);
}

// ---- dequantize, convert_scales ---------------------------------------------------------------------------------

// Every counter and amax come from every stripe of 32 tokens, whichever is merged last.
TEST(Quantize, StatsAreMergedAcrossStripes) {
  constexpr int64_t kTokens = 160, kHeads = 2, kDim = 32;
  for (const int32_t threads : {1, 4}) {
    for (int64_t stripe = 0; stripe < 5; ++stripe) {
      std::vector<float> x(size_t(kTokens * kHeads * kDim), 1.0f);
      const auto at = [&](int64_t token, int64_t head) -> float* { return &x[size_t((token * kHeads + head) * kDim)]; };
      at(32 * stripe + 7, 1)[3] = -900;           // the largest; with rule floor it saturates
      at(32 * stripe + 7, 1)[4] = 0x1p-20f;       // beside it: becomes zero
      at(32 * stripe + 9, 0)[0] = std::nanf("");  // of the other head: its block is NaN
      const OwnedMx out = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, {}, kTokens, kHeads, kDim, {});
      QuantizeStats stats;
      set_num_threads(threads);
      require_ok(quantize({.in = make_tensor(x.data(), Dtype::f32, kTokens, kHeads, kDim),
                           .out = out.view,
                           .rule = MxRule::floor,
                           .stats = &stats}));
      set_num_threads(0);
      SCOPED_TRACE(testing::Message() << threads << " threads, stripe " << stripe);
      EXPECT_EQ(stats.amax, 900);
      EXPECT_EQ(stats.saturated, 1);
      EXPECT_EQ(stats.flushed, 1);
      EXPECT_EQ(stats.nonfinite, 1);
      EXPECT_EQ(stats.total, kTokens * kHeads * kDim);
    }
  }
}

// An expanded scalar has all strides 0.
TEST(Quantize, ExpandedScalarEqualsItsCopy) {
  constexpr int64_t kTokens = 45, kHeads = 3, kDim = 40;
  float scalar = 1.7f;
  std::vector<float> copy(size_t(kTokens * kHeads * kDim), scalar), mean(size_t(kHeads * kDim)), want_mean = mean;
  Tensor expanded = make_tensor(&scalar, Dtype::f32, kTokens, kHeads, kDim);
  expanded.stride = {0, 0, 0, 0};
  for (const bool smooth : {false, true}) {
    const auto run = [&](const Tensor& in, std::vector<float>& means) {
      OwnedMx out = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, {}, kTokens, kHeads, kDim, {});
      require_ok(quantize({.in = in,
                           .out = out.view,
                           .smooth = smooth,
                           .mean = make_tensor(means.data(), Dtype::f32, 1, kHeads, kDim),
                           .rotate = true}));
      return out;
    };
    const OwnedMx got = run(expanded, mean);
    const OwnedMx want = run(make_tensor(copy.data(), Dtype::f32, kTokens, kHeads, kDim), want_mean);
    EXPECT_EQ(got.data, want.data);
    EXPECT_EQ(got.scale, want.scale);
    EXPECT_EQ(mean, want_mean);
  }
  // Of rank 2, and with one real row.
  std::vector<float> row = {1, 2, 3};
  Tensor columns = make_tensor(row.data(), Dtype::f32, 3, 32);
  columns.stride = {1, 0, 0, 0};
  OwnedMx out = kit::make_owned_mx(Dtype::e4m3, MxBlock::row32, {}, 3, 1, 32, {});
  MxTensor view = out.view;
  view.data = make_tensor(out.data.data(), Dtype::e4m3, 3, 32);
  require_ok(quantize({.in = columns, .out = view}));
  std::vector<float> back(3 * 32);
  require_ok(dequantize({.in = view, .out = make_tensor(back.data(), Dtype::f32, 3, 32)}));
  for (size_t i = 0; i < back.size(); ++i) EXPECT_EQ(back[i], row[i / 32]);
}

// Tokens that belong to no sequence come out as zero, whatever lies in the payload and in the output.
TEST(Dequantize, SlackRowsAreZero) {
  constexpr int64_t kTokens = 45, kDim = 40;
  const int32_t cu[] = {0, 5, 37};
  const Jagged seq{cu, 2, 32};
  for (const int64_t heads : {1, 2}) {
    OwnedMx in = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, {}, kTokens, heads, kDim, seq);
    std::fill(in.data.begin(), in.data.end(), uint8_t(0x38));   // 1
    std::fill(in.scale.begin(), in.scale.end(), uint8_t(127));  // 1, also where no block is
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      const size_t size = size_t(dtype_size(dtype)), slack = size_t(37 * heads * kDim) * size;
      std::vector<uint8_t> out(size_t(kTokens * heads * kDim) * size, 0xFF);
      Dequantize args{.in = in.view, .out = make_tensor(out.data(), dtype, kTokens, heads, kDim), .seq = seq};
      if (heads == 1) {
        args.in.data = make_tensor(in.data.data(), Dtype::e4m3, kTokens, kDim);
        args.out = make_tensor(out.data(), dtype, kTokens, kDim);
      }
      require_ok(dequantize(args));
      EXPECT_EQ(std::vector<uint8_t>(out.begin() + int64_t(slack), out.end()),
                std::vector<uint8_t>(out.size() - slack, 0));
      for (size_t i = size - 1; i < slack; i += size) ASSERT_EQ(out[i], dtype == Dtype::f16 ? 0x3C : 0x3F) << i;
    }
  }
}

TEST(Dequantize, IsExactAndIdempotent) {
  std::vector<float> x = normal(130 * 2 * 72);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= std::ldexp(1.0f, int(i % 97) - 48);
  for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
    for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
      const OwnedMx q = kit::quantize_floats(x, 130, 2, 72, {}, element, block);
      const std::vector<float> y = kit::dequantize_to_floats(q.view, {});
      // Values that are already representable come back as they are; their block's scale may be smaller.
      const OwnedMx again = kit::quantize_floats(y, 130, 2, 72, {}, element, block);
      EXPECT_EQ(kit::dequantize_to_floats(again.view, {}), y);
    }
  }
}

TEST(Dequantize, ScaleBytesZeroAndNan) {
  OwnedMx q = make_owned_mx(Dtype::e4m3, MxBlock::row32, ScaleLayout::linear, 2, 1, 32, {});
  q.data.assign(64, 0x38);  // 1.0
  q.scale[0] = 0;
  q.scale[1] = 255;
  const std::vector<float> y = kit::dequantize_to_floats(q.view, {});
  EXPECT_EQ(y[0], 0x1p-127f);
  EXPECT_TRUE(std::isnan(y[32]));
}

TEST(ConvertScales, EveryPathDequantizesTheSame) {
  const std::vector<int32_t> cu = {0, 33, 33, 162};
  const Jagged seq{.cu_seqlens = cu.data(), .batch = 3, .max_seqlen = 129};
  std::vector<float> x = normal(162 * 2 * 64);
  struct Path {
    MxBlock from;
    ScaleLayout from_layout;
    MxBlock to;
    ScaleLayout to_layout;
  };
  using enum ScaleLayout;
  const Path paths[] = {
      {MxBlock::square32, linear, MxBlock::row32, linear}, {MxBlock::square32, linear, MxBlock::row32, atom128x4},
      {MxBlock::square32, linear, MxBlock::col32, linear}, {MxBlock::square32, linear, MxBlock::col32, atom128x4},
      {MxBlock::row32, linear, MxBlock::row32, atom128x4}, {MxBlock::col32, linear, MxBlock::col32, atom128x4},
      {MxBlock::row32, atom128x4, MxBlock::row32, linear}};
  for (const Path& path : paths) {
    OwnedMx from = make_owned_mx(Dtype::e4m3, path.from, path.from_layout, 162, 2, 64, seq);
    require_ok(quantize({.in = view(x, 162, 2, 64), .out = from.view, .seq = seq}));
    OwnedMx to = make_owned_mx(Dtype::e4m3, path.to, path.to_layout, 162, 2, 64, seq);
    to.data = from.data;
    to.view.data.data = to.data.data();
    require_ok(convert_scales({.in = from.view, .out = to.view, .seq = seq}));
    EXPECT_EQ(kit::dequantize_to_floats(to.view, seq), kit::dequantize_to_floats(from.view, seq));
  }
}

}  // namespace
}  // namespace mxflash
