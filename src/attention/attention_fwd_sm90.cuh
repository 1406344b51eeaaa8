// What all roles of the forward kernel on Hopper share: its numbers, its arguments, its shared memory
// (attention_fwd_sm90.cu describes the kernel).
#pragma once

#include "attention/attention_split.cuh"
#include "attention/consumer_warp.cuh"
#include "attention/ring.cuh"
#include "attention/row_output.cuh"
#include "mx/operand_image.h"
#include "ptx/descriptors.h"
#include "ptx/mbarrier.cuh"

namespace mxflash::fwd_sm90 {

constexpr int kMaxWarpgroups = 3;
constexpr int kBuffers = 2;  // of queries
constexpr int kItems = 4;    // known ahead: more than kBuffers, so that none waits for a buffer to be looked up
constexpr int kPromoteTiles = 4;

constexpr float kOffset = 6.0f;  // P = 2^kOffset at the reference
constexpr float kLimit = 8.8f;   // 2^8.8 < 448
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kHuge = 0x1p20f;   // of a reference: beside it kOffset would be lost
constexpr float kUnseen = -1e30f;  // reference of a row that has seen no key: finite, so that differences are numbers
// The sum of P is taken with four weights, one for each thread of a quad (even columns of a product with N = 8): 1, 1,
// 1.375, 1.75. Products with more bits lose more to truncation: so what the quotient loses lies in the middle of what
// it would for values of one sign (their losses then cancel) and for values of both (which lose nothing on average).
constexpr uint32_t kWeightCodes = 0x3E3B3838;  // as E4M3
constexpr float kWeightSum = 5.125f;
constexpr int kTinyUnit = 64;     // below it the unit must not meet the quotient of sums first: both may be tiny
constexpr int kMaxUnitDrop = 72;  // binades that the unit of O may fall below the largest one so far

struct Params {
  WorkItems items;
  RowOutput to;
  Partials partials;         // where keys are split
  const uint8_t *q, *k, *v;  // images
  const uint8_t *q_scale, *k_scale, *v_scale;
  ImageShape q_shape, k_shape, v_shape;
  float scale_log2;  // softmax_scale log2(e) > 0
};

struct Item : WorkItem {
  int32_t q_scale[kMaxWarpgroups];  // E8M0 bytes
};

// A block of rows: one, two or three consumer warpgroups, and what is left of an SM for each. A single one has state in
// registers and takes no room for alignment, so that two CTAs share an SM.
template <int kConsumers, int kQueryDim, int kValueDim>
struct Config {
  static constexpr int kWarpgroups = kConsumers, kDim = kQueryDim, kDimV = kValueDim;
  static constexpr int kBlockM = kRows * kWarpgroups, kBlockN = int(kImageTile);
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kConsumerWarps = 4 * kWarpgroups;
  static constexpr int kCtas = kWarpgroups == 1 ? 2 : 1;  // of an SM
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : kWarpgroups == 2 ? 232 : 224;
  static constexpr bool kStateInRegisters = kWarpgroups == 1;
  static constexpr bool kAligned = kWarpgroups == 1;
  static constexpr bool kSplit = kWarpgroups == 1;  // rows may be packed, and keys split
  static constexpr int kStages = kDim + kDimV <= 128 ? 4
                                 : kWarpgroups == 3  ? 2
                                 : kWarpgroups == 2  ? (kDim + kDimV == 256 ? 3 : 4)
                                                     : (kDim + kDimV == 256 ? 2 : 3);
  static constexpr int kQueryBytes = kBlockM * kDim;
  static constexpr int kKeyBytes = kBlockN * kDim;
  static constexpr int kValueBytes = kBlockN * kDimV;
  static constexpr int kAccBytes = kBlockM * kDimV * int(sizeof(float));
  static constexpr ptx::Swizzle kSwizzle = kDim == 128 ? ptx::Swizzle::b128 : ptx::Swizzle::b64;

  // Offsets in shared memory, from an address aligned to 1024.
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kBuffers * kQueryBytes;
  static constexpr int kV = kK + kStages * kKeyBytes;
  static constexpr int kAcc = kV + kStages * kValueBytes;
  static constexpr int kState = kAcc + kAccBytes;  // of promoted rows, 20 bytes a thread
  static constexpr int kWeights = kState + (kStateInRegisters ? 0 : 20 * 128 * kWarpgroups);
  static constexpr int kItemSlots = kWeights + 256;
  static constexpr int kScales = kItemSlots + kItems * 64;  // E8M0 bytes of a stage's keys and values, as int32
  static constexpr int kBarriers = kScales + kStages * 8;
  static constexpr int kEnd = kBarriers + 8 * (2 * kItems + 2 * kBuffers + 4 * kStages);
  static constexpr int kBytes = kEnd + (kAligned ? 0 : 1024);
  static_assert(kCtas * (kBytes + 1024) <= 228 * 1024);
};
static_assert(sizeof(Item) <= 64);

template <class C>
struct Shared {
  uint32_t base;
  __device__ Item& item(int slot) const {
    return *static_cast<Item*>(__cvta_shared_to_generic(base + C::kItemSlots + 64 * slot));
  }
  __device__ uint32_t q(int buffer) const { return base + C::kQ + buffer * C::kQueryBytes; }
  __device__ uint32_t k(int stage) const { return base + C::kK + stage * C::kKeyBytes; }
  __device__ uint32_t v(int stage) const { return base + C::kV + stage * C::kValueBytes; }
  __device__ uint32_t k_scale(int stage) const { return base + C::kScales + 8 * stage; }
  __device__ uint32_t v_scale(int stage) const { return k_scale(stage) + 4; }
  __device__ uint32_t item_known(int slot) const { return base + C::kBarriers + 8 * slot; }
  __device__ uint32_t item_taken(int slot) const { return item_known(kItems + slot); }
  __device__ uint32_t item_full(int buffer) const { return item_known(2 * kItems + buffer); }
  __device__ uint32_t item_free(int buffer) const { return item_full(kBuffers + buffer); }
  __device__ uint32_t k_full(int stage) const { return item_full(2 * kBuffers + stage); }
  __device__ uint32_t v_full(int stage) const { return k_full(C::kStages + stage); }
  __device__ uint32_t k_free(int stage) const { return k_full(2 * C::kStages + stage); }
  __device__ uint32_t v_free(int stage) const { return k_full(3 * C::kStages + stage); }
};

}  // namespace mxflash::fwd_sm90
