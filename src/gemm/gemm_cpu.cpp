// gemm_quantize on the CPU: tiles of c in parallel. gemm_cpu_kernel.cpp does one.
#include <algorithm>

#include "gemm/gemm.h"
#include "gemm/gemm_cpu.h"
#include "runtime/cpu_backend.h"
#include "runtime/mx_access.h"
#include "runtime/parallel.h"

namespace mxflash {
namespace {

using namespace cpu;

Status run(const GemmQuantize& args, Stream) {
  const MxTensor out = as_heads(args.out);
  const int64_t total = out.data.shape[0], heads = out.data.shape[1], dim = out.data.shape[2];
  const GemmKernels& kernels = kGemmKernelsByIsa.in_use();
  clear_padding(out, args.seq);
  const int64_t row_tiles = ceil_div(longest_sequence(total, args.seq), kGemmRows);
  const int64_t panels = heads * ceil_div(dim, kPanelCols), col_tiles = ceil_div(panels, kGemmPanels);
  parallel_for(args.seq.batch * row_tiles * col_tiles, num_threads(), [&](int64_t item, int32_t) {
    const int64_t first_row = item / col_tiles % row_tiles * kGemmRows, first_panel = item % col_tiles * kGemmPanels;
    const Sequence s = sequence_at(total, args.seq, item / (col_tiles * row_tiles));
    if (first_row >= s.length) return;
    kernels.multiply({.args = &args,
                      .out = &out,
                      .sequence = s,
                      .first_row = first_row,
                      .rows = std::min(kGemmRows, s.length - first_row),
                      .first_panel = first_panel,
                      .panels = std::min(kGemmPanels, panels - first_panel)});
  });
  if (args.c) clear_slack_rows(as_heads(args.c), args.seq);
  return {};
}

}  // namespace

const Impl<GemmQuantize> kGemmQuantizeCpu = cpu_backend<GemmQuantize>(run);

}  // namespace mxflash
