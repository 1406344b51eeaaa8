// attention_fwd and operator_fwd on a Hopper card: what `mxflash check` does not ask. Images or none, CUDA graphs whose
// lengths change, sums over many keys, values of one, and the operator beside the host's.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <mxflash/operator.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "captured_graph.h"
#include "kit/device_memory.h"
#include "kit/random.h"
#include "mx/float16.h"
#include "mx/fp8.h"
#include "on_card.h"
#include "runtime/operand_image.h"

namespace mxflash {
namespace {

using kit::DeviceBuffer;
using kit::require_ok;

class AttentionDevice : public OnHopper {};

std::vector<uint16_t> normal_bf16(int64_t count, uint64_t seed, double mean = 0, double drift = 0, int64_t row = 1) {
  kit::Random random(seed);
  std::vector<uint16_t> x(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const double along = 4 * double(i / row) / (double(count) / double(row)) - 2;  // -2 .. 2
    x[size_t(i)] = encode_bf16(float(random.normal() + mean + drift * along));
  }
  return x;
}

// One operand on the card: BF16, its MX bytes and its image from one read.
struct Operand {
  DeviceBuffer bf16, payload, scale, image;
  MxTensor mx;
  Tensor image_view;
  Operand(const std::vector<uint16_t>& x, int64_t tokens, int64_t heads, int64_t dim, ImageRole role, const Jagged& seq)
      : bf16(upload(x)),
        payload(x.size()),
        scale(size_t(scale_size(MxBlock::square32, ScaleLayout::linear, tokens, heads, dim, seq))),
        image(size_t(image_size(role, tokens, heads, dim, seq))) {
    mx = make_mx_tensor(payload.data(), scale.data(), Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, tokens,
                        heads, dim, seq);
    mx.data.device = mx.scale.device = kCard;
    image_view = on_card(make_tensor(image.data(), Dtype::u8, image.size()));
    write(tokens, heads, dim, role, seq, nullptr);
  }
  void write(int64_t tokens, int64_t heads, int64_t dim, ImageRole role, const Jagged& seq, Stream stream) {
    const Status s = quantize({.in = on_card(make_tensor(bf16.data(), Dtype::bf16, tokens, heads, dim)),
                               .out = mx,
                               .seq = seq,
                               .image = image_view,
                               .image_role = role},
                              stream);
    EXPECT_TRUE(s.ok()) << s.message;
  }
};

struct Problem {
  int64_t total_q, total_k, heads, heads_kv, dim;
  Jagged seq_q, seq_k;
  Operand q, k, v;
  DeviceBuffer out, lse, mean;
  AttentionFwd args;
  DeviceBuffer workspace;

  Problem(int64_t tq, int64_t tk, int64_t h, int64_t hkv, int64_t d, const std::vector<uint16_t>& values,
          Jagged sq = {}, Jagged sk = {}, Mask mask = {})
      : total_q(tq),
        total_k(tk),
        heads(h),
        heads_kv(hkv),
        dim(d),
        seq_q(sq),
        seq_k(sk),
        q(normal_bf16(tq * h * d, 1), tq, h, d, ImageRole::query, sq),
        k(normal_bf16(tk * hkv * d, 2), tk, hkv, d, ImageRole::key, sk),
        v(values, tk, hkv, d, ImageRole::value, sk),
        out(size_t(tq * h * d) * 4),
        lse(size_t(tq * h) * 4) {
    args = {.q = q.mx,
            .k = k.mx,
            .v = v.mx,
            .out = on_card(make_tensor(out.data(), Dtype::f32, tq, h, d)),
            .lse = on_card(make_tensor(lse.data(), Dtype::f32, h, tq)),
            .q_image = q.image_view,
            .k_image = k.image_view,
            .v_image = v.image_view,
            .seq_q = sq,
            .seq_k = sk,
            .mask = mask};
  }
  std::vector<float> run(Stream stream = nullptr) {
    // Kept from call to call: a captured one holds its address.
    if (const size_t need = attention_fwd_workspace(args); workspace.size() < need) workspace = DeviceBuffer(need);
    args.workspace = workspace.data();
    args.workspace_size = workspace.size();
    out.fill(0xFF, stream);
    const Status s = attention_fwd(args, stream);
    EXPECT_TRUE(s.ok()) << s.message;
    return download<float>(out);
  }
};

// The call in backend ref, on the same bytes.
struct HostResult {
  std::vector<float> out, lse;
  std::vector<uint8_t> row_exponent;
};
HostResult on_host(const Problem& p, const std::vector<int32_t>& lens_q, const std::vector<int32_t>& lens_k) {
  const int64_t dim_v = p.dim, rows = p.args.out.shape[0];
  HostResult r{std::vector<float>(size_t(rows * p.heads * dim_v)), std::vector<float>(size_t(rows * p.heads)),
               std::vector<uint8_t>(size_t(rows * p.heads))};
  std::vector<std::vector<uint8_t>> bytes;
  const auto host = [&](const Operand& o) {
    MxTensor t = o.mx;
    bytes.push_back(download<uint8_t>(o.payload));
    t.data.data = bytes.back().data();
    bytes.push_back(download<uint8_t>(o.scale));
    t.scale.data = bytes.back().data();
    t.data.device = t.scale.device = {};
    return t;
  };
  bytes.reserve(6);
  AttentionFwd a = p.args;
  a.q = host(p.q), a.k = host(p.k), a.v = host(p.v);
  a.q_image = a.k_image = a.v_image = {};
  if (a.seq_q.cu_seqlens) a.seq_q.cu_seqlens = lens_q.data();
  if (a.seq_k.cu_seqlens) a.seq_k.cu_seqlens = lens_k.data();
  a.out = make_tensor(r.out.data(), Dtype::f32, rows, p.heads, dim_v);
  a.lse = make_tensor(r.lse.data(), Dtype::f32, p.heads, rows);
  a.row_exponent = make_tensor(r.row_exponent.data(), Dtype::u8, p.heads, rows);
  std::vector<float> mean;
  if (a.v_mean) {
    mean = download<float>(p.mean);
    a.v_mean.data = mean.data();
    a.v_mean.device = {};
  }
  a.backend = "ref";
  a.workspace = nullptr;
  std::vector<uint8_t> workspace(attention_fwd_workspace(a) + 64);
  a.workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
  a.workspace_size = workspace.size() - 64;
  const Status s = attention_fwd(a);
  EXPECT_TRUE(s.ok()) << s.message;
  return r;
}

// Row by row, so that rows at the wrong place are seen: P is rounded to E4M3 on both sides, sums are close to exact.
void expect_like_host(Problem& p, const std::vector<int32_t>& lens_q = {}, const std::vector<int32_t>& lens_k = {}) {
  const int64_t rows = p.args.out.shape[0];
  DeviceBuffer exponents(size_t(rows * p.heads));
  p.args.row_exponent = on_card(make_tensor(exponents.data(), Dtype::u8, p.heads, rows));
  exponents.fill(0xFF, nullptr);
  p.lse.fill(0xFF, nullptr);
  const std::vector<float> out = p.run(), lse = download<float>(p.lse);
  const std::vector<uint8_t> exponent = download<uint8_t>(exponents);
  const std::vector<float> again = p.run();
  EXPECT_EQ(std::memcmp(out.data(), again.data(), out.size() * sizeof(float)), 0);
  p.args.row_exponent = {};
  const HostResult want = on_host(p, lens_q, lens_k);
  int shown = 0;
  for (int64_t i = 0; i < rows && shown < 3; ++i) {
    for (int64_t h = 0; h < p.heads && shown < 3; ++h) {
      double error = 0, size = 0;
      for (int64_t c = 0; c < p.dim; ++c) {
        const auto at = size_t((i * p.heads + h) * p.dim + c);
        error += std::pow(double(out[at]) - double(want.out[at]), 2);
        size += std::pow(double(want.out[at]), 2);
      }
      const auto row = size_t(h * rows + i);
      const bool lse_right =
          std::isinf(want.lse[row]) ? lse[row] == want.lse[row] : std::fabs(lse[row] - want.lse[row]) <= 3e-3f;
      const bool exponent_right = std::abs(int(exponent[row]) - int(want.row_exponent[row])) <= 1;
      if (error <= 0.01 * size && lse_right && exponent_right) continue;
      ++shown;
      ADD_FAILURE() << "row " << i << ", head " << h << ": relative error " << std::sqrt(error / size) << ", lse "
                    << lse[row] << ", want " << want.lse[row] << ", row_exponent " << int(exponent[row]) << ", want "
                    << int(want.row_exponent[row]);
    }
  }
}

// Blocks of 64, 128 and 192 rows, and the rows at their ends.
TEST_F(AttentionDevice, AnyNumberOfRows) {
  for (const int64_t dim : {128, 64}) {
    for (const int64_t rows : {1, 63, 64, 65, 128, 129, 192, 193, 256, 449}) {
      for (const bool causal : {false, true}) {
        SCOPED_TRACE("dim " + std::to_string(dim) + ", rows " + std::to_string(rows) + ", causal " +
                     std::to_string(causal));
        Problem p(2 * rows, 2 * 700, 2, 2, dim, normal_bf16(2 * 700 * 2 * dim, 3), {.batch = 2}, {.batch = 2},
                  {.causal = causal});
        expect_like_host(p);
      }
    }
  }
}

// Heads enough that taller blocks pay: bytes do not depend on the block that a row is in.
TEST_F(AttentionDevice, BlocksOfAnyHeight) {
  const int64_t keys = 700, copies = 70;
  const auto repeated = [&](const std::vector<uint16_t>& x, int64_t tokens, int64_t width) {
    std::vector<uint16_t> y;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t n = 0; n < copies; ++n) y.insert(y.end(), x.begin() + t * width, x.begin() + (t + 1) * width);
    }
    return y;
  };
  for (const int64_t dim : {128, 64}) {
    for (const int64_t rows : {64, 65, 128, 129, 192, 193, 256}) {
      SCOPED_TRACE("dim " + std::to_string(dim) + ", rows " + std::to_string(rows));
      const Mask mask{.causal = rows % 2 == 0};
      const auto v = normal_bf16(keys * 2 * dim, 3);
      Problem few(rows, keys, 2, 2, dim, v, {}, {}, mask);
      Problem many(rows, keys, 2 * copies, 2 * copies, dim, repeated(v, keys, 2 * dim), {}, {}, mask);
      const auto q = repeated(normal_bf16(rows * 2 * dim, 1), rows, 2 * dim),
                 k = repeated(normal_bf16(keys * 2 * dim, 2), keys, 2 * dim);
      many.q.bf16.upload(q.data(), many.q.bf16.size(), nullptr);
      many.k.bf16.upload(k.data(), many.k.bf16.size(), nullptr);
      many.q.write(rows, 2 * copies, dim, ImageRole::query, {}, nullptr);
      many.k.write(keys, 2 * copies, dim, ImageRole::key, {}, nullptr);
      const std::vector<float> a = few.run(), b = many.run();
      int64_t wrong = 0;
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t n = 0; n < copies; ++n) {
          wrong += std::memcmp(&a[size_t(i * 2 * dim)], &b[size_t((i * copies + n) * 2 * dim)],
                               size_t(2 * dim) * sizeof(float)) != 0;
        }
      }
      EXPECT_EQ(wrong, 0);
    }
  }
}

// Decoding: heads of a group share blocks, keys are split where that fills the card, partial results are combined.
TEST_F(AttentionDevice, FewRowsManyKeys) {
  struct Shape {
    int64_t batch, heads, heads_kv, rows, keys, dim;
    Mask mask;
  };
  for (const Shape& x : std::vector<Shape>{{1, 8, 2, 1, 9000, 128, {}},
                                           {1, 8, 2, 1, 1, 128, {}},
                                           {1, 32, 1, 5, 3000, 128, {.causal = true}},
                                           {3, 8, 2, 16, 4100, 128, {.causal = true}},
                                           {2, 6, 2, 13, 2500, 64, {.window_left = 900, .window_right = 3}},
                                           {2, 4, 4, 40, 2000, 96, {.causal = true}},
                                           {1, 4, 2, 3, 70000, 64, {}},
                                           {70, 8, 2, 2, 300, 128, {.causal = true}},
                                           {1, 8, 2, 70, 2000, 128, {.causal = true}},
                                           {1, 4, 2, 300, 40, 128, {.causal = true}}}) {
    SCOPED_TRACE("batch " + std::to_string(x.batch) + ", rows " + std::to_string(x.rows) + ", keys " +
                 std::to_string(x.keys) + ", dim " + std::to_string(x.dim));
    const int64_t keys = x.batch * x.keys;
    Problem p(x.batch * x.rows, keys, x.heads, x.heads_kv, x.dim, normal_bf16(keys * x.heads_kv * x.dim, 3),
              {.batch = int32_t(x.batch)}, {.batch = int32_t(x.batch)}, x.mask);
    expect_like_host(p);
    const std::vector<float> image = p.run();
    p.args.q_image = {};
    const std::vector<float> own = p.run();
    EXPECT_EQ(std::memcmp(image.data(), own.data(), own.size() * sizeof(float)), 0);
    p.mean = upload([&] {
      std::vector<float> m(size_t(x.batch * x.heads_kv * x.dim));
      for (size_t i = 0; i < m.size(); ++i) m[i] = float(int(i % 37) - 18);
      return m;
    }());
    p.args.v_mean = on_card(make_tensor(p.mean.data(), Dtype::f32, x.batch, x.heads_kv, x.dim));
    expect_like_host(p);
  }
}

TEST_F(AttentionDevice, FewRowsOfUnequalSequences) {
  const std::vector<int32_t> lens_q{0, 1, 1, 4, 20, 21}, lens_k{0, 3000, 3100, 3100, 3101, 9000};
  const DeviceBuffer cu_q = upload(lens_q), cu_k = upload(lens_k);
  for (const int32_t longest : {16, 1000}) {
    for (const Mask& mask : {Mask{}, Mask{.causal = true}, Mask{.window_left = 700}}) {
      SCOPED_TRACE("max_seqlen " + std::to_string(longest) + ", causal " + std::to_string(mask.causal));
      const Jagged seq_q{static_cast<const int32_t*>(cu_q.data()), 5, longest},
          seq_k{static_cast<const int32_t*>(cu_k.data()), 5, 1 << 20};
      Problem p(30, 9100, 8, 2, 128, normal_bf16(9100 * 2 * 128, 3), seq_q, seq_k, mask);
      expect_like_host(p, lens_q, lens_k);
    }
  }
  // One query sequence before all keys.
  const Jagged seq_k{static_cast<const int32_t*>(cu_k.data()), 5, 6000};
  Problem p(7, 9100, 8, 2, 128, normal_bf16(9100 * 2 * 128, 3), {.batch = 1}, seq_k);
  p.out = DeviceBuffer(size_t(5 * 7 * 8 * 128) * 4);
  p.lse = DeviceBuffer(size_t(5 * 7 * 8) * 4);
  p.args.out = on_card(make_tensor(p.out.data(), Dtype::f32, 35, 8, 128));
  p.args.lse = on_card(make_tensor(p.lse.data(), Dtype::f32, 8, 35));
  p.args.shared_q = true;
  expect_like_host(p, {}, lens_k);
}

TEST_F(AttentionDevice, NanBehindAMaskOfFewRows) {
  const int64_t keys = 760, dim = 128;
  const std::vector<uint16_t> clean = normal_bf16(keys * dim, 3);
  std::vector<uint16_t> values = clean;
  values[650 * dim + 40] = 0x7FC0;  // tokens 640 .. 671; rows see 692 + i .. 752 + i
  const Mask mask{.causal = true, .window_left = 60};
  for (const int64_t rows : {1, 8}) {
    Problem want(rows, keys, 4, 1, dim, clean, {}, {}, mask), got(rows, keys, 4, 1, dim, values, {}, {}, mask);
    const std::vector<float> a = want.run(), b = got.run();
    for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(b[i], a[i], 0.25f) << i;
    Problem sees(rows, keys, 4, 1, dim, values);
    const std::vector<float> c = sees.run();
    for (size_t i = 0; i < c.size(); ++i) ASSERT_EQ(std::isnan(c[i]), i % 128 / 32 == 1) << i;
  }
}

// Lengths of a cache that grows from replay to replay.
TEST_F(AttentionDevice, DecodingInAGraph) {
  const int64_t capacity = 20000, heads = 8, heads_kv = 2, dim = 128;
  const std::vector<int32_t> before{0, 200, 9000, 9100}, after{0, 1, 1, 20000};
  const DeviceBuffer cu = upload(before);
  const Jagged seq_k{static_cast<const int32_t*>(cu.data()), 3, 1 << 20};
  Problem p(6, capacity, heads, heads_kv, dim, normal_bf16(capacity * heads_kv * dim, 3), {.batch = 3}, seq_k);
  p.run();
  const CapturedGraph graph([&](Stream stream) { require_ok(attention_fwd(p.args, stream)); });
  for (const std::vector<int32_t>& lengths : {after, before, after}) {
    cu.upload(lengths.data(), cu.size(), nullptr);
    p.k.write(capacity, heads_kv, dim, ImageRole::key, seq_k, nullptr);
    p.v.write(capacity, heads_kv, dim, ImageRole::value, seq_k, nullptr);
    p.out.fill(0xFF, nullptr);
    graph.replay();
    const std::vector<float> replayed = download<float>(p.out), direct = p.run();
    EXPECT_EQ(std::memcmp(replayed.data(), direct.data(), direct.size() * sizeof(float)), 0);
    expect_like_host(p, {}, lengths);
  }
}

// out_mx beside out and without it: the bytes of quantize() of the fp32 out.
void expect_out_mx_like_quantize(Problem& p, const Jagged& seq_out) {
  const int64_t rows = p.args.out.shape[0];
  const auto expect = [&](Dtype dtype, MxBlock block, ScaleLayout layout) {
    SCOPED_TRACE(std::string(dtype_name(dtype)) + ", block " + std::to_string(int(block)) + ", layout " +
                 std::to_string(int(layout)));
    struct Bytes {
      DeviceBuffer payload, scale;
      MxTensor mx;
    };
    const auto make = [&] {
      Bytes b{DeviceBuffer(size_t(rows * p.heads * p.dim)),
              DeviceBuffer(size_t(scale_size(block, layout, rows, p.heads, p.dim, seq_out))),
              {}};
      b.payload.fill(0xA5, nullptr);
      b.scale.fill(0xA5, nullptr);
      b.mx = make_mx_tensor(b.payload.data(), b.scale.data(), dtype, block, layout, rows, p.heads, p.dim, seq_out);
      b.mx.data.device = b.mx.scale.device = kCard;
      return b;
    };
    const Bytes beside = make(), alone = make(), want = make();
    p.args.out_mx = beside.mx;
    p.run();
    Status s = quantize({.in = p.args.out, .out = want.mx, .seq = seq_out});
    ASSERT_TRUE(s.ok()) << s.message;
    const Tensor out = p.args.out;
    p.args.out = {};
    p.args.out_mx = alone.mx;
    p.run();
    p.args.out = out;
    p.args.out_mx = {};
    const auto wrong = [](const DeviceBuffer& x, const DeviceBuffer& y) {
      const std::vector<uint8_t> a = download<uint8_t>(x), b = download<uint8_t>(y);
      int64_t n = 0;
      for (size_t i = 0; i < a.size(); ++i) {
        if (a[i] != b[i] && n++ == 0) {
          ADD_FAILURE() << "byte " << i << " of " << a.size() << ": " << int(a[i]) << ", want " << int(b[i]);
        }
      }
      return n;
    };
    EXPECT_EQ(wrong(beside.payload, want.payload), 0);
    EXPECT_EQ(wrong(beside.scale, want.scale), 0);
    EXPECT_EQ(wrong(alone.payload, want.payload), 0);
    EXPECT_EQ(wrong(alone.scale, want.scale), 0);
  };
  for (const Dtype dtype : {Dtype::e4m3, Dtype::e5m2}) {
    for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
      expect(dtype, block, ScaleLayout::linear);
      if (block != MxBlock::square32) expect(dtype, block, ScaleLayout::atom128x4);
    }
  }
}

TEST_F(AttentionDevice, OutMxEqualsQuantize) {
  const auto values = [](int64_t tokens, int64_t heads, int64_t dim) { return normal_bf16(tokens * heads * dim, 3); };
  for (const int64_t rows : {1, 40, 130, 193, 256}) {  // and few heads: 64-row blocks, many: taller ones
    for (const int64_t heads : {2, 140}) {
      SCOPED_TRACE("rows " + std::to_string(rows) + ", heads " + std::to_string(heads));
      Problem p(2 * rows, 300, heads, heads, 128, values(300, heads, 128), {.batch = 2}, {.batch = 2});
      expect_out_mx_like_quantize(p, p.seq_q);
    }
  }
  for (const int64_t dim : {40, 64, 96}) {
    SCOPED_TRACE("dim " + std::to_string(dim));
    Problem p(200, 200, 2, 1, dim, values(200, 1, dim), {}, {}, {.causal = true});
    expect_out_mx_like_quantize(p, p.seq_q);
  }
  const std::vector<int32_t> lengths{0, 1, 1, 70, 400, 403, 531, 800};
  const DeviceBuffer cu = upload(lengths);
  const Jagged seq{static_cast<const int32_t*>(cu.data()), 7, 400};
  Problem jagged(900, 900, 4, 2, 128, values(900, 2, 128), seq, seq, {.causal = true});
  expect_out_mx_like_quantize(jagged, seq);
  // Packed rows, split keys.
  Problem few(3, 9000, 8, 2, 128, values(9000, 2, 128), {}, {}, {.causal = true});
  expect_out_mx_like_quantize(few, {});
  Problem packed(70 * 5, 70 * 300, 8, 2, 64, values(70 * 300, 2, 64), {.batch = 70}, {.batch = 70});
  expect_out_mx_like_quantize(packed, packed.seq_q);
  // NaN that is seen, and NaN behind a mask.
  for (const Mask& mask : {Mask{}, Mask{.causal = true}, Mask{.window_left = 50, .window_right = 20}}) {
    std::vector<uint16_t> x = values(700, 1, 128);
    x[300 * 128 + 40] = 0x7FC0;
    Problem nan(700, 700, 1, 1, 128, x, {}, {}, mask);
    expect_out_mx_like_quantize(nan, {});
  }
}

// max_seqlen as loose as it can be: the same numbers as with the true one, whatever block of rows either leads to.
TEST_F(AttentionDevice, LooseMaxSeqlen) {
  const std::vector<int32_t> lengths{0, 1, 1, 70, 400, 403, 531, 800};
  const int64_t tokens = 900, heads = 4;
  const DeviceBuffer cu = upload(lengths);
  for (const bool causal : {false, true}) {
    std::vector<float> first;
    for (const int32_t longest : {330, 600, 1 << 30}) {
      SCOPED_TRACE("max_seqlen " + std::to_string(longest));
      const Jagged seq{static_cast<const int32_t*>(cu.data()), 7, longest};
      Problem p(tokens, tokens, heads, 2, 128, normal_bf16(tokens * 2 * 128, 3), seq, seq, {.causal = causal});
      expect_like_host(p, lengths, lengths);
      const std::vector<float> out = p.run();
      if (first.empty()) first = out;
      EXPECT_EQ(std::memcmp(out.data(), first.data(), out.size() * sizeof(float)), 0);
    }
    // Keys of equal lengths: nothing is ordered, blocks are bounded by a formula.
    const Jagged seq_q{static_cast<const int32_t*>(cu.data()), 7, 1 << 30}, seq_k{.batch = 7};
    Problem p(tokens, 7 * 150, heads, 2, 128, normal_bf16(7 * 150 * 2 * 128, 3), seq_q, seq_k, {.causal = causal});
    expect_like_host(p, lengths, {});
  }
}

TEST_F(AttentionDevice, WritesTheImagesThatItIsNotGiven) {
  Problem p(300, 300, 4, 2, 96, normal_bf16(300 * 2 * 96, 3));
  const std::vector<float> given = p.run();
  p.args.q_image = p.args.k_image = p.args.v_image = {};
  const std::vector<float> own = p.run();
  EXPECT_EQ(std::memcmp(given.data(), own.data(), given.size() * sizeof(float)), 0);
}

TEST_F(AttentionDevice, ReadsNoPayloadWhereItHasAnImage) {
  Problem p(256, 256, 2, 2, 64, normal_bf16(256 * 2 * 64, 3));
  const std::vector<float> with = p.run();
  for (MxTensor* t : {&p.args.q, &p.args.k, &p.args.v}) t->data.data = t->scale.data = nullptr;
  const std::vector<float> without = p.run();
  EXPECT_EQ(std::memcmp(with.data(), without.data(), with.size() * sizeof(float)), 0);
}

// The image that attention_fwd writes from an MX tensor of whatever scales, against the specification on the host.
TEST_F(AttentionDevice, RelayoutOfAnyBytes) {
  const std::vector<int32_t> lengths{0, 100, 100, 331};
  const int64_t tokens = 340, heads = 3;
  const DeviceBuffer cu = upload(lengths);
  const Jagged host_seq{lengths.data(), 3, 250}, card_seq{static_cast<const int32_t*>(cu.data()), 3, 250};
  kit::Random random(11);
  for (const int64_t dim : {40, 64, 96, 128}) {
    for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
      for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
        std::vector<uint8_t> payload(size_t(tokens * heads * dim)),
            scale(size_t(scale_size(block, ScaleLayout::linear, tokens, heads, dim, host_seq)));
        // Blocks of zeros under any scale, scales near and far from each other, NaN.
        const int middle = int(random.below(200)) + 20;
        for (uint8_t& b : scale) b = uint8_t(random.below(20) == 0 ? random.below(256) : middle + random.below(9));
        for (size_t i = 0; i < payload.size(); ++i) {
          payload[i] = random.below(3) == 0 ? uint8_t(0x80 * random.below(2)) : uint8_t(random.below(256));
          if (element == Dtype::e5m2 && (payload[i] & 0x7F) >= 0x7C) payload[i] = 0x7F;  // no Inf
        }
        for (int64_t i = 0; i < 128 * heads * dim && block == MxBlock::row32; ++i) payload[size_t(i)] = 0;
        const DeviceBuffer payload_d = upload(payload), scale_d = upload(scale);
        MxTensor host = make_mx_tensor(payload.data(), scale.data(), element, block, ScaleLayout::linear, tokens, heads,
                                       dim, host_seq);
        MxTensor card = host;
        card.data.data = payload_d.data(), card.scale.data = scale_d.data();
        card.data.device = card.scale.device = kCard;
        for (const ImageRole role : {ImageRole::query, ImageRole::key, ImageRole::value}) {
          SCOPED_TRACE("dim " + std::to_string(dim) + ", " + dtype_name(element) + ", block " +
                       std::to_string(int(block)) + ", role " + std::to_string(int(role)));
          std::vector<uint8_t> want(size_t(image_size(role, tokens, heads, dim, host_seq)));
          const ImageStats want_stats = image_of(host, host_seq, role, want.data());
          const DeviceBuffer image(want.size()), stats(sizeof(ImageStats));
          image.fill(0xA5, nullptr);
          stats.fill(0xA5, nullptr);
          Tensor view = make_tensor(image.data(), Dtype::u8, int64_t(want.size()));
          view.device = kCard;
          const Status s = write_image({.in = card,
                                        .image = view,
                                        .role = role,
                                        .seq = card_seq,
                                        .stats = static_cast<ImageStats*>(stats.data())});
          ASSERT_TRUE(s.ok()) << s.message;
          const ImageStats got_stats = download<ImageStats>(stats)[0];
          EXPECT_EQ(got_stats.rounded, want_stats.rounded);
          EXPECT_EQ(got_stats.total, want_stats.total);
          const std::vector<uint8_t> got = download<uint8_t>(image);
          int64_t wrong = 0;
          // A NaN's sign is nobody's concern.
          for (size_t i = 0; i < got.size(); ++i) wrong += got[i] != want[i] && ((got[i] & want[i]) & 0x7F) != 0x7F;
          EXPECT_EQ(wrong, 0);
        }
      }
    }
  }
}

// Scores of a few hundred million: their differences are lost, but the only key's value is not.
TEST_F(AttentionDevice, HugeScoresLeaveNumbers) {
  for (const int64_t keys : {1, 300}) {
    Problem p(70, keys, 1, 1, 128, normal_bf16(keys * 128, 3));
    const std::vector<uint16_t> q(size_t(70 * 128), encode_bf16(4096)), k(size_t(keys * 128), encode_bf16(5120));
    p.q.bf16.upload(q.data(), p.q.bf16.size(), nullptr);
    p.k.bf16.upload(k.data(), p.k.bf16.size(), nullptr);
    p.q.write(70, 1, 128, ImageRole::query, {}, nullptr);
    p.k.write(keys, 1, 128, ImageRole::key, {}, nullptr);
    const std::vector<float> out = p.run(), lse = download<float>(p.lse);
    DeviceBuffer values(size_t(keys * 128) * 4);
    ASSERT_TRUE(dequantize({.in = p.v.mx, .out = on_card(make_tensor(values.data(), Dtype::f32, keys, 1, 128))}).ok());
    const std::vector<float> v = download<float>(values);
    for (int64_t c = 0; c < 128; ++c) {  // all scores are equal: the mean
      double mean = 0;
      for (int64_t j = 0; j < keys; ++j) mean += double(v[size_t(j * 128 + c)]) / double(keys);
      ASSERT_NEAR(out[size_t(69 * 128 + c)], mean, 2e-2 + 1e-3 * std::fabs(mean));
    }
    EXPECT_NEAR(lse[69], 4096.0 * 5120 * 128 / std::sqrt(128.0), 1e2);
  }
}

// A captured call, replayed with other lengths in the same cu_seqlens, equals a call made with those lengths.
TEST_F(AttentionDevice, GraphReplaysFollowTheLengths) {
  const int64_t capacity = 1000, heads = 4, dim = 128;
  const std::vector<int32_t> before{0, 200, 500, 900}, after{0, 1, 1, 513};
  DeviceBuffer cu = upload(before);
  const Jagged seq{static_cast<const int32_t*>(cu.data()), 3, 600};
  Problem p(capacity, capacity, heads, heads, dim, normal_bf16(capacity * heads * dim, 3), seq, seq, {.causal = true});
  p.args.q_image = p.args.k_image = p.args.v_image = {};  // written inside the captured call, from these bytes
  p.run();
  const auto quantize_all = [&](Stream stream) {
    p.q.write(capacity, heads, dim, ImageRole::query, seq, stream);
    p.k.write(capacity, heads, dim, ImageRole::key, seq, stream);
    p.v.write(capacity, heads, dim, ImageRole::value, seq, stream);
  };
  const CapturedGraph graph([&](Stream stream) {
    quantize_all(stream);
    require_ok(attention_fwd(p.args, stream));
  });
  for (const std::vector<int32_t>& lengths : {after, before, after}) {
    cu.upload(lengths.data(), cu.size(), nullptr);
    p.out.fill(0xFF, nullptr);
    graph.replay();
    const std::vector<float> replayed = download<float>(p.out), lse = download<float>(p.lse);
    quantize_all(nullptr);
    const std::vector<float> direct = p.run();
    EXPECT_EQ(std::memcmp(replayed.data(), direct.data(), direct.size() * sizeof(float)), 0);
    for (int64_t t = lengths.back(); t < capacity; ++t) {  // rows of no sequence
      EXPECT_EQ(replayed[size_t(t * heads * dim)], 0.0f);
      EXPECT_EQ(lse[size_t(t)], -INFINITY);
    }
  }
}

TEST_F(AttentionDevice, ValuesOfOneGiveOne) {
  for (const int64_t keys : {1, 2, 3, 77, 128, 1000, 9000}) {
    const std::vector<uint16_t> ones(size_t(keys * 2 * 128), encode_bf16(1.0f));
    Problem p(130, keys, 2, 2, 128, ones);
    for (const float x : p.run()) ASSERT_NEAR(x, 1.0f, 0x1p-7f) << keys;
  }
}

// A NaN among values reaches the rows that see its block, and no others, whatever tile they share with it.
TEST_F(AttentionDevice, NanBehindAMaskStaysThere) {
  const int64_t tokens = 700, dim = 128;
  const std::vector<uint16_t> clean = normal_bf16(tokens * dim, 3);
  std::vector<uint16_t> values = clean;
  values[300 * dim + 40] = 0x7FC0;  // the block of tokens 288 .. 319, channels 32 .. 63
  for (const Mask mask : {Mask{.causal = true}, Mask{.window_left = 50, .window_right = 20}}) {
    Problem want(tokens, tokens, 1, 1, dim, clean, {}, {}, mask), got(tokens, tokens, 1, 1, dim, values, {}, {}, mask);
    const std::vector<float> a = want.run(), b = got.run();
    for (int64_t i = 0; i < tokens; ++i) {
      const bool sees = mask.causal ? i >= 288 : i + 20 >= 288 && i - 50 <= 319;
      for (int64_t c = 0; c < dim; ++c) {
        const float x = b[size_t(i * dim + c)];
        if (sees && c / 32 == 1) {
          ASSERT_TRUE(std::isnan(x)) << i << ", " << c;
        } else {
          ASSERT_NEAR(x, a[size_t(i * dim + c)], 0.25f) << i << ", " << c;  // rows made anew have P unrounded
        }
      }
    }
  }
}

// Blocks of one tile among many of none, and warps that stay behind to make rows anew: buffers of items must wait for
// them.
TEST_F(AttentionDevice, WarpsBehindEmptyBlocks) {
  const int64_t rows = 8192, keys = 64, heads = 8, dim = 128;
  const std::vector<uint16_t> clean = normal_bf16(keys * heads * dim, 3);
  std::vector<uint16_t> values = clean;
  for (int64_t h = 0; h < heads; ++h) values[size_t((40 * heads + h) * dim)] = 0x7FC0;  // the block of keys 32 ..
  const Mask mask{.causal = true};
  Problem want(rows, keys, heads, heads, dim, clean, {}, {}, mask),
      got(rows, keys, heads, heads, dim, values, {}, {}, mask);
  const std::vector<float> a = want.run(), b = got.run();
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t sees = i + 1 + keys - rows;
    for (int64_t at = i * heads * dim; at < (i + 1) * heads * dim; ++at) {
      if (sees > 32 && at % dim < 32) {
        ASSERT_TRUE(std::isnan(b[size_t(at)])) << i;
      } else if (sees <= 0) {
        ASSERT_EQ(b[size_t(at)], 0) << i;
      } else {
        ASSERT_NEAR(b[size_t(at)], a[size_t(at)], 0.25f) << i;
      }
    }
  }
  for (int run = 0; run < 20; ++run) {
    const std::vector<float> again = got.run();
    ASSERT_EQ(std::memcmp(again.data(), b.data(), b.size() * sizeof(float)), 0) << run;
  }
}

// FP8 tensor cores truncate as they accumulate. The error of out beside that of rounding P alone must not grow with the
// number of keys, whatever values do (docs/hopper.md).
TEST_F(AttentionDevice, ErrorDoesNotGrowWithLength) {
  struct Values {
    const char* name;
    double mean, drift;
  };
  const int64_t dim = 128;
  // Few rows, whose keys are split, and as many as fill a card with tall blocks, which see all keys in one go.
  for (const auto& [rows, keys] :
       {std::pair<int64_t, int64_t>{64, 16384}, {64, 65536}, {132 * 192, 16384}, {132 * 192, 65536}}) {
    for (const Values& values : {Values{"normal", 0, 0}, {"mean 0.5", 0.5, 0}, {"mean 4", 4, 0}, {"drift", 0, 1}}) {
      SCOPED_TRACE(std::string(values.name) + ", rows " + std::to_string(rows) + ", keys " + std::to_string(keys));
      Problem p(rows, keys, 1, 1, dim, normal_bf16(keys * dim, 3, values.mean, values.drift, dim));
      const std::vector<float> out = p.run(), lse = download<float>(p.lse);
      const auto floats = [&](const Operand& o, int64_t tokens, const Jagged& seq) {
        DeviceBuffer x(size_t(tokens * dim) * 4);
        const Status s =
            dequantize({.in = o.mx, .out = on_card(make_tensor(x.data(), Dtype::f32, tokens, 1, dim)), .seq = seq});
        EXPECT_TRUE(s.ok()) << s.message;
        return download<float>(x);
      };
      const std::vector<float> q = floats(p.q, rows, {}), k = floats(p.k, keys, {}), v = floats(p.v, keys, {});
      double error = 0, rounding = 0, signal = 0, lse_error = 0;
      std::vector<double> score(static_cast<size_t>(keys));
      for (int64_t i = 0; i < rows; i += rows / 8) {
        double most = -1e300;
        for (int64_t j = 0; j < keys; ++j) {
          double dot = 0;
          for (int64_t c = 0; c < dim; ++c) dot += double(q[size_t(i * dim + c)]) * double(k[size_t(j * dim + c)]);
          score[size_t(j)] = dot / std::sqrt(double(dim)) * 1.4426950408889634;
          most = std::max(most, score[size_t(j)]);
        }
        double sum = 0, sum_rounded = 0;
        std::vector<double> exact(size_t(dim), 0.0), rounded(size_t(dim), 0.0);
        for (int64_t j = 0; j < keys; ++j) {
          const double weight = std::exp2(score[size_t(j)] - most + 8);
          const double e4m3 = double(decode_fp8(encode_fp8(float(weight), kE4m3), kE4m3));
          sum += weight;
          sum_rounded += e4m3;
          for (int64_t c = 0; c < dim; ++c) {
            exact[size_t(c)] += weight * double(v[size_t(j * dim + c)]);
            rounded[size_t(c)] += e4m3 * double(v[size_t(j * dim + c)]);
          }
        }
        for (int64_t c = 0; c < dim; ++c) {
          const double want = exact[size_t(c)] / sum;
          error += std::pow(double(out[size_t(i * dim + c)]) - want, 2);
          rounding += std::pow(rounded[size_t(c)] / sum_rounded - want, 2);
          signal += want * want;
        }
        lse_error =
            std::max(lse_error, std::fabs(double(lse[size_t(i)]) - (most - 8 + std::log2(sum)) / 1.4426950408889634));
      }
      EXPECT_LE(std::sqrt(error / signal), 1.5 * std::sqrt(rounding / signal) + 3e-3);
      EXPECT_LE(lse_error, 1e-3);
    }
  }
}

TEST_F(AttentionDevice, OperatorEqualsTheHosts) {
  const int64_t tokens = 700, heads = 4, heads_kv = 2, dim = 128;
  const std::vector<int32_t> lengths{0, 129, 129, 650};
  const auto q = normal_bf16(tokens * heads * dim, 1), k = normal_bf16(tokens * heads_kv * dim, 2, 0.5),
             v = normal_bf16(tokens * heads_kv * dim, 3, 1);
  const auto args = [&](const void* qd, const void* kd, const void* vd, void* out, void* lse, const int32_t* cu,
                        Device device) {
    const auto view = [&](const void* data, Dtype dtype, auto... extent) {
      Tensor t = make_tensor(const_cast<void*>(data), dtype, extent...);
      t.device = device;
      return t;
    };
    const Jagged seq{cu, 3, 600};
    return OperatorFwd{.q = view(qd, Dtype::bf16, tokens, heads, dim),
                       .k = view(kd, Dtype::bf16, tokens, heads_kv, dim),
                       .v = view(vd, Dtype::bf16, tokens, heads_kv, dim),
                       .out = view(out, Dtype::f32, tokens, heads, dim),
                       .lse = view(lse, Dtype::f32, heads, tokens),
                       .seq_q = seq,
                       .seq_k = seq,
                       .mask = {.causal = true}};
  };
  std::vector<float> want(size_t(tokens * heads * dim)), want_lse(size_t(tokens * heads));
  OperatorFwd host = args(q.data(), k.data(), v.data(), want.data(), want_lse.data(), lengths.data(), {});
  host.saved_size = operator_saved(host);
  host.workspace_size = operator_fwd_workspace(host);
  std::vector<uint8_t> memory(host.saved_size + host.workspace_size + 128);
  const auto align = [](void* p) {
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64);
  };
  host.saved = align(memory.data());
  host.workspace = align(static_cast<uint8_t*>(host.saved) + host.saved_size);
  ASSERT_TRUE(operator_fwd(host).ok()) << operator_fwd(host).message;

  const DeviceBuffer qd = upload(q), kd = upload(k), vd = upload(v), cu = upload(lengths);
  const DeviceBuffer out(want.size() * 4), lse(want_lse.size() * 4);
  OperatorFwd card =
      args(qd.data(), kd.data(), vd.data(), out.data(), lse.data(), static_cast<const int32_t*>(cu.data()), kCard);
  const DeviceBuffer saved(operator_saved(card)), workspace(operator_fwd_workspace(card));
  card.saved = saved.data(), card.saved_size = saved.size();
  card.workspace = workspace.data(), card.workspace_size = workspace.size();
  const Status s = operator_fwd(card);
  ASSERT_TRUE(s.ok()) << s.message;
  const std::vector<float> got = download<float>(out), got_lse = download<float>(lse);
  double error = 0, signal = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += std::pow(double(got[i]) - double(want[i]), 2);
    signal += std::pow(double(want[i]), 2);
  }
  EXPECT_LE(std::sqrt(error / signal), 0.03);  // P in E4M3 beside P in fp32; values have a mean of 1
  EXPECT_GT(error, 0);
  for (size_t i = 0; i < got_lse.size(); ++i) {
    if (std::isinf(want_lse[i])) {
      EXPECT_EQ(got_lse[i], want_lse[i]);
    } else {
      EXPECT_NEAR(got_lse[i], want_lse[i], 2e-3f);
    }
  }
}

}  // namespace
}  // namespace mxflash
