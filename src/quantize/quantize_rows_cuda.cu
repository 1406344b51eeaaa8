// Quantizer for CUDA cards: E4M3 from fp32, or smoothed, or rotated in groups of up to 128 channels, where they lie
// side by side in 16-byte pieces; any block, layout and image. The same bytes as quantize_ref.cpp.
//
// quantize_rows: a CTA takes 128 tokens by up to 128 channels of a head, a thread one row of them, all of it in
// registers: butterflies of any stride are additions of its own values, in the order of hadamard(), and cost neither
// shuffles nor shared memory. A warp's 32 rows are whole blocks.
//
//   1. Rows come to shared memory by asynchronous copies, 16 bytes a lane, neighbours side by side. Meanwhile every
//      thread finds the sign and the mean of one channel.
//   2. A thread reads its row, subtracts means, rotates. Of each 32 channels a lane then knows one scale: its row's,
//   the
//      block's, or that of the channel of its number. Codes replace the row in shared memory.
//   3. A warp writes its codes as payload, 8 bytes a lane, rows side by side; rebased to the scale of the tile they are
//      its image, for values transposed 8 x 8 in registers.
//
// Budget, BF16 to square32: 3 bytes an element, so 4.2 TB/s, what a copy reaches on an H200, are 6 elements a clock and
// SM. A thread with 128 channels executes some 2500 instructions (SASS), 20 an element, 118 of 128 a clock: as much
// time as memory takes, 24 us for 16384 tokens of 16 heads, but 168 registers leave three CTAs an SM, which do not fill
// the issue slots: 47 us. CTAs stay, and load the next tile while they compute (from fp32, for want of shared memory,
// behind it).
#include <algorithm>

#include "ptx/async_copy.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "quantize/quantize_kernel.cuh"

namespace mxflash {
namespace {

constexpr int kRows = kTileTokens;  // and threads
constexpr int kWarps = kRows / 32;
constexpr int kBlock = int(kMxBlock);
constexpr int kPiece = 8;  // codes that are written together

// Rows in shared memory. One piece of 16 bytes too long, so that lanes that read theirs meet different banks.
template <Dtype kIn, int kChannels>
struct RowPlan {
  static constexpr int kSize = int(dtype_size(kIn));
  static constexpr int kLoads = kChannels * kSize / 16;
  static constexpr int kPitch = kLoads * 16 + 16;
  static constexpr int kBytes = kRows * kPitch;
};

// What a CTA takes, one after the other: the next one of the grid takes the next head, so that neighbours read the same
// rows of the tensor.
struct RowItem {
  uint32_t tile, head;
  static __device__ RowItem first(uint32_t heads) { return {blockIdx.x / heads, blockIdx.x % heads}; }
  __device__ RowItem next(uint32_t heads) const {
    const RowItem step{gridDim.x / heads, gridDim.x % heads};
    const bool wraps = head + step.head >= heads;
    return {tile + step.tile + wraps, head + step.head - (wraps ? heads : 0)};
  }
};

// What 128 threads take of the tensor, and this thread's place in it.
struct RowSpot {
  RowItem item;
  int rows;  // of the tile that hold tokens
  int first_channel;
  int channels;  // from there on that exist
  int64_t first_token;
  __device__ int64_t padded_row() const { return int64_t(item.tile) * kRows; }
  __device__ static int lane() { return int(threadIdx.x) % 32; }
  __device__ static int warp() { return int(threadIdx.x) / 32 % kWarps; }
  __device__ static int first_row() { return warp() * kBlock; }  // of the warp
};

// Rows on their way, and in use.
template <Dtype kIn, int kChannels>
struct alignas(16) RowBuffer {
  uint8_t rows[RowPlan<kIn, kChannels>::kBytes];
  float mean[kChannels];  // of rows that hold a token
  RowSpot at;             // here, and RowShared::most there: registers are for the rows
};

// What the threads of a CTA find out for each other.
template <int kChannels>
struct alignas(16) RowShared {
  float sign[kChannels];                // of the rotation: 1 or -1
  float zero[kChannels];                // the mean of rows that hold no token
  float factor[kWarps][kChannels];      // of col32's channels
  float most[kRows];                    // a thread's own largest rounded amax
  uint8_t scale[2][kWarps][kChannels];  // of a copy: a lane's for each 32 channels
};

// ---- 1: loads ---------------------------------------------------------------------------------------------------

template <Dtype kIn, int kChannels>
__device__ __forceinline__ void load_rows(const QuantizeParams& p, const RowSpot& at, uint8_t* rows) {
  using Plan = RowPlan<kIn, kChannels>;
  constexpr int step = 32 / Plan::kLoads;  // rows that a warp loads at a time
  const int piece = at.lane() % Plan::kLoads, first = at.first_row() + at.lane() / Plan::kLoads;
  const int channel = piece * (16 / Plan::kSize);
  const char* from = static_cast<const char*>(p.in.data) +
                     p.in.offset(at.first_token + first, at.item.head, at.first_channel + channel) * Plan::kSize;
  uint8_t* const to = rows + first * Plan::kPitch + piece * 16;
#pragma unroll 4
  for (int i = 0; i < Plan::kLoads; ++i) {
    const bool present = channel < at.channels && first + i * step < at.rows;
    ptx::async_copy_16(ptx::shared_address(to + i * step * Plan::kPitch), from, present);
    from += step * p.in.token_stride * Plan::kSize;
  }
}

// ---- 2: a thread's row ------------------------------------------------------------------------------------------

template <Dtype kIn, int kChannels>
__device__ __forceinline__ void read_row(const uint8_t* row, float (&x)[kChannels]) {
  const auto* const pieces = reinterpret_cast<const uint4*>(row);
#pragma unroll
  for (int i = 0; i < RowPlan<kIn, kChannels>::kLoads; ++i) {
    if (i % 4 == 0) __syncwarp();  // keeps ptxas from loading all pieces at once
    const uint4 piece = pieces[i];
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (kIn == Dtype::f32) {
        x[4 * i + k] = __uint_as_float(words[k]);
      } else {
        const float2 pair = widen<kIn>(words[k]);
        x[8 * i + 2 * k] = pair.x;
        x[8 * i + 2 * k + 1] = pair.y;
      }
    }
  }
}

template <int kChannels>
__device__ __forceinline__ void subtract(const float (&mean)[kChannels], float (&x)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; c += 4) {
    const float4 m = *reinterpret_cast<const float4*>(&mean[c]);
    x[c] -= m.x, x[c + 1] -= m.y, x[c + 2] -= m.z, x[c + 3] -= m.w;
  }
}

// As rotate() does, but for its factor. Signs are part of the first butterfly: a product with one is exact.
template <int kChannels>
__device__ __forceinline__ void rotate_row(const float (&sign)[kChannels], int group, float (&x)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; c += 4) {
    if (c % 32 == 0) __syncwarp();  // keeps ptxas from loading all signs at once
    const float4 quad = *reinterpret_cast<const float4*>(&sign[c]);
    const float s[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      const float a = x[c + k], b = s[k + 1] * x[c + k + 1];
      x[c + k] = __fmaf_rn(s[k], a, b);
      x[c + k + 1] = __fmaf_rn(s[k], a, -b);
    }
  }
#pragma unroll
  for (int stride = 2; stride < kChannels; stride *= 2) {
    if (stride >= kPiece && group <= stride) continue;  // groups have at least 8 channels
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (c & stride) continue;
      const float a = x[c], b = x[c + stride];
      x[c] = a + b;
      x[c + stride] = a - b;
    }
  }
}

// The largest magnitude that this lane's scale is made from, NaN if one of them is. x: 32 channels of the lane's row.
template <MxBlock kKind>
__device__ __forceinline__ float lane_amax(const float* x) {
  if constexpr (kKind == MxBlock::col32) {
    const int lane = int(threadIdx.x) % 32;
    uint32_t most = 0;
#pragma unroll
    for (int c = 0; c < kBlock; ++c) {  // magnitudes compare as integers
      const uint32_t of_channel = __reduce_max_sync(~0u, magnitude_bits(ptx::hidden(x[c])));
      if (lane == c) most = of_channel;
    }
    return __uint_as_float(most);
  } else {
    float most = 0;
#pragma unroll
    for (int c = 0; c < kBlock; ++c) most = ptx::max_magnitude(most, x[c]);
    if (kKind == MxBlock::row32) return most;
    return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));  // magnitudes compare as integers
  }
}

// Where scales are at least this one, norm * x / scale may be rounded once, with norm / scale as one factor: products
// with norm that are subnormal, whose rounding is coarser, are zeros there.
constexpr uint32_t kLeastFoldedScale = 11;

// Scales of a copy of norm * x, and codes over this thread's row. Returns the largest rounded amax of its scales.
template <MxBlock kKind, int kChannels>
__device__ __forceinline__ float quantize_row(MxRule rule, const RowSpot& at, float norm, const float (&x)[kChannels],
                                              float (&factors)[kChannels], uint8_t (&scales)[kChannels],
                                              uint8_t* codes) {
  float most = 0;
#pragma unroll
  for (int first = 0; first < kChannels; first += kBlock) {
    const float amax = lane_amax<kKind>(&x[first]) * norm;
    const uint32_t scale = scale_of(amax, rule);
    const bool folded = !__any_sync(~0u, scale < kLeastFoldedScale);
    const float factor = reciprocal(scale) * (folded ? norm : 1.0f);
    most = fmaxf(most, rounded_amax(amax, scale));
    scales[first + at.lane()] = uint8_t(scale);
    if constexpr (kKind == MxBlock::col32) {
      factors[first + at.lane()] = factor;
      __syncwarp();
    }
    const auto encode = [&](auto&& value) {
#pragma unroll
      for (int c = first; c < first + kBlock; c += 16) {
        uint32_t word[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int q = c + 4 * k;
          float4 f{factor, factor, factor, factor};
          if constexpr (kKind == MxBlock::col32) f = *reinterpret_cast<const float4*>(&factors[q]);
          word[k] = ptx::pack_e4m3(value(q) * f.x, value(q + 1) * f.y, value(q + 2) * f.z, value(q + 3) * f.w);
        }
        *reinterpret_cast<uint4*>(codes + c) = {word[0], word[1], word[2], word[3]};
      }
    };
    if (folded) {
      encode([&](int c) { return x[c]; });
    } else {
      encode([&](int c) { return norm * x[c]; });
    }
  }
  __syncwarp();
  return most;
}

// ---- 3: outputs -------------------------------------------------------------------------------------------------

// codes: of the tile's first row.
template <int kChannels, int kPitch>
__device__ __forceinline__ void write_copy(const QuantizeParams& p, const RowSpot& at, const DeviceMx& out,
                                           const uint8_t (&scales)[kChannels], const uint8_t* codes) {
  if (out.scale) {
#pragma unroll
    for (int c = at.lane(); c < kChannels; c += 32) {
      store_lane_scale(out, out.block, p.grid, at.item.head, at.padded_row() + at.first_row(), at.first_channel + c,
                       scales[c]);
    }
  }
  if (!out.payload.data) return;
  constexpr int pieces = kChannels / kPiece, step = 32 / pieces;  // of a row; rows that a warp stores at a time
  const int channel = at.lane() % pieces * kPiece, first = at.first_row() + at.lane() / pieces;
  const int rows = channel < at.channels ? at.rows : 0;
  uint8_t* const to = out.row(at.first_token + first, at.item.head) + at.first_channel + channel;
#pragma unroll
  for (int i = 0; i < pieces; ++i) {
    const int row = first + i * step;
    ptx::store_if(row < rows, to + i * step * out.payload.token_stride,
                  *reinterpret_cast<const uint2*>(codes + row * kPitch + channel));
  }
}

// 2^(block exponent - tile exponent) of the 8 channels of a piece, as FP16 pairs: all alike, or one a channel.
template <MxBlock kKind>
struct PieceFactors {
  uint32_t pair[kKind == MxBlock::col32 ? 4 : 1];
  // scales: of the 32 rows or channels of the piece's block.
  __device__ __forceinline__ PieceFactors(const uint8_t* scales, int row, int channel, uint32_t tile_scale) {
    const uint8_t* const mine = scales + (kKind == MxBlock::col32 ? channel % kBlock : row % kBlock);
    if constexpr (kKind == MxBlock::col32) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        pair[k] = rebase_factor(mine[2 * k], tile_scale) | rebase_factor(mine[2 * k + 1], tile_scale) << 16;
      }
    } else {
      pair[0] = rebase_factor(*mine, tile_scale) * 0x10001;
    }
  }
  __device__ __forceinline__ uint2 apply(uint2 codes) const {
    if constexpr (kKind == MxBlock::col32)
      return {rebase(codes.x, pair[0], pair[1]), rebase(codes.y, pair[2], pair[3])};
    return {rebase(codes.x, pair[0], pair[0]), rebase(codes.y, pair[0], pair[0])};
  }
};

// Bytes j of rows 0 .. 3 become row j.
__device__ __forceinline__ void transpose(const uint32_t (&in)[4], uint32_t (&out)[4]) {
  const uint32_t a = __byte_perm(in[0], in[1], 0x5140), b = __byte_perm(in[2], in[3], 0x5140);
  const uint32_t c = __byte_perm(in[0], in[1], 0x7362), d = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(a, b, 0x5410), out[1] = __byte_perm(a, b, 0x7632);
  out[2] = __byte_perm(c, d, 0x5410), out[3] = __byte_perm(c, d, 0x7632);
}

// Pieces of a warp's rows, rebased; rows and channels that do not exist are zeros. Where scales are not a row's,
// factors are found once for all rows.
template <MxBlock kKind, int kChannels, int kPitch>
struct ImagePieces {
  const uint8_t (&scales)[kChannels];
  const RowSpot& at;
  const uint8_t* codes;
  uint32_t tile_scale;
  int channel;
  PieceFactors<kKind> all = factors(0);

  __device__ __forceinline__ PieceFactors<kKind> factors(int row) const {
    return {&scales[channel / kBlock * kBlock], row, channel, tile_scale};
  }
  __device__ __forceinline__ uint2 row(int row) const {
    const uint2 piece = *reinterpret_cast<const uint2*>(codes + row * kPitch + channel);
    const uint2 image = kKind == MxBlock::row32 ? factors(row).apply(piece) : all.apply(piece);
    const bool present = row < at.rows && channel < at.channels;
    return present ? image : uint2{0, 0};
  }
};

template <MxBlock kKind, int kChannels, int kPitch>
__device__ __forceinline__ void write_image(const QuantizeParams& p, const RowSpot& at,
                                            const uint8_t (&scales)[kChannels], const uint8_t* codes,
                                            uint32_t tile_scale) {
  using Pieces = ImagePieces<kKind, kChannels, kPitch>;
  const int dim = int(p.image_shape.dim);
  if (p.image_shape.role == ImageRole::value) {
    const ImageShape shape = with_role<ImageRole::value>(p.image_shape);
    const int first = at.first_row() + int(value_token(at.lane() / 8 * 8));  // of 8 tokens side by side in the image
#pragma unroll 1
    for (int channel = at.lane() % 8 * kPiece; channel < min(kChannels, dim - at.first_channel);
         channel += 8 * kPiece) {
      const Pieces pieces{scales, at, codes, tile_scale, channel};
      uint32_t low[8], high[8];  // channels 0 .. 3 and 4 .. 7 of a token
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint2 piece = pieces.row(first + int(value_token(i)));
        low[i] = piece.x, high[i] = piece.y;
      }
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const auto& in = q == 0 ? low : high;
        uint32_t even[4], odd[4];  // of a channel: tokens 0 .. 3 and 4 .. 7
        transpose({in[0], in[1], in[2], in[3]}, even);
        transpose({in[4], in[5], in[6], in[7]}, odd);
        // Four channels fill 128 bytes, which are swizzled alike.
        uint8_t* const to =
            p.image + shape.offset(at.item.head, at.padded_row() + first, at.first_channel + channel + 4 * q);
#pragma unroll
        for (int k = 0; k < 4; ++k) *reinterpret_cast<uint2*>(to + k * kValueGroup) = {even[k], odd[k]};
      }
    }
  } else {
    constexpr int in_row = kChannels / kPiece, step = 32 / in_row;
    const int channel = at.lane() % in_row * kPiece, first = at.first_row() + at.lane() / in_row;
    const int in_image = at.first_channel + channel;
    if (in_image >= dim) return;
    const Pieces pieces{scales, at, codes, tile_scale, channel};
    // A tile is aligned to what a swizzle repeats on.
    uint8_t* const to = p.image + with_role<ImageRole::key>(p.image_shape).offset(at.item.head, at.padded_row(), 0);
#pragma unroll
    for (int i = 0; i < in_row; ++i) {
      const int row = first + i * step;
      *reinterpret_cast<uint2*>(to + uint32_t(swizzled(row * dim + in_image, dim))) = pieces.row(row);
    }
  }
}

// ---- the kernel -------------------------------------------------------------------------------------------------

// kChannels: of a thread. kHalves: 128 threads each, with channels side by side.
template <Dtype kIn, int kChannels, int kHalves>
struct RowConfig {
  using Buffer = RowBuffer<kIn, kChannels>;
  static constexpr int kCtas = kChannels == 128 ? 3 : 4 / kHalves;  // of an SM
  static constexpr int kBuffers = kIn == Dtype::f32 ? 1 : 2;
  static constexpr int kBytes = kBuffers * kHalves * int(sizeof(Buffer));
  static_assert(kCtas * (kBytes + kHalves * int(sizeof(RowShared<kChannels>)) + 1024 + 128) <= 228 * 1024);
};

template <Dtype kIn, int kChannels, int kHalves>
__global__ void __launch_bounds__(kRows* kHalves, RowConfig<kIn, kChannels, kHalves>::kCtas)
    quantize_rows(const __grid_constant__ QuantizeParams p) {
  using Config = RowConfig<kIn, kChannels, kHalves>;
  using Plan = RowPlan<kIn, kChannels>;
  ptx::griddepcontrol_launch_dependents();
  extern __shared__ uint4 dynamic[];
  __shared__ RowShared<kChannels> halves[kHalves];
  const int half = kHalves == 1 ? 0 : int(threadIdx.x) / kRows, thread = int(threadIdx.x) - half * kRows;
  const int first_channel = int(blockIdx.y) * kTileChannels + half * kChannels;
  RowShared<kChannels>& shared = halves[half];
  auto* const buffers = reinterpret_cast<typename Config::Buffer*>(dynamic) + half;  // [kBuffers][kHalves]
  const auto fetch = [&](const RowItem& item, typename Config::Buffer& to) {
    const TokenTile tile = p.grid.tile(item.tile);
    const int channels = max(0, min(kChannels, int(p.grid.dim) - first_channel));
    const RowSpot spot{item, tile.rows, first_channel, channels, tile.first_token};
    load_rows<kIn, kChannels>(p, spot, to.rows);
    if (thread == 0) to.at = spot;
    if (!p.mean.data || thread >= kChannels) return;
    ptx::griddepcontrol_wait();
    const auto* const from =
        static_cast<const float*>(p.mean.data) + p.mean.offset(tile.sequence, item.head, first_channel + thread);
    ptx::async_copy_4(ptx::shared_address(&to.mean[thread]), from, thread < channels);
  };
  const uint32_t heads = uint32_t(p.grid.heads);
  const auto exists = [&](const RowItem& item) { return item.tile < p.grid.tiles(); };
  fetch(RowItem::first(heads), buffers[0]);
  if (thread < kChannels) {
    const bool flips = p.group && thread + first_channel < p.grid.dim && rotation_flips(p.seed, first_channel + thread);
    shared.sign[thread] = flips ? -1.0f : 1.0f;
    shared.zero[thread] = 0;
  }
  const float norm = p.group ? hadamard_scale(p.group) : 1.0f;

#pragma unroll 1
  for (int turn = 0;; turn = (turn + 1) % Config::kBuffers) {
    turn = ptx::hidden(turn);  // addresses are cheaper computed again than kept
    auto& mine = buffers[turn * kHalves];
    const RowSpot& at = mine.at;
    ptx::async_copy_wait();
    __syncthreads();  // rows are there, and nobody uses the other buffer any more
    if constexpr (Config::kBuffers == 2) {
      const RowItem next = at.item.next(heads);
      if (exists(next)) fetch(next, buffers[(1 - turn) * kHalves]);
    }

    float x[kChannels];
    read_row<kIn>(mine.rows + thread * Plan::kPitch, x);
    if (p.mean.data) subtract(thread < at.rows ? mine.mean : shared.zero, x);
    if (kChannels == 128) {
      rotate_row(shared.sign, kChannels, x);
    } else if (p.group) {
      rotate_row(shared.sign, p.group, x);
    }
    const auto codes_of = [&](int n) { return mine.rows + n * kChannels; };  // of the tile's first row
    // The second copy first: the image is of the first.
#pragma unroll 1
    for (int n = p.copies - 1; n >= 0; --n) {
      // Hidden, or what both copies compute of a row were kept in registers from one to the other.
#pragma unroll
      for (int c = 0; c < kChannels; ++c) x[c] = ptx::hidden(x[c]);
      if (!(n == 0 && p.image) && !p.copy[n].scale && !p.copy[n].payload.data) continue;
      with_block(p.copy[n].block, [&]<MxBlock kKind>() {
        shared.most[thread] = quantize_row<kKind>(p.rule, at, norm, x, shared.factor[at.warp()],
                                                  shared.scale[n][at.warp()], codes_of(n) + thread * Plan::kPitch);
      });
    }
#pragma unroll 1
    for (int n = 0; n < p.copies; ++n) {
      write_copy<kChannels, Plan::kPitch>(p, at, p.copy[n], shared.scale[n][at.warp()], codes_of(n));
    }
    const TileItem tile{at.item.tile, at.item.head, blockIdx.y};
    if (p.image) {
      const uint32_t tile_scale = image_tile_scale(p, tile, shared.most[thread]);
      with_block(p.copy[0].block, [&]<MxBlock kKind>() {
        write_image<kKind, kChannels, Plan::kPitch>(p, at, shared.scale[0][at.warp()], codes_of(0), tile_scale);
      });
    }
    const int64_t first = int64_t(blockIdx.y) * kTileChannels;
    clear_slack(p, tile, first, min(first + kTileChannels, p.grid.dim));
    const RowItem next = at.item.next(heads);
    if (!exists(next)) return ptx::griddepcontrol_wait();
    if constexpr (Config::kBuffers == 1) {
      __syncthreads();
      fetch(next, mine);
    }
  }
}

template <Dtype kIn, int kChannels, int kHalves>
Status launch_as(const QuantizeParams& p, Launch l) {
  using Config = RowConfig<kIn, kChannels, kHalves>;
  const int64_t items = p.grid.tiles() * p.grid.heads;
  const int64_t ctas =
      std::max<int64_t>(int64_t(multiprocessor_count()) * Config::kCtas / std::max<int64_t>(p.chunks, 1), 1);
  l.grid = dim3(unsigned(std::min(items, ctas)), unsigned(p.chunks));
  l.block = dim3(kRows * kHalves);
  l.shared_bytes = size_t(Config::kBytes);
  return launch(l, quantize_rows<kIn, kChannels, kHalves>, p);
}

// A thread has as few channels as the rotation allows.
template <Dtype kIn>
Status launch_from(const QuantizeParams& p, const Launch& l) {
  if (p.group > 64) return launch_as<kIn, 128, 1>(p, l);
  return p.covered > 64 ? launch_as<kIn, 64, 2>(p, l) : launch_as<kIn, 64, 1>(p, l);
}

}  // namespace

Status launch_rows(const QuantizeParams& p, Launch l) {
  switch (p.in.dtype) {
    case Dtype::bf16: return launch_from<Dtype::bf16>(p, l);
    case Dtype::f16: return launch_from<Dtype::f16>(p, l);
    default: return launch_from<Dtype::f32>(p, l);
  }
}

}  // namespace mxflash
