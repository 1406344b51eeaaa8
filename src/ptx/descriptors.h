// Descriptors of tensor cores, constexpr and tested on the CPU.
//
// Shared-memory matrix descriptors of wgmma: PTX ISA, "Matrix Descriptor Format".
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

// ---- tcgen05 --------------------------------------------------------------------------------------------------------
//
// PTX ISA, "tcgen05 family of instructions", "Shared memory descriptor": wgmma's with bit 46 set. 61..63 are the
// swizzle, whose codes are twice those of wgmma's bits 62..63. Operands of 8-bit elements may be MN-major too: then K
// goes down the rows, 8 rows of a span make an atom, `leading` bytes lead from a span of MN to the next (unused if
// there is one) and `stride` from 8 rows of K to the next: a K-step of 32 rows adds 4 * stride.

constexpr uint64_t tcgen05_matrix_descriptor(uint32_t shared_address, Swizzle s, uint32_t leading, uint32_t stride) {
  return matrix_descriptor(shared_address, s, leading, stride) | uint64_t(1) << 46;
}
// Atoms one after the other.
constexpr uint64_t tcgen05_matrix_descriptor(uint32_t shared_address, Swizzle s) {
  return matrix_descriptor(shared_address, s) | uint64_t(1) << 46;
}
// 512 bytes of scales, 32 rows of 16 bytes, for tcgen05_cp_scales: byte 4 w + b of row r is the scale of operand row
// 32 w + r, block b of its 128 channels ("scale factors layout", 128x4).
constexpr uint64_t tcgen05_scale_descriptor(uint32_t shared_address) {
  return tcgen05_matrix_descriptor(shared_address, Swizzle::none, 0, 128);
}

enum class Fp8Code : uint32_t { e4m3 = 0, e5m2 = 1 };
enum class Major : uint32_t { k = 0, mn = 1 };

// D [128][n] += A [128][32] B [n][32]^T, both with a UE8M0 scale for each row.
struct BlockScaledProduct {
  uint32_t n = 128;  // a multiple of 8, of 16 if B is MN-major; at most 256
  Fp8Code a = Fp8Code::e4m3, b = Fp8Code::e4m3;
  Major a_major = Major::k, b_major = Major::k;
};

// PTX ISA, "Instruction descriptor", kind::mxf8f6f4: 4..5 the byte of B's scales, 7..9 and 10..12 the elements, 15 and
// 16 the majors, 17..22 n / 8, 23 UE8M0, 27..28 m / 128, 29..30 the byte of A's scales.
constexpr uint32_t tcgen05_instruction(const BlockScaledProduct& p) {
  return uint32_t(p.a) << 7 | uint32_t(p.b) << 10 | uint32_t(p.a_major) << 15 | uint32_t(p.b_major) << 16 |
         (p.n >> 3) << 17 | 1u << 23 | 1u << 27;
}
constexpr uint32_t with_n(uint32_t instruction, uint32_t n) { return (instruction & ~(63u << 17)) | (n >> 3) << 17; }
// Which byte, 0..3, of each word of scales this K-step takes.
constexpr uint32_t with_scale_ids(uint32_t instruction, uint32_t sfa_id, uint32_t sfb_id) {
  return instruction | sfa_id << 29 | sfb_id << 4;
}

}  // namespace mxflash::ptx
