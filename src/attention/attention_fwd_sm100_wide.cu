// The forward kernel on Blackwell for head dimensions above 128. Apart from the others: what ptxas makes of a kernel
// depends on what else is in its object.
#include "attention/attention_fwd_sm100_launch.cuh"

namespace mxflash::fwd_sm100 {

template Status launch_kernel<Config<192, 128>>(const AttentionFwd&, const AttentionPlan&, const Partials&, Params&,
                                                Stream);
template Status launch_kernel<Config<256, 256>>(const AttentionFwd&, const AttentionPlan&, const Partials&, Params&,
                                                Stream);

}  // namespace mxflash::fwd_sm100
