// What each warp of a CTA may take for done: vector clocks. An access is in order only if everything that it meets has
// been made known to its warp, by barriers; whether it was also early enough in this run does not matter.
//
// Agents are warps, and for each the tensor cores and the copies that it has set to work. A thread's accesses count as
// its warp's. Tracked are accesses by ptx/*.cuh; those through plain pointers are not.
#pragma once

#include <cstdint>
#include <vector>

namespace mxflash::simulator {

using Clock = std::vector<uint32_t>;  // [agents]: how far each is known

struct TouchedColumns {
  uint32_t first, count;
  bool written;
  const char* what;
};

class Order {
 public:
  Order(uint32_t warps, uint32_t shared_end);

  // At barriers. What a warp does after a release is not part of it.
  void release(uint32_t warp, Clock& to);
  void acquire(uint32_t warp, const Clock& from);
  // All that the warp has set its tensor cores to, and what it knew.
  Clock tensor_release(uint32_t warp) const;
  static void join(Clock& to, const Clock& from);

  // Shared memory, by words of 4 bytes.
  void load(uint32_t warp, uint32_t word);
  void store(uint32_t warp, uint32_t word);
  // 16 bytes, by tensor cores or a copy out of it, set to work by this warp; of tensor cores, by the work that
  // tensor_work will be called for next.
  struct Copy {
    uint32_t agent, number;
  };
  Copy begin_copy(uint32_t warp);
  void copy_read(uint32_t warp, uint32_t piece, const Copy& copy, const char* what);
  void tensor_read(uint32_t warp, uint32_t piece, const char* what);
  // A copy into it.
  void copy(uint32_t warp, uint32_t first_word, uint32_t words, const Copy& copy, const char* what);
  // It has landed, or has read: known to who waits at a barrier, or to the warp itself.
  static void copy_release(const Copy& copy, Clock& to);
  void copy_acquire(uint32_t warp, const Copy& copy);

  // Tensor memory.
  void load_columns(uint32_t warp, uint32_t column, uint32_t count);
  void store_columns(uint32_t warp, uint32_t column, uint32_t count);
  void tensor_work(uint32_t warp, const std::vector<TouchedColumns>& touched);

 private:
  struct Event {
    uint32_t agent = 0, time = 0;
  };
  bool knows(uint32_t warp, uint32_t agent, uint32_t time) const { return time <= clocks_[warp][agent]; }
  void check_done(uint32_t warp, const Event& e, const char* what, uint32_t at) const;
  void check_reads(uint32_t warp, const uint32_t* times, uint32_t first_agent, const char* what, uint32_t at) const;
  uint32_t now(uint32_t warp) const { return clocks_[warp][warp]; }

  uint32_t warps_;
  std::vector<Clock> clocks_;                      // of warps
  std::vector<uint32_t> issued_, copied_;          // by each warp
  std::vector<Event> piece_reads_, piece_copies_;  // the last read by tensor cores, by copies
  std::vector<Event> words_, cells_;               // the last write; a cell is a column of a quarter of the lanes
  std::vector<uint32_t> word_reads_;               // [word][warp]: the last
  std::vector<uint32_t> cell_reads_, cell_tensor_reads_;  // [cell][warp]
};

}  // namespace mxflash::simulator
