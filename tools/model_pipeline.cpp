#include "tools/model_pipeline.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace mxflash::tools {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kTiny = 1e-9;
// Steps take up to so much more or less than they should, the same in every run: groups of warps that do the same would
// fall into step otherwise, and small changes of a rate then change the result by more than themselves.
constexpr double kJitter = 0.1;

}  // namespace

const char* unit_name(Unit unit) {
  switch (unit) {
    case Unit::tensor: return "tensor";
    case Unit::smem: return "smem";
    case Unit::mufu: return "mufu";
    case Unit::fma: return "fma";
    case Unit::alu: return "alu";
    case Unit::issue: return "issue";
    case Unit::tmem: return "tmem";
    case Unit::l2: return "l2";
  }
  return "";
}

Work& Work::operator+=(const Work& other) {
  for (size_t u = 0; u < cycles.size(); ++u) cycles[u] += other.cycles[u];
  return *this;
}
Work operator+(Work a, const Work& b) { return a += b; }
Work operator*(Work work, double factor) {
  for (double& c : work.cycles) c *= factor;
  return work;
}

void Pipeline::add(const std::string& agent, Step step) {
  const size_t a = agent_names_.try_emplace(agent, agents_.size()).first->second;
  if (a == agents_.size()) agents_.emplace_back();
  Placed placed{.step = std::move(step), .agent = a};
  random_ = random_ * 6364136223846793005u + 1442695040888963407u;
  placed.work = placed.step.work * (1 + kJitter * (double(random_ >> 40) * 0x1p-23 - 1));
  placed.duration = 1;
  for (const Unit unit : kUnits) {
    const double share = unit == Unit::issue ? placed.step.share : 1;
    placed.duration = std::max(placed.duration, placed.work[unit] / share);
  }
  names_[{placed.step.name, placed.step.index}] = steps_.size();
  agents_[a].push_back(steps_.size());
  steps_.push_back(std::move(placed));
}

void Pipeline::run() {
  for (Placed& placed : steps_) {
    for (const auto& wait : placed.step.waits) {
      if (const auto found = names_.find(wait); found != names_.end()) {
        placed.waits.push_back(found->second);
      } else if (const auto any = names_.lower_bound({wait.first, 0});
                 wait.second >= 0 && (any == names_.end() || any->first.first != wait.first)) {
        throw std::logic_error("model: no step " + wait.first);
      }
    }
  }
  const size_t n = agents_.size();
  std::vector<size_t> at(n, 0);     // the step that an agent is at
  std::vector<double> free(n, 0);   // since when it could start it
  std::vector<double> left(n, -1);  // the share of its step that is left; -1: not started
  std::vector<double> rate(n, 0);
  double now = 0;
  for (;;) {
    double next = kNever;
    bool active = false, finished = true;
    for (size_t a = 0; a < n; ++a) {
      if (at[a] == agents_[a].size()) continue;
      finished = false;
      if (left[a] < 0) {
        double ready = free[a];
        for (const size_t w : steps_[agents_[a][at[a]]].waits) {
          const Placed& other = steps_[w];
          ready = other.seen < 0 ? kNever : std::max(ready, other.seen + (other.agent != a ? sync_ : 0));
        }
        if (ready <= now + kTiny) {
          left[a] = 1;
        } else {
          next = std::min(next, ready);
        }
      }
      active = active || left[a] >= 0;
    }
    if (finished) return;
    if (!active) {
      if (next == kNever) {
        std::string stuck;
        for (size_t a = 0; a < n; ++a) {
          if (at[a] == agents_[a].size()) continue;
          const Step& step = steps_[agents_[a][at[a]]].step;
          stuck += " " + step.name + "(" + std::to_string(step.index) + ")";
        }
        throw std::logic_error("model: these steps wait for each other:" + stuck);
      }
      now = next;
      continue;
    }
    // Max-min fair: all grow alike until a unit is full; who uses it stays there.
    Work room;
    room.cycles.fill(1);
    std::vector<size_t> growing;
    for (size_t a = 0; a < n; ++a) {
      rate[a] = 0;
      if (left[a] >= 0) growing.push_back(a);
    }
    const auto use = [&](size_t a, size_t u) {
      const Placed& placed = steps_[agents_[a][at[a]]];
      return placed.work.cycles[u] / placed.duration;
    };
    while (!growing.empty()) {
      Work used;
      double grow = kNever;
      for (const size_t a : growing) {
        grow = std::min(grow, 1 - rate[a]);
        for (size_t u = 0; u < used.cycles.size(); ++u) used.cycles[u] += use(a, u);
      }
      for (size_t u = 0; u < used.cycles.size(); ++u) {
        if (used.cycles[u] > 1e-12) grow = std::min(grow, room.cycles[u] / used.cycles[u]);
      }
      for (const size_t a : growing) rate[a] += grow;
      for (size_t u = 0; u < used.cycles.size(); ++u) room.cycles[u] -= grow * used.cycles[u];
      std::erase_if(growing, [&](size_t a) {
        if (rate[a] > 1 - kTiny) return true;
        for (size_t u = 0; u < room.cycles.size(); ++u) {
          if (room.cycles[u] < kTiny && use(a, u) > 0) return true;
        }
        return false;
      });
    }
    double step = next - now;
    for (size_t a = 0; a < n; ++a) {
      if (left[a] >= 0 && rate[a] > 0) step = std::min(step, left[a] * steps_[agents_[a][at[a]]].duration / rate[a]);
    }
    now += step;
    for (size_t a = 0; a < n; ++a) {
      if (left[a] < 0) continue;
      Placed& placed = steps_[agents_[a][at[a]]];
      left[a] = std::max(0., left[a] - step * rate[a] / placed.duration);
      if (left[a] >= kTiny) continue;
      placed.end = free[a] = now;
      placed.seen = now + placed.step.latency;
      left[a] = -1;
      ++at[a];
    }
  }
}

double Pipeline::end(const std::string& name, int index) const { return steps_[names_.at({name, index})].end; }

Work Pipeline::work(int first, int last) const {
  Work sum;
  for (const Placed& placed : steps_) {
    if (placed.step.index >= first && placed.step.index < last) sum += placed.step.work;
  }
  return sum;
}

}  // namespace mxflash::tools
