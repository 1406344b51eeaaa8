// Dividing a caller's workspace.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mxflash {

inline constexpr size_t kWorkspaceAlign = 64;

// Hands out pieces of a workspace; with a null base it only adds up.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<std::byte*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (size_t(count) * sizeof(T) + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

}  // namespace mxflash
