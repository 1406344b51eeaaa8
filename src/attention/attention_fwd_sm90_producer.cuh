// The two threads that feed the forward kernel on Hopper: one takes work items and loads their query rows, the other
// loads key and value tiles.
#pragma once

#include "attention/attention_fwd_sm90.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/warp.cuh"

namespace mxflash::fwd_sm90 {

// ---- work items ---------------------------------------------------------------------------------------------------

// Blocks of rows of the sequences before the n-th of the plan. Without a list, a bound that leaves room for any
// lengths: at most one block in a sequence is then empty.
template <class C>
__device__ __forceinline__ int32_t first_block(const Params& p, int32_t n) {
  if (p.plan.first_block) return p.plan.first_block[n];
  return int32_t((int64_t(p.seq_q.cu_seqlens[n]) * (C::kSplit ? p.pack : 1) + int64_t(C::kBlockM) * n) / C::kBlockM);
}

template <class C>
__device__ __forceinline__ int32_t count_items(const Params& p) {
  const int32_t splits = C::kSplit ? p.partials.splits : 1;
  return splits * p.num_heads * (p.seq_q.cu_seqlens ? first_block<C>(p, p.batch) : p.batch * p.max_blocks);
}

// Which block of which head item `t` is, longest first: sequences by length, and blocks from the last to the first
// (under a causal mask later rows see more keys), all heads of a group for each block. In a batch of equal lengths a
// group may reach over several sequences.
template <class C>
__device__ __forceinline__ void place_item(const Params& p, int32_t t, volatile Item& item) {
  int32_t sequence = 0, head = 0, blocks = p.max_blocks, heads_here = p.heads_at_once;
  if (p.seq_q.cu_seqlens) {
    const int32_t block = t / p.num_heads;
    for (int32_t end = p.batch; end - sequence > 1;) {
      const int32_t middle = (sequence + end) / 2;
      (first_block<C>(p, middle) <= block ? sequence : end) = middle;
    }
    const int32_t first = first_block<C>(p, sequence);
    blocks = first_block<C>(p, sequence + 1) - first;
    t -= first * p.num_heads;
    heads_here = min(heads_here, p.num_heads);
    const int32_t first_head = t / (heads_here * blocks) * heads_here;
    t -= first_head * blocks;
    heads_here = min(heads_here, p.num_heads - first_head);
    head = first_head + t % heads_here;
  } else {
    const int32_t first_index = t / (heads_here * blocks) * heads_here;
    t -= first_index * blocks;
    heads_here = min(heads_here, p.batch * p.num_heads - first_index);
    const int32_t index = first_index + t % heads_here;
    sequence = index / p.num_heads;
    head = index % p.num_heads;
  }
  item.first_row = (blocks - 1 - t / heads_here) * C::kBlockM;
  item.sequence = p.plan.order ? p.plan.order[sequence] : sequence;
  item.head = head;
}

// Returns whether there is such a block. The scheduler has few registers: what is known goes to shared memory at once
// and is read from there again.
template <class C>
__device__ __forceinline__ bool decode_item(const Params& p, int32_t t, volatile Item& item) {
  if constexpr (C::kSplit) {
    item.split = t % p.partials.splits;
    t /= p.partials.splits;
  }
  place_item<C>(p, t, item);
  {
    const int32_t pack = C::kSplit ? p.pack : 1, b = p.shared_q ? 0 : item.sequence;
    const Sequence q = C::kSplit ? packed_sequence(p.total_q, p.seq_q, pack, b) : sequence_at(p.total_q, p.seq_q, b);
    item.seqlen_q = int32_t(q.length);
    item.q_padded = int32_t(q.padded_start);
    item.out_start = p.shared_q ? item.sequence * int32_t(p.total_q) : int32_t(q.start) / pack;
  }
  if (item.first_row >= item.seqlen_q) return false;
  {
    const Sequence k = sequence_at(p.total_k, p.seq_k, item.sequence);
    item.seqlen_k = int32_t(k.length);
    item.k_padded = int32_t(k.padded_start);
  }
  const Range keys =
      row_keys<C>(p, item.first_row, min(item.first_row + C::kBlockM, item.seqlen_q), item.seqlen_q, item.seqlen_k);
  item.first_tile = int32_t(keys.first) / kBlockN;
  item.num_tiles = keys.empty() ? 0 : (int32_t(keys.end) + kBlockN - 1) / kBlockN - item.first_tile;
  if constexpr (C::kSplit) {
    const TileRange range = split_range({item.first_tile, item.num_tiles}, p.partials.splits, item.split);
    item.first_tile = range.first;
    item.num_tiles = range.count;
    return range.count > 0 || item.split == 0;
  }
  return true;
}

// ---- scheduler ------------------------------------------------------------------------------------------------------

// Takes items, looks them up ahead of the buffer for their query rows, and loads these when it is free.
template <class C>
__device__ __forceinline__ void schedule(const Params& p, const Shared<C> shared) {
  const int32_t num_items = count_items<C>(p);
  Ring<kItems> slot;
  Ring<kBuffers> buffer;
#pragma unroll 1
  for (bool found = true; found; slot.next(), buffer.next()) {
    // Free: the item that was there is done, else the one before this would not have had its buffer.
    volatile Item& item = shared.item(slot.index());
    int32_t next;
    do {
      next = atomicAdd(p.plan.counter, 1);  // no earlier: what one CTA has taken, no other can
      found = next < num_items && decode_item<C>(p, next, item);
    } while (next < num_items && !found);
    item.valid = found;
    int32_t rows = 0;
    int64_t row = 0;
    if (found) {
      // A block may reach beyond the sequence's padded rows: those warpgroups have no rows.
      rows = min(C::kBlockM, int32_t(round_up(item.seqlen_q, kRows)) - item.first_row);
      row = int64_t(item.head) * p.q_shape.tokens + item.q_padded + item.first_row;
      for (int32_t w = 0; w * kRows < rows; ++w) item.q_scale[w] = p.q_scale[row / kRows + w];
    }
    ptx::mbarrier_arrive(shared.item_known(slot.index()));
    ptx::mbarrier_wait(shared.item_free(buffer.index()), buffer.parity() ^ 1);
    if (!found) {
      ptx::mbarrier_arrive(shared.item_full(buffer.index()));
      return;
    }
    ptx::mbarrier_arrive_expect_tx(shared.item_full(buffer.index()), uint32_t(rows * C::kDim));
    ptx::bulk_load(shared.q(buffer.index()), p.q + row * C::kDim, uint32_t(rows * C::kDim),
                   shared.item_full(buffer.index()));
  }
}

// ---- loader ---------------------------------------------------------------------------------------------------------

// Loads the key and value tiles of item after item.
template <class C>
__device__ __forceinline__ void load_tiles(const Params& p, const Shared<C> shared) {
  Ring<kItems> slot;
  Ring<kBuffers> buffer;
  Ring<C::kStages> stage;
  while (true) {
    ptx::mbarrier_wait(shared.item_known(slot.index()), slot.parity());
    const volatile Item& item = shared.item(slot.index());
    if (!item.valid) return;
    // Tiles of keys and of values count alike, from the image's first: one index for payloads and scales.
    int32_t tile = (item.head / p.group) * int32_t(p.k_shape.scale_tiles()) + item.k_padded / kBlockN + item.first_tile;
    const int32_t end = tile + item.num_tiles;
    ptx::mbarrier_arrive(shared.item_free(buffer.index()));
    slot.next();
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
