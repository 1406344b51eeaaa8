// Reference rmsnorm_bwd: the specification, in fp64 throughout; results are rounded to fp32 and then to their dtype.
#include "rmsnorm/rmsnorm.h"
#include "rmsnorm/row_groups.h"
#include "runtime/mx_access.h"
#include "runtime/parallel.h"
#include "runtime/ref_backend.h"

namespace mxflash {
namespace {

int64_t offset(const Tensor& t, int64_t row, int64_t col) { return row * t.stride[0] + col; }

struct Memory {
  double *dw, *dy;  // [groups, dim]: sums of a group's rows; dy of the row that it is at
  size_t size;
  Memory(const RmsnormBwd& args, void* workspace) {
    Arena arena(workspace);
    const int64_t count = RowGroups::count_of(args) * args.h.shape[1];
    dw = arena.take<double>(count);
    dy = arena.take<double>(count);
    size = arena.used();
  }
};

void read_dy(const RmsnormBwd& args, const MxTensor& mx, const Sequence& s, int64_t row, double* dy) {
  if (mx) return MxReader(mx, args.seq, s, 0).read(row - s.start, 1, dy);
  for (int64_t c = 0; c < args.h.shape[1]; ++c) dy[c] = double(load_float(args.dy, offset(args.dy, row, c)));
}

void row_gradient(const RmsnormBwd& args, int64_t row, const double* dy, double* dw) {
  const int64_t dim = args.h.shape[1];
  const double rstd = double(load_float(args.rstd, row));
  const auto xhat = [&](int64_t c) { return double(load_float(args.h, offset(args.h, row, c))) * rstd; };
  const auto g = [&](int64_t c) { return dy[c] * double(load_float(args.weight, c)); };
  double sum = 0;
  for (int64_t c = 0; c < dim; ++c) {
    sum += g(c) * xhat(c);
    dw[c] += dy[c] * xhat(c);
  }
  const double mean = sum / double(dim);
  for (int64_t c = 0; c < dim; ++c) {
    double dx = rstd * (g(c) - xhat(c) * mean);
    if (args.dh) dx += double(load_float(args.dh, offset(args.dh, row, c)));
    store_float(args.dx, offset(args.dx, row, c), float(dx));
  }
}

Status run(const RmsnormBwd& args, Stream) {
  const int64_t dim = args.h.shape[1];
  const MxTensor mx = as_heads(args.dy_mx);
  const RowGroups groups = RowGroups::of(args);
  const Memory memory(args, args.workspace);
  parallel_for(groups.count, num_threads(), [&](int64_t group, int32_t) {
    double *dw = memory.dw + group * dim, *dy = memory.dy + group * dim;
    std::fill_n(dw, dim, 0.0);
    Sequence s;
    for (int64_t row = groups.first(group); row < groups.end(group); ++row) {
      if (row >= s.start + s.length) s = sequence_of_row(args, row);
      read_dy(args, mx, s, row, dy);
      row_gradient(args, row, dy, dw);
    }
  });
  for (int64_t c = 0; c < dim; ++c) {
    double sum = 0;
    for (int64_t group = 0; group < groups.count; ++group) sum += memory.dw[group * dim + c];
    store_float(args.dw, c, float(sum));
  }
  clear_slack_rows(as_heads(args.dx), args.seq);
  return {};
}

size_t workspace(const RmsnormBwd& args) { return Memory(args, nullptr).size; }

}  // namespace

const Impl<RmsnormBwd> kRmsnormBwdRef = ref_backend<RmsnormBwd>(run, workspace);

}  // namespace mxflash
