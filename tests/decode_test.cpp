// Few query rows on backend `cpu` (attention_decode_cpu_kernel.cpp), on every instruction set: against exact attention,
// against the kernel for many rows, and identities that hold to the bit.
#include <gtest/gtest.h>
#include <mxflash/attention.h>
#include <mxflash/backend.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cpu_isas.h"
#include "kit/mx_attention.h"
#include "kit/oracle.h"
#include "kit/random.h"
#include "kit/runner.h"
#include "mx/block.h"
#include "mx/scale_layout.h"

namespace mxflash {
namespace {

using kit::OwnedMx;
using kit::Random;
using kit::require_ok;

class Decode : public EveryIsa {
 protected:
  ~Decode() override { set_num_threads(0); }
};
INSTANTIATE_TEST_SUITE_P(Isas, Decode, testing::ValuesIn(available_isas()), isa_of_test);

struct Format {
  Dtype element = Dtype::e4m3;
  MxBlock block = MxBlock::square32;
  ScaleLayout layout = ScaleLayout::linear;
};

struct Result {
  std::vector<float> out, lse;  // [total_out, heads_q, dim_v], [heads_q, total_out]
  std::vector<uint8_t> row_exponent;
};

struct Call {
  std::vector<int32_t> lens_q{1}, lens_k{100};
  int64_t heads_kv = 1, group = 1, dim = 64, dim_v = 64;
  Mask mask{};
  bool shared_q = false, with_v_mean = false;
  Format q_format, k_format, v_format;

  std::vector<int32_t> cu_q, cu_k;
  OwnedMx q, k, v;
  std::vector<float> v_mean;

  int64_t heads_q() const { return heads_kv * group; }
  int64_t batch() const { return int64_t(lens_k.size()); }
  int64_t total_q() const { return cu_q.back(); }
  int64_t total_k() const { return cu_k.back(); }
  int64_t total_out() const { return shared_q ? batch() * total_q() : total_q(); }
  static Jagged jagged(const std::vector<int32_t>& cu, const std::vector<int32_t>& lens) {
    return {.cu_seqlens = cu.data(),
            .batch = int32_t(lens.size()),
            .max_seqlen = *std::max_element(lens.begin(), lens.end())};
  }
  Jagged seq_q() const { return shared_q ? Jagged{} : jagged(cu_q, lens_q); }
  Jagged seq_k() const { return jagged(cu_k, lens_k); }
  int64_t first_out(int64_t b) const { return shared_q ? b * total_q() : cu_q[size_t(b)]; }

  static OwnedMx mx(const std::vector<float>& x, int64_t tokens, int64_t heads, int64_t d, const Jagged& seq,
                    const Format& f) {
    OwnedMx t = kit::make_owned_mx(f.element, f.block, f.layout, tokens, heads, d, seq);
    const Tensor in = make_tensor(const_cast<float*>(x.data()), Dtype::f32, tokens, heads, d);
    require_ok(quantize({.in = in, .out = t.view, .seq = seq, .backend = "ref"}));
    return t;
  }
  void set_lengths() {
    cu_q = kit::cu_seqlens(lens_q);
    cu_k = kit::cu_seqlens(lens_k);
  }
  static std::vector<float> normal(int64_t n, uint64_t seed, uint64_t stream) {
    std::vector<float> x(size_t(n), 0.0f);
    Random random(seed, stream);
    kit::fill_normal(random, x);
    return x;
  }
  void fill_q(uint64_t seed) {
    set_lengths();
    q = mx(normal(total_q() * heads_q() * dim, seed, 1), total_q(), heads_q(), dim, seq_q(), q_format);
  }
  void fill(uint64_t seed) {
    fill_q(seed);
    k = mx(normal(total_k() * heads_kv * dim, seed, 2), total_k(), heads_kv, dim, seq_k(), k_format);
    v = mx(normal(total_k() * heads_kv * dim_v, seed, 3), total_k(), heads_kv, dim_v, seq_k(), v_format);
    if (with_v_mean) v_mean = normal(batch() * heads_kv * dim_v, seed, 4);
  }
  // Without q. The views are those of this call, which must live longer.
  Call same_keys() const {
    Call c;
    c.lens_q = lens_q, c.lens_k = lens_k;
    c.heads_kv = heads_kv, c.group = group, c.dim = dim, c.dim_v = dim_v;
    c.mask = mask;
    c.q_format = q_format;
    c.k.view = k.view;
    c.v.view = v.view;
    return c;
  }

  Result run() const {
    Result r;
    r.out.assign(size_t(total_out() * heads_q() * dim_v), NAN);
    r.lse.assign(size_t(total_out() * heads_q()), NAN);
    r.row_exponent.assign(size_t(total_out() * heads_q()), 0xA5);
    AttentionFwd args{.q = q.view,
                      .k = k.view,
                      .v = v.view,
                      .out = make_tensor(r.out.data(), Dtype::f32, total_out(), heads_q(), dim_v),
                      .lse = make_tensor(r.lse.data(), Dtype::f32, heads_q(), total_out()),
                      .row_exponent = make_tensor(r.row_exponent.data(), Dtype::u8, heads_q(), total_out()),
                      .seq_q = seq_q(),
                      .seq_k = seq_k(),
                      .mask = mask,
                      .shared_q = shared_q,
                      .cpu_math = CpuMath::exact,
                      .backend = "cpu"};
    if (with_v_mean) {
      args.v_mean = make_tensor(const_cast<float*>(v_mean.data()), Dtype::f32, batch(), heads_kv, dim_v);
    }
    const kit::AlignedBuffer workspace(attention_fwd_workspace(args));
    std::fill_n(static_cast<uint8_t*>(workspace.data()), workspace.size(), uint8_t{0xFF});
    args.workspace = workspace.data();
    args.workspace_size = workspace.size();
    require_ok(attention_fwd(args));
    return r;
  }

  Result exact() const {
    const auto widened = [](const OwnedMx& t, const Jagged& seq) {
      const std::vector<float> x = kit::ref_dequantize(t.view, seq);
      return std::vector<double>(x.begin(), x.end());
    };
    const kit::OracleResult o = kit::oracle_attention({.num_heads_q = heads_q(),
                                                       .num_heads_kv = heads_kv,
                                                       .head_dim = dim,
                                                       .head_dim_v = dim_v,
                                                       .cu_seqlens_q = std::vector<int64_t>(cu_q.begin(), cu_q.end()),
                                                       .cu_seqlens_k = std::vector<int64_t>(cu_k.begin(), cu_k.end()),
                                                       .causal = mask.causal,
                                                       .window_left = mask.window_left,
                                                       .window_right = mask.window_right,
                                                       .shared_q = shared_q,
                                                       .q = widened(q, seq_q()),
                                                       .k = widened(k, seq_k()),
                                                       .v = widened(v, seq_k())});
    Result r{std::vector<float>(o.out.begin(), o.out.end()), std::vector<float>(o.lse.begin(), o.lse.end()), {}};
    for (int64_t b = 0; with_v_mean && b < batch(); ++b) {
      for (int64_t i = 0; i < lens_q[shared_q ? 0 : size_t(b)]; ++i) {
        for (int64_t h = 0; h < heads_q(); ++h) {
          const int64_t row = first_out(b) + i;
          if (std::isinf(r.lse[size_t(h * total_out() + row)])) continue;
          for (int64_t c = 0; c < dim_v; ++c) {
            r.out[size_t((row * heads_q() + h) * dim_v + c)] += v_mean[size_t((b * heads_kv + h / group) * dim_v + c)];
          }
        }
      }
    }
    return r;
  }

  std::string text() const {
    std::string s = "lens_q";
    for (int32_t n : lens_q) s += ' ' + std::to_string(n);
    s += ", lens_k";
    for (int32_t n : lens_k) s += ' ' + std::to_string(n);
    s += ", heads_kv " + std::to_string(heads_kv) + ", group " + std::to_string(group) + ", dims " +
         std::to_string(dim) + ' ' + std::to_string(dim_v) + (mask.causal ? ", causal" : "") + ", window " +
         std::to_string(mask.window_left) + ' ' + std::to_string(mask.window_right);
    for (const Format& f : {q_format, k_format, v_format}) {
      s += ", block " + std::to_string(int(f.block)) + (f.layout == ScaleLayout::linear ? "" : " atom") +
           (f.element == Dtype::e4m3 ? "" : " e5m2");
    }
    return s + (shared_q ? ", shared q" : "") + (with_v_mean ? ", v_mean" : "");
  }
};

template <class T>
bool same_bits(const std::vector<T>& x, const std::vector<T>& y) {
  return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0);
}
void expect_same(const Result& x, const Result& y, const std::string& what) {
  EXPECT_TRUE(same_bits(x.out, y.out)) << what;
  EXPECT_TRUE(same_bits(x.lse, y.lse)) << what;
  EXPECT_TRUE(same_bits(x.row_exponent, y.row_exponent)) << what;
}
void expect_close(const std::vector<float>& got, const std::vector<float>& want, double tolerance,
                  const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) continue;  // -inf
    ASSERT_LE(std::fabs(double(got[i]) - double(want[i])), tolerance * (1 + std::fabs(double(want[i]))))
        << "element " << i << ", " << got[i] << " and " << want[i] << ": " << what;
  }
}

template <class T>
T pick(Random& random, std::initializer_list<T> of) {
  return of.begin()[random.below(int64_t(of.size()))];
}

Call random_call(Random& random) {
  Call c;
  const auto format = [&] {
    Format f{.element = random.below(5) ? Dtype::e4m3 : Dtype::e5m2,
             .block = pick(random, {MxBlock::square32, MxBlock::row32, MxBlock::col32})};
    if (f.block != MxBlock::square32 && random.below(3) == 0) f.layout = ScaleLayout::atom128x4;
    return f;
  };
  c.q_format = format(), c.k_format = format(), c.v_format = format();
  c.group = pick<int64_t>(random, {1, 1, 2, 3, 4, 5, 8, 16});
  c.heads_kv = 1 + random.below(3);
  c.shared_q = random.below(5) == 0;
  c.with_v_mean = random.below(3) == 0;
  c.dim = pick<int64_t>(random, {8, 16, 24, 32, 64, 64, 72, 80, 96, 128, 128, 192, 256});
  c.dim_v = random.below(2) ? c.dim : pick<int64_t>(random, {8, 16, 40, 64, 128, 176, 256});
  const int64_t batch = 1 + random.below(4), most = 16 / c.group;
  c.lens_q.clear(), c.lens_k.clear();
  for (int64_t b = 0; b < batch; ++b) {
    c.lens_q.push_back(int32_t(c.shared_q ? 1 + random.below(most) : random.below(most + 1)));
    c.lens_k.push_back(pick(random, {0, 1, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 511, 513, 640, 1025, 3333}));
  }
  if (c.shared_q) c.lens_q.resize(1);
  if (random.below(40) == 0) c.lens_k[0] = 5000;
  if (random.below(2)) c.mask.causal = true;
  if (random.below(3) == 0) c.mask.window_left = int32_t(random.below(300));
  if (random.below(4) == 0) c.mask.window_right = int32_t(random.below(20));
  c.fill(random.bits());
  return c;
}

TEST_P(Decode, IsExactAttention) {
  const int64_t calls = GetParam() == CpuIsa::portable ? 30 : 120;
  for (int64_t n = 0; n < calls; ++n) {
    Random random(5, uint64_t(n));
    const Call c = random_call(random);
    const std::string what = "call " + std::to_string(n) + ": " + c.text();
    const Result got = c.run(), want = c.exact();
    expect_close(got.out, want.out, 1e-5, what);
    expect_close(got.lse, want.lse, 1e-5, what);
    if (HasFatalFailure()) return;
  }
}

// The same rows behind others in a longer query sequence, which another kernel does. A call may have both kinds.
TEST_P(Decode, AgreesWithManyRows) {
  constexpr int32_t kMore = 17;
  const int64_t calls = GetParam() == CpuIsa::portable ? 5 : 30;
  for (int64_t n = 0; n < calls; ++n) {
    Random random(12, uint64_t(n));
    Call few = random_call(random);
    few.shared_q = few.with_v_mean = false;
    few.lens_q.resize(few.lens_k.size(), 1);
    few.q_format = {.block = MxBlock::row32};
    few.fill(random.bits());
    Call many = few.same_keys();
    for (size_t b = 0; b < many.lens_q.size(); ++b) {
      if (b == 0 || random.below(2)) many.lens_q[b] += kMore;
    }
    many.fill_q(random.bits());
    const int64_t row = few.heads_q() * few.dim, groups = ceil_div(few.dim, kMxBlock);
    const int64_t padded_few = padded_token_count(few.total_q(), few.seq_q());
    const int64_t padded_many = padded_token_count(many.total_q(), many.seq_q());
    std::vector<std::pair<int64_t, int64_t>> same_rows;
    for (int64_t b = 0; b < few.batch(); ++b) {
      const Sequence s = sequence_at(few.total_q(), few.seq_q(), b), t = sequence_at(many.total_q(), many.seq_q(), b);
      for (int64_t i = 0; i < s.length; ++i) {
        const int64_t j = i + t.length - s.length;
        same_rows.emplace_back(s.start + i, t.start + j);
        std::copy_n(few.q.data.begin() + (s.start + i) * row, row, many.q.data.begin() + (t.start + j) * row);
        for (int64_t h = 0; h < few.heads_q(); ++h) {
          std::copy_n(few.q.scale.begin() + (h * padded_few + s.padded_start + i) * groups, groups,
                      many.q.scale.begin() + (h * padded_many + t.padded_start + j) * groups);
        }
      }
    }
    const Result x = few.run(), y = many.run();
    for (const auto& [i, j] : same_rows) {
      const int64_t width = few.heads_q() * few.dim_v;
      const auto out_row = [&](const Result& r, int64_t at) {
        return std::vector<float>(r.out.begin() + at * width, r.out.begin() + (at + 1) * width);
      };
      expect_close(out_row(x, i), out_row(y, j), 1e-5, few.text());
      for (int64_t h = 0; h < few.heads_q(); ++h) {
        const size_t a = size_t(h * few.total_out() + i), b = size_t(h * many.total_out() + j);
        expect_close({x.lse[a]}, {y.lse[b]}, 1e-5, few.text());
        EXPECT_LE(std::abs(int(x.row_exponent[a]) - int(y.row_exponent[b])), 1) << few.text();
      }
      if (HasFatalFailure()) return;
    }
  }
}

// Every number of rows, at the ends of blocks of keys and of parts.
TEST_P(Decode, EveryShape) {
  if (GetParam() == CpuIsa::portable) GTEST_SKIP() << "slow";
  for (int64_t rows = 1; rows <= 16; ++rows) {
    for (int64_t group = 1; group <= 8; ++group) {
      if (rows % group != 0) continue;
      for (const int32_t keys : {1, 2, 15, 64, 97, 512, 513, 1151}) {
        Call c;
        c.lens_q = {int32_t(rows / group)};
        c.lens_k = {keys};
        c.group = group;
        c.mask.causal = keys % 2 != 0;
        c.fill(uint64_t(rows * 100 + keys));
        const Result got = c.run(), want = c.exact();
        expect_close(got.out, want.out, 1e-5, c.text());
        expect_close(got.lse, want.lse, 1e-5, c.text());
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Decode, DoesNotDependOnThreads) {
  for (int64_t n = 0; n < 12; ++n) {
    Random random(6, uint64_t(n));
    Call c = random_call(random);
    c.heads_kv = 1 + n % 3 * 4;
    c.dim = c.dim_v = 64;
    c.lens_k[0] = 3000;
    c.fill(random.bits());
    set_num_threads(1);
    const Result one = c.run();
    for (int32_t threads = 2; threads <= 4; ++threads) {
      set_num_threads(threads);
      expect_same(c.run(), one, std::to_string(threads) + " threads, " + c.text());
    }
  }
}

// A row's bits follow from that row and the keys.
TEST_P(Decode, RowsDoNotDependOnEachOther) {
  for (const int64_t dim : {64, 72}) {
    Call all;
    all.lens_q = {13};
    all.lens_k = {777};
    all.dim = all.dim_v = dim;
    all.fill(8);
    const Result want = all.run();
    for (int32_t i = 0; i < 13; ++i) {
      Call one = all.same_keys();
      one.lens_q = {1};
      one.set_lengths();
      one.q = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, {}, 1, 1, dim, one.seq_q());
      std::copy_n(all.q.data.begin() + i * dim, dim, one.q.data.begin());
      std::copy_n(all.q.scale.begin(), ceil_div(dim, kMxBlock), one.q.scale.begin());
      const Result got = one.run();
      EXPECT_TRUE(std::equal(got.out.begin(), got.out.end(), want.out.begin() + i * dim)) << i;
      EXPECT_EQ(got.lse[0], want.lse[size_t(i)]);
    }
  }
}

// The same values with the scales of square blocks repeated: other ways to read them, the same bits.
TEST_P(Decode, DoesNotDependOnTheKindOfBlock) {
  for (const int64_t dim : {8, 64, 96}) {
    Call square;
    square.lens_q = {3, 0, 2};
    square.lens_k = {700, 5, 65};
    square.group = 2;
    square.heads_kv = 2;
    square.dim = square.dim_v = dim;
    square.mask.causal = true;
    square.fill(9);
    const Result want = square.run();
    for (const MxBlock block : {MxBlock::row32, MxBlock::col32}) {
      for (const ScaleLayout layout : {ScaleLayout::linear, ScaleLayout::atom128x4}) {
        const auto expanded = [&](const OwnedMx& t, const Jagged& seq) {
          const auto& shape = t.view.data.shape;
          OwnedMx x = kit::make_owned_mx(Dtype::e4m3, block, layout, shape[0], shape[1], shape[2], seq);
          std::copy(t.data.begin(), t.data.end(), x.data.begin());
          require_ok(convert_scales({.in = t.view, .out = x.view, .seq = seq, .backend = "ref"}));
          return x;
        };
        Call c = square.same_keys();
        c.set_lengths();
        c.q = expanded(square.q, square.seq_q());
        c.k = expanded(square.k, square.seq_k());
        c.v = expanded(square.v, square.seq_k());
        expect_same(c.run(), want, "block " + std::to_string(int(block)));
      }
    }
  }
}

TEST_P(Decode, ConstantVIsReproducedToTheBit) {
  for (const auto& [rows, keys] : {std::pair(1, 5000), {3, 1000}, {16, 2049}, {8, 31}}) {
    for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
      Call c;
      c.lens_q = {int32_t(rows)};
      c.lens_k = {int32_t(keys)};
      c.mask.causal = rows == 3;
      c.v_format.block = block;
      c.fill(10);
      c.v = Call::mx(std::vector<float>(size_t(keys * c.dim_v), 1.0f), keys, 1, c.dim_v, c.seq_k(), c.v_format);
      for (const float o : c.run().out) ASSERT_EQ(o, 1.0f) << c.text();
    }
  }
}

// An operand that is not finite reaches the rows that see it, and no others: those keep their bits.
TEST_P(Decode, NanReachesTheRowsThatSeeIt) {
  enum Where { in_q, in_k, in_v, in_k_scale, in_v_scale };
  for (int64_t n = 0; n < 60; ++n) {
    Random random(7, uint64_t(n));
    const auto where = Where(n % 5);
    Call c;
    c.group = pick<int64_t>(random, {1, 2, 3});
    c.lens_q = {int32_t(16 / c.group), 2};
    c.lens_k = {int32_t(1 + random.below(900)), 200};
    c.dim = c.dim_v = pick<int64_t>(random, {64, 72});
    c.k_format.block = pick(random, {MxBlock::square32, MxBlock::row32, MxBlock::col32});
    c.v_format.block = pick(random, {MxBlock::square32, MxBlock::row32, MxBlock::col32});
    c.k_format.element = random.below(4) ? Dtype::e4m3 : Dtype::e5m2;
    c.mask = {.causal = true, .window_left = random.below(2) ? -1 : 5};
    c.fill(random.bits());
    const Result clean = c.run();

    const int64_t rows = c.lens_q[0], keys = c.lens_k[0];
    const int64_t bad_row = random.below(rows), bad_head = random.below(c.heads_q()), bad_c = random.below(c.dim);
    const int64_t bad_key = std::max<int64_t>(0, keys - 1 - random.below(20));
    int64_t first_key = bad_key, end_key = bad_key + 1, first_c = bad_c, end_c = bad_c + 1;
    const auto spoil_scale = [&](OwnedMx& t) {
      const BlockShape shape = block_shape(t.view.block);
      const int64_t padded = padded_token_count(c.total_k(), c.seq_k());
      t.scale[size_t(scale_offset(t.view.block, t.view.layout, padded, c.dim,
                                  {0, bad_key / shape.rows, bad_c / shape.cols}))] = 0xFF;
      first_key = bad_key / shape.rows * shape.rows;
      end_key = first_key + shape.rows;
      first_c = bad_c / shape.cols * shape.cols;
      end_c = first_c + shape.cols;
    };
    switch (where) {
      case in_q: c.q.data[size_t((bad_row * c.heads_q() + bad_head) * c.dim + bad_c)] = 0xFF; break;
      case in_k: c.k.data[size_t(bad_key * c.dim + bad_c)] = c.k_format.element == Dtype::e4m3 ? 0x7F : 0x7C; break;
      case in_v: c.v.data[size_t(bad_key * c.dim + bad_c)] = 0xFF; break;
      case in_k_scale: spoil_scale(c.k); break;
      case in_v_scale: spoil_scale(c.v); break;
    }
    const Result got = c.run();
    for (int64_t row = 0; row < c.total_out(); ++row) {
      for (int64_t h = 0; h < c.heads_q(); ++h) {
        const int64_t last = row + keys - rows, first = c.mask.window_left < 0 ? 0 : last - c.mask.window_left;
        const bool first_sequence = row < rows, sees_any = first_sequence && last >= 0;
        const bool sees = sees_any && first < end_key && last >= first_key;
        const bool all = where == in_q ? sees_any && row == bad_row && h == bad_head : sees && where % 2 == 1;
        const bool some = sees && (where == in_v || where == in_v_scale);
        const std::string what = std::to_string(n) + ", row " + std::to_string(row) + ", " + c.text();
        const size_t at = size_t(h * c.total_out() + row);
        if (all) {
          EXPECT_TRUE(std::isnan(got.lse[at])) << what;
        } else {
          EXPECT_EQ(std::memcmp(&got.lse[at], &clean.lse[at], sizeof(float)), 0) << what;
        }
        for (int64_t ch = 0; ch < c.dim_v; ++ch) {
          const size_t o = size_t((row * c.heads_q() + h) * c.dim_v + ch);
          if (all || (some && ch >= first_c && ch < end_c)) {
            ASSERT_TRUE(std::isnan(got.out[o])) << what;
          } else {
            ASSERT_EQ(std::memcmp(&got.out[o], &clean.out[o], sizeof(float)), 0) << what << ", channel " << ch;
          }
        }
      }
    }
  }
}

// Scales at both ends of E8M0 are no reason to lose the result.
TEST_P(Decode, ExtremeScales) {
  for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
    Call c;
    c.lens_k = {300};
    c.k_format.block = c.v_format.block = block;
    c.fill(11);
    // k * 2^100 and q * 2^-100; v * 2^100
    for (uint8_t& s : c.k.scale) s = uint8_t(s + 100);
    for (uint8_t& s : c.q.scale) s = uint8_t(s - 100);
    for (uint8_t& s : c.v.scale) s = uint8_t(s + 100);
    Result got = c.run(), want = c.exact();
    for (auto* r : {&got, &want}) {
      for (float& o : r->out) o = std::ldexp(o, -100);
    }
    expect_close(got.out, want.out, 1e-5, c.text());
    expect_close(got.lse, want.lse, 1e-5, c.text());
  }
}

}  // namespace
}  // namespace mxflash
