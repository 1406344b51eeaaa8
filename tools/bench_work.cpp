#include "tools/bench_work.h"

#include <mxflash/attention.h>
#include <mxflash/gemm.h>
#include <mxflash/quantize.h>
#include <mxflash/rmsnorm.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kit/device_memory.h"
#include "kit/mx_attention.h"
#include "kit/oracle.h"
#include "kit/random.h"
#include "kit/runner.h"
#include "kit/timer.h"
#include "kit/verify.h"
#include "kit/verify_bytes.h"

namespace mxflash::tools {
namespace {

using kit::OwnedMx;
using kit::require_ok;

constexpr int64_t kSampleTokens = 2048, kSampleDim = 128;
constexpr double kOracleMs = 5;
constexpr int64_t kVerifyDepth = 512;  // of a GEMM: its rows and columns are clipped anyway

// N(0, 1) cut at 3.5: blocks of 1024 such values all get the scale 2^-7, so that payload may be copied anywhere.
const std::vector<float>& sample() {
  static const std::vector<float> values = [] {
    std::vector<float> x(kSampleTokens * kSampleDim);
    kit::Random random(2);
    kit::fill_normal(random, x);
    for (float& value : x) value = std::clamp(value, -3.5f, 3.5f);
    return x;
  }();
  return values;
}

// Copies `from` over and over, beginning at another place for another `stream`.
template <class T>
void fill_cyclic(const std::vector<T>& from, size_t stream, std::vector<T>& to) {
  size_t at = stream * 4099 % from.size();
  for (size_t i = 0; i < to.size();) {
    const size_t count = std::min(from.size() - at, to.size() - i);
    std::copy_n(from.begin() + int64_t(at), count, to.begin() + int64_t(i));
    i += count;
    at = 0;
  }
}

OwnedMx random_mx(int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq, size_t stream) {
  static const OwnedMx quantized = kit::ref_quantize(sample(), kSampleTokens, 1, kSampleDim, {});
  OwnedMx t = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, tokens, heads, dim, seq);
  fill_cyclic(quantized.data, stream, t.data);
  std::fill(t.scale.begin(), t.scale.end(), quantized.scale[0]);
  return t;
}

// A BF16 tensor of random values, or for results.
struct Bf16 {
  std::vector<uint16_t> bits;
  explicit Bf16(int64_t size) : bits(size_t(size)) {}
  Bf16(int64_t size, size_t stream) : Bf16(size) {
    static const std::vector<uint16_t> values = [] {
      std::vector<uint16_t> x;
      for (const float value : sample()) x.push_back(uint16_t(std::bit_cast<uint32_t>(value) >> 16));
      return x;
    }();
    fill_cyclic(values, stream, bits);
  }
  double bytes() const { return 2 * double(bits.size()); }
  Tensor view(auto... extent) { return make_tensor(bits.data(), Dtype::bf16, extent...); }
};

double bytes_of(const OwnedMx& t) { return double(t.data.size() + t.scale.size()); }

// cu_seqlens and the tokens of one side.
struct Lengths {
  std::vector<int32_t> cu;  // empty: equal lengths
  int64_t tokens = 0;
  int32_t batch = 1, longest = 0;
  Lengths(const std::vector<int32_t>& lens, bool jagged)
      : tokens(kit::sum_of(lens)), batch(int32_t(lens.size())), longest(*std::ranges::max_element(lens)) {
    if (jagged) cu = kit::cu_seqlens(lens);
  }
  Jagged seq() const {
    return cu.empty() ? Jagged{.batch = batch} : Jagged{.cu_seqlens = cu.data(), .batch = batch, .max_seqlen = longest};
  }
};

// ---- attention --------------------------------------------------------------------------------------------------

struct AttentionMemory {
  kit::MxAttention mx;
  Bf16 out{0}, dq{0}, dk{0}, dv{0};
  std::vector<float> lse;
  std::vector<uint8_t> row_exponent;
  std::string backend;
  AttentionFwd fwd;
  AttentionBwd bwd;
  kit::AlignedBuffer workspace;
};

std::shared_ptr<AttentionMemory> attention_memory(const BenchShape& s, const std::string& backend, CpuMath cpu_math) {
  const auto m = std::make_shared<AttentionMemory>();
  const Lengths q(lens_q(s), s.jagged && !s.shared_q), k(lens_k(s), s.jagged);
  const int64_t total_out = s.shared_q ? s.batch * q.tokens : q.tokens;
  kit::MxAttention& mx = m->mx;
  mx.cu_seqlens_q = q.cu;
  mx.cu_seqlens_k = k.cu;
  mx.batch = k.batch;
  mx.mask = s.mask;
  mx.shared_q = s.shared_q;
  mx.q = random_mx(q.tokens, s.num_heads_q, s.head_dim, mx.seq_q(), 1);
  mx.k = random_mx(k.tokens, s.num_heads_kv, s.head_dim, mx.seq_k(), 2);
  mx.v = random_mx(k.tokens, s.num_heads_kv, s.head_dim_v, mx.seq_k(), 3);
  const Jagged seq_out = s.shared_q ? Jagged{.batch = k.batch} : mx.seq_q();
  mx.dout = random_mx(total_out, s.num_heads_q, s.head_dim_v, seq_out, 4);
  m->out = Bf16(total_out * s.num_heads_q * s.head_dim_v);
  m->lse.resize(size_t(s.num_heads_q * total_out));
  m->row_exponent.resize(m->lse.size());
  m->backend = backend;
  m->fwd = {.q = mx.q.view,
            .k = mx.k.view,
            .v = mx.v.view,
            .out = m->out.view(total_out, s.num_heads_q, s.head_dim_v),
            .lse = make_tensor(m->lse.data(), Dtype::f32, s.num_heads_q, total_out),
            .row_exponent = make_tensor(m->row_exponent.data(), Dtype::u8, s.num_heads_q, total_out),
            .seq_q = mx.seq_q(),
            .seq_k = mx.seq_k(),
            .mask = s.mask,
            .shared_q = s.shared_q,
            .cpu_math = cpu_math,
            .backend = m->backend.c_str()};
  return m;
}

// Exact attention in float64 on the same operands, in ms. With `backward`, only what the backward adds; NaN if noise
// hid it.
double time_oracle(const BenchShape& s, const kit::MxAttention& mx, bool backward) {
  kit::OracleProblem problem = kit::dequantized_problem(attention_case(s), mx);
  problem.num_threads = num_threads();
  // The least of as many runs as take kOracleMs: in a difference of short ones noise would be more than what is left.
  const auto run = [&] {
    double least = HUGE_VAL;
    for (double sum = 0; sum < kOracleMs;) {
      const double ms = kit::milliseconds([&] { kit::oracle_attention(problem); });
      least = std::min(least, ms);
      sum += ms;
    }
    return least;
  };
  const double both = backward ? run() : 0;
  problem.dout.clear();
  const double forward = run();
  if (!backward) return forward;
  return both > forward ? both - forward : std::numeric_limits<double>::quiet_NaN();
}

struct MxOperand {
  const char* name;
  const OwnedMx* mx;
  Jagged seq;
};

std::vector<MxOperand> mx_operands(const kit::MxAttention& mx, bool backward) {
  std::vector<MxOperand> operands = {{"q", &mx.q, mx.seq_q()}, {"k", &mx.k, mx.seq_k()}, {"v", &mx.v, mx.seq_k()}};
  if (backward) operands.push_back({"dout", &mx.dout, mx.seq_out()});
  return operands;
}

// Dequantizes into memory of its own, one buffer an operand.
std::function<void()> dequantizer(std::shared_ptr<const AttentionMemory> m, bool backward, Dtype dtype) {
  const std::vector<MxOperand> operands = mx_operands(m->mx, backward);
  const auto buffers = std::make_shared<std::vector<std::vector<uint8_t>>>();
  for (const MxOperand& operand : operands) {
    buffers->emplace_back(operand.mx->data.size() * size_t(dtype == Dtype::f32 ? 4 : 2));
  }
  return [m, operands, buffers, dtype] {
    for (size_t i = 0; i < operands.size(); ++i) {
      const MxTensor& in = operands[i].mx->view;
      const Tensor out = make_tensor((*buffers)[i].data(), dtype, in.data.shape[0], in.data.shape[1], in.data.shape[2]);
      require_ok(dequantize({.in = in, .out = out, .seq = operands[i].seq}));
    }
  };
}

void write_operands(const AttentionMemory& m, bool backward, const std::string& folder) {
  for (const MxOperand& operand : mx_operands(m.mx, backward)) {
    const std::string path = folder + "/" + operand.name;
    const std::vector<float> x = kit::dequantize_to_floats(operand.mx->view, operand.seq);
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(x.data()), std::streamsize(x.size() * sizeof(float)));
    if (!file.flush()) throw std::runtime_error("cannot write " + path);
  }
}

// What Work has for peers in other processes.
Work for_peers(Work work, const std::shared_ptr<AttentionMemory>& m, bool backward) {
  work.dequantizer = [m, backward](Dtype dtype) { return dequantizer(m, backward, dtype); };
  work.write_operands = [m, backward](const std::string& folder) { write_operands(*m, backward, folder); };
  return work;
}

double operand_bytes(const AttentionMemory& m) {
  return bytes_of(m.mx.q) + bytes_of(m.mx.k) + bytes_of(m.mx.v) + m.out.bytes() + 5 * double(m.lse.size());
}

Work prepare_fwd(const BenchShape& s, const std::string& backend, CpuMath cpu_math) {
  const auto m = attention_memory(s, backend, cpu_math);
  m->workspace = kit::AlignedBuffer(attention_fwd_workspace(m->fwd));
  m->fwd.workspace = m->workspace.data();
  m->fwd.workspace_size = m->workspace.size();
  return for_peers({.run = [m] { require_ok(attention_fwd(m->fwd)); },
                    .flops = attention_flops(s, BenchOp::attention_fwd),
                    .bytes = operand_bytes(*m),
                    .workspace_bytes = double(m->workspace.size()),
                    .peer = "oracle_f64",
                    .run_peer = [m, s] { return time_oracle(s, m->mx, false); }},
                   m, false);
}

// The forward's results come from the same backend, or from ref if it has no forward.
Work prepare_bwd(const BenchShape& s, const std::string& backend, CpuMath cpu_math) {
  const std::vector<std::string> forwards = kit::available_backends(Operation::attention_fwd);
  const auto m = attention_memory(s, std::ranges::count(forwards, backend) > 0 ? backend : "ref", cpu_math);
  {
    const kit::AlignedBuffer workspace(attention_fwd_workspace(m->fwd));
    AttentionFwd fwd = m->fwd;
    fwd.workspace = workspace.data();
    fwd.workspace_size = workspace.size();
    require_ok(attention_fwd(fwd));
  }
  m->backend = backend;
  const auto& shape_q = m->mx.q.view.data.shape;
  const auto &shape_k = m->mx.k.view.data.shape, &shape_v = m->mx.v.view.data.shape;
  m->dq = Bf16(m->mx.q.view.data.numel());
  m->dk = Bf16(m->mx.k.view.data.numel());
  m->dv = Bf16(m->mx.v.view.data.numel());
  m->bwd = {.q = m->mx.q.view,
            .k = m->mx.k.view,
            .v = m->mx.v.view,
            .dout = m->mx.dout.view,
            .out = m->fwd.out,
            .lse = m->fwd.lse,
            .row_exponent = m->fwd.row_exponent,
            .dq = m->dq.view(shape_q[0], shape_q[1], shape_q[2]),
            .dk = m->dk.view(shape_k[0], shape_k[1], shape_k[2]),
            .dv = m->dv.view(shape_v[0], shape_v[1], shape_v[2]),
            .seq_q = m->mx.seq_q(),
            .seq_k = m->mx.seq_k(),
            .mask = s.mask,
            .shared_q = s.shared_q,
            .cpu_math = cpu_math,
            .backend = m->backend.c_str()};
  m->workspace = kit::AlignedBuffer(attention_bwd_workspace(m->bwd));
  m->bwd.workspace = m->workspace.data();
  m->bwd.workspace_size = m->workspace.size();
  return for_peers({.run = [m] { require_ok(attention_bwd(m->bwd)); },
                    .flops = attention_flops(s, BenchOp::attention_bwd),
                    .bytes = operand_bytes(*m) + bytes_of(m->mx.dout) + m->dq.bytes() + m->dk.bytes() + m->dv.bytes(),
                    .workspace_bytes = double(m->workspace.size()),
                    .saved_bytes = operand_bytes(*m),
                    .peer = "oracle_f64",
                    .run_peer = [m, s] { return time_oracle(s, m->mx, true); }},
                   m, true);
}

// ---- operations on tokens ---------------------------------------------------------------------------------------

struct TokenMemory {
  Lengths lengths;
  Bf16 in, weight{0};
  OwnedMx out;
  std::string backend;
  std::vector<kit::AlignedBuffer> aligned{};

  // The same tensor at a multiple of 64 bytes, where frameworks put theirs; a vector's memory is 16 bytes beside it.
  Tensor align(Tensor t) {
    const size_t size = size_t(t.numel() * dtype_size(t.dtype));
    aligned.emplace_back(size);
    if (size > 0) std::memcpy(aligned.back().data(), t.data, size);
    t.data = aligned.back().data();
    return t;
  }
};

std::shared_ptr<TokenMemory> token_memory(const BenchShape& s, const std::string& backend) {
  Lengths lengths(lens_q(s), s.jagged && !s.shared_q);
  const int64_t tokens = lengths.tokens;
  const auto m = std::make_shared<TokenMemory>(
      TokenMemory{.lengths = std::move(lengths), .in = Bf16(tokens * s.hidden(), 5), .out = {}, .backend = backend});
  m->out = random_mx(tokens, s.num_heads_q, s.head_dim, m->lengths.seq(), 6);
  m->out.view.data = m->align(m->out.view.data);
  return m;
}

Work prepare_quantize(const BenchShape& s, const std::string& backend) {
  const auto m = token_memory(s, backend);
  const Tensor in = m->align(m->in.view(m->lengths.tokens, s.num_heads_q, s.head_dim));
  return {.run =
              [m, in] {
                require_ok(
                    quantize({.in = in, .out = m->out.view, .seq = m->lengths.seq(), .backend = m->backend.c_str()}));
              },
          .bytes = m->in.bytes() + bytes_of(m->out)};
}

Work prepare_dequantize(const BenchShape& s, const std::string& backend) {
  const auto m = token_memory(s, backend);
  const Tensor out = m->align(m->in.view(m->lengths.tokens, s.num_heads_q, s.head_dim));
  return {.run =
              [m, out] {
                require_ok(dequantize(
                    {.in = m->out.view, .out = out, .seq = m->lengths.seq(), .backend = m->backend.c_str()}));
              },
          .bytes = m->in.bytes() + bytes_of(m->out)};
}

Work prepare_rmsnorm(const BenchShape& s, const std::string& backend) {
  const auto m = token_memory(s, backend);
  const int64_t tokens = m->lengths.tokens;
  m->weight = Bf16(s.hidden(), 7);
  m->out = random_mx(tokens, 1, s.hidden(), m->lengths.seq(), 6);
  m->out.view.data = m->align(make_tensor(m->out.data.data(), Dtype::e4m3, tokens, s.hidden()));
  const Tensor in = m->align(m->in.view(tokens, s.hidden())), weight = m->weight.view(s.hidden());
  return {.run =
              [m, in, weight] {
                require_ok(rmsnorm_quantize({.in = in,
                                             .weight = weight,
                                             .out = m->out.view,
                                             .seq = m->lengths.seq(),
                                             .backend = m->backend.c_str()}));
              },
          .bytes = m->in.bytes() + m->weight.bytes() + bytes_of(m->out)};
}

// From BF16 dy, as a GEMM in BF16 gives it.
Work prepare_rmsnorm_bwd(const BenchShape& s, const std::string& backend) {
  const auto m = token_memory(s, backend);
  const int64_t tokens = m->lengths.tokens, hidden = s.hidden();
  m->weight = Bf16(hidden, 7);
  Bf16 dy(tokens * hidden, 8), dx(tokens * hidden);
  const std::vector<float> rstd(size_t(tokens), 1.0f);
  RmsnormBwd args{.h = m->align(m->in.view(tokens, hidden)),
                  .weight = m->weight.view(hidden),
                  .rstd = m->align(make_tensor(const_cast<float*>(rstd.data()), Dtype::f32, tokens)),
                  .dy = m->align(dy.view(tokens, hidden)),
                  .dx = m->align(dx.view(tokens, hidden)),
                  .dw = m->align(Bf16(hidden, 9).view(hidden)),
                  .seq = m->lengths.seq(),
                  .backend = m->backend.c_str()};
  args.workspace_size = rmsnorm_bwd_workspace(args);
  args.workspace = m->aligned.emplace_back(args.workspace_size).data();
  return {.run = [m, args] { require_ok(rmsnorm_bwd(args)); },
          .bytes = 3 * m->in.bytes() + 2 * m->weight.bytes() + 4 * double(tokens)};
}

// c = a b^T in fp32 as one would write it, on num_threads() threads: eight partial sums, no blocking.
double time_plain_gemm(int64_t m, int64_t n, int64_t k) {
  std::vector<float> a(size_t(m * k)), b(size_t(n * k)), c(size_t(m * n));
  fill_cyclic(sample(), 8, a);
  fill_cyclic(sample(), 9, b);
  const auto rows = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const float *x = a.data() + i * k, *y = b.data() + j * k;
        float sum[8] = {};
        int64_t l = 0;
        for (; l + 8 <= k; l += 8) {
          for (int64_t lane = 0; lane < 8; ++lane) sum[lane] += x[l + lane] * y[l + lane];
        }
        for (; l < k; ++l) sum[0] += x[l] * y[l];
        c[size_t(i * n + j)] = ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
      }
    }
  };
  return kit::milliseconds([&] {
    const int64_t threads = num_threads();
    std::vector<std::thread> helpers;
    for (int64_t t = 1; t < threads; ++t) helpers.emplace_back(rows, m * t / threads, m * (t + 1) / threads);
    rows(0, m / threads);
    for (std::thread& helper : helpers) helper.join();
  });
}

Work prepare_gemm(const BenchShape& s, const std::string& backend) {
  const auto m = token_memory(s, backend);
  const int64_t tokens = m->lengths.tokens, n = s.hidden();
  m->weight = Bf16(n * n, 7);
  const Tensor a = m->in.view(tokens, n), b = m->weight.view(n, n);
  return {.run =
              [m, a, b] {
                require_ok(gemm_quantize(
                    {.a = a, .b = b, .out = m->out.view, .seq = m->lengths.seq(), .backend = m->backend.c_str()}));
              },
          .flops = 2 * double(tokens) * double(n) * double(n),
          .bytes = m->in.bytes() + m->weight.bytes() + bytes_of(m->out),
          .peer = "fp32_loop",
          .run_peer = [tokens, n] { return time_plain_gemm(tokens, n, n); }};
}

}  // namespace

Work prepare(BenchOp op, const BenchShape& shape, const std::string& backend, CpuMath cpu_math) {
  switch (op) {
    case BenchOp::attention_fwd: return prepare_fwd(shape, backend, cpu_math);
    case BenchOp::attention_bwd: return prepare_bwd(shape, backend, cpu_math);
    case BenchOp::quantize: return prepare_quantize(shape, backend);
    case BenchOp::dequantize: return prepare_dequantize(shape, backend);
    case BenchOp::rmsnorm_quantize: return prepare_rmsnorm(shape, backend);
    case BenchOp::rmsnorm_bwd: return prepare_rmsnorm_bwd(shape, backend);
    case BenchOp::gemm_quantize: return prepare_gemm(shape, backend);
    case BenchOp::training_step: break;  // on a device only
  }
  return {};
}

double memory_of(BenchOp op, const BenchShape& s) {
  const double q = double(total_tokens_q(s)), k = double(kit::sum_of(lens_k(s)));
  const double out = s.shared_q ? q * double(s.batch) : q;
  const double elements_q = q * double(s.hidden()), elements_k = k * double(s.num_heads_kv * s.head_dim);
  const double elements_v = k * double(s.num_heads_kv * s.head_dim_v);
  const double elements_out = out * double(s.num_heads_q * s.head_dim_v);
  const double weight = op == BenchOp::gemm_quantize ? 2 * double(s.hidden()) * double(s.hidden()) : 0;
  if (op == BenchOp::rmsnorm_bwd) return 13 * elements_q;  // h, dy and dx, aligned beside the originals
  if (!is_attention(op)) return 3 * elements_q + weight;
  // One byte of payload (dout is there in both directions), two of every result; lse and delta.
  const double gradients = op == BenchOp::attention_bwd ? 2 * (elements_q + elements_k + elements_v) : 0;
  return elements_q + elements_k + elements_v + 3 * elements_out + gradients + 16 * out * double(s.num_heads_q);
}

std::string verify(BenchOp op, const BenchShape& shape, const std::string& backend, CpuMath cpu_math) {
  const BenchShape s = clipped(shape);
  const kit::Place place(lens_q(s), 0, s.num_heads_q, s.head_dim);
  switch (op) {
    case BenchOp::quantize: {
      std::string failure =
          kit::verify_quantize(backend, place, Dtype::bf16, MxBlock::square32, MxRule::rceil, Dtype::e4m3);
      for (const ImageRole role : {ImageRole::query, ImageRole::key, ImageRole::value}) {
        if (!failure.empty() || !kit::is_device_backend(backend)) break;
        failure = kit::verify_image(backend, place, role, MxBlock::square32);
      }
      return failure;
    }
    case BenchOp::dequantize: return kit::verify_dequantize(backend);
    case BenchOp::rmsnorm_quantize: return kit::verify_rmsnorm(backend, place);
    case BenchOp::rmsnorm_bwd: return kit::verify_rmsnorm_bwd(backend, place);
    case BenchOp::gemm_quantize: return kit::verify_gemm(backend, place, std::min(shape.hidden(), kVerifyDepth));
    case BenchOp::attention_fwd:
    case BenchOp::attention_bwd:
    case BenchOp::training_step: break;
  }
  kit::VerifyOptions options = kit::attention_backends(backend);
  options.cpu_math = cpu_math;
  options.floors = false;
  const kit::Report report = verify_attention(attention_case(s), options);
  if (!report.skipped.empty()) {
    Status status{.code = StatusCode::unsupported};
    report.skipped.copy(status.message, sizeof status.message - 1);
    throw kit::StatusError(status);
  }
  return report.ok() ? "" : report.failures.front();
}

}  // namespace mxflash::tools
