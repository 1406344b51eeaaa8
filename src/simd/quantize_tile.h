// Quantizes a tile (runtime/quantize_tile.h), one or two copies of it.
//
// The tile goes through in strips of kStripCols channels, which stay in L1 for all passes over them:
//   amax     vectors run along the channels. Square and column blocks: a maximum per channel over the rows; a square
//            block reduces 32 of them. Row blocks: a reduction per row. Magnitudes are compared as integers, where NaN
//            and Inf are above all numbers.
//   codes    x times its block's power of two, rounded to the grid of its binade by one addition (simd/encode.h). The
//            last copy's pass also prefetches the same strip of the next tile.
// BF16 has a faster way where 16-bit lanes do (simd/quantize_tile_bf16.h).
#pragma once

#include <cstring>

#include "mx/e8m0.h"
#include "runtime/quantize_tile.h"
#include "simd/encode.h"
#include "simd/quantize_tile_bf16.h"

MXFLASH_ISA_BEGIN

struct SourceF32 {
  using Stored = float;
  MXFLASH_INLINE static F32 load_vector(const float* p) { return load(p); }
  MXFLASH_INLINE static void store_vector(float* p, F32 x) { store(p, x); }
};
struct SourceF16 {
  using Stored = uint16_t;
  MXFLASH_INLINE static F32 load_vector(const uint16_t* p) { return load_f16(p); }
  MXFLASH_INLINE static void store_vector(uint16_t* p, F32 x) { store_f16(p, x); }
};
struct SourceBf16 {
  using Stored = uint16_t;
  MXFLASH_INLINE static F32 load_vector(const uint16_t* p) { return load_bf16(p); }
  MXFLASH_INLINE static void store_vector(uint16_t* p, F32 x) { store_bf16(p, x); }
};

// body(source) for the type that stands for this dtype.
template <class Body>
MXFLASH_INLINE void with_source(Dtype dtype, Body&& body) {
  switch (dtype) {
    case Dtype::bf16: return body(SourceBf16{});
    case Dtype::f16: return body(SourceF16{});
    default: return body(SourceF32{});
  }
}

// Scales of square32 and col32 blocks; factor [cols] for the second pass. True if one is NaN.
template <class Source, class Element>
bool strip_scales(const TileSource& in, const TileTarget& out, float* factor) {
  const auto* x = static_cast<const typename Source::Stored*>(in.data);
  int32_t largest = 0;
  for (int64_t c = 0; c < in.cols; c += kMxBlock) {
    I32 amax[kBlockVectors];
    for (int v = 0; v < kBlockVectors; ++v) amax[v] = broadcast(0);
    for (int64_t r = 0; r < in.rows; ++r) {
      for (int v = 0; v < kBlockVectors; ++v) {
        amax[v] = max(amax[v], magnitude_bits(Source::load_vector(x + r * in.stride + c + v * kLanes)));
      }
    }
    I32 all = amax[0];
    for (int v = 1; v < kBlockVectors; ++v) all = max(all, amax[v]);
    const int32_t block_amax = reduce_max(all);
    largest = block_amax > largest ? block_amax : largest;
    if (out.block == MxBlock::square32) {
      const uint8_t b = mxflash::scale_from_amax(uint32_t(block_amax), Element::format, out.rule);
      out.scale[c] = b;
      for (int v = 0; v < kBlockVectors; ++v) store(factor + c + v * kLanes, broadcast(encode_factor(b)));
    } else {
      for (int v = 0; v < kBlockVectors; ++v) {
        amax[v] = scale_from_amax<Element>(amax[v], out.rule);
        store(factor + c + v * kLanes, encode_factor(amax[v]));
      }
      store_bytes(out.scale + c, amax);
    }
  }
  return largest >= 0x7F800000;
}

template <class Source, class Element>
void quantize_strip(const TileSource& in, const TileTarget& out) {
  using Stored = typename Source::Stored;
  alignas(64) float factor[kStripCols];
  const bool rows32 = out.block == MxBlock::row32;
  bool has_nan = !rows32 && strip_scales<Source, Element>(in, out, factor);
  const int64_t whole = in.cols / kMxBlock * kMxBlock;
  for (int64_t r = 0; r < in.rows; ++r) {
    const auto* x = static_cast<const Stored*>(in.data) + r * in.stride;
    const auto* next = in.next ? static_cast<const Stored*>(in.next) + r * in.stride : nullptr;
    uint8_t* payload = out.payload + r * out.stride;
    for (int64_t c = 0; c < in.cols; c += kMxBlock) {
      if (next) {
        prefetch(next + c);
        if (sizeof(Stored) == 4) prefetch(next + c + kMxBlock / 2);
      }
      F32 v[kBlockVectors], scaling[kBlockVectors];
      for (int i = 0; i < kBlockVectors; ++i) v[i] = Source::load_vector(x + c + i * kLanes);
      if (rows32) {
        I32 amax = magnitude_bits(v[0]);
        for (int i = 1; i < kBlockVectors; ++i) amax = max(amax, magnitude_bits(v[i]));
        const uint8_t b = mxflash::scale_from_amax(uint32_t(reduce_max(amax)), Element::format, out.rule);
        has_nan |= b == kE8m0Nan;
        out.scale[scale_index(MxBlock::row32, r, c)] = b;
        for (int i = 0; i < kBlockVectors; ++i) scaling[i] = broadcast(encode_factor(b));
      } else {
        for (int i = 0; i < kBlockVectors; ++i) scaling[i] = load(factor + c + i * kLanes);
      }
      I32 codes[kBlockVectors];
      for (int i = 0; i < kBlockVectors; ++i) codes[i] = encode<Element>(v[i], scaling[i]);
      if (c == whole) {
        uint8_t last[kMxBlock];
        store_bytes(last, codes);
        std::memcpy(payload + c, last, size_t(in.cols - c));
      } else if (out.stream) {
        stream_bytes(payload + c, codes);
      } else {
        store_bytes(payload + c, codes);
      }
    }
  }
  if (has_nan) overwrite_nan_blocks(in, out);
}

inline void quantize_strip(const TileSource& in, const TileTarget* outs, int count) {
  if (quantize_strip_bf16(in, outs, count)) return;
  for (int i = 0; i < count; ++i) {
    TileSource strip = in;
    if (i < count - 1) strip.next = nullptr;
    if (count > 1 && quantize_strip_bf16(strip, outs + i, 1)) continue;
    with_source(in.dtype, [&](auto source) {
      using Source = decltype(source);
      return outs[i].element == Dtype::e5m2 ? quantize_strip<Source, E5m2>(strip, outs[i])
                                            : quantize_strip<Source, E4m3>(strip, outs[i]);
    });
  }
}

// One or two copies.
inline void quantize_tile(const TileSource& in, const TileTarget* outs, int count) {
  const int64_t size = dtype_size(in.dtype);
  for (int64_t c = 0; c < in.cols; c += kStripCols) {
    TileSource strip = in;
    strip.data = static_cast<const char*>(in.data) + c * size;
    strip.cols = in.cols - c < kStripCols ? in.cols - c : kStripCols;
    if (in.next) strip.next = static_cast<const char*>(in.next) + c * size;
    TileTarget targets[2];
    for (int i = 0; i < count; ++i) {
      targets[i] = outs[i];
      targets[i].payload += c;
      targets[i].scale += c;
    }
    quantize_strip(strip, targets, count);
  }
  for (int i = 0; i < count; ++i) {
    if (outs[i].stream) return stream_done();
  }
}

MXFLASH_ISA_END
