// What `mxflash bench` counts and prints: time statistics, FLOPs, shapes, lines; and `mxflash info`.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
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

TEST(Timer, TakesSamplesInTurn) {
  std::string calls;
  const auto way = [&](char name, double ms) {
    return [&calls, name, ms] {
      calls += name;
      return ms;
    };
  };
  const std::vector<kit::Timing> timings =
      kit::measure_in_turn({.seconds = 0, .min_repeats = 2}, {way('a', 3), way('b', 5)});
  EXPECT_EQ(calls, "ababab");  // the first round warms up
  ASSERT_EQ(timings.size(), 2u);
  EXPECT_EQ(timings[0].median_ms, 3);
  EXPECT_EQ(timings[1].median_ms, 5);
  EXPECT_EQ(timings[1].repeats, 2);
  calls.clear();
  EXPECT_EQ(kit::measure_in_turn({.long_run_seconds = 0.004}, {way('a', 3), way('b', 5)})[0].repeats, 1);
  EXPECT_EQ(calls, "ab");
  // 12 ms for each on average: of 3 + 5 in a round.
  EXPECT_EQ(kit::measure_in_turn({.seconds = 0.012, .min_repeats = 1}, {way('a', 3), way('b', 5)})[0].repeats, 3);
  EXPECT_TRUE(std::isnan(kit::measure_in_turn({.seconds = 0}, {way('a', NAN)})[0].median_ms));
}

TEST(Timer, SamplesOfShortRunsAreMeans) {
  int calls = 0;
  const auto run = [&] {
    ++calls;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  };
  const std::function<double()> sample = kit::sampler(run, 10);
  EXPECT_GE(sample(), 2);  // how long a run takes
  EXPECT_EQ(calls, 1);
  EXPECT_GE(sample(), 2);
  EXPECT_GE(calls, 3);  // one that is not counted, and as many as take 10 ms
  EXPECT_LE(calls, 1 + 1 + 5);
  calls = 0;
  const std::function<double()> single = kit::sampler(run, 0);
  single();
  single();
  EXPECT_EQ(calls, 2);
}

TEST(Peak, IsMeasuredOnThisMachine) {
  const kit::FmaPeak peak = kit::measure_fma_peak(1);
  EXPECT_GT(peak.gflops, 0.5) << peak.instructions;  // slower than anything that builds this
  EXPECT_LT(peak.gflops, 2000) << peak.instructions;
  EXPECT_GT(kit::measure_copy_gbps(1 << 20, 1), 0.1);
  EXPECT_GT(kit::measure_copy_gbps(1, 4), 0);  // more threads than bytes
  EXPECT_GT(kit::measure_read_gbps(1 << 20, 1), 0.1);
  EXPECT_GT(kit::measure_read_gbps(1, 12), 0);
  EXPECT_GT(kit::fma_meter(1)(), 0.5);
  EXPECT_FALSE(kit::cpu_model().empty());
}

// ---- FLOPs ------------------------------------------------------------------------------------------------------

constexpr BenchOp kFwd = BenchOp::attention_fwd, kBwd = BenchOp::attention_bwd;

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
  EXPECT_EQ(attention_flops(s, BenchOp::training_step), attention_flops(s, kFwd) + attention_flops(s, kBwd));
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

TEST(BenchShapes, OfTheCpuBackendAreWhatItIsJudgedBy) {
  const std::vector<BenchShape> shapes = bench_shapes("cpu");
  const auto ops = [](const BenchShape& s) {
    std::string names;
    for (const BenchOp op : s.ops) names += std::string(names.empty() ? "" : " ") + operation_name(op);
    return names;
  };
  std::map<std::string, std::string> of;
  for (const BenchShape& s : shapes) of[to_text(s)] = ops(s);
  for (const char* name :
       {"b1 h8 1024x1024 d128", "b1 h8 4096x4096 d64 causal", "b64 h4 512x512 d128 jagged", "b1 h8/2 2048x2048 d128"}) {
    EXPECT_EQ(of[name], "attention_fwd attention_bwd") << name;
  }
  for (const char* name : {"b1 h8/1 1x131072 d128", "b1 h8 16x4096 d128"}) EXPECT_EQ(of[name], "attention_fwd") << name;
  EXPECT_EQ(of["b1 h32 16384x16384 d128"], "quantize dequantize rmsnorm_quantize rmsnorm_bwd");
  for (const BenchShape& s : shapes) {
    if (std::ranges::count(s.ops, BenchOp::quantize) > 0) {
      EXPECT_GE(2 * total_tokens_q(s) * s.hidden(), int64_t(64) << 20);  // beyond any cache
    }
    if (!s.jagged) continue;
    // About the work of a dense sequence of 1024 to 2048.
    EXPECT_GT(attention_flops(s, kFwd), attention_flops(shape(1, 1024, 1024, 8, 128), kFwd));
    EXPECT_LT(attention_flops(s, kFwd), attention_flops(shape(1, 2048, 2048, 8, 128), kFwd));
  }
}

TEST(BenchShapes, OfCudaDevicesAreWhatTheOthersLack) {
  std::map<std::string, std::set<BenchOp>> of;
  for (const BenchShape& s : bench_shapes("cuda")) of[to_text(s)] = {s.ops.begin(), s.ops.end()};
  for (const char* name : {"b4 h16/2 4096x4096 d128 causal", "b8 h16 4096x4096 d128 jagged", "b4 h16 4096x4096 d64",
                           "b64 h16 256x1024 d128 shared q jagged"}) {
    EXPECT_TRUE(of[name].contains(kFwd)) << name;
  }
  EXPECT_TRUE(of["b1 h32 16384x16384 d128"].contains(BenchOp::rmsnorm_quantize));
  EXPECT_TRUE(of["b1 h32 16384x16384 d128"].contains(BenchOp::rmsnorm_bwd));
  EXPECT_FALSE(of["b1 h32 16384x16384 d128"].contains(kFwd));
}

TEST(BenchShapes, OfABackwardAreOfBothDimsAndMasks) {
  std::map<std::string, std::set<BenchOp>> of;
  for (const BenchShape& s : bench_shapes("backward")) of[to_text(s)] = {s.ops.begin(), s.ops.end()};
  EXPECT_EQ(of.size(), 17u);
  for (const char* name : {"b16 h16 1024x1024 d128 causal", "b1 h32 16384x16384 d64", "b4 h16/2 4096x4096 d128 causal",
                           "b8 h16 4096x4096 d128 jagged", "b64 h16 256x1024 d128 shared q jagged"}) {
    EXPECT_TRUE(of[name].contains(kBwd)) << name;
  }
  for (const char* name :
       {"b4 h16 4096x4096 d128", "b4 h16 4096x4096 d128 causal", "b1 h16 16384x16384 d128", "b4 h32 4096x4096 d64"}) {
    EXPECT_TRUE(of[name].contains(BenchOp::training_step)) << name;
  }
}

TEST(BenchShapes, ClipKeepsWhatMatters) {
  for (const char* set : {"small", "llm", "recsys", "cpu", "cuda", "backward"}) {
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
  std::vector<BenchShape> shapes = bench_shapes("recsys");
  for (const BenchShape& s : bench_shapes("cpu")) shapes.push_back(s);
  for (const BenchShape& s : shapes) {
    lines += to_json(s).dump() + "\n\n";
    array += (array.empty() ? "[" : ",\n") + Json{{"op", "attention_fwd"}, {"shape", to_json(s)}}.dump();
  }
  for (const std::string& text : {R"({"machine": {"model": "x"}})"
                                  "\n" +
                                      lines,
                                  array + "]"}) {
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
  expect(R"({"seqlen_q": 8, "head_dim": 64, "ops": "quantize"})", "ops must be an array of names");
  expect(R"({"seqlen_q": 8, "head_dim": 64, "ops": ["quantize", "softmax"]})", "unknown operation \"softmax\"");
  expect(R"({"seqlen_q": 8, "head_dim": 64, "ops": [1]})", "unknown operation 1");
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
  const CliRun run = run_cli({"bench", "--shapes", tiny_shapes(), "--json", "--min-time", "0", "--threads", "1",
                              "--backend", "ref", "--peers", "none"});
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
    EXPECT_EQ(line.at("peers").size(), 1u);
    EXPECT_FALSE(line.contains("peer_versions"));
    EXPECT_EQ(line.contains("workspace_bytes"), op.starts_with("attention"));
    ASSERT_EQ(line.contains("saved_bytes"), op == "attention_bwd");
    if (op == "attention_bwd" && line.at("shape").at("seqlen_q") == 40) {
      // q, k, v with a scale for 32 x 32 of a sequence padded to 128 tokens, BF16 out, lse, and a byte a row.
      EXPECT_EQ(line.at("saved_bytes"), 2 * (3 * (40 * 16 + 4) + 40 * (2 * 16 + 5)));
    }
    const bool attention = op.starts_with("attention"), computes = attention || op == "gemm_quantize";
    EXPECT_EQ(line.at("tflops").is_number(), computes);
    const Json& ceiling = line.at("ceiling").at(computes ? "fma_gflops" : "copy_gbps");
    EXPECT_GT(ceiling.at("value").get<double>(), 0);
    EXPECT_NEAR(ceiling.at("value").get<double>() * ceiling.at("share").get<double>(),
                computes ? 1e3 * line.at("tflops").get<double>() : line.at("gbps").get<double>(),
                1e-6 * ceiling.at("value").get<double>());
    EXPECT_GT(line.at("ratio").at(attention ? "oracle_f64" : computes ? "fp32_loop" : "memcpy").get<double>(), 0);
    EXPECT_EQ(parse_bench_shapes(line.dump(), "line").size(), 1u);
  }
  const std::map<std::string, int> two_each = {{"attention_fwd", 2}, {"attention_bwd", 2},    {"quantize", 2},
                                               {"dequantize", 2},    {"rmsnorm_quantize", 2}, {"rmsnorm_bwd", 2},
                                               {"gemm_quantize", 2}};
  EXPECT_EQ(count, two_each);
}

TEST(BenchCommand, PrintsATable) {
  const CliRun run = run_cli({"bench", "--shapes", tiny_shapes(), "--op", "attention_fwd,quantize", "--min-time", "0",
                              "--backend", "ref", "--peers", "none"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  for (const char* part :
       {"multiply-add peak", "peers: none (bench/baselines/install.sh", "attention_fwd", "b1 h2 40x40 d16",
        "b3 h1 33x20 d32 causal jagged", "quantize", "40x2x16", "oracle_f64", "memcpy", "GFLOP/s"}) {
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
  expect_usage_error({"bench", "--shapes", "no_such_file"},
                     "--shapes must be small, llm, recsys, cpu, cuda, backward, decode or a readable file");
  expect_usage_error({"bench", "--op", "softmax"}, "softmax not in");
  expect_usage_error({"bench", "--op", "training_step", "--device", "cpu"},
                     "training_step is timed on a device only: --device cuda");
  expect_usage_error({"bench", "--backend", "abacus"}, "--backend must be one of ");
  expect_usage_error({"bench", "--cpu-math", "slow"}, "--cpu-math: slow not in {exact,fast,both}");
  expect_usage_error({"bench", "--threads", "0"}, "--threads");
  const std::string path = scratch("odd.json");
  std::ofstream(path) << R"({"seqlen_q": 8, "head_dim": 20})";
  expect_usage_error({"bench", "--shapes", path, "--op", "attention_fwd", "--json", "--peers", "none"},
                     "head_dim must be a multiple of 8, got 20");
  std::ofstream(scratch("large.json")) << R"({"batch": 100, "seqlen_q": 16000000, "head_dim": 256, "num_heads_q": 64})";
  const CliRun large =
      run_cli({"bench", "--shapes", scratch("large.json"), "--op", "attention_bwd", "--json", "--peers", "none"});
  EXPECT_EQ(large.exit_code, 2);
  EXPECT_NE(large.err.find("GB of memory"), std::string::npos) << large.err;
}

TEST(BenchCommand, SaysWhyItCannotUseADevice) {
  expect_usage_error({"bench", "--device", "gpu"}, "--device: gpu not in {cpu,cuda,auto}");
  expect_usage_error({"bench", "--cuda-modes", "kernel,all"}, "--cuda-modes: all not in");
  expect_usage_error({"bench", "--device", "cuda", "--backend", "cpu"},
                     "--backend cpu computes on cpu, but --device is cuda; leave one of them out");
  expect_usage_error({"bench", "--device", "cpu", "--backend", "sm90"}, "--backend sm90 computes on cuda, but");
  if (backend_info(Operation::attention_fwd, 0).available.ok()) GTEST_SKIP() << "there is one";
  const std::string reason = backend_info(Operation::attention_fwd, 0).available.message;
  expect_usage_error({"bench", "--device", "cuda"},
                     "--device cuda cannot be used here: sm100: " + reason + "; sm90: " + reason);
  expect_usage_error({"bench", "--backend", "sm90"}, "--backend sm90 cannot run here: " + reason);
  expect_usage_error({"check", "--backend", "sm90"}, "--backend sm90 cannot run here: " + reason);
}

TEST(BenchCommand, RefusesAnOperationThatNoDeviceHas) {
  const std::string message = "gemm_quantize has no backend for --device cuda, got only cpu, ref";
  if (num_backends(Operation::gemm_quantize) == 2)
    expect_usage_error({"bench", "--device", "cuda", "--op", "gemm_quantize"}, message);
}

TEST(BenchCommand, TakesSeveralSetsOfShapes) {
  std::ofstream(scratch("a.json")) << R"({"seqlen_q": 8, "head_dim": 16})";
  std::ofstream(scratch("b.json")) << R"({"seqlen_q": 9, "head_dim": 16})";
  const CliRun run = run_cli({"bench", "--shapes", scratch("a.json") + "," + scratch("b.json"), "--op", "quantize",
                              "--min-time", "0", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(json_lines(run.out).size(), 2u);
}

// Each is verified by itself: timed, or refused.
TEST(BenchCommand, TimesBothArithmeticsOfTheCpuBackend) {
  const auto lines = [](const char* cpu_math, const std::string& mode) {
    const CliRun run = run_cli({"bench", "--shapes", tiny_shapes(), "--json", "--min-time", "0", "--backend", "cpu",
                                "--op", "attention_fwd", "--peers", "none", "--cpu-math", cpu_math});
    int64_t count = 0;
    for (const Json& line : json_lines(run.out)) count += line.at("mode") == mode && line.at("isa") == cpu_isa();
    const std::string refused = "in backend cpu " + mode + " is wrong, so it is not timed";
    for (size_t at = 0; (at = run.err.find(refused, at)) != std::string::npos; ++at) ++count;
    return count;
  };
  for (const char* mode : {"exact", "fast"}) {
    EXPECT_EQ(lines("both", mode), 2) << mode;
    EXPECT_EQ(lines(mode, mode), 2) << mode;
  }
  EXPECT_EQ(lines("exact", "fast"), 0);
  EXPECT_EQ(lines("fast", "exact"), 0);
}

TEST(BenchCommand, ComparesADecodingStepWithReading) {
  const std::string path = scratch("decode.json");
  std::ofstream(path) << R"({"seqlen_q": 2, "seqlen_k": 300, "head_dim": 64})";
  const CliRun run = run_cli({"bench", "--shapes", path, "--json", "--min-time", "0", "--op", "attention_fwd",
                              "--peers", "none", "--cpu-math", "exact"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  for (const Json& line : json_lines(run.out)) {
    const Json& ceiling = line.at("ceiling");
    EXPECT_EQ(ceiling.size(), 2u);
    EXPECT_EQ(line.at("ceiling_share"), std::max(ceiling.at("fma_gflops").at("share").get<double>(),
                                                 ceiling.at("read_gbps").at("share").get<double>()));
  }
}

// ---- peers in another process -----------------------------------------------------------------------------------

// A "Python" that speaks the protocol of bench/baselines/peers.py, with these answers as shell commands.
std::string fake_python(const std::string& hello, const std::string& shape, const std::string& sample) {
  const std::string path = scratch("python");
  std::ofstream(path) << "#!/bin/sh\nwhile read -r line; do case \"$line\" in\n*'\"hello\"'*) " << hello
                      << " ;;\n*'\"shape\"'*) " << shape << " ;;\n*'\"sample\"'*) " << sample << " ;;\nesac; done\n";
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}
const std::string kHello =
    R"(echo '{"peers": ["torch_sdpa_f32"], "left_out": {"ort": "not here"}, "versions": {"t": "1"}}')";
const std::string kShape =
    R"(echo '{"peers": {"torch_sdpa_f32": {"error": 0.25, "saved_bytes": 4096}, "other": {}}, "left_out": {"third": "no masks"}}')";

CliRun bench_with(const std::string& python, const std::string& format = "--json") {
  return run_cli({"bench", "--shapes", tiny_shapes(), "--op", "attention_fwd,quantize", "--min-time", "0", "--backend",
                  "ref", "--peers", python, format});
}

TEST(BenchPeers, AreTimedInTheirOwnProcess) {
  const std::string sample = R"(case "$line" in *torch*) echo '{"ms": 7e-6}';; *) echo '{"ms": 5e-6}';; esac)";
  const CliRun run = bench_with(fake_python(kHello, kShape, sample));
  ASSERT_EQ(run.exit_code, 0) << run.err;
  int attention = 0;
  for (const Json& line : json_lines(run.out)) {
    if (line.at("op") != "attention_fwd") {
      EXPECT_FALSE(line.contains("peer_versions"));
      continue;
    }
    ++attention;
    const double ours = line.at("median_ms");
    EXPECT_EQ(line.at("best_peer"), "other");
    EXPECT_EQ(line.at("peer_versions"), Json({{"t", "1"}}));
    EXPECT_EQ(line.at("peers").at("torch_sdpa_f32").at("median_ms"), 7e-6);
    EXPECT_EQ(line.at("peers").at("torch_sdpa_f32").at("error"), 0.25);
    EXPECT_EQ(line.at("peers").at("torch_sdpa_f32").at("saved_bytes"), 4096);
    EXPECT_FALSE(line.at("peers").at("other").contains("error"));
    EXPECT_FALSE(line.at("peers").at("other").contains("saved_bytes"));
    EXPECT_DOUBLE_EQ(line.at("ratio").at("other").get<double>(), 5e-6 / ours);
    EXPECT_GT(line.at("peers").at("dequantize_sdpa").at("median_ms").get<double>(), 7e-6);
    EXPECT_EQ(line.at("ratio").size(), 4u);  // ref has the oracle beside them
  }
  EXPECT_EQ(attention, 2);
  EXPECT_NE(run.err.find("mxflash: no peer ort: not here\n"), std::string::npos) << run.err;
  const size_t said = run.err.find("mxflash: attention_fwd: peer third is left out: no masks\n");
  EXPECT_NE(said, std::string::npos) << run.err;
  EXPECT_EQ(run.err.find("third", said + 40), std::string::npos) << run.err;  // once
}

TEST(BenchPeers, GetTheOperandsAndTheShape) {
  // Answers with the size of q and k as the error of two peers: 40 * 2 * 16 and 3 sequences of at most 20.
  const std::string shape =
      R"(f=${line#*'"folder":"'}; f=${f%%'"'*}; [ -f "$f/dout" ] && exit 9
printf '{"peers": {"q": {"error": %d}, "k": {"error": %d}}}\n' $(wc -c < "$f/q") $(wc -c < "$f/k"); echo "$line" >&2)";
  const CliRun run = bench_with(fake_python(kHello, shape, R"(echo '{"ms": 5}')"));
  ASSERT_EQ(run.exit_code, 0) << run.err;
  std::vector<Json> requests;
  std::istringstream err(run.err);
  for (std::string line; std::getline(err, line);) {
    if (line.starts_with("{")) requests.push_back(Json::parse(line));
  }
  ASSERT_EQ(requests.size(), 2u) << run.err;
  const Json first = json_lines(run.out).at(0), &request = requests[1];
  EXPECT_EQ(first.at("peers").at("q").at("error"), 40 * 2 * 16 * 4);
  EXPECT_EQ(first.at("peers").at("k").at("error"), 40 * 2 * 16 * 4);
  EXPECT_EQ(requests[0].at("lens_q"), Json({40}));
  EXPECT_EQ(requests[0].at("num_heads_kv"), 2);
  EXPECT_EQ(request.at("backward"), false);
  EXPECT_EQ(request.at("causal"), true);
  EXPECT_EQ(request.at("head_dim"), 32);
  EXPECT_EQ(request.at("lens_q").size(), 3u);
  EXPECT_FALSE(std::filesystem::exists(request.at("folder").get<std::string>()));
}

TEST(BenchPeers, ThatCrashAreNamedAndLeftOut) {
  const CliRun run = bench_with(fake_python(kHello, kShape, "exit 3"));
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.err.find("peer torch_sdpa_f32 is left out: "), std::string::npos) << run.err;
  EXPECT_NE(run.err.find("has ended (exit code 3)"), std::string::npos) << run.err;
  for (const Json& line : json_lines(run.out)) {
    EXPECT_EQ(line.at("ratio").size(), 1u) << line;  // the oracle, or memcpy
    EXPECT_GT(line.at("median_ms").get<double>(), 0);
  }
  const CliRun killed = bench_with(fake_python(kHello, "kill -9 $$", ""));
  EXPECT_EQ(killed.exit_code, 0) << killed.err;
  EXPECT_NE(killed.err.find("peer all is left out: "), std::string::npos) << killed.err;
  EXPECT_NE(killed.err.find("has ended (signal 9)"), std::string::npos) << killed.err;
}

TEST(BenchPeers, ThatFailAreNamedAndLeftOut) {
  const std::string sample = R"(case "$line" in *torch*) echo '{"failed": "too large"}';; *) echo '{"ms": 5}';; esac)";
  const CliRun run = bench_with(fake_python(kHello, kShape, sample), "--threads=1");
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.err.find("peer torch_sdpa_f32 is left out: too large"), std::string::npos) << run.err;
  EXPECT_EQ(run.out.find("torch_sdpa"), std::string::npos) << run.out;
  EXPECT_NE(run.out.find(" other"), std::string::npos) << run.out;
  EXPECT_NE(run.out.find("peers: t 1\n"), std::string::npos) << run.out;
}

TEST(BenchPeers, WithoutAPythonAreBadUsage) {
  const auto with = [](const std::string& python) { return std::vector<std::string>{"bench", "--peers", python}; };
  expect_usage_error(with("/no/such/python"),
                     "--peers must be a Python that runs, or none: /no/such/python: No such file");
  expect_usage_error(with(fake_python("exit 4", "", "")), "has ended (exit code 4)");
  expect_usage_error(with(fake_python("echo nonsense", "", "")), "answers what is no JSON object");
  expect_usage_error(with(fake_python("echo '{}'", "", "")), "answers without peers");
}

// ---- targets ----------------------------------------------------------------------------------------------------

TEST(BenchAcceptance, PutsResultsBesideTargets) {
  if (std::system("python3 -c pass") != 0) GTEST_SKIP() << "no python3";
  const Json shape = {{"batch", 2},        {"seqlen_q", 8},  {"seqlen_k", 8},  {"num_heads_q", 4},
                      {"num_heads_kv", 4}, {"head_dim", 64}, {"causal", false}};
  const Json result = {
      {"op", "attention_bwd"}, {"backend", "sm90"}, {"mode", "dq_f16"}, {"shape", shape},
      {"median_ms", 1},        {"tflops", 300},     {"gbps", 1},        {"ratio", {{"a", 1.5}, {"b", 2.5}}},
      {"best_peer", "a"}};
  std::ofstream(scratch("results.jsonl")) << R"({"machine": {"gpu": "x"}})" << '\n' << result << '\n';
  const std::string target = R"({"op": "attention_bwd", "shape": {"seqlen_q": 8, "head_dim": 64)";
  std::ofstream(scratch("targets.jsonl"))
      << target << R"(}, "mode": "dq_f16", "metric": "tflops", "least": 250, "earlier": {"c": 200}})" << '\n'
      << target << R"(}, "mode": ["dq_f16", "dq_f32"], "metric": "ratio", "least": 2})" << '\n'
      << target << R"(}, "mode": "dq_f16", "metric": "ratio", "peer": "b", "least": 2})" << '\n'
      << target << R"(, "causal": true}, "mode": "dq_f16", "metric": "tflops", "least": 1})" << '\n'
      << target << R"(, "num_heads_kv": 2}, "mode": "dq_f16", "metric": "tflops", "least": 1})" << '\n';
  const std::string out = scratch("acceptance.txt"), script = MXFLASH_SOURCE_DIR "/bench/acceptance.py";
  ASSERT_EQ(std::system(("python3 " + script + " " + scratch("results.jsonl") + " --targets " +
                         scratch("targets.jsonl") + " > " + out)
                            .c_str()),
            0);
  const std::string text = file_text(out);
  for (const char* part : {"1.20 ok", "(1.50 x c measured earlier, 200)", "0.75 miss a", "1.25 ok   b",
                           "2 of 3 met; for 2 targets the results have no line"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
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
  EXPECT_EQ(info.at("cuda").is_object(), backend_info(Operation::quantize, 0).available.ok());
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
  EXPECT_EQ(info.at("forced_backend_exists"), false);
  EXPECT_NE(table.out.find("MXFLASH_BACKEND=abacus is no backend"), std::string::npos) << table.out;
}

TEST(InfoCommand, SaysWhatIsWrongWithTheEnvironment) {
  const auto table_with = [](const char* variable) {
    const char* before = std::getenv(variable);
    const std::string value = before ? before : "";
    setenv(variable, "mmx", 1);
    const CliRun run = run_cli({"info"});
    before ? setenv(variable, value.c_str(), 1) : unsetenv(variable);
    return run.out;
  };
  const std::string isa = table_with("MXFLASH_CPU_ISA"), math = table_with("MXFLASH_CPU_MATH");
  EXPECT_NE(isa.find("isa     none: cpu: MXFLASH_CPU_ISA must be"), std::string::npos) << isa;
  EXPECT_NE(math.find("math    none: cpu: MXFLASH_CPU_MATH must be"), std::string::npos) << math;
}

}  // namespace
}  // namespace mxflash::tools
