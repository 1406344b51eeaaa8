// rmsnorm_quantize on Hopper, bit-equal to ref.
//
//   h = in + residual, rounded to residual's dtype and written back     (or h = in)
//   rstd = 1 / sqrt(sum(h^2) / dim + eps)     y = BF16(h * rstd * weight)     out = MX(y)
//
// Every operation is rounded by itself (the file is compiled without FMAs), and the sum is that of rmsnorm_sum.h: 1024
// running sums, folded in halves.
//
// norm_rows: the common case, one pass over memory. BF16 in (and residual), dim a multiple of 8 up to 16384, rows
// aligned, blocks square32 or row32.
//
//   Rows. A row belongs to one warp up to dim 4096, to 2 up to 8192, to 4 up to 16384, and stays in their registers
//   between the sum and the normalisation: chunks of 256 elements, of which a lane has 8 neighbours, 16 bytes. Chunk q
//   has running sums 256 (q % 4) ..., so a lane keeps its own: the folds by 512 and 256 add registers (or go through
//   shared memory where several warps have the row), the others are shuffles.
//
//   Loads. CTAs stay, and take every n-th part of a stripe, where n is their number: while a row is normalised, the
//   copy engine already brings the next one into its slot in shared memory. That keeps 128 KB of loads in flight on an
//   SM whatever its warps do; loads into registers would stop while the registers are at work.
//
//   square32 needs 32 rows at once, 256 KB at dim 4096, which neither registers nor shared memory of one SM can hold
//   next to the rows to come. So a cluster of 2 CTAs (4 from dim 4104, 8 from 8200 on) takes a stripe, 16 (8, 4) rows
//   each, and its CTAs tell each other the scales of their parts of blocks, of which the largest is the block's: a byte
//   a block, through distributed shared memory. A second read from L2 instead would be 134 MB more over the way from L2
//   at 16384 x 4096.
//
//   Memory of a CTA at dim 4096: slots 16 x 8 KB, the weight as fp32 16 KB, scales 3 KB; one CTA an SM.
//   Bytes: 2 of `in` and 1 of payload an element, and the scales: 201 MB at 16384 x 4096. About 15 instructions an
//   element, so that the issue slots are three quarters full at the speed of memory.
//
// norm_stripes: everything else. A CTA takes a stripe, a warp a row for the sum and then 32 x 32 elements for the
// blocks; the second read of h finds it in L2.
#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <atomic>

#include "ptx/bulk_copy.cuh"
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/warp.cuh"
#include "rmsnorm/rmsnorm.h"
#include "rmsnorm/rmsnorm_cuda.cuh"
#include "rmsnorm/rmsnorm_sum.h"
#include "runtime/cuda.h"
#include "runtime/cuda_backend.h"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

constexpr const char* kWhat = "rmsnorm_quantize: sm90";

// ---- norm_rows --------------------------------------------------------------------------------------------------

constexpr int kVector = 8;                  // elements of a lane in a chunk
constexpr int kChunk = kWarp * kVector;     // elements
constexpr int kQuads = kRmsLanes / kChunk;  // chunks in one round of the running sums
constexpr int kGroup = kMxBlock / kVector;  // lanes that share a block

template <int kChunks_, int kWarps_>
struct RowPlan {
  static constexpr int kChunks = kChunks_;  // of one warp: 4, 8, 12 or 16
  static constexpr int kWarps = kWarps_;    // of one row: 1, 2 or 4
  static constexpr int kMaxDim = kChunks * kWarps * kChunk;
  static constexpr int kRows = 16 / kWarps;  // of a CTA at a time
  static constexpr int kParts = int(kMxBlock) / kRows;
  static constexpr int kThreads = kRows * kWarps * kWarp;
  static constexpr int kCtas = kChunks > 4 ? 1 : 2;  // that an SM has room for
  static constexpr int kBlocks = kChunks / kGroup;   // whose scale a lane finds
  static constexpr int kWords = kWarps * kWarp;      // of scale bytes of a row: one a lane

  struct Shared {
    uint4 slot[kRows][kMaxDim / kVector];                   // rows on their way
    float4 weight[2][kMaxDim / kVector];                    // lower and upper half of every 8
    float4 sums[kWarps > 1 ? kRows : 1][kWarps][2][kWarp];  // of the warps of a row
    uint32_t row_scales[kRows][kWords];                     // of a row's parts of blocks
    uint32_t part_scales[2][kParts][kWords];                // of the cluster's CTAs, written by them
    uint64_t full[kRows];                                   // the slot's row has arrived
    uint64_t told[2];                                       // part_scales has arrived
  };
};

__device__ inline __nv_bfloat162 as_pair(uint32_t bits) { return reinterpret_cast<const __nv_bfloat162&>(bits); }
__device__ inline uint32_t mul_pair(uint32_t a, uint32_t b) {
  const __nv_bfloat162 product = __hmul2(as_pair(a), as_pair(b));
  return reinterpret_cast<const uint32_t&>(product);
}

__device__ inline uint32_t add_rounded(uint32_t a, uint32_t b) {
  return pack_bf16(low_half(a) + low_half(b), high_half(a) + high_half(b));
}
__device__ inline uint4 add_rounded(uint4 a, uint4 b) {
  return {add_rounded(a.x, b.x), add_rounded(a.y, b.y), add_rounded(a.z, b.z), add_rounded(a.w, b.w)};
}

// One running sum for each of a lane's 8 elements of a chunk.
struct Sums {
  float at[kVector];

  __device__ void add_squares(uint4 x) {
    const uint32_t pair[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = low_half(pair[i]), high = high_half(pair[i]);
      at[2 * i] += low * low;
      at[2 * i + 1] += high * high;
    }
  }
  __device__ Sums operator+(const Sums& other) const {
    Sums sum;
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum.at[e] = at[e] + other.at[e];
    return sum;
  }
};

// The running sums of every `step`-th of a warp's chunks, from `first` on.
template <int kChunks>
__device__ inline Sums chunk_sums(const uint4 (&x)[kChunks], int first, int step) {
  Sums sums{};
#pragma unroll
  for (int i = first; i < kChunks; i += step) sums.add_squares(x[i]);
  return sums;
}

// Folds the last 256 running sums of a row, 8 on each lane, to one. A lane gives away half of what it has in each of
// the first three folds, so that they take 7 shuffles and not 24; whichever lane adds, it adds the same two numbers.
__device__ inline float fold_lanes(const Sums& sums, int lane) {
  float four[4], two[2];
  const bool l16 = lane & 16, l8 = lane & 8, l4 = lane & 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float keep = l16 ? sums.at[i + 4] : sums.at[i], give = l16 ? sums.at[i] : sums.at[i + 4];
    four[i] = keep + __shfl_xor_sync(kFullWarp, give, 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float keep = l8 ? four[i + 2] : four[i], give = l8 ? four[i] : four[i + 2];
    two[i] = keep + __shfl_xor_sync(kFullWarp, give, 8);
  }
  const float keep = l4 ? two[1] : two[0], give = l4 ? two[0] : two[1];
  float sum = keep + __shfl_xor_sync(kFullWarp, give, 4);
  sum += __shfl_xor_sync(kFullWarp, sum, 2);
  sum += __shfl_xor_sync(kFullWarp, sum, 1);
  // A lane has the element 4 l16 + 2 l8 + l4 of the 8 now.
  sum += __shfl_xor_sync(kFullWarp, sum, 16);
  sum += __shfl_xor_sync(kFullWarp, sum, 8);
  return sum + __shfl_xor_sync(kFullWarp, sum, 4);
}

// Sum of squares of the row that this lane's warp, or warps, hold.
template <class Plan>
__device__ inline float row_sum(typename Plan::Shared& shared, const uint4 (&x)[Plan::kChunks], int row, int part,
                                int lane) {
  if constexpr (Plan::kWarps == 1) {
    const Sums even = chunk_sums(x, 0, kQuads) + chunk_sums(x, 2, kQuads);
    return fold_lanes(even + (chunk_sums(x, 1, kQuads) + chunk_sums(x, 3, kQuads)), lane);
  } else {
    Sums sums = chunk_sums(x, 0, kQuads / Plan::kWarps);
    if constexpr (Plan::kWarps == 2) sums = sums + chunk_sums(x, 1, 2);  // running sums 512 apart
    float4(&mine)[2][kWarp] = shared.sums[row][part];
    mine[0][lane] = {sums.at[0], sums.at[1], sums.at[2], sums.at[3]};
    mine[1][lane] = {sums.at[4], sums.at[5], sums.at[6], sums.at[7]};
    __syncthreads();
    const auto of = [&](int w) -> Sums {
      const float4 low = shared.sums[row][w][0][lane], high = shared.sums[row][w][1][lane];
      return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    };
    // Whichever warp adds, it adds the same two numbers: those 512 apart, then those 256 apart.
    if constexpr (Plan::kWarps == 2) return fold_lanes(sums + of(part ^ 1), lane);
    if constexpr (Plan::kWarps == 4) return fold_lanes((sums + of(part ^ 2)) + (of(part ^ 1) + of(part ^ 3)), lane);
  }
}

__device__ inline uint32_t normalize_pair(uint32_t h, float rstd, float weight_low, float weight_high) {
  return pack_bf16(low_half(h) * rstd * weight_low, high_half(h) * rstd * weight_high);
}

// Largest magnitudes of the 4 pairs of a lane's chunk, with any sign.
__device__ inline uint32_t max_magnitude(uint4 y) {
  return ptx::max_magnitude_bf16x2(ptx::max_magnitude_bf16x2(y.x, y.y), ptx::max_magnitude_bf16x2(y.z, y.w));
}

// A block is 4 lanes' of a chunk. These 4 share four chunks, a quarter of a warp's chunks apart, in that each gives
// away half of what it has twice: the magnitude, as BF16 bits, of the block of the chunk_of(lane)-th of the four.
__device__ inline uint32_t max_of_block(const uint32_t (&pairs)[kGroup], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  uint32_t half[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t keep = odd ? pairs[i + 2] : pairs[i], give = odd ? pairs[i] : pairs[i + 2];
    half[i] = ptx::max_magnitude_bf16x2(keep, __shfl_xor_sync(kFullWarp, give, 1));
  }
  const uint32_t keep = upper ? half[1] : half[0], give = upper ? half[0] : half[1];
  const uint32_t pair = ptx::max_magnitude_bf16x2(keep, __shfl_xor_sync(kFullWarp, give, 2)) & 0x7FFF7FFF;
  return max(pair & 0xFFFF, pair >> 16);
}
__device__ constexpr uint32_t chunk_of(uint32_t lane) { return (lane & 1) * 2 + (lane >> 1 & 1); }

// Payload of the chunks of one warp. scale[q] has the scale bytes of a quarter of the chunks; `stride` is the distance
// of chunks in elements.
template <Dtype kElement, int kChunks>
__device__ inline void store_payload(uint8_t* out, const uint4 (&y)[kChunks], const uint32_t (&scale)[kGroup],
                                     int stride, int cols) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const uint32_t b = scale[i / (kChunks / kGroup)] >> (8 * (i % (kChunks / kGroup))) & 0xFF;
    const uint32_t factor = __byte_perm(factor_bf16(b), 0, 0x1010);
    const uint32_t pair[4] = {mul_pair(y[i].x, factor), mul_pair(y[i].y, factor), mul_pair(y[i].z, factor),
                              mul_pair(y[i].w, factor)};
    uint2 codes = {pack_fp8<kElement>(low_half(pair[0]), high_half(pair[0]), low_half(pair[1]), high_half(pair[1])),
                   pack_fp8<kElement>(low_half(pair[2]), high_half(pair[2]), low_half(pair[3]), high_half(pair[3]))};
    if (b == kE8m0Nan) codes = {kFp8Nan * 0x01010101u, kFp8Nan * 0x01010101u};
    if (i * stride < cols) *reinterpret_cast<uint2*>(out + i * stride) = codes;
  }
}

// grid: parts of stripes; a cluster's CTAs have the parts of one stripe.
template <class Plan, bool kSquare>
__global__ void __cluster_dims__(kSquare ? Plan::kParts : 1, 1, 1) __launch_bounds__(Plan::kThreads, Plan::kCtas)
    norm_rows(const __grid_constant__ RmsnormQuantize args, const __grid_constant__ StripeGrid grid) {
  constexpr int kChunks = Plan::kChunks, kWarps = Plan::kWarps, kParts = Plan::kParts, kBlocks = Plan::kBlocks;
  constexpr int kStride = kWarps * kChunk;  // from a warp's chunk to its next, in elements and in vectors
  constexpr int kVectors = kStride / kVector, kWeightHalf = Plan::kMaxDim / kVector;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Plan::Shared*>(memory);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int row = warp / kWarps, warp_of_row = warp % kWarps;  // of the CTA
  const int dim = int(args.in.shape[1]);
  // Of this lane: its first column, the vectors there, and how many columns are left from there on.
  const int first_col = warp_of_row * kChunk + lane * kVector, cols = dim - first_col;
  const uint4* const slot = shared.slot[row] + first_col / kVector;
  const float4* const weights = shared.weight[0] + first_col / kVector;

  const int parts = int(grid.count) * kParts;
  // This warp's row of a part; -1 for padding.
  const auto row_of = [&](int part) -> int {
    if (part >= parts) return -1;
    const auto s = stripe_at(args, grid, part / kParts);
    const int r = part % kParts * Plan::kRows + row;
    return r < s.rows ? s.row + r : -1;
  };
  const uint32_t full = ptx::shared_address(&shared.full[row]);
  static_assert(sizeof(typename Plan::Shared) <= 227 * 1024);
  const auto request = [&](int at) {
    if (at < 0 || warp_of_row != 0 || lane != 0) return;
    ptx::mbarrier_arrive_expect_tx(full, uint32_t(dim) * 2);
    ptx::bulk_load(ptx::shared_address(shared.slot[row]), element_at<uint16_t>(args.in, at, 0), uint32_t(dim) * 2,
                   full);
  };
  if (warp_of_row == 0 && lane == 0) ptx::mbarrier_init(full, 1);
  if (threadIdx.x < 2) ptx::mbarrier_init(ptx::shared_address(&shared.told[threadIdx.x]), 1);
  ptx::fence_mbarrier_init();
  // What is behind the end of a row stays zero.
  for (int i = dim / kVector + warp_of_row * kWarp + lane; i < Plan::kMaxDim / kVector; i += kWarps * kWarp) {
    shared.slot[row][i] = {};
  }
  int now = row_of(int(blockIdx.x));
  request(now);
  for (int c = threadIdx.x; c < Plan::kMaxDim; c += Plan::kThreads) {
    reinterpret_cast<float*>(&shared.weight[c / 4 % 2][c / kVector])[c % 4] =
        c < dim ? load_float(args.weight, 0, c) : 0.0f;
  }
  if constexpr (kSquare) {
    cooperative_groups::this_cluster().sync();  // the others' barriers are ready too
  } else {
    __syncthreads();
  }

  const Fp8Format format = fp8_format(args.out.data.dtype);
  constexpr uint32_t kRowsOfAtom = kAtomRows, kBlocksOfAtom = kAtomBlocks, kBlock = kMxBlock;  // in 32 bits
  const bool linear = args.out.layout == ScaleLayout::linear;
  // Blocks of a row, and how many scale bytes it has.
  const uint32_t filled = (uint32_t(dim) + kBlock - 1) / kBlock;
  const uint32_t blocks = linear ? filled : (filled + kBlocksOfAtom - 1) / kBlocksOfAtom * kBlocksOfAtom;
  uint32_t phase = 0;  // bit 0: of the slot; bits 1 and 2: which part_scales, and its phase
  for (int part = int(blockIdx.x); part < parts; part += int(gridDim.x)) {
    const bool exists = now >= 0;
    if constexpr (kSquare) {
      if (threadIdx.x == 0) {
        ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&shared.told[phase >> 1 & 1]), sizeof shared.part_scales[0]);
      }
    }
    uint4 x[kChunks];
    if (exists) {
      ptx::mbarrier_wait(full, phase & 1);
      phase ^= 1;
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) x[i] = slot[i * kVectors];

    // The row is in registers, and its slot free for the next; with several warps only after their barrier.
    const int next = row_of(part + int(gridDim.x));
    const auto request_next = [&] {
      ptx::fence_proxy_async();
      __syncwarp();
      request(next);
    };
    if constexpr (kWarps == 1) request_next();

    if (args.residual && exists) {
      auto* residual = element_at<uint16_t>(args.residual, now, first_col);
#pragma unroll
      for (int i0 = 0; i0 < kChunks; i0 += 4) {
        uint4 r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int c = (i0 + i) * kStride;
          r[i] = c < cols ? *reinterpret_cast<const uint4*>(residual + c) : uint4{};
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int c = (i0 + i) * kStride;
          x[i0 + i] = add_rounded(x[i0 + i], r[i]);
          if (c < cols) *reinterpret_cast<uint4*>(residual + c) = x[i0 + i];
        }
      }
    }

    const float rstd = rstd_of(row_sum<Plan>(shared, x, row, warp_of_row, lane), dim, args.eps);
    if constexpr (kWarps > 1) request_next();
    if (args.rstd && exists && warp_of_row == 0 && lane == 0) static_cast<float*>(args.rstd.data)[now] = rstd;

    uint32_t lane_here = uint32_t(lane);
    ptx::recompute_from(lane_here);  // indices of blocks are not worth a register all the time
    const auto block_at = [&](int b) -> uint32_t {
      const uint32_t chunk = (chunk_of(lane_here) * kBlocks + b) * kWarps + warp_of_row;
      return chunk * (kWarp / kGroup) + lane_here / kGroup;
    };
    uint32_t scales = 0;  // a byte for each of this lane's blocks
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      uint32_t pairs[kGroup];
#pragma unroll
      for (int q = 0; q < kGroup; ++q) {
        const int i = q * kBlocks + b;
        ptx::recompute_from(x[i]);  // 64 registers of packed elements stay, not 128 of unpacked ones
        const float4 low = weights[i * kVectors], high = weights[kWeightHalf + i * kVectors];
        x[i] = {normalize_pair(x[i].x, rstd, low.x, low.y), normalize_pair(x[i].y, rstd, low.z, low.w),
                normalize_pair(x[i].z, rstd, high.x, high.y), normalize_pair(x[i].w, rstd, high.z, high.w)};
        pairs[q] = max_magnitude(x[i]);
      }
      const uint32_t amax = max_of_block(pairs, lane);
      // In a block at the edge, zeros times an infinite rstd are NaN, but only where all the others are not finite.
      if (exists && block_at(b) < filled) scales |= scale_from_amax(amax << 16, format, args.rule) << (8 * b);
    }
    if (args.y && exists) {
      auto* y = element_at<uint16_t>(args.y, now, first_col);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (i * kStride < cols) *reinterpret_cast<uint4*>(y + i * kStride) = x[i];
      }
    }

    if constexpr (kSquare) {
      // The largest magnitude has the largest scale, so the bytes can stand for it.
      shared.row_scales[row][warp_of_row * kWarp + lane] = scales;
      __syncthreads();
      // part_scales alternates: a CTA tells the next but one scales only after it has been told the next ones by all,
      // and these have read the present ones by then.
      const uint32_t told = ptx::shared_address(&shared.told[phase >> 1 & 1]);
      auto& part_scales = shared.part_scales[phase >> 1 & 1];
      if (threadIdx.x < Plan::kWords) {
        uint32_t largest = 0;
#pragma unroll
        for (int r = 0; r < Plan::kRows; ++r) largest = __vmaxu4(largest, shared.row_scales[r][threadIdx.x]);
        const uint32_t to = ptx::shared_address(&part_scales[part % kParts][threadIdx.x]);
#pragma unroll 1
        for (int rank = 0; rank < kParts; ++rank) {
          ptx::store_async(ptx::map_to_rank(to, rank), largest, ptx::map_to_rank(told, rank));
        }
      }
      ptx::mbarrier_wait(told, phase >> 2 & 1);
      phase += 2;
#pragma unroll
      for (int r = 0; r < kParts; ++r) scales = __vmaxu4(scales, part_scales[r][warp_of_row * kWarp + lane]);
    }

    // scale_offset: atoms of 128 rows follow one another, and in them the atoms of 4 blocks.
    const uint32_t scale_row = kSquare ? part / kParts : part * Plan::kRows + row;
    const uint32_t row_in_atom = linear ? 0 : scale_row % kRowsOfAtom;
    uint8_t* const row_scales = static_cast<uint8_t*>(args.out.scale.data) +
                                uint64_t(scale_row - row_in_atom) * blocks + atom_byte(row_in_atom, 0);
    const uint32_t step = linear ? kBlocksOfAtom : uint32_t(kAtomBytes);  // from 4 blocks to 4
    if (!kSquare || (part % kParts == 0 && row == 0)) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const uint32_t block = block_at(b);
        const uint32_t at = block / kBlocksOfAtom * step + block % kBlocksOfAtom;
        if (block < blocks) row_scales[at] = uint8_t(scales >> (8 * b));
      }
    }
    uint32_t scale[kGroup];
#pragma unroll
    for (int q = 0; q < kGroup; ++q) {
      scale[q] = __shfl_sync(kFullWarp, scales, lane / kGroup * kGroup + int(chunk_of(uint32_t(q))));
    }
    if (exists) {
      auto* out = element_at<uint8_t>(args.out.data, now, first_col);
      if (args.out.data.dtype == Dtype::e4m3) {
        store_payload<Dtype::e4m3>(out, x, scale, kStride, cols);
      } else {
        store_payload<Dtype::e5m2>(out, x, scale, kStride, cols);
      }
    }
    if constexpr (kWarps > 1 && !kSquare) __syncthreads();  // all have read `sums`
    now = next;
  }
  clear_slack_rows(args);
}

// CTAs of this kernel that run at the same time on the current device: clusters that do not fit would start when the
// others have done their share.
template <class Plan, bool kSquare>
Status resident_ctas(int device, int& count) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // 0: not yet asked
  count = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (count > 0) return {};
  auto* const kernel = norm_rows<Plan, kSquare>;
  constexpr int kBytes = sizeof(typename Plan::Shared);
  MXFLASH_TRY(cuda_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), kWhat));
  if constexpr (kSquare) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {Plan::kParts, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = Plan::kParts;
    config.blockDim = Plan::kThreads;
    config.dynamicSmemBytes = kBytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    MXFLASH_TRY(cuda_status(cudaOccupancyMaxActiveClusters(&count, kernel, &config), kWhat));
    count = std::max(count, 1) * Plan::kParts;
  } else {
    MXFLASH_TRY(cuda_status(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, Plan::kThreads, size_t(kBytes)), kWhat));
    count = std::max(count, 1) * multiprocessor_count();
  }
  if (device < kDevices) known[device].store(count, std::memory_order_relaxed);
  return {};
}

template <class Plan, bool kSquare>
Status launch_rows(const RmsnormQuantize& args, Stream stream) {
  const StripeGrid grid = StripeGrid::of(args);
  int ctas = 0;
  MXFLASH_TRY((resident_ctas<Plan, kSquare>(args.in.device.index, ctas)));
  return launch({.what = kWhat,
                 .grid = unsigned(std::min<int64_t>(grid.count * Plan::kParts, ctas)),
                 .block = Plan::kThreads,
                 .shared_bytes = sizeof(typename Plan::Shared),
                 .stream = stream},
                norm_rows<Plan, kSquare>, args, grid);
}

template <class Plan>
Status launch_rows(const RmsnormQuantize& args, Stream stream) {
  return args.out.block == MxBlock::square32 ? launch_rows<Plan, true>(args, stream)
                                             : launch_rows<Plan, false>(args, stream);
}

Status launch_rows(const RmsnormQuantize& args, Stream stream) {
  const int64_t dim = args.in.shape[1];
  if (dim <= 1024) return launch_rows<RowPlan<4, 1>>(args, stream);
  if (dim <= 2048) return launch_rows<RowPlan<8, 1>>(args, stream);
  if (dim <= 3072) return launch_rows<RowPlan<12, 1>>(args, stream);
  if (dim <= 4096) return launch_rows<RowPlan<16, 1>>(args, stream);
  if (dim <= 6144) return launch_rows<RowPlan<12, 2>>(args, stream);
  if (dim <= 8192) return launch_rows<RowPlan<16, 2>>(args, stream);
  if (dim <= 12288) return launch_rows<RowPlan<12, 4>>(args, stream);
  return launch_rows<RowPlan<16, 4>>(args, stream);
}

bool is_common(const RmsnormQuantize& args) {
  const int64_t dim = args.in.shape[1];
  const auto is_vectors = [](const Tensor& t) { return t.dtype == Dtype::bf16 && rows_aligned(t, 16); };
  return args.out.block != MxBlock::col32 && dim % kVector == 0 && dim <= RowPlan<16, 4>::kMaxDim &&
         StripeGrid::of(args).count <= INT32_MAX / kMxBlock &&  // rows and parts are counted in 32 bits
         is_vectors(args.in) && (!args.residual || is_vectors(args.residual)) && (!args.y || is_vectors(args.y)) &&
         rows_aligned(args.out.data, 8);
}

// ---- norm_stripes -----------------------------------------------------------------------------------------------

constexpr int kStripeWarps = 8;

template <Dtype kDtype>
struct Stored {
  using Type = uint16_t;
  __device__ static float decode(Type bits) { return kDtype == Dtype::bf16 ? decode_bf16(bits) : decode_f16(bits); }
  __device__ static Type encode(float x) { return kDtype == Dtype::bf16 ? encode_bf16(x) : encode_f16(x); }
};
template <>
struct Stored<Dtype::f32> {
  using Type = float;
  __device__ static float decode(Type x) { return x; }
  __device__ static Type encode(float x) { return x; }
};

// Sum of squares of a row by one warp: lane l has the running sums l, l + 32, ... With a residual, h is stored on the
// way.
template <Dtype kH>
__device__ inline float row_sum(const RmsnormQuantize& args, int64_t row, int lane) {
  using H = Stored<kH>;
  constexpr int kSums = int(kRmsLanes) / kWarp;
  const int64_t dim = args.in.shape[1];
  float sums[kSums] = {};
  auto* const h_row = args.residual ? element_at<typename H::Type>(args.residual, row, 0)
                                    : element_at<typename H::Type>(args.in, row, 0);
  for (int64_t c0 = 0; c0 < dim; c0 += kRmsLanes) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int64_t c = c0 + i * kWarp + lane;
      if (c >= dim) continue;
      typename H::Type stored = h_row[c];
      if (args.residual) {
        stored = H::encode(load_float(args.in, row, c) + H::decode(stored));
        h_row[c] = stored;
      }
      const float h = H::decode(stored);
      sums[i] += h * h;
    }
  }
#pragma unroll
  for (int half = kSums / 2; half >= 1; half /= 2) {
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {  // a constant, so that it unrolls and sums stay in registers
      if (i < half) sums[i] += sums[i + half];
    }
  }
  float sum = sums[0];
#pragma unroll
  for (int half = kWarp / 2; half >= 1; half /= 2) sum += __shfl_xor_sync(kFullWarp, sum, half);
  return sum;
}

__device__ inline uint8_t encode_element(float y, uint8_t scale, Dtype element) {
  if (scale == kE8m0Nan) return kFp8Nan;
  const float x = y * __uint_as_float(factor_bf16(scale) << 16);
  return uint8_t(element == Dtype::e4m3 ? pack_fp8<Dtype::e4m3>(x, 0, 0, 0) : pack_fp8<Dtype::e5m2>(x, 0, 0, 0));
}

// kH: dtype of h. grid: stripes, by strides.
template <Dtype kH>
__global__ void __launch_bounds__(kStripeWarps* kWarp, 2)
    norm_stripes(const __grid_constant__ RmsnormQuantize args, const __grid_constant__ StripeGrid grid) {
  using H = Stored<kH>;
  __shared__ float rstd[kMxBlock];
  __shared__ uint16_t tile[kStripeWarps][kMxBlock][kWarp];  // y; each lane reads what it wrote
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t dim = args.in.shape[1], padded_tokens = grid.count * kMxBlock;
  auto* const h = static_cast<typename H::Type*>(args.residual ? args.residual.data : args.in.data);
  const int64_t h_stride = args.residual ? args.residual.stride[0] : args.in.stride[0];
  const MxTensor& out = args.out;
  const Dtype element = out.data.dtype;
  const Fp8Format format = fp8_format(element);
  auto* const scales = static_cast<uint8_t*>(out.scale.data);
  // Blocks of 32 columns, with those of padding that atoms have.
  const int64_t blocks =
      out.layout == ScaleLayout::linear ? ceil_div(dim, kMxBlock) : round_up(ceil_div(dim, kMxBlock), kAtomBlocks);
  for (int64_t stripe = blockIdx.x; stripe < grid.count; stripe += gridDim.x) {
    const auto s = stripe_at(args, grid, stripe);
    for (int r = warp; r < s.rows; r += kStripeWarps) {
      const float value = rstd_of(row_sum<kH>(args, s.row + r, lane), dim, args.eps);
      if (lane != 0) continue;
      rstd[r] = value;
      if (args.rstd) static_cast<float*>(args.rstd.data)[s.row + r] = value;
    }
    __syncthreads();
    for (int64_t block = warp; block < blocks; block += kStripeWarps) {
      const int64_t c = block * kMxBlock + lane;
      const bool inside = c < dim;
      const float weight = inside ? load_float(args.weight, 0, c) : 0.0f;
      uint32_t column_max = 0, own_row_max = 0;  // of row `lane`
#pragma unroll 8
      for (int r = 0; r < kMxBlock; ++r) {
        uint16_t rounded = 0;
        if (inside && r < s.rows) {
          rounded = encode_bf16(H::decode(h[(s.row + r) * h_stride + c]) * rstd[r] * weight);
          if (args.y) *element_at<uint16_t>(args.y, s.row + r, c) = rounded;
        }
        tile[warp][r][lane] = rounded;
        const uint32_t magnitude = magnitude_bits(decode_bf16(rounded));
        column_max = max(column_max, magnitude);
        if (out.block != MxBlock::row32) continue;
        const uint32_t row_max = __reduce_max_sync(kFullWarp, magnitude);
        if (r == lane) own_row_max = row_max;
      }

      ScaleIndex index{0, stripe, block};
      uint32_t amax = column_max;
      bool stores_scale = true;
      switch (out.block) {
        case MxBlock::square32:
          amax = __reduce_max_sync(kFullWarp, column_max);
          stores_scale = lane == 0;
          break;
        case MxBlock::row32:
          amax = own_row_max;
          index.row = stripe * kMxBlock + lane;
          break;
        case MxBlock::col32:
          index.col = c;
          stores_scale = inside || out.layout != ScaleLayout::linear;
          break;
      }
      const uint8_t scale = scale_from_amax(amax, format, args.rule);
      if (stores_scale) scales[scale_offset(out.block, out.layout, padded_tokens, dim, index)] = scale;
#pragma unroll 4
      for (int r = 0; r < s.rows; ++r) {
        const uint32_t of_row = __shfl_sync(kFullWarp, uint32_t(scale), r);
        const uint8_t b = out.block == MxBlock::row32 ? uint8_t(of_row) : scale;
        if (inside) {
          *element_at<uint8_t>(out.data, s.row + r, c) = encode_element(decode_bf16(tile[warp][r][lane]), b, element);
        }
      }
    }
    __syncthreads();  // rstd has been read
  }
  clear_slack_rows(args);
}

template <Dtype kH>
Status launch_stripes(const RmsnormQuantize& args, Stream stream) {
  const StripeGrid grid = StripeGrid::of(args);
  return launch({.what = kWhat,
                 .grid = unsigned(std::min<int64_t>(grid.count, 4 * multiprocessor_count())),
                 .block = kStripeWarps * kWarp,
                 .stream = stream},
                norm_stripes<kH>, args, grid);
}

Status launch_stripes(const RmsnormQuantize& args, Stream stream) {
  switch (args.residual ? args.residual.dtype : args.in.dtype) {
    case Dtype::bf16: return launch_stripes<Dtype::bf16>(args, stream);
    case Dtype::f16: return launch_stripes<Dtype::f16>(args, stream);
    default: return launch_stripes<Dtype::f32>(args, stream);
  }
}

// ---- the backend ------------------------------------------------------------------------------------------------

template <int kCapability>
Status supports(const RmsnormQuantize& args) {
  return check_compute_capability<kCapability>("rmsnorm_quantize", args.in.device.index);
}

Status run(const RmsnormQuantize& args, Stream stream) {
  const DeviceGuard guard(args.in.device.index);
  MXFLASH_TRY(guard.status());
  return is_common(args) ? launch_rows(args, stream) : launch_stripes(args, stream);
}

}  // namespace

const Impl<RmsnormQuantize> kRmsnormQuantizeSm90 = sm90_backend<RmsnormQuantize>(supports<90>, run);
const Impl<RmsnormQuantize> kRmsnormQuantizeSm100 = sm100_backend<RmsnormQuantize>(supports<100>, run);

}  // namespace mxflash
