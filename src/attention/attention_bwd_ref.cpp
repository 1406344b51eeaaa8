// Reference backward: the executable specification of attention_bwd (include/mxflash/attention.h has the formulas).
//
// Three passes, each with disjoint outputs, so there are no atomics and sums have one order:
//   prepare   (sequence, head, rows): delta and the exponent of P of every 32-row block
//   dk_dv     (sequence, kv head, keys): over the group's heads and all query blocks that see these keys
//   dq        (head, rows): over key tiles; with shared_q over all key sequences
// The last two recompute P^ and dS^ tile by tile. Tiles start at multiples of 128 and MX blocks at multiples of 32 of
// a sequence, so both passes see the same bytes. Operands are decoded to fp64, where they are exact.
#include <algorithm>
#include <cmath>

#include "attention/attention.h"
#include "attention/attention_ref.h"
#include "attention/mask.h"
#include "mx/rotation.h"
#include "runtime/arena.h"
#include "runtime/mx_access.h"
#include "runtime/parallel.h"
#include "runtime/ref_backend.h"

namespace mxflash {
namespace {

using namespace ref;
constexpr int kDqExponent = 12;  // dq_accum f16 is kept in units of 2^-12

// Of every row, in the workspace: [num_heads_q][total_out].
struct RowStats {
  double* delta;
  uint8_t* exponent;  // the least row_exponent of the row's 32-row block
  RowStats(Arena& arena, const AttentionShape& s)
      : delta(arena.take<double>(s.num_heads_q * s.total_out)),
        exponent(arena.take<uint8_t>(s.num_heads_q * s.total_out)) {}
};

// Of one worker. Rows: q, dout and their token-contracted forms; keys: k, v, k_col; then a tile and accumulators.
struct Scratch {
  double *q, *dout, *q_col, *dout_col, *k, *v, *k_col, *p, *ds, *acc, *acc_v;
  float* block;
  explicit Scratch(Arena& a)
      : q(a.take<double>(kBlockM * kMaxDim)),
        dout(a.take<double>(kBlockM * kMaxDim)),
        q_col(a.take<double>(kBlockM * kMaxDim)),
        dout_col(a.take<double>(kBlockM * kMaxDim)),
        k(a.take<double>(kBlockN * kMaxDim)),
        v(a.take<double>(kBlockN * kMaxDim)),
        k_col(a.take<double>(kBlockN * kMaxDim)),
        p(a.take<double>(kBlockM * kBlockN)),
        ds(a.take<double>(kBlockM * kBlockN)),
        acc(a.take<double>(kBlockN * kMaxDim)),
        acc_v(a.take<double>(kBlockN * kMaxDim)),
        block(a.take<float>(kBlockN * kMaxDim)) {}
};

size_t scratch_bytes() {
  Arena arena(nullptr);
  Scratch{arena};
  return arena.used();
}

size_t stats_bytes(const AttentionShape& shape) {
  Arena arena(nullptr);
  RowStats{arena, shape};
  return arena.used();
}

// Rows first .. first + count - 1 of sequence b of one query head.
struct QueryBlock {
  int64_t b, head, first, count;
};
struct KeyBlock {
  int64_t b, kv_head, first, count;
};

class Backward {
 public:
  Backward(const AttentionBwd& args, const RowStats& stats)
      : args_(args), shape_(AttentionShape::of(args)), stats_(stats), scale_log2_(shape_.softmax_scale * kLog2e) {}

  void prepare(const QueryBlock& rows, const Scratch& s) const;
  void dk_dv(const KeyBlock& keys, const Scratch& s) const;
  void dq(const QueryBlock& own_rows, const Scratch& s) const;

 private:
  double lse_log2(const QueryBlock& rows, int64_t i) const {
    return double(load_float(args_.lse, rows.head * args_.lse.stride[0] + out_row(rows, i))) * kLog2e;
  }
  int64_t out_row(const QueryBlock& rows, int64_t i) const {
    return shape_.out_sequence(rows.b).start + rows.first + i;
  }
  int64_t stats_index(const QueryBlock& rows, int64_t i) const {
    return rows.head * shape_.total_out + out_row(rows, i);
  }
  Range keys_of_row(const QueryBlock& rows, int64_t i) const {
    return visible_keys(args_.mask, rows.first + i, rows.first + i + 1, shape_.query_sequence(rows.b).length,
                        shape_.key_sequence(rows.b).length);
  }

  void read_rows(const QueryBlock& rows, const Scratch& s) const;
  void read_keys(const KeyBlock& keys, const Scratch& s) const;
  void add_k_mean_term(const QueryBlock& rows, int64_t i, double* dq_row) const;
  double accumulate_dq(double total, double partial) const;
  void row_maxima(const QueryBlock& rows, const Scratch& s, double* max) const;
  void tile(const QueryBlock& rows, const KeyBlock& keys, const Scratch& s) const;
  void store_key_gradient(const KeyBlock& keys, const double* acc, double scale, int64_t dim, bool rotated,
                          const Tensor& out, const MxTensor& out_mx, float* block) const;

  const AttentionBwd& args_;
  const AttentionShape shape_;
  const RowStats stats_;
  const double scale_log2_;
};

const MxTensor& or_else(const MxTensor& given, const MxTensor& fallback) { return given ? given : fallback; }

void Backward::read_rows(const QueryBlock& rows, const Scratch& s) const {
  const Sequence sq = shape_.query_sequence(rows.b), so = shape_.out_sequence(rows.b);
  const Jagged seq_out = shape_.seq_out();
  MxReader(args_.q, shape_.seq_q, sq, rows.head).read(rows.first, rows.count, s.q);
  MxReader(args_.dout, seq_out, so, rows.head).read(rows.first, rows.count, s.dout);
  MxReader(or_else(args_.q_col, args_.q), shape_.seq_q, sq, rows.head).read(rows.first, rows.count, s.q_col);
  MxReader(or_else(args_.dout_col, args_.dout), seq_out, so, rows.head).read(rows.first, rows.count, s.dout_col);
}

void Backward::read_keys(const KeyBlock& keys, const Scratch& s) const {
  const Sequence sk = shape_.key_sequence(keys.b);
  MxReader(args_.k, shape_.seq_k, sk, keys.kv_head).read(keys.first, keys.count, s.k);
  MxReader(args_.v, shape_.seq_k, sk, keys.kv_head).read(keys.first, keys.count, s.v);
  MxReader(or_else(args_.k_col, args_.k), shape_.seq_k, sk, keys.kv_head).read(keys.first, keys.count, s.k_col);
}

// max_j s of every row, for callers that did not keep row_exponent. s.q holds the rows.
void Backward::row_maxima(const QueryBlock& rows, const Scratch& s, double* max) const {
  std::fill_n(max, rows.count, -HUGE_VAL);
  const Sequence sq = shape_.query_sequence(rows.b), sk = shape_.key_sequence(rows.b);
  const MxReader reader(args_.k, shape_.seq_k, sk, rows.head / shape_.group);
  const Range keys = visible_keys(args_.mask, rows.first, rows.first + rows.count, sq.length, sk.length);
  for (int64_t first = keys.first; first < keys.end; first += kBlockN) {
    const int64_t end = std::min(first + kBlockN, keys.end);
    reader.read(first, end - first, s.k);
    for (int64_t i = 0; i < rows.count; ++i) {
      const Range row = keys_of_row(rows, i);
      for (int64_t j = std::max(row.first, first); j < std::min(row.end, end); ++j) {
        const double score = dot(s.q + i * shape_.head_dim, s.k + (j - first) * shape_.head_dim, shape_.head_dim);
        max[i] = std::max(max[i], scale_log2_ * score);
      }
    }
  }
}

// delta_i = sum_c (out - v_mean) dout - dlse, from the dequantized dout; and P's exponent per 32-row block.
void Backward::prepare(const QueryBlock& rows, const Scratch& s) const {
  const int64_t dim = shape_.head_dim_v;
  read_rows(rows, s);
  for (int64_t i = 0; i < rows.count; ++i) {
    const int64_t out = row_offset(args_.out, out_row(rows, i), rows.head);
    double delta = 0;
    for (int64_t c = 0; c < dim; ++c) {
      double o = double(load_float(args_.out, out + c));
      if (args_.v_mean) {
        o -= double(load_float(args_.v_mean, row_offset(args_.v_mean, rows.b, rows.head / shape_.group) + c));
      }
      delta += o * s.dout[i * dim + c];
    }
    if (args_.dlse) delta -= double(load_float(args_.dlse, rows.head * args_.dlse.stride[0] + out_row(rows, i)));
    stats_.delta[stats_index(rows, i)] = delta;
  }
  double max[kBlockM];
  if (!args_.row_exponent) row_maxima(rows, s, max);
  for (int64_t first = 0; first < rows.count; first += kMxBlock) {
    const int64_t end = std::min(first + kMxBlock, rows.count);
    int least = 255;
    for (int64_t i = first; i < end; ++i) {
      const double lse = lse_log2(rows, i);
      if (lse == -HUGE_VAL) continue;  // no visible key: P has no such row
      int exponent = 0;
      if (args_.row_exponent) {
        exponent = static_cast<const uint8_t*>(
            args_.row_exponent.data)[rows.head * args_.row_exponent.stride[0] + out_row(rows, i)];
      } else if (const double spare = std::floor(lse - max[i]); spare > 0) {
        exponent = int(std::min(spare, 255.0));
      }
      least = std::min(least, exponent);
    }
    for (int64_t i = first; i < end; ++i) stats_.exponent[stats_index(rows, i)] = uint8_t(least);
  }
}

// P^ into s.p and dS^ into s.ds, both [rows][kBlockN]; zero where the mask hides a key.
void Backward::tile(const QueryBlock& rows, const KeyBlock& keys, const Scratch& s) const {
  const int64_t dim = shape_.head_dim, dim_v = shape_.head_dim_v;
  for (int64_t i = 0; i < rows.count; ++i) {
    double* p = s.p + i * kBlockN;
    double* ds = s.ds + i * kBlockN;
    std::fill_n(p, keys.count, 0.0);
    std::fill_n(ds, keys.count, 0.0);
    const double lse = lse_log2(rows, i);
    if (lse == -HUGE_VAL) continue;
    const double delta = stats_.delta[stats_index(rows, i)];
    const int exponent = kPExponent + stats_.exponent[stats_index(rows, i)];
    const double up = std::ldexp(1.0, exponent), down = std::ldexp(1.0, -exponent);
    const Range visible = keys_of_row(rows, i);
    const int64_t j1 = std::min(visible.end - keys.first, keys.count);
    for (int64_t j = std::max<int64_t>(visible.first - keys.first, 0); j < j1; ++j) {
      const double score = scale_log2_ * dot(s.q + i * dim, s.k + j * dim, dim);
      const double weight = std::exp2(score - lse);
      const double dp = dot(s.dout + i * dim_v, s.v + j * dim_v, dim_v);
      p[j] = down * double(decode_fp8(encode_fp8(float(weight * up), kE4m3), kE4m3));
      ds[j] = weight * (dp - delta);
    }
  }
  // dS -> dS^, per 32x32 block.
  const Fp8Format format = fp8_format(args_.ds_dtype);
  for (int64_t i0 = 0; i0 < rows.count; i0 += kMxBlock) {
    for (int64_t j0 = 0; j0 < keys.count; j0 += kMxBlock) {
      const int64_t i1 = std::min(i0 + kMxBlock, rows.count), j1 = std::min(j0 + kMxBlock, keys.count);
      uint32_t amax = 0;
      for (int64_t i = i0; i < i1; ++i) {
        for (int64_t j = j0; j < j1; ++j) amax = std::max(amax, magnitude_bits(float(s.ds[i * kBlockN + j])));
      }
      const uint8_t scale = scale_from_amax(amax, format, MxRule::rceil);
      for (int64_t i = i0; i < i1; ++i) {
        for (int64_t j = j0; j < j1; ++j) {
          double& ds = s.ds[i * kBlockN + j];
          ds = decode_mx(encode_mx(float(ds), scale, format), scale, format);
        }
      }
    }
  }
}

// Stores scale * acc [keys][dim] as float gradients and, if asked for, as MXFP8.
void Backward::store_key_gradient(const KeyBlock& keys, const double* acc, double scale, int64_t dim, bool rotated,
                                  const Tensor& out, const MxTensor& out_mx, float* block) const {
  const Sequence sk = shape_.key_sequence(keys.b);
  for (int64_t j = 0; j < keys.count; ++j) {
    double row[kMaxDim];
    for (int64_t c = 0; c < dim; ++c) row[c] = scale * acc[j * dim + c];
    if (rotated) {
      const int64_t group = rotation_group(dim);
      for (int64_t c = 0; c < dim; c += group) rotate_back(row + c, group, args_.rotate_seed, c);
    }
    for (int64_t c = 0; c < dim; ++c) block[j * dim + c] = float(row[c]);
    if (!out) continue;
    const int64_t offset = row_offset(out, sk.start + keys.first + j, keys.kv_head);
    for (int64_t c = 0; c < dim; ++c) store_float(out, offset + c, block[j * dim + c]);
  }
  if (!out_mx) return;
  const MxWriter writer(out_mx, shape_.seq_k, sk, keys.kv_head, MxRule::rceil);
  for (int64_t j = 0; j < keys.count; j += kMxBlock) {
    writer.write(keys.first + j, std::min(kMxBlock, keys.count - j), 0, dim, block + j * dim, dim);
  }
}

// dV_j = sum_i P^_ij dout_i      dK_j = softmax_scale * sum_i dS^_ij q_i      over the group's heads
void Backward::dk_dv(const KeyBlock& keys, const Scratch& s) const {
  const int64_t dim = shape_.head_dim, dim_v = shape_.head_dim_v;
  const int64_t length_q = shape_.query_sequence(keys.b).length, length_k = shape_.key_sequence(keys.b).length;
  read_keys(keys, s);
  std::fill_n(s.acc, keys.count * dim, 0.0);
  std::fill_n(s.acc_v, keys.count * dim_v, 0.0);
  const Range visible = visible_rows(args_.mask, keys.first, keys.first + keys.count, length_q, length_k);
  for (int64_t g = 0; g < shape_.group; ++g) {
    for (int64_t first = visible.first / kBlockM * kBlockM; first < visible.end; first += kBlockM) {
      const QueryBlock rows{keys.b, keys.kv_head * shape_.group + g, first, std::min(kBlockM, length_q - first)};
      read_rows(rows, s);
      tile(rows, keys, s);
      for (int64_t i = 0; i < rows.count; ++i) {
        const Range row = keys_of_row(rows, i);  // skipping hidden keys keeps 0 * NaN out
        const int64_t j1 = std::min(row.end - keys.first, keys.count);
        for (int64_t j = std::max<int64_t>(row.first - keys.first, 0); j < j1; ++j) {
          axpy(s.p[i * kBlockN + j], s.dout_col + i * dim_v, s.acc_v + j * dim_v, dim_v);
          axpy(s.ds[i * kBlockN + j], s.q_col + i * dim, s.acc + j * dim, dim);
        }
      }
    }
  }
  store_key_gradient(keys, s.acc, shape_.softmax_scale, dim, args_.rotate_qk, args_.dk, args_.dk_mx, s.block);
  store_key_gradient(keys, s.acc_v, 1.0, dim_v, false, args_.dv, args_.dv_mx, s.block);
}

// dQ_i = softmax_scale * sum_j dS^_ij k_j, summed per key tile; with shared_q over all key sequences.
void Backward::dq(const QueryBlock& own_rows, const Scratch& s) const {
  const int64_t dim = shape_.head_dim;
  double* total = s.acc_v;
  std::fill_n(total, own_rows.count * dim, 0.0);
  const int64_t last = shape_.shared_q ? shape_.batch - 1 : own_rows.b;
  for (int64_t b = own_rows.b; b <= last; ++b) {
    const QueryBlock rows{b, own_rows.head, own_rows.first, own_rows.count};
    const int64_t length_k = shape_.key_sequence(b).length;
    const Range visible =
        visible_keys(args_.mask, rows.first, rows.first + rows.count, shape_.query_sequence(b).length, length_k);
    if (!visible.empty()) read_rows(rows, s);
    for (int64_t first = visible.first / kBlockN * kBlockN; first < visible.end; first += kBlockN) {
      const KeyBlock keys{b, rows.head / shape_.group, first, std::min(kBlockN, length_k - first)};
      read_keys(keys, s);
      tile(rows, keys, s);
      std::fill_n(s.acc, rows.count * dim, 0.0);
      for (int64_t i = 0; i < rows.count; ++i) {
        const Range row = keys_of_row(rows, i);
        const int64_t j1 = std::min(row.end - keys.first, keys.count);
        for (int64_t j = std::max<int64_t>(row.first - keys.first, 0); j < j1; ++j) {
          axpy(s.ds[i * kBlockN + j], s.k_col + j * dim, s.acc + i * dim, dim);
        }
      }
      for (int64_t n = 0; n < rows.count * dim; ++n) total[n] = accumulate_dq(total[n], s.acc[n]);
    }
  }
  const Sequence sq = shape_.query_sequence(own_rows.b);
  const int64_t group = rotation_group(dim);
  for (int64_t i = 0; i < own_rows.count; ++i) {
    double* row = total + i * dim;
    scale_row(shape_.softmax_scale, row, dim);
    if (args_.rotate_qk) {
      for (int64_t c = 0; c < dim; c += group) rotate_back(row + c, group, args_.rotate_seed, c);
    }
    if (args_.dlse && args_.k_mean) {
      for (int64_t b = own_rows.b; b <= last; ++b)
        add_k_mean_term({b, own_rows.head, own_rows.first, own_rows.count}, i, row);
    }
    const int64_t offset = row_offset(args_.dq, sq.start + own_rows.first + i, own_rows.head);
    for (int64_t c = 0; c < dim; ++c) store_float(args_.dq, offset + c, float(row[c]));
  }
}

// The caller's lse holds softmax_scale * q.k_mean, so dlse reaches q through it. (It reaches k too, but dk of k -
// k_mean already has it: the shift's gradient and the mean's share of dk cancel.)
void Backward::add_k_mean_term(const QueryBlock& rows, int64_t i, double* dq_row) const {
  if (lse_log2(rows, i) == -HUGE_VAL) return;  // no visible key: lse is -inf whatever q is
  const double dlse = double(load_float(args_.dlse, rows.head * args_.dlse.stride[0] + out_row(rows, i)));
  const int64_t mean = row_offset(args_.k_mean, rows.b, rows.head / shape_.group);
  for (int64_t c = 0; c < shape_.head_dim; ++c) {
    dq_row[c] += shape_.softmax_scale * dlse * double(load_float(args_.k_mean, mean + c));
  }
}

// f16: partial sum and running sum are each rounded to fp16 in units of 2^-12; beyond +-16 the sum is Inf, and stays.
double Backward::accumulate_dq(double total, double partial) const {
  if (args_.dq_accum != Dtype::f16) return total + partial;
  constexpr float kUnits = float(1 << kDqExponent);
  const float addend = decode_f16(encode_f16(float(partial) * kUnits));
  return double(decode_f16(encode_f16(float(total) * kUnits + addend)) / kUnits);
}

size_t workspace(const AttentionBwd& args) {
  return stats_bytes(AttentionShape::of(args)) + size_t(num_threads()) * scratch_bytes();
}

Status run(const AttentionBwd& args, Stream) {
  const AttentionShape shape = AttentionShape::of(args);
  Arena arena(args.workspace);
  const RowStats stats(arena, shape);
  const auto scratch = [base = static_cast<std::byte*>(args.workspace) + arena.used()](int32_t worker) {
    Arena own(base + size_t(worker) * scratch_bytes());
    return Scratch(own);
  };
  // The workspace was checked, but another thread may have raised num_threads() since.
  const int32_t workers =
      int32_t(std::min(size_t(num_threads()), (args.workspace_size - arena.used()) / scratch_bytes()));
  const Backward backward(args, stats);

  const int64_t heads = shape.num_heads_q, row_blocks = ceil_div(shape.max_seqlen_q, kBlockM);
  // Calls body(rows, worker) for every block of rows of `batch` query sequences.
  const auto for_rows = [&](int64_t batch, auto body) {
    parallel_for(batch * heads * row_blocks, workers, [&](int64_t item, int32_t worker) {
      const int64_t b = item / (heads * row_blocks), first = item % row_blocks * kBlockM;
      const int64_t length = shape.query_sequence(b).length;
      if (first >= length) return;
      body(QueryBlock{b, item / row_blocks % heads, first, std::min(kBlockM, length - first)}, worker);
    });
  };
  for_rows(shape.batch, [&](const QueryBlock& rows, int32_t worker) { backward.prepare(rows, scratch(worker)); });

  if (args.dk_mx) clear_uncovered(args.dk_mx, shape.seq_k);
  if (args.dv_mx) clear_uncovered(args.dv_mx, shape.seq_k);
  const int64_t key_blocks = ceil_div(shape.max_seqlen_k, kBlockN);
  parallel_for(shape.batch * shape.num_heads_kv * key_blocks, workers, [&](int64_t item, int32_t worker) {
    const int64_t b = item / (shape.num_heads_kv * key_blocks), first = item % key_blocks * kBlockN;
    const int64_t length = shape.key_sequence(b).length;
    if (first >= length) return;
    const int64_t kv_head = item / key_blocks % shape.num_heads_kv;
    backward.dk_dv({b, kv_head, first, std::min(kBlockN, length - first)}, scratch(worker));
  });

  for_rows(shape.shared_q ? 1 : shape.batch,
           [&](const QueryBlock& rows, int32_t worker) { backward.dq(rows, scratch(worker)); });

  clear_slack_rows(args.dq, shape.seq_q);
  if (args.dk) clear_slack_rows(args.dk, shape.seq_k);
  if (args.dv) clear_slack_rows(args.dv, shape.seq_k);
  return {};
}

}  // namespace

const Impl<AttentionBwd> kAttentionBwdRef = ref_backend<AttentionBwd>(run, workspace);

}  // namespace mxflash
