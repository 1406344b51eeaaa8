#include "tools/bench_shapes.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <sstream>

#include "kit/host_tensor.h"
#include "kit/random.h"
#include "tools/commands.h"

namespace mxflash::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxExtent = int64_t(1) << 24;  // of any one number of a shape
constexpr size_t kMaxFileSize = 1 << 20;
constexpr int64_t kClippedLength = 256, kClippedBatch = 2, kClippedHeads = 2;

std::vector<int32_t> lengths(const BenchShape& shape, int64_t longest) {
  const auto count = size_t(shape.batch);
  if (!shape.jagged) return std::vector<int32_t>(count, int32_t(longest));
  kit::Random random(1, uint64_t(longest));
  const int64_t least = std::min(shape.min_seqlen, longest);
  std::vector<int32_t> lens(count);
  for (int32_t& len : lens) len = int32_t(least + random.below(longest - least + 1));
  return lens;
}

BenchShape self_attention(int64_t batch, int64_t seqlen, int64_t heads, int64_t dim, bool causal) {
  return {.batch = batch,
          .seqlen_q = seqlen,
          .seqlen_k = seqlen,
          .num_heads_q = heads,
          .num_heads_kv = heads,
          .head_dim = dim,
          .head_dim_v = dim,
          .mask = {.causal = causal}};
}

// Finishes in about 20 s in the reference backend on two cores.
std::vector<BenchShape> small_shapes() {
  BenchShape gqa = self_attention(1, 512, 4, 128, true), jagged = self_attention(4, 256, 2, 64, true);
  gqa.num_heads_kv = 1;
  jagged.jagged = true;
  BenchShape shared = self_attention(4, 256, 2, 64, false);
  shared.seqlen_q = 64;
  shared.shared_q = shared.jagged = true;
  shared.min_seqlen = 64;
  return {self_attention(1, 256, 2, 128, false),
          self_attention(1, 256, 2, 128, true),
          self_attention(1, 1024, 2, 64, false),
          self_attention(1, 1024, 2, 64, true),
          gqa,
          jagged,
          shared};
}

// batch * seqlen = 16384. The one with 8 sequences of 2048 tokens and 16 heads is what publications of MXFP8 attention
// give.
std::vector<BenchShape> llm_shapes() {
  constexpr int64_t kTokens = 16384;
  std::vector<BenchShape> shapes;
  for (const auto& [heads, dim] : {std::pair<int64_t, int64_t>{16, 128}, {32, 64}}) {
    for (const bool causal : {false, true}) {
      for (const int64_t seqlen : {1024, 2048, 4096, 8192, 16384}) {
        shapes.push_back(self_attention(kTokens / seqlen, seqlen, heads, dim, causal));
      }
    }
  }
  for (const bool causal : {false, true}) {
    BenchShape gqa = self_attention(kTokens / 8192, 8192, 32, 128, causal);
    gqa.num_heads_kv = 8;
    shapes.push_back(gqa);
  }
  return shapes;
}

std::vector<BenchShape> recsys_shapes() {
  constexpr int64_t kBatch = 1152, kHeads = 4, kDim = 128;
  std::vector<BenchShape> shapes;
  for (const bool jagged : {false, true}) {
    for (const int64_t seqlen : {256, 512, 1024, 2048}) {
      shapes.push_back(self_attention(kBatch, seqlen, kHeads, kDim, false));
      shapes.back().jagged = jagged;
    }
  }
  for (const int64_t seqlen_q : {256, 512, 1024, 2048}) {
    shapes.push_back(self_attention(kBatch, 256, kHeads, kDim, false));
    shapes.back().seqlen_q = seqlen_q;
  }
  BenchShape shared = self_attention(512, 1024, kHeads, kDim, false);
  shared.seqlen_q = 256;
  shared.shared_q = shared.jagged = true;
  shared.min_seqlen = 64;
  shapes.push_back(shared);
  return shapes;
}

// What the cpu backend is judged by: b1 h8, dense, causal and with d 64; jagged and GQA at about the FLOPs of a dense
// sequence of 2048; decoding steps, of one token and of a draft of 16; and operations on tokens beyond any cache.
std::vector<BenchShape> cpu_shapes() {
  const std::vector<BenchOp> both = {BenchOp::attention_fwd, BenchOp::attention_bwd};
  std::vector<BenchShape> shapes;
  for (const int64_t dim : {128, 64}) {
    for (const bool causal : {false, true}) {
      for (const int64_t seqlen : {1024, 2048, 4096}) {
        shapes.push_back(self_attention(1, seqlen, 8, dim, causal));
        shapes.back().ops = both;
      }
    }
  }
  BenchShape jagged = self_attention(64, 512, 4, 128, false), gqa = self_attention(1, 2048, 8, 128, false);
  jagged.jagged = true;
  jagged.min_seqlen = 32;
  gqa.num_heads_kv = 2;
  jagged.ops = gqa.ops = both;
  shapes.insert(shapes.end(), {jagged, gqa});
  for (const int64_t heads_kv : {1, 8}) {
    for (const int64_t seqlen_q : {1, 16}) {
      for (const int64_t seqlen_k : {4096, 131072}) {
        BenchShape decode = self_attention(1, seqlen_k, 8, 128, false);
        decode.num_heads_kv = heads_kv;
        decode.seqlen_q = seqlen_q;
        decode.ops = {BenchOp::attention_fwd};
        shapes.push_back(decode);
      }
    }
  }
  BenchShape tokens = self_attention(1, 16384, 32, 128, false), projection = self_attention(1, 2048, 16, 128, false);
  tokens.ops = {BenchOp::quantize, BenchOp::dequantize, BenchOp::rmsnorm_quantize, BenchOp::rmsnorm_bwd};
  projection.ops = {BenchOp::gemm_quantize};
  shapes.insert(shapes.end(), {tokens, projection});
  return shapes;
}

// What llm and recsys lack of what backends of CUDA devices are judged by: GQA 8:1, 64 channels in as many heads,
// jagged at about the FLOPs of a dense batch, a shared query, and operations on 16384 tokens of 4096 channels.
std::vector<BenchShape> cuda_shapes() {
  std::vector<BenchShape> shapes;
  for (const bool causal : {false, true}) {
    BenchShape gqa = self_attention(4, 4096, 16, 128, causal), jagged = self_attention(8, 4096, 16, 128, causal);
    gqa.num_heads_kv = 2;
    jagged.jagged = true;
    jagged.min_seqlen = 256;
    shapes.insert(shapes.end(), {gqa, jagged, self_attention(4, 4096, 16, 64, causal)});
  }
  BenchShape shared = self_attention(64, 1024, 16, 128, false);
  shared.seqlen_q = 256;
  shared.shared_q = shared.jagged = true;
  shared.min_seqlen = 64;
  shapes.push_back(shared);
  for (BenchShape& shape : shapes) shape.ops = {BenchOp::attention_fwd, BenchOp::attention_bwd};
  BenchShape tokens = self_attention(1, 16384, 32, 128, false);
  tokens.ops = {BenchOp::quantize, BenchOp::dequantize, BenchOp::rmsnorm_quantize, BenchOp::rmsnorm_bwd};
  shapes.push_back(tokens);
  return shapes;
}

// What a backward on a card is judged by, and training steps: b * s = 16384, 16 heads of 128 or 32 of 64, GQA 8:1,
// jagged lengths, a shared query.
std::vector<BenchShape> backward_shapes() {
  std::vector<BenchShape> shapes;
  for (const auto& [heads, dim] : {std::pair<int64_t, int64_t>{16, 128}, {32, 64}}) {
    for (const bool causal : {false, true}) {
      for (const int64_t seqlen : {1024, 4096, 16384}) {
        shapes.push_back(self_attention(16384 / seqlen, seqlen, heads, dim, causal));
        shapes.back().ops = {BenchOp::attention_bwd};
        if (dim == 128 || seqlen == 4096) shapes.back().ops.push_back(BenchOp::training_step);
      }
    }
  }
  for (BenchShape shape : cuda_shapes()) {
    if (shape.head_dim != 128 || std::ranges::count(shape.ops, BenchOp::attention_bwd) == 0) continue;
    shape.ops = {BenchOp::attention_bwd};
    shapes.push_back(shape);
  }
  return shapes;
}

// Decoding: one token and drafts of 4 and 16 before a cache, a full card and a single sequence.
std::vector<BenchShape> decode_shapes() {
  std::vector<BenchShape> shapes;
  const auto add = [&](int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t heads, int64_t heads_kv) {
    BenchShape s = self_attention(batch, seqlen_k, heads, 128, false);
    s.seqlen_q = seqlen_q;
    s.num_heads_kv = heads_kv;
    s.ops = {BenchOp::attention_fwd};
    shapes.push_back(s);
  };
  for (const int64_t seqlen_q : {1, 4, 16}) add(64, seqlen_q, 8192, 32, 8);
  for (const int64_t seqlen_q : {1, 4, 16}) add(1, seqlen_q, 65536, 32, 8);
  add(8, 1, 8192, 32, 8);
  add(64, 1, 8192, 16, 1);
  add(16, 1, 8192, 16, 16);
  return shapes;
}

[[noreturn]] void reject(const std::string& where, const std::string& problem) {
  throw UsageError(where + ": " + problem + " (mxflash bench --help lists the keys)");
}

// The value of `key`, or `absent` if there is none.
int64_t integer(const Json& object, const char* key, int64_t least, int64_t absent, const std::string& where) {
  if (!object.contains(key)) return absent;
  const Json& value = object[key];
  const std::string rule = std::string(key) + " must be an integer from " + std::to_string(least) + " to " +
                           std::to_string(kMaxExtent) + ", got " + kit::one_line(value.dump().substr(0, 40), true);
  if (!value.is_number_integer() && !value.is_number_unsigned()) reject(where, rule);
  if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(kMaxExtent)) reject(where, rule);
  const auto n = value.get<int64_t>();
  if (n < least || n > kMaxExtent) reject(where, rule);
  return n;
}

bool boolean(const Json& object, const char* key, const std::string& where) {
  if (!object.contains(key)) return false;
  if (!object[key].is_boolean()) reject(where, std::string(key) + " must be true or false");
  return object[key].get<bool>();
}

// Operations by name; none if there is no such key.
std::vector<BenchOp> operations(const Json& object, const std::string& where) {
  std::vector<BenchOp> ops;
  if (!object.contains("ops")) return ops;
  if (!object["ops"].is_array()) reject(where, "ops must be an array of names");
  for (const Json& name : object["ops"]) {
    const auto op = std::ranges::find_if(kBenchOps, [&](BenchOp op) { return name == operation_name(op); });
    if (op == std::end(kBenchOps)) reject(where, "unknown operation " + kit::one_line(name.dump().substr(0, 40), true));
    ops.push_back(*op);
  }
  return ops;
}

BenchShape parse_shape(const Json& given, const std::string& where) {
  if (!given.is_object()) reject(where, "a shape must be a JSON object");
  // A line of `bench --json` holds its shape under "shape".
  const Json& object = given.contains("shape") && given["shape"].is_object() ? given["shape"] : given;
  static const std::vector<std::string> known = {
      "batch",       "seqlen_q",     "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v", "causal",
      "window_left", "window_right", "shared_q", "jagged",      "min_seqlen",   "total_q",  "total_k",    "ops"};
  for (const auto& [key, value] : object.items()) {
    if (std::ranges::count(known, key) == 0) reject(where, "unknown key " + kit::in_quotes(key));
  }
  for (const char* key : {"seqlen_q", "head_dim"}) {
    if (!object.contains(key)) reject(where, std::string(key) + " is missing");
  }
  BenchShape s;
  s.batch = integer(object, "batch", 1, 1, where);
  s.seqlen_q = integer(object, "seqlen_q", 1, 0, where);
  s.seqlen_k = integer(object, "seqlen_k", 1, s.seqlen_q, where);
  s.num_heads_q = integer(object, "num_heads_q", 1, 1, where);
  s.num_heads_kv = integer(object, "num_heads_kv", 1, s.num_heads_q, where);
  s.head_dim = integer(object, "head_dim", 1, 0, where);
  s.head_dim_v = integer(object, "head_dim_v", 1, s.head_dim, where);
  s.mask = {.causal = boolean(object, "causal", where),
            .window_left = int32_t(integer(object, "window_left", -1, -1, where)),
            .window_right = int32_t(integer(object, "window_right", -1, -1, where))};
  s.shared_q = boolean(object, "shared_q", where);
  s.jagged = boolean(object, "jagged", where);
  s.min_seqlen = integer(object, "min_seqlen", 0, 0, where);
  s.ops = operations(object, where);
  if (s.num_heads_q % s.num_heads_kv != 0) {
    reject(where, "num_heads_q must be a multiple of num_heads_kv = " + std::to_string(s.num_heads_kv) + ", got " +
                      std::to_string(s.num_heads_q));
  }
  // Also keeps every product of extents below 2^63.
  if (s.batch * std::max(s.seqlen_q, s.seqlen_k) > std::numeric_limits<int32_t>::max()) {
    reject(where,
           "batch * seqlen must be less than 2^31, got " + std::to_string(s.batch * std::max(s.seqlen_q, s.seqlen_k)));
  }
  if (s.num_heads_q * std::max(s.head_dim, s.head_dim_v) > kMaxExtent) {
    reject(where, "num_heads_q * head_dim must be at most " + std::to_string(kMaxExtent));
  }
  return s;
}

}  // namespace

Operation operation_of(BenchOp op) {
  switch (op) {
    case BenchOp::attention_fwd: return Operation::attention_fwd;
    case BenchOp::attention_bwd:
    case BenchOp::training_step: return Operation::attention_bwd;
    case BenchOp::quantize: return Operation::quantize;
    case BenchOp::dequantize: return Operation::dequantize;
    case BenchOp::rmsnorm_quantize: return Operation::rmsnorm_quantize;
    case BenchOp::rmsnorm_bwd: return Operation::rmsnorm_bwd;
    case BenchOp::gemm_quantize: return Operation::gemm_quantize;
  }
  return Operation::attention_fwd;
}

const char* operation_name(BenchOp op) {
  return op == BenchOp::training_step ? "training_step" : mxflash::operation_name(operation_of(op));
}

std::vector<int32_t> lens_q(const BenchShape& s) {
  if (s.shared_q) return {int32_t(s.seqlen_q)};
  return lengths(s, s.seqlen_q);
}
std::vector<int32_t> lens_k(const BenchShape& s) { return lengths(s, s.seqlen_k); }

int64_t total_tokens_q(const BenchShape& s) { return kit::sum_of(lens_q(s)); }

double attention_flops(const BenchShape& s, BenchOp op) {
  const std::vector<int32_t> q = lens_q(s), k = lens_k(s);
  double pairs = 0;
  for (size_t b = 0; b < k.size(); ++b) {
    const int64_t len_q = q[s.shared_q ? 0 : b], len_k = k[b];
    if (s.mask.window_left < 0 && s.mask.window_right < 0) {
      pairs += double(len_q) * double(len_k) * (s.mask.causal ? 0.5 : 1);
      continue;
    }
    for (int64_t i = 0; i < len_q; ++i) {
      const int64_t diagonal = i + len_k - len_q;
      int64_t first = 0, end = len_k;
      if (s.mask.causal) end = std::min(end, diagonal + 1);
      if (s.mask.window_right >= 0) end = std::min(end, diagonal + s.mask.window_right + 1);
      if (s.mask.window_left >= 0) first = std::max(first, diagonal - s.mask.window_left);
      pairs += double(std::max<int64_t>(0, end - first));
    }
  }
  const double d = double(s.head_dim), dv = double(s.head_dim_v);
  double of_a_pair = 0;
  if (op != BenchOp::attention_bwd) of_a_pair += 2 * d + 2 * dv;
  if (op != BenchOp::attention_fwd) of_a_pair += 6 * d + 4 * dv;
  return double(s.num_heads_q) * pairs * of_a_pair;
}

BenchShape clipped(const BenchShape& s) {
  BenchShape c = s;
  c.batch = std::min(s.batch, kClippedBatch);
  c.seqlen_q = std::min(s.seqlen_q, kClippedLength);
  c.seqlen_k = std::min(s.seqlen_k, kClippedLength);
  const int64_t group = s.num_heads_q / s.num_heads_kv;
  c.num_heads_kv = group > 1 ? 1 : std::min(s.num_heads_kv, kClippedHeads);
  c.num_heads_q = c.num_heads_kv * std::min(group, kClippedHeads);
  c.ops.clear();
  return c;
}

kit::AttentionCase attention_case(const BenchShape& s) {
  return {.name = "bench",
          .lens_q = lens_q(s),
          .lens_k = lens_k(s),
          .num_heads_q = int32_t(s.num_heads_q),
          .num_heads_kv = int32_t(s.num_heads_kv),
          .head_dim = int32_t(s.head_dim),
          .head_dim_v = int32_t(s.head_dim_v),
          .mask = s.mask,
          .shared_q = s.shared_q};
}

Json to_json(const BenchShape& s) {
  Json json{{"batch", s.batch},
            {"seqlen_q", s.seqlen_q},
            {"seqlen_k", s.seqlen_k},
            {"num_heads_q", s.num_heads_q},
            {"num_heads_kv", s.num_heads_kv},
            {"head_dim", s.head_dim},
            {"causal", s.mask.causal}};
  if (s.head_dim_v != s.head_dim) json["head_dim_v"] = s.head_dim_v;
  if (s.mask.window_left >= 0) json["window_left"] = s.mask.window_left;
  if (s.mask.window_right >= 0) json["window_right"] = s.mask.window_right;
  if (s.shared_q) json["shared_q"] = true;
  if (s.jagged) {
    json["jagged"] = true;
    json["min_seqlen"] = s.min_seqlen;
    json["total_q"] = total_tokens_q(s);
    json["total_k"] = kit::sum_of(lens_k(s));
  }
  for (const BenchOp op : s.ops) json["ops"].push_back(operation_name(op));
  return json;
}

std::string to_text(const BenchShape& s) {
  const auto number = [](int64_t n) { return std::to_string(n); };
  std::string text = "b" + number(s.batch) + " h" + number(s.num_heads_q);
  if (s.num_heads_kv != s.num_heads_q) text += "/" + number(s.num_heads_kv);
  text += " " + number(s.seqlen_q) + "x" + number(s.seqlen_k) + " d" + number(s.head_dim);
  if (s.head_dim_v != s.head_dim) text += "/" + number(s.head_dim_v);
  if (s.mask.causal) text += " causal";
  if (s.mask.window_left >= 0 || s.mask.window_right >= 0) {
    text += " window " + number(s.mask.window_left) + "," + number(s.mask.window_right);
  }
  if (s.shared_q) text += " shared q";
  if (s.jagged) text += " jagged";
  return text;
}

std::vector<BenchShape> parse_bench_shapes(const std::string& text, const std::string& file) {
  std::vector<BenchShape> shapes;
  const auto add = [&](const Json& json, const std::string& where) {
    if (json.is_object() && json.contains("machine")) return;  // bench/cpu.sh says where its lines come from
    if (!json.is_array()) {
      shapes.push_back(parse_shape(json, where));
      return;
    }
    for (size_t i = 0; i < json.size(); ++i)
      shapes.push_back(parse_shape(json[i], where + ": shape " + std::to_string(i)));
  };
  const std::string name = kit::one_line(file);
  if (const Json whole = Json::parse(text, nullptr, false); !whole.is_discarded()) {
    add(whole, name);
  } else {
    std::istringstream lines(text);
    int64_t number = 0;
    for (std::string line; std::getline(lines, line);) {
      ++number;
      if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
      const std::string where = name + ": line " + std::to_string(number);
      const Json json = Json::parse(line, nullptr, false);
      if (json.is_discarded()) reject(where, "must be a JSON object (or the file a JSON array of them)");
      add(json, where);
    }
  }
  if (shapes.empty()) reject(name, "has no shapes");
  return shapes;
}

std::vector<BenchShape> bench_shapes(const std::string& set_or_file) {
  if (set_or_file == "small") return small_shapes();
  if (set_or_file == "llm") return llm_shapes();
  if (set_or_file == "recsys") return recsys_shapes();
  if (set_or_file == "cpu") return cpu_shapes();
  if (set_or_file == "cuda") return cuda_shapes();
  if (set_or_file == "backward") return backward_shapes();
  if (set_or_file == "decode") return decode_shapes();
  std::ifstream file(set_or_file, std::ios::binary);
  std::string text(kMaxFileSize + 1, '\0');
  file.read(text.data(), std::streamsize(text.size()));
  if (file.bad() || (file.gcount() == 0 && !file.eof())) {
    throw UsageError("--shapes must be small, llm, recsys, cpu, cuda, backward, decode or a readable file, got " +
                     kit::in_quotes(set_or_file));
  }
  text.resize(size_t(file.gcount()));
  if (text.size() > kMaxFileSize) reject(kit::one_line(set_or_file), "must be at most 1 MiB");
  return parse_bench_shapes(text, set_or_file);
}

}  // namespace mxflash::tools
