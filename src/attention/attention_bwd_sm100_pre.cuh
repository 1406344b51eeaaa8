// What the backward's kernels on Blackwell need of rows: lse', delta and P's exponents (RowStatistics).
//
//   pe = 8 + the least row_exponent of the visible rows of a block of 32
//   lse' = lse log2(e) - pe        delta = rowsum((out - v_mean) dout) - dlse, from the quantized dout
//
// A CTA takes 32 rows of the padded axis of one head, eight lanes a row, each kDim / 8 neighbouring channels of it, or,
// of 256 channels, 16 of each half.
// Rows without a token, or without a visible key, get lse' = +inf and delta = 0: P8 is zero there. Bound by memory:
// reads out and dout once.
#pragma once

#include "attention/attention_bwd_sm100.cuh"

namespace mxflash::bwd_sm100 {

inline constexpr int kPreRows = 32, kPreLanes = 8, kPreThreads = kPreRows * kPreLanes;

struct PreParams {
  Operand dout;
  Tensor out, lse, row_exponent, dlse, v_mean;  // the last two may be null
  bool wide;                                    // rows of out are aligned to 16 bytes
  Axis axis;                                    // of out
  int32_t batch, heads, group;
  RowStatistics* statistics;  // [heads][statistics_head]
  int64_t statistics_head;
};

// The last sequence that starts at or before a row of the padded axis.
__device__ __forceinline__ int owner_of(const PreParams& p, int64_t padded_row) {
  int first = 0;
  for (int end = p.batch; end - first > 1;) {
    const int middle = (first + end) / 2;
    (p.axis.rows(middle).padded <= padded_row ? first : end) = middle;
  }
  return first;
}

// kCount elements of out from `at` on.
template <int kCount>
__device__ __forceinline__ void load_out(const PreParams& p, int64_t at, float (&x)[kCount]) {
  if (p.out.dtype == Dtype::f32) {
    const float* from = static_cast<const float*>(p.out.data) + at;
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = from[i];
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(p.out.data) + at;
#pragma unroll
  for (int i = 0; i < kCount; i += 8) {
    uint32_t pair[4];
    if (p.wide) {
      const uint4 v = *reinterpret_cast<const uint4*>(from + i);
      pair[0] = v.x, pair[1] = v.y, pair[2] = v.z, pair[3] = v.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) pair[j] = from[i + 2 * j] | uint32_t(from[i + 2 * j + 1]) << 16;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool bf16 = p.out.dtype == Dtype::bf16;
      x[i + 2 * j] = bf16 ? std::bit_cast<float>(pair[j] << 16) : ptx::low_f16(pair[j]);
      x[i + 2 * j + 1] = bf16 ? std::bit_cast<float>(pair[j] & 0xFFFF0000u) : ptx::high_f16(pair[j]);
    }
  }
}

template <int kDim>
__device__ __forceinline__ void pre_body(const PreParams& p) {
  constexpr int kAtOnce = kDim < 128 ? kDim : 128, kChannels = kAtOnce / kPreLanes;
  ptx::griddepcontrol_launch_dependents();
  const int head = int(blockIdx.x) % p.heads;
  const int64_t first = int64_t(int(blockIdx.x) / p.heads) * kPreRows;  // on the padded axis
  const int sequence = owner_of(p, first);
  const Rows s = p.axis.rows(sequence);
  const int first_row = int(first) - s.padded, length = s.length;
  const auto lse_of = [&](int row) {
    return row < length ? static_cast<const float*>(p.lse.data)[head * p.lse.stride[0] + s.start + row] : -INFINITY;
  };
  // Every warp finds the block's exponent by itself.
  const int lane = int(threadIdx.x) % 32;
  uint32_t least = kMaxExponent;
  if (lse_of(first_row + lane) != -INFINITY) {
    const int64_t at = head * p.row_exponent.stride[0] + s.start + first_row + lane;
    least = min(least, uint32_t(static_cast<const uint8_t*>(p.row_exponent.data)[at]));
  }
  const uint32_t pe = 8 + kMaxExponent - __reduce_max_sync(~0u, kMaxExponent - least);

  const int in_block = int(threadIdx.x) / kPreLanes, row = first_row + in_block;
  const int channel = int(threadIdx.x) % kPreLanes * kChannels;
  const float lse = lse_of(row);
  const bool visible = lse != -INFINITY;
  // Of kChannels channels from `channel` on.
  const auto part_of = [&](int channel) {
    float x[kChannels];
    load_out(p, (s.start + row) * p.out.stride[0] + head * p.out.stride[1] + channel, x);
    if (p.v_mean) {
      const float* mean = static_cast<const float*>(p.v_mean.data) + sequence * p.v_mean.stride[0] +
                          head / p.group * p.v_mean.stride[1] + channel;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) x[i] -= mean[i];
    }
    const uint8_t* codes = p.dout.data + (s.start + row) * p.dout.token_stride + head * p.dout.head_stride + channel;
    float part = 0;
#pragma unroll
    for (int i = 0; i < kChannels; i += 4) {
      uint32_t low, high;
      if (p.dout.element == ptx::Fp8Code::e4m3) {
        ptx::unpack_e4m3(*reinterpret_cast<const uint32_t*>(codes + i), low, high);
      } else {
        ptx::unpack_e5m2(*reinterpret_cast<const uint32_t*>(codes + i), low, high);
      }
      part = fmaf(x[i], ptx::low_f16(low), part);
      part = fmaf(x[i + 1], ptx::high_f16(low), part);
      part = fmaf(x[i + 2], ptx::low_f16(high), part);
      part = fmaf(x[i + 3], ptx::high_f16(high), part);
    }
    const uint8_t scale =
        p.dout.scale[head * p.dout.scale_head + (s.padded + row) / 32 * p.dout.scale_columns + channel / 32];
    return part * decode_e8m0(scale);
  };
  float delta = 0;
  if (visible && channel < p.dout.dim) delta = part_of(channel);
  if (kDim > kAtOnce && visible && channel + kAtOnce < p.dout.dim) delta += part_of(channel + kAtOnce);
#pragma unroll
  for (int step = kPreLanes / 2; step > 0; step /= 2) delta += __shfl_xor_sync(~0u, delta, step);
  if (int(threadIdx.x) % kPreLanes != 0) return;
  if (p.dlse && visible) delta -= static_cast<const float*>(p.dlse.data)[head * p.dlse.stride[0] + s.start + row];
  RowStatistics& to = p.statistics[head * p.statistics_head + first / kTileRows];
  const int at = int(first % kTileRows) + in_block;
  to.shift[at] = visible ? fmaf(-lse, kLog2e, float(pe)) : -INFINITY;
  to.minus_delta[at] = -delta;
  if (in_block == 0) to.exponent[at / kPreRows] = pe;
}

}  // namespace mxflash::bwd_sm100
