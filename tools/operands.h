// Operands from files and problems from options. Everything that a user can get wrong is found here, before anything
// is computed, and reported in one line that names the value; what the library itself checks is left to it.
#pragma once

#include <mxflash/backend.h>
#include <mxflash/operator.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kit/host_tensor.h"
#include "kit/runner.h"
#include "kit/safetensors.h"

namespace mxflash::tools {

// [tokens, heads, dim] (heads = 1 for [rows, dim]), widened to float (exactly).
struct FloatTensor {
  std::string name;  // in its file; for a .npy file the file's own name without directory and ending
  kit::FileDtype dtype = kit::FileDtype::f32;  // in its file
  int64_t tokens = 0, heads = 0, dim = 0;
  bool flat = false;  // [rows, dim] in its file
  std::vector<float> values;

  std::vector<int64_t> shape() const {
    return flat ? std::vector<int64_t>{tokens, dim} : std::vector<int64_t>{tokens, heads, dim};
  }
  // The library reads inputs through a non-const view.
  Tensor view() const { return make_tensor(const_cast<float*>(values.data()), Dtype::f32, tokens, heads, dim); }
  int64_t file_bytes() const { return int64_t(values.size()) * kit::file_dtype_size(dtype); }
};

enum class RankRule { three, two_or_three };  // [rows, dim] is read as [rows, 1, dim]

bool is_npy(std::string_view path);
FloatTensor read_npy_tensor(const std::string& path, RankRule rank);
FloatTensor read_tensor(const kit::SafetensorsFile& file, const std::string& path, const std::string& name,
                        RankRule rank);

// Its tensors for messages:  "q" "k" "v", each with a space before it.
std::string names_in(const kit::SafetensorsFile& file);

// Where `attend` finds its operands: names in the file IN, or .npy paths.
struct OperandOptions {
  std::string in;
  std::string q = "q", k = "k", v = "v", dout = "dout";
};

struct AttentionOperands {
  FloatTensor q, k, v;
  std::optional<FloatTensor> dout;  // only read for a backward
};
AttentionOperands read_operands(const OperandOptions& options, bool backward);

struct ProblemOptions {
  bool causal = false;
  std::optional<std::string> window;  // "L,R"
  // "0,5,..."; none: one sequence. The first is for both sides, unless one has its own.
  std::optional<std::string> cu_seqlens, cu_seqlens_q, cu_seqlens_k;
  bool shared_q = false;
  std::optional<double> softmax_scale;
};

// Checks that the operands go together. The result's spans point into `operands`.
kit::FloatProblem make_problem(const AttentionOperands& operands, const ProblemOptions& options);

// `option` is the option's name, for messages; `tokens` is what the last entry must be.
std::vector<int32_t> parse_cu_seqlens(const std::string& option, const std::string& text, int64_t tokens);

uint64_t parse_rotate_seed(const std::string& text);

// Names of options and what they mean; the parse functions accept the names that the lists hold.
inline const std::vector<std::string> kBlockNames{"square32", "row32", "col32"};
inline const std::vector<std::string> kRecipeBlockNames{"square32", "row32", "col32", "row32+col32"};
inline const std::vector<std::string> kRuleNames{"rceil", "floor"};
inline const std::vector<std::string> kElementNames{"e4m3", "e5m2"};
MxBlock parse_block(const std::string& name);
MxRule parse_rule(const std::string& name);
Dtype parse_element(const std::string& name);
void set_recipe_block(Recipe& recipe, const std::string& name);

std::string recipe_block_name(const Recipe& recipe);
const char* rule_name(MxRule rule);

nlohmann::ordered_json to_json(const Recipe& recipe);
nlohmann::ordered_json to_json(const QuantizeStats& stats);

// "causal, window 4,0, shared q", "no mask"
std::string mask_text(const kit::FloatProblem& problem);
// "square32, rceil, e4m3, gradients e4m3, rotate_qk on, smooth_k on, smooth_v off"
std::string recipe_text(const Recipe& recipe);

// Throws if there can be no file `path`, or if writing it would destroy one of `in_use` (inputs and other outputs):
// better found before the work than after it. Leaves nothing.
void require_writable(const std::string& path, const std::vector<std::string>& in_use);

// The backend that `op` uses for tensors in host memory: the forced one, else the first that is available here.
std::string backend_in_use(Operation op, const std::string& forced);

// The scale bytes of the blocks that hold elements; not those of the padding between sequences. t.layout is linear.
std::vector<uint8_t> block_scales(const MxTensor& t, const Jagged& seq);

}  // namespace mxflash::tools
