// Attention backward on Hopper (sm_90a): five FP8 wgmma products on records that pre passes write. docs/hopper.md tells
// the why, with measurements; attention_bwd_sm90.cuh has the scales.
//
//   S^T = K Q^T      P8 = 2^(S - lse')      dP^T = V dO^T      dS8 = P8 (dP 2^(u + v_scale) - delta')
//   dV += P8^T dO    dK += dS8^T Q          dQ += dS8 K
//
// A work item is a tile of 128 keys of one key head of one sequence, over all heads of its group and all tiles of 64
// rows that see one of the keys. dK and dV stay in tensor cores; dQ is added to fp32 or FP16 in the workspace by bulk
// reductions, so its last bits depend on their order. Hidden pairs get S = -inf in the tiles that a mask or an end of a
// sequence crosses; rows without a token, or without keys, have lse' = +inf.
//
// CTA: persistent; items come from a counter, in a head from its first keys on: under a causal mask more rows see
// these. A loading thread, which takes them, and two warpgroups of 64 keys each. Step i of a warpgroup:
//   dQ(i - 1) = dS8 K, half of the channels, from both warpgroups' dS8   under the first exponentials
//   dP(i)                                                                under the others
//   dV += (A from the registers of P8)
//   dS8 -> registers (A of dK), and transposed by stmatrix into shared memory for dQ
//   dK +=, S(i + 1); bulk reduction of dQ(i - 1); then all products are waited for
// The accumulators of S^T and dP^T are, packed, A fragments of dV and dK: rows are permuted in dO^T and Q^T to that
// end. stmatrix moves pairs of bytes, of keys r and r + 8 of 16: K^T has its keys in that order.
//
// Barriers (arrivals per phase):
//   item_full[b]       1            an item is there                     loader -> warpgroups
//   item_free[b]       8 warps      nobody reads it any more             warpgroups -> loader
//   key_full           1 + bytes    K, V, K^T are there                  loader -> warpgroups
//   key_free           8 warps      nobody reads them any more           warpgroups -> loader
//   full[s]            1 + bytes    a row record is there                loader -> warpgroups
//   free[s]            8 warps      nobody reads it any more             warpgroups -> loader
//   ds_full[i % 2]     8 warps      dS8 of step i is there               warpgroup <-> warpgroup
// dS8(i) may overwrite dS8(i - 2): ds_full of step i - 1 comes after everyone's dQ(i - 2).
// Shared memory (dim 128): keys 48 KiB, kStages row records of 33 KiB, dS8 2 x 8 KiB, dQ 32 KiB: 195 KiB.
// Registers: 240 for the warpgroups (dK, dV 128; S 32; dP or dQ 32; lse' and delta' 16), 24 for the loader.
#include <cfloat>

#include "attention/accumulators.cuh"
#include "attention/attention_bwd_sm90.cuh"
#include "attention/mask.h"
#include "attention/mx_piece.cuh"
#include "mx/e8m0.h"
#include "mx/rotation.h"
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

using namespace bwd_sm90;

constexpr int kWarpgroups = 2;
constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr int kWarps = 4 * kWarpgroups;
constexpr float kLog2e = 1.44269504088896341f;

// Where dk or dv goes.
struct Gradient {
  Tensor out;  // [total_k, num_heads_kv, dim]
  int32_t dim;
  int32_t rotation;   // group of channels that are rotated back; 1: none
  float factor;       // of the sum
  bool wide;          // 2-byte elements in rows aligned to 16 bytes
  uint32_t flips[4];  // a bit for each channel: the signs of the rotation
};

struct Params {
  const uint8_t *rows, *keys;
  const KeyTile* key_tile;
  const HeadScale* head_scale;
  int32_t* counter;  // of items taken
  uint8_t* dq;
  Gradient gradient[2];  // dv, dk
  TokenAxis out_axis, k_axis;
  Mask mask;
  int32_t heads_kv, group;
  int32_t row_tiles, key_tiles;  // of a head
  int32_t max_key_tiles;         // of a sequence
  int32_t items;
  bool has_mask;
  float scale_log2;  // softmax_scale log2(e) > 0
};

// One work item, as the loader hands it to the warpgroups.
struct Item {
  int32_t valid;  // 0: no more
  int32_t sequence, kv_head;
  int32_t first_key;  // in its sequence
  int32_t seqlen_q, seqlen_k;
  int32_t key_start;               // of the sequence, in dk and dv
  int32_t key_record;              // of all heads
  int32_t row_record;              // the first one of the sequence, in the group's first head
  int32_t first_tile, end_tile;    // row tiles that see one of the keys
  int32_t first_whole, end_whole;  // of these, the ones whose every row sees all keys
  int32_t k_scale;                 // exponents: of K,
  int32_t dp, unit[2];             // of dP's factor, and of the units of dV and dK
};
constexpr int kItemBytes = 80;
static_assert(sizeof(Item) <= kItemBytes);

template <int kDim, bool kHalf>
struct Config {
  static constexpr int kStages = kDim == 128 ? 3 : 4;
  static constexpr int kRowBytes = RowRecord::bytes(kDim);
  static constexpr int kStageBytes = (kRowBytes + 1023) / 1024 * 1024;
  static constexpr int kKeyBytes = KeyRecord::bytes(kDim);
  static constexpr int kDsBytes = kRows * kKeys;
  static constexpr int kDqBytes = kRows * kDim * (kHalf ? 2 : 4) / kWarps;  // of a warp
  static constexpr ptx::Swizzle kSwizzle = kDim == 128 ? ptx::Swizzle::b128 : ptx::Swizzle::b64;

  // Shared memory by address: constants, so that descriptors are, too. 1 KiB is the system's.
  static constexpr uint32_t kBase = 1024;
  static constexpr uint32_t kRing = kBase + kKeyBytes;
  static constexpr uint32_t kDs = kRing + kStages * kStageBytes;
  static constexpr uint32_t kDq = kDs + 2 * kDsBytes;
  static constexpr uint32_t kKeyFull = kDq + kWarps * kDqBytes;
  static constexpr uint32_t kKeyFree = kKeyFull + 8;
  static constexpr uint32_t kDsFull = kKeyFree + 8;
  static constexpr uint32_t kFull = kDsFull + 16;
  static constexpr uint32_t kFree = kFull + 8 * kStages;
  static constexpr uint32_t kItemFull = kFree + 8 * kStages;
  static constexpr uint32_t kItemFree = kItemFull + 16;
  static constexpr uint32_t kItems = kItemFree + 16;
  static constexpr uint32_t kVisible = kItems + 2 * kItemBytes;  // 16 bytes a thread
  static constexpr uint32_t kEnd = kVisible + 16 * 128 * kWarpgroups;
  static constexpr int kBytes = int(kEnd - kBase);
  static_assert(kEnd <= 228 * 1024);
  __device__ static Item& item(uint32_t buffer) {
    return *static_cast<Item*>(__cvta_shared_to_generic(kItems + kItemBytes * buffer));
  }
};

// The same in all threads of a warp, and known to be.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// ---- work items ---------------------------------------------------------------------------------------------------

// False if the sequence has no such tile. The loader has few registers: what is known goes to shared memory at once and
// is read from there again.
__device__ __forceinline__ bool decode_item(const Params& p, int32_t index, volatile Item& item) {
  item.first_key = index % p.max_key_tiles * kKeys;
  index /= p.max_key_tiles;
  item.sequence = index / p.heads_kv;
  item.kv_head = index % p.heads_kv;
  {
    const Sequence k = p.k_axis.sequence(item.sequence);
    item.seqlen_k = int32_t(k.length);
    if (item.first_key >= item.seqlen_k) return false;
    item.key_start = int32_t(k.start);
    item.key_record = item.kv_head * p.key_tiles + (int32_t(k.padded_start) + item.first_key) / kKeys;
  }
  {
    const Sequence q = p.out_axis.sequence(item.sequence);
    item.seqlen_q = int32_t(q.length);
    item.row_record = item.kv_head * p.group * p.row_tiles + int32_t(q.padded_start) / kRows;
  }
  {
    const KeyTile& tile = p.key_tile[item.key_record];
    const HeadScale& head = p.head_scale[item.sequence * p.heads_kv + item.kv_head];
    item.k_scale = tile.k_scale;
    item.dp = head.u + tile.v_scale;
    item.unit[0] = -head.w;
    item.unit[1] = -(head.t + head.u);
  }
  item.first_tile = 0;
  item.first_whole = 0;
  item.end_tile = (item.seqlen_q + kRows - 1) / kRows;
  item.end_whole = item.end_tile;
  if (p.has_mask) {
    const int32_t end_key = min(item.first_key + kKeys, item.seqlen_k);
    {
      const Range any = visible_rows(p.mask, item.first_key, end_key, item.seqlen_q, item.seqlen_k);
      item.first_tile = int32_t(any.first) / kRows;
      item.end_tile = (int32_t(any.end) + kRows - 1) / kRows;
    }
    {
      // Both bounds grow with the key: all keys are seen from the first row of the last one to the last of the first.
      const Range rows = visible_rows(p.mask, item.first_key, item.first_key + 1, item.seqlen_q, item.seqlen_k);
      item.end_whole = rows.end >= item.seqlen_q ? item.end_tile : int32_t(rows.end) / kRows;
    }
    const Range rows = visible_rows(p.mask, end_key - 1, end_key, item.seqlen_q, item.seqlen_k);
    item.first_whole = (int32_t(rows.first) + kRows - 1) / kRows;
    if (rows.empty()) item.end_whole = 0;
  }
  if (item.first_key + kKeys > item.seqlen_k) item.end_whole = 0;
  return true;
}

// ---- loader -------------------------------------------------------------------------------------------------------

template <int kDim, bool kHalf>
__device__ __forceinline__ void load(const Params& p) {
  using C = Config<kDim, kHalf>;
  uint32_t stage = 0, parity = 1, key_parity = 1, items = 0;
#pragma unroll 1
  while (true) {
    ptx::mbarrier_wait(C::kItemFree + 8 * (items & 1), (items >> 1 & 1) ^ 1);
    volatile Item& item = C::item(items & 1);
    // Not earlier: all rows of the item before are on their way, so few of its steps are left.
    const int32_t index = atomicAdd(p.counter, 1);
    if (index >= p.items) {
      item.valid = 0;
      ptx::mbarrier_arrive(C::kItemFull + 8 * (items & 1));
      return;
    }
    if (!decode_item(p, index, item)) continue;
    item.valid = 1;
    ptx::mbarrier_arrive(C::kItemFull + 8 * (items & 1));
    ++items;
    int32_t left = item.end_tile - item.first_tile;
    if (left == 0) continue;
    const uint8_t* keys = p.keys + int64_t(item.key_record) * C::kKeyBytes;
    const uint8_t* rows = p.rows + int64_t(item.row_record + item.first_tile) * C::kRowBytes;
    const int32_t per_head = left;
    // The keys come behind the first rows, whose stages are free before.
    int32_t until_keys = min(C::kStages, p.group * left);
#pragma unroll 1
    for (int32_t g = p.group; g > 0;) {
      ptx::mbarrier_wait(C::kFree + 8 * stage, parity);
      ptx::mbarrier_arrive_expect_tx(C::kFull + 8 * stage, C::kRowBytes);
      ptx::bulk_load(C::kRing + stage * C::kStageBytes, rows, C::kRowBytes, C::kFull + 8 * stage);
      if (++stage == C::kStages) stage = 0, parity ^= 1;
      if (--until_keys == 0) {
        ptx::mbarrier_wait(C::kKeyFree, key_parity);
        key_parity ^= 1;
        ptx::mbarrier_arrive_expect_tx(C::kKeyFull, C::kKeyBytes);
        ptx::bulk_load(C::kBase, keys, C::kKeyBytes, C::kKeyFull);
      }
      rows += C::kRowBytes;
      if (--left == 0) {  // the next head
        --g;
        left = per_head;
        rows += int64_t(p.row_tiles - per_head) * C::kRowBytes;
      }
    }
  }
}

// ---- warpgroups ---------------------------------------------------------------------------------------------------

// 2^e as a factor that keeps normal numbers normal; e is clamped to where it is one.
__device__ __forceinline__ float power(int e) { return __int_as_float((min(max(e, -126), 127) + 127) << 23); }
__device__ __forceinline__ float score_scale(float scale_log2, int e) {
  return fmaxf(scale_log2 * power(min(e, 90)), FLT_MIN);
}

// Rotates the channels of a row back, in a quad's registers of two rows: x[4 j + 2 r + e] is channel 8 j + 2 c + e.
template <int kCount>
__device__ __forceinline__ void rotate_back_rows(float (&x)[kCount], const Gradient& g, int c) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const float a = x[i], b = x[i + 1];
    x[i] = a + b, x[i + 1] = a - b;
  }
#pragma unroll
  for (int bit = 1; bit <= 2; ++bit) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], bit);
      x[i] = c & bit ? other - x[i] : x[i] + other;
    }
  }
#pragma unroll
  for (int step = 4; step < kCount; step *= 2) {
    if (2 * step >= g.rotation) break;  // a register step of 4 is 8 channels
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i & step) continue;
      const float a = x[i], b = x[i + step];
      x[i] = a + b, x[i + step] = a - b;
    }
  }
  const float norm = hadamard_scale(g.rotation);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int channel = 8 * (i >> 2) + (i & 1);
    const bool flip = g.flips[channel / 32] >> (channel % 32 + 2 * c) & 1;
    x[i] *= flip ? -norm : norm;
  }
}

template <int kDim, bool kHalf>
struct Warpgroup {
  using C = Config<kDim, kHalf>;
  static constexpr int kAcc = kDim / 2;          // registers of dK, of dV
  static constexpr int kDqAcc = kDim / 4;        // of dQ
  static constexpr int kScores = kRows / 2;      // of S, of dP
  static constexpr int kScoreSteps = kDim / 32;  // K-steps of S and dP

  const Params& p;
  const int warpgroup, warp;  // warp within the warpgroup
  const int lane;

  float dk[kAcc], dv[kAcc];
  float s[kScores];
  float dq[kDqAcc];
  float stats[kRows / 4];  // lse', then delta', of this thread's rows
  int q_scale;
  uint32_t stage = 0, parity = 0, key_parity = 0;
  uint32_t steps = 0;  // of all items: dS8 buffer and its phase

  __device__ static uint32_t ring(uint32_t stage) { return C::kRing + stage * C::kStageBytes; }
  // A descriptor inside a stage: constants, and one multiplication that is an addition.
  __device__ static uint64_t in_stage(uint32_t offset, ptx::Swizzle swizzle, uint32_t stage) {
    return ptx::matrix_descriptor(C::kRing + offset, swizzle) + uint64_t(stage * (C::kStageBytes / 16));
  }
  __device__ uint32_t dq_buffer() const { return C::kDq + uint32_t(warpgroup * 4 + warp) * C::kDqBytes; }

  // S^T of the record in the present stage.
  __device__ __forceinline__ void issue_scores() {
    const uint64_t k = ptx::matrix_descriptor(C::kBase + KeyRecord::k(kDim) + warpgroup * 64 * kDim, C::kSwizzle);
    const uint64_t q = in_stage(RowRecord::q(kDim), C::kSwizzle, stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kScoreSteps; ++i) ptx::wgmma_e4m3(s, ptx::advance(k, 32 * i), ptx::advance(q, 32 * i), i > 0);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void load_stats(uint32_t address, int piece) {
    const float4 x = ptx::load_shared_float4(address + 16 * (lane % 4) + 64 * piece);
    stats[4 * piece] = x.x, stats[4 * piece + 1] = x.y, stats[4 * piece + 2] = x.z, stats[4 * piece + 3] = x.w;
  }
  __device__ __forceinline__ void load_lse() {
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) load_stats(ring(stage) + RowRecord::lse(kDim), i);
    q_scale = ptx::load_shared_int(ring(stage) + RowRecord::header(kDim));
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
  // dQ to this warp's buffer, when the reduction before has read it.
  __device__ __forceinline__ void stage_dq() {
    if (lane == 0) ptx::bulk_wait_read<0>();
    __syncwarp();
    const uint32_t to = dq_buffer() + 16 * lane;
    if constexpr (!kHalf) {
#pragma unroll
      for (int j = 0; j < kDqAcc / 4; ++j) {
        ptx::store_shared_float4(to + 512 * j, make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]));
      }
    } else {
      constexpr float kUnit = 1.0f / (1 << 10);
#pragma unroll
      for (int j = 0; j < kDqAcc / 8; ++j) {
        float pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          pair[i] = __uint_as_float(pack_half(Dtype::f16, dq[8 * j + 2 * i] * kUnit, dq[8 * j + 2 * i + 1] * kUnit));
        }
        ptx::store_shared_float4(to + 512 * j, make_float4(pair[0], pair[1], pair[2], pair[3]));
      }
    }
  }
  // By one lane, behind a proxy fence.
  __device__ __forceinline__ void reduce_dq(int32_t record) {
    uint8_t* to = p.dq + (int64_t(record) * kWarps + warpgroup * 4 + warp) * C::kDqBytes;
    if constexpr (kHalf) {
      ptx::bulk_reduce_add_f16(to, dq_buffer(), C::kDqBytes);
    } else {
      ptx::bulk_reduce_add_f32(to, dq_buffer(), C::kDqBytes);
    }
    ptx::bulk_commit();
  }

  // The rows that see this thread's keys, where some tile needs them; kept in shared memory, for want of registers.
  __device__ __forceinline__ uint32_t rows_address() const {
    return C::kVisible + 16 * (128 * warpgroup + 32 * warp + lane);
  }
  __device__ __forceinline__ void find_rows(const Item& item) const {
    int32_t bounds[4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t key = key_index(item, r);
      Range rows{};
      if (key < item.seqlen_k) rows = visible_rows(p.mask, key, key + 1, item.seqlen_q, item.seqlen_k);
      bounds[2 * r] = int32_t(rows.first) - 2 * (lane % 4);
      bounds[2 * r + 1] = int32_t(rows.end) - 2 * (lane % 4);
    }
    ptx::store_shared_float4(rows_address(), make_float4(__int_as_float(bounds[0]), __int_as_float(bounds[1]),
                                                         __int_as_float(bounds[2]), __int_as_float(bounds[3])));
  }
  // Hidden pairs of a tile of rows get a score of -inf.
  __device__ __forceinline__ void hide(int32_t tile) {
    const float4 bounds = ptx::load_shared_float4(rows_address());
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

  // P8 of 16 rows; their lse' gives way to delta'.
  __device__ __forceinline__ void exponentials(int piece, float c, uint32_t (&probability)[2][4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 8 * piece + 4 * h + e;
        s[i] = ptx::exp2_approx(fmaf(s[i], c, -stats[4 * piece + 2 * h + (e & 1)]));
      }
    }
    load_stats(ring(stage) + RowRecord::delta(kDim), piece);
    pack(s, piece, probability);
  }

  // One row tile; kFirst: of the item. `last`: there is none after it.
  template <bool kFirst>
  __device__ __forceinline__ void step(int32_t tile, bool masked, bool last, int32_t record_before, int k_scale,
                                       float dp_scale) {
    if (!kFirst) {
      wait_ds(steps - 1);
      ptx::wgmma_fence();
      issue_dq(steps - 1);
    }
    const float c = score_scale(p.scale_log2, q_scale + k_scale);
    if (masked) hide(tile);
    uint32_t probability[2][4], ds[2][4];
    exponentials(0, c, probability);
    exponentials(1, c, probability);
    if (!kFirst) {
      ptx::wgmma_wait<0>();
      stage_dq();
    }
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
    ptx::wgmma_wait<1>();  // dP
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = 8 * piece + 4 * h + e;
          dp[i] = s[i] * fmaf(dp[i], dp_scale, -stats[4 * piece + 2 * h + (e & 1)]);
        }
      }
      pack(dp, piece, ds);
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
    if (lane == 0) ptx::mbarrier_arrive(C::kDsFull + 8 * (steps & 1));
    if (!last) ptx::mbarrier_wait(C::kFull + 8 * stage, parity);
    issue_scores();  // after the last one of what is there, for nothing: a branch would cost more
    load_lse();
    if (!kFirst && lane == 0) reduce_dq(record_before);
    ptx::wgmma_wait<0>();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(C::kFree + 8 * done);
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
        write_zeros(item);
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(C::kItemFree + 8 * (items & 1));
    }
    if (lane == 0) ptx::bulk_wait<0>();
  }

  __device__ __forceinline__ void differentiate(const Item& item) {
    const int k_scale = uniform(item.k_scale);
    const float dp_scale = power(uniform(item.dp));
    ptx::mbarrier_wait(C::kKeyFull, key_parity);
    key_parity ^= 1;
    ptx::mbarrier_wait(C::kFull + 8 * stage, parity);
    issue_scores();
    load_lse();
    ptx::wgmma_wait<0>();

    const int32_t first_tile = uniform(item.first_tile), end_tile = uniform(item.end_tile);
    const int32_t first_whole = uniform(item.first_whole), end_whole = uniform(item.end_whole);
    int32_t left = p.group * (end_tile - first_tile);
    int32_t tile = first_tile, record = uniform(item.row_record) + first_tile, before = record;
    if (first_whole > first_tile || end_whole < end_tile) find_rows(item);
    const auto masked = [&] { return tile < first_whole || tile >= end_whole; };
    const auto next = [&] {
      --left;
      before = record++;
      if (++tile == end_tile) {
        tile = first_tile;
        record += p.row_tiles - (end_tile - first_tile);
      }
    };
    step<true>(tile, masked(), left == 1, before, k_scale, dp_scale);
    next();
#pragma unroll 1
    while (left > 0) {
      step<false>(tile, masked(), left == 1, before, k_scale, dp_scale);
      next();
    }
    wait_ds(steps - 1);
    ptx::wgmma_fence();
    issue_dq(steps - 1);
    ptx::wgmma_wait<0>();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(C::kKeyFree);
    stage_dq();
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) reduce_dq(before);

    if (p.gradient[1].rotation > 1) rotate_back_rows(dk, p.gradient[1], lane % 4);
      // One copy of the code, for the instruction cache's sake.
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      write(dv, item, p.gradient[n], item.unit[n]);
#pragma unroll
      for (int i = 0; i < kAcc; ++i) dv[i] = dk[i];
    }
  }

  // This thread's key `r`, in its sequence.
  __device__ __forceinline__ int32_t key_index(const Item& item, int r) const {
    return item.first_key + warpgroup * 64 + warp * 16 + lane / 4 + 8 * r;
  }
  __device__ __forceinline__ int64_t key_offset(const Item& item, const Tensor& out, int32_t key) const {
    return (int64_t(item.key_start) + key) * out.stride[0] + item.kv_head * out.stride[1];
  }

  // x 2^exponent times the gradient's factor.
  __device__ __forceinline__ void write(float (&x)[kAcc], const Item& item, const Gradient& g, int exponent) {
    const float f = g.factor * power(exponent);
#pragma unroll
    for (int i = 0; i < kAcc; ++i) x[i] *= f;
    if (!g.wide) {
      write_narrow(x, item, g);
    } else if (g.out.dtype == Dtype::bf16) {
      write_wide<Dtype::bf16>(x, item, g);
    } else {
      write_wide<Dtype::f16>(x, item, g);
    }
  }
  template <Dtype kDtype>
  __device__ __forceinline__ void write_wide(const float (&x)[kAcc], const Item& item, const Gradient& g) const {
    const int c = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t key = key_index(item, r);
      uint16_t* to = static_cast<uint16_t*>(g.out.data) + key_offset(item, g.out, key) + 8 * c;
#pragma unroll
      for (int j = 0; j < kDim / 8; j += 4) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          word[i] = pack_half(kDtype, x[4 * (j + i) + 2 * r], x[4 * (j + i) + 2 * r + 1]);
        }
        const uint4 piece = transpose_quad(word, c);
        if (key < item.seqlen_k && 8 * (j + c) < g.dim) *reinterpret_cast<uint4*>(to + 8 * j) = piece;
      }
    }
  }
  __device__ __forceinline__ void write_narrow(const float (&x)[kAcc], const Item& item, const Gradient& g) const {
    const int c = lane % 4;
    const bool fp32 = g.out.dtype == Dtype::f32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t key = key_index(item, r);
      if (key >= item.seqlen_k) continue;
      const int64_t row = key_offset(item, g.out, key) + 2 * c;
      if (fp32) {
        float* to = static_cast<float*>(g.out.data) + row;
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j) {
          if (8 * j + 2 * c < g.dim) to[8 * j] = x[4 * j + 2 * r], to[8 * j + 1] = x[4 * j + 2 * r + 1];
        }
      } else {
        uint16_t* to = static_cast<uint16_t*>(g.out.data) + row;
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j) {
          const uint32_t word = pack_half(g.out.dtype, x[4 * j + 2 * r], x[4 * j + 2 * r + 1]);
          if (8 * j + 2 * c < g.dim) to[8 * j] = uint16_t(word), to[8 * j + 1] = uint16_t(word >> 16);
        }
      }
    }
  }

  // Keys that no row sees.
  __device__ __forceinline__ void write_zeros(const Item& item) const {
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      const Gradient* g = &p.gradient[n];
#pragma unroll 1
      for (int r = 0; r < 2; ++r) {
        const int32_t key = key_index(item, r);
        if (key >= item.seqlen_k) continue;
        const int64_t row = key_offset(item, g->out, key);
#pragma unroll 1
        for (int channel = lane % 4; channel < g->dim; channel += 4) store_element(g->out, row + channel, 0);
      }
    }
  }
};

// ---- kernel -------------------------------------------------------------------------------------------------------

template <int kDim, bool kHalf>
__global__ void __launch_bounds__(kThreads, 1) attention_bwd_kernel(const __grid_constant__ Params p) {
  using C = Config<kDim, kHalf>;
  extern __shared__ uint8_t raw[];
  if (ptx::shared_address(raw) != C::kBase) __trap();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(C::kKeyFull, 1);
    ptx::mbarrier_init(C::kKeyFree, kWarps);
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(C::kDsFull + 8 * i, kWarps);
      ptx::mbarrier_init(C::kItemFull + 8 * i, 1);
      ptx::mbarrier_init(C::kItemFree + 8 * i, kWarps);
    }
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(C::kFull + 8 * i, 1);
      ptx::mbarrier_init(C::kFree + 8 * i, kWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  // Through shuffles, so that the compiler knows them to be the same in the whole warp: descriptors are then uniform.
  const int warpgroup = uniform(int(threadIdx.x) / 128);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<24>();
    if (threadIdx.x == 0) load<kDim, kHalf>(p);
  } else {
    ptx::setmaxnreg_inc<240>();
    Warpgroup<kDim, kHalf>{p, warpgroup - 1, uniform(int(threadIdx.x) / 32 % 4), int(threadIdx.x) % 32}.run();
  }
}

// ---- host ---------------------------------------------------------------------------------------------------------

Status supports(const AttentionBwd& a) {
  constexpr const char* op = "attention_bwd";
  MXFLASH_TRY(check_compute_capability(op, "sm90", a.q.data.device.index, 90));
  // docs/hopper.md says what is missing.
  if (!forced_backend(a.backend)) {
    return unsupported(
        "%s: sm90: backend must be named (sm90) while the sums of this kernel are not promoted, got null", op);
  }
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
  if (!a.row_exponent && s.total_out > 0) {
    return unsupported("%s: sm90: row_exponent must be given, got null", op);
  }
  if (a.ds_dtype != Dtype::e4m3) {
    return unsupported("%s: sm90: ds_dtype must be e4m3, got %s", op, dtype_name(a.ds_dtype));
  }
  const int64_t tokens = std::max(
      {s.total_q, s.total_k, padded_token_count(s.total_out, s.seq_out()), padded_token_count(s.total_k, s.seq_k)});
  if (tokens >= int64_t(1) << 31) {
    return unsupported("%s: sm90: tokens must be fewer than 2^31, got %lld", op, static_cast<long long>(tokens));
  }
  if (s.num_heads_q > 65535) {
    return unsupported("%s: sm90: num_heads_q must be at most 65535, got %lld", op,
                       static_cast<long long>(s.num_heads_q));
  }
  const double items = double(s.batch) * double(s.num_heads_kv) * double(ceil_div(s.max_seqlen_k, kKeys));
  const double records = double(s.num_heads_q) * double(padded_token_count(s.total_out, s.seq_out())) / kRows;
  if (items >= double(1 << 30) || records >= double(1 << 30)) {
    return unsupported("%s: sm90: tiles of rows and of keys must be fewer than 2^30, got %g and %g", op, records,
                       items);
  }
  return {};
}

size_t workspace(const AttentionBwd& a) {
  size_t used = 0;
  Call(a, nullptr, &used);
  return used;
}

Gradient gradient(const Tensor& given, const MxTensor& mx, float* fp32, int64_t dim, double factor,
                  const AttentionBwd& a, bool rotated) {
  Gradient g{.out = given,
             .dim = int32_t(dim),
             .rotation = rotated && a.rotate_qk ? int32_t(rotation_group(dim)) : 1,
             .factor = float(factor),
             .wide = false,
             .flips = {}};
  if (mx) {
    g.out = make_tensor(fp32, Dtype::f32, mx.data.shape[0], mx.data.shape[1], mx.data.shape[2]);
    g.out.device = mx.data.device;
  }
  g.wide = g.out.dtype != Dtype::f32 && reinterpret_cast<uintptr_t>(g.out.data) % 16 == 0 && g.out.stride[0] % 8 == 0 &&
           g.out.stride[1] % 8 == 0;
  for (int c = 0; c < int(kMaxImageDim); ++c) {
    if (rotation_flips(a.rotate_seed, c)) g.flips[c / 32] |= uint32_t(1) << (c % 32);
  }
  return g;
}

template <int kDim, bool kHalf>
Status launch_kernel(const Params& params, int grid, Stream stream) {
  const Launch at{"attention_bwd: sm90", dim3(uint32_t(grid)), kThreads, Config<kDim, kHalf>::kBytes, stream};
  return launch(at, attention_bwd_kernel<kDim, kHalf>, params);
}

Status run(const AttentionBwd& a, Stream stream) {
  const DeviceGuard guard(a.q.data.device.index);
  MXFLASH_TRY(guard.status());
  const Call call(a, a.workspace);
  const AttentionShape& s = call.shape;
  MXFLASH_TRY(pre(a, call, stream));
  const Params params{
      .rows = call.w.rows,
      .keys = call.w.keys,
      .key_tile = call.w.key_tile,
      .head_scale = call.w.head_scale,
      .counter = call.w.counter,
      .dq = call.w.dq,
      .gradient = {gradient(a.dv, a.dv_mx, call.w.dv, s.head_dim_v, 1, a, false),
                   gradient(a.dk, a.dk_mx, call.w.dk, s.head_dim, s.softmax_scale, a, true)},
      .out_axis = TokenAxis::of(s.total_out, call.seq_out),
      .k_axis = TokenAxis::of(s.total_k, s.seq_k),
      .mask = a.mask,
      .heads_kv = int32_t(s.num_heads_kv),
      .group = int32_t(s.group),
      .row_tiles = call.row_tiles,
      .key_tiles = call.key_tiles,
      .max_key_tiles = int32_t(ceil_div(s.max_seqlen_k, kKeys)),
      .items = int32_t(s.batch * s.num_heads_kv * ceil_div(s.max_seqlen_k, kKeys)),
      .has_mask = a.mask.causal || a.mask.window_left >= 0 || a.mask.window_right >= 0,
      .scale_log2 = float(s.softmax_scale * double(kLog2e)),
  };
  const int grid = std::min(multiprocessor_count(), params.items);
  const auto kernel = call.half_dq ? (call.dim == 128 ? launch_kernel<128, true> : launch_kernel<64, true>)
                                   : (call.dim == 128 ? launch_kernel<128, false> : launch_kernel<64, false>);
  MXFLASH_TRY(kernel(params, grid, stream));
  return post(a, call, stream);
}

}  // namespace

const Impl<AttentionBwd> kAttentionBwdSm90 = sm90_backend<AttentionBwd>(supports, run, workspace);

}  // namespace mxflash
