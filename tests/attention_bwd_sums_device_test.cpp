// Sums of attention_bwd on sm90 that have an answer: terms of one sign, which FP8 tensor cores cut off one by one
// (docs/hopper.md), and differences of the forward kernel itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "attention_bwd_on_card.h"
#include "kit/random.h"

namespace mxflash::kit {
namespace {

// Where scores are equal, P = 1 / Sk, a power of two, is exact in E4M3, and so is dS where it comes from dlse alone;
// what is left is how the rows are added up. A sum that stays in the tensor cores is short by 2.2e-4 of itself for
// every 32 rows.
constexpr double kOneSignedError = 2e-3;  // a mean of half the spread; measured 0.4e-3, 1.1e-3 where never emptied
// All terms of one sign. The first 32 row tiles (of all heads of a group) are short by 1.99 % as measured; what follows
// begins at -1/2 of what was emptied before and loses half as much: 0.94 % in all after eight times 32.
constexpr double kFirstLapError = 2.2e-2;
constexpr int64_t kLapRows = 32 * 64;

struct Shape {
  int32_t rows, keys, heads, heads_kv, dim;
};

void PrintTo(const Shape& s, std::ostream* os) {
  *os << s.rows << "_rows_group_" << s.heads / s.heads_kv << "_d" << s.dim;
}

class AttentionBwdSums : public OnHopper, public testing::WithParamInterface<Shape> {
 protected:
  void SetUp() override {
    OnHopper::SetUp();
    const Shape& s = GetParam();
    c_ = {.name = "one_signed",
          .lens_q = {s.rows},
          .lens_k = {s.keys},
          .num_heads_q = s.heads,
          .num_heads_kv = s.heads_kv,
          .head_dim = s.dim,
          .head_dim_v = s.dim};
    x_ = make_operands(c_);
  }
  AttentionResult run(Dtype dq_accum = Dtype::f32) {
    mx_ = quantize_case(c_, x_);
    mx_.dq_accum = dq_accum;
    AttentionResult r = run_attention(mx_, "ref", "", {.out_dtype = Dtype::bf16});
    run_backward(mx_, "sm90", r);
    return r;
  }
  // scale / Sk * sum over rows and the group's heads of x, a [rows, heads, dim] tensor, for every key head and channel.
  std::vector<double> sums(const std::vector<float>& x, double scale) const {
    const Shape& s = GetParam();
    const int64_t group = s.heads / s.heads_kv;
    std::vector<double> sum(size_t(s.heads_kv * s.dim), 0.0);
    for (int64_t i = 0; i < int64_t(x.size()); ++i) {
      sum[size_t(i / s.dim % s.heads / group * s.dim + i % s.dim)] += scale / s.keys * double(x[size_t(i)]);
    }
    return sum;
  }
  // Every token has the same gradient.
  void expect_sums(const char* name, const std::vector<double>& want, const std::vector<float>& got) const {
    double worst = 0, error = 0, signal = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const double exact = want[i % want.size()], e = double(got[i]) - exact;
      ASSERT_TRUE(std::isfinite(got[i])) << name << " at " << i;
      worst = std::max(worst, std::fabs(e));
      error += e * e;
      signal += exact * exact;
    }
    EXPECT_LE(std::sqrt(error / signal), kOneSignedError)
        << name << ": worst " << worst << ", first " << got[0] << ", want " << want[0];
  }
  void set(std::vector<float>& x, float value) { std::fill(x.begin(), x.end(), value); }
  void add_mean(std::vector<float>& x, float mean) {
    for (float& value : x) value += mean;
  }

  AttentionCase c_;
  Operands x_;
  MxAttention mx_;
};

// out.sum().backward(): dv is the sum of P over all rows. (Equal P would be exact: powers of two lose no bits.)
TEST_P(AttentionBwdSums, DvOfADoutOfOnes) {
  set(x_.dout, 1);
  const AttentionResult r = run();
  const OracleResult exact = oracle_attention(dequantized_problem(c_, mx_));
  const Metrics m = compare(exact.dv, r.dv);
  const Shape& shape = GetParam();
  const double laps = double((int64_t(shape.rows) * shape.heads / shape.heads_kv + kLapRows - 1) / kLapRows);
  EXPECT_LE(std::sqrt(m.error_energy / m.signal_energy), kFirstLapError * (1 + (laps - 1) / 2) / laps)
      << "at " << m.worst_index << ", non-finite " << m.nonfinite_mismatch;
  EXPECT_EQ(m.nonfinite_mismatch, 0);
}

// A mean of half the spread.
TEST_P(AttentionBwdSums, DvOfADoutWithAMean) {
  set(x_.q, 0);
  add_mean(x_.dout, 0.5f);
  const AttentionResult r = run();
  expect_sums("dv", sums(ref_dequantize(mx_.dout.view, mx_.seq_out()), 1), r.dv);
}

// v = 0 leaves dS = dlse P.
TEST_P(AttentionBwdSums, DkOfADlseOfOnes) {
  add_mean(x_.q, 0.5f);
  set(x_.k, 0);
  set(x_.v, 0);
  x_.dlse.assign(size_t(total_out(c_) * c_.num_heads_q), 1);
  const AttentionResult r = run();
  expect_sums("dk", sums(ref_dequantize(mx_.q.view, mx_.seq_q()), 1 / std::sqrt(double(c_.head_dim))), r.dk);
}

// dq = softmax_scale * dlse * the mean of k, over as many keys as there are rows above. Equal keys make it as large as
// it can be for the operands' sizes: FP16 must not come to Inf.
TEST_P(AttentionBwdSums, DqOfADlseOfOnes) {
  std::swap(c_.lens_q, c_.lens_k);
  const Shape& s = GetParam();
  for (const Dtype dq_accum : {Dtype::f32, Dtype::f16}) {
    for (const float equal : {0.0f, 1.75f}) {
      SCOPED_TRACE(testing::Message() << dtype_name(dq_accum) << (equal != 0 ? ", k = 1.75" : ", k ~ N(0.5, 1)"));
      x_ = make_operands(c_);
      set(x_.q, 0);
      set(x_.v, 0);
      if (equal != 0) {
        set(x_.k, equal);
      } else {
        add_mean(x_.k, 0.5f);
      }
      x_.dlse.assign(size_t(total_out(c_) * c_.num_heads_q), 1);
      const AttentionResult r = run(dq_accum);
      const std::vector<float> k = ref_dequantize(mx_.k.view, mx_.seq_k());
      std::vector<double> want(size_t(s.heads * s.dim), 0.0);
      for (int64_t i = 0; i < int64_t(k.size()); ++i) {
        for (int64_t g = 0; g < s.heads / s.heads_kv; ++g) {
          const int64_t head = i / s.dim % s.heads_kv * (s.heads / s.heads_kv) + g;
          want[size_t(head * s.dim + i % s.dim)] += double(k[size_t(i)]) / s.rows / std::sqrt(double(s.dim));
        }
      }
      expect_sums("dq", want, r.dq);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttentionBwdSums,
                         testing::Values(Shape{16384, 128, 1, 1, 128}, Shape{16384, 128, 1, 1, 64},
                                         Shape{2048, 128, 8, 1, 128}, Shape{1024, 256, 2, 1, 64},
                                         Shape{4096, 2048, 9, 9, 64}),
                         [](const auto& info) { return testing::PrintToString(info.param); });

// The gradients are those of the forward kernel: L = sum(out dout) + sum(lse dlse) is taken twice, with some elements
// of one operand one E4M3 code above and one below, in the direction of the gradient. Codes, not values, are moved, so
// nothing is rounded on the way, and L(up) - L(down) is sum(gradient * (up - down)) up to third order and the noise of
// P, which does not follow the direction: 4 % a row, less where many rows move. A gradient that belongs to another
// element has the wrong sign half of the time.
class AttentionBwdDifferences : public OnHopper {
 protected:
  static double loss(const MxAttention& mx) {
    const AttentionResult r = run_attention(mx, "sm90", "");
    const std::vector<float> dout = ref_dequantize(mx.dout.view, mx.seq_out());
    double sum = 0;
    for (size_t i = 0; i < dout.size(); ++i) sum += double(r.out[i]) * double(dout[i]);
    for (size_t i = 0; i < mx.dlse.size(); ++i) {
      if (std::isfinite(r.lse[i])) sum += double(r.lse[i]) * double(mx.dlse[i]);
    }
    return sum;
  }
  // The next code up or down in value; the code itself where there is none, or it would change the sign.
  static uint8_t neighbour(uint8_t code, bool up) {
    const int magnitude = code & 0x7F, sign = code & 0x80, next = magnitude + ((sign == 0) == up ? 1 : -1);
    return magnitude < 2 || next > 0x7E || magnitude > 0x7D ? code : uint8_t(sign | next);
  }
};

TEST_F(AttentionBwdDifferences, GradientsAreThoseOfTheForwardKernel) {
  for (const int32_t dim : {64, 128}) {
    for (const Mask& mask : {Mask{}, Mask{.causal = true}}) {
      const AttentionCase c{.name = "differences",
                            .lens_q = {130},
                            .lens_k = {200},
                            .num_heads_q = 2,
                            .num_heads_kv = 1,
                            .head_dim = dim,
                            .head_dim_v = dim,
                            .mask = mask,
                            .with_dlse = true};
      MxAttention mx = quantize_case(c, make_operands(c));
      const AttentionResult r = run_attention(mx, "sm90", "sm90", {.out_dtype = Dtype::bf16});
      struct Operand {
        const char* name;
        OwnedMx* mx;
        const std::vector<float>* gradient;
        Jagged seq;
      };
      for (const Operand& o : {Operand{"dq", &mx.q, &r.dq, mx.seq_q()},
                               {"dk", &mx.k, &r.dk, mx.seq_k()},
                               {"dv", &mx.v, &r.dv, mx.seq_k()}}) {
        Random random(7, uint64_t(dim));
        const std::vector<uint8_t> codes = o.mx->data;
        const int64_t row = int64_t(o.mx->view.data.shape[1]) * dim, tokens = o.mx->view.data.shape[0];
        double product = 0, predicted2 = 0, measured2 = 0;
        for (int64_t first = 0; first < tokens; first += 16) {  // 16 tokens, half of their elements
          std::vector<uint8_t> up = codes, down = codes;
          for (int64_t i = first * row; i < std::min(first + 16, tokens) * row; ++i) {
            if (random.below(2) == 0) continue;
            const bool rising = (*o.gradient)[size_t(i)] > 0;
            up[size_t(i)] = neighbour(codes[size_t(i)], rising);
            down[size_t(i)] = neighbour(codes[size_t(i)], !rising);
          }
          const auto at = [&](const std::vector<uint8_t>& moved) {
            std::copy(moved.begin(), moved.end(), o.mx->data.begin());
            return std::pair(loss(mx), ref_dequantize(o.mx->view, o.seq));
          };
          const auto [above, x_up] = at(up);
          const auto [below, x_down] = at(down);
          std::copy(codes.begin(), codes.end(), o.mx->data.begin());
          double predicted = 0;
          for (size_t i = 0; i < x_up.size(); ++i) {
            predicted += double((*o.gradient)[i]) * (double(x_up[i]) - double(x_down[i]));
          }
          const double measured = above - below;
          product += predicted * measured;
          predicted2 += predicted * predicted;
          measured2 += measured * measured;
        }
        SCOPED_TRACE(testing::Message() << o.name << ", dim " << dim << ", causal " << mask.causal);
        EXPECT_GE(product / std::sqrt(predicted2 * measured2), 0.99);
        EXPECT_NEAR(product / predicted2, 1, 0.03);
      }
    }
  }
}

}  // namespace
}  // namespace mxflash::kit
