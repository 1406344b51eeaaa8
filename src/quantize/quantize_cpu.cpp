// quantize, dequantize and convert_scales on the CPU: how tensors divide into tiles. quantize_cpu_kernel.cpp does them.
//
// A tile is 32 tokens by up to kTileCols channels, of several heads where these lie side by side. It is read from
// memory once: the passes over it, and the second copy, find it in the cache, and the last of them prefetches the next
// tile. Inputs with a mean, a rotation, odd strides or heads that end within a block are widened to an fp32 tile first.
#include <algorithm>
#include <mutex>

#include "mx/rotation.h"
#include "quantize/quantize.h"
#include "quantize/quantize_cpu.h"
#include "runtime/cpu_backend.h"
#include "runtime/parallel.h"

namespace mxflash {
namespace {

using namespace cpu;

constexpr int64_t kItemBytes = int64_t(256) << 10;  // of input that one thread takes at a time

// Tiles of a sequence, by stripe of 32 tokens and then across heads and channels.
struct TileGrid {
  int64_t heads, dim;
  int64_t tile_heads, tile_dim;  // of one tile
  TileGrid(const Tensor& shape, bool side_by_side, int64_t max_cols)
      : heads(shape.shape[1]),
        dim(shape.shape[2]),
        tile_heads(side_by_side && dim > 0 ? std::clamp<int64_t>(max_cols / dim, 1, std::max<int64_t>(heads, 1)) : 1),
        tile_dim(std::min(dim, max_cols)) {}
  int64_t across() const { return ceil_div(heads, tile_heads) * chunks(); }

  Tile tile(int64_t index, int64_t length) const {
    const int64_t token = index / across() * kTileRows, head = index % across() / chunks() * tile_heads;
    const int64_t channel = index % chunks() * tile_dim;
    return {token,   std::min(kTileRows, length - token), head, std::min(tile_heads, heads - head),
            channel, std::min(tile_dim, dim - channel)};
  }
  int64_t chunks() const { return dim > 0 ? ceil_div(dim, tile_dim) : 0; }
};

// body(sequence, its number, first tile, end tile) for runs of tiles, in parallel.
template <class Body>
void for_tiles(const TileGrid& grid, int64_t tokens, const Jagged& seq, Body&& body) {
  const int64_t longest = ceil_div(longest_sequence(tokens, seq), kTileRows) * grid.across();
  const int64_t run =
      std::max<int64_t>(1, kItemBytes / (2 * kTileRows * grid.tile_heads * std::max<int64_t>(grid.tile_dim, 1)));
  const int64_t runs = ceil_div(longest, run);
  parallel_for(seq.batch * runs, num_threads(), [&](int64_t item, int32_t) {
    const int64_t b = item / runs, first = item % runs * run;
    const Sequence s = sequence_at(tokens, seq, b);
    const int64_t end = std::min(first + run, ceil_div(s.length, kTileRows) * grid.across());
    if (first < end) body(s, b, first, end);
  });
}

bool side_by_side(const Tensor& t) { return t.shape[1] == 1 || t.stride[1] == t.shape[2]; }

const void* element(const Tensor& t, int64_t offset) {
  return static_cast<const std::byte*>(t.data) + offset * dtype_size(t.dtype);
}

// ---- quantize ---------------------------------------------------------------------------------------------------

struct QuantizeCall {
  const Quantize& args;
  const Tensor in = as_heads(args.in), mean = as_heads(args.mean);
  const MxTensor out = as_heads(args.out), out_col = as_heads(args.out_col);
  const int64_t group = rotation_group(in.shape[2]);
  const QuantizeKernels& kernels = kQuantizeKernelsByIsa.in_use();
  const bool repeat = in.stride[2] == 0;
  // Tiles can be read where they are.
  const bool direct = !args.smooth && !args.rotate && !repeat && in.shape[2] % kMxBlock == 0;
  const bool stream = in.numel() * (dtype_size(in.dtype) + (out_col ? 2 : 1)) > kStreamBytes;
  QuantizeStats sum{};
  std::mutex sum_mutex{};
};

void sequence_means(const QuantizeCall& call) {
  const Tensor& in = call.in;
  // Heads that lie side by side are as good as one.
  const bool flat = side_by_side(in) && side_by_side(call.mean) && !call.repeat;
  const int64_t heads = flat ? 1 : in.shape[1], dim = flat ? in.shape[1] * in.shape[2] : in.shape[2];
  const int64_t chunks = ceil_div(dim, kChunk);
  parallel_for(call.args.seq.batch * heads * chunks, num_threads(), [&](int64_t item, int32_t) {
    const int64_t b = item / (heads * chunks), head = item / chunks % heads, c = item % chunks * kChunk;
    const Sequence s = sequence_at(in.shape[0], call.args.seq, b);
    const int64_t offset = row_offset(in, s.start, head) + c * in.stride[2];
    call.kernels.mean({.data = s.length ? element(in, offset) : in.data,
                       .dtype = in.dtype,
                       .stride = in.stride[0],
                       .rows = s.length,
                       .cols = std::min(kChunk, dim - c),
                       .repeat = call.repeat},
                      static_cast<float*>(call.mean.data) + row_offset(call.mean, b, head) + c);
  });
}

// Writes both outputs of a tile.
void quantize_tile(const QuantizeCall& call, const Sequence& s, const Tile& tile, const TileSource& source,
                   QuantizeStats& stats) {
  uint8_t scale[2][kTileCols];
  const TileAccess out(call.out, call.args.seq, s), out_col(call.out_col ? call.out_col : call.out, call.args.seq, s);
  const TileTarget targets[] = {out.target(tile, call.args.rule, call.stream, scale[0]),
                                out_col.target(tile, call.args.rule, call.stream, scale[1])};
  call.kernels.quantize(source, targets, call.out_col ? 2 : 1);
  if (call.args.stats) call.kernels.count(source, targets[0], stats);
  out.store_scales(tile, scale[0]);
  if (call.out_col) out_col.store_scales(tile, scale[1]);
}

void quantize_direct(const QuantizeCall& call, const TileGrid& grid, const Sequence& s, int64_t first, int64_t end,
                     QuantizeStats& stats) {
  const Tensor& in = call.in;
  const auto data = [&](const Tile& t) { return element(in, row_offset(in, s.start + t.token, t.head) + t.channel); };
  for (int64_t i = first; i < end; ++i) {
    const Tile tile = grid.tile(i, s.length), next = grid.tile(i + 1, s.length);
    const bool same = next.rows == tile.rows && next.width() == tile.width();
    quantize_tile(call, s, tile,
                  {data(tile), in.stride[0], in.dtype, tile.rows, tile.width(), same ? data(next) : nullptr}, stats);
  }
}

void quantize_widened(const QuantizeCall& call, const TileGrid& grid, const Sequence& s, int64_t b, int64_t first,
                      int64_t end, QuantizeStats& stats) {
  const Tensor& in = call.in;
  alignas(64) float x[kTileRows * kChunk], sign[kChunk];
  int64_t signs_of = -1;
  const auto data = [&](const Tile& t) {
    return element(in, row_offset(in, s.start + t.token, t.head) + t.channel * in.stride[2]);
  };
  for (int64_t i = first; i < end; ++i) {
    const Tile tile = grid.tile(i, s.length), next = grid.tile(i + 1, s.length);
    const auto* mean = static_cast<const float*>(call.mean.data);
    if (call.args.smooth) mean += row_offset(call.mean, b, tile.head) + tile.channel;
    const bool same = next.rows == tile.rows && next.cols == tile.cols;
    const FloatRows rows{.data = data(tile),
                         .dtype = in.dtype,
                         .stride = in.stride[0],
                         .rows = tile.rows,
                         .cols = tile.cols,
                         .repeat = call.repeat,
                         .next = same ? data(next) : nullptr};
    call.kernels.widen(rows, call.args.smooth ? mean : nullptr, x);
    if (call.args.rotate) {
      for (int64_t c = 0; c < tile.cols && signs_of != tile.channel; ++c) {
        sign[c] = rotation_flips(call.args.rotate_seed, tile.channel + c) ? -1.0f : 1.0f;
      }
      signs_of = tile.channel;
      // Rows that the tile lacks must not hold what makes the arithmetic slow.
      std::fill(x + tile.rows * kChunk, x + kTileRows * kChunk, 0.0f);
      call.kernels.rotate(x, tile.cols, call.group, sign);
    }
    quantize_tile(call, s, tile, {x, kChunk, Dtype::f32, tile.rows, tile.cols}, stats);
  }
}

Status quantize_cpu(const Quantize& args, Stream) {
  QuantizeCall call{args};
  const bool flat = call.direct && side_by_side(call.in) && side_by_side(call.out.data) &&
                    (!call.out_col || side_by_side(call.out_col.data));
  const TileGrid grid(call.in, flat, call.direct ? kTileCols : kChunk);
  clear_padding(call.out, args.seq);
  if (call.out_col) clear_padding(call.out_col, args.seq);
  if (args.smooth) sequence_means(call);
  for_tiles(grid, call.in.shape[0], args.seq, [&](const Sequence& s, int64_t b, int64_t first, int64_t end) {
    QuantizeStats stats;
    if (call.direct) {
      quantize_direct(call, grid, s, first, end, stats);
    } else {
      quantize_widened(call, grid, s, b, first, end, stats);
    }
    if (!args.stats) return;
    const std::lock_guard lock(call.sum_mutex);
    call.sum.amax = std::max(call.sum.amax, stats.amax);
    call.sum.saturated += stats.saturated;
    call.sum.flushed += stats.flushed;
    call.sum.nonfinite += stats.nonfinite;
    call.sum.total += stats.total;
  });
  if (args.stats) *args.stats = call.sum;
  return {};
}

// ---- dequantize -------------------------------------------------------------------------------------------------

Status dequantize_cpu(const Dequantize& args, Stream) {
  const MxTensor in = as_heads(args.in);
  const Tensor out = as_heads(args.out);
  const QuantizeKernels& kernels = kQuantizeKernelsByIsa.in_use();
  const bool flat = side_by_side(in.data) && side_by_side(out) && out.shape[2] % kMxBlock == 0;
  const TileGrid grid(out, flat, kTileCols);
  const int64_t size = dtype_size(out.dtype);
  const bool large = out.numel() * size > kStreamBytes && out.stride[0] * size % 64 == 0;
  for_tiles(grid, out.shape[0], args.seq, [&](const Sequence& s, int64_t, int64_t first, int64_t end) {
    uint8_t scale[kTileCols];
    const TileAccess access(in, args.seq, s);
    for (int64_t i = first; i < end; ++i) {
      const Tile tile = grid.tile(i, s.length), next = grid.tile(i + 1, s.length);
      access.load_scales(tile, scale);
      const int64_t offset = row_offset(out, s.start + tile.token, tile.head) + tile.channel;
      const bool lines = (reinterpret_cast<uintptr_t>(element(out, offset)) | uintptr_t(tile.width())) % 64 == 0;
      const bool same = next.rows == tile.rows && next.width() == tile.width();
      kernels.dequantize({.payload = access.payload(tile),
                          .stride = in.data.stride[0],
                          .scale = scale,
                          .element = in.data.dtype,
                          .block = in.block,
                          .out = out,
                          .offset = offset,
                          .out_stride = out.stride[0],
                          .rows = tile.rows,
                          .cols = tile.width(),
                          .stream = large && lines,
                          .next = same ? access.payload(next) : nullptr});
    }
  });
  clear_slack_rows(out, args.seq);
  return {};
}

}  // namespace

namespace {
Status writes_no_image(const Quantize& args) {
  if (!args.image) return {};
  return unsupported("quantize: cpu: image must not be given (backend ref writes images on the host), got one");
}
}  // namespace

const Impl<Quantize> kQuantizeCpu = cpu_backend<Quantize>(quantize_cpu, nullptr, writes_no_image);
const Impl<Dequantize> kDequantizeCpu = cpu_backend<Dequantize>(dequantize_cpu);
const Impl<ConvertScales> kConvertScalesCpu = cpu_backend<ConvertScales>(convert_scales_host);

}  // namespace mxflash
