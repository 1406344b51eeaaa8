// Boxes (tests/tensor_copy_box.cuh), and what must come of them: in a test, given how to run the kernel.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "runtime/tensor_map.h"

namespace mxflash {

struct BoxCase {
  const char* name;
  int64_t tokens, heads, dim;
  int32_t rows, columns;
  ptx::Swizzle swizzle;
  int x, y, z;
};
inline constexpr BoxCase kBoxCases[] = {
    {"d 128", 300, 3, 128, 128, 128, ptx::Swizzle::b128, 0, 2, 128},
    {"the last tokens", 300, 3, 128, 128, 128, ptx::Swizzle::b128, 0, 1, 256},
    {"d 64", 200, 2, 64, 128, 64, ptx::Swizzle::b64, 0, 1, 64},
    {"d 96 in 128", 150, 2, 96, 64, 128, ptx::Swizzle::b128, 0, 0, 96},
    {"half of d 256", 130, 2, 256, 128, 128, ptx::Swizzle::b128, 128, 1, 2},
    {"no swizzle", 40, 1, 32, 32, 32, ptx::Swizzle::none, 0, 0, 8},
    {"span 32", 40, 4, 32, 32, 32, ptx::Swizzle::b32, 0, 3, 0},
    {"before the first token", 40, 2, 128, 32, 128, ptx::Swizzle::b128, 0, 0, -16},
};

inline std::vector<uint8_t> box_tensor(const BoxCase& c) {
  std::vector<uint8_t> t(size_t(c.tokens * c.heads * c.dim));
  uint32_t state = 1;
  for (uint8_t& x : t) x = uint8_t((state = state * 1664525 + 1013904223) >> 24);
  return t;
}

// memory: the address of the copy of box_tensor that the kernel sees.
inline TensorTile box_tile(const BoxCase& c, void* memory) {
  const Tensor t{.data = memory,
                 .dtype = Dtype::e4m3,
                 .rank = 3,
                 .shape = {c.tokens, c.heads, c.dim},
                 .stride = {c.heads * c.dim, c.dim, 1}};
  return TensorTile::of_rows(t, c.rows, c.columns, c.swizzle);
}

inline void expect_box(const BoxCase& c, const std::vector<uint8_t>& from, const std::vector<uint8_t>& image,
                       const std::vector<uint8_t>& to) {
  std::vector<uint8_t> want_image(size_t(c.rows * c.columns)), want_to(from.size(), 0xAA);
  for (int r = 0; r < c.rows; ++r) {
    for (int e = 0; e < c.columns; ++e) {
      const int64_t token = c.z + r, channel = c.x + e;
      if (token < 0 || token >= c.tokens || channel >= c.dim) continue;
      const auto at = size_t((token * c.heads + c.y) * c.dim + channel);
      want_image[ptx::swizzled(uint32_t(r * c.columns + e), c.swizzle)] = from[at];
      if (c.z >= 0) want_to[at] = from[at];
    }
  }
  EXPECT_EQ(image, want_image) << c.name;
  EXPECT_EQ(to, want_to) << c.name;
}

}  // namespace mxflash
