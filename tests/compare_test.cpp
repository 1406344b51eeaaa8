// The conventions of kit/compare.h, and what else the judge stands on: random numbers that are the same everywhere, the
// case list, and operands that are what their distribution says.
#include "kit/compare.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cmath>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kit/operands.h"

namespace mxflash::kit {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Doubles = std::vector<double>;
using Floats = std::vector<float>;

TEST(Compare, KnownError) {
  const Metrics m = compare(Doubles{3, 4, 0}, Floats{3, 4.5f, 0});
  EXPECT_DOUBLE_EQ(m.signal_energy, 25);
  EXPECT_DOUBLE_EQ(m.error_energy, 0.25);
  EXPECT_NEAR(m.sqnr_db, 20, 1e-12);
  EXPECT_NEAR(m.cosine, (9 + 18) / (5 * std::sqrt(9 + 20.25)), 1e-12);
  EXPECT_EQ(m.max_abs_err, 0.5);
  EXPECT_EQ(m.worst_index, 1);
  EXPECT_EQ(m.nonfinite_mismatch, 0);
}

TEST(Compare, FirstOfEqualErrorsIsTheWorst) { EXPECT_EQ(compare(Doubles{1, 2, 3}, Doubles{1, 1, 2}).worst_index, 1); }

TEST(Compare, NoErrorIsFinite) {
  for (const Metrics& m : {compare(Doubles{}, Floats{}), compare(Doubles{1, -2}, Floats{1, -2}),
                           compare(Doubles{0, 0}, Doubles{0, -0.0})}) {
    EXPECT_EQ(m.sqnr_db, kMaxDb);
    EXPECT_EQ(m.cosine, 1);
    EXPECT_EQ(m.max_abs_err, 0);
    EXPECT_EQ(m.worst_index, -1);
  }
}

TEST(Compare, ZeroSignals) {
  const Metrics exact_zero = compare(Doubles{0, 0}, Floats{0, 1e-3f});
  EXPECT_EQ(exact_zero.sqnr_db, -kMaxDb);
  EXPECT_EQ(exact_zero.cosine, 0);
  EXPECT_EQ(exact_zero.max_abs_err, double(1e-3f));
  const Metrics got_zero = compare(Doubles{1, 2}, Floats{0, 0});
  EXPECT_EQ(got_zero.sqnr_db, 0);
  EXPECT_EQ(got_zero.cosine, 0);
  // Energies that underflow or overflow still give a number.
  EXPECT_EQ(compare(Doubles{0}, Doubles{1e-200}).sqnr_db, -kMaxDb);
  EXPECT_EQ(compare(Doubles{1}, Doubles{-kInf}).sqnr_db, -kMaxDb);
}

TEST(Compare, EqualNonfiniteElementsAreLeftOut) {
  const Metrics m = compare(Doubles{kNan, kInf, -kInf, 1}, Doubles{kNan, kInf, -kInf, 1});
  EXPECT_EQ(m.nonfinite_mismatch, 0);
  EXPECT_EQ(m.sqnr_db, kMaxDb);
  EXPECT_EQ(m.signal_energy, 1);
}

TEST(Compare, AnyOtherNonfiniteElementVoidsTheComparison) {
  const double values[] = {kNan, kInf, -kInf, 1};
  for (const double exact : values) {
    for (const double got : values) {
      if (exact == got || (std::isnan(exact) && std::isnan(got))) continue;
      const Metrics m = compare(Doubles{1, 2, exact, exact}, Doubles{1, 100, got, got});
      EXPECT_EQ(m.nonfinite_mismatch, 2) << exact << " " << got;
      EXPECT_EQ(m.sqnr_db, -kMaxDb);
      EXPECT_EQ(m.cosine, 0);
      EXPECT_EQ(m.worst_index, 2);
      EXPECT_EQ(m.max_abs_err, 98);
    }
  }
}

TEST(Compare, PerHead) {
  // [2 tokens, 2 heads, 2 channels]
  const Doubles exact{1, 2, 3, 4, 5, 6, 7, 8};
  Floats got(exact.begin(), exact.end());
  got[7] = 8.5f;
  const std::vector<Metrics> heads = compare_per_head(exact, got, 2, 2, 2);
  ASSERT_EQ(heads.size(), 2u);
  EXPECT_EQ(heads[0].sqnr_db, kMaxDb);
  EXPECT_EQ(heads[0].signal_energy, 1 + 4 + 25 + 36);
  EXPECT_EQ(heads[1].signal_energy, 9 + 16 + 49 + 64);
  EXPECT_EQ(heads[1].worst_index, 7);
  EXPECT_EQ(describe(heads[1], exact, got, {2, 2, 2}),
            "sqnr 27.42 dB, cosine 0.999542, max |error| 0.5 at [1, 1, 1]: exact 8, got 8.5");
  EXPECT_EQ(describe(heads[0], exact, got, {2, 2, 2}), "sqnr 999.00 dB, cosine 1.000000, max |error| 0");
  got[3] = float(kNan);
  EXPECT_EQ(describe(compare(exact, got), exact, got, {2, 2, 2}),
            "1 elements differ in NaN or Inf, the first at [0, 1, 1]: exact 4, got nan");
}

// Roundings of its own, as large as those of ref, pass; a bias, a lost part, or one NaN does not.
TEST(BesideRef, AllowsOtherRoundingsAndNoMore) {
  constexpr size_t kCount = 20000;
  Random random(3);
  Doubles exact(kCount);
  std::vector<float> ref(kCount), other(kCount), noisy(kCount), biased(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    exact[i] = random.normal();
    const double shared = 0.05 * random.normal();  // of the operands
    const double a = random.normal(), b = random.normal();
    ref[i] = float(exact[i] + shared + 0.02 * a);
    other[i] = float(exact[i] + shared + 0.02 * b);
    noisy[i] = float(exact[i] + shared + 0.03 * b);
    biased[i] = other[i] * 0.98f;
  }
  EXPECT_TRUE(beside_ref(exact, ref, ref, 0, 0).ok());
  EXPECT_TRUE(beside_ref(exact, ref, other, 0.15, 0).ok());
  EXPECT_FALSE(beside_ref(exact, ref, noisy, 0.15, 0).ok());
  EXPECT_FALSE(beside_ref(exact, ref, biased, 0.15, 0).ok());
  EXPECT_TRUE(beside_ref(exact, ref, biased, 0.15, 0.05).ok());
  other[7] = std::nanf("");
  EXPECT_FALSE(beside_ref(exact, ref, other, 0.15, 0.05).ok());
  ref[7] = other[7];
  EXPECT_FALSE(beside_ref(exact, ref, other, 0.15, 0.05).ok()) << "exact is finite there";
  exact[7] = double(ref[7]);
  EXPECT_TRUE(beside_ref(exact, ref, other, 0.15, 0).ok());
}

TEST(Compare, SizesMustAgree) {
  EXPECT_THROW(compare(Doubles{1}, Floats{}), std::invalid_argument);
  EXPECT_THROW(compare_per_head(Doubles{1}, Floats{1}, 1, 1, 2), std::invalid_argument);
  EXPECT_THROW(describe(Metrics{}, Doubles{1}, Floats{1}, {2}), std::invalid_argument);
}

TEST(Random, IsTheSameEverywhere) {
  Random random(1, 2);
  EXPECT_EQ(random.bits(), 6144454253271056774u);
  EXPECT_EQ(random.bits(), 2748275668371798451u);
  // An independent implementation in Python gives the same words and hash: FNV-1a over the bit patterns of 10,000
  // floats.
  Floats x(10000);
  fill_normal(random, x);
  scale_rows_lognormal(random, x, 10, 2);
  uint64_t hash = 0xcbf29ce484222325u;
  for (float value : x) hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3u;
  EXPECT_EQ(hash, 10590237158614152414u);
}

TEST(Random, LogAndExpMatchTheLibrary) {
  Random random(3);
  for (int i = 0; i < 10000; ++i) {
    const double x = 20 * random.normal();
    EXPECT_NEAR(portable_exp(x) / std::exp(x), 1, 2e-14);
    const double y = portable_exp(x);
    EXPECT_NEAR(portable_log(y), std::log(y), 4e-16 * std::max(1.0, std::abs(x)));
  }
}

TEST(Random, NormalHasTheRightMoments) {
  Random random(4);
  constexpr int kCount = 1000000;
  double sum = 0, sum2 = 0, sum4 = 0;
  int beyond = 0;
  for (int i = 0; i < kCount; ++i) {
    const double x = random.normal();
    sum += x;
    sum2 += x * x;
    sum4 += x * x * x * x;
    beyond += std::abs(x) > 3;
  }
  // Five standard deviations: 1, sqrt(2), sqrt(96), sqrt(0.0027) over sqrt(kCount) = 1000.
  EXPECT_NEAR(sum / kCount, 0, 5e-3);
  EXPECT_NEAR(sum2 / kCount, 1, 7.1e-3);
  EXPECT_NEAR(sum4 / kCount, 3, 4.9e-2);
  EXPECT_NEAR(beyond / double(kCount), 0.0026998, 2.6e-4);
}

TEST(Cases, NamesAreUniqueAndFitForTests) {
  std::set<std::string_view> names;
  for (const AttentionCase& c : attention_cases()) {
    EXPECT_TRUE(names.insert(c.name).second) << c.name;
    for (const char* s = c.name; *s != 0; ++s) EXPECT_TRUE(std::isalnum(*s) || *s == '_') << c.name;
    ASSERT_NE(find_case(c.name), nullptr);
    EXPECT_EQ(find_case(c.name)->name, std::string_view(c.name));
    EXPECT_EQ(c.lens_q.size(), c.shared_q ? 1 : c.lens_k.size()) << c.name;
  }
  EXPECT_EQ(find_case("none of that name"), nullptr);
  EXPECT_LT(attention_cases(true).size(), names.size());
}

TEST(Cases, EveryDistributionIsUsed) {
  std::set<std::string> used, all;
  for (const AttentionCase& c : attention_cases()) used.insert(distribution_name(c.distribution));
  for (int32_t i = 0; i < kNumDistributions; ++i) all.insert(distribution_name(Distribution(i)));
  EXPECT_EQ(used, all);
  EXPECT_EQ(all.count("invalid"), 0u);
}

TEST(Cases, OracleAcceptsEveryQuickCase) {
  for (const AttentionCase& c : attention_cases(true)) {
    SCOPED_TRACE(c.name);
    const OracleResult result = oracle_attention(make_problem(c, make_operands(c)));
    for (const Doubles* x : {&result.out, &result.dq, &result.dk, &result.dv}) {
      EXPECT_TRUE(std::all_of(x->begin(), x->end(), [](double value) { return std::isfinite(value); }));
    }
    EXPECT_EQ(result.out.size(), size_t(total_out(c) * c.num_heads_q * c.head_dim_v));
    EXPECT_EQ(result.lse.size(), size_t(total_out(c) * c.num_heads_q));
    EXPECT_EQ(result.dk.size(), size_t(total_k(c) * c.num_heads_kv * c.head_dim));
  }
}

AttentionCase small_case(Distribution distribution) {
  return {.name = "small",
          .lens_q = {40, 30},
          .lens_k = {50, 60},
          .num_heads_q = 2,
          .num_heads_kv = 2,
          .head_dim = 128,
          .head_dim_v = 128,
          .distribution = distribution};
}

OracleResult run(const AttentionCase& c) { return oracle_attention(make_problem(c, make_operands(c))); }

TEST(Operands, DependOnTheSeedAndOnTheirOwnShapeOnly) {
  AttentionCase c = small_case(Distribution::normal);
  const Operands x = make_operands(c);
  c.lens_q = {7, 8};
  EXPECT_EQ(make_operands(c).k, x.k);
  EXPECT_EQ(make_operands(c).v, x.v);
  EXPECT_NE(make_operands(c, 2).k, x.k);
  EXPECT_NE(x.k, x.v);
}

TEST(Operands, SlackIsNan) {
  AttentionCase c = small_case(Distribution::normal);
  const Operands clean = make_operands(c);
  c.slack_q = 1;
  c.slack_k = 2;
  const Operands x = make_operands(c);
  const auto nans = [](const Floats& values) {
    return std::count_if(values.begin(), values.end(), [](float value) { return std::isnan(value); });
  };
  EXPECT_EQ(nans(x.q), 2 * 128);
  EXPECT_EQ(nans(x.k), 2 * 2 * 128);
  EXPECT_EQ(nans(x.v), 2 * 2 * 128);
  EXPECT_EQ(nans(x.dout), 2 * 128);
  EXPECT_TRUE(std::equal(clean.q.begin(), clean.q.end(), x.q.begin()));
}

TEST(Operands, ConstantMakesFlatLogitsButNotZeroGradients) {
  const AttentionCase c = small_case(Distribution::constant);
  const OracleResult result = run(c);
  const double logit = 64 * 0.5 / std::sqrt(128.0);
  for (int64_t row = 0; row < 40; ++row) EXPECT_NEAR(result.lse[row], std::log(50.0) + logit, 1e-14);
  EXPECT_GT(compare(result.dq, Doubles(result.dq.size(), 0)).signal_energy, 1);
}

TEST(Operands, NegativeLogitsMakeLseVeryNegative) {
  AttentionCase c = small_case(Distribution::negative_logits);
  c.head_dim = 64;
  for (double lse : run(c).lse) {
    EXPECT_LT(lse, -110);
    EXPECT_GT(lse, -135);
  }
}

TEST(Operands, SinkTakesMostOfTheWeightInEverySequence) {
  AttentionCase c = small_case(Distribution::attention_sink);
  Operands x = make_operands(c);
  // v = 1 at the first key of each sequence, 0 elsewhere: out is the weight of the sink.
  std::fill(x.v.begin(), x.v.end(), 0.0f);
  for (const int64_t first : {0, 50}) std::fill_n(x.v.begin() + first * 256, 256, 1.0f);
  const OracleResult result = oracle_attention(make_problem(c, x, false));
  double mean = 0;
  for (double weight : result.out) mean += weight / double(result.out.size());
  EXPECT_GT(mean, 0.9);
  EXPECT_LT(mean, 1);
}

}  // namespace
}  // namespace mxflash::kit
