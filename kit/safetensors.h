// Reads and writes safetensors files: an 8-byte little-endian header length, a JSON header, then the tensors' bytes.
// Files may come from anyone, so the whole header is checked before any tensor is read. Every failure is a FileError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kit/file_bytes.h"
#include "kit/host_tensor.h"

namespace mxflash::kit {

struct SafetensorsEntry {
  std::string name;
  FileDtype dtype = FileDtype::f32;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // byte range [begin, end) in the data section, which starts after the header
  uint64_t end = 0;
};

class SafetensorsFile {
 public:
  // Opens a regular file and checks its whole header.
  explicit SafetensorsFile(const std::string& path) : SafetensorsFile(InputBytes::open(path)) {}

  // The same for a file in memory. `bytes` must outlive the result; `label` stands for the path in messages.
  static SafetensorsFile parse(std::span<const std::byte> bytes, std::string label = "<buffer>") {
    return SafetensorsFile(InputBytes::view(bytes, std::move(label)));
  }

  const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // in the header's order
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(std::string_view name) const { return index_.find(name) != index_.end(); }
  const SafetensorsEntry& entry(std::string_view name) const;
  HostTensor read(std::string_view name) const;

 private:
  explicit SafetensorsFile(InputBytes input);

  InputBytes input_;
  uint64_t data_start_ = 0;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, size_t, std::less<>> index_;  // name -> position in entries_
  std::map<std::string, std::string> metadata_;
};

struct NamedTensor {
  std::string name;
  HostTensor tensor;
};

// Writes a new file and renames it to `path` once it is complete, so that `path` never holds half a file. The header
// lists the tensors in the given order; their data is laid out so that every tensor is aligned to its element size.
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace mxflash::kit
