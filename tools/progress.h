// Says on stderr what a command is busy with, but only once the command has taken two seconds: a short run prints
// nothing, a long one is never silent.
#pragma once

#include <chrono>
#include <condition_variable>
#include <iostream>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace mxflash::tools {

class Progress {
 public:
  Progress() : watcher_([this] { watch(); }) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    changed_.notify_one();
    watcher_.join();
  }

  // Begins the next phase, e.g. "exact attention (float64)".
  void phase(std::string text) {
    const std::lock_guard lock(mutex_);
    phase_ = std::move(text);
    if (speaking_) print();
  }

 private:
  static constexpr std::chrono::seconds kPatience{2};

  void watch() {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, kPatience, [this] { return done_; })) return;
    speaking_ = true;
    if (!phase_.empty()) print();
  }

  void print() const { std::cerr << "mxflash: " + phase_ + " ...\n" << std::flush; }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::string phase_;
  bool speaking_ = false;
  bool done_ = false;
  std::thread watcher_;  // last: it uses all of the above
};

}  // namespace mxflash::tools
