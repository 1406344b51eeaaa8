// The simulated machine, as the host forms of ptx/*.cuh and of CUDA's built-ins see it. Only one thread of the host's
// runs it.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "simulator/fiber.h"
#include "simulator/order.h"
#include "simulator/simulator.h"

namespace mxflash::simulator {

inline constexpr uint32_t kLanes = 128, kColumns = 512;  // of tensor memory
inline constexpr uint32_t kSharedBase = 1024;            // address of a CTA's dynamic shared memory
inline constexpr uint32_t kPoison = 0xFFFFFFFF;          // NaN as fp32, as FP8 codes and as scales

// A rule is broken: ends the run.
struct Failure {
  std::string what;
};
[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char* format, ...);

struct Cta;

struct Barrier {
  bool fenced = false;
  bool tensor_work = false, next_tensor_work = false;  // an arrival of the last phase, of this one, covers tcgen05 work
  uint32_t arrivals = 0, pending = 0;
  int64_t bytes = 0;  // that copies still have to bring
  uint32_t phase = 0;
  std::shared_ptr<const Clock> known{};             // to who waits for the last phase
  Clock next_known{};                               // for this one
  bool unseen_commit = false, next_commit = false;  // that has arrived, and nobody has waited for its phase
};

struct NamedBarrier {
  uint32_t threads = 0, arrived = 0, generation = 0;
  bool tensor_work = false, next_tensor_work = false;
  std::shared_ptr<const Clock> known{};
  Clock next_known{};
};

struct Warp {
  uint32_t arrived = 0, generation = 0, elected = 0;
  const char* what = "";
  std::array<uint64_t, 32> values[2], history;
};

enum class WaitFor { nothing, mbarrier, named_barrier, warp, bulk_groups };

struct Wait {
  WaitFor kind = WaitFor::nothing;
  uint32_t what = 0, phase = 0;
};

// tcgen05_ld or _st of a thread that has not been waited for.
struct RegisterMove {
  uint32_t lane, column, count;
  uint32_t* to;                  // of a load
  std::vector<uint32_t> values;  // that a store still has to write; that a load has read already
};

struct BulkGroup {
  int reading = 0, running = 0;
  Order::Copy last{};
};

struct Thread {
  Cta* cta;
  uint32_t index;
  bool done = false;
  Wait wait{};
  std::vector<RegisterMove> loads{}, stores{};
  std::vector<uint32_t> unfenced{};  // words of shared memory that it stored to since its last proxy fence
  bool needs_fence_before = false, needs_fence_after = false, did_tensor_work = false;
  uint64_t history = 0;  // of .aligned instructions: equal in all lanes of a warp
  std::deque<std::shared_ptr<BulkGroup>> groups{};
  std::shared_ptr<BulkGroup> open_group{};
  Fiber fiber{};

  uint32_t lane() const { return index % 32; }
  uint32_t warp() const { return index / 32; }
};

enum class TensorOp { copy_scales, multiply_ss, multiply_ts, commit };

struct TensorWork {
  TensorOp op;
  Thread* issuer;
  uint32_t d = 0;  // or mbarrier
  uint64_t a = 0, b = 0;
  uint32_t instruction = 0, sfa = 0, sfb = 0;
  bool accumulate = false;
  std::vector<uint32_t> pieces{};  // of shared memory that it reads
  std::vector<TouchedColumns> columns{};
  Clock known{};  // of a commit: what its arrival makes known
};

struct Cta {
  uint32_t index = 0;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::array<NamedBarrier, 16> named{};
  // Shared memory, by address.
  std::vector<uint8_t> shared;
  std::vector<int16_t> writer;           // of each word, that has not been fenced for the async proxy; -1: none
  std::vector<uint16_t> readers;         // of each piece: work on its way
  std::vector<uint8_t> incoming;         // of each piece: a copy on its way will write it
  std::map<uint32_t, Barrier> barriers;  // by address
  std::vector<uint8_t> has_barrier;      // of each 8 bytes
  uint8_t* base = nullptr;               // address 0
  uint32_t shared_end = 0;
  // Tensor memory.
  std::vector<uint32_t> tensor;  // [kLanes][kColumns]
  std::array<bool, kColumns> allocated{};
  bool may_allocate = true;
  std::unique_ptr<Order> order;
  // What is on its way.
  std::deque<TensorWork> tensor_queue;
  std::vector<std::function<void()>> copy_queue;
  uint32_t tensor_pace = 4;

  uint32_t& word(uint32_t lane, uint32_t column) { return tensor[lane * kColumns + column]; }
  bool finished() const;
};

struct Machine {
  Launch launch;
  uint64_t random_state = 1;
  std::vector<std::unique_ptr<Cta>> ctas;
  Thread* current = nullptr;  // null: the machine itself

  uint32_t random();
  uint32_t random(uint32_t below) { return random() % below; }
  bool deferred() const { return launch.mode != Mode::eager; }
};
extern Machine* machine;

inline Thread& self() { return *machine->current; }
inline Cta& cta() { return *machine->current->cta; }

// Returns when it is so.
void wait(WaitFor kind, uint32_t what, uint32_t phase);
// All lanes of a warp meet; each learns what the others brought.
const std::array<uint64_t, 32>& exchange(const char* what, uint64_t value);
// True if the thread has tcgen05 work that others now learn of.
bool before_arrival(const char* what);
// An .aligned instruction: all lanes of a warp must run it with the same operands. Checked when they meet next.
void aligned(const char* what, uint64_t operands);
// This thread lets others go on, at a barrier of either kind.
template <class AnyBarrier>
void publish(AnyBarrier& b, const char* what) {
  b.next_tensor_work |= before_arrival(what);
  cta().order->release(self().index, b.next_known);
}
// What the barrier's last phase has made known to this thread.
template <class AnyBarrier>
void learn(const AnyBarrier& b) {
  if (b.tensor_work) self().needs_fence_after = true;
  cta().order->acquire(self().index, b.known);
}

// ---- shared memory --------------------------------------------------------------------------------------------------
uint8_t* shared_pointer(Cta& cta, uint32_t address, uint32_t bytes, const char* what);
// Aligned accesses of this thread.
void store(uint32_t address, const void* from, uint32_t bytes);
void load(uint32_t address, void* to, uint32_t bytes);
// Tensor cores and the copy engine: from the issue of their work until it is done, nobody may touch what they will
// write, nor change what they will read. Pieces are 16 bytes.
void claim_read(uint32_t piece, const char* what);
void release_read(Cta& cta, uint32_t piece);
void fence_proxy_async();

// ---- mbarriers ------------------------------------------------------------------------------------------------------
void barrier_init(uint32_t bar, uint32_t arrivals);
void barrier_fence_init();
void barrier_arrive(uint32_t bar);
void barrier_expect(uint32_t bar, uint32_t bytes);
void barrier_commit(Cta& cta, uint32_t bar, const Clock& known);  // an arrival by tensor cores
void barrier_wait(uint32_t bar, uint32_t parity);
Barrier& barrier_at(Cta& cta, uint32_t bar, const char* what);
void barrier_check_fenced(Cta& cta, uint32_t bar, const char* what);
void named_barrier(uint32_t id, uint32_t threads, bool wait);

// ---- copies ---------------------------------------------------------------------------------------------------------
// fill() writes what comes; then so many bytes count on the mbarrier.
void enqueue_load(uint32_t shared, uint32_t bytes, uint32_t bar, const char* what, std::function<void(uint8_t*)> fill);
// Part of this thread's next group: write() gets what was taken out of shared memory.
void enqueue_store(uint32_t shared, uint32_t bytes, const char* what, std::function<void(const uint8_t*)> write);
void commit_group();
void wait_groups(uint32_t pending, bool only_reading);

// ---- tensor memory --------------------------------------------------------------------------------------------------
void allocate(uint32_t shared, uint32_t columns);
void relinquish();
void deallocate(uint32_t tmem, uint32_t columns);
void enqueue_tensor(const TensorWork& work);
// May `later` be done before `earlier`? PTX ISA, "tcgen05 Memory Consistency Model", "Pipelined instructions".
bool may_pass(const TensorWork& earlier, const TensorWork& later);
void execute(Cta& cta, const TensorWork& work);
void load_registers(uint32_t tmem, uint32_t* r, uint32_t count);
void store_registers(uint32_t tmem, const uint32_t* r, uint32_t count);
void wait_loads();
void wait_stores();

}  // namespace mxflash::simulator
