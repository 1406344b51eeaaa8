// Which keys a row sees, and which rows see a key. The only place that knows what a mask means.
#pragma once

#include <mxflash/attention.h>

#include <algorithm>
#include <cstdint>

namespace mxflash {

struct Range {
  int64_t first = 0;
  int64_t end = 0;
  constexpr bool empty() const { return first >= end; }
};

// Keys visible to at least one of rows [first_row, end_row); exact for a single row. Both bounds grow with the row, so
// the union's bounds are the first row's first and the last row's end.
constexpr Range visible_keys(const Mask& mask, int64_t first_row, int64_t end_row, int64_t seqlen_q, int64_t seqlen_k) {
  const int64_t first_diagonal = first_row + seqlen_k - seqlen_q;
  const int64_t last_diagonal = end_row - 1 + seqlen_k - seqlen_q;
  Range r{0, seqlen_k};
  if (mask.window_left >= 0) r.first = std::max(r.first, first_diagonal - mask.window_left);
  if (mask.window_right >= 0) r.end = std::min(r.end, last_diagonal + mask.window_right + 1);
  if (mask.causal) r.end = std::min(r.end, last_diagonal + 1);
  return r.empty() ? Range{} : r;
}

// Rows that see at least one of keys [first_key, end_key).
constexpr Range visible_rows(const Mask& mask, int64_t first_key, int64_t end_key, int64_t seqlen_q, int64_t seqlen_k) {
  const int64_t first_diagonal = first_key - (seqlen_k - seqlen_q);  // the row whose diagonal is at first_key
  const int64_t last_diagonal = end_key - 1 - (seqlen_k - seqlen_q);
  Range r{0, seqlen_q};
  if (mask.window_left >= 0) r.end = std::min(r.end, last_diagonal + mask.window_left + 1);
  if (mask.window_right >= 0) r.first = std::max(r.first, first_diagonal - mask.window_right);
  if (mask.causal) r.first = std::max(r.first, first_diagonal);
  return r.empty() ? Range{} : r;
}

// The mask from the keys' side, where these take rows for keys: j <= i + Sk - Sq + right is i >= j + Sq - Sk - right.
// Then visible_keys(transposed(mask), keys, seqlen_k, seqlen_q) is visible_rows(mask, keys, seqlen_q, seqlen_k).
constexpr Mask transposed(const Mask& mask) {
  return {.window_left = mask.causal ? 0 : mask.window_right, .window_right = mask.window_left};
}

}  // namespace mxflash
