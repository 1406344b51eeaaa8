// The padded token axis (mx/scale_layout.h), seen from one of its rows.
#pragma once

#include "mx/scale_layout.h"

namespace mxflash {

// The last sequence that starts at or before a padded row; rows from its length on are padding.
__device__ inline Sequence sequence_of_row(int64_t tokens, const Jagged& seq, int64_t padded_row) {
  int64_t low = 0, high = seq.batch;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (sequence_at(tokens, seq, middle).padded_start <= padded_row ? low : high) = middle;
  }
  return sequence_at(tokens, seq, low);
}

}  // namespace mxflash
