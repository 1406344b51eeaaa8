// `mxflash bench`: verify, warm up, time; a line per operation, shape and arithmetic, beside the measured ceiling of
// this machine and peers. Runs, ceilings and peers take their samples in turn, so that a drift meets all of them.
#include <mxflash/attention.h>
#include <mxflash/backend.h>

#include <algorithm>
#include <cmath>
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
#include "tools/bench_cuda.h"
#include "tools/bench_line.h"
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
  Bench(const BenchOptions& options, const std::vector<BenchShape>& shapes, bool with_attention)
      : options_(options),
        budget_{.seconds = options.min_time, .min_repeats = options.repeat},
        threads_(num_threads()),
        peers_(PeerScript::cpu, with_attention ? options.peers : kNoPeers, threads_),
        fma_peak_(kit::measure_fma_peak(threads_)),
        fma_gflops_(kit::fma_meter(threads_)),
        printer_{.json = options.json,
                 .device = kit::cpu_model() + text(", %d thread%s", threads_, threads_ == 1 ? "" : "s")} {
    for (const BenchShape& shape : shapes) {
      printer_.shape_width = std::max(printer_.shape_width, int(to_text(shape).size()));
    }
    if (peers_.any()) printer_.peer_versions = peers_.versions();
    if (options_.json) return;
    std::cout << text("%s; fp32 multiply-add peak %.1f GFLOP/s (%s); backend cpu uses %s; commit %s\n",
                      printer_.device.c_str(), fma_peak_.gflops, fma_peak_.instructions, cpu_isa(), commit());
    if (with_attention) std::cout << "peers: " << peers_text() << '\n';
    printer_.header();
  }

  void run(BenchOp op, const BenchShape& shape) {
    const std::vector<std::string> backends = candidates(op, options_);
    for (const std::string& backend : backends) {
      try {
        std::vector<CpuMath> modes = modes_of(op, backend);
        std::erase_if(modes, [&](CpuMath mode) { return !verified(op, shape, backend, mode); });
        if (!modes.empty()) {
          for (const Line& line : measure(op, shape, backend, modes)) {
            ++timed_;
            printer_.print(line);
          }
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
  std::vector<CpuMath> modes_of(BenchOp op, const std::string& backend) const {
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
  bool verified(BenchOp op, const BenchShape& shape, const std::string& backend, CpuMath mode) {
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
  std::vector<Line> measure(BenchOp op, const BenchShape& shape, const std::string& backend,
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
      if (!(estimate >= kPeerSeconds)) peer.timing = peer_timing(work);
      for (Line& line : lines) line.peers.push_back(peer);
    }
    const auto ms = [](const Peer& p) { return std::isfinite(p.timing.median_ms) ? p.timing.median_ms : HUGE_VAL; };
    for (Line& line : lines) std::ranges::stable_sort(line.peers, {}, ms);
    return lines;
  }

  // Times the works, one a line, their ceilings, and those peers that take no further part if they fail.
  void time_in_turn(const std::vector<Work>& works, std::vector<Peer> peers, std::vector<Line>& lines) {
    const BenchOp op = lines.front().op;
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
      line.workspace_bytes = works[i].workspace_bytes;
      line.saved_bytes = works[i].saved_bytes;
      if (work.flops > 0) line.tflops = work.flops / line.timing.median_ms * 1e-9;
      for (size_t c = 0; c < ceilings.size(); ++c) {
        const double ideal_ms = timings[works.size() + c].median_ms;
        line.ceilings.push_back(
            {ceilings[c].name, 1e-6 * ceilings[c].amount / ideal_ms, ideal_ms / line.timing.median_ms});
      }
      line.peers = peers;
    }
  }

  std::vector<CeilingWay> ceilings_of(BenchOp op, const BenchShape& shape, const Work& work) const {
    if (work.flops == 0) return {{"copy_gbps", work.bytes, kit::copy_meter(int64_t(work.bytes), threads_)}};
    std::vector<CeilingWay> ceilings = {{"fma_gflops", work.flops, fma_gflops_}};
    if (op == BenchOp::attention_fwd && shape.seqlen_q <= kDecodeQueries) {
      ceilings.push_back({"read_gbps", work.bytes, kit::read_meter(int64_t(work.bytes), threads_)});
    }
    return ceilings;
  }

  std::vector<Peer> process_peers(BenchOp op, const BenchShape& shape, const Work& work) {
    // They run at about half of the peak or better.
    const double seconds = work.flops / (0.5e9 * fma_peak_.gflops);
    if (seconds < kPeerSeconds) return peers_.for_shape(op, shape, work.write_operands);
    peers_.leave_out(op, "all of " + shape_text(op, shape), text("about %.0f s", seconds));
    return {};
  }

  kit::Timing peer_timing(const Work& work) const {
    std::vector<double> samples{work.run_peer()};
    while (samples.size() < 3 && samples[0] < 1e3 * options_.min_time) samples.push_back(work.run_peer());
    std::erase_if(samples, [](double ms) { return !std::isfinite(ms); });
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

  const BenchOptions& options_;
  const kit::TimeBudget budget_;
  const int32_t threads_;
  Peers peers_;
  const kit::FmaPeak fma_peak_;
  const std::function<double()> fma_gflops_;
  LinePrinter printer_;
  std::map<std::string, bool> verified_;
  bool failed_ = false;
  int timed_ = 0;
};

constexpr char kFooter[] =
    R"(A shape is one attention call, or the two of a training step, operator_fwd and operator_bwd; quantize, dequantize,
rmsnorm_quantize, rmsnorm_bwd and gemm_quantize (by a square matrix) work on the tokens of its q. FILE holds a JSON array
of shapes, or one a line; lines of --json do as well. Keys:
  seqlen_q, head_dim                 required
  batch (1), seqlen_k (seqlen_q), num_heads_q (1), num_heads_kv (num_heads_q), head_dim_v (head_dim)
  causal (false), window_left, window_right (-1: open)
  shared_q (false)                   one query sequence for all key sequences
  jagged (false), min_seqlen (0)     lengths uniform in min_seqlen..seqlen, the same in every run
  ops (all)                          names of the operations to time with it
FLOPs are 4 d (backward: 10 d, training step: 14 d) for every query, key and head of the real lengths, half of it with a
causal mask; with a window, for what is visible. GB/s counts every operand and result once. Attention writes BF16.
The ceiling is measured beside each line, on the same threads: the fp32 multiply-add peak, a memcpy of as many bytes,
or, for at most 16 queries, a read of as many bytes if that is nearer.
The ratio is the time of a peer over that of mxflash, the fastest peer first: exact attention in float64, a plain fp32
GEMM, memcpy; with --peers, on the same dequantized operands and threads, samples in turn with ours,
  torch_sdpa_f32, _bf16   scaled_dot_product_attention (flash; backward: .backward() alone)
  torch_unfused_bf16      softmax(q k^T) v in three calls, S x S in memory
  ort_mha_f32             MultiHeadAttention, forward
  dequantize_sdpa         our dequantize, then the faster torch_sdpa
A peer that would take more than 10 s is left out.

With --device cuda, times are those of events around each launch, back to back after a warm-up, in rounds with a copy on
the device (the ceiling) and peers; with peers, torch's FP8 matrix product, measured once, is another ceiling. L2 stays
as launches leave it unless --l2-flush is given. Lines of attention_fwd:
  kernel           operand images are given
  from_bf16        q, k, v quantized from BF16 to images, and the kernel
  from_mxfp8       the kernel behind the pass that makes images of MXFP8 operands
of attention_bwd (from MXFP8 operands, with all passes) and training_step (BF16 in and out):
  dq_f32, dq_f16   the dtype that dq is added up in
  deterministic    in FP16, in the same order in every run; deterministic_f32
  plain_...        training_step by a recipe that neither rotates nor smooths
of quantize from BF16: square32, or an operand image alone. --peers names a Python with a CUDA PyTorch (default: none):
torch_sdpa_cudnn_bf16, torch_sdpa_flash_bf16, torch_rms_norm_bf16; with flash_attn_interface or (forward alone)
fa3_fwd_interface also flash3_bf16, flash3_fp8. Of attention_bwd they take the time of their gradients alone, of
training_step both directions. --repeat (at least 12) counts launches.)";

void bench(const BenchOptions& options) {
  std::vector<BenchShape> shapes;
  for (const std::string& set : options.shapes) {
    const std::vector<BenchShape> some = bench_shapes(set);
    shapes.insert(shapes.end(), some.begin(), some.end());
  }
  const std::vector<std::pair<BenchOp, BenchShape>> lines = wanted_lines(options, shapes);
  if (is_on_device(options)) {
    bench_on_device(options, lines);
    return;
  }
  if (options.threads > 0) set_num_threads(options.threads);
  const bool with_attention = std::ranges::any_of(lines, [](const auto& line) { return is_attention(line.first); });
  Bench run(options, shapes, with_attention);
  for (const auto& [op, shape] : lines) run.run(op, shape);
  if (run.failed()) throw CheckFailed{};
  if (run.timed() == 0) throw UsageError("nothing was timed; choose smaller shapes or another --op");
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "Verify, then time every operation on a set of shapes");
  const auto options = std::make_shared<BenchOptions>();
  std::set<std::string> names;
  for (const BenchOp op : kBenchOps) names.insert(operation_name(op));
  command
      ->add_option("--op", options->ops, "Only these operations, separated by commas\n(default: all but training_step)")
      ->delimiter(',')
      ->check(CLI::IsMember(names));
  command
      ->add_option("--shapes", options->shapes,
                   "small, llm, recsys, cpu, cuda, backward, decode, or a file; several separated by commas (default: "
                   "small, a minute or two)")
      ->delimiter(',');
  command->add_option("--backend", options->backend, "Force a backend (default: the first that supports the call)");
  command
      ->add_option("--device", options->device,
                   "Where tensors live: cpu, or cuda (default: where the forced backend's do, else cpu)")
      ->check(CLI::IsMember({"cpu", "cuda", "auto"}));
  command
      ->add_option("--cuda-modes", options->cuda_modes,
                   "What is timed of attention on a CUDA device, separated by commas:\n"
                   "kernel, from_bf16, from_mxfp8 (default: kernel,from_bf16)")
      ->delimiter(',')
      ->check(CLI::IsMember({"kernel", "from_bf16", "from_mxfp8"}));
  command->add_flag("--l2-flush", options->l2_flush,
                    "On a CUDA device, overwrite its L2 cache before each timed launch");
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
                      "Python with PyTorch (and onnxruntime) to compare attention with, or none\n"
                      "(default: build/baselines/bin/python, from bench/baselines/install.sh, if it is there)");
  command->footer(kFooter);
  command->callback([options] { bench(*options); });
}

}  // namespace mxflash::tools
