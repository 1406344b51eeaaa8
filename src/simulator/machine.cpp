// The simulated machine: its schedule, and the rules of barriers, copies and shared memory. Tensor cores are in
// tensor_core.cpp.
#include "simulator/machine.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "simulator/cuda_builtins.h"

namespace mxflash::simulator {

Machine* machine = nullptr;

void fail(const char* format, ...) {
  char text[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::string what = text;
  if (const Thread* t = machine->current) {
    what += " (CTA " + std::to_string(t->cta->index) + ", warp " + std::to_string(t->warp()) + ", lane " +
            std::to_string(t->lane()) + ")";
  }
  throw Failure{what};
}

uint32_t Machine::random() {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return uint32_t(random_state >> 33);
}

bool Cta::finished() const {
  return std::all_of(threads.begin(), threads.end(), [](const Thread& t) { return t.done; });
}

namespace {

std::string name(uint32_t address) {
  const uint32_t offset = address - kSharedBase;
  if (machine->launch.name_of) {
    if (std::string known = machine->launch.name_of(offset); !known.empty()) return known;
  }
  return "shared memory + " + std::to_string(offset);
}

// ---- schedule -------------------------------------------------------------------------------------------------------

// All of a thread's groups but its last ones have read what they store, or are complete.
bool groups_done(const Thread& t, uint32_t but, bool only_reading) {
  for (size_t i = 0; i + but < t.groups.size(); ++i) {
    if ((only_reading ? t.groups[i]->reading : t.groups[i]->running) > 0) return false;
  }
  return true;
}

bool ready(const Thread& t) {
  Cta& c = *t.cta;
  const Wait& w = t.wait;
  switch (w.kind) {
    case WaitFor::nothing: return true;
    case WaitFor::mbarrier: return (c.barriers.at(w.what).phase & 1) != w.phase;
    case WaitFor::named_barrier: return c.named[w.what].generation != w.phase;
    case WaitFor::warp: return c.warps[w.what].generation != w.phase;
    case WaitFor::bulk_groups: return groups_done(t, w.what, w.phase != 0);
  }
  return true;
}

std::string describe(const Thread& t) {
  const Cta& c = *t.cta;
  const Wait& w = t.wait;
  char text[300];
  switch (w.kind) {
    case WaitFor::nothing: return "runs";
    case WaitFor::mbarrier: {
      const Barrier& b = c.barriers.at(w.what);
      snprintf(text, sizeof text,
               "waits for the phase of parity %u of mbarrier %s (phase %u, %u of %u arrivals missing, "
               "%lld bytes missing)",
               w.phase, name(w.what).c_str(), b.phase, b.pending, b.arrivals, static_cast<long long>(b.bytes));
      return text;
    }
    case WaitFor::named_barrier: {
      const NamedBarrier& b = c.named[w.what];
      snprintf(text, sizeof text, "waits at named barrier %u (%u of %u threads are there)", w.what, b.arrived,
               b.threads);
      return text;
    }
    case WaitFor::warp: {
      const Warp& b = c.warps[w.what];
      snprintf(text, sizeof text, "waits in %s (%u of 32 lanes are there)", b.what, b.arrived);
      return text;
    }
    case WaitFor::bulk_groups: return "waits for its bulk groups";
  }
  return "";
}

std::string deadlock() {
  std::string text = "nothing moves any more:";
  for (const auto& c : machine->ctas) {
    std::map<std::pair<uint32_t, std::string>, uint32_t> waiting;  // (warp, what) -> lanes
    for (const Thread& t : c->threads) {
      if (!t.done) ++waiting[{t.warp(), describe(t)}];
    }
    for (const auto& [who, lanes] : waiting) {
      text += "\n  CTA " + std::to_string(c->index) + ", warp " + std::to_string(who.first) + ", " +
              std::to_string(lanes) + " lanes: " + who.second;
    }
  }
  return text;
}

void resume(Thread& t) {
  machine->current = &t;
  threadIdx = {t.index, 0, 0};
  blockIdx = {t.cta->index, 0, 0};
  t.wait.kind = WaitFor::nothing;
  t.fiber.resume();
  machine->current = nullptr;
}

void tensor_step(Cta& c) {
  size_t pick = 0;
  if (machine->launch.mode == Mode::reordered) {
    constexpr size_t kAhead = 48;
    std::vector<size_t> candidates;
    for (size_t i = 0; i < std::min(c.tensor_queue.size(), kAhead); ++i) {
      bool may = true;
      for (size_t k = 0; k < i && may; ++k) may = may_pass(c.tensor_queue[k], c.tensor_queue[i]);
      if (may) candidates.push_back(i);
    }
    // Half of the time the one that overtakes most.
    pick = machine->random(2) ? candidates.back() : candidates[machine->random(uint32_t(candidates.size()))];
  }
  const TensorWork work = c.tensor_queue[pick];
  c.tensor_queue.erase(c.tensor_queue.begin() + std::ptrdiff_t(pick));
  execute(c, work);
}

void copy_step(Cta& c) {
  const size_t pick = machine->random(uint32_t(c.copy_queue.size()));
  const std::function<void()> copy = std::move(c.copy_queue[pick]);
  c.copy_queue.erase(c.copy_queue.begin() + std::ptrdiff_t(pick));
  copy();
}

// Whether there was anything to do.
bool engines(Cta& c, bool at_once) {
  bool moved = false;
  if (!c.tensor_queue.empty() && (at_once || machine->random(c.tensor_pace) == 0)) {
    tensor_step(c);
    moved = true;
  }
  if (!c.copy_queue.empty() && (at_once || machine->random(3) == 0)) {
    copy_step(c);
    moved = true;
  }
  return moved;
}

void check_exit(Cta& c) {
  if (!c.tensor_queue.empty()) fail("CTA %u ended with tcgen05 work or commits on their way", c.index);
  if (std::any_of(c.allocated.begin(), c.allocated.end(), [](bool b) { return b; })) {
    fail("CTA %u ended without tcgen05_dealloc", c.index);
  }
  for (const Thread& t : c.threads) {
    if (!groups_done(t, 0, true) || (t.open_group && t.open_group->reading > 0)) {
      fail("CTA %u ended while bulk copies of warp %u still read its shared memory", c.index, t.warp());
    }
  }
  for (const auto& [address, b] : c.barriers) {
    if (b.bytes != 0) fail("CTA %u ended while copies to its shared memory were on their way", c.index);
    // It may still be on its way on a card, whatever else is known to be done.
    if (b.unseen_commit || b.next_commit) {
      fail("CTA %u ended, and nobody has waited for a tcgen05_commit at mbarrier %s", c.index, name(address).c_str());
    }
  }
  for (size_t w = 0; w < c.warps.size(); ++w) {
    for (uint32_t lane = 1; lane < 32; ++lane) {
      if (c.threads[32 * w + lane].history != c.threads[32 * w].history) {
        fail("lanes of warp %zu of CTA %u did not run the same .aligned instructions", w, c.index);
      }
    }
  }
}

std::unique_ptr<Cta> make_cta(uint32_t index, const std::function<void()>& kernel, std::string& error) {
  const Launch& l = machine->launch;
  auto c = std::make_unique<Cta>();
  c->index = index;
  c->shared_end = kSharedBase + uint32_t(l.shared_bytes);
  c->shared.assign(c->shared_end + 1024, uint8_t(kPoison));
  c->base = c->shared.data() + (1024 - reinterpret_cast<uintptr_t>(c->shared.data()) % 1024) % 1024;
  c->writer.assign(c->shared_end / 4 + 1, -1);
  c->readers.assign(c->shared_end / 16 + 1, 0);
  c->incoming.assign(c->shared_end / 16 + 1, 0);
  c->has_barrier.assign(c->shared_end / 8 + 1, 0);
  c->tensor.assign(kLanes * kColumns, kPoison);
  c->warps.resize(l.threads / 32);
  c->order = std::make_unique<Order>(l.threads, c->shared_end);
  if (machine->deferred()) {
    constexpr uint32_t kPaces[] = {2, 12, 48};  // tensor cores fast, balanced, slow
    c->tensor_pace = kPaces[machine->random(3)];
    for (Warp& w : c->warps) w.elected = machine->random(32);
  }
  c->threads.reserve(l.threads);
  for (uint32_t i = 0; i < l.threads; ++i) {
    Thread& t = c->threads.emplace_back(Thread{c.get(), i});
    t.fiber.start([&t, &kernel, &error] {
      try {
        kernel();
      } catch (const Failure& f) {
        if (error.empty()) error = f.what;
      }
      t.done = true;
    });
  }
  return c;
}

// One turn of all warps of a CTA. Whether a thread ran.
bool turn(Cta& c, bool may_stall, bool& stalled, const std::string& error) {
  bool ran = false;
  const auto warps = uint32_t(c.warps.size());
  const uint32_t first = may_stall ? machine->random(warps) : 0;
  for (uint32_t i = 0; i < warps; ++i) {
    const uint32_t w = (first + i) % warps;
    if (may_stall && machine->random(3) == 0) {
      stalled = true;
    } else {
      const uint32_t flip = may_stall && machine->random(2) ? 31 : 0;
      for (uint32_t lane = 0; lane < 32; ++lane) {
        Thread& t = c.threads[32 * w + (lane ^ flip)];
        if (t.done || !ready(t)) continue;
        resume(t);
        ran = true;
        if (!error.empty()) return true;
      }
    }
    if (machine->deferred() && engines(c, false)) ran = true;
  }
  return ran;
}

}  // namespace

std::string run(const Launch& launch, const std::function<void()>& kernel) {
  Machine m{.launch = launch, .random_state = launch.seed * 2654435761u + 12345, .ctas = {}};
  machine = &m;
  gridDim = {launch.grid, 1, 1};
  blockDim = {launch.threads, 1, 1};
  std::string error;
  uint32_t next = 0;
  try {
    if (launch.threads == 0 || launch.threads % 32 != 0 || launch.threads > 1024) {
      fail("threads must be a multiple of 32 up to 1024, got %u", launch.threads);
    }
    if (launch.shared_bytes > 227 * 1024) {
      fail("shared memory must be at most 227 KiB, got %zu bytes", launch.shared_bytes);
    }
    while (error.empty() && (next < launch.grid || !m.ctas.empty())) {
      while (next < launch.grid && m.ctas.size() < std::max(launch.ctas_at_once, 1u)) {
        m.ctas.push_back(make_cta(next++, kernel, error));
      }
      bool moved = false, stalled = false;
      for (const auto& c : m.ctas) {
        if (turn(*c, m.deferred(), stalled, error)) moved = true;
        if (!error.empty()) break;
      }
      if (!error.empty()) break;
      if (!moved && !stalled) {
        for (const auto& c : m.ctas) moved |= engines(*c, true);
        if (!moved && std::none_of(m.ctas.begin(), m.ctas.end(), [](const auto& c) { return c->finished(); })) {
          throw Failure{deadlock()};
        }
      }
      std::erase_if(m.ctas, [](const std::unique_ptr<Cta>& c) {
        if (!c->finished()) return false;
        check_exit(*c);
        while (!c->copy_queue.empty()) copy_step(*c);  // what has been read arrives in global memory
        return true;
      });
    }
  } catch (const Failure& f) {
    if (error.empty()) error = f.what;
  }
  m.ctas.clear();
  machine = nullptr;
  return error;
}

uint64_t seeds(uint64_t few) {
  const char* soak = std::getenv("MXFLASH_SIM_SOAK");
  const uint64_t times = soak ? std::strtoull(soak, nullptr, 10) : 1;
  return few * std::max<uint64_t>(times, 1);
}

void wait(WaitFor kind, uint32_t what, uint32_t phase) {
  Thread& t = self();
  t.wait = {kind, what, phase};
  // Threads that need not wait go on most of the time; a machine that stalls warps switches now and then.
  if (!ready(t) || (machine->deferred() && kind == WaitFor::mbarrier && machine->random(4) == 0)) {
    t.fiber.switch_back();
  }
  t.wait.kind = WaitFor::nothing;
}

const std::array<uint64_t, 32>& exchange(const char* what, uint64_t value) {
  Thread& t = self();
  Warp& w = t.cta->warps[t.warp()];
  if (w.arrived == 0) {
    w.what = what;
  } else if (strcmp(w.what, what) != 0) {
    fail("lanes of a warp meet in %s and in %s", w.what, what);
  }
  const uint32_t generation = w.generation;
  w.values[generation % 2][t.lane()] = value;
  w.history[t.lane()] = t.history;
  if (++w.arrived == 32) {
    for (uint32_t lane = 1; lane < 32; ++lane) {
      if (w.history[lane] != w.history[0])
        fail("lanes of a warp did not run the same .aligned instructions before %s", what);
    }
    w.arrived = 0;
    ++w.generation;
    t.cta->order->meet(t.warp());
  } else {
    wait(WaitFor::warp, t.warp(), generation);
  }
  return w.values[generation % 2];
}

void aligned(const char* what, uint64_t operands) {
  uint64_t h = self().history ^ operands;
  for (const char* c = what; *c; ++c) h = (h ^ uint64_t(uint8_t(*c))) * 1099511628211u;
  self().history = h;
}

bool before_arrival(const char* what) {
  Thread& t = self();
  if (t.needs_fence_before) fail("%s after tcgen05_wait_ld or _st without tcgen05_fence_before_thread_sync", what);
  return t.did_tensor_work;
}

// ---- shared memory --------------------------------------------------------------------------------------------------

uint8_t* shared_pointer(Cta& c, uint32_t address, uint32_t bytes, const char* what) {
  if (address < kSharedBase || address + uint64_t(bytes) > c.shared_end) {
    fail("%s of %u bytes at shared address %u, outside of [%u, %u)", what, bytes, address, kSharedBase, c.shared_end);
  }
  return c.base + address;
}

namespace {

void check_no_barrier(Cta& c, uint32_t address, uint32_t bytes, const char* what) {
  for (uint32_t b = address / 8; b < (address + bytes + 7) / 8; ++b) {
    if (c.has_barrier[b]) fail("%s over mbarrier %s", what, name(8 * b).c_str());
  }
}

}  // namespace

void store(uint32_t address, const void* from, uint32_t bytes) {
  Thread& t = self();
  if (address % bytes) fail("store of %u bytes at shared address %u is not aligned", bytes, address);
  memcpy(shared_pointer(*t.cta, address, bytes, "store"), from, bytes);
  check_no_barrier(*t.cta, address, bytes, "store");
  if (t.cta->readers[address / 16]) fail("store at shared address %u: tcgen05 work or a copy still reads it", address);
  if (t.cta->incoming[address / 16]) fail("store at shared address %u: a copy is on its way there", address);
  for (uint32_t w = address / 4; w < (address + bytes + 3) / 4; ++w) {
    t.cta->order->store(t.index, w);
    if (t.cta->writer[w] == int16_t(t.index)) continue;
    t.cta->writer[w] = int16_t(t.index);
    t.unfenced.push_back(w);
  }
}

void load(uint32_t address, void* to, uint32_t bytes) {
  if (address % bytes) fail("load of %u bytes at shared address %u is not aligned", bytes, address);
  memcpy(to, shared_pointer(cta(), address, bytes, "load"), bytes);
  if (cta().incoming[address / 16]) fail("load at shared address %u: a copy is on its way there", address);
  for (uint32_t w = address / 4; w < (address + bytes + 3) / 4; ++w) cta().order->load(self().index, w);
}

void claim_read(uint32_t piece, const char* what) {
  Cta& c = cta();
  shared_pointer(c, 16 * piece, 16, what);
  for (uint32_t w = 4 * piece; w < 4 * piece + 4; ++w) {
    if (c.writer[w] >= 0) {
      fail("%s at shared address %u: thread %d stored there without fence_proxy_async", what, 4 * w, c.writer[w]);
    }
  }
  if (c.incoming[piece]) fail("%s at shared address %u: a copy is still on its way there", what, 16 * piece);
  ++c.readers[piece];
}

void release_read(Cta& c, uint32_t piece) { --c.readers[piece]; }

void fence_proxy_async() {
  Thread& t = self();
  for (const uint32_t w : t.unfenced) {
    if (t.cta->writer[w] == int16_t(t.index)) t.cta->writer[w] = -1;
  }
  t.unfenced.clear();
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------

Barrier& barrier_at(Cta& c, uint32_t bar, const char* what) {
  if (bar % 8) fail("%s at shared address %u, which is no multiple of 8", what, bar);
  shared_pointer(c, bar, 8, what);
  const auto found = c.barriers.find(bar);
  if (found == c.barriers.end()) fail("%s at %s, where no mbarrier is", what, name(bar).c_str());
  return found->second;
}

void barrier_check_fenced(Cta& c, uint32_t bar, const char* what) {
  if (!barrier_at(c, bar, what).fenced) {
    fail("%s at mbarrier %s, initialised without fence_mbarrier_init", what, name(bar).c_str());
  }
}

void barrier_init(uint32_t bar, uint32_t arrivals) {
  Cta& c = cta();
  if (bar % 8) fail("mbarrier_init at shared address %u, which is no multiple of 8", bar);
  shared_pointer(c, bar, 8, "mbarrier_init");
  if (c.has_barrier[bar / 8]) fail("mbarrier %s is initialised twice", name(bar).c_str());
  if (arrivals < 1 || arrivals >= 1u << 20) fail("mbarrier_init with %u arrivals", arrivals);
  c.has_barrier[bar / 8] = 1;
  c.barriers[bar] = {.arrivals = arrivals, .pending = arrivals};
}

void barrier_fence_init() {
  for (auto& [address, b] : cta().barriers) b.fenced = true;
}

namespace {

void end_phase_if_complete(Cta& c, uint32_t bar) {
  Barrier& b = c.barriers.at(bar);
  if (b.pending != 0 || b.bytes != 0) return;
  // Who waits for the phase before would now wait for the one after this.
  for (const Thread& t : c.threads) {
    if (t.wait.kind == WaitFor::mbarrier && t.wait.what == bar && ready(t)) {
      fail("mbarrier %s ends a phase before warp %u has seen the end of the last one", name(bar).c_str(), t.warp());
    }
  }
  ++b.phase;
  b.pending = b.arrivals;
  b.tensor_work = std::exchange(b.next_tensor_work, false);
  b.known = std::make_shared<Clock>(std::exchange(b.next_known, {}));
  b.unseen_commit |= std::exchange(b.next_commit, false);
}

// One arrival of whoever.
void count_arrival(Cta& c, uint32_t bar) {
  Barrier& b = barrier_at(c, bar, "arrival");
  if (b.pending == 0) fail("more arrivals than %u in a phase of mbarrier %s", b.arrivals, name(bar).c_str());
  --b.pending;
  end_phase_if_complete(c, bar);
}

}  // namespace

void barrier_arrive(uint32_t bar) {
  publish(barrier_at(cta(), bar, "mbarrier_arrive"), "mbarrier_arrive");
  count_arrival(cta(), bar);
}

void barrier_expect(uint32_t bar, uint32_t bytes) {
  constexpr const char* kWhat = "mbarrier_arrive_expect_tx";
  Barrier& b = barrier_at(cta(), bar, kWhat);
  b.bytes += bytes;
  if (b.bytes >= 1 << 20) fail("more than 2^20 - 1 bytes expected at mbarrier %s", name(bar).c_str());
  publish(b, kWhat);
  count_arrival(cta(), bar);
}

void barrier_commit(Cta& c, uint32_t bar, const Clock& known) {
  Barrier& b = barrier_at(c, bar, "tcgen05_commit");
  b.next_tensor_work = b.next_commit = true;
  Order::join(b.next_known, known);
  count_arrival(c, bar);
}

void barrier_wait(uint32_t bar, uint32_t parity) {
  Barrier& b = barrier_at(cta(), bar, "mbarrier_wait");
  if (parity > 1) fail("mbarrier_wait for parity %u", parity);
  wait(WaitFor::mbarrier, bar, parity);
  b.unseen_commit = false;
  learn(b);
}

void named_barrier(uint32_t id, uint32_t threads, bool waits) {
  Cta& c = cta();
  if (id >= 16) fail("named barrier %u: there are 16", id);
  if (threads == 0 || threads % 32) fail("named barrier %u: threads must be a multiple of 32, got %u", id, threads);
  aligned("a barrier", uint64_t(id) << 32 | threads);
  NamedBarrier& b = c.named[id];
  if (b.arrived == 0) {
    b.threads = threads;
  } else if (b.threads != threads) {
    fail("named barrier %u: some expect %u threads, others %u", id, b.threads, threads);
  }
  publish(b, "a barrier");
  const uint32_t generation = b.generation;
  if (++b.arrived == b.threads) {
    b.arrived = 0;
    ++b.generation;
    b.tensor_work = std::exchange(b.next_tensor_work, false);
    b.known = std::make_shared<Clock>(std::exchange(b.next_known, {}));
  } else if (waits) {
    wait(WaitFor::named_barrier, id, generation);
  }
  if (waits) learn(b);
}

// ---- copies ---------------------------------------------------------------------------------------------------------

namespace {

void enqueue_copy(Cta& c, std::function<void()> copy) {
  if (machine->deferred()) {
    c.copy_queue.push_back(std::move(copy));
  } else {
    copy();
  }
}

}  // namespace

void enqueue_load(uint32_t shared, uint32_t bytes, uint32_t bar, const char* what, std::function<void(uint8_t*)> fill) {
  Cta* const c = &cta();
  barrier_check_fenced(*c, bar, what);
  uint8_t* const to = shared_pointer(*c, shared, bytes, what);
  check_no_barrier(*c, shared, bytes, what);
  for (uint32_t piece = shared / 16; piece < (shared + bytes) / 16; ++piece) {
    if (c->readers[piece]) fail("%s to shared address %u: tcgen05 work or a copy still reads it", what, 16 * piece);
    if (c->incoming[piece]) fail("%s to shared address %u: another copy is on its way there", what, 16 * piece);
    c->incoming[piece] = 1;
  }
  const Order::Copy copy = c->order->begin_copy(self().index);
  c->order->copy(self().index, shared / 4, bytes / 4, copy, what);
  enqueue_copy(*c, [=] {
    fill(to);
    std::fill_n(c->incoming.begin() + shared / 16, bytes / 16, uint8_t(0));
    std::fill_n(c->writer.begin() + shared / 4, bytes / 4, int16_t(-1));
    Barrier& b = barrier_at(*c, bar, what);
    b.bytes -= bytes;
    Order::copy_release(copy, b.next_known);
    end_phase_if_complete(*c, bar);
  });
}

void enqueue_store(uint32_t shared, uint32_t bytes, const char* what, std::function<void(const uint8_t*)> write) {
  Thread& t = self();
  if (!t.open_group) t.open_group = std::make_shared<BulkGroup>();
  const std::shared_ptr<BulkGroup> group = t.open_group;
  ++group->reading;
  ++group->running;
  Cta* const c = t.cta;
  group->last = c->order->begin_copy(t.index);
  for (uint32_t piece = shared / 16; piece < (shared + bytes) / 16; ++piece) {
    claim_read(piece, what);
    c->order->copy_read(t.index, piece, group->last, what);
  }
  enqueue_copy(*c, [=] {
    const uint8_t* const from = c->base + shared;
    const auto taken = std::make_shared<std::vector<uint8_t>>(from, from + bytes);
    for (uint32_t piece = shared / 16; piece < (shared + bytes) / 16; ++piece) release_read(*c, piece);
    --group->reading;
    enqueue_copy(*c, [=] {
      write(taken->data());
      --group->running;
    });
  });
}

void commit_group() {
  Thread& t = self();
  if (t.open_group) t.groups.push_back(std::move(t.open_group));
  t.open_group = nullptr;
}

void wait_groups(uint32_t pending, bool only_reading) {
  Thread& t = self();
  wait(WaitFor::bulk_groups, pending, only_reading);
  for (size_t i = 0; i + pending < t.groups.size(); ++i) t.cta->order->copy_acquire(t.index, t.groups[i]->last);
  while (!t.groups.empty() && t.groups.front()->running == 0) t.groups.pop_front();
}

}  // namespace mxflash::simulator
