// The backward's kernels for Blackwell on a card, judged as in simulation. Compiled twice: for Blackwell, where
// attention_bwd runs them; and for Hopper with tcgen05 in software (ptx/tcgen05_emulated.cuh), where copies by TMA,
// mbarriers, registers, shared memory and the grid are real.
#include <deque>

#include "attention_bwd_sm100_problem.h"
#include "captured_graph.h"
#include "on_card.h"
#ifdef MXFLASH_TCGEN05_EMULATED
#include "attention/attention_bwd_sm100_call.h"
#include "attention/attention_bwd_sm100_dkdv.cuh"
#include "attention/attention_bwd_sm100_dq.cuh"
#endif

namespace mxflash::kit {
namespace {

#ifdef MXFLASH_TCGEN05_EMULATED

using namespace bwd_sm100;

template <int kDim>
__global__ void __launch_bounds__(kPreThreads) pre_kernel(const __grid_constant__ PreParams p) {
  pre_body<kDim>(p);
}
template <int kDim, int kDimV, Sums kSums>
__global__ void __launch_bounds__(kThreads, 1) dkdv_kernel(const __grid_constant__ Params p) {
  dkdv_body<kDim, kDimV, kSums>(p);
}
template <int kDim, int kDimV>
__global__ void __launch_bounds__(kThreads, 1) dq_kernel(const __grid_constant__ Params p) {
  dq_body<kDim, kDimV>(p);
}

template <int kDim, int kDimV, Sums kSums>
void run_keys(const Params& keys, uint32_t grid) {
  constexpr int kBytes = KeysConfig<kDim, kDimV, kSums>::kBytes;
  cudaFuncSetAttribute(dkdv_kernel<kDim, kDimV, kSums>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  dkdv_kernel<kDim, kDimV, kSums><<<grid, kThreads, kBytes>>>(keys);
}
template <int kDim, int kDimV>
Status run_kernels(const AttentionBwd& args, uint32_t grid) {
  const AttentionShape s = AttentionShape::of(args);
  const DeviceBuffer workspace(Workspace(nullptr, s).used);
  workspace.fill(0xFF, nullptr);
  const Workspace w(workspace.data(), s);
  Params keys{}, queries{};
  MXFLASH_TRY(keys_params(args, w, keys));
  MXFLASH_TRY(queries_params(args, w, queries));
  if (keys.items.plan.order) MXFLASH_TRY(keys.items.write_plan(kOwnRows, nullptr));
  if (queries.items.plan.order) MXFLASH_TRY(queries.items.write_plan(kOwnRows, nullptr));
  constexpr int kQueriesBytes = QueriesConfig<kDim, kDimV>::kBytes;
  cudaFuncSetAttribute(dq_kernel<kDim, kDimV>, cudaFuncAttributeMaxDynamicSharedMemorySize, kQueriesBytes);
  if (pre_grid(s) > 0) pre_kernel<kDimV><<<uint32_t(pre_grid(s)), kPreThreads>>>(pre_params(args, w));
  if constexpr (kOneKeysPass<kDim, kDimV>) {
    run_keys<kDim, kDimV, Sums::both>(keys, grid);
  } else {
    run_keys<kDim, kDimV, Sums::dv>(keys, grid);
    run_keys<kDim, kDimV, Sums::dk>(keys, grid);
  }
  dq_kernel<kDim, kDimV><<<grid, kThreads, kQueriesBytes>>>(queries);
  return cuda_status(cudaDeviceSynchronize(), "emulated");
}

Status run_with(const AttentionBwd& args, uint32_t grid) {
  return with_kernel_dims(AttentionShape::of(args),
                          [&]<int kDim, int kDimV>() { return run_kernels<kDim, kDimV>(args, grid); });
}

#else

Status run_with(AttentionBwd args, uint32_t) {
  const DeviceBuffer workspace(attention_bwd_workspace(args));
  workspace.fill(0xFF, nullptr);
  args.workspace = workspace.data(), args.workspace_size = workspace.size();
  MXFLASH_TRY(attention_bwd(args));
  return cuda_status(cudaDeviceSynchronize(), "attention_bwd");
}

#endif

// The call with its memory on the card.
class OnCard {
 public:
  explicit OnCard(BackwardCall& call) : call_(call), args(call.args) {
    args.backend = "sm100";
    for (MxTensor* t : {&args.q, &args.k, &args.v, &args.dout, &args.dk_mx, &args.dv_mx}) move(t->data), move(t->scale);
    for (Tensor* t : {&args.out, &args.lse, &args.row_exponent, &args.dlse, &args.dq, &args.dk, &args.dv}) move(*t);
    for (Jagged* seq : {&args.seq_q, &args.seq_k}) {
      if (!seq->cu_seqlens) continue;
      const DeviceBuffer& copy = keep(upload(std::vector<int32_t>(seq->cu_seqlens, seq->cu_seqlens + seq->batch + 1)));
      seq->cu_seqlens = static_cast<const int32_t*>(copy.data());
    }
  }
  // Waits for it. Emulated with this many CTAs. Returns "", or what is wrong.
  std::string run(uint32_t grid) {
    if (const Status s = run_with(args, grid); !s.ok()) return s.message;
    fetch();
    return "";
  }
  // The results, to the call's own memory.
  void fetch() const {
    copy_back(args.dq, call_.args.dq), copy_back(args.dk, call_.args.dk), copy_back(args.dv, call_.args.dv);
    copy_back(args.dk_mx.data, call_.args.dk_mx.data), copy_back(args.dk_mx.scale, call_.args.dk_mx.scale);
    copy_back(args.dv_mx.data, call_.args.dv_mx.data), copy_back(args.dv_mx.scale, call_.args.dv_mx.scale);
  }

 private:
  const DeviceBuffer& keep(DeviceBuffer&& buffer) { return buffers_.emplace_back(std::move(buffer)); }
  void move(Tensor& t) {
    if (!t) return;
    const size_t size = size_t(t.numel() * dtype_size(t.dtype));
    DeviceBuffer buffer(std::max<size_t>(size, 1));
    if (size) buffer.upload(t.data, size, nullptr);
    t.data = keep(std::move(buffer)).data();
    t.device = kCard;
  }
  static void copy_back(const Tensor& from, const Tensor& to) {
    if (to) cudaMemcpy(to.data, from.data, size_t(to.numel() * dtype_size(to.dtype)), cudaMemcpyDeviceToHost);
  }

  BackwardCall& call_;
  std::deque<DeviceBuffer> buffers_;

 public:
  AttentionBwd args;
};

class BackwardSm100OnCard : public OnTcgen05, public testing::WithParamInterface<AttentionCase> {};

TEST_P(BackwardSm100OnCard, WithinBoundsAndSameBitsTwice) {
  const Problem p(GetParam());
  std::vector<Outputs> first;
  for (const uint32_t grid : {2, 5}) {
    BackwardCall call(p.mx, p.forward);
    ASSERT_EQ(OnCard(call).run(grid), "");
    const Outputs o(call);
    ASSERT_EQ(wrong_with(p, o), "") << "grid " << grid;
    expect_mx_of(call, p.mx, o);
    if (first.empty()) first.push_back(o);
    EXPECT_TRUE(same_bits(first[0].dq, o.dq) && same_bits(first[0].dk, o.dk) && same_bits(first[0].dv, o.dv));
  }
}

#ifndef MXFLASH_TCGEN05_EMULATED
// The kernels of a call start before the last have ended, launch behind launch.
TEST_P(BackwardSm100OnCard, SameBitsFromAGraph) {
  const Problem p(GetParam());
  BackwardCall call(p.mx, p.forward);
  OnCard card(call);
  ASSERT_EQ(card.run(0), "");
  const Outputs want(call);
  const DeviceBuffer workspace(attention_bwd_workspace(card.args));
  card.args.workspace = workspace.data(), card.args.workspace_size = workspace.size();
  const CapturedGraph graph([&](Stream stream) { require_ok(attention_bwd(card.args, stream)); });
  graph.replay(20);
  card.fetch();
  const Outputs got(call);
  EXPECT_TRUE(same_bits(want.dq, got.dq) && same_bits(want.dk, got.dk) && same_bits(want.dv, got.dv));
}
#endif

std::vector<AttentionCase> card_cases() {
  std::vector<AttentionCase> cases = backward_cases();
  cases.push_back({.name = "causal_1024",
                   .lens_q = {1024},
                   .lens_k = {1024},
                   .num_heads_q = 2,
                   .num_heads_kv = 2,
                   .head_dim = 128,
                   .head_dim_v = 128,
                   .mask = kCausalMask});
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Cases, BackwardSm100OnCard, testing::ValuesIn(card_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace mxflash::kit
