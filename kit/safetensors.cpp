// The safetensors reader and writer: everything around the JSON header, whose grammar is in safetensors_header.h.
#include "kit/safetensors.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>

#include "kit/safetensors_header.h"

namespace mxflash::kit {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation

std::string offsets_text(const SafetensorsEntry& entry) {
  return "[" + std::to_string(entry.begin) + ", " + std::to_string(entry.end) + "]";
}

uint64_t read_header_size(const InputBytes& input) {
  if (input.size() < kLengthBytes)
    throw FileError(input.label(), "must have at least 8 bytes, got " + std::to_string(input.size()),
                    "the file is cut off or no safetensors file");
  const std::vector<std::byte> length = input.read(0, kLengthBytes);
  uint64_t size = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) size |= uint64_t(length[i]) << (8 * i);
  if (size > kMaxHeaderBytes)
    throw FileError(input.label(), "the header must have at most 100000000 bytes, got " + std::to_string(size),
                    "this is probably no safetensors file");
  if (size > input.size() - kLengthBytes)
    throw FileError(input.label(),
                    "the header must end within the file, got a header of " + std::to_string(size) + " bytes with " +
                        std::to_string(input.size() - kLengthBytes) + " left",
                    "the file is cut off or no safetensors file");
  return size;
}

// What nlohmann's lexer lets pass: it skips a byte order mark and takes a zero byte for the end of the text.
void check_header_text(const std::string& label, std::string_view text) {
  if (text.empty() || text.front() != '{')
    throw FileError(label,
                    "the header must begin with {, got " + (text.empty() ? "nothing" : in_quotes(text.substr(0, 1))),
                    "this is probably no safetensors file");
  const size_t zero = text.find('\0');
  if (zero != text.npos)
    throw FileError(label, "the header must be valid JSON, got a zero byte at its byte " + std::to_string(zero),
                    kRewrite);
}

// The tensors must tile the data section: each of the size its shape says, without overlap, hole or rest.
void check_layout(const std::string& label, const std::vector<SafetensorsEntry>& entries, uint64_t data_size) {
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin > entry.end || entry.end > data_size)
      throw FileError(label,
                      tensor_text(entry.name) + ": data_offsets must ascend and stay within the " +
                          std::to_string(data_size) + " bytes of data, got " + offsets_text(entry),
                      "the file is cut off or wrong; copy or write it again");
    const std::optional<int64_t> nbytes = checked_nbytes(file_dtype_size(entry.dtype), entry.shape);
    if (!nbytes)
      throw FileError(
          label, tensor_text(entry.name) + ": its size must be below 2^63 bytes, got shape " + shape_text(entry.shape),
          kRewrite);
    if (uint64_t(*nbytes) != entry.end - entry.begin)
      throw FileError(label,
                      tensor_text(entry.name) + ": data_offsets must span the " + std::to_string(*nbytes) +
                          " bytes of " + std::string(file_dtype_name(entry.dtype)) + " " + shape_text(entry.shape) +
                          ", got " + offsets_text(entry),
                      kRewrite);
  }
  std::vector<const SafetensorsEntry*> sorted;
  for (const SafetensorsEntry& entry : entries) sorted.push_back(&entry);
  std::sort(sorted.begin(), sorted.end(), [](const SafetensorsEntry* a, const SafetensorsEntry* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  uint64_t covered = 0;
  for (const SafetensorsEntry* entry : sorted) {
    if (entry->begin != covered)
      throw FileError(label,
                      tensor_text(entry->name) + ": data must " +
                          (entry->begin < covered ? "not overlap another tensor" : "follow without a hole") +
                          ", so begin at " + std::to_string(covered) + ", got data_offsets " + offsets_text(*entry),
                      kRewrite);
    covered = entry->end;
  }
  if (covered != data_size)
    throw FileError(label,
                    "the tensors must cover all " + std::to_string(data_size) +
                        " bytes of data, got trailing bytes after " + std::to_string(covered),
                    "the file has grown or its header is wrong; copy or write it again");
}

void check_writable(const std::string& path, const std::vector<NamedTensor>& tensors) {
  std::set<std::string_view> names;
  for (const auto& [name, tensor] : tensors) {
    if (name == kMetadataKey || !names.insert(name).second)
      throw FileError(path, "names of tensors must be unique and not __metadata__, got " + in_quotes(name),
                      "rename it");
    if (tensor.shape.size() > kMaxFileRank)
      throw FileError(path,
                      tensor_text(name) + " must have at most " + std::to_string(kMaxFileRank) + " dimensions, got " +
                          std::to_string(tensor.shape.size()),
                      "reshape it");
    const std::optional<int64_t> nbytes = checked_nbytes(file_dtype_size(tensor.dtype), tensor.shape);
    if (!nbytes || uint64_t(*nbytes) != tensor.bytes.size())
      throw FileError(path,
                      tensor_text(name) + " must have the bytes of " + std::string(file_dtype_name(tensor.dtype)) +
                          " " + shape_text(tensor.shape) + ", got " + std::to_string(tensor.bytes.size()),
                      "correct its shape or data");
  }
}

// The order of the data: largest elements first. Every tensor then begins at a multiple of its element size, which
// readers that map the file rely on.
std::vector<size_t> data_order(const std::vector<NamedTensor>& tensors) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return file_dtype_size(tensors[a].tensor.dtype) > file_dtype_size(tensors[b].tensor.dtype);
  });
  return order;
}

std::string header_text(const std::string& path, const std::vector<NamedTensor>& tensors,
                        const std::vector<size_t>& order, const std::map<std::string, std::string>& metadata) {
  std::vector<uint64_t> begin(tensors.size());
  uint64_t data_size = 0;
  for (const size_t i : order) {
    begin[i] = data_size;
    data_size += tensors[i].tensor.bytes.size();
  }
  std::string header;
  const auto add = [&](std::string_view key, const nlohmann::json& value) {
    header += (header.empty() ? "{" : ",") + nlohmann::json(key).dump() + ":" + value.dump();
  };
  try {
    if (!metadata.empty()) add(kMetadataKey, metadata);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto& [name, tensor] = tensors[i];
      add(name, {{"dtype", file_dtype_name(tensor.dtype)},
                 {"shape", tensor.shape},
                 {"data_offsets", {begin[i], begin[i] + tensor.bytes.size()}}});
    }
  } catch (const nlohmann::json::exception&) {
    throw FileError(path, "names of tensors and metadata must be UTF-8, got other bytes", "rename them");
  }
  header += header.empty() ? "{}" : "}";
  header.append((kLengthBytes - header.size() % kLengthBytes) % kLengthBytes, ' ');
  if (header.size() > kMaxHeaderBytes)
    throw FileError(path, "the header must have at most 100000000 bytes, got " + std::to_string(header.size()),
                    "write fewer tensors to a file");
  return header;
}

}  // namespace

SafetensorsFile::SafetensorsFile(InputBytes input) : input_(std::move(input)) {
  const uint64_t header_size = read_header_size(input_);
  data_start_ = kLengthBytes + header_size;
  const std::vector<std::byte> header = input_.read(kLengthBytes, header_size);
  const std::string_view text(reinterpret_cast<const char*>(header.data()), header.size());
  check_header_text(input_.label(), text);
  SafetensorsHeaderHandler handler(input_.label(), entries_, index_, metadata_);
  nlohmann::json::sax_parse(text.begin(), text.end(), &handler);
  check_layout(input_.label(), entries_, input_.size() - data_start_);
}

const SafetensorsEntry& SafetensorsFile::entry(std::string_view name) const {
  const auto found = index_.find(name);
  if (found == index_.end()) {
    std::string names;
    for (const SafetensorsEntry& entry : entries_) {
      if (names.size() > 200) break;
      names += " " + in_quotes(entry.name);
    }
    throw FileError(input_.label(), "must hold " + tensor_text(name) + ", got no such tensor",
                    names.empty() ? "the file is empty" : "it holds" + names);
  }
  return entries_[found->second];
}

HostTensor SafetensorsFile::read(std::string_view name) const {
  const SafetensorsEntry& found = entry(name);
  return {found.dtype, found.shape, input_.read(data_start_ + found.begin, found.end - found.begin)};
}

void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  check_writable(path, tensors);
  const std::vector<size_t> order = data_order(tensors);
  const std::string header = header_text(path, tensors, order, metadata);
  std::array<std::byte, kLengthBytes> length;
  for (size_t i = 0; i < kLengthBytes; ++i) length[i] = std::byte(header.size() >> (8 * i));

  OutputFile file(path);
  file.write(length);
  file.write(std::as_bytes(std::span(header)));
  for (const size_t i : order) file.write(tensors[i].tensor.bytes);
  file.commit();
}

}  // namespace mxflash::kit
