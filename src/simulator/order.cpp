#include "simulator/order.h"

#include <algorithm>

#include "simulator/machine.h"

namespace mxflash::simulator {

void Order::join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

Order::Order(uint32_t warps, uint32_t shared_end)
    : warps_(warps),
      clocks_(warps, Clock(3 * warps)),
      issued_(warps),
      copied_(warps),
      piece_reads_(shared_end / 16 + 1),
      piece_copies_(piece_reads_.size()),
      words_(shared_end / 4 + 4),
      cells_(4 * kColumns),
      word_reads_(words_.size() * warps),
      cell_reads_(cells_.size() * warps),
      cell_tensor_reads_(cells_.size() * warps) {
  for (uint32_t w = 0; w < warps; ++w) clocks_[w][w] = 1;
}

void Order::release(uint32_t warp, Clock& to) {
  join(to, clocks_[warp]);
  ++clocks_[warp][warp];
}

void Order::acquire(uint32_t warp, const Clock& from) { join(clocks_[warp], from); }

Clock Order::tensor_release(uint32_t warp) const {
  Clock c = clocks_[warp];
  c[warps_ + warp] = issued_[warp];
  return c;
}

void Order::copy_release(const Copy& copy, Clock& to) {
  if (to.size() <= copy.agent) to.resize(copy.agent + 1);
  to[copy.agent] = std::max(to[copy.agent], copy.number);
}

void Order::check_done(uint32_t warp, const Event& w, const char* what, uint32_t at) const {
  if (knows(warp, w.agent, w.time)) return;
  constexpr const char* kBy[] = {"a store", "tensor work", "a copy"};
  fail("%s at %u: no barrier tells warp %u that %s by warp %u is done", what, at, warp, kBy[w.agent / warps_],
       w.agent % warps_);
}

void Order::check_reads(uint32_t warp, const uint32_t* times, uint32_t first_agent, const char* what,
                        uint32_t at) const {
  for (uint32_t w = 0; w < warps_; ++w) {
    if (knows(warp, first_agent + w, times[w])) continue;
    fail("%s at %u: no barrier tells warp %u that what warp %u%s reads there has been read", what, at, warp, w,
         first_agent ? "'s tensor work" : "");
  }
}

void Order::load(uint32_t warp, uint32_t word) {
  check_done(warp, words_[word], "load of shared memory", 4 * word);
  word_reads_[word * warps_ + warp] = now(warp);
}

void Order::store(uint32_t warp, uint32_t word) {
  constexpr const char* kWhat = "store to shared memory";
  check_done(warp, words_[word], kWhat, 4 * word);
  check_reads(warp, &word_reads_[word * warps_], 0, kWhat, 4 * word);
  check_done(warp, piece_reads_[word / 4], kWhat, 4 * word);
  check_done(warp, piece_copies_[word / 4], kWhat, 4 * word);
  words_[word] = {warp, now(warp)};
}

Order::Copy Order::begin_copy(uint32_t warp) { return {2 * warps_ + warp, ++copied_[warp]}; }

void Order::copy_acquire(uint32_t warp, const Copy& copy) { copy_release(copy, clocks_[warp]); }

void Order::copy_read(uint32_t warp, uint32_t piece, const Copy& copy, const char* what) {
  for (uint32_t word = 4 * piece; word < 4 * piece + 4; ++word) check_done(warp, words_[word], what, 4 * word);
  piece_copies_[piece] = {copy.agent, copy.number};
}

void Order::tensor_read(uint32_t warp, uint32_t piece, const char* what) {
  for (uint32_t word = 4 * piece; word < 4 * piece + 4; ++word) check_done(warp, words_[word], what, 4 * word);
  piece_reads_[piece] = {warps_ + warp, issued_[warp] + 1};
}

void Order::copy(uint32_t warp, uint32_t first_word, uint32_t words, const Copy& copy, const char* what) {
  for (uint32_t word = first_word; word < first_word + words; ++word) {
    check_done(warp, words_[word], what, 4 * word);
    check_reads(warp, &word_reads_[word * warps_], 0, what, 4 * word);
    check_done(warp, piece_reads_[word / 4], what, 4 * word);
    check_done(warp, piece_copies_[word / 4], what, 4 * word);
    words_[word] = {copy.agent, copy.number};
  }
}

void Order::load_columns(uint32_t warp, uint32_t column, uint32_t count) {
  for (uint32_t c = column; c < column + count; ++c) {
    const uint32_t cell = 4 * c + warp % 4;
    check_done(warp, cells_[cell], "tcgen05_ld of column", c);
    cell_reads_[cell * warps_ + warp] = now(warp);
  }
}

void Order::store_columns(uint32_t warp, uint32_t column, uint32_t count) {
  constexpr const char* kWhat = "tcgen05_st to column";
  for (uint32_t c = column; c < column + count; ++c) {
    const uint32_t cell = 4 * c + warp % 4;
    check_done(warp, cells_[cell], kWhat, c);
    check_reads(warp, &cell_reads_[cell * warps_], 0, kWhat, c);
    check_reads(warp, &cell_tensor_reads_[cell * warps_], warps_, kWhat, c);
    cells_[cell] = {warp, now(warp)};
  }
}

void Order::tensor_work(uint32_t warp, const std::vector<TouchedColumns>& touched) {
  const uint32_t time = ++issued_[warp];
  // Among work of one warp the machine itself keeps order (may_pass).
  uint32_t& own = clocks_[warp][warps_ + warp];
  const uint32_t known = own;
  own = time;
  for (const TouchedColumns& t : touched) {
    for (uint32_t cell = 4 * t.first; cell < 4 * (t.first + t.count); ++cell) {
      check_done(warp, cells_[cell], t.what, cell / 4);
      if (t.written) {
        check_reads(warp, &cell_reads_[cell * warps_], 0, t.what, cell / 4);
        check_reads(warp, &cell_tensor_reads_[cell * warps_], warps_, t.what, cell / 4);
        cells_[cell] = {warps_ + warp, time};
      } else {
        cell_tensor_reads_[cell * warps_ + warp] = time;
      }
    }
  }
  own = known;
}

}  // namespace mxflash::simulator
