// Tiles: what the kernels of backend `cpu` quantize at a time, and how a tensor divides into them.
//
// A tile is up to 32 tokens of one sequence, the height of a block, by channels of one head or of several heads that
// lie side by side. It holds whole blocks of every kind, so tiles do not depend on each other.
#pragma once

#include <mxflash/quantize.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "mx/e8m0.h"
#include "mx/scale_layout.h"
#include "runtime/mx_access.h"
#include "runtime/tensor_access.h"

namespace mxflash {

inline constexpr int64_t kTileRows = kMxBlock;
inline constexpr int64_t kTileCols = 1024;  // at most: 64 KiB of BF16, twice, fit an L2

// rows x cols values. Where cols is not a multiple of 32, the rest of the last 32 can be read and is zero.
struct TileSource {
  const void* data;
  int64_t stride;  // elements from row to row
  Dtype dtype;     // f32, f16 or bf16
  int64_t rows, cols;
  const void* next = nullptr;  // the tile after it, of the same shape, to be prefetched
};

// Their MX copy. Scales go to a buffer in the order of the tile's blocks; TileAccess puts them in their places.
struct TileTarget {
  uint8_t* payload;
  int64_t stride;
  uint8_t* scale;  // [cols, rounded up to 128], see scale_index
  Dtype element;
  MxBlock block;
  MxRule rule;
  bool stream;  // write around the caches: payload and stride are multiples of 64 bytes, and so is cols
};

// Scales of a tile in a buffer: 128 bytes for 128 channels. col32 uses all; square32 one for 32 channels; row32 four
// for each of 32 rows, as they lie side by side in memory.
constexpr int64_t scale_index(MxBlock block, int64_t row, int64_t col) {
  switch (block) {
    case MxBlock::col32: return col;
    case MxBlock::row32: return col / 128 * 128 + row * 4 + col % 128 / kMxBlock;
    case MxBlock::square32: break;
  }
  return col / kMxBlock * kMxBlock;
}

// A block of NaN or Inf is NaN everywhere, whatever the vectors made of it.
inline void overwrite_nan_blocks(const TileSource& in, const TileTarget& out) {
  const int64_t width = out.block == MxBlock::col32 ? 1 : kMxBlock;
  for (int64_t r = 0; r < in.rows; ++r) {
    for (int64_t c = 0; c < in.cols; c += width) {
      if (out.scale[scale_index(out.block, r, c)] != kE8m0Nan) continue;
      std::memset(out.payload + r * out.stride + c, kFp8Nan, size_t(std::min(width, in.cols - c)));
    }
  }
}

// Outputs that a last level cache does not hold are written around it.
inline constexpr int64_t kStreamBytes = int64_t(32) << 20;

// MX elements to floats: the same the other way.
struct DequantizeTile {
  const uint8_t* payload;
  int64_t stride;
  const uint8_t* scale;  // as in TileTarget
  Dtype element;
  MxBlock block;
  Tensor out;
  int64_t offset, out_stride;  // of the first element of out; from row to row
  int64_t rows, cols;
  bool stream;          // out is at a multiple of 64 bytes in every row, and cols one of 64
  const uint8_t* next;  // the payload of the tile after it, of the same shape, to be prefetched, or null
};

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
    return {.payload = to,
            .stride = stride,
            .scale = scale,
            .element = tensor_.data.dtype,
            .block = tensor_.block,
            .rule = rule,
            .stream = stream && lines};
  }

  // The scale bytes of a tile, from and to a buffer in the order of scale_index.
  void store_scales(const Tile& t, const uint8_t* scale) const {
    copy_scales(t, [&](uint8_t* tensor, int64_t i, auto size) { std::memcpy(tensor, scale + i, size()); });
  }
  void load_scales(const Tile& t, uint8_t* scale) const {
    copy_scales(t, [&](const uint8_t* tensor, int64_t i, auto size) { std::memcpy(scale + i, tensor, size()); });
  }

 private:
  // copy(where in the tensor, where in the buffer, size) for all of a tile. In both layouts, steps between the rows and
  // between the channels of a tile are equal, and four blocks of a row that start at a multiple of 128 channels are
  // adjacent: in an atom, 32 matrix rows are 16 bytes apart.
  template <class Copy>
  void copy_scales(const Tile& t, Copy&& copy) const {
    constexpr std::integral_constant<size_t, 1> one;
    constexpr std::integral_constant<size_t, 4> four;
    const MxBlock block = tensor_.block;
    const int64_t dim = tensor_.data.shape[2], first_row = (sequence_.padded_start + t.token) / shape_.rows;
    const bool linear = tensor_.layout == ScaleLayout::linear;
    const int64_t row_step = linear ? ceil_div(dim, kMxBlock) : kAtomBytes / kMxBlock;
    const int64_t col_step = linear ? 1 : kAtomBytes / kMxBlock;
    for (int64_t h = 0; h < t.heads; ++h) {
      for (int64_t c = 0; c < t.cols;) {
        const ScaleIndex first{t.head + h, first_row,
                               block == MxBlock::col32 ? t.channel + c : (t.channel + c) / kMxBlock};
        uint8_t* const to =
            static_cast<uint8_t*>(tensor_.scale.data) + scale_offset(block, tensor_.layout, padded_, dim, first);
        const int64_t from = h * t.cols + c;
        if (block == MxBlock::row32 && from % 128 == 0 && (t.channel + c) % 128 == 0 && c + 128 <= t.cols) {
          for (int64_t r = 0; r < t.rows; ++r) copy(to + r * row_step, from + 4 * r, four);
          c += 128;
          continue;
        }
        if (block == MxBlock::row32) {
          for (int64_t r = 0; r < t.rows; ++r) copy(to + r * row_step, scale_index(block, r, from), one);
        } else if (block == MxBlock::square32) {
          copy(to, scale_index(block, 0, from), one);
        } else {
          for (int64_t i = 0; i < kMxBlock && c + i < t.cols; ++i) copy(to + i * col_step, from + i, one);
        }
        c += kMxBlock;
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
  if (grid.cols == 0) return;
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
