// Memory, a stream and a clock on a CUDA device, for calls of backends whose tensors live there. Owning, and errors are
// exceptions (StatusError): kit/runner.h. In a build without CUDA everything here throws; BackendInfo::available says
// so before.
#pragma once

#include <mxflash/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace mxflash::kit {

// Backends are named after what they run on: tensors of "sm90", "sm100" are in CUDA memory, of all others in the
// host's.
constexpr bool is_device_backend(std::string_view name) { return name.starts_with("sm"); }

// The one backend that computes with operand images; others on a device take MXFP8 operands themselves.
constexpr bool reads_images(std::string_view name) { return name == "sm90"; }

// The current device's.
struct DeviceFacts {
  std::string name;    // "NVIDIA H200"
  std::string driver;  // "580.159.04, CUDA 13.0", the second what it can; without the first if the system does not say
  int multiprocessors = 0;
  size_t l2_bytes = 0, memory_bytes = 0;
};
DeviceFacts device_facts();
size_t free_device_memory();

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t size);
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer();

  void* data() const { return data_; }
  size_t size() const { return size_; }

  // Ordered on the stream; memory of the host may go when a copy returns.
  void fill(uint8_t byte, Stream stream) const;
  void upload(const void* from, size_t count, Stream stream) const;  // to the beginning
  void download(void* to, size_t offset, size_t count, Stream stream) const;
  // The first `period` bytes again and again, up to the end.
  void repeat(size_t period, Stream stream) const;

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

class DeviceStream {
 public:
  DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;
  ~DeviceStream();
  Stream get() const { return stream_; }
  void wait() const;  // reports what went wrong in kernels, too

 private:
  Stream stream_ = nullptr;
};

// Copies size / 2 bytes from one half of a buffer to the other; the way that no kernel beats.
void copy_halves(const DeviceBuffer& buffer, Stream stream);

// Milliseconds of each of `count` runs of `enqueue`, by events on the stream, back to back: while the device is busy
// with `head_start`, the host gets ahead, so that the time between two launches is the device's, not the host's.
// `between` goes before each run, outside of its time.
std::vector<double> time_on_device(Stream stream, int count, const std::function<void()>& enqueue,
                                   const std::function<void()>& head_start, const std::function<void()>& between);

}  // namespace mxflash::kit
