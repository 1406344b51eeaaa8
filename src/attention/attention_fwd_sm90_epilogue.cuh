// The end of a work item of the forward kernel on Hopper: results of a warpgroup's rows, and those of rows that cannot
// be had from tensor cores.
#pragma once

#include "attention/attention_fwd_sm90_consumer.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/shared_memory.cuh"

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
      store_statistics(p.to, place(item, i), visible[r], row.reference[r] - kOffset + log2_sum, log2_sum - top);
    }
  }
#pragma unroll
  for (int j = 0; j < kAcc; ++j) o[j] = visible[j >> 1 & 1] ? o[j] * factor[j >> 1 & 1] : 0.0f;
  if (unit < kTinyUnit) {
#pragma unroll
    for (int j = 0; j < kAcc; ++j) o[j] *= to_value;
  }
  const bool partial = C::kSplit && p.partials.out;
  if (p.to.v_mean && !partial) {
    const float* mean = p.to.mean(item.sequence, item.head / p.items.group);
#pragma unroll
    for (int j = 0; j < kAcc; ++j) {
      const int channel = 8 * (j >> 2) + 2 * quad + (j & 1);
      if (visible[j >> 1 & 1] && channel < p.to.head_dim_v) o[j] += mean[channel];
    }
  }
  if (partial) {
    write_partial(item);
  } else if (p.to.wide_stores) {
    QuadRows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row_index(item, r);
      rows.at[r] = place(item, i);
      rows.present[r] = i < item.seqlen_q;
    }
    store_rows_wide(p.to.out, p.to.head_dim_v, rows, o);
  } else if (p.to.out) {
    write_narrow(item);
  }
  if (!partial && p.to.out_mx.data) store_accumulators();
  if (p.items.has_mask && any_not_finite(o)) repair(item);
  if (!partial && p.to.out_mx.data) write_mx(item);
}

// Quantizes the warpgroup's rows from shared memory, a warp 32 x 32 at a time.
template <class C>
__device__ __forceinline__ void Consumer<C>::write_mx(const Item& item) {
  const int first_row = item.first_row + ptx::hidden(warpgroup) * kRows;
  ptx::named_barrier_sync(1 + ptx::hidden(warpgroup), 128);
  const int64_t padded =
      p.items.shared_q ? item.sequence * round_up(p.items.total_q, kSeqAlign) : int64_t(item.q_padded);
#pragma unroll 1
  for (int patch = ptx::hidden(warp); patch < 2 * (kDimV / 32); patch += 4) {
    const int r0 = patch % 2 * 32, channel = patch / 2 * 32, i = first_row + r0;
    const int rows = min(32, item.seqlen_q - i);
    if (rows <= 0) continue;
    quantize_patch(p.to.out_mx, int64_t(item.out_start) + i, padded + i, rows, item.head, channel, [&](int r) {
      return __int_as_float(ptx::load_shared<int32_t>(element_address(r0 + r, channel + ptx::lane_id())));
    });
  }
  ptx::named_barrier_sync(1 + ptx::hidden(warpgroup), 128);  // before others write there again
}

// Any dtype and alignment, one element at a time; registers pass through the thread's shared memory to be indexed.
template <class C>
__device__ __forceinline__ void Consumer<C>::write_narrow(const Item& item) {
  const int quad = ptx::lane_id() % 4;
  store_accumulators();
#pragma unroll 1
  for (int j = 0; j < kAcc / 4; ++j) {
    const float4 x = ptx::load_shared<float4>(acc_address(j));
    const int channel = 8 * j + 2 * quad;
    if (channel >= p.to.head_dim_v) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row_index(item, r);
      if (i >= item.seqlen_q) continue;
      const RowPlace at = place(item, i);
      const int64_t to = at.row * p.to.out.stride[0] + at.head * p.to.out.stride[1] + channel;
      store_element(p.to.out, to, r ? x.z : x.x);
      store_element(p.to.out, to + 1, r ? x.w : x.y);
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

// The warp's rows once more, from visible keys only and key by key; slow, and as rare as a NaN is.
template <class C>
__device__ __forceinline__ void Consumer<C>::repair(const Item& item) {
  __syncwarp();
  const int kv_head = item.head / p.items.group;
#pragma unroll 1
  for (int at = 0; at < 16; ++at) {
    const int i = item.first_row + warpgroup * kRows + warp * 16 + at;
    if (i >= item.seqlen_q) return;
    // lse in binades, from the quad that has the row.
    const float reference = __shfl_sync(~0u, at < 8 ? row.reference[0] : row.reference[1], at % 8 * 4);
    const float sum = __shfl_sync(~0u, at < 8 ? row.sum[0] : row.sum[1], at % 8 * 4);
    const float lse = reference - kOffset + log2f(sum);
    const Range keys = item_keys<C>(item, row_keys<C>(p.items, i, i + 1, item.seqlen_q, item.seqlen_k));
    const auto nan = [&](int64_t token, int channel) {
      return (p.v[p.v_shape.offset(kv_head, token, channel)] & 0x7F) == kFp8Nan;
    };
    if (keys.empty() || !hides<C>(p.items, item, keys, nan)) continue;
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
      if (channel >= p.to.head_dim_v) continue;
      float x = total[n] / weight;
      if (C::kSplit && p.partials.out) {
        p.partials.out[partial_index(item, i) * kDimV + channel] = x;
        continue;
      }
      if (p.to.v_mean) x += p.to.mean(item.sequence, kv_head)[channel];
      const RowPlace to = place(item, i);
      if (const Tensor& out = p.to.out)
        store_element(out, to.row * out.stride[0] + to.head * out.stride[1] + channel, x);
      if (p.to.out_mx.data) {
        ptx::store_shared(element_address(ptx::hidden(warp) * 16 + at, channel), __float_as_int(x));
      }
    }
  }
}

}  // namespace mxflash::fwd_sm90
