// Forward attention on the CPU. Compiled once per ISA (src/simd/isa.h).
//
// Lanes are query rows: for a tile of 64 rows and a tile of T keys
//   S^T [T][64 rows] = K Q^T      P^T = 2^(S^T - m)      O^T [head_dim_v][64 rows] += V^T P^T
// so the row maximum, the row sum and the rescaling are vectors without a horizontal step, P^T is the B operand of the
// second product as it stands, and K is its A operand in its natural layout. Only Q and V are transposed.
// Up to kMaxSubTiles row tiles share one decoded tile of keys, which makes decoding a few percent of the time.
//
// Products in the arithmetic of the mode (simd/product.h):
//   exact  K Q^T in one that is exact on MX operands, V^T P^T in fp32; T = 64
//   fast   dot products of pairs: K Q^T in BF16 where that is exact and fast, else in block fixed point; V^T P^T in
//          fixed point; T = 128. Fixed point has scales per 32 channels of K and Q and per 32 keys of V and P, of P
//          per row too. A key that holds most of a row's weight, an attention sink, would take the bits of its 31
//          neighbours with it, in P and in V; when its own v is small, or the gradient looks at what the others add,
//          that shows. Such a group of keys is computed in fp32.
//
// v = 1 gives out = 1 to the bit: out and the sum of P take the same steps in the same order.
// Results of a row tile depend on its rows and the keys only, not on how work was split.
//
// Operands that are not finite are decoded as zero and leave their mark afterwards ("poison"), on the rows that see
// them only: 0 * NaN behind a mask must not reach a result.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "attention/attention_cpu.h"
#include "attention/out_rows.h"
#include "runtime/arena.h"
#include "runtime/tensor_access.h"
#include "simd/product.h"
#include "simd/rows.h"

MXFLASH_ISA_BEGIN
namespace {

using namespace cpu;
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kMaxKeyTile = 128;
constexpr float kFixedOne = 8192;  // P = 1 in a fixed point group's own scale
// A fixed point group is computed in fp32 where a key has more than this share of a row's weight so far.
constexpr float kDominant = 0.5f;
constexpr int64_t kMaxGroups = kMaxKeyTile / kGroup;

constexpr int64_t key_tile(bool fast) { return fast ? 128 : 64; }

// A tile of 64 query rows of one head, and its running state.
struct SubTile {
  Right q;                           // of K Q^T; its factor is softmax_scale * log2(e)
  float* out;                        // [dim_v][kPanel]
  float *max, *sum, *unrounded_sum;  // [kPanel]
  int32_t *first, *end;              // [kPanel]: the keys that a row sees
  RowTile tile{};
  Range visible{};  // of any row
  Range common{};   // of all rows
  bool bad_rows[kPanel]{}, any_bad_row = false;

  SubTile(Arena& arena, bool fast, int64_t dim, int64_t dim_v)
      : q(arena, arithmetic_on_mx(fast), dim),
        out(arena.take<float>(dim_v * kPanel)),
        max(arena.take<float>(kPanel)),
        sum(arena.take<float>(kPanel)),
        unrounded_sum(arena.take<float>(kPanel)),
        first(arena.take<int32_t>(kPanel)),
        end(arena.take<int32_t>(kPanel)) {}
};

// Dims are padded to whole groups.
struct Scratch {
  int64_t dim, dim_v, tile;
  float* stage;      // rows or keys on their way in or out: [kPanel][dim]
  float* panel;      // [dim][kPanel]
  float *s, *alpha;  // [tile][kPanel], [kPanel]
  Left k, v_t;       // of K Q^T and V^T P^T
  Right p;           // of V^T P^T
  Left exact_v;      // the same in fp32, for groups with a dominant key
  Right exact_p;
  float* group_sum;  // of P: [tile / kGroup][kPanel]
  std::array<SubTile, kMaxSubTiles> tiles;

  Scratch(Arena& arena, const FwdProblem& problem)
      : dim(round_up(problem.shape.head_dim, kGroup)),
        dim_v(round_up(problem.shape.head_dim_v, kGroup)),
        tile(key_tile(problem.fast)),
        stage(arena.take<float>(kPanel * std::max(dim, dim_v))),
        panel(arena.take<float>(kPanel * dim)),
        s(arena.take<float>(tile * kPanel)),
        alpha(arena.take<float>(kPanel)),
        k(arena, arithmetic_on_mx(problem.fast), tile, dim),
        v_t(arena, arithmetic_on_any(problem.fast), dim_v, tile),
        p(arena, arithmetic_on_any(problem.fast), tile),
        exact_v(arena, Arithmetic::fp32, is_fixed() ? dim_v : 0, tile),
        exact_p(arena, Arithmetic::fp32, is_fixed() ? tile : 0),
        group_sum(arena.take<float>(is_fixed() ? kMaxGroups * kPanel : 0)),
        tiles(make_tiles(arena, problem.fast, dim, dim_v, std::make_index_sequence<kMaxSubTiles>())) {}
  bool is_fixed() const { return p.arithmetic == Arithmetic::fixed; }

 private:
  template <size_t... Index>
  static std::array<SubTile, kMaxSubTiles> make_tiles(Arena& arena, bool fast, int64_t dim, int64_t dim_v,
                                                      std::index_sequence<Index...>) {
    return {((void)Index, SubTile(arena, fast, dim, dim_v))...};
  }
};

size_t scratch_bytes(const FwdProblem& problem) {
  Arena arena(nullptr);
  Scratch{arena, problem};
  return arena.used();
}

// A decoded tile of keys.
struct KeyTile {
  int64_t first, count;
  bool bad_keys[kMaxKeyTile]{}, any_bad_key = false;
  bool any_bad_v = false;
  bool has_exact_v = false;
};

class Forward {
 public:
  Forward(const FwdProblem& problem, std::byte* scratch)
      : args_(problem.args), shape_(problem.shape), scratch_(make_scratch(problem, scratch)) {}

  void attend(const FwdTask& task);
  void combine(const FwdTask& task, const Partial* parts, int64_t num_parts);

 private:
  static Scratch make_scratch(const FwdProblem& problem, std::byte* memory) {
    Arena arena(memory);
    return Scratch(arena, problem);
  }

  void start_tile(SubTile& t);
  void load_keys(KeyTile& keys);
  void mask_scores(const SubTile& t, const KeyTile& keys, int64_t count);
  bool softmax(SubTile& t, int64_t keys);
  bool softmax_fixed(SubTile& t, int64_t keys, bool* dominated);
  void multiply_exactly(SubTile& t, KeyTile& keys, int64_t count, const bool* dominated);
  void fold(SubTile& t, KeyTile& keys);
  void poison(SubTile& t, const KeyTile& keys, int64_t count);
  void write(const SubTile& t, const FwdTask& task);

  const AttentionFwd& args_;
  const AttentionShape& shape_;
  Scratch scratch_;
  MxHead q_{}, k_{}, v_{};
  int64_t lanes_ = 0;  // of the present sub-tile, in whole vectors
};

// ---- operands ---------------------------------------------------------------------------------------------------

// t.tile and t.visible are set.
void Forward::start_tile(SubTile& t) {
  const int64_t seqlen_q = q_.sequence.length, seqlen_k = k_.sequence.length;
  const int64_t first = t.tile.first_row, rows = t.tile.rows, dim = shape_.head_dim;
  const int64_t padded_dim = scratch_.dim, lanes = round_up(rows, kLanes);
  t.common = {t.visible.first, t.visible.end};
  for (int64_t i = 0; i < kPanel; ++i) {
    const Range keys = i < rows ? visible_keys(args_.mask, first + i, first + i + 1, seqlen_q, seqlen_k) : Range{};
    t.first[i] = int32_t(keys.first);
    t.end[i] = int32_t(keys.end);
    if (i >= rows) continue;
    t.common.first = std::max(t.common.first, keys.first);
    t.common.end = std::min(t.common.end, keys.end);
  }
  std::fill_n(t.max, kPanel, kLowest);
  std::fill_n(t.sum, kPanel, 0.0f);
  std::fill_n(t.unrounded_sum, kPanel, 0.0f);
  std::fill_n(t.out, shape_.head_dim_v * kPanel, 0.0f);

  q_.head = t.tile.head;
  t.any_bad_row = !decode_tokens(q_, first, rows, 1, scratch_.stage, padded_dim);
  if (t.any_bad_row) clear_nonfinite(scratch_.stage, padded_dim, rows, dim, t.bad_rows);
  std::fill(scratch_.stage + rows * padded_dim, scratch_.stage + lanes * padded_dim, 0.0f);
  float* panel = unpacked(t.q, scratch_.panel);
  transpose_tile(scratch_.stage, padded_dim, panel, kPanel, lanes, padded_dim);
  t.q.factor = float(shape_.softmax_scale * kLog2e);
  pack_right(panel, padded_dim, lanes, t.q);
}

// Decodes keys.count keys from keys.first on; what follows up to a whole group is zero in V.
void Forward::load_keys(KeyTile& keys) {
  prefetch_tokens(k_, keys.first, keys.count);
  prefetch_tokens(v_, keys.first, keys.count);
  keys.any_bad_key = !decode_left(k_, keys.first, keys.count, scratch_.stage, scratch_.k, keys.bad_keys);
  keys.any_bad_v =
      !decode_left_transposed(v_, keys.first, keys.count, scratch_.stage, scratch_.dim_v, scratch_.v_t, nullptr);
}

// ---- one tile of keys -------------------------------------------------------------------------------------------

void Forward::mask_scores(const SubTile& t, const KeyTile& keys, int64_t count) {
  const F32 hidden = broadcast(-std::numeric_limits<float>::infinity());
  for (int64_t lane = 0; lane < lanes_; lane += kLanes) {
    const I32 first = load(t.first + lane), end = load(t.end + lane);
    for (int64_t j = 0; j < count; ++j) {
      const I32 key = broadcast(int32_t(keys.first + j));
      float* s = scratch_.s + j * kPanel + lane;
      store(s, select(less(key, end), select(less(key, first), hidden, load(s)), hidden));
    }
  }
}

// Updates max and sum, leaves P^T in scratch_.p and the factor of what was summed before in scratch_.alpha. Returns
// whether any factor is not 1. scratch_.s is defined, and hidden from every row, up to a whole group of keys.
bool Forward::softmax(SubTile& t, int64_t keys) {
  bool rescale = false;
  for (int64_t lane = 0; lane < lanes_; lane += kLanes) {
    const float* s = scratch_.s + lane;
    const F32 old = load(t.max + lane);
    F32 even = old, odd = old;
    for (int64_t j = 0; j < keys; j += 2) {
      even = max(load(s + j * kPanel), even);
      odd = max(load(s + (j + 1) * kPanel), odd);
    }
    const F32 top = max(even, odd), alpha = exp2(sub(old, top));
    rescale |= any(less(old, top));
    F32 sum = mul(load(t.sum + lane), alpha);
    for (int64_t j = 0; j < keys; j += 2) {
      const F32 first = exp2(sub(load(s + j * kPanel), top)), second = exp2(sub(load(s + (j + 1) * kPanel), top));
      sum = add(add(sum, first), second);
      store(scratch_.p.f32 + j * kPanel + lane, first);
      store(scratch_.p.f32 + (j + 1) * kPanel + lane, second);
    }
    store(t.max + lane, top);
    store(t.sum + lane, sum);
    store(t.unrounded_sum + lane, sum);
    store(scratch_.alpha + lane, alpha);
  }
  return rescale;
}

// The same in fixed point, with P^T of groups that have a dominant key in scratch_.exact_p instead. The sum is that of
// the rounded P, in the order of the products, so that weights add up to one.
bool Forward::softmax_fixed(SubTile& t, int64_t keys, bool* dominated) {
  const int64_t groups = ceil_div(keys, kGroup);
  std::fill_n(dominated, groups, false);
  bool rescale = false;
  for (int64_t lane = 0; lane < lanes_; lane += kLanes) {
    const float* s = scratch_.s + lane;
    const F32 old = load(t.max + lane);
    F32 top = old, group_max[kMaxGroups], group_scale[kMaxGroups];
    for (int64_t g = 0; g < groups; ++g) {
      F32 even = broadcast(kLowest), odd = even;
      for (int64_t j = g * kGroup; j < (g + 1) * kGroup; j += 2) {
        even = max(load(s + j * kPanel), even);
        odd = max(load(s + (j + 1) * kPanel), odd);
      }
      group_max[g] = max(even, odd);
      top = max(top, group_max[g]);
    }
    const F32 alpha = exp2(sub(old, top));
    rescale |= any(less(old, top));
    F32 sum = mul(load(t.sum + lane), alpha), unrounded = mul(load(t.unrounded_sum + lane), alpha);
    for (int64_t g = 0; g < groups; ++g) {
      // The group's largest P becomes kFixedOne. Not s - (max - 13): from 2^24 on that difference would be rounded.
      const auto weight = [&](const float* p) { return exp2(add(sub(load(p), group_max[g]), broadcast(13.0f))); };
      I32 total = broadcast(0);
      F32 unrounded_total = broadcast(0.0f);
      for (int64_t k = 0; k < kPairs; ++k) {
        const float* pair = s + (g * kGroup + 2 * k) * kPanel;
        const F32 first = weight(pair), second = weight(pair + kPanel);
        const I32 packed = pack_int16(round_to_int(first), round_to_int(second));
        total = dot16(total, packed, broadcast(0x00010001));
        unrounded_total = add(unrounded_total, add(first, second));
        store(scratch_.p.pairs + (g * kPairs + k) * kPanel + lane, packed);
      }
      group_scale[g] = mul(exp2(sub(group_max[g], top)), broadcast(1 / kFixedOne));
      sum = fma(to_float(total), group_scale[g], sum);
      unrounded = fma(unrounded_total, group_scale[g], unrounded);
      store(scratch_.group_sum + g * kPanel + lane, to_float(total));
      store(scratch_.p.scale + g * kPanel + lane, group_scale[g]);
    }
    for (int64_t g = 0; g < groups; ++g) {
      const Mask dominant = less(mul(sum, broadcast(kDominant / kFixedOne)), group_scale[g]);
      dominated[g] |= any(mask_and(less(broadcast(kLowest), top), dominant));  // not of a row that has seen no key
    }
    store(t.max + lane, top);
    store(t.unrounded_sum + lane, unrounded);
    store(scratch_.alpha + lane, alpha);
  }

  for (int64_t lane = 0; lane < lanes_; lane += kLanes) {
    const F32 top = load(t.max + lane), zero = broadcast(0.0f);
    F32 sum = mul(load(t.sum + lane), load(scratch_.alpha + lane));
    for (int64_t g = 0; g < groups; ++g) {
      if (dominated[g]) store(scratch_.p.scale + g * kPanel + lane, zero);
      sum = fma(load(scratch_.group_sum + g * kPanel + lane), load(scratch_.p.scale + g * kPanel + lane), sum);
    }
    for (int64_t j = 0; j < keys; ++j) {
      if (!dominated[j / kGroup]) continue;
      const F32 p = exp2(sub(load(scratch_.s + j * kPanel + lane), top));
      sum = add(sum, p);
      store(scratch_.exact_p.f32 + j * kPanel + lane, p);
    }
    store(t.sum + lane, sum);
  }
  return rescale;
}

// O^T += V^T P^T in fp32 for groups with a dominant key.
void Forward::multiply_exactly(SubTile& t, KeyTile& keys, int64_t count, const bool* dominated) {
  for (int64_t g = 0; g < ceil_div(count, kGroup); ++g) {
    if (!dominated[g]) continue;
    if (!keys.has_exact_v) {
      decode_left_transposed(v_, keys.first, keys.count, scratch_.stage, scratch_.dim_v, scratch_.exact_v, nullptr);
      keys.has_exact_v = true;
    }
    multiply(scratch_.exact_v.from_depth(g * kGroup), scratch_.exact_p.from_depth(g * kGroup),
             std::min(kGroup, count - g * kGroup), t.out, shape_.head_dim_v, lanes_, true);
  }
}

// Folds the keys of the present tile that the rows see into their state.
void Forward::fold(SubTile& t, KeyTile& keys) {
  const int64_t count = std::min(t.visible.end - keys.first, keys.count), dim_v = shape_.head_dim_v;
  if (count <= 0 || t.visible.first >= keys.first + keys.count) return;
  lanes_ = round_up(t.tile.rows, kLanes);
  multiply(scratch_.k, t.q, shape_.head_dim, scratch_.s, count, lanes_, false);
  if (keys.first < t.common.first || keys.first + count > t.common.end) mask_scores(t, keys, count);
  const bool fixed = scratch_.is_fixed();
  bool dominated[kMaxGroups] = {};
  std::fill(scratch_.s + count * kPanel, scratch_.s + round_up(count, fixed ? kGroup : 2) * kPanel,
            -std::numeric_limits<float>::infinity());
  if (fixed ? softmax_fixed(t, count, dominated) : softmax(t, count)) {
    for (int64_t lane = 0; lane < lanes_; lane += kLanes) {
      const F32 alpha = load(scratch_.alpha + lane);
      for (int64_t c = 0; c < dim_v; ++c) {
        float* o = t.out + c * kPanel + lane;
        store(o, mul(load(o), alpha));
      }
    }
  }
  multiply(scratch_.v_t, scratch_.p, count, t.out, dim_v, lanes_, true);
  if (fixed) multiply_exactly(t, keys, count, dominated);
  if (keys.any_bad_key || keys.any_bad_v) poison(t, keys, count);
}

// Marks the rows that see a key whose k or v is not finite.
void Forward::poison(SubTile& t, const KeyTile& keys, int64_t count) {
  const int64_t dim_v = shape_.head_dim_v, stride = round_up(dim_v, kGroup);
  float* v = scratch_.stage;  // as it is, a key at a time
  for (int64_t j = 0; j < count; ++j) {
    const bool bad_key = keys.any_bad_key && keys.bad_keys[j];
    if (keys.any_bad_v) decode_tokens(v_, keys.first + j, 1, 1, v, stride);
    for (int64_t i = 0; i < t.tile.rows; ++i) {
      if (keys.first + j < t.first[i] || keys.first + j >= t.end[i]) continue;
      if (bad_key) t.sum[i] = t.unrounded_sum[i] = kNan;
      for (int64_t c = 0; keys.any_bad_v && c < dim_v; ++c) {
        if (!std::isfinite(v[c])) t.out[c * kPanel + i] = kNan;
      }
    }
  }
}

// ---- results ----------------------------------------------------------------------------------------------------

void Forward::write(const SubTile& t, const FwdTask& task) {
  const int64_t dim_v = shape_.head_dim_v, stride = round_up(dim_v, kGroup);
  const int64_t first_row = shape_.out_sequence(task.b).start + t.tile.first_row;
  for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
    const F32 sum = load(t.sum + lane);
    const Mask empty = equal(as_int(sum), broadcast(0));  // no visible key
    for (int64_t c = 0; c < dim_v; ++c) {
      float* o = t.out + c * kPanel + lane;
      store(o, select(empty, broadcast(0.0f), div(load(o), sum)));  // v = 1 gives 1
    }
  }
  transpose_tile(t.out, kPanel, scratch_.stage, stride, stride, kPanel);
  for (int64_t i = 0; i < t.tile.rows; ++i) {
    float* row = scratch_.stage + i * stride;
    const float sum = t.sum[i];
    if (args_.v_mean && sum != 0) {
      const float* mean =
          static_cast<const float*>(args_.v_mean.data) + row_offset(args_.v_mean, task.b, t.tile.head / shape_.group);
      for (int64_t c = 0; c < dim_v; ++c) row[c] += mean[c];
    }
    if (args_.out) store_row(args_.out, row_offset(args_.out, first_row + i, t.tile.head), row, dim_v);
    const double spare =
        sum == 0 ? 0 : std::log2(double(t.unrounded_sum[i]));  // lse in units of log2, above the maximum
    if (args_.lse) {
      store_float(args_.lse, t.tile.head * args_.lse.stride[0] + first_row + i,
                  sum == 0 ? -std::numeric_limits<float>::infinity() : float((double(t.max[i]) + spare) / kLog2e));
    }
    if (args_.row_exponent) {
      static_cast<uint8_t*>(args_.row_exponent.data)[t.tile.head * args_.row_exponent.stride[0] + first_row + i] =
          spare > 0 ? uint8_t(std::min(spare, 255.0)) : uint8_t(0);
    }
  }
  if (!args_.out_mx) return;
  write_out_mx(args_, shape_, task.b, t.tile.head, t.tile.first_row, t.tile.rows, scratch_.stage, stride);
}

void Forward::attend(const FwdTask& task) {
  q_ = {&args_.q, padded_token_count(shape_.total_q, shape_.seq_q), shape_.query_sequence(task.b), 0};
  const int64_t padded_k = padded_token_count(shape_.total_k, shape_.seq_k);
  k_ = {&args_.k, padded_k, shape_.key_sequence(task.b), task.kv_head};
  v_ = {&args_.v, padded_k, k_.sequence, task.kv_head};

  const int64_t seqlen_q = q_.sequence.length, seqlen_k = k_.sequence.length, tile = scratch_.tile;
  Range keys{seqlen_k, 0};
  for (int64_t i = 0; i < task.count; ++i) {
    SubTile& t = scratch_.tiles[i];
    t.tile = row_tile(task.first + i, task.kv_head, shape_.group, seqlen_q);
    t.visible = visible_keys(args_.mask, t.tile.first_row, t.tile.first_row + t.tile.rows, seqlen_q, seqlen_k);
    if (t.visible.empty()) continue;
    keys.first = std::min(keys.first, t.visible.first);
    keys.end = std::max(keys.end, t.visible.end);
  }
  // Groups of keys are whole, or end with the sequence: their scales are the same for every task.
  keys.end = std::min({round_up(keys.end, kGroup), task.end_key, seqlen_k});
  keys.first = std::max(keys.first, task.first_key) / tile * tile;

  const auto prefetch_keys = [&](int64_t first) {
    const int64_t count = std::min(tile, keys.end - first);
    prefetch_tokens(k_, first, count);
    prefetch_tokens(v_, first, count);
  };
  prefetch_keys(keys.first);
  for (int64_t i = 0; i < task.count; ++i) {
    if (i + 1 < task.count) {
      const RowTile& next = scratch_.tiles[i + 1].tile;
      q_.head = next.head;
      prefetch_tokens(q_, next.first_row, next.rows);
    }
    start_tile(scratch_.tiles[i]);
  }

  for (int64_t first = keys.first; first < keys.end; first += tile) {
    KeyTile present{.first = first, .count = std::min(tile, keys.end - first)};
    load_keys(present);
    for (int64_t i = 0; i < task.count; ++i) {
      fold(scratch_.tiles[i], present);
    }
  }

  for (int64_t i = 0; i < task.count; ++i) {
    SubTile& t = scratch_.tiles[i];
    for (int64_t r = 0; t.any_bad_row && r < t.tile.rows; ++r) {
      if (t.bad_rows[r] && t.sum[r] != 0) t.sum[r] = t.unrounded_sum[r] = kNan;
    }
    if (!task.partial) {
      write(t, task);
      continue;
    }
    std::copy_n(t.out, shape_.head_dim_v * kPanel, task.partial[i].out);
    std::copy_n(t.max, kPanel, task.partial[i].max);
    std::copy_n(t.sum, kPanel, task.partial[i].sum);
    std::copy_n(t.unrounded_sum, kPanel, task.partial[i].unrounded_sum);
  }
}

void Forward::combine(const FwdTask& task, const Partial* parts, int64_t num_parts) {
  SubTile& t = scratch_.tiles[0];
  t.tile = row_tile(task.first, task.kv_head, shape_.group, shape_.query_sequence(task.b).length);
  const int64_t dim_v = shape_.head_dim_v;
  for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
    F32 top = broadcast(kLowest);
    for (int64_t n = 0; n < num_parts; ++n) top = max(load(parts[n].max + lane), top);
    store(t.max + lane, top);
    F32 sum = broadcast(0.0f), unrounded = sum;
    for (int64_t n = 0; n < num_parts; ++n) {
      const F32 weight = exp2(sub(load(parts[n].max + lane), top));
      sum = fma(load(parts[n].sum + lane), weight, sum);  // as out, so that v = 1 gives 1
      unrounded = fma(load(parts[n].unrounded_sum + lane), weight, unrounded);
      for (int64_t c = 0; c < dim_v; ++c) {
        float* o = t.out + c * kPanel + lane;
        store(o, fma(load(parts[n].out + c * kPanel + lane), weight, n == 0 ? broadcast(0.0f) : load(o)));
      }
    }
    store(t.sum + lane, sum);
    store(t.unrounded_sum + lane, unrounded);
  }
  write(t, task);
}

void attend(const FwdProblem& problem, const FwdTask& task, std::byte* scratch) {
  Forward(problem, scratch).attend(task);
}
void combine(const FwdProblem& problem, const FwdTask& task, const Partial* parts, int64_t num_parts,
             std::byte* scratch) {
  Forward(problem, scratch).combine(task, parts, num_parts);
}

}  // namespace

const AttentionFwdKernels kAttentionFwdKernels{scratch_bytes, attend, combine};

MXFLASH_ISA_END
