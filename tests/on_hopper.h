// What tests on a Hopper card have in common.
#pragma once

#include <gtest/gtest.h>
#include <mxflash/types.h>

#include <vector>

#include "kit/device_memory.h"
#include "runtime/cuda.h"

namespace mxflash {

constexpr Device kCard{DeviceType::cuda, 0};

class OnHopper : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status s = has_compute_capability(90); !s.ok()) GTEST_SKIP() << s.message;
  }
};

template <class T>
kit::DeviceBuffer upload(const std::vector<T>& x) {
  kit::DeviceBuffer b(x.size() * sizeof(T));
  b.upload(x.data(), b.size(), nullptr);
  return b;
}
template <class T>
std::vector<T> download(const kit::DeviceBuffer& b) {
  std::vector<T> x(b.size() / sizeof(T));
  b.download(x.data(), 0, b.size(), nullptr);
  return x;
}
inline Tensor on_card(Tensor t) {
  t.device = kCard;
  return t;
}

}  // namespace mxflash
