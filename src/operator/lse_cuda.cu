// out = saved + softmax_scale * q . k_mean, a warp for each row of each head; rows without keys, and of no sequence,
// stay -inf. Reads q once: small beside what attention itself reads.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "operator/lse_cuda.h"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

constexpr int kWarps = 8;

__device__ float load(const Tensor& t, int64_t at) {
  switch (t.dtype) {
    case Dtype::bf16: return __bfloat162float(static_cast<const __nv_bfloat16*>(t.data)[at]);
    case Dtype::f16: return __half2float(static_cast<const __half*>(t.data)[at]);
    default: return static_cast<const float*>(t.data)[at];
  }
}

// The sequence of a row of lse, and its token on the axis of q. In 32 bits: attention takes no more tokens.
struct Place {
  int32_t sequence, token;
};
__device__ Place place_of(const WriteLse& a, int32_t row) {
  const AttentionShape& s = a.shape;
  if (const int32_t* cu = s.seq_q.cu_seqlens) {
    int32_t low = 0, high = int32_t(s.batch);  // the last that starts at or before the row
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (cu[middle] <= row ? low : high) = middle;
    }
    return {low, row};
  }
  // Equal lengths, or one query sequence for all.
  const int32_t sequence = row / a.length;
  return {sequence, s.shared_q ? row - sequence * a.length : row};
}

__global__ void __launch_bounds__(32 * kWarps) lse_kernel(const __grid_constant__ WriteLse a) {
  const AttentionShape& s = a.shape;
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const uint32_t head = blockIdx.y;
  if (row >= s.total_out) return;
  const float saved = static_cast<const float*>(a.saved.data)[head * a.saved.stride[0] + row];
  float shift = 0;
  if (a.k_mean && saved != -INFINITY) {
    const Place place = place_of(a, int32_t(row));
    const float* mean = static_cast<const float*>(a.k_mean.data) + place.sequence * a.k_mean.stride[0] +
                        head / uint32_t(s.group) * a.k_mean.stride[1];
    for (int64_t c = threadIdx.x % 32; c < s.head_dim; c += 32) {
      shift = fmaf(load(a.q, place.token * a.q.stride[0] + head * a.q.stride[1] + c * a.q.stride[2]), mean[c], shift);
    }
    for (int step = 16; step > 0; step /= 2) shift += __shfl_xor_sync(~0u, shift, step);
  }
  if (threadIdx.x % 32 == 0) {
    static_cast<float*>(a.out.data)[head * a.out.stride[0] + row] = fmaf(float(s.softmax_scale), shift, saved);
  }
}

}  // namespace

Status write_lse_cuda(WriteLse args, Stream stream) {
  args.length = int32_t(std::max<int64_t>(args.shape.total_out / args.shape.batch, 1));
  const DeviceGuard guard(args.q.device.index);
  MXFLASH_TRY(guard.status());
  const Launch at{"operator_fwd: lse",
                  dim3(uint32_t((args.shape.total_out + kWarps - 1) / kWarps), uint32_t(args.shape.num_heads_q)),
                  32 * kWarps, 0, stream};
  return launch(at, lse_kernel, args);
}

}  // namespace mxflash
