// Groups of rows: what one task of rmsnorm_bwd on a CPU takes. Each sums its rows into a dw of its own, and those are
// added in the order of the groups. Groups follow from shapes alone, so the sums do not depend on threads.
#pragma once

#include <mxflash/rmsnorm.h>

#include <algorithm>

#include "mx/scale_layout.h"

namespace mxflash {

struct RowGroups {
  int64_t count = 0, size = 0;  // groups, and rows of one
  int64_t inside = 0;           // rows that belong to sequences

  static constexpr int64_t kLeastRows = 64, kMostGroups = 256;

  static constexpr int64_t count_of(const RmsnormBwd& args) {
    return std::min(kMostGroups, ceil_div(args.h.shape[0], kLeastRows));
  }
  // Reads cu_seqlens.
  static RowGroups of(const RmsnormBwd& args) {
    const int64_t rows = args.h.shape[0], count = count_of(args);
    const int64_t inside = args.seq.cu_seqlens ? args.seq.cu_seqlens[args.seq.batch] : rows;
    return {count, count ? ceil_div(rows, count) : 0, inside};
  }
  int64_t first(int64_t group) const { return std::min(group * size, inside); }
  int64_t end(int64_t group) const { return std::min(group * size + size, inside); }
};

// The sequence that a row belongs to; `inside` rows have one.
inline Sequence sequence_of_row(const RmsnormBwd& args, int64_t row) {
  const Jagged& seq = args.seq;
  const int64_t rows = args.h.shape[0];
  if (!seq.cu_seqlens) return sequence_at(rows, seq, row / (rows / seq.batch));
  const int32_t* const after = std::upper_bound(seq.cu_seqlens, seq.cu_seqlens + seq.batch + 1, row);
  return sequence_at(rows, seq, after - seq.cu_seqlens - 1);
}

}  // namespace mxflash
