// What the two halves of `mxflash bench` share, on the CPU (bench.cpp) and on a CUDA device (bench_cuda.cpp): options,
// the choice of backends, and a line of results with its printing.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "kit/timer.h"
#include "tools/bench_shapes.h"

namespace mxflash::tools {

constexpr char kNoPeers[] = "none";

struct BenchOptions {
  std::vector<std::string> ops;
  std::vector<std::string> shapes = {"small"};
  std::string backend, peers, cpu_math = "both";
  std::string device = "auto";  // "cpu", "cuda": where tensors live; auto: as the backend
  std::vector<std::string> cuda_modes = {"kernel", "from_bf16"};  // of attention there
  bool l2_flush = false, json = false;
  int32_t threads = 0, repeat = 3;
  double min_time = 0.25;
};

struct Peer {
  std::string name;
  kit::Timing timing{.median_ms = NAN, .spread = NAN, .repeats = 0};
  double error = NAN;                               // relative RMS, where the peer has been checked
  double workspace_bytes = NAN, saved_bytes = NAN;  // as in Line, where it says so
};

struct Line {
  BenchOp op;
  BenchShape shape;
  std::string backend, mode;  // "exact" or "fast"; "reference" of ref; of a device what is timed; else "default"
  kit::Timing timing{};
  double tflops = NAN, gbps = 0;
  // Measured with this line: multiply-adds, reads or copies, of which the work would at best take this part of its
  // time.
  struct Ceiling {
    std::string name;  // "fma_gflops", "read_gbps", "copy_gbps", "fp8_gemm_tflops"
    double value, share;
  };
  std::vector<Ceiling> ceilings{};
  std::vector<Peer> peers{};  // the fastest first
  double error = NAN;         // relative RMS of some rows at full size, where they have been checked
  // Of attention: what the call needs beside operands and results, and what has to be kept from a forward to its
  // backward.
  double workspace_bytes = NAN, saved_bytes = NAN;

  const Ceiling& nearest_ceiling() const {
    return *std::ranges::max_element(ceilings, {}, [](const Ceiling& c) { return c.share; });
  }
  double ratio(const Peer& peer) const { return peer.timing.median_ms / timing.median_ms; }
};

// What an operation on tokens sees of a shape: those of q. Sequences of whole 128s are laid out like one long one.
BenchShape tokens_of(const BenchShape& shape);
std::string shape_text(BenchOp op, const BenchShape& shape);

// A string of an answer without its quotes; anything else as it is.
std::string words(const nlohmann::ordered_json& json);

// --backend, or MXFLASH_BACKEND, and which of the two; empty: none.
struct ForcedBackend {
  std::string name, source;
};
ForcedBackend forced_backend(const BenchOptions& options);

// Whether tensors live on a CUDA device. Throws UsageError if --device and the backend contradict each other.
bool is_on_device(const BenchOptions& options);

// Backends to try on that device, best first. Empty: the operation has not the forced one, or none for the device, and
// nobody asked for this operation. Throws UsageError.
std::vector<std::string> candidates(BenchOp op, const BenchOptions& options);

// Operations and shapes that are wanted, in the order of the table; tokens_of makes some shapes equal.
std::vector<std::pair<BenchOp, BenchShape>> wanted_lines(const BenchOptions& options,
                                                         const std::vector<BenchShape>& shapes);

// How the lines of one run are printed.
struct LinePrinter {
  bool json = false;
  bool tera = false;   // TFLOP/s in the table, not GFLOP/s
  std::string device;  // "AMD EPYC ..., 2 threads"
  int shape_width = 16;
  nlohmann::ordered_json machine{};        // more keys of every line
  nlohmann::ordered_json peer_versions{};  // of lines of attention

  void header() const;
  void print(const Line& line) const;
};

}  // namespace mxflash::tools
