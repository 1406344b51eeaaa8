// How far a result is from the exact one. Positions of NaN and Inf come first, since no average may hide them; then
// SQNR, cosine and the worst element with its coordinates.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace mxflash::kit {

// Stands for infinity in sqnr_db, so that every Metrics can be written to JSON.
inline constexpr double kMaxDb = 999;

// Conventions:
//   error 0 (empty arrays too)           sqnr_db = kMaxDb, cosine 1, worst_index -1
//   exact all zero, got not              sqnr_db = -kMaxDb, cosine 0; judge these by max_abs_err
//   got all zero, exact not              sqnr_db = 0, cosine 0
//   NaN against NaN, Inf against the same Inf: equal, and left out of every sum
//   NaN or Inf against anything else     counted in nonfinite_mismatch, and the whole comparison is void:
//                                        sqnr_db = -kMaxDb, cosine 0, worst_index the first such element
struct Metrics {
  double sqnr_db = kMaxDb;  // 10 log10(signal_energy / error_energy), within -kMaxDb..kMaxDb
  double cosine = 1;
  double max_abs_err = 0;          // over pairs of finite elements
  double signal_energy = 0;        // sum exact^2, over pairs of finite elements
  double error_energy = 0;         // sum (got - exact)^2
  int64_t nonfinite_mismatch = 0;  // elements
  int64_t worst_index = -1;        // into the whole arrays, also for a single head
};

// Both throw std::invalid_argument if the sizes differ.
Metrics compare(std::span<const double> exact, std::span<const float> got);
Metrics compare(std::span<const double> exact, std::span<const double> got);

// One Metrics a head of [tokens, heads, dim] arrays.
std::vector<Metrics> compare_per_head(std::span<const double> exact, std::span<const float> got, int64_t tokens,
                                      int64_t heads, int64_t dim);
std::vector<Metrics> compare_per_head(std::span<const double> exact, std::span<const double> got, int64_t tokens,
                                      int64_t heads, int64_t dim);

// How much error energy `got` may have where `ref` computes the same from the same rounded operands, in another
// arithmetic: `loss_db` more than ref has; a difference of `noise` times the size of exact, for where ref rounds
// nothing; and luck. Both share the error of the operands, e, and have roundings of their own, whose difference d is
// known: |e + d|^2 - |e|^2 has a term 2 e.d of either sign, with a standard deviation of 2 |e| |d| / sqrt(n) for errors
// that n elements carry. Four of them are allowed.
struct BesideRef {
  Metrics ref, got;  // both against exact
  double allowed = 0;
  bool ok() const { return got.nonfinite_mismatch == 0 && got.error_energy <= allowed; }
};
BesideRef beside_ref(std::span<const double> exact, std::span<const float> ref, std::span<const float> got,
                     double loss_db, double noise);

// "sqnr 25.61 dB, cosine 0.998627, max |error| 0.0312 at [3, 1, 17]: exact 0.25, got 0.28125". `shape` gives the
// coordinates; its product is the number of elements.
std::string describe(const Metrics& metrics, std::span<const double> exact, std::span<const float> got,
                     const std::vector<int64_t>& shape);
std::string describe(const Metrics& metrics, std::span<const double> exact, std::span<const double> got,
                     const std::vector<int64_t>& shape);

}  // namespace mxflash::kit
