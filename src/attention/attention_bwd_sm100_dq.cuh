// dQ on Blackwell (sm_100a). docs/blackwell.md tells the why, attention_bwd_sm100.cuh has the numbers.
//
//   S = Q K^T    P8 = 2^(S - lse')    dP = dO V^T    dS8 = P8 (dP - delta)    dQ += dS8 K
//
// An item is 128 query rows of one head of one sequence, over all tiles of 64 keys that one of them sees; of a shared
// query, over those of all key sequences, one after the other, each with its own dout. Q and dO stay in tensor memory
// and are, like dS8, A operands there; lanes are query rows, so a thread has the statistics of its row in registers.
// The sum stays in tensor memory from the first term to the last.
//
// CTA: persistent, 16 warps, with the roles of the dkdv kernel (attention_bwd_sm100_dkdv.cuh): warpgroups 0 and 1 load
// Q and dO and store half of dQ's channels each. There is room for two buffers of S and dP; beyond 128 channels for
// one, and with 256 dO is in shared memory. Order of products, n over all tiles of the CTA: S(n), dP(n), and, by the
// other thread, dQ(n).
//
// Barriers (arrivals per phase; w is a warpgroup, b = n % 2, or 0, a buffer):
//   full[s]              2 + bytes  a tile and its scales are there                  load -> products
//   empty[s]             commit     nobody reads it any more                         products -> load
//   own_full             256        Q, dO and their scales are there                 warpgroups 0, 1 -> products
//   scores_full[w]       commit     S(n) is there                                    products -> warpgroup n % 3
//   scores_free[b]       128        it has been read                                 warpgroup -> products
//   gradients_full[w], gradients_free[b]                                             the same for dP(n)
//   ds_full              128        dS8(n) is there                                  warpgroup -> products
//   ds_free[w]           commit     dQ(n) is done with it                            products -> warpgroup (n + 1) % 3
//   sums_full            commit     all products of the item and sequence are done   products -> warpgroups 0, 1
//   sums_free            256        dQ of the item has been read                     warpgroups 0, 1 -> products
#pragma once

#include "attention/attention_bwd_sm100_load.cuh"

namespace mxflash::bwd_sm100 {

template <int kDim_, int kDimV_>
struct QueriesConfig {
  static constexpr int kDim = kDim_, kDimV = kDimV_;  // of q and k, dout and v
  static constexpr int kRowBlocks = kTileRows / 32;
  using Tile = Stage<false, kDim, kDimV>;
  static constexpr bool kWide = kDim > 128;
  static constexpr int kAtOnce = kWide ? 128 : kDim;   // channels of an own row in registers
  static constexpr uint32_t kBuffers = kWide ? 1 : 2;  // of S and dP
  // Own rows that tensor memory has no room for.
  static constexpr bool kFirstInShared = false, kSecondInShared = kDimV > 128;

  // Columns of tensor memory.
  static constexpr uint32_t kFirst = 0;                                             // Q, four channels a column
  static constexpr uint32_t kSecond = kFirst + kDim / 4;                            // dO
  static constexpr uint32_t kScores = kSecond + (kSecondInShared ? 0 : kDimV / 4);  // S
  static constexpr uint32_t kGradients = kScores + kBuffers * kTileRows;            // dP
  static constexpr uint32_t kDs = kGradients + kBuffers * kTileRows;                // dS8, four keys a column
  static constexpr uint32_t kQueryScale = kDs + kTileRows / 4;  // scales, of A and B in turn: Q and K of S, K's one
  static constexpr uint32_t kKeysScale = kQueryScale + kGroups<kDim> * kScaleColumns;  // for each buffer,
  static constexpr uint32_t kDoutScale = kKeysScale + kBuffers * kScaleColumns;        // dO and V of dP, V's one for
  static constexpr uint32_t kKeyValuesScale = kDoutScale + kGroups<kDimV> * kScaleColumns;  // each,
  static constexpr uint32_t kDsScale = kKeyValuesScale + kBuffers * kScaleColumns;          // dS8 and K of dQ
  static constexpr uint32_t kKeysColumnScale = kDsScale + kScaleColumns;
  static constexpr uint32_t kDq = (kKeysColumnScale + kGroups<kDim> * kScaleColumns + 31) / 32 * 32;
  static constexpr uint32_t kColumns = 512;
  static_assert(kDq + kDim <= kColumns && kQueryScale % kScaleColumns == 0);

  // Shared memory, from an address aligned to 1024.
  static constexpr uint32_t kOwnBytes = kSecondInShared ? kOwnRows * kDimV : 0;
  static constexpr int kStages = stages_beside(kOwnBytes + 8 * 1024, Tile::kBytes);
  static constexpr uint32_t kStageAt = 0;
  static constexpr uint32_t kSecondAt = kStages * Tile::kBytes;  // own rows
  static constexpr uint32_t kQueryScaleAt = kSecondAt + kOwnBytes;
  static constexpr uint32_t kDoutScaleAt = kQueryScaleAt + kGroups<kDim> * kScaleBytes;
  static constexpr uint32_t kDsScaleAt = kDoutScaleAt + kGroups<kDimV> * kScaleBytes;  // one for each warpgroup
  static constexpr uint32_t kBarriers = kDsScaleAt + kWarpgroups * kScaleBytes;
  static constexpr uint32_t kFull = kBarriers, kEmpty = kFull + 8 * kStages;
  static constexpr uint32_t kOwnFull = kEmpty + 8 * kStages, kSumsFull = kOwnFull + 8, kSumsFree = kSumsFull + 8;
  static constexpr uint32_t kScoresFull = kSumsFree + 8, kScoresFree = kScoresFull + 8 * kWarpgroups;
  static constexpr uint32_t kGradientsFull = kScoresFree + 8 * kBuffers;
  static constexpr uint32_t kGradientsFree = kGradientsFull + 8 * kWarpgroups;
  static constexpr uint32_t kDsFull = kGradientsFree + 8 * kBuffers, kDsFree = kDsFull + 8;
  static constexpr uint32_t kPointer = kDsFree + 8 * kWarpgroups;  // of tensor memory
  static constexpr uint32_t kBytes = kPointer + 16 + 1024;         // for the alignment
  static_assert(kBytes <= kSharedLimit);
};

// ---- products -------------------------------------------------------------------------------------------------------

// The threads that issue them: one S and dP, one dQ.
template <class C>
struct QueriesProducts : Issuer<C> {
  using Issuer<C>::p, Issuer<C>::shared, Issuer<C>::tmem, Issuer<C>::wait;
  using Turn = bwd_sm100::Turn<C::kStages>;
  using Tile = typename C::Tile;
  // Until the tile whose buffer this is has left it.
  __device__ __forceinline__ void wait_for_buffer(uint32_t free, const Turn& t) const {
    if (t.n >= C::kBuffers) wait(free + 8 * (t.n % C::kBuffers), (t.n / C::kBuffers - 1) & 1);
  }

  __device__ __forceinline__ void scores(const Turn& t) const {
    const uint32_t b = t.n % C::kBuffers;
    wait(C::kFull + 8 * t.stage, t.lap);
    if (!ptx::fault(kFaultNoFreeScores)) wait_for_buffer(C::kScoresFree, t);
    ptx::tcgen05_fence_after_thread_sync();
    this->copy_scales(C::kKeysScale + b * kScaleColumns, t, Tile::kFirstRowScales);
    product<C::kDim, C::kDim / 32, Over::channels>(
        tmem + C::kScores + b * kTileRows, this->first_own(), this->first_tile(t), tmem + C::kQueryScale,
        tmem + C::kKeysScale + b * kScaleColumns, p.own[0].element, p.streamed[0].element, false);
    ptx::tcgen05_commit(shared + C::kScoresFull + 8 * t.warpgroup);
  }
  __device__ __forceinline__ void gradients(const Turn& t) const {
    const uint32_t b = t.n % C::kBuffers;
    if (!ptx::fault(kFaultNoFreeGradients)) wait_for_buffer(C::kGradientsFree, t);
    ptx::tcgen05_fence_after_thread_sync();
    this->copy_scales(C::kKeyValuesScale + b * kScaleColumns, t, Tile::kSecondRowScales);
    product<C::kDimV, C::kDimV / 32, Over::channels>(
        tmem + C::kGradients + b * kTileRows, this->second_own(), this->second_tile(t), tmem + C::kDoutScale,
        tmem + C::kKeyValuesScale + b * kScaleColumns, p.own[1].element, p.streamed[1].element, false);
    ptx::tcgen05_commit(shared + C::kGradientsFull + 8 * t.warpgroup);
  }
  __device__ __forceinline__ void add_dq(const Turn& t, bool accumulate) const {
    wait(C::kDsFull, t.n & 1);
    ptx::tcgen05_fence_after_thread_sync();
    this->copy_scales(C::kDsScale, C::kDsScaleAt + t.warpgroup * kScaleBytes);
    this->template copy_scales<kGroups<C::kDim>>(
        C::kKeysColumnScale, t, ptx::fault(kFaultRowScales) ? Tile::kFirstRowScales : Tile::kFirstColumnScales);
    product<C::kDim, C::kRowBlocks, Over::rows>(tmem + C::kDq, tmem + C::kDs, this->first_tile(t), tmem + C::kDsScale,
                                                tmem + C::kKeysColumnScale, ptx::Fp8Code::e4m3, p.streamed[0].element,
                                                accumulate);
    ptx::tcgen05_commit(shared + C::kDsFree + 8 * t.warpgroup);
    ptx::tcgen05_commit(shared + C::kEmpty + 8 * t.stage);
  }

  // S and dP.
  __device__ __forceinline__ void run_pairs() const {
    uint32_t items = 0;
    Turn now;
    Blocks<false> blocks(p);
    for (Block block; blocks.next(block);) {
      const uint32_t end = now.n + uint32_t(block.num_tiles);
      if (now.n == end) continue;
      if (!ptx::fault(kFaultNoOwnRows)) wait(C::kOwnFull, items & 1);
      ++items;
      ptx::tcgen05_fence_after_thread_sync();
      this->template copy_scales<kGroups<C::kDim>>(C::kQueryScale, C::kQueryScaleAt);
      this->template copy_scales<kGroups<C::kDimV>>(C::kDoutScale, C::kDoutScaleAt);
#pragma unroll 1
      for (; now.n < end; now = now.next()) scores(now), gradients(now);
    }
  }
  // dQ.
  __device__ __forceinline__ void run_sums() const {
    uint32_t sums = 0, sum_begin = 0;  // sums before the present one, and its first tile
    Turn now, last;
    Blocks<false> blocks(p);
    for (Block block; blocks.next(block);) {
      if (block.first_sequence) {
        sums += now.n > sum_begin;
        sum_begin = now.n;
      }
      const uint32_t end = now.n + uint32_t(block.num_tiles);
      if (now.n == end) continue;
      if (now.n == sum_begin && sums > 0 && !ptx::fault(kFaultNoFreeSums)) wait(C::kSumsFree, (sums - 1) & 1);
#pragma unroll 1
      for (; now.n < end; last = now, now = now.next()) {
        wait(C::kFull + 8 * now.stage, now.lap);
        add_dq(now, now.n > sum_begin || ptx::fault(kFaultAccumulate));
      }
      ptx::tcgen05_commit(shared + C::kSumsFull);
    }
    if (now.n == 0 || ptx::fault(kFaultNoLastCommit)) return;
    wait(C::kDsFree + 8 * last.warpgroup, last.warpgroup_parity());  // that nobody else waits for
  }
};

// ---- warpgroups -----------------------------------------------------------------------------------------------------

template <class C>
struct QueriesWarpgroup {
  const Params& p;
  const uint32_t shared, tmem;
  const int warpgroup;
  const Place place;

  __device__ __forceinline__ void announce(uint32_t bar) const {
    ptx::tcgen05_fence_before_thread_sync();
    ptx::mbarrier_arrive(shared + bar);
  }

  struct Row {
    float shift, minus_delta;
    int pe;  // of its block
  };
  __device__ __forceinline__ Row row_of(const Block& block) const {
    const int row = block.first + place.row();
    const RowStatistics* s = statistics_of(p, block.own[1], block.own_head, row);
    return {s->shift[row % kTileRows], s->minus_delta[row % kTileRows], int(s->exponent[row % kTileRows / 32])};
  }

  // Tile n, turn n / kWarpgroups of this warpgroup, of which this thread's row sees keys [seen.first, seen.end).
  __device__ __forceinline__ void step(uint32_t n, uint32_t turn, Seen seen, const Row& row) const {
    // Hidden, so that addresses are computed again and not kept in registers from one tile to the next.
    const uint32_t shared = ptx::hidden(this->shared), lanes = place.lanes(tmem), parity = turn & 1,
                   b = n % C::kBuffers;
    // Of the whole warp: the instructions below are for warps that have met.
    const bool hides = __any_sync(~0u, seen.first > 0 || seen.end < kTileRows);
    const float2 scale{p.scale_log2, p.scale_log2}, shift{row.shift, row.shift};
    const float2 minus_delta{row.minus_delta, row.minus_delta};
    float weight[kTileRows];
    ptx::mbarrier_wait(shared + C::kScoresFull + 8 * warpgroup, parity);
    ptx::tcgen05_fence_after_thread_sync();
    {
      uint32_t s[kTileRows];
      ptx::tcgen05_ld(lanes + C::kScores + b * kTileRows, s);
      ptx::tcgen05_wait_ld(s);
      announce(C::kScoresFree + 8 * b);
#pragma unroll
      for (int j = 0; j < kTileRows; j += 2) {
        const float2 x = ptx::fma_f32x2(pair_of(s, j), scale, shift);
        weight[j] = ptx::exp2_approx(x.x), weight[j + 1] = ptx::exp2_approx(x.y);
      }
    }
    ptx::mbarrier_wait(shared + C::kGradientsFull + 8 * warpgroup, parity);
    ptx::tcgen05_fence_after_thread_sync();
    uint32_t codes[kTileRows / 4], scales = 0;
#pragma unroll
    for (int c = 0; c < kTileRows / 32; ++c) {
      uint32_t dp[32];
      ptx::tcgen05_ld(lanes + C::kGradients + b * kTileRows + 32 * c, dp);
      ptx::tcgen05_wait_ld(dp);
      if (c + 1 == kTileRows / 32) announce(C::kGradientsFree + 8 * b);
      float ds[32];
#pragma unroll
      for (int j = 0; j < 32; j += 2) {
        const float* const w = weight + 32 * c + j;
        const float2 x = ptx::mul_f32x2({w[0], w[1]}, ptx::add_f32x2(pair_of(dp, j), minus_delta));
        ds[j] = x.x, ds[j + 1] = x.y;
      }
      if (hides) {  // 0 * NaN is NaN
#pragma unroll
        for (int j = 0; j < 32; ++j) ds[j] = 32 * c + j < seen.first || 32 * c + j >= seen.end ? 0.0f : ds[j];
      }
      scales |= encode_ds(ds, row.pe, codes + 8 * c) << (8 * c);
    }
    if (n > 0 && !ptx::fault(kFaultNoFreeDs)) {  // until dQ(n - 1) has read what the warpgroup before this one left
      const uint32_t before = warpgroup > 0 ? uint32_t(warpgroup) - 1 : kWarpgroups - 1;
      ptx::mbarrier_wait(shared + C::kDsFree + 8 * before, (turn - (warpgroup == 0)) & 1);
    }
    ptx::tcgen05_fence_after_thread_sync();
    ptx::tcgen05_st(lanes + C::kDs, codes);
    ptx::store_shared(
        shared + C::kDsScaleAt + warpgroup * kScaleBytes + 16 * uint32_t(ptx::lane_id()) + 4 * uint32_t(place.warp),
        scales);
    if (!ptx::fault(kFaultNoProxyFence)) ptx::fence_proxy_async();
    if (!ptx::fault(kFaultNoStoreWait)) ptx::tcgen05_wait_st();
    announce(C::kDsFull);
  }

  // What warpgroups 0 and 1 do besides: Q and dO, the first and the last channels of dQ.
  __device__ __forceinline__ void fetch_own_row(const Block& block, OwnRow<C::kAtOnce>& row) const {
    row.fetch(place, p.own[warpgroup], block.own_head, warpgroup ? block.own[1] : block.own[0], block.first);
  }
  __device__ __forceinline__ void store_own_row(const Block& block, const OwnRow<C::kAtOnce>& row) const {
    const uint32_t scales = shared + (warpgroup ? C::kDoutScaleAt : C::kQueryScaleAt);
    if constexpr (!C::kWide) {
      row.store(place, tmem + (warpgroup ? C::kSecond : C::kFirst), scales);
    } else if (warpgroup == 0) {
      store_wide_row<C::kDim, false>(place, row, p.own[0], block.own_head, block.own[0], block.first, tmem + C::kFirst,
                                     scales);
    } else {
      store_wide_row<C::kDimV, C::kSecondInShared>(place, row, p.own[1], block.own_head, block.own[1], block.first,
                                                   C::kSecondInShared ? shared + C::kSecondAt : tmem + C::kSecond,
                                                   scales);
    }
    announce(C::kOwnFull);
  }
  // dlse reaches q through k_mean, too: softmax_scale dlse k_mean of every sequence that the row sees keys of.
  __device__ __forceinline__ void add_k_mean(const Block& block, int row, int c, float (&x)[32]) const {
    if (!p.dlse) return;
#pragma unroll 1
    for (int b = p.shared_q ? 0 : block.sequence; b <= block.sequence; ++b) {
      const int64_t at = p.out.rows(b).start + row;
      if (static_cast<const float*>(p.lse.data)[block.own_head * p.lse.stride[0] + at] == -INFINITY) continue;
      const float dlse = static_cast<const float*>(p.dlse.data)[block.own_head * p.dlse.stride[0] + at];
      const float* mean = static_cast<const float*>(p.k_mean.data) + b * p.k_mean.stride[0] +
                          block.own_head / p.own_per_streamed * p.k_mean.stride[1] + c;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        if (c + j < p.gradient.dim) x[j] = fmaf(p.gradient.factor * dlse, mean[j], x[j]);
      }
    }
  }
  __device__ __forceinline__ void store_sum(const Block& block, bool any) const {
    const int half = C::kDim / 2;
    store_gradient<C::kDim>(place, p.gradient, block, tmem + C::kDq, any, warpgroup * half, warpgroup * half + half,
                            [&](int row, int c, float(&x)[32]) { add_k_mean(block, row, c, x); });
    if (any) announce(C::kSumsFree);
  }

  __device__ __forceinline__ void run() const {
    uint32_t n = 0, items = 0, sum_begin = 0;
    Blocks<false> blocks(p);
    Block block;
    bool there = blocks.next(block), loaded = false;  // own rows
    while (there) {
      if (block.first_sequence) sum_begin = n;
      const int total = block.num_tiles;
      if (total > 0) {
        if (warpgroup < 2 && !loaded) {
          OwnRow<C::kAtOnce> own;
          fetch_own_row(block, own);
          store_own_row(block, own);
        }
        const Seen seen = seen_by(p, block, block.first + place.row());
        const Row row = row_of(block);
        int i = int((uint32_t(warpgroup + kWarpgroups) - n % kWarpgroups) % kWarpgroups);
#pragma unroll 1
        for (; i < total; i += kWarpgroups) {
          step(n + uint32_t(i), (n + uint32_t(i)) / kWarpgroups, {seen.first - i * kTileRows, seen.end - i * kTileRows},
               row);
        }
      }
      n += uint32_t(total);
      const Block done = block;
      there = blocks.next(block);
      if (warpgroup < 2) {
        // The products of the next item begin while the sum of this one goes out.
        loaded = there && total > 0 && block.num_tiles > 0;
        OwnRow<C::kAtOnce> next;
        if (loaded) fetch_own_row(block, next);
        if (total > 0) {
          if (!ptx::fault(kFaultNoAccumulatorWait)) ptx::mbarrier_wait(shared + C::kSumsFull, items & 1);
          ptx::tcgen05_fence_after_thread_sync();
        }
        if (loaded) store_own_row(block, next);
        if (done.last_sequence) store_sum(done, n > sum_begin);
      }
      items += total > 0;
    }
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <int kDim, int kDimV>
__device__ __forceinline__ void dq_body(const Params& p) {
  using C = QueriesConfig<kDim, kDimV>;
  const uint32_t shared = shared_base();
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    const auto init = [&](uint32_t bar, int count, uint32_t arrivals) {
      for (int i = 0; i < count; ++i) ptx::mbarrier_init(shared + bar + 8 * i, arrivals);
    };
    init(C::kFull, C::kStages, C::Tile::kArrivals);
    init(C::kEmpty, C::kStages, 1);
    init(C::kOwnFull, 1, 256);
    init(C::kSumsFull, 1, 1);
    init(C::kSumsFree, 1, 256);
    init(C::kScoresFull, kWarpgroups, 1);
    init(C::kScoresFree, C::kBuffers, 128);
    init(C::kGradientsFull, kWarpgroups, 1);
    init(C::kGradientsFree, C::kBuffers, 128);
    init(C::kDsFull, 1, 128);
    init(C::kDsFree, kWarpgroups, 1);
    ptx::fence_mbarrier_init();
  }
  const uint32_t tmem = take_columns<C>(shared, warp);
  ptx::griddepcontrol_wait();
  clear_slack(p.gradient, p.q.seq, p.q.tokens, p.items.num_heads);
  play_roles<C, QueriesWarpgroup<C>, QueriesProducts<C>>(p, shared, tmem, warp);
}

}  // namespace mxflash::bwd_sm100
