// attention_bwd of backend sm90_bf16 on a Hopper card. Its operands are exact, so it is judged beside exact attention
// on the dequantized operands, in every case of kit/cases.h, and must not be worse than ref on the original ones.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "attention_bwd_on_card.h"
#include "captured_graph.h"
#include "kit/call.h"
#include "kit/cases.h"
#include "kit/compare.h"
#include "kit/mx_attention.h"
#include "kit/operands.h"
#include "kit/oracle.h"
#include "kit/runner.h"
#include "runtime/tensor_access.h"

namespace mxflash::kit {
namespace {

constexpr const char* kBackend = "sm90_bf16";
// P and dS are rounded to BF16, each off by at most 2^-8 of itself and a third of that on average: about 2^-9 of a sum
// of terms of either sign, 54 dB. Where terms cancel the sum is smaller than they are.
constexpr double kFloorDb = 46;
constexpr double kLargeScoresFloorDb = 32;  // a channel of 64 in all keys, whose terms of dq cancel
constexpr double kNothing = 1e-3;           // what roundoff makes of sums that are zero

double rms(const std::vector<double>& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return x.empty() ? 0 : std::sqrt(sum / double(x.size()));
}

// SQNR of got beside what is exact; where that is nothing, got must be.
void expect_exact(const char* name, const std::vector<double>& exact, const std::vector<float>& got,
                  double floor_db = kFloorDb) {
  if (rms(exact) <= 1e-6) {
    for (const float x : got) ASSERT_LE(std::fabs(x), kNothing) << name;
    return;
  }
  const Metrics m = compare(exact, got);
  EXPECT_EQ(m.nonfinite_mismatch, 0) << name << ": first at " << m.worst_index;
  EXPECT_GE(m.sqnr_db, floor_db) << name << ": worst at " << m.worst_index << ": exact "
                                 << exact[size_t(std::max<int64_t>(m.worst_index, 0))] << ", got "
                                 << got[size_t(std::max<int64_t>(m.worst_index, 0))];
}

// The forward's results as exact attention has them.
AttentionResult forward_of(const OracleResult& exact) {
  AttentionResult r;
  r.out.assign(exact.out.begin(), exact.out.end());
  r.lse.assign(exact.lse.begin(), exact.lse.end());
  return r;
}

AttentionResult backward(const MxAttention& mx, const AttentionResult& forward, const char* backend) {
  AttentionResult r;
  r.out = forward.out, r.lse = forward.lse, r.row_exponent = forward.row_exponent;
  run_backward(mx, backend, r);
  return r;
}

// Beside which nothing is rounded but sums.
AttentionResult backward_exact(MxAttention& mx, const AttentionResult& forward) {
  mx.cpu_math = CpuMath::exact;
  return backward(mx, forward, "cpu");
}

class AttentionBwdBf16Device : public testing::TestWithParam<AttentionCase> {
 protected:
  void SetUp() override {
    if (const Status s = has_compute_capability(90); !s.ok()) GTEST_SKIP() << s.message;
  }
};

TEST_P(AttentionBwdBf16Device, IsExactAttention) {
  const AttentionCase& c = GetParam();
  const Operands operands = make_operands(c);
  const MxAttention mx = quantize_case(c, operands);
  const OracleResult exact = oracle_attention(dequantized_problem(c, mx));
  const AttentionResult forward = forward_of(exact), got = backward(mx, forward, kBackend);
  const bool large = c.distribution == Distribution::negative_logits;
  expect_exact("dq", exact.dq, got.dq, large ? kLargeScoresFloorDb : kFloorDb);
  expect_exact("dk", exact.dk, got.dk);
  expect_exact("dv", exact.dv, got.dv);
  for (size_t i = 0; i < got.dv.size(); ++i) ASSERT_FALSE(exact.dv[i] == 0 && got.dv[i] != 0) << "dv at " << i;

  const auto check_mx = [&](const char* name, const std::vector<float>& x, const OwnedMx& have) {
    const auto& shape = have.view.data.shape;
    const OwnedMx want = ref_quantize(x, shape[0], shape[1], shape[2], mx.seq_k());
    EXPECT_EQ(want.data, have.data) << name;
    EXPECT_EQ(want.scale, have.scale) << name;
  };
  check_mx("dk_mx", got.dk, got.dk_mx);
  check_mx("dv_mx", got.dv, got.dv_mx);

  const AttentionResult again = backward(mx, forward, kBackend);
  EXPECT_TRUE(same_bits(got.dq, again.dq));
  EXPECT_TRUE(same_bits(got.dk, again.dk));
  EXPECT_TRUE(same_bits(got.dv, again.dv));
}

// What must not matter: padding, and the form of the scales (here also other payloads for contractions over tokens).
TEST_P(AttentionBwdBf16Device, PaddingAndFormDoNotMatter) {
  const AttentionCase& c = GetParam();
  const MxAttention mx = quantize_case(c, make_operands(c));
  const AttentionResult got = run_attention(mx, "ref", kBackend);
  for (const MxAttention& other : {poison_padding(mx), poison_padding(expand_squares(mx, ScaleLayout::atom128x4))}) {
    EXPECT_EQ(compare_bits(mx, got, other, run_attention(other, "ref", kBackend)), "");
  }
}

TEST_P(AttentionBwdBf16Device, NotWorseThanRef) {
  const AttentionCase& c = GetParam();
  const Operands operands = make_operands(c);
  const MxAttention mx = quantize_case(c, operands);
  const AttentionResult forward = run_attention(mx, "ref", "");
  const AttentionResult ref = backward(mx, forward, "ref"), got = backward(mx, forward, kBackend);
  const OracleResult exact = oracle_attention(make_problem(c, operands));
  for (const auto& [name, truth, want, have] :
       {std::tuple("dq", &exact.dq, &ref.dq, &got.dq), std::tuple("dk", &exact.dk, &ref.dk, &got.dk),
        std::tuple("dv", &exact.dv, &ref.dv, &got.dv)}) {
    if (rms(*truth) <= 1e-6) continue;  // above
    const BesideRef b = beside_ref(*truth, *want, *have, 0, 1e-3);
    EXPECT_TRUE(b.ok()) << name << ": " << b.got.sqnr_db << " dB, ref " << b.ref.sqnr_db << " dB";
  }
}

std::vector<AttentionCase> cases() {
  std::vector<AttentionCase> list = attention_cases();
  constexpr Mask kCausal{.causal = true};
  const auto add = [&](AttentionCase c) { list.push_back(std::move(c)); };
  add({.name = "gqa_long_d128",
       .lens_q = {700},
       .lens_k = {1000},
       .num_heads_q = 4,
       .num_heads_kv = 2,
       .head_dim = 128,
       .head_dim_v = 128,
       .mask = kCausal});
  add({.name = "gqa_long_d256",
       .lens_q = {700},
       .lens_k = {1000},
       .num_heads_q = 4,
       .num_heads_kv = 2,
       .head_dim = 256,
       .head_dim_v = 256,
       .mask = kCausal});
  add({.name = "window_d192",
       .lens_q = {300, 500},
       .lens_k = {400, 450},
       .num_heads_q = 2,
       .head_dim = 192,
       .head_dim_v = 192,
       .mask = {.window_left = 100, .window_right = 30}});
  add({.name = "gqa_jagged_d192_128",
       .lens_q = {0, 300, 65, 1},
       .lens_k = {64, 290, 0, 700},
       .num_heads_q = 6,
       .num_heads_kv = 2,
       .head_dim = 192,
       .head_dim_v = 128,
       .slack_q = 3,
       .slack_k = 200,
       .with_dlse = true});
  add({.name = "shared_q_d256",
       .lens_q = {100},
       .lens_k = {40, 0, 300},
       .num_heads_q = 2,
       .num_heads_kv = 1,
       .head_dim = 256,
       .head_dim_v = 256,
       .shared_q = true});
  add({.name = "long_d64", .lens_q = {2000}, .lens_k = {2000}, .num_heads_q = 2, .num_heads_kv = 2, .mask = kCausal});
  return list;
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionBwdBf16Device, testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// What a call may ask for beyond the cases, beside backend cpu in exact arithmetic.
struct Options {
  const char* name;
  bool rotate = false, v_mean = false, k_mean = false, shared_q = false, row32 = false;
  Dtype gradients = Dtype::f32, element = Dtype::e4m3, out = Dtype::f32;
  float softmax_scale = 0;
  int64_t gap = 0;  // elements between heads
};

class AttentionBwdBf16DeviceOptions : public testing::TestWithParam<Options> {};

TEST_P(AttentionBwdBf16DeviceOptions, BesideExactArithmetic) {
  if (const Status s = has_compute_capability(90); !s.ok()) GTEST_SKIP() << s.message;
  const Options& o = GetParam();
  for (const auto& [dim, dim_v] :
       {std::pair(256, 256), {192, 128}, {192, 192}, {128, 128}, {96, 96}, {64, 64}, {40, 40}}) {
    SCOPED_TRACE("head_dim " + std::to_string(dim) + ", " + std::to_string(dim_v));
    const AttentionCase c{.name = "options",
                          .lens_q = o.shared_q ? std::vector<int32_t>{150} : std::vector<int32_t>{150, 1, 300},
                          .lens_k = {200, 64, 300},
                          .num_heads_q = 4,
                          .num_heads_kv = 2,
                          .head_dim = dim,
                          .head_dim_v = dim_v,
                          .mask = {.causal = true},
                          .shared_q = o.shared_q,
                          .with_dlse = o.k_mean};
    const MxAttention mx = quantize_case(c, make_operands(c), o.element, o.row32 ? MxBlock::row32 : MxBlock::square32);
    const int64_t batch = 3, heads = 4, heads_kv = 2, total = mx.total_out();
    const auto means = [&](int64_t channels) {
      std::vector<float> mean(size_t(batch * heads_kv * channels));
      for (size_t i = 0; i < mean.size(); ++i) mean[i] = float(int(i * 37 % 19) - 9) / 8;
      return mean;
    };
    std::vector<float> v_mean = means(dim_v), k_mean = means(dim);
    std::vector<float> dlse = mx.dlse;
    const AttentionResult forward = run_attention(mx, "ref", "", {.v_mean = o.v_mean ? v_mean : std::vector<float>{}});
    Output out(make_tensor(nullptr, Dtype::f32, total, heads, int64_t(dim_v)), o.out, o.gap);
    for (int64_t row = 0; row < total * heads; ++row) {
      for (int64_t n = 0; n < dim_v; ++n) {
        store_float(out.view, row * (dim_v + o.gap) + n, forward.out[size_t(row * dim_v + n)]);
      }
    }
    std::vector<float> lse = forward.lse;
    std::vector<std::vector<float>> results[2];
    for (const char* backend : {"cpu", kBackend}) {
      const bool is_cpu = backend == std::string("cpu");
      const Dtype dtype = is_cpu ? Dtype::f32 : o.gradients;
      Output dq(mx.q.view.data, dtype, o.gap), dk(mx.k.view.data, dtype, o.gap), dv(mx.v.view.data, dtype, o.gap);
      AttentionBwd a{.q = mx.q.view,
                     .k = mx.k.view,
                     .v = mx.v.view,
                     .dout = mx.dout.view,
                     .q_col = mx.q_col.view,
                     .k_col = mx.k_col.view,
                     .dout_col = mx.dout_col.view,
                     .out = out.view,
                     .lse = make_tensor(lse.data(), Dtype::f32, heads, total),
                     .dq = dq.view,
                     .dk = dk.view,
                     .dv = dv.view,
                     .rotate_qk = o.rotate,
                     .seq_q = mx.seq_q(),
                     .seq_k = mx.seq_k(),
                     .mask = mx.mask,
                     .softmax_scale = o.softmax_scale,
                     .shared_q = o.shared_q,
                     .cpu_math = CpuMath::exact,
                     .backend = backend};
      if (o.v_mean) a.v_mean = make_tensor(v_mean.data(), Dtype::f32, batch, heads_kv, int64_t(dim_v));
      if (o.k_mean) {
        a.k_mean = make_tensor(k_mean.data(), Dtype::f32, batch, heads_kv, int64_t(dim));
        a.dlse = make_tensor(dlse.data(), Dtype::f32, heads, total);
      }
      require_ok(call(a));
      results[is_cpu ? 0 : 1] = {dq.values(), dk.values(), dv.values()};
      for (const Output* x : {&dq, &dk, &dv}) EXPECT_TRUE(x->gaps_are_untouched());
    }
    for (size_t n = 0; n < 3; ++n) {
      expect_exact(n == 0 ? "dq" : n == 1 ? "dk" : "dv", {results[0][n].begin(), results[0][n].end()}, results[1][n]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Calls, AttentionBwdBf16DeviceOptions,
    testing::Values(
        Options{.name = "plain"}, Options{.name = "bf16", .gradients = Dtype::bf16, .out = Dtype::bf16},
        Options{.name = "f16", .gradients = Dtype::f16, .out = Dtype::f16},
        Options{.name = "bf16_gap8", .gradients = Dtype::bf16, .out = Dtype::bf16, .gap = 8},
        Options{.name = "bf16_gap3", .gradients = Dtype::bf16, .out = Dtype::bf16, .gap = 3},
        Options{.name = "f32_gap1", .gap = 1}, Options{.name = "rotated", .rotate = true},
        Options{.name = "rotated_bf16", .rotate = true, .gradients = Dtype::bf16},
        Options{.name = "v_mean", .v_mean = true}, Options{.name = "k_mean", .rotate = true, .k_mean = true},
        Options{.name = "shared_q", .rotate = true, .k_mean = true, .shared_q = true, .gradients = Dtype::bf16},
        Options{.name = "row32", .row32 = true}, Options{.name = "row32_shared_q", .shared_q = true, .row32 = true},
        Options{.name = "e5m2", .element = Dtype::e5m2}, Options{.name = "negative_scale", .softmax_scale = -0.1f}),
    [](const auto& info) { return std::string(info.param.name); });

// A NaN reaches what it is a term of, in the tiles that the kernel takes too; nothing is hidden here.
TEST(AttentionBwdBf16DeviceValues, NanGoesWhereItIsATerm) {
  if (const Status s = has_compute_capability(90); !s.ok()) GTEST_SKIP() << s.message;
  for (const int32_t dim : {64, 256}) {
    const AttentionCase c{.name = "nan", .lens_q = {200}, .lens_k = {150}, .head_dim = dim, .head_dim_v = dim};
    for (const int operand : {0, 1, 2, 3}) {
      SCOPED_TRACE("head_dim " + std::to_string(dim) + ", operand " + std::to_string(operand));
      MxAttention mx = quantize_case(c, make_operands(c));
      AttentionResult forward = run_attention(mx, "ref", "");
      OwnedMx* const owned[] = {&mx.q, &mx.k, &mx.v, &mx.dout};
      owned[operand]->data[size_t(70 * dim + 9)] = 0x7F;
      // As if the forward had seen it: only what does not depend on the order of operations.
      const AttentionResult want = backward_exact(mx, forward), got = backward(mx, forward, kBackend);
      for (const auto& [name, a, b] : {std::tuple("dq", &want.dq, &got.dq), std::tuple("dk", &want.dk, &got.dk),
                                       std::tuple("dv", &want.dv, &got.dv)}) {
        int64_t wrong = 0;
        for (size_t n = 0; n < a->size(); ++n) wrong += std::isnan((*a)[n]) != std::isnan((*b)[n]);
        EXPECT_EQ(wrong, 0) << name;
      }
    }
  }
}

// Operands, results and workspace of a call in the card's memory.
struct CardCall {
  std::vector<DeviceBuffer> memory;
  DeviceBuffer dq, dk, dv, workspace;
  AttentionBwd args;
  DeviceBuffer& keep(DeviceBuffer b) { return memory.emplace_back(std::move(b)); }
  MxTensor mx(const OwnedMx& t) {
    MxTensor view = t.view;
    view.data.data = keep(upload(t.data)).data(), view.scale.data = keep(upload(t.scale)).data();
    view.data.device = view.scale.device = kCard;
    return view;
  }
  Tensor floats(const std::vector<float>& x, int64_t a, int64_t b) {
    return on_card(make_tensor(keep(upload(x)).data(), Dtype::f32, a, b));
  }
  CardCall(const MxAttention& a, const AttentionResult& forward, const Jagged& seq) {
    memory.reserve(16);
    const Tensor &q = a.q.view.data, &k = a.k.view.data, &v = a.v.view.data;
    const auto gradient = [](const DeviceBuffer& b, const Tensor& like) {
      return on_card(make_tensor(b.data(), Dtype::f32, like.shape[0], like.shape[1], like.shape[2]));
    };
    dq = DeviceBuffer(size_t(q.numel()) * 4);
    dk = DeviceBuffer(size_t(k.numel()) * 4);
    dv = DeviceBuffer(size_t(v.numel()) * 4);
    args.q = mx(a.q), args.k = mx(a.k), args.v = mx(a.v), args.dout = mx(a.dout);
    Tensor out = floats(forward.out, q.shape[0], q.shape[1] * v.shape[2]);
    args.out = on_card(make_tensor(out.data, Dtype::f32, q.shape[0], q.shape[1], v.shape[2]));
    args.lse = floats(forward.lse, q.shape[1], q.shape[0]);
    args.dq = gradient(dq, q), args.dk = gradient(dk, k), args.dv = gradient(dv, v);
    args.seq_q = args.seq_k = seq;
    args.mask.causal = true;
    args.backend = kBackend;
  }
  Status enqueue(Stream stream) {
    if (const size_t need = attention_bwd_workspace(args); workspace.size() < need) workspace = DeviceBuffer(need);
    args.workspace = workspace.data(), args.workspace_size = workspace.size();
    for (const DeviceBuffer* b : {&workspace, &dq, &dk, &dv}) b->fill(0xFF, stream);
    return attention_bwd(args, stream);
  }
  std::vector<std::vector<float>> results() const {
    return {download<float>(dq), download<float>(dk), download<float>(dv)};
  }
  std::vector<std::vector<float>> run() {
    const Status s = enqueue(nullptr);
    EXPECT_TRUE(s.ok()) << s.message;
    return results();
  }
};

bool same_bits(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) { return kit::same_bits(x, y); });
}

// Neither how loose max_seqlen is nor whether a captured call is replayed, with other lengths in the same cu_seqlens,
// changes a bit.
TEST(AttentionBwdBf16DeviceValues, LooseMaxSeqlenAndGraphs) {
  if (const Status s = has_compute_capability(90); !s.ok()) GTEST_SKIP() << s.message;
  const std::vector<int32_t> before{0, 200, 500, 900}, after{0, 1, 1, 513};
  const DeviceBuffer cu = upload(before);
  for (const int32_t dim : {128, 192}) {
    const AttentionCase c{.name = "graph",
                          .lens_q = {1000},
                          .lens_k = {1000},
                          .num_heads_q = 4,
                          .num_heads_kv = 2,
                          .head_dim = dim,
                          .head_dim_v = dim};
    MxAttention mx = quantize_case(c, make_operands(c));
    for (OwnedMx* t : {&mx.q, &mx.k, &mx.v, &mx.dout}) {  // one scale, valid under any lengths
      t->scale.assign(size_t(scale_size(MxBlock::square32, ScaleLayout::linear, 1000, t->view.data.shape[1], dim,
                                        {before.data(), 3, 1000})),
                      120);
      t->view = make_mx_tensor(t->data.data(), t->scale.data(), Dtype::e4m3, MxBlock::square32, ScaleLayout::linear,
                               1000, t->view.data.shape[1], dim, {before.data(), 3, 1000});
    }
    AttentionResult forward;
    forward.out.assign(size_t(1000 * 4 * dim), 0.25f);
    forward.lse.assign(4000, 6.0f);
    CardCall call(mx, forward, {static_cast<const int32_t*>(cu.data()), 3, 400});
    call.args.seq_q.max_seqlen = call.args.seq_k.max_seqlen = 1 << 30;
    call.run();
    const CapturedGraph graph([&](Stream stream) { require_ok(call.enqueue(stream)); });
    for (const std::vector<int32_t>& lengths : {after, before, after}) {
      cu.upload(lengths.data(), cu.size(), nullptr);
      graph.replay();
      const auto replayed = call.results();
      call.args.seq_q.max_seqlen = call.args.seq_k.max_seqlen = 1 << 30;
      EXPECT_TRUE(same_bits(call.run(), replayed));
      call.args.seq_q.max_seqlen = call.args.seq_k.max_seqlen = 520;
      EXPECT_TRUE(same_bits(call.run(), replayed));
    }
  }
}

}  // namespace
}  // namespace mxflash::kit
