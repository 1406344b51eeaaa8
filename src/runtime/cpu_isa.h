// Which instruction set the kernels of backend `cpu` use.
#pragma once

#include <cstdint>

#include "runtime/status.h"

namespace mxflash {

// Ascending preference, and on x86 each includes those before it.
enum class CpuIsa : int32_t { portable = 0, neon, avx2, avx512, avx512_bf16 };
inline constexpr int32_t kNumCpuIsas = 5;

constexpr const char* cpu_isa_name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::portable: return "portable";
    case CpuIsa::neon: return "neon";
    case CpuIsa::avx2: return "avx2";
    case CpuIsa::avx512: return "avx512";
    case CpuIsa::avx512_bf16: return "avx512_bf16";
  }
  return "invalid";
}

// Built in, and this CPU and operating system have it.
bool has_cpu_isa(CpuIsa isa);

// The best one of this CPU, or what MXFLASH_CPU_ISA forces. An unknown or missing name: `portable`, and
// cpu_isa_status() says why the backend is not available.
CpuIsa cpu_isa_in_use();
Status cpu_isa_status();

// One kernel table per ISA that is built in.
template <class Kernels>
struct CpuKernels {
  const Kernels* by_isa[kNumCpuIsas] = {};  // null: not built in, or of no use here
  const Kernels& in_use() const {
    int isa = int(cpu_isa_in_use());
    while (!by_isa[isa]) --isa;  // portable is always there
    return *by_isa[isa];
  }
};

}  // namespace mxflash

// Declares <isa>::name, a constant of type Kernels that <operation>_cpu_kernel.cpp defines once per ISA, and nameByIsa
// over all of them. Use it outside of any namespace.
#define MXFLASH_CPU_KERNEL(isa, Kernels, name) \
  namespace mxflash::isa {                     \
  extern const Kernels name;                   \
  }
#define MXFLASH_CPU_KERNEL_TABLE(Kernels, name, ...)               \
  namespace mxflash {                                              \
  inline constexpr CpuKernels<Kernels> name##ByIsa{{__VA_ARGS__}}; \
  }
#if defined(__x86_64__)
#define MXFLASH_CPU_KERNELS(Kernels, name)    \
  MXFLASH_CPU_KERNEL(portable, Kernels, name) \
  MXFLASH_CPU_KERNEL(avx2, Kernels, name)     \
  MXFLASH_CPU_KERNEL(avx512, Kernels, name)   \
  MXFLASH_CPU_KERNEL_TABLE(Kernels, name, &portable::name, nullptr, &avx2::name, &avx512::name)
#define MXFLASH_CPU_KERNELS_WITH_BF16(Kernels, name) \
  MXFLASH_CPU_KERNEL(portable, Kernels, name)        \
  MXFLASH_CPU_KERNEL(avx2, Kernels, name)            \
  MXFLASH_CPU_KERNEL(avx512, Kernels, name)          \
  MXFLASH_CPU_KERNEL(avx512_bf16, Kernels, name)     \
  MXFLASH_CPU_KERNEL_TABLE(Kernels, name, &portable::name, nullptr, &avx2::name, &avx512::name, &avx512_bf16::name)
#elif defined(__aarch64__)
#define MXFLASH_CPU_KERNELS(Kernels, name)    \
  MXFLASH_CPU_KERNEL(portable, Kernels, name) \
  MXFLASH_CPU_KERNEL(neon, Kernels, name)     \
  MXFLASH_CPU_KERNEL_TABLE(Kernels, name, &portable::name, &neon::name)
#define MXFLASH_CPU_KERNELS_WITH_BF16 MXFLASH_CPU_KERNELS
#else
#define MXFLASH_CPU_KERNELS(Kernels, name)    \
  MXFLASH_CPU_KERNEL(portable, Kernels, name) \
  MXFLASH_CPU_KERNEL_TABLE(Kernels, name, &portable::name)
#define MXFLASH_CPU_KERNELS_WITH_BF16 MXFLASH_CPU_KERNELS
#endif
