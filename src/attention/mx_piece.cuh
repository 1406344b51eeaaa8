// Reading MX tensors on the card in pieces of 8 channels of a token, any block, layout and strides.
#pragma once

#include <mxflash/mx.h>

#include "mx/e8m0.h"
#include "mx/scale_layout.h"
#include "ptx/convert.cuh"
#include "runtime/check.h"

namespace mxflash {

// 2^e, e clamped to what fp32 has as a normal number.
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((min(max(e, -126), 127) + 127) << 23); }
// x 2^e for |e| <= 252.
__device__ __forceinline__ float times_power_of_two(float x, int e) {
  e = min(max(e, -252), 252);
  return x * power_of_two(e / 2) * power_of_two(e - e / 2);
}

// The sequence that owns a row of the padded axis, if `row - padded_start < length`.
struct Owner {
  int64_t index;
  Sequence sequence;
};
__device__ __forceinline__ Owner owner_of(int64_t tokens, const Jagged& seq, int64_t padded_row) {
  int64_t low = 0;
  if (!seq.cu_seqlens) {
    const int64_t padded = round_up(tokens / seq.batch, kSeqAlign);
    if (padded) low = uint32_t(padded_row) / uint32_t(padded);
  } else {
    for (int64_t high = seq.batch; high - low > 1;) {  // the last sequence that starts at or before the row
      const int64_t middle = (low + high) / 2;
      (jagged_padded_start(seq.cu_seqlens[middle], middle) <= padded_row ? low : high) = middle;
    }
  }
  return {low, sequence_at(tokens, seq, low)};
}

struct MxOperand {
  const uint8_t* data;
  int64_t token_stride, head_stride;
  const uint8_t* scale;
  MxBlock block;
  ScaleLayout layout;
  int64_t padded_tokens;
  int32_t dim;
  bool e5m2;
  bool wide;  // pieces are aligned to 8 bytes

  static MxOperand of(const MxTensor& t, const Jagged& seq) {
    const Tensor& d = t.data;
    return {.data = static_cast<const uint8_t*>(d.data),
            .token_stride = d.stride[0],
            .head_stride = d.stride[1],
            .scale = static_cast<const uint8_t*>(t.scale.data),
            .block = t.block,
            .layout = t.layout,
            .padded_tokens = padded_token_count(d.shape[0], seq),
            .dim = int32_t(d.shape[2]),
            .e5m2 = d.dtype == Dtype::e5m2,
            .wide = reinterpret_cast<uintptr_t>(d.data) % 8 == 0 && d.stride[0] % 8 == 0 && d.stride[1] % 8 == 0};
  }

  __device__ __forceinline__ uint8_t scale_byte(int64_t head, int64_t padded_row, int channel) const {
    const int row = block == MxBlock::row32 ? int(padded_row) : int(padded_row) / 32;
    const int col = block == MxBlock::col32 ? channel : channel / 32;
    if (layout == ScaleLayout::linear) {
      const int rows = int(block == MxBlock::row32 ? padded_tokens : padded_tokens / 32);
      const int cols = block == MxBlock::col32 ? dim : (dim + 31) / 32;
      return scale[(head * rows + row) * cols + col];
    }
    return scale[scale_offset(block, layout, padded_tokens, dim, {head, row, col})];
  }
  // |x| <= 448 2^exponent: E5M2's largest value is 448 2^7. NaN bounds nothing.
  __device__ __forceinline__ int exponent_of(uint8_t byte) const {
    return byte == kE8m0Nan ? kNone : int(byte) - kE8m0Bias + (e5m2 ? 7 : 0);
  }
  static constexpr int kNone = -1000;

  // The least exponent with |x| <= 448 2^exponent that the scales of a piece tell.
  __device__ __forceinline__ int piece_exponent(int64_t head, int64_t padded_row, int channel) const {
    if (block != MxBlock::col32) return exponent_of(scale_byte(head, padded_row, channel));
    int most = kNone;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) most = max(most, exponent_of(scale_byte(head, padded_row, channel + i)));
    return most;
  }

  // x 2^exponent are the 8 elements, |x| <= 448. `token` is that of the packed tensor.
  __device__ __forceinline__ void load(int64_t head, int64_t token, int64_t padded_row, int channel, float (&x)[8],
                                       int& exponent) const {
    const uint8_t* from = data + token * token_stride + head * head_stride + channel;
    uint2 codes{};
    if (wide) {
      codes = *reinterpret_cast<const uint2*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        codes.x |= uint32_t(from[i]) << (8 * i);
        codes.y |= uint32_t(from[4 + i]) << (8 * i);
      }
    }
    uint32_t pair[4];
    if (e5m2) {
      ptx::unpack_e5m2(codes.x, pair[0], pair[1]);
      ptx::unpack_e5m2(codes.y, pair[2], pair[3]);
    } else {
      ptx::unpack_e4m3(codes.x, pair[0], pair[1]);
      ptx::unpack_e4m3(codes.y, pair[2], pair[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = ptx::low_f16(pair[i]);
      x[2 * i + 1] = ptx::high_f16(pair[i]);
    }
    const float unit = e5m2 ? 0x1p-7f : 1.0f;
    const float nan = __int_as_float(0x7FC00000);
    exponent = piece_exponent(head, padded_row, channel);
    if (block != MxBlock::col32) {
      const float factor = exponent == kNone ? nan : unit;
      if (factor != 1.0f) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= factor;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int e = exponent_of(scale_byte(head, padded_row, channel + i));
      x[i] *= e == kNone ? nan : unit * power_of_two(e - exponent);
    }
  }
};

}  // namespace mxflash
