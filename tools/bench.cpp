// `mxflash bench`: verify, warm up, time; a line per operation and shape, beside the measured ceiling of this machine
// and a peer in the same run.
#include <mxflash/backend.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "kit/peak.h"
#include "kit/runner.h"
#include "kit/text.h"
#include "kit/timer.h"
#include "kit/verify.h"
#include "tools/bench_shapes.h"
#include "tools/bench_work.h"
#include "tools/commands.h"
#include "tools/commit.h"

namespace mxflash::tools {
namespace {

using kit::text;
using Json = nlohmann::ordered_json;

constexpr double kPeerSeconds = 10;      // a peer that would take longer is left out
constexpr double kAnnouncedSeconds = 2;  // a run that takes longer is announced on stderr

struct BenchOptions {
  std::vector<std::string> ops;
  std::string shapes = "small", backend;
  bool json = false;
  int32_t threads = 0, repeat = 3;
  double min_time = 0.25;
};

// In the order of the table.
constexpr Operation kOperations[] = {Operation::attention_fwd, Operation::attention_bwd,    Operation::quantize,
                                     Operation::dequantize,    Operation::rmsnorm_quantize, Operation::gemm_quantize};

struct Line {
  Operation op;
  BenchShape shape;
  std::string backend;
  kit::Timing timing{};
  double tflops = NAN, gbps = 0, ceiling_share = 0;
  std::string peer{};
  double ratio = NAN;  // peer's time / ours
};

// What an operation on tokens sees of a shape: those of q. Sequences of whole 128s are laid out like one long one.
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

std::string shape_text(Operation op, const BenchShape& s) {
  if (is_attention(op)) return to_text(s);
  const std::string n = std::to_string(s.hidden());
  return std::to_string(total_tokens_q(s)) + "x" +
         (op == Operation::gemm_quantize      ? n + "x" + n
          : op == Operation::rmsnorm_quantize ? n
                                              : std::to_string(s.num_heads_q) + "x" + std::to_string(s.head_dim)) +
         (s.jagged ? " jagged" : "");
}

Json number(double x) { return std::isfinite(x) ? Json(x) : Json(nullptr); }

// Backends to try, best first. Empty: the operation has not the forced one, and nobody asked for this operation.
std::vector<std::string> candidates(Operation op, const BenchOptions& options) {
  std::string forced = options.backend, source = "--backend";
  if (const char* name = std::getenv("MXFLASH_BACKEND"); forced.empty() && name) {
    forced = name;
    source = "MXFLASH_BACKEND";
  }
  if (forced.empty()) return kit::available_backends(op);
  std::string known;
  for (int32_t i = 0; i < num_backends(op); ++i) {
    const BackendInfo b = backend_info(op, i);
    known += (known.empty() ? "" : ", ") + std::string(b.name);
    if (b.name != forced) continue;
    if (!b.available.ok()) throw UsageError(source + " " + forced + " cannot run here: " + b.available.message);
    return {forced};
  }
  bool elsewhere = false;
  for (const Operation other : kOperations) {
    for (int32_t i = 0; i < num_backends(other); ++i) elsewhere |= backend_info(other, i).name == forced;
  }
  if (elsewhere && options.ops.empty()) return {};
  throw UsageError(source + " must be one of " + known + " for " + operation_name(op) + ", got '" + forced + "'");
}

double free_memory() {
  std::ifstream info("/proc/meminfo");
  for (std::string key, unit; info >> key;) {
    double kilobytes = 0;
    if (!(info >> kilobytes)) break;
    if (key == "MemAvailable:") return 1024 * kilobytes;
    std::getline(info, unit);
  }
  return HUGE_VAL;  // not known: try
}

class Bench {
 public:
  Bench(const BenchOptions& options, const std::vector<BenchShape>& shapes)
      : options_(options),
        threads_(num_threads()),
        fma_(kit::measure_fma_peak(threads_)),
        device_(kit::cpu_model() + text(", %d thread%s", threads_, threads_ == 1 ? "" : "s")) {
    for (const BenchShape& shape : shapes) shape_width_ = std::max(shape_width_, int(to_text(shape).size()));
    if (options_.json) return;
    std::cout << text("%s; fp32 multiply-add peak %.1f GFLOP/s (%s); commit %s\n", device_.c_str(), fma_.gflops,
                      fma_.instructions, commit())
              << text("%-17s %-*s %-8s%12s%9s%10s%9s%9s  %s\n", "operation", shape_width_, "shape", "backend", "us",
                      "spread", "GFLOP/s", "GB/s", "ceiling", "ratio to peer");
  }

  void run(Operation op, const BenchShape& shape) {
    const std::vector<std::string> backends = candidates(op, options_);
    for (const std::string& backend : backends) {
      try {
        if (verified(op, shape, backend)) print(measure(op, shape, backend));
        return;
      } catch (const kit::StatusError& error) {
        if (error.code != StatusCode::unsupported || backend == backends.back()) throw;
      }
    }
    if (backends.empty()) {
      std::cerr << "mxflash: " << operation_name(op) << " has no backend " << options_.backend << ": not timed\n";
    }
  }

  bool failed() const { return failed_; }
  int timed() const { return timed_; }

 private:
  // Attention verifies both directions at once; a shape is clipped, so many shapes are one.
  bool verified(Operation op, const BenchShape& shape, const std::string& backend) {
    const std::string key =
        (is_attention(op) ? "attention" : operation_name(op)) + backend + to_json(clipped(shape)).dump();
    const auto known = verified_.find(key);
    if (known != verified_.end()) return known->second;
    const std::string failure = verify(op, shape, backend);
    if (!failure.empty()) {
      std::cerr << "mxflash: " << operation_name(op) << " " << shape_text(op, shape) << " in backend " << backend
                << " is wrong, so it is not timed: " << failure << '\n';
      failed_ = true;
    }
    return verified_[key] = failure.empty();
  }

  Line measure(Operation op, const BenchShape& shape, const std::string& backend) {
    Line line{.op = op, .shape = shape, .backend = backend};
    const double need = memory_of(op, shape), have = free_memory();
    const auto name = [&] { return std::string(operation_name(op)) + " " + shape_text(op, shape); };
    if (need > 0.9 * have) {
      std::cerr << "mxflash: " << name()
                << text(" needs %.1f GB of memory, %.1f are free: not timed\n", 1e-9 * need, 1e-9 * have);
      return line;
    }
    const kit::TimeBudget budget{.seconds = options_.min_time, .min_repeats = options_.repeat};
    // The clipped shape tells how long the whole one will take.
    const BenchShape small_shape = clipped(shape);
    const Work small = prepare(op, small_shape, backend);
    const double cold_ms = kit::milliseconds(small.run), small_ms = std::min(cold_ms, kit::milliseconds(small.run));
    const Work work = prepare(op, shape, backend);
    const double scale = work.flops > 0 && small.flops > 0 ? work.flops / small.flops : work.bytes / small.bytes;
    const double run_s = 1e-3 * small_ms * scale,
                 line_s = run_s > budget.long_run_seconds ? run_s : run_s * (1 + budget.min_repeats);
    if (line_s > kAnnouncedSeconds) {
      std::cerr << "mxflash: " << name() << " in backend " << backend << text(" takes about %.0f s\n", line_s);
    }
    line.timing = kit::measure(budget, work.run);
    line.gbps = work.bytes / line.timing.median_ms * 1e-6;
    if (work.flops > 0) {
      line.tflops = work.flops / line.timing.median_ms * 1e-9;
      line.ceiling_share = 1e3 * line.tflops / fma_.gflops;
    } else {
      const double copy = copy_gbps(int64_t(work.bytes));
      line.ceiling_share = line.gbps / copy;
      line.peer = "memcpy";
      line.ratio = line.ceiling_share;
    }
    if (work.peer) {
      line.peer = work.peer;
      const double estimate = 1e-3 * small.run_peer() * scale;
      if (estimate < kPeerSeconds) line.ratio = peer_ms(work) / line.timing.median_ms;
    }
    return line;
  }

  double peer_ms(const Work& work) const {
    std::vector<double> samples{work.run_peer()};
    while (samples.size() < 3 && samples[0] < 1e3 * options_.min_time) samples.push_back(work.run_peer());
    return kit::median(samples);
  }

  double copy_gbps(int64_t bytes) {
    const auto known = copies_.find(bytes);
    return known != copies_.end() ? known->second : copies_[bytes] = kit::measure_copy_gbps(bytes, threads_);
  }

  void print(const Line& line) {
    if (line.timing.repeats == 0) return;
    ++timed_;
    const double microseconds = 1e3 * line.timing.median_ms;
    if (options_.json) {
      Json ratio = Json::object();
      if (!line.peer.empty()) ratio[line.peer] = number(line.ratio);
      // ref is the specification: its speed says what a portable fallback costs, not what the format can do.
      const Json json{{"op", operation_name(line.op)},
                      {"backend", line.backend},
                      {"mode", line.backend == "ref" ? "reference" : "default"},
                      {"shape", to_json(line.shape)},
                      {"device", device_},
                      {"commit", commit()},
                      {"median_ms", line.timing.median_ms},
                      {"spread", number(line.timing.spread)},
                      {"repeats", line.timing.repeats},
                      {"tflops", number(line.tflops)},
                      {"gbps", line.gbps},
                      {"ceiling_share", line.ceiling_share},
                      {"ratio", ratio}};
      std::cout << json.dump() << std::endl;
      return;
    }
    const auto or_dash = [](const char* format, double x) {
      return std::isfinite(x) ? text(format, x) : std::string("-");
    };
    std::cout << text("%-17s %-*s %-8s%12.1f%9s%10s%9.3g%8.1f%%  ", operation_name(line.op), shape_width_,
                      shape_text(line.op, line.shape).c_str(), line.backend.c_str(), microseconds,
                      or_dash("%.1f%%", 100 * line.timing.spread).c_str(), or_dash("%.2f", 1e3 * line.tflops).c_str(),
                      line.gbps, 100 * line.ceiling_share)
              << (line.peer.empty() ? "" : or_dash("%.3f", line.ratio) + " " + line.peer) << std::endl;
  }

  const BenchOptions& options_;
  const int32_t threads_;
  const kit::FmaPeak fma_;
  const std::string device_;
  std::map<std::string, bool> verified_;
  std::map<int64_t, double> copies_;
  bool failed_ = false;
  int timed_ = 0, shape_width_ = 16;
};

void bench(const BenchOptions& options) {
  const std::vector<BenchShape> shapes = bench_shapes(options.shapes);
  const auto wanted = [&](Operation op) {
    return options.ops.empty() || std::ranges::count(options.ops, std::string(operation_name(op))) > 0;
  };
  for (const Operation op : kOperations) {
    if (wanted(op)) candidates(op, options);  // a name that cannot be right fails now
  }
  if (options.threads > 0) set_num_threads(options.threads);
  Bench run(options, shapes);
  std::set<std::string> seen;  // operations on tokens see less of a shape than attention, so shapes coincide
  for (const Operation op : kOperations) {
    for (const BenchShape& shape : shapes) {
      const BenchShape own = is_attention(op) ? shape : tokens_of(shape);
      if (wanted(op) && seen.insert(operation_name(op) + to_json(own).dump()).second) run.run(op, own);
    }
  }
  if (run.failed()) throw CheckFailed{};
  if (run.timed() == 0) throw UsageError("nothing was timed; choose smaller shapes or another --op");
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "Verify, then time every operation on a set of shapes");
  const auto options = std::make_shared<BenchOptions>();
  std::set<std::string> names;
  for (const Operation op : kOperations) names.insert(operation_name(op));
  command->add_option("--op", options->ops, "Only these operations, separated by commas (default: all)")
      ->delimiter(',')
      ->check(CLI::IsMember(names));
  command->add_option("--shapes", options->shapes, "small, llm, recsys, or a file (default: small, about 20 s)");
  command->add_option("--backend", options->backend, "Force a backend (default: the first that supports the call)");
  command->add_flag("--json", options->json, "Print one JSON object a line");
  command->add_option("--threads", options->threads, "Threads of CPU backends, peers and ceilings (default: all)")
      ->check(CLI::Range(1, 256));
  command->add_option("--min-time", options->min_time, "Seconds to spend on each line (default: 0.25)")
      ->check(CLI::Range(0.0, 3600.0));
  command->add_option("--repeat", options->repeat, "Least number of timed runs (default: 3; 1 if a run takes 5 s)")
      ->check(CLI::Range(1, 1000));
  command->footer(
      "A shape is one attention call; quantize, dequantize, rmsnorm_quantize and gemm_quantize (by a square matrix) "
      "work\n"
      "on the tokens of its q. FILE holds a JSON array of shapes, or one a line; lines of --json do as well. Keys:\n"
      "  seqlen_q, head_dim                 required\n"
      "  batch (1), seqlen_k (seqlen_q), num_heads_q (1), num_heads_kv (num_heads_q), head_dim_v (head_dim)\n"
      "  causal (false), window_left, window_right (-1: open)\n"
      "  shared_q (false)                   one query sequence for all key sequences\n"
      "  jagged (false), min_seqlen (0)     lengths uniform in min_seqlen..seqlen, the same in every run\n"
      "FLOPs are 4 d (backward: 10 d) for every query, key and head of the real lengths, half of it with a causal "
      "mask;\n"
      "with a window, for what is visible. GB/s counts every operand and result once. Attention writes BF16.\n"
      "The ceiling is the measured fp32 multiply-add peak, or a memcpy of as many bytes, on the same threads.\n"
      "The ratio is the time of the peer over that of mxflash: exact attention in float64, a plain fp32 GEMM, memcpy;\n"
      "a peer that would take more than 10 s is left out.");
  command->callback([options] { bench(*options); });
}

}  // namespace mxflash::tools
