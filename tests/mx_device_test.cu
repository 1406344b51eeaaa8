// The constexpr formats of src/mx give the same bytes on a GPU as on the CPU: kernels will include these headers.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "mx/float16.h"
#include "mx/rotation.h"
#include "mx/scale_layout.h"

namespace mxflash {
namespace {

// fp32 patterns: every sign and exponent with 2^7 top mantissa bits, each with these low bits, so that ties and their
// neighbours on both sides occur for every rounding that the formats do.
constexpr int64_t kPatterns = 6 << 16;
constexpr uint32_t pattern(int64_t i) {
  constexpr uint32_t low_bits[] = {0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
  return uint32_t(i / 6) << 16 | low_bits[i % 6];
}

// What is compared, packed into one word per pattern.
struct Digest {
  uint8_t e4m3, e5m2, e4m3_scaled, rceil, floor;
  uint16_t bf16, f16;
  uint32_t decoded;
  friend bool operator==(const Digest&, const Digest&) = default;
};

__host__ __device__ constexpr Digest digest(int64_t i) {
  constexpr Fp8Format e4m3 = e4m3_format(), e5m2 = e5m2_format();
  const uint32_t bits = pattern(i);
  const float x = std::bit_cast<float>(bits);
  const uint8_t code = uint8_t(i), scale = uint8_t(i >> 8);
  return {encode_fp8(x, e4m3),
          encode_fp8(x, e5m2),
          encode_mx(x, scale, e4m3),
          scale_from_amax(bits & 0x7FFFFFFF, e4m3, MxRule::rceil),
          scale_from_amax(bits & 0x7FFFFFFF, e5m2, MxRule::floor),
          encode_bf16(x),
          encode_f16(x),
          std::bit_cast<uint32_t>(decode_fp8(code, e4m3)) ^ std::bit_cast<uint32_t>(decode_fp8(code, e5m2)) * 3 ^
              std::bit_cast<uint32_t>(decode_e8m0(scale)) * 5 ^ std::bit_cast<uint32_t>(decode_f16(uint16_t(i))) * 7};
}

__global__ void digest_kernel(Digest* out) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < kPatterns) out[i] = digest(i);
}

__global__ void rotate_kernel(float* x) { rotate(x + int64_t(threadIdx.x) * 128, 128, 24, 0); }

class MxDevice : public testing::Test {
 protected:
  void SetUp() override {
    cudaDeviceProp device{};
    if (cudaGetDeviceProperties(&device, 0) != cudaSuccess) GTEST_SKIP() << "no CUDA device";
    if ((device.major != 9 && device.major != 10) || device.minor != 0) {
      GTEST_SKIP() << "device code is for sm_90 and sm_100, the card is sm_" << device.major << device.minor;
    }
  }
};

TEST_F(MxDevice, CodecsGiveTheSameBytes) {
  Digest* device = nullptr;
  ASSERT_EQ(cudaMalloc(&device, kPatterns * sizeof(Digest)), cudaSuccess);
  digest_kernel<<<kPatterns / 256, 256>>>(device);
  std::vector<Digest> got(kPatterns);
  ASSERT_EQ(cudaMemcpy(got.data(), device, kPatterns * sizeof(Digest), cudaMemcpyDeviceToHost), cudaSuccess);
  cudaFree(device);
  int64_t wrong = 0;
  for (int64_t i = 0; i < kPatterns; ++i) wrong += got[size_t(i)] != digest(i);
  EXPECT_EQ(wrong, 0);
}

TEST_F(MxDevice, RotationGivesTheSameBits) {
  constexpr int64_t kRows = 64;
  std::vector<float> host(kRows * 128);
  for (size_t i = 0; i < host.size(); ++i) host[i] = float(int(i * 2654435761u >> 20)) / 1024 - 1;
  float* device = nullptr;
  const size_t bytes = host.size() * sizeof(float);
  ASSERT_EQ(cudaMalloc(&device, bytes), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(device, host.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
  rotate_kernel<<<1, kRows>>>(device);
  std::vector<float> got(host.size());
  ASSERT_EQ(cudaMemcpy(got.data(), device, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
  cudaFree(device);
  for (int64_t r = 0; r < kRows; ++r) rotate(host.data() + r * 128, 128, 24, 0);
  EXPECT_EQ(got, host);
}

}  // namespace
}  // namespace mxflash
