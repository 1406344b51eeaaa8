// Quantizer for CUDA cards, the same code on every architecture: out = MX(rotate(in - mean)), and operand images.
//
// Bytes are those of quantize_ref.cpp; mean_cuda.cu makes the means first. A CTA takes 128 padded tokens of one head
// and writes all that belongs to them: payload, scales of both copies, image, and its share of the slack. Three
// kernels:
//
// quantize_tiles: E4M3 from BF16 or FP16 channels that lie side by side in 16-byte pieces (dim a multiple of 8), any
//   block, layout and image; no mean, rotation or stats.
//   Warp: 32 tokens x 64 channels, one block high and two wide, in registers. No shared memory but eight words for the
//   maximum of an image tile. Lane: 8 tokens x 8 channels; its eight loads of 16 bytes (a warp's are 4 rows of 128) are
//   all in flight before the first is used. Its tokens are neighbours in the order of a value image, so that which
//   registers a conversion packs transposes it.
//   Rounding is exact: x * 2^-e is exact in fp32 wherever E4M3 sees more than a zero, then cvt.rn.satfinite.
// quantize_rows (quantize_rows_cuda.cu): the same from fp32, or with a mean, or rotated in groups of up to 128.
// quantize_any: every other call, in stripes of 32 tokens x up to 256 channels that are widened to 32 KB of shared
//   memory. A warp quantizes 32 x 32 at a time with the integer codecs of mx/. Images take a second pass, with the tile
//   maxima of the first.
//
// Budget of quantize_tiles, BF16 to square32: 3 bytes an element (2 in, 1 out; scales are 1/1024), so 4.2 TB/s, what a
// copy reaches on an H200, are 6 elements a clock and SM. A lane executes some 540 instructions for its 64 elements,
// 870 for an image alone (SASS): 8.4 and 13.6 an element, 50 and 82 of 128 a clock. Memory is the bound. 80 registers
// let 24 warps have 96 KB of loads in flight on an SM; 4.2 TB/s at a microsecond are 32 KB.
#include <algorithm>

#include "ptx/griddepcontrol.cuh"
#include "ptx/registers.cuh"
#include "quantize/quantize.h"
#include "quantize/quantize_kernel.cuh"
#include "runtime/cuda_backend.h"
#include "runtime/operand_image.cuh"

namespace mxflash {
namespace {

// ---- quantize_tiles: what a lane holds --------------------------------------------------------------------------

constexpr int kLane = 8;           // tokens, and channels, of a lane: elements [i][j]
constexpr int kHalfChannels = 64;  // channels of a warp's lanes

// Where they are: row(i) of the tile, channel + j.
struct LaneSpot {
  int first;    // row of i = 0
  int channel;  // of j = 0
  int left;     // rows from the first on that hold tokens; 0 where the channels do not exist
  // value_token is linear over the bits of a position, and positions 8 g and i share none.
  __device__ int row(int i) const { return first + int(value_token(i)); }
  __device__ bool present(int i) const { return value_token(i) < left; }
  // Addresses are cheaper computed twice than kept: registers are what limits the loads in flight.
  __device__ __forceinline__ void hide() {
    first = ptx::hidden(first);
    channel = ptx::hidden(channel);
  }
};

// Scales that a lane's elements have: one, one a row, or one a channel.
template <MxBlock kBlock>
constexpr int kScales = kBlock == MxBlock::square32 ? 1 : kLane;
template <MxBlock kBlock>
constexpr int scale_slot(int i, int j) {
  return kBlock == MxBlock::square32 ? 0 : kBlock == MxBlock::row32 ? i : j;
}

// 16-bit elements as they were loaded: half the registers. Each pass over them widens them again.
template <Dtype kIn>
struct PackedValues {
  uint4 piece[kLane];  // 8 channels
  // Channels 4 q .. 4 q + 3 of row i.
  __device__ __forceinline__ float4 quad(int i, int q) const {
    const uint4 w = piece[i];
    const float2 low = widen<kIn>(q == 0 ? w.x : w.z), high = widen<kIn>(q == 0 ? w.y : w.w);
    return {low.x, low.y, high.x, high.y};
  }
  // Largest magnitudes of a lane's part of its blocks, NaN if an element is.
  template <MxBlock kBlock>
  __device__ __forceinline__ void amax(float (&amax)[kScales<kBlock>]) const {
    uint32_t pair[kScales<kBlock>] = {};  // two magnitudes, which compare as integers; col32 uses half of them
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const uint4 w = piece[i];
      const uint32_t words[] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int k = 0; k < kLane / 2; ++k) {
        uint32_t& m = pair[scale_slot<kBlock>(i, k)];
        m = ptx::max_u16x2(m, words[k] & 0x7FFF7FFF);
      }
    }
#pragma unroll
    for (int n = 0; n < kScales<kBlock>; ++n) {
      const float2 m = widen<kIn>(pair[kBlock == MxBlock::col32 ? n / 2 : n]);
      amax[n] = kBlock == MxBlock::col32 ? (n % 2 ? m.y : m.x) : ptx::max_magnitude(m.x, m.y);
    }
  }
  // Keeps the compiler from holding on to the widened values of the pass before.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (uint4& w : piece) {
      w = {ptx::hidden(w.x), ptx::hidden(w.y), ptx::hidden(w.z), ptx::hidden(w.w)};
    }
  }
};

// Loads, all in flight together.
template <Dtype kIn>
__device__ __forceinline__ void load_rows(const QuantizeParams& p, const TokenTile& tile, const TileItem& item,
                                          const LaneSpot& at, PackedValues<kIn>& x) {
  constexpr int64_t size = dtype_size(kIn);
  const char* const row =
      static_cast<const char*>(p.in.data) + p.in.offset(tile.first_token + at.first, item.head, at.channel) * size;
#pragma unroll
  for (int i = 0; i < kLane; ++i) {
    const auto* from = reinterpret_cast<const uint4*>(row + value_token(i) * p.in.token_stride * size);
    x.piece[i] = at.present(i) ? __ldcs(from) : uint4{0, 0, 0, 0};
  }
}

// ---- quantize_tiles: blocks -------------------------------------------------------------------------------------

// Largest magnitudes of the blocks, NaN if one of their elements is.
template <MxBlock kBlock, Dtype kIn>
__device__ __forceinline__ void block_amax(const PackedValues<kIn>& x, float (&amax)[kScales<kBlock>]) {
  x.template amax<kBlock>(amax);
#pragma unroll
  for (float& m : amax) {
    if constexpr (kBlock != MxBlock::col32) {  // 32 channels: 4 lanes
      m = ptx::max_magnitude(m, __shfl_xor_sync(~0u, m, 1));
      m = ptx::max_magnitude(m, __shfl_xor_sync(~0u, m, 2));
    }
    if constexpr (kBlock != MxBlock::row32) {  // 32 tokens: 4 groups of lanes
      m = ptx::max_magnitude(m, __shfl_xor_sync(~0u, m, 8));
      m = ptx::max_magnitude(m, __shfl_xor_sync(~0u, m, 16));
    }
  }
}

constexpr int kAtomStep = int(atom_byte(1, 0));  // from one of 32 rows of an atom to the next

template <MxBlock kBlock>
__device__ __forceinline__ void store_scales(const DeviceMx& out, const TileGrid& grid, const TokenTile& tile,
                                             const TileItem& item, const LaneSpot& at,
                                             const uint32_t (&scale)[kScales<kBlock>]) {
  const int lane = int(threadIdx.x) % 32;
  const int64_t column = at.channel / kMxBlock;
  if (!out.scale || column >= block_columns(grid.dim, out.layout)) return;
  const ScaleLayout layout = kBlock == MxBlock::square32 ? ScaleLayout::linear : out.layout;
  const bool linear = layout == ScaleLayout::linear;
  const int64_t row = (tile.padded_row + at.first) / block_shape(kBlock).rows;
  const int64_t first_column = kBlock == MxBlock::col32 ? at.channel : column;
  uint8_t* const to = out.scale + scale_offset(kBlock, layout, grid.padded, grid.dim, {item.head, row, first_column});
  if constexpr (kBlock == MxBlock::square32) {
    if ((lane & ~4) == 0) *to = uint8_t(scale[0]);
  } else if constexpr (kBlock == MxBlock::row32) {
    const int step = linear ? int(ceil_div(grid.dim, kMxBlock)) : kAtomStep;
    if (lane % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < kLane; ++i) to[int64_t(value_token(i)) * step] = uint8_t(scale[i]);
  } else {
    if (lane >= 8) return;
    if (!linear) {
#pragma unroll
      for (int j = 0; j < kLane; ++j) to[j * kAtomStep] = uint8_t(scale[j]);
    } else if (at.channel < grid.dim) {
      *reinterpret_cast<uint2*>(to) = {scale[0] | scale[1] << 8 | scale[2] << 16 | scale[3] << 24,
                                       scale[4] | scale[5] << 8 | scale[6] << 16 | scale[7] << 24};
    }
  }
}

// Codes of elements [i][4 q .. 4 q + 3].
template <MxBlock kBlock, Dtype kIn>
__device__ __forceinline__ uint32_t row_codes(const PackedValues<kIn>& x, const float (&factor)[kScales<kBlock>], int i,
                                              int q) {
  const float4 v = x.quad(i, q);
  const auto f = [&](int k) { return factor[scale_slot<kBlock>(i, 4 * q + k)]; };
  return ptx::pack_e4m3(v.x * f(0), v.y * f(1), v.z * f(2), v.w * f(3));
}

template <MxBlock kBlock, Dtype kIn>
__device__ __forceinline__ void write_copy(const DeviceMx& out, const QuantizeParams& p, const TokenTile& tile,
                                           const TileItem& item, LaneSpot at, PackedValues<kIn>& x) {
  at.hide();
  float amax[kScales<kBlock>], factor[kScales<kBlock>];
  uint32_t scale[kScales<kBlock>];
  x.forget();
  block_amax<kBlock>(x, amax);
  x.forget();
#pragma unroll
  for (int n = 0; n < kScales<kBlock>; ++n) {
    scale[n] = scale_of(amax[n], p.rule);
    factor[n] = reciprocal(scale[n]);
  }
  store_scales<kBlock>(out, p.grid, tile, item, at, scale);
  if (!out.payload.data) return;
  uint8_t* const row = out.row(tile.first_token + at.first, item.head) + at.channel;
#pragma unroll
  for (int i = 0; i < kLane; ++i) {
    const uint2 codes{row_codes<kBlock>(x, factor, i, 0), row_codes<kBlock>(x, factor, i, 1)};
    ptx::store_if(at.present(i), row + value_token(i) * out.payload.token_stride, codes);
  }
}

// ---- quantize_tiles: images -------------------------------------------------------------------------------------

// Given the scale of the image tile.
template <MxBlock kBlock, Dtype kIn>
__device__ __forceinline__ void write_image_codes(const QuantizeParams& p, const TokenTile& tile, const TileItem& item,
                                                  LaneSpot at, const uint32_t (&scale)[kScales<kBlock>],
                                                  uint32_t tile_scale, PackedValues<kIn>& x) {
  at.hide();
  const ImageShape shape = p.image_shape;
  float factor[kScales<kBlock>];
  uint32_t to_tile[kScales<kBlock>];
#pragma unroll
  for (int n = 0; n < kScales<kBlock>; ++n) {
    factor[n] = reciprocal(scale[n]);
    to_tile[n] = rebase_factor(scale[n], tile_scale);
  }
  const auto pair = [&](int i0, int j0, int i1, int j1) {
    return to_tile[scale_slot<kBlock>(i0, j0)] | to_tile[scale_slot<kBlock>(i1, j1)] << 16;
  };
  if (shape.role == ImageRole::value) {
    uint32_t masks[2] = {};
#pragma unroll
    for (int i = 0; i < kLane; ++i) masks[i / 4] |= at.present(i) ? 0xFFu << i % 4 * 8 : 0u;
#pragma unroll
    for (int q = 0; q < kLane / 4; ++q) {
      x.forget();
      uint32_t codes[4][2];  // of a channel: 8 tokens
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v[4][4];  // rows 4 half .., channels 4 q ..
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float4 quad = x.quad(4 * half + r, q);
          v[r][0] = quad.x, v[r][1] = quad.y, v[r][2] = quad.z, v[r][3] = quad.w;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int i = 4 * half, j = 4 * q + k;
          const auto f = [&](int r) { return factor[scale_slot<kBlock>(i + r, j)]; };
          const uint32_t rounded = ptx::pack_e4m3(v[0][k] * f(0), v[1][k] * f(1), v[2][k] * f(2), v[3][k] * f(3));
          codes[k][half] = rebase(rounded, pair(i, j, i + 1, j), pair(i + 2, j, i + 3, j)) & masks[half];
        }
      }
      // Four channels fill 128 bytes, which are swizzled alike.
      uint8_t* const to = p.image + with_role<ImageRole::value>(shape).offset(item.head, tile.padded_row + at.first,
                                                                              at.channel + 4 * q);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        *reinterpret_cast<uint2*>(to + k * kValueGroup) = {codes[k][0], codes[k][1]};
      }
    }
  } else {
    // A tile is aligned to what a swizzle repeats on.
    uint8_t* const to = p.image + with_role<ImageRole::key>(shape).offset(item.head, tile.padded_row, 0);
    const int dim = int(shape.dim);
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      uint2 codes{rebase(row_codes<kBlock>(x, factor, i, 0), pair(i, 0, i, 1), pair(i, 2, i, 3)),
                  rebase(row_codes<kBlock>(x, factor, i, 1), pair(i, 4, i, 5), pair(i, 6, i, 7))};
      if (!at.present(i)) codes = {0, 0};
      *reinterpret_cast<uint2*>(to + uint32_t(swizzled(at.row(i) * dim + at.channel, dim))) = codes;
      if (i % 2) __syncwarp();  // keeps ptxas from piling up the codes of all rows in registers
    }
  }
}

template <MxBlock kBlock, Dtype kIn>
__device__ __forceinline__ void write_image(const QuantizeParams& p, const TokenTile& tile, const TileItem& item,
                                            const LaneSpot& at, PackedValues<kIn>& x) {
  uint32_t scale[kScales<kBlock>];
  float amax[kScales<kBlock>], most = 0;
  x.forget();
  block_amax<kBlock>(x, amax);
#pragma unroll
  for (int n = 0; n < kScales<kBlock>; ++n) {
    scale[n] = scale_of(amax[n], p.rule);
    most = fmaxf(most, rounded_amax(amax[n], scale[n]));
  }
  const uint32_t tile_scale = image_tile_scale(p, item, most);
  if (at.channel < p.image_shape.dim) write_image_codes<kBlock>(p, tile, item, at, scale, tile_scale, x);
}

// ---- quantize_tiles ---------------------------------------------------------------------------------------------

// Four warps, or eight for more than 64 channels. kPlain: one copy of square32.
template <Dtype kIn, bool kPlain>
__global__ void __launch_bounds__(256, kPlain ? 3 : 2) quantize_tiles(const __grid_constant__ QuantizeParams p) {
  ptx::griddepcontrol_launch_dependents();
  const TileItem item = TileItem::of(uint32_t(p.chunks));
  if (item.tile >= p.grid.tiles()) return ptx::griddepcontrol_wait();
  const TokenTile tile = p.grid.tile(item.tile);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  LaneSpot at;
  at.first = warp % 4 * int(kMxBlock) + int(value_token(lane / 8 * kLane));
  at.channel = int(item.chunk) * kTileChannels + warp / 4 * kHalfChannels + lane % 8 * kLane;
  at.left = at.channel < p.grid.dim ? tile.rows - at.first : 0;
  PackedValues<kIn> x;
  load_rows<kIn>(p, tile, item, at, x);
#pragma unroll
  for (int n = 0; n < (kPlain ? 1 : 2); ++n) {
    const DeviceMx& out = p.copy[n];
    if (n >= p.copies || (!out.scale && !out.payload.data)) continue;
    with_block(kPlain ? MxBlock::square32 : out.block,
               [&]<MxBlock kBlock>() { write_copy<kBlock>(out, p, tile, item, at, x); });
  }
  if (p.image) {
    with_block(kPlain ? MxBlock::square32 : p.copy[0].block,
               [&]<MxBlock kBlock>() { write_image<kBlock>(p, tile, item, at, x); });
  }
  const int64_t first = int64_t(item.chunk) * kTileChannels;
  clear_slack(p, item, first, min(first + kTileChannels, p.grid.dim));
  ptx::griddepcontrol_wait();
}

// ---- quantize_any -----------------------------------------------------------------------------------------------

constexpr int kAnyThreads = 256;
constexpr int kAnyChannels = int(kMaxRotation);  // whole rotation groups, blocks and atoms
constexpr int kAnyWarps = kAnyThreads / 32;

// 32 tokens x 32 channels of a stripe in shared memory, one channel a lane.
struct Patch {
  const float* column;  // the lane's, from its first token on
  int rows;             // that hold tokens
  int stripe;
  int64_t channel;  // of the lane
  bool in_dim;
  __device__ float at(int row) const { return column[row * kAnyChannels]; }
};

// What this lane adds to the stats.
struct LaneStats {
  uint32_t amax = 0, saturated = 0, flushed = 0, nonfinite = 0, total = 0;

  __device__ void count(float x, uint8_t scale, uint8_t code, const Fp8Format& f) {
    ++total;
    const uint32_t magnitude = magnitude_bits(x);
    if (magnitude >= 0x7F800000) {
      ++nonfinite;
      return;
    }
    amax = max(amax, magnitude);
    if (scale == kE8m0Nan) return;
    // The limit is exact or, beyond fp32, infinite.
    saturated += __uint_as_float(magnitude) > __uint_as_float(f.max_bits) * decode_e8m0(scale);
    flushed += magnitude != 0 && (code & 0x7F) == 0;
  }
  __device__ void add_to(QuantizeStats* stats) const {
    const auto add = [](int64_t* to, uint32_t count) {
      const uint32_t sum = __reduce_add_sync(~0u, count);
      if (threadIdx.x % 32 == 0 && sum) atomicAdd(reinterpret_cast<unsigned long long*>(to), sum);
    };
    add(&stats->saturated, saturated);
    add(&stats->flushed, flushed);
    add(&stats->nonfinite, nonfinite);
    add(&stats->total, total);
    // Magnitudes compare as integers.
    const uint32_t most = __reduce_max_sync(~0u, amax);
    if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<unsigned int*>(&stats->amax), most);
  }
};

// The lane's scale: of its row for row32, of its channel for col32, of the block for square32.
__device__ uint8_t patch_scale(const Patch& patch, MxBlock block, const Fp8Format& f, MxRule rule) {
  const int lane = int(threadIdx.x) % 32;
  uint32_t amax = 0;
  for (int r = 0; r < patch.rows; ++r) {
    uint32_t m = magnitude_bits(patch.at(r));
    if (block == MxBlock::row32) {
      m = __reduce_max_sync(~0u, m);
      if (lane != r) continue;
    }
    amax = max(amax, m);
  }
  if (block == MxBlock::square32) amax = __reduce_max_sync(~0u, amax);
  return scale_from_amax(amax, f, rule);
}

__global__ void __launch_bounds__(kAnyThreads, 2) quantize_any(const __grid_constant__ QuantizeParams p) {
  __shared__ float x[kMxBlock][kAnyChannels];
  __shared__ uint32_t image_amax[2];  // of 64 tokens each; the first of all 128 for keys and values
  __shared__ bool flips[kAnyChannels];
  ptx::griddepcontrol_launch_dependents();
  const TileItem item = TileItem::of(uint32_t(p.chunks));
  if (item.tile >= p.grid.tiles()) return ptx::griddepcontrol_wait();
  const TokenTile tile = p.grid.tile(item.tile);
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t first_channel = int64_t(item.chunk) * kAnyChannels;
  const int covered = int(min(int64_t(kAnyChannels), round_up(p.covered - first_channel, kMxBlock)));
  const int channels = int(max(int64_t(0), min(int64_t(kAnyChannels), p.grid.dim - first_channel)));

  if (thread < 2) image_amax[thread] = 0;
  if (p.group && thread < channels) flips[thread] = rotation_flips(p.seed, first_channel + thread);
  const int image_shift = p.image_shape.role == ImageRole::query ? 1 : 2;  // stripes of an image tile, as a power
  LaneStats stats;
  ptx::griddepcontrol_wait();  // means
  for (int pass = 0; pass < (p.image ? 2 : 1); ++pass) {
    for (int stripe = 0; stripe < kTileTokens / kMxBlock; ++stripe) {
      const int rows = max(0, min(int(kMxBlock), tile.rows - stripe * int(kMxBlock)));
      __syncthreads();
      for (int64_t i = thread; i < kMxBlock * covered; i += kAnyThreads) {
        const int r = int(i) / covered, c = int(i) % covered;
        float value = 0;
        if (r < rows && c < channels) {
          const int64_t token = tile.first_token + stripe * kMxBlock + r;
          value = p.in.load(p.in.offset(token, item.head, first_channel + c));
          if (p.mean.data) value -= p.mean.load(p.mean.offset(tile.sequence, item.head, first_channel + c));
        }
        x[r][c] = value;
      }
      __syncthreads();
      for (int r = warp; p.group && r < rows; r += kAnyWarps) {  // a warp rotates a row, in the order of hadamard()
        for (int c = lane; c < channels; c += 32) {
          if (flips[c]) x[r][c] = -x[r][c];
        }
        for (int stride = 1; stride < p.group; stride *= 2) {
          __syncwarp();
          for (int k = lane; k < channels / 2; k += 32) {
            float* const pair = &x[r][k / stride * 2 * stride + k % stride];
            const float a = pair[0], b = pair[stride];
            pair[0] = a + b;
            pair[stride] = a - b;
          }
        }
        __syncwarp();
        for (int c = lane; c < channels; c += 32) x[r][c] *= hadamard_scale(p.group);
      }
      __syncthreads();
      for (int column = warp; column < covered / kMxBlock; column += kAnyWarps) {
        const int c = column * int(kMxBlock) + lane;
        const Patch patch{&x[0][c], rows, stripe, first_channel + c, c < channels};
        for (int i = 0; i < (pass == 0 ? p.copies : 1); ++i) {
          const DeviceMx& out = p.copy[i];
          const Fp8Format f = fp8_format(out.payload.dtype);
          const uint8_t scale = patch_scale(patch, out.block, f, p.rule);
          if (pass == 0) {
            store_lane_scale(out, out.block, p.grid, item.head, tile.padded_row + stripe * kMxBlock, patch.channel,
                             scale);
          }
          const uint32_t most = pass == 1 ? image_amax[stripe >> image_shift] : 0;
          const uint8_t tile_scale = scale_from_amax(most, e4m3_format(), MxRule::rceil);
          uint32_t rounded = 0;
          for (int r = 0; r < kMxBlock; ++r) {
            const uint8_t s = out.block == MxBlock::row32 ? uint8_t(__shfl_sync(~0u, uint32_t(scale), r)) : scale;
            const bool present = r < rows && patch.in_dim;
            const float value = patch.at(r);
            const uint8_t code = encode_mx(value, s, f);
            const float element = decode_fp8(code, f);
            const float product = element * decode_e8m0(s);  // exact, or infinite
            if (pass == 1) {
              if (patch.channel >= p.image_shape.dim) continue;
              const int64_t token = tile.padded_row + stripe * kMxBlock + r;
              p.image[p.image_shape.offset(item.head, token, patch.channel)] =
                  present ? encode_fp8(element, e4m3_format(), int(tile_scale) - int(s)) : uint8_t(0);
              continue;
            }
            if (!present) continue;
            const int64_t token = tile.first_token + stripe * kMxBlock + r;
            if (out.payload.data) out.row(token, item.head)[patch.channel] = code;
            if (i == 0 && p.stats) stats.count(value, s, code, f);
            const uint32_t magnitude = magnitude_bits(product);
            if (magnitude <= 0x7F800000) rounded = max(rounded, min(magnitude, kLargestBits));
          }
          if (pass == 0 && i == 0 && p.image) {
            rounded = __reduce_max_sync(~0u, rounded);
            if (lane == 0) atomicMax(&image_amax[stripe >> image_shift], rounded);
          }
        }
      }
    }
    __syncthreads();
    if (p.image && pass == 0 && thread < kTileTokens / image_scale_tokens(p.image_shape.role)) {
      const int64_t token = tile.padded_row + thread * image_scale_tokens(p.image_shape.role);
      p.image[p.image_shape.scale_offset(item.head, token)] =
          scale_from_amax(image_amax[thread], e4m3_format(), MxRule::rceil);
    }
  }
  if (p.stats) stats.add_to(p.stats);
  clear_slack(p, item, first_channel, first_channel + channels);
}

// ---- host -------------------------------------------------------------------------------------------------------

QuantizeParams params_of(const Quantize& args) {
  QuantizeParams p{.grid = TileGrid::of(args.in, args.seq),
                   .in = DeviceTensor::of(args.in),
                   .mean = args.smooth ? DeviceTensor::of(args.mean) : DeviceTensor{},
                   .copy = {DeviceMx::of(args.out), DeviceMx::of(args.out_col)},
                   .copies = args.out_col ? 2 : 1,
                   .rule = args.rule,
                   .group = 0,
                   .seed = args.rotate_seed,
                   .image = static_cast<uint8_t*>(args.image.data),
                   .image_shape = ImageShape::of(args.image_role, 0, 0, 0),
                   .stats = args.stats,
                   .covered = 0,
                   .chunks = 0};
  const TileGrid& grid = p.grid;
  if (args.rotate && grid.dim > 0) p.group = int(rotation_group(grid.dim));
  bool atoms = false;
  for (int i = 0; i < p.copies; ++i) atoms |= p.copy[i].layout == ScaleLayout::atom128x4;
  p.covered = atoms ? round_up(grid.dim, kAtomRows) : grid.dim;
  if (p.image) {
    p.image_shape = ImageShape::of(args.image_role, grid.padded, grid.heads, grid.dim);
    p.covered = std::max(p.covered, p.image_shape.dim);
  }
  return p;
}

// What quantize_tiles and quantize_rows ask of addresses and options.
bool in_pieces(const QuantizeParams& p) {
  const int64_t dim = p.grid.dim;
  if (ceil_div(dim, kTileChannels) > 65535 || p.stats || p.in.channel_stride != 1 || dim % kLane != 0 ||
      p.group > kTileChannels || !p.in.aligned(16)) {
    return false;
  }
  for (int i = 0; i < p.copies; ++i) {
    const DeviceMx& out = p.copy[i];
    if (out.payload.dtype != Dtype::e4m3 || (out.payload.data && !out.payload.aligned(kLane))) return false;
    if (out.block == MxBlock::col32 && reinterpret_cast<uintptr_t>(out.scale) % kLane != 0) return false;
  }
  return true;
}

template <Dtype kIn>
Status launch_packed(const QuantizeParams& p, const Launch& l, bool plain) {
  return plain ? launch(l, quantize_tiles<kIn, true>, p) : launch(l, quantize_tiles<kIn, false>, p);
}

Status launch_pieces(const QuantizeParams& p, Launch l) {
  if (p.group || p.mean.data || p.in.dtype == Dtype::f32) return launch_rows(p, l);
  l.block = dim3(p.covered > kHalfChannels ? 256 : 128);
  const bool plain = p.copies == 1 && p.copy[0].block == MxBlock::square32;
  return p.in.dtype == Dtype::bf16 ? launch_packed<Dtype::bf16>(p, l, plain) : launch_packed<Dtype::f16>(p, l, plain);
}

Status launch_pass(const QuantizeParams& of_call, bool overlaps, Stream stream) {
  QuantizeParams p = of_call;
  const bool pieces = in_pieces(p);
  p.chunks = ceil_div(p.covered, pieces ? kTileChannels : kAnyChannels);
  const Launch l{.what = "quantize: sm90",
                 .grid = tile_items(p.grid, p.chunks),
                 .block = dim3(kAnyThreads),
                 .stream = stream,
                 .overlaps = overlaps};
  return pieces ? launch_pieces(p, l) : launch(l, quantize_any, p);
}

Status run(const Quantize& args, Stream stream) { return quantize_cuda({&args, 1}, stream); }

template <int kCapability>
Status supports(const Quantize& args) {
  MXFLASH_TRY(check_compute_capability<kCapability>("quantize", args.in.device.index));
  const QuantizeParams p = params_of(args);
  MXFLASH_TRY(check_items("quantize", p.grid, ceil_div(p.covered, kTileChannels)));
  return args.smooth ? check_mean("quantize", p.grid) : Status{};
}

Status supports_image(const WriteImage& a) {
  MXFLASH_TRY(check_compute_capability<90>("write_image", a.in.data.device.index));
  if (a.in.data.shape[1] <= 65535) return {};
  return unsupported("write_image: sm90: heads must be at most 65535, got %lld",
                     static_cast<long long>(a.in.data.shape[1]));
}

Status write_image_cuda(const WriteImage& a, Stream stream) {
  const DeviceGuard guard(a.in.data.device.index);
  MXFLASH_TRY(guard.status());
  return write_operand_image("write_image: sm90", a.in, a.seq, a.role, static_cast<uint8_t*>(a.image.data), a.stats,
                             stream);
}

}  // namespace

// First all means, then the passes that need none: what these wait for each other is arithmetic for the one and memory
// for the other. The first kernel starts when all is done that came ahead of it in the stream.
Status quantize_cuda(std::span<const Quantize> all, Stream stream) {
  if (all.empty()) return {};
  const DeviceGuard guard(all[0].in.device.index);
  MXFLASH_TRY(guard.status());
  for (const Quantize& a : all) {
    if (!a.stats) continue;
    MXFLASH_TRY(cuda_status(cudaMemsetAsync(a.stats, 0, sizeof(QuantizeStats), stream), "quantize: stats"));
  }
  bool overlaps = false;  // a kernel has been launched: without tokens none is
  for (const Quantize& a : all) {
    if (!a.smooth) continue;
    const QuantizeParams p = params_of(a);
    MXFLASH_TRY(launch_mean(p.in, p.grid, p.mean, overlaps, stream));
    overlaps |= a.in.shape[0] > 0;
  }
  for (const bool smooth : {false, true}) {
    for (const Quantize& a : all) {
      if (a.smooth != smooth) continue;
      MXFLASH_TRY(launch_pass(params_of(a), overlaps, stream));
      overlaps |= a.in.shape[0] > 0;
    }
  }
  return {};
}

const Impl<Quantize> kQuantizeSm90 = sm90_backend<Quantize>(supports<90>, run);
const Impl<Quantize> kQuantizeSm100 = sm100_backend<Quantize>(supports<100>, run);
const Impl<WriteImage> kWriteImageSm90 = sm90_backend<WriteImage>(supports_image, write_image_cuda);

}  // namespace mxflash
