#include "tools/model_chip.h"

#include <algorithm>
#include <string_view>

namespace mxflash::tools {
namespace {

constexpr double kThreads = 128, kLanes = 32, kSchedulers = 4;

bool starts(std::string_view text, std::initializer_list<const char*> prefixes) {
  for (const char* prefix : prefixes) {
    if (text.starts_with(prefix)) return true;
  }
  return false;
}

}  // namespace

// Pipes by opcode. IMAD runs at half rate; what starts with U is of the uniform pipe, which is not modelled beyond its
// issue slots, and neither are branches and barriers.
Work work_of(const Chip& chip, const Counts& counts) {
  Work work;
  for (const auto& [opcode, count] : counts) {
    if (opcode == "LDTM.columns") {
      work[Unit::tmem] += count * 4 * kThreads / chip.tmem_read;
      continue;
    }
    if (opcode == "STTM.columns") {
      work[Unit::tmem] += count * 4 * kThreads / chip.tmem_write;
      continue;
    }
    if (opcode.find('.') != opcode.npos) continue;
    work[Unit::issue] += count;
    if (opcode == "MUFU") {
      work[Unit::mufu] += count * kThreads / chip.mufu;
    } else if (starts(opcode, {"FFMA2", "FADD2", "FMUL2"})) {
      work[Unit::fma] += count * 2 * kThreads / (chip.fp32 * chip.packed);
    } else if (starts(opcode, {"FFMA", "FADD", "FMUL", "HFMA2"})) {
      work[Unit::fma] += count * kThreads / chip.fp32;
    } else if (starts(opcode, {"IMAD"})) {
      work[Unit::fma] += count * 2 * kThreads / chip.fp32;
    } else if (starts(opcode, {"F2FP", "FMNMX", "FSET", "FSEL", "VIMNMX", "VIADD", "LOP3", "SHF", "PRMT", "ISETP",
                               "SEL", "IADD", "LEA", "PLOP3", "IABS", "CS2R", "MOV"})) {
      work[Unit::alu] += count * kThreads / chip.alu;
    } else if (starts(opcode, {"LDS", "STS"})) {
      // One wavefront of a warp: statistics are broadcasts, and what is stored are single words.
      work[Unit::smem] += count * kSchedulers * 128 / (chip.smem_bytes * chip.smem_share);
    }
  }
  return work;
}

Work work_of_one_warp(const Chip& chip, const Counts& counts) {
  Work work = work_of(chip, counts) * (1 / kSchedulers);
  double issued = 0;
  for (const auto& [opcode, count] : counts) issued += opcode.find('.') == opcode.npos ? count : 0;
  work[Unit::issue] = issued;
  return work;
}

Work work_of(const Chip& chip, const Arithmetic& a) {
  double issue = a.issue, fma = a.fma, alu = a.alu, mufu = a.mufu;
  if (mufu > 0) {
    // A cubic in pairs: 5 operations, a clamp, and the exponent by a shift and an addition.
    issue += (5.0 - 1) * a.on_fma;
    fma += 5.0 * a.on_fma;
    alu += 2.5 * a.on_fma;
    mufu -= a.on_fma;
  }
  Work work;
  work[Unit::issue] = a.elements / kLanes * issue * chip.overhead / kSchedulers;
  work[Unit::fma] = a.elements * fma / (chip.fp32 * chip.packed);
  work[Unit::alu] = a.elements * alu / chip.alu;
  work[Unit::mufu] = a.elements * mufu / chip.mufu;
  work[Unit::tmem] = a.elements * (a.read / chip.tmem_read + a.write / chip.tmem_write);
  work[Unit::smem] = a.smem / (chip.smem_bytes * chip.smem_share);
  work[Unit::l2] = a.l2 / chip.l2_bytes;
  return work;
}

Work matmul(const Chip& chip, double m, double n, double k, double smem_bytes, bool bf16) {
  const double depth = bf16 ? 16 : 32, rate = bf16 ? chip.bf16_macs : chip.fp8_macs;  // of one MMA
  Work work;
  work[Unit::tensor] = k / depth * std::max(chip.mma_floor, chip.mma_factor * m * n * depth / rate);
  work[Unit::smem] = smem_bytes / (chip.smem_bytes * chip.smem_share);
  return work;
}

Work smem_fill(const Chip& chip, double bytes) {
  Work work;
  work[Unit::smem] = bytes / (chip.smem_bytes * chip.smem_share);
  return work;
}

Work tmem_read(const Chip& chip, double bytes) {
  Work work;
  work[Unit::tmem] = bytes / chip.tmem_read;
  return work;
}

}  // namespace mxflash::tools
