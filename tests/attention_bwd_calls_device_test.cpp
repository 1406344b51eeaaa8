// What a call of attention_bwd on sm90 may ask for: gradients as parts of wider tensors, means, rotation, two payloads,
// E5M2, gradients in MXFP8 alone; the same bits run after run, whatever else is in the batch, and from a CUDA graph.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "attention_bwd_on_card.h"
#include "captured_graph.h"
#include "kit/call.h"
#include "runtime/tensor_access.h"

namespace mxflash::kit {
namespace {

class AttentionBwdCalls : public OnHopper {};

struct Options {
  const char* name;
  bool rotate = false, v_mean = false, k_mean = false;
  Dtype gradients = Dtype::f32, dq_accum = Dtype::f32, out = Dtype::bf16;
  int64_t gap = 0;  // elements between heads
  Dtype dout = Dtype::e4m3;
  MxBlock block = MxBlock::square32;
  bool two_payloads = false;
  float softmax_scale = 0;
};

void PrintTo(const Options& o, std::ostream* os) { *os << o.name; }

class AttentionBwdOptions : public OnHopper, public testing::WithParamInterface<Options> {};

TEST_P(AttentionBwdOptions, BesideRef) {
  const Options& o = GetParam();
  for (const int32_t dim : {128, 96, 64, 40}) {
    const AttentionCase c{.name = "options",
                          .lens_q = {150, 1, 300},
                          .lens_k = {200, 64, 300},
                          .num_heads_q = 4,
                          .num_heads_kv = 2,
                          .head_dim = dim,
                          .head_dim_v = dim,
                          .mask = {.causal = true},
                          .slack_q = 5,
                          .slack_k = 3,
                          .with_dlse = o.k_mean};
    const Operands x = make_operands(c);
    MxAttention mx = quantize_case(c, x, o.dout, o.block);
    mx.ds_dtype = Dtype::e4m3;
    mx.softmax_scale = o.softmax_scale;
    if (o.two_payloads) {  // the other form of each tensor, rounded on its own
      MxAttention col = quantize_case(c, x, o.dout, MxBlock::col32);
      mx.q_col = std::move(col.q);
      mx.k_col = std::move(col.k);
      mx.dout_col = std::move(col.dout);
    }
    const int64_t batch = 3, heads = 4, heads_kv = 2, total = mx.total_out();
    std::vector<float> mean(size_t(batch * heads_kv * dim));
    for (size_t i = 0; i < mean.size(); ++i) mean[i] = float(int(i * 37 % 19) - 9) / 8;
    const Tensor mean_view = make_tensor(mean.data(), Dtype::f32, batch, heads_kv, int64_t(dim));
    const AttentionResult forward =
        run_attention(mx, "ref", "", {.out_dtype = o.out, .v_mean = o.v_mean ? mean : std::vector<float>{}});
    const FloatOutput out(o.out, total, heads, dim);
    out.store(forward.out);
    std::vector<std::vector<float>> results[2];
    for (const bool is_ref : {true, false}) {
      const Dtype dtype = is_ref ? Dtype::f32 : o.gradients;
      const Output dq(mx.q.view.data, dtype, o.gap), dk(mx.k.view.data, dtype, o.gap), dv(mx.v.view.data, dtype, o.gap);
      AttentionBwd a{
          .q = mx.q.view,
          .k = mx.k.view,
          .v = mx.v.view,
          .dout = mx.dout.view,
          .q_col = mx.q_col.view,
          .k_col = mx.k_col.view,
          .dout_col = mx.dout_col.view,
          .out = out.view,
          .lse = make_tensor(const_cast<float*>(forward.lse.data()), Dtype::f32, heads, total),
          .row_exponent = make_tensor(const_cast<uint8_t*>(forward.row_exponent.data()), Dtype::u8, heads, total),
          .dq = dq.view,
          .dk = dk.view,
          .dv = dv.view,
          .dq_accum = is_ref ? Dtype::f32 : o.dq_accum,
          .rotate_qk = o.rotate,
          .seq_q = mx.seq_q(),
          .seq_k = mx.seq_k(),
          .mask = mx.mask,
          .softmax_scale = mx.softmax_scale,
          .backend = is_ref ? "ref" : "sm90"};
      if (o.v_mean) a.v_mean = mean_view;
      if (o.k_mean) {
        a.k_mean = mean_view;
        a.dlse = make_tensor(mx.dlse.data(), Dtype::f32, heads, total);
      }
      require_ok(call(a));
      results[is_ref ? 0 : 1] = {dq.values(), dk.values(), dv.values()};
      for (const Output* gradient : {&dq, &dk, &dv}) EXPECT_TRUE(gradient->gaps_are_untouched());
    }
    const char* names[] = {"dq", "dk", "dv"};
    for (size_t n = 0; n < 3; ++n) {
      const std::vector<double> want(results[0][n].begin(), results[0][n].end());
      const Metrics m = compare(want, results[1][n]);
      // Both round P and dS to 4 bits, about 31 dB each, and most roundings agree; an operand that is not the one to be
      // read is 26 dB off.
      EXPECT_GE(m.sqnr_db, 30.5) << "dim " << dim << ", " << names[n] << " at " << m.worst_index << ", non-finite "
                                 << m.nonfinite_mismatch;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Calls, AttentionBwdOptions,
    testing::Values(
        Options{.name = "plain"}, Options{.name = "out_f32", .out = Dtype::f32},
        Options{.name = "out_f16", .out = Dtype::f16}, Options{.name = "bf16", .gradients = Dtype::bf16},
        Options{.name = "f16", .gradients = Dtype::f16},
        Options{.name = "bf16_gap8", .gradients = Dtype::bf16, .gap = 8},
        Options{.name = "bf16_gap3", .gradients = Dtype::bf16, .gap = 3}, Options{.name = "f32_gap1", .gap = 1},
        Options{.name = "rotated", .rotate = true},
        Options{.name = "rotated_bf16", .rotate = true, .gradients = Dtype::bf16},
        Options{.name = "v_mean", .v_mean = true, .out = Dtype::f32},
        Options{.name = "v_mean_out_bf16", .v_mean = true}, Options{.name = "k_mean", .rotate = true, .k_mean = true},
        Options{.name = "dq_f16", .dq_accum = Dtype::f16},
        Options{.name = "dq_f16_bf16", .gradients = Dtype::bf16, .dq_accum = Dtype::f16},
        Options{.name = "softmax_scale", .softmax_scale = 0.31f}, Options{.name = "dout_e5m2", .dout = Dtype::e5m2},
        Options{.name = "row32", .block = MxBlock::row32}, Options{.name = "col32", .block = MxBlock::col32},
        Options{.name = "row32_and_col32", .block = MxBlock::row32, .two_payloads = true}),
    [](const auto& info) { return std::string(info.param.name); });

AttentionCase gqa(std::vector<int32_t> lens_q, std::vector<int32_t> lens_k, int32_t dim = 64) {
  return {.name = "gqa",
          .lens_q = std::move(lens_q),
          .lens_k = std::move(lens_k),
          .num_heads_q = 4,
          .num_heads_kv = 2,
          .head_dim = dim,
          .head_dim_v = dim,
          .mask = {.causal = true}};
}

CardBackward on_card_of(const AttentionCase& c, MxAttention& mx, Dtype gradients = Dtype::bf16) {
  mx = quantize_case(c, make_operands(c));
  return CardBackward(mx, run_attention(mx, "ref", "", {.out_dtype = Dtype::bf16}), gradients);
}

// dk and dv may be given in MXFP8 alone.
TEST_F(AttentionBwdCalls, MxGradientsWithoutOthers) {
  for (const int32_t dim : {128, 40}) {
    SCOPED_TRACE(dim);
    MxAttention mx;
    CardBackward b = on_card_of(gqa({150, 1, 300}, {200, 64, 300}, dim), mx, Dtype::f32);
    struct Mx {
      DeviceBuffer payload, scale;
      MxTensor view;
    };
    const auto make = [&](const OwnedMx& like) {
      Mx m{DeviceBuffer(like.data.size()), DeviceBuffer(like.scale.size()), like.view};
      m.payload.fill(0xA5, nullptr);
      m.scale.fill(0xA5, nullptr);
      m.view.data.data = m.payload.data();
      m.view.scale.data = m.scale.data();
      m.view.data.device = m.view.scale.device = kCard;
      return m;
    };
    const Mx k[] = {make(mx.k), make(mx.k)}, v[] = {make(mx.v), make(mx.v)};
    b.args.dk_mx = k[0].view;
    b.args.dv_mx = v[0].view;
    b.poison();
    b.run();
    b.args.dk_mx = k[1].view;
    b.args.dv_mx = v[1].view;
    b.args.dk = b.args.dv = {};
    b.run();
    for (const Mx* m : {k, v}) {
      EXPECT_EQ(download<uint8_t>(m[0].payload), download<uint8_t>(m[1].payload));
      EXPECT_EQ(download<uint8_t>(m[0].scale), download<uint8_t>(m[1].scale));
    }
  }
}

// Without a name it is this kernel that a call on a Hopper card gets.
TEST_F(AttentionBwdCalls, IsTakenByDefault) {
  MxAttention mx;
  CardBackward b = on_card_of(gqa({150}, {200}), mx);
  b.args.deterministic = true;
  b.poison();
  b.run();
  const Gradients named = b.gradients();
  b.args.backend = nullptr;
  b.poison();
  b.run();
  expect_same(b.gradients(), named, true);
}

// Items are taken from a counter by whichever CTA is free; sums over keys and rows must not know.
TEST_F(AttentionBwdCalls, SameBitsInAThousandRuns) {
  struct Shape {
    AttentionCase c;
    int runs;
  };
  AttentionCase middle = gqa({1024, 700}, {1024, 1300}, 128), shared = gqa({200}, {300, 1, 128, 640});
  middle.num_heads_q = 32;  // with 16 key heads more items than a card has CTAs: some wait for what a CTA takes second
  middle.num_heads_kv = 16;
  shared.shared_q = true;
  shared.mask = {};
  for (const Shape& s : {Shape{gqa({300, 70}, {500, 130}), 1000}, Shape{middle, 100}, Shape{shared, 200}}) {
    MxAttention mx;
    CardBackward b = on_card_of(s.c, mx);
    for (const bool deterministic : {true, false}) {
      for (const Dtype dq_accum : {Dtype::f32, Dtype::f16}) {
        SCOPED_TRACE(testing::Message() << s.c.num_heads_q << " heads" << (s.c.shared_q ? ", shared" : "") << ", dq in "
                                        << dtype_name(dq_accum) << (deterministic ? ", deterministic" : ""));
        b.args.deterministic = deterministic;
        b.args.dq_accum = dq_accum;
        b.poison();
        b.run();
        const Gradients first = b.gradients();
        int different[3] = {};
        for (int n = 0; n < s.runs; ++n) {
          if (n % 8 == 0) b.poison();
          b.run();
          if (n % 4 != 3) continue;  // back to back
          const Gradients again = b.gradients();
          different[0] += deterministic ? again.dq != first.dq : !(bf16_sqnr_db(first.dq, again.dq) >= kOrderDb);
          different[1] += again.dk != first.dk;
          different[2] += again.dv != first.dv;
        }
        EXPECT_EQ(different[0], 0) << "dq";
        EXPECT_EQ(different[1], 0) << "dk";
        EXPECT_EQ(different[2], 0) << "dv";
      }
    }
  }
}

// Finite BF16 numbers that are equal: zeros of either sign are.
bool equal_numbers(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
  if (a.size() != b.size() || a.size() % 2 != 0) return false;
  for (size_t i = 0; i < a.size(); i += 2) {
    const uint32_t x = a[i] | a[i + 1] << 8, y = b[i] | b[i + 1] << 8;
    if ((x & 0x7F80) == 0x7F80 || (x != y && ((x | y) & 0x7FFF) != 0)) return false;
  }
  return true;
}

// Of equal lengths dQ of most heads is cleared while the kernel works on others: without a mask, or where a head fills
// the card. The deterministic call clears nothing. Two key tiles add up to the same bits in any order.
TEST_F(AttentionBwdCalls, SumsAreClearedWhileTheKernelRuns) {
  constexpr int32_t kBatch = 40;  // times 8 heads and 2 key tiles: more than four rounds of a card's CTAs
  AttentionCase two_tiles = gqa(std::vector<int32_t>(kBatch, 65), std::vector<int32_t>(kBatch, 129), 32);
  two_tiles.num_heads_kv = 8;
  two_tiles.mask = {};
  AttentionCase causal = gqa({65}, {12800}, 64);  // 100 key tiles
  causal.num_heads_kv = 16;
  for (AttentionCase c : {two_tiles, causal}) {
    for (const int32_t group : {1, 2}) {
      c.num_heads_q = c.num_heads_kv * group;
      MxAttention mx;
      CardBackward b = on_card_of(c, mx);
      ASSERT_EQ(b.args.seq_k.cu_seqlens, nullptr);
      for (const Dtype dq_accum : {Dtype::f32, Dtype::f16}) {
        SCOPED_TRACE(testing::Message() << (c.mask.causal ? "causal, " : "") << "group " << group << ", dq in "
                                        << dtype_name(dq_accum));
        b.args.dq_accum = dq_accum;
        b.args.deterministic = true;
        b.poison();
        b.run();
        const Gradients ordered = b.gradients();
        b.args.deterministic = false;
        for (int n = 0; n < 30; ++n) {
          b.poison();
          b.poison_workspace();
          b.run();
          const Gradients got = b.gradients();
          expect_same(ordered, got, false);
          if (!c.mask.causal) {
            EXPECT_TRUE(equal_numbers(got.dq, ordered.dq));
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

// What a call needs is in its workspace: calls on two streams do not meet.
TEST_F(AttentionBwdCalls, TwoStreamsAtOnce) {
  MxAttention mx[2];
  CardBackward calls[2] = {on_card_of(gqa({300, 70}, {500, 130}), mx[0]), on_card_of(gqa({129}, {640}, 128), mx[1])};
  const DeviceStream streams[2];
  Gradients alone[2];
  for (int n = 0; n < 2; ++n) {
    calls[n].args.deterministic = true;
    calls[n].poison();
    calls[n].run();
    alone[n] = calls[n].gradients();
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int round = 0; round < 20; ++round) {
    for (int n = 0; n < 2; ++n) calls[n].poison(streams[n].get());
    for (int i = 0; i < 5; ++i) {
      for (int n = 0; n < 2; ++n) calls[n].run(streams[n].get());
    }
    for (int n = 0; n < 2; ++n) streams[n].wait();
    for (int n = 0; n < 2; ++n) expect_same(calls[n].gradients(), alone[n], true);
  }
}

// A sequence has the same gradients alone, in a batch, and elsewhere in it.
TEST_F(AttentionBwdCalls, BatchDoesNotMatter) {
  for (const int32_t dim : {64, 128}) {
    for (const int variant : {0, 1, 2, 3}) {
      const bool shared = variant & 1, deterministic = variant & 2;
      SCOPED_TRACE(testing::Message() << "dim " << dim << ", shared " << shared << ", deterministic " << deterministic);
      std::vector<int32_t> lens_q{150, 1, 300, 0, 129}, lens_k{200, 64, 300, 70, 1000};
      if (shared) lens_q = {200};
      AttentionCase c = gqa(lens_q, lens_k, dim);
      c.shared_q = shared;
      if (shared) c.mask = {};
      const Operands x = make_operands(c);
      const auto run = [&](const std::vector<size_t>& order) {
        AttentionCase part = c;
        Operands y;
        part.lens_k.clear();
        if (shared) {
          y.q = x.q;
        } else {
          part.lens_q.clear();
        }
        for (const size_t b : order) {
          const auto append = [&](const std::vector<float>& from, const std::vector<int32_t>& lens, int64_t heads,
                                  std::vector<float>& to) {
            const int64_t start = kit::cu_seqlens(lens)[b] * heads * dim;
            to.insert(to.end(), from.begin() + start, from.begin() + start + lens[b] * heads * dim);
          };
          const std::vector<int32_t> rows = shared ? std::vector<int32_t>(5, 200) : lens_q;
          if (!shared) {
            part.lens_q.push_back(lens_q[b]);
            append(x.q, lens_q, 4, y.q);
          }
          part.lens_k.push_back(lens_k[b]);
          append(x.k, lens_k, 2, y.k);
          append(x.v, lens_k, 2, y.v);
          append(x.dout, rows, 4, y.dout);
        }
        MxAttention mx = quantize_case(part, y);
        mx.deterministic = deterministic;
        AttentionResult r = run_attention(mx, "ref", "", {.out_dtype = Dtype::bf16});
        run_backward(mx, "sm90", r);
        return r;
      };
      const std::vector<size_t> all{0, 1, 2, 3, 4}, moved{4, 2, 0, 3, 1};
      const AttentionResult whole = run(all), other = run(moved);
      const auto expect_part = [&](const std::vector<float>& x_all, const std::vector<int32_t>& lens, int64_t heads,
                                   size_t b, const std::vector<float>& y, int64_t at, const std::string& what) {
        const int64_t start = kit::cu_seqlens(lens)[b] * heads * dim, size = lens[b] * heads * dim;
        EXPECT_EQ(std::memcmp(x_all.data() + start, y.data() + at * heads * dim, size_t(size) * sizeof(float)), 0)
            << what << " of sequence " << b;
      };
      int64_t at_q = 0, at_k = 0;
      for (const size_t b : moved) {
        const AttentionResult alone = run({b});
        if (!shared && deterministic) {
          expect_part(whole.dq, lens_q, 4, b, alone.dq, 0, "dq alone");
          expect_part(whole.dq, lens_q, 4, b, other.dq, at_q, "dq elsewhere");
          at_q += lens_q[b];
        }
        expect_part(whole.dk, lens_k, 2, b, alone.dk, 0, "dk alone");
        expect_part(whole.dk, lens_k, 2, b, other.dk, at_k, "dk elsewhere");
        expect_part(whole.dv, lens_k, 2, b, alone.dv, 0, "dv alone");
        expect_part(whole.dv, lens_k, 2, b, other.dv, at_k, "dv elsewhere");
        at_k += lens_k[b];
      }
    }
  }
}

AttentionCase with_capacity(std::vector<int32_t> lens, int32_t capacity, int32_t dim) {
  AttentionCase c = gqa(lens, lens, dim);
  c.slack_q = c.slack_k = capacity - int32_t(sum_of(lens));
  return c;
}

// max_seqlen as loose as it can be.
TEST_F(AttentionBwdCalls, LooseMaxSeqlen) {
  MxAttention mx;
  const AttentionCase c = with_capacity({1, 0, 69, 330, 3, 128}, 700, 128);
  for (const bool deterministic : {true, false}) {
    CardBackward b = on_card_of(c, mx);
    b.args.deterministic = deterministic;
    b.poison();
    b.run();
    const Gradients tight = b.gradients();
    for (const int32_t longest : {600, 1 << 30}) {
      SCOPED_TRACE(longest);
      b.args.seq_q.max_seqlen = b.args.seq_k.max_seqlen = longest;
      b.poison();
      b.run();
      expect_same(b.gradients(), tight, deterministic);
    }
  }
}

// Captured once, replayed with other lengths and operands of the same capacity.
TEST_F(AttentionBwdCalls, GraphReplaysFollowTheLengths) {
  constexpr int32_t kCapacity = 1000;
  for (const int32_t dim : {64, 128}) {
    for (const int variant : {0, 1, 2, 3}) {
      const Dtype dq_accum = variant & 1 ? Dtype::f16 : Dtype::f32;
      const bool deterministic = variant & 2;
      SCOPED_TRACE(testing::Message() << "dim " << dim << ", dq in " << dtype_name(dq_accum) << ", deterministic "
                                      << deterministic);
      struct Filled {
        MxAttention mx;
        AttentionResult forward;
        Filled(const AttentionCase& c, uint64_t seed)
            : mx(quantize_case(c, make_operands(c, seed))),
              forward(run_attention(mx, "ref", "", {.out_dtype = Dtype::bf16})) {}
      };
      const Filled before(with_capacity({200, 300, 400}, kCapacity, dim), 1),
          after(with_capacity({1, 0, 512}, kCapacity, dim), 2), full(with_capacity({0, 999, 1}, kCapacity, dim), 3);
      CardBackward b(before.mx, before.forward);
      const auto ask = [&] {
        b.args.dq_accum = dq_accum;
        b.args.deterministic = deterministic;
      };
      ask();
      b.args.seq_q.max_seqlen = b.args.seq_k.max_seqlen = kCapacity;
      b.run();  // the workspace
      const CapturedGraph graph([&](Stream stream) { b.run(stream); });
      for (const Filled* x : {&after, &before, &full, &after}) {
        b.load(x->mx, x->forward);
        ask();
        b.poison();
        graph.replay(3);
        const Gradients replayed = b.gradients();
        b.poison();
        b.run();  // with the true max_seqlen
        expect_same(b.gradients(), replayed, deterministic);
        AttentionResult ref = x->forward;
        run_backward(x->mx, "ref", ref);
        const auto db = [](const std::vector<float>& want, const std::vector<uint8_t>& got, int64_t heads) {
          const FloatOutput x(Dtype::bf16, kCapacity, heads, int64_t(want.size()) / (kCapacity * heads));
          x.store(want);
          return bf16_sqnr_db(x.bytes, got);
        };
        EXPECT_GE(db(ref.dk, replayed.dk, 2), 30.5);
        EXPECT_GE(db(ref.dq, replayed.dq, x->mx.q.view.data.shape[1]), 20) << "dS has scales of other blocks";
      }
    }
  }
}

}  // namespace
}  // namespace mxflash::kit
