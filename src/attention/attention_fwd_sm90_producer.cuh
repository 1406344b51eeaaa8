// The two threads that feed the forward kernel on Hopper: one takes work items and loads their query rows, the other
// loads key and value tiles.
#pragma once

#include "attention/attention_fwd_sm90.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/warp.cuh"

namespace mxflash::fwd_sm90 {

// ---- work items ---------------------------------------------------------------------------------------------------

// Item `t`, longest first: sequences by length, and in a group of heads blocks from the last to the first (under a
// causal mask later rows see more keys), all heads of the group for each block. Returns whether the sequence has such a
// block. The scheduler has few registers: what is known goes to shared memory at once and is read from there again.
__device__ __forceinline__ bool decode_item(const Params& p, int32_t t, volatile Item& item) {
  const int32_t per_group = p.heads_at_once * p.max_blocks;
  const int32_t first_head = t / per_group * p.heads_at_once;
  const int32_t heads_here = min(p.heads_at_once, p.batch * p.num_heads - first_head);
  t %= per_group;
  item.first_row = (p.max_blocks - 1 - t / heads_here) * kBlockM;
  const int32_t index = first_head + t % heads_here;
  item.sequence = p.plan.order ? p.plan.order[index / p.num_heads] : index / p.num_heads;
  item.head = index % p.num_heads;
  {
    const Sequence q = sequence_at(p.total_q, p.seq_q, p.shared_q ? 0 : item.sequence);
    item.seqlen_q = int32_t(q.length);
    item.q_padded = int32_t(q.padded_start);
    item.out_start = p.shared_q ? item.sequence * int32_t(p.total_q) : int32_t(q.start);
  }
  if (item.first_row >= item.seqlen_q) return false;
  {
    const Sequence k = sequence_at(p.total_k, p.seq_k, item.sequence);
    item.seqlen_k = int32_t(k.length);
    item.k_padded = int32_t(k.padded_start);
  }
  const Range keys =
      visible_keys(p.mask, item.first_row, min(item.first_row + kBlockM, item.seqlen_q), item.seqlen_q, item.seqlen_k);
  item.first_tile = int32_t(keys.first) / kBlockN;
  item.num_tiles = keys.empty() ? 0 : (int32_t(keys.end) + kBlockN - 1) / kBlockN - item.first_tile;
  return true;
}

// ---- scheduler ------------------------------------------------------------------------------------------------------

// Takes items, one ahead of the consumers, and loads their query rows.
template <class C, int kDim>
__device__ __forceinline__ void schedule(const Params& p, const Shared<C> shared) {
  const int32_t num_items = p.batch * p.num_heads * p.max_blocks;
  Ring<kBuffers> buffer;
  int32_t next = atomicAdd(p.plan.counter, 1);
#pragma unroll 1
  for (bool found = true; found; buffer.next()) {
    ptx::mbarrier_wait(shared.item_free(buffer.index()), buffer.parity() ^ 1);
    volatile Item& item = shared.item(buffer.index());
    found = false;
    while (next < num_items && !found) {
      found = decode_item(p, next, item);
      next = atomicAdd(p.plan.counter, 1);
    }
    item.valid = found;
    if (!found) {
      ptx::mbarrier_arrive(shared.item_full(buffer.index()));
      return;
    }
    // A block may reach beyond the sequence's padded rows: those warpgroups have no rows.
    const int32_t rows = min(kBlockM, int32_t(round_up(item.seqlen_q, kRows)) - item.first_row);
    const int64_t row = int64_t(item.head) * p.q_shape.tokens + item.q_padded + item.first_row;
    for (int32_t w = 0; w * kRows < rows; ++w) item.q_scale[w] = p.q_scale[row / kRows + w];
    ptx::mbarrier_arrive_expect_tx(shared.item_full(buffer.index()), uint32_t(rows * kDim));
    ptx::bulk_load(shared.q(buffer.index()), p.q + row * kDim, uint32_t(rows * kDim), shared.item_full(buffer.index()));
  }
}

// ---- loader ---------------------------------------------------------------------------------------------------------

// Loads the key and value tiles of item after item.
template <class C>
__device__ __forceinline__ void load_tiles(const Params& p, const Shared<C> shared) {
  Ring<kBuffers> buffer;
  Ring<C::kStages> stage;
  while (true) {
    ptx::mbarrier_wait(shared.item_full(buffer.index()), buffer.parity());
    const volatile Item& item = shared.item(buffer.index());
    if (!item.valid) return;
    // Tiles of keys and of values count alike, from the image's first: one index for payloads and scales.
    int32_t tile = (item.head / p.group) * int32_t(p.k_shape.scale_tiles()) + item.k_padded / kBlockN + item.first_tile;
    const int32_t end = tile + item.num_tiles;
    ptx::mbarrier_arrive(shared.item_free(buffer.index()));
    buffer.next();
    // Scales are read one tile ahead: their way from memory is as long as a tile's.
    int32_t k_scale = 0, v_scale = 0;
    if (tile < end) k_scale = p.k_scale[tile], v_scale = p.v_scale[tile];
#pragma unroll 1
    for (; tile < end; ++tile) {
      ptx::mbarrier_wait(shared.k_free(stage.index()), stage.parity() ^ 1);
      ptx::store_shared_int(shared.k_scale(stage.index()), k_scale);
      ptx::store_shared_int(shared.v_scale(stage.index()), v_scale);
      if (tile + 1 < end) k_scale = p.k_scale[tile + 1], v_scale = p.v_scale[tile + 1];
      ptx::mbarrier_arrive_expect_tx(shared.k_full(stage.index()), C::kKeyBytes);
      ptx::bulk_load(shared.k(stage.index()), p.k + int64_t(tile) * C::kKeyBytes, C::kKeyBytes,
                     shared.k_full(stage.index()));
      ptx::mbarrier_wait(shared.v_free(stage.index()), stage.parity() ^ 1);
      ptx::mbarrier_arrive_expect_tx(shared.v_full(stage.index()), C::kValueBytes);
      ptx::bulk_load(shared.v(stage.index()), p.v + int64_t(tile) * C::kValueBytes, C::kValueBytes,
                     shared.v_full(stage.index()));
      stage.next();
    }
  }
}

}  // namespace mxflash::fwd_sm90
