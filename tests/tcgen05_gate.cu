// Compiled for every architecture of Blackwell, never run: that ptxas takes each wrapper that no kernel has yet.
#include "ptx/arithmetic.cuh"
#include "ptx/convert.cuh"
#include "ptx/tcgen05.cuh"

namespace mxflash {
namespace {

template <int kCount>
__device__ void move_registers(uint32_t tmem) {
  uint32_t r[kCount];
  ptx::tcgen05_ld(tmem, r);
  ptx::tcgen05_wait_ld(r);
#pragma unroll
  for (int i = 0; i < kCount; ++i) r[i] ^= 1;
  ptx::tcgen05_st(tmem, r);
  ptx::tcgen05_wait_st();
}

__global__ void __launch_bounds__(128) all_moves(uint32_t tmem) {
  move_registers<1>(tmem);
  move_registers<2>(tmem);
  move_registers<4>(tmem);
  move_registers<8>(tmem);
  move_registers<16>(tmem);
  move_registers<32>(tmem);
  move_registers<64>(tmem);
  move_registers<128>(tmem);
}

// Two loads on their way, waited for together.
__global__ void __launch_bounds__(128) two_loads(uint32_t tmem, uint32_t* to) {
  uint32_t a[32], b[32];
  ptx::tcgen05_ld(tmem, a);
  ptx::tcgen05_ld(tmem + 32, b);
  ptx::tcgen05_wait_ld(a, b);
#pragma unroll
  for (int i = 0; i < 32; ++i) to[128 * i + threadIdx.x] = a[i] + b[i];
}

__global__ void arithmetic(float2* x, uint32_t* packed) {
  float2 y = ptx::fma_f32x2(x[0], x[1], x[2]);
  y = ptx::mul_f32x2(ptx::add_f32x2(y, x[3]), x[4]);
  y.x = ptx::max3_nan(y.x, y.y, x[5].x);
  y.y = ptx::fma_saturate(ptx::log2_approx(y.x), ptx::reciprocal_approx(y.y), ptx::exp2_approx(x[5].y));
  x[0] = y;
  *packed = ptx::pack_bf16(y.x, y.y) ^ ptx::pack_f16(y.x, y.y) ^ ptx::pack_e4m3(y.x, y.y, y.x, y.y);
}

}  // namespace

// Something to refer to all of them.
void tcgen05_gate_kernels(const void** kernels) {
  const void* all[] = {reinterpret_cast<const void*>(all_moves), reinterpret_cast<const void*>(two_loads),
                       reinterpret_cast<const void*>(arithmetic)};
  for (const void* k : all) *kernels++ = k;
}

}  // namespace mxflash
