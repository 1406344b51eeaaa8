// The rotation of mx/rotation.h, undone in the accumulators of a product: a quad of threads holds a row.
#pragma once

#include "mx/rotation.h"

namespace mxflash {

inline constexpr int kMaxRotatedDim = 256;

// A bit for each channel: where the rotation with this seed changes signs.
struct RotationSigns {
  uint32_t word[kMaxRotatedDim / 32];
  static RotationSigns of(uint64_t seed) {
    RotationSigns signs{};
    for (int c = 0; c < kMaxRotatedDim; ++c) {
      if (rotation_flips(seed, c)) signs.word[c / 32] |= uint32_t(1) << (c % 32);
    }
    return signs;
  }
};

// Thread c of the quad: x[4 j + 2 r + e] is channel 8 j + 2 c + e of row r. `group` channels are rotated together, at
// least 8.
template <int kCount>
__device__ __forceinline__ void rotate_back_rows(float (&x)[kCount], int group, const RotationSigns& signs, int c) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const float a = x[i], b = x[i + 1];
    x[i] = a + b, x[i + 1] = a - b;
  }
#pragma unroll
  for (int bit = 1; bit <= 2; ++bit) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], bit);
      x[i] = c & bit ? other - x[i] : x[i] + other;
    }
  }
#pragma unroll
  for (int step = 4; step < kCount; step *= 2) {
    if (2 * step >= group) break;  // a register step of 4 is 8 channels
#pragma unroll
    for (int i = 0; i + step < kCount; ++i) {
      if (i & step) continue;
      const float a = x[i], b = x[i + step];
      x[i] = a + b, x[i + step] = a - b;
    }
  }
  const float norm = hadamard_scale(group);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int channel = 8 * (i >> 2) + (i & 1);

    const uint32_t own = signs.word[channel / 32] >> (2 * c);  // shifted once: constants are left for each channel
    x[i] *= own >> (channel % 32) & 1 ? -norm : norm;
  }
}

}  // namespace mxflash
