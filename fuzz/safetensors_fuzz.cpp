// Fuzzes the safetensors reader: any bytes give either a file whose every tensor can be read, or a FileError.
#include <cstdint>
#include <cstdlib>

#include "kit/safetensors.h"

using namespace mxflash::kit;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const SafetensorsFile file = SafetensorsFile::parse(std::as_bytes(std::span(data, size)));
    uint64_t total = 0;
    for (const SafetensorsEntry& entry : file.entries()) {
      const HostTensor tensor = file.read(entry.name);
      if (int64_t(tensor.bytes.size()) != tensor.numel() * file_dtype_size(tensor.dtype)) std::abort();
      total += tensor.bytes.size();
    }
    if (total > size) std::abort();  // tensors must not share bytes
  } catch (const FileError& error) {
    if (std::string_view(error.what()).find_first_of("\n\r") != std::string_view::npos) std::abort();
  }
  return 0;
}
