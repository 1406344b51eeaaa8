// Every code, unit and bound of the records that the sm90 backward's pre passes write, against their definition
// (src/attention/attention_bwd_sm90.cuh) in fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "attention/attention_bwd_sm90.cuh"
#include "attention/mask.h"
#include "kit/call.h"
#include "kit/cases.h"
#include "kit/device_memory.h"
#include "kit/mx_attention.h"
#include "kit/operands.h"
#include "kit/runner.h"
#include "mx/e8m0.h"
#include "mx/float16.h"
#include "mx/fp8.h"
#include "runtime/cuda.h"
#include "runtime/tensor_access.h"

namespace mxflash::kit {
namespace {

using namespace bwd_sm90;

constexpr double kLog2e = 1.4426950408889634;

struct Records {
  const char* name;
  int32_t dim = 128, dim_v = 128;
  Distribution distribution = Distribution::normal;
  Dtype out = Dtype::bf16;
  ScaleLayout layout = ScaleLayout::linear;
  bool expand = false;  // scales in row32 and col32 blocks
  Dtype dout = Dtype::e4m3;
  bool v_mean = false, dlse = false, poison = false, shared_q = false, long_rows = false;
  int not_finite = 0;  // in out, in lse, in dout
};

// Copies on the device, until the test ends.
struct Device {
  DeviceStream stream;
  std::list<DeviceBuffer> buffers;
  void* put(const void* from, size_t bytes) {
    buffers.emplace_back(std::max<size_t>(bytes, 1));
    if (bytes) buffers.back().upload(from, bytes, stream.get());
    return buffers.back().data();
  }
  template <class T>
  void* put(const std::vector<T>& x) {
    return put(x.data(), x.size() * sizeof(T));
  }
  Tensor move(Tensor t, const std::vector<uint8_t>& bytes) {
    t.data = static_cast<uint8_t*>(put(bytes)) + (static_cast<const uint8_t*>(t.data) - bytes.data());
    t.device = {DeviceType::cuda, 0};
    return t;
  }
  MxTensor move(const OwnedMx& x) {
    MxTensor t = x.view;
    t.data = move(t.data, x.data);
    t.scale = move(t.scale, x.scale);
    return t;
  }
  Jagged move(Jagged seq) {
    if (seq.cu_seqlens) {
      seq.cu_seqlens = static_cast<const int32_t*>(put(seq.cu_seqlens, size_t(seq.batch + 1) * sizeof(int32_t)));
    }
    return seq;
  }
};

class AttentionBwdRecords : public testing::TestWithParam<Records> {
 protected:
  void run();
  void check_rows(int64_t b, int64_t head, int64_t tile);
  void check_keys(int64_t b, int64_t head, int64_t tile);
  void check_head(int64_t b, int64_t head);

  // What is at `p` of the workspace.
  template <class T>
  const T* host(const T* p) const {
    return reinterpret_cast<const T*>(workspace_.data() + (reinterpret_cast<uintptr_t>(p) - base_));
  }
  const HeadScale& head_scale(int64_t b, int64_t kv_head) const {
    return host(call_->w.head_scale)[b * call_->shape.num_heads_kv + kv_head];
  }
  double value(const std::vector<float>& x, int64_t token, int64_t head, int64_t heads, int64_t dim, int64_t c) const {
    return c < dim ? double(x[size_t((token * heads + head) * dim + c)]) : 0;
  }
  bool is_there(int64_t head, int64_t out_row) const { return lse(head, out_row) != -HUGE_VAL; }
  double lse(int64_t head, int64_t out_row) const {
    return double(forward_.lse[size_t(head * mx_.total_out() + out_row)]);
  }
  int pe(int64_t head, int64_t out_row) const {
    return 8 + forward_.row_exponent[size_t(head * mx_.total_out() + out_row)];
  }
  double delta(int64_t b, int64_t head, int64_t out_row, double* size = nullptr) const;
  // One code: x 2^e, rounded; nothing is to saturate.
  void expect_code(uint8_t code, double x, int e, const std::string& where) {
    const double scaled = std::ldexp(x, e);
    const uint8_t want = encode_fp8(float(scaled), kE4m3);
    const bool nan = std::isnan(x);
    wrong_ += nan ? (code & 0x7F) != 0x7F : (code != want && !(want % 128 == 0 && code % 128 == 0));
    wrong_ += std::fabs(scaled) > 448;
    if (wrong_ > 0 && first_.empty()) {
      first_ = where + ": " + std::to_string(code) + ", want " + std::to_string(want) + " of " + std::to_string(scaled);
    }
  }

  Records o_{};
  MxAttention mx_;
  AttentionResult forward_;
  std::vector<float> q_, k_, v_, dout_, v_mean_;
  std::optional<Call> call_;
  std::vector<uint8_t> workspace_;
  uintptr_t base_ = 0;
  int64_t dim_ = 0, dim_v_ = 0, heads_ = 0, heads_kv_ = 0;
  int64_t wrong_ = 0;
  std::string first_;
};

std::vector<float> rounded_to_bf16(const std::vector<float>& x) {
  std::vector<float> y;
  for (const float f : x) y.push_back(std::bit_cast<float>(uint32_t(encode_bf16(f)) << 16));
  return y;
}

void AttentionBwdRecords::run() {
  AttentionCase c{.name = "records",
                  .lens_q = {150, 1, 300},
                  .lens_k = {200, 64, 290},
                  .num_heads_q = 4,
                  .num_heads_kv = 2,
                  .head_dim = o_.dim,
                  .head_dim_v = o_.dim_v,
                  .mask = {.causal = true},
                  .shared_q = o_.shared_q,
                  .distribution = o_.distribution,
                  .with_dlse = o_.dlse};
  if (o_.shared_q) c.lens_q = {150};
  if (o_.long_rows) c.lens_q = {2100, 64}, c.lens_k = {130, 3}, c.num_heads_q = 2;
  mx_ = quantize_case(c, make_operands(c), o_.dout);
  if (o_.expand) mx_ = expand_squares(mx_, o_.layout);
  if (o_.poison) mx_ = poison_padding(mx_);
  heads_ = c.num_heads_q, heads_kv_ = c.num_heads_kv, dim_ = o_.dim, dim_v_ = o_.dim_v;
  if (o_.v_mean) {
    v_mean_.resize(size_t(mx_.batch * heads_kv_ * dim_v_));
    for (size_t i = 0; i < v_mean_.size(); ++i) v_mean_[i] = float(int(i * 37 % 19) - 9) / 8;
  }
  forward_ = run_attention(mx_, "ref", "", {.v_mean = v_mean_});
  if (o_.out == Dtype::bf16) forward_.out = rounded_to_bf16(forward_.out);
  if (o_.not_finite) {
    forward_.out[size_t((100 * heads_ + 1) * dim_v_ + 5)] = HUGE_VALF;
    forward_.lse[size_t(2 * mx_.total_out() + 101)] = NAN;
    MxTensor& t = mx_.dout.view;  // the block of token 130
    const ScaleIndex at{0, 128 / 32, 1};
    static_cast<uint8_t*>(
        t.scale.data)[scale_offset(t.block, t.layout, padded_token_count(mx_.total_out(), mx_.seq_out()), dim_v_, at)] =
        kE8m0Nan;
  }
  q_ = ref_dequantize(mx_.q.view, mx_.seq_q());
  k_ = ref_dequantize(mx_.k.view, mx_.seq_k());
  v_ = ref_dequantize(mx_.v.view, mx_.seq_k());
  dout_ = ref_dequantize(mx_.dout.view, mx_.seq_out());

  Device device;
  const int64_t total_out = mx_.total_out(), total_q = mx_.q.view.data.shape[0], total_k = mx_.k.view.data.shape[0];
  const auto tensor = [&](void* p, Dtype dtype, int64_t a, int64_t b, int64_t d = 0) {
    Tensor t = d ? make_tensor(p, dtype, a, b, d) : make_tensor(p, dtype, a, b);
    t.device = {DeviceType::cuda, 0};
    return t;
  };
  std::vector<uint16_t> out16;
  for (const float x : forward_.out) out16.push_back(uint16_t(std::bit_cast<uint32_t>(x) >> 16));
  std::vector<float> gradient(
      size_t(std::max({total_q * heads_, total_k * heads_kv_, total_out * heads_}) * std::max(dim_, dim_v_)));
  AttentionBwd a{.q = device.move(mx_.q),
                 .k = device.move(mx_.k),
                 .v = device.move(mx_.v),
                 .dout = device.move(mx_.dout),
                 .out = tensor(o_.out == Dtype::bf16 ? device.put(out16) : device.put(forward_.out), o_.out, total_out,
                               heads_, dim_v_),
                 .lse = tensor(device.put(forward_.lse), Dtype::f32, heads_, total_out),
                 .row_exponent = tensor(device.put(forward_.row_exponent), Dtype::u8, heads_, total_out),
                 .dq = tensor(device.put(gradient), Dtype::f32, total_q, heads_, dim_),
                 .dk = tensor(device.put(gradient), Dtype::f32, total_k, heads_kv_, dim_),
                 .dv = tensor(device.put(gradient), Dtype::f32, total_k, heads_kv_, dim_v_),
                 .seq_q = device.move(mx_.seq_q()),
                 .seq_k = device.move(mx_.seq_k()),
                 .mask = mx_.mask,
                 .shared_q = mx_.shared_q};
  if (!mx_.q_col.data.empty()) {
    a.q_col = device.move(mx_.q_col), a.k_col = device.move(mx_.k_col), a.dout_col = device.move(mx_.dout_col);
  }
  if (o_.v_mean) a.v_mean = make_tensor(device.put(v_mean_), Dtype::f32, mx_.batch, heads_kv_, dim_v_);
  if (o_.dlse) a.dlse = tensor(device.put(mx_.dlse), Dtype::f32, heads_, total_out);
  size_t bytes = 0;
  Call(a, nullptr, &bytes);
  const DeviceBuffer workspace(bytes);
  workspace.fill(0xFF, device.stream.get());
  call_.emplace(a, workspace.data());
  require_ok(pre(a, *call_, device.stream.get()));
  device.stream.wait();
  workspace_.resize(bytes);
  workspace.download(workspace_.data(), 0, bytes, device.stream.get());
  base_ = reinterpret_cast<uintptr_t>(workspace.data());
  // The host may read its own lengths.
  call_->shape.seq_q = mx_.seq_q(), call_->shape.seq_k = mx_.seq_k();
}

double AttentionBwdRecords::delta(int64_t b, int64_t head, int64_t out_row, double* size) const {
  double sum = 0, most = 0;
  for (int64_t c = 0; c < dim_v_; ++c) {
    double out = double(forward_.out[size_t((out_row * heads_ + head) * dim_v_ + c)]);
    if (o_.v_mean) out -= double(v_mean_[size_t((b * heads_kv_ + head / (heads_ / heads_kv_)) * dim_v_ + c)]);
    const double term = out * value(dout_, out_row, head, heads_, dim_v_, c);
    sum += term, most += std::fabs(term);
  }
  if (o_.dlse) {
    const double term = double(mx_.dlse[size_t(head * mx_.total_out() + out_row)]);
    sum -= term, most += std::fabs(term);
  }
  if (size) *size = most;
  return sum;
}

void AttentionBwdRecords::check_rows(int64_t b, int64_t head, int64_t tile) {
  const Sequence out = call_->shape.out_sequence(b), q = call_->shape.query_sequence(b);
  const int dim = call_->dim;
  const int64_t index = head * call_->row_tiles + out.padded_start / kRows + tile;
  const uint8_t* record = host(call_->w.rows) + index * RowRecord::bytes(dim);
  RowHeader h;
  std::memcpy(&h, record + RowRecord::header(dim), sizeof h);
  const int16_t* row_unit = host(call_->w.row_unit) + index * kRows;
  const float* stats = reinterpret_cast<const float*>(record + RowRecord::lse(dim));
  const HeadScale& scale = head_scale(b, head / (heads_ / heads_kv_));
  EXPECT_GE(h.t, scale.t);
  EXPECT_LE(h.t, scale.t + kUnitRange);
  EXPECT_GE(h.w, scale.w);
  EXPECT_LE(h.w, scale.w + kUnitRange);
  int most_pe = 0;
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = kRows * tile + i, out_row = out.start + row, q_row = q.start + row;
    const std::string where = "sequence " + std::to_string(b) + ", head " + std::to_string(head) + ", row " +
                              std::to_string(row) + ", channel ";
    const bool there = row < out.length && is_there(head, out_row);
    const int pe_i = there ? pe(head, out_row) : 8, er = there ? row_unit[i] - pe_i : 0;
    if (there) most_pe = std::max(most_pe, pe_i);
    int position = 0, stat = 0;
    while (16 * (position >> 4) + 8 * (position >> 1 & 1) + 2 * (position >> 2 & 3) + (position & 1) != i) ++position;
    while (stats_row(stat) != i) ++stat;
    double largest = 0;
    bool nan = false;
    for (int c = 0; c < dim; ++c) {
      const double x = there ? value(q_, q_row, head, heads_, dim_, c) : 0;
      const double y = there ? value(dout_, out_row, head, heads_, dim_v_, c) : 0;
      const auto at = [&](int part, int64_t offset, int span) { return record[part + swizzled(offset, span)]; };
      expect_code(at(RowRecord::q(dim), i * dim + c, dim), x, -h.q_scale, "q, " + where + std::to_string(c));
      expect_code(at(RowRecord::dout(dim), i * dim + c, dim), y, er, "dout, " + where + std::to_string(c));
      expect_code(at(RowRecord::dout_t(dim), c * kRows + position, kRows), y, h.w - pe_i,
                  "dout^t, " + where + std::to_string(c));
      expect_code(at(RowRecord::q_t(dim), c * kRows + position, kRows), x, h.t - pe_i - er,
                  "q^t, " + where + std::to_string(c));
      nan |= std::isnan(y);
      if (!std::isnan(y)) largest = std::max(largest, std::fabs(y));
    }
    if (!there) {
      EXPECT_EQ(stats[stat], HUGE_VALF) << where;
      EXPECT_EQ(stats[kRows + stat], 0) << where;
      continue;
    }
    // dout fills its range, but for rows far below their block, and rows of dlse.
    if (!o_.dlse && largest > 0 && er < 100 && !nan) {
      int block = -kE8m0Bias;
      for (int64_t r = row / 32 * 32; r < std::min(row / 32 * 32 + 32, out.length); ++r) {
        for (int c = 0; c < dim_v_; ++c) {
          const double y = std::fabs(value(dout_, out.start + r, head, heads_, dim_v_, c));
          if (y > 0) block = std::max(block, exponent_for(float(y)));
        }
      }
      EXPECT_TRUE(std::ldexp(largest, er) > 224 || er >= 14 - block) << where << " er " << er;
    }
    const double want_lse = lse(head, out_row) * kLog2e - pe_i;
    double size = 0;
    const double want_delta = std::ldexp(delta(b, head, out_row, &size), er);
    if (std::isnan(want_lse)) {
      EXPECT_TRUE(std::isnan(stats[stat])) << where;
    } else {
      EXPECT_NEAR(stats[stat], want_lse, 4e-7 * (std::fabs(want_lse) + pe_i)) << where;
    }
    if (std::isfinite(want_delta)) {
      EXPECT_NEAR(stats[kRows + stat], want_delta, 1e-5 * std::ldexp(size, er)) << where;
    } else {
      EXPECT_TRUE(std::isnan(stats[kRows + stat])) << where;
    }
  }
  EXPECT_EQ(h.dq_unit, std::max(most_pe - 3, 0));
}

void AttentionBwdRecords::check_keys(int64_t b, int64_t head, int64_t tile) {
  const Sequence s = call_->shape.key_sequence(b);
  const int dim = call_->dim;
  const int64_t index = head * call_->key_tiles + s.padded_start / kKeys + tile;
  const uint8_t* record = host(call_->w.keys) + index * KeyRecord::bytes(dim);
  const KeyTile& scale = host(call_->w.key_tile)[index];
  const int kt = head_scale(b, head).kt;
  EXPECT_LE(scale.k_scale, kt);
  double most_k = 0, most_v = 0;
  for (int j = 0; j < kKeys; ++j) {
    const int64_t key = kKeys * tile + j;
    const std::string where = "sequence " + std::to_string(b) + ", head " + std::to_string(head) + ", key " +
                              std::to_string(key) + ", channel ";
    const int position = 16 * (j / 16) + 2 * (j % 8) + j % 16 / 8;
    for (int c = 0; c < dim; ++c) {
      const double x = key < s.length ? value(k_, s.start + key, head, heads_kv_, dim_, c) : 0;
      const double y = key < s.length ? value(v_, s.start + key, head, heads_kv_, dim_v_, c) : 0;
      most_k = std::max(most_k, std::fabs(x)), most_v = std::max(most_v, std::fabs(y));
      const auto at = [&](int part, int64_t offset, int span) { return record[part + swizzled(offset, span)]; };
      expect_code(at(KeyRecord::k(dim), j * dim + c, dim), x, -scale.k_scale, "k, " + where + std::to_string(c));
      expect_code(at(KeyRecord::v(dim), j * dim + c, dim), y, -scale.v_scale, "v, " + where + std::to_string(c));
      expect_code(at(KeyRecord::k_t(dim), c * kKeys + position, kKeys), x, -kt, "k^t, " + where + std::to_string(c));
    }
  }
  // The largest elements are near the top of the range.
  EXPECT_GE(std::ldexp(most_k, -scale.k_scale), 220);
  EXPECT_GE(std::ldexp(most_v, -scale.v_scale), 220);
}

// u, and that no dS8 saturates with it.
void AttentionBwdRecords::check_head(int64_t b, int64_t kv_head) {
  const Sequence out = call_->shape.out_sequence(b), q = call_->shape.query_sequence(b),
                 keys = call_->shape.key_sequence(b);
  const HeadScale& scale = head_scale(b, kv_head);
  double v_norm = 0, norm = 0, most = 0, most_delta = 0;
  for (int64_t j = 0; j < keys.length; ++j) {
    double sum = 0;
    for (int64_t c = 0; c < dim_v_; ++c) sum += std::pow(value(v_, keys.start + j, kv_head, heads_kv_, dim_v_, c), 2);
    v_norm = std::max(v_norm, std::sqrt(sum));
  }
  EXPECT_NEAR(scale.v_norm, v_norm, 1e-5 * v_norm);
  const int64_t group = heads_ / heads_kv_;
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (int64_t i = 0; i < out.length; ++i) {
      const int64_t out_row = out.start + i;
      if (!is_there(head, out_row)) continue;
      const int64_t at = head * call_->row_tiles * kRows + out.padded_start + i;
      const int unit = host(call_->w.row_unit)[at], er = unit - pe(head, out_row);
      const double d = delta(b, head, out_row);
      double sum = 0;
      for (int64_t c = 0; c < dim_v_; ++c) sum += std::pow(value(dout_, out_row, head, heads_, dim_v_, c), 2);
      if (std::isnan(sum)) continue;
      const bool large = pe(head, out_row) == 8 && !o_.dlse && !o_.v_mean;
      norm = std::max(norm, std::ldexp(std::sqrt(sum), er) * (large ? 0.5625 : 1));
      if (!std::isfinite(d) || std::isnan(lse(head, out_row))) continue;
      if (!large) most_delta = std::max(most_delta, std::fabs(std::ldexp(d, er)));
      const Range visible = visible_keys(mx_.mask, i, i + 1, q.length, keys.length);
      for (int64_t j = visible.first; j < visible.end; ++j) {
        double s = 0, dp = 0;
        for (int64_t c = 0; c < dim_; ++c) {
          s += value(q_, q.start + i, head, heads_, dim_, c) * value(k_, keys.start + j, kv_head, heads_kv_, dim_, c);
        }
        for (int64_t c = 0; c < dim_v_; ++c) {
          dp +=
              value(dout_, out_row, head, heads_, dim_v_, c) * value(v_, keys.start + j, kv_head, heads_kv_, dim_v_, c);
        }
        const double p = std::exp(s * call_->shape.softmax_scale - lse(head, out_row));
        most = std::max(most, std::fabs(std::ldexp(p * (dp - d), unit)));
      }
    }
  }
  EXPECT_NEAR(scale.norm, norm, 1e-5 * norm);
  EXPECT_NEAR(scale.delta, most_delta, 1e-4 * most_delta + 1e-3);
  EXPECT_LE(std::ldexp(most, scale.u()), 448);
}

TEST_P(AttentionBwdRecords, AreWhatTheContractSays) {
  if (const Status s = has_compute_capability(90); !s.ok()) GTEST_SKIP() << s.message;
  o_ = GetParam();
  run();
  for (int64_t b = 0; b < mx_.batch; ++b) {
    const Sequence out = call_->shape.out_sequence(b), keys = call_->shape.key_sequence(b);
    for (int64_t head = 0; head < heads_; ++head) {
      for (int64_t tile = 0; tile * kRows < out.length; ++tile) check_rows(b, head, tile);
    }
    for (int64_t head = 0; head < heads_kv_; ++head) {
      for (int64_t tile = 0; tile * kKeys < keys.length; ++tile) check_keys(b, head, tile);
      check_head(b, head);
    }
  }
  EXPECT_EQ(wrong_, 0) << "first " << first_;
}

INSTANTIATE_TEST_SUITE_P(
    Calls, AttentionBwdRecords,
    testing::Values(Records{.name = "d128"}, Records{.name = "d64", .dim = 64, .dim_v = 64},
                    Records{.name = "d96_d64", .dim = 96, .dim_v = 64},
                    Records{.name = "d40_d72", .dim = 40, .dim_v = 72}, Records{.name = "out_f32", .out = Dtype::f32},
                    Records{.name = "shared_q", .shared_q = true},
                    Records{.name = "wide_rows", .distribution = Distribution::wide_row_gradients},
                    Records{.name = "peaky", .distribution = Distribution::peaky},
                    Records{.name = "outliers", .distribution = Distribution::outlier_channels},
                    Records{.name = "mean_v", .distribution = Distribution::mean_v},
                    Records{.name = "v_mean", .v_mean = true}, Records{.name = "dlse", .dlse = true},
                    Records{.name = "poison", .poison = true}, Records{.name = "rows_linear", .expand = true},
                    Records{.name = "rows_atoms", .layout = ScaleLayout::atom128x4, .expand = true},
                    Records{.name = "e5m2", .dout = Dtype::e5m2}, Records{.name = "hidden_rows", .long_rows = true},
                    Records{.name = "not_finite", .not_finite = 1}),
    [](const auto& info) { return std::string(info.param.name); });

// One row that is not finite, of the first query head of the first sequence, reaches what depends on it as in ref, and
// nothing of other sequences or key heads.
struct NotFinite {
  const char* name;
  void (*spoil)(MxAttention&, AttentionResult&, int64_t row);
  bool dv;  // as well
};

class AttentionBwdNotFinite : public testing::TestWithParam<NotFinite> {};

TEST_P(AttentionBwdNotFinite, ReachesWhatDependsOnIt) {
  if (const Status s = has_compute_capability(90); !s.ok()) GTEST_SKIP() << s.message;
  constexpr int64_t kRow = 150, kHeads = 4, kHeadsKv = 2, kDim = 64;
  const AttentionCase c{.name = "not_finite",
                        .lens_q = {300, 100},
                        .lens_k = {300, 100},
                        .num_heads_q = kHeads,
                        .num_heads_kv = kHeadsKv,
                        .head_dim = kDim,
                        .head_dim_v = kDim,
                        .mask = {.causal = true},
                        .with_dlse = true};
  MxAttention mx = quantize_case(c, make_operands(c));
  AttentionResult forward = run_attention(mx, "ref", "");
  GetParam().spoil(mx, forward, kRow);
  for (const char* backend : {"ref", "sm90"}) {
    AttentionResult r = forward;
    run_backward(mx, backend, r);
    int64_t wrong = 0;
    for (int64_t token = 0; token < 400; ++token) {
      for (int64_t head = 0; head < kHeads; ++head) {
        for (int64_t n = 0; n < kDim; ++n) {
          const float dq = r.dq[size_t((token * kHeads + head) * kDim + n)];
          if (token == kRow && head == 0) wrong += !std::isnan(dq);
          if (token >= 300 || head >= 2) wrong += !std::isfinite(dq);
          if (head >= kHeadsKv) continue;
          const float dk = r.dk[size_t((token * kHeadsKv + head) * kDim + n)];
          const float dv = r.dv[size_t((token * kHeadsKv + head) * kDim + n)];
          if (token <= kRow && head == 0) wrong += !std::isnan(dk) + (GetParam().dv && !std::isnan(dv));
          if (token >= 300 || head == 1) wrong += !std::isfinite(dk) + !std::isfinite(dv);
          wrong += !GetParam().dv && !std::isfinite(dv);
        }
      }
    }
    EXPECT_EQ(wrong, 0) << backend;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Calls, AttentionBwdNotFinite,
    testing::Values(
        NotFinite{"dlse_inf", [](MxAttention& mx, AttentionResult&, int64_t row) { mx.dlse[size_t(row)] = HUGE_VALF; },
                  false},
        NotFinite{"dlse_nan", [](MxAttention& mx, AttentionResult&, int64_t row) { mx.dlse[size_t(row)] = NAN; },
                  false},
        NotFinite{"out_inf",
                  [](MxAttention&, AttentionResult& r, int64_t row) { r.out[size_t(row * 4 * 64 + 3)] = -HUGE_VALF; },
                  false},
        NotFinite{"out_nan",
                  [](MxAttention&, AttentionResult& r, int64_t row) { r.out[size_t(row * 4 * 64 + 3)] = NAN; }, false},
        NotFinite{"lse_nan", [](MxAttention&, AttentionResult& r, int64_t row) { r.lse[size_t(row)] = NAN; }, true}),
    [](const auto& info) { return std::string(info.param.name); });

// FP16 sums of a tile have one unit, that of its row of the most keys; rows of few keys beside it keep their bits.
TEST(AttentionBwdHalfSums, RowsOfFewKeysBesideRowsOfMany) {
  if (const Status s = has_compute_capability(90); !s.ok()) GTEST_SKIP() << s.message;
  constexpr int64_t kRowCount = 64, kKeyCount = 8192, kDim = 64;
  const AttentionCase c{.name = "half_sums",
                        .lens_q = {int32_t(kRowCount)},
                        .lens_k = {int32_t(kKeyCount)},
                        .head_dim = kDim,
                        .head_dim_v = kDim};
  Operands operands = make_operands(c);
  for (int64_t i = 0; i < kRowCount * kDim; ++i) operands.q[size_t(i)] *= i / kDim % 2 ? 4.0f : 0.01f;
  const MxAttention mx = quantize_case(c, operands);
  AttentionResult forward = run_attention(mx, "ref", "");
  int least = 255, most = 0;
  for (const int e : forward.row_exponent) least = std::min(least, e), most = std::max(most, e);
  EXPECT_GE(most - least, 10);
  std::vector<float> dq[2];
  for (const Dtype dtype : {Dtype::f32, Dtype::f16}) {
    std::vector<float>& to = dq[dtype == Dtype::f16];
    to.resize(size_t(kRowCount * kDim));
    std::vector<float> dk(size_t(kKeyCount * kDim)), dv = dk;
    const auto view = [&](std::vector<float>& x) {
      return make_tensor(x.data(), Dtype::f32, int64_t(x.size()) / kDim, 1, kDim);
    };
    require_ok(call(AttentionBwd{.q = mx.q.view,
                                 .k = mx.k.view,
                                 .v = mx.v.view,
                                 .dout = mx.dout.view,
                                 .out = view(forward.out),
                                 .lse = make_tensor(forward.lse.data(), Dtype::f32, 1, kRowCount),
                                 .row_exponent = make_tensor(forward.row_exponent.data(), Dtype::u8, 1, kRowCount),
                                 .dq = view(to),
                                 .dk = view(dk),
                                 .dv = view(dv),
                                 .dq_accum = dtype,
                                 .backend = "sm90"}));
  }
  // 64 additions and as many addends, each rounded to 11 bits of at most the largest partial sum: 64 2^-12 at the very
  // worst, an eighth of that as a root of squares.
  for (int64_t row = 0; row < kRowCount; ++row) {
    double size = 0, error = 0;
    for (int64_t n = row * kDim; n < (row + 1) * kDim; ++n) {
      size += std::pow(double(dq[0][size_t(n)]), 2);
      error += std::pow(double(dq[1][size_t(n)]) - double(dq[0][size_t(n)]), 2);
    }
    EXPECT_LE(std::sqrt(error), 3e-3 * std::sqrt(size)) << "row " << row;
  }
}

}  // namespace
}  // namespace mxflash::kit
