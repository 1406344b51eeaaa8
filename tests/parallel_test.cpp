// The parallel loop: every item once, in an order that items may rely on, whoever calls it, and in a forked child too.
#include "runtime/parallel.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <thread>
#include <vector>

namespace mxflash {
namespace {

using Clock = std::chrono::steady_clock;

class Parallel : public testing::Test {
 protected:
  void TearDown() override {
    set_num_threads(0);
    set_parallel_for(nullptr, nullptr);
  }
};

// Runs a loop and checks what holds for every loop.
void expect_loop(int64_t count, int32_t workers) {
  const auto items = size_t(std::max<int64_t>(count, 0)), threads = size_t(workers);
  std::vector<std::atomic<int32_t>> times(items);
  std::vector<std::atomic<bool>> busy(threads);
  std::vector<int64_t> last(threads, -1);
  std::atomic<int32_t> wrong_workers{0}, shared{0}, unordered{0};
  parallel_for(count, workers, [&](int64_t item, int32_t worker) {
    if (worker < 0 || worker >= workers) {
      ++wrong_workers;
      return;
    }
    shared += busy[size_t(worker)].exchange(true);
    unordered += item <= last[size_t(worker)];
    last[size_t(worker)] = item;
    ++times[size_t(item)];
    busy[size_t(worker)] = false;
  });
  EXPECT_EQ(wrong_workers, 0);
  EXPECT_EQ(shared, 0) << "two bodies at a time with one worker number";
  EXPECT_EQ(unordered, 0) << "a worker got a lower item after a higher one";
  EXPECT_TRUE(std::all_of(times.begin(), times.end(), [](const auto& n) { return n == 1; }));
}

// Every item waits for the one before it: with any other order of handing out, or an item handed to a thread that does
// not run yet, this would not end.
void expect_chain_ends(int64_t count, int32_t workers) {
  std::atomic<int64_t> done{0};
  parallel_for(count, workers, [&](int64_t item, int32_t) {
    while (done.load() < item) std::this_thread::yield();
    done.store(item + 1);
  });
  EXPECT_EQ(done, count);
}

TEST_F(Parallel, EveryItemOnceByWorkersOfTheirOwn) {
  for (const int32_t workers : {1, 2, 3, 8, 64}) {
    for (const int64_t count : {0, 1, 2, 3, 63, 1000}) {
      SCOPED_TRACE(testing::Message() << count << " items, " << workers << " workers");
      expect_loop(count, workers);
    }
  }
  expect_loop(-1, 4);
  expect_loop(5000, 1000);
}

TEST_F(Parallel, AnItemMayWaitForALowerOne) {
  for (const int32_t workers : {1, 2, 5, 16}) expect_chain_ends(300, workers);
}

// Two items that wait for each other need a helper; it may be late, so the first gives up only after a while.
bool has_helpers() {
  std::atomic<int32_t> there{0};
  std::atomic<bool> met{false};
  parallel_for(2, 2, [&](int64_t, int32_t) {
    ++there;
    const auto start = Clock::now();
    while (there < 2 && Clock::now() - start < std::chrono::seconds(10)) std::this_thread::yield();
    if (there == 2) met = true;
  });
  return met;
}

TEST_F(Parallel, HelpersReallyHelp) {
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(has_helpers());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // they are asleep now
  EXPECT_TRUE(has_helpers());
}

TEST_F(Parallel, Nested) {
  for (int round = 0; round < 20; ++round) {
    std::atomic<int64_t> sum{0};
    parallel_for(7, 4, [&](int64_t i, int32_t) {
      parallel_for(5, 3, [&](int64_t j, int32_t) {
        parallel_for(3, 8, [&](int64_t k, int32_t) { sum += 100 * i + 10 * j + k; });
      });
    });
    EXPECT_EQ(sum, 100 * 21 * 15 + 10 * 10 * 21 + 3 * 35);
  }
}

TEST_F(Parallel, ManyHostThreadsAtATimeWhileTheNumberOfThreadsChanges) {
  std::vector<std::thread> hosts;
  std::atomic<int32_t> wrong{0};
  for (int host = 0; host < 8; ++host) {
    hosts.emplace_back([&, host] {
      for (int64_t round = 0; round < 300; ++round) {
        if (host == 0) set_num_threads(int32_t(1 + round % 7));
        std::atomic<int64_t> sum{0};
        parallel_for(50, num_threads(), [&](int64_t item, int32_t) { sum += item; });
        wrong += sum != 1225;
        if (round % 50 == 0) expect_chain_ends(20, num_threads());
      }
    });
  }
  for (std::thread& t : hosts) t.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(Parallel, ChangingTheNumberOfThreadsWithinALoop) {
  for (const int32_t n : {1, 9, 2, 17, 3}) {
    set_num_threads(n);
    EXPECT_EQ(num_threads(), n);
    std::atomic<int64_t> sum{0};
    parallel_for(40, n, [&](int64_t item, int32_t) {
      set_num_threads(int32_t(1 + item % 5));
      parallel_for(4, num_threads(), [&](int64_t inner, int32_t) { sum += item + inner; });
    });
    EXPECT_EQ(sum, 4 * 780 + 40 * 6);
  }
}

// 20 us each on a machine with nothing else to do would be a fifth of a second.
TEST_F(Parallel, TinyLoopsAreCheap) {
  std::atomic<int64_t> sum{0};
  const auto start = Clock::now();
  for (int i = 0; i < 10000; ++i) parallel_for(2, 2, [&](int64_t item, int32_t) { sum += item; });
  EXPECT_LT(std::chrono::duration<double>(Clock::now() - start).count(), 10);
  EXPECT_EQ(sum, 10000);
}

TEST_F(Parallel, IdleHelpersUseNoCpu) {
  parallel_for(8, 8, [](int64_t, int32_t) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto cpu_seconds = [] {
    rusage use{};
    getrusage(RUSAGE_SELF, &use);
    return double(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           1e-6 * double(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
  };
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(cpu_seconds() - before, 0.1);
}

// The host rounds upward, in the caller or where it makes threads: bodies do not, and the caller still does afterwards.
TEST_F(Parallel, BodiesSeeTheDefaultFloatEnvironment) {
  ASSERT_EQ(std::fesetround(FE_UPWARD), 0);
  std::atomic<int32_t> wrong{0};
  for (const int32_t workers : {1, 2, 20}) {  // 20: more than were started before
    parallel_for(100, workers, [&](int64_t, int32_t) { wrong += std::fegetround() != FE_TONEAREST; });
  }
  const int after = std::fegetround();
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(after, FE_UPWARD);
}

// ---- executors ----------------------------------------------------------------------------------------------------

// What executors were asked to do.
struct Asked {
  std::atomic<int32_t> calls{0}, tasks{0};
};
void note(void* asked, int32_t count) {
  ++static_cast<Asked*>(asked)->calls;
  static_cast<Asked*>(asked)->tasks += count;
}

void in_order(void* asked, int32_t count, ParallelTask task, void* context) {
  note(asked, count);
  for (int32_t i = 0; i < count; ++i) task(context, i);
}
void backwards(void* asked, int32_t count, ParallelTask task, void* context) {
  note(asked, count);
  for (int32_t i = count - 1; i >= 0; --i) task(context, i);
}
void on_new_threads(void* asked, int32_t count, ParallelTask task, void* context) {
  note(asked, count);
  std::vector<std::thread> threads;
  for (int32_t i = 0; i < count; ++i) threads.emplace_back(task, context, i);
  for (std::thread& t : threads) t.join();
}
void never(void* asked, int32_t count, ParallelTask, void*) { note(asked, count); }

TEST_F(Parallel, ExecutorsRunEverything) {
  EXPECT_FALSE(has_parallel_for());
  for (const ParallelFor run : {in_order, backwards, on_new_threads, never}) {
    Asked asked;
    set_parallel_for(run, &asked);
    EXPECT_TRUE(has_parallel_for());
    expect_loop(100, 4);
    expect_loop(3, 8);
    EXPECT_EQ(asked.calls, 2);
    EXPECT_EQ(asked.tasks, 4 + 3) << "no more tasks than workers or items";
    expect_loop(1, 8);
    expect_loop(100, 1);
    EXPECT_EQ(asked.calls, 2) << "one worker needs no executor";
    expect_chain_ends(100, 4);
    std::atomic<int64_t> sum{0};
    parallel_for(4, 2, [&](int64_t i, int32_t) { parallel_for(3, 2, [&](int64_t j, int32_t) { sum += 3 * i + j; }); });
    EXPECT_EQ(sum, 66);
    set_parallel_for(nullptr, nullptr);
  }
  EXPECT_FALSE(has_parallel_for());
  expect_loop(100, 4);
}

// ---- processes ----------------------------------------------------------------------------------------------------

#ifndef __SANITIZE_THREAD__  // it gives up in a forked child that starts threads

// Runs child() in a forked process, which must end with 0 within 30 seconds.
template <class Child>
void expect_child_succeeds(Child child) {
  const pid_t pid = fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    alarm(30);
    child();
  }
  int state = 0;
  ASSERT_EQ(waitpid(pid, &state, 0), pid);
  EXPECT_TRUE(WIFEXITED(state)) << "signal " << WTERMSIG(state);
  EXPECT_EQ(WEXITSTATUS(state), 0);
}

int64_t sum_of_loop(int32_t workers) {
  std::atomic<int64_t> sum{0};
  parallel_for(100, workers, [&](int64_t item, int32_t) { sum += item; });
  return sum;
}

TEST_F(Parallel, AForkedChildStartsItsOwnHelpersAndEnds) {
  for (const bool asleep : {false, true}) {
    sum_of_loop(4);
    if (asleep) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    expect_child_succeeds([] {
      const bool good = has_helpers() && sum_of_loop(8) == 4950;
      std::exit(good ? 0 : 1);  // static destructors and all
    });
  }
  EXPECT_EQ(sum_of_loop(4), 4950);
}

TEST_F(Parallel, AChildForkedWhileOthersAreInLoops) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> hosts;
  for (int i = 0; i < 2; ++i) {
    hosts.emplace_back([&] {
      while (!stop) sum_of_loop(3);
    });
  }
  for (int i = 0; i < 20; ++i) expect_child_succeeds([] { _exit(sum_of_loop(4) == 4950 && has_helpers() ? 0 : 1); });
  stop = true;
  for (std::thread& t : hosts) t.join();
}

// Not that one should: but it ends.
TEST_F(Parallel, AChildForkedWithinALoop) {
  std::atomic<bool> forked{false};
  parallel_for(2, 2, [&](int64_t, int32_t worker) {
    while (worker != 0 && !forked) std::this_thread::yield();  // so that the caller gets an item
    if (worker == 0 && !forked) {
      expect_child_succeeds([] { _exit(sum_of_loop(4) == 4950 ? 0 : 1); });
      forked = true;
    }
  });
  EXPECT_TRUE(forked);
}

#ifndef __SANITIZE_ADDRESS__
TEST_F(Parallel, WithoutMemoryForThreadsTheCallerDoesTheWork) {
  expect_child_succeeds([] {
    const rlimit none{0, 0};  // no new mapping, so no stack for a thread beyond those that glibc has kept
    if (setrlimit(RLIMIT_AS, &none) != 0) _exit(2);
    _exit(sum_of_loop(200) == 4950 && sum_of_loop(200) == 4950 ? 0 : 1);
  });
}
#endif

TEST_F(Parallel, ExitWhileHelpersSpinOrWork) {
  for (int i = 0; i < 20; ++i) {
    expect_child_succeeds([] {
      if (sum_of_loop(4) != 4950) _exit(1);
      std::exit(0);
    });
  }
  expect_child_succeeds([] {
    std::thread([] {
      for (;;) sum_of_loop(3);
    }).detach();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::exit(0);
  });
}
#endif

}  // namespace
}  // namespace mxflash
