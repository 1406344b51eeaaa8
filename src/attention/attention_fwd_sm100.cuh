// What all roles of the forward kernel on Blackwell share: its numbers, its arguments, its tensor and shared memory
// (attention_fwd_sm100_kernel.cuh describes the kernel).
#pragma once

#include "attention/attention_split.cuh"
#include "attention/ring.cuh"
#include "attention/row_output.cuh"
#include "attention/work_items.cuh"
#include "ptx/descriptors.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/warp.cuh"
#include "runtime/tensor_map.h"

namespace mxflash::fwd_sm100 {

constexpr int kMaxSides = 2;  // of a block: 128 query rows each, a softmax warpgroup each
constexpr int kLanes = 128;   // of tensor memory: rows of a side, and keys of a tile
constexpr int kBuffers = 2;   // of queries: those of the next item are loaded under the present one's tiles
constexpr int kItems = 4;     // known ahead
// Columns of 256 behind V: what the rounded P add up to; the least that N can grow by. With 0, out's denominator is the
// sum of the unrounded P (docs/blackwell.md, "What to measure first on silicon").
constexpr int kOnes = 16;

constexpr float kOffset = 8.0f;           // P = 2^kOffset at the reference
constexpr float kSlack = 0.8f;            // what a maximum may exceed the reference by, in binades: 2^8.8 < 448
constexpr uint32_t kScaleP = 0x77777777;  // 2^-kOffset, four E8M0 bytes
// 2^kOffset, four codes of E4M3 or E5M2: times kScaleP it is one.
constexpr uint32_t ones_code(Dtype dtype) { return dtype == Dtype::e5m2 ? 0x5C5C5C5C : 0x78787878; }

// An operand as the caller has it: for its scales, and for what the copy engine must not bring.
struct Operand {
  const uint8_t *data, *scale;
  int64_t token_stride, head_stride;
  int32_t dim;
  MxBlock block;
  Dtype dtype;
  // Where the scales of a tile of 128 tokens lie, in bytes: those that lane l of a warp takes begin at head *
  // scale_head + tile * scale_tile + l * scale_lane. With blocks along the channels these are 4 words, scale_word
  // apart, of scale_bytes each; of columns in linear layout, bytes (attention_fwd_sm100_loader.cuh). Those of channels
  // from 128 on lie scale_atom() behind.
  int64_t scale_head = 0;
  int32_t scale_tile = 0, scale_lane = 0, scale_word = 0, scale_bytes = 0;

  static Operand of(const MxTensor& t, const Jagged& seq) {
    const int64_t padded = padded_token_count(t.data.shape[0], seq);
    const auto dim = int32_t(t.data.shape[2]);
    const int32_t blocks = (dim + 31) / 32;
    Operand x{.data = static_cast<const uint8_t*>(t.data.data),
              .scale = static_cast<const uint8_t*>(t.scale.data),
              .token_stride = t.data.stride[0],
              .head_stride = t.data.stride[1],
              .dim = dim,
              .block = t.block,
              .dtype = t.data.dtype};
    const int32_t atoms = (dim + 127) / 128;
    int32_t planes = 1;  // of atoms of all tokens
    if (t.layout == ScaleLayout::atom128x4) {
      planes = t.block == MxBlock::col32 ? atoms : 1;
      x.scale_tile = kAtomBytes * (atoms / planes), x.scale_lane = 16, x.scale_word = x.scale_bytes = 4;
    } else if (t.block == MxBlock::square32) {
      x.scale_tile = 4 * blocks, x.scale_lane = 0, x.scale_word = x.scale_bytes = blocks;
    } else if (t.block == MxBlock::row32) {
      x.scale_tile = 128 * blocks, x.scale_lane = blocks, x.scale_word = 32 * blocks, x.scale_bytes = blocks;
    } else {
      x.scale_tile = 4 * dim, x.scale_lane = 1, x.scale_word = 32, x.scale_bytes = 1;
    }
    x.scale_head = padded / kSeqAlign * x.scale_tile * planes;
    return x;
  }
  // From the scales of 128 channels to those of the next; there are two of these at most.
  __device__ __forceinline__ int64_t scale_atom() const {
    if (block == MxBlock::col32) return scale_bytes == 1 ? 128 : scale_head / 2;
    return scale_lane == 16 ? kAtomBytes : 4;
  }
  // An element, `token` of the sequence that starts at these rows of the packed and the padded axis.
  template <int kDim>
  __device__ __forceinline__ float value(int64_t head, int64_t start, int64_t padded_start, int token,
                                         int channel) const {
    const auto padded = int32_t(padded_start) + token;
    const int row = padded % int32_t(kSeqAlign);
    const uint8_t* at = scales(head, padded, 0);
    int in_atom = channel;
    if constexpr (kDim > 128) {
      if (channel >= 128) at += scale_atom(), in_atom -= 128;
    }
    if (block == MxBlock::col32) {
      at += in_atom % 32 * scale_lane + in_atom / 32 * scale_word + row / 32 * (scale_bytes == 1 ? dim : 1);
    } else {
      at += row % 32 * scale_lane + row / 32 * scale_word + in_atom / 32;
    }
    const uint8_t code = data[(start + token) * token_stride + head * head_stride + channel];
    return decode_fp8(code, fp8_format(dtype)) * decode_e8m0(*at);
  }
  // Of the 128 tokens around `token` of the padded axis.
  __device__ __forceinline__ const uint8_t* scales(int64_t head, int32_t token, int lane) const {
    return scale + head * scale_head + int64_t(token / int32_t(kSeqAlign)) * scale_tile + lane * scale_lane;
  }
};

struct Params {
  ptx::TensorMap q_map, k_map, v_map;  // tiles of 128 tokens of a head
  WorkItems items;
  RowOutput to;
  Tensor out;         // of the kernel: to.out, or partials.out as [total_out, num_heads, dim]
  Partials partials;  // where results are to be quantized: of one split
  Operand q, k, v;
  float scale_log2;  // softmax_scale log2(e) > 0
  bool bulk_rows;    // the rows of out are aligned to 16 bytes
};

struct Item : WorkItem {
  int32_t first[kMaxSides], end[kMaxSides];  // key tiles that a side's rows see
  // A tile is loaded once for both sides. Between what two sides see there is no gap.
  __device__ bool uses(int side, int tile) const { return first[side] <= tile && tile < end[side]; }
};

// Columns of tensor memory.
struct Columns {
  uint32_t first, count;
  constexpr uint32_t end() const { return first + count; }
};
template <size_t kCount>
constexpr bool disjoint(const Columns (&regions)[kCount]) {
  for (size_t i = 0; i < kCount; ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (regions[i].first < regions[j].end() && regions[j].first < regions[i].end()) return false;
    }
  }
  return true;
}

template <int kQueryDim, int kValueDim>
struct Config {
  static constexpr int kDim = kQueryDim, kDimV = kValueDim;
  static constexpr int kSides = kDimV <= 128 ? 2 : 1;  // two accumulators of 256 channels are more than there is
  static constexpr int kBlockM = kSides * kLanes, kBlockN = kLanes;
  static constexpr bool kSplit = false;
  static constexpr int kThreads = (kSides + 2) * 128;  // warpgroups: softmax of each side, correction, others
  static constexpr int kStages = kDim <= 128 ? 3 : 2;  // of keys, and of values
  // By how many tiles keys are loaded ahead of values. A stage of values is free later than one of keys: with one side,
  // keys that wait for it come late.
  static constexpr int kKeysAhead = kSides == 1 ? 1 : 0;
  // Registers: of softmax, which holds a row of 128 scores (of one side more than a thread starts with); of correction;
  // of the rest.
  static constexpr int kSoftmaxRegisters = kSides == 2 ? 168 : 208, kCorrectionRegisters = 80, kOtherRegisters = 96;
  static_assert(kSides * kSoftmaxRegisters + kCorrectionRegisters + kOtherRegisters <= 512);
  static constexpr int kPolynomial = 6;  // of 16 exponentials, on the FMA units (docs/blackwell.md has the model)

  // ---- tiles. A copy brings a box: 128 tokens, and channels as a swizzle spans them. An atom of scales is of 128
  // channels.
  static constexpr int kSpan = kDim % 128 == 0 ? 128 : 64, kSpanV = kDimV % 128 == 0 ? 128 : 64;
  static constexpr ptx::Swizzle kSwizzle = kSpan == 128 ? ptx::Swizzle::b128 : ptx::Swizzle::b64;
  static constexpr ptx::Swizzle kSwizzleV = kSpanV == 128 ? ptx::Swizzle::b128 : ptx::Swizzle::b64;
  static constexpr int kBoxes = kDim / kSpan, kBoxesV = kDimV / kSpanV;
  static constexpr int kAtoms = (kDim + 127) / 128, kAtomsV = (kDimV + 127) / 128;
  static_assert(kDim % kSpan == 0 && kDimV % kSpanV == 0 && kBoxesV == kAtomsV);

  // ---- tensor memory. Nothing is aliased: every region has its columns for the whole kernel, and every reuse is
  // closed by a barrier (docs/blackwell.md).
  static constexpr int kAcc = kDimV + kOnes;
  static constexpr Columns o(int side) { return {uint32_t(side * kAcc), kAcc}; }
  static constexpr Columns s() { return {o(kSides).first, kBlockN}; }
  static constexpr Columns p(int side) { return {s().end() + side * (kBlockN / 4), kBlockN / 4}; }
  // Of queries, where there is room for those of both sides; else they are copied for every product.
  static constexpr int kQueryScales = kDim <= 128 ? kSides : 1;
  static constexpr Columns q_scale(int side) {
    return {p(kSides).first + (kQueryScales > 1 ? 4 * kAtoms * side : 0), 4 * kAtoms};
  }
  static constexpr Columns k_scale() { return {p(kSides).first + 4 * kAtoms * kQueryScales, 4 * kAtoms}; }
  // Behind the scales of V lie constants: with kDimV = 128 or 256 the scales of the columns of ones are there. With 64
  // they are words 2 and 3 of V's own. One side needs one buffer.
  static constexpr Columns v_scale(int buffer) { return {k_scale().end() + (4 * kAtomsV + 4) * buffer, 4 * kAtomsV}; }
  static constexpr Columns p_scale(int side) { return {v_scale(side).end(), 4}; }
  static constexpr bool nothing_is_aliased() {
    Columns regions[5 * kSides + 2] = {s(), k_scale()};
    int count = 2;
    for (int side = 0; side < kSides; ++side) {
      for (const Columns& c : {o(side), p(side), v_scale(side), p_scale(side)}) regions[count++] = c;
      if (side < kQueryScales) regions[count++] = q_scale(side);
    }
    return disjoint(regions);
  }
  static_assert(nothing_is_aliased());
  static_assert(p_scale(kSides - 1).end() <= 512, "tensor memory has 512 columns");
  static_assert(k_scale().first % 4 == 0 && p(0).first % 4 == 0);
  static_assert(v_scale(0).first + kAcc / 32 < p_scale(0).end(), "the scales of the columns of ones");

  // ---- shared memory, offsets from an address aligned to 1024
  static constexpr int kBoxBytes = kLanes * kSpan, kBoxBytesV = kLanes * kSpanV;
  static constexpr int kTileBytes = kBoxes * kBoxBytes, kValueBytes = kBoxesV * kBoxBytesV;
  // Of a row of results, what is staged at once; with 16 bytes more, stores of 16 bytes meet no bank twice.
  static constexpr int kPieceBytes = kDimV <= 128 ? 256 : 128, kRowPitch = kPieceBytes + 16;
  static constexpr int kScaleBytes = kAtoms * int(kAtomBytes), kValueScaleBytes = kAtomsV * int(kAtomBytes);
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kBuffers * kSides * kTileBytes;
  static constexpr int kV = kK + kStages * kTileBytes;
  static constexpr int kOnesAt = kV + kStages * kValueBytes;  // 32 rows as V's: what LBO steps to
  static constexpr int kOnesBytes = 32 * kSpanV;
  static constexpr int kStaging = kOnesAt + kOnesBytes;
  static constexpr int kQScales = kStaging + kLanes * kRowPitch;
  static constexpr int kKScales = kQScales + kBuffers * kSides * kScaleBytes;
  static constexpr int kVScales = kKScales + kStages * kScaleBytes;
  static constexpr int kStatistics = kVScales + kStages * kValueScaleBytes;  // three floats a row
  static constexpr int kItemSlots = kStatistics + kSides * 3 * 4 * kLanes;
  static constexpr int kBroken = kItemSlots + kItems * 64;  // a mask of rows for each warp of a side
  static constexpr int kBarriers = kBroken + kSides * 16;
  static constexpr int kTmemBase =
      kBarriers + 8 * (2 * kItems + (kSides + 1) * kBuffers + 4 * kStages + 6 * kSides + 2);
  static constexpr int kEnd = kTmemBase + 8;
  static constexpr int kBytes = kEnd + 1024;
  static_assert(kBytes <= 227 * 1024);
  static_assert(kTileBytes % 1024 == 0 && kValueBytes % 1024 == 0 && kOnesAt % 1024 == 0 && kQScales % 128 == 0);

  // Where 32 channels from 32 `block` on begin in a tile of queries or keys.
  static constexpr int channels_at(int block) { return 32 * block / kSpan * kBoxBytes + 32 * block % kSpan; }
  // Where an element of a tile of values lies.
  __device__ __forceinline__ static constexpr uint32_t value_at(int row, int channel) {
    if constexpr (kBoxesV == 1) return ptx::swizzled(row * kSpanV + channel, kSwizzleV);
    return channel / kSpanV * kBoxBytesV + ptx::swizzled(row * kSpanV + channel % kSpanV, kSwizzleV);
  }
};
static_assert(sizeof(Item) <= 64);

template <class C>
struct Shared {
  uint32_t base;  // aligned to 1024
  __device__ Item& item(int slot) const {
    return *static_cast<Item*>(ptx::shared_pointer(base + C::kItemSlots + 64 * slot));
  }
  __device__ uint32_t q(int buffer, int side) const {
    return base + C::kQ + (buffer * C::kSides + side) * C::kTileBytes;
  }
  __device__ uint32_t k(int stage) const { return base + C::kK + stage * C::kTileBytes; }
  __device__ uint32_t v(int stage) const { return base + C::kV + stage * C::kValueBytes; }
  __device__ uint32_t q_scale(int buffer, int side) const {
    return base + C::kQScales + (buffer * C::kSides + side) * C::kScaleBytes;
  }
  __device__ uint32_t k_scale(int stage) const { return base + C::kKScales + stage * C::kScaleBytes; }
  __device__ uint32_t v_scale(int stage) const { return base + C::kVScales + stage * C::kValueScaleBytes; }
  __device__ uint32_t staging(int row) const { return base + C::kStaging + row * C::kRowPitch; }
  // Of a row: the factor of its accumulator; or at its end sum, reference, maximum.
  __device__ uint32_t statistic(int side, int which, int row) const {
    return base + C::kStatistics + ((side * 3 + which) * kLanes + row) * 4;
  }
  __device__ uint32_t broken(int side, int warp) const { return base + C::kBroken + 16 * side + 4 * warp; }
  // Barriers.
  __device__ uint32_t item_known(int slot) const { return base + C::kBarriers + 8 * slot; }
  __device__ uint32_t item_free(int slot) const { return item_known(kItems + slot); }
  __device__ uint32_t q_full(int buffer, int side) const { return item_known(2 * kItems + buffer * C::kSides + side); }
  __device__ uint32_t q_free(int buffer) const { return q_full(kBuffers, buffer); }
  __device__ uint32_t k_full(int stage) const { return q_free(kBuffers + stage); }
  __device__ uint32_t v_full(int stage) const { return k_full(C::kStages + stage); }
  __device__ uint32_t k_free(int stage) const { return k_full(2 * C::kStages + stage); }
  __device__ uint32_t v_free(int stage) const { return k_full(3 * C::kStages + stage); }
  __device__ uint32_t s_full(int side) const { return k_full(4 * C::kStages + side); }
  __device__ uint32_t p_full(int side) const { return s_full(C::kSides + side); }
  __device__ uint32_t pv_done(int side) const { return s_full(2 * C::kSides + side); }
  __device__ uint32_t statistic_full(int side) const { return s_full(3 * C::kSides + side); }
  __device__ uint32_t statistic_free(int side) const { return s_full(4 * C::kSides + side); }
  __device__ uint32_t broken_known(int side) const { return s_full(5 * C::kSides + side); }
  __device__ uint32_t s_free() const { return s_full(6 * C::kSides); }
  __device__ uint32_t broken_read() const { return s_full(6 * C::kSides + 1); }
};

// For the whole warp, which is converged then, as instructions of tensor memory want it: threads may leave a wait one
// by one.
__device__ __forceinline__ void warp_wait(uint32_t bar, uint32_t parity) {
  ptx::mbarrier_wait(bar, parity);
  __syncwarp();
}
// For a converged warp: what its threads did before, they have done.
__device__ __forceinline__ void warp_arrive(uint32_t bar) {
  __syncwarp();
  if (ptx::elect_one()) ptx::mbarrier_arrive(bar);
}

}  // namespace mxflash::fwd_sm100
