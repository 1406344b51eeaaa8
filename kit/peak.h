// What this CPU is, and the ceilings that benches are shown against, measured in the same process on the same threads.
#pragma once

#include <cstdint>
#include <functional>
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

// Each call of a meter measures once, in some milliseconds, for benches that watch a ceiling while they time.
std::function<double()> fma_meter(int32_t threads);  // GFLOP/s
// GB/s of a memcpy of bytes / 2 on all threads, read and write counted. One that does not fit into the caches is done
// with streaming stores by the C library, so that it does not read what it will overwrite.
std::function<double()> copy_meter(int64_t bytes, int32_t threads);
// GB/s of loads of so many bytes, the same again and again: small ones come from a cache.
std::function<double()> read_meter(int64_t bytes, int32_t threads);

// Medians of some calls.
double measure_copy_gbps(int64_t bytes, int32_t threads);
double measure_read_gbps(int64_t bytes, int32_t threads);

}  // namespace mxflash::kit
