// A stack of its own that runs until it switches back.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace mxflash::simulator {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(Fiber&&) noexcept;
  Fiber& operator=(Fiber&&) noexcept;

  void start(std::function<void()> body);
  void resume();       // from outside: until it switches back, or its body returns
  void switch_back();  // from inside

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mxflash::simulator
