// What `mxflash bench` runs: an operation on a shape with all its memory, what it costs, and a peer to compare with.
#pragma once

#include <mxflash/attention.h>
#include <mxflash/backend.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>

#include "tools/bench_line.h"
#include "tools/bench_shapes.h"

namespace mxflash::tools {

struct Work {
  std::function<void()> run;                        // one call; throws kit::StatusError
  double flops = 0;                                 // 0: moves memory only
  double bytes = 0;                                 // read and written, each tensor once
  double workspace_bytes = NAN, saved_bytes = NAN;  // as in Line
  // Another way to the same result; null where the ceiling is the peer. Milliseconds of one run.
  const char* peer = nullptr;
  std::function<double()> run_peer{};
  // Attention, for peers without MXFP8: a run that dequantizes q, k, v (backward: and dout) to this type ...
  std::function<std::function<void()>(Dtype)> dequantizer{};
  // ... and the files q, k, v (and dout) of what they hold, packed fp32.
  std::function<void(const std::string& folder)> write_operands{};
};

// Operands are N(0, 1) cut at 3.5 (the same bytes everywhere), BF16 where an operation takes or gives floats.
Work prepare(BenchOp op, const BenchShape& shape, const std::string& backend, CpuMath cpu_math = CpuMath::automatic);

// Bytes that prepare() will allocate, without the peer's.
double memory_of(BenchOp op, const BenchShape& shape);

// The operation on clipped(shape), by kit/verify.h: "" or what is wrong. Throws kit::StatusError.
std::string verify(BenchOp op, const BenchShape& shape, const std::string& backend,
                   CpuMath cpu_math = CpuMath::automatic);

}  // namespace mxflash::tools
