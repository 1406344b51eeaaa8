// Which instruction set the kernels of backend `cpu` use.
#pragma once

#include <cstdint>

#include "runtime/status.h"

namespace mxflash {

enum class CpuIsa : int32_t { portable = 0, neon, avx2, avx512 };  // ascending preference
inline constexpr int32_t kNumCpuIsas = 4;

constexpr const char* cpu_isa_name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::portable: return "portable";
    case CpuIsa::neon: return "neon";
    case CpuIsa::avx2: return "avx2";
    case CpuIsa::avx512: return "avx512";
  }
  return "invalid";
}

// Built in, and this CPU and operating system have it.
bool has_cpu_isa(CpuIsa isa);

// The best one, or what MXFLASH_CPU_ISA forces. An unknown or missing name: `portable`, and cpu_isa_status() says why
// the backend is not available.
CpuIsa cpu_isa_in_use();
Status cpu_isa_status();

// One kernel table per ISA that is built in.
template <class Kernels>
struct CpuKernels {
  const Kernels* by_isa[kNumCpuIsas] = {};  // null: not built in
  const Kernels& in_use() const { return *by_isa[int(cpu_isa_in_use())]; }
};

}  // namespace mxflash

// Declares <isa>::name, a constant of type Kernels that <operation>_cpu_kernel.cpp defines once per ISA, and nameByIsa
// over all of them. Use it outside of any namespace.
#if defined(__x86_64__)
#define MXFLASH_CPU_KERNELS(Kernels, name)                                                                  \
  namespace mxflash::portable {                                                                             \
  extern const Kernels name;                                                                                \
  }                                                                                                         \
  namespace mxflash::avx2 {                                                                                 \
  extern const Kernels name;                                                                                \
  }                                                                                                         \
  namespace mxflash::avx512 {                                                                               \
  extern const Kernels name;                                                                                \
  }                                                                                                         \
  namespace mxflash {                                                                                       \
  inline constexpr CpuKernels<Kernels> name##ByIsa{{&portable::name, nullptr, &avx2::name, &avx512::name}}; \
  }
#elif defined(__aarch64__)
#define MXFLASH_CPU_KERNELS(Kernels, name)                                                            \
  namespace mxflash::portable {                                                                       \
  extern const Kernels name;                                                                          \
  }                                                                                                   \
  namespace mxflash::neon {                                                                           \
  extern const Kernels name;                                                                          \
  }                                                                                                   \
  namespace mxflash {                                                                                 \
  inline constexpr CpuKernels<Kernels> name##ByIsa{{&portable::name, &neon::name, nullptr, nullptr}}; \
  }
#else
#define MXFLASH_CPU_KERNELS(Kernels, name)                                                        \
  namespace mxflash::portable {                                                                   \
  extern const Kernels name;                                                                      \
  }                                                                                               \
  namespace mxflash {                                                                             \
  inline constexpr CpuKernels<Kernels> name##ByIsa{{&portable::name, nullptr, nullptr, nullptr}}; \
  }
#endif
