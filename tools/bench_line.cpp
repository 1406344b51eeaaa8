#include "tools/bench_line.h"

#include <cstdlib>
#include <iostream>
#include <set>

#include "kit/device_memory.h"
#include "kit/host_tensor.h"
#include "kit/text.h"
#include "kit/verify.h"
#include "tools/commands.h"
#include "tools/commit.h"

namespace mxflash::tools {
namespace {

using kit::text;
using Json = nlohmann::ordered_json;

Json number(double x) { return std::isfinite(x) ? Json(x) : Json(nullptr); }

std::string or_dash(const char* format, double x) { return std::isfinite(x) ? text(format, x) : std::string("-"); }

void add_bytes(Json& json, double workspace, double saved) {
  if (std::isfinite(workspace)) json["workspace_bytes"] = int64_t(workspace);
  if (std::isfinite(saved)) json["saved_bytes"] = int64_t(saved);
}

Json json_of(const Line& line, const LinePrinter& p) {
  Json ratio = Json::object(), peers = Json::object(), ceiling = Json::object();
  for (const Peer& peer : line.peers) {
    ratio[peer.name] = number(line.ratio(peer));
    peers[peer.name] = {{"median_ms", number(peer.timing.median_ms)}, {"spread", number(peer.timing.spread)}};
    if (std::isfinite(peer.error)) peers[peer.name]["error"] = peer.error;
    add_bytes(peers[peer.name], peer.workspace_bytes, peer.saved_bytes);
  }
  for (const Line::Ceiling& c : line.ceilings) ceiling[c.name] = {{"value", c.value}, {"share", c.share}};
  Json json{{"op", operation_name(line.op)},
            {"backend", line.backend},
            {"mode", line.mode},
            {"shape", to_json(line.shape)},
            {"device", p.device},
            {"commit", commit()},
            {"median_ms", line.timing.median_ms},
            {"spread", number(line.timing.spread)},
            {"repeats", line.timing.repeats},
            {"tflops", number(line.tflops)},
            {"gbps", line.gbps},
            {"ceiling_share", line.nearest_ceiling().share},
            {"ceiling", ceiling},
            {"ratio", ratio},
            {"peers", peers}};
  if (!line.peers.empty() && std::isfinite(line.ratio(line.peers.front()))) {
    json["best_peer"] = line.peers.front().name;
  }
  if (line.backend == "cpu") json["isa"] = cpu_isa();
  if (std::isfinite(line.error)) json["error"] = line.error;
  add_bytes(json, line.workspace_bytes, line.saved_bytes);
  for (const auto& [key, value] : p.machine.items()) json[key] = value;
  if (is_attention(line.op) && !p.peer_versions.empty()) json["peer_versions"] = p.peer_versions;
  return json;
}

}  // namespace

BenchShape tokens_of(const BenchShape& s) {
  BenchShape t{.batch = s.shared_q ? 1 : s.batch,
               .seqlen_q = s.seqlen_q,
               .num_heads_q = s.num_heads_q,
               .num_heads_kv = s.num_heads_q,
               .head_dim = s.head_dim,
               .head_dim_v = s.head_dim,
               .jagged = s.jagged && !s.shared_q,
               .min_seqlen = s.min_seqlen};
  if (!t.jagged && t.seqlen_q % 128 == 0) {
    t.seqlen_q *= t.batch;
    t.batch = 1;
  }
  t.seqlen_k = t.seqlen_q;
  return t;
}

std::string shape_text(BenchOp op, const BenchShape& s) {
  if (is_attention(op)) return to_text(s);
  const std::string n = std::to_string(s.hidden());
  return std::to_string(total_tokens_q(s)) + "x" +
         (op == BenchOp::gemm_quantize ? n + "x" + n
          : op == BenchOp::rmsnorm_quantize || op == BenchOp::rmsnorm_bwd
              ? n
              : std::to_string(s.num_heads_q) + "x" + std::to_string(s.head_dim)) +
         (s.jagged ? " jagged" : "");
}

std::string words(const Json& json) {
  return kit::one_line(json.is_string() ? json.get<std::string>()
                                        : json.dump(-1, ' ', true, Json::error_handler_t::replace));
}

ForcedBackend forced_backend(const BenchOptions& options) {
  if (!options.backend.empty()) return {options.backend, "--backend"};
  const char* name = std::getenv("MXFLASH_BACKEND");
  return {name ? name : "", "MXFLASH_BACKEND"};
}

bool is_on_device(const BenchOptions& options) {
  const auto [forced, source] = forced_backend(options);
  const bool is_device = kit::is_device_backend(forced);
  if (options.device == "auto") return is_device;
  const bool wants_device = options.device == "cuda";
  if (!forced.empty() && is_device != wants_device) {
    throw UsageError(source + " " + forced + " computes on " + (is_device ? "cuda" : "cpu") + ", but --device is " +
                     options.device + "; leave one of them out");
  }
  return wants_device;
}

std::vector<std::string> candidates(BenchOp op, const BenchOptions& options) {
  const auto [forced, source] = forced_backend(options);
  const bool on_device = is_on_device(options);
  std::vector<std::string> able;
  std::string known, unable;
  for (int32_t i = 0; i < num_backends(operation_of(op)); ++i) {
    const BackendInfo b = backend_info(operation_of(op), i);
    known += (known.empty() ? "" : ", ") + std::string(b.name);
    if (forced.empty() ? kit::is_device_backend(b.name) != on_device : b.name != forced) continue;
    if (b.available.ok()) able.push_back(b.name);
    if (!b.available.ok() && !forced.empty()) {
      throw UsageError(source + " " + forced + " cannot run here: " + b.available.message);
    }
    if (!b.available.ok()) unable += (unable.empty() ? "" : "; ") + std::string(b.name) + ": " + b.available.message;
  }
  if (!able.empty()) return able;
  if (forced.empty()) {
    if (!unable.empty()) throw UsageError("--device cuda cannot be used here: " + unable);
    if (options.ops.empty()) return {};
    throw UsageError(std::string(operation_name(op)) + " has no backend for --device cuda, got only " + known);
  }
  bool elsewhere = false;
  for (const BenchOp other : kBenchOps) {
    for (int32_t i = 0; i < num_backends(operation_of(other)); ++i) {
      elsewhere |= backend_info(operation_of(other), i).name == forced;
    }
  }
  if (elsewhere && options.ops.empty()) return {};
  throw UsageError(source + " must be one of " + known + " for " + operation_name(op) + ", got '" + forced + "'");
}

std::vector<std::pair<BenchOp, BenchShape>> wanted_lines(const BenchOptions& options,
                                                         const std::vector<BenchShape>& shapes) {
  std::vector<std::pair<BenchOp, BenchShape>> lines;
  std::set<std::string> seen;
  for (const BenchOp op : kBenchOps) {
    if (!options.ops.empty() && std::ranges::count(options.ops, std::string(operation_name(op))) == 0) continue;
    const bool is_step = op == BenchOp::training_step;
    if (is_step && !is_on_device(options)) {
      if (options.ops.empty()) continue;
      throw UsageError("training_step is timed on a device only: --device cuda");
    }
    candidates(op, options);  // a name that cannot be right fails now
    for (const BenchShape& shape : shapes) {
      if (!shape.ops.empty() && std::ranges::count(shape.ops, op) == 0) continue;
      if (is_step && options.ops.empty() && shape.ops.empty()) continue;  // as long as both directions: if asked for
      const BenchShape own = is_attention(op) ? shape : tokens_of(shape);
      if (seen.insert(operation_name(op) + to_json(own).dump()).second) lines.emplace_back(op, own);
    }
  }
  return lines;
}

void LinePrinter::header() const {
  std::cout << text("%-17s %-*s %-*s%12s%9s%10s%9s  %-12s %s\n", "operation", shape_width, "shape", tera ? 20 : 10,
                    "backend", "us", "spread", tera ? "TFLOP/s" : "GFLOP/s", "GB/s", "ceiling", "times as fast as");
}

void LinePrinter::print(const Line& line) const {
  if (json) {
    std::cout << json_of(line, *this).dump() << std::endl;
    return;
  }
  const bool is_moded = line.mode != "default" && line.mode != "reference";
  const Line::Ceiling& ceiling = line.nearest_ceiling();
  std::cout << text("%-17s %-*s %-*s%12.1f%9s%10s%9.3g  %5.1f%% %-5s ", operation_name(line.op), shape_width,
                    shape_text(line.op, line.shape).c_str(), tera ? 20 : 10,
                    (line.backend + (is_moded ? " " + line.mode : "")).c_str(), 1e3 * line.timing.median_ms,
                    or_dash("%.1f%%", 100 * line.timing.spread).c_str(),
                    or_dash("%.2f", (tera ? 1 : 1e3) * line.tflops).c_str(), line.gbps, 100 * ceiling.share,
                    ceiling.name.substr(0, ceiling.name.find('_')).c_str());
  for (const Peer& peer : line.peers) {
    std::cout << (&peer == line.peers.data() ? "" : ", ") << or_dash("%.3f", line.ratio(peer)) << " " << peer.name;
  }
  std::cout << std::endl;
}

}  // namespace mxflash::tools
