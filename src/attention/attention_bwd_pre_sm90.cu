// From the operands of attention_bwd to the records that its main kernel on Hopper reads (attention_bwd_sm90.cuh).
//
//   key_records    a CTA for 128 keys of a key head: K, V, K^T, their scales, the largest ||V_j||; clears rows of dk
//                  and dv that belong to no sequence
//   row_scales     a CTA for 64 rows of a query head: delta, er, pe, and the tile's bounds
//   head_scales    a CTA for a sequence and key head: u, t, w
//   row_records    a CTA for 64 rows: Q, Q^T, dO, dO^T, lse', delta'; zeroes their dQ
//
// A piece is 4 tokens x 8 channels, which a thread holds in registers: one load of 8 bytes a token serves both
// orientations. Tokens of a piece are those of four neighbouring positions of the transposed record, so that a word of
// it is packed in one thread; words are transposed through shared memory. Rows without a token, or without a visible
// key, are zeros.
#include <cfloat>

#include "attention/accumulators.cuh"
#include "attention/attention_bwd_sm90.cuh"
#include "attention/mx_piece.cuh"
#include "ptx/convert.cuh"
#include "runtime/launch.cuh"

namespace mxflash::bwd_sm90 {
namespace {

constexpr float kLog2e = 1.44269504088896341f;
constexpr int kThreads = 256;

// Rows of a [rows, heads, dim] tensor in pieces of 8 channels, as fp32.
struct FloatRows {
  Tensor t;
  bool wide;  // pieces are aligned to 16 bytes
  static FloatRows of(const Tensor& t) {
    const int64_t size = dtype_size(t.dtype);
    return {t, reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride[0] * size % 16 == 0 &&
                   t.stride[1] * size % 16 == 0};
  }
  __device__ __forceinline__ void load(int64_t head, int64_t row, int channel, float (&x)[8]) const {
    const int64_t at = row * t.stride[0] + head * t.stride[1] + channel;
    if (t.dtype == Dtype::f32) {
      const float* from = static_cast<const float*>(t.data) + at;
      if (wide) {
        const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = from[i];
      }
      return;
    }
    const uint16_t* from = static_cast<const uint16_t*>(t.data) + at;
    uint32_t word[4];
    if (wide) {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = from[2 * i] | uint32_t(from[2 * i + 1]) << 16;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool bf16 = t.dtype == Dtype::bf16;
      x[2 * i] = bf16 ? __uint_as_float(word[i] << 16) : ptx::low_f16(word[i]);
      x[2 * i + 1] = bf16 ? __uint_as_float(word[i] & 0xFFFF0000u) : ptx::high_f16(word[i]);
    }
  }
};

struct PreParams {
  MxOperand q, q_col, k, k_col, v, dout, dout_col;
  bool own_q_col, own_k_col, own_dout_col;  // other bytes than those of q, k, dout
  FloatRows out;
  Tensor lse, row_exponent, v_mean, dlse;
  Tensor dk, dv;  // slack rows are cleared; may be null
  Jagged seq_q, seq_out, seq_k;
  int64_t total_q, total_out, total_k;
  int32_t heads_q, heads_kv, group, head_dim, head_dim_v;
  int32_t row_tiles, key_tiles;
  bool shared_q;
  Workspace w;
};

// What a CTA of 64 rows knows about its tile.
struct RowTokens {
  int64_t sequence;
  int64_t first_out, first_q;    // of the tile's first row, in the packed tensors
  int64_t padded_out, padded_q;  // and on the padded axes
  int rows;                      // that have a token; <= 0: none
  __device__ RowTokens(const PreParams& p, int64_t tile) {
    const Owner owner = owner_of(p.total_out, p.seq_out, tile * kRows);
    const int64_t first = tile * kRows - owner.sequence.padded_start;
    sequence = owner.index;
    first_out = owner.sequence.start + first;
    padded_out = tile * kRows;
    first_q = p.shared_q ? first : first_out;
    padded_q = p.shared_q ? first : padded_out;
    rows = int(owner.sequence.length - first < kRows ? owner.sequence.length - first : kRows);
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

// Eight codes.
__device__ __forceinline__ uint2 pack_piece(const float (&x)[8], float f) {
  return make_uint2(ptx::pack_e4m3(x[0] * f, x[1] * f, x[2] * f, x[3] * f),
                    ptx::pack_e4m3(x[4] * f, x[5] * f, x[6] * f, x[7] * f));
}

// A piece of a transposed record, on its way: channels first .. + 7, four positions from 4 quad on.
template <int kQuads>
__device__ __forceinline__ void put_transposed(uint32_t* words, const float (&x)[4][8], const float (&f)[4],
                                               int first_channel, int quad) {
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    words[(first_channel + c) * (kQuads + 1) + quad] =
        ptx::pack_e4m3(x[0][c] * f[0], x[1][c] * f[1], x[2][c] * f[2], x[3][c] * f[3]);
  }
}
// And from there to the record: rows of 4 kQuads positions of a channel, in pieces of 16 bytes.
template <int kDim, int kQuads>
__device__ __forceinline__ void write_transposed(const uint32_t* words, uint8_t* to) {
#pragma unroll
  for (int id = int(threadIdx.x); id < kDim * kQuads / 4; id += kThreads) {
    const int channel = id / (kQuads / 4), piece = id % (kQuads / 4);
    const uint32_t* from = words + channel * (kQuads + 1) + 4 * piece;
    const int64_t at = swizzled(channel * 4 * kQuads + 16 * piece, 4 * kQuads);
    *reinterpret_cast<uint4*>(to + at) = make_uint4(from[0], from[1], from[2], from[3]);
  }
}

// Largest of the CTA's threads, for each of kCount values.
template <int kCount>
__device__ __forceinline__ void block_max(int (&x)[kCount], int (&scratch)[kThreads / 32][kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int most = __reduce_max_sync(~0u, x[i]);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32][i] = most;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = scratch[0][i];
    for (int w = 1; w < kThreads / 32; ++w) x[i] = max(x[i], scratch[w][i]);
  }
}

__device__ void clear_rows(const Tensor& t, const Jagged& seq, int64_t head, int64_t tile, int64_t tiles) {
  if (!t || !seq.cu_seqlens) return;
  for (int64_t token = seq.cu_seqlens[seq.batch] + tile; token < t.shape[0]; token += tiles) {
    for (int64_t c = threadIdx.x; c < t.shape[2]; c += kThreads) {
      store_element(t, token * t.stride[0] + head * t.stride[1] + c, 0);
    }
  }
}

// This thread's share of the scales of some rows.
__device__ __forceinline__ int largest_exponent(const MxOperand& t, int64_t head, int64_t first_row, int rows) {
  const int row_step = t.block == MxBlock::row32 ? 1 : 32, channel_step = t.block == MxBlock::col32 ? 8 : 32;
  int most = kNoExponent;
  for (int row = int(threadIdx.x) * row_step; row < rows; row += kThreads * row_step) {
    for (int channel = 0; channel < t.dim; channel += channel_step) {
      most = max(most, t.piece_exponent(head, first_row + row, channel));
    }
  }
  return most;
}

// ---- key records --------------------------------------------------------------------------------------------------

template <int kDim>
__global__ void __launch_bounds__(kThreads) key_records(const __grid_constant__ PreParams p) {
  constexpr int kPieces = kDim / 8, kQuads = kKeys / 4, kPerThread = kPieces * kQuads / kThreads;
  __shared__ uint32_t words[kDim * (kQuads + 1)];
  __shared__ int scratch[kThreads / 32][3];
  __shared__ int norms[kThreads / 32][1];
  const int64_t tile = blockIdx.x, head = blockIdx.y, padded = tile * kKeys;
  clear_rows(p.dk, p.seq_k, head, tile, p.key_tiles);
  clear_rows(p.dv, p.seq_k, head, tile, p.key_tiles);
  const Owner owner = owner_of(p.total_k, p.seq_k, padded);
  const Sequence& s = owner.sequence;
  const int64_t first = padded - s.padded_start;
  if (first >= s.length) return;
  const int keys = int(s.length - first < kKeys ? s.length - first : kKeys);

  // Scales: of this tile's K and V, and of the whole sequence's K.
  int most[3] = {largest_exponent(p.k, head, padded, keys), largest_exponent(p.v, head, padded, keys),
                 largest_exponent(p.k_col, head, s.padded_start, int(s.length))};
  block_max(most, scratch);
  const int k_scale = most[0], v_scale = most[1], kt = most[2];

  uint8_t* record = p.w.keys + (head * p.key_tiles + tile) * KeyRecord::bytes(kDim);
  float norm = 0;
#pragma unroll
  for (int n = 0; n < kPerThread; ++n) {
    const int id = int(threadIdx.x) + n * kThreads, quad = id / kPieces, channel = id % kPieces * 8;
    float x[4][8], f[4];
    int e[4];
    // V
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = piece_token<true>(quad, i);
      float row[8] = {};
      int exponent = v_scale;
      if (token < keys && channel < p.head_dim_v) {
        p.v.load(head, s.start + first + token, padded + token, channel, row, exponent);
      }
      const float unit = power_of_two(exponent - v_scale);
      float squares = 0;
#pragma unroll
      for (int c = 0; c < 8; ++c) squares = fmaf(row[c] * unit, row[c] * unit, squares);
#pragma unroll
      for (int lane = kPieces / 2; lane > 0; lane /= 2) squares += __shfl_xor_sync(~0u, squares, lane);
      norm = fmaxf(norm, squares);
      *reinterpret_cast<uint2*>(record + KeyRecord::v(kDim) + swizzled(token * kDim + channel, kDim)) =
          pack_piece(row, unit);
    }
    // K and K^T
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = piece_token<true>(quad, i);
#pragma unroll
      for (int c = 0; c < 8; ++c) x[i][c] = 0;
      e[i] = k_scale;
      if (token < keys && channel < p.head_dim) {
        p.k.load(head, s.start + first + token, padded + token, channel, x[i], e[i]);
      }
      *reinterpret_cast<uint2*>(record + KeyRecord::k(kDim) + swizzled(token * kDim + channel, kDim)) =
          pack_piece(x[i], power_of_two(e[i] - k_scale));
      if (p.own_k_col && token < keys && channel < p.head_dim) {
        p.k_col.load(head, s.start + first + token, padded + token, channel, x[i], e[i]);
      }
      f[i] = power_of_two(e[i] - kt);
    }
    put_transposed<kQuads>(words, x, f, channel, quad);
  }
  int largest[1] = {__float_as_int(norm)};  // not negative: ordered like integers
  block_max(largest, norms);
  write_transposed<kDim, kQuads>(words, record + KeyRecord::k_t(kDim));
  if (threadIdx.x == 0) {
    const float v_norm = finite(times_power_of_two(sqrtf(__int_as_float(largest[0])), v_scale));
    p.w.key_tile[head * p.key_tiles + tile] = {k_scale, v_scale, v_norm};
    if (first == 0) p.w.key_exponent[owner.index * p.heads_kv + head] = kt;
  }
}

// ---- scales of rows -----------------------------------------------------------------------------------------------

template <int kDim>
__global__ void __launch_bounds__(kThreads) row_scales(const __grid_constant__ PreParams p) {
  constexpr int kLanes = 8;  // of a row
  constexpr int kPieces = kDim / 8 / kLanes;
  __shared__ int scratch[kThreads / 32][5];
  __shared__ int v_scratch[kThreads / 32][1];
  const int64_t tile = blockIdx.x, head = blockIdx.y, kv_head = head / p.group;
  const RowTokens tokens(p, tile);
  if (tokens.rows <= 0) return;
  int v_scale[1] = {0};
  if (p.dlse) {
    const Sequence s = sequence_at(p.total_k, p.seq_k, tokens.sequence);
    v_scale[0] = largest_exponent(p.v, kv_head, s.padded_start, int(s.length));
    block_max(v_scale, v_scratch);
  }

  int most[5] = {0, 0, kNoExponent, kNoExponent, kNoExponent};
#pragma unroll
  for (int n = 0; n < kRows * kLanes / kThreads; ++n) {
    const int row = (int(threadIdx.x) + n * kThreads) / kLanes, lane = int(threadIdx.x) % kLanes;
    const int64_t out_row = tokens.first_out + row;
    const bool there = row < tokens.rows && row_value(p.lse, head, min(out_row, p.total_out - 1)) != -INFINITY;
    float dot = 0, largest = 0, squares[kPieces];
    int exponent[kPieces], q_scale = kNoExponent, q_t = kNoExponent, dout_t = kNoExponent;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const int channel = 8 * (lane * kPieces + k);
      squares[k] = 0;
      exponent[k] = 0;
      if (!there) continue;
      if (channel < p.head_dim) {
        q_scale = max(q_scale, p.q.piece_exponent(head, tokens.padded_q + row, channel));
        if (p.own_q_col) q_t = max(q_t, p.q_col.piece_exponent(head, tokens.padded_q + row, channel));
      }
      if (channel >= p.head_dim_v) continue;
      if (p.own_dout_col) dout_t = max(dout_t, p.dout_col.piece_exponent(head, tokens.padded_out + row, channel));
      float x[8], o[8];
      p.dout.load(head, out_row, tokens.padded_out + row, channel, x, exponent[k]);
      p.out.load(head, out_row, channel, o);
      if (p.v_mean) {
        const float* mean = static_cast<const float*>(p.v_mean.data) + tokens.sequence * p.v_mean.stride[0] +
                            kv_head * p.v_mean.stride[1] + channel;
#pragma unroll
        for (int c = 0; c < 8; ++c) o[c] -= mean[c];
      }
      float partial = 0, amax = 0;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        partial = fmaf(x[c], o[c], partial);
        squares[k] = fmaf(x[c], x[c], squares[k]);
        amax = fmaxf(amax, fabsf(x[c]));
      }
      dot += times_power_of_two(partial, exponent[k]);
      largest = fmaxf(largest, finite(times_power_of_two(amax, exponent[k])));
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      dot += __shfl_xor_sync(~0u, dot, step);
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      q_scale = max(q_scale, __shfl_xor_sync(~0u, q_scale, step));
      q_t = max(q_t, __shfl_xor_sync(~0u, q_t, step));
      dout_t = max(dout_t, __shfl_xor_sync(~0u, dout_t, step));
    }
    if (!p.own_q_col) q_t = q_scale;
    if (!p.own_dout_col) dout_t = exponent_for(largest);
    int er = -exponent_for(largest);
    if (p.dlse && there) {
      // A row whose gradient comes from lse alone has the scale of what dout would have to be.
      const float dlse = row_value(p.dlse, head, out_row);
      dot -= dlse;
      const float as_dout = times_power_of_two(finite(fabsf(dlse)), min(-v_scale[0] - 8, 252));
      er = min(er, -exponent_for(as_dout));
    }
    float norm = 0;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) norm = fmaf(squares[k], power_of_two(2 * (exponent[k] + er)), norm);
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) norm += __shfl_xor_sync(~0u, norm, step);
    const int pe =
        there ? 8 + static_cast<const uint8_t*>(p.row_exponent.data)[head * p.row_exponent.stride[0] + out_row] : 0;
    const float delta = there ? times_power_of_two(dot, er) : 0;
    if (lane == 0) {
      p.w.row_scale[head * (int64_t(p.row_tiles) * kRows) + tokens.padded_out + row] = {delta, int16_t(pe),
                                                                                        int16_t(er)};
    }
    if (there) {
      most[0] = max(most[0], __float_as_int(fminf(sqrtf(norm), FLT_MAX)));  // fminf: NaN bounds nothing
      most[1] = max(most[1], __float_as_int(finite(fabsf(delta))));
      most[2] = max(most[2], q_t - pe - er);
      most[3] = max(most[3], dout_t - pe);
      most[4] = max(most[4], q_scale);
    }
  }
  block_max(most, scratch);
  if (threadIdx.x == 0) {
    p.w.row_tile[head * p.row_tiles + tile] = {__int_as_float(most[0]), __int_as_float(most[1]), most[2], most[3],
                                               most[4]};
  }
}

__global__ void __launch_bounds__(kThreads) head_scales(const __grid_constant__ PreParams p) {
  __shared__ int scratch[kThreads / 32][5];
  const int64_t sequence = blockIdx.x / uint32_t(p.heads_kv), kv_head = blockIdx.x % uint32_t(p.heads_kv);
  const Sequence q = sequence_at(p.total_out, p.seq_out, sequence), k = sequence_at(p.total_k, p.seq_k, sequence);
  const int row_tiles = int(ceil_div(q.length, int64_t(kRows))), key_tiles = int(ceil_div(k.length, int64_t(kKeys)));
  int most[5] = {0, 0, kNoExponent, kNoExponent, 0};
  for (int id = int(threadIdx.x); id < p.group * row_tiles; id += kThreads) {
    const RowTile& tile =
        p.w.row_tile[(kv_head * p.group + id / row_tiles) * p.row_tiles + q.padded_start / kRows + id % row_tiles];
    most[0] = max(most[0], __float_as_int(tile.norm));
    most[1] = max(most[1], __float_as_int(tile.delta));
    most[2] = max(most[2], tile.q_t);
    most[3] = max(most[3], tile.dout_t);
  }
  for (int id = int(threadIdx.x); id < key_tiles; id += kThreads) {
    most[4] = max(most[4], __float_as_int(p.w.key_tile[kv_head * p.key_tiles + k.padded_start / kKeys + id].v_norm));
  }
  block_max(most, scratch);
  if (threadIdx.x != 0) return;
  // |dS8| <= 256 (||dO8|| ||V|| + |delta 2^er|) 2^u; some more for roundoff.
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
__global__ void __launch_bounds__(kThreads) row_records(const __grid_constant__ PreParams p) {
  constexpr int kPieces = kDim / 8, kQuads = kRows / 4, kItems = kPieces * kQuads;
  static_assert(kItems <= kThreads);
  __shared__ uint32_t q_words[kDim * (kQuads + 1)], dout_words[kDim * (kQuads + 1)];
  __shared__ RowScale scales[kRows];
  __shared__ float lse[kRows];  // in binades; Inf: the row is zeros
  const int64_t tile = blockIdx.x, head = blockIdx.y;
  const RowTokens tokens(p, tile);
  if (tokens.rows <= 0) return;
  const int64_t index = head * p.row_tiles + tile;
  uint8_t* record = p.w.rows + index * RowRecord::bytes(kDim);
  const HeadScale h = p.w.head_scale[tokens.sequence * p.heads_kv + head / p.group];
  const int q_scale = p.w.row_tile[index].q_scale;
  if (threadIdx.x < kRows) {
    const int row = int(threadIdx.x);
    scales[row] = p.w.row_scale[index * kRows + row];
    lse[row] = INFINITY;
    if (row < tokens.rows) {
      const float x = row_value(p.lse, head, tokens.first_out + row);
      if (x != -INFINITY) lse[row] = x * kLog2e;
    }
  }
  float4* dq = reinterpret_cast<float4*>(p.w.dq + index * (kRows * kDim));
#pragma unroll
  for (int i = 0; i < kRows * kDim / 4 / kThreads; ++i) dq[threadIdx.x + i * kThreads] = make_float4(0, 0, 0, 0);
  __syncthreads();

  if (threadIdx.x < kItems) {
    const int quad = int(threadIdx.x) / kPieces, channel = int(threadIdx.x) % kPieces * 8;
    float x[4][8], f[4];
    int e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = piece_token<false>(quad, i);
      const bool there = lse[row] != INFINITY && channel < p.head_dim;
#pragma unroll
      for (int c = 0; c < 8; ++c) x[i][c] = 0;
      e[i] = -126;
      if (there) p.q.load(head, tokens.first_q + row, tokens.padded_q + row, channel, x[i], e[i]);
      *reinterpret_cast<uint2*>(record + RowRecord::q(kDim) + swizzled(row * kDim + channel, kDim)) =
          pack_piece(x[i], power_of_two(e[i] - q_scale));
      if (p.own_q_col && there) p.q_col.load(head, tokens.first_q + row, tokens.padded_q + row, channel, x[i], e[i]);
      f[i] = power_of_two(e[i] + h.t - scales[row].pe - scales[row].er);
    }
    put_transposed<kQuads>(q_words, x, f, channel, quad);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = piece_token<false>(quad, i);
      const bool there = lse[row] != INFINITY && channel < p.head_dim_v;
#pragma unroll
      for (int c = 0; c < 8; ++c) x[i][c] = 0;
      e[i] = -126;
      if (there) p.dout.load(head, tokens.first_out + row, tokens.padded_out + row, channel, x[i], e[i]);
      *reinterpret_cast<uint2*>(record + RowRecord::dout(kDim) + swizzled(row * kDim + channel, kDim)) =
          pack_piece(x[i], power_of_two(e[i] + scales[row].er));
      if (p.own_dout_col && there) {
        p.dout_col.load(head, tokens.first_out + row, tokens.padded_out + row, channel, x[i], e[i]);
      }
      f[i] = power_of_two(e[i] + h.w - scales[row].pe);
    }
    put_transposed<kQuads>(dout_words, x, f, channel, quad);
  }
  if (threadIdx.x < kRows) {
    const int row = stats_row(int(threadIdx.x));
    float* stats = reinterpret_cast<float*>(record + RowRecord::lse(kDim));
    stats[threadIdx.x] = lse[row] - float(scales[row].pe);
    stats[kRows + threadIdx.x] = times_power_of_two(scales[row].delta, h.u);
  }
  if (threadIdx.x == 0) *reinterpret_cast<int32_t*>(record + RowRecord::scale(kDim)) = q_scale;
  __syncthreads();
  write_transposed<kDim, kQuads>(q_words, record + RowRecord::q_t(kDim));
  write_transposed<kDim, kQuads>(dout_words, record + RowRecord::dout_t(kDim));
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
      .out = FloatRows::of(a.out),
      .lse = a.lse,
      .row_exponent = a.row_exponent,
      .v_mean = a.v_mean,
      .dlse = a.dlse,
      .dk = a.dk,
      .dv = a.dv,
      .seq_q = s.seq_q,
      .seq_out = call.seq_out,
      .seq_k = s.seq_k,
      .total_q = s.total_q,
      .total_out = s.total_out,
      .total_k = s.total_k,
      .heads_q = int32_t(s.num_heads_q),
      .heads_kv = int32_t(s.num_heads_kv),
      .group = int32_t(s.group),
      .head_dim = int32_t(s.head_dim),
      .head_dim_v = int32_t(s.head_dim_v),
      .row_tiles = call.row_tiles,
      .key_tiles = call.key_tiles,
      .shared_q = s.shared_q,
      .w = call.w,
  };
  const auto at = [&](const char* what, int64_t x, int64_t y) {
    return Launch{what, dim3(uint32_t(x), uint32_t(y)), kThreads, 0, stream};
  };
  const bool wide = call.dim == 128;
  MXFLASH_TRY(launch(at("attention_bwd: sm90: key records", call.key_tiles, s.num_heads_kv),
                     wide ? key_records<128> : key_records<64>, params));
  MXFLASH_TRY(launch(at("attention_bwd: sm90: row scales", call.row_tiles, s.num_heads_q),
                     wide ? row_scales<128> : row_scales<64>, params));
  MXFLASH_TRY(launch(at("attention_bwd: sm90: head scales", s.batch * s.num_heads_kv, 1), head_scales, params));
  return launch(at("attention_bwd: sm90: row records", call.row_tiles, s.num_heads_q),
                wide ? row_records<128> : row_records<64>, params);
}

}  // namespace mxflash::bwd_sm90
