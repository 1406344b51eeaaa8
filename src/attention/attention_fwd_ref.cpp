// Reference forward: the executable specification of attention_fwd (include/mxflash/attention.h has the formulas).
//
// One work item is (sequence, head, block of query rows). Operands are decoded to fp64, where they are exact; what is
// rounded is what the recipe rounds: P to E4M3, and the outputs. Only visible keys are read, so nothing outside a
// sequence, or behind a mask, can reach a result, not even as NaN.
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/attention.h"
#include "attention/attention_ref.h"
#include "attention/mask.h"
#include "attention/out_rows.h"
#include "runtime/arena.h"
#include "runtime/mx_access.h"
#include "runtime/parallel.h"
#include "runtime/ref_backend.h"

namespace mxflash {
namespace {

using namespace ref;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Online softmax state of one row.
struct RowState {
  double max = -kInfinity;  // running maximum of s
  double sum = 0;           // of P * 2^8, unrounded: gives lse
  double sum_rounded = 0;   // of the E4M3 values: out's denominator
};

struct Scratch {
  double *q, *k, *v, *acc, *s;
  float* out;
  explicit Scratch(Arena& arena)
      : q(arena.take<double>(kBlockM * kMaxDim)),
        k(arena.take<double>(kBlockN * kMaxDim)),
        v(arena.take<double>(kBlockN * kMaxDim)),
        acc(arena.take<double>(kBlockM * kMaxDim)),
        s(arena.take<double>(kBlockN)),
        out(arena.take<float>(kBlockM * kMaxDim)) {}
};

size_t scratch_bytes() {
  Arena arena(nullptr);
  Scratch{arena};
  return arena.used();
}

// Folds the keys of one tile that the row sees into its state and accumulator. k, v point at the first of them.
void attend_row(const double* q, const double* k, const double* v, int64_t keys, const AttentionShape& shape,
                RowState& row, double* acc, double* s) {
  const double scale_log2 = shape.softmax_scale * kLog2e;
  double max = row.max;
  for (int64_t j = 0; j < keys; ++j) {
    s[j] = scale_log2 * dot(q, k + j * shape.head_dim, shape.head_dim);
    max = s[j] > max ? s[j] : max;
  }
  const double rescale = row.max == max ? 1 : std::exp2(row.max - max);  // 0 for the first tile
  row.max = max;
  row.sum *= rescale;
  row.sum_rounded *= rescale;
  scale_row(rescale, acc, shape.head_dim_v);
  for (int64_t j = 0; j < keys; ++j) {
    const double p = std::exp2(s[j] - max + kPExponent);
    const double p_rounded = decode_fp8(encode_fp8(float(p), kE4m3), kE4m3);
    row.sum += p;
    row.sum_rounded += p_rounded;
    axpy(p_rounded, v + j * shape.head_dim_v, acc, shape.head_dim_v);
  }
}

// x [head_dim_v] becomes the row as fp32.
void write_row(const AttentionFwd& args, const AttentionShape& shape, const RowState& row, const double* acc, int64_t b,
               int64_t head, int64_t out_row, float* x) {
  const bool visible = row.sum != 0;  // NaN counts as visible and propagates
  const int64_t kv_head = head / shape.group;
  for (int64_t c = 0; c < shape.head_dim_v; ++c) {
    double o = visible ? acc[c] / row.sum_rounded : 0;
    if (visible && args.v_mean) o += double(load_float(args.v_mean, row_offset(args.v_mean, b, kv_head) + c));
    x[c] = float(o);
    if (args.out) store_float(args.out, row_offset(args.out, out_row, head) + c, x[c]);
  }
  const double lse_log2 = visible ? row.max + std::log2(row.sum) - kPExponent : -kInfinity;
  if (args.lse) store_float(args.lse, head * args.lse.stride[0] + out_row, float(lse_log2 / kLog2e));
  if (args.row_exponent) {
    const double spare = std::floor(lse_log2 - row.max);
    static_cast<uint8_t*>(args.row_exponent.data)[head * args.row_exponent.stride[0] + out_row] =
        spare > 0 ? uint8_t(std::min(spare, 255.0)) : uint8_t(0);
  }
}

void attend_block(const AttentionFwd& args, const AttentionShape& shape, int64_t b, int64_t head, int64_t first_row,
                  const Scratch& scratch) {
  const Sequence sq = shape.query_sequence(b), sk = shape.key_sequence(b), so = shape.out_sequence(b);
  if (first_row >= sq.length) return;
  const int64_t rows = std::min(kBlockM, sq.length - first_row);
  MxReader(args.q, shape.seq_q, sq, head).read(first_row, rows, scratch.q);
  const MxReader k_reader(args.k, shape.seq_k, sk, head / shape.group);
  const MxReader v_reader(args.v, shape.seq_k, sk, head / shape.group);
  RowState state[kBlockM];
  std::fill_n(scratch.acc, rows * shape.head_dim_v, 0.0);

  const Range keys = visible_keys(args.mask, first_row, first_row + rows, sq.length, sk.length);
  for (int64_t tile = keys.first / kBlockN * kBlockN; tile < keys.end; tile += kBlockN) {
    const int64_t tile_end = std::min(tile + kBlockN, sk.length);
    k_reader.read(tile, tile_end - tile, scratch.k);
    v_reader.read(tile, tile_end - tile, scratch.v);
    for (int64_t i = 0; i < rows; ++i) {
      const Range row = visible_keys(args.mask, first_row + i, first_row + i + 1, sq.length, sk.length);
      const int64_t j0 = std::max(row.first, tile), j1 = std::min(row.end, tile_end);
      if (j0 >= j1) continue;
      attend_row(scratch.q + i * shape.head_dim, scratch.k + (j0 - tile) * shape.head_dim,
                 scratch.v + (j0 - tile) * shape.head_dim_v, j1 - j0, shape, state[i],
                 scratch.acc + i * shape.head_dim_v, scratch.s);
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    write_row(args, shape, state[i], scratch.acc + i * shape.head_dim_v, b, head, so.start + first_row + i,
              scratch.out + i * shape.head_dim_v);
  }
  if (args.out_mx) write_out_mx(args, shape, b, head, first_row, rows, scratch.out, shape.head_dim_v);
}

size_t workspace(const AttentionFwd&) { return size_t(num_threads()) * scratch_bytes(); }

Status run(const AttentionFwd& args, Stream) {
  const AttentionShape shape = AttentionShape::of(args);
  const int64_t blocks = ceil_div(shape.max_seqlen_q, kBlockM);
  // The workspace was checked, but another thread may have raised num_threads() since.
  const int32_t workers = int32_t(std::min(size_t(num_threads()), args.workspace_size / scratch_bytes()));
  clear_uncovered(args, shape);
  parallel_for(shape.batch * shape.num_heads_q * blocks, workers, [&](int64_t item, int32_t worker) {
    Arena arena(static_cast<std::byte*>(args.workspace) + size_t(worker) * scratch_bytes());
    const int64_t b = item / (shape.num_heads_q * blocks), head = item / blocks % shape.num_heads_q;
    attend_block(args, shape, b, head, item % blocks * kBlockM, Scratch(arena));
  });
  return {};
}

}  // namespace

const Impl<AttentionFwd> kAttentionFwdRef = ref_backend<AttentionFwd>(run, workspace, check_payloads);

}  // namespace mxflash
