// quantize and dequantize of backend `cpu` against ref, bit for bit, on every instruction set that this CPU has:
// all values under all scales, and random calls over every option, shape, stride and kind of value.
#include <gtest/gtest.h>
#include <mxflash/backend.h>
#include <mxflash/quantize.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cpu_isas.h"
#include "kit/random.h"
#include "kit/runner.h"
#include "mx/block.h"
#include "mx/float16.h"
#include "mx/fp8.h"
#include "runtime/tensor_access.h"

namespace mxflash {
namespace {

using kit::Random;
using kit::require_ok;

class QuantizeCpu : public EveryIsa {};
INSTANTIATE_TEST_SUITE_P(Isas, QuantizeCpu, testing::ValuesIn(available_isas()), isa_of_test);

// ---- all values under all scales --------------------------------------------------------------------------------

// Rows of one block: max_element * 2^(scale - 127), and 31 more values.
struct Rows {
  std::vector<float> x;
  void add(int scale, const Fp8Format& f, const std::vector<float>& values) {
    const float amax = std::ldexp(std::bit_cast<float>(f.max_bits), scale - 127);
    for (size_t i = 0; i < values.size(); ++i) {
      if (x.size() % 32 == 0) x.push_back(amax);
      x.push_back(values[i]);
    }
    while (x.size() % 32 != 0) x.push_back(0);
  }
};

void expect_equal_rows(const std::vector<float>& x, Dtype in, Dtype element) {
  const auto rows = int64_t(x.size() / 32);
  std::vector<uint8_t> bytes(x.size() * size_t(dtype_size(in)));
  for (size_t i = 0; i < x.size(); ++i) {
    store_float(make_tensor(bytes.data(), in, rows, 32), int64_t(i), x[i]);
  }
  const auto run = [&](const char* backend) {
    kit::OwnedMx out = kit::make_owned_mx(element, MxBlock::row32, {}, rows, 1, 32, {});
    require_ok(quantize({.in = make_tensor(bytes.data(), in, rows, 1, 32), .out = out.view, .backend = backend}));
    return out;
  };
  const kit::OwnedMx got = run("cpu"), want = run("ref");
  EXPECT_EQ(got.scale, want.scale);
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(got.data[i], want.data[i]) << x[i] << " of " << dtype_name(in) << ", scale " << int(want.scale[i / 32]);
  }
}

int largest_scale(const Fp8Format& f) { return 254 - f.max_exponent; }

TEST_P(QuantizeCpu, EveryBf16UnderEveryScale) {
  for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
    const Fp8Format f = fp8_format(element);
    for (int scale = 0; scale <= largest_scale(f); ++scale) {
      const float amax = std::ldexp(std::bit_cast<float>(f.max_bits), scale - 127);
      std::vector<float> values;
      for (uint32_t bits = 0; bits <= uint32_t(encode_bf16(amax)); ++bits) {
        values.push_back(decode_bf16(uint16_t(bits | (bits % 3 == 0 ? 0x8000 : 0))));
      }
      Rows rows;
      rows.add(scale, f, values);
      expect_equal_rows(rows.x, Dtype::bf16, element);
    }
  }
}

// Every code, every tie between two codes, and the fp32 neighbours of both.
TEST_P(QuantizeCpu, EveryTieUnderEveryScale) {
  for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
    const Fp8Format f = fp8_format(element);
    Rows rows;
    for (int scale = 0; scale <= largest_scale(f); ++scale) {
      std::vector<float> values;
      for (int code = 0; code < f.max_code; ++code) {
        const double low = double(decode_fp8(uint8_t(code), f)), high = double(decode_fp8(uint8_t(code + 1), f));
        for (const double x : {low, (low + high) / 2}) {
          const float exact = float(std::ldexp(x, scale - 127)), sign = code % 2 ? -1.0f : 1.0f;
          for (const float y : {exact, std::nextafter(exact, 0.0f), std::nextafter(exact, INFINITY)}) {
            values.push_back(sign * y);
          }
        }
      }
      rows.add(scale, f, values);
    }
    expect_equal_rows(rows.x, Dtype::f32, element);
  }
}

TEST_P(QuantizeCpu, EveryF16) {
  Rows rows;
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) values.push_back(decode_f16(uint16_t(bits * 40503u)));
  values.resize(values.size() / 32 * 32);
  for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) expect_equal_rows(values, Dtype::f16, element);
}

TEST_P(QuantizeCpu, DequantizesEveryCodeUnderEveryScale) {
  for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
    for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
      kit::OwnedMx in = kit::make_owned_mx(element, block, {}, 512, 1, 512, {});
      for (size_t i = 0; i < in.data.size(); ++i) in.data[i] = uint8_t(i + i / 512 * 5);
      for (size_t i = 0; i < in.scale.size(); ++i) in.scale[i] = uint8_t(i);
      for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
        const auto run = [&](const char* backend) {
          std::vector<uint8_t> out(in.data.size() * size_t(dtype_size(dtype)));
          const Tensor view = make_tensor(out.data(), dtype, 512, 1, 512);
          require_ok(dequantize({.in = in.view, .out = view, .backend = backend}));
          std::vector<float> x(in.data.size());
          for (size_t i = 0; i < x.size(); ++i) x[i] = load_float(view, int64_t(i));
          return x;
        };
        const std::vector<float> got = run("cpu"), want = run("ref");
        for (size_t i = 0; i < got.size(); ++i) {
          if (std::isnan(want[i]) && std::isnan(got[i])) continue;
          ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(want[i])) << dtype_name(dtype) << ' ' << i;
        }
      }
    }
  }
}

// ---- random calls -----------------------------------------------------------------------------------------------

template <class T>
T pick(Random& random, std::initializer_list<T> of) {
  return of.begin()[random.below(int64_t(of.size()))];
}

// Values that differ in kind from stripe to stripe and from column to column.
float value(Random& random, int64_t kind) {
  switch (kind) {
    case 0: return random.below(4) ? 0.0f : -0.0f;
    case 1: return float(random.normal()) * 0x1p-140f;
    case 2: return float(random.normal()) * 0x1p-118f;
    case 3: return float(random.normal()) * 0x1p125f;
    case 4: return std::bit_cast<float>(uint32_t(random.bits()) & 0xBFFFFFFF);  // any exponent below 1
    case 5: return float(random.below(257) - 128) * 0.0625f;
    case 6: return random.below(500) ? float(random.normal()) : pick(random, {INFINITY, -INFINITY, NAN});
    case 7: return std::ldexp(float(random.normal()), int(random.below(40)) - 30);
    default: return float(random.normal());
  }
}

// A tensor [tokens, heads, dim] in a buffer that is larger, with strides of some kind. Elements between are poison.
struct Strided {
  std::vector<uint8_t> bytes;
  Tensor view;

  Strided(Random& random, Dtype dtype, int64_t tokens, int64_t heads, int64_t dim, bool output) {
    const int64_t kind = random.below(output ? 4 : 8), gap = random.below(3) * 8;
    int64_t head_step = dim + (kind >= 1 ? gap : 0),
            token_step = heads * head_step + (kind >= 2 ? random.below(20) : 0);
    if (kind == 3) {  // heads outermost
      token_step = dim + gap;
      head_step = tokens * token_step;
    }
    if (kind == 6) token_step = 0;
    const int64_t count =
        std::max<int64_t>(1, std::max(token_step * tokens, head_step * heads) + token_step + head_step);
    bytes.assign(size_t(count * dtype_size(dtype)), 0xFF);  // NaN in every dtype
    view = make_tensor(bytes.data(), dtype, tokens, heads, dim);
    view.stride = {token_step, head_step, kind == 7 ? 0 : 1, 0};
    if (kind == 5 && tokens > 0 && heads > 0) {  // both reversed
      view.data = bytes.data() + ((tokens - 1) * token_step + (heads - 1) * head_step) * dtype_size(dtype);
      view.stride[0] = -token_step;
      view.stride[1] = -head_step;
    }
  }
};

struct Call {
  std::vector<int32_t> cu;
  Jagged seq;
  int64_t tokens = 0, heads, dim;
  std::string text;

  explicit Call(Random& random)
      : heads(random.below(4) + 1),
        dim(pick<int64_t>(random, {1, 8, 31, 32, 40, 64, 72, 96, 128, 128, 160, 192, 224, 256, 264, 320, 576, 1056})) {
    if (random.below(2)) {
      cu.push_back(0);
      for (int64_t b = random.below(5) + 1; b > 0; --b)
        cu.push_back(cu.back() + int32_t(random.below(random.below(8) ? 70 : 300)));
      tokens = cu.back() + random.below(2) * random.below(40);
      seq = {.cu_seqlens = cu.data(), .batch = int32_t(cu.size()) - 1, .max_seqlen = cu.back()};
    } else {
      seq.batch = int32_t(random.below(3)) + 1;
      tokens = seq.batch * random.below(150);
    }
  }
};

struct Output {
  Dtype element;
  MxBlock block;
  ScaleLayout layout;
  explicit Output(Random& random)
      : element(pick(random, {Dtype::e4m3, Dtype::e5m2})),
        block(pick(random, {MxBlock::square32, MxBlock::row32, MxBlock::col32})),
        layout(block != MxBlock::square32 && random.below(2) ? ScaleLayout::atom128x4 : ScaleLayout::linear) {}
};

// An output and the memory of two runs.
struct Outputs {
  Strided payload;
  std::vector<uint8_t> scale;
  MxTensor view;
  Outputs(Random& random, const Call& c, const Output& o) : payload(random, o.element, c.tokens, c.heads, c.dim, true) {
    scale.assign(size_t(scale_size(o.block, o.layout, c.tokens, c.heads, c.dim, c.seq)), 0xA5);
    view =
        make_mx_tensor(payload.view.data, scale.data(), o.element, o.block, o.layout, c.tokens, c.heads, c.dim, c.seq);
    view.data = payload.view;
  }
};

void random_quantize(uint64_t seed) {
  Random random(seed);
  const Call c(random);
  const Dtype dtype = pick(random, {Dtype::bf16, Dtype::bf16, Dtype::f16, Dtype::f32});
  Strided in(random, dtype, c.tokens, c.heads, c.dim, false);
  const int64_t stripes = random.below(9);
  const int64_t inside = c.cu.empty() ? c.tokens : c.cu.back();
  for (int64_t t = 0; t < inside; ++t) {
    for (int64_t h = 0; h < c.heads; ++h) {
      for (int64_t i = 0; i < c.dim; ++i) {
        const int64_t at = row_offset(in.view, t, h) + i * in.view.stride[2];
        store_float(in.view, at, value(random, (t / 32 * 3 + i / 32 + h + stripes) % 9));
      }
    }
  }
  const Output first(random), second(random);
  Outputs out(random, c, first), out_col(random, c, second);
  std::vector<float> mean(size_t(c.seq.batch * c.heads * c.dim), 0.0f);
  Quantize args{.in = in.view,
                .out = out.view,
                .seq = c.seq,
                .rule = pick(random, {MxRule::rceil, MxRule::floor}),
                .smooth = random.below(3) == 0,
                .mean = make_tensor(mean.data(), Dtype::f32, c.seq.batch, c.heads, c.dim),
                .rotate = random.below(3) == 0,
                .rotate_seed = random.bits()};
  if (random.below(2)) args.out_col = out_col.view;
  QuantizeStats stats, want_stats;
  const bool with_stats = random.below(2);
  SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c.tokens << " x " << c.heads << " x " << c.dim << ' '
                                  << dtype_name(dtype) << ", block " << int(first.block) << ", smooth " << args.smooth
                                  << ", rotate " << args.rotate << ", out_col " << bool(args.out_col));
  struct Bytes {
    std::vector<uint8_t> data, scale, col_data, col_scale;
    std::vector<float> mean;
  };
  const auto run = [&](const char* backend, QuantizeStats& s) {
    for (Outputs* o : {&out, &out_col}) {
      std::fill(o->payload.bytes.begin(), o->payload.bytes.end(), uint8_t(0xA5));
      std::fill(o->scale.begin(), o->scale.end(), uint8_t(0xA5));
    }
    std::fill(mean.begin(), mean.end(), 9.0f);
    args.stats = with_stats ? &s : nullptr;
    args.backend = backend;
    require_ok(quantize(args));
    return Bytes{out.payload.bytes, out.scale, out_col.payload.bytes, out_col.scale, mean};
  };
  set_num_threads(int32_t(random.below(4)));
  const Bytes got = run("cpu", stats);
  set_num_threads(0);
  const Bytes want = run("ref", want_stats);
  EXPECT_EQ(got.scale, want.scale);
  EXPECT_EQ(got.data, want.data);
  EXPECT_EQ(got.col_scale, want.col_scale);
  EXPECT_EQ(got.col_data, want.col_data);
  for (size_t i = 0; i < mean.size(); ++i) {
    if (std::isnan(got.mean[i]) && std::isnan(want.mean[i])) continue;
    ASSERT_EQ(std::bit_cast<uint32_t>(got.mean[i]), std::bit_cast<uint32_t>(want.mean[i])) << i;
  }
  EXPECT_EQ(stats.amax, want_stats.amax);
  EXPECT_EQ(stats.saturated, want_stats.saturated);
  EXPECT_EQ(stats.flushed, want_stats.flushed);
  EXPECT_EQ(stats.nonfinite, want_stats.nonfinite);
  EXPECT_EQ(stats.total, want_stats.total);

  // Back to floats of some dtype, from poisoned padding.
  Strided back(random, pick(random, {Dtype::bf16, Dtype::f16, Dtype::f32}), c.tokens, c.heads, c.dim, true);
  std::vector<std::vector<uint8_t>> results;
  for (const char* backend : {"cpu", "ref"}) {
    std::fill(back.bytes.begin(), back.bytes.end(), uint8_t(0xA5));
    require_ok(dequantize({.in = out.view, .out = back.view, .seq = c.seq, .backend = backend}));
    results.push_back(back.bytes);
  }
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t h = 0; h < c.heads; ++h) {
      for (int64_t i = 0; i < c.dim; ++i) {  // NaN has many bits
        const int64_t at = row_offset(back.view, t, h) + i;
        Tensor a = back.view, b = back.view;
        const int64_t base = static_cast<uint8_t*>(back.view.data) - back.bytes.data();
        a.data = results[0].data() + base;
        b.data = results[1].data() + base;
        if (std::isnan(load_float(a, at)) && std::isnan(load_float(b, at))) {
          store_float(a, at, 0);
          store_float(b, at, 0);
        }
      }
    }
  }
  EXPECT_EQ(results[0], results[1]) << "dequantize";
}

TEST_P(QuantizeCpu, RandomCallsEqualRef) {
  for (uint64_t seed = 1; seed <= 150 && !HasFailure(); ++seed) random_quantize(seed);
}

// Outputs beyond kStreamBytes at multiples of 64 bytes are written around the caches.
TEST_P(QuantizeCpu, LargeOutputsEqualRef) {
  const int64_t tokens = 1700, heads = 40, dim = 128, size = tokens * heads * dim;
  std::vector<uint16_t> x(size_t(size), 0);
  Random random(1);
  for (size_t i = 0; i < x.size(); i += 4) {
    const uint64_t bits = random.bits();
    for (size_t k = 0; k < 4; ++k) x[i + k] = uint16_t(uint16_t(bits >> 16 * k) & 0xBFFF);
  }
  x[1234567] = 0x7FC0;
  struct Result {
    kit::AlignedBuffer data, scale, col_data, col_scale, bf16, f32;
  };
  const auto equal = [](const kit::AlignedBuffer& a, const kit::AlignedBuffer& b) {
    return std::memcmp(a.data(), b.data(), a.size()) == 0;
  };
  for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
    const auto run = [&](const char* backend) {
      const auto n = size_t(size);
      Result r{kit::AlignedBuffer(n),      kit::AlignedBuffer(n / 32 + 65536), kit::AlignedBuffer(n),
               kit::AlignedBuffer(n / 16), kit::AlignedBuffer(2 * n),          kit::AlignedBuffer(4 * n)};
      const auto view = [&](const kit::AlignedBuffer& data, const kit::AlignedBuffer& scale, MxBlock block) {
        return make_mx_tensor(data.data(), scale.data(), element, block, ScaleLayout::linear, tokens, heads, dim, {});
      };
      const MxTensor row = view(r.data, r.scale, MxBlock::row32), col = view(r.col_data, r.col_scale, MxBlock::col32);
      require_ok(quantize({.in = make_tensor(x.data(), Dtype::bf16, tokens, heads, dim),
                           .out = row,
                           .out_col = col,
                           .backend = backend}));
      require_ok(dequantize(
          {.in = row, .out = make_tensor(r.bf16.data(), Dtype::bf16, tokens, heads, dim), .backend = backend}));
      require_ok(dequantize(
          {.in = col, .out = make_tensor(r.f32.data(), Dtype::f32, tokens, heads, dim), .backend = backend}));
      return r;
    };
    const Result got = run("cpu"), want = run("ref");
    EXPECT_TRUE(equal(got.data, want.data));
    EXPECT_TRUE(equal(got.scale, want.scale));
    EXPECT_TRUE(equal(got.col_data, want.col_data));
    EXPECT_TRUE(equal(got.col_scale, want.col_scale));
    // A NaN has many bits.
    const auto same = [](float x, float y) { return std::isnan(x) ? std::isnan(y) : x == y; };
    const auto *a = static_cast<const uint16_t*>(got.bf16.data()), *b = static_cast<const uint16_t*>(want.bf16.data());
    const auto *c = static_cast<const float*>(got.f32.data()), *d = static_cast<const float*>(want.f32.data());
    int64_t wrong = 0;
    for (int64_t i = 0; i < size; ++i) wrong += !same(decode_bf16(a[i]), decode_bf16(b[i])) || !same(c[i], d[i]);
    EXPECT_EQ(wrong, 0);
  }
}

}  // namespace
}  // namespace mxflash
