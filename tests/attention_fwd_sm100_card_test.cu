// The forward kernel of Blackwell on a card, with the same calls and the same judge as in simulation, and one of 1024
// tokens. Compiled twice: for Blackwell, where attention_fwd runs it; and for Hopper with tcgen05 in software, where
// copies by tensor maps, mbarriers, registers moved between roles and bulk stores are real.
#include "attention_fwd_sm100_problem.h"
#include "captured_graph.h"
#include "kit/mx_attention.h"
#include "on_card.h"
#ifdef MXFLASH_TCGEN05_EMULATED
#include "attention/attention_fwd_sm100_call.h"
#include "attention/attention_fwd_sm100_kernel.cuh"
#include "runtime/launch.cuh"
#endif

namespace mxflash::sm100_test {
namespace {

// The problem's memory on the card, and its call there.
struct OnCard {
  kit::DeviceBuffer q, k, v, sfq, sfk, sfv, cu_q, cu_k, mean, out, lse, row_exponent, workspace;
  AttentionFwd args;

  explicit OnCard(const ForwardProblem& x)
      : q(upload(x.operands[0].payload)),
        k(upload(x.operands[1].payload)),
        v(upload(x.operands[2].payload)),
        sfq(upload(x.operands[0].scale)),
        sfk(upload(x.operands[1].scale)),
        sfv(upload(x.operands[2].scale)),
        cu_q(upload(x.cu_q)),
        cu_k(upload(x.cu_k)),
        mean(upload(x.mean)),
        out(upload(x.out)),
        lse(upload(x.lse)),
        row_exponent(upload(x.row_exponent)),
        args(x.args) {
    const auto move = [](Tensor& t, const kit::DeviceBuffer& to) {
      if (!t) return;
      t.data = to.data();
      t.device = kCard;
    };
    move(args.q.data, q), move(args.k.data, k), move(args.v.data, v);
    move(args.q.scale, sfq), move(args.k.scale, sfk), move(args.v.scale, sfv);
    move(args.v_mean, mean), move(args.out, out), move(args.lse, lse), move(args.row_exponent, row_exponent);
    if (args.seq_q.cu_seqlens) args.seq_q.cu_seqlens = static_cast<const int32_t*>(cu_q.data());
    if (args.seq_k.cu_seqlens) args.seq_k.cu_seqlens = static_cast<const int32_t*>(cu_k.data());
  }
};

#ifdef MXFLASH_TCGEN05_EMULATED

using namespace fwd_sm100;

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) emulated_kernel(const __grid_constant__ Params p) {
  attention_fwd<C>(p);
}

template <class C>
Status launch_emulated(const Params& params) {
  const auto ctas = uint32_t(std::min<int64_t>(multiprocessor_count(), params.items.bound(C::kBlockM)));
  return launch({"emulated", dim3(ctas), C::kThreads, C::kBytes, nullptr}, emulated_kernel<C>, params);
}

Status enqueue(OnCard& card) {
  const AttentionFwd& a = card.args;
  MXFLASH_TRY(check_call("attention_fwd", a));
  Arena count(nullptr);
  AttentionPlan::of(count, a.seq_q, a.seq_k);
  partials_of(count, a);
  card.workspace = kit::DeviceBuffer(count.used());
  Arena arena(card.workspace.data());
  Params params;
  const AttentionPlan plan = AttentionPlan::of(arena, a.seq_q, a.seq_k);
  MXFLASH_TRY(with_config(a, [&]<class C>(C) -> Status {
    MXFLASH_TRY(params_of<C>(a, plan, partials_of(arena, a), params));
    MXFLASH_TRY(params.items.write_plan(C::kBlockM, nullptr));
    return launch_emulated<C>(params);
  }));
  if (!a.out_mx) return {};
  MXFLASH_TRY(cuda_status(cudaMemset(a.out_mx.scale.data, 0, size_t(a.out_mx.scale.numel())), "emulated"));
  return combine_partials(combine_of(a, AttentionShape::of(a), params), nullptr);
}

#else

Status enqueue(OnCard& card, Stream stream = nullptr) {
  card.args.backend = "sm100";
  if (card.workspace.size() == 0) card.workspace = kit::DeviceBuffer(attention_fwd_workspace(card.args));
  card.args.workspace = card.workspace.data(), card.args.workspace_size = card.workspace.size();
  return attention_fwd(card.args, stream);
}

#endif

// With out_mx: its payload and scales come back in mx.
std::string run_on_card(ForwardProblem& problem, kit::OwnedMx* mx = nullptr) {
  OnCard card(problem);
  kit::DeviceBuffer mx_data, mx_scale;
  if (mx) {
    mx_data = upload(mx->data), mx_scale = upload(mx->scale);
    card.args.out_mx = mx->view;
    card.args.out_mx.data = on_card(mx->view.data), card.args.out_mx.scale = on_card(mx->view.scale);
    card.args.out_mx.data.data = mx_data.data(), card.args.out_mx.scale.data = mx_scale.data();
  }
  Status s = enqueue(card);
  if (s.ok()) s = cuda_status(cudaDeviceSynchronize(), "on card");
  if (!s.ok()) return s.message;
  problem.out = download<uint8_t>(card.out);
  problem.lse = download<float>(card.lse);
  problem.row_exponent = download<uint8_t>(card.row_exponent);
  if (mx) mx->data = download<uint8_t>(mx_data), mx->scale = download<uint8_t>(mx_scale);
  return "";
}

class AttentionFwdSm100OnCard : public OnTcgen05 {};

void expect_recipe(const ForwardCase& c, uint64_t seed) {
  ForwardProblem problem(c, seed);
  const std::string error = run_on_card(problem);
  ASSERT_EQ(error, "") << c.shape.name;
  Judge judge;
  EXPECT_EQ(judge.check(problem), "");
}

TEST_F(AttentionFwdSm100OnCard, IsTheRecipe) {
  uint64_t seed = 1;
  for (const auto& cases : {forward_cases(), wide_cases()}) {
    for (const ForwardCase& c : cases) {
      expect_recipe(c, seed++);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(AttentionFwdSm100OnCard, IsTheRecipeAt1024Tokens) {
  for (const auto& [dim, dim_v] : {std::pair(128, 128), {192, 128}, {256, 256}}) {
    expect_recipe({.shape = {.name = "causal_1024",
                             .lens_q = {1024},
                             .lens_k = {1024},
                             .num_heads_q = 2,
                             .num_heads_kv = 2,
                             .head_dim = dim,
                             .head_dim_v = dim_v,
                             .mask = {.causal = true}},
                   .out_dtype = Dtype::bf16,
                   .equal_lengths = true},
                  7);
  }
}

// Results are the recipe's, and out_mx has the bytes that quantize gives for them.
void expect_quantized(int32_t head_dim, int32_t dim) {
  ForwardProblem problem({.shape = {.name = "out_mx",
                                    .lens_q = {130, 0, 33},
                                    .lens_k = {200, 5, 0},
                                    .num_heads_q = 2,
                                    .num_heads_kv = 1,
                                    .head_dim = head_dim,
                                    .head_dim_v = dim,
                                    .mask = {.causal = true},
                                    .slack_q = 3},
                          .v_mean = true},
                         11);
  const int64_t tokens = kit::total_out(problem.c.shape), heads = 2;
  const Jagged seq = problem.args.seq_q;
  kit::OwnedMx mx = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, tokens, heads, dim, seq);
  std::fill(mx.data.begin(), mx.data.end(), uint8_t{0x55});
  ASSERT_EQ(run_on_card(problem, &mx), "");
  Judge judge;
  EXPECT_EQ(judge.check(problem), "");
  const auto* out = reinterpret_cast<const float*>(problem.out.data());
  const kit::OwnedMx want = kit::ref_quantize({out, size_t(tokens * heads * dim)}, tokens, heads, dim, seq);
  EXPECT_TRUE(mx.data == want.data);
  EXPECT_TRUE(mx.scale == want.scale);
}

TEST_F(AttentionFwdSm100OnCard, QuantizesOut) {
  expect_quantized(128, 128);
  expect_quantized(192, 128);
  expect_quantized(256, 240);
}

#ifndef MXFLASH_TCGEN05_EMULATED
// The same bits from a graph, launch behind launch.
TEST_F(AttentionFwdSm100OnCard, IsTheRecipeInAGraph) {
  for (const ForwardCase& c : {forward_cases().front(), forward_cases().back(), wide_cases().front()}) {
    ForwardProblem problem(c, 13);
    OnCard card(problem);
    ASSERT_EQ(enqueue(card).message, "");
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<uint8_t> first = download<uint8_t>(card.out);
    const CapturedGraph graph([&](Stream stream) { kit::require_ok(enqueue(card, stream)); });
    card.out.fill(0xFF, nullptr);
    graph.replay(20);
    EXPECT_TRUE(download<uint8_t>(card.out) == first) << c.shape.name;
  }
}
#endif

}  // namespace
}  // namespace mxflash::sm100_test
