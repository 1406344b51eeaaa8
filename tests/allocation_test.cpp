// Memory of the library's own: there is none, not even for starting threads (their stacks come from the system). This
// program's operator new counts, and fails where it is told to.
#include <gtest/gtest.h>
#include <mxflash/backend.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>
#include <vector>

#include "kit/random.h"
#include "kit/runner.h"

namespace {

std::atomic<int64_t> g_allocations{0};  // since the last arm()
std::atomic<int64_t> g_first_failure{std::numeric_limits<int64_t>::max()};
std::atomic<int64_t> g_last_failure{0};

void* allocate(size_t size, size_t align) {
  const int64_t n = g_allocations.fetch_add(1) + 1;
  if (n >= g_first_failure.load() && n <= g_last_failure.load()) throw std::bad_alloc();
  void* p = align <= alignof(std::max_align_t) ? std::malloc(size > 0 ? size : 1)
                                               : std::aligned_alloc(align, (size / align + 1) * align);
  if (!p) throw std::bad_alloc();
  return p;
}

// Allocations first .. last from now on fail.
void arm(int64_t first, int64_t last) {
  g_allocations = 0;
  g_first_failure = first;
  g_last_failure = last;
}
void disarm() { arm(std::numeric_limits<int64_t>::max(), 0); }

}  // namespace

void* operator new(size_t size) { return allocate(size, 1); }
void* operator new[](size_t size) { return allocate(size, 1); }
void* operator new(size_t size, std::align_val_t align) { return allocate(size, size_t(align)); }
void* operator new[](size_t size, std::align_val_t align) { return allocate(size, size_t(align)); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace mxflash {
namespace {

using kit::AlignedBuffer;
using kit::OwnedMx;

constexpr int64_t kTokens = 300, kHeads = 2, kDim = 64;  // several work items for every loop
constexpr int32_t kThreads = 4;

std::vector<float> normal(uint64_t stream) {
  std::vector<float> x(size_t(kTokens * kHeads * kDim));
  kit::Random random(29, stream);
  kit::fill_normal(random, x);
  return x;
}

// Memory for every call with up to kThreads threads, taken beforehand, and the calls. Leaves the library with one
// thread: the others start in a test.
class Calls {
 public:
  Calls() {
    set_num_threads(1);
    for (OwnedMx* t : {&q_, &k_, &v_, &dout_}) *t = mx();
    kit::require_ok(quantize({.in = floats(in_q_), .out = q_.view}));
    kit::require_ok(quantize({.in = floats(in_k_), .out = k_.view}));
    kit::require_ok(quantize({.in = floats(in_v_), .out = v_.view}));
    kit::require_ok(quantize({.in = floats(in_dout_), .out = dout_.view}));
    quantize_ = {.in = floats(in_q_),
                 .out = out_mx_.view,
                 .smooth = true,
                 .mean = make_tensor(mean_.data(), Dtype::f32, 1, kHeads, kDim),
                 .rotate = true,
                 .stats = &stats_};
    fwd_ = {.q = q_.view, .k = k_.view, .v = v_.view, .out = floats(out_), .lse = rows(lse_)};
    set_num_threads(kThreads);
    fwd_workspace_ = AlignedBuffer(attention_fwd_workspace(fwd_));
    set_num_threads(1);
    fwd_.workspace = fwd_workspace_.data();
    fwd_.workspace_size = fwd_workspace_.size();
    kit::require_ok(attention_fwd(fwd_));
    set_num_threads(kThreads);
    bwd_ = {.q = q_.view,
            .k = k_.view,
            .v = v_.view,
            .dout = dout_.view,
            .out = fwd_.out,
            .lse = fwd_.lse,
            .dq = floats(dq_),
            .dk = floats(dk_),
            .dv = floats(dv_)};
    bwd_workspace_ = AlignedBuffer(attention_bwd_workspace(bwd_));
    bwd_.workspace = bwd_workspace_.data();
    bwd_.workspace_size = bwd_workspace_.size();
    op_fwd_ = {.q = floats(in_q_),
               .k = floats(in_k_),
               .v = floats(in_v_),
               .out = floats(op_out_),
               .lse = rows(op_lse_),
               .stats = &op_stats_};
    saved_ = AlignedBuffer(operator_saved(op_fwd_));
    op_fwd_.saved = saved_.data();
    op_fwd_.saved_size = saved_.size();
    op_workspace_ = AlignedBuffer(operator_fwd_workspace(op_fwd_));
    op_fwd_.workspace = op_workspace_.data();
    op_fwd_.workspace_size = op_workspace_.size();
    op_bwd_ = {.fwd = op_fwd_,
               .dout = floats(in_dout_),
               .dlse = rows(dlse_),
               .dq = floats(op_dq_),
               .dk = floats(op_dk_),
               .dv = floats(op_dv_)};
    op_bwd_workspace_ = AlignedBuffer(operator_bwd_workspace(op_bwd_));
    op_bwd_.workspace = op_bwd_workspace_.data();
    op_bwd_.workspace_size = op_bwd_workspace_.size();
    set_num_threads(1);
  }

  Status run_quantize() { return quantize(quantize_); }
  Status run_dequantize() { return dequantize({.in = q_.view, .out = floats(back_)}); }
  Status run_attention_fwd() { return attention_fwd(fwd_); }
  Status run_attention_bwd() { return attention_bwd(bwd_); }
  Status run_operator_fwd() { return operator_fwd(op_fwd_); }
  Status run_operator_bwd() { return operator_bwd(op_bwd_); }

  void clear_outputs() {
    for (auto* x : {&back_, &mean_, &out_, &lse_, &dq_, &dk_, &dv_, &op_out_, &op_lse_, &op_dq_, &op_dk_, &op_dv_}) {
      if (x != &out_ && x != &lse_ && x != &op_out_) std::fill(x->begin(), x->end(), -7.0f);
    }
    std::fill(out_mx_.data.begin(), out_mx_.data.end(), uint8_t(0xAB));
    std::fill(out_mx_.scale.begin(), out_mx_.scale.end(), uint8_t(0xAB));
  }
  // out, lse and op_out are inputs of the backward, so they are kept and only compared.
  std::vector<std::vector<float>> floats_written() const {
    return {back_, mean_, out_, lse_, dq_, dk_, dv_, op_out_, op_lse_, op_dq_, op_dk_, op_dv_};
  }
  std::vector<std::vector<uint8_t>> bytes_written() const { return {out_mx_.data, out_mx_.scale}; }

 private:
  static OwnedMx mx() {
    return kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, kTokens, kHeads, kDim, {});
  }
  static Tensor floats(std::vector<float>& x) { return make_tensor(x.data(), Dtype::f32, kTokens, kHeads, kDim); }
  static Tensor rows(std::vector<float>& x) { return make_tensor(x.data(), Dtype::f32, kHeads, kTokens); }
  static std::vector<float> elements() { return std::vector<float>(size_t(kTokens * kHeads * kDim)); }
  static std::vector<float> row_values() { return std::vector<float>(size_t(kTokens * kHeads), 0.25f); }

  std::vector<float> in_q_ = normal(1), in_k_ = normal(2), in_v_ = normal(3), in_dout_ = normal(4);
  OwnedMx q_, k_, v_, dout_, out_mx_ = mx();
  std::vector<float> back_ = elements(), mean_ = std::vector<float>(size_t(kHeads * kDim));
  std::vector<float> out_ = elements(), dq_ = elements(), dk_ = elements(), dv_ = elements(), lse_ = row_values();
  std::vector<float> op_out_ = elements(), op_dq_ = elements(), op_dk_ = elements(), op_dv_ = elements();
  std::vector<float> op_lse_ = row_values(), dlse_ = row_values();
  QuantizeStats stats_;
  OperatorStats op_stats_;
  Quantize quantize_;
  AttentionFwd fwd_;
  AttentionBwd bwd_;
  OperatorFwd op_fwd_;
  OperatorBwd op_bwd_;
  AlignedBuffer fwd_workspace_, bwd_workspace_, saved_, op_workspace_, op_bwd_workspace_;
};

struct NamedCall {
  const char* name;
  Status (Calls::*run)();
};
// In an order in which each finds what the one before it wrote.
constexpr NamedCall kCalls[] = {
    {"quantize", &Calls::run_quantize},           {"dequantize", &Calls::run_dequantize},
    {"attention_fwd", &Calls::run_attention_fwd}, {"attention_bwd", &Calls::run_attention_bwd},
    {"operator_fwd", &Calls::run_operator_fwd},   {"operator_bwd", &Calls::run_operator_bwd}};

class Allocation : public testing::Test {
 protected:
  // Runs all calls without memory; returns the most allocations that one of them tried.
  int64_t run_all(Calls& calls) {
    int64_t most = 0;
    calls.clear_outputs();
    for (const NamedCall& call : kCalls) {
      arm(1, std::numeric_limits<int64_t>::max());
      const Status s = (calls.*call.run)();
      most = std::max(most, g_allocations.load());
      disarm();
      EXPECT_TRUE(s.ok()) << call.name << ": " << s.message;
    }
    return most;
  }
  void TearDown() override { set_num_threads(0); }
};

TEST_F(Allocation, NoCallNeedsAny) {
  Calls calls;
  EXPECT_EQ(run_all(calls), 0);
  const auto floats = calls.floats_written();
  const auto bytes = calls.bytes_written();
  for (int32_t threads = 2; threads <= kThreads; ++threads) {  // one more is started each time
    set_num_threads(threads);
    EXPECT_EQ(run_all(calls), 0) << threads << " threads";
    EXPECT_EQ(calls.floats_written(), floats);
    EXPECT_EQ(calls.bytes_written(), bytes);
  }
}

// The counter counts, and the failures happen.
TEST_F(Allocation, TheTestsOwnOperatorNewIsInPlace) {
  // By name: a new-expression whose memory nobody uses may be left out by the compiler.
  const auto allocate = [] { ::operator delete(::operator new(4)); };
  arm(2, 2);
  allocate();
  EXPECT_THROW(allocate(), std::bad_alloc);
  allocate();
  EXPECT_EQ(g_allocations.load(), 3);
  disarm();
}

}  // namespace
}  // namespace mxflash
