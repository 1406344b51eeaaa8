// Backend `cpu`: what mode `fast` costs against mode `exact`, as SQNR against exact attention on the original operands,
// over all rows and tensors, forward and backward. The rule that makes `fast` the default: at most kFastLossDb on any
// tensor of any case (docs/cpu.md).
//
// With MXFLASH_CPU_MODES_TABLE=FILE the long list runs too, on the ISA in use, and FILE becomes a Markdown table. A
// folder MXFLASH_DATA may hold more operands, as safetensors files with q, k, v and dout.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "cpu_isas.h"
#include "kit/compare.h"
#include "kit/mx_attention.h"
#include "kit/random.h"
#include "kit/runner.h"
#include "kit/safetensors.h"
#include "kit/text.h"
#include "kit/verify.h"
#include "mx/float16.h"

namespace mxflash::kit {
namespace {

// ---- operands ---------------------------------------------------------------------------------------------------

using Change = std::function<void(const AttentionCase&, Operands&)>;

std::span<float> token(std::vector<float>& x, int64_t index, int64_t width) {
  return std::span(x).subspan(size_t(index * width), size_t(width));
}

void scale(std::span<float> x, float factor) {
  for (float& value : x) value *= factor;
}

void scale_channel(std::vector<float>& x, int64_t dim, int64_t channel, float factor) {
  for (size_t i = size_t(channel); i < x.size(); i += size_t(dim)) x[i] *= factor;
}

// An attention sink among outliers: two channels of k times 20 (and of q times 0.3), one of v times 10, and a key that
// a quarter of the channels of every q lean to, by 1 on average, with a v near zero. Its logit is higher by strength *
// sqrt(head_dim) / 4 on average; it scatters by a fifth, so that some rows escape.
struct Sink {
  float strength = 0, v_scale = 0.01f;
  int64_t at = 0;
  bool outliers = true;
  void operator()(const AttentionCase& c, Operands& x) const {
    const int64_t d = c.head_dim, dv = c.head_dim_v;
    scale(x.q, 1.5f);
    for (const int64_t channel : {5, 37}) {
      scale_channel(x.q, d, channel, outliers ? 0.3f : 1);
      scale_channel(x.k, d, channel, outliers ? 20 : 1);
    }
    scale_channel(x.v, dv, 7, outliers ? 10 : 1);
    add_to_channels(x.q, d, d / 2, 3 * d / 4, 1);
    add_to_channels(token(x.k, at, c.num_heads_kv * d), d, d / 2, 3 * d / 4, strength);
    scale(token(x.v, at, c.num_heads_kv * dv), v_scale);
  }
};

// A sink that no row escapes: its logit is the same in all of them. Strengths of 3, 4, 5 leave 25 %, 2 %, 0.1 % of the
// weight to the other 1023 keys.
struct DominantSink {
  float strength = 0, v_scale = 0.01f;
  void operator()(const AttentionCase& c, Operands& x) const {
    const int64_t d = c.head_dim;
    set_channels(x.q, d, d / 2, 3 * d / 4, 1);
    set_channels(x.k, d, d / 2, 3 * d / 4, 0);
    set_channels(token(x.k, 0, c.num_heads_kv * d), d, d / 2, 3 * d / 4, strength);
    scale(token(x.v, 0, c.num_heads_kv * c.head_dim_v), v_scale);
  }
};

// Channel 3 of k is large, by a factor that q makes up for, or by a mean, which softmax does not see.
struct OutlierK {
  float factor = 1, mean = 0;
  void operator()(const AttentionCase& c, Operands& x) const {
    scale_channel(x.k, c.head_dim, 3, factor);
    scale_channel(x.q, c.head_dim, 3, 1 / factor);
    for (size_t i = 3; i < x.k.size(); i += size_t(c.head_dim)) x.k[i] += mean;
  }
};

// ---- cases ------------------------------------------------------------------------------------------------------

enum class Run {
  quick,   // in every test run
  long_,   // with the table
  beyond,  // with the table, and exempt: why is in docs/cpu.md
};

struct ModeCase {
  std::string name;
  AttentionCase problem;
  Run run = Run::quick;
  Change change{};  // of the operands of `problem`
  Dtype grad_element = Dtype::e4m3;
  MxBlock block = MxBlock::square32;
  bool default_recipe = false;  // through the operator, which smooths and rotates
};

AttentionCase shape(int32_t rows, int32_t keys, int32_t dim, bool causal = false, int32_t heads = 1,
                    int32_t heads_kv = 1) {
  return {.name = "",
          .lens_q = {rows},
          .lens_k = {keys},
          .num_heads_q = heads,
          .num_heads_kv = heads_kv,
          .head_dim = dim,
          .head_dim_v = dim,
          .mask = {.causal = causal}};
}

std::string with_dim(const std::string& name, int32_t dim) { return name + " d" + std::to_string(dim); }

void add_plain_cases(std::vector<ModeCase>& cases) {
  for (const int32_t dim : {64, 128}) {
    cases.push_back({with_dim("normal", dim), shape(512, 512, dim)});
    cases.push_back({with_dim("normal, causal", dim), shape(512, 512, dim, true)});
    cases.push_back({with_dim("normal, causal, 8 heads on 2", dim), shape(256, 256, dim, true, 8, 2),
                     dim == 64 ? Run::quick : Run::long_});
    for (int32_t n = 1; n < kNumDistributions; ++n) {
      const auto distribution = Distribution(n);
      AttentionCase problem = shape(512, 512, dim, distribution == Distribution::attention_sink);
      problem.distribution = distribution;
      cases.push_back({with_dim(distribution_name(distribution), dim), problem});
    }
  }
  AttentionCase wide = shape(512, 512, 128);
  wide.distribution = Distribution::wide_row_gradients;
  cases.push_back({.name = "wide_row_gradients, e5m2", .problem = wide, .grad_element = Dtype::e5m2});
  cases.push_back({.name = "wide_row_gradients, row32", .problem = wide, .block = MxBlock::row32});
  cases.push_back(
      {.name = "normal, row32", .problem = shape(512, 512, 128), .run = Run::long_, .block = MxBlock::row32});
}

void add_sinks(std::vector<ModeCase>& cases) {
  const auto quick_if = [](bool quick) { return quick ? Run::quick : Run::long_; };
  for (const float strength : {1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f}) {
    const std::string name = text("sink %g", double(strength));
    for (const float v : {0.0f, 0.001f, 0.01f, 0.1f, 0.3f}) {
      cases.push_back({name + text(", v x %g", double(v)), shape(256, 1024, 128), quick_if(strength == 5 && v == 0.01f),
                       Sink{.strength = strength, .v_scale = v}});
    }
    cases.push_back(
        {name + ", key 517", shape(256, 1024, 128), quick_if(strength == 3.5f), Sink{.strength = strength, .at = 517}});
    cases.push_back(
        {name + ", causal", shape(1024, 1024, 128, true), quick_if(strength == 7), Sink{.strength = strength}});
    cases.push_back({name + ", no outliers", shape(256, 1024, 64), quick_if(strength == 10),
                     Sink{.strength = strength, .outliers = false}});
  }
  for (const float strength : {2.0f, 3.0f, 3.5f, 4.0f, 5.0f, 6.0f}) {
    for (const float v : {0.001f, 0.01f, 0.03f, 0.1f, 0.3f, 1.0f}) {
      const Run run = strength == 6                                                 ? Run::beyond
                      : (strength == 3 || strength == 5) && v != 0.03f && v != 0.3f ? Run::quick
                                                                                    : Run::long_;
      cases.push_back({text("sink %g in all rows, v x %g", double(strength), double(v)), shape(256, 1024, 128), run,
                       DominantSink{strength, v}});
    }
  }
}

void add_outliers(std::vector<ModeCase>& cases) {
  for (const float factor : {6.0f, 20.0f, 60.0f, 200.0f}) {
    const std::string name = text("channel of k x %g", double(factor));
    const Run run = factor == 200 ? Run::beyond : factor == 20 ? Run::quick : Run::long_;
    cases.push_back({name, shape(512, 512, 128), run, OutlierK{.factor = factor}});
  }
  for (const float mean : {10.0f, 30.0f, 100.0f, 300.0f, 1000.0f}) {
    const std::string name = text("channel of k + %g", double(mean));
    const Run run = mean == 1000 ? Run::beyond : mean == 100 ? Run::quick : Run::long_;
    cases.push_back({name, shape(512, 512, 128), run, OutlierK{.mean = mean}});
  }
  cases.push_back({.name = "channel of k x 200, default recipe",
                   .problem = shape(512, 512, 128),
                   .change = OutlierK{.factor = 200},
                   .default_recipe = true});
  cases.push_back({.name = "channel of k + 1000, default recipe",
                   .problem = shape(512, 512, 128),
                   .change = OutlierK{.mean = 1000},
                   .default_recipe = true});
}

void add_long_contexts(std::vector<ModeCase>& cases) {
  AttentionCase constant = shape(64, 32768, 128);
  constant.distribution = Distribution::constant;
  cases.push_back({"32768 keys, 1 row", shape(1, 32768, 128), Run::long_});
  cases.push_back({"32768 keys, 128 rows", shape(128, 32768, 128), Run::long_});
  cases.push_back({"32768 keys, 2048 rows d64, causal", shape(2048, 32768, 64, true), Run::long_});
  cases.push_back({"32768 keys, 64 rows, causal, 4 heads on 1", shape(64, 32768, 128, true, 4, 1), Run::long_});
  cases.push_back({"32768 keys, constant", constant, Run::long_});
  cases.push_back({"32768 keys, sink 5", shape(128, 32768, 128), Run::long_, Sink{.strength = 5}});
  cases.push_back({"32768 keys, sink 7, causal", shape(128, 32768, 128, true), Run::long_, Sink{.strength = 7}});
  cases.push_back({"32768 keys, sink 5 in all rows", shape(128, 32768, 128), Run::long_, DominantSink{.strength = 5}});
  cases.push_back({"4096 x 4096 d64, causal", shape(4096, 4096, 64, true), Run::long_});
}

std::vector<float> as_floats(const HostTensor& t) {
  std::vector<float> x(size_t(t.numel()));
  for (size_t i = 0; i < x.size(); ++i) {
    if (t.dtype == FileDtype::f32) std::memcpy(&x[i], t.bytes.data() + 4 * i, 4);
    uint16_t half = 0;
    if (t.dtype == FileDtype::bf16) x[i] = (std::memcpy(&half, t.bytes.data() + 2 * i, 2), decode_bf16(half));
  }
  return x;
}

// Operands of a model, causal: in the plain recipe, and in the operator's default.
void add_file(const std::filesystem::path& path, Run run, std::vector<ModeCase>& cases) {
  const SafetensorsFile file(path.string());
  const auto &q = file.entry("q").shape, &v = file.entry("v").shape;
  AttentionCase problem = shape(int32_t(q[0]), int32_t(v[0]), int32_t(q[2]), true, int32_t(q[1]), int32_t(v[1]));
  problem.head_dim_v = int32_t(v[2]);
  const Change read = [path](const AttentionCase&, Operands& x) {
    const SafetensorsFile again(path.string());
    x = {as_floats(again.read("q")),
         as_floats(again.read("k")),
         as_floats(again.read("v")),
         as_floats(again.read("dout")),
         {}};
  };
  cases.push_back({path.stem().string(), problem, run, read});
  cases.push_back(cases.back());
  cases.back().name += ", default recipe";
  cases.back().default_recipe = true;
}

void add_files(const std::string& folder, Run run, std::vector<ModeCase>& cases) {
  if (!std::filesystem::is_directory(folder)) return;
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  std::ranges::sort(files);
  for (const auto& file : files) add_file(file, run, cases);
}

std::string data_folder() {
  const char* folder = std::getenv("MXFLASH_DATA");
  return folder ? folder : "";
}

std::vector<ModeCase> mode_cases() {
  std::vector<ModeCase> cases;
  add_plain_cases(cases);
  add_sinks(cases);
  add_outliers(cases);
  add_long_contexts(cases);
  add_files(MXFLASH_SOURCE_DIR "/examples/data", Run::quick, cases);
  add_files(data_folder(), Run::long_, cases);
  return cases;
}

// ---- measurement ------------------------------------------------------------------------------------------------

struct TensorModes {
  const char* name;
  double exact_db, fast_db;
  double loss_db() const { return exact_db - fast_db; }
};

// What AttentionResult and FloatResult have in common.
struct Tensors {
  std::vector<float> out, dq, dk, dv;
};
template <class Result>
Tensors tensors_of(Result r) {
  return {std::move(r.out), std::move(r.dq), std::move(r.dk), std::move(r.dv)};
}

Tensors run_default_recipe(const AttentionCase& c, const Operands& x, CpuMath math) {
  const FloatProblem problem{.num_heads_q = c.num_heads_q,
                             .num_heads_kv = c.num_heads_kv,
                             .head_dim = c.head_dim,
                             .head_dim_v = c.head_dim_v,
                             .q = x.q,
                             .k = x.k,
                             .v = x.v,
                             .dout = x.dout,
                             .dlse = {},
                             .cu_seqlens_q = {},
                             .cu_seqlens_k = {},
                             .mask = c.mask};
  return tensors_of(run_operator(problem, {.backend = "cpu", .cpu_math = math}));
}

Tensors run_quantized(const ModeCase& c, const Operands& x, CpuMath math) {
  MxAttention mx = quantize_case(c.problem, x, c.grad_element, c.block);
  mx.cpu_math = math;
  return tensors_of(run_attention(mx, "cpu", "cpu"));
}

std::vector<TensorModes> measure(const ModeCase& c) {
  constexpr double kNoSignal = 1e-10;  // rms of a tensor that is exactly zero but for roundoff
  Operands x = make_operands(c.problem);
  if (c.change) c.change(c.problem, x);
  const OracleResult want = oracle_attention(make_problem(c.problem, x));
  const auto run = [&](CpuMath math) {
    return c.default_recipe ? run_default_recipe(c.problem, x, math) : run_quantized(c, x, math);
  };
  const Tensors exact = run(CpuMath::exact), fast = run(CpuMath::fast);
  std::vector<TensorModes> tensors;
  const auto add = [&](const char* name, const std::vector<double>& truth, const std::vector<float> Tensors::*member) {
    const Metrics a = compare(truth, exact.*member), b = compare(truth, fast.*member);
    if (std::sqrt(a.signal_energy / double(std::max<size_t>(1, truth.size()))) <= kNoSignal) return;
    tensors.push_back({name, a.sqnr_db, b.sqnr_db});
  };
  add("out", want.out, &Tensors::out);
  add("dq", want.dq, &Tensors::dq);
  add("dk", want.dk, &Tensors::dk);
  add("dv", want.dv, &Tensors::dv);
  return tensors;
}

void judge_case(const ModeCase& c, const std::vector<TensorModes>& tensors) {
  for (const TensorModes& t : tensors) {
    EXPECT_LE(t.loss_db(), kFastLossDb) << c.name << ", " << t.name << ": exact " << t.exact_db << " dB, fast "
                                        << t.fast_db << " dB";
  }
}

class CpuModes : public EveryIsa {};

TEST_P(CpuModes, FastLosesAtMostATwentiethOfADecibel) {
  if (GetParam() == CpuIsa::portable) GTEST_SKIP() << "the arithmetic of avx2, at a hundredth of its speed";
  for (const ModeCase& c : mode_cases()) {
    if (c.run == Run::quick) judge_case(c, measure(c));
  }
}

// Mode exact against float64 on the dequantized operands, rms error over rms. Where dS is a small difference of large
// numbers, as with a sink, the roundoff of those is a larger part of it; check_test bounds it there.
TEST_P(CpuModes, ExactIsRoundoffAway) {
  for (const ModeCase& c : mode_cases()) {
    const bool well_conditioned = c.name.rfind("normal", 0) == 0 || c.name.rfind("gpt", 0) == 0;
    if (c.run != Run::quick || c.default_recipe || !well_conditioned) continue;
    Operands x = make_operands(c.problem);
    if (c.change) c.change(c.problem, x);
    const OracleResult want = oracle_attention(dequantized_problem(c.problem, quantize_case(c.problem, x)));
    const Tensors exact = run_quantized(c, x, CpuMath::exact);
    const auto judge_tensor = [&](const char* name, const std::vector<double>& truth, const std::vector<float>& got) {
      const Metrics m = compare(truth, got);
      EXPECT_LE(std::sqrt(m.error_energy / m.signal_energy), 4e-6) << c.name << ", " << name;
    };
    judge_tensor("out", want.out, exact.out);
    judge_tensor("dq", want.dq, exact.dq);
    judge_tensor("dk", want.dk, exact.dk);
    judge_tensor("dv", want.dv, exact.dv);
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, CpuModes, testing::ValuesIn(available_isas()), isa_of_test);

// SQNR of mode exact, and what mode fast adds to it, on the ISA in use.
TEST(CpuModesTable, LongList) {
  const char* path = std::getenv("MXFLASH_CPU_MODES_TABLE");
  if (!path) GTEST_SKIP() << "takes a minute; set MXFLASH_CPU_MODES_TABLE=FILE";
  std::ofstream table(path);
  table << "| operands | out | dq | dk | dv |\n|---|---|---|---|---|\n";
  for (const ModeCase& c : mode_cases()) {
    const std::vector<TensorModes> tensors = measure(c);
    if (c.run != Run::beyond) judge_case(c, tensors);
    table << "| " << c.name << (c.run == Run::beyond ? " (beyond)" : "");
    for (const TensorModes& t : tensors) table << text(" | %.2f (%+.3f)", t.exact_db, -t.loss_db());
    table << " |" << std::endl;
  }
}

}  // namespace
}  // namespace mxflash::kit
