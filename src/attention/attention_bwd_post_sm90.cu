// From the sums of attention_bwd's main kernel on Hopper to gradients (attention_bwd_sm90.cuh).
//
//   row_gradients   a CTA for 64 rows of a query head: dQ in the order of rows, its scales, the rotation back, and the
//                   share of k_mean; with a shared query the sum over the batch, in order. Clears rows of no sequence.
//   key_gradients   a CTA for 128 keys of a key head, where dk or dv is to be quantized: from fp32 in the workspace
//
// A warp of row_gradients has 16 rows as the main kernel's accumulators hold them: all its loads are in flight at once,
// and quads exchange channels in registers, for stores of 16 bytes. No shared memory.
//
// CTAs start on SMs that the main kernel has no more items for, and wait for their head only. They come in the order of
// sequences: in one of equal lengths heads are done in this order too.
#include "attention/accumulators.cuh"
#include "attention/attention_bwd_sm90.cuh"
#include "attention/mx_piece.cuh"
#include "attention/rotate_rows.cuh"
#include "mx/rotation.h"
#include "ptx/convert.cuh"
#include "ptx/global_order.cuh"
#include "ptx/griddepcontrol.cuh"
#include "runtime/launch.cuh"

namespace mxflash::bwd_sm90 {
namespace {

constexpr int kThreads = 256;  // for keys
constexpr int kRowThreads = 128;

struct RowParams {
  Tensor dq, lse, dlse, k_mean;
  TokenAxis out_axis, k_axis;
  int64_t total_q;
  int32_t heads_kv, group, batch, head_dim;
  int32_t row_tiles;
  int32_t rotation;  // group of channels that are rotated back; 1: none
  RotationSigns signs;
  bool shared_q;
  bool ordered;
  bool wide;  // 2-byte elements in rows aligned to 16 bytes
  float softmax_scale;
  Workspace w;
};

// Until all keys of a sequence and head have added their part.
__device__ __forceinline__ void wait_for_sums(const RowParams& p, int32_t sequence, int64_t head) {
  if (threadIdx.x == 0) {
    const int32_t* done = &p.w.head_scale[sequence * p.heads_kv + head / p.group].done;
    const int32_t tiles = int32_t(ceil_div(p.k_axis.sequence(sequence).length, int64_t(kKeys)));
    while (ptx::load_relaxed(done) < tiles) __nanosleep(256);
    ptx::load_acquire(done);
  }
  __syncthreads();
}

// 2^e softmax_scale, as two factors that are normal numbers.
__device__ __forceinline__ float2 row_factor(const RowParams& p, int e) {
  e = min(max(e, -252), 252);
  return make_float2(power_of_two(e / 2), power_of_two(e - e / 2) * p.softmax_scale);
}

// The sums of a warp's 16 rows of one query head and sequence, times their factors: x[4 j + 2 r + e] is channel 8 j + 2
// (lane % 4) + e of row lane / 4 + 8 r. The main kernel's first four warps have the first half of the channels, 16 rows
// each. kFirst: of the sums; else they are added.
template <int kDim, bool kHalf, bool kFirst>
__device__ __forceinline__ void take_sums(const RowParams& p, int32_t sequence, int64_t index, int64_t head, int warp,
                                          int lane, float (&x)[kDim / 2]) {
  constexpr int kWords = kDim / 16 * (kHalf ? 1 : 2) / 2;  // of 16 bytes, of a thread of the main kernel
  const uint4* from =
      reinterpret_cast<const uint4*>(p.w.dq + index * (kRows * kDim * (kHalf ? 2 : 4))) + warp * kWords * 32 + lane;
  const HeadScale& scale = p.w.head_scale[sequence * p.heads_kv + head / p.group];
  const int e = scale.kt - scale.u() + (kHalf ? p.w.row_tile[index].dq_unit : 0);
  const int16_t* unit = p.w.row_unit + index * kRows + 16 * warp + lane / 4;
  const float2 f[2] = {row_factor(p, e - unit[0]), row_factor(p, e - unit[8])};
  const bool written = !p.ordered || p.w.dq_turn[2 * index] > 0;  // else nobody sees a key
#pragma unroll
  for (int i = 0; i < 2 * kWords; ++i) {
    const uint4 word = __ldcs(from + (i / kWords * 4 * kWords + i % kWords) * 32);
    const uint32_t part[4] = {word.x, word.y, word.z, word.w};
    constexpr int kSums = kHalf ? 8 : 4;
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      float sum = 0;
      if (kHalf) {
        sum = k & 1 ? ptx::high_f16(part[k / 2]) : ptx::low_f16(part[k / 2]);
      } else {
        sum = __uint_as_float(part[k % 4]);
      }
      const float2& factor = f[k >> 1 & 1];
      float& to = x[kSums * i + k];
      if (kFirst) {
        to = written ? sum * factor.x * factor.y : 0;
      } else if (written) {
        to = fmaf(sum * factor.x, factor.y, to);
      }
    }
  }
}

template <int kDim>
__device__ __forceinline__ void store_row(const RowParams& p, const float (&x)[kDim / 2], int r, int64_t row,
                                          int64_t head, int c, bool there) {
  const int64_t at = row * p.dq.stride[0] + head * p.dq.stride[1];
  if (p.wide) {
    uint16_t* to = static_cast<uint16_t*>(p.dq.data) + at + 8 * c;
#pragma unroll
    for (int j = 0; j < kDim / 8; j += 4) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        word[i] = pack_half(p.dq.dtype, x[4 * (j + i) + 2 * r], x[4 * (j + i) + 2 * r + 1]);
      }
      const uint4 piece = transpose_quad(word, c);
      if (there && 8 * (j + c) < p.head_dim) *reinterpret_cast<uint4*>(to + 8 * j) = piece;
    }
  } else if (there) {
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      if (8 * j >= p.head_dim) break;
      store_element(p.dq, at + 8 * j + 2 * c, x[4 * j + 2 * r]);
      store_element(p.dq, at + 8 * j + 2 * c + 1, x[4 * j + 2 * r + 1]);
    }
  }
}

template <int kDim, bool kHalf>
__global__ void __launch_bounds__(kRowThreads, 4) row_gradients(const __grid_constant__ RowParams p) {
  const int32_t heads = p.heads_kv * p.group, tile = int32_t(blockIdx.x) / heads, head = int32_t(blockIdx.x) % heads;
  if (const Jagged& seq = p.out_axis.seq; seq.cu_seqlens) {
    for (int64_t token = seq.cu_seqlens[seq.batch] + tile; token < p.total_q; token += int32_t(gridDim.x) / heads) {
      for (int c = int(threadIdx.x); c < p.head_dim; c += kRowThreads) {
        store_element(p.dq, token * p.dq.stride[0] + head * p.dq.stride[1] + c, 0);
      }
    }
  }
  // With a shared query, tile `tile` of every sequence.
  const Owner owner = p.shared_q ? Owner{0, p.out_axis.sequence(0)} : p.out_axis.owner(tile * kRows);
  const int32_t first = tile * kRows - int32_t(owner.sequence.padded_start);
  const int32_t rows = min(int32_t(owner.sequence.length) - first, kRows);
  // One CTA does so that whoever comes after this kernel finds dk and dv, too.
  if (blockIdx.x == gridDim.x - 1) ptx::griddepcontrol_wait();
  if (rows <= 0) return;
  const int32_t end = p.shared_q ? p.batch : owner.index + 1;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, c = lane % 4;

  float x[kDim / 2];
  const auto index = [&](int64_t padded_start) {
    return int64_t(head) * p.row_tiles + (int32_t(padded_start) + first) / kRows;
  };
  wait_for_sums(p, owner.index, head);
  take_sums<kDim, kHalf, true>(p, owner.index, index(owner.sequence.padded_start), head, warp, lane, x);
#pragma unroll 1
  for (int32_t b = owner.index + 1; b < end; ++b) {
    wait_for_sums(p, b, head);
    take_sums<kDim, kHalf, false>(p, b, index(p.out_axis.sequence(b).padded_start), head, warp, lane, x);
  }
  if (p.rotation > 1) rotate_back_rows(x, p.rotation, p.signs, c);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 16 * warp + lane / 4 + 8 * r;
    const bool there = row < rows;
    if (p.dlse && p.k_mean && there) {
      // The caller's lse holds softmax_scale q . k_mean, so dlse reaches q through it.
      for (int32_t b = owner.index; b < end; ++b) {
        const int64_t at = p.out_axis.sequence(b).start + first + row;
        if (static_cast<const float*>(p.lse.data)[head * p.lse.stride[0] + at] == -INFINITY) continue;
        const float f = p.softmax_scale * static_cast<const float*>(p.dlse.data)[head * p.dlse.stride[0] + at];
        const float* mean =
            static_cast<const float*>(p.k_mean.data) + b * p.k_mean.stride[0] + head / p.group * p.k_mean.stride[1];
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) {
          const int channel = 8 * (i >> 2) + 2 * c + (i & 1);
          if ((i >> 1 & 1) == r && channel < p.head_dim) x[i] = fmaf(f, mean[channel], x[i]);
        }
      }
    }
    store_row<kDim>(p, x, r, owner.sequence.start + first + row, head, c, there);
  }
}

// ---- quantized gradients of keys ----------------------------------------------------------------------------------

struct KeyParams {
  const float* x;  // [total_k][heads][dim]
  Tensor out;      // or null
  MxTensor mx;
  TokenAxis axis;
};

__global__ void __launch_bounds__(kThreads) key_gradients(const __grid_constant__ KeyParams p) {
  const int64_t tile = blockIdx.x, head = blockIdx.y, tokens = p.mx.data.shape[0], heads = p.mx.data.shape[1];
  const int dim = int(p.mx.data.shape[2]), warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  uint8_t* payload = static_cast<uint8_t*>(p.mx.data.data) + head * p.mx.data.stride[1];
  uint8_t* scales = static_cast<uint8_t*>(p.mx.scale.data);
  if (const Jagged& seq = p.axis.seq; seq.cu_seqlens) {
    for (int64_t token = seq.cu_seqlens[seq.batch] + tile; token < tokens; token += gridDim.x) {
      for (int c = int(threadIdx.x); c < dim; c += kThreads) payload[token * p.mx.data.stride[0] + c] = 0;
    }
  }
  const Owner owner = p.axis.owner(int32_t(tile * kKeys));
  const Sequence& s = owner.sequence;
  const int64_t padded_tokens = padded_token_count(tokens, p.axis.seq);
  const Fp8Format format = fp8_format(p.mx.data.dtype);
  const int across = (dim + 31) / 32;
  // A warp takes 32 x 32 elements at a time: a channel a lane.
  for (int block = warp; block < kKeys / 32 * across; block += kThreads / 32) {
    const int64_t padded = tile * kKeys + block / across * 32, first = padded - s.padded_start;
    if (first >= s.length) continue;
    const int rows = int(s.length - first < 32 ? s.length - first : 32), channel = block % across * 32 + lane;
    const float* from = p.x + ((s.start + first) * heads + head) * dim + channel;
    float x[32];
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      x[i] = i < rows && channel < dim ? from[i * heads * dim] : 0;
      most = max(most, magnitude_bits(x[i]));
    }
    if (p.mx.block == MxBlock::square32) most = __reduce_max_sync(~0u, most);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i >= rows) break;
      uint32_t amax = most;
      if (p.mx.block == MxBlock::row32) amax = __reduce_max_sync(~0u, magnitude_bits(x[i]));
      const uint8_t scale = scale_from_amax(amax, format, MxRule::rceil);
      if (channel >= dim) continue;
      const int64_t token = s.start + first + i;
      payload[token * p.mx.data.stride[0] + channel] = encode_mx(x[i], scale, format);
      if (p.out) store_element(p.out, token * p.out.stride[0] + head * p.out.stride[1] + channel, x[i]);
      const BlockShape shape = block_shape(p.mx.block);
      const ScaleIndex at{head, (padded + i) / shape.rows, channel / shape.cols};
      if (i % shape.rows == 0 && channel % shape.cols == 0) {
        scales[scale_offset(p.mx.block, p.mx.layout, padded_tokens, dim, at)] = scale;
      }
    }
  }
}

Status quantize_gradient(const Call& call, const float* x, const Tensor& out, const MxTensor& mx, Stream stream) {
  if (!mx) return {};
  constexpr const char* what = "attention_bwd: sm90: quantized gradients";
  const size_t bytes = size_t(mx.scale.numel() * dtype_size(mx.scale.dtype));
  if (bytes > 0) MXFLASH_TRY(cuda_status(cudaMemsetAsync(mx.scale.data, 0, bytes, stream), what));
  const Launch at{what, dim3(uint32_t(call.key_tiles), uint32_t(call.shape.num_heads_kv)), kThreads, 0, stream};
  return launch(at, key_gradients, KeyParams{x, out, mx, TokenAxis::of(mx.data.shape[0], call.shape.seq_k)});
}

}  // namespace

Status post(const AttentionBwd& a, const Call& call, Stream stream) {
  const AttentionShape& s = call.shape;
  const RowParams params{
      .dq = a.dq,
      .lse = a.lse,
      .dlse = a.dlse,
      .k_mean = a.k_mean,
      .out_axis = TokenAxis::of(s.total_out, call.seq_out),
      .k_axis = TokenAxis::of(s.total_k, s.seq_k),
      .total_q = s.total_q,
      .heads_kv = int32_t(s.num_heads_kv),
      .group = int32_t(s.group),
      .batch = int32_t(s.batch),
      .head_dim = int32_t(s.head_dim),
      .row_tiles = call.row_tiles,
      .rotation = a.rotate_qk ? int32_t(rotation_group(s.head_dim)) : 1,
      .signs = RotationSigns::of(a.rotate_seed),
      .shared_q = s.shared_q,
      .ordered = call.ordered,
      .wide = a.dq.dtype != Dtype::f32 && reinterpret_cast<uintptr_t>(a.dq.data) % 16 == 0 && a.dq.stride[0] % 8 == 0 &&
              a.dq.stride[1] % 8 == 0,
      .softmax_scale = float(s.softmax_scale),
      .w = call.w,
  };
  const int64_t tiles = s.shared_q ? ceil_div(s.total_q, int64_t(kRows)) : int64_t(call.row_tiles);
  const Launch at{.what = "attention_bwd: sm90: row gradients",
                  .grid = dim3(uint32_t(tiles * s.num_heads_q)),
                  .block = dim3(kRowThreads),
                  .stream = stream,
                  .overlaps = s.total_k > 0};  // else there is no main kernel, which waits for pre
  const auto kernel = call.half_dq ? (call.dim == 128 ? row_gradients<128, true> : row_gradients<64, true>)
                                   : (call.dim == 128 ? row_gradients<128, false> : row_gradients<64, false>);
  MXFLASH_TRY(launch(at, kernel, params));
  MXFLASH_TRY(quantize_gradient(call, call.w.dk, a.dk, a.dk_mx, stream));
  return quantize_gradient(call, call.w.dv, a.dv, a.dv_mx, stream);
}

}  // namespace mxflash::bwd_sm90
