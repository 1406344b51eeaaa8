// Means over sequences for quantize's `smooth`, bit-equal to ref.
//
//   mean[b, h, c] = (sum over partials p of (sum over tokens 128 p .. 128 p + 127 of x)) / length, all in this order
//
// A cluster of CTAs takes 128 bytes of the channels of one head of one sequence, a thread 16 bytes of one partial; or
// 32 channels, a thread one, where tensors do not lie in such pieces. 16 loads are ahead of the dependent additions,
// and each is followed by the next as soon as it is used. Partials go to the shared memory of the first CTA, which adds
// them in order: no workspace.
//
// Reads the tensor once, 128 bytes of a token at a time. A thread needs 256 bytes in flight and adds 1024 elements, so
// 4 sequences of 4096 tokens and 16 heads of 128 channels are 32768 threads, 63 KB in flight on each of 132 SMs, where
// 4.2 TB/s at a microsecond are 32 KB. The cluster is what lets a long sequence of few heads have that many.
#include <cooperative_groups.h>

#include <type_traits>

#include "ptx/griddepcontrol.cuh"
#include "quantize/quantize_kernel.cuh"

namespace mxflash {
namespace {

constexpr int kMeanPartial = 128;  // tokens; part of the contract
constexpr int kMeanAhead = 16;     // loads in flight of a thread
constexpr int kMeanBatch = 4;      // that are used, and issued, together
constexpr int kMeanGroups = 16;    // partials of a CTA at a time; at most
constexpr int kMeanCtas = 8;       // of a cluster; at most
constexpr int kMeanChannels = 32;  // of a cluster; at least

// kWide: elements of 16 bytes, else one.
template <Dtype kIn, bool kWide>
struct MeanPiece {
  static constexpr int kElements = kWide ? 16 / int(dtype_size(kIn)) : 1;
  static constexpr int kLanes = kWide ? 8 : 32;  // threads of a partial
  using Narrow = std::conditional_t<kIn == Dtype::f32, uint32_t, uint16_t>;
  std::conditional_t<kWide, uint4, Narrow> bits;

  __device__ __forceinline__ void add_to(float (&sum)[kElements]) const {
    if constexpr (kWide) {
      const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (kIn == Dtype::f32) {
          sum[k] += __uint_as_float(words[k]);
        } else {
          const float2 pair = widen<kIn>(words[k]);
          sum[2 * k] += pair.x;
          sum[2 * k + 1] += pair.y;
        }
      }
    } else {
      sum[0] += kIn == Dtype::f32 ? __uint_as_float(bits) : widen<kIn>(bits).x;
    }
  }
};

template <Dtype kIn, bool kWide, int kCtas>
__global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(MeanPiece<kIn, kWide>::kLanes* kMeanGroups)
    sequence_means(const __grid_constant__ DeviceTensor in, const __grid_constant__ TileGrid grid,
                   const __grid_constant__ DeviceTensor mean) {
  using Piece = MeanPiece<kIn, kWide>;
  constexpr int lanes = Piece::kLanes, elements = Piece::kElements, channels = lanes * elements;
  static_assert(channels >= kMeanChannels);
  __shared__ float partials[kCtas * kMeanGroups][channels];  // of the first CTA; so are
  __shared__ float totals[channels];
  ptx::griddepcontrol_launch_dependents();
  const auto cluster = cooperative_groups::this_cluster();
  const int thread = int(threadIdx.x), threads = int(blockDim.x);
  const int group = thread / lanes, lane = thread % lanes, groups = threads / lanes;
  const int rank = int(blockIdx.x % kCtas), slot = rank * groups + group;
  const uint32_t item = blockIdx.x / kCtas;
  const uint32_t chunks = uint32_t(ceil_div(grid.dim, channels)), heads = uint32_t(grid.heads);
  const int64_t b = item / chunks / heads, head = item / chunks % heads;
  const int64_t first_channel = int64_t(item % chunks) * channels, channel = first_channel + lane * elements;
  const Sequence s = sequence_at(grid.tokens, grid.seq, b);
  float(*const first_cta)[channels] = cluster.map_shared_rank(partials, 0);

  for (int c = thread; c < channels; c += threads) totals[c] = 0;
  const int64_t round_tokens = int64_t(kCtas) * groups * kMeanPartial;
  if (s.length > 0) cluster.barrier_arrive();
  for (int64_t round = 0; round < s.length; round += round_tokens) {
    const int64_t first = round + int64_t(slot) * kMeanPartial, left = channel < grid.dim ? s.length - first : 0;
    const int count = int(left < 0 ? 0 : left < kMeanPartial ? left : kMeanPartial);
    const auto* const from =
        static_cast<const char*>(in.data) + in.offset(s.start + first, head, channel) * dtype_size(kIn);
    const int64_t step = in.token_stride * dtype_size(kIn);
    Piece ahead[kMeanAhead];
    const auto load = [&](int i) {
      return i < count ? Piece{__ldg(reinterpret_cast<const decltype(Piece::bits)*>(from + i * step))} : Piece{};
    };
#pragma unroll
    for (int k = 0; k < kMeanAhead; ++k) ahead[k] = load(k);
    float sum[elements] = {};
    for (int i = 0; i < count; i += kMeanAhead) {
#pragma unroll
      for (int k = 0; k < kMeanAhead; k += kMeanBatch) {
#pragma unroll
        for (int j = k; j < k + kMeanBatch; ++j) ahead[j].add_to(sum);  // a sum is never -0, so + 0 changes nothing
#pragma unroll
        for (int j = k; j < k + kMeanBatch; ++j) ahead[j] = load(i + kMeanAhead + j);
      }
    }
    cluster.barrier_wait();  // the first CTA runs, and has used the partials of the round before
#pragma unroll
    for (int e = 0; e < elements; ++e) first_cta[slot][lane * elements + e] = sum[e];
    cluster.sync();
    if (rank == 0) {
      const int64_t rest = ceil_div(s.length - round, kMeanPartial);
      const int slots = int(rest < kCtas * groups ? rest : kCtas * groups);
      for (int c = thread; c < channels; c += threads) {
        float total = totals[c];
#pragma unroll 8
        for (int i = 0; i < slots; ++i) total += partials[i][c];
        totals[c] = total;
      }
    }
    if (round + round_tokens < s.length) cluster.barrier_arrive();
  }
  ptx::griddepcontrol_wait();
  if (rank != 0) return;
  for (int c = thread; c < channels && first_channel + c < grid.dim; c += threads) {
    mean.store(mean.offset(b, head, first_channel + c), s.length ? totals[c] / float(s.length) : 0.0f);
  }
}

template <Dtype kIn, bool kWide>
Status launch_means(const DeviceTensor& in, const TileGrid& grid, const DeviceTensor& mean, bool overlaps,
                    Stream stream) {
  // Eight partials make a CTA of two warps; with longer sequences there are more CTAs, then more partials of each.
  const int64_t partials = ceil_div(longest_sequence(grid.tokens, grid.seq), kMeanPartial);
  int ctas = 1;
  while (ctas < kMeanCtas && partials > 8 * ctas) ctas *= 2;
  const int64_t share = ceil_div(partials, ctas);
  const int64_t groups = share < 1 ? 1 : share < kMeanGroups ? share : kMeanGroups;
  using Piece = MeanPiece<kIn, kWide>;
  const int64_t chunks = ceil_div(grid.dim, Piece::kLanes * Piece::kElements);
  const Launch l{.what = "quantize: mean",
                 .grid = dim3(unsigned(grid.seq.batch * grid.heads * chunks * ctas)),
                 .block = dim3(unsigned(groups * Piece::kLanes)),
                 .stream = stream,
                 .overlaps = overlaps};
  switch (ctas) {
    case 1: return launch(l, sequence_means<kIn, kWide, 1>, in, grid, mean);
    case 2: return launch(l, sequence_means<kIn, kWide, 2>, in, grid, mean);
    case 4: return launch(l, sequence_means<kIn, kWide, 4>, in, grid, mean);
    default: return launch(l, sequence_means<kIn, kWide, 8>, in, grid, mean);
  }
}

template <Dtype kIn>
Status launch_from(const DeviceTensor& in, const TileGrid& grid, const DeviceTensor& mean, bool overlaps,
                   Stream stream) {
  const bool wide = in.channel_stride == 1 && in.aligned(16) && grid.dim % MeanPiece<kIn, true>::kElements == 0;
  return wide ? launch_means<kIn, true>(in, grid, mean, overlaps, stream)
              : launch_means<kIn, false>(in, grid, mean, overlaps, stream);
}

}  // namespace

Status check_mean(const char* op, const TileGrid& grid) {
  const int64_t chunks = ceil_div(grid.dim, kMeanChannels), batch = grid.seq.batch;
  if (is_small_product({batch, grid.heads, chunks}) && batch * grid.heads * chunks <= 0x7FFFFFFF / kMeanCtas) return {};
  return unsupported(
      "%s: sm90: sequences x heads x pieces of 32 channels must be fewer than 2^28 to smooth, got %lld x "
      "%lld x %lld",
      op, static_cast<long long>(batch), static_cast<long long>(grid.heads), static_cast<long long>(chunks));
}

Status launch_mean(const DeviceTensor& in, const TileGrid& grid, const DeviceTensor& mean, bool overlaps,
                   Stream stream) {
  switch (in.dtype) {
    case Dtype::bf16: return launch_from<Dtype::bf16>(in, grid, mean, overlaps, stream);
    case Dtype::f16: return launch_from<Dtype::f16>(in, grid, mean, overlaps, stream);
    default: return launch_from<Dtype::f32>(in, grid, mean, overlaps, stream);
  }
}

}  // namespace mxflash
