// Rows of a forward's results that belong to no sequence, on backends whose tensors the host can write.
#pragma once

#include <limits>

#include "attention/attention.h"
#include "runtime/tensor_access.h"

namespace mxflash {

// out 0, lse -inf, row_exponent 0.
inline void clear_slack(const AttentionFwd& args, const AttentionShape& shape) {
  const Jagged seq = shape.seq_out();
  if (!seq.cu_seqlens) return;
  clear_slack_rows(args.out, seq);
  for (int64_t head = 0; head < shape.num_heads_q; ++head) {
    for (int64_t row = seq.cu_seqlens[seq.batch]; row < shape.total_out; ++row) {
      if (args.lse) store_float(args.lse, head * args.lse.stride[0] + row, -std::numeric_limits<float>::infinity());
      if (args.row_exponent) {
        static_cast<uint8_t*>(args.row_exponent.data)[head * args.row_exponent.stride[0] + row] = 0;
      }
    }
  }
}

}  // namespace mxflash
