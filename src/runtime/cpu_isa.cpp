#include "runtime/cpu_isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>
#include <cstring>

namespace mxflash {
namespace {

constexpr const char* kVariable = "MXFLASH_CPU_ISA";

#if defined(__x86_64__)
// clang 14 does not know __builtin_cpu_supports("f16c"). Asked once: cpuid is slow in a virtual machine.
bool has_f16c() {
  static const bool has = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  }();
  return has;
}
#endif

// vdpbf16ps runs at the rate of vpdpwssd on AMD (Zen 4: twice that of fp32 multiply-adds), and at half the rate of
// multiply-adds on Intel (Sapphire and Emerald Rapids), where `avx512` is the better choice.
bool prefers_bf16() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

CpuIsa best_isa() {
  for (int32_t i = kNumCpuIsas - 1; i > 0; --i) {
    if (CpuIsa(i) == CpuIsa::avx512_bf16 && !prefers_bf16()) continue;
    if (has_cpu_isa(CpuIsa(i))) return CpuIsa(i);
  }
  return CpuIsa::portable;
}

}  // namespace

bool has_cpu_isa(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::portable: return true;
#if defined(__x86_64__)
    // __builtin_cpu_supports also asks the operating system (xgetbv) whether it saves the registers.
    case CpuIsa::avx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    case CpuIsa::avx512:
      return has_cpu_isa(CpuIsa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vnni");
    case CpuIsa::avx512_bf16: return has_cpu_isa(CpuIsa::avx512) && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__)
    case CpuIsa::neon: return true;
#endif
    default: return false;
  }
}

CpuIsa cpu_isa_in_use() {
  const char* forced = std::getenv(kVariable);
  if (!forced || !*forced) return best_isa();
  for (int32_t i = 0; i < kNumCpuIsas; ++i) {
    if (std::strcmp(forced, cpu_isa_name(CpuIsa(i))) == 0 && has_cpu_isa(CpuIsa(i))) return CpuIsa(i);
  }
  return CpuIsa::portable;
}

Status cpu_isa_status() {
  const char* math = std::getenv("MXFLASH_CPU_MATH");
  if (math && *math && std::strcmp(math, "exact") != 0 && std::strcmp(math, "fast") != 0) {
    return make_status(StatusCode::unavailable, "cpu: MXFLASH_CPU_MATH must be exact or fast, got '%s'", math);
  }
  const char* forced = std::getenv(kVariable);
  if (!forced || !*forced) return {};
  for (int32_t i = 0; i < kNumCpuIsas; ++i) {
    if (std::strcmp(forced, cpu_isa_name(CpuIsa(i))) != 0) continue;
    if (has_cpu_isa(CpuIsa(i))) return {};
    return make_status(StatusCode::unavailable, "cpu: %s asks for %s, which this CPU or build has not", kVariable,
                       forced);
  }
  return make_status(StatusCode::unavailable,
                     "cpu: %s must be one of avx512_bf16, avx512, avx2, neon, portable, got '%s'", kVariable, forced);
}

}  // namespace mxflash
