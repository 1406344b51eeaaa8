// Symbols: P the exact softmax weights (a row of visible keys sums to 1), m_i the largest of row i, O = P v,
// dP = dout v^T, D_i = O_i . dout_i, delta = D - dlse, dS = P (dP - delta). ^ marks a rounded value, `e` a bound on an
// error.
//
// Rounding to an element format. A normal number moves by at most 2^-(mantissa + 1) of itself (2^-4 for E4M3, 2^-3 for
// E5M2), a subnormal one by half a step (2^-10, 2^-17), and no number by more than itself, since zero is a candidate:
//   |x^ - x| <= round(|x|, scale) := min(|x|, max(relative |x|, half_step scale))
// It grows with |x|, so an upper bound of |x| may stand for it.
//
// Forward. P^ is 2^(s - m + 8) in E4M3, so P's scale is 2^-8 of the running maximum's weight. The running maximum is at
// most the final one, and rescaling shrinks an old error along with its weight:
//   eP_ij = round(P_ij, 2^-8 m_i)
// out divides by the rounded sum, so sum_j P_j (v_j - O) = 0 lets O be subtracted:
//   O^ - O = sum_j P^_j (v_j - O) / sum_j P^_j = sum_j (P^_j - P_j)(v_j - O) / sum_j P^_j
//   |O^_ic - O_ic| <= sum_j eP_ij |v_jc - O_ic| / (1 - sum_j eP_ij)
//
// Backward. P^ has scale 2^-(8 + r) with r the least row_exponent of the block of rows, r_i = floor(-log2 m_i):
//   eP'_ij = round(P_ij, 2^-(8 + r))           |dV^ - dV|_jc <= sum_i eP'_ij |dout_ic|
// delta comes from the rounded O. Its error is not sum_c |O^ - O| |dout|, which forgets that the channels of O^ share
// their weights, but the forward's sum with dP in place of v:
//   eD_i = sum_j eP_ij |dP_ij - D_i| / (1 - sum_j eP_ij) + sum_c |stored O^ - O^|_ic |dout_ic|
//   eS_ij = P_ij eD_i
// Then dS is rounded. With amax the largest |dS| + eS of its block, rceil takes the least 2^e >= amax / max_element, so
// scale < 2 amax / max_element, or it is 2^-127, the least there is:
//   eS'_ij = eS_ij + round(|dS_ij| + eS_ij, scale)
//   |dQ^ - dQ|_ic <= softmax_scale sum_j eS'_ij |k_jc|         |dK^ - dK|_jc <= softmax_scale sum_i eS'_ij |q_ic|
//
// Arithmetic. A sum of n products in a format with unit roundoff u is off by at most g(n) = n u / (1 - n u) times the
// sum of their magnitudes, in any order (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). An exponent that
// is off by x moves a weight by a factor up to e^x: scores are off by g(d) |q| |k|, and lse by its rounding to fp32,
// 2^-24 |lse|, the largest part of lse's own bound. Values are fp32 when they meet an encoder: 2^-24 more.
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

constexpr double kFp32 = 0x1p-24;  // unit roundoff of fp32
constexpr double kLeastScale = 0x1p-127;

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

double stored_fp32(double magnitude) { return kFp32 * magnitude + 0x1p-150; }

double dot(const double* a, const double* b, int64_t n) {
  double sum[4] = {};
  int64_t c = 0;
  for (; c + 4 <= n; c += 4) {
    for (int64_t l = 0; l < 4; ++l) sum[l] += a[c + l] * b[c + l];
  }
  for (; c < n; ++c) sum[0] += a[c] * b[c];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

double norm(const double* a, int64_t n) { return std::sqrt(dot(a, a, n)); }

// y += weight |x|
void add_magnitudes(double weight, const double* x, int64_t n, double* __restrict y) {
  for (int64_t c = 0; c < n; ++c) y[c] += weight * std::abs(x[c]);
}

void add(const std::vector<double>& x, std::vector<double>& sum) {
  for (size_t i = 0; i < x.size(); ++i) sum[i] += x[i];
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

// The largest of any key of a sequence.
struct KeyMagnitudes {
  double norm_k = 0, norm_v = 0;
  std::vector<double> v;  // [head_dim_v]
};

// What the backward needs of a row, beside its part of a Block.
struct Row {
  double max_p = 0;
  double relative = 0;  // of P in the backward, when it meets the encoder
};

// Query rows against all keys of the sequence, [rows][k_len].
struct Block {
  std::vector<double> p, dp, ds, s_err;  // P, dP, dS, and eS before or eS' after quantize_ds
  std::vector<Row> rows;
  Block(int64_t count, int64_t k_len) : rows(size_t(count)) {
    for (std::vector<double>* x : {&p, &dp, &ds, &s_err}) x->assign(size_t(count * k_len), 0);
  }
};

class Bound {
 public:
  Bound(const OracleProblem& operands, const OracleResult& exact, const BoundOptions& options);
  AttentionBound run() const;

 private:
  AttentionBound zeros() const;
  void add_rows(const Sequence& s, int64_t first, AttentionBound& sum) const;
  void forward_row(const Sequence& s, const KeyMagnitudes& keys, int64_t first, int64_t i, Block& block,
                   AttentionBound& sum) const;
  void quantize_ds(const Sequence& s, Block& block) const;
  void backward_rows(const Sequence& s, int64_t first, const Block& block, AttentionBound& sum) const;
  KeyMagnitudes key_magnitudes(const Sequence& s) const;

  double roundoff(int64_t n) const { return double(n) * o_.roundoff / (1 - double(n) * o_.roundoff); }  // g(n)
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
  int64_t max_terms_ = 0;  // of any sum over tokens
  std::vector<Sequence> sequences_;
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
    max_terms_ = std::max(max_terms_, std::max(p_.shared_q ? p_.cu_seqlens_k.back() : k_len, group * q_len));
    for (int64_t head = 0; head < p_.num_heads_q; ++head) {
      sequences_.push_back({q_begin, p_.shared_q ? b * q_len : q_begin, k_begin, q_len, k_len, head, head / group});
    }
  }
}

Interval Bound::visible_keys(const Sequence& s, int64_t i) const {
  const int64_t diagonal = i + s.k_len - s.q_len;
  Interval js{0, s.k_len};
  if (p_.causal) js.end = std::min(js.end, diagonal + 1);
  if (p_.window_right >= 0) js.end = std::min(js.end, diagonal + p_.window_right + 1);
  if (p_.window_left >= 0) js.begin = std::max(js.begin, diagonal - p_.window_left);
  return {js.begin, std::max(js.begin, js.end)};
}

KeyMagnitudes Bound::key_magnitudes(const Sequence& s) const {
  KeyMagnitudes m;
  m.v.assign(size_t(dv_), 0);
  for (int64_t j = 0; j < s.k_len; ++j) {
    const double* v = &p_.v[v_at(s, j)];
    m.norm_k = std::max(m.norm_k, norm(&p_.k[k_at(s, j)], d_));
    m.norm_v = std::max(m.norm_v, norm(v, dv_));
    for (int64_t c = 0; c < dv_; ++c) m.v[size_t(c)] = std::max(m.v[size_t(c)], std::abs(v[c]));
  }
  return m;
}

// Row first + i: bounds of out and lse, and row i of the block up to eS.
void Bound::forward_row(const Sequence& s, const KeyMagnitudes& keys, int64_t first, int64_t i, Block& block,
                        AttentionBound& sum) const {
  const auto [begin, end] = visible_keys(s, first + i);
  if (begin == end) return;
  const size_t at_out = out_at(s, first + i), at_lse = lse_at(s, first + i), at_row = size_t(i * s.k_len);
  const double *q = &p_.q[q_at(s, first + i)], *dout = &p_.dout[at_out], *out = &x_.out[at_out];
  double *p = &block.p[at_row], *dp = &block.dp[at_row], *ds = &block.ds[at_row], *s_err = &block.s_err[at_row];
  const double lse = x_.lse[at_lse], out_dot_dout = dot(out, dout, dv_), norm_dout = norm(dout, dv_);
  Row& row = block.rows[size_t(i)];
  for (int64_t j = begin; j < end; ++j) {
    p[j] = std::exp(scale_ * dot(q, &p_.k[k_at(s, j)], d_) - lse);
    dp[j] = dot(dout, &p_.v[v_at(s, j)], dv_);
    row.max_p = std::max(row.max_p, p[j]);
  }

  // Of a score minus another (the maximum, or lse), and of its exponential; a dozen operations beside the product.
  const double score_err = 2 * roundoff(d_ + 12) * scale_ * norm(q, d_) * keys.norm_k + roundoff(12);
  const double lse_err = score_err + roundoff(max_terms_ + 12) + (kFp32 + roundoff(4)) * std::abs(lse);
  const double relative = std::expm1(score_err) + kFp32;
  row.relative = std::expm1(score_err + lse_err) + kFp32;
  sum.lse[at_lse] = lse_err;
  sum.max_p[at_lse] = row.max_p;

  const Rounding to_p(kE4m3);
  double* out_err = &sum.out[at_out];
  double p_err_sum = 0, d_err = 0;
  for (int64_t j = begin; j < end; ++j) {
    const double p_err = relative * p[j] + to_p((1 + relative) * p[j], 0x1p-8 * row.max_p);
    const double* v = &p_.v[v_at(s, j)];
    for (int64_t c = 0; c < dv_; ++c) out_err[c] += p_err * std::abs(v[c] - out[c]);
    d_err += p_err * std::abs(dp[j] - out_dot_dout);
    p_err_sum += p_err;
  }
  d_err = d_err / (1 - p_err_sum) + roundoff(dv_ + 4) * norm(out, dv_) * norm_dout;
  for (int64_t c = 0; c < dv_; ++c) {
    const double weights = out_err[c] / (1 - p_err_sum);
    const double sums = 2 * roundoff(max_terms_ + 12) * keys.v[size_t(c)];  // numerator and denominator
    const double stored = stored_fp32(std::abs(out[c]) + weights + sums);
    out_err[c] = weights + sums + stored;
    d_err += (sums + stored) * std::abs(dout[c]);
  }

  const double dp_err = roundoff(dv_ + 4) * norm_dout * keys.norm_v;
  const double delta = out_dot_dout - (p_.dlse.empty() ? 0 : p_.dlse[at_lse]);
  for (int64_t j = begin; j < end; ++j) {
    ds[j] = p[j] * (dp[j] - delta);
    s_err[j] = (1 + row.relative) * p[j] * (d_err + dp_err) + (row.relative + kFp32) * std::abs(ds[j]);
  }
}

// eS -> eS', per block of keys. What the mask hides is zero and stays zero.
void Bound::quantize_ds(const Sequence& s, Block& block) const {
  const Fp8Format format = fp8_format(o_.ds_dtype);
  const Rounding to_ds(format);
  const double half_max = 0.5 * double(std::bit_cast<float>(format.max_bits));
  for (int64_t j0 = 0; j0 < s.k_len; j0 += o_.block_cols) {
    const int64_t j1 = std::min(j0 + o_.block_cols, s.k_len);
    const auto for_each = [&](auto body) {
      for (size_t i = 0; i < block.rows.size(); ++i) {
        for (size_t at = i * size_t(s.k_len) + size_t(j0); at < i * size_t(s.k_len) + size_t(j1); ++at) {
          body(std::abs(block.ds[at]), block.s_err[at]);
        }
      }
    };
    double amax = 0;
    for_each([&](double ds, double err) { amax = std::max(amax, ds + err); });
    for_each([&](double ds, double& err) { err += to_ds(ds + err, std::max(amax / half_max, kLeastScale)); });
  }
}

// Adds the rows' share of dq, dk and dv.
void Bound::backward_rows(const Sequence& s, int64_t first, const Block& block, AttentionBound& sum) const {
  double max_p = 0;
  for (const Row& row : block.rows) max_p = std::max(max_p, row.max_p);
  // Where -log2 of it is an integer but for roundoff, a backend may have floored it to the one below.
  const double row_exponent = max_p > 0 ? std::max(0.0, std::floor(-std::log2(max_p) - 1e-4)) : 0;
  const double p_scale = std::exp2(-8 - row_exponent), terms = roundoff(max_terms_ + 12);
  const Rounding to_p(kE4m3);
  for (int64_t i = 0; i < int64_t(block.rows.size()); ++i) {
    const auto [begin, end] = visible_keys(s, first + i);
    const double relative = block.rows[size_t(i)].relative;
    const double *q = &p_.q[q_at(s, first + i)], *dout = &p_.dout[out_at(s, first + i)];
    double* dq = &sum.dq[q_at(s, first + i)];
    for (int64_t j = begin; j < end; ++j) {
      const size_t at = size_t(i * s.k_len + j);
      const double p = block.p[at], p_err = relative * p + to_p((1 + relative) * p, p_scale);
      const double ds = std::abs(block.ds[at]), s_err = block.s_err[at];
      const double s_weight = scale_ * (s_err + terms * (ds + s_err));
      add_magnitudes(p_err + terms * (p + p_err), dout, dv_, &sum.dv[v_at(s, j)]);
      add_magnitudes(s_weight, &p_.k[k_at(s, j)], d_, dq);
      add_magnitudes(s_weight, q, d_, &sum.dk[k_at(s, j)]);
    }
  }
}

void Bound::add_rows(const Sequence& s, int64_t first, AttentionBound& sum) const {
  Block block(std::min(o_.block_rows, s.q_len - first), s.k_len);
  const KeyMagnitudes keys = key_magnitudes(s);
  for (int64_t i = 0; i < int64_t(block.rows.size()); ++i) forward_row(s, keys, first, i, block, sum);
  quantize_ds(s, block);
  backward_rows(s, first, block, sum);
}

AttentionBound Bound::zeros() const {
  const auto like = [](const std::vector<double>& x) { return std::vector<double>(x.size()); };
  return {like(x_.out), like(x_.lse), like(x_.dq), like(x_.dk), like(x_.dv), like(x_.lse)};
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
  }
  const auto store = [](const std::vector<double>& exact, std::vector<double>& err) {
    for (size_t i = 0; i < err.size(); ++i) {
      if (err[i] > 0) err[i] += stored_fp32(std::abs(exact[i]) + err[i]);
    }
  };
  store(x_.dq, total.dq);
  store(x_.dk, total.dk);
  store(x_.dv, total.dv);
  return total;
}

}  // namespace

AttentionBound attention_bound(const OracleProblem& operands, const OracleResult& exact, const BoundOptions& options) {
  return Bound(operands, exact, options).run();
}

}  // namespace mxflash::kit
