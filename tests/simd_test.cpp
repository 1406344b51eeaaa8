// Every function of simd/vector.h, in every instruction set that this machine has, against scalar code.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "mx/e8m0.h"
#include "mx/float16.h"
#include "mx/fp8.h"
#include "simd_test_kernel.h"

namespace mxflash {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kCount = 4096;  // elements of random operands; a multiple of every ISA's lanes

// kit/random.h needs the kit, which a cross build of this test alone does not have.
struct Random {
  uint64_t state = 0x9E3779B97F4A7C15;
  uint32_t bits() {
    state = state * 6364136223846793005 + 1442695040888963407;
    return uint32_t(state >> 32);
  }
};

// Operands that rounding, NaN and sign rules turn on, each against each, then random bit patterns.
constexpr float kEdges[] = {0.0f,     -0.0f,     1.0f,      -1.0f, 0.5f,   1.5f, 2.5f,  -2.5f,        0x1p23f,
                            0x1p-24f, 0x1p-126f, 0x1p-149f, 3e38f, -3e38f, kInf, -kInf, 0x1.921fb6p1f};

float quiet_nan(uint32_t sign_and_payload = 0) { return std::bit_cast<float>(0x7FC00000u | sign_and_payload); }

std::vector<float> edges() {
  std::vector<float> values(std::begin(kEdges), std::end(kEdges));
  for (const uint32_t nan : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFFFFFFFFu}) {
    values.push_back(std::bit_cast<float>(nan));
  }
  return values;
}

struct FloatOperands {
  std::vector<float> a, b, c;
};
FloatOperands float_operands() {
  FloatOperands x;
  const std::vector<float> e = edges();
  for (const float a : e) {
    for (const float b : e) {
      x.a.push_back(a);
      x.b.push_back(b);
      x.c.push_back(e[x.a.size() % e.size()]);
    }
  }
  Random random;
  while (x.a.size() < kCount / 2) {  // of one magnitude
    for (std::vector<float>* v : {&x.a, &x.b, &x.c}) v->push_back(float(int32_t(random.bits())) * 0x1p-28f);
  }
  while (x.a.size() < kCount) {
    for (std::vector<float>* v : {&x.a, &x.b, &x.c}) v->push_back(std::bit_cast<float>(random.bits()));
  }
  return x;
}

struct IntOperands {
  std::vector<int32_t> a, b, c;
};
IntOperands int_operands() {
  IntOperands x;
  constexpr int32_t kIntEdges[] = {0, 1, -1, 2, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, int32_t(0x80000000)};
  for (const int32_t a : kIntEdges) {
    for (const int32_t b : kIntEdges) {
      x.a.push_back(a);
      x.b.push_back(b);
      x.c.push_back(~a);
    }
  }
  Random random;
  while (x.a.size() < kCount) {
    const int32_t a = int32_t(random.bits());
    x.a.push_back(a);
    x.b.push_back(x.a.size() % 3 == 0 ? a : int32_t(random.bits()));
    x.c.push_back(int32_t(random.bits()));
  }
  return x;
}

// Same bits, or both NaN.
bool same(float x, float y) {
  return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y) || (std::isnan(x) && std::isnan(y));
}
bool same(int32_t x, int32_t y) { return x == y; }

class Simd : public testing::TestWithParam<CpuIsa> {
 protected:
  const SimdTestKernels& simd() const { return *kSimdTestByIsa.by_isa[int(GetParam())]; }
  int64_t lanes() const { return simd().lanes; }

  // want(i) for each element i of function(a, b, c).
  template <class Function, class Operands, class Want>
  void expect_each(const char* name, Function function, const Operands& x, Want want) const {
    auto got = x.a;
    function(x.a.data(), x.b.data(), x.c.data(), got.data(), int64_t(got.size()));
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(same(got[i], want(i))) << name << " of " << x.a[i] << ", " << x.b[i] << ", " << x.c[i] << ": "
                                         << got[i] << ", not " << want(i);
    }
  }
  // Every code, from an address that no vector is aligned to.
  template <class Code, class Want>
  void expect_load(const char* name, LoadFunction<Code> load, Want want) const {
    constexpr int kCodes = 1 << (8 * sizeof(Code));
    std::vector<Code> codes(kCodes + 1);
    for (int i = 0; i < kCodes; ++i) codes[size_t(i + 1)] = Code(i);
    std::vector<float> got(kCodes);
    load(codes.data() + 1, got.data(), kCodes);
    for (int i = 0; i < kCodes; ++i) {
      ASSERT_TRUE(same(got[size_t(i)], want(Code(i)))) << name << " of code " << i << ": " << got[size_t(i)];
    }
  }
};

TEST_P(Simd, Arithmetic) {
  const FloatOperands x = float_operands();
  const auto &a = x.a, &b = x.b, &c = x.c;
  expect_each("add", simd().add, x, [&](size_t i) { return a[i] + b[i]; });
  expect_each("sub", simd().sub, x, [&](size_t i) { return a[i] - b[i]; });
  expect_each("mul", simd().mul, x, [&](size_t i) { return a[i] * b[i]; });
  expect_each("div", simd().div, x, [&](size_t i) { return a[i] / b[i]; });
  expect_each("sqrt", simd().sqrt, x, [&](size_t i) { return std::sqrt(a[i]); });
  expect_each("abs", simd().abs, x, [&](size_t i) { return std::fabs(a[i]); });
  const bool fused = GetParam() != CpuIsa::portable;
  expect_each("fma", simd().fma, x, [&](size_t i) { return fused ? std::fma(a[i], b[i], c[i]) : a[i] * b[i] + c[i]; });
}

TEST_P(Simd, MaximumAndMinimumGiveTheSecondIfEitherIsNan) {
  const FloatOperands x = float_operands();
  const auto &a = x.a, &b = x.b;
  expect_each("max", simd().max, x, [&](size_t i) { return a[i] > b[i] ? a[i] : b[i]; });
  expect_each("min", simd().min, x, [&](size_t i) { return a[i] < b[i] ? a[i] : b[i]; });
  expect_each("less", simd().less, x, [&](size_t i) { return a[i] < b[i] ? 1.0f : 0.0f; });
}

TEST_P(Simd, Integers) {
  const IntOperands x = int_operands();
  const auto &a = x.a, &b = x.b, &c = x.c;
  const auto u = [](int32_t v) { return uint32_t(v); };
  expect_each("add", simd().int_add, x, [&](size_t i) { return int32_t(u(a[i]) + u(b[i])); });
  expect_each("sub", simd().int_sub, x, [&](size_t i) { return int32_t(u(a[i]) - u(b[i])); });
  expect_each("bit_and", simd().bit_and, x, [&](size_t i) { return a[i] & b[i]; });
  expect_each("bit_or", simd().bit_or, x, [&](size_t i) { return a[i] | b[i]; });
  expect_each("max", simd().int_max, x, [&](size_t i) { return std::max(a[i], b[i]); });
  expect_each("shift_left<1>", simd().shift_left_1, x, [&](size_t i) { return int32_t(u(a[i]) << 1); });
  expect_each("shift_left<31>", simd().shift_left_31, x, [&](size_t i) { return int32_t(u(a[i]) << 31); });
  expect_each("shift_right<1>", simd().shift_right_1, x, [&](size_t i) { return int32_t(u(a[i]) >> 1); });
  expect_each("shift_right<31>", simd().shift_right_31, x, [&](size_t i) { return int32_t(u(a[i]) >> 31); });
  expect_each("less", simd().int_less, x, [&](size_t i) { return int32_t(a[i] < b[i]); });
  expect_each("equal", simd().int_equal, x, [&](size_t i) { return int32_t(a[i] == b[i]); });
  expect_each("mask_and", simd().positive_and_equal, x,
              [&](size_t i) { return a[i] > 0 && a[i] == b[i] ? b[i] : c[i]; });
  const size_t first = ~size_t(lanes() - 1);  // i & first: the first element of i's vector
  expect_each("broadcast", simd().broadcast, x, [&](size_t i) { return a[i & first]; });
  expect_each("iota", simd().iota, x, [&](size_t i) { return int32_t(i & ~first); });
}

TEST_P(Simd, AnySeesEveryLane) {
  for (int64_t lane = -1; lane < lanes(); ++lane) {
    const size_t n = size_t(lanes());
    std::vector<int32_t> a(n, 5), b(n, 6), got(n);
    if (lane >= 0) b[size_t(lane)] = 5;
    simd().any_equal(a.data(), b.data(), b.data(), got.data(), lanes());
    EXPECT_EQ(got[0], int32_t(lane >= 0)) << "lane " << lane;
  }
}

TEST_P(Simd, SelectAndBroadcastFloats) {
  const FloatOperands x = float_operands();
  const IntOperands mask = int_operands();
  // From and to addresses that no vector is aligned to.
  const int64_t n = kCount - lanes();
  std::vector<float> got(kCount);
  simd().float_select(mask.a.data() + 1, x.a.data() + 1, x.b.data() + 1, got.data() + 1, n);
  for (int64_t i = 1; i <= n; ++i) ASSERT_TRUE(same(got[i], mask.a[i] < 0 ? x.a[i] : x.b[i])) << i;
  simd().float_broadcast(x.a.data() + 1, got.data() + 1, n);
  for (int64_t i = 0; i < n; ++i) ASSERT_TRUE(same(got[i + 1], x.a[i - i % lanes() + 1])) << i;
}

TEST_P(Simd, Reductions) {
  const size_t n = size_t(lanes());
  std::vector<float> a(n), got(n);
  std::vector<int32_t> ints(n), int_got(n);
  for (size_t peak = 0; peak < n; ++peak) {
    for (size_t l = 0; l < n; ++l) {
      a[l] = l == peak ? -0.5f : -float(1 << l);  // each lane counts, and sums are exact
      ints[l] = l == peak ? -1 : -int32_t(1000 + l);
    }
    simd().reduce_max(a.data(), a.data(), a.data(), got.data(), int64_t(n));
    EXPECT_EQ(got[0], -0.5f) << "lane " << peak;
    simd().reduce_add(a.data(), a.data(), a.data(), got.data(), int64_t(n));
    EXPECT_EQ(got[0], -0.5f - float((1 << n) - 1) + float(1 << peak)) << "lane " << peak;
    simd().int_reduce_max(ints.data(), ints.data(), ints.data(), int_got.data(), int64_t(n));
    EXPECT_EQ(int_got[0], -1) << "lane " << peak;
  }
}

TEST_P(Simd, IntegerConversions) {
  std::vector<int32_t> ints = int_operands().a, int_got(kCount);
  std::vector<float> floats(kCount), got(kCount);
  simd().to_float(ints.data(), got.data(), kCount);
  for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(got[i], float(ints[i])) << ints[i];
  simd().as_float(ints.data(), got.data(), kCount);
  simd().as_int(got.data(), int_got.data(), kCount);
  EXPECT_EQ(int_got, ints);
  for (size_t i = 0; i < kCount; ++i) ASSERT_TRUE(same(got[i], std::bit_cast<float>(ints[i]))) << ints[i];

  for (size_t i = 0; i < kCount; ++i) floats[i] = float(int(i) - int(kCount) / 2) * 0.25f;  // ties among them
  Random random;
  for (size_t i = 0; i < kCount / 4; ++i) floats[i * 3] = float(int32_t(random.bits())) * 0.5f;
  floats[0] = 0x1.fffffep30f;
  floats[1] = -0x1.fffffep30f;
  floats[2] = 0x1.fffffep-2f;  // the largest below a half: adding a half would round it up
  simd().round_to_int(floats.data(), int_got.data(), kCount);
  for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(int_got[i], int32_t(std::nearbyint(floats[i]))) << floats[i];
}

TEST_P(Simd, LoadsEveryCode) {
  expect_load<uint8_t>("load_e4m3", simd().load_e4m3, [](uint8_t c) { return decode_fp8(c, kE4m3); });
  expect_load<uint8_t>("load_e5m2", simd().load_e5m2, [](uint8_t c) { return decode_fp8(c, kE5m2); });
  expect_load<uint8_t>("load_e8m0", simd().load_e8m0, [](uint8_t c) { return decode_e8m0(c); });
  expect_load<uint16_t>("load_bf16", simd().load_bf16, [](uint16_t c) { return decode_bf16(c); });
  expect_load<uint16_t>("load_f16", simd().load_f16, [](uint16_t c) { return decode_f16(c); });
}

TEST_P(Simd, StoresRoundToNearestEven) {
  std::vector<float> values = edges();
  // Around each number of the format: itself, the tie above it, and the neighbours of the tie.
  for (uint32_t code = 0; code < 0x10000; code += 7) {
    const uint32_t bf16 = code << 16, f16 = std::bit_cast<uint32_t>(decode_f16(uint16_t(code)));
    for (const uint32_t bits : {bf16, bf16 + 0x7FFF, bf16 + 0x8000, bf16 + 0x8001, f16, f16 + 0xFFF, f16 + 0x1000,
                                f16 + 0x1001, f16 - 1, f16 + 1}) {
      values.push_back(std::bit_cast<float>(bits));
    }
  }
  for (uint32_t half_units = 0; half_units < 4096; ++half_units) {  // subnormal halves and their ties
    values.push_back(float(half_units) * 0x1p-25f);
    values.push_back(std::nextafter(float(half_units) * -0x1p-25f, 0.0f));
  }
  for (const float f : {65504.0f, 65519.99f, 65520.0f, 65536.0f, 0x1.fep127f, 0x1.fffffep127f}) {
    values.push_back(f);
    values.push_back(-f);
  }
  Random random;
  while (values.size() % 64 != 0 || values.size() < 200000) values.push_back(std::bit_cast<float>(random.bits()));

  std::vector<uint16_t> got(values.size() + 1);
  simd().store_bf16(values.data(), got.data() + 1, int64_t(values.size()));
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_TRUE(same(decode_bf16(got[i + 1]), decode_bf16(encode_bf16(values[i])))) << "store_bf16 of " << values[i];
  }
  simd().store_f16(values.data(), got.data() + 1, int64_t(values.size()));
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_TRUE(same(decode_f16(got[i + 1]), decode_f16(encode_f16(values[i])))) << "store_f16 of " << values[i];
  }
}

TEST_P(Simd, Exp2) {
  std::vector<float> x = {-kInf, kInf, quiet_nan(), -quiet_nan(), quiet_nan(0x3FFFFF), 0.0f, -0.0f, 0x1p-149f};
  for (const float edge : {-150.0f, -126.5f, -126.0f, -125.5f, 127.5f, 128.0f, 128.5f}) {
    for (const float v : {std::nextafter(edge, -kInf), edge, std::nextafter(edge, kInf)}) x.push_back(v);
  }
  for (const float huge : {1e3f, 3e3f, 1e5f, 8e6f, 1e9f, 3e9f, 1e20f, 3e38f}) {
    x.push_back(huge);
    x.push_back(-huge);
  }
  for (double v = -160; v < 130; v += 0.0007) x.push_back(float(v));
  while (x.size() % 64 != 0) x.push_back(0.5f);

  std::vector<float> got(x.size());
  simd().exp2(x.data(), x.data(), x.data(), got.data(), int64_t(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = std::exp2(double(x[i]));
    if (std::isnan(x[i])) {
      ASSERT_TRUE(std::isnan(got[i])) << got[i];
    } else if (x[i] >= 128) {
      ASSERT_EQ(got[i], kInf) << x[i];
    } else if (want < 0x1p-126) {  // may be 0
      ASSERT_NEAR(got[i], want, 0x1p-126) << x[i];
      ASSERT_FALSE(std::signbit(got[i])) << x[i];
      ASSERT_TRUE(x[i] > -200 || got[i] == 0) << x[i];
    } else {
      ASSERT_NEAR(got[i], want, 3e-7 * want) << x[i];
    }
  }
}

TEST_P(Simd, StoresEveryInt16) {
  std::vector<int32_t> x(0x10000, 0);
  for (int32_t i = 1; i < 0x10000; ++i) x[size_t(i)] = i - 0x8000;
  std::vector<int16_t> got(x.size() + 1);
  simd().store_int16(x.data(), got.data() + 1, int64_t(x.size()));
  for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(got[i + 1], x[i]);
}

TEST_P(Simd, Int16DotProduct) {
  IntOperands x;
  const auto pair = [](int32_t low, int32_t high) { return int32_t(uint32_t(low & 0xFFFF) | uint32_t(high) << 16); };
  constexpr int32_t kIntEdges[] = {32767, -32767, 1, -1, 0, 8192, -8192};
  for (const int32_t low : kIntEdges) {
    for (const int32_t high : kIntEdges) {
      for (const int32_t other : kIntEdges) {
        x.a.push_back(int32_t(x.a.size()) % 1000 - 500);
        x.b.push_back(pair(low, high));
        x.c.push_back(pair(other, 3 * (low - high) % 32767));
      }
    }
  }
  // The largest sums of both signs, and what is left of int32 beside them.
  for (const int32_t s : {32767, -32767}) {
    x.a.push_back(s > 0 ? 131069 : -131070);
    x.b.push_back(pair(32767, 32767));
    x.c.push_back(pair(s, s));
  }
  Random random;
  while (x.a.size() < kCount) {
    const auto int16 = [&] { return int32_t(random.bits() % 65535) - 32767; };
    x.a.push_back(int16());
    x.b.push_back(pair(int16(), int16()));
    x.c.push_back(pair(int16(), int16()));
  }
  expect_each("dot16", simd().dot16, x, [&](size_t i) {
    const auto low = [](int32_t v) { return int64_t(int16_t(v)); };
    return int32_t(x.a[i] + low(x.b[i]) * low(x.c[i]) + low(x.b[i] >> 16) * low(x.c[i] >> 16));
  });

  IntOperands halves;
  for (size_t i = 0; i < kCount; ++i) {
    halves.a.push_back(int32_t(int16_t(x.b[i])));
    halves.b.push_back(x.b[i] >> 16);
  }
  halves.c = halves.a;
  expect_each("pack_int16", simd().pack_int16, halves, [&](size_t i) { return pair(halves.a[i], halves.b[i]); });
}

TEST_P(Simd, TransposeTouchesItsBlockOnly) {
  const int64_t n = lanes(), src_stride = n + 3, dst_stride = n + 5;
  std::vector<float> src(size_t(n * src_stride)), dst(size_t(n * dst_stride), -1.0f);
  for (size_t i = 0; i < src.size(); ++i) src[i] = float(i);
  simd().transpose(src.data() + 1, src_stride, dst.data() + 1, dst_stride);
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < dst_stride; ++c) {
      const bool inside = c > 0 && c <= n;
      EXPECT_EQ(dst[size_t(r * dst_stride + c)], inside ? src[size_t((c - 1) * src_stride + 1 + r)] : -1.0f) << r << c;
    }
  }
}

std::vector<CpuIsa> isas_here() {
  std::vector<CpuIsa> isas;
  for (int32_t i = 0; i < kNumCpuIsas; ++i) {
    if (has_cpu_isa(CpuIsa(i)) && kSimdTestByIsa.by_isa[i]) isas.push_back(CpuIsa(i));
  }
  return isas;
}
INSTANTIATE_TEST_SUITE_P(Isa, Simd, testing::ValuesIn(isas_here()),
                         [](const auto& info) { return std::string(cpu_isa_name(info.param)); });

}  // namespace
}  // namespace mxflash
