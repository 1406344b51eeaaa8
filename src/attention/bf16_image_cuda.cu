// From an MX tensor to its BF16 image: one pass over the payload (mx/bf16_image.h defines the bytes).
//
// A CTA takes 64 tokens of the padded axis of one head; a thread pieces of 8 channels of a token: 8 bytes in, 16 out at
// their swizzled place, which is a row of 128 bytes of an atom for 8 neighbouring threads. Loads of four pieces are in
// flight together. Three bytes an element: bound by memory.
#include <cuda_bf16.h>

#include "attention/bf16_image.cuh"
#include "attention/padded_axis.cuh"
#include "mx/e8m0.h"
#include "mx/scale_layout.h"
#include "ptx/convert.cuh"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 64;
constexpr int kInFlight = 4;
constexpr int kPiece = int(kAtomPiece);

struct Params {
  MxTensor operand;
  Jagged seq;
  Bf16ImageShape shape;
  int64_t dim;
  uint16_t* image;
};

// 8 codes of a token; zeros where there is none. dim is a multiple of 8.
__device__ uint2 load_codes(const Params& p, const Sequence& s, int64_t head, int64_t token, int64_t channel) {
  if (token >= s.length || channel >= p.dim) return {0, 0};
  const Tensor& data = p.operand.data;
  const uint8_t* codes =
      static_cast<const uint8_t*>(data.data) + (s.start + token) * data.stride[0] + head * data.stride[1] + channel;
  if (reinterpret_cast<uintptr_t>(codes) % 8 == 0) return *reinterpret_cast<const uint2*>(codes);
  uint32_t word[2] = {};
#pragma unroll
  for (int i = 0; i < kPiece; ++i) word[i / 4] |= uint32_t(codes[i]) << (8 * (i % 4));
  return {word[0], word[1]};
}

__device__ uint8_t scale_at(const Params& p, const Sequence& s, int64_t head, int64_t token, int64_t channel) {
  if (token >= s.length || channel >= p.dim) return 0;
  const BlockShape block = block_shape(p.operand.block);
  const ScaleIndex at{head, (s.padded_start + token) / block.rows, channel / block.cols};
  return static_cast<const uint8_t*>(
      p.operand.scale.data)[scale_offset(p.operand.block, p.operand.layout, p.shape.tokens, p.dim, at)];
}

__global__ void __launch_bounds__(kThreads) bf16_image_kernel(const __grid_constant__ Params p) {
  const bool e5m2 = p.operand.data.dtype == Dtype::e5m2, by_channel = p.operand.block == MxBlock::col32;
  const int64_t head = blockIdx.y, row0 = int64_t(blockIdx.x) * kTokens;
  const Sequence s = sequence_of_row(p.operand.data.shape[0], p.seq, row0);
  const int64_t token0 = row0 - s.padded_start;
  const int across = int(p.shape.dim) / kPiece, count = kTokens * across;  // pieces
#pragma unroll 1
  for (int first = int(threadIdx.x); first < count; first += kInFlight * kThreads) {
    uint2 codes[kInFlight];
    uint8_t scale[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int id = first + k * kThreads, token = id / across, channel = id % across * kPiece;
      codes[k] = id < count ? load_codes(p, s, head, token0 + token, channel) : uint2{0, 0};
      scale[k] = id < count ? scale_at(p, s, head, token0 + token, channel) : 0;
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int id = first + k * kThreads, token = id / across, channel = id % across * kPiece;
      if (id >= count) break;
      uint32_t pair[4];
      if (e5m2) {
        ptx::unpack_e5m2(codes[k].x, pair[0], pair[1]);
        ptx::unpack_e5m2(codes[k].y, pair[2], pair[3]);
      } else {
        ptx::unpack_e4m3(codes[k].x, pair[0], pair[1]);
        ptx::unpack_e4m3(codes[k].y, pair[2], pair[3]);
      }
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float low = decode_e8m0(scale[k]), high = low;
        if (by_channel) {
          low = decode_e8m0(scale_at(p, s, head, token0 + token, channel + 2 * i));
          high = decode_e8m0(scale_at(p, s, head, token0 + token, channel + 2 * i + 1));
        }
        const __nv_bfloat162 x = __floats2bfloat162_rn(ptx::low_f16(pair[i]) * low, ptx::high_f16(pair[i]) * high);
        word[i] = reinterpret_cast<const uint32_t&>(x);
      }
      *reinterpret_cast<uint4*>(p.image + p.shape.offset(head, row0 + token, channel)) =
          make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}

}  // namespace

Status write_bf16_image(const MxTensor& operand, const Jagged& seq, const Bf16ImageShape& shape, uint16_t* image,
                        Stream stream) {
  const Params params{operand, seq, shape, operand.data.shape[2], image};
  const Launch at{"attention_fwd: sm90_bf16: operand image",
                  dim3(uint32_t(shape.tokens / kTokens), uint32_t(shape.heads)), kThreads, 0, stream};
  return launch(at, bf16_image_kernel, params);
}

}  // namespace mxflash
