// Packed rows and ranges of keys: every row and every tile once, whatever the lengths; masks from the side of keys.
#include "attention/key_split.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace mxflash {
namespace {

TEST(KeySplit, RangesCoverEveryTileOnce) {
  for (int32_t tiles = 0; tiles <= 130; ++tiles) {
    for (int32_t splits = 1; splits <= kMaxSplits; ++splits) {
      int32_t next = 7;
      for (int32_t s = 0; s < splits; ++s) {
        const TileRange r = split_range({7, tiles}, splits, s);
        ASSERT_GE(r.count, 0);
        if (r.count == 0) continue;
        ASSERT_EQ(r.first, next) << tiles << ", " << splits << ", " << s;
        ASSERT_LT(s, used_splits(tiles, splits));
        ASSERT_TRUE(r.count >= kMinSplitTiles || r.first + r.count == 7 + tiles);
        next += r.count;
      }
      ASSERT_EQ(next, 7 + tiles);
      const int32_t used = used_splits(tiles, splits);
      ASSERT_GE(used, 1);
      ASSERT_LE(used, splits);
      ASSERT_EQ(split_range({7, tiles}, splits, used - 1).count > 0, tiles > 0);
    }
  }
}

TEST(KeySplit, PackedSequencesDoNotMeet) {
  const std::vector<int32_t> cu{0, 0, 1, 130, 131, 400};
  const Jagged seq{cu.data(), 5, 1 << 30};
  for (const int32_t pack : {1, 3, 8}) {
    int64_t end = 0;
    for (int64_t b = 0; b < seq.batch; ++b) {
      const Sequence s = packed_sequence(400, seq, pack, b);
      EXPECT_EQ(s.start, int64_t(cu[size_t(b)]) * pack);
      EXPECT_EQ(s.length, int64_t(cu[size_t(b) + 1] - cu[size_t(b)]) * pack);
      EXPECT_EQ(s.padded_start % kSeqAlign, 0);
      EXPECT_GE(s.padded_start, end);
      end = s.padded_start + s.length;
    }
    EXPECT_LE(end, packed_padded_count(400, seq, pack));
  }
  EXPECT_EQ(packed_sequence(12, {.batch = 3}, 4, 2).padded_start, 256);
  EXPECT_EQ(packed_padded_count(12, {.batch = 3}, 4), 384);
}

// A packed row sees what its token sees.
TEST(KeySplit, MasksOfPackedRows) {
  for (const Mask& mask : {Mask{}, Mask{.causal = true}, Mask{.window_left = 3, .window_right = 1}}) {
    for (int32_t pack : {1, 4, 5}) {
      const int32_t seqlen_q = 9, seqlen_k = 20;
      for (int32_t row = 0; row < seqlen_q * pack; ++row) {
        const Range got = visible_keys_of_rows(mask, pack, row, row + 1, seqlen_q * pack, seqlen_k);
        const Range want = visible_keys(mask, row / pack, row / pack + 1, seqlen_q, seqlen_k);
        EXPECT_EQ(got.first, want.first);
        EXPECT_EQ(got.end, want.end);
      }
      const Range all = visible_keys_of_rows(mask, pack, 0, seqlen_q * pack, seqlen_q * pack, seqlen_k);
      const Range want = visible_keys(mask, 0, seqlen_q, seqlen_q, seqlen_k);
      EXPECT_EQ(all.first, want.first);
      EXPECT_EQ(all.end, want.end);
    }
  }
  EXPECT_EQ(tiles_of({130, 385}).first, 1);
  EXPECT_EQ(tiles_of({130, 385}).count, 3);
  EXPECT_EQ(tiles_of({}).count, 0);
}

// From the keys' side a mask is one again.
TEST(Masks, TransposedSeesTheSamePairs) {
  for (const bool causal : {false, true}) {
    for (const int32_t left : {-1, 0, 3}) {
      for (const int32_t right : {-1, 0, 2}) {
        const Mask mask{.causal = causal, .window_left = left, .window_right = right};
        for (const auto& [seqlen_q, seqlen_k] : {std::pair(9, 9), {9, 20}, {20, 9}, {1, 5}}) {
          for (int first = 0; first < seqlen_k; ++first) {
            for (int end = first + 1; end <= seqlen_k; ++end) {
              const Range want = visible_rows(mask, first, end, seqlen_q, seqlen_k);
              const Range got = visible_keys(transposed(mask), first, end, seqlen_k, seqlen_q);
              EXPECT_EQ(got.first, want.first);
              EXPECT_EQ(got.end, want.end);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace mxflash
