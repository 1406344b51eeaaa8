// The backward's kernels for Blackwell, simulated or emulated: cases, the call that backend sm100 would get, and the
// judgement of what comes out.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_bwd_sm100_judge.h"
#include "kit/cases.h"
#include "kit/mx_attention.h"
#include "kit/operands.h"
#include "kit/random.h"
#include "runtime/arena.h"

namespace mxflash::kit {

inline constexpr Mask kCausalMask{.causal = true};

// clang-format off
inline const std::vector<AttentionCase>& backward_cases() {
  static const std::vector<AttentionCase> cases = {
      {.name = "dense", .lens_q = {256}, .lens_k = {256}, .head_dim = 128, .head_dim_v = 128},
      {.name = "five_tiles", .lens_q = {320}, .lens_k = {256}, .head_dim = 128, .head_dim_v = 128},
      {.name = "causal", .lens_q = {256}, .lens_k = {256}, .head_dim = 128, .head_dim_v = 128, .mask = kCausalMask},
      {.name = "tails_causal", .lens_q = {97}, .lens_k = {161}, .num_heads_q = 2, .num_heads_kv = 2, .head_dim = 128,
       .head_dim_v = 128, .mask = kCausalMask},
      {.name = "more_rows_than_keys_causal_dlse", .lens_q = {193}, .lens_k = {70}, .head_dim = 128, .head_dim_v = 128,
       .mask = kCausalMask, .with_dlse = true},
      {.name = "jagged", .lens_q = {0, 1, 31, 33, 129}, .lens_k = {31, 0, 129, 33, 1}, .head_dim = 128,
       .head_dim_v = 128},
      {.name = "jagged_causal_gqa", .lens_q = {40, 1, 129}, .lens_k = {40, 129, 77}, .num_heads_q = 4,
       .num_heads_kv = 1, .head_dim = 128, .head_dim_v = 128, .mask = kCausalMask},
      {.name = "window", .lens_q = {200}, .lens_k = {200}, .head_dim = 128, .head_dim_v = 128,
       .mask = {.window_left = 17, .window_right = 5}},
      {.name = "shared_q", .lens_q = {65}, .lens_k = {64, 0, 1, 200, 33}, .num_heads_q = 2, .num_heads_kv = 1,
       .head_dim = 128, .head_dim_v = 128, .shared_q = true, .with_dlse = true},
      {.name = "dense_d64", .lens_q = {192}, .lens_k = {130}, .num_heads_q = 2, .num_heads_kv = 2},
      {.name = "jagged_causal_d64", .lens_q = {0, 1, 31, 33, 129}, .lens_k = {0, 1, 31, 33, 129}, .num_heads_q = 4,
       .num_heads_kv = 2, .mask = kCausalMask, .with_dlse = true},
      {.name = "shared_q_causal_d64", .lens_q = {40}, .lens_k = {97, 0, 40, 20}, .num_heads_q = 2, .num_heads_kv = 2,
       .mask = kCausalMask, .shared_q = true},
      {.name = "head_dim_96_80", .lens_q = {97}, .lens_k = {161}, .num_heads_q = 2, .num_heads_kv = 1, .head_dim = 96,
       .head_dim_v = 80},
      {.name = "head_dim_48_16", .lens_q = {70, 33}, .lens_k = {65, 130}, .head_dim = 48, .head_dim_v = 16,
       .mask = kCausalMask},
      {.name = "dense_d192_128", .lens_q = {256}, .lens_k = {128}, .head_dim = 192, .head_dim_v = 128},
      {.name = "jagged_causal_gqa_d192_128", .lens_q = {33, 0, 129}, .lens_k = {33, 31, 200}, .num_heads_q = 2,
       .num_heads_kv = 1, .head_dim = 192, .head_dim_v = 128, .mask = kCausalMask, .with_dlse = true},
      {.name = "shared_q_d176_112", .lens_q = {40}, .lens_k = {97, 0, 33}, .num_heads_q = 2, .num_heads_kv = 1,
       .head_dim = 176, .head_dim_v = 112, .shared_q = true},
      {.name = "dense_d256", .lens_q = {384}, .lens_k = {128}, .head_dim = 256, .head_dim_v = 256},
      {.name = "jagged_causal_gqa_d256", .lens_q = {33, 0, 129}, .lens_k = {33, 31, 200}, .num_heads_q = 2,
       .num_heads_kv = 1, .head_dim = 256, .head_dim_v = 256, .mask = kCausalMask, .with_dlse = true},
      {.name = "window_d64_160", .lens_q = {150}, .lens_k = {150}, .head_dim = 64, .head_dim_v = 160,
       .mask = {.window_left = 40, .window_right = 5}},
  };
  return cases;
}
// clang-format on

inline const AttentionCase& case_of(const std::string& name) {
  for (const AttentionCase& c : backward_cases()) {
    if (name == c.name) return c;
  }
  throw std::runtime_error("no case " + name);
}

// Every 32x32 block has a size of its own, so that a scale of another block is a wrong number.
inline void vary_blocks(std::vector<float>& x, const std::vector<int32_t>& lens, int64_t heads, int64_t dim,
                        uint64_t seed) {
  Random random(seed, 77);
  int64_t token = 0;
  for (const int32_t length : lens) {
    for (int64_t first = 0; first < length; first += kMxBlock) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t c = 0; c < dim; c += kMxBlock) {
          const float factor = std::exp2(std::floor(float(random.uniform() * 5) - 3.5f));
          for (int64_t i = first; i < std::min<int64_t>(first + kMxBlock, length); ++i) {
            for (int64_t n = c; n < std::min(c + kMxBlock, dim); ++n)
              x[size_t(((token + i) * heads + h) * dim + n)] *= factor;
          }
        }
      }
    }
    token += length;
  }
}

// A case, its forward by ref, and what the backward must give.
struct Problem {
  MxAttention mx;
  AttentionResult forward;
  BackwardJudge judge;
  // e5m2: which of q, k, v, dout is of that element; none.
  explicit Problem(const AttentionCase& c, Dtype out = Dtype::bf16, int e5m2 = -1) {
    Operands x = make_operands(c);
    std::vector<int32_t> lens_out = c.lens_q;
    if (c.shared_q) lens_out.assign(c.lens_k.size(), c.lens_q[0]);
    vary_blocks(x.q, c.lens_q, c.num_heads_q, c.head_dim, 1);
    vary_blocks(x.k, c.lens_k, c.num_heads_kv, c.head_dim, 2);
    vary_blocks(x.v, c.lens_k, c.num_heads_kv, c.head_dim_v, 3);
    vary_blocks(x.dout, lens_out, c.num_heads_q, c.head_dim_v, 4);
    mx = quantize_case(c, x);
    const auto again = [&](OwnedMx& t, const std::vector<float>& from, const Jagged& seq) {
      const auto& shape = t.view.data.shape;
      t = ref_quantize(from, shape[0], shape[1], shape[2], seq, Dtype::e5m2);
    };
    if (e5m2 == 0) again(mx.q, x.q, mx.seq_q());
    if (e5m2 == 1) again(mx.k, x.k, mx.seq_k());
    if (e5m2 == 2) again(mx.v, x.v, mx.seq_k());
    if (e5m2 == 3) again(mx.dout, x.dout, mx.seq_out());
    mx = poison_padding(mx);
    forward = run_attention(mx, "ref", "", {.out_dtype = out});
    judge = judge_backward(mx, forward);
  }
  static const Problem& of(const std::string& name) {
    static std::map<std::string, std::unique_ptr<Problem>> problems;
    std::unique_ptr<Problem>& problem = problems[name];
    if (!problem) problem = std::make_unique<Problem>(case_of(name));
    return *problem;
  }
};

// A backward call with its memory; outputs begin as NaN.
struct BackwardCall {
  std::vector<float> lse;
  std::vector<uint8_t> row_exponent, workspace;
  FloatOutput out, dq, dk, dv;
  OwnedMx dk_mx, dv_mx;
  AttentionBwd args;

  // `forward` is what the forward left; rows of no sequence are poisoned. `gradients`: the dtype of dq, dk and dv.
  BackwardCall(const MxAttention& a, const AttentionResult& forward, Dtype gradients = Dtype::f32, bool mx = true)
      : lse(forward.lse),
        row_exponent(forward.row_exponent),
        out(of(a.dout, forward.out_dtype)),
        dq(of(a.q, gradients)),
        dk(of(a.k, gradients)),
        dv(of(a.v, gradients)) {
    out.store(forward.out);
    const int64_t total_out = a.total_out(), rows = a.rows_in_sequences(), heads = a.q.view.data.shape[1];
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t row = rows; row < total_out; ++row) {
        lse[size_t(head * total_out + row)] = NAN;
        row_exponent[size_t(head * total_out + row)] = 0xFF;
        for (int64_t c = 0; c < a.v.view.data.shape[2]; ++c) {
          std::memset(out.bytes.data() +
                          size_t(((row * heads + head) * a.v.view.data.shape[2] + c) * dtype_size(forward.out_dtype)),
                      0xFF, size_t(dtype_size(forward.out_dtype)));
        }
      }
    }
    args = {.q = a.q.view,
            .k = a.k.view,
            .v = a.v.view,
            .dout = a.dout.view,
            .out = out.view,
            .lse = make_tensor(lse.data(), Dtype::f32, heads, total_out),
            .row_exponent = make_tensor(row_exponent.data(), Dtype::u8, heads, total_out),
            .dq = dq.view,
            .dk = dk.view,
            .dv = dv.view,
            .seq_q = a.seq_q(),
            .seq_k = a.seq_k(),
            .mask = a.mask,
            .softmax_scale = a.softmax_scale,
            .shared_q = a.shared_q};
    if (!a.dlse.empty()) args.dlse = make_tensor(const_cast<float*>(a.dlse.data()), Dtype::f32, heads, total_out);
    if (!mx) return;
    dk_mx = poisoned_like(a.k, a.seq_k()), dv_mx = poisoned_like(a.v, a.seq_k());
    args.dk_mx = dk_mx.view, args.dv_mx = dv_mx.view;
  }
  // Aligned, and filled with NaN.
  void* workspace_of(size_t size) {
    workspace.assign(size + kWorkspaceAlign, 0xFF);
    const auto address = reinterpret_cast<uintptr_t>(workspace.data());
    return reinterpret_cast<void*>((address + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign);
  }
  BackwardCall(const BackwardCall&) = delete;

  static FloatOutput of(const OwnedMx& like, Dtype dtype) {
    const auto& shape = like.view.data.shape;
    return FloatOutput(dtype, shape[0], shape[1], shape[2], 0xFF);
  }
  // Scales are zero, as the launcher leaves them.
  static OwnedMx poisoned_like(const OwnedMx& t, const Jagged& seq) {
    const auto& shape = t.view.data.shape;
    OwnedMx x = make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, shape[0], shape[1], shape[2], seq);
    std::fill(x.data.begin(), x.data.end(), uint8_t{0x7F});
    return x;
  }
};

struct Outputs {
  std::vector<float> dq, dk, dv;
  explicit Outputs(const BackwardCall& c) : dq(c.dq.widened()), dk(c.dk.widened()), dv(c.dv.widened()) {}
};
inline bool same_bits(const std::vector<float>& x, const std::vector<float>& y) {
  return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
}

// "" or what is wrong with a run.
inline std::string wrong_with(const Problem& p, const Outputs& o, double roundoff = 0, double tiny = 0) {
  std::string text = outside("dv", p.judge.dv, o.dv, roundoff, tiny);
  if (text.empty()) text = outside("dk", p.judge.dk, o.dk, roundoff, tiny);
  if (text.empty()) text = outside("dq", p.judge.dq, o.dq, roundoff, tiny);
  return text;
}

// dk_mx and dv_mx are what quantize makes of dk and dv in fp32.
inline void expect_mx_of(const BackwardCall& call, const MxAttention& a, const Outputs& o) {
  const auto& shape = call.dk.view.shape;
  const int64_t dim_v = call.dv.view.shape[2];
  const OwnedMx dk = ref_quantize(o.dk, shape[0], shape[1], shape[2], a.seq_k());
  const OwnedMx dv = ref_quantize(o.dv, shape[0], shape[1], dim_v, a.seq_k());
  EXPECT_EQ(call.dk_mx.data, dk.data);
  EXPECT_EQ(call.dk_mx.scale, dk.scale);
  EXPECT_EQ(call.dv_mx.data, dv.data);
  EXPECT_EQ(call.dv_mx.scale, dv.scale);
}

}  // namespace mxflash::kit
