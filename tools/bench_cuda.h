// `mxflash bench` on a CUDA device.
#pragma once

#include <utility>
#include <vector>

#include "tools/bench_line.h"

namespace mxflash::tools {

// Verifies, times and prints these lines, of wanted_lines. Throws UsageError, CheckFailed, kit::StatusError.
void bench_on_device(const BenchOptions& options, const std::vector<std::pair<BenchOp, BenchShape>>& lines);

}  // namespace mxflash::tools
