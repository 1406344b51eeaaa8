// From an MX tensor to its operand image: one pass over the payload (mx/operand_image.h defines the bytes).
//
// A CTA owns one scale tile of one head: 64 tokens of queries, 128 of keys or values. Each thread holds pieces of 16
// channels of a token in registers between finding the tile's largest finite element and writing codes, so memory is
// read once. Rows of queries and keys go out in 16-byte pieces at their swizzled place; values are transposed through
// shared memory.
//
// A code whose block has the tile's scale is copied. Any other is decoded (exact in fp32), multiplied by a power of two
// (exact: it is at most 2^9 afterwards, and what falls below fp32's range is zero in E4M3 anyway) and rounded once.
#include <cuda_fp8.h>

#include "mx/e8m0.h"
#include "mx/operand_image.h"
#include "ptx/convert.cuh"
#include "runtime/launch.cuh"
#include "runtime/operand_image.cuh"

namespace mxflash {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 16;  // channels

struct Params {
  MxTensor operand;
  Jagged seq;
  ImageShape shape;
  int64_t dim;
  uint8_t* image;
  ImageStats* stats;  // or null
};

// The sequence that owns a row of the padded axis; null length if none does.
__device__ Sequence owner(int64_t tokens, const Jagged& seq, int64_t padded_row) {
  int64_t low = 0, high = seq.batch;  // the last sequence that starts at or before the row
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (sequence_at(tokens, seq, middle).padded_start <= padded_row ? low : high) = middle;
  }
  return sequence_at(tokens, seq, low);
}

__device__ float decode(uint8_t code, bool e5m2) {
  const __half_raw h = __nv_cvt_fp8_to_halfraw(code, e5m2 ? __NV_E5M2 : __NV_E4M3);
  return __half2float(h);
}

// 2^e for e in -149..127; 0 below, and 2^127 above: there only zeros come, from blocks that are all zero.
__device__ float power_of_two(int e) {
  e = min(e, 127);
  if (e >= -126) return __int_as_float((e + 127) << 23);
  return e >= -149 ? __int_as_float(1 << (e + 149)) : 0.0f;
}

struct Piece {
  uint8_t code[kPiece];
  uint8_t scale[kPiece];  // of each channel
};

__device__ void load_piece(const Params& p, const Sequence& s, int64_t head, int64_t token, int64_t channel, Piece& x) {
#pragma unroll
  for (int i = 0; i < kPiece; ++i) x.code[i] = x.scale[i] = 0;
  if (token >= s.length || channel >= p.dim) return;
  const Tensor& data = p.operand.data;
  const uint8_t* row =
      static_cast<const uint8_t*>(data.data) + (s.start + token) * data.stride[0] + head * data.stride[1] + channel;
  const int count = int(p.dim - channel < kPiece ? p.dim - channel : kPiece);
  if (count == kPiece && reinterpret_cast<uintptr_t>(row) % 16 == 0) {
    const uint4 v = *reinterpret_cast<const uint4*>(row);
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < kPiece; ++i) x.code[i] = uint8_t(word[i / 4] >> (8 * (i % 4)));
  } else {
    for (int i = 0; i < kPiece; ++i) {
      if (i < count) x.code[i] = row[i];
    }
  }
  const BlockShape block = block_shape(p.operand.block);
  const uint8_t* scales = static_cast<const uint8_t*>(p.operand.scale.data);
  uint8_t shared = 0;  // of a block that spans the whole piece
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    if (i == 0 || block.cols == 1) {
      if (i < count) {
        const ScaleIndex at{head, (s.padded_start + token) / block.rows, (channel + i) / block.cols};
        shared = scales[scale_offset(p.operand.block, p.operand.layout, p.shape.tokens, p.dim, at)];
      }
    }
    x.scale[i] = shared;
  }
}

// The code at the tile's scale, four at a time. Adds the finite elements that change value to `rounded`.
template <bool kCount>
__device__ uint32_t rebase4(const Piece& x, int first, uint8_t tile_scale, bool e5m2, uint32_t& rounded) {
  uint32_t same = 0;
  float value[4];
  bool equal = !e5m2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint8_t code = x.code[first + i], scale = x.scale[first + i];
    same |= uint32_t(code) << (8 * i);
    equal &= scale == tile_scale;
    value[i] = decode(code, e5m2) * power_of_two(int(scale) - int(tile_scale));
    if (scale == kE8m0Nan) value[i] = __int_as_float(0x7FC00000);
  }
  if (equal) return same;
  const uint32_t codes = ptx::pack_e4m3(value[0], value[1], value[2], value[3]);
  if constexpr (kCount) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool lost = value[i] == 0 && (x.code[first + i] & 0x7F) != 0;  // already to fp32
      rounded += isfinite(value[i]) && (lost || decode(uint8_t(codes >> (8 * i)), false) != value[i]);
    }
  }
  return codes;
}

template <int kDim, bool kValue, int kTokens, bool kCount>
__global__ void __launch_bounds__(kThreads, 1) image_kernel(const __grid_constant__ Params p) {
  constexpr int kPieces = kTokens * kDim / kPiece / kThreads;  // of a thread
  constexpr int kPerRow = kDim / kPiece;
  __shared__ uint32_t warp_amax[kThreads / 32];
  __shared__ __align__(16) uint8_t transposed[kValue ? kTokens * (kDim + 4) : 16];
  const bool e5m2 = p.operand.data.dtype == Dtype::e5m2;
  const int64_t head = blockIdx.y, row0 = int64_t(blockIdx.x) * kTokens;
  const Sequence s = owner(p.operand.data.shape[0], p.seq, row0);
  const int64_t token0 = row0 - s.padded_start;

  Piece x[kPieces];
  uint32_t amax = 0;
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    const int id = int(threadIdx.x) + k * kThreads;
    load_piece(p, s, head, token0 + id / kPerRow, id % kPerRow * kPiece, x[k]);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const float value = decode(x[k].code[i], e5m2) * decode_e8m0(x[k].scale[i]);
      const uint32_t magnitude = magnitude_bits(value);
      const bool finite = x[k].scale[i] != kE8m0Nan && magnitude_bits(decode(x[k].code[i], e5m2)) < 0x7F800000;
      // Beyond fp32 (scale 2^127): the largest finite value stands for it.
      if (finite) amax = max(amax, min(magnitude, 0x7F7FFFFFu));
    }
  }
  amax = __reduce_max_sync(~0u, amax);
  if (threadIdx.x % 32 == 0) warp_amax[threadIdx.x / 32] = amax;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) amax = max(amax, warp_amax[w]);
  const uint8_t scale = scale_from_amax(amax, e4m3_format(), MxRule::rceil);
  if (threadIdx.x == 0) p.image[p.shape.scale_offset(head, row0)] = scale;
  uint32_t rounded = 0;

#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    const int id = int(threadIdx.x) + k * kThreads;
    const int token = id / kPerRow, channel = id % kPerRow * kPiece;
    const uint4 codes{rebase4<kCount>(x[k], 0, scale, e5m2, rounded), rebase4<kCount>(x[k], 4, scale, e5m2, rounded),
                      rebase4<kCount>(x[k], 8, scale, e5m2, rounded), rebase4<kCount>(x[k], 12, scale, e5m2, rounded)};
    if constexpr (!kValue) {
      *reinterpret_cast<uint4*>(p.image + p.shape.offset(head, row0 + token, channel)) = codes;
    } else {
      uint32_t* to = reinterpret_cast<uint32_t*>(transposed + token * (kDim + 4) + channel);
      to[0] = codes.x, to[1] = codes.y, to[2] = codes.z, to[3] = codes.w;
    }
  }
  if constexpr (kCount) {
    auto* const counts = reinterpret_cast<unsigned long long*>(p.stats);  // rounded, total
    rounded = __reduce_add_sync(~0u, rounded);
    if (threadIdx.x % 32 == 0 && rounded > 0) atomicAdd(counts, rounded);
    const int64_t real = min(max(s.length - token0, int64_t(0)), int64_t(kTokens));
    if (threadIdx.x == 0) atomicAdd(counts + 1, static_cast<unsigned long long>(real * p.dim));
  }
  if constexpr (kValue) {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      // 16 positions of one channel: half of a row of the image.
      const int id = int(threadIdx.x) + k * kThreads;
      const int channel = id % kDim, half = id / kDim % 2, group = id / kDim / 2;
      uint32_t word[4] = {};
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const int token = group * int(kValueGroup) + int(value_token(half * kPiece + i));
        word[i / 4] |= uint32_t(transposed[token * (kDim + 4) + channel]) << (8 * (i % 4));
      }
      const int64_t first = row0 + group * kValueGroup + value_token(half * kPiece);
      *reinterpret_cast<uint4*>(p.image + p.shape.offset(head, first, channel)) =
          make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}

template <bool kCount>
Status write(const Params& params, const char* what, Stream stream) {
  const ImageShape& shape = params.shape;
  const Launch at{what, dim3(uint32_t(shape.scale_tiles()), uint32_t(shape.heads)), kThreads, 0, stream};
  const bool wide = shape.dim == 128;
  switch (shape.role) {
    case ImageRole::query:
      return launch(at, wide ? image_kernel<128, false, 64, kCount> : image_kernel<64, false, 64, kCount>, params);
    case ImageRole::key:
      return launch(at, wide ? image_kernel<128, false, 128, kCount> : image_kernel<64, false, 128, kCount>, params);
    case ImageRole::value:
      return launch(at, wide ? image_kernel<128, true, 128, kCount> : image_kernel<64, true, 128, kCount>, params);
  }
  return {};
}

}  // namespace

Status write_operand_image(const char* what, const MxTensor& operand, const Jagged& seq, ImageRole role, uint8_t* image,
                           ImageStats* stats, Stream stream) {
  const int64_t tokens = operand.data.shape[0], heads = operand.data.shape[1], dim = operand.data.shape[2];
  const ImageShape shape = ImageShape::of(role, padded_token_count(tokens, seq), heads, dim);
  const Params params{operand, seq, shape, dim, image, stats};
  if (!stats) return write<false>(params, what, stream);
  MXFLASH_TRY(cuda_status(cudaMemsetAsync(stats, 0, sizeof *stats, stream), what));
  return write<true>(params, what, stream);
}

}  // namespace mxflash
