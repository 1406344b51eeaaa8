// What the report draws and says beside the metrics: scales of the operands, error by query position, and a sentence
// about each.
#pragma once

#include <mxflash/quantize.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tools/report.h"

namespace mxflash::tools {

// One operand, quantized as the recipe says.
struct OperandScales {
  std::string name;  // q, k, v, dout
  QuantizeStats stats;
  int64_t blocks = 0;
  int64_t zero_blocks = 0, nan_blocks = 0;
  std::array<int64_t, 256> count{};        // blocks by scale byte
  int min_exponent = 0, max_exponent = 0;  // over the blocks that are neither; min > max: there is none
  // Share of the non-zero elements that would change if one scale, that of the largest block, served the whole tensor.
  double changed_by_one_scale = 0;

  bool any() const { return zero_blocks + nan_blocks < blocks; }
};
std::vector<OperandScales> operand_scales(const ReportInput& input);

// SQNR of the query rows at a position within their sequence, over all sequences and heads; NaN if undefined.
struct PositionBin {
  int64_t first = 0, last = 0;
  double sqnr_db = 0;
};
std::vector<PositionBin> out_by_position(const ReportInput& input);
std::vector<PositionBin> dq_by_position(const ReportInput& input);  // empty without a backward

std::string heads_finding(const std::vector<TensorError>& errors);
std::string position_finding(const std::string& tensor, const std::vector<PositionBin>& bins);
std::string scales_finding(const std::vector<OperandScales>& operands);
std::string clipping_finding(const std::vector<OperandScales>& operands, MxRule rule);

}  // namespace mxflash::tools
