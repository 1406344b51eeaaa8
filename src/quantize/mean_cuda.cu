// Means over sequences for quantize's `smooth`, bit-equal to ref.
//
//   mean[b, h, c] = (sum over partials p of (sum over tokens 128 p .. 128 p + 127 of x)) / length, all in this order
//
// A thread has four channels of one partial, and many loads ahead of the dependent additions; sixteen threads read 64
// channels of a token, 128 bytes of BF16. A CTA has up to 32 partials, and the partials of a long sequence are spread
// over the 8 CTAs of a cluster, so that a batch of few sequences and heads fills the card, too. They meet in shared
// memory, where the first CTA adds them up in order: no workspace. 16384 tokens, 16 heads of 128 channels are 65536
// threads with 256 bytes of loads in flight each, whatever the lengths.
#include <cooperative_groups.h>
#include <cuda_fp16.h>

#include "quantize/quantize_cuda.cuh"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

constexpr int kMeanPartial = 128;  // tokens; part of the contract
constexpr int kMeanLanes = 16;     // threads of a partial,
constexpr int kMeanQuad = 4;       // with so many channels each
constexpr int kMeanChannels = kMeanLanes * kMeanQuad;
constexpr int kMeanGroups = 32;  // partials of a CTA, at most
constexpr int kMeanCtas = 8;     // of a cluster, for sequences of at least so many partials:
constexpr int kMeanLong = 32;

template <Dtype kIn>
__device__ float widen(uint32_t bits) {  // of 16
  return kIn == Dtype::bf16 ? decode_bf16(uint16_t(bits)) : __half2float(__ushort_as_half(uint16_t(bits)));
}

// Four channels of a token, as they are in memory.
template <Dtype kIn>
struct MeanQuad {
  std::conditional_t<kIn == Dtype::f32, float4, uint2> bits{};
  __device__ void add_to(float4& sum) const {
    if constexpr (kIn == Dtype::f32) {
      sum = {sum.x + bits.x, sum.y + bits.y, sum.z + bits.z, sum.w + bits.w};
    } else {
      sum = {sum.x + widen<kIn>(bits.x & 0xFFFF), sum.y + widen<kIn>(bits.x >> 16), sum.z + widen<kIn>(bits.y & 0xFFFF),
             sum.w + widen<kIn>(bits.y >> 16)};
    }
  }
};

// The sum over `count` tokens, of channels side by side and aligned.
template <Dtype kIn>
__device__ float4 sum_of_quads(const DeviceTensor& in, int64_t at, int count) {
  constexpr int kAhead = kIn == Dtype::f32 ? 16 : 32;
  using Quad = MeanQuad<kIn>;
  const auto* from = reinterpret_cast<const Quad*>(static_cast<const uint8_t*>(in.data) + at * dtype_size(kIn));
  const int64_t stride = in.token_stride / kMeanQuad;
  float4 sum{};
  int i = 0;
  for (; i + kAhead <= count; i += kAhead) {
    Quad x[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) x[k] = from[(i + k) * stride];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) x[k].add_to(sum);
  }
#pragma unroll 1
  for (; i < count; ++i) from[i * stride].add_to(sum);
  return sum;
}

// The same of any channels; those beyond dim are zero.
__device__ float4 sum_of_channels(const DeviceTensor& in, int64_t at, int count, int64_t channels) {
  float sum[kMeanQuad] = {};
  for (int i = 0; i < count; ++i) {
    for (int c = 0; c < kMeanQuad; ++c) {
      if (c < channels) sum[c] += in.load(at + i * in.token_stride + c * in.channel_stride);
    }
  }
  return {sum[0], sum[1], sum[2], sum[3]};
}

// With no number of CTAs in its bounds ptxas saves registers, and waits behind every third load.
template <Dtype kIn, int kCtas>
__global__ void __launch_bounds__(kMeanGroups* kMeanLanes, 1) __cluster_dims__(kCtas, 1, 1)
    sequence_means(const __grid_constant__ DeviceTensor in, const __grid_constant__ TileGrid grid,
                   const __grid_constant__ DeviceTensor mean, bool quads) {
  __shared__ float4 partials[kMeanGroups][kMeanLanes];
  const auto cluster = cooperative_groups::this_cluster();
  const int group = int(threadIdx.x) / kMeanLanes, lane = int(threadIdx.x) % kMeanLanes;
  const int groups = int(blockDim.x) / kMeanLanes, rank = int(blockIdx.x % kCtas);
  const uint32_t item = blockIdx.x / kCtas, chunks = uint32_t(ceil_div(grid.dim, kMeanChannels));
  const uint32_t heads = uint32_t(grid.heads);
  const int64_t b = item / chunks / heads, head = item / chunks % heads;
  const int64_t channel = int64_t(item % chunks) * kMeanChannels + lane * kMeanQuad, channels = grid.dim - channel;
  const Sequence s = sequence_at(grid.tokens, grid.seq, b);

  const auto meet = [&] {
    if constexpr (kCtas > 1) {
      cluster.sync();
    } else {
      __syncthreads();
    }
  };

  float4 total{};
  const int64_t step = int64_t(kCtas) * groups * kMeanPartial;
  for (int64_t round = 0; round < s.length; round += step) {
    const int64_t first = round + (int64_t(rank) * groups + group) * kMeanPartial, left = s.length - first;
    const int count = int(left < 0 ? 0 : left < kMeanPartial ? left : kMeanPartial);
    const int64_t at = in.offset(s.start + first, head, channel);
    float4 sum{};
    if (count > 0 && channels > 0) {
      sum = quads ? sum_of_quads<kIn>(in, at, count) : sum_of_channels(in, at, count, channels);
    }
    partials[group][lane] = sum;
    meet();
    if (rank == 0 && group == 0) {
      for (int r = 0; r < kCtas; ++r) {
        const float4(*const from)[kMeanLanes] = cluster.map_shared_rank(partials, unsigned(r));
        const int64_t present = ceil_div(s.length - round - int64_t(r) * groups * kMeanPartial, kMeanPartial);
        const int end = int(present < groups ? present : groups);
#pragma unroll 8
        for (int i = 0; i < end; ++i) {
          const float4 x = from[i][lane];
          total = {total.x + x.x, total.y + x.y, total.z + x.z, total.w + x.w};
        }
      }
    }
    meet();  // nobody leaves, or writes anew, what is still read
  }
  if (rank != 0 || group != 0) return;
  const float sum[kMeanQuad] = {total.x, total.y, total.z, total.w};
  for (int c = 0; c < kMeanQuad; ++c) {
    if (c < channels) mean.store(mean.offset(b, head, channel + c), s.length ? sum[c] / float(s.length) : 0.0f);
  }
}

template <int kCtas>
Status launch_means(Launch l, const DeviceTensor& in, const TileGrid& grid, const DeviceTensor& mean) {
  l.grid.x *= kCtas;
  const bool quads =
      in.channel_stride == 1 && grid.dim % kMeanQuad == 0 && in.aligned(kMeanQuad * dtype_size(in.dtype));
  switch (in.dtype) {
    case Dtype::bf16: return launch(l, sequence_means<Dtype::bf16, kCtas>, in, grid, mean, quads);
    case Dtype::f16: return launch(l, sequence_means<Dtype::f16, kCtas>, in, grid, mean, quads);
    default: return launch(l, sequence_means<Dtype::f32, kCtas>, in, grid, mean, quads);
  }
}

}  // namespace

Status check_mean(const char* op, const TileGrid& grid) {
  const int64_t chunks = ceil_div(grid.dim, kMeanChannels), batch = grid.seq.batch;
  if (is_small_product({batch, grid.heads, chunks}) && batch * grid.heads * chunks <= 0x7FFFFFFF / kMeanCtas) return {};
  return unsupported(
      "%s: sm90: sequences x heads x pieces of 64 channels must be fewer than 2^28 to smooth, got %lld x "
      "%lld x %lld",
      op, static_cast<long long>(batch), static_cast<long long>(grid.heads), static_cast<long long>(chunks));
}

Status launch_mean(const DeviceTensor& in, const TileGrid& grid, const DeviceTensor& mean, Stream stream) {
  const int64_t partials = ceil_div(longest_sequence(grid.tokens, grid.seq), kMeanPartial);
  const bool is_long = partials >= kMeanLong;
  const int64_t share = ceil_div(partials, is_long ? kMeanCtas : 1);
  const int64_t groups = share < 1 ? 1 : share < kMeanGroups ? share : kMeanGroups;
  const Launch l{.what = "quantize: mean",
                 .grid = dim3(unsigned(grid.seq.batch * grid.heads * ceil_div(grid.dim, kMeanChannels))),
                 .block = dim3(unsigned(groups * kMeanLanes)),
                 .stream = stream};
  return is_long ? launch_means<kMeanCtas>(l, in, grid, mean) : launch_means<1>(l, in, grid, mean);
}

}  // namespace mxflash
