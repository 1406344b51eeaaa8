// attention_fwd and attention_bwd on MX operands: identities that hold bit for bit, whatever the numbers are. How close
// the numbers are to exact attention is the business of check_test and reports_test.
#include <gtest/gtest.h>
#include <mxflash/attention.h>
#include <mxflash/backend.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kit/compare.h"
#include "kit/random.h"
#include "kit/runner.h"
#include "mx/float16.h"

namespace mxflash {
namespace {

using kit::OwnedMx;
using kit::require_ok;

std::vector<float> normal(int64_t n, uint64_t stream) {
  std::vector<float> x(size_t(n), 0.0f);
  kit::Random random(11, stream);
  kit::fill_normal(random, x);
  return x;
}

// Everything of one call, owned. Set the public members, then run().
struct Attention {
  std::vector<int32_t> cu_q, cu_k;
  int64_t heads_q = 2, heads_kv = 2, dim = 64, dim_v = 64;
  Mask mask{};
  bool shared_q = false, with_row_exponent = true;
  Dtype out_dtype = Dtype::f32, grad_element = Dtype::e4m3, dq_accum = Dtype::f32;
  MxBlock block = MxBlock::square32, block_col = MxBlock::square32;
  std::vector<float> q, k, v, dout;

  std::vector<float> out, lse, dq, dk, dv;
  std::vector<uint8_t> row_exponent;
  OwnedMx dk_mx, dv_mx;

  static Jagged jagged(const std::vector<int32_t>& cu) {
    int32_t max = 0;
    for (size_t b = 1; b < cu.size(); ++b) max = std::max(max, cu[b] - cu[b - 1]);
    return {.cu_seqlens = cu.data(), .batch = int32_t(cu.size()) - 1, .max_seqlen = max};
  }
  int64_t total_q() const { return cu_q.back(); }
  int64_t total_k() const { return cu_k.back(); }
  int64_t batch() const { return int64_t(cu_k.size()) - 1; }
  int64_t total_out() const { return shared_q ? batch() * total_q() : total_q(); }
  Jagged seq_q() const { return shared_q ? Jagged{} : jagged(cu_q); }
  Jagged seq_k() const { return jagged(cu_k); }
  Jagged seq_out() const { return shared_q ? Jagged{.batch = int32_t(batch())} : seq_q(); }

  void fill() {
    q = normal(total_q() * heads_q * dim, 1);
    k = normal(total_k() * heads_kv * dim, 2);
    v = normal(total_k() * heads_kv * dim_v, 3);
    dout = normal(total_out() * heads_q * dim_v, 4);
  }

  void run() {
    const auto mx = [&](std::vector<float>& x, int64_t tokens, int64_t heads, int64_t d, const Jagged& seq, MxBlock b,
                        Dtype element = Dtype::e4m3) {
      return kit::quantize_floats(x, tokens, heads, d, seq, element, b);
    };
    const OwnedMx mq = mx(q, total_q(), heads_q, dim, seq_q(), block),
                  mk = mx(k, total_k(), heads_kv, dim, seq_k(), block);
    const OwnedMx mv = mx(v, total_k(), heads_kv, dim_v, seq_k(), block);
    const OwnedMx mv_col = mx(v, total_k(), heads_kv, dim_v, seq_k(), block_col);
    const OwnedMx mdo = mx(dout, total_out(), heads_q, dim_v, seq_out(), block, grad_element);
    const OwnedMx mq_col = mx(q, total_q(), heads_q, dim, seq_q(), block_col);
    const OwnedMx mk_col = mx(k, total_k(), heads_kv, dim, seq_k(), block_col);
    const OwnedMx mdo_col = mx(dout, total_out(), heads_q, dim_v, seq_out(), block_col, grad_element);
    const bool two = block != block_col;

    const auto output = [&](std::vector<uint8_t>& bytes, int64_t tokens, int64_t heads, int64_t d) {
      bytes.assign(size_t(tokens * heads * d * dtype_size(out_dtype)), 0xAB);
      return make_tensor(bytes.data(), out_dtype, tokens, heads, d);
    };
    std::vector<uint8_t> out_bytes, dq_bytes, dk_bytes, dv_bytes;
    lse.assign(size_t(heads_q * total_out()), NAN);
    row_exponent.assign(size_t(heads_q * total_out()), 0xAB);
    AttentionFwd fwd{.q = mq.view,
                     .k = mk.view,
                     .v = two ? mv_col.view : mv.view,
                     .out = output(out_bytes, total_out(), heads_q, dim_v),
                     .lse = make_tensor(lse.data(), Dtype::f32, heads_q, total_out()),
                     .row_exponent = make_tensor(row_exponent.data(), Dtype::u8, heads_q, total_out()),
                     .seq_q = seq_q(),
                     .seq_k = seq_k(),
                     .mask = mask,
                     .shared_q = shared_q};
    const kit::AlignedBuffer fwd_workspace(attention_fwd_workspace(fwd));
    fwd.workspace = fwd_workspace.data();
    fwd.workspace_size = fwd_workspace.size();
    require_ok(attention_fwd(fwd));

    dk_mx = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, total_k(), heads_kv, dim, seq_k());
    dv_mx =
        kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, total_k(), heads_kv, dim_v, seq_k());
    AttentionBwd bwd{.q = mq.view,
                     .k = mk.view,
                     .v = mv.view,
                     .dout = mdo.view,
                     .out = fwd.out,
                     .lse = fwd.lse,
                     .dq = output(dq_bytes, total_q(), heads_q, dim),
                     .dk = output(dk_bytes, total_k(), heads_kv, dim),
                     .dv = output(dv_bytes, total_k(), heads_kv, dim_v),
                     .dk_mx = dk_mx.view,
                     .dv_mx = dv_mx.view,
                     .ds_dtype = grad_element,
                     .dq_accum = dq_accum,
                     .seq_q = seq_q(),
                     .seq_k = seq_k(),
                     .mask = mask,
                     .shared_q = shared_q};
    if (with_row_exponent) bwd.row_exponent = fwd.row_exponent;
    if (two) {
      bwd.q_col = mq_col.view;
      bwd.k_col = mk_col.view;
      bwd.dout_col = mdo_col.view;
    }
    const kit::AlignedBuffer bwd_workspace(attention_bwd_workspace(bwd));
    bwd.workspace = bwd_workspace.data();
    bwd.workspace_size = bwd_workspace.size();
    require_ok(attention_bwd(bwd));
    out = widen(out_bytes);
    dq = widen(dq_bytes);
    dk = widen(dk_bytes);
    dv = widen(dv_bytes);
  }

  std::vector<float> widen(const std::vector<uint8_t>& bytes) const {
    std::vector<float> x(bytes.size() / size_t(dtype_size(out_dtype)));
    for (size_t i = 0; i < x.size(); ++i) {
      if (out_dtype == Dtype::f32) x[i] = reinterpret_cast<const float*>(bytes.data())[i];
      if (out_dtype == Dtype::bf16) x[i] = decode_bf16(reinterpret_cast<const uint16_t*>(bytes.data())[i]);
      if (out_dtype == Dtype::f16) x[i] = decode_f16(reinterpret_cast<const uint16_t*>(bytes.data())[i]);
    }
    return x;
  }
};

Attention jagged_case() {
  Attention a;
  a.cu_q = {0, 1, 1, 66, 69, 197, 228};
  a.cu_k = {0, 1, 8, 41, 41, 169, 369};
  a.fill();
  return a;
}

bool same(const Attention& a, const Attention& b) {
  return a.out == b.out && a.lse == b.lse && a.row_exponent == b.row_exponent && a.dq == b.dq && a.dk == b.dk &&
         a.dv == b.dv && a.dk_mx.data == b.dk_mx.data && a.dk_mx.scale == b.dk_mx.scale;
}

std::vector<float> rows(const std::vector<float>& x, int64_t first, int64_t end, int64_t width) {
  return {x.begin() + first * width, x.begin() + end * width};
}

// ---- identities -------------------------------------------------------------------------------------------------

TEST(Attention, IsDeterministicAndIndependentOfTheThreadCount) {
  Attention a = jagged_case(), b = a;
  set_num_threads(1);
  a.run();
  set_num_threads(5);
  b.run();
  set_num_threads(0);
  EXPECT_TRUE(same(a, b));
  Attention c = jagged_case();
  c.run();
  EXPECT_TRUE(same(a, c));
}

TEST(Attention, JaggedEqualsEachSequenceAlone) {
  Attention all = jagged_case();
  all.mask.causal = true;
  all.run();
  const int64_t w = all.heads_q * all.dim;
  for (size_t b = 0; b + 1 < all.cu_q.size(); ++b) {
    Attention one;
    const int32_t q0 = all.cu_q[b], q1 = all.cu_q[b + 1], k0 = all.cu_k[b], k1 = all.cu_k[b + 1];
    one.cu_q = {0, q1 - q0};
    one.cu_k = {0, k1 - k0};
    one.mask = all.mask;
    one.q = rows(all.q, q0, q1, w);
    one.dout = rows(all.dout, q0, q1, w);
    one.k = rows(all.k, k0, k1, w);
    one.v = rows(all.v, k0, k1, w);
    one.run();
    EXPECT_EQ(one.out, rows(all.out, q0, q1, w)) << b;
    EXPECT_EQ(one.dq, rows(all.dq, q0, q1, w)) << b;
    EXPECT_EQ(one.dk, rows(all.dk, k0, k1, w)) << b;
    EXPECT_EQ(one.dv, rows(all.dv, k0, k1, w)) << b;
    for (int64_t h = 0; h < all.heads_q; ++h) {
      for (int64_t i = q0; i < q1; ++i) {
        EXPECT_EQ(one.lse[size_t(h * (q1 - q0) + i - q0)], all.lse[size_t(h * all.total_q() + i)]);
      }
    }
  }
}

TEST(Attention, GqaEqualsRepeatedHeads) {
  Attention gqa;
  gqa.heads_q = 6;
  gqa.heads_kv = 2;
  gqa.cu_q = {0, 70};
  gqa.cu_k = {0, 90};
  gqa.mask.causal = true;
  gqa.fill();
  Attention mha = gqa;
  mha.heads_kv = 6;
  const int64_t d = gqa.dim;
  const auto repeat = [&](const std::vector<float>& x) {
    std::vector<float> y(x.size() * 3);
    for (int64_t t = 0; t < 90; ++t) {
      for (int64_t h = 0; h < 6; ++h) std::copy_n(&x[size_t((t * 2 + h / 3) * d)], d, &y[size_t((t * 6 + h) * d)]);
    }
    return y;
  };
  mha.k = repeat(gqa.k);
  mha.v = repeat(gqa.v);
  gqa.run();
  mha.run();
  EXPECT_EQ(gqa.out, mha.out);
  EXPECT_EQ(gqa.lse, mha.lse);
  EXPECT_EQ(gqa.dq, mha.dq);
  for (int64_t t = 0; t < 90; ++t) {
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t c = 0; c < d; ++c) {
        double sum_k = 0, sum_v = 0;
        for (int64_t g = 0; g < 3; ++g) {
          sum_k += double(mha.dk[size_t((t * 6 + h * 3 + g) * d + c)]);
          sum_v += double(mha.dv[size_t((t * 6 + h * 3 + g) * d + c)]);
        }
        EXPECT_NEAR(gqa.dk[size_t((t * 2 + h) * d + c)], sum_k, 1e-6 * (1 + std::abs(sum_k)));
        EXPECT_NEAR(gqa.dv[size_t((t * 2 + h) * d + c)], sum_v, 1e-6 * (1 + std::abs(sum_v)));
      }
    }
  }
}

TEST(Attention, SharedQueryEqualsRepeatedQueries) {
  Attention shared;
  shared.shared_q = true;
  shared.cu_q = {0, 40};
  shared.cu_k = {0, 64, 64, 97, 230};
  shared.fill();
  shared.run();
  Attention repeated = shared;
  repeated.shared_q = false;
  repeated.cu_q = {0, 40, 80, 120, 160};
  repeated.q.clear();
  for (int b = 0; b < 4; ++b) repeated.q.insert(repeated.q.end(), shared.q.begin(), shared.q.end());
  repeated.run();
  EXPECT_EQ(shared.out, repeated.out);
  EXPECT_EQ(shared.lse, repeated.lse);
  EXPECT_EQ(shared.dk, repeated.dk);
  EXPECT_EQ(shared.dv, repeated.dv);
  for (size_t i = 0; i < shared.dq.size(); ++i) {
    double sum = 0;
    for (size_t b = 0; b < 4; ++b) sum += double(repeated.dq[b * shared.dq.size() + i]);
    EXPECT_NEAR(shared.dq[i], sum, 1e-5 * (1 + std::abs(sum)));
  }
}

TEST(Attention, FullWindowEqualsCausal) {
  Attention causal;
  causal.cu_q = {0, 129};
  causal.cu_k = {0, 200};
  causal.fill();
  Attention window = causal;
  causal.mask.causal = true;
  window.mask = {.window_left = 200, .window_right = 0};
  causal.run();
  window.run();
  EXPECT_TRUE(same(causal, window));
}

TEST(Attention, RowExponentIsTheOneThatTheBackwardRecomputes) {
  Attention given = jagged_case();
  given.mask = {.window_left = 40, .window_right = 3};
  Attention recomputed = given;
  recomputed.with_row_exponent = false;
  given.run();
  recomputed.run();
  EXPECT_TRUE(same(given, recomputed));
}

TEST(Attention, RowExponentBoundsP) {
  Attention a;
  a.cu_q = {0, 3};
  a.cu_k = {0, 4096};
  a.fill();
  std::fill(a.k.begin(), a.k.end(), 1.0f);
  a.run();
  for (const uint8_t r : a.row_exponent) EXPECT_EQ(r, 12) << "4096 equal keys: P = 2^-12";
  std::fill(a.k.begin() + 64 * 2, a.k.end(), 0.0f);
  std::fill(a.q.begin(), a.q.end(), 4.0f);
  a.run();
  for (const uint8_t r : a.row_exponent) EXPECT_EQ(r, 0) << "one key has nearly all of the weight";
}

// ---- formats ----------------------------------------------------------------------------------------------------

TEST(Attention, OutputsRoundToTheirDtype) {
  Attention f32 = jagged_case();
  f32.run();
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) {
    Attention half = jagged_case();
    half.out_dtype = dtype;
    half.run();
    EXPECT_EQ(half.lse, f32.lse);
    for (size_t i = 0; i < f32.out.size(); ++i) {
      const float want =
          dtype == Dtype::bf16 ? decode_bf16(encode_bf16(f32.out[i])) : decode_f16(encode_f16(f32.out[i]));
      ASSERT_EQ(half.out[i], want);
    }
    for (size_t i = 0; i < f32.dv.size(); ++i) {
      const float want = dtype == Dtype::bf16 ? decode_bf16(encode_bf16(f32.dv[i])) : decode_f16(encode_f16(f32.dv[i]));
      ASSERT_EQ(half.dv[i], want);
    }
    // delta reads the rounded out; that moves an element of dS across a rounding boundary here and there.
    const std::vector<double> dq(f32.dq.begin(), f32.dq.end()), dk(f32.dk.begin(), f32.dk.end());
    EXPECT_GT(kit::compare(dq, std::span<const float>(half.dq)).sqnr_db, 30);
    EXPECT_GT(kit::compare(dk, std::span<const float>(half.dk)).sqnr_db, 30);
  }
}

TEST(Attention, MxGradientsAreTheQuantizedFloats) {
  Attention a = jagged_case();
  a.dim = 96;
  a.dim_v = 40;
  a.fill();
  a.run();
  const OwnedMx dk = kit::quantize_floats(a.dk, a.total_k(), a.heads_kv, 96, a.seq_k());
  const OwnedMx dv = kit::quantize_floats(a.dv, a.total_k(), a.heads_kv, 40, a.seq_k());
  EXPECT_EQ(a.dk_mx.data, dk.data);
  EXPECT_EQ(a.dk_mx.scale, dk.scale);
  EXPECT_EQ(a.dv_mx.data, dv.data);
  EXPECT_EQ(a.dv_mx.scale, dv.scale);
}

// Alone or beside an fp32 out, for tiles of rows and for few rows (decoding), whose paths on the CPU differ.
TEST(Attention, OutInMxIsTheQuantizedOut) {
  for (const int32_t longest : {100, 3}) {
    const std::vector<int32_t> cu_q{0, longest, longest, longest + 2}, cu_k{0, 70, 90, 220};
    const Jagged seq_q{cu_q.data(), 3, longest}, seq_k{cu_k.data(), 3, 130};
    const int64_t total_q = longest + 9, heads = 4, dim_v = 40;  // 7 rows of no sequence
    const auto operand = [&](int64_t tokens, int64_t num_heads, int64_t dim, const Jagged& seq, uint64_t seed) {
      kit::Random random(seed);
      std::vector<float> x(size_t(tokens * num_heads * dim));
      for (float& v : x) v = float(random.normal());
      return kit::quantize_floats(x, tokens, num_heads, dim, seq);
    };
    const OwnedMx q = operand(total_q, heads, 64, seq_q, 1), k = operand(220, 2, 64, seq_k, 2),
                  v = operand(220, 2, dim_v, seq_k, 3);
    for (const char* backend : {"ref", "cpu"}) {
      for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
        const ScaleLayout layout = block == MxBlock::row32 ? ScaleLayout::atom128x4 : ScaleLayout::linear;
        std::vector<float> out(size_t(total_q * heads * dim_v));
        const auto mx = [&] {
          OwnedMx t = kit::make_owned_mx(Dtype::e4m3, block, layout, total_q, heads, dim_v, seq_q);
          std::fill(t.data.begin(), t.data.end(), uint8_t{0x7F});
          std::fill(t.scale.begin(), t.scale.end(), uint8_t{0xFF});
          return t;
        };
        OwnedMx beside = mx(), alone = mx(), want = mx();
        AttentionFwd call{.q = q.view,
                          .k = k.view,
                          .v = v.view,
                          .out = make_tensor(out.data(), Dtype::f32, total_q, heads, dim_v),
                          .out_mx = beside.view,
                          .seq_q = seq_q,
                          .seq_k = seq_k,
                          .backend = backend};
        const kit::AlignedBuffer workspace(attention_fwd_workspace(call));
        call.workspace = workspace.data();
        call.workspace_size = workspace.size();
        require_ok(attention_fwd(call));
        call.out = {};
        call.out_mx = alone.view;
        require_ok(attention_fwd(call));
        require_ok(quantize({.in = make_tensor(out.data(), Dtype::f32, total_q, heads, dim_v),
                             .out = want.view,
                             .seq = seq_q,
                             .backend = "ref"}));
        EXPECT_EQ(beside.data, want.data) << backend;
        EXPECT_EQ(beside.scale, want.scale) << backend;
        EXPECT_EQ(alone.data, want.data) << backend;
        EXPECT_EQ(alone.scale, want.scale) << backend;
      }
    }
  }
}

TEST(Attention, TwoPayloadsOfOneTensorEqualOneWithTheSameBytes) {
  Attention one = jagged_case();
  for (std::vector<float>* x : {&one.q, &one.k, &one.v, &one.dout}) {
    for (float& value : *x) value = float(int(value * 4));  // small integers: exact in every block shape
  }
  Attention two = one;
  two.block = MxBlock::row32;
  two.block_col = MxBlock::col32;
  one.run();
  two.run();
  EXPECT_TRUE(same(one, two));
}

// With at most 128 keys a row has one key tile. Its sum is rounded to fp16 once, in units of 2^-12: by 2^-11 of itself,
// or half of the subnormal step 2^-24. Adding it to zero is exact. fp32 roundings on both sides are 2^-24 each. Several
// tiles and the edges are pinned bit for bit in attention_golden_test.cpp.
TEST(Attention, HalfAccumulationOfDqRoundsOncePerTile) {
  Attention f32;
  f32.cu_q = {0, 1, 1, 66, 69, 197, 228};
  f32.cu_k = {0, 1, 8, 41, 41, 169, 297};
  f32.fill();
  Attention f16 = f32;
  f16.dq_accum = Dtype::f16;
  f32.run();
  f16.run();
  EXPECT_NE(f32.dq, f16.dq);
  const double softmax_scale = 0.125, subnormal = 0x1p-12 * 0x1p-25;
  for (size_t i = 0; i < f32.dq.size(); ++i) {
    const double dq = std::abs(double(f32.dq[i]));
    EXPECT_NEAR(f16.dq[i], f32.dq[i], (0x1p-11 + 0x1p-22) * dq + softmax_scale * subnormal);
  }
  EXPECT_EQ(f16.dk, f32.dk);
  EXPECT_EQ(f16.dv, f32.dv);
  for (float& value : f16.dout) value *= 1000;
  f16.run();
  EXPECT_TRUE(std::any_of(f16.dq.begin(), f16.dq.end(), [](float x) { return std::isinf(x); }));
  EXPECT_TRUE(std::none_of(f16.dk.begin(), f16.dk.end(), [](float x) { return std::isinf(x); }));
}

// dout of another scale gives gradients of that scale: power-of-two block scales lose nothing.
TEST(Attention, GradientsScaleWithDout) {
  Attention a = jagged_case(), b = a;
  for (float& value : b.dout) value *= 0x1p-40f;
  a.run();
  b.run();
  for (size_t i = 0; i < a.dq.size(); ++i) ASSERT_EQ(b.dq[i], a.dq[i] * 0x1p-40f);
  for (size_t i = 0; i < a.dk.size(); ++i) ASSERT_EQ(b.dk[i], a.dk[i] * 0x1p-40f);
  for (size_t i = 0; i < a.dv.size(); ++i) ASSERT_EQ(b.dv[i], a.dv[i] * 0x1p-40f);
}

TEST(Attention, NanReachesEveryRowThatSeesIt) {
  Attention a;
  a.cu_q = a.cu_k = {0, 96};
  a.mask.causal = true;
  a.fill();
  a.v[size_t(40 * 128)] = NAN;  // token 40, head 0: its block is tokens 32..63
  a.run();
  for (int64_t i = 0; i < 96; ++i) {
    EXPECT_EQ(std::isnan(a.out[size_t(i * 128)]), i >= 32) << i;
    EXPECT_FALSE(std::isnan(a.out[size_t(i * 128 + 64)])) << "head 1";
    EXPECT_FALSE(std::isnan(a.lse[size_t(i)]));
  }
}

}  // namespace
}  // namespace mxflash
