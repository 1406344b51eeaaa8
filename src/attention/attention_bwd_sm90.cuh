// What the passes of the sm90 backward hand to each other: records in the workspace, and the scales that join them.
//
// Every operand of the five products is rewritten once, by the pre passes, as E4M3 with one power of two where the
// tensor cores need it; factors that depend on a row are folded into operands, so that the main kernel has one FMA
// after each product. For row i (of a query head), key j, and the exponents below, all powers of two:
//
//   pe_i  = 8 + row_exponent_i        P8_ij = P_ij 2^pe_i <= 256
//   er_i  : dout_i 2^er_i fits E4M3   dS8_ij = P8_ij (raw_dP 2^(u + v_scale) - delta'_i) = dS_ij 2^(pe_i + er_i + u)
//   operand images                    Q 2^-q_scale      K 2^-k_scale      V 2^-v_scale      dO_i 2^er_i
//   and with what the rows brought in Q^T_i 2^(t - pe_i - er_i)           dO^T_i 2^(w - pe_i)           K^T 2^-kt
//   so that   dV = acc 2^-w           dK = softmax_scale acc 2^-(t + u)
//             dQ_i = softmax_scale acc 2^(kt - pe_i - er_i - u)
//
// q_scale, t and w are of 64 rows of a head: t and w, in its record, make the largest elements fit. Where they change
// from tile to tile the main kernel moves the units of its sums; within kUnitRange binades of a head's largest rows.
// k_scale and v_scale are of 128 keys; u and kt of all rows and keys of one sequence that belong to one key head: u is
// the largest with which no dS8 can exceed 448. It is known when all records are; the main kernel multiplies delta' by
// it.
#pragma once

#include <bit>
#include <cfloat>

#include "attention/attention.h"
#include "attention/attention_plan.cuh"
#include "mx/e8m0.h"
#include "mx/operand_image.h"
#include "runtime/arena.h"
#include "runtime/cuda.h"

namespace mxflash::bwd_sm90 {

inline constexpr int kRows = 64;   // query rows of a tile
inline constexpr int kKeys = 128;  // keys of a tile
// Row tiles that tensor cores may add up: FP8 products cut off about 2^-13 of the sum with every step of 32 rows.
inline constexpr int kPromoteTiles = 32;

// Behind lse' and delta' of a row record.
struct RowHeader {
  int32_t q_scale;
  int32_t t, w;
  int32_t dq_unit;  // of FP16 sums: 2^dq_unit, with which no sum of this tile can reach Inf
};

// One row tile of a query head, as shared memory holds it: Q, dO [64][dim], Q^T, dO^T [dim][64] (tokens permuted like
// those of a value image), then lse' and delta' 2^-u (64 floats each, permuted) and the header.
struct RowRecord {
  static constexpr int q(int) { return 0; }
  static constexpr int q_t(int dim) { return kRows * dim; }
  static constexpr int dout(int dim) { return 2 * kRows * dim; }
  static constexpr int dout_t(int dim) { return 3 * kRows * dim; }
  static constexpr int lse(int dim) { return 4 * kRows * dim; }
  static constexpr int delta(int dim) { return lse(dim) + 4 * kRows; }
  static constexpr int header(int dim) { return delta(dim) + 4 * kRows; }
  // Whole lines of L2.
  static constexpr int bytes(int dim) { return (header(dim) + int(sizeof(RowHeader)) + 127) / 128 * 128; }
};

// One key tile of a key head: K, V [128][dim], K^T [dim][128] with the keys of each 16 in the order 0 8 1 9 2 10 ...
struct KeyRecord {
  static constexpr int k(int) { return 0; }
  static constexpr int v(int dim) { return kKeys * dim; }
  static constexpr int k_t(int dim) { return 2 * kKeys * dim; }
  static constexpr int bytes(int dim) { return 3 * kKeys * dim; }
};

// Where the row of index `i` of a tile has its lse' and delta': a thread of the main kernel reads four at a time, those
// of columns 8 (2 p + h) + 2 c + e for h, e in {0, 1}.
constexpr int stats_row(int index) {
  const int p = index >> 4, c = index >> 2 & 3, h = index >> 1 & 1, e = index & 1;
  return 8 * (2 * p + h) + 2 * c + e;
}

// The least e with x <= 448 2^e, -127 for zero. NaN bounds nothing, Inf is as much as fp32 can hold.
constexpr int exponent_for(float x) {
  const uint32_t bits = x > 0 ? std::bit_cast<uint32_t>(x < FLT_MAX ? x : FLT_MAX) : 0;
  return int(scale_from_amax(bits, e4m3_format(), MxRule::rceil)) - kE8m0Bias;
}

// Of a row tile.
struct RowTile {
  int32_t t, w;     // before they are limited by the head's
  int32_t dq_unit;  // as in the record
};
struct KeyTile {
  int32_t k_scale, v_scale;
};
// Of a sequence and key head, with its group.
struct HeadScale {
  int32_t t, w;     // the least of its records
  int32_t kt, v;    // |k| <= 448 2^kt, |v| <= 448 2^v
  float norm;       // the largest ||dO_i|| 2^er_i, half of it where P may exceed 1/2 (attention_bwd_pre_sm90.cu)
  float delta;      // the largest |delta_i| 2^er_i that counts beside it
  float v_norm;     // the largest ||V_j||
  int32_t cleared;  // shares of dQ that are: as many as key tiles, in the main kernel
  int32_t done;     // key tiles whose part of dQ is in the workspace: post need not wait for the rest

  // |dS8| <= 256 (norm v_norm + delta) 2^u; some more than 256, for roundoff.
  constexpr int u() const {
    const float bound = 258 * (norm * v_norm + delta);
    return bound > 0 ? -exponent_for(bound) : 0;
  }
};

// t and w of a head are at most this much above its least: rows of less than 2^-60 of the largest count as nothing in
// dK and dV, and units move without overflow.
inline constexpr int kUnitRange = 60;
// They are the same for runs of row tiles whose own would differ by no more than kRunBinades, so that sums seldom move.
inline constexpr int kRunTiles = 16;
inline constexpr int kRunBinades = 4;

struct Workspace {
  uint8_t *rows, *keys;  // records [heads][tiles]
  // [num_heads_q][row tiles][64 dim] fp32, or FP16 in units of 2^dq_unit, in the order of the main kernel's
  // accumulators; where dq_turn is 0 it holds nothing.
  uint8_t* dq;
  int16_t* row_unit;      // pe + er [num_heads_q][padded rows]
  RowTile* row_tile;      // [num_heads_q][row tiles]
  KeyTile* key_tile;      // [num_heads_kv][key tiles]
  HeadScale* head_scale;  // [batch][num_heads_kv]
  int32_t* dq_turn;       // [num_heads_q][row tiles][2 halves]: the key tile to add next; 0 in the end: nobody wrote
  float *dk, *dv;         // [total_k][num_heads_kv][head_dim, head_dim_v], where they are to be quantized
  float4* sums;           // what the main kernel's CTAs empty their accumulators into, where they need to
  AttentionPlan plan;     // of key tiles; pre sets its counter to 0
};

// A call, as all passes see it. Row tiles lie on the padded axis of out.
struct Call {
  AttentionShape shape;
  Jagged seq_out;
  int32_t dim;  // of images: head_dim and head_dim_v padded to 64 or 128
  int32_t row_tiles, key_tiles;
  bool half_dq;
  bool ordered;           // dQ is added in the order of key tiles, the first of them written; else it is cleared:
  int32_t cleared_heads;  // of so many key heads, in the order of sequences, by pre; of others by the main kernel
  Workspace w;

  // Row tiles that an item adds up over, at most.
  int64_t most_steps() const { return shape.group * ceil_div(shape.max_seqlen_q, int64_t(kRows)); }
  int dq_bytes() const { return kRows * dim * (half_dq ? 2 : 4); }  // of a row tile

  Call(const AttentionBwd& a, void* workspace, size_t* used = nullptr) : shape(AttentionShape::of(a)) {
    const AttentionShape& s = shape;
    seq_out = s.seq_out();
    dim = int32_t(std::max(image_dim(s.head_dim), image_dim(s.head_dim_v)));
    row_tiles = int32_t(padded_token_count(s.total_out, seq_out) / kRows);
    key_tiles = int32_t(padded_token_count(s.total_k, s.seq_k) / kKeys);
    half_dq = a.dq_accum == Dtype::f16;
    ordered = a.deterministic;
    cleared_heads = INT32_MAX;
    Arena arena(workspace);
    const int64_t rows = s.num_heads_q * row_tiles, keys = s.num_heads_kv * key_tiles;
    w.rows = arena.take<uint8_t>(rows * RowRecord::bytes(dim));
    w.keys = arena.take<uint8_t>(keys * KeyRecord::bytes(dim));
    w.dq = arena.take<uint8_t>(rows * dq_bytes());
    w.row_unit = arena.take<int16_t>(rows * kRows);
    w.row_tile = arena.take<RowTile>(rows);
    w.key_tile = arena.take<KeyTile>(keys);
    w.head_scale = arena.take<HeadScale>(s.batch * s.num_heads_kv);
    w.dq_turn = arena.take<int32_t>(2 * rows);
    w.dk = a.dk_mx ? arena.take<float>(s.total_k * s.num_heads_kv * s.head_dim) : nullptr;
    w.dv = a.dv_mx ? arena.take<float>(s.total_k * s.num_heads_kv * s.head_dim_v) : nullptr;
    if (most_steps() > kPromoteTiles) w.sums = arena.take<float4>(multiprocessor_count() * kKeys * dim / 2);
    w.plan = AttentionPlan::of(arena, s.seq_k, seq_out);
    if (used) *used = arena.used();
  }
};

// The passes, in this order. Each kernel but the first of a call may start before the one ahead of it is done, and
// waits for it before it reads, or overwrites, what that one handles. pre: everything that the main kernel reads, and
// zeros in w.dq_turn (or w.dq, of cleared_heads) and in rows of no sequence.
Status pre(const AttentionBwd& a, const Call& call, Stream stream);
// Rows of a head are there as soon as all its key tiles are done, while the main kernel works on others. dq from w.dq;
// dk and dv quantized from w.dk, w.dv where that is asked for.
Status post(const AttentionBwd& a, const Call& call, Stream stream);

}  // namespace mxflash::bwd_sm90
