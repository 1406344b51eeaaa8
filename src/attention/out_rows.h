// A forward's results on backends whose tensors the host can write.
#pragma once

#include <algorithm>
#include <limits>

#include "attention/attention.h"
#include "runtime/mx_access.h"
#include "runtime/tensor_access.h"

namespace mxflash {

// What no row of a sequence covers: out 0, lse -inf, row_exponent 0; of out_mx the scales too. Call before rows are
// written.
inline void clear_uncovered(const AttentionFwd& args, const AttentionShape& shape) {
  const Jagged seq = shape.seq_out();
  if (args.out_mx) clear_uncovered(args.out_mx, seq);
  if (!seq.cu_seqlens) return;
  if (args.out) clear_slack_rows(args.out, seq);
  for (int64_t head = 0; head < shape.num_heads_q; ++head) {
    for (int64_t row = seq.cu_seqlens[seq.batch]; row < shape.total_out; ++row) {
      if (args.lse) store_float(args.lse, head * args.lse.stride[0] + row, -std::numeric_limits<float>::infinity());
      if (args.row_exponent) {
        static_cast<uint8_t*>(args.row_exponent.data)[head * args.row_exponent.stride[0] + row] = 0;
      }
    }
  }
}

// Rows first .. first + rows - 1 of sequence b, x [rows][stride], to out_mx. They are whole blocks: first is a multiple
// of 32, and rows is one or reaches the sequence's end.
inline void write_out_mx(const AttentionFwd& args, const AttentionShape& shape, int64_t b, int64_t head, int64_t first,
                         int64_t rows, const float* x, int64_t stride) {
  const MxWriter writer(args.out_mx, shape.seq_out(), shape.out_sequence(b), head, MxRule::rceil);
  for (int64_t i = 0; i < rows; i += kMxBlock) {
    writer.write(first + i, std::min(kMxBlock, rows - i), 0, shape.head_dim_v, x + i * stride, stride);
  }
}

}  // namespace mxflash
