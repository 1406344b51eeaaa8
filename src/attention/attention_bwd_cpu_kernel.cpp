// Backward attention on the CPU. Compiled once per ISA (src/simd/isa.h).
//
// A task is a run of keys of one key head, up to 512; it visits every tile of 64 query rows that sees them, of all
// heads of the group, and takes the keys in tiles of 64. With rows as lanes for three of the products and channels for
// two, nothing is transposed inside of the loop:
//   S^T  [keys][64 rows] = K Q^T          dP^T [keys][64 rows] = V dO^T
//   P^T = 2^(S^T - lse)                   dS^T = P^T (dP^T - delta)
//   dV [keys][channels] += P^T dO         dK [keys][channels] += dS^T Q         dQ^T [channels][64 rows] += K^T dS^T
// dV and dK stay in the task's scratch. dQ^T is shared: a task adds to a tile of rows when the task before it has,
// which it nearly always has, because tasks start in that order.
//
// Products in the arithmetic of the mode (simd/product.h):
//   exact  S and dP in one that is exact on MX operands, the others in fp32
//   fast   dot products of pairs: S and dP in BF16 where that is exact and fast, else in block fixed point; the others
//          in fixed point, with scales along the contraction of each product: P and dS in groups of 32 rows for dV and
//          dK, dS in groups of 32 keys for dQ. Where a key has most of a row's weight, dP - delta is the small
//          difference of large numbers; if dP is in fixed point, it comes from the decoded V there.
//
// Operands that are not finite are decoded as zero and leave their mark afterwards, as in the forward.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "attention/attention_cpu.h"
#include "mx/rotation.h"
#include "runtime/arena.h"
#include "runtime/mx_access.h"
#include "runtime/tensor_access.h"
#include "simd/product.h"
#include "simd/rows.h"

MXFLASH_ISA_BEGIN
namespace {

using namespace cpu;
constexpr int64_t kKeyTile = 64;
constexpr int64_t kMaxKeys = 512;  // of a task
constexpr float kDominant = 0.5f;  // weight of a key in a row
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

constexpr int64_t panels(int64_t dim) { return ceil_div(dim, kPanel); }

// Dims are padded to whole groups.
struct Scratch {
  int64_t dim, dim_v;
  Arithmetic on_mx, on_any;  // of S and dP; of the others
  // Of the task.
  Left k, v, k_t;  // of S, dP, dQ: rows are keys, keys, channels
  float *dk, *dv;  // [panels][kMaxKeys][kPanel]
  // Of the present row tile.
  Right q_t, dout_t;  // of S, dP: depth is channels
  Right q, dout;      // of dK, dV: depth is rows, a panel for every 64 channels
  // Of the present tile, [kKeyTile][kPanel].
  float *s, *dp;  // S^T, then P^T; dP^T, then dS^T
  Left p, ds;     // of dV, dK
  Right ds_t;     // of dQ
  Left exact_v;   // of dP in fp32, where a key dominates
  Right exact_dout_t;
  // On the way in and out: [kPanel][dim]; [dim][kPanel], also as [panels][kPanel][kPanel].
  float *rows, *panel;

  Scratch(Arena& a, const BwdProblem& problem)
      : dim(round_up(problem.shape.head_dim, kGroup)),
        dim_v(round_up(problem.shape.head_dim_v, kGroup)),
        on_mx(arithmetic_on_mx(problem.fast)),
        on_any(arithmetic_on_any(problem.fast)),
        k(a, on_mx, kMaxKeys, dim),
        v(a, on_mx, kMaxKeys, dim_v),
        k_t(a, on_any, dim, kMaxKeys),
        dk(a.take<float>(kMaxKeys * panels(dim) * kPanel)),
        dv(a.take<float>(kMaxKeys * panels(dim_v) * kPanel)),
        q_t(a, on_mx, dim),
        dout_t(a, on_mx, dim_v),
        q(a, on_any, kPanel, panels(dim)),
        dout(a, on_any, kPanel, panels(dim_v)),
        s(a.take<float>(kKeyTile * kPanel)),
        dp(a.take<float>(kKeyTile * kPanel)),
        p(a, on_any, kKeyTile, kPanel),
        ds(a, on_any, kKeyTile, kPanel),
        ds_t(a, on_any, kKeyTile),
        exact_v(a, Arithmetic::fp32, problem.fast ? kKeyTile : 0, dim_v),
        exact_dout_t(a, Arithmetic::fp32, problem.fast ? dim_v : 0),
        rows(a.take<float>(kPanel * std::max(dim, dim_v))),
        panel(a.take<float>(kPanel * std::max(panels(dim), panels(dim_v)) * kPanel)) {
    if (on_any != Arithmetic::fp32) return;
    p.f32 = s;  // as they are
    ds.f32 = ds_t.f32 = dp;
  }
};

size_t scratch_bytes(const BwdProblem& problem) {
  Arena arena(nullptr);
  Scratch{arena, problem};
  return arena.used();
}

// A tile of query rows of one head.
struct Rows {
  int64_t head, first, count;
  Range visible, common;  // keys that some row sees, and that all see
  const float* lse_log2;  // [kPanel]
  float delta[kPanel];    // 0 for rows that are not finite
  int32_t key_first[kPanel], key_end[kPanel];
  float* dq;  // [head_dim][kPanel]
  bool add;   // to what dq holds already
  bool bad_p[kPanel], bad_ds[kPanel], bad_dout, any_bad;
};

struct Keys {
  int64_t first, count;  // of the sequence
  bool bad_k[kMaxKeys], bad_v[kMaxKeys], any_bad;
};

const MxTensor& or_else(const MxTensor& given, const MxTensor& fallback) { return given ? given : fallback; }

class Backward {
 public:
  Backward(const BwdProblem& problem, std::byte* memory)
      : problem_(problem), args_(problem.args), shape_(problem.shape), s_(scratch(problem, memory)) {}

  void prepare(int64_t b, int64_t head, int64_t tile);
  void attend(const BwdTask& task);
  void store_dq(int64_t b, int64_t head, int64_t tile);

 private:
  static Scratch scratch(const BwdProblem& problem, std::byte* memory) {
    Arena arena(memory);
    return Scratch(arena, problem);
  }

  MxHead q_head(const MxTensor& t, int64_t b, int64_t head) const {
    return {&t, padded_token_count(shape_.total_q, shape_.seq_q), shape_.query_sequence(b), head};
  }
  MxHead k_head(const MxTensor& t, int64_t b, int64_t head) const {
    return {&t, padded_token_count(shape_.total_k, shape_.seq_k), shape_.key_sequence(b), head};
  }
  MxHead out_head(const MxTensor& t, int64_t b, int64_t head) const {
    return {&t, padded_token_count(shape_.total_out, shape_.seq_out()), shape_.out_sequence(b), head};
  }
  int64_t q_tile(int64_t b, int64_t head, int64_t tile) const {
    const int64_t first = first_row_tile(shape_.total_q, shape_.seq_q, shape_.shared_q ? 0 : b);
    return head * row_tiles_of_head(shape_.total_q, shape_.seq_q) + first + tile;
  }
  int64_t out_tile(int64_t b, int64_t head, int64_t tile) const {
    const Jagged seq = shape_.seq_out();
    return head * row_tiles_of_head(shape_.total_out, seq) + first_row_tile(shape_.total_out, seq, b) + tile;
  }

  Range parts_of_tile(int64_t b, int64_t tile) const;
  int64_t task_before(const BwdTask& task, int64_t tile) const;
  bool decode_rows(const MxHead& h, int64_t first, int64_t count, bool* bad);
  void load_keys(const BwdTask& task, Keys& keys);
  void load_rows(const BwdTask& task, int64_t head, int64_t tile, Rows& rows);
  void fold_tile(const BwdTask& task, const Rows& rows, const Keys& keys, int64_t first_key, int64_t count);
  bool weights(const Rows& rows, int64_t first_key, int64_t count, int64_t lanes);
  void exact_dp(const BwdTask& task, const Rows& rows, int64_t first_key, int64_t count, int64_t lanes);
  void poison(const BwdTask& task, const Rows& rows, const Keys& keys);
  void store_keys(const BwdTask& task, const Keys& keys, const float* acc, float scale, int64_t dim, bool rotated,
                  const Tensor& out, const MxTensor& out_mx);
  void add_k_mean_term(int64_t b, int64_t head, int64_t row, float* dq_row) const;

  const BwdProblem& problem_;
  const AttentionBwd& args_;
  const AttentionShape& shape_;
  const Scratch s_;
};

// ---- rows and keys ----------------------------------------------------------------------------------------------

// Decodes `count` rows into s_.rows, zeros up to kPanel. Marks rows that are not finite; returns whether there is one.
bool Backward::decode_rows(const MxHead& h, int64_t first, int64_t count, bool* bad) {
  const int64_t dim = round_up(h.tensor->data.shape[2], kGroup);
  const bool finite = decode_tokens(h, first, count, 1, s_.rows, dim);
  if (!finite) {
    bool here[kPanel];
    clear_nonfinite(s_.rows, dim, count, dim, here);
    for (int64_t i = 0; i < count; ++i) bad[i] |= here[i];
  }
  std::fill(s_.rows + count * dim, s_.rows + kPanel * dim, 0.0f);
  return !finite;
}

// rows [kPanel][dim] -> panels [kPanel][kPanel] of `right`, by way of `panels`.
void pack_panels(const float* rows, int64_t dim, float* panels, const Right& right) {
  float* out = unpacked(right, panels);
  for (int64_t c = 0; c < dim; c += kPanel) {
    const int64_t width = std::min(kPanel, dim - c);
    for (int64_t i = 0; i < kPanel; ++i) std::copy_n(rows + i * dim + c, width, out + (c + i) * kPanel);
    pack_right(out + c * kPanel, kPanel, width, right.panel(c / kPanel));
  }
}

void Backward::load_keys(const BwdTask& task, Keys& keys) {
  std::fill_n(keys.bad_k, kMaxKeys, false);
  std::fill_n(keys.bad_v, kMaxKeys, false);
  const auto head = [&](const MxTensor& t) { return k_head(t, task.b, task.kv_head); };
  const bool finite_v = decode_left(head(args_.v), keys.first, keys.count, s_.rows, s_.v, keys.bad_v);
  const bool finite_k = decode_left(head(args_.k), keys.first, keys.count, s_.rows, s_.k, keys.bad_k);
  const bool finite_k_col = decode_left_transposed(head(or_else(args_.k_col, args_.k)), keys.first, keys.count, s_.rows,
                                                   s_.dim, s_.k_t, keys.bad_k);
  keys.any_bad = !finite_v || !finite_k || !finite_k_col;
  const auto clear = [&](float* acc, int64_t dim) {
    for (int64_t p = 0; p < panels(dim); ++p) std::fill_n(acc + p * kMaxKeys * kPanel, keys.count * kPanel, 0.0f);
  };
  clear(s_.dk, s_.dim);
  clear(s_.dv, s_.dim_v);
}

void Backward::load_rows(const BwdTask& task, int64_t head, int64_t tile, Rows& rows) {
  const int64_t seqlen_q = shape_.query_sequence(task.b).length, seqlen_k = shape_.key_sequence(task.b).length;
  rows.head = head;
  rows.first = tile * kRowTile;
  rows.count = std::min(kRowTile, seqlen_q - rows.first);
  rows.visible = visible_keys(args_.mask, rows.first, rows.first + rows.count, seqlen_q, seqlen_k);
  rows.common = rows.visible;
  for (int64_t i = 0; i < kPanel; ++i) {
    const int64_t row = rows.first + i;
    const Range keys = i < rows.count ? visible_keys(args_.mask, row, row + 1, seqlen_q, seqlen_k) : Range{};
    rows.key_first[i] = int32_t(keys.first);
    rows.key_end[i] = int32_t(keys.end);
    if (i >= rows.count) continue;
    rows.common.first = std::max(rows.common.first, keys.first);
    rows.common.end = std::min(rows.common.end, keys.end);
  }
  rows.lse_log2 = problem_.lse_log2 + out_tile(task.b, head, tile) * kRowTile;
  rows.dq = problem_.dq + q_tile(task.b, head, tile) * shape_.head_dim * kRowTile;

  const MxHead q = q_head(args_.q, task.b, head), dout = out_head(args_.dout, task.b, head);
  prefetch_tokens(q, rows.first, rows.count);
  prefetch_tokens(dout, rows.first, rows.count);
  std::fill_n(rows.bad_p, kPanel, false);
  std::fill_n(rows.bad_ds, kPanel, false);
  bool bad = false;
  const auto load = [&](MxHead h, const MxTensor& by_token, bool* bad_rows, const Right& by_channel,
                        const Right& by_row) {
    const int64_t dim = round_up(h.tensor->data.shape[2], kGroup);
    bool found = decode_rows(h, rows.first, rows.count, bad_rows);
    float* transposed = unpacked(by_channel, s_.panel);
    transpose_tile(s_.rows, dim, transposed, kPanel, kPanel, dim);
    pack_right(transposed, dim, kPanel, by_channel);
    if (by_token) {
      h.tensor = &by_token;
      found |= decode_rows(h, rows.first, rows.count, bad_rows);
    }
    pack_panels(s_.rows, dim, s_.panel, by_row);
    bad |= found;
    return found;
  };
  load(q, args_.q_col, rows.bad_p, s_.q_t, s_.q);
  rows.bad_dout = load(dout, args_.dout_col, rows.bad_ds, s_.dout_t, s_.dout);
  const float* delta = problem_.delta + out_tile(task.b, head, tile) * kRowTile;
  for (int64_t i = 0; i < kPanel; ++i) {
    if (std::isnan(delta[i])) {
      rows.bad_p[i] |= rows.lse_log2[i] == kInfinity;
      rows.bad_ds[i] = bad = true;
    }
    rows.bad_ds[i] |= rows.bad_p[i];
    rows.delta[i] = std::isnan(delta[i]) ? 0 : delta[i];
  }
  rows.any_bad = bad;
}

// ---- one tile ---------------------------------------------------------------------------------------------------

// S^T -> P^T in s_.s, dP^T -> dS^T in s_.dp, zero from `lanes` on. Returns whether a key dominates.
bool Backward::weights(const Rows& rows, int64_t first_key, int64_t count, int64_t lanes) {
  const F32 scale = broadcast(float(shape_.softmax_scale * kLog2e)), zero = broadcast(0.0f);
  const bool masked = first_key < rows.common.first || first_key + count > rows.common.end;
  F32 largest = zero;
  for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
    if (lane >= lanes) {
      for (int64_t j = 0; j < count; ++j) {
        store(s_.s + j * kPanel + lane, zero);
        store(s_.dp + j * kPanel + lane, zero);
      }
      continue;
    }
    const F32 shift = sub(zero, load(rows.lse_log2 + lane)), delta = load(rows.delta + lane);
    const I32 first = load(rows.key_first + lane), end = load(rows.key_end + lane);
    for (int64_t j = 0; j < count; ++j) {
      float *s = s_.s + j * kPanel + lane, *dp = s_.dp + j * kPanel + lane;
      F32 p = exp2(fma(load(s), scale, shift));
      if (masked) {
        const I32 key = broadcast(int32_t(first_key + j));
        p = select(less(key, end), select(less(key, first), zero, p), zero);
      }
      largest = max(p, largest);
      store(s, p);
      store(dp, mul(p, sub(load(dp), delta)));
    }
  }
  return any(less(broadcast(kDominant), largest));
}

// dS^T in s_.dp again, with dP of the decoded V and the rounded dout, which delta has too.
void Backward::exact_dp(const BwdTask& task, const Rows& rows, int64_t first_key, int64_t count, int64_t lanes) {
  float* v = s_.exact_v.f32;
  if (!decode_tokens(k_head(args_.v, task.b, task.kv_head), first_key, count, 1, v, s_.dim_v)) {
    bool ignored[kKeyTile];
    clear_nonfinite(v, s_.dim_v, count, s_.dim_v, ignored);
  }
  for (int64_t c = 0; c < s_.dim_v; c += 2) {
    for (int64_t lane = 0; lane < lanes; lane += kLanes) {
      const I32 pair = load(s_.dout_t.pairs + c / 2 * kPanel + lane);
      const F32 scale = load(s_.dout_t.scale + c / kGroup * kPanel + lane);
      float* out = s_.exact_dout_t.f32 + c * kPanel + lane;
      store(out, mul(to_float(dot16(broadcast(0), pair, broadcast(1))), scale));
      store(out + kPanel, mul(to_float(dot16(broadcast(0), pair, broadcast(1 << 16))), scale));
    }
  }
  multiply(s_.exact_v, s_.exact_dout_t, shape_.head_dim_v, s_.dp, count, lanes, false);
  for (int64_t lane = 0; lane < lanes; lane += kLanes) {
    const F32 delta = load(rows.delta + lane);
    for (int64_t j = 0; j < count; ++j) {
      float* dp = s_.dp + j * kPanel + lane;
      store(dp, mul(load(s_.s + j * kPanel + lane), sub(load(dp), delta)));
    }
  }
}

// Keys first_key .. + count of the sequence against the present rows.
void Backward::fold_tile(const BwdTask& task, const Rows& rows, const Keys& keys, int64_t first_key, int64_t count) {
  const int64_t at = first_key - keys.first, whole = round_up(count, kGroup);
  const int64_t lanes = round_up(rows.count, s_.on_any == Arithmetic::fixed ? kGroup : std::max<int64_t>(kLanes, 2));
  multiply(s_.k.from_row(at), s_.q_t, shape_.head_dim, s_.s, count, lanes, false);
  multiply(s_.v.from_row(at), s_.dout_t, shape_.head_dim_v, s_.dp, count, lanes, false);
  const bool dominated = weights(rows, first_key, count, lanes);
  if (dominated && s_.on_mx == Arithmetic::fixed) exact_dp(task, rows, first_key, count, lanes);
  std::fill(s_.dp + count * kPanel, s_.dp + whole * kPanel, 0.0f);
  pack_left(s_.s, kPanel, count, s_.p);
  pack_left(s_.dp, kPanel, count, s_.ds);
  pack_right(s_.dp, whole, lanes, s_.ds_t);
  for (int64_t c = 0; c < s_.dim_v; c += kPanel) {
    multiply(s_.p, s_.dout.panel(c / kPanel), rows.count, s_.dv + (c / kPanel * kMaxKeys + at) * kPanel, count,
             std::min(kPanel, s_.dim_v - c), true);
  }
  for (int64_t c = 0; c < s_.dim; c += kPanel) {
    multiply(s_.ds, s_.q.panel(c / kPanel), rows.count, s_.dk + (c / kPanel * kMaxKeys + at) * kPanel, count,
             std::min(kPanel, s_.dim - c), true);
  }
  multiply(s_.k_t.from_depth(at), s_.ds_t, count, rows.dq, shape_.head_dim, lanes, rows.add);
}

// Marks the gradients that a pair of row and key with something not finite reaches.
void Backward::poison(const BwdTask& task, const Rows& rows, const Keys& keys) {
  const MxHead dout = out_head(or_else(args_.dout_col, args_.dout), task.b, rows.head);
  const auto mark = [&](float* acc, int64_t key, int64_t c) {
    acc[(c / kPanel * kMaxKeys + key) * kPanel + c % kPanel] = kNan;
  };
  for (int64_t i = 0; i < rows.count; ++i) {
    float* dout_row = s_.rows;
    if (rows.bad_dout) decode_tokens(dout, rows.first + i, 1, 1, dout_row, s_.dim_v);
    for (int64_t j = 0; j < keys.count; ++j) {
      const int64_t key = keys.first + j;
      if (key < rows.key_first[i] || key >= rows.key_end[i]) continue;
      const bool bad_p = rows.bad_p[i] || keys.bad_k[j], bad_ds = rows.bad_ds[i] || bad_p || keys.bad_v[j];
      for (int64_t c = 0; (bad_p || rows.bad_dout) && c < shape_.head_dim_v; ++c) {
        if (bad_p || (rows.bad_dout && !std::isfinite(dout_row[c]))) mark(s_.dv, j, c);
      }
      for (int64_t c = 0; bad_ds && c < shape_.head_dim; ++c) {
        mark(s_.dk, j, c);
        rows.dq[c * kPanel + i] = kNan;
      }
    }
  }
}

// ---- order of tasks ---------------------------------------------------------------------------------------------

// Parts of the keys that some row of the tile sees.
Range Backward::parts_of_tile(int64_t b, int64_t tile) const {
  const int64_t seqlen_q = shape_.query_sequence(b).length, first = tile * kRowTile;
  const Range keys =
      visible_keys(args_.mask, first, std::min(first + kRowTile, seqlen_q), seqlen_q, shape_.key_sequence(b).length);
  if (keys.empty()) return {};
  return {keys.first / problem_.part_keys, ceil_div(keys.end, problem_.part_keys)};
}

// The task that adds to this tile of dq before `task` does, or -1.
int64_t Backward::task_before(const BwdTask& task, int64_t tile) const {
  if (task.part > parts_of_tile(task.b, tile).first) return task.b * problem_.max_parts + task.part - 1;
  for (int64_t b = task.b - 1; shape_.shared_q && b >= 0; --b) {
    const Range parts = parts_of_tile(b, tile);
    if (!parts.empty()) return b * problem_.max_parts + parts.end - 1;
  }
  return -1;
}

void Backward::attend(const BwdTask& task) {
  const int64_t seqlen_q = shape_.query_sequence(task.b).length, seqlen_k = shape_.key_sequence(task.b).length;
  Keys keys;
  keys.first = task.part * problem_.part_keys;
  keys.count = std::min(problem_.part_keys, seqlen_k - keys.first);
  load_keys(task, keys);
  const int64_t last_key = keys.first + keys.count;
  const Range visible = visible_rows(args_.mask, keys.first, last_key, seqlen_q, seqlen_k);
  for (int64_t g = 0; g < shape_.group; ++g) {
    const int64_t head = task.kv_head * shape_.group + g;
    for (int64_t tile = visible.first / kRowTile; tile * kRowTile < visible.end; ++tile) {
      const Range parts = parts_of_tile(task.b, tile);
      if (task.part < parts.first || task.part >= parts.end) continue;
      Rows rows;
      load_rows(task, head, tile, rows);
      const int64_t before = task_before(task, tile);
      std::atomic_ref<int64_t> turn(problem_.last_task[q_tile(task.b, head, tile)]);
      while (turn.load(std::memory_order_acquire) != before) std::this_thread::yield();
      rows.add = before >= 0;
      for (int64_t first = keys.first; first < last_key; first += kKeyTile) {
        const int64_t count = std::min(kKeyTile, last_key - first);
        if (first >= rows.visible.end || first + count <= rows.visible.first) continue;
        fold_tile(task, rows, keys, first, count);
        rows.add = true;
      }
      if (rows.any_bad || keys.any_bad) poison(task, rows, keys);
      turn.store(task.b * problem_.max_parts + task.part, std::memory_order_release);
    }
  }
  store_keys(task, keys, s_.dk, float(shape_.softmax_scale), shape_.head_dim, args_.rotate_qk, args_.dk, args_.dk_mx);
  store_keys(task, keys, s_.dv, 1, shape_.head_dim_v, false, args_.dv, args_.dv_mx);
}

// ---- before and after -------------------------------------------------------------------------------------------

// delta = sum_c (out - v_mean) dout - dlse, from the dequantized dout. The sum takes the steps of the product that
// gives dP, in the same order, so that dP - delta is exactly 0 where every key has the same v.
void Backward::prepare(int64_t b, int64_t head, int64_t tile) {
  const int64_t first = tile * kRowTile, dim = shape_.head_dim_v, stride = s_.dim_v;
  const Sequence so = shape_.out_sequence(b);
  const int64_t count = std::min(kRowTile, so.length - first);
  float *lse_log2 = problem_.lse_log2 + out_tile(b, head, tile) * kRowTile, *dout_t = s_.panel, *out_t = s_.dv;
  float* delta = problem_.delta + out_tile(b, head, tile) * kRowTile;
  bool bad[kPanel] = {};
  decode_rows(out_head(args_.dout, b, head), first, count, bad);
  transpose_tile(s_.rows, stride, dout_t, kPanel, kPanel, stride);
  for (int64_t i = 0; i < count; ++i) {
    float* row = s_.rows + i * stride;
    load_row(args_.out, row_offset(args_.out, so.start + first + i, head), row, dim);
    if (!args_.v_mean) continue;
    const float* mean = static_cast<const float*>(args_.v_mean.data) + row_offset(args_.v_mean, b, head / shape_.group);
    for (int64_t c = 0; c < dim; ++c) row[c] -= mean[c];
  }
  transpose_tile(s_.rows, stride, out_t, kPanel, kPanel, stride);
  for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
    const float *o = out_t + lane, *d = dout_t + lane;
    F32 sum = broadcast(0.0f);
    for (int64_t c = 0; c < dim; ++c) {
      if (s_.on_mx == Arithmetic::fp32) {
        sum = fma(load(o + c * kPanel), load(d + c * kPanel), sum);
      } else if (s_.on_mx == Arithmetic::bf16) {
        const int64_t other = c ^ 1;  // the high half of a pair comes first
        sum = fma(load(o + other * kPanel), load(d + other * kPanel), sum);
      } else if (c % kGroup == 0) {
        F32 whole[kGroup], group = broadcast(0.0f);
        const F32 scale = as_float(fix_lanes(d + c * kPanel, whole));
        for (int64_t k = 0; k < std::min(kGroup, dim - c); ++k)
          group = fma(load(o + (c + k) * kPanel), whole[k], group);
        sum = fma(group, scale, sum);
      }
    }
    store(delta + lane, sum);
  }
  std::fill_n(lse_log2, kRowTile, kInfinity);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = so.start + first + i;
    const float lse = load_float(args_.lse, head * args_.lse.stride[0] + row);
    if (args_.dlse) delta[i] -= load_float(args_.dlse, head * args_.dlse.stride[0] + row);
    if (lse == -kInfinity) {  // no visible key
      delta[i] = 0;
      continue;
    }
    if (std::isfinite(lse)) lse_log2[i] = float(double(lse) * kLog2e);  // P is right whatever out and dout are
    if (!std::isfinite(lse) || !std::isfinite(delta[i]) || bad[i]) delta[i] = kNan;
  }
  std::fill(delta + count, delta + kRowTile, 0.0f);
  if (!shape_.shared_q || b == 0) problem_.last_task[q_tile(b, head, tile)] = -1;
}

void Backward::store_keys(const BwdTask& task, const Keys& keys, const float* acc, float scale, int64_t dim,
                          bool rotated, const Tensor& out, const MxTensor& out_mx) {
  const Sequence sk = shape_.key_sequence(task.b);
  const int64_t stride = round_up(dim, kGroup), group = rotation_group(dim);
  const MxWriter writer(out_mx ? out_mx : args_.k, shape_.seq_k, sk, task.kv_head, MxRule::rceil);
  for (int64_t first = 0; first < keys.count; first += kMxBlock) {
    const int64_t count = std::min(kMxBlock, keys.count - first);
    for (int64_t j = 0; j < count; ++j) {
      float* row = s_.rows + j * stride;
      const float* sum = acc + (first + j) * kPanel;
      for (int64_t c = 0; c < dim; c += kLanes) {  // up to a whole vector: a row has room for it
        store(row + c, mul(load(sum + c / kPanel * kMaxKeys * kPanel + c % kPanel), broadcast(scale)));
      }
      for (int64_t c = 0; rotated && c < dim; c += group) rotate_back(row + c, group, args_.rotate_seed, c);
      if (out) store_row(out, row_offset(out, sk.start + keys.first + first + j, task.kv_head), row, dim);
    }
    if (out_mx) writer.write(keys.first + first, count, 0, dim, s_.rows, stride);
  }
}

// The caller's lse holds softmax_scale * q.k_mean, so dlse reaches q through it.
void Backward::add_k_mean_term(int64_t b, int64_t head, int64_t row, float* dq_row) const {
  const int64_t out_row = shape_.out_sequence(b).start + row;
  if (load_float(args_.lse, head * args_.lse.stride[0] + out_row) == -kInfinity) return;
  const float dlse = load_float(args_.dlse, head * args_.dlse.stride[0] + out_row);
  const float* mean = static_cast<const float*>(args_.k_mean.data) + row_offset(args_.k_mean, b, head / shape_.group);
  for (int64_t c = 0; c < shape_.head_dim; ++c) dq_row[c] += float(shape_.softmax_scale) * dlse * mean[c];
}

void Backward::store_dq(int64_t b, int64_t head, int64_t tile) {
  constexpr float kUnits = 4096;  // dq_accum f16 is in units of 2^-12
  const int64_t dim = shape_.head_dim, stride = s_.dim, index = q_tile(b, head, tile), first = tile * kRowTile;
  const Sequence sq = shape_.query_sequence(b);
  const float* sum = problem_.dq + index * dim * kRowTile;
  if (problem_.last_task[index] >= 0) {
    for (int64_t c = 0; c < dim; ++c) std::copy_n(sum + c * kRowTile, kRowTile, s_.panel + c * kPanel);
  } else {
    std::fill_n(s_.panel, dim * kPanel, 0.0f);
  }
  transpose_tile(s_.panel, kPanel, s_.rows, stride, stride, kPanel);
  const int64_t group = rotation_group(dim), last = shape_.shared_q ? shape_.batch - 1 : b;
  for (int64_t i = 0; i < std::min(kRowTile, sq.length - first); ++i) {
    float* row = s_.rows + i * stride;
    for (int64_t c = 0; args_.dq_accum == Dtype::f16 && c < dim; ++c) {
      row[c] = decode_f16(encode_f16(row[c] * kUnits)) / kUnits;
    }
    for (int64_t c = 0; c < dim; ++c) row[c] *= float(shape_.softmax_scale);
    for (int64_t c = 0; args_.rotate_qk && c < dim; c += group) rotate_back(row + c, group, args_.rotate_seed, c);
    for (int64_t other = b; args_.dlse && args_.k_mean && other <= last; ++other) {
      add_k_mean_term(other, head, first + i, row);
    }
    store_row(args_.dq, row_offset(args_.dq, sq.start + first + i, head), row, dim);
  }
}

void prepare(const BwdProblem& problem, int64_t b, int64_t head, int64_t tile, std::byte* scratch) {
  Backward(problem, scratch).prepare(b, head, tile);
}
void attend(const BwdProblem& problem, const BwdTask& task, std::byte* scratch) {
  Backward(problem, scratch).attend(task);
}
void store_dq(const BwdProblem& problem, int64_t b, int64_t head, int64_t tile, std::byte* scratch) {
  Backward(problem, scratch).store_dq(b, head, tile);
}

}  // namespace

const AttentionBwdKernels kAttentionBwdKernels{scratch_bytes, prepare, attend, store_dq};

MXFLASH_ISA_END
