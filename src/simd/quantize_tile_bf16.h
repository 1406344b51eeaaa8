// BF16 to MX codes in 16-bit lanes: 32 elements in a vector, integers only.
//
// The bits of |x| are exponent and mantissa side by side, as in a code. Less the scale's exponent, shifted right by the
// mantissa bits that E4M3 (E5M2) has fewer, rounded to even: that is the code of a normal number, and a carry moves
// into the exponent by itself. Codes below that of the smallest normal number, zero included, are made again the long
// way, where the shift depends on the exponent: one compare for 64 elements, which in most data is seldom true.
#pragma once

#include "runtime/quantize_tile.h"
#include "simd/encode.h"

MXFLASH_ISA_BEGIN

#if defined(MXFLASH_ISA_AVX512)

// A block's offset: from the bits of |x| less this, exponents count as they do in a code. Blocks with smaller scales
// may hold subnormals of BF16 that are not zero as codes, and would have no offset.
inline constexpr uint8_t kMinScaleBf16 = 32;
static_assert(kStripCols == 128);                     // as in scale_index
inline constexpr uint16_t kZeroBlockOffset = 0x7F80;  // takes every zero to code zero

MXFLASH_INLINE __m512i words(int x) { return _mm512_set1_epi16(int16_t(x)); }
MXFLASH_INLINE __m512i magnitude_words(__m512i x) { return _mm512_and_si512(x, words(0x7FFF)); }
// Of magnitudes: signs are ignored. The one horizontal instruction there is finds the least of 8.
MXFLASH_INLINE uint32_t reduce_max_words(__m512i x) {
  const __m512i below = _mm512_andnot_si512(x, words(0x7FFF));
  const __m256i y = _mm256_min_epu16(_mm512_castsi512_si256(below), _mm512_extracti64x4_epi64(below, 1));
  const __m128i z = _mm_min_epu16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
  return 0x7FFF - (uint32_t(_mm_cvtsi128_si32(_mm_minpos_epu16(z))) & 0xFFFF);
}

// Constants of encode_pair. Left alone, GCC makes some of them anew for every vector.
template <class Element>
struct Bf16Constants {
  static constexpr Fp8Format f = Element::format;
  static constexpr int kShift = 7 - f.mantissa_bits;
  __m512i magnitude = words(0x7FFF), one = words(1);
  __m512i round = words((1 << (kShift - 1)) - 2);
  __m512i min_normal = _mm512_set1_epi8(1 << f.mantissa_bits);
  __m512i max_code = _mm512_set1_epi8(int8_t(f.max_code)), sign = _mm512_set1_epi8(int8_t(0x80));
  __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  Bf16Constants() {
    __asm__("" : "+v"(magnitude), "+v"(one), "+v"(round), "+v"(min_normal), "+v"(max_code), "+v"(sign), "+v"(order));
  }
};

// 64 elements, x then y: what their codes need whatever the scale is.
struct Bf16Pair {
  __m512i x, y;
  __m512i x_magnitude, y_magnitude;
  __m512i x_round, y_round;  // half of a step, less 1 if the step is even, less 1
  __m512i signs;             // the highest bit of each byte
  template <class Element>
  MXFLASH_INLINE Bf16Pair(__m512i first, __m512i second, const Bf16Constants<Element>& k)
      : x(first),
        y(second),
        x_magnitude(_mm512_and_si512(x, k.magnitude)),
        y_magnitude(_mm512_and_si512(y, k.magnitude)),
        x_round(_mm512_ternarylogic_epi32(_mm512_srli_epi16(x, k.kShift), k.one, k.round, 0xEA)),  // odd & 1 | round
        y_round(_mm512_ternarylogic_epi32(_mm512_srli_epi16(y, k.kShift), k.one, k.round, 0xEA)),
        signs(_mm512_packs_epi16(x, y)) {}  // saturating: the sign stays where it is
};

// Codes of |x| by 16-bit lane, not saturated. Right if not below that of the smallest normal number: a subnormal that
// is rounded up to it here is nearer to it than the last eighth of a step, so it is there as well.
template <class Element>
MXFLASH_INLINE __m512i normal_codes(__m512i magnitude, __m512i round, __m512i offset) {
  // The average adds 1, and shifts one bit out.
  return _mm512_srli_epi16(_mm512_avg_epu16(_mm512_subs_epu16(magnitude, offset), round),
                           Bf16Constants<Element>::kShift - 1);
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
MXFLASH_INLINE __m512i encode_pair(const Bf16Pair& p, __m512i x_offset, __m512i y_offset,
                                   const Bf16Constants<Element>& k) {
  __m512i codes = _mm512_packus_epi16(normal_codes<Element>(p.x_magnitude, p.x_round, x_offset),
                                      normal_codes<Element>(p.y_magnitude, p.y_round, y_offset));
  if (_mm512_cmplt_epu8_mask(codes, k.min_normal)) [[unlikely]] {
    codes = _mm512_packus_epi16(all_codes<Element>(p.x, x_offset), all_codes<Element>(p.y, y_offset));
  }
  codes = _mm512_min_epu8(codes, k.max_code);
  codes = _mm512_ternarylogic_epi32(codes, p.signs, k.sign, 0xF8);  // codes | signs & sign
  // Packing works within quarters: x y x y x y x y, in units of 8 bytes.
  return _mm512_permutexvar_epi64(k.order, codes);
}

// What the scales of a tile turned out to be.
struct ScalesSeen {
  bool tiny = false, nan = false;
};

// Scales and offsets of 32 blocks.
template <class Element>
MXFLASH_INLINE void block_offsets(__m512i amax, MxRule rule, uint8_t* scale, uint16_t* offset, ScalesSeen& seen) {
  const __m512i up = _mm512_add_epi16(amax, words(rule == MxRule::rceil ? 0x1F : 0));
  const __m512i exponent = _mm512_subs_epu16(_mm512_srli_epi16(up, 7), words(Element::format.max_exponent));
  const __mmask32 zero = _mm512_testn_epi16_mask(amax, amax);
  const __mmask32 nan = _mm512_cmpge_epu16_mask(amax, words(0x7F80));
  const __m512i b = _mm512_mask_blend_epi16(nan, exponent, words(kE8m0Nan));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(scale), _mm512_cvtepi16_epi8(b));
  const __m512i from_scale = _mm512_slli_epi16(_mm512_sub_epi16(b, words(Element::format.bias)), 7);
  _mm512_storeu_si512(offset, _mm512_mask_blend_epi16(zero, from_scale, words(kZeroBlockOffset)));
  seen.nan |= nan != 0;
  seen.tiny |= (_mm512_cmplt_epu16_mask(b, words(kMinScaleBf16)) & ~zero) != 0;
}

// Largest magnitude of each of 32 channels.
MXFLASH_INLINE __m512i column_amax(const uint16_t* x, int64_t stride, int64_t rows) {
  __m512i even = _mm512_setzero_si512(), odd = even;
  int64_t r = 0;
  for (; r + 2 <= rows; r += 2) {
    even = _mm512_max_epu16(even, magnitude_words(_mm512_loadu_si512(x + r * stride)));
    odd = _mm512_max_epu16(odd, magnitude_words(_mm512_loadu_si512(x + (r + 1) * stride)));
  }
  if (r < rows) even = _mm512_max_epu16(even, magnitude_words(_mm512_loadu_si512(x + r * stride)));
  return _mm512_max_epu16(even, odd);
}

// 0x7FFF less the magnitudes of `count` rows, reduced so that 32 / count lanes are left of each row, rows in order:
// with 32 of them lane r is the least of row r, which is 0x7FFF less its largest magnitude.
template <int count>
MXFLASH_INLINE __m512i least_of_rows(const uint16_t* x, int64_t stride) {
  if constexpr (count == 1) {
    return _mm512_andnot_si512(_mm512_loadu_si512(x), words(0x7FFF));
  } else {
    const __m512i a = least_of_rows<count / 2>(x, stride);
    const __m512i b = least_of_rows<count / 2>(x + count / 2 * stride, stride);
    switch (count) {  // halves of a and of b beside each other
      case 2: return _mm512_min_epu16(_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b));
      case 4: return _mm512_min_epu16(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
      case 8: return _mm512_min_epu16(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
      case 16: return _mm512_min_epu16(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xEE));
      default: return _mm512_min_epu16(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD));
    }
  }
}

// Largest magnitude of each row of 32 channels; zero from `rows` on.
MXFLASH_INLINE __m512i row_amax(const uint16_t* x, int64_t stride, int64_t rows) {
  if (rows == kMxBlock) return _mm512_sub_epi16(words(0x7FFF), least_of_rows<kMxBlock>(x, stride));
  alignas(64) uint16_t amax[kMxBlock] = {};
  for (int64_t r = 0; r < rows; ++r) amax[r] = uint16_t(reduce_max_words(_mm512_loadu_si512(x + r * stride)));
  return _mm512_load_si512(amax);
}

// Scales of four blocks of 32 rows to four of each row.
MXFLASH_INLINE void interleave_scales(const uint8_t (*b)[kMxBlock], uint8_t* scale) {
  for (int half = 0; half < 2; ++half) {
    __m512i rows = _mm512_setzero_si512();
    for (int i = 3; i >= 0; --i) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b[i] + 16 * half));
      rows = _mm512_or_si512(_mm512_slli_epi32(rows, 8), _mm512_cvtepu8_epi32(bytes));
    }
    _mm512_storeu_si512(scale + 64 * half, rows);
  }
}

// Scales, and one offset per channel, or for row32 one per row in each 32 channels.
template <class Element>
ScalesSeen strip_offsets(const TileSource& in, const TileTarget& out, uint16_t* offset) {
  ScalesSeen seen;
  const MxBlock block = out.block;
  const MxRule rule = out.rule;
  alignas(64) uint8_t row_scales[kStripCols / kMxBlock][kMxBlock];
  for (int64_t c = 0; c < in.cols; c += kMxBlock) {
    const auto* x = static_cast<const uint16_t*>(in.data) + c;
    __m512i amax = block == MxBlock::row32 ? row_amax(x, in.stride, in.rows) : column_amax(x, in.stride, in.rows);
    if (block == MxBlock::square32) amax = words(int(reduce_max_words(amax)));
    block_offsets<Element>(amax, rule, block == MxBlock::row32 ? row_scales[c / kMxBlock] : out.scale + c, offset + c,
                           seen);
  }
  if (block == MxBlock::row32) interleave_scales(row_scales, out.scale);
  return seen;
}

// Encodes kBlocks * 32 channels from c on, all rows, one copy for each of kRows32: whether its blocks are rows.
template <class Element, int kBlocks, bool... kRows32>
MXFLASH_INLINE void encode_columns(const TileSource& in, const TileTarget* outs, const uint16_t (*offset)[kStripCols],
                                   int64_t c) {
  constexpr int kCopies = sizeof...(kRows32), kOther = kBlocks > 1 ? 1 : 0;
  constexpr bool kByRow[] = {kRows32...};
  const Bf16Constants<Element> constants;
  const auto* x = static_cast<const uint16_t*>(in.data) + c;
  const auto* next = in.next ? static_cast<const uint16_t*>(in.next) + c : nullptr;
  const int64_t rows = in.rows, stride = in.stride;
  uint8_t* payload[kCopies];
  int64_t out_stride[kCopies];
  bool stream[kCopies];
  __m512i offsets[kCopies][kBlocks];
#pragma GCC unroll 2
  for (int n = 0; n < kCopies; ++n) {
    payload[n] = outs[n].payload + c;
    out_stride[n] = outs[n].stride;
    stream[n] = outs[n].stream;
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; ++i) offsets[n][i] = _mm512_load_si512(offset[n] + c + i * kMxBlock);
  }
  for (int64_t r = 0; r < rows; ++r, x += stride) {
    if (next) {
#pragma GCC unroll 4
      for (int i = 0; i < kBlocks; ++i) prefetch(next + i * kMxBlock);
      next += stride;
    }
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; i += 2) {
      const Bf16Pair pair(_mm512_loadu_si512(x + i * kMxBlock), _mm512_loadu_si512(x + (i + kOther) * kMxBlock),
                          constants);
#pragma GCC unroll 2
      for (int n = 0; n < kCopies; ++n) {
        if (kByRow[n]) {
          offsets[n][i] = words(offset[n][c + i * kMxBlock + r]);
          offsets[n][i + kOther] = words(offset[n][c + (i + kOther) * kMxBlock + r]);
        }
        const __m512i codes = encode_pair(pair, offsets[n][i], offsets[n][i + kOther], constants);
        if (kBlocks == 1) {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(payload[n]), _mm512_castsi512_si256(codes));
        } else if (stream[n]) {
          _mm512_stream_si512(reinterpret_cast<__m512i*>(payload[n] + i * kMxBlock), codes);
        } else {
          _mm512_storeu_si512(payload[n] + i * kMxBlock, codes);
        }
      }
    }
#pragma GCC unroll 2
    for (int n = 0; n < kCopies; ++n) payload[n] += out_stride[n];
  }
}

template <class Element, bool... kRows32>
void encode_strip(const TileSource& in, const TileTarget* outs, const uint16_t (*offset)[kStripCols]) {
  int64_t c = 0;
  for (; c + 128 <= in.cols; c += 128) encode_columns<Element, 4, kRows32...>(in, outs, offset, c);
  for (; c + 64 <= in.cols; c += 64) encode_columns<Element, 2, kRows32...>(in, outs, offset, c);
  for (; c + 32 <= in.cols; c += 32) encode_columns<Element, 1, kRows32...>(in, outs, offset, c);
}

template <class Element>
bool quantize_strip_bf16(const TileSource& in, const TileTarget* outs, int count) {
  alignas(64) uint16_t offset[2][kStripCols];
  ScalesSeen seen[2];
  for (int n = 0; n < count; ++n) {
    seen[n] = strip_offsets<Element>(in, outs[n], offset[n]);
    if (seen[n].tiny) return false;
  }
  const bool row0 = outs[0].block == MxBlock::row32, row1 = count > 1 && outs[1].block == MxBlock::row32;
  if (count == 1) {
    row0 ? encode_strip<Element, true>(in, outs, offset) : encode_strip<Element, false>(in, outs, offset);
  } else if (row0) {
    row1 ? encode_strip<Element, true, true>(in, outs, offset) : encode_strip<Element, true, false>(in, outs, offset);
  } else {
    row1 ? encode_strip<Element, false, true>(in, outs, offset) : encode_strip<Element, false, false>(in, outs, offset);
  }
  for (int n = 0; n < count; ++n) {
    if (seen[n].nan) overwrite_nan_blocks(in, outs[n]);
  }
  return true;
}

// One or two copies. False if that cannot be done here: elements differ, a block's scale is too small, or the strip
// ends within a block. Nothing that was written counts then.
inline bool quantize_strip_bf16(const TileSource& in, const TileTarget* outs, int count) {
  if (in.dtype != Dtype::bf16 || in.cols % kMxBlock != 0 || outs[0].element != outs[count - 1].element) return false;
  return outs[0].element == Dtype::e5m2 ? quantize_strip_bf16<E5m2>(in, outs, count)
                                        : quantize_strip_bf16<E4m3>(in, outs, count);
}

#else

inline bool quantize_strip_bf16(const TileSource&, const TileTarget*, int) { return false; }

#endif

MXFLASH_ISA_END
