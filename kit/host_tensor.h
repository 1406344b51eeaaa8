// A tensor as files hold it: element type, shape and raw little-endian bytes in host memory, and the one error type
// of the file readers. Files know more element types than the library, so they have their own enum.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "mxflash/types.h"

namespace mxflash::kit {

enum class FileDtype { f64, f32, f16, bf16, f8_e4m3, f8_e5m2, f8_e8m0, u8, i8, i16, u16, i32, u32, i64, u64, boolean };

struct FileDtypeInfo {
  FileDtype dtype;
  int64_t size;            // bytes of one element
  std::string_view name;   // the safetensors name
  std::string_view descr;  // the .npy descr; empty where NumPy has no such type
  Dtype library_dtype;     // Dtype::none where the library has no such type
};

// In the order of the enum, so that the enum indexes it.
inline constexpr std::array<FileDtypeInfo, 16> kFileDtypes{{
    {FileDtype::f64, 8, "F64", "<f8", Dtype::none},
    {FileDtype::f32, 4, "F32", "<f4", Dtype::f32},
    {FileDtype::f16, 2, "F16", "<f2", Dtype::f16},
    {FileDtype::bf16, 2, "BF16", "", Dtype::bf16},
    {FileDtype::f8_e4m3, 1, "F8_E4M3", "", Dtype::e4m3},
    {FileDtype::f8_e5m2, 1, "F8_E5M2", "", Dtype::e5m2},
    {FileDtype::f8_e8m0, 1, "F8_E8M0", "", Dtype::e8m0},
    {FileDtype::u8, 1, "U8", "|u1", Dtype::u8},
    {FileDtype::i8, 1, "I8", "|i1", Dtype::none},
    {FileDtype::i16, 2, "I16", "<i2", Dtype::none},
    {FileDtype::u16, 2, "U16", "<u2", Dtype::none},
    {FileDtype::i32, 4, "I32", "<i4", Dtype::none},
    {FileDtype::u32, 4, "U32", "<u4", Dtype::none},
    {FileDtype::i64, 8, "I64", "<i8", Dtype::none},
    {FileDtype::u64, 8, "U64", "<u8", Dtype::none},
    {FileDtype::boolean, 1, "BOOL", "|b1", Dtype::none},
}};

constexpr const FileDtypeInfo& file_dtype_info(FileDtype dtype) { return kFileDtypes.at(size_t(dtype)); }
constexpr int64_t file_dtype_size(FileDtype dtype) { return file_dtype_info(dtype).size; }
constexpr std::string_view file_dtype_name(FileDtype dtype) { return file_dtype_info(dtype).name; }

// From a safetensors name such as "BF16"; none for a name that is not in the table.
constexpr std::optional<FileDtype> file_dtype_from_name(std::string_view name) {
  for (const FileDtypeInfo& info : kFileDtypes)
    if (info.name == name) return info.dtype;
  return std::nullopt;
}

// Dtype::none where the library has no such element type.
constexpr Dtype to_library_dtype(FileDtype dtype) { return file_dtype_info(dtype).library_dtype; }

constexpr std::optional<FileDtype> to_file_dtype(Dtype dtype) {
  for (const FileDtypeInfo& info : kFileDtypes)
    if (dtype != Dtype::none && info.library_dtype == dtype) return info.dtype;
  return std::nullopt;
}

inline constexpr size_t kMaxFileRank = 16;

// Bytes of a tensor; none if an extent is negative or the size exceeds int64. A zero extent does not excuse the others:
// their product must fit as well, or the strides computed from such a shape would overflow.
constexpr std::optional<int64_t> checked_nbytes(int64_t element_size, const std::vector<int64_t>& shape) {
  int64_t nonzero_product = element_size;
  bool empty = false;
  for (const int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) {
      empty = true;
    } else if (nonzero_product > std::numeric_limits<int64_t>::max() / extent) {
      return std::nullopt;
    } else {
      nonzero_product *= extent;
    }
  }
  return empty ? 0 : nonzero_product;
}

// Contiguous and row-major. The readers guarantee bytes.size() == numel() * element size; the data is aligned for
// every element type. A `boolean` is one byte, as stored: it may be neither 0 nor 1.
struct HostTensor {
  FileDtype dtype = FileDtype::f32;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;

  // Throws std::length_error for a shape that no reader returns: a negative extent or more than int64 elements.
  int64_t numel() const {
    const std::optional<int64_t> count = checked_nbytes(1, shape);
    if (!count) throw std::length_error("HostTensor: extents must be >= 0 and their product must fit int64");
    return *count;
  }
};

// Escapes what could break a line or drive a terminal.
inline std::string one_line(std::string_view text, bool ascii_only = false) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f || (ascii_only && byte > 0x7f)) {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      out += c;
    }
  }
  return out;
}

// Text that came out of a file, made fit for a message: in quotes, plain ASCII, shortened.
inline std::string in_quotes(std::string_view text) {
  constexpr size_t kMaxShown = 80;
  const bool shortened = text.size() > kMaxShown;
  std::string quoted = "\"";
  quoted += one_line(text.substr(0, kMaxShown), true);
  quoted += shortened ? "...\"" : "\"";
  return quoted;
}

// For messages: [2, 3].
inline std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

// A file that cannot be read or written. what() is one line, "FILE: RULE, got VALUE; WHAT TO DO".
struct FileError : std::runtime_error {
  FileError(std::string_view file, std::string_view problem, std::string_view advice)
      : std::runtime_error(one_line(file) + ": " + one_line(problem) + "; " + one_line(advice)) {}
};

}  // namespace mxflash::kit
