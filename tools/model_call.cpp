#include "tools/model_call.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>

namespace mxflash::tools {
namespace {

constexpr int64_t kRows = 128;
constexpr double kNextLaunch =
    0.5;  // assumed: of launch_us, for a kernel that is launched while the one before it ends

struct Item {
  double tiles = 0, masked = 0;  // of 128 x 128 scores
  bool alone = false;            // 128 rows where 256 fit
};

// Which keys the queries [first, end) of a sequence see, or which queries see the keys.
struct Visible {
  int64_t first = 0, end = 0;
  int64_t edges = 0;  // that differ between them: a mask cuts tiles there
};
Visible visible_keys(const Mask& mask, int64_t first, int64_t end, int64_t len_q, int64_t len_k) {
  const int64_t shift = len_k - len_q;
  Visible v{0, len_k, 0};
  if (mask.causal || mask.window_right >= 0) {
    const int64_t right = shift + (mask.causal ? 0 : mask.window_right);  // of the query's own index
    v.end = std::clamp<int64_t>(end + right, 0, len_k);
    if (first + right + 1 < v.end) ++v.edges;
  }
  if (mask.window_left >= 0) {
    const int64_t left = shift - mask.window_left;
    v.first = std::clamp<int64_t>(first + left, 0, v.end);
    if (end - 1 + left > v.first) ++v.edges;
  }
  return v;
}
Visible visible_queries(const Mask& mask, int64_t first, int64_t end, int64_t len_q, int64_t len_k) {
  const Mask other{
      .causal = false, .window_left = mask.causal ? 0 : mask.window_right, .window_right = mask.window_left};
  return visible_keys(other, first, end, len_k, len_q);
}

double tiles_of(const Visible& v, int64_t width) {
  if (v.end <= v.first) return 0;
  return double((v.end + width - 1) / width - v.first / width) * double(width) / double(kRows);
}

std::vector<Item> items_of(Kernel kernel, const BenchShape& s) {
  const std::vector<int32_t> lens_of_q = lens_q(s), lens_of_k = lens_k(s);
  const int64_t group = s.num_heads_q / s.num_heads_kv;
  std::vector<Item> items;
  for (size_t b = 0; b < lens_of_k.size(); ++b) {
    const int64_t len_q = lens_of_q[s.shared_q ? 0 : b], len_k = lens_of_k[b];
    if (kernel == Kernel::dq && s.shared_q && b > 0) {
      // Its items meet every key sequence.
      for (size_t i = 0; i < items.size(); ++i) items[i].tiles += double((len_k + 63) / 64) / 2;
      continue;
    }
    const bool two_sides = kernel == Kernel::forward && padded_dim(s.head_dim, s.head_dim_v) < 256;
    const int64_t own = is_of_keys(kernel) ? len_k : len_q, rows = two_sides ? 2 * kRows : kRows;
    const int64_t heads = is_of_keys(kernel) ? s.num_heads_kv : s.num_heads_q;
    for (int64_t first = 0; first < own; first += rows) {
      Item item;
      for (int64_t half = first; half < std::min(own, first + rows); half += kRows) {
        const int64_t end = std::min(own, half + kRows);
        const Visible v = is_of_keys(kernel) ? visible_queries(s.mask, half, end, len_q, len_k)
                                             : visible_keys(s.mask, half, end, len_q, len_k);
        const double tiles = tiles_of(v, kernel == Kernel::forward ? kRows : kRows / 2);
        const double repeated = is_of_keys(kernel) ? double(group) : 1;
        item.tiles += repeated * tiles;
        item.masked += repeated * std::min(tiles, double(v.edges));
      }
      item.alone = two_sides && own - first <= kRows;
      items.insert(items.end(), size_t(heads), item);
    }
  }
  return items;
}

// Cycles until all are done: longest first, each to the SM that is free first.
double makespan(std::vector<double> cycles, double sms) {
  std::ranges::sort(cycles, std::greater<>());
  std::priority_queue<double, std::vector<double>, std::greater<>> free;
  for (int sm = 0; sm < int(sms); ++sm) free.push(0);
  double end = 0;
  for (const double c : cycles) {
    const double done = free.top() + c;
    free.pop();
    free.push(done);
    end = std::max(end, done);
  }
  return end;
}

double bytes_of(Kernel kernel, const BenchShape& s) {
  const double q = double(total_tokens_q(s)) * double(s.num_heads_q);
  const double k = double(kit::sum_of(lens_k(s))) * double(s.num_heads_kv);
  const double out = (s.shared_q ? double(s.batch) : 1) * q, d = double(s.head_dim), dv = double(s.head_dim_v);
  switch (kernel) {
    case Kernel::forward: return q * d + k * (d + dv) + out * (2 * dv + 4);
    case Kernel::dkdv: return q * d + k * 3 * (d + dv) + out * (dv + 8);
    case Kernel::dv: return q * d + k * (d + 2 * dv) + out * (dv + 8);
    case Kernel::dk: return q * d + k * (3 * d + dv) + out * (dv + 8);
    case Kernel::dq: return q * 3 * d + k * (d + dv) + out * (dv + 8);
  }
  return 0;
}

ModelledKernel model_kernel(const Chip& chip, Kernel kernel, const BenchShape& shape, const Variant& variant,
                            bool first_launch) {
  ModelledKernel m{.name = kernel_name(kernel)};
  m.speed = kernel_speed(chip, kernel, padded_dim(shape.head_dim, shape.head_dim_v), variant);
  const std::vector<Item> items = items_of(kernel, shape);
  std::vector<double> cycles;
  double in_tiles = 0, all = 0;
  for (const Item& item : items) {
    const double tiles = item.tiles * (item.alone ? m.speed.alone : m.speed.tile) + item.masked * m.speed.masked;
    m.tiles += item.tiles;
    if (item.alone) m.alone += item.tiles;
    in_tiles += tiles;
    cycles.push_back(tiles + m.speed.item);
    all += cycles.back();
  }
  m.items = int64_t(items.size());
  const double us = 1e-3 / chip.ghz;
  m.tiles_us = in_tiles / chip.sms * us;
  m.items_us = (all - in_tiles) / chip.sms * us;
  m.waves_us = makespan(cycles, chip.sms) * us - m.tiles_us - m.items_us;
  m.memory_us = std::max(0., bytes_of(kernel, shape) / chip.hbm * 1e6 - m.tiles_us - m.items_us - m.waves_us);
  m.launch_us = m.speed.start * us + chip.launch_us * (first_launch ? 1 : kNextLaunch);
  return m;
}

}  // namespace

Unit ModelledKernel::bound() const {
  return *std::ranges::max_element(kUnits, {}, [&](Unit unit) { return speed.busy[unit]; });
}
double ModelledKernel::bound_share() const { return speed.busy[bound()] / speed.tile; }

double ModelledCall::us() const {
  double sum = 0;
  for (const ModelledKernel& kernel : kernels) sum += kernel.us();
  return sum;
}

std::string model_refuses(BenchOp op, const BenchShape& s) {
  if (op != BenchOp::attention_fwd && op != BenchOp::attention_bwd) {
    return std::string("sm100: the model has attention_fwd and attention_bwd, got ") + operation_name(op);
  }
  for (const auto& [name, dim] : {std::pair("head_dim", s.head_dim), {"head_dim_v", s.head_dim_v}}) {
    if (dim % 16 == 0 && dim <= 256) continue;
    return std::string(operation_name(op)) + ": sm100: " + name + " must be a multiple of 16, at most 256, got " +
           std::to_string(dim);
  }
  return "";
}

ModelledCall model_call(const Chip& chip, BenchOp op, const BenchShape& shape, const Variant& variant) {
  ModelledCall call{.kernels = {}, .flops = attention_flops(shape, op)};
  if (op == BenchOp::attention_fwd) {
    call.kernels.push_back(model_kernel(chip, Kernel::forward, shape, variant, true));
    return call;
  }
  // out in BF16 and dout are read, statistics written.
  const double rows =
      double(total_tokens_q(shape)) * double(shape.num_heads_q) * (shape.shared_q ? double(shape.batch) : 1);
  ModelledKernel pre{.name = "pre"};
  pre.memory_us = rows * (3 * double(shape.head_dim_v) + 4 + 8) / chip.hbm * 1e6;
  pre.launch_us = chip.launch_us;
  call.kernels = {pre};
  const bool two_passes = padded_dim(shape.head_dim, shape.head_dim_v) == 256;
  for (const Kernel kernel : two_passes ? std::vector<Kernel>{Kernel::dv, Kernel::dk, Kernel::dq}
                                        : std::vector<Kernel>{Kernel::dkdv, Kernel::dq}) {
    call.kernels.push_back(model_kernel(chip, kernel, shape, variant, false));
  }
  if (variant.one_grid) {
    // The last wave of dkdv has items of dq in it.
    call.kernels.rbegin()[1].waves_us = 0;
    call.kernels.back().launch_us = 0;
  }
  return call;
}

std::vector<Variant> next_ideas(BenchOp op) {
  if (op == BenchOp::attention_fwd) {
    return {{.change = "an mma loop of 100 instructions", .mma_instructions = 100},
            {.change = "no FP32 row sum, lse from the columns of ones", .compute_factor = {{"FADD2", 0}}},
            // A step less for each pair that the polynomial computes.
            {.change = "a quadratic for 2^x", .compute_factor = {{"FFMA2", 0.87}}},
            all_ideas(op)};
  }
  return {{.change = "CTA pairs that share streamed tiles", .pair = true},
          {.change = "dq in tiles of 128 keys", .wide_dq = true},
          {.change = "dkdv and dq in one grid", .one_grid = true},
          all_ideas(op),
          {.change = "two buffers of P and dS in dkdv, if there were columns", .two_weights = true}};
}

Variant all_ideas(BenchOp op) {
  if (op == BenchOp::attention_fwd) {
    return {.change = "these three", .mma_instructions = 100, .compute_factor = {{"FADD2", 0}, {"FFMA2", 0.87}}};
  }
  return {.change = "these three", .pair = true, .wide_dq = true, .one_grid = true};
}

std::vector<Sensitivity> sensitivities(const Chip& chip) {
  std::vector<Sensitivity> all;
  const auto add = [&](const char* change, const std::function<void(Chip&)>& apply) {
    all.push_back({change, chip});
    apply(all.back().chip);
  };
  add("tensor memory 228 B/clk read, 345 written (measured elsewhere)",
      [](Chip& c) { c.tmem_read = 228, c.tmem_write = 345; });
  add("tensor memory 128 B/clk each way", [](Chip& c) { c.tmem_read = c.tmem_write = 128; });
  add("clock 1.965 GHz", [](Chip& c) { c.ghz = 1.965; });
  add("clock 1.7 GHz", [](Chip& c) { c.ghz = 1.7; });
  add("hand-over 25 cycles", [](Chip& c) { c.sync = 25; });
  add("hand-over 100 cycles", [](Chip& c) { c.sync = 100; });
  add("all of shared memory's rate", [](Chip& c) { c.smem_share = 1; });
  add("0.75 of shared memory's rate", [](Chip& c) { c.smem_share = 0.75; });
  add("a warp alone takes every issue slot", [](Chip& c) { c.warp_share = 1; });
  add("a warp alone takes 0.6 of them", [](Chip& c) { c.warp_share = 0.6; });
  add("paired FP32 at twice the rate", [](Chip& c) { c.packed = 2; });
  add("MMAs at the tensor core's rate, whatever their n", [](Chip& c) { c.mma_floor = 0, c.mma_factor = 1; });
  add("MMA results after 150 cycles", [](Chip& c) { c.mma_latency = 150; });
  add("all that is favourable here", [](Chip& c) {
    c.mma_floor = 0, c.mma_factor = 1;
    c.ghz = 1.965, c.sync = 25;
    c.smem_share = c.warp_share = 1;
    c.packed = 2;
  });
  return all;
}

}  // namespace mxflash::tools
