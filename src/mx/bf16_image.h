// BF16 operand images: what backend sm90_bf16 loads (docs/hopper.md).
//
// An image holds the elements of an MX tensor in BF16, element * scale, which is exact but beyond BF16's range: above
// it Inf, below 2^-126 rounded to a multiple of 2^-133. Tokens lie on the padded axis (mx/scale_layout.h), channels are
// padded to `dim`, a multiple of 64; missing ones are zeros.
//
//   [heads][tokens / 8][dim / 64][8][64]     atoms of 8 tokens x 64 channels, 1024 bytes, rows of 128 bytes swizzled
//
// So any 8 tokens and their multiples are one piece of memory: a tile of whatever height is one bulk copy. An atom is
// K-major for products over channels (q, k) and MN-major for those over tokens (v): all operands have one layout.
#pragma once

#include <cstdint>

#include "mx/block.h"

namespace mxflash {

inline constexpr int64_t kAtomTokens = 8;
inline constexpr int64_t kAtomChannels = 64;
inline constexpr int64_t kAtomPiece = 8;  // channels that the swizzle keeps together: 16 bytes

struct Bf16ImageShape {
  int64_t heads = 0;
  int64_t tokens = 0;  // padded
  int64_t dim = 0;     // padded

  // Of an element, in elements. token < tokens, channel < dim.
  constexpr int64_t offset(int64_t head, int64_t token, int64_t channel) const {
    const int64_t row = token % kAtomTokens, piece = channel % kAtomChannels / kAtomPiece;
    const int64_t atom = (head * tokens + token) / kAtomTokens * (dim / kAtomChannels) + channel / kAtomChannels;
    return (atom * kAtomTokens + row) * kAtomChannels + (piece ^ row) * kAtomPiece + channel % kAtomPiece;
  }
  constexpr int64_t size() const { return heads * tokens * dim; }  // elements
};

}  // namespace mxflash
