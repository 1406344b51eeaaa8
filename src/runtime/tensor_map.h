// Tensor maps for the copy engine, made on the host for each call (ptx/tensor_copy.cuh).
#pragma once

#include <mxflash/types.h>

#include <array>

#include "ptx/descriptors.h"
#include "ptx/tensor_map.h"
#include "runtime/status.h"

namespace mxflash {

// A tensor of three axes, the contiguous one first, and the box of it that one copy takes.
struct TensorTile {
  void* base = nullptr;
  std::array<int64_t, 3> extent{};  // elements
  std::array<int64_t, 2> stride{};  // bytes, of axes 1 and 2
  std::array<int32_t, 3> box{};     // elements
  int32_t element_bytes = 1;        // 1, 2 or 4
  ptx::Swizzle swizzle = ptx::Swizzle::none;

  // A box of `rows` tokens of one head of [tokens, heads, dim]; axes: dim, heads, tokens. Elements behind dim are zero.
  static TensorTile of_rows(const Tensor& t, int32_t rows, int32_t columns, ptx::Swizzle swizzle) {
    const int64_t bytes = dtype_size(t.dtype);
    return {.base = t.data,
            .extent = {t.shape[2], t.shape[1], t.shape[0]},
            .stride = {t.stride[1] * bytes, t.stride[0] * bytes},
            .box = {columns, 1, rows},
            .element_bytes = int32_t(bytes),
            .swizzle = swizzle};
  }
};

// What the copy engine cannot take, with rule and value. `what` begins the message: "attention_fwd: sm100: k.data". An
// axis with one element may have any stride.
inline Status check_tensor_tile(const char* what, const TensorTile& t) {
  if (reinterpret_cast<uintptr_t>(t.base) % 16) {
    return unsupported("%s must be aligned to 16 bytes, got %p", what, t.base);
  }
  for (size_t i = 0; i < 2; ++i) {
    if (t.extent[i + 1] <= 1) continue;
    if (t.stride[i] <= 0 || t.stride[i] % 16 || t.stride[i] >= int64_t(1) << 40) {
      return unsupported("%s: strides of %s must be positive multiples of 16 bytes below 2^40, got %lld", what,
                         i == 0 ? "heads" : "tokens", static_cast<long long>(t.stride[i]));
    }
  }
  for (size_t i = 0; i < 3; ++i) {
    if (t.extent[i] >= int64_t(1) << 32) {
      return unsupported("%s: extents must be below 2^32, got %lld", what, static_cast<long long>(t.extent[i]));
    }
    if (t.box[i] < 1 || t.box[i] > 256) return invalid("%s: a box must have 1..256 elements, got %d", what, t.box[i]);
  }
  const int32_t row = t.box[0] * t.element_bytes;
  if (row % 16 || (t.swizzle != ptx::Swizzle::none && row > int32_t(ptx::swizzle_span(t.swizzle)))) {
    return invalid("%s: a box's row must be a multiple of 16 bytes within the swizzle's span, got %d", what, row);
  }
  return {};
}

// Checks it, and writes the map. Of a tensor without elements there is none: nothing is written.
Status make_tensor_map(const char* what, const TensorTile& tile, ptx::TensorMap& map);

}  // namespace mxflash
