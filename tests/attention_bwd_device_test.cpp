// attention_bwd of backend sm90 beside that of ref, on the same operands and the same forward results: every case of
// kit/cases.h that it takes, and rows whose gradients are far apart in size. Its sums, its calls and what it refuses
// are in attention_bwd_{sums,calls,rules}_device_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "attention_bwd_on_card.h"
#include "kit/verify.h"

namespace mxflash::kit {
namespace {

// Scores near 1000 that FP8 tensor cores cut off 13 bits below their largest product: P is as far off as in E4M3.
constexpr double kLargeScoresLossDb = 6;

class AttentionBwdDevice : public OnHopper, public testing::WithParamInterface<AttentionCase> {
 protected:
  void SetUp() override {
    OnHopper::SetUp();
    if (GetParam().head_dim > 128 || GetParam().head_dim_v > 128) GTEST_SKIP() << "head_dim above 128";
  }
};

double loss_db(const AttentionCase& c) {
  return c.distribution == Distribution::negative_logits ? kLargeScoresLossDb : kLossDb;
}

// Elements of tokens that meet none, and of slack, that are not zero.
int64_t nonzero_where_nothing_is(const std::vector<bool>& meets, const std::vector<float>& x) {
  const size_t row = x.size() / std::max<size_t>(1, meets.size());
  int64_t wrong = 0;
  for (size_t i = 0; i < x.size(); ++i) wrong += !meets[i / row] && !(x[i] == 0);
  return wrong;
}

constexpr double kHalfLossDb = 0.1;  // of sums of dq in FP16

TEST_P(AttentionBwdDevice, BesideRef) {
  const AttentionCase& c = GetParam();
  Both x(c, make_operands(c));
  expect_beside_ref(x, loss_db(c));
  const Meets meets(c);
  EXPECT_EQ(nonzero_where_nothing_is(meets.q, x.got.dq), 0) << "dq";
  EXPECT_EQ(nonzero_where_nothing_is(meets.k, x.got.dk), 0) << "dk";
  EXPECT_EQ(nonzero_where_nothing_is(meets.k, x.got.dv), 0) << "dv";

  const auto check_mx = [&](const char* name, const std::vector<float>& gradient, const OwnedMx& have) {
    const auto& shape = have.view.data.shape;
    const OwnedMx want = ref_quantize(gradient, shape[0], shape[1], shape[2], x.mx.seq_k());
    EXPECT_EQ(want.data, have.data) << name;
    EXPECT_EQ(want.scale, have.scale) << name;
  };
  check_mx("dk_mx", x.got.dk, x.got.dk_mx);
  check_mx("dv_mx", x.got.dv, x.got.dv_mx);

  // A second run; and what must not matter: padding, and the form of the scales. dq is the same bits if asked to be.
  const AttentionResult again = x.with_backward(x.got, "sm90");
  EXPECT_TRUE(same_bits(again.dk, x.got.dk));
  EXPECT_TRUE(same_bits(again.dv, x.got.dv));
  {
    const MxAttention padded = poison_padding(x.mx);
    AttentionResult moved = run_attention(padded, "ref", "", {.out_dtype = Dtype::bf16});
    run_backward(padded, "sm90", moved);
    for (auto gradient : {&AttentionResult::dq, &AttentionResult::dk, &AttentionResult::dv})
      (moved.*gradient).resize((x.got.*gradient).size());  // without the slack that the poisoned call has behind
    expect_beside_ref("dq, padding", x.exact.dq, x.ref.dq, moved.dq, loss_db(c));
    EXPECT_EQ(nonzero_where_nothing_is(meets.q, moved.dq), 0) << "dq, padding";
    EXPECT_TRUE(same_bits(moved.dk, x.got.dk));
    EXPECT_TRUE(same_bits(moved.dv, x.got.dv));
  }
  x.mx.deterministic = true;
  const AttentionResult first = x.with_backward(x.got, "sm90");
  expect_beside_ref("dq, deterministic", x.exact.dq, x.ref.dq, first.dq, loss_db(c));
  EXPECT_EQ(nonzero_where_nothing_is(meets.q, first.dq), 0) << "dq, deterministic";
  EXPECT_EQ(compare_bits(x.mx, first, x.mx, x.with_backward(x.got, "sm90")), "") << "a second run";
  const auto expect_same = [&](const char* what, const MxAttention& other) {
    AttentionResult moved = run_attention(other, "ref", "", {.out_dtype = Dtype::bf16});
    run_backward(other, "sm90", moved);
    EXPECT_EQ(compare_bits(x.mx, first, other, moved), "") << what;
  };
  expect_same("padding", poison_padding(x.mx));
  expect_same("row32 and col32", poison_padding(expand_squares(x.mx, ScaleLayout::atom128x4)));

  // One more rounding for each key tile.
  x.mx.dq_accum = Dtype::f16;
  for (const bool deterministic : {true, false}) {
    SCOPED_TRACE(deterministic ? "deterministic" : "in any order");
    x.mx.deterministic = deterministic;
    const AttentionResult half = x.with_backward(x.got, "sm90");
    expect_beside_ref("dq in f16", x.exact.dq, x.ref.dq, half.dq, loss_db(c) + kHalfLossDb);
    EXPECT_EQ(nonzero_where_nothing_is(meets.q, half.dq), 0) << "dq in f16";
  }
}

// As many as the operator has added up in FP16.
TEST(AttentionBwdHalf, DqOfManyKeys) {
  if (const Status s = has_compute_capability(90); !s.ok()) GTEST_SKIP() << s.message;
  const AttentionCase c{.name = "half_131072_keys",
                        .lens_q = {64},
                        .lens_k = {1 << 17},
                        .num_heads_q = 1,
                        .num_heads_kv = 1,
                        .head_dim = 64,
                        .head_dim_v = 64};
  expect_beside_ref(Both(c, make_operands(c), Dtype::bf16, Dtype::f16), kLossDb + kHalfLossDb);
}

// delta comes from out as it is stored.
TEST_P(AttentionBwdDevice, OutInOtherDtypes) {
  const AttentionCase& c = GetParam();
  if (!c.quick) GTEST_SKIP() << "the quick ones do";
  for (const Dtype dtype : {Dtype::f32, Dtype::f16}) {
    SCOPED_TRACE(dtype_name(dtype));
    expect_beside_ref(Both(c, make_operands(c), dtype), loss_db(c));
  }
}

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
  for (const AttentionCase& c : long_gradient_cases()) list.push_back(c);
  AttentionCase many{.name = "sequences_3000", .mask = {.causal = true}};
  for (int32_t b = 0; b < 3000; ++b) {
    many.lens_q.push_back(b * 7 % 5);
    many.lens_k.push_back(b % 6);
  }
  list.push_back(many);
  return list;
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionBwdDevice, testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// Rows, tiles and keys whose gradients are so much smaller than others' that a unit made for those would round them
// away. Each is judged alone: in a sum over all the large ones hide the small.
class AttentionBwdUnits : public OnHopper {
 protected:
  static AttentionCase causal(int32_t tokens, int32_t dim = 64) {
    return {.name = "units",
            .lens_q = {tokens},
            .lens_k = {tokens},
            .head_dim = dim,
            .head_dim_v = dim,
            .mask = {.causal = true}};
  }
  static void scale_rows(std::vector<float>& x, int64_t width, int64_t first, int64_t end, double factor) {
    for (int64_t i = first * width; i < end * width; ++i) x[size_t(i)] = float(x[size_t(i)] * factor);
  }
  // Tokens first .. end - 1 of one head.
  static void expect_rows_beside_ref(const char* name, const Both& x, int64_t width, int64_t first, int64_t end) {
    const Part part{first, end, width};
    const std::string where = ", tokens " + std::to_string(first) + " .. " + std::to_string(end - 1);
    const std::string tensor = name;
    if (tensor == "dq") expect_beside_ref(tensor + where, x.exact.dq, x.ref.dq, x.got.dq, kLossDb, part);
    if (tensor == "dk") expect_beside_ref(tensor + where, x.exact.dk, x.ref.dk, x.got.dk, kLossDb, part);
    if (tensor == "dv") expect_beside_ref(tensor + where, x.exact.dv, x.ref.dv, x.got.dv, kLossDb, part);
  }
};

// The last keys are seen by rows that see thousands: P and dS are 2^-12 of those of the first rows.
TEST_F(AttentionBwdUnits, LastKeysOfALongCausalSequence) {
  for (const auto& [tokens, dim] : {std::pair(4096, 64), {2048, 128}}) {
    SCOPED_TRACE(dim);
    const AttentionCase c = causal(tokens, dim);
    const Both x(c, make_operands(c));
    for (int64_t first = 0; first < tokens; first += tokens / 4) {
      for (const char* name : {"dq", "dk", "dv"}) expect_rows_beside_ref(name, x, dim, first, first + tokens / 4);
    }
  }
}

// A first row with a large gradient (the token that begins a text). Causal: it sees key 0 alone.
TEST_F(AttentionBwdUnits, LargeGradientOfTheFirstRow) {
  for (const double factor : {0x1p6, 0x1p20}) {
    SCOPED_TRACE(factor);
    const AttentionCase c = causal(512);
    Operands o = make_operands(c);
    scale_rows(o.dout, 64, 0, 1, factor);
    const Both x(c, o);
    // It shares blocks with rows below 32, and a tile with rows below 64, which the larger factor may take with it.
    const int64_t first = factor > 0x1p10 ? 64 : 32;
    for (const char* name : {"dq", "dk", "dv"}) expect_rows_beside_ref(name, x, 64, first, 512);
  }
}

TEST_F(AttentionBwdUnits, WindowOverSmallGradients) {
  for (const int32_t dim : {64, 128}) {
    SCOPED_TRACE(dim);
    AttentionCase c = causal(1024, dim);
    c.mask.window_left = 63;
    Operands o = make_operands(c);
    scale_rows(o.dout, dim, 512, 768, 0x1p-12);
    const Both x(c, o);
    expect_rows_beside_ref("dq", x, dim, 512, 768);
    for (const char* name : {"dk", "dv"}) expect_rows_beside_ref(name, x, dim, 512, 704);  // rows up to 767 see them
  }
}

TEST_F(AttentionBwdUnits, RowsSpreadLikeE2N) {
  AttentionCase c = causal(1024, 128);
  c.distribution = Distribution::wide_row_gradients;
  const Both x(c, make_operands(c));
  for (const char* name : {"dq", "dk", "dv"}) {
    for (int64_t first = 0; first < 1024; first += 256) expect_rows_beside_ref(name, x, 128, first, first + 256);
  }
}

// Row tiles of 2^30 and 2^-30 in turns: units move by 60 binades from tile to tile, and back.
TEST_F(AttentionBwdUnits, TilesSixtyBinadesApart) {
  for (const int variant : {0, 1, 2, 3}) {
    const bool dense = variant & 1, f16 = variant & 2;
    SCOPED_TRACE(testing::Message() << (dense ? "dense" : "causal") << (f16 ? ", dq in f16" : ""));
    AttentionCase c = causal(512);
    c.mask.causal = !dense;
    Operands o = make_operands(c);
    for (int64_t tile = 0; tile < 8; ++tile) {
      scale_rows(o.dout, 64, tile * 64, tile * 64 + 64, tile % 2 ? 0x1p-30 : 0x1p30);
    }
    const Both x(c, o, Dtype::bf16, f16 ? Dtype::f16 : Dtype::f32);
    for (int64_t first = 0; first < 512; first += 64) expect_rows_beside_ref("dq", x, 64, first, first + 64);
    for (const char* name : {"dk", "dv"}) {
      expect_rows_beside_ref(name, x, 64, 0, 448);
      expect_rows_beside_ref(name, x, 64, 448, 512);  // causal: rows of 2^-30 only
    }
  }
}

// Peaky rows next to flat ones: within a tile P's scales, and with them those of dQ, are far apart.
TEST_F(AttentionBwdUnits, PeakyRowsNextToFlatOnes) {
  AttentionCase c = causal(1024, 128);
  c.mask.causal = false;
  Operands o = make_operands(c);
  for (int64_t i = 0; i < 1024; ++i) scale_rows(o.q, 128, i, i + 1, i % 2 ? 6 : 1.0 / 64);
  for (const Dtype dq_accum : {Dtype::f32, Dtype::f16}) {
    SCOPED_TRACE(dtype_name(dq_accum));
    const Both x(c, o, Dtype::bf16, dq_accum);
    expect_beside_ref(x);
    for (const int64_t parity : {0, 1}) {
      std::vector<double> exact;
      std::vector<float> ref, got;
      for (int64_t i = parity * 128; i < 1024 * 128; i += 256) {
        exact.insert(exact.end(), x.exact.dq.begin() + i, x.exact.dq.begin() + i + 128);
        ref.insert(ref.end(), x.ref.dq.begin() + i, x.ref.dq.begin() + i + 128);
        got.insert(got.end(), x.got.dq.begin() + i, x.got.dq.begin() + i + 128);
      }
      expect_beside_ref(parity ? "dq of peaky rows" : "dq of flat rows", exact, ref, got);
    }
  }
}

// Powers of two on operands are powers of two on gradients, up to the ends of what E8M0 and fp32 hold.
TEST_F(AttentionBwdUnits, ScalesAtTheEndsOfE8M0) {
  AttentionCase c = causal(200);
  const Operands plain = make_operands(c);
  const Both want(c, plain);
  struct Powers {
    int q, k, v, dout;
  };
  for (const Powers& p : {Powers{-100, 100, 0, 0},
                          {100, -100, 0, 0},
                          {0, 0, 0, 100},
                          {0, 0, 0, -100},
                          {0, 0, 100, -100},
                          {0, 0, -100, 100},
                          {-60, 60, 0, -50},
                          {60, -60, 0, 50}}) {
    SCOPED_TRACE(testing::Message() << "q 2^" << p.q << ", k 2^" << p.k << ", v 2^" << p.v << ", dout 2^" << p.dout);
    Operands o = plain;
    scale_rows(o.q, 64, 0, 200, std::exp2(p.q));
    scale_rows(o.k, 64, 0, 200, std::exp2(p.k));
    scale_rows(o.v, 64, 0, 200, std::exp2(p.v));
    scale_rows(o.dout, 64, 0, 200, std::exp2(p.dout));
    const MxAttention mx = quantize_case(c, o);
    AttentionResult got = run_attention(mx, "ref", "", {.out_dtype = Dtype::bf16});
    run_backward(mx, "sm90", got);
    const auto expect_scaled = [&](const char* name, const std::vector<float>& x, const std::vector<float>& y, int e) {
      std::vector<double> exact(x.begin(), x.end());
      for (double& value : exact) value = std::ldexp(value, e);
      EXPECT_GE(compare(exact, y).sqnr_db, 45) << name;
    };
    expect_scaled("dq", want.got.dq, got.dq, p.k + p.v + p.dout);
    expect_scaled("dk", want.got.dk, got.dk, p.q + p.v + p.dout);
    expect_scaled("dv", want.got.dv, got.dv, p.dout);
  }
}

}  // namespace
}  // namespace mxflash::kit
