// Block geometry and the quantization of one block.
#pragma once

#include <mxflash/mx.h>

#include <cstdint>

#include "mx/e8m0.h"
#include "mx/fp8.h"

namespace mxflash {

inline constexpr int64_t kMxBlock = 32;

struct BlockShape {
  int64_t rows;  // tokens
  int64_t cols;  // channels
};

constexpr BlockShape block_shape(MxBlock block) {
  switch (block) {
    case MxBlock::row32: return {1, kMxBlock};
    case MxBlock::col32: return {kMxBlock, 1};
    case MxBlock::square32: break;
  }
  return {kMxBlock, kMxBlock};
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

constexpr uint32_t magnitude_bits(float x) { return std::bit_cast<uint32_t>(x) & 0x7FFFFFFF; }

// Largest magnitude of a block of fp32 values, as the bit pattern that scale_from_amax takes.
constexpr uint32_t block_amax_bits(const float* x, int64_t row_stride, int64_t rows, int64_t cols) {
  uint32_t amax = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const uint32_t m = magnitude_bits(x[r * row_stride + c]);
      amax = m > amax ? m : amax;
    }
  }
  return amax;
}

}  // namespace mxflash
