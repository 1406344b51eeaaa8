// The two threads that feed the forward kernel on Hopper: one takes work items and loads their query rows, the other
// loads key and value tiles.
#pragma once

#include "attention/attention_fwd_sm90.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/warp.cuh"

namespace mxflash::fwd_sm90 {

// ---- scheduler ------------------------------------------------------------------------------------------------------

// Takes items, looks them up ahead of the buffer for their query rows, and loads these when it is free.
template <class C>
__device__ __forceinline__ void schedule(const Params& p, const Shared<C> shared) {
  const int32_t num_items = count_items<C>(p.items);
  Ring<kItems> slot;
  Ring<kBuffers> buffer;
#pragma unroll 1
  for (bool found = true; found; slot.next(), buffer.next()) {
    // Consumers are done with the item that was there, else the one before this would not have had its buffer; the
    // loader may be behind them where an item has no tiles.
    ptx::mbarrier_wait(shared.item_taken(slot.index()), slot.parity() ^ 1);
    volatile Item& item = shared.item(slot.index());
    found = take_item<C>(p.items, num_items, item);  // no earlier: what one CTA has taken, no other can
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
  Ring<C::kStages> stage;
  while (true) {
    ptx::mbarrier_wait(shared.item_known(slot.index()), slot.parity());
    const volatile Item& item = shared.item(slot.index());
    if (!item.valid) return;
    // Tiles of keys and of values count alike, from the image's first: one index for payloads and scales.
    int32_t tile =
        (item.head / p.items.group) * int32_t(p.k_shape.scale_tiles()) + item.k_padded / C::kBlockN + item.first_tile;
    const int32_t end = tile + item.num_tiles;
    ptx::mbarrier_arrive(shared.item_taken(slot.index()));
    slot.next();
    // Scales are read one tile ahead: their way from memory is as long as a tile's.
    int32_t k_scale = 0, v_scale = 0;
    if (tile < end) k_scale = p.k_scale[tile], v_scale = p.v_scale[tile];
#pragma unroll 1
    for (; tile < end; ++tile) {
      ptx::mbarrier_wait(shared.k_free(stage.index()), stage.parity() ^ 1);
      ptx::store_shared(shared.k_scale(stage.index()), k_scale);
      ptx::store_shared(shared.v_scale(stage.index()), v_scale);
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
