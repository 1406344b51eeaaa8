// MXFLASH_CPU_ISA: what it forces, and what is said when that can't be.
#include "runtime/cpu_isa.h"

#include <gtest/gtest.h>
#include <mxflash/backend.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "status_check.h"

namespace mxflash {
namespace {

class CpuIsaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const char* old = std::getenv("MXFLASH_CPU_ISA")) old_ = old;
    unsetenv("MXFLASH_CPU_ISA");
  }
  void TearDown() override { old_.empty() ? unsetenv("MXFLASH_CPU_ISA") : setenv("MXFLASH_CPU_ISA", old_.c_str(), 1); }

 private:
  std::string old_;
};

void force(const char* isa) { setenv("MXFLASH_CPU_ISA", isa, 1); }

TEST_F(CpuIsaTest, TheBestOfThisMachineUnlessForced) {
  CpuIsa best = CpuIsa::portable;
  for (int32_t i = 0; i < kNumCpuIsas; ++i) {
    if (has_cpu_isa(CpuIsa(i))) best = CpuIsa(i);
  }
  EXPECT_EQ(cpu_isa_in_use(), best);
  EXPECT_TRUE(cpu_isa_status().ok());
  force("");
  EXPECT_EQ(cpu_isa_in_use(), best) << "an empty variable is as good as none";
  EXPECT_TRUE(cpu_isa_status().ok());
#if defined(__x86_64__) || defined(__aarch64__)
  EXPECT_FALSE(has_cpu_isa(CpuIsa::neon) && has_cpu_isa(CpuIsa::avx2));
#endif
}

TEST_F(CpuIsaTest, AForcedOneIsInUse) {
  int forced = 0;
  for (int32_t i = 0; i < kNumCpuIsas; ++i) {
    if (!has_cpu_isa(CpuIsa(i))) continue;
    force(cpu_isa_name(CpuIsa(i)));
    EXPECT_EQ(cpu_isa_in_use(), CpuIsa(i)) << cpu_isa_name(CpuIsa(i));
    EXPECT_TRUE(cpu_isa_status().ok()) << cpu_isa_status().message;
    ++forced;
  }
  EXPECT_GE(forced, 1) << "portable is always there";
}

TEST_F(CpuIsaTest, OneThatIsMissingHereIsUnavailable) {
  int missing = 0;
  for (int32_t i = 0; i < kNumCpuIsas; ++i) {
    if (has_cpu_isa(CpuIsa(i))) continue;
    const char* name = cpu_isa_name(CpuIsa(i));
    force(name);
    EXPECT_EQ(cpu_isa_in_use(), CpuIsa::portable) << name;
    expect_status(cpu_isa_status(), StatusCode::unavailable,
                  std::string("cpu: MXFLASH_CPU_ISA asks for ") + name + ", which this CPU or build has not");
    ++missing;
  }
  EXPECT_GE(missing, 1) << "no CPU has both NEON and AVX2";
}

TEST_F(CpuIsaTest, AnUnknownNameIsUnavailableAndNamed) {
  for (const char* name : {"sse9", "AVX2", "avx2 ", "avx51"}) {
    force(name);
    EXPECT_EQ(cpu_isa_in_use(), CpuIsa::portable) << name;
    expect_status(cpu_isa_status(), StatusCode::unavailable,
                  std::string("cpu: MXFLASH_CPU_ISA must be one of avx512_bf16, avx512, avx2, neon, portable, got '") +
                      name + "'");
  }
}

}  // namespace
}  // namespace mxflash
