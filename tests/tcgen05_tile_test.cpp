// The tile of tests/tcgen05_tile.cuh on the simulator, beside float64.
#include <gtest/gtest.h>

#include "simulator/simulator.h"
#include "tcgen05_tile.cuh"
#include "tcgen05_tile_case.h"

namespace mxflash {
namespace {

using simulator::Mode;

template <class C>
class Tile : public testing::Test {};
TYPED_TEST_SUITE(Tile, TileConfigs);

template <class C>
std::string run(TileCase<C>& t, Mode mode, uint64_t seed, int fault = 0) {
  return simulator::run(
      {.grid = 1, .threads = C::kThreads, .shared_bytes = C::kBytes + 1024, .mode = mode, .seed = seed, .fault = fault},
      [&] { tile::tile_kernel<C>(t.params()); });
}

TYPED_TEST(Tile, EqualsFloat64InEveryMode) {
  for (const Mode mode : {Mode::eager, Mode::deferred, Mode::reordered}) {
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      TileCase<TypeParam> t(seed);
      ASSERT_EQ(run(t, mode, seed), "");
      EXPECT_LE(t.worst(), 1.0) << int(mode) << " " << seed;
    }
  }
}

}  // namespace
}  // namespace mxflash
