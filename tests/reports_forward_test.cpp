// What users of FP8 and MXFP8 attention reported about the forward and its masks, each as the smallest input that shows
// it. The number in a test's name is its row in docs/reports.md, which also lists what is excluded and why.
//
// Operands of exact probes are representable in E4M3, so that what is tested is the attention, not the quantizer. The
// other tests give the oracle the dequantized operands, for the same reason.
#include <gtest/gtest.h>
#include <mxflash/attention.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "kit/cases.h"
#include "kit/compare.h"
#include "kit/operands.h"
#include "kit/oracle.h"
#include "kit/random.h"
#include "kit/runner.h"
#include "mx/float16.h"

namespace mxflash {
namespace {

using kit::AttentionCase;
using kit::Operands;
using kit::OwnedMx;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr MxBlock kBlocks[] = {MxBlock::square32, MxBlock::row32, MxBlock::col32};
const float kLn2 = float(std::log(2.0));  // as softmax_scale: P = 2^(q.k)

// Where out is exact but for the rounding of fp32.
constexpr float kRounding = 0x1p-22f;
// A weight rounded to E4M3 is off by at most 2^-4 of itself, so for independent v the error has at most 2^-8 of the
// energy of out.
constexpr double kMinOutDb = 24;

Operands operands(std::vector<float> q, std::vector<float> k, std::vector<float> v) {
  return {.q = std::move(q), .k = std::move(k), .v = std::move(v), .dout = {}, .dlse = {}};
}

// A case and its operands in MXFP8.
struct MxCase {
  AttentionCase shape;
  std::vector<int32_t> cu_q, cu_k;
  OwnedMx q, k, v;

  MxCase(const AttentionCase& c, const Operands& x, MxBlock block = MxBlock::square32)
      : shape(c),
        cu_q(kit::cu_seqlens(c.lens_q)),
        cu_k(kit::cu_seqlens(c.lens_k)),
        q(kit::quantize_floats(x.q, kit::total_q(c), c.num_heads_q, c.head_dim, seq_q(), Dtype::e4m3, block)),
        k(kit::quantize_floats(x.k, kit::total_k(c), c.num_heads_kv, c.head_dim, seq_k(), Dtype::e4m3, block)),
        v(kit::quantize_floats(x.v, kit::total_k(c), c.num_heads_kv, c.head_dim_v, seq_k(), Dtype::e4m3, block)) {}

  Jagged seq_q() const { return shape.shared_q ? Jagged{} : jagged(cu_q, shape.lens_q); }
  Jagged seq_k() const { return jagged(cu_k, shape.lens_k); }

 private:
  static Jagged jagged(const std::vector<int32_t>& cu, const std::vector<int32_t>& lens) {
    return {.cu_seqlens = cu.data(),
            .batch = int32_t(lens.size()),
            .max_seqlen = *std::max_element(lens.begin(), lens.end())};
  }
};

struct Forward {
  std::vector<float> out, lse;
};

// Outputs start as NaN, so that what is not written shows; out is widened to float.
Forward forward(const MxCase& m, float softmax_scale = 0, Dtype out_dtype = Dtype::f32) {
  const AttentionCase& c = m.shape;
  const int64_t rows = kit::total_out(c), size = rows * c.num_heads_q * c.head_dim_v;
  Forward r{.out = std::vector<float>(size, kNan), .lse = std::vector<float>(c.num_heads_q * rows, kNan)};
  std::vector<uint16_t> half(size, 0x7FFF);  // NaN in both types
  void* const out = out_dtype == Dtype::f32 ? static_cast<void*>(r.out.data()) : half.data();
  AttentionFwd args{.q = m.q.view,
                    .k = m.k.view,
                    .v = m.v.view,
                    .out = make_tensor(out, out_dtype, rows, c.num_heads_q, c.head_dim_v),
                    .lse = make_tensor(r.lse.data(), Dtype::f32, c.num_heads_q, rows),
                    .seq_q = m.seq_q(),
                    .seq_k = m.seq_k(),
                    .mask = c.mask,
                    .softmax_scale = softmax_scale,
                    .shared_q = c.shared_q};
  const kit::AlignedBuffer workspace(attention_fwd_workspace(args));
  args.workspace = workspace.data();
  args.workspace_size = workspace.size();
  kit::require_ok(attention_fwd(args));
  for (int64_t i = 0; out_dtype != Dtype::f32 && i < size; ++i) {
    r.out[i] = out_dtype == Dtype::bf16 ? decode_bf16(half[i]) : decode_f16(half[i]);
  }
  return r;
}

kit::OracleResult exact(const MxCase& m) {
  const Operands x =
      operands(kit::dequantize_to_floats(m.q.view, m.seq_q()), kit::dequantize_to_floats(m.k.view, m.seq_k()),
               kit::dequantize_to_floats(m.v.view, m.seq_k()));
  return kit::oracle_attention(kit::make_problem(m.shape, x, false));
}

void expect_near_oracle(const MxCase& m) {
  SCOPED_TRACE(m.shape.name);
  const kit::OracleResult want = exact(m);
  const Forward got = forward(m);
  EXPECT_GE(kit::compare(want.out, got.out).sqnr_db, kMinOutDb);
  for (size_t i = 0; i < want.lse.size(); ++i) {
    if (std::isinf(want.lse[i])) {
      EXPECT_EQ(got.lse[i], want.lse[i]) << i;
    } else {
      EXPECT_NEAR(got.lse[i], want.lse[i], 1e-6 * (1 + std::abs(want.lse[i]))) << i;
    }
  }
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// q.k = logits[j] for every query: the first channel carries it. v = values[j] in all channels.
MxCase probe(const std::vector<float>& logits, const std::vector<float>& values, int32_t dim = 128) {
  const AttentionCase c{
      .name = "probe", .lens_q = {4}, .lens_k = {int32_t(logits.size())}, .head_dim = dim, .head_dim_v = 32};
  Operands x = operands(std::vector<float>(4 * dim), std::vector<float>(logits.size() * dim), {});
  for (int64_t i = 0; i < 4; ++i) x.q[i * dim] = 1;
  for (size_t j = 0; j < logits.size(); ++j) {
    x.k[j * dim] = logits[j];
    x.v.insert(x.v.end(), 32, values[j]);
  }
  return MxCase(c, x);
}

// Stops at the first difference.
void expect_near(const std::vector<float>& got, const std::vector<float>& want, double tolerance) {
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], tolerance) << "element " << i;
}
void expect_all_near(const std::vector<float>& got, double want, double tolerance) {
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want, tolerance) << "element " << i;
}

// ---- E8M0 codes and tiny scales -----------------------------------------------------------------------------------

TEST(Reports, A2_ScaleCodesInAttention) {
  MxCase m = probe({0}, {1});
  std::fill(m.v.data.begin(), m.v.data.end(), uint8_t(0x38));  // 1.0
  m.v.scale[0] = 0;
  expect_all_near(forward(m).out, 0x1p-127, 0);
  m.v.scale[0] = 254;
  expect_all_near(forward(m).out, 0x1p127, 0);
  m.v.scale[0] = 255;
  for (const float x : forward(m).out) EXPECT_TRUE(std::isnan(x));
  m.v.scale[0] = 127;
  m.k.scale[0] = 255;
  const Forward poisoned = forward(m);
  for (const float x : poisoned.out) EXPECT_TRUE(std::isnan(x));
  for (const float x : poisoned.lse) EXPECT_TRUE(std::isnan(x));
}

TEST(Reports, A4_TinyBlockScalesInAttention) {
  Operands x = kit::make_operands({.lens_q = {33}, .lens_k = {65}});
  for (float& q : x.q) q *= 1e-23f;
  for (float& k : x.k) k *= 1e-23f;
  for (float& v : x.v) v *= 1e-36f;
  const MxCase m({.name = "tiny", .lens_q = {33}, .lens_k = {65}}, x);
  EXPECT_GE(kit::compare(exact(m).out, forward(m).out).sqnr_db, 120) << "all weights are equal, so out is exact";
  expect_all_near(forward(m).lse, std::log(65.0), 1e-6);
}

// ---- P: what it is scaled by, what its row sum is -----------------------------------------------------------------

// Two key tiles whose logits differ by 3.75 octaves, in both orders and interleaved, and a single hot key.
TEST(Reports, A21_LazyRescaleMustNotSaturateP) {
  bool (*const orders[])(int) = {[](int j) { return j >= 128; }, [](int j) { return j < 128; },
                                 [](int j) { return j % 2 == 1; }, [](int j) { return j == 200; }};
  for (const auto is_hot : orders) {
    std::vector<float> logits(256, 0.0f), hot(256, 0.0f);
    double hot_sum = 0, sum = 0;
    for (int j = 0; j < 256; ++j) {
      if (is_hot(j)) logits[j] = 3.75f, hot[j] = 1, hot_sum += std::exp2(3.75);
      sum += std::exp2(logits[j]);
    }
    const Forward ones = forward(probe(logits, std::vector<float>(256, 1)), kLn2);
    expect_all_near(ones.out, 1, kRounding);
    expect_all_near(ones.lse, std::log(sum), 1e-6);
    // V = 1 cannot see a weight that saturates in numerator and denominator alike; the share of the hot keys can. With
    // w the exact share, weights off by 2^-4 move it by at most w (1 - w) 2^-4.
    const double w = hot_sum / sum;
    expect_all_near(forward(probe(logits, hot), kLn2).out, w, w * (1 - w) / 16);
  }
}

TEST(Reports, A22_ManySmallWeightsMustNotVanish) {
  for (const bool hot_first : {true, false}) {
    std::vector<float> logits(4097, -11.0f), values(4097, 1.0f);
    logits[hot_first ? 0 : 4096] = 0;
    values[hot_first ? 0 : 4096] = 0;
    const Forward got = forward(probe(logits, values), kLn2);
    expect_all_near(got.out, 2.0 / 3, 1e-6);  // 2^-11 of P's 2^8 is 2^-3: exact in E4M3
    expect_all_near(got.lse, std::log(3.0), 1e-6);
  }
}

TEST(Reports, A22_EqualLogitsGiveOne) {
  for (const size_t keys : {4096, 65536}) {
    expect_all_near(forward(probe(std::vector<float>(keys, 0), std::vector<float>(keys, 1), 32)).out, 1, kRounding);
  }
}

TEST(Reports, A23_LongSumsKeepTheirPrecision) {
  for (const size_t keys : {1024, 8192, 65536}) {
    std::vector<float> values(keys, 1.0f);
    for (size_t j = 0; j < keys; j += 2) values[j] = 0x1p-8f;
    const MxCase m = probe(std::vector<float>(keys, 0), values, 32);
    expect_all_near(forward(m).out, (1 + 0x1p-8) / 2, kRounding);
  }
}

TEST(Reports, A24_VeryNegativeLogits) {
  const AttentionCase c{.name = "negative", .lens_q = {1}, .lens_k = {1}, .head_dim = 128, .head_dim_v = 128};
  const Operands x = operands(std::vector<float>(128, 1), std::vector<float>(128, -4096), std::vector<float>(128, 1));
  const MxCase m(c, x);
  EXPECT_EQ(m.k.scale[0], 131);
  const Forward got = forward(m);
  expect_all_near(got.out, 1, kRounding);
  expect_all_near(got.lse, -524288 / std::sqrt(128.0), 0.004);  // -46340.95; fp32 steps are 1/256 there
}

TEST(Reports, A26_ScoresBetweenMinus490AndMinus200) {
  const AttentionCase c{.name = "scores", .lens_q = {65}, .lens_k = {193}, .head_dim = 64, .head_dim_v = 64};
  Operands x = kit::make_operands(c);
  kit::Random random(26);
  for (float& q : x.q) q = float(6.2 + random.uniform());  // q.k / 8 between -490 and -200
  for (float& k : x.k) k = float(-8.3 + 3 * random.uniform());
  const MxCase m(c, x);
  const Forward got = forward(m);
  for (const float lse : got.lse) EXPECT_TRUE(lse > -490 && lse < -200) << lse;
  expect_near_oracle(m);
}

// ---- masks and empty rows -----------------------------------------------------------------------------------------

// Row i of a sequence sees key j, from the definition.
bool sees(const Mask& mask, int64_t i, int64_t j, int64_t sq, int64_t sk) {
  const int64_t ahead = j - (i + sk - sq);
  if (mask.causal && ahead > 0) return false;
  if (mask.window_left >= 0 && ahead < -mask.window_left) return false;
  return mask.window_right < 0 || ahead <= mask.window_right;
}

// Equal logits and one-hot v: out[i][j] = 1 / (number of keys of row i) if j is one of them, else 0.
void expect_mask(int32_t sq, int32_t sk, const Mask& mask) {
  SCOPED_TRACE(testing::Message() << sq << " x " << sk << ", causal " << mask.causal << ", window " << mask.window_left
                                  << ", " << mask.window_right);
  const AttentionCase c{.name = "mask", .lens_q = {sq}, .lens_k = {sk}, .head_dim = 8, .head_dim_v = 256, .mask = mask};
  Operands x = operands(std::vector<float>(sq * 8), std::vector<float>(sk * 8), std::vector<float>(sk * 256));
  for (int64_t j = 0; j < sk; ++j) x.v[j * 256 + j] = 1;
  const Forward got = forward(MxCase(c, x));
  for (int64_t i = 0; i < sq; ++i) {
    int64_t count = 0;
    for (int64_t j = 0; j < sk; ++j) count += sees(mask, i, j, sq, sk);
    for (int64_t j = 0; j < 256; ++j) {
      const bool visible = j < sk && sees(mask, i, j, sq, sk);
      ASSERT_FLOAT_EQ(got.out[i * 256 + j], visible ? 1 / float(count) : 0) << "row " << i << ", key " << j;
    }
    if (count == 0) {
      ASSERT_EQ(got.lse[i], -kInf) << "row " << i;
    } else {
      ASSERT_NEAR(got.lse[i], std::log(double(count)), 1e-6) << "row " << i;
    }
  }
}

TEST(Reports, A27_FullyMaskedRowsAreZero) { expect_mask(3, 2, {.causal = true}); }

TEST(Reports, A28_CausalIsBottomRight) {
  expect_mask(2, 5, {.causal = true});
  expect_mask(5, 2, {.causal = true});
  // v = index: row i is the mean of 0 .. i + 3.
  const AttentionCase c{
      .name = "index", .lens_q = {2}, .lens_k = {5}, .head_dim = 8, .head_dim_v = 8, .mask = {.causal = true}};
  Operands x = operands(std::vector<float>(16), std::vector<float>(40), {});
  for (int j = 0; j < 5; ++j) x.v.insert(x.v.end(), 8, float(j));
  const Forward got = forward(MxCase(c, x));
  EXPECT_FLOAT_EQ(got.out[0], 1.5f);
  EXPECT_FLOAT_EQ(got.out[8], 2.0f);
}

TEST(Reports, A29_NoKeysGiveZeroAndMinusInfinity) {
  for (const bool causal : {false, true}) {
    const AttentionCase c{.name = "no_keys", .lens_q = {40}, .lens_k = {0}, .mask = {.causal = causal}};
    const Forward got = forward(MxCase(c, kit::make_operands(c)));
    expect_all_near(got.out, 0, 0);
    for (const float lse : got.lse) EXPECT_EQ(lse, -kInf);
  }
}

TEST(Reports, A30_SomeSequencesHaveNoKeys) {
  for (const bool causal : {false, true}) {
    const AttentionCase c{
        .name = "some_empty", .lens_q = {1, 2, 1, 2}, .lens_k = {0, 2, 0, 2}, .mask = {.causal = causal}};
    const MxCase m(c, kit::make_operands(c));
    expect_near_oracle(m);
    const Forward got = forward(m);
    for (const int64_t row : {0, 3}) {
      EXPECT_EQ(got.lse[row], -kInf);
      for (int64_t ch = 0; ch < 64; ++ch) EXPECT_EQ(got.out[row * 64 + ch], 0);
    }
  }
}

TEST(Reports, A35_EverySignOfTheWindow) {
  constexpr int32_t kSizes[][2] = {{129, 129}, {129, 40}, {40, 129}};
  for (const auto& [sq, sk] : kSizes) {
    for (const int32_t left : {-1, 0, 3, 128}) {
      for (const int32_t right : {-1, 0, 1, 128}) {
        for (const bool causal : {false, true}) expect_mask(sq, sk, {causal, left, right});
      }
    }
  }
}

TEST(Reports, A35_FullLeftWindowIsCausalBitForBit) {
  AttentionCase c{.name = "window", .lens_q = {129}, .lens_k = {129}, .mask = {.causal = true}};
  const Operands x = kit::make_operands(c);
  const Forward causal = forward(MxCase(c, x));
  for (const int32_t left : {-1, 128, 100000}) {
    c.mask = {.window_left = left, .window_right = 0};
    const Forward window = forward(MxCase(c, x));
    EXPECT_TRUE(same_bits(window.out, causal.out)) << left;
    EXPECT_TRUE(same_bits(window.lse, causal.lse)) << left;
  }
}

kit::FloatResult operator_forward(const AttentionCase& c, const Operands& x) {
  kit::FloatProblem p;
  p.num_heads_q = c.num_heads_q;
  p.num_heads_kv = c.num_heads_kv;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.q = x.q;
  p.k = x.k;
  p.v = x.v;
  p.cu_seqlens_q = kit::cu_seqlens(c.lens_q);
  p.cu_seqlens_k = kit::cu_seqlens(c.lens_k);
  p.mask = c.mask;
  p.shared_q = c.shared_q;
  return kit::run_operator(p, {.backward = false});  // the default recipe: all options on
}

// Also through the operator, where the mean of v must not show.
TEST(Reports, A27_FullyMaskedRowsAreZeroInTheOperator) {
  const AttentionCase c{.lens_q = {3}, .lens_k = {2}, .head_dim = 8, .head_dim_v = 8, .mask = {.causal = true}};
  const Operands x = operands(std::vector<float>(24, 1.0f), std::vector<float>(16, 1.0f), std::vector<float>(16, 5.0f));
  const kit::FloatResult got = operator_forward(c, x);
  EXPECT_EQ(got.lse[0], -kInf);
  std::vector<float> want(24, 5.0f);
  std::fill_n(want.begin(), 8, 0.0f);
  expect_near(got.out, want, 5 * kRounding);
}

// The probe that finds most of the above: v = 1 gives out = 1, whatever the mask, the lengths or the logits.
TEST(Reports, A22_VOneGivesOneInEveryCase) {
  for (const AttentionCase& c : kit::attention_cases()) {
    SCOPED_TRACE(c.name);
    Operands x = kit::make_operands(c);
    std::fill(x.v.begin(), x.v.end(), 1.0f);
    const Forward got = forward(MxCase(c, x));
    const kit::FloatResult smoothed = operator_forward(c, x);
    std::vector<float> want(got.out.size(), 0);
    int64_t row = 0;
    for (size_t b = 0; b < c.lens_k.size(); ++b) {
      const int32_t sq = c.lens_q[c.shared_q ? 0 : b], sk = c.lens_k[b];
      for (int64_t i = 0; i < sq; ++i, ++row) {
        bool any = false;
        for (int64_t j = 0; j < sk && !any; ++j) any = sees(c.mask, i, j, sq, sk);
        const int64_t size = int64_t(c.num_heads_q) * c.head_dim_v;
        std::fill_n(want.begin() + row * size, size, any ? 1.0f : 0.0f);
      }
    }
    expect_near(got.out, want, kRounding);
    expect_near(smoothed.out, want, kRounding);
  }
}

// ---- what lies outside sequences ----------------------------------------------------------------------------------

TEST(Reports, A31_NeighboursAreNeverSeen) {
  const AttentionCase c{.name = "neighbours", .lens_q = {32, 64, 96, 48}, .lens_k = {32, 64, 96, 48}};
  const Operands clean = kit::make_operands(c);
  const Forward want = forward(MxCase(c, clean));
  const std::vector<int32_t> cu = kit::cu_seqlens(c.lens_q);
  for (size_t b = 0; b < c.lens_q.size(); ++b) {
    Operands x = clean;
    const int64_t first = cu[b] * 64, end = cu[b + 1] * 64;
    for (std::vector<float>* t : {&x.q, &x.k, &x.v}) {
      std::fill(t->begin(), t->begin() + first, kNan);
      std::fill(t->begin() + end, t->end(), kNan);
    }
    const Forward got = forward(MxCase(c, x));
    EXPECT_EQ(std::memcmp(&got.out[first], &want.out[first], size_t(end - first) * sizeof(float)), 0) << b;
  }
}

// d = 64 fills two of the four scale columns of an atom; 17 rows fill few of its 128 rows.
TEST(Reports, A17_ScalePaddingInAttention) {
  const AttentionCase c{.name = "atoms", .lens_q = {17, 130}, .lens_k = {33, 129}};
  const Operands x = kit::make_operands(c);
  MxCase m(c, x, MxBlock::row32);
  const Forward want = forward(m);
  const auto to_atoms = [](OwnedMx& t, const Jagged& seq) {
    const auto& shape = t.view.data.shape;
    OwnedMx atoms =
        kit::make_owned_mx(Dtype::e4m3, MxBlock::row32, ScaleLayout::atom128x4, shape[0], shape[1], shape[2], seq);
    atoms.data = t.data;
    atoms.view.data.data = atoms.data.data();
    kit::require_ok(convert_scales({.in = t.view, .out = atoms.view, .seq = seq}));
    for (uint8_t& byte : atoms.scale) byte = byte == 0 ? 0xFF : byte;  // no block of normal numbers has scale 0
    t = std::move(atoms);
  };
  to_atoms(m.q, m.seq_q());
  to_atoms(m.k, m.seq_k());
  to_atoms(m.v, m.seq_k());
  const Forward got = forward(m);
  EXPECT_TRUE(same_bits(got.out, want.out));
  EXPECT_TRUE(same_bits(got.lse, want.lse));
}

// ---- sizes and types ----------------------------------------------------------------------------------------------

TEST(Reports, A32_EveryOutputTypeHoldsTheSameNumbers) {
  const AttentionCase c{.name = "long", .lens_q = {4}, .lens_k = {62208}};
  const MxCase m(c, kit::make_operands(c));
  const Forward f32 = forward(m), bf16 = forward(m, 0, Dtype::bf16), f16 = forward(m, 0, Dtype::f16);
  EXPECT_TRUE(same_bits(bf16.lse, f32.lse) && same_bits(f16.lse, f32.lse));
  for (size_t i = 0; i < f32.out.size(); ++i) {
    EXPECT_NE(bf16.out[i], 0);
    EXPECT_EQ(bf16.out[i], decode_bf16(encode_bf16(f32.out[i])));
    EXPECT_EQ(f16.out[i], decode_f16(encode_f16(f32.out[i])));
  }
}

TEST(Reports, A33_EveryHeadDimIsExactOrRejected) {
  for (int32_t dim = 8; dim <= 256; dim += 8) {
    SCOPED_TRACE(dim);
    const AttentionCase c{.name = "head_dim", .lens_q = {33}, .lens_k = {65}, .head_dim = dim, .head_dim_v = 264 - dim};
    for (const MxBlock block : kBlocks) expect_near_oracle(MxCase(c, kit::make_operands(c), block));
  }
}

TEST(Reports, A52_ShortAndOddLengths) {
  for (const int32_t length : {1, 9, 12, 65, 100, 127, 193, 255}) {
    SCOPED_TRACE(length);
    for (const bool causal : {false, true}) {
      const AttentionCase c{.name = "short", .lens_q = {length}, .lens_k = {length}, .mask = {.causal = causal}};
      expect_near_oracle(MxCase(c, kit::make_operands(c)));
    }
  }
}

// ---- distinct scales ----------------------------------------------------------------------------------------------

// Values with three mantissa bits and an exponent of their own for every block: exact, and no two blocks alike.
std::vector<float> distinct_blocks(int64_t tokens, int64_t dim, MxBlock block, uint64_t seed) {
  std::vector<float> x(tokens * dim);
  kit::Random random(seed);
  for (int64_t i = 0; i < tokens * dim; ++i) {
    const int64_t row = i / dim / (block == MxBlock::row32 ? 1 : 32),
                  col = i % dim / (block == MxBlock::col32 ? 1 : 32);
    const int exponent = int((row * 5 + col * 3) % 13) - 6;
    x[i] = std::ldexp(1 + 0.125f * float(random.below(8)), exponent) * (random.below(2) ? 1.0f : -1.0f);
  }
  return x;
}

// One visible key per row gives lse = q.k and out = v to the last bit: diagonals of S for several offsets between
// queries and keys, then with a shared query and sequences of one key all of S.
TEST(Reports, Seen_DistinctScalesGiveExactQK) {
  constexpr int32_t kSq = 129, kDim = 128;
  const auto check = [&](AttentionCase c, MxBlock block, auto key_of_row) {
    c.head_dim = c.head_dim_v = kDim;
    const int64_t keys = kit::total_k(c), queries = kit::total_q(c);
    const Operands x = operands(distinct_blocks(queries, kDim, block, 1), distinct_blocks(keys, kDim, block, 2),
                                distinct_blocks(keys, kDim, block, 3));
    const MxCase m(c, x, block);
    ASSERT_EQ(kit::dequantize_to_floats(m.q.view, m.seq_q()), x.q) << "the probe is exact";
    const Forward got = forward(m, 1.0f);
    for (int64_t row = 0; row < kit::total_out(c); ++row) {
      const int64_t i = row % queries, j = key_of_row(row);
      if (j < 0 || j >= keys) continue;
      double score = 0;
      for (int64_t ch = 0; ch < kDim; ++ch) score += double(x.q[i * kDim + ch]) * double(x.k[j * kDim + ch]);
      ASSERT_FLOAT_EQ(got.lse[row], float(score)) << "row " << i << ", key " << j;
      for (int64_t ch = 0; ch < kDim; ++ch) ASSERT_FLOAT_EQ(got.out[row * kDim + ch], x.v[j * kDim + ch]);
    }
  };
  for (const MxBlock block : kBlocks) {
    SCOPED_TRACE(int(block));
    for (const int32_t shift : {0, 1, 31, 32, 100, -5}) {
      const Mask diagonal{.window_left = 0, .window_right = 0};
      check({.name = "diagonal", .lens_q = {kSq}, .lens_k = {kSq + shift}, .mask = diagonal}, block,
            [shift](int64_t row) { return row + shift; });
    }
    if (block == MxBlock::row32) {
      check({.name = "all", .lens_q = {kSq}, .lens_k = std::vector<int32_t>(40, 1), .shared_q = true}, block,
            [](int64_t row) { return row / kSq; });
    }
  }
}

}  // namespace
}  // namespace mxflash
