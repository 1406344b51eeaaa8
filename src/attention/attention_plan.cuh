// What a persistent attention kernel finds on the card when it starts.
#pragma once

#include <mxflash/types.h>

#include "runtime/status.h"

namespace mxflash {

// Larger batches are taken in their own order: with so many sequences the card is full until close to the end anyway.
inline constexpr int32_t kMaxOrderedBatch = 4096;

struct AttentionPlan {
  int32_t* counter = nullptr;  // becomes 0
  int32_t* order = nullptr;    // [batch], null for equal lengths: becomes the sequences, longest first
};
Status write_attention_plan(const AttentionPlan& plan, const Jagged& seq_k, Stream stream);

}  // namespace mxflash
