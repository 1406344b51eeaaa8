// What one SM of a chip can do in a clock, and what an instruction costs: the constants of `mxflash model`.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tools/model_pipeline.h"

namespace mxflash::tools {

// Defaults: B200. "vendor" is a figure of NVIDIA's documents; "measured" what bench/results and docs/hopper.md
// found on an H200; "fitted" as docs/blackwell.md says; the others are assumptions, and the model's uncertainty.
struct Chip {
  double sms = 148, ghz = 1.85;              // vendor: 148 * 8192 * 2 * 1.85e9 = 4.49 PFLOP/s, the dense FP8 peak
  double fp8_macs = 8192, bf16_macs = 4096;  // vendor; of the tensor core
  double mma_floor = 56, mma_factor = 1.1;   // measured by others (GB300): clocks of an MMA at least, and over its rate
  double smem_bytes = 128, smem_share = 0.85;  // vendor; fitted: what several readers at once get of it
  double mufu = 16;                            // vendor: ex2, results
  double fp32 = 128, packed = 1;               // vendor: lanes; assumed: lane operations of a pair, in lanes a clock
  double alu = 64;                             // measured: lanes of F2FP, FMNMX, LOP3, ...
  double tmem_read = 512, tmem_write = 512;    // fitted, and the width of its instructions: bytes
  double l2_bytes = 32;                        // assumed: bytes of reductions in L2, of one SM
  double hbm = 6.5e12;                         // assumed: bytes a second of a pass over memory, of 8e12
  double launch_us = 4;       // assumed: of a call, until the first warp starts and after the last one ends
  double sync = 50;           // fitted: from arrive or commit to the code behind the wait
  double mma_latency = 60;    // assumed: from the last MMA's end to its result
  double load_latency = 900;  // assumed: from a bulk copy's start to its arrival
  double warp_share = 0.70;   // fitted: of a scheduler's slots, what one warp takes
  double overhead = 1.00;     // fitted: instructions for each that is counted by hand
};

// {opcode: how many}, as tools/sass_counts.py writes them.
using Counts = std::map<std::string, double>;

// What 128 threads, a warp on each scheduler, do when they execute `counts`.
Work work_of(const Chip& chip, const Counts& counts);
// The same of one warp, on the scheduler that Unit::issue stands for.
Work work_of_one_warp(const Chip& chip, const Counts& counts);

// Elementwise arithmetic counted by hand, for designs of which there is no SASS: per element, but bytes of shared
// memory and of reductions, which are those of all of it.
struct Arithmetic {
  double elements = 0;
  double issue = 0;  // instructions
  double fma = 0;    // fp32 operations, paired
  double alu = 0, mufu = 0;
  double read = 0, write = 0;  // bytes of tensor memory
  double smem = 0, l2 = 0;     // bytes
  double on_fma = 0;           // share of exponentials that polynomials compute
};
Work work_of(const Chip& chip, const Arithmetic& arithmetic);

// An MMA of m x n x k that reads so many bytes of shared memory.
Work matmul(const Chip& chip, double m, double n, double k, double smem_bytes, bool bf16 = false);
Work smem_fill(const Chip& chip, double bytes);
Work tmem_read(const Chip& chip, double bytes);

}  // namespace mxflash::tools
