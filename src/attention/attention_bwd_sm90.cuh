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
// the largest with which no dS8 can exceed 448. The main kernel multiplies delta' by 2^u.
#pragma once

#include "attention/attention.h"
#include "mx/operand_image.h"
#include "runtime/arena.h"

namespace mxflash::bwd_sm90 {

inline constexpr int kRows = 64;   // query rows of a tile
inline constexpr int kKeys = 128;  // keys of a tile

// The last 16 bytes of a row record.
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
  static constexpr int bytes(int dim) { return header(dim) + int(sizeof(RowHeader)); }
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

// Of a row.
struct RowScale {
  float delta;  // times 2^er
  int16_t pe, er;
};
// Of a row tile: what bounds dS8 and the images.
struct RowTile {
  float norm, delta;    // largest ||dO_i|| 2^er_i and |delta_i| 2^er_i
  int32_t q_t, dout_t;  // |q| 2^-(pe + er) <= 448 2^q_t, |dout| 2^-pe <= 448 2^dout_t
  int32_t q_scale;
  int32_t dq_unit;
};
struct KeyTile {
  int32_t k_scale, v_scale;
  float v_norm;  // largest ||V_j||
};
// Of a sequence and key head.
struct HeadScale {
  int32_t u, t, w, kt;
};

// t and w of a head are at most this much above its least: rows of less than 2^-60 of the largest count as nothing in
// dK and dV, and units move without overflow.
inline constexpr int kUnitRange = 60;

struct Workspace {
  uint8_t *rows, *keys;  // records [heads][tiles]
  // [num_heads_q][row tiles][64 dim] fp32, or FP16 in units of 2^kHalfUnit, in the order of the main kernel's
  // accumulators.
  uint8_t* dq;
  RowScale* row_scale;    // [num_heads_q][padded rows]
  RowTile* row_tile;      // [num_heads_q][row tiles]
  KeyTile* key_tile;      // [num_heads_kv][key tiles]
  int32_t* key_exponent;  // kt [batch][num_heads_kv]
  HeadScale* head_scale;  // [batch][num_heads_kv]
  int32_t* counter;       // of the main kernel's items; pre sets it to 0
  float *dk, *dv;         // [total_k][num_heads_kv][head_dim, head_dim_v], where they are to be quantized
};

// A call, as all passes see it. Row tiles lie on the padded axis of out.
struct Call {
  AttentionShape shape;
  Jagged seq_out;
  int32_t dim;  // of images: head_dim and head_dim_v padded to 64 or 128
  int32_t row_tiles, key_tiles;
  bool half_dq;
  Workspace w;

  int dq_bytes() const { return kRows * dim * (half_dq ? 2 : 4); }  // of a row tile

  Call(const AttentionBwd& a, void* workspace, size_t* used = nullptr) : shape(AttentionShape::of(a)) {
    const AttentionShape& s = shape;
    seq_out = s.seq_out();
    dim = int32_t(std::max(image_dim(s.head_dim), image_dim(s.head_dim_v)));
    row_tiles = int32_t(padded_token_count(s.total_out, seq_out) / kRows);
    key_tiles = int32_t(padded_token_count(s.total_k, s.seq_k) / kKeys);
    half_dq = a.dq_accum == Dtype::f16;
    Arena arena(workspace);
    const int64_t rows = s.num_heads_q * row_tiles, keys = s.num_heads_kv * key_tiles;
    w.rows = arena.take<uint8_t>(rows * RowRecord::bytes(dim));
    w.keys = arena.take<uint8_t>(keys * KeyRecord::bytes(dim));
    w.dq = arena.take<uint8_t>(rows * dq_bytes());
    w.row_scale = arena.take<RowScale>(rows * kRows);
    w.row_tile = arena.take<RowTile>(rows);
    w.key_tile = arena.take<KeyTile>(keys);
    w.key_exponent = arena.take<int32_t>(s.batch * s.num_heads_kv);
    w.head_scale = arena.take<HeadScale>(s.batch * s.num_heads_kv);
    w.counter = arena.take<int32_t>(1);
    w.dk = a.dk_mx ? arena.take<float>(s.total_k * s.num_heads_kv * s.head_dim) : nullptr;
    w.dv = a.dv_mx ? arena.take<float>(s.total_k * s.num_heads_kv * s.head_dim_v) : nullptr;
    if (used) *used = arena.used();
  }
};

// The passes, in this order. pre: everything that the main kernel reads, and zeros in w.dq and in rows of no sequence.
Status pre(const AttentionBwd& a, const Call& call, Stream stream);
// dq from w.dq; dk and dv quantized from w.dk, w.dv where that is asked for.
Status post(const AttentionBwd& a, const Call& call, Stream stream);

}  // namespace mxflash::bwd_sm90
