// rmsnorm_bwd on the CPU: one pass over memory. rmsnorm_bwd_cpu_kernel.cpp does the rows.
//
// A task is a group of rows (row_groups.h). A row is read for its mean and for dw, and once more, from the caches, for
// dx. Each group has a dw of its own, in fp32; the groups' are added in order, a piece of the channels a task.
#include <algorithm>

#include "rmsnorm/rmsnorm.h"
#include "rmsnorm/rmsnorm_bwd_cpu.h"
#include "rmsnorm/row_groups.h"
#include "runtime/cpu_backend.h"
#include "runtime/mx_access.h"
#include "runtime/parallel.h"

namespace mxflash {
namespace {

using namespace cpu;

constexpr int64_t kChunk = 512;  // channels of dw that one task adds up

struct Memory {
  float *dw, *weight;  // [groups, dim]; [dim]
  uint8_t* scale;      // [groups, dim]: a row's scales, where they do not lie side by side
  size_t size;
  Memory(const RmsnormBwd& args, void* workspace) {
    Arena arena(workspace);
    const int64_t groups = RowGroups::count_of(args), dim = args.h.shape[1];
    dw = arena.take<float>(groups * dim);
    weight = arena.take<float>(dim);
    scale = arena.take<uint8_t>(args.dy_mx.layout == ScaleLayout::linear ? 0 : groups * dim);
    size = arena.used();
  }
};

// Scale bytes of the rows of one group.
class RowScales {
 public:
  RowScales(const MxTensor& mx, const Jagged& seq, uint8_t* copy)
      : mx_(mx),
        padded_(padded_token_count(mx.data.shape[0], seq)),
        dim_(mx.data.shape[2]),
        shape_(block_shape(mx.block)),
        copy_(copy) {}

  // Of a row of the padded token axis.
  const uint8_t* of(int64_t padded_row) {
    const int64_t block_row = padded_row / shape_.rows, count = ceil_div(dim_, shape_.cols);
    const auto* scales = static_cast<const uint8_t*>(mx_.scale.data);
    const auto at = [&](int64_t i) { return scale_offset(mx_.block, mx_.layout, padded_, dim_, {0, block_row, i}); };
    if (mx_.layout == ScaleLayout::linear) return scales + at(0);
    if (block_row != copied_) {
      const uint8_t* const first = scales + at(0);
      if (mx_.block == MxBlock::row32) {
        // Four blocks of a row are adjacent in an atom, and its atoms follow one another.
        for (int64_t i = 0; i < count; ++i) copy_[i] = first[i / kAtomBlocks * kAtomBytes + i % kAtomBlocks];
      } else {
        for (int64_t i = 0; i < count; ++i) copy_[i] = scales[at(i)];
      }
    }
    copied_ = block_row;
    return copy_;
  }

 private:
  const MxTensor& mx_;
  int64_t padded_, dim_;
  BlockShape shape_;
  uint8_t* copy_;
  int64_t copied_ = -1;
};

void* element(const Tensor& t, int64_t row) {
  return static_cast<std::byte*>(t.data) + row * t.stride[0] * dtype_size(t.dtype);
}

void group_gradient(const RmsnormBwd& args, const MxTensor& mx, const RmsnormBwdKernels& kernels, const Memory& memory,
                    int64_t group, int64_t first, int64_t end) {
  const int64_t dim = args.h.shape[1];
  const Tensor& dy = args.dy ? args.dy : args.dy_mx.data;
  RowScales scales(mx, args.seq, memory.scale + (mx.layout == ScaleLayout::linear ? 0 : group * dim));
  float* const dw = memory.dw + group * dim;
  std::fill_n(dw, dim, 0.0f);
  Sequence s;
  for (int64_t row = first; row < end; ++row) {
    if (row >= s.start + s.length) s = sequence_of_row(args, row);
    kernels.row({.h = element(args.h, row),
                 .h_dtype = args.h.dtype,
                 .dy = element(dy, row),
                 .dy_dtype = dy.dtype,
                 .scale = mx ? scales.of(s.padded_start + row - s.start) : nullptr,
                 .scale_per_channel = mx.block == MxBlock::col32,
                 .weight = memory.weight,
                 .rstd = load_float(args.rstd, row),
                 .dim = dim,
                 .dh = args.dh ? element(args.dh, row) : nullptr,
                 .dh_dtype = args.dh.dtype,
                 .dx = element(args.dx, row),
                 .dx_dtype = args.dx.dtype,
                 .dw = dw,
                 .next_h = row + 1 < end ? element(args.h, row + 1) : nullptr,
                 .next_dy = row + 1 < end ? element(dy, row + 1) : nullptr});
  }
}

Status run(const RmsnormBwd& args, Stream) {
  const int64_t dim = args.h.shape[1];
  const MxTensor mx = as_heads(args.dy_mx);
  const RmsnormBwdKernels& kernels = kRmsnormBwdKernelsByIsa.in_use();
  const RowGroups groups = RowGroups::of(args);
  const Memory memory(args, args.workspace);
  for (int64_t c = 0; c < dim; ++c) memory.weight[c] = load_float(args.weight, c);
  parallel_for(groups.count, num_threads(), [&](int64_t group, int32_t) {
    group_gradient(args, mx, kernels, memory, group, groups.first(group), groups.end(group));
  });
  parallel_for(ceil_div(dim, kChunk), num_threads(), [&](int64_t chunk, int32_t) {
    const int64_t first = chunk * kChunk, count = std::min(kChunk, dim - first);
    float sum[kChunk] = {};
    for (int64_t group = 0; group < groups.count; ++group) kernels.add(memory.dw + group * dim + first, sum, count);
    for (int64_t c = 0; c < count; ++c) store_float(args.dw, first + c, sum[c]);
  });
  clear_slack_rows(as_heads(args.dx), args.seq);
  return {};
}

size_t workspace(const RmsnormBwd& args) { return Memory(args, nullptr).size; }

}  // namespace

const Impl<RmsnormBwd> kRmsnormBwdCpu = cpu_backend<RmsnormBwd>(run, workspace);

}  // namespace mxflash
