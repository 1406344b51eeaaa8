// Reference gemm_quantize: fp32 accumulation over k in ascending order, then the same quantizer as everywhere.
//
// Backends may accumulate in another order; payload and scale are bit-equal for equal accumulators.
#include <algorithm>

#include "gemm/gemm.h"
#include "runtime/mx_access.h"
#include "runtime/parallel.h"
#include "runtime/ref_backend.h"

namespace mxflash {
namespace {

constexpr int64_t kTile = kMxBlock;
constexpr int64_t kDepth = 256;  // elements of k widened to fp32 at a time

// rows x depth of a matrix, from `first_row` and `first_k` on.
void widen(const Tensor& t, int64_t first_row, int64_t rows, int64_t first_k, int64_t depth, float (*dst)[kDepth]) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = (first_row + r) * t.stride[0] + first_k;
    for (int64_t k = 0; k < depth; ++k) dst[r][k] = load_float(t, row + k);
  }
}

// 32 x 32 tile of c: rows of one sequence, channels of one head, so that it is whole blocks.
void multiply_tile(const GemmQuantize& args, const MxTensor& out, const Tensor& c, const Sequence& s, int64_t head,
                   int64_t first_row, int64_t first_col) {
  const int64_t dim = out.data.shape[2], depth = args.a.shape[1];
  const int64_t rows = std::min(kTile, s.length - first_row), cols = std::min(kTile, dim - first_col);
  float acc[kTile][kTile] = {}, a[kTile][kDepth], b[kTile][kDepth];
  for (int64_t k0 = 0; k0 < depth; k0 += kDepth) {
    const int64_t chunk = std::min(kDepth, depth - k0);
    widen(args.a, s.start + first_row, rows, k0, chunk, a);
    widen(args.b, head * dim + first_col, cols, k0, chunk, b);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t n = 0; n < cols; ++n) {
        for (int64_t k = 0; k < chunk; ++k) acc[r][n] += a[r][k] * b[n][k];
      }
    }
  }
  for (int64_t r = 0; args.c && r < rows; ++r) {
    const int64_t row = row_offset(c, s.start + first_row + r, head) + first_col;
    for (int64_t n = 0; n < cols; ++n) store_float(c, row + n, acc[r][n]);
  }
  MxWriter(out, args.seq, s, head, args.rule).write(first_row, rows, first_col, cols, acc[0], kTile);
}

Status run(const GemmQuantize& args, Stream) {
  const MxTensor out = as_heads(args.out);
  const Tensor c = as_heads(args.c);
  const int64_t total = out.data.shape[0], heads = out.data.shape[1], dim = out.data.shape[2];
  clear_uncovered(out, args.seq);
  const int64_t row_tiles = ceil_div(longest_sequence(total, args.seq), kTile);
  const int64_t col_tiles = ceil_div(dim, kTile);
  parallel_for(args.seq.batch * row_tiles * heads * col_tiles, num_threads(), [&](int64_t item, int32_t) {
    const int64_t col = item % col_tiles, head = item / col_tiles % heads;
    const int64_t row = item / (col_tiles * heads) % row_tiles;
    const Sequence s = sequence_at(total, args.seq, item / (col_tiles * heads * row_tiles));
    if (row * kTile < s.length) multiply_tile(args, out, c, s, head, row * kTile, col * kTile);
  });
  if (args.c) clear_slack_rows(c, args.seq);
  return {};
}

}  // namespace

const Impl<GemmQuantize> kGemmQuantizeRef = ref_backend<GemmQuantize>(run);

}  // namespace mxflash
