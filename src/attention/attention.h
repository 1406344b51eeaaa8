// The backends of attention_fwd and attention_bwd, and what they share about shapes.
#pragma once

#include <mxflash/attention.h>

#include <cmath>

#include "mx/scale_layout.h"
#include "runtime/dispatch.h"

namespace mxflash {

extern const Impl<AttentionFwd> kAttentionFwdSm100, kAttentionFwdSm90, kAttentionFwdSm90Bf16;
extern const Impl<AttentionFwd> kAttentionFwdCpu, kAttentionFwdRef;
extern const Impl<AttentionBwd> kAttentionBwdSm100, kAttentionBwdSm90, kAttentionBwdSm90Bf16;
extern const Impl<AttentionBwd> kAttentionBwdCpu, kAttentionBwdRef;

ImplList<AttentionFwd> attention_fwd_list();
ImplList<AttentionBwd> attention_bwd_list();

// For backends that read no images: q, k and v themselves are there.
Status check_payloads(const AttentionFwd& args);

// All rules but the workspace's. The operator asks before it writes anything.
Status check_attention(const char* op, const AttentionFwd& args);
Status check_attention(const char* op, const AttentionBwd& args);

// Extents of a checked call. Args is AttentionFwd or AttentionBwd.
struct AttentionShape {
  int64_t total_q = 0, total_k = 0, total_out = 0;
  int64_t num_heads_q = 0, num_heads_kv = 0, group = 1;
  int64_t head_dim = 0, head_dim_v = 0;
  int64_t batch = 0;  // key sequences
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  Jagged seq_q{}, seq_k{};
  bool shared_q = false;
  double softmax_scale = 0;

  template <class Args>
  static AttentionShape of(const Args& a) {
    AttentionShape s;
    s.total_q = a.q.data.shape[0];
    s.total_k = a.k.data.shape[0];
    s.num_heads_q = a.q.data.shape[1];
    s.num_heads_kv = a.k.data.shape[1];
    s.group = s.num_heads_kv ? s.num_heads_q / s.num_heads_kv : 0;
    s.head_dim = a.q.data.shape[2];
    s.head_dim_v = a.v.data.shape[2];
    s.batch = a.seq_k.batch;
    s.seq_q = a.seq_q;
    s.seq_k = a.seq_k;
    s.shared_q = a.shared_q;
    s.total_out = s.shared_q ? s.batch * s.total_q : s.total_q;
    s.max_seqlen_q = longest_sequence(s.total_q, s.seq_q);
    s.max_seqlen_k = longest_sequence(s.total_k, s.seq_k);
    s.softmax_scale = a.softmax_scale != 0 ? double(a.softmax_scale) : 1 / std::sqrt(double(s.head_dim));
    return s;
  }

  constexpr Sequence query_sequence(int64_t b) const { return sequence_at(total_q, seq_q, shared_q ? 0 : b); }
  constexpr Sequence key_sequence(int64_t b) const { return sequence_at(total_k, seq_k, b); }
  // The same rows as query_sequence(b), on the axis of out, lse and dout.
  constexpr Jagged seq_out() const { return shared_q ? Jagged{.batch = seq_k.batch} : seq_q; }
  constexpr Sequence out_sequence(int64_t b) const { return sequence_at(total_out, seq_out(), b); }
};

}  // namespace mxflash
