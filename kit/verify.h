// What `mxflash check`, tests/check_test.cpp and `mxflash bench` (before it times) ask of a backend:
//   every element of out, lse, dq, dk, dv within the derived bound of exact attention on the dequantized operands;
//   row_exponent exact; SQNR against exact attention on the original operands at least the floor of the distribution;
//   the same bits in a second run, on one thread, and with poisoned padding; dk_mx, dv_mx the quantized dk, dv;
//   a backend other than ref: rounding noise at most twice that of ref;
//   backend cpu: all of that in either CpuMath, and the SQNR of fast at most kFastLossDb below that of exact;
//   a backend on a CUDA device: exact attention on what its operand images hold, the same bits with images given in
//   place of operands, a mean of v added, and for forward alone where it has no backward; gradients have no bound but
//   their floors and ref, with out in fp32 and in BF16, and are the same bits where they are asked to be deterministic.
//   What it refuses is a note, or skips the case.
// verify_quantizers asks the like of quantize, dequantize, convert_scales, rmsnorm_quantize, rmsnorm_bwd and
// gemm_quantize.
#pragma once

#include <mxflash/backend.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kit/bound.h"
#include "kit/cases.h"
#include "kit/compare.h"
#include "kit/mx_attention.h"

namespace mxflash::kit {

struct TensorReport {
  const char* name = "";  // "out", "lse", "dq", "dk", "dv"
  double sqnr_db = 0;     // against exact attention on the original operands
  double floor_db = 0;
  bool has_floor = false;  // lse has none, and neither has a tensor that is exactly zero, such as dq with one key a row
  double bound_share = 0;  // max |error| / bound, against exact attention on the dequantized operands
  std::string failure{};   // one line with the worst element, or ""
};

struct Report {
  std::string name;  // of the case
  std::string backend;
  std::string mode{};  // of backend cpu: "exact" or "fast"
  std::vector<TensorReport> tensors{};
  std::vector<std::string> failures{};  // of everything, one line each
  std::string skipped{};                // why the backend cannot run this case, or ""
  std::vector<std::string> notes{};     // parts that it cannot run
  double seconds = 0;
  bool ok() const { return failures.empty(); }
};

// What is right for one case: computed once, used to judge any number of results.
struct AttentionTruth {
  AttentionCase problem;
  Dtype grad_element = Dtype::e4m3;
  OracleResult original;     // on the operands before quantization
  OracleResult dequantized;  // on the operands after it
  BoundOptions arithmetic{};
  AttentionBound bound;  // around `dequantized`
};
AttentionTruth attention_truth(const AttentionCase& c, const Operands& original, const MxAttention& mx,
                               BoundOptions arithmetic);  // its ds_dtype is that of mx, whatever it says

// Elements, row_exponent and, unless switched off, SQNR floors.
Report judge(const AttentionTruth& truth, const AttentionResult& result, bool floors = true);

// The criterion of FlashAttention-3's tests, per tensor: rounding noise at most twice that of ref (thrice for out of
// FP8 tensor cores, which cut scores, too), and what fp32 or block fixed point may add. It sees what the worst case
// bound of long sums cannot. Gradients of FP8 tensor cores: SQNR against exact attention on the original operands at
// most 0.15 dB (scores near 1000: 6, a large mean of v: 3.5), and luck, below that of ref (beside_ref). One line per
// failure.
std::vector<std::string> worse_than_ref(const AttentionTruth& truth, const AttentionResult& result,
                                        const AttentionResult& ref);

// Mode fast of backend cpu may lower the SQNR of a tensor, against exact attention on the original operands, by this
// much from what mode exact has. One line per failure.
inline constexpr double kFastLossDb = 0.05;
std::vector<std::string> worse_than_exact(const AttentionTruth& truth, const AttentionResult& fast,
                                          const AttentionResult& exact);

// attention_cases, and what they lack for this purpose: keys so many and so equal that the backward's P is lost in
// E4M3's subnormals unless its scale follows row_exponent (16384 of them stay exact: P is a power of two); in the quick
// list also a GQA with several key heads.
std::vector<AttentionCase> check_cases(bool quick_only = false);

// Keys so many that sums which a tensor core keeps too long show: v of a large mean, and without. To be verified
// without floors, which were measured on short cases.
std::vector<AttentionCase> long_cases();

// Keys so many and so equal that P is 2^-16.
std::vector<AttentionCase> long_gradient_cases();

struct VerifyOptions {
  std::string fwd_backend = "ref", bwd_backend = "ref";  // the second may be empty: forward alone
  Dtype grad_element = Dtype::e4m3;                      // of dout, and of dS where the backward can
  MxBlock block = MxBlock::square32;
  CpuMath cpu_math = CpuMath::automatic;
  bool floors = true;  // off for shapes that are not on the case list, which the floors were measured on
};
Report verify_attention(const AttentionCase& c, const VerifyOptions& options);

// A backend with one direction is checked together with ref's other one; on a device, where ref cannot read what it
// leaves, a forward is checked alone.
VerifyOptions attention_backends(const std::string& backend);

// What the products of backend cpu round on this machine. `math` is not automatic.
BoundOptions cpu_bound(CpuMath math);

// The modes of a backend: exact and fast of `cpu`; of others automatic, which they ignore.
std::vector<CpuMath> modes_of(const std::string& backend);

// SQNR floors in dB of out, dq, dk, dv against exact attention on the original operands.
struct SqnrFloor {
  double out, dq, dk, dv;
};
SqnrFloor sqnr_floor(const AttentionCase& c, Dtype grad_element);

// The operations that write bytes, one report per kind of block, rule and element, or per operation, as they get ready.
// Operations that `backend` does not have are left out.
void verify_quantizers(const std::string& backend, const std::function<void(const Report&)>& done);

// Names of the backends of an operation that can run here, best first.
std::vector<std::string> available_backends(Operation op);

}  // namespace mxflash::kit
