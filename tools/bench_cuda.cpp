// `mxflash bench --device cuda`: verify, warm up, time by events; see bench.cpp for what both devices share, and
// bench_device.h for what is timed. Samples are single launches in rounds with the ceiling and the peers.
#include "tools/bench_cuda.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "kit/device_memory.h"
#include "kit/runner.h"
#include "kit/text.h"
#include "tools/bench_device.h"
#include "tools/bench_peers.h"
#include "tools/bench_work.h"
#include "tools/commands.h"
#include "tools/commit.h"

namespace mxflash::tools {
namespace {

using kit::DeviceBuffer;
using kit::text;

// Every other round goes through what is timed in reverse, so that each of them comes as often behind a hot as behind a
// cool one: the card is power limited, and its clock takes milliseconds to follow.
constexpr int kRounds = 4, kWarmUps = 3, kLeastLaunches = 12;
constexpr size_t kCopyBytes = size_t(2) << 30;  // of the ceiling, both halves: far beyond L2
constexpr int kHeadStarts = 2;                  // times that the buffer is overwritten while the host gets ahead
constexpr double kMaxError = 0.15;              // of rows at full size; the quantization of N(0, 1) has 0.06

kit::Timing timing_of(const std::vector<double>& samples) {
  return {.median_ms = kit::median(samples), .spread = kit::spread(samples), .repeats = int32_t(samples.size())};
}

class DeviceBench {
 public:
  DeviceBench(const BenchOptions& options, const std::vector<std::pair<BenchOp, BenchShape>>& lines)
      : options_(options),
        launches_((std::max(options.repeat, kLeastLaunches) + kRounds - 1) / kRounds),
        facts_(kit::device_facts()),
        peers_(PeerScript::cuda, options.peers, num_threads()),
        scratch_(std::min(kCopyBytes, facts_.memory_bytes / 8)),
        flush_(options.l2_flush ? 2 * facts_.l2_bytes : 0),
        printer_{.json = options.json, .tera = true, .device = facts_.name} {
    printer_.machine["driver"] = facts_.driver;
    printer_.machine["l2_flush"] = options.l2_flush;
    for (const auto& [key, value] : peers_.machine().items()) printer_.machine[key] = value;
    if (peers_.any()) printer_.peer_versions = peers_.versions();
    scratch_.fill(0x11, stream_.get());
    for (const auto& [op, shape] : lines) {
      printer_.shape_width = std::max(printer_.shape_width, int(shape_text(op, shape).size()));
    }
    if (options_.json) return;
    std::cout << text("%s, driver %s, %d SMs; commit %s\n", facts_.name.c_str(), facts_.driver.c_str(),
                      facts_.multiprocessors, commit());
    std::cout << "peers: "
              << (peers_.any() ? peers_.versions().dump() + ", " + peers_.machine().dump() : "none (--peers)") << '\n';
    printer_.header();
  }

  void run(BenchOp op, const BenchShape& shape) {
    const std::vector<std::string> backends = candidates(op, options_);
    if (backends.empty()) {
      if (said_.insert(operation_name(op)).second) {
        std::cerr << "mxflash: " << operation_name(op) << " has no backend for the device: not timed\n";
      }
      return;
    }
    for (const std::string& backend : backends) {
      try {
        if (verified(op, shape, backend)) measure(op, shape, backend);
        return;
      } catch (const kit::StatusError& error) {
        if (error.code != StatusCode::unsupported) throw;
        std::cerr << "mxflash: " << operation_name(op) << " " << shape_text(op, shape)
                  << " is not timed: " << error.what() << '\n';
      }
    }
  }

  bool failed() const { return failed_; }
  int timed() const { return timed_; }

 private:
  using Samples = std::function<std::vector<double>(int count)>;

  bool verified(BenchOp op, const BenchShape& shape, const std::string& backend) {
    // Attention verifies both directions at once.
    const std::string what = is_attention(op) ? "attention" : operation_name(op);
    const std::string key = what + backend + to_json(clipped(shape)).dump();
    if (const auto known = verified_.find(key); known != verified_.end()) return known->second;
    const std::string failure = verify(op, shape, backend);
    if (!failure.empty()) wrong(op, shape, backend, failure);
    return verified_[key] = failure.empty();
  }

  void wrong(BenchOp op, const BenchShape& shape, const std::string& what, const std::string& failure) {
    std::cerr << "mxflash: " << operation_name(op) << " " << shape_text(op, shape) << " in backend " << what
              << " is wrong, so it is not timed: " << failure << '\n';
    failed_ = true;
  }

  std::vector<DeviceWork> prepare(BenchOp op, const BenchShape& shape, const std::string& backend, Memory& memory) {
    switch (op) {
      case BenchOp::attention_fwd: return prepare_forward(shape, backend, options_.cuda_modes, memory);
      case BenchOp::attention_bwd: return prepare_backward(shape, backend, memory);
      case BenchOp::training_step: return prepare_step(shape, backend, memory);
      default: return prepare_tokens(op, shape, backend, memory);
    }
  }

  void measure(BenchOp op, const BenchShape& shape, const std::string& backend) {
    const double need = bytes_needed(op, shape, backend, options_.cuda_modes), have = double(kit::free_device_memory());
    if (need > 0.9 * have) {
      std::cerr << "mxflash: " << operation_name(op) << " " << shape_text(op, shape)
                << text(" needs %.1f GB of device memory, %.1f are free: not timed\n", 1e-9 * need, 1e-9 * have);
      return;
    }
    Memory memory(stream_.get());
    std::vector<DeviceWork> works = prepare(op, shape, backend, memory);
    for (DeviceWork& work : works) {
      work.enqueue();
      stream_.wait();
      if (work.check) work.error = work.check();
    }
    std::erase_if(works, [&](const DeviceWork& work) {
      if (!work.check || work.error <= kMaxError) return false;  // NaN is not
      wrong(op, shape, backend + " " + work.mode, text("relative error %.3g of rows at full size", work.error));
      return true;
    });
    std::vector<Samples> ways;
    for (const DeviceWork& work : works) ways.push_back(samples_of(work.enqueue));
    ways.push_back(samples_of([this] { kit::copy_halves(scratch_, stream_.get()); }));
    std::vector<Peer> peers =
        peers_.any() && !works.empty() ? peers_.for_shape(op, shape, nullptr) : std::vector<Peer>{};
    for (const Peer& peer : peers) ways.push_back(peers_.device_sampler(op, peer.name));

    std::vector<std::vector<double>> samples(ways.size());
    for (int round = 0; round < kRounds; ++round) {
      for (size_t turn = 0; turn < ways.size(); ++turn) {
        const size_t i = round % 2 == 0 ? turn : ways.size() - 1 - turn;
        const std::vector<double> some = ways[i](launches_);
        samples[i].insert(samples[i].end(), some.begin(), some.end());
      }
    }
    for (size_t i = 0; i < peers.size(); ++i) peers[i].timing = timing_of(samples[works.size() + 1 + i]);
    std::erase_if(peers, [](const Peer& peer) { return !std::isfinite(peer.timing.median_ms); });
    std::ranges::stable_sort(peers, {}, [](const Peer& peer) { return peer.timing.median_ms; });
    const double copy_gbps = 1e-6 * double(scratch_.size()) / kit::median(samples[works.size()]);
    for (size_t i = 0; i < works.size(); ++i) {
      Line line{.op = op, .shape = shape, .backend = backend, .mode = works[i].mode};
      line.timing = timing_of(samples[i]);
      line.gbps = 1e-6 * works[i].bytes / line.timing.median_ms;
      line.ceilings.push_back({"copy_gbps", copy_gbps, line.gbps / copy_gbps});
      if (works[i].flops > 0) {
        line.tflops = 1e-9 * works[i].flops / line.timing.median_ms;
        const auto gemm = printer_.machine.find("fp8_gemm_tflops");
        if (gemm != printer_.machine.end() && gemm->is_number()) {
          line.ceilings.push_back({"fp8_gemm_tflops", gemm->get<double>(), line.tflops / gemm->get<double>()});
        }
      }
      line.peers = peers;
      line.error = works[i].error;
      line.workspace_bytes = works[i].workspace_bytes;
      line.saved_bytes = works[i].saved_bytes;
      ++timed_;
      printer_.print(line);
    }
  }

  Samples samples_of(std::function<void()> enqueue) {
    return [this, enqueue = std::move(enqueue)](int count) {
      const Stream stream = stream_.get();
      const auto head_start = [&] {
        for (int i = 0; i < kHeadStarts; ++i) scratch_.fill(0x11, stream);
        for (int i = 0; i < kWarmUps; ++i) enqueue();
      };
      std::function<void()> between;
      if (flush_.size() > 0) between = [&] { flush_.fill(0x22, stream); };
      return kit::time_on_device(stream, count, enqueue, head_start, between);
    };
  }

  const BenchOptions& options_;
  const int launches_;  // of a round
  const kit::DeviceFacts facts_;
  Peers peers_;
  kit::DeviceStream stream_;
  const DeviceBuffer scratch_, flush_;
  LinePrinter printer_;
  std::map<std::string, bool> verified_;
  std::set<std::string> said_;
  bool failed_ = false;
  int timed_ = 0;
};

}  // namespace

void bench_on_device(const BenchOptions& options, const std::vector<std::pair<BenchOp, BenchShape>>& lines) {
  DeviceBench bench(options, lines);
  for (const auto& [op, shape] : lines) bench.run(op, shape);
  if (bench.failed()) throw CheckFailed{};
  if (bench.timed() == 0) throw UsageError("nothing was timed; choose smaller shapes or another --op");
}

}  // namespace mxflash::tools
