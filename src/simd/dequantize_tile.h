// MX tiles to floats, in strips of kStripCols channels (runtime/quantize_tile.h has the order of their scales).
//
//   any element, any float   a table of scales per channel, code * scale in fp32, rounded to the output's dtype
//   BF16 in 16-bit lanes     a code's exponent and mantissa, shifted, are those of the result but for the scale's
//                            exponent, one addition; subnormal codes come from a table. 32 elements a vector, exact.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "mx/e8m0.h"
#include "runtime/quantize_tile.h"
#include "simd/encode.h"
#include "simd/quantize_tile.h"
#include "simd/vector.h"

MXFLASH_ISA_BEGIN

#if defined(MXFLASH_ISA_AVX512)

// Scales for which every result is a normal number, or zero.
template <class Element>
constexpr bool is_moderate(uint8_t b) {
  return b >= kMinScaleBf16 && int(b) + Element::format.max_exponent < 255;
}

// Code to the bits of a BF16, with the code's own bias: what is subnormal in the code, normalized. Zero is so small
// that every offset leaves it negative.
template <class Element>
MXFLASH_INLINE __m512i subnormal_bits() {
  constexpr int16_t kZero = -0x8000;
  constexpr int16_t kE4m3[8] = {kZero, -2 * 128, -128, -128 + 64, 0, 32, 64, 96};
  constexpr int16_t kE5m2[8] = {kZero, -128, 0, 64, 0, 0, 0, 0};
  alignas(64) int16_t table[32] = {};
  std::memcpy(table, Element::format.mantissa_bits == 3 ? kE4m3 : kE5m2, sizeof kE4m3);
  return _mm512_load_si512(table);
}

// 32 codes under the scales that these offsets, (b - bias) << 7, stand for.
template <class Element>
MXFLASH_INLINE __m512i decode_words(const uint8_t* p, __m512i offset, __m512i subnormals) {
  constexpr Fp8Format f = Element::format;
  constexpr int kShift = 7 - f.mantissa_bits;
  const __m512i code = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  __m512i bits = _mm512_and_si512(_mm512_slli_epi16(code, kShift), words(0x7F << kShift));
  constexpr int kFirstSpecial = (f.has_infinity ? 0x7C : kFp8Nan) << kShift;
  const __mmask32 special = _mm512_cmpge_epi16_mask(bits, words(kFirstSpecial));
  const __mmask32 nan = _mm512_cmpgt_epi16_mask(bits, words(f.has_infinity ? kFirstSpecial : kFirstSpecial - 1));
  const __mmask32 subnormal = _mm512_testn_epi16_mask(code, words(0x7F & ~((1 << f.mantissa_bits) - 1)));
  bits = _mm512_mask_permutexvar_epi16(bits, subnormal, code, subnormals);
  bits = _mm512_max_epi16(_mm512_adds_epi16(bits, offset), _mm512_setzero_si512());
  if (special) [[unlikely]] {
    bits = _mm512_mask_mov_epi16(bits, special, words(0x7F80));
    bits = _mm512_mask_mov_epi16(bits, nan, words(0x7FC0));
  }
  return _mm512_ternarylogic_epi32(bits, code, words(0x8000), 0xF8);  // bits | code & sign
}

// False if a scale is not moderate, or the strip ends within a block. Nothing that was written counts then.
template <class Element>
bool dequantize_strip_bf16(const DequantizeTile& t, const uint8_t* next) {
  if (t.out.dtype != Dtype::bf16 || t.cols % kMxBlock != 0) return false;
  // In the order of the scales: per channel, or four for each row.
  alignas(64) uint16_t offset[kStripCols];
  const auto set = [&](int64_t i, uint8_t b) {
    offset[i] = uint16_t((b - Element::format.bias) << 7);
    return is_moderate<Element>(b);
  };
  bool moderate = true;
  if (t.block == MxBlock::row32) {
    for (int64_t r = 0; r < t.rows; ++r) {
      for (int64_t i = 4 * r; i < 4 * r + t.cols / kMxBlock; ++i) moderate &= set(i, t.scale[i]);
    }
  } else {
    for (int64_t c = 0; c < t.cols; ++c) moderate &= set(c, t.scale[scale_index(t.block, 0, c)]);
  }
  if (!moderate) return false;
  const __m512i subnormals = subnormal_bits<Element>();
  const bool by_row = t.block == MxBlock::row32, stream = t.stream;
  const int64_t rows = t.rows, cols = t.cols, stride = t.stride;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* code = t.payload + r * stride;
    uint16_t* out = static_cast<uint16_t*>(t.out.data) + t.offset + r * t.out_stride;
    if (next) {
      for (int64_t c = 0; c < cols; c += 64) prefetch(next + r * stride + c);
    }
    for (int64_t c = 0; c < cols; c += kMxBlock) {
      const __m512i offsets = by_row ? words(offset[4 * r + c / kMxBlock]) : _mm512_load_si512(offset + c);
      const __m512i bits = decode_words<Element>(code + c, offsets, subnormals);
      if (stream) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out + c), bits);
      } else {
        _mm512_storeu_si512(out + c, bits);
      }
    }
  }
  return true;
}

#else

template <class Element>
bool dequantize_strip_bf16(const DequantizeTile&, const uint8_t*) {
  return false;
}

#endif

template <class Element>
MXFLASH_INLINE F32 load_codes(const uint8_t* p) {
  return Element::format.mantissa_bits == 3 ? load_e4m3(p) : load_e5m2(p);
}

template <class Target, class Element>
void dequantize_strip(const DequantizeTile& t, const uint8_t* next) {
  using Stored = typename Target::Stored;
  alignas(64) float factor[kStripCols];
  const int64_t width = t.block == MxBlock::col32 ? 1 : kMxBlock, whole = t.cols / kLanes * kLanes;
  for (int64_t r = 0; r < t.rows; ++r) {
    for (int64_t c = 0; c < t.cols && (r == 0 || t.block == MxBlock::row32); c += width) {
      std::fill(factor + c, factor + c + width, decode_e8m0(t.scale[scale_index(t.block, r, c)]));
    }
    const uint8_t* code = t.payload + r * t.stride;
    Stored* out = static_cast<Stored*>(t.out.data) + t.offset + r * t.out_stride;
    if (next) {
      for (int64_t c = 0; c < t.cols; c += 64) prefetch(next + r * t.stride + c);
    }
    for (int64_t c = 0; c < whole; c += kLanes) {
      const F32 x = mul(load_codes<Element>(code + c), load(factor + c));
      if constexpr (std::is_same_v<Stored, float>) {
        if (t.stream) {
          stream(out + c, x);
          continue;
        }
      }
      Target::store_vector(out + c, x);
    }
    if (whole == t.cols) continue;
    uint8_t tail[kLanes] = {};
    float last[kLanes];
    std::memcpy(tail, code + whole, size_t(t.cols - whole));
    for (int64_t c = t.cols; c < whole + kLanes; ++c) factor[c] = 0;
    store(last, mul(load_codes<Element>(tail), load(factor + whole)));
    for (int64_t c = whole; c < t.cols; ++c) store_float(t.out, t.offset + r * t.out_stride + c, last[c - whole]);
  }
}

inline void dequantize_tile(const DequantizeTile& t) {
  for (int64_t c = 0; c < t.cols; c += kStripCols) {
    DequantizeTile strip = t;
    strip.payload += c;
    strip.scale += c;
    strip.offset += c;
    strip.cols = t.cols - c < kStripCols ? t.cols - c : kStripCols;
    const uint8_t* next = t.next ? t.next + c : nullptr;
    const auto dequantize = [&](auto element) {
      using Element = decltype(element);
      if (dequantize_strip_bf16<Element>(strip, next)) return;
      with_source(t.out.dtype, [&](auto target) { dequantize_strip<decltype(target), Element>(strip, next); });
    };
    t.element == Dtype::e5m2 ? dequantize(E5m2{}) : dequantize(E4m3{});
  }
  if (t.stream) stream_done();
}

MXFLASH_ISA_END
