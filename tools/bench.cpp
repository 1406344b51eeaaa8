// `mxflash bench`: verify, warm up, time; a line per operation, shape and arithmetic, beside the measured ceiling of
// this machine and peers. Runs, ceilings and peers take their samples in turn, so that a drift meets all of them.
#include <mxflash/attention.h>
#include <mxflash/backend.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "kit/host_tensor.h"
#include "kit/peak.h"
#include "kit/runner.h"
#include "kit/text.h"
#include "kit/timer.h"
#include "kit/verify.h"
#include "tools/bench_peers.h"
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
constexpr double kMaxSampleMs = 20;      // shorter runs are repeated until they take so long together
constexpr int64_t kDecodeQueries = 16;   // up to here it may be reading k and v that takes the time
// A peer's process has the operands twice in fp32 and twice in BF16, and BF16 gradients; we have them dequantized.
constexpr double kPeersMemory = 32;
constexpr int kMaxPeerCrashes = 3;  // then no further process is started
constexpr char kNoPeers[] = "none", kInstalledPython[] = "build/baselines/bin/python";

struct BenchOptions {
  std::vector<std::string> ops;
  std::string shapes = "small", backend, peers, cpu_math = "both";
  bool json = false;
  int32_t threads = 0, repeat = 3;
  double min_time = 0.25;
};

// In the order of the table.
constexpr Operation kOperations[] = {Operation::attention_fwd, Operation::attention_bwd,    Operation::quantize,
                                     Operation::dequantize,    Operation::rmsnorm_quantize, Operation::gemm_quantize};

struct Peer {
  std::string name;
  kit::Timing timing{.median_ms = NAN, .spread = NAN, .repeats = 0};
  double error = NAN;  // relative RMS, where the peer has been checked
};

struct Line {
  Operation op;
  BenchShape shape;
  std::string backend, mode;  // "exact" or "fast"; "reference" of ref; else "default"
  kit::Timing timing{};
  double tflops = NAN, gbps = 0;
  // Measured with this line: multiply-adds, reads or copies, of which the work would at best take this part of its
  // time.
  struct Ceiling {
    std::string name;  // "fma_gflops", "read_gbps", "copy_gbps"
    double value, share;
  };
  std::vector<Ceiling> ceilings{};
  std::vector<Peer> peers{};  // the fastest first

  const Ceiling& nearest_ceiling() const {
    return *std::ranges::max_element(ceilings, {}, [](const Ceiling& c) { return c.share; });
  }
  double ratio(const Peer& peer) const { return peer.timing.median_ms / timing.median_ms; }
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

// A string of an answer without its quotes; anything else as it is.
std::string words(const Json& json) {
  return kit::one_line(json.is_string() ? json.get<std::string>()
                                        : json.dump(-1, ' ', true, Json::error_handler_t::replace));
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

// The peers' process, and its end. What is left out is said on stderr, once for every reason.
class Peers {
 public:
  // An empty `python` is the one that bench/baselines/install.sh made, if it is there.
  Peers(const std::string& python, int32_t threads) : python_(python), threads_(threads) {
    const bool is_default = python.empty();
    if (is_default) python_ = std::filesystem::exists(kInstalledPython) ? kInstalledPython : kNoPeers;
    if (python_ == kNoPeers) return;
    try {
      start();
    } catch (const PeerError& error) {
      if (!is_default) throw UsageError(std::string("--peers must be a Python that runs, or none: ") + error.what());
      std::cerr << "mxflash: no peers: " << error.what() << '\n';
      python_ = kNoPeers;
    }
  }

  bool any() const { return python_ != kNoPeers; }
  const Json& versions() const { return versions_; }

  // The peers that can do this, with their errors.
  std::vector<Peer> for_shape(Operation op, const BenchShape& shape, const Work& work) {
    std::vector<Peer> peers;
    if (shape.mask.window_left >= 0 || shape.mask.window_right >= 0) {
      leave_out(op, "all", "a window");
      return peers;
    }
    try {
      if (!server_) start();
      const Json answer = server_->shape(shape, op == Operation::attention_bwd, work.write_operands);
      const Json left_out = part(answer, "left_out"), able = part(answer, "peers");
      for (const auto& [name, why] : left_out.items()) leave_out(op, name, words(why));
      for (const auto& [name, peer] : able.items()) {
        peers.push_back({.name = name, .error = peer.is_object() ? peer.value("error", NAN) : NAN});
      }
      if (answer.contains("failed")) leave_out(op, "all", words(answer["failed"]));
    } catch (const PeerError& error) {
      crashed(op, "all", error);
    }
    return peers;
  }

  // Samples of a peer for kit::measure_in_turn; NaN from its first failure on.
  std::function<double()> sampler(Operation op, const std::string& name, double least_ms) {
    return [this, op, name, least_ms, failed = false, crashes = crashes_]() mutable -> double {
      if (failed || crashes != crashes_) return NAN;
      try {
        const Json answer = server_->sample(name, least_ms);
        if (answer.contains("ms") && answer["ms"].is_number()) return answer["ms"].get<double>();
        leave_out(op, name, answer.contains("failed") ? words(answer["failed"]) : "answers without a time");
      } catch (const PeerError& error) {
        crashed(op, name, error);
      }
      failed = true;
      return NAN;
    };
  }

  void leave_out(Operation op, const std::string& peer, const std::string& why) {
    const std::string text =
        std::string(operation_name(op)) + ": peer " + kit::one_line(peer) + " is left out: " + kit::one_line(why);
    if (said_.insert(text).second) std::cerr << "mxflash: " << text << '\n';
  }

 private:
  static Json part(const Json& answer, const char* key) {
    return answer.contains(key) && answer[key].is_object() ? answer[key] : Json::object();
  }

  void start() {
    server_ = std::make_unique<PeerServer>(python_, threads_);
    versions_ = part(server_->hello(), "versions");
    const Json left_out = part(server_->hello(), "left_out");
    for (const auto& [name, why] : left_out.items()) {
      if (said_.insert(name).second)
        std::cerr << "mxflash: no peer " << kit::one_line(name) << ": " << words(why) << '\n';
    }
  }

  void crashed(Operation op, const std::string& peer, const PeerError& error) {
    server_.reset();
    leave_out(op, peer, error.what());
    if (++crashes_ < kMaxPeerCrashes) return;
    std::cerr << "mxflash: no more peers after " << crashes_ << " failures of their process\n";
    python_ = kNoPeers;
  }

  std::string python_;
  const int32_t threads_;
  std::unique_ptr<PeerServer> server_;
  Json versions_ = Json::object();
  std::set<std::string> said_;
  int crashes_ = 0;
};

class Bench {
 public:
  Bench(const BenchOptions& options, const std::vector<BenchShape>& shapes, bool with_attention)
      : options_(options),
        budget_{.seconds = options.min_time, .min_repeats = options.repeat},
        threads_(num_threads()),
        peers_(with_attention ? options.peers : kNoPeers, threads_),
        fma_peak_(kit::measure_fma_peak(threads_)),
        fma_gflops_(kit::fma_meter(threads_)),
        device_(kit::cpu_model() + text(", %d thread%s", threads_, threads_ == 1 ? "" : "s")) {
    for (const BenchShape& shape : shapes) shape_width_ = std::max(shape_width_, int(to_text(shape).size()));
    if (options_.json) return;
    std::cout << text("%s; fp32 multiply-add peak %.1f GFLOP/s (%s); backend cpu uses %s; commit %s\n", device_.c_str(),
                      fma_peak_.gflops, fma_peak_.instructions, cpu_isa(), commit());
    if (with_attention) std::cout << "peers: " << peers_text() << '\n';
    std::cout << text("%-17s %-*s %-10s%12s%9s%10s%9s  %-12s %s\n", "operation", shape_width_, "shape", "backend", "us",
                      "spread", "GFLOP/s", "GB/s", "ceiling", "times as fast as");
  }

  void run(Operation op, const BenchShape& shape) {
    const std::vector<std::string> backends = candidates(op, options_);
    for (const std::string& backend : backends) {
      try {
        std::vector<CpuMath> modes = modes_of(op, backend);
        std::erase_if(modes, [&](CpuMath mode) { return !verified(op, shape, backend, mode); });
        if (!modes.empty()) {
          for (const Line& line : measure(op, shape, backend, modes)) print(line);
        }
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
  std::vector<CpuMath> modes_of(Operation op, const std::string& backend) const {
    if (!is_attention(op) || backend != "cpu") return {CpuMath::automatic};
    if (options_.cpu_math == "exact") return {CpuMath::exact};
    if (options_.cpu_math == "fast") return {CpuMath::fast};
    return {CpuMath::exact, CpuMath::fast};
  }

  static std::string mode_name(const std::string& backend, CpuMath mode) {
    // ref is the specification: its speed says what a portable fallback costs, not what the format can do.
    return backend == "ref" ? "reference" : mode == CpuMath::automatic ? "default" : cpu_math_name(mode);
  }

  // Attention verifies both directions at once; a shape is clipped, so many shapes are one.
  bool verified(Operation op, const BenchShape& shape, const std::string& backend, CpuMath mode) {
    const std::string with = backend + " " + mode_name(backend, mode);
    const std::string key =
        (is_attention(op) ? "attention" : operation_name(op)) + with + to_json(clipped(shape)).dump();
    const auto known = verified_.find(key);
    if (known != verified_.end()) return known->second;
    const std::string failure = verify(op, shape, backend, mode);
    if (!failure.empty()) {
      std::cerr << "mxflash: " << operation_name(op) << " " << shape_text(op, shape) << " in backend " << with
                << " is wrong, so it is not timed: " << failure << '\n';
      failed_ = true;
    }
    return verified_[key] = failure.empty();
  }

  struct CeilingWay {
    const char* name;
    double amount;                  // FLOPs or bytes of the work
    std::function<double()> meter;  // 1e9 of them a second
  };

  // A line for every mode.
  std::vector<Line> measure(Operation op, const BenchShape& shape, const std::string& backend,
                            const std::vector<CpuMath>& modes) {
    const auto name = [&] { return std::string(operation_name(op)) + " " + shape_text(op, shape); };
    const bool with_peers = is_attention(op) && peers_.any();
    const double need = memory_of(op, shape) * (double(modes.size()) + (with_peers ? kPeersMemory : 0));
    const double have = free_memory();
    if (need > 0.9 * have) {
      std::cerr << "mxflash: " << name()
                << text(" needs %.1f GB of memory, %.1f are free: not timed\n", 1e-9 * need, 1e-9 * have);
      return {};
    }
    // The clipped shape tells how long the whole one will take.
    const Work small = prepare(op, clipped(shape), backend, modes.front());
    const double cold_ms = kit::milliseconds(small.run), small_ms = std::min(cold_ms, kit::milliseconds(small.run));
    std::vector<Work> works;
    for (const CpuMath mode : modes) works.push_back(prepare(op, shape, backend, mode));
    const Work& work = works.front();
    const double scale = work.flops > 0 && small.flops > 0 ? work.flops / small.flops : work.bytes / small.bytes;
    const double run_s = 1e-3 * small_ms * scale * double(modes.size()),
                 line_s = run_s > budget_.long_run_seconds ? run_s : run_s * (1 + budget_.min_repeats);
    if (line_s > kAnnouncedSeconds) {
      std::cerr << "mxflash: " << name() << " in backend " << backend << text(" takes about %.0f s\n", line_s);
    }

    std::vector<Line> lines;
    for (const CpuMath mode : modes) {
      lines.push_back({.op = op, .shape = shape, .backend = backend, .mode = mode_name(backend, mode)});
    }
    time_in_turn(works, with_peers ? process_peers(op, shape, work) : std::vector<Peer>{}, lines);
    if (work.peer && (lines.front().peers.empty() || backend == "ref")) {
      Peer peer{.name = work.peer};
      const double estimate = 1e-3 * small.run_peer() * scale;
      if (estimate < kPeerSeconds) peer.timing = peer_timing(work);
      for (Line& line : lines) line.peers.push_back(peer);
    }
    const auto ms = [](const Peer& p) { return std::isfinite(p.timing.median_ms) ? p.timing.median_ms : HUGE_VAL; };
    for (Line& line : lines) std::ranges::stable_sort(line.peers, {}, ms);
    return lines;
  }

  // Times the works, one a line, their ceilings, and those peers that take no further part if they fail.
  void time_in_turn(const std::vector<Work>& works, std::vector<Peer> peers, std::vector<Line>& lines) {
    const Operation op = lines.front().op;
    const Work& work = works.front();
    const double sample_ms = std::min(kMaxSampleMs, 100 * options_.min_time);
    std::vector<std::function<double()>> ways;
    for (const Work& mode : works) ways.push_back(kit::sampler(mode.run, sample_ms));
    const std::vector<CeilingWay> ceilings = ceilings_of(op, lines.front().shape, work);
    for (const CeilingWay& ceiling : ceilings) {
      ways.push_back([&] { return 1e3 * ceiling.amount / (1e9 * ceiling.meter()); });
    }
    const size_t first_peer = ways.size();
    for (const Peer& peer : peers) ways.push_back(peers_.sampler(op, peer.name, sample_ms));
    std::map<size_t, size_t> dequantizers;  // the way that a peer gets its operands in
    for (size_t i = 0; i < peers.size(); ++i) {
      if (!peers[i].name.starts_with("torch_sdpa_")) continue;
      dequantizers[i] = ways.size();
      const Dtype dtype = peers[i].name.ends_with("bf16") ? Dtype::bf16 : Dtype::f32;
      ways.push_back(kit::sampler(work.dequantizer(dtype), sample_ms));
    }
    const std::vector<kit::Timing> timings = kit::measure_in_turn(budget_, ways);

    for (size_t i = 0; i < peers.size(); ++i) peers[i].timing = timings[first_peer + i];
    Peer dequantize_sdpa{.name = "dequantize_sdpa"};
    double best_ms = HUGE_VAL;
    for (const auto& [peer, way] : dequantizers) {
      const kit::Timing& sdpa = peers[peer].timing;
      const double sum = timings[way].median_ms + sdpa.median_ms;
      if (sum < best_ms) dequantize_sdpa.timing = {best_ms = sum, sdpa.spread, sdpa.repeats};
    }
    peers.push_back(dequantize_sdpa);
    if (work.flops == 0) peers.push_back({.name = "memcpy", .timing = timings[works.size()]});
    std::erase_if(peers, [](const Peer& peer) { return !std::isfinite(peer.timing.median_ms); });  // already said

    for (size_t i = 0; i < lines.size(); ++i) {
      Line& line = lines[i];
      line.timing = timings[i];
      line.gbps = work.bytes / line.timing.median_ms * 1e-6;
      if (work.flops > 0) line.tflops = work.flops / line.timing.median_ms * 1e-9;
      for (size_t c = 0; c < ceilings.size(); ++c) {
        const double ideal_ms = timings[works.size() + c].median_ms;
        line.ceilings.push_back(
            {ceilings[c].name, 1e-6 * ceilings[c].amount / ideal_ms, ideal_ms / line.timing.median_ms});
      }
      line.peers = peers;
    }
  }

  std::vector<CeilingWay> ceilings_of(Operation op, const BenchShape& shape, const Work& work) const {
    if (work.flops == 0) return {{"copy_gbps", work.bytes, kit::copy_meter(int64_t(work.bytes), threads_)}};
    std::vector<CeilingWay> ceilings = {{"fma_gflops", work.flops, fma_gflops_}};
    if (op == Operation::attention_fwd && shape.seqlen_q <= kDecodeQueries) {
      ceilings.push_back({"read_gbps", work.bytes, kit::read_meter(int64_t(work.bytes), threads_)});
    }
    return ceilings;
  }

  std::vector<Peer> process_peers(Operation op, const BenchShape& shape, const Work& work) {
    // They run at about half of the peak or better.
    const double seconds = work.flops / (0.5e9 * fma_peak_.gflops);
    if (seconds < kPeerSeconds) return peers_.for_shape(op, shape, work);
    peers_.leave_out(op, "all of " + shape_text(op, shape), text("about %.0f s", seconds));
    return {};
  }

  kit::Timing peer_timing(const Work& work) const {
    std::vector<double> samples{work.run_peer()};
    while (samples.size() < 3 && samples[0] < 1e3 * options_.min_time) samples.push_back(work.run_peer());
    return {kit::median(samples), kit::spread(samples), int32_t(samples.size())};
  }

  std::string peers_text() const {
    if (!peers_.any()) return "none (bench/baselines/install.sh brings PyTorch and onnxruntime)";
    std::string versions;
    for (const auto& [name, version] : peers_.versions().items()) {
      versions += (versions.empty() ? "" : ", ") + name + " " + words(version);
    }
    return kit::one_line(versions);
  }

  void print(const Line& line) {
    ++timed_;
    if (options_.json) {
      std::cout << json_of(line).dump() << std::endl;
      return;
    }
    const auto or_dash = [](const char* format, double x) {
      return std::isfinite(x) ? text(format, x) : std::string("-");
    };
    const bool is_moded = line.mode == "exact" || line.mode == "fast";
    const Line::Ceiling& ceiling = line.nearest_ceiling();
    std::cout << text("%-17s %-*s %-10s%12.1f%9s%10s%9.3g  %5.1f%% %-5s ", operation_name(line.op), shape_width_,
                      shape_text(line.op, line.shape).c_str(),
                      (line.backend + (is_moded ? " " + line.mode : "")).c_str(), 1e3 * line.timing.median_ms,
                      or_dash("%.1f%%", 100 * line.timing.spread).c_str(), or_dash("%.2f", 1e3 * line.tflops).c_str(),
                      line.gbps, 100 * ceiling.share, ceiling.name.substr(0, ceiling.name.find('_')).c_str());
    for (const Peer& peer : line.peers) {
      std::cout << (&peer == line.peers.data() ? "" : ", ") << or_dash("%.3f", line.ratio(peer)) << " " << peer.name;
    }
    std::cout << std::endl;
  }

  Json json_of(const Line& line) const {
    Json ratio = Json::object(), peers = Json::object(), ceiling = Json::object();
    for (const Peer& peer : line.peers) {
      ratio[peer.name] = number(line.ratio(peer));
      peers[peer.name] = {{"median_ms", number(peer.timing.median_ms)}, {"spread", number(peer.timing.spread)}};
      if (std::isfinite(peer.error)) peers[peer.name]["error"] = peer.error;
    }
    for (const Line::Ceiling& c : line.ceilings) ceiling[c.name] = {{"value", c.value}, {"share", c.share}};
    Json json{{"op", operation_name(line.op)},
              {"backend", line.backend},
              {"mode", line.mode},
              {"shape", to_json(line.shape)},
              {"device", device_},
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
    if (is_attention(line.op) && peers_.any()) json["peer_versions"] = peers_.versions();
    return json;
  }

  const BenchOptions& options_;
  const kit::TimeBudget budget_;
  const int32_t threads_;
  Peers peers_;
  const kit::FmaPeak fma_peak_;
  const std::function<double()> fma_gflops_;
  const std::string device_;
  std::map<std::string, bool> verified_;
  bool failed_ = false;
  int timed_ = 0, shape_width_ = 16;
};

void bench(const BenchOptions& options) {
  const std::vector<BenchShape> shapes = bench_shapes(options.shapes);
  const auto wanted = [&](Operation op) {
    return options.ops.empty() || std::ranges::count(options.ops, std::string(operation_name(op))) > 0;
  };
  const auto wanted_of = [&](const BenchShape& shape, Operation op) {
    return wanted(op) && (shape.ops.empty() || std::ranges::count(shape.ops, op) > 0);
  };
  for (const Operation op : kOperations) {
    if (wanted(op)) candidates(op, options);  // a name that cannot be right fails now
  }
  if (options.threads > 0) set_num_threads(options.threads);
  const bool with_attention = std::ranges::any_of(shapes, [&](const BenchShape& shape) {
    return wanted_of(shape, Operation::attention_fwd) || wanted_of(shape, Operation::attention_bwd);
  });
  Bench run(options, shapes, with_attention);
  std::set<std::string> seen;  // operations on tokens see less of a shape than attention, so shapes coincide
  for (const Operation op : kOperations) {
    for (const BenchShape& shape : shapes) {
      const BenchShape own = is_attention(op) ? shape : tokens_of(shape);
      if (wanted_of(shape, op) && seen.insert(operation_name(op) + to_json(own).dump()).second) run.run(op, own);
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
  command->add_option("--shapes", options->shapes, "small, llm, recsys, cpu, or a file (default: small, about 20 s)");
  command->add_option("--backend", options->backend, "Force a backend (default: the first that supports the call)");
  command->add_flag("--json", options->json, "Print one JSON object a line");
  command->add_option("--threads", options->threads, "Threads of CPU backends, peers and ceilings (default: all)")
      ->check(CLI::Range(1, 256));
  command->add_option("--min-time", options->min_time, "Seconds to spend on each line (default: 0.25)")
      ->check(CLI::Range(0.0, 3600.0));
  command->add_option("--repeat", options->repeat, "Least number of timed runs (default: 3; 1 if a run takes 5 s)")
      ->check(CLI::Range(1, 1000));
  command
      ->add_option("--cpu-math", options->cpu_math,
                   "Arithmetic of attention in backend cpu: a line each (default: both)")
      ->check(CLI::IsMember({"exact", "fast", "both"}));
  command->add_option("--peers", options->peers,
                      "Python with PyTorch and onnxruntime to compare attention with, or none\n"
                      "(default: build/baselines/bin/python, from bench/baselines/install.sh, if it is there)");
  command->footer(
      "A shape is one attention call; quantize, dequantize, rmsnorm_quantize and gemm_quantize (by a square matrix) "
      "work\n"
      "on the tokens of its q. FILE holds a JSON array of shapes, or one a line; lines of --json do as well. Keys:\n"
      "  seqlen_q, head_dim                 required\n"
      "  batch (1), seqlen_k (seqlen_q), num_heads_q (1), num_heads_kv (num_heads_q), head_dim_v (head_dim)\n"
      "  causal (false), window_left, window_right (-1: open)\n"
      "  shared_q (false)                   one query sequence for all key sequences\n"
      "  jagged (false), min_seqlen (0)     lengths uniform in min_seqlen..seqlen, the same in every run\n"
      "  ops (all)                          names of the operations to time with it\n"
      "FLOPs are 4 d (backward: 10 d) for every query, key and head of the real lengths, half of it with a causal "
      "mask;\n"
      "with a window, for what is visible. GB/s counts every operand and result once. Attention writes BF16.\n"
      "The ceiling is measured beside each line, on the same threads: the fp32 multiply-add peak, a memcpy of as many "
      "bytes,\n"
      "or, for at most 16 queries, a read of as many bytes if that is nearer.\n"
      "The ratio is the time of a peer over that of mxflash, the fastest peer first: exact attention in float64, a "
      "plain "
      "fp32\n"
      "GEMM, memcpy; with --peers, on the same dequantized operands and threads, samples in turn with ours,\n"
      "  torch_sdpa_f32, _bf16   scaled_dot_product_attention (flash; backward: .backward() alone)\n"
      "  torch_unfused_bf16      softmax(q k^T) v in three calls, S x S in memory\n"
      "  ort_mha_f32             MultiHeadAttention, forward\n"
      "  dequantize_sdpa         our dequantize, then the faster torch_sdpa\n"
      "A peer that would take more than 10 s is left out.");
  command->callback([options] { bench(*options); });
}

}  // namespace mxflash::tools
