// Reads NumPy .npy files, versions 1 to 3: little-endian arrays of plain numbers in C order. Files may come from
// anyone, so nothing in the header is trusted or evaluated. Every failure is a FileError.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "kit/host_tensor.h"

namespace mxflash::kit {

HostTensor read_npy(const std::string& path);

// The same for a file in memory; `label` stands for the path in messages.
HostTensor parse_npy(std::span<const std::byte> bytes, const std::string& label = "<buffer>");

}  // namespace mxflash::kit
