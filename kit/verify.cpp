#include "kit/verify.h"

#include <mxflash/backend.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <span>

#include "kit/device_memory.h"
#include "kit/random.h"
#include "kit/text.h"
#include "mx/scale_layout.h"

namespace mxflash::kit {
namespace {

// Below it a tensor has no signal: every case has operands of size one, and exact zeros come out as roundoff.
constexpr double kNoSignal = 1e-10;

// Of the size of a tensor: what sums in fp32 may add to the rounding noise of ref; and block fixed point, which moves
// values by half a unit, at most 2^-13 of the largest of their group. It counts where ref rounds nothing: P = 1.
constexpr double kFp32Slack = 0x1p-18, kFixedSlack = 0x1p-13;
constexpr double kTileSlack = 3e-3;       // what FP8 tensor cores cut off, where ref rounds nothing
constexpr double kBf16DeltaSlack = 1e-2;  // of dq, by way of out
constexpr double kBf16Slack = 0x1p-8;     // what rounding P to BF16 moves at most, and more than it does on average

// So few elements are a sample that scatters around the distribution's SQNR.
constexpr size_t kSmallTensor = 1024;
constexpr double kSmallTensorDb = 1.5;

// About 1 dB below what ref measures on the least accurate case of the list; small head dims have few channels to
// average over, so distributions that treat channels differently have two rows. The first row that fits counts.
struct FloorRow {
  Distribution distribution;
  int32_t min_head_dim;
  double out, dq, dk, dv;            // dout and dS in E4M3
  double e5m2_dq, e5m2_dk, e5m2_dv;  // in E5M2
};
// clang-format off
constexpr FloorRow kFloors[] = {
    {Distribution::normal,               0,  24.2, 22.2, 22.3, 23.9,  18.9, 19.2, 22.0},
    {Distribution::outlier_channels,   128,  15.1, 12.0, 13.4, 15.0,  11.3, 13.0, 14.7},
    {Distribution::outlier_channels,     0,  16.2, 11.0,  9.7, 16.0,  10.2,  9.3, 15.6},
    {Distribution::attention_sink,     128,  21.1, 20.3, 20.3, 29.4,  17.1, 17.4, 24.4},
    {Distribution::attention_sink,       0,  22.5, 20.8, 20.8, 27.6,  18.3, 18.6, 23.4},
    {Distribution::peaky,                0,  20.3, 18.1, 18.1, 20.1,  16.7, 16.9, 19.0},
    {Distribution::constant,             0,  30.0, 23.4, 25.4, 26.0,  19.0, 21.5, 25.2},
    {Distribution::wide_row_gradients, 128,  24.9, 23.6, 23.0, 25.0,  20.3, 19.7, 22.1},
    {Distribution::wide_row_gradients,   0,  25.5, 21.2, 22.2, 24.1,  18.3, 19.7, 22.4},
    {Distribution::mean_v,             128,  48.8, 17.2, 17.2, 24.5,  16.1, 16.1, 22.2},
    {Distribution::mean_v,               0,  44.8, 16.5, 16.6, 24.5,  15.4, 15.6, 21.9},
    {Distribution::negative_logits,    128,  24.9, 12.2, 23.6, 24.5,   8.4, 20.0, 22.3},
    {Distribution::negative_logits,      0,  24.9,  9.9, 23.1, 24.1,   6.0, 20.0, 22.0},
};
// clang-format on

// What FP8 tensor cores may take off the floor of out, in dB: they cut off most where one product dwarfs the others,
// and where v is far from zero. By an emulation of theirs (tests/check_sensitivity_test.cpp), 2.1, 1.7 and
// at most 0.1 of what ref reaches.
double tile_loss(Distribution distribution) {
  if (distribution == Distribution::negative_logits) return 2.5;
  return distribution == Distribution::mean_v ? 1.5 : 0.5;
}

// The same of gradients beside those of ref: they have one scale for a row of dS in place of one for 32 x 32. Scores
// near 1000 are cut off as far as P's rounding goes, too. Where v is far from zero, out of many keys is off by 3e-3 of
// that mean, and delta with it, as dP is; smooth_v is there for that.
double tile_gradient_loss(Distribution distribution) {
  switch (distribution) {
    case Distribution::negative_logits: return 6;
    case Distribution::mean_v: return 3.5;
    default: return 0.15;
  }
}
constexpr double kTileGradientSlack = 2e-3;  // of a tensor's size, where ref rounds nothing

CpuMath resolved(CpuMath math) { return math == CpuMath::automatic ? default_cpu_math() : math; }

// ref adds in fp64, everyone else may use fp32.
BoundOptions bound_of(const VerifyOptions& options) {
  if (options.fwd_backend == "ref" && options.bwd_backend == "ref") return {};
  if (options.fwd_backend == "cpu" && options.bwd_backend == "cpu") return cpu_bound(resolved(options.cpu_math));
  if (reads_images(options.fwd_backend)) return {.weights = WeightFormat::tile, .roundoff = 0x1p-24};
  if (is_device_backend(options.fwd_backend)) return {.weights = WeightFormat::bf16, .roundoff = 0x1p-23};
  return {.roundoff = 0x1p-24};
}

double roundoff_of(Dtype dtype) { return dtype == Dtype::bf16 ? 0x1p-8 : dtype == Dtype::f16 ? 0x1p-11 : 0x1p-24; }

// An attention call in a backend that may not give all that run_attention asks for: `options` gets what it gives, the
// report what it does not. Throws StatusError where it refuses the call itself.
AttentionResult run_what_it_can(const MxAttention& mx, const VerifyOptions& o, ForwardOptions& options,
                                Report& report) {
  if (!is_device_backend(o.fwd_backend)) return run_attention(mx, o.fwd_backend, o.bwd_backend);
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const bool row_exponent : {true, false}) {
      options = {.out_dtype = dtype, .row_exponent = row_exponent};
      const bool last = dtype == Dtype::bf16 && !row_exponent;
      try {
        AttentionResult result = run_attention(mx, o.fwd_backend, o.bwd_backend, options);  // moved: it has views
        if (dtype != Dtype::f32) report.notes.push_back("out in f32");
        if (!row_exponent) report.notes.push_back("row_exponent");
        return result;
      } catch (const StatusError& error) {
        if (error.code != StatusCode::unsupported || last) throw;
      }
    }
  }
  return {};
}

double rms(std::span<const double> x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return x.empty() ? 0 : std::sqrt(sum / double(x.size()));
}

struct TensorView {
  const char* name;
  const std::vector<double>&original, &exact, &bound;
  const std::vector<float>& got;
  std::vector<int64_t> shape;
};

// Every element against its bound; the worst one is reported.
void judge_elements(const TensorView& t, TensorReport& report) {
  int64_t worst = -1, violations = 0;
  for (int64_t i = 0; i < int64_t(t.got.size()); ++i) {
    const double exact = t.exact[size_t(i)], got = double(t.got[size_t(i)]), bound = t.bound[size_t(i)];
    if (got == exact) continue;  // also -inf in lse
    const double error = std::abs(got - exact);
    const double share = std::isfinite(error) ? error / bound : HUGE_VAL;  // bound 0: no error is allowed
    violations += !(share <= 1);
    if (worst < 0 || share > report.bound_share) {
      worst = i;
      report.bound_share = share;
    }
  }
  if (violations == 0) return;
  report.failure =
      std::string(t.name) + coordinates(worst, t.shape) +
      text(": exact %.9g, got %.9g, |error| %.3g > bound %.3g (%lld of %lld elements)", t.exact[size_t(worst)],
           double(t.got[size_t(worst)]), std::abs(double(t.got[size_t(worst)]) - t.exact[size_t(worst)]),
           t.bound[size_t(worst)], static_cast<long long>(violations), static_cast<long long>(t.got.size()));
}

void judge_sqnr(const TensorView& t, double floor_db, bool floors, TensorReport& report) {
  const Metrics m = compare(t.original, t.got);
  report.sqnr_db = m.sqnr_db;
  report.floor_db = floor_db - (t.got.size() < kSmallTensor ? kSmallTensorDb : 0);
  report.has_floor = floors && rms(t.original) > kNoSignal;
  if (report.has_floor && !(m.sqnr_db >= report.floor_db) && report.failure.empty()) {
    report.failure = std::string(t.name) + text(": SQNR %.2f dB < floor %.2f dB; ", m.sqnr_db, report.floor_db) +
                     describe(m, t.original, t.got, t.shape);
  }
}

// floor(lse * log2(e) - max_j s) is floor(-log2 max_j P), either neighbour where roundoff decides.
std::string judge_row_exponent(const AttentionTruth& truth, const AttentionResult& result) {
  const std::vector<double>& max_p = truth.bound.max_p;
  if (result.row_exponent.empty()) return "";
  for (size_t i = 0; i < max_p.size(); ++i) {
    const double slack = truth.bound.exponent[i];
    const double spare = max_p[i] > 0 ? -std::log2(max_p[i]) : 0;
    const double low = std::floor(spare - slack), high = std::floor(spare + slack), got = result.row_exponent[i];
    if (got >= std::max(low, 0.0) && got <= std::max(high, 0.0)) continue;
    return "row_exponent" + coordinates(int64_t(i), {truth.problem.num_heads_q, total_out(truth.problem)}) +
           text(": must be floor(%.6g), got %g", spare, got);
  }
  return "";
}

std::vector<TensorView> views(const AttentionTruth& truth, const AttentionResult& r) {
  const AttentionCase& c = truth.problem;
  const OracleResult &o = truth.original, &d = truth.dequantized;
  const AttentionBound& b = truth.bound;
  std::vector<TensorView> forward = {{"out", o.out, d.out, b.out, r.out, {total_out(c), c.num_heads_q, c.head_dim_v}},
                                     {"lse", o.lse, d.lse, b.lse, r.lse, {c.num_heads_q, total_out(c)}}};
  if (!r.backward) return forward;
  return {forward[0],
          forward[1],
          {"dq", o.dq, d.dq, b.dq, r.dq, {total_q(c), c.num_heads_q, c.head_dim}},
          {"dk", o.dk, d.dk, b.dk, r.dk, {total_k(c), c.num_heads_kv, c.head_dim}},
          {"dv", o.dv, d.dv, b.dv, r.dv, {total_k(c), c.num_heads_kv, c.head_dim_v}}};
}

// A mean of v that is given must be added to every row that sees a key.
std::string check_mean(const MxAttention& mx, const AttentionResult& r, const VerifyOptions& o,
                       const ForwardOptions& options) {
  const int64_t heads_q = mx.q.view.data.shape[1], heads_kv = mx.v.view.data.shape[1];
  const int64_t dim_v = mx.v.view.data.shape[2], tokens = mx.total_out();
  ForwardOptions with_mean = options;
  with_mean.v_mean.resize(size_t(mx.seq_k().batch * heads_kv * dim_v));
  Random random(17, uint64_t(dim_v));
  fill_normal(random, with_mean.v_mean);
  const AttentionResult got = run_attention(mx, o.fwd_backend, "", with_mean);
  const double roundoff = 2 * roundoff_of(options.out_dtype);
  for (int64_t b = 0; b < mx.seq_out().batch; ++b) {
    const Sequence s = sequence_at(tokens, mx.seq_out(), b);
    for (int64_t i = s.start; i < s.start + s.length; ++i) {
      for (int64_t head = 0; head < heads_q; ++head) {
        const bool sees_keys = std::isfinite(r.lse[size_t(head * tokens + i)]);
        for (int64_t c = 0; c < dim_v; ++c) {
          const auto at = size_t((i * heads_q + head) * dim_v + c);
          const size_t mean_at = size_t((b * heads_kv + head / (heads_q / heads_kv)) * dim_v + c);
          const double mean = sees_keys ? double(with_mean.v_mean[mean_at]) : 0, without = double(r.out[at]);
          const double bound = roundoff * (std::abs(without) + std::abs(without + mean));
          if (std::abs(double(got.out[at]) - (without + mean)) <= bound) continue;
          return "out" + coordinates(int64_t(at), {tokens, heads_q, dim_v}) +
                 text(" must be %.9g + %.9g, got %.9g", without, mean, double(got.out[at]));
        }
      }
    }
  }
  return "";
}

// `got` must be what the quantizer makes of x.
std::string check_quantized(const char* name, const std::vector<float>& x, const OwnedMx& got, const Jagged& seq) {
  const auto& shape = got.view.data.shape;
  OwnedMx want = make_owned_mx(got.view.data.dtype, got.view.block, got.view.layout, shape[0], shape[1], shape[2], seq);
  const Tensor in = make_tensor(const_cast<float*>(x.data()), Dtype::f32, shape[0], shape[1], shape[2]);
  require_ok(quantize({.in = in, .out = want.view, .seq = seq, .backend = "ref"}));
  for (size_t i = 0; i < want.data.size(); ++i) {
    if (want.data[i] == got.data[i]) continue;
    return std::string(name) + coordinates(int64_t(i), {shape[0], shape[1], shape[2]}) +
           text(": payload must be 0x%02X, got 0x%02X", unsigned(want.data[i]), unsigned(got.data[i]));
  }
  return want.scale == got.scale ? "" : std::string(name) + ": scales differ from those of quantize";
}

// out_mx beside an fp32 out, in a block and layout that differ from case to case.
std::string check_out_mx(const MxAttention& mx, const VerifyOptions& o, ForwardOptions options) {
  constexpr MxFormat kFormats[] = {{MxBlock::square32, ScaleLayout::linear},
                                   {MxBlock::row32, ScaleLayout::atom128x4},
                                   {MxBlock::col32, ScaleLayout::linear},
                                   {MxBlock::col32, ScaleLayout::atom128x4}};
  options.out_mx = kFormats[size_t(mx.total_out()) % std::size(kFormats)];
  options.out_dtype = Dtype::f32;
  const AttentionResult r = run_attention(mx, o.fwd_backend, "", options);
  return check_quantized("out_mx", r.out, r.out_mx, mx.seq_out());
}

// Calls that differ in what must not matter have to agree in every bit; if they do not, what it was that mattered.
void check_bits(const MxAttention& mx, const AttentionResult& result, const VerifyOptions& o,
                const ForwardOptions& options, Report& report) {
  const int32_t threads = num_threads(), other_threads = threads > 1 ? 1 : 2;
  const auto difference = [&](const MxAttention& a, int32_t n) {
    set_num_threads(n);
    const AttentionResult again = run_attention(a, o.fwd_backend, o.bwd_backend, options);
    set_num_threads(threads);
    return compare_bits(mx, result, a, again);
  };
  if (std::string what = difference(poison_padding(mx), other_threads); !what.empty()) {
    if (const std::string again = difference(mx, threads); !again.empty()) {
      what = "a second run differs: " + again;
    } else if (const std::string few = difference(mx, other_threads); !few.empty()) {
      what = "depends on the number of threads: " + few;
    } else {
      what = "padding changes the result: " + what;
    }
    report.failures.push_back(what);
  }
  // What the backend refuses of these is a note.
  const auto check = [&](const char* failure, const std::function<std::string()>& body) {
    try {
      if (const std::string what = body(); !what.empty()) report.failures.push_back(failure + what);
    } catch (const StatusError& error) {
      if (error.code != StatusCode::unsupported) throw;
      report.notes.push_back(error.what());
    }
  };
  if (is_device_backend(o.fwd_backend)) {
    const auto difference_with = [&](const ForwardOptions& changed) {
      return compare_bits(mx, result, mx, run_attention(mx, o.fwd_backend, o.bwd_backend, changed));
    };
    ForwardOptions images = options, strided = options;
    images.images = strided.strided = true;
    if (reads_images(o.fwd_backend)) {
      check("images in place of operands change the result: ", [&] { return difference_with(images); });
    }
    check("strides change the result: ", [&] { return difference_with(strided); });
    check("with v_mean, ", [&] { return check_mean(mx, result, o, options); });
  }
  check("", [&] { return check_out_mx(mx, o, options); });
  if (mx.q.view.block != MxBlock::square32) return;
  check("row32 and col32 with the scales of square32 differ: ",
        [&] { return difference(poison_padding(expand_squares(mx, ScaleLayout::atom128x4)), threads); });
}

std::string check_mx_gradients(const MxAttention& mx, const AttentionResult& r) {
  const std::string dk = check_quantized("dk_mx", r.dk, r.dk_mx, mx.seq_k());
  return dk.empty() ? check_quantized("dv_mx", r.dv, r.dv_mx, mx.seq_k()) : dk;
}

}  // namespace

AttentionTruth attention_truth(const AttentionCase& c, const Operands& original, const MxAttention& mx,
                               BoundOptions arithmetic) {
  arithmetic.ds_dtype = mx.ds_dtype;
  const OracleProblem dequantized = dequantized_problem(c, mx);
  AttentionTruth truth{.problem = c,
                       .grad_element = mx.dout.view.data.dtype,
                       .original = oracle_attention(make_problem(c, original)),
                       .dequantized = oracle_attention(dequantized),
                       .arithmetic = arithmetic,
                       .bound = {}};
  truth.bound = attention_bound(dequantized, truth.dequantized, arithmetic);
  return truth;
}

Report judge(const AttentionTruth& truth, const AttentionResult& result, bool floors) {
  Report report{.name = truth.problem.name, .backend = ""};
  SqnrFloor floor = sqnr_floor(truth.problem, truth.grad_element);
  const bool is_tile = truth.arithmetic.weights == WeightFormat::tile;
  if (is_tile) {
    const double loss = tile_loss(truth.problem.distribution);
    floor = {floor.out - loss, floor.dq - loss, floor.dk - loss, floor.dv - loss};
  }
  for (const TensorView& t : views(truth, result)) {
    TensorReport tensor{.name = t.name};
    const std::string name = t.name;
    // The bound of tiles is the forward's. Gradients have their floors, and worse_than_ref.
    if (!is_tile || name == "out" || name == "lse") judge_elements(t, tensor);
    if (name != "lse") {
      const double floor_db = name == "out" ? floor.out : name == "dq" ? floor.dq : name == "dk" ? floor.dk : floor.dv;
      judge_sqnr(t, floor_db, floors, tensor);
    }
    if (!tensor.failure.empty()) report.failures.push_back(tensor.failure);
    report.tensors.push_back(tensor);
  }
  if (const std::string failure = judge_row_exponent(truth, result); !failure.empty()) {
    report.failures.push_back(failure);
  }
  return report;
}

std::vector<std::string> worse_than_ref(const AttentionTruth& truth, const AttentionResult& result,
                                        const AttentionResult& ref) {
  std::vector<std::string> failures;
  const WeightFormat weights = truth.arithmetic.weights;
  const double slack = weights == WeightFormat::tile    ? kTileSlack
                       : weights == WeightFormat::bf16  ? kBf16Slack
                       : weights == WeightFormat::fixed ? kFixedSlack
                                                        : kFp32Slack;
  // FP8 tensor cores cut scores, too: where those are large, as much as the rounding of P does. P in BF16 has 1/16 of
  // the error that it has in E4M3.
  const double times = weights == WeightFormat::tile ? 3 : weights == WeightFormat::bf16 ? 0.25 : 2;
  const std::vector<TensorView> got = views(truth, result), want = views(truth, ref);
  for (size_t t = 0; t < got.size(); ++t) {
    const double size = rms(got[t].exact);
    if (got[t].name == std::string("lse") || size <= kNoSignal) continue;
    if (weights == WeightFormat::tile && got[t].name != std::string("out")) {
      const BesideRef b = beside_ref(got[t].original, want[t].got, got[t].got,
                                     tile_gradient_loss(truth.problem.distribution), kTileGradientSlack);
      if (b.ok()) continue;
      failures.push_back(std::string(got[t].name) +
                         text(": SQNR %.2f dB, that of ref %.2f dB", b.got.sqnr_db, b.ref.sqnr_db));
      continue;
    }
    const double n = double(std::max<size_t>(1, got[t].got.size()));
    const double error = std::sqrt(compare(got[t].exact, got[t].got).error_energy / n);
    const double ref_error = std::sqrt(compare(want[t].exact, want[t].got).error_energy / n);
    // Where v is far from zero, fp32 tensor cores cut off 1e-4 of out over 64K keys, and delta is that sum.
    const bool by_delta = weights == WeightFormat::bf16 && truth.problem.distribution == Distribution::mean_v &&
                          got[t].name == std::string("dq");
    if (error <= times * ref_error + (by_delta ? kBf16DeltaSlack : slack) * size) continue;
    failures.push_back(std::string(got[t].name) +
                       text(": rms error %.3g is more than %g times that of ref, %.3g", error, times, ref_error));
  }
  return failures;
}

std::vector<std::string> worse_than_exact(const AttentionTruth& truth, const AttentionResult& fast,
                                          const AttentionResult& exact) {
  std::vector<std::string> failures;
  const std::vector<TensorView> a = views(truth, exact), b = views(truth, fast);
  for (size_t t = 0; t < a.size(); ++t) {
    // A few elements scatter, and what is only roundoff has no SQNR.
    if (a[t].name == std::string("lse") || a[t].got.size() < kSmallTensor || rms(a[t].original) <= kNoSignal) continue;
    const double exact_db = compare(a[t].original, a[t].got).sqnr_db;
    const double fast_db = compare(b[t].original, b[t].got).sqnr_db;
    if (fast_db >= exact_db - kFastLossDb) continue;
    failures.push_back(std::string(a[t].name) + text(": SQNR %.3f dB, in mode exact %.3f dB", fast_db, exact_db));
  }
  return failures;
}

BoundOptions cpu_bound(CpuMath math) {
  BoundOptions bound{.weights = WeightFormat::fp32, .roundoff = 0x1p-24};
  if (math == CpuMath::exact) return bound;
  bound.weights = WeightFormat::fixed;
  bound.fixed_scores = cpu_isa() != std::string("avx512_bf16");  // whose BF16 products are exact on MX operands
  return bound;
}

std::vector<CpuMath> modes_of(const std::string& backend) {
  if (backend == "cpu") return {CpuMath::exact, CpuMath::fast};
  return {CpuMath::automatic};
}

VerifyOptions attention_backends(const std::string& backend) {
  const auto or_ref = [&](Operation op) {
    return std::ranges::count(available_backends(op), backend) > 0 ? backend : std::string("ref");
  };
  VerifyOptions options{.fwd_backend = or_ref(Operation::attention_fwd),
                        .bwd_backend = or_ref(Operation::attention_bwd)};
  if (is_device_backend(options.fwd_backend) && options.bwd_backend == "ref") options.bwd_backend = "";
  return options;
}

Report verify_attention(const AttentionCase& c, const VerifyOptions& given) {
  VerifyOptions options = given;
  const auto start = std::chrono::steady_clock::now();
  const bool is_ref = options.fwd_backend == "ref" && options.bwd_backend == "ref";
  const bool alone = options.bwd_backend.empty() || options.fwd_backend == options.bwd_backend;
  const std::string backend = alone ? options.fwd_backend : options.fwd_backend + "+" + options.bwd_backend;
  const Operands operands = make_operands(c);
  const bool is_cpu = options.fwd_backend == "cpu" && options.bwd_backend == "cpu";
  const std::string mode = is_cpu ? cpu_math_name(resolved(options.cpu_math)) : "";
  MxAttention mx = quantize_case(c, operands, options.grad_element, options.block);
  mx.cpu_math = options.cpu_math;
  if (is_device_backend(options.bwd_backend)) mx.ds_dtype = Dtype::e4m3;  // all that they have
  Report report{.name = c.name, .backend = backend, .mode = mode};
  try {
    ForwardOptions forward;
    const AttentionResult result = [&] {
      try {
        return run_what_it_can(mx, options, forward, report);
      } catch (const StatusError& error) {
        const bool can_be_alone = is_device_backend(options.fwd_backend) && !options.bwd_backend.empty();
        if (error.code != StatusCode::unsupported || !can_be_alone) throw;
        report.notes.push_back(error.what());
        options.bwd_backend.clear();
        return run_what_it_can(mx, options, forward, report);
      }
    }();
    // What a backend computes with, where it is not the operands as given.
    const bool has_tiles = reads_images(options.fwd_backend);
    const MxAttention seen = has_tiles ? round_to_images(mx) : MxAttention{};
    const MxAttention& exact = has_tiles ? seen : mx;
    BoundOptions arithmetic = bound_of(options);
    arithmetic.out_roundoff = roundoff_of(forward.out_dtype);
    const AttentionTruth truth = attention_truth(c, operands, exact, arithmetic);
    Report judged = judge(truth, result, options.floors);
    report.tensors = judged.tensors;
    report.failures = judged.failures;
    if (result.backward && is_device_backend(options.bwd_backend)) {
      mx.deterministic = true;
      check_bits(mx, run_attention(mx, options.fwd_backend, options.bwd_backend, forward), options, forward, report);
      mx.deterministic = false;
    } else {
      check_bits(mx, result, options, forward, report);
    }
    const auto add = [&](const std::vector<std::string>& failures) {
      report.failures.insert(report.failures.end(), failures.begin(), failures.end());
    };
    if (result.backward) {
      if (const std::string failure = check_mx_gradients(mx, result); !failure.empty()) add({failure});
    }
    // Delta from out as training stores it; for the quick cases, since ref has to do it too.
    if (result.backward && is_device_backend(options.bwd_backend) && c.quick) {
      const ForwardOptions stored{.out_dtype = Dtype::bf16};
      const auto run = [&](const MxAttention& a, const std::string& fwd, const std::string& bwd) {
        AttentionResult r = run_attention(a, fwd, bwd, stored);
        r.out = result.out;  // judged already
        return r;
      };
      for (const std::string& failure :
           worse_than_ref(truth, run(mx, options.fwd_backend, options.bwd_backend), run(exact, "ref", "ref"))) {
        add({"out in bf16: " + failure});
      }
    }
    if (!is_ref) add(worse_than_ref(truth, result, run_attention(exact, "ref", result.backward ? "ref" : "", forward)));
    if (is_cpu && resolved(options.cpu_math) == CpuMath::fast) {
      mx.cpu_math = CpuMath::exact;
      add(worse_than_exact(truth, result, run_attention(mx, "cpu", "cpu")));
    }
  } catch (const StatusError& error) {
    if (error.code != StatusCode::unsupported) throw;
    report.skipped = error.what();
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

std::vector<AttentionCase> check_cases(bool quick_only) {
  std::vector<AttentionCase> cases = attention_cases(quick_only);
  if (const AttentionCase* gqa = find_case("gqa_8_2_d128"); gqa && quick_only && !gqa->quick) cases.push_back(*gqa);
  cases.push_back({.name = "flat_30000_keys_d64",
                   .lens_q = {8},
                   .lens_k = {30000},
                   .distribution = Distribution::constant,
                   .quick = true});
  return cases;
}

std::vector<AttentionCase> long_cases() {
  const auto of = [](const char* name, int32_t queries, int32_t keys, int32_t dim, Distribution distribution) {
    return AttentionCase{.name = name,
                         .lens_q = {queries},
                         .lens_k = {keys},
                         .head_dim = dim,
                         .head_dim_v = dim,
                         .distribution = distribution};
  };
  return {of("long_16384_mean_v_d128", 32, 16384, 128, Distribution::mean_v),
          of("long_65536_mean_v_d64", 16, 65536, 64, Distribution::mean_v),
          of("long_65536_d128", 16, 65536, 128, Distribution::normal)};
}

std::vector<AttentionCase> long_gradient_cases() {
  return {{.name = "flat_30000_keys_d64", .lens_q = {8}, .lens_k = {30000}, .distribution = Distribution::constant},
          {.name = "flat_65536_keys_d128",
           .lens_q = {70},
           .lens_k = {65536},
           .head_dim = 128,
           .head_dim_v = 128,
           .distribution = Distribution::constant}};
}

std::vector<std::string> available_backends(Operation op) {
  std::vector<std::string> names;
  for (int32_t i = 0; i < num_backends(op); ++i) {
    if (const BackendInfo info = backend_info(op, i); info.available.ok()) names.push_back(info.name);
  }
  return names;
}

SqnrFloor sqnr_floor(const AttentionCase& c, Dtype grad_element) {
  for (const FloorRow& row : kFloors) {
    if (row.distribution != c.distribution || c.head_dim < row.min_head_dim) continue;
    if (grad_element == Dtype::e5m2) return {row.out, row.e5m2_dq, row.e5m2_dk, row.e5m2_dv};
    return {row.out, row.dq, row.dk, row.dv};
  }
  return {kMaxDb, kMaxDb, kMaxDb, kMaxDb};  // a distribution without a row must not pass unnoticed
}

}  // namespace mxflash::kit
