// Would `mxflash check` notice a wrong mask, a wrong scale, a dropped block, a rounding error that is too large, one
// bad element, one bit? And is the derived bound one: right for any shape, and narrow?
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "kit/bound.h"
#include "kit/mx_attention.h"
#include "kit/random.h"
#include "kit/verify.h"
#include "kit/verify_bytes.h"
#include "mx/float16.h"
#include "mx/fp8.h"

namespace mxflash::kit {
namespace {

std::string all_failures(const Report& report) {
  std::string all;
  for (const std::string& failure : report.failures) all += failure + '\n';
  return all;
}

// ---- the bound --------------------------------------------------------------------------------------------------

// A case, ready to be run and judged.
struct Bench {
  AttentionCase problem;
  Operands operands;
  MxAttention mx;
  AttentionTruth truth;
  AttentionResult right;
  explicit Bench(const AttentionCase& c, Dtype grad_element = Dtype::e4m3, uint64_t seed = 1)
      : problem(c),
        operands(make_operands(c, seed)),
        mx(quantize_case(c, operands, grad_element)),
        truth(attention_truth(c, operands, mx, {})),
        right(run_attention(mx, "ref", "ref")) {}
  explicit Bench(const char* name) : Bench(*find_case(name)) {}

  AttentionTruth cpu_truth(CpuMath math) const { return attention_truth(problem, operands, mx, cpu_bound(math)); }
  AttentionResult run_cpu(CpuMath math) {
    mx.cpu_math = math;
    return run_attention(mx, "cpu", "cpu");
  }

  // The failures of one tensor, or of everything.
  std::string judged(const AttentionResult& result, const std::string& tensor = "") const {
    return judged(truth, result, tensor);
  }
  static std::string judged(const AttentionTruth& truth, const AttentionResult& result,
                            const std::string& tensor = "") {
    const Report report = judge(truth, result);
    if (tensor.empty()) return all_failures(report);
    for (const TensorReport& t : report.tensors) {
      if (t.name == tensor) return t.failure;
    }
    return "no such tensor";
  }
};

TEST(AttentionBound, HoldsForRandomShapesAndSeeds) {
  Random random(5);
  for (int i = 0; i < 150; ++i) {
    AttentionCase c{.name = "random", .shared_q = random.below(4) == 0, .with_dlse = random.below(3) == 0};
    const int64_t batch = 1 + random.below(3), longest = int64_t(1) << random.below(8);
    for (int64_t b = 0; b < batch; ++b) {
      if (!c.shared_q || b == 0) c.lens_q.push_back(int32_t(random.below(longest + 1)));
      c.lens_k.push_back(int32_t(random.below(longest + 1)));
    }
    c.num_heads_kv = int32_t(1 + random.below(2));
    c.num_heads_q = int32_t(c.num_heads_kv * (1 + random.below(2)));
    c.head_dim = int32_t(8 * (1 + random.below(16)));
    c.head_dim_v = int32_t(8 * (1 + random.below(16)));
    c.mask.causal = random.below(2) == 0;
    if (random.below(3) == 0) c.mask.window_left = int32_t(random.below(40)) - 1;
    if (random.below(3) == 0) c.mask.window_right = int32_t(random.below(40)) - 1;
    c.distribution = Distribution(random.below(kNumDistributions));
    Bench bench(c, i % 2 ? Dtype::e4m3 : Dtype::e5m2, random.bits());
    const std::string what = "number " + std::to_string(i) + ", " + distribution_name(c.distribution) + ", dim " +
                             std::to_string(c.head_dim) + ": ";
    const Report report = judge(bench.truth, bench.right, false);
    ASSERT_TRUE(report.ok()) << what << all_failures(report);
    for (const CpuMath math : {CpuMath::exact, CpuMath::fast}) {
      const Report cpu = judge(bench.cpu_truth(math), bench.run_cpu(math), false);
      ASSERT_TRUE(cpu.ok()) << cpu_math_name(math) << ' ' << what << all_failures(cpu);
    }
  }
}

TEST(AttentionBound, IsRoundoffWhereNothingIsRounded) {
  // One key: P = 1 is exact, O = v, dS = 0.
  const Bench bench("one_key_d64");
  const AttentionBound& bound = bench.truth.bound;
  for (size_t i = 0; i < bound.out.size(); ++i) {
    EXPECT_LE(bound.out[i], 0x1.01p-24 * std::abs(bench.truth.dequantized.out[i]) + 1e-14);
  }
  for (const double x : bound.dq) EXPECT_LT(x, 1e-4);
  // dv has the rounding of dout's weight 1, which E4M3 holds; the bound cannot know that, and allows half a step.
  EXPECT_LE(
      bound.dv[0], 0x1.1p-4 * [&] {
        double sum = 0;
        for (int64_t i = 0; i < 97; ++i) sum += std::abs(double(bench.operands.dout[size_t(i * 64)]));
        return sum;
      }());
}

TEST(AttentionBound, IsLessThanTwiceAsWideForFp32Accumulators) {
  for (const char* name : {"dense_d128", "causal_d64", "jagged_d64", "negative_logits_d128"}) {
    const Bench bench(name);
    const OracleProblem problem = dequantized_problem(bench.problem, bench.mx);
    const AttentionBound wide = attention_bound(problem, bench.truth.dequantized, {.roundoff = 0x1p-24});
    const AttentionBound& tight = bench.truth.bound;
    const auto compare = [&](const std::vector<double>& a, const std::vector<double>& b) {
      double sum_a = 0, sum_b = 0;
      for (size_t i = 0; i < a.size(); ++i) {
        ASSERT_GE(b[i], a[i]);
        sum_a += a[i];
        sum_b += b[i];
      }
      EXPECT_LT(sum_b, 2 * sum_a) << name;
    };
    compare(tight.out, wide.out);
    compare(tight.dq, wide.dq);
    compare(tight.dk, wide.dk);
    compare(tight.dv, wide.dv);
  }
}

TEST(AttentionBound, IsNarrowForFp32AndForFixedPoint) {
  for (const char* name : {"dense_d128", "causal_d64", "jagged_d64", "peaky_d128"}) {
    const Bench bench(name);
    const AttentionTruth exact = bench.cpu_truth(CpuMath::exact), fast = bench.cpu_truth(CpuMath::fast);
    const auto width = [](const std::vector<double>& bound) {
      double sum = 0;
      for (const double x : bound) sum += x;
      return sum;
    };
    for (const auto member : {&AttentionBound::out, &AttentionBound::dq, &AttentionBound::dk, &AttentionBound::dv}) {
      EXPECT_LT(100 * width(exact.bound.*member), width(bench.truth.bound.*member)) << name;
      EXPECT_LT(30 * width(fast.bound.*member), width(bench.truth.bound.*member)) << name;
    }
  }
}

TEST(AttentionBound, IsWiderForE5m2Gradients) {
  const Bench e4m3(*find_case("dense_d64")), e5m2(*find_case("dense_d64"), Dtype::e5m2);
  EXPECT_GT(e5m2.truth.bound.dq[0], 1.4 * e4m3.truth.bound.dq[0]);
  EXPECT_GT(e5m2.truth.bound.dk[0], 1.4 * e4m3.truth.bound.dk[0]);
}

// ---- would it notice? -------------------------------------------------------------------------------------------

TEST(CheckNotices, AMaskThatIsOffByOne) {
  Bench causal("causal_d64");
  ASSERT_EQ(causal.judged(causal.right), "");
  causal.mx.mask = {.window_right = 1};  // one key too many in each row
  const AttentionResult more = run_attention(causal.mx, "ref", "ref");
  for (const char* tensor : {"out", "lse", "dq", "dk", "dv"}) EXPECT_NE(causal.judged(more, tensor), "") << tensor;

  for (const Mask& wrong : {Mask{.window_left = 16, .window_right = 5}, Mask{.window_left = 18, .window_right = 5},
                            Mask{.window_left = 17, .window_right = 4}, Mask{.window_left = 17, .window_right = 6}}) {
    Bench window("window_17_5");
    window.mx.mask = wrong;
    const AttentionResult result = run_attention(window.mx, "ref", "ref");
    for (const char* tensor : {"out", "lse", "dq", "dk", "dv"}) EXPECT_NE(window.judged(result, tensor), "") << tensor;
  }
}

TEST(CheckNotices, TopLeftInsteadOfBottomRight) {
  Bench bench("more_queries_than_keys_causal_d64");
  bench.mx.mask = {.window_right = 161 - 70};
  EXPECT_NE(bench.judged(run_attention(bench.mx, "ref", "ref"), "out"), "");
}

TEST(CheckNotices, OneScaleByteThatIsOff) {
  for (const char* name : {"dense_d128", "causal_d128", "peaky_d128"}) {
    for (const int step : {-1, 1}) {
      Bench bench(name);
      const auto perturbed = [&](OwnedMx MxAttention::*operand) {
        Bench copy(name);
        uint8_t& byte = (copy.mx.*operand).scale[5];
        byte = uint8_t(byte + step);
        return run_attention(copy.mx, "ref", "ref");
      };
      const AttentionResult k = perturbed(&MxAttention::k), v = perturbed(&MxAttention::v);
      const AttentionResult q = perturbed(&MxAttention::q), dout = perturbed(&MxAttention::dout);
      for (const char* tensor : {"out", "lse", "dq", "dk"}) {
        EXPECT_NE(bench.judged(k, tensor), "") << name << " k " << tensor;
        EXPECT_NE(bench.judged(q, tensor), "") << name << " q " << tensor;
      }
      for (const char* tensor : {"out", "dq", "dk"}) EXPECT_NE(bench.judged(v, tensor), "") << name << " v " << tensor;
      for (const char* tensor : {"dq", "dk", "dv"}) EXPECT_NE(bench.judged(dout, tensor), "") << name << ' ' << tensor;
    }
  }
}

TEST(CheckNotices, ADroppedBlockOfKeys) {
  for (const char* name : {"jagged_d64", "mean_v_jagged_d64"}) {
    Bench bench(name);
    bench.mx.cu_seqlens_k.back() -= 32;
    const AttentionResult result = run_attention(bench.mx, "ref", "ref");
    for (const char* tensor : {"out", "lse", "dq", "dk", "dv"}) {
      EXPECT_NE(bench.judged(result, tensor), "") << name << ' ' << tensor;
    }
  }
}

TEST(CheckNotices, TheScaleOfAPaddedHeadDim) {
  Bench bench("head_dim_40");
  bench.mx.softmax_scale = 1 / std::sqrt(64.0f);
  const AttentionResult result = run_attention(bench.mx, "ref", "ref");
  for (const char* tensor : {"out", "lse", "dq", "dk", "dv"}) EXPECT_NE(bench.judged(result, tensor), "") << tensor;
}

TEST(CheckNotices, AGradientOfLseThatIsIgnored) {
  Bench bench("dlse_d64");
  bench.mx.dlse.clear();
  const AttentionResult result = run_attention(bench.mx, "ref", "ref");
  for (const char* tensor : {"dq", "dk"}) EXPECT_NE(bench.judged(result, tensor), "") << tensor;
}

TEST(CheckNotices, ABackwardThatScalesPTooHigh) {
  for (const char* name : {"dense_d64", "causal_d128", "constant_d128"}) {
    Bench bench(name);
    AttentionResult result = bench.right;
    for (uint8_t& exponent : result.row_exponent) exponent = uint8_t(exponent + 2);  // P reaches 2^10 and saturates
    run_backward(bench.mx, "ref", result);
    EXPECT_NE(bench.judged(result, "dv"), "") << name;
    EXPECT_NE(bench.judged(result).find("row_exponent"), std::string::npos) << name;
  }
}

TEST(CheckNotices, ARowExponentThatIsOffByOne) {
  Bench bench("dense_d64");
  AttentionResult result = bench.right;
  ++result.row_exponent[77];
  EXPECT_NE(bench.judged(result).find("row_exponent[0, 77]"), std::string::npos) << bench.judged(result);
}

// The forward once more, without tiles and with the exact maximum. round(p) is what becomes of a weight; out divides by
// the sum of rounded or of unrounded ones.
std::vector<float> forward_rounding_p(const OracleProblem& p, const OracleResult& exact,
                                      const std::function<double(double)>& round, bool by_rounded_sum) {
  const auto rows = int64_t(exact.lse.size()), d = p.head_dim;
  std::vector<float> out;
  for (int64_t i = 0; i < rows; ++i) {
    std::vector<double> s(size_t(p.k.size()) / size_t(d)), sum(size_t(p.head_dim_v));
    double max = -HUGE_VAL, weights = 0;
    for (int64_t j = 0; j < int64_t(s.size()); ++j) {
      for (int64_t c = 0; c < d; ++c)
        s[size_t(j)] += p.q[size_t(i * d + c)] * p.k[size_t(j * d + c)] / std::sqrt(double(d));
      max = std::max(max, s[size_t(j)]);
    }
    for (int64_t j = 0; j < int64_t(s.size()); ++j) {
      const double exact_p = std::exp(s[size_t(j)] - max), rounded = round(exact_p);
      weights += by_rounded_sum ? rounded : exact_p;
      for (size_t c = 0; c < sum.size(); ++c) sum[c] += rounded * p.v[size_t(j) * sum.size() + c];
    }
    for (const double x : sum) out.push_back(float(x / weights));
  }
  return out;
}

// P = E4M3(2^exponent p).
std::vector<float> forward_with_p_exponent(const OracleProblem& p, const OracleResult& exact, int exponent) {
  const auto round = [exponent](double weight) {
    const float scaled = float(std::ldexp(weight, exponent));
    return std::ldexp(double(decode_fp8(encode_fp8(scaled, kE4m3), kE4m3)), -exponent);
  };
  return forward_rounding_p(p, exact, round, true);
}

TEST(CheckNotices, AForwardThatScalesPWrong) {
  for (const char* name : {"peaky_d128", "outlier_channels_d128", "negative_logits_d128"}) {
    const Bench bench(name);  // one head each
    const OracleProblem problem = dequantized_problem(bench.problem, bench.mx);
    AttentionResult result = bench.right;
    const auto judged = [&](int exponent) {
      result.out = forward_with_p_exponent(problem, bench.truth.dequantized, exponent);
      return bench.judged(result, "out");
    };
    EXPECT_EQ(judged(8), "") << name;   // the recipe, by another implementation
    EXPECT_NE(judged(10), "") << name;  // 2^10 saturates at 448
    EXPECT_NE(judged(-3), "") << name;  // small weights fall among the subnormals
  }
}

TEST(CheckNotices, AForwardInBf16WithTwoBitsLess) {
  for (const char* name : {"peaky_d128", "outlier_channels_d128"}) {
    const Bench bench(name);  // one head each
    const OracleProblem problem = dequantized_problem(bench.problem, bench.mx);
    const AttentionTruth truth =
        attention_truth(bench.problem, bench.operands, bench.mx, {.weights = WeightFormat::bf16, .roundoff = 0x1p-23});
    AttentionResult result = run_attention(bench.mx, "ref", "");
    const auto judged = [&](double factor) {  // BF16 of p times it: rounding does not depend on the scale
      const auto round = [&](double p) { return double(decode_bf16(encode_bf16(float(p * factor)))) / factor; };
      result.out = forward_rounding_p(problem, truth.dequantized, round, false);
      return Bench::judged(truth, result, "out");
    };
    EXPECT_EQ(judged(1), "") << name;
    EXPECT_EQ(judged(200), "") << name;
    const AttentionResult ref = run_attention(bench.mx, "ref", "");
    for (const std::string& failure : worse_than_ref(truth, result, ref)) ADD_FAILURE() << failure;
    EXPECT_NE(worse_than_ref(truth, ref, ref).size(), 0u) << name;  // P in E4M3
    const auto fewer_bits = [](double p) { return double(decode_bf16(uint16_t((encode_bf16(float(p)) + 1) & ~3))); };
    result.out = forward_rounding_p(problem, truth.dequantized, fewer_bits, false);
    EXPECT_NE(Bench::judged(truth, result, "out"), "") << name;
  }
}

// ---- tiles of backend sm90 ---------------------------------------------------------------------------------------

// A case as its images hold it, judged with the bound of FP8 tensor cores; forward alone.
struct TileBench {
  MxAttention mx;
  AttentionTruth truth;
  AttentionResult right;
  explicit TileBench(const char* name) : TileBench(*find_case(name)) {}
  explicit TileBench(const AttentionCase& c) {
    const Bench bench(c);
    mx = round_to_images(bench.mx);
    truth = attention_truth(bench.problem, bench.operands, mx, {.weights = WeightFormat::tile, .roundoff = 0x1p-24});
    right = run_attention(mx, "ref", "");
  }
};

TEST(TileBound, HoldsForScalesOfPFrom6To8AndNotBelow) {
  for (const char* name : {"peaky_d128", "outlier_channels_d128", "negative_logits_d128"}) {
    const TileBench bench(name);  // one head each
    EXPECT_EQ(Bench::judged(bench.truth, bench.right), "") << name;
    const OracleProblem problem = dequantized_problem(bench.truth.problem, bench.mx);
    const auto judged = [&](int exponent) {
      AttentionResult result = bench.right;
      result.out = forward_with_p_exponent(problem, bench.truth.dequantized, exponent);
      return Bench::judged(bench.truth, result, "out");
    };
    EXPECT_EQ(judged(6), "") << name;
    EXPECT_NE(judged(10), "") << name;
    EXPECT_NE(judged(-5), "") << name;
  }
}

// One step of an FP8 tensor core: 32 products and the sum so far, cut off 13 bits below the largest of them.
double tensor_core_step(double sum, const double* products, int64_t count) {
  double largest = std::abs(sum);
  for (int64_t n = 0; n < count; ++n) largest = std::max(largest, std::abs(products[n]));
  if (largest == 0) return sum;
  const double unit = std::ldexp(1.0, std::ilogb(largest) - 13);
  double total = std::trunc(sum / unit);
  for (int64_t n = 0; n < count; ++n) total += std::trunc(products[n] / unit);
  return total * unit;
}

// What backend sm90 does with one head: tiles of 128 keys, a maximum that lags by up to 2.8 binades, sums that stay in
// the tensor core for 4 tiles. Keys up to the diagonal are visible, or all.
AttentionResult emulate_tiles(const TileBench& bench, bool causal) {
  const OracleProblem p = dequantized_problem(bench.truth.problem, bench.mx);
  const int64_t d = p.head_dim, rows = int64_t(p.q.size()) / d, keys = int64_t(p.k.size()) / d;
  const auto dim_v = size_t(p.head_dim_v);
  const double to_log2 = std::log2(std::exp(1.0)) / std::sqrt(double(d));
  AttentionResult result = bench.right;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t end = causal ? std::min(keys, i + 1 + keys - rows) : keys;
    double reference = -1e30, top = -1e30, exact_sum = 0, sum = 0, promoted_sum = 0;
    std::vector<double> out(dim_v), promoted(dim_v);
    const auto rescale = [&](double factor) {
      for (std::vector<double>* x : {&out, &promoted}) {
        for (double& value : *x) value *= factor;
      }
      for (double* x : {&exact_sum, &sum, &promoted_sum}) *x *= factor;
    };
    for (int64_t j0 = 0; j0 < end; j0 += 128) {
      const int64_t count = std::min<int64_t>(128, end - j0);
      std::vector<double> s(static_cast<size_t>(count));
      for (int64_t j = 0; j < count; ++j) {
        double dot = 0, products[32];
        for (int64_t c = 0; c < d; c += 32) {
          for (int64_t n = 0; n < 32; ++n) products[n] = p.q[size_t(i * d + c + n)] * p.k[size_t((j0 + j) * d + c + n)];
          dot = tensor_core_step(dot, products, 32);
        }
        s[size_t(j)] = dot * to_log2;
      }
      const double largest = *std::max_element(s.begin(), s.end());
      top = std::max(top, largest);
      if (largest > reference + 2.8) {
        rescale(std::exp2(reference - largest));
        reference = largest;
      }
      for (int64_t g = 0; g < count; g += 32) {
        const int64_t n_keys = std::min<int64_t>(32, count - g);
        double weights[32] = {}, products[32];
        for (int64_t n = 0; n < n_keys; ++n) {
          const double weight = std::exp2(s[size_t(g + n)] - reference + 6);
          exact_sum += weight;
          weights[n] = double(decode_fp8(encode_fp8(float(weight), kE4m3), kE4m3));
        }
        sum = tensor_core_step(sum, weights, n_keys);
        for (size_t c = 0; c < dim_v; ++c) {
          for (int64_t n = 0; n < n_keys; ++n) products[n] = weights[n] * p.v[size_t(j0 + g + n) * dim_v + c];
          out[c] = tensor_core_step(out[c], products, n_keys);
        }
      }
      if (j0 / 128 % 4 == 3 || j0 + 128 >= end) {
        for (size_t c = 0; c < dim_v; ++c) promoted[c] += std::exchange(out[c], 0.0);
        promoted_sum += std::exchange(sum, 0.0);
      }
    }
    for (size_t c = 0; c < dim_v; ++c) result.out[size_t(i) * dim_v + c] = float(promoted[c] / promoted_sum);
    const double log2_sum = std::log2(exact_sum) + reference - 6;
    result.lse[size_t(i)] = float(log2_sum * std::log(2.0));
    result.row_exponent[size_t(i)] = uint8_t(std::max(0.0, std::floor(log2_sum - top)));
  }
  return result;
}

TEST(TileBound, HoldsForAnEmulatedTensorCore) {
  for (const char* name : {"peaky_d128", "outlier_channels_d128", "negative_logits_d128", "attention_sink_d128",
                           "mean_v_d128", "constant_d128", "causal_long_d128", "flat_30000_keys_d64"}) {
    const std::vector<AttentionCase> cases = check_cases();
    const auto found = std::ranges::find(cases, std::string(name), [](const auto& c) { return std::string(c.name); });
    ASSERT_NE(found, cases.end()) << name;
    ASSERT_EQ(found->num_heads_q, 1) << name;
    const TileBench bench(*found);
    const AttentionResult result = emulate_tiles(bench, found->mask.causal);
    EXPECT_EQ(Bench::judged(bench.truth, result), "") << name;
    for (const std::string& failure : worse_than_ref(bench.truth, result, bench.right)) ADD_FAILURE() << failure;
  }
}

TEST(TileBound, NoticesWhatTheOtherNotices) {
  TileBench bench("causal_d64");
  ASSERT_EQ(Bench::judged(bench.truth, bench.right), "");
  ASSERT_EQ(worse_than_ref(bench.truth, bench.right, bench.right).size(), 0u);
  MxAttention wrong = round_to_images(Bench("causal_d64").mx);
  wrong.mask = {.window_right = 1};
  const AttentionResult more = run_attention(wrong, "ref", "");
  for (const char* tensor : {"out", "lse"}) EXPECT_NE(Bench::judged(bench.truth, more, tensor), "") << tensor;
  AttentionResult result = bench.right;
  for (float& x : result.lse) x += 3e-3f;
  EXPECT_NE(Bench::judged(bench.truth, result, "lse"), "");
  for (uint8_t& x : result.row_exponent) ++x;
  EXPECT_NE(Bench::judged(bench.truth, result).find("row_exponent"), std::string::npos);
}

TEST(TileBound, KnowsNoBackward) {
  const TileBench bench("dense_d64");
  EXPECT_FALSE(bench.right.backward);
  const Report report = judge(bench.truth, bench.right);
  ASSERT_EQ(report.tensors.size(), 2u);
  EXPECT_EQ(compare_bits(bench.mx, bench.right, bench.mx, bench.right), "");
}

// All blocks of N(0, 1) have scales within a few binades, so that a tile's scale holds nearly all elements exactly.
TEST(RoundToImages, ChangesOnlyWhatATileCannotHold) {
  const Bench bench("dense_d128");
  const auto changed = [](const MxAttention& a) {
    const std::vector<float> x = ref_dequantize(a.k.view, a.seq_k());
    const std::vector<float> y = ref_dequantize(round_to_images(a).k.view, a.seq_k());
    int count = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      count += x[i] != y[i];
      EXPECT_NEAR(x[i], y[i], 0x1p-4 * std::abs(x[i]) + 0.02) << i;
    }
    return count;
  };
  EXPECT_LT(changed(bench.mx), 300);
  Bench wide("dense_d128");
  for (uint8_t& scale : wide.mx.k.scale) scale = uint8_t(scale - 9);  // but one block
  wide.mx.k.scale[0] = uint8_t(wide.mx.k.scale[0] + 9);
  EXPECT_GT(changed(wide.mx), 500);
}

// Errors ten times as large as the right ones, tensor by tensor, in every quick case where there is rounding at all.
TEST(CheckNotices, ARoundingErrorThatIsTenfold) {
  int tried = 0;
  for (const AttentionCase& c : attention_cases(true)) {
    const Bench bench(c);
    const OracleResult& exact = bench.truth.dequantized;
    const auto try_tensor = [&](const char* name, const std::vector<double>& want,
                                std::vector<float> AttentionResult::*member) {
      AttentionResult result = bench.right;
      double energy = 0, error = 0;
      for (size_t i = 0; i < want.size(); ++i) {
        float& x = (result.*member)[i];
        energy += want[i] * want[i];
        error += (double(x) - want[i]) * (double(x) - want[i]);
        x = float(want[i] + 10 * (double(x) - want[i]));
      }
      if (error <= 1e-12 * energy) return;  // only fp32 roundoff: nothing of MX to magnify
      ++tried;
      EXPECT_NE(bench.judged(result, name), "") << c.name << ' ' << name;
    };
    try_tensor("out", exact.out, &AttentionResult::out);
    try_tensor("dq", exact.dq, &AttentionResult::dq);
    try_tensor("dk", exact.dk, &AttentionResult::dk);
    try_tensor("dv", exact.dv, &AttentionResult::dv);
  }
  EXPECT_GT(tried, 100);
}

TEST(CheckNotices, ABackendWithThreeTimesTheNoiseOfRef) {
  for (const char* name : {"dense_d128", "causal_d64", "shared_q_jagged_d64"}) {
    const Bench bench(name);
    EXPECT_TRUE(worse_than_ref(bench.truth, bench.right, bench.right).empty());
    AttentionResult result = bench.right;
    const std::vector<double>& exact = bench.truth.dequantized.dq;
    for (size_t i = 0; i < exact.size(); ++i) result.dq[i] = float(exact[i] + 3 * (double(result.dq[i]) - exact[i]));
    const std::vector<std::string> failures = worse_than_ref(bench.truth, result, bench.right);
    ASSERT_EQ(failures.size(), 1u) << name;
    EXPECT_EQ(failures[0].substr(0, 3), "dq:") << failures[0];
  }
}

// Gradients of FP8 tensor cores have no bound: what they may lose beside ref is a fraction of a decibel.
TEST(CheckNotices, GradientsOfTilesThatAreWorseThanThoseOfRef) {
  for (const char* name : {"dense_d128", "causal_d64", "gqa_8_2_d128"}) {
    const Bench bench(name);
    const BoundOptions tiles{.weights = WeightFormat::tile, .roundoff = 0x1p-24};
    const AttentionTruth truth = attention_truth(bench.problem, bench.operands, bench.mx, tiles);
    EXPECT_TRUE(worse_than_ref(truth, bench.right, bench.right).empty());
    const auto expect_noticed = [&](const char* tensor, auto member, const std::vector<double>& exact) {
      const auto expect = [&](const char* what, auto change) {
        AttentionResult wrong = bench.right;
        std::vector<float>& x = wrong.*member;
        for (size_t i = 0; i < x.size(); ++i) x[i] = change(double(x[i]), exact[i], i);
        const std::vector<std::string> failures = worse_than_ref(truth, wrong, bench.right);
        ASSERT_EQ(failures.size(), 1u) << name << ", " << tensor << ": " << what;
        EXPECT_EQ(failures[0].substr(0, 3), std::string(tensor) + ":");
      };
      expect("half a decibel more noise", [](double x, double e, size_t) { return float(e + 1.06 * (x - e)); });
      expect("a sum that is cut", [](double x, double, size_t) { return float(0.97 * x); });
      expect("a lost tile", [&](double x, double, size_t i) { return i < exact.size() / 64 ? 0.0f : float(x); });
      expect("one NaN", [](double x, double, size_t i) { return i == 7 ? std::nanf("") : float(x); });
    };
    expect_noticed("dq", &AttentionResult::dq, truth.original.dq);
    expect_noticed("dk", &AttentionResult::dk, truth.original.dk);
    expect_noticed("dv", &AttentionResult::dv, truth.original.dv);
  }
}

// ---- backend cpu ------------------------------------------------------------------------------------------------

constexpr const char* kTensors[] = {"out", "dq", "dk", "dv"};

TEST(CheckNotices, AModeExactThatIsNot) {
  for (const char* name : {"dense_d64", "dense_d128", "causal_d128", "jagged_d64"}) {
    Bench bench(name);
    const AttentionTruth exact = bench.cpu_truth(CpuMath::exact);
    const AttentionResult fast = bench.run_cpu(CpuMath::fast);
    for (const char* tensor : kTensors) {
      EXPECT_NE(Bench::judged(exact, fast, tensor), "") << name << ' ' << tensor;
      EXPECT_NE(Bench::judged(exact, bench.right, tensor), "") << name << ' ' << tensor;
    }
  }
}

TEST(CheckNotices, AModeFastThatRoundsLikeTheRecipe) {
  for (const char* name : {"dense_d64", "causal_d128", "jagged_d64", "peaky_d128", "mean_v_d128"}) {
    Bench bench(name);
    const AttentionTruth fast = bench.cpu_truth(CpuMath::fast);
    for (const char* tensor : kTensors) EXPECT_NE(Bench::judged(fast, bench.right, tensor), "") << name << tensor;
  }
}

// What the bound of the recipe takes for rounding: a softmax_scale that is off by a thousandth.
TEST(CheckNotices, ASmallErrorWhereLittleIsRounded) {
  for (const char* name : {"dense_d64", "dense_d128", "causal_d128"}) {
    Bench bench(name);
    const AttentionTruth exact = bench.cpu_truth(CpuMath::exact);
    bench.mx.softmax_scale = float(1.001 / std::sqrt(double(bench.problem.head_dim)));
    const AttentionResult wrong = bench.run_cpu(CpuMath::exact);
    for (const char* tensor : kTensors) {
      EXPECT_EQ(bench.judged(wrong, tensor), "") << name << ' ' << tensor;
      EXPECT_NE(Bench::judged(exact, wrong, tensor), "") << name << ' ' << tensor;
    }
  }
}

// Errors 2^11 times those of fp32, and 2^8 times those of fixed point, in every quick case with enough of them.
TEST(CheckNotices, AModeWithFewerBits) {
  int tried = 0;
  for (const AttentionCase& c : attention_cases(true)) {
    Bench bench(c);
    for (const auto& [math, factor] : {std::pair(CpuMath::exact, 2048.0), std::pair(CpuMath::fast, 256.0)}) {
      const AttentionTruth truth = bench.cpu_truth(math);
      const OracleResult& exact = truth.dequantized;
      const AttentionResult right = bench.run_cpu(math);
      const auto try_tensor = [&](const char* name, const std::vector<double>& want,
                                  std::vector<float> AttentionResult::*member) {
        AttentionResult result = right;
        double energy = 0, error = 0;
        for (size_t i = 0; i < want.size(); ++i) {
          float& x = (result.*member)[i];
          energy += want[i] * want[i];
          error += (double(x) - want[i]) * (double(x) - want[i]);
          x = float(want[i] + factor * (double(x) - want[i]));
        }
        if (want.size() < 1024 || energy <= 1e-10 || error <= 1e-13 * energy) return;
        ++tried;
        EXPECT_NE(Bench::judged(truth, result, name), "") << cpu_math_name(math) << ' ' << c.name << ' ' << name;
      };
      try_tensor("out", exact.out, &AttentionResult::out);
      try_tensor("dq", exact.dq, &AttentionResult::dq);
      try_tensor("dk", exact.dk, &AttentionResult::dk);
      try_tensor("dv", exact.dv, &AttentionResult::dv);
    }
  }
  EXPECT_GT(tried, 130);
}

TEST(CheckNotices, AModeFastThatLosesATenthOfADecibel) {
  for (const char* name : {"dense_d128", "causal_d64"}) {
    Bench bench(name);
    const AttentionTruth truth = bench.cpu_truth(CpuMath::fast);
    const AttentionResult exact = bench.run_cpu(CpuMath::exact), fast = bench.run_cpu(CpuMath::fast);
    EXPECT_TRUE(worse_than_exact(truth, fast, exact).empty());
    AttentionResult worse = fast;
    for (size_t i = 0; i < worse.dk.size(); ++i) {
      worse.dk[i] += float(std::pow(10, 0.1 / 20) - 1) * (worse.dk[i] - float(truth.original.dk[i]));
    }
    const std::vector<std::string> failures = worse_than_exact(truth, worse, exact);
    ASSERT_EQ(failures.size(), 1u) << name;
    EXPECT_EQ(failures[0].substr(0, 3), "dk:") << failures[0];
  }
}

// ---- what is left -----------------------------------------------------------------------------------------------

TEST(CheckNotices, OneBadElementAndWhere) {
  const Bench bench("jagged_d64");
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const float bad : {bench.right.dk[4000] + float(1.1 * bench.truth.bound.dk[4000]) * 2, nan, inf}) {
    AttentionResult result = bench.right;
    result.dk[4000] = bad;
    EXPECT_NE(bench.judged(result, "dk").find("dk[31, 0, 32]"), std::string::npos) << bench.judged(result, "dk");
  }
  AttentionResult result = bench.right;
  result.lse[0] = -inf;
  EXPECT_NE(bench.judged(result, "lse").find("lse[0, 0]"), std::string::npos) << bench.judged(result, "lse");
}

TEST(CheckNotices, AnyBitThatDiffers) {
  const Bench bench("jagged_d64");
  const MxAttention poisoned = poison_padding(bench.mx);
  const auto compared = [&](auto perturb) {
    AttentionResult other = run_attention(poisoned, "ref", "ref");
    perturb(other);
    return compare_bits(bench.mx, bench.right, poisoned, other);
  };
  const auto flip = [](float& x) { x = std::nextafter(x, 1e9f); };
  const auto begins = [](const std::string& text, const std::string& start) {
    return text.substr(0, start.size()) == start;
  };
  EXPECT_EQ(compared([](AttentionResult&) {}), "");
  EXPECT_PRED2(begins, compared([&](AttentionResult& r) { flip(r.out[130]); }), "out[0, token 1, 2]");
  EXPECT_PRED2(begins, compared([&](AttentionResult& r) { flip(r.lse[3]); }), "lse[0, token 3, 0]");
  EXPECT_PRED2(begins, compared([&](AttentionResult& r) { flip(r.dq[0]); }), "dq");
  EXPECT_PRED2(begins, compared([&](AttentionResult& r) { flip(r.dk[128 * 193]); }), "dk[0, token 193, 0]");
  EXPECT_PRED2(begins, compared([&](AttentionResult& r) { flip(r.dv[0]); }), "dv");
  EXPECT_PRED2(begins, compared([](AttentionResult& r) { ++r.row_exponent[0]; }), "row_exponent");
  EXPECT_PRED2(begins, compared([](AttentionResult& r) { ++r.dk_mx.data[0]; }), "dk_mx");
  EXPECT_PRED2(begins, compared([](AttentionResult& r) { ++r.dv_mx.scale[8]; }), "dv_mx");
  // Behind the 194 tokens of all sequences.
  EXPECT_PRED2(begins, compared([](AttentionResult& r) { r.out[194 * 128] = -0.0f; }),
               "out[0, token 194, 0] is outside");
  EXPECT_PRED2(begins, compared([](AttentionResult& r) { r.lse[194] = 0; }), "lse[0, token 194, 0] is outside");
}

TEST(CheckNotices, APoisonedTokenThatIsRead) {
  MxAttention poisoned = poison_padding(Bench("jagged_d64").mx);
  ++poisoned.cu_seqlens_k.back();
  const AttentionResult result = run_attention(poisoned, "ref", "ref");
  EXPECT_TRUE(std::isnan(result.out[size_t(193) * 128])) << result.out[size_t(193) * 128];
}

TEST(CheckNotices, AWrongByteOfAQuantizer) {
  const Place& p = places().front();
  const std::vector<float> x = hard_values(p);
  for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
    OwnedMx t = ref_quantize(x, p.tokens, p.heads, p.dim, p.seq, Dtype::e4m3, block);
    EXPECT_EQ(judge_bytes(t, x, p, MxRule::rceil), "");
    EXPECT_NE(judge_bytes(t, x, p, MxRule::floor), "");
    for (const size_t at : {size_t(0), size_t(77), t.data.size() - 1}) {
      t.data[at] ^= 1;
      EXPECT_NE(judge_bytes(t, x, p, MxRule::rceil), "") << at;
      t.data[at] ^= 1;
    }
    ++t.scale[1];
    EXPECT_NE(judge_bytes(t, x, p, MxRule::rceil), "");
  }
}

}  // namespace
}  // namespace mxflash::kit
