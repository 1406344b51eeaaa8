// Where scale bytes lie: the padded token axis, the linear layout, and Blackwell's 128x4 atoms; each with its inverse.
#pragma once

#include <mxflash/mx.h>

#include <cstdint>

#include "mx/block.h"

namespace mxflash {

inline constexpr int64_t kSeqAlign = 128;  // every sequence's scales start at a multiple of this many tokens

// ---- the padded token axis --------------------------------------------------------------------------------------

// One sequence: its tokens in the packed payload and its first row on the padded axis.
struct Sequence {
  int64_t start = 0;
  int64_t length = 0;
  int64_t padded_start = 0;
};

// Start of jagged sequence b. Consecutive starts are far enough apart for any length: with start = 128 A + r,
// floor((start + length + 128 (b + 1)) / 128) >= A + b + 1 + floor((r + length) / 128) >= A + b + ceil(length / 128).
constexpr int64_t jagged_padded_start(int64_t start, int64_t b) {
  return (start + kSeqAlign * b) / kSeqAlign * kSeqAlign;
}

constexpr int64_t padded_token_count(int64_t tokens, const Jagged& seq) {
  if (seq.cu_seqlens) return jagged_padded_start(tokens, seq.batch);
  return seq.batch > 0 ? seq.batch * round_up(tokens / seq.batch, kSeqAlign) : 0;
}

// A bound on the lengths, for counting work items; max_seqlen may be as loose as the caller likes.
constexpr int64_t longest_sequence(int64_t tokens, const Jagged& seq) {
  if (!seq.cu_seqlens) return tokens / seq.batch;
  return seq.max_seqlen < tokens ? seq.max_seqlen : tokens;
}

// Sequence b. Reads cu_seqlens, so only where that memory can be read.
constexpr Sequence sequence_at(int64_t tokens, const Jagged& seq, int64_t b) {
  if (seq.cu_seqlens) {
    const int64_t start = seq.cu_seqlens[b];
    return {start, seq.cu_seqlens[b + 1] - start, jagged_padded_start(start, b)};
  }
  const int64_t length = tokens / seq.batch;
  return {b * length, length, b * round_up(length, kSeqAlign)};
}

// Inverse: which sequence and token a padded row belongs to; sequence -1 for a padding row.
struct PaddedRow {
  int64_t sequence = -1;
  int64_t token = -1;  // within the sequence
};
constexpr PaddedRow padded_row_owner(int64_t tokens, const Jagged& seq, int64_t row) {
  for (int64_t b = 0; b < seq.batch; ++b) {
    const Sequence s = sequence_at(tokens, seq, b);
    if (row >= s.padded_start && row < s.padded_start + s.length) return {b, row - s.padded_start};
  }
  return {};
}

// ---- linear -----------------------------------------------------------------------------------------------------

// Scales of one head as a matrix: block rows x block columns.
struct ScaleGrid {
  int64_t rows;
  int64_t cols;
};
constexpr ScaleGrid scale_grid(MxBlock block, int64_t padded_tokens, int64_t dim) {
  const BlockShape shape = block_shape(block);
  return {padded_tokens / shape.rows, ceil_div(dim, shape.cols)};
}

struct ScaleIndex {
  int64_t head;
  int64_t row;  // block row: padded token / block rows
  int64_t col;  // block column: channel / block columns
  friend constexpr bool operator==(const ScaleIndex&, const ScaleIndex&) = default;
};

constexpr int64_t linear_offset(ScaleGrid grid, ScaleIndex i) {
  return (i.head * grid.rows + i.row) * grid.cols + i.col;
}
constexpr ScaleIndex linear_index(ScaleGrid grid, int64_t offset) {
  return {offset / (grid.rows * grid.cols), offset / grid.cols % grid.rows, offset % grid.cols};
}

// ---- atom128x4 --------------------------------------------------------------------------------------------------

// A 512-byte atom holds 128 matrix rows x 4 scale blocks along the contraction (PTX ISA, tcgen05.mma block scaling;
// "128x4" in cuBLAS and cuDNN). Byte = (row % 32) * 16 + (row / 32) * 4 + block, so that a 32-lane copy of 16 bytes a
// lane puts four consecutive blocks of a row in one 32-bit word of tensor memory.
inline constexpr int64_t kAtomRows = 128;
inline constexpr int64_t kAtomBlocks = 4;
inline constexpr int64_t kAtomBytes = kAtomRows * kAtomBlocks;

constexpr int64_t atom_byte(int64_t row, int64_t block) { return row % 32 * 16 + row / 32 * 4 + block; }
constexpr int64_t atom_row(int64_t byte) { return byte / 16 + byte / 4 % 4 * 32; }
constexpr int64_t atom_block(int64_t byte) { return byte % 4; }

// `rows` matrix rows (tokens for row32, channels for col32) and `blocks` scales along the contraction, of one head.
// Atoms along the contraction are adjacent.
struct AtomGrid {
  int64_t rows;
  int64_t blocks;
  constexpr int64_t atoms_across() const { return ceil_div(blocks, kAtomBlocks); }
  constexpr int64_t bytes() const { return ceil_div(rows, kAtomRows) * atoms_across() * kAtomBytes; }
};
constexpr AtomGrid atom_grid(MxBlock block, int64_t padded_tokens, int64_t dim) {
  return block == MxBlock::col32 ? AtomGrid{dim, padded_tokens / kMxBlock}
                                 : AtomGrid{padded_tokens, ceil_div(dim, kMxBlock)};
}
constexpr int64_t atom_offset(AtomGrid grid, int64_t head, int64_t row, int64_t block) {
  const int64_t atom = row / kAtomRows * grid.atoms_across() + block / kAtomBlocks;
  return head * grid.bytes() + atom * kAtomBytes + atom_byte(row % kAtomRows, block % kAtomBlocks);
}

struct AtomIndex {
  int64_t head;
  int64_t row;
  int64_t block;
};
// Inverse. Offsets of padding give a row >= grid.rows or a block >= grid.blocks.
constexpr AtomIndex atom_index(AtomGrid grid, int64_t offset) {
  const int64_t in_head = offset % grid.bytes();
  const int64_t atom = in_head / kAtomBytes;
  const int64_t byte = in_head % kAtomBytes;
  return {offset / grid.bytes(), atom / grid.atoms_across() * kAtomRows + atom_row(byte),
          atom % grid.atoms_across() * kAtomBlocks + atom_block(byte)};
}

// ---- both -------------------------------------------------------------------------------------------------------

// Offset of a scale byte in either layout. square32 has no atom form.
constexpr int64_t scale_offset(MxBlock block, ScaleLayout layout, int64_t padded_tokens, int64_t dim, ScaleIndex i) {
  if (layout == ScaleLayout::linear) return linear_offset(scale_grid(block, padded_tokens, dim), i);
  const AtomGrid grid = atom_grid(block, padded_tokens, dim);
  return block == MxBlock::col32 ? atom_offset(grid, i.head, i.col, i.row) : atom_offset(grid, i.head, i.row, i.col);
}

}  // namespace mxflash
