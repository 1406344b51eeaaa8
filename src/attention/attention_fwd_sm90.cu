// Attention forward on Hopper (sm_90a): FP8 wgmma on operand images. docs/hopper.md tells the why, with measurements.
//
//   s = softmax_scale log2(e) q.k      P = E4M3(2^(s - m + kOffset))      out = sum P v / sum P      lse = ln sum 2^s
//
// over key tiles in ascending order, m a reference that is raised only when a score exceeds it by more than
// kLimit - kOffset binades, so P <= 448. lse is from the unrounded P in fp32. Operands have one power of two for 64
// query rows or 128 keys (mx/operand_image.h), which joins softmax_scale in the one FMA before exp2.
//
// Accumulation. FP8 wgmma keeps about 14 bits of a running sum and truncates, a bias that grows with every step; so out
// and sum P stay in tensor cores for kPromoteTiles key tiles only and are then added, in fp32, to a copy in shared
// memory. Both lose alike, which cancels in their quotient.
//
// CTA: persistent; a work item is kBlockM query rows of one head of one sequence.
//   scheduler    a thread of warpgroup 0: takes items from a counter, loads their query rows
//   loader       another: loads key and value tiles (bulk copies of images: no tensor maps)
//   consumer w   warpgroups 1..3: rows 64 w .. of the item, S and O in registers
// Per key tile a consumer does S = Q K^T (SS), waits, tests the maximum, and then, 32 keys at a time, exponentials and
// O += P V (RS): three quarters of P V run under the warpgroup's own exponentials, the rest under those of the others.
// The accumulators of Q K^T are, packed, A fragments of P V: value images permute tokens to that end.
//
// Barriers (arrivals per phase; s is a stage, b a query buffer):
//   item_full[b]            1 + bytes     item and its query rows are there      scheduler -> loader, consumers
//   item_free[b]            1 + 12 warps  nobody reads them any more             loader, consumers -> scheduler
//   k_full[s], v_full[s]    1 + bytes     a tile and the scales are there        loader -> consumers
//   k_free[s], v_free[s]    12 warps      nobody reads it any more               consumers -> loader
// Shared memory (head_dim 128, 128): Q 2 x 24 KiB, K and V kStages x 32 KiB, promoted O 96 KiB and sums: 217 KiB.
// Registers: 160 for consumers (S 64, O 64), 32 for the others.
#include <cfloat>

#include "attention/accumulators.cuh"
#include "attention/attention.h"
#include "attention/attention_plan.cuh"
#include "attention/mask.h"
#include "attention/operand_image.cuh"
#include "mx/e8m0.h"
#include "mx/operand_image.h"
#include "ptx/bulk_copy.cuh"
#include "ptx/convert.cuh"
#include "ptx/descriptors.h"
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "runtime/check.h"
#include "runtime/cuda_backend.h"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

constexpr int kWarpgroups = 3;  // consumers
constexpr int kRows = 64;       // of a warpgroup
constexpr int kBlockM = kRows * kWarpgroups;
constexpr int kBlockN = int(kImageTile);
constexpr int kBuffers = 2;  // of queries
constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr int kConsumerWarps = 4 * kWarpgroups;
constexpr int kPromoteTiles = 4;

constexpr float kOffset = 6.0f;  // P = 2^kOffset at the reference
constexpr float kLimit = 8.8f;   // 2^8.8 < 448
constexpr float kLn2 = 0.69314718055994531f;
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
  const uint8_t *q, *k, *v;  // images
  const uint8_t *q_scale, *k_scale, *v_scale;
  ImageShape q_shape, k_shape, v_shape;
  Tensor out, lse, row_exponent, v_mean;
  Jagged seq_q, seq_k;
  Mask mask;
  int64_t total_q, total_k, total_out;
  int32_t num_heads, group, batch, max_blocks, head_dim_v;
  int32_t heads_at_once;  // heads whose keys and values fit the L2 cache together
  bool shared_q;
  bool has_mask;
  bool wide_stores;    // out is of 2-byte elements, and its rows are aligned to 16 bytes
  float scale_log2;    // softmax_scale log2(e) > 0
  AttentionPlan plan;  // counter: of items taken
};

// One work item, as the scheduler hands it to the loader and the consumers.
struct Item {
  int32_t valid;  // 0: no more
  int32_t sequence, head;
  int32_t first_row;  // of the block in its sequence
  int32_t seqlen_q, seqlen_k;
  int32_t out_start;              // of the sequence on the axis of out
  int32_t q_padded, k_padded;     // its first rows in the images
  int32_t first_tile, num_tiles;  // key tiles that some row of the block sees
  int32_t q_scale[kWarpgroups];   // E8M0 bytes
};

template <int kDim, int kDimV>
struct Config {
  static constexpr int kStages = kDim + kDimV <= 128 ? 4 : 2;
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
  static constexpr int kWeights = kState + 20 * 128 * kWarpgroups;
  static constexpr int kItems = kWeights + 256;
  static constexpr int kScales = kItems + kBuffers * 64;  // E8M0 bytes of a stage's keys and values, as int32
  static constexpr int kBarriers = kScales + kStages * 8;
  static constexpr int kEnd = kBarriers + 8 * (2 * kBuffers + 4 * kStages);
  static constexpr int kBytes = kEnd + 1024;  // for the alignment
  static_assert(kBytes <= 227 * 1024);
};
static_assert(sizeof(Item) <= 64);

template <class C>
struct Shared {
  uint32_t base;
  __device__ Item& item(int buffer) const {
    return *static_cast<Item*>(__cvta_shared_to_generic(base + C::kItems + 64 * buffer));
  }
  __device__ uint32_t q(int buffer) const { return base + C::kQ + buffer * C::kQueryBytes; }
  __device__ uint32_t k(int stage) const { return base + C::kK + stage * C::kKeyBytes; }
  __device__ uint32_t v(int stage) const { return base + C::kV + stage * C::kValueBytes; }
  __device__ uint32_t k_scale(int stage) const { return base + C::kScales + 8 * stage; }
  __device__ uint32_t v_scale(int stage) const { return k_scale(stage) + 4; }
  __device__ uint32_t item_full(int buffer) const { return base + C::kBarriers + 8 * buffer; }
  __device__ uint32_t item_free(int buffer) const { return item_full(kBuffers + buffer); }
  __device__ uint32_t k_full(int stage) const { return item_full(2 * kBuffers + stage); }
  __device__ uint32_t v_full(int stage) const { return k_full(C::kStages + stage); }
  __device__ uint32_t k_free(int stage) const { return k_full(2 * C::kStages + stage); }
  __device__ uint32_t v_free(int stage) const { return k_full(3 * C::kStages + stage); }
};

// A position in a ring of kCount, a power of two: index and the parity of its present phase.
template <int kCount>
struct Ring {
  static_assert((kCount & (kCount - 1)) == 0);
  uint32_t steps = 0;
  __device__ int index() const { return int(steps % kCount); }
  __device__ uint32_t parity() const { return steps / kCount & 1; }
  __device__ void next() { ++steps; }
};

// ---- work items ---------------------------------------------------------------------------------------------------

// Item `t`, longest first: sequences by length, and in a group of heads blocks from the last to the first (under a
// causal mask later rows see more keys), all heads of the group for each block. Returns whether the sequence has such a
// block. The scheduler has few registers: what is known goes to shared memory at once and is read from there again.
__device__ __forceinline__ bool decode_item(const Params& p, int32_t t, volatile Item& item) {
  const int32_t per_group = p.heads_at_once * p.max_blocks;
  const int32_t first_head = t / per_group * p.heads_at_once;
  const int32_t heads_here = min(p.heads_at_once, p.batch * p.num_heads - first_head);
  t %= per_group;
  item.first_row = (p.max_blocks - 1 - t / heads_here) * kBlockM;
  const int32_t index = first_head + t % heads_here;
  item.sequence = p.plan.order ? p.plan.order[index / p.num_heads] : index / p.num_heads;
  item.head = index % p.num_heads;
  {
    const Sequence q = sequence_at(p.total_q, p.seq_q, p.shared_q ? 0 : item.sequence);
    item.seqlen_q = int32_t(q.length);
    item.q_padded = int32_t(q.padded_start);
    item.out_start = p.shared_q ? item.sequence * int32_t(p.total_q) : int32_t(q.start);
  }
  if (item.first_row >= item.seqlen_q) return false;
  {
    const Sequence k = sequence_at(p.total_k, p.seq_k, item.sequence);
    item.seqlen_k = int32_t(k.length);
    item.k_padded = int32_t(k.padded_start);
  }
  const Range keys =
      visible_keys(p.mask, item.first_row, min(item.first_row + kBlockM, item.seqlen_q), item.seqlen_q, item.seqlen_k);
  item.first_tile = int32_t(keys.first) / kBlockN;
  item.num_tiles = keys.empty() ? 0 : (int32_t(keys.end) + kBlockN - 1) / kBlockN - item.first_tile;
  return true;
}

// ---- scheduler ------------------------------------------------------------------------------------------------------

// Takes items, one ahead of the consumers, and loads their query rows.
template <class C, int kDim>
__device__ __forceinline__ void schedule(const Params& p, const Shared<C> shared) {
  const int32_t num_items = p.batch * p.num_heads * p.max_blocks;
  Ring<kBuffers> buffer;
  int32_t next = atomicAdd(p.plan.counter, 1);
#pragma unroll 1
  for (bool found = true; found; buffer.next()) {
    ptx::mbarrier_wait(shared.item_free(buffer.index()), buffer.parity() ^ 1);
    volatile Item& item = shared.item(buffer.index());
    found = false;
    while (next < num_items && !found) {
      found = decode_item(p, next, item);
      next = atomicAdd(p.plan.counter, 1);
    }
    item.valid = found;
    if (!found) {
      ptx::mbarrier_arrive(shared.item_full(buffer.index()));
      return;
    }
    // A block may reach beyond the sequence's padded rows: those warpgroups have no rows.
    const int32_t rows = min(kBlockM, int32_t(round_up(item.seqlen_q, kRows)) - item.first_row);
    const int64_t row = int64_t(item.head) * p.q_shape.tokens + item.q_padded + item.first_row;
    for (int32_t w = 0; w * kRows < rows; ++w) item.q_scale[w] = p.q_scale[row / kRows + w];
    ptx::mbarrier_arrive_expect_tx(shared.item_full(buffer.index()), uint32_t(rows * kDim));
    ptx::bulk_load(shared.q(buffer.index()), p.q + row * kDim, uint32_t(rows * kDim), shared.item_full(buffer.index()));
  }
}

// ---- loader ---------------------------------------------------------------------------------------------------------

// Loads the key and value tiles of item after item.
template <class C>
__device__ __forceinline__ void load_tiles(const Params& p, const Shared<C> shared) {
  Ring<kBuffers> buffer;
  Ring<C::kStages> stage;
  while (true) {
    ptx::mbarrier_wait(shared.item_full(buffer.index()), buffer.parity());
    const volatile Item& item = shared.item(buffer.index());
    if (!item.valid) return;
    // Tiles of keys and of values count alike, from the image's first: one index for payloads and scales.
    int32_t tile = (item.head / p.group) * int32_t(p.k_shape.scale_tiles()) + item.k_padded / kBlockN + item.first_tile;
    const int32_t end = tile + item.num_tiles;
    ptx::mbarrier_arrive(shared.item_free(buffer.index()));
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

// ---- consumer -------------------------------------------------------------------------------------------------------

// What a thread keeps of its two rows, r and r + 8 of its warp.
struct RowState {
  float reference[2] = {kUnseen, kUnseen};  // m
  float top[2] = {kOffset, kOffset};        // largest exponent so far, this thread's keys: s - m + kOffset
  float sum[2] = {0, 0};                    // of unrounded P, this thread's keys
};

// 2^(from - to), 0 below fp32's normal numbers: takes a value from one unit to another.
__device__ __forceinline__ float unit_ratio(int from, int to) {
  return __int_as_float(min(max(from - to + kE8m0Bias, 0), 254) << 23);
}

// 2^e as the factor of one FMA; e is clamped to where it, and scores times it, stay normal and finite.
__device__ __forceinline__ float score_scale(float scale_log2, int q_scale, int k_scale) {
  const int e = min(max(q_scale + k_scale - 2 * kE8m0Bias, -126), 90);
  return fmaxf(scale_log2 * __int_as_float((e + 127) << 23), FLT_MIN);
}

template <int kCount>
__device__ __forceinline__ void scale_rows(float (&x)[kCount], float f0, float f1) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) x[j] *= j & 2 ? f1 : f0;
}

template <class C, int kDim, int kDimV>
struct Consumer {
  static constexpr int kScores = kBlockN / 2;  // registers of S
  static constexpr int kAcc = kDimV / 2;       // registers of O

  const Params& p;
  const Shared<C> shared;
  const int warpgroup, warp;  // warp within the warpgroup

  float s[kScores];
  float o[kAcc];
  float rounded[4];  // [2 r]: sum of E4M3 P times the weight of the thread's column, in tensor cores like O
  RowState row;
  int unit, max_unit;  // O is in units of 2^(unit - 127)

  __device__ uint32_t acc_address(int piece) const {
    return shared.base + C::kAcc + warpgroup * (C::kAccBytes / kWarpgroups) + piece * 2048 +
           (warp * 32 + ptx::lane_id()) * 16;
  }
  __device__ uint32_t state_address() const {
    return shared.base + C::kState + 16 * (warpgroup * 128 + warp * 32 + ptx::lane_id());
  }
  __device__ uint32_t unit_address() const {
    return shared.base + C::kState + 16 * 128 * kWarpgroups + 4 * (warpgroup * 128 + warp * 32 + ptx::lane_id());
  }
  // For the whole warp: what its threads read before, they have read.
  __device__ void release(uint32_t bar) const {
    __syncwarp();
    if (ptx::elect_one()) ptx::mbarrier_arrive(bar);
  }

  // This thread's row `r`, in its sequence.
  __device__ __forceinline__ int row_index(const Item& item, int r) const {
    return item.first_row + warpgroup * kRows + warp * 16 + ptx::lane_id() / 4 + 8 * r;
  }

  // S -> exponents where some row does not see all keys, or may not have seen any before: masks, and raises the
  // reference to the exact maximum.
  __device__ __forceinline__ void exponents_exact(const Item& item, int first_key, bool masked, float c);

  // Of some row of the warp. Beside it kOffset would be lost: scores must meet the reference alone first.
  __device__ __forceinline__ bool huge_reference() const {
    return __any_sync(~0u, fmaxf(fabsf(row.reference[0]), fabsf(row.reference[1])) > kHuge);
  }

  __device__ __forceinline__ void exponents(float c, int v_unit) {
    const float shift[2] = {kOffset - row.reference[0], kOffset - row.reference[1]};
    // As signed integers, positive floats compare like floats, and a negative one never beats a positive one.
    int most[2][2] = {};
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[4 * j + e] = fmaf(s[4 * j + e], c, shift[e >> 1]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        most[r][j & 1] =
            ptx::max3(most[r][j & 1], __float_as_int(s[4 * j + 2 * r]), __float_as_int(s[4 * j + 2 * r + 1]));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r][0] = max(most[r][0], most[r][1]);
      row.top[r] = __int_as_float(max(__float_as_int(row.top[r]), most[r][0]));
    }
    const bool high = max(most[0][0], most[1][0]) > __float_as_int(kLimit);
    if (__any_sync(~0u, high || v_unit != unit)) raise(__int_as_float(most[0][0]), __int_as_float(most[1][0]), v_unit);
  }

  // Raises references so that exponents are at most kOffset again, and moves O to a new unit.
  __device__ __forceinline__ void raise(float most0, float most1, int v_unit) {
    const float to_unit = change_unit(v_unit);
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float step = fmaxf(quad_max(r ? most1 : most0) - kOffset, 0.0f);
      row.reference[r] += step;
      row.top[r] -= step;
      factor[r] = ptx::exp2_approx(-step);
      row.sum[r] *= factor[r];
      rounded[2 * r] *= factor[r];
#pragma unroll
      for (int j = 0; j < kScores; ++j) {
        if ((j >> 1 & 1) == r) s[j] -= step;
      }
    }
    scale_rows(o, factor[0] * to_unit, factor[1] * to_unit);
  }

  // Returns the factor from the old unit of O to the new one.
  __device__ __forceinline__ float change_unit(int v_unit) {
    max_unit = max(max_unit, v_unit);
    const int next = max(v_unit, max_unit - kMaxUnitDrop);
    const float factor = unit_ratio(unit, next);
    unit = next;
    return factor;
  }

  // Chunks of kPromoteTiles tiles: what earlier ones left in shared memory is added to O and to the rounded sum.
  __device__ __forceinline__ void add_promoted() {
    const float4 before = ptx::load_shared_float4(state_address());  // references, rounded sums
    const int unit_before = ptx::load_shared_int(unit_address());
    const float to_unit = unit_ratio(unit_before, unit);
    float factor[2] = {ptx::exp2_approx(before.x - row.reference[0]), ptx::exp2_approx(before.y - row.reference[1])};
    rounded[0] = fmaf(before.z, factor[0], rounded[0]);
    rounded[2] = fmaf(before.w, factor[1], rounded[2]);
    factor[0] *= to_unit, factor[1] *= to_unit;
    // All loads before the first use: s is free now.
#pragma unroll
    for (int j = 0; j < kAcc / 4; ++j) {
      const float4 old = ptx::load_shared_float4(acc_address(j));
      s[4 * j] = old.x, s[4 * j + 1] = old.y, s[4 * j + 2] = old.z, s[4 * j + 3] = old.w;
    }
#pragma unroll
    for (int j = 0; j < kAcc; ++j) o[j] = fmaf(s[j], factor[j >> 1 & 1], o[j]);
  }
  __device__ __forceinline__ void promote(bool first) {
    if (!first) add_promoted();
    ptx::store_shared_float4(state_address(), make_float4(row.reference[0], row.reference[1], rounded[0], rounded[2]));
    ptx::store_shared_int(unit_address(), unit);
#pragma unroll
    for (int j = 0; j < kAcc / 4; ++j) {
      ptx::store_shared_float4(acc_address(j), make_float4(o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]));
    }
  }

  __device__ __forceinline__ void run() {
    Ring<kBuffers> buffer;
    Ring<C::kStages> stage;
    while (true) {
      ptx::mbarrier_wait(shared.item_full(buffer.index()), buffer.parity());
      const Item& item = shared.item(buffer.index());
      if (!item.valid) return;
      attend(item, buffer.index(), stage);
      buffer.next();
    }
  }

  __device__ __forceinline__ void attend(const Item& item, int buffer, Ring<C::kStages>& stage) {
    const int first_row = item.first_row + warpgroup * kRows;
    const int end_row = min(first_row + kRows, item.seqlen_q);
    // This warpgroup's tiles [first, end), and of these [whole, whole_end) that all of its rows see whole, but for the
    // first one: there a window's last rows may see their first key.
    const int last = item.first_tile + item.num_tiles;
    int first = last, end = last, whole = last + 1, whole_end = last;
    if (first_row < end_row) {
      const Range any = visible_keys(p.mask, first_row, end_row, item.seqlen_q, item.seqlen_k);
      const Range head = visible_keys(p.mask, first_row, first_row + 1, item.seqlen_q, item.seqlen_k);
      const Range tail = visible_keys(p.mask, end_row - 1, end_row, item.seqlen_q, item.seqlen_k);
      if (!any.empty()) {
        first = int(any.first / kBlockN);
        end = int(ceil_div(any.end, kBlockN));
      }
      if (!head.empty() && !tail.empty()) {
        whole = max(first, int(ceil_div(tail.first, kBlockN))) + 1;
        whole_end = int(head.end / kBlockN);
      }
    }
    const int q_scale = item.q_scale[warpgroup];
    const uint64_t q_descriptor = ptx::matrix_descriptor(shared.q(buffer) + warpgroup * kRows * kDim, C::kSwizzle);

    row = RowState{};
    unit = max_unit = 0;
#pragma unroll
    for (int j = 0; j < kAcc; ++j) o[j] = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) rounded[j] = 0;

#pragma unroll 1
    for (int tile = item.first_tile; tile < first; ++tile) pass_over(stage);
    int tile = first;
#pragma unroll 1
    while (tile < end) {
      const int chunk = tile, chunk_end = min(tile + kPromoteTiles, end);
#pragma unroll 1
      for (; tile < min(chunk_end, whole); ++tile) {
        step<true>(item, q_descriptor, q_scale, tile, tile + 1 < whole || tile >= whole_end, tile > chunk, stage);
      }
#pragma unroll 1
      for (; tile < min(chunk_end, whole_end); ++tile) {
        step<false>(item, q_descriptor, q_scale, tile, false, tile > chunk, stage);
      }
#pragma unroll 1
      for (; tile < chunk_end; ++tile) {
        step<true>(item, q_descriptor, q_scale, tile, true, tile > chunk, stage);
      }
      if (tile < end) promote(tile - first <= kPromoteTiles);
    }
#pragma unroll 1
    for (; tile < last; ++tile) pass_over(stage);
    if (first_row < end_row) {
      if (end - first > kPromoteTiles) add_promoted();
      write(item);
    }
    release(shared.item_free(buffer));
  }

  // One key tile: S, its exponents, O. kExact: some row may not see all keys (masked), or may not have seen any before.
  template <bool kExact>
  __device__ __forceinline__ void step(const Item& item, uint64_t q_descriptor, int q_scale, int tile, bool masked,
                                       bool accumulate, Ring<C::kStages>& stage) {
    ptx::mbarrier_wait(shared.k_full(stage.index()), stage.parity());
    const uint64_t k_descriptor = ptx::matrix_descriptor(shared.k(stage.index()), C::kSwizzle);
    ptx::fence_registers(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDim / 32; ++k) {
      ptx::wgmma_e4m3(s, ptx::advance(q_descriptor, 32 * k), ptx::advance(k_descriptor, 32 * k), k > 0);
    }
    ptx::wgmma_commit();
    const int v_scale = ptx::load_shared_int(shared.v_scale(stage.index()));
    const float c = score_scale(p.scale_log2, q_scale, ptx::load_shared_int(shared.k_scale(stage.index())));
    ptx::fence_registers(s);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(s);
    release(shared.k_free(stage.index()));

    if (kExact || huge_reference()) {
      exponents_exact(item, tile * kBlockN, masked, c);
      if (v_scale != unit) {
        const float factor = change_unit(v_scale);
        scale_rows(o, factor, factor);
      }
    } else {
      exponents(c, v_scale);
    }

    ptx::mbarrier_wait(shared.v_full(stage.index()), stage.parity());
    const uint64_t v_descriptor = ptx::matrix_descriptor(shared.v(stage.index()), ptx::Swizzle::b32);
    const uint64_t weights = ptx::matrix_descriptor(shared.base + C::kWeights, ptx::Swizzle::b32);
    float sum[2][2] = {};
    uint32_t probability[kBlockN / 32][4];
    ptx::fence_registers(o);
    ptx::fence_registers(rounded);
#pragma unroll
    for (int g = 0; g < kBlockN / 32; ++g) {  // 32 keys
#pragma unroll
      for (int j = 16 * g; j < 16 * g + 16; ++j) {
        s[j] = ptx::exp2_approx(s[j]);
        sum[j >> 1 & 1][j & 1] += s[j];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = 16 * g + 8 * (i >> 1) + 2 * (i & 1);
        probability[g][i] = ptx::pack_e4m3(s[j], s[j + 1], s[j + 4], s[j + 5]);
      }
      ptx::wgmma_fence();
      ptx::wgmma_e4m3(o, probability[g], ptx::advance(v_descriptor, 32 * kDimV * g), g > 0 || accumulate);
      ptx::wgmma_e4m3(rounded, probability[g], weights, g > 0 || accumulate);
    }
    ptx::wgmma_commit();
    row.sum[0] += sum[0][0] + sum[0][1];
    row.sum[1] += sum[1][0] + sum[1][1];
    ptx::fence_registers(o);
    ptx::fence_registers(rounded);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(o);
    ptx::fence_registers(rounded);
#pragma unroll
    for (int g = 0; g < kBlockN / 32; ++g) ptx::fence_registers(probability[g]);
    release(shared.v_free(stage.index()));
    stage.next();
  }

  // A tile of other warpgroups: it must be seen to arrive before it is given back.
  __device__ __forceinline__ void pass_over(Ring<C::kStages>& stage) {
    ptx::mbarrier_wait(shared.k_full(stage.index()), stage.parity());
    ptx::mbarrier_wait(shared.v_full(stage.index()), stage.parity());
    release(shared.k_free(stage.index()));
    release(shared.v_free(stage.index()));
    stage.next();
  }

  __device__ __forceinline__ void write(const Item& item);
  __device__ __forceinline__ void write_wide(const Item& item);
  __device__ __forceinline__ void write_narrow(const Item& item);
  __device__ __forceinline__ void repair(const Item& item);
  __device__ __forceinline__ bool hides_nan(const Item& item, int kv_head, Range keys) const;
};

template <class C, int kDim, int kDimV>
__device__ __forceinline__ void Consumer<C, kDim, kDimV>::exponents_exact(const Item& item, int first_key, bool masked,
                                                                          float c) {
  if (masked) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = min(row_index(item, r), item.seqlen_q - 1);
      const Range keys = visible_keys(p.mask, i, i + 1, item.seqlen_q, item.seqlen_k);
      const int column = first_key + 2 * (ptx::lane_id() & 3);  // of this thread's first score
      const int first = int(keys.first) - column, end = int(keys.end) - column;
#pragma unroll
      for (int j = 0; j < kScores; ++j) {
        if ((j >> 1 & 1) != r) continue;
        const int key = 8 * (j >> 2) + (j & 1);
        if (key < first || key >= end) s[j] = -INFINITY;
      }
    }
  }
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = -INFINITY;
#pragma unroll
    for (int j = 0; j < kScores; ++j) {
      if ((j >> 1 & 1) == r) most = fmaxf(most, s[j]);
    }
    most = fmaxf(quad_max(most) * c, kUnseen);
    const float before = row.reference[r], now = fmaxf(before, most);
    row.top[r] = fmaxf(row.top[r] + (before - now), most - now + kOffset);
    row.reference[r] = now;
    factor[r] = ptx::exp2_approx(before - now);
    row.sum[r] *= factor[r];
    rounded[2 * r] *= factor[r];
  }
  if (huge_reference()) {
#pragma unroll
    for (int j = 0; j < kScores; ++j) s[j] = (s[j] * c - row.reference[j >> 1 & 1]) + kOffset;
  } else {
    const float shift[2] = {kOffset - row.reference[0], kOffset - row.reference[1]};
#pragma unroll
    for (int j = 0; j < kScores; ++j) s[j] = fmaf(s[j], c, shift[j >> 1 & 1]);
  }
  scale_rows(o, factor[0], factor[1]);
}

// An element of an image, in units of its tile's scale.
__device__ __forceinline__ float image_element(const uint8_t* image, const ImageShape& shape, int64_t head,
                                               int64_t token, int64_t channel) {
  return decode_fp8(image[shape.offset(head, token, channel)], e4m3_format());
}

template <class C, int kDim, int kDimV>
__device__ __forceinline__ void Consumer<C, kDim, kDimV>::write(const Item& item) {
  const int quad = ptx::lane_id() % 4;
  const float to_value = decode_e8m0(uint8_t(unit));
  float factor[2];
  bool visible[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = quad_sum(row.sum[r]), weighted = quad_sum(rounded[2 * r]), top = quad_max(row.top[r]);
    visible[r] = total != 0;  // NaN counts as visible and propagates
    row.sum[r] = total;
    factor[r] = kWeightSum / weighted * (unit < kTinyUnit ? 1.0f : to_value);
    const int i = row_index(item, r);
    if (quad == 0 && i < item.seqlen_q) {
      const int64_t out_row = int64_t(item.out_start) + i;
      const float log2_sum = log2f(total);
      if (p.lse) {
        static_cast<float*>(p.lse.data)[item.head * p.lse.stride[0] + out_row] =
            visible[r] ? (row.reference[r] - kOffset + log2_sum) * kLn2 : -INFINITY;
      }
      if (p.row_exponent) {
        const float spare = floorf(log2_sum - top);
        static_cast<uint8_t*>(p.row_exponent.data)[item.head * p.row_exponent.stride[0] + out_row] =
            visible[r] && spare > 0 ? uint8_t(fminf(spare, 255.0f)) : 0;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kAcc; ++j) o[j] = visible[j >> 1 & 1] ? o[j] * factor[j >> 1 & 1] : 0.0f;
  if (unit < kTinyUnit) {
#pragma unroll
    for (int j = 0; j < kAcc; ++j) o[j] *= to_value;
  }
  if (p.v_mean) {
    const float* mean = static_cast<const float*>(p.v_mean.data) + item.sequence * p.v_mean.stride[0] +
                        item.head / p.group * p.v_mean.stride[1];
#pragma unroll
    for (int j = 0; j < kAcc; ++j) {
      const int channel = 8 * (j >> 2) + 2 * quad + (j & 1);
      if (visible[j >> 1 & 1] && channel < p.head_dim_v) o[j] += mean[channel];
    }
  }
  if (p.wide_stores) {
    write_wide(item);
  } else {
    write_narrow(item);
  }
  if (!p.has_mask) return;
  // 0 NaN is NaN: a NaN among values gets into rows of its tile that do not see it.
  float nan = 0;
#pragma unroll
  for (int j = 0; j < kAcc; ++j) nan = fmaf(o[j], 0.0f, nan);
  if (__any_sync(~0u, nan != nan)) repair(item);
}

template <class C, int kDim, int kDimV>
__device__ __forceinline__ void Consumer<C, kDim, kDimV>::write_wide(const Item& item) {
  const int quad = ptx::lane_id() % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = row_index(item, r);
    uint16_t* to = static_cast<uint16_t*>(p.out.data) + (int64_t(item.out_start) + i) * p.out.stride[0] +
                   item.head * p.out.stride[1] + 8 * quad;
    // Four pieces of 8 channels at a time: a thread of a quad collects one of them and stores its 16 bytes.
#pragma unroll
    for (int j = 0; j < kDimV / 8; j += 4) {
      uint32_t word[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        word[k] = pack_half(p.out.dtype, o[4 * (j + k) + 2 * r], o[4 * (j + k) + 2 * r + 1]);
      }
      const uint4 piece = transpose_quad(word, quad);
      if (i < item.seqlen_q && 8 * (j + quad) < p.head_dim_v) *reinterpret_cast<uint4*>(to + 8 * j) = piece;
    }
  }
}

// Any dtype and alignment, one element at a time; registers pass through the thread's shared memory to be indexed.
template <class C, int kDim, int kDimV>
__device__ __forceinline__ void Consumer<C, kDim, kDimV>::write_narrow(const Item& item) {
  const int quad = ptx::lane_id() % 4;
#pragma unroll
  for (int j = 0; j < kAcc / 4; ++j) {
    ptx::store_shared_float4(acc_address(j), make_float4(o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]));
  }
#pragma unroll 1
  for (int j = 0; j < kAcc / 4; ++j) {
    const float4 x = ptx::load_shared_float4(acc_address(j));
    const int channel = 8 * j + 2 * quad;
    if (channel >= p.head_dim_v) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row_index(item, r);
      if (i >= item.seqlen_q) continue;
      const int64_t to = (int64_t(item.out_start) + i) * p.out.stride[0] + item.head * p.out.stride[1] + channel;
      store_element(p.out, to, r ? x.z : x.x);
      store_element(p.out, to + 1, r ? x.w : x.y);
    }
  }
}

// Whether some key that a row does not see, in the tiles of its warpgroup, has a NaN among its values.
template <class C, int kDim, int kDimV>
__device__ __forceinline__ bool Consumer<C, kDim, kDimV>::hides_nan(const Item& item, int kv_head, Range keys) const {
  const int first_row = item.first_row + warpgroup * kRows;
  const Range any =
      visible_keys(p.mask, first_row, min(first_row + kRows, item.seqlen_q), item.seqlen_q, item.seqlen_k);
  const int64_t end = min(round_up(any.end, kBlockN), int64_t(item.seqlen_k));
  bool found = false;
#pragma unroll 1
  for (int64_t key = any.first / kBlockN * kBlockN; key < end; ++key) {
    if (key == keys.first) key = keys.end;
    if (key >= end) break;
#pragma unroll 1
    for (int c = ptx::lane_id(); c < kDimV; c += 32) {
      found |= (p.v[p.v_shape.offset(kv_head, item.k_padded + key, c)] & 0x7F) == kFp8Nan;
    }
  }
  return __any_sync(~0u, found);
}

// The warp's rows once more, from visible keys only and key by key; slow, and as rare as a NaN is.
template <class C, int kDim, int kDimV>
__device__ __forceinline__ void Consumer<C, kDim, kDimV>::repair(const Item& item) {
  __syncwarp();
  const int kv_head = item.head / p.group;
#pragma unroll 1
  for (int at = 0; at < 16; ++at) {
    const int i = item.first_row + warpgroup * kRows + warp * 16 + at;
    if (i >= item.seqlen_q) return;
    // lse in binades, from the quad that has the row.
    const float reference = __shfl_sync(~0u, at < 8 ? row.reference[0] : row.reference[1], at % 8 * 4);
    const float sum = __shfl_sync(~0u, at < 8 ? row.sum[0] : row.sum[1], at % 8 * 4);
    const float lse = reference - kOffset + log2f(sum);
    const Range keys = visible_keys(p.mask, i, i + 1, item.seqlen_q, item.seqlen_k);
    if (keys.empty() || !hides_nan(item, kv_head, keys)) continue;
    const float q_scale = decode_e8m0(uint8_t(item.q_scale[warpgroup])) * p.scale_log2;
    float total[kDimV / 32] = {}, weight = 0;
#pragma unroll 1
    for (int64_t key = keys.first; key < keys.end; ++key) {
      const int64_t token = item.k_padded + key;
      float score = 0;
#pragma unroll 1
      for (int c = ptx::lane_id(); c < kDim; c += 32) {
        score += image_element(p.q, p.q_shape, item.head, item.q_padded + i, c) *
                 image_element(p.k, p.k_shape, kv_head, token, c);
      }
      for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(~0u, score, step);
      score *= q_scale * decode_e8m0(p.k[p.k_shape.scale_offset(kv_head, token)]);
      const float probability = exp2f(score - lse);
      weight += probability;
      const float v_scale = decode_e8m0(p.v[p.v_shape.scale_offset(kv_head, token)]);
      for (int n = 0; n < kDimV / 32; ++n) {
        total[n] += probability * (image_element(p.v, p.v_shape, kv_head, token, ptx::lane_id() + 32 * n) * v_scale);
      }
    }
    for (int n = 0; n < kDimV / 32; ++n) {
      const int channel = ptx::lane_id() + 32 * n;
      if (channel >= p.head_dim_v) continue;
      float x = total[n] / weight;
      if (p.v_mean) {
        x += static_cast<const float*>(
            p.v_mean.data)[item.sequence * p.v_mean.stride[0] + kv_head * p.v_mean.stride[1] + channel];
      }
      store_element(p.out, (int64_t(item.out_start) + i) * p.out.stride[0] + item.head * p.out.stride[1] + channel, x);
    }
  }
}

// Rows of no sequence: out zero, lse -inf.
__device__ void clear_slack(const Params& p) {
  if (!p.seq_q.cu_seqlens) return;
  const int64_t first = p.seq_q.cu_seqlens[p.batch], rows = p.total_out - first;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, step = int64_t(gridDim.x) * kThreads;
  for (int64_t at = thread; at < rows * p.num_heads; at += step) {
    const int64_t row = first + at % rows, head = at / rows;
    if (p.lse) static_cast<float*>(p.lse.data)[head * p.lse.stride[0] + row] = -INFINITY;
    if (p.row_exponent) static_cast<uint8_t*>(p.row_exponent.data)[head * p.row_exponent.stride[0] + row] = 0;
    for (int c = 0; c < p.head_dim_v; ++c) {
      store_element(p.out, row * p.out.stride[0] + head * p.out.stride[1] + c, 0);
    }
  }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <int kDim, int kDimV>
__global__ void __launch_bounds__(kThreads, 1) attention_fwd_kernel(const __grid_constant__ Params p) {
  using C = Config<kDim, kDimV>;
  extern __shared__ uint8_t raw[];
  uint8_t* smem = raw + (1024 - (ptx::shared_address(raw) & 1023)) % 1024;
  const Shared<C> shared{ptx::shared_address(smem)};
  if (threadIdx.x < 64) {
    const uint32_t code = kWeightCodes >> (8 * (threadIdx.x / 16)) & 0xFF;  // 32 bytes a column
    reinterpret_cast<uint32_t*>(smem + C::kWeights)[threadIdx.x] = code * 0x01010101u;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kBuffers; ++i) {
      ptx::mbarrier_init(shared.item_full(i), 1);
      ptx::mbarrier_init(shared.item_free(i), kConsumerWarps + 1);
    }
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(shared.k_full(i), 1);
      ptx::mbarrier_init(shared.v_full(i), 1);
      ptx::mbarrier_init(shared.k_free(i), kConsumerWarps);
      ptx::mbarrier_init(shared.v_free(i), kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  clear_slack(p);
  ptx::fence_proxy_async();
  __syncthreads();
  // Through a shuffle, so that the compiler knows it to be the same in the whole warp: descriptors are then uniform.
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<32>();
    if (threadIdx.x == 0) schedule<C, kDim>(p, shared);
    if (threadIdx.x == 32) load_tiles<C>(p, shared);
  } else {
    ptx::setmaxnreg_inc<160>();
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32 % 4, 0);
    Consumer<C, kDim, kDimV>{p, shared, warpgroup - 1, warp}.run();
  }
}

// ---- host -----------------------------------------------------------------------------------------------------------

Status supports(const AttentionFwd& a) {
  constexpr const char* op = "attention_fwd";
  MXFLASH_TRY(check_compute_capability(op, "sm90", a.q.data.device.index, 90));
  const AttentionShape s = AttentionShape::of(a);
  if (s.head_dim > kMaxImageDim) {
    return unsupported("%s: sm90: head_dim must be at most 128, got %d", op, int(s.head_dim));
  }
  if (s.head_dim_v > kMaxImageDim) {
    return unsupported("%s: sm90: head_dim_v must be at most 128, got %d", op, int(s.head_dim_v));
  }
  if (!(s.softmax_scale > 0)) {
    return unsupported("%s: sm90: softmax_scale must be positive, got %g", op, s.softmax_scale);
  }
  const int64_t tokens = std::max({s.total_q, s.total_k, s.total_out, padded_token_count(s.total_q, s.seq_q),
                                   padded_token_count(s.total_k, s.seq_k)});
  if (tokens >= int64_t(1) << 31) {
    return unsupported("%s: sm90: tokens must be fewer than 2^31, got %lld", op, static_cast<long long>(tokens));
  }
  if (s.num_heads_q > 65535) {
    return unsupported("%s: sm90: num_heads_q must be at most 65535, got %lld", op,
                       static_cast<long long>(s.num_heads_q));
  }
  const double items = double(s.batch) * double(s.num_heads_q) * double(ceil_div(s.max_seqlen_q, kBlockM));
  if (items >= double(1 << 30)) {
    return unsupported("%s: sm90: blocks of rows must be fewer than 2^30, got %g", op, items);
  }
  return {};
}

struct Workspace {
  AttentionPlan plan;
  uint8_t *q, *k, *v;
  size_t used;
  Workspace(void* base, const AttentionFwd& a) {
    Arena arena(base);
    const auto image = [&](const Tensor& given, ImageRole role, const MxTensor& t, const Jagged& seq) {
      if (given) return static_cast<uint8_t*>(given.data);
      return arena.take<uint8_t>(image_size(role, t.data.shape[0], t.data.shape[1], t.data.shape[2], seq));
    };
    plan.counter = arena.take<int32_t>(1);
    const Jagged& seq = a.seq_k;
    if (seq.cu_seqlens && seq.batch <= kMaxOrderedBatch) plan.order = arena.take<int32_t>(seq.batch);
    q = image(a.q_image, ImageRole::query, a.q, a.seq_q);
    k = image(a.k_image, ImageRole::key, a.k, a.seq_k);
    v = image(a.v_image, ImageRole::value, a.v, a.seq_k);
    used = arena.used();
  }
};

size_t workspace(const AttentionFwd& a) { return Workspace(nullptr, a).used; }

template <int kDim, int kDimV>
Status launch_kernel(const Params& params, Stream stream) {
  const int64_t items = int64_t(params.batch) * params.num_heads * params.max_blocks;
  const Launch at{"attention_fwd: sm90",
                  dim3(uint32_t(std::min<int64_t>(multiprocessor_count(), std::max<int64_t>(items, 1)))), kThreads,
                  Config<kDim, kDimV>::kBytes, stream};
  return launch(at, attention_fwd_kernel<kDim, kDimV>, params);
}

Status run(const AttentionFwd& a, Stream stream) {
  const DeviceGuard guard(a.q.data.device.index);
  MXFLASH_TRY(guard.status());
  const AttentionShape s = AttentionShape::of(a);
  const Workspace w(a.workspace, a);
  if (!a.q_image) MXFLASH_TRY(write_operand_image(a.q, a.seq_q, ImageRole::query, w.q, stream));
  if (!a.k_image) MXFLASH_TRY(write_operand_image(a.k, a.seq_k, ImageRole::key, w.k, stream));
  if (!a.v_image) MXFLASH_TRY(write_operand_image(a.v, a.seq_k, ImageRole::value, w.v, stream));
  MXFLASH_TRY(write_attention_plan(w.plan, a.seq_k, stream));

  const int64_t padded_q = padded_token_count(s.total_q, s.seq_q), padded_k = padded_token_count(s.total_k, s.seq_k);
  const ImageShape q_shape = ImageShape::of(ImageRole::query, padded_q, s.num_heads_q, s.head_dim);
  const ImageShape k_shape = ImageShape::of(ImageRole::key, padded_k, s.num_heads_kv, s.head_dim);
  const ImageShape v_shape = ImageShape::of(ImageRole::value, padded_k, s.num_heads_kv, s.head_dim_v);
  constexpr int64_t kCache = 32 << 20;
  const int64_t head_bytes = std::max<int64_t>(s.max_seqlen_k * (k_shape.dim + v_shape.dim), 1);
  const Params params{
      .q = w.q,
      .k = w.k,
      .v = w.v,
      .q_scale = w.q + q_shape.scale_offset(0, 0),
      .k_scale = w.k + k_shape.scale_offset(0, 0),
      .v_scale = w.v + v_shape.scale_offset(0, 0),
      .q_shape = q_shape,
      .k_shape = k_shape,
      .v_shape = v_shape,
      .out = a.out,
      .lse = a.lse,
      .row_exponent = a.row_exponent,
      .v_mean = a.v_mean,
      .seq_q = a.seq_q,
      .seq_k = a.seq_k,
      .mask = a.mask,
      .total_q = s.total_q,
      .total_k = s.total_k,
      .total_out = s.total_out,
      .num_heads = int32_t(s.num_heads_q),
      .group = int32_t(s.group),
      .batch = int32_t(s.batch),
      .max_blocks = int32_t(ceil_div(s.max_seqlen_q, kBlockM)),
      .head_dim_v = int32_t(s.head_dim_v),
      .heads_at_once = int32_t(std::min(s.batch * s.num_heads_q, std::max<int64_t>(kCache / head_bytes, 1) * s.group)),
      .shared_q = s.shared_q,
      .has_mask = a.mask.causal || a.mask.window_left >= 0 || a.mask.window_right >= 0,
      .wide_stores = a.out.dtype != Dtype::f32 && reinterpret_cast<uintptr_t>(a.out.data) % 16 == 0 &&
                     a.out.stride[0] % 8 == 0 && a.out.stride[1] % 8 == 0,
      .scale_log2 = float(s.softmax_scale * double(kLog2e)),
      .plan = w.plan};
  if (k_shape.dim == 128) {
    return v_shape.dim == 128 ? launch_kernel<128, 128>(params, stream) : launch_kernel<128, 64>(params, stream);
  }
  return v_shape.dim == 128 ? launch_kernel<64, 128>(params, stream) : launch_kernel<64, 64>(params, stream);
}

}  // namespace

const Impl<AttentionFwd> kAttentionFwdSm90 = sm90_backend<AttentionFwd>(supports, run, workspace);

}  // namespace mxflash
