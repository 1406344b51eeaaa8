// Exact attention, forward and backward: dense float64, and ignorant of MX. It judges the `ref` backend, which judges
// the others; finite differences and stored vectors judge the oracle (tests/oracle_test.cpp).
//
// Layouts and masks are those of mxflash/attention.h. Total rows follow from the sizes of q and k; rows at and after
// cu_seqlens.back() belong to no sequence: never read, and their results are 0 (lse: -inf).
// Memory: beside operands and results, 256 bytes a thread and key of the longest sequence; never Sq x Sk.
#pragma once

#include <cstdint>
#include <vector>

namespace mxflash::kit {

struct OracleProblem {
  int64_t num_heads_q = 1, num_heads_kv = 1;            // num_heads_q = group * num_heads_kv
  int64_t head_dim = 0, head_dim_v = 0;                 // any positive values
  std::vector<int64_t> cu_seqlens_q{}, cu_seqlens_k{};  // [batch + 1]; with shared_q cu_seqlens_q is {0, Lq}
  bool causal = false;                                  // bottom-right aligned
  int64_t window_left = -1, window_right = -1;          // both ends inclusive, negative = open
  double softmax_scale = 0;                             // 0: 1 / sqrt(head_dim)
  bool shared_q = false;    // one query sequence attends to every key sequence; out rows are batch * Lq, sequence-major
  std::vector<double> q{};  // [total_q, num_heads_q, head_dim]
  std::vector<double> k{};  // [total_k, num_heads_kv, head_dim]
  std::vector<double> v{};  // [total_k, num_heads_kv, head_dim_v]
  std::vector<double> dout{};  // [total_out, num_heads_q, head_dim_v], or empty: forward only
  std::vector<double> dlse{};  // [num_heads_q, total_out], or empty; only with dout
  int num_threads = 0;         // 0: all of the machine; the result does not depend on it
};

struct OracleResult {
  std::vector<double> out;         // [total_out, num_heads_q, head_dim_v]
  std::vector<double> lse;         // [num_heads_q, total_out], natural logarithm
  std::vector<double> dq, dk, dv;  // shapes of q, k, v; empty if forward only
};

// Throws std::invalid_argument, with the value, if the sizes contradict each other.
OracleResult oracle_attention(const OracleProblem& problem);

}  // namespace mxflash::kit
