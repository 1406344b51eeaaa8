// Owning buffers, and one call each for "quantize", "attention on MX operands" and "the operator from floats": what
// tests, the CLI and the benches all do with a set of operands. Memory is the host's; for backends on a CUDA device the
// operator works on copies there (kit/call.h), and its times include the copying.
#pragma once

#include <mxflash/attention.h>
#include <mxflash/operator.h>
#include <mxflash/quantize.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

namespace mxflash::kit {

// A library call failed; what() is its message.
struct StatusError : std::runtime_error {
  explicit StatusError(const Status& status) : std::runtime_error(status.message), code(status.code) {}
  StatusCode code;
};
inline void require_ok(const Status& status) {
  if (!status.ok()) throw StatusError(status);
}

// Zeroed memory aligned for workspaces.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(size_t size = 0);
  void* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(void* p) const;
  };
  std::unique_ptr<void, Free> data_;
  size_t size_ = 0;
};

// An MxTensor and its memory. Copying is not needed; moving keeps the view valid.
struct OwnedMx {
  std::vector<uint8_t> data, scale;
  MxTensor view;
};
OwnedMx make_owned_mx(Dtype element, MxBlock block, ScaleLayout layout, int64_t tokens, int64_t heads, int64_t dim,
                      const Jagged& seq);

// A [tokens, heads, dim] result in any float dtype, of `fill` bytes.
struct FloatOutput {
  std::vector<uint8_t> bytes;
  Tensor view;
  FloatOutput(Dtype dtype, int64_t tokens, int64_t heads, int64_t dim, uint8_t fill = 0);
  std::vector<float> widened() const;
  void store(std::span<const float> x) const;  // rounded to the dtype
};

// Quantizes [tokens, heads, dim] floats.
OwnedMx quantize_floats(std::span<const float> x, int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq,
                        Dtype element = Dtype::e4m3, MxBlock block = MxBlock::square32, MxRule rule = MxRule::rceil);
std::vector<float> dequantize_to_floats(const MxTensor& t, const Jagged& seq);

// A problem with float operands; the shapes follow from the sizes.
struct FloatProblem {
  int64_t num_heads_q = 1, num_heads_kv = 1, head_dim = 0, head_dim_v = 0;
  std::span<const float> q, k, v, dout, dlse;       // dout, dlse may be empty
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_k;  // empty: one sequence of all tokens
  Mask mask{};
  float softmax_scale = 0;
  bool shared_q = false;

  int64_t total_q() const { return int64_t(q.size()) / (num_heads_q * head_dim); }
  int64_t total_k() const { return int64_t(k.size()) / (num_heads_kv * head_dim); }
  int64_t batch() const { return cu_seqlens_k.empty() ? 1 : int64_t(cu_seqlens_k.size()) - 1; }
  int64_t total_out() const { return shared_q ? batch() * total_q() : total_q(); }
  Jagged seq_q() const;
  Jagged seq_k() const;
};

struct FloatResult {
  std::vector<float> out, lse, dq, dk, dv;
  OperatorStats stats;
  double fwd_ms = 0, bwd_ms = 0;
  size_t saved_bytes = 0;
};

struct RunOptions {
  Recipe recipe{};
  const char* backend = nullptr;
  CpuMath cpu_math = CpuMath::automatic;
  Dtype out_dtype = Dtype::f32;  // of out and the gradients; results are widened to float
  Dtype dq_accum = Dtype::f32;
  bool backward = true;
};

// The operator, forward and (with dout) backward. Throws StatusError.
FloatResult run_operator(const FloatProblem& problem, const RunOptions& options);

}  // namespace mxflash::kit
