// What the two halves of backend `cpu` agree on: attention_{fwd,bwd}_cpu.cpp divides the work and the memory,
// attention_{fwd,bwd}_cpu_kernel.cpp, compiled once per ISA, does it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "attention/attention.h"
#include "attention/mask.h"
#include "runtime/cpu_isa.h"

namespace mxflash::cpu {

inline constexpr int64_t kRowTile = 64;     // query rows of a tile: the lanes of the kernels
inline constexpr int64_t kMaxSubTiles = 8;  // row tiles that share one pass over the keys
inline constexpr double kLog2e = 1.4426950408889634;

// Row tiles of one key head of one sequence: for every block of rows all heads of the group, so that neighbours see
// nearly the same keys.
struct RowTile {
  int64_t head, first_row, rows;
};
constexpr int64_t row_tile_count(int64_t rows, int64_t group) { return (rows + kRowTile - 1) / kRowTile * group; }
constexpr RowTile row_tile(int64_t index, int64_t kv_head, int64_t group, int64_t rows) {
  const int64_t first = index / group * kRowTile;
  return {kv_head * group + index % group, first, rows - first < kRowTile ? rows - first : kRowTile};
}

// Unnormalised results of a row tile over a part of the keys: what a split along the keys leaves behind.
struct Partial {
  float* out;  // [head_dim_v][kRowTile]
  float* max;  // [kRowTile]
  float* sum;  // [kRowTile]
};

struct FwdProblem {
  const AttentionFwd& args;
  AttentionShape shape;
  bool fast;
};

// Row tiles first .. first + count - 1 of one key head of sequence b, on keys first_key .. end_key - 1. The boundaries
// of key ranges are multiples of 128.
struct FwdTask {
  int64_t b, kv_head, first, count;
  int64_t first_key, end_key;
  Partial* partial;  // [count], or null: the keys are all, and the task writes the results
};

struct AttentionFwdKernels {
  size_t (*scratch_bytes)(const FwdProblem&);
  void (*attend)(const FwdProblem&, const FwdTask&, std::byte* scratch);
  // Folds the parts of one row tile in ascending order and writes the results.
  void (*combine)(const FwdProblem&, const FwdTask&, const Partial* parts, int64_t num_parts, std::byte* scratch);
};

}  // namespace mxflash::cpu

MXFLASH_CPU_KERNELS(mxflash::cpu::AttentionFwdKernels, kAttentionFwdKernels)
