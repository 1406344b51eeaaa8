// The shapes that `mxflash bench` times: named sets, and files of the same objects that it prints.
#pragma once

#include <mxflash/attention.h>
#include <mxflash/backend.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kit/cases.h"

namespace mxflash::tools {

// What is timed: operations of the library, and the training step, operator_fwd and operator_bwd. In the order of the
// table.
enum class BenchOp {
  attention_fwd,
  attention_bwd,
  training_step,
  quantize,
  dequantize,
  rmsnorm_quantize,
  rmsnorm_bwd,
  gemm_quantize
};
inline constexpr BenchOp kBenchOps[] = {BenchOp::attention_fwd, BenchOp::attention_bwd, BenchOp::training_step,
                                        BenchOp::quantize,      BenchOp::dequantize,    BenchOp::rmsnorm_quantize,
                                        BenchOp::rmsnorm_bwd,   BenchOp::gemm_quantize};
const char* operation_name(BenchOp op);
Operation operation_of(BenchOp op);  // whose backends it has: of the training step those of attention_bwd

// Whether it sees more of a shape than the tokens of q.
constexpr bool is_attention(BenchOp op) { return op <= BenchOp::training_step; }

// One attention call. Operations on tokens take theirs from it: quantize and dequantize work on q, [tokens of q,
// num_heads_q, head_dim]; rmsnorm_quantize on its rows of num_heads_q * head_dim; gemm_quantize projects those rows by
// a square matrix.
struct BenchShape {
  int64_t batch = 1;  // key sequences
  int64_t seqlen_q = 0, seqlen_k = 0;
  int64_t num_heads_q = 1, num_heads_kv = 1;
  int64_t head_dim = 0, head_dim_v = 0;
  Mask mask{};
  bool shared_q = false;  // one query sequence of seqlen_q attends to every key sequence
  bool jagged = false;    // lengths are min_seqlen .. seqlen, uniform; of q too, unless it is shared
  int64_t min_seqlen = 0;
  std::vector<BenchOp> ops{};  // those that are wanted of it; empty: all

  int64_t hidden() const { return num_heads_q * head_dim; }
};

// Lengths of the sequences. Jagged ones come from kit/random.h, seed 1 and as stream the largest length, so they are
// the same on every machine, and equal for q and k if seqlen_q == seqlen_k. With min_seqlen 0 their mean is half of the
// largest.
std::vector<int32_t> lens_q(const BenchShape& shape);
std::vector<int32_t> lens_k(const BenchShape& shape);
int64_t total_tokens_q(const BenchShape& shape);

// Operations by the field's convention: on real lengths, 4 d per query, key and head in the forward (2 d for q k, 2 d_v
// for P v) and 10 d in the backward (6 d + 4 d_v), the sum in a training step, half of it with a causal mask; with a
// window, what is visible.
double attention_flops(const BenchShape& shape, BenchOp op);

// A small shape with the same features, for verification: at most 2 sequences of 256 tokens and 2 heads.
BenchShape clipped(const BenchShape& shape);
kit::AttentionCase attention_case(const BenchShape& shape);

nlohmann::ordered_json to_json(const BenchShape& shape);
std::string to_text(const BenchShape& shape);  // "b16 h16 1024x1024 d128 causal"

// "small", "llm", "recsys", "cpu", "cuda", "backward", "decode", or a file: a JSON array of objects, or one object a
// line. Throws UsageError.
std::vector<BenchShape> bench_shapes(const std::string& set_or_file);
std::vector<BenchShape> parse_bench_shapes(const std::string& text, const std::string& file);

}  // namespace mxflash::tools
