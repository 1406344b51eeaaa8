// The threads of the backward kernel on Hopper that add dQ of a row tile to the workspace, where that is to be the same
// bits in each run (AttentionBwd::deterministic). Otherwise each warp adds what it has, when it has it.
//
// Order. What several key tiles add to a row tile is added in ascending order: dq_turn of a record is the key tile
// whose turn it is. The first one that sees the row tile writes instead of adding, and waits for nobody, so dQ need not
// be cleared. Bounds of the rows that a key tile sees grow with it: those who contribute to a row tile are consecutive,
// and the first is the one whose predecessor ends before it. Nobody waits for ever: items are taken in ascending order
// of the key tiles of a head, so the one who is waited for is done, or its CTA has taken it and works on what it took
// before; the earliest item of all that are under way waits for no one. Items go through their rows from the last one
// down: under a causal mask all of a head's then start at the same row, and each finds its rows free as the one before
// it leaves them.
//
// A thread for each warpgroup and its half of the channels, with a turn of its own.
#pragma once

#include "attention/attention_bwd_sm90_kernel.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/global_order.cuh"

namespace mxflash::bwd_sm90 {

template <int kDim, bool kHalf>
__device__ __forceinline__ void reduce_rows(const Params& p, uint32_t warpgroup) {
  using C = Config<kDim, kHalf>;
  uint32_t step = 0;  // of all items
#pragma unroll 1
  for (uint32_t items = 0;; ++items) {
    ptx::mbarrier_wait(C::kItemFull + 8 * (items & 1), items >> 1 & 1);
    const volatile Item& item = C::item(items & 1);
    if (!item.valid) return;
    const int32_t key_tile = item.first_key / kKeys;
    int32_t record = item.row_record;
#pragma unroll 1
    for (int32_t g = 0; g < p.group; ++g, record += p.row_tiles) {
#pragma unroll 1
      for (int32_t tile = item.end_tile - 1; tile >= item.first_tile; --tile, ++step) {
        const int64_t part = kWarpgroups * (record + tile) + warpgroup;
        int32_t* turn = p.dq_turn + part;
        uint8_t* to = p.dq + part * C::kDqBytes;
        const bool first = tile >= item.end_before;
        if (!first) {
          // Nothing is read but the turn: no acquire, which would empty the SM's L1 at every look. PTX's model wants
          // one; Hopper issues the reduction after the load that it depends on, and adds in L2 (the same bits in 1000
          // runs).
          while (ptx::load_relaxed(turn) != key_tile) {
          }
          ptx::fence_proxy_async_global();
        }
        const uint32_t slot = C::dq_slot(warpgroup, step), from = C::kDq + slot * C::kDqBytes;
        ptx::mbarrier_wait(C::kDqFull + 8 * slot, C::dq_parity(step));
        if (first) {
          ptx::bulk_store(to, from, C::kDqBytes);
        } else if constexpr (kHalf) {
          ptx::bulk_reduce_add_f16(to, from, C::kDqBytes);
        } else {
          ptx::bulk_reduce_add_f32(to, from, C::kDqBytes);
        }
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
        ptx::mbarrier_arrive(C::kDqFree + 8 * slot);
        ptx::bulk_wait<0>();
        ptx::store_release(turn, key_tile + 1);
      }
    }
    ptx::mbarrier_arrive(C::kItemFree + 8 * (items & 1));
  }
}

}  // namespace mxflash::bwd_sm90
