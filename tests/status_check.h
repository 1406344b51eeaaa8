// What tests of errors share: a Status against a pattern, and MXFLASH_BACKEND for the time of a block.
#pragma once

#include <gtest/gtest.h>
#include <mxflash/types.h>

#include <cstdlib>
#include <string>
#include <string_view>

namespace mxflash {

// In a pattern, * stands for any text: an address, a size, the names of the backends.
inline bool matches(std::string_view text, std::string_view pattern) {
  const size_t star = pattern.find('*');
  if (star == pattern.npos) return text == pattern;
  if (!text.starts_with(pattern.substr(0, star))) return false;
  pattern.remove_prefix(star + 1);
  text.remove_prefix(star);
  while (!matches(text, pattern)) {
    if (text.empty()) return false;
    text.remove_prefix(1);
  }
  return true;
}

inline void expect_status(const Status& s, StatusCode code, const std::string& pattern) {
  const std::string_view message = s.message;
  EXPECT_STREQ(status_code_name(s.code), status_code_name(code));
  EXPECT_TRUE(matches(message, pattern)) << "got:  " << message << "\nwant: " << pattern;
  EXPECT_LT(message.size(), sizeof s.message - 1) << "cut off";
  for (const char c : message) EXPECT_TRUE(c >= ' ' && c <= '~') << message;
}

class Environment {
 public:
  explicit Environment(const char* value) {
    const char* old = std::getenv(kName);
    had_ = old != nullptr;
    if (had_) old_ = old;
    setenv(kName, value, 1);
  }
  ~Environment() { had_ ? setenv(kName, old_.c_str(), 1) : unsetenv(kName); }

 private:
  static constexpr const char* kName = "MXFLASH_BACKEND";
  bool had_ = false;
  std::string old_;
};

}  // namespace mxflash
