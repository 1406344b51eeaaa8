// What users of FP8 and MXFP8 attention reported about calls: layouts that were misread, offsets beyond 31 bits,
// pointers that were not aligned, errors that aborted. The number in a test's name is its row in docs/reports.md; the
// last test holds that file and the tests to each other.
#include <gtest/gtest.h>
#include <mxflash/attention.h>
#include <mxflash/quantize.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "kit/random.h"
#include "kit/runner.h"
#include "mx/float16.h"
#include "mx/fp8.h"

namespace mxflash {
namespace {

using kit::OwnedMx;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Address space that costs memory only where it is written; zero elsewhere.
class SparseMemory {
 public:
  explicit SparseMemory(int64_t size) : size_(size_t(size)) {
    data_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (ok()) madvise(data_, size_, MADV_NOHUGEPAGE);
  }
  ~SparseMemory() {
    if (ok()) munmap(data_, size_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  template <class T = uint8_t>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  size_t size_;
  void* data_;
};
constexpr const char* kNotMapped = "this machine gives no sparse mapping of that size";

Status run_forward(AttentionFwd args) {
  const kit::AlignedBuffer workspace(attention_fwd_workspace(args));
  args.workspace = workspace.data();
  args.workspace_size = workspace.size();
  return attention_fwd(args);
}
Status run_backward(AttentionBwd args) {
  const kit::AlignedBuffer workspace(attention_bwd_workspace(args));
  args.workspace = workspace.data();
  args.workspace_size = workspace.size();
  return attention_bwd(args);
}

void expect_rejected(const Status& status, const std::string& rule) {
  EXPECT_EQ(status.code, StatusCode::invalid_argument);
  EXPECT_NE(std::string(status.message).find(rule), std::string::npos) << "got: " << status.message;
}

std::vector<float> normal(int64_t n, uint64_t seed) {
  std::vector<float> x(size_t(n), 0.0f);
  kit::Random random(seed);
  kit::fill_normal(random, x);
  return x;
}

// E4M3 codes of +-0.125 .. 1.875.
std::vector<uint8_t> random_codes(int64_t n, uint64_t seed) {
  std::vector<uint8_t> codes(size_t(n), 0);
  kit::Random random(seed);
  for (uint8_t& code : codes) code = uint8_t(0x20 + random.below(32) + 128 * random.below(2));
  return codes;
}

// A payload with scales of 1 everywhere.
struct UnitScaled {
  std::vector<uint8_t> scale;
  MxTensor view;
  UnitScaled(void* data, int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq)
      : scale(size_t(scale_size(MxBlock::square32, ScaleLayout::linear, tokens, heads, dim, seq)), uint8_t(127)),
        view(make_mx_tensor(data, scale.data(), Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, tokens, heads, dim,
                            seq)) {}
};

// A small valid forward call, for tests that break one rule of it.
struct SmallCall {
  static constexpr int64_t kTokens = 34, kDim = 64;
  std::vector<float> x = normal(kTokens * kDim, 1), out = std::vector<float>(kTokens * kDim, kNan);
  OwnedMx q, k, v;
  AttentionFwd args;
  explicit SmallCall(MxBlock block = MxBlock::row32, const Jagged& seq = {})
      : q(kit::quantize_floats(x, kTokens, 1, kDim, seq, Dtype::e4m3, block)),
        k(kit::quantize_floats(x, kTokens, 1, kDim, seq, Dtype::e4m3, block)),
        v(kit::quantize_floats(x, kTokens, 1, kDim, seq, Dtype::e4m3, block)),
        args{.q = q.view,
             .k = k.view,
             .v = v.view,
             .out = make_tensor(out.data(), Dtype::f32, kTokens, 1, kDim),
             .lse = {},
             .seq_q = seq,
             .seq_k = seq} {}
  ~SmallCall() { EXPECT_TRUE(run_forward(args).ok()) << "the call was valid before it was broken"; }
};

// ---- scales: type, layout, padding --------------------------------------------------------------------------------

TEST(Reports, A15_OnlyPowerOfTwoScales) {
  SmallCall call;
  AttentionFwd bad = call.args;
  bad.k.scale.dtype = Dtype::f32;
  expect_rejected(run_forward(bad), "k.scale.dtype must be e8m0 or u8, got f32");
}

// Two sequences of 17: each has its own 128 rows of scales; scales padded over the flattened 34 rows do not pass.
TEST(Reports, A18_ScalesArePaddedPerSequence) {
  const Jagged two{.batch = 2};
  EXPECT_EQ(padded_tokens(34, two), 256);
  EXPECT_EQ(scale_shape(MxBlock::row32, ScaleLayout::linear, 34, 1, 64, two), (std::array<int64_t, 4>{1, 256, 2, 0}));
  EXPECT_EQ(scale_shape(MxBlock::row32, ScaleLayout::atom128x4, 34, 1, 64, two),
            (std::array<int64_t, 4>{1, 2, 1, 512}));
  SmallCall call(MxBlock::row32, two);
  const OwnedMx second =
      kit::quantize_floats(std::span(call.x).subspan(17 * 64), 17, 1, 64, {}, Dtype::e4m3, MxBlock::row32);
  EXPECT_TRUE(std::equal(second.scale.begin(), second.scale.end(), call.q.scale.begin() + 128 * 2));

  const SmallCall flattened(MxBlock::row32);
  AttentionFwd bad = call.args;
  bad.q = flattened.args.q;
  expect_rejected(run_forward(bad), "q.scale.shape[1] must be 256 (scale_shape), got 128");
  bad = call.args;
  bad.q.layout = ScaleLayout::atom128x4;
  expect_rejected(run_forward(bad), "q.scale.rank must be 4, got 3");
}

// Compact scales of a 64 x 64 tensor, (64, 2), are refused by name; convert_scales makes the 128x4 atoms and back.
TEST(Reports, A19_CompactScalesAreConvertedNeverMisread) {
  const std::vector<float> x = normal(64 * 64, 19);
  const OwnedMx linear = kit::quantize_floats(x, 64, 1, 64, {}, Dtype::e4m3, MxBlock::row32);
  MxTensor compact = linear.view;
  compact.scale = make_tensor(compact.scale.data, Dtype::e8m0, 1, 64, 2);
  std::vector<float> values(64 * 64);
  const Tensor out = make_tensor(values.data(), Dtype::f32, 64, 1, 64);
  expect_rejected(dequantize({.in = compact, .out = out}), "in.scale.shape[1] must be 128 (scale_shape), got 64");

  OwnedMx atoms = kit::make_owned_mx(Dtype::e4m3, MxBlock::row32, ScaleLayout::atom128x4, 64, 1, 64, {});
  OwnedMx back = kit::make_owned_mx(Dtype::e4m3, MxBlock::row32, ScaleLayout::linear, 64, 1, 64, {});
  kit::require_ok(convert_scales({.in = linear.view, .out = atoms.view}));
  kit::require_ok(convert_scales({.in = atoms.view, .out = back.view}));
  EXPECT_EQ(back.scale, linear.scale);
  std::vector<uint8_t> want(512, 0);
  for (size_t row = 0; row < 64; ++row) {
    for (size_t block = 0; block < 2; ++block)
      want[row % 32 * 16 + row / 32 * 4 + block] = linear.scale[row * 2 + block];
  }
  EXPECT_EQ(atoms.scale, want);
}

TEST(Reports, A59_ScalesMayBeTypedAsBytes) {
  SmallCall call;
  kit::require_ok(run_forward(call.args));
  const std::vector<float> want = call.out;
  for (MxTensor* t : {&call.args.q, &call.args.k, &call.args.v}) t->scale.dtype = Dtype::u8;
  kit::require_ok(run_forward(call.args));
  EXPECT_EQ(call.out, want);
}

// ---- pointers -----------------------------------------------------------------------------------------------------

TEST(Reports, A20_UnalignedPayloadIsReadAsIs) {
  SmallCall call(MxBlock::square32);
  kit::require_ok(run_forward(call.args));
  const std::vector<float> want = call.out;
  for (const size_t offset : {1, 8, 16}) {
    std::vector<uint8_t> q(call.q.data.size() + 16), v(call.v.data.size() + 16);
    std::copy(call.q.data.begin(), call.q.data.end(), q.begin() + offset);
    std::copy(call.v.data.begin(), call.v.data.end(), v.begin() + offset);
    AttentionFwd args = call.args;
    args.q.data.data = q.data() + offset;
    args.v.data.data = v.data() + offset;
    kit::require_ok(run_forward(args));
    EXPECT_EQ(call.out, want) << "offset " << offset;
  }
}

TEST(Reports, A20_UnalignedFloatsAreRefusedOthersAreExact) {
  std::vector<float> x = normal(40 * 64 + 4, 20);
  OwnedMx got = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, 40, 1, 64, {});
  for (const size_t first : {1, 2, 4}) {  // x[1:], and 8 and 16 bytes
    kit::require_ok(quantize({.in = make_tensor(x.data() + first, Dtype::f32, 40, 1, 64), .out = got.view}));
    const OwnedMx want =
        kit::quantize_floats(std::vector<float>(x.begin() + first, x.begin() + first + 40 * 64), 40, 1, 64, {});
    EXPECT_EQ(got.data, want.data);
    EXPECT_EQ(got.scale, want.scale);
  }
  auto* const odd = reinterpret_cast<uint8_t*>(x.data()) + 1;
  expect_rejected(quantize({.in = make_tensor(odd, Dtype::f32, 40, 1, 64), .out = got.view}),
                  "in.data must be aligned to 4 bytes");
  expect_rejected(quantize({.in = make_tensor(odd, Dtype::bf16, 40, 1, 64), .out = got.view}),
                  "in.data must be aligned to 2 bytes");
}

// ---- arguments: every wrong one is a Status with the rule and the value -------------------------------------------

TEST(Reports, A33_UnsupportedHeadDimIsRefused) {
  const struct {
    int64_t dim;
    const char* rule;
  } wrong[] = {{36, "head_dim must be a multiple of 8, got 36"},
               {4, "head_dim must be a multiple of 8, got 4"},
               {0, "head_dim must be between 8 and 256, got 0"},
               {264, "head_dim must be between 8 and 256, got 264"}};
  for (const auto& w : wrong) {
    const std::vector<float> x = normal(4 * w.dim, 33);
    const OwnedMx t = kit::quantize_floats(x, 4, 1, w.dim, {});
    std::vector<float> out(x.size());
    expect_rejected(run_forward({.q = t.view,
                                 .k = t.view,
                                 .v = t.view,
                                 .out = make_tensor(out.data(), Dtype::f32, 4, 1, w.dim),
                                 .lse = {}}),
                    w.rule);
  }
}

TEST(Reports, A43_WrongCuSeqlensAreRefused) {
  const struct {
    std::vector<int32_t> cu;
    const char* rule;
  } wrong[] = {{{1, 10, 34}, "cu_seqlens[0] must be 0, got 1"},
               {{0, 20, 10}, "cu_seqlens must not decrease, got 10 after 20 at index 2"},
               {{0, 3, 34}, "max_seqlen = 30 must bound every length, got 31 for sequence 1"},
               {{0, 10, 35}, "cu_seqlens[2] must be at most the tensor's tokens = 34, got 35"}};
  for (const auto& w : wrong) {
    SmallCall call;
    AttentionFwd bad = call.args;
    bad.seq_k = {.cu_seqlens = w.cu.data(), .batch = 2, .max_seqlen = 30};
    bad.seq_q = {.batch = 2};
    expect_rejected(run_forward(bad), w.rule);
  }
}

TEST(Reports, A52_ErrorsAreValuesAndWriteNothing) {
  SmallCall call;
  AttentionFwd bad = call.args;
  bad.k.data.shape[0] = 33;
  EXPECT_FALSE(run_forward(bad).ok());
  bad = call.args;
  bad.out.data = nullptr;
  EXPECT_FALSE(run_forward(bad).ok());
  bad = call.args;
  bad.backend = "sm123";
  EXPECT_EQ(run_forward(bad).code, StatusCode::unavailable);
  EXPECT_EQ(attention_fwd(call.args).code, StatusCode::workspace_too_small);
  for (const float x : call.out) EXPECT_TRUE(std::isnan(x));
}

// ---- offsets beyond 31 bits ---------------------------------------------------------------------------------------

TEST(Reports, A14_QuantizerOffsetsBeyond31Bits) {
  constexpr int64_t kTokens = 33, kHeads = 2, kDim = 64;
  std::vector<float> x = normal(kTokens * kHeads * kDim, 14);
  const OwnedMx want = kit::quantize_floats(x, kTokens, kHeads, kDim, {});
  const std::vector<float> values = kit::dequantize_to_floats(want.view, {});
  constexpr int64_t kStrides[][2] = {{int64_t(1) << 27, kDim}, {kDim, int64_t(1) << 32}};  // of a token, of a head
  for (const auto& [token, head] : kStrides) {
    const int64_t span = (kTokens - 1) * token + (kHeads - 1) * head + kDim;
    const SparseMemory in(span * 4), payload(span), out(span * 4);
    if (!in.ok() || !payload.ok() || !out.ok()) GTEST_SKIP() << kNotMapped;
    const auto strided = [&, token = token, head = head](void* data, Dtype dtype) {
      Tensor t = make_tensor(data, dtype, kTokens, kHeads, kDim);
      t.stride = {token, head, 1};
      return t;
    };
    for (int64_t row = 0; row < kTokens * kHeads; ++row) {
      std::memcpy(in.as<float>() + row / kHeads * token + row % kHeads * head, &x[row * kDim], kDim * sizeof(float));
    }
    OwnedMx got = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, kTokens, kHeads, kDim, {});
    got.view.data = strided(payload.as(), Dtype::e4m3);
    kit::require_ok(quantize({.in = strided(in.as(), Dtype::f32), .out = got.view}));
    kit::require_ok(dequantize({.in = got.view, .out = strided(out.as(), Dtype::f32)}));
    EXPECT_EQ(got.scale, want.scale);
    for (int64_t row = 0; row < kTokens * kHeads; ++row) {
      const int64_t at = row / kHeads * token + row % kHeads * head;
      EXPECT_EQ(std::memcmp(payload.as() + at, &want.data[row * kDim], kDim), 0) << row;
      EXPECT_EQ(std::memcmp(out.as<float>() + at, &values[row * kDim], kDim * sizeof(float)), 0) << row;
    }
  }
}

// 225304 rows of dout, 9728 bytes apart. Every row attends to one key, so dv is the sum of dout; only the rows around
// offset 2^31 and the last one are not zero.
TEST(Reports, A46_DoutOffsetsBeyond31Bits) {
  constexpr int64_t kRows = 225304, kStride = 9728, kDim = 8;
  const SparseMemory dout_data((kRows - 1) * kStride + kDim);
  if (!dout_data.ok()) GTEST_SKIP() << kNotMapped;
  constexpr int64_t kWritten[] = {(int64_t(1) << 31) / kStride, (int64_t(1) << 31) / kStride + 1, kRows - 1};
  uint8_t code = 0x38;  // 1, then 2 and 4
  for (const int64_t row : kWritten) {
    std::memset(dout_data.as() + row * kStride, code, kDim);
    code += 8;
  }
  std::vector<uint8_t> one(kDim, 0x38);
  UnitScaled q(one.data(), kRows, 1, kDim, {}), kv(one.data(), 1, 1, kDim, {}),
      dout(dout_data.as(), kRows, 1, kDim, {});
  q.view.data.stride[0] = 0;
  dout.view.data.stride[0] = kStride;
  std::vector<float> out(kRows * kDim), lse(kRows), dq(kRows * kDim, kNan), dk(kDim, kNan), dv(kDim, kNan);
  AttentionFwd fwd{.q = q.view,
                   .k = kv.view,
                   .v = kv.view,
                   .out = make_tensor(out.data(), Dtype::f32, kRows, 1, kDim),
                   .lse = make_tensor(lse.data(), Dtype::f32, 1, kRows)};
  kit::require_ok(run_forward(fwd));
  kit::require_ok(run_backward({.q = q.view,
                                .k = kv.view,
                                .v = kv.view,
                                .dout = dout.view,
                                .out = fwd.out,
                                .lse = fwd.lse,
                                .dq = make_tensor(dq.data(), Dtype::f32, kRows, 1, kDim),
                                .dk = make_tensor(dk.data(), Dtype::f32, 1, 1, kDim),
                                .dv = make_tensor(dv.data(), Dtype::f32, 1, 1, kDim)}));
  EXPECT_EQ(dv, std::vector<float>(kDim, 7.0f));
  EXPECT_EQ(dk, std::vector<float>(kDim, 0.0f));
  EXPECT_EQ(dq, std::vector<float>(kRows * kDim, 0.0f));
}

// Every operand and result with rows 2^30 elements apart, against contiguous ones.
TEST(Reports, A54_StridesBeyond31Bits) {
  constexpr int64_t kTokens = 5, kHeads = 2, kDim = 32, kToken = int64_t(1) << 30, kHead = 4096;
  struct Call {
    std::vector<std::unique_ptr<SparseMemory>> memory;
    Tensor q, k, v, dout, out, dq, dk, dv;
    explicit Call(int64_t token, int64_t head) {
      uint64_t seed = 54;
      for (Tensor* t : {&q, &k, &v, &dout, &out, &dq, &dk, &dv}) {
        const Dtype dtype = memory.size() < 4 ? Dtype::e4m3 : Dtype::f32;
        memory.push_back(
            std::make_unique<SparseMemory>(((kTokens - 1) * token + kHeads * head + kDim) * dtype_size(dtype)));
        if (!memory.back()->ok()) return;
        *t = make_tensor(memory.back()->as(), dtype, kTokens, kHeads, kDim);
        t->stride = {token, head, 1};
        if (dtype == Dtype::f32) continue;
        const std::vector<uint8_t> codes = random_codes(kTokens * kHeads * kDim, ++seed);
        for (int64_t row = 0; row < kTokens * kHeads; ++row) std::memcpy(row_of(*t, row), &codes[row * kDim], kDim);
      }
    }
    bool ok() const { return memory.back()->ok(); }
    static uint8_t* row_of(const Tensor& t, int64_t row) {
      const int64_t at = row / kHeads * t.stride[0] + row % kHeads * t.stride[1];
      return static_cast<uint8_t*>(t.data) + at * dtype_size(t.dtype);
    }
    void run_both() {
      std::vector<float> lse(kHeads * kTokens);
      UnitScaled units(nullptr, kTokens, kHeads, kDim, {});
      const auto mx = [&](const Tensor& data) {
        MxTensor t = units.view;
        t.data = data;
        return t;
      };
      const Tensor lse_view = make_tensor(lse.data(), Dtype::f32, kHeads, kTokens);
      kit::require_ok(run_forward({.q = mx(q), .k = mx(k), .v = mx(v), .out = out, .lse = lse_view}));
      kit::require_ok(run_backward({.q = mx(q),
                                    .k = mx(k),
                                    .v = mx(v),
                                    .dout = mx(dout),
                                    .out = out,
                                    .lse = lse_view,
                                    .dq = dq,
                                    .dk = dk,
                                    .dv = dv}));
    }
  };
  Call far(kToken, kHead), near(kHeads * kDim, kDim);
  if (!far.ok()) GTEST_SKIP() << kNotMapped;
  far.run_both();
  near.run_both();
  for (const auto member : {&Call::out, &Call::dq, &Call::dk, &Call::dv}) {
    for (int64_t row = 0; row < kTokens * kHeads; ++row) {
      EXPECT_EQ(std::memcmp(Call::row_of(far.*member, row), Call::row_of(near.*member, row), kDim * sizeof(float)), 0);
    }
  }
}

// 2^26 keys of 2 heads x 32 channels: 2^32 bytes each of k and v, of which queries see the last 33.
TEST(Reports, A54_PackedKeysBeyond31Bits) {
  constexpr int64_t kTotal = int64_t(1) << 26, kKeys = 33, kHeads = 2, kDim = 32, kRow = kHeads * kDim;
  const SparseMemory k_data(kTotal * kRow), v_data(kTotal * kRow);
  if (!k_data.ok() || !v_data.ok()) GTEST_SKIP() << kNotMapped;
  const std::vector<int32_t> cu_q{0, 0, 5}, cu_k{0, int32_t(kTotal - kKeys), int32_t(kTotal)};
  const Jagged seq_q{.cu_seqlens = cu_q.data(), .batch = 2, .max_seqlen = 5};
  const Jagged seq_k{.cu_seqlens = cu_k.data(), .batch = 2, .max_seqlen = int32_t(kTotal)};
  std::vector<uint8_t> q = random_codes(5 * kRow, 1), k = random_codes(kKeys * kRow, 2),
                       v = random_codes(kKeys * kRow, 3);
  std::memcpy(k_data.as() + (kTotal - kKeys) * kRow, k.data(), k.size());
  std::memcpy(v_data.as() + (kTotal - kKeys) * kRow, v.data(), v.size());
  std::vector<float> got(5 * kRow, kNan), want(5 * kRow, kNan);
  const UnitScaled q_far(q.data(), 5, kHeads, kDim, seq_q), q_near(q.data(), 5, kHeads, kDim, {});
  const UnitScaled k_far(k_data.as(), kTotal, kHeads, kDim, seq_k), v_far(v_data.as(), kTotal, kHeads, kDim, seq_k);
  const UnitScaled k_near(k.data(), kKeys, kHeads, kDim, {}), v_near(v.data(), kKeys, kHeads, kDim, {});
  kit::require_ok(run_forward({.q = q_far.view,
                               .k = k_far.view,
                               .v = v_far.view,
                               .out = make_tensor(got.data(), Dtype::f32, 5, kHeads, kDim),
                               .lse = {},
                               .seq_q = seq_q,
                               .seq_k = seq_k}));
  kit::require_ok(run_forward({.q = q_near.view,
                               .k = k_near.view,
                               .v = v_near.view,
                               .out = make_tensor(want.data(), Dtype::f32, 5, kHeads, kDim),
                               .lse = {}}));
  EXPECT_EQ(got, want);
}

// 8300 sequences of one token, 16 heads of 128: more than 2^31 elements once each is padded to 128 rows. All share the
// same operands, through a zero stride.
TEST(Reports, A54_ManySequencesOfOneToken) {
  constexpr int64_t kTokens = 8300, kHeads = 16, kDim = 128, kRow = kHeads * kDim;
  const Jagged seq{.batch = int32_t(kTokens)};
  std::vector<uint8_t> v = random_codes(kRow, 1), dout = random_codes(kRow, 2), q = random_codes(kRow, 3);
  UnitScaled mx(q.data(), kTokens, kHeads, kDim, seq);
  mx.view.data.stride[0] = 0;
  MxTensor mx_v = mx.view, mx_dout = mx.view;
  mx_v.data.data = v.data();
  mx_dout.data.data = dout.data();
  std::vector<uint16_t> out(kTokens * kRow), dq(kTokens * kRow), dk(kTokens * kRow), dv(kTokens * kRow);
  std::vector<float> lse(kHeads * kTokens);
  const auto view = [&](std::vector<uint16_t>& x) { return make_tensor(x.data(), Dtype::bf16, kTokens, kHeads, kDim); };
  const Tensor lse_view = make_tensor(lse.data(), Dtype::f32, kHeads, kTokens);
  kit::require_ok(run_forward(
      {.q = mx.view, .k = mx.view, .v = mx_v, .out = view(out), .lse = lse_view, .seq_q = seq, .seq_k = seq}));
  kit::require_ok(run_backward({.q = mx.view,
                                .k = mx.view,
                                .v = mx_v,
                                .dout = mx_dout,
                                .out = view(out),
                                .lse = lse_view,
                                .dq = view(dq),
                                .dk = view(dk),
                                .dv = view(dv),
                                .seq_q = seq,
                                .seq_k = seq}));
  for (int64_t i = 0; i < kTokens * kRow; ++i) {  // one key: P = 1 and dS = 0
    ASSERT_EQ(decode_bf16(out[i]), decode_fp8(v[i % kRow], kE4m3)) << i;
    ASSERT_EQ(decode_bf16(dv[i]), decode_fp8(dout[i % kRow], kE4m3)) << i;
    ASSERT_EQ(dq[i] & 0x7FFF, 0) << i;
    ASSERT_EQ(dk[i] & 0x7FFF, 0) << i;
  }
}

// ---- docs/reports.md ----------------------------------------------------------------------------------------------

// Every report has a row with a test or the reason for its exclusion; every test is named there, and every name exists.
TEST(Reports, DocsAndTestsAgree) {
  std::ifstream file(std::string(MXFLASH_SOURCE_DIR) + "/docs/reports.md");
  ASSERT_TRUE(file) << "docs/reports.md";
  const std::string prefix = "Reports.";
  std::set<std::string> named, rows;
  for (std::string line; std::getline(file, line);) {
    for (size_t at = line.find(prefix); at != std::string::npos; at = line.find(prefix, at + 1)) {
      const size_t begin = at + prefix.size();
      size_t end = begin;
      while (end < line.size() && (std::isalnum(static_cast<unsigned char>(line[end])) || line[end] == '_')) ++end;
      named.insert(line.substr(begin, end - begin));
    }
    std::string bar, id;
    std::istringstream(line) >> bar >> id;
    if (bar != "|" || id.size() < 2 || id[0] != 'A' || !std::isdigit(static_cast<unsigned char>(id[1]))) continue;
    EXPECT_TRUE(rows.insert(id).second) << id << " has two rows";
    EXPECT_TRUE(line.find(prefix) != std::string::npos || line.find("Excluded: ") != std::string::npos) << line;
  }
  std::set<std::string> registered, reports;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    if (std::string(suite.name()) != "Reports") continue;
    for (int t = 0; t < suite.total_test_count(); ++t) registered.insert(suite.GetTestInfo(t)->name());
  }
  EXPECT_EQ(named, registered);
  for (int id = 0; id <= 62; ++id) {
    if (!std::set{25, 34, 38, 41, 44, 47, 51, 53, 57}.contains(id))
      reports.insert("A" + std::to_string(id));  // no such
  }
  EXPECT_EQ(rows, reports);
}

}  // namespace
}  // namespace mxflash
