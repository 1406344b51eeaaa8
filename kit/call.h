// The library's calls on tensors in host memory, whatever the backend. Where `backend` names one whose tensors live on
// a CUDA device, the call gets copies there: of inputs, of cu_seqlens, and of outputs with what the caller left in
// them, so that poison shows; its workspace begins as 0xFF. Outputs are copied back. Everything else goes straight
// through.
#pragma once

#include <mxflash/attention.h>
#include <mxflash/quantize.h>
#include <mxflash/rmsnorm.h>

namespace mxflash::kit {

// The Status is the call's; device_error also where its kernel, or a copy, failed.
Status call(const Quantize& args);
Status call(const Dequantize& args);
Status call(const ConvertScales& args);
Status call(const RmsnormQuantize& args);
Status call(AttentionFwd args);  // brings its workspace, too

}  // namespace mxflash::kit
