// Reading MX tensors on the card in pieces of 16 channels of a token, any block, layout and strides.
//
// Half a piece is 8 FP16 numbers of at most 448 in magnitude and one exponent. FP16 holds every element exactly, and
// its product with a power of two, too, unless E4M3 makes zero of that: an element becomes a code of another scale by
// one FP16 product and one rounding.
#pragma once

#include <cuda_fp16.h>
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
// A pair of 2^e in FP16. Elements times less than 2^-24 are zero in E4M3 anyway.
inline constexpr int kMaxPairExponent = 15;
__device__ __forceinline__ uint32_t power_pair(int e) {
  const float x = __int_as_float((min(max(e, -24), kMaxPairExponent) + 127) << 23);
  const __half2 pair = __floats2half2_rn(x, x);
  return reinterpret_cast<const uint32_t&>(pair);
}
inline constexpr uint32_t kNanPair = 0x7E007E00;
inline constexpr uint32_t kNanCodes = 0x7F7F7F7F;

// The tokens of a tensor and their sequences, fewer than 2^31: without a division of 64 bits.
struct Owner {
  int32_t index;
  Sequence sequence;
};
struct TokenAxis {
  Jagged seq;
  int32_t tokens;
  int32_t length;  // of equal sequences

  static TokenAxis of(int64_t tokens, const Jagged& seq) {
    return {seq, int32_t(tokens), seq.batch > 0 ? int32_t(tokens / seq.batch) : 0};
  }
  __device__ __forceinline__ Sequence sequence(int32_t b) const {
    if (seq.cu_seqlens) return sequence_at(tokens, seq, b);
    const int32_t padded = (length + int32_t(kSeqAlign) - 1) / int32_t(kSeqAlign) * int32_t(kSeqAlign);
    return {int64_t(b) * length, length, int64_t(b) * padded};
  }
  // Of a row of the padded axis, if `row - padded_start < length`.
  __device__ __forceinline__ Owner owner(int32_t padded_row) const {
    int32_t low = 0;
    if (!seq.cu_seqlens) {
      const uint32_t tiles = (uint32_t(length) + uint32_t(kSeqAlign) - 1) / uint32_t(kSeqAlign);
      if (seq.batch > 1 && tiles) low = int32_t(uint32_t(padded_row) / uint32_t(kSeqAlign) / tiles);
    } else {
      for (int32_t high = seq.batch; high - low > 1;) {  // the last sequence that starts at or before the row
        const int32_t middle = (low + high) / 2;
        (jagged_padded_start(seq.cu_seqlens[middle], middle) <= padded_row ? low : high) = middle;
      }
    }
    return {low, sequence(low)};
  }
};

inline constexpr int kNoExponent = -1000;  // of NaN: bounds nothing
inline constexpr int kAbsent = -500;       // of zeros in place of elements that are not there: neither

struct Piece {
  uint32_t pair[8] = {};                 // channels 2 i (low half) and 2 i + 1, times 2^-exponent
  int exponent[2] = {kAbsent, kAbsent};  // of the first 8 channels, and of the others
};

// The codes of a piece with a scale of 2^-e: |x| 2^(exponent + e) <= 448.
__device__ __forceinline__ uint4 encode_piece(const Piece& x, int e) {
  uint32_t code[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t f = power_pair(x.exponent[i / 2] + e);
    code[i] = ptx::pack_e4m3_f16(ptx::mul_f16x2(x.pair[2 * i], f), ptx::mul_f16x2(x.pair[2 * i + 1], f));
  }
  return make_uint4(code[0], code[1], code[2], code[3]);
}

struct MxOperand {
  const uint8_t* data;
  int64_t token_stride, head_stride;
  const uint8_t* scale;
  MxBlock block;
  ScaleLayout layout;
  int64_t padded_tokens;
  int32_t dim;
  int32_t scale_cols;            // of a row of blocks, layout linear
  int32_t row_shift, col_shift;  // log2 of a block's extents
  bool e5m2;
  bool wide;  // pieces are aligned to 16 bytes, and whole

  static MxOperand of(const MxTensor& t, const Jagged& seq) {
    const Tensor& d = t.data;
    const BlockShape shape = block_shape(t.block);
    return {.data = static_cast<const uint8_t*>(d.data),
            .token_stride = d.stride[0],
            .head_stride = d.stride[1],
            .scale = static_cast<const uint8_t*>(t.scale.data),
            .block = t.block,
            .layout = t.layout,
            .padded_tokens = padded_token_count(d.shape[0], seq),
            .dim = int32_t(d.shape[2]),
            .scale_cols = int32_t(ceil_div(d.shape[2], shape.cols)),
            .row_shift = shape.rows == 1 ? 0 : 5,
            .col_shift = shape.cols == 1 ? 0 : 5,
            .e5m2 = d.dtype == Dtype::e5m2,
            .wide = reinterpret_cast<uintptr_t>(d.data) % 16 == 0 && d.stride[0] % 16 == 0 && d.stride[1] % 16 == 0 &&
                    d.shape[2] % 16 == 0};
  }
  // What most tensors are: the general form of MxRows costs registers and instructions.
  bool plain() const {
    return layout == ScaleLayout::linear && block == MxBlock::square32 && !e5m2 && wide && token_stride >= 0 &&
           token_stride < 1 << 24;
  }
};

// Rows of one head from a multiple of 32 on. kPlain: the operand is.
template <bool kPlain>
struct MxRows {
  const MxOperand& t;
  const uint8_t* data;   // of the first row
  const uint8_t* scale;  // of its block row, layout linear
  int64_t head, padded_row;

  // `token` is the first row's in the packed tensor, `padded_row` on the padded axis.
  __device__ __forceinline__ MxRows(const MxOperand& operand, int64_t head, int64_t token, int64_t padded_row)
      : t(operand),
        data(t.data + token * t.token_stride + head * t.head_stride),
        scale(t.scale +
              (head * (t.padded_tokens >> t.row_shift) + (padded_row >> t.row_shift)) * int64_t(t.scale_cols)),
        head(head),
        padded_row(padded_row) {}

  __device__ __forceinline__ int exponent_of(int row, int channel) const {
    if constexpr (kPlain) {
      return decode(scale[(row >> 5) * t.scale_cols + (channel >> 5)]);
    } else {
      return any_exponent_of(row, channel);
    }
  }
  // Out of line: it is asked for each channel.
  __device__ __noinline__ int any_exponent_of(int row, int channel) const {
    const int block_row = row >> t.row_shift, col = channel >> t.col_shift;
    if (t.layout == ScaleLayout::linear) return decode(scale[int64_t(block_row) * t.scale_cols + col]);
    const ScaleIndex at{head, (padded_row + row) >> t.row_shift, col};
    return decode(t.scale[scale_offset(t.block, t.layout, t.padded_tokens, t.dim, at)]);
  }
  // |x| <= 448 2^exponent: E5M2's largest value is 448 2^7.
  __device__ __forceinline__ int decode(uint8_t byte) const {
    return byte == kE8m0Nan ? kNoExponent : int(byte) - kE8m0Bias + (!kPlain && t.e5m2 ? 7 : 0);
  }
  // The least exponent with |x| <= 448 2^exponent that the scales of 8 channels tell.
  __device__ __forceinline__ int exponent_of_8(int row, int channel) const {
    int most = exponent_of(row, channel);
    if (!kPlain && t.col_shift == 0) {
#pragma unroll 1
      for (int i = 1; i < 8; ++i) most = max(most, exponent_of(row, channel + i));
    }
    return most;
  }
  // And of 32 rows from a multiple of 32 on, as far as there are that many. Plain ones have up to 128 channels.
  __device__ __forceinline__ int exponent_of_block(int row, int rows) const {
    int most = kNoExponent;
    if constexpr (kPlain) {
#pragma unroll
      for (int channel = 0; channel < 128; channel += 32) {
        if (row < rows && channel < t.dim) most = max(most, exponent_of(row, channel));
      }
    } else {
      const int channel_step = t.col_shift ? 32 : 8, end = min(row + 32, rows);
#pragma unroll 1
      for (; row < end; row += 1 << t.row_shift) {
#pragma unroll 1
        for (int channel = 0; channel < t.dim; channel += channel_step) most = max(most, exponent_of_8(row, channel));
      }
    }
    return most;
  }

  __device__ __forceinline__ const uint8_t* address(int row, int channel) const {
    return data + (kPlain ? int64_t(row * int(t.token_stride) + channel) : row * t.token_stride + channel);
  }
  // The codes as they are in memory, zeros in place of channels that are not there.
  __device__ __forceinline__ uint4 load(int row, int channel) const {
    const uint8_t* from = address(row, channel);
    if (kPlain || t.wide) return *reinterpret_cast<const uint4*>(from);
    uint32_t code[4] = {};
    const int count = min(t.dim - channel, 16);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i < count) code[i / 4] |= uint32_t(from[i]) << (8 * (i % 4));
    }
    return make_uint4(code[0], code[1], code[2], code[3]);
  }
  // Of a plain operand.
  __device__ __forceinline__ static Piece unpack_plain(const uint4& codes, int exponent) {
    Piece x;
    ptx::unpack_e4m3(codes.x, x.pair[0], x.pair[1]);
    ptx::unpack_e4m3(codes.y, x.pair[2], x.pair[3]);
    ptx::unpack_e4m3(codes.z, x.pair[4], x.pair[5]);
    ptx::unpack_e4m3(codes.w, x.pair[6], x.pair[7]);
    x.exponent[0] = x.exponent[1] = exponent;
    return x;
  }
  __device__ __forceinline__ Piece unpack(const uint4& codes, int row, int channel, bool there) const {
    Piece x;
    if (!there) return x;
    const uint32_t code[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int first = channel + 8 * h;
      if (first >= t.dim) break;
      x.exponent[h] = exponent_of_8(row, first);
      const bool nan = x.exponent[h] == kNoExponent;
#pragma unroll
      for (int i = 4 * h; i < 4 * h + 4; i += 2) {
        if (t.e5m2) {
          ptx::unpack_e5m2(nan ? kNanCodes : code[i / 2], x.pair[i], x.pair[i + 1]);
          x.pair[i] = ptx::mul_f16x2(x.pair[i], power_pair(-7));
          x.pair[i + 1] = ptx::mul_f16x2(x.pair[i + 1], power_pair(-7));
        } else {
          ptx::unpack_e4m3(nan ? kNanCodes : code[i / 2], x.pair[i], x.pair[i + 1]);
        }
      }
      if (t.col_shift != 0) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int low = exponent_of(row, first + 2 * i), high = exponent_of(row, first + 2 * i + 1);
        const uint32_t f0 = low == kNoExponent ? kNanPair : power_pair(low - x.exponent[h]);
        const uint32_t f1 = high == kNoExponent ? kNanPair : power_pair(high - x.exponent[h]);
        x.pair[4 * h + i] = ptx::mul_f16x2(x.pair[4 * h + i], __byte_perm(f0, f1, 0x5410));
      }
    }
    return x;
  }
};

}  // namespace mxflash
