// From an MX tensor to its BF16 image: one pass over the payload (mx/bf16_image.h defines the bytes).
//
// A CTA takes 128 tokens of the padded axis of one head, the next one the next head: neighbours read the same rows. A
// thread has 8 channels of every 16th token: 8 bytes in, 16 out at their swizzled place in a row of 128 bytes, which 8
// threads fill. All its loads are in flight together; its places lie at equal steps, since the swizzle repeats after 8
// tokens. Three bytes an element, about six instructions: bound by memory.
#include <cuda_bf16.h>

#include "attention/bf16_image.cuh"
#include "attention/padded_axis.cuh"
#include "mx/e8m0.h"
#include "ptx/convert.cuh"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

constexpr int kTokens = int(kSeqAlign);
constexpr int kPiece = int(kAtomPiece);  // channels of a thread
constexpr int kStep = 16;                // tokens of a CTA at a time
constexpr int kSteps = kTokens / kStep;  // tokens of a thread
constexpr int kBlockSteps = int(kMxBlock) / kStep;

struct Params {
  MxTensor operand;
  PaddedAxis axis;
  Bf16ImageShape shape;
  int64_t dim;
  bool aligned;  // rows to 8 bytes
  uint16_t* image;
};

__device__ __forceinline__ uint2 load_codes(const uint8_t* codes, bool aligned) {
  if (aligned) return __ldcs(reinterpret_cast<const uint2*>(codes));
  uint32_t word[2] = {};
#pragma unroll
  for (int i = 0; i < kPiece; ++i) word[i / 4] |= uint32_t(codes[i]) << (8 * (i % 4));
  return {word[0], word[1]};
}

// Two codes with their scales, as a pair of BF16.
__device__ __forceinline__ uint32_t to_bf16(uint32_t pair_f16, float low, float high) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(ptx::low_f16(pair_f16) * low, ptx::high_f16(pair_f16) * high);
  return reinterpret_cast<const uint32_t&>(x);
}

// kScales: of a piece, 1 or, for blocks of one channel, 8.
template <int kScales>
__global__ void __launch_bounds__(512) bf16_image_kernel(const __grid_constant__ Params p) {
  const uint32_t tile = blockIdx.z * gridDim.y + blockIdx.y, row0 = tile * kTokens;
  if (row0 >= p.axis.rows) return;
  const int head = int(blockIdx.x), across = int(p.shape.dim) / kPiece;
  const Sequence s = p.axis.owner(row0);
  const int first = int(threadIdx.x) / across, channel = int(threadIdx.x) % across * kPiece;
  const int token0 = int(row0 - s.padded_start) + first;
  const int length = channel < p.dim ? int(s.length) : 0;  // channels that pad: as if there were no token
  const Tensor& data = p.operand.data;
  const uint8_t* codes =
      static_cast<const uint8_t*>(data.data) + (s.start + token0) * data.stride[0] + head * data.stride[1] + channel;

  uint2 code[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    code[k] = token0 + k * kStep < length ? load_codes(codes + k * kStep * data.stride[0], p.aligned) : uint2{0, 0};
  }
  const BlockShape block = block_shape(p.operand.block);
  const uint8_t* const scales = static_cast<const uint8_t*>(p.operand.scale.data);
  // Between scales of neighbouring channels, in blocks of one channel: an atom's matrix rows are 16 bytes apart.
  const int scale_step = p.operand.layout == ScaleLayout::linear ? 1 : int(atom_byte(1, 0));
  float scale[kScales];
  uint16_t* const image = p.image + p.shape.offset(head, row0 + first, channel);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int token = token0 + k * kStep;
    if (kScales == 1 || k % kBlockSteps == 0) {
      const ScaleIndex at{head, (s.padded_start + token) / block.rows, channel / block.cols};
      const uint8_t* const from = scales + scale_offset(p.operand.block, p.operand.layout, p.axis.rows, p.dim, at);
#pragma unroll
      for (int i = 0; i < kScales; ++i) scale[i] = token < length ? decode_e8m0(from[i * scale_step]) : 0.0f;
    }
    uint32_t pair[kPiece / 2];
    if (data.dtype == Dtype::e5m2) {
      ptx::unpack_e5m2(code[k].x, pair[0], pair[1]);
      ptx::unpack_e5m2(code[k].y, pair[2], pair[3]);
    } else {
      ptx::unpack_e4m3(code[k].x, pair[0], pair[1]);
      ptx::unpack_e4m3(code[k].y, pair[2], pair[3]);
    }
#pragma unroll
    for (int i = 0; i < kPiece / 2; ++i) {
      // A token may be missing where the one that shares its scale is not.
      pair[i] =
          token < length ? to_bf16(pair[i], scale[kScales == 1 ? 0 : 2 * i], scale[kScales == 1 ? 0 : 2 * i + 1]) : 0;
    }
    *reinterpret_cast<uint4*>(image + k * kStep * p.shape.dim) = {pair[0], pair[1], pair[2], pair[3]};
  }
}

}  // namespace

Status write_bf16_image(const MxTensor& operand, const Jagged& seq, const Bf16ImageShape& shape, uint16_t* image,
                        Stream stream) {
  const Tensor& t = operand.data;
  const bool aligned = (reinterpret_cast<uintptr_t>(t.data) | uintptr_t(t.stride[0]) | uintptr_t(t.stride[1])) % 8 == 0;
  const Params params{operand, PaddedAxis::of(t.shape[0], seq), shape, t.shape[2], aligned, image};
  const int64_t tiles = shape.tokens / kTokens, z = ceil_div(tiles, 65535);
  const Launch at{"attention: sm90_bf16: operand image",
                  dim3(uint32_t(shape.heads), uint32_t(z ? ceil_div(tiles, z) : 0), uint32_t(z)),
                  uint32_t(shape.dim / kPiece * kStep), 0, stream};
  return launch(at, operand.block == MxBlock::col32 ? bf16_image_kernel<kPiece> : bf16_image_kernel<1>, params);
}

}  // namespace mxflash
