// `mxflash info`: what this build is, what this machine is, and which backend every operation would use.
#include <mxflash/attention.h>
#include <mxflash/backend.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "kit/device_memory.h"
#include "kit/peak.h"
#include "kit/text.h"
#include "tools/commands.h"
#include "tools/commit.h"

namespace mxflash::tools {
namespace {

using kit::text;
using Json = nlohmann::ordered_json;

// The first available backend, of those for tensors in host or in CUDA memory, that MXFLASH_BACKEND allows; null if
// there is none. It is a call's choice too, unless the call's arguments are more than it supports.
const char* chosen_backend(Operation op, const char* forced, bool on_device) {
  for (int32_t i = 0; i < num_backends(op); ++i) {
    const BackendInfo backend = backend_info(op, i);
    if (!backend.available.ok() || kit::is_device_backend(backend.name) != on_device) continue;
    if (!forced || std::strcmp(forced, backend.name) == 0) return backend.name;
  }
  // As in the library: operations without it take its backend.
  return forced && std::strcmp(forced, "sm90_bf16") == 0 ? chosen_backend(op, "sm90", on_device) : nullptr;
}

// The CUDA device that calls would use; null if there is none, or none that this build has code for.
Json describe_cuda() {
  for (int32_t o = 0; o < kNumOperations; ++o) {
    for (int32_t i = 0; i < num_backends(Operation(o)); ++i) {
      const BackendInfo b = backend_info(Operation(o), i);
      if (!kit::is_device_backend(b.name) || !b.available.ok()) continue;
      const kit::DeviceFacts facts = kit::device_facts();
      return {{"name", facts.name},
              {"driver", facts.driver},
              {"multiprocessors", facts.multiprocessors},
              {"memory_bytes", facts.memory_bytes},
              {"l2_bytes", facts.l2_bytes}};
    }
  }
  return nullptr;
}

// Backend `cpu`: its instruction set, its arithmetic, its threads.
Json describe_cpu() {
  Json isas = Json::array();
  for (int32_t i = 0; available_cpu_isa(i); ++i) isas.push_back(available_cpu_isa(i));
  std::string refusal;  // of what MXFLASH_CPU_ISA or MXFLASH_CPU_MATH asks for
  for (int32_t i = 0; i < num_backends(Operation::quantize); ++i) {
    const BackendInfo b = backend_info(Operation::quantize, i);
    if (std::string_view(b.name) == "cpu") refusal = b.available.message;
  }
  Json maths = Json::array();
  for (const CpuMath math : {CpuMath::exact, CpuMath::fast}) maths.push_back(cpu_math_name(math));
  return {{"model", kit::cpu_model()},
          {"features", kit::cpu_features()},
          {"threads", num_threads()},
          {"executor", has_parallel_for()},
          {"isa", refusal.find("MXFLASH_CPU_ISA") == refusal.npos ? Json(cpu_isa()) : Json(nullptr)},
          {"error", refusal},
          {"available_isas", isas},
          {"math",
           refusal.find("MXFLASH_CPU_MATH") == refusal.npos ? Json(cpu_math_name(default_cpu_math())) : Json(nullptr)},
          {"available_maths", maths}};
}

Json describe() {
  const char* forced = std::getenv("MXFLASH_BACKEND");
  if (forced && !*forced) forced = nullptr;
  Json info{{"version", version()},    {"commit", commit()},        {"cpu", describe_cpu()},
            {"cuda", describe_cuda()}, {"forced_backend", nullptr}, {"operations", Json::array()}};
  bool exists = false;  // what is forced
  if (forced) info["forced_backend"] = forced;
  for (int32_t o = 0; o < kNumOperations; ++o) {
    const auto op = Operation(o);
    Json backends = Json::array();
    for (int32_t i = 0; i < num_backends(op); ++i) {
      const BackendInfo b = backend_info(op, i);
      exists |= forced && std::strcmp(forced, b.name) == 0;
      backends.push_back({{"name", b.name},
                          {"target", b.target},
                          {"available", b.available.ok()},
                          {"reason", b.available.ok() ? "" : b.available.message}});
    }
    const auto chosen = [&](bool on_device) {
      const char* const name = chosen_backend(op, forced, on_device);
      return name ? Json(name) : Json(nullptr);
    };
    info["operations"].push_back(
        {{"op", operation_name(op)}, {"chosen", chosen(false)}, {"chosen_cuda", chosen(true)}, {"backends", backends}});
  }
  if (forced) info["forced_backend_exists"] = exists;
  return info;
}

void print_table(const Json& info) {
  const auto string = [](const Json& value) { return value.get<std::string>(); };
  const auto list = [&string](const Json& values) {
    std::string all;
    for (const Json& value : values) all += (all.empty() ? "" : " ") + string(value);
    return all;
  };
  const Json& cpu = info["cpu"];
  const std::string features = list(cpu["features"]);
  std::cout << "mxflash " << string(info["version"]) << ", commit " << string(info["commit"]) << '\n'
            << "cpu     " << string(cpu["model"]) << (features.empty() ? "" : ", " + features) << '\n'
            << "isa     "
            << (cpu["isa"].is_null() ? "none: " + string(cpu["error"])
                                     : string(cpu["isa"]) + " (available: " + list(cpu["available_isas"]) +
                                           "; MXFLASH_CPU_ISA forces one)")
            << '\n'
            << "math    "
            << (cpu["math"].is_null() ? "none: " + string(cpu["error"])
                                      : string(cpu["math"]) + " (available: " + list(cpu["available_maths"]) +
                                            "; cpu_math chooses, only backend cpu has more than one)")
            << '\n'
            << "threads " << cpu["threads"] << ", "
            << (cpu["executor"].get<bool>() ? "an executor of the host" : "the library's own") << '\n';
  if (const Json& cuda = info["cuda"]; !cuda.is_null()) {
    std::cout << "cuda    " << string(cuda["name"]) << ", driver " << string(cuda["driver"]) << ", "
              << cuda["multiprocessors"] << " SMs, " << text("%.0f GB", 1e-9 * cuda["memory_bytes"].get<double>())
              << '\n';
  }
  std::cout << '\n' << text("%-18s %-9s %-9s %s\n", "operation", "chosen", "backend", "runs on");
  for (const Json& op : info["operations"]) {
    std::string name = string(op["op"]), chosen;
    for (const char* key : {"chosen_cuda", "chosen"}) {  // "sm90/cpu"
      if (!op[key].is_null()) chosen += (chosen.empty() ? "" : "/") + string(op[key]);
    }
    if (chosen.empty()) chosen = "none";
    for (const Json& b : op["backends"]) {
      std::cout << text("%-18s %-9s %-9s %s%s\n", name.c_str(), chosen.c_str(), string(b["name"]).c_str(),
                        string(b["target"]).c_str(),
                        b["available"].get<bool>() ? "" : (", not here: " + string(b["reason"])).c_str());
      name = chosen = "";
    }
  }
  if (!info["forced_backend"].is_null()) {
    std::cout << "\nMXFLASH_BACKEND=" << string(info["forced_backend"])
              << (info["forced_backend_exists"].get<bool>() ? " forces the choice; operations with none fail.\n"
                                                            : " is no backend: every call fails.\n");
  }
}

}  // namespace

void add_info(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "Version, CPU, CUDA device, and the backends of every operation");
  const auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print one JSON object");
  command->callback([json] {
    const Json info = describe();
    if (*json) {
      std::cout << info.dump() << '\n';
    } else {
      print_table(info);
    }
  });
}

}  // namespace mxflash::tools
