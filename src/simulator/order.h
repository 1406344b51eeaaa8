// What each thread of a CTA may take for done: vector clocks. An access is in order only if everything that it meets
// has been made known to its thread, by barriers; whether it was also early enough in this run does not matter.
//
// Agents are threads, and for each warp the tensor work and the copies that it has issued. Tracked are accesses by
// ptx/*.cuh; those through plain pointers are not.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace mxflash::simulator {

using Clock = std::vector<uint32_t>;  // [agents]: how much of each is known

struct TouchedColumns {
  uint32_t first, count;
  bool written;
  const char* what;
};

class Order {
 public:
  Order(uint32_t threads, uint32_t shared_end);

  // At barriers. What a thread does after a release is not part of it.
  void release(uint32_t thread, Clock& to);
  void acquire(uint32_t thread, const std::shared_ptr<const Clock>& from);
  // All lanes of a warp meet.
  void meet(uint32_t warp);
  // All the tensor work that the thread's warp has issued, and what the thread knew.
  Clock tensor_release(uint32_t thread) const;
  static void join(Clock& to, const Clock& from);

  // Shared memory, by words of 4 bytes.
  void load(uint32_t thread, uint32_t word);
  void store(uint32_t thread, uint32_t word);
  // 16 bytes, by tensor work or a copy out of it, issued by this thread; tensor work: what tensor_work follows for.
  struct Copy {
    uint32_t agent, number;
  };
  Copy begin_copy(uint32_t thread);
  void copy_read(uint32_t thread, uint32_t piece, const Copy& copy, const char* what);
  void tensor_read(uint32_t thread, uint32_t piece, const char* what);
  // A copy into it.
  void copy(uint32_t thread, uint32_t first_word, uint32_t words, const Copy& copy, const char* what);
  // It has landed, or has read: known to who waits at a barrier, or to the thread itself.
  static void copy_release(const Copy& copy, Clock& to);
  void copy_acquire(uint32_t thread, const Copy& copy);

  // Tensor memory; lane 0 of a warp stands for all of it.
  void load_columns(uint32_t thread, uint32_t column, uint32_t count);
  void store_columns(uint32_t thread, uint32_t column, uint32_t count);
  void tensor_work(uint32_t thread, const std::vector<TouchedColumns>& touched);

 private:
  struct Event {
    uint32_t agent = 0, time = 0;
  };
  // Of other agents, shared by threads that know the same; and the thread's own time.
  struct Knowledge {
    std::shared_ptr<const Clock> others;
    uint32_t now = 1;
  };
  uint32_t tensor_agent(uint32_t thread) const { return threads_ + thread / 32; }
  uint32_t copy_agent(uint32_t thread) const { return threads_ + (threads_ + thread) / 32; }
  Event event(uint32_t thread) const { return {thread, known_[thread].now}; }
  bool knows(uint32_t thread, const Event& e) const {
    return e.agent == thread || e.time <= (*known_[thread].others)[e.agent];
  }
  // Fails unless what happened at a place, the last write or the last reads by warps, is known to be over.
  void check(uint32_t thread, const Event& e, const char* what, const char* place, uint32_t at, bool read) const;
  void check_reads(uint32_t thread, const std::vector<Event>& reads, uint32_t index, const char* what,
                   const char* place, uint32_t at) const;
  void check_overwrite(uint32_t thread, uint32_t word, const char* what) const;

  uint32_t threads_, warps_;
  std::vector<Knowledge> known_;                               // by threads
  std::vector<uint32_t> issued_, copied_;                      // by each warp
  std::vector<Event> piece_reads_, piece_copies_;              // the last read by tensor work, by copies
  std::vector<Event> words_;                                   // the last write
  std::vector<uint32_t> read_slots_;                           // of words that have been read, from 1 on
  std::vector<Event> word_reads_;                              // [slot][warp]: the last read
  std::vector<Event> cells_, cell_reads_, cell_tensor_reads_;  // the same of a column in a quarter of the lanes
  // The last join, and its result: the other lanes of a warp ask for the same.
  std::shared_ptr<const Clock> joined_[2], joined_result_;
};

}  // namespace mxflash::simulator
