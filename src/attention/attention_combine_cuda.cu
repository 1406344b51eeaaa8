// The pass over partial results on the host: attention_combine.cuh has the kernel.
#include "attention/attention_combine.cuh"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

using namespace combine;

template <int kTokens, int kDim = 128>
Status launch_tokens(const Combine& p, Stream stream) {
  const int64_t blocks = p.seq_out.cu_seqlens ? p.to.total_out / kTokens + p.seq_out.batch
                                              : p.seq_out.batch * ceil_div(p.max_seqlen, kTokens);
  const Launch at{"attention_fwd: combine", dim3(uint32_t(blocks), uint32_t(p.to.num_heads)), 32 * kWarps, 0, stream};
  return launch(at, combine_kernel<kTokens, kDim>, p);
}

}  // namespace

Status combine_partials(const Combine& p, Stream stream) {
  if (!p.to.out_mx.data) return launch_tokens<kFewTokens>(p, stream);
  return p.to.head_dim_v > 128 ? launch_tokens<kMxTokens, 256>(p, stream) : launch_tokens<kMxTokens>(p, stream);
}

}  // namespace mxflash
