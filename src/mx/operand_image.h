// Operand images: what tensor cores without block scales load (docs/hopper.md).
//
// An image holds the elements of an MX tensor as E4M3 again, but with one power of two for a whole tile of a head
// instead of one per block: element * 2^(scale - tile exponent), rounded to nearest even, which changes nothing unless
// an element falls below 2^-6 of the tile's unit. Tiles lie on the padded token axis (mx/scale_layout.h), so none
// straddles two sequences; missing tokens and channels are zeros. Payloads are what shared memory is to hold, swizzle
// included: a kernel loads a tile with one bulk copy.
//
//   query, key [heads][tokens][dim]            rows of `dim` bytes, 16-byte pieces swizzled over that span
//   value      [heads][tokens / 32][dim][32]   transposed in groups of 32 tokens, swizzled over 32 bytes; tokens of a
//              group are permuted so that a thread's accumulators of Q K^T are, packed, its A fragments of P V
// with dim padded to 64 or 128. After the payload, one byte per scale tile: [heads][tokens / scale tokens] E8M0.
#pragma once

#include <mxflash/mx.h>

#include <cstdint>

#include "mx/block.h"
#include "mx/scale_layout.h"

namespace mxflash {

inline constexpr int64_t kImageTile = 128;  // tokens: padded sequences are whole tiles
inline constexpr int64_t kMaxImageDim = 128;
inline constexpr uintptr_t kImageAlign = 16;  // of the copy engine
inline constexpr int64_t kValueGroup = 32;

constexpr int64_t image_dim(int64_t dim) { return dim <= 64 ? 64 : 128; }

// Tokens that share a scale: a warpgroup's rows of queries, a whole tile of keys or values.
constexpr int64_t image_scale_tokens(ImageRole role) { return role == ImageRole::query ? 64 : kImageTile; }

// Where byte `offset` of rows of `span` bytes (128, 64 or 32) lies: address bits from 4 up are xored with the bits from
// 7 up, as many as the span has. The same on every aligned 1024 bytes.
constexpr int64_t swizzled(int64_t offset, int64_t span) { return offset ^ (((offset >> 7) & (span / 16 - 1)) << 4); }

// Position of a token inside its group of 32, and back. Accumulator columns 8 j + 2 c + e of a quad's thread c become
// bytes 4 c + 2 (j % 2) + e of A columns 16 (j / 2) ...
constexpr int64_t value_position(int64_t token) {
  const int64_t half = token >> 4, high = (token >> 3) & 1, c = (token >> 1) & 3, e = token & 1;
  return 16 * half + 4 * c + 2 * high + e;
}
constexpr int64_t value_token(int64_t position) {
  const int64_t half = position >> 4, c = (position >> 2) & 3, high = (position >> 1) & 1, e = position & 1;
  return 16 * half + 8 * high + 2 * c + e;
}

struct ImageShape {
  ImageRole role = ImageRole::query;
  int64_t heads = 0;
  int64_t tokens = 0;  // padded
  int64_t dim = 0;     // padded

  static constexpr ImageShape of(ImageRole role, int64_t padded_tokens, int64_t heads, int64_t dim) {
    return {role, heads, padded_tokens, image_dim(dim)};
  }
  // Byte of one element. token < tokens, channel < dim.
  constexpr int64_t offset(int64_t head, int64_t token, int64_t channel) const {
    const int64_t base = head * tokens * dim;
    if (role != ImageRole::value) return base + swizzled(token * dim + channel, dim);
    const int64_t group = token / kValueGroup;
    return base + group * kValueGroup * dim +
           swizzled(channel * kValueGroup + value_position(token % kValueGroup), kValueGroup);
  }
  constexpr int64_t scale_tiles() const { return tokens / image_scale_tokens(role); }  // of one head
  constexpr int64_t scale_offset(int64_t head, int64_t token) const {
    return heads * tokens * dim + head * scale_tiles() + token / image_scale_tokens(role);
  }
  constexpr int64_t size() const { return heads * (tokens * dim + scale_tiles()); }
};

}  // namespace mxflash
