// The multiply-add loops are compiled for their instruction set by a target attribute and chosen at run time: the build
// itself stays baseline. 12 to 16 independent chains cover two FMA pipes with a latency of 4 to 5 cycles.
#include "kit/peak.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "kit/timer.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace mxflash::kit {
namespace {

constexpr float kFactor = 0.999999f, kAddend = 1e-6f;  // x * kFactor + kAddend stays near 1: no overflow, no subnormals
constexpr double kSeconds = 0.05, kMeterSeconds = 0.02;  // of one measurement
constexpr int kRepeats = 5;
constexpr int64_t kPieces = 64;           // of a thread's part of a measurement, about
constexpr int64_t kLeastCopy = 4096;      // bytes: below, calls and shared cache lines are what is measured
constexpr int64_t kMeterBytes = 1 << 27;  // moved in one measurement, at least

// Every loop does `rounds` rounds of kChains multiply-adds of `lanes` floats and returns something that depends on all.
struct FmaLoop {
  const char* instructions;
  int64_t flops_per_round;
  float (*run)(int64_t rounds);
};

// Reads whole blocks of 512 bytes and returns something that depends on all of them.
using ReadLoop = int64_t (*)(const char* data, int64_t size);
constexpr int64_t kReadBlock = 512;

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

__attribute__((target("avx512f"))) int64_t read_avx512(const char* data, int64_t size) {
  __m512i x[kReadBlock / 64] = {};
  for (const char* end = data + size; data < end; data += kReadBlock) {
    for (int i = 0; i < kReadBlock / 64; ++i) x[i] = _mm512_or_si512(x[i], _mm512_loadu_si512(data + 64 * i));
  }
  for (int i = 1; i < kReadBlock / 64; ++i) x[0] = _mm512_or_si512(x[0], x[i]);
  int64_t lanes[8];
  _mm512_storeu_si512(lanes, x[0]);
  return (lanes[0] | lanes[1]) | (lanes[2] | lanes[3]) | (lanes[4] | lanes[5]) | (lanes[6] | lanes[7]);
}

__attribute__((target("avx2"))) int64_t read_avx2(const char* data, int64_t size) {
  constexpr int kChains = 8;
  __m256i x[kChains] = {};
  for (const char* end = data + size; data < end; data += 32 * kChains) {
    for (int i = 0; i < kChains; ++i) {
      x[i] = _mm256_or_si256(x[i], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 32 * i)));
    }
  }
  for (int i = 1; i < kChains; ++i) x[0] = _mm256_or_si256(x[0], x[i]);
  return _mm256_extract_epi64(x[0], 0) | _mm256_extract_epi64(x[0], 1) | _mm256_extract_epi64(x[0], 2) |
         _mm256_extract_epi64(x[0], 3);
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

int64_t read_baseline(const char* data, int64_t size) {
  constexpr int kChains = 8;
  typedef int64_t Vector __attribute__((vector_size(16), aligned(1)));
  Vector x[kChains] = {};
  for (const char* end = data + size; data < end; data += 16 * kChains) {
    for (int i = 0; i < kChains; ++i) x[i] |= *reinterpret_cast<const Vector*>(data + 16 * i);
  }
  for (int i = 1; i < kChains; ++i) x[0] |= x[i];
  return x[0][0] | x[0][1];
}

ReadLoop best_read() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return read_avx512;
  if (__builtin_cpu_supports("avx2")) return read_avx2;
#endif
  return read_baseline;
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

namespace {

// GFLOP/s of one measurement; `rounds`, those of each thread, grow until it takes `seconds`, which is also the warm-up.
// Threads take them in pieces as they come, like work of ours: one that has to wait for its core does not stop the
// other.
std::function<double()> make_fma_meter(int32_t threads, double seconds) {
  const FmaLoop loop = best_loop();
  const auto run = [=](int64_t rounds) {
    std::atomic<float> sink{0};
    std::atomic<int64_t> pieces{0};
    return run_on_threads(threads, [&](int32_t) {
      while (pieces.fetch_add(1, std::memory_order_relaxed) < kPieces * threads) {
        sink.store(loop.run(rounds / kPieces), std::memory_order_relaxed);
      }
    });
  };
  int64_t rounds = 1 << 16;
  while (run(rounds) < 1e3 * seconds) rounds *= 2;
  return [=] { return double(rounds * loop.flops_per_round) * threads / run(rounds) * 1e-6; };
}

double median_of(const std::function<double()>& meter) {
  std::vector<double> samples;
  for (int i = 0; i < kRepeats; ++i) samples.push_back(meter());
  return median(samples);
}

}  // namespace

FmaPeak measure_fma_peak(int32_t threads) {
  const std::function<double()> meter = make_fma_meter(threads, kSeconds);
  double best = 0;
  for (int i = 0; i < kRepeats; ++i) best = std::max(best, meter());
  return {best, best_loop().instructions};
}

std::function<double()> fma_meter(int32_t threads) { return make_fma_meter(threads, kMeterSeconds); }

std::function<double()> copy_meter(int64_t bytes, int32_t threads) {
  const int64_t size = std::max(bytes / 2, kLeastCopy);
  const auto from = std::make_shared<std::vector<char>>(size_t(size), 1);
  const auto to = std::make_shared<std::vector<char>>(size_t(size), 2);
  // Small sizes repeat inside of the threads, so that starting them does not count.
  const int64_t rounds = std::max<int64_t>(1, kMeterBytes / size);
  return [=] {
    const double ms = run_on_threads(threads, [&](int32_t t) {
      const int64_t first = size * t / threads, end = size * (t + 1) / threads;
      for (int64_t r = 0; r < rounds; ++r) {
        std::memcpy(to->data() + first, from->data() + first, size_t(end - first));
        __asm__ volatile("" : : "r"(to->data()) : "memory");  // every copy counts
      }
    });
    return 2 * double(size) * double(rounds) / ms * 1e-6;
  };
}

std::function<double()> read_meter(int64_t bytes, int32_t threads) {
  const int64_t blocks = (std::max(bytes, kLeastCopy) + kReadBlock - 1) / kReadBlock;
  const std::shared_ptr<char> from(static_cast<char*>(std::aligned_alloc(kReadBlock, size_t(blocks * kReadBlock))),
                                   [](char* p) { std::free(p); });
  if (!from) throw std::bad_alloc();
  std::memset(from.get(), 1, size_t(blocks * kReadBlock));
  const int64_t rounds = std::max<int64_t>(1, kMeterBytes / (blocks * kReadBlock));
  const ReadLoop read = best_read();
  return [=] {
    std::atomic<int64_t> sink{0};
    const double ms = run_on_threads(threads, [&](int32_t t) {
      const int64_t first = blocks * t / threads, end = blocks * (t + 1) / threads;
      for (int64_t r = 0; r < rounds; ++r) {
        sink.store(read(from.get() + first * kReadBlock, (end - first) * kReadBlock), std::memory_order_relaxed);
      }
    });
    return double(blocks * kReadBlock) * double(rounds) / ms * 1e-6;
  };
}

double measure_copy_gbps(int64_t bytes, int32_t threads) { return median_of(copy_meter(bytes, threads)); }
double measure_read_gbps(int64_t bytes, int32_t threads) { return median_of(read_meter(bytes, threads)); }

}  // namespace mxflash::kit
