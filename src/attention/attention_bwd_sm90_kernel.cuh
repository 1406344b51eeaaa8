// What all roles of the backward kernel on Hopper share: its arguments, its work items, its shared memory
// (attention_bwd_sm90.cu describes the kernel).
#pragma once

#include "attention/attention_bwd_sm90.cuh"
#include "attention/mask.h"
#include "attention/mx_piece.cuh"
#include "attention/rotate_rows.cuh"
#include "ptx/descriptors.h"
#include "ptx/mbarrier.cuh"

namespace mxflash::bwd_sm90 {

constexpr int kWarpgroups = 2;
constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr int kWarps = 4 * kWarpgroups;
constexpr int kScratchBytes = 2048;   // of a warp, for results on their way out
constexpr int kReservedBytes = 1024;  // of shared memory, which CUDA keeps for itself
constexpr float kLog2e = 1.44269504088896341f;

// Where dk or dv goes.
struct Gradient {
  Tensor out;  // [total_k, num_heads_kv, dim]
  int32_t dim;
  int32_t rotation;  // group of channels that are rotated back; 1: none
  float factor;      // of the sum
  bool wide;         // 2-byte elements in rows aligned to 16 bytes
  RotationSigns signs;
};

struct Params {
  const uint8_t *rows, *keys;  // records
  const KeyTile* key_tile;
  HeadScale* head_scale;  // `done` is counted up
  uint8_t* dq;
  int32_t* dq_turn;
  float4* sums;
  Gradient gradient[2];  // dv, dk
  TokenAxis out_axis, k_axis;
  Mask mask;
  AttentionPlan plan;  // counter: of items taken
  int32_t heads_kv, group;
  int32_t row_tiles, key_tiles;  // of a head
  int32_t max_key_tiles;         // of a sequence
  int32_t cleared_heads;         // see Call
  int32_t heads_at_once;         // key heads whose key tiles are taken side by side
  bool has_mask;
  float scale_log2;  // softmax_scale log2(e) > 0
};

// One work item, as the loader hands it to the other roles.
struct Item {
  int32_t valid;  // 0: no more
  int32_t sequence, kv_head;
  int32_t first_key;  // in its sequence
  int32_t seqlen_q, seqlen_k;
  int32_t key_start;               // of the sequence, in dk and dv
  int32_t key_record;              // of all heads
  int32_t row_record;              // the first one of the sequence, in the group's first head
  int32_t first_tile, end_tile;    // row tiles that see one of the keys
  int32_t first_whole, end_whole;  // of these, the ones whose every row sees all keys
  int32_t end_before;              // end_tile of the key tile before: from here on this item is the first to write dQ
  int32_t k_scale;                 // exponents: of K,
  int32_t u, dp, unit[2];          // of delta's and of dP's factor; -w and -t of the first row record
};
constexpr int kItemBytes = 80;
static_assert(sizeof(Item) <= kItemBytes);

template <int kDim, bool kHalf>
struct Config {
  static constexpr int kStages = kDim == 128 ? 3 : 4;
  static constexpr int kRowBytes = RowRecord::bytes(kDim);
  static constexpr int kStageBytes = (kRowBytes + 1023) / 1024 * 1024;
  static constexpr int kKeyBytes = KeyRecord::bytes(kDim);
  static constexpr int kDsBytes = kRows * kKeys;
  static constexpr int kDqBytes = kRows * kDim / kWarpgroups * (kHalf ? 2 : 4);  // of a warpgroup
  static constexpr int kDqSlots = kHalf ? 2 : 1;                                 // of a warpgroup
  static constexpr ptx::Swizzle kSwizzle = kDim == 128 ? ptx::Swizzle::b128 : ptx::Swizzle::b64;

  // Shared memory by address: constants, so that descriptors are, too.
  static constexpr uint32_t kBase = kReservedBytes;
  static constexpr uint32_t kRing = kBase + kKeyBytes;
  static constexpr uint32_t kDs = kRing + kStages * kStageBytes;
  static constexpr uint32_t kDq = kDs + 2 * kDsBytes;
  static constexpr uint32_t kScratch = kDq + kWarpgroups * kDqSlots * kDqBytes;
  static constexpr uint32_t kKeyFull = kScratch + kWarps * kScratchBytes;  // K, V, K^T
  static constexpr uint32_t kKeyFree = kKeyFull + 24;
  static constexpr uint32_t kDsFull = kKeyFree + 24;
  static constexpr uint32_t kDqFull = kDsFull + 16;
  static constexpr uint32_t kDqFree = kDqFull + 8 * kWarpgroups * kDqSlots;
  static constexpr uint32_t kFull = kDqFree + 8 * kWarpgroups * kDqSlots;
  static constexpr uint32_t kFree = kFull + 8 * kStages;
  static constexpr uint32_t kItemFull = kFree + 8 * kStages;
  static constexpr uint32_t kItemFree = kItemFull + 16;
  static constexpr uint32_t kItems = (kItemFree + 16 + 15) / 16 * 16;
  static constexpr uint32_t kVisible = kItems + 2 * kItemBytes;  // 16 bytes a thread
  static constexpr uint32_t kEnd = kVisible + 16 * 128 * kWarpgroups;
  static constexpr int kBytes = int(kEnd - kBase);
  static_assert(kEnd <= 228 * 1024);

  // Where dQ of step `step`, counted over all items, passes through; and the parity of its phase.
  __device__ static uint32_t dq_slot(uint32_t warpgroup, uint32_t step) {
    return kDqSlots * warpgroup + step % kDqSlots;
  }
  __device__ static uint32_t dq_parity(uint32_t step) { return step / kDqSlots & 1; }
  __device__ static Item& item(uint32_t buffer) {
    return *static_cast<Item*>(__cvta_shared_to_generic(kItems + kItemBytes * buffer));
  }
};

// The same in all threads of a warp, and known to be.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

}  // namespace mxflash::bwd_sm90
