// rmsnorm_bwd on Hopper, in fp32.
//
//   xhat = h rstd     g = dy weight     dx = rstd (g - xhat mean(g xhat)) (+ dh)     dw = sum over rows of dy xhat
//
// gradient_rows: the common case, one pass over memory. h, dx and dh BF16; dy BF16, or MX in blocks square32 or row32;
// dim a multiple of 8 (MX: of 16) up to 16384, rows aligned to 16 bytes.
//
//   Rows. A row belongs to 1, 2, 4, 8 or 16 warps, so that a lane has 2 vectors of 8 neighbours (4 from dim 8200 on):
//   the weight and dw of its columns, over all the rows that its CTA takes, stay in its registers as fp32. The mean is
//   a sum over a lane's elements, five shuffles, and the sums of the row's warps through shared memory, in their order:
//   one barrier a row.
//
//   Loads. CTAs stay, and take every n-th part of the rows, where n is their number. The copy engine brings rows into a
//   ring of stages, and a row is read there twice, for its mean and for dx. The barrier of a row says that the stage of
//   the row before it is free. So 64 to 96 KB of loads are in flight for a CTA whatever its warps do. rstd and the
//   scales of dy are loaded one row ahead, into registers.
//
//   dw. A CTA adds up its groups of rows in order and writes one partial dw, fp32; sum_partials adds those up: eight
//   runs of neighbouring CTAs side by side, each in order, then the runs. The number of CTAs follows from the shape and
//   the card, so results follow from the inputs alone.
//
//   dx may be dh: a row of dh is in shared memory before that row of dx is written.
//
//   Barriers: full[stage][row], 1 arrival, by the thread that asks for the copies; waited for by the row's warps.
//   Bytes: 2 of h, 2 (1) of dy, 2 of dx an element, 2 more with dh; 402 MB at 16384 x 4096. Partials: 4 dim a CTA, at
//   most two CTAs an SM, 4 MB there, which stay in L2. About 13 instructions an element: a quarter of the issue slots.
//   Measured on one H200, 16384 x 4096: 116 us, 3.46 TB/s; with dh 3.83; from MX 3.08.
//
// gradient_any: everything else. A CTA takes a row, a thread every 256th channel; the second read of the row finds it
// in L1 or L2, and so does the partial dw.
#include <algorithm>

#include "mx/scale_layout.h"
#include "ptx/bulk_copy.cuh"
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "rmsnorm/rmsnorm.h"
#include "rmsnorm/rmsnorm_cuda.cuh"
#include "runtime/check.h"
#include "runtime/cuda.h"
#include "runtime/cuda_backend.h"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

constexpr const char* kWhat = "rmsnorm_bwd: sm90";

struct Params {
  RmsnormBwd args;
  float* partial;       // [CTAs, dim]
  int64_t padded_rows;  // of the token axis of scales
  int stages;           // of gradient_rows
};

// Rows that belong to sequences come first.
__device__ inline int64_t rows_inside(const RmsnormBwd& args) {
  return args.seq.cu_seqlens ? args.seq.cu_seqlens[args.seq.batch] : args.h.shape[0];
}

// The row of the padded token axis where this row's scales are. Index is an integer that holds the number of rows.
template <class Index>
__device__ inline int64_t padded_row(const RmsnormBwd& args, int64_t row) {
  const Jagged& seq = args.seq;
  if (!seq.cu_seqlens) {
    if (seq.batch == 1) return row;
    const Index length = Index(args.h.shape[0]) / Index(seq.batch), b = Index(row) / length;
    return row + int64_t(b) * (round_up(int64_t(length), kSeqAlign) - int64_t(length));
  }
  int b = 0;  // the last sequence that starts here or before
  for (int end = seq.batch; end - b > 1;) {
    const int middle = b + (end - b) / 2;
    if (seq.cu_seqlens[middle] <= row) {
      b = middle;
    } else {
      end = middle;
    }
  }
  const int64_t start = seq.cu_seqlens[b];
  return jagged_padded_start(start, b) + row - start;
}

__device__ inline void clear_slack_rows(const RmsnormBwd& args, int64_t inside) {
  const int64_t size = dtype_size(args.dx.dtype), bytes = args.h.shape[1] * size;
  for (int64_t row = inside + int64_t(blockIdx.x); row < args.h.shape[0]; row += gridDim.x) {
    auto* const dx = static_cast<uint8_t*>(args.dx.data) + row * args.dx.stride[0] * size;
    for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) dx[i] = 0;
  }
}

// ---- gradient_rows ----------------------------------------------------------------------------------------------

constexpr int kVector = 8;  // elements
constexpr int kMaxStages = 6;

template <int kWarps_, int kVectors_>
struct RowPlan {
  static constexpr int kWarps = kWarps_;      // of a row
  static constexpr int kVectors = kVectors_;  // of a lane
  static constexpr int kMaxDim = kWarps * kWarp * kVectors * kVector;
  static constexpr int kRows = kWarps < 8 ? 8 / kWarps : 1;  // of a CTA at a time
  static constexpr int kThreads = kRows * kWarps * kWarp;
  static constexpr int kCtas = kThreads > 256 ? 1 : 2;                // of an SM
  static constexpr uint32_t kStagesBytes = (224 / kCtas - 2) * 1024;  // at most

  // Of shared memory; the stages follow.
  struct alignas(128) Head {
    float sums[2][kRows][kWarps];
    uint64_t full[kMaxStages][kRows];
  };
};

// A row in a stage: h, then dy, then dh.
struct Slot {
  uint32_t h_bytes, dy_bytes, dh_bytes;
  __host__ __device__ static Slot of(const RmsnormBwd& args) {
    const auto dim = uint32_t(args.h.shape[1]);
    return {2 * dim, args.dy_mx ? dim : 2 * dim, args.dh ? 2 * dim : 0};
  }
  __host__ __device__ uint32_t bytes() const { return h_bytes + dy_bytes + dh_bytes; }
};

__device__ inline void unpack(uint4 x, float (&to)[kVector]) {
  const uint32_t pair[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = low_half(pair[i]);
    to[2 * i + 1] = high_half(pair[i]);
  }
}
__device__ inline uint4 pack(const float (&x)[kVector]) {
  return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
}

// Scale bytes of a row of dy, in blocks square32 or row32. scale_offset for one row, without its divisions: atoms of
// 128 rows follow one another, and in them the atoms of 4 blocks.
struct RowScales {
  const uint8_t* first;
  bool linear;
  __device__ static RowScales of(const MxTensor& dy, uint32_t blocks, int64_t at_padded_row) {
    constexpr int64_t kBlock = kMxBlock;
    const auto* scales = static_cast<const uint8_t*>(dy.scale.data);
    const auto row = uint64_t(dy.block == MxBlock::square32 ? at_padded_row / kBlock : at_padded_row);
    if (dy.layout == ScaleLayout::linear) return {scales + row * blocks, true};
    const uint64_t atoms = row / kAtomRows * ((blocks + kAtomBlocks - 1) / kAtomBlocks);
    return {scales + atoms * kAtomBytes + atom_byte(int64_t(row % kAtomRows), 0), false};
  }
  __device__ uint8_t at(uint32_t block) const {
    constexpr uint32_t kBlocks = kAtomBlocks, kBytes = kAtomBytes;
    return first[linear ? block : block / kBlocks * kBytes + block % kBlocks];
  }
};

// A lane's vector of dy, of a row in a stage: BF16, or FP8 codes times their block's scale.
template <bool kMx>
__device__ inline void load_gradient(const unsigned char* row, int col, Dtype element, float scale,
                                     float (&to)[kVector]) {
  if constexpr (!kMx) return unpack(*reinterpret_cast<const uint4*>(row + 2 * col), to);
  const uint2 codes = *reinterpret_cast<const uint2*>(row + col);
  uint32_t pair[4];
  if (element == Dtype::e4m3) {
    ptx::unpack_e4m3(codes.x, pair[0], pair[1]);
    ptx::unpack_e4m3(codes.y, pair[2], pair[3]);
  } else {
    ptx::unpack_e5m2(codes.x, pair[0], pair[1]);
    ptx::unpack_e5m2(codes.y, pair[2], pair[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = ptx::low_f16(pair[i]) * scale;
    to[2 * i + 1] = ptx::high_f16(pair[i]) * scale;
  }
}

// The sum over a row's warps, the same in every lane. `sums` alternates between rows: a warp writes the next but one
// only after the next one's barrier, behind which all have read this one.
template <class Plan>
__device__ inline float row_sum(float sum, float (&sums)[Plan::kRows][Plan::kWarps], int row, int warp_of_row,
                                int lane) {
#pragma unroll
  for (int half = kWarp / 2; half >= 1; half /= 2) sum += __shfl_xor_sync(kFullWarp, sum, half);
  if constexpr (Plan::kWarps == 1) {
    __syncwarp();
    return sum;
  }
  if (lane == 0) sums[row][warp_of_row] = sum;
  __syncthreads();
  sum = sums[row][0];
#pragma unroll
  for (int w = 1; w < Plan::kWarps; ++w) sum += sums[row][w];
  return sum;
}

// Adds up dw of the CTA's rows, in their order, and writes it. `memory` holds [kRows][kMaxDim] floats.
template <class Plan>
__device__ inline void store_partial(const float (&dw)[Plan::kVectors][kVector], float* memory, float* partial, int dim,
                                     int row, int first_col) {
  constexpr int kStep = Plan::kWarps * kWarp * kVector;
  if constexpr (Plan::kRows > 1) {
#pragma unroll
    for (int v = 0; v < Plan::kVectors; ++v) {
      auto* const to = reinterpret_cast<float4*>(memory + row * Plan::kMaxDim + first_col + v * kStep);
      to[0] = {dw[v][0], dw[v][1], dw[v][2], dw[v][3]};
      to[1] = {dw[v][4], dw[v][5], dw[v][6], dw[v][7]};
    }
    __syncthreads();
    for (int c = threadIdx.x; c < dim; c += Plan::kThreads) {
      float sum = memory[c];
      for (int r = 1; r < Plan::kRows; ++r) sum += memory[r * Plan::kMaxDim + c];
      partial[c] = sum;
    }
  } else {
#pragma unroll
    for (int v = 0; v < Plan::kVectors; ++v) {
      if (first_col + v * kStep >= dim) continue;
      auto* const to = reinterpret_cast<float4*>(partial + first_col + v * kStep);
      to[0] = {dw[v][0], dw[v][1], dw[v][2], dw[v][3]};
      to[1] = {dw[v][4], dw[v][5], dw[v][6], dw[v][7]};
    }
  }
}

// grid: parts of kRows rows, by strides.
template <class Plan, bool kMx>
__global__ void __launch_bounds__(Plan::kThreads, Plan::kCtas) gradient_rows(const __grid_constant__ Params p) {
  constexpr int kRows = Plan::kRows, kVectors = Plan::kVectors;
  constexpr int kStep = Plan::kWarps * kWarp * kVector;  // from a lane's vector to its next, in elements
  extern __shared__ __align__(128) unsigned char memory[];
  auto& head = *reinterpret_cast<typename Plan::Head*>(memory);
  const RmsnormBwd& args = p.args;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int row_of_cta = warp / Plan::kWarps, warp_of_row = warp % Plan::kWarps;
  const int dim = int(args.h.shape[1]), first_col = (warp_of_row * kWarp + lane) * kVector;
  const int64_t inside = rows_inside(args), row_step = int64_t(gridDim.x) * kRows;
  const Slot slot = Slot::of(args);
  const Dtype element = args.dy_mx.data.dtype;
  const uint32_t blocks = (uint32_t(dim) + kMxBlock - 1) / uint32_t(kMxBlock);
  const float minus_inverse = -1.0f / float(dim);
  const bool asks = warp_of_row == 0 && lane == 0;  // for the row's copies

  unsigned char* const stages = memory + sizeof head;
  const auto slot_of = [&](int stage) { return stages + (stage * kRows + row_of_cta) * slot.bytes(); };
  const auto request = [&](int64_t row, int stage) {
    if (!asks || row >= inside) return;
    const uint32_t bar = ptx::shared_address(&head.full[stage][row_of_cta]), to = ptx::shared_address(slot_of(stage));
    ptx::mbarrier_arrive_expect_tx(bar, slot.bytes());
    ptx::bulk_load(to, element_at<uint16_t>(args.h, row, 0), slot.h_bytes, bar);
    const void* const dy = kMx ? static_cast<const void*>(element_at<uint8_t>(args.dy_mx.data, row, 0))
                               : static_cast<const void*>(element_at<uint16_t>(args.dy, row, 0));
    ptx::bulk_load(to + slot.h_bytes, dy, slot.dy_bytes, bar);
    if (args.dh) {
      ptx::bulk_load(to + slot.h_bytes + slot.dy_bytes, element_at<uint16_t>(args.dh, row, 0), slot.dh_bytes, bar);
    }
  };
  // What a row has in other memory than its elements: loaded here, and only looked at a row later.
  struct Row {
    float rstd = 0;
    uint8_t scale[kVectors] = {};  // E8M0
  };
  const auto facts_of = [&](int64_t row) -> Row {
    Row facts;
    if (row >= inside) return facts;
    facts.rstd = static_cast<const float*>(args.rstd.data)[row];
    if constexpr (kMx) {
      const RowScales scales = RowScales::of(args.dy_mx, blocks, padded_row<uint32_t>(args, row));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int col = first_col + v * kStep;
        if (col < dim) facts.scale[v] = scales.at(uint32_t(col) / uint32_t(kMxBlock));
      }
    }
    return facts;
  };

  if (threadIdx.x < kRows * kMaxStages) ptx::mbarrier_init(ptx::shared_address(&head.full[0][0] + threadIdx.x), 1);
  ptx::fence_mbarrier_init();
  __syncthreads();
  int64_t row = int64_t(blockIdx.x) * kRows + row_of_cta;
  for (int i = 0; i + 1 < p.stages; ++i) request(row + i * row_step, i);
  Row facts = facts_of(row);
  float weight[kVectors][kVector] = {}, dw[kVectors][kVector] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    for (int e = 0; e < kVector; ++e) {
      const int col = first_col + v * kStep + e;
      if (col < dim) weight[v][e] = load_float(args.weight, 0, col);
    }
  }

  int stage = 0, before = p.stages - 1, turn = 0;
  uint32_t phase = 0;
  for (int64_t first = int64_t(blockIdx.x) * kRows; first < inside; first += row_step, row += row_step) {
    const bool exists = row < inside;
    const unsigned char* const h = slot_of(stage);
    const unsigned char *const dy = h + slot.h_bytes, *const dh = dy + slot.dy_bytes;
    const Row next = facts_of(row + row_step);
    float sum = 0;
    if (exists) {
      ptx::mbarrier_wait(ptx::shared_address(&head.full[stage][row_of_cta]), phase);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int col = first_col + v * kStep;
        if (col >= dim) continue;
        float x[kVector], d[kVector];
        unpack(*reinterpret_cast<const uint4*>(h + 2 * col), x);
        load_gradient<kMx>(dy, col, element, decode_e8m0(facts.scale[v]), d);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          const float xhat = x[e] * facts.rstd;
          dw[v][e] = __fmaf_rn(d[e], xhat, dw[v][e]);
          sum = __fmaf_rn(d[e] * weight[v][e], xhat, sum);
        }
      }
    }
    sum = row_sum<Plan>(sum, head.sums[turn], row_of_cta, warp_of_row, lane);
    // All of the row's warps are done with the row before this one.
    request(row + (p.stages - 1) * row_step, before);
    const float minus_mean = sum * minus_inverse;
    if (exists) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int col = first_col + v * kStep;
        if (col >= dim) continue;
        float x[kVector], d[kVector], dx[kVector] = {};
        unpack(*reinterpret_cast<const uint4*>(h + 2 * col), x);
        load_gradient<kMx>(dy, col, element, decode_e8m0(facts.scale[v]), d);
        if (args.dh) unpack(*reinterpret_cast<const uint4*>(dh + 2 * col), dx);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          dx[e] = __fmaf_rn(facts.rstd, __fmaf_rn(x[e] * facts.rstd, minus_mean, d[e] * weight[v][e]), dx[e]);
        }
        *reinterpret_cast<uint4*>(element_at<uint16_t>(args.dx, row, col)) = pack(dx);
      }
    }
    ptx::fence_proxy_async();  // of these reads, before the copy engine writes there
    facts = next;
    turn ^= 1;
    before = stage;
    if (++stage == p.stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __syncthreads();  // the stages are free
  store_partial<Plan>(dw, reinterpret_cast<float*>(stages), p.partial + int64_t(blockIdx.x) * dim, dim, row_of_cta,
                      first_col);
  clear_slack_rows(args, inside);
}

// ---- gradient_any -----------------------------------------------------------------------------------------------

constexpr int kAnyThreads = 256, kAnyCtas = 4;  // CTAs of an SM

__device__ inline uint8_t scale_at(const Params& p, int64_t at_padded_row, int64_t col) {
  const MxTensor& dy = p.args.dy_mx;
  const BlockShape shape = block_shape(dy.block);
  const ScaleIndex i{0, at_padded_row / shape.rows, col / shape.cols};
  const int64_t at = scale_offset(dy.block, dy.layout, p.padded_rows, p.args.h.shape[1], i);
  return static_cast<const uint8_t*>(dy.scale.data)[at];
}

__device__ inline float load_dy(const Params& p, int64_t row, int64_t at_padded_row, int64_t col) {
  const RmsnormBwd& args = p.args;
  if (!args.dy_mx) return load_float(args.dy, row, col);
  const uint8_t code = *element_at<uint8_t>(args.dy_mx.data, row, col);
  return decode_fp8(code, fp8_format(args.dy_mx.data.dtype)) * decode_e8m0(scale_at(p, at_padded_row, col));
}

__device__ inline void store(const Tensor& t, int64_t at, float x) {
  switch (t.dtype) {
    case Dtype::bf16: static_cast<uint16_t*>(t.data)[at] = encode_bf16(x); break;
    case Dtype::f16: static_cast<uint16_t*>(t.data)[at] = encode_f16(x); break;
    default: static_cast<float*>(t.data)[at] = x;
  }
}

__global__ void __launch_bounds__(kAnyThreads, kAnyCtas) gradient_any(const __grid_constant__ Params p) {
  constexpr int kWarps = kAnyThreads / kWarp;
  __shared__ float sums[2][kWarps];
  const RmsnormBwd& args = p.args;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t dim = args.h.shape[1], inside = rows_inside(args);
  float* const partial = p.partial + int64_t(blockIdx.x) * dim;  // a thread reads what it has written
  for (int64_t c = threadIdx.x; c < dim; c += kAnyThreads) partial[c] = 0;
  int turn = 0;
  for (int64_t row = blockIdx.x; row < inside; row += gridDim.x) {
    const float rstd = static_cast<const float*>(args.rstd.data)[row];
    const int64_t at = args.dy_mx ? padded_row<int64_t>(args, row) : 0;
    float sum = 0;
    for (int64_t c = threadIdx.x; c < dim; c += kAnyThreads) {
      const float xhat = load_float(args.h, row, c) * rstd, d = load_dy(p, row, at, c);
      partial[c] = __fmaf_rn(d, xhat, partial[c]);
      sum = __fmaf_rn(d * load_float(args.weight, 0, c), xhat, sum);
    }
#pragma unroll
    for (int half = kWarp / 2; half >= 1; half /= 2) sum += __shfl_xor_sync(kFullWarp, sum, half);
    if (lane == 0) sums[turn][warp] = sum;
    __syncthreads();
    sum = sums[turn][0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum += sums[turn][w];
    turn ^= 1;
    const float minus_mean = -__fdiv_rn(sum, float(dim));
    for (int64_t c = threadIdx.x; c < dim; c += kAnyThreads) {
      const float xhat = load_float(args.h, row, c) * rstd;
      const float g = load_dy(p, row, at, c) * load_float(args.weight, 0, c);
      const float dh = args.dh ? load_float(args.dh, row, c) : 0.0f;
      store(args.dx, row * args.dx.stride[0] + c, __fmaf_rn(rstd, __fmaf_rn(xhat, minus_mean, g), dh));
    }
  }
  clear_slack_rows(args, inside);
}

// ---- sum_partials -----------------------------------------------------------------------------------------------

constexpr int kSumThreads = 256, kSumParts = kSumThreads / kWarp;  // parts of the CTAs that a channel's warps take

// grid: 32 channels. `count` CTAs have written.
__global__ void __launch_bounds__(kSumThreads) sum_partials(const __grid_constant__ Params p, int count) {
  __shared__ float sums[kSumParts][kWarp];
  const int lane = threadIdx.x % kWarp, part = threadIdx.x / kWarp;
  const int64_t dim = p.args.h.shape[1], c = int64_t(blockIdx.x) * kWarp + lane;
  const int size = (count + kSumParts - 1) / kSumParts, end = min(count, (part + 1) * size);
  float sum = 0;
  if (c < dim) {
#pragma unroll 8
    for (int i = part * size; i < end; ++i) sum += p.partial[i * dim + c];
  }
  sums[part][lane] = sum;
  __syncthreads();
  if (part != 0 || c >= dim) return;
#pragma unroll
  for (int w = 1; w < kSumParts; ++w) sum += sums[w][lane];
  store(p.args.dw, c, sum);
}

// ---- the backend ------------------------------------------------------------------------------------------------

// The kernel of a call, and its CTAs: as many as run at a time, if there are rows for so many.
struct Plan {
  void (*kernel)(Params) = gradient_any;
  int threads = kAnyThreads, ctas = 0, stages = 0;
  uint32_t shared_bytes = 0;
};

template <class R>
Plan plan_rows(const RmsnormBwd& args, int multiprocessors) {
  const uint32_t stage = R::kRows * Slot::of(args).bytes();
  Plan plan{.kernel = args.dy_mx ? gradient_rows<R, true> : gradient_rows<R, false>, .threads = R::kThreads};
  plan.ctas = int(std::min<int64_t>(ceil_div(args.h.shape[0], R::kRows), R::kCtas * multiprocessors));
  plan.stages = std::min<int>(kMaxStages, int(R::kStagesBytes / stage));
  const uint32_t partials = R::kRows > 1 ? R::kRows * R::kMaxDim * uint32_t(sizeof(float)) : 0;
  plan.shared_bytes = uint32_t(sizeof(typename R::Head)) + std::max(uint32_t(plan.stages) * stage, partials);
  return plan;
}

bool is_common(const RmsnormBwd& args) {
  const int64_t dim = args.h.shape[1];
  const auto is_vectors = [](const Tensor& t) { return t.dtype == Dtype::bf16 && rows_aligned(t, 16); };
  const MxTensor& mx = args.dy_mx;
  return dim % kVector == 0 && dim <= RowPlan<16, 4>::kMaxDim && args.h.shape[0] <= INT32_MAX && is_vectors(args.h) &&
         is_vectors(args.dx) && (!args.dh || is_vectors(args.dh)) && (!args.dy || is_vectors(args.dy)) &&
         (!mx || (mx.block != MxBlock::col32 && dim % 16 == 0 && rows_aligned(mx.data, 16)));
}

Plan plan_of(const RmsnormBwd& args) {
  const int multiprocessors = multiprocessor_count();
  const int64_t dim = args.h.shape[1];
  if (!is_common(args)) {
    return {.ctas = int(std::min<int64_t>(args.h.shape[0], kAnyCtas * multiprocessors))};
  }
  if (dim <= 512) return plan_rows<RowPlan<1, 2>>(args, multiprocessors);
  if (dim <= 1024) return plan_rows<RowPlan<2, 2>>(args, multiprocessors);
  if (dim <= 2048) return plan_rows<RowPlan<4, 2>>(args, multiprocessors);
  if (dim <= 4096) return plan_rows<RowPlan<8, 2>>(args, multiprocessors);
  if (dim <= 8192) return plan_rows<RowPlan<16, 2>>(args, multiprocessors);
  return plan_rows<RowPlan<16, 4>>(args, multiprocessors);
}

// Whatever the kernel: addresses, which choose it, are not known yet.
size_t workspace(const RmsnormBwd& args) {
  const DeviceGuard guard(args.h.device.index);
  const int64_t ctas = std::min<int64_t>(args.h.shape[0], kAnyCtas * multiprocessor_count());
  Arena arena(nullptr);
  arena.take<float>(ctas * args.h.shape[1]);
  return arena.used();
}

template <int kCapability>
Status supports(const RmsnormBwd& args) {
  return check_compute_capability<kCapability>("rmsnorm_bwd", args.h.device.index);
}

Status run(const RmsnormBwd& args, Stream stream) {
  const DeviceGuard guard(args.h.device.index);
  MXFLASH_TRY(guard.status());
  const Plan plan = plan_of(args);
  const Params p{args, static_cast<float*>(args.workspace), padded_token_count(args.h.shape[0], args.seq), plan.stages};
  MXFLASH_TRY(launch({.what = kWhat,
                      .grid = unsigned(plan.ctas),
                      .block = unsigned(plan.threads),
                      .shared_bytes = plan.shared_bytes,
                      .stream = stream},
                     plan.kernel, p));
  return launch(
      {.what = kWhat, .grid = unsigned(ceil_div(args.h.shape[1], kWarp)), .block = kSumThreads, .stream = stream},
      sum_partials, p, plan.ctas);
}

}  // namespace

const Impl<RmsnormBwd> kRmsnormBwdSm90 = sm90_backend<RmsnormBwd>(supports<90>, run, workspace);
const Impl<RmsnormBwd> kRmsnormBwdSm100 = sm100_backend<RmsnormBwd>(supports<100>, run, workspace);

}  // namespace mxflash
