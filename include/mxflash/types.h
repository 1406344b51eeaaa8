// Tensors, sequences and errors: the plain structs that every mxflash call is made of.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace mxflash {

// A cudaStream_t. Every call takes one explicitly; CPU backends ignore it and return when the work is done.
using Stream = CUstream_st*;

enum class Dtype : int32_t {
  none = 0,
  f32,
  f16,
  bf16,
  e4m3,  // OCP FP8 E4M3: bias 7, max 448, no Inf, NaN 0x7F and 0xFF
  e5m2,  // OCP FP8 E5M2: bias 15, max 57344
  e8m0,  // OCP MX scale: byte b means 2^(b-127), 255 is NaN
  u8,
};

// Size of one element in bytes; 0 for `none` and for a value outside the enum.
constexpr int64_t dtype_size(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return 4;
    case Dtype::f16:
    case Dtype::bf16: return 2;
    case Dtype::e4m3:
    case Dtype::e5m2:
    case Dtype::e8m0:
    case Dtype::u8: return 1;
    case Dtype::none: break;
  }
  return 0;
}

constexpr const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::none: return "none";
    case Dtype::f32: return "f32";
    case Dtype::f16: return "f16";
    case Dtype::bf16: return "bf16";
    case Dtype::e4m3: return "e4m3";
    case Dtype::e5m2: return "e5m2";
    case Dtype::e8m0: return "e8m0";
    case Dtype::u8: return "u8";
  }
  return "invalid";
}

constexpr bool is_float_dtype(Dtype dtype) {
  return dtype == Dtype::f32 || dtype == Dtype::f16 || dtype == Dtype::bf16;
}
constexpr bool is_fp8_dtype(Dtype dtype) { return dtype == Dtype::e4m3 || dtype == Dtype::e5m2; }

enum class DeviceType : int32_t { cpu = 0, cuda = 1 };

constexpr const char* device_type_name(DeviceType type) {
  switch (type) {
    case DeviceType::cpu: return "cpu";
    case DeviceType::cuda: return "cuda";
  }
  return "invalid";
}

struct Device {
  DeviceType type = DeviceType::cpu;
  int32_t index = 0;
  friend constexpr bool operator==(const Device&, const Device&) = default;
};

// A non-owning view. shape and stride count elements, stride[rank-1] must be 1 (or 0 where a member says
// so). Other strides of inputs may be zero or negative (an expanded or flipped view); outputs must not alias
// themselves. `data == nullptr` means "not given".
struct Tensor {
  void* data = nullptr;
  Dtype dtype = Dtype::none;
  Device device{};
  int32_t rank = 0;
  std::array<int64_t, 4> shape{};
  std::array<int64_t, 4> stride{};

  constexpr explicit operator bool() const { return data != nullptr; }
  constexpr int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[size_t(i)];
    return n;
  }
};

// A contiguous (row-major) view of `data`.
template <class... Extent>
constexpr Tensor make_tensor(void* data, Dtype dtype, Extent... extent) {
  static_assert(sizeof...(Extent) >= 1 && sizeof...(Extent) <= 4, "a tensor has 1 to 4 dimensions");
  Tensor t{.data = data, .dtype = dtype, .rank = int32_t(sizeof...(Extent)), .shape = {int64_t(extent)...}};
  uint64_t step = 1;  // unsigned: an absurd shape wraps here and is refused by the call
  for (int i = t.rank - 1; i >= 0; --i) {
    t.stride[size_t(i)] = int64_t(step);
    step *= uint64_t(t.shape[size_t(i)]);
  }
  return t;
}

// How the tokens of a packed [total, heads, dim] tensor divide into sequences.
//   cu_seqlens == nullptr: `batch` sequences of equal length total / batch.
//   otherwise: int32 [batch + 1] on the operands' device; sequence b is tokens cu_seqlens[b] .. cu_seqlens[b+1] - 1.
//     cu_seqlens[0] must be 0; tokens at and after cu_seqlens[batch] belong to no sequence: inputs there are never
//     read, outputs there are zero (lse: -inf).
//   max_seqlen: an upper bound on the lengths; required with cu_seqlens, ignored (may be 0) without.
// The default is one sequence of all tokens.
struct Jagged {
  const int32_t* cu_seqlens = nullptr;
  int32_t batch = 1;
  int32_t max_seqlen = 0;
};

enum class StatusCode : int32_t {
  ok = 0,
  invalid_argument,  // the call breaks a documented rule; the message has the rule and the value
  unsupported,       // a valid call that the chosen backend does not implement
  unavailable,       // the named backend is unknown, not built in, or its device is missing
  workspace_too_small,
  device_error,  // a CUDA call failed; the message has CUDA's own text
};

constexpr const char* status_code_name(StatusCode code) {
  switch (code) {
    case StatusCode::ok: return "ok";
    case StatusCode::invalid_argument: return "invalid_argument";
    case StatusCode::unsupported: return "unsupported";
    case StatusCode::unavailable: return "unavailable";
    case StatusCode::workspace_too_small: return "workspace_too_small";
    case StatusCode::device_error: return "device_error";
  }
  return "invalid";
}

// What every call returns. It owns its text and allocates nothing. On an error no output has been written, except
// after `device_error`.
struct [[nodiscard]] Status {
  StatusCode code = StatusCode::ok;
  char message[252] = {};  // zero-terminated; e.g. "attention_fwd: q.head_dim must be a multiple of 8, got 20"

  constexpr bool ok() const { return code == StatusCode::ok; }
};

}  // namespace mxflash
