// `mxflash model`: how fast the kernels for a chip that is not here should be, what bounds them, and how sure that is.
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "kit/host_tensor.h"
#include "kit/text.h"
#include "tools/commands.h"
#include "tools/model_call.h"
#include "tools/model_published.h"
#include "tools/number_text.h"
#include "tools/progress.h"

namespace mxflash::tools {
namespace {

using kit::text;
using Json = nlohmann::ordered_json;

struct ModelOptions {
  std::string arch = "sm100", op;
  std::optional<std::string> shape;
  std::vector<std::string> shapes;
  bool causal = false, calibrate = false, json = false;
};

// KEY=VALUE,... as the JSON object that a file of shapes would hold.
std::vector<BenchShape> shape_of_text(const std::string& given) {
  Json object = Json::object();
  for (size_t at = 0; at <= given.size();) {
    const size_t comma = std::min(given.find(',', at), given.size());
    const std::string entry = given.substr(at, comma - at);
    const size_t equals = entry.find('=');
    const Json value = equals == entry.npos ? Json() : Json::parse(entry.substr(equals + 1), nullptr, false);
    if (equals == 0 || equals == entry.npos || value.is_discarded()) {
      throw UsageError("--shape must be KEY=VALUE,... with numbers, true or false, got " + kit::in_quotes(entry));
    }
    if (object.contains(entry.substr(0, equals))) {
      throw UsageError("--shape must name a key once, got " + kit::in_quotes(entry) + " after another");
    }
    object[entry.substr(0, equals)] = value;
    at = comma + 1;
  }
  return parse_bench_shapes(object.dump(), "--shape");
}

std::string cycles_header() {
  std::string line = text("  %-8s %7s %10s %8s", "kernel", "items", "tiles", "clk/tile");
  for (const Unit unit : kUnits) line += text(" %6s", unit_name(unit));
  return line + "   us: tiles   items   waves  memory  launch\n";
}

std::string kernel_line(const ModelledKernel& k) {
  std::string line = text("  %-8s %7s %10s %8s", k.name.c_str(), grouped(k.items).c_str(),
                          grouped(int64_t(k.tiles)).c_str(), fixed(k.speed.tile, 0).c_str());
  for (const Unit unit : kUnits) line += text(" %6.0f", k.speed.busy[unit]);
  return line +
         text("   %9.1f %7.1f %7.1f %7.1f %7.1f\n", k.tiles_us, k.items_us, k.waves_us, k.memory_us, k.launch_us);
}

// "forward: issue, busy 89% of the time", "forward: hand-overs; the busiest unit, issue, 71% of the time"
std::string bound_text(const ModelledKernel& k) {
  constexpr double kFull = 0.85;
  const std::string unit = unit_name(k.bound()), share = percent(k.bound_share());
  return k.name + ": " +
         (k.bound_share() >= kFull ? unit + ", busy " + share
                                   : "hand-overs; the busiest unit, " + unit + ", " + share) +
         " of the time";
}

// "" if most of a kernel's time are tiles, which bound_text is about; else what it is.
std::string beside_tiles(const ModelledKernel& k) {
  const std::pair<double, const char*> parts[] = {{k.tiles_us, ""},
                                                  {k.items_us, "the beginnings and ends of items"},
                                                  {k.waves_us, "SMs that wait for the last item"},
                                                  {k.memory_us, "reading operands and writing results"},
                                                  {k.launch_us, "launches"}};
  const auto& [us, what] = *std::ranges::max_element(parts, {}, &std::pair<double, const char*>::first);
  return *what ? text("%s (%s of the time)", what, percent(us / k.us()).c_str()) : "";
}

std::string pflops_text(double x) { return x < 0.1 ? significant(x, 2) : fixed(x, 2); }

Json to_json(const Work& work) {
  Json json;
  for (const Unit unit : kUnits) json[unit_name(unit)] = work[unit];
  return json;
}

struct Range {
  double low = 0, high = 0;
};
struct Changed {
  std::string change;
  double pflops = 0;
};

class Model {
 public:
  explicit Model(const ModelOptions& options) : options_(options) {
    if (options_.json) return;
    std::cout << text(
        "%s: %.0f SMs at %.2f GHz. A model, nothing measured: the kernels have never run on such a chip, and the\n"
        "method is 29 to 45 %% too fast on Hopper, where it can be checked (docs/blackwell.md).\n",
        options_.arch.c_str(), chip_.sms, chip_.ghz);
  }

  void run(BenchOp op, const BenchShape& shape) {
    const ModelledCall call = model_call(chip_, op, shape);
    Range range{call.pflops(), call.pflops()};
    std::vector<Changed> changes;
    const std::vector<Sensitivity> constants = sensitivities(chip_);
    for (const Sensitivity& s : constants) {
      changes.push_back({s.change, model_call(s.chip, op, shape).pflops()});
      if (&s == &constants.back()) continue;  // the range is that of one at a time
      range.low = std::min(range.low, changes.back().pflops);
      range.high = std::max(range.high, changes.back().pflops);
    }
    std::vector<Changed> ideas;
    for (const Variant& idea : next_ideas(op)) {
      ideas.push_back({idea.change, model_call(chip_, op, shape, idea).pflops()});
    }
    ideas.push_back({all_ideas(op).change + " and every favourable constant",
                     model_call(constants.back().chip, op, shape, all_ideas(op)).pflops()});
    if (options_.json) {
      print_json(op, shape, call, range, changes, ideas);
    } else {
      print_text(op, shape, call, range, changes, ideas);
    }
  }

  void calibrate() {
    std::vector<Published> designs = published_designs(chip_);
    const std::vector<Published> measured = measured_designs();
    designs.insert(designs.end(), measured.begin(), measured.end());
    if (!options_.json) {
      std::cout << text("\n%-42s %10s %9s %7s   %8s\n", "design", "it reached", "modelled", "error", "clk/tile", "");
    }
    for (const Published& d : designs) {
      const double error = d.modelled / d.pflops - 1;
      if (options_.json) {
        std::cout << Json{{"design", d.name},       {"published_pflops", d.pflops}, {"modelled_pflops", d.modelled},
                          {"error", error},         {"fitted", d.fitted},           {"cycles_per_tile", d.cycles},
                          {"busy", to_json(d.busy)}}
                         .dump()
                  << '\n';
      } else {
        std::cout << text("%-42s %10.2f %9.2f %6s%%   %8.0f  %s%s\n", d.name.c_str(), d.pflops, d.modelled,
                          signed_fixed(100 * error, 0).c_str(), d.cycles,
                          d.fitted ? "" : "not fitted: ", d.remark.c_str());
      }
    }
    if (!options_.json) {
      std::cout << text("\n%-52s %6s %6s   sync  smem  warp  overhead\n", "tensor memory, best fit of the rest", "rms",
                        "worst");
    }
    for (const Fit& fit : fit_constants(chip_)) {
      const Chip& c = fit.chip;
      if (options_.json) {
        std::cout << Json{{"fit", fit.tensor_memory}, {"rms_error", fit.rms},       {"worst_error", fit.worst},
                          {"sync", c.sync},           {"smem_share", c.smem_share}, {"warp_share", c.warp_share},
                          {"overhead", c.overhead}}
                         .dump()
                  << '\n';
      } else {
        std::cout << text("%-52s %5.1f%% %5.1f%%  %5.0f  %4.2f  %4.2f  %4.2f\n", fit.tensor_memory.c_str(),
                          100 * fit.rms, 100 * fit.worst, c.sync, c.smem_share, c.warp_share, c.overhead);
      }
    }
  }

 private:
  void print_text(BenchOp op, const BenchShape& shape, const ModelledCall& call, const Range& range,
                  const std::vector<Changed>& changes, const std::vector<Changed>& ideas) const {
    std::cout << text("\n%s %s: %.1f us, %s PFLOP/s (%s to %s over the constants below)\n", operation_name(op),
                      to_text(shape).c_str(), call.us(), pflops_text(call.pflops()).c_str(),
                      pflops_text(range.low).c_str(), pflops_text(range.high).c_str())
              << cycles_header();
    for (const ModelledKernel& kernel : call.kernels) std::cout << kernel_line(kernel);
    for (const ModelledKernel& kernel : call.kernels) {
      if (const std::string most = beside_tiles(kernel); !most.empty()) {
        std::cout << "  most of " << kernel.name << ": " << most << '\n';
      }
      if (kernel.items > 0) std::cout << "  bound of a tile of " << bound_text(kernel) << '\n';
      if (kernel.alone > 0) {
        std::cout << text("  but %s of the tiles are of items with 128 rows or fewer: %.0f clk each\n",
                          percent(kernel.alone / kernel.tiles).c_str(), kernel.speed.alone);
      }
    }
    print_changes("PFLOP/s if", changes);
    print_changes("next ideas", ideas);
  }

  static void print_changes(const char* title, const std::vector<Changed>& changes) {
    std::cout << "  " << title << '\n';
    for (const Changed& c : changes) {
      std::cout << text("    %-64s %5s\n", c.change.c_str(), pflops_text(c.pflops).c_str());
    }
  }

  void print_json(BenchOp op, const BenchShape& shape, const ModelledCall& call, const Range& range,
                  const std::vector<Changed>& changes, const std::vector<Changed>& ideas) const {
    Json json{{"arch", options_.arch},   {"op", operation_name(op)}, {"shape", tools::to_json(shape)},
              {"us", call.us()},         {"pflops", call.pflops()},  {"pflops_range", {range.low, range.high}},
              {"kernels", Json::array()}};
    for (const ModelledKernel& k : call.kernels) {
      Json kernel{{"name", k.name}};
      if (k.items > 0) {
        kernel.update({{"items", k.items},
                       {"tiles", k.tiles},
                       {"cycles_per_tile", k.speed.tile},
                       {"cycles_per_item", k.speed.item},
                       {"tiles_alone", k.alone},
                       {"cycles_per_tile_alone", k.speed.alone},
                       {"busy_per_tile", to_json(k.speed.busy)},
                       {"bound", unit_name(k.bound())},
                       {"bound_share", k.bound_share()}});
      }
      kernel.update({{"us", k.us()},
                     {"tiles_us", k.tiles_us},
                     {"items_us", k.items_us},
                     {"waves_us", k.waves_us},
                     {"memory_us", k.memory_us},
                     {"launch_us", k.launch_us},
                     {"most_beside_tiles", beside_tiles(k)}});
      json["kernels"].push_back(kernel);
    }
    for (const Changed& c : changes) json["sensitivity"][c.change] = c.pflops;
    for (const Changed& c : ideas) json["next_ideas"][c.change] = c.pflops;
    std::cout << json.dump() << '\n';
  }

  const ModelOptions& options_;
  const Chip chip_{};
};

constexpr char kFooter[] =
    R"(Tiles are of 128 x 128 scores; clk/tile is the time of one on an SM, followed by what each unit is busy of it. Times
are the tiles with every SM busy, what items of work add (their beginnings and ends), SMs that wait for the last one,
reading operands and writing results where that takes longer, and launches. FLOPs as `mxflash bench` counts them.
Instructions are those of the compiled kernels (tools/model_counts.json, written by tools/sass_counts.py).
Shapes have the keys of `mxflash bench --help`: --shape batch=16,seqlen_q=1024,num_heads_q=16,head_dim=128,causal=true)";

void model(const ModelOptions& options) {
  if (options.shape && !options.shapes.empty()) throw UsageError("--shape and --shapes exclude each other");
  std::vector<BenchShape> shapes;
  if (options.shape) {
    shapes = shape_of_text(*options.shape);
  } else if (!options.shapes.empty() || !options.calibrate) {
    for (const std::string& set : options.shapes.empty() ? std::vector<std::string>{"llm"} : options.shapes) {
      const std::vector<BenchShape> some = bench_shapes(set);
      shapes.insert(shapes.end(), some.begin(), some.end());
    }
  }
  std::vector<std::pair<BenchOp, BenchShape>> calls;
  for (BenchShape shape : shapes) {
    if (options.causal) shape.mask.causal = true;
    for (const BenchOp op : {BenchOp::attention_fwd, BenchOp::attention_bwd}) {
      const bool wanted = shape.ops.empty() || std::ranges::count(shape.ops, op);
      if ((!options.op.empty() && options.op != operation_name(op)) || !wanted) continue;
      if (const std::string rule = model_refuses(op, shape); !rule.empty()) throw UsageError(rule);
      calls.emplace_back(op, shape);
    }
  }
  if (calls.empty() && !shapes.empty()) throw UsageError("none of these shapes is one of " + options.op);
  Model run(options);
  Progress progress;
  for (const auto& [op, shape] : calls) {
    progress.phase(std::string("model of ") + operation_name(op) + " " + to_text(shape));
    run.run(op, shape);
  }
  progress.phase("calibration");
  if (options.calibrate) run.calibrate();
}

}  // namespace

void add_model(CLI::App& app) {
  CLI::App* command = app.add_subcommand("model", "Estimate the speed of kernels on a chip that is not at hand");
  const auto options = std::make_shared<ModelOptions>();
  command->add_option("--arch", options->arch, "sm100 (B200)")->check(CLI::IsMember({"sm100"}));
  command->add_option("--op", options->op, "attention_fwd or attention_bwd (default: both)")
      ->check(CLI::IsMember({"attention_fwd", "attention_bwd"}));
  command->add_option("--shape", options->shape, "One shape, as KEY=VALUE,...");
  command->add_option("--shapes", options->shapes, "A set of `mxflash bench` or a file of shapes (default: llm)")
      ->delimiter(',');
  command->add_flag("--causal", options->causal, "With a causal mask, whatever the shape says");
  command->add_flag("--calibrate", options->calibrate, "Published designs in the same model, with its errors");
  command->add_flag("--json", options->json, "Print one JSON object a line");
  command->footer(kFooter);
  command->callback([options] { model(*options); });
}

}  // namespace mxflash::tools
