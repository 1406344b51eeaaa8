// The first entry goes through ucontext; later switches through _setjmp and _longjmp, which make no system calls.
// AddressSanitizer is told of every switch.
#include "simulator/fiber.h"

#include <setjmp.h>
#include <ucontext.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#include <utility>
#include <vector>

namespace mxflash::simulator {
namespace {

constexpr size_t kStackBytes = 128 << 10;

// Stacks are used again: there are hundreds, and the kernel clears each page of a new one.
std::vector<std::unique_ptr<char[]>>& free_stacks() {
  static std::vector<std::unique_ptr<char[]>> stacks;
  return stacks;
}

}  // namespace

struct Fiber::State {
  std::unique_ptr<char[]> stack;
  std::function<void()> body;
  ucontext_t first{}, outside_first{};
  jmp_buf inside, outside;
  bool entered = false;
#ifdef __SANITIZE_ADDRESS__
  void* fake_inside = nullptr;
  void* fake_outside = nullptr;
  const void* outside_bottom = nullptr;
  size_t outside_bytes = 0;
#endif

  ~State() {
    if (!stack) return;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(stack.get(), kStackBytes);
#endif
    free_stacks().push_back(std::move(stack));
  }
  void leave([[maybe_unused]] bool for_good) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_inside, outside_bottom, outside_bytes);
#endif
    if (_setjmp(inside) == 0) _longjmp(outside, 1);
    entered_again();
  }
  void entered_again() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_inside, &outside_bottom, &outside_bytes);
#endif
  }
  static void enter(uint32_t low, uint32_t high) {
    auto* state = reinterpret_cast<State*>(uintptr_t(low) | uintptr_t(high) << 32);
    state->entered_again();
    state->body();
    state->leave(true);
  }
};

Fiber::Fiber() = default;
Fiber::~Fiber() = default;
Fiber::Fiber(Fiber&&) noexcept = default;
Fiber& Fiber::operator=(Fiber&&) noexcept = default;

void Fiber::start(std::function<void()> body) {
  state_ = std::make_unique<State>();
  state_->body = std::move(body);
  auto& stacks = free_stacks();
  if (stacks.empty()) {
    state_->stack.reset(new char[kStackBytes]);
  } else {
    state_->stack = std::move(stacks.back());
    stacks.pop_back();
  }
  getcontext(&state_->first);
  state_->first.uc_stack.ss_sp = state_->stack.get();
  state_->first.uc_stack.ss_size = kStackBytes;
  state_->first.uc_link = nullptr;
  const auto at = reinterpret_cast<uintptr_t>(state_.get());
  makecontext(&state_->first, reinterpret_cast<void (*)()>(&State::enter), 2, uint32_t(at), uint32_t(at >> 32));
}

void Fiber::resume() {
  State& s = *state_;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&s.fake_outside, s.stack.get(), kStackBytes);
#endif
  if (_setjmp(s.outside) == 0) {
    if (s.entered) _longjmp(s.inside, 1);
    s.entered = true;
    setcontext(&s.first);
  }
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(s.fake_outside, nullptr, nullptr);
#endif
}

void Fiber::switch_back() { state_->leave(false); }

}  // namespace mxflash::simulator
