#include "simulator/order.h"

#include <algorithm>

#include "simulator/machine.h"

namespace mxflash::simulator {

void Order::join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

Order::Order(uint32_t threads, uint32_t shared_end)
    : threads_(threads),
      warps_(threads / 32),
      known_(threads, Knowledge{std::make_shared<Clock>(threads + 2 * warps_)}),
      issued_(warps_),
      copied_(warps_),
      piece_reads_(shared_end / 16 + 1),
      piece_copies_(piece_reads_.size()),
      words_(shared_end / 4 + 4),
      read_slots_(words_.size()),
      word_reads_(warps_),
      cells_(4 * kColumns),
      cell_reads_(cells_.size() * warps_),
      cell_tensor_reads_(cells_.size() * warps_) {}

void Order::release(uint32_t thread, Clock& to) {
  Knowledge& k = known_[thread];
  join(to, *k.others);
  to[thread] = std::max(to[thread], k.now);
  ++k.now;
}

void Order::acquire(uint32_t thread, const std::shared_ptr<const Clock>& from) {
  if (!from) return;
  std::shared_ptr<const Clock>& others = known_[thread].others;
  if (others != joined_[0] || from != joined_[1]) {
    auto result = std::make_shared<Clock>(*others);
    join(*result, *from);
    joined_[0] = others;
    joined_[1] = from;
    joined_result_ = std::move(result);
  }
  others = joined_result_;
}

void Order::meet(uint32_t warp) {
  auto all = std::make_shared<Clock>(*known_[32 * warp].others);
  const Clock* last = known_[32 * warp].others.get();
  for (uint32_t t = 32 * warp; t < 32 * warp + 32; ++t) {
    if (known_[t].others.get() != last) join(*all, *known_[t].others);
    last = known_[t].others.get();
  }
  for (uint32_t t = 32 * warp; t < 32 * warp + 32; ++t) (*all)[t] = known_[t].now++;
  for (uint32_t t = 32 * warp; t < 32 * warp + 32; ++t) known_[t].others = all;
}

Clock Order::tensor_release(uint32_t thread) const {
  Clock c = *known_[thread].others;
  c[thread] = known_[thread].now;
  c[tensor_agent(thread)] = issued_[thread / 32];
  return c;
}

void Order::copy_release(const Copy& copy, Clock& to) {
  if (to.size() <= copy.agent) to.resize(copy.agent + 1);
  to[copy.agent] = std::max(to[copy.agent], copy.number);
}

void Order::copy_acquire(uint32_t thread, const Copy& copy) {
  auto known = std::make_shared<Clock>(*known_[thread].others);
  copy_release(copy, *known);
  known_[thread].others = std::move(known);
}

Order::Copy Order::begin_copy(uint32_t thread) { return {copy_agent(thread), ++copied_[thread / 32]}; }

void Order::check(uint32_t thread, const Event& e, const char* what, const char* place, uint32_t at, bool read) const {
  if (knows(thread, e)) return;
  const bool tensor = e.agent >= threads_ && e.agent < threads_ + warps_;
  const bool copy = e.agent >= threads_ + warps_;
  const uint32_t warp = tensor ? e.agent - threads_ : copy ? e.agent - threads_ - warps_ : e.agent / 32;
  fail("%s: %s %u: no barrier tells this thread that %s there by warp %u is done", what, place, at,
       tensor ? "tensor work"
       : copy ? "a copy"
       : read ? "a load"
              : "a store",
       warp);
}

void Order::check_reads(uint32_t thread, const std::vector<Event>& reads, uint32_t index, const char* what,
                        const char* place, uint32_t at) const {
  for (uint32_t w = 0; w < warps_; ++w) check(thread, reads[index * warps_ + w], what, place, at, true);
}

void Order::check_overwrite(uint32_t thread, uint32_t word, const char* what) const {
  constexpr const char* kPlace = "shared address";
  check(thread, words_[word], what, kPlace, 4 * word, false);
  if (read_slots_[word]) check_reads(thread, word_reads_, read_slots_[word], what, kPlace, 4 * word);
  check(thread, piece_reads_[word / 4], what, kPlace, 4 * word, true);
  check(thread, piece_copies_[word / 4], what, kPlace, 4 * word, true);
}

void Order::load(uint32_t thread, uint32_t word) {
  check(thread, words_[word], "load", "shared address", 4 * word, false);
  uint32_t& slot = read_slots_[word];
  if (slot == 0) {
    slot = uint32_t(word_reads_.size() / warps_);
    word_reads_.resize(word_reads_.size() + warps_);
  }
  word_reads_[slot * warps_ + thread / 32] = event(thread);
}

void Order::store(uint32_t thread, uint32_t word) {
  check_overwrite(thread, word, "store");
  words_[word] = event(thread);
}

void Order::copy_read(uint32_t thread, uint32_t piece, const Copy& copy, const char* what) {
  for (uint32_t w = 4 * piece; w < 4 * piece + 4; ++w) check(thread, words_[w], what, "shared address", 4 * w, false);
  piece_copies_[piece] = {copy.agent, copy.number};
}

void Order::tensor_read(uint32_t thread, uint32_t piece, const char* what) {
  for (uint32_t w = 4 * piece; w < 4 * piece + 4; ++w) check(thread, words_[w], what, "shared address", 4 * w, false);
  piece_reads_[piece] = {tensor_agent(thread), issued_[thread / 32] + 1};
}

void Order::copy(uint32_t thread, uint32_t first_word, uint32_t words, const Copy& copy, const char* what) {
  for (uint32_t word = first_word; word < first_word + words; ++word) {
    check_overwrite(thread, word, what);
    words_[word] = {copy.agent, copy.number};
  }
}

void Order::load_columns(uint32_t thread, uint32_t column, uint32_t count) {
  for (uint32_t c = column; c < column + count; ++c) {
    const uint32_t cell = 4 * c + thread / 32 % 4;
    check(thread, cells_[cell], "tcgen05_ld", "column", c, false);
    cell_reads_[cell * warps_ + thread / 32] = event(thread);
  }
}

void Order::store_columns(uint32_t thread, uint32_t column, uint32_t count) {
  constexpr const char* kWhat = "tcgen05_st";
  for (uint32_t c = column; c < column + count; ++c) {
    const uint32_t cell = 4 * c + thread / 32 % 4;
    check(thread, cells_[cell], kWhat, "column", c, false);
    check_reads(thread, cell_reads_, cell, kWhat, "column", c);
    check_reads(thread, cell_tensor_reads_, cell, kWhat, "column", c);
    cells_[cell] = event(thread);
  }
}

void Order::tensor_work(uint32_t thread, const std::vector<TouchedColumns>& touched) {
  const Event work{tensor_agent(thread), ++issued_[thread / 32]};
  // Among work of one thread the machine itself keeps order (may_pass).
  const auto check_others = [&](const Event& e, const char* what, uint32_t column, bool read) {
    if (e.agent != work.agent) check(thread, e, what, "column", column, read);
  };
  for (const TouchedColumns& t : touched) {
    for (uint32_t cell = 4 * t.first; cell < 4 * (t.first + t.count); ++cell) {
      check_others(cells_[cell], t.what, cell / 4, false);
      if (t.written) {
        for (uint32_t w = 0; w < warps_; ++w) {
          check_others(cell_reads_[cell * warps_ + w], t.what, cell / 4, true);
          check_others(cell_tensor_reads_[cell * warps_ + w], t.what, cell / 4, true);
        }
        cells_[cell] = work;
      } else {
        cell_tensor_reads_[cell * warps_ + thread / 32] = work;
      }
    }
  }
}

}  // namespace mxflash::simulator
