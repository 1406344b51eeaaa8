// A warpgroup of the backward kernel on Hopper: 64 keys of an item, dK and dV in registers, and half of the channels of
// dQ (attention_bwd_sm90.cu describes a step).
#pragma once

#include <cfloat>

#include "attention/attention_bwd_sm90_epilogue.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/convert.cuh"
#include "ptx/global_order.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"

namespace mxflash::bwd_sm90 {

__device__ __forceinline__ float score_scale(float scale_log2, int e) {
  return fmaxf(scale_log2 * power_of_two(min(e, 90)), FLT_MIN);
}

template <int kDim, bool kHalf, bool kOrdered>
struct Warpgroup : GradientWriter<kDim> {
  using C = Config<kDim, kHalf>;
  using GradientWriter<kDim>::p, GradientWriter<kDim>::warpgroup, GradientWriter<kDim>::warp,
      GradientWriter<kDim>::lane;
  static constexpr int kAcc = kDim / 2;          // registers of dK, of dV
  static constexpr int kDqAcc = kDim / 4;        // of dQ
  static constexpr int kScores = kRows / 2;      // of S, of dP
  static constexpr int kScoreSteps = kDim / 32;  // K-steps of S and dP
  // Of S: those whose part of K is kept in registers. 4 do not fit.
  static constexpr int kKeySteps = kDim == 128 ? 3 : 2;

  // Zeros: ptxas allocates registers that start undefined worse.
  float dk[kAcc] = {}, dv[kAcc] = {};
  float s[kScores] = {};
  float dq[kDqAcc] = {};
  float stats[kRows / 8] = {};    // lse', then delta', of this thread's rows: two pieces of 16 rows
  uint32_t k[kKeySteps][4] = {};  // A fragments of S: this thread's part of the item's K
  int q_scale = 0;                // of the record whose scores are in s
  float dq_factor = 0;            // of FP16 sums of the step before
  uint32_t stage = 0, parity = 0, key_parity = 0;
  uint32_t steps = 0;  // of all items: dS8 buffer and its phase

  __device__ __forceinline__ Warpgroup(const Params& params, int warpgroup_, int warp_, int lane_)
      : GradientWriter<kDim>{params, warpgroup_, warp_, lane_, C::kScratch} {}

  __device__ static uint32_t ring(uint32_t stage) { return C::kRing + stage * C::kStageBytes; }
  // A descriptor inside a stage: constants, and one multiplication that is an addition.
  __device__ static uint64_t in_stage(uint32_t offset, ptx::Swizzle swizzle, uint32_t stage) {
    return ptx::matrix_descriptor(C::kRing + offset, swizzle) + uint64_t(stage * (C::kStageBytes / 16));
  }
  // By one lane, for the warp.
  __device__ __forceinline__ void arrive(uint32_t bar) const {
    if (lane == 0) ptx::mbarrier_arrive(bar);
  }

  // This warp's rows of K, as A fragments.
  __device__ __forceinline__ void load_keys() {
    const int lane = ptx::hidden(this->lane);
    const uint32_t row = uint32_t(64 * warpgroup + 16 * warp + lane % 16);
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) {
      const uint32_t piece = uint32_t(2 * i + lane / 16), swizzled = piece ^ (kDim == 128 ? row % 8 : row / 2 % 4);
      ptx::load_matrices(C::kBase + KeyRecord::k(kDim) + row * kDim + 16 * swizzled, k[i]);
    }
  }
  // Computed anew each time: no register is kept for it.
  __device__ __forceinline__ int quad_column() const { return ptx::hidden(lane) & 3; }
  // S^T of the record in the present stage.
  __device__ __forceinline__ void issue_scores() {
    const uint64_t keys = ptx::matrix_descriptor(C::kBase + KeyRecord::k(kDim) + warpgroup * 64 * kDim, C::kSwizzle);
    const uint64_t q = in_stage(RowRecord::q(kDim), C::kSwizzle, stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) ptx::wgmma_e4m3(s, k[i], ptx::advance(q, 32 * i), i > 0);
#pragma unroll
    for (int i = kKeySteps; i < kScoreSteps; ++i) {
      ptx::wgmma_e4m3(s, ptx::advance(keys, 32 * i), ptx::advance(q, 32 * i), true);
    }
    ptx::wgmma_commit();
  }
  // Where columns 8 h + 2 c + e of piece `piece` (16 rows) are, c = lane % 4.
  __device__ static constexpr int stat(int piece, int h, int e) { return 4 * (piece % 2) + 2 * h + e; }
  __device__ __forceinline__ void load_stats(uint32_t address, int piece) {
    const float4 x = ptx::load_shared<float4>(address + 16 * quad_column() + 64 * piece);
    float* to = stats + stat(piece, 0, 0);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  }
  // Of the record in a stage; kField: offset in its header.
  template <size_t kField>
  __device__ __forceinline__ int load_header(uint32_t of_stage) const {
    return ptx::load_shared<int32_t>(ring(of_stage) + RowRecord::header(kDim) + uint32_t(kField));
  }
  __device__ __forceinline__ void load_lse() {
    load_stats(ring(stage) + RowRecord::lse(kDim), 0);
    load_stats(ring(stage) + RowRecord::lse(kDim), 1);
    q_scale = load_header<offsetof(RowHeader, q_scale)>(stage);
  }

  // dQ = dS8 K of step `step`, this warpgroup's half of the channels.
  __device__ __forceinline__ void issue_dq(uint32_t step) {
    const uint64_t ds = ptx::matrix_descriptor(C::kDs, ptx::Swizzle::b128) + (step & 1) * (C::kDsBytes / 16);
    const uint64_t k_t =
        ptx::matrix_descriptor(C::kBase + KeyRecord::k_t(kDim) + warpgroup * (kDim / 2) * kKeys, ptx::Swizzle::b128);
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i)
      ptx::wgmma_e4m3(dq, ptx::advance(ds, 32 * i), ptx::advance(k_t, 32 * i), i > 0);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void wait_ds(uint32_t step) {
    ptx::mbarrier_wait(C::kDsFull + 8 * (step & 1), step >> 1 & 1);
  }
  // Where this warp's part of dQ of step `step` passes through.
  __device__ __forceinline__ uint32_t dq_part(uint32_t step) const {
    return C::kDq + C::dq_slot(warpgroup, step) * C::kDqBytes + uint32_t(warp) * (C::kDqBytes / 4);
  }
  __device__ __forceinline__ void stage_dq(uint32_t step) {
    const uint32_t to = dq_part(step) + 16 * lane;
    if constexpr (!kHalf) {
#pragma unroll
      for (int j = 0; j < kDqAcc / 4; ++j) {
        ptx::store_shared(to + 512 * j, make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]));
      }
    } else {
#pragma unroll
      for (int j = 0; j < kDqAcc / 8; ++j) {
        float pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = dq[8 * j + 2 * i] * dq_factor, y = dq[8 * j + 2 * i + 1] * dq_factor;
          pair[i] = __uint_as_float(pack_half(Dtype::f16, x, y));
        }
        ptx::store_shared(to + 512 * j, make_float4(pair[0], pair[1], pair[2], pair[3]));
      }
    }
  }
  __device__ __forceinline__ void wait_dq_free(uint32_t step) {
    if constexpr (kOrdered) {
      ptx::mbarrier_wait(C::kDqFree + 8 * C::dq_slot(warpgroup, step), C::dq_parity(step) ^ 1);
    } else {
      if (lane == 0) ptx::bulk_wait_read<C::kDqSlots - 1>();
      __syncwarp();
    }
  }
  // Adds what was staged; behind a proxy fence.
  __device__ __forceinline__ void add_dq(uint32_t step, int32_t record) {
    if constexpr (!kOrdered) {
      if (lane != 0) return;
      uint8_t* to = p.dq + ((int64_t(record) * kWarpgroups + warpgroup) * 4 + warp) * (C::kDqBytes / 4);
      if constexpr (kHalf) {
        ptx::bulk_reduce_add_f16(to, dq_part(step), C::kDqBytes / 4);
      } else {
        ptx::bulk_reduce_add_f32(to, dq_part(step), C::kDqBytes / 4);
      }
      ptx::bulk_commit();
    }
  }

  // The rows that see this thread's keys, where some tile needs them; kept in shared memory, for want of registers.
  __device__ __forceinline__ uint32_t rows_address() const {
    return C::kVisible + 16 * (128 * warpgroup + 32 * warp + lane);
  }
  __device__ __forceinline__ void find_rows(const Item& item) const {
    int32_t bounds[4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t key = this->key_index(item, r);
      Range rows{};
      if (key < item.seqlen_k) rows = visible_rows(p.mask, key, key + 1, item.seqlen_q, item.seqlen_k);
      bounds[2 * r] = int32_t(rows.first) - 2 * quad_column();
      bounds[2 * r + 1] = int32_t(rows.end) - 2 * quad_column();
    }
    ptx::store_shared(rows_address(), make_float4(__int_as_float(bounds[0]), __int_as_float(bounds[1]),
                                                  __int_as_float(bounds[2]), __int_as_float(bounds[3])));
  }
  // Hidden pairs of a tile of rows get a score of -inf.
  __device__ __forceinline__ void hide(int32_t tile) {
    const float4 bounds = ptx::load_shared<float4>(rows_address());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t first = __float_as_int(r ? bounds.z : bounds.x) - tile * kRows;
      const int32_t end = __float_as_int(r ? bounds.w : bounds.y) - tile * kRows;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if ((i >> 1 & 1) != r) continue;
        const int row = 8 * (i >> 2) + (i & 1);
        if (row < first || row >= end) s[i] = -INFINITY;
      }
    }
  }

  // A fragment from 16 columns: half 0 or 1 of a K-step of 32.
  __device__ __forceinline__ static void pack(const float (&x)[kScores], int piece, uint32_t (&a)[2][4]) {
    const int i = 8 * piece, half = 2 * (piece & 1);
    a[piece >> 1][half] = ptx::pack_e4m3(x[i], x[i + 1], x[i + 4], x[i + 5]);
    a[piece >> 1][half + 1] = ptx::pack_e4m3(x[i + 2], x[i + 3], x[i + 6], x[i + 7]);
  }

  // P8 of 16 rows; their lse' gives way to that of the next piece but one, or to delta'.
  __device__ __forceinline__ void exponentials(int piece, float c, uint32_t (&probability)[2][4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 8 * piece + 4 * h + e;
        s[i] = ptx::exp2_approx(fmaf(s[i], c, -stats[stat(piece, h, e & 1)]));
      }
    }
    load_stats(ring(stage) + (piece < 2 ? RowRecord::lse(kDim) : RowRecord::delta(kDim)), (piece + 2) % 4);
    pack(s, piece, probability);
  }

  // ---- sums beyond what tensor cores may add up ---------------------------------------------------------------------
  //
  // Where an item has more than kPromoteTiles row tiles, these are divided into laps of equal length, and around the
  // end of a lap dV and dK are emptied into fp32 in the workspace, a quarter of them at a time: it is memory that this
  // costs. Every thread adds to its own sums, in order, so results are the same bits in each run. What is cut off grows
  // with the sum, whatever its sign: sums of one sign that start at -1/2 of what was emptied, and not at zero, lose
  // little more than half as much.

  static constexpr float kLeft = 0.5f;
  static constexpr int kEmptyEvery = 4;  // row tiles between quarters
  __device__ __forceinline__ float4* sums(int n) const {
    const int thread = warpgroup * 128 + warp * 32 + ptx::hidden(lane);  // no register is kept for it
    return p.sums + (int64_t(blockIdx.x) * 2 + n) * (kAcc / 4 * 128 * kWarpgroups) + thread;
  }
  // Half kPart of gradient n, times f; `add`: there is something already.
  template <int kPart>
  __device__ __forceinline__ void empty_half(float (&x)[kAcc], int n, float f, bool add) {
    constexpr int kFrom = kPart * kAcc / 2, kTo = kFrom + kAcc / 2;
    float4* to = sums(n);
    const float more = (1 + kLeft) * f;
    const auto sum = [&](int i) { return make_float4(x[i] * more, x[i + 1] * more, x[i + 2] * more, x[i + 3] * more); };
    if (add) {
#pragma unroll
      for (int i = kFrom; i < kTo; i += 4) ptx::reduce_add_float4(to + i / 4 * (128 * kWarpgroups), sum(i));
    } else {
#pragma unroll
      for (int i = kFrom; i < kTo; i += 4) to[i / 4 * (128 * kWarpgroups)] = sum(i);
    }
#pragma unroll
    for (int i = kFrom; i < kTo; ++i) x[i] *= -kLeft;
  }
  // Quarter `part` of dv and dk, whose units are those of the present stage; `add`: not the first time.
  __device__ __forceinline__ void empty(int part, bool add, const Item& item) {
    const int n = part & 1;
    const float f = power_of_two(n ? -item.unit[1] - load_header<offsetof(RowHeader, t)>(stage)
                                   : -item.unit[0] - load_header<offsetof(RowHeader, w)>(stage));
    ptx::fence_registers(dv);
    ptx::fence_registers(dk);
    if (part == 0) {
      empty_half<0>(dv, 0, f, add);
    } else if (part == 1) {
      empty_half<0>(dk, 1, f, add);
    } else if (part == 2) {
      empty_half<1>(dv, 0, f, add);
    } else {
      empty_half<1>(dk, 1, f, add);
    }
    ptx::fence_registers(dv);
    ptx::fence_registers(dk);
  }
  // What was emptied, added to what is left, times f. Some at a time: registers are full.
  __device__ __forceinline__ void fill(float (&x)[kAcc], int n, float f) {
    constexpr int kSome = kAcc / 4 < 16 ? kAcc / 4 : 16;
    const float4* from = sums(n);
#pragma unroll
    for (int i = 0; i < kAcc; i += 4 * kSome) {
      float4 sum[kSome];
#pragma unroll
      for (int k = 0; k < kSome; ++k) sum[k] = __ldcg(from + (i / 4 + k) * (128 * kWarpgroups));
#pragma unroll
      for (int k = 0; k < kSome; ++k) {
        float* y = x + i + 4 * k;
        y[0] = fmaf(y[0], f, sum[k].x), y[1] = fmaf(y[1], f, sum[k].y);
        y[2] = fmaf(y[2], f, sum[k].z), y[3] = fmaf(y[3], f, sum[k].w);
      }
      ptx::fence_registers(x);
    }
  }
  // Whether the sums need other units for the record in stage `next` than for the one in stage `done`.
  __device__ __forceinline__ bool units_change(uint32_t done, uint32_t next) const {
    return __any_sync(~0u, load_header<offsetof(RowHeader, t)>(done) != load_header<offsetof(RowHeader, t)>(next) ||
                               load_header<offsetof(RowHeader, w)>(done) != load_header<offsetof(RowHeader, w)>(next));
  }
  // And what to do then; nothing is in flight.
  __device__ __forceinline__ void change_units(uint32_t done, uint32_t next) {
    const float w = power_of_two(load_header<offsetof(RowHeader, w)>(next) - load_header<offsetof(RowHeader, w)>(done));
    const float t = power_of_two(load_header<offsetof(RowHeader, t)>(next) - load_header<offsetof(RowHeader, t)>(done));
#pragma unroll
    for (int i = 0; i < kAcc; ++i) dv[i] *= w, dk[i] *= t;
  }

  // ---- steps --------------------------------------------------------------------------------------------------------

  // One row tile; kFirst: of the item. `left`: row tiles from this one on. `due`: quarter `part` is to be emptied after
  // it.
  template <bool kFirst>
  __device__ __forceinline__ void step(const Item& item, int32_t record_before, int32_t next_tile, bool next_masked,
                                       bool due, int part, bool add, int32_t left, int k_scale, float delta_scale,
                                       float dp_scale) {
    if (!kFirst) {
      wait_ds(steps - 1);
      ptx::wgmma_fence();
      issue_dq(steps - 1);
    }
    const float c = score_scale(p.scale_log2, q_scale + k_scale);
    uint32_t probability[2][4], ds[2][4];
    exponentials(0, c, probability);
    exponentials(1, c, probability);
    if (!kFirst) {
      ptx::wgmma_wait<0>();
      ptx::fence_registers(dq);
      wait_dq_free(steps - 1);
      stage_dq(steps - 1);
    }
    if (kHalf) dq_factor = power_of_two(-load_header<offsetof(RowHeader, dq_unit)>(stage));
    if (kFirst) ptx::mbarrier_wait(C::kKeyFull + 8, key_parity);
    float dp[kScores];
    {
      const uint64_t v = ptx::matrix_descriptor(C::kBase + KeyRecord::v(kDim) + warpgroup * 64 * kDim, C::kSwizzle);
      const uint64_t dout = in_stage(RowRecord::dout(kDim), C::kSwizzle, stage);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kScoreSteps; ++i) {
        ptx::wgmma_e4m3(dp, ptx::advance(v, 32 * i), ptx::advance(dout, 32 * i), i > 0);
      }
      ptx::wgmma_commit();
    }
    exponentials(2, c, probability);
    exponentials(3, c, probability);
    const uint64_t dout_t = in_stage(RowRecord::dout_t(kDim), ptx::Swizzle::b64, stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::wgmma_e4m3(dv, probability[i], ptx::advance(dout_t, 32 * i), i > 0 || !kFirst);
    ptx::wgmma_commit();
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) stats[i] *= delta_scale;
    ptx::wgmma_wait<1>();  // dP
    ptx::fence_registers(dp);
    if (left == 1) arrive(C::kKeyFree + 8);  // V
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = 8 * piece + 4 * h + e;
          dp[i] = s[i] * fmaf(dp[i], dp_scale, -stats[stat(piece, h, e & 1)]);
        }
      }
      pack(dp, piece, ds);
      if (piece < 2) {
        load_stats(ring(stage) + RowRecord::delta(kDim), piece + 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) stats[stat(piece, 0, i)] *= delta_scale;
      }
    }
    const uint64_t q_t = in_stage(RowRecord::q_t(kDim), ptx::Swizzle::b64, stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::wgmma_e4m3(dk, ds[i], ptx::advance(q_t, 32 * i), i > 0 || !kFirst);
    ptx::wgmma_commit();
    const uint32_t to = C::kDs + (steps & 1) * C::kDsBytes + lane * 128 + (((warpgroup * 4 + warp) ^ (lane & 7)) << 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t pairs[4] = {__byte_perm(ds[i][0], ds[i][1], 0x5140), __byte_perm(ds[i][0], ds[i][1], 0x7362),
                                 __byte_perm(ds[i][2], ds[i][3], 0x5140), __byte_perm(ds[i][2], ds[i][3], 0x7362)};
      ptx::store_matrices_transposed(to + i * 32 * 128, pairs);
    }
    const uint32_t done = stage;
    if (++stage == C::kStages) stage = 0, parity ^= 1;
    ptx::fence_proxy_async();  // dS8, and the dQ that was staged
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(C::kDsFull + 8 * (steps & 1));
      if (kOrdered && !kFirst) ptx::mbarrier_arrive(C::kDqFull + 8 * C::dq_slot(warpgroup, steps - 1));
    }
    bool change = false, rare = false;
    if (left > 1) {
      ptx::mbarrier_wait(C::kFull + 8 * stage, parity);
      issue_scores();
      load_lse();
      change = units_change(done, stage);
      rare = change || next_masked || due;
    }
    if (!kFirst) add_dq(steps - 1, record_before);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(s);
    ptx::fence_registers(dv);
    ptx::fence_registers(dk);
    // One branch for all of it: each jump over code costs. Fences keep the compiler from preparing any of it in every
    // step, for which there are no registers.
    if (rare) [[unlikely]] {
      ptx::fence_registers(s);
      ptx::fence_registers(dv);
      ptx::fence_registers(dk);
      if (next_masked) hide(next_tile);
      ptx::fence_registers(s);
      if (change) change_units(done, stage);
      ptx::fence_registers(dv);
      ptx::fence_registers(dk);
      if (due) empty(part, add, item);
      ptx::fence_registers(s);
    }
    __syncwarp();
    arrive(C::kFree + 8 * done);
    if (left == 2) arrive(C::kKeyFree);  // K
    ++steps;
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t items = 0;; ++items) {
      ptx::mbarrier_wait(C::kItemFull + 8 * (items & 1), items >> 1 & 1);
      const Item& item = C::item(items & 1);
      if (!uniform(item.valid)) break;
      if (uniform(item.end_tile - item.first_tile) > 0) {
        differentiate(item);
      } else {
        this->write_zeros(item);
      }
      if (!kOrdered && lane == 0) ptx::bulk_wait<0>();  // dQ was on its way while dV and dK were written
      __syncwarp();
      arrive(C::kItemFree + 8 * (items & 1));
    }
  }

  __device__ __forceinline__ void differentiate(const Item& item) {
    const int k_scale = uniform(item.k_scale);
    const float dp_scale = power_of_two(uniform(item.dp)), delta_scale = power_of_two(uniform(item.u));
    const int32_t first_tile = uniform(item.first_tile), end_tile = uniform(item.end_tile);
    const int32_t first_whole = uniform(item.first_whole), end_whole = uniform(item.end_whole);
    const int32_t count = p.group * (end_tile - first_tile);
    ptx::mbarrier_wait(C::kKeyFull, key_parity);
    load_keys();
    ptx::mbarrier_wait(C::kFull + 8 * stage, parity);
    issue_scores();
    load_lse();
    ptx::wgmma_wait<0>();
    ptx::fence_registers(s);
    if (count == 1) arrive(C::kKeyFree);  // K

    const int32_t laps = (count + kPromoteTiles - 1) / kPromoteTiles, lap = (count + laps - 1) / laps;
    constexpr int32_t kAhead = kEmptyEvery * 3 / 2;
    // What is left when the next quarter is emptied; 0: no more. A first lap that is too short joins the next one.
    int32_t stop = laps > 1 ? (laps - 1) * lap + kAhead : 0, part = 0;
    if (laps > 1 && stop > count - 2) stop -= lap;
    bool add = false;

    int32_t tile = end_tile - 1, record = uniform(item.row_record) + tile, before = 0;
    if (first_whole > first_tile || end_whole < end_tile) find_rows(item);
    const auto masked = [&] { return tile < first_whole || tile >= end_whole; };
    const auto advance = [&] {
      before = record--;
      if (--tile < first_tile) {
        tile = end_tile - 1;
        record += p.row_tiles + end_tile - first_tile;
      }
    };
    if (masked()) hide(tile);
    advance();
    step<true>(item, 0, tile, masked(), false, 0, false, count, k_scale, delta_scale, dp_scale);
    ptx::mbarrier_wait(C::kKeyFull + 16, key_parity);  // K^T
    key_parity ^= 1;
#pragma unroll 1
    for (int32_t left = count - 1; left > 0; --left) {
      const int32_t before_this = before;
      advance();
      const bool due = left - 1 == stop;
      step<false>(item, before_this, tile, masked(), due, part, add, left, k_scale, delta_scale, dp_scale);
      if (due) {
        stop -= kEmptyEvery;
        if (++part == 4) {
          part = 0, add = true;
          stop += 4 * kEmptyEvery - lap;
          if (stop == kAhead) stop = 0;
        }
      }
    }
    // The units of the last record; its stage may belong to another by now.
    const RowHeader* header =
        reinterpret_cast<const RowHeader*>(p.rows + int64_t(before) * C::kRowBytes + RowRecord::header(kDim));
    int32_t unit[2] = {-__ldg(&header->w), -__ldg(&header->t)};  // of dv; of dk, without u
    wait_ds(steps - 1);
    ptx::wgmma_fence();
    issue_dq(steps - 1);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(dq);
    __syncwarp();
    arrive(C::kKeyFree + 16);  // K^T
    wait_dq_free(steps - 1);
    stage_dq(steps - 1);
    ptx::fence_proxy_async();
    __syncwarp();
    if constexpr (kOrdered) arrive(C::kDqFull + 8 * C::dq_slot(warpgroup, steps - 1));
    add_dq(steps - 1, before);

    if (count > kPromoteTiles) {
      fill(dv, 0, power_of_two(unit[0] - item.unit[0]));
      fill(dk, 1, power_of_two(unit[1] - item.unit[1]));
      unit[0] = item.unit[0], unit[1] = item.unit[1];
    }
    unit[1] -= item.u;
    if (p.gradient[1].rotation > 1) {
      rotate_back_rows(dk, p.gradient[1].rotation, p.gradient[1].signs, quad_column());
    }
    // One copy of the code, for the instruction cache's sake.
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      this->write(dv, item, p.gradient[n], n ? unit[1] : unit[0]);
#pragma unroll
      for (int i = 0; i < kAcc; ++i) dv[i] = dk[i];
    }
    lane = ptx::lane_id();
  }
};

}  // namespace mxflash::bwd_sm90
