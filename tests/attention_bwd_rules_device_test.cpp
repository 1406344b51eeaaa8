// What attention_bwd on sm90 does with NaN and Inf, and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "attention_bwd_on_card.h"
#include "kit/call.h"

namespace mxflash::kit {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kRows = 300, kKeys = 500, kHeads = 2, kDim = 64;
constexpr int64_t kRowTile = 64, kKeyTile = 128;

// One wrong number in head 1: where it is, and which gradients it must reach.
struct Fault {
  const char* name;
  float value;
  int64_t token;
  bool in_q = false, in_k = false, in_v = false, in_dout = false, in_dlse = false, in_out = false, in_lse = false;
  Mask mask{};
};

void PrintTo(const Fault& f, std::ostream* os) { *os << f.name; }

class AttentionBwdNan : public OnHopper, public testing::WithParamInterface<Fault> {};

// Every gradient that depends on it, as exact arithmetic has it, is NaN or Inf; nothing is that shares no tile with it,
// where a tile is 64 rows and 128 keys of which any pair is visible.
TEST_P(AttentionBwdNan, ReachesWhatDependsOnIt) {
  const Fault& f = GetParam();
  const AttentionCase c{.name = "nan",
                        .lens_q = {int32_t(kRows)},
                        .lens_k = {int32_t(kKeys)},
                        .num_heads_q = int32_t(kHeads),
                        .num_heads_kv = int32_t(kHeads),
                        .mask = f.mask,
                        .with_dlse = true};
  Operands x = make_operands(c);
  const auto at = size_t((f.token * kHeads + 1) * kDim + 40);
  const size_t row_at = size_t(kRows + f.token);
  if (f.in_q) x.q[at] = f.value;
  if (f.in_k) x.k[at] = f.value;
  if (f.in_v) x.v[at] = f.value;
  if (f.in_dout) x.dout[at] = f.value;
  if (f.in_dlse) x.dlse[row_at] = f.value;
  const MxAttention mx = quantize_case(c, x);
  AttentionResult got = run_attention(mx, "ref", "", {.out_dtype = Dtype::bf16});
  if (f.in_out) got.out[at] = f.value;
  if (f.in_lse) got.lse[row_at] = f.value;
  run_backward(mx, "sm90", got);

  // Rows and keys that the fault lies in: a block of 32 tokens shares a scale.
  const bool block = f.in_q || f.in_k || f.in_v || f.in_dout;
  const int64_t first = block ? f.token / 32 * 32 : f.token, end = block ? first + 32 : first + 1;
  const bool of_keys = f.in_k || f.in_v;
  const bool reaches_p = f.in_q || f.in_k || f.in_lse;
  std::vector<bool> bad_row(size_t(kRows), false);  // rows whose dS is not finite, but for hidden keys
  const auto sees = [&](int64_t i) { return visible_keys(f.mask, i, i + 1, kRows, kKeys); };
  for (int64_t i = 0; i < kRows; ++i) {
    const Range keys = sees(i);
    bad_row[size_t(i)] = of_keys ? keys.first < end && first < keys.end : first <= i && i < end && !keys.empty();
  }
  std::vector<bool> bad_key(size_t(kKeys), false), near_row(size_t(kRows), false), near_key(size_t(kKeys), false);
  for (int64_t i = 0; i < kRows; ++i) {
    const Range keys = sees(i);
    if (bad_row[size_t(i)]) std::fill(bad_key.begin() + keys.first, bad_key.begin() + keys.end, true);
  }
  // A pair of tiles in which a wrong row or key lies, be it hidden there.
  for (int64_t r = 0; r < kRows; r += kRowTile) {
    for (int64_t n = 0; n < kKeys; n += kKeyTile) {
      const int64_t r1 = std::min(r + kRowTile, kRows), n1 = std::min(n + kKeyTile, kKeys);
      const Range keys = visible_keys(f.mask, r, r1, kRows, kKeys);
      if (keys.empty() || keys.first >= n1 || n >= keys.end) continue;
      const bool row = std::any_of(bad_row.begin() + r, bad_row.begin() + r1, [](bool b) { return b; });
      if (!row && !(of_keys && first < n1 && n < end)) continue;
      std::fill(near_row.begin() + r, near_row.begin() + r1, true);
      std::fill(near_key.begin() + n, near_key.begin() + n1, true);
    }
  }
  struct Counts {
    int64_t missing = 0, stray = 0, other_head = 0, first = -1;
  };
  const auto count = [&](const std::vector<float>& g, const std::vector<bool>& must, const std::vector<bool>& may) {
    Counts n;
    for (size_t i = 0; i < g.size(); ++i) {
      const size_t token = i / size_t(kHeads * kDim), head = i / size_t(kDim) % size_t(kHeads);
      const bool finite = std::isfinite(g[i]);
      const int64_t missing = head == 1 && must[token] && finite, stray = head == 1 && !may[token] && !finite;
      if (n.first < 0 && missing + stray > 0) n.first = int64_t(token);
      n.missing += missing;
      n.stray += stray;
      n.other_head += head == 0 && !finite;
    }
    return n;
  };
  const auto expect = [&](const char* name, const std::vector<float>& g, const std::vector<bool>& must,
                          const std::vector<bool>& may) {
    const Counts n = count(g, must, may);
    EXPECT_EQ(n.missing, 0) << name << ": finite though it depends on it, first of token " << n.first;
    EXPECT_EQ(n.stray, 0) << name << ": not finite far from it, first of token " << n.first;
    EXPECT_EQ(n.other_head, 0) << name << " of the other head";
  };
  expect("dq", got.dq, bad_row, near_row);
  expect("dk", got.dk, bad_key, near_key);
  const std::vector<bool> none(size_t(kKeys), false);
  if (reaches_p) {
    expect("dv", got.dv, bad_key, near_key);
  } else if (f.in_dout) {  // in the channels of its block
    expect("dv", got.dv, none, near_key);
    for (int64_t j = 0; j < kKeys; ++j) {
      if (bad_key[size_t(j)]) {
        EXPECT_FALSE(std::isfinite(got.dv[size_t((j * kHeads + 1) * kDim + 40)])) << j;
      }
    }
  } else {
    expect("dv", got.dv, none, none);
  }
}

constexpr Mask kCausal{.causal = true}, kWindow{.window_left = 50, .window_right = 20};
INSTANTIATE_TEST_SUITE_P(
    Faults, AttentionBwdNan,
    testing::Values(Fault{.name = "q", .value = kNan, .token = 100, .in_q = true},
                    Fault{.name = "q_causal", .value = kNan, .token = 100, .in_q = true, .mask = kCausal},
                    Fault{.name = "k_causal", .value = kNan, .token = 400, .in_k = true, .mask = kCausal},
                    Fault{.name = "k_window", .value = kInf, .token = 300, .in_k = true, .mask = kWindow},
                    Fault{.name = "v_inf", .value = kInf, .token = 100, .in_v = true},
                    Fault{.name = "v_causal", .value = kNan, .token = 400, .in_v = true, .mask = kCausal},
                    Fault{.name = "dout", .value = kNan, .token = 170, .in_dout = true},
                    Fault{.name = "dout_window", .value = kInf, .token = 170, .in_dout = true, .mask = kWindow},
                    Fault{.name = "dlse_nan", .value = kNan, .token = 170, .in_dlse = true},
                    Fault{.name = "dlse_inf", .value = kInf, .token = 170, .in_dlse = true},
                    Fault{
                        .name = "dlse_minus_inf_causal", .value = -kInf, .token = 9, .in_dlse = true, .mask = kCausal},
                    Fault{.name = "out_inf", .value = kInf, .token = 170, .in_out = true},
                    Fault{.name = "out_nan_window", .value = kNan, .token = 170, .in_out = true, .mask = kWindow},
                    Fault{.name = "lse_nan", .value = kNan, .token = 170, .in_lse = true, .mask = kCausal}),
    [](const auto& info) { return std::string(info.param.name); });

class AttentionBwdRules : public OnHopper {};

// A row that sees no key depends on nothing, whatever its out, dlse and dout are.
TEST_F(AttentionBwdRules, HiddenRowsStayZero) {
  const AttentionCase c{.name = "hidden",
                        .lens_q = {200, 70},
                        .lens_k = {100, 0},
                        .mask = {.causal = true},
                        .with_dlse = true};  // rows 0 .. 99, and all of the second sequence
  Operands x = make_operands(c);
  const auto run = [&] {
    MxAttention mx = quantize_case(c, x);
    mx.deterministic = true;
    AttentionResult r = run_attention(mx, "ref", "", {.out_dtype = Dtype::bf16});
    run_backward(mx, "sm90", r);
    return r;
  };
  const AttentionResult want = run();
  for (int64_t i = 0; i < 270; ++i) {
    if (i < 100 || i >= 200) x.dlse[size_t(i)] = i % 2 ? kNan : kInf;
  }
  const AttentionResult got = run();
  for (size_t i = 0; i < got.dq.size(); ++i) {
    const size_t token = i / size_t(kDim);
    ASSERT_TRUE(got.dq[i] == 0 || (token >= 100 && token < 200)) << token;
  }
  EXPECT_EQ(got.dq, want.dq);
  EXPECT_EQ(got.dk, want.dk);
  EXPECT_EQ(got.dv, want.dv);
}

TEST_F(AttentionBwdRules, SaysWhatItRefuses) {
  for (const int32_t dim : {64, 136}) {
    const AttentionCase c{.name = "rules", .lens_q = {40}, .lens_k = {40}, .head_dim = dim, .head_dim_v = 64};
    const MxAttention mx = quantize_case(c, make_operands(c));
    const AttentionResult forward = run_attention(mx, "ref", "", {.out_dtype = Dtype::bf16});
    CardBackward b(mx, forward);
    const AttentionBwd good = b.args;
    DeviceBuffer workspace(std::max<size_t>(attention_bwd_workspace(good), 1));
    const auto status = [&](AttentionBwd a) {
      a.workspace = workspace.data();
      a.workspace_size = workspace.size();
      return attention_bwd(a);
    };
    const auto expect_refused = [&](const AttentionBwd& a, const char* message) {
      const Status s = status(a);
      EXPECT_EQ(s.code, StatusCode::unsupported);
      EXPECT_STREQ(s.message, (std::string("attention_bwd: sm90: ") + message).c_str());
      EXPECT_EQ(attention_bwd_workspace(a), 0u);
    };
    if (dim > 128) {
      expect_refused(good, "head_dim must be at most 128, got 136");
      continue;
    }
    EXPECT_TRUE(status(good).ok()) << status(good).message;
    AttentionBwd bad = good;
    bad.row_exponent = {};
    expect_refused(bad, "row_exponent must be given, got null");
    bad = good;
    bad.ds_dtype = Dtype::e5m2;
    expect_refused(bad, "ds_dtype must be e4m3, got e5m2");
    bad = good;
    bad.softmax_scale = -0.5f;
    expect_refused(bad, "softmax_scale must be positive, got -0.5");
    bad = good;
    bad.workspace = workspace.data();
    bad.workspace_size = workspace.size() - 1;
    EXPECT_EQ(attention_bwd(bad).code, StatusCode::workspace_too_small);
  }
  AttentionCase c{.name = "rules", .lens_q = {40}, .lens_k = {40}, .head_dim = 64, .head_dim_v = 136};
  const MxAttention mx = quantize_case(c, make_operands(c));
  const CardBackward b(mx, run_attention(mx, "ref", "", {.out_dtype = Dtype::bf16}));
  EXPECT_STREQ(attention_bwd(b.args).message, "attention_bwd: sm90: head_dim_v must be at most 128, got 136");
}

// More than a kernel can count is refused before anything is read.
TEST_F(AttentionBwdRules, RefusesWhatItCannotCount) {
  const AttentionCase c{.name = "rules", .lens_q = {40}, .lens_k = {40}, .num_heads_q = 2, .num_heads_kv = 2};
  const MxAttention mx = quantize_case(c, make_operands(c));
  const CardBackward b(mx, run_attention(mx, "ref", "", {.out_dtype = Dtype::bf16}));
  const auto expect_refused = [&](int64_t tokens, int64_t heads, const char* what) {
    AttentionBwd a = b.args;
    const auto widen = [&](Tensor& t) {
      t.shape[0] = tokens;
      t.shape[1] = heads;
      t.stride = {heads * t.shape[2], t.shape[2], 1, 0};
    };
    for (MxTensor* t : {&a.q, &a.k, &a.v, &a.dout}) {
      *t = make_mx_tensor(t->data.data, t->scale.data, t->data.dtype, t->block, t->layout, tokens, heads,
                          t->data.shape[2], Jagged{});
      t->data.device = t->scale.device = kCard;
    }
    for (Tensor* t : {&a.out, &a.dq, &a.dk, &a.dv}) widen(*t);
    for (Tensor* t : {&a.lse, &a.row_exponent}) {
      t->shape = {heads, tokens, 0, 0};
      t->stride = {tokens, 1, 0, 0};
    }
    const Status s = attention_bwd(a);
    EXPECT_EQ(s.code, StatusCode::unsupported) << s.message;
    EXPECT_NE(std::string(s.message).find(what), std::string::npos) << s.message;
  };
  expect_refused(40, 65536, "num_heads_q must be at most 65535, got 65536");
  expect_refused(int64_t(1) << 30, 1024, "tiles");
}

}  // namespace
}  // namespace mxflash::kit
