// The random-sign Hadamard rotation of q and k. Orthogonal, so q.k stays what it was, and every channel of the result
// mixes all channels of its group: outlier channels are spread over the group before they meet a shared scale.
#pragma once

#include <cstdint>

namespace mxflash {

inline constexpr int64_t kMaxRotation = 256;

// Channels are rotated in groups of the largest power of two that divides dim, at most 256: 128 -> 128, 96 -> 32.
constexpr int64_t rotation_group(int64_t dim) {
  const int64_t group = dim & -dim;
  return group < kMaxRotation ? group : kMaxRotation;
}

// Sign of channel c: a bit of splitmix64 (Steele, Lea, Flood 2014) applied to seed and channel.
constexpr bool rotation_flips(uint64_t seed, int64_t c) {
  uint64_t z = seed + (uint64_t(c) + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return ((z ^ (z >> 31)) & 1) != 0;
}

// 2^(-n/2) rounded to fp32, for n = log2(group): the norm of an unnormalised Hadamard row.
constexpr float hadamard_scale(int64_t group) {
  int n = 0;
  while ((int64_t(1) << n) < group) ++n;
  float scale = n % 2 ? 0.70710678118654752f : 1.0f;
  for (int i = 0; i < n / 2; ++i) scale *= 0.5f;
  return scale;
}

// In place, unnormalised, butterflies of stride 1, 2, 4, ...: this order is part of the format, results are bit-equal.
template <class T>
constexpr void hadamard(T* x, int64_t group) {
  for (int64_t stride = 1; stride < group; stride *= 2) {
    for (int64_t base = 0; base < group; base += 2 * stride) {
      for (int64_t i = base; i < base + stride; ++i) {
        const T a = x[i], b = x[i + stride];
        x[i] = a + b;
        x[i + stride] = a - b;
      }
    }
  }
}

// x <- R x for channels first_channel .. first_channel + group - 1.
template <class T>
constexpr void rotate(T* x, int64_t group, uint64_t seed, int64_t first_channel) {
  for (int64_t i = 0; i < group; ++i) {
    if (rotation_flips(seed, first_channel + i)) x[i] = -x[i];
  }
  hadamard(x, group);
  const T scale = T(hadamard_scale(group));
  for (int64_t i = 0; i < group; ++i) x[i] *= scale;
}

// x <- R^T x.
template <class T>
constexpr void rotate_back(T* x, int64_t group, uint64_t seed, int64_t first_channel) {
  hadamard(x, group);
  const T scale = T(hadamard_scale(group));
  for (int64_t i = 0; i < group; ++i) {
    x[i] *= scale;
    if (rotation_flips(seed, first_channel + i)) x[i] = -x[i];
  }
}

}  // namespace mxflash
