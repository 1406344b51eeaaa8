// What another recipe would do to these operands, found by running it: each alternative changes one thing of the
// recipe in use (and one changes everything that the library's default has on), and says in a sentence what to do.
#pragma once

#include <string>
#include <vector>

#include "tools/attention_error.h"
#include "tools/progress.h"

namespace mxflash::tools {

struct Alternative {
  std::string change;  // "smooth_k on"
  std::vector<double>
      gain_db;          // of out, dq, dk, dv (out only without a backward) over the recipe in use; NaN: undefined
  std::string advice;   // one sentence; what to type is in `backticks`
  bool better = false;  // gains beyond noise and loses nothing beyond noise
};

// Tensors that the gains are about: those of `errors` without lse.
std::vector<std::string> judged_tensors(const std::vector<TensorError>& errors);

std::vector<Alternative> try_alternatives(const kit::FloatProblem& problem, const kit::RunOptions& run,
                                          const kit::FloatResult& got, const ExactAttention& exact,
                                          const std::vector<TensorError>& errors, Progress& progress);

}  // namespace mxflash::tools
