#include "tools/bench_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kit/host_tensor.h"
#include "mx/float16.h"
#include "tools/bench_device.h"

namespace mxflash::tools {
namespace {

using kit::DeviceBuffer;
using Row = std::vector<double>;

constexpr int64_t kCheckedRows = 4;

double dot(const Row& x, const Row& y) { return std::inner_product(x.begin(), x.end(), y.begin(), 0.0); }
void add_scaled(Row& to, double factor, const Row& x) {
  for (size_t c = 0; c < to.size(); ++c) to[c] += factor * x[c];
}

// Rows of an operand [tokens][heads][dim].
struct Operand {
  const std::vector<float>& values;
  int64_t heads, dim;
  void read(int64_t token, int64_t head, Row& row) const {
    row.resize(size_t(dim));
    auto at = size_t((token * heads + head) * dim) % kPoolSize;
    for (double& x : row) {
      x = double(values[at]);
      if (++at == kPoolSize) at = 0;
    }
  }
  Row row(int64_t token, int64_t head) const {
    Row r;
    read(token, head, r);
    return r;
  }
};

// Rows of a BF16 result [tokens][heads][dim].
struct Result {
  const DeviceBuffer& buffer;
  int64_t heads, dim;
  Stream stream;
  std::vector<Row> rows(int64_t token, int64_t count, int64_t head) const {
    std::vector<uint16_t> bits(size_t(count * heads * dim));
    buffer.download(bits.data(), 2 * size_t(token * heads * dim), 2 * bits.size(), stream);
    std::vector<Row> result(static_cast<size_t>(count));
    for (size_t i = 0; i < result.size(); ++i) {
      const auto from = bits.begin() + int64_t(i) * heads * dim + head * dim;
      std::transform(from, from + dim, std::back_inserter(result[i]),
                     [](uint16_t b) { return double(decode_bf16(b)); });
    }
    return result;
  }
  Row row(int64_t token, int64_t head) const { return rows(token, 1, head).front(); }
};

struct Sequence {
  int64_t q_start, k_start, out_start, len_q, len_k;
};

std::vector<Sequence> sequences(const BenchShape& s) {
  const std::vector<int32_t> q = lens_q(s), k = lens_k(s);
  std::vector<Sequence> result;
  Sequence at{};
  for (size_t b = 0; b < k.size(); ++b) {
    at.len_q = q[s.shared_q ? 0 : b];
    at.len_k = k[b];
    result.push_back(at);
    if (!s.shared_q) at.q_start += at.len_q;
    at.k_start += at.len_k;
    at.out_start += at.len_q;
  }
  return result;
}

struct Place {
  Sequence seq;
  int64_t head;
};
std::vector<Place> places(const BenchShape& s) {
  const std::vector<Sequence> all = sequences(s);
  return {{all.front(), 0}, {all.back(), s.num_heads_q - 1}};
}

std::vector<int64_t> some_of(int64_t n) {
  std::vector<int64_t> some;
  for (int64_t i = 0; i < kCheckedRows && n > 0; ++i) some.push_back(i * (n - 1) / (kCheckedRows - 1));
  some.erase(std::unique(some.begin(), some.end()), some.end());
  return some;
}

int64_t visible_keys(const BenchShape& s, const Sequence& seq, int64_t row) {
  return s.mask.causal ? std::clamp<int64_t>(row + seq.len_k - seq.len_q + 1, 0, seq.len_k) : seq.len_k;
}

class RelativeError {
 public:
  void add(const Row& got, const Row& want) {
    for (size_t c = 0; c < want.size(); ++c) {
      error_ += (got[c] - want[c]) * (got[c] - want[c]);
      size_ += want[c] * want[c];
    }
  }
  double value() const { return size_ > 0 ? std::sqrt(error_ / size_) : std::sqrt(error_); }

 private:
  double error_ = 0, size_ = 0;
};

struct Operands {
  Operand q, k, v, dout;
  int64_t group;
  double scale;
  explicit Operands(const BenchShape& s)
      : q{pool(Source::q).values, s.num_heads_q, s.head_dim},
        k{pool(Source::k).values, s.num_heads_kv, s.head_dim},
        v{pool(Source::v).values, s.num_heads_kv, s.head_dim_v},
        dout{pool(Source::dout).values, s.num_heads_q, s.head_dim_v},
        group(s.num_heads_q / s.num_heads_kv),
        scale(1 / std::sqrt(double(s.head_dim))) {}

  // Softmax weights of a row.
  Row weights(const Sequence& seq, int64_t keys, const Row& q_row, int64_t key_head) const {
    Row p(static_cast<size_t>(keys)), k_row;
    for (int64_t j = 0; j < keys; ++j) {
      k.read(seq.k_start + j, key_head, k_row);
      p[size_t(j)] = scale * dot(q_row, k_row);
    }
    const double largest = keys > 0 ? *std::ranges::max_element(p) : 0;
    for (double& x : p) x = std::exp(x - largest);
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& x : p) x /= sum;
    return p;
  }

  // Adds one sequence's share to the gradient of a row of q.
  void add_dq(const BenchShape& s, const Sequence& seq, int64_t row, int64_t head, Row& dq) const {
    const int64_t keys = visible_keys(s, seq, row), key_head = head / group;
    const Row dout_row = dout.row(seq.out_start + row, head);
    const Row p = weights(seq, keys, q.row(seq.q_start + row, head), key_head);
    Row dp(p.size()), other;
    for (int64_t j = 0; j < keys; ++j) {
      v.read(seq.k_start + j, key_head, other);
      dp[size_t(j)] = dot(dout_row, other);
    }
    const double delta = dot(p, dp);
    for (int64_t j = 0; j < keys; ++j) {
      k.read(seq.k_start + j, key_head, other);
      add_scaled(dq, scale * p[size_t(j)] * (dp[size_t(j)] - delta), other);
    }
  }
};

}  // namespace

double out_error(const BenchShape& s, const DeviceRows& got) {
  const Operands operands(s);
  const Result out{got.out, s.num_heads_q, s.head_dim_v, got.stream};
  RelativeError error;
  for (const auto& [seq, head] : places(s)) {
    for (const int64_t row : some_of(seq.len_q)) {
      const int64_t keys = visible_keys(s, seq, row), key_head = head / operands.group;
      if (keys == 0) continue;
      const Row p = operands.weights(seq, keys, operands.q.row(seq.q_start + row, head), key_head);
      Row want(size_t(s.head_dim_v)), v_row;
      for (int64_t j = 0; j < keys; ++j) {
        operands.v.read(seq.k_start + j, key_head, v_row);
        add_scaled(want, p[size_t(j)], v_row);
      }
      error.add(out.row(seq.out_start + row, head), want);
    }
  }
  return error.value();
}

double gradient_error(const BenchShape& s, const DeviceGradients& got) {
  const Operands operands(s);
  const Result out{got.out, s.num_heads_q, s.head_dim_v, got.stream}, dq{got.dq, s.num_heads_q, s.head_dim, got.stream};
  const Result dk{got.dk, s.num_heads_kv, s.head_dim, got.stream}, dv{got.dv, s.num_heads_kv, s.head_dim_v, got.stream};
  const std::vector<Sequence> all = sequences(s);
  const int64_t total_out = all.back().out_start + all.back().len_q;
  RelativeError dq_error, dk_error, dv_error;
  for (const auto& [seq, head] : places(s)) {
    for (const int64_t row : some_of(seq.len_q)) {
      Row want(static_cast<size_t>(s.head_dim));
      if (!s.shared_q) operands.add_dq(s, seq, row, head, want);
      for (size_t b = 0; s.shared_q && b < all.size(); ++b) operands.add_dq(s, all[b], row, head, want);
      dq_error.add(dq.row(seq.q_start + row, head), want);
    }
    const int64_t key_head = head / operands.group;
    const std::vector<int64_t> keys = some_of(seq.len_k);
    std::vector<Row> k_rows, v_rows, want_dk(keys.size(), Row(size_t(s.head_dim))),
        want_dv(keys.size(), Row(size_t(s.head_dim_v)));
    for (const int64_t j : keys) {
      k_rows.push_back(operands.k.row(seq.k_start + j, key_head));
      v_rows.push_back(operands.v.row(seq.k_start + j, key_head));
    }
    Row q_row, dout_row;
    for (int64_t h = key_head * operands.group; h < (key_head + 1) * operands.group; ++h) {
      const std::vector<Row> out_rows = out.rows(seq.out_start, seq.len_q, h);
      std::vector<float> lse(size_t(seq.len_q));
      got.lse.download(lse.data(), sizeof(float) * size_t(h * total_out + seq.out_start), sizeof(float) * lse.size(),
                       got.stream);
      for (int64_t i = 0; i < seq.len_q; ++i) {
        operands.q.read(seq.q_start + i, h, q_row);
        operands.dout.read(seq.out_start + i, h, dout_row);
        const double delta = dot(dout_row, out_rows[size_t(i)]);
        const int64_t visible = visible_keys(s, seq, i);
        for (size_t n = 0; n < keys.size() && keys[n] < visible; ++n) {
          const double p = std::exp(operands.scale * dot(q_row, k_rows[n]) - double(lse[size_t(i)]));
          add_scaled(want_dv[n], p, dout_row);
          add_scaled(want_dk[n], operands.scale * p * (dot(dout_row, v_rows[n]) - delta), q_row);
        }
      }
    }
    for (size_t n = 0; n < keys.size(); ++n) {
      dk_error.add(dk.row(seq.k_start + keys[n], key_head), want_dk[n]);
      dv_error.add(dv.row(seq.k_start + keys[n], key_head), want_dv[n]);
    }
  }
  double worst = 0;
  for (const RelativeError& error : {dq_error, dk_error, dv_error}) {
    if (std::isnan(error.value())) return error.value();
    worst = std::max(worst, error.value());
  }
  return worst;
}

}  // namespace mxflash::tools
