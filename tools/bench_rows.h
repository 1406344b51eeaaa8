// Results on a device at full size, some rows of them, beside exact attention on the BF16 operands of bench_device.h.
// Errors are relative RMS, NaN if a result is. Masks: none, or causal.
#pragma once

#include "kit/device_memory.h"
#include "tools/bench_shapes.h"

namespace mxflash::tools {

struct DeviceRows {
  const kit::DeviceBuffer& out;  // BF16, packed
  Stream stream;
};
// Of rows of out, of the first and of the last head.
double out_error(const BenchShape& s, const DeviceRows& got);

struct DeviceGradients {
  const kit::DeviceBuffer &out, &dq, &dk, &dv;  // BF16, packed
  const kit::DeviceBuffer& lse;                 // f32 [num_heads_q, total_out], of these operands
  Stream stream;
};
// Of rows of dq and of rows of dk and dv, the largest of the three. Exact dk and dv would need lse and delta of every
// row: those are taken from the forward's results, whose own error is far below that of one gradient.
double gradient_error(const BenchShape& s, const DeviceGradients& got);

}  // namespace mxflash::tools
