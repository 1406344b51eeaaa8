// Attention forward on Hopper (sm_90a) with exact operands: BF16 wgmma. docs/hopper.md tells when to want it.
//
//   s = softmax_scale log2(e) q.k      P = BF16(2^(s - m))      out = sum P v / sum 2^(s - m)      lse = ln sum 2^s
//
// over key tiles in ascending order, m a reference that is raised only when a score exceeds it by more than kLimit
// binades. Every MXFP8 element times its scale is a BF16 number, so operands reach the tensor cores as they are, as
// images that a pass before this kernel writes (mx/bf16_image.h); sums are in fp32.
//
// CTA: persistent; a work item is kBlockM query rows of one head of one sequence.
//   scheduler    a thread of warpgroup 0: takes items from a counter, loads their query rows
//   loader       another: loads key and value tiles (bulk copies of images: no tensor maps)
//   consumer w   the other warpgroups: rows 64 w .. of the item, S, P and O in registers
// A consumer issues S = Q K^T of a tile (SS) together with O += P V of the tile before it (RS), and makes the exponents
// of S while O is on its way. Warpgroups take turns to issue, so that one's exponents run under the others' products.
// The accumulators of Q K^T are, packed, A fragments of P V.
//
// Barriers (arrivals per phase; s is a stage, b an item, q a query buffer):
//   item_full[b]            1 + bytes     item and its query rows are there      scheduler -> loader, consumers
//   item_free[b]            1 + warps     nobody reads the item any more         loader, consumers -> scheduler
//   query_free[q]           warps         nobody reads the rows any more         consumers -> scheduler
//   k_full[s], v_full[s]    1 + bytes     a tile is there                        loader -> consumers
//   k_free[s], v_free[s]    warps         nobody reads it any more               consumers -> loader
//   named 1 + w             256           consumer w may issue                   the consumer before it -> consumer w
// Shared memory: Config. Registers: 232 for two consumers (d = 128: S 64, P 32, O 64; d = 256: S 32, P 16, O 128), 160
// for three; 40 and 32 for the others.
#include <cfloat>

#include "attention/attention.h"
#include "attention/bf16_image.cuh"
#include "attention/consumer_warp.cuh"
#include "attention/mx_rows.cuh"
#include "attention/ring.cuh"
#include "attention/row_output.cuh"
#include "mx/bf16_image.h"
#include "ptx/bulk_copy.cuh"
#include "ptx/descriptors.h"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma_bf16.cuh"
#include "runtime/check.h"
#include "runtime/cuda_backend.h"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

constexpr int kItems = 2;    // known ahead
constexpr float kLimit = 8;  // P may be 2^8: BF16 and fp32 have exponents to spare
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kHuge = 0x1p20f;     // of a reference: what scores differ by is no longer small beside one rounding
constexpr float kUnseen = -FLT_MAX;  // reference of a row that has seen no key: finite, so that differences are numbers

struct Params {
  WorkItems items;
  RowOutput to;
  Tensor out_f32;  // [total_out, num_heads, head_dim_v], what out_mx is made of; without data where nobody wants it
  const uint16_t *q, *k, *v;  // images
  Bf16ImageShape q_shape, k_shape, v_shape;
  float scale_log2;  // softmax_scale log2(e)
};

template <int kDim_, int kDimV_>
struct Config {
  static constexpr int kDim = kDim_, kDimV = kDimV_;
  static constexpr int kWarpgroups = kDimV == 64 ? 3 : 2;
  static constexpr int kBlockM = kRows * kWarpgroups;
  static constexpr int kBlockN = kDimV <= 128 ? 128 : 64;  // of 128, to which sequences are padded
  static constexpr bool kSplit = false;                    // no rows are packed, no keys split
  static constexpr int kStages = kDimV == 64 ? 4 : 2;
  static constexpr int kQueryBuffers = kDim + kDimV <= 256 || kDimV == 192 ? 2 : 1;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kConsumerWarps = 4 * kWarpgroups;
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : 232,
                       kProducerRegisters = kWarpgroups == 3 ? 32 : 40;

  static constexpr int kQueryBytes = kBlockM * kDim * 2;
  static constexpr int kKeyBytes = kBlockN * kDim * 2;
  static constexpr int kValueBytes = kBlockN * kDimV * 2;
  // Bytes from 8 tokens to the next 8.
  static constexpr int kStride = kDim / int(kAtomChannels) * 1024, kStrideV = kDimV / int(kAtomChannels) * 1024;

  // Offsets in shared memory, from an address aligned to 1024.
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kQueryBuffers * kQueryBytes;
  static constexpr int kV = kK + kStages * kKeyBytes;
  static constexpr int kItem = kV + kStages * kValueBytes;
  static constexpr int kBarriers = kItem + kItems * 64;
  static constexpr int kEnd = kBarriers + 8 * (2 * kItems + kQueryBuffers + 4 * kStages);
  static constexpr int kBytes = kEnd + 1024;  // for the alignment
  static_assert(kBytes <= 227 * 1024);
};
static_assert(sizeof(WorkItem) <= 64);

template <class C>
struct Shared {
  uint32_t base;
  __device__ WorkItem& item(int i) const {
    return *static_cast<WorkItem*>(__cvta_shared_to_generic(base + C::kItem + 64 * i));
  }
  __device__ uint32_t q(int buffer) const { return base + C::kQ + buffer * C::kQueryBytes; }
  __device__ uint32_t k(int stage) const { return base + C::kK + stage * C::kKeyBytes; }
  __device__ uint32_t v(int stage) const { return base + C::kV + stage * C::kValueBytes; }
  __device__ uint32_t item_full(int i) const { return base + C::kBarriers + 8 * i; }
  __device__ uint32_t item_free(int i) const { return item_full(kItems + i); }
  __device__ uint32_t query_free(int buffer) const { return item_full(2 * kItems + buffer); }
  __device__ uint32_t k_full(int stage) const { return query_free(C::kQueryBuffers + stage); }
  __device__ uint32_t v_full(int stage) const { return k_full(C::kStages + stage); }
  __device__ uint32_t k_free(int stage) const { return k_full(2 * C::kStages + stage); }
  __device__ uint32_t v_free(int stage) const { return k_full(3 * C::kStages + stage); }
};

// ---- scheduler ------------------------------------------------------------------------------------------------------

// Takes items, one ahead of the consumers, and loads their query rows.
template <class C>
__device__ __forceinline__ void schedule(const Params& p, const Shared<C> shared) {
  const int32_t num_items = count_items<C>(p.items);
  Ring<kItems> at;
  Ring<C::kQueryBuffers> buffer;
#pragma unroll 1
  for (bool found = true; found; at.next(), buffer.next()) {
    ptx::mbarrier_wait(shared.item_free(at.index()), at.parity() ^ 1);
    volatile WorkItem& item = shared.item(at.index());
    found = take_item<C>(p.items, num_items, item);
    if (!found) {
      ptx::mbarrier_arrive(shared.item_full(at.index()));
      return;
    }
    // A block may reach beyond the sequence's padded rows: those warpgroups have no rows.
    const int32_t rows = min(C::kBlockM, int32_t(round_up(item.seqlen_q, kRows)) - item.first_row);
    const int64_t row = int64_t(item.head) * p.q_shape.tokens + item.q_padded + item.first_row;
    ptx::mbarrier_wait(shared.query_free(buffer.index()), buffer.parity() ^ 1);
    ptx::mbarrier_arrive_expect_tx(shared.item_full(at.index()), uint32_t(rows * C::kDim * 2));
    ptx::bulk_load(shared.q(buffer.index()), p.q + row * C::kDim, uint32_t(rows * C::kDim * 2),
                   shared.item_full(at.index()));
  }
}

// ---- loader ---------------------------------------------------------------------------------------------------------

// Loads the key and value tiles of item after item.
template <class C>
__device__ __forceinline__ void load_tiles(const Params& p, const Shared<C> shared) {
  Ring<kItems> at;
  Ring<C::kStages> stage;
  while (true) {
    ptx::mbarrier_wait(shared.item_full(at.index()), at.parity());
    const volatile WorkItem& item = shared.item(at.index());
    if (!item.valid) return;
    int64_t row = (item.head / p.items.group) * p.k_shape.tokens + item.k_padded + item.first_tile * C::kBlockN;
    const int num_tiles = item.num_tiles;
    ptx::mbarrier_arrive(shared.item_free(at.index()));
    at.next();
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile, row += C::kBlockN) {
      ptx::mbarrier_wait(shared.k_free(stage.index()), stage.parity() ^ 1);
      ptx::mbarrier_arrive_expect_tx(shared.k_full(stage.index()), C::kKeyBytes);
      ptx::bulk_load(shared.k(stage.index()), p.k + row * C::kDim, C::kKeyBytes, shared.k_full(stage.index()));
      ptx::mbarrier_wait(shared.v_free(stage.index()), stage.parity() ^ 1);
      ptx::mbarrier_arrive_expect_tx(shared.v_full(stage.index()), C::kValueBytes);
      ptx::bulk_load(shared.v(stage.index()), p.v + row * C::kDimV, C::kValueBytes, shared.v_full(stage.index()));
      stage.next();
    }
  }
}

// ---- consumer -------------------------------------------------------------------------------------------------------

// What a thread keeps of its two rows, r and r + 8 of its warp.
struct RowState {
  float reference[2] = {kUnseen, kUnseen};  // m
  float top[2] = {0, 0};                    // largest exponent so far, this thread's keys: s - m
  float sum[2] = {0, 0};                    // of unrounded P, this thread's keys
};

template <class C>
struct Consumer : ConsumerWarp {
  static constexpr int kBlockN = C::kBlockN;
  static constexpr int kScores = kBlockN / 2;  // registers of S
  static constexpr int kAcc = C::kDimV / 2;    // registers of O
  static constexpr int kSteps = kBlockN / 16;  // of P V

  const Params& p;
  const Shared<C> shared;

  float s[kScores];
  float o[kAcc];
  uint32_t probability[kSteps][4];
  RowState row;
  float rescale[2];  // of O, when the reference moved
  bool moved;
  Ring<C::kStages> k_stage, v_stage;

  __device__ void wait_turn() const { ptx::named_barrier_sync(1 + warpgroup, 256); }
  __device__ void pass_turn() const { ptx::named_barrier_arrive(1 + (warpgroup + 1) % C::kWarpgroups, 256); }

  __device__ __forceinline__ void run() {
    Ring<kItems> at;
    Ring<C::kQueryBuffers> buffer;
    if (warpgroup == C::kWarpgroups - 1) pass_turn();
    while (true) {
      ptx::mbarrier_wait(shared.item_full(at.index()), at.parity());
      const WorkItem& item = shared.item(at.index());
      if (!item.valid) return;
      attend(item, buffer.index());
      release(shared.item_free(at.index()));
      at.next();
      buffer.next();
    }
  }

  __device__ __forceinline__ void attend(const WorkItem& item, int buffer) {
    const int first_row = item.first_row + warpgroup * kRows;
    const int end_row = min(first_row + kRows, item.seqlen_q), last = item.first_tile + item.num_tiles;
    const RowTiles tiles = row_tiles<C>(p.items, item, first_row, end_row);
    const uint64_t q_descriptor = ptx::matrix_descriptor(shared.q(buffer) + warpgroup * (kRows / 8) * C::kStride,
                                                         ptx::Swizzle::b128, 16, C::kStride);

    row = RowState{};
#pragma unroll
    for (int j = 0; j < kAcc; ++j) o[j] = 0;
#pragma unroll 1
    for (int tile = item.first_tile; tile < tiles.first; ++tile) pass_over();
    if (tiles.first < tiles.end) {
      int tile = tiles.first;
      step<true, false>(item, q_descriptor, tile, tile + 1 < tiles.whole || tile >= tiles.whole_end);
      ++tile;
#pragma unroll 1
      for (; tile < min(tiles.end, tiles.whole); ++tile) {
        step<true, true>(item, q_descriptor, tile, tile + 1 < tiles.whole || tile >= tiles.whole_end);
      }
#pragma unroll 1
      for (; tile < min(tiles.end, tiles.whole_end); ++tile) step<false, true>(item, q_descriptor, tile, false);
#pragma unroll 1
      for (; tile < tiles.end; ++tile) step<true, true>(item, q_descriptor, tile, true);
      release(shared.query_free(buffer));
      add_values();
      ptx::fence_registers(o);
      ptx::wgmma_wait<0>();
      ptx::fence_registers(o);
      release_values();
    } else {
      release(shared.query_free(buffer));
    }
#pragma unroll 1
    for (int tile = tiles.end; tile < last; ++tile) pass_over();
    if (first_row < end_row) write(item);
  }

  // O += P V of the tile before, issued.
  __device__ __forceinline__ void add_values() {
    ptx::mbarrier_wait(shared.v_full(v_stage.index()), v_stage.parity());
    const uint64_t descriptor =
        ptx::matrix_descriptor(shared.v(v_stage.index()), ptx::Swizzle::b128, 1024, C::kStrideV);
    ptx::fence_registers(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
      ptx::wgmma_bf16_mn(o, probability[g], ptx::advance(descriptor, 2 * C::kStrideV * g), true);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void release_values() {
#pragma unroll
    for (int g = 0; g < kSteps; ++g) ptx::fence_registers(probability[g]);
    release(shared.v_free(v_stage.index()));
    v_stage.next();
  }

  // One key tile: S and its P; and O of the tile before it, if there is one. kExact: some row may not see all keys
  // (masked), or may not have seen any before.
  template <bool kExact, bool kAfter>
  __device__ __forceinline__ void step(const WorkItem& item, uint64_t q_descriptor, int tile, bool masked) {
    ptx::mbarrier_wait(shared.k_full(k_stage.index()), k_stage.parity());
    wait_turn();
    const uint64_t k_descriptor = ptx::matrix_descriptor(shared.k(k_stage.index()), ptx::Swizzle::b128, 16, C::kStride);
    ptx::fence_registers(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kDim / 16; ++k) {
      const int at = k / 4 * 1024 + k % 4 * 32;  // an atom is 64 channels wide
      ptx::wgmma_bf16(s, ptx::advance(q_descriptor, at), ptx::advance(k_descriptor, at), k > 0);
    }
    ptx::wgmma_commit();
    if constexpr (kAfter) add_values();
    pass_turn();
    ptx::fence_registers(s);
    ptx::wgmma_wait<kAfter ? 1 : 0>();
    ptx::fence_registers(s);
    release(shared.k_free(k_stage.index()));
    k_stage.next();

    if (kExact || huge_reference()) {
      exponents_exact(item, tile * kBlockN, masked);
    } else {
      exponents();
    }
    float sum[2][2] = {};
#pragma unroll
    for (int j = 0; j < kScores; ++j) {
      s[j] = ptx::exp2_approx(s[j]);
      sum[j >> 1 & 1][j & 1] += s[j];
    }
    row.sum[0] += sum[0][0] + sum[0][1];
    row.sum[1] += sum[1][0] + sum[1][1];
    if constexpr (kAfter) {
      ptx::fence_registers(o);
      ptx::wgmma_wait<0>();
      ptx::fence_registers(o);
      release_values();
      if (moved) {
#pragma unroll
        for (int j = 0; j < kAcc; ++j) o[j] *= rescale[j >> 1 & 1];
      }
    }
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        probability[g][i] = pack_half(Dtype::bf16, s[8 * g + 2 * i], s[8 * g + 2 * i + 1]);
      }
    }
  }

  // Of some row of the warp. Then all scores must be rounded before they meet the reference, or none.
  __device__ __forceinline__ bool huge_reference() const {
    return __any_sync(~0u, fmaxf(fabsf(row.reference[0]), fabsf(row.reference[1])) > kHuge);
  }

  // S -> exponents where all rows see all keys and have seen some before.
  __device__ __forceinline__ void exponents() {
    // As signed integers, positive floats compare like floats, and a negative one never beats a positive one.
    int most[2][2] = {};
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[4 * j + e] = fmaf(s[4 * j + e], p.scale_log2, -row.reference[e >> 1]);
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
    moved = __any_sync(~0u, max(most[0][0], most[1][0]) > __float_as_int(kLimit));
    if (moved) raise(__int_as_float(most[0][0]), __int_as_float(most[1][0]));
  }

  // Raises references so that exponents are at most zero again.
  __device__ __forceinline__ void raise(float most0, float most1) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = row.reference[r];
      row.reference[r] += quad_max(r ? most1 : most0);
      const float step = row.reference[r] - before;  // as it was rounded
      row.top[r] -= step;
      rescale[r] = ptx::exp2_approx(-step);
      row.sum[r] *= rescale[r];
#pragma unroll
      for (int j = 0; j < kScores; ++j) {
        if ((j >> 1 & 1) == r) s[j] -= step;
      }
    }
  }

  // A tile of other warpgroups: it must be seen to arrive before it is given back.
  __device__ __forceinline__ void pass_over() {
    ptx::mbarrier_wait(shared.k_full(k_stage.index()), k_stage.parity());
    wait_turn();
    pass_turn();
    release(shared.k_free(k_stage.index()));
    ptx::mbarrier_wait(shared.v_full(v_stage.index()), v_stage.parity());
    release(shared.v_free(v_stage.index()));
    k_stage.next();
    v_stage.next();
  }

  __device__ __forceinline__ void exponents_exact(const WorkItem& item, int first_key, bool masked);
  __device__ __forceinline__ void write(const WorkItem& item);
  __device__ __forceinline__ void repair(const WorkItem& item);
};

// S -> exponents where some row does not see all keys, or may not have seen any before: masks, and raises the reference
// to the exact maximum.
template <class C>
__device__ __forceinline__ void Consumer<C>::exponents_exact(const WorkItem& item, int first_key, bool masked) {
#pragma unroll
  for (int j = 0; j < kScores; ++j) s[j] *= p.scale_log2;
  if (masked) mask_scores<C>(p.items, item, first_key, s);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = kUnseen;
#pragma unroll
    for (int j = 0; j < kScores; ++j) {
      if ((j >> 1 & 1) == r) most = fmaxf(most, s[j]);
    }
    most = quad_max(most);
    const float before = row.reference[r], now = fmaxf(before, most);
    row.top[r] = fmaxf(row.top[r] + (before - now), most - now);
    row.reference[r] = now;
    rescale[r] = ptx::exp2_approx(before - now);
    row.sum[r] *= rescale[r];
#pragma unroll
    for (int j = 0; j < kScores; ++j) {
      if ((j >> 1 & 1) == r) s[j] -= now;
    }
  }
  moved = true;
}

template <class C>
__device__ __forceinline__ void Consumer<C>::write(const WorkItem& item) {
  const int quad = ptx::lane_id() % 4;
  QuadRows rows;
  float factor[2];
  bool visible[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = row_index(item, r);
    rows.present[r] = i < item.seqlen_q;
    rows.at[r] = {int64_t(item.out_start) + i, item.head};
    visible[r] = rows.present[r] && !visible_keys(p.items.mask, i, i + 1, item.seqlen_q, item.seqlen_k).empty();
    const float total = quad_sum(row.sum[r]), top = quad_max(row.top[r]);
    row.sum[r] = total;
    factor[r] = 1.0f / total;
    if (quad != 0 || !rows.present[r]) continue;
    const float log2_sum = log2f(total);
    store_statistics(p.to, rows.at[r], visible[r], row.reference[r] + log2_sum, log2_sum - top);
  }
#pragma unroll
  for (int j = 0; j < kAcc; ++j) o[j] = visible[j >> 1 & 1] ? o[j] * factor[j >> 1 & 1] : 0.0f;
  if (p.to.v_mean) {
    const float* mean = p.to.mean(item.sequence, item.head / p.items.group);
#pragma unroll
    for (int j = 0; j < kAcc / 4; ++j) {
      const int channel = 8 * j + 2 * quad;
      if (j % 4 == 0) __syncwarp();  // else all means are loaded first, to registers that there are not
      float x = 0, y = 0;
      if (channel < p.to.head_dim_v) x = mean[channel], y = mean[channel + 1];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        o[4 * j + 2 * r] += visible[r] ? x : 0.0f;
        o[4 * j + 2 * r + 1] += visible[r] ? y : 0.0f;
      }
    }
  }
  if (p.to.out) {
    if (p.to.wide_stores) {
      store_rows_wide(p.to.out, p.to.head_dim_v, rows, o);
    } else {
      store_rows(p.to.out, p.to.head_dim_v, rows, o);
    }
  }
  if (p.out_f32) store_rows(p.out_f32, p.to.head_dim_v, rows, o);
  if (p.items.has_mask && any_not_finite(o)) repair(item);
}

__device__ __forceinline__ float image_element(const uint16_t* image, const Bf16ImageShape& shape, int64_t head,
                                               int64_t token, int64_t channel) {
  return __uint_as_float(uint32_t(image[shape.offset(head, token, channel)]) << 16);
}

// The warp's rows once more, from visible keys only and key by key; slow, and as rare as a NaN is.
template <class C>
__device__ __forceinline__ void Consumer<C>::repair(const WorkItem& item) {
  __syncwarp();
  const int kv_head = item.head / p.items.group;
#pragma unroll 1
  for (int at = 0; at < 16; ++at) {
    const int i = item.first_row + warpgroup * kRows + warp * 16 + at;
    if (i >= item.seqlen_q) return;
    const float reference = __shfl_sync(~0u, at < 8 ? row.reference[0] : row.reference[1], at % 8 * 4);
    const float sum = __shfl_sync(~0u, at < 8 ? row.sum[0] : row.sum[1], at % 8 * 4);
    const Range keys = visible_keys(p.items.mask, i, i + 1, item.seqlen_q, item.seqlen_k);
    const auto not_finite = [&](int64_t token, int channel) {
      return !(fabsf(image_element(p.v, p.v_shape, kv_head, token, channel)) <= FLT_MAX);
    };
    if (keys.empty() || !hides<C>(p.items, item, keys, not_finite)) continue;
    float total[C::kDimV / 32] = {};
#pragma unroll 1
    for (int64_t key = keys.first; key < keys.end; ++key) {
      const int64_t token = item.k_padded + key;
      float score = 0;
#pragma unroll 1
      for (int c = ptx::lane_id(); c < C::kDim; c += 32) {
        score += image_element(p.q, p.q_shape, item.head, item.q_padded + i, c) *
                 image_element(p.k, p.k_shape, kv_head, token, c);
      }
      for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(~0u, score, step);
      const float probability = exp2f(score * p.scale_log2 - reference);
      for (int n = 0; n < C::kDimV / 32; ++n) {
        total[n] += probability * image_element(p.v, p.v_shape, kv_head, token, ptx::lane_id() + 32 * n);
      }
    }
    for (int n = 0; n < C::kDimV / 32; ++n) {
      const int channel = ptx::lane_id() + 32 * n;
      if (channel >= p.to.head_dim_v) continue;
      float x = total[n] / sum;
      if (p.to.v_mean) x += p.to.mean(item.sequence, kv_head)[channel];
      for (const Tensor* out : {&p.to.out, &p.out_f32}) {
        if (!*out) continue;
        store_element(*out, (int64_t(item.out_start) + i) * out->stride[0] + item.head * out->stride[1] + channel, x);
      }
    }
  }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) attention_fwd_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint8_t raw[];
  const uint32_t start = ptx::shared_address(raw);
  const Shared<C> shared{(start + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kItems; ++i) {
      ptx::mbarrier_init(shared.item_full(i), 1);
      ptx::mbarrier_init(shared.item_free(i), C::kConsumerWarps + 1);
    }
    for (int i = 0; i < C::kQueryBuffers; ++i) ptx::mbarrier_init(shared.query_free(i), C::kConsumerWarps);
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(shared.k_full(i), 1);
      ptx::mbarrier_init(shared.v_full(i), 1);
      ptx::mbarrier_init(shared.k_free(i), C::kConsumerWarps);
      ptx::mbarrier_init(shared.v_free(i), C::kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  clear_slack_rows(p.to, p.items.seq_q);
  __syncthreads();
  // Through a shuffle, so that the compiler knows it to be the same in the whole warp: descriptors are then uniform.
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    if (threadIdx.x == 0) schedule<C>(p, shared);
    if (threadIdx.x == 32) load_tiles<C>(p, shared);
  } else {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32 % 4, 0);
    Consumer<C>{{warpgroup - 1, warp}, p, shared}.run();
  }
}

// ---- host -----------------------------------------------------------------------------------------------------------

template <class C>
Status launch_kernel(const AttentionFwd& a, const AttentionShape& s, const AttentionPlan& plan, Params params,
                     Stream stream) {
  params.items = WorkItems::of(a, s, plan, 2 * (C::kDim + C::kDimV), C::kBlockM);
  MXFLASH_TRY(params.items.write_plan(C::kBlockM, stream));
  const Launch at{"attention_fwd: sm90_bf16",
                  dim3(uint32_t(std::min<int64_t>(multiprocessor_count(), params.items.bound(C::kBlockM)))),
                  C::kThreads, C::kBytes, stream};
  return launch(at, attention_fwd_kernel<C>, params);
}

// The kernels that there are, by their channels; a call takes the first that holds its own.
struct Kernel {
  int64_t dim, dim_v;
  decltype(&launch_kernel<Config<64, 64>>) launch;
};
template <int kDim, int kDimV>
constexpr Kernel kKernel{kDim, kDimV, launch_kernel<Config<kDim, kDimV>>};
constexpr Kernel kKernels[] = {kKernel<64, 64>, kKernel<128, 128>, kKernel<192, 128>, kKernel<192, 192>,
                               kKernel<256, 256>};
const Kernel& kernel_of(const AttentionShape& s) {
  int i = 0;
  while (kKernels[i].dim < s.head_dim || kKernels[i].dim_v < s.head_dim_v) ++i;
  return kKernels[i];
}

Status supports(const AttentionFwd& a) {
  constexpr const char* op = "attention_fwd";
  MXFLASH_TRY(check_compute_capability(op, kSm90Bf16.name, a.q.data.device.index, 90));
  MXFLASH_TRY(check_payloads(a));
  const AttentionShape s = AttentionShape::of(a);
  return check_work_items(op, kSm90Bf16.name, s,
                          {"rows", s.num_heads_q, s.total_q, s.max_seqlen_q, s.seq_q, 2 * kRows});
}

struct Workspace {
  AttentionPlan plan;
  uint16_t *q, *k, *v;  // images
  Bf16ImageShape q_shape, k_shape, v_shape;
  float* out_f32;  // what out_mx is made of
  size_t used;
  Workspace(void* base, const AttentionFwd& a) {
    const AttentionShape s = AttentionShape::of(a);
    const Kernel& kernel = kernel_of(s);
    const int64_t padded_k = padded_token_count(s.total_k, s.seq_k);
    q_shape = {s.num_heads_q, padded_token_count(s.total_q, s.seq_q), kernel.dim};
    k_shape = {s.num_heads_kv, padded_k, kernel.dim};
    v_shape = {s.num_heads_kv, padded_k, kernel.dim_v};
    Arena arena(base);
    plan = AttentionPlan::of(arena, a.seq_q, a.seq_k);
    q = arena.take<uint16_t>(q_shape.size());
    k = arena.take<uint16_t>(k_shape.size());
    v = arena.take<uint16_t>(v_shape.size());
    out_f32 = a.out_mx ? arena.take<float>(s.total_out * s.num_heads_q * s.head_dim_v) : nullptr;
    used = arena.used();
  }
};

size_t workspace(const AttentionFwd& a) { return Workspace(nullptr, a).used; }

Status run(const AttentionFwd& a, Stream stream) {
  const DeviceGuard guard(a.q.data.device.index);
  MXFLASH_TRY(guard.status());
  const AttentionShape s = AttentionShape::of(a);
  const Workspace w(a.workspace, a);
  MXFLASH_TRY(write_bf16_image(a.q, a.seq_q, w.q_shape, w.q, stream));
  MXFLASH_TRY(write_bf16_image(a.k, a.seq_k, w.k_shape, w.k, stream));
  MXFLASH_TRY(write_bf16_image(a.v, a.seq_k, w.v_shape, w.v, stream));
  const Params params{.items = {},  // launch_kernel knows its blocks
                      .to = RowOutput::of(a, s),
                      .out_f32 = make_tensor(w.out_f32, Dtype::f32, s.total_out, s.num_heads_q, s.head_dim_v),
                      .q = w.q,
                      .k = w.k,
                      .v = w.v,
                      .q_shape = w.q_shape,
                      .k_shape = w.k_shape,
                      .v_shape = w.v_shape,
                      .scale_log2 = float(s.softmax_scale * double(kLog2e))};
  MXFLASH_TRY(kernel_of(s).launch(a, s, w.plan, params, stream));
  return a.out_mx ? write_mx_rows(params.out_f32, s.seq_out(), a.out_mx, stream) : Status{};
}

}  // namespace

const Impl<AttentionFwd> kAttentionFwdSm90Bf16 = sm90_backend<AttentionFwd>(supports, run, workspace, kSm90Bf16);

}  // namespace mxflash
