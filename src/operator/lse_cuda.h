// The operator's own arithmetic on a card: lse of the caller's k.
#pragma once

#include "attention/attention.h"

namespace mxflash {

struct WriteLse {
  Tensor q;       // the caller's
  Tensor saved;   // f32 [heads, rows]: lse of q and k - k_mean
  Tensor k_mean;  // f32 [batch, heads_kv, head_dim]; without data: nothing was subtracted
  Tensor out;     // f32 [heads, rows]
  AttentionShape shape;
  int32_t length = 0;  // of equal sequences; filled in
};
Status write_lse_cuda(WriteLse args, Stream stream);

}  // namespace mxflash
