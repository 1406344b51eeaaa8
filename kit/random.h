// Random numbers that are the same on every platform: integer arithmetic, + - * / and sqrt only. The distributions of
// <random> and the log and exp of a C library differ between vendors, and so would every operand made from them.
//
// Also what kit/operands.h does to normal operands: outlier channels, sinks, wide row gradients.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <span>

namespace mxflash::kit {

// ln x for positive normal x: x = m * 2^e with m in [sqrt(1/2), sqrt(2)), then the series of 2 atanh((m-1)/(m+1)).
inline double portable_log(double x) {
  int e = 0;
  double m = std::frexp(x, &e);
  if (m < 0.70710678118654752) {
    m *= 2;
    --e;
  }
  const double t = (m - 1) / (m + 1);  // |t| <= 0.172: t^25 / 25 is below 2^-68
  double sum = 0;
  for (int n = 23; n >= 1; n -= 2) sum = sum * (t * t) + 1.0 / n;
  return 2 * t * sum + e * 0.69314718055994531;
}

// e^x for |x| <= 700: x = n ln 2 + r with |r| <= 0.35, then the Taylor series of e^r.
inline double portable_exp(double x) {
  const double n = std::floor(x * 1.4426950408889634 + 0.5);
  const double r = x - n * 0.69314718055994531;
  double sum = 1;
  for (int i = 14; i >= 1; --i) sum = 1 + sum * r / i;
  return std::ldexp(sum, int(n));
}

// xoshiro256++ (Blackman and Vigna), seeded through splitmix64. `stream` separates tensors made from one seed.
class Random {
 public:
  explicit Random(uint64_t seed, uint64_t stream = 0) {
    uint64_t x = seed + stream * 0xd1342543de82ef95u;
    for (uint64_t& word : state_) {
      uint64_t z = (x += 0x9e3779b97f4a7c15u);
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
      word = z ^ (z >> 31);
    }
  }

  uint64_t bits() {
    uint64_t* s = state_;
    const uint64_t result = std::rotl(s[0] + s[3], 23) + s[0];
    const uint64_t t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = std::rotl(s[3], 45);
    return result;
  }

  // In [0, 1), a multiple of 2^-53.
  double uniform() { return double(bits() >> 11) * 0x1p-53; }

  // In 0 .. n-1, n >= 1. The bias of the plain remainder, n / 2^64, does not matter here.
  int64_t below(int64_t n) { return int64_t(bits() % uint64_t(n)); }

  // Mean 0, variance 1: Marsaglia's polar method, which yields two at a time.
  double normal() {
    if (has_spare_) {
      has_spare_ = false;
      return spare_;
    }
    double x = 0, y = 0, r2 = 0;
    do {
      x = 2 * uniform() - 1;
      y = 2 * uniform() - 1;
      r2 = x * x + y * y;
    } while (r2 >= 1 || r2 == 0);
    const double factor = std::sqrt(-2 * portable_log(r2) / r2);
    spare_ = y * factor;
    has_spare_ = true;
    return x * factor;
  }

 private:
  uint64_t state_[4];
  double spare_ = 0;
  bool has_spare_ = false;
};

inline void fill_normal(Random& random, std::span<float> x) {
  for (float& value : x) value = float(random.normal());
}

// x is rows of `dim` channels. Multiplies the first `count` channels of every row.
inline void scale_channels(std::span<float> x, int64_t dim, int64_t count, float factor) {
  for (int64_t i = 0; i < int64_t(x.size()); ++i) {
    if (i % dim < count) x[i] *= factor;
  }
}

// Adds `offset` to channels begin..end-1 of every row.
inline void add_to_channels(std::span<float> x, int64_t dim, int64_t begin, int64_t end, float offset) {
  for (int64_t i = 0; i < int64_t(x.size()); ++i) {
    if (i % dim >= begin && i % dim < end) x[i] += offset;
  }
}

// Sets channels begin..end-1 of every row to `value`.
inline void set_channels(std::span<float> x, int64_t dim, int64_t begin, int64_t end, float value) {
  for (int64_t i = 0; i < int64_t(x.size()); ++i) {
    if (i % dim >= begin && i % dim < end) x[i] = value;
  }
}

// Multiplies each row of `row_size` elements by its own e^(sigma * normal).
inline void scale_rows_lognormal(Random& random, std::span<float> x, int64_t row_size, double sigma) {
  for (int64_t row = 0; row < int64_t(x.size()) / row_size; ++row) {
    const float factor = float(portable_exp(sigma * random.normal()));
    for (float& value : x.subspan(row * row_size, row_size)) value *= factor;
  }
}

// Adds to every row of `row_size` elements the same random vector sigma * normal.
inline void add_random_mean(Random& random, std::span<float> x, int64_t row_size, double sigma) {
  for (int64_t c = 0; c < std::min(row_size, int64_t(x.size())); ++c) {
    const float mean = float(sigma * random.normal());
    for (int64_t i = c; i < int64_t(x.size()); i += row_size) x[i] += mean;
  }
}

}  // namespace mxflash::kit
