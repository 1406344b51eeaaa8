// `ref` on the stored attention problems: every element of out, lse, dq, dk and dv within the derived bound of exact
// attention on the dequantized operands, in each element type and kind of block.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kit/verify.h"
#include "vectors.h"

namespace mxflash::kit {
namespace {

// The problem and its own name, which AttentionCase only points at.
struct StoredCase {
  std::string name;
  AttentionCase problem;
  Operands operands;

  explicit StoredCase(const std::string& dir) : name(vector_name(dir)) {
    const nlohmann::json info = read_case(dir);
    const std::vector<int32_t> window = info.value("window", std::vector<int32_t>{-1, -1});
    problem.name = name.c_str();
    for (const auto& lens : info.at("lens")) {
      problem.lens_q.push_back(lens.at(0));
      problem.lens_k.push_back(lens.at(1));
    }
    problem.num_heads_q = info.at("hq");
    problem.num_heads_kv = info.at("hk");
    problem.head_dim = problem.head_dim_v = info.at("d");
    problem.mask = {info.value("causal", false), window.at(0), window.at(1)};
    operands.q = read_values<float>(dir, "q");
    operands.k = read_values<float>(dir, "k");
    operands.v = read_values<float>(dir, "v");
    operands.dout = read_values<float>(dir, "dout");
  }
};

class AttentionVectors : public testing::TestWithParam<std::string> {};

TEST_P(AttentionVectors, RefIsWithinTheBound) {
  const StoredCase stored(GetParam());
  const AttentionCase& c = stored.problem;
  ASSERT_EQ(int64_t(stored.operands.q.size()), total_q(c) * c.num_heads_q * c.head_dim);
  ASSERT_EQ(int64_t(stored.operands.k.size()), total_k(c) * c.num_heads_kv * c.head_dim);
  ASSERT_EQ(stored.operands.v.size(), stored.operands.k.size());
  ASSERT_EQ(stored.operands.dout.size(), stored.operands.q.size());
  for (const Dtype grad_element : {Dtype::e4m3, Dtype::e5m2}) {
    for (const MxBlock block : {MxBlock::square32, MxBlock::row32}) {
      SCOPED_TRACE(testing::Message() << dtype_name(grad_element) << ", block " << int(block));
      const MxAttention mx = quantize_case(c, stored.operands, grad_element, block);
      const AttentionTruth truth = attention_truth(c, stored.operands, mx, {});
      // The floors were measured on other operands; three tokens have no SQNR worth the name.
      const Report report = judge(truth, run_attention(mx, "ref", "ref"), /*floors=*/false);
      for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
      ASSERT_EQ(report.tensors.size(), 5u);
      for (const TensorReport& t : report.tensors) EXPECT_GT(t.bound_share, 0) << t.name << ": nothing was rounded?";
    }
  }
}

// The same operands are judged as the oracle's own test reads them: its stored results are exact for them.
TEST_P(AttentionVectors, TruthIsTheStoredResult) {
  const StoredCase stored(GetParam());
  const OracleResult exact = oracle_attention(make_problem(stored.problem, stored.operands));
  EXPECT_GT(compare(read_values<double>(GetParam(), "out"), exact.out).sqnr_db, 240);
  EXPECT_GT(compare(read_values<double>(GetParam(), "lse"), exact.lse).sqnr_db, 240);
  EXPECT_GT(compare(read_values<double>(GetParam(), "dq"), exact.dq).sqnr_db, 240);
  EXPECT_GT(compare(read_values<double>(GetParam(), "dk"), exact.dk).sqnr_db, 240);
  EXPECT_GT(compare(read_values<double>(GetParam(), "dv"), exact.dv).sqnr_db, 240);
}

INSTANTIATE_TEST_SUITE_P(Stored, AttentionVectors, testing::ValuesIn(vector_dirs()),
                         [](const auto& info) { return vector_name(info.param); });

}  // namespace
}  // namespace mxflash::kit
