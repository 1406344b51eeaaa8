// attention_fwd in backend sm90_bf16 on a Hopper card: what `mxflash check` does not ask. Operands that arrive
// untouched, its images, out_mx, negative scales, NaN behind a mask, CUDA graphs whose lengths change.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <mxflash/attention.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/bf16_image.cuh"
#include "captured_graph.h"
#include "kit/device_memory.h"
#include "kit/random.h"
#include "mx/e8m0.h"
#include "mx/float16.h"
#include "mx/fp8.h"
#include "mx/scale_layout.h"
#include "on_card.h"
#include "runtime/mx_access.h"

namespace mxflash {
namespace {

using kit::DeviceBuffer;
using kit::require_ok;

class AttentionBf16Device : public OnHopper {};

// The same MX tensor on both sides. `host_seq` has the lengths.
struct Operand {
  std::vector<uint8_t> payload, scale;
  DeviceBuffer payload_d, scale_d;
  MxTensor host, card;
  Operand(int64_t tokens, int64_t heads, int64_t dim, const Jagged& host_seq, Dtype element, MxBlock block,
          ScaleLayout layout)
      : payload(size_t(tokens * heads * dim)),
        scale(size_t(scale_size(block, layout, tokens, heads, dim, host_seq))),
        payload_d(payload.size()),
        scale_d(scale.size()) {
    host = card = make_mx_tensor(payload.data(), scale.data(), element, block, layout, tokens, heads, dim, host_seq);
    card.data.data = payload_d.data(), card.scale.data = scale_d.data();
    card.data.device = card.scale.device = kCard;
  }
  void upload() const {
    payload_d.upload(payload.data(), payload.size(), nullptr);
    scale_d.upload(scale.data(), scale.size(), nullptr);
  }
  // Finite codes of every size, scales `spread` binades around 2^middle.
  Operand& fill(uint64_t seed, int middle, int spread) {
    kit::Random random(seed);
    for (uint8_t& b : scale) b = uint8_t(kE8m0Bias + middle - spread / 2 + int(random.below(uint64_t(spread) + 1)));
    for (uint8_t& b : payload) {
      b = uint8_t(random.below(256));
      if (!std::isfinite(decode_fp8(b, fp8_format(host.data.dtype)))) b = 0x80;
    }
    upload();
    return *this;
  }
};

// Codes and scales of numbers around one.
Operand ordinary(int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq, uint64_t seed) {
  Operand o(tokens, heads, dim, seq, Dtype::e4m3, MxBlock::square32, ScaleLayout::linear);
  kit::Random random(seed);
  for (uint8_t& b : o.scale) b = kE8m0Bias;
  for (uint8_t& b : o.payload) b = encode_fp8(float(random.normal()), kE4m3);
  o.upload();
  return o;
}

struct Result {
  std::vector<float> out, lse;
};

struct Call {
  AttentionFwd args;
  DeviceBuffer out, lse, workspace;
  Call(const Operand& q, const Operand& k, const Operand& v) {
    const int64_t tokens = q.host.data.shape[0], heads = q.host.data.shape[1], dim_v = v.host.data.shape[2];
    out = DeviceBuffer(size_t(tokens * heads * dim_v) * 4);
    lse = DeviceBuffer(size_t(tokens * heads) * 4);
    args = {.q = q.card,
            .k = k.card,
            .v = v.card,
            .out = on_card(make_tensor(out.data(), Dtype::f32, tokens, heads, dim_v)),
            .lse = on_card(make_tensor(lse.data(), Dtype::f32, heads, tokens)),
            .backend = "sm90_bf16"};
  }
  Status enqueue(Stream stream) {
    if (const size_t need = attention_fwd_workspace(args); workspace.size() < need) workspace = DeviceBuffer(need);
    args.workspace = workspace.data();
    args.workspace_size = workspace.size();
    workspace.fill(0xFF, stream);
    out.fill(0xFF, stream);
    lse.fill(0xFF, stream);
    return attention_fwd(args, stream);
  }
  Result run() {
    const Status s = enqueue(nullptr);
    EXPECT_TRUE(s.ok()) << s.message;
    return {download<float>(out), download<float>(lse)};
  }
};

constexpr MxBlock kBlocks[] = {MxBlock::square32, MxBlock::row32, MxBlock::col32};
std::vector<ScaleLayout> layouts(MxBlock block) {
  if (block == MxBlock::square32) return {ScaleLayout::linear};
  return {ScaleLayout::linear, ScaleLayout::atom128x4};
}

TEST_F(AttentionBf16Device, ImagesHoldWhatTheOperandMeans) {
  const std::vector<int32_t> lengths{0, 100, 100, 331};
  const int64_t tokens = 340, heads = 3;
  const DeviceBuffer cu = upload(lengths);
  const Jagged host_seq{lengths.data(), 3, 250}, card_seq{static_cast<const int32_t*>(cu.data()), 3, 250};
  const int64_t padded = padded_token_count(tokens, host_seq);
  kit::Random random(11);
  for (const int64_t dim : {40, 128, 256}) {
    for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
      for (const MxBlock block : kBlocks) {
        for (const ScaleLayout layout : layouts(block)) {
          SCOPED_TRACE("dim " + std::to_string(dim) + ", " + dtype_name(element) + ", block " +
                       std::to_string(int(block)) + ", layout " + std::to_string(int(layout)));
          Operand o(tokens, heads, dim, host_seq, element, block, layout);
          for (uint8_t& b : o.payload) b = uint8_t(random.below(256));
          for (uint8_t& b : o.scale) b = uint8_t(random.below(256));
          o.upload();
          const Bf16ImageShape shape{heads, padded, round_up(dim, kAtomChannels)};
          std::vector<uint16_t> want(static_cast<size_t>(shape.size()));
          for (int64_t b = 0; b < host_seq.batch; ++b) {
            const Sequence s = sequence_at(tokens, host_seq, b);
            for (int64_t h = 0; h < heads; ++h) {
              std::vector<double> x(size_t(s.length * dim));
              MxReader(o.host, host_seq, s, h).read(0, s.length, x.data());
              for (int64_t t = 0; t < s.length; ++t) {
                for (int64_t c = 0; c < dim; ++c) {
                  want[size_t(shape.offset(h, s.padded_start + t, c))] = encode_bf16(float(x[size_t(t * dim + c)]));
                }
              }
            }
          }
          const DeviceBuffer image(want.size() * 2);
          image.fill(0xA5, nullptr);
          const Status status =
              write_bf16_image(o.card, card_seq, shape, static_cast<uint16_t*>(image.data()), nullptr);
          ASSERT_TRUE(status.ok()) << status.message;
          const std::vector<uint16_t> got = download<uint16_t>(image);
          int64_t wrong = 0;
          for (size_t i = 0; i < got.size(); ++i) {  // a NaN's sign and payload are nobody's concern
            if (got[i] == want[i] || (std::isnan(decode_bf16(got[i])) && std::isnan(decode_bf16(want[i])))) continue;
            if (wrong++ == 0) ADD_FAILURE() << "at " << i << ": " << std::hex << want[i] << ", got " << got[i];
          }
          EXPECT_EQ(wrong, 0);
        }
      }
    }
  }
}

// A row that sees one key is that key's value, and its lse the score, whatever scales lie side by side in a tile.
TEST_F(AttentionBf16Device, OneVisibleKeyIsCopied) {
  const int64_t tokens = 300;
  uint64_t seed = 1;
  for (const int64_t dim : {8, 64, 96, 128, 136, 192, 256}) {
    for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
      for (const MxBlock block : kBlocks) {
        SCOPED_TRACE("dim " + std::to_string(dim) + ", " + dtype_name(element) + ", block " +
                     std::to_string(int(block)));
        const auto operand = [&](int middle, int spread) {
          Operand o(tokens, 2, dim, {}, element, block, layouts(block).back());
          o.fill(++seed, middle, spread);
          return o;
        };
        const Operand q = operand(-7, 2), k = operand(-7, 2), v = operand(0, 80);
        Call call(q, k, v);
        call.args.mask = {.window_left = 0, .window_right = 0};
        const Result got = call.run();
        for (int64_t h = 0; h < 2; ++h) {
          std::vector<double> x(size_t(tokens * dim)), y = x, z = x;
          const Sequence s = sequence_at(tokens, {}, 0);
          MxReader(v.host, {}, s, h).read(0, tokens, x.data());
          MxReader(q.host, {}, s, h).read(0, tokens, y.data());
          MxReader(k.host, {}, s, h).read(0, tokens, z.data());
          for (int64_t t = 0; t < tokens; ++t) {
            double score = 0, size = 0;
            for (int64_t c = 0; c < dim; ++c) {
              const auto at = size_t(t * dim + c);
              ASSERT_EQ(got.out[size_t((t * 2 + h) * dim + c)], float(x[at])) << t << ", " << c;
              score += y[at] * z[at] / std::sqrt(double(dim));
              size += std::fabs(y[at] * z[at]) / std::sqrt(double(dim));
            }
            ASSERT_NEAR(got.lse[size_t(h * tokens + t)], score, 0x1p-20 * size) << t;
          }
        }
      }
    }
  }
}

TEST_F(AttentionBf16Device, NegativeScaleIsANegatedQuery) {
  const int64_t tokens = 400, dim = 128;
  Operand q = ordinary(tokens, 2, dim, {}, 1);
  const Operand k = ordinary(tokens, 1, dim, {}, 2), v = ordinary(tokens, 1, dim, {}, 3);
  Call call(q, k, v);
  call.args.softmax_scale = -0.25f;
  call.args.mask.causal = true;
  const Result negative = call.run();
  for (uint8_t& b : q.payload) b ^= 0x80;
  q.upload();
  call.args.softmax_scale = 0.25f;
  const Result positive = call.run();
  EXPECT_EQ(std::memcmp(negative.out.data(), positive.out.data(), positive.out.size() * 4), 0);
  EXPECT_EQ(std::memcmp(negative.lse.data(), positive.lse.data(), positive.lse.size() * 4), 0);
}

TEST_F(AttentionBf16Device, ValuesOfOneGiveOne) {
  for (const int64_t keys : {1, 2, 3, 77, 128, 1000, 9000}) {
    const Operand q = ordinary(130, 2, 128, {}, 1), k = ordinary(keys, 2, 128, {}, 2);
    Operand v = ordinary(keys, 2, 128, {}, 3);
    for (uint8_t& b : v.payload) b = encode_fp8(1.0f, kE4m3);
    v.upload();
    for (const float x : Call(q, k, v).run().out) ASSERT_NEAR(x, 1.0f, 0x1p-8f) << keys;
  }
}

// Scores of a few hundred million: their differences are lost, but the values are not.
TEST_F(AttentionBf16Device, HugeScoresLeaveNumbers) {
  for (const int64_t keys : {1, 300}) {
    Operand q = ordinary(70, 1, 128, {}, 1), k = ordinary(keys, 1, 128, {}, 2);
    const Operand v = ordinary(keys, 1, 128, {}, 3);
    for (uint8_t& b : q.payload) b = encode_fp8(256, kE4m3);
    for (uint8_t& b : k.payload) b = encode_fp8(320, kE4m3);
    for (uint8_t& b : q.scale) b = kE8m0Bias + 4;
    for (uint8_t& b : k.scale) b = kE8m0Bias + 4;
    q.upload(), k.upload();
    const Result got = Call(q, k, v).run();
    std::vector<double> x(size_t(keys * 128));
    MxReader(v.host, {}, sequence_at(keys, {}, 0), 0).read(0, keys, x.data());
    for (int64_t c = 0; c < 128; ++c) {  // all scores are equal: the mean
      double mean = 0;
      for (int64_t j = 0; j < keys; ++j) mean += x[size_t(j * 128 + c)] / double(keys);
      ASSERT_NEAR(got.out[size_t(69 * 128 + c)], mean, 1e-5);
    }
    EXPECT_NEAR(got.lse[69], 4096.0 * 5120 * 128 / std::sqrt(128.0), 1e2);
  }
}

// A NaN or an Inf among values reaches the rows that see it, and no others, whatever tile they share with it.
TEST_F(AttentionBf16Device, NanBehindAMaskStaysThere) {
  const int64_t tokens = 700, dim = 128;
  const Operand q = ordinary(tokens, 1, dim, {}, 1), k = ordinary(tokens, 1, dim, {}, 2);
  for (const Mask mask : {Mask{.causal = true}, Mask{.window_left = 50, .window_right = 20}}) {
    for (const bool infinite : {false, true}) {
      Operand v = ordinary(tokens, 1, dim, {}, 3);
      Call call(q, k, v);
      call.args.mask = mask;
      const Result clean = call.run();
      if (infinite) {
        v.scale[size_t(300 / 32 * 4 + 1)] = 254;  // 2^127: most elements exceed BF16
      } else {
        v.payload[300 * dim + 40] = kFp8Nan;
      }
      v.upload();
      const Result got = call.run();
      const int64_t first = infinite ? 288 : 300, last = infinite ? 319 : 300;
      for (int64_t i = 0; i < tokens; ++i) {
        const bool sees = mask.causal ? i >= first : i + 20 >= first && i - 50 <= last;
        for (int64_t c = 0; c < dim; ++c) {
          const float x = got.out[size_t(i * dim + c)], y = clean.out[size_t(i * dim + c)];
          if (sees && (infinite ? c / 32 == 1 : c == 40)) {
            ASSERT_TRUE(infinite || std::isnan(x)) << i << ", " << c;
          } else {
            ASSERT_NEAR(x, y, 0.02f) << i << ", " << c;  // rows made anew have P unrounded
          }
        }
      }
    }
  }
}

TEST_F(AttentionBf16Device, MxOutIsTheQuantizedOut) {
  const std::vector<int32_t> lengths{0, 100, 100, 331};
  const DeviceBuffer cu = upload(lengths);
  const Jagged host_seq{lengths.data(), 3, 250}, card_seq{static_cast<const int32_t*>(cu.data()), 3, 250};
  for (const bool jagged : {true, false}) {
    const int64_t tokens = jagged ? 340 : 300, heads = 2;
    const Jagged seq = jagged ? host_seq : Jagged{.batch = 3}, seq_d = jagged ? card_seq : seq;
    for (const int64_t dim_v : {40, 128, 192}) {
      const Operand q = ordinary(tokens, heads, 64, seq, 1), k = ordinary(tokens, heads, 64, seq, 2);
      Operand v = ordinary(tokens, heads, dim_v, seq, 3);
      v.payload[size_t(50 * heads * dim_v)] = kFp8Nan;  // seen by some rows of the first sequence
      v.upload();
      Call call(q, k, v);
      call.args.seq_q = call.args.seq_k = seq_d;
      call.args.mask.causal = true;
      const Result plain = call.run();
      const DeviceBuffer rows = upload(plain.out), half(plain.out.size() * 2);
      for (const MxBlock block : kBlocks) {
        for (const ScaleLayout layout : layouts(block)) {
          for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
            SCOPED_TRACE("dim_v " + std::to_string(dim_v) + ", " + dtype_name(element) + ", block " +
                         std::to_string(int(block)) + ", layout " + std::to_string(int(layout)));
            const Operand want(tokens, heads, dim_v, seq, element, block, layout);
            ASSERT_TRUE(quantize({.in = on_card(make_tensor(rows.data(), Dtype::f32, tokens, heads, dim_v)),
                                  .out = want.card,
                                  .seq = seq_d})
                            .ok());
            const Operand got(tokens, heads, dim_v, seq, element, block, layout);
            got.payload_d.fill(0xA5, nullptr);
            got.scale_d.fill(0xA5, nullptr);
            Call both = Call(q, k, v);
            both.args.seq_q = both.args.seq_k = seq_d;
            both.args.mask.causal = true;
            both.args.out_mx = got.card;
            if (block == MxBlock::square32) {
              both.args.out = {};
            } else if (block == MxBlock::col32) {
              both.args.out = on_card(make_tensor(half.data(), Dtype::bf16, tokens, heads, dim_v));
            }
            both.run();
            EXPECT_EQ(download<uint8_t>(got.payload_d), download<uint8_t>(want.payload_d));
            EXPECT_EQ(download<uint8_t>(got.scale_d), download<uint8_t>(want.scale_d));
          }
        }
      }
    }
  }
}

TEST_F(AttentionBf16Device, WantsPayloads) {
  const Operand q = ordinary(128, 1, 64, {}, 1);
  const DeviceBuffer image(size_t(image_size(ImageRole::key, 128, 1, 64, {})));
  Call call(q, q, q);
  call.args.k_image = on_card(make_tensor(image.data(), Dtype::u8, image.size()));
  call.args.k.data.data = nullptr;
  const Status s = call.enqueue(nullptr);
  EXPECT_EQ(s.code, StatusCode::unsupported);
  EXPECT_STREQ(s.message, "attention_fwd: k must have data and scale (only backend sm90 reads k_image), got null");
}

// Tokens [first, end) of an operand whose scales are all one.
Operand slice(const Operand& o, int64_t first, int64_t end) {
  const Tensor& t = o.host.data;
  Operand part(end - first, t.shape[1], t.shape[2], {}, t.dtype, MxBlock::square32, ScaleLayout::linear);
  std::fill(part.scale.begin(), part.scale.end(), uint8_t(kE8m0Bias));
  std::copy_n(o.payload.begin() + first * t.stride[0], part.payload.size(), part.payload.begin());
  part.upload();
  return part;
}

// max_seqlen as loose as it can be: every sequence as if it were alone.
TEST_F(AttentionBf16Device, LooseMaxSeqlen) {
  const std::vector<int32_t> lengths{0, 1, 1, 70, 400, 403, 531, 800};
  const int64_t tokens = 900, heads = 2, batch = 7, same = 150;
  const DeviceBuffer cu = upload(lengths);
  for (const int64_t dim : {64, 128}) {
    const Jagged host_seq{lengths.data(), batch, 330};
    const Operand q = ordinary(tokens, heads, dim, host_seq, 1), k = ordinary(tokens, heads, dim, host_seq, 2),
                  equal = ordinary(batch * same, heads, dim, {.batch = batch}, 3);
    for (const int32_t longest : {330, 600, 1 << 30}) {
      for (const bool jagged_keys : {true, false}) {
        SCOPED_TRACE("d " + std::to_string(dim) + ", max_seqlen " + std::to_string(longest) +
                     (jagged_keys ? "" : ", keys of equal lengths"));
        Call call(q, jagged_keys ? k : equal, jagged_keys ? k : equal);
        call.args.seq_q = {static_cast<const int32_t*>(cu.data()), batch, longest};
        call.args.seq_k = jagged_keys ? call.args.seq_q : Jagged{.batch = batch};
        call.args.mask.causal = true;
        const Result all = call.run();
        for (int64_t b = 0; b < batch; ++b) {
          const int64_t first = lengths[size_t(b)], end = lengths[size_t(b) + 1];
          if (first == end) continue;
          const Operand q_b = slice(q, first, end),
                        k_b = jagged_keys ? slice(k, first, end) : slice(equal, b * same, (b + 1) * same);
          Call alone(q_b, k_b, k_b);
          alone.args.mask.causal = true;
          const Result want = alone.run();
          EXPECT_EQ(std::memcmp(&all.out[size_t(first * heads * dim)], want.out.data(), want.out.size() * 4), 0) << b;
          for (int64_t h = 0; h < heads; ++h) {
            EXPECT_EQ(std::memcmp(&all.lse[size_t(h * tokens + first)], &want.lse[size_t(h * (end - first))],
                                  size_t(end - first) * 4),
                      0)
                << b;
          }
        }
        EXPECT_EQ(all.out.back(), 0.0f);
        EXPECT_EQ(all.lse.back(), -INFINITY);
      }
    }
  }
}

// A captured call, replayed with other lengths in the same cu_seqlens, equals a call made with those lengths.
TEST_F(AttentionBf16Device, GraphReplaysFollowTheLengths) {
  const int64_t capacity = 1000, heads = 4, dim = 192;
  const std::vector<int32_t> before{0, 200, 500, 900}, after{0, 1, 1, 513};
  DeviceBuffer cu = upload(before);
  const Jagged host_seq{before.data(), 3, 600}, seq{static_cast<const int32_t*>(cu.data()), 3, 600};
  // All scales are one, so operands are valid under any lengths.
  const Operand q = ordinary(capacity, heads, dim, host_seq, 1), k = ordinary(capacity, heads, dim, host_seq, 2),
                v = ordinary(capacity, heads, dim, host_seq, 3);
  Call call(q, k, v);
  call.args.seq_q = call.args.seq_k = seq;
  call.args.mask.causal = true;
  call.run();
  const CapturedGraph graph([&](Stream stream) { require_ok(call.enqueue(stream)); });
  for (const std::vector<int32_t>& lengths : {after, before, after}) {
    cu.upload(lengths.data(), cu.size(), nullptr);
    graph.replay();
    const std::vector<float> out = download<float>(call.out), lse = download<float>(call.lse);
    const Result direct = call.run();
    EXPECT_EQ(std::memcmp(out.data(), direct.out.data(), out.size() * 4), 0);
    EXPECT_EQ(std::memcmp(lse.data(), direct.lse.data(), lse.size() * 4), 0);
    for (int64_t t = lengths.back(); t < capacity; ++t) {  // rows of no sequence
      EXPECT_EQ(out[size_t(t * heads * dim)], 0.0f);
      EXPECT_EQ(lse[size_t(t)], -INFINITY);
    }
  }
}

}  // namespace
}  // namespace mxflash
