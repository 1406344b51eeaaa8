// MX results of attention from fp32 rows, where an epilogue does not write them: bytes are those of quantize (rule
// rceil), any element, block and layout.
//
// A CTA takes 32 tokens of the padded axis of one head, a warp 32 of its channels: one a lane, 32 tokens in registers.
// Tokens of no sequence count as zeros, which gives the scales there the zeros that the format asks for; their payload
// is clear_slack_rows' (row_output.cuh).
#include "attention/mx_rows.cuh"
#include "attention/padded_axis.cuh"
#include "mx/block.h"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

constexpr int kWarps = 4;
constexpr int kTokens = int(kMxBlock);

struct Params {
  const float* rows;
  PaddedAxis axis;
  MxTensor out;
  int64_t heads, dim;
  int32_t columns;  // of 32 channels, padding of atoms included
};

__global__ void __launch_bounds__(32 * kWarps) mx_rows_kernel(const __grid_constant__ Params p) {
  const int64_t head = blockIdx.y, row0 = int64_t(blockIdx.x) * kTokens;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const Sequence s = p.axis.owner(uint32_t(row0));
  const int64_t token0 = row0 - s.padded_start;
  const int count = int(min(int64_t(kTokens), max(int64_t(0), s.length - token0)));
  const Fp8Format format = fp8_format(p.out.data.dtype);
  const MxBlock block = p.out.block;
  uint8_t* const scales = static_cast<uint8_t*>(p.out.scale.data);
  uint8_t* const payload = static_cast<uint8_t*>(p.out.data.data) + head * p.out.data.stride[1];
  for (int column = warp; column < p.columns; column += kWarps) {
    const int64_t channel = column * kMxBlock + lane;
    const bool in_dim = channel < p.dim;
    float x[kTokens];
    uint32_t amax = 0, row_amax = 0;  // of the lane's channel; of its token
#pragma unroll
    for (int r = 0; r < kTokens; ++r) {
      x[r] = r < count && in_dim ? p.rows[((s.start + token0 + r) * p.heads + head) * p.dim + channel] : 0.0f;
      amax = max(amax, magnitude_bits(x[r]));
      if (block != MxBlock::row32) continue;
      const uint32_t m = __reduce_max_sync(~0u, magnitude_bits(x[r]));
      if (lane == r) row_amax = m;
    }
    if (block == MxBlock::square32) amax = __reduce_max_sync(~0u, amax);
    if (block == MxBlock::row32) amax = row_amax;
    const uint8_t scale = scale_from_amax(amax, format, MxRule::rceil);

    ScaleIndex at{head, row0 / kMxBlock, column};
    if (block == MxBlock::row32) at.row = row0 + lane;
    if (block == MxBlock::col32) at.col = channel;
    const bool stored = block == MxBlock::square32 ? lane == 0
                        : block == MxBlock::col32  ? in_dim || p.out.layout != ScaleLayout::linear
                                                   : true;
    if (stored) scales[scale_offset(block, p.out.layout, p.axis.rows, p.dim, at)] = scale;
#pragma unroll
    for (int r = 0; r < kTokens; ++r) {
      const uint8_t b = block == MxBlock::row32 ? uint8_t(__shfl_sync(~0u, uint32_t(scale), r)) : scale;
      if (r >= count || !in_dim) continue;
      payload[(s.start + token0 + r) * p.out.data.stride[0] + channel] = encode_mx(x[r], b, format);
    }
  }
}

}  // namespace

Status write_mx_rows(const Tensor& rows, const Jagged& seq, const MxTensor& out, Stream stream) {
  const int64_t tokens = rows.shape[0], heads = rows.shape[1], dim = rows.shape[2];
  const PaddedAxis axis = PaddedAxis::of(tokens, seq);
  const int64_t columns = ceil_div(dim, kMxBlock);
  const bool atoms = out.layout == ScaleLayout::atom128x4;
  const Params params{static_cast<const float*>(rows.data),
                      axis,
                      out,
                      heads,
                      dim,
                      int32_t(atoms ? round_up(columns, kAtomBlocks) : columns)};
  const Launch at{"attention: MX rows", dim3(uint32_t(axis.rows / kTokens), uint32_t(heads)), 32 * kWarps, 0, stream};
  return launch(at, mx_rows_kernel, params);
}

}  // namespace mxflash
