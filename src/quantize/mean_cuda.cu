// Means over sequences for quantize's `smooth`, bit-equal to ref.
//
//   mean[b, h, c] = (sum over partials p of (sum over tokens 128 p .. 128 p + 127 of x)) / length, all in this order
//
// A CTA takes 16 channels of one head of one sequence, a thread one channel of one partial, 16 loads ahead of the
// dependent additions. After a round of up to 64 partials, 16 threads add these up in order. No workspace: a partial
// passes through shared memory. Reads the tensor once, 2 bytes and about 3 instructions per BF16 element, 32 bytes of a
// token at a time, and neighbouring CTAs read the channels beside them. One sequence of 16384 tokens, 16 heads of 128
// channels is 128 CTAs with 4 MB of loads in flight.
#include <cuda_fp16.h>

#include "quantize/quantize_cuda.cuh"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

constexpr int kMeanPartial = 128;  // tokens; part of the contract
constexpr int kMeanAhead = 16;     // loads in flight of a thread
constexpr int kMeanGroups = 64;    // of threads, each with a partial; at most
constexpr int kMeanChannels = 16;  // and threads of a group

template <Dtype kIn>
__device__ float load(const void* data, int64_t at) {
  if constexpr (kIn == Dtype::bf16) return decode_bf16(static_cast<const uint16_t*>(data)[at]);
  if constexpr (kIn == Dtype::f16) return __half2float(static_cast<const __half*>(data)[at]);
  if constexpr (kIn == Dtype::f32) return static_cast<const float*>(data)[at];
}

template <Dtype kIn>
__global__ void __launch_bounds__(kMeanGroups* kMeanChannels)
    sequence_means(const __grid_constant__ DeviceTensor in, const __grid_constant__ TileGrid grid,
                   const __grid_constant__ DeviceTensor mean) {
  __shared__ float partials[kMeanGroups][kMeanChannels];
  const int group = int(threadIdx.x) / kMeanChannels, lane = int(threadIdx.x) % kMeanChannels;
  const int groups = int(blockDim.x) / kMeanChannels;
  const uint32_t chunks = uint32_t(ceil_div(grid.dim, kMeanChannels)), heads = uint32_t(grid.heads);
  const int64_t b = blockIdx.x / chunks / heads, head = blockIdx.x / chunks % heads;
  const int64_t channel = int64_t(blockIdx.x % chunks) * kMeanChannels + lane;
  const bool in_dim = channel < grid.dim;
  const Sequence s = sequence_at(grid.tokens, grid.seq, b);

  float total = 0;
  for (int64_t round = 0; round < s.length; round += int64_t(groups) * kMeanPartial) {
    const int64_t first = round + int64_t(group) * kMeanPartial;
    const int64_t left = s.length - first;
    const int count = int(left < 0 ? 0 : left < kMeanPartial ? left : kMeanPartial);
    float partial = 0;
    if (in_dim) {
      const int64_t at = in.offset(s.start + first, head, channel);
      for (int i = 0; i < count; i += kMeanAhead) {
        float x[kMeanAhead];
#pragma unroll
        for (int k = 0; k < kMeanAhead; ++k) {
          x[k] = i + k < count ? load<kIn>(in.data, at + (i + k) * in.token_stride) : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < kMeanAhead; ++k) partial += x[k];  // a sum is never -0, so + 0 changes nothing
      }
    }
    partials[group][lane] = partial;
    __syncthreads();
    if (group == 0) {
      for (int i = 0; i < groups && round + int64_t(i) * kMeanPartial < s.length; ++i) total += partials[i][lane];
    }
    __syncthreads();
  }
  if (group == 0 && in_dim) mean.store(mean.offset(b, head, channel), s.length ? total / float(s.length) : 0.0f);
}

}  // namespace

Status check_mean(const char* op, const TileGrid& grid) {
  const int64_t chunks = ceil_div(grid.dim, kMeanChannels), batch = grid.seq.batch;
  if (is_small_product({batch, grid.heads, chunks}) && batch * grid.heads * chunks <= 0x7FFFFFFF) return {};
  return unsupported(
      "%s: sm90: sequences x heads x pieces of 16 channels must be fewer than 2^31 to smooth, got %lld x "
      "%lld x %lld",
      op, static_cast<long long>(batch), static_cast<long long>(grid.heads), static_cast<long long>(chunks));
}

Status launch_mean(const DeviceTensor& in, const TileGrid& grid, const DeviceTensor& mean, Stream stream) {
  const int64_t partials = ceil_div(longest_sequence(grid.tokens, grid.seq), kMeanPartial);
  const int64_t groups = partials < 1 ? 1 : partials < kMeanGroups ? partials : kMeanGroups;
  const int64_t items = grid.seq.batch * grid.heads * ceil_div(grid.dim, kMeanChannels);
  const Launch l{.what = "quantize: mean",
                 .grid = dim3(unsigned(items)),
                 .block = dim3(unsigned(groups * kMeanChannels)),
                 .stream = stream};
  switch (in.dtype) {
    case Dtype::bf16: return launch(l, sequence_means<Dtype::bf16>, in, grid, mean);
    case Dtype::f16: return launch(l, sequence_means<Dtype::f16>, in, grid, mean);
    default: return launch(l, sequence_means<Dtype::f32>, in, grid, mean);
  }
}

}  // namespace mxflash
