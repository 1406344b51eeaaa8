// Argument rules, shared by all operations. Each returns ok or a Status with the rule and the value.
#pragma once

#include <mxflash/mx.h>
#include <mxflash/types.h>

#include <initializer_list>

#include "runtime/arena.h"
#include "runtime/status.h"

namespace mxflash {

// Where a tensor lives and what may be in it. `name` is the member's name in the public struct.
struct TensorRule {
  const char* op;
  const char* name;
  bool output = false;         // must not alias itself
  bool may_broadcast = false;  // the last stride may be 0, as in an expanded scalar
};

enum class DtypeSet { floats, f32, bf16, fp8, u8, scale, accumulator };

// Offsets and sizes stay below this many elements, so that no product of theirs overflows 63 bits.
inline constexpr int64_t kMaxElements = int64_t(1) << 56;
// The product of the positive extents is below kMaxElements.
bool is_small_product(std::initializer_list<int64_t> extents);

// A dtype that is no tensor's: rule.name is the whole name of the member.
Status check_dtype(const TensorRule& rule, Dtype dtype, DtypeSet allowed);
// Given, rank, extents >= 0, last stride 1, aligned to its element, no overflow of byte offsets; outputs: no aliasing.
Status check_tensor(const TensorRule& rule, const Tensor& t, int32_t rank, DtypeSet allowed);
Status check_extent(const TensorRule& rule, const char* dim, int64_t got, int64_t want, const char* why);
Status check_same_device(const TensorRule& rule, const Tensor& t, Device device);

// Padded for its sequences, a checked [tokens, heads, dim] tensor is still small, and so is every count of work items.
// `seq` has passed check_jagged.
Status check_capacity(const TensorRule& rule, const Tensor& data, const Jagged& seq);
// Payload of rank 2 or 3, scale of the shape that scale_shape gives, layout and block that go together.
Status check_mx_tensor(const TensorRule& rule, const MxTensor& t, const Jagged& seq);

// An operand image given by the caller: u8, the size that image_size gives for this operand.
Status check_image(const TensorRule& rule, const Tensor& image, ImageRole role, const Tensor& data, const Jagged& seq);

// batch, max_seqlen, divisibility; for cu_seqlens in host memory also its values.
Status check_jagged(const char* op, const char* name, const Jagged& seq, int64_t tokens, Device device);

Status check_rule(const char* op, MxRule rule);

// Given, large enough, and aligned to kWorkspaceAlign.
Status check_workspace(const char* op, const char* name, const void* memory, size_t got, size_t need);

// Stands for memory that is not there yet, or no more: size queries see shapes only. Checks look at the address, and
// nothing touches it.
inline void* somewhere() { return reinterpret_cast<void*>(uintptr_t(kWorkspaceAlign)); }
inline void assume_data(Tensor& t) {
  if (!t.data && t.rank > 0) t.data = somewhere();
}
inline void assume_data(MxTensor& t) {
  assume_data(t.data);
  assume_data(t.scale);
}

// A 2-D [rows, dim] tensor as [rows, 1, dim]; a 3-D one unchanged.
constexpr Tensor as_heads(const Tensor& t) {
  if (t.rank != 2) return t;
  Tensor r = t;
  r.rank = 3;
  r.shape = {t.shape[0], 1, t.shape[1], 0};
  r.stride = {t.stride[0], t.shape[1], t.stride[1], 0};
  return r;
}

}  // namespace mxflash
