// Tiles of MX tensors as fp32, and fp32 tiles as 14-bit block fixed point: what the attention kernels compute on.
#pragma once

#include <mxflash/mx.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "mx/block.h"
#include "mx/e8m0.h"
#include "mx/scale_layout.h"
#include "simd/micro_kernel.h"
#include "simd/vector.h"

MXFLASH_ISA_BEGIN

inline constexpr int64_t kMaxDim = 256;

// One head of one sequence of an MX tensor.
struct MxHead {
  const MxTensor* tensor;
  int64_t padded;  // padded_token_count of the tensor
  Sequence sequence;
  int64_t head;
};

// Scales of one token, times `factor`: one a channel for col32, else one per 32 channels.
inline void load_scales(const MxHead& h, int64_t token, float factor, float* scale) {
  const MxTensor& t = *h.tensor;
  const BlockShape shape = block_shape(t.block);
  const int64_t dim = t.data.shape[2], row = (h.sequence.padded_start + token) / shape.rows;
  const auto* bytes = static_cast<const uint8_t*>(t.scale.data);
  const int64_t count = ceil_div(dim, shape.cols);
  if (t.layout == ScaleLayout::linear) {
    bytes += scale_offset(t.block, t.layout, h.padded, dim, {h.head, row, 0});
    for (int64_t i = 0; i < count; ++i) scale[i] = decode_e8m0(bytes[i]) * factor;
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    scale[i] = decode_e8m0(bytes[scale_offset(t.block, t.layout, h.padded, dim, {h.head, row, i})]) * factor;
  }
}

// Tokens first .. first + count - 1 of the sequence, times `factor`, into dst [count][stride]; channels from dim on to
// the next multiple of kGroup are zero. Returns whether everything is finite.
inline bool decode_tokens(const MxHead& h, int64_t first, int64_t count, float factor, float* dst, int64_t stride) {
  const MxTensor& t = *h.tensor;
  const int64_t dim = t.data.shape[2], whole = dim / kLanes * kLanes, padded_dim = round_up(dim, kGroup);
  const bool per_channel = t.block == MxBlock::col32, e5m2 = t.data.dtype == Dtype::e5m2;
  float scale[kMaxDim + kGroup] = {};
  I32 largest = broadcast(0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = first + i;
    if (i == 0 || t.block == MxBlock::row32 || token % kMxBlock == 0) load_scales(h, token, factor, scale);
    const uint8_t* code = static_cast<const uint8_t*>(t.data.data) + (h.sequence.start + token) * t.data.stride[0] +
                          h.head * t.data.stride[1];
    float* row = dst + i * stride;
    const auto decode = [&](const uint8_t* p, int64_t c) {
      const F32 x =
          mul(e5m2 ? load_e5m2(p) : load_e4m3(p), per_channel ? load(scale + c) : broadcast(scale[c / kMxBlock]));
      store(row + c, x);
      largest = max(largest, bit_and(as_int(x), broadcast(0x7FFFFFFF)));
    };
    for (int64_t c = 0; c < whole; c += kLanes) decode(code + c, c);
    if (whole < dim) {  // must not read past the tensor
      uint8_t tail[kLanes] = {};
      std::memcpy(tail, code + whole, size_t(dim - whole));
      decode(tail, whole);
    }
    std::fill(row + dim, row + padded_dim, 0.0f);
  }
  return reduce_max(largest) < 0x7F800000;
}

// Replaces what is not finite by zero. bad[i]: something in row i was.
inline void clear_nonfinite(float* x, int64_t stride, int64_t rows, int64_t dim, bool* bad) {
  for (int64_t i = 0; i < rows; ++i) {
    bad[i] = false;
    for (int64_t c = 0; c < dim; ++c) {
      if (std::isfinite(x[i * stride + c])) continue;
      x[i * stride + c] = 0;
      bad[i] = true;
    }
  }
}

// dst[c][r] = src[r][c]; rows and cols are rounded up to whole vectors, so both buffers must be.
inline void transpose_tile(const float* src, int64_t src_stride, float* dst, int64_t dst_stride, int64_t rows,
                           int64_t cols) {
  for (int64_t r = 0; r < rows; r += kLanes) {
    for (int64_t c = 0; c < cols; c += kLanes) {
      transpose(src + r * src_stride + c, src_stride, dst + c * dst_stride + r, dst_stride);
    }
  }
}

// ---- block fixed point ------------------------------------------------------------------------------------------
// A group of kGroup values is int16 * scale with one power of two: |int16| <= 8192, so that it keeps 13 bits below the
// group's largest magnitude. A product of two groups sums to less than 2^31 as long as one of them came from FP8
// elements, whose mantissas end at 1.875: 32 * 8192 * 7680.

// Power of two that maps magnitudes up to amax into (4096, 8192], from the bits of amax; and its inverse.
MXFLASH_INLINE I32 fixed_scale_bits(I32 amax_bits) {
  const I32 exponent = bit_and(amax_bits, broadcast(0x7F800000));
  return sub(max(exponent, broadcast(13 << 23)), broadcast(12 << 23));
}
MXFLASH_INLINE F32 inverse_power(I32 scale_bits) { return as_float(sub(broadcast(254 << 23), scale_bits)); }

// src [rows][stride] over `groups` groups of columns -> pairs [rows][groups][kPairs], scale [rows][groups] times
// factor.
inline void fix_rows(const float* src, int64_t stride, int64_t rows, int64_t groups, int32_t* pairs, float* scale,
                     float factor) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t g = 0; g < groups; ++g) {
      const float* x = src + r * stride + g * kGroup;
      I32 amax = broadcast(0);
      for (int64_t c = 0; c < kGroup; c += kLanes) {
        amax = max(amax, bit_and(as_int(load(x + c)), broadcast(0x7FFFFFFF)));
      }
      const I32 bits = fixed_scale_bits(broadcast(reduce_max(amax)));
      const F32 inverse = inverse_power(bits);
      auto* out = reinterpret_cast<int16_t*>(pairs + (r * groups + g) * kPairs);
      for (int64_t c = 0; c < kGroup; c += kLanes) store_int16(out + c, round_to_int(mul(load(x + c), inverse)));
      float lanes[kLanes];
      store(lanes, as_float(bits));
      scale[r * groups + g] = lanes[0] * factor;
    }
  }
}

// src [groups * kGroup][kPanel] -> pairs [groups][kPairs][kPanel], scale [groups][kPanel] times factor.
inline void fix_panel(const float* src, int64_t groups, int64_t lanes, int32_t* pairs, float* scale, float factor) {
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t lane = 0; lane < lanes; lane += kLanes) {
      const float* x = src + g * kGroup * kPanel + lane;
      I32 amax = broadcast(0);
      for (int64_t k = 0; k < kGroup; ++k) {
        amax = max(amax, bit_and(as_int(load(x + k * kPanel)), broadcast(0x7FFFFFFF)));
      }
      const I32 bits = fixed_scale_bits(amax);
      const F32 inverse = inverse_power(bits);
      store(scale + g * kPanel + lane, mul(as_float(bits), broadcast(factor)));
      for (int64_t k = 0; k < kPairs; ++k) {
        const F32 low = mul(load(x + 2 * k * kPanel), inverse), high = mul(load(x + (2 * k + 1) * kPanel), inverse);
        store(pairs + (g * kPairs + k) * kPanel + lane, pack_int16(round_to_int(low), round_to_int(high)));
      }
    }
  }
}

MXFLASH_ISA_END
