// Peers that live in another process: bench/baselines/peers.py and peers_cuda.py, which are built into this program,
// run by a Python that has what they need. Those files say what the two processes tell each other.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "tools/bench_line.h"
#include "tools/bench_shapes.h"

namespace mxflash::tools {

// The process cannot be started, has ended, hangs, or does not speak the protocol: it is of no more use.
struct PeerError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class PeerScript { cpu, cuda };

class PeerServer {
 public:
  // `python` is a path, or a name to be found in PATH. Throws PeerError.
  PeerServer(PeerScript script, const std::string& python, int32_t threads);
  PeerServer(const PeerServer&) = delete;
  PeerServer& operator=(const PeerServer&) = delete;
  ~PeerServer();

  // {"peers": [names], "left_out": {name: why}, "versions": {...}, cuda: "machine": {ceilings}}
  const nlohmann::ordered_json& hello() const { return hello_; }

  // Hands over a call; `write_operands`, if given, puts its operands into a folder. {"peers": {name: {"error": relative
  // RMS}}, "left_out": {name: why}}; the peers named first have computed it, rightly.
  nlohmann::ordered_json shape(BenchOp op, const BenchShape& shape,
                               const std::function<void(const std::string& folder)>& write_operands);

  // A peer's time for the last shape: {"ms": mean of as many runs as take least_ms}, on a device {"samples": [ms of
  // each of `count` runs]}, or {"failed": why}.
  nlohmann::ordered_json sample(const std::string& peer, double least_ms, int count = 0);

 private:
  nlohmann::ordered_json ask(const nlohmann::ordered_json& request);
  [[noreturn]] void fail(const std::string& what);

  std::string python_;
  pid_t child_ = -1;
  int socket_ = -1;
  std::string received_;
  nlohmann::ordered_json hello_;
};

// The peers' process, and its end. What is left out is said on stderr, once for every reason.
class Peers {
 public:
  // An empty `python` is, on a CPU, the one that bench/baselines/install.sh made, if it is there; else none.
  Peers(PeerScript script, const std::string& python, int32_t threads);

  bool any() const { return python_ != kNoPeers; }
  const nlohmann::ordered_json& versions() const { return versions_; }
  const nlohmann::ordered_json& machine() const { return machine_; }

  // The peers that can do this, with their errors.
  std::vector<Peer> for_shape(BenchOp op, const BenchShape& shape,
                              const std::function<void(const std::string& folder)>& write_operands);

  // Samples of a peer for kit::measure_in_turn; NaN from its first failure on.
  std::function<double()> sampler(BenchOp op, const std::string& name, double least_ms);
  // `count` samples of one on a device; none from its first failure on.
  std::function<std::vector<double>(int count)> device_sampler(BenchOp op, const std::string& name);

  void leave_out(BenchOp op, const std::string& peer, const std::string& why);

 private:
  void start();
  void crashed(BenchOp op, const std::string& peer, const PeerError& error);
  std::function<nlohmann::ordered_json(int count)> asker(BenchOp op, const std::string& name, double least_ms);

  const PeerScript script_;
  std::string python_;
  const int32_t threads_;
  std::unique_ptr<PeerServer> server_;
  nlohmann::ordered_json versions_ = nlohmann::ordered_json::object(), machine_ = nlohmann::ordered_json::object();
  std::set<std::string> said_;
  int crashes_ = 0;
};

}  // namespace mxflash::tools
