// Checks the JSON header of a safetensors file event by event as it is parsed, with no document tree. The only nesting
// that is ever accepted is the format's own three levels, so depth needs no limit of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kit/host_tensor.h"
#include "kit/safetensors.h"

namespace mxflash::kit {

inline constexpr std::string_view kMetadataKey = "__metadata__";
inline constexpr const char* kRewrite = "write the file again with a safetensors library";

inline std::string tensor_text(std::string_view name) { return "tensor " + in_quotes(name); }

// Takes the events of nlohmann's SAX parser, which itself keeps one bit a level and does not recurse.
class SafetensorsHeaderHandler {
 public:
  SafetensorsHeaderHandler(const std::string& label, std::vector<SafetensorsEntry>& entries,
                           std::map<std::string, size_t, std::less<>>& index,
                           std::map<std::string, std::string>& metadata)
      : label_(label), entries_(entries), index_(index), metadata_(metadata) {}

  bool start_object(size_t) {
    switch (place_) {
      case Place::root: place_ = Place::root_key; return true;
      case Place::metadata: place_ = Place::metadata_key; return true;
      case Place::entry: place_ = Place::entry_key; return true;
      default: wrong_type("an object");
    }
  }

  bool key(std::string& name) {
    if (place_ == Place::root_key) {
      begin_root_value(name);
    } else if (place_ == Place::metadata_key) {
      if (metadata_.contains(name)) fail("keys of __metadata__ must be unique, got " + in_quotes(name) + " twice");
      metadata_name_ = std::move(name);
      place_ = Place::metadata_text;
    } else {
      begin_entry_value(name);
    }
    return true;
  }

  bool end_object() {
    if (place_ == Place::entry_key) {
      if (!seen_dtype_) fail(subject() + " must have a dtype, got none");
      if (!seen_shape_) fail(subject() + " must have a shape, got none");
      if (!seen_offsets_) fail(subject() + " must have data_offsets, got none");
    }
    place_ = place_ == Place::root_key ? Place::done : Place::root_key;
    return true;
  }

  bool start_array(size_t) {
    switch (place_) {
      case Place::shape: place_ = Place::shape_items; return true;
      case Place::offsets: place_ = Place::offset_items; return true;
      default: wrong_type("an array");
    }
  }

  bool end_array() {
    if (place_ == Place::offset_items && num_offsets_ != 2)
      fail(subject() + ": data_offsets must have 2 numbers, got " + std::to_string(num_offsets_));
    place_ = Place::entry_key;
    return true;
  }

  bool string(std::string& text) {
    if (place_ == Place::metadata_text) {
      metadata_.emplace(std::move(metadata_name_), std::move(text));
      place_ = Place::metadata_key;
    } else if (place_ == Place::dtype) {
      const std::optional<FileDtype> dtype = file_dtype_from_name(text);
      if (!dtype) fail(subject() + ": dtype must be one that mxflash reads, got " + in_quotes(text), known_dtypes());
      entries_.back().dtype = *dtype;
      place_ = Place::entry_key;
    } else {
      wrong_type("the string " + in_quotes(text));
    }
    return true;
  }

  bool number_unsigned(uint64_t value) {
    if (place_ == Place::shape_items) {
      if (value > uint64_t(std::numeric_limits<int64_t>::max()))
        fail(subject() + ": extents must be below 2^63, got " + std::to_string(value));
      std::vector<int64_t>& shape = entries_.back().shape;
      if (shape.size() == kMaxFileRank)
        fail(subject() + " must have at most " + std::to_string(kMaxFileRank) + " dimensions, got more");
      shape.push_back(int64_t(value));
    } else if (place_ == Place::offset_items) {
      if (num_offsets_ == 2) fail(subject() + ": data_offsets must have 2 numbers, got more");
      (num_offsets_++ == 0 ? entries_.back().begin : entries_.back().end) = value;
    } else {
      wrong_type("the number " + std::to_string(value));
    }
    return true;
  }

  bool number_integer(int64_t value) { wrong_type("the number " + std::to_string(value)); }
  bool number_float(double, const std::string& text) { wrong_type("the number " + in_quotes(text)); }
  bool boolean(bool value) { wrong_type(value ? "true" : "false"); }
  bool null() { wrong_type("null"); }
  bool binary(std::vector<uint8_t>&) { wrong_type("binary"); }  // never sent for JSON text

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception& error) {
    // nlohmann's text is "[name] parse error at line 1, column 5: syntax error while parsing value - explanation", or
    // "[name] explanation".
    std::string_view text = error.what();
    for (const std::string_view mark : {"] ", " - "}) {
      const size_t at = text.find(mark);
      if (at != text.npos) text.remove_prefix(at + mark.size());
    }
    fail("the header must be valid JSON, got at its byte " + std::to_string(position) + ": " + in_quotes(text));
  }

 private:
  // What the next event must be.
  enum class Place {
    root,           // the outer object
    root_key,       // a tensor's name or __metadata__, or the outer object's end
    metadata,       // its object
    metadata_key,   // a key of it, or its end
    metadata_text,  // a value of it
    entry,          // a tensor's object
    entry_key,      // dtype, shape or data_offsets, or the tensor's end
    dtype,          // a string
    shape,          // an array
    shape_items,    // a number, or the array's end
    offsets,        // an array
    offset_items,   // a number, or the array's end
    done,
  };

  void begin_root_value(std::string& name) {
    if (name == kMetadataKey) {
      if (std::exchange(seen_metadata_, true)) fail("__metadata__ must be given at most once, got it twice");
      place_ = Place::metadata;
      return;
    }
    if (!index_.emplace(name, entries_.size()).second)
      fail("names of tensors must be unique, got " + in_quotes(name) + " twice");
    entries_.emplace_back().name = std::move(name);
    seen_dtype_ = seen_shape_ = seen_offsets_ = false;
    num_offsets_ = 0;
    place_ = Place::entry;
  }

  void begin_entry_value(const std::string& name) {
    bool* const seen = name == "dtype"          ? &seen_dtype_
                       : name == "shape"        ? &seen_shape_
                       : name == "data_offsets" ? &seen_offsets_
                                                : nullptr;
    if (seen == nullptr)
      fail(subject() + " must have only dtype, shape and data_offsets, got the key " + in_quotes(name));
    if (std::exchange(*seen, true)) fail(subject() + ": keys must be unique, got " + in_quotes(name) + " twice");
    place_ = seen == &seen_dtype_ ? Place::dtype : seen == &seen_shape_ ? Place::shape : Place::offsets;
  }

  std::string subject() const { return tensor_text(entries_.back().name); }

  static std::string known_dtypes() {
    std::string names = "convert it to one of";
    for (const FileDtypeInfo& info : kFileDtypes) names += " " + std::string(info.name);
    return names;
  }

  [[noreturn]] void fail(const std::string& problem, const std::string& advice = kRewrite) const {
    throw FileError(label_, problem, advice);
  }

  [[noreturn]] void wrong_type(const std::string& got) const {
    switch (place_) {
      case Place::root: fail("the header must be a JSON object, got " + got);
      case Place::metadata: fail("__metadata__ must be an object of strings, got " + got);
      case Place::metadata_text:
        fail("values of __metadata__ must be strings, got " + got + " for " + in_quotes(metadata_name_));
      case Place::entry: fail(subject() + " must be an object, got " + got);
      case Place::dtype: fail(subject() + ": dtype must be a string, got " + got);
      case Place::shape: fail(subject() + ": shape must be an array, got " + got);
      case Place::shape_items: fail(subject() + ": extents must be integers from 0 to 2^63 - 1, got " + got);
      case Place::offsets: fail(subject() + ": data_offsets must be an array, got " + got);
      case Place::offset_items: fail(subject() + ": data_offsets must be integers from 0 to 2^64 - 1, got " + got);
      default: fail("the header must follow the safetensors format, got " + got);  // the parser's grammar excludes it
    }
  }

  const std::string& label_;
  std::vector<SafetensorsEntry>& entries_;
  std::map<std::string, size_t, std::less<>>& index_;
  std::map<std::string, std::string>& metadata_;
  Place place_ = Place::root;
  std::string metadata_name_;
  bool seen_metadata_ = false;
  bool seen_dtype_ = false;
  bool seen_shape_ = false;
  bool seen_offsets_ = false;
  int num_offsets_ = 0;
};

}  // namespace mxflash::kit
