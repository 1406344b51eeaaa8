// The tile of tests/tcgen05_tile.cuh on the simulator, beside float64; boxes that tensor maps copy.
#include <gtest/gtest.h>

#include <map>

#include "simulator/simulator.h"
#include "tcgen05_tile_case.h"
#include "tensor_copy_box.cuh"
#include "tensor_copy_case.h"

namespace mxflash {
namespace {

using simulator::Mode;

constexpr Mode kModes[] = {Mode::eager, Mode::deferred, Mode::reordered};

template <class C>
std::string run_tile(TileCase<C>& t, Mode mode, uint64_t seed, int fault = 0) {
  return simulator::run(
      {.threads = C::kThreads, .shared_bytes = C::kBytes + 1024, .mode = mode, .seed = seed, .fault = fault},
      [&] { tile::tile_kernel<C>(t.params()); });
}

template <class C>
class Tile : public testing::Test {};
TYPED_TEST_SUITE(Tile, TileConfigs);

TYPED_TEST(Tile, EqualsFloat64InEveryMode) {
  for (const Mode mode : kModes) {
    for (uint64_t seed = 1; seed <= simulator::seeds(6); ++seed) {
      TileCase<TypeParam> t(seed);
      ASSERT_EQ(run_tile(t, mode, seed), "");
      EXPECT_LE(t.worst(), 1.0) << "mode " << int(mode) << ", seed " << seed;
    }
  }
}

// A planted fault is noticed: by a rule, whose words begin like this, or by the numbers.
struct Fault {
  int number;
  const char* what;
  const char* rule;  // null: the numbers
  bool eager;        // noticed already when all is done at once
};
constexpr Fault kFaults[] = {
    {1, "no fence_proxy_async", "stored there without fence_proxy_async", true},
    {2, "no tcgen05_wait_st", nullptr, false},
    {3, "no tcgen05_fence_after_thread_sync", "without tcgen05_fence_after_thread_sync", true},
    {4, "a wrong stride", nullptr, true},
    {5, "the same scales for every K-step", nullptr, true},
    {6, "B overwritten too early", nullptr, false},
    {7, "no wait for the commit", nullptr, false},
    {8, "no tcgen05_wait_ld", nullptr, false},
};

TEST(TileFaults, AreNoticed) {
  using C = tile::Config<128, 128, tile::From::tensor, true>;
  for (const Fault& f : kFaults) {
    for (const Mode mode : kModes) {
      if (mode == Mode::eager && !f.eager) continue;
      // A fault of order shows under some schedules.
      int noticed = 0;
      for (uint64_t seed = 1; seed <= 12 && !noticed; ++seed) {
        TileCase<C> t(seed);
        const std::string error = run_tile(t, mode, seed, f.number);
        if (f.rule) {
          noticed += error.find(f.rule) != std::string::npos;
        } else {
          noticed += !error.empty() || !(t.worst() <= 1.0);
        }
      }
      EXPECT_TRUE(noticed) << f.what << ", mode " << int(mode);
    }
  }
}

TEST(TensorCopy, MovesABoxAsTheSwizzleSays) {
  for (const BoxCase& c : kBoxCases) {
    for (const Mode mode : kModes) {
      std::vector<uint8_t> from = box_tensor(c), to(from.size(), 0xAA), image(size_t(c.rows * c.columns));
      box::Params p{.from = {},
                    .to = {},
                    .x = c.x,
                    .y = c.y,
                    .z = c.z,
                    .bytes = uint32_t(image.size()),
                    .image = reinterpret_cast<uint32_t*>(image.data())};
      ASSERT_TRUE(make_tensor_map(c.name, box_tile(c, from.data()), p.from).ok());
      ASSERT_TRUE(make_tensor_map(c.name, box_tile(c, to.data()), p.to).ok());
      ASSERT_EQ(simulator::run({.threads = box::kThreads, .shared_bytes = p.bytes + 8 + 1024, .mode = mode},
                               [&] { box::box_kernel(p); }),
                "");
      expect_box(c, from, image, to);
    }
  }
}

// What the copy engine cannot take, with rule and value.
TEST(TensorMap, RulesNameTheValue) {
  alignas(16) uint8_t memory[64];
  const auto message = [](TensorTile t) { return std::string(check_tensor_tile("x", t).message); };
  const TensorTile good{
      .base = memory, .extent = {128, 2, 10}, .stride = {128, 256}, .box = {128, 1, 32}, .swizzle = ptx::Swizzle::b128};
  EXPECT_EQ(message(good), "");
  TensorTile t = good;
  t.base = memory + 8;
  EXPECT_NE(message(t).find("x must be aligned to 16 bytes, got 0x"), std::string::npos);
  t = good;
  t.stride[0] = 130;
  EXPECT_EQ(message(t), "x: strides of heads must be positive multiples of 16 bytes below 2^40, got 130");
  t = good;
  t.stride[1] = -256;
  EXPECT_EQ(message(t), "x: strides of tokens must be positive multiples of 16 bytes below 2^40, got -256");
  t = good;
  t.extent[1] = 1, t.stride[0] = 3;
  EXPECT_EQ(message(t), "");
  t = good;
  t.extent[2] = int64_t(1) << 32;
  EXPECT_EQ(message(t), "x: extents must be below 2^32, got 4294967296");
  t = good;
  t.box[2] = 257;
  EXPECT_EQ(message(t), "x: a box must have 1..256 elements, got 257");
  t = good;
  t.box[0] = 144;
  EXPECT_EQ(message(t), "x: a box's row must be a multiple of 16 bytes within the swizzle's span, got 144");
}

}  // namespace
}  // namespace mxflash
