// quantize, dequantize and convert_scales on a card against backend ref, byte by byte: outputs are poisoned first, and
// whole buffers are compared, gaps between rows included.
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <mxflash/quantize.h>

#include <bit>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "captured_graph.h"
#include "kit/random.h"
#include "mx/float16.h"
#include "mx/scale_layout.h"
#include "on_card.h"

namespace mxflash {
namespace {

constexpr uint8_t kPoison = 0xA5;
constexpr size_t kGuard = 64;  // bytes behind every buffer that nobody may write

// ---- memory -----------------------------------------------------------------------------------------------------

// The same bytes on the host and on the card.
class Twin {
 public:
  explicit Twin(int64_t size = 0, uint8_t fill = kPoison) : host_(size_t(size) + kGuard, fill) {
    if (cudaMalloc(&device_, host_.size()) != cudaSuccess) throw std::bad_alloc();
    upload();
  }
  ~Twin() { cudaFree(device_); }
  Twin(const Twin&) = delete;
  Twin& operator=(const Twin&) = delete;

  uint8_t* host() { return host_.data(); }
  void upload() { check(cudaMemcpy(device_, host_.data(), host_.size(), cudaMemcpyHostToDevice)); }
  void poison_device() { check(cudaMemset(device_, kPoison, host_.size())); }
  std::vector<uint8_t> download() const {
    std::vector<uint8_t> bytes(host_.size());
    check(cudaMemcpy(bytes.data(), device_, bytes.size(), cudaMemcpyDeviceToHost));
    return bytes;
  }
  const std::vector<uint8_t>& bytes() const { return host_; }
  uint8_t* at(bool on_device) { return on_device ? static_cast<uint8_t*>(device_) : host_.data(); }

 private:
  static void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }
  std::vector<uint8_t> host_;
  void* device_ = nullptr;
};

Device device_of(bool on_device) { return {on_device ? DeviceType::cuda : DeviceType::cpu, 0}; }

// First difference, or empty.
std::string difference(const char* what, const std::vector<uint8_t>& got, const std::vector<uint8_t>& want) {
  size_t first = got.size(), count = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i]) continue;
    if (count++ == 0) first = i;
  }
  if (count == 0) return {};
  char text[160];
  std::snprintf(text, sizeof text, "%s: %zu of %zu bytes differ, first at %zu: got %02x, want %02x\n", what, count,
                want.size(), first, got[first], want[first]);
  return text;
}
// As difference, but any NaN equals any NaN.
std::string float_difference(const char* what, std::vector<uint8_t> got, std::vector<uint8_t> want, Dtype dtype) {
  const size_t size = size_t(dtype_size(dtype));
  for (std::vector<uint8_t>* bytes : {&got, &want}) {
    for (size_t i = 0; i + size <= bytes->size(); i += size) {
      uint8_t* const p = bytes->data() + i;
      uint32_t bits = 0;
      std::memcpy(&bits, p, size);
      const float x = dtype == Dtype::bf16  ? decode_bf16(uint16_t(bits))
                      : dtype == Dtype::f16 ? decode_f16(uint16_t(bits))
                                            : std::bit_cast<float>(bits);
      if (x != x) std::memset(p, 0xFF, size);
    }
  }
  return difference(what, got, want);
}

// ---- cases ------------------------------------------------------------------------------------------------------

enum class Values { normal, wide, tiny, huge, special, zero };

// How rows of a tensor lie in its buffer.
struct Lie {
  int64_t gap = 0;      // elements between the rows of a token's heads
  int64_t start = 0;    // elements before the first
  bool flip = false;    // tokens backwards
  bool swap = false;    // [heads][tokens][dim]
  bool repeat = false;  // one element for all channels
};

struct Case {
  int64_t tokens = 256, heads = 2, dim = 128;
  std::vector<int32_t> lengths{};  // jagged; tokens beyond their sum belong to no sequence
  int32_t batch = 1;               // of equal lengths
  Dtype in = Dtype::bf16, element = Dtype::e4m3;
  MxBlock block = MxBlock::square32;
  ScaleLayout layout = ScaleLayout::linear;
  bool second = false;
  MxBlock second_block = MxBlock::col32;
  ScaleLayout second_layout = ScaleLayout::linear;
  MxRule rule = MxRule::rceil;
  bool smooth = false, rotate = false, stats = false;
  bool image = false, image_only = false;
  ImageRole role = ImageRole::query;
  bool rank2 = false;
  Lie in_lie{}, out_lie{};
  Values values = Values::normal;

  std::string name() const {
    const char* blocks[] = {"square32", "row32", "col32"};
    const char* roles[] = {"query", "key", "value"};
    std::string s = std::to_string(tokens) + "x" + std::to_string(heads) + "x" + std::to_string(dim) + " " +
                    dtype_name(in) + " " + dtype_name(element) + " " + blocks[int(block)];
    if (layout != ScaleLayout::linear) s += " atoms";
    if (!lengths.empty()) s += " jagged" + std::to_string(lengths.size());
    if (batch > 1) s += " batch" + std::to_string(batch);
    if (second) s += std::string(" +") + blocks[int(second_block)];
    if (second && second_layout != ScaleLayout::linear) s += " atoms";
    if (rule == MxRule::floor) s += " floor";
    if (smooth) s += " smooth";
    if (rotate) s += " rotate";
    if (stats) s += " stats";
    if (image) s += std::string(image_only ? " only image of " : " image of ") + roles[int(role)];
    if (rank2) s += " rank2";
    if (in_lie.gap || in_lie.start) s += " in+" + std::to_string(in_lie.gap) + "," + std::to_string(in_lie.start);
    if (out_lie.gap || out_lie.start) s += " out+" + std::to_string(out_lie.gap) + "," + std::to_string(out_lie.start);
    if (in_lie.flip) s += " flipped";
    if (in_lie.swap) s += " swapped";
    if (in_lie.repeat) s += " repeated";
    return s + " values" + std::to_string(int(values));
  }
};

float value_of(kit::Random& random, Values kind, int64_t i) {
  const float normal = float(random.normal());
  const auto bits = uint32_t(random.bits());
  switch (kind) {
    case Values::normal: return normal;
    case Values::wide: return std::ldexp(normal, int(bits % 60) - 40);
    case Values::tiny: return std::bit_cast<float>((bits & 0x80000000) | (bits & 0x1FFFFFF) >> bits % 24);
    case Values::huge: return i % 3 ? normal * 0x1p126f : std::copysign(0x1.fep127f, normal);
    case Values::special:
      switch (bits % 4096) {
        case 0: return std::numeric_limits<float>::infinity();
        case 1: return -std::numeric_limits<float>::quiet_NaN();
        case 2: return 0x1.fep127f;
        default: return bits % 7 == 0 ? -0.0f : bits % 11 == 0 ? 448.0f : normal;
      }
    case Values::zero: return bits % 2 ? 0.0f : -0.0f;
  }
  return 0;
}

void write_float(uint8_t* to, Dtype dtype, int64_t i, float x) {
  if (dtype == Dtype::f32) std::memcpy(to + 4 * i, &x, 4);
  if (dtype == Dtype::f32) return;
  const uint16_t bits = dtype == Dtype::bf16 ? encode_bf16(x) : encode_f16(x);
  std::memcpy(to + 2 * i, &bits, 2);
}

// Elements of the buffer of a tensor that lies like this, and its strides.
struct Placement {
  int64_t size, first, token_stride, head_stride, channel_stride;
  Placement(const Case& c, const Lie& lie) {
    const int64_t row = (lie.repeat ? 1 : c.dim) + lie.gap;
    token_stride = lie.swap ? row : row * c.heads;
    head_stride = lie.swap ? row * c.tokens : row;
    channel_stride = lie.repeat ? 0 : 1;
    first = lie.start;
    size = lie.start + row * c.heads * c.tokens;
    if (lie.flip && c.tokens > 0) {
      first += token_stride * (c.tokens - 1);
      token_stride = -token_stride;
    }
  }
  Tensor view(const Case& c, uint8_t* base, Dtype dtype, bool on_device) const {
    Tensor t{.data = base + first * dtype_size(dtype), .dtype = dtype, .device = device_of(on_device), .rank = 3};
    t.shape = {c.tokens, c.heads, c.dim};
    t.stride = {token_stride, head_stride, channel_stride};
    if (c.rank2) {
      t.rank = 2;
      t.shape = {c.tokens, c.dim};
      t.stride = {token_stride, channel_stride};
    }
    return t;
  }
};

// All memory of a quantize call, on both sides.
class Problem {
 public:
  explicit Problem(const Case& c)
      : c_(c),
        in_at_(c, c.in_lie),
        out_at_(c, c.out_lie),
        cu_(4 * int64_t(c.lengths.size() + 1)),
        in_(in_at_.size * dtype_size(c.in)),
        out_(out_at_.size),
        scale_(scale_bytes(c.block, c.layout)),
        out_col_(out_at_.size),
        scale_col_(c.second ? scale_bytes(c.second_block, c.second_layout) : 0),
        mean_(4 * batch() * c.heads * c.dim),
        image_(c.image ? image_size(c.role, c.tokens, c.heads, c.dim, seq(false)) : 0),
        stats_(sizeof(QuantizeStats)) {
    kit::Random random(uint64_t(c.tokens * 31 + c.dim * 7 + int(c.in)), 3);
    for (int64_t i = 0; i < in_at_.size; ++i) write_float(in_.host(), c.in, i, value_of(random, c.values, i));
    in_.upload();
    int32_t sum = 0;
    for (size_t b = 0; b <= c.lengths.size(); ++b) {
      std::memcpy(cu_.host() + 4 * b, &sum, 4);
      if (b < c.lengths.size()) sum += c.lengths[b];
    }
    cu_.upload();
  }

  Jagged seq(bool on_device) {
    if (c_.lengths.empty()) return {.batch = c_.batch};
    int32_t longest = 0;
    for (const int32_t n : c_.lengths) longest = std::max(longest, n);
    return {reinterpret_cast<const int32_t*>(cu_.at(on_device)), int32_t(c_.lengths.size()), longest};
  }

  Quantize call(bool on_device) {
    Quantize q{.in = in_at_.view(c_, in_.at(on_device), c_.in, on_device),
               .out = mx(out_, scale_, c_.block, c_.layout, on_device),
               .seq = seq(on_device),
               .rule = c_.rule,
               .smooth = c_.smooth,
               .rotate = c_.rotate,
               .image_role = c_.role,
               .backend = on_device ? card_backend() : "ref"};
    if (c_.second) q.out_col = mx(out_col_, scale_col_, c_.second_block, c_.second_layout, on_device);
    if (c_.smooth) {
      q.mean = c_.rank2 ? make_tensor(mean_.at(on_device), Dtype::f32, batch(), c_.dim)
                        : make_tensor(mean_.at(on_device), Dtype::f32, batch(), c_.heads, c_.dim);
      q.mean.device = device_of(on_device);
    }
    if (c_.image) {
      q.image = make_tensor(image_.at(on_device), Dtype::u8, int64_t(image_.bytes().size() - kGuard));
      q.image.device = device_of(on_device);
    }
    if (c_.image_only && on_device) q.out.data.data = q.out.scale.data = nullptr;
    if (c_.stats) q.stats = reinterpret_cast<QuantizeStats*>(stats_.at(on_device));
    return q;
  }

  Status run_host() { return quantize(call(false)); }
  void poison_device() {
    for (Twin* t : {&out_, &scale_, &out_col_, &scale_col_, &mean_, &image_, &stats_}) t->poison_device();
  }
  // Every difference, a line each.
  std::string differences() {
    std::string text;
    if (!c_.image_only) {
      text += difference("payload", out_.download(), out_.bytes());
      text += difference("scale", scale_.download(), scale_.bytes());
    }
    text += difference("second payload", out_col_.download(), out_col_.bytes());
    text += difference("second scale", scale_col_.download(), scale_col_.bytes());
    text += float_difference("mean", mean_.download(), mean_.bytes(), Dtype::f32);
    text += difference("image", image_.download(), image_.bytes());
    if (c_.stats) {
      QuantizeStats got, want;
      std::memcpy(&got, stats_.download().data(), sizeof got);
      std::memcpy(&want, stats_.host(), sizeof want);
      if (got.amax != want.amax) text += "stats.amax\n";
      if (got.saturated != want.saturated) text += "stats.saturated\n";
      if (got.flushed != want.flushed) text += "stats.flushed\n";
      if (got.nonfinite != want.nonfinite) text += "stats.nonfinite\n";
      if (got.total != want.total) text += "stats.total\n";
    }
    return text;
  }
  std::vector<std::vector<uint8_t>> downloads() {
    return {out_.download(), scale_.download(), out_col_.download(), scale_col_.download(), image_.download()};
  }

  MxTensor mx(Twin& data, Twin& scale, MxBlock block, ScaleLayout layout, bool on_device) {
    MxTensor t = make_mx_tensor(nullptr, scale.at(on_device), c_.element, block, layout, c_.tokens, c_.heads, c_.dim,
                                seq(on_device));
    t.data = out_at_.view(c_, data.at(on_device), c_.element, on_device);
    t.scale.device = device_of(on_device);
    return t;
  }
  MxTensor out(bool on_device) { return mx(out_, scale_, c_.block, c_.layout, on_device); }
  // Copies what the host quantized to the card.
  void upload_outputs() {
    out_.upload();
    scale_.upload();
  }

 private:
  int64_t batch() const { return c_.lengths.empty() ? c_.batch : int64_t(c_.lengths.size()); }
  int64_t scale_bytes(MxBlock block, ScaleLayout layout) {
    return scale_size(block, layout, c_.tokens, c_.heads, c_.dim, seq(false));
  }

  const Case c_;
  const Placement in_at_, out_at_;
  Twin cu_, in_, out_, scale_, out_col_, scale_col_, mean_, image_, stats_;
};

class QuantizeDevice : public OnAnyCard {
 protected:
  static void expect_equal(const Case& c) {
    Problem problem(c);
    Status status = problem.run_host();
    ASSERT_TRUE(status.ok()) << c.name() << ": " << status.message;
    status = quantize(problem.call(true));
    ASSERT_TRUE(status.ok()) << c.name() << ": " << status.message;
    const cudaError_t error = cudaDeviceSynchronize();
    ASSERT_EQ(error, cudaSuccess) << c.name() << ": " << cudaGetErrorString(error);
    EXPECT_EQ(problem.differences(), "") << c.name();
  }
};

constexpr MxBlock kBlocks[] = {MxBlock::square32, MxBlock::row32, MxBlock::col32};
constexpr ImageRole kRoles[] = {ImageRole::query, ImageRole::key, ImageRole::value};
constexpr Dtype kFloats[] = {Dtype::bf16, Dtype::f16, Dtype::f32};
constexpr Values kValues[] = {Values::normal, Values::wide, Values::tiny, Values::huge, Values::special, Values::zero};
const std::vector<int32_t> kLengths = {70, 0, 129, 1, 128, 31};

// ---- quantize ---------------------------------------------------------------------------------------------------

TEST_F(QuantizeDevice, BlocksFromEveryDtype) {
  for (const Dtype in : kFloats) {
    for (const MxBlock block : kBlocks) {
      for (const Values values : kValues) {
        expect_equal({.in = in, .block = block, .values = values});
        expect_equal({.in = in, .block = block, .rule = MxRule::floor, .values = values});
        expect_equal({.in = in, .element = Dtype::e5m2, .block = block, .rule = MxRule::floor, .values = values});
      }
      expect_equal({.in = in, .element = Dtype::e5m2, .block = block, .values = Values::special});
    }
  }
}

TEST_F(QuantizeDevice, OddSizes) {
  for (const int64_t dim : {1, 7, 8, 24, 31, 32, 40, 64, 72, 96, 120, 128, 136, 192, 250, 256, 264, 320, 512, 520}) {
    for (const MxBlock block : kBlocks) {
      expect_equal({.tokens = 67, .heads = 3, .dim = dim, .block = block, .values = Values::special});
      if (block == MxBlock::square32) continue;
      expect_equal({.tokens = 200, .heads = 1, .dim = dim, .block = block, .layout = ScaleLayout::atom128x4});
    }
  }
  for (const int64_t tokens : {1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300}) {
    for (const MxBlock block : kBlocks) expect_equal({.tokens = tokens, .heads = 1, .dim = 64, .block = block});
  }
}

TEST_F(QuantizeDevice, EmptyTensors) {
  for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
    expect_equal({.tokens = 0, .element = element, .smooth = true, .stats = true});
    expect_equal({.heads = 0, .element = element, .smooth = true, .stats = true});
    expect_equal({.dim = 0, .element = element, .smooth = true, .stats = true});
    expect_equal({.tokens = 0, .lengths = {0, 0}, .element = element, .smooth = true, .image = true});
    expect_equal({.tokens = 100, .dim = 0, .element = element, .image = true, .role = ImageRole::value});
  }
}

TEST_F(QuantizeDevice, SequencesAndSlack) {
  for (const MxBlock block : kBlocks) {
    for (const ScaleLayout layout : {ScaleLayout::linear, ScaleLayout::atom128x4}) {
      if (block == MxBlock::square32 && layout == ScaleLayout::atom128x4) continue;
      for (const int64_t dim : {20, 64, 128, 160}) {
        for (const Dtype in : {Dtype::bf16, Dtype::f32}) {
          const Case c{.dim = dim, .in = in, .block = block, .layout = layout, .smooth = dim == 160};
          for (const int64_t tokens : {359, 360, 700}) {
            Case jagged = c;
            jagged.tokens = tokens;
            jagged.lengths = kLengths;
            expect_equal(jagged);
          }
          Case equal = c;
          equal.tokens = 5 * 77;
          equal.batch = 5;
          expect_equal(equal);
        }
      }
    }
  }
  expect_equal({.tokens = 300, .lengths = {0, 0, 0}, .smooth = true});
  std::vector<int32_t> many;  // more sequences than a warp has lanes, twice over
  for (int32_t b = 0; b < 1100; ++b) many.push_back(b * 7919 % 5);
  expect_equal({.tokens = 2300, .heads = 1, .dim = 32, .lengths = many, .smooth = true});
  many.resize(33);
  expect_equal({.tokens = 80, .dim = 128, .lengths = many});
}

TEST_F(QuantizeDevice, TwoCopies) {
  for (const MxBlock block : kBlocks) {
    for (const MxBlock second : kBlocks) {
      for (const Dtype in : kFloats) {
        expect_equal({.tokens = 359,
                      .dim = 96,
                      .lengths = kLengths,
                      .in = in,
                      .block = block,
                      .second = true,
                      .second_block = second,
                      .values = Values::special});
      }
      if (second == MxBlock::square32) continue;
      expect_equal(
          {.dim = 64, .block = block, .second = true, .second_block = second, .second_layout = ScaleLayout::atom128x4});
      expect_equal({.dim = 60,
                    .element = Dtype::e5m2,
                    .block = block,
                    .second = true,
                    .second_block = second,
                    .second_layout = ScaleLayout::atom128x4});
    }
  }
}

TEST_F(QuantizeDevice, SmoothAndRotate) {
  for (const int64_t dim : {1, 6, 8, 16, 24, 32, 64, 96, 128, 192, 256, 384, 512, 640}) {
    for (const Dtype in : kFloats) {
      for (const MxBlock block : kBlocks) {
        const Case c{.tokens = 201, .heads = 2, .dim = dim, .in = in, .block = block};
        for (const int options : {1, 2, 3}) {
          Case d = c;
          d.smooth = options & 1;
          d.rotate = options & 2;
          expect_equal(d);
        }
      }
    }
  }
  for (const Values values : kValues) {
    for (const Dtype in : kFloats) {
      expect_equal({.dim = 128, .in = in, .smooth = true, .rotate = true, .values = values});
      expect_equal({.dim = 64, .in = in, .smooth = true, .rotate = true, .values = values});
      expect_equal({.tokens = 5000, .heads = 1, .dim = 40, .in = in, .smooth = true, .values = values});
    }
  }
  expect_equal({.tokens = 9001, .heads = 1, .dim = 33, .in = Dtype::f32, .smooth = true});
  // More partial sums than a cluster takes at once, and sequences on both sides of where clusters begin.
  for (const Dtype in : kFloats) {
    expect_equal({.tokens = 2 * 33000, .heads = 2, .dim = 8, .batch = 2, .in = in, .smooth = true});
    expect_equal(
        {.tokens = 38000, .heads = 1, .dim = 72, .lengths = {5, 33001, 0, 129, 4096}, .in = in, .smooth = true});
    expect_equal({.tokens = 4095, .heads = 3, .dim = 72, .lengths = {3968, 127}, .in = in, .smooth = true});
  }
}

TEST_F(QuantizeDevice, Images) {
  for (const ImageRole role : kRoles) {
    for (const MxBlock block : kBlocks) {
      for (const int64_t dim : {1, 8, 30, 32, 64, 72, 96, 128}) {
        for (const Values values : {Values::normal, Values::wide, Values::special}) {
          expect_equal({.tokens = 359,
                        .dim = dim,
                        .lengths = kLengths,
                        .block = block,
                        .image = true,
                        .role = role,
                        .values = values});
          expect_equal({.tokens = 300,
                        .dim = dim,
                        .block = block,
                        .image = true,
                        .image_only = true,
                        .role = role,
                        .values = values});
        }
      }
      for (const Dtype in : kFloats) {
        for (const Values values : kValues) {
          for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
            for (const MxRule rule : {MxRule::rceil, MxRule::floor}) {
              expect_equal({.tokens = 160,
                            .in = in,
                            .element = element,
                            .block = block,
                            .rule = rule,
                            .image = true,
                            .role = role,
                            .values = values});
            }
          }
        }
        expect_equal({.tokens = 160,
                      .in = in,
                      .block = block,
                      .rotate = true,
                      .image = true,
                      .role = role,
                      .values = Values::wide});
        expect_equal({.tokens = 160,
                      .dim = 64,
                      .in = in,
                      .block = block,
                      .smooth = true,
                      .rotate = true,
                      .image = true,
                      .image_only = true,
                      .role = role});
      }
    }
  }
}

TEST_F(QuantizeDevice, Strides) {
  for (const MxBlock block : kBlocks) {
    for (const Dtype in : kFloats) {
      for (const int64_t gap : {0, 1, 4, 16}) {
        for (const int64_t start : {0, 1, 8}) {
          Case c{.tokens = 140, .heads = 3, .dim = 64, .in = in, .block = block, .image = true, .role = ImageRole::key};
          c.in_lie = {.gap = gap, .start = start, .flip = gap == 16};
          c.out_lie = {.gap = gap, .start = start, .swap = start == 8};
          expect_equal(c);
          c.in_lie = {.gap = gap, .start = start, .swap = true};
          c.out_lie = {.gap = 0, .start = 8 * gap};
          c.smooth = true;
          expect_equal(c);
          c.in_lie = {.gap = gap, .start = start, .repeat = true};
          c.rotate = true;
          expect_equal(c);
        }
      }
    }
    expect_equal({.tokens = 77, .heads = 1, .dim = 128, .block = block, .smooth = true, .image = true, .rank2 = true});
    expect_equal({.tokens = 77, .heads = 1, .dim = 50, .block = block, .smooth = true, .rotate = true, .rank2 = true});
  }
}

TEST_F(QuantizeDevice, Stats) {
  for (const MxRule rule : {MxRule::rceil, MxRule::floor}) {
    for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
      for (const Values values : kValues) {
        for (const MxBlock block : kBlocks) {
          expect_equal({.tokens = 359,
                        .lengths = kLengths,
                        .in = Dtype::f32,
                        .element = element,
                        .block = block,
                        .second = true,
                        .rule = rule,
                        .stats = true,
                        .image = true,
                        .values = values});
        }
      }
    }
  }
}

TEST_F(QuantizeDevice, RunTwiceAndInAGraph) {
  const Case c{.tokens = 1000,
               .lengths = {300, 17, 600},
               .block = MxBlock::row32,
               .second = true,
               .smooth = true,
               .rotate = true,
               .image = true,
               .role = ImageRole::value};
  Problem problem(c);
  ASSERT_TRUE(problem.run_host().ok());
  ASSERT_TRUE(quantize(problem.call(true)).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const auto first = problem.downloads();
  EXPECT_EQ(problem.differences(), "");
  problem.poison_device();
  ASSERT_TRUE(quantize(problem.call(true)).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(problem.downloads(), first);

  problem.poison_device();
  CapturedGraph([&](Stream stream) { kit::require_ok(quantize(problem.call(true), stream)); }).replay();
  EXPECT_EQ(problem.downloads(), first);
}

// ---- dequantize, convert_scales ---------------------------------------------------------------------------------

TEST_F(QuantizeDevice, Dequantize) {
  for (const MxBlock block : kBlocks) {
    for (const ScaleLayout layout : {ScaleLayout::linear, ScaleLayout::atom128x4}) {
      if (block == MxBlock::square32 && layout == ScaleLayout::atom128x4) continue;
      for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
        for (const int64_t dim : {1, 20, 64, 128, 264}) {
          for (const Values values : kValues) {
            for (const bool jagged : {false, true}) {
              Case c{.tokens = 400, .dim = dim, .in = Dtype::f32, .element = element, .block = block, .layout = layout};
              c.values = values;
              if (jagged) c.lengths = kLengths;
              Problem problem(c);
              ASSERT_TRUE(problem.run_host().ok());
              problem.upload_outputs();
              for (const Dtype dtype : kFloats) {
                const Placement place(c, {.gap = dim == 64 ? 3 : 0});
                Twin out(place.size * dtype_size(dtype));
                const auto call = [&](bool on_device) {
                  return dequantize({.in = problem.out(on_device),
                                     .out = place.view(c, out.at(on_device), dtype, on_device),
                                     .seq = problem.seq(on_device),
                                     .backend = on_device ? card_backend() : "ref"});
                };
                ASSERT_TRUE(call(false).ok());
                const Status status = call(true);
                ASSERT_TRUE(status.ok()) << status.message;
                EXPECT_EQ(float_difference("out", out.download(), out.bytes(), dtype), "")
                    << c.name() << " to " << dtype_name(dtype);
              }
            }
          }
        }
      }
    }
  }
}

TEST_F(QuantizeDevice, ConvertScales) {
  for (const MxBlock from : kBlocks) {
    for (const MxBlock to : kBlocks) {
      if (from != to && from != MxBlock::square32) continue;
      for (const ScaleLayout from_layout : {ScaleLayout::linear, ScaleLayout::atom128x4}) {
        for (const ScaleLayout to_layout : {ScaleLayout::linear, ScaleLayout::atom128x4}) {
          if (from == MxBlock::square32 && from_layout == ScaleLayout::atom128x4) continue;
          if (to == MxBlock::square32 && to_layout == ScaleLayout::atom128x4) continue;
          for (const int64_t dim : {1, 20, 64, 128, 264}) {
            for (const bool jagged : {false, true}) {
              Case c{.tokens = 400, .dim = dim, .block = from, .layout = from_layout};
              if (jagged) c.lengths = kLengths;
              Problem problem(c);
              ASSERT_TRUE(problem.run_host().ok());
              problem.upload_outputs();
              Twin scale(scale_size(to, to_layout, c.tokens, c.heads, c.dim, problem.seq(false)));
              const auto call = [&](bool on_device) {
                const MxTensor in = problem.out(on_device);
                MxTensor out = make_mx_tensor(nullptr, scale.at(on_device), c.element, to, to_layout, c.tokens, c.heads,
                                              c.dim, problem.seq(on_device));
                out.data = in.data;
                out.scale.device = in.data.device;
                return convert_scales({.in = in,
                                       .out = out,
                                       .seq = problem.seq(on_device),
                                       .backend = on_device ? card_backend() : "ref"});
              };
              ASSERT_TRUE(call(false).ok());
              const Status status = call(true);
              ASSERT_TRUE(status.ok()) << status.message;
              EXPECT_EQ(difference("scale", scale.download(), scale.bytes()), "") << c.name();
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace mxflash
