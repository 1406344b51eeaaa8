// rmsnorm_quantize on a CUDA card against ref on the host, to the bit: whole buffers, so that also gaps between rows,
// padding of scales and rows of no sequence count. NaN of y, rstd and residual may have any bits.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <mxflash/rmsnorm.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "captured_graph.h"
#include "kit/random.h"
#include "on_card.h"
#include "runtime/tensor_access.h"

namespace mxflash {
namespace {

using kit::Random;

template <class T>
T pick(Random& random, std::initializer_list<T> of) {
  return of.begin()[random.below(int64_t(of.size()))];
}

// Bytes in both memories.
class Buffer {
 public:
  explicit Buffer(size_t size, uint8_t fill = 0) : host(size, fill) {
    if (cudaMalloc(&device_, size + 1) != cudaSuccess) device_ = nullptr;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(device_); }

  void* device() const { return device_; }
  bool upload() const {
    return device_ && cudaMemcpy(device_, host.data(), host.size(), cudaMemcpyHostToDevice) == cudaSuccess;
  }
  std::vector<uint8_t> download() const {
    std::vector<uint8_t> bytes(host.size());
    EXPECT_EQ(cudaMemcpy(bytes.data(), device_, bytes.size(), cudaMemcpyDeviceToHost), cudaSuccess);
    return bytes;
  }

  std::vector<uint8_t> host;

 private:
  void* device_ = nullptr;
};

// [rows, cols] in a buffer: `gap` elements between rows, `skip` before the first. flip: the last row comes first.
// same: there is one row only, with stride 0.
struct Layout {
  int64_t gap = 0, skip = 0;
  bool flip = false, same = false;
};
struct Matrix {
  Dtype dtype;
  int64_t rows, cols, stride, first;
  Buffer buffer;

  Matrix(Dtype type, int64_t row_count, int64_t col_count, Layout l = {}, uint8_t fill = 0xFF)
      : dtype(type),
        rows(row_count),
        cols(col_count),
        stride(l.same   ? 0
               : l.flip ? -(cols + l.gap)
                        : cols + l.gap),
        first(l.skip + (l.flip && rows > 0 ? (rows - 1) * (cols + l.gap) : 0)),
        buffer(size_t((l.skip + std::max<int64_t>(1, rows) * (cols + l.gap)) * dtype_size(type)), fill) {}

  Tensor view(void* base) const {
    Tensor t = make_tensor(static_cast<uint8_t*>(base) + first * dtype_size(dtype), dtype, rows, cols);
    t.stride[0] = stride;
    return t;
  }
  Tensor host_view() { return view(buffer.host.data()); }
  Tensor device_view() const {
    Tensor t = view(buffer.device());
    t.device.type = DeviceType::cuda;
    return t;
  }
  void set(int64_t r, int64_t c, float x) { store_float(host_view(), r * stride + c, x); }
};

struct Case {
  int64_t rows = 0, dim = 0;
  std::vector<int32_t> cu_seqlens{};  // rows at and after the last belong to no sequence
  int32_t batch = 1;                  // without cu_seqlens
  int32_t max_seqlen = 0;
  Dtype in = Dtype::bf16, weight = Dtype::bf16, residual = Dtype::none, element = Dtype::e4m3;
  MxBlock block = MxBlock::square32;
  ScaleLayout layout = ScaleLayout::linear;
  MxRule rule = MxRule::rceil;
  Layout in_layout{}, residual_layout{}, y_layout{}, out_layout{}, weight_layout{};
  bool y = true, rstd = true;
  bool wild = false;  // any exponents, NaN, Inf, rows of zeros
  float eps = 1e-5f;
  uint64_t seed = 1;
};

std::string describe(const Case& c) {
  std::string text = std::to_string(c.rows) + " x " + std::to_string(c.dim) + ", in " + dtype_name(c.in) + ", weight " +
                     dtype_name(c.weight) + ", residual " + dtype_name(c.residual) + ", out " + dtype_name(c.element) +
                     ", block " + std::to_string(int(c.block)) + ", layout " + std::to_string(int(c.layout)) +
                     ", rule " + std::to_string(int(c.rule)) + ", y " + std::to_string(c.y) + ", wild " +
                     std::to_string(c.wild) + ", batch " + std::to_string(c.batch) + ", seed " +
                     std::to_string(c.seed) + ", cu_seqlens";
  for (const int32_t start : c.cu_seqlens) text += ' ' + std::to_string(start);
  return text;
}

// All tensors of a call, in both memories.
class Call {
 public:
  explicit Call(const Case& c)
      : case_(c),
        in_(c.in, c.rows, c.dim, c.in_layout),
        residual_(c.residual == Dtype::none ? Dtype::bf16 : c.residual, c.rows, c.dim, c.residual_layout),
        weight_(c.weight, 1, c.dim, c.weight_layout),
        y_(Dtype::bf16, c.rows, c.dim, c.y_layout, 0xA5),
        rstd_(Dtype::f32, 1, c.rows, {}, 0xA5),
        out_(c.element, c.rows, c.dim, c.out_layout, 0xA5),
        scale_(size_t(scale_size(c.block, c.layout, c.rows, 1, c.dim, seq(nullptr))), 0xA5),
        cu_seqlens_(c.cu_seqlens.size() * sizeof(int32_t)) {
    if (!c.cu_seqlens.empty()) std::memcpy(cu_seqlens_.host.data(), c.cu_seqlens.data(), cu_seqlens_.host.size());
    Random random(c.seed, 7);
    const int64_t inside = c.cu_seqlens.empty() ? c.rows : c.cu_seqlens.back();
    fill(random, in_, c.in_layout.same ? std::min<int64_t>(inside, 1) : inside, c.wild);
    if (c.residual != Dtype::none) fill(random, residual_, inside, c.wild);
    fill(random, weight_, 1, c.wild && random.below(4) == 0);
  }

  RmsnormQuantize host_args() {
    RmsnormQuantize a = options();
    a.in = in_.host_view();
    a.weight = vector(weight_.host_view());
    if (case_.residual != Dtype::none) a.residual = residual_.host_view();
    a.out = mx(out_.host_view(), scale_.host.data());
    if (case_.y) a.y = y_.host_view();
    if (case_.rstd) a.rstd = vector(rstd_.host_view());
    a.seq = seq(cu_seqlens_.host.data());
    a.backend = "ref";
    return a;
  }
  RmsnormQuantize device_args() const {
    RmsnormQuantize a = options();
    a.in = in_.device_view();
    a.weight = vector(weight_.device_view());
    if (case_.residual != Dtype::none) a.residual = residual_.device_view();
    a.out = mx(out_.device_view(), scale_.device());
    if (case_.y) a.y = y_.device_view();
    if (case_.rstd) a.rstd = vector(rstd_.device_view());
    a.seq = seq(cu_seqlens_.device());
    a.backend = card_backend();
    return a;
  }

  bool upload() const {
    bool ok = true;
    for (const Buffer* b : {&in_.buffer, &residual_.buffer, &weight_.buffer, &y_.buffer, &rstd_.buffer, &out_.buffer,
                            &scale_, &cu_seqlens_}) {
      ok = b->upload() && ok;
    }
    return ok;
  }
  // Other sequences in the same capacity, in both memories.
  bool set_sequences(const std::vector<int32_t>& cu_seqlens) {
    std::memcpy(cu_seqlens_.host.data(), cu_seqlens.data(), cu_seqlens_.host.size());
    return cu_seqlens_.upload();
  }

  // The device's bytes against the host's.
  void compare() {
    expect_bytes(out_.buffer.download(), out_.buffer.host, "out.data");
    expect_bytes(scale_.download(), scale_.host, "out.scale");
    expect_floats(y_, "y");
    expect_floats(rstd_, "rstd");
    expect_floats(residual_, "residual");
    expect_bytes(in_.buffer.download(), in_.buffer.host, "in");
  }
  std::vector<std::vector<uint8_t>> results() const {
    return {out_.buffer.download(), scale_.download(), y_.buffer.download(), rstd_.buffer.download(),
            residual_.buffer.download()};
  }

 private:
  static Tensor vector(const Tensor& t) {
    Tensor v = make_tensor(t.data, t.dtype, t.shape[1]);
    v.device = t.device;
    return v;
  }
  Jagged seq(const void* cu_seqlens) const {
    if (case_.cu_seqlens.empty()) return {.batch = case_.batch};
    static const int32_t somewhere = 0;  // for sizes, which depend on capacities only
    return {.cu_seqlens = cu_seqlens ? static_cast<const int32_t*>(cu_seqlens) : &somewhere,
            .batch = int32_t(case_.cu_seqlens.size()) - 1,
            .max_seqlen = case_.max_seqlen ? case_.max_seqlen : int32_t(case_.rows)};
  }
  RmsnormQuantize options() const {
    RmsnormQuantize a;
    a.eps = case_.eps;
    a.rule = case_.rule;
    return a;
  }
  MxTensor mx(const Tensor& data, void* scale) const {
    MxTensor t = make_mx_tensor(data.data, scale, case_.element, case_.block, case_.layout, case_.rows, 1, case_.dim,
                                seq(nullptr));
    t.data = data;
    t.scale.device = data.device;
    return t;
  }
  // Rows of no sequence stay NaN.
  static void fill(Random& random, Matrix& m, int64_t rows, bool wild) {
    for (int64_t r = 0; r < rows; ++r) {
      if (!wild) {
        for (int64_t c = 0; c < m.cols; ++c) m.set(r, c, float(int64_t(random.bits() >> 40) - (1 << 23)) * 0x1p-22f);
        continue;
      }
      const bool zeros = random.below(24) == 0, special = random.below(6) == 0;
      const int exponent = int(random.below(200)) - 150;
      for (int64_t c = 0; c < m.cols; ++c) {
        float x = zeros ? (c % 3 ? 0.0f : -0.0f) : std::ldexp(float(random.normal()), exponent);
        if (special && random.below(1 + m.cols / 2) == 0) x = pick(random, {INFINITY, -INFINITY, NAN});
        m.set(r, c, x);
      }
    }
  }

  static void expect_bytes(const std::vector<uint8_t>& got, const std::vector<uint8_t>& want, const char* name) {
    if (got == want) return;
    size_t wrong = 0, first = 0;
    for (size_t i = got.size(); i-- > 0;) {
      if (got[i] == want[i]) continue;
      ++wrong;
      first = i;
    }
    ADD_FAILURE() << name << ": " << wrong << " of " << got.size() << " bytes, the first is " << first << ": got "
                  << int(got[first]) << ", want " << int(want[first]);
  }
  static void expect_floats(Matrix& m, const char* name) {
    std::vector<uint8_t> got = m.buffer.download();
    const int64_t size = dtype_size(m.dtype), count = int64_t(got.size()) / size;
    const Tensor x = make_tensor(got.data(), m.dtype, count);
    const Tensor y = make_tensor(m.buffer.host.data(), m.dtype, count);
    for (int64_t i = 0; i < count; ++i) {
      if (std::isnan(load_float(x, i)) && std::isnan(load_float(y, i))) {
        std::memcpy(got.data() + i * size, m.buffer.host.data() + i * size, size_t(size));
      }
    }
    expect_bytes(got, m.buffer.host, name);
  }

  Case case_;
  Matrix in_, residual_, weight_, y_, rstd_, out_;
  Buffer scale_, cu_seqlens_;
};

void run_case(const Case& c) {
  SCOPED_TRACE(describe(c));
  Call call(c);
  ASSERT_TRUE(call.upload());
  const Status device = rmsnorm_quantize(call.device_args());
  ASSERT_TRUE(device.ok()) << device.message;
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const Status host = rmsnorm_quantize(call.host_args());
  ASSERT_TRUE(host.ok()) << host.message;
  call.compare();
}

class RmsnormDevice : public OnAnyCard {};

constexpr MxBlock kBlocks[] = {MxBlock::square32, MxBlock::row32, MxBlock::col32};

// Every way to divide a row among warps, at its ends and between.
TEST_F(RmsnormDevice, Dims) {
  for (const int64_t dim :
       {8,    24,   32,   40,   256,  264,  1000,  1024,  1032,  2048,  2056,  3072,  3080,  4096,
        4104, 5120, 6144, 6152, 8192, 8200, 10240, 12288, 12296, 14336, 16376, 16384, 16392, 20000}) {
    for (const MxBlock block : kBlocks) {
      run_case({.rows = 75, .dim = dim, .block = block, .seed = uint64_t(dim)});
      run_case({.rows = 75, .dim = dim, .residual = Dtype::bf16, .block = block, .wild = true, .seed = uint64_t(dim)});
      if (HasFailure()) return;
    }
  }
}

TEST_F(RmsnormDevice, DimsWithoutVectors) {
  for (const int64_t dim : {1, 2, 7, 31, 33, 63, 100, 129, 1001, 1025, 4097, 16383}) {
    for (const MxBlock block : kBlocks) run_case({.rows = 40, .dim = dim, .block = block, .seed = uint64_t(dim)});
  }
}

TEST_F(RmsnormDevice, Rows) {
  for (const int64_t rows : {0, 1, 2, 7, 8, 9, 31, 32, 33, 64, 127, 128, 129, 500}) {
    for (const int64_t dim : {64, 2048, 8192, 16384}) {
      for (const MxBlock block : kBlocks) run_case({.rows = rows, .dim = dim, .block = block, .seed = uint64_t(rows)});
    }
  }
}

// More parts than a card runs at a time, so that CTAs take several.
TEST_F(RmsnormDevice, ManyRows) {
  for (const int64_t dim : {512, 1024, 2048, 3072, 4096, 5120, 8192, 12288, 16384}) {
    const int64_t rows = (int64_t(20) << 20) / dim + 17;
    for (const MxBlock block : {MxBlock::square32, MxBlock::row32}) {
      run_case({.rows = rows, .dim = dim, .block = block, .y = false, .seed = uint64_t(dim)});
      if (HasFailure()) return;
    }
  }
  run_case({.rows = 5000, .dim = 4096, .residual = Dtype::bf16, .wild = true});
  run_case({.rows = 9000, .dim = 1024, .block = MxBlock::col32});
  run_case({.rows = 9001, .dim = 1000, .in = Dtype::f32, .residual = Dtype::f16});
}

TEST_F(RmsnormDevice, DtypesAndFormats) {
  uint64_t seed = 0;
  for (const Dtype in : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
    for (const Dtype residual : {Dtype::none, Dtype::bf16, Dtype::f16, Dtype::f32}) {
      for (const Dtype weight : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
        for (const MxBlock block : kBlocks) {
          for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
            ++seed;
            run_case(
                {.rows = 70,
                 .dim = seed % 2 ? 192 : 2304,
                 .in = in,
                 .weight = weight,
                 .residual = residual,
                 .element = element,
                 .block = block,
                 .layout = block != MxBlock::square32 && seed % 4 < 2 ? ScaleLayout::atom128x4 : ScaleLayout::linear,
                 .rule = seed % 3 ? MxRule::rceil : MxRule::floor,
                 .wild = seed % 5 < 2,
                 .seed = seed});
          }
        }
      }
    }
  }
}

TEST_F(RmsnormDevice, Atoms) {
  for (const int64_t dim : {8, 32, 40, 96, 128, 136, 1024, 4096, 4104, 8192, 16384}) {
    for (const MxBlock block : {MxBlock::row32, MxBlock::col32}) {
      run_case({.rows = 300, .dim = dim, .block = block, .layout = ScaleLayout::atom128x4});
      run_case({.rows = 300, .dim = dim, .batch = 4, .block = block, .layout = ScaleLayout::atom128x4});
    }
  }
}

TEST_F(RmsnormDevice, Sequences) {
  const std::vector<std::vector<int32_t>> all = {{0, 0},
                                                 {0, 1},
                                                 {0, 300},
                                                 {0, 128, 256},
                                                 {0, 0, 0, 5, 5},
                                                 {0, 31, 63, 64, 200, 201, 300},
                                                 {0, 129, 129, 257},
                                                 {0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100}};
  for (const std::vector<int32_t>& cu_seqlens : all) {
    for (const MxBlock block : kBlocks) {
      for (const ScaleLayout layout : {ScaleLayout::linear, ScaleLayout::atom128x4}) {
        if (block == MxBlock::square32 && layout == ScaleLayout::atom128x4) continue;
        for (const int64_t dim : {64, 100, 4096, 8192}) {
          run_case({.rows = 333, .dim = dim, .cu_seqlens = cu_seqlens, .block = block, .layout = layout});
        }
      }
    }
  }
  for (const int32_t batch : {1, 2, 3, 8}) {
    for (const MxBlock block : kBlocks) run_case({.rows = 33 * 24, .dim = 512, .batch = batch, .block = block});
  }
}

TEST_F(RmsnormDevice, Strides) {
  for (const MxBlock block : kBlocks) {
    for (const int64_t dim : {128, 4096, 8192}) {
      const auto with = [&](Layout in, Layout rest, Layout out) {
        run_case({.rows = 90,
                  .dim = dim,
                  .residual = Dtype::bf16,
                  .block = block,
                  .in_layout = in,
                  .residual_layout = rest,
                  .y_layout = rest,
                  .out_layout = out,
                  .weight_layout = {.skip = 1}});
      };
      with({.gap = 8}, {.gap = 24}, {.gap = 8});
      with({.flip = true}, {.gap = 8, .flip = true}, {.gap = 16, .flip = true});
      with({.same = true}, {}, {});
      with({.skip = 8}, {.skip = 16}, {.skip = 8});
      with({.skip = 1}, {}, {});  // aligned to elements only
      with({.gap = 3}, {.gap = 1}, {.gap = 5});
      with({}, {.skip = 4}, {});
      with({}, {}, {.skip = 4});
    }
  }
}

TEST_F(RmsnormDevice, RowsOfZerosWithoutEps) {
  for (const MxBlock block : kBlocks) {
    for (const int64_t dim : {40, 1000, 4096, 8200}) {
      for (uint64_t seed = 1; seed <= 4; ++seed) {
        run_case({.rows = 100, .dim = dim, .block = block, .wild = true, .eps = 0, .seed = seed});
      }
    }
  }
}

TEST_F(RmsnormDevice, RandomCalls) {
  for (uint64_t seed = 1; seed <= 300 && !HasFailure(); ++seed) {
    Random random(seed);
    Case c{.seed = seed};
    if (random.below(2)) {
      c.cu_seqlens = {0};
      for (int64_t b = random.below(6) + 1; b > 0; --b) {
        c.cu_seqlens.push_back(c.cu_seqlens.back() + int32_t(random.below(150)));
      }
      c.rows = c.cu_seqlens.back() + random.below(2) * random.below(90);
      c.max_seqlen = random.below(2) ? c.cu_seqlens.back() : 1 << 20;
    } else {
      c.batch = int32_t(random.below(3)) + 1;
      c.rows = c.batch * random.below(230);
    }
    c.dim = random.below(2) ? 8 * (random.below(700) + 1) : random.below(3000) + 1;
    if (random.below(8) == 0) c.dim = 8 * (random.below(1400) + 700);
    const auto any_float = [&] {
      return pick(random, {Dtype::bf16, Dtype::bf16, Dtype::bf16, Dtype::f16, Dtype::f32});
    };
    c.in = any_float();
    c.weight = any_float();
    if (random.below(2)) c.residual = any_float();
    c.element = pick(random, {Dtype::e4m3, Dtype::e5m2});
    c.block = kBlocks[random.below(3)];
    if (c.block != MxBlock::square32 && random.below(2)) c.layout = ScaleLayout::atom128x4;
    c.rule = pick(random, {MxRule::rceil, MxRule::floor});
    for (Layout* l : {&c.in_layout, &c.residual_layout, &c.y_layout, &c.out_layout}) {
      if (random.below(4) == 0) l->gap = 8 * random.below(4);
      if (random.below(16) == 0) l->skip = random.below(9);
      if (random.below(16) == 0) l->flip = true;
    }
    c.y = random.below(2);
    c.rstd = random.below(2);
    c.wild = random.below(2);
    run_case(c);
  }
}

TEST_F(RmsnormDevice, TwiceGivesTheSameBytes) {
  for (const MxBlock block : kBlocks) {
    const Call call({.rows = 5000, .dim = 4096, .block = block});
    std::vector<std::vector<uint8_t>> first;
    for (int i = 0; i < 5; ++i) {
      ASSERT_TRUE(call.upload());
      const Status status = rmsnorm_quantize(call.device_args());
      ASSERT_TRUE(status.ok()) << status.message;
      if (i == 0) first = call.results();
      EXPECT_TRUE(call.results() == first);
    }
  }
}

// Captured once, replayed with other lengths.
TEST_F(RmsnormDevice, GraphsTakeOtherLengths) {
  for (const int64_t dim : {1024, 1001}) {
    Call call({.rows = 700, .dim = dim, .cu_seqlens = {0, 100, 400, 700}, .residual = Dtype::bf16});
    const CapturedGraph graph([&](Stream stream) { kit::require_ok(rmsnorm_quantize(call.device_args(), stream)); });
    for (const std::vector<int32_t>& cu_seqlens :
         {std::vector<int32_t>{0, 100, 400, 700}, {0, 0, 1, 33}, {0, 333, 333, 650}}) {
      ASSERT_TRUE(call.set_sequences(cu_seqlens));
      ASSERT_TRUE(call.upload());
      graph.replay();
      const Status host = rmsnorm_quantize(call.host_args());
      ASSERT_TRUE(host.ok()) << host.message;
      call.compare();
    }
  }
}

}  // namespace
}  // namespace mxflash
