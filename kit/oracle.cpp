// Two passes. The query pass owns blocks of query rows: exact maximum, exact sum, out, lse, dq. The key pass owns
// blocks of keys, recomputes P and gives dk and dv. Every output element has one owner and one order of summation, so
// results do not depend on the threads. The visible keys of a row, and the visible queries of a key, are one interval
// each: loops run over these intervals only, so what is masked is never read and a NaN there cannot leak as 0 * NaN.
#include "kit/oracle.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mxflash::kit {
namespace {

constexpr int64_t kBlockRows = 16;  // rows that a task owns
constexpr int64_t kTileRows = 32;   // rows of the other side that it reads together, so that they come from cache
constexpr double kInf = std::numeric_limits<double>::infinity();

struct Interval {
  int64_t begin = 0, end = 0;
};

// Rows of one head of a packed tensor, or of a part of it. The tensor may be empty: no address before an access.
struct Rows {
  const double* tensor;
  int64_t offset, stride;
  const double* operator[](int64_t row) const { return tensor + offset + row * stride; }
  Rows from(int64_t row) const { return {tensor, offset + row * stride, stride}; }
};

struct Sequence {
  int64_t q_begin, q_len;  // rows of q
  int64_t out_begin;       // first row of out, lse, dout; there are q_len
  int64_t k_begin, k_len;  // rows of k and v
};

// y[j] = x . rows[j] for j in js. Four rows and four partial sums a row keep the adders busy.
void dots(const double* x, Rows rows, Interval js, int64_t dim, double* y) {
  constexpr int64_t kLanes = 4;
  const int64_t vector_dim = dim - dim % kLanes;
  for (int64_t j = js.begin; j < js.end; j += 4) {
    // A group of less than four repeats its last row.
    std::array<const double*, 4> row;
    for (int64_t r = 0; r < 4; ++r) row[r] = rows[std::min(j + r, js.end - 1)];
    double sum[4][kLanes] = {};
    for (int64_t c = 0; c < vector_dim; c += kLanes) {
      for (int64_t r = 0; r < 4; ++r) {
        for (int64_t lane = 0; lane < kLanes; ++lane) sum[r][lane] += x[c + lane] * row[r][c + lane];
      }
    }
    for (int64_t r = 0; r < std::min<int64_t>(4, js.end - j); ++r) {
      double total = (sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3]);
      for (int64_t c = vector_dim; c < dim; ++c) total += x[c] * row[r][c];
      y[j + r] = total;
    }
  }
}

// y += sum of weight[j] * rows[j] over js.
void add_weighted(const double* weight, Rows rows, Interval js, int64_t dim, double* __restrict y) {
  int64_t j = js.begin;
  for (; j + 4 <= js.end; j += 4) {
    const double *r0 = rows[j], *r1 = rows[j + 1], *r2 = rows[j + 2], *r3 = rows[j + 3];
    const double w0 = weight[j], w1 = weight[j + 1], w2 = weight[j + 2], w3 = weight[j + 3];
    for (int64_t c = 0; c < dim; ++c) y[c] += (w0 * r0[c] + w1 * r1[c]) + (w2 * r2[c] + w3 * r3[c]);
  }
  for (; j < js.end; ++j) {
    for (int64_t c = 0; c < dim; ++c) y[c] += weight[j] * rows[j][c];
  }
}

// Calls body(r, part) for the part of every ranges[r] within a tile, tile after tile.
template <class Body>
void for_each_tile(std::span<const Interval> ranges, const Body& body) {
  Interval all{std::numeric_limits<int64_t>::max(), 0};
  for (const Interval& range : ranges) {
    if (range.begin < range.end) all = {std::min(all.begin, range.begin), std::max(all.end, range.end)};
  }
  for (int64_t tile = all.begin; tile < all.end; tile += kTileRows) {
    for (size_t r = 0; r < ranges.size(); ++r) {
      const Interval part{std::max(ranges[r].begin, tile), std::min(ranges[r].end, tile + kTileRows)};
      if (part.begin < part.end) body(int64_t(r), part);
    }
  }
}

// body(task, thread) for every task; tasks are handed out in order.
template <class Body>
void parallel_for(int64_t num_tasks, int num_threads, const Body& body) {
  std::atomic<int64_t> next = 0;
  const auto work = [&](int thread) {
    for (int64_t task = next++; task < num_tasks; task = next++) body(task, thread);
  };
  std::vector<std::thread> threads;
  for (int thread = 1; thread < std::min<int64_t>(num_threads, num_tasks); ++thread) threads.emplace_back(work, thread);
  work(0);
  for (std::thread& thread : threads) thread.join();
}

void require(bool condition, const std::string& rule, int64_t got) {
  if (!condition) throw std::invalid_argument("oracle_attention: " + rule + ", got " + std::to_string(got));
}

// The number of rows of x; throws if it is not a whole one.
int64_t rows_of(const std::vector<double>& x, int64_t row_size, const std::string& name) {
  const auto size = int64_t(x.size());
  require(size % row_size == 0, "size of " + name + " must be a multiple of " + std::to_string(row_size), size);
  return size / row_size;
}

void check_cu_seqlens(const std::vector<int64_t>& cu, int64_t total, const std::string& name) {
  require(!cu.empty() && cu[0] == 0, name + " must begin with 0", cu.empty() ? -1 : cu[0]);
  for (size_t b = 1; b < cu.size(); ++b) require(cu[b] >= cu[b - 1], name + " must not decrease", cu[b]);
  require(cu.back() <= total, name + " must not exceed the " + std::to_string(total) + " rows there are", cu.back());
}

class Oracle {
 public:
  explicit Oracle(const OracleProblem& problem);
  OracleResult run();

 private:
  struct Task {
    int64_t sequence, head, begin;  // a block of kBlockRows rows (or keys) from `begin` on
  };
  struct Scratch {
    std::vector<double> p, ds;  // [kBlockRows][longest key sequence]
  };

  Interval visible_keys(const Sequence& seq, int64_t i) const;
  Interval visible_queries(const Sequence& seq, int64_t j) const;
  void query_block(const Sequence& seq, int64_t head, Interval rows, Scratch& scratch);
  void key_block(const Sequence& seq, int64_t head_kv, Interval keys);

  // Row 0 is the first row of the sequence.
  Rows q_rows(const Sequence& seq, int64_t head) const { return rows(p_.q, seq.q_begin, p_.num_heads_q, head, d_); }
  Rows k_rows(const Sequence& seq, int64_t head) const { return rows(p_.k, seq.k_begin, p_.num_heads_kv, head, d_); }
  Rows v_rows(const Sequence& seq, int64_t head) const { return rows(p_.v, seq.k_begin, p_.num_heads_kv, head, dv_); }
  Rows dout_rows(const Sequence& seq, int64_t head) const {
    return rows(p_.dout, seq.out_begin, p_.num_heads_q, head, dv_);
  }
  static Rows rows(const std::vector<double>& x, int64_t row, int64_t heads, int64_t head, int64_t dim) {
    return {x.data(), (row * heads + head) * dim, heads * dim};
  }

  const OracleProblem& p_;
  int64_t d_, dv_, group_;
  int64_t total_q_, total_k_, total_out_;
  double scale_;
  bool backward_;
  std::vector<Sequence> sequences_;
  std::vector<double> row_max_, row_norm_, delta_;  // [num_heads_q, total_out]: P = row_norm * exp(s - row_max)
  OracleResult result_;
};

Oracle::Oracle(const OracleProblem& problem) : p_(problem), d_(problem.head_dim), dv_(problem.head_dim_v) {
  require(d_ > 0, "head_dim must be positive", d_);
  require(dv_ > 0, "head_dim_v must be positive", dv_);
  require(p_.num_heads_kv > 0, "num_heads_kv must be positive", p_.num_heads_kv);
  require(p_.num_heads_q > 0 && p_.num_heads_q % p_.num_heads_kv == 0,
          "num_heads_q must be a positive multiple of num_heads_kv = " + std::to_string(p_.num_heads_kv),
          p_.num_heads_q);
  group_ = p_.num_heads_q / p_.num_heads_kv;
  scale_ = p_.softmax_scale != 0 ? p_.softmax_scale : 1 / std::sqrt(double(d_));

  total_q_ = rows_of(p_.q, p_.num_heads_q * d_, "q");
  total_k_ = rows_of(p_.k, p_.num_heads_kv * d_, "k");
  const int64_t total_v = rows_of(p_.v, p_.num_heads_kv * dv_, "v");
  require(total_v == total_k_, "v must have as many rows as k, " + std::to_string(total_k_), total_v);
  check_cu_seqlens(p_.cu_seqlens_q, total_q_, "cu_seqlens_q");
  check_cu_seqlens(p_.cu_seqlens_k, total_k_, "cu_seqlens_k");

  const auto batch = int64_t(p_.cu_seqlens_k.size()) - 1;
  const auto batch_q = int64_t(p_.cu_seqlens_q.size()) - 1;
  if (p_.shared_q) {
    require(batch_q == 1 && p_.cu_seqlens_q[1] == total_q_, "with shared_q cu_seqlens_q must be {0, rows of q}",
            p_.cu_seqlens_q.back());
  } else {
    require(batch_q == batch, "cu_seqlens_q and cu_seqlens_k must have the same length", batch_q + 1);
  }
  total_out_ = p_.shared_q ? batch * total_q_ : total_q_;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t k_begin = p_.cu_seqlens_k[b], k_len = p_.cu_seqlens_k[b + 1] - k_begin;
    const int64_t q_begin = p_.shared_q ? 0 : p_.cu_seqlens_q[b];
    const int64_t q_len = p_.shared_q ? total_q_ : p_.cu_seqlens_q[b + 1] - q_begin;
    sequences_.push_back({q_begin, q_len, p_.shared_q ? b * total_q_ : q_begin, k_begin, k_len});
  }

  const int64_t out_size = total_out_ * p_.num_heads_q * dv_, lse_size = total_out_ * p_.num_heads_q;
  // Without any row of out an empty dout is a whole one: dk and dv are zeros then.
  backward_ = !p_.dout.empty() || out_size == 0;
  require(!backward_ || int64_t(p_.dout.size()) == out_size, "size of dout must be 0 or " + std::to_string(out_size),
          int64_t(p_.dout.size()));
  require(p_.dlse.empty() || (backward_ && int64_t(p_.dlse.size()) == lse_size),
          "size of dlse must be 0 or, with dout, " + std::to_string(lse_size), int64_t(p_.dlse.size()));

  result_.out.assign(out_size, 0);
  result_.lse.assign(lse_size, -kInf);
  if (backward_) {
    result_.dq.assign(p_.q.size(), 0);
    result_.dk.assign(p_.k.size(), 0);
    result_.dv.assign(p_.v.size(), 0);
    for (std::vector<double>* x : {&row_max_, &row_norm_, &delta_}) x->assign(lse_size, 0);
  }
}

// Keys that query i sees: i + Sk - Sq is its place on the diagonal that ends in the bottom right corner.
Interval Oracle::visible_keys(const Sequence& seq, int64_t i) const {
  const int64_t diagonal = i + seq.k_len - seq.q_len;
  Interval js{0, seq.k_len};
  if (p_.causal) js.end = std::min(js.end, diagonal + 1);
  if (p_.window_right >= 0 && p_.window_right < seq.k_len + seq.q_len) {
    js.end = std::min(js.end, diagonal + p_.window_right + 1);
  }
  if (p_.window_left >= 0 && p_.window_left < seq.k_len + seq.q_len) {
    js.begin = std::max(js.begin, diagonal - p_.window_left);
  }
  return js.begin < js.end ? js : Interval{};
}

// Queries that see key j: the same inequalities, solved for i.
Interval Oracle::visible_queries(const Sequence& seq, int64_t j) const {
  const int64_t diagonal = j - (seq.k_len - seq.q_len);
  Interval is{0, seq.q_len};
  if (p_.causal) is.begin = std::max(is.begin, diagonal);
  if (p_.window_right >= 0 && p_.window_right < seq.k_len + seq.q_len) {
    is.begin = std::max(is.begin, diagonal - p_.window_right);
  }
  if (p_.window_left >= 0 && p_.window_left < seq.k_len + seq.q_len) {
    is.end = std::min(is.end, diagonal + p_.window_left + 1);
  }
  return is.begin < is.end ? is : Interval{};
}

// out, lse and dq of some query rows of one head. dq accumulates: with shared_q a row comes back for every sequence.
void Oracle::query_block(const Sequence& seq, int64_t head, Interval rows, Scratch& scratch) {
  const Rows q = q_rows(seq, head), k = k_rows(seq, head / group_), v = v_rows(seq, head / group_);
  std::array<Interval, kBlockRows> visible_storage;
  const std::span<Interval> visible = std::span(visible_storage).first(rows.end - rows.begin);
  for (size_t r = 0; r < visible.size(); ++r) visible[r] = visible_keys(seq, rows.begin + int64_t(r));

  const auto p = [&](int64_t r) { return scratch.p.data() + r * seq.k_len; };
  const auto ds = [&](int64_t r) { return scratch.ds.data() + r * seq.k_len; };
  const auto out = [&](int64_t r) {
    return result_.out.data() + ((seq.out_begin + rows.begin + r) * p_.num_heads_q + head) * dv_;
  };

  // S = q k^T
  for_each_tile(visible, [&](int64_t r, Interval js) { dots(q[rows.begin + r], k, js, d_, p(r)); });
  // P = softmax(scale * S)
  for (int64_t r = 0; r < int64_t(visible.size()); ++r) {
    const auto [begin, end] = visible[r];
    if (begin == end) continue;
    double* s = p(r);
    double max = -kInf, sum = 0;
    for (int64_t j = begin; j < end; ++j) {
      s[j] *= scale_;
      max = std::max(max, s[j]);
    }
    for (int64_t j = begin; j < end; ++j) {
      s[j] = std::exp(s[j] - max);
      sum += s[j];
    }
    for (int64_t j = begin; j < end; ++j) s[j] *= 1 / sum;
    const int64_t row = head * total_out_ + seq.out_begin + rows.begin + r;
    result_.lse[row] = max + std::log(sum);
    if (backward_) {
      row_max_[row] = max;
      row_norm_[row] = 1 / sum;
    }
  }
  // out = P v
  for_each_tile(visible, [&](int64_t r, Interval js) { add_weighted(p(r), v, js, dv_, out(r)); });
  if (!backward_) return;

  // dP = dout v^T
  const Rows dout = dout_rows(seq, head);
  for_each_tile(visible, [&](int64_t r, Interval js) { dots(dout[rows.begin + r], v, js, dv_, ds(r)); });
  // dS = P (dP - delta), delta = out . dout - dlse: lse's own gradient is P
  for (int64_t r = 0; r < int64_t(visible.size()); ++r) {
    const auto [begin, end] = visible[r];
    if (begin == end) continue;
    const int64_t row = head * total_out_ + seq.out_begin + rows.begin + r;
    double delta = p_.dlse.empty() ? 0 : -p_.dlse[row];
    for (int64_t c = 0; c < dv_; ++c) delta += out(r)[c] * dout[rows.begin + r][c];
    delta_[row] = delta;
    for (int64_t j = begin; j < end; ++j) ds(r)[j] = scale_ * p(r)[j] * (ds(r)[j] - delta);
  }
  // dq = scale dS k
  for_each_tile(visible, [&](int64_t r, Interval js) {
    double* dq = result_.dq.data() + ((seq.q_begin + rows.begin + r) * p_.num_heads_q + head) * d_;
    add_weighted(ds(r), k, js, d_, dq);
  });
}

// dk and dv of some keys of one head, summed over the group of query heads.
void Oracle::key_block(const Sequence& seq, int64_t head_kv, Interval keys) {
  const Rows k = k_rows(seq, head_kv), v = v_rows(seq, head_kv);
  std::array<Interval, kBlockRows> visible_storage;
  const std::span<Interval> visible = std::span(visible_storage).first(keys.end - keys.begin);
  for (size_t r = 0; r < visible.size(); ++r) visible[r] = visible_queries(seq, keys.begin + int64_t(r));

  for (int64_t head = head_kv * group_; head < (head_kv + 1) * group_; ++head) {
    const Rows q = q_rows(seq, head), dout = dout_rows(seq, head);
    const int64_t first_row = head * total_out_ + seq.out_begin;
    for_each_tile(visible, [&](int64_t r, Interval is) {
      const int64_t key = keys.begin + r, num = is.end - is.begin;
      std::array<double, kTileRows> p, ds;
      const Rows q_tile = q.from(is.begin), dout_tile = dout.from(is.begin);
      dots(k[key], q_tile, {0, num}, d_, p.data());
      dots(v[key], dout_tile, {0, num}, dv_, ds.data());
      for (int64_t i = 0; i < num; ++i) {
        const int64_t row = first_row + is.begin + i;
        p[i] = row_norm_[row] * std::exp(scale_ * p[i] - row_max_[row]);
        ds[i] = scale_ * p[i] * (ds[i] - delta_[row]);
      }
      const int64_t out_row = (seq.k_begin + key) * p_.num_heads_kv + head_kv;
      add_weighted(p.data(), dout_tile, {0, num}, dv_, result_.dv.data() + out_row * dv_);
      add_weighted(ds.data(), q_tile, {0, num}, d_, result_.dk.data() + out_row * d_);
    });
  }
}

OracleResult Oracle::run() {
  const int threads = p_.num_threads > 0 ? p_.num_threads : std::max(1, int(std::thread::hardware_concurrency()));
  int64_t max_k_len = 0;
  std::vector<Task> query_tasks, key_tasks;
  for (int64_t b = 0; b < int64_t(sequences_.size()); ++b) {
    const Sequence& seq = sequences_[b];
    max_k_len = std::max(max_k_len, seq.k_len);
    for (int64_t head = 0; head < p_.num_heads_q && !(p_.shared_q && b > 0); ++head) {
      for (int64_t i = 0; i < seq.q_len; i += kBlockRows) query_tasks.push_back({b, head, i});
    }
    for (int64_t head = 0; head < p_.num_heads_kv; ++head) {
      for (int64_t j = 0; j < seq.k_len; j += kBlockRows) key_tasks.push_back({b, head, j});
    }
  }

  std::vector<Scratch> scratch(std::min<int64_t>(threads, std::max<int64_t>(1, int64_t(query_tasks.size()))));
  for (Scratch& s : scratch) {
    s.p.resize(kBlockRows * max_k_len);
    if (backward_) s.ds.resize(kBlockRows * max_k_len);
  }
  parallel_for(int64_t(query_tasks.size()), threads, [&](int64_t t, int thread) {
    const Task& task = query_tasks[t];
    // With shared_q the owner of a block of dq goes through all sequences.
    const int64_t last = p_.shared_q ? int64_t(sequences_.size()) - 1 : task.sequence;
    for (int64_t b = task.sequence; b <= last; ++b) {
      const Sequence& seq = sequences_[b];
      query_block(seq, task.head, {task.begin, std::min(task.begin + kBlockRows, seq.q_len)}, scratch[thread]);
    }
  });
  if (backward_) {
    parallel_for(int64_t(key_tasks.size()), threads, [&](int64_t t, int) {
      const Task& task = key_tasks[t];
      const Sequence& seq = sequences_[task.sequence];
      key_block(seq, task.head, {task.begin, std::min(task.begin + kBlockRows, seq.k_len)});
    });
  }
  return std::move(result_);
}

}  // namespace

OracleResult oracle_attention(const OracleProblem& problem) { return Oracle(problem).run(); }

}  // namespace mxflash::kit
