// From the sums of attention_bwd's main kernel on Hopper to gradients (attention_bwd_sm90.cuh).
//
//   row_gradients   a CTA for 64 rows of a query head: dQ in the order of rows, its scales, the rotation back, the
//   share
//                   of k_mean; with a shared query the sum over the batch, in order. Clears rows of no sequence.
//   key_gradients   a CTA for 128 keys of a key head, where dk or dv is to be quantized: from fp32 in the workspace
#include "attention/accumulators.cuh"
#include "attention/attention_bwd_sm90.cuh"
#include "attention/mx_piece.cuh"
#include "mx/rotation.h"
#include "ptx/convert.cuh"
#include "runtime/launch.cuh"

namespace mxflash::bwd_sm90 {
namespace {

constexpr int kThreads = 256;  // for keys
constexpr int kRowThreads = 512;
constexpr int kRowLanes = kRowThreads / kRows;  // of a row

struct RowParams {
  Tensor dq, lse, dlse, k_mean;
  TokenAxis out_axis;
  int64_t total_q;
  int32_t heads_kv, group, batch, head_dim;
  int32_t row_tiles;
  int32_t rotation;  // group of channels that are rotated back; 1: none
  uint64_t seed;
  bool shared_q;
  bool wide;  // 2-byte elements in rows aligned to 16 bytes
  float softmax_scale;
  Workspace w;
};

// Rotates a row back: neighbouring lanes hold kCount channels each.
template <int kCount>
__device__ __forceinline__ void rotate_back_row(float (&x)[kCount], const RowParams& p, int part) {
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
    if (step >= p.rotation) break;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i & step) continue;
      const float a = x[i], b = x[i + step];
      x[i] = a + b, x[i + step] = a - b;
    }
  }
#pragma unroll
  for (int bit = 1; bit < kRowLanes; bit *= 2) {
    if (bit * kCount >= p.rotation) break;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], bit);
      x[i] = part & bit ? other - x[i] : x[i] + other;
    }
  }
  const float norm = hadamard_scale(p.rotation);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= rotation_flips(p.seed, part * kCount + i) ? -norm : norm;
}

// Piece `i` of a warp's sums: acc[4 i ..], of columns 8 i + 2 c + {0, 1} of rows r and r + 8.
template <int kPieces, bool kHalf>
__device__ __forceinline__ void load_sums(const uint8_t* record, float4 (&x)[kPieces]) {
  const uint4* from = reinterpret_cast<const uint4*>(record) + threadIdx.x;
  if constexpr (!kHalf) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint4 v = from[i * kRowThreads];
      x[i] = make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPieces / 2; ++i) {
      const uint4 v = from[i * kRowThreads];
      x[2 * i] = make_float4(ptx::low_f16(v.x), ptx::high_f16(v.x), ptx::low_f16(v.y), ptx::high_f16(v.y));
      x[2 * i + 1] = make_float4(ptx::low_f16(v.z), ptx::high_f16(v.z), ptx::low_f16(v.w), ptx::high_f16(v.w));
    }
  }
}

template <int kDim, bool kHalf>
__global__ void __launch_bounds__(kRowThreads, 2) row_gradients(const __grid_constant__ RowParams p) {
  constexpr int kPieces = kRows * kDim / 4 / kRowThreads;  // of 4 sums, of a thread
  constexpr int kWriterPieces = kDim / 16;                 // and of a thread of the main kernel
  constexpr int kPart = kDim / kRowLanes;                  // channels that a thread writes
  constexpr int kStride = kDim + kRowLanes;                // a gap of one after each part: no bank conflicts
  __shared__ float sums[kRows * kStride];
  __shared__ float2 factors[kRows];
  const int32_t tile = int32_t(blockIdx.x), head = int32_t(blockIdx.y), kv_head = head / p.group;
  if (const Jagged& seq = p.out_axis.seq; seq.cu_seqlens) {
    for (int64_t token = seq.cu_seqlens[seq.batch] + tile; token < p.total_q; token += gridDim.x) {
      for (int c = int(threadIdx.x); c < p.head_dim; c += kRowThreads) {
        store_element(p.dq, token * p.dq.stride[0] + head * p.dq.stride[1] + c, 0);
      }
    }
  }
  // With a shared query, tile `tile` of every sequence.
  const Owner owner = p.shared_q ? Owner{0, p.out_axis.sequence(0)} : p.out_axis.owner(tile * kRows);
  const int32_t first = tile * kRows - int32_t(owner.sequence.padded_start);
  const int32_t rows = min(int32_t(owner.sequence.length) - first, kRows);
  if (rows <= 0) return;
  const int32_t end = p.shared_q ? p.batch : owner.index + 1;

  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
#pragma unroll 1
  for (int32_t b = owner.index; b < end; ++b) {
    const int32_t padded = int32_t(p.out_axis.sequence(b).padded_start) + first;
    const int64_t record = int64_t(head) * p.row_tiles + padded / kRows;
    float4 x[kPieces];
    load_sums<kPieces, kHalf>(p.w.dq + record * (kRows * kDim * (kHalf ? 2 : 4)), x);
    if (threadIdx.x < kRows) {
      const HeadScale h = p.w.head_scale[b * p.heads_kv + kv_head];
      const RowScale s = p.w.row_scale[record * kRows + threadIdx.x];
      const int e = min(max(h.kt - s.pe - s.er - h.u + (kHalf ? p.w.row_tile[record].dq_unit : 0), -252), 252);
      factors[threadIdx.x] = make_float2(power_of_two(e / 2), power_of_two(e - e / 2) * p.softmax_scale);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      // The main kernel's warp, warpgroup by warpgroup, and the piece of its sums.
      constexpr int kWarps = kRowThreads / 32;
      const int at = kHalf ? 2 * (warp + kWarps * (i / 2)) + i % 2 : warp + kWarps * i, writer = at / kWriterPieces;
      const int row = 16 * (writer % 4) + lane / 4;
      const int channel = writer / 4 * (kDim / 2) + 8 * (at % kWriterPieces) + 2 * (lane % 4);
      float* to = sums + row * kStride + channel + channel / kPart;
      const float2 f0 = factors[row], f1 = factors[row + 8];
      float y[4] = {x[i].x * f0.x * f0.y, x[i].y * f0.x * f0.y, x[i].z * f1.x * f1.y, x[i].w * f1.x * f1.y};
      if (b > owner.index) {
        y[0] += to[0], y[1] += to[1], y[2] += to[8 * kStride], y[3] += to[8 * kStride + 1];
      }
      to[0] = y[0], to[1] = y[1];
      to[8 * kStride] = y[2], to[8 * kStride + 1] = y[3];
    }
    __syncthreads();
  }

  const int row = int(threadIdx.x) / kRowLanes, part = int(threadIdx.x) % kRowLanes;
  float x[kPart];
#pragma unroll
  for (int i = 0; i < kPart; ++i) x[i] = sums[row * kStride + part * (kPart + 1) + i];
  if (p.rotation > 1) rotate_back_row(x, p, part);
  if (row >= rows) return;
  if (p.dlse && p.k_mean) {
    // The caller's lse holds softmax_scale q . k_mean, so dlse reaches q through it.
    for (int32_t b = owner.index; b < end; ++b) {
      const int64_t at = p.out_axis.sequence(b).start + first + row;
      if (static_cast<const float*>(p.lse.data)[head * p.lse.stride[0] + at] == -INFINITY) continue;
      const float f = p.softmax_scale * static_cast<const float*>(p.dlse.data)[head * p.dlse.stride[0] + at];
      const float* mean =
          static_cast<const float*>(p.k_mean.data) + b * p.k_mean.stride[0] + kv_head * p.k_mean.stride[1];
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        if (part * kPart + i < p.head_dim) x[i] = fmaf(f, mean[part * kPart + i], x[i]);
      }
    }
  }
  const int64_t to = (owner.sequence.start + first + row) * p.dq.stride[0] + head * p.dq.stride[1] + part * kPart;
#pragma unroll
  for (int i = 0; i < kPart; i += 8) {
    if (part * kPart + i >= p.head_dim) break;
    if (p.wide) {
      const Dtype dtype = p.dq.dtype;
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.dq.data) + to + i) =
          make_uint4(pack_half(dtype, x[i], x[i + 1]), pack_half(dtype, x[i + 2], x[i + 3]),
                     pack_half(dtype, x[i + 4], x[i + 5]), pack_half(dtype, x[i + 6], x[i + 7]));
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) store_element(p.dq, to + i + k, x[i + k]);
    }
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
      .total_q = s.total_q,
      .heads_kv = int32_t(s.num_heads_kv),
      .group = int32_t(s.group),
      .batch = int32_t(s.batch),
      .head_dim = int32_t(s.head_dim),
      .row_tiles = call.row_tiles,
      .rotation = a.rotate_qk ? int32_t(rotation_group(s.head_dim)) : 1,
      .seed = a.rotate_seed,
      .shared_q = s.shared_q,
      .wide = a.dq.dtype != Dtype::f32 && reinterpret_cast<uintptr_t>(a.dq.data) % 16 == 0 && a.dq.stride[0] % 8 == 0 &&
              a.dq.stride[1] % 8 == 0,
      .softmax_scale = float(s.softmax_scale),
      .w = call.w,
  };
  const int64_t tiles = s.shared_q ? ceil_div(s.total_q, int64_t(kRows)) : int64_t(call.row_tiles);
  const Launch at{"attention_bwd: sm90: row gradients", dim3(uint32_t(tiles), uint32_t(s.num_heads_q)), kRowThreads, 0,
                  stream};
  const auto kernel = call.half_dq ? (call.dim == 128 ? row_gradients<128, true> : row_gradients<64, true>)
                                   : (call.dim == 128 ? row_gradients<128, false> : row_gradients<64, false>);
  MXFLASH_TRY(launch(at, kernel, params));
  MXFLASH_TRY(quantize_gradient(call, call.w.dk, a.dk, a.dk_mx, stream));
  return quantize_gradient(call, call.w.dv, a.dv, a.dv_mx, stream);
}

}  // namespace mxflash::bwd_sm90
