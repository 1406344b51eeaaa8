// MXFP8 results from fp32 values: the bytes that quantize() gives (rule rceil), 32 tokens x 32 channels at a time.
#pragma once

#include <mxflash/mx.h>

#include "mx/block.h"
#include "mx/scale_layout.h"

namespace mxflash {

struct MxOutput {
  uint8_t *data = nullptr, *scale = nullptr;  // null: none
  Dtype dtype = Dtype::e4m3;
  MxBlock block = MxBlock::square32;
  ScaleLayout layout = ScaleLayout::linear;
  int64_t token_stride = 0, head_stride = 0, padded_tokens = 0;
  int32_t dim = 0;

  static MxOutput of(const MxTensor& t, const Jagged& seq) {
    if (!t) return {};
    return {static_cast<uint8_t*>(t.data.data),
            static_cast<uint8_t*>(t.scale.data),
            t.data.dtype,
            t.block,
            t.layout,
            t.data.stride[0],
            t.data.stride[1],
            padded_token_count(t.data.shape[0], seq),
            int32_t(t.data.shape[2])};
  }
};

// By shuffles: with a reduction instruction, whose result is uniform, ptxas spills.
__device__ __forceinline__ uint32_t warp_max(uint32_t x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = max(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// A warp's patch: `rows` tokens (at most 32) from `token` on, on the padded axis from `padded_token` (a multiple of
// 32); channels from `channel` (likewise). value(row) is this lane's channel of a row.
template <class Value>
__device__ void quantize_patch(const MxOutput& out, int64_t token, int64_t padded_token, int rows, int64_t head,
                               int channel, Value&& value) {
  const int lane = int(threadIdx.x) % 32;
  const bool in_dim = channel + lane < out.dim;
  const Fp8Format f = fp8_format(out.dtype);
  uint32_t amax = 0;  // of this lane's scale: of all, of channel `lane`, or of row `lane`
#pragma unroll 1
  for (int r = 0; r < rows; ++r) {
    const uint32_t magnitude = in_dim ? magnitude_bits(value(r)) : 0;
    if (out.block != MxBlock::row32) {
      amax = max(amax, magnitude);
      continue;
    }
    const uint32_t most = warp_max(magnitude);
    if (lane == r) amax = most;
  }
  if (out.block == MxBlock::square32) amax = warp_max(amax);
  const uint8_t scale = scale_from_amax(amax, f, MxRule::rceil);
  const BlockShape shape = block_shape(out.block);
  const bool owns = out.block == MxBlock::square32 ? lane == 0 : out.block == MxBlock::col32 ? in_dim : lane < rows;
  if (owns && channel < out.dim) {
    const ScaleIndex at{head, (padded_token + (out.block == MxBlock::row32 ? lane : 0)) / shape.rows,
                        (channel + (out.block == MxBlock::col32 ? lane : 0)) / shape.cols};
    out.scale[scale_offset(out.block, out.layout, out.padded_tokens, out.dim, at)] = scale;
  }
  uint8_t* const to = out.data + token * out.token_stride + head * out.head_stride + channel + lane;
#pragma unroll 1
  for (int r = 0; r < rows; ++r) {
    const uint32_t of_row = __shfl_sync(~0u, uint32_t(scale), r);
    const uint8_t s = out.block == MxBlock::row32 ? uint8_t(of_row) : scale;
    if (in_dim) to[r * out.token_stride] = encode_mx(value(r), s, f);
  }
}

}  // namespace mxflash
