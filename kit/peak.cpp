// The multiply-add loops are compiled for their instruction set by a target attribute and chosen at run time: the build
// itself stays baseline. 12 to 16 independent chains cover two FMA pipes with a latency of 4 to 5 cycles.
#include "kit/peak.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <thread>

#include "kit/timer.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace mxflash::kit {
namespace {

constexpr float kFactor = 0.999999f, kAddend = 1e-6f;  // x * kFactor + kAddend stays near 1: no overflow, no subnormals
constexpr double kSeconds = 0.05;                      // of one measurement
constexpr int kRepeats = 5;
constexpr int64_t kLeastCopy = 4096;  // bytes: below, calls and shared cache lines are what is measured

// Every loop does `rounds` rounds of kChains multiply-adds of `lanes` floats and returns something that depends on all.
struct FmaLoop {
  const char* instructions;
  int64_t flops_per_round;
  float (*run)(int64_t rounds);
};

#if defined(__x86_64__)
__attribute__((target("avx512f"))) float fma_avx512(int64_t rounds) {
  constexpr int kChains = 16;
  __m512 x[kChains];
  for (__m512& chain : x) chain = _mm512_set1_ps(1);
  const __m512 factor = _mm512_set1_ps(kFactor), addend = _mm512_set1_ps(kAddend);
  for (int64_t r = 0; r < rounds; ++r) {
    for (__m512& chain : x) chain = _mm512_fmadd_ps(chain, factor, addend);
  }
  for (int i = 1; i < kChains; ++i) x[0] = _mm512_add_ps(x[0], x[i]);
  return _mm512_cvtss_f32(x[0]);
}

__attribute__((target("avx2,fma"))) float fma_avx2(int64_t rounds) {
  constexpr int kChains = 12;
  __m256 x[kChains];
  for (__m256& chain : x) chain = _mm256_set1_ps(1);
  const __m256 factor = _mm256_set1_ps(kFactor), addend = _mm256_set1_ps(kAddend);
  for (int64_t r = 0; r < rounds; ++r) {
    for (__m256& chain : x) chain = _mm256_fmadd_ps(chain, factor, addend);
  }
  for (int i = 1; i < kChains; ++i) x[0] = _mm256_add_ps(x[0], x[i]);
  return _mm256_cvtss_f32(x[0]);
}
#elif defined(__aarch64__)
float fma_neon(int64_t rounds) {
  constexpr int kChains = 16;
  float32x4_t x[kChains];
  for (float32x4_t& chain : x) chain = vdupq_n_f32(1);
  const float32x4_t factor = vdupq_n_f32(kFactor), addend = vdupq_n_f32(kAddend);
  for (int64_t r = 0; r < rounds; ++r) {
    for (float32x4_t& chain : x) chain = vfmaq_f32(addend, chain, factor);
  }
  for (int i = 1; i < kChains; ++i) x[0] = vaddq_f32(x[0], x[i]);
  return vgetq_lane_f32(x[0], 0);
}
#endif

// A multiply and an add; whatever vectors the compiler's baseline has.
float fma_baseline(int64_t rounds) {
  constexpr int kChains = 12, kLanes = 4;
  typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
  Vector x[kChains];
  for (Vector& chain : x) chain = Vector{1, 1, 1, 1};
  for (int64_t r = 0; r < rounds; ++r) {
    for (Vector& chain : x) chain = chain * kFactor + kAddend;
  }
  for (int i = 1; i < kChains; ++i) x[0] += x[i];
  return x[0][0];
}

FmaLoop best_loop() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {"avx512f", 2 * 16 * 16, fma_avx512};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {"avx2+fma", 2 * 12 * 8, fma_avx2};
#elif defined(__aarch64__)
  return {"neon", 2 * 16 * 4, fma_neon};
#endif
  return {"baseline", 2 * 12 * 4, fma_baseline};
}

// Milliseconds until body(0 .. threads-1) are all done, on a thread each. Starting them is part of it: ~0.05 ms.
double run_on_threads(int32_t threads, const std::function<void(int32_t)>& body) {
  return milliseconds([&] {
    std::vector<std::thread> helpers;
    for (int32_t t = 1; t < threads; ++t) helpers.emplace_back(body, t);
    body(0);
    for (std::thread& helper : helpers) helper.join();
  });
}

}  // namespace

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
#if defined(__x86_64__)
  return "x86-64 CPU";
#elif defined(__aarch64__)
  return "arm64 CPU";
#else
  return "unknown CPU";
#endif
}

std::vector<std::string> cpu_features() {
  std::vector<std::string> features;
#if defined(__x86_64__)
  // __builtin_cpu_supports wants literals.
#define MXFLASH_FEATURE(name) \
  if (__builtin_cpu_supports(name)) features.push_back(name)
  MXFLASH_FEATURE("avx2");
  MXFLASH_FEATURE("fma");
  MXFLASH_FEATURE("avx512f");
  MXFLASH_FEATURE("avx512bw");
  MXFLASH_FEATURE("avx512vl");
  MXFLASH_FEATURE("avx512vnni");
  MXFLASH_FEATURE("avx512bf16");
#undef MXFLASH_FEATURE
#elif defined(__aarch64__)
  features.push_back("neon");
#endif
  return features;
}

FmaPeak measure_fma_peak(int32_t threads) {
  const FmaLoop loop = best_loop();
  std::atomic<float> sink{0};
  const auto run = [&](int64_t rounds) {
    return run_on_threads(threads, [&](int32_t) { sink.store(loop.run(rounds), std::memory_order_relaxed); });
  };
  int64_t rounds = 1 << 16;
  while (run(rounds) < 1e3 * kSeconds) rounds *= 2;  // also the warm-up
  double best_ms = run(rounds);
  for (int i = 1; i < kRepeats; ++i) best_ms = std::min(best_ms, run(rounds));
  return {double(rounds * loop.flops_per_round) * threads / best_ms * 1e-6, loop.instructions};
}

double measure_copy_gbps(int64_t bytes, int32_t threads) {
  const int64_t size = std::max(bytes / 2, kLeastCopy);
  const std::unique_ptr<char[]> from(new char[size_t(size)]), to(new char[size_t(size)]);
  std::memset(from.get(), 1, size_t(size));
  std::memset(to.get(), 2, size_t(size));
  // Small sizes repeat inside of the threads, so that starting them does not count.
  const int64_t rounds = std::max<int64_t>(1, (int64_t(1) << 27) / size);
  std::vector<double> samples;
  for (int i = 0; i < kRepeats; ++i) {
    samples.push_back(run_on_threads(threads, [&](int32_t t) {
      const int64_t first = size * t / threads, end = size * (t + 1) / threads;
      for (int64_t r = 0; r < rounds; ++r) {
        std::memcpy(to.get() + first, from.get() + first, size_t(end - first));
        __asm__ volatile("" : : "r"(to.get()) : "memory");  // every copy counts
      }
    }));
  }
  return 2 * double(size) * double(rounds) / median(samples) * 1e-6;
}

}  // namespace mxflash::kit
