// Operand images (mx/operand_image.h): where bytes lie, what they mean, and which calls write and take them.
#include <gtest/gtest.h>
#include <mxflash/attention.h>
#include <mxflash/quantize.h>

#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "kit/random.h"
#include "kit/runner.h"
#include "mx/bf16_image.h"
#include "mx/operand_image.h"
#include "ptx/descriptors.h"
#include "runtime/operand_image.h"

namespace mxflash {
namespace {

constexpr ImageRole kRoles[] = {ImageRole::query, ImageRole::key, ImageRole::value};

// ---- places -----------------------------------------------------------------------------------------------------

TEST(OperandImage, EveryElementHasItsOwnByte) {
  for (const ImageRole role : kRoles) {
    for (const int64_t dim : {64, 128}) {
      const ImageShape shape = ImageShape::of(role, 256, 3, dim);
      std::set<int64_t> seen;
      for (int64_t h = 0; h < 3; ++h) {
        for (int64_t t = 0; t < 256; ++t) {
          for (int64_t c = 0; c < dim; ++c) {
            const int64_t at = shape.offset(h, t, c);
            EXPECT_TRUE(at >= 0 && at < 3 * 256 * dim);
            EXPECT_TRUE(seen.insert(at).second);
          }
          EXPECT_GE(shape.scale_offset(h, t), 3 * 256 * dim);
          EXPECT_LT(shape.scale_offset(h, t), shape.size());
        }
      }
    }
  }
}

TEST(OperandImage, DimIsPaddedToASwizzleSpan) {
  EXPECT_EQ(image_dim(8), 64);
  EXPECT_EQ(image_dim(64), 64);
  EXPECT_EQ(image_dim(72), 128);
  const Jagged seq{.batch = 2};
  EXPECT_EQ(image_size(ImageRole::query, 200, 3, 96, seq), 3 * (256 * 128 + 4));
  EXPECT_EQ(image_size(ImageRole::key, 200, 3, 96, seq), 3 * (256 * 128 + 2));
  EXPECT_EQ(image_size(ImageRole::value, 200, 3, 40, seq), 3 * (256 * 64 + 2));
  EXPECT_EQ(image_size(ImageRole::value, 200, 3, 136, seq), 0);
  EXPECT_EQ(image_size(ImageRole::value, -1, 3, 64, seq), 0);
}

// The hardware xors address bits 4..6 (128-byte swizzle), 4..5 (64) or 4 (32) with the bits three above (CUTLASS calls
// them Swizzle<3,4,3>, <2,4,3>, <1,4,3>).
TEST(OperandImage, SwizzlesAreTheHardwares) {
  for (int64_t offset = 0; offset < 4096; ++offset) {
    EXPECT_EQ(swizzled(offset, 128), offset ^ ((offset & 0x380) >> 3));
    EXPECT_EQ(swizzled(offset, 64), offset ^ ((offset & 0x180) >> 3));
    EXPECT_EQ(swizzled(offset, 32), offset ^ ((offset & 0x080) >> 3));
    for (const int64_t span : {32, 64, 128}) EXPECT_EQ(swizzled(swizzled(offset, span), span), offset);
  }
}

TEST(OperandImage, DescriptorsCountInSixteenBytes) {
  using ptx::Swizzle;
  const uint64_t d = ptx::matrix_descriptor(0x12340, Swizzle::b128);
  EXPECT_EQ(d & 0x3FFF, 0x1234u);
  EXPECT_EQ(d >> 16 & 0x3FFF, 1u);
  EXPECT_EQ(d >> 32 & 0x3FFF, 1024u / 16);  // 8 rows of 128 bytes
  EXPECT_EQ(d >> 62, 1u);
  EXPECT_EQ(ptx::matrix_descriptor(0, Swizzle::b64) >> 32 & 0x3FFF, 512u / 16);
  EXPECT_EQ(ptx::matrix_descriptor(0, Swizzle::b32) >> 32 & 0x3FFF, 256u / 16);
  EXPECT_EQ(ptx::matrix_descriptor(0, Swizzle::b32) >> 62, 3u);
  EXPECT_EQ(ptx::advance(d, 64) - d, 4u);
}

// wgmma's fragments: a thread of a quad holds scores of columns 8 j + 2 c + e; packed four by four in the order of the
// kernel they must be bytes 4 c .. 4 c + 3 of A columns 0..15 and 16..31 of the group.
TEST(OperandImage, ScoresOfAThreadAreItsFragmentOfP) {
  for (int64_t c = 0; c < 4; ++c) {
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t byte = 0; byte < 4; ++byte) {
        const int64_t accumulator =
            8 * half + 2 * (byte / 2) * 2 + byte % 2;  // of 16 in a group: s[j], j + 1, j + 4, j + 5
        const int64_t column = 8 * (accumulator / 4) + 2 * c + accumulator % 2;
        EXPECT_EQ(value_position(column), 16 * half + 4 * c + byte);
      }
    }
  }
  for (int64_t t = 0; t < 32; ++t) EXPECT_EQ(value_token(value_position(t)), t);
}

// ---- BF16 images ------------------------------------------------------------------------------------------------

TEST(Bf16Image, EveryElementHasItsOwnPlace) {
  for (const int64_t dim : {64, 128, 192, 256}) {
    const Bf16ImageShape shape{.heads = 2, .tokens = 128, .dim = dim};
    std::set<int64_t> seen;
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t t = 0; t < 128; ++t) {
        for (int64_t c = 0; c < dim; ++c) {
          const int64_t at = shape.offset(h, t, c);
          EXPECT_TRUE(at >= 0 && at < shape.size());
          EXPECT_TRUE(seen.insert(at).second);
          // 8 tokens are one piece of memory: tiles of any multiple are one bulk copy.
          EXPECT_EQ(at / (8 * dim), (h * 128 + t) / 8);
        }
      }
    }
  }
}

// An atom is 8 rows of 128 bytes as the hardware swizzles them, where the descriptor's strides lead.
TEST(Bf16Image, AtomsAreTheHardwares) {
  const Bf16ImageShape shape{.heads = 1, .tokens = 128, .dim = 192};
  const uint64_t d = ptx::matrix_descriptor(0, ptx::Swizzle::b128, 1024, 192 / 64 * 1024);
  const int64_t leading = int64_t(d >> 16 & 0x3FFF) * 16, stride = int64_t(d >> 32 & 0x3FFF) * 16;
  EXPECT_EQ(d >> 62, 1u);
  for (int64_t t = 0; t < 128; ++t) {
    for (int64_t c = 0; c < 192; ++c) {
      const int64_t byte = t / 8 * stride + c / 64 * leading + t % 8 * 128 + c % 64 * 2;
      EXPECT_EQ(2 * shape.offset(0, t, c), swizzled(byte, 128));
    }
  }
}

// ---- bytes --------------------------------------------------------------------------------------------------------

struct Operand {
  std::vector<int32_t> cu{0, 70, 70, 331};
  Jagged seq{cu.data(), 3, 300};
  int64_t tokens = 340, heads = 2, dim = 96;  // 9 tokens of no sequence
  kit::OwnedMx mx;
  explicit Operand(Dtype element = Dtype::e4m3, MxBlock block = MxBlock::square32) {
    kit::Random random(7);
    std::vector<float> x(size_t(tokens * heads * dim));
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = float(random.normal()) * std::exp2(float(i % 7) - float(i % 400 == 0) * 30);
    mx = kit::quantize_floats(x, tokens, heads, dim, seq, element, block);
  }
  double value(int64_t token, int64_t head, int64_t c, const std::vector<float>& all) const {
    return double(all[size_t((token * heads + head) * dim + c)]);
  }
};

TEST(OperandImage, HoldsTheOperandUpToItsTileScale) {
  for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
    for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
      const Operand operand(element, block);
      const std::vector<float> all = kit::dequantize_to_floats(operand.mx.view, operand.seq);
      for (const ImageRole role : kRoles) {
        const ImageShape shape =
            ImageShape::of(role, padded_token_count(operand.tokens, operand.seq), operand.heads, 96);
        std::vector<uint8_t> image(size_t(shape.size()), 0xA5);
        const ImageStats stats = image_of(operand.mx.view, operand.seq, role, image.data());
        EXPECT_EQ(stats.total, 331 * 2 * 96);
        int64_t rounded = 0, covered = 0;
        for (int64_t b = 0; b < 3; ++b) {
          const Sequence s = sequence_at(operand.tokens, operand.seq, b);
          for (int64_t t = 0; t < s.length; ++t) {
            for (int64_t h = 0; h < operand.heads; ++h) {
              const uint8_t scale = image[size_t(shape.scale_offset(h, s.padded_start + t))];
              for (int64_t c = 0; c < operand.dim; ++c) {
                const double want = operand.value(s.start + t, h, c, all);
                const double got = decode_mx(image[size_t(shape.offset(h, s.padded_start + t, c))], scale, kE4m3);
                // Exact, or rounded in E4M3's subnormal range: half a step of 2^-9.
                EXPECT_LE(std::fabs(got - want), std::ldexp(1.0, scale - 127 - 10));
                rounded += got != want;
                ++covered;
              }
            }
          }
        }
        EXPECT_EQ(rounded, stats.rounded);
        EXPECT_EQ(covered, stats.total);
        EXPECT_GT(rounded, 0);  // the operand has elements that need it
        EXPECT_LT(rounded, covered / 20);
      }
    }
  }
}

TEST(OperandImage, PaddingIsZeroAndNanStays) {
  Operand operand;
  operand.mx.data[0] = 0x7F;
  const ImageShape shape = ImageShape::of(ImageRole::value, padded_token_count(operand.tokens, operand.seq), 2, 96);
  std::vector<uint8_t> image(size_t(shape.size()), 0xA5);
  image_of(operand.mx.view, operand.seq, ImageRole::value, image.data());
  EXPECT_EQ(image[size_t(shape.offset(0, 0, 0))], 0x7F);
  for (int64_t t = 70; t < 128; ++t) EXPECT_EQ(image[size_t(shape.offset(1, t, 5))], 0);
  for (int64_t c = 96; c < 128; ++c) EXPECT_EQ(image[size_t(shape.offset(0, 3, c))], 0);
}

// ---- calls --------------------------------------------------------------------------------------------------------

TEST(OperandImage, RefWritesItBesideTheTensor) {
  std::vector<float> x(64 * 2 * 64);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(int(i % 37) - 18) * 0.25f;
  kit::OwnedMx out = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, 64, 2, 64, {});
  std::vector<uint8_t> image(size_t(image_size(ImageRole::key, 64, 2, 64, {}))), want(image.size());
  Quantize args{.in = make_tensor(x.data(), Dtype::f32, 64, 2, 64),
                .out = out.view,
                .image = make_tensor(image.data(), Dtype::u8, image.size()),
                .image_role = ImageRole::key,
                .backend = "ref"};
  ASSERT_TRUE(quantize(args).ok()) << quantize(args).message;
  image_of(out.view, {}, ImageRole::key, want.data());
  EXPECT_EQ(image, want);

  args.backend = "cpu";
  EXPECT_STREQ(quantize(args).message,
               "quantize: cpu: image must not be given (backend ref writes images on the host), got one");
  args.backend = nullptr;
  EXPECT_TRUE(quantize(args).ok()) << "without a forced backend the next one takes the call";
  args.out.data.data = nullptr;
  EXPECT_STREQ(quantize(args).message, "quantize: ref: out must have data and scale, got null");
}

TEST(OperandImage, WriteImageGivesTheSameBytesAndCounts) {
  const Operand operand;
  for (const ImageRole role : kRoles) {
    const int64_t size = image_size(role, operand.tokens, operand.heads, operand.dim, operand.seq);
    std::vector<uint8_t> want(static_cast<size_t>(size)), got(want.size(), 0xA5);
    const ImageStats counted = image_of(operand.mx.view, operand.seq, role, want.data());
    ImageStats stats{-1, -1};
    const Status s = write_image({.in = operand.mx.view,
                                  .image = make_tensor(got.data(), Dtype::u8, size),
                                  .role = role,
                                  .seq = operand.seq,
                                  .stats = &stats});
    ASSERT_TRUE(s.ok()) << s.message;
    EXPECT_EQ(got, want);
    EXPECT_EQ(stats.rounded, counted.rounded);
    EXPECT_EQ(stats.total, counted.total);
  }
}

TEST(OperandImage, RulesOfImages) {
  std::vector<float> x(64 * 136);
  kit::OwnedMx out = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, 64, 1, 64, {});
  kit::OwnedMx wide = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, 64, 1, 136, {});
  alignas(16) static uint8_t image[128 * 64 + 64];
  Quantize args{.in = make_tensor(x.data(), Dtype::f32, 64, 1, 64),
                .out = out.view,
                .image = make_tensor(image, Dtype::u8, 128 * 64 + 1),
                .image_role = ImageRole::key};
  EXPECT_TRUE(quantize(args).ok()) << quantize(args).message;
  const auto message = [](Quantize a) { return std::string(quantize(a).message); };
  Quantize bad = args;
  bad.image_role = ImageRole(3);
  EXPECT_EQ(message(bad), "quantize: image_role must be query, key or value, got 3");
  bad = args;
  bad.image_role = ImageRole::query;
  EXPECT_EQ(message(bad), "quantize: image.shape[0] must be 8194 (image_size), got 8193");
  bad = args;
  bad.image.dtype = Dtype::e4m3;
  EXPECT_EQ(message(bad), "quantize: image.dtype must be u8, got e4m3");
  bad = args;
  bad.image.data = image + 1;
  EXPECT_EQ(message(bad).rfind("quantize: image.data must be aligned to 16 bytes, got address ", 0), 0u);
  bad = args;
  bad.in = make_tensor(x.data(), Dtype::f32, 64, 1, 136);
  bad.out = wide.view;
  EXPECT_EQ(message(bad), "quantize: image needs a dim of at most 128, got 136");

  std::vector<float> result(64 * 64);
  AttentionFwd fwd{.q = out.view,
                   .k = out.view,
                   .v = out.view,
                   .out = make_tensor(result.data(), Dtype::f32, 64, 1, 64),
                   .k_image = make_tensor(image, Dtype::u8, 128 * 64 + 1)};
  const auto attend = [](AttentionFwd a) {
    const kit::AlignedBuffer workspace(attention_fwd_workspace(a));
    a.workspace = workspace.data();
    a.workspace_size = workspace.size();
    return std::string(attention_fwd(a).message);
  };
  EXPECT_EQ(attend(fwd), "");  // backends of the host read the operand itself
  fwd.k.data.data = nullptr;
  EXPECT_EQ(attend(fwd), "attention_fwd: k must have data and scale (only backend sm90 reads k_image), got null");
  fwd.k_image.shape[0] = 5;
  EXPECT_EQ(attend(fwd), "attention_fwd: k_image.shape[0] must be 8193 (image_size), got 5");
}

}  // namespace
}  // namespace mxflash
