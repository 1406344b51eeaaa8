// What the two directions of the reference share: geometry and fp64 row products.
#pragma once

#include <cstdint>

namespace mxflash::ref {

// Query rows and keys handled at a time. kBlockN is part of the recipe: the running maximum advances per key tile.
inline constexpr int64_t kBlockM = 128;
inline constexpr int64_t kBlockN = 128;
inline constexpr int64_t kMaxDim = 256;
inline constexpr double kLog2e = 1.4426950408889634;

// P is stored as E4M3 of P * 2^kPExponent: at most 256 of E4M3's 448, so that P = 1 keeps a binade of headroom.
inline constexpr int kPExponent = 8;

// n is a multiple of 8. Eight partial sums let the compiler use vector registers in a fixed order.
inline double dot(const double* a, const double* b, int64_t n) {
  double sum[8] = {};
  for (int64_t i = 0; i < n; i += 8) {
    for (int64_t l = 0; l < 8; ++l) sum[l] += a[i + l] * b[i + l];
  }
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

// y += a * x
inline void axpy(double a, const double* x, double* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

inline void scale_row(double a, double* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] *= a;
}

}  // namespace mxflash::ref
