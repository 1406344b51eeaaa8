#include "tools/attention_error.h"

#include <algorithm>
#include <chrono>

#include "tools/number_text.h"

namespace mxflash::tools {
namespace {

std::vector<int64_t> offsets(const std::vector<int32_t>& cu_seqlens, int64_t total) {
  if (cu_seqlens.empty()) return {0, total};
  return {cu_seqlens.begin(), cu_seqlens.end()};
}

std::vector<double> as_doubles(std::span<const float> x) { return {x.begin(), x.end()}; }

bool worse(const kit::Metrics& a, const kit::Metrics& b) { return a.sqnr_db < b.sqnr_db; }

// What this library's `ref` reaches on q, k, v, dout ~ N(0, 1), 512 tokens, head_dim 128, no mask, plain recipe: the
// error of the format alone, with nothing in the data to make it worse. Within 0.4 dB from 256 to 2048 tokens; a causal
// mask adds up to 1.4 dB to out and 1 dB to dv.
struct Typical {
  const char* tensor;
  double sqnr_db;
};
constexpr Typical kTypical[] = {{"out", 25.6}, {"dq", 23.6}, {"dk", 23.6}, {"dv", 25.5}};
constexpr double kTypicalScatterDb = 0.5;

void append(std::string& list, const std::string& item) {
  if (!list.empty()) list += ", ";
  list += item;
}

}  // namespace

ExactAttention exact_attention(const kit::FloatProblem& p, int num_threads) {
  const kit::OracleProblem exact{.num_heads_q = p.num_heads_q,
                                 .num_heads_kv = p.num_heads_kv,
                                 .head_dim = p.head_dim,
                                 .head_dim_v = p.head_dim_v,
                                 .cu_seqlens_q = offsets(p.cu_seqlens_q, p.total_q()),
                                 .cu_seqlens_k = offsets(p.cu_seqlens_k, p.total_k()),
                                 .causal = p.mask.causal,
                                 .window_left = p.mask.window_left,
                                 .window_right = p.mask.window_right,
                                 .softmax_scale = double(p.softmax_scale),
                                 .shared_q = p.shared_q,
                                 .q = as_doubles(p.q),
                                 .k = as_doubles(p.k),
                                 .v = as_doubles(p.v),
                                 .dout = as_doubles(p.dout),
                                 .num_threads = num_threads};
  const auto start = std::chrono::steady_clock::now();
  ExactAttention r{.result = kit::oracle_attention(exact)};
  r.ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  return r;
}

size_t TensorError::worst_head() const {
  return size_t(std::min_element(heads.begin(), heads.end(), worse) - heads.begin());
}
size_t TensorError::best_head() const {
  return size_t(std::max_element(heads.begin(), heads.end(), worse) - heads.begin());
}

std::vector<TensorError> compare_all(const kit::FloatProblem& p, const kit::OracleResult& exact,
                                     const kit::FloatResult& got) {
  std::vector<TensorError> errors;
  const auto add = [&](const char* name, const std::vector<double>& want, const std::vector<float>& have,
                       int64_t tokens, int64_t heads, int64_t dim) {
    errors.push_back({.name = name,
                      .all = kit::compare(want, have),
                      .heads = kit::compare_per_head(want, have, tokens, heads, dim)});
  };
  add("out", exact.out, got.out, p.total_out(), p.num_heads_q, p.head_dim_v);
  add("lse", exact.lse, got.lse, 1, p.num_heads_q, p.total_out());  // head-major: one "token" of rows
  if (p.dout.empty() || got.dq.size() != exact.dq.size()) return errors;
  add("dq", exact.dq, got.dq, p.total_q(), p.num_heads_q, p.head_dim);
  add("dk", exact.dk, got.dk, p.total_k(), p.num_heads_kv, p.head_dim);
  add("dv", exact.dv, got.dv, p.total_k(), p.num_heads_kv, p.head_dim_v);
  return errors;
}

const TensorError* find_error(const std::vector<TensorError>& errors, const std::string& name) {
  for (const TensorError& e : errors)
    if (e.name == name) return &e;
  return nullptr;
}

std::optional<double> typical_sqnr_db(const std::string& tensor) {
  for (const Typical& t : kTypical)
    if (t.tensor == tensor) return t.sqnr_db;
  return std::nullopt;
}

std::string verdict(const std::vector<TensorError>& errors, const OperatorStats& stats) {
  std::string operands;
  const auto see = [&](const char* name, const QuantizeStats& s) {
    if (s.nonfinite > 0) append(operands, grouped(s.nonfinite) + " in " + name);
  };
  see("q", stats.q);
  see("k", stats.k);
  see("v", stats.v);
  see("dout", stats.dout);
  if (!operands.empty()) operands = "NaN or Inf in the operands: " + operands + ". ";

  std::string relative, nonfinite, below;
  bool backward = false;
  for (const Typical& typical : kTypical) {
    const TensorError* e = find_error(errors, typical.tensor);
    if (!e) continue;
    backward |= e->name != "out";
    if (e->all.nonfinite_mismatch > 0) {
      append(nonfinite, e->name);
    } else if (e->all.sqnr_db <= -kit::kMaxDb) {
      append(relative, e->name + " undefined (it is exactly zero)");
    } else {
      append(relative, e->name + " " + percent(relative_error(e->all.sqnr_db)));
      const double shortfall = typical.sqnr_db - e->all.sqnr_db;
      if (shortfall > kTypicalScatterDb) append(below, e->name + " by " + fixed(shortfall, 1) + " dB");
    }
  }
  if (!nonfinite.empty()) {
    return operands + nonfinite + (nonfinite.find(',') == nonfinite.npos ? " has" : " have") +
           " NaN or Inf where exact attention does not: " +
           (operands.empty() ? "all operands are finite, so scores or sums went beyond their range (largest |q| " +
                                   significant(stats.q.amax, 3) + ", |k| " + significant(stats.k.amax, 3) + ", |v| " +
                                   significant(stats.v.amax, 3) + ")."
                             : std::string("in MXFP8 ") + kNonfiniteReach + ".");
  }
  if (!operands.empty()) operands += "Results that are NaN in exact attention too are left out. ";
  const std::string measure = operands + "RMS error relative to exact attention: " + relative + ". ";
  if (!below.empty()) {
    return measure + "Below what MXFP8 reaches on normal random operands: " + below + ".";
  }
  return measure + (backward ? "No worse than MXFP8 on normal random operands, forward and backward."
                             : "No worse than MXFP8 on normal random operands.");
}

}  // namespace mxflash::tools
