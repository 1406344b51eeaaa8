// Where persistent attention kernels get their work: how a call is cut into items, which block of rows of which head an
// item is, and which key tiles its rows see.
//
// A kernel's Config C says what an item is: kBlockM rows, key tiles of kBlockN, and kSplit: whether rows of a group of
// heads may be packed and keys split (key_split.h).
#pragma once

#include "attention/attention.h"
#include "attention/attention_plan.cuh"
#include "attention/key_split.h"

namespace mxflash {

// All that work items follow from.
struct WorkItems {
  Jagged seq_q, seq_k;
  Mask mask;
  int64_t total_q, total_k;
  int32_t num_heads, group;  // of blocks: query heads, or groups of `pack` of them
  int32_t batch, max_blocks;
  int32_t heads_at_once;  // heads whose keys and values fit the L2 cache together
  int32_t pack;           // query rows of a token: heads of a group that share a block, or 1
  int32_t splits;         // of a block's keys
  bool shared_q;
  bool has_mask;
  bool ascending = false;  // blocks of a sequence from the first on: where this one meets most keys
  AttentionPlan plan;      // counter: of items taken

  // head_bytes: of a key and its value.
  static WorkItems of(const AttentionFwd& a, const AttentionShape& s, const AttentionPlan& plan, int64_t head_bytes,
                      int64_t block_rows, int32_t pack = 1, int32_t splits = 1) {
    constexpr int64_t kCache = 32 << 20;
    const int64_t num_heads = s.num_heads_q / pack, group = s.group / pack;
    const int64_t fit = kCache / std::max<int64_t>(s.max_seqlen_k * head_bytes, 1);
    return {.seq_q = a.seq_q,
            .seq_k = a.seq_k,
            .mask = a.mask,
            .total_q = s.total_q,
            .total_k = s.total_k,
            .num_heads = int32_t(num_heads),
            .group = int32_t(group),
            .batch = int32_t(s.batch),
            .max_blocks = int32_t(ceil_div(s.max_seqlen_q * pack, block_rows)),
            .heads_at_once = int32_t(std::min(s.batch * num_heads, std::max<int64_t>(fit, 1) * group)),
            .pack = pack,
            .splits = splits,
            .shared_q = s.shared_q,
            .has_mask = a.mask.causal || a.mask.window_left >= 0 || a.mask.window_right >= 0,
            .plan = plan};
  }
  // Not fewer than there are, whatever the lengths; at least 1.
  int64_t bound(int64_t block_rows) const {
    const int64_t blocks =
        seq_q.cu_seqlens ? ceil_div(total_q * pack, block_rows) + batch : int64_t(batch) * max_blocks;
    return std::max<int64_t>(blocks * num_heads * splits, 1);
  }
  Status write_plan(int64_t block_rows, Stream stream) const {
    return write_attention_plan(plan, seq_k, {seq_q.cu_seqlens, pack, int32_t(block_rows)}, stream);
  }
};

// What items are blocks of: tokens of sequences, for each of some heads.
struct BlockAxis {
  const char* what;  // for messages
  int64_t heads, total, max_seqlen;
  Jagged seq;
  int64_t block;
};

// That positions, heads and items fit the integers that kernels count them in.
inline Status check_work_items(const char* op, const char* backend, const AttentionShape& s, const BlockAxis& axis) {
  const int64_t tokens =
      std::max({s.total_q, s.total_k, s.total_out, padded_token_count(s.total_q, s.seq_q),
                padded_token_count(s.total_k, s.seq_k), padded_token_count(s.total_out, s.seq_out())});
  if (tokens >= int64_t(1) << 31) {
    return unsupported("%s: %s: tokens must be fewer than 2^31, got %lld", op, backend, static_cast<long long>(tokens));
  }
  if (s.num_heads_q > 65535) {
    return unsupported("%s: %s: num_heads_q must be at most 65535, got %lld", op, backend,
                       static_cast<long long>(s.num_heads_q));
  }
  double blocks = double(s.batch) * double(ceil_div(axis.max_seqlen, axis.block));
  if (axis.seq.cu_seqlens) blocks = std::min(blocks, double(axis.total) / double(axis.block) + double(s.batch));
  const double items = double(axis.heads) * blocks;
  if (items < double(1 << 30)) return {};
  return unsupported("%s: %s: blocks of %s must be fewer than 2^30, got %g", op, backend, axis.what, items);
}

// One of them, as the scheduler hands it to the loader and the consumers.
struct WorkItem {
  int32_t valid;  // 0: no more
  int32_t sequence, head;
  int32_t first_row;  // of the block in its sequence
  int32_t seqlen_q, seqlen_k;
  int32_t out_start;              // of the sequence on the axis of out
  int32_t q_padded, k_padded;     // its first rows on the padded axes
  int32_t first_tile, num_tiles;  // key tiles that some row of the block sees
  int32_t split;                  // of the block's key tiles
};

// Keys that rows [first, end) of a sequence see.
template <class C>
__device__ __forceinline__ Range row_keys(const WorkItems& w, int first, int end, int seqlen_q, int seqlen_k) {
  if constexpr (C::kSplit) return visible_keys_of_rows(w.mask, w.pack, first, end, seqlen_q, seqlen_k);
  return visible_keys(w.mask, first, end, seqlen_q, seqlen_k);
}

// Blocks of rows of the sequences before the n-th of the plan. Without a list, a bound that leaves room for any
// lengths: at most one block in a sequence is then empty.
template <class C>
__device__ __forceinline__ int32_t first_block(const WorkItems& w, int32_t n) {
  if (w.plan.first_block) return w.plan.first_block[n];
  return int32_t((int64_t(w.seq_q.cu_seqlens[n]) * (C::kSplit ? w.pack : 1) + int64_t(C::kBlockM) * n) / C::kBlockM);
}

template <class C>
__device__ __forceinline__ int32_t count_items(const WorkItems& w) {
  const int32_t splits = C::kSplit ? w.splits : 1;
  return splits * w.num_heads * (w.seq_q.cu_seqlens ? first_block<C>(w, w.batch) : w.batch * w.max_blocks);
}

// Which block of which head item `t` is, longest first: sequences by length, and blocks from the last to the first
// (under a causal mask later rows see more keys; `ascending`: the other way), all heads of a group for each block. In a
// batch of equal lengths a group may reach over several sequences.
template <class C, class Item>
__device__ __forceinline__ void place_item(const WorkItems& w, int32_t t, Item& item) {
  int32_t sequence = 0, head = 0, blocks = w.max_blocks, heads_here = w.heads_at_once;
  if (w.seq_q.cu_seqlens) {
    const int32_t block = t / w.num_heads;
    for (int32_t end = w.batch; end - sequence > 1;) {
      const int32_t middle = (sequence + end) / 2;
      (first_block<C>(w, middle) <= block ? sequence : end) = middle;
    }
    const int32_t first = first_block<C>(w, sequence);
    blocks = first_block<C>(w, sequence + 1) - first;
    t -= first * w.num_heads;
    heads_here = min(heads_here, w.num_heads);
    const int32_t first_head = t / (heads_here * blocks) * heads_here;
    t -= first_head * blocks;
    heads_here = min(heads_here, w.num_heads - first_head);
    head = first_head + t % heads_here;
  } else {
    const int32_t first_index = t / (heads_here * blocks) * heads_here;
    t -= first_index * blocks;
    heads_here = min(heads_here, w.batch * w.num_heads - first_index);
    const int32_t index = first_index + t % heads_here;
    sequence = index / w.num_heads;
    head = index % w.num_heads;
  }
  const int32_t block = t / heads_here;
  item.first_row = (w.ascending ? block : blocks - 1 - block) * C::kBlockM;
  item.sequence = w.plan.order ? w.plan.order[sequence] : sequence;
  item.head = head;
}

// Returns whether there is such a block. The scheduler has few registers: what is known goes to shared memory at once
// and is read from there again.
template <class C>
__device__ __forceinline__ bool decode_item(const WorkItems& w, int32_t t, volatile WorkItem& item) {
  if constexpr (C::kSplit) {
    item.split = t % w.splits;
    t /= w.splits;
  }
  place_item<C>(w, t, item);
  {
    const int32_t pack = C::kSplit ? w.pack : 1, b = w.shared_q ? 0 : item.sequence;
    const Sequence q = C::kSplit ? packed_sequence(w.total_q, w.seq_q, pack, b) : sequence_at(w.total_q, w.seq_q, b);
    item.seqlen_q = int32_t(q.length);
    item.q_padded = int32_t(q.padded_start);
    item.out_start = w.shared_q ? item.sequence * int32_t(w.total_q) : int32_t(q.start) / pack;
  }
  if (item.first_row >= item.seqlen_q) return false;
  {
    const Sequence k = sequence_at(w.total_k, w.seq_k, item.sequence);
    item.seqlen_k = int32_t(k.length);
    item.k_padded = int32_t(k.padded_start);
  }
  const Range keys =
      row_keys<C>(w, item.first_row, min(item.first_row + C::kBlockM, item.seqlen_q), item.seqlen_q, item.seqlen_k);
  item.first_tile = int32_t(keys.first) / C::kBlockN;
  item.num_tiles = keys.empty() ? 0 : (int32_t(keys.end) + C::kBlockN - 1) / C::kBlockN - item.first_tile;
  if constexpr (C::kSplit) {
    const TileRange range = split_range({item.first_tile, item.num_tiles}, w.splits, item.split);
    item.first_tile = range.first;
    item.num_tiles = range.count;
    return range.count > 0 || item.split == 0;
  }
  return true;
}

// The next item of the grid, if there is one: what one CTA has taken, no other can. num_items: count_items, kept.
template <class C>
__device__ __forceinline__ bool take_item(const WorkItems& w, int32_t num_items, volatile WorkItem& item) {
  int32_t next;
  bool found;
  do {
    next = atomicAdd(w.plan.counter, 1);
    found = next < num_items && decode_item<C>(w, next, item);
  } while (next < num_items && !found);
  item.valid = found;
  return found;
}

// The key tiles that rows [first_row, end_row) of an item see: [first, end), within those of the item; and of these
// [whole, whole_end) that all rows see whole, but for the first one: there a window's last rows may see their first
// key.
struct RowTiles {
  int first, end, whole, whole_end;
};
template <class C>
__device__ __forceinline__ RowTiles row_tiles(const WorkItems& w, const WorkItem& item, int first_row, int end_row) {
  const int last = item.first_tile + item.num_tiles;
  RowTiles tiles{last, last, last + 1, last};
  if (first_row < end_row && !w.has_mask) {
    tiles.first = item.first_tile;
    tiles.whole = tiles.first + 1;
    tiles.whole_end = item.seqlen_k / C::kBlockN;
  } else if (first_row < end_row) {
    const Range any = row_keys<C>(w, first_row, end_row, item.seqlen_q, item.seqlen_k);
    const Range head = row_keys<C>(w, first_row, first_row + 1, item.seqlen_q, item.seqlen_k);
    const Range tail = row_keys<C>(w, end_row - 1, end_row, item.seqlen_q, item.seqlen_k);
    if (!any.empty()) {
      tiles.first = int(any.first / C::kBlockN);
      tiles.end = int(ceil_div(any.end, C::kBlockN));
    }
    if constexpr (C::kSplit) tiles.first = item.first_tile, tiles.end = last;  // its only rows
    if (!head.empty() && !tail.empty()) {
      tiles.whole = max(tiles.first, int(ceil_div(tail.first, C::kBlockN))) + 1;
      tiles.whole_end = int(head.end / C::kBlockN);
    }
  }
  return tiles;
}

}  // namespace mxflash
