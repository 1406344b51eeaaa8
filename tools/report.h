// The report of `mxflash attend --report`: one HTML page without scripts or network, with inline SVG charts.
#pragma once

#include <string>
#include <vector>

#include "tools/attention_error.h"
#include "tools/operands.h"
#include "tools/progress.h"

namespace mxflash::tools {

struct ReportInput {
  std::string title;  // name of the file that the operands came from
  std::string backend;
  const AttentionOperands& operands;
  const kit::FloatProblem& problem;
  const kit::RunOptions& run;
  const kit::FloatResult& got;
  const ExactAttention& exact;
  const std::vector<TensorError>& errors;
};

// Runs the operator again for each alternative recipe that the page gives advice on.
std::string report_page(const ReportInput& input, Progress& progress);

}  // namespace mxflash::tools
