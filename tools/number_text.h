// Numbers as the tables and the report print them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

#include "kit/compare.h"

namespace mxflash::tools {

inline std::string printed(const char* format, double x, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, format, digits, x);
  return text;
}

inline std::string fixed(double x, int digits) {
  // Beyond these "%f" gets longer than any column.
  if (!std::isfinite(x) || std::abs(x) >= 1e15) return printed("%.*g", x, digits + 1);
  const std::string text = printed("%.*f", x, digits);
  return text.find_first_of("123456789") == text.npos && text.front() == '-' ? text.substr(1) : text;  // no "-0.00"
}
inline std::string significant(double x, int digits) { return printed("%.*g", x, digits); }
inline std::string signed_fixed(double x, int digits) {
  const std::string text = fixed(x, digits);
  return (text.find_first_of("123456789") == text.npos || text.front() == '-' ? "" : "+") + text;
}

// "0%", "<0.01%", "0.03%", "4.5%", "83%"
inline std::string percent(double share) {
  const double x = 100 * share;
  if (x == 0) return "0%";
  if (x < 0.01) return "<0.01%";
  return fixed(x, x < 1 ? 2 : x < 10 ? 1 : 0) + "%";
}

// 12345678 -> "12,345,678"
inline std::string grouped(int64_t n) {
  std::string text = std::to_string(n);
  for (int64_t at = int64_t(text.size()) - 3; at > (n < 0 ? 1 : 0); at -= 3) text.insert(size_t(at), ",");
  return text;
}

// An SQNR in dB; the conventions of kit/compare.h in words.
inline std::string decibels(const kit::Metrics& m) {
  if (m.nonfinite_mismatch > 0) return "NaN/Inf";
  if (m.sqnr_db >= kit::kMaxDb) return "exact";
  if (m.sqnr_db <= -kit::kMaxDb) return "no signal";
  return fixed(m.sqnr_db, 2);
}

// Root of error energy over signal energy: what a dB value means to people. Infinite if the comparison is void.
inline double relative_error(double sqnr_db) {
  return sqnr_db <= -kit::kMaxDb ? HUGE_VAL : sqnr_db >= kit::kMaxDb ? 0 : std::pow(10, -sqnr_db / 20);
}

}  // namespace mxflash::tools
