// What rmsnorm_bwd must give: fp64 from the tensors of a call in host memory, and how far fp32 arithmetic may be from
// that. docs/numerics.md has the bound in formulas.
#pragma once

#include <mxflash/rmsnorm.h>

#include <string>
#include <vector>

namespace mxflash::kit {

struct RmsnormGradient {
  int64_t rows = 0, dim = 0;
  std::vector<double> dx, dx_bound;  // [rows, dim]; bounds without the rounding to the result's dtype
  std::vector<double> dw, dw_bound;  // [dim]
};

// Reads dh, so before a call that writes dx over it.
RmsnormGradient exact_rmsnorm_bwd(const RmsnormBwd& args);

// "" or the first element of the results that is further away.
std::string judge(const RmsnormGradient& exact, const Tensor& dx, const Tensor& dw);

}  // namespace mxflash::kit
