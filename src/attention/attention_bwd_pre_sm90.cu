// From the operands of attention_bwd to the records that its main kernel on Hopper reads (attention_bwd_sm90.cuh).
//
//   head_scales   a CTA for a sequence and key head: t, w of its row tiles, kt; clears what the others take maxima into
//   key_records   a CTA for 128 keys of a key head: K, V, K^T, their scales, the largest ||V_j||; clears rows of dk and
//                 dv that belong to no sequence
//   row_records   a CTA for 64 rows of a query head: Q, Q^T, dO, dO^T, lse', delta', what bounds dS8; clears dQ, or
//                 its turns
//
// A record is made in shared memory and leaves it as one bulk copy. A warp has 16 tokens. A thread has two of them,
// that are neighbours in the transposed record, and of each one or two pieces of 16 channels: a copy of 16 bytes each,
// to where their new codes are to be. Pairs of codes are then the 16-bit elements that stmatrix transposes. Rows
// without a token, or without a visible key, are zeros.
//
// Each kernel starts while the one before it ends, and waits for it where it needs what that one found out. The first
// one is launched without, so that nothing of this call starts before what came ahead of it in the stream is done.
// docs/hopper.md has the times.
#include "attention/accumulators.cuh"
#include "attention/attention_bwd_sm90.cuh"
#include "attention/mx_piece.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/convert.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "runtime/launch.cuh"

namespace mxflash::bwd_sm90 {
namespace {

constexpr float kLog2e = 1.44269504088896341f;

// Rows of a [rows, heads, dim] tensor, 8 channels at a time, as fp32.
struct FloatOperand {
  Tensor t;
  bool wide;  // 8 channels are aligned to 16 bytes
  static FloatOperand of(const Tensor& t) {
    const int64_t size = dtype_size(t.dtype);
    return {t, reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride[0] * size % 16 == 0 &&
                   t.stride[1] * size % 16 == 0};
  }
  bool plain() const { return wide && t.dtype == Dtype::bf16 && t.stride[0] >= 0 && t.stride[0] < 1 << 23; }

  // `at` is the offset of the first row in this head. Of a plain operand:
  __device__ __forceinline__ const void* address(int64_t at, int row, int channel) const {
    return static_cast<const uint16_t*>(t.data) + at + (row * int(t.stride[0]) + channel);
  }
  // Eight elements as they are in memory, of any; four words of 2-byte ones.
  __device__ __forceinline__ void load(int64_t at, int row, int channel, uint32_t (&word)[8]) const {
    if (t.dtype == Dtype::f32) {
      const uint32_t* from = static_cast<const uint32_t*>(t.data) + at + row * t.stride[0] + channel;
#pragma unroll
      for (int i = 0; i < 8; ++i) word[i] = from[i];
      return;
    }
    const uint16_t* from = static_cast<const uint16_t*>(t.data) + at + row * t.stride[0] + channel;
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = from[2 * i] | uint32_t(from[2 * i + 1]) << 16;
  }
  // Element i of those as fp32.
  template <bool kPlain>
  __device__ __forceinline__ float element(const uint32_t (&word)[kPlain ? 4 : 8], int i) const {
    if (!kPlain && t.dtype == Dtype::f32) return __uint_as_float(word[kPlain ? 0 : i]);
    const uint32_t pair = word[i / 2];
    if (kPlain || t.dtype == Dtype::bf16) return __uint_as_float(i & 1 ? pair & 0xFFFF0000u : pair << 16);
    return i & 1 ? ptx::high_f16(pair) : ptx::low_f16(pair);
  }
};

struct PreParams {
  MxOperand q, q_col, k, k_col, v, dout, dout_col;
  bool own_q_col, own_k_col, own_dout_col;  // other bytes than those of q, k, dout
  FloatOperand out;
  Tensor lse, row_exponent, v_mean, dlse;
  Tensor dk, dv;  // slack rows are cleared; may be null
  TokenAxis out_axis, k_axis;
  int32_t heads_q, heads_kv, group, head_dim, head_dim_v;
  int32_t row_tiles, key_tiles;
  bool ordered;  // dQ is added up by turns, which are cleared; else dQ is
  int32_t cleared_heads;
  int32_t dq_bytes;  // of a row tile
  bool consistent;   // delta is the mean of dP with weights P
  bool shared_q;
  Workspace w;
};

// What a CTA of 64 rows knows about its tile.
struct RowTokens {
  int32_t sequence;
  int64_t first_out, first_q;    // of the tile's first row, in the packed tensors
  int64_t padded_out, padded_q;  // and on the padded axes
  int rows;                      // that have a token; <= 0: none
  __device__ __forceinline__ RowTokens(const PreParams& p, int32_t tile) {
    const Owner owner = p.out_axis.owner(tile * kRows);
    const int32_t first = tile * kRows - int32_t(owner.sequence.padded_start);
    sequence = owner.index;
    first_out = owner.sequence.start + first;
    padded_out = tile * kRows;
    first_q = p.shared_q ? first : first_out;
    padded_q = p.shared_q ? first : padded_out;
    rows = min(int32_t(owner.sequence.length) - first, kRows);
  }
};

__device__ __forceinline__ float row_value(const Tensor& t, int64_t head, int64_t row) {
  return static_cast<const float*>(t.data)[head * t.stride[0] + row];
}
__device__ __forceinline__ int row_exponent(const PreParams& p, int64_t head, int64_t row) {
  return static_cast<const uint8_t*>(p.row_exponent.data)[head * p.row_exponent.stride[0] + row];
}

// A magnitude as what it bounds: NaN nothing, Inf as much as fp32 can.
__device__ __forceinline__ float finite(float x) { return fminf(fmaxf(x, 0.0f), FLT_MAX); }

// A row whose gradient comes from lse alone has the scale of what dout would have to be; v: the exponent of V.
__device__ __forceinline__ int dlse_exponent(float dlse, int v) {
  if (!(fabsf(dlse) <= FLT_MAX)) return kNoExponent;
  return exponent_for(finite(times_power_of_two(fabsf(dlse), -v - 8)));
}

// Largest of the CTA's threads, for each of kCount values; everyone gets it.
template <int kCount>
using MaxScratch = int[32][kCount];
template <int kCount>
__device__ __forceinline__ void block_max(int (&x)[kCount], MaxScratch<kCount>& scratch) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int most = __reduce_max_sync(~0u, x[i]);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32][i] = most;
  }
  __syncthreads();
  const int warp = int(threadIdx.x % 32) % (int(blockDim.x) / 32);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = __reduce_max_sync(~0u, scratch[warp][i]);
}

__device__ void clear_rows(const Tensor& t, const Jagged& seq, int64_t head, int64_t tile, int64_t tiles) {
  if (!t || !seq.cu_seqlens) return;
  for (int64_t token = seq.cu_seqlens[seq.batch] + tile; token < t.shape[0]; token += tiles) {
    for (int64_t c = threadIdx.x; c < t.shape[2]; c += blockDim.x) {
      store_element(t, token * t.stride[0] + head * t.stride[1] + c, 0);
    }
  }
}

// ---- scales of heads ----------------------------------------------------------------------------------------------

constexpr int kHeadThreads = 512;
constexpr int kRunRows = kRunTiles * kRows;
static_assert(kRunRows == 32 * 32);  // a lane for a block of 32 rows

// Exponents of the runs that a tile lies in: lanes 2 i and 2 i + 1 have those of tile i. A run is as long as its tiles'
// exponents lie within kRunBinades, and has the largest of them. Tiles of nothing but NaN fit everywhere.
template <int kCount>
__device__ __forceinline__ void to_runs(int (&exponent)[kCount], int lane) {
  constexpr int kNone = -kNoExponent;
  int begin[kCount], most[kCount], least[kCount], result[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) begin[n] = 0, most[n] = kNoExponent, least[n] = kNone, result[n] = exponent[n];
#pragma unroll 1
  for (int i = 0; i <= kRunTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int x = __shfl_sync(~0u, exponent[n], 2 * i), low = x == kNoExponent ? kNone : x;
      const bool ends = i == kRunTiles || max(most[n], x) - min(least[n], low) > kRunBinades;
      if (ends && lane / 2 >= begin[n] && lane / 2 < i) result[n] = most[n];
      begin[n] = ends ? i : begin[n];
      most[n] = ends ? x : max(most[n], x);
      least[n] = ends ? low : min(least[n], low);
    }
  }
#pragma unroll
  for (int n = 0; n < kCount; ++n) exponent[n] = result[n];
}

template <bool kPlain>
__global__ void __launch_bounds__(kHeadThreads, 1) head_scales(const __grid_constant__ PreParams p) {
  __shared__ MaxScratch<1> v_scratch;
  __shared__ MaxScratch<4> scratch;
  ptx::griddepcontrol_launch_dependents();
  const int32_t sequence = int32_t(blockIdx.x) / p.heads_kv, kv_head = int32_t(blockIdx.x) % p.heads_kv;
  const Sequence out = p.out_axis.sequence(sequence), keys = p.k_axis.sequence(sequence);
  const MxRows<kPlain> k_col(p.k_col, kv_head, keys.start, keys.padded_start);
  const MxRows<kPlain> v(p.v, kv_head, keys.start, keys.padded_start);
  int kt = kNoExponent, v_most[1] = {kNoExponent};
  for (int key = 32 * int(threadIdx.x); key < keys.length; key += 32 * int(blockDim.x)) {
    kt = max(kt, k_col.exponent_of_block(key, int(keys.length)));
    if (p.dlse) v_most[0] = max(v_most[0], v.exponent_of_block(key, int(keys.length)));
  }
  if (p.dlse) block_max(v_most, v_scratch);

  int t = kNoExponent, w = kNoExponent;  // the largest exponents that they are to undo
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, warps = int(blockDim.x) / 32;
  const int length = int(out.length), runs = (length + kRunRows - 1) / kRunRows;
  for (int id = warp; id < p.group * runs; id += warps) {
    const int head = kv_head * p.group + id / runs, first = id % runs * kRunRows, block = first + 32 * lane;
    const int64_t q_start = p.shared_q ? 0 : out.start, q_padded = p.shared_q ? 0 : out.padded_start;
    const int q_most = MxRows<kPlain>(p.q_col, head, q_start, q_padded).exponent_of_block(block, length);
    int dout = MxRows<kPlain>(p.dout, head, out.start, out.padded_start).exponent_of_block(block, length);
    const int dout_t =
        p.own_dout_col ? MxRows<kPlain>(p.dout_col, head, out.start, out.padded_start).exponent_of_block(block, length)
                       : dout;
    // The least row_exponent of each block: P 2^-row_exponent. All loads are in flight at once.
    int of_rows[32], least = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int row = first + 32 * i + lane;
      of_rows[i] = row < length ? row_exponent(p, head, out.start + row) : 255;
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int e = __reduce_min_sync(~0u, of_rows[i]);
      if (i == lane) least = e;
    }
    if (p.dlse) {
      for (int i = 0; i < 32; ++i) {
        const int row = first + 32 * i + lane;
        const int e = row < length ? dlse_exponent(row_value(p.dlse, head, out.start + row), v_most[0]) : kNoExponent;
        const int most = __reduce_max_sync(~0u, e);
        if (i == lane) dout = max(dout, most);
      }
    }
    // er >= -dout for every row, so |q| 2^-(pe + er) <= 448 2^(q_most + dout - pe).
    const auto bound = [&](bool any, int e) { return any ? max(e - 8 - least, kNoExponent + 1) : kNoExponent; };
    int tile[2] = {bound(q_most != kNoExponent && dout != kNoExponent, q_most + dout),
                   bound(dout_t != kNoExponent, dout_t)};
#pragma unroll
    for (int& e : tile) e = max(e, __shfl_xor_sync(~0u, e, 1));
    to_runs(tile, lane);
    t = max(t, tile[0]), w = max(w, tile[1]);
    if (lane % 2 == 0 && block < length) {
      RowTile& to = p.w.row_tile[int64_t(head) * p.row_tiles + (out.padded_start + block) / kRows];
      to.t = -tile[0], to.w = -tile[1];
    }
  }
  int most[4] = {t, w, kt, 0};
  block_max(most, scratch);
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) *p.w.plan.counter = 0;
  const auto unit = [](int e) { return e == kNoExponent ? 0 : -e; };
  p.w.head_scale[blockIdx.x] = {unit(most[0]), unit(most[1]), most[2], v_most[0], 0, 0, 0, 0, 0};
}

// ---- what both kinds of records share -----------------------------------------------------------------------------

// Transposes codes of 16 tokens into rows of kSpan tokens, channel by channel: 16 bytes from 16 * warp on. A thread has
// tokens 2 (lane / 4) and the next of that order, 16 channels from 16 (lane % 4) on.
template <int kSpan>
struct Transposer {
  uint32_t to;  // where this lane's row of a matrix goes
  uint32_t selector[2];
  // Matrices are pairs of channels of each thread. Odd threads of a quad have each two of them the other way round, so
  // that fewer rows of a matrix lie in the same banks.
  __device__ __forceinline__ Transposer(uint32_t shared, int warp, int lane) {
    const int matrix = lane / 8, quad = lane % 8 / 2;
    const int channel = 16 * quad + 4 * (matrix / 2) + 2 * ((matrix ^ quad) & 1) + lane % 2;
    to = shared + uint32_t(swizzled(channel * kSpan + 16 * warp, kSpan));
    selector[0] = lane % 2 ? 0x7362 : 0x5140;
    selector[1] = lane % 2 ? 0x5140 : 0x7362;
  }
  // Channels from 64 piece + 16 (lane % 4) on.
  __device__ __forceinline__ void put(int piece, const uint4& a, const uint4& b) const {
    const auto pairs = [&](uint32_t x0, uint32_t y0, uint32_t x1, uint32_t y1, int first) {
      const uint32_t r[4] = {__byte_perm(x0, y0, selector[0]), __byte_perm(x0, y0, selector[1]),
                             __byte_perm(x1, y1, selector[0]), __byte_perm(x1, y1, selector[1])};
      ptx::store_matrices_transposed(to + (64 * piece + first) * kSpan, r);
    };
    pairs(a.x, b.x, a.y, b.y, 0);
    pairs(a.z, b.z, a.w, b.w, 8);
  }
};

// The record leaves shared memory as one copy. For all threads of the CTA, after their last write to it; `last` is for
// one of them, when all others are done.
template <class Last>
__device__ __forceinline__ void store_record(uint8_t* to, const uint8_t* record, int bytes, Last&& last) {
  ptx::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x != 0) return;
  last();
  ptx::fence_proxy_async();
  ptx::bulk_store(to, ptx::shared_address(record), bytes);
  ptx::bulk_commit();
  ptx::bulk_wait_read<0>();
}

// Where 16 codes of a token lie in a record.
__device__ __forceinline__ uint4* codes_at(uint8_t* codes, int dim, int token, int channel) {
  return reinterpret_cast<uint4*>(codes + int(swizzled(token * dim + channel, dim)));
}

// Pieces n of tokens `token` and `token + step`, channels from channel + 64 n on, on their way to where their new codes
// are to be; zeros in place of what is not there.
template <int kDim, bool kPlain>
__device__ __forceinline__ void fetch_pieces(const MxRows<kPlain>& t, uint8_t* codes, int token, int step, int tokens,
                                             int channel) {
#pragma unroll
  for (int n = 0; n < kDim / 64; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = token + step * i, c = channel + 64 * n;
      uint4* to = codes_at(codes, kDim, at, c);
      const bool there = at < tokens && c < t.t.dim;
      if (kPlain) {
        ptx::async_copy_16(ptx::shared_address(to), t.address(at, c), there);
      } else {
        *to = there ? t.load(at, c) : make_uint4(0, 0, 0, 0);
      }
    }
  }
}
// Of plain operands, where they have been fetched: zeros in hidden rows, NaN where a scale is. Most warps have neither.
template <int kDim>
__device__ __forceinline__ void settle_pieces(uint8_t* codes, int token, int step, int channel,
                                              const int (&exponent)[kDim / 64], const bool (&there)[2]) {
  bool any = !there[0] || !there[1];
#pragma unroll
  for (const int e : exponent) any |= e == kNoExponent;
  if (!__any_sync(~0u, any)) return;
#pragma unroll
  for (int n = 0; n < kDim / 64; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t code = there[i] ? kNanCodes : 0;
      if (!there[i] || exponent[n] == kNoExponent) {
        *codes_at(codes, kDim, token + step * i, channel + 64 * n) = make_uint4(code, code, code, code);
      }
    }
  }
}
template <int kDim, bool kPlain>
__device__ __forceinline__ Piece fetched(const MxRows<kPlain>& t, uint8_t* codes, int token, int channel, int exponent,
                                         bool there) {
  const uint4 x = *codes_at(codes, kDim, token, channel);
  if constexpr (kPlain) {
    return MxRows<kPlain>::unpack_plain(x, exponent);
  } else {
    return t.unpack(x, token, channel, there && channel < t.t.dim);
  }
}

// ---- key records --------------------------------------------------------------------------------------------------

constexpr int kKeyThreads = 256;
template <int kDim>
constexpr int kKeyShared = KeyRecord::bytes(kDim) + int(sizeof(MaxScratch<2>));

template <int kDim, bool kPlain>
__global__ void __launch_bounds__(kKeyThreads, kPlain ? 4 : 1) key_records(const __grid_constant__ PreParams p) {
  constexpr int kPieces = kDim / 64;
  extern __shared__ __align__(128) uint8_t record[];
  MaxScratch<2>& scratch = *reinterpret_cast<MaxScratch<2>*>(record + KeyRecord::bytes(kDim));
  __shared__ int norms[kKeyThreads / 32];
  ptx::griddepcontrol_launch_dependents();
  const int32_t tile = int32_t(blockIdx.x), head = int32_t(blockIdx.y), padded = tile * kKeys;
  clear_rows(p.dk, p.k_axis.seq, head, tile, p.key_tiles);
  clear_rows(p.dv, p.k_axis.seq, head, tile, p.key_tiles);
  const Owner owner = p.k_axis.owner(padded);
  const Sequence& s = owner.sequence;
  const int32_t first = padded - int32_t(s.padded_start), keys = min(int32_t(s.length) - first, kKeys);
  if (keys <= 0) return ptx::griddepcontrol_wait();
  const MxRows<kPlain> k(p.k, head, s.start + first, padded), v(p.v, head, s.start + first, padded);

  // Keys `key` and `key + 8`, pieces from `channel` and `channel + 64` on.
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int key = 16 * warp + lane / 4, channel = 16 * (lane % 4);
  uint8_t *const k_codes = record + KeyRecord::k(kDim), *const v_codes = record + KeyRecord::v(kDim);
  fetch_pieces<kDim>(v, v_codes, key, 8, keys, channel);
  fetch_pieces<kDim>(k, k_codes, key, 8, keys, channel);

  // Scales. Plain ones are 4 x 4 bytes of K, which the first lanes hold, and of V.
  int exponent = kAbsent, most[2] = {kNoExponent, kNoExponent};
  if (kPlain) {
    const int block_row = 32 * (lane / 4 % 4), col = 32 * (lane % 4);
    if (block_row < keys && col < (lane < 16 ? p.head_dim : p.head_dim_v)) {
      exponent = lane < 16 ? k.exponent_of(block_row, col) : v.exponent_of(block_row, col);
    }
    most[0] = __reduce_max_sync(~0u, lane < 16 ? exponent : kNoExponent);
    most[1] = __reduce_max_sync(~0u, lane < 16 ? kNoExponent : exponent);
  } else {
#pragma unroll 1
    for (int c = channel; c < kDim; c += c % 16 ? 56 : 8) {
#pragma unroll 1
      for (int at = key; at < keys && at <= key + 8; at += 8) {
        if (c < p.head_dim) most[0] = max(most[0], k.exponent_of_8(at, c));
        if (c < p.head_dim_v) most[1] = max(most[1], v.exponent_of_8(at, c));
      }
    }
    block_max(most, scratch);
  }
  const int k_scale = most[0], v_scale = most[1];
  // Plain exponents of this thread's pieces.
  int e_k[kPieces], e_v[kPieces];
  const bool there[2] = {key < keys, key + 8 < keys};
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    const int from = 4 * (warp / 2) + channel / 32 + 2 * n;
    e_k[n] = __shfl_sync(~0u, exponent, from);
    e_v[n] = __shfl_sync(~0u, exponent, 16 + from);
  }
  ptx::griddepcontrol_wait();
  HeadScale& scale = p.w.head_scale[owner.index * p.heads_kv + head];
  const int kt = scale.kt;
  ptx::async_copy_wait();
  if (kPlain) {
    settle_pieces<kDim>(k_codes, key, 8, channel, e_k, there);
    settle_pieces<kDim>(v_codes, key, 8, channel, e_v, there);
  }

  float squares[2] = {};
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = key + 8 * i, c = channel + 64 * n;
      const Piece piece = fetched<kDim>(v, v_codes, at, c, e_v[n], there[i]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = 0;
#pragma unroll
        for (int two = 4 * h; two < 4 * h + 4; ++two) {
          const float low = ptx::low_f16(piece.pair[two]), high = ptx::high_f16(piece.pair[two]);
          sum = fmaf(low, low, fmaf(high, high, sum));
        }
        const float unit = power_of_two(piece.exponent[h] - v_scale);
        squares[i] = fmaf(sum, unit * unit, squares[i]);
      }
      *codes_at(v_codes, kDim, at, c) = encode_piece(piece, -v_scale);
    }
  }
  // Not negative, so ordered like integers; fmaxf passes over NaN.
  const float norm = fmaxf(0.0f, fmaxf(quad_sum(squares[0]), quad_sum(squares[1])));
  const int warp_norm = __reduce_max_sync(~0u, __float_as_int(norm));
  if (lane == 0) norms[warp] = warp_norm;

  const MxRows<kPlain> k_col(p.k_col, head, s.start + first, padded);
  const Transposer<kKeys> transposed(ptx::shared_address(record + KeyRecord::k_t(kDim)), warp, lane);
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    uint4 codes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = key + 8 * i, c = channel + 64 * n;
      Piece piece = fetched<kDim>(k, k_codes, at, c, e_k[n], there[i]);
      codes[i] = encode_piece(piece, -k_scale);
      *codes_at(k_codes, kDim, at, c) = codes[i];
      if (!kPlain && p.own_k_col) {
        if (there[i] && c < p.head_dim) piece = k_col.unpack(k_col.load(at, c), at, c, true);
        codes[i] = encode_piece(piece, -kt);
      } else if (kt != k_scale) {
        codes[i] = encode_piece(piece, -kt);
      }
    }
    transposed.put(n, codes[0], codes[1]);
  }
  const int64_t index = int64_t(head) * p.key_tiles + tile;
  constexpr int kBytes = KeyRecord::bytes(kDim);
  store_record(p.w.keys + index * kBytes, record, kBytes, [&] {
    int largest = 0;
#pragma unroll
    for (const int x : norms) largest = max(largest, x);
    const float v_norm = finite(times_power_of_two(sqrtf(__int_as_float(largest)), v_scale));
    atomicMax(reinterpret_cast<int*>(&scale.v_norm), __float_as_int(v_norm));
    p.w.key_tile[index] = {k_scale, v_scale};
  });
}

// ---- row records --------------------------------------------------------------------------------------------------

constexpr int kRowThreads = 128;

template <int kDim, bool kPlain>
constexpr int kRowCtas = !kPlain      ? 1
                         : kDim == 64 ? 8
                                      : 6;  // of an SM

template <int kDim, bool kPlain>
__global__ void __launch_bounds__(kRowThreads, kRowCtas<kDim, kPlain>)
    row_records(const __grid_constant__ PreParams p) {
  constexpr int kPieces = kDim / 64;
  __shared__ __align__(128) uint8_t record[RowRecord::bytes(kDim)];
  __shared__ MaxScratch<1> scratch;
  __shared__ int bounds[kRowThreads / 32][3];
  ptx::griddepcontrol_launch_dependents();
  const int32_t tile = int32_t(blockIdx.x), head = int32_t(blockIdx.y);
  const int32_t kv_head = head / p.group;
  const int64_t index = int64_t(head) * p.row_tiles + tile;
  const RowTokens tokens(p, tile);
  if (p.ordered && threadIdx.x < 2) p.w.dq_turn[2 * index + threadIdx.x] = 0;
  if (tokens.rows <= 0) return ptx::griddepcontrol_wait();
  const MxRows<kPlain> q(p.q, head, tokens.first_q, tokens.padded_q);
  const MxRows<kPlain> dout(p.dout, head, tokens.first_out, tokens.padded_out);

  // Rows `row` and `row + 1`, pieces from `channel` and `channel + 64` on.
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, pair = lane / 4;
  const int row = 16 * warp + 8 * (pair & 1) + 2 * (pair >> 1), channel = 16 * (lane % 4);
  const int64_t out_row = tokens.first_out + row;
  const int64_t out_at = tokens.first_out * p.out.t.stride[0] + head * p.out.t.stride[1];
  int exponent = kAbsent;  // plain: 2 x 4 of Q in the first lanes, and of dO
  if (kPlain && lane < 16) {
    const int block_row = 32 * (lane / 4 % 2), col = 32 * (lane % 4);
    if (block_row < tokens.rows && col < (lane < 8 ? p.head_dim : p.head_dim_v)) {
      exponent = lane < 8 ? q.exponent_of(block_row, col) : dout.exponent_of(block_row, col);
    }
  }
  float lse[2] = {-INFINITY, -INFINITY};
  int pe[2] = {8, 8};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row + i >= tokens.rows) continue;
    lse[i] = row_value(p.lse, head, out_row + i);
    pe[i] += row_exponent(p, head, out_row + i);
  }
  // out waits where Q^T and dO^T are to be; they are written when everyone has read it. Pieces of 8 channels, moved so
  // that those of rows 8 apart lie in different banks.
  uint8_t *const q_codes = record + RowRecord::q(kDim), *const dout_codes = record + RowRecord::dout(kDim);
  const auto out_piece = [&](int at, int c) {
    const int piece = at * (kDim / 8) + (c / 8 ^ (at / 8 & 1));
    constexpr int kHalf = kRows * kDim / 16;  // what fits each
    return reinterpret_cast<uint4*>(record + (piece < kHalf ? RowRecord::q_t(kDim) : RowRecord::dout_t(kDim))) +
           piece % kHalf;
  };
  fetch_pieces<kDim>(dout, dout_codes, row, 1, tokens.rows, channel);
  if (kPlain) {
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {  // neighbouring lanes have neighbouring pieces
      const int id = 32 * i + lane, at = 16 * warp + id / (kDim / 8), c = id % (kDim / 8) * 8;
      const bool there = at < tokens.rows && c < p.head_dim_v;
      ptx::async_copy_16(ptx::shared_address(out_piece(at, c)), p.out.address(out_at, at, c), there);
    }
  }
  fetch_pieces<kDim>(q, q_codes, row, 1, tokens.rows, channel);
  if (!p.ordered && tokens.sequence * p.heads_kv + kv_head < p.cleared_heads) {
    uint4* dq = reinterpret_cast<uint4*>(p.w.dq + index * p.dq_bytes);
#pragma unroll 4
    for (int i = int(threadIdx.x); i < p.dq_bytes / 16; i += kRowThreads) dq[i] = make_uint4(0, 0, 0, 0);
  }
  const bool there[2] = {lse[0] != -INFINITY, lse[1] != -INFINITY};
  ptx::griddepcontrol_wait();
  HeadScale& scale = p.w.head_scale[tokens.sequence * p.heads_kv + kv_head];
  const RowTile units = p.w.row_tile[index];
  const int t = min(units.t, scale.t + kUnitRange), w = min(units.w, scale.w + kUnitRange);

  // The largest exponents of rows of dO (plain: of the rows' block), and plain exponents of this thread's pieces.
  int e_q[kPieces], e_dout[kPieces], top[2];
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    const int from = 4 * (warp / 2) + channel / 32 + 2 * n;
    e_q[n] = __shfl_sync(~0u, exponent, from);
    e_dout[n] = __shfl_sync(~0u, exponent, 8 + from);
  }
  ptx::async_copy_wait();
  __syncwarp();
  if (kPlain) {
    settle_pieces<kDim>(q_codes, row, 1, channel, e_q, there);
    settle_pieces<kDim>(dout_codes, row, 1, channel, e_dout, there);
    const bool own = lane >= 8 && lane < 16 && lane / 4 % 2 == warp / 2;
    top[0] = top[1] = max(__reduce_max_sync(~0u, own ? exponent : kNoExponent), -kE8m0Bias);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = -kE8m0Bias;
      for (int c = channel; c < p.head_dim_v; c += c % 16 ? 56 : 8) {
        if (there[i]) top[i] = max(top[i], dout.exponent_of_8(row + i, c));
      }
      top[i] = max(top[i], __shfl_xor_sync(~0u, top[i], 1));
      top[i] = max(top[i], __shfl_xor_sync(~0u, top[i], 2));
    }
  }

  // In units of 2^top: dO . (out - v_mean), ||dO||^2, the largest |dO|.
  float dot[2] = {}, squares[2] = {}, largest[2] = {};
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    Piece piece[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      piece[i] = fetched<kDim>(dout, dout_codes, row + i, channel + 64 * n, e_dout[n], there[i]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c0 = channel + 64 * n + 8 * h;
      float partial[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t out[kPlain ? 4 : 8] = {};
        if constexpr (kPlain) {
          const uint4 words = *out_piece(row + i, c0);
          out[0] = words.x, out[1] = words.y, out[2] = words.z, out[3] = words.w;
        } else if (there[i] && c0 < p.head_dim_v) {
          p.out.load(out_at, row + i, c0, out);
        }
        const float unit = power_of_two(piece[i].exponent[h] - top[i]);
        float sum = 0;
        uint32_t amax = 0;
#pragma unroll
        for (int c = 0; c < 8; c += 2) {
          const uint32_t two = piece[i].pair[4 * h + c / 2];
          const float low = ptx::low_f16(two), high = ptx::high_f16(two);
          partial[i] = fmaf(low, p.out.element<kPlain>(out, c), partial[i]);
          partial[i] = fmaf(high, p.out.element<kPlain>(out, c + 1), partial[i]);
          sum = fmaf(low, low, fmaf(high, high, sum));
          amax = ptx::max_magnitude_f16x2(amax, two);
        }
        squares[i] = fmaf(sum, unit * unit, squares[i]);
        largest[i] = fmaxf(largest[i], fmaxf(ptx::low_f16(amax), ptx::high_f16(amax)) * unit);
      }
      if (p.v_mean && c0 < p.head_dim_v) {
        const float* mean = static_cast<const float*>(p.v_mean.data) + tokens.sequence * p.v_mean.stride[0] +
                            kv_head * p.v_mean.stride[1] + c0;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t two = piece[i].pair[4 * h + c / 2];
            partial[i] = fmaf(c & 1 ? ptx::high_f16(two) : ptx::low_f16(two), -mean[c], partial[i]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) dot[i] = fmaf(partial[i], power_of_two(piece[i].exponent[h] - top[i]), dot[i]);
    }
  }
  int er[2], bound[3] = {};  // norm and delta as in HeadScale; pe
  float delta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    dot[i] = quad_sum(dot[i]);
    squares[i] = quad_sum(squares[i]);
    // Small enough for the FP16 factor of every piece.
    const int up = -max(exponent_for(quad_max(largest[i])), -kMaxPairExponent);
    er[i] = up - top[i];
    delta[i] = dot[i] * power_of_two(up);
    float norm = sqrtf(squares[i]) * power_of_two(up);
    if (!kPlain && p.dlse && there[i]) {
      const float dlse = row_value(p.dlse, head, out_row + i);
      er[i] = min(er[i], -max(dlse_exponent(dlse, scale.v), -252));
      delta[i] = times_power_of_two(dot[i], top[i] + er[i]) - times_power_of_two(dlse, er[i]);
      norm = times_power_of_two(sqrtf(squares[i]), top[i] + er[i]);
    }
    const bool sound = fabsf(delta[i]) <= FLT_MAX;
    if (!sound) delta[i] = NAN;
    if (there[i]) {
      // |dS8| <= 256 (||dO8|| ||V|| + |delta'|). Where P may exceed a half, delta is the mean of dP: |dP - delta| <= 2
      // (1 - P) ||dO|| ||V||, and P8 (1 - P) <= 64. An eighth more is for an out that comes from rounded P, and is
      // rounded.
      const bool large = p.consistent && pe[i] == 8;
      bound[0] = max(bound[0], __float_as_int(finite(large ? 0.5625f * norm : norm)));
      if (!large && sound) bound[1] = max(bound[1], __float_as_int(fabsf(delta[i])));
      bound[2] = max(bound[2], pe[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int most = __reduce_max_sync(~0u, bound[i]);
    if (lane == 0) bounds[warp][i] = most;
  }
  if (lane % 4 == 0) {
    float* stats = reinterpret_cast<float*>(record + RowRecord::lse(kDim)) + 16 * warp + 2 * pair;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      stats[i] = there[i] ? lse[i] * kLog2e - float(pe[i]) : INFINITY;
      stats[kRows + i] = there[i] ? delta[i] : 0;
    }
    *reinterpret_cast<short2*>(p.w.row_unit + index * kRows + row) =
        make_short2(short(pe[0] + er[0]), short(pe[1] + er[1]));
  }

  int q_scale[1] = {kNoExponent};
  if (kPlain) {
    q_scale[0] = __reduce_max_sync(~0u, lane < 8 ? exponent : kNoExponent);
  } else {
#pragma unroll 1
    for (int c = channel; c < p.head_dim; c += c % 16 ? 56 : 8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (there[i]) q_scale[0] = max(q_scale[0], q.exponent_of_8(row + i, c));
      }
    }
    block_max(q_scale, scratch);
  }
  __syncthreads();  // out has been read
  const MxRows<kPlain> q_col(p.q_col, head, tokens.first_q, tokens.padded_q);
  const MxRows<kPlain> dout_col(p.dout_col, head, tokens.first_out, tokens.padded_out);
  const Transposer<kRows> q_t(ptx::shared_address(record + RowRecord::q_t(kDim)), warp, lane);
  const Transposer<kRows> dout_t(ptx::shared_address(record + RowRecord::dout_t(kDim)), warp, lane);
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    const int c = channel + 64 * n;
    uint4 codes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Piece z = fetched<kDim>(dout, dout_codes, row + i, c, e_dout[n], there[i]);
      *codes_at(dout_codes, kDim, row + i, c) = encode_piece(z, er[i]);
      if (!kPlain && p.own_dout_col && there[i] && c < p.head_dim_v) {
        z = dout_col.unpack(dout_col.load(row + i, c), row + i, c, true);
      }
      codes[i] = encode_piece(z, w - pe[i]);
    }
    dout_t.put(n, codes[0], codes[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Piece z = fetched<kDim>(q, q_codes, row + i, c, e_q[n], there[i]);
      *codes_at(q_codes, kDim, row + i, c) = encode_piece(z, -q_scale[0]);
      if (!kPlain && p.own_q_col && there[i] && c < p.head_dim) {
        z = q_col.unpack(q_col.load(row + i, c), row + i, c, true);
      }
      codes[i] = encode_piece(z, t - pe[i] - er[i]);
    }
    q_t.put(n, codes[0], codes[1]);
  }
  constexpr int kBytes = RowRecord::bytes(kDim);
  store_record(p.w.rows + index * kBytes, record, kBytes, [&] {
    int most[3] = {};
#pragma unroll
    for (const auto& of_warp : bounds) {
#pragma unroll
      for (int i = 0; i < 3; ++i) most[i] = max(most[i], of_warp[i]);
    }
    // Not negative, so ordered like integers.
    atomicMax(reinterpret_cast<int*>(&scale.norm), most[0]);
    if (most[1] > 0) atomicMax(reinterpret_cast<int*>(&scale.delta), most[1]);
    // |dP - delta'| 2^u <= 448 / 258 by u's definition (2 (1 - P) 448 / (258 9/16) where delta was left out, and an
    // eighth of that for out), and P8 sums up to 2^pe, so sum_j |dS8_ij| < 7 2^pe, and any sum of dS8 K8 stays below
    // 448 7 2^pe < 2^(pe + 12), as long as S is good to a fraction of a binade. One binade more is for the roundings of
    // P8, of dS8, and of up to 1400 additions in FP16, that ends below 2^16; and one for every 1400 more.
    const int more = int(p.k_axis.sequence(tokens.sequence).length) / (1400 * kKeys);
    const int dq_unit = max(most[2] + 13 + more - 16, 0);
    p.w.row_tile[index].dq_unit = dq_unit;
    *reinterpret_cast<RowHeader*>(record + RowRecord::header(kDim)) = {q_scale[0], t, w, dq_unit};
  });
}

}  // namespace

Status pre(const AttentionBwd& a, const Call& call, Stream stream) {
  const AttentionShape& s = call.shape;
  const auto or_else = [](const MxTensor& given, const MxTensor& fallback) { return given ? given : fallback; };
  const PreParams params{
      .q = MxOperand::of(a.q, s.seq_q),
      .q_col = MxOperand::of(or_else(a.q_col, a.q), s.seq_q),
      .k = MxOperand::of(a.k, s.seq_k),
      .k_col = MxOperand::of(or_else(a.k_col, a.k), s.seq_k),
      .v = MxOperand::of(a.v, s.seq_k),
      .dout = MxOperand::of(a.dout, call.seq_out),
      .dout_col = MxOperand::of(or_else(a.dout_col, a.dout), call.seq_out),
      .own_q_col = bool(a.q_col),
      .own_k_col = bool(a.k_col),
      .own_dout_col = bool(a.dout_col),
      .out = FloatOperand::of(a.out),
      .lse = a.lse,
      .row_exponent = a.row_exponent,
      .v_mean = a.v_mean,
      .dlse = a.dlse,
      .dk = a.dk,
      .dv = a.dv,
      .out_axis = TokenAxis::of(s.total_out, call.seq_out),
      .k_axis = TokenAxis::of(s.total_k, s.seq_k),
      .heads_q = int32_t(s.num_heads_q),
      .heads_kv = int32_t(s.num_heads_kv),
      .group = int32_t(s.group),
      .head_dim = int32_t(s.head_dim),
      .head_dim_v = int32_t(s.head_dim_v),
      .row_tiles = call.row_tiles,
      .key_tiles = call.key_tiles,
      .ordered = call.ordered,
      .cleared_heads = call.cleared_heads,
      .dq_bytes = call.dq_bytes(),
      .consistent = !a.dlse && !a.v_mean,
      .shared_q = s.shared_q,
      .w = call.w,
  };
  // What most calls are: one payload for both contractions, no gradient of lse.
  const bool plain = !a.q_col && !a.k_col && !a.dout_col && !a.dlse && params.q.plain() && params.k.plain() &&
                     params.v.plain() && params.dout.plain() && params.out.plain();
  const auto choose = [&](auto wide_plain, auto wide, auto narrow_plain, auto narrow) {
    return call.dim == 128 ? (plain ? wide_plain : wide) : plain ? narrow_plain : narrow;
  };
  // A warp for 16 row tiles.
  const int64_t runs = s.group * ceil_div(s.max_seqlen_q, int64_t(kRunRows));
  const Launch heads{.what = "attention_bwd: sm90: head scales",
                     .grid = dim3(uint32_t(s.batch * s.num_heads_kv)),
                     .block = dim3(runs <= 4   ? 128u
                                   : runs <= 8 ? 256u
                                               : unsigned(kHeadThreads)),
                     .stream = stream};
  MXFLASH_TRY(launch(heads, plain ? head_scales<true> : head_scales<false>, params));
  const Launch keys{.what = "attention_bwd: sm90: key records",
                    .grid = dim3(uint32_t(call.key_tiles), uint32_t(s.num_heads_kv)),
                    .block = dim3(kKeyThreads),
                    .shared_bytes = size_t(call.dim == 128 ? kKeyShared<128> : kKeyShared<64>),
                    .stream = stream,
                    .overlaps = true};
  MXFLASH_TRY(launch(
      keys, choose(key_records<128, true>, key_records<128, false>, key_records<64, true>, key_records<64, false>),
      params));
  const Launch rows{.what = "attention_bwd: sm90: row records",
                    .grid = dim3(uint32_t(call.row_tiles), uint32_t(s.num_heads_q)),
                    .block = dim3(kRowThreads),
                    .stream = stream,
                    .overlaps = true};
  return launch(rows,
                choose(row_records<128, true>, row_records<128, false>, row_records<64, true>, row_records<64, false>),
                params);
}

}  // namespace mxflash::bwd_sm90
