// The warp that makes rows of the forward kernel on Blackwell once more where a NaN among the values of keys that they
// do not see got into them: 0 NaN is NaN. Slow, and as rare as a NaN is; nothing of it is in the way of the others.
#pragma once

#include "attention/attention_fwd_sm100.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/fault.cuh"

namespace mxflash::fwd_sm100 {

template <class C>
struct Repairer {
  const Params& p;
  const Shared<C> shared;
  const int lane;

  __device__ __forceinline__ void run() const {
    if (!p.items.has_mask) return;
    Ring<kItems> slot;
#pragma unroll 1
    for (uint32_t phase = 0;; phase ^= 1, slot.next()) {
      ptx::mbarrier_wait(shared.item_known(slot.index()), slot.parity());
      const Item& item = shared.item(slot.index());
      if (!item.valid) return;
#pragma unroll 1
      for (int warp = 0; warp < C::kSides * 4; ++warp) {
        const int side = warp / 4;
        if (warp % 4 == 0) ptx::mbarrier_wait(shared.broken_known(side), phase);
        uint32_t rows = ptx::load_shared<uint32_t>(shared.broken(side, warp % 4));
#pragma unroll 1
        for (; rows; rows &= rows - 1) {
          const int i = item.first_row + 32 * warp + __ffs(int(rows)) - 1;
          if (!explained(item, i)) recompute(item, i);
        }
      }
      warp_arrive(shared.broken_read());
      warp_arrive(shared.item_free(slot.index()));
    }
  }

 private:
  // s of row i and a key, in binades.
  __device__ __forceinline__ float score(const Item& item, int64_t q_start, int64_t k_start, int i, int key) const {
    float sum = 0;
#pragma unroll 1
    for (int c = lane; c < p.q.dim; c += 32) {
      sum += p.q.value<C::kDim>(item.head, q_start, item.q_padded, i, c) *
             p.k.value<C::kDim>(item.head / p.items.group, k_start, item.k_padded, key, c);
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum * p.scale_log2;
  }

  // Whether each NaN of a row of out comes from a key that the row sees: then it belongs there, and when all values are
  // NaN the first key says so.
  __device__ __forceinline__ bool explained(const Item& item, int i) const {
    const int64_t k_start = sequence_at(p.items.total_k, p.items.seq_k, item.sequence).start;
    const Range keys = visible_keys(p.items.mask, i, i + 1, item.seqlen_q, item.seqlen_k);
    const int64_t at = (int64_t(item.out_start) + i) * p.out.stride[0] + item.head * p.out.stride[1];
    uint32_t left = 0;  // this lane's channels lane + 32 n that are NaN for no reason yet, a bit for each n
#pragma unroll 1
    for (int n = 0; n < C::kDimV / 32; ++n) {
      const int channel = lane + 32 * n;
      if (channel < p.to.head_dim_v) left |= uint32_t(is_nan(at + channel)) << n;
    }
#pragma unroll 1
    for (int key = int(keys.first); key < int(keys.end) && __any_sync(~0u, left); ++key) {
#pragma unroll 1
      for (int n = 0; n < C::kDimV / 32; ++n) {
        if (!(left >> n & 1)) continue;
        const float v = p.v.value<C::kDimV>(item.head / p.items.group, k_start, item.k_padded, key, lane + 32 * n);
        if (v != v) left &= ~(1u << n);
      }
    }
    return !__any_sync(~0u, left);
  }

  __device__ __forceinline__ bool is_nan(int64_t offset) const {
    if (p.out.dtype == Dtype::f32) {
      return (static_cast<const uint32_t*>(p.out.data)[offset] & 0x7FFFFFFF) > 0x7F800000;
    }
    const uint32_t magnitude = static_cast<const uint16_t*>(p.out.data)[offset] & 0x7FFF;
    return magnitude > (p.out.dtype == Dtype::bf16 ? 0x7F80u : 0x7C00u);
  }

  // A row of out, from the keys that it sees, by the whole warp.
  __device__ __forceinline__ void recompute(const Item& item, int i) const {
    const int kv_head = item.head / p.items.group;
    const int64_t q_start = p.items.shared_q ? 0 : item.out_start;
    const int64_t k_start = sequence_at(p.items.total_k, p.items.seq_k, item.sequence).start;
    const Range keys = visible_keys(p.items.mask, i, i + 1, item.seqlen_q, item.seqlen_k);
    float top = -INFINITY;
#pragma unroll 1
    for (int key = int(keys.first); key < int(keys.end); ++key) {
      top = fmaxf(top, score(item, q_start, k_start, i, key));
    }
    const int64_t at = (int64_t(item.out_start) + i) * p.out.stride[0] + item.head * p.out.stride[1];
#pragma unroll 1
    for (int channel = lane; channel < C::kDimV; channel += 32) {
      float weight = 0, total = 0;
#pragma unroll 1
      for (int key = int(keys.first); key < int(keys.end); ++key) {
        const float probability = ptx::exp2_approx(score(item, q_start, k_start, i, key) - top);
        weight += probability;
        if (channel < p.v.dim)
          total += probability * p.v.value<C::kDimV>(kv_head, k_start, item.k_padded, key, channel);
      }
      if (channel >= p.to.head_dim_v) continue;
      float y = total * ptx::reciprocal_approx(weight);
      if (p.to.v_mean && !p.partials.row) y += p.to.mean(item.sequence, kv_head)[channel];
      store_element(p.out, at + channel, ptx::fault(23) ? 12345.0f : y);  // a mark, for a test to count
    }
  }
};

}  // namespace mxflash::fwd_sm100
