// What the bytes mean: codecs against golden vectors over all codes, scale layouts as bijections, the rotation.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "mx/block.h"
#include "mx/e8m0.h"
#include "mx/float16.h"
#include "mx/fp8.h"
#include "mx/rotation.h"
#include "mx/scale_layout.h"

namespace mxflash {
namespace {

// The codecs are constexpr: a wrong one does not compile.
static_assert(decode_fp8(0x7E, kE4m3) == 448.0f && decode_fp8(0x7B, kE5m2) == 57344.0f);
static_assert(encode_fp8(432.0f, kE4m3) == 0x7E, "a tie goes to even");
static_assert(encode_fp8(1e30f, kE4m3) == 0x7E && encode_fp8(-1e30f, kE5m2) == 0xFB, "saturating");
static_assert(decode_e8m0(127) == 1.0f && decode_e8m0(0) == 0x1p-127f);
static_assert(scale_from_amax(magnitude_bits(448.0f), kE4m3, MxRule::rceil) == 127);
static_assert(scale_from_amax(magnitude_bits(449.0f), kE4m3, MxRule::rceil) == 128);
static_assert(scale_from_amax(magnitude_bits(511.0f), kE4m3, MxRule::floor) == 127);

std::vector<std::vector<std::string>> read_csv(const std::string& name) {
  std::ifstream file(std::string(MXFLASH_SOURCE_DIR) + "/tests/data/vectors/" + name);
  std::vector<std::vector<std::string>> rows;
  for (std::string line; std::getline(file, line);) {
    std::vector<std::string>& row = rows.emplace_back();
    std::stringstream stream(line);
    for (std::string cell; std::getline(stream, cell, ',');) row.push_back(cell);
  }
  return rows;
}

class Fp8Golden : public testing::TestWithParam<std::pair<const char*, const Fp8Format*>> {};

TEST_P(Fp8Golden, DecodesEveryCode) {
  const auto rows = read_csv(std::string(GetParam().first) + ".csv");
  ASSERT_EQ(rows.size(), 256u);
  for (const auto& row : rows) {
    const auto code = uint8_t(std::stoi(row[0], nullptr, 16));
    const float want = std::strtof(row[1].c_str(), nullptr), got = decode_fp8(code, *GetParam().second);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << row[0];
    } else {
      EXPECT_EQ(got, want) << row[0];
      EXPECT_EQ(std::signbit(got), std::signbit(want)) << row[0];
    }
  }
}

TEST_P(Fp8Golden, EncodesEveryFiniteCodeToItself) {
  const Fp8Format& f = *GetParam().second;
  for (int code = 0; code < 256; ++code) {
    const float x = decode_fp8(uint8_t(code), f);
    if (!std::isfinite(x)) continue;
    EXPECT_EQ(encode_fp8(x, f), code);
    for (const int e : {-100, -1, 1, 100}) EXPECT_EQ(encode_fp8(std::ldexp(x, e), f, e), code) << "exponent " << e;
  }
}

TEST_P(Fp8Golden, EncodesTheVectors) {
  const size_t column = GetParam().second == &kE4m3 ? 1 : 2;
  const auto rows = read_csv("encode.csv");
  ASSERT_GT(rows.size(), 3000u);
  for (const auto& row : rows) {
    const float x = std::bit_cast<float>(uint32_t(std::stoul(row[0], nullptr, 16)));
    EXPECT_EQ(encode_fp8(x, *GetParam().second), std::stoi(row[column], nullptr, 16)) << row[0];
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, Fp8Golden, testing::Values(std::pair{"e4m3", &kE4m3}, std::pair{"e5m2", &kE5m2}),
                         [](const auto& test) { return std::string(test.param.first); });

TEST(E8m0, EveryCodeIsItsPowerOfTwo) {
  for (int b = 0; b < 255; ++b) {
    EXPECT_EQ(decode_e8m0(uint8_t(b)), std::ldexp(1.0f, b - 127)) << b;
    EXPECT_EQ(decode_e8m0_f64(uint8_t(b)), std::ldexp(1.0, b - 127)) << b;
  }
  EXPECT_TRUE(std::isnan(decode_e8m0(255)));
  EXPECT_TRUE(std::isnan(decode_e8m0_f64(255)));
}

// The bit recipe of rceil against its definition in exact arithmetic, around every power of two and at 448 * 2^k.
TEST(E8m0, RceilIsTheSmallestSufficientExponent) {
  for (const Fp8Format* f : {&kE4m3, &kE5m2}) {
    const double max = double(std::bit_cast<float>(f->max_bits));
    for (uint32_t exponent = 0; exponent < 255; ++exponent) {
      for (const uint32_t mantissa : {0u, 1u, 0x5FFFFFu, 0x600000u, 0x600001u, 0x7FFFFFu}) {
        const uint32_t bits = (exponent << 23) | mantissa;
        if (bits == 0) continue;
        const double amax = double(std::bit_cast<float>(bits));
        int e = -127;
        while (amax > max * std::ldexp(1.0, e)) ++e;
        EXPECT_EQ(scale_from_amax(bits, *f, MxRule::rceil), e + 127) << std::hexfloat << amax;
        const int floor = std::max(std::ilogb(amax) - f->max_exponent, -127);
        EXPECT_EQ(scale_from_amax(bits, *f, MxRule::floor), floor + 127) << std::hexfloat << amax;
      }
    }
  }
}

template <class Decode, class Encode>
void check_float16(Decode decode, Encode encode, uint16_t infinity) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float x = decode(uint16_t(h));
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(decode(encode(x))));
      continue;
    }
    ASSERT_EQ(encode(x), h);
    if ((h & 0x7FFF) >= infinity) continue;
    // Halfway to the next magnitude rounds to the even code, a hair to either side to the nearer one.
    const float next = decode(uint16_t(h + 1));
    const float step = std::isinf(next) ? x - decode(uint16_t(h - 1)) : next - x;
    const float tie = x + step / 2;
    ASSERT_EQ(encode(tie), h % 2 ? h + 1 : h);
    ASSERT_EQ(encode(std::nextafter(tie, 0.0f)), h);
    ASSERT_EQ(encode(std::nextafter(tie, std::copysign(INFINITY, x))), h + 1);
  }
}
TEST(Float16, Bf16RoundsToNearestEven) { check_float16(decode_bf16, encode_bf16, 0x7F80); }
TEST(Float16, F16RoundsToNearestEven) { check_float16(decode_f16, encode_f16, 0x7C00); }

TEST(ScaleLayout, LinearInverse) {
  const ScaleGrid grid{12, 5};
  std::set<int64_t> seen;
  for (int64_t head = 0; head < 3; ++head) {
    for (int64_t row = 0; row < grid.rows; ++row) {
      for (int64_t col = 0; col < grid.cols; ++col) {
        const ScaleIndex i{head, row, col};
        const int64_t offset = linear_offset(grid, i);
        EXPECT_TRUE(seen.insert(offset).second);
        EXPECT_EQ(linear_index(grid, offset), i);
      }
    }
  }
  EXPECT_EQ(seen.size(), 180u);
  EXPECT_EQ(*seen.rbegin(), 179);
}

// Every byte of the atoms has one index and back; in-range indices are exactly the grid.
TEST(ScaleLayout, AtomInverse) {
  for (const AtomGrid grid : {AtomGrid{128, 4}, AtomGrid{256, 2}, AtomGrid{192, 4}, AtomGrid{384, 9}}) {
    int64_t in_range = 0;
    for (int64_t offset = 0; offset < 2 * grid.bytes(); ++offset) {
      const AtomIndex i = atom_index(grid, offset);
      EXPECT_EQ(atom_offset(grid, i.head, i.row, i.block), offset);
      in_range += i.row < grid.rows && i.block < grid.blocks;
    }
    EXPECT_EQ(in_range, 2 * grid.rows * grid.blocks);
  }
}

// offset(row, k) = ((row/128) * KB4 + kb/4) * 512 + (row%32) * 16 + ((row/32)%4) * 4 + kb%4, KB4 = ceil(K / 128).
TEST(ScaleLayout, AtomMatchesThePublishedFormula) {
  for (const int64_t k : {64, 128, 192, 256}) {
    const AtomGrid grid{384, k / 32};
    const int64_t kb4 = (k + 127) / 128;
    for (int64_t row = 0; row < grid.rows; ++row) {
      for (int64_t kb = 0; kb < grid.blocks; ++kb) {
        EXPECT_EQ(atom_offset(grid, 0, row, kb),
                  ((row / 128) * kb4 + kb / 4) * 512 + row % 32 * 16 + row / 32 % 4 * 4 + kb % 4);
      }
    }
  }
}

TEST(ScaleLayout, JaggedSequencesNeverShareARowAndInvert) {
  const std::vector<std::vector<int32_t>> lists = {
      {0}, {1}, {128}, {0, 0, 0}, {1, 1, 1}, {127, 1, 128}, {5, 0, 123, 256, 1}, {31, 33, 129, 0, 1000}};
  for (const auto& lengths : lists) {
    std::vector<int32_t> cu{0};
    for (const int32_t n : lengths) cu.push_back(cu.back() + n);
    const Jagged seq{.cu_seqlens = cu.data(), .batch = int32_t(lengths.size()), .max_seqlen = 1000};
    const int64_t tokens = cu.back(), padded = padded_token_count(tokens, seq);
    EXPECT_EQ(padded % 128, 0);
    int64_t end = 0, owned = 0;
    for (int64_t b = 0; b < seq.batch; ++b) {
      const Sequence s = sequence_at(tokens, seq, b);
      EXPECT_EQ(s.length, lengths[size_t(b)]);
      EXPECT_EQ(s.padded_start % 128, 0);
      EXPECT_GE(s.padded_start, end);
      end = s.padded_start + round_up(s.length, 128);
      EXPECT_LE(end, padded);
    }
    for (int64_t row = 0; row < padded; ++row) {
      const PaddedRow owner = padded_row_owner(tokens, seq, row);
      if (owner.sequence < 0) continue;
      ++owned;
      const Sequence s = sequence_at(tokens, seq, owner.sequence);
      EXPECT_EQ(s.padded_start + owner.token, row);
      EXPECT_LT(owner.token, s.length);
    }
    EXPECT_EQ(owned, tokens);
  }
}

TEST(ScaleLayout, EqualLengthsPadEachSequence) {
  const Jagged seq{.batch = 3};
  EXPECT_EQ(padded_token_count(3 * 130, seq), 3 * 256);
  EXPECT_EQ(sequence_at(3 * 130, seq, 2).padded_start, 512);
  EXPECT_EQ(sequence_at(3 * 130, seq, 2).start, 260);
}

TEST(ScaleLayout, ShapesOfTheDocumentation) {
  const Jagged one{};
  using Shape = std::array<int64_t, 4>;
  EXPECT_EQ(scale_shape(MxBlock::square32, ScaleLayout::linear, 200, 4, 96, one), (Shape{4, 8, 3, 0}));
  EXPECT_EQ(scale_shape(MxBlock::row32, ScaleLayout::linear, 200, 4, 40, one), (Shape{4, 256, 2, 0}));
  EXPECT_EQ(scale_shape(MxBlock::col32, ScaleLayout::linear, 200, 4, 40, one), (Shape{4, 8, 40, 0}));
  EXPECT_EQ(scale_shape(MxBlock::row32, ScaleLayout::atom128x4, 200, 4, 64, one), (Shape{4, 2, 1, 512}));
  EXPECT_EQ(scale_shape(MxBlock::col32, ScaleLayout::atom128x4, 200, 4, 192, one), (Shape{4, 2, 2, 512}));
  EXPECT_EQ(scale_shape(MxBlock::square32, ScaleLayout::atom128x4, 200, 4, 64, one), (Shape{}));
  EXPECT_EQ(scale_size(MxBlock::square32, ScaleLayout::linear, 128, 1, 128, one), 16) << "16 bytes per 128x128 tile";
}

TEST(Rotation, GroupIsTheLargestPowerOfTwo) {
  EXPECT_EQ(rotation_group(128), 128);
  EXPECT_EQ(rotation_group(96), 32);
  EXPECT_EQ(rotation_group(40), 8);
  EXPECT_EQ(rotation_group(192), 64);
  EXPECT_EQ(rotation_group(256), 256);
  EXPECT_EQ(rotation_group(4096), 256);
}

TEST(Rotation, IsOrthogonalAndInvertible) {
  for (const int64_t n : {8, 32, 128, 256}) {
    std::vector<std::vector<double>> columns;
    for (int64_t i = 0; i < n; ++i) {
      std::vector<double> e(size_t(n), 0.0);
      e[size_t(i)] = 1;
      rotate(e.data(), n, 24, 0);
      columns.push_back(e);
      rotate_back(e.data(), n, 24, 0);
      for (int64_t j = 0; j < n; ++j) EXPECT_NEAR(e[size_t(j)], double(i == j), 1e-6);
    }
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        double product = 0;
        for (int64_t c = 0; c < n; ++c) product += columns[size_t(i)][size_t(c)] * columns[size_t(j)][size_t(c)];
        EXPECT_NEAR(product, double(i == j), 1e-6);
      }
    }
  }
}

TEST(Rotation, SignsDependOnSeedAndChannel) {
  int flips = 0, differ = 0;
  for (int64_t c = 0; c < 256; ++c) {
    flips += rotation_flips(24, c);
    differ += rotation_flips(24, c) != rotation_flips(25, c);
  }
  EXPECT_GT(flips, 96);
  EXPECT_LT(flips, 160);
  EXPECT_GT(differ, 96);
}

}  // namespace
}  // namespace mxflash
