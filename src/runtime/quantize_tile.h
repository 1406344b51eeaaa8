// Tiles: what the kernels of backend `cpu` quantize at a time, and how a tensor divides into them.
//
// A tile is up to 32 tokens of one sequence, the height of a block, by channels of one head or of several heads that
// lie side by side. It holds whole blocks of every kind, so tiles do not depend on each other.
#pragma once

#include <mxflash/quantize.h>

#include <algorithm>
#include <cstring>

#include "mx/e8m0.h"
#include "mx/scale_layout.h"
#include "runtime/mx_access.h"
#include "runtime/tensor_access.h"

namespace mxflash {

inline constexpr int64_t kTileRows = kMxBlock;
inline constexpr int64_t kTileCols = 512;                                 // at most
inline constexpr int64_t kTileScales = kTileRows * kTileCols / kMxBlock;  // of row32, the kind with the most

// rows x cols values. Where cols is not a multiple of 32, the rest of the last 32 can be read and is zero.
struct TileSource {
  const void* data;
  int64_t stride;  // elements from row to row
  Dtype dtype;     // f32, f16 or bf16
  int64_t rows, cols;
  const void* next = nullptr;  // a tile of the same shape, to be prefetched meanwhile
};

// Their MX copy. Scales go to a buffer in the order of the tile's blocks; TileAccess puts them in their places.
struct TileTarget {
  uint8_t* payload;
  int64_t stride;
  uint8_t* scale;  // square32 [C], row32 [rows][C], col32 [32 C]; C = ceil(cols / 32)
  Dtype element;
  MxBlock block;
  MxRule rule;
  bool stream;  // write around the caches: payload and stride are multiples of 64 bytes, and so is cols
};

// A block of NaN or Inf is NaN everywhere, whatever the vectors made of it.
inline void overwrite_nan_blocks(const TileSource& in, const TileTarget& out) {
  const int64_t width = out.block == MxBlock::col32 ? 1 : kMxBlock, across = ceil_div(in.cols, width);
  for (int64_t r = 0; r < in.rows; ++r) {
    const uint8_t* scale = out.scale + (out.block == MxBlock::row32 ? r * across : 0);
    for (int64_t i = 0; i < across; ++i) {
      if (scale[i] != kE8m0Nan) continue;
      const int64_t cols = in.cols - i * width < width ? in.cols - i * width : width;
      std::memset(out.payload + r * out.stride + i * width, kFp8Nan, size_t(cols));
    }
  }
}

// Outputs that a last level cache does not hold are written around it.
inline constexpr int64_t kStreamBytes = int64_t(32) << 20;

// Where a tile is: tokens of a sequence, channels of one head or all channels of several.
struct Tile {
  int64_t token, rows;
  int64_t head, heads;
  int64_t channel, cols;  // of each head
  int64_t width() const { return heads * cols; }
};

// Tiles of one sequence of an MX tensor [tokens, heads, dim].
class TileAccess {
 public:
  TileAccess(const MxTensor& t, const Jagged& seq, const Sequence& s)
      : tensor_(t), sequence_(s), padded_(padded_token_count(t.data.shape[0], seq)), shape_(block_shape(t.block)) {}

  uint8_t* payload(const Tile& t) const {
    return static_cast<uint8_t*>(tensor_.data.data) + row_offset(tensor_.data, sequence_.start + t.token, t.head) +
           t.channel;
  }
  // `stream`: around the caches, if addresses allow it.
  TileTarget target(const Tile& t, MxRule rule, bool stream, uint8_t* scale) const {
    uint8_t* const to = payload(t);
    const int64_t stride = tensor_.data.stride[0];
    const bool lines = (reinterpret_cast<uintptr_t>(to) | uintptr_t(stride) | uintptr_t(t.width())) % 64 == 0;
    return {to, stride, scale, tensor_.data.dtype, tensor_.block, rule, stream && lines};
  }

  // The scale bytes of a tile, from and to a buffer in the order of TileTarget.
  void store_scales(const Tile& t, const uint8_t* scale) const {
    auto* bytes = static_cast<uint8_t*>(tensor_.scale.data);
    for_rows(t, [&](ScaleIndex first, int64_t count, int64_t at) {
      if (tensor_.layout == ScaleLayout::linear) {
        std::memcpy(bytes + offset(first, 0), scale + at, size_t(count));
      } else {
        for (int64_t i = 0; i < count; ++i) bytes[offset(first, i)] = scale[at + i];
      }
    });
  }
  void load_scales(const Tile& t, uint8_t* scale) const {
    const auto* bytes = static_cast<const uint8_t*>(tensor_.scale.data);
    for_rows(t, [&](ScaleIndex first, int64_t count, int64_t at) {
      if (tensor_.layout == ScaleLayout::linear) {
        std::memcpy(scale + at, bytes + offset(first, 0), size_t(count));
      } else {
        for (int64_t i = 0; i < count; ++i) scale[at + i] = bytes[offset(first, i)];
      }
    });
  }

 private:
  int64_t offset(ScaleIndex first, int64_t i) const {
    return scale_offset(tensor_.block, tensor_.layout, padded_, tensor_.data.shape[2],
                        {first.head, first.row, first.col + i});
  }
  // body(first scale, how many follow it in this head's row, their place in the buffer)
  template <class Body>
  void for_rows(const Tile& t, Body&& body) const {
    const int64_t block_rows = ceil_div(t.rows, shape_.rows), across = ceil_div(t.cols, shape_.cols);
    const int64_t first_row = (sequence_.padded_start + t.token) / shape_.rows, first_col = t.channel / shape_.cols;
    for (int64_t r = 0; r < block_rows; ++r) {
      for (int64_t h = 0; h < t.heads; ++h) {
        body({t.head + h, first_row + r, first_col}, across, (r * t.heads + h) * across);
      }
    }
  }

  const MxTensor& tensor_;
  Sequence sequence_;
  int64_t padded_;
  BlockShape shape_;
};

// Zeroes what no block covers: scales of padding, rows of no sequence.
inline void clear_padding(const MxTensor& t, const Jagged& seq) {
  clear_slack_payload(t, seq);
  if (t.layout != ScaleLayout::linear) return clear_scales(t);
  const int64_t tokens = t.data.shape[0], padded = padded_token_count(tokens, seq);
  const ScaleGrid grid = scale_grid(t.block, padded, t.data.shape[2]);
  const int64_t height = block_shape(t.block).rows;
  for (int64_t b = 0; b < seq.batch; ++b) {
    const Sequence s = sequence_at(tokens, seq, b);
    const int64_t first = s.padded_start / height + ceil_div(s.length, height);
    const int64_t end = (b + 1 < seq.batch ? sequence_at(tokens, seq, b + 1).padded_start : padded) / height;
    for (int64_t head = 0; head < t.data.shape[1] && first < end; ++head) {
      std::memset(static_cast<uint8_t*>(t.scale.data) + linear_offset(grid, {head, first, 0}), 0,
                  size_t((end - first) * grid.cols));
    }
  }
}

}  // namespace mxflash
