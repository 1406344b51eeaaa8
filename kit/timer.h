// How long something takes: repeated runs, their median, and how far they spread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
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

template <class Body>
Timing measure(const TimeBudget& budget, Body&& body) {
  const double first = milliseconds(body);
  if (first > 1e3 * budget.long_run_seconds) return {first, std::numeric_limits<double>::quiet_NaN(), 1};
  std::vector<double> samples;
  double sum = 0;
  while (int32_t(samples.size()) < budget.min_repeats ||
         (sum < 1e3 * budget.seconds && int32_t(samples.size()) < budget.max_repeats)) {
    samples.push_back(milliseconds(body));
    sum += samples.back();
  }
  return {median(samples), spread(samples), int32_t(samples.size())};
}

}  // namespace mxflash::kit
