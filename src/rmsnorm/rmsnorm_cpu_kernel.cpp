// Rows and tiles of rmsnorm_quantize in vectors; once per instruction set.
//
// Bit-equal to ref: every product and sum is rounded by itself, and the running sums of the contract are vectors.
#include <cstring>
#include <type_traits>

#include "rmsnorm/rmsnorm_cpu.h"
#include "rmsnorm/rmsnorm_sum.h"
#include "runtime/tensor_access.h"
#include "simd/bf16_pairs.h"
#include "simd/encode.h"
#include "simd/fold.h"
#include "simd/quantize_tile.h"
#include "simd/vector.h"

MXFLASH_ISA_BEGIN
namespace {

using namespace cpu;

void quantize(const TileSource& in, const TileTarget* outs, int count) { quantize_tile(in, outs, count); }

Tensor view(const void* data, Dtype dtype) { return {.data = const_cast<void*>(data), .dtype = dtype}; }

void add_residual(const void* in, Dtype in_dtype, void* residual, Dtype dtype, int64_t dim) {
  const Tensor to = view(residual, dtype), from = view(in, in_dtype);
  with_source(in_dtype, [&](auto in_source) {
    with_source(dtype, [&](auto source) {
      using In = decltype(in_source);
      using Out = decltype(source);
      const auto* x = static_cast<const typename In::Stored*>(in);
      auto* h = static_cast<typename Out::Stored*>(residual);
      int64_t c = 0;
      for (; c + kLanes <= dim; c += kLanes) {
        Out::store_vector(h + c, add(In::load_vector(x + c), Out::load_vector(h + c)));
      }
      for (; c < dim; ++c) store_float(to, c, load_float(from, c) + load_float(to, c));
    });
  });
}

// A row as the pieces of it that a pair of vectors holds, and where their elements are in those vectors.
template <class Source>
struct Pieces {
  using Stored = typename Source::Stored;
  MXFLASH_INLINE static F32Pair load_pair(const Stored* p) {
    return {Source::load_vector(p), Source::load_vector(p + kLanes)};
  }
  static constexpr int64_t lane(int64_t i) { return i; }
  // The contract's sum of kPairLanes running sums.
  MXFLASH_INLINE static float fold(const F32Pair& sum) { return fold_lanes(add(sum.even, sum.odd)); }
};
template <>
struct Pieces<SourceBf16> {
  using Stored = uint16_t;
  MXFLASH_INLINE static F32Pair load_pair(const uint16_t* p) { return load_bf16_pair(p); }
  static constexpr int64_t lane(int64_t i) { return i % 2 * kLanes + i / 2; }
  // Neighbours meet last.
  MXFLASH_INLINE static float fold(const F32Pair& sum) { return fold_lanes(sum.even) + fold_lanes(sum.odd); }
};

// The contract's running sums of kStep neighbouring lanes, in registers.
constexpr int64_t kStep = 64;
constexpr int kPairs = int(kStep) / kPairLanes;
struct Sums {
  F32Pair pair[kPairs];
};

// Lanes l .. l + kStep - 1 after the folds from half the lanes down to this half.
template <class Source, int64_t half>
MXFLASH_INLINE Sums folded_sums(const typename Source::Stored* x, int64_t dim, int64_t l) {
  if constexpr (half < kRmsLanes) {
    const Sums low = folded_sums<Source, 2 * half>(x, dim, l);
    if (l + half >= dim) return low;  // the other half is zero
    const Sums high = folded_sums<Source, 2 * half>(x, dim, l + half);
    Sums sums;
    for (int p = 0; p < kPairs; ++p) sums.pair[p] = add(low.pair[p], high.pair[p]);
    return sums;
  } else {
    Sums sums;
    for (F32Pair& sum : sums.pair) sum = {broadcast(0.0f), broadcast(0.0f)};
    int64_t i = l;
    for (; i + kStep <= dim; i += kRmsLanes) {
      for (int p = 0; p < kPairs; ++p) {
        const F32Pair h = Pieces<Source>::load_pair(x + i + p * kPairLanes);
        sums.pair[p] = add(sums.pair[p], mul(h, h));
      }
    }
    if (i < dim) {  // the last elements of the row; zeros change nothing
      typename Source::Stored last[kStep] = {};
      std::memcpy(last, x + i, size_t(dim - i) * sizeof *x);
      for (int p = 0; p < kPairs; ++p) {
        const F32Pair h = Pieces<Source>::load_pair(last + p * kPairLanes);
        sums.pair[p] = add(sums.pair[p], mul(h, h));
      }
    }
    return sums;
  }
}

template <class Source>
float row_sum(const void* h, int64_t dim) {
  Sums sums = folded_sums<Source, kStep>(static_cast<const typename Source::Stored*>(h), dim, 0);
  for (int half = kPairs / 2; half >= 1; half /= 2) {
    for (int p = 0; p < half; ++p) sums.pair[p] = add(sums.pair[p], sums.pair[p + half]);
  }
  return Pieces<Source>::fold(sums.pair[0]);
}
float sum_of_squares(const void* h, Dtype dtype, int64_t dim) {
  float sum = 0;
  with_source(dtype, [&](auto source) { sum = row_sum<decltype(source)>(h, dim); });
  return sum;
}

template <class Source>
MXFLASH_INLINE void store_y(uint16_t* y, const F32Pair& x, const Bf16Rounding& rounding) {
  if constexpr (std::is_same_v<Source, SourceBf16>) {
    rounding.store_pair(y, x);
  } else {
    store_bf16(y, x.even);
    store_bf16(y + kLanes, x.odd);
  }
}

template <class Source>
void normalize_tile(const NormTile& t, const float* weight, uint16_t* y) {
  using Piece = Pieces<Source>;
  // In the order of the lanes of a piece.
  alignas(64) float piece_weight[kNormCols];
  for (int64_t c = 0; c + kPairLanes <= t.cols; c += kPairLanes) {
    for (int64_t i = 0; i < kPairLanes; ++i) piece_weight[c + Piece::lane(i)] = canonical_nan(weight[c + i]);
  }
  const Bf16Rounding rounding;
  const int64_t rows = t.rows, cols = t.cols, whole = cols / kMxBlock * kMxBlock, stride = t.stride;
  for (int64_t r = 0; r < rows; ++r) {
    const auto* x = static_cast<const typename Source::Stored*>(t.h) + r * stride;
    const auto* next = r < t.next_rows ? x + kTileRows * stride : nullptr;
    const F32 rstd = broadcast(canonical_nan(t.rstd[r]));
    uint16_t* row = y + r * kNormCols;
    for (int64_t c = 0; c < whole; c += kMxBlock) {
      if (next) {
        prefetch(next + c);
        if (sizeof *next == 4) prefetch(next + c + kMxBlock / 2);
      }
      for (int64_t i = c; i < c + kMxBlock; i += kPairLanes) {
        const F32Pair h = Piece::load_pair(x + i);
        store_y<Source>(
            row + i,
            {mul(mul(h.even, rstd), load(piece_weight + i)), mul(mul(h.odd, rstd), load(piece_weight + i + kLanes))},
            rounding);
      }
    }
    for (int64_t c = whole; c < cols; ++c)
      row[c] = encode_bf16(load_float(view(x, t.dtype), c) * t.rstd[r] * weight[c]);
    for (int64_t c = cols; c % kMxBlock != 0; ++c) row[c] = 0;
  }
}
void normalize(const NormTile& t, uint16_t* y) {
  alignas(64) float weight[kNormCols];
  with_source(t.weight_dtype, [&](auto source) {
    const auto* w = static_cast<const typename decltype(source)::Stored*>(t.weight);
    int64_t c = 0;
    for (; c + kLanes <= t.cols; c += kLanes) store(weight + c, source.load_vector(w + c));
    for (; c < t.cols; ++c) weight[c] = load_float(view(w, t.weight_dtype), c);
  });
  with_source(t.dtype, [&](auto source) { normalize_tile<decltype(source)>(t, weight, y); });
}

}  // namespace

const RmsnormKernels kRmsnormKernels{add_residual, sum_of_squares, normalize, quantize};

MXFLASH_ISA_END
