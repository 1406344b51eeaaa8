// Operands of a tile (tests/tcgen05_tile.cuh) and its judge.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "mx/e8m0.h"
#include "tcgen05_tile_configs.h"

namespace mxflash {

template <class C>
struct TileCase {
  Dtype a_type, b_type;
  std::vector<uint8_t> a, b, sfa, sfb;
  std::vector<float> d;

  explicit TileCase(uint64_t seed)
      : a_type(seed % 2 ? Dtype::e4m3 : Dtype::e5m2),
        b_type(seed % 3 ? Dtype::e4m3 : Dtype::e5m2),
        a(128 * C::kK),
        b(C::kN * C::kK),
        sfa(512),
        sfb(512 * C::kAtomsB),
        d(128 * C::kN, NAN) {
    std::mt19937_64 random(seed);
    const auto codes = [&](std::vector<uint8_t>& to, Dtype type) {
      for (uint8_t& x : to) {
        do x = uint8_t(random());
        while ((x & 0x7F) > fp8_format(type).max_code);
      }
    };
    codes(a, a_type);
    codes(b, b_type);
    for (uint8_t& x : sfa) x = uint8_t(120 + random() % 14);
    for (uint8_t& x : sfb) x = uint8_t(120 + random() % 14);
  }
  static ptx::Fp8Code code(Dtype type) { return type == Dtype::e4m3 ? ptx::Fp8Code::e4m3 : ptx::Fp8Code::e5m2; }
  tile::Params params() { return {a.data(), b.data(), sfa.data(), sfb.data(), d.data(), code(a_type), code(b_type)}; }

  static size_t scale_at(int row, int block) {
    return size_t(row / 128 * 512 + row % 32 * 16 + row / 32 % 4 * 4 + block);
  }
  double a_at(int m, int k) const {
    return decode_mx(a[size_t(C::kMnMajorA ? k * 128 + m : m * C::kK + k)], sfa[scale_at(m, k / 32)],
                     fp8_format(a_type));
  }
  double b_at(int n, int k) const {
    return decode_mx(b[size_t(C::kMnMajorB ? k * C::kN + n : n * C::kK + k)],
                     sfb[scale_at(n + 32 * C::kSfbColumn, k / 32)], fp8_format(b_type));
  }
  // The largest error over its bound: a sum of kK terms, each exact, in fp32 in some order; scales are powers of two.
  double worst() const {
    double most = 0;
    for (int m = 0; m < 128; ++m) {
      for (int n = 0; n < C::kN; ++n) {
        double sum = 0, magnitude = 0;
        for (int k = 0; k < C::kK; ++k) {
          const double x = a_at(m, k) * b_at(n, k);
          sum += x;
          magnitude += std::fabs(x);
        }
        const double bound = C::kK * std::ldexp(1.0, -24) * magnitude;
        const double error = std::fabs(double(d[size_t(m * C::kN + n)]) - sum) / bound;
        if (!(error <= most)) most = error == error ? error : std::numeric_limits<double>::infinity();
      }
    }
    return most;
  }
};

}  // namespace mxflash
