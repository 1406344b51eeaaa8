// Tiles of quantize and dequantize in vectors; once per instruction set.
//
// Every result is bit-equal to ref's: vectors run along the channels (in the butterflies of a rotation along the
// tokens), so each element sees the same operations in the same order, each rounded once.
#include <algorithm>
#include <cstring>

#include "mx/rotation.h"
#include "quantize/quantize_cpu.h"
#include "runtime/tensor_access.h"
#include "simd/dequantize_tile.h"
#include "simd/quantize_tile.h"
#include "simd/vector.h"

MXFLASH_ISA_BEGIN
namespace {

using namespace cpu;

void quantize(const TileSource& in, const TileTarget* outs, int count) { quantize_tile(in, outs, count); }

// ---- before a tile ----------------------------------------------------------------------------------------------

// body(c, vector) and tail(c, float) for the elements of one row.
template <class Source, class Body, class Tail>
MXFLASH_INLINE void for_row(const FloatRows& in, int64_t row, Body&& body, Tail&& tail) {
  const auto* x = static_cast<const typename Source::Stored*>(in.data) + row * in.stride;
  const Tensor view{.data = const_cast<typename Source::Stored*>(x), .dtype = in.dtype};
  const float first = in.repeat && in.cols > 0 ? load_float(view, 0) : 0.0f;
  int64_t c = 0;
  for (; c + kLanes <= in.cols; c += kLanes) body(c, in.repeat ? broadcast(first) : Source::load_vector(x + c));
  for (; c < in.cols; ++c) tail(c, in.repeat ? first : load_float(view, c));
}

constexpr int64_t kMeanAhead = 32;  // rows that are prefetched before their turn

// One row of what has this shape, and lies there.
template <class Source>
MXFLASH_INLINE void prefetch_row(const FloatRows& shape, const void* data, int64_t row) {
  const auto* x = static_cast<const typename Source::Stored*>(data) + row * shape.stride;
  for (int64_t c = 0; c < shape.cols && !shape.repeat; c += 64 / int64_t(sizeof *x)) prefetch(x + c);
}

template <class Source>
void mean_of(const FloatRows& in, float* mean) {
  float total[kChunk] = {}, partial[kChunk];
  for (int64_t first = 0; first < in.rows; first += kMeanPartial) {
    const int64_t last = first + kMeanPartial < in.rows ? first + kMeanPartial : in.rows;
    std::memset(partial, 0, sizeof partial);
    for (int64_t r = first; r < last; ++r) {
      // Rows are too far apart for the hardware to see a pattern.
      if (r + kMeanAhead < in.rows) prefetch_row<Source>(in, in.data, r + kMeanAhead);
      for_row<Source>(
          in, r, [&](int64_t c, F32 x) { store(partial + c, add(load(partial + c), x)); },
          [&](int64_t c, float x) { partial[c] += x; });
    }
    for (int64_t c = 0; c < kChunk; c += kLanes) store(total + c, add(load(total + c), load(partial + c)));
  }
  for (int64_t c = 0; c < in.cols; ++c) mean[c] = in.rows ? total[c] / float(in.rows) : 0.0f;
}
void mean(const FloatRows& in, float* mean) {
  with_source(in.dtype, [&](auto source) { mean_of<decltype(source)>(in, mean); });
}

void widen(const FloatRows& in, const float* mean, float* x) {
  with_source(in.dtype, [&](auto source) {
    for (int64_t r = 0; r < in.rows; ++r) {
      float* row = x + r * kChunk;
      if (in.next) prefetch_row<decltype(source)>(in, in.next, r);
      for_row<decltype(source)>(
          in, r, [&](int64_t c, F32 v) { store(row + c, mean ? sub(v, load(mean + c)) : v); },
          [&](int64_t c, float v) { row[c] = mean ? v - mean[c] : v; });
      for (int64_t c = in.cols; c % kMxBlock != 0; ++c) row[c] = 0;
    }
  });
}

// kStages stages of butterflies, from this stride on, on t [cols][kLanes]. The first pass over t has signs, the last
// one a scale.
template <int kStages>
void butterflies(float* t, int64_t cols, int64_t stride, const float* sign, const float* scale) {
  constexpr int kCount = 1 << kStages;
  for (int64_t base = 0; base < cols; base += kCount * stride) {
    for (int64_t i = base; i < base + stride; ++i) {
      F32 v[kCount];
      for (int k = 0; k < kCount; ++k) {
        v[k] = load(t + (i + k * stride) * kLanes);
        if (sign) v[k] = mul(v[k], broadcast(sign[i + k * stride]));
      }
#pragma GCC unroll 3
      for (int half = 1; half < kCount; half *= 2) {
#pragma GCC unroll 8
        for (int k = 0; k < kCount; ++k) {
          if (k & half) continue;
          const F32 a = v[k], b = v[k + half];
          v[k] = add(a, b);
          v[k + half] = sub(a, b);
        }
      }
      for (int k = 0; k < kCount; ++k) {
        if (scale) v[k] = mul(v[k], broadcast(*scale));
        store(t + (i + k * stride) * kLanes, v[k]);
      }
    }
  }
}

// kLanes tokens at a time: transposed, so that every butterfly is one addition and one subtraction of vectors; three
// stages for each time that the vectors are loaded.
void rotate(float* x, int64_t cols, int64_t group, const float* sign) {
  alignas(64) float t[kChunk * kLanes];
  const float scale = hadamard_scale(group);
  const int64_t padded = round_up(cols, kMxBlock);
  for (int64_t r = 0; r < kTileRows; r += kLanes) {
    for (int64_t c = 0; c < padded; c += kLanes) transpose(x + r * kChunk + c, kChunk, t + c * kLanes, kLanes);
    int64_t stride = 1;
    do {
      const float* const first = stride == 1 ? sign : nullptr;
      const int64_t left = group / stride;
      const float* const last = left <= 8 ? &scale : nullptr;
      switch (left) {
        case 1: butterflies<0>(t, cols, stride, first, last); break;
        case 2: butterflies<1>(t, cols, stride, first, last); break;
        case 4: butterflies<2>(t, cols, stride, first, last); break;
        default: butterflies<3>(t, cols, stride, first, last); break;
      }
      stride *= 8;
    } while (stride < group);
    for (int64_t c = 0; c < padded; c += kLanes) transpose(t + c * kLanes, kLanes, x + r * kChunk + c, kChunk);
  }
}

// ---- after it ---------------------------------------------------------------------------------------------------

// Elements of a block with scale b by their bits: above `limit` they saturate, up to `flushed` they become zero.
template <class Element>
struct Thresholds {
  int32_t limit = 0x7FFFFFFF, flushed = 0;
  explicit Thresholds(uint8_t b) {
    constexpr Fp8Format f = Element::format;
    if (b == kE8m0Nan) return;
    limit = int32_t(f.max_bits + (uint32_t(b) << 23) - (127u << 23));
    // Half of the smallest subnormal, exactly, is a tie that goes to zero.
    const int exponent = int(b) - kE8m0Bias + f.min_exponent() - f.mantissa_bits - 1;
    flushed = exponent < -126 ? 1 << (exponent + 149) : (exponent + 127) << 23;
  }
};

template <class Source, class Element>
void count_in(const TileSource& in, const TileTarget& out, QuantizeStats& stats) {
  const int64_t width = out.block == MxBlock::col32 ? 1 : kMxBlock, padded = round_up(in.cols, kMxBlock);
  int32_t limit[kTileCols], flushed[kTileCols];
  I32 amax = broadcast(0), saturated = broadcast(0), zeroed = broadcast(0), nonfinite = broadcast(0);
  const I32 one = broadcast(1), zero = broadcast(0), infinity = broadcast(0x7F800000);
  for (int64_t r = 0; r < in.rows; ++r) {
    for (int64_t c = 0; c < padded && (r == 0 || out.block == MxBlock::row32); c += width) {
      const Thresholds<Element> t(out.scale[scale_index(out.block, r, c)]);
      std::fill(limit + c, limit + c + width, t.limit);
      std::fill(flushed + c, flushed + c + width, t.flushed);
    }
    const auto* x = static_cast<const typename Source::Stored*>(in.data) + r * in.stride;
    for (int64_t c = 0; c < in.cols; c += kLanes) {
      const I32 m = magnitude_bits(Source::load_vector(x + c));
      const Mask finite = less(m, infinity);
      amax = max(amax, select(finite, m, zero));
      nonfinite = add(nonfinite, select(finite, zero, one));
      saturated = add(saturated, select(mask_and(finite, less(load(limit + c), m)), one, zero));
      zeroed = add(zeroed, select(mask_and(less(zero, m), less(m, add(load(flushed + c), one))), one, zero));
    }
  }
  int32_t lanes[kLanes];
  const auto sum = [&](I32 counts) {
    store(lanes, counts);
    int64_t total = 0;
    for (const int32_t n : lanes) total += n;
    return total;
  };
  const float tile_amax = std::bit_cast<float>(reduce_max(amax));
  stats.amax = stats.amax > tile_amax ? stats.amax : tile_amax;
  stats.saturated += sum(saturated);
  stats.flushed += sum(zeroed);
  stats.nonfinite += sum(nonfinite);
  stats.total += in.rows * in.cols;
}
void count(const TileSource& in, const TileTarget& out, QuantizeStats& stats) {
  with_source(in.dtype, [&](auto source) {
    using Source = decltype(source);
    return out.element == Dtype::e5m2 ? count_in<Source, E5m2>(in, out, stats) : count_in<Source, E4m3>(in, out, stats);
  });
}

void dequantize(const DequantizeTile& tile) { dequantize_tile(tile); }

}  // namespace

const QuantizeKernels kQuantizeKernels{quantize, count, mean, widen, rotate, dequantize};

MXFLASH_ISA_END
