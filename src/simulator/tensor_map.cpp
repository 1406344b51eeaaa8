// Tensor maps of the simulator hold the tile as it is; copies of boxes.
#include "runtime/tensor_map.h"

#include <cstring>

#include "ptx/tensor_copy.cuh"
#include "simulator/machine.h"

namespace mxflash {
namespace {

struct SimulatedMap {
  uint64_t magic;
  TensorTile tile;
};
constexpr uint64_t kMagic = 0x6D78666C61736874;
static_assert(sizeof(SimulatedMap) <= sizeof(ptx::TensorMap));

TensorTile tile_of(const ptx::TensorMap* map, const char* what) {
  SimulatedMap m{};
  std::memcpy(static_cast<void*>(&m), map, sizeof m);
  if (m.magic != kMagic) simulator::fail("%s with a tensor map that nobody made", what);
  return m.tile;
}

uint32_t box_bytes(const TensorTile& t) { return uint32_t(t.box[0] * t.box[1] * t.box[2] * t.element_bytes); }

void check_shared(const TensorTile& t, uint32_t shared, const char* what) {
  const uint32_t align = t.swizzle == ptx::Swizzle::none ? 128 : 8 * ptx::swizzle_span(t.swizzle);
  if (shared % align) simulator::fail("%s: shared address must be a multiple of %u, got %u", what, align, shared);
}

// visit(row of the box, its first element in memory or null, elements of it that are in the tensor)
template <class Visit>
void for_rows(const TensorTile& t, int x, int y, int z, Visit&& visit) {
  uint32_t row = 0;
  for (int k = 0; k < t.box[2]; ++k) {
    for (int j = 0; j < t.box[1]; ++j, ++row) {
      const int64_t at_y = int64_t(y) + j, at_z = int64_t(z) + k;
      const bool inside = at_y >= 0 && at_y < t.extent[1] && at_z >= 0 && at_z < t.extent[2];
      for (int i = 0; i < t.box[0]; ++i) {
        const int64_t at_x = int64_t(x) + i;
        uint8_t* p = nullptr;
        if (inside && at_x >= 0 && at_x < t.extent[0]) {
          p = static_cast<uint8_t*>(t.base) + at_x * t.element_bytes + at_y * t.stride[0] + at_z * t.stride[1];
        }
        visit(row * uint32_t(t.box[0] * t.element_bytes) + uint32_t(i * t.element_bytes), p);
      }
    }
  }
}

}  // namespace

Status make_tensor_map(const char* what, const TensorTile& tile, ptx::TensorMap& map) {
  MXFLASH_TRY(check_tensor_tile(what, tile));
  for (const int64_t n : tile.extent) {
    if (n == 0) return {};
  }
  SimulatedMap m{};
  m.magic = kMagic;
  m.tile = tile;
  std::memcpy(static_cast<void*>(&map), &m, sizeof m);
  return {};
}

namespace ptx {

void tensor_load_3d(uint32_t shared, const TensorMap* map, int x, int y, int z, uint32_t bar) {
  constexpr const char* kWhat = "tensor_load_3d";
  const TensorTile t = tile_of(map, kWhat);
  check_shared(t, shared, kWhat);
  simulator::enqueue_load(shared, box_bytes(t), bar, kWhat, [=](uint8_t* to) {
    std::memset(to, 0, box_bytes(t));
    for_rows(t, x, y, z, [&](uint32_t offset, const uint8_t* from) {
      if (from) std::memcpy(to + swizzled(offset, t.swizzle), from, size_t(t.element_bytes));
    });
  });
}

void tensor_store_3d(const TensorMap* map, int x, int y, int z, uint32_t shared) {
  constexpr const char* kWhat = "tensor_store_3d";
  const TensorTile t = tile_of(map, kWhat);
  check_shared(t, shared, kWhat);
  if (x < 0 || y < 0 || z < 0) {
    simulator::fail("%s: coordinates must not be negative, got %d, %d, %d", kWhat, x, y, z);
  }
  simulator::enqueue_store(shared, box_bytes(t), kWhat, [=](const uint8_t* from) {
    for_rows(t, x, y, z, [&](uint32_t offset, uint8_t* to) {
      if (to) std::memcpy(to, from + swizzled(offset, t.swizzle), size_t(t.element_bytes));
    });
  });
}

}  // namespace ptx
}  // namespace mxflash
