// The forward kernel of Blackwell in host simulation (docs/blackwell.md): equal to the recipe within a bound for every
// element, in three execution modes; and each of its planted faults is noticed.
#include <gtest/gtest.h>

#include <cstdlib>
#include <span>
#include <utility>

#include "attention/attention_combine.cuh"
#include "attention/attention_fwd_sm100_call.h"
#include "attention/attention_fwd_sm100_kernel.cuh"
#include "attention_fwd_sm100_problem.h"
#include "host_plan.h"
#include "kit/mx_attention.h"
#include "kit/runner.h"
#include "simulator/simulator.h"

namespace mxflash::sm100_test {
namespace {

using namespace fwd_sm100;
using simulator::Mode;

constexpr Mode kModes[] = {Mode::eager, Mode::deferred, Mode::reordered};

struct Run {
  Mode mode = Mode::eager;
  uint64_t seed = 1;
  int fault = 0;
  int grid = 2;
};

// "" or what went wrong: in the simulator, or in the results. Results go to partials, if there are any; `as`: what the
// kernel got.
std::string simulate(ForwardProblem& problem, const Run& run, const Partials& partials = {}, Params* as = nullptr) {
  const AttentionFwd& a = problem.args;
  if (const Status status = check_call("attention_fwd", a); !status.ok()) return status.message;
  return with_config(a, [&]<class C>(C) -> std::string {
    Arena count(nullptr);
    AttentionPlan::of(count, a.seq_q, a.seq_k);
    const kit::AlignedBuffer memory(count.used());
    Arena arena(memory.data());
    Params params{};
    if (const Status status = params_of<C>(a, AttentionPlan::of(arena, a.seq_q, a.seq_k), partials, params);
        !status.ok()) {
      return status.message;
    }
    write_plan_on_host(params.items, C::kBlockM);
    if (as) *as = params;
    return simulator::run({.grid = uint32_t(run.grid),
                           .threads = C::kThreads,
                           .shared_bytes = C::kBytes,
                           .mode = run.mode,
                           .seed = run.seed,
                           .fault = run.fault},
                          [&] { attention_fwd<C>(params); });
  });
}

std::string simulate_and_judge(const ForwardCase& c, const Run& run) {
  ForwardProblem problem(c, run.seed);
  if (const std::string error = simulate(problem, run); !error.empty()) return std::string(c.shape.name) + ": " + error;
  Judge judge;
  std::string error = judge.check(problem);
  if (std::getenv("MXFLASH_VERBOSE")) {
    std::printf("  %-28s error / bound %.3f, %d of %d rows loose\n", c.shape.name, judge.worst, int(judge.loose),
                int(judge.rows));
  }
  return error;
}

class AttentionFwdSm100 : public testing::TestWithParam<Mode> {};

std::string name_of(const testing::TestParamInfo<Mode>& info) {
  return info.param == Mode::eager ? "eager" : info.param == Mode::deferred ? "deferred" : "reordered";
}

TEST_P(AttentionFwdSm100, IsTheRecipe) {
  for (uint64_t seed = 1; seed <= simulator::seeds(1); ++seed) {
    uint64_t offset = 0;
    for (const ForwardCase& c : forward_cases()) {
      EXPECT_EQ(simulate_and_judge(c, {.mode = GetParam(), .seed = 100 * seed + offset++}), "");
    }
    for (const ForwardCase& c : wide_cases()) {
      EXPECT_EQ(simulate_and_judge(c, {.mode = GetParam(), .seed = 100 * seed + offset++}), "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, AttentionFwdSm100, testing::ValuesIn(kModes), name_of);

// Results are the same bits in every mode, for every seed and number of CTAs.
TEST(AttentionFwdSm100Bits, DoNotDependOnTheSchedule) {
  for (const auto& [dim, dim_v] : {std::pair(128, 128), {192, 128}, {256, 256}}) {
    const ForwardCase c{.shape = {.name = "bits",
                                  .lens_q = {200, 300},
                                  .lens_k = {300, 200},
                                  .num_heads_q = 2,
                                  .num_heads_kv = 1,
                                  .head_dim = dim,
                                  .head_dim_v = dim_v,
                                  .mask = {.causal = true}}};
    ForwardProblem first(c);
    ASSERT_EQ(simulate(first, {}), "");
    for (uint64_t seed = 2; seed < 2 + simulator::seeds(2); ++seed) {
      for (const Mode mode : kModes) {
        ForwardProblem again(c);
        ASSERT_EQ(simulate(again, {.mode = mode, .seed = seed, .grid = int(seed % 3) + 1}), "");
        EXPECT_TRUE(again.out == first.out && again.lse == first.lse && again.row_exponent == first.row_exponent);
      }
    }
  }
}

// Softmax weights add up to one, as they are rounded.
TEST(AttentionFwdSm100Bits, ValuesOfOneGiveOne) {
  for (const auto& [dim, dim_v] : {std::pair(128, 128), {192, 128}, {256, 256}}) {
    ForwardProblem problem({.shape = {.name = "ones",
                                      .lens_q = {200},
                                      .lens_k = {333},
                                      .head_dim = dim,
                                      .head_dim_v = dim_v,
                                      .mask = {.window_left = 150, .window_right = 100}}});
    auto& v = problem.operands[2];
    std::fill(v.payload.begin(), v.payload.end(), uint8_t{0x38});
    std::fill(v.scale.begin(), v.scale.end(), uint8_t{127});
    ASSERT_EQ(simulate(problem, {}), "");
    const auto* out = reinterpret_cast<const float*>(problem.out.data());
    for (int64_t i = 0; i < 200 * dim_v; ++i) ASSERT_NEAR(out[i], 1.0f, 0x1p-22f) << dim << " " << i;
  }
}

// out_mx and out by the second kernel: the recipe's values, and the bytes that the quantizer gives for them.
TEST(AttentionFwdSm100OutMx, IsOutQuantized) {
  for (const auto& [dim, dim_v] : {std::pair(112, 112), {192, 128}, {64, 144}, {256, 240}}) {
    SCOPED_TRACE(dim_v);
    ForwardProblem problem({.shape = {.name = "out_mx",
                                      .lens_q = {130, 0, 33},
                                      .lens_k = {140, 5, 0},
                                      .head_dim = dim,
                                      .head_dim_v = dim_v,
                                      .mask = {.causal = true}},
                            .v_mean = true});
    AttentionFwd& a = problem.args;
    kit::OwnedMx mx = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, 163, 1, dim_v, a.seq_q);
    a.out_mx = mx.view;
    Arena count(nullptr);
    partials_of(count, a);
    std::vector<uint8_t> memory(count.used() + kWorkspaceAlign, 0xFF);
    const uintptr_t aligned = (reinterpret_cast<uintptr_t>(memory.data()) / kWorkspaceAlign + 1) * kWorkspaceAlign;
    Arena arena(reinterpret_cast<void*>(aligned));
    const Partials partials = partials_of(arena, a);
    Params params;
    ASSERT_EQ(simulate(problem, {}, partials, &params), "");
    const Combine p = combine_of(a, AttentionShape::of(a), params);
    constexpr int kTokens = combine::kMxTokens;
    const auto kernel = dim_v > 128 ? combine::combine_kernel<kTokens, 256> : combine::combine_kernel<kTokens, 128>;
    ASSERT_EQ(simulator::run({.grid = 163 / kTokens + 3, .ctas_at_once = 1}, [&] { kernel(p); }), "");
    Judge judge;
    EXPECT_EQ(judge.check(problem), "");
    const kit::OwnedMx want = kit::ref_quantize(
        {reinterpret_cast<const float*>(problem.out.data()), size_t(163 * dim_v)}, 163, 1, dim_v, a.seq_q);
    EXPECT_TRUE(mx.data == want.data);
    EXPECT_TRUE(mx.scale == want.scale);
  }
}

// Rows are made once more (marked by fault 23) only where a NaN has come from a key that they do not see.
int64_t repaired_rows(const ForwardProblem& problem) {
  int64_t rows = 0;
  for (int64_t row = 0; row < kit::total_out(problem.c.shape); ++row) {
    for (int64_t head = 0; head < problem.c.shape.num_heads_q; ++head) {
      const double x = problem.out_at(row, head, 0);
      rows += x > 12000 && x < 13000;
    }
  }
  return rows;
}
TEST(AttentionFwdSm100Repair, IsForRowsThatDoNotSeeTheNaN) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    const ForwardCase c{.shape = {.name = "repair",
                                  .lens_q = {200},
                                  .lens_k = {200},
                                  .num_heads_q = 2,
                                  .num_heads_kv = 1,
                                  .mask = {.causal = true}},
                        .out_dtype = dtype};
    ForwardCase one = c;
    one.nan_value = 131;  // of its tile, rows 128 to 130 do not see it
    ForwardProblem some(one);
    ASSERT_EQ(simulate(some, {.fault = 23}), "");
    EXPECT_EQ(repaired_rows(some), 3 * 2);
    ForwardProblem all(c);
    std::fill(all.operands[2].payload.begin(), all.operands[2].payload.end(), kFp8Nan);
    ASSERT_EQ(simulate(all, {.fault = 23}), "");
    EXPECT_EQ(repaired_rows(all), 0);
    for (int64_t row = 0; row < 200; ++row) ASSERT_TRUE(std::isnan(all.out_at(row, 1, 5))) << row;
  }
}

TEST(AttentionFwdSm100Rules, AreSaid) {
  const auto message = [](auto&& change, int32_t dim = 128) {
    ForwardProblem problem({.shape = {.lens_q = {40}, .lens_k = {40}, .head_dim = dim, .head_dim_v = 64}});
    change(problem.args);
    return std::string(check_call("attention_fwd", problem.args).message);
  };
  EXPECT_EQ(message([](AttentionFwd&) {}), "");
  EXPECT_EQ(message([](AttentionFwd&) {}, 256), "");
  EXPECT_EQ(message([](AttentionFwd&) {}, 272), "attention_fwd: sm100: q.dim must be at most 256, got 272");
  EXPECT_EQ(message([](AttentionFwd&) {}, 136), "attention_fwd: sm100: q.dim must be a multiple of 16, got 136");
  EXPECT_EQ(message([](AttentionFwd&) {}, 72), "attention_fwd: sm100: q.dim must be a multiple of 16, got 72");
  EXPECT_EQ(message([](AttentionFwd& a) { a.q.block = MxBlock::col32; }),
            "attention_fwd: sm100: q.block must be square32 or row32, got 2");
  EXPECT_EQ(message([](AttentionFwd& a) { a.v.block = MxBlock::row32; }),
            "attention_fwd: sm100: v.block must be square32 or col32, got 1");
  EXPECT_EQ(message([](AttentionFwd& a) { a.softmax_scale = -1; }),
            "attention_fwd: sm100: softmax_scale must be positive, got -1");
  EXPECT_EQ(
      message([](AttentionFwd& a) { a.k.data.stride[0] = 136; }),
      "attention_fwd: sm100: k.data: strides of tokens must be positive multiples of 16 bytes below 2^40, got 136");
  EXPECT_NE(message([](AttentionFwd& a) {
              a.k.scale.data = static_cast<uint8_t*>(a.k.scale.data) + 4;
            }).find("k.scale must be aligned to 16 bytes, got address"),
            std::string::npos);
}

// Several items of three tiles and more for a CTA; tails beside NaN; items of one tile; a NaN behind the mask.
const ForwardCase kFaultCases[] = {
    {.shape = {.name = "fault_dense",
               .lens_q = {512},
               .lens_k = {640},
               .num_heads_q = 2,
               .num_heads_kv = 1,
               .head_dim = 128,
               .head_dim_v = 128}},
    {.shape = {.name = "fault_jagged_causal",
               .lens_q = {200, 31, 300},
               .lens_k = {500, 31, 350},
               .head_dim = 128,
               .head_dim_v = 128,
               .mask = {.causal = true},
               .slack_k = 70}},
    {.shape = {.name = "fault_short", .lens_q = {600}, .lens_k = {100}, .num_heads_q = 2}},
    {.shape = {.name = "fault_nan", .lens_q = {200}, .lens_k = {200}, .mask = {.causal = true}}, .nan_value = 131},
};
// The same of the kernels for larger dimensions; the second one has one side.
const ForwardCase kFaultCases192[] = {
    {.shape = {.name = "fault_d192", .lens_q = {260}, .lens_k = {300}, .head_dim = 192, .head_dim_v = 128}},
};
const ForwardCase kFaultCases256[] = {
    {.shape = {.name = "fault_d256",
               .lens_q = {31, 140},
               .lens_k = {31, 400},
               .head_dim = 256,
               .head_dim_v = 256,
               .slack_k = 70}},
    {.shape = {.name = "fault_nan_d256",
               .lens_q = {140},
               .lens_k = {140},
               .head_dim = 256,
               .head_dim_v = 256,
               .mask = {.causal = true}},
     .nan_value = 131},
};

struct Fault {
  int number;
  const char* what;
  uint64_t seeds = 12;
  std::span<const ForwardCase> cases = kFaultCases;
};
const Fault kFaults[] = {
    {1, "the scales of V are not transposed"},
    {2, "a stage of the ring is loaded before it is free"},
    {3, "a tile of V beyond its sequence holds the neighbour's bytes"},
    {4, "rows are not made once more where a NaN has got in"},
    {5, "scales without a proxy fence"},
    {6, "queries are loaded before their buffer is free"},
    {7, "S is overwritten before it is lifted"},
    {8, "one scale of K for all steps"},
    {9, "no fence after the wait for P"},
    {10, "one buffer for the scales of V"},
    {11, "the stride of V"},
    {12, "scores are used before they are in registers"},
    {13, "P is overwritten before it is read"},
    {14, "P is published before it is stored"},
    {15, "no fence before P is published"},
    {16, "a factor is overwritten before it is read"},
    {17, "an accumulator is rescaled under a product"},
    {18, "a rescaled accumulator is published before it is stored"},
    {19, "results before the last product"},
    {20, "results in shared memory without a proxy fence"},
    {21, "results are staged over those that are being stored"},
    {22, "the loader leaves with commits on their way"},
    {24, "the scales of Q are not copied for each product", 12, kFaultCases192},
    {25, "channels from 128 on have the scales of those before", 12, kFaultCases192},
    {26, "values from channel 128 on have the scales of those before", 12, kFaultCases256},
    {27, "values from channel 128 on are those before", 12, kFaultCases256},
};
// Not 6: with two stages the wait for keys says that queries are free, too. Not 10: one buffer is what it has.
constexpr int kFaultsOfOneSide[] = {1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 25};

// Which case, mode and seed notice it, and how; "" if none does.
std::string noticed_by(const Fault& fault) {
  for (uint64_t seed = 1; seed <= fault.seeds; ++seed) {
    for (const Mode mode : kModes) {
      for (const ForwardCase& c : fault.cases) {
        const std::string error = simulate_and_judge(c, {.mode = mode, .seed = seed, .fault = fault.number, .grid = 1});
        if (!error.empty()) return error;
      }
    }
  }
  return "";
}

TEST(AttentionFwdSm100Faults, AreNoticed) {
  EXPECT_EQ(noticed_by({0, "none", simulator::seeds(1)}), "");
  EXPECT_EQ(noticed_by({0, "none", simulator::seeds(1), kFaultCases192}), "");
  EXPECT_EQ(noticed_by({0, "none", simulator::seeds(1), kFaultCases256}), "");
  for (const Fault& fault : kFaults) {
    const std::string error = noticed_by(fault);
    EXPECT_NE(error, "") << "fault " << fault.number << ": " << fault.what;
    if (std::getenv("MXFLASH_VERBOSE")) std::printf("  %2d %s: %s\n", fault.number, fault.what, error.c_str());
  }
  for (const int fault : kFaultsOfOneSide) {
    EXPECT_NE(noticed_by({fault, "", 2, kFaultCases256}), "") << "fault " << fault << " of the kernel with one side";
  }
}

}  // namespace
}  // namespace mxflash::sm100_test
