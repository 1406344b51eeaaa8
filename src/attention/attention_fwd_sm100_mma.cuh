// The thread that issues the products of the forward kernel on Blackwell: S = Q K^T, and O += P V with P in tensor
// memory.
#pragma once

#include "attention/attention_fwd_sm100.cuh"
#include "ptx/fault.cuh"
#include "ptx/tcgen05.cuh"

namespace mxflash::fwd_sm100 {

// A key tile of an item, as products see it. Bit s of a mask: of side s.
struct Step {
  bool valid = true;
  uint32_t used = 0;    // by sides
  uint32_t opens = 0;   // it is a side's first one
  bool closes = false;  // it is the last one of the item
  int stage = 0, buffer = 0;
  uint32_t parity = 0, buffer_parity = 0;
  uint32_t v_buffer = 0;  // of scales: tiles alternate

  __device__ __forceinline__ bool uses(int side) const { return used >> side & 1; }
  __device__ __forceinline__ bool opens_side(int side) const { return opens >> side & 1; }
  // Of the sides that use the tile, in this order.
  __device__ __forceinline__ bool first_user(int side) const { return side == 0 || !uses(0); }
  __device__ __forceinline__ bool last_user(int side) const { return side == 1 || !uses(1); }
};

// Goes through the tiles of item after item. An item's slot is written again only after its results: then it has been
// read.
template <class C>
struct TileCursor {
  const Shared<C> shared;
  Ring<kItems> slot{};
  int32_t first[C::kSides] = {}, end[C::kSides] = {};
  int32_t tile = 0, last = -1;
  Step step{.stage = C::kStages - 1, .buffer = kBuffers - 1, .parity = 1, .buffer_parity = 1};

  __device__ __forceinline__ void next() {
    if (++tile > last) open();
    if (++step.stage == C::kStages) step.stage = 0, step.parity ^= 1;
    step.v_buffer ^= 1;
    step.used = step.opens = 0;
#pragma unroll
    for (int side = 0; side < C::kSides; ++side) {
      step.used |= uint32_t(first[side] <= tile && tile < end[side]) << side;
      step.opens |= uint32_t(first[side] == tile) << side;
    }
    step.closes = tile == last;
  }

 private:
  __device__ __forceinline__ void open() {
    ptx::mbarrier_wait(shared.item_known(slot.index()), slot.parity());
    const Item& item = shared.item(slot.index());
    step.valid = item.valid;
    tile = item.first_tile;
    last = item.first_tile + item.num_tiles - 1;
#pragma unroll
    for (int side = 0; side < C::kSides; ++side) first[side] = item.first[side], end[side] = item.end[side];
    slot.next();
    if (++step.buffer == kBuffers) step.buffer = 0, step.buffer_parity ^= 1;
  }
};

// Descriptors differ in the low word: the high one has stride and swizzle.
__device__ __forceinline__ uint64_t with_low_word(uint64_t descriptor, uint32_t low) {
  return (descriptor & 0xFFFFFFFF00000000u) | low;
}

// kAtoms of scales, 4 columns each.
template <int kAtoms>
__device__ __forceinline__ void copy_scales(uint32_t to, uint32_t from) {
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
    ptx::tcgen05_cp_scales(to + 4 * atom, ptx::tcgen05_scale_descriptor(from + int(kAtomBytes) * atom));
  }
}

constexpr ptx::Fp8Code fp8_code(Dtype dtype) { return dtype == Dtype::e5m2 ? ptx::Fp8Code::e5m2 : ptx::Fp8Code::e4m3; }

// S = Q K^T of one side after the other. That S is free means that all products before are done: so are those that read
// the scales that are overwritten then.
template <class C>
struct ScoreIssuer {
  const Shared<C> shared;
  const uint32_t tmem, instruction;

  __device__ static ScoreIssuer of(const Params& p, const Shared<C> shared, uint32_t tmem) {
    return {shared, tmem,
            ptx::tcgen05_instruction({.n = C::kBlockN, .a = fp8_code(p.q.dtype), .b = fp8_code(p.k.dtype)})};
  }

  // For the whole warp.
  __device__ __forceinline__ void run() const {
    if (!ptx::tcgen05_elect()) return;
    TileCursor<C> at{shared};
    uint32_t s_parity = 1;  // of S: free at first
#pragma unroll 1
    for (at.next(); at.step.valid; at.next()) {
#pragma unroll
      for (int side = 0; side < C::kSides; ++side) {
        if (!at.step.uses(side)) continue;
        if (at.step.first_user(side)) ptx::mbarrier_wait(shared.k_full(at.step.stage), at.step.parity);
        if (at.step.opens_side(side)) {
          ptx::mbarrier_wait(shared.q_full(at.step.buffer, side), at.step.buffer_parity);
        }
        if (!ptx::fault(7)) ptx::mbarrier_wait(shared.s_free(), s_parity);
        s_parity ^= 1;
        ptx::tcgen05_fence_after_thread_sync();
        issue(at.step, side);
      }
    }
  }

 private:
  __device__ __forceinline__ void issue(const Step& at, int side) const {
    const uint32_t q_scale = tmem + C::q_scale(side).first, k_scale = tmem + C::k_scale().first;
    if (at.opens_side(side) || (C::kQueryScales < C::kSides && !ptx::fault(24))) {
      copy_scales<C::kAtoms>(q_scale, shared.q_scale(at.buffer, side));
    }
    if (at.first_user(side)) copy_scales<C::kAtoms>(k_scale, shared.k_scale(at.stage));
    constexpr uint64_t kTile = ptx::tcgen05_matrix_descriptor(0, C::kSwizzle);
    const uint32_t q = uint32_t(kTile) + (shared.q(at.buffer, side) >> 4);
    const uint32_t k = uint32_t(kTile) + (shared.k(at.stage) >> 4);
#pragma unroll
    for (int block = 0; block < C::kDim / 32; ++block) {
      const int id = block % 4, k_id = ptx::fault(8) ? 0 : id;
      const uint32_t step = C::channels_at(block) / 16, atom = ptx::fault(25) ? 0 : block / 4 * 4;
      ptx::tcgen05_mma_block_scaled_ss(tmem + C::s().first, with_low_word(kTile, q + step),
                                       with_low_word(kTile, k + step), ptx::with_scale_ids(instruction, id, k_id),
                                       q_scale + atom, k_scale + atom, block > 0);
    }
    ptx::tcgen05_commit(shared.s_full(side));
    if (at.last_user(side)) {
      ptx::tcgen05_commit(shared.k_free(at.stage));
      if (at.closes) ptx::tcgen05_commit(shared.q_free(at.buffer));
    }
  }
};

// O += P V of one side after the other. The scales of V have two buffers if there are two sides: the product of the
// other side with the tile before may not be done. That of any side with the tile before that one is, and so is the
// only side's (docs/blackwell.md). Each box of V is a product, the last one with the columns of ones.
template <class C>
struct ValueIssuer {
  const Shared<C> shared;
  const uint32_t tmem, instruction;  // of the last box

  __device__ static ValueIssuer of(const Params& p, const Shared<C> shared, uint32_t tmem) {
    return {shared, tmem,
            ptx::tcgen05_instruction({.n = C::kSpanV + kOnes, .b = fp8_code(p.v.dtype), .b_major = ptx::Major::mn})};
  }

  // For the whole warp.
  __device__ __forceinline__ void run() const {
    if (!ptx::tcgen05_elect()) return;
    TileCursor<C> at{shared};
    uint32_t p_parities = 0;  // of P, a bit for each side
#pragma unroll 1
    for (at.next(); at.step.valid; at.next()) {
#pragma unroll
      for (int side = 0; side < C::kSides; ++side) {
        if (!at.step.uses(side)) continue;
        if (at.step.first_user(side)) ptx::mbarrier_wait(shared.v_full(at.step.stage), at.step.parity);
        ptx::mbarrier_wait(shared.p_full(side), p_parities >> side & 1);
        p_parities ^= 1u << side;
        if (!ptx::fault(9)) ptx::tcgen05_fence_after_thread_sync();
        issue(at.step, side);
      }
    }
  }

 private:
  __device__ __forceinline__ void issue(const Step& at, int side) const {
    const uint32_t p_scale = tmem + C::p_scale(side).first;
    const uint32_t v_scale = tmem + C::v_scale(C::kSides == 1 || ptx::fault(10) ? 0 : int(at.v_buffer)).first;
    if (at.first_user(side)) copy_scales<C::kAtomsV>(v_scale, shared.v_scale(at.stage));
    // The leading offset leads from the last channel to the ones: what is added to the address is taken from it.
    constexpr uint64_t kTile = ptx::tcgen05_matrix_descriptor(0, C::kSwizzleV, 0, 8 * C::kSpanV);
    constexpr uint64_t kWrong = ptx::tcgen05_matrix_descriptor(0, C::kSwizzleV, 0, 512);
    constexpr uint32_t kLeading = 1u << 16, kBlock = 32 * C::kSpanV / 16;
#pragma unroll
    for (int box = 0; box < C::kBoxesV; ++box) {
      const bool last = box == C::kBoxesV - 1;
      const uint32_t of_box = last ? instruction : ptx::with_n(instruction, C::kSpanV);
      const uint32_t address = (shared.v(at.stage) + (ptx::fault(27) ? 0 : box) * C::kBoxBytesV) >> 4;
      const uint32_t to_ones = (shared.base + C::kOnesAt) >> 4;
      const uint32_t v = address + (to_ones - address) * kLeading;
#pragma unroll
      for (int block = 0; block < C::kBlockN / 32; ++block) {
        ptx::tcgen05_mma_block_scaled_ts(
            tmem + C::o(side).first + C::kSpanV * box, tmem + C::p(side).first + 8 * block,
            with_low_word(ptx::fault(11) ? kWrong : kTile, v + block * kBlock - block * kBlock * kLeading),
            ptx::with_scale_ids(of_box, block, block), p_scale, v_scale + (ptx::fault(26) ? 0 : 4 * box),
            !at.opens_side(side) || block > 0);
      }
    }
    ptx::tcgen05_commit(shared.pv_done(side));
    if (at.last_user(side)) ptx::tcgen05_commit(shared.v_free(at.stage));
  }
};

}  // namespace mxflash::fwd_sm100
