// What quantize_cpu.cpp asks of quantize_cpu_kernel.cpp, which is compiled once per instruction set.
#pragma once

#include "runtime/cpu_isa.h"
#include "runtime/quantize_tile.h"

namespace mxflash::cpu {

// Rows of floats of any dtype; a last stride of 0 repeats one element.
struct FloatRows {
  const void* data;
  Dtype dtype;
  int64_t stride;  // elements from row to row
  int64_t rows, cols;
  bool repeat;
  const void* next = nullptr;  // what is read after, of the same shape, to be prefetched
};

struct QuantizeKernels {
  void (*quantize)(const TileSource& in, const TileTarget* outs, int count);
  // Adds what became of the tile to the stats. Only scale, element and block of `out` are read.
  void (*count)(const TileSource& in, const TileTarget& out, QuantizeStats& stats);
  // mean[c] over all rows, in the order of the contract. cols <= kChunk.
  void (*mean)(const FloatRows& in, float* mean);
  // in, less `mean` if there is one, as fp32 to x [32][kChunk], with zeros up to the next multiple of 32 columns.
  void (*widen)(const FloatRows& in, const float* mean, float* x);
  // Rotates x [32][kChunk] in groups of channels. sign [kChunk]: 1 or -1.
  void (*rotate)(float* x, int64_t cols, int64_t group, const float* sign);
  void (*dequantize)(const DequantizeTile& tile);
};

inline constexpr int64_t kChunk = 256;        // channels of a tile that is widened: whole rotation groups
inline constexpr int64_t kMeanPartial = 128;  // tokens of a partial sum; part of the contract

}  // namespace mxflash::cpu

MXFLASH_CPU_KERNELS(cpu::QuantizeKernels, kQuantizeKernels)
