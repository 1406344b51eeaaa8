// The passes over rows of attention_bwd with exact operands: before its kernels delta and lse in binades, after them
// the sum of a shared query's dq. Both are bound by memory.
#include <cmath>

#include "attention/accumulators.cuh"
#include "attention/attention_bwd_sm90_bf16.cuh"
#include "attention/mx_piece.cuh"
#include "runtime/launch.cuh"

namespace mxflash::bwd_sm90_bf16 {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 8;  // of a row: an atom of the image, 8 channels a lane
constexpr int kCtaRows = kThreads / kLanes;
constexpr float kLog2e = 1.44269504088896341f;

struct StatisticsParams {
  Tensor out, lse, dlse, v_mean;
  const uint16_t* dout;
  Bf16ImageShape shape;
  TokenAxis axis;
  int32_t group, head_dim_v;
  bool wide;  // pieces of out are aligned to 16 bytes
  float* statistics;
};

// Eight elements from `at` on.
__device__ __forceinline__ void load_piece(const Tensor& t, bool wide, int64_t at, float (&x)[8]) {
  if (t.dtype == Dtype::f32) {
    const float* from = static_cast<const float*>(t.data) + at;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = from[i];
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(t.data) + at;
  uint32_t pair[4];
  if (wide) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    pair[0] = v.x, pair[1] = v.y, pair[2] = v.z, pair[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = from[2 * i] | uint32_t(from[2 * i + 1]) << 16;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool bf16 = t.dtype == Dtype::bf16;
    x[2 * i] = bf16 ? __uint_as_float(pair[i] << 16) : ptx::low_f16(pair[i]);
    x[2 * i + 1] = bf16 ? __uint_as_float(pair[i] & 0xFFFF0000u) : ptx::high_f16(pair[i]);
  }
}

// kAtoms: of a row of the image.
template <int kAtoms>
__global__ void __launch_bounds__(kThreads) statistics_kernel(const __grid_constant__ StatisticsParams p) {
  const int64_t first = (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * kCtaRows;
  if (first >= p.shape.tokens) return;
  const int32_t padded = int32_t(first) + int32_t(threadIdx.x) / kLanes, lane = int32_t(threadIdx.x) % kLanes;
  const int32_t head = int32_t(blockIdx.x), kv_head = head / p.group;  // neighbours read the same rows of out
  const Owner owner = p.axis.owner(padded);
  const int64_t row = padded - owner.sequence.padded_start, token = owner.sequence.start + row;
  const bool there = row < owner.sequence.length;
  float lse = -INFINITY;
  if (there) lse = static_cast<const float*>(p.lse.data)[head * p.lse.stride[0] + token];
  float delta = 0;
  if (there) {
    const float* mean = nullptr;
    if (p.v_mean) {
      mean = static_cast<const float*>(p.v_mean.data) + owner.index * p.v_mean.stride[0] + kv_head * p.v_mean.stride[1];
    }
    const int64_t at = token * p.out.stride[0] + head * p.out.stride[1];
    float out[kAtoms][8] = {};
    uint4 dout[kAtoms] = {};
#pragma unroll
    for (int n = 0; n < kAtoms; ++n) {  // all loads are in flight together
      const int channel = n * int(kAtomChannels) + 8 * lane;
      if (channel >= p.head_dim_v) break;
      load_piece(p.out, p.wide, at + channel, out[n]);
      dout[n] = *reinterpret_cast<const uint4*>(p.dout + p.shape.offset(head, padded, channel));
    }
#pragma unroll
    for (int n = 0; n < kAtoms; ++n) {
      const int channel = n * int(kAtomChannels) + 8 * lane;
      if (channel >= p.head_dim_v) break;
      const uint32_t pair[4] = {dout[n].x, dout[n].y, dout[n].z, dout[n].w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float x = mean ? out[n][i] - mean[channel + i] : out[n][i];
        delta = fmaf(x, __uint_as_float(i & 1 ? pair[i / 2] & 0xFFFF0000u : pair[i / 2] << 16), delta);
      }
    }
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) delta += __shfl_xor_sync(~0u, delta, step);
  if (lane != 0) return;
  if (lse == -INFINITY) delta = 0;
  if (p.dlse && lse != -INFINITY) delta -= static_cast<const float*>(p.dlse.data)[head * p.dlse.stride[0] + token];
  float* tile = p.statistics + (head * p.shape.tokens + padded) / kTile * kTileStatistics;
  tile[statistics_index(padded % kTile)] = lse == -INFINITY ? INFINITY : lse * kLog2e;
  tile[kTile + statistics_index(padded % kTile)] = delta;
}

struct SumParams {
  const float* partial;
  Tensor dq;
  int64_t size;  // of the query
  int32_t heads, dim, batch;
};

__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ SumParams p) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= p.size) return;
  float sum = 0;
#pragma unroll 4
  for (int32_t b = 0; b < p.batch; ++b) sum += p.partial[b * p.size + at];
  const int64_t row = at / p.dim;
  store_element(p.dq, row / p.heads * p.dq.stride[0] + row % p.heads * p.dq.stride[1] + at % p.dim, sum);
}

}  // namespace

Status write_statistics(const AttentionBwd& a, const uint16_t* dout, const Bf16ImageShape& shape, float* statistics,
                        Stream stream) {
  const AttentionShape s = AttentionShape::of(a);
  const int64_t size = dtype_size(a.out.dtype);
  const StatisticsParams params{.out = a.out,
                                .lse = a.lse,
                                .dlse = a.dlse,
                                .v_mean = a.v_mean,
                                .dout = dout,
                                .shape = shape,
                                .axis = TokenAxis::of(s.total_out, s.seq_out()),
                                .group = int32_t(s.group),
                                .head_dim_v = int32_t(s.head_dim_v),
                                .wide = reinterpret_cast<uintptr_t>(a.out.data) % 16 == 0 &&
                                        a.out.stride[0] * size % 16 == 0 && a.out.stride[1] * size % 16 == 0,
                                .statistics = statistics};
  const int64_t blocks = shape.tokens / kCtaRows, z = ceil_div(blocks, 65535);
  const Launch at{"attention_bwd: sm90_bf16: statistics of rows",
                  dim3(uint32_t(shape.heads), uint32_t(z ? ceil_div(blocks, z) : 0), uint32_t(z)), kThreads, 0, stream};
  switch (shape.dim / kAtomChannels) {
    case 1: return launch(at, statistics_kernel<1>, params);
    case 2: return launch(at, statistics_kernel<2>, params);
    case 3: return launch(at, statistics_kernel<3>, params);
    default: return launch(at, statistics_kernel<4>, params);  // 256: more channels no head has
  }
}

Status sum_sequences(const AttentionBwd& a, const float* partial, Stream stream) {
  const AttentionShape s = AttentionShape::of(a);
  const SumParams params{.partial = partial,
                         .dq = a.dq,
                         .size = s.total_q * s.num_heads_q * s.head_dim,
                         .heads = int32_t(s.num_heads_q),
                         .dim = int32_t(s.head_dim),
                         .batch = int32_t(s.batch)};
  const Launch at{"attention_bwd: sm90_bf16: sum over sequences",
                  dim3(uint32_t((params.size + kThreads - 1) / kThreads)), kThreads, 0, stream};
  return launch(at, sum_kernel, params);
}

}  // namespace mxflash::bwd_sm90_bf16
