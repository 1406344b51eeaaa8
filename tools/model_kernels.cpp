#include "tools/model_kernels.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "model_counts.h"

namespace mxflash::tools {
namespace {

using Waits = std::vector<std::pair<std::string, int>>;

constexpr double kRows = 128;
constexpr int kItems = 6, kWarmUp = 2;           // simulated one after the other; those that are not counted
constexpr int kFewTiles = 12, kManyTiles = 24;   // of an item: two lengths give cost and slope
constexpr double kMaskInstructions = 2 * kRows;  // a comparison and a selection for every score of a row
constexpr double kRescaled = 0.10;               // assumed: tiles whose rows move their maximum
constexpr double kItemInstructions = 150;        // assumed: of a compute warp, where its rows are and what they need

Counts sum(const std::vector<Counts>& pieces) {
  Counts all;
  for (const Counts& piece : pieces) {
    for (const auto& [opcode, count] : piece) all[opcode] += count;
  }
  return all;
}

// The steps of one pass of a compute warpgroup. Piece n is "<wait> done"; where it reads tensor memory, "<wait> read"
// comes first, as nothing of it can start before its values are there. `blocked` says which steps a wait means.
void add_pass(Pipeline& pipeline, const Chip& chip, const std::string& agent, const std::string& suffix, int index,
              const LoopCounts& loop, double extra, const std::map<std::string, Waits>& blocked) {
  Counts pending = loop.compute.front();  // before the first wait: runs with what follows it
  pending["LOP3"] += extra;
  for (size_t w = 0; w < loop.waits.size(); ++w) {
    const std::string& wait = loop.waits[w];
    Counts piece = loop.compute[w + 1];
    for (const auto& [opcode, count] : pending) piece[opcode] += count;
    pending.clear();
    const auto found = blocked.find(wait);
    if (found == blocked.end()) {
      throw std::logic_error("model: the kernel waits for " + wait + ", which the model does not know");
    }
    Waits waits = found->second;
    if (const auto columns = piece.extract("LDTM.columns"); !columns.empty()) {
      pipeline.add(agent, {.name = wait + " read" + suffix,
                           .index = index,
                           .work = tmem_read(chip, columns.mapped() * 4 * kRows),
                           .waits = std::exchange(waits, {})});
    }
    pipeline.add(agent, {.name = wait + " done" + suffix,
                         .index = index,
                         .work = work_of(chip, piece),
                         .waits = waits,
                         .share = chip.warp_share});
  }
}

// The warp that issues MMAs, in a pass of its loop; of several, on a scheduler each, the one with the most to do.
Work mma_issue(const Chip& chip, const LoopCounts& loop, const Variant& variant) {
  if (variant.mma_instructions > 0) return work_of_one_warp(chip, {{"UMOV", variant.mma_instructions}});
  Work most;
  for (const std::vector<Counts>& warp : loop.mma) {
    const Work work = work_of_one_warp(chip, sum(warp));
    if (work[Unit::issue] > most[Unit::issue]) most = work;
  }
  return most;
}

// Gradients or output leave tensor memory: rows x columns of fp32, rounded to 16 bits, through shared memory.
Work drain(const Chip& chip, double columns) {
  const double elements = kRows * columns;
  return work_of(
      chip,
      Arithmetic{
          .elements = elements, .issue = 0.5 + 0.5 + 0.125, .fma = 1, .alu = 0.5, .read = 4, .smem = 2 * 2 * elements});
}

struct Simulated {
  double item = 0, start = 0;
  Work busy{};
};

// Two query tiles of 128 rows, each with a softmax warpgroup; both use one S buffer. A warp each issues S and O. Or,
// where a sequence ends and with head_dim 256, one `alone`.
Simulated forward(const Chip& chip, const LoopCounts& loop, double dim, int tiles, bool masked, bool alone,
                  const Variant& v) {
  const double dim_v = dim == 192 ? 128 : dim, pv_columns = dim_v + v.row_sum_columns;
  const Work qk = matmul(chip, kRows, kRows, dim, 2 * kRows * dim);
  const Work pv = matmul(chip, kRows, pv_columns, kRows, kRows * pv_columns);
  const Work issue = mma_issue(chip, loop, v);
  const Work rescale =
      work_of(chip, Arithmetic{.elements = kRescaled * kRows * dim_v, .issue = 1, .fma = 1, .read = 4, .write = 4});
  const int stages = dim <= 128 ? 3 : 2;
  const bool keys_ahead = dim == 256;  // of values, by a tile
  const char *s[] = {"S0", "S1"}, *o[] = {"O0", "O1"}, *suffix[] = {" 0", " 1"};
  const auto done = [&](int t) { return loop.waits.back() + " done" + suffix[t]; };
  const std::vector<int> both = alone ? std::vector<int>{0} : std::vector<int>{0, 1};
  const char *last_s = s[both.back()], *last_o = o[both.back()];
  Pipeline pipeline(chip.sync);
  const int last = kItems * tiles;
  const auto add_qk = [&](int t, int g) {
    const int before = alone ? 0 : 1 - t;  // who used the buffer
    Waits waits{{"K", g}, {"S read" + std::string(suffix[before]), t == 0 ? g - 1 : g}};
    if (g % tiles == 0) waits.push_back({"Q", g / tiles});
    pipeline.add("mma S", {.name = s[t], .index = g, .work = qk, .waits = waits, .latency = chip.mma_latency});
  };
  const auto add_keys = [&](int g) {
    pipeline.add("load", {.name = "K",
                          .index = g,
                          .work = smem_fill(chip, kRows * dim),
                          .waits = {{last_s, g - stages}},
                          .latency = chip.load_latency});
  };
  for (const int t : both) add_qk(t, 0);
  for (int g = 0; g < last; ++g) {
    const int item = g / tiles;
    const bool first = g % tiles == 0, ends = g % tiles == tiles - 1;
    if (first) {
      pipeline.add("load", {.name = "Q",
                            .index = item,
                            .work = smem_fill(chip, double(both.size()) * kRows * dim),
                            .waits = {{last_s, (item - 1) * tiles - 1}},
                            .latency = chip.load_latency});
    }
    if (first || !keys_ahead) add_keys(g);
    if (!ends && keys_ahead) add_keys(g + 1);
    pipeline.add("load", {.name = "V",
                          .index = g,
                          .work = smem_fill(chip, kRows * dim_v),
                          .waits = {{last_o, g - stages}},
                          .latency = chip.load_latency});
    for (const int t : both) {
      if (g + 1 < last) add_qk(t, g + 1);
      Waits waits{{done(t), g}, {"V", g}, {"rescale" + std::string(suffix[t]), g}};
      if (first) waits.push_back({"drain" + std::string(suffix[t]), item - 1});
      pipeline.add("mma O", {.name = o[t], .index = g, .work = pv, .waits = waits, .latency = chip.mma_latency});
      const std::string group = "softmax" + std::string(suffix[t]);
      add_pass(
          pipeline, chip, group, suffix[t], g, loop,
          (first ? kItemInstructions : 0) + (masked && ends ? kMaskInstructions : 0),
          {{"S", {{s[t], g}}}, {"statistics", {{"rescale" + std::string(suffix[t]), g - 1}}}, {"PV", {{o[t], g - 1}}}});
      const std::string begun = loop.waits.front() + " done" + suffix[t];
      if (!first) {
        pipeline.add("correction", {.name = "rescale" + std::string(suffix[t]),
                                    .index = g,
                                    .work = rescale,
                                    .waits = {{begun, g}, {o[t], g - 1}},
                                    .share = chip.warp_share});
      }
    }
    for (const int t : both) {
      if (!ends) break;
      pipeline.add("correction", {.name = "drain" + std::string(suffix[t]),
                                  .index = item,
                                  .work = drain(chip, dim_v),
                                  .waits = {{o[t], g}},
                                  .share = chip.warp_share});
    }
    pipeline.add("mma warp", {.name = "issue", .index = g, .work = issue, .waits = {{"S0", g}}});
  }
  pipeline.run();
  const auto end = [&](int item) { return pipeline.end("drain" + std::string(suffix[both.back()]), item); };
  const double item = (end(kItems - 1) - end(kWarmUp - 1)) / (kItems - kWarmUp);
  // Steps of items, not of tiles, have smaller indices than these.
  const int from = kWarmUp * tiles, to = last;
  return {item, end(0) - item, pipeline.work(from, to) * (1. / (double(both.size()) * (to - from)))};
}

// Own rows in tensor memory, or, where there is no room, in shared memory; tiles of 64 streamed rows; three compute
// warpgroups take tiles in turn. One warp issues S and dP, another the sums.
Simulated backward(const Chip& chip, Kernel kernel, const LoopCounts& loop, double dim, int tiles, bool masked,
                   const Variant& v) {
  constexpr int kGroups = 3;
  const bool keys = is_of_keys(kernel), wide = !keys && v.wide_dq && dim <= 128;
  const bool makes_dv = kernel == Kernel::dkdv || kernel == Kernel::dv, makes_ds = kernel != Kernel::dv;
  const double dim_v = dim == 192 ? 128 : dim;
  // Own rows in shared memory: with 192 channels those of dkdv, with 256 those of dP. Scales of dV and dK in turn.
  const bool in_turn = kernel == Kernel::dkdv && dim == 192, first_shared = in_turn,
             second_shared = in_turn || dim == 256;
  const int stages = dim == 256 && makes_ds ? 5 : 6;
  const double n = wide ? 128 : 64;
  // Of streamed operands: what this SM's MMA reads of them.
  const double bytes = n * dim * (v.pair ? 0.5 : 1), bytes_v = n * dim_v * (v.pair ? 0.5 : 1);
  const Work score = matmul(chip, kRows, n, dim, bytes + (first_shared ? kRows * dim : 0));
  const Work gradient = matmul(chip, kRows, n, dim_v, bytes_v + (second_shared ? kRows * dim_v : 0));
  const Work sum_dv = matmul(chip, kRows, dim_v, n, bytes_v), sum_ds = matmul(chip, kRows, dim, n, bytes);
  const Work issue = mma_issue(chip, loop, v);
  // Score buffers: one of S and of dP; dv has two of S, dq of both up to 128 channels. P and dS one each, unless the
  // variant has two.
  const int scores = kernel != Kernel::dv && (keys || wide || dim > 128) ? 1 : 2, weights = v.two_weights ? 2 : 1;
  Pipeline pipeline(chip.sync);
  const int last = kItems * tiles;
  const auto mma = [&](const char* warp, const std::string& name, int g, const Work& work, Waits waits) {
    pipeline.add(warp,
                 {.name = name, .index = g, .work = work, .waits = std::move(waits), .latency = chip.mma_latency});
  };
  const auto add_score = [&](const char* name, const Work& work, int g) {
    Waits waits{{std::string(name) + " read", g - scores}, {"load", g}, {"own S", g / tiles}};
    if (makes_ds) waits.push_back({"own dP", g / tiles});
    mma("mma scores", name, g, work, waits);
  };
  const auto add_sum = [&](const char* name, const Work& work, int g, const char* operand) {
    Waits waits{{std::string(operand) + " done", g}};
    if (g % tiles == 0) waits.insert(waits.end(), {{"drained 0", g / tiles - 1}, {"drained 1", g / tiles - 1}});
    if (in_turn) waits.push_back(&work == &sum_dv ? Waits::value_type{"dK", g - 1} : Waits::value_type{"dV", g});
    mma("mma sums", name, g, work, waits);
  };
  const char* last_sum = !makes_ds ? "dV" : keys ? "dK" : "dQ";
  for (int g = 0; g < last; ++g) {
    const int item = g / tiles;
    const bool first = g % tiles == 0, ends = g % tiles == tiles - 1;
    pipeline.add("load", {.name = "load",
                          .index = g,
                          .work = smem_fill(chip, bytes + bytes_v),
                          .waits = {{last_sum, g - stages}},
                          .latency = chip.load_latency});
    // S of keys runs a tile ahead, but not into the next item.
    if (first || !keys) add_score("S", score, g);
    if (keys && !ends) add_score("S", score, g + 1);
    if (makes_ds) add_score("dP", gradient, g);
    if (makes_dv) add_sum("dV", sum_dv, g, "P free");
    if (makes_ds) add_sum(last_sum, sum_ds, g, "dS free");
    const std::string agent = "compute " + std::to_string(g % kGroups);
    // Two of the groups load an operand of own rows each. Those of the next item go to tensor memory when the last
    // product has read these, before sums go out; they were fetched long before.
    const auto add_own = [&](int w, int of, const Waits& waits) {
      if (w == 1 && !makes_ds) return;
      const double size = kRows * (w == 0 ? dim : dim_v);
      const bool shared = w == 0 ? first_shared : second_shared;
      Work store = smem_fill(chip, shared ? size : 0);
      store[Unit::tmem] = shared ? 0 : size / chip.tmem_write;
      store[Unit::issue] = kItemInstructions;
      pipeline.add(
          "compute " + std::to_string(w),
          {.name = w == 0 ? "own S" : "own dP", .index = of, .work = store, .waits = waits, .share = chip.warp_share});
    };
    if (g == 0) {
      pipeline.add("fetch", {.name = "fetched", .index = 0, .latency = chip.load_latency});
      for (const int w : {0, 1}) add_own(w, 0, {{"fetched", 0}});
    }
    add_pass(pipeline, chip, agent, "", g, loop, (masked && ends ? kMaskInstructions * n / kRows : 0),
             {{"load", {{"load", g}}},
              {"S", {{"S", g}}},
              {"P free", {{"dV", g - weights}}},
              {"dP", {{"dP", g}}},
              {"dS free", {{last_sum, g - weights}}}});
    if (ends) {
      // Of dkdv one sum each, of the others half of the one.
      for (const int w : {0, 1}) {
        const double columns = kernel != Kernel::dkdv ? dim / 2 : w == 0 ? dim_v : dim;
        if (g + 1 < last) add_own(w, item + 1, {{last_sum, g}});
        pipeline.add("compute " + std::to_string(w), {.name = "drained " + std::to_string(w),
                                                      .index = item,
                                                      .work = drain(chip, columns),
                                                      .waits = {{last_sum, g}},
                                                      .share = chip.warp_share});
      }
    }
    pipeline.add("mma warp", {.name = "issue", .index = g, .work = issue, .waits = {{"S", g}}});
  }
  pipeline.run();
  const auto end = [&](int item) { return pipeline.end("drained 1", item); };
  const double item = (end(kItems - 1) - end(kWarmUp - 1)) / (kItems - kWarmUp);
  const int from = kWarmUp * tiles, to = last;
  return {item, end(0) - item, pipeline.work(from, to) * (128 / n / (to - from))};
}

}  // namespace

const char* kernel_name(Kernel kernel) {
  switch (kernel) {
    case Kernel::forward: return "forward";
    case Kernel::dkdv: return "dkdv";
    case Kernel::dv: return "dv";
    case Kernel::dk: return "dk";
    case Kernel::dq: return "dq";
  }
  return "";
}

int padded_dim(int64_t head_dim, int64_t head_dim_v) {
  const int64_t most = std::max(head_dim, head_dim_v);
  return most <= 64 ? 64 : most <= 128 ? 128 : head_dim <= 192 && head_dim_v <= 128 ? 192 : 256;
}

LoopCounts loop_counts(Kernel kernel, int head_dim) {
  static const nlohmann::json all = nlohmann::json::parse(kModelCounts);
  const nlohmann::json& entry = all.at(std::string(kernel_name(kernel)) + ' ' + std::to_string(head_dim));
  LoopCounts loop{.symbol = entry.at("symbol"),
                  .waits = entry.at("waits"),
                  .mma = entry.at("mma"),
                  .compute = entry.at("compute"),
                  .mmas = entry.at("mmas")};
  if (loop.compute.size() != loop.waits.size() + 1) {
    throw std::logic_error("model_counts.json: " + loop.symbol + " needs a wait for every piece but the first");
  }
  return loop;
}

namespace {

KernelSpeed simulate(const Chip& chip, Kernel kernel, int head_dim, const Variant& variant) {
  LoopCounts loop = loop_counts(kernel, head_dim);
  for (Counts& piece : loop.compute) {
    for (const auto& [opcode, factor] : variant.compute_factor) {
      if (const auto found = piece.find(opcode); found != piece.end()) found->second *= factor;
    }
  }
  const bool wide = kernel == Kernel::dq && variant.wide_dq && head_dim <= 128;
  if (wide) {
    for (Counts& piece : loop.compute) {
      for (auto& [opcode, count] : piece) count *= 2;
    }
    for (std::vector<Counts>& warp : loop.mma) {
      for (Counts& piece : warp) {
        for (auto& [opcode, count] : piece) count *= 1.2;
      }
    }
  }
  const bool one_side = kernel == Kernel::forward && head_dim == 256;
  const auto simulated = [&](int tiles, bool masked, bool alone = false) {
    return kernel == Kernel::forward ? forward(chip, loop, head_dim, tiles, masked, alone || one_side, variant)
                                     : backward(chip, kernel, loop, head_dim, tiles, masked, variant);
  };
  const Simulated few = simulated(kFewTiles, false), many = simulated(kManyTiles, false);
  // Scores of 128 x 128 in a tile of the loop: two of the forward or one, half of one in the backward.
  const double scores = one_side || wide ? 1 : kernel == Kernel::forward ? 2 : 0.5;
  KernelSpeed speed;
  speed.tile = (many.item - few.item) / (kManyTiles - kFewTiles) / scores;
  speed.item = std::max(0., many.item - kManyTiles * scores * speed.tile);
  speed.masked = std::max(0., (simulated(kManyTiles, true).item - many.item) / scores);
  speed.start = many.start;
  speed.busy = many.busy;
  speed.alone = speed.tile;
  if (kernel == Kernel::forward) {
    speed.alone =
        (simulated(kManyTiles, false, true).item - simulated(kFewTiles, false, true).item) / (kManyTiles - kFewTiles);
  }
  return speed;
}

}  // namespace

KernelSpeed kernel_speed(const Chip& chip, Kernel kernel, int head_dim, const Variant& variant) {
  static std::map<std::string, KernelSpeed> known;
  std::string key(reinterpret_cast<const char*>(&chip), sizeof chip);
  key += std::to_string(int(kernel)) + ' ' + std::to_string(head_dim) + variant.change;
  if (const auto found = known.find(key); found != known.end()) return found->second;
  return known[key] = simulate(chip, kernel, head_dim, variant);
}

}  // namespace mxflash::tools
