// What gemm_cpu.cpp asks of gemm_cpu_kernel.cpp, which is compiled once per instruction set.
#pragma once

#include <mxflash/gemm.h>

#include "runtime/cpu_isa.h"
#include "runtime/quantize_tile.h"

namespace mxflash::cpu {

inline constexpr int64_t kGemmRows = 192;   // of a tile of c: whole stripes, whole micro-kernels
inline constexpr int64_t kGemmPanels = 2;   // of a tile, side by side
inline constexpr int64_t kPanelCols = 64;   // channels of a panel, all of one head
inline constexpr int64_t kGemmDepth = 128;  // elements of k that are packed at a time

// A tile of c: rows of one sequence, and panels, the first kPanelCols channels or fewer of a head, the next, ...
struct GemmTile {
  const GemmQuantize* args;
  const MxTensor* out;  // [m, heads, dim]
  Sequence sequence;
  int64_t first_row, rows;      // in the sequence
  int64_t first_panel, panels;  // numbered through heads
};

struct GemmKernels {
  void (*multiply)(const GemmTile& tile);
};

}  // namespace mxflash::cpu

MXFLASH_CPU_KERNELS(cpu::GemmKernels, kGemmKernels)
