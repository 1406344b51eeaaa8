// Forward attention of a few query rows on the CPU: all rows of a key head's group together are at most kDecodeRows.
// Compiled once per ISA (src/simd/isa.h).
//
// Every byte of k and v serves few multiply-adds, so the time is that of reading them: codes go from memory into
// registers, are decoded there once for all rows, and scales are applied to what is small. Lanes are channels. For a
// block of 64 keys
//   s[key][row] = k[key] . q[row]             the vectors of kLanes such products are summed up together (sum_each)
//   p = 2^(s - m)
//   out[row] = out[row] + scale * sum p v     one sum per 32 keys, the rows of a scale
// Scales of square32 and col32 are powers of two per 32 keys and channel: k's go into q, v's into the sum of 32 keys.
// Those of row32 are multiplied to the decoded codes.
//
// Rows of one head are far apart in memory. So a task does several heads, that lie side by side, and while it computes
// on one block of keys it asks for the next one in the order of memory.
//
// fp32 throughout, for either CpuMath. v = 1 gives out = 1 to the bit: out and the sum of P take the same steps in the
// same order. Every result of a row depends on that row and its keys only.
//
// What is not E4M3 in whole vectors, with ordinary scales, is decoded to fp32 first; the same kernels read that.
// Operands that are not finite leave their mark afterwards, as in attention_fwd_cpu_kernel.cpp. What is computed with
// them in the meantime is finite: zero, or any number for a NaN code.
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/attention_cpu.h"
#include "attention/out_rows.h"
#include "runtime/arena.h"
#include "runtime/tensor_access.h"
#include "simd/decode.h"
#include "simd/mx_tile.h"
#include "simd/rows.h"

MXFLASH_ISA_BEGIN
namespace {

using namespace cpu;
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kKeys = 64;                 // of a block
constexpr int64_t kSpans = kKeys / kMxBlock;  // spans of keys that share scales
constexpr int kSlab = 16;                     // scores that are computed together: whole vectors, keys x rows
constexpr int64_t kMaxSets = 2;               // of rows
constexpr float kRoom = 0x1p56f;              // scales and q up to here can be multiplied without a second thought
constexpr int kSums = kLanes == 16 ? 16 : 8;  // accumulators that fit the registers
constexpr int kMaxVectors = 8;
static_assert(kSlab == kDecodeRows && kSlab % kLanes == 0 && 2 * kMaxSets * kSlab == 4 * kDecodeRows);

// How the kernels read a key.
struct Codes {
  static constexpr bool kScaled = false;
  static constexpr int64_t kBytes = 1;
  static MXFLASH_INLINE F32 load(const uint8_t* p) { return load_small_e4m3(p); }
};
struct ScaledCodes : Codes {  // a scale per key and 32 channels
  static constexpr bool kScaled = true;
};
struct Floats {
  static constexpr bool kScaled = false;
  static constexpr int64_t kBytes = sizeof(float);
  static MXFLASH_INLINE F32 load(const uint8_t* p) { return MXFLASH_ISA::load(reinterpret_cast<const float*>(p)); }
};
enum class Read { codes, scaled_codes, floats };

// A block of keys of k or v.
struct Block {
  Read read;
  const uint8_t* first;  // key
  int64_t stride;        // bytes from one to the next
  int64_t channels;      // in whole vectors
  const float* scale;    // codes: [kSpans][channels]; scaled_codes: [kKeys][groups]
  int64_t groups;        // of 32 channels
  bool bad = false;      // some operand is not finite
};

// Rows that are computed on together: a power of two, the last ones perhaps padding.
struct RowSet {
  int64_t first, rows;
};

// The running state of one head's rows.
struct HeadState {
  float* q;    // [set][dim / kLanes][rows][kLanes]
  float* out;  // [kDecodeRows][dim_v]
  float* max;  // [set][kSlab], repeated with period set.rows
  float* sum;  // [set][kSlab], the first set.rows are valid
  bool bad_rows[kDecodeRows], any_bad_row, wide_q;
};

struct Scratch {
  HeadState* heads;
  float *q, *scores, *k_scale, *v_scale, *k, *v, *row;

  Scratch(Arena& arena, const AttentionShape& shape, int64_t num_heads) {
    const int64_t dim = round_up(shape.head_dim, kGroup), dim_v = round_up(shape.head_dim_v, kGroup);
    heads = arena.take<HeadState>(num_heads);
    for (int64_t h = 0; h < num_heads; ++h) {
      HeadState unused, &head = heads ? heads[h] : unused;
      head.q = arena.take<float>(kDecodeRows * dim);
      head.out = arena.take<float>(kDecodeRows * dim_v);
      head.max = arena.take<float>(kMaxSets * kSlab);
      head.sum = arena.take<float>(kMaxSets * kSlab);
    }
    q = arena.take<float>(kSpans * kDecodeRows * dim);
    scores = arena.take<float>(kKeys * kDecodeRows + kSlab);
    k_scale = arena.take<float>(kKeys * kMaxDim);
    v_scale = arena.take<float>(kKeys * kMaxDim);
    k = arena.take<float>(kKeys * dim);
    v = arena.take<float>(kKeys * dim_v);
    row = arena.take<float>(dim_v);
  }
};

size_t scratch_bytes(const FwdProblem& problem, int64_t heads) {
  Arena arena(nullptr);
  Scratch{arena, problem.shape, heads};
  return arena.used();
}

// Payload rows of a block of keys of several heads, in the order of memory or head by head.
struct Rows {
  const uint8_t* row = nullptr;
  int64_t bytes = 0, left = 0;
  int64_t inner = 0, inner_stride = 0, jump = 0, at = 0;

  Rows() = default;
  Rows(const MxHead& first_head, int64_t heads, int64_t first, int64_t count, bool head_by_head) {
    const Tensor& t = first_head.tensor->data;
    row = static_cast<const uint8_t*>(t.data) + (first_head.sequence.start + first) * t.stride[0] +
          first_head.head * t.stride[1];
    bytes = t.shape[2];
    left = count * heads;
    inner = head_by_head ? count : heads;
    inner_stride = t.stride[head_by_head ? 0 : 1];
    jump = t.stride[head_by_head ? 1 : 0] - (inner - 1) * inner_stride;
  }
  MXFLASH_INLINE void next() {
    const bool last = ++at == inner;
    row += last ? jump : inner_stride;
    at = last ? 0 : at;
    --left;
  }
};

// Asks for rows one after the other, while others are computed on.
class Prefetch {
 public:
  void start(const Rows& rows) { rows_ = rows, later_ = {}, rate_ = 1; }
  // `rows` before what is left, two at a time.
  void start_before(const Rows& rows) { later_ = rows_, rows_ = rows, rate_ = 2; }
  MXFLASH_INLINE void step() {
    for (int64_t n = 0; n < rate_; ++n) {
      if (rows_.left == 0) {
        if (later_.left == 0) return;
        std::swap(rows_, later_);
      }
      constexpr int64_t kCacheLine = 64;
      // Into L2: fills of L1 are few, and would wait for memory.
      for (int64_t c = 0; c < rows_.bytes; c += kCacheLine) __builtin_prefetch(rows_.row + c, 0, 2);
      rows_.next();
    }
  }
  void finish() {
    while (rows_.left > 0) step();
  }

 private:
  Rows rows_, later_;
  int64_t rate_ = 1;
};

// Looks for NaN in keys that are read as codes.
class KeySearch {
 public:
  MXFLASH_INLINE KeySearch() {}
  template <class Key>
  MXFLASH_INLINE void look(const uint8_t* key, int64_t channels) {
    if constexpr (Key::kBytes == 1) {
      int64_t c = 0;
      for (; c + NanSearch::kCodes <= channels; c += NanSearch::kCodes) search_.look(key + c);
      if (c < channels) rest_ |= has_special_code(key + c, channels - c, false);
    }
  }
  MXFLASH_INLINE bool found() const { return rest_ || search_.found(); }

 private:
  NanSearch search_;
  bool rest_ = false;
};

// ---- kernels ----------------------------------------------------------------------------------------------------

// Vectors of partial sums of kNumKeys keys x kRows rows, in this order, from `sums` on. q [vectors][kPeriod][kLanes].
template <class Key, int kNumKeys, int kRows, int kPeriod>
MXFLASH_INLINE void dot_products(int64_t channels, const uint8_t* const (&key)[kNumKeys],
                                 const float* const (&scale)[kNumKeys], const float* q, F32* sums) {
  F32 x[kNumKeys * kRows];
#pragma GCC unroll 16
  for (int i = 0; i < kNumKeys * kRows; ++i) x[i] = broadcast(0.0f);
  for (int64_t c = 0; c < channels; c += kLanes, q += kPeriod * kLanes) {
    F32 y[kNumKeys];
#pragma GCC unroll 16
    for (int j = 0; j < kNumKeys; ++j) {
      y[j] = Key::load(key[j] + c * Key::kBytes);
      if constexpr (Key::kScaled) y[j] = mul(y[j], broadcast(scale[j][c / kMxBlock]));
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const F32 qr = load(q + r * kLanes);
#pragma GCC unroll 16
      for (int j = 0; j < kNumKeys; ++j) x[j * kRows + r] = fma(y[j], qr, x[j * kRows + r]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kNumKeys * kRows; ++i) sums[i] = x[i];
}

// scores[key][row] of `count` keys, times `factor`, to the end of the last vector. q [vectors][kRows][kLanes], another
// one each span_stride. Returns whether there is a NaN code in k, which is taken for a number.
template <class Key, int kRows>
bool score_keys(const Block k, int64_t count, const float* q, int64_t span_stride, float factor, float* scores,
                Prefetch& next) {
  constexpr int kVectorRows = std::min(kRows, kLanes), kVectorKeys = kLanes / kVectorRows;
  constexpr int kStep = std::min(kVectorKeys, 4);  // keys
  KeySearch nan;
  for (int64_t i = 0; i < count * kRows; i += kLanes) {
    const int64_t first = i / kRows;
    const float* rows = q + first / kMxBlock * span_stride + i % kRows * kLanes;
    F32 sums[kLanes];
#pragma GCC unroll 4
    for (int j = 0; j < kVectorKeys; j += kStep) {
      const uint8_t* key[kStep];
      const float* scale[kStep];
#pragma GCC unroll 4
      for (int n = 0; n < kStep; ++n) {
        const int64_t at = std::min(first + j + n, count - 1);  // must not read past the tensor
        key[n] = k.first + at * k.stride;
        scale[n] = k.scale + at * k.groups;
        nan.look<Key>(key[n], k.channels);
        if (i % kRows == 0) next.step();
      }
      dot_products<Key, kStep, kVectorRows, kRows>(k.channels, key, scale, rows, sums + j * kVectorRows);
    }
    store(scores + i, mul(sum_each(sums), broadcast(factor)));
  }
  return nan.found();
}

// out[kRows][out_stride] += scale * sum over `count` keys of p[key][row] v[key], on kVectors vectors of channels from c
// on.
template <class Key, int kRows, int kPeriod, int kVectors>
MXFLASH_INLINE void add_values(const Block v, int64_t first, int64_t count, const float* p, int64_t c, float* out,
                               int64_t out_stride, KeySearch& nan, Prefetch& next) {
  F32 x[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) x[r][n] = broadcast(0.0f);
  }
  const bool first_pass = c == 0;
  KeySearch search = nan;
  const uint8_t* key = v.first + first * v.stride + c * Key::kBytes;
  const float* key_scale = v.scale + first * v.groups;
  for (int64_t j = 0; j < count; ++j) {
    F32 y[kVectors];
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) {
      y[n] = Key::load(key + n * kLanes * Key::kBytes);
      if constexpr (Key::kScaled) y[n] = mul(y[n], broadcast(key_scale[(c + n * kLanes) / kMxBlock]));
    }
    // A broadcast costs nothing as an operand; as an instruction it competes with the decoding.
    const float* pn[kVectors];
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) pn[n] = kVectors > 1 && kVectors <= 4 ? forget(p) : p;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) x[r][n] = fma(broadcast(pn[n][r]), y[n], x[r][n]);
    }
    if (first_pass) {
      search.look<Key>(key, v.channels);
      next.step();
    }
    p += kPeriod;
    key += v.stride;
    key_scale += v.groups;
  }
  nan = search;
  const float* scale = v.scale + first / kMxBlock * v.channels + c;
#pragma GCC unroll 8
  for (int n = 0; n < kVectors; ++n) {
    const F32 unit = Key::kScaled || Key::kBytes > 1 ? broadcast(1.0f) : load(scale + n * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* o = out + r * out_stride + c + n * kLanes;
      store(o, fma(x[r][n], unit, load(o)));
    }
  }
}

template <class Key, int kRows, int kPeriod, int kVectors>
MXFLASH_INLINE int64_t add_channels(const Block v, int64_t first, int64_t count, const float* p, int64_t c, float* out,
                                    int64_t out_stride, KeySearch& nan, Prefetch& next) {
  for (; c + kVectors * kLanes <= v.channels; c += kVectors * kLanes) {
    add_values<Key, kRows, kPeriod, kVectors>(v, first, count, p, c, out, out_stride, nan, next);
  }
  if constexpr (kVectors > 1) {
    c = add_channels<Key, kRows, kPeriod, kVectors / 2>(v, first, count, p, c, out, out_stride, nan, next);
  }
  return c;
}

// All rows and channels. Returns whether there is a NaN code in v, which is taken for a number.
template <class Key, int kRows>
bool sum_values(const Block v, int64_t count, const float* p, float* out, int64_t out_stride, Prefetch& next) {
  constexpr int kTogether = std::min(kRows, kSums), kVectors = std::min(kMaxVectors, kSums / kTogether);
  Prefetch none;
  KeySearch nan;
  for (int64_t first = 0; first < count; first += kMxBlock) {
    const int64_t keys = std::min(count - first, kMxBlock);
    for (int64_t r = 0; r < kRows; r += kTogether) {
      add_channels<Key, kTogether, kRows, kVectors>(v, first, keys, p + first * kRows + r, 0, out + r * out_stride,
                                                    out_stride, nan, r == 0 ? next : none);
    }
  }
  return nan.found();
}

// Turns the scores of `count` keys into P and updates max. alpha: the factor of what was summed before. Returns whether
// any is not 1. Behind the scores there is room for a slab.
template <int kRows>
bool softmax(float* s, int64_t count, float* max_state, float* alpha) {
  const int64_t n = count * kRows, end = round_up(n, kSlab);
  std::fill(s + n, s + end, -kInfinity);
  std::fill_n(s + end, kSlab, 0.0f);
  float top[kSlab];
  for (int64_t lane = 0; lane < kSlab; lane += kLanes) {
    F32 m = broadcast(kLowest);
    for (int64_t i = lane; i < end; i += kSlab) m = max(load(s + i), m);
    store(top + lane, m);
  }
  for (int64_t l = kRows; l < kSlab; ++l) top[l % kRows] = std::max(top[l % kRows], top[l]);
  for (int64_t l = kRows; l < kSlab; ++l) top[l] = top[l - kRows];
  bool rescale = false;
  for (int64_t lane = 0; lane < kSlab; lane += kLanes) {
    const F32 old = load(max_state + lane), m = max(load(top + lane), old);
    rescale |= any(less(old, m));
    store(alpha + lane, exp2(sub(old, m)));
    store(max_state + lane, m);
    for (int64_t i = lane; i < end; i += kSlab) store(s + i, exp2(sub(load(s + i), m)));
  }
  return rescale;
}

// The sum of P as sum_values has it for v = 1. To be called after that: loads that span two stores wait for both.
template <int kRows>
void sum_weights(const float* p, int64_t count, const float* alpha, float* sum_state) {
  for (int64_t lane = 0; lane < kRows; lane += kLanes) {
    F32 sum = mul(load(sum_state + lane), load(alpha + lane));
    for (int64_t first = 0; first < count; first += kMxBlock) {
      const float* first_p = p + first * kRows + lane;
      F32 part = broadcast(0.0f);
      for (int64_t j = 0; j < std::min(count - first, kMxBlock); ++j) part = add(part, load(first_p + j * kRows));
      sum = add(sum, part);
    }
    store(sum_state + lane, sum);
  }
}

// ---- a task -----------------------------------------------------------------------------------------------------

class Decode {
 public:
  Decode(const FwdProblem& problem, int64_t heads, std::byte* memory)
      : args_(problem.args), shape_(problem.shape), scratch_(make_scratch(problem.shape, heads, memory)) {}

  void attend(const DecodeTask& task);
  void combine(const DecodeTask& task, const float* parts, int64_t num_parts);

 private:
  static Scratch make_scratch(const AttentionShape& shape, int64_t heads, std::byte* memory) {
    Arena arena(memory);
    return Scratch(arena, shape, heads);
  }

  void set_rows(int64_t b);
  void start_head(HeadState& head, int64_t b, int64_t kv_head);
  bool open_codes(const MxHead& h, float* scale, Block& block);
  Block open_floats(const MxHead& h, float* plain);
  bool load_scale_block(const MxHead& h, float* scale);
  void scale_q(const HeadState& head, const Block& k);
  template <int kRows>
  bool fold(HeadState& head, int64_t set, const Block& k, const Block& v);
  bool fold_set(HeadState& head, int64_t set, const Block& k, const Block& v);
  void mask_scores(const RowSet& set);
  void poison(HeadState& head, const MxHead& k, const MxHead& v);
  void write(const HeadState& head, int64_t b, int64_t kv_head);

  int64_t dim() const { return round_up(shape_.head_dim, kGroup); }
  int64_t dim_v() const { return round_up(shape_.head_dim_v, kGroup); }

  const AttentionFwd& args_;
  const AttentionShape& shape_;
  Scratch scratch_;
  int64_t seqlen_q_ = 0, rows_ = 0;  // rows [group][seqlen_q]
  RowSet sets_[kMaxSets];
  int64_t num_sets_ = 0;
  Range visible_[kDecodeRows];     // keys of a row
  Range any_, common_;             // of any row, of all
  int64_t first_ = 0, count_ = 0;  // the present block of keys
  Prefetch next_k_, next_v_;
};

// The rows of sequence b: what they see, and how they are divided into sets.
void Decode::set_rows(int64_t b) {
  seqlen_q_ = shape_.query_sequence(b).length;
  rows_ = seqlen_q_ * shape_.group;
  const int64_t seqlen_k = shape_.key_sequence(b).length;
  any_ = visible_keys(args_.mask, 0, seqlen_q_, seqlen_q_, seqlen_k);
  common_ = any_;
  for (int64_t r = 0; r < rows_; ++r) {
    const int64_t i = r % seqlen_q_;
    visible_[r] = visible_keys(args_.mask, i, i + 1, seqlen_q_, seqlen_k);
    common_.first = std::max(common_.first, visible_[r].first);
    common_.end = std::min(common_.end, visible_[r].end);
  }
  // Padding up to half of a set is cheaper than decoding once more.
  num_sets_ = 0;
  for (int64_t first = 0; first < rows_; first += sets_[num_sets_++].rows) {
    const int64_t left = rows_ - first;
    int64_t rows = 1;
    while (2 * rows <= left) rows *= 2;
    const int64_t rest = left - rows;
    if (rows < 4 ? rest > 0 : 2 * rest > rows) rows *= 2;
    sets_[num_sets_] = {first, rows};
  }
}

void Decode::start_head(HeadState& head, int64_t b, int64_t kv_head) {
  MxHead q{&args_.q, padded_token_count(shape_.total_q, shape_.seq_q), shape_.query_sequence(b), 0};
  bool finite = true;
  float* rows = scratch_.k;  // not in use yet
  for (int64_t g = 0; g < shape_.group; ++g) {
    q.head = kv_head * shape_.group + g;
    finite &= decode_tokens(q, 0, seqlen_q_, 1, rows + g * seqlen_q_ * dim(), dim());
  }
  head.any_bad_row = !finite;
  if (!finite) clear_nonfinite(rows, dim(), rows_, shape_.head_dim, head.bad_rows);
  std::fill(rows + rows_ * dim(), rows + kDecodeRows * dim(), 0.0f);
  F32 widest = broadcast(0.0f);
  for (int64_t set = 0; set < num_sets_; ++set) {
    float* dst = head.q + sets_[set].first * dim();
    for (int64_t c = 0; c < dim(); c += kLanes) {
      for (int64_t r = 0; r < sets_[set].rows; ++r, dst += kLanes) {
        const F32 x = load(rows + (sets_[set].first + r) * dim() + c);
        widest = max(abs(x), widest);
        store(dst, x);
      }
    }
  }
  head.wide_q = reduce_max(widest) > kRoom;
  std::fill_n(head.out, kDecodeRows * dim_v(), 0.0f);
  std::fill_n(head.max, kMaxSets * kSlab, kLowest);
  std::fill_n(head.sum, kMaxSets * kSlab, 0.0f);
}

// Scales of the present keys, times the 2^8 that load_small_e4m3 leaves out. False if some are not ordinary.
bool Decode::load_scale_block(const MxHead& h, float* scale) {
  constexpr float kFactor = 256;
  const MxTensor& t = *h.tensor;
  const int64_t channels = t.data.shape[2], groups = ceil_div(channels, kMxBlock);
  bool ordinary = true;
  const auto check = [&](const float* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) ordinary &= x[i] <= kRoom;  // NaN is not
  };
  if (t.block == MxBlock::row32) {
    if (t.layout == ScaleLayout::linear) {
      const ScaleIndex first{h.head, h.sequence.padded_start + first_, 0};
      const auto* bytes =
          static_cast<const uint8_t*>(t.scale.data) + scale_offset(t.block, t.layout, h.padded, channels, first);
      const int64_t total = count_ * groups, whole = total / kLanes * kLanes;
      for (int64_t i = 0; i < whole; i += kLanes) store(scale + i, mul(load_e8m0(bytes + i), broadcast(kFactor)));
      for (int64_t i = whole; i < total; ++i) scale[i] = decode_e8m0(bytes[i]) * kFactor;
    } else {
      for (int64_t j = 0; j < count_; ++j) load_scales(h, first_ + j, kFactor, scale + j * groups);
    }
    check(scale, count_ * groups);
    return ordinary;
  }
  for (int64_t j = 0; j < count_; j += kMxBlock, scale += channels) {
    if (t.block == MxBlock::col32) {
      load_scales(h, first_ + j, kFactor, scale);
      check(scale, channels);
      continue;
    }
    float by_group[kMaxDim / kMxBlock];
    load_scales(h, first_ + j, kFactor, by_group);
    check(by_group, groups);
    for (int64_t c = 0; c < channels; c += kLanes) store(scale + c, broadcast(by_group[c / kMxBlock]));
  }
  return ordinary;
}

// The present keys as they lie in memory. False if the kernels cannot read that.
bool Decode::open_codes(const MxHead& h, float* scale, Block& block) {
  const MxTensor& t = *h.tensor;
  const int64_t channels = t.data.shape[2];
  if (t.data.dtype != Dtype::e4m3 || channels % kLanes != 0 || !load_scale_block(h, scale)) return false;
  const bool per_key = t.block == MxBlock::row32;
  block = {.read = per_key ? Read::scaled_codes : Read::codes,
           .first = static_cast<const uint8_t*>(t.data.data) + (h.sequence.start + first_) * t.data.stride[0] +
                    h.head * t.data.stride[1],
           .stride = t.data.stride[0],
           .channels = channels,
           .scale = scale,
           .groups = per_key ? ceil_div(channels, kMxBlock) : 0};
  return true;
}

// The same decoded, and what is not finite replaced by zero.
Block Decode::open_floats(const MxHead& h, float* plain) {
  const int64_t channels = h.tensor->data.shape[2], stride = round_up(channels, kGroup);
  const bool finite = decode_tokens(h, first_, count_, 1, plain, stride);
  if (!finite) {
    bool ignored[kKeys];
    clear_nonfinite(plain, stride, count_, channels, ignored);
  }
  return {.read = Read::floats,
          .first = reinterpret_cast<const uint8_t*>(plain),
          .stride = stride * int64_t(sizeof(float)),
          .channels = stride,
          .scale = nullptr,
          .groups = 0,
          .bad = !finite};
}

// q times the scales of k, for every span of keys.
void Decode::scale_q(const HeadState& head, const Block& k) {
  for (int64_t span = 0; span * kMxBlock < count_; ++span) {
    for (int64_t set = 0; set < num_sets_; ++set) {
      const float* src = head.q + sets_[set].first * dim();
      float* dst = scratch_.q + span * kDecodeRows * dim() + sets_[set].first * dim();
      for (int64_t c = 0; c < k.channels; c += kLanes) {
        const F32 scale = load(k.scale + span * k.channels + c);
        for (int64_t r = 0; r < sets_[set].rows; ++r, src += kLanes, dst += kLanes) store(dst, mul(load(src), scale));
      }
    }
  }
}

void Decode::mask_scores(const RowSet& set) {
  for (int64_t r = 0; r < set.rows && set.first + r < rows_; ++r) {
    const Range& keys = visible_[set.first + r];
    for (int64_t j = 0; j < count_; ++j) {
      if (first_ + j < keys.first || first_ + j >= keys.end) scratch_.scores[j * set.rows + r] = -kInfinity;
    }
  }
}

// Folds the present keys into the state of a set of rows. Returns whether there are NaN codes.
template <int kRows>
bool Decode::fold(HeadState& head, int64_t set, const Block& k, const Block& v) {
  const int64_t first_row = sets_[set].first;
  const float* q = head.q + first_row * dim();
  float *out = head.out + first_row * dim_v(), *s = scratch_.scores;
  const float factor = float(shape_.softmax_scale * kLog2e);
  bool nan = false;
  switch (k.read) {
    case Read::codes:
      nan =
          score_keys<Codes, kRows>(k, count_, scratch_.q + first_row * dim(), kDecodeRows * dim(), factor, s, next_k_);
      break;
    case Read::scaled_codes: nan = score_keys<ScaledCodes, kRows>(k, count_, q, 0, factor, s, next_k_); break;
    case Read::floats: score_keys<Floats, kRows>(k, count_, q, 0, factor, s, next_k_); break;
  }
  if (first_ < common_.first || first_ + count_ > common_.end) mask_scores(sets_[set]);
  float alpha[kSlab];
  if (softmax<kRows>(s, count_, head.max + set * kSlab, alpha)) {
    for (int64_t r = 0; r < kRows; ++r) {
      const F32 factor = broadcast(alpha[r]);
      for (int64_t c = 0; c < dim_v(); c += kLanes) {
        store(out + r * dim_v() + c, mul(load(out + r * dim_v() + c), factor));
      }
    }
  }
  switch (v.read) {
    case Read::codes: nan |= sum_values<Codes, kRows>(v, count_, s, out, dim_v(), next_v_); break;
    case Read::scaled_codes: nan |= sum_values<ScaledCodes, kRows>(v, count_, s, out, dim_v(), next_v_); break;
    case Read::floats: sum_values<Floats, kRows>(v, count_, s, out, dim_v(), next_v_); break;
  }
  sum_weights<kRows>(s, count_, alpha, head.sum + set * kSlab);
  return nan;
}
bool Decode::fold_set(HeadState& head, int64_t set, const Block& k, const Block& v) {
  switch (sets_[set].rows) {
    case 1: return fold<1>(head, set, k, v);
    case 2: return fold<2>(head, set, k, v);
    case 4: return fold<4>(head, set, k, v);
    case 8: return fold<8>(head, set, k, v);
    default: return fold<16>(head, set, k, v);
  }
}

// Marks the rows that see a key whose k or v is not finite.
void Decode::poison(HeadState& head, const MxHead& k, const MxHead& v) {
  for (int64_t j = 0; j < count_; ++j) {
    const bool bad_key = !decode_tokens(k, first_ + j, 1, 1, scratch_.k, dim());
    const bool bad_v = !decode_tokens(v, first_ + j, 1, 1, scratch_.row, dim_v());
    if (!bad_key && !bad_v) continue;
    for (int64_t set = 0; set < num_sets_; ++set) {
      for (int64_t i = 0; i < sets_[set].rows; ++i) {
        const int64_t r = sets_[set].first + i;
        if (r >= rows_ || first_ + j < visible_[r].first || first_ + j >= visible_[r].end) continue;
        if (bad_key) head.sum[set * kSlab + i] = kNan;
        for (int64_t c = 0; bad_v && c < shape_.head_dim_v; ++c) {
          if (!std::isfinite(scratch_.row[c])) head.out[r * dim_v() + c] = kNan;
        }
      }
    }
  }
}

void Decode::write(const HeadState& head, int64_t b, int64_t kv_head) {
  const int64_t channels = shape_.head_dim_v, first_row = shape_.out_sequence(b).start;
  for (int64_t set = 0; set < num_sets_; ++set) {
    for (int64_t i = 0; i < sets_[set].rows && sets_[set].first + i < rows_; ++i) {
      const int64_t r = sets_[set].first + i, row = first_row + r % seqlen_q_;
      const int64_t q_head = kv_head * shape_.group + r / seqlen_q_;
      const float sum = head.sum[set * kSlab + i];
      float* out = head.out + r * dim_v();
      for (int64_t c = 0; c < dim_v(); c += kLanes) {
        store(out + c, sum == 0 ? broadcast(0.0f) : div(load(out + c), broadcast(sum)));  // v = 1 gives 1
      }
      if (args_.v_mean && sum != 0) {
        const float* mean = static_cast<const float*>(args_.v_mean.data) + row_offset(args_.v_mean, b, kv_head);
        for (int64_t c = 0; c < channels; ++c) out[c] += mean[c];
      }
      if (args_.out) store_row(args_.out, row_offset(args_.out, row, q_head), out, channels);
      const double spare = sum == 0 ? 0 : std::log2(double(sum));  // lse in units of log2, above the maximum
      if (args_.lse) {
        store_float(args_.lse, q_head * args_.lse.stride[0] + row,
                    sum == 0 ? -kInfinity : float((double(head.max[set * kSlab + i]) + spare) / kLog2e));
      }
      if (args_.row_exponent) {
        static_cast<uint8_t*>(args_.row_exponent.data)[q_head * args_.row_exponent.stride[0] + row] =
            spare > 0 ? uint8_t(std::min(spare, 255.0)) : uint8_t(0);
      }
    }
  }
  for (int64_t g = 0; args_.out_mx && g < shape_.group; ++g) {
    write_out_mx(args_, shape_, b, kv_head * shape_.group + g, 0, seqlen_q_, head.out + g * seqlen_q_ * dim_v(),
                 dim_v());
  }
}

void Decode::attend(const DecodeTask& task) {
  set_rows(task.b);
  if (rows_ == 0) return;
  const int64_t padded = padded_token_count(shape_.total_k, shape_.seq_k);
  const Sequence sequence = shape_.key_sequence(task.b);
  MxHead k{&args_.k, padded, sequence, task.first_head}, v{&args_.v, padded, sequence, task.first_head};
  const int64_t end = std::min(any_.end, task.end_key);
  int64_t next = std::max(any_.first, task.first_key) / kKeys * kKeys;
  const auto rows = [&](MxHead& t, int64_t head, int64_t heads, int64_t first, bool head_by_head) {
    t.head = task.first_head + head;
    return Rows(t, heads, first, std::clamp<int64_t>(end - first, 0, kKeys), head_by_head);
  };
  next_k_.start(rows(k, 0, 1, next, true));
  next_v_.start(rows(v, 0, 1, next, true));
  next_k_.finish();
  next_v_.finish();
  for (int64_t h = 0; h < task.num_heads; ++h) start_head(scratch_.heads[h], task.b, task.first_head + h);

  bool is_first = true;
  for (; next < end; next += kKeys) {
    first_ = next;
    count_ = std::min(kKeys, end - first_);
    next_k_.start(rows(k, 0, task.num_heads, next + kKeys, false));
    next_v_.start(rows(v, 0, task.num_heads, next + kKeys, false));
    if (is_first) {  // so far there is only the first head's
      next_k_.start_before(rows(k, 1, task.num_heads - 1, next, true));
      next_v_.start_before(rows(v, 1, task.num_heads - 1, next, true));
    }
    is_first = false;
    for (int64_t h = 0; h < task.num_heads; ++h) {
      HeadState& head = scratch_.heads[h];
      k.head = v.head = task.first_head + h;
      Block keys, values;
      if (head.wide_q || !open_codes(k, scratch_.k_scale, keys)) keys = open_floats(k, scratch_.k);
      if (!open_codes(v, scratch_.v_scale, values)) values = open_floats(v, scratch_.v);
      if (keys.read == Read::codes) scale_q(head, keys);
      bool bad = keys.bad || values.bad;
      for (int64_t set = 0; set < num_sets_; ++set) bad |= fold_set(head, set, keys, values);
      if (bad) poison(head, k, v);
    }
  }

  for (int64_t h = 0; h < task.num_heads; ++h) {
    HeadState& head = scratch_.heads[h];
    for (int64_t set = 0; head.any_bad_row && set < num_sets_; ++set) {
      for (int64_t i = 0; i < sets_[set].rows && sets_[set].first + i < rows_; ++i) {
        float& sum = head.sum[set * kSlab + i];
        if (head.bad_rows[sets_[set].first + i] && sum != 0) sum = kNan;
      }
    }
    if (!task.partial) {
      write(head, task.b, task.first_head + h);
      continue;
    }
    float* partial = task.partial + h * task.partial_stride;
    std::copy_n(head.max, kMaxSets * kSlab, partial);
    std::copy_n(head.sum, kMaxSets * kSlab, partial + kMaxSets * kSlab);
    std::copy_n(head.out, rows_ * dim_v(), partial + 2 * kMaxSets * kSlab);
  }
}

void Decode::combine(const DecodeTask& task, const float* parts, int64_t num_parts) {
  set_rows(task.b);
  if (rows_ == 0) return;
  const int64_t size = decode_partial_floats(shape_);
  HeadState& head = scratch_.heads[0];
  for (int64_t set = 0; set < num_sets_; ++set) {
    for (int64_t i = 0; i < sets_[set].rows && sets_[set].first + i < rows_; ++i) {
      const int64_t r = sets_[set].first + i, at = set * kSlab + i;
      float top = kLowest;
      for (int64_t n = 0; n < num_parts; ++n) top = std::max(parts[n * size + at], top);
      float sum = 0, *out = head.out + r * dim_v();
      std::fill_n(out, dim_v(), 0.0f);
      for (int64_t n = 0; n < num_parts; ++n) {
        const float* part = parts + n * size;
        const F32 weight = exp2(broadcast(part[at] - top));
        float sums[kLanes];
        store(sums, fma(broadcast(part[kMaxSets * kSlab + at]), weight, broadcast(sum)));  // as out
        sum = sums[0];
        for (int64_t c = 0; c < dim_v(); c += kLanes) {
          store(out + c, fma(load(part + 2 * kMaxSets * kSlab + r * dim_v() + c), weight, load(out + c)));
        }
      }
      head.max[at] = top;
      head.sum[at] = sum;
    }
  }
  write(head, task.b, task.first_head);
}

void attend(const FwdProblem& problem, const DecodeTask& task, std::byte* scratch) {
  Decode(problem, task.num_heads, scratch).attend(task);
}
void combine(const FwdProblem& problem, const DecodeTask& task, const float* parts, int64_t num_parts,
             std::byte* scratch) {
  Decode(problem, 1, scratch).combine(task, parts, num_parts);
}

}  // namespace

const AttentionDecodeKernels kAttentionDecodeKernels{scratch_bytes, attend, combine};

MXFLASH_ISA_END
