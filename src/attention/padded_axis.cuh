// The padded token axis (mx/scale_layout.h), seen from one of its rows.
#pragma once

#include "mx/scale_layout.h"

namespace mxflash {

struct PaddedAxis {
  Jagged seq{};
  int64_t tokens = 0, rows = 0;
  int64_t length = 0;   // of sequences of equal lengths, and the rows of one:
  uint32_t padded = 1;  // divisions that no thread has to do

  static PaddedAxis of(int64_t tokens, const Jagged& seq) {
    const int64_t rows = padded_token_count(tokens, seq), length = tokens / seq.batch;
    return {seq, tokens, rows, length, uint32_t(rows / seq.batch)};
  }
  // The last sequence that starts at or before a row; rows from its length on are padding.
  // Whole warps call this.
  __device__ Sequence owner(uint32_t row) const {
    if (!seq.cu_seqlens) {
      const uint32_t b = seq.batch == 1 ? 0 : row / padded;
      return {b * length, length, int64_t(b) * padded};
    }
    int32_t b = 0;
    for (int32_t end = seq.batch; end - b > 1;) {  // a warp narrows it to 1/32 at a time
      const int32_t step = int32_t(ceil_div(end - b, 32)), probe = b + int32_t(threadIdx.x % 32) * step;
      const bool not_after = probe < end && jagged_padded_start(seq.cu_seqlens[probe], probe) <= row;
      b += (__popc(__ballot_sync(~0u, not_after)) - 1) * step;
      end = min(end, b + step);
    }
    const int64_t start = seq.cu_seqlens[b];
    return {start, seq.cu_seqlens[b + 1] - start, jagged_padded_start(start, b)};
  }
};

}  // namespace mxflash
