// The library's calls on tensors in host memory, whatever the backend. Where `backend`, or MXFLASH_BACKEND, names one
// whose tensors live on a CUDA device, the call gets copies there: of inputs, of cu_seqlens, and of outputs with what
// the caller left in them, so that poison shows; its workspace begins as 0xFF. Outputs are copied back. Everything else
// goes straight through.
#pragma once

#include <mxflash/attention.h>
#include <mxflash/operator.h>
#include <mxflash/quantize.h>
#include <mxflash/rmsnorm.h>

#include "kit/runner.h"

namespace mxflash::kit {

// The Status is the call's; device_error also where its kernel, or a copy, failed.
Status call(const Quantize& args);
Status call(const Dequantize& args);
Status call(const ConvertScales& args);
Status call(const RmsnormQuantize& args);
// These bring their workspace, too; the operator's forward makes `saved`, which the backward finds in args.fwd.saved.
Status call(RmsnormBwd args);
Status call(AttentionFwd args);
Status call(AttentionBwd args);
Status call(OperatorFwd args, AlignedBuffer& saved);
Status call(OperatorBwd args);

}  // namespace mxflash::kit
