// What `mxflash bench` times on a CUDA device: operands in its memory, and the calls.
//
// Operands are N(0, 1) in BF16, made on the host and repeated on the device: with a period that no row divides, so that
// rows differ.
#pragma once

#include <mxflash/mx.h>
#include <mxflash/quantize.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <vector>

#include "kit/device_memory.h"
#include "kit/host_tensor.h"
#include "tools/bench_shapes.h"

namespace mxflash::tools {

// Odd, so that rows of any length begin at all of its places.
inline constexpr size_t kPoolSize = (size_t(1) << 22) + 3;

// The beginning of an operand: its elements, and what they are.
struct Pool {
  std::vector<uint16_t> bits;
  std::vector<float> values;
};
enum class Source : uint64_t { q = 1, k, v, dout, weight };
const Pool& pool(Source source);

// All device memory of a line.
class Memory {
 public:
  explicit Memory(Stream stream) : stream_(stream) {}
  Stream stream() const { return stream_; }

  const kit::DeviceBuffer& of(const Tensor& t) const {
    return *std::ranges::find(buffers_, t.data, [](const kit::DeviceBuffer& b) { return b.data(); });
  }
  const kit::DeviceBuffer& buffer(size_t size) { return buffers_.emplace_back(std::max<size_t>(size, 16)); }

  Tensor tensor(Dtype dtype, auto... extent) {
    Tensor t = make_tensor(nullptr, dtype, extent...);
    t.device = {DeviceType::cuda, 0};
    t.data = buffer(size_t(t.numel() * dtype_size(dtype))).data();
    return t;
  }
  Tensor random_bf16(Source source, auto... extent) {
    const Tensor t = tensor(Dtype::bf16, extent...);
    const std::vector<uint16_t>& bits = pool(source).bits;
    const size_t count = std::min(bits.size(), size_t(t.numel()));
    buffers_.back().upload(bits.data(), 2 * count, stream_);
    if (count > 0) buffers_.back().repeat(2 * count, stream_);
    return t;
  }
  // Without memory, it says what is rounded on the way to an image.
  MxTensor mx(int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq, bool with_memory) {
    MxTensor t =
        make_mx_tensor(nullptr, nullptr, Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, tokens, heads, dim, seq);
    t.data.device = t.scale.device = {DeviceType::cuda, 0};
    if (!with_memory) return t;
    t.data.data = buffer(size_t(t.data.numel())).data();
    t.scale.data = buffer(size_t(t.scale.numel())).data();
    return t;
  }
  Tensor image(ImageRole role, int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq) {
    return tensor(Dtype::u8, image_size(role, tokens, heads, dim, seq));
  }
  Jagged jagged(const std::vector<int32_t>& lens, bool is_jagged) {
    if (!is_jagged) return {.batch = int32_t(lens.size())};
    const std::vector<int32_t> cu = kit::cu_seqlens(lens);
    const kit::DeviceBuffer& copy = buffer(cu.size() * sizeof(int32_t));
    copy.upload(cu.data(), cu.size() * sizeof(int32_t), stream_);
    return {.cu_seqlens = static_cast<const int32_t*>(copy.data()),
            .batch = int32_t(lens.size()),
            .max_seqlen = *std::ranges::max_element(lens)};
  }

 private:
  Stream stream_;
  std::list<kit::DeviceBuffer> buffers_;
};

inline double bytes_of(const Tensor& t) { return double(t.numel()) * double(dtype_size(t.dtype)); }
inline double bytes_of(const MxTensor& t) { return bytes_of(t.data) + bytes_of(t.scale); }

// What is timed: one line of results.
struct DeviceWork {
  std::string mode;
  std::function<void()> enqueue;
  double flops = 0, bytes = 0;
  std::function<double()> check{};  // the error of some rows of what it computed; null: not checked at full size
  double workspace_bytes = NAN, saved_bytes = NAN;  // as in Line
  double error = NAN;
};

// attention_fwd in these modes, attention_bwd, and training_step; others work on the tokens of q.
std::vector<DeviceWork> prepare_forward(const BenchShape& s, const std::string& backend,
                                        const std::vector<std::string>& modes, Memory& memory);
std::vector<DeviceWork> prepare_backward(const BenchShape& s, const std::string& backend, Memory& memory);
std::vector<DeviceWork> prepare_step(const BenchShape& s, const std::string& backend, Memory& memory);
std::vector<DeviceWork> prepare_tokens(BenchOp op, const BenchShape& s, const std::string& backend, Memory& memory);

// About what they allocate.
double bytes_needed(BenchOp op, const BenchShape& s, const std::string& backend, const std::vector<std::string>& modes);

}  // namespace mxflash::tools
