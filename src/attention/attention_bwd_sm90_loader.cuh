// The thread that takes work items for the backward kernel on Hopper, looks them up, and loads their records; and the
// warp that clears dQ for later ones and counts those that are done.
#pragma once

#include "attention/attention_bwd_sm90_kernel.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/global_order.cuh"
#include "ptx/registers.cuh"

namespace mxflash::bwd_sm90 {

// ---- work items -----------------------------------------------------------------------------------------------------

// Key tiles of the sequences before the n-th of the plan. Without a list, a bound that leaves room for any lengths: at
// most one tile in a sequence is then empty.
__device__ __forceinline__ int32_t first_key_tile(const Params& p, int32_t n) {
  if (p.plan.first_block) return p.plan.first_block[n];
  return p.k_axis.seq.cu_seqlens[n] / kKeys + n;
}
__device__ __forceinline__ int32_t count_items(const Params& p) {
  const int32_t batch = p.k_axis.seq.batch;
  return p.heads_kv * (p.k_axis.seq.cu_seqlens ? first_key_tile(p, batch) : batch * p.max_key_tiles);
}

// Which key tile of which head item `t` is: sequences by length, longest first; some heads at once, and their key tiles
// in ascending order, a tile of all of them before the next: under a causal mask more rows see the first keys, and dQ
// is added to in this order (attention_bwd_sm90_reducer.cuh). In a batch of equal lengths heads that are taken at once
// may belong to several sequences.
__device__ __forceinline__ void place_item(const Params& p, int32_t t, volatile Item& item) {
  int32_t sequence = 0, heads_here = p.heads_at_once;
  if (p.k_axis.seq.cu_seqlens) {
    const int32_t tile = t / p.heads_kv;
    for (int32_t end = p.k_axis.seq.batch; end - sequence > 1;) {
      const int32_t middle = (sequence + end) / 2;
      (first_key_tile(p, middle) <= tile ? sequence : end) = middle;
    }
    const int32_t first = first_key_tile(p, sequence), tiles = first_key_tile(p, sequence + 1) - first;
    t -= first * p.heads_kv;
    heads_here = min(heads_here, p.heads_kv);
    const int32_t first_head = t / (heads_here * tiles) * heads_here;
    t -= first_head * tiles;
    heads_here = min(heads_here, p.heads_kv - first_head);
    item.kv_head = first_head + t % heads_here;
  } else {
    const int32_t first_head = t / (heads_here * p.max_key_tiles) * heads_here;
    t -= first_head * p.max_key_tiles;
    heads_here = min(heads_here, p.k_axis.seq.batch * p.heads_kv - first_head);
    const int32_t head = first_head + t % heads_here;
    sequence = head / p.heads_kv;
    item.kv_head = head % p.heads_kv;
  }
  item.first_key = t / heads_here * kKeys;
  item.sequence = p.plan.order ? p.plan.order[sequence] : sequence;
}

// False if the sequence has no such tile. The loader has few registers: what is known goes to shared memory at once and
// is read from there again.
__device__ __forceinline__ bool decode_item(const Params& p, int32_t t, volatile Item& item) {
  place_item(p, t, item);
  {
    const Sequence k = p.k_axis.sequence(item.sequence);
    item.seqlen_k = int32_t(k.length);
    if (item.first_key >= item.seqlen_k) return false;
    item.key_start = int32_t(k.start);
    item.key_record = item.kv_head * p.key_tiles + (int32_t(k.padded_start) + item.first_key) / kKeys;
  }
  {
    const Sequence q = p.out_axis.sequence(item.sequence);
    item.seqlen_q = int32_t(q.length);
    item.row_record = item.kv_head * p.group * p.row_tiles + int32_t(q.padded_start) / kRows;
  }
  item.first_tile = 0;
  item.first_whole = 0;
  item.end_tile = (item.seqlen_q + kRows - 1) / kRows;
  item.end_whole = item.end_tile;
  item.end_before = item.first_key > 0 ? item.end_tile : 0;
  if (p.has_mask) {
    const int32_t end_key = min(item.first_key + kKeys, item.seqlen_k);
    {
      const Range any = visible_rows(p.mask, item.first_key, end_key, item.seqlen_q, item.seqlen_k);
      item.first_tile = int32_t(any.first) / kRows;
      item.end_tile = (int32_t(any.end) + kRows - 1) / kRows;
    }
    {
      // Both bounds grow with the key: all keys are seen from the first row of the last one to the last of the first.
      const Range rows = visible_rows(p.mask, item.first_key, item.first_key + 1, item.seqlen_q, item.seqlen_k);
      item.end_whole = rows.end >= item.seqlen_q ? item.end_tile : int32_t(rows.end) / kRows;
    }
    {
      const Range rows = visible_rows(p.mask, end_key - 1, end_key, item.seqlen_q, item.seqlen_k);
      item.first_whole = (int32_t(rows.first) + kRows - 1) / kRows;
      if (rows.empty()) item.end_whole = 0;
    }
    if (item.first_key > 0) {
      const Range before = visible_rows(p.mask, item.first_key - kKeys, item.first_key, item.seqlen_q, item.seqlen_k);
      item.end_before = (int32_t(before.end) + kRows - 1) / kRows;
    }
  }
  if (item.first_key + kKeys > item.seqlen_k) item.end_whole = 0;
  return true;
}

// The scales that the warpgroups need; the units of what they empty are those of the first record.
template <int kDim>
__device__ __forceinline__ void load_scales(const Params& p, volatile Item& item) {
  const KeyTile& tile = p.key_tile[item.key_record];
  const uint8_t* record = p.rows + int64_t(item.row_record + item.end_tile - 1) * RowRecord::bytes(kDim);
  const RowHeader& header = *reinterpret_cast<const RowHeader*>(record + RowRecord::header(kDim));
  // All on their way before the first is needed.
  const int32_t u = p.head_scale[item.sequence * p.heads_kv + item.kv_head].u();
  const int32_t k_scale = tile.k_scale, v_scale = tile.v_scale, w = header.w, t = header.t;
  item.k_scale = k_scale;
  item.u = u;
  item.dp = u + v_scale;
  item.unit[0] = -w;
  item.unit[1] = -t;
}

// ---- clearing and counting -----------------------------------------------------------------------------------------

// dQ of what an item of the head cleared_heads after this one will need: a share of it for each key tile. That is at
// least two rounds of all SMs ahead, and waits for items before this one only, so that nobody waits for it for ever.
template <int kDim, bool kHalf>
__device__ __forceinline__ void clear_ahead(const Params& p, int32_t head, int32_t key_tile) {
  const int lane = ptx::hidden(int(threadIdx.x)) % 32;  // no register is kept for it
  constexpr int kBytes = kRows * kDim * (kHalf ? 2 : 4);
  if (head >= p.k_axis.seq.batch * p.heads_kv) return;
  int32_t first, count;  // row tiles
  {
    const int32_t length = p.out_axis.length;  // of equal sequences
    const int32_t tiles = (length + kRows - 1) / kRows;
    const int32_t share = (tiles + p.max_key_tiles - 1) / p.max_key_tiles;
    first = min(share * key_tile, tiles);
    count = min(share, tiles - first);
    first +=
        head % p.heads_kv * p.group * p.row_tiles +
        head / p.heads_kv * ((length + int32_t(kSeqAlign) - 1) / int32_t(kSeqAlign) * (int32_t(kSeqAlign) / kRows));
  }
#pragma unroll 1
  for (int32_t g = 0; g < p.group; ++g, first += p.row_tiles) {
    uint2* to = reinterpret_cast<uint2*>(p.dq + int64_t(first) * kBytes) + lane;
#pragma unroll 1
    for (int32_t n = count * (kBytes / 1024); n > 0; --n, to += 128) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[32 * i] = make_uint2(0, 0);
    }
  }
  __syncwarp();
  if (lane == 0) ptx::reduce_add_release(&p.head_scale[head].cleared, 1);
}
// Before anybody adds to it.
__device__ __forceinline__ void wait_for_cleared(const Params& p, int32_t head) {
  if (head < p.cleared_heads) return;
  const int32_t* cleared = &p.head_scale[head].cleared;
  while (ptx::load_relaxed(cleared) < p.max_key_tiles) __nanosleep(64);
  ptx::load_acquire(cleared);
  ptx::fence_proxy_async_global();
}

// Counts key tiles whose part of dQ is in the workspace: those who added it have waited for that when they free the
// item. A warp of its own, which has nothing else on its way, so that the release costs nobody's time.
template <int kDim, bool kHalf, bool kOrdered>
__device__ __forceinline__ void count_items_done(const Params& p) {
  using C = Config<kDim, kHalf>;
#pragma unroll 1
  for (uint32_t items = 0;; ++items) {
    const uint32_t buffer = items & 1, parity = items >> 1 & 1;
    ptx::mbarrier_wait(C::kItemFull + 8 * buffer, parity);
    const volatile Item& item = C::item(buffer);
    if (!item.valid) return;
    const int32_t head = item.sequence * p.heads_kv + item.kv_head, key_tile = item.first_key / kKeys;
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(C::kItemFree + 8 * buffer);
    if (!kOrdered && p.cleared_heads != INT32_MAX) clear_ahead<kDim, kHalf>(p, head + p.cleared_heads, key_tile);
    ptx::mbarrier_wait(C::kItemFree + 8 * buffer, parity);
    if (threadIdx.x % 32 == 0) ptx::reduce_add_release(&p.head_scale[head].done, 1);
  }
}

// ---- loader ---------------------------------------------------------------------------------------------------------

template <int kDim, bool kHalf>
__device__ __forceinline__ void load(const Params& p) {
  using C = Config<kDim, kHalf>;
  constexpr uint32_t kPart = kKeys * kDim;  // K, V or K^T
  uint32_t stage = 0, parity = 1, key_parity = 1, items = 0;
  const int32_t num_items = count_items(p);
  const auto load_keys = [&](uint32_t part, const uint8_t* keys) {
    ptx::mbarrier_wait(C::kKeyFree + 8 * part, key_parity);
    ptx::mbarrier_arrive_expect_tx(C::kKeyFull + 8 * part, kPart);
    ptx::bulk_load(C::kBase + part * kPart, keys + part * kPart, kPart, C::kKeyFull + 8 * part);
  };
#pragma unroll 1
  while (true) {
    ptx::mbarrier_wait(C::kItemFree + 8 * (items & 1), (items >> 1 & 1) ^ 1);
    volatile Item& item = C::item(items & 1);
    // Not earlier: all rows of the item before are on their way, so few of its steps are left.
    const int32_t index = atomicAdd(p.plan.counter, 1);
    if (index >= num_items) {
      item.valid = 0;
      ptx::mbarrier_arrive(C::kItemFull + 8 * (items & 1));
      return;
    }
    if (!decode_item(p, index, item)) continue;
    item.valid = 1;
    int32_t left = item.end_tile - item.first_tile;
    if (left > 0) {
      load_scales<kDim>(p, item);
      wait_for_cleared(p, item.sequence * p.heads_kv + item.kv_head);
    }
    ptx::mbarrier_arrive(C::kItemFull + 8 * (items & 1));
    ++items;
    if (left == 0) continue;
    const uint8_t* keys = p.keys + int64_t(item.key_record) * C::kKeyBytes;
    const uint8_t* rows = p.rows + int64_t(item.row_record + item.end_tile - 1) * C::kRowBytes;
    const int32_t per_head = left;
    // Keys come between the first rows, in the order in which the item before frees what they take: K and V when its
    // last row tile has not been freed yet, K^T after.
    int32_t until_last = min(C::kStages, p.group * left);
    if (until_last == 1) load_keys(0, keys), load_keys(1, keys);
#pragma unroll 1
    for (int32_t g = p.group; g > 0;) {
      ptx::mbarrier_wait(C::kFree + 8 * stage, parity);
      ptx::mbarrier_arrive_expect_tx(C::kFull + 8 * stage, C::kRowBytes);
      ptx::bulk_load(C::kRing + stage * C::kStageBytes, rows, C::kRowBytes, C::kFull + 8 * stage);
      if (++stage == C::kStages) stage = 0, parity ^= 1;
      --until_last;
      if (until_last == 1) load_keys(0, keys), load_keys(1, keys);
      if (until_last == 0) load_keys(2, keys), key_parity ^= 1;
      rows -= C::kRowBytes;
      if (--left == 0) {  // the next head
        --g;
        left = per_head;
        rows += int64_t(p.row_tiles + per_head) * C::kRowBytes;
      }
    }
  }
}

}  // namespace mxflash::bwd_sm90
