// rmsnorm_quantize on the CPU: one pass over memory. rmsnorm_cpu_kernel.cpp does rows and tiles.
//
// A work item is some stripes of 32 rows, the height of a block. A stripe is read from memory for the sums of its rows;
// then, while it is still in the cache, tiles of kNormCols channels become y, in a buffer that stays in L1, and MX.
// That second pass prefetches the next stripe.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "rmsnorm/rmsnorm.h"
#include "rmsnorm/rmsnorm_cpu.h"
#include "rmsnorm/slack.h"
#include "runtime/cpu_backend.h"
#include "runtime/mx_access.h"
#include "runtime/parallel.h"

namespace mxflash {
namespace {

using namespace cpu;

constexpr int64_t kItemBytes = int64_t(256) << 10;  // of h that one thread takes at a time

struct Norm {
  const RmsnormQuantize& args;
  const MxTensor out = as_heads(args.out);
  const Tensor& h = args.residual ? args.residual : args.in;
  const int64_t dim = args.in.shape[1];
  const RmsnormKernels& kernels = kRmsnormKernelsByIsa.in_use();
  const bool stream = args.in.numel() * 3 > kStreamBytes;
};

void* element(const Tensor& t, int64_t row, int64_t col) {
  return static_cast<std::byte*>(t.data) + (row * t.stride[0] + col) * dtype_size(t.dtype);
}

float row_rstd(const Norm& n, int64_t row) {
  const RmsnormQuantize& args = n.args;
  if (args.residual) {
    n.kernels.add_residual(element(args.in, row, 0), args.in.dtype, element(n.h, row, 0), n.h.dtype, n.dim);
  }
  const float sum = n.kernels.sum_of_squares(element(n.h, row, 0), n.h.dtype, n.dim);
  return 1.0f / std::sqrt(sum / float(n.dim) + args.eps);
}

void normalize_stripe(const Norm& n, const Sequence& s, int64_t first) {
  const RmsnormQuantize& args = n.args;
  const int64_t rows = std::min(kTileRows, s.length - first), row = s.start + first;
  float rstd[kTileRows];
  for (int64_t r = 0; r < rows; ++r) {
    rstd[r] = row_rstd(n, row + r);
    if (args.rstd) static_cast<float*>(args.rstd.data)[row + r] = rstd[r];
  }
  const int64_t below = std::min(kTileRows, s.length - first - rows);
  const TileAccess access(n.out, args.seq, s);
  alignas(64) uint16_t y[kTileRows * kNormCols];
  uint8_t scale[kNormCols];
  for (int64_t c = 0; c < n.dim; c += kNormCols) {
    const int64_t cols = std::min(kNormCols, n.dim - c);
    n.kernels.normalize({.h = element(n.h, row, c),
                         .stride = n.h.stride[0],
                         .dtype = n.h.dtype,
                         .rows = rows,
                         .cols = cols,
                         .rstd = rstd,
                         .weight = element(args.weight, 0, c),
                         .weight_dtype = args.weight.dtype,
                         .next_rows = below},
                        y);
    for (int64_t r = 0; args.y && r < rows; ++r) {
      std::memcpy(element(args.y, row + r, c), y + r * kNormCols, size_t(cols) * sizeof *y);
    }
    const Tile tile{.token = first, .rows = rows, .head = 0, .heads = 1, .channel = c, .cols = cols};
    const TileTarget target = access.target(tile, args.rule, n.stream, scale);
    n.kernels.quantize({y, kNormCols, Dtype::bf16, rows, cols}, &target, 1);
    access.store_scales(tile, scale);
  }
}

Status run(const RmsnormQuantize& args, Stream) {
  const Norm n{args};
  clear_padding(n.out, args.seq);
  const int64_t rows = args.in.shape[0], stripes = ceil_div(longest_sequence(rows, args.seq), kTileRows);
  const int64_t run = std::max<int64_t>(1, kItemBytes / (kTileRows * n.dim * dtype_size(n.h.dtype)));
  const int64_t runs = ceil_div(stripes, run);
  parallel_for(args.seq.batch * runs, num_threads(), [&](int64_t item, int32_t) {
    const Sequence s = sequence_at(rows, args.seq, item / runs);
    const int64_t begin = item % runs * run * kTileRows;
    for (int64_t first = begin; first < std::min(begin + run * kTileRows, s.length); first += kTileRows) {
      normalize_stripe(n, s, first);
    }
  });
  clear_slack(args);
  return {};
}

}  // namespace

const Impl<RmsnormQuantize> kRmsnormQuantizeCpu = cpu_backend<RmsnormQuantize>(run);

}  // namespace mxflash
