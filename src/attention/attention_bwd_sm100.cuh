// What the kernels of the backward on Blackwell share: which rows a CTA has and which ones it streams past them, how
// tiles and scales get to shared memory, dS8, and how gradients leave tensor memory.
//
// Both kernels hold 128 *own* rows of a head in tensor memory (beyond 128 channels some in shared memory) and stream
// tiles of 64 rows past them:
//   dkdv   own k, v        streams q, dout   S^T = K Q^T   dP^T = V dO^T   dV += P8^T dO   dK += dS8^T Q
//   dq     own q, dout     streams k, v      S = Q K^T     dP = dO V^T     dQ += dS8 K
// A mask read from the keys' side is a window again (transposed), so both have the work items of the forward, and
// `query` and `key` in these mean own and streamed.
//
// Numbers, of a block of 32 query rows whose least row_exponent is r, and with pe = 8 + r (the pre kernel):
//   lse' = lse log2(e) - pe           P8 = 2^(S softmax_scale log2(e) - lse') = P 2^pe <= 256, scale byte 127 - pe
//   dS8 = P8 (dP - delta) = dS 2^pe   scale of a 32x32 block: that of dS, so the payload takes the 2^pe out again
// dS8 depends on S, dP and the row only, so both kernels round the same numbers.
#pragma once

#include <bit>
#include <cmath>

#include "attention/attention.h"
#include "attention/mask.h"
#include "attention/rotate_rows.cuh"
#include "attention/work_items.cuh"
#include "mx/e8m0.h"
#include "mx/float16.h"
#include "ptx/arithmetic.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/convert.cuh"
#include "ptx/descriptors.h"
#include "ptx/fault.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/warp.cuh"

namespace mxflash::bwd_sm100 {

inline constexpr int kOwnRows = 128;   // lanes of tensor memory
inline constexpr int kTileRows = 64;   // of a streamed tile
inline constexpr int kWarpgroups = 3;  // that compute; they take tiles in turn
inline constexpr int kThreads = 128 * (kWarpgroups + 1);
// Warps beside them. Products are issued by two, on schedulers of their own.
inline constexpr int kPairWarp = 4 * kWarpgroups, kLoadWarp = kPairWarp + 1, kSumWarp = kPairWarp + 2;
inline constexpr int kMostStages = 2 * kWarpgroups;  // with so many a warpgroup meets every phase of its stages
inline constexpr int kScaleBytes = 512;              // a scale tile: 32 lanes of 16 bytes
inline constexpr int kScaleColumns = 4;              // and in tensor memory
inline constexpr uint32_t kSharedLimit = 227 * 1024;
inline constexpr uint32_t kMaxExponent = 119;  // of row_exponent: the scale byte of P is 119 less that
inline constexpr float kLog2e = 1.44269504088896341f;

// 64 rows of a query head, on the padded axis of out: what a stage of the dkdv kernel gets as one bulk copy.
struct RowStatistics {
  float shift[kTileRows];        // -lse': -inf without a token or a visible key
  float minus_delta[kTileRows];  // 0 there
  uint32_t exponent[2];          // pe of each 32 rows
  uint32_t padding[2];
};
static_assert(sizeof(RowStatistics) % 16 == 0);

// Square32, E4M3 or E5M2; rows of a head are aligned to 16 bytes, and whole multiples of that. Kernels have kDim
// channels: those behind `dim` are zeros.
struct Operand {
  const uint8_t* data;
  int64_t token_stride, head_stride;
  const uint8_t* scale;  // [heads][padded tokens / 32][scale_columns]
  int64_t scale_head;    // bytes of a head
  int32_t dim, scale_columns;
  ptx::Fp8Code element;
};

// Where dq, dk or dv goes.
struct Gradient {
  Tensor out;      // [tokens, heads, dim]; may be null
  bool wide;       // its rows are aligned to 16 bytes
  uint8_t* codes;  // square32, E4M3: of [tokens, heads, dim]; may be null
  int64_t code_token_stride, code_head_stride;
  uint8_t* scale;
  int64_t scale_head;
  int32_t dim, scale_columns;
  float factor;      // of the sum
  int32_t rotation;  // group of channels that are rotated back; 1: none
  RotationSigns signs;
};

// The tokens of one sequence: in the packed tensor, and on the padded axis of scales and statistics.
struct Rows {
  int32_t start, padded, length;
};
struct Axis {
  Jagged seq;
  int64_t tokens;  // fewer than 2^31, as on the padded axis
  __device__ __forceinline__ Rows rows(int b) const {
    const Sequence s = sequence_at(tokens, seq, b);
    return {int32_t(s.start), int32_t(s.padded_start), int32_t(s.length)};
  }
};

struct Params {
  ptx::TensorMap map[2];            // of streamed, below
  Operand own[2], streamed[2];      // over channels: S's operand, dP's
  const RowStatistics* statistics;  // [num_heads_q][statistics_head]
  int64_t statistics_head;
  WorkItems items;  // own as queries, streamed as keys
  Axis q, out, k;
  Gradient gradient, values;                   // dk or dq; dv
  Tensor lse, dlse, k_mean;                    // what dlse brings to dq, or null
  int32_t own_per_streamed, streamed_per_own;  // heads
  int32_t sequences;                           // that an item meets one after the other: of a shared query; else 1
  bool shared_q;
  float scale_log2;  // softmax_scale log2(e)
};

// Faults that tests plant, each a synchronisation or a number left out (ptx/fault.cuh).
enum Fault : int {
  kFaultNoFreeScores = 200,  // S is overwritten before it was read
  kFaultNoFreeGradients,     // dP
  kFaultNoFreeWeights,       // P8
  kFaultNoFreeDs,            // dS8
  kFaultNoEmptyStage,        // a stage is overwritten while it is read
  kFaultNoProxyFence,        // scales written by threads are copied without one
  kFaultNoStoreWait,         // P8 and dS8 are announced before they are there
  kFaultNoOwnRows,           // products start before own rows are there
  kFaultRowScales,           // dK, dQ take the scales of the untransposed operand
  kFaultTailBytes,           // a tile at the end of a sequence is loaded whole
  kFaultTailScales,          // and so are its scales
  kFaultExponent,            // P's exponent is left out of dS's scale
  kFaultMask,                // the last visible row or key is hidden
  kFaultMaxOfThread,         // dS's block maximum is that of one thread
  kFaultAccumulate,          // the first product of an item adds to what was there
  kFaultGroup,               // only the first head of a group is streamed
  kFaultNoAccumulatorWait,   // gradients are read before they are complete
  kFaultNoFreeSums,          // sums begin before the last ones are read
  kFaultNoLastCommit,        // a CTA leaves with commits on their way
  // Beyond 128 channels.
  kFaultScaleGroup,    // K-steps behind the fourth take the scales of the first four
  kFaultSpan,          // and those of another span the bytes of the first
  kFaultNoRowFence,    // own rows in shared memory are read without a fence
  kFaultNoFreeScales,  // scales of a sum are overwritten while they are read
};

// Where a kernel's shared memory begins.
__device__ __forceinline__ uint32_t shared_base() {
  return (ptx::hidden(ptx::shared_address(ptx::dynamic_shared())) + 1023) / 1024 * 1024;
}

// ---- items ----------------------------------------------------------------------------------------------------------

struct Block {
  int32_t sequence, own_head, first;   // first own row in its sequence
  bool first_sequence, last_sequence;  // of those that a shared query meets
  Rows own[2], streamed[2];            // of the operands' own axes; lengths are equal
  int32_t first_tile, num_tiles;       // streamed tiles of one head
};

// What work items are to be cut into. kKeys: own rows are keys.
template <bool kKeys>
struct ItemShape {
  static constexpr int kBlockM = kOwnRows, kBlockN = kTileRows;
  static constexpr bool kSplit = false;
};

// The n-th item of this CTA: the grid goes through the list, longest first, forwards and backwards in turn, so that no
// CTA always gets the longest of a round.
__device__ __forceinline__ int item_index(int round) {
  const int grid = int(gridDim.x), cta = int(blockIdx.x);
  return round * grid + (round & 1 ? grid - 1 - cta : cta);
}

// Item `index`, met with key sequence `met` of a shared query. False if there is no such block.
template <bool kKeys>
__device__ __forceinline__ bool find_block(const Params& p, int index, int met, Block& block) {
  WorkItem item;
  place_item<ItemShape<kKeys>>(p.items, index, item);
  const int sequence = p.shared_q && !kKeys ? met : item.sequence;
  block.sequence = sequence, block.first_sequence = met == 0, block.last_sequence = met + 1 == p.sequences;
  block.own_head = item.head, block.first = item.first_row;
  const Rows q = p.q.rows(p.shared_q ? 0 : sequence), k = p.k.rows(sequence);
  Rows out = p.out.rows(sequence);
  out.length = q.length;
  block.own[0] = kKeys ? k : q, block.own[1] = kKeys ? k : out;
  block.streamed[0] = kKeys ? q : k, block.streamed[1] = kKeys ? out : k;
  const int length = block.own[0].length;
  if (block.first >= length) return false;
  const Range seen =
      visible_keys(p.items.mask, block.first, min(block.first + kOwnRows, length), length, block.streamed[0].length);
  block.first_tile = int(seen.first) / kTileRows;
  block.num_tiles = seen.empty() ? 0 : (int(seen.end) + kTileRows - 1) / kTileRows - block.first_tile;
  return true;
}

// The blocks of this CTA, one after the other; those of a shared query once for each sequence.
template <bool kKeys>
class Blocks {
 public:
  __device__ __forceinline__ explicit Blocks(const Params& params) : p(params) {}
  // False: there are no more.
  __device__ __forceinline__ bool next(Block& block) {
    const int count = count_items<ItemShape<kKeys>>(p.items), sequences = kKeys ? 1 : p.sequences;
    while (round * int(gridDim.x) < count) {
      const int index = item_index(round), its_sequence = kKeys ? 0 : sequence;
      if (++sequence == sequences) sequence = 0, ++round;
      if (index < count && find_block<kKeys>(p, index, its_sequence, block)) return true;
    }
    return false;
  }

 private:
  const Params& p;
  int round = 0, sequence = 0;
};

// Streamed rows that an own row sees, from first_tile's first on: none of a row that is not there.
struct Seen {
  int first, end;
};
__device__ __forceinline__ Seen seen_by(const Params& p, const Block& block, int row) {
  if (row >= block.own[0].length) return {0, 0};
  const Range r = visible_keys(p.items.mask, row, row + 1, block.own[0].length, block.streamed[0].length);
  const int base = block.first_tile * kTileRows;
  return {int(r.first) - base, int(r.end) - base - (ptx::fault(kFaultMask) ? 1 : 0)};
}

// A thread's place in its warpgroup: `warp` is the same in all of its warp, and the compiler knows. The lane is read
// anew each time, which spares a register.
struct Place {
  int warp;
  __device__ __forceinline__ int row() const { return 32 * warp + ptx::lane_id(); }
  // Columns of the warp's lanes of tensor memory.
  __device__ __forceinline__ uint32_t lanes(uint32_t tmem) const { return tmem + (uint32_t(warp) << 21); }
};

// ---- operands -------------------------------------------------------------------------------------------------------

// How rows lie in shared memory: in spans of 128 or 64 channels, all rows of a tile's span together.
constexpr int32_t span_of(int32_t dim) { return dim % 128 == 0 ? 128 : 64; }
constexpr ptx::Swizzle swizzle_of(int32_t dim) { return span_of(dim) == 128 ? ptx::Swizzle::b128 : ptx::Swizzle::b64; }
template <int kDim>
constexpr int kSpans = kDim / span_of(kDim);
// Where 16 channels of a row are, in a tile of kRows.
template <int kDim, int kRows>
__device__ __forceinline__ uint32_t place_of(int row, int channel) {
  constexpr int kSpan = span_of(kDim);
  const int at =
      kSpans<kDim> == 1 ? row * kDim + channel : channel / kSpan * (kRows * kSpan) + row * kSpan + channel % kSpan;
  return ptx::swizzled(uint32_t(at), swizzle_of(kDim));
}
// The descriptor of a tile at `shared`, for both majors.
template <int kDim, int kRows>
__device__ __forceinline__ uint64_t descriptor_of(uint32_t shared) {
  constexpr int kSpan = span_of(kDim);
  return ptx::tcgen05_matrix_descriptor(shared, swizzle_of(kDim), kSpans<kDim> == 1 ? 0 : kRows * kSpan, 8 * kSpan);
}

// Scales come in groups of four blocks of 32 channels: the bytes of a word.
template <int kDim>
constexpr int kGroups = (kDim + 127) / 128;

// Scale bytes of 32 rows from `row` of the sequence on, of a group; zeros where there are no rows.
template <int kDim>
__device__ __forceinline__ uint32_t scales_of(const Operand& t, int head, const Rows& s, int row, int group) {
  if (row >= s.length && !ptx::fault(kFaultTailScales)) return 0;
  const uint8_t* from = t.scale + head * t.scale_head + (s.padded + row) / 32 * t.scale_columns;
  uint32_t word = 0;
#pragma unroll
  for (int c = 0; c < (kDim < 128 ? kDim : 128) / 32; ++c) {
    const int at = 4 * group + c;
    word |= at < t.scale_columns ? uint32_t(from[at]) << (8 * c) : 0;
  }
  return word;
}

// For a whole warp: a scale tile, all of whose 32 lanes have the same four words.
__device__ __forceinline__ void put_scales(uint32_t tile, const uint4& words) {
  ptx::store_shared(tile + 16 * uint32_t(ptx::lane_id()), words);
}

// The scales of two blocks of rows for a contraction over these: word c has blocks 0, 1 of 32 channels c, and, in its
// upper half, those of another tensor.
__device__ __forceinline__ uint4 transposed_scales(uint32_t block0, uint32_t block1, uint32_t other0 = 0,
                                                   uint32_t other1 = 0) {
  const auto word = [&](int c) {
    const auto byte = [&](uint32_t block) { return block >> (8 * c) & 255; };
    return byte(block0) | byte(block1) << 8 | byte(other0) << 16 | byte(other1) << 24;
  };
  return make_uint4(word(0), word(1), word(2), word(3));
}

// A group of channels of this thread's own row, zeros in place of one that is not there; and, in the first warp, its
// scales of all rows. kDim channels, at most 128.
template <int kDim>
struct OwnRow {
  uint32_t word[kDim / 4] = {};
  uint4 scales = make_uint4(0, 0, 0, 0);

  __device__ __forceinline__ void fetch(Place place, const Operand& t, int head, const Rows& s, int first,
                                        int group = 0) {
    const int row = first + place.row(), first_channel = 128 * group;
    if (row < s.length) {
      const uint8_t* from = t.data + (s.start + row) * t.token_stride + head * t.head_stride + first_channel;
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        if (first_channel + 16 * i >= t.dim) break;
        const uint4 v = reinterpret_cast<const uint4*>(from)[i];
        word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
      }
    }
    if (place.warp > 0) return;
    scales = make_uint4(scales_of<kDim>(t, head, s, first, group), scales_of<kDim>(t, head, s, first + 32, group),
                        scales_of<kDim>(t, head, s, first + 64, group), scales_of<kDim>(t, head, s, first + 96, group));
  }
  // To its lane of tensor memory. For a warpgroup.
  __device__ __forceinline__ void store(Place place, uint32_t tmem, uint32_t scale_tile) const {
    __syncwarp();
    ptx::tcgen05_st(place.lanes(tmem), word);
    if (place.warp == 0) {
      put_scales(scale_tile, scales);
      if (!ptx::fault(kFaultNoProxyFence)) ptx::fence_proxy_async();
    }
    ptx::tcgen05_wait_st();
  }
  // To its row of a tile in shared memory, whose rows have kWidth channels.
  template <int kWidth>
  __device__ __forceinline__ void store_shared(Place place, uint32_t tile, uint32_t scale_tile, int group) const {
    __syncwarp();
    if (ptx::fault(kFaultNoRowFence) && place.warp == 0) {  // of rows: that of scales stays
      put_scales(scale_tile, scales);
      ptx::fence_proxy_async();
    }
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      ptx::store_shared(tile + place_of<kWidth, kOwnRows>(place.row(), 128 * group + 16 * i),
                        make_uint4(word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]));
    }
    if (ptx::fault(kFaultNoRowFence)) return;
    if (place.warp == 0) put_scales(scale_tile, scales);
    ptx::fence_proxy_async();
  }
};

// Own rows of kDim channels to tensor memory or, kShared, to a tile in shared memory. `row` has their first 128
// channels. For a warpgroup.
template <int kDim, bool kShared>
__device__ __forceinline__ void store_wide_row(Place place, const OwnRow<128>& row, const Operand& t, int head,
                                               const Rows& s, int first, uint32_t to, uint32_t scale_tile) {
  const auto store = [&](const auto& row, int group) {
    const uint32_t scales = scale_tile + uint32_t(group) * kScaleBytes;
    if constexpr (kShared) {
      row.template store_shared<kDim>(place, to, scales, group);
    } else {
      row.store(place, to + 32 * uint32_t(group), scales);
    }
  };
  store(row, 0);
  if constexpr (kDim > 128) {
    __syncwarp();  // without it ptxas spills a register
    OwnRow<kDim - 128> more;
    more.fetch(place, t, head, s, first, 1);
    store(more, 1);
  }
}

// A streamed tile that a sequence's end crosses: by hand, zeros behind it, since 0 * NaN of a neighbour would be NaN.
// For a whole warp.
template <int kDim>
__device__ __forceinline__ void fill_tile(const Operand& t, int head, const Rows& s, int first, uint32_t tile) {
  const int rows = s.length - first;
#pragma unroll 4
  for (int at = ptx::lane_id(); at < kTileRows * kDim / 16; at += 32) {
    const int row = at / (kDim / 16), channel = at % (kDim / 16) * 16;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (row < rows && channel < t.dim) {
      v = *reinterpret_cast<const uint4*>(t.data + (s.start + first + row) * t.token_stride + head * t.head_stride +
                                          channel);
    }
    ptx::store_shared(tile + place_of<kDim, kTileRows>(row, channel), v);
  }
}

// Which tile of the CTA, and where it is: counted along, since a division for each would be as long as a product's
// issue.
template <int kStages>
struct Turn {
  uint32_t n = 0, stage = 0, lap = 0, warpgroup = 0;  // lap: parity of the stage's phase
  __device__ __forceinline__ Turn next() const {
    Turn t{n + 1, stage + 1, lap, warpgroup + 1};
    if (t.stage == kStages) t.stage = 0, t.lap ^= 1;
    if (t.warpgroup == kWarpgroups) t.warpgroup = 0;
    return t;
  }
  __device__ __forceinline__ uint32_t warpgroup_parity() const { return n / kWarpgroups & 1; }
};

// A descriptor whose address is that many units of 16 bytes further on: its low word alone changes.
constexpr uint64_t moved(uint64_t descriptor, uint32_t units) {
  return (descriptor & ~uint64_t(0xFFFFFFFF)) | (uint32_t(descriptor) + units);
}

// What a contraction runs over: channels, or the rows of a streamed tile.
enum class Over { channels, rows };

// D [128][n] (+)= A B of kBlocks blocks of 32; B is a tile of kDim channels. A is in tensor memory, eight columns a
// block, or, a descriptor, own rows in shared memory. `id_b` is the byte of the first block's scales of B; behind four
// blocks, scales of A go on in the next four columns, those of 64 rows of B in the next two.
template <int kDim, int kBlocks, Over kOver, class A>
__device__ __forceinline__ void product(uint32_t d, A a, uint64_t tile, uint32_t scale_a, uint32_t scale_b,
                                        ptx::Fp8Code element_a, ptx::Fp8Code element_b, bool accumulate, int id_b = 0) {
  constexpr bool kRows = kOver == Over::rows;
  constexpr uint32_t kSteps = span_of(kDim) / 32;  // of a span
  const uint32_t instruction = ptx::tcgen05_instruction({.n = kRows ? kDim : kTileRows,
                                                         .a = element_a,
                                                         .b = element_b,
                                                         .b_major = kRows ? ptx::Major::mn : ptx::Major::k});
#pragma unroll
  for (uint32_t i = 0; i < kBlocks; ++i) {
    const uint32_t group = ptx::fault(kFaultScaleGroup) ? 0 : i / 4;
    const uint32_t span = ptx::fault(kFaultSpan) ? 0 : i / kSteps;
    // Units of 16 bytes, where the span has `rows` of them.
    const auto channels = [&](uint32_t rows) { return span * (rows * span_of(kDim) / 16) + i % kSteps * 2; };
    const uint64_t b = moved(tile, kRows ? i * (2 * span_of(kDim)) : channels(kTileRows));
    const uint32_t with_ids = ptx::with_scale_ids(instruction, i % 4, (id_b + i) % 4);
    const uint32_t sfa = scale_a + 4 * group, sfb = scale_b + 2 * group;
    if constexpr (sizeof(A) == sizeof(uint32_t)) {
      ptx::tcgen05_mma_block_scaled_ts(d, a + 8 * i, b, with_ids, sfa, sfb, accumulate || i > 0);
    } else {
      ptx::tcgen05_mma_block_scaled_ss(d, moved(a, channels(kOwnRows)), b, with_ids, sfa, sfb, accumulate || i > 0);
    }
  }
}

// The descriptors of a thread that issues products of a kernel with configuration C.
template <class C>
struct Issuer {
  const Params& p;
  const uint32_t shared, tmem;
  // Of the beginning of shared memory, made once: the issue of a product is then a few additions.
  const uint64_t firsts = descriptor_of<C::kDim, kTileRows>(shared);
  const uint64_t seconds = descriptor_of<C::kDimV, kTileRows>(shared);
  const uint64_t scales = ptx::tcgen05_scale_descriptor(shared);

  // Of what a stage has at an offset.
  __device__ __forceinline__ uint64_t of_stage(uint64_t descriptor, const Turn<C::kStages>& t, uint32_t offset) const {
    return moved(descriptor, t.stage * (C::Tile::kBytes / 16) + offset / 16);
  }
  __device__ __forceinline__ uint64_t first_tile(const Turn<C::kStages>& t) const {
    return of_stage(firsts, t, C::Tile::kFirst);
  }
  __device__ __forceinline__ uint64_t second_tile(const Turn<C::kStages>& t) const {
    return of_stage(seconds, t, C::Tile::kSecond);
  }
  // A of S and of dP. K-major operands have no leading offset, so the descriptors of tiles serve.
  __device__ __forceinline__ auto first_own() const {
    if constexpr (C::kFirstInShared) {
      return moved(firsts, C::kFirstAt / 16);
    } else {
      return tmem + C::kFirst;
    }
  }
  __device__ __forceinline__ auto second_own() const {
    if constexpr (C::kSecondInShared) {
      return moved(seconds, C::kSecondAt / 16);
    } else {
      return tmem + C::kSecond;
    }
  }
  template <int kTiles = 1>
  __device__ __forceinline__ void copy_scales(uint32_t column, uint32_t offset) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      ptx::tcgen05_cp_scales(tmem + column + i * kScaleColumns, moved(scales, (offset + i * kScaleBytes) / 16));
    }
  }
  template <int kTiles = 1>
  __device__ __forceinline__ void copy_scales(uint32_t column, const Turn<C::kStages>& t, uint32_t offset) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      ptx::tcgen05_cp_scales(tmem + column + i * kScaleColumns, of_stage(scales, t, offset + i * kScaleBytes));
    }
  }
  __device__ __forceinline__ void wait(uint32_t bar, uint32_t parity) const {
    ptx::mbarrier_wait(shared + bar, parity);
  }
};

// Two of the values that came out of tensor memory.
template <int kCount>
__device__ __forceinline__ float2 pair_of(const uint32_t (&r)[kCount], int i) {
  return {std::bit_cast<float>(r[i]), std::bit_cast<float>(r[i + 1])};
}

// ---- weights --------------------------------------------------------------------------------------------------------

// This thread's row of a 32x32 block of dS 2^pe as E4M3. Returns the scale byte of dS; 255 where something is not
// finite. For a whole warp.
__device__ __forceinline__ uint32_t encode_ds(const float (&ds)[32], int pe, uint32_t* codes) {
  float largest[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < 32; j += 4) {
    largest[0] = ptx::max3_nan(largest[0], fabsf(ds[j]), fabsf(ds[j + 1]));
    largest[1] = ptx::max3_nan(largest[1], fabsf(ds[j + 2]), fabsf(ds[j + 3]));
  }
  uint32_t most = std::bit_cast<uint32_t>(ptx::max3_nan(largest[0], largest[1], 0.0f)) & 0x7FFFFFFFu;
  if (!ptx::fault(kFaultMaxOfThread)) most = __reduce_max_sync(~0u, most);  // NaN above all
  const int e = max(int((most + 0x1FFFFFu) >> 23) - 8, pe);
  const float inverse = std::bit_cast<float>(uint32_t(254 - e) << 23);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 low = ptx::mul_f32x2({ds[4 * j], ds[4 * j + 1]}, {inverse, inverse});
    const float2 high = ptx::mul_f32x2({ds[4 * j + 2], ds[4 * j + 3]}, {inverse, inverse});
    codes[j] = ptx::pack_e4m3(low.x, low.y, high.x, high.y);
  }
  if (ptx::fault(kFaultExponent)) pe = 8;
  return most < 0x7F800000u ? uint32_t(e - pe) : uint32_t(kE8m0Nan);
}

// ---- gradients ------------------------------------------------------------------------------------------------------

// The first `count` of 32 channels of a row: 16 or all.
__device__ __forceinline__ void store_channels(const Gradient& g, int64_t at, int count, const float (&x)[32]) {
  if (g.out.dtype == Dtype::f32) {
    float* to = static_cast<float*>(g.out.data) + at;
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
      if (j >= count) break;
      if (g.wide) {
        *reinterpret_cast<float4*>(to + j) = make_float4(x[j], x[j + 1], x[j + 2], x[j + 3]);
      } else {
        to[j] = x[j], to[j + 1] = x[j + 1], to[j + 2] = x[j + 2], to[j + 3] = x[j + 3];
      }
    }
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(g.out.data) + at;
  const bool bf16 = g.out.dtype == Dtype::bf16;
  const auto pair = [&](int j) { return bf16 ? ptx::pack_bf16(x[j], x[j + 1]) : ptx::pack_f16(x[j], x[j + 1]); };
#pragma unroll
  for (int j = 0; j < 32; j += 8) {
    if (j >= count) break;
    const uint4 v = make_uint4(pair(j), pair(j + 2), pair(j + 4), pair(j + 6));
    if (g.wide) {
      *reinterpret_cast<uint4*>(to + j) = v;
    } else {
      const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) to[j + i] = uint16_t(word[i / 2] >> (16 * (i % 2)));
    }
  }
}

// 32 channels of 32 rows, of which a warp's threads have one each, as a block of an MX tensor.
__device__ __forceinline__ void store_mx_block(const Gradient& g, int64_t token, int64_t scale_at, int head,
                                               int channel, int count, bool there, const float (&x)[32]) {
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < 32; ++j) most = max(most, std::bit_cast<uint32_t>(x[j]) & 0x7FFFFFFFu);
  most = __reduce_max_sync(~0u, there ? most : 0u);
  const uint8_t scale = scale_from_amax(most, e4m3_format(), MxRule::rceil);
  if (ptx::lane_id() == 0) g.scale[scale_at] = scale;
  if (!there) return;
  uint8_t* to = g.codes + token * g.code_token_stride + head * g.code_head_stride + channel;
  const bool finite = scale != kE8m0Nan;
  const float inverse = std::bit_cast<float>(uint32_t(254 - (finite ? scale : 127)) << 23);
#pragma unroll
  for (int j = 0; j < 32; j += 4) {
    if (j >= count) break;
    uint32_t code = 0x7F7F7F7F;
    if (finite) {
      code = ptx::pack_e4m3(x[j] * inverse, x[j + 1] * inverse, x[j + 2] * inverse, x[j + 3] * inverse);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) to[j + i] = uint8_t(code >> (8 * i));
  }
}

// 32 columns of an accumulator, this thread's lane.
__device__ __forceinline__ void load_channels(uint32_t column, float (&x)[32]) {
  uint32_t word[32];
  ptx::tcgen05_ld(column, word);
  ptx::tcgen05_wait_ld(word);
#pragma unroll
  for (int j = 0; j < 32; ++j) x[j] = std::bit_cast<float>(word[j]);
}

// The same of a gradient that is rotated back (mx/rotation.h): channels from c on of the accumulator's row. A Hadamard
// transform of 64, 128 or 256 channels is one of 2, 4 or 8 pieces of 32, then one in each.
template <int kDim>
__device__ __forceinline__ void load_rotated_channels(const Gradient& g, uint32_t accumulator, int c, float (&x)[32]) {
  const int pieces = g.rotation / 32, first = pieces > 1 ? c / g.rotation * g.rotation : c;
  load_channels(accumulator + uint32_t(first), x);
#pragma unroll 1
  for (int i = 1; i < pieces; ++i) {
    float other[32];
    load_channels(accumulator + uint32_t(first + 32 * i), other);
    const int both = i & (c - first) / 32;
    const int parity = kDim > 128 ? both ^ both >> 1 ^ both >> 2 : both ^ both >> 1;
    const float sign = parity & 1 ? -1.0f : 1.0f;
#pragma unroll
    for (int j = 0; j < 32; ++j) x[j] = fmaf(sign, other[j], x[j]);
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    if (step >= g.rotation) break;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      if (j & step) continue;
      const float a = x[j], b = x[j + step];
      x[j] = a + b, x[j + step] = a - b;
    }
  }
  const float norm = hadamard_scale(g.rotation);
  const uint32_t signs = g.signs.word[c / 32];
#pragma unroll
  for (int j = 0; j < 32; ++j) x[j] *= signs >> j & 1 ? -norm : norm;
}

// Rows of an accumulator, this warpgroup's lanes, channels [first, end); zeros without one. add(row, c, x) adds to what
// is stored of channels from c on. For a warpgroup.
template <int kDim, class Add>
__device__ __forceinline__ void store_gradient(Place place, const Gradient& g, const Block& block, uint32_t tmem,
                                               bool any, int first_channel, int end_channel, Add&& add) {
  const int row = block.first + place.row();
  const Rows& s = block.own[0];
  const bool there = row < s.length;
#pragma unroll 1
  for (int c = first_channel; c < end_channel && c < g.dim; c += 32) {
    __syncwarp();  // rows that are not there skip what follows
    const int count = min(g.dim - c, 32);
    float x[32] = {};
    if (any && g.rotation > 1) {
      load_rotated_channels<kDim>(g, place.lanes(tmem), c, x);
    } else if (any) {
      load_channels(place.lanes(tmem) + uint32_t(c), x);
    }
#pragma unroll
    for (int j = 0; j < 32; ++j) x[j] *= g.factor;
    if (there) add(row, c, x);
    if (g.out && there) {
      store_channels(g, (s.start + row) * g.out.stride[0] + block.own_head * g.out.stride[1] + c, count, x);
    }
    if (g.codes) {
      store_mx_block(g, s.start + row, block.own_head * g.scale_head + (s.padded + row) / 32 * g.scale_columns + c / 32,
                     block.own_head, c, count, there, x);
    }
  }
}

// Zeros in rows of no sequence. All threads of the grid share them.
__device__ __forceinline__ void clear_slack(const Gradient& g, const Jagged& seq, int64_t tokens, int heads) {
  if (!seq.cu_seqlens) return;
  const int64_t first = seq.cu_seqlens[seq.batch], count = (tokens - first) * heads;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const int64_t token = first + i / heads, head = i % heads;
    for (int c = 0; c < g.dim; ++c) {
      if (g.out.dtype == Dtype::f32 && g.out) {
        static_cast<float*>(g.out.data)[token * g.out.stride[0] + head * g.out.stride[1] + c] = 0;
      } else if (g.out) {
        static_cast<uint16_t*>(g.out.data)[token * g.out.stride[0] + head * g.out.stride[1] + c] = 0;
      }
      if (g.codes) g.codes[token * g.code_token_stride + head * g.code_head_stride + c] = 0;
    }
  }
}

}  // namespace mxflash::bwd_sm100
