// One tile of gemm_quantize, c = a b^T; once per instruction set.
//
// a and b are widened to fp32 kGemmDepth elements of k at a time: a as it lies, [rows][kGemmDepth], b transposed into a
// panel [kGemmDepth][kPanelCols]. The micro-kernel (simd/micro_kernel.h) adds their product to c, panels
// [rows][kPanelCols]. All of that is on the stack, 256 KiB, and in L2. Each element is one sum over ascending k, like
// ref's; but multiply-adds round once, so that it may differ from ref's for inputs of fp32, whose products are not
// exact. Then c is quantized stripe by stripe, as any fp32 tile.
#include <algorithm>

#include "gemm/gemm_cpu.h"
#include "runtime/tensor_access.h"
#include "simd/micro_kernel.h"
#include "simd/mx_tile.h"
#include "simd/quantize_tile.h"
#include "simd/rows.h"

MXFLASH_ISA_BEGIN
namespace {

using namespace cpu;
static_assert(kPanelCols == kPanel && kGemmDepth % kDepthBlock == 0);

// rows x depth of a matrix to dst [rows][kGemmDepth].
void widen(const Tensor& t, int64_t first_row, int64_t rows, int64_t first_k, int64_t depth, float* dst) {
  for (int64_t r = 0; r < rows; ++r) {
    load_row(t, (first_row + r) * t.stride[0] + first_k, dst + r * kGemmDepth, depth);
  }
}

// Channels of a panel.
struct Panel {
  int64_t head, channel, cols;
  Panel(const MxTensor& out, int64_t index) {
    const int64_t dim = out.data.shape[2], per_head = ceil_div(dim, kPanelCols);
    head = index / per_head;
    channel = index % per_head * kPanelCols;
    cols = std::min(kPanelCols, dim - channel);
  }
};

// b transposed, to dst [kGemmDepth][kPanelCols]; zeros beyond the panel's channels.
void pack_panel(const Tensor& b, int64_t first_row, const Panel& panel, int64_t first_k, int64_t depth, float* dst) {
  alignas(64) float rows[kPanelCols * kGemmDepth];
  const int64_t padded = round_up(depth, kLanes);
  widen(b, first_row, panel.cols, first_k, depth, rows);
  for (int64_t r = 0; r < kPanelCols; ++r) {
    float* row = rows + r * kGemmDepth;
    std::fill(row + (r < panel.cols ? depth : 0), row + padded, 0.0f);
  }
  transpose_tile(rows, kGemmDepth, dst, kPanelCols, kPanelCols, padded);
}

void multiply(const GemmTile& t) {
  alignas(64) float a[kGemmRows * kGemmDepth], b[kGemmDepth * kPanelCols], c[kGemmPanels][kGemmRows * kPanelCols];
  const Tensor &left = t.args->a, &right = t.args->b;
  const int64_t depth = left.shape[1], dim = t.out->data.shape[2], row = t.sequence.start + t.first_row;
  for (int64_t k = 0; k < depth; k += kGemmDepth) {
    const int64_t block = std::min(kGemmDepth, depth - k);
    widen(left, row, t.rows, k, block, a);
    for (int64_t p = 0; p < t.panels; ++p) {
      const Panel panel(*t.out, t.first_panel + p);
      pack_panel(right, panel.head * dim + panel.channel, panel, k, block, b);
      gemm(a, kGemmDepth, b, block, c[p], t.rows, panel.cols, k > 0);
    }
  }
  const TileAccess access(*t.out, t.args->seq, t.sequence);
  const Tensor result = t.args->c ? as_heads(t.args->c) : Tensor{};
  for (int64_t p = 0; p < t.panels; ++p) {
    const Panel panel(*t.out, t.first_panel + p);
    for (int64_t r = 0; r < t.rows; ++r) {
      float* sums = c[p] + r * kPanelCols;
      if (depth == 0) std::fill(sums, sums + kPanelCols, 0.0f);
      std::fill(sums + panel.cols, sums + round_up(panel.cols, kMxBlock), 0.0f);
      if (result) store_row(result, row_offset(result, row + r, panel.head) + panel.channel, sums, panel.cols);
    }
    for (int64_t r = 0; r < t.rows; r += kTileRows) {
      const Tile tile{.token = t.first_row + r,
                      .rows = std::min(kTileRows, t.rows - r),
                      .head = panel.head,
                      .heads = 1,
                      .channel = panel.channel,
                      .cols = panel.cols};
      uint8_t scale[kStripCols];
      const TileTarget target = access.target(tile, t.args->rule, false, scale);
      quantize_tile({c[p] + r * kPanelCols, kPanelCols, Dtype::f32, tile.rows, panel.cols}, &target, 1);
      access.store_scales(tile, scale);
    }
  }
}

}  // namespace

const GemmKernels kGemmKernels{multiply};

MXFLASH_ISA_END
