// `mxflash bench --device cuda`: verify, warm up, time by events; see bench.cpp for what both devices share.
//
// Operands are N(0, 1) in BF16, made on the host and repeated on the device: with a period that no row divides, so that
// rows differ. Samples are single launches in rounds with the ceiling and the peers.
#include "tools/bench_cuda.h"

#include <mxflash/attention.h>
#include <mxflash/quantize.h>
#include <mxflash/rmsnorm.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "kit/device_memory.h"
#include "kit/random.h"
#include "kit/runner.h"
#include "kit/text.h"
#include "mx/float16.h"
#include "tools/bench_peers.h"
#include "tools/bench_work.h"
#include "tools/commands.h"
#include "tools/commit.h"

namespace mxflash::tools {
namespace {

using kit::DeviceBuffer;
using kit::require_ok;
using kit::text;

constexpr int kRounds = 3, kWarmUps = 3, kLeastLaunches = 11;
constexpr size_t kCopyBytes = size_t(2) << 30;  // of the ceiling, both halves: far beyond L2
constexpr int kHeadStarts = 2;                  // times that the buffer is overwritten while the host gets ahead
constexpr double kMaxError = 0.15;              // of rows at full size; the quantization of N(0, 1) has 0.06
constexpr int64_t kCheckedRows = 4;             // of the first and of the last head

// ---- operands -----------------------------------------------------------------------------------------------------

// Odd, so that rows of any length begin at all of its places.
constexpr size_t kPoolSize = (size_t(1) << 22) + 3;

struct Pool {
  std::vector<uint16_t> bits;
  std::vector<float> values;  // what they are
};

const Pool& pool(uint64_t stream) {
  static std::map<uint64_t, Pool> pools;
  Pool& p = pools[stream];
  if (!p.bits.empty()) return p;
  p.values.resize(kPoolSize);
  kit::Random random(3, stream);
  kit::fill_normal(random, p.values);
  for (float& value : p.values) {
    p.bits.push_back(encode_bf16(value));
    value = decode_bf16(p.bits.back());
  }
  return p;
}

// All device memory of a line.
class Memory {
 public:
  explicit Memory(Stream stream) : stream_(stream) {}
  Stream stream() const { return stream_; }

  const DeviceBuffer& of(const Tensor& t) const {
    return *std::ranges::find(buffers_, t.data, [](const DeviceBuffer& b) { return b.data(); });
  }
  const DeviceBuffer& buffer(size_t size) { return buffers_.emplace_back(std::max<size_t>(size, 16)); }

  Tensor tensor(Dtype dtype, auto... extent) {
    Tensor t = make_tensor(nullptr, dtype, extent...);
    t.device = {DeviceType::cuda, 0};
    t.data = buffer(size_t(t.numel() * dtype_size(dtype))).data();
    return t;
  }
  Tensor random_bf16(uint64_t stream, auto... extent) {
    const Tensor t = tensor(Dtype::bf16, extent...);
    const std::vector<uint16_t>& bits = pool(stream).bits;
    const size_t count = std::min(bits.size(), size_t(t.numel()));
    buffers_.back().upload(bits.data(), 2 * count, stream_);
    if (count > 0) buffers_.back().repeat(2 * count, stream_);
    return t;
  }
  // Without memory, it says what is rounded on the way to an image.
  MxTensor mx(int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq, bool with_memory) {
    MxTensor t =
        make_mx_tensor(nullptr, nullptr, Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, tokens, heads, dim, seq);
    t.data.device = t.scale.device = {DeviceType::cuda, 0};
    if (!with_memory) return t;
    t.data.data = buffer(size_t(t.data.numel())).data();
    t.scale.data = buffer(size_t(t.scale.numel())).data();
    return t;
  }
  Tensor image(ImageRole role, int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq) {
    return tensor(Dtype::u8, image_size(role, tokens, heads, dim, seq));
  }
  Jagged jagged(const std::vector<int32_t>& lens, bool is_jagged) {
    if (!is_jagged) return {.batch = int32_t(lens.size())};
    const std::vector<int32_t> cu = kit::cu_seqlens(lens);
    const DeviceBuffer& copy = buffer(cu.size() * sizeof(int32_t));
    copy.upload(cu.data(), cu.size() * sizeof(int32_t), stream_);
    return {.cu_seqlens = static_cast<const int32_t*>(copy.data()),
            .batch = int32_t(lens.size()),
            .max_seqlen = *std::ranges::max_element(lens)};
  }

 private:
  Stream stream_;
  std::list<DeviceBuffer> buffers_;
};

double bytes_of(const Tensor& t) { return double(t.numel()) * double(dtype_size(t.dtype)); }
double bytes_of(const MxTensor& t) { return bytes_of(t.data) + bytes_of(t.scale); }

// What is timed: one line of results.
struct DeviceWork {
  std::string mode;
  std::function<void()> enqueue;
  double flops = 0, bytes = 0;
  std::function<double()> check{};  // the error of some rows of what it computed; null: not checked at full size
  double error = NAN;
};

// ---- attention ----------------------------------------------------------------------------------------------------

// Without images the kernel is not timed alone: it takes MXFP8 operands.
bool holds_mx(const std::string& backend, const std::vector<std::string>& modes) {
  return !kit::reads_images(backend) || std::ranges::count(modes, std::string("from_mxfp8")) > 0;
}

// Relative RMS error of BF16 out, rows of the first and of the last head, against exact attention on the BF16 operands.
double rows_error(const BenchShape& s, const DeviceBuffer& out, Stream stream) {
  const std::vector<int32_t> lens_of_q = lens_q(s), lens_of_k = lens_k(s);
  const int64_t dim = s.head_dim, dim_v = s.head_dim_v, group = s.num_heads_q / s.num_heads_kv;
  const double scale = 1 / std::sqrt(double(dim));
  const std::vector<float>&q = pool(1).values, &k = pool(2).values, &v = pool(3).values;
  const auto at = [](const std::vector<float>& x, size_t index) { return double(x[index % kPoolSize]); };
  double error = 0, size = 0;
  int64_t q_start = 0, k_start = 0, out_start = 0;
  for (size_t b = 0; b < lens_of_k.size(); ++b) {
    const int64_t len_q = lens_of_q[s.shared_q ? 0 : b], len_k = lens_of_k[b];
    const bool first = b == 0, last = b + 1 == lens_of_k.size();
    const int64_t head = first ? 0 : s.num_heads_q - 1;
    for (int64_t n = 0; (first || last) && n < std::min(kCheckedRows, len_q); ++n) {
      const int64_t i = len_q < 2 ? 0 : n * (len_q - 1) / (kCheckedRows - 1);
      const int64_t keys = s.mask.causal ? std::clamp<int64_t>(i + len_k - len_q + 1, 0, len_k) : len_k;
      if (i >= len_q || keys == 0) continue;
      std::vector<double> p(static_cast<size_t>(keys)), want(static_cast<size_t>(dim_v));
      double largest = -std::numeric_limits<double>::infinity(), sum = 0;
      for (int64_t j = 0; j < keys; ++j) {
        const auto q_at = size_t(((q_start + i) * s.num_heads_q + head) * dim);
        const auto k_at = size_t(((k_start + j) * s.num_heads_kv + head / group) * dim);
        double dot = 0;
        for (size_t c = 0; c < size_t(dim); ++c) dot += at(q, q_at + c) * at(k, k_at + c);
        p[size_t(j)] = scale * dot;
        largest = std::max(largest, scale * dot);
      }
      for (int64_t j = 0; j < keys; ++j) {
        const double weight = std::exp(p[size_t(j)] - largest);
        const auto v_at = size_t(((k_start + j) * s.num_heads_kv + head / group) * dim_v);
        sum += weight;
        for (size_t c = 0; c < want.size(); ++c) want[c] += weight * at(v, v_at + c);
      }
      std::vector<uint16_t> got(want.size());
      const auto row = size_t(((out_start + i) * s.num_heads_q + head) * dim_v);
      out.download(got.data(), 2 * row, 2 * got.size(), stream);
      for (size_t c = 0; c < want.size(); ++c) {
        const double exact = want[c] / sum;
        error += std::pow(double(decode_bf16(got[c])) - exact, 2);
        size += exact * exact;
      }
    }
    q_start += s.shared_q ? 0 : len_q;
    k_start += len_k;
    out_start += len_q;
  }
  return size > 0 ? std::sqrt(error / size) : 0;
}

std::vector<DeviceWork> prepare_attention(const BenchShape& s, const std::string& backend,
                                          const std::vector<std::string>& modes, Memory& memory) {
  const std::vector<int32_t> lens_of_q = lens_q(s), lens_of_k = lens_k(s);
  const Jagged seq_q = s.shared_q ? Jagged{} : memory.jagged(lens_of_q, s.jagged);
  const Jagged seq_k = memory.jagged(lens_of_k, s.jagged);
  const int64_t total_q = kit::sum_of(lens_of_q), total_k = kit::sum_of(lens_of_k);
  const int64_t total_out = s.shared_q ? s.batch * total_q : total_q;
  const auto name = std::make_shared<std::string>(backend);
  const Stream stream = memory.stream();

  struct Operand {
    Tensor bf16;
    MxTensor mx;  // with memory where MXFP8 operands are wanted
    Tensor image;
    Jagged seq;
    ImageRole role;
  };
  const bool with_images = kit::reads_images(backend), with_mx = holds_mx(backend, modes);
  const auto operand = [&](uint64_t random, ImageRole role, int64_t tokens, int64_t heads, int64_t dim, Jagged seq) {
    return Operand{.bf16 = memory.random_bf16(random, tokens, heads, dim),
                   .mx = memory.mx(tokens, heads, dim, seq, with_mx),
                   .image = with_images ? memory.image(role, tokens, heads, dim, seq) : Tensor{},
                   .seq = seq,
                   .role = role};
  };
  const Operand q = operand(1, ImageRole::query, total_q, s.num_heads_q, s.head_dim, seq_q);
  const Operand k = operand(2, ImageRole::key, total_k, s.num_heads_kv, s.head_dim, seq_k);
  const Operand v = operand(3, ImageRole::value, total_k, s.num_heads_kv, s.head_dim_v, seq_k);
  const auto quantize_to = [stream](const Operand& o, MxTensor out, bool image) {
    if (image) out.data.data = out.scale.data = nullptr;
    require_ok(quantize({.in = o.bf16,
                         .out = out,
                         .seq = o.seq,
                         .image = image ? o.image : Tensor{},
                         .image_role = o.role,
                         .backend = "sm90"},
                        stream));
  };
  AttentionFwd fwd{.q = q.mx,
                   .k = k.mx,
                   .v = v.mx,
                   .out = memory.tensor(Dtype::bf16, total_out, s.num_heads_q, s.head_dim_v),
                   .lse = memory.tensor(Dtype::f32, s.num_heads_q, total_out),
                   .row_exponent = memory.tensor(Dtype::u8, s.num_heads_q, total_out),
                   .seq_q = seq_q,
                   .seq_k = seq_k,
                   .mask = s.mask,
                   .shared_q = s.shared_q,
                   .backend = name->c_str()};
  const double results = bytes_of(fwd.out) + bytes_of(fwd.lse) + bytes_of(fwd.row_exponent);
  const double flops = attention_flops(s, Operation::attention_fwd);
  const bool is_checked = s.mask.window_left < 0 && s.mask.window_right < 0;

  std::vector<DeviceWork> works;
  for (const std::string& mode : modes) {
    if (mode == "kernel" && !with_images) continue;
    AttentionFwd call = fwd;
    double bytes = results;
    if (mode == "from_mxfp8" || !with_images) {
      for (const Operand* o : {&q, &k, &v}) {
        quantize_to(*o, o->mx, false);
        bytes += mode == "from_mxfp8" ? bytes_of(o->mx) : bytes_of(o->bf16);
      }
    } else {
      for (MxTensor* t : {&call.q, &call.k, &call.v}) t->data.data = t->scale.data = nullptr;
      call.q_image = q.image;
      call.k_image = k.image;
      call.v_image = v.image;
      for (const Operand* o : {&q, &k, &v}) {
        quantize_to(*o, o->mx, true);
        bytes += bytes_of(mode == "kernel" ? o->image : o->bf16);
      }
    }
    call.workspace_size = attention_fwd_workspace(call);
    call.workspace = memory.buffer(call.workspace_size).data();
    const bool quantizes = mode == "from_bf16";
    works.push_back({.mode = mode,
                     .enqueue =
                         [=, keeps_name = name] {  // to which call.backend points
                           for (const Operand* o : {&q, &k, &v}) {
                             if (quantizes) quantize_to(*o, o->mx, with_images);
                           }
                           require_ok(attention_fwd(call, stream));
                         },
                     .flops = flops,
                     .bytes = bytes});
    if (!is_checked) continue;
    works.back().check = [=, &memory] { return rows_error(s, memory.of(call.out), stream); };
  }
  return works;
}

// From MXFP8 operands and a forward's results, with all passes: dQ added up in fp32, and in FP16.
std::vector<DeviceWork> prepare_backward(const BenchShape& s, const std::string& backend, Memory& memory) {
  const std::vector<int32_t> lens_of_q = lens_q(s), lens_of_k = lens_k(s);
  const Jagged seq_q = s.shared_q ? Jagged{} : memory.jagged(lens_of_q, s.jagged);
  const Jagged seq_k = memory.jagged(lens_of_k, s.jagged);
  const Jagged seq_out = s.shared_q ? Jagged{.batch = int32_t(s.batch)} : seq_q;
  const int64_t total_q = kit::sum_of(lens_of_q), total_k = kit::sum_of(lens_of_k);
  const int64_t total_out = s.shared_q ? s.batch * total_q : total_q;
  const auto name = std::make_shared<std::string>(backend);
  const Stream stream = memory.stream();
  const auto operand = [&](uint64_t random, int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq) {
    const MxTensor mx = memory.mx(tokens, heads, dim, seq, true);
    require_ok(quantize(
        {.in = memory.random_bf16(random, tokens, heads, dim), .out = mx, .seq = seq, .backend = name->c_str()},
        stream));
    return mx;
  };
  const MxTensor q = operand(1, total_q, s.num_heads_q, s.head_dim, seq_q);
  const MxTensor k = operand(2, total_k, s.num_heads_kv, s.head_dim, seq_k);
  const MxTensor v = operand(3, total_k, s.num_heads_kv, s.head_dim_v, seq_k);
  const MxTensor dout = operand(4, total_out, s.num_heads_q, s.head_dim_v, seq_out);
  AttentionFwd fwd{.q = q,
                   .k = k,
                   .v = v,
                   .out = memory.tensor(Dtype::bf16, total_out, s.num_heads_q, s.head_dim_v),
                   .lse = memory.tensor(Dtype::f32, s.num_heads_q, total_out),
                   .row_exponent = memory.tensor(Dtype::u8, s.num_heads_q, total_out),
                   .seq_q = seq_q,
                   .seq_k = seq_k,
                   .mask = s.mask,
                   .shared_q = s.shared_q,
                   .backend = name->c_str()};
  fwd.workspace_size = attention_fwd_workspace(fwd);
  fwd.workspace = memory.buffer(fwd.workspace_size).data();
  require_ok(attention_fwd(fwd, stream));
  AttentionBwd bwd{.q = q,
                   .k = k,
                   .v = v,
                   .dout = dout,
                   .out = fwd.out,
                   .lse = fwd.lse,
                   .row_exponent = fwd.row_exponent,
                   .dq = memory.tensor(Dtype::bf16, total_q, s.num_heads_q, s.head_dim),
                   .dk = memory.tensor(Dtype::bf16, total_k, s.num_heads_kv, s.head_dim),
                   .dv = memory.tensor(Dtype::bf16, total_k, s.num_heads_kv, s.head_dim_v),
                   .seq_q = seq_q,
                   .seq_k = seq_k,
                   .mask = s.mask,
                   .shared_q = s.shared_q,
                   .backend = name->c_str()};
  bwd.workspace_size = attention_bwd_workspace(bwd);
  bwd.workspace = memory.buffer(bwd.workspace_size).data();
  double bytes = bytes_of(q) + bytes_of(k) + bytes_of(v) + bytes_of(dout);
  for (const Tensor* t : {&bwd.out, &bwd.lse, &bwd.row_exponent, &bwd.dq, &bwd.dk, &bwd.dv}) bytes += bytes_of(*t);
  std::vector<DeviceWork> works;
  for (const auto& [mode, accum] : {std::pair{"dq_f32", Dtype::f32}, {"dq_f16", Dtype::f16}}) {
    bwd.dq_accum = accum;
    works.push_back({.mode = mode,
                     .enqueue = [bwd, name, stream] { require_ok(attention_bwd(bwd, stream)); },
                     .flops = attention_flops(s, Operation::attention_bwd),
                     .bytes = bytes});
  }
  return works;
}

// ---- operations on tokens -----------------------------------------------------------------------------------------

std::vector<DeviceWork> prepare_tokens(Operation op, const BenchShape& s, const std::string& backend, Memory& memory) {
  const std::vector<int32_t> lens = lens_q(s);
  const Jagged seq = memory.jagged(lens, s.jagged);
  const int64_t tokens = kit::sum_of(lens), heads = s.num_heads_q, dim = s.head_dim;
  const auto name = std::make_shared<std::string>(backend);
  const Stream stream = memory.stream();
  const Tensor x = memory.random_bf16(1, tokens, heads, dim);
  const MxTensor mx = memory.mx(tokens, heads, dim, seq, true);
  const Quantize to_mx{.in = x, .out = mx, .seq = seq, .backend = name->c_str()};
  std::vector<DeviceWork> works;
  const auto add = [&](const char* mode, double bytes, std::function<Status()> run) {
    works.push_back({.mode = mode, .enqueue = [name, run] { require_ok(run()); }, .flops = 0, .bytes = bytes});
  };
  if (op == Operation::quantize) {
    add("square32", bytes_of(x) + bytes_of(mx), [=] { return quantize(to_mx, stream); });
    if (image_size(ImageRole::query, tokens, heads, dim, seq) == 0) return works;
    for (const auto& [mode, role] : {std::pair{"query_image", ImageRole::query}, {"value_image", ImageRole::value}}) {
      Quantize to_image = to_mx;
      to_image.out = memory.mx(tokens, heads, dim, seq, false);
      to_image.image = memory.image(role, tokens, heads, dim, seq);
      to_image.image_role = role;
      add(mode, bytes_of(x) + bytes_of(to_image.image), [=] { return quantize(to_image, stream); });
    }
  } else if (op == Operation::dequantize) {
    require_ok(quantize(to_mx, stream));
    const Dequantize back{.in = mx, .out = x, .seq = seq, .backend = name->c_str()};
    add("default", bytes_of(x) + bytes_of(mx), [=] { return dequantize(back, stream); });
  } else if (op == Operation::rmsnorm_quantize) {
    const int64_t hidden = s.hidden();
    MxTensor rows = memory.mx(tokens, 1, hidden, seq, true);
    Tensor flat = make_tensor(rows.data.data, Dtype::e4m3, tokens, hidden),
           in = make_tensor(x.data, Dtype::bf16, tokens, hidden);
    flat.device = in.device = rows.data.device;
    rows.data = flat;
    const RmsnormQuantize norm{.in = in,
                               .weight = memory.random_bf16(4, hidden),
                               .out = rows,
                               .rstd = memory.tensor(Dtype::f32, tokens),
                               .seq = seq,
                               .backend = name->c_str()};
    const double bytes = bytes_of(in) + bytes_of(norm.weight) + bytes_of(rows) + bytes_of(norm.rstd);
    add("default", bytes, [=] { return rmsnorm_quantize(norm, stream); });
  } else if (op == Operation::rmsnorm_bwd) {
    const int64_t hidden = s.hidden();
    const auto flat = [&](const Tensor& t) {
      Tensor rows = make_tensor(t.data, t.dtype, tokens, hidden);
      rows.device = t.device;
      return rows;
    };
    require_ok(quantize(to_mx, stream));
    MxTensor rows = memory.mx(tokens, 1, hidden, seq, true);  // not to_mx's: scales of one head are one behind another
    rows.data = flat(rows.data);
    RmsnormBwd norm{.h = flat(x),
                    .weight = memory.random_bf16(4, hidden),
                    .rstd = memory.tensor(Dtype::f32, tokens),
                    .dx = memory.tensor(Dtype::bf16, tokens, hidden),
                    .dw = memory.tensor(Dtype::f32, hidden),
                    .seq = seq,
                    .backend = name->c_str()};
    require_ok(rmsnorm_quantize(
        {.in = norm.h, .weight = norm.weight, .out = rows, .rstd = norm.rstd, .seq = seq, .backend = name->c_str()},
        stream));
    const double others =
        bytes_of(norm.h) + bytes_of(norm.weight) + bytes_of(norm.rstd) + bytes_of(norm.dx) + bytes_of(norm.dw);
    const auto add_bwd = [&](const char* mode, const Tensor& dy, const MxTensor& dy_mx, const Tensor& dh) {
      RmsnormBwd call = norm;
      call.dy = dy;
      call.dy_mx = dy_mx;
      call.dh = dh;
      call.workspace_size = rmsnorm_bwd_workspace(call);
      call.workspace = memory.buffer(call.workspace_size).data();
      const double bytes = others + (dy ? bytes_of(dy) : bytes_of(dy_mx)) + (dh ? bytes_of(dh) : 0);
      add(mode, bytes, [=] { return rmsnorm_bwd(call, stream); });
    };
    const Tensor dy = flat(memory.random_bf16(2, tokens, heads, dim));
    add_bwd("from_bf16", dy, {}, {});
    add_bwd("from_bf16_dh", dy, {}, flat(memory.random_bf16(3, tokens, heads, dim)));
    add_bwd("from_mxfp8", {}, rows, {});
  }
  return works;
}

// About what the above allocate.
double bytes_needed(Operation op, const BenchShape& s, const std::string& backend,
                    const std::vector<std::string>& modes) {
  const double q = double(total_tokens_q(s)), k = double(kit::sum_of(lens_k(s)));
  const double hidden = double(s.hidden()), padded = 1.1;  // images and scales
  if (op == Operation::rmsnorm_bwd) return q * hidden * (8 + 2 * padded);
  if (!is_attention(op)) return q * hidden * (2 + 3 * padded);
  const double out = s.shared_q ? q * double(s.batch) : q;
  const double operands = q * hidden + k * double(s.num_heads_kv * (s.head_dim + s.head_dim_v));
  if (op == Operation::attention_bwd) {  // BF16, MXFP8, gradients; records and sums of rows and of keys
    const double rows = out * double(s.num_heads_q), keys = k * double(s.num_heads_kv), dim = double(s.head_dim);
    return 5 * (operands + rows * double(s.head_dim_v)) + padded * (rows * (8 * dim + 32) + keys * 3 * dim);
  }
  // With MXFP8 also images in the workspace.
  return operands * (2 + padded * (holds_mx(backend, modes) ? 3 : 1)) +
         out * double(s.num_heads_q * (2 * s.head_dim_v + 5));
}

// ---- timing -------------------------------------------------------------------------------------------------------

kit::Timing timing_of(const std::vector<double>& samples) {
  return {.median_ms = kit::median(samples), .spread = kit::spread(samples), .repeats = int32_t(samples.size())};
}

class DeviceBench {
 public:
  DeviceBench(const BenchOptions& options, const std::vector<std::pair<Operation, BenchShape>>& lines)
      : options_(options),
        launches_((std::max(options.repeat, kLeastLaunches) + kRounds - 1) / kRounds),
        facts_(kit::device_facts()),
        peers_(PeerScript::cuda, options.peers, num_threads()),
        scratch_(std::min(kCopyBytes, facts_.memory_bytes / 8)),
        flush_(options.l2_flush ? 2 * facts_.l2_bytes : 0),
        printer_{.json = options.json, .tera = true, .device = facts_.name} {
    printer_.machine["driver"] = facts_.driver;
    printer_.machine["l2_flush"] = options.l2_flush;
    for (const auto& [key, value] : peers_.machine().items()) printer_.machine[key] = value;
    if (peers_.any()) printer_.peer_versions = peers_.versions();
    scratch_.fill(0x11, stream_.get());
    for (const auto& [op, shape] : lines) {
      printer_.shape_width = std::max(printer_.shape_width, int(shape_text(op, shape).size()));
    }
    if (options_.json) return;
    std::cout << text("%s, driver %s, %d SMs; commit %s\n", facts_.name.c_str(), facts_.driver.c_str(),
                      facts_.multiprocessors, commit());
    std::cout << "peers: "
              << (peers_.any() ? peers_.versions().dump() + ", " + peers_.machine().dump() : "none (--peers)") << '\n';
    printer_.header();
  }

  void run(Operation op, const BenchShape& shape) {
    const std::vector<std::string> backends = candidates(op, options_);
    if (backends.empty()) {
      if (said_.insert(operation_name(op)).second) {
        std::cerr << "mxflash: " << operation_name(op) << " has no backend for the device: not timed\n";
      }
      return;
    }
    for (const std::string& backend : backends) {
      try {
        if (verified(op, shape, backend)) measure(op, shape, backend);
        return;
      } catch (const kit::StatusError& error) {
        if (error.code != StatusCode::unsupported) throw;
        std::cerr << "mxflash: " << operation_name(op) << " " << shape_text(op, shape)
                  << " is not timed: " << error.what() << '\n';
      }
    }
  }

  bool failed() const { return failed_; }
  int timed() const { return timed_; }

 private:
  using Samples = std::function<std::vector<double>(int count)>;

  bool verified(Operation op, const BenchShape& shape, const std::string& backend) {
    const std::string key = operation_name(op) + backend + to_json(clipped(shape)).dump();
    if (const auto known = verified_.find(key); known != verified_.end()) return known->second;
    const std::string failure = verify(op, shape, backend);
    if (!failure.empty()) wrong(op, shape, backend, failure);
    return verified_[key] = failure.empty();
  }

  void wrong(Operation op, const BenchShape& shape, const std::string& what, const std::string& failure) {
    std::cerr << "mxflash: " << operation_name(op) << " " << shape_text(op, shape) << " in backend " << what
              << " is wrong, so it is not timed: " << failure << '\n';
    failed_ = true;
  }

  void measure(Operation op, const BenchShape& shape, const std::string& backend) {
    const double need = bytes_needed(op, shape, backend, options_.cuda_modes), have = double(kit::free_device_memory());
    if (need > 0.9 * have) {
      std::cerr << "mxflash: " << operation_name(op) << " " << shape_text(op, shape)
                << text(" needs %.1f GB of device memory, %.1f are free: not timed\n", 1e-9 * need, 1e-9 * have);
      return;
    }
    Memory memory(stream_.get());
    std::vector<DeviceWork> works = op == Operation::attention_bwd ? prepare_backward(shape, backend, memory)
                                    : is_attention(op) ? prepare_attention(shape, backend, options_.cuda_modes, memory)
                                                       : prepare_tokens(op, shape, backend, memory);
    for (DeviceWork& work : works) {
      work.enqueue();
      stream_.wait();
      if (work.check) work.error = work.check();
    }
    std::erase_if(works, [&](const DeviceWork& work) {
      if (!work.check || work.error <= kMaxError) return false;  // NaN is not
      wrong(op, shape, backend + " " + work.mode, text("relative error %.3g of rows at full size", work.error));
      return true;
    });
    std::vector<Samples> ways;
    for (const DeviceWork& work : works) ways.push_back(samples_of(work.enqueue));
    ways.push_back(samples_of([this] { kit::copy_halves(scratch_, stream_.get()); }));
    std::vector<Peer> peers =
        peers_.any() && !works.empty() ? peers_.for_shape(op, shape, nullptr) : std::vector<Peer>{};
    for (const Peer& peer : peers) ways.push_back(peers_.device_sampler(op, peer.name));

    std::vector<std::vector<double>> samples(ways.size());
    for (int round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < ways.size(); ++i) {
        const std::vector<double> some = ways[i](launches_);
        samples[i].insert(samples[i].end(), some.begin(), some.end());
      }
    }
    for (size_t i = 0; i < peers.size(); ++i) peers[i].timing = timing_of(samples[works.size() + 1 + i]);
    std::erase_if(peers, [](const Peer& peer) { return !std::isfinite(peer.timing.median_ms); });
    std::ranges::stable_sort(peers, {}, [](const Peer& peer) { return peer.timing.median_ms; });
    const double copy_gbps = 1e-6 * double(scratch_.size()) / kit::median(samples[works.size()]);
    for (size_t i = 0; i < works.size(); ++i) {
      Line line{.op = op, .shape = shape, .backend = backend, .mode = works[i].mode};
      line.timing = timing_of(samples[i]);
      line.gbps = 1e-6 * works[i].bytes / line.timing.median_ms;
      line.ceilings.push_back({"copy_gbps", copy_gbps, line.gbps / copy_gbps});
      if (works[i].flops > 0) {
        line.tflops = 1e-9 * works[i].flops / line.timing.median_ms;
        const auto gemm = printer_.machine.find("fp8_gemm_tflops");
        if (gemm != printer_.machine.end() && gemm->is_number()) {
          line.ceilings.push_back({"fp8_gemm_tflops", gemm->get<double>(), line.tflops / gemm->get<double>()});
        }
      }
      line.peers = peers;
      line.error = works[i].error;
      ++timed_;
      printer_.print(line);
    }
  }

  Samples samples_of(std::function<void()> enqueue) {
    return [this, enqueue = std::move(enqueue)](int count) {
      const Stream stream = stream_.get();
      const auto head_start = [&] {
        for (int i = 0; i < kHeadStarts; ++i) scratch_.fill(0x11, stream);
        for (int i = 0; i < kWarmUps; ++i) enqueue();
      };
      std::function<void()> between;
      if (flush_.size() > 0) between = [&] { flush_.fill(0x22, stream); };
      return kit::time_on_device(stream, count, enqueue, head_start, between);
    };
  }

  const BenchOptions& options_;
  const int launches_;  // of a round
  const kit::DeviceFacts facts_;
  Peers peers_;
  kit::DeviceStream stream_;
  const DeviceBuffer scratch_, flush_;
  LinePrinter printer_;
  std::map<std::string, bool> verified_;
  std::set<std::string> said_;
  bool failed_ = false;
  int timed_ = 0;
};

}  // namespace

void bench_on_device(const BenchOptions& options, const std::vector<std::pair<Operation, BenchShape>>& lines) {
  DeviceBench bench(options, lines);
  for (const auto& [op, shape] : lines) bench.run(op, shape);
  if (bench.failed()) throw CheckFailed{};
  if (bench.timed() == 0) throw UsageError("nothing was timed; choose smaller shapes or another --op");
}

}  // namespace mxflash::tools
