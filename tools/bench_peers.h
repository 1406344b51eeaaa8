// Peers of attention that live in another process: bench/baselines/peers.py, which is built into this program, run by a
// Python that has them. That file says what the two tell each other.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "tools/bench_shapes.h"

namespace mxflash::tools {

// The process cannot be started, has ended, hangs, or does not speak the protocol: it is of no more use.
struct PeerError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class PeerServer {
 public:
  // `python` is a path, or a name to be found in PATH. Throws PeerError.
  PeerServer(const std::string& python, int32_t threads);
  PeerServer(const PeerServer&) = delete;
  PeerServer& operator=(const PeerServer&) = delete;
  ~PeerServer();

  // {"peers": [names], "left_out": {name: why}, "versions": {...}}
  const nlohmann::ordered_json& hello() const { return hello_; }

  // Hands over a call; `write_operands` puts its operands into a folder. {"peers": {name: {"error": relative RMS}},
  // "left_out": {name: why}}; the peers named first have computed it, rightly.
  nlohmann::ordered_json shape(const BenchShape& shape, bool backward,
                               const std::function<void(const std::string& folder)>& write_operands);

  // A peer's time for the last shape: {"ms": mean of as many runs as take least_ms}, or {"failed": why}.
  nlohmann::ordered_json sample(const std::string& peer, double least_ms);

 private:
  nlohmann::ordered_json ask(const nlohmann::ordered_json& request);
  [[noreturn]] void fail(const std::string& what);

  std::string python_;
  pid_t child_ = -1;
  int socket_ = -1;
  std::string received_;
  nlohmann::ordered_json hello_;
};

}  // namespace mxflash::tools
