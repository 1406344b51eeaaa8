// A whole attention call on a chip: its kernels, their work items, and how these fill the SMs.
#pragma once

#include <string>
#include <vector>

#include "tools/bench_shapes.h"
#include "tools/model_kernels.h"

namespace mxflash::tools {

struct ModelledKernel {
  std::string name;
  int64_t items = 0;
  double tiles = 0;  // of 128 x 128 scores
  double alone = 0;  // of these, those of items with 128 rows or fewer: speed.alone clocks each
  KernelSpeed speed{};
  // Microseconds. Together the time of the kernel.
  double tiles_us = 0;   // all SMs busy with nothing but tiles
  double items_us = 0;   // with the beginnings and ends of items
  double waves_us = 0;   // SMs that wait for the last one
  double memory_us = 0;  // beyond that: operands and results could not move faster
  double launch_us = 0;  // until the first tile, and after the last one
  double us() const { return tiles_us + items_us + waves_us + memory_us + launch_us; }
  Unit bound() const;          // the busiest unit
  double bound_share() const;  // of the time of a tile
};

struct ModelledCall {
  std::vector<ModelledKernel> kernels;
  double flops = 0;
  double us() const;
  double pflops() const { return flops / us() * 1e-9; }
};

// "" if the sm100 kernels take the call, else the rule that it breaks and the value.
std::string model_refuses(BenchOp op, const BenchShape& shape);

ModelledCall model_call(const Chip& chip, BenchOp op, const BenchShape& shape, const Variant& variant = {});

// What could make it faster; not decided, and not all of it exact in numbers.
std::vector<Variant> next_ideas(BenchOp op);
Variant all_ideas(BenchOp op);  // the first three together

// The constants that a result depends on most, each with another value that it may have; last, all of those that are
// favourable.
struct Sensitivity {
  std::string change;
  Chip chip;
};
std::vector<Sensitivity> sensitivities(const Chip& chip);

}  // namespace mxflash::tools
