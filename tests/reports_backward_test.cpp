// What users of FP8 and MXFP8 attention reported about the backward, each as the smallest input that shows it. The
// number in a test's name is its row in docs/reports.md, which also lists what is excluded and why.
//
// Results are compared with the float64 oracle on the dequantized operands, so that what is tested is the attention and
// not the quantizer.
#include <gtest/gtest.h>
#include <mxflash/backend.h>
#include <mxflash/operator.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kit/cases.h"
#include "kit/compare.h"
#include "kit/mx_attention.h"
#include "kit/operands.h"
#include "kit/oracle.h"
#include "kit/random.h"
#include "kit/runner.h"

namespace mxflash {
namespace {

using kit::AttentionCase;
using kit::AttentionResult;
using kit::Distribution;
using kit::MxAttention;
using kit::Operands;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr MxBlock kBlocks[] = {MxBlock::square32, MxBlock::row32, MxBlock::col32};

// P and dS are rounded to E4M3: off by at most 2^-4 of themselves, so that for independent operands the error has at
// most 2^-8 of the energy.
constexpr double kMinDb = 24;

const std::string& backend() {
  static const char* const forced = std::getenv("MXFLASH_BACKEND");
  static const std::string name = forced && *forced ? forced : "ref";
  return name;
}

AttentionResult run(const MxAttention& a) { return kit::run_attention(a, backend(), backend()); }

bool all_finite(const std::vector<float>& x) {
  return std::all_of(x.begin(), x.end(), [](float value) { return std::isfinite(value); });
}
bool all_zero(const std::vector<float>& x) {
  return std::all_of(x.begin(), x.end(), [](float value) { return value == 0; });
}
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}
bool same_bits(const AttentionResult& a, const AttentionResult& b) {
  return same_bits(a.out, b.out) && same_bits(a.lse, b.lse) && same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) &&
         same_bits(a.dv, b.dv);
}

// Where the exact result is zero there is no ratio: then the result must be zero as well, to `zero`.
void expect_close(const char* name, const std::vector<double>& want, const std::vector<float>& got,
                  double zero = 1e-5) {
  const kit::Metrics m = kit::compare(want, got);
  if (m.nonfinite_mismatch == 0 && m.max_abs_err <= zero) return;
  EXPECT_GE(m.sqnr_db, kMinDb) << name << ": max error " << m.max_abs_err << " at " << m.worst_index;
}

AttentionResult expect_near_oracle(const AttentionCase& c, const Operands& x, MxBlock block = MxBlock::square32) {
  SCOPED_TRACE(testing::Message() << c.name << ", block " << int(block));
  const MxAttention a = kit::quantize_case(c, x, Dtype::e4m3, block);
  const kit::OracleResult want = kit::oracle_attention(kit::dequantized_problem(c, a));
  AttentionResult got = run(a);
  expect_close("out", want.out, got.out);
  expect_close("dq", want.dq, got.dq);
  expect_close("dk", want.dk, got.dk);
  expect_close("dv", want.dv, got.dv);
  return got;
}
AttentionResult expect_near_oracle(const AttentionCase& c) { return expect_near_oracle(c, kit::make_operands(c)); }

// ---- numerics -----------------------------------------------------------------------------------------------------

// An overflowed gradient must reach the loss scaler, in every gradient that depends on it.
TEST(Reports, A5_InfInDoutReachesTheGradients) {
  const AttentionCase c{.name = "inf", .lens_q = {40}, .lens_k = {40}};
  Operands x = kit::make_operands(c);
  x.dout[100] = kInf;
  const AttentionResult got = run(kit::quantize_case(c, x));
  const auto any_nan = [](const std::vector<float>& t) {
    return std::any_of(t.begin(), t.end(), [](float value) { return std::isnan(value); });
  };
  EXPECT_TRUE(any_nan(got.dq));
  EXPECT_TRUE(any_nan(got.dk));
  EXPECT_TRUE(any_nan(got.dv));
  EXPECT_TRUE(all_finite(got.out));
}

// With a fixed scale of 2^-8, P = 1 / 90000 would round to the smallest subnormal of E4M3, and dv would lose a third.
TEST(Reports, A22_LongFlatAttentionKeepsOutAndDv) {
  for (const int32_t keys : {65536, 90000}) {
    const AttentionCase c{.name = "flat", .lens_q = {8}, .lens_k = {keys}, .distribution = Distribution::constant};
    const Operands x = kit::make_operands(c);
    const kit::OracleResult want = kit::oracle_attention(kit::make_problem(c, x));
    const AttentionResult got = run(kit::quantize_case(c, x));
    EXPECT_GE(kit::compare(want.out, got.out).sqnr_db, 20) << keys;
    EXPECT_GE(kit::compare(want.dv, got.dv).sqnr_db, 20) << keys;
  }
}

// The largest norm of a row of 64 elements.
double longest_row(const std::vector<double>& x) {
  double longest = 0;
  for (size_t row = 0; row < x.size(); row += 64) {
    double sum = 0;
    for (size_t i = row; i < row + 64; ++i) sum += x[i] * x[i];
    longest = std::max(longest, std::sqrt(sum));
  }
  return longest;
}

TEST(Reports, A26_ScoresBetweenMinus490AndMinus200InBackward) {
  const AttentionCase c{.name = "scores", .lens_q = {65}, .lens_k = {193}};
  Operands x = kit::make_operands(c);
  kit::Random random(26);
  for (float& q : x.q) q = float(6.2 + random.uniform());  // q.k / 8 between -490 and -200
  for (float& k : x.k) k = float(-8.3 + 3 * random.uniform());
  const MxAttention a = kit::quantize_case(c, x);
  const AttentionResult got = run(a);
  const kit::OracleResult want = kit::oracle_attention(kit::dequantized_problem(c, a));
  for (const auto* t : {&got.out, &got.dq, &got.dk, &got.dv}) EXPECT_TRUE(all_finite(*t));
  expect_close("dv", want.dv, got.dv);
  // The mean of k multiplies the errors of dS, each at most 2^-4 |dS|, and sum |dS| <= 2 max |dP| <= 2 |dout| |v|.
  const kit::OracleProblem exact = kit::dequantized_problem(c, a);
  const double bound = 2 * longest_row(exact.dout) * longest_row(exact.v) * longest_row(exact.k) / 16 / 8;
  EXPECT_LE(kit::compare(want.dq, got.dq).max_abs_err, bound);
}

// The last key tile is half full, and lse is so low that a padded score of 0 would overflow exp(0 - lse).
TEST(Reports, A37_HalfTileWithVeryNegativeLse) {
  const AttentionCase c{.name = "half_tile", .lens_q = {704}, .lens_k = {704}};
  Operands x = kit::make_operands(c);
  std::fill(x.q.begin(), x.q.end(), 0.0f);
  std::fill(x.k.begin(), x.k.end(), 0.0f);
  for (int64_t i = 0; i < 704; ++i) {
    x.q[i * 64] = 1;
    x.k[i * 64] = -960;
  }
  const MxAttention a = kit::quantize_case(c, x);
  const AttentionResult got = run(a);
  for (const float lse : got.lse) ASSERT_NEAR(lse, -120 + std::log(704.0), 1e-4);
  for (const auto* t : {&got.out, &got.dq, &got.dk, &got.dv}) EXPECT_TRUE(all_finite(*t));
  const kit::OracleResult want = kit::oracle_attention(kit::dequantized_problem(c, a));
  expect_close("out", want.out, got.out);
  expect_close("dv", want.dv, got.dv);
  expect_close("dk", want.dk, got.dk);
}

TEST(Reports, A39_LengthsThatNoTileDivides) {
  for (const int32_t length : {31, 65, 97, 127, 129, 191, 255, 257}) {
    SCOPED_TRACE(length);
    for (const bool causal : {false, true}) {
      expect_near_oracle({.name = "tail", .lens_q = {length}, .lens_k = {length}, .mask = {.causal = causal}});
    }
  }
}

TEST(Reports, A50_HeavyTailsAndLargeHeads) {
  AttentionCase c{.name = "heavy", .lens_q = {40, 70, 33}, .lens_k = {40, 70, 33}, .head_dim = 256, .head_dim_v = 256};
  Operands x = kit::make_operands(c);
  for (std::vector<float>* t : {&x.k, &x.v, &x.dout}) {
    for (float& value : *t) value *= value * value;
  }
  expect_near_oracle(c, x);
  c.lens_q = c.lens_k = {70, 70};
  expect_near_oracle(c);
}

TEST(Reports, A50_SixtyFourSequencesOfOneToken) { expect_near_oracle(*kit::find_case("sequences_of_one_64_d128")); }

TEST(Reports, A52_ShortSequencesInBackward) {
  for (const int32_t length : {1, 9, 12, 193}) {
    expect_near_oracle({.name = "short", .lens_q = {length}, .lens_k = {length}});
  }
}

// One visible key per row: P = 1 and dS = 0, so dv = dout and dq = dk = 0 to the last bit, with a scale of its own in
// every row and block.
TEST(Reports, Seen_DistinctScalesGiveExactDv) {
  for (const MxBlock block : kBlocks) {
    for (const int32_t shift : {0, 1, 32, 100}) {
      SCOPED_TRACE(testing::Message() << "block " << int(block) << ", shift " << shift);
      const AttentionCase c{.name = "diagonal",
                            .lens_q = {129},
                            .lens_k = {129 + shift},
                            .head_dim = 128,
                            .head_dim_v = 128,
                            .mask = {.window_left = 0, .window_right = 0}};
      Operands x = kit::make_operands(c);
      kit::Random random(43);
      for (std::vector<float>* t : {&x.q, &x.k, &x.v, &x.dout}) {
        for (size_t i = 0; i < t->size(); ++i) {
          const auto row = int(i / 128) / (block == MxBlock::row32 ? 1 : 32);
          const auto col = int(i % 128) / (block == MxBlock::col32 ? 1 : 32);
          (*t)[i] = std::ldexp(1 + 0.125f * float(random.below(8)), (row * 5 + col * 3) % 13 - 6);
        }
      }
      const AttentionResult got = run(kit::quantize_case(c, x, Dtype::e4m3, block));
      EXPECT_TRUE(all_zero(got.dq));
      EXPECT_TRUE(all_zero(got.dk));
      std::vector<float> want(got.dv.size(), 0);
      std::copy(x.dout.begin(), x.dout.end(), want.begin() + shift * 128);
      EXPECT_EQ(got.dv, want);
    }
  }
}

// ---- masks and empty rows -----------------------------------------------------------------------------------------

TEST(Reports, A29_NoKeysGiveZeroGradients) {
  for (const bool causal : {false, true}) {
    const AttentionCase c{
        .name = "no_keys", .lens_q = {40}, .lens_k = {0}, .mask = {.causal = causal}, .with_dlse = true};
    const AttentionResult got = run(kit::quantize_case(c, kit::make_operands(c)));
    EXPECT_TRUE(all_zero(got.dq));
  }
  const AttentionCase c{.name = "no_queries", .lens_q = {0}, .lens_k = {40}};
  const AttentionResult got = run(kit::quantize_case(c, kit::make_operands(c)));
  EXPECT_TRUE(all_zero(got.dk));
  EXPECT_TRUE(all_zero(got.dv));
}

TEST(Reports, A30_SomeSequencesHaveNoKeysInBackward) { expect_near_oracle(*kit::find_case("no_key_in_some_d64")); }

TEST(Reports, A35_FullLeftWindowIsCausalBitForBitInBackward) {
  AttentionCase c{.name = "window", .lens_q = {129}, .lens_k = {129}, .mask = {.causal = true}};
  const Operands x = kit::make_operands(c);
  const AttentionResult causal = run(kit::quantize_case(c, x));
  c.mask = {.window_left = 128, .window_right = 0};
  EXPECT_TRUE(same_bits(run(kit::quantize_case(c, x)), causal));
}

TEST(Reports, A35_WindowsInBackward) {
  constexpr int32_t kWindows[][2] = {{3, 1}, {0, 0}, {-1, 0}, {0, -1}, {17, 5}};
  for (const auto& [left, right] : kWindows) {
    for (const int32_t keys : {129, 40}) {
      expect_near_oracle({.name = "window", .lens_q = {129}, .lens_k = {keys}, .mask = {false, left, right}});
    }
  }
}

// Only the last query of each sequence sees its only key.
TEST(Reports, A40_EmptyRowsHaveZeroDq) {
  const AttentionCase& c = *kit::find_case("many_queries_one_key_causal_d32");
  const AttentionResult got = expect_near_oracle(c);
  EXPECT_TRUE(all_finite(got.dq));
  auto row = got.dq.begin();
  for (const int32_t queries : c.lens_q) {
    EXPECT_TRUE(all_zero({row, row + (queries - 1) * 32})) << queries;
    row += queries * 32;
  }
}

// The same through the operator: smoothing k must not let a gradient of lse = -inf through.
TEST(Reports, A40_EmptyRowsHaveZeroDqInTheOperator) {
  const AttentionCase c{.name = "empty", .lens_q = {3}, .lens_k = {2}, .mask = {.causal = true}, .with_dlse = true};
  Operands x = kit::make_operands(c);
  for (float& k : x.k) k += 2;
  const kit::FloatResult got = kit::run_operator({.head_dim = 64,
                                                  .head_dim_v = 64,
                                                  .q = x.q,
                                                  .k = x.k,
                                                  .v = x.v,
                                                  .dout = x.dout,
                                                  .dlse = x.dlse,
                                                  .cu_seqlens_q = {},
                                                  .cu_seqlens_k = {},
                                                  .mask = c.mask},
                                                 {});
  EXPECT_TRUE(all_zero({got.dq.begin(), got.dq.begin() + 64}));
}

// ---- jagged -------------------------------------------------------------------------------------------------------

TEST(Reports, A42_EmptySequencesBeforeALongOne) { expect_near_oracle(*kit::find_case("empty_sequences_first_d64")); }

TEST(Reports, A43_SlackRowsAreZero) {
  const AttentionCase c{
      .name = "slack", .lens_q = {144, 288, 512}, .lens_k = {144, 288, 512}, .slack_q = 2, .slack_k = 2};
  const AttentionResult got = run(kit::quantize_case(c, kit::make_operands(c)));  // outputs start as NaN
  for (const auto* t : {&got.out, &got.dq, &got.dk, &got.dv}) {
    EXPECT_TRUE(all_finite(*t));
    EXPECT_TRUE(all_zero({t->begin() + 944 * 64, t->end()}));
  }
  EXPECT_EQ(got.lse[944], -kInf);
  EXPECT_EQ(got.lse[945], -kInf);
}

// Payload 0x7F and scale 0xFF everywhere outside of the sequences: in the tail of the last tile, in the gaps of the
// scale buffers, behind the last token.
TEST(Reports, A31_PoisonedPaddingChangesNoBit) {
  std::vector<AttentionCase> cases = kit::attention_cases(true);
  for (const int32_t length : {32, 64, 96, 48, 9})
    cases.push_back({.name = "cache", .lens_q = {length}, .lens_k = {length}});
  cases.push_back({.name = "cross", .lens_q = {503}, .lens_k = {1001}});
  cases.push_back({.name = "packed", .lens_q = {32, 64, 96, 48}, .lens_k = {32, 64, 96, 48}});
  for (const AttentionCase& c : cases) {
    SCOPED_TRACE(c.name);
    const MxAttention clean = kit::quantize_case(c, kit::make_operands(c)), poisoned = kit::poison_padding(clean);
    EXPECT_EQ(kit::compare_bits(clean, run(clean), poisoned, run(poisoned)), "");
  }
}

// Equal lengths need no cu_seqlens; the same lengths given as cu_seqlens are the same call.
TEST(Reports, A62_JaggedEqualsDenseBitForBit) {
  const AttentionCase& c = *kit::find_case("dense_batch_d128");
  const MxAttention dense = kit::quantize_case(c, kit::make_operands(c)), jagged = kit::poison_padding(dense);
  ASSERT_TRUE(dense.cu_seqlens_k.empty() && !jagged.cu_seqlens_k.empty());
  EXPECT_EQ(kit::compare_bits(dense, run(dense), jagged, run(jagged)), "");
}

// d = 64 has two scale columns a row.
TEST(Reports, A17_PoisonedScalesChangeNoBitInBackward) {
  const AttentionCase c{.name = "scales", .lens_q = {17, 130}, .lens_k = {33, 129}};
  for (const MxBlock block : kBlocks) {
    const MxAttention clean = kit::quantize_case(c, kit::make_operands(c), Dtype::e5m2, block);
    const MxAttention poisoned = kit::poison_padding(clean);
    EXPECT_EQ(kit::compare_bits(clean, run(clean), poisoned, run(poisoned)), "") << int(block);
  }
}

// ---- strides and determinism --------------------------------------------------------------------------------------

// The operator on this dout, with any strides.
AttentionResult run_operator(const AttentionCase& c, Operands& x, const Tensor& dout) {
  const int64_t sq = kit::total_q(c), sk = kit::total_k(c), d = c.head_dim, hq = c.num_heads_q, hk = c.num_heads_kv;
  AttentionResult r;
  r.out.assign(size_t(sq * hq * d), kNan);
  r.dq = r.out;
  r.dk.assign(size_t(sk * hk * d), kNan);
  r.dv = r.dk;
  OperatorFwd fwd{.q = make_tensor(x.q.data(), Dtype::f32, sq, hq, d),
                  .k = make_tensor(x.k.data(), Dtype::f32, sk, hk, d),
                  .v = make_tensor(x.v.data(), Dtype::f32, sk, hk, d),
                  .out = make_tensor(r.out.data(), Dtype::f32, sq, hq, d),
                  .lse = {}};
  const kit::AlignedBuffer saved(operator_saved(fwd)), workspace(operator_fwd_workspace(fwd));
  fwd.saved = saved.data();
  fwd.saved_size = saved.size();
  fwd.workspace = workspace.data();
  fwd.workspace_size = workspace.size();
  kit::require_ok(operator_fwd(fwd));
  OperatorBwd bwd{.fwd = fwd,
                  .dout = dout,
                  .dq = make_tensor(r.dq.data(), Dtype::f32, sq, hq, d),
                  .dk = make_tensor(r.dk.data(), Dtype::f32, sk, hk, d),
                  .dv = make_tensor(r.dv.data(), Dtype::f32, sk, hk, d)};
  const kit::AlignedBuffer bwd_workspace(operator_bwd_workspace(bwd));
  bwd.workspace = bwd_workspace.data();
  bwd.workspace_size = bwd_workspace.size();
  kit::require_ok(operator_bwd(bwd));
  return r;
}

TEST(Reports, A45_ExpandedAndSlicedDout) {
  const AttentionCase c{.name = "dout", .lens_q = {70}, .lens_k = {70}, .num_heads_q = 4, .num_heads_kv = 2};
  Operands x = kit::make_operands(c);
  const Tensor contiguous = make_tensor(x.dout.data(), Dtype::f32, 70, 4, 64);

  // out.sum().backward(): one row of ones, expanded.
  std::vector<float> ones(64, 1.0f);
  Tensor expanded = contiguous;
  expanded.data = ones.data();
  expanded.stride = {0, 0, 1};
  Operands with_ones = x;
  std::fill(with_ones.dout.begin(), with_ones.dout.end(), 1.0f);
  const AttentionResult want_ones = run_operator(c, x, make_tensor(with_ones.dout.data(), Dtype::f32, 70, 4, 64));
  EXPECT_TRUE(same_bits(run_operator(c, x, expanded), want_ones));

  // A slice of a concatenation along the channels.
  std::vector<float> wide(x.dout.size() * 3, kNan);
  for (size_t i = 0; i < x.dout.size(); ++i) wide[i / 64 * 192 + 64 + i % 64] = x.dout[i];
  Tensor sliced = contiguous;
  sliced.data = wide.data() + 64;
  sliced.stride = {4 * 192, 192, 1};
  const AttentionResult want = run_operator(c, x, contiguous);
  EXPECT_TRUE(same_bits(run_operator(c, x, sliced), want));
  EXPECT_FALSE(same_bits(want.dq, want_ones.dq));

  // The same two as MX operands of the attention call.
  MxAttention a = kit::quantize_case(c, with_ones);
  const AttentionResult want_mx = run(a);
  a.dout.view.data.stride = {0, 0, 1};
  EXPECT_TRUE(same_bits(run(a), want_mx));
}

TEST(Reports, A48_ThirtyRunsAreEqualBitForBit) {
  const MxAttention a = kit::quantize_case(*kit::find_case("jagged_causal_gqa_d128"),
                                           kit::make_operands(*kit::find_case("jagged_causal_gqa_d128")));
  const AttentionResult want = run(a);
  for (int32_t i = 0; i < 30; ++i) {
    set_num_threads(1 + i % 5);
    EXPECT_TRUE(same_bits(run(a), want)) << "run " << i;
  }
  set_num_threads(0);
}

}  // namespace
}  // namespace mxflash
