// Element access for reference backends: any float dtype, any strides, 64-bit offsets.
#pragma once

#include <mxflash/types.h>

#include "mx/float16.h"

namespace mxflash {

inline float load_float(const Tensor& t, int64_t offset) {
  switch (t.dtype) {
    case Dtype::bf16: return decode_bf16(static_cast<const uint16_t*>(t.data)[offset]);
    case Dtype::f16: return decode_f16(static_cast<const uint16_t*>(t.data)[offset]);
    default: return static_cast<const float*>(t.data)[offset];
  }
}

inline void store_float(const Tensor& t, int64_t offset, float x) {
  switch (t.dtype) {
    case Dtype::bf16: static_cast<uint16_t*>(t.data)[offset] = encode_bf16(x); break;
    case Dtype::f16: static_cast<uint16_t*>(t.data)[offset] = encode_f16(x); break;
    default: static_cast<float*>(t.data)[offset] = x;
  }
}

inline int64_t row_offset(const Tensor& t, int64_t token, int64_t head) {
  return token * t.stride[0] + head * t.stride[1];
}

// Zeroes the rows that belong to no sequence.
inline void clear_slack_rows(const Tensor& t, const Jagged& seq) {
  if (!seq.cu_seqlens) return;
  for (int64_t token = seq.cu_seqlens[seq.batch]; token < t.shape[0]; ++token) {
    for (int64_t head = 0; head < t.shape[1]; ++head) {
      for (int64_t c = 0; c < t.shape[2]; ++c) store_float(t, row_offset(t, token, head) + c, 0.0f);
    }
  }
}

}  // namespace mxflash
