// What a persistent attention kernel finds on the card when it starts.
#pragma once

#include <mxflash/types.h>

#include "runtime/arena.h"
#include "runtime/status.h"

namespace mxflash {

// Larger batches are taken in their own order: with so many sequences the card is full until close to the end anyway.
inline constexpr int32_t kMaxOrderedBatch = 4096;

struct AttentionPlan {
  int32_t* counter = nullptr;  // becomes 0
  int32_t* order = nullptr;    // [batch], null for equal lengths: becomes the sequences, longest first
  // [batch + 1], null unless row blocks are to be counted: becomes the blocks of sequences before the n-th in that
  // order. max_seqlen may then be as loose as the caller likes.
  int32_t* first_block = nullptr;

  static AttentionPlan of(Arena& arena, const Jagged& seq_q, const Jagged& seq_k) {
    AttentionPlan plan{.counter = arena.take<int32_t>(1)};
    if (!seq_k.cu_seqlens || seq_k.batch > kMaxOrderedBatch) return plan;
    plan.order = arena.take<int32_t>(seq_k.batch);
    if (seq_q.cu_seqlens) plan.first_block = arena.take<int32_t>(seq_k.batch + 1);
    return plan;
  }
};

// How a sequence's queries divide into blocks of rows.
struct RowBlocks {
  const int32_t* cu_seqlens;  // of queries, [batch + 1]
  int32_t rows_per_token;
  int32_t block_rows;
};

Status write_attention_plan(const AttentionPlan& plan, const Jagged& seq_k, const RowBlocks& blocks, Stream stream);

}  // namespace mxflash
