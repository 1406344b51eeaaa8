// Attention on backend `cpu`, on every instruction set that this CPU has and in either CpuMath: what its closeness to
// exact attention (check_test) does not show. Memory of long sequences; bits that do not depend on threads, executors,
// other callers, strides and what lies in and around buffers; where NaN goes; identities that hold to the bit; and
// never further from exact attention than ref.
#include <gtest/gtest.h>
#include <mxflash/attention.h>
#include <mxflash/backend.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu_isas.h"
#include "kit/cases.h"
#include "kit/compare.h"
#include "kit/mx_attention.h"
#include "kit/operands.h"
#include "kit/oracle.h"
#include "kit/random.h"
#include "kit/runner.h"
#include "mx/scale_layout.h"

namespace mxflash {
namespace {

using kit::AttentionCase;
using kit::AttentionResult;
using kit::Distribution;
using kit::MxAttention;
using kit::Operands;
using kit::OwnedMx;
using kit::require_ok;

constexpr CpuMath kModes[] = {CpuMath::exact, CpuMath::fast};
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr Mask kCausal{.causal = true};

class CpuAttention : public EveryIsa {
 protected:
  void TearDown() override {
    set_num_threads(0);
    set_parallel_for(nullptr, nullptr);
  }
};
INSTANTIATE_TEST_SUITE_P(Isas, CpuAttention, testing::ValuesIn(available_isas()), isa_of_test);

MxAttention quantized(const AttentionCase& c, CpuMath math, Dtype grad_element = Dtype::e4m3) {
  MxAttention a = kit::quantize_case(c, kit::make_operands(c), grad_element);
  a.cpu_math = math;
  return a;
}

Operands dequantized(const MxAttention& a) {
  return {.q = kit::ref_dequantize(a.q.view, a.seq_q()),
          .k = kit::ref_dequantize(a.k.view, a.seq_k()),
          .v = kit::ref_dequantize(a.v.view, a.seq_k()),
          .dout = kit::ref_dequantize(a.dout.view, a.seq_out()),
          .dlse = a.dlse};
}

AttentionResult run_cpu(const MxAttention& a) { return kit::run_attention(a, "cpu", "cpu"); }

// What a backward is given.
AttentionResult forward_of(const AttentionResult& r) {
  AttentionResult forward;
  forward.out = r.out;
  forward.lse = r.lse;
  forward.row_exponent = r.row_exponent;
  return forward;
}

// ---- a call in memory that hurts ----------------------------------------------------------------------------------

// Memory that ends where nothing is mapped, and starts as NaN in every format.
class Guarded {
 public:
  explicit Guarded(size_t size) : size_(size) {
    const auto page = size_t(sysconf(_SC_PAGESIZE));
    mapped_ = (size + page - 1) / page * page + page;
    void* base = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<uint8_t*>(base);
    mprotect(base_ + mapped_ - page, page, PROT_NONE);
    data_ = base_ + mapped_ - page - size;
    std::memset(data_, 0xFF, size);
  }
  ~Guarded() { munmap(base_, mapped_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  size_t size_, mapped_;
  uint8_t *base_, *data_;
};

// How tensors lie in memory.
struct Layout {
  Dtype out_dtype = Dtype::f32;
  int64_t gap = 0;     // elements after every row and every token
  bool flip = false;   // heads of the MX operands lie in descending order
  bool means = false;  // with v_mean, k_mean
};

class Strided {
 public:
  template <class... Extent>
  Strided(Dtype dtype, int64_t gap, bool flip, Extent... extent) : view_(make_tensor(nullptr, dtype, extent...)) {
    const auto last = size_t(view_.rank - 1);
    int64_t span = view_.shape[last];
    for (size_t i = last; i-- > 0;) {
      view_.stride[i] = view_.stride[i + 1] * view_.shape[i + 1] + gap;
      span += (view_.shape[i] - 1) * view_.stride[i];
    }
    memory_ = std::make_unique<Guarded>(view_.numel() > 0 ? size_t(span * dtype_size(dtype)) : 0);
    view_.data = memory_->data();
    if (!flip || view_.numel() == 0) return;
    view_.data = memory_->data() + (view_.shape[1] - 1) * view_.stride[1] * dtype_size(dtype);
    view_.stride[1] = -view_.stride[1];
  }
  const Tensor& view() const { return view_; }

  void put(const void* contiguous) {
    each_row([&](uint8_t* row, int64_t at, int64_t size) {
      std::memcpy(row, static_cast<const uint8_t*>(contiguous) + at, size_t(size));
    });
  }
  std::vector<uint8_t> take() const {
    std::vector<uint8_t> x(size_t(view_.numel() * dtype_size(view_.dtype)));
    each_row([&](const uint8_t* row, int64_t at, int64_t size) { std::memcpy(&x[size_t(at)], row, size_t(size)); });
    return x;
  }
  bool gaps_are_untouched() const {
    std::vector<uint8_t> rest(memory_->data(), memory_->data() + memory_->size());
    each_row([&](const uint8_t* row, int64_t, int64_t size) {
      std::fill_n(rest.begin() + (row - memory_->data()), size, uint8_t(0xFF));
    });
    return std::all_of(rest.begin(), rest.end(), [](uint8_t byte) { return byte == 0xFF; });
  }

 private:
  template <class Body>
  void each_row(Body body) const {
    const int64_t cols = view_.shape[size_t(view_.rank - 1)], size = dtype_size(view_.dtype);
    for (int64_t r = 0; r * cols < view_.numel(); ++r) {
      const int64_t inner = view_.rank == 3 ? view_.shape[1] : 1, step = view_.rank == 3 ? view_.stride[1] : 0;
      body(static_cast<uint8_t*>(view_.data) + (r / inner * view_.stride[0] + r % inner * step) * size, r * cols * size,
           cols * size);
    }
  }

  Tensor view_;
  std::unique_ptr<Guarded> memory_;
};

class StridedMx {
 public:
  StridedMx(const OwnedMx& from, const Layout& layout)
      : data_(from.view.data.dtype, layout.gap, layout.flip, from.view.data.shape[0], from.view.data.shape[1],
              from.view.data.shape[2]),
        scale_(from.scale.size()) {
    if (!from.view) return;
    data_.put(from.data.data());
    std::copy(from.scale.begin(), from.scale.end(), scale_.data());
    view = from.view;
    view.data = data_.view();
    view.scale.data = scale_.data();
  }
  MxTensor view{};

 private:
  Strided data_;
  Guarded scale_;
};

using Bits = std::vector<std::pair<const char*, std::vector<uint8_t>>>;

// "" or the first tensor that differs.
std::string difference(const Bits& a, const Bits& b) {
  for (size_t t = 0; t < a.size(); ++t) {
    const std::vector<uint8_t>&x = a[t].second, &y = b[t].second;
    const auto at = std::mismatch(x.begin(), x.end(), y.begin(), y.end()).first - x.begin();
    if (x != y) return std::string(a[t].first) + " differs at byte " + std::to_string(at);
  }
  return "";
}

// Forward, then backward. Nothing that is given to the library, the workspace included, holds anything but NaN where
// the library need not read, and no buffer is longer than it must be.
Bits run_in(const Layout& l, const MxAttention& a) {
  const int64_t total_q = a.q.view.data.shape[0], total_k = a.k.view.data.shape[0], total_out = a.total_out();
  const int64_t heads_q = a.q.view.data.shape[1], heads_kv = a.k.view.data.shape[1];
  const int64_t dim = a.q.view.data.shape[2], dim_v = a.v.view.data.shape[2];
  const StridedMx q(a.q, l), k(a.k, l), v(a.v, l), dout(a.dout, l);
  const StridedMx q_col(a.q_col, l), k_col(a.k_col, l), v_col(a.v_col, l), dout_col(a.dout_col, l);
  const auto strided = [&](Dtype dtype, auto... extent) { return Strided(dtype, l.gap, false, extent...); };
  const Strided out = strided(l.out_dtype, total_out, heads_q, dim_v), lse = strided(Dtype::f32, heads_q, total_out);
  const Strided row_exponent = strided(Dtype::u8, heads_q, total_out);
  Strided v_mean = strided(Dtype::f32, a.batch, heads_kv, dim_v), k_mean = strided(Dtype::f32, a.batch, heads_kv, dim);
  std::vector<float> mean(size_t(a.batch * heads_kv * std::max(dim, dim_v)));
  kit::Random random(5);
  kit::fill_normal(random, mean);
  v_mean.put(mean.data());
  k_mean.put(mean.data());
  AttentionFwd fwd{.q = q.view,
                   .k = k.view,
                   .v = a.v_col.view ? v_col.view : v.view,
                   .out = out.view(),
                   .lse = lse.view(),
                   .row_exponent = row_exponent.view(),
                   .seq_q = a.seq_q(),
                   .seq_k = a.seq_k(),
                   .mask = a.mask,
                   .softmax_scale = a.softmax_scale,
                   .shared_q = a.shared_q,
                   .cpu_math = a.cpu_math,
                   .backend = "cpu"};
  if (l.means) fwd.v_mean = v_mean.view();
  const Guarded fwd_workspace(attention_fwd_workspace(fwd));
  fwd.workspace = fwd_workspace.data();
  fwd.workspace_size = fwd_workspace.size();
  require_ok(attention_fwd(fwd));

  const Strided dq = strided(l.out_dtype, total_q, heads_q, dim), dk = strided(l.out_dtype, total_k, heads_kv, dim);
  const Strided dv = strided(l.out_dtype, total_k, heads_kv, dim_v);
  const Strided dk_payload = strided(Dtype::e4m3, total_k, heads_kv, dim);
  const Strided dv_payload = strided(Dtype::e4m3, total_k, heads_kv, dim_v);
  const auto gradient_mx = [&](const Strided& payload, int64_t d) {
    OwnedMx t = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, {}, total_k, heads_kv, d, a.seq_k());
    std::fill(t.scale.begin(), t.scale.end(), uint8_t(0xFF));
    t.view.data = payload.view();
    return t;
  };
  const OwnedMx dk_mx = gradient_mx(dk_payload, dim), dv_mx = gradient_mx(dv_payload, dim_v);
  Strided dlse = strided(Dtype::f32, heads_q, total_out);
  AttentionBwd bwd{.q = q.view,
                   .k = k.view,
                   .v = v.view,
                   .dout = dout.view,
                   .q_col = q_col.view,
                   .k_col = k_col.view,
                   .dout_col = dout_col.view,
                   .out = fwd.out,
                   .lse = fwd.lse,
                   .row_exponent = fwd.row_exponent,
                   .v_mean = fwd.v_mean,
                   .dq = dq.view(),
                   .dk = dk.view(),
                   .dv = dv.view(),
                   .dk_mx = dk_mx.view,
                   .dv_mx = dv_mx.view,
                   .ds_dtype = a.ds_dtype,
                   .seq_q = a.seq_q(),
                   .seq_k = a.seq_k(),
                   .mask = a.mask,
                   .softmax_scale = a.softmax_scale,
                   .shared_q = a.shared_q,
                   .cpu_math = a.cpu_math,
                   .backend = "cpu"};
  if (l.means) bwd.k_mean = k_mean.view();
  if (!a.dlse.empty()) {
    dlse.put(a.dlse.data());
    bwd.dlse = dlse.view();
  }
  const Guarded bwd_workspace(attention_bwd_workspace(bwd));
  bwd.workspace = bwd_workspace.data();
  bwd.workspace_size = bwd_workspace.size();
  require_ok(attention_bwd(bwd));

  Bits bits;
  const std::pair<const char*, const Strided*> written[] = {
      {"out", &out}, {"lse", &lse}, {"row_exponent", &row_exponent}, {"dq", &dq},
      {"dk", &dk},   {"dv", &dv},   {"dk_mx", &dk_payload},          {"dv_mx", &dv_payload}};
  for (const auto& [name, tensor] : written) {
    EXPECT_TRUE(tensor->gaps_are_untouched()) << name;
    bits.emplace_back(name, tensor->take());
  }
  bits.emplace_back("dk_mx.scale", dk_mx.scale);
  bits.emplace_back("dv_mx.scale", dv_mx.scale);
  return bits;
}
Bits run_in_place(const MxAttention& a) { return run_in({}, a); }

// ---- long sequences -----------------------------------------------------------------------------------------------

TEST_P(CpuAttention, WorkspaceDoesNotGrowWithTheProductOfLengths) {
  constexpr int64_t kTokens = 262144, kDim = 128, kMiB = 1 << 20;
  set_num_threads(2);
  for (const CpuMath math : kModes) {
    for (const int64_t rows : {int64_t(1), int64_t(16), kTokens}) {
      const auto mx = [&](int64_t tokens) {
        return make_mx_tensor(nullptr, nullptr, Dtype::e4m3, MxBlock::square32, {}, tokens, 1, kDim, {});
      };
      const auto f32 = [&](int64_t tokens) { return make_tensor(nullptr, Dtype::f32, tokens, 1, kDim); };
      AttentionFwd fwd{};
      AttentionBwd bwd{};
      fwd.q = bwd.q = bwd.dout = mx(rows);
      fwd.k = fwd.v = bwd.k = bwd.v = mx(kTokens);
      fwd.out = bwd.out = bwd.dq = f32(rows);
      fwd.lse = bwd.lse = make_tensor(nullptr, Dtype::f32, 1, rows);
      bwd.dk = bwd.dv = f32(kTokens);
      fwd.cpu_math = bwd.cpu_math = math;
      fwd.backend = bwd.backend = "cpu";
      const auto fwd_size = int64_t(attention_fwd_workspace(fwd)), bwd_size = int64_t(attention_bwd_workspace(bwd));
      EXPECT_GT(fwd_size, 0);
      EXPECT_LT(fwd_size, 8 * kMiB) << rows << " rows";
      EXPECT_GT(bwd_size, 0);
      EXPECT_LT(bwd_size, 200 * kMiB) << rows << " rows";
    }
  }
}

// 512 tokens over and over, each row seeing 128 keys. Wherever they lie the bits are the same, and the last 256 rows,
// and the keys that only those see, get what they get in the last 512 tokens alone. Those two may differ in the running
// maximum and in the order of sums, so in roundings of P and dS: 2^-9 of themselves or less in mode fast, and 2^-17,
// exponents included, in mode exact; on both sides; and once more through delta. Terms have either sign, so a sum is
// off by as much of itself as they are: 2 sqrt(2) 2^-9, or 45 dB, and 93 dB.
TEST_P(CpuAttention, LongSequenceEqualsItsEndAlone) {
  constexpr int64_t kPeriod = 512, kHalf = 256, kDim = 128;
  // In full for the best instruction set: what depends on the length is the same source for all.
  const int64_t periods = GetParam() == available_isas().back() ? 262144 / kPeriod : 16;
  AttentionCase c{.name = "end", .lens_q = {kPeriod}, .lens_k = {kPeriod}, .head_dim = kDim, .head_dim_v = kDim};
  c.mask = {.causal = true, .window_left = 127};
  for (const CpuMath math : kModes) {
    const MxAttention end = quantized(c, math);
    const auto repeated = [&](const OwnedMx& t) {
      const int64_t tokens = periods * kPeriod;
      OwnedMx x = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, {}, tokens, 1, kDim, {});
      for (size_t i = 0; i < x.data.size(); ++i) x.data[i] = t.data[i % t.data.size()];
      for (size_t i = 0; i < x.scale.size(); ++i) x.scale[i] = t.scale[i % t.scale.size()];
      return x;
    };
    MxAttention all;
    all.q = repeated(end.q);
    all.k = repeated(end.k);
    all.v = repeated(end.v);
    all.dout = repeated(end.dout);
    all.mask = c.mask;
    all.cpu_math = math;
    const AttentionResult whole = run_cpu(all), alone = run_cpu(end);
    const auto check = [&](const char* name, std::vector<float> AttentionResult::*member, int64_t width) {
      SCOPED_TRACE(testing::Message() << name << ", " << cpu_math_name(math));
      const float* x = (whole.*member).data();
      int64_t different = 0;
      // The last keys of all are seen by fewer rows, and the first rows see fewer keys.
      for (int64_t p = 1; p + 2 < periods; ++p) {
        const float* period = x + p * kPeriod * width;
        different += std::memcmp(period, period + kPeriod * width, size_t(kPeriod * width) * sizeof(float)) != 0;
      }
      EXPECT_EQ(different, 0);
      const auto second_half = [&](const float* y) { return std::span(y + kHalf * width, size_t(kHalf * width)); };
      const std::span<const float> half = second_half((alone.*member).data());
      const std::vector<double> want(half.begin(), half.end());
      EXPECT_GE(kit::compare(want, second_half(x + (periods - 1) * kPeriod * width)).sqnr_db,
                math == CpuMath::fast ? 45 : 93);
    };
    check("out", &AttentionResult::out, kDim);
    check("lse", &AttentionResult::lse, 1);
    check("dq", &AttentionResult::dq, kDim);
    check("dk", &AttentionResult::dk, kDim);
    check("dv", &AttentionResult::dv, kDim);
  }
}

// ---- threads, executors, callers ----------------------------------------------------------------------------------

// clang-format off
// Every way in which work is divided.
const std::vector<AttentionCase>& divided_cases() {
  static const std::vector<AttentionCase> cases = {
      {.name = "one_row_keys_in_parts", .lens_q = {1}, .lens_k = {5000}, .num_heads_q = 4, .num_heads_kv = 2,
       .head_dim = 128, .head_dim_v = 128},
      {.name = "few_rows_among_many", .lens_q = {2, 30, 0, 4}, .lens_k = {1100, 40, 9, 3}, .num_heads_q = 6,
       .num_heads_kv = 2, .head_dim = 96, .head_dim_v = 64, .mask = kCausal, .with_dlse = true},
      {.name = "keys_in_parts_causal", .lens_q = {65}, .lens_k = {1300}, .num_heads_q = 2, .mask = kCausal,
       .with_dlse = true},
      {.name = "keys_in_parts_jagged_window", .lens_q = {40, 0, 70}, .lens_k = {1111, 50, 600}, .head_dim = 96,
       .head_dim_v = 96, .mask = {.window_left = 500, .window_right = 3}},
      {.name = "several_row_tiles_a_task", .lens_q = {700}, .lens_k = {520}, .mask = kCausal},
      {.name = "many_heads", .lens_q = {90}, .lens_k = {90}, .num_heads_q = 24, .num_heads_kv = 24},
      {.name = "gqa_causal_cross", .lens_q = {100}, .lens_k = {333}, .num_heads_q = 8, .num_heads_kv = 2,
       .head_dim = 128, .head_dim_v = 128, .mask = kCausal},
      {.name = "jagged_slack", .lens_q = {0, 1, 31, 0, 65, 129, 0}, .lens_k = {7, 1, 0, 0, 200, 129, 0},
       .num_heads_q = 2, .num_heads_kv = 2, .slack_q = 5, .slack_k = 37},
      {.name = "shared_query", .lens_q = {70}, .lens_k = {64, 0, 300, 1, 65, 0, 33, 128, 20, 129}, .num_heads_q = 2,
       .shared_q = true},
      {.name = "shared_query_causal", .lens_q = {130}, .lens_k = {40, 0, 300, 129, 64}, .mask = kCausal,
       .shared_q = true},
      {.name = "d192_128", .lens_q = {129}, .lens_k = {150}, .num_heads_q = 2, .num_heads_kv = 2, .head_dim = 192,
       .head_dim_v = 128, .mask = kCausal},
      {.name = "d64_256_sink", .lens_q = {97}, .lens_k = {160}, .head_dim_v = 256,
       .distribution = Distribution::attention_sink},
      {.name = "d256_peaky", .lens_q = {66, 70}, .lens_k = {66, 130}, .head_dim = 256, .head_dim_v = 256,
       .distribution = Distribution::peaky},
  };
  return cases;
}
// clang-format on

TEST_P(CpuAttention, BitsDoNotDependOnThreads) {
  for (const AttentionCase& c : divided_cases()) {
    for (const CpuMath math : kModes) {
      const MxAttention a = quantized(c, math);
      set_num_threads(1);
      const Bits one = run_in_place(a);
      for (const int32_t threads : {2, 3, 7}) {
        set_num_threads(threads);
        EXPECT_EQ(difference(one, run_in_place(a)), "") << c.name << ", " << cpu_math_name(math) << ", " << threads;
      }
    }
  }
}

// Eight tasks, each of which adds to all of dq after the one before.
TEST_P(CpuAttention, ChainsOfTasksAddInOneOrder) {
  const AttentionCase c{.name = "chain", .lens_q = {200}, .lens_k = {512}};
  for (const CpuMath math : kModes) {
    const MxAttention a = quantized(c, math);
    set_num_threads(1);
    const AttentionResult one = run_cpu(a);
    AttentionResult r = forward_of(one);
    set_num_threads(4);
    for (int i = 0; i < 20; ++i) {
      kit::run_backward(a, "cpu", r);
      ASSERT_EQ(kit::compare_bits(a, one, a, r), "") << cpu_math_name(math) << ", run " << i;
    }
  }
}

void in_order(void*, int32_t count, ParallelTask task, void* context) {
  for (int32_t i = 0; i < count; ++i) task(context, i);
}
void backwards(void*, int32_t count, ParallelTask task, void* context) {
  for (int32_t i = count - 1; i >= 0; --i) task(context, i);
}
void on_new_threads(void*, int32_t count, ParallelTask task, void* context) {
  std::vector<std::thread> threads;
  for (int32_t i = 0; i < count; ++i) threads.emplace_back(task, context, i);
  for (std::thread& t : threads) t.join();
}

TEST_P(CpuAttention, BitsDoNotDependOnTheExecutor) {
  for (const AttentionCase& c : divided_cases()) {
    for (const CpuMath math : kModes) {
      const MxAttention a = quantized(c, math);
      set_num_threads(4);
      const Bits own = run_in_place(a);
      for (const ParallelFor executor : {in_order, backwards, on_new_threads}) {
        set_parallel_for(executor, nullptr);
        EXPECT_EQ(difference(own, run_in_place(a)), "") << c.name << ", " << cpu_math_name(math);
      }
      set_parallel_for(nullptr, nullptr);
    }
  }
}

TEST_P(CpuAttention, HostThreadsDoNotDisturbEachOther) {
  AttentionCase c{.lens_q = {130}, .lens_k = {40, 0, 300, 129, 64}, .num_heads_q = 2, .mask = kCausal};
  c.shared_q = true;
  set_num_threads(3);
  const MxAttention exact = quantized(c, CpuMath::exact), fast = quantized(c, CpuMath::fast);
  const Bits want_exact = run_in_place(exact), want_fast = run_in_place(fast);
  EXPECT_NE(difference(want_exact, want_fast), "");
  for (const int hosts : {2, 4}) {
    std::vector<std::string> differences(4);
    std::vector<std::thread> threads;
    for (int host = 0; host < hosts; ++host) {
      threads.emplace_back([&, host] {
        for (int i = 0; i < 6; ++i) {
          const bool use_fast = (host + i) % 2 == 0;
          std::string what = difference(use_fast ? want_fast : want_exact, run_in_place(use_fast ? fast : exact));
          if (!what.empty()) differences[size_t(host)] = what;
        }
      });
    }
    for (std::thread& t : threads) t.join();
    for (const std::string& what : differences) EXPECT_EQ(what, "") << hosts << " host threads";
  }
}

// ---- strides ------------------------------------------------------------------------------------------------------

// clang-format off
const std::vector<AttentionCase>& strided_cases() {
  static const std::vector<AttentionCase> cases = {
      {.name = "d8", .lens_q = {70}, .lens_k = {97}, .num_heads_q = 2, .num_heads_kv = 2, .head_dim = 8,
       .head_dim_v = 8, .with_dlse = true},
      {.name = "d40_72_gqa", .lens_q = {33, 5}, .lens_k = {65, 70}, .num_heads_q = 6, .num_heads_kv = 2,
       .head_dim = 40, .head_dim_v = 72, .mask = kCausal, .slack_q = 3, .slack_k = 2},
      {.name = "d96_80_shared", .lens_q = {65}, .lens_k = {64, 0, 30}, .num_heads_q = 2, .num_heads_kv = 2,
       .head_dim = 96, .head_dim_v = 80, .shared_q = true, .with_dlse = true},
      {.name = "d192_128", .lens_q = {65}, .lens_k = {129}, .num_heads_q = 2, .head_dim = 192, .head_dim_v = 128},
      {.name = "parts", .lens_q = {3}, .lens_k = {1100}, .num_heads_q = 3, .num_heads_kv = 3, .head_dim = 128,
       .head_dim_v = 256},
  };
  return cases;
}
// clang-format on

TEST_P(CpuAttention, BitsDoNotDependOnStrides) {
  set_num_threads(2);
  for (const AttentionCase& c : strided_cases()) {
    for (const CpuMath math : kModes) {
      const MxAttention a = quantized(c, math, Dtype::e5m2);
      for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
        SCOPED_TRACE(testing::Message() << c.name << ", " << cpu_math_name(math) << ", " << dtype_name(dtype));
        const Bits contiguous = run_in({.out_dtype = dtype, .means = true}, a);
        const Layout gaps{.out_dtype = dtype, .gap = 5, .means = true},
            flipped{.out_dtype = dtype, .gap = 16, .flip = true, .means = true};
        EXPECT_EQ(difference(contiguous, run_in(gaps, a)), "");
        EXPECT_EQ(difference(contiguous, run_in(flipped, a)), "");
        if (dtype != Dtype::f32) continue;
        EXPECT_EQ(difference(contiguous, run_in(gaps, kit::expand_squares(a, ScaleLayout::linear))), "");
        EXPECT_EQ(difference(contiguous, run_in(gaps, kit::expand_squares(a, ScaleLayout::atom128x4))), "");
      }
    }
  }
}

// NaN in all that belongs to no sequence.
TEST_P(CpuAttention, PaddingDoesNotReachResults) {
  for (const AttentionCase& c : divided_cases()) {
    for (const CpuMath math : kModes) {
      const MxAttention a = quantized(c, math), poisoned = kit::poison_padding(a);
      EXPECT_EQ(kit::compare_bits(a, run_cpu(a), poisoned, run_cpu(poisoned)), "")
          << c.name << ", " << cpu_math_name(math);
    }
  }
}

// ---- what is not finite -------------------------------------------------------------------------------------------

bool finite(const float* x, int64_t n) {
  return std::all_of(x, x + n, [](float value) { return std::isfinite(value); });
}

// Elements that must not be finite.
struct Spread {
  std::vector<bool> out, lse, dq, dk, dv;
};

// The rule, pair by pair. x: the operands as they are, NaN included; out and lse: what the backward is given.
//   forward   row i has NaN in lse and out if q_i or a visible k_j is not finite, in channel c of out if v_jc is not
//   backward  P_ij is NaN if q_i, k_j or lse_i is not finite; dS_ij if P_ij, v_j, dout_i, out_i or dlse_i is not
//             dv_jc: P_ij or dout_ic of a row that sees it;  dk_j, dq_i: dS_ij of a visible pair
Spread spread(const AttentionCase& c, const Operands& x, const std::vector<float>& out, const std::vector<float>& lse) {
  const int64_t hq = c.num_heads_q, hk = c.num_heads_kv, d = c.head_dim, dv = c.head_dim_v, rows_out = total_out(c);
  Spread bad{std::vector<bool>(size_t(rows_out * hq * dv)), std::vector<bool>(size_t(rows_out * hq)),
             std::vector<bool>(size_t(total_q(c) * hq * d)), std::vector<bool>(size_t(total_k(c) * hk * d)),
             std::vector<bool>(size_t(total_k(c) * hk * dv))};
  const std::vector<int32_t> cu_q = kit::cu_seqlens(c.lens_q), cu_k = kit::cu_seqlens(c.lens_k);
  for (size_t b = 0; b < c.lens_k.size(); ++b) {
    const int64_t sq = c.lens_q[c.shared_q ? 0 : b], sk = c.lens_k[b];
    for (int64_t pair = 0; pair < hq * sq * sk; ++pair) {
      const int64_t head = pair / (sq * sk), i = pair / sk % sq, j = pair % sk, diagonal = i + sk - sq;
      const Mask& m = c.mask;
      if (m.causal && j > diagonal) continue;
      if (m.window_left >= 0 && j < diagonal - m.window_left) continue;
      if (m.window_right >= 0 && j > diagonal + m.window_right) continue;
      const int64_t out_token = c.shared_q ? int64_t(b) * sq + i : cu_q[b] + i;
      const int64_t q = ((c.shared_q ? 0 : cu_q[b]) + i) * hq + head, o = out_token * hq + head;
      const int64_t k = (cu_k[b] + j) * hk + head / (hq / hk), l = head * rows_out + out_token;
      const bool bad_score = !finite(&x.q[size_t(q * d)], d) || !finite(&x.k[size_t(k * d)], d);
      const float *v = &x.v[size_t(k * dv)], *dout = &x.dout[size_t(o * dv)];
      if (bad_score) bad.lse[size_t(l)] = true;
      const bool bad_p = bad_score || !std::isfinite(lse[size_t(l)]);
      const bool bad_ds = bad_p || !finite(v, dv) || !finite(dout, dv) || !finite(&out[size_t(o * dv)], dv) ||
                          (!x.dlse.empty() && !std::isfinite(x.dlse[size_t(l)]));
      for (int64_t n = 0; n < dv; ++n) {
        if (bad_score || !std::isfinite(v[n])) bad.out[size_t(o * dv + n)] = true;
        if (bad_p || !std::isfinite(dout[n])) bad.dv[size_t(k * dv + n)] = true;
      }
      for (int64_t n = 0; bad_ds && n < d; ++n) bad.dq[size_t(q * d + n)] = bad.dk[size_t(k * d + n)] = true;
    }
  }
  return bad;
}

// `clean`: the result with zeros in place of what is not finite. What has to be finite has to be the same: to the bit
// in mode exact. In mode fast dP of a tile where one key dominates a row is more exact, and a row of NaN has no such
// key: then other rows of the tile have errors of fixed point, 2^-13 of the largest value or less in each of some
// terms.
void expect_spread(const char* name, CpuMath math, const std::vector<bool>& bad, const std::vector<float>& got,
                   const std::vector<float>& clean) {
  float largest = 0;
  for (const float x : clean) largest = std::isfinite(x) ? std::max(largest, std::abs(x)) : largest;
  const float tolerance = math == CpuMath::fast ? 0x1p-9f * largest : 0;
  for (size_t n = 0; n < got.size(); ++n) {
    if (bad[n] ? !std::isfinite(got[n]) : got[n] == clean[n] || std::abs(got[n] - clean[n]) <= tolerance) continue;
    ADD_FAILURE() << name << " " << n << " must " << (bad[n] ? "not be finite" : "not feel it") << ", is " << got[n]
                  << ", with zeros " << clean[n];
    return;
  }
}
void expect_spread(CpuMath math, const Spread& bad, const AttentionResult& got, const AttentionResult& clean) {
  expect_spread("dq", math, bad.dq, got.dq, clean.dq);
  expect_spread("dk", math, bad.dk, got.dk, clean.dk);
  expect_spread("dv", math, bad.dv, got.dv, clean.dv);
}

enum class Poison { payload, scale, infinity };
constexpr Poison kPoisons[] = {Poison::payload, Poison::scale, Poison::infinity};

// The operand that a name means.
OwnedMx& operand(MxAttention& a, char name) {
  return name == 'q' ? a.q : name == 'k' ? a.k : name == 'v' ? a.v : a.dout;
}

struct PoisonedCall {
  std::string name;
  AttentionCase problem;
  MxAttention a, zeroed;
  Operands values;
  AttentionResult ref;
};

PoisonedCall poisoned_call(const AttentionCase& c, char where, Poison poison, MxBlock block) {
  const Operands x = kit::make_operands(c);
  const auto make = [&] {
    MxAttention a = kit::quantize_case(c, x, Dtype::e4m3, block);
    if (poison != Poison::infinity) return a;
    a.q = kit::ref_quantize(x.q, total_q(c), c.num_heads_q, c.head_dim, a.seq_q(), Dtype::e5m2, block);
    a.k = kit::ref_quantize(x.k, total_k(c), c.num_heads_kv, c.head_dim, a.seq_k(), Dtype::e5m2, block);
    a.v = kit::ref_quantize(x.v, total_k(c), c.num_heads_kv, c.head_dim_v, a.seq_k(), Dtype::e5m2, block);
    a.dout = kit::ref_quantize(x.dout, total_out(c), c.num_heads_q, c.head_dim_v, a.seq_out(), Dtype::e5m2, block);
    return a;
  };
  PoisonedCall p{std::string(c.name) + ", " + where + ", " + std::to_string(int(poison)), c, make(), make(), {}, {}};
  OwnedMx &t = operand(p.a, where), &zeroed = operand(p.zeroed, where);
  const Jagged seq = where == 'k' || where == 'v' ? p.a.seq_k() : where == 'q' ? p.a.seq_q() : p.a.seq_out();
  // Two places: the middle of the first sequence in the last head, and the very last element.
  const int64_t heads = t.view.data.shape[1], dim = t.view.data.shape[2];
  const int64_t first_length = sequence_at(t.view.data.shape[0], seq, 0).length;
  const size_t places[] = {size_t((first_length / 2 * heads + heads - 1) * dim + dim / 2), t.data.size() - 1};
  for (const size_t at : places) {
    // All q there are positive: in ref Inf in k with a negative q is a weight of zero, on cpu it is always NaN.
    if (poison == Poison::infinity && where == 'k') {
      for (MxAttention* a : {&p.a, &p.zeroed}) {
        for (size_t n = at % size_t(dim); n < a->q.data.size(); n += size_t(dim)) a->q.data[n] = 0x3C;
      }
    }
    if (poison != Poison::scale) t.data[at] = poison == Poison::payload ? 0x7F : 0x7C;
  }
  if (poison == Poison::scale) t.scale[t.scale.size() / 3] = t.scale[0] = 0xFF;
  const std::vector<float> values = kit::ref_dequantize(t.view, seq);
  for (size_t n = 0; n < values.size(); ++n) {
    if (!std::isfinite(values[n])) zeroed.data[n] = 0;
  }
  p.values = dequantized(p.a);
  p.ref = kit::run_attention(p.a, "ref", "ref");
  return p;
}

// clang-format off
const std::vector<AttentionCase>& poisoned_cases() {
  static const std::vector<AttentionCase> cases = {
      {.name = "jagged_causal_gqa", .lens_q = {100, 33, 20}, .lens_k = {130, 33, 0}, .num_heads_q = 4,
       .num_heads_kv = 2, .head_dim_v = 96, .mask = kCausal, .with_dlse = true},
      {.name = "parts_window", .lens_q = {9}, .lens_k = {1100}, .num_heads_q = 2, .head_dim = 72, .head_dim_v = 40,
       .mask = {.window_left = 600, .window_right = 2}, .with_dlse = true},
      {.name = "few_rows", .lens_q = {5, 3}, .lens_k = {700, 40}, .num_heads_q = 4, .num_heads_kv = 2,
       .mask = {.causal = true, .window_left = 600}},
      {.name = "shared_causal", .lens_q = {70}, .lens_k = {64, 0, 90}, .num_heads_q = 2, .num_heads_kv = 2,
       .mask = kCausal, .shared_q = true},
      {.name = "rows_without_keys", .lens_q = {161}, .lens_k = {70}, .mask = kCausal},
  };
  return cases;
}
// clang-format on

std::vector<PoisonedCall>& poisoned_calls() {
  static std::vector<PoisonedCall> calls = [] {
    std::vector<PoisonedCall> all;
    constexpr MxBlock kBlocks[] = {MxBlock::square32, MxBlock::row32, MxBlock::col32};
    for (const AttentionCase& c : poisoned_cases()) {
      for (const char where : {'q', 'k', 'v', 'd'}) {
        for (const Poison poison : kPoisons)
          all.push_back(poisoned_call(c, where, poison, kBlocks[(all.size() + all.size() / 3) % 3]));
      }
    }
    return all;
  }();
  return calls;
}

TEST_P(CpuAttention, WhatIsNotFiniteReachesWhatSeesItAndNothingElse) {
  for (PoisonedCall& call : poisoned_calls()) {
    for (const CpuMath math : kModes) {
      SCOPED_TRACE(call.name + ", " + cpu_math_name(math));
      call.a.cpu_math = call.zeroed.cpu_math = math;
      const AttentionResult got = run_cpu(call.a), clean = run_cpu(call.zeroed);
      const Spread bad = spread(call.problem, call.values, got.out, got.lse);
      expect_spread("out", math, bad.out, got.out, clean.out);
      expect_spread("lse", math, bad.lse, got.lse, clean.lse);
      expect_spread(math, bad, got, clean);
      // The same operands with an out and an lse that do not tell: the backward has to see for itself.
      AttentionResult untold = forward_of(clean);
      kit::run_backward(call.a, "cpu", untold);
      expect_spread(math, spread(call.problem, call.values, untold.out, untold.lse), untold, clean);
    }
  }
}

// The rule is that of ref, but for one thing: there dS is quantized in blocks, and a NaN takes its block with it.
TEST(CpuAttentionRule, IsThatOfRef) {
  for (const PoisonedCall& call : poisoned_calls()) {
    SCOPED_TRACE(call.name);
    const Spread bad = spread(call.problem, call.values, call.ref.out, call.ref.lse);
    const auto count = [](const std::vector<bool>& expected, const std::vector<float>& got, bool also_more) {
      int64_t wrong = 0;
      for (size_t n = 0; n < got.size(); ++n) {
        wrong += expected[n] != !std::isfinite(got[n]) && !(also_more && !expected[n]);
      }
      return wrong;
    };
    EXPECT_EQ(count(bad.out, call.ref.out, false), 0);
    std::vector<float> lse = call.ref.lse;
    std::replace(lse.begin(), lse.end(), -kInf, 0.0f);  // rows without keys
    EXPECT_EQ(count(bad.lse, lse, false), 0);
    EXPECT_EQ(count(bad.dv, call.ref.dv, false), 0);
    EXPECT_EQ(count(bad.dq, call.ref.dq, true), 0);
    EXPECT_EQ(count(bad.dk, call.ref.dk, true), 0);
  }
}

TEST_P(CpuAttention, OutAndLseThatAreNotFiniteReachTheGradients) {
  for (const AttentionCase& c : poisoned_cases()) {
    for (const CpuMath math : kModes) {
      MxAttention a = quantized(c, math);
      const AttentionResult clean = run_cpu(a);
      for (const char* where : {"out", "lse", "dlse"}) {
        for (const float value : {NAN, kInf}) {
          SCOPED_TRACE(testing::Message() << c.name << ", " << cpu_math_name(math) << ", " << value << " in " << where);
          AttentionResult got = forward_of(clean);
          const std::vector<float> dlse = a.dlse;
          std::vector<float>& given = *where == 'o' ? got.out : *where == 'l' ? got.lse : a.dlse;
          if (!given.empty()) given[given.size() / 3] = given.back() = value;
          kit::run_backward(a, "cpu", got);
          expect_spread(math, spread(c, dequantized(a), got.out, got.lse), got, clean);
          a.dlse = dlse;
        }
      }
    }
  }
}

// ---- identities ---------------------------------------------------------------------------------------------------

std::vector<AttentionCase> identity_cases() {
  std::vector<AttentionCase> cases = divided_cases();
  for (AttentionCase& c : cases) c.with_dlse = false;
  AttentionCase plain{.lens_q = {97}, .lens_k = {300}, .num_heads_q = 2, .head_dim = 128, .head_dim_v = 128};
  plain.mask = kCausal;
  for (int32_t n = 0; n < kit::kNumDistributions; ++n) {
    cases.push_back(plain);
    cases.back().name = kit::distribution_name(Distribution(n));
    cases.back().distribution = Distribution(n);
  }
  return cases;
}

// All keys have the same v, of powers of two, so that products with it are exact: then out is v to the bit, and since
// the loss does not depend on the weights, dq and dk are zero to the bit.
TEST_P(CpuAttention, EqualValuesComeBackAndHaveNoGradient) {
  for (const AttentionCase& c : identity_cases()) {
    for (const bool ones : {true, false}) {
      Operands x = kit::make_operands(c);
      const auto value = [&](int64_t channel) {
        return ones ? 1.0f : float(channel % 2 ? -1 : 1) * std::ldexp(1.0f, int(channel % 5) - 2);
      };
      for (size_t n = 0; n < x.v.size(); ++n) x.v[n] = value(int64_t(n) % c.head_dim_v);
      MxAttention a = kit::quantize_case(c, x);
      for (const CpuMath math : kModes) {
        SCOPED_TRACE(testing::Message() << c.name << ", " << cpu_math_name(math) << (ones ? ", ones" : ""));
        a.cpu_math = math;
        const AttentionResult r = run_cpu(a);
        int64_t other = 0, gradients = 0;
        for (int64_t n = 0; n < int64_t(r.out.size()); ++n) {
          const int64_t row = n / c.head_dim_v / c.num_heads_q, head = n / c.head_dim_v % c.num_heads_q;
          const bool sees = r.lse[size_t(head * total_out(c) + row)] != -kInf;
          other += r.out[size_t(n)] != (sees ? value(n % c.head_dim_v) : 0.0f);
        }
        for (const auto* t : {&r.dq, &r.dk}) {
          gradients += std::count_if(t->begin(), t->end(), [](float g) { return g != 0; });
        }
        EXPECT_EQ(other, 0) << "elements of out";
        EXPECT_EQ(gradients, 0) << "elements of dq and dk";
      }
    }
  }
}

TEST_P(CpuAttention, EqualLogitsGiveTheLogarithmOfTheKeys) {
  const AttentionCase c{.lens_q = {400, 1, 1, 20}, .lens_k = {400, 3000, 70001, 5000}, .mask = kCausal};
  Operands x = kit::make_operands(c);
  std::fill(x.q.begin(), x.q.end(), 0.0f);
  MxAttention a = kit::quantize_case(c, x);
  for (const CpuMath math : kModes) {
    a.cpu_math = math;
    const AttentionResult r = run_cpu(a);
    for (int64_t i = 0; i < total_q(c); ++i) {
      const double keys = i < 400 ? double(i + 1) : i == 400 ? 3000 : i == 401 ? 70001 : double(5000 - 421 + i);
      const double want = std::log(keys);
      const float near = float(want), ulp = std::nextafter(near, kInf) - near;
      ASSERT_LE(std::abs(double(r.lse[size_t(i)]) - want), 2 * double(ulp)) << keys << " keys, " << cpu_math_name(math);
      ASSERT_EQ(r.row_exponent[size_t(i)], std::ilogb(keys));
    }
  }
}

// clang-format off
// The first rows see no key, and the first keys are seen by no row.
struct Alone {
  AttentionCase c;
  int64_t rows, keys;
};
const std::vector<Alone>& alone_cases() {
  static const std::vector<Alone> cases = {
      {{.name = "causal", .lens_q = {161}, .lens_k = {70}, .mask = kCausal}, 91, 0},
      {{.name = "no_key", .lens_q = {40}, .lens_k = {0}}, 40, 0},
      {{.name = "no_query", .lens_q = {0}, .lens_k = {40}}, 0, 40},
      {{.name = "window", .lens_q = {20}, .lens_k = {900}, .mask = {.window_left = 30}}, 0, 850},
      {{.name = "window_right", .lens_q = {300}, .lens_k = {100}, .mask = {.window_left = 9, .window_right = 3}}, 197, 0},
  };
  return cases;
}
// clang-format on

TEST_P(CpuAttention, WithoutAPartnerAllIsZero) {
  for (const Alone& alone : alone_cases()) {
    for (const CpuMath math : kModes) {
      SCOPED_TRACE(testing::Message() << alone.c.name << ", " << cpu_math_name(math));
      const AttentionResult r = run_cpu(quantized(alone.c, math));
      const int64_t width = alone.c.head_dim, rows = total_q(alone.c), keys = total_k(alone.c);
      const auto nonzero_rows = [&](const std::vector<float>& t, int64_t first, int64_t end) {
        int64_t count = 0;
        for (int64_t row = first; row < end; ++row) {
          count += std::any_of(t.begin() + row * width, t.begin() + (row + 1) * width, [](float x) { return x != 0; });
        }
        return count;
      };
      EXPECT_EQ(nonzero_rows(r.out, 0, alone.rows), 0);
      EXPECT_EQ(nonzero_rows(r.dq, 0, alone.rows), 0);
      EXPECT_EQ(nonzero_rows(r.dk, 0, alone.keys), 0);
      EXPECT_EQ(nonzero_rows(r.dv, 0, alone.keys), 0);
      EXPECT_EQ(nonzero_rows(r.out, alone.rows, rows), rows - alone.rows);
      EXPECT_EQ(nonzero_rows(r.dv, alone.keys, keys), rows > alone.rows ? keys - alone.keys : 0);
      for (int64_t i = 0; i < rows; ++i) EXPECT_EQ(r.lse[size_t(i)] == -kInf, i < alone.rows) << i;
    }
  }
}

// ---- distance from exact attention --------------------------------------------------------------------------------

struct Reference {
  AttentionCase c;
  MxAttention a;
  kit::OracleResult original, quantized;  // exact attention on the operands before and after quantization
  AttentionResult ref;
};

std::vector<Reference>& references() {
  static std::vector<Reference> all = [] {
    std::vector<Reference> x;
    for (const auto* list : {&kit::regular_cases(), &kit::irregular_cases()}) {
      for (const AttentionCase& c : *list) {
        const Operands operands = kit::make_operands(c);
        MxAttention a = kit::quantize_case(c, operands);
        kit::OracleResult original = kit::oracle_attention(kit::make_problem(c, operands));
        kit::OracleResult quantized = kit::oracle_attention(kit::dequantized_problem(c, a));
        AttentionResult ref = kit::run_attention(a, "ref", "ref");
        x.push_back({c, std::move(a), std::move(original), std::move(quantized), std::move(ref)});
      }
    }
    return x;
  }();
  return all;
}

// SQNR in every tensor at least that of ref, against exact attention on the original operands and on the quantized
// ones. Two things are nobody's merit. Where P and dS are powers of two, ref is exact; from 90 dB on, the roundoff of
// fp32 and of fixed point is all that is left. And ref's roundings may happen to undo some of the quantizer's: nobody
// needs to be closer to exact attention on the original operands than exact attention on the quantized ones is.
TEST_P(CpuAttention, IsNeverFurtherFromExactAttentionThanRef) {
  constexpr double kMaxLossDb = 0.02, kRoundoffDb = 90, kNoSignal = 1e-10;
  for (Reference& reference : references()) {
    for (const CpuMath math : kModes) {
      reference.a.cpu_math = math;
      const AttentionResult got = run_cpu(reference.a);
      const auto check = [&](const char* name, const std::vector<double> kit::OracleResult::*exact,
                             const std::vector<float> AttentionResult::*member) {
        const std::vector<double>&original = reference.original.*exact, &quantized = reference.quantized.*exact;
        const kit::Metrics cpu = kit::compare(original, got.*member);
        if (std::sqrt(cpu.signal_energy / double(std::max<size_t>(1, original.size()))) <= kNoSignal) return;
        const double ref_db = kit::compare(original, reference.ref.*member).sqnr_db;
        const double best_db = kit::compare(original, quantized).sqnr_db;
        EXPECT_GE(cpu.sqnr_db, std::min(ref_db, best_db) - kMaxLossDb)
            << reference.c.name << ", " << cpu_math_name(math) << ", " << name;
        EXPECT_GE(kit::compare(quantized, got.*member).sqnr_db,
                  std::min(kit::compare(quantized, reference.ref.*member).sqnr_db - kMaxLossDb, kRoundoffDb))
            << reference.c.name << ", " << cpu_math_name(math) << ", " << name << ", quantized operands";
      };
      check("out", &kit::OracleResult::out, &AttentionResult::out);
      check("dq", &kit::OracleResult::dq, &AttentionResult::dq);
      check("dk", &kit::OracleResult::dk, &AttentionResult::dk);
      check("dv", &kit::OracleResult::dv, &AttentionResult::dv);
    }
  }
}

}  // namespace
}  // namespace mxflash
