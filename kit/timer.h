// How long something takes: repeated runs, their median, and how far they spread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

namespace mxflash::kit {

// Linear between the two nearest samples; `share` in 0..1. NaN without samples.
inline double quantile(const std::vector<double>& samples, double share) {
  if (samples.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::vector<double> sorted = samples;
  std::sort(sorted.begin(), sorted.end());
  const double place = share * double(sorted.size() - 1);
  const auto low = size_t(place);
  const size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (place - double(low)) * (sorted[high] - sorted[low]);
}
inline double median(const std::vector<double>& samples) { return quantile(samples, 0.5); }

// (p90 - p10) / median; NaN for fewer than two samples, which do not say.
inline double spread(const std::vector<double>& samples) {
  if (samples.size() < 2) return std::numeric_limits<double>::quiet_NaN();
  return (quantile(samples, 0.9) - quantile(samples, 0.1)) / median(samples);
}

struct TimeBudget {
  double seconds = 0.5;     // of all timed runs together
  int32_t min_repeats = 3;  // even if they take longer
  int32_t max_repeats = 200;
  double long_run_seconds = 5;  // a run that takes longer counts, alone, and needs no warm-up: the only one
};

struct Timing {
  double median_ms = 0;
  double spread = 0;
  int32_t repeats = 0;
};

template <class Body>
double milliseconds(Body&& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

// Several ways to the same result, one sample of each in turn, so that a drift of the machine's speed meets all alike.
// A call takes one sample and returns its milliseconds. `seconds` are those of each on average; the first round warms
// up.
inline std::vector<Timing> measure_in_turn(const TimeBudget& budget, const std::vector<std::function<double()>>& ways) {
  std::vector<Timing> timings;
  bool is_long = false;
  for (const auto& way : ways) {
    timings.push_back({way(), std::numeric_limits<double>::quiet_NaN(), 1});
    is_long |= timings.back().median_ms > 1e3 * budget.long_run_seconds;
  }
  if (is_long) return timings;
  std::vector<std::vector<double>> samples(ways.size());
  double sum = 0;
  for (int32_t round = 0;
       round < budget.min_repeats || (sum < 1e3 * budget.seconds * double(ways.size()) && round < budget.max_repeats);
       ++round) {
    for (size_t i = 0; i < ways.size(); ++i) {
      samples[i].push_back(ways[i]());
      if (std::isfinite(samples[i].back())) sum += samples[i].back();
    }
  }
  for (size_t i = 0; i < ways.size(); ++i) {
    timings[i] = {median(samples[i]), spread(samples[i]), int32_t(samples[i].size())};
  }
  return timings;
}

template <class Body>
Timing measure(const TimeBudget& budget, Body&& body) {
  return measure_in_turn(budget, {[&] { return milliseconds(body); }}).front();
}

// Samples of `run` for measure_in_turn: the mean of as many runs as take least_ms. A shorter run is preceded by one
// that is not counted, because what ran before has left its own data in the caches.
inline std::function<double()> sampler(std::function<void()> run, double least_ms) {
  return [run = std::move(run), least_ms, run_ms = 0.0]() mutable {
    if (run_ms == 0) return run_ms = milliseconds(run);
    if (run_ms < least_ms) run();
    const auto runs = std::max<int64_t>(1, std::llround(least_ms / std::max(run_ms, 1e-3)));
    const double mean = milliseconds([&] {
                          for (int64_t i = 0; i < runs; ++i) run();
                        }) /
                        double(runs);
    run_ms = std::min(run_ms, mean);
    return mean;
  };
}

}  // namespace mxflash::kit
