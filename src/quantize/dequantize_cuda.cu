// dequantize and convert_scales for CUDA cards, the same code on every architecture. Bytes are those of
// quantize_ref.cpp; NaN is some NaN.
//
// dequantize: out = payload * 2^(scale - 127), exact in fp32 but for what exceeds it, rounded once to out's dtype.
//   A CTA takes 128 padded tokens x up to 256 channels of one head; a thread 8 channels of a token at a time, an 8-byte
//   load and 16 or 32 bytes of stores, where addresses allow it, else one channel. Per element to BF16 3 bytes, and 1/2
//   to unpack, 1 to widen, 1 to scale, 1/2 to pack: bound by memory.
// convert_scales: a CTA takes 128 padded tokens of one head, a thread one scale of `out` at a time. Scales are 1/32
//   of a tensor or less, so it is bound by the launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "mx/e8m0.h"
#include "ptx/convert.cuh"
#include "quantize/quantize.h"
#include "quantize/quantize_cuda.cuh"
#include "runtime/cuda_backend.h"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

constexpr int kThreads = 256;

// ---- dequantize -------------------------------------------------------------------------------------------------

constexpr int kVector = 8;  // channels
constexpr int kChunkChannels = 256;

struct DequantizeParams {
  TileGrid grid;
  DeviceMx in;
  DeviceTensor out;
  int64_t chunks;
};

__device__ uint8_t scale_at(const DeviceMx& t, const TileGrid& grid, int64_t head, int64_t padded_row,
                            int64_t channel) {
  const BlockShape shape = block_shape(t.block);
  const ScaleIndex i{head, padded_row / shape.rows, channel / shape.cols};
  return t.scale[scale_offset(t.block, t.layout, grid.padded, grid.dim, i)];
}

__device__ void decode(uint2 codes, Dtype element, float (&x)[kVector]) {
  uint32_t pair[4];
  if (element == Dtype::e4m3) {
    ptx::unpack_e4m3(codes.x, pair[0], pair[1]);
    ptx::unpack_e4m3(codes.y, pair[2], pair[3]);
  } else {
    ptx::unpack_e5m2(codes.x, pair[0], pair[1]);
    ptx::unpack_e5m2(codes.y, pair[2], pair[3]);
  }
#pragma unroll
  for (int k = 0; k < kVector / 2; ++k) {
    x[2 * k] = ptx::low_f16(pair[k]);
    x[2 * k + 1] = ptx::high_f16(pair[k]);
  }
}

template <Dtype kOut>
__device__ void store(const DeviceTensor& out, int64_t at, const float (&x)[kVector]) {
  if constexpr (kOut == Dtype::f32) {
    float4* const to = reinterpret_cast<float4*>(static_cast<float*>(out.data) + at);
    to[0] = {x[0], x[1], x[2], x[3]};
    to[1] = {x[4], x[5], x[6], x[7]};
  } else {
    uint32_t word[kVector / 2];
#pragma unroll
    for (int k = 0; k < kVector / 2; ++k) {
      if constexpr (kOut == Dtype::bf16) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * k], x[2 * k + 1]);
        word[k] = reinterpret_cast<const uint32_t&>(pair);
      } else {
        const __half2 pair = __floats2half2_rn(x[2 * k], x[2 * k + 1]);
        word[k] = reinterpret_cast<const uint32_t&>(pair);
      }
    }
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(out.data) + at) = {word[0], word[1], word[2], word[3]};
  }
}

__device__ void clear_slack(const DequantizeParams& p, const TileItem& item, int64_t first, int channels) {
  p.grid.for_slack(item.tile, [&](int64_t token) {
    for (int c = int(threadIdx.x); c < channels; c += kThreads) {
      p.out.store(p.out.offset(token, item.head, first + c), 0.0f);
    }
  });
}

// One channel of a token at a time, of anything.
__global__ void __launch_bounds__(kThreads) dequantize_any(const __grid_constant__ DequantizeParams p) {
  const TileItem item = TileItem::of(uint32_t(p.chunks));
  if (item.tile >= p.grid.tiles()) return;
  const TokenTile tile = p.grid.tile(item.tile);
  const int64_t first = int64_t(item.chunk) * kChunkChannels;
  const int channels = int(min(int64_t(kChunkChannels), p.grid.dim - first));
  for (int i = int(threadIdx.x); i < tile.rows * channels; i += kThreads) {
    const int r = i / channels;
    const int64_t token = tile.first_token + r, channel = first + i % channels;
    const uint8_t code = p.in.row(token, item.head)[channel];
    const uint8_t scale = scale_at(p.in, p.grid, item.head, tile.padded_row + r, channel);
    p.out.store(p.out.offset(token, item.head, channel),
                decode_fp8(code, fp8_format(p.in.payload.dtype)) * decode_e8m0(scale));
  }
  clear_slack(p, item, first, channels);
}

// Eight channels of a token at a time, kBatch of them loaded before the first is stored.
template <Dtype kOut>
__global__ void __launch_bounds__(kThreads) dequantize_vectors(const __grid_constant__ DequantizeParams p) {
  constexpr int kBatch = 4;
  const TileItem item = TileItem::of(uint32_t(p.chunks));
  if (item.tile >= p.grid.tiles()) return;
  const TokenTile tile = p.grid.tile(item.tile);
  const int64_t first = int64_t(item.chunk) * kChunkChannels;
  const int channels = int(min(int64_t(kChunkChannels), p.grid.dim - first));
  const int across = channels / kVector, count = tile.rows * across;
  const uint8_t* const codes = p.in.row(tile.first_token, item.head) + first;
  const int64_t to = p.out.offset(tile.first_token, item.head, first);
  // Linear scales of blocks that a vector does not leave lie `scale_row` apart: no index of a tensor for each of them.
  const bool by_row = p.in.layout == ScaleLayout::linear && p.in.block != MxBlock::col32;
  const int row_shift = p.in.block == MxBlock::square32 ? 5 : 0;
  const int scale_row = int(ceil_div(p.grid.dim, kMxBlock));
  const ScaleIndex at{item.head, tile.padded_row >> row_shift, first / kMxBlock};
  const uint8_t* const scales =
      by_row ? p.in.scale + scale_offset(p.in.block, p.in.layout, p.grid.padded, p.grid.dim, at) : nullptr;
  for (int begin = int(threadIdx.x); begin < count; begin += kBatch * kThreads) {
    uint2 code[kBatch];
    uint8_t scale[kBatch] = {};
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int i = begin + n * kThreads, r = i / across, channel = i % across * kVector;
      if (i >= count) break;
      code[n] = __ldcs(reinterpret_cast<const uint2*>(codes + r * p.in.payload.token_stride + channel));
      if (by_row) scale[n] = scales[(r >> row_shift) * scale_row + channel / int(kMxBlock)];
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int i = begin + n * kThreads, r = i / across, channel = i % across * kVector;
      if (i >= count) break;
      float x[kVector], factor = decode_e8m0(scale[n]);
      decode(code[n], p.in.payload.dtype, x);
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        if (!by_row && (k == 0 || p.in.block == MxBlock::col32)) {
          factor = decode_e8m0(scale_at(p.in, p.grid, item.head, tile.padded_row + r, first + channel + k));
        }
        x[k] *= factor;
      }
      store<kOut>(p.out, to + r * p.out.token_stride + channel, x);
    }
  }
  clear_slack(p, item, first, channels);
}

Status dequantize_cuda(const Dequantize& args, Stream stream) {
  const DeviceGuard guard(args.in.data.device.index);
  MXFLASH_TRY(guard.status());
  DequantizeParams p{TileGrid::of(args.out, args.seq), DeviceMx::of(args.in), DeviceTensor::of(args.out), 0};
  p.chunks = ceil_div(p.grid.dim, kChunkChannels);
  const Launch l{
      .what = "dequantize: sm90", .grid = tile_items(p.grid, p.chunks), .block = dim3(kThreads), .stream = stream};
  const bool vectors = p.grid.dim % kVector == 0 && p.in.payload.aligned(kVector) && p.out.aligned(16);
  if (!vectors) return launch(l, dequantize_any, p);
  switch (p.out.dtype) {
    case Dtype::bf16: return launch(l, dequantize_vectors<Dtype::bf16>, p);
    case Dtype::f16: return launch(l, dequantize_vectors<Dtype::f16>, p);
    default: return launch(l, dequantize_vectors<Dtype::f32>, p);
  }
}

template <int kCapability>
Status supports_dequantize(const Dequantize& args) {
  MXFLASH_TRY(check_compute_capability<kCapability>("dequantize", args.in.data.device.index));
  const TileGrid grid = TileGrid::of(args.out, args.seq);
  return check_items("dequantize", grid, ceil_div(grid.dim, kChunkChannels));
}

// ---- convert_scales ---------------------------------------------------------------------------------------------

struct ConvertParams {
  TileGrid grid;
  DeviceMx in, out;
  int64_t columns;  // of out's scales, padding of atoms included
};

// Columns of scales, with those that only pad an atom.
constexpr int64_t padded_columns(MxBlock block, ScaleLayout layout, int64_t dim) {
  const int64_t width = block_shape(block).cols;
  return layout == ScaleLayout::linear ? ceil_div(dim, width) : round_up(dim, kAtomRows) / width;
}

__global__ void __launch_bounds__(kThreads) convert_tiles(const __grid_constant__ ConvertParams p) {
  const TileItem item = TileItem::of(1);
  if (item.tile >= p.grid.tiles()) return;
  const TokenTile tile = p.grid.tile(item.tile);
  const BlockShape shape = block_shape(p.out.block);
  const int64_t count = kTileTokens / shape.rows * p.columns;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const int64_t row = i / p.columns, column = i % p.columns;  // of blocks
    const int64_t token = row * shape.rows, channel = column * shape.cols;
    uint8_t scale = 0;
    if (token < tile.rows && channel < p.grid.dim) {
      scale = scale_at(p.in, p.grid, item.head, tile.padded_row + token, channel);
    }
    const ScaleIndex to{item.head, tile.padded_row / shape.rows + row, column};
    p.out.scale[scale_offset(p.out.block, p.out.layout, p.grid.padded, p.grid.dim, to)] = scale;
  }
}

Status convert_scales_cuda(const ConvertScales& args, Stream stream) {
  const DeviceGuard guard(args.in.data.device.index);
  MXFLASH_TRY(guard.status());
  ConvertParams p{TileGrid::of(args.in.data, args.seq), DeviceMx::of(args.in), DeviceMx::of(args.out), 0};
  p.columns = padded_columns(p.out.block, p.out.layout, p.grid.dim);
  return launch({.what = "convert_scales: sm90",
                 .grid = tile_items(p.grid, p.columns ? 1 : 0),
                 .block = dim3(kThreads),
                 .stream = stream},
                convert_tiles, p);
}

template <int kCapability>
Status supports_convert(const ConvertScales& args) {
  MXFLASH_TRY(check_compute_capability<kCapability>("convert_scales", args.in.data.device.index));
  return check_items("convert_scales", TileGrid::of(args.in.data, args.seq), 1);
}

}  // namespace

const Impl<Dequantize> kDequantizeSm90 = sm90_backend<Dequantize>(supports_dequantize<90>, dequantize_cuda);
const Impl<Dequantize> kDequantizeSm100 = sm100_backend<Dequantize>(supports_dequantize<100>, dequantize_cuda);
const Impl<ConvertScales> kConvertScalesSm90 = sm90_backend<ConvertScales>(supports_convert<90>, convert_scales_cuda);
const Impl<ConvertScales> kConvertScalesSm100 =
    sm100_backend<ConvertScales>(supports_convert<100>, convert_scales_cuda);

}  // namespace mxflash
