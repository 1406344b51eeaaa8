// From the operands of attention_bwd to the records that its main kernel on Hopper reads (attention_bwd_sm90.cuh).
//
//   key_records    a CTA for 128 keys of a key head: K, V, K^T, their scales, the largest ||V_j||; clears rows of dk
//                  and dv that belong to no sequence
//   row_scales     a CTA for 64 rows of a query head: delta, er, pe, and the tile's bounds
//   head_scales    a CTA for a sequence and key head: u, t, w
//   row_records    a CTA for 64 rows: Q, Q^T, dO, dO^T, lse', delta'; zeroes their dQ
//
// A thread holds 8 channels of 4 tokens: one load of 8 bytes a token serves both orientations. The tokens are those of
// four neighbouring positions of the transposed record, so that a word of it is in one thread; words are transposed
// through shared memory. Rows without a token, or without a visible key, are zeros.
#include <cfloat>

#include "attention/accumulators.cuh"
#include "attention/attention_bwd_sm90.cuh"
#include "attention/mx_piece.cuh"
#include "ptx/convert.cuh"
#include "runtime/launch.cuh"

namespace mxflash::bwd_sm90 {
namespace {

constexpr float kLog2e = 1.44269504088896341f;
constexpr int kMaxThreads = 512;

// Rows of a [rows, heads, dim] tensor in pieces of 8 channels, as fp32.
struct FloatOperand {
  Tensor t;
  bool wide;  // pieces are aligned to 16 bytes
  static FloatOperand of(const Tensor& t) {
    const int64_t size = dtype_size(t.dtype);
    return {t, reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride[0] * size % 16 == 0 &&
                   t.stride[1] * size % 16 == 0};
  }
  bool plain() const { return wide && t.dtype == Dtype::bf16 && t.stride[0] >= 0 && t.stride[0] < 1 << 23; }

  // Eight elements as they are in memory: four words of 2-byte ones. `at` is the offset of the first row in this head.
  template <bool kPlain>
  __device__ __forceinline__ void load(int64_t at, int row, int channel, uint32_t (&word)[kPlain ? 4 : 8]) const {
    if (!kPlain && t.dtype == Dtype::f32) {
      const uint32_t* from = static_cast<const uint32_t*>(t.data) + at + row * t.stride[0] + channel;
#pragma unroll
      for (int i = 0; i < (kPlain ? 0 : 8); ++i) word[i] = from[i];
      return;
    }
    const uint16_t* from = static_cast<const uint16_t*>(t.data) + at;
    from += kPlain ? int64_t(row * int(t.stride[0]) + channel) : row * t.stride[0] + channel;
    if (kPlain || wide) {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = from[2 * i] | uint32_t(from[2 * i + 1]) << 16;
    }
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
  int32_t dq_bytes;  // of a row tile
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

// A magnitude as what it bounds: NaN nothing, Inf as much as fp32 can.
__device__ __forceinline__ float finite(float x) { return fminf(fmaxf(x, 0.0f), FLT_MAX); }

// The least e with x <= 448 2^e, -127 for zero.
__device__ __forceinline__ int exponent_for(float x) {
  return int(scale_from_amax(__float_as_uint(finite(x)), e4m3_format(), MxRule::rceil)) - kE8m0Bias;
}

// The token, within 16, of place i of the four neighbouring positions 4 m ..: in row records, and in key records.
template <bool kKeyOrder>
__device__ __forceinline__ constexpr int piece_token(int quad, int i) {
  const int base = 16 * (quad >> 2) + 2 * (quad & 3);
  return kKeyOrder ? base + 8 * (i & 1) + (i >> 1) : base + 8 * (i >> 1) + (i & 1);
}

// Codes of four tokens, 8 channels each, on their way to a transposed record: 4 positions from 4 quad on.
template <int kQuads>
__device__ __forceinline__ void put_transposed(uint32_t* words, const uint2 (&codes)[4], int first_channel, int quad) {
  uint32_t* to = words + first_channel * (kQuads + 1) + quad;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const auto word = [&](int i) { return h ? codes[i].y : codes[i].x; };
    const uint32_t a = __byte_perm(word(0), word(1), 0x5140), b = __byte_perm(word(2), word(3), 0x5140);
    const uint32_t c = __byte_perm(word(0), word(1), 0x7362), d = __byte_perm(word(2), word(3), 0x7362);
    to[(4 * h + 0) * (kQuads + 1)] = __byte_perm(a, b, 0x5410);
    to[(4 * h + 1) * (kQuads + 1)] = __byte_perm(a, b, 0x7632);
    to[(4 * h + 2) * (kQuads + 1)] = __byte_perm(c, d, 0x5410);
    to[(4 * h + 3) * (kQuads + 1)] = __byte_perm(c, d, 0x7632);
  }
}
// And from there to the record: rows of 4 kQuads positions of a channel, in pieces of 16 bytes.
template <int kDim, int kQuads, int kThreads>
__device__ __forceinline__ void write_transposed(const uint32_t* words, uint8_t* to) {
#pragma unroll
  for (int n = 0; n < kDim * kQuads / 4 / kThreads; ++n) {
    const int id = int(threadIdx.x) + n * kThreads, channel = id / (kQuads / 4), piece = id % (kQuads / 4);
    const uint32_t* from = words + channel * (kQuads + 1) + 4 * piece;
    const int at = int(swizzled(channel * 4 * kQuads + 16 * piece, 4 * kQuads));
    *reinterpret_cast<uint4*>(to + at) = make_uint4(from[0], from[1], from[2], from[3]);
  }
}

// Largest of the CTA's threads, for each of kCount values.
template <int kCount>
using MaxScratch = int[kMaxThreads / 32][kCount];
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

// This thread's share of the scales of some rows.
template <bool kPlain>
__device__ __forceinline__ int largest_exponent(const MxRows<kPlain>& x, int rows) {
  const int row_step = 1 << x.t.row_shift, channel_step = x.t.col_shift ? 32 : 8;
  int most = kNoExponent;
  for (int row = int(threadIdx.x) * row_step; row < rows; row += int(blockDim.x) * row_step) {
    for (int channel = 0; channel < x.t.dim; channel += channel_step) {
      most = max(most, x.piece_exponent(row, channel));
    }
  }
  return most;
}

// ---- key records --------------------------------------------------------------------------------------------------

template <int kDim>
constexpr int kKeyThreads = kDim / 8 * (kKeys / 4);

template <int kDim, bool kPlain>
__global__ void __launch_bounds__(kKeyThreads<kDim>, kPlain ? 1536 / kKeyThreads<kDim> : 1)
    key_records(const __grid_constant__ PreParams p) {
  constexpr int kPieces = kDim / 8, kQuads = kKeys / 4;
  __shared__ uint32_t words[kDim * (kQuads + 1)];
  __shared__ MaxScratch<3> scratch;
  __shared__ MaxScratch<1> norms;
  const int32_t tile = int32_t(blockIdx.x), head = int32_t(blockIdx.y), padded = tile * kKeys;
  clear_rows(p.dk, p.k_axis.seq, head, tile, p.key_tiles);
  clear_rows(p.dv, p.k_axis.seq, head, tile, p.key_tiles);
  const Owner owner = p.k_axis.owner(int32_t(padded));
  const Sequence& s = owner.sequence;
  const int32_t first = padded - int32_t(s.padded_start), keys = min(int32_t(s.length) - first, kKeys);
  if (keys <= 0) return;
  const MxRows<kPlain> k(p.k, head, s.start + first, padded), v(p.v, head, s.start + first, padded);
  const MxRows<kPlain> k_col(p.k_col, head, s.start + first, padded);

  // Scales: of this tile's K and V, and of the whole sequence's K.
  int most[3] = {kNoExponent, kNoExponent,
                 largest_exponent(MxRows<kPlain>(p.k_col, head, s.start, s.padded_start), int(s.length))};
  const int quad = int(threadIdx.x) / kPieces, channel = int(threadIdx.x) % kPieces * 8;
  typename MxRows<kPlain>::Raw x[4], y[4];  // K and V
  const int first_key = piece_token<true>(quad, 0);
  const bool in_k = channel < p.head_dim, in_v = channel < p.head_dim_v;
  const int e_k = kPlain && first_key < keys && in_k ? k.piece_exponent(first_key, channel) : kNoExponent;
  const int e_v = kPlain && first_key < keys && in_v ? v.piece_exponent(first_key, channel) : kNoExponent;
  most[0] = e_k, most[1] = e_v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = piece_token<true>(quad, i);
    x[i].exponent = e_k, y[i].exponent = e_v;
    if (key < keys && in_k) {
      x[i] = k.load_raw(key, channel, e_k);
      if (!kPlain) most[0] = max(most[0], k.piece_exponent(key, channel));
    }
    if (key < keys && in_v) {
      y[i] = v.load_raw(key, channel, e_v);
      if (!kPlain) most[1] = max(most[1], v.piece_exponent(key, channel));
    }
  }
  block_max(most, scratch);
  const int k_scale = most[0], v_scale = most[1], kt = most[2];

  uint8_t* record = p.w.keys + int64_t(head * p.key_tiles + tile) * KeyRecord::bytes(kDim);
  float norm = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = piece_token<true>(quad, i);
    const Piece piece = v.unpack(y[i], key, channel, key < keys && in_v);
    float squares = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float low = ptx::low_f16(piece.pair[c]), high = ptx::high_f16(piece.pair[c]);
      squares = fmaf(low, low, fmaf(high, high, squares));
    }
    squares *= power_of_two(2 * (piece.exponent - v_scale));
#pragma unroll
    for (int lane = kPieces / 2; lane > 0; lane /= 2) squares += __shfl_xor_sync(~0u, squares, lane);
    norm = fmaxf(norm, squares);
    *reinterpret_cast<uint2*>(record + KeyRecord::v(kDim) + int(swizzled(key * kDim + channel, kDim))) =
        encode_piece(piece, -v_scale);
  }
  uint2 codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = piece_token<true>(quad, i);
    Piece piece = k.unpack(x[i], key, channel, key < keys && in_k);
    *reinterpret_cast<uint2*>(record + KeyRecord::k(kDim) + int(swizzled(key * kDim + channel, kDim))) =
        encode_piece(piece, -k_scale);
    if (!kPlain && p.own_k_col && key < keys && in_k) piece = k_col.load(key, channel);
    codes[i] = encode_piece(piece, -kt);
  }
  put_transposed<kQuads>(words, codes, channel, quad);
  int largest[1] = {__float_as_int(norm)};  // not negative: ordered like integers
  block_max(largest, norms);
  write_transposed<kDim, kQuads, kKeyThreads<kDim>>(words, record + KeyRecord::k_t(kDim));
  if (threadIdx.x == 0) {
    const float v_norm = finite(times_power_of_two(sqrtf(__int_as_float(largest[0])), v_scale));
    p.w.key_tile[head * p.key_tiles + tile] = {k_scale, v_scale, v_norm};
    if (first == 0) p.w.key_exponent[owner.index * p.heads_kv + head] = kt;
  }
}

// ---- scales of rows -----------------------------------------------------------------------------------------------

// A thread has 16 channels of a row.
template <int kDim>
constexpr int kRowThreads = kRows*(kDim / 16);

template <int kDim, bool kPlain>
__global__ void __launch_bounds__(kRowThreads<kDim>, kPlain ? 1536 / kRowThreads<kDim> : 1)
    row_scales(const __grid_constant__ PreParams p) {
  constexpr int kPieces = 2, kRowLanes = kDim / 16;
  __shared__ MaxScratch<5> scratch;
  __shared__ MaxScratch<1> v_scratch;
  const int32_t tile = int32_t(blockIdx.x), head = int32_t(blockIdx.y), kv_head = head / p.group;
  const RowTokens tokens(p, tile);
  if (tokens.rows <= 0) return;
  const MxRows<kPlain> q(p.q, head, tokens.first_q, tokens.padded_q),
      q_col(p.q_col, head, tokens.first_q, tokens.padded_q);
  const MxRows<kPlain> dout(p.dout, head, tokens.first_out, tokens.padded_out);
  const MxRows<kPlain> dout_col(p.dout_col, head, tokens.first_out, tokens.padded_out);

  const int row = int(threadIdx.x) / kRowLanes, lane = int(threadIdx.x) % kRowLanes;
  const int64_t out_row = tokens.first_out + row;
  const int64_t out_at = tokens.first_out * p.out.t.stride[0] + head * p.out.t.stride[1];
  const bool token = row < tokens.rows;
  typename MxRows<kPlain>::Raw x[kPieces];
  uint32_t o[kPieces][kPlain ? 4 : 8] = {};
  int q_scale = kNoExponent, q_t = kNoExponent, dout_t = kNoExponent, dout_scale = kNoExponent;
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    const int channel = 8 * (lane * kPieces + k);
    if (token && channel < p.head_dim_v) {
      x[k] = kPlain && k ? dout.load_raw(row, channel, x[0].exponent) : dout.load_raw(row, channel);
      p.out.load<kPlain>(out_at, row, channel, o[k]);
      if (!kPlain && p.own_dout_col) dout_t = max(dout_t, dout_col.piece_exponent(row, channel));
    }
    if (token && channel < p.head_dim && (!kPlain || k == 0)) {  // one scale for 16 channels
      q_scale = max(q_scale, q.piece_exponent(row, channel));
      if (!kPlain && p.own_q_col) q_t = max(q_t, q_col.piece_exponent(row, channel));
    }
  }
  const bool there = token && row_value(p.lse, head, out_row) != -INFINITY;
  const int row_exponent =
      there ? static_cast<const uint8_t*>(p.row_exponent.data)[head * p.row_exponent.stride[0] + out_row] : 0;
  const float dlse = !kPlain && there && p.dlse ? row_value(p.dlse, head, out_row) : 0;
  int v_scale[1] = {0};
  if (!kPlain && p.dlse) {
    const Sequence s = p.k_axis.sequence(tokens.sequence);
    v_scale[0] = largest_exponent(MxRows<kPlain>(p.v, kv_head, s.start, s.padded_start), int(s.length));
    block_max(v_scale, v_scratch);
  }

  float dot = 0, largest = 0, squares[kPieces];
  int exponent[kPieces];
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    const int channel = 8 * (lane * kPieces + k);
    const Piece piece = dout.unpack(x[k], row, channel, token && channel < p.head_dim_v);
    const float* mean = nullptr;
    if (p.v_mean && channel < p.head_dim_v) {
      mean = static_cast<const float*>(p.v_mean.data) + tokens.sequence * p.v_mean.stride[0] +
             kv_head * p.v_mean.stride[1] + channel;
    }
    float partial = 0, amax = 0;
    squares[k] = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float value = c & 1 ? ptx::high_f16(piece.pair[c / 2]) : ptx::low_f16(piece.pair[c / 2]);
      float out = p.out.element<kPlain>(o[k], c);
      if (mean) out -= mean[c];
      partial = fmaf(value, out, partial);
      squares[k] = fmaf(value, value, squares[k]);
      amax = fmaxf(amax, fabsf(value));
    }
    exponent[k] = piece.exponent;
    dout_scale = max(dout_scale, exponent[k]);
    const float unit = power_of_two(exponent[k]);
    dot = fmaf(partial, unit, dot);
    largest = fmaxf(largest, finite(amax * unit));
  }
#pragma unroll
  for (int step = kRowLanes / 2; step > 0; step /= 2) {
    dot += __shfl_xor_sync(~0u, dot, step);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    dout_scale = max(dout_scale, __shfl_xor_sync(~0u, dout_scale, step));
  }
  // Small enough for the FP16 factor of every piece.
  int er = min(-exponent_for(largest), kMaxPairExponent - dout_scale);
  if (!kPlain && p.dlse && there) {
    // A row whose gradient comes from lse alone has the scale of what dout would have to be.
    dot -= dlse;
    er = min(er, -exponent_for(times_power_of_two(finite(fabsf(dlse)), min(-v_scale[0] - 8, 252))));
  }
  float norm = 0;
#pragma unroll
  for (int k = 0; k < kPieces; ++k) norm = fmaf(squares[k], power_of_two(2 * (exponent[k] + er)), norm);
#pragma unroll
  for (int step = kRowLanes / 2; step > 0; step /= 2) norm += __shfl_xor_sync(~0u, norm, step);
  norm = finite(sqrtf(norm));
  const int pe = 8 + row_exponent;
  const float delta = times_power_of_two(dot, er);
  if (lane == 0) {
    p.w.row_scale[(int64_t(head) * p.row_tiles + tile) * kRows + row] = {delta, int16_t(pe), int16_t(er)};
  }
  int most[5] = {0, 0, kNoExponent, kNoExponent, kNoExponent};
  if (there) {
    // |dS8| <= 256 (||dO8|| ||V|| + |delta'|). Without a gradient of lse, delta is the mean of dP, and |dP - delta| <=
    // 2 (1 - P) ||dO|| ||V||; and where P may exceed a half, P8 (1 - P) <= 64.
    const bool large = row_exponent == 0 && (kPlain || !p.dlse);
    most[0] = __float_as_int(large ? 0.5f * norm : norm);
    most[1] = large ? 0 : __float_as_int(finite(fabsf(delta)));
    most[2] = (!kPlain && p.own_q_col ? q_t : q_scale) - pe - er;
    most[3] = (!kPlain && p.own_dout_col ? dout_t : dout_scale) - pe;
    most[4] = q_scale;
  }
  block_max(most, scratch);
  if (threadIdx.x == 0) {
    p.w.row_tile[head * p.row_tiles + tile] = {__int_as_float(most[0]), __int_as_float(most[1]), most[2], most[3],
                                               most[4], 10};
  }
}

constexpr int kHeadThreads = 256;

__global__ void __launch_bounds__(kHeadThreads) head_scales(const __grid_constant__ PreParams p) {
  __shared__ MaxScratch<5> scratch;
  const int32_t sequence = int32_t(blockIdx.x) / p.heads_kv, kv_head = int32_t(blockIdx.x) % p.heads_kv;
  const Sequence q = p.out_axis.sequence(sequence), k = p.k_axis.sequence(sequence);
  const int row_tiles = int(ceil_div(q.length, int64_t(kRows))), key_tiles = int(ceil_div(k.length, int64_t(kKeys)));
  int most[5] = {0, 0, kNoExponent, kNoExponent, 0};
  for (int id = int(threadIdx.x); id < p.group * row_tiles; id += kHeadThreads) {
    const RowTile& tile =
        p.w.row_tile[(kv_head * p.group + id / row_tiles) * p.row_tiles + q.padded_start / kRows + id % row_tiles];
    most[0] = max(most[0], __float_as_int(tile.norm));
    most[1] = max(most[1], __float_as_int(tile.delta));
    most[2] = max(most[2], tile.q_t);
    most[3] = max(most[3], tile.dout_t);
  }
  for (int id = int(threadIdx.x); id < key_tiles; id += kHeadThreads) {
    most[4] = max(most[4], __float_as_int(p.w.key_tile[kv_head * p.key_tiles + k.padded_start / kKeys + id].v_norm));
  }
  block_max(most, scratch);
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) *p.w.counter = 0;
  // Some more than 256, for roundoff.
  const float bound = 258 * fmaf(__int_as_float(most[0]), __int_as_float(most[4]), __int_as_float(most[1]));
  const bool any = key_tiles > 0 && most[2] > kNoExponent / 2;
  p.w.head_scale[sequence * p.heads_kv + kv_head] = {
      .u = bound > 0 ? -exponent_for(bound) : 0,
      .t = any ? -most[2] : 0,
      .w = most[3] > kNoExponent / 2 ? -most[3] : 0,
      .kt = key_tiles > 0 ? p.w.key_exponent[sequence * p.heads_kv + kv_head] : 0};
}

// ---- row records --------------------------------------------------------------------------------------------------

template <int kDim>
constexpr int kRecordThreads = kDim / 8 * (kRows / 4);

template <int kDim, bool kPlain>
__global__ void __launch_bounds__(kRecordThreads<kDim>, kPlain ? 1024 / kRecordThreads<kDim> : 1)
    row_records(const __grid_constant__ PreParams p) {
  constexpr int kPieces = kDim / 8, kQuads = kRows / 4, kThreads = kRecordThreads<kDim>;
  __shared__ uint32_t q_words[kDim * (kQuads + 1)], dout_words[kDim * (kQuads + 1)];
  __shared__ RowScale scales[kRows];
  __shared__ float lse[kRows];  // in binades; Inf: the row is zeros
  const int32_t tile = int32_t(blockIdx.x), head = int32_t(blockIdx.y);
  const RowTokens tokens(p, tile);
  if (tokens.rows <= 0) return;
  const MxRows<kPlain> q(p.q, head, tokens.first_q, tokens.padded_q),
      q_col(p.q_col, head, tokens.first_q, tokens.padded_q);
  const MxRows<kPlain> dout(p.dout, head, tokens.first_out, tokens.padded_out);
  const MxRows<kPlain> dout_col(p.dout_col, head, tokens.first_out, tokens.padded_out);
  const int quad = int(threadIdx.x) / kPieces, channel = int(threadIdx.x) % kPieces * 8;
  typename MxRows<kPlain>::Raw x[4], y[4];  // Q and dO
  const int first_row = piece_token<false>(quad, 0);
  const bool any = first_row < tokens.rows, in_q = channel < p.head_dim, in_dout = channel < p.head_dim_v;
  const int e_q = kPlain && any && in_q ? q.piece_exponent(first_row, channel) : kNoExponent;
  const int e_dout = kPlain && any && in_dout ? dout.piece_exponent(first_row, channel) : kNoExponent;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = piece_token<false>(quad, i);
    x[i].exponent = e_q, y[i].exponent = e_dout;
    if (row < tokens.rows && in_q) x[i] = q.load_raw(row, channel, e_q);
    if (row < tokens.rows && in_dout) y[i] = dout.load_raw(row, channel, e_dout);
  }

  const int64_t index = int64_t(head) * p.row_tiles + tile;
  uint8_t* record = p.w.rows + index * RowRecord::bytes(kDim);
  const HeadScale h = p.w.head_scale[tokens.sequence * p.heads_kv + head / p.group];
  const int q_scale = p.w.row_tile[index].q_scale;
  if (threadIdx.x < kRows) {
    const int row = int(threadIdx.x);
    scales[row] = p.w.row_scale[index * kRows + row];
    lse[row] = INFINITY;
    if (row < tokens.rows) {
      const float value = row_value(p.lse, head, tokens.first_out + row);
      if (value != -INFINITY) lse[row] = value * kLog2e;
    }
  }
  uint4* dq = reinterpret_cast<uint4*>(p.w.dq + index * p.dq_bytes);
#pragma unroll 4
  for (int i = int(threadIdx.x); i < p.dq_bytes / 16; i += kThreads) dq[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();

  uint2 codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = piece_token<false>(quad, i), at = int(swizzled(row * kDim + channel, kDim));
    const bool there = lse[row] != INFINITY && in_q;
    Piece piece = q.unpack(x[i], row, channel, there);
    *reinterpret_cast<uint2*>(record + RowRecord::q(kDim) + at) = encode_piece(piece, -q_scale);
    if (!kPlain && p.own_q_col && there) piece = q_col.load(row, channel);
    codes[i] = encode_piece(piece, h.t - scales[row].pe - scales[row].er);
  }
  put_transposed<kQuads>(q_words, codes, channel, quad);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = piece_token<false>(quad, i), at = int(swizzled(row * kDim + channel, kDim));
    const bool there = lse[row] != INFINITY && in_dout;
    Piece piece = dout.unpack(y[i], row, channel, there);
    *reinterpret_cast<uint2*>(record + RowRecord::dout(kDim) + at) = encode_piece(piece, scales[row].er);
    if (!kPlain && p.own_dout_col && there) piece = dout_col.load(row, channel);
    codes[i] = encode_piece(piece, h.w - scales[row].pe);
  }
  put_transposed<kQuads>(dout_words, codes, channel, quad);
  if (threadIdx.x < kRows) {
    const int row = stats_row(int(threadIdx.x));
    float* stats = reinterpret_cast<float*>(record + RowRecord::lse(kDim));
    const bool there = lse[row] != INFINITY;
    stats[threadIdx.x] = there ? lse[row] - float(scales[row].pe) : INFINITY;
    stats[kRows + threadIdx.x] = there ? scales[row].delta : 0;
  }
  if (threadIdx.x == 0) {
    *reinterpret_cast<RowHeader*>(record + RowRecord::header(kDim)) = {q_scale, h.t, h.w,
                                                                       p.w.row_tile[index].dq_unit};
  }
  __syncthreads();
  write_transposed<kDim, kQuads, kThreads>(q_words, record + RowRecord::q_t(kDim));
  write_transposed<kDim, kQuads, kThreads>(dout_words, record + RowRecord::dout_t(kDim));
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
      .dq_bytes = call.dq_bytes(),
      .shared_q = s.shared_q,
      .w = call.w,
  };
  const auto at = [&](const char* what, int64_t x, int64_t y, int threads) {
    return Launch{what, dim3(uint32_t(x), uint32_t(y)), uint32_t(threads), 0, stream};
  };
  // What most calls are: one payload for both contractions, no gradient of lse.
  const bool plain = !a.q_col && !a.k_col && !a.dout_col && !a.dlse && params.q.plain() && params.k.plain() &&
                     params.v.plain() && params.dout.plain() && params.out.plain();
  const auto choose = [&](auto wide_plain, auto wide, auto narrow_plain, auto narrow) {
    return call.dim == 128 ? (plain ? wide_plain : wide) : plain ? narrow_plain : narrow;
  };
  const auto threads = [&](int wide, int narrow) { return call.dim == 128 ? wide : narrow; };
  MXFLASH_TRY(launch(
      at("attention_bwd: sm90: key records", call.key_tiles, s.num_heads_kv,
         threads(kKeyThreads<128>, kKeyThreads<64>)),
      choose(key_records<128, true>, key_records<128, false>, key_records<64, true>, key_records<64, false>), params));
  MXFLASH_TRY(launch(
      at("attention_bwd: sm90: row scales", call.row_tiles, s.num_heads_q, threads(kRowThreads<128>, kRowThreads<64>)),
      choose(row_scales<128, true>, row_scales<128, false>, row_scales<64, true>, row_scales<64, false>), params));
  MXFLASH_TRY(
      launch(at("attention_bwd: sm90: head scales", s.batch * s.num_heads_kv, 1, kHeadThreads), head_scales, params));
  return launch(at("attention_bwd: sm90: row records", call.row_tiles, s.num_heads_q,
                   threads(kRecordThreads<128>, kRecordThreads<64>)),
                choose(row_records<128, true>, row_records<128, false>, row_records<64, true>, row_records<64, false>),
                params);
}

}  // namespace mxflash::bwd_sm90
