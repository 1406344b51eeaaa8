// Rows of rmsnorm_quantize's results that belong to no sequence, on backends whose tensors the host can write.
#pragma once

#include <mxflash/rmsnorm.h>

#include "runtime/check.h"
#include "runtime/tensor_access.h"

namespace mxflash {

// y and rstd zero; the residual stays as it is.
inline void clear_slack(const RmsnormQuantize& args) {
  if (!args.seq.cu_seqlens) return;
  if (args.y) clear_slack_rows(as_heads(args.y), args.seq);
  for (int64_t row = args.seq.cu_seqlens[args.seq.batch]; args.rstd && row < args.in.shape[0]; ++row) {
    store_float(args.rstd, row, 0.0f);
  }
}

}  // namespace mxflash
