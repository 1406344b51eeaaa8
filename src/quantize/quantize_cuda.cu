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
//   Rounding is exact: x * 2^-e is exact in fp32 wherever E4M3 sees more than a zero, then cvt.rn.satfinite. A block's
//   largest magnitude rounds to its largest code, so the scale of an image tile is known before an element is rounded.
//   An image takes code * 2^(block exponent - tile exponent) in FP16, exact down to 2^-24 where half of E4M3's smallest
//   step is 2^-10, and rounds again.
// quantize_staged: the same from fp32, or with a mean, or rotated in groups of up to 128. A lane's values pass through
//   its own 256 bytes of shared memory as fp32; a warp holds all 128 channels of a rotation that wide.
// quantize_any: every other call, in stripes of 32 tokens x up to 256 channels that are widened to 32 KB of shared
//   memory. A warp quantizes 32 x 32 at a time with the integer codecs of mx/. Images take a second pass, with the tile
//   maxima of the first.
//
// Budget of quantize_tiles, BF16 to square32: 3 bytes an element (2 in, 1 out; scales are 1/1024), so 4.2 TB/s, what a
// copy reaches on an H200, are 6 elements a clock and SM. A lane executes some 540 instructions for its 64 elements,
// 870 for an image alone (SASS): 8.4 and 13.6 an element, 50 and 82 of 128 a clock. Memory is the bound. 80 registers
// let 24 warps have 96 KB of loads in flight on an SM; 4.2 TB/s at a microsecond are 32 KB.
#include <algorithm>

#include "mx/e8m0.h"
#include "mx/operand_image.h"
#include "mx/rotation.h"
#include "ptx/convert.cuh"
#include "ptx/registers.cuh"
#include "quantize/quantize.h"
#include "quantize/quantize_cuda.cuh"
#include "runtime/cuda_backend.h"
#include "runtime/launch.cuh"
#include "runtime/operand_image.cuh"

namespace mxflash {
namespace {

struct QuantizeParams {
  TileGrid grid;
  DeviceTensor in, mean;  // mean.data: null without smoothing
  DeviceMx copy[2];
  int copies;
  MxRule rule;
  int group;  // channels of a rotation, or 0
  uint64_t seed;
  uint8_t* image;  // or null
  ImageShape image_shape;
  QuantizeStats* stats;  // or null
  int64_t covered;       // channels that scales or an image have bytes for: dim, or more where they pad it
  int64_t chunks;        // that a kernel divides them into
};

// Block columns of a row of scales, padding of atoms included.
constexpr int64_t block_columns(int64_t dim, ScaleLayout layout) {
  const int64_t columns = ceil_div(dim, kMxBlock);
  return layout == ScaleLayout::linear ? columns : round_up(columns, kAtomRows / kMxBlock);
}

// Zeroes this CTA's share of payload rows that belong to no sequence, channels first .. end - 1.
__device__ void clear_slack(const QuantizeParams& p, const TileItem& item, int64_t first, int64_t end) {
  for (int i = 0; i < p.copies; ++i) {
    if (!p.copy[i].payload.data) continue;
    p.grid.for_slack(item.tile, [&](int64_t token) {
      uint8_t* const row = p.copy[i].row(token, item.head);
      for (int64_t c = first + threadIdx.x; c < end; c += blockDim.x) row[c] = 0;
    });
  }
}

// ---- quantize_tiles: what a lane holds --------------------------------------------------------------------------

constexpr int kLane = 8;           // tokens, and channels, of a lane: elements [i][j]
constexpr int kHalfChannels = 64;  // channels of a warp's lanes
constexpr int kTileChannels = 128;

// Where they are: row(i) of the tile, channel + j.
struct LaneSpot {
  int stripe;   // 32 rows of the tile
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

template <Dtype kIn>
struct Piece {  // 8 channels as they are in memory
  uint4 word[kIn == Dtype::f32 ? 2 : 1];
};

// Two elements of 16 bits.
template <Dtype kIn>
__device__ __forceinline__ float2 widen(uint32_t w) {
  if constexpr (kIn == Dtype::bf16) return {__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u)};
  return {ptx::low_f16(w), ptx::high_f16(w)};
}
template <Dtype kIn>
__device__ __forceinline__ float4 piece_quad(const Piece<kIn>& piece, int q) {  // channels 4 q .. 4 q + 3
  if constexpr (kIn == Dtype::f32) {
    const uint4 w = piece.word[q];
    return {__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)};
  } else {
    const uint4 w = piece.word[0];
    const float2 low = widen<kIn>(q == 0 ? w.x : w.z), high = widen<kIn>(q == 0 ? w.y : w.w);
    return {low.x, low.y, high.x, high.y};
  }
}

// Scales that a lane's elements have: one, one a row, or one a channel.
template <MxBlock kBlock>
constexpr int kScales = kBlock == MxBlock::square32 ? 1 : kLane;
template <MxBlock kBlock>
constexpr int scale_slot(int i, int j) {
  return kBlock == MxBlock::square32 ? 0 : kBlock == MxBlock::row32 ? i : j;
}

// Both kinds of values answer quad(i, q): channels 4 q .. 4 q + 3 of row i, and amax: largest magnitudes of a lane's
// part of its blocks, NaN if an element is.
//
// 16-bit elements as they were loaded: half the registers. Each pass over them widens them again.
template <Dtype kIn>
struct PackedValues {
  Piece<kIn> piece[kLane];
  __device__ __forceinline__ float4 quad(int i, int q) const { return piece_quad(piece[i], q); }
  template <MxBlock kBlock>
  __device__ __forceinline__ void amax(float (&amax)[kScales<kBlock>]) const {
    uint32_t pair[kScales<kBlock>] = {};  // two magnitudes, which compare as integers; col32 uses half of them
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const uint4 w = piece[i].word[0];
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
    for (Piece<kIn>& p : piece) {
      uint4& w = p.word[0];
      w = {ptx::hidden(w.x), ptx::hidden(w.y), ptx::hidden(w.z), ptx::hidden(w.w)};
    }
  }
};

// fp32 in shared memory, where only this lane looks: what does not fit its registers.
struct StagedValues {
  float4* quads;   // [kLane][2], blockDim.x apart
  float most = 0;  // the largest magnitude of all, NaN if an element is: square32 needs no pass for it
  __device__ __forceinline__ float4 quad(int i, int q) const { return quads[(2 * i + q) * int(blockDim.x)]; }
  template <MxBlock kBlock>
  __device__ __forceinline__ void amax(float (&amax)[kScales<kBlock>]) const {
    if constexpr (kBlock == MxBlock::square32) {
      amax[0] = most;
    } else {
#pragma unroll
      for (float& m : amax) m = 0;
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
#pragma unroll
        for (int q = 0; q < kLane / 4; ++q) {
          const float4 v = quad(i, q);
          const float quad[] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            float& m = amax[scale_slot<kBlock>(i, 4 * q + k)];
            m = ptx::max_magnitude(m, quad[k]);
          }
        }
      }
    }
  }
  __device__ __forceinline__ void set(int i, int q, float4 v) {
    quads[(2 * i + q) * int(blockDim.x)] = v;
    most = ptx::max_magnitude(ptx::max_magnitude(most, v.x), v.y);
    most = ptx::max_magnitude(ptx::max_magnitude(most, v.z), v.w);
  }
  // Reads shared memory anew, and not before: __syncwarp also holds back ptxas.
  __device__ __forceinline__ void forget() { __syncwarp(); }
};
constexpr int kStagedBytes = kLane * kLane * int(sizeof(float));  // of a lane

// The first pass over kRows rows of a lane: loads, all in flight together.
template <Dtype kIn, int kRows>
__device__ __forceinline__ void load_rows(const QuantizeParams& p, const TokenTile& tile, const TileItem& item,
                                          const LaneSpot& at, int first, Piece<kIn> (&piece)[kRows]) {
  constexpr int64_t size = dtype_size(kIn);
  const char* const row =
      static_cast<const char*>(p.in.data) + p.in.offset(tile.first_token + at.first, item.head, at.channel) * size;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const auto* from = reinterpret_cast<const uint4*>(row + value_token(first + i) * p.in.token_stride * size);
#pragma unroll
    for (int k = 0; k < int(sizeof(Piece<kIn>) / sizeof(uint4)); ++k) {
      piece[i].word[k] = at.present(first + i) ? __ldcs(from + k) : uint4{0, 0, 0, 0};
    }
  }
}

// One row of a lane: x[h] are channels of its 64, sign[h] the bits that negate some. Butterflies as in hadamard():
// strides 1, 2, 4 inside the lane, 8, 16, 32 between lanes, 64 between halves. kWhole: all of them, with no branch
// between shuffles, which then wait for each other no more.
template <int kHalves, bool kWhole>
__device__ __forceinline__ void rotate_row(float (&x)[kHalves][kLane], const uint32_t (&sign)[kHalves][kLane],
                                           int group, int lane) {
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
#pragma unroll
    for (int j = 0; j < kLane; ++j) {
      x[h][j] = __uint_as_float(__float_as_uint(x[h][j]) ^ sign[h][j]);
    }
#pragma unroll
    for (int stride = 1; stride < kLane; stride *= 2) {
#pragma unroll
      for (int j = 0; j < kLane; ++j) {
        if (j & stride) continue;
        const float a = x[h][j], b = x[h][j + stride];
        x[h][j] = a + b;
        x[h][j + stride] = a - b;
      }
    }
#pragma unroll
    for (int bit = 1; bit < 8; bit *= 2) {
      if (!kWhole && group <= kLane * bit) continue;
      const float own = lane & bit ? -1.0f : 1.0f;
#pragma unroll
      for (int j = 0; j < kLane; ++j) {
        const float other = __shfl_xor_sync(~0u, x[h][j], bit);
        x[h][j] = __fmaf_rn(x[h][j], own, other);  // one rounding: the product is exact
      }
    }
  }
  const float scale = hadamard_scale(kWhole ? kHalves * kHalfChannels : group);
#pragma unroll
  for (int j = 0; j < kLane; ++j) {
    if constexpr (kHalves == 2) {
      if (kWhole || group > kHalfChannels) {
        const float a = x[0][j], b = x[1][j];
        x[0][j] = a + b;
        x[1][j] = a - b;
      }
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) x[h][j] *= scale;
  }
}

// in - mean, rotated, to shared memory. kWhole: in groups of all channels of the warp.
template <Dtype kIn, int kHalves, bool kWhole>
__device__ __forceinline__ void stage(const QuantizeParams& p, const TokenTile& tile, const TileItem& item,
                                      const LaneSpot (&at)[kHalves], StagedValues (&to)[kHalves]) {
  constexpr int words = kHalves * int(sizeof(Piece<kIn>) / sizeof(uint32_t));  // of a row
  constexpr int batch = words > 8 ? kLane / 2 : kLane;                         // rows in flight
  const int lane = int(threadIdx.x) % 32;
  uint32_t sign[kHalves][kLane] = {};
  float mean[kHalves][kLane] = {};
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    if (kWhole || p.group) {
      const int64_t first = at[h].channel - lane % 8 * kLane;
      const uint32_t low = __ballot_sync(~0u, rotation_flips(p.seed, first + lane));
      const uint32_t high = __ballot_sync(~0u, rotation_flips(p.seed, first + 32 + lane));
      const uint32_t flips = (lane % 8 < 4 ? low : high) >> lane % 4 * kLane;
#pragma unroll
      for (int j = 0; j < kLane; ++j) sign[h][j] = (flips >> j & 1) << 31;
    }
    if (p.mean.data && at[h].channel < p.grid.dim) {
      const int64_t from = p.mean.offset(tile.sequence, item.head, at[h].channel);
#pragma unroll
      for (int j = 0; j < kLane; ++j) mean[h][j] = static_cast<const float*>(p.mean.data)[from + j];
    }
  }
#pragma unroll
  for (int first = 0; first < kLane; first += batch) {
    Piece<kIn> piece[kHalves][batch];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) load_rows<kIn>(p, tile, item, at[h], first, piece[h]);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      float x[kHalves][kLane];
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const float4 low = piece_quad(piece[h][i], 0), high = piece_quad(piece[h][i], 1);
        const float row[kLane] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        const bool subtract = p.mean.data && at[h].present(first + i);  // rows without a token stay zero
#pragma unroll
        for (int j = 0; j < kLane; ++j) x[h][j] = subtract ? row[j] - mean[h][j] : row[j];
      }
      if (kWhole || p.group) rotate_row<kHalves, kWhole>(x, sign, p.group, lane);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        to[h].set(first + i, 0, {x[h][0], x[h][1], x[h][2], x[h][3]});
        to[h].set(first + i, 1, {x[h][4], x[h][5], x[h][6], x[h][7]});
      }
    }
  }
}

// ---- quantize_tiles: blocks -------------------------------------------------------------------------------------

// Largest magnitudes of the blocks, NaN if one of their elements is.
template <MxBlock kBlock, class Values>
__device__ __forceinline__ void block_amax(const Values& x, float (&amax)[kScales<kBlock>]) {
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

__device__ __forceinline__ uint32_t scale_of(float amax, MxRule rule) {
  return scale_from_amax(__float_as_uint(amax), e4m3_format(), rule);
}
// 2^(127 - scale), a normal number for every scale; NaN for NaN's, so that products are.
__device__ __forceinline__ float reciprocal(uint32_t scale) {
  return __uint_as_float(scale == kE8m0Nan ? 0x7FC00000u : (254u - scale) << 23);
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
template <MxBlock kBlock, class Values>
__device__ __forceinline__ uint32_t row_codes(const Values& x, const float (&factor)[kScales<kBlock>], int i, int q) {
  const float4 v = x.quad(i, q);
  const auto f = [&](int k) { return factor[scale_slot<kBlock>(i, 4 * q + k)]; };
  return ptx::pack_e4m3(v.x * f(0), v.y * f(1), v.z * f(2), v.w * f(3));
}

template <MxBlock kBlock, class Values>
__device__ __forceinline__ void write_copy(const DeviceMx& out, const QuantizeParams& p, const TokenTile& tile,
                                           const TileItem& item, LaneSpot at, Values& x) {
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

// The largest fp32 value stands for what rounding carries beyond it, as in the specification of images.
constexpr uint32_t kLargestBits = 0x7F7FFFFF;

// The rounded amax of a block; NaN blocks do not count.
__device__ __forceinline__ float rounded_amax(float amax, uint32_t scale) {
  if (scale == kE8m0Nan) return 0;
  uint32_t low, high;
  ptx::unpack_e4m3(ptx::pack_e4m3(amax * reciprocal(scale), 0, 0, 0), low, high);
  return fminf(ptx::low_f16(low) * decode_e8m0(uint8_t(scale)), __uint_as_float(kLargestBits));
}

// 2^(scale - tile scale) as FP16 bits. Block scales exceed the tile's by at most one binade, and 2^-24 is the least
// FP16: from 2^-19 on every code becomes zero.
__device__ __forceinline__ uint32_t rebase_factor(uint32_t scale, uint32_t tile_scale) {
  const int e = int(scale) - int(tile_scale);
  if (e > 1) return 0x4000;  // a block of NaN
  return e >= -14 ? uint32_t(15 + e) << 10 : e >= -24 ? 1u << (24 + e) : 0u;
}

__device__ __forceinline__ uint32_t rebase(uint32_t codes, uint32_t low_factor, uint32_t high_factor) {
  uint32_t low, high;
  ptx::unpack_e4m3(codes, low, high);
  return ptx::pack_e4m3_f16(ptx::mul_f16x2(low, low_factor), ptx::mul_f16x2(high, high_factor));
}

// The same shape with its role as a constant, which spares divisions.
template <ImageRole kRole>
__device__ __forceinline__ ImageShape with_role(const ImageShape& shape) {
  return {kRole, shape.heads, shape.tokens, shape.dim};
}

// One half of a warp's rows, given the scale of the image tile.
template <MxBlock kBlock, class Values>
__device__ __forceinline__ void write_image_half(const QuantizeParams& p, const TokenTile& tile, const TileItem& item,
                                                 LaneSpot at, const uint32_t (&scale)[kScales<kBlock>],
                                                 uint32_t tile_scale, Values& x) {
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

template <MxBlock kBlock, int kHalves, class Values>
__device__ __forceinline__ void write_image(const QuantizeParams& p, const TokenTile& tile, const TileItem& item,
                                            const LaneSpot (&at)[kHalves], Values (&x)[kHalves]) {
  __shared__ uint32_t warp_amax[8];
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, warps = int(blockDim.x) / 32;
  const int stripe = at[0].stripe;
  const ImageShape& shape = p.image_shape;
  uint32_t scale[kHalves][kScales<kBlock>];
  float most = 0;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    float amax[kScales<kBlock>];
    x[h].forget();
    block_amax<kBlock>(x[h], amax);
#pragma unroll
    for (int n = 0; n < kScales<kBlock>; ++n) {
      scale[h][n] = scale_of(amax[n], p.rule);
      most = fmaxf(most, rounded_amax(amax[n], scale[h][n]));
    }
  }
  // Magnitudes compare as integers.
  const uint32_t warp_most = __reduce_max_sync(~0u, __float_as_uint(most));
  if (lane == 0) warp_amax[warp] = warp_most;
  __syncthreads();
  const bool is_query = shape.role == ImageRole::query;
  const bool counts = lane < warps && (!is_query || lane % 4 / 2 == stripe / 2);
  const uint32_t tile_most = __reduce_max_sync(~0u, counts ? warp_amax[lane] : 0);
  const uint32_t tile_scale = scale_from_amax(tile_most, e4m3_format(), MxRule::rceil);
  if (lane == 0 && warp < 4 && stripe % (is_query ? 2 : 4) == 0) {
    // shape.scale_offset without its divisions: two scales a tile, or one.
    const int64_t scales = is_query ? 2 : 1, before = item.head * p.grid.tiles() + item.tile;
    const int64_t to = shape.heads * shape.tokens * shape.dim + before * scales + stripe / 2;
    p.image[to] = uint8_t(tile_scale);
  }
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    if (at[h].channel < shape.dim) write_image_half<kBlock>(p, tile, item, at[h], scale[h], tile_scale, x[h]);
  }
}

// ---- quantize_tiles ---------------------------------------------------------------------------------------------

// Calls body.operator()<block>() with a block kind as a constant.
template <class Body>
__device__ __forceinline__ void with_block(MxBlock block, Body&& body) {
  switch (block) {
    case MxBlock::square32: return body.template operator()<MxBlock::square32>();
    case MxBlock::row32: return body.template operator()<MxBlock::row32>();
    case MxBlock::col32: return body.template operator()<MxBlock::col32>();
  }
}

// kPlain: one copy of square32.
template <int kHalves, bool kPlain, class Values>
__device__ __forceinline__ void write_outputs(const QuantizeParams& p, const TokenTile& tile, const TileItem& item,
                                              const LaneSpot (&at)[kHalves], Values (&x)[kHalves]) {
#pragma unroll
  for (int n = 0; n < (kPlain ? 1 : 2); ++n) {
    const DeviceMx& out = p.copy[n];
    if (n >= p.copies || (!out.scale && !out.payload.data)) continue;
    with_block(kPlain ? MxBlock::square32 : out.block, [&]<MxBlock kBlock>() {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) write_copy<kBlock>(out, p, tile, item, at[h], x[h]);
    });
  }
  if (p.image) {
    with_block(kPlain ? MxBlock::square32 : p.copy[0].block,
               [&]<MxBlock kBlock>() { write_image<kBlock, kHalves>(p, tile, item, at, x); });
  }
  const int64_t first = int64_t(item.chunk) * kTileChannels;
  clear_slack(p, item, first, min(first + kTileChannels, p.grid.dim));
}

__device__ __forceinline__ LaneSpot lane_spot(const QuantizeParams& p, const TokenTile& tile, const TileItem& item,
                                              int half) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  LaneSpot at;
  at.stripe = warp % 4;
  at.first = warp % 4 * int(kMxBlock) + int(value_token(lane / 8 * kLane));
  at.channel = int(item.chunk) * kTileChannels + half * kHalfChannels + lane % 8 * kLane;
  at.left = at.channel < p.grid.dim ? tile.rows - at.first : 0;
  return at;
}

// Values that are quantized as they are: 4 or 8 warps, by 32 tokens and 64 channels.
template <Dtype kIn, bool kPlain>
__global__ void __launch_bounds__(256, kPlain ? 3 : 2) quantize_tiles(const __grid_constant__ QuantizeParams p) {
  const TileItem item = TileItem::of(uint32_t(p.chunks));
  if (item.tile >= p.grid.tiles()) return;
  const TokenTile tile = p.grid.tile(item.tile);
  const LaneSpot at[1] = {lane_spot(p, tile, item, int(threadIdx.x) / 128)};
  PackedValues<kIn> x[1];
  load_rows<kIn>(p, tile, item, at[0], 0, x[0].piece);
  write_outputs<1, kPlain>(p, tile, item, at, x);
}

// fp32, or smoothed or rotated values. kHalves: pieces of 64 channels that a warp takes.
template <Dtype kIn, int kHalves>
__global__ void __launch_bounds__(256 / kHalves, kHalves + 1)
    quantize_staged(const __grid_constant__ QuantizeParams p) {
  extern __shared__ float4 staged[];
  const TileItem item = TileItem::of(uint32_t(p.chunks));
  if (item.tile >= p.grid.tiles()) return;
  const TokenTile tile = p.grid.tile(item.tile);
  LaneSpot at[kHalves];
  StagedValues x[kHalves];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    at[h] = lane_spot(p, tile, item, int(threadIdx.x) / 128 + h);
    x[h].quads = staged + h * 2 * kLane * int(blockDim.x) + threadIdx.x;
  }
  if (p.group == kHalves * kHalfChannels) {
    stage<kIn, kHalves, true>(p, tile, item, at, x);
  } else {
    stage<kIn, kHalves, false>(p, tile, item, at, x);
  }
  write_outputs<kHalves, false>(p, tile, item, at, x);
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

__device__ void store_patch_scale(const DeviceMx& out, const TileGrid& grid, const TokenTile& tile,
                                  const TileItem& item, const Patch& patch, uint8_t scale) {
  const int lane = int(threadIdx.x) % 32;
  const int64_t column = patch.channel / kMxBlock, row = tile.padded_row + patch.stripe * kMxBlock;
  if (!out.scale || column >= block_columns(grid.dim, out.layout)) return;
  ScaleIndex i{item.head, row / kMxBlock, column};
  if (out.block == MxBlock::square32 && lane != 0) return;
  if (out.block == MxBlock::row32) i.row = row + lane;
  if (out.block == MxBlock::col32) i.col = patch.channel;
  if (out.block == MxBlock::col32 && out.layout == ScaleLayout::linear && !patch.in_dim) return;
  out.scale[scale_offset(out.block, out.layout, grid.padded, grid.dim, i)] = scale;
}

__global__ void __launch_bounds__(kAnyThreads, 2) quantize_any(const __grid_constant__ QuantizeParams p) {
  __shared__ float x[kMxBlock][kAnyChannels];
  __shared__ uint32_t image_amax[2];  // of 64 tokens each; the first of all 128 for keys and values
  __shared__ bool flips[kAnyChannels];
  const TileItem item = TileItem::of(uint32_t(p.chunks));
  if (item.tile >= p.grid.tiles()) return;
  const TokenTile tile = p.grid.tile(item.tile);
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t first_channel = int64_t(item.chunk) * kAnyChannels;
  const int covered = int(min(int64_t(kAnyChannels), round_up(p.covered - first_channel, kMxBlock)));
  const int channels = int(max(int64_t(0), min(int64_t(kAnyChannels), p.grid.dim - first_channel)));

  if (thread < 2) image_amax[thread] = 0;
  if (p.group && thread < channels) flips[thread] = rotation_flips(p.seed, first_channel + thread);
  const int image_shift = p.image_shape.role == ImageRole::query ? 1 : 2;  // stripes of an image tile, as a power
  LaneStats stats;
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
          if (pass == 0) store_patch_scale(out, p.grid, tile, item, patch, scale);
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

// What quantize_tiles asks of addresses and options.
bool in_pieces(const QuantizeParams& p) {
  const int64_t dim = p.grid.dim;
  if (dim > (1 << 30) || p.stats || p.in.channel_stride != 1 || dim % kLane != 0 || p.group > kTileChannels ||
      !p.in.aligned(16)) {
    return false;
  }
  for (int i = 0; i < p.copies; ++i) {
    const DeviceMx& out = p.copy[i];
    if (out.payload.dtype != Dtype::e4m3 || (out.payload.data && !out.payload.aligned(kLane))) return false;
    if (out.block == MxBlock::col32 && reinterpret_cast<uintptr_t>(out.scale) % kLane != 0) return false;
  }
  return true;
}

template <int kHalves>
Status launch_staged(const QuantizeParams& p, Launch l) {
  l.shared_bytes = size_t(l.block.x) * kHalves * kStagedBytes;
  switch (p.in.dtype) {
    case Dtype::bf16: return launch(l, quantize_staged<Dtype::bf16, kHalves>, p);
    case Dtype::f16: return launch(l, quantize_staged<Dtype::f16, kHalves>, p);
    default: return launch(l, quantize_staged<Dtype::f32, kHalves>, p);
  }
}

template <Dtype kIn>
Status launch_packed(const QuantizeParams& p, const Launch& l, bool plain) {
  return plain ? launch(l, quantize_tiles<kIn, true>, p) : launch(l, quantize_tiles<kIn, false>, p);
}

// Four warps, or eight where two share 128 channels; a rotation of 128 channels takes one warp for all.
Status launch_pieces(const QuantizeParams& p, Launch l) {
  const bool wide = p.group > kHalfChannels;
  l.block = dim3(unsigned(4 * 32 * (!wide && p.covered > kHalfChannels ? 2 : 1)));
  if (wide) return launch_staged<2>(p, l);
  if (p.group || p.mean.data || p.in.dtype == Dtype::f32) return launch_staged<1>(p, l);
  const bool plain = p.copies == 1 && p.copy[0].block == MxBlock::square32;
  return p.in.dtype == Dtype::bf16 ? launch_packed<Dtype::bf16>(p, l, plain) : launch_packed<Dtype::f16>(p, l, plain);
}

Status quantize_cuda(const Quantize& args, Stream stream) {
  const DeviceGuard guard(args.in.device.index);
  MXFLASH_TRY(guard.status());
  QuantizeParams p = params_of(args);
  if (p.stats) {
    MXFLASH_TRY(cuda_status(cudaMemsetAsync(p.stats, 0, sizeof(QuantizeStats), stream), "quantize: stats"));
  }
  if (args.smooth) MXFLASH_TRY(launch_mean(p.in, p.grid, p.mean, stream));

  const bool pieces = in_pieces(p);
  p.chunks = ceil_div(p.covered, pieces ? kTileChannels : kAnyChannels);
  const Launch l{
      .what = "quantize: sm90", .grid = tile_items(p.grid, p.chunks), .block = dim3(kAnyThreads), .stream = stream};
  return pieces ? launch_pieces(p, l) : launch(l, quantize_any, p);
}

Status supports(const Quantize& args) {
  MXFLASH_TRY(check_compute_capability("quantize", "sm90", args.in.device.index, 90));
  const QuantizeParams p = params_of(args);
  MXFLASH_TRY(check_items("quantize", p.grid, ceil_div(p.covered, kTileChannels)));
  return args.smooth ? check_mean("quantize", p.grid) : Status{};
}

Status supports_image(const WriteImage& a) {
  MXFLASH_TRY(check_compute_capability("write_image", "sm90", a.in.data.device.index, 90));
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

const Impl<Quantize> kQuantizeSm90 = sm90_backend<Quantize>(supports, quantize_cuda);
const Impl<WriteImage> kWriteImageSm90 = sm90_backend<WriteImage>(supports_image, write_image_cuda);

}  // namespace mxflash
