// The end of a work item of the forward kernel on Hopper: results of a warpgroup's rows, and those of rows that cannot
// be had from tensor cores.
#pragma once

#include "attention/attention_fwd_sm90_consumer.cuh"

namespace mxflash::fwd_sm90 {

// An element of an image, in units of its tile's scale.
__device__ __forceinline__ float image_element(const uint8_t* image, const ImageShape& shape, int64_t head,
                                               int64_t token, int64_t channel) {
  return decode_fp8(image[shape.offset(head, token, channel)], e4m3_format());
}

template <class C>
__device__ __forceinline__ void Consumer<C>::write(const Item& item) {
  const int quad = ptx::lane_id() % 4;
  const float to_value = decode_e8m0(uint8_t(unit));
  float factor[2];
  bool visible[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = quad_sum(row.sum[r]), weighted = quad_sum(rounded[2 * r]), top = quad_max(row.top[r]);
    visible[r] = total != 0;  // NaN counts as visible and propagates
    row.sum[r] = total;
    factor[r] = kWeightSum / weighted * (unit < kTinyUnit ? 1.0f : to_value);
    const int i = row_index(item, r);
    if (quad == 0 && i < item.seqlen_q) {
      const float log2_sum = log2f(total);
      if (C::kSplit && p.partials.out) {
        const float origin = row.reference[r] - kOffset;
        p.partials.row[partial_index(item, i)] =
            visible[r] ? PartialRow{origin + log2_sum, origin + top} : PartialRow{-INFINITY, -INFINITY};
        continue;
      }
      const Place to = place(item, i);
      if (p.lse) {
        static_cast<float*>(p.lse.data)[to.head * p.lse.stride[0] + to.row] =
            visible[r] ? (row.reference[r] - kOffset + log2_sum) * kLn2 : -INFINITY;
      }
      if (p.row_exponent) {
        const float spare = floorf(log2_sum - top);
        static_cast<uint8_t*>(p.row_exponent.data)[to.head * p.row_exponent.stride[0] + to.row] =
            visible[r] && spare > 0 ? uint8_t(fminf(spare, 255.0f)) : 0;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kAcc; ++j) o[j] = visible[j >> 1 & 1] ? o[j] * factor[j >> 1 & 1] : 0.0f;
  if (unit < kTinyUnit) {
#pragma unroll
    for (int j = 0; j < kAcc; ++j) o[j] *= to_value;
  }
  const bool partial = C::kSplit && p.partials.out;
  if (p.v_mean && !partial) {
    const float* mean = static_cast<const float*>(p.v_mean.data) + item.sequence * p.v_mean.stride[0] +
                        item.head / p.group * p.v_mean.stride[1];
#pragma unroll
    for (int j = 0; j < kAcc; ++j) {
      const int channel = 8 * (j >> 2) + 2 * quad + (j & 1);
      if (visible[j >> 1 & 1] && channel < p.head_dim_v) o[j] += mean[channel];
    }
  }
  if (partial) {
    write_partial(item);
  } else if (p.wide_stores) {
    write_wide(item);
  } else if (p.out) {
    write_narrow(item);
  }
  if (!partial && p.out_mx.data) store_accumulators();
  if (p.has_mask) {
    // 0 NaN is NaN: a NaN among values gets into rows of its tile that do not see it.
    float nan = 0;
#pragma unroll
    for (int j = 0; j < kAcc; ++j) nan = fmaf(o[j], 0.0f, nan);
    if (__any_sync(~0u, nan != nan)) repair(item);
  }
  if (!partial && p.out_mx.data) write_mx(item);
}

// Quantizes the warpgroup's rows from shared memory, a warp 32 x 32 at a time.
template <class C>
__device__ __forceinline__ void Consumer<C>::write_mx(const Item& item) {
  const int first_row = item.first_row + ptx::hidden(warpgroup) * kRows;
  ptx::barrier_sync(1 + ptx::hidden(warpgroup), 128);
  const int64_t padded = p.shared_q ? item.sequence * round_up(p.total_q, kSeqAlign) : int64_t(item.q_padded);
#pragma unroll 1
  for (int patch = ptx::hidden(warp); patch < 2 * (kDimV / 32); patch += 4) {
    const int r0 = patch % 2 * 32, channel = patch / 2 * 32, i = first_row + r0;
    const int rows = min(32, item.seqlen_q - i);
    if (rows <= 0) continue;
    quantize_patch(p.out_mx, int64_t(item.out_start) + i, padded + i, rows, item.head, channel, [&](int r) {
      return __int_as_float(ptx::load_shared_int(element_address(r0 + r, channel + ptx::lane_id())));
    });
  }
  ptx::barrier_sync(1 + ptx::hidden(warpgroup), 128);  // before others write there again
}

template <class C>
__device__ __forceinline__ void Consumer<C>::write_wide(const Item& item) {
  const int quad = ptx::lane_id() % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = row_index(item, r);
    const Place at = place(item, i);
    uint16_t* to = static_cast<uint16_t*>(p.out.data) + at.row * p.out.stride[0] + at.head * p.out.stride[1] + 8 * quad;
    // Four pieces of 8 channels at a time: a thread of a quad collects one of them and stores its 16 bytes.
#pragma unroll
    for (int j = 0; j < kDimV / 8; j += 4) {
      uint32_t word[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        word[k] = pack_half(p.out.dtype, o[4 * (j + k) + 2 * r], o[4 * (j + k) + 2 * r + 1]);
      }
      const uint4 piece = transpose_quad(word, quad);
      if (i < item.seqlen_q && 8 * (j + quad) < p.head_dim_v) *reinterpret_cast<uint4*>(to + 8 * j) = piece;
    }
  }
}

// Any dtype and alignment, one element at a time; registers pass through the thread's shared memory to be indexed.
template <class C>
__device__ __forceinline__ void Consumer<C>::write_narrow(const Item& item) {
  const int quad = ptx::lane_id() % 4;
  store_accumulators();
#pragma unroll 1
  for (int j = 0; j < kAcc / 4; ++j) {
    const float4 x = ptx::load_shared_float4(acc_address(j));
    const int channel = 8 * j + 2 * quad;
    if (channel >= p.head_dim_v) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row_index(item, r);
      if (i >= item.seqlen_q) continue;
      const Place at = place(item, i);
      const int64_t to = at.row * p.out.stride[0] + at.head * p.out.stride[1] + channel;
      store_element(p.out, to, r ? x.z : x.x);
      store_element(p.out, to + 1, r ? x.w : x.y);
    }
  }
}

template <class C>
__device__ __forceinline__ void Consumer<C>::write_partial(const Item& item) {
  const int quad = ptx::lane_id() % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = row_index(item, r);
    if (i >= item.seqlen_q) continue;
    float* const to = p.partials.out + partial_index(item, i) * kDimV + 2 * quad;
#pragma unroll
    for (int j = 0; j < kAcc / 4; ++j) {
      *reinterpret_cast<float2*>(to + 8 * j) = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
    }
  }
}

// Whether some key that a row does not see, in the tiles of its warpgroup, has a NaN among its values.
template <class C>
__device__ __forceinline__ bool Consumer<C>::hides_nan(const Item& item, int kv_head, Range keys) const {
  const int first_row = item.first_row + warpgroup * kRows;
  const Range any =
      item_keys(item, row_keys<C>(p, first_row, min(first_row + kRows, item.seqlen_q), item.seqlen_q, item.seqlen_k));
  const int64_t end = min(round_up(any.end, kBlockN), int64_t(item.seqlen_k));
  bool found = false;
#pragma unroll 1
  for (int64_t key = any.first / kBlockN * kBlockN; key < end; ++key) {
    if (key == keys.first) key = keys.end;
    if (key >= end) break;
#pragma unroll 1
    for (int c = ptx::lane_id(); c < kDimV; c += 32) {
      found |= (p.v[p.v_shape.offset(kv_head, item.k_padded + key, c)] & 0x7F) == kFp8Nan;
    }
  }
  return __any_sync(~0u, found);
}

// The warp's rows once more, from visible keys only and key by key; slow, and as rare as a NaN is.
template <class C>
__device__ __forceinline__ void Consumer<C>::repair(const Item& item) {
  __syncwarp();
  const int kv_head = item.head / p.group;
#pragma unroll 1
  for (int at = 0; at < 16; ++at) {
    const int i = item.first_row + warpgroup * kRows + warp * 16 + at;
    if (i >= item.seqlen_q) return;
    // lse in binades, from the quad that has the row.
    const float reference = __shfl_sync(~0u, at < 8 ? row.reference[0] : row.reference[1], at % 8 * 4);
    const float sum = __shfl_sync(~0u, at < 8 ? row.sum[0] : row.sum[1], at % 8 * 4);
    const float lse = reference - kOffset + log2f(sum);
    const Range keys = item_keys(item, row_keys<C>(p, i, i + 1, item.seqlen_q, item.seqlen_k));
    if (keys.empty() || !hides_nan(item, kv_head, keys)) continue;
    const float q_scale = decode_e8m0(uint8_t(item.q_scale[warpgroup])) * p.scale_log2;
    float total[kDimV / 32] = {}, weight = 0;
#pragma unroll 1
    for (int64_t key = keys.first; key < keys.end; ++key) {
      const int64_t token = item.k_padded + key;
      float score = 0;
#pragma unroll 1
      for (int c = ptx::lane_id(); c < kDim; c += 32) {
        score += image_element(p.q, p.q_shape, item.head, item.q_padded + i, c) *
                 image_element(p.k, p.k_shape, kv_head, token, c);
      }
      for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(~0u, score, step);
      score *= q_scale * decode_e8m0(p.k[p.k_shape.scale_offset(kv_head, token)]);
      const float probability = exp2f(score - lse);
      weight += probability;
      const float v_scale = decode_e8m0(p.v[p.v_shape.scale_offset(kv_head, token)]);
      for (int n = 0; n < kDimV / 32; ++n) {
        total[n] += probability * (image_element(p.v, p.v_shape, kv_head, token, ptx::lane_id() + 32 * n) * v_scale);
      }
    }
    for (int n = 0; n < kDimV / 32; ++n) {
      const int channel = ptx::lane_id() + 32 * n;
      if (channel >= p.head_dim_v) continue;
      float x = total[n] / weight;
      if (C::kSplit && p.partials.out) {
        p.partials.out[partial_index(item, i) * kDimV + channel] = x;
        continue;
      }
      if (p.v_mean) {
        x += static_cast<const float*>(
            p.v_mean.data)[item.sequence * p.v_mean.stride[0] + kv_head * p.v_mean.stride[1] + channel];
      }
      const Place to = place(item, i);
      if (p.out) store_element(p.out, to.row * p.out.stride[0] + to.head * p.out.stride[1] + channel, x);
      if (p.out_mx.data) {
        ptx::store_shared_int(element_address(ptx::hidden(warp) * 16 + at, channel), __float_as_int(x));
      }
    }
  }
}

// Rows of no sequence: out zero, lse -inf.
__device__ void clear_slack(const Params& p) {
  if (!p.seq_q.cu_seqlens) return;
  const int64_t first = p.seq_q.cu_seqlens[p.batch], rows = p.total_out - first;
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t at = thread; at < rows * p.out_heads; at += step) {
    const int64_t row = first + at % rows, head = at / rows;
    if (p.lse) static_cast<float*>(p.lse.data)[head * p.lse.stride[0] + row] = -INFINITY;
    if (p.row_exponent) static_cast<uint8_t*>(p.row_exponent.data)[head * p.row_exponent.stride[0] + row] = 0;
    for (int c = 0; c < p.head_dim_v; ++c) {
      if (p.out) store_element(p.out, row * p.out.stride[0] + head * p.out.stride[1] + c, 0);
      if (p.out_mx.data) p.out_mx.data[row * p.out_mx.token_stride + head * p.out_mx.head_stride + c] = 0;
    }
  }
}

}  // namespace mxflash::fwd_sm90
