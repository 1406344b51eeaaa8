// Exact checks of MX bytes: where the tensors are, what is in them, and what the definition of the format makes of it.
//
// The definition is written down here a second time, in fp64 and by search instead of by bit recipes, so that ref is
// judged too.
#pragma once

#include <mxflash/mx.h>
#include <mxflash/quantize.h>

#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <vector>

#include "kit/runner.h"

namespace mxflash::kit {

// Sequences of a [tokens, heads, dim] tensor. Stays where it is: seq points into it.
struct Place {
  std::vector<int32_t> lens, cu;
  int32_t slack;  // tokens after the last sequence
  Jagged seq{};
  int64_t tokens, heads, dim;
  Place(const std::vector<int32_t>& seqlens, int32_t slack_tokens, int64_t num_heads, int64_t head_dim);
  Place(const Place&) = delete;
  size_t size() const { return size_t(tokens * heads * dim); }
};
// Every kind of tail: of sequences, heads and channels; with and without slack.
const std::list<Place>& places();

// Values in any float dtype, and as fp32.
struct Input {
  std::vector<float> values;  // after rounding to the dtype
  std::vector<uint8_t> bytes;
  Dtype dtype;
  Tensor view(auto... extent) const { return make_tensor(const_cast<uint8_t*>(bytes.data()), dtype, extent...); }
};
Input make_input(std::vector<float> x, Dtype dtype);
float load(const std::vector<uint8_t>& bytes, size_t i, Dtype dtype);  // element i

// Normal values, and what breaks quantizers: blocks of zeros, of subnormals, huge and tiny rows, ties, NaN, Inf, -0.
std::vector<float> hard_values(const Place& p);

// "" or the first byte of `t` that is not what the definition makes of x.
std::string judge_bytes(const OwnedMx& t, const std::vector<float>& x, const Place& p, MxRule rule);

// The same of an operand image (mx/operand_image.h): x is what the MX tensor dequantizes to. The scale of a tile is
// that of its finite elements, and bytes outside of the sequences are zero.
std::string judge_image(const std::vector<uint8_t>& image, ImageRole role, const std::vector<float>& x, const Place& p);

bool equal(const OwnedMx& a, const OwnedMx& b);
OwnedMx make_output(const Place& p, Dtype element, MxBlock block, ScaleLayout layout, uint8_t fill);

// run(fill) on all threads and on another number, into outputs that held another byte before: all bytes must be equal,
// also those of padding. Returns the first result.
OwnedMx run_twice(const std::function<OwnedMx(uint8_t)>& run, std::string& failure);
// The same, and all bytes must be those of ref too.
OwnedMx run_thrice(const std::string& backend, const std::function<OwnedMx(const char*, uint8_t)>& run,
                   std::string& failure);

// Each returns "" or what is wrong.
std::string verify_quantize(const std::string& backend, const Place& p, Dtype in, MxBlock block, MxRule rule,
                            Dtype element);
// Operand images from BF16, given with the MX tensor and (on a device) alone.
std::string verify_image(const std::string& backend, const Place& p, ImageRole role, MxBlock block);
std::string verify_dequantize(const std::string& backend);  // all payloads under all scales
// Operations that also add: out is exact given their own y or c, and that is within the roundoff of its fp32 sum.
std::string verify_rmsnorm(const std::string& backend, const Place& p);  // rows of heads * dim
// dx and dw from BF16 and from MXFP8, within the roundoff of fp32 of fp64; equal bits on another number of threads.
std::string verify_rmsnorm_bwd(const std::string& backend, const Place& p);  // rows of heads * dim
std::string verify_gemm(const std::string& backend, const Place& p, int64_t depth);

}  // namespace mxflash::kit
