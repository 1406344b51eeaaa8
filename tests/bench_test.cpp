// What `mxflash bench` counts and prints: time statistics, FLOPs, shapes, lines; and `mxflash info`.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "cli_run.h"
#include "kit/peak.h"
#include "kit/timer.h"
#include "tools/bench_shapes.h"
#include "tools/commands.h"

namespace mxflash::tools {
namespace {

using Json = nlohmann::json;

// ---- time -------------------------------------------------------------------------------------------------------

TEST(Timer, QuantilesAreLinearBetweenSamples) {
  EXPECT_DOUBLE_EQ(kit::median({3, 1, 2}), 2);
  EXPECT_DOUBLE_EQ(kit::median({4, 1, 2, 3}), 2.5);
  EXPECT_DOUBLE_EQ(kit::median({7}), 7);
  EXPECT_DOUBLE_EQ(kit::quantile({0, 10}, 0.25), 2.5);
  EXPECT_DOUBLE_EQ(kit::quantile({5, 1, 9}, 0), 1);
  EXPECT_DOUBLE_EQ(kit::quantile({5, 1, 9}, 1), 9);
  EXPECT_TRUE(std::isnan(kit::median({})));
}

TEST(Timer, SpreadIsTheMiddle80PercentOverTheMedian) {
  EXPECT_DOUBLE_EQ(kit::spread({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}), 8.0 / 5);
  EXPECT_DOUBLE_EQ(kit::spread({2, 2, 2}), 0);
  EXPECT_TRUE(std::isnan(kit::spread({2})));  // one sample does not say
}

TEST(Timer, RepeatsAtLeastAndAtMost) {
  int calls = 0;
  EXPECT_EQ(kit::measure({.seconds = 0, .min_repeats = 4}, [&] { ++calls; }).repeats, 4);
  EXPECT_EQ(calls, 5);  // and a warm-up
  EXPECT_EQ(kit::measure({.seconds = 100, .max_repeats = 7}, [] {}).repeats, 7);
}

TEST(Timer, ALongRunIsItsOnlyMeasurement) {
  int calls = 0;
  const kit::Timing timing = kit::measure({.long_run_seconds = 0.001}, [&] {
    ++calls;
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
  });
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(timing.repeats, 1);
  EXPECT_GE(timing.median_ms, 3);
  EXPECT_TRUE(std::isnan(timing.spread));
}

TEST(Peak, IsMeasuredOnThisMachine) {
  const kit::FmaPeak peak = kit::measure_fma_peak(1);
  EXPECT_GT(peak.gflops, 0.5) << peak.instructions;  // slower than anything that builds this
  EXPECT_LT(peak.gflops, 2000) << peak.instructions;
  EXPECT_GT(kit::measure_copy_gbps(1 << 20, 1), 0.1);
  EXPECT_GT(kit::measure_copy_gbps(1, 4), 0);  // more threads than bytes
  EXPECT_FALSE(kit::cpu_model().empty());
}

// ---- FLOPs ------------------------------------------------------------------------------------------------------

constexpr Operation kFwd = Operation::attention_fwd, kBwd = Operation::attention_bwd;

BenchShape shape(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t heads, int64_t dim) {
  return {.batch = batch,
          .seqlen_q = seqlen_q,
          .seqlen_k = seqlen_k,
          .num_heads_q = heads,
          .num_heads_kv = heads,
          .head_dim = dim,
          .head_dim_v = dim};
}

TEST(BenchFlops, AreFourDAPairForwardAndTenBackward) {
  const BenchShape s = shape(3, 100, 50, 2, 64);
  EXPECT_EQ(attention_flops(s, kFwd), 4.0 * 64 * 2 * 3 * 100 * 50);
  EXPECT_EQ(attention_flops(s, kBwd), 10.0 * 64 * 2 * 3 * 100 * 50);
}

TEST(BenchFlops, CountQueryHeadsAndBothDims) {
  BenchShape s = shape(1, 10, 20, 8, 192);
  s.num_heads_kv = 2;
  s.head_dim_v = 128;
  EXPECT_EQ(attention_flops(s, kFwd), (2.0 * 192 + 2 * 128) * 8 * 10 * 20);
  EXPECT_EQ(attention_flops(s, kBwd), (6.0 * 192 + 4 * 128) * 8 * 10 * 20);
}

TEST(BenchFlops, AreHalfWithACausalMaskAndTheVisiblePairsWithAWindow) {
  BenchShape s = shape(1, 64, 64, 1, 8);
  const double dense = attention_flops(s, kFwd);
  s.mask.causal = true;
  EXPECT_EQ(attention_flops(s, kFwd), dense / 2);
  s.mask = {.window_left = 1, .window_right = 0};
  EXPECT_EQ(attention_flops(s, kFwd), 4.0 * 8 * (64 + 63));
  s.mask = {.causal = true, .window_left = 0};
  EXPECT_EQ(attention_flops(s, kFwd), 4.0 * 8 * 64);
}

TEST(BenchFlops, CountRealLengths) {
  BenchShape s = shape(5, 300, 300, 1, 64);
  s.jagged = true;
  double pairs = 0;
  for (const int32_t len : lens_q(s)) pairs += double(len) * len;
  EXPECT_EQ(lens_q(s), lens_k(s));
  EXPECT_EQ(attention_flops(s, kFwd), 4.0 * 64 * pairs);
  EXPECT_LT(pairs, 5 * 300.0 * 300);

  BenchShape shared = shape(5, 30, 300, 2, 64);
  shared.shared_q = shared.jagged = true;
  EXPECT_EQ(lens_q(shared), std::vector<int32_t>{30});
  EXPECT_EQ(attention_flops(shared, kFwd), 4.0 * 64 * 2 * 30 * double(kit::sum_of(lens_k(shared))));
}

// ---- shapes -----------------------------------------------------------------------------------------------------

TEST(BenchShapes, OfLanguageModelsHave16384Tokens) {
  const std::vector<BenchShape> shapes = bench_shapes("llm");
  std::set<std::string> names;
  for (const BenchShape& s : shapes) {
    EXPECT_EQ(s.batch * s.seqlen_q, 16384) << to_text(s);
    EXPECT_EQ(s.seqlen_q, s.seqlen_k);
    EXPECT_TRUE(names.insert(to_text(s)).second) << to_text(s);
  }
  // Five lengths, dense and causal, 16 heads of 128 and 32 of 64; GQA 32/8, dense and causal.
  EXPECT_EQ(shapes.size(), 22u);
  for (const char* name : {"b16 h16 1024x1024 d128", "b1 h32 16384x16384 d64 causal", "b8 h16 2048x2048 d128 causal",
                           "b2 h32/8 8192x8192 d128"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
}

TEST(BenchShapes, OfRecommendersAreJaggedWithHalfOfTheLongestAsMean) {
  const std::vector<BenchShape> shapes = bench_shapes("recsys");
  EXPECT_EQ(shapes.size(), 13u);
  int jagged = 0;
  for (const BenchShape& s : shapes) {
    EXPECT_EQ(s.head_dim, 128);
    EXPECT_EQ(s.num_heads_q, 4);
    EXPECT_EQ(s.batch, s.shared_q ? 512 : 1152);
    if (!s.jagged) continue;
    ++jagged;
    const std::vector<int32_t> lens = lens_k(s);
    const double mean = double(kit::sum_of(lens)) / double(lens.size());
    EXPECT_NEAR(mean, double(s.min_seqlen + s.seqlen_k) / 2, 0.04 * double(s.seqlen_k)) << to_text(s);
    for (const int32_t len : lens) {
      EXPECT_GE(len, s.min_seqlen);
      EXPECT_LE(len, s.seqlen_k);
    }
  }
  EXPECT_EQ(jagged, 5);
  EXPECT_EQ(to_text(shapes.back()), "b512 h4 256x1024 d128 shared q jagged");
  EXPECT_EQ(shapes.back().min_seqlen, 64);
}

TEST(BenchShapes, ClipKeepsWhatMatters) {
  for (const char* set : {"small", "llm", "recsys"}) {
    for (const BenchShape& s : bench_shapes(set)) {
      const BenchShape c = clipped(s);
      EXPECT_LE(c.batch, 2);
      EXPECT_LE(c.seqlen_q, 256);
      EXPECT_LE(c.num_heads_q, 2);
      EXPECT_EQ(c.num_heads_q % c.num_heads_kv, 0);
      EXPECT_EQ(c.num_heads_q > c.num_heads_kv, s.num_heads_q > s.num_heads_kv);
      EXPECT_EQ(c.head_dim, s.head_dim);
      EXPECT_EQ(c.mask.causal, s.mask.causal);
      EXPECT_EQ(c.shared_q, s.shared_q);
      EXPECT_EQ(c.jagged, s.jagged);
    }
  }
}

TEST(BenchShapes, ReadWhatTheyPrint) {
  std::string lines, array;
  const std::vector<BenchShape> shapes = bench_shapes("recsys");
  for (const BenchShape& s : shapes) {
    lines += to_json(s).dump() + "\n\n";
    array += (array.empty() ? "[" : ",\n") + Json{{"op", "attention_fwd"}, {"shape", to_json(s)}}.dump();
  }
  for (const std::string& text : {lines, array + "]"}) {
    const std::vector<BenchShape> read = parse_bench_shapes(text, "file");
    ASSERT_EQ(read.size(), shapes.size());
    for (size_t i = 0; i < read.size(); ++i) EXPECT_EQ(to_json(read[i]), to_json(shapes[i]));
  }
}

TEST(BenchShapes, HaveDefaults) {
  const BenchShape s = parse_bench_shapes(R"({"seqlen_q": 7, "head_dim": 40, "num_heads_q": 3})", "file").at(0);
  EXPECT_EQ(to_text(s), "b1 h3 7x7 d40");
  EXPECT_EQ(s.num_heads_kv, 3);
  EXPECT_EQ(s.head_dim_v, 40);
  EXPECT_EQ(s.mask.window_left, -1);
}

TEST(BenchShapes, RejectWithTheRuleAndTheValue) {
  const auto message = [](const std::string& text) -> std::string {
    try {
      parse_bench_shapes(text, "shapes.json");
    } catch (const UsageError& error) {
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
      return error.what();
    }
    return "accepted";
  };
  const auto expect = [&](const std::string& text, const std::string& part) {
    EXPECT_NE(message(text).find(part), std::string::npos) << text << ": " << message(text);
  };
  expect("", "shapes.json: has no shapes");
  expect("[]", "has no shapes");
  expect("[1]", "shape 0: a shape must be a JSON object");
  expect("nonsense", "line 1: must be a JSON object");
  expect("{\"seqlen_q\": 8, \"head_dim\": 64}\n{\"seqlen_q\": 8,", "line 2: must be a JSON object");
  expect(R"({"head_dim": 64})", "seqlen_q is missing");
  expect(R"({"seqlen_q": 8})", "head_dim is missing");
  expect(R"({"seqlen_q": 0, "head_dim": 64})", "seqlen_q must be an integer from 1 to 16777216, got 0");
  expect(R"({"seqlen_q": "8\n", "head_dim": 64})", "seqlen_q must be an integer");
  expect(R"({"seqlen_q": 2.5, "head_dim": 64})", "got 2.5");
  expect(R"({"seqlen_q": 18446744073709551615, "head_dim": 64})", "got 18446744073709551615");
  expect(R"({"seqlen_q": 8, "head_dim": 64, "window_left": -2})", "window_left must be an integer from -1");
  expect(R"({"seqlen_q": 8, "head_dim": 64, "causal": 1})", "causal must be true or false");
  expect(R"({"seqlen_q": 8, "head_dim": 64, "sequence": 1})", "unknown key \"sequence\"");
  expect(R"({"seqlen_q": 8, "head_dim": 64, "num_heads_q": 3, "num_heads_kv": 2})",
         "multiple of num_heads_kv = 2, got 3");
  expect(R"({"seqlen_q": 16777216, "batch": 16777216, "head_dim": 64})", "batch * seqlen must be less than 2^31");
  expect(std::string(100000, '['), "must be a JSON object");
  expect(std::string(100000, '[') + std::string(100000, ']'), "a shape must be a JSON object");
}

// ---- the command ------------------------------------------------------------------------------------------------

std::string tiny_shapes() {
  const std::string path = scratch("shapes.jsonl");
  std::ofstream(path)
      << R"({"seqlen_q": 40, "head_dim": 16, "num_heads_q": 2})" << '\n'
      << R"({"batch": 3, "seqlen_q": 33, "seqlen_k": 20, "head_dim": 32, "causal": true, "jagged": true})";
  return path;
}

std::vector<Json> json_lines(const std::string& text) {
  std::vector<Json> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(Json::parse(line));
  return lines;
}

TEST(BenchCommand, PrintsOneObjectALine) {
  const CliRun run = run_cli({"bench", "--shapes", tiny_shapes(), "--json", "--min-time", "0", "--threads", "1"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  std::map<std::string, int> count;
  for (const Json& line : json_lines(run.out)) {
    const std::string op = line.at("op");
    ++count[op];
    EXPECT_EQ(line.at("backend"), "ref");
    EXPECT_EQ(line.at("mode"), "reference");
    for (const char* key : {"batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim"}) {
      EXPECT_TRUE(line.at("shape").at(key).is_number_integer()) << key;
    }
    EXPECT_TRUE(line.at("shape").at("causal").is_boolean());
    EXPECT_NE(line.at("device").get<std::string>().find("1 thread"), std::string::npos);
    EXPECT_FALSE(line.at("commit").get<std::string>().empty());
    EXPECT_GT(line.at("median_ms").get<double>(), 0);
    EXPECT_GE(line.at("spread").get<double>(), 0);
    EXPECT_GE(line.at("repeats").get<int>(), 3);
    EXPECT_GT(line.at("gbps").get<double>(), 0);
    EXPECT_GT(line.at("ceiling_share").get<double>(), 0);
    EXPECT_EQ(line.at("ratio").size(), 1u);
    const bool attention = op.starts_with("attention"), computes = attention || op == "gemm_quantize";
    EXPECT_EQ(line.at("tflops").is_number(), computes);
    EXPECT_GT(line.at("ratio").at(attention ? "oracle_f64" : computes ? "fp32_loop" : "memcpy").get<double>(), 0);
    EXPECT_EQ(parse_bench_shapes(line.dump(), "line").size(), 1u);
  }
  const std::map<std::string, int> two_each = {{"attention_fwd", 2}, {"attention_bwd", 2},    {"quantize", 2},
                                               {"dequantize", 2},    {"rmsnorm_quantize", 2}, {"gemm_quantize", 2}};
  EXPECT_EQ(count, two_each);
}

TEST(BenchCommand, PrintsATable) {
  const CliRun run = run_cli(
      {"bench", "--shapes", tiny_shapes(), "--op", "attention_fwd,quantize", "--min-time", "0", "--backend", "ref"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  for (const char* part : {"multiply-add peak", "attention_fwd", "b1 h2 40x40 d16", "b3 h1 33x20 d32 causal jagged",
                           "quantize", "40x2x16", "oracle_f64", "memcpy", "GFLOP/s"}) {
    EXPECT_NE(run.out.find(part), std::string::npos) << part << " in\n" << run.out;
  }
  EXPECT_EQ(run.out.find("dequantize"), std::string::npos);
}

void expect_usage_error(const std::vector<std::string>& args, const std::string& part) {
  const CliRun run = run_cli(args);
  EXPECT_EQ(run.exit_code, 2) << part;
  EXPECT_EQ(run.err.rfind("mxflash: ", 0), 0u) << run.err;
  EXPECT_EQ(run.err.find('\n'), run.err.size() - 1) << run.err;
  EXPECT_NE(run.err.find(part), std::string::npos) << run.err;
}

TEST(BenchCommand, EndsWithOneLineAndExitCode2OnBadUsage) {
  expect_usage_error({"bench", "--shapes", "no_such_file"}, "--shapes must be small, llm, recsys or a readable file");
  expect_usage_error({"bench", "--op", "softmax"}, "softmax not in");
  expect_usage_error({"bench", "--backend", "abacus"}, "--backend must be one of ref");
  expect_usage_error({"bench", "--threads", "0"}, "--threads");
  const std::string path = scratch("odd.json");
  std::ofstream(path) << R"({"seqlen_q": 8, "head_dim": 20})";
  expect_usage_error({"bench", "--shapes", path, "--op", "attention_fwd", "--json"},
                     "head_dim must be a multiple of 8, got 20");
  std::ofstream(scratch("large.json")) << R"({"batch": 100, "seqlen_q": 16000000, "head_dim": 256, "num_heads_q": 64})";
  const CliRun large = run_cli({"bench", "--shapes", scratch("large.json"), "--op", "attention_bwd", "--json"});
  EXPECT_EQ(large.exit_code, 2);
  EXPECT_NE(large.err.find("GB of memory"), std::string::npos) << large.err;
}

// ---- info -------------------------------------------------------------------------------------------------------

TEST(InfoCommand, ListsEveryOperationWithItsBackends) {
  const CliRun run = run_cli({"info", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json info = run.json();
  EXPECT_EQ(info.at("version"), version());
  EXPECT_FALSE(info.at("commit").get<std::string>().empty());
  EXPECT_FALSE(info.at("cpu").at("model").get<std::string>().empty());
  EXPECT_GE(info.at("cpu").at("threads").get<int>(), 1);
  ASSERT_EQ(info.at("operations").size(), size_t(kNumOperations));
  for (const Json& op : info.at("operations")) {
    EXPECT_TRUE(op.at("chosen").is_string()) << op;
    const Json& last = op.at("backends").back();
    EXPECT_EQ(last.at("name"), "ref");
    EXPECT_EQ(last.at("available"), true);
    EXPECT_FALSE(last.at("target").get<std::string>().empty());
  }
}

TEST(InfoCommand, SaysWhatTheEnvironmentForces) {
  setenv("MXFLASH_BACKEND", "abacus", 1);
  const CliRun json = run_cli({"info", "--json"}), table = run_cli({"info"});
  unsetenv("MXFLASH_BACKEND");
  ASSERT_EQ(json.exit_code, 0) << json.err;
  const Json info = json.json();
  EXPECT_EQ(info.at("forced_backend"), "abacus");
  for (const Json& op : info.at("operations")) EXPECT_TRUE(op.at("chosen").is_null());
  EXPECT_NE(table.out.find("MXFLASH_BACKEND=abacus"), std::string::npos) << table.out;
}

}  // namespace
}  // namespace mxflash::tools
