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
//   scores_full[w]      commit     S(n) is there                                    products -> warpgroup n % 3
//   scores_free         128        it has been read                                 warpgroup -> products
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
#pragma once

#include "attention/attention_bwd_sm100_load.cuh"

namespace mxflash::bwd_sm100 {

template <int kDim_>
struct KeysConfig {
  static constexpr int kDim = kDim_;
  static constexpr int kChannelBlocks = kDim / 32, kRowBlocks = kTileRows / 32;
  using Tile = Stage<true, kDim>;

  // Columns of tensor memory.
  static constexpr uint32_t kKeys = 0;                          // K, four channels a column
  static constexpr uint32_t kKeyValues = kKeys + kDim / 4;      // V
  static constexpr uint32_t kScores = kKeyValues + kDim / 4;    // S^T
  static constexpr uint32_t kGradients = kScores + kTileRows;   // dP^T
  static constexpr uint32_t kWeights = kGradients + kTileRows;  // P8^T, four rows a column
  static constexpr uint32_t kDs = kWeights + kTileRows / 4;     // dS8^T
  static constexpr uint32_t kKeysScale = kDs + kTileRows / 4;   // scales, of A and B in turn: K and Q of S,
  static constexpr uint32_t kQueryScale = kKeysScale + kScaleColumns;
  static constexpr uint32_t kKeyValuesScale = kQueryScale + kScaleColumns;  // V and dO of dP,
  static constexpr uint32_t kDoutScale = kKeyValuesScale + kScaleColumns;
  static constexpr uint32_t kWeightsScale = kDoutScale + kScaleColumns;  // P8 and dO of dV,
  static constexpr uint32_t kDoutColumnScale = kWeightsScale + kScaleColumns;
  static constexpr uint32_t kDsScale = kDoutColumnScale + kScaleColumns;  // dS8 and Q of dK
  static constexpr uint32_t kQueryColumnScale = kDsScale + kScaleColumns;
  static constexpr uint32_t kDv = kQueryColumnScale + kScaleColumns;
  static constexpr uint32_t kDk = kDv + kDim;
  static constexpr uint32_t kColumns = 512;
  static_assert(kDk + kDim <= kColumns && kDv % 32 == 0 && kKeysScale % kScaleColumns == 0);

  // Shared memory, from an address aligned to 1024.
  static constexpr uint32_t kStageAt = 0;
  static constexpr uint32_t kKeysScaleAt = kStages * Tile::kBytes;
  static constexpr uint32_t kKeyValuesScaleAt = kKeysScaleAt + kScaleBytes;
  static constexpr uint32_t kDsScaleAt = kKeyValuesScaleAt + kScaleBytes;  // one for each warpgroup
  static constexpr uint32_t kBarriers = kDsScaleAt + kWarpgroups * kScaleBytes;
  static constexpr uint32_t kFull = kBarriers, kEmpty = kFull + 8 * kStages;
  static constexpr uint32_t kOwnFull = kEmpty + 8 * kStages, kSumsFull = kOwnFull + 8, kSumsFree = kSumsFull + 8;
  static constexpr uint32_t kScoresFull = kSumsFree + 8, kScoresFree = kScoresFull + 8 * kWarpgroups;
  static constexpr uint32_t kGradientsFull = kScoresFree + 8, kGradientsFree = kGradientsFull + 8 * kWarpgroups;
  static constexpr uint32_t kWeightsFull = kGradientsFree + 8, kWeightsFree = kWeightsFull + 8;
  static constexpr uint32_t kDsFull = kWeightsFree + 8 * kWarpgroups, kDsFree = kDsFull + 8;
  static constexpr uint32_t kPointer = kDsFree + 8 * kWarpgroups;  // of tensor memory
  static constexpr uint32_t kBytes = kPointer + 16 + 1024;         // for the alignment
  static_assert(kBytes <= 227 * 1024);
};

// ---- products -------------------------------------------------------------------------------------------------------

// The threads that issue them: one S and dP, one dV and dK.
template <int kDim>
struct KeysProducts : Issuer<KeysConfig<kDim>> {
  using C = KeysConfig<kDim>;
  using Issuer<C>::p, Issuer<C>::shared, Issuer<C>::tmem, Issuer<C>::tile, Issuer<C>::copy_scales, Issuer<C>::wait;

  __device__ __forceinline__ void scores(const Turn& t) const {
    wait(C::kFull + 8 * t.stage, t.lap);
    if (t.n > 0 && !ptx::fault(kFaultNoFreeScores)) wait(C::kScoresFree, (t.n - 1) & 1);
    ptx::tcgen05_fence_after_thread_sync();
    copy_scales(C::kQueryScale, t, C::Tile::kFirstRowScales);
    product<kDim, C::kChannelBlocks, false>(tmem + C::kScores, tmem + C::kKeys, tile(t, C::Tile::kFirst),
                                            tmem + C::kKeysScale, tmem + C::kQueryScale, p.own[0].element,
                                            p.streamed[0].element, false);
    ptx::tcgen05_commit(shared + C::kScoresFull + 8 * t.warpgroup);
  }
  __device__ __forceinline__ void gradients(const Turn& t) const {
    if (t.n > 0 && !ptx::fault(kFaultNoFreeGradients)) wait(C::kGradientsFree, (t.n - 1) & 1);
    ptx::tcgen05_fence_after_thread_sync();
    copy_scales(C::kDoutScale, t, C::Tile::kSecondRowScales);
    product<kDim, C::kChannelBlocks, false>(tmem + C::kGradients, tmem + C::kKeyValues, tile(t, C::Tile::kSecond),
                                            tmem + C::kKeyValuesScale, tmem + C::kDoutScale, p.own[1].element,
                                            p.streamed[1].element, false);
    ptx::tcgen05_commit(shared + C::kGradientsFull + 8 * t.warpgroup);
  }
  __device__ __forceinline__ void add_dv(const Turn& t, bool accumulate) const {
    wait(C::kWeightsFull, t.n & 1);
    ptx::tcgen05_fence_after_thread_sync();
    copy_scales(C::kWeightsScale, t, C::Tile::kWeightScales);
    copy_scales(C::kDoutColumnScale, t, C::Tile::kSecondColumnScales);
    product<kDim, C::kRowBlocks, true>(tmem + C::kDv, tmem + C::kWeights, tile(t, C::Tile::kSecond),
                                       tmem + C::kWeightsScale, tmem + C::kDoutColumnScale, ptx::Fp8Code::e4m3,
                                       p.streamed[1].element, accumulate);
    ptx::tcgen05_commit(shared + C::kWeightsFree + 8 * t.warpgroup);
  }
  __device__ __forceinline__ void add_dk(const Turn& t, bool accumulate) const {
    wait(C::kDsFull, t.n & 1);
    ptx::tcgen05_fence_after_thread_sync();
    copy_scales(C::kDsScale, C::kDsScaleAt + t.warpgroup * kScaleBytes);
    copy_scales(C::kQueryColumnScale, t,
                ptx::fault(kFaultRowScales) ? C::Tile::kFirstRowScales : C::Tile::kFirstColumnScales);
    product<kDim, C::kRowBlocks, true>(tmem + C::kDk, tmem + C::kDs, tile(t, C::Tile::kFirst), tmem + C::kDsScale,
                                       tmem + C::kQueryColumnScale, ptx::Fp8Code::e4m3, p.streamed[0].element,
                                       accumulate);
    ptx::tcgen05_commit(shared + C::kDsFree + 8 * t.warpgroup);
    ptx::tcgen05_commit(shared + C::kEmpty + 8 * t.stage);
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
      copy_scales(C::kKeysScale, C::kKeysScaleAt);
      copy_scales(C::kKeyValuesScale, C::kKeyValuesScaleAt);
      scores(now);
#pragma unroll 1
      while (now.n < end) {
        const Turn next = now.next();
        if (next.n < end) scores(next);
        gradients(now);
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
        add_dv(now, accumulate);
        add_dk(now, accumulate);
      }
      ptx::tcgen05_commit(shared + C::kSumsFull);
    }
    if (items == 0 || ptx::fault(kFaultNoLastCommit)) return;
    wait(C::kWeightsFree + 8 * last.warpgroup, last.warpgroup_parity());  // those that nobody else waits for
    wait(C::kDsFree + 8 * last.warpgroup, last.warpgroup_parity());
  }
};

// ---- warpgroups -----------------------------------------------------------------------------------------------------

template <int kDim>
struct KeysWarpgroup {
  using C = KeysConfig<kDim>;
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
    const uint32_t stage = uint32_t(warpgroup) + kWarpgroups * parity;
    const uint32_t statistics = shared + stage * C::Tile::kBytes + C::Tile::kStatistics;
    // Of the whole warp: the instructions below are for warps that have met.
    const bool hides = __any_sync(~0u, seen.first > 0 || seen.end < kTileRows);
    const float2 scale{p.scale_log2, p.scale_log2};
    float weight[kTileRows];
    ptx::mbarrier_wait(shared + C::kFull + 8 * stage, turn >> 1 & 1);
    ptx::mbarrier_wait(shared + C::kScoresFull + 8 * warpgroup, parity);
    ptx::tcgen05_fence_after_thread_sync();
    {
      uint32_t s[kTileRows];
      ptx::tcgen05_ld(lanes + C::kScores, s);
      ptx::tcgen05_wait_ld(s);
      announce(C::kScoresFree);
#pragma unroll
      for (int j = 0; j < kTileRows; j += 4) {
        const float4 shift = ptx::load_shared<float4>(statistics + uint32_t(offsetof(RowStatistics, shift)) + 4 * j);
        const float2 low = ptx::fma_f32x2(pair_of(s, j), scale, {shift.x, shift.y});
        const float2 high = ptx::fma_f32x2(pair_of(s, j + 2), scale, {shift.z, shift.w});
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
    if (!ptx::fault(kFaultNoFreeWeights)) wait_for_previous(C::kWeightsFree, turn);
    ptx::tcgen05_st(lanes + C::kWeights, codes);
    if (!ptx::fault(kFaultNoStoreWait)) ptx::tcgen05_wait_st();
    announce(C::kWeightsFull);

    ptx::mbarrier_wait(shared + C::kGradientsFull + 8 * warpgroup, parity);
    ptx::tcgen05_fence_after_thread_sync();
    uint32_t scales = 0;
#pragma unroll
    for (int b = 0; b < kTileRows / 32; ++b) {
      uint32_t dp[32];
      ptx::tcgen05_ld(lanes + C::kGradients + 32 * b, dp);
      ptx::tcgen05_wait_ld(dp);
      if (b + 1 == kTileRows / 32) announce(C::kGradientsFree);
      float ds[32];
#pragma unroll
      for (int j = 0; j < 32; j += 4) {
        const float4 d =
            ptx::load_shared<float4>(statistics + uint32_t(offsetof(RowStatistics, minus_delta)) + 4 * (32 * b + j));
        const float* const w = weight + 32 * b + j;
        const float2 low = ptx::mul_f32x2({w[0], w[1]}, ptx::add_f32x2(pair_of(dp, j), {d.x, d.y}));
        const float2 high = ptx::mul_f32x2({w[2], w[3]}, ptx::add_f32x2(pair_of(dp, j + 2), {d.z, d.w}));
        ds[j] = low.x, ds[j + 1] = low.y, ds[j + 2] = high.x, ds[j + 3] = high.y;
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

  // What warpgroups 0 and 1 do besides: K and dV, V and dK.
  __device__ __forceinline__ void fetch_own_row(const Block& block, OwnRow<kDim>& row) const {
    row.fetch(place, p.own[warpgroup], block.own_head, warpgroup ? block.own[1] : block.own[0], block.first);
  }
  __device__ __forceinline__ void store_own_row(const OwnRow<kDim>& row) const {
    row.store(place, tmem + (warpgroup ? C::kKeyValues : C::kKeys),
              shared + (warpgroup ? C::kKeyValuesScaleAt : C::kKeysScaleAt));
    announce(C::kOwnFull);
  }
  __device__ __forceinline__ void store_sums(const Block& block, bool any) const {
    store_gradient(place, warpgroup ? p.gradient : p.values, block, tmem + (warpgroup ? C::kDk : C::kDv), any, 0, kDim,
                   [](int, int, const float(&)[32]) {});
    if (any) announce(C::kSumsFree);
  }

  __device__ __forceinline__ void run() const {
    uint32_t n = 0, items = 0;
    Blocks<true> blocks(p);
    Block block;
    bool there = blocks.next(block), loaded = false;  // own rows
    while (there) {
      const int total = block.num_tiles * streamed_heads(p);
      if (total > 0 && warpgroup < 2 && !loaded) {
        OwnRow<kDim> row;
        fetch_own_row(block, row);
        store_own_row(row);
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
        OwnRow<kDim> next;
        if (loaded) fetch_own_row(block, next);
        if (total > 0) {
          if (!ptx::fault(kFaultNoAccumulatorWait)) ptx::mbarrier_wait(shared + C::kSumsFull, items & 1);
          ptx::tcgen05_fence_after_thread_sync();
        }
        if (loaded) store_own_row(next);
        store_sums(done, total > 0);
      }
      items += total > 0;
    }
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <int kDim>
__device__ __forceinline__ void dkdv_body(const Params& p) {
  using C = KeysConfig<kDim>;
  const uint32_t shared = shared_base();
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    const auto init = [&](uint32_t bar, int count, uint32_t arrivals) {
      for (int i = 0; i < count; ++i) ptx::mbarrier_init(shared + bar + 8 * i, arrivals);
    };
    init(C::kFull, kStages, C::Tile::kArrivals);
    init(C::kEmpty, kStages, 1);
    init(C::kOwnFull, 1, 256);
    init(C::kSumsFull, 1, 1);
    init(C::kSumsFree, 1, 256);
    init(C::kScoresFull, kWarpgroups, 1);
    init(C::kScoresFree, 1, 128);
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
  clear_slack(p.gradient, p.k.seq, p.k.tokens, p.items.num_heads);
  clear_slack(p.values, p.k.seq, p.k.tokens, p.items.num_heads);
  play_roles<true, C, KeysWarpgroup<kDim>, KeysProducts<kDim>>(p, shared, tmem, warp);
}

}  // namespace mxflash::bwd_sm100
