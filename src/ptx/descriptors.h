// Shared-memory matrix descriptors of wgmma, constexpr and tested on the CPU: PTX ISA, "Matrix Descriptor Format".
// Operands lie in atoms: 8 rows of one swizzle span (128, 64 or 32 bytes). K-major operands have K along the span, one
// atom after the other: a K-step of 32 bytes inside the span adds 32 to the address. MN-major ones have K down the
// rows.
#pragma once

#include <cstdint>

namespace mxflash::ptx {

enum class Swizzle : uint32_t { none = 0, b128 = 1, b64 = 2, b32 = 3 };  // the values of bits 62..63

constexpr uint32_t swizzle_span(Swizzle s) {
  return s == Swizzle::b128 ? 128 : s == Swizzle::b64 ? 64 : s == Swizzle::b32 ? 32 : 16;
}

// Bits 0..13 the address, 16..29 the leading offset (unused when swizzled, 1), 32..45 the offset from 8 rows to the
// next 8; all in units of 16 bytes.
constexpr uint64_t matrix_descriptor(uint32_t shared_address, Swizzle s) {
  return uint64_t((shared_address & 0x3FFFF) >> 4) | uint64_t(1) << 16 | uint64_t(8 * swizzle_span(s) / 16) << 32 |
         uint64_t(s) << 62;
}

// The same with atoms apart: `stride` bytes from 8 rows to the next 8; MN-major, `leading` bytes from a span of columns
// to the next (K-major operands do not use it).
constexpr uint64_t matrix_descriptor(uint32_t shared_address, Swizzle s, uint32_t leading, uint32_t stride) {
  return uint64_t((shared_address & 0x3FFFF) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 |
         uint64_t(s) << 62;
}

// Adds bytes to the address of a descriptor.
constexpr uint64_t advance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

// Where byte `offset` of an unswizzled image of such rows lies: address bits 4..6 (4..5, 4) are xored with the bits
// three above them. The image starts at a multiple of 8 spans.
constexpr uint32_t swizzled(uint32_t offset, Swizzle s) {
  const uint32_t mask = swizzle_span(s) / 16 - 1;
  return offset ^ (((offset >> 7) & mask) << 4);
}

}  // namespace mxflash::ptx
