// What splits of a block's keys leave, and the kernels before and after the main one where rows are packed or keys are
// split (key_split.h).
#pragma once

#include <mxflash/types.h>

#include "attention/key_split.h"
#include "attention/row_output.cuh"
#include "runtime/status.h"

namespace mxflash {

// Of a row from the keys of one split, in binades: -inf where it sees none of them.
struct PartialRow {
  float lse;  // log2 of the sum of 2^s
  float max;  // of s
};

// [splits][heads][rows], heads and rows as blocks have them: packed, on the axis of out.
struct Partials {
  float* out = nullptr;  // [...][dim], normalised; null: blocks write results themselves
  PartialRow* row = nullptr;
  int32_t splits = 1;
  int32_t dim = 0;
  int64_t heads = 0, rows = 0;
  constexpr int64_t index(int64_t split, int64_t head, int64_t at) const { return (split * heads + head) * rows + at; }
  constexpr int64_t count() const { return int64_t(splits) * heads * rows; }
};

struct Combine {
  Partials partials;
  RowOutput to;
  Jagged seq_out, seq_k;  // seq_out: the rows of `out`
  int64_t total_k;
  int64_t max_seqlen;  // of out
  Mask mask;
  int32_t pack, group;
};
// Splits in ascending order, so that results are the same in every run. Writes rows of sequences; not those of none.
Status combine_partials(const Combine& args, Stream stream);

// The image of packed query rows from a query image: [heads / pack][packed tokens][dim], a scale for 64 packed rows.
Status pack_query_image(const uint8_t* image, const ImageShape& shape, int64_t tokens, const Jagged& seq, int32_t pack,
                        uint8_t* packed, Stream stream);

}  // namespace mxflash
