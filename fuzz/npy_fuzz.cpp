// Fuzzes the .npy reader: any bytes give either an array or a FileError.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kit/npy.h"

using namespace mxflash::kit;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const HostTensor tensor = parse_npy(std::as_bytes(std::span(data, size)));
    if (int64_t(tensor.bytes.size()) != tensor.numel() * file_dtype_size(tensor.dtype)) std::abort();
  } catch (const FileError& error) {
    if (std::string_view(error.what()).find_first_of("\n\r") != std::string_view::npos) std::abort();
  }
  return 0;
}
