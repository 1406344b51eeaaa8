// The tile of tests/tcgen05_tile.cuh on a card, beside float64; and copies by tensor maps. On Blackwell, or on Hopper
// with tcgen05 in software.
#include "on_card.h"
#include "tcgen05_tile_case.h"
#include "tensor_copy_box.cuh"
#include "tensor_copy_case.h"

namespace mxflash {
namespace {

template <class T>
T* address(const kit::DeviceBuffer& b) {
  return static_cast<T*>(b.data());
}

template <class C>
class TileOnCard : public OnTcgen05 {};
TYPED_TEST_SUITE(TileOnCard, TileConfigs);

TYPED_TEST(TileOnCard, EqualsFloat64) {
  using C = TypeParam;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    TileCase<C> t(seed);
    const kit::DeviceBuffer a = upload(t.a), b = upload(t.b), sfa = upload(t.sfa), sfb = upload(t.sfb), d = upload(t.d);
    const tile::Params p{address<uint8_t>(a), address<uint8_t>(b), address<uint8_t>(sfa), address<uint8_t>(sfb),
                         address<float>(d),   t.code(t.a_type),    t.code(t.b_type)};
    ASSERT_EQ(cudaFuncSetAttribute(tile::tile_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytes + 1024),
              cudaSuccess);
    tile::tile_kernel<C><<<1, C::kThreads, C::kBytes + 1024>>>(p);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cudaGetErrorString(cudaGetLastError());
    t.d = download<float>(d);
    EXPECT_LE(t.worst(), 1.0) << seed;
  }
}

class TensorCopyOnCard : public OnTcgen05 {};

TEST_F(TensorCopyOnCard, MovesABoxAsTheSwizzleSays) {
  for (const BoxCase& c : kBoxCases) {
    const std::vector<uint8_t> tensor = box_tensor(c);
    const auto bytes = uint32_t(c.rows * c.columns);
    const kit::DeviceBuffer from = upload(tensor), to = upload(std::vector<uint8_t>(tensor.size(), 0xAA));
    const kit::DeviceBuffer image = upload(std::vector<uint8_t>(bytes, 0xBB));
    box::Params p{.x = c.x, .y = c.y, .z = c.z, .bytes = bytes, .image = address<uint32_t>(image)};
    ASSERT_TRUE(make_tensor_map(c.name, box_tile(c, address<uint8_t>(from)), p.from).ok());
    ASSERT_TRUE(make_tensor_map(c.name, box_tile(c, address<uint8_t>(to)), p.to).ok());
    box::box_kernel<<<1, box::kThreads, bytes + 8 + 1024>>>(p);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << c.name;
    expect_box(c, tensor, download<uint8_t>(image), download<uint8_t>(to));
  }
}

}  // namespace
}  // namespace mxflash
