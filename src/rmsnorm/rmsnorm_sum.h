// The sum of squares of a row, defined to the bit so that every backend gets the same rstd.
//
// kRmsLanes running sums in fp32: lane l adds h[l]^2, h[l + kRmsLanes]^2, ... in order (product and sum each rounded);
// then lanes are folded in halves: lane l += lane l + kRmsLanes/2, then kRmsLanes/4, ... down to one.
// Why so: a warp whose threads read 8 consecutive elements keeps its lanes in registers and folds by shuffles; a CPU
// keeps them in vector registers; rows shorter than the lanes add exact zeros.
#pragma once

#include <cstdint>

namespace mxflash {

inline constexpr int64_t kRmsLanes = 1024;

// element(i) is h[i].
template <class Element>
constexpr float sum_of_squares(int64_t dim, Element&& element) {
  float lane[kRmsLanes] = {};
  for (int64_t i = 0; i < dim; ++i) {
    const float h = element(i);
    lane[i % kRmsLanes] += h * h;
  }
  for (int64_t half = kRmsLanes / 2; half >= 1; half /= 2) {
    for (int64_t l = 0; l < half; ++l) lane[l] += lane[l + half];
  }
  return lane[0];
}

}  // namespace mxflash
