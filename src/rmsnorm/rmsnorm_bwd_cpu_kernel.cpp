// A row of rmsnorm_bwd in vectors; once per instruction set. fp32, with FMAs where the instruction set has them.
#include <algorithm>
#include <type_traits>

#include "mx/e8m0.h"
#include "rmsnorm/rmsnorm_bwd_cpu.h"
#include "runtime/tensor_access.h"
#include "simd/quantize_tile.h"
#include "simd/rows.h"
#include "simd/vector.h"

MXFLASH_ISA_BEGIN
namespace {

using namespace cpu;

constexpr int64_t kChunk = 256;  // channels of dx that wait in L1 for dh and their rounding
constexpr int kSums = 4;         // running vectors of a row's sum

// dy of a row: vectors from channel c on, and single elements.
template <class Source>
struct FloatGradient {
  const typename Source::Stored* p;
  explicit FloatGradient(const GradientRow& r) : p(static_cast<const typename Source::Stored*>(r.dy)) {}
  MXFLASH_INLINE F32 vector(int64_t c) const { return Source::load_vector(p + c); }
  float at(const GradientRow& r, int64_t c) const {
    return load_float({.data = const_cast<void*>(r.dy), .dtype = r.dy_dtype}, c);
  }
};

template <bool e4m3, bool per_channel>
struct MxGradient {
  const uint8_t *p, *scale;
  explicit MxGradient(const GradientRow& r) : p(static_cast<const uint8_t*>(r.dy)), scale(r.scale) {}
  MXFLASH_INLINE F32 vector(int64_t c) const {
    const F32 x = e4m3 ? load_e4m3(p + c) : load_e5m2(p + c);
    return mul(x, per_channel ? load_e8m0(scale + c) : broadcast(decode_e8m0(scale[c / kMxBlock])));
  }
  float at(const GradientRow& r, int64_t c) const {
    return decode_fp8(p[c], fp8_format(r.dy_dtype)) * decode_e8m0(scale[per_channel ? c : c / kMxBlock]);
  }
};

void prefetch_chunk(const void* row, Dtype dtype, int64_t first, int64_t count) {
  if (!row) return;
  const auto* p = static_cast<const uint8_t*>(row) + first * dtype_size(dtype);
  for (int64_t i = 0; i < count * dtype_size(dtype); i += 64) prefetch(p + i);
}

template <class H, class Dy>
void gradient(const GradientRow& r) {
  const auto* h = static_cast<const typename H::Stored*>(r.h);
  const Tensor h_row{.data = const_cast<void*>(r.h), .dtype = r.h_dtype};
  const Dy dy(r);
  const F32 rstd = broadcast(r.rstd);
  const int64_t whole = r.dim / kLanes * kLanes;

  F32 sums[kSums];
  for (F32& sum : sums) sum = broadcast(0.0f);
  const auto add_vector = [&](int64_t c, F32& sum) {
    const F32 x = mul(H::load_vector(h + c), rstd), d = dy.vector(c);
    store(r.dw + c, fma(d, x, load(r.dw + c)));
    sum = fma(mul(d, load(r.weight + c)), x, sum);
  };
  int64_t c = 0;
  for (; c + kSums * kLanes <= whole; c += kSums * kLanes) {
    for (int i = 0; i < kSums; ++i) add_vector(c + i * kLanes, sums[i]);
  }
  for (; c < whole; c += kLanes) add_vector(c, sums[0]);
  float sum = reduce_add(add(add(sums[0], sums[2]), add(sums[1], sums[3])));
  for (; c < r.dim; ++c) {
    const float x = load_float(h_row, c) * r.rstd, d = dy.at(r, c);
    r.dw[c] += d * x;
    sum += d * r.weight[c] * x;
  }

  const float row_mean = sum / float(r.dim);
  const F32 minus_mean = broadcast(-row_mean);
  alignas(64) float dx[kChunk], dh[kChunk];
  for (int64_t first = 0; first < r.dim; first += kChunk) {
    const int64_t end = std::min(first + kChunk, r.dim), count = end - first;
    prefetch_chunk(r.next_h, r.h_dtype, first, count);
    prefetch_chunk(r.next_dy, r.dy_dtype, first, count);
    for (c = first; c + kLanes <= end; c += kLanes) {
      const F32 x = mul(H::load_vector(h + c), rstd), g = mul(dy.vector(c), load(r.weight + c));
      store(dx + c - first, mul(rstd, fma(x, minus_mean, g)));
    }
    for (; c < end; ++c) {
      const float x = load_float(h_row, c) * r.rstd;
      dx[c - first] = r.rstd * (dy.at(r, c) * r.weight[c] - x * row_mean);
    }
    if (r.dh) {
      load_row({.data = const_cast<void*>(r.dh), .dtype = r.dh_dtype}, first, dh, count);
      int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes) store(dx + i, add(load(dx + i), load(dh + i)));
      for (; i < count; ++i) dx[i] += dh[i];
    }
    store_row({.data = r.dx, .dtype = r.dx_dtype}, first, dx, count);
  }
}

template <class H>
void gradient_of(const GradientRow& r) {
  if (r.dy_dtype == Dtype::e4m3) {
    return r.scale_per_channel ? gradient<H, MxGradient<true, true>>(r) : gradient<H, MxGradient<true, false>>(r);
  }
  if (r.dy_dtype == Dtype::e5m2) {
    return r.scale_per_channel ? gradient<H, MxGradient<false, true>>(r) : gradient<H, MxGradient<false, false>>(r);
  }
  with_source(r.dy_dtype, [&](auto source) { gradient<H, FloatGradient<decltype(source)>>(r); });
}

void row(const GradientRow& r) {
  with_source(r.h_dtype, [&](auto source) { gradient_of<decltype(source)>(r); });
}

void add_floats(const float* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, add(load(to + i), load(from + i)));
  for (; i < n; ++i) to[i] += from[i];
}

}  // namespace

const RmsnormBwdKernels kRmsnormBwdKernels{row, add_floats};

MXFLASH_ISA_END
