// What the two halves of backend `cpu` agree on: attention_{fwd,bwd}_cpu.cpp divides the work and the memory,
// attention_{fwd,decode,bwd}_cpu_kernel.cpp, compiled once per ISA, does it.
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

inline bool is_fast(CpuMath math) { return (math == CpuMath::automatic ? default_cpu_math() : math) == CpuMath::fast; }

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
  float* out;            // [head_dim_v][kRowTile]
  float* max;            // [kRowTile]
  float* sum;            // [kRowTile], of P as it was multiplied with v: out's denominator
  float* unrounded_sum;  // [kRowTile], of P: for lse
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

// Sequences of few query rows: all rows of a key head, [group][rows of the sequence], are done together.
inline constexpr int64_t kDecodeRows = 16;
inline bool is_decode(const AttentionShape& shape, int64_t b) {
  return shape.query_sequence(b).length * shape.group <= kDecodeRows;
}
size_t decode_workspace(const FwdProblem& problem);  // bytes; 0 if there are none
void decode(const FwdProblem& problem);              // all of them

// Unnormalised results of one key head over a part of the keys: maxima, sums, out.
constexpr int64_t decode_partial_floats(const AttentionShape& shape) {
  const int64_t rows = shape.max_seqlen_q * shape.group;
  return kDecodeRows * 4 + (rows < kDecodeRows ? rows : kDecodeRows) * round_up(shape.head_dim_v, kMxBlock);
}

// Key heads first_head .. first_head + num_heads - 1 of sequence b, on keys first_key .. end_key - 1. The boundaries of
// key ranges are multiples of 128.
struct DecodeTask {
  int64_t b, first_head, num_heads;
  int64_t first_key, end_key;
  float* partial;          // of the first head, or null: the keys are all, and the task writes the results
  int64_t partial_stride;  // floats, from one head's to the next one's
};

struct AttentionDecodeKernels {
  size_t (*scratch_bytes)(const FwdProblem&, int64_t heads);  // of a task of up to so many heads
  void (*attend)(const FwdProblem&, const DecodeTask&, std::byte* scratch);
  // Folds the parts of one head, which follow each other, in ascending order and writes the results.
  void (*combine)(const FwdProblem&, const DecodeTask&, const float* parts, int64_t num_parts, std::byte* scratch);
};

// ---- backward ---------------------------------------------------------------------------------------------------

// Row tiles of one head over all sequences, every sequence from a tile of its own on; sequence b's first one.
constexpr int64_t first_row_tile(int64_t tokens, const Jagged& seq, int64_t b) {
  if (!seq.cu_seqlens) return b * ceil_div(tokens / seq.batch, kRowTile);
  return (seq.cu_seqlens[b] + kRowTile * b) / kRowTile;  // as in jagged_padded_start
}
constexpr int64_t row_tiles_of_head(int64_t tokens, const Jagged& seq) {
  if (!seq.cu_seqlens) return seq.batch * ceil_div(tokens / seq.batch, kRowTile);
  return (tokens + kRowTile * seq.batch) / kRowTile;
}

struct BwdProblem {
  const AttentionBwd& args;
  AttentionShape shape;
  bool fast;
  int64_t part_keys;  // keys of a task, a multiple of 64
  int64_t max_parts;  // of the longest key sequence
  // Of every row, [num_heads_q][row tiles of out][kRowTile]. Rows without keys and the rest of a tile have lse_log2 =
  // +Inf, so that P = 0; rows whose dS is not finite have delta = NaN, and lse_log2 = +Inf too if lse is not.
  float *lse_log2, *delta;
  // The sum of dS k, [num_heads_q][row tiles of q][head_dim][kRowTile], and which task added to a tile last. Tasks add
  // in ascending order of (sequence, part of the keys), which makes the sum deterministic without a copy per task.
  float* dq;
  int64_t* last_task;  // -1: none
};

// Keys first_key .. end_key - 1 of sequence b are part `part` of it.
struct BwdTask {
  int64_t b, kv_head, part;
};

struct AttentionBwdKernels {
  size_t (*scratch_bytes)(const BwdProblem&);
  // Row tile `tile` of one head of sequence b: lse_log2, delta; with the first of the sequences of a tile of q,
  // last_task.
  void (*prepare)(const BwdProblem&, int64_t b, int64_t head, int64_t tile, std::byte* scratch);
  // dk and dv of these keys, and their share of dq. Waits for the tasks before it that share a row tile, so tasks must
  // be started in ascending order of parts, and for shared_q of sequences before.
  void (*attend)(const BwdProblem&, const BwdTask&, std::byte* scratch);
  // dq of a row tile of query sequence b, once all tasks are done.
  void (*store_dq)(const BwdProblem&, int64_t b, int64_t head, int64_t tile, std::byte* scratch);
};

}  // namespace mxflash::cpu

MXFLASH_CPU_KERNELS_WITH_BF16(mxflash::cpu::AttentionFwdKernels, kAttentionFwdKernels)
MXFLASH_CPU_KERNELS(mxflash::cpu::AttentionDecodeKernels, kAttentionDecodeKernels)
MXFLASH_CPU_KERNELS_WITH_BF16(mxflash::cpu::AttentionBwdKernels, kAttentionBwdKernels)
