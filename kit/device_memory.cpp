#include "kit/device_memory.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <utility>

#include "kit/runner.h"

#if MXFLASH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace mxflash::kit {

#if MXFLASH_CUDA

namespace {

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  Status status{.code = StatusCode::device_error};
  (std::string(what) + ": " + cudaGetErrorString(error)).copy(status.message, sizeof status.message - 1);
  throw StatusError(status);
}

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  require(cudaGetDevice(&device), "cudaGetDevice");
  require(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

// The word of digits and at least one dot in the first line of the driver's own file; "" if there is none.
std::string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line, word;
  std::getline(file, line);
  std::istringstream words(line);
  while (words >> word) {
    const bool is_version = word.find('.') != word.npos && word.find_first_not_of("0123456789.") == word.npos;
    if (is_version) return word;
  }
  return "";
}

class Event {
 public:
  Event() { require(cudaEventCreate(&event_), "cudaEventCreate"); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  void record(Stream stream) { require(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  double milliseconds_since(const Event& start) const {
    float ms = 0;
    require(cudaEventElapsedTime(&ms, start.event_, event_), "cudaEventElapsedTime");
    return double(ms);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace

DeviceFacts device_facts() {
  DeviceFacts facts;
  int device = 0, driver = 0;
  cudaDeviceProp properties{};
  require(cudaGetDevice(&device), "cudaGetDevice");
  require(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  require(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  facts.name = properties.name;
  const std::string cuda = "CUDA " + std::to_string(driver / 1000) + "." + std::to_string(driver % 1000 / 10);
  const std::string version = driver_version();
  facts.driver = version.empty() ? cuda : version + ", " + cuda;
  facts.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  facts.l2_bytes = size_t(attribute(cudaDevAttrL2CacheSize));
  facts.memory_bytes = properties.totalGlobalMem;
  return facts;
}

size_t free_device_memory() {
  size_t free = 0, total = 0;
  require(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

DeviceBuffer::DeviceBuffer(size_t size) : size_(size) {
  if (size > 0) require(cudaMalloc(&data_, size), ("cudaMalloc of " + std::to_string(size) + " bytes").c_str());
}

DeviceBuffer::~DeviceBuffer() {
  if (data_) cudaFree(data_);  // waits for the device, so that nothing uses it any more
}

void DeviceBuffer::fill(uint8_t byte, Stream stream) const {
  if (size_ > 0) require(cudaMemsetAsync(data_, byte, size_, stream), "cudaMemsetAsync");
}

void DeviceBuffer::upload(const void* from, size_t count, Stream stream) const {
  if (count == 0) return;
  require(cudaMemcpyAsync(data_, from, count, cudaMemcpyHostToDevice, stream), "copy to the device");
  require(cudaStreamSynchronize(stream), "copy to the device");
}

void DeviceBuffer::download(void* to, size_t offset, size_t count, Stream stream) const {
  if (count == 0) return;
  const char* const from = static_cast<const char*>(data_) + offset;
  require(cudaMemcpyAsync(to, from, count, cudaMemcpyDeviceToHost, stream), "copy from the device");
  require(cudaStreamSynchronize(stream), "copy from the device");
}

void DeviceBuffer::repeat(size_t period, Stream stream) const {
  for (size_t done = period; done > 0 && done < size_;) {
    const size_t count = std::min(done, size_ - done);
    char* const to = static_cast<char*>(data_) + done;
    require(cudaMemcpyAsync(to, data_, count, cudaMemcpyDeviceToDevice, stream), "copy on the device");
    done += count;
  }
}

DeviceStream::DeviceStream() {
  require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
}
DeviceStream::~DeviceStream() { cudaStreamDestroy(stream_); }
void DeviceStream::wait() const { require(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

void copy_halves(const DeviceBuffer& buffer, Stream stream) {
  const size_t half = buffer.size() / 2;
  char* const data = static_cast<char*>(buffer.data());
  require(cudaMemcpyAsync(data + half, data, half, cudaMemcpyDeviceToDevice, stream), "copy on the device");
}

std::vector<double> time_on_device(Stream stream, int count, const std::function<void()>& enqueue,
                                   const std::function<void()>& head_start, const std::function<void()>& between) {
  std::vector<Event> starts(static_cast<size_t>(count)), ends(static_cast<size_t>(count));
  if (head_start) head_start();
  for (size_t i = 0; i < starts.size(); ++i) {
    if (between) between();
    starts[i].record(stream);
    enqueue();
    ends[i].record(stream);
  }
  require(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  std::vector<double> ms;
  for (size_t i = 0; i < starts.size(); ++i) ms.push_back(ends[i].milliseconds_since(starts[i]));
  return ms;
}

#else

namespace {

[[noreturn]] void not_built() {
  Status status{.code = StatusCode::unavailable};
  constexpr std::string_view kMessage = "no CUDA device: built without CUDA (cmake --preset cuda)";
  kMessage.copy(status.message, sizeof status.message - 1);
  throw StatusError(status);
}

}  // namespace

DeviceFacts device_facts() { not_built(); }
size_t free_device_memory() { not_built(); }
DeviceBuffer::DeviceBuffer(size_t) { not_built(); }
DeviceBuffer::~DeviceBuffer() = default;
void DeviceBuffer::fill(uint8_t, Stream) const { not_built(); }
void DeviceBuffer::upload(const void*, size_t, Stream) const { not_built(); }
void DeviceBuffer::download(void*, size_t, size_t, Stream) const { not_built(); }
void DeviceBuffer::repeat(size_t, Stream) const { not_built(); }
DeviceStream::DeviceStream() { not_built(); }
DeviceStream::~DeviceStream() = default;
void DeviceStream::wait() const { not_built(); }
void copy_halves(const DeviceBuffer&, Stream) { not_built(); }
std::vector<double> time_on_device(Stream, int, const std::function<void()>&, const std::function<void()>&,
                                   const std::function<void()>&) {
  not_built();
}

#endif

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace mxflash::kit
