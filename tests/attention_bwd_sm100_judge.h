// What the backward's kernels on Blackwell must give, element by element: their recipe in float64, and how far roundoff
// may take a correct kernel from it.
//
// The recipe rounds twice, P8 and dS8, and each is a step function. A kernel that computes in fp32 has its argument
// within an interval, so its rounded value within the values of that interval's ends: usually one and the same, one
// step apart near a tie. That is all that the bound allows for a weight; a wrong scale, row, tile or order is far
// outside. Intervals, with u = 2^-24 and sums in fp32 in any order (n - 1 roundings each):
//   S, dP       head_dim u sum |terms|
//   lse', x     x = S c - lse': c, log2(e), the product lse log2(e) and the FMA are rounded: u (2 |S c| + 4 |lse'| +
//   |x|) P8          relative: ln 2 times the interval of x, and 2^-22 of ex2.approx delta       (head_dim + 4) u sum
//   |terms| dS8         P8 (dP - delta): those, and two roundings scale of a block of dS8: that of the least or of the
//   greatest maximum that is possible dV, dK, dQ  what weights may be off, and (terms + 4) u sum |terms|; the dtype's
//   rounding
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "attention/mask.h"
#include "kit/cases.h"
#include "kit/mx_attention.h"
#include "mx/block.h"
#include "mx/e8m0.h"
#include "mx/scale_layout.h"

namespace mxflash::kit {

struct Judgement {
  std::vector<double> value, bound;  // of a gradient
  void resize(size_t n) { value.assign(n, 0.0), bound.assign(n, 0.0); }
};

struct BackwardJudge {
  Judgement dq, dk, dv;
};

namespace judge {

constexpr double kRoundoff = 0x1p-24;

struct Interval {
  double value, error;  // the true one lies in value +- error
};

inline double e4m3(double x) { return double(decode_fp8(encode_fp8(float(x), kE4m3), kE4m3)); }

// What E4M3 with this scale makes of x, and how far from it that of any other value of its interval may be.
inline Interval rounded(const Interval& x, double nominal_scale, double least_scale, double greatest_scale) {
  const double value = nominal_scale * e4m3(x.value / nominal_scale);
  double error = 0;
  for (double scale = least_scale; scale <= greatest_scale; scale *= 2) {
    for (const double end : {x.value - x.error, x.value + x.error}) {
      error = std::max(error, std::fabs(scale * e4m3(end / scale) - value));
    }
  }
  return {value, error};
}

inline double scale_of(double amax) {
  return decode_e8m0_f64(scale_from_amax(magnitude_bits(float(amax)), kE4m3, MxRule::rceil));
}

}  // namespace judge

// `forward` is what the forward left: out, lse, row_exponent. v_mean, k_mean: none.
inline BackwardJudge judge_backward(const MxAttention& a, const AttentionResult& forward) {
  using namespace judge;
  const auto floats = [](const OwnedMx& t, const Jagged& seq) { return ref_dequantize(t.view, seq); };
  const std::vector<float> q = floats(a.q, a.seq_q()), k = floats(a.k, a.seq_k()), v = floats(a.v, a.seq_k());
  const std::vector<float> dout = floats(a.dout, a.seq_out());
  const int64_t heads = a.q.view.data.shape[1], heads_kv = a.k.view.data.shape[1], dim = a.q.view.data.shape[2];
  const int64_t dim_v = a.v.view.data.shape[2];
  const int64_t total_q = a.q.view.data.shape[0], total_k = a.k.view.data.shape[0], total_out = a.total_out();
  const double softmax_scale = a.softmax_scale != 0 ? double(a.softmax_scale) : 1 / std::sqrt(double(dim));
  const double log2e = 1 / std::log(2.0), c = softmax_scale * log2e;
  BackwardJudge r;
  r.dq.resize(q.size()), r.dk.resize(k.size()), r.dv.resize(v.size());
  std::vector<double> dq_size(q.size()), dk_size(k.size()), dv_size(v.size());  // sums of |terms|
  std::vector<double> dq_terms(q.size()), dk_terms(k.size()), dv_terms(v.size());

  for (int64_t b = 0; b < a.batch; ++b) {
    const Sequence sq = sequence_at(total_q, a.seq_q(), a.shared_q ? 0 : b),
                   so = sequence_at(total_out, a.seq_out(), b);
    const Sequence sk = sequence_at(total_k, a.seq_k(), b);
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t kv = head / (heads / heads_kv);
      const auto row_of = [](const std::vector<float>& x, int64_t token, int64_t h, int64_t n, int64_t width) {
        return x.data() + (token * n + h) * width;
      };
      std::vector<Interval> weight(size_t(sq.length * sk.length), {0, 0}), ds = weight;
      std::vector<Range> seen(size_t(sq.length));
      for (int64_t first = 0; first < sq.length; first += kMxBlock) {
        const int64_t end = std::min(first + kMxBlock, sq.length);
        int least = 119;
        for (int64_t i = first; i < end; ++i) {
          const size_t at = size_t(head * total_out + so.start + i);
          if (forward.lse[at] != -HUGE_VALF) least = std::min(least, int(forward.row_exponent[at]));
        }
        const double pe = 8 + least, down = std::exp2(-pe);
        for (int64_t i = first; i < end; ++i) {
          const size_t at = size_t(head * total_out + so.start + i);
          const double lse = double(forward.lse[at]) * log2e;
          if (forward.lse[at] == -HUGE_VALF) continue;
          const float* const qi = row_of(q, sq.start + i, head, heads, dim);
          const float* const oi = row_of(dout, so.start + i, head, heads, dim_v);
          const float* const out = row_of(forward.out, so.start + i, head, heads, dim_v);
          double delta = 0, delta_size = 0;
          for (int64_t n = 0; n < dim_v; ++n) {
            delta += double(out[n]) * double(oi[n]);
            delta_size += std::fabs(double(out[n]) * double(oi[n]));
          }
          if (!a.dlse.empty()) delta -= double(a.dlse[at]), delta_size += std::fabs(double(a.dlse[at]));
          const double delta_error = double(dim_v + 4) * kRoundoff * delta_size;
          seen[size_t(i)] = visible_keys(a.mask, i, i + 1, sq.length, sk.length);
          for (int64_t j = seen[size_t(i)].first; j < seen[size_t(i)].end; ++j) {
            const float* const kj = row_of(k, sk.start + j, kv, heads_kv, dim);
            const float* const vj = row_of(v, sk.start + j, kv, heads_kv, dim_v);
            double s = 0, s_size = 0, dp = 0, dp_size = 0;
            for (int64_t n = 0; n < dim; ++n) {
              s += double(qi[n]) * double(kj[n]), s_size += std::fabs(double(qi[n]) * double(kj[n]));
            }
            for (int64_t n = 0; n < dim_v; ++n) {
              dp += double(oi[n]) * double(vj[n]), dp_size += std::fabs(double(oi[n]) * double(vj[n]));
            }
            const double x = s * c - lse + pe;
            const double x_error =
                kRoundoff * (c * (double(dim) * s_size + 2 * std::fabs(s)) + 4 * (std::fabs(lse) + pe) + std::fabs(x));
            const double p = std::exp2(x), p_error = p * 1.01 * (std::log(2.0) * x_error + 0x1p-22);
            const size_t pair = size_t(i * sk.length + j);
            weight[pair] = rounded({p * down, p_error * down}, down, down, down);
            const double dp_error = double(dim_v) * kRoundoff * dp_size, d = dp - delta;
            ds[pair] = {p * d, (p + p_error) * (dp_error + delta_error + 2 * kRoundoff * std::fabs(d)) +
                                   p_error * std::fabs(d)};
          }
        }
        for (int64_t j0 = 0; j0 < sk.length; j0 += kMxBlock) {  // dS8 -> dS^
          const int64_t j1 = std::min(j0 + kMxBlock, sk.length);
          double most = 0, least_most = 0, greatest_most = 0;
          const auto each = [&](auto&& body) {
            for (int64_t i = first; i < end; ++i) {
              const int64_t to = std::min(j1, seen[size_t(i)].end);
              for (int64_t j = std::max(j0, seen[size_t(i)].first); j < to; ++j) body(ds[size_t(i * sk.length + j)]);
            }
          };
          each([&](Interval& x) {
            x.value *= down, x.error *= down;
            most = std::max(most, std::fabs(x.value));
            least_most = std::max(least_most, std::fabs(x.value) - x.error);
            greatest_most = std::max(greatest_most, std::fabs(x.value) + x.error);
          });
          each([&](Interval& x) { x = rounded(x, scale_of(most), scale_of(least_most), scale_of(greatest_most)); });
        }
      }
      for (int64_t i = 0; i < sq.length; ++i) {
        const float* const qi = row_of(q, sq.start + i, head, heads, dim);
        const float* const oi = row_of(dout, so.start + i, head, heads, dim_v);
        for (int64_t j = seen[size_t(i)].first; j < seen[size_t(i)].end; ++j) {
          const float* const kj = row_of(k, sk.start + j, kv, heads_kv, dim);
          const Interval p = weight[size_t(i * sk.length + j)], d = ds[size_t(i * sk.length + j)];
          const auto add = [&](Judgement& g, std::vector<double>& size, std::vector<double>& terms, size_t at,
                               const Interval& w, const float* x, int64_t width, double factor) {
            for (int64_t n = 0; n < width; ++n) {
              g.value[at + size_t(n)] += factor * w.value * double(x[n]);
              g.bound[at + size_t(n)] += factor * w.error * std::fabs(double(x[n]));
              size[at + size_t(n)] += factor * (std::fabs(w.value) + w.error) * std::fabs(double(x[n]));
              terms[at + size_t(n)] += 1;
            }
          };
          add(r.dv, dv_size, dv_terms, size_t(((sk.start + j) * heads_kv + kv) * dim_v), p, oi, dim_v, 1);
          add(r.dk, dk_size, dk_terms, size_t(((sk.start + j) * heads_kv + kv) * dim), d, qi, dim, softmax_scale);
          add(r.dq, dq_size, dq_terms, size_t(((sq.start + i) * heads + head) * dim), d, kj, dim, softmax_scale);
        }
      }
    }
  }
  const auto finish = [](Judgement& g, const std::vector<double>& size, const std::vector<double>& terms) {
    for (size_t n = 0; n < g.bound.size(); ++n) g.bound[n] += kRoundoff * (terms[n] + 4) * size[n];
  };
  finish(r.dq, dq_size, dq_terms), finish(r.dk, dk_size, dk_terms), finish(r.dv, dv_size, dv_terms);
  return r;
}

// "" or the worst element outside of its bound. `roundoff`, `tiny`: of the dtype that it is stored in.
inline std::string outside(const char* name, const Judgement& g, const std::vector<float>& got, double roundoff = 0,
                           double tiny = 0) {
  double worst = 1;
  std::string text;
  for (size_t n = 0; n < got.size(); ++n) {
    const double bound = g.bound[n] + roundoff * (std::fabs(g.value[n]) + g.bound[n]) + tiny;
    const double off = std::fabs(double(got[n]) - g.value[n]);
    if (off <= bound) continue;  // NaN is not
    const double times = std::isfinite(off) && bound > 0 ? off / bound : HUGE_VAL;
    if (!text.empty() && times <= worst) continue;
    worst = times;
    text = std::string(name) + "[" + std::to_string(n) + "] is " + std::to_string(got[n]) + ", should be " +
           std::to_string(g.value[n]) + " +- " + std::to_string(bound);
  }
  return text;
}

// How much the bound allows: its size over that of the gradient.
inline double slack(const Judgement& g) {
  double bound = 0, value = 0;
  for (size_t n = 0; n < g.value.size(); ++n) bound += g.bound[n] * g.bound[n], value += g.value[n] * g.value[n];
  return value > 0 ? std::sqrt(bound / value) : 0;
}

}  // namespace mxflash::kit
