// rmsnorm_quantize and gemm_quantize of backend `cpu` against ref on every instruction set that this CPU has: random
// calls over shapes, dtypes, strides, sequences and kinds of value. Bits are equal, but for the sums of an fp32 GEMM.
// And rmsnorm_bwd against fp64.
#include <gtest/gtest.h>
#include <mxflash/backend.h>
#include <mxflash/gemm.h>
#include <mxflash/rmsnorm.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu_isas.h"
#include "kit/random.h"
#include "kit/runner.h"
#include "mx/block.h"
#include "rmsnorm_bwd_call.h"
#include "runtime/tensor_access.h"

namespace mxflash {
namespace {

using kit::Random;
using kit::require_ok;

class FusedCpu : public EveryIsa {};
INSTANTIATE_TEST_SUITE_P(Isas, FusedCpu, testing::ValuesIn(available_isas()), isa_of_test);

template <class T>
T pick(Random& random, std::initializer_list<T> of) {
  return of.begin()[random.below(int64_t(of.size()))];
}

// [rows, cols] with a gap after each row. Poison everywhere else.
struct Matrix {
  std::vector<uint8_t> bytes;
  Tensor view;
  Matrix(Random& random, Dtype dtype, int64_t rows, int64_t cols) {
    const int64_t stride = cols + 8 * random.below(3);
    bytes.assign(size_t(std::max<int64_t>(1, rows * stride) * dtype_size(dtype)), 0xFF);
    view = make_tensor(bytes.data(), dtype, rows, cols);
    view.stride[0] = stride;
  }
  // Rows that belong to no sequence stay poison. `wild`: rows of any size, with NaN and Inf here and there.
  void fill(Random& random, int64_t rows, bool wild) {
    for (int64_t r = 0; r < rows; ++r) {
      const int exponent = wild ? int(random.below(160)) - 120 : 0;
      for (int64_t c = 0; c < view.shape[1]; ++c) {
        float x = std::ldexp(float(random.normal()), exponent);
        if (wild && random.below(20000) == 0) x = pick(random, {INFINITY, -INFINITY, NAN});
        store_float(view, r * view.stride[0] + c, x);
      }
    }
  }
  float at(const std::vector<uint8_t>& from, int64_t r, int64_t c) const {
    Tensor t = view;
    t.data = const_cast<uint8_t*>(from.data());
    return load_float(t, r * t.stride[0] + c);
  }
};

struct Rows {
  std::vector<int32_t> cu;
  Jagged seq;
  int64_t count = 0, inside = 0;
  explicit Rows(Random& random) {
    if (random.below(2)) {
      cu.push_back(0);
      for (int64_t b = random.below(5) + 1; b > 0; --b) cu.push_back(cu.back() + int32_t(random.below(90)));
      inside = cu.back();
      count = inside + random.below(2) * random.below(40);
      seq = {.cu_seqlens = cu.data(), .batch = int32_t(cu.size()) - 1, .max_seqlen = cu.back()};
    } else {
      seq.batch = int32_t(random.below(3)) + 1;
      count = inside = seq.batch * random.below(230);
    }
  }
};

struct Output {
  Dtype element;
  MxBlock block;
  ScaleLayout layout;
  MxRule rule;
  explicit Output(Random& random)
      : element(pick(random, {Dtype::e4m3, Dtype::e5m2})),
        block(pick(random, {MxBlock::square32, MxBlock::row32, MxBlock::col32})),
        layout(block != MxBlock::square32 && random.below(2) ? ScaleLayout::atom128x4 : ScaleLayout::linear),
        rule(pick(random, {MxRule::rceil, MxRule::floor})) {}
  kit::OwnedMx make(int64_t rows, int64_t heads, int64_t dim, const Jagged& seq) const {
    kit::OwnedMx out = kit::make_owned_mx(element, block, layout, rows, heads, dim, seq);
    std::fill(out.data.begin(), out.data.end(), uint8_t(0xA5));
    std::fill(out.scale.begin(), out.scale.end(), uint8_t(0xA5));
    return out;
  }
};

Dtype any_float(Random& random) { return pick(random, {Dtype::bf16, Dtype::bf16, Dtype::f16, Dtype::f32}); }

// Equal bits, or NaN on both sides.
void expect_same(const Matrix& m, const std::vector<uint8_t>& got, const std::vector<uint8_t>& want, const char* name) {
  for (int64_t r = 0; r < m.view.shape[0]; ++r) {
    for (int64_t c = 0; c < m.view.shape[1]; ++c) {
      const float x = m.at(got, r, c), y = m.at(want, r, c);
      if (std::isnan(x) && std::isnan(y)) continue;
      ASSERT_EQ(std::bit_cast<uint32_t>(x), std::bit_cast<uint32_t>(y)) << name << " [" << r << ", " << c << "]";
    }
  }
}

void random_rmsnorm(uint64_t seed) {
  Random random(seed);
  const Rows rows(random);
  const int64_t dim = pick<int64_t>(random, {1, 8, 31, 33, 64, 100, 128, 250, 256, 512, 1000, 1024, 1056, 2048, 3000});
  const bool wild = random.below(2), with_residual = random.below(2), with_y = random.below(2);
  Matrix in(random, any_float(random), rows.count, dim), residual(random, any_float(random), rows.count, dim);
  Matrix weight(random, any_float(random), 1, dim), y(random, Dtype::bf16, rows.count, dim);
  in.fill(random, rows.inside, wild);
  residual.fill(random, rows.inside, wild);
  weight.fill(random, 1, random.below(8) == 0);
  weight.view = make_tensor(weight.bytes.data(), weight.view.dtype, dim);
  std::vector<float> rstd(size_t(rows.count), 0.0f);
  const Output output(random);
  SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << rows.count << " x " << dim << ' '
                                  << dtype_name(in.view.dtype) << ", residual " << with_residual << ", block "
                                  << int(output.block));
  const std::vector<uint8_t> residual_before = residual.bytes;
  struct Result {
    kit::OwnedMx out;
    std::vector<uint8_t> residual, y;
    std::vector<float> rstd;
  };
  const auto run = [&](const char* backend) {
    kit::OwnedMx out = output.make(rows.count, 1, dim, rows.seq);
    MxTensor view = out.view;
    view.data = make_tensor(out.data.data(), output.element, rows.count, dim);
    residual.bytes = residual_before;
    std::fill(y.bytes.begin(), y.bytes.end(), uint8_t(0xFF));
    RmsnormQuantize args{.in = in.view,
                         .weight = weight.view,
                         .eps = 1e-5f,
                         .out = view,
                         .rstd = make_tensor(rstd.data(), Dtype::f32, rows.count),
                         .seq = rows.seq,
                         .rule = output.rule,
                         .backend = backend};
    if (with_residual) args.residual = residual.view;
    if (with_y) args.y = y.view;
    require_ok(rmsnorm_quantize(args));
    return Result{std::move(out), residual.bytes, y.bytes, rstd};
  };
  set_num_threads(int32_t(random.below(4)));
  const Result got = run("cpu");
  set_num_threads(0);
  const Result want = run("ref");
  for (size_t r = 0; r < rstd.size(); ++r) {
    if (std::isnan(got.rstd[r]) && std::isnan(want.rstd[r])) continue;
    ASSERT_EQ(std::bit_cast<uint32_t>(got.rstd[r]), std::bit_cast<uint32_t>(want.rstd[r])) << "rstd of row " << r;
  }
  expect_same(residual, got.residual, want.residual, "residual");
  expect_same(y, got.y, want.y, "y");
  EXPECT_EQ(got.out.scale, want.out.scale);
  EXPECT_EQ(got.out.data, want.out.data);
}

TEST_P(FusedCpu, RandomRmsnormsEqualRef) {
  for (uint64_t seed = 1; seed <= 100 && !HasFailure(); ++seed) random_rmsnorm(seed);
}

// Beyond kStreamBytes, and with rows of which few fit a cache.
TEST_P(FusedCpu, LargeRmsnormEqualsRef) {
  const int64_t rows = 700, dim = 16384;
  std::vector<uint16_t> in(size_t(rows * dim), 0);
  Random random(5);
  for (uint16_t& x : in) x = uint16_t(0x3E00 | (random.bits() & 0x81FF));
  std::vector<uint16_t> weight(size_t(dim), 0x3F81);
  const auto run = [&](const char* backend) {
    kit::OwnedMx out = kit::make_owned_mx(Dtype::e4m3, MxBlock::square32, {}, rows, 1, dim, {});
    const kit::AlignedBuffer payload(out.data.size());
    MxTensor view = out.view;
    view.data = make_tensor(payload.data(), Dtype::e4m3, rows, dim);
    require_ok(rmsnorm_quantize({.in = make_tensor(in.data(), Dtype::bf16, rows, dim),
                                 .weight = make_tensor(weight.data(), Dtype::bf16, dim),
                                 .out = view,
                                 .backend = backend}));
    std::memcpy(out.data.data(), payload.data(), out.data.size());
    return out;
  };
  const kit::OwnedMx got = run("cpu"), want = run("ref");
  EXPECT_TRUE(got.data == want.data);
  EXPECT_TRUE(got.scale == want.scale);
}

TEST_P(FusedCpu, RandomGradientsAreWithinTheBound) {
  for (uint64_t seed = 1; seed <= 150 && !HasFailure(); ++seed) check_gradient(random_gradient_case(seed), "cpu");
}

TEST_P(FusedCpu, LongGradientsAreWithinTheBound) {
  check_gradient({.rows = 20000, .dim = 40, .dy = Dtype::e4m3, .dx = Dtype::f32}, "cpu");
  check_gradient({.rows = 300, .dim = 16384, .dx = Dtype::f32, .dh = Dtype::f32}, "cpu");
}

void random_gemm(uint64_t seed) {
  Random random(seed);
  const Rows rows(random);
  const bool wild = random.below(4) == 0;
  const int64_t heads = random.below(3) + 1, dim = pick<int64_t>(random, {1, 8, 33, 40, 64, 72, 96, 128, 200, 256});
  const int64_t depth = pick<int64_t>(random, {0, 1, 31, 64, 65, 128, 200, 300}), n = heads * dim;
  Matrix a(random, any_float(random), rows.count, depth), b(random, any_float(random), n, depth);
  a.fill(random, rows.inside, wild);
  b.fill(random, n, wild);
  Matrix c(random, any_float(random), rows.count, n);
  const Output output(random);
  SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << rows.count << " x " << heads << " x " << dim << ", k "
                                  << depth << ' ' << dtype_name(a.view.dtype) << ' ' << dtype_name(b.view.dtype)
                                  << ", block " << int(output.block));
  struct Result {
    kit::OwnedMx out;
    std::vector<uint8_t> c;
  };
  const auto run = [&](const char* backend, int32_t threads) {
    Result r{output.make(rows.count, heads, dim, rows.seq), {}};
    std::fill(c.bytes.begin(), c.bytes.end(), uint8_t(0xFF));
    Tensor view = make_tensor(c.bytes.data(), c.view.dtype, rows.count, heads, dim);
    view.stride = {c.view.stride[0], dim, 1, 0};
    set_num_threads(threads);
    require_ok(gemm_quantize({.a = a.view,
                              .b = b.view,
                              .out = r.out.view,
                              .c = view,
                              .seq = rows.seq,
                              .rule = output.rule,
                              .backend = backend}));
    set_num_threads(0);
    r.c = c.bytes;
    return r;
  };
  const Result got = run("cpu", 1), again = run("cpu", 3), want = run("ref", 0);
  EXPECT_EQ(got.out.data, again.out.data) << "another number of threads";
  EXPECT_EQ(got.out.scale, again.out.scale) << "another number of threads";
  if (wild || a.view.dtype == Dtype::f32 || b.view.dtype == Dtype::f32) {
    // Each of the `depth` roundings of either sum is at most 2^-24 of the sum of magnitudes; and c's own rounding.
    const double unit = c.view.dtype == Dtype::f32 ? 0x1p-24 : c.view.dtype == Dtype::f16 ? 0x1p-11 : 0x1p-8;
    for (int64_t r = 0; r < rows.inside; r += 3) {
      for (int64_t j = r % 2; j < n; j += 2) {
        double magnitude = 0;
        for (int64_t k = 0; k < depth; ++k) {
          magnitude += std::abs(double(a.at(a.bytes, r, k)) * double(b.at(b.bytes, j, k)));
        }
        const double x = double(c.at(got.c, r, j)), y = double(c.at(want.c, r, j));
        if (!std::isfinite(magnitude) || magnitude > 1e37 || (c.view.dtype == Dtype::f16 && magnitude > 6e4)) continue;
        ASSERT_NEAR(x, y, 4 * double(depth + 1) * 0x1p-24 * magnitude + 2 * unit * std::abs(y) + 0x1p-24)
            << "c[" << r << ", " << j << "]";
      }
    }
    return;
  }
  // Products of 16-bit floats are exact in fp32 unless they are tiny, and both add them up in the same order.
  expect_same(c, got.c, want.c, "c");
  EXPECT_EQ(got.out.scale, want.out.scale);
  EXPECT_EQ(got.out.data, want.out.data);
}

TEST_P(FusedCpu, RandomGemmsEqualRef) {
  for (uint64_t seed = 1; seed <= 100 && !HasFailure(); ++seed) random_gemm(seed);
}

}  // namespace
}  // namespace mxflash
