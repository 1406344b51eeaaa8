// The .npy reader. The header is a Python dict literal of exactly three keys; a small strict parser takes that and
// nothing else of Python.
#include "kit/npy.h"

#include <limits>
#include <optional>
#include <string_view>

#include "kit/file_bytes.h"

namespace mxflash::kit {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr uint64_t kVersionEnd = 8;          // the magic, then a major and a minor version byte
constexpr uint64_t kMaxHeaderBytes = 65535;  // all that version 1 can say; a header of plain numbers takes ~100
constexpr const char* kSave = "save it again with numpy.save(path, numpy.ascontiguousarray(a))";
constexpr const char* kNotNpy = "the file is cut off or no .npy file";

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

FileDtype dtype_from_descr(const std::string& label, std::string_view descr) {
  for (const FileDtypeInfo& info : kFileDtypes)
    if (!info.descr.empty() && info.descr == descr) return info.dtype;
  if (descr.starts_with('>'))
    throw FileError(label, "descr must be little-endian, got " + in_quotes(descr),
                    "save a.astype(a.dtype.newbyteorder('<'))");
  std::string names = "convert it to one of";
  for (const FileDtypeInfo& info : kFileDtypes)
    if (!info.descr.empty()) names.append(" ").append(info.descr);
  throw FileError(label, "descr must be one that mxflash reads, got " + in_quotes(descr),
                  names + ", or save bf16 and fp8 as safetensors");
}

struct Header {
  FileDtype dtype = FileDtype::f32;
  std::vector<int64_t> shape;
};

class HeaderParser {
 public:
  HeaderParser(const std::string& label, std::string_view text) : label_(label), text_(text) {}

  Header parse() {
    expect('{');
    while (!take('}')) {
      parse_item();
      if (take(',')) continue;
      expect('}');
      break;
    }
    skip_space();
    if (at_ != text_.size()) fail("end after the dict");
    if (!descr_) missing("descr");
    if (!seen_fortran_order_) missing("fortran_order");
    if (!shape_) missing("shape");
    return {dtype_from_descr(label_, *descr_), *shape_};
  }

 private:
  void parse_item() {
    const std::string_view key = parse_string("have a key in quotes");
    expect(':');
    if (key == "descr" && !descr_) {
      skip_space();
      if (peek() == '[')
        throw FileError(label_, "descr must be a plain number type, got a structured one", "save one field at a time");
      descr_ = parse_string("have a descr in quotes");
    } else if (key == "fortran_order" && !seen_fortran_order_) {
      if (parse_bool()) throw FileError(label_, "fortran_order must be False (C order), got True", kSave);
      seen_fortran_order_ = true;
    } else if (key == "shape" && !shape_) {
      shape_ = parse_shape();
    } else {
      throw FileError(
          label_, "the header must have descr, fortran_order and shape once each, got key " + in_quotes(key), kSave);
    }
  }

  std::string_view parse_string(const char* rule) {
    skip_space();
    const char quote = peek();
    if (quote != '\'' && quote != '"') fail(rule);
    const size_t begin = ++at_;
    while (at_ < text_.size() && text_[at_] != quote) {
      if (text_[at_] == '\\') fail("have no escapes in strings");
      ++at_;
    }
    if (at_ == text_.size()) fail("close its strings");
    return text_.substr(begin, at_++ - begin);
  }

  bool parse_bool() {
    skip_space();
    for (const std::string_view word : {"False", "True"}) {
      if (!text_.substr(at_).starts_with(word)) continue;
      at_ += word.size();
      return word == "True";
    }
    fail("have fortran_order True or False");
  }

  // A tuple: (), (3,), (3, 4) or (3, 4,). As in Python, (3) is none.
  std::vector<int64_t> parse_shape() {
    std::vector<int64_t> shape;
    expect('(');
    while (!take(')')) {
      if (shape.size() == kMaxFileRank)
        throw FileError(label_, "shape must have at most " + std::to_string(kMaxFileRank) + " dimensions, got more",
                        "reshape it");
      shape.push_back(parse_extent());
      if (take(',')) continue;
      if (shape.size() == 1) fail("have a comma after a tuple's only number");
      expect(')');
      break;
    }
    return shape;
  }

  int64_t parse_extent() {
    skip_space();
    const size_t begin = at_;
    int64_t value = 0;
    for (; peek() >= '0' && peek() <= '9'; ++at_) {
      const int digit = peek() - '0';
      if (value > (std::numeric_limits<int64_t>::max() - digit) / 10)
        throw FileError(label_, "extents must be below 2^63, got " + in_quotes(text_.substr(begin, 24)), kSave);
      value = value * 10 + digit;
    }
    if (at_ == begin) fail("have a shape of non-negative integers");
    if (text_[begin] == '0' && at_ - begin > 1) fail("have extents without leading zeros");
    return value;
  }

  // '\0' at the end, which no rule accepts.
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void skip_space() {
    while (peek() == ' ' || peek() == '\n') ++at_;
  }
  bool take(char c) {
    skip_space();
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(std::string("have ") + c);
  }

  [[noreturn]] void fail(const std::string& rule) const {
    const std::string got = at_ < text_.size() ? in_quotes(text_.substr(at_, 24)) : "its end";
    throw FileError(label_, "the header must " + rule + " at its byte " + std::to_string(at_) + ", got " + got, kSave);
  }
  [[noreturn]] void missing(const char* key) const {
    throw FileError(label_, std::string("the header must have descr, fortran_order and shape, got no ") + key, kSave);
  }

  const std::string& label_;
  std::string_view text_;
  size_t at_ = 0;
  std::optional<std::string_view> descr_;
  bool seen_fortran_order_ = false;
  std::optional<std::vector<int64_t>> shape_;
};

// The header's byte range [begin, end); the data follows.
struct HeaderRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

HeaderRange find_header(const InputBytes& input) {
  if (input.size() < kVersionEnd)
    throw FileError(input.label(), "must have at least 8 bytes, got " + std::to_string(input.size()), kNotNpy);
  const std::vector<std::byte> start = input.read(0, kVersionEnd);
  if (!as_text(start).starts_with(kMagic))
    throw FileError(input.label(),
                    "must begin with \\x93NUMPY, got " + in_quotes(as_text(start).substr(0, kMagic.size())), kNotNpy);
  const int major = int(start[6]);
  const int minor = int(start[7]);
  if (major < 1 || major > 3 || minor != 0)
    throw FileError(input.label(),
                    "version must be 1.0, 2.0 or 3.0, got " + std::to_string(major) + "." + std::to_string(minor),
                    kSave);

  const uint64_t begin = kVersionEnd + (major == 1 ? 2 : 4);
  if (input.size() < begin)
    throw FileError(input.label(),
                    "must have at least " + std::to_string(begin) + " bytes, got " + std::to_string(input.size()),
                    kNotNpy);
  uint64_t size = 0;
  const std::vector<std::byte> length = input.read(kVersionEnd, begin - kVersionEnd);
  for (size_t i = 0; i < length.size(); ++i) size |= uint64_t(length[i]) << (8 * i);
  if (size > kMaxHeaderBytes)
    throw FileError(
        input.label(),
        "the header must have at most " + std::to_string(kMaxHeaderBytes) + " bytes, got " + std::to_string(size),
        kSave);
  if (size > input.size() - begin)
    throw FileError(input.label(),
                    "the header must end within the file, got a header of " + std::to_string(size) + " bytes with " +
                        std::to_string(input.size() - begin) + " left",
                    kNotNpy);
  return {begin, begin + size};
}

HostTensor read_array(const InputBytes& input) {
  const HeaderRange range = find_header(input);
  const std::vector<std::byte> text = input.read(range.begin, range.end - range.begin);
  Header header = HeaderParser(input.label(), as_text(text)).parse();
  const std::optional<int64_t> nbytes = checked_nbytes(file_dtype_size(header.dtype), header.shape);
  if (!nbytes)
    throw FileError(input.label(), "its size must be below 2^63 bytes, got shape " + shape_text(header.shape), kSave);
  const uint64_t left = input.size() - range.end;
  if (uint64_t(*nbytes) != left)
    throw FileError(input.label(),
                    "data must have exactly the " + std::to_string(*nbytes) + " bytes of its shape, got " +
                        std::to_string(left) + (left > uint64_t(*nbytes) ? " (trailing bytes)" : " (cut off)"),
                    "copy or save it again");
  return {header.dtype, std::move(header.shape), input.read(range.end, left)};
}

}  // namespace

HostTensor read_npy(const std::string& path) { return read_array(InputBytes::open(path)); }

HostTensor parse_npy(std::span<const std::byte> bytes, const std::string& label) {
  return read_array(InputBytes::view(bytes, label));
}

}  // namespace mxflash::kit
