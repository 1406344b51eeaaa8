// Few query rows before many keys, as in decoding: how rows of a group of heads share a block, and how the keys of a
// block are cut into ranges for several CTAs.
//
// Packed rows: row = token * pack + head within the group, so a block of rows has all heads that read the same keys,
// and what a row sees still grows with the row. Packed sequences lie on a padded axis of their own.
#pragma once

#include "attention/mask.h"
#include "mx/operand_image.h"

namespace mxflash {

inline constexpr int32_t kMinSplitTiles = 2;  // of a range of keys
inline constexpr int32_t kMaxSplits = 64;

// Sequence b in packed rows.
constexpr Sequence packed_sequence(int64_t tokens, const Jagged& seq, int32_t pack, int64_t b) {
  if (!seq.cu_seqlens) return sequence_at(tokens * pack, seq, b);
  const int64_t start = int64_t(seq.cu_seqlens[b]) * pack;
  return {start, int64_t(seq.cu_seqlens[b + 1]) * pack - start, jagged_padded_start(start, b)};
}
constexpr int64_t packed_padded_count(int64_t tokens, const Jagged& seq, int32_t pack) {
  return padded_token_count(tokens * pack, seq);
}

// Keys that packed rows [first_row, end_row) of a sequence see; seqlen_q in rows.
constexpr Range visible_keys_of_rows(const Mask& mask, int32_t pack, int32_t first_row, int32_t end_row,
                                     int32_t seqlen_q, int32_t seqlen_k) {
  return visible_keys(mask, first_row / pack, (end_row - 1) / pack + 1, seqlen_q / pack, seqlen_k);
}

// A range of tiles: evenly many in each split, but not fewer than kMinSplitTiles; the last splits may have none.
struct TileRange {
  int32_t first = 0;
  int32_t count = 0;
};
constexpr TileRange tiles_of(const Range& keys) {
  if (keys.empty()) return {};
  const auto first = int32_t(keys.first / kImageTile);
  return {first, int32_t(ceil_div(keys.end, kImageTile)) - first};
}
constexpr int32_t tiles_of_split(int32_t tiles, int32_t splits) {
  const int32_t even = (tiles + splits - 1) / splits;
  return even > kMinSplitTiles ? even : kMinSplitTiles;  // std::max takes the address of a host's constant
}
constexpr TileRange split_range(const TileRange& tiles, int32_t splits, int32_t split) {
  const int32_t each = tiles_of_split(tiles.count, splits), first = std::min(split * each, tiles.count);
  return {tiles.first + first, std::min(each, tiles.count - first)};
}
// Splits that leave something; the first always does.
constexpr int32_t used_splits(int32_t tiles, int32_t splits) {
  const int32_t each = tiles_of_split(tiles, splits);
  return std::max((tiles + each - 1) / each, 1);
}

}  // namespace mxflash
