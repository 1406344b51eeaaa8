// A kernel as agents that share the units of one SM: what `mxflash model` computes with.
//
// An agent (a warp or a warpgroup with one role) takes its steps in order. A step waits for others, then keeps units
// busy; steps that run at the same time share a unit max-min fairly, so the finer order of instructions does not count.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace mxflash::tools {

// issue: the slots of one scheduler, that of the warp which issues MMAs; the other three have less to do.
enum class Unit { tensor, smem, mufu, fma, alu, issue, tmem, l2 };
inline constexpr Unit kUnits[] = {Unit::tensor, Unit::smem,  Unit::mufu, Unit::fma,
                                  Unit::alu,    Unit::issue, Unit::tmem, Unit::l2};
const char* unit_name(Unit unit);

// Cycles that each unit is busy.
struct Work {
  std::array<double, std::size(kUnits)> cycles{};

  double& operator[](Unit unit) { return cycles[size_t(unit)]; }
  double operator[](Unit unit) const { return cycles[size_t(unit)]; }
  Work& operator+=(const Work& other);
};
Work operator+(Work a, const Work& b);
Work operator*(Work work, double factor);

struct Step {
  std::string name;
  int index = 0;  // of the tile or work item
  Work work{};
  std::vector<std::pair<std::string, int>> waits{};  // (name, index) of steps; a negative index waits for nothing
  double share = 1;                                  // of the issue slots, at most
  double latency = 0;                                // from the end of the work to what is seen of it
};

class Pipeline {
 public:
  // `sync`: cycles from the end of a step to the start of one of another agent that waited for it.
  explicit Pipeline(double sync) : sync_(sync) {}

  void add(const std::string& agent, Step step);
  void run();  // throws std::logic_error if steps wait for each other

  double end(const std::string& name, int index) const;  // after run(): when its work was done
  Work work(int first, int last) const;                  // of all steps with first <= index < last, as they were added

 private:
  struct Placed {
    Step step;
    size_t agent = 0;
    std::vector<size_t> waits{};
    Work work{};                 // of this time: about step.work
    double duration = 0;         // alone
    double end = -1, seen = -1;  // -1: not yet
  };

  double sync_;
  uint64_t random_ = 1;
  std::vector<Placed> steps_;
  std::vector<std::vector<size_t>> agents_;
  std::map<std::string, size_t> agent_names_;
  std::map<std::pair<std::string, int>, size_t> names_;
};

}  // namespace mxflash::tools
