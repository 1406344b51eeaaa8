#include "runtime/check.h"

#include <algorithm>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "mx/block.h"
#include "mx/operand_image.h"
#include "mx/scale_layout.h"

namespace mxflash {

Status make_status(StatusCode code, const char* format, ...) {
  Status s{.code = code};
  va_list args;
  va_start(args, format);
  const int length = std::vsnprintf(s.message, sizeof s.message, format, args);
  va_end(args);
  if (length >= int(sizeof s.message)) std::memcpy(s.message + sizeof s.message - 4, "...", 4);
  // One line of ASCII, whatever is in a caller's string (a backend's name).
  for (char* c = s.message; *c; ++c) {
    if (*c < ' ' || *c > '~') *c = '?';
  }
  return s;
}

namespace {

constexpr const char* dtype_set_name(DtypeSet set) {
  switch (set) {
    case DtypeSet::floats: return "f32, f16 or bf16";
    case DtypeSet::f32: return "f32";
    case DtypeSet::bf16: return "bf16";
    case DtypeSet::fp8: return "e4m3 or e5m2";
    case DtypeSet::u8: return "u8";
    case DtypeSet::scale: return "e8m0 or u8";
    case DtypeSet::accumulator: return "f32 or f16";
  }
  return "";
}

constexpr bool contains(DtypeSet set, Dtype dtype) {
  switch (set) {
    case DtypeSet::floats: return is_float_dtype(dtype);
    case DtypeSet::f32: return dtype == Dtype::f32;
    case DtypeSet::bf16: return dtype == Dtype::bf16;
    case DtypeSet::fp8: return is_fp8_dtype(dtype);
    case DtypeSet::u8: return dtype == Dtype::u8;
    case DtypeSet::scale: return dtype == Dtype::e8m0 || dtype == Dtype::u8;
    case DtypeSet::accumulator: return dtype == Dtype::f32 || dtype == Dtype::f16;
  }
  return false;
}

// Some two index tuples may share an address: sorted by stride, a dimension does not step over all that is below it.
// Strides are known to be small enough to be added up.
bool aliases_itself(const Tensor& t) {
  struct Axis {
    int64_t step, extent;
  };
  std::array<Axis, 4> axes{};  // by ascending step
  size_t count = 0;
  for (int i = 0; i < t.rank; ++i) {
    const int64_t extent = t.shape[size_t(i)], stride = t.stride[size_t(i)];
    if (extent <= 1) continue;
    const Axis axis{stride < 0 ? -stride : stride, extent};
    size_t at = count++;
    for (; at > 0 && axes[at - 1].step > axis.step; --at) axes[at] = axes[at - 1];
    axes[at] = axis;
  }
  int64_t reach = 0;  // largest offset so far
  for (size_t i = 0; i < count; ++i) {
    if (axes[i].step <= reach) return true;
    reach += (axes[i].extent - 1) * axes[i].step;
  }
  return false;
}

// `member` is ".dtype" of a tensor, or empty.
Status check_dtype_of(const TensorRule& rule, const char* member, Dtype dtype, DtypeSet allowed) {
  if (contains(allowed, dtype)) return {};
  const char* set = dtype_set_name(allowed);
  if (dtype < Dtype::none || dtype > Dtype::u8) {
    return invalid("%s: %s%s must be %s, got the value %d", rule.op, rule.name, member, set, int(dtype));
  }
  return invalid("%s: %s%s must be %s, got %s", rule.op, rule.name, member, set, dtype_name(dtype));
}

}  // namespace

bool is_small_product(std::initializer_list<int64_t> extents) {
  __int128 product = 1;
  for (const int64_t extent : extents) {
    if (extent >= kMaxElements || (extent > 0 && (product *= extent) >= kMaxElements)) return false;
  }
  return true;
}

Status check_dtype(const TensorRule& rule, Dtype dtype, DtypeSet allowed) {
  return check_dtype_of(rule, "", dtype, allowed);
}

Status check_extent(const TensorRule& rule, const char* dim, int64_t got, int64_t want, const char* why) {
  if (got == want) return {};
  return invalid("%s: %s.%s must be %" PRId64 " (%s), got %" PRId64, rule.op, rule.name, dim, want, why, got);
}

Status check_same_device(const TensorRule& rule, const Tensor& t, Device device) {
  if (t.device == device) return {};
  return invalid("%s: %s must be on %s:%d like the other tensors, got %s:%d", rule.op, rule.name,
                 device_type_name(device.type), device.index, device_type_name(t.device.type), t.device.index);
}

Status check_tensor(const TensorRule& rule, const Tensor& t, int32_t rank, DtypeSet allowed) {
  if (!t.data && t.rank == 0) return invalid("%s: %s must be given, got a tensor without data", rule.op, rule.name);
  if (t.rank != rank) return invalid("%s: %s.rank must be %d, got %d", rule.op, rule.name, rank, t.rank);
  MXFLASH_TRY(check_dtype_of(rule, ".dtype", t.dtype, allowed));
  if (t.device.type != DeviceType::cpu && t.device.type != DeviceType::cuda) {
    return invalid("%s: %s.device.type must be cpu or cuda, got the value %d", rule.op, rule.name, int(t.device.type));
  }
  bool empty = false;
  for (int i = 0; i < rank; ++i) {
    const int64_t extent = t.shape[size_t(i)];
    if (extent < 0) return invalid("%s: %s.shape[%d] must be >= 0, got %" PRId64, rule.op, rule.name, i, extent);
    empty |= extent == 0;
  }
  const auto extent = [&](int i) { return i < rank ? t.shape[size_t(i)] : 1; };
  if (!is_small_product({extent(0), extent(1), extent(2), extent(3)})) {
    return invalid("%s: %s must have fewer than 2^56 elements, got shape [%" PRId64 ", %" PRId64 ", %" PRId64 "]",
                   rule.op, rule.name, extent(0), extent(1), extent(2));
  }
  if (empty) return {};
  if (!t.data) {
    return invalid("%s: %s.data must not be null for %" PRId64 " elements, got null", rule.op, rule.name, t.numel());
  }
  const size_t last = size_t(rank - 1);
  const bool contiguous = t.stride[last] == 1 || (rule.may_broadcast && t.stride[last] == 0);
  if (!contiguous && t.shape[last] > 1) {
    return invalid("%s: %s.stride[%d] must be 1 (contiguous last dimension), got %" PRId64, rule.op, rule.name,
                   rank - 1, t.stride[last]);
  }
  const int64_t size = dtype_size(t.dtype);
  if (reinterpret_cast<uintptr_t>(t.data) % uintptr_t(size) != 0) {
    return invalid("%s: %s.data must be aligned to %" PRId64 " bytes (%s), got address %p", rule.op, rule.name, size,
                   dtype_name(t.dtype), t.data);
  }
  // Offsets must fit in 63 bits, also those of the scales and workspaces derived from these extents.
  __int128 span = 0;
  for (int i = 0; i < rank; ++i) {
    const __int128 step = t.stride[size_t(i)];
    span += (t.shape[size_t(i)] - 1) * (step < 0 ? -step : step);
  }
  if (span >= kMaxElements) {
    return invalid("%s: %s must span fewer than 2^56 elements, got shape[0] %" PRId64 ", stride[0] %" PRId64, rule.op,
                   rule.name, t.shape[0], t.stride[0]);
  }
  if (rule.output && aliases_itself(t)) {
    return invalid("%s: %s must not overlap itself (shape[0] %" PRId64 ", stride[0] %" PRId64 ")", rule.op, rule.name,
                   t.shape[0], t.stride[0]);
  }
  return {};
}

Status check_capacity(const TensorRule& rule, const Tensor& data, const Jagged& seq) {
  const int64_t tokens = data.shape[0], batch = seq.batch;
  const int64_t length = longest_sequence(tokens, seq);
  const int64_t rows = std::max({batch, padded_token_count(tokens, seq), batch * ceil_div(length, kMxBlock)});
  if (is_small_product({rows, data.shape[1], data.shape[2]})) return {};
  return invalid("%s: %s must have fewer than 2^56 elements with padding, got %" PRId64
                 " tokens, batch %d, max_seqlen %d",
                 rule.op, rule.name, tokens, seq.batch, seq.max_seqlen);
}

Status check_mx_tensor(const TensorRule& rule, const MxTensor& t, const Jagged& seq) {
  if (t.data.rank != 2 && t.data.rank != 3) {
    return invalid("%s: %s.data.rank must be 2 or 3, got %d", rule.op, rule.name, t.data.rank);
  }
  MXFLASH_TRY(check_tensor(rule, t.data, t.data.rank, DtypeSet::fp8));
  const int32_t block = int32_t(t.block), layout = int32_t(t.layout);
  if (block < 0 || block > int32_t(MxBlock::col32)) {
    return invalid("%s: %s.block must be square32, row32 or col32, got %d", rule.op, rule.name, block);
  }
  if (layout < 0 || layout > int32_t(ScaleLayout::atom128x4)) {
    return invalid("%s: %s.layout must be linear or atom128x4, got %d", rule.op, rule.name, layout);
  }
  if (t.block == MxBlock::square32 && t.layout == ScaleLayout::atom128x4) {
    return invalid("%s: %s.layout must be linear for block square32, got atom128x4 (convert_scales expands it)",
                   rule.op, rule.name);
  }
  const Tensor data = as_heads(t.data);
  MXFLASH_TRY(check_capacity(rule, data, seq));
  const auto want = scale_shape(t.block, t.layout, data.shape[0], data.shape[1], data.shape[2], seq);
  const int32_t rank = t.layout == ScaleLayout::linear ? 3 : 4;
  if (t.scale.rank != rank) {
    return invalid("%s: %s.scale.rank must be %d, got %d", rule.op, rule.name, rank, t.scale.rank);
  }
  MXFLASH_TRY(check_dtype_of(rule, ".scale.dtype", t.scale.dtype, DtypeSet::scale));
  int64_t step = 1;
  for (int i = rank - 1; i >= 0; --i) {
    if (t.scale.shape[size_t(i)] != want[size_t(i)]) {
      return invalid("%s: %s.scale.shape[%d] must be %" PRId64 " (scale_shape), got %" PRId64, rule.op, rule.name, i,
                     want[size_t(i)], t.scale.shape[size_t(i)]);
    }
    if (t.scale.shape[size_t(i)] > 1 && t.scale.stride[size_t(i)] != step) {
      return invalid("%s: %s.scale.stride[%d] must be %" PRId64 " (contiguous), got %" PRId64, rule.op, rule.name, i,
                     step, t.scale.stride[size_t(i)]);
    }
    step *= t.scale.shape[size_t(i)];
  }
  if (step > 0 && !t.scale.data) {
    return invalid("%s: %s.scale.data must not be null for %" PRId64 " bytes, got null", rule.op, rule.name, step);
  }
  if (t.scale.device != t.data.device) {
    return invalid("%s: %s.scale must be on %s:%d like its data, got %s:%d", rule.op, rule.name,
                   device_type_name(t.data.device.type), t.data.device.index, device_type_name(t.scale.device.type),
                   t.scale.device.index);
  }
  return {};
}

Status check_image(const TensorRule& rule, const Tensor& image, ImageRole role, const Tensor& data, const Jagged& seq) {
  MXFLASH_TRY(check_tensor(rule, image, 1, DtypeSet::u8));
  if (role < ImageRole::query || role > ImageRole::value) {
    return invalid("%s: %s_role must be query, key or value, got %d", rule.op, rule.name, int(role));
  }
  if (data.shape[2] > kMaxImageDim) {
    return invalid("%s: %s needs a dim of at most %" PRId64 ", got %" PRId64, rule.op, rule.name, kMaxImageDim,
                   data.shape[2]);
  }
  const int64_t size = image_size(role, data.shape[0], data.shape[1], data.shape[2], seq);
  MXFLASH_TRY(check_extent(rule, "shape[0]", image.shape[0], size, "image_size"));
  if (reinterpret_cast<uintptr_t>(image.data) % kImageAlign != 0) {
    return invalid("%s: %s.data must be aligned to %d bytes, got address %p", rule.op, rule.name, int(kImageAlign),
                   image.data);
  }
  return check_same_device(rule, image, data.device);
}

Status check_jagged(const char* op, const char* name, const Jagged& seq, int64_t tokens, Device device) {
  if (seq.batch < 1) return invalid("%s: %s.batch must be >= 1, got %d", op, name, seq.batch);
  if (!seq.cu_seqlens) {
    if (tokens % seq.batch != 0) {
      return invalid("%s: tokens must be a multiple of %s.batch = %d without cu_seqlens, got %" PRId64, op, name,
                     seq.batch, tokens);
    }
    return {};
  }
  if (reinterpret_cast<uintptr_t>(seq.cu_seqlens) % alignof(int32_t) != 0) {
    return invalid("%s: %s.cu_seqlens must be aligned to 4 bytes, got address %p", op, name,
                   static_cast<const void*>(seq.cu_seqlens));
  }
  if (seq.max_seqlen < 0) return invalid("%s: %s.max_seqlen must be >= 0, got %d", op, name, seq.max_seqlen);
  if (device.type != DeviceType::cpu) return {};
  if (seq.cu_seqlens[0] != 0) return invalid("%s: %s.cu_seqlens[0] must be 0, got %d", op, name, seq.cu_seqlens[0]);
  for (int32_t b = 0; b < seq.batch; ++b) {
    const int64_t length = int64_t(seq.cu_seqlens[b + 1]) - seq.cu_seqlens[b];
    if (length < 0) {
      return invalid("%s: %s.cu_seqlens must not decrease, got %d after %d at index %d", op, name,
                     seq.cu_seqlens[b + 1], seq.cu_seqlens[b], b + 1);
    }
    if (length > seq.max_seqlen) {
      return invalid("%s: %s.max_seqlen = %d must bound every length, got %" PRId64 " for sequence %d", op, name,
                     seq.max_seqlen, length, b);
    }
  }
  if (seq.cu_seqlens[seq.batch] > tokens) {
    return invalid("%s: %s.cu_seqlens[%d] must be at most the tensor's tokens = %" PRId64 ", got %d", op, name,
                   seq.batch, tokens, seq.cu_seqlens[seq.batch]);
  }
  return {};
}

Status check_rule(const char* op, MxRule rule) {
  if (rule == MxRule::rceil || rule == MxRule::floor) return {};
  return invalid("%s: rule must be rceil or floor, got %d", op, int(rule));
}

Status check_workspace(const char* op, const char* name, const void* memory, size_t got, size_t need) {
  if (need == 0) return {};
  if (!memory || got < need) {
    return make_status(StatusCode::workspace_too_small, "%s: %s must have %zu bytes, got %zu", op, name, need,
                       memory ? got : 0);
  }
  if (reinterpret_cast<uintptr_t>(memory) % kWorkspaceAlign != 0) {
    return invalid("%s: %s must be aligned to %zu bytes, got address %p", op, name, kWorkspaceAlign, memory);
  }
  return {};
}

}  // namespace mxflash
