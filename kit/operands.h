// Operands of an attention case, and the same case as a problem for the oracle.
#pragma once

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

#include "kit/cases.h"
#include "kit/oracle.h"
#include "kit/random.h"

namespace mxflash::kit {

struct Operands {
  std::vector<float> q;     // [total_q, num_heads_q, head_dim]
  std::vector<float> k;     // [total_k, num_heads_kv, head_dim]
  std::vector<float> v;     // [total_k, num_heads_kv, head_dim_v]
  std::vector<float> dout;  // [total_out, num_heads_q, head_dim_v]
  std::vector<float> dlse;  // [num_heads_q, total_out]; empty unless the case has one
};

// The same values on every platform. A tensor's values depend on the seed and on its own shape only.
inline Operands make_operands(const AttentionCase& c, uint64_t seed = 1) {
  const int64_t dim = c.head_dim, half = dim / 2, row_k = int64_t(c.num_heads_kv) * dim;
  const int64_t row_v = int64_t(c.num_heads_kv) * c.head_dim_v, row_out = int64_t(c.num_heads_q) * c.head_dim_v;
  Operands x;
  x.q.resize(total_q(c) * c.num_heads_q * dim);
  x.k.resize(total_k(c) * row_k);
  x.v.resize(total_k(c) * row_v);
  x.dout.resize(total_out(c) * row_out);
  if (c.with_dlse) x.dlse.resize(total_out(c) * c.num_heads_q);

  Random q_random(seed, 1), k_random(seed, 2), v_random(seed, 3), dout_random(seed, 4), dlse_random(seed, 5);
  fill_normal(q_random, x.q);
  fill_normal(k_random, x.k);
  fill_normal(v_random, x.v);
  fill_normal(dout_random, x.dout);
  fill_normal(dlse_random, x.dlse);

  switch (c.distribution) {
    case Distribution::normal: break;
    case Distribution::outlier_channels:
      scale_channels(x.q, dim, 4, 6);
      scale_channels(x.k, dim, 4, 6);
      break;
    case Distribution::attention_sink: {
      // Queries lean towards one direction, a quarter of the channels, and only the first key is far along it: its
      // logit is higher by 0.875 sqrt(dim), which is 10 for 128 channels.
      add_to_channels(x.q, dim, 0, dim / 4, 1);
      int64_t first = 0;
      for (int32_t len : c.lens_k) {
        if (len > 0) {
          add_to_channels(std::span(x.k).subspan(first * row_k, row_k), dim, 0, dim / 4, 3.5f);
          for (float& value : std::span(x.v).subspan(first * row_v, row_v)) value *= 0.01f;
        }
        first += len;
      }
      break;
    }
    case Distribution::peaky: scale_channels(x.q, dim, dim, 4); break;
    case Distribution::constant:
      // Half of the channels of k stay random, where q is zero: otherwise dq would be zero too, and untested.
      set_channels(x.q, dim, 0, half, 0.5f);
      set_channels(x.q, dim, half, dim, 0);
      set_channels(x.k, dim, 0, half, 1);
      break;
    case Distribution::wide_row_gradients: scale_rows_lognormal(dout_random, x.dout, row_out, 2); break;
    case Distribution::mean_v: add_random_mean(v_random, x.v, row_v, 4); break;
    case Distribution::negative_logits:
      // Powers of two, exact in E4M3 under any block scale: the large logit itself carries no error.
      set_channels(x.q, dim, 0, 1, 16);
      set_channels(x.k, dim, 0, 1, -64);
      break;
  }

  // Nothing may read tokens that belong to no sequence.
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::fill(x.q.end() - int64_t(c.slack_q) * c.num_heads_q * dim, x.q.end(), nan);
  std::fill(x.k.end() - c.slack_k * row_k, x.k.end(), nan);
  std::fill(x.v.end() - c.slack_k * row_v, x.v.end(), nan);
  if (!c.shared_q) std::fill(x.dout.end() - c.slack_q * row_out, x.dout.end(), nan);
  return x;
}

// `x` may also be operands after a round trip through a narrower type, to separate its error from the kernel's.
inline OracleProblem make_problem(const AttentionCase& c, const Operands& x, bool backward = true) {
  const std::vector<int32_t> cu_q = cu_seqlens(c.lens_q), cu_k = cu_seqlens(c.lens_k);
  OracleProblem problem{
      .num_heads_q = c.num_heads_q,
      .num_heads_kv = c.num_heads_kv,
      .head_dim = c.head_dim,
      .head_dim_v = c.head_dim_v,
      .cu_seqlens_q = {cu_q.begin(), cu_q.end()},
      .cu_seqlens_k = {cu_k.begin(), cu_k.end()},
      .causal = c.mask.causal,
      .window_left = c.mask.window_left,
      .window_right = c.mask.window_right,
      .shared_q = c.shared_q,
      .q = {x.q.begin(), x.q.end()},
      .k = {x.k.begin(), x.k.end()},
      .v = {x.v.begin(), x.v.end()},
  };
  if (backward) {
    problem.dout.assign(x.dout.begin(), x.dout.end());
    problem.dlse.assign(x.dlse.begin(), x.dlse.end());
  }
  return problem;
}

}  // namespace mxflash::kit
