// `mxflash check`: does every backend compute what it must, on this machine? kit/verify.h says what is asked of them.
#include <mxflash/backend.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kit/device_memory.h"
#include "kit/text.h"
#include "kit/verify.h"
#include "tools/commands.h"

namespace mxflash::tools {
namespace {

using kit::Report;
using kit::text;
using Json = nlohmann::ordered_json;

struct CheckOptions {
  std::string backend;
  std::vector<std::string> only;  // names of attention cases; empty: everything
  bool quick = false, json = false;
};

struct Tally {
  int passed = 0, failed = 0, skipped = 0;
  double seconds = 0;
};

// Every backend of any operation: name, and why it cannot run here ("" if it can).
std::vector<std::pair<std::string, std::string>> all_backends() {
  std::vector<std::pair<std::string, std::string>> result;
  for (int32_t op = 0; op < kNumOperations; ++op) {
    for (int32_t i = 0; i < num_backends(Operation(op)); ++i) {
      const BackendInfo b = backend_info(Operation(op), i);
      const auto known = std::ranges::find(result, std::string(b.name), [](const auto& entry) { return entry.first; });
      if (known == result.end()) result.emplace_back(b.name, b.available.ok() ? "" : b.available.message);
    }
  }
  return result;
}

bool has(Operation op, const std::string& backend) {
  return std::ranges::count(kit::available_backends(op), backend) > 0;
}

// "25.63", "exact", "void" (NaN, Inf), or "-" where the exact tensor is zero, so that there is no signal.
std::string sqnr_text(const kit::TensorReport& t) {
  if (!t.has_floor) return "-";
  if (std::abs(t.sqnr_db) >= kit::kMaxDb) return t.sqnr_db > 0 ? "exact" : "void";
  return text("%.2f", t.sqnr_db);
}

Json to_json(const Report& r) {
  Json tensors = Json::object();
  for (const kit::TensorReport& t : r.tensors) {
    Json entry{{"bound_share", t.bound_share}};
    if (t.has_floor) entry.update({{"sqnr_db", t.sqnr_db}, {"floor_db", t.floor_db}});
    tensors[t.name] = entry;
  }
  Json json{{"check", r.name}, {"backend", r.backend}};
  if (!r.mode.empty()) json["mode"] = r.mode;
  json.update({{"status", !r.skipped.empty() ? "skipped"
                          : r.ok()           ? "ok"
                                             : "failed"},
               {"tensors", tensors},
               {"failures", r.failures},
               {"skipped", r.skipped},
               {"notes", r.notes},
               {"seconds", r.seconds}});
  return json;
}

void print_line(const Report& r) {
  std::string line = (!r.skipped.empty() ? "skipped " : r.ok() ? "ok      " : "FAILED  ") + r.name;
  if (!r.mode.empty()) line += ", " + r.mode;
  if (!r.tensors.empty()) {
    double share = 0;
    line.resize(std::max<size_t>(line.size(), 56), ' ');
    for (const kit::TensorReport& t : r.tensors) {
      if (t.name == std::string("lse")) continue;  // stored in fp32, its only rounding: any share up to 100% is normal
      line += text("%7s", sqnr_text(t).c_str());
      share = std::max(share, t.bound_share);
    }
    line += share < 10 ? text("%12.0f%%", 100 * share) : text("%13s", ">999%");
  }
  std::cout << line << (r.skipped.empty() ? "" : ": " + r.skipped) << '\n';
  for (const std::string& failure : r.failures) std::cout << "        " << failure << '\n';
  for (const std::string& note : r.notes) std::cout << "        not checked: " << note << '\n';
  std::cout << std::flush;
}

void print_header(const std::string& backend) {
  std::cout << text("%-56s%28s%13s\n", ("backend " + backend).c_str(), "SQNR, dB", "error/bound")
            << text("%-56s%7s%7s%7s%7s%13s\n", "", "out", "dq", "dk", "dv", "at most");
}

class Check {
 public:
  explicit Check(const CheckOptions& options) : options_(options) {}

  void run(const std::string& backend) {
    if (!options_.json) print_header(backend);
    if (options_.only.empty()) kit::verify_quantizers(backend, [&](const Report& report) { add(report); });
    const bool fwd = has(Operation::attention_fwd, backend), bwd = has(Operation::attention_bwd, backend);
    if (!fwd && !bwd) return;
    kit::VerifyOptions verify = kit::attention_backends(backend);
    run_cases(kit::check_cases(options_.quick), verify, "");
    if (options_.quick) return;
    if (kit::is_device_backend(verify.fwd_backend)) {
      verify.floors = false;
      run_cases(kit::long_cases(), verify, "");
      verify.floors = true;
    }
    if (!verify.bwd_backend.empty()) {
      verify.grad_element = Dtype::e5m2;
      run_cases(kit::check_cases(), verify, " (e5m2 gradients)");
      verify.grad_element = Dtype::e4m3;
    }
    verify.block = MxBlock::row32;
    run_cases(kit::regular_cases(), verify, " (row32)");
  }

  const Tally& tally() const { return tally_; }

 private:
  void run_cases(const std::vector<kit::AttentionCase>& cases, kit::VerifyOptions verify, const std::string& variant) {
    const auto wanted = [&](const kit::AttentionCase& c) {
      return options_.only.empty() || std::ranges::count(options_.only, std::string(c.name)) > 0;
    };
    for (const kit::AttentionCase& c : cases) {
      if (!wanted(c)) continue;
      for (const CpuMath math : kit::modes_of(verify.fwd_backend)) {
        verify.cpu_math = math;
        add(verify_attention(c, verify), variant);
      }
    }
  }

  void add(Report report, const std::string& variant = "") {
    report.name += variant;
    ++(!report.skipped.empty() ? tally_.skipped : report.ok() ? tally_.passed : tally_.failed);
    tally_.seconds += report.seconds;
    if (options_.json) {
      std::cout << to_json(report).dump() << std::endl;
    } else {
      print_line(report);
    }
  }

  const CheckOptions& options_;
  Tally tally_;
};

void check(const CheckOptions& options) {
  std::vector<kit::AttentionCase> cases = kit::check_cases();
  for (const kit::AttentionCase& c : kit::long_cases()) cases.push_back(c);
  for (const std::string& name : options.only) {
    if (std::ranges::count(cases, name, [](const auto& c) { return std::string(c.name); }) == 0) {
      throw UsageError("--only must name attention cases (mxflash check --json prints them), got '" + name + "'");
    }
  }
  const auto backends = all_backends();
  std::string known;
  for (const auto& [name, reason] : backends) known += (known.empty() ? "" : ", ") + name;
  bool found = options.backend.empty();
  Check run(options);
  for (const auto& [name, reason] : backends) {
    if (!options.backend.empty() && name != options.backend) continue;
    found = true;
    if (reason.empty()) {
      run.run(name);
    } else if (!options.backend.empty()) {
      throw UsageError("--backend " + name + " cannot run here: " + reason);
    } else {
      std::cerr << "mxflash: backend " << name << " is not checked: " << reason << '\n';
    }
  }
  if (!found)
    throw UsageError("--backend (or MXFLASH_BACKEND) must be one of " + known + ", got '" + options.backend + "'");
  const Tally& tally = run.tally();
  if (!options.json) {
    std::cout << text("\n%d checks ok, %d failed, %d skipped, %.1f s\n", tally.passed, tally.failed, tally.skipped,
                      tally.seconds);
  }
  if (tally.failed > 0) throw CheckFailed{};
}

}  // namespace

void add_check(CLI::App& app) {
  CLI::App* command = app.add_subcommand("check", "Compare every backend with the reference and with exact attention");
  const auto options = std::make_shared<CheckOptions>();
  command->add_option("--backend", options->backend, "Check this backend only (default: all that can run here)")
      ->envname("MXFLASH_BACKEND");
  command->add_flag("--quick", options->quick, "A quarter of the cases, in a few seconds");
  command->add_option("--only", options->only, "Only these attention cases, separated by commas")->delimiter(',');
  command->add_flag("--json", options->json, "Print one JSON object per check");
  command->footer(
      "Every element of out, lse, dq, dk, dv must lie within a bound that is derived from the roundings of the recipe\n"
      "or of backend cpu (100% is the bound itself; the column leaves out lse, whose main rounding is that of fp32),\n"
      "every tensor must reach the SQNR floor of its kind of operands, and quantizers must agree in every byte. "
      "Results\n"
      "must not change with the number of threads, a second run, or poisoned padding. Backend cpu is checked in both\n"
      "modes: exact, and fast, which may cost 0.05 dB. A backend on a CUDA device is checked against what its operand "
      "images\n"
      "hold, forward alone where it has no backward; a case that it refuses is skipped with the reason. SQNR is - "
      "where\n"
      "the exact tensor is zero.\n"
      "Exit code 1 if a check failed.");
  command->callback([options] { check(*options); });
}

}  // namespace mxflash::tools
