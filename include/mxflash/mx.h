// MXFP8 tensors: what the payload and scale bytes mean and where they lie. docs/format.md is the long form.
//
// An element is payload * 2^(scale - 127). The payload is an ordinary packed tensor [tokens, heads, dim] of E4M3 or
// E5M2 bytes; there are no gaps between sequences. Blocks tile each sequence of each head from its first token on, so
// a block never straddles two sequences, and blocks at an edge are simply smaller.
//
// Source of the formats: OCP Microscaling Formats (MX) v1.0; OCP 8-bit Floating Point (OFP8) v1.0.
#pragma once

#include <mxflash/types.h>

namespace mxflash {

enum class MxBlock : int32_t {
  square32 = 0,  // 32 tokens x 32 channels: the same bytes serve a contraction over channels and one over tokens
  row32,         // 1 token x 32 channels: for contractions over channels (q, k in QK^T)
  col32,         // 32 tokens x 1 channel: for contractions over tokens (v in PV)
};

// How amax becomes a scale exponent e, before the clamp to -127..127.
enum class MxRule : int32_t {
  rceil = 0,  // smallest e with amax <= max_element * 2^e: no element saturates
  floor,      // OCP: floor(log2 amax) - emax_element: elements above max_element * 2^e saturate
};

enum class ScaleLayout : int32_t {
  linear = 0,  // row-major over blocks, head-major: see scale_shape
  atom128x4,   // Blackwell's 512-byte atoms of 128 rows x 4 blocks; row32 and col32 only
};

struct MxTensor {
  Tensor data;   // [tokens, heads, dim] e4m3 or e5m2; any strides with a contiguous last dimension
  Tensor scale;  // e8m0 (or u8), contiguous, shape given by scale_shape
  MxBlock block = MxBlock::square32;
  ScaleLayout layout = ScaleLayout::linear;

  constexpr explicit operator bool() const { return data.data != nullptr; }
};

// Shape of the scale tensor of a [tokens, heads, dim] payload. With T = padded_tokens(tokens, seq), C = ceil(dim / 32):
//   linear:     square32 [heads, T/32, C]; row32 [heads, T, C]; col32 [heads, T/32, dim]
//   atom128x4:  row32 [heads, T/128, ceil(C/4), 512]; col32 [heads, ceil(dim/128), T/128, 512]
// Depends on capacities only (tokens, batch), never on the values of cu_seqlens. All zeros if the arguments are not
// those of a valid tensor (negative or absurd extents, atom128x4 of square32).
std::array<int64_t, 4> scale_shape(MxBlock block, ScaleLayout layout, int64_t tokens, int64_t heads, int64_t dim,
                                   const Jagged& seq);

// Bytes of that tensor.
int64_t scale_size(MxBlock block, ScaleLayout layout, int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq);

// Rows of the padded token axis that scales are laid out on: every sequence starts at a multiple of 128.
//   equal lengths: batch * ceil(length / 128) * 128
//   jagged:        floor((tokens + 128 * batch) / 128) * 128; sequence b starts at floor((cu_seqlens[b] + 128 b) / 128)
//   * 128
// The jagged rule needs no prefix sum and no length on the host.
int64_t padded_tokens(int64_t tokens, const Jagged& seq);

// What an operand is to attention, for operand images: copies in the form that Hopper's tensor cores load, with one
// scale per tile and with shared memory's layout (docs/hopper.md). They spare attention_fwd a pass over the operand.
enum class ImageRole : int32_t { query = 0, key, value };

// Bytes of the image of a [tokens, heads, dim] operand. 0 if the arguments are not those of a valid tensor, or dim >
// 128.
int64_t image_size(ImageRole role, int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq);

// An MxTensor over contiguous caller memory: payload [tokens, heads, dim], scale of scale_size(...) bytes.
MxTensor make_mx_tensor(void* data, void* scale, Dtype element, MxBlock block, ScaleLayout layout, int64_t tokens,
                        int64_t heads, int64_t dim, const Jagged& seq);

}  // namespace mxflash
