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

// Whether some of n codes is NaN or, in E5M2, Inf. Eight at a time: a carry into bit 7 tells that the bits below it
// that say so are all ones.
MXFLASH_INLINE bool has_special_code(const uint8_t* code, int64_t n, bool e5m2) {
  const uint64_t field = e5m2 ? 0x7C7C7C7C7C7C7C7C : 0x7F7F7F7F7F7F7F7F,
                 carry = e5m2 ? 0x0404040404040404 : 0x0101010101010101;
  uint64_t found = 0;
  for (int64_t c = 0; c < n; c += 8) {  // head_dim is a multiple of 8
    uint64_t eight;
    std::memcpy(&eight, code + c, sizeof eight);
    found |= (eight & field) + carry;
  }
  return (found & 0x8080808080808080) != 0;
}

// Tokens first .. first + count - 1 of the sequence, times `factor`, into dst [count][stride]; channels from dim on to
// the next multiple of kGroup are zero. Returns whether everything is finite.
inline bool decode_tokens(const MxHead& h, int64_t first, int64_t count, float factor, float* dst, int64_t stride) {
  constexpr float kLargestSafeScale = 0x1p112f;  // times 57344, the largest element, is finite
  const MxTensor& t = *h.tensor;
  const int64_t dim = t.data.shape[2], whole = dim / kLanes * kLanes, padded_dim = round_up(dim, kGroup);
  const bool per_channel = t.block == MxBlock::col32, e5m2 = t.data.dtype == Dtype::e5m2;
  float scale[kMaxDim + kGroup] = {};
  bool suspicious = false;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = first + i;
    if (i == 0 || t.block == MxBlock::row32 || token % kMxBlock == 0) {
      load_scales(h, token, factor, scale);
      for (int64_t c = 0; c < (per_channel ? dim : ceil_div(dim, kMxBlock)); ++c) {
        suspicious |= !(std::fabs(scale[c]) <= kLargestSafeScale);
      }
    }
    const uint8_t* code = static_cast<const uint8_t*>(t.data.data) + (h.sequence.start + token) * t.data.stride[0] +
                          h.head * t.data.stride[1];
    suspicious |= has_special_code(code, dim, e5m2);
    float* row = dst + i * stride;
    const auto decode = [&](const uint8_t* p, int64_t c) {
      const F32 x = e5m2 ? load_e5m2(p) : load_e4m3(p);
      store(row + c, mul(x, per_channel ? load(scale + c) : broadcast(scale[c / kMxBlock])));
    };
    for (int64_t c = 0; c < whole; c += kLanes) decode(code + c, c);
    if (whole < dim) {  // must not read past the tensor
      uint8_t tail[kLanes] = {};
      std::memcpy(tail, code + whole, size_t(dim - whole));
      decode(tail, whole);
    }
    std::fill(row + dim, row + padded_dim, 0.0f);
  }
  bool finite = true;
  for (int64_t i = 0; suspicious && i < count; ++i) {
    for (int64_t c = 0; c < dim; ++c) finite &= std::isfinite(dst[i * stride + c]);
  }
  return finite;
}

// Asks for the payload of these tokens, to be decoded soon. Rows of a head are heads * dim bytes apart, which hardware
// prefetchers do not follow. (Inline without fail: g++ 12 takes a function that only prefetches for one without
// effect.)
MXFLASH_INLINE void prefetch_tokens(const MxHead& h, int64_t first, int64_t count) {
  constexpr int64_t kCacheLine = 64;
  const Tensor& t = h.tensor->data;
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* row =
        static_cast<const uint8_t*>(t.data) + (h.sequence.start + first + i) * t.stride[0] + h.head * t.stride[1];
    for (int64_t c = 0; c < t.shape[2]; c += kCacheLine) __builtin_prefetch(row + c);
  }
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

// src [rows][stride] over `groups` groups of columns -> pairs [rows][groups][kPairs], scale [rows][groups].
inline void fix_rows(const float* src, int64_t stride, int64_t rows, int64_t groups, int32_t* pairs, float* scale) {
  // kLanes groups at a time, so that their scales are one vector.
  for (int64_t first = 0; first < rows * groups; first += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, rows * groups - first);
    float by_group[kLanes * kLanes], by_lane[kLanes * kLanes], inverse[kLanes];
    const float* group[kLanes];
    for (int64_t n = 0; n < count; ++n) {
      group[n] = src + (first + n) / groups * stride + (first + n) % groups * kGroup;
      F32 amax = abs(load(group[n]));
      for (int64_t c = kLanes; c < kGroup; c += kLanes) amax = max(amax, abs(load(group[n] + c)));
      store(by_group + n * kLanes, amax);
    }
    for (int64_t n = count; n < kLanes; ++n) store(by_group + n * kLanes, broadcast(0.0f));
    transpose(by_group, kLanes, by_lane, kLanes);
    F32 amax = load(by_lane);
    for (int64_t l = 1; l < kLanes; ++l) amax = max(amax, load(by_lane + l * kLanes));
    const I32 bits = fixed_scale_bits(as_int(amax));
    store(inverse, inverse_power(bits));
    float scales[kLanes];
    store(scales, as_float(bits));
    std::copy_n(scales, count, scale + first);
    for (int64_t n = 0; n < count; ++n) {
      const F32 up = broadcast(inverse[n]);
      auto* out = reinterpret_cast<int16_t*>(pairs + (first + n) * kPairs);
      for (int64_t c = 0; c < kGroup; c += kLanes) store_int16(out + c, round_to_int(mul(load(group[n] + c), up)));
    }
  }
}

// src [tokens][stride] over cols columns -> pairs [cols][groups][kPairs] along the tokens, scale [cols][groups]. tokens
// is a multiple of kGroup, groups those of a row as laid out, cols a multiple of kLanes.
inline void fix_columns(const float* src, int64_t stride, int64_t tokens, int64_t cols, int64_t groups, int32_t* pairs,
                        float* scale) {
  for (int64_t g = 0; g < tokens / kGroup; ++g) {
    for (int64_t c = 0; c < cols; c += kLanes) {
      const float* x = src + g * kGroup * stride + c;
      F32 amax = abs(load(x));
      for (int64_t k = 1; k < kGroup; ++k) amax = max(amax, abs(load(x + k * stride)));
      const I32 bits = fixed_scale_bits(as_int(amax));
      const F32 up = inverse_power(bits);
      float scales[kLanes], by_pair[kPairs * kLanes];
      store(scales, as_float(bits));
      for (int64_t l = 0; l < kLanes; ++l) scale[(c + l) * groups + g] = scales[l];
      for (int64_t k = 0; k < kPairs; ++k) {
        const F32 low = mul(load(x + 2 * k * stride), up), high = mul(load(x + (2 * k + 1) * stride), up);
        store(by_pair + k * kLanes, as_float(pack_int16(round_to_int(low), round_to_int(high))));
      }
      for (int64_t k = 0; k < kPairs; k += kLanes) {
        transpose(by_pair + k * kLanes, kLanes, reinterpret_cast<float*>(pairs + (c * groups + g) * kPairs + k),
                  groups * kPairs);
      }
    }
  }
}

// One group in lanes: src[k * kPanel + lane] for k in [0, kGroup) -> whole numbers. Returns the bits of the scales.
MXFLASH_INLINE I32 fix_lanes(const float* src, F32* whole) {
  F32 amax = abs(load(src));
  for (int64_t k = 1; k < kGroup; ++k) amax = max(amax, abs(load(src + k * kPanel)));
  const I32 bits = fixed_scale_bits(as_int(amax));
  for (int64_t k = 0; k < kGroup; ++k)
    whole[k] = to_float(round_to_int(mul(load(src + k * kPanel), inverse_power(bits))));
  return bits;
}

// src [groups * kGroup][kPanel] -> pairs [groups][kPairs][kPanel], scale [groups][kPanel] times factor.
inline void fix_panel(const float* src, int64_t groups, int64_t lanes, int32_t* pairs, float* scale, float factor) {
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t lane = 0; lane < lanes; lane += kLanes) {
      const float* x = src + g * kGroup * kPanel + lane;
      F32 amax = abs(load(x));
      for (int64_t k = 1; k < kGroup; ++k) amax = max(amax, abs(load(x + k * kPanel)));
      const I32 bits = fixed_scale_bits(as_int(amax));
      const F32 up = inverse_power(bits);
      store(scale + g * kPanel + lane, mul(as_float(bits), broadcast(factor)));
      for (int64_t k = 0; k < kPairs; ++k) {
        const F32 low = mul(load(x + 2 * k * kPanel), up), high = mul(load(x + (2 * k + 1) * kPanel), up);
        store(pairs + (g * kPairs + k) * kPanel + lane, pack_int16(round_to_int(low), round_to_int(high)));
      }
    }
  }
}

MXFLASH_ISA_END
