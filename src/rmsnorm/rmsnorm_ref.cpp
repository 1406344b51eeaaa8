// Reference rmsnorm_quantize: the specification, in fp32 with one rounding per operation, in the order written.
//
// One work item is a stripe of 32 rows, the height of a block: first rstd of its rows, then y and the blocks.
#include <algorithm>
#include <cmath>

#include "rmsnorm/rmsnorm.h"
#include "rmsnorm/rmsnorm_sum.h"
#include "rmsnorm/slack.h"
#include "runtime/mx_access.h"
#include "runtime/parallel.h"
#include "runtime/ref_backend.h"

namespace mxflash {
namespace {

constexpr int64_t kStripe = kMxBlock;
constexpr int64_t kChunk = 256;  // columns at a time: whole blocks

int64_t offset(const Tensor& t, int64_t row, int64_t col) { return row * t.stride[0] + col; }

// h of one row; with a residual, h is added up, rounded to the residual's dtype and stored there first.
const Tensor& add_residual(const RmsnormQuantize& args, int64_t row) {
  if (!args.residual) return args.in;
  for (int64_t c = 0; c < args.in.shape[1]; ++c) {
    const int64_t at = offset(args.residual, row, c);
    store_float(args.residual, at, load_float(args.in, offset(args.in, row, c)) + load_float(args.residual, at));
  }
  return args.residual;
}

float row_rstd(const RmsnormQuantize& args, const Tensor& h, int64_t row) {
  const int64_t dim = args.in.shape[1];
  const float sum = sum_of_squares(dim, [&](int64_t c) { return load_float(h, offset(h, row, c)); });
  return 1.0f / std::sqrt(sum / float(dim) + args.eps);
}

void normalize_stripe(const RmsnormQuantize& args, const MxTensor& out, const Sequence& s, int64_t first) {
  const int64_t rows = std::min(kStripe, s.length - first), dim = args.in.shape[1];
  const Tensor& h = args.residual ? args.residual : args.in;
  float rstd[kStripe];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = s.start + first + r;
    rstd[r] = row_rstd(args, add_residual(args, row), row);
    if (args.rstd) store_float(args.rstd, row, rstd[r]);
  }
  const MxWriter writer(out, args.seq, s, 0, args.rule);
  float y[kStripe][kChunk];
  for (int64_t c0 = 0; c0 < dim; c0 += kChunk) {
    const int64_t cols = std::min(kChunk, dim - c0);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = s.start + first + r;
      for (int64_t c = 0; c < cols; ++c) {
        const float normalized = load_float(h, offset(h, row, c0 + c)) * rstd[r];
        const uint16_t rounded = encode_bf16(normalized * load_float(args.weight, c0 + c));
        y[r][c] = decode_bf16(rounded);
        if (args.y) static_cast<uint16_t*>(args.y.data)[offset(args.y, row, c0 + c)] = rounded;
      }
    }
    writer.write(first, rows, c0, cols, y[0], kChunk);
  }
}

Status run(const RmsnormQuantize& args, Stream) {
  const int64_t rows = args.in.shape[0];
  const MxTensor out = as_heads(args.out);
  clear_uncovered(out, args.seq);
  const int64_t stripes = ceil_div(longest_sequence(rows, args.seq), kStripe);
  parallel_for(args.seq.batch * stripes, num_threads(), [&](int64_t item, int32_t) {
    const Sequence s = sequence_at(rows, args.seq, item / stripes);
    const int64_t first = item % stripes * kStripe;
    if (first < s.length) normalize_stripe(args, out, s, first);
  });
  clear_slack(args);
  return {};
}

}  // namespace

const Impl<RmsnormQuantize> kRmsnormQuantizeRef = ref_backend<RmsnormQuantize>(run);

}  // namespace mxflash
