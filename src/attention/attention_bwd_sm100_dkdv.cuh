// dK and dV on Blackwell (sm_100a). docs/blackwell.md tells the why, attention_bwd_sm100.cuh has the numbers.
//
//   S^T = K Q^T    P8 = 2^(S - lse')    dP^T = V dO^T    dS8 = P8 (dP - delta)    dV += P8^T dO    dK += dS8^T Q
//
// An item is 128 keys of one key head of one sequence, over all heads of its group and all tiles of 64 rows that see
// one of the keys. K and V stay in tensor memory and are, like P8 and dS8, A operands there; lanes are keys. Sums stay
// in tensor memory from the first term to the last: no atomics, one order, the same bits in each run.
//
// CTA: persistent, 16 warps.
//   warpgroups 0..2   a tile each in turn: P8 and dS8, a thread has a key, a warp the keys of a block of dS.
//                     0 and 1 also load K and V, and store dV and dK
//   warp 12, warp 14  products, copies of their scales, commits: S and dP; dV and dK
//   warp 13           loads tiles, scales, statistics                                attention_bwd_sm100_load.cuh
// Order of products, n over all tiles of the CTA: S(n + 1), dP(n), and, by the other thread, dV(n), dK(n): the tensor
// core has work while a warpgroup makes P8 of one tile and another one dS8 of the tile before. Between the two threads
// nothing is ordered but by warpgroups: they have read S(n) and dP(n), so these are done, when dV(n) and dK(n) begin.
//
// Barriers (arrivals per phase; w is a warpgroup: what they take turns at has a copy for each, since one that skips a
// phase could not tell it by its parity):
//   full[s]             2 + bytes  a tile, its scales and statistics are there      load -> products, warpgroups
//   empty[s]            commit     nobody reads it any more                         products -> load
//   own_full            256        K, V and their scales are there                  warpgroups 0, 1 -> products
//                       128        the pass for dV alone: K                         warpgroup 0 -> products
//   scores_full[w]      commit     S(n) is there                                    products -> warpgroup n % 3
//   scores_free         128        it has been read (dV alone: a barrier a buffer)  warpgroup -> products
//   gradients_full[w], gradients_free                                               the same for dP(n)
//   weights_full        128        P8(n) is there                                   warpgroup -> products
//   weights_free[w]     commit     dV(n) is done with it                            products -> warpgroup (n + 1) % 3
//   ds_full, ds_free[w]                                                             the same for dS8(n) and dK(n)
//   sums_full           commit     dK and dV of the item are complete               products -> warpgroups 0, 1
//   sums_free           256        they have been read                              warpgroups 0, 1 -> products
// Copies of scales go to columns that an earlier product has read: each is behind a barrier that this product's commit
// had to pass (Q's of S: scores_free, and so on), so no order of copies after products is needed.
//
// Tensor memory, dim 128: 512 columns, nothing aliased (Config). Shared memory: six stages of 20 KiB. Registers: 144
// for the warpgroups, 80 for the others.
//
// Beyond 128 channels columns are short. 192/128: K and V are A operands from shared memory, and the scales of dV and
// dK take turns at the same columns. 256: dV and dK alone are 512 columns, so the kernel runs twice, once for each
// (Sums), both times with the same S: dV with two buffers of it, dK with V in shared memory and five stages.
#pragma once

#include "attention/attention_bwd_sm100_load.cuh"

namespace mxflash::bwd_sm100 {

template <int kDim_, int kDimV_, Sums kSums>
struct KeysConfig {
  static constexpr int kDim = kDim_, kDimV = kDimV_;  // of q and k, dout and v
  static constexpr int kRowBlocks = kTileRows / 32;
  using Tile = Stage<true, kDim, kDimV, kSums>;
  static constexpr bool kMakesDv = Tile::kMakesDv, kMakesDk = Tile::kMakesDs;
  static constexpr bool kWide = kDim > 128;
  // What is in registers at once, of which there are none to spare: channels of an own row, columns of dP and S.
  static constexpr int kAtOnce = kWide ? 128 : kDim, kDsAtOnce = kWide ? 16 : 32, kScoresAtOnce = kWide ? 32 : 64;
  // Own rows that tensor memory has no room for.
  static constexpr bool kFirstInShared = kWide && kMakesDv && kMakesDk, kSecondInShared = kWide;
  // Scales of dV and dK in the same columns.
  static constexpr bool kScalesInTurn = Tile::kOneColumnTile;
  static constexpr uint32_t kBuffers = kMakesDk ? 1 : 2;  // of S

  // Columns of tensor memory.
  static constexpr uint32_t kFirst = 0;                                                // K, four channels a column
  static constexpr uint32_t kSecond = kFirst + (kFirstInShared ? 0 : kDim / 4);        // V
  static constexpr uint32_t kScores = kSecond + (kSecondInShared ? 0 : kDimV / 4);     // S^T
  static constexpr uint32_t kGradients = kScores + kBuffers * kTileRows;               // dP^T
  static constexpr uint32_t kWeights = kGradients + (kMakesDk ? kTileRows : 0);        // P8^T, four rows a column
  static constexpr uint32_t kDs = kWeights + (kMakesDv ? kTileRows / 4 : 0);           // dS8^T
  static constexpr uint32_t kKeysScale = kDs + (kMakesDk ? kTileRows / 4 : 0);         // scales, of A and B in turn: K
  static constexpr uint32_t kQueryScale = kKeysScale + kGroups<kDim> * kScaleColumns;  // and Q of S,
  static constexpr uint32_t kKeyValuesScale = kQueryScale + kBuffers * kScaleColumns;  // V and dO of dP,
  static constexpr uint32_t kDoutScale = kKeyValuesScale + (kMakesDk ? kGroups<kDimV> * kScaleColumns : 0);
  static constexpr uint32_t kWeightsScale = kDoutScale + (kMakesDk ? kScaleColumns : 0);  // P8 and dO of dV,
  static constexpr uint32_t kDoutColumnScale = kWeightsScale + (kMakesDv ? kScaleColumns : 0);
  static constexpr uint32_t kDsScale =  // dS8 and Q of dK
      kScalesInTurn ? kWeightsScale : kDoutColumnScale + (kMakesDv ? kGroups<kDimV> * kScaleColumns : 0);
  static constexpr uint32_t kQueryColumnScale = kDsScale + (kMakesDk ? kScaleColumns : 0);
  static constexpr uint32_t kScalesEnd = kQueryColumnScale + (kMakesDk ? kGroups<kDim> * kScaleColumns : 0);
  static constexpr uint32_t kDv = (kScalesEnd + 31) / 32 * 32;
  static constexpr uint32_t kDk = kDv + (kMakesDv ? kDimV : 0);
  static constexpr uint32_t kColumns = 512;
  static_assert(kDk + (kMakesDk ? kDim : 0) <= kColumns && kKeysScale % kScaleColumns == 0);
  static_assert(!kScalesInTurn || kDoutColumnScale == kQueryColumnScale);

  // Shared memory, from an address aligned to 1024.
  static constexpr uint32_t kOwnBytes =
      kOwnRows * ((kFirstInShared ? kDim : 0) + (kSecondInShared && kMakesDk ? kDimV : 0));
  static constexpr int kStages = stages_beside(kOwnBytes + 8 * 1024, Tile::kBytes);
  static_assert(kStages >= kWarpgroups);
  static constexpr uint32_t kStageAt = 0;
  static constexpr uint32_t kFirstAt = kStages * Tile::kBytes;  // own rows
  static constexpr uint32_t kSecondAt = kFirstAt + (kFirstInShared ? kOwnRows * kDim : 0);
  static constexpr uint32_t kKeysScaleAt = kFirstAt + kOwnBytes;
  static constexpr uint32_t kKeyValuesScaleAt = kKeysScaleAt + kGroups<kDim> * kScaleBytes;
  static constexpr uint32_t kDsScaleAt = kKeyValuesScaleAt + kGroups<kDimV> * kScaleBytes;  // one for each warpgroup
  static constexpr uint32_t kBarriers = kDsScaleAt + kWarpgroups * kScaleBytes;
  static constexpr uint32_t kFull = kBarriers, kEmpty = kFull + 8 * kStages;
  static constexpr uint32_t kOwnFull = kEmpty + 8 * kStages, kSumsFull = kOwnFull + 8, kSumsFree = kSumsFull + 8;
  static constexpr uint32_t kScoresFull = kSumsFree + 8, kScoresFree = kScoresFull + 8 * kWarpgroups;
  static constexpr uint32_t kGradientsFull = kScoresFree + 8 * kBuffers;
  static constexpr uint32_t kGradientsFree = kGradientsFull + 8 * kWarpgroups;
  static constexpr uint32_t kWeightsFull = kGradientsFree + 8, kWeightsFree = kWeightsFull + 8;
  static constexpr uint32_t kDsFull = kWeightsFree + 8 * kWarpgroups, kDsFree = kDsFull + 8;
  static constexpr uint32_t kPointer = kDsFree + 8 * kWarpgroups;  // of tensor memory
  static constexpr uint32_t kBytes = kPointer + 16 + 1024;         // for the alignment
  static_assert(kBytes <= kSharedLimit);
};

// Whether one pass makes both sums: beside them there are S, dP, P8, dS8 and 32 columns of scales.
template <int kDim, int kDimV>
constexpr bool kOneKeysPass = kDim + kDimV <= 512 - 2 * kTileRows - 2 * kTileRows / 4 - 32;

// ---- products -------------------------------------------------------------------------------------------------------

// The threads that issue them: one S and dP, one dV and dK.
template <class C>
struct KeysProducts : Issuer<C> {
  using Issuer<C>::p, Issuer<C>::shared, Issuer<C>::tmem, Issuer<C>::wait;
  using Turn = bwd_sm100::Turn<C::kStages>;
  using Tile = typename C::Tile;

  __device__ __forceinline__ void scores(const Turn& t) const {
    const uint32_t b = t.n % C::kBuffers;
    wait(C::kFull + 8 * t.stage, t.lap);
    if (t.n >= C::kBuffers && !ptx::fault(kFaultNoFreeScores)) {
      wait(C::kScoresFree + 8 * b, (t.n / C::kBuffers - 1) & 1);
    }
    ptx::tcgen05_fence_after_thread_sync();
    this->copy_scales(C::kQueryScale + b * kScaleColumns, t, Tile::kFirstRowScales);
    product<C::kDim, C::kDim / 32, Over::channels>(
        tmem + C::kScores + b * kTileRows, this->first_own(), this->first_tile(t), tmem + C::kKeysScale,
        tmem + C::kQueryScale + b * kScaleColumns, p.own[0].element, p.streamed[0].element, false);
    ptx::tcgen05_commit(shared + C::kScoresFull + 8 * t.warpgroup);
  }
  __device__ __forceinline__ void gradients(const Turn& t) const {
    if (t.n > 0 && !ptx::fault(kFaultNoFreeGradients)) wait(C::kGradientsFree, (t.n - 1) & 1);
    ptx::tcgen05_fence_after_thread_sync();
    this->copy_scales(C::kDoutScale, t, Tile::kSecondRowScales);
    product<C::kDimV, C::kDimV / 32, Over::channels>(tmem + C::kGradients, this->second_own(), this->second_tile(t),
                                                     tmem + C::kKeyValuesScale, tmem + C::kDoutScale, p.own[1].element,
                                                     p.streamed[1].element, false);
    ptx::tcgen05_commit(shared + C::kGradientsFull + 8 * t.warpgroup);
  }
  // Where dV and dK have their scales in the same columns: until the product before, of tile t, has read them.
  __device__ __forceinline__ void wait_for_scales(uint32_t free, const Turn& t) const {
    if (C::kScalesInTurn && !ptx::fault(kFaultNoFreeScales)) wait(free + 8 * t.warpgroup, t.warpgroup_parity());
  }
  __device__ __forceinline__ void add_dv(const Turn& t, const Turn& last, bool accumulate) const {
    wait(C::kWeightsFull, t.n & 1);
    if (t.n > 0) wait_for_scales(C::kDsFree, last);
    ptx::tcgen05_fence_after_thread_sync();
    this->copy_scales(C::kWeightsScale, t, Tile::kWeightScales);
    if constexpr (C::kScalesInTurn) {
      this->template copy_scales<kGroups<C::kDim>>(C::kQueryColumnScale, t, Tile::kFirstColumnScales);
    } else {
      this->template copy_scales<kGroups<C::kDimV>>(C::kDoutColumnScale, t, Tile::kSecondColumnScales);
    }
    product<C::kDimV, C::kRowBlocks, Over::rows>(
        tmem + C::kDv, tmem + C::kWeights, this->second_tile(t), tmem + C::kWeightsScale, tmem + C::kDoutColumnScale,
        ptx::Fp8Code::e4m3, p.streamed[1].element, accumulate, C::kScalesInTurn ? C::kRowBlocks : 0);
    ptx::tcgen05_commit(shared + C::kWeightsFree + 8 * t.warpgroup);
  }
  __device__ __forceinline__ void add_dk(const Turn& t, bool accumulate) const {
    wait(C::kDsFull, t.n & 1);
    wait_for_scales(C::kWeightsFree, t);
    ptx::tcgen05_fence_after_thread_sync();
    this->copy_scales(C::kDsScale, C::kDsScaleAt + t.warpgroup * kScaleBytes);
    if constexpr (!C::kScalesInTurn) {
      this->template copy_scales<kGroups<C::kDim>>(
          C::kQueryColumnScale, t, ptx::fault(kFaultRowScales) ? Tile::kFirstRowScales : Tile::kFirstColumnScales);
    }
    product<C::kDim, C::kRowBlocks, Over::rows>(tmem + C::kDk, tmem + C::kDs, this->first_tile(t), tmem + C::kDsScale,
                                                tmem + C::kQueryColumnScale, ptx::Fp8Code::e4m3, p.streamed[0].element,
                                                accumulate);
    ptx::tcgen05_commit(shared + C::kDsFree + 8 * t.warpgroup);
  }

  // S and dP, S one tile ahead: while a warpgroup makes dS8 of a tile, another one makes P8 of the next.
  __device__ __forceinline__ void run_pairs() const {
    uint32_t items = 0;
    Turn now;
    Blocks<true> blocks(p);
    for (Block block; blocks.next(block);) {
      const uint32_t end = now.n + uint32_t(block.num_tiles * streamed_heads(p));
      if (now.n == end) continue;
      if (!ptx::fault(kFaultNoOwnRows)) wait(C::kOwnFull, items & 1);
      ++items;
      ptx::tcgen05_fence_after_thread_sync();
      this->template copy_scales<kGroups<C::kDim>>(C::kKeysScale, C::kKeysScaleAt);
      if constexpr (C::kMakesDk) {
        this->template copy_scales<kGroups<C::kDimV>>(C::kKeyValuesScale, C::kKeyValuesScaleAt);
      }
      scores(now);
#pragma unroll 1
      while (now.n < end) {
        const Turn next = now.next();
        if (next.n < end) scores(next);
        if constexpr (C::kMakesDk) gradients(now);
        now = next;
      }
    }
  }
  // dV and dK.
  __device__ __forceinline__ void run_sums() const {
    uint32_t items = 0;
    Turn now, last;
    Blocks<true> blocks(p);
    for (Block block; blocks.next(block);) {
      const uint32_t first = now.n, end = first + uint32_t(block.num_tiles * streamed_heads(p));
      if (first == end) continue;
      if (items > 0 && !ptx::fault(kFaultNoFreeSums)) wait(C::kSumsFree, (items - 1) & 1);
      ++items;
#pragma unroll 1
      for (; now.n < end; last = now, now = now.next()) {
        const bool accumulate = now.n > first || ptx::fault(kFaultAccumulate);
        wait(C::kFull + 8 * now.stage, now.lap);
        if constexpr (C::kMakesDv) add_dv(now, last, accumulate);
        if constexpr (C::kMakesDk) add_dk(now, accumulate);
        ptx::tcgen05_commit(shared + C::kEmpty + 8 * now.stage);
      }
      ptx::tcgen05_commit(shared + C::kSumsFull);
    }
    if (items == 0 || ptx::fault(kFaultNoLastCommit)) return;
    // Those that nobody else waits for.
    if constexpr (C::kMakesDv) wait(C::kWeightsFree + 8 * last.warpgroup, last.warpgroup_parity());
    if constexpr (C::kMakesDk) wait(C::kDsFree + 8 * last.warpgroup, last.warpgroup_parity());
  }
};

// ---- warpgroups -----------------------------------------------------------------------------------------------------

template <class C>
struct KeysWarpgroup {
  const Params& p;
  const uint32_t shared, tmem;
  const int warpgroup;
  const Place place;

  // At turn `turn` of this warpgroup: until the product has read what the one before left for its tile, the last one.
  __device__ __forceinline__ void wait_for_previous(uint32_t bar, uint32_t turn) const {
    const uint32_t before = warpgroup > 0 ? uint32_t(warpgroup) - 1 : kWarpgroups - 1;
    const uint32_t its_turn = turn - (warpgroup == 0);
    if (turn > 0 || warpgroup > 0) ptx::mbarrier_wait(shared + bar + 8 * before, its_turn & 1);
    ptx::tcgen05_fence_after_thread_sync();
  }
  __device__ __forceinline__ void announce(uint32_t bar) const {
    ptx::tcgen05_fence_before_thread_sync();
    ptx::mbarrier_arrive(shared + bar);
  }

  // Tile kWarpgroups * turn + warpgroup, of which this thread's key is seen by rows [seen.first, seen.end).
  __device__ __forceinline__ void step(uint32_t turn, Seen seen) const {
    // Hidden, so that addresses are computed again and not kept in registers from one tile to the next.
    const uint32_t shared = ptx::hidden(this->shared), lanes = place.lanes(tmem), parity = turn & 1;
    // Not every phase of a stage is met where there are five: but the tile that this warpgroup had before is younger
    // than the one that this stage had, so that one's phase is over.
    constexpr bool kSix = C::kStages == 2 * kWarpgroups;
    const uint32_t n = kWarpgroups * turn + uint32_t(warpgroup);
    const uint32_t stage = kSix ? uint32_t(warpgroup) + kWarpgroups * parity : n % C::kStages;
    const uint32_t lap = kSix ? turn >> 1 & 1 : n / C::kStages & 1, b = n % C::kBuffers;
    const uint32_t statistics = shared + stage * C::Tile::kBytes + C::Tile::kStatistics;
    // Of the whole warp: the instructions below are for warps that have met.
    const bool hides = __any_sync(~0u, seen.first > 0 || seen.end < kTileRows);
    const float2 scale{p.scale_log2, p.scale_log2};
    float weight[kTileRows];
    ptx::mbarrier_wait(shared + C::kFull + 8 * stage, lap);
    ptx::mbarrier_wait(shared + C::kScoresFull + 8 * warpgroup, parity);
    ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
    for (int first = 0; first < kTileRows; first += C::kScoresAtOnce) {
      uint32_t s[C::kScoresAtOnce];
      ptx::tcgen05_ld(lanes + C::kScores + b * kTileRows + first, s);
      ptx::tcgen05_wait_ld(s);
      if (first + C::kScoresAtOnce == kTileRows) announce(C::kScoresFree + 8 * b);
#pragma unroll
      for (int i = 0; i < C::kScoresAtOnce; i += 4) {
        const int j = first + i;
        const float4 shift = ptx::load_shared<float4>(statistics + uint32_t(offsetof(RowStatistics, shift)) + 4 * j);
        const float2 low = ptx::fma_f32x2(pair_of(s, i), scale, {shift.x, shift.y});
        const float2 high = ptx::fma_f32x2(pair_of(s, i + 2), scale, {shift.z, shift.w});
        weight[j] = ptx::exp2_approx(low.x), weight[j + 1] = ptx::exp2_approx(low.y);
        weight[j + 2] = ptx::exp2_approx(high.x), weight[j + 3] = ptx::exp2_approx(high.y);
      }
    }
    if (hides) {
#pragma unroll
      for (int j = 0; j < kTileRows; ++j) weight[j] = j < seen.first || j >= seen.end ? 0.0f : weight[j];
    }
    uint32_t codes[kTileRows / 4];
#pragma unroll
    for (int j = 0; j < kTileRows / 4; ++j) {
      codes[j] = ptx::pack_e4m3(weight[4 * j], weight[4 * j + 1], weight[4 * j + 2], weight[4 * j + 3]);
    }
    if constexpr (C::kMakesDv) {
      if (!ptx::fault(kFaultNoFreeWeights)) wait_for_previous(C::kWeightsFree, turn);
      ptx::tcgen05_st(lanes + C::kWeights, codes);
      if (!ptx::fault(kFaultNoStoreWait)) ptx::tcgen05_wait_st();
      announce(C::kWeightsFull);
    }
    if constexpr (!C::kMakesDk) return;

    ptx::mbarrier_wait(shared + C::kGradientsFull + 8 * warpgroup, parity);
    ptx::tcgen05_fence_after_thread_sync();
    uint32_t scales = 0;
#pragma unroll
    for (int b = 0; b < kTileRows / 32; ++b) {
      float ds[32];
#pragma unroll
      for (int first = 0; first < 32; first += C::kDsAtOnce) {
        uint32_t dp[C::kDsAtOnce];
        ptx::tcgen05_ld(lanes + C::kGradients + 32 * b + first, dp);
        ptx::tcgen05_wait_ld(dp);
        if (32 * b + first + C::kDsAtOnce == kTileRows) announce(C::kGradientsFree);
#pragma unroll
        for (int i = 0; i < C::kDsAtOnce; i += 4) {
          const int j = first + i;
          const float4 d =
              ptx::load_shared<float4>(statistics + uint32_t(offsetof(RowStatistics, minus_delta)) + 4 * (32 * b + j));
          const float* const w = weight + 32 * b + j;
          const float2 low = ptx::mul_f32x2({w[0], w[1]}, ptx::add_f32x2(pair_of(dp, i), {d.x, d.y}));
          const float2 high = ptx::mul_f32x2({w[2], w[3]}, ptx::add_f32x2(pair_of(dp, i + 2), {d.z, d.w}));
          ds[j] = low.x, ds[j + 1] = low.y, ds[j + 2] = high.x, ds[j + 3] = high.y;
        }
      }
      if (hides) {  // 0 * NaN is NaN
#pragma unroll
        for (int j = 0; j < 32; ++j) ds[j] = 32 * b + j < seen.first || 32 * b + j >= seen.end ? 0.0f : ds[j];
      }
      const auto pe = int(ptx::load_shared<uint32_t>(statistics + uint32_t(offsetof(RowStatistics, exponent)) + 4 * b));
      scales |= encode_ds(ds, pe, codes + 8 * b) << (8 * b);
    }
    if (!ptx::fault(kFaultNoFreeDs)) wait_for_previous(C::kDsFree, turn);
    ptx::tcgen05_st(lanes + C::kDs, codes);
    ptx::store_shared(
        shared + C::kDsScaleAt + warpgroup * kScaleBytes + 16 * uint32_t(ptx::lane_id()) + 4 * uint32_t(place.warp),
        scales);
    if (!ptx::fault(kFaultNoProxyFence)) ptx::fence_proxy_async();
    if (!ptx::fault(kFaultNoStoreWait)) ptx::tcgen05_wait_st();
    announce(C::kDsFull);
  }

  // What warpgroups 0 and 1 do besides: K and dV, V and dK. Of a pass for one sum: K and V, and half of its channels.
  __device__ __forceinline__ bool has_own_row() const { return C::kMakesDk || warpgroup == 0; }
  __device__ __forceinline__ void fetch_own_row(const Block& block, OwnRow<C::kAtOnce>& row) const {
    row.fetch(place, p.own[warpgroup], block.own_head, warpgroup ? block.own[1] : block.own[0], block.first);
  }
  __device__ __forceinline__ void store_own_row(const Block& block, const OwnRow<C::kAtOnce>& row) const {
    const uint32_t scales = shared + (warpgroup ? C::kKeyValuesScaleAt : C::kKeysScaleAt);
    if constexpr (!C::kWide) {
      row.store(place, tmem + (warpgroup ? C::kSecond : C::kFirst), scales);
    } else if (warpgroup == 0) {
      store_wide_row<C::kDim, C::kFirstInShared>(place, row, p.own[0], block.own_head, block.own[0], block.first,
                                                 C::kFirstInShared ? shared + C::kFirstAt : tmem + C::kFirst, scales);
    } else {
      store_wide_row<C::kDimV, C::kSecondInShared>(place, row, p.own[1], block.own_head, block.own[1], block.first,
                                                   shared + C::kSecondAt, scales);
    }
    announce(C::kOwnFull);
  }
  __device__ __forceinline__ void store_sums(const Block& block, bool any) const {
    const auto add_nothing = [](int, int, const float(&)[32]) {};
    if constexpr (C::kMakesDv && C::kMakesDk) {
      store_gradient<C::kDim>(place, warpgroup ? p.gradient : p.values, block, tmem + (warpgroup ? C::kDk : C::kDv),
                              any, 0, C::kDim, add_nothing);
    } else {
      const int half = (C::kMakesDk ? C::kDim : C::kDimV) / 2;
      store_gradient<C::kDim>(place, C::kMakesDk ? p.gradient : p.values, block, tmem + (C::kMakesDk ? C::kDk : C::kDv),
                              any, warpgroup * half, warpgroup * half + half, add_nothing);
    }
    if (any) announce(C::kSumsFree);
  }

  __device__ __forceinline__ void run() const {
    uint32_t n = 0, items = 0;
    Blocks<true> blocks(p);
    Block block;
    bool there = blocks.next(block), loaded = false;  // own rows
    while (there) {
      const int total = block.num_tiles * streamed_heads(p);
      if (total > 0 && warpgroup < 2 && has_own_row() && !loaded) {
        OwnRow<C::kAtOnce> row;
        fetch_own_row(block, row);
        store_own_row(block, row);
      }
      const Seen seen = seen_by(p, block, block.first + place.row());
      int i = int((uint32_t(warpgroup + kWarpgroups) - n % kWarpgroups) % kWarpgroups), tile = i;
#pragma unroll 1
      for (; i < total; i += kWarpgroups, tile += kWarpgroups) {
        while (tile >= block.num_tiles) tile -= block.num_tiles;
        step((n + uint32_t(i)) / kWarpgroups, {seen.first - tile * kTileRows, seen.end - tile * kTileRows});
      }
      n += uint32_t(total);
      const Block done = block;
      there = blocks.next(block);
      if (warpgroup < 2) {
        // The products of the next item begin while the sums of this one go out.
        loaded = there && total > 0 && block.num_tiles > 0;
        OwnRow<C::kAtOnce> next;
        if (loaded && has_own_row()) fetch_own_row(block, next);
        if (total > 0) {
          if (!ptx::fault(kFaultNoAccumulatorWait)) ptx::mbarrier_wait(shared + C::kSumsFull, items & 1);
          ptx::tcgen05_fence_after_thread_sync();
        }
        if (loaded && has_own_row()) store_own_row(block, next);
        store_sums(done, total > 0);
      }
      items += total > 0;
    }
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <int kDim, int kDimV, Sums kSums>
__device__ __forceinline__ void dkdv_body(const Params& p) {
  using C = KeysConfig<kDim, kDimV, kSums>;
  const uint32_t shared = shared_base();
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    const auto init = [&](uint32_t bar, int count, uint32_t arrivals) {
      for (int i = 0; i < count; ++i) ptx::mbarrier_init(shared + bar + 8 * i, arrivals);
    };
    init(C::kFull, C::kStages, C::Tile::kArrivals);
    init(C::kEmpty, C::kStages, 1);
    init(C::kOwnFull, 1, C::kMakesDk ? 256 : 128);
    init(C::kSumsFull, 1, 1);
    init(C::kSumsFree, 1, 256);
    init(C::kScoresFull, kWarpgroups, 1);
    init(C::kScoresFree, C::kBuffers, 128);
    init(C::kGradientsFull, kWarpgroups, 1);
    init(C::kGradientsFree, 1, 128);
    init(C::kWeightsFull, 1, 128);
    init(C::kWeightsFree, kWarpgroups, 1);
    init(C::kDsFull, 1, 128);
    init(C::kDsFree, kWarpgroups, 1);
    ptx::fence_mbarrier_init();
  }
  const uint32_t tmem = take_columns<C>(shared, warp);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if constexpr (C::kMakesDk) clear_slack(p.gradient, p.k.seq, p.k.tokens, p.items.num_heads);
  if constexpr (C::kMakesDv) clear_slack(p.values, p.k.seq, p.k.tokens, p.items.num_heads);
  play_roles<C, KeysWarpgroup<C>, KeysProducts<C>>(p, shared, tmem, warp);
}

}  // namespace mxflash::bwd_sm100
