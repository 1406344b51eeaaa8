// Tests of backend `cpu` that run once per instruction set, in one process.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "runtime/cpu_isa.h"

namespace mxflash {

inline std::vector<CpuIsa> available_isas() {
  std::vector<CpuIsa> isas;
  for (int32_t i = 0; i < kNumCpuIsas; ++i) {
    if (has_cpu_isa(CpuIsa(i))) isas.push_back(CpuIsa(i));
  }
  return isas;
}

// Forces the parameter for the time of a test.
class EveryIsa : public testing::TestWithParam<CpuIsa> {
 protected:
  EveryIsa() {
    if (const char* old = std::getenv(kName)) old_ = old;
    setenv(kName, cpu_isa_name(GetParam()), 1);
  }
  ~EveryIsa() override { old_.empty() ? unsetenv(kName) : setenv(kName, old_.c_str(), 1); }

 private:
  static constexpr const char* kName = "MXFLASH_CPU_ISA";
  std::string old_;
};

inline std::string isa_of_test(const testing::TestParamInfo<CpuIsa>& test) { return cpu_isa_name(test.param); }

}  // namespace mxflash
