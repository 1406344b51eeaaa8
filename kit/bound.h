// How far MXFP8 attention may be from exact attention on the same operands, element by element.
//
// The operands are the dequantized ones, which both sides hold exactly. What is left is what the recipe rounds (P, dS,
// the stored out, lse and gradients), what block fixed point rounds (operands too), what tensor cores cut off, and the
// roundoff of sums. Worst
// case throughout: no two roundings are assumed to cancel. So the bound holds for every element of every correct
// backend, and says nothing about the size of a typical error, which is smaller by the square root of the number of
// keys; that is what the SQNR floors of kit/verify.h are for. kit/bound.cpp carries the derivation.
#pragma once

#include <cstdint>
#include <vector>

#include "kit/oracle.h"
#include "mxflash/types.h"

namespace mxflash::kit {

// What P and dS become before they are multiplied.
enum class WeightFormat {
  fp8,    // the recipe
  fp32,   // backend cpu, exact
  fixed,  // backend cpu, fast: int16 times one power of two for 32 values of the contraction; the other operand too
  tile,   // backend sm90: FP8 with scale 2^-6 of a maximum that may lag; FP8 tensor cores add. Forward only
  bf16,   // backend sm90_bf16; out divides by the unrounded sum; BF16 tensor cores add
};

struct BoundOptions {
  WeightFormat weights = WeightFormat::fp8;
  bool fixed_scores = false;     // in q k^T and dout v^T both operands are in that fixed point
  Dtype ds_dtype = Dtype::e4m3;  // of dS, where it is fp8
  // Query rows x keys that share one scale of dS in fp8, and query rows that share one exponent of P in the backward or
  // one scale of a column of P or dS in fixed point; counted from the start of a sequence.
  int64_t block_rows = 32, block_cols = 32;
  double roundoff = 0x1p-53;      // of one operation: 2^-24 for a backend that adds in fp32
  double out_roundoff = 0x1p-24;  // of the dtype that out is stored in
};

// |result - exact| <= bound, with lse, dq, dk, dv stored as fp32. Rows that see no key, and tokens of no sequence, have
// bound 0: results there are defined exactly.
struct AttentionBound {
  std::vector<double> out, lse, dq, dk, dv;  // shapes of OracleResult
  std::vector<double> max_p;                 // like lse: the exact largest weight of a row, 0 without keys
  std::vector<double> exponent;              // like lse: of -log2 of that weight, which row_exponent is the floor of
};

// `exact` is oracle_attention(operands), forward and backward.
AttentionBound attention_bound(const OracleProblem& operands, const OracleResult& exact,
                               const BoundOptions& options = {});

}  // namespace mxflash::kit
