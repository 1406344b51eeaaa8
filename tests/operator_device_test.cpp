// The training operator, forward and backward, on a Hopper card: BF16 in and out, beside the same calls of ref.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <mxflash/operator.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <ostream>
#include <string>
#include <vector>

#include "captured_graph.h"
#include "kit/call.h"
#include "kit/compare.h"
#include "kit/operands.h"
#include "kit/random.h"
#include "kit/safetensors.h"
#include "mx/float16.h"
#include "on_card.h"

namespace mxflash::kit {
namespace {

constexpr double kLossDb = 0.15, kNoise = 2e-3;  // tests/attention_bwd_on_card.h

// BF16 operands of a case; the same values for the oracle.
struct Training {
  AttentionCase c;
  Operands x;
  std::vector<uint16_t> q, k, v, dout;
  std::vector<int32_t> cu_q, cu_k;
  OracleResult exact;

  Training(const AttentionCase& attention_case, Operands operands)
      : c(attention_case),
        x(std::move(operands)),
        q(rounded(x.q)),
        k(rounded(x.k)),
        v(rounded(x.v)),
        dout(rounded(x.dout)),
        cu_q(cu_seqlens(c.lens_q)),
        cu_k(cu_seqlens(c.lens_k)),
        exact(oracle_attention(make_problem(c, x))) {}

  static std::vector<uint16_t> rounded(std::vector<float>& x) {
    std::vector<uint16_t> half;
    for (float& value : x) {
      half.push_back(encode_bf16(value));
      value = decode_bf16(half.back());
    }
    return half;
  }
};

// What a call asks for beside its operands.
struct Asks {
  const char* name;
  Recipe recipe{};
  Dtype out = Dtype::bf16, gradients = Dtype::bf16, dq_accum = Dtype::none;
  bool dlse = false, shared_q = false;
  bool heads_first = false;    // dout, out and gradients are [heads, tokens, dim] in memory
  bool constant_dout = false;  // an expanded scalar: all strides zero
  bool mx_gradients = false;
};

void PrintTo(const Asks& a, std::ostream* os) { *os << a.name; }

struct Result {
  std::vector<float> out, lse, dq, dk, dv;
};

// [tokens, heads, dim] in one of two orders of memory.
Tensor view_of(void* data, Dtype dtype, int64_t tokens, int64_t heads, int64_t dim, bool heads_first) {
  Tensor t = make_tensor(data, dtype, tokens, heads, dim);
  if (heads_first) t.stride = {dim, tokens * dim, 1, 0};
  return t;
}
template <class T>
std::vector<T> reordered(const std::vector<T>& x, int64_t outer, int64_t inner, int64_t dim) {
  std::vector<T> y(x.size());
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t i = 0; i < inner; ++i) {
      std::copy_n(x.begin() + (o * inner + i) * dim, dim, y.begin() + (i * outer + o) * dim);
    }
  }
  return y;
}

Result run(const Training& t, const Asks& a, const char* backend) {
  const AttentionCase& c = t.c;
  const int64_t heads = c.num_heads_q, heads_kv = c.num_heads_kv, rows = total_out(c);
  const auto input = [](const std::vector<uint16_t>& x, int64_t tokens, int64_t n, int64_t dim) {
    return make_tensor(const_cast<uint16_t*>(x.data()), Dtype::bf16, tokens, n, dim);
  };
  struct Output {
    FloatOutput storage;
    Tensor view;
    bool heads_first;
    Output(Dtype dtype, int64_t tokens, int64_t n, int64_t dim, bool first)
        : storage(dtype, tokens, n, dim, 0xFF),
          view(view_of(storage.view.data, dtype, tokens, n, dim, first)),
          heads_first(first) {}
    std::vector<float> values() const {
      const auto& s = view.shape;
      return heads_first ? reordered(storage.widened(), s[1], s[0], s[2]) : storage.widened();
    }
  };
  const Output out(a.out, rows, heads, c.head_dim_v, a.heads_first),
      dq(a.gradients, total_q(c), heads, c.head_dim, a.heads_first),
      dk(a.gradients, total_k(c), heads_kv, c.head_dim, a.heads_first),
      dv(a.gradients, total_k(c), heads_kv, c.head_dim_v, a.heads_first);
  Result r;
  r.lse.assign(size_t(heads * rows), std::nanf(""));
  const Jagged seq_k{t.cu_k.data(), batch(c), *std::max_element(c.lens_k.begin(), c.lens_k.end())};
  OperatorFwd fwd{.q = input(t.q, total_q(c), heads, c.head_dim),
                  .k = input(t.k, total_k(c), heads_kv, c.head_dim),
                  .v = input(t.v, total_k(c), heads_kv, c.head_dim_v),
                  .out = out.view,
                  .lse = make_tensor(r.lse.data(), Dtype::f32, heads, rows),
                  .recipe = a.recipe,
                  .seq_k = seq_k,
                  .mask = c.mask,
                  .shared_q = c.shared_q,
                  .backend = backend};
  if (!c.shared_q) {
    fwd.seq_q = {t.cu_q.data(), batch(c), *std::max_element(c.lens_q.begin(), c.lens_q.end())};
  }
  AlignedBuffer saved;
  require_ok(call(fwd, saved));
  fwd.saved = saved.data();
  fwd.saved_size = saved.size();

  const std::vector<uint16_t> dout = a.heads_first ? reordered(t.dout, rows, heads, c.head_dim_v) : t.dout;
  uint16_t one = encode_bf16(1);
  OperatorBwd bwd{
      .fwd = fwd,
      .dout = view_of(const_cast<uint16_t*>(dout.data()), Dtype::bf16, rows, heads, c.head_dim_v, a.heads_first),
      .dq = dq.view,
      .dk = dk.view,
      .dv = dv.view,
      // that of ref ends at 16
      .dq_accum = is_device_backend(backend) ? a.dq_accum : Dtype::f32};
  if (a.constant_dout) {
    bwd.dout.data = &one;
    bwd.dout.stride = {0, 0, 0, 0};
  }
  if (a.dlse) bwd.dlse = make_tensor(const_cast<float*>(t.x.dlse.data()), Dtype::f32, heads, rows);
  OwnedMx dk_mx, dv_mx;
  if (a.mx_gradients) {
    const auto make = [&](int64_t dim) {
      return make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, total_k(c), heads_kv, dim, seq_k);
    };
    dk_mx = make(c.head_dim);
    dv_mx = make(c.head_dim_v);
    bwd.dk_mx = dk_mx.view;
    bwd.dv_mx = dv_mx.view;
    bwd.dk = bwd.dv = {};
  }
  require_ok(call(bwd));
  r.out = out.values();
  r.dq = dq.values();
  r.dk = a.mx_gradients ? dequantize_to_floats(dk_mx.view, seq_k) : dk.values();
  r.dv = a.mx_gradients ? dequantize_to_floats(dv_mx.view, seq_k) : dv.values();
  return r;
}

void expect_beside_ref(const Training& t, const Asks& a, const char* backend = card_backend()) {
  const Result ref = run(t, a, "ref"), got = run(t, a, backend);
  const double noise = a.constant_dout ? 2 * kNoise : kNoise;  // terms of dv have one sign, and dout no error
  const auto expect = [&](const char* name, const std::vector<double>& exact, const std::vector<float>& want,
                          const std::vector<float>& have, double loss_db) {
    const BesideRef b = beside_ref(exact, want, have, loss_db, noise);
    EXPECT_TRUE(b.ok()) << name << ": SQNR " << b.got.sqnr_db << " dB, ref " << b.ref.sqnr_db << " dB, worst at "
                        << b.got.worst_index << ", non-finite " << b.got.nonfinite_mismatch;
  };
  expect("out", t.exact.out, ref.out, got.out, 0.5);  // a mean of v: docs/hopper.md, Accumulation
  expect("lse", t.exact.lse, ref.lse, got.lse, 0.5);
  expect("dq", t.exact.dq, ref.dq, got.dq, kLossDb);
  expect("dk", t.exact.dk, ref.dk, got.dk, kLossDb);
  expect("dv", t.exact.dv, ref.dv, got.dv, kLossDb);
}

class OperatorOnHopper : public OnHopper {};
class OperatorOnCard : public OnAnyCard {};
class OperatorDevice : public OnAnyCard, public testing::WithParamInterface<Asks> {};

TEST_P(OperatorDevice, BesideRef) {
  const Asks& a = GetParam();
  for (const int32_t dim : {128, 64, 96}) {
    SCOPED_TRACE(dim);
    AttentionCase c{.name = "operator",
                    .lens_q = {150, 0, 129, 300},
                    .lens_k = {200, 64, 129, 300},
                    .num_heads_q = 4,
                    .num_heads_kv = 2,
                    .head_dim = dim,
                    .head_dim_v = dim,
                    .mask = {.causal = true},
                    .shared_q = a.shared_q,
                    .with_dlse = a.dlse};
    if (a.shared_q) c.lens_q = {150};
    Operands x = make_operands(c);
    for (float& k : x.k) k += 0.5f;
    for (float& v : x.v) v += 1;
    if (a.constant_dout) std::fill(x.dout.begin(), x.dout.end(), 1.0f);
    expect_beside_ref(Training(c, x), a);
  }
}

// What FP8 tensor cores do not take, and what is asked for by name, goes to the exact kernels in both directions.
TEST_F(OperatorOnHopper, ExactKernels) {
  for (const auto& [dim, dim_v] : {std::pair(64, 64), {128, 128}, {192, 128}, {256, 256}}) {
    SCOPED_TRACE(testing::Message() << "dims " << dim << ", " << dim_v);
    const AttentionCase c{.name = "exact",
                          .lens_q = {150, 0, 129},
                          .lens_k = {200, 64, 129},
                          .num_heads_q = 4,
                          .num_heads_kv = 2,
                          .head_dim = dim,
                          .head_dim_v = dim_v,
                          .mask = {.causal = true},
                          .with_dlse = true};
    expect_beside_ref(Training(c, make_operands(c)), {.name = "exact", .dlse = true}, "sm90_bf16");
  }
}

constexpr Recipe kPlain{.rotate_qk = false, .smooth_k = false, .smooth_v = false};
Recipe with(Recipe r, Dtype grad_element, MxBlock block, MxBlock block_col) {
  r.grad_element = grad_element;
  r.block = block;
  r.block_col = block_col;
  return r;
}

INSTANTIATE_TEST_SUITE_P(
    Calls, OperatorDevice,
    testing::Values(Asks{.name = "defaults"}, Asks{.name = "plain", .recipe = kPlain},
                    Asks{.name = "smooth_k", .recipe = {.rotate_qk = false, .smooth_v = false}},
                    Asks{.name = "smooth_v", .recipe = {.rotate_qk = false, .smooth_k = false}},
                    Asks{.name = "f32", .out = Dtype::f32, .gradients = Dtype::f32},
                    Asks{.name = "f16", .out = Dtype::f16, .gradients = Dtype::f16}, Asks{.name = "dlse", .dlse = true},
                    Asks{.name = "dlse_heads_first", .dlse = true, .heads_first = true},
                    Asks{.name = "constant_dout", .constant_dout = true},
                    Asks{.name = "dq_f32", .dq_accum = Dtype::f32}, Asks{.name = "dq_f16", .dq_accum = Dtype::f16},
                    Asks{.name = "shared_q", .dlse = true, .shared_q = true},
                    Asks{.name = "mx_gradients", .mx_gradients = true},
                    Asks{.name = "e5m2", .recipe = with({}, Dtype::e5m2, MxBlock::square32, MxBlock::square32)},
                    Asks{.name = "element_e5m2", .recipe = {.element = Dtype::e5m2}},
                    Asks{.name = "two_payloads", .recipe = with({}, Dtype::e4m3, MxBlock::row32, MxBlock::col32)},
                    Asks{.name = "two_payloads_e5m2", .recipe = with({}, Dtype::e5m2, MxBlock::row32, MxBlock::col32)}),
    [](const auto& info) { return std::string(info.param.name); });

// A training step, forward and backward, captured once and replayed with other tokens and lengths of the same capacity.
void training_step_in_a_graph(bool deterministic) {
  constexpr int64_t kCapacity = 700, kHeads = 4, kHeadsKv = 2, kDim = 128;
  const auto random_bf16 = [](int64_t heads, uint64_t seed) {
    Random random(seed);
    std::vector<uint16_t> x(size_t(kCapacity * heads * kDim));
    for (uint16_t& value : x) value = encode_bf16(float(random.normal() + 0.25));
    return x;
  };
  const auto view = [](const DeviceBuffer& b, int64_t heads) {
    return on_card(make_tensor(b.data(), Dtype::bf16, kCapacity, heads, kDim));
  };
  const DeviceBuffer q = upload(random_bf16(kHeads, 1)), k = upload(random_bf16(kHeadsKv, 2)),
                     v = upload(random_bf16(kHeadsKv, 3)), dout = upload(random_bf16(kHeads, 4));
  const DeviceBuffer cu = upload(std::vector<int32_t>{0, 200, 400, 700});
  const DeviceBuffer out(q.size()), dq(q.size()), dk(k.size()), dv(v.size());
  const Jagged seq{static_cast<const int32_t*>(cu.data()), 3, int32_t(kCapacity)};
  OperatorFwd fwd{.q = view(q, kHeads),
                  .k = view(k, kHeadsKv),
                  .v = view(v, kHeadsKv),
                  .out = view(out, kHeads),
                  .seq_q = seq,
                  .seq_k = seq,
                  .mask = {.causal = true},
                  .backend = card_backend()};
  const DeviceBuffer saved(operator_saved(fwd)), fwd_workspace(operator_fwd_workspace(fwd));
  fwd.saved = saved.data();
  fwd.saved_size = saved.size();
  fwd.workspace = fwd_workspace.data();
  fwd.workspace_size = fwd_workspace.size();
  OperatorBwd bwd{.fwd = fwd,
                  .dout = view(dout, kHeads),
                  .dq = view(dq, kHeads),
                  .dk = view(dk, kHeadsKv),
                  .dv = view(dv, kHeadsKv),
                  .deterministic = deterministic};
  const DeviceBuffer bwd_workspace(operator_bwd_workspace(bwd));
  bwd.workspace = bwd_workspace.data();
  bwd.workspace_size = bwd_workspace.size();
  const auto step = [&](Stream stream) {
    require_ok(operator_fwd(fwd, stream));
    require_ok(operator_bwd(bwd, stream));
  };
  const DeviceBuffer* results[] = {&out, &dq, &dk, &dv};
  const auto poison = [&] {
    for (const DeviceBuffer* r : results) r->fill(0xFF, nullptr);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  };
  step(nullptr);
  const CapturedGraph graph(step);
  uint64_t seed = 10;
  for (const std::vector<int32_t>& lengths :
       std::vector<std::vector<int32_t>>{{0, 1, 1, 513}, {0, 0, 700, 700}, {0, 200, 400, 700}}) {
    cu.upload(lengths.data(), cu.size(), nullptr);
    for (const auto& [to, heads] : {std::pair{&q, kHeads}, {&k, kHeadsKv}, {&v, kHeadsKv}, {&dout, kHeads}}) {
      const std::vector<uint16_t> tokens = random_bf16(heads, ++seed);
      to->upload(tokens.data(), to->size(), nullptr);
    }
    poison();
    graph.replay();
    std::vector<std::vector<uint16_t>> replayed;
    for (const DeviceBuffer* r : results) replayed.push_back(download<uint16_t>(*r));
    poison();
    step(nullptr);
    for (size_t n = 0; n < replayed.size(); ++n) {
      const std::vector<uint16_t> direct = download<uint16_t>(*results[n]);
      for (const uint16_t x : direct) ASSERT_NE(x & 0x7F80, 0x7F80) << n << ": not finite";
      if (results[n] != &dq || deterministic) {
        EXPECT_EQ(direct, replayed[n]) << n;
        continue;
      }
      std::vector<double> want;  // the order of dq's sums is free
      std::vector<float> got;
      for (const uint16_t x : direct) want.push_back(double(decode_bf16(x)));
      for (const uint16_t x : replayed[n]) got.push_back(decode_bf16(x));
      EXPECT_GE(compare(want, got).sqnr_db, 40);
    }
    for (size_t i = size_t(lengths.back()) * size_t(kHeads * kDim); i < replayed[0].size(); ++i) {
      ASSERT_EQ(replayed[0][i] | replayed[1][i], 0) << i;  // rows of no sequence
    }
  }
}
TEST_F(OperatorOnCard, TrainingStepInAGraph) { training_step_in_a_graph(true); }
TEST_F(OperatorOnCard, TrainingStepInAGraphInAnyOrder) { training_step_in_a_graph(false); }

// Passes over q, k and v overlap, and the means of their inputs: what they leave is the same bytes in each run.
TEST_F(OperatorOnCard, SavedIsTheSameInManyRuns) {
  constexpr int64_t kTokens = 3000, kHeads = 8, kDim = 128;
  std::vector<uint16_t> tokens(size_t(kTokens * kHeads * kDim));
  Random random(5);
  for (uint16_t& x : tokens) x = encode_bf16(float(random.normal() + 0.25));
  const DeviceBuffer in = upload(tokens), out(in.size()), cu = upload(std::vector<int32_t>{0, 1, 1000, 1000, 2999});
  const Tensor x = on_card(make_tensor(in.data(), Dtype::bf16, kTokens, kHeads, kDim));
  for (const bool plain : {false, true}) {
    for (const bool jagged : {false, true}) {
      SCOPED_TRACE(testing::Message() << (plain ? "plain" : "default") << (jagged ? ", jagged" : ""));
      const Jagged seq = jagged ? Jagged{static_cast<const int32_t*>(cu.data()), 4, int32_t(kTokens)} : Jagged{};
      OperatorFwd fwd{.q = x,
                      .k = x,
                      .v = x,
                      .out = on_card(make_tensor(out.data(), Dtype::bf16, kTokens, kHeads, kDim)),
                      .seq_q = seq,
                      .seq_k = seq,
                      .mask = {.causal = true},
                      .backend = card_backend()};
      if (plain) fwd.recipe.rotate_qk = fwd.recipe.smooth_k = fwd.recipe.smooth_v = false;
      const DeviceBuffer saved(operator_saved(fwd)), workspace(operator_fwd_workspace(fwd));
      fwd.saved = saved.data(), fwd.saved_size = saved.size();
      fwd.workspace = workspace.data(), fwd.workspace_size = workspace.size();
      std::vector<uint8_t> first;
      for (int n = 0; n < 100; ++n) {
        saved.fill(0xFF, nullptr);
        workspace.fill(0xFF, nullptr);
        require_ok(operator_fwd(fwd));
        const std::vector<uint8_t> bytes = download<uint8_t>(saved);
        if (n == 0) first = bytes;
        ASSERT_TRUE(bytes == first) << "run " << n;
      }
    }
  }
}

// dq is added up in FP16 where sm90 does it and keys are not too many: seen by the workspace, which holds the sums.
TEST_F(OperatorOnHopper, SumsOfDqAreInHalfUnlessKeysAreMany) {
  constexpr Dtype kAsItComes = OperatorBwd{}.dq_accum;
  struct Limit {
    bool smooth_k, deterministic;
    int64_t keys;
  };
  for (const Limit& limit : {Limit{true, false, 1 << 17}, Limit{true, true, 1 << 17}, Limit{false, false, 1 << 14},
                             Limit{false, true, 1 << 12}}) {
    const auto workspace = [&](Dtype dq_accum, int64_t keys, const char* backend) {
      const auto tensor = [](int64_t tokens) { return on_card(make_tensor(nullptr, Dtype::bf16, tokens, 2, 64)); };
      OperatorBwd a{.fwd = {.q = tensor(256),
                            .k = tensor(keys),
                            .v = tensor(keys),
                            .out = tensor(256),
                            .recipe = {.smooth_k = limit.smooth_k},
                            .backend = backend},
                    .dout = tensor(256),
                    .dq = tensor(256),
                    .dk = tensor(keys),
                    .dv = tensor(keys)};
      a.dq_accum = dq_accum;
      a.deterministic = limit.deterministic;
      return operator_bwd_workspace(a);
    };
    for (const int64_t keys : {int64_t{300}, limit.keys, limit.keys + 1}) {
      SCOPED_TRACE(keys);
      const size_t half = workspace(Dtype::f16, keys, "sm90"), full = workspace(Dtype::f32, keys, "sm90");
      EXPECT_LT(half, full);
      EXPECT_EQ(workspace(kAsItComes, keys, "sm90"), keys <= limit.keys ? half : full);
      EXPECT_EQ(workspace(kAsItComes, keys, nullptr), keys <= limit.keys ? half : full);
    }
    EXPECT_EQ(workspace(kAsItComes, 300, "sm90_bf16"), workspace(Dtype::f32, 300, "sm90_bf16"));
  }
}

// Operands of a small GPT. MXFLASH_DATA is where the whole layers are.
TEST_F(OperatorOnCard, RealOperandsThroughTheOperator) {
  const char* set = std::getenv("MXFLASH_DATA");
  const std::string shared = set ? set : std::string(MXFLASH_SOURCE_DIR) + "/../shared/data";
  int files = 0;
  for (const std::string& path :
       {shared + "/gpt_layer1.safetensors", shared + "/gpt_layer5.safetensors", shared + "/gpt_layer1_512.safetensors",
        std::string(MXFLASH_SOURCE_DIR) + "/examples/data/gpt_layer1_512.safetensors"}) {
    if (!std::filesystem::exists(path)) continue;
    ++files;
    SCOPED_TRACE(path);
    const SafetensorsFile file(path);
    const auto& shape = file.entry("q").shape;
    const auto read = [&](const char* name) {
      const HostTensor t = file.read(name);
      std::vector<float> x(size_t(t.numel()), 0.0f);
      for (size_t i = 0; i < x.size(); ++i) x[i] = decode_bf16(reinterpret_cast<const uint16_t*>(t.bytes.data())[i]);
      return x;
    };
    const AttentionCase c{.name = "real",
                          .lens_q = {int32_t(shape[0])},
                          .lens_k = {int32_t(shape[0])},
                          .num_heads_q = int32_t(shape[1]),
                          .num_heads_kv = int32_t(shape[1]),
                          .head_dim = int32_t(shape[2]),
                          .head_dim_v = int32_t(shape[2]),
                          .mask = {.causal = true}};
    const Training t(c, {read("q"), read("k"), read("v"), read("dout"), {}});
    expect_beside_ref(t, {.name = "defaults"});
    expect_beside_ref(t, {.name = "plain", .recipe = kPlain});
  }
  if (files == 0) GTEST_SKIP() << "no operands; set MXFLASH_DATA";
}

}  // namespace
}  // namespace mxflash::kit
