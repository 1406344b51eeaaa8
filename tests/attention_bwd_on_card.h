// What the tests of attention_bwd on a Hopper card share: both backends on one problem, the judgement of a gradient,
// and a call whose memory stays on the card.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/mask.h"
#include "kit/cases.h"
#include "kit/compare.h"
#include "kit/mx_attention.h"
#include "kit/operands.h"
#include "kit/oracle.h"
#include "kit/runner.h"
#include "mx/float16.h"
#include "on_card.h"
#include "runtime/tensor_access.h"

namespace mxflash::kit {

// How far the SQNR against exact attention on the original operands may fall below that of ref: one scale for dS in
// place of one for a block of 32 x 32, and FP8 sums that are cut off.
constexpr double kLossDb = 0.15;
constexpr double kNoise = 2e-3;  // of a tensor's size, where ref rounds nothing

// The forward of ref, then both backwards on what it left. `out` is BF16 where nothing is said, as in training.
struct Both {
  MxAttention mx;
  OracleResult exact;
  AttentionResult ref, got;

  Both(const AttentionCase& c, const Operands& x, Dtype out = Dtype::bf16, Dtype dq_accum = Dtype::f32)
      : mx(quantize_case(c, x)), exact(oracle_attention(make_problem(c, x))) {
    const AttentionResult forward = run_attention(mx, "ref", "", {.out_dtype = out});
    ref = with_backward(forward, "ref");  // in fp32: its f16 ends at 16
    mx.dq_accum = dq_accum;
    got = with_backward(forward, "sm90");
  }
  AttentionResult with_backward(const AttentionResult& forward, const char* backend) const {
    AttentionResult r = forward;
    run_backward(mx, backend, r);
    return r;
  }
};

// Rows first .. end - 1 of [rows, width], or all.
struct Part {
  int64_t first = 0, end = -1, width = 1;
  template <class T>
  std::vector<T> of(const std::vector<T>& x) const {
    if (end < 0) return x;
    return {x.begin() + first * width, x.begin() + end * width};
  }
};

inline void expect_beside_ref(const std::string& name, const std::vector<double>& exact, const std::vector<float>& ref,
                              const std::vector<float>& got, double loss_db = kLossDb, const Part& part = {}) {
  const std::vector<double> e = part.of(exact);
  const std::vector<float> r = part.of(ref), g = part.of(got);
  double energy = 0;
  for (const double x : e) energy += x * x;
  if (energy <= 1e-20 * double(e.size())) {  // exact zeros come out as roundoff: dP is cut off 13 bits below its terms
    for (size_t i = 0; i < g.size(); ++i) ASSERT_LE(std::fabs(g[i] - r[i]), 5e-3f) << name << " at " << i;
    return;
  }
  const BesideRef b = beside_ref(e, r, g, loss_db, kNoise);
  EXPECT_TRUE(b.ok()) << name << ": SQNR " << b.got.sqnr_db << " dB, ref " << b.ref.sqnr_db << " dB, allowed "
                      << 10 * std::log10(b.ref.signal_energy / b.allowed) << " dB, worst at " << b.got.worst_index
                      << ", non-finite at " << b.got.nonfinite_mismatch;
}

inline void expect_beside_ref(const Both& x, double loss_db = kLossDb) {
  expect_beside_ref("dq", x.exact.dq, x.ref.dq, x.got.dq, loss_db);
  expect_beside_ref("dk", x.exact.dk, x.ref.dk, x.got.dk, loss_db);
  expect_beside_ref("dv", x.exact.dv, x.ref.dv, x.got.dv, loss_db);
}

// Which tokens of q and of k meet any of the other kind.
struct Meets {
  std::vector<bool> q, k;
  explicit Meets(const AttentionCase& c) : q(size_t(total_q(c)), false), k(size_t(total_k(c)), false) {
    int64_t first_q = 0, first_k = 0;
    for (int32_t b = 0; b < batch(c); ++b) {
      const int64_t length_q = c.lens_q[c.shared_q ? 0 : size_t(b)], length_k = c.lens_k[size_t(b)];
      for (int64_t i = 0; i < length_q; ++i) {
        const Range keys = visible_keys(c.mask, i, i + 1, length_q, length_k);
        if (keys.empty()) continue;
        q[size_t(first_q + i)] = true;
        std::fill(k.begin() + first_k + keys.first, k.begin() + first_k + keys.end, true);
      }
      first_q += c.shared_q ? 0 : length_q;
      first_k += length_k;
    }
  }
};

// The gradients' bytes.
struct Gradients {
  std::vector<uint8_t> dq, dk, dv;
};
// SQNR of BF16 numbers beside others; -kMaxDb where something is not finite.
inline double bf16_sqnr_db(const std::vector<uint8_t>& want, const std::vector<uint8_t>& got) {
  const auto values = [](const std::vector<uint8_t>& bytes) {
    std::vector<float> x;
    for (size_t i = 0; i + 1 < bytes.size(); i += 2) x.push_back(decode_bf16(uint16_t(bytes[i] | bytes[i + 1] << 8)));
    return x;
  };
  const std::vector<float> x = values(want);
  for (const float value : x) {
    if (!std::isfinite(value)) return -kMaxDb;
  }
  return compare(std::vector<double>(x.begin(), x.end()), values(got)).sqnr_db;
}

// Where dq, in BF16, is not asked to be deterministic, the order of its sum is free: roundings of that, and of BF16.
constexpr double kOrderDb = 40;
inline void expect_same(const Gradients& a, const Gradients& b, bool deterministic) {
  if (deterministic) {
    EXPECT_TRUE(a.dq == b.dq) << "dq";
  } else {
    EXPECT_GE(bf16_sqnr_db(a.dq, b.dq), kOrderDb) << "dq";
  }
  EXPECT_TRUE(a.dk == b.dk) << "dk";
  EXPECT_TRUE(a.dv == b.dv) << "dv";
}

// A backward by sm90, ready to run again and again, or to be captured.
class CardBackward {
 public:
  CardBackward(const MxAttention& mx, const AttentionResult& forward, Dtype gradients = Dtype::bf16) {
    load(mx, forward);
    const auto output = [&](const OwnedMx& like) {
      const auto& s = like.view.data.shape;
      outputs_.emplace_back(size_t(like.view.data.numel() * dtype_size(gradients)));
      return on_card(make_tensor(outputs_.back().data(), gradients, s[0], s[1], s[2]));
    };
    args.dq = output(mx.q);
    args.dk = output(mx.k);
    args.dv = output(mx.v);
    args.backend = "sm90";
  }

  // Other operands and lengths of the same capacity, in the same memory.
  void load(const MxAttention& mx, const AttentionResult& forward) {
    next_ = 0;
    args.q = put(mx.q);
    args.k = put(mx.k);
    args.v = put(mx.v);
    args.dout = put(mx.dout);
    const int64_t heads = mx.q.view.data.shape[1], rows = mx.total_out(), dim_v = mx.v.view.data.shape[2];
    const FloatOutput out(forward.out_dtype, rows, heads, dim_v);
    out.store(forward.out);
    args.out = on_card(make_tensor(put(out.bytes), forward.out_dtype, rows, heads, dim_v));
    args.lse = on_card(make_tensor(put(forward.lse), Dtype::f32, heads, rows));
    args.row_exponent = on_card(make_tensor(put(forward.row_exponent), Dtype::u8, heads, rows));
    if (!mx.dlse.empty()) args.dlse = on_card(make_tensor(put(mx.dlse), Dtype::f32, heads, rows));
    args.seq_q = mx.seq_q();
    args.seq_k = mx.seq_k();
    if (args.seq_q.cu_seqlens) args.seq_q.cu_seqlens = static_cast<const int32_t*>(put(mx.cu_seqlens_q));
    if (args.seq_k.cu_seqlens) args.seq_k.cu_seqlens = static_cast<const int32_t*>(put(mx.cu_seqlens_k));
    args.mask = mx.mask;
    args.softmax_scale = mx.softmax_scale;
    args.shared_q = mx.shared_q;
    args.dq_accum = mx.dq_accum;
    args.deterministic = mx.deterministic;
  }

  void run(Stream stream = nullptr) {
    if (const size_t need = attention_bwd_workspace(args); workspace_.size() < need) {
      workspace_ = DeviceBuffer(need);
      workspace_.fill(0xFF, stream);
    }
    args.workspace = workspace_.data();
    args.workspace_size = workspace_.size();
    require_ok(attention_bwd(args, stream));
  }
  void poison(Stream stream = nullptr) const {
    for (const DeviceBuffer& x : outputs_) x.fill(0xFF, stream);
  }
  // A call relies on nothing that is there.
  void poison_workspace(Stream stream = nullptr) const { workspace_.fill(0xFF, stream); }
  Gradients gradients() const {
    return {download<uint8_t>(outputs_[0]), download<uint8_t>(outputs_[1]), download<uint8_t>(outputs_[2])};
  }

  AttentionBwd args;

 private:
  void* put(const void* from, size_t size) {
    if (next_ == inputs_.size()) inputs_.emplace_back(size);
    const DeviceBuffer& buffer = inputs_[next_++];
    if (buffer.size() != size) throw std::invalid_argument("the capacity has changed");
    buffer.upload(from, size, nullptr);
    return buffer.data();
  }
  template <class T>
  void* put(const std::vector<T>& x) {
    return put(x.data(), x.size() * sizeof(T));
  }
  MxTensor put(const OwnedMx& t) {
    MxTensor view = t.view;
    view.data.data = put(t.data);
    view.scale.data = put(t.scale);
    view.data.device = view.scale.device = kCard;
    return view;
  }

  std::deque<DeviceBuffer> inputs_, outputs_;
  size_t next_ = 0;
  DeviceBuffer workspace_;
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// A [tokens, heads, dim] gradient with gaps, all bytes 0xFF before.
struct Output {
  FloatOutput storage;
  Tensor view;
  Output(const Tensor& like, Dtype dtype, int64_t gap)
      : storage(dtype, like.shape[0], like.shape[1], like.shape[2] + gap, 0xFF), view(storage.view) {
    view.shape[2] = like.shape[2];
  }
  std::vector<float> values() const {
    std::vector<float> x;
    for (int64_t i = 0; i < view.shape[0]; ++i) {
      for (int64_t h = 0; h < view.shape[1]; ++h) {
        for (int64_t c = 0; c < view.shape[2]; ++c) x.push_back(load_float(view, row_offset(view, i, h) + c));
      }
    }
    return x;
  }
  bool gaps_are_untouched() const {
    const int64_t size = dtype_size(view.dtype);
    const auto* bytes = storage.bytes.data();
    for (int64_t i = 0; i < view.shape[0]; ++i) {
      for (int64_t h = 0; h < view.shape[1]; ++h) {
        const uint8_t* row = bytes + row_offset(view, i, h) * size;
        const auto is_poison = [](uint8_t b) { return b == 0xFF; };
        if (!std::all_of(row + view.shape[2] * size, row + view.stride[1] * size, is_poison)) return false;
      }
    }
    return true;
  }
};

}  // namespace mxflash::kit
