// What the kernels of quantize, dequantize and convert_scales have in common: how tensors divide into tiles.
//
// A tile is 128 rows of the padded token axis (mx/scale_layout.h) of one head. Padded sequences are whole tiles, so a
// tile has tokens of one sequence or none at all; it holds whole blocks of every kind, whole scale atoms and whole
// tiles of operand images. The grid depends on capacities only: lengths are read on the device. Rows of a tile without
// a token count as zeros, which gives scale bytes of padding the zeros that the format asks for: nothing has to be
// cleared first.
#pragma once

#include <mxflash/quantize.h>

#include "mx/float16.h"
#include "mx/scale_layout.h"
#include "runtime/check.h"

namespace mxflash {

inline constexpr int kTileTokens = int(kSeqAlign);

// A [tokens, heads, dim] tensor; strides in elements.
struct DeviceTensor {
  void* data = nullptr;
  Dtype dtype = Dtype::none;
  int64_t token_stride = 0, head_stride = 0, channel_stride = 0;

  static DeviceTensor of(const Tensor& tensor) {
    const Tensor t = as_heads(tensor);
    return {t.data, t.dtype, t.stride[0], t.stride[1], t.stride[2]};
  }
  // Every row of every head starts at a multiple of `bytes`.
  bool aligned(int64_t bytes) const {
    const int64_t size = dtype_size(dtype);
    return reinterpret_cast<uintptr_t>(data) % uintptr_t(bytes) == 0 && token_stride * size % bytes == 0 &&
           head_stride * size % bytes == 0;
  }
  __device__ int64_t offset(int64_t token, int64_t head, int64_t channel) const {
    return token * token_stride + head * head_stride + channel * channel_stride;
  }
  __device__ float load(int64_t at) const {
    switch (dtype) {
      case Dtype::bf16: return decode_bf16(static_cast<const uint16_t*>(data)[at]);
      case Dtype::f16: return decode_f16(static_cast<const uint16_t*>(data)[at]);
      default: return static_cast<const float*>(data)[at];
    }
  }
  __device__ void store(int64_t at, float x) const {
    switch (dtype) {
      case Dtype::bf16: static_cast<uint16_t*>(data)[at] = encode_bf16(x); break;
      case Dtype::f16: static_cast<uint16_t*>(data)[at] = encode_f16(x); break;
      default: static_cast<float*>(data)[at] = x;
    }
  }
};

// An MX tensor; data and scale may be null where only its format matters.
struct DeviceMx {
  DeviceTensor payload{};
  uint8_t* scale = nullptr;
  MxBlock block = MxBlock::square32;
  ScaleLayout layout = ScaleLayout::linear;

  static DeviceMx of(const MxTensor& t) {
    return {DeviceTensor::of(t.data), static_cast<uint8_t*>(t.scale.data), t.block, t.layout};
  }
  __device__ uint8_t* row(int64_t token, int64_t head) const {
    return static_cast<uint8_t*>(payload.data) + payload.offset(token, head, 0);
  }
};

// Tokens of one tile.
struct TokenTile {
  int64_t sequence = 0;
  int64_t padded_row = 0;   // of its first row
  int64_t first_token = 0;  // of the packed tensor, in its first row
  int rows = 0;             // that hold tokens
};

// The token axis of a call, and the other extents.
struct TileGrid {
  Jagged seq{};
  int64_t tokens = 0, heads = 0, dim = 0, padded = 0;
  int64_t length = 0;           // of sequences of equal lengths, and the tiles of one:
  uint32_t sequence_tiles = 0;  // divisions that no thread has to do

  static TileGrid of(const Tensor& tensor, const Jagged& seq) {
    const Tensor t = as_heads(tensor);
    TileGrid grid{seq, t.shape[0], t.shape[1], t.shape[2], padded_token_count(t.shape[0], seq)};
    grid.length = grid.tokens / seq.batch;
    grid.sequence_tiles = uint32_t(grid.tiles() / seq.batch);
    return grid;
  }
  constexpr int64_t tiles() const { return padded / kTileTokens; }

  // Sequence of tile t: padded starts ascend, so the last that is not after it. Whole warps call this.
  __device__ TokenTile tile(uint32_t t) const {
    const int64_t row = int64_t(t) * kTileTokens;
    if (!seq.cu_seqlens) {
      const uint32_t b = seq.batch == 1 ? 0 : t / sequence_tiles, first = (t - b * sequence_tiles) * kTileTokens;
      return {b, row, b * length + first, rows_after(length - first)};
    }
    int32_t b = 0;
    for (int32_t end = seq.batch; end - b > 1;) {  // a warp narrows it to 1/32 at a time
      const int32_t step = int32_t(ceil_div(end - b, 32)), probe = b + int32_t(threadIdx.x % 32) * step;
      const bool not_after = probe < end && jagged_padded_start(seq.cu_seqlens[probe], probe) <= row;
      b += (__popc(__ballot_sync(~0u, not_after)) - 1) * step;
      end = min(end, b + step);
    }
    const int64_t start = seq.cu_seqlens[b], length = seq.cu_seqlens[b + 1] - start;
    const int64_t first = row - jagged_padded_start(start, b);
    return {b, row, start + first, rows_after(length - first)};
  }
  // body(token) for this tile's share of the tokens after the last sequence.
  template <class Body>
  __device__ void for_slack(uint32_t tile, Body&& body) const {
    if (!seq.cu_seqlens) return;
    for (int64_t token = seq.cu_seqlens[seq.batch] + int64_t(tile); token < tokens; token += tiles()) body(token);
  }

 private:
  static constexpr int rows_after(int64_t left) { return int(left < 0 ? 0 : left < kTileTokens ? left : kTileTokens); }
};

// Which tile, head and piece of the channels a CTA takes: the next one takes the next piece, then the next head, so
// that neighbours read the same rows of the tensor. Tiles are two dimensions of the grid, for more than 65535 of them.
struct TileItem {
  uint32_t tile, head, chunk;
  static __device__ TileItem of(uint32_t chunks) {
    const uint32_t tile = blockIdx.z * gridDim.y + blockIdx.y, x = blockIdx.x;
    if (chunks == 1) return {tile, x, 0};
    return {tile, x / chunks, x % chunks};
  }
};
inline dim3 tile_items(const TileGrid& grid, int64_t chunks) {
  const int64_t z = ceil_div(grid.tiles(), 65535);
  const int64_t y = z ? ceil_div(grid.tiles(), z) : 0;
  return dim3(unsigned(grid.heads * chunks), unsigned(y), unsigned(z));
}

// What such a grid can count, by a good margin.
inline Status check_items(const char* op, const TileGrid& grid, int64_t chunks) {
  constexpr int64_t limit = 0x7FFFFFFF;
  if (grid.tiles() <= limit && is_small_product({grid.heads, chunks}) && grid.heads * chunks <= limit) return {};
  return unsupported(
      "%s: sm90: tiles of 128 tokens and heads x pieces of dim must be fewer than 2^31, got %lld and "
      "%lld x %lld",
      op, static_cast<long long>(grid.tiles()), static_cast<long long>(grid.heads), static_cast<long long>(chunks));
}

// All kernels of quantize let the one behind them start as soon as their last CTA has, write nothing that the one ahead
// of them reads or writes, and end after it.

// mean[b, h, c] over the tokens of each sequence, in the order of the contract (mean_cuda.cu).
Status check_mean(const char* op, const TileGrid& grid);
// `overlaps` as in Launch.
Status launch_mean(const DeviceTensor& in, const TileGrid& grid, const DeviceTensor& mean, bool overlaps,
                   Stream stream);

}  // namespace mxflash
