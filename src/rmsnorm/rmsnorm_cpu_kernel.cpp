// Rows and tiles of rmsnorm_quantize in vectors; once per instruction set.
//
// Bit-equal to ref: every product and sum is rounded by itself, and the running sums of the contract are vectors.
#include <bit>
#include <cstring>

#include "rmsnorm/rmsnorm_cpu.h"
#include "rmsnorm/rmsnorm_sum.h"
#include "runtime/tensor_access.h"
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

// Running sums of kStep lanes at a time stay in registers: elements l, l + 1024, ... of a row that is in the cache.
template <class Source>
float row_sum(const void* h, Dtype dtype, int64_t dim) {
  constexpr int kVectors = 8;
  constexpr int64_t kStep = kVectors * kLanes;
  const auto* x = static_cast<const typename Source::Stored*>(h);
  alignas(64) float lane[kRmsLanes];
  // Lanes without an element are zero, and adding them changes nothing.
  const int64_t lanes = dim < kRmsLanes ? int64_t(std::bit_ceil(uint64_t(dim))) : kRmsLanes;
  for (int64_t l = 0; l < lanes; l += kStep) {
    F32 sum[kVectors];
    for (int v = 0; v < kVectors; ++v) sum[v] = broadcast(0.0f);
    for (int64_t i = l; i + kStep <= dim; i += kRmsLanes) {
      for (int v = 0; v < kVectors; ++v) {
        const F32 y = Source::load_vector(x + i + v * kLanes);
        sum[v] = add(sum[v], mul(y, y));
      }
    }
    for (int v = 0; v < kVectors; ++v) store(lane + l + v * kLanes, sum[v]);
  }
  for (int64_t i = dim / kStep * kStep; i < dim; ++i) {
    const float y = load_float(view(h, dtype), i);
    lane[i % kRmsLanes] += y * y;
  }
  for (int64_t half = lanes / 2; half >= kLanes; half /= 2) {
    for (int64_t l = 0; l < half; l += kLanes) store(lane + l, add(load(lane + l), load(lane + l + half)));
  }
  return fold_lanes(load(lane));
}
float sum_of_squares(const void* h, Dtype dtype, int64_t dim) {
  float sum = 0;
  with_source(dtype, [&](auto source) { sum = row_sum<decltype(source)>(h, dtype, dim); });
  return sum;
}

template <class Source>
void normalize_tile(const NormTile& t, const float* weight, uint16_t* y) {
  const int64_t whole = t.cols / kMxBlock * kMxBlock;
  for (int64_t r = 0; r < t.rows; ++r) {
    const auto* x = static_cast<const typename Source::Stored*>(t.h) + r * t.stride;
    const auto* next = r < t.prefetch_rows ? x + kTileRows * t.stride : nullptr;
    const F32 rstd = broadcast(t.rstd[r]);
    uint16_t* row = y + r * kNormCols;
    for (int64_t c = 0; c < whole; c += kMxBlock) {
      if (next) {
        prefetch(next + c);
        if (sizeof *next == 4) prefetch(next + c + kMxBlock / 2);
      }
      F32 v[kBlockVectors];
      for (int i = 0; i < kBlockVectors; ++i) {
        v[i] = mul(mul(Source::load_vector(x + c + i * kLanes), rstd), load(weight + c + i * kLanes));
      }
      store_bf16_block(row + c, v);
    }
    for (int64_t c = whole; c < t.cols; ++c) {
      row[c] = encode_bf16(load_float(view(x, t.dtype), c) * t.rstd[r] * weight[c]);
    }
    for (int64_t c = t.cols; c % kMxBlock != 0; ++c) row[c] = 0;
  }
}
void normalize(const NormTile& t, uint16_t* y) {
  alignas(64) float weight[kNormCols];
  for (int64_t c = 0; c < t.cols; ++c) weight[c] = load_float(view(t.weight, t.weight_dtype), c);
  with_source(t.dtype, [&](auto source) { normalize_tile<decltype(source)>(t, weight, y); });
}

}  // namespace

const RmsnormKernels kRmsnormKernels{add_residual, sum_of_squares, normalize, quantize};

MXFLASH_ISA_END
