// BF16 to MX codes in 16-bit lanes: 32 elements in a vector, integers only.
//
// The bits of |x| are exponent and mantissa side by side, as in a code. Less the scale's exponent, shifted right by the
// mantissa bits that E4M3 (E5M2) has fewer, rounded to even: that is the code of a normal number, and a carry moves
// into the exponent by itself. Codes up to that of the smallest normal number, zero included, are made again the long
// way, where the shift depends on the exponent: one compare for 64 elements, which in most data is seldom true.
#pragma once

#include "runtime/quantize_tile.h"
#include "simd/encode.h"

MXFLASH_ISA_BEGIN

#if defined(MXFLASH_ISA_AVX512)

// Blocks with smaller scales may hold subnormals of BF16 that are not zero as codes, and have no offset.
inline constexpr uint8_t kMinScaleBf16 = 32;
inline constexpr uint16_t kZeroBlockOffset = 0x7F80;  // takes every zero to code zero

MXFLASH_INLINE __m512i words(int x) { return _mm512_set1_epi16(int16_t(x)); }
MXFLASH_INLINE __m512i magnitude_words(__m512i x) { return _mm512_and_si512(x, words(0x7FFF)); }
MXFLASH_INLINE uint32_t reduce_max_words(__m512i x) {
  const __m256i y = _mm256_max_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  const __m128i z = _mm_max_epu16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(z, _mm_set1_epi16(-1)));
  return uint32_t(~_mm_cvtsi128_si32(least)) & 0xFFFF;
}

// From the bits of |x| less this, exponents count as they do in a code: offset of blocks with scale b.
template <class Element>
MXFLASH_INLINE uint16_t code_offset(uint8_t b) {
  return uint16_t((b - Element::format.bias) << 7);
}

// Codes of |x| by 16-bit lane, not saturated. Right where they are above that of the smallest normal number.
template <class Element>
MXFLASH_INLINE __m512i normal_codes(__m512i x, __m512i offset) {
  constexpr int kShift = 7 - Element::format.mantissa_bits;
  const __m512i bits = _mm512_subs_epu16(magnitude_words(x), offset);
  // bits + half of a step - 1 + (1 if the step is odd), and one bit shifted out: in the average, which adds 1.
  const __m512i odd = _mm512_srli_epi16(x, kShift);
  const __m512i round = _mm512_ternarylogic_epi32(odd, words(1), words((1 << (kShift - 1)) - 2), 0xEA);  // odd & 1 | c
  return _mm512_srli_epi16(_mm512_avg_epu16(bits, round), kShift - 1);
}

// The same for all numbers.
template <class Element>
MXFLASH_INLINE __m512i all_codes(__m512i x, __m512i offset) {
  constexpr int kShift = 7 - Element::format.mantissa_bits;
  const __m512i bits = _mm512_sub_epi16(magnitude_words(x), offset);
  // Below the normal numbers: the significand with its hidden bit, shifted by as much more as the exponent is too low.
  const __m512i significand = _mm512_ternarylogic_epi32(bits, words(0x7F), words(0x80), 0xEA);  // bits & 0x7F | 0x80
  const __m512i v = _mm512_max_epi16(bits, significand);
  const __m512i shift =
      _mm512_max_epi16(_mm512_sub_epi16(words(kShift + 1), _mm512_srai_epi16(bits, 7)), words(kShift));
  const __m512i odd = _mm512_and_si512(_mm512_srlv_epi16(v, shift), words(1));
  const __m512i half = _mm512_sllv_epi16(words(1), _mm512_sub_epi16(shift, words(1)));
  const __m512i rounded = _mm512_add_epi16(_mm512_add_epi16(v, half), _mm512_sub_epi16(odd, words(1)));
  return _mm512_srlv_epi16(rounded, shift);
}

// Codes of x then y, 32 elements each.
template <class Element>
MXFLASH_INLINE __m512i encode_bf16(__m512i x, __m512i y, __m512i x_offset, __m512i y_offset) {
  constexpr Fp8Format f = Element::format;
  __m512i codes = _mm512_packus_epi16(normal_codes<Element>(x, x_offset), normal_codes<Element>(y, y_offset));
  if (_mm512_cmple_epu8_mask(codes, _mm512_set1_epi8(1 << f.mantissa_bits))) [[unlikely]] {
    codes = _mm512_packus_epi16(all_codes<Element>(x, x_offset), all_codes<Element>(y, y_offset));
  }
  codes = _mm512_min_epu8(codes, _mm512_set1_epi8(int8_t(f.max_code)));
  const __m512i signs = _mm512_packs_epi16(x, y);  // saturating: the sign stays the highest bit
  codes = _mm512_ternarylogic_epi32(codes, signs, _mm512_set1_epi8(int8_t(0x80)), 0xF8);  // codes | signs & 0x80
  // Packing works within quarters: x y x y x y x y, in units of 8 bytes.
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), codes);
}

// What the scales of a tile turned out to be.
struct ScalesSeen {
  bool tiny = false, nan = false;
};

// Offset of the block with this amax, and its scale.
template <class Element>
MXFLASH_INLINE uint16_t block_offset(uint32_t amax_word, MxRule rule, uint8_t* scale, ScalesSeen& seen) {
  const uint8_t b = mxflash::scale_from_amax(amax_word << 16, Element::format, rule);
  *scale = b;
  seen.nan |= b == kE8m0Nan;
  if (amax_word == 0) return kZeroBlockOffset;
  seen.tiny |= b < kMinScaleBf16;
  return code_offset<Element>(b);
}

// Those of 32 blocks of one channel each.
template <class Element>
MXFLASH_INLINE __m512i column_offsets(__m512i amax, MxRule rule, uint8_t* scale, ScalesSeen& seen) {
  const __m512i up = _mm512_add_epi16(amax, words(rule == MxRule::rceil ? 0x1F : 0));
  const __m512i exponent = _mm512_subs_epu16(_mm512_srli_epi16(up, 7), words(Element::format.max_exponent));
  const __mmask32 zero = _mm512_testn_epi16_mask(amax, amax);
  const __mmask32 nan = _mm512_cmpge_epu16_mask(amax, words(0x7F80));
  const __m512i b = _mm512_mask_blend_epi16(nan, exponent, words(kE8m0Nan));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(scale), _mm512_cvtepi16_epi8(b));
  seen.nan |= nan != 0;
  seen.tiny |= (_mm512_cmplt_epu16_mask(b, words(kMinScaleBf16)) & ~zero) != 0;
  const __m512i offset = _mm512_slli_epi16(_mm512_sub_epi16(b, words(Element::format.bias)), 7);
  return _mm512_mask_blend_epi16(zero, offset, words(kZeroBlockOffset));
}

// Scales of square32 and col32 blocks; offset [cols] for the second pass.
template <class Element>
ScalesSeen tile_scales_bf16(const TileSource& in, const TileTarget& out, uint16_t* offset) {
  ScalesSeen seen;
  for (int64_t c = 0; c < in.cols; c += kMxBlock) {
    const auto* x = static_cast<const uint16_t*>(in.data) + c;
    __m512i amax[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    int64_t r = 0;
    for (; r + 2 <= in.rows; r += 2) {
      amax[0] = _mm512_max_epu16(amax[0], magnitude_words(_mm512_loadu_si512(x + r * in.stride)));
      amax[1] = _mm512_max_epu16(amax[1], magnitude_words(_mm512_loadu_si512(x + (r + 1) * in.stride)));
    }
    if (r < in.rows) amax[0] = _mm512_max_epu16(amax[0], magnitude_words(_mm512_loadu_si512(x + r * in.stride)));
    const __m512i column_amax = _mm512_max_epu16(amax[0], amax[1]);
    __m512i offsets;
    if (out.block == MxBlock::square32) {
      offsets = words(block_offset<Element>(reduce_max_words(column_amax), out.rule, out.scale + c / kMxBlock, seen));
    } else {
      offsets = column_offsets<Element>(column_amax, out.rule, out.scale + c, seen);
    }
    _mm512_store_si512(offset + c, offsets);
  }
  return seen;
}

// False if a block is too small for this way; then nothing that was written counts.
template <class Element, bool kRows32>
bool quantize_tile_bf16(const TileSource& in, const TileTarget& out) {
  alignas(64) uint16_t offset[kTileCols];
  ScalesSeen seen;
  if (!kRows32) seen = tile_scales_bf16<Element>(in, out, offset);
  const int64_t across = in.cols / kMxBlock;
  for (int64_t r = 0; r < in.rows && !seen.tiny; ++r) {
    const auto* x = static_cast<const uint16_t*>(in.data) + r * in.stride;
    const uint16_t* next = in.next ? static_cast<const uint16_t*>(in.next) + r * in.stride : nullptr;
    uint8_t* payload = out.payload + r * out.stride;
    const auto offsets_of = [&](__m512i v, int64_t c) {
      if (!kRows32) return _mm512_load_si512(offset + c);
      uint8_t* scale = out.scale + r * across + c / kMxBlock;
      return words(block_offset<Element>(reduce_max_words(magnitude_words(v)), out.rule, scale, seen));
    };
    int64_t c = 0;
    for (; c + 2 * kMxBlock <= in.cols; c += 2 * kMxBlock) {
      if (next) {
        prefetch(next + c);
        prefetch(next + c + kMxBlock);
      }
      const __m512i v = _mm512_loadu_si512(x + c), w = _mm512_loadu_si512(x + c + kMxBlock);
      const __m512i codes = encode_bf16<Element>(v, w, offsets_of(v, c), offsets_of(w, c + kMxBlock));
      if (out.stream) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(payload + c), codes);
      } else {
        _mm512_storeu_si512(payload + c, codes);
      }
    }
    if (c < in.cols) {
      if (next) prefetch(next + c);
      const __m512i v = _mm512_loadu_si512(x + c), offsets = offsets_of(v, c);
      const __m512i codes = encode_bf16<Element>(v, v, offsets, offsets);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(payload + c), _mm512_castsi512_si256(codes));
    }
  }
  if (out.stream) stream_done();
  if (seen.nan && !seen.tiny) overwrite_nan_blocks(in, out);
  return !seen.tiny;
}

// False, too, for a tile that ends within a block.
inline bool quantize_tile_bf16(const TileSource& in, const TileTarget& out) {
  if (in.cols % kMxBlock != 0) return false;
  const bool rows32 = out.block == MxBlock::row32;
  if (out.element == Dtype::e5m2) {
    return rows32 ? quantize_tile_bf16<E5m2, true>(in, out) : quantize_tile_bf16<E5m2, false>(in, out);
  }
  return rows32 ? quantize_tile_bf16<E4m3, true>(in, out) : quantize_tile_bf16<E4m3, false>(in, out);
}

#else

inline bool quantize_tile_bf16(const TileSource&, const TileTarget&) { return false; }

#endif

MXFLASH_ISA_END
