// How dK and dV leave the accumulators of the backward kernel on Hopper.
#pragma once

#include "attention/accumulators.cuh"
#include "attention/attention_bwd_sm90_kernel.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/warp.cuh"

namespace mxflash::bwd_sm90 {

// A thread's part: keys r and r + 8 of its warp's 16, channels 8 j + 2 c + e.
template <int kDim>
struct GradientWriter {
  const Params& p;
  const int warpgroup, warp;  // warp within the warpgroup
  int lane;
  const uint32_t scratch;  // shared memory: kScratchBytes for each warp

  // This thread's key `r`, in its sequence.
  __device__ __forceinline__ int32_t key_index(const Item& item, int r) const {
    return item.first_key + warpgroup * 64 + warp * 16 + ptx::lane_id() / 4 + 8 * r;
  }
  __device__ __forceinline__ int64_t key_offset(const Item& item, const Tensor& out, int32_t key) const {
    return (int64_t(item.key_start) + key) * out.stride[0] + item.kv_head * out.stride[1];
  }

  // x 2^exponent times the gradient's factor.
  __device__ __forceinline__ void write(float (&x)[kDim / 2], const Item& item, const Gradient& g, int exponent) {
    const float f = g.factor * power_of_two(exponent);
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) x[i] *= f;
    if (!g.wide) {
      write_narrow(x, item, g);
    } else if (g.out.dtype == Dtype::bf16) {
      write_wide<Dtype::bf16>(x, item, g);
    } else {
      write_wide<Dtype::f16>(x, item, g);
    }
  }
  // 64 channels at a time through the warp's scratch, whose rows are swizzled; a row leaves in pieces of 16 bytes.
  template <Dtype kDtype>
  __device__ __forceinline__ void write_wide(const float (&x)[kDim / 2], const Item& item, const Gradient& g) const {
    const int lane = ptx::lane_id();  // no register is kept for it
    const uint32_t base = scratch + (warpgroup * 4 + warp) * kScratchBytes;
    const uint32_t from = base + lane / 4 * 128 + 4 * (lane % 4), to = base + lane / 8 * 128;
    const int32_t key = item.first_key + warpgroup * 64 + warp * 16 + lane / 8;
    const int channel = 8 * (lane % 8);
    uint16_t* out = static_cast<uint16_t*>(g.out.data) + key_offset(item, g.out, key) + channel;
#pragma unroll
    for (int half = 0; half < kDim / 64; ++half) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int i = 4 * (8 * half + j) + 2 * r;
          ptx::store_shared(from + 8 * r * 128 + ((j ^ (lane / 4)) << 4), int(pack_half(kDtype, x[i], x[i + 1])));
        }
      }
      __syncwarp();
#pragma unroll
      for (int row = 0; row < 16; row += 4) {
        const float4 piece = ptx::load_shared<float4>(to + row * 128 + (((lane % 8) ^ (row % 8 + lane / 8)) << 4));
        if (key + row < item.seqlen_k && 64 * half + channel < g.dim) {
          *reinterpret_cast<float4*>(out + row * g.out.stride[0] + 64 * half) = piece;
        }
      }
      __syncwarp();
    }
  }
  __device__ __forceinline__ void write_narrow(const float (&x)[kDim / 2], const Item& item, const Gradient& g) const {
    const int c = ptx::lane_id() % 4;
    const bool fp32 = g.out.dtype == Dtype::f32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t key = key_index(item, r);
      if (key >= item.seqlen_k) continue;
      const int64_t row = key_offset(item, g.out, key) + 2 * c;
      if (fp32) {
        float* to = static_cast<float*>(g.out.data) + row;
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j) {
          if (8 * j + 2 * c < g.dim) to[8 * j] = x[4 * j + 2 * r], to[8 * j + 1] = x[4 * j + 2 * r + 1];
        }
      } else {
        uint16_t* to = static_cast<uint16_t*>(g.out.data) + row;
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j) {
          const uint32_t word = pack_half(g.out.dtype, x[4 * j + 2 * r], x[4 * j + 2 * r + 1]);
          if (8 * j + 2 * c < g.dim) to[8 * j] = uint16_t(word), to[8 * j + 1] = uint16_t(word >> 16);
        }
      }
    }
  }

  // Keys that no row sees.
  __device__ __forceinline__ void write_zeros(const Item& item) const {
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      const Gradient* g = &p.gradient[n];
#pragma unroll 1
      for (int r = 0; r < 2; ++r) {
        const int32_t key = key_index(item, r);
        if (key >= item.seqlen_k) continue;
        const int64_t row = key_offset(item, g->out, key);
#pragma unroll 1
        for (int channel = lane % 4; channel < g->dim; channel += 4) store_element(g->out, row + channel, 0);
      }
    }
  }
};

}  // namespace mxflash::bwd_sm90
