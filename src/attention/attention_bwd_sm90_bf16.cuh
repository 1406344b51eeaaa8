// What the passes of the backward with exact operands (sm90_bf16) hand to each other.
#pragma once

#include "attention/attention.h"
#include "mx/bf16_image.h"

namespace mxflash::bwd_sm90_bf16 {

inline constexpr int kTile = 64;  // rows or keys that a product takes at a time

// Statistics of query rows, fp32 [num_heads_q][tiles of 64 padded rows of out][2][64]: lse log2(e), +Inf where P is
// zero (no token, or no key that it sees); then delta. In a tile they lie so that a thread reads those of its columns
// 8 (2 p + h) + 2 c + e, h and e in {0, 1}, at once.
inline constexpr int kTileStatistics = 2 * kTile;
constexpr int statistics_index(int row) {
  const int p = row >> 4, h = row >> 3 & 1, c = row >> 1 & 3, e = row & 1;
  return 16 * p + 4 * c + 2 * h + e;
}

// From out, the image of dout, lse and dlse.
Status write_statistics(const AttentionBwd& a, const uint16_t* dout, const Bf16ImageShape& shape, float* statistics,
                        Stream stream);

// dq of a shared query: the sum over sequences, in order, of f32 [total_out, num_heads_q, head_dim].
Status sum_sequences(const AttentionBwd& a, const float* partial, Stream stream);

}  // namespace mxflash::bwd_sm90_bf16
