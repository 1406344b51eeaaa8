// What the kernels of quantize have in common: the parameters of a call, scales, and the arithmetic of operand images.
//
// An image's bytes are made from the codes of the MX tensor: code * 2^(block exponent - tile exponent) in FP16, exact
// down to 2^-24 where half of E4M3's smallest step is 2^-10, and rounded again. A block's largest magnitude rounds to
// its largest code, so the scale of an image tile is known before an element is rounded.
#pragma once

#include "mx/e8m0.h"
#include "mx/operand_image.h"
#include "mx/rotation.h"
#include "ptx/convert.cuh"
#include "quantize/quantize_cuda.cuh"
#include "runtime/launch.cuh"

namespace mxflash {

struct QuantizeParams {
  TileGrid grid;
  DeviceTensor in, mean;  // mean.data: null without smoothing
  DeviceMx copy[2];
  int copies;
  MxRule rule;
  int group;  // channels of a rotation, or 0
  uint64_t seed;
  uint8_t* image;  // or null
  ImageShape image_shape;
  QuantizeStats* stats;  // or null
  int64_t covered;       // channels that scales or an image have bytes for: dim, or more where they pad it
  int64_t chunks;        // that a kernel divides them into
};

inline constexpr int kTileChannels = 128;  // of a CTA of quantize_tiles and quantize_rows

// Smoothed or rotated in groups of up to kTileChannels, or from fp32 (quantize_rows_cuda.cu); l has no block yet.
Status launch_rows(const QuantizeParams& p, Launch l);

// Calls body.operator()<block>() with a block kind as a constant.
template <class Body>
__device__ __forceinline__ void with_block(MxBlock block, Body&& body) {
  switch (block) {
    case MxBlock::square32: return body.template operator()<MxBlock::square32>();
    case MxBlock::row32: return body.template operator()<MxBlock::row32>();
    case MxBlock::col32: return body.template operator()<MxBlock::col32>();
  }
}

// Two elements of 16 bits.
template <Dtype kIn>
__device__ __forceinline__ float2 widen(uint32_t w) {
  if constexpr (kIn == Dtype::bf16) return {__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u)};
  return {ptx::low_f16(w), ptx::high_f16(w)};
}

// Zeroes this CTA's share of payload rows that belong to no sequence, channels first .. end - 1.
__device__ __forceinline__ void clear_slack(const QuantizeParams& p, const TileItem& item, int64_t first, int64_t end) {
  for (int i = 0; i < p.copies; ++i) {
    if (!p.copy[i].payload.data) continue;
    p.grid.for_slack(item.tile, [&](int64_t token) {
      uint8_t* const row = p.copy[i].row(token, item.head);
      for (int64_t c = first + threadIdx.x; c < end; c += blockDim.x) row[c] = 0;
    });
  }
}

// ---- scales -----------------------------------------------------------------------------------------------------

// Block columns of a row of scales, padding of atoms included.
constexpr int64_t block_columns(int64_t dim, ScaleLayout layout) {
  const int64_t columns = ceil_div(dim, kMxBlock);
  return layout == ScaleLayout::linear ? columns : round_up(columns, kAtomRows / kMxBlock);
}

__device__ __forceinline__ uint32_t scale_of(float amax, MxRule rule) {
  return scale_from_amax(__float_as_uint(amax), e4m3_format(), rule);
}
// 2^(127 - scale), a normal number for every scale; NaN for NaN's, so that products are.
__device__ __forceinline__ float reciprocal(uint32_t scale) {
  return __uint_as_float(scale == kE8m0Nan ? 0x7FC00000u : (254u - scale) << 23);
}

// Where 32 tokens by 32 channels have one scale, or one a token, or one a channel: this lane's is that of the block, of
// its token or of its channel. row: padded, of the first token.
__device__ __forceinline__ void store_lane_scale(const DeviceMx& out, MxBlock block, const TileGrid& grid, int64_t head,
                                                 int64_t row, int64_t channel, uint8_t scale) {
  const int lane = int(threadIdx.x) % 32;
  const int64_t column = channel / kMxBlock;
  if (!out.scale || column >= block_columns(grid.dim, out.layout)) return;
  ScaleIndex i{head, row / kMxBlock, column};
  if (block == MxBlock::square32 && lane != 0) return;
  if (block == MxBlock::row32) i.row = row + lane;
  if (block == MxBlock::col32) i.col = channel;
  if (block == MxBlock::col32 && out.layout == ScaleLayout::linear && channel >= grid.dim) return;
  out.scale[scale_offset(block, out.layout, grid.padded, grid.dim, i)] = scale;
}

// ---- images -----------------------------------------------------------------------------------------------------

// The largest fp32 value stands for what rounding carries beyond it, as in the specification of images.
inline constexpr uint32_t kLargestBits = 0x7F7FFFFF;

// The rounded amax of a block; NaN blocks do not count.
__device__ __forceinline__ float rounded_amax(float amax, uint32_t scale) {
  if (scale == kE8m0Nan) return 0;
  uint32_t low, high;
  ptx::unpack_e4m3(ptx::pack_e4m3(amax * reciprocal(scale), 0, 0, 0), low, high);
  return fminf(ptx::low_f16(low) * decode_e8m0(uint8_t(scale)), __uint_as_float(kLargestBits));
}

// The scale of the image tile that this warp writes to, from the largest rounded amax of each thread. All warps of the
// CTA call it: warp w has the rows of stripe w % 4. The scale byte is written too.
__device__ __forceinline__ uint32_t image_tile_scale(const QuantizeParams& p, const TileItem& item, float most) {
  __shared__ uint32_t warp_amax[8];
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, warps = int(blockDim.x) / 32;
  const int stripe = warp % 4;
  const ImageShape& shape = p.image_shape;
  // Magnitudes compare as integers.
  const uint32_t warp_most = __reduce_max_sync(~0u, __float_as_uint(most));
  if (lane == 0) warp_amax[warp] = warp_most;
  __syncthreads();
  const bool is_query = shape.role == ImageRole::query;
  const bool counts = lane < warps && (!is_query || lane % 4 / 2 == stripe / 2);
  const uint32_t tile_most = __reduce_max_sync(~0u, counts ? warp_amax[lane] : 0);
  const uint32_t tile_scale = scale_from_amax(tile_most, e4m3_format(), MxRule::rceil);
  if (lane == 0 && warp < 4 && stripe % (is_query ? 2 : 4) == 0) {
    // shape.scale_offset without its divisions: two scales a tile, or one.
    const int64_t scales = is_query ? 2 : 1, before = item.head * p.grid.tiles() + item.tile;
    const int64_t to = shape.heads * shape.tokens * shape.dim + before * scales + stripe / 2;
    p.image[to] = uint8_t(tile_scale);
  }
  return tile_scale;
}

// 2^(scale - tile scale) as FP16 bits. Block scales exceed the tile's by at most one binade, and 2^-24 is the least
// FP16: from 2^-19 on every code becomes zero.
__device__ __forceinline__ uint32_t rebase_factor(uint32_t scale, uint32_t tile_scale) {
  const int e = int(scale) - int(tile_scale);
  if (e > 1) return 0x4000;  // a block of NaN
  return e >= -14 ? uint32_t(15 + e) << 10 : e >= -24 ? 1u << (24 + e) : 0u;
}

__device__ __forceinline__ uint32_t rebase(uint32_t codes, uint32_t low_factor, uint32_t high_factor) {
  uint32_t low, high;
  ptx::unpack_e4m3(codes, low, high);
  return ptx::pack_e4m3_f16(ptx::mul_f16x2(low, low_factor), ptx::mul_f16x2(high, high_factor));
}

// The same shape with its role as a constant, which spares divisions.
template <ImageRole kRole>
__device__ __forceinline__ ImageShape with_role(const ImageShape& shape) {
  return {kRole, shape.heads, shape.tokens, shape.dim};
}

}  // namespace mxflash
