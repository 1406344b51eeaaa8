// Which backend a call takes and what it says when there is none; what a call costs and says without running: size
// queries from shapes alone, generous bounds, the number of threads.
#include <gtest/gtest.h>

#ifdef __linux__
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "kit/random.h"
#include "kit/runner.h"
#include "mxflash/backend.h"
#include "mxflash/gemm.h"
#include "mxflash/operator.h"
#include "mxflash/rmsnorm.h"
#include "runtime/dispatch.h"
#include "status_check.h"

namespace mxflash {
namespace {

constexpr auto kUnavailable = StatusCode::unavailable;
constexpr auto kUnsupported = StatusCode::unsupported;

// ---- lists ------------------------------------------------------------------------------------------------------

struct Probe {
  const char* backend = nullptr;
};
using List = std::vector<const Impl<Probe>*>;

Status yes() { return {}; }
Status no_device() { return make_status(kUnavailable, "no device"); }
Status any(const Probe&) { return {}; }
Status never(const Probe&) { return unsupported("probe: picky: head_dim must be 64, got %d", 96); }
Status not_even_ref(const Probe&) { return unsupported("probe: strict: head_dim must be 32, got %d", 96); }
Status run_probe(const Probe&, Stream) { return {}; }

constexpr Impl<Probe> impl(const char* name, DeviceType device, Status (*available)(),
                           Status (*supports)(const Probe&)) {
  return {.name = name,
          .target = "a test",
          .device = device,
          .available = available,
          .supports = supports,
          .workspace = nullptr,
          .run = run_probe};
}
constexpr auto kCpu = DeviceType::cpu, kCuda = DeviceType::cuda;
constexpr Impl<Probe> kFast = impl("fast", kCpu, no_device, any);
constexpr Impl<Probe> kPicky = impl("picky", kCpu, yes, never);
constexpr Impl<Probe> kStrict = impl("strict", kCpu, yes, not_even_ref);
constexpr Impl<Probe> kRef = impl("ref", kCpu, yes, any);
constexpr Impl<Probe> kGpu = impl("gpu", kCuda, yes, any);
constexpr Impl<Probe> kPickyGpu = impl("picky", kCuda, yes, never);
constexpr Impl<Probe> kFastGpu = impl("fast", kCuda, no_device, any);

Choice<Probe> choose_from(const List& list, const char* name = nullptr, Device device = {}) {
  return choose<Probe>("probe", list, Probe{name}, device);
}
void expect_refusal(const List& list, StatusCode code, const std::string& pattern, Device device = {},
                    const char* name = nullptr) {
  const Choice<Probe> choice = choose_from(list, name, device);
  EXPECT_EQ(choice.impl, nullptr);
  expect_status(choice.status, code, pattern);
}

class Dispatch : public testing::Test {
  const Environment environment_{""};
};

TEST_F(Dispatch, AVariantStandsForItsBackendWhereThereIsNone) {
  static constexpr Impl<Probe> kSm90 = impl("sm90", kCpu, yes, any), kExact = impl("sm90_bf16", kCpu, yes, any);
  EXPECT_EQ(choose_from({&kSm90, &kExact, &kRef}, "sm90_bf16").impl, &kExact);
  EXPECT_EQ(choose_from({&kSm90, &kRef}, "sm90_bf16").impl, &kSm90);
  EXPECT_EQ(choose_from({&kSm90, &kExact, &kRef}, "sm90").impl, &kSm90);
  expect_refusal({&kExact, &kRef}, kUnavailable, "probe: backend must be one of sm90_bf16, ref, got 'sm90'", {},
                 "sm90");
  for (const char* name : {"sm90_bf61", "sm90_", "ref_bf16", "ref_"}) {  // no other name is one
    expect_refusal({&kSm90, &kRef}, kUnavailable,
                   std::string("probe: backend must be one of sm90, ref, got '") + name + "'", {}, name);
  }
}

TEST_F(Dispatch, TakesTheFirstThatCanAndNeverFallsBackWhenForced) {
  const List list{&kFast, &kPicky, &kRef};
  EXPECT_EQ(choose_from(list).impl, &kRef);
  EXPECT_EQ(choose_from(list, "ref").impl, &kRef);
  expect_refusal(list, kUnavailable, "probe: fast: no device", {}, "fast");
  expect_refusal(list, kUnsupported, "probe: picky: head_dim must be 64, got 96", {}, "picky");
  expect_refusal(list, kUnavailable, "probe: backend must be one of fast, picky, ref, got 'Ref'", {}, "Ref");
}

// What the last available one says: the list ends with the one that supports most.
TEST_F(Dispatch, ReportsTheRefusalOfTheLastAvailableBackend) {
  expect_refusal({&kPicky, &kStrict}, kUnsupported, "probe: strict: head_dim must be 32, got 96");
  expect_refusal({&kStrict, &kPicky}, kUnsupported, "probe: picky: head_dim must be 64, got 96");
  expect_refusal({&kPicky, &kFast}, kUnsupported, "probe: picky: head_dim must be 64, got 96");
  expect_refusal({&kFast, &kPicky}, kUnsupported, "probe: picky: head_dim must be 64, got 96");
  expect_refusal({&kFast}, kUnavailable, "probe: fast: no device");
}

TEST_F(Dispatch, ConsidersOnlyBackendsOfTheTensorsDevice) {
  const Device cuda{kCuda, 3};
  const List mixed{&kGpu, &kRef};
  EXPECT_EQ(choose_from(mixed).impl, &kRef);
  EXPECT_EQ(choose_from(mixed, nullptr, cuda).impl, &kGpu);
  expect_refusal({&kPickyGpu, &kRef}, kUnsupported, "probe: picky: head_dim must be 64, got 96", cuda);
  expect_refusal({&kFastGpu, &kStrict}, kUnavailable, "probe: fast: no device", cuda);
  expect_refusal({&kPickyGpu, &kStrict}, kUnsupported, "probe: strict: head_dim must be 32, got 96");
  expect_refusal({&kPicky, &kRef}, kUnavailable, "probe: no backend for tensors on cuda:3, got only picky, ref", cuda);
  expect_refusal({&kGpu}, kUnavailable, "probe: no backend for tensors on cpu:0, got only gpu");
  expect_refusal({}, kUnavailable, "probe: no backend for tensors on cpu:0*");
  expect_refusal(mixed, kUnsupported, "probe: ref: tensors must be on cpu, got cuda:3", cuda, "ref");
  expect_refusal(mixed, kUnsupported, "probe: gpu: tensors must be on cuda, got cpu:0", {}, "gpu");
}

TEST_F(Dispatch, ListsEveryOperationAndNothingElse) {
  for (int32_t i = 0; i < kNumOperations; ++i) {
    const auto op = Operation(i);
    const int32_t n = num_backends(op);
    ASSERT_GE(n, 1) << operation_name(op);
    EXPECT_STREQ(backend_info(op, n - 1).name, "ref");
    EXPECT_TRUE(backend_info(op, n - 1).available.ok());
    EXPECT_EQ(backend_info(op, n).name, nullptr);
    EXPECT_EQ(backend_info(op, -1).name, nullptr);
  }
  EXPECT_EQ(num_backends(Operation(kNumOperations)), 0);
  EXPECT_STREQ(operation_name(Operation(-1)), "invalid");
}

// ---- calls ------------------------------------------------------------------------------------------------------

// Every operation over 16 tokens in one sequence, all its memory taken beforehand.
constexpr int64_t kTokens = 16, kHeads = 2, kDim = 64;
constexpr int32_t kCu[] = {0, kTokens};

class Calls {
 public:
  // `max_seqlen` bounds the length of the one sequence.
  explicit Calls(int32_t max_seqlen) : seq{kCu, 1, max_seqlen} {
    kit::Random random(31, 1);
    for (auto* x : {&in, &dout}) kit::fill_normal(random, *x);
    for (kit::OwnedMx* t : {&q, &k, &v, &mx_dout, &mx_out, &mx_norm, &mx_gemm, &dk_mx, &dv_mx}) {
      *t = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, kTokens, kHeads, kDim, seq);
    }
    for (kit::OwnedMx* t : {&q, &k, &v, &mx_dout}) {
      kit::require_ok(quantize({.in = floats(in), .out = t->view, .seq = seq}));
    }
    quantize_args = {.in = floats(in), .out = mx_out.view, .seq = seq, .smooth = true};
    quantize_args.mean = make_tensor(mean.data(), Dtype::f32, 1, kHeads, kDim);
    dequantize_args = {.in = q.view, .out = floats(back), .seq = seq};
    norm_out = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, kTokens, 1, kDim, seq);
    MxTensor rows = norm_out.view;
    rows.data = make_tensor(norm_out.data.data(), Dtype::e4m3, kTokens, kDim);
    rmsnorm_args = {.in = make_tensor(in.data(), Dtype::f32, kTokens, kDim),
                    .weight = make_tensor(in.data(), Dtype::f32, kDim),
                    .out = rows,
                    .seq = seq};
    rmsnorm_bwd_args = {.h = make_tensor(in.data(), Dtype::f32, kTokens, kDim),
                        .weight = make_tensor(in.data(), Dtype::f32, kDim),
                        .rstd = make_tensor(dlse.data(), Dtype::f32, kTokens),
                        .dy_mx = rows,
                        .dx = make_tensor(norm_dx.data(), Dtype::f32, kTokens, kDim),
                        .dw = make_tensor(norm_dw.data(), Dtype::f32, kDim),
                        .seq = seq};
    give(rmsnorm_bwd_args, rmsnorm_bwd_workspace(rmsnorm_bwd_args));
    gemm_args = {.a = make_tensor(in.data(), Dtype::f32, kTokens, 8),
                 .b = make_tensor(in.data(), Dtype::f32, kHeads * kDim, 8),
                 .out = mx_gemm.view,
                 .seq = seq};
    fwd = {.q = q.view, .k = k.view, .v = v.view, .out = floats(out), .lse = rows_of(lse), .seq_q = seq, .seq_k = seq};
    bwd = {.q = q.view,
           .k = k.view,
           .v = v.view,
           .dout = mx_dout.view,
           .out = fwd.out,
           .lse = fwd.lse,
           .dq = floats(dq),
           .dk = floats(dk),
           .dv = floats(dv),
           .dk_mx = dk_mx.view,
           .dv_mx = dv_mx.view,
           .seq_q = seq,
           .seq_k = seq};
    op_fwd = {.q = floats(in),
              .k = floats(in),
              .v = floats(in),
              .out = floats(op_out),
              .lse = rows_of(op_lse),
              .seq_q = seq,
              .seq_k = seq};
    give(fwd, attention_fwd_workspace(fwd));
    give(bwd, attention_bwd_workspace(bwd));
    memory.emplace_back(operator_saved(op_fwd));
    op_fwd.saved = memory.back().data();
    op_fwd.saved_size = memory.back().size();
    give(op_fwd, operator_fwd_workspace(op_fwd));
    op_bwd = {.fwd = op_fwd,
              .dout = floats(dout),
              .dlse = rows_of(dlse),
              .dq = floats(op_dq),
              .dk = floats(op_dk),
              .dv = floats(op_dv)};
    give(op_bwd, operator_bwd_workspace(op_bwd));
  }

  // In an order in which each finds what it reads.
  std::vector<std::pair<const char*, std::function<Status()>>> all() const {
    return {{"quantize", [this] { return quantize(quantize_args); }},
            {"dequantize", [this] { return dequantize(dequantize_args); }},
            {"rmsnorm_quantize", [this] { return rmsnorm_quantize(rmsnorm_args); }},
            {"rmsnorm_bwd", [this] { return rmsnorm_bwd(rmsnorm_bwd_args); }},
            {"gemm_quantize", [this] { return gemm_quantize(gemm_args); }},
            {"attention_fwd", [this] { return attention_fwd(fwd); }},
            {"attention_bwd", [this] { return attention_bwd(bwd); }},
            {"operator_fwd", [this] { return operator_fwd(op_fwd); }},
            {"operator_bwd", [this] { return operator_bwd(op_bwd); }}};
  }
  std::vector<std::vector<float>> floats_written() const {
    return {mean, back, norm_dx, norm_dw, out, lse, dq, dk, dv, op_out, op_lse, op_dq, op_dk, op_dv};
  }
  std::vector<std::vector<uint8_t>> bytes_written() const {
    std::vector<std::vector<uint8_t>> all;
    for (const kit::OwnedMx* t : {&mx_out, &norm_out, &mx_gemm, &dk_mx, &dv_mx}) {
      all.push_back(t->data);
      all.push_back(t->scale);
    }
    return all;
  }

  static Tensor floats(std::vector<float>& x) { return make_tensor(x.data(), Dtype::f32, kTokens, kHeads, kDim); }
  static Tensor rows_of(std::vector<float>& x) { return make_tensor(x.data(), Dtype::f32, kHeads, kTokens); }
  static std::vector<float> elements() { return std::vector<float>(size_t(kTokens * kHeads * kDim)); }
  static std::vector<float> rows() { return std::vector<float>(size_t(kTokens * kHeads), 0.5f); }

  Jagged seq;
  std::vector<float> in = elements(), dout = elements(), back = elements(), mean = elements();
  std::vector<float> out = elements(), dq = elements(), dk = elements(), dv = elements(), lse = rows();
  std::vector<float> op_out = elements(), op_dq = elements(), op_dk = elements(), op_dv = elements();
  std::vector<float> op_lse = rows(), dlse = rows(), norm_dx = elements(), norm_dw = elements();
  kit::OwnedMx q, k, v, mx_dout, mx_out, mx_norm, norm_out, mx_gemm, dk_mx, dv_mx;
  Quantize quantize_args;
  Dequantize dequantize_args;
  RmsnormQuantize rmsnorm_args;
  RmsnormBwd rmsnorm_bwd_args;
  GemmQuantize gemm_args;
  AttentionFwd fwd;
  AttentionBwd bwd;
  OperatorFwd op_fwd;
  OperatorBwd op_bwd;

 private:
  template <class Args>
  void give(Args& args, size_t size) {
    ASSERT_GT(size, 0u);
    memory.emplace_back(size);
    args.workspace = memory.back().data();
    args.workspace_size = size;
  }
  std::vector<kit::AlignedBuffer> memory;
};

// A bound on the lengths is only a bound: no loop runs to it.
TEST_F(Dispatch, AGenerousMaxSeqlenCostsNothing) {
  Calls exact(kTokens), generous(1 << 30);
  for (const auto& [name, run] : exact.all()) kit::require_ok(run());
  for (const auto& [name, run] : generous.all()) {
    const auto start = std::chrono::steady_clock::now();
    const Status s = run();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    EXPECT_TRUE(s.ok()) << s.message;
    EXPECT_LT(took.count(), 100) << name;
  }
  EXPECT_EQ(generous.floats_written(), exact.floats_written());
  EXPECT_EQ(generous.bytes_written(), exact.bytes_written());
}

void move_to_cuda(Tensor& t) { t.device = {kCuda, 1}; }
void move_to_cuda(MxTensor& t) { t.data.device = t.scale.device = {kCuda, 1}; }
void to_cuda(auto&... tensors) { (move_to_cuda(tensors), ...); }

TEST_F(Dispatch, CudaTensorsWithCpuBackendsAreRefusedByName) {
  for (int32_t op = 0; op < kNumOperations; ++op) {
    for (int32_t i = 0; i < num_backends(Operation(op)); ++i) {
      const BackendInfo b = backend_info(Operation(op), i);
      const bool would_run = b.available.ok() && std::string_view(b.name).starts_with("sm");
      if (would_run) GTEST_SKIP() << b.name << " would take host memory for its own";
    }
  }
  Calls c(kTokens);
  c.seq = {};  // cu_seqlens would be device memory
  const auto expect_cuda = [](const Status& s, const char* op) {
    EXPECT_TRUE(s.code == kUnavailable || s.code == kUnsupported) << status_code_name(s.code);
    EXPECT_TRUE(std::string_view(s.message).starts_with(op)) << s.message;
    // No backend for such tensors, or one that cannot run here.
    const std::string_view message = s.message;
    EXPECT_TRUE(message.find("cuda:1") != message.npos || message.find(": sm90") != message.npos) << message;
  };
  c.quantize_args.seq = c.dequantize_args.seq = c.rmsnorm_args.seq = c.gemm_args.seq = {};
  c.rmsnorm_bwd_args.seq = {};
  c.fwd.seq_q = c.fwd.seq_k = c.bwd.seq_q = c.bwd.seq_k = c.op_fwd.seq_q = c.op_fwd.seq_k = {};
  to_cuda(c.quantize_args.in, c.quantize_args.out, c.quantize_args.mean, c.dequantize_args.in, c.dequantize_args.out);
  to_cuda(c.rmsnorm_args.in, c.rmsnorm_args.weight, c.rmsnorm_args.out);
  to_cuda(c.rmsnorm_bwd_args.h, c.rmsnorm_bwd_args.weight, c.rmsnorm_bwd_args.rstd, c.rmsnorm_bwd_args.dy_mx);
  to_cuda(c.rmsnorm_bwd_args.dx, c.rmsnorm_bwd_args.dw);
  to_cuda(c.gemm_args.a, c.gemm_args.b, c.gemm_args.out);
  to_cuda(c.fwd.q, c.fwd.k, c.fwd.v, c.fwd.out, c.fwd.lse);
  to_cuda(c.bwd.q, c.bwd.k, c.bwd.v, c.bwd.dout, c.bwd.out, c.bwd.lse, c.bwd.dq, c.bwd.dk, c.bwd.dv);
  to_cuda(c.bwd.dk_mx, c.bwd.dv_mx, c.op_fwd.q, c.op_fwd.k, c.op_fwd.v, c.op_fwd.out, c.op_fwd.lse);
  c.op_bwd.fwd = c.op_fwd;
  to_cuda(c.op_bwd.dout, c.op_bwd.dlse, c.op_bwd.dq, c.op_bwd.dk, c.op_bwd.dv);
  for (const auto& [name, run] : c.all()) {
    SCOPED_TRACE(name);
    expect_cuda(run(), name);
  }
  EXPECT_EQ(attention_fwd_workspace(c.fwd), 0u);
  EXPECT_EQ(attention_bwd_workspace(c.bwd), 0u);
  EXPECT_EQ(rmsnorm_bwd_workspace(c.rmsnorm_bwd_args), 0u);
}

// ---- size queries -----------------------------------------------------------------------------------------------

void forget(Tensor& t) { t.data = nullptr; }
void forget(MxTensor& t) { t.data.data = t.scale.data = nullptr; }
void forget_all(auto&... tensors) { (forget(tensors), ...); }

TEST_F(Dispatch, SizesFollowFromShapesAlone) {
  for (const Recipe& recipe : {Recipe{}, Recipe{.block = MxBlock::row32, .block_col = MxBlock::col32}}) {
    Calls c(kTokens);
    c.op_fwd.recipe = c.op_bwd.fwd.recipe = recipe;
    AttentionFwd fwd = c.fwd;
    forget_all(fwd.q, fwd.k, fwd.v, fwd.out, fwd.lse);
    EXPECT_EQ(attention_fwd_workspace(fwd), attention_fwd_workspace(c.fwd));
    EXPECT_GT(attention_fwd_workspace(fwd), 0u);
    EXPECT_EQ(attention_fwd(fwd).code, StatusCode::invalid_argument) << "the call itself needs the data";

    c.bwd.dlse = Calls::rows_of(c.dlse);
    AttentionBwd bwd = c.bwd;
    forget_all(bwd.q, bwd.k, bwd.v, bwd.dout, bwd.out, bwd.lse, bwd.dlse, bwd.dq, bwd.dk, bwd.dv);
    forget_all(bwd.dk_mx, bwd.dv_mx);
    EXPECT_EQ(attention_bwd_workspace(bwd), attention_bwd_workspace(c.bwd));
    EXPECT_GT(attention_bwd_workspace(bwd), 0u);
    EXPECT_EQ(attention_bwd(bwd).code, StatusCode::invalid_argument);

    c.rmsnorm_bwd_args.dh = c.rmsnorm_bwd_args.h;
    RmsnormBwd norm = c.rmsnorm_bwd_args;
    forget_all(norm.h, norm.weight, norm.rstd, norm.dy_mx, norm.dh, norm.dx, norm.dw);
    EXPECT_EQ(rmsnorm_bwd_workspace(norm), rmsnorm_bwd_workspace(c.rmsnorm_bwd_args));
    EXPECT_GT(rmsnorm_bwd_workspace(norm), 0u);
    EXPECT_EQ(rmsnorm_bwd(norm).code, StatusCode::invalid_argument);

    OperatorFwd op_fwd = c.op_fwd;
    forget_all(op_fwd.q, op_fwd.k, op_fwd.v, op_fwd.out, op_fwd.lse);
    op_fwd.saved = op_fwd.workspace = nullptr;
    EXPECT_EQ(operator_saved(op_fwd), operator_saved(c.op_fwd));
    EXPECT_GT(operator_saved(op_fwd), 0u);
    EXPECT_EQ(operator_fwd_workspace(op_fwd), operator_fwd_workspace(c.op_fwd));
    EXPECT_GT(operator_fwd_workspace(op_fwd), 0u);
    EXPECT_EQ(operator_fwd(op_fwd).code, StatusCode::invalid_argument);

    OperatorBwd op_bwd = c.op_bwd;
    op_bwd.fwd = op_fwd;
    forget_all(op_bwd.dout, op_bwd.dlse, op_bwd.dq, op_bwd.dk, op_bwd.dv);
    EXPECT_EQ(operator_bwd_workspace(op_bwd), operator_bwd_workspace(c.op_bwd));
    EXPECT_GT(operator_bwd_workspace(op_bwd), 0u);
    EXPECT_EQ(operator_bwd(op_bwd).code, StatusCode::invalid_argument);
  }
}

// ---- threads ----------------------------------------------------------------------------------------------------

#ifdef __linux__
TEST_F(Dispatch, NumThreadsRespectsTheAffinityMask) {
  constexpr int kNotPermitted = 250;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    cpu_set_t mine, one;
    if (sched_getaffinity(0, sizeof mine, &mine) != 0) _exit(kNotPermitted);
    int first = 0;
    while (!CPU_ISSET(first, &mine)) ++first;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0) _exit(kNotPermitted);
    set_num_threads(0);
    const int32_t by_default = num_threads();
    set_num_threads(3);  // a number that was set counts more
    _exit(by_default == 1 && num_threads() == 3 ? 0 : 1 + by_default);
  }
  int state = 0;
  ASSERT_EQ(waitpid(child, &state, 0), child);
  ASSERT_TRUE(WIFEXITED(state));
  if (WEXITSTATUS(state) == kNotPermitted) GTEST_SKIP() << "the affinity mask may not be changed here";
  EXPECT_EQ(WEXITSTATUS(state), 0);
}
#endif

}  // namespace
}  // namespace mxflash
