#include "runtime/parallel.h"

#include <mxflash/backend.h>

#include <atomic>
#include <system_error>
#include <thread>

namespace mxflash {
namespace {

constexpr int32_t kMaxWorkers = 256;
std::atomic<int32_t> g_num_threads{0};

}  // namespace

void set_num_threads(int32_t n) { g_num_threads.store(n < 0 ? 0 : n, std::memory_order_relaxed); }

int32_t num_threads() {
  const int32_t set = g_num_threads.load(std::memory_order_relaxed);
  const int32_t n = set > 0 ? set : int32_t(std::thread::hardware_concurrency());
  return n < 1 ? 1 : n > kMaxWorkers ? kMaxWorkers : n;
}

int32_t max_workers() { return num_threads(); }

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
  } catch (const std::system_error&) {
    // No more threads to be had: those that started and this one do all the work.
  }
  work(0);
  for (int32_t i = 0; i < started; ++i) helpers[i].join();
}

}  // namespace mxflash
