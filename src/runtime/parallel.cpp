// The threads of CPU backends, or the host's executor in their place. All state is static and never destroyed, so a
// call allocates nothing, and the end of the process finds nothing to wait for.
//
// Every helper thread has one word: how many loops it has finished ("round"), and its phase.
//   idle -> asleep                  the helper, after spinning in vain
//   idle, asleep -> claimed         a caller; it alone may then write what the helper is to do
//   claimed -> offered              the caller
//   offered -> running              the helper
//   offered -> idle                 the caller has done all items alone and takes the offer back
//   running -> awaited              the caller goes to sleep until the helper has finished
//   running, awaited -> idle        the helper, in the next round
// A caller waits only for helpers that are running its own loop. So nothing can deadlock, and helpers that do not exist
// (in a child process, for one) are only not used.
#include "runtime/parallel.h"

#include <dlfcn.h>
#include <mxflash/backend.h>
#include <pthread.h>
#include <signal.h>

#ifdef __linux__
#include <sched.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <thread>

namespace mxflash {
namespace {

constexpr int32_t kMaxWorkers = 256;
constexpr int32_t kMaxHelpers = kMaxWorkers - 1;
// Calls follow each other closely; a thread that sleeps takes some 50 us to wake up.
constexpr auto kSpin = std::chrono::microseconds(50);

constinit std::atomic<int32_t> g_num_threads{0};
constinit std::atomic<ParallelFor> g_executor_run{nullptr};
constinit std::atomic<void*> g_executor{nullptr};

// CPUs that this process may run on: containers and taskset give fewer than the machine has. The main thread's, because
// a host may pin others, and call us from them. Empty if not known.
#ifdef __linux__
cpu_set_t process_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(getpid(), sizeof set, &set) != 0) CPU_ZERO(&set);
  return set;
}
#endif

int32_t usable_cpus() {
#ifdef __linux__
  const cpu_set_t cpus = process_cpus();
  if (const int32_t n = CPU_COUNT(&cpus); n > 0) return n;
#endif
  return int32_t(std::thread::hardware_concurrency());
}

// ---- one call -----------------------------------------------------------------------------------------------------

// A host may round differently or flush subnormals, in some of its threads: results must not depend on that.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

struct Loop {
  LoopBody body;
  void* context;
  int64_t count;
  alignas(64) std::atomic<int64_t> next{0};

  void run(int32_t worker) {
    const DefaultFloatEnvironment environment;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(context, i, worker);
  }
};

void run_task(void* loop, int32_t index) { static_cast<Loop*>(loop)->run(index); }

// ---- helpers ------------------------------------------------------------------------------------------------------

enum Phase : uint32_t { kIdle, kAsleep, kClaimed, kOffered, kRunning, kAwaited };
constexpr uint32_t kRound = 8;  // the word is round * kRound + phase
constexpr uint32_t phase_of(uint32_t word) { return word % kRound; }
constexpr uint32_t round_of(uint32_t word) { return word - phase_of(word); }

struct alignas(64) Helper {
  std::atomic<uint32_t> word{kIdle};
  int32_t worker = 0;
  Loop* loop = nullptr;
};

constinit Helper g_helpers[kMaxHelpers];
constinit std::atomic<int32_t> g_started{0};  // the first so many have a thread
constinit std::atomic<bool> g_starting{false};
constinit bool g_prepared = false;  // under g_starting

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// Spins until done(word), at most for kSpin. Returns the word last seen.
template <class Done>
uint32_t spin(const std::atomic<uint32_t>& word, Done done) {
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < 32; ++i) {
      const uint32_t seen = word.load(std::memory_order_acquire);
      if (done(seen)) return seen;
      relax();
    }
  } while (std::chrono::steady_clock::now() - start < kSpin);
  return word.load(std::memory_order_acquire);
}

void* serve(void* argument) {
  Helper& me = *static_cast<Helper*>(argument);
  for (;;) {
    uint32_t word = spin(me.word, [](uint32_t w) { return phase_of(w) == kOffered; });
    const uint32_t round = round_of(word);
    if (phase_of(word) == kOffered) {
      if (!me.word.compare_exchange_strong(word, round + kRunning, std::memory_order_acquire)) continue;
      me.loop->run(me.worker);
      const uint32_t before = me.word.exchange(round + kRound + kIdle, std::memory_order_acq_rel);
      if (phase_of(before) == kAwaited) me.word.notify_one();
    } else if (phase_of(word) == kIdle) {
      if (me.word.compare_exchange_strong(word, round + kAsleep, std::memory_order_relaxed)) {
        me.word.wait(round + kAsleep, std::memory_order_relaxed);
      }
    }
  }
}

// Of all threads a child process has only the one that forked: it starts its own helpers. A new round ends every wait.
void forget_helpers() {
  for (Helper& h : g_helpers) h.word.store(round_of(h.word.load()) + kRound + kIdle);
  g_started = 0;
  g_starting = false;
}

// Helpers run this code until the process ends: it must stay mapped when a host closes the library.
void stay_loaded() {
  Dl_info self;
  if (dladdr(reinterpret_cast<void*>(&serve), &self) != 0 && self.dli_fname) {
    dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
  }
}

// One caller at a time; others make do with what there is.
void start_helpers(int32_t wanted) {
  if (g_started.load(std::memory_order_acquire) >= wanted) return;
  if (g_starting.exchange(true, std::memory_order_acquire)) return;
  if (!g_prepared) {
    stay_loaded();
    pthread_atfork(nullptr, nullptr, forget_helpers);
    g_prepared = true;
  }
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
#ifdef __linux__
  const cpu_set_t cpus = process_cpus();  // not the caller's
  if (CPU_COUNT(&cpus) > 0) pthread_attr_setaffinity_np(&attributes, sizeof cpus, &cpus);
#endif
  sigset_t all, mine;  // signals are for the host's threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &mine);
  for (int32_t i = g_started.load(std::memory_order_relaxed); i < wanted; ++i) {
    pthread_t thread;
    if (pthread_create(&thread, &attributes, serve, &g_helpers[i]) != 0) break;  // the others do all the work
    pthread_detach(thread);
    g_started.store(i + 1, std::memory_order_release);
  }
  pthread_sigmask(SIG_SETMASK, &mine, nullptr);
  pthread_attr_destroy(&attributes);
  g_starting.store(false, std::memory_order_release);
}

struct Claim {
  Helper* helper;
  uint32_t round;
};

// Offers the loop to at most `wanted` idle helpers, as workers 1, 2, ... . Returns how many.
int32_t offer(Loop& loop, int32_t wanted, Claim* claims) {
  const int32_t started = g_started.load(std::memory_order_acquire);
  int32_t count = 0;
  for (int32_t i = 0; i < started && count < wanted; ++i) {
    Helper& h = g_helpers[i];
    uint32_t word = h.word.load(std::memory_order_relaxed);
    bool mine = false;
    while (!mine && phase_of(word) <= kAsleep) {
      mine = h.word.compare_exchange_weak(word, round_of(word) + kClaimed, std::memory_order_acquire,
                                          std::memory_order_relaxed);
    }
    if (!mine) continue;
    claims[count++] = {&h, round_of(word)};
    h.loop = &loop;
    h.worker = count;
    h.word.store(round_of(word) + kOffered, std::memory_order_release);
    if (phase_of(word) == kAsleep) h.word.notify_one();
  }
  return count;
}

// No item is left: takes the offer back, or waits until the helper has finished.
void release(const Claim& claim) {
  std::atomic<uint32_t>& word = claim.helper->word;
  uint32_t seen = claim.round + kOffered;
  if (word.compare_exchange_strong(seen, claim.round + kIdle, std::memory_order_acq_rel)) return;
  seen = spin(word, [&](uint32_t w) { return round_of(w) != claim.round; });
  while (round_of(seen) == claim.round) {
    const uint32_t awaited = claim.round + kAwaited;
    if (seen == awaited || word.compare_exchange_strong(seen, awaited, std::memory_order_acquire)) {
      word.wait(awaited, std::memory_order_acquire);
      seen = word.load(std::memory_order_acquire);
    }
  }
}

}  // namespace

void set_num_threads(int32_t n) { g_num_threads.store(n < 0 ? 0 : n, std::memory_order_relaxed); }

int32_t num_threads() {
  const int32_t set = g_num_threads.load(std::memory_order_relaxed);
  const int32_t n = set > 0 ? set : usable_cpus();
  return n < 1 ? 1 : n > kMaxWorkers ? kMaxWorkers : n;
}

void set_parallel_for(ParallelFor run, void* executor) {
  g_executor.store(executor, std::memory_order_relaxed);
  g_executor_run.store(run, std::memory_order_release);
}

bool has_parallel_for() { return g_executor_run.load(std::memory_order_relaxed) != nullptr; }

void parallel_for(int64_t count, int32_t workers, LoopBody body, void* context) {
  Loop loop{.body = body, .context = context, .count = count};
  const auto useful = int32_t(std::min<int64_t>({count, workers, kMaxWorkers}));
  Claim claims[kMaxHelpers];
  int32_t helpers = 0;
  if (useful > 1) {
    if (const ParallelFor run = g_executor_run.load(std::memory_order_acquire)) {
      run(g_executor.load(std::memory_order_relaxed), useful, run_task, &loop);
    } else {
      start_helpers(useful - 1);
      helpers = offer(loop, useful - 1, claims);
    }
  }
  loop.run(0);  // after an executor there is nothing left, unless it dropped every task
  for (int32_t i = 0; i < helpers; ++i) release(claims[i]);
}

}  // namespace mxflash
