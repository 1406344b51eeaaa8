// MXFP8 attention beside exact attention on the same operands: what `attend` prints and the report draws.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kit/compare.h"
#include "kit/oracle.h"
#include "kit/runner.h"

namespace mxflash::tools {

struct ExactAttention {
  kit::OracleResult result;
  double ms = 0;
};
// Forward, and backward if the problem has dout. num_threads 0: all.
ExactAttention exact_attention(const kit::FloatProblem& problem, int num_threads);

struct TensorError {
  std::string name;  // out, lse, dq, dk, dv
  kit::Metrics all;
  std::vector<kit::Metrics> heads;

  size_t worst_head() const;
  size_t best_head() const;
};
// out, lse and, after a backward, dq, dk, dv.
std::vector<TensorError> compare_all(const kit::FloatProblem& problem, const kit::OracleResult& exact,
                                     const kit::FloatResult& got);

// Null if there is no such tensor.
const TensorError* find_error(const std::vector<TensorError>& errors, const std::string& name);

// How far one NaN or Inf reaches: the end of a sentence (docs/format.md).
inline constexpr const char* kNonfiniteReach =
    "one of them takes its whole block along; with smoothing, every block of its channel in the sequence; with "
    "rotation, all channels that are rotated with it";

// What the plain recipe reaches on normal random operands, for scale; none for lse.
std::optional<double> typical_sqnr_db(const std::string& tensor);

// The errors in words, one to three sentences. `stats` of the same run tells of NaN and Inf in the operands.
std::string verdict(const std::vector<TensorError>& errors, const OperatorStats& stats);

}  // namespace mxflash::tools
