// Text for messages: printf into a string, and where an element lies.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace mxflash::kit {

// At most 511 characters; more are cut off.
std::string text(const char* format, auto... value) {
  std::array<char, 512> buffer;
  std::snprintf(buffer.data(), buffer.size(), format, value...);
  return buffer.data();
}

// "[3, 0, 17]" for an index into a contiguous tensor.
inline std::string coordinates(int64_t index, const std::vector<int64_t>& shape) {
  std::string result;
  for (size_t axis = shape.size(); axis-- > 0; index /= shape[axis]) {
    result = std::to_string(index % shape[axis]) + (result.empty() ? "" : ", ") + result;
  }
  return "[" + result + "]";
}

}  // namespace mxflash::kit
