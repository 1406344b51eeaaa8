// Operands of a tile (tests/tcgen05_tile.cuh) and its judge.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "mx/e8m0.h"
#include "tcgen05_tile.cuh"

namespace mxflash {

// A in shared and in tensor memory, B K-major and MN-major, d of 64 and 128, and the 144 and 80 columns of a product whose
// B has a column of ones behind 128 and 64.
using TileConfigs =
    testing::Types<tile::Config<128, 128, false, false>, tile::Config<128, 128, true, false>,
                   tile::Config<128, 128, false, true>, tile::Config<128, 128, true, true>,
                   tile::Config<64, 128, false, false>, tile::Config<64, 128, true, false>,
                   tile::Config<128, 64, false, true>, tile::Config<128, 64, true, true>,
                   tile::Config<64, 64, true, false>>;

template <class C>
struct TileCase {
  std::vector<uint8_t> a, b, sfa, sfb;
  std::vector<float> d;

  explicit TileCase(uint64_t seed) : a(128 * C::kK), b(C::kN * C::kK), sfa(512), sfb(512), d(128 * C::kN, NAN) {
    std::mt19937_64 random(seed);
    const auto codes = [&](std::vector<uint8_t>& to) {
      for (uint8_t& x : to) {
        do x = uint8_t(random());
        while ((x & 0x7F) == kFp8Nan);
      }
    };
    codes(a);
    codes(b);
    for (uint8_t& x : sfa) x = uint8_t(120 + random() % 14);
    for (uint8_t& x : sfb) x = uint8_t(120 + random() % 14);
  }
  tile::Params params() { return {a.data(), b.data(), sfa.data(), sfb.data(), d.data()}; }

  static size_t scale_at(int row, int block) { return size_t(row % 32 * 16 + row / 32 * 4 + block); }
  // The largest error over its bound: a sum of kK exact terms in fp32 in some order, the block sums scaled exactly.
  double worst() const {
    double most = 0;
    for (int m = 0; m < 128; ++m) {
      for (int n = 0; n < C::kN; ++n) {
        double sum = 0, magnitude = 0;
        for (int k = 0; k < C::kK; ++k) {
          const double x =
              decode_mx(a[size_t(m * C::kK + k)], sfa[scale_at(m, k / 32)], kE4m3) *
              decode_mx(b[size_t(C::kMnMajorB ? k * C::kN + n : n * C::kK + k)], sfb[scale_at(n, k / 32)], kE4m3);
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
