// What rmsnorm_cpu.cpp asks of rmsnorm_cpu_kernel.cpp, which is compiled once per instruction set.
#pragma once

#include "runtime/cpu_isa.h"
#include "runtime/quantize_tile.h"

namespace mxflash::cpu {

inline constexpr int64_t kNormCols = 256;  // channels of a tile: 16 KiB of y

// A tile of h, and what it is multiplied by.
struct NormTile {
  const void* h;
  int64_t stride;  // elements from row to row
  Dtype dtype;
  int64_t rows, cols;
  const float* rstd;   // [rows]
  const void* weight;  // [cols]
  Dtype weight_dtype;
  int64_t next_rows;  // of the tile below this one, to be prefetched
};

struct RmsnormKernels {
  // residual += in, rounded to residual's dtype.
  void (*add_residual)(const void* in, Dtype in_dtype, void* residual, Dtype dtype, int64_t dim);
  // Sum of the squares of one row, in the order of the contract.
  float (*sum_of_squares)(const void* h, Dtype dtype, int64_t dim);
  // y [32][kNormCols], BF16, with zeros up to the next multiple of 32 columns.
  void (*normalize)(const NormTile& tile, uint16_t* y);
  void (*quantize)(const TileSource& in, const TileTarget* outs, int count);
};

}  // namespace mxflash::cpu

MXFLASH_CPU_KERNELS(cpu::RmsnormKernels, kRmsnormKernels)
