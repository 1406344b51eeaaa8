// The backward's kernels for Blackwell on a Hopper card, tcgen05 in software (ptx/tcgen05_emulated.cuh): copies by TMA,
// mbarriers, registers, shared memory and the grid are real. Judged as in simulation.
#include <deque>
#include "attention/attention_bwd_sm100_call.h"
#include "attention/attention_bwd_sm100_dkdv.cuh"
#include "attention/attention_bwd_sm100_dq.cuh"
#include "attention_bwd_sm100_problem.h"
#include "on_hopper.h"

namespace mxflash::kit {
namespace {

using namespace bwd_sm100;

template <int kDim>
__global__ void __launch_bounds__(kPreThreads) pre_kernel(const __grid_constant__ PreParams p) {
  pre_body<kDim>(p);
}
template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) dkdv_kernel(const __grid_constant__ Params p) {
  dkdv_body<kDim>(p);
}
template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) dq_kernel(const __grid_constant__ Params p) {
  dq_body<kDim>(p);
}

// The call with its memory on the card.
class OnCard {
 public:
  explicit OnCard(BackwardCall& call) : call_(call), args(call.args) {
    for (MxTensor* t : {&args.q, &args.k, &args.v, &args.dout, &args.dk_mx, &args.dv_mx}) move(t->data), move(t->scale);
    for (Tensor* t : {&args.out, &args.lse, &args.row_exponent, &args.dlse, &args.dq, &args.dk, &args.dv}) move(*t);
    for (Jagged* seq : {&args.seq_q, &args.seq_k}) {
      if (!seq->cu_seqlens) continue;
      const DeviceBuffer& copy = keep(upload(std::vector<int32_t>(seq->cu_seqlens, seq->cu_seqlens + seq->batch + 1)));
      seq->cu_seqlens = static_cast<const int32_t*>(copy.data());
    }
  }
  // "", or what CUDA says.
  std::string run(uint32_t grid) {
    return kernel_dim(AttentionShape::of(args)) == 128 ? run_kernels<128>(grid) : run_kernels<64>(grid);
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

  template <int kDim>
  std::string run_kernels(uint32_t grid) {
    const AttentionShape s = AttentionShape::of(args);
    const DeviceBuffer workspace(Workspace(nullptr, s).used);
    workspace.fill(0xFF, nullptr);
    const Workspace w(workspace.data(), s);
    Params keys{}, queries{};
    require_ok(keys_params(args, w, keys));
    require_ok(queries_params(args, w, queries));
    if (keys.items.plan.order) require_ok(keys.items.write_plan(kOwnRows, nullptr));
    if (queries.items.plan.order) require_ok(queries.items.write_plan(kOwnRows, nullptr));
    constexpr int kKeysBytes = KeysConfig<kDim>::kBytes, kQueriesBytes = QueriesConfig<kDim>::kBytes;
    cudaFuncSetAttribute(dkdv_kernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kKeysBytes);
    cudaFuncSetAttribute(dq_kernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kQueriesBytes);
    if (pre_grid(s) > 0) pre_kernel<kDim><<<uint32_t(pre_grid(s)), kPreThreads>>>(pre_params(args, w));
    dkdv_kernel<kDim><<<grid, kThreads, kKeysBytes>>>(keys);
    dq_kernel<kDim><<<grid, kThreads, kQueriesBytes>>>(queries);
    if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) return cudaGetErrorString(error);
    copy_back(args.dq, call_.args.dq), copy_back(args.dk, call_.args.dk), copy_back(args.dv, call_.args.dv);
    copy_back(args.dk_mx.data, call_.args.dk_mx.data), copy_back(args.dk_mx.scale, call_.args.dk_mx.scale);
    copy_back(args.dv_mx.data, call_.args.dv_mx.data), copy_back(args.dv_mx.scale, call_.args.dv_mx.scale);
    return "";
  }

  BackwardCall& call_;
  std::deque<DeviceBuffer> buffers_;

 public:
  AttentionBwd args;
};

class EmulatedBackward : public OnHopper, public testing::WithParamInterface<AttentionCase> {};

TEST_P(EmulatedBackward, WithinBoundsAndSameBitsTwice) {
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

std::vector<AttentionCase> emulated_cases() {
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
INSTANTIATE_TEST_SUITE_P(Cases, EmulatedBackward, testing::ValuesIn(emulated_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace mxflash::kit
