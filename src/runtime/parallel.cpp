#include "runtime/parallel.h"

#include <mxflash/backend.h>

#ifdef __linux__
#include <sched.h>
#endif

#include <atomic>
#include <thread>

namespace mxflash {
namespace {

constexpr int32_t kMaxWorkers = 256;
std::atomic<int32_t> g_num_threads{0};

// CPUs that this process may run on: containers and taskset give fewer than the machine has.
int32_t usable_cpus() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  return int32_t(std::thread::hardware_concurrency());
}

}  // namespace

void set_num_threads(int32_t n) { g_num_threads.store(n < 0 ? 0 : n, std::memory_order_relaxed); }

int32_t num_threads() {
  const int32_t set = g_num_threads.load(std::memory_order_relaxed);
  const int32_t n = set > 0 ? set : usable_cpus();
  return n < 1 ? 1 : n > kMaxWorkers ? kMaxWorkers : n;
}

void parallel_for(int64_t count, int32_t workers, LoopBody body, void* context) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int32_t worker) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(context, i, worker);
  };
  std::thread helpers[kMaxWorkers - 1];
  int32_t started = 0;
  const int64_t useful = count < workers ? count : workers;
  try {
    for (; started + 1 < useful && started < kMaxWorkers - 1; ++started)
      helpers[started] = std::thread(work, started + 1);
  } catch (...) {
    // No more threads, or no memory for one, to be had: those that started and this one do all the work.
  }
  work(0);
  for (int32_t i = 0; i < started; ++i) helpers[i].join();
}

}  // namespace mxflash
