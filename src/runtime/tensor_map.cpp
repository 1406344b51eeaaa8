// Tensor maps by the driver's cuTensorMapEncodeTiled, found at run time: the library does not link to the driver.
#include "runtime/tensor_map.h"

#include <cuda.h>

#include <algorithm>
#include <bit>

#include "runtime/cuda.h"

namespace mxflash {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

CUtensorMapDataType data_type(int32_t element_bytes) {
  return element_bytes == 4   ? CU_TENSOR_MAP_DATA_TYPE_UINT32
         : element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                              : CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

CUtensorMapSwizzle swizzle_of(ptx::Swizzle s) {
  switch (s) {
    case ptx::Swizzle::b128: return CU_TENSOR_MAP_SWIZZLE_128B;
    case ptx::Swizzle::b64: return CU_TENSOR_MAP_SWIZZLE_64B;
    case ptx::Swizzle::b32: return CU_TENSOR_MAP_SWIZZLE_32B;
    case ptx::Swizzle::none: break;
  }
  return CU_TENSOR_MAP_SWIZZLE_NONE;
}

}  // namespace

Status make_tensor_map(const char* what, const TensorTile& tile, ptx::TensorMap& map) {
  static_assert(sizeof(CUtensorMap) == sizeof(ptx::TensorMap));
  MXFLASH_TRY(check_tensor_tile(what, tile));
  if (std::any_of(tile.extent.begin(), tile.extent.end(), [](int64_t n) { return n == 0; })) return {};
  static const Encode encode = find_encode();
  if (!encode) return unsupported("%s: the driver must know cuTensorMapEncodeTiled", what);
  cuuint64_t extent[3], stride[2];
  cuuint32_t box[3];
  const cuuint32_t element_stride[3] = {1, 1, 1};
  for (size_t i = 0; i < 3; ++i) {
    extent[i] = cuuint64_t(tile.extent[i]);
    box[i] = cuuint32_t(tile.box[i]);
  }
  for (size_t i = 0; i < 2; ++i) stride[i] = tile.extent[i + 1] > 1 ? cuuint64_t(tile.stride[i]) : 16;
  CUtensorMap encoded;
  const CUresult result = encode(&encoded, data_type(tile.element_bytes), 3, tile.base, extent, stride, box,
                                 element_stride, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(tile.swizzle),
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return unsupported("%s: cuTensorMapEncodeTiled gave error %d", what, int(result));
  map = std::bit_cast<ptx::TensorMap>(encoded);
  return {};
}

}  // namespace mxflash
