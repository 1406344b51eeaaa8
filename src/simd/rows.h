// Rows of fp32 into and out of tensors of any float dtype.
#pragma once

#include <mxflash/types.h>

#include <cstdint>

#include "runtime/tensor_access.h"
#include "simd/vector.h"

MXFLASH_ISA_BEGIN

// n elements at an offset; t's last stride is 1.
inline void load_row(const Tensor& t, int64_t offset, float* x, int64_t n) {
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) {
    switch (t.dtype) {
      case Dtype::bf16: store(x + c, load_bf16(static_cast<const uint16_t*>(t.data) + offset + c)); break;
      case Dtype::f16: store(x + c, load_f16(static_cast<const uint16_t*>(t.data) + offset + c)); break;
      default: store(x + c, load(static_cast<const float*>(t.data) + offset + c));
    }
  }
  for (; c < n; ++c) x[c] = load_float(t, offset + c);
}

inline void store_row(const Tensor& t, int64_t offset, const float* x, int64_t n) {
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) {
    switch (t.dtype) {
      case Dtype::bf16: store_bf16(static_cast<uint16_t*>(t.data) + offset + c, load(x + c)); break;
      case Dtype::f16: store_f16(static_cast<uint16_t*>(t.data) + offset + c, load(x + c)); break;
      default: store(static_cast<float*>(t.data) + offset + c, load(x + c));
    }
  }
  for (; c < n; ++c) store_float(t, offset + c, x[c]);
}

MXFLASH_ISA_END
