// Attention backward on Hopper (sm_90a) with exact operands: BF16 wgmma. docs/hopper.md tells when to want it.
//
//   P = 2^(softmax_scale log2(e) q.k - lse log2(e))      dS = P (dout.v - delta)
//   dV = BF16(P)^T dout      dK = softmax_scale BF16(dS)^T q      dQ = softmax_scale BF16(dS) k
//
// Every MXFP8 element times its scale is a BF16 number, so operands reach the tensor cores as they are, as images that
// a pass before writes (mx/bf16_image.h); sums are in fp32, in registers from the first term to the last: no atomics,
// one order, the same bits in each run. The price is that S and dP are made twice.
//
// One kernel, launched once for each side. An item is a block of *own* rows of one head of one sequence, against which
// it takes all *streamed* tiles of 64 that they meet:
//   Of::queries   own q, dout    streams k, v        S = Q K^T,   dP = dO V^T,   dQ += dS K
//   Of::keys      own k, v       streams q, dout     S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q
//                 of all heads of the group
// A mask read from the keys' side is a window again (transposed), so both sides have the forward's work items, and
// `query` and `key` in these mean own and streamed. Accumulators of S and dP are, packed, A fragments; an image is
// K-major for products over channels and MN-major for those over tokens: nothing is transposed.
//
// CTA: persistent.
//   scheduler    a thread of warpgroup 0: takes items from a counter, loads their own rows
//   loader       another: loads the streamed tiles into two rings: of first operands (S's: k or q, there with its
//                statistics) and of second ones (dP's: v or dout); where other payloads are for contractions over
//                tokens, these follow theirs
//   consumers    two warpgroups, each 64 of the item's 128 rows; where dK and dV are too many registers for one
//                (Config::kPaired), both have the item's 64 keys: one makes S, P and dV and hands P over, the other
//                dP and dK
// Step i of a consumer: dP(i) is issued, P made of S(i) meanwhile; dV += is issued, dS made meanwhile; dK or dQ +=,
// and S(i + 1), which the next step begins with. Of a pair: P of S(i), dV +=, S(i + 1); dS of dP(i), dK +=, dP(i + 1).
// dS is made of P in fp32 for dQ, of BF16(P) for dK.
//
// Barriers (arrivals per phase; s is a stage, b an item or a buffer):
//   item_full[b]                    1 + bytes     item and its own rows are there      scheduler -> loader, consumers
//   item_free[b]                    1 + warps     nobody reads the item any more       loader, consumers -> scheduler
//   next_wanted                     1             most tiles of an item are loaded     loader -> scheduler
//   own_free[b]                     warps         nobody reads the rows any more       consumers -> scheduler
//   first_full[s], second_full[s]   1 + bytes     an operand's tile is there           loader -> consumers
//   first_free[s], second_free[s]   warps         nobody reads it any more             consumers -> loader
//   weights_full[b], _free[b]       4 warps       P was handed over, was read          pair <-> pair
// Shared memory: Config. Registers: 232 for consumers (d = 128, keys: dK and dV 128, S 32, dP 32, P and dS packed 32),
// 40 for the others.
#include "attention/attention_bwd_sm90_bf16.cuh"
#include "attention/bf16_image.cuh"
#include "attention/consumer_warp.cuh"
#include "attention/mx_rows.cuh"
#include "attention/ring.cuh"
#include "attention/rotate_rows.cuh"
#include "attention/row_output.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/descriptors.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma_bf16.cuh"
#include "runtime/check.h"
#include "runtime/cuda_backend.h"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

using namespace bwd_sm90_bf16;

constexpr int kItems = 2;  // known ahead
constexpr int kAhead = 4;  // tiles of an item that are still to be loaded when the next one is taken
constexpr float kLog2e = 1.44269504088896341f;

enum class Of { queries, keys };  // the gradients that a kernel makes

struct Image {
  const uint16_t* data = nullptr;
  int64_t tokens = 0;  // of a head
};

// Where dq, dk or dv goes.
struct Gradient {
  Tensor out;         // [tokens, heads, dim]; may be null
  Tensor f32;         // the same, contiguous, what an MX gradient is made of; or null
  Tensor mx_payload;  // u8, for rows of no sequence; or null
  int32_t dim = 0;
  int32_t rotation = 1;  // group of channels that are rotated back; 1: none
  float factor = 1;      // of the sum
  bool wide = false;     // 2-byte elements in rows aligned to 16 bytes
};

struct Params {
  WorkItems items;            // own as queries, streamed as keys
  Image own[2], streamed[2];  // over channels: S's operand, dP's operand
  Image columns[2];           // streamed, over tokens: dK's or dQ's operand, dV's; null: those above
  const float* statistics;    // of query rows
  Gradient gradient, values;  // dq or dk; dv
  RotationSigns signs;
  Tensor lse, dlse, k_mean;                    // what dlse brings to dq, or null
  int32_t own_per_streamed, streamed_per_own;  // heads
  int32_t padded_query;                        // of a shared query: its rows on the padded axis; else 0
  float scale_log2;                            // softmax_scale log2(e)
};

template <Of kOf, int kDim_, int kDimV_>
struct Config {
  static constexpr int kDim = kDim_, kDimV = kDimV_;
  static constexpr bool kKeys = kOf == Of::keys;
  static constexpr bool kPaired = kKeys && kDim + kDimV > 256;
  static constexpr int kWarpgroups = 2;
  static constexpr int kBlockM = kPaired ? kRows : kRows * kWarpgroups;
  static constexpr int kBlockN = kTile;
  static constexpr bool kSplit = false;  // no rows are packed, no streamed tiles split
  // Key blocks take row tiles from the last on, which under a causal mask all of them see: they are in step then, and
  // find in the cache what others have loaded.
  static constexpr int kTileStep = kKeys ? -1 : 1;
  static constexpr int first_tile(int first, int count) { return kKeys ? first + count - 1 : first; }
  static constexpr int kOwnBuffers = kDim + kDimV <= 256 ? 2 : 1;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kConsumerWarps = 4 * kWarpgroups;

  static constexpr int kFirstBytes = kTile * kDim * 2, kSecondBytes = kTile * kDimV * 2;  // of 64 rows
  static constexpr int kOwnBytes = kBlockM / kTile * (kFirstBytes + kSecondBytes);
  static constexpr int kStatisticsBytes = kKeys ? kTileStatistics * 4 : 0;
  static constexpr int kWeightsBytes = kPaired ? 2 * kTile * kTile : 0;  // of one of two buffers
  static constexpr int kOtherBytes = 1024 + kItems * 64 + 256;           // alignment, items, barriers
  static constexpr int kRoom = 227 * 1024 - kOtherBytes - kOwnBuffers * kOwnBytes - 2 * kWeightsBytes;
  static constexpr int kPairBytes = kFirstBytes + kSecondBytes + kStatisticsBytes;
  static constexpr int kSecondStages = kRoom / kPairBytes < 4 ? kRoom / kPairBytes : 4;
  static constexpr int kFirstStages = kSecondStages + (kRoom - kSecondStages * kPairBytes >= kPairBytes - kSecondBytes);
  static_assert(kFirstStages >= 2 && kSecondStages >= (kKeys ? 2 : 1));
  // No room for the next tile's pieces beside all of this one's, where other payloads are for products over tokens.
  static constexpr bool kTight = kFirstStages < 3 || (kPaired && kSecondStages < 3);

  // Offsets in shared memory, from an address aligned to 1024.
  static constexpr int kOwn = 0;
  static constexpr int kFirst = kOwn + kOwnBuffers * kOwnBytes;
  static constexpr int kSecond = kFirst + kFirstStages * kFirstBytes;
  static constexpr int kWeights = kSecond + kSecondStages * kSecondBytes;
  static constexpr int kStatistics = kWeights + 2 * kWeightsBytes;
  static constexpr int kItem = kStatistics + kFirstStages * kStatisticsBytes;
  static constexpr int kBarriers = kItem + kItems * 64;
  static constexpr int kEnd = kBarriers + 8 * (2 * kItems + kOwnBuffers + 2 * kFirstStages + 2 * kSecondStages + 4 + 1);
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
  __device__ uint32_t own_first(int buffer) const { return base + C::kOwn + buffer * C::kOwnBytes; }
  __device__ uint32_t own_second(int buffer) const { return own_first(buffer) + C::kBlockM / kTile * C::kFirstBytes; }
  __device__ uint32_t first(int stage) const { return base + C::kFirst + stage * C::kFirstBytes; }
  __device__ uint32_t second(int stage) const { return base + C::kSecond + stage * C::kSecondBytes; }
  __device__ uint32_t weights(int buffer) const { return base + C::kWeights + buffer * C::kWeightsBytes; }
  __device__ uint32_t statistics(int stage) const { return base + C::kStatistics + stage * C::kStatisticsBytes; }
  __device__ uint32_t item_full(int i) const { return base + C::kBarriers + 8 * i; }
  __device__ uint32_t item_free(int i) const { return item_full(kItems + i); }
  __device__ uint32_t own_free(int buffer) const { return item_full(2 * kItems + buffer); }
  __device__ uint32_t first_full(int stage) const { return own_free(C::kOwnBuffers + stage); }
  __device__ uint32_t first_free(int stage) const { return first_full(C::kFirstStages + stage); }
  __device__ uint32_t second_full(int stage) const { return first_free(C::kFirstStages + stage); }
  __device__ uint32_t second_free(int stage) const { return second_full(C::kSecondStages + stage); }
  __device__ uint32_t weights_full(int buffer) const { return second_free(C::kSecondStages + buffer); }
  __device__ uint32_t weights_free(int buffer) const { return weights_full(2 + buffer); }
  __device__ uint32_t next_wanted() const { return weights_free(2); }
};

// First rows of an item's sequence on the padded axes of S's and dP's operands: with a shared query, q has one
// sequence and dout one for each of k.
template <class C>
__device__ __forceinline__ int32_t own_start(const Params& p, const WorkItem& item, int operand) {
  return !C::kKeys && operand == 1 && p.padded_query ? item.sequence * p.padded_query : item.q_padded;
}
template <class C>
__device__ __forceinline__ int32_t streamed_start(const Params& p, const WorkItem& item, int operand) {
  return C::kKeys && operand == 0 && p.padded_query ? 0 : item.k_padded;
}

// ---- scheduler ------------------------------------------------------------------------------------------------------

// Takes items, when most tiles of the one before are loaded, and loads their own rows.
template <class C>
__device__ __forceinline__ void schedule(const Params& p, const Shared<C> shared) {
  const int32_t num_items = count_items<C>(p.items);
  Ring<kItems> at;
  Ring<C::kOwnBuffers> buffer;
  Ring<1> wanted;
#pragma unroll 1
  for (bool found = true; found; at.next(), buffer.next()) {
    ptx::mbarrier_wait(shared.item_free(at.index()), at.parity() ^ 1);
    // Not earlier: an item that waits behind a long one is late.
    ptx::mbarrier_wait(shared.next_wanted(), wanted.parity() ^ 1);
    wanted.next();
    volatile WorkItem& item = shared.item(at.index());
    found = take_item<C>(p.items, num_items, item);
    if (!found) {
      ptx::mbarrier_arrive(shared.item_full(at.index()));
      return;
    }
    const WorkItem& taken = shared.item(at.index());
    const int64_t first = item.head * p.own[0].tokens + own_start<C>(p, taken, 0) + item.first_row;
    const int64_t second = item.head * p.own[1].tokens + own_start<C>(p, taken, 1) + item.first_row;
    const uint32_t full = shared.item_full(at.index());
    ptx::mbarrier_wait(shared.own_free(buffer.index()), buffer.parity() ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, C::kOwnBytes);
    ptx::bulk_load(shared.own_first(buffer.index()), p.own[0].data + first * C::kDim,
                   C::kBlockM / kTile * C::kFirstBytes, full);
    ptx::bulk_load(shared.own_second(buffer.index()), p.own[1].data + second * C::kDimV,
                   C::kBlockM / kTile * C::kSecondBytes, full);
  }
}

// ---- loader ---------------------------------------------------------------------------------------------------------

// Loads the streamed tiles of item after item, in the order in which consumers take them.
template <class C>
__device__ __forceinline__ void load_tiles(const Params& p, const Shared<C> shared) {
  Ring<kItems> at;
  Ring<C::kFirstStages> first_stage;
  Ring<C::kSecondStages> second_stage;
  const auto load_first = [&](const uint16_t* from, const float* statistics) {
    const int stage = first_stage.index();
    const uint32_t full = shared.first_full(stage);
    ptx::mbarrier_wait(shared.first_free(stage), first_stage.parity() ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, C::kFirstBytes + (statistics ? C::kStatisticsBytes : 0));
    ptx::bulk_load(shared.first(stage), from, C::kFirstBytes, full);
    if (statistics) ptx::bulk_load(shared.statistics(stage), statistics, C::kStatisticsBytes, full);
    first_stage.next();
  };
  const auto load_second = [&](const uint16_t* from) {
    const int stage = second_stage.index();
    ptx::mbarrier_wait(shared.second_free(stage), second_stage.parity() ^ 1);
    ptx::mbarrier_arrive_expect_tx(shared.second_full(stage), C::kSecondBytes);
    ptx::bulk_load(shared.second(stage), from, C::kSecondBytes, shared.second_full(stage));
    second_stage.next();
  };
  while (true) {
    ptx::mbarrier_wait(shared.item_full(at.index()), at.parity());
    const WorkItem& item = shared.item(at.index());
    if (!item.valid) return;
    const int64_t start[2] = {streamed_start<C>(p, item, 0), streamed_start<C>(p, item, 1)};
    const int32_t head = item.head * p.streamed_per_own / p.own_per_streamed;
    int32_t tile = C::first_tile(item.first_tile, item.num_tiles), left = item.num_tiles;
    ptx::mbarrier_arrive(shared.item_free(at.index()));
    at.next();
    int32_t until_next = max(left * p.streamed_per_own - kAhead, 0);
    if (left == 0) ptx::mbarrier_arrive(shared.next_wanted());
#pragma unroll 1
    for (; left > 0; --left, tile += C::kTileStep) {
#pragma unroll 1
      for (int32_t h = head; h < head + p.streamed_per_own; ++h) {
        if (until_next-- == 0) ptx::mbarrier_arrive(shared.next_wanted());
        const int64_t first = h * p.streamed[0].tokens + start[0] + tile * kTile;
        const int64_t second = h * p.streamed[1].tokens + start[1] + tile * kTile;
        load_first(p.streamed[0].data + first * C::kDim,
                   C::kKeys ? p.statistics + second / kTile * kTileStatistics : nullptr);
        load_second(p.streamed[1].data + second * C::kDimV);
        if (!p.columns[0].data) continue;
        if (C::kKeys) load_second(p.columns[1].data + second * C::kDimV);
        load_first(p.columns[0].data + first * C::kDim, nullptr);
      }
    }
  }
}

// ---- consumers ------------------------------------------------------------------------------------------------------

// The same in all threads of a warp, and known to be.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// kValues: makes dv; kGradient: makes dk or dq.
template <class C, bool kValues, bool kGradient>
struct Consumer : ConsumerWarp {
  static constexpr int kElements = C::kBlockN / 2;  // registers of S, of dP
  static constexpr int kSteps = C::kBlockN / 16;    // of a product over tokens
  using Fragments = uint32_t[kSteps][4];
  static constexpr bool kWeights = kValues || !C::kPaired;  // makes P; else takes it from the other warpgroup

  const Params& p;
  const Shared<C> shared;

  float s[kElements], dp[kElements];
  float gradient[kGradient ? C::kDim / 2 : 4], values[kValues ? C::kDimV / 2 : 4];
  float lse[2], delta[2];  // of own query rows
  uint32_t items = 0;      // done
  Ring<C::kFirstStages> next_first;
  Ring<C::kSecondStages> next_second;
  Ring<2> handed;     // P from one warpgroup to the other
  int first, second;  // stages of the present tile

  __device__ __forceinline__ int take_first() {
    const int stage = next_first.index();
    ptx::mbarrier_wait(shared.first_full(stage), next_first.parity());
    next_first.next();
    return stage;
  }
  __device__ __forceinline__ int take_second() {
    const int stage = next_second.index();
    ptx::mbarrier_wait(shared.second_full(stage), next_second.parity());
    next_second.next();
    return stage;
  }

  // Of 64 rows in shared memory, K-major.
  template <int kDim>
  __device__ static uint64_t rows_at(uint32_t address) {
    return ptx::matrix_descriptor(address, ptx::Swizzle::b128, 16, kDim / int(kAtomChannels) * 1024);
  }
  // d = A B^T over kDim channels.
  template <int kDim>
  __device__ __forceinline__ void multiply(float (&d)[kElements], uint64_t a, uint64_t b) const {
    ptx::fence_registers(d);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const int at = k / 4 * 1024 + k % 4 * 32;  // an atom is 64 channels wide
      ptx::wgmma_bf16(d, ptx::advance(a, at), ptx::advance(b, at), k > 0);
    }
    ptx::wgmma_commit();
  }
  // d += A B over 64 rows in shared memory, MN-major.
  template <int kAcc>
  __device__ __forceinline__ void accumulate(float (&d)[kAcc], const Fragments& a, uint32_t rows) const {
    constexpr int kStride = 2 * kAcc / int(kAtomChannels) * 1024;
    const uint64_t b = ptx::matrix_descriptor(rows, ptx::Swizzle::b128, 1024, kStride);
    ptx::fence_registers(d);
    ptx::wgmma_fence();
#pragma unroll
    for (int g = 0; g < kSteps; ++g) ptx::wgmma_bf16_mn(d, a[g], ptx::advance(b, 2 * kStride * g), true);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ static void pack(const float (&x)[kElements], Fragments& a) {
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[g][i] = pack_half(Dtype::bf16, x[8 * g + 2 * i], x[8 * g + 2 * i + 1]);
    }
  }
  // Element i of what was packed.
  __device__ __forceinline__ static float unpack(const Fragments& a, int i) {
    const uint32_t pair = a[i / 8][i % 8 / 2];
    return __uint_as_float(i & 1 ? pair & 0xFFFF0000u : pair << 16);
  }
  // Calls body(element, statistic) with the lse (which = 0) or the delta of each element's query.
  template <class Body>
  __device__ __forceinline__ void with_statistics(int which, Body&& body) const {
#pragma unroll
    for (int piece = 0; piece < kSteps; ++piece) {
      float4 x{};
      if (C::kKeys) {
        x = ptx::load_shared<float4>(shared.statistics(first) + 4 * (kTile * which + 16 * piece) +
                                     16 * (ptx::lane_id() % 4));
      }
      const float of_column[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int r = i >> 1 & 1;
        body(8 * piece + i, C::kKeys ? of_column[2 * (i >> 2) + (i & 1)] : which ? delta[r] : lse[r]);
      }
    }
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; ++items) {
      ptx::mbarrier_wait(shared.item_full(items % kItems), items / kItems & 1);
      if (!uniform(item().valid)) return;
      differentiate();
      release(shared.item_free(items % kItems));
    }
  }
  // Neither its address nor what is in it is worth a register in the main loop.
  __device__ __forceinline__ const WorkItem& item() const { return shared.item(items % kItems); }

  __device__ __forceinline__ void differentiate() {
    const int first_row = item().first_row + warpgroup * kRows, buffer = items % C::kOwnBuffers;
    const RowTiles tiles = row_tiles<C>(p.items, item(), first_row, min(first_row + kRows, item().seqlen_q));
    const int whole = uniform(tiles.whole), whole_end = uniform(tiles.whole_end);
    const int num_tiles = uniform(item().num_tiles);
    int tile = C::first_tile(uniform(item().first_tile), num_tiles);
    const uint64_t own_first = rows_at<C::kDim>(shared.own_first(buffer) + warpgroup * C::kFirstBytes);
    const uint64_t own_second = rows_at<C::kDimV>(shared.own_second(buffer) + warpgroup * C::kSecondBytes);
#pragma unroll
    for (float& x : gradient) x = 0;
#pragma unroll
    for (float& x : values) x = 0;
    if constexpr (!C::kKeys) load_statistics(item());
    int left = p.streamed_per_own * num_tiles, heads = p.streamed_per_own;
    if (left > 0) {
      if constexpr (kWeights) {
        first = take_first();
        multiply<C::kDim>(s, own_first, rows_at<C::kDim>(shared.first(first)));
      } else {
        second = take_second();
        multiply<C::kDimV>(dp, own_second, rows_at<C::kDimV>(shared.second(second)));
      }
      ptx::wgmma_wait<0>();
      ptx::fence_registers(kWeights ? s : dp);
#pragma unroll 1
      for (; left > 0; --left) {
        step(own_first, own_second, tile, tile + 1 < whole || tile >= whole_end, left == 1);
        if (--heads == 0) heads = p.streamed_per_own, tile += C::kTileStep;
      }
    }
    release(shared.own_free(items % C::kOwnBuffers));
    if (item().first_row + warpgroup * kRows >= item().seqlen_q) return;
    if constexpr (kValues && kGradient) {
      // One copy of the code, for the instruction cache's sake.
#pragma unroll 1
      for (int n = 0; n < 2; ++n) {
        write(item(), n ? p.gradient : p.values, values);
#pragma unroll
        for (int i = 0; i < C::kDim / 2; ++i) values[i] = gradient[i];
      }
    } else if constexpr (kValues) {
      write(item(), p.values, values);
    } else {
      write(item(), p.gradient, gradient);
    }
  }

  // Of this thread's own rows.
  __device__ __forceinline__ void load_statistics(const WorkItem& item) {
    const int64_t start = item.head * p.own[1].tokens + own_start<C>(p, item, 1) + item.first_row + warpgroup * kRows;
    const float* tile = p.statistics + start / kTile * kTileStatistics;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = statistics_index(warp * 16 + ptx::lane_id() / 4 + 8 * r);
      lse[r] = tile[at];
      delta[r] = tile[kTile + at];
    }
  }

  // To the same thread of the other warpgroup.
  __device__ __forceinline__ void hand_over(const Fragments& weights) {
    ptx::mbarrier_wait(shared.weights_free(handed.index()), handed.parity() ^ 1);
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
      ptx::store_shared(weights_address(g),
                        make_float4(__uint_as_float(weights[g][0]), __uint_as_float(weights[g][1]),
                                    __uint_as_float(weights[g][2]), __uint_as_float(weights[g][3])));
    }
    release(shared.weights_full(handed.index()));
    handed.next();
  }
  __device__ __forceinline__ void receive(Fragments& weights) {
    ptx::mbarrier_wait(shared.weights_full(handed.index()), handed.parity());
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
      const float4 x = ptx::load_shared<float4>(weights_address(g));
      weights[g][0] = __float_as_uint(x.x), weights[g][1] = __float_as_uint(x.y);
      weights[g][2] = __float_as_uint(x.z), weights[g][3] = __float_as_uint(x.w);
    }
    release(shared.weights_free(handed.index()));
    handed.next();
  }
  __device__ __forceinline__ uint32_t weights_address(int g) const {
    return shared.weights(handed.index()) + 16 * (128 * g + 32 * warp + ptx::lane_id());
  }

  // One streamed tile, whose S (or dP, where P comes from the other warpgroup) is there. Leaves that of the next one.
  __device__ __forceinline__ void step(uint64_t own_first, uint64_t own_second, int tile, bool masked, bool last) {
    Fragments weights, ds;
    if constexpr (kWeights) {
      with_statistics(0, [&](int i, float of_row) { s[i] = fmaf(s[i], p.scale_log2, -of_row); });
      if (masked) mask_scores<C>(p.items, item(), tile * kTile, s);
      second = take_second();
      if constexpr (kGradient) multiply<C::kDimV>(dp, own_second, rows_at<C::kDimV>(shared.second(second)));
#pragma unroll
      for (float& x : s) x = ptx::exp2_approx(x);
      if (kValues) pack(s, weights);
      if (C::kPaired) hand_over(weights);
    } else {
      release(shared.second_free(second));
      first = take_first();
      receive(weights);
    }
    // Other payloads for products over tokens, where there are.
    const bool columns = p.columns[0].data != nullptr;
    const int third = C::kKeys && columns ? take_second() : second;
    if constexpr (kValues) accumulate(values, weights, shared.second(third));
    const int fourth = columns ? take_first() : first;
    if constexpr (kGradient) {
      if constexpr (kWeights) {
        ptx::wgmma_wait<kValues ? 1 : 0>();
        ptx::fence_registers(dp);
        if (!kValues) release(shared.second_free(second));
      }
      with_statistics(1, [&](int i, float of_row) {
        dp[i] = (kValues || C::kPaired ? unpack(weights, i) : s[i]) * (dp[i] - of_row);
      });
      pack(dp, ds);
      accumulate(gradient, ds, shared.first(fourth));
    }
    const int before = first;
    const auto give_back = [&] {
      release(shared.first_free(before));
      if (kValues) release(shared.second_free(second));
      if (!columns) return;
      if (C::kKeys) release(shared.second_free(third));
      release(shared.first_free(fourth));
    };
    const bool early = C::kTight && columns && !last;
    if (early) {
      ptx::wgmma_wait<0>();
      give_back();
    }
    // After the last tile once more, with own rows, for nothing: a branch would cost more.
    if constexpr (kWeights) {
      if (!last) first = take_first();
      multiply<C::kDim>(s, own_first, last ? own_first : rows_at<C::kDim>(shared.first(first)));
    } else {
      if (!last) second = take_second();
      multiply<C::kDimV>(dp, own_second, last ? own_second : rows_at<C::kDimV>(shared.second(second)));
    }
    ptx::wgmma_wait<1>();
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
      if constexpr (kValues) ptx::fence_registers(weights[g]);
      if constexpr (kGradient) ptx::fence_registers(ds[g]);
    }
    if constexpr (kValues) ptx::fence_registers(values);
    if constexpr (kGradient) ptx::fence_registers(gradient);
    if (!early) give_back();
    ptx::wgmma_wait<0>();
    ptx::fence_registers(kWeights ? s : dp);
  }

  template <int kAcc>
  __device__ __forceinline__ void write(const WorkItem& item, const Gradient& to, float (&x)[kAcc]) const {
    const int quad = ptx::lane_id() % 4;
    QuadRows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row_index(item, r);
      rows.present[r] = i < item.seqlen_q;
      rows.at[r] = {int64_t(item.out_start) + i, item.head};
    }
#pragma unroll
    for (float& value : x) value *= to.factor;
    if (to.rotation > 1) rotate_back_rows(x, to.rotation, p.signs, quad);
    if constexpr (!C::kKeys) {
      if (p.k_mean) add_k_mean(item, rows, to.factor, x);
    }
    if (to.out) {
      if (to.wide) {
        store_rows_wide(to.out, to.dim, rows, x);
      } else {
        store_rows(to.out, to.dim, rows, x);
      }
    }
    if (to.f32) store_rows(to.f32, to.dim, rows, x);
  }

  // The caller's lse holds softmax_scale q.k_mean, so dlse reaches q through it.
  template <int kAcc>
  __device__ __forceinline__ void add_k_mean(const WorkItem& item, const QuadRows& rows, float factor,
                                             float (&x)[kAcc]) const {
    const int kv_head = item.head / p.own_per_streamed, quad = ptx::lane_id() % 4;
    const float* mean = static_cast<const float*>(p.k_mean.data) + item.sequence * p.k_mean.stride[0] +
                        kv_head * p.k_mean.stride[1] + 2 * quad;
    float f[2] = {0, 0};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = rows.at[r].row;
      if (!rows.present[r]) continue;
      if (static_cast<const float*>(p.lse.data)[item.head * p.lse.stride[0] + row] == -INFINITY) continue;
      f[r] = factor * static_cast<const float*>(p.dlse.data)[item.head * p.dlse.stride[0] + row];
    }
#pragma unroll
    for (int j = 0; j < kAcc / 4; ++j) {
      if (8 * j + 2 * quad >= p.gradient.dim) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) x[4 * j + i] = fmaf(f[i >> 1], mean[8 * j + (i & 1)], x[4 * j + i]);
    }
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

// Rows of no sequence, which only a call with cu_seqlens has, are zero. All threads of the grid share them.
__device__ inline void clear_slack_rows(const WorkItems& items, const Gradient& g) {
  if (!items.seq_q.cu_seqlens || g.dim == 0) return;
  const int64_t first = items.seq_q.cu_seqlens[items.seq_q.batch], rows = items.total_q - first;
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t at = thread; at < rows * items.num_heads; at += step) {
    const int64_t row = first + at % rows, head = at / rows;
    for (int c = 0; c < g.dim; ++c) {
      if (g.out) store_element(g.out, row * g.out.stride[0] + head * g.out.stride[1] + c, 0);
      if (!g.mx_payload) continue;
      static_cast<uint8_t*>(g.mx_payload.data)[row * g.mx_payload.stride[0] + head * g.mx_payload.stride[1] + c] = 0;
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) attention_bwd_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint8_t raw[];
  const uint32_t start = ptx::shared_address(raw);
  const Shared<C> shared{(start + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kItems; ++i) {
      ptx::mbarrier_init(shared.item_full(i), 1);
      ptx::mbarrier_init(shared.item_free(i), C::kConsumerWarps + 1);
    }
    for (int i = 0; i < C::kOwnBuffers; ++i) ptx::mbarrier_init(shared.own_free(i), C::kConsumerWarps);
    for (int i = 0; i < C::kFirstStages; ++i) {
      ptx::mbarrier_init(shared.first_full(i), 1);
      ptx::mbarrier_init(shared.first_free(i), C::kConsumerWarps);
    }
    for (int i = 0; i < C::kSecondStages; ++i) {
      ptx::mbarrier_init(shared.second_full(i), 1);
      ptx::mbarrier_init(shared.second_free(i), C::kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(shared.weights_full(i), 4);
      ptx::mbarrier_init(shared.weights_free(i), 4);
    }
    ptx::mbarrier_init(shared.next_wanted(), 1);
    ptx::fence_mbarrier_init();
  }
  clear_slack_rows(p.items, p.gradient);
  clear_slack_rows(p.items, p.values);
  __syncthreads();
  // Through a shuffle, so that the compiler knows it to be the same in the whole warp: descriptors are then uniform.
  const int warpgroup = uniform(int(threadIdx.x) / 128);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) schedule<C>(p, shared);
    if (threadIdx.x == 32) load_tiles<C>(p, shared);
    return;
  }
  ptx::setmaxnreg_inc<232>();
  const int warp = uniform(int(threadIdx.x) / 32 % 4);
  if constexpr (!C::kPaired) {
    Consumer<C, C::kKeys, true>{{warpgroup - 1, warp}, p, shared}.run();
  } else if (warpgroup == 1) {
    Consumer<C, true, false>{{0, warp}, p, shared}.run();
  } else {
    Consumer<C, false, true>{{0, warp}, p, shared}.run();
  }
}

// ---- host -----------------------------------------------------------------------------------------------------------

template <class C>
Status launch_kernel(const AttentionShape& own, const Mask& mask, const AttentionPlan& plan, Params params,
                     Stream stream) {
  const AttentionFwd roles{.seq_q = own.seq_q, .seq_k = own.seq_k, .mask = mask};
  params.items = WorkItems::of(roles, own, plan, params.streamed_per_own * 2 * (C::kDim + C::kDimV), C::kBlockM);
  params.items.ascending = C::kKeys;
  // More heads at a time than the cache holds where their blocks are too few to keep the card busy to the end; and in
  // even portions.
  const int64_t wanted = ceil_div(2 * multiprocessor_count(), std::max(params.items.max_blocks, 1));
  const int64_t heads = int64_t(own.seq_q.cu_seqlens ? 1 : params.items.batch) * params.items.num_heads;
  const int64_t portions = ceil_div(heads, std::max<int64_t>(params.items.heads_at_once, wanted));
  params.items.heads_at_once = int32_t(ceil_div(heads, portions));
  MXFLASH_TRY(params.items.write_plan(C::kBlockM, stream));
  const Launch at{"attention_bwd: sm90_bf16",
                  dim3(uint32_t(std::min<int64_t>(multiprocessor_count(), params.items.bound(C::kBlockM)))),
                  C::kThreads, C::kBytes, stream};
  return launch(at, attention_bwd_kernel<C>, params);
}

// The kernels that there are, by their channels; a call takes the first that holds its own.
struct Kernel {
  int64_t dim, dim_v;
  decltype(&launch_kernel<Config<Of::queries, 64, 64>>) queries, keys;
};
template <int kDim, int kDimV>
constexpr Kernel kKernel{kDim, kDimV, launch_kernel<Config<Of::queries, kDim, kDimV>>,
                         launch_kernel<Config<Of::keys, kDim, kDimV>>};
constexpr Kernel kKernels[] = {kKernel<64, 64>, kKernel<128, 128>, kKernel<192, 128>, kKernel<192, 192>,
                               kKernel<256, 256>};
const Kernel& kernel_of(const AttentionShape& s) {
  int i = 0;
  while (kKernels[i].dim < s.head_dim || kKernels[i].dim_v < s.head_dim_v) ++i;
  return kKernels[i];
}

// The call from the keys' side: work items take these for rows, and the rows that see them for keys.
AttentionShape from_keys(const AttentionShape& s) {
  AttentionShape t = s;
  t.total_q = s.total_k, t.total_k = s.total_out;
  t.num_heads_q = s.num_heads_kv, t.group = 1;
  t.max_seqlen_q = s.max_seqlen_k, t.max_seqlen_k = s.max_seqlen_q;
  t.seq_q = s.seq_k, t.seq_k = s.seq_out();
  t.total_out = s.total_k, t.shared_q = false;
  return t;
}

Status supports(const AttentionBwd& a) {
  MXFLASH_TRY(check_compute_capability("attention_bwd", kSm90Bf16.name, a.q.data.device.index, 90));
  const AttentionShape s = AttentionShape::of(a);
  constexpr const char* op = "attention_bwd";
  MXFLASH_TRY(
      check_work_items(op, kSm90Bf16.name, s, {"rows", s.num_heads_q, s.total_q, s.max_seqlen_q, s.seq_q, kRows}));
  return check_work_items(op, kSm90Bf16.name, s, {"keys", s.num_heads_kv, s.total_k, s.max_seqlen_k, s.seq_k, kRows});
}

struct Operand {
  const MxTensor* tensor;
  Jagged seq;
  Bf16ImageShape shape;
  uint16_t* image;
};

struct Workspace {
  AttentionPlan plan[2];  // of queries, of keys
  Operand q, k, v, dout;
  Operand q_col, k_col, dout_col;  // without image where the operand above serves
  float* statistics;
  float* partial;  // dq of each sequence, where they share the query
  float *dk, *dv;  // what dk_mx and dv_mx are made of
  size_t used;
  Workspace(void* base, const AttentionBwd& a) {
    const AttentionShape s = AttentionShape::of(a);
    const Kernel& kernel = kernel_of(s);
    const Jagged seq_out = s.seq_out();
    Arena arena(base);
    plan[0] = AttentionPlan::of(arena, s.seq_q, s.seq_k);
    plan[1] = AttentionPlan::of(arena, s.seq_k, seq_out);
    const auto operand = [&](const MxTensor& t, int64_t heads, int64_t tokens, const Jagged& seq, int64_t dim) {
      const Bf16ImageShape shape{heads, padded_token_count(tokens, seq), dim};
      return Operand{&t, seq, shape, t ? arena.take<uint16_t>(shape.size()) : nullptr};
    };
    q = operand(a.q, s.num_heads_q, s.total_q, s.seq_q, kernel.dim);
    k = operand(a.k, s.num_heads_kv, s.total_k, s.seq_k, kernel.dim);
    v = operand(a.v, s.num_heads_kv, s.total_k, s.seq_k, kernel.dim_v);
    dout = operand(a.dout, s.num_heads_q, s.total_out, seq_out, kernel.dim_v);
    q_col = operand(a.q_col, s.num_heads_q, s.total_q, s.seq_q, kernel.dim);
    k_col = operand(a.k_col, s.num_heads_kv, s.total_k, s.seq_k, kernel.dim);
    dout_col = operand(a.dout_col, s.num_heads_q, s.total_out, seq_out, kernel.dim_v);
    statistics = arena.take<float>(s.num_heads_q * dout.shape.tokens / kTile * kTileStatistics);
    partial = s.shared_q ? arena.take<float>(s.total_out * s.num_heads_q * s.head_dim) : nullptr;
    dk = a.dk_mx ? arena.take<float>(s.total_k * s.num_heads_kv * s.head_dim) : nullptr;
    dv = a.dv_mx ? arena.take<float>(s.total_k * s.num_heads_kv * s.head_dim_v) : nullptr;
    used = arena.used();
  }
};

size_t workspace(const AttentionBwd& a) { return Workspace(nullptr, a).used; }

Gradient gradient_of(const Tensor& out, const MxTensor& mx, float* f32, int64_t dim, double factor, bool rotated) {
  const Tensor& like = mx ? mx.data : out;
  return {.out = out,
          .f32 = f32 ? make_tensor(f32, Dtype::f32, like.shape[0], like.shape[1], dim) : Tensor{},
          .mx_payload = mx ? mx.data : Tensor{},
          .dim = int32_t(dim),
          .rotation = rotated ? int32_t(rotation_group(dim)) : 1,
          .factor = float(factor),
          .wide = out && out.dtype != Dtype::f32 && reinterpret_cast<uintptr_t>(out.data) % 16 == 0 &&
                  out.stride[0] % 8 == 0 && out.stride[1] % 8 == 0};
}

Image image_of(const Operand& o) { return {o.image, o.shape.tokens}; }
const Operand& or_else(const Operand& given, const Operand& fallback) { return given.image ? given : fallback; }

Params params_of(const AttentionBwd& a, const Workspace& w) {
  const AttentionShape s = AttentionShape::of(a);
  return {.statistics = w.statistics,
          .signs = RotationSigns::of(a.rotate_seed),
          .own_per_streamed = 1,
          .streamed_per_own = 1,
          .padded_query = s.shared_q ? int32_t(w.q.shape.tokens) : 0,
          .scale_log2 = float(s.softmax_scale * double(kLog2e))};
}

Params keys_params(const AttentionBwd& a, const Workspace& w) {
  const AttentionShape s = AttentionShape::of(a);
  Params p = params_of(a, w);
  p.own[0] = image_of(w.k), p.own[1] = image_of(w.v);
  p.streamed[0] = image_of(w.q), p.streamed[1] = image_of(w.dout);
  if (w.q_col.image || w.dout_col.image) {
    p.columns[0] = image_of(or_else(w.q_col, w.q)), p.columns[1] = image_of(or_else(w.dout_col, w.dout));
  }
  p.gradient = gradient_of(a.dk, a.dk_mx, w.dk, s.head_dim, s.softmax_scale, a.rotate_qk);
  p.values = gradient_of(a.dv, a.dv_mx, w.dv, s.head_dim_v, 1, false);
  p.streamed_per_own = int32_t(s.group);
  return p;
}

Params queries_params(const AttentionBwd& a, const Workspace& w) {
  const AttentionShape s = AttentionShape::of(a);
  Params p = params_of(a, w);
  p.own[0] = image_of(w.q), p.own[1] = image_of(w.dout);
  p.streamed[0] = image_of(w.k), p.streamed[1] = image_of(w.v);
  if (w.k_col.image) p.columns[0] = image_of(w.k_col);
  Tensor dq = a.dq;
  if (s.shared_q) dq = make_tensor(w.partial, Dtype::f32, s.total_out, s.num_heads_q, s.head_dim);
  p.gradient = gradient_of(dq, {}, nullptr, s.head_dim, s.softmax_scale, a.rotate_qk);
  if (a.dlse && a.k_mean) p.lse = a.lse, p.dlse = a.dlse, p.k_mean = a.k_mean;
  p.own_per_streamed = int32_t(s.group);
  return p;
}

Status run(const AttentionBwd& a, Stream stream) {
  const DeviceGuard guard(a.q.data.device.index);
  MXFLASH_TRY(guard.status());
  const AttentionShape s = AttentionShape::of(a);
  const Kernel& kernel = kernel_of(s);
  const Workspace w(a.workspace, a);
  for (const Operand* o : {&w.q, &w.k, &w.v, &w.dout, &w.q_col, &w.k_col, &w.dout_col}) {
    if (o->image) MXFLASH_TRY(write_bf16_image(*o->tensor, o->seq, o->shape, o->image, stream));
  }
  MXFLASH_TRY(write_statistics(a, w.dout.image, w.dout.shape, w.statistics, stream));
  const Params keys = keys_params(a, w);
  MXFLASH_TRY(kernel.keys(from_keys(s), transposed(a.mask), w.plan[1], keys, stream));
  MXFLASH_TRY(kernel.queries(s, a.mask, w.plan[0], queries_params(a, w), stream));
  if (s.shared_q) MXFLASH_TRY(sum_sequences(a, w.partial, stream));
  if (a.dk_mx) MXFLASH_TRY(write_mx_rows(keys.gradient.f32, s.seq_k, a.dk_mx, stream));
  return a.dv_mx ? write_mx_rows(keys.values.f32, s.seq_k, a.dv_mx, stream) : Status{};
}

}  // namespace

const Impl<AttentionBwd> kAttentionBwdSm90Bf16 = sm90_backend<AttentionBwd>(supports, run, workspace, kSm90Bf16);

}  // namespace mxflash
