// The stored attention problems of tests/data/vectors/attention: one directory each, with case.json, the operands and
// the results of an independent implementation as .npy.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kit/npy.h"

namespace mxflash::kit {

// Paths of all of them, sorted.
inline std::vector<std::string> vector_dirs() {
  std::vector<std::string> dirs;
  const std::filesystem::path root = std::filesystem::path(MXFLASH_SOURCE_DIR) / "tests/data/vectors/attention";
  for (const auto& entry : std::filesystem::directory_iterator(root)) {
    if (entry.is_directory()) dirs.push_back(entry.path().string());
  }
  std::sort(dirs.begin(), dirs.end());
  return dirs;
}

// For the names of parameterized tests.
inline std::string vector_name(const std::string& dir) { return std::filesystem::path(dir).filename().string(); }

inline nlohmann::json read_case(const std::string& dir) {
  return nlohmann::json::parse(std::ifstream(std::filesystem::path(dir) / "case.json"));
}

// The values of dir/<name>.npy, f32 or f64; T holds both exactly or the file is f32.
template <class T>
std::vector<T> read_values(const std::string& dir, const std::string& name) {
  const std::filesystem::path path = std::filesystem::path(dir) / (name + ".npy");
  const HostTensor tensor = read_npy(path.string());
  std::vector<T> values(size_t(tensor.numel()), T{0});
  const auto widen = [&]<class Stored>(Stored) {
    std::vector<Stored> stored(values.size());
    std::memcpy(stored.data(), tensor.bytes.data(), tensor.bytes.size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = T(stored[i]);
  };
  if (tensor.dtype == FileDtype::f32) {
    widen(float{});
  } else if (tensor.dtype == FileDtype::f64 && sizeof(T) == sizeof(double)) {
    widen(double{});
  } else {
    ADD_FAILURE() << path << ": neither f32 nor f64, or f64 read as f32";
  }
  return values;
}

}  // namespace mxflash::kit
