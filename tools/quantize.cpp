// mxflash quantize: one tensor to MXFP8, and what that costs it.
#include <mxflash/quantize.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>

#include "kit/compare.h"
#include "mx/e8m0.h"
#include "tools/commands.h"
#include "tools/number_text.h"
#include "tools/operands.h"
#include "tools/progress.h"

namespace mxflash::tools {
namespace {

using Json = nlohmann::ordered_json;

struct QuantizeOptions {
  std::string in, tensor, out;
  std::optional<std::string> cu_seqlens;
  std::string block = "square32", rule = "rceil", element = "e4m3";
  bool json = false;
};

constexpr uint8_t kZeroBlock = 0;  // scale byte

// Over the blocks that hold elements.
struct ScaleSummary {
  int64_t blocks = 0, zero = 0, nan = 0;
  int min = 0, max = 0;  // exponents of the blocks that are neither zero nor NaN

  bool any() const { return zero + nan < blocks; }
};

ScaleSummary summarize(const std::vector<uint8_t>& scales) {
  ScaleSummary s{.blocks = int64_t(scales.size()),
                 .zero = std::count(scales.begin(), scales.end(), kZeroBlock),
                 .nan = std::count(scales.begin(), scales.end(), kE8m0Nan)};
  uint8_t min = kE8m0Nan, max = kZeroBlock;
  for (const uint8_t byte : scales) {
    if (byte == kZeroBlock || byte == kE8m0Nan) continue;
    min = std::min(min, byte);
    max = std::max(max, byte);
  }
  if (s.any()) {
    s.min = min - kE8m0Bias;
    s.max = max - kE8m0Bias;
  }
  return s;
}

FloatTensor read_input(const QuantizeOptions& o) {
  if (is_npy(o.in)) return read_npy_tensor(o.in, RankRule::two_or_three);
  const kit::SafetensorsFile file(o.in);
  if (o.tensor.empty()) {
    throw UsageError("--tensor must name a tensor of " + kit::one_line(o.in) + ", got none; it holds" + names_in(file));
  }
  return read_tensor(file, o.in, o.tensor, RankRule::two_or_three);
}

std::string joined(const std::vector<int32_t>& cu_seqlens) {
  std::string text;
  for (const int32_t entry : cu_seqlens) {
    if (!text.empty()) text += ',';
    text += std::to_string(entry);
  }
  return text;
}

kit::HostTensor host_tensor(kit::FileDtype dtype, std::vector<int64_t> shape, const std::vector<uint8_t>& x) {
  const auto bytes = std::as_bytes(std::span(x));
  return {.dtype = dtype, .shape = std::move(shape), .bytes = {bytes.begin(), bytes.end()}};
}

void write_result(const QuantizeOptions& o, const FloatTensor& x, const kit::OwnedMx& mx, const std::string& cu) {
  const auto& scale_extents = mx.view.scale.shape;
  const std::vector<int64_t> scale_shape(scale_extents.begin(), scale_extents.begin() + mx.view.scale.rank);
  kit::write_safetensors(o.out,
                         {{x.name, host_tensor(*kit::to_file_dtype(mx.view.data.dtype), x.shape(), mx.data)},
                          {x.name + "_scale", host_tensor(kit::FileDtype::f8_e8m0, scale_shape, mx.scale)}},
                         {{"about", "MXFP8: an element is payload * 2^(scale byte - 127)"},
                          {"mxflash", version()},
                          {"block", o.block},
                          {"rule", o.rule},
                          {"element", o.element},
                          {"layout", "linear"},
                          {"cu_seqlens", cu}});
}

void print_table(const QuantizeOptions& o, const FloatTensor& x, const Json& j) {
  const auto line = [](const char* label, const std::string& text) { std::cout << "  " << label << text << '\n'; };
  std::cout << "mxflash quantize " << kit::one_line(x.name) << ' ' << kit::shape_text(x.shape()) << ' '
            << file_dtype_name(x.dtype) << " -> " << o.element << ", " << o.block << ", " << o.rule << '\n';
  const auto count = [&](const char* key) {
    const int64_t n = j[key], total = j["total"];
    return grouped(n) + " of " + grouped(total) + (total > 0 ? " (" + percent(double(n) / double(total)) + ")" : "");
  };
  line("amax          ", significant(j["amax"].get<double>(), 6));
  line("saturated     ", count("saturated"));
  line("flushed to 0  ", count("flushed"));
  line("NaN or Inf    ", count("nonfinite"));
  const Json& exponent = j["scale_exponent"];
  line("scales        ",
       (exponent["min"].is_null() ? std::string("none of a non-zero block")
                                  : "2^" + exponent["min"].dump() + " to 2^" + exponent["max"].dump()) +
           "; " + grouped(j["blocks"]) + " blocks, " + grouped(j["zero_blocks"]) + " all zero, " +
           grouped(j["nan_blocks"]) + " NaN");
  const int64_t before = j["bytes"]["before"], after = j["bytes"]["after"];
  line("bytes         ", grouped(before) + " -> " + grouped(after) +
                             (before > 0 ? " (" + percent(double(after) / double(before)) + ")" : ""));
  const kit::Metrics m{.sqnr_db = j["sqnr_db"], .nonfinite_mismatch = j["nonfinite_mismatch"]};
  line("SQNR          ", decibels(m) + (std::abs(m.sqnr_db) < kit::kMaxDb ? " dB" : ""));
}

void run_quantize(const QuantizeOptions& o) {
  Progress progress;
  progress.phase("reading the tensor");
  const FloatTensor x = read_input(o);
  std::vector<int32_t> cu{0};
  if (!o.cu_seqlens && x.tokens <= INT32_MAX) cu.push_back(int32_t(x.tokens));
  if (o.cu_seqlens) cu = parse_cu_seqlens("--cu-seqlens", *o.cu_seqlens, x.tokens);
  Jagged seq;
  if (o.cu_seqlens) {
    seq = {.cu_seqlens = cu.data(), .batch = int32_t(cu.size()) - 1, .max_seqlen = 0};
    for (size_t b = 1; b < cu.size(); ++b) seq.max_seqlen = std::max(seq.max_seqlen, cu[b] - cu[b - 1]);
  }

  if (is_npy(o.out)) throw UsageError("--output must be a .safetensors file, got " + kit::in_quotes(o.out));
  require_writable(o.out, {o.in});
  progress.phase("quantizing");
  const kit::OwnedMx mx = kit::make_owned_mx(parse_element(o.element), parse_block(o.block), ScaleLayout::linear,
                                             x.tokens, x.heads, x.dim, seq);
  QuantizeStats stats;
  kit::require_ok(quantize({.in = x.view(), .out = mx.view, .seq = seq, .rule = parse_rule(o.rule), .stats = &stats}));
  write_result(o, x, mx, joined(cu));

  progress.phase("comparing");
  const std::vector<double> exact(x.values.begin(), x.values.end());
  const kit::Metrics m = kit::compare(exact, kit::dequantize_to_floats(mx.view, seq));
  const ScaleSummary scales = summarize(block_scales(mx.view, seq));
  Json json{{"tensor", x.name},  {"shape", x.shape()}, {"dtype", kit::file_dtype_name(x.dtype)},
            {"block", o.block},  {"rule", o.rule},     {"element", o.element},
            {"layout", "linear"}};
  json.update(to_json(stats));
  json["scale_exponent"] = {{"min", scales.any() ? Json(scales.min) : Json()},
                            {"max", scales.any() ? Json(scales.max) : Json()}};
  json["blocks"] = scales.blocks;
  json["zero_blocks"] = scales.zero;
  json["nan_blocks"] = scales.nan;
  json["sqnr_db"] = m.sqnr_db;
  json["cosine"] = m.cosine;
  json["max_abs_err"] = m.max_abs_err;
  json["nonfinite_mismatch"] = m.nonfinite_mismatch;
  json["bytes"] = {{"before", x.file_bytes()}, {"after", mx.data.size() + mx.scale.size()}};
  if (o.json) {
    std::cout << json.dump(-1, ' ', false, Json::error_handler_t::replace) << '\n';
  } else {
    print_table(o, x, json);
  }
}

}  // namespace

void add_quantize(CLI::App& app) {
  CLI::App* cmd = app.add_subcommand("quantize", "Write one tensor of a file as MXFP8: payload and scales");
  const auto options = std::make_shared<QuantizeOptions>();
  QuantizeOptions& o = *options;
  cmd->add_option("IN", o.in, "A .safetensors or .npy file; [tokens, heads, dim] or [rows, dim], F32, F16 or BF16")
      ->required();
  cmd->add_option("--tensor", o.tensor, "Name of the tensor in IN (not for .npy)");
  cmd->add_option("--block", o.block, "Blocks that share a scale")
      ->check(CLI::IsMember(kBlockNames))
      ->capture_default_str();
  cmd->add_option("--rule", o.rule, "How a block's largest value becomes its scale")
      ->check(CLI::IsMember(kRuleNames))
      ->capture_default_str();
  cmd->add_option("--element", o.element, "Element of the payload")
      ->check(CLI::IsMember(kElementNames))
      ->capture_default_str();
  cmd->add_option("--cu-seqlens", o.cu_seqlens, "0,5,...: where the sequences begin and end");
  cmd->add_option("-o,--output", o.out, "The .safetensors file to write")->required()->check(kNotEmpty);
  cmd->add_flag("--json", o.json, "Print one JSON object");
  cmd->callback([options] { run_quantize(*options); });
}

}  // namespace mxflash::tools
