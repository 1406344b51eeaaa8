// Who judges the judge: finite differences (gradients), stored vectors of an independent implementation (everything),
// visible sets written down by hand or by the definition (masks), and identities that hold to the bit.
#include "kit/oracle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "kit/random.h"
#include "vectors.h"

namespace mxflash::kit {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<double> normals(int64_t n, uint64_t stream) {
  Random random(7, stream);
  std::vector<double> x(n);
  for (double& value : x) value = random.normal();
  return x;
}

// Fills the operands of a problem whose sizes are set; `slack` tokens follow the last sequence.
OracleProblem with_operands(OracleProblem p, int64_t slack = 0) {
  const int64_t total_q = p.cu_seqlens_q.back() + slack, total_k = p.cu_seqlens_k.back() + slack;
  const int64_t total_out = p.shared_q ? (int64_t(p.cu_seqlens_k.size()) - 1) * total_q : total_q;
  p.q = normals(total_q * p.num_heads_q * p.head_dim, 1);
  p.k = normals(total_k * p.num_heads_kv * p.head_dim, 2);
  p.v = normals(total_k * p.num_heads_kv * p.head_dim_v, 3);
  p.dout = normals(total_out * p.num_heads_q * p.head_dim_v, 4);
  p.dlse = normals(total_out * p.num_heads_q, 5);
  return p;
}

// One sequence and one head; all logits equal, v and dout identities, so that out[i][j] = dv[j][i] = P[i][j].
OracleProblem equal_logits(int64_t len_q, int64_t len_k) {
  const int64_t dim_v = std::max(len_q, len_k);
  OracleProblem p{.head_dim = 2, .head_dim_v = dim_v, .cu_seqlens_q = {0, len_q}, .cu_seqlens_k = {0, len_k}};
  p.q.assign(len_q * 2, 1);
  p.k.assign(len_k * 2, 0.5);
  p.v.assign(len_k * dim_v, 0);
  p.dout.assign(len_q * dim_v, 0);
  for (int64_t j = 0; j < len_k; ++j) p.v[j * dim_v + j] = 1;
  for (int64_t i = 0; i < len_q; ++i) p.dout[i * dim_v + i] = 1;
  return p;
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

void expect_same_bits(const OracleResult& a, const OracleResult& b) {
  EXPECT_TRUE(same_bits(a.out, b.out));
  EXPECT_TRUE(same_bits(a.lse, b.lse));
  EXPECT_TRUE(same_bits(a.dq, b.dq));
  EXPECT_TRUE(same_bits(a.dk, b.dk));
  EXPECT_TRUE(same_bits(a.dv, b.dv));
}

// max |got - want| / max |want|; equal infinities agree.
double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
  if (got.size() != want.size()) return kInf;
  double error = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) {
      if (std::isfinite(want[i])) size = std::max(size, std::abs(want[i]));
      continue;
    }
    if (!std::isfinite(got[i]) || !std::isfinite(want[i])) return kInf;
    error = std::max(error, std::abs(got[i] - want[i]));
    size = std::max(size, std::abs(want[i]));
  }
  return error == 0 ? 0 : error / size;
}

// Finite differences.

struct NamedProblem {
  const char* name;
  OracleProblem problem;
};
void PrintTo(const NamedProblem& p, std::ostream* os) { *os << p.name; }

std::vector<NamedProblem> tiny_problems() {
  return {
      {"dense", with_operands({.head_dim = 5, .head_dim_v = 3, .cu_seqlens_q = {0, 4}, .cu_seqlens_k = {0, 6}})},
      {"scale",
       with_operands(
           {.head_dim = 4, .head_dim_v = 4, .cu_seqlens_q = {0, 3}, .cu_seqlens_k = {0, 5}, .softmax_scale = 0.25})},
      {"causal",
       with_operands({.head_dim = 3, .head_dim_v = 4, .cu_seqlens_q = {0, 4}, .cu_seqlens_k = {0, 6}, .causal = true})},
      {"causal_more_queries_than_keys",
       with_operands({.head_dim = 3, .head_dim_v = 2, .cu_seqlens_q = {0, 6}, .cu_seqlens_k = {0, 3}, .causal = true})},
      {"window", with_operands({.head_dim = 3,
                                .head_dim_v = 2,
                                .cu_seqlens_q = {0, 7},
                                .cu_seqlens_k = {0, 6},
                                .window_left = 2,
                                .window_right = 1})},
      {"gqa_jagged", with_operands({.num_heads_q = 4,
                                    .num_heads_kv = 2,
                                    .head_dim = 3,
                                    .head_dim_v = 2,
                                    .cu_seqlens_q = {0, 2, 2, 3, 5},
                                    .cu_seqlens_k = {0, 3, 5, 5, 7},
                                    .causal = true},
                                   /*slack=*/1)},
      {"shared_q", with_operands({.num_heads_q = 2,
                                  .num_heads_kv = 1,
                                  .head_dim = 3,
                                  .head_dim_v = 2,
                                  .cu_seqlens_q = {0, 3},
                                  .cu_seqlens_k = {0, 4, 4, 6},
                                  .causal = true,
                                  .shared_q = true})},
  };
}

// L = sum out * dout + sum lse * dlse. A row that sees no key contributes a constant, here nothing.
double loss(const OracleProblem& problem) {
  const OracleResult result = oracle_attention(problem);
  double sum = 0;
  for (size_t i = 0; i < result.out.size(); ++i) sum += result.out[i] * problem.dout[i];
  for (size_t i = 0; i < result.lse.size(); ++i) {
    if (result.lse[i] != -kInf) sum += result.lse[i] * problem.dlse[i];
  }
  return sum;
}

class OracleGradient : public testing::TestWithParam<NamedProblem> {};

TEST_P(OracleGradient, MatchesFiniteDifferences) {
  OracleProblem problem = GetParam().problem;
  problem.num_threads = 1;
  const OracleResult result = oracle_attention(problem);
  // The error of a central difference is about step^2 + 2^-52 |L| / step: 1e-10 for this step.
  constexpr double kStep = 1e-5;
  const auto difference = [&](std::vector<double>& x) {
    std::vector<double> gradient(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const double value = std::exchange(x[i], x[i] + kStep);
      const double above = loss(problem);
      x[i] = value - kStep;
      gradient[i] = (above - loss(problem)) / (2 * kStep);
      x[i] = value;
    }
    return gradient;
  };
  EXPECT_LT(relative_error(result.dq, difference(problem.q)), 1e-7);
  EXPECT_LT(relative_error(result.dk, difference(problem.k)), 1e-7);
  EXPECT_LT(relative_error(result.dv, difference(problem.v)), 1e-7);
}

INSTANTIATE_TEST_SUITE_P(Tiny, OracleGradient, testing::ValuesIn(tiny_problems()),
                         [](const auto& info) { return std::string(info.param.name); });

// Stored vectors.

class OracleVectors : public testing::TestWithParam<std::string> {};

TEST_P(OracleVectors, MatchesStoredResults) {
  const std::string& dir = GetParam();
  const nlohmann::json info = read_case(dir);
  const std::vector<int64_t> window = info.value("window", std::vector<int64_t>{-1, -1});
  const OracleProblem problem{.num_heads_q = info.at("hq"),
                              .num_heads_kv = info.at("hk"),
                              .head_dim = info.at("d"),
                              .head_dim_v = info.at("d"),
                              .cu_seqlens_q = info.at("cu_seqlens_q"),
                              .cu_seqlens_k = info.at("cu_seqlens_k"),
                              .causal = info.value("causal", false),
                              .window_left = window.at(0),
                              .window_right = window.at(1),
                              .q = read_values<double>(dir, "q"),
                              .k = read_values<double>(dir, "k"),
                              .v = read_values<double>(dir, "v"),
                              .dout = read_values<double>(dir, "dout")};
  const OracleResult result = oracle_attention(problem);
  EXPECT_LT(relative_error(result.out, read_values<double>(dir, "out")), 1e-12);
  EXPECT_LT(relative_error(result.lse, read_values<double>(dir, "lse")), 1e-12);
  EXPECT_LT(relative_error(result.dq, read_values<double>(dir, "dq")), 1e-12);
  EXPECT_LT(relative_error(result.dk, read_values<double>(dir, "dk")), 1e-12);
  EXPECT_LT(relative_error(result.dv, read_values<double>(dir, "dv")), 1e-12);
}

INSTANTIATE_TEST_SUITE_P(Stored, OracleVectors, testing::ValuesIn(vector_dirs()),
                         [](const auto& info) { return vector_name(info.param); });

TEST(OracleVectorFiles, AreAllThere) { EXPECT_EQ(vector_dirs().size(), 7u); }

// Masks.

TEST(OracleMask, CausalIsBottomRightAligned) {
  // Number of keys seen by each query, from key 0 on.
  const struct {
    int64_t len_q, len_k;
    std::vector<int64_t> seen;
  } cases[] = {{2, 5, {4, 5}}, {5, 2, {0, 0, 0, 1, 2}}, {3, 2, {0, 1, 2}}, {3, 3, {1, 2, 3}}};
  for (const auto& c : cases) {
    OracleProblem problem = equal_logits(c.len_q, c.len_k);
    problem.causal = true;
    const OracleResult result = oracle_attention(problem);
    for (int64_t i = 0; i < c.len_q; ++i) {
      EXPECT_DOUBLE_EQ(result.lse[i], c.seen[i] == 0 ? -kInf : std::log(double(c.seen[i])) + std::sqrt(0.5));
      for (int64_t j = 0; j < c.len_k; ++j) {
        EXPECT_DOUBLE_EQ(result.out[i * problem.head_dim_v + j], j < c.seen[i] ? 1.0 / double(c.seen[i]) : 0.0);
      }
    }
  }
}

TEST(OracleMask, WindowEndsAreInclusive) {
  OracleProblem problem = equal_logits(4, 4);
  problem.window_left = 1;
  problem.window_right = 0;
  const OracleResult result = oracle_attention(problem);
  EXPECT_EQ(result.out, (std::vector<double>{1, 0, 0, 0, 0.5, 0.5, 0, 0, 0, 0.5, 0.5, 0, 0, 0, 0.5, 0.5}));
}

TEST(OracleMask, EverySignCombinationMatchesTheDefinition) {
  const std::pair<int64_t, int64_t> lengths[] = {{129, 129}, {40, 70}, {70, 40}, {1, 33}, {33, 1}};
  const int64_t ends[] = {-1, 0, 3, 128, std::numeric_limits<int64_t>::max()};
  for (const auto& [len_q, len_k] : lengths) {
    OracleProblem problem = equal_logits(len_q, len_k);
    for (const bool causal : {false, true}) {
      for (const int64_t left : ends) {
        for (const int64_t right : ends) {
          problem.causal = causal;
          problem.window_left = left;
          problem.window_right = right;
          const OracleResult result = oracle_attention(problem);
          std::vector<double> out(result.out.size(), 0), lse(result.lse.size(), -kInf), dv(result.dv.size(), 0);
          for (int64_t i = 0; i < len_q; ++i) {
            std::vector<int64_t> seen;
            for (int64_t j = 0; j < len_k; ++j) {
              const int64_t ahead = j - (i + len_k - len_q);
              if ((!causal || ahead <= 0) && (left < 0 || -ahead <= left) && (right < 0 || ahead <= right)) {
                seen.push_back(j);
              }
            }
            for (int64_t j : seen) {
              out[i * problem.head_dim_v + j] = dv[j * problem.head_dim_v + i] = 1.0 / double(seen.size());
            }
            if (!seen.empty()) lse[i] = std::log(double(seen.size())) + std::sqrt(0.5);
          }
          SCOPED_TRACE(testing::Message()
                       << len_q << " x " << len_k << ", causal " << causal << ", window " << left << ", " << right);
          EXPECT_LT(relative_error(result.out, out), 1e-15);
          EXPECT_LT(relative_error(result.lse, lse), 1e-15);
          EXPECT_LT(relative_error(result.dv, dv), 1e-15);
        }
      }
    }
  }
}

// Identities.

OracleProblem medium_problem(bool shared_q = false) {
  OracleProblem problem{.num_heads_q = 4, .num_heads_kv = 2, .head_dim = 24, .head_dim_v = 16};
  problem.cu_seqlens_q = shared_q ? std::vector<int64_t>{0, 65} : std::vector<int64_t>{0, 70, 70, 71, 200};
  problem.cu_seqlens_k = {0, 90, 123, 123, 222};
  problem.causal = true;
  problem.window_left = 60;
  problem.shared_q = shared_q;
  return with_operands(problem);
}

TEST(Oracle, OnesGiveOnes) {
  OracleProblem problem = medium_problem();
  std::fill(problem.v.begin(), problem.v.end(), 1);
  const OracleResult result = oracle_attention(problem);
  for (int64_t row = 0; row < 200; ++row) {
    for (int64_t head = 0; head < 4; ++head) {
      const double expected = result.lse[head * 200 + row] == -kInf ? 0 : 1;
      for (int64_t c = 0; c < 16; ++c) ASSERT_NEAR(result.out[(row * 4 + head) * 16 + c], expected, 1e-14);
    }
  }
}

TEST(Oracle, ThreadsAndRepetitionDoNotChangeABit) {
  for (const bool shared_q : {false, true}) {
    OracleProblem problem = medium_problem(shared_q);
    const OracleResult expected = oracle_attention(problem);
    expect_same_bits(oracle_attention(problem), expected);
    for (const int threads : {1, 2, 3, 17}) {
      problem.num_threads = threads;
      expect_same_bits(oracle_attention(problem), expected);
    }
  }
}

TEST(Oracle, ForwardDoesNotDependOnTheBackward) {
  OracleProblem problem = medium_problem();
  const OracleResult both = oracle_attention(problem);
  problem.dout.clear();
  problem.dlse.clear();
  const OracleResult forward = oracle_attention(problem);
  EXPECT_TRUE(same_bits(forward.out, both.out));
  EXPECT_TRUE(same_bits(forward.lse, both.lse));
  EXPECT_TRUE(forward.dq.empty() && forward.dk.empty() && forward.dv.empty());
}

// With shared_q every sequence is an ordinary problem, and dq is their sum.
TEST(Oracle, SharedQueryIsABatchOfEqualQueries) {
  const OracleProblem shared = medium_problem(true);
  OracleProblem repeated = shared;
  repeated.shared_q = false;
  repeated.cu_seqlens_q = {0, 65, 130, 195, 260};
  for (int b = 1; b < 4; ++b) repeated.q.insert(repeated.q.end(), shared.q.begin(), shared.q.end());
  const OracleResult a = oracle_attention(shared), b = oracle_attention(repeated);
  EXPECT_TRUE(same_bits(a.out, b.out));
  EXPECT_TRUE(same_bits(a.lse, b.lse));
  EXPECT_TRUE(same_bits(a.dk, b.dk));
  EXPECT_TRUE(same_bits(a.dv, b.dv));
  std::vector<double> dq(shared.q.size(), 0);
  for (size_t i = 0; i < b.dq.size(); ++i) dq[i % dq.size()] += b.dq[i];
  EXPECT_LT(relative_error(a.dq, dq), 1e-14);
}

TEST(Oracle, MaskedNanDoesNotLeak) {
  OracleProblem problem = with_operands(
      {.head_dim = 8, .head_dim_v = 8, .cu_seqlens_q = {0, 100}, .cu_seqlens_k = {0, 100}, .causal = true});
  const OracleResult clean = oracle_attention(problem);
  // Query 50 sees keys 0..50 only, key 50 is seen by queries 50..99 only.
  const auto poison = [](std::vector<double>& x) { std::fill_n(x.begin() + 50 * 8, 8, kNan); };
  {
    OracleProblem poisoned = problem;
    poison(poisoned.k);
    poison(poisoned.v);
    const OracleResult result = oracle_attention(poisoned);
    EXPECT_TRUE(std::equal(result.out.begin(), result.out.begin() + 50 * 8, clean.out.begin()));
    EXPECT_TRUE(std::equal(result.lse.begin(), result.lse.begin() + 50, clean.lse.begin()));
    EXPECT_TRUE(std::equal(result.dq.begin(), result.dq.begin() + 50 * 8, clean.dq.begin()));
    EXPECT_TRUE(std::all_of(result.out.begin() + 50 * 8, result.out.end(), [](double x) { return std::isnan(x); }));
  }
  {
    OracleProblem poisoned = problem;
    poison(poisoned.q);
    poison(poisoned.dout);
    const OracleResult result = oracle_attention(poisoned);
    EXPECT_TRUE(std::equal(result.dk.begin() + 51 * 8, result.dk.end(), clean.dk.begin() + 51 * 8));
    EXPECT_TRUE(std::equal(result.dv.begin() + 51 * 8, result.dv.end(), clean.dv.begin() + 51 * 8));
    EXPECT_TRUE(std::all_of(result.dv.begin(), result.dv.begin() + 51 * 8, [](double x) { return std::isnan(x); }));
  }
}

TEST(Oracle, SlackIsNeitherReadNorLeftUnwritten) {
  const OracleProblem exact = with_operands(
      {.head_dim = 8, .head_dim_v = 4, .cu_seqlens_q = {0, 3, 40}, .cu_seqlens_k = {0, 20, 45}, .causal = true});
  OracleProblem slack = exact;
  for (auto* x : {&slack.q, &slack.k, &slack.v, &slack.dout}) x->insert(x->end(), 5 * 8, kNan);  // 5 or 10 tokens
  slack.q.resize(45 * 8, kNan);
  slack.dout.resize(45 * 4, kNan);
  slack.k.resize(50 * 8, kNan);
  slack.v.resize(50 * 4, kNan);
  slack.dlse.resize(45, kNan);
  OracleResult result = oracle_attention(slack);
  EXPECT_EQ(std::vector<double>(result.lse.end() - 5, result.lse.end()), std::vector<double>(5, -kInf));
  const auto cut = [](std::vector<double>& x, size_t size) {
    EXPECT_TRUE(std::all_of(x.begin() + int64_t(size), x.end(), [](double value) { return value == 0; }));
    x.resize(size);
  };
  const OracleResult expected = oracle_attention(exact);
  cut(result.out, expected.out.size());
  cut(result.dq, expected.dq.size());
  cut(result.dk, expected.dk.size());
  cut(result.dv, expected.dv.size());
  result.lse.resize(40);
  expect_same_bits(result, expected);
}

TEST(Oracle, LongFlatAttention) {
  constexpr int64_t kKeys = 65536;
  OracleProblem problem{.head_dim = 4, .head_dim_v = 1, .cu_seqlens_q = {0, 2}, .cu_seqlens_k = {0, kKeys}};
  problem.q.assign(2 * 4, 1);
  problem.k.assign(kKeys * 4, -100);
  for (int64_t j = 0; j < kKeys; ++j) problem.v.push_back(double(j));
  const OracleResult result = oracle_attention(problem);
  for (int64_t i = 0; i < 2; ++i) {
    EXPECT_DOUBLE_EQ(result.lse[i], -200 + 16 * std::log(2.0));
    EXPECT_DOUBLE_EQ(result.out[i], (kKeys - 1) / 2.0);
  }
}

TEST(Oracle, ContradictionsAreErrorsWithTheValue) {
  const auto message = [](const OracleProblem& problem) -> std::string {
    try {
      oracle_attention(problem);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "no error";
  };
  const OracleProblem good = medium_problem();
  const auto expect = [&](const std::string& part, auto change) {
    OracleProblem bad = good;
    change(bad);
    EXPECT_NE(message(bad).find(part), std::string::npos) << message(bad);
  };
  expect("num_heads_kv = 3, got 4", [](OracleProblem& p) { p.num_heads_kv = 3; });
  expect("head_dim must be positive, got 0", [](OracleProblem& p) { p.head_dim = 0; });
  expect("size of q must be a multiple of 96, got 19199", [](OracleProblem& p) { p.q.pop_back(); });
  expect("begin with 0, got 1", [](OracleProblem& p) { p.cu_seqlens_q[0] = 1; });
  expect("not decrease, got 69", [](OracleProblem& p) { p.cu_seqlens_q[2] = 69; });
  expect("exceed the 222 rows there are, got 223", [](OracleProblem& p) { p.cu_seqlens_k[4] = 223; });
  expect("same length, got 6", [](OracleProblem& p) { p.cu_seqlens_q.push_back(200); });
  expect("with shared_q", [](OracleProblem& p) { p.shared_q = true; });
  expect("size of dout must be 0 or 12800, got 12799", [](OracleProblem& p) { p.dout.pop_back(); });
  expect("size of dlse must be 0 or, with dout, 800, got 800", [](OracleProblem& p) { p.dout.clear(); });
}

}  // namespace
}  // namespace mxflash::kit
