// Symbols: P the exact softmax weights (a row of visible keys sums to 1), m_i the largest of row i, O = P v,
// dP = dout v^T, D_i = O_i . dout_i, delta = D - dlse, dS = P (dP - delta). ^ marks a rounded value, `e` a bound on an
// error, r a bound on a relative error.
//
// Rounding to an element format. A normal number moves by at most 2^-(mantissa + 1) of itself (2^-4 for E4M3, 2^-3 for
// E5M2), a subnormal one by half a step (2^-10, 2^-17), and no number by more than itself, since zero is a candidate:
//   |x^ - x| <= round(|x|, scale) := min(|x|, max(relative |x|, half_step scale))
// It grows with |x|, so an upper bound of |x| may stand for it.
//
// Rounding to block fixed point. A group of 32 values along the contraction becomes int16 times a power of two, the
// unit, with 4096 <= amax / unit < 8192. Of operands the group is known, and so is how far each value moves: most E4M3
// values not at all, with one scale for the group those above 1/900 of amax. Of P and dS only amax is: a value moves by
// half a unit, 2^-13 amax, or less. In the forward the unit is 2^-13 of the group's largest P itself: half is 2^-14.
//   |x^ - x| <= fix(|x|, amax) := min(|x|, 2^-13 amax)
// Groups computed more exactly than that are within the bound, too.
//
// Sums. n additions in any order round partial sums, none of which is larger than the sum of the positive terms, nor
// than that of the negative ones. Those differ by the sum, so with unit roundoff u a sum is off by at most
//   g(n) (sum |x| + |sum x|) / 2,  g(n) = n u / (1 - n u)
// (after Higham, Accuracy and Stability of Numerical Algorithms, 3.1), and terms of a few operations add g(few) sum
// |x|. So dots of length d below are off by dot_err = g(d) (sum |a b| + |a.b|) / 2 + g(8) sum |a b|.
//
// Weights. Scores s = softmax_scale q.k are off by e(s) = softmax_scale (dot_err + what fixed point moves), and the
// exponent's own operations by 4 u (|s| + |m| + 9). exp is good to 6 u (2^x of backend cpu: 3e-7), and weights of
// earlier keys are multiplied by the exponential of a difference of maxima at most once in 64 keys, in all T times:
//   r_ij = e^(e(s_ij) + ...) - 1 + (2 + T) 8 u
// The maximum that all are relative to cancels. lse comes from the unrounded weights: it is off by
// log(1 + sum_j r_ij P_ij), by the sum's roundoff, and by its rounding to fp32, 2^-24 |lse|.
//
// Forward. P^ is 2^(s - m + 8) in E4M3, so P's scale is 2^-8 of the running maximum's weight. The running maximum is at
// most the final one, and rescaling shrinks an old error along with its weight:
//   eP_ij = r_ij P_ij + (round(P_ij, 2^-8 m_i) or fix(P_ij, 1/2 amax) or 0)
// out divides by the rounded sum, so sum_j P_j (v_j - O) = 0 lets O be subtracted:
//   O^ - O = sum_j P^_j (v_j - O) / sum_j P^_j = sum_j (P^_j - P_j)(v_j - O) / sum_j P^_j
//   |O^_ic - O_ic| <= sum_j eP_ij |v_jc - O_ic| / (1 - sum_j eP_ij)
// Fixed point adds sum_j P^_ij |v^_jc - v_jc| to the numerator, v^ rounded along keys.
//
// Backward. P^ has scale 2^-(8 + r) with r the least row_exponent of the block of rows, r_i = floor(-log2 m_i); P comes
// from the forward's lse, whose error is in its r_ij.
//   eP'_ij = r_ij P_ij + (round(P_ij, 2^-(8 + r)) or fix(P_ij, amax) or 0)
//   |dV^ - dV|_jc <= sum_i eP'_ij |dout_ic| + P^_ij |dout^_ic - dout_ic|
// delta comes from the rounded O. Its error is not sum_c |O^ - O| |dout|, which forgets that the channels of O^ share
// their weights, but the forward's sum with dP in place of v. What rounding moves in dout moves dP and delta alike:
//   eD_i = sum_j (eP_ij |dP_ij - D_i| + P^_ij |dout_i| . |v^_j - v_j|) / (1 - sum_j eP_ij)
//          + sum_c |stored O^ - O^|_ic |dout_ic| + dot_err
//   eS_ij = P^_ij (eD_i + dot_err + |dout^_i - dout_i| . |v_j - O_i| + |dout_i| . |v^_j - v_j|)
// (v^ here rounded along channels; |dout| stands for |dout^|, too.) Then dS is rounded: in FP8 with amax the largest
// |dS| + eS of its block, where rceil takes the least 2^e >= amax / max_element, so scale < 2 amax / max_element, or it
// is 2^-127, the least there is; in fixed point along keys for dQ and along rows for dK:
//   eS'_ij = eS_ij + (round(|dS_ij| + eS_ij, scale) or fix(|dS_ij| + eS_ij, amax) or 0)
//   |dQ^ - dQ|_ic <= softmax_scale sum_j eS'_ij |k_jc| + dS^_ij |k^_jc - k_jc|, and dK with q in place of k
// Values are fp32 when they meet an FP8 encoder: 2^-24 more.
//
// Tiles of backend sm90 (forward). Operands are those of its images: E4M3 with one scale a tile, so the caller has them
// rounded already. P^ is 2^(s - m + 6) in E4M3, with a maximum m that rises only when a score passes it by more than
// 2.8, so that 2^(6 + 2.8) < 448: m is at most the final maximum, and P's scale 2^-6 of its weight instead of 2^-8.
// Tensor cores add 32 FP8 products and their accumulator as integers aligned to the largest of them, with 13 bits below
// its own: each product loses up to 2^-13 of M, the largest magnitude on the way, of |products| and of |partial sums of
// 32 channels|. Losses have the signs of their products, so those of d products add up like sqrt(d) of them, each with
// a standard deviation of 0.58 2^-13 M; 4 of them, seven deviations, are allowed for a score:
//   e(s) = softmax_scale 4 sqrt(d) 2^-13 M
// and for lse, a mean of many scores, the larger of 1e-3, which the backend promises, and of the sum of P_ij e(s_ij):
// where all products of a score have one sign, those of other keys have it too, and a mean loses what each of them
// does. Where all products have one sign, as in sums of weights, their losses do not cancel: one step of 32 was seen to
// cut 2.2e-4 off a sum that grows (docs/hopper.md), 6e-4 are allowed. An accumulator of out lives for at most 4 tiles
// of 128 keys, 16 steps, while its sum grows from nothing: half of 16 times that is 4.8e-3, and kCutOut = 6e-3 of sum P
// |v| is allowed, and the same of |O| for the sum of P^, formed likewise.
//
// BF16 weights of backend sm90_bf16. P^ is 2^(s - m) in BF16, off by 2^-8 of itself whatever m is, since BF16
// has the exponents of fp32. out divides by the unrounded sum, so what rounding moves meets v and not v - O:
//   |O^_ic - O_ic| <= (sum_j r_ij P_ij |v_jc - O_ic| + 2^-8 sum_j (1 + r_ij) P_ij |v_jc|) / (1 - sum_j r_ij P_ij)
// Tensor cores add exact products of BF16 and cut off what fp32 has no bits for, where others round: u is 2^-23. The
// backward rounds P, and dS that it may make of the rounded P: eP' has 2^-8 P more, eS' 2^-7 (1 + 2^-9) (|dS| + eS),
// and eD 2^-8 sum_j (1 + r_ij) P_ij |dP_ij| for what out has.
#include "kit/bound.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <thread>
#include <utility>

#include "mx/fp8.h"

namespace mxflash::kit {
namespace {

constexpr double kFp32 = 0x1p-24;  // unit roundoff
constexpr double kLeastScale = 0x1p-127;
constexpr double kUnderflow = 0x1p-126;  // a P below it may be 0
constexpr int64_t kFixedGroup = 32, kLeastFixedExponent = -126;
constexpr int64_t kFew = 8;                           // operations beside a sum
constexpr int64_t kLeastKeyTile = 64;                 // keys between two rescalings
constexpr int64_t kExpOperations = 8;                 // of roundoff: exp's own error, and the product with it
constexpr double kCut = 4 * 0x1p-13, kCutOut = 6e-3;  // by FP8 tensor cores
constexpr int64_t kCutStep = 32;                      // products added at once
constexpr double kTileLse = 1e-3;
constexpr double kBf16 = 0x1p-8;            // of a value, rounded
constexpr double kExponentRoundoff = 1e-4;  // where -log2 max P is an integer but for roundoff

// round() of the head comment.
struct Rounding {
  double relative, half_step;
  explicit Rounding(const Fp8Format& f)
      : relative(std::ldexp(1.0, -f.mantissa_bits - 1)),
        half_step(std::ldexp(1.0, f.min_exponent() - f.mantissa_bits - 1)) {}
  double operator()(double magnitude, double scale) const {
    return std::min(magnitude, std::max(relative * magnitude, half_step * scale));
  }
};

// fix() of the head comment.
double fix(double magnitude, double amax) { return std::min(magnitude, 0x1p-13 * amax); }

double stored_fp32(double magnitude) { return kFp32 * magnitude + 0x1p-150; }

// a.b, and the same of their magnitudes.
struct Dot {
  double sum = 0, magnitude = 0;
};
Dot dot(const double* a, const double* b, int64_t n) {
  double sum[4] = {}, magnitude[4] = {};
  const auto add = [&](int64_t c, int64_t l) {
    const double x = a[c] * b[c];
    sum[l] += x;
    magnitude[l] += std::abs(x);
  };
  int64_t c = 0;
  for (; c + 4 <= n; c += 4) {
    for (int64_t l = 0; l < 4; ++l) add(c + l, l);
  }
  for (; c < n; ++c) add(c, 0);
  return {(sum[0] + sum[1]) + (sum[2] + sum[3]), (magnitude[0] + magnitude[1]) + (magnitude[2] + magnitude[3])};
}

// M of the head comment.
double largest_on_the_way(const double* a, const double* b, int64_t n) {
  double sum = 0, largest = 0;
  for (int64_t c = 0; c < n; ++c) {
    largest = std::max(largest, std::abs(a[c] * b[c]));
    sum += a[c] * b[c];
    if ((c + 1) % kCutStep == 0 || c + 1 == n) largest = std::max(largest, std::abs(sum));
  }
  return largest;
}

// |a^.b^ - a.b|, where the elements of a^ and b^ are this far from those of a and b.
double moved_dot(const double* a, const double* a_moved, const double* b, const double* b_moved, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) {
    sum += a_moved[c] * std::abs(b[c]) + (std::abs(a[c]) + a_moved[c]) * b_moved[c];
  }
  return sum;
}

// y += weight |x|
void add_magnitudes(double weight, const double* x, int64_t n, double* __restrict y) {
  for (int64_t c = 0; c < n; ++c) y[c] += weight * std::abs(x[c]);
}

void add(const std::vector<double>& x, std::vector<double>& sum) {
  for (size_t i = 0; i < x.size(); ++i) sum[i] += x[i];
}

// How far fixed point moves the values x[0], x[stride], ..., `count` of them.
void fixed_distances(const double* x, int64_t stride, int64_t count, double* distance) {
  double amax = 0;
  for (int64_t n = 0; n < count; ++n) amax = std::max(amax, std::abs(x[n * stride]));
  if (amax == 0) return;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(amax) - 12, int(kLeastFixedExponent)));
  for (int64_t n = 0; n < count; ++n) {
    distance[n * stride] = std::abs(std::nearbyint(x[n * stride] / unit) * unit - x[n * stride]);
  }
}

// One sequence of one query head.
struct Sequence {
  int64_t q, out, k;  // first row of q and dq; of out, lse and dout; of k and v
  int64_t q_len, k_len;
  int64_t head, kv_head;
};

struct Interval {
  int64_t begin, end;
};

// How far fixed point moves operands, grouped along channels and along tokens; all zeros where they are not in it.
struct Distances {
  std::vector<double> q, k, v, dout;                                      // in scores and dP
  std::vector<double> q_by_token, k_by_token, v_by_token, dout_by_token;  // in products with P and dS
};

// Query rows against all keys of the sequence, [rows][k_len].
struct Block {
  std::vector<double> p, p_relative, dp, ds, s_err;  // P, its r in the backward, dP, dS, eS
  std::vector<double> max_p;                         // [rows]
  Block(int64_t count, int64_t k_len) : max_p(size_t(count)) {
    for (std::vector<double>* x : {&p, &p_relative, &dp, &ds, &s_err}) x->assign(size_t(count * k_len), 0);
  }
};

class Bound {
 public:
  Bound(const OracleProblem& operands, const OracleResult& exact, const BoundOptions& options);
  AttentionBound run() const;

 private:
  Distances distances() const;
  AttentionBound zeros() const;
  void add_rows(const Sequence& s, int64_t first, AttentionBound& sum) const;
  void forward_row(const Sequence& s, int64_t first, int64_t i, Block& block, AttentionBound& sum) const;
  void round_forward_p(Interval keys, const double* p, double max_p, double max_relative,
                       std::vector<double>& p_err) const;
  std::vector<double> round_p(const Sequence& s, const Block& block) const;
  std::vector<double> round_ds(const Sequence& s, const Block& block, int64_t rows, int64_t cols) const;
  void backward_rows(const Sequence& s, int64_t first, const Block& block, AttentionBound& sum) const;

  double g(int64_t n) const { return double(n) * o_.roundoff / (1 - double(n) * o_.roundoff); }
  double dot_err(const Dot& x, int64_t n) const {
    return g(n) * (x.magnitude + std::abs(x.sum)) / 2 + g(kFew) * x.magnitude;
  }
  bool fixed_weights() const { return o_.weights == WeightFormat::fixed; }
  bool tile_weights() const { return o_.weights == WeightFormat::tile; }
  bool bf16_weights() const { return o_.weights == WeightFormat::bf16; }
  size_t q_at(const Sequence& s, int64_t i) const { return size_t(((s.q + i) * p_.num_heads_q + s.head) * d_); }
  size_t k_at(const Sequence& s, int64_t j) const { return size_t(((s.k + j) * p_.num_heads_kv + s.kv_head) * d_); }
  size_t v_at(const Sequence& s, int64_t j) const { return size_t(((s.k + j) * p_.num_heads_kv + s.kv_head) * dv_); }
  size_t out_at(const Sequence& s, int64_t i) const { return size_t(((s.out + i) * p_.num_heads_q + s.head) * dv_); }
  size_t lse_at(const Sequence& s, int64_t i) const { return size_t(s.head * total_out_ + s.out + i); }
  Interval visible_keys(const Sequence& s, int64_t i) const;

  const OracleProblem& p_;
  const OracleResult& x_;
  const BoundOptions& o_;
  const int64_t d_, dv_, total_out_;
  const double scale_;
  int64_t keys_of_row_ = 0, rows_of_key_ = 0;  // terms of dq's sums, and of those of dk and dv
  std::vector<Sequence> sequences_;
  Distances moved_;
};

Bound::Bound(const OracleProblem& operands, const OracleResult& exact, const BoundOptions& options)
    : p_(operands),
      x_(exact),
      o_(options),
      d_(p_.head_dim),
      dv_(p_.head_dim_v),
      total_out_(int64_t(x_.lse.size()) / p_.num_heads_q),
      scale_(p_.softmax_scale != 0 ? p_.softmax_scale : 1 / std::sqrt(double(d_))) {
  const int64_t group = p_.num_heads_q / p_.num_heads_kv;
  const auto start = [](const std::vector<int64_t>& cu, int64_t b) { return cu[size_t(b)]; };
  for (int64_t b = 0; b + 1 < int64_t(p_.cu_seqlens_k.size()); ++b) {
    const int64_t q_begin = p_.shared_q ? 0 : start(p_.cu_seqlens_q, b), k_begin = start(p_.cu_seqlens_k, b);
    const int64_t q_len = start(p_.cu_seqlens_q, p_.shared_q ? 1 : b + 1) - q_begin;
    const int64_t k_len = start(p_.cu_seqlens_k, b + 1) - k_begin;
    keys_of_row_ = std::max(keys_of_row_, p_.shared_q ? p_.cu_seqlens_k.back() : k_len);
    rows_of_key_ = std::max(rows_of_key_, group * q_len);
    for (int64_t head = 0; head < p_.num_heads_q; ++head) {
      sequences_.push_back({q_begin, p_.shared_q ? b * q_len : q_begin, k_begin, q_len, k_len, head, head / group});
    }
  }
  moved_ = distances();
}

Distances Bound::distances() const {
  const auto by_channel = [&](bool used, const std::vector<double>& x, int64_t dim) {
    std::vector<double> distance(x.size());
    for (int64_t row = 0; used && row < int64_t(x.size()) / dim; ++row) {
      for (int64_t c = 0; c < dim; c += kFixedGroup) {
        const size_t at = size_t(row * dim + c);
        fixed_distances(&x[at], 1, std::min(kFixedGroup, dim - c), &distance[at]);
      }
    }
    return distance;
  };
  // `first` is the place of a sequence's first token.
  const auto by_token = [&](const std::vector<double>& x, int64_t heads, int64_t dim, int64_t Sequence::*length,
                            size_t (Bound::*at)(const Sequence&, int64_t) const) {
    std::vector<double> distance(x.size());
    for (const Sequence& s : sequences_) {
      for (int64_t t = 0; fixed_weights() && t < s.*length; t += kFixedGroup) {
        for (int64_t c = 0; c < dim; ++c) {
          const size_t first = (this->*at)(s, t) + size_t(c);
          fixed_distances(&x[first], heads * dim, std::min(kFixedGroup, s.*length - t), &distance[first]);
        }
      }
    }
    return distance;
  };
  const bool scores = o_.fixed_scores;
  const int64_t hq = p_.num_heads_q, hk = p_.num_heads_kv;
  return {.q = by_channel(scores, p_.q, d_),
          .k = by_channel(scores, p_.k, d_),
          .v = by_channel(scores, p_.v, dv_),
          .dout = by_channel(scores, p_.dout, dv_),
          .q_by_token = by_token(p_.q, hq, d_, &Sequence::q_len, &Bound::q_at),
          .k_by_token = by_token(p_.k, hk, d_, &Sequence::k_len, &Bound::k_at),
          .v_by_token = by_token(p_.v, hk, dv_, &Sequence::k_len, &Bound::v_at),
          .dout_by_token = by_token(p_.dout, hq, dv_, &Sequence::q_len, &Bound::out_at)};
}

Interval Bound::visible_keys(const Sequence& s, int64_t i) const {
  const int64_t diagonal = i + s.k_len - s.q_len;
  Interval js{0, s.k_len};
  if (p_.causal) js.end = std::min(js.end, diagonal + 1);
  if (p_.window_right >= 0) js.end = std::min(js.end, diagonal + p_.window_right + 1);
  if (p_.window_left >= 0) js.begin = std::max(js.begin, diagonal - p_.window_left);
  return {js.begin, std::max(js.begin, js.end)};
}

// Adds what the forward rounds of P to p_err [keys], which holds r P.
void Bound::round_forward_p(Interval keys, const double* p, double max_p, double max_relative,
                            std::vector<double>& p_err) const {
  const Rounding to_fp8(kE4m3);
  for (int64_t j0 = keys.begin; j0 < keys.end;) {
    const int64_t j1 = std::min(keys.end, (j0 / kFixedGroup + 1) * kFixedGroup);
    double amax = 0;
    for (int64_t j = j0; j < j1; ++j) amax = std::max(amax, p[j]);
    for (int64_t j = j0; j < j1; ++j) {
      const double upper = p[j] + p_err[size_t(j)];
      switch (o_.weights) {
        case WeightFormat::fp8: p_err[size_t(j)] += to_fp8(upper, 0x1p-8 * (1 + max_relative) * max_p); break;
        case WeightFormat::fp32:
        case WeightFormat::bf16: break;  // beside v, not v - O: forward_row
        case WeightFormat::fixed: p_err[size_t(j)] += fix(upper, (1 + max_relative) * amax / 2); break;
        case WeightFormat::tile: p_err[size_t(j)] += to_fp8(upper, 0x1p-6 * (1 + max_relative) * max_p); break;
      }
      p_err[size_t(j)] += kUnderflow;
    }
    j0 = j1;
  }
}

// Row first + i: bounds of out and lse, and row i of the block up to eS.
void Bound::forward_row(const Sequence& s, int64_t first, int64_t i, Block& block, AttentionBound& sum) const {
  const Interval keys = visible_keys(s, first + i);
  const auto [begin, end] = keys;
  if (begin == end) return;
  const size_t at_q = q_at(s, first + i), at_out = out_at(s, first + i), at_lse = lse_at(s, first + i);
  const size_t at_row = size_t(i * s.k_len);
  const double *q = &p_.q[at_q], *dout = &p_.dout[at_out], *out = &x_.out[at_out];
  const double *q_moved = &moved_.q[at_q], *dout_moved = &moved_.dout[at_out];
  double *p = &block.p[at_row], *p_relative = &block.p_relative[at_row];
  double *dp = &block.dp[at_row], *ds = &block.ds[at_row], *s_err = &block.s_err[at_row];
  const double lse = x_.lse[at_lse];
  const Dot d = dot(out, dout, dv_);
  double& max_p = block.max_p[size_t(i)];

  // Scores, weights, dP.
  std::vector<double> score_err(size_t(s.k_len)), dp_err(size_t(s.k_len)), p_err(size_t(s.k_len));
  double most = 0;  // |s|
  double lse_cut = 0;
  for (int64_t j = begin; j < end; ++j) {
    const size_t at_k = k_at(s, j), at_v = v_at(s, j);
    const Dot score = dot(q, &p_.k[at_k], d_), dp_j = dot(dout, &p_.v[at_v], dv_);
    p[j] = std::exp(scale_ * score.sum - lse);
    dp[j] = dp_j.sum;
    max_p = std::max(max_p, p[j]);
    most = std::max(most, scale_ * std::abs(score.sum));
    score_err[size_t(j)] = scale_ * dot_err(score, d_);
    dp_err[size_t(j)] = dot_err(dp_j, dv_);
    if (tile_weights()) {
      const double cut = scale_ * std::sqrt(double(d_)) * kCut * largest_on_the_way(q, &p_.k[at_k], d_);
      score_err[size_t(j)] += cut;
      lse_cut += p[j] * cut;
    }
    if (!o_.fixed_scores) continue;
    score_err[size_t(j)] += (1 + g(d_)) * scale_ * moved_dot(q, q_moved, &p_.k[at_k], &moved_.k[at_k], d_);
  }
  const int64_t rescalings = (end - begin) / kLeastKeyTile + 2, terms = end - begin + rescalings;
  const double exponent_err = 4 * o_.roundoff * (2 * most + 9);
  double max_relative = 0, relative_sum = 0, rounded_sum = 0;
  for (int64_t j = begin; j < end; ++j) {
    const double relative =
        std::expm1(score_err[size_t(j)] + exponent_err) + g(kExpOperations * (2 + rescalings)) + kFp32;
    p_err[size_t(j)] = relative * p[j];
    max_relative = std::max(max_relative, relative);
    relative_sum += p_err[size_t(j)];
  }
  round_forward_p(keys, p, max_p, max_relative, p_err);
  for (int64_t j = begin; j < end; ++j) rounded_sum += p_err[size_t(j)];
  double lse_err = -std::log1p(-std::min(relative_sum, 0.5)) + g(terms + kFew) + (kFp32 + g(kFew)) * std::abs(lse);
  if (tile_weights()) lse_err = std::min(lse_err, std::max(kTileLse, lse_cut));
  sum.lse[at_lse] = lse_err;
  sum.max_p[at_lse] = max_p;
  sum.exponent[at_lse] = kExponentRoundoff;
  if (tile_weights()) {
    sum.exponent[at_lse] += (lse_err + *std::max_element(score_err.begin(), score_err.end())) / std::log(2.0);
  }

  // out, and eD
  double* out_err = &sum.out[at_out];
  const auto dim_v = size_t(dv_);
  std::vector<double> v_sum(dim_v), v_err(dim_v);  // sum P |v|, and what fixed point moves of it
  double d_err = 0;
  for (int64_t j = begin; j < end; ++j) {
    const double* v = &p_.v[v_at(s, j)];
    for (int64_t c = 0; c < dv_; ++c) {
      out_err[c] += p_err[size_t(j)] * std::abs(v[c] - out[c]);
      v_sum[size_t(c)] += p[j] * std::abs(v[c]);
    }
    d_err += p_err[size_t(j)] * std::abs(dp[j] - d.sum);
    if (bf16_weights()) d_err += kBf16 * (1 + max_relative) * p[j] * std::abs(dp[j]);
    if (fixed_weights()) add_magnitudes(p[j] + p_err[size_t(j)], &moved_.v_by_token[v_at(s, j)], dv_, v_err.data());
  }
  const double least_sum = 1 - rounded_sum;
  d_err = d_err / least_sum + dot_err(d, dv_);
  for (int64_t c = 0; c < dv_; ++c) {
    const double rounded = bf16_weights() ? kBf16 * (1 + max_relative) * v_sum[size_t(c)] : 0;
    const double weights = (out_err[c] + rounded) / least_sum, moved = v_err[size_t(c)] / least_sum,
                 o = std::abs(out[c]);
    double sums = g(terms + kFew) * ((v_sum[size_t(c)] + o) / 2 + o) + g(kFew) * v_sum[size_t(c)];
    if (tile_weights()) sums += kCutOut * (v_sum[size_t(c)] + o) / least_sum;
    const double stored = o_.out_roundoff / kFp32 * stored_fp32(o + weights + moved + sums);
    out_err[c] = weights + moved + sums + stored;
    d_err += (moved + sums + stored) * std::abs(dout[c]) + out_err[c] * dout_moved[c];
  }

  // dS and eS
  const double dlse = p_.dlse.empty() ? 0 : p_.dlse[at_lse], delta = d.sum - dlse;
  d_err += g(kFew) * (std::abs(d.sum) + std::abs(dlse));
  for (int64_t j = begin; j < end; ++j) {
    double moved = 0;
    const double *v = &p_.v[v_at(s, j)], *v_moved = &moved_.v[v_at(s, j)];
    for (int64_t c = 0; o_.fixed_scores && c < dv_; ++c) {
      moved += dout_moved[c] * std::abs(v[c] - out[c]) + (std::abs(dout[c]) + dout_moved[c]) * v_moved[c];
    }
    p_relative[j] = std::expm1(score_err[size_t(j)] + exponent_err + lse_err) + g(kExpOperations) + kFp32;
    ds[j] = p[j] * (dp[j] - delta);
    s_err[j] = ((1 + p_relative[j]) * p[j] + kUnderflow) * (d_err + dp_err[size_t(j)] + moved) +
               (p_relative[j] + g(kFew) + kFp32) * std::abs(ds[j]);
  }
}
// r P and what the backward rounds of P, [rows][k_len].
std::vector<double> Bound::round_p(const Sequence& s, const Block& block) const {
  const double max_p = *std::max_element(block.max_p.begin(), block.max_p.end());
  // Where -log2 of it is an integer but for roundoff, a backend may have floored it to the one below.
  const double row_exponent = max_p > 0 ? std::max(0.0, std::floor(-std::log2(max_p) - 1e-4)) : 0;
  const double fp8_scale = std::exp2(-8 - row_exponent);
  const Rounding to_fp8(kE4m3);
  std::vector<double> p_err(block.p.size());
  for (size_t j = 0; j < size_t(s.k_len); ++j) {
    double amax = 0;
    for (size_t at = j; at < p_err.size(); at += size_t(s.k_len)) {
      amax = std::max(amax, (1 + block.p_relative[at]) * block.p[at]);
    }
    for (size_t at = j; at < p_err.size(); at += size_t(s.k_len)) {
      if (block.p[at] == 0) continue;
      const double err = block.p_relative[at] * block.p[at], upper = block.p[at] + err;
      p_err[at] = err + kUnderflow;
      switch (o_.weights) {
        case WeightFormat::fp8:
        case WeightFormat::tile: p_err[at] += to_fp8(upper, fp8_scale); break;
        case WeightFormat::fp32: break;
        case WeightFormat::bf16: p_err[at] += kBf16 * upper; break;
        case WeightFormat::fixed: p_err[at] += fix(upper, amax); break;
      }
    }
  }
  return p_err;
}

// eS -> eS', where `rows` x `cols` elements share a scale. What the mask hides is zero and stays zero.
std::vector<double> Bound::round_ds(const Sequence& s, const Block& block, int64_t rows, int64_t cols) const {
  std::vector<double> err = block.s_err;
  const Fp8Format format = fp8_format(o_.ds_dtype);
  const Rounding to_fp8(format);
  const double half_max = 0.5 * double(std::bit_cast<float>(format.max_bits));
  const auto count = int64_t(block.max_p.size());
  for (int64_t i0 = 0; i0 < count; i0 += rows) {
    for (int64_t j0 = 0; j0 < s.k_len; j0 += cols) {
      const auto for_each = [&](auto body) {
        for (int64_t i = i0; i < std::min(i0 + rows, count); ++i) {
          for (int64_t j = j0; j < std::min(j0 + cols, s.k_len); ++j) {
            const auto at = size_t(i * s.k_len + j);
            body(std::abs(block.ds[at]) + block.s_err[at], err[at]);
          }
        }
      };
      double amax = 0;
      for_each([&](double upper, double&) { amax = std::max(amax, upper); });
      const double scale = std::max(amax / half_max, kLeastScale);
      for_each([&](double upper, double& e) {
        switch (o_.weights) {
          case WeightFormat::fp8:
          case WeightFormat::tile: e += to_fp8(upper, scale); break;
          case WeightFormat::fp32: break;
          case WeightFormat::bf16: e += (2 + kBf16) * kBf16 * upper; break;
          case WeightFormat::fixed: e += fix(upper, amax); break;
        }
      });
    }
  }
  return err;
}

// Adds the rows' share of dq, dk and dv.
void Bound::backward_rows(const Sequence& s, int64_t first, const Block& block, AttentionBound& sum) const {
  const bool fixed = fixed_weights();
  const std::vector<double> p_err = round_p(s, block);
  const std::vector<double> ds_err = round_ds(s, block, o_.block_rows, fixed ? 1 : o_.block_cols);  // in dK
  const std::vector<double> ds_t_err = fixed ? round_ds(s, block, 1, kFixedGroup) : ds_err;         // in dQ
  const double row_sum = g(keys_of_row_ + kFew) / 2 + g(kFew), key_sum = g(rows_of_key_ + kFew) / 2 + g(kFew);
  for (int64_t i = 0; i < int64_t(block.max_p.size()); ++i) {
    const auto [begin, end] = visible_keys(s, first + i);
    const size_t at_q = q_at(s, first + i), at_out = out_at(s, first + i);
    double* dq = &sum.dq[at_q];
    for (int64_t j = begin; j < end; ++j) {
      const size_t at = size_t(i * s.k_len + j), at_k = k_at(s, j), at_v = v_at(s, j);
      const double p = block.p[at], ds = std::abs(block.ds[at]);
      const double p_upper = p + p_err[at], ds_upper = ds + ds_err[at], ds_t_upper = ds + ds_t_err[at];
      add_magnitudes(p_err[at] + key_sum * p_upper, &p_.dout[at_out], dv_, &sum.dv[at_v]);
      add_magnitudes(scale_ * (ds_t_err[at] + row_sum * ds_t_upper), &p_.k[at_k], d_, dq);
      add_magnitudes(scale_ * (ds_err[at] + key_sum * ds_upper), &p_.q[at_q], d_, &sum.dk[at_k]);
      if (!fixed) continue;
      add_magnitudes((1 + key_sum) * p_upper, &moved_.dout_by_token[at_out], dv_, &sum.dv[at_v]);
      add_magnitudes(scale_ * (1 + row_sum) * ds_t_upper, &moved_.k_by_token[at_k], d_, dq);
      add_magnitudes(scale_ * (1 + key_sum) * ds_upper, &moved_.q_by_token[at_q], d_, &sum.dk[at_k]);
    }
  }
}

void Bound::add_rows(const Sequence& s, int64_t first, AttentionBound& sum) const {
  Block block(std::min(o_.block_rows, s.q_len - first), s.k_len);
  for (int64_t i = 0; i < int64_t(block.max_p.size()); ++i) forward_row(s, first, i, block, sum);
  backward_rows(s, first, block, sum);
}

AttentionBound Bound::zeros() const {
  const auto like = [](const std::vector<double>& x) { return std::vector<double>(x.size()); };
  return {like(x_.out), like(x_.lse), like(x_.dq), like(x_.dk), like(x_.dv), like(x_.lse), like(x_.lse)};
}

AttentionBound Bound::run() const {
  struct Task {
    const Sequence* sequence;
    int64_t first;
  };
  std::vector<Task> tasks;
  for (const Sequence& s : sequences_) {
    if (s.k_len == 0) continue;
    for (int64_t i = 0; i < s.q_len; i += o_.block_rows) tasks.push_back({&s, i});
  }
  // Every thread adds up its own blocks of rows: gradients of keys, and with shared_q of queries, meet in the end.
  const size_t threads = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, std::max<size_t>(1, tasks.size()));
  std::vector<AttentionBound> sums(threads);
  std::atomic<size_t> next = 0;
  const auto work = [&](size_t thread) {
    sums[thread] = zeros();
    for (size_t t = next++; t < tasks.size(); t = next++) add_rows(*tasks[t].sequence, tasks[t].first, sums[thread]);
  };
  std::vector<std::thread> helpers;
  for (size_t thread = 1; thread < threads; ++thread) helpers.emplace_back(work, thread);
  work(0);
  for (std::thread& helper : helpers) helper.join();

  AttentionBound total = std::move(sums[0]);
  for (size_t thread = 1; thread < threads; ++thread) {
    const AttentionBound& x = sums[thread];
    add(x.out, total.out);
    add(x.lse, total.lse);
    add(x.dq, total.dq);
    add(x.dk, total.dk);
    add(x.dv, total.dv);
    add(x.max_p, total.max_p);
    add(x.exponent, total.exponent);
  }
  // The half of a sum's roundoff that goes with the sum itself, and the rounding to fp32.
  const auto store = [&](int64_t terms, const std::vector<double>& exact, std::vector<double>& err) {
    for (size_t i = 0; i < err.size(); ++i) {
      if (err[i] == 0) continue;
      err[i] += g(terms + kFew) / 2 * std::abs(exact[i]);
      err[i] += stored_fp32(std::abs(exact[i]) + err[i]);
    }
  };
  store(keys_of_row_, x_.dq, total.dq);
  store(rows_of_key_, x_.dk, total.dk);
  store(rows_of_key_, x_.dv, total.dv);
  return total;
}

}  // namespace

AttentionBound attention_bound(const OracleProblem& operands, const OracleResult& exact, const BoundOptions& options) {
  return Bound(operands, exact, options).run();
}

}  // namespace mxflash::kit
