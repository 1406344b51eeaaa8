// attention_bwd of backend sm90 beside that of ref, on the same operands and the same forward results: every case of
// kit/cases.h that it takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "kit/call.h"
#include "kit/cases.h"
#include "kit/compare.h"
#include "kit/mx_attention.h"
#include "kit/operands.h"
#include "kit/oracle.h"
#include "kit/runner.h"
#include "runtime/cuda.h"
#include "runtime/tensor_access.h"

namespace mxflash::kit {
namespace {

// How far the SQNR against exact attention on the original operands may fall below that of ref: one scale for dS in
// place of one for a block of 32 x 32, and FP8 sums that are cut off.
constexpr double kLossDb = 0.15;
// Scores near 1000 that FP8 tensor cores cut off 13 bits below their largest product: P is as far off as in E4M3.
constexpr double kLargeScoresLossDb = 6;
constexpr double kNoise = 2e-3;  // of a tensor's size, where ref rounds nothing

double rms(const std::vector<double>& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return x.empty() ? 0 : std::sqrt(sum / double(x.size()));
}

class AttentionBwdDevice : public testing::TestWithParam<AttentionCase> {
 protected:
  void SetUp() override {
    if (const Status s = has_compute_capability(90); !s.ok()) GTEST_SKIP() << s.message;
    if (GetParam().head_dim > 128 || GetParam().head_dim_v > 128) GTEST_SKIP() << "head_dim above 128";
  }
};

// The forward of ref, then a backward.
AttentionResult run(const MxAttention& mx, const AttentionResult& forward, const char* backend) {
  AttentionResult r = forward;
  run_backward(mx, backend, r);
  return r;
}

void expect_close(const char* name, double loss_db, const std::vector<double>& exact, const std::vector<float>& ref,
                  const std::vector<float>& got) {
  const double size = rms(exact);
  const Metrics want = compare(exact, ref), have = compare(exact, got);
  const std::vector<double> reference(ref.begin(), ref.end());
  const Metrics beside = compare(reference, got);
  EXPECT_EQ(have.nonfinite_mismatch, 0) << name << ": first at " << have.worst_index;
  if (size <= 1e-10) {                                                 // exact zeros come out of ref as roundoff
    for (const float x : got) ASSERT_LE(std::fabs(x), 5e-3f) << name;  // dP is cut off 13 bits below its terms
    return;
  }
  // Both share the error of the operands, e, and have their own roundings besides, whose difference d is known: |e +
  // d|^2
  // - |e|^2 has a term 2 e.d, of either sign, with a standard deviation of 2 |e| |d| / sqrt(N) for errors that N
  // elements carry. Four of them are allowed.
  double fourth = 0;
  for (size_t i = 0; i < exact.size(); ++i) fourth += std::pow(double(ref[i]) - exact[i], 4);
  const double carriers = fourth > 0 ? want.error_energy * want.error_energy / fourth : 1;
  const double luck = 8 * std::sqrt(want.error_energy * beside.error_energy / carriers);
  const double noise = kNoise * kNoise * size * size * double(exact.size());
  EXPECT_LE(have.error_energy, want.error_energy * std::pow(10, loss_db / 10) + luck + noise)
      << name << ": SQNR " << have.sqnr_db << " dB, ref " << want.sqnr_db << " dB, worst at " << have.worst_index;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST_P(AttentionBwdDevice, BesideRef) {
  const AttentionCase& c = GetParam();
  const Operands operands = make_operands(c);
  const MxAttention mx = quantize_case(c, operands);
  const AttentionResult forward = run_attention(mx, "ref", "");
  const AttentionResult ref = run(mx, forward, "ref"), got = run(mx, forward, "sm90");
  const OracleResult exact = oracle_attention(make_problem(c, operands));
  const double loss_db = c.distribution == Distribution::negative_logits ? kLargeScoresLossDb : kLossDb;
  expect_close("dq", loss_db, exact.dq, ref.dq, got.dq);
  expect_close("dk", loss_db, exact.dk, ref.dk, got.dk);
  expect_close("dv", loss_db, exact.dv, ref.dv, got.dv);
  // Where nothing contributes.
  for (const auto& [want, have, name] :
       {std::tuple(&ref.dq, &got.dq, "dq"), std::tuple(&ref.dk, &got.dk, "dk"), std::tuple(&ref.dv, &got.dv, "dv")}) {
    int64_t wrong = 0;
    for (size_t i = 0; i < want->size(); ++i) {
      if (name == std::string("dv") && exact.dv[i] == 0 && (*have)[i] != 0) ++wrong;
      wrong += std::isfinite((*want)[i]) != std::isfinite((*have)[i]);
    }
    EXPECT_EQ(wrong, 0) << name;
  }

  const auto check_mx = [&](const char* name, const std::vector<float>& x, const OwnedMx& have) {
    const auto& shape = have.view.data.shape;
    const OwnedMx want = ref_quantize(x, shape[0], shape[1], shape[2], mx.seq_k());
    EXPECT_EQ(want.data, have.data) << name;
    EXPECT_EQ(want.scale, have.scale) << name;
  };
  check_mx("dk_mx", got.dk, got.dk_mx);
  check_mx("dv_mx", got.dv, got.dv_mx);

  const AttentionResult again = run(mx, forward, "sm90");
  EXPECT_TRUE(same_bits(got.dk, again.dk));
  EXPECT_TRUE(same_bits(got.dv, again.dv));

  // What must not matter: padding, and the form of the scales. dQ is summed in any order.
  const MxAttention poisoned = poison_padding(mx);
  for (const MxAttention& other : {poison_padding(mx), poison_padding(expand_squares(mx, ScaleLayout::atom128x4))}) {
    AttentionResult moved = run(other, run_attention(other, "ref", ""), "sm90"), copy = got;
    double most = 0, difference = 0;
    for (size_t i = 0; i < got.dq.size(); ++i) {
      most = std::max(most, double(std::fabs(got.dq[i])));
      difference = std::max(difference, double(std::fabs(got.dq[i] - moved.dq[i])));
      moved.dq[i] = copy.dq[i];
    }
    EXPECT_LE(difference, 1e-4 * most);
    EXPECT_EQ(compare_bits(mx, copy, other, moved), "");
  }
}

// What a call may ask for beyond the cases, beside ref: gradients as narrow parts of wider tensors, a rotation, means,
// a gradient of lse, dQ in FP16.
struct Options {
  const char* name;
  bool rotate = false, v_mean = false, k_mean = false;
  Dtype gradients = Dtype::f32, dq_accum = Dtype::f32;
  int64_t gap = 0;  // elements between heads
};

class AttentionBwdDeviceOptions : public testing::TestWithParam<Options> {};

struct Output {
  std::vector<float> fp32;
  std::vector<uint16_t> half;
  Tensor view;
  Output(const Tensor& like, Dtype dtype, int64_t gap) {
    const int64_t heads = like.shape[1], row = like.shape[2] + gap;
    const size_t count = size_t(like.shape[0] * heads * row);
    fp32.assign(dtype == Dtype::f32 ? count : 0, -1);
    half.assign(dtype == Dtype::f32 ? 0 : count, 0xFFFF);
    void* data = dtype == Dtype::f32 ? static_cast<void*>(fp32.data()) : half.data();
    view = make_tensor(data, dtype, like.shape[0], heads, like.shape[2]);
    view.stride = {heads * row, row, 1};
  }
  std::vector<float> values() const {
    std::vector<float> x;
    for (int64_t i = 0; i < view.shape[0]; ++i) {
      for (int64_t h = 0; h < view.shape[1]; ++h) {
        for (int64_t c = 0; c < view.shape[2]; ++c) x.push_back(load_float(view, row_offset(view, i, h) + c));
      }
    }
    return x;
  }
};

TEST_P(AttentionBwdDeviceOptions, BesideRef) {
  if (const Status s = has_compute_capability(90); !s.ok()) GTEST_SKIP() << s.message;
  const Options& o = GetParam();
  for (const int32_t dim : {128, 96, 64, 40}) {
    const AttentionCase c{.name = "options",
                          .lens_q = {150, 1, 300},
                          .lens_k = {200, 64, 300},
                          .num_heads_q = 4,
                          .num_heads_kv = 2,
                          .head_dim = dim,
                          .head_dim_v = dim,
                          .mask = {.causal = true},
                          .with_dlse = o.k_mean};
    const MxAttention mx = quantize_case(c, make_operands(c));
    const int64_t batch = 3, heads = 4, heads_kv = 2, total = mx.total_out();
    std::vector<float> mean(size_t(batch * heads_kv * dim));
    for (size_t i = 0; i < mean.size(); ++i) mean[i] = float(int(i * 37 % 19) - 9) / 8;
    const Tensor mean_view = make_tensor(mean.data(), Dtype::f32, batch, heads_kv, int64_t(dim));
    AttentionResult forward = run_attention(mx, "ref", "", {.v_mean = o.v_mean ? mean : std::vector<float>{}});
    std::vector<std::vector<float>> results[2];
    for (const char* backend : {"ref", "sm90"}) {
      const bool is_ref = backend == std::string("ref");
      const Dtype dtype = is_ref ? Dtype::f32 : o.gradients;
      Output dq(mx.q.view.data, dtype, o.gap), dk(mx.k.view.data, dtype, o.gap), dv(mx.v.view.data, dtype, o.gap);
      AttentionBwd a{.q = mx.q.view,
                     .k = mx.k.view,
                     .v = mx.v.view,
                     .dout = mx.dout.view,
                     .out = make_tensor(forward.out.data(), Dtype::f32, total, heads, int64_t(dim)),
                     .lse = make_tensor(forward.lse.data(), Dtype::f32, heads, total),
                     .row_exponent = make_tensor(forward.row_exponent.data(), Dtype::u8, heads, total),
                     .dq = dq.view,
                     .dk = dk.view,
                     .dv = dv.view,
                     .dq_accum = is_ref ? Dtype::f32 : o.dq_accum,
                     .rotate_qk = o.rotate,
                     .seq_q = mx.seq_q(),
                     .seq_k = mx.seq_k(),
                     .mask = mx.mask,
                     .backend = backend};
      if (o.v_mean) a.v_mean = mean_view;
      if (o.k_mean) {
        a.k_mean = mean_view;
        a.dlse = make_tensor(const_cast<float*>(mx.dlse.data()), Dtype::f32, heads, total);
      }
      require_ok(call(a));
      results[is_ref ? 0 : 1] = {dq.values(), dk.values(), dv.values()};
      // The gaps.
      for (const Output* x : {&dq, &dk, &dv}) {
        for (int64_t row = 0; row < x->view.shape[0] * x->view.shape[1]; ++row) {
          for (int64_t n = dim; n < dim + o.gap; ++n) {
            const size_t at = size_t(row * (dim + o.gap) + n);
            ASSERT_TRUE(x->fp32.empty() ? x->half[at] == 0xFFFF : x->fp32[at] == -1);
          }
        }
      }
    }
    for (size_t n = 0; n < 3; ++n) {
      const std::vector<double> want(results[0][n].begin(), results[0][n].end());
      const Metrics m = compare(want, results[1][n]);
      EXPECT_GE(m.sqnr_db, 35) << "dim " << dim << ", "
                               << (n == 0   ? "dq"
                                   : n == 1 ? "dk"
                                            : "dv")
                               << " at " << m.worst_index << ", non-finite " << m.nonfinite_mismatch;
    }
  }
}

TEST(AttentionBwdDeviceRules, SaysWhatItRefuses) {
  if (const Status s = has_compute_capability(90); !s.ok()) GTEST_SKIP() << s.message;
  for (const int32_t dim : {64, 136}) {
    const AttentionCase c{.name = "rules", .lens_q = {40}, .lens_k = {40}, .head_dim = dim, .head_dim_v = dim};
    const MxAttention mx = quantize_case(c, make_operands(c));
    AttentionResult r = run_attention(mx, "ref", "");
    std::vector<float> dq(r.out.size()), dk = dq, dv = dq;
    const auto view = [&](std::vector<float>& x) { return make_tensor(x.data(), Dtype::f32, 40, 1, dim); };
    const AttentionBwd good{.q = mx.q.view,
                            .k = mx.k.view,
                            .v = mx.v.view,
                            .dout = mx.dout.view,
                            .out = view(r.out),
                            .lse = make_tensor(r.lse.data(), Dtype::f32, 1, 40),
                            .row_exponent = make_tensor(r.row_exponent.data(), Dtype::u8, 1, 40),
                            .dq = view(dq),
                            .dk = view(dk),
                            .dv = view(dv),
                            .backend = "sm90"};
    const auto expect_refused = [&](const AttentionBwd& a, const char* message) {
      const Status s = call(a);
      EXPECT_EQ(s.code, StatusCode::unsupported);
      EXPECT_STREQ(s.message, (std::string("attention_bwd: sm90: ") + message).c_str());
    };
    if (dim > 128) {
      expect_refused(good, "head_dim must be at most 128, got 136");
      continue;
    }
    EXPECT_TRUE(call(good).ok());
    AttentionBwd bad = good;
    bad.row_exponent = {};
    expect_refused(bad, "row_exponent must be given, got null");
    bad = good;
    bad.ds_dtype = Dtype::e5m2;
    expect_refused(bad, "ds_dtype must be e4m3, got e5m2");
    bad = good;
    bad.softmax_scale = -0.5f;
    expect_refused(bad, "softmax_scale must be positive, got -0.5");
  }
}

INSTANTIATE_TEST_SUITE_P(Calls, AttentionBwdDeviceOptions,
                         testing::Values(Options{.name = "bf16", .gradients = Dtype::bf16},
                                         Options{.name = "f16", .gradients = Dtype::f16},
                                         Options{.name = "bf16_gap8", .gradients = Dtype::bf16, .gap = 8},
                                         Options{.name = "bf16_gap3", .gradients = Dtype::bf16, .gap = 3},
                                         Options{.name = "f32_gap1", .gap = 1},
                                         Options{.name = "rotated", .rotate = true},
                                         Options{.name = "rotated_bf16", .rotate = true, .gradients = Dtype::bf16},
                                         Options{.name = "v_mean", .v_mean = true},
                                         Options{.name = "k_mean", .rotate = true, .k_mean = true},
                                         Options{.name = "dq_f16", .dq_accum = Dtype::f16}),
                         [](const auto& info) { return std::string(info.param.name); });

std::vector<AttentionCase> cases() {
  std::vector<AttentionCase> list = attention_cases();
  list.push_back({.name = "gqa_long_d128",
                  .lens_q = {700},
                  .lens_k = {1000},
                  .num_heads_q = 4,
                  .num_heads_kv = 2,
                  .head_dim = 128,
                  .head_dim_v = 128,
                  .mask = {.causal = true}});
  list.push_back(
      {.name = "flat_30000_keys_d64", .lens_q = {8}, .lens_k = {30000}, .distribution = Distribution::constant});
  return list;
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionBwdDevice, testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace mxflash::kit
