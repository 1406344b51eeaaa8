#include "tools/operands.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>

#include "kit/device_memory.h"
#include "kit/file_bytes.h"
#include "kit/npy.h"
#include "mx/float16.h"
#include "mx/scale_layout.h"
#include "tools/commands.h"
#include "tools/number_text.h"

namespace mxflash::tools {
namespace {

using kit::FileDtype;
using kit::in_quotes;
using kit::shape_text;

std::vector<float> widened(const kit::HostTensor& t) {
  std::vector<float> x(size_t(t.numel()));
  if (t.dtype == FileDtype::f32 && !x.empty()) std::memcpy(x.data(), t.bytes.data(), t.bytes.size());
  const auto* half = reinterpret_cast<const uint16_t*>(t.bytes.data());
  if (t.dtype == FileDtype::f16) std::transform(half, half + x.size(), x.begin(), decode_f16);
  if (t.dtype == FileDtype::bf16) std::transform(half, half + x.size(), x.begin(), decode_bf16);
  return x;
}

FloatTensor as_floats(const kit::HostTensor& t, const std::string& path, const std::string& name, RankRule rank) {
  const std::string subject = "tensor " + in_quotes(name);
  const Dtype dtype = to_library_dtype(t.dtype);
  if (!is_float_dtype(dtype)) {
    throw kit::FileError(path, subject + " must be F32, F16 or BF16, got " + std::string(file_dtype_name(t.dtype)),
                         is_fp8_dtype(dtype) ? "FP8 bytes mean nothing without their scales; give the tensor as it was "
                                               "before it was quantized"
                                             : "convert it");
  }
  const bool flat = t.shape.size() == 2 && rank == RankRule::two_or_three;
  if (t.shape.size() != 3 && !flat) {
    const std::string shapes =
        rank == RankRule::three ? "[tokens, heads, head_dim]" : "[tokens, heads, dim] or [rows, dim]";
    throw kit::FileError(path, subject + " must be " + shapes + ", got " + shape_text(t.shape), "reshape it");
  }
  FloatTensor result{.name = name,
                     .dtype = t.dtype,
                     .tokens = t.shape.front(),
                     .heads = flat ? 1 : t.shape[1],
                     .dim = t.shape.back(),
                     .flat = flat,
                     .values = {}};
  if (result.heads < 1 || result.dim < 1) {
    throw kit::FileError(path, subject + " must have at least one head and one channel, got " + shape_text(t.shape),
                         "choose another tensor");
  }
  result.values = widened(t);
  return result;
}

// The number that is all of `text`; none if it is not one or does not fit.
template <class Integer>
std::optional<Integer> parse_integer(std::string_view text) {
  Integer value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::vector<std::string_view> split_at_commas(std::string_view text) {
  std::vector<std::string_view> parts;
  for (size_t comma; (comma = text.find(',')) != text.npos; text.remove_prefix(comma + 1)) {
    parts.push_back(text.substr(0, comma));
  }
  parts.push_back(text);
  return parts;
}

void parse_window(const std::string& text, Mask& mask) {
  const std::vector<std::string_view> parts = split_at_commas(text);
  const auto left = parse_integer<int32_t>(parts.front()), right = parse_integer<int32_t>(parts.back());
  if (parts.size() != 2 || !left || !right) {
    throw UsageError("--window must be two integers LEFT,RIGHT (-1 means open), got " + in_quotes(text));
  }
  mask.window_left = *left;
  mask.window_right = *right;
}

void require_same(const std::string& what, const FloatTensor& a, int64_t a_extent, const FloatTensor& b,
                  int64_t b_extent) {
  if (a_extent == b_extent) return;
  throw UsageError(what + ", got " + shape_text(a.shape()) + " and " + shape_text(b.shape()) +
                   "; choose tensors of one attention layer");
}

void check_operands(const AttentionOperands& x) {
  if (x.q.tokens == 0) throw UsageError("q must have at least one token, got " + shape_text(x.q.shape()));
  require_same("q and k must have the same head_dim", x.q, x.q.dim, x.k, x.k.dim);
  require_same("k and v must have the same number of tokens", x.k, x.k.tokens, x.v, x.v.tokens);
  require_same("k and v must have the same number of heads", x.k, x.k.heads, x.v, x.v.heads);
}

// A side's sequences, and the option that they are from.
struct Sequences {
  const char* option;
  const std::optional<std::string>& text;
};
Sequences of_queries(const ProblemOptions& o) {
  return o.cu_seqlens_q ? Sequences{"--cu-seqlens-q", o.cu_seqlens_q} : Sequences{"--cu-seqlens", o.cu_seqlens};
}
Sequences of_keys(const ProblemOptions& o) {
  return o.cu_seqlens_k ? Sequences{"--cu-seqlens-k", o.cu_seqlens_k} : Sequences{"--cu-seqlens", o.cu_seqlens};
}

void check_sequences(const kit::FloatProblem& p, const ProblemOptions& options, const AttentionOperands& x) {
  const size_t batch_q = std::max<size_t>(p.cu_seqlens_q.size(), 2) - 1;
  const size_t batch_k = std::max<size_t>(p.cu_seqlens_k.size(), 2) - 1;
  if (p.shared_q && batch_q != 1) {
    const std::string option = of_queries(options).option;
    throw UsageError("--shared-q takes one query sequence, got " + option + " with " + std::to_string(batch_q) +
                     "; leave it out, and give --cu-seqlens-k");
  }
  if (!p.shared_q && batch_q != batch_k) {
    throw UsageError("--cu-seqlens-q and --cu-seqlens-k must have the same number of sequences, got " +
                     std::to_string(batch_q) + " and " + std::to_string(batch_k) +
                     " (a list not given is one sequence); give both");
  }
  if (!x.dout) return;
  const std::vector<int64_t> want{p.total_out(), p.num_heads_q, p.head_dim_v};
  if (x.dout->shape() != want) {
    throw UsageError("dout must have the shape of out, " + shape_text(want) + ", got " + shape_text(x.dout->shape()) +
                     "; choose another tensor with --dout");
  }
}

}  // namespace

bool is_npy(std::string_view path) { return path.ends_with(".npy"); }

FloatTensor read_npy_tensor(const std::string& path, RankRule rank) {
  return as_floats(kit::read_npy(path), path, std::filesystem::path(path).stem().string(), rank);
}

FloatTensor read_tensor(const kit::SafetensorsFile& file, const std::string& path, const std::string& name,
                        RankRule rank) {
  return as_floats(file.read(name), path, name, rank);
}

std::string names_in(const kit::SafetensorsFile& file) {
  std::string names;
  for (const kit::SafetensorsEntry& entry : file.entries()) {
    if (names.size() > 200) return names + " ...";
    names += ' ';
    names += in_quotes(entry.name);
  }
  return names.empty() ? " no tensors" : names;
}

AttentionOperands read_operands(const OperandOptions& o, bool backward) {
  if (is_npy(o.in)) {
    throw UsageError("attend reads .npy operands through --q, --k, --v and --dout, got " + in_quotes(o.in) +
                     " as IN; pass it as --q, --k, --v or --dout");
  }
  std::optional<kit::SafetensorsFile> file;
  if (!o.in.empty()) file.emplace(o.in);
  const auto read = [&](const char* option, const std::string& name) {
    if (is_npy(name)) return read_npy_tensor(name, RankRule::three);
    if (!file) {
      throw UsageError(std::string(option) + " must be a .npy file if no file IN is given, got " + in_quotes(name) +
                       "; name a .safetensors file or pass " + option + " FILE.npy");
    }
    return read_tensor(*file, o.in, name, RankRule::three);
  };
  if (backward && !is_npy(o.dout) && !(file && file->contains(o.dout))) {
    const std::string got = file ? kit::one_line(o.in) + " holds" + names_in(*file) : "no file IN";
    throw UsageError("--backward needs the gradient of out, but there is no tensor " + in_quotes(o.dout) + ": " + got +
                     "; pass --dout NAME or --dout FILE.npy, or give a tensor \"dout\" in the file");
  }
  AttentionOperands x{.q = read("--q", o.q), .k = read("--k", o.k), .v = read("--v", o.v), .dout = {}};
  if (backward) x.dout = read("--dout", o.dout);
  return x;
}

std::vector<int32_t> parse_cu_seqlens(const std::string& option, const std::string& text, int64_t tokens) {
  std::vector<int32_t> cu;
  for (const std::string_view part : split_at_commas(text)) {
    const std::optional<int32_t> value = parse_integer<int32_t>(part);
    if (!value) throw UsageError(option + " must be integers below 2^31 with commas, got " + in_quotes(part));
    if (cu.empty() && *value != 0) throw UsageError(option + " must start with 0, got " + std::to_string(*value));
    if (!cu.empty() && *value < cu.back()) {
      throw UsageError(option + " must not decrease, got " + std::to_string(*value) + " after " +
                       std::to_string(cu.back()));
    }
    cu.push_back(*value);
  }
  if (cu.size() < 2)
    throw UsageError(option + " must have at least two entries (0 and the end), got " + in_quotes(text));
  if (cu.back() != tokens) {
    throw UsageError(option + " must end with the number of tokens, " + std::to_string(tokens) + ", got " +
                     std::to_string(cu.back()));
  }
  return cu;
}

kit::FloatProblem make_problem(const AttentionOperands& x, const ProblemOptions& options) {
  check_operands(x);
  kit::FloatProblem p{.num_heads_q = x.q.heads,
                      .num_heads_kv = x.k.heads,
                      .head_dim = x.q.dim,
                      .head_dim_v = x.v.dim,
                      .q = x.q.values,
                      .k = x.k.values,
                      .v = x.v.values,
                      .dout = {},
                      .dlse = {},
                      .cu_seqlens_q = {},
                      .cu_seqlens_k = {},
                      .mask = {.causal = options.causal},
                      .shared_q = options.shared_q};
  if (x.dout) p.dout = x.dout->values;
  if (options.window) parse_window(*options.window, p.mask);
  const Sequences q = of_queries(options), k = of_keys(options);
  if (q.text) p.cu_seqlens_q = parse_cu_seqlens(q.option, *q.text, x.q.tokens);
  if (k.text) p.cu_seqlens_k = parse_cu_seqlens(k.option, *k.text, x.k.tokens);
  if (options.softmax_scale) {
    p.softmax_scale = float(*options.softmax_scale);
    if (!std::isfinite(p.softmax_scale) || p.softmax_scale == 0) {
      throw UsageError("--softmax-scale must be a finite float other than 0, got " +
                       significant(*options.softmax_scale, 6) + "; leave it out for 1/sqrt(head_dim)");
    }
  }
  check_sequences(p, options, x);
  return p;
}

uint64_t parse_rotate_seed(const std::string& text) {
  const auto seed = parse_integer<uint64_t>(text);
  if (!seed) throw UsageError("--rotate-seed must be an integer from 0 to 2^64 - 1, got " + in_quotes(text));
  return *seed;
}

MxBlock parse_block(const std::string& name) {
  return name == "row32" ? MxBlock::row32 : name == "col32" ? MxBlock::col32 : MxBlock::square32;
}
MxRule parse_rule(const std::string& name) { return name == "floor" ? MxRule::floor : MxRule::rceil; }
Dtype parse_element(const std::string& name) { return name == "e5m2" ? Dtype::e5m2 : Dtype::e4m3; }

void set_recipe_block(Recipe& recipe, const std::string& name) {
  const bool two = name == "row32+col32";
  recipe.block = two ? MxBlock::row32 : parse_block(name);
  recipe.block_col = two ? MxBlock::col32 : recipe.block;
}

std::string recipe_block_name(const Recipe& recipe) {
  const std::string& row = kBlockNames.at(size_t(recipe.block));
  return recipe.block == recipe.block_col ? row : row + "+" + kBlockNames.at(size_t(recipe.block_col));
}

const char* rule_name(MxRule rule) { return rule == MxRule::floor ? "floor" : "rceil"; }

std::string mask_text(const kit::FloatProblem& p) {
  std::string text = p.mask.causal ? "causal" : "";
  if (p.mask.window_left >= 0 || p.mask.window_right >= 0) {
    text += (text.empty() ? "" : ", ") + std::string("window ") + std::to_string(p.mask.window_left) + "," +
            std::to_string(p.mask.window_right);
  }
  return (text.empty() ? "no mask" : text) + (p.shared_q ? ", shared q" : "");
}

std::string recipe_text(const Recipe& r) {
  std::string text = recipe_block_name(r) + ", " + rule_name(r.rule) + ", " + dtype_name(r.element) + ", gradients " +
                     dtype_name(r.grad_element);
  const auto add = [&](const char* option, bool on) { text += std::string(", ") + option + (on ? " on" : " off"); };
  add("rotate_qk", r.rotate_qk);
  if (r.rotate_qk && r.rotate_seed != kDefaultRotateSeed) text += " (seed " + std::to_string(r.rotate_seed) + ")";
  add("smooth_k", r.smooth_k);
  add("smooth_v", r.smooth_v);
  return text;
}

void require_writable(const std::string& path, const std::vector<std::string>& in_use) {
  namespace fs = std::filesystem;
  for (const std::string& other : in_use) {
    std::error_code absent;
    const bool same_file = fs::equivalent(path, other, absent) && !absent;
    if (other.empty() || !(same_file || fs::weakly_canonical(path, absent) == fs::weakly_canonical(other, absent)))
      continue;
    throw kit::FileError(path, "an output must be neither an input nor another output", "choose another name");
  }
  const kit::OutputFile trial(path);
}

nlohmann::ordered_json to_json(const Recipe& r) {
  return {{"block", recipe_block_name(r)},    {"rule", rule_name(r.rule)},
          {"element", dtype_name(r.element)}, {"grad_element", dtype_name(r.grad_element)},
          {"rotate_qk", r.rotate_qk},         {"smooth_k", r.smooth_k},
          {"smooth_v", r.smooth_v},           {"rotate_seed", r.rotate_seed}};
}

nlohmann::ordered_json to_json(const QuantizeStats& s) {
  return {{"amax", s.amax},
          {"saturated", s.saturated},
          {"flushed", s.flushed},
          {"nonfinite", s.nonfinite},
          {"total", s.total}};
}

std::string backend_in_use(Operation op, const std::string& forced) {
  if (!forced.empty()) return forced;
  if (const char* name = std::getenv("MXFLASH_BACKEND"); name && *name) return name;
  for (int32_t i = 0; i < num_backends(op); ++i) {
    const BackendInfo info = backend_info(op, i);
    if (info.available.ok() && !kit::is_device_backend(info.name)) return info.name;
  }
  return "none";
}

std::vector<uint8_t> block_scales(const MxTensor& t, const Jagged& seq) {
  const auto* scale = static_cast<const uint8_t*>(t.scale.data);
  const int64_t tokens = t.data.shape[0];
  const int64_t rows = t.scale.shape[1], columns = t.scale.shape[2];  // of one head
  const int64_t block_tokens = block_shape(t.block).rows;
  std::vector<uint8_t> result;
  for (int64_t head = 0; head < t.scale.shape[0]; ++head) {
    for (int64_t b = 0; b < seq.batch; ++b) {
      const Sequence s = sequence_at(tokens, seq, b);
      const uint8_t* first = scale + (head * rows + s.padded_start / block_tokens) * columns;
      result.insert(result.end(), first, first + ceil_div(s.length, block_tokens) * columns);
    }
  }
  return result;
}

}  // namespace mxflash::tools
