// What tests on a card have in common.
#pragma once

#include <gtest/gtest.h>
#include <mxflash/types.h>

#include <vector>

#include "kit/device_memory.h"
#include "runtime/cuda.h"

namespace mxflash {

constexpr Device kCard{DeviceType::cuda, 0};

template <int kCapability>
class OnCapability : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status s = has_compute_capability(kCapability); !s.ok()) GTEST_SKIP() << s.message;
  }
};
using OnHopper = OnCapability<90>;

// Code that is the same on every architecture, and calls that each has a backend for.
class OnAnyCard : public testing::Test {
 protected:
  void SetUp() override {
    const Status hopper = has_compute_capability(90), blackwell = has_compute_capability(100);
    if (!hopper.ok() && !blackwell.ok()) GTEST_SKIP() << hopper.message << "; " << blackwell.message;
  }
};
inline const char* card_backend() { return has_compute_capability(100).ok() ? "sm100" : "sm90"; }

// Kernels of Blackwell: where a test is compiled for them, or on Hopper with tcgen05 in software.
#ifdef MXFLASH_TCGEN05_EMULATED
using OnTcgen05 = OnCapability<90>;
#else
using OnTcgen05 = OnCapability<100>;
#endif

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
