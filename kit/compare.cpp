// One loop over the elements serves whole arrays and single heads; every quotient that could be undefined gets the
// value that the conventions in compare.h name.
#include "kit/compare.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "kit/text.h"

namespace mxflash::kit {
namespace {

bool same_nonfinite(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == b; }

void require_same_size(const char* function, size_t exact, size_t got) {
  if (exact != got) {
    throw std::invalid_argument(std::string(function) + ": got must have the " + std::to_string(exact) +
                                " elements of exact, got " + std::to_string(got));
  }
}

// Elements first + i * stride + c for i < rows and c < dim.
template <class T>
Metrics compare_rows(std::span<const double> exact, std::span<const T> got, int64_t first, int64_t rows, int64_t stride,
                     int64_t dim) {
  Metrics m;
  double got_energy = 0, product = 0;
  int64_t first_mismatch = -1;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t index = first + i * stride; index < first + i * stride + dim; ++index) {
      const double want = exact[index];
      const auto have = double(got[index]);
      if (!std::isfinite(want) || !std::isfinite(have)) {
        if (same_nonfinite(want, have)) continue;
        if (++m.nonfinite_mismatch == 1) first_mismatch = index;
        continue;
      }
      const double error = have - want;
      m.signal_energy += want * want;
      m.error_energy += error * error;
      got_energy += have * have;
      product += want * have;
      if (std::abs(error) > m.max_abs_err) {
        m.max_abs_err = std::abs(error);
        m.worst_index = index;
      }
    }
  }
  if (m.nonfinite_mismatch > 0) {
    m.sqnr_db = -kMaxDb;
    m.cosine = 0;
    m.worst_index = first_mismatch;
  } else if (m.max_abs_err > 0) {
    // log10 of no signal is -inf and of a vanishing error +inf, which the clamp makes printable; NaN is both at once.
    const double db = 10 * (std::log10(m.signal_energy) - std::log10(m.error_energy));
    m.sqnr_db = std::isnan(db) ? -kMaxDb : std::clamp(db, -kMaxDb, kMaxDb);
    const double cosine = product / (std::sqrt(m.signal_energy) * std::sqrt(got_energy));
    m.cosine = std::isfinite(cosine) ? cosine : 0;
  }
  return m;
}

template <class T>
Metrics compare_all(std::span<const double> exact, std::span<const T> got) {
  require_same_size("compare", exact.size(), got.size());
  return compare_rows(exact, got, 0, 1, 0, int64_t(exact.size()));
}

template <class T>
std::vector<Metrics> compare_heads(std::span<const double> exact, std::span<const T> got, int64_t tokens, int64_t heads,
                                   int64_t dim) {
  require_same_size("compare_per_head", exact.size(), got.size());
  require_same_size("compare_per_head", size_t(tokens * heads * dim), got.size());
  std::vector<Metrics> result;
  for (int64_t head = 0; head < heads; ++head) {
    result.push_back(compare_rows(exact, got, head * dim, tokens, heads * dim, dim));
  }
  return result;
}

template <class T>
std::string describe_metrics(const Metrics& m, std::span<const double> exact, std::span<const T> got,
                             const std::vector<int64_t>& shape) {
  int64_t size = 1;
  for (int64_t extent : shape) size *= extent;
  require_same_size("describe", exact.size(), got.size());
  require_same_size("describe", size_t(size), got.size());
  std::string result = text("sqnr %.2f dB, cosine %.6f, max |error| %.3g", m.sqnr_db, m.cosine, m.max_abs_err);
  if (m.nonfinite_mismatch > 0) {
    result = std::to_string(m.nonfinite_mismatch) + " elements differ in NaN or Inf, the first";
  }
  if (m.worst_index < 0) return result;
  return result + " at " + coordinates(m.worst_index, shape) +
         text(": exact %.9g, got %.9g", exact[m.worst_index], double(got[m.worst_index]));
}

}  // namespace

Metrics compare(std::span<const double> exact, std::span<const float> got) { return compare_all(exact, got); }
Metrics compare(std::span<const double> exact, std::span<const double> got) { return compare_all(exact, got); }

std::vector<Metrics> compare_per_head(std::span<const double> exact, std::span<const float> got, int64_t tokens,
                                      int64_t heads, int64_t dim) {
  return compare_heads(exact, got, tokens, heads, dim);
}
std::vector<Metrics> compare_per_head(std::span<const double> exact, std::span<const double> got, int64_t tokens,
                                      int64_t heads, int64_t dim) {
  return compare_heads(exact, got, tokens, heads, dim);
}

BesideRef beside_ref(std::span<const double> exact, std::span<const float> ref, std::span<const float> got,
                     double loss_db, double noise) {
  BesideRef b{.ref = compare(exact, ref), .got = compare(exact, got)};
  require_same_size("beside_ref", ref.size(), got.size());
  double fourth = 0, difference = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    if (!std::isfinite(exact[i]) || !std::isfinite(ref[i]) || !std::isfinite(got[i])) continue;
    const double d = double(got[i]) - double(ref[i]), e2 = std::pow(double(ref[i]) - exact[i], 2);
    fourth += e2 * e2;
    difference += d * d;
  }
  const double error = b.ref.error_energy, carriers = fourth > 0 ? error * error / fourth : 1;
  // Of few carriers luck would forgive any difference: a decibel at most, four in small tensors.
  const double most_db = exact.size() > 8192 ? 1 : 4;
  const double luck = std::min(8 * std::sqrt(error * difference / carriers), error * (std::pow(10, most_db / 10) - 1));
  b.allowed = error * std::pow(10, loss_db / 10) + luck + noise * noise * b.ref.signal_energy;
  return b;
}

std::string describe(const Metrics& metrics, std::span<const double> exact, std::span<const float> got,
                     const std::vector<int64_t>& shape) {
  return describe_metrics(metrics, exact, got, shape);
}
std::string describe(const Metrics& metrics, std::span<const double> exact, std::span<const double> got,
                     const std::vector<int64_t>& shape) {
  return describe_metrics(metrics, exact, got, shape);
}

}  // namespace mxflash::kit
