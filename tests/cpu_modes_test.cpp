// Backend `cpu`: what mode `fast` costs against mode `exact`, as SQNR against exact attention on the original operands,
// over all rows and all tensors. The rule that makes `fast` the default: at most kMaxLossDb, anywhere (docs/cpu.md).
//
// With MXFLASH_CPU_MODES_TABLE=FILE every case runs, long contexts too (minutes), and FILE becomes a Markdown table.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "kit/compare.h"
#include "kit/mx_attention.h"
#include "kit/random.h"
#include "kit/runner.h"
#include "kit/safetensors.h"
#include "kit/text.h"
#include "mx/float16.h"

namespace mxflash::kit {
namespace {

constexpr double kMaxLossDb = 0.05;
constexpr double kNoSignal = 1e-10;  // rms of a tensor that is exactly zero but for roundoff

struct TensorModes {
  const char* name;
  double exact_db, fast_db;
  double loss_db() const { return exact_db - fast_db; }
};

struct ModeCase {
  std::string name;
  AttentionCase problem;
  std::function<void(const AttentionCase&, Operands&)> change{};  // of the case's own operands
  bool quick = false;
  Dtype grad_element = Dtype::e4m3;
  MxBlock block = MxBlock::square32;
};

// ---- operands ---------------------------------------------------------------------------------------------------

std::span<float> token(std::vector<float>& x, int64_t index, int64_t width) {
  return std::span(x).subspan(size_t(index * width), size_t(width));
}

void scale(std::span<float> x, float factor) {
  for (float& value : x) value *= factor;
}

// The operands that the issue names: two channels of k times 20 (and the same of q times 0.3), one of v times 10, and a
// sink: a key that a quarter of the channels of every q lean to, with a v near zero. Its logit is higher by
// strength * sqrt(head_dim) / 4.
struct Sink {
  float strength = 0, v_scale = 0.01f;
  int64_t at = 0;
  bool outliers = true;
  void operator()(const AttentionCase& c, Operands& x) const {
    const int64_t d = c.head_dim, width_k = c.num_heads_kv * d, width_v = int64_t(c.num_heads_kv) * c.head_dim_v;
    scale(x.q, 1.5f);
    for (size_t i = 0; outliers && i < x.q.size(); ++i) x.q[i] *= i % d == 5 || i % d == 37 ? 0.3f : 1;
    for (size_t i = 0; outliers && i < x.k.size(); ++i) x.k[i] *= i % d == 5 || i % d == 37 ? 20 : 1;
    for (size_t i = 0; outliers && i < x.v.size(); ++i) x.v[i] *= i % size_t(c.head_dim_v) == 7 ? 10 : 1;
    add_to_channels(x.q, d, d / 2, 3 * d / 4, 1);
    add_to_channels(token(x.k, at, width_k), d, d / 2, 3 * d / 4, strength);
    scale(token(x.v, at, width_v), v_scale);
  }
};

// Channel 3 of k is large in every token, by chance or (which softmax does not see) by a mean.
struct OutlierK {
  float factor = 1, mean = 0;
  void operator()(const AttentionCase& c, Operands& x) const {
    for (size_t i = 3; i < x.k.size(); i += size_t(c.head_dim)) x.k[i] = x.k[i] * factor + mean;
    for (size_t i = 3; i < x.q.size(); i += size_t(c.head_dim)) x.q[i] /= std::max(factor, 1.0f);
  }
};

// ---- cases ------------------------------------------------------------------------------------------------------

AttentionCase shape(int32_t rows, int32_t keys, int32_t dim, bool causal = false, int32_t heads = 1,
                    int32_t heads_kv = 1, Distribution distribution = Distribution::normal) {
  return {.name = "",
          .lens_q = {rows},
          .lens_k = {keys},
          .num_heads_q = heads,
          .num_heads_kv = heads_kv,
          .head_dim = dim,
          .head_dim_v = dim,
          .mask = {.causal = causal},
          .distribution = distribution};
}

std::vector<ModeCase> mode_cases() {
  std::vector<ModeCase> cases;
  const auto add = [&](const std::string& name, const AttentionCase& problem, bool quick,
                       std::function<void(const AttentionCase&, Operands&)> change = {}) {
    cases.push_back({.name = name, .problem = problem, .change = std::move(change), .quick = quick});
  };
  for (const int32_t dim : {64, 128}) {
    const std::string d = "_d" + std::to_string(dim);
    add("normal" + d, shape(512, 512, dim), true);
    add("normal_causal" + d, shape(512, 512, dim, true), true);
    add("normal_gqa_8_2" + d, shape(256, 256, dim, true, 8, 2), dim == 64);
  }
  for (int32_t n = 1; n < kNumDistributions; ++n) {
    const auto distribution = Distribution(n);
    for (const int32_t dim : {64, 128}) {
      const std::string name = std::string(distribution_name(distribution)) + "_d" + std::to_string(dim);
      add(name, shape(512, 512, dim, distribution == Distribution::attention_sink, 1, 1, distribution), dim == 128);
    }
  }
  for (const float factor : {6.0f, 20.0f, 60.0f, 200.0f}) {
    add(text("outlier_k_x%g", double(factor)), shape(512, 512, 128), factor == 20, OutlierK{.factor = factor});
  }
  for (const float mean : {10.0f, 30.0f, 100.0f, 300.0f, 1000.0f}) {
    add(text("mean_k_%g", double(mean)), shape(512, 512, 128), mean == 100, OutlierK{.mean = mean});
  }
  for (const float strength : {1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f}) {
    for (const float v_scale : {0.0f, 0.001f, 0.01f, 0.03f, 0.07f, 0.1f, 0.3f}) {
      const bool quick = (strength == 3.5f || strength == 7) && (v_scale == 0.01f || v_scale == 0.07f);
      add(text("sink_%g_v_%g", double(strength), double(v_scale)), shape(256, 1024, 128), quick,
          Sink{.strength = strength, .v_scale = v_scale});
    }
    add(text("sink_%g_at_517", double(strength)), shape(256, 1024, 128), strength == 5,
        Sink{.strength = strength, .at = 517});
    add(text("sink_%g_causal", double(strength)), shape(1024, 1024, 128, true), false, Sink{.strength = strength});
    add(text("sink_%g_plain", double(strength)), shape(256, 1024, 64), strength == 5,
        Sink{.strength = strength, .outliers = false});
  }
  add("long_32768", shape(128, 32768, 128), false);
  add("long_32768_d64", shape(256, 32768, 64), false);
  add("long_32768_causal_gqa", shape(64, 32768, 128, true, 4, 1), false);
  add("long_32768_sink_5", shape(128, 32768, 128), false, Sink{.strength = 5});
  add("long_32768_sink_7_causal", shape(128, 32768, 128, true), false, Sink{.strength = 7});
  add("long_32768_constant", shape(64, 32768, 128, false, 1, 1, Distribution::constant), false);
  add("long_4096_causal", shape(4096, 4096, 64, true), false);
  return cases;
}

// ---- the measurement --------------------------------------------------------------------------------------------

std::vector<TensorModes> compare_modes(const OracleResult& exact, const std::function<AttentionResult(CpuMath)>& run) {
  const AttentionResult slow = run(CpuMath::exact), fast = run(CpuMath::fast);
  std::vector<TensorModes> tensors;
  const auto add = [&](const char* name, const std::vector<double>& want,
                       const std::vector<float> AttentionResult::*member) {
    const Metrics a = compare(want, slow.*member), b = compare(want, fast.*member);
    if (std::sqrt(a.signal_energy / double(std::max<size_t>(1, want.size()))) <= kNoSignal) return;
    tensors.push_back({name, a.sqnr_db, b.sqnr_db});
  };
  add("out", exact.out, &AttentionResult::out);
  add("dq", exact.dq, &AttentionResult::dq);
  add("dk", exact.dk, &AttentionResult::dk);
  add("dv", exact.dv, &AttentionResult::dv);
  return tensors;
}

std::vector<TensorModes> measure(const ModeCase& c) {
  Operands operands = make_operands(c.problem);
  if (c.change) c.change(c.problem, operands);
  MxAttention mx = quantize_case(c.problem, operands, c.grad_element, c.block);
  return compare_modes(oracle_attention(make_problem(c.problem, operands)), [&](CpuMath math) {
    mx.cpu_math = math;
    return run_attention(mx, "cpu", "cpu");
  });
}

}  // namespace
}  // namespace mxflash::kit
#include <chrono>
int main() {
  using namespace mxflash::kit;
  const bool all = std::getenv("ALL");
  const char* only = std::getenv("ONLY");
  for (const auto& c : mode_cases()) {
    if (!all && !c.quick && !only) continue;
    if (only && c.name.find(only) == std::string::npos) continue;
    auto t = std::chrono::steady_clock::now();
    std::string line = text("%-28s", c.name.c_str());
    for (auto& m : measure(c))
      line += text(" %s %.2f %+.4f%s", m.name, m.exact_db, -m.loss_db(), m.loss_db() > kMaxLossDb ? "!!" : "  ");
    std::printf("%s  %.1fs\n", line.c_str(),
                std::chrono::duration<double>(std::chrono::steady_clock::now() - t).count());
    std::fflush(stdout);
  }
}
