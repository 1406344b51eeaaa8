// The backward's kernels for Blackwell in simulation: every element within its bound of the recipe in float64, in three
// modes of execution, the same bits in all of them; and faults, each of which some case must show.
#include <gtest/gtest.h>

#include "attention_bwd_sm100_simulated.h"
#include "mx/rotation.h"

namespace mxflash::kit {
namespace {

constexpr simulator::Mode kModes[] = {simulator::Mode::eager, simulator::Mode::deferred, simulator::Mode::reordered};

class Small : public testing::TestWithParam<AttentionCase> {};

TEST_P(Small, WithinBoundsAndSameBitsInEveryMode) {
  const Problem& p = Problem::of(GetParam().name);
  std::vector<Outputs> first;
  for (const simulator::Mode mode : kModes) {
    const uint64_t seeds = mode == simulator::Mode::eager ? 1 : simulator::seeds(4);
    for (uint64_t seed = 1; seed <= seeds; ++seed) {
      BackwardCall call(p.mx, p.forward);
      ASSERT_EQ(simulate(call, {.mode = mode, .seed = seed}), "") << "mode " << int(mode) << ", seed " << seed;
      const Outputs o(call);
      ASSERT_EQ(wrong_with(p, o), "") << "mode " << int(mode) << ", seed " << seed;
      if (first.empty()) {
        first.push_back(o);
        expect_mx_of(call, p.mx, o);
      }
      EXPECT_TRUE(same_bits(first[0].dq, o.dq)) << "dq, mode " << int(mode);
      EXPECT_TRUE(same_bits(first[0].dk, o.dk)) << "dk, mode " << int(mode);
      EXPECT_TRUE(same_bits(first[0].dv, o.dv)) << "dv, mode " << int(mode);
    }
  }
}

// The bound is tight, and ref, which is of the same recipe, is within it.
TEST_P(Small, JudgeAgreesWithRef) {
  const Problem& p = Problem::of(GetParam().name);
  AttentionResult ref = p.forward;
  run_backward(p.mx, "ref", ref);
  EXPECT_EQ(outside("dv", p.judge.dv, ref.dv), "");
  EXPECT_EQ(outside("dk", p.judge.dk, ref.dk), "");
  EXPECT_EQ(outside("dq", p.judge.dq, ref.dq), "");
  for (const Judgement* g : {&p.judge.dv, &p.judge.dk, &p.judge.dq}) EXPECT_LT(slack(*g), 0.02);
}

INSTANTIATE_TEST_SUITE_P(Cases, Small, testing::ValuesIn(backward_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(AttentionBwdSm100, GradientsInHalfPrecision) {
  for (const char* name : {"tails_causal", "shared_q_d176_112", "window_d64_160"}) {
    const Problem& p = Problem::of(name);
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) {
      BackwardCall call(p.mx, p.forward, dtype, false);
      ASSERT_EQ(simulate(call), "");
      const bool bf16 = dtype == Dtype::bf16;
      EXPECT_EQ(wrong_with(p, Outputs(call), bf16 ? 0x1p-8 : 0x1p-11, bf16 ? 0 : 0x1p-25), "")
          << name << " " << dtype_name(dtype);
    }
  }
}

// Each operand in E5M2, one after the other.
TEST(AttentionBwdSm100, TakesE5m2) {
  for (const char* name : {"tails_causal", "shared_q_d176_112", "window_d64_160"}) {
    for (int operand = 0; operand < 4; ++operand) {
      Problem p(case_of(name), Dtype::bf16, operand);
      BackwardCall call(p.mx, p.forward);
      ASSERT_EQ(simulate(call), "");
      EXPECT_EQ(wrong_with(p, Outputs(call)), "") << name << ", operand " << operand;
    }
  }
}

// The same elements, heads and tokens `gap` elements further apart, NaN between them.
void spread(Tensor& t, std::vector<uint8_t>& storage, int64_t gap) {
  const int64_t size = dtype_size(t.dtype), head = t.shape[2] + gap, token = t.shape[1] * head + gap;
  storage.assign(size_t(t.shape[0] * token * size) + 16, is_fp8_dtype(t.dtype) ? 0x7F : 0xFF);
  uint8_t* const to = storage.data() + (16 - reinterpret_cast<uintptr_t>(storage.data()) % 16) % 16;
  for (int64_t i = 0; i < t.shape[0]; ++i) {
    for (int64_t h = 0; h < t.shape[1]; ++h) {
      std::memcpy(to + (i * token + h * head) * size,
                  static_cast<const uint8_t*>(t.data) + (i * t.stride[0] + h * t.stride[1]) * size,
                  size_t(t.shape[2] * size));
    }
  }
  t.data = to, t.stride = {token, head, 1};
}
// And back.
void gather(const Tensor& from, const Tensor& to) {
  const int64_t size = dtype_size(from.dtype);
  for (int64_t i = 0; i < to.shape[0]; ++i) {
    for (int64_t h = 0; h < to.shape[1]; ++h) {
      std::memcpy(static_cast<uint8_t*>(to.data) + (i * to.stride[0] + h * to.stride[1]) * size,
                  static_cast<const uint8_t*>(from.data) + (i * from.stride[0] + h * from.stride[1]) * size,
                  size_t(to.shape[2] * size));
    }
  }
}

// Parts of wider tensors, rows of gradients and out on 2 or 4 bytes only, capacities far beyond the lengths, and a
// softmax_scale of the caller's.
void check_strides_capacities_and_scale(const char* name) {
  Problem p(case_of(name));
  p.mx.softmax_scale = 0.3f;
  p.forward = run_attention(p.mx, "ref", "", {.out_dtype = Dtype::bf16});
  p.judge = judge_backward(p.mx, p.forward);
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    BackwardCall plain(p.mx, p.forward, dtype, false), wide(p.mx, p.forward, dtype, false);
    std::vector<uint8_t> storage[8];
    AttentionBwd& a = wide.args;
    spread(a.q.data, storage[0], 16), spread(a.k.data, storage[1], 32);
    spread(a.v.data, storage[2], 48), spread(a.dout.data, storage[3], 16);
    spread(a.out, storage[4], 1), spread(a.dq, storage[5], 3), spread(a.dk, storage[6], 1), spread(a.dv, storage[7], 8);
    a.seq_q.max_seqlen = a.seq_k.max_seqlen = 1 << 20;
    ASSERT_TRUE(bwd_sm100::check_call(a).ok());
    ASSERT_EQ(simulate(plain), "");
    ASSERT_EQ(simulate(wide), "");
    gather(a.dq, wide.dq.view), gather(a.dk, wide.dk.view), gather(a.dv, wide.dv.view);
    const Outputs x(plain), y(wide);
    EXPECT_TRUE(same_bits(x.dq, y.dq) && same_bits(x.dk, y.dk) && same_bits(x.dv, y.dv));
    EXPECT_EQ(wrong_with(p, x, dtype == Dtype::bf16 ? 0x1p-8 : 0), "");
  }
}

TEST(AttentionBwdSm100, StridesCapacitiesAndScale) {
  for (const char* name : {"jagged_causal_gqa", "jagged_causal_gqa_d192_128"}) check_strides_capacities_and_scale(name);
}

// dq and dk are those of the rotated call, rotated back, up to roundoff.
TEST(AttentionBwdSm100, RotatesBack) {
  for (const char* name : {"dense", "shared_q_causal_d64", "head_dim_96_80", "head_dim_48_16", "dense_d192_128",
                           "shared_q_d176_112", "dense_d256"}) {
    const Problem& p = Problem::of(name);
    BackwardCall plain(p.mx, p.forward), rotated(p.mx, p.forward);
    rotated.args.rotate_qk = true;
    ASSERT_EQ(simulate(plain), "");
    ASSERT_EQ(simulate(rotated), "");
    const Outputs from(plain), to(rotated);
    EXPECT_TRUE(same_bits(from.dv, to.dv));
    const int64_t dim = case_of(name).head_dim, group = rotation_group(dim);
    for (const auto& [x, y] : {std::pair(&from.dq, &to.dq), std::pair(&from.dk, &to.dk)}) {
      for (size_t at = 0; at < x->size(); at += size_t(group)) {
        std::vector<double> row(x->begin() + int64_t(at), x->begin() + int64_t(at) + group);
        double size = 0;
        for (const double value : row) size += std::fabs(value);
        rotate_back(row.data(), group, rotated.args.rotate_seed, int64_t(at) % dim);
        for (int64_t c = 0; c < group; ++c) {
          ASSERT_NEAR(row[size_t(c)], double((*y)[at + size_t(c)]), 10 * 0x1p-24 * size) << name << " " << at;
        }
      }
    }
  }
}

// Of a row that sees keys dq gets softmax_scale dlse k_mean besides; with a shared query of each sequence.
TEST(AttentionBwdSm100, DlseReachesQThroughKMean) {
  for (const char* name : {"more_rows_than_keys_causal_dlse", "shared_q", "jagged_causal_gqa_d192_128"}) {
    const Problem& p = Problem::of(name);
    const AttentionCase& c = case_of(name);
    BackwardCall plain(p.mx, p.forward), with_mean(p.mx, p.forward);
    std::vector<float> mean(size_t(p.mx.batch * c.num_heads_kv * c.head_dim));
    Random random(5);
    fill_normal(random, mean);
    with_mean.args.k_mean = make_tensor(mean.data(), Dtype::f32, p.mx.batch, c.num_heads_kv, c.head_dim);
    ASSERT_EQ(simulate(plain), "");
    ASSERT_EQ(simulate(with_mean), "");
    const Outputs from(plain), to(with_mean);
    EXPECT_TRUE(same_bits(from.dk, to.dk) && same_bits(from.dv, to.dv));
    const AttentionShape s = AttentionShape::of(plain.args);
    for (int64_t b = 0; b < (c.shared_q ? 1 : p.mx.batch); ++b) {
      const Sequence q = s.query_sequence(b);
      for (int64_t at = 0; at < q.length * s.num_heads_q * s.head_dim; ++at) {
        const int64_t row = at / s.head_dim / s.num_heads_q, head = at / s.head_dim % s.num_heads_q;
        const int64_t channel = at % s.head_dim;
        const size_t index = size_t(q.start * s.num_heads_q * s.head_dim + at);
        double want = double(from.dq[index]), size = std::fabs(want);
        for (int64_t met = b; met < (c.shared_q ? p.mx.batch : b + 1); ++met) {
          const size_t out = size_t(head * s.total_out + s.out_sequence(met).start + row);
          if (p.forward.lse[out] == -HUGE_VALF) continue;
          const double term = s.softmax_scale * double(p.mx.dlse[out]) *
                              double(mean[size_t((met * c.num_heads_kv + head / s.group) * c.head_dim + channel)]);
          want += term, size += std::fabs(term);
        }
        ASSERT_NEAR(want, double(to.dq[index]), 8 * 0x1p-24 * size) << name << " " << index;
      }
    }
  }
}

// delta is that of out less its mean.
void check_out_without_its_mean(const char* name) {
  const AttentionCase& c = case_of(name);
  const Problem p(c, Dtype::f32);
  AttentionResult with_mean = p.forward;
  std::vector<float> mean(size_t(p.mx.batch * c.num_heads_kv * c.head_dim_v));
  Random random(6);
  fill_normal(random, mean);
  const Jagged seq = p.mx.seq_out();
  for (int64_t b = 0; b < p.mx.batch; ++b) {
    const Sequence s = sequence_at(p.mx.total_out(), seq, b);
    for (int64_t at = 0; at < s.length * c.num_heads_q * c.head_dim_v; ++at) {
      const int64_t head = at / c.head_dim_v % c.num_heads_q * c.num_heads_kv / c.num_heads_q;
      const size_t from = size_t((b * c.num_heads_kv + head) * c.head_dim_v + at % c.head_dim_v);
      float& out = with_mean.out[size_t(s.start * c.num_heads_q * c.head_dim_v + at)];
      out = std::round((out + mean[from]) * 0x1p12f) * 0x1p-12f,
      mean[from] = std::round(mean[from] * 0x1p12f) * 0x1p-12f;
    }
  }
  AttentionResult without = with_mean;  // exact: both are multiples of 2^-12
  for (int64_t b = 0; b < p.mx.batch; ++b) {
    const Sequence s = sequence_at(p.mx.total_out(), seq, b);
    for (int64_t at = 0; at < s.length * c.num_heads_q * c.head_dim_v; ++at) {
      const int64_t head = at / c.head_dim_v % c.num_heads_q * c.num_heads_kv / c.num_heads_q;
      without.out[size_t(s.start * c.num_heads_q * c.head_dim_v + at)] -=
          mean[size_t((b * c.num_heads_kv + head) * c.head_dim_v + at % c.head_dim_v)];
    }
  }
  BackwardCall call(p.mx, with_mean);
  call.args.v_mean = make_tensor(mean.data(), Dtype::f32, p.mx.batch, c.num_heads_kv, c.head_dim_v);
  ASSERT_EQ(simulate(call), "");
  const BackwardJudge judge = judge_backward(p.mx, without);
  const Outputs o(call);
  EXPECT_EQ(outside("dv", judge.dv, o.dv), "");
  EXPECT_EQ(outside("dk", judge.dk, o.dk), "");
  EXPECT_EQ(outside("dq", judge.dq, o.dq), "");
}

TEST(AttentionBwdSm100, TakesOutWithoutItsMean) {
  for (const char* name : {"jagged_causal_gqa", "jagged_causal_gqa_d256"}) check_out_without_its_mean(name);
}

// NaN in an operand reaches every gradient that ref has it in, and no other sequence.
// key_sequence: which one token 141 of the keys belongs to; of the queries it is in the last.
void check_nan_is_seen(const char* name, int64_t key_sequence) {
  const AttentionCase& c = case_of(name);
  for (int operand = 0; operand < 4; ++operand) {
    Problem p(c);
    OwnedMx* const tensors[] = {&p.mx.q, &p.mx.k, &p.mx.v, &p.mx.dout};
    const MxTensor& t = tensors[operand]->view;
    const int64_t heads = t.data.shape[1], dim = t.data.shape[2];
    static_cast<uint8_t*>(t.data.data)[(141 * heads + heads - 1) * dim + dim - 58] = 0x7F;
    AttentionResult ref = p.forward;
    run_backward(p.mx, "ref", ref);
    BackwardCall call(p.mx, p.forward);
    ASSERT_EQ(simulate(call, {.mode = simulator::Mode::deferred}), "");
    const Outputs o(call);
    int found = 0;
    const auto expect = [&](const char* name, const std::vector<float>& want, const std::vector<float>& got,
                            const Judgement& clean, const Sequence& touched, int64_t width) {
      for (int64_t i = 0; i < int64_t(want.size()); ++i) {
        const size_t at = size_t(i);
        found += std::isnan(want[at]);
        ASSERT_TRUE(std::isnan(got[at]) || !std::isnan(want[at])) << name << " " << i << ", operand " << operand;
        if (i / width >= touched.start && i / width < touched.start + touched.length) continue;
        ASSERT_LE(std::fabs(double(got[at]) - clean.value[at]), clean.bound[at]) << name << " " << i;
      }
    };
    const int64_t b = operand == 1 || operand == 2 ? key_sequence : 2;
    const AttentionShape s = AttentionShape::of(call.args);
    expect("dq", ref.dq, o.dq, p.judge.dq, s.query_sequence(b), s.num_heads_q * s.head_dim);
    expect("dk", ref.dk, o.dk, p.judge.dk, s.key_sequence(b), s.num_heads_kv * s.head_dim);
    expect("dv", ref.dv, o.dv, p.judge.dv, s.key_sequence(b), s.num_heads_kv * s.head_dim_v);
    EXPECT_GT(found, 0);
  }
}
TEST(AttentionBwdSm100, NanIsSeen) {
  check_nan_is_seen("jagged_causal_gqa", 1);
  check_nan_is_seen("jagged_causal_gqa_d192_128", 2);
  check_nan_is_seen("jagged_causal_gqa_d256", 2);
}

// ---- what is refused ------------------------------------------------------------------------------------------------

TEST(AttentionBwdSm100, RefusesWithRuleAndValue) {
  const Problem& p = Problem::of("dense");
  const auto message = [&](auto&& change) {
    BackwardCall call(p.mx, p.forward);
    change(call.args);
    const Status s = bwd_sm100::check_call(call.args);
    EXPECT_EQ(s.code, StatusCode::unsupported);
    return std::string(s.message);
  };
  const auto ok = [&](auto&& change) {
    BackwardCall call(p.mx, p.forward);
    change(call.args);
    return bwd_sm100::check_call(call.args).ok();
  };
  EXPECT_TRUE(ok([](AttentionBwd&) {}));
  EXPECT_EQ(message([](AttentionBwd& a) { a.q.data.shape[2] = 72; }),
            "attention_bwd: sm100: head_dim must be a multiple of 16, at most 256, got 72");
  EXPECT_EQ(message([](AttentionBwd& a) { a.v.data.shape[2] = 272; }),
            "attention_bwd: sm100: head_dim_v must be a multiple of 16, at most 256, got 272");
  EXPECT_EQ(message([](AttentionBwd& a) { a.row_exponent = {}; }),
            "attention_bwd: sm100: row_exponent must be given, got null");
  EXPECT_EQ(message([](AttentionBwd& a) { a.ds_dtype = Dtype::e5m2; }),
            "attention_bwd: sm100: ds_dtype must be e4m3, got e5m2");
  EXPECT_EQ(message([](AttentionBwd& a) { a.k_col = a.k; }),
            "attention_bwd: sm100: operands of two payloads are not taken, got k_col");
  EXPECT_EQ(message([](AttentionBwd& a) { a.v.block = MxBlock::row32; }),
            "attention_bwd: sm100: v.block must be square32, got row32");
  EXPECT_EQ(message([](AttentionBwd& a) { a.dv_mx.data.dtype = Dtype::e5m2; }),
            "attention_bwd: sm100: dv_mx.data.dtype must be e4m3, got e5m2");
  EXPECT_EQ(message([](AttentionBwd& a) { a.dk_mx.block = MxBlock::col32; }),
            "attention_bwd: sm100: dk_mx.block must be square32, got col32");
  EXPECT_EQ(
      message([](AttentionBwd& a) { a.k.data.stride[0] = 136; }),
      "attention_bwd: sm100: k.data: strides of tokens must be positive multiples of 16 bytes below 2^40, got 136");
  EXPECT_EQ(message([](AttentionBwd& a) { a.q.data.data = reinterpret_cast<void*>(0x1008); }),
            "attention_bwd: sm100: q.data must be aligned to 16 bytes, got 0x1008");
}

// ---- faults ---------------------------------------------------------------------------------------------------------

struct Planted {
  const char* name;
  int fault;
  const char* where;  // the case that shows it
};
// clang-format off
const Planted kPlanted[] = {
    {"NoFreeScores", bwd_sm100::kFaultNoFreeScores, "dense"},
    {"NoFreeGradients", bwd_sm100::kFaultNoFreeGradients, "dense"},
    {"NoFreeWeights", bwd_sm100::kFaultNoFreeWeights, "dense"},
    {"NoFreeDs", bwd_sm100::kFaultNoFreeDs, "dense"},
    {"NoEmptyStage", bwd_sm100::kFaultNoEmptyStage, "jagged_causal_gqa"},
    {"NoProxyFence", bwd_sm100::kFaultNoProxyFence, "dense"},
    {"NoStoreWait", bwd_sm100::kFaultNoStoreWait, "dense"},
    {"NoOwnRows", bwd_sm100::kFaultNoOwnRows, "dense"},
    {"RowScales", bwd_sm100::kFaultRowScales, "dense"},
    {"TailBytes", bwd_sm100::kFaultTailBytes, "jagged"},
    {"TailScales", bwd_sm100::kFaultTailScales, "jagged"},
    {"Exponent", bwd_sm100::kFaultExponent, "dense"},
    {"Mask", bwd_sm100::kFaultMask, "causal"},
    {"MaxOfThread", bwd_sm100::kFaultMaxOfThread, "dense"},
    {"Accumulate", bwd_sm100::kFaultAccumulate, "dense"},
    {"Group", bwd_sm100::kFaultGroup, "jagged_causal_gqa"},
    {"NoAccumulatorWait", bwd_sm100::kFaultNoAccumulatorWait, "dense"},
    {"NoFreeSums", bwd_sm100::kFaultNoFreeSums, "jagged_causal_gqa"},
    {"NoLastCommit", bwd_sm100::kFaultNoLastCommit, "dense"},
    {"NoFreeScoresOfTwo", bwd_sm100::kFaultNoFreeScores, "dense_d256"},
    {"ScaleGroup", bwd_sm100::kFaultScaleGroup, "dense_d192_128"},
    {"Span", bwd_sm100::kFaultSpan, "dense_d192_128"},
    {"NoRowFence", bwd_sm100::kFaultNoRowFence, "dense_d256"},
    {"NoFreeScales", bwd_sm100::kFaultNoFreeScales, "dense_d192_128"},
};
// clang-format on

class Fault : public testing::TestWithParam<Planted> {};

TEST_P(Fault, IsCaught) {
  const Problem& p = Problem::of(GetParam().where);
  std::string found;
  for (const simulator::Mode mode : kModes) {
    for (uint64_t seed = 1; seed <= simulator::seeds(4) && found.empty(); ++seed) {
      BackwardCall call(p.mx, p.forward);
      found = simulate(call, {.mode = mode, .seed = seed, .fault = GetParam().fault});
      if (found.empty()) found = wrong_with(p, Outputs(call));
    }
  }
  EXPECT_NE(found, "");
  RecordProperty("found", found);
}

INSTANTIATE_TEST_SUITE_P(Planted, Fault, testing::ValuesIn(kPlanted),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace mxflash::kit
