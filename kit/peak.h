// What this CPU is, and the ceilings that benches are shown against, measured in the same process on the same threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mxflash::kit {

std::string cpu_model();                  // "AMD EPYC ..."; the architecture if the system does not say more
std::vector<std::string> cpu_features();  // instruction sets of ours that it has: "avx2", "fma", "avx512f", ...

struct FmaPeak {
  double gflops = 0;              // fp32, a multiply-add is two
  const char* instructions = "";  // "avx512f", "avx2+fma", "neon", "baseline"
};
FmaPeak measure_fma_peak(int32_t threads);

// memcpy of bytes / 2 on all threads: GB/s, read and write counted.
double measure_copy_gbps(int64_t bytes, int32_t threads);

}  // namespace mxflash::kit
