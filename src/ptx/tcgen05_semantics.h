// What tcgen05 reads from descriptors, constexpr: for the software implementations, and for tests. Each formula names
// bytes of an operand of 8-bit elements; docs/blackwell.md says what they were compared with.
#pragma once

#include "ptx/descriptors.h"

namespace mxflash::ptx {

struct MatrixOperand {
  uint32_t start, leading, stride;  // bytes
  Swizzle swizzle;
};

constexpr MatrixOperand decode_matrix(uint64_t descriptor) {
  return {uint32_t(descriptor & 0x3FFF) << 4, uint32_t(descriptor >> 16 & 0x3FFF) << 4,
          uint32_t(descriptor >> 32 & 0x3FFF) << 4, Swizzle(descriptor >> 62)};
}

// Shared address of element (mn, k) of a K-step, k < 32. The swizzle permutes by address bits, whatever the start is.
constexpr uint32_t operand_address(const MatrixOperand& m, Major major, uint32_t mn, uint32_t k) {
  const uint32_t span = swizzle_span(m.swizzle);
  uint32_t at = m.start;
  if (major == Major::k) {
    at += mn % 8 * span + mn / 8 * m.stride;
    at += m.swizzle == Swizzle::none ? k / 16 * m.leading + k % 16 : k;
  } else {
    at += mn % span + k % 8 * span;
    at += m.swizzle == Swizzle::none ? mn / span * m.stride + k / 8 * m.leading
                                     : mn / span * m.leading + k / 8 * m.stride;
  }
  return swizzled(at, m.swizzle);
}

struct DecodedInstruction {
  uint32_t m, n, sfa_id, sfb_id;
  Fp8Code a, b;
  Major a_major, b_major;
};

constexpr DecodedInstruction decode_instruction(uint32_t instruction) {
  return {.m = (instruction >> 27 & 3) * 128,
          .n = (instruction >> 17 & 63) * 8,
          .sfa_id = instruction >> 29 & 3,
          .sfb_id = instruction >> 4 & 3,
          .a = Fp8Code(instruction >> 7 & 7),
          .b = Fp8Code(instruction >> 10 & 7),
          .a_major = Major(instruction >> 15 & 1),
          .b_major = Major(instruction >> 16 & 1)};
}

// The rule that a descriptor breaks, or null.
constexpr const char* broken_rule(uint32_t instruction) {
  const DecodedInstruction i = decode_instruction(instruction);
  if (instruction & 0x8700604F) return "instruction descriptor: bits 0..3, 6, 13, 14, 24..26 and 31 must be 0";
  if (!(instruction >> 23 & 1)) return "instruction descriptor: scales must be UE8M0 (bit 23)";
  if (i.m != 128) return "instruction descriptor: m must be 128";
  if (i.n < 8 || i.n > 256) return "instruction descriptor: n must be in 8..256";
  if (i.b_major == Major::mn && i.n % 16) return "instruction descriptor: n must be a multiple of 16 with B MN-major";
  if (uint32_t(i.a) > 1 || uint32_t(i.b) > 1) return "instruction descriptor: only E4M3 and E5M2 are known here";
  return nullptr;
}
constexpr const char* broken_rule(uint64_t descriptor, Major major) {
  const MatrixOperand m = decode_matrix(descriptor);
  if ((descriptor >> 46 & 7) != 1) return "matrix descriptor: bits 46..48 must be 1";
  if (descriptor >> 49 & 7) return "matrix descriptor: base offset must be 0";
  if (descriptor >> 52 & 0x1FF) return "matrix descriptor: bits 52..60 must be 0";
  if (descriptor >> 61 & 1) return "matrix descriptor: swizzle must be 0, 2, 4 or 6";
  if (descriptor >> 14 & 3 || descriptor >> 30 & 3) return "matrix descriptor: bits 14, 15, 30 and 31 must be 0";
  if (m.swizzle != Swizzle::none) {
    const uint32_t span = swizzle_span(m.swizzle), within = m.start % (8 * span);
    if (major == Major::k && within + 32 > span)
      return "matrix descriptor: a K-step must begin inside the first row of an atom";
    if (major == Major::mn && within != 0) return "matrix descriptor: an MN-major operand must begin with an atom";
    if (m.stride % (8 * span)) return "matrix descriptor: the stride must be a multiple of the atom";
  }
  return nullptr;
}

}  // namespace mxflash::ptx
