#include "tools/report_data.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "mx/e8m0.h"
#include "mx/fp8.h"
#include "tools/advice.h"
#include "tools/number_text.h"

namespace mxflash::tools {
namespace {

constexpr double kUndefined = std::numeric_limits<double>::quiet_NaN();
constexpr uint8_t kZeroBlock = 0;  // scale byte

// Rewrites every element with the exponent of the largest block.
double changed_by_one_scale(const kit::OwnedMx& mx, const Jagged& seq, int exponent) {
  const Fp8Format& format = fp8_format(mx.view.data.dtype);
  const double unit = std::ldexp(1.0, exponent);
  int64_t nonzero = 0, changed = 0;
  for (const float x : kit::dequantize_to_floats(mx.view, seq)) {
    if (x == 0 || !std::isfinite(x)) continue;
    ++nonzero;
    changed += double(decode_fp8(encode_fp8(x, format, exponent), format)) * unit != double(x);
  }
  return nonzero ? double(changed) / double(nonzero) : 0;
}

OperandScales scales_of(const std::string& name, const FloatTensor& x, const Jagged& seq, const Recipe& recipe,
                        Dtype element, bool smooth, bool rotate) {
  const kit::OwnedMx mx = kit::make_owned_mx(element, recipe.block, ScaleLayout::linear, x.tokens, x.heads, x.dim, seq);
  std::vector<float> mean(smooth ? size_t(seq.batch * x.heads * x.dim) : 0);
  OperandScales s;
  s.name = name;
  Quantize args{.in = x.view(),
                .out = mx.view,
                .seq = seq,
                .rule = recipe.rule,
                .smooth = smooth,
                .rotate = rotate,
                .rotate_seed = recipe.rotate_seed,
                .stats = &s.stats};
  if (smooth) args.mean = make_tensor(mean.data(), Dtype::f32, seq.batch, x.heads, x.dim);
  kit::require_ok(quantize(args));

  for (const uint8_t byte : block_scales(mx.view, seq)) ++s.count[byte], ++s.blocks;
  s.zero_blocks = s.count[kZeroBlock];
  s.nan_blocks = s.count[kE8m0Nan];
  if (!s.any()) return s;
  int low = kZeroBlock + 1, high = kE8m0Nan - 1;
  while (s.count[size_t(low)] == 0) ++low;
  while (s.count[size_t(high)] == 0) --high;
  s.min_exponent = low - kE8m0Bias;
  s.max_exponent = high - kE8m0Bias;
  s.changed_by_one_scale = changed_by_one_scale(mx, seq, s.max_exponent);
  return s;
}

struct RowSequence {
  int64_t start, length;
};

// `rows` rows per sequence where lengths are equal.
std::vector<RowSequence> sequences(const std::vector<int32_t>& cu_seqlens, int64_t rows, int64_t batch) {
  std::vector<RowSequence> result;
  if (cu_seqlens.empty()) {
    for (int64_t b = 0; b < batch; ++b) result.push_back({b * rows, rows});
  }
  for (size_t b = 1; b < cu_seqlens.size(); ++b)
    result.push_back({cu_seqlens[b - 1], cu_seqlens[b] - cu_seqlens[b - 1]});
  return result;
}

std::vector<PositionBin> by_position(const std::vector<RowSequence>& rows, int64_t row_size,
                                     const std::vector<double>& exact, const std::vector<float>& got) {
  constexpr int64_t kMostBins = 64;
  int64_t longest = 0;
  for (const RowSequence& sequence : rows) longest = std::max(longest, sequence.length);
  const int64_t count = std::min(longest, kMostBins);
  std::vector<PositionBin> bins(static_cast<size_t>(count));
  std::vector<double> signal(bins.size()), error(bins.size());
  for (int64_t i = 0; i < longest; ++i) {
    PositionBin& bin = bins[size_t(i * count / longest)];
    if (bin.last < i || i == 0) bin.last = i;
  }
  for (size_t i = 1; i < bins.size(); ++i) bins[i].first = bins[i - 1].last + 1;
  for (const RowSequence& sequence : rows) {
    for (int64_t i = 0; i < sequence.length * row_size; ++i) {
      const auto bin = size_t(i / row_size * count / longest);
      const auto at = size_t(sequence.start * row_size + i);
      const double difference = double(got[at]) - exact[at];
      signal[bin] += exact[at] * exact[at];
      error[bin] += difference * difference;
    }
  }
  for (size_t i = 0; i < bins.size(); ++i) {
    const bool defined = signal[i] > 0 && error[i] > 0 && std::isfinite(signal[i]) && std::isfinite(error[i]);
    bins[i].sqnr_db = defined ? 10 * std::log10(signal[i] / error[i]) : kUndefined;
  }
  return bins;
}

bool defined(const kit::Metrics& m) { return std::abs(m.sqnr_db) < kit::kMaxDb; }

}  // namespace

std::vector<OperandScales> operand_scales(const ReportInput& in) {
  const Recipe& r = in.run.recipe;
  const kit::FloatProblem& p = in.problem;
  std::vector<OperandScales> result{scales_of("q", in.operands.q, p.seq_q(), r, r.element, false, r.rotate_qk),
                                    scales_of("k", in.operands.k, p.seq_k(), r, r.element, r.smooth_k, r.rotate_qk),
                                    scales_of("v", in.operands.v, p.seq_k(), r, r.element, r.smooth_v, false)};
  if (in.operands.dout) {
    const Jagged seq = p.shared_q ? Jagged{.batch = int32_t(p.batch())} : p.seq_q();
    result.push_back(scales_of("dout", *in.operands.dout, seq, r, r.grad_element, false, false));
  }
  return result;
}

std::vector<PositionBin> out_by_position(const ReportInput& in) {
  const kit::FloatProblem& p = in.problem;
  const auto rows = p.shared_q ? sequences({}, p.total_q(), p.batch()) : sequences(p.cu_seqlens_q, p.total_q(), 1);
  return by_position(rows, p.num_heads_q * p.head_dim_v, in.exact.result.out, in.got.out);
}

std::vector<PositionBin> dq_by_position(const ReportInput& in) {
  const kit::FloatProblem& p = in.problem;
  if (in.got.dq.empty()) return {};
  const auto rows = sequences(p.shared_q ? std::vector<int32_t>{} : p.cu_seqlens_q, p.total_q(), 1);
  return by_position(rows, p.num_heads_q * p.head_dim, in.exact.result.dq, in.got.dq);
}

std::string heads_finding(const std::vector<TensorError>& errors) {
  constexpr double kNotableDb = 3;  // twice the error energy
  const TensorError* widest = nullptr;
  double spread = -1;
  for (const TensorError& e : errors) {
    const kit::Metrics &worst = e.heads[e.worst_head()], &best = e.heads[e.best_head()];
    if (e.name == "lse" || e.heads.size() < 2 || !defined(worst) || !defined(best)) continue;
    if (best.sqnr_db - worst.sqnr_db > spread) spread = best.sqnr_db - worst.sqnr_db, widest = &e;
  }
  if (!widest) return "There are no two heads whose errors could be compared.";
  const size_t worst = widest->worst_head(), best = widest->best_head();
  const std::string where = "head " + std::to_string(worst) + " has " + fixed(widest->heads[worst].sqnr_db, 1) +
                            " dB on " + widest->name + ", head " + std::to_string(best) + " " +
                            fixed(widest->heads[best].sqnr_db, 1) + " dB";
  if (spread < kNotableDb) return "No head stands out: the widest gap is " + fixed(spread, 1) + " dB (" + where + ").";
  return "Heads differ by up to " + fixed(spread, 1) + " dB: " + where + "; judge the recipe by head " +
         std::to_string(worst) + ".";
}

std::string position_finding(const std::string& tensor, const std::vector<PositionBin>& bins) {
  constexpr double kNotableDb = 3;
  std::vector<PositionBin> known;
  std::copy_if(bins.begin(), bins.end(), std::back_inserter(known), [](auto& b) { return !std::isnan(b.sqnr_db); });
  if (known.size() < 2) return tensor + " has no error to compare between positions.";
  std::sort(known.begin(), known.end(), [](const auto& a, const auto& b) { return a.sqnr_db < b.sqnr_db; });
  const PositionBin& worst = known.front();
  const double below = known[known.size() / 2].sqnr_db - worst.sqnr_db;
  const std::string range = worst.first == worst.last
                                ? "position " + std::to_string(worst.first)
                                : "positions " + std::to_string(worst.first) + " to " + std::to_string(worst.last);
  const std::string text = range + " (" + fixed(worst.sqnr_db, 1) + " dB, " + fixed(below, 1) + " below the median)";
  return below < kNotableDb ? tensor + " is even along the sequence: its weakest are " + text + "."
                            : tensor + " is weakest at " + text + ".";
}

std::string scales_finding(const std::vector<OperandScales>& operands) {
  const OperandScales* most = nullptr;
  for (const OperandScales& x : operands) {
    if (x.any() && (!most || x.changed_by_one_scale > most->changed_by_one_scale)) most = &x;
  }
  if (!most) return "No block holds a finite value other than zero.";
  const std::string span = std::to_string(most->max_exponent - most->min_exponent + 1);
  constexpr double kNotableShare = 0.01;
  if (most->changed_by_one_scale < kNotableShare) {
    return "Block scales are hardly needed here: one scale for a whole tensor would change at most " +
           percent(most->changed_by_one_scale) + " of its elements (" + most->name + ").";
  }
  return "Block scales matter most for " + most->name + ": its scales take " + span +
         " powers of two, and one scale for the whole tensor would change " + percent(most->changed_by_one_scale) +
         " of its elements.";
}

std::string clipping_finding(const std::vector<OperandScales>& operands, MxRule rule) {
  std::string saturated, flushed, nonfinite;
  bool clamped = false;  // there may be blocks whose scale could not follow their largest element down
  const auto append = [](std::string& list, const std::string& name, int64_t n, int64_t total) {
    if (n == 0) return;
    if (!list.empty()) list += ", ";
    list += name + " " + percent(double(n) / double(total));
  };
  for (const OperandScales& x : operands) {
    clamped |= x.stats.flushed > 0 && x.zero_blocks > 0;
    append(saturated, x.name, x.stats.saturated, x.stats.total);
    append(flushed, x.name, x.stats.flushed, x.stats.total);
    append(nonfinite, x.name, x.stats.nonfinite, x.stats.total);
  }
  std::string text = saturated.empty() ? "Nothing saturates" : "Saturated: " + saturated;
  if (saturated.empty() && rule == MxRule::rceil) text += ", as rule rceil promises";
  text += flushed.empty() ? "; nothing is flushed to zero." : "; flushed to zero: " + flushed;
  if (!flushed.empty()) text += clamped ? "." : ", each below 2^-17 of the largest in its block.";
  if (!nonfinite.empty()) text += " NaN or Inf: " + nonfinite + "; " + kNonfiniteReach + ".";
  return text;
}

}  // namespace mxflash::tools
