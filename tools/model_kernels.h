// The sm100 kernels of mxflash as pipelines: their products, warps and barriers as in the sources, their instructions
// as compiled (model_counts.json).
#pragma once

#include <array>
#include <string>
#include <vector>

#include "tools/model_chip.h"

namespace mxflash::tools {

enum class Kernel { forward, dkdv, dv, dk, dq };
const char* kernel_name(Kernel kernel);
// Own rows are keys.
constexpr bool is_of_keys(Kernel kernel) { return kernel != Kernel::forward && kernel != Kernel::dq; }

// The instantiation of a kernel that has these: 64, 128, 192 (head_dim_v 128) or 256. Of the backward 256 has dv and dk
// in place of dkdv.
int padded_dim(int64_t head_dim, int64_t head_dim_v);

// Of one kernel and head_dim. A pass of a loop comes in pieces, each begun by a wait but for the first.
struct LoopCounts {
  std::string symbol;                    // the kernel's name, or part of it
  std::vector<std::string> waits;        // what the pieces of `compute` wait for
  std::vector<std::vector<Counts>> mma;  // of each warp that issues MMAs
  std::vector<Counts> compute;           // of a warp that computes; one tile
  std::vector<double> mmas;              // of a pass of each
};
// From model_counts.json. head_dim: padded_dim.
LoopCounts loop_counts(Kernel kernel, int head_dim);

// What differs between the kernels as they are and ones that could be.
struct Variant {
  std::string change{};
  double mma_instructions = 0;  // of a warp that issues MMAs, in a pass; 0: as compiled
  Counts compute_factor{};      // opcodes of compute, times this
  double row_sum_columns = 16;  // forward: ones beside V
  bool two_weights = false;     // dkdv: P and dS have two buffers
  bool pair = false;            // backward: two CTAs share each streamed tile
  bool wide_dq = false;         // dq: tiles of 128 keys, one buffer of S and dP
  bool one_grid = false;        // backward: items of dkdv, then of dq, in one launch
};

// An item is what a CTA does at a time: 256 query rows of a head in the forward (128 with head_dim 256), 128 own rows
// in the backward.
struct KernelSpeed {
  double tile = 0;    // cycles of 128 x 128 scores
  double alone = 0;   // the same in an item of the forward that has 128 rows
  double item = 0;    // cycles of an item that no tile of it or of its neighbours covers
  double masked = 0;  // cycles more of 128 x 128 scores with a mask
  double start = 0;   // cycles of the first item that later ones have behind the item before
  Work busy{};        // of 128 x 128 scores
};
// Remembers what it was asked before.
KernelSpeed kernel_speed(const Chip& chip, Kernel kernel, int head_dim, const Variant& variant = {});

}  // namespace mxflash::tools
