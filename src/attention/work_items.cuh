// What persistent attention kernels share of their schedule: work items, where they come from, which key tiles their
// rows see, and rings of buffers.
#pragma once

#include <mxflash/attention.h>

#include "attention/attention_plan.cuh"
#include "attention/mask.h"
#include "mx/scale_layout.h"

namespace mxflash {

// All that a work item follows from.
struct WorkItems {
  Jagged seq_q, seq_k;
  Mask mask;
  int64_t total_q, total_k;
  int32_t num_heads, group, batch, max_blocks;
  int32_t heads_at_once;  // heads whose keys and values fit the L2 cache together
  bool shared_q;
  AttentionPlan plan;  // counter: of items taken

  __device__ int32_t count() const { return batch * num_heads * max_blocks; }
};

// kBlockM query rows of one head of one sequence.
struct WorkItem {
  int32_t valid;  // 0: no more
  int32_t sequence, head;
  int32_t first_row;  // of the block in its sequence
  int32_t seqlen_q, seqlen_k;
  int32_t out_start;              // of the sequence on the axis of out
  int32_t q_padded, k_padded;     // its first rows on the padded axes
  int32_t first_tile, num_tiles;  // key tiles that some row of the block sees
};

// Item `t`, longest first: sequences by length, and in a group of heads blocks from the last to the first (under a
// causal mask later rows see more keys), all heads of the group for each block. Returns whether the sequence has such a
// block. Who calls this has few registers: what is known goes to shared memory at once and is read from there again.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ bool decode_item(const WorkItems& w, int32_t t, volatile WorkItem& item) {
  const int32_t per_group = w.heads_at_once * w.max_blocks;
  const int32_t first_head = t / per_group * w.heads_at_once;
  const int32_t heads_here = min(w.heads_at_once, w.batch * w.num_heads - first_head);
  t %= per_group;
  item.first_row = (w.max_blocks - 1 - t / heads_here) * kBlockM;
  const int32_t index = first_head + t % heads_here;
  item.sequence = w.plan.order ? w.plan.order[index / w.num_heads] : index / w.num_heads;
  item.head = index % w.num_heads;
  {
    const Sequence q = sequence_at(w.total_q, w.seq_q, w.shared_q ? 0 : item.sequence);
    item.seqlen_q = int32_t(q.length);
    item.q_padded = int32_t(q.padded_start);
    item.out_start = w.shared_q ? item.sequence * int32_t(w.total_q) : int32_t(q.start);
  }
  if (item.first_row >= item.seqlen_q) return false;
  {
    const Sequence k = sequence_at(w.total_k, w.seq_k, item.sequence);
    item.seqlen_k = int32_t(k.length);
    item.k_padded = int32_t(k.padded_start);
  }
  const Range keys =
      visible_keys(w.mask, item.first_row, min(item.first_row + kBlockM, item.seqlen_q), item.seqlen_q, item.seqlen_k);
  item.first_tile = int32_t(keys.first) / kBlockN;
  item.num_tiles = keys.empty() ? 0 : (int32_t(keys.end) + kBlockN - 1) / kBlockN - item.first_tile;
  return true;
}

// The key tiles that rows [first_row, end_row) of an item see: [first, end), within those of the item; and of these
// [whole, whole_end) that all rows see whole, but for the first one: there a window's last rows may see their first
// key.
struct RowTiles {
  int first, end, whole, whole_end;
};
template <int kBlockN>
__device__ __forceinline__ RowTiles row_tiles(const Mask& mask, const WorkItem& item, int first_row, int end_row) {
  const int last = item.first_tile + item.num_tiles;
  RowTiles tiles{last, last, last + 1, last};
  if (first_row >= end_row) return tiles;
  const Range any = visible_keys(mask, first_row, end_row, item.seqlen_q, item.seqlen_k);
  const Range head = visible_keys(mask, first_row, first_row + 1, item.seqlen_q, item.seqlen_k);
  const Range tail = visible_keys(mask, end_row - 1, end_row, item.seqlen_q, item.seqlen_k);
  if (!any.empty()) {
    tiles.first = int(any.first / kBlockN);
    tiles.end = int(ceil_div(any.end, kBlockN));
  }
  if (!head.empty() && !tail.empty()) {
    tiles.whole = max(tiles.first, int(ceil_div(tail.first, kBlockN))) + 1;
    tiles.whole_end = int(head.end / kBlockN);
  }
  return tiles;
}

// A position in a ring of kCount, a power of two: index and the parity of its present phase.
template <int kCount>
struct Ring {
  static_assert((kCount & (kCount - 1)) == 0);
  uint32_t steps = 0;
  __device__ int index() const { return int(steps % kCount); }
  __device__ uint32_t parity() const { return steps / kCount & 1; }
  __device__ void next() { ++steps; }
};

}  // namespace mxflash
