// Attention for training: BF16 tensors in and out, MXFP8 inside, forward and backward, over a jagged batch.
//
// operator_fwd quantizes q, k and v as its Recipe says, attends, and keeps what the backward needs in `saved`: about
// half the bytes of the BF16 tensors. Outputs and gradients are those of your own q, k, v.
#include <mxflash/operator.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

using mxflash::Dtype;
using mxflash::make_tensor;

// The library owns no memory. Workspaces and `saved` are yours, aligned to 64 bytes.
struct alignas(64) Line {
  char bytes[64];
};
std::vector<Line> allocate(size_t bytes) { return std::vector<Line>((bytes + 63) / 64); }

// Every call returns a Status: a code, and a line with the rule that was broken and the value that broke it.
bool failed(const mxflash::Status& status) {
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message);
  return !status.ok();
}

using Bf16 = std::vector<uint16_t>;
Bf16 made_up(int64_t n, uint32_t seed) {
  Bf16 x(n);
  for (uint16_t& value : x) {
    seed = seed * 1664525 + 1013904223;
    value = uint16_t(std::bit_cast<uint32_t>(float(seed >> 8) / float(1 << 23) - 1.0f) >> 16);
  }
  return x;
}
float to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }
double rms(const Bf16& x) {
  double sum = 0;
  for (const uint16_t value : x) sum += double(to_float(value)) * double(to_float(value));
  return std::sqrt(sum / double(x.size()));
}

}  // namespace

int main() {
  constexpr int64_t kTokens = 240, kHeadsQ = 4, kHeadsKv = 2, kDim = 64;
  constexpr int64_t kSizeQ = kTokens * kHeadsQ * kDim, kSizeKv = kTokens * kHeadsKv * kDim;
  // Three sequences of 100, 1 and 139 tokens, packed without gaps: [tokens, heads, dim].
  constexpr int32_t cu_seqlens[] = {0, 100, 101, 240};
  const mxflash::Jagged seq{.cu_seqlens = cu_seqlens, .batch = 3, .max_seqlen = 139};
  Bf16 q = made_up(kSizeQ, 1), k = made_up(kSizeKv, 2), v = made_up(kSizeKv, 3), dout = made_up(kSizeQ, 4);
  Bf16 out(kSizeQ), dq(kSizeQ), dk(kSizeKv), dv(kSizeKv);

  mxflash::OperatorStats stats;
  mxflash::OperatorFwd fwd{.q = make_tensor(q.data(), Dtype::bf16, kTokens, kHeadsQ, kDim),
                           .k = make_tensor(k.data(), Dtype::bf16, kTokens, kHeadsKv, kDim),
                           .v = make_tensor(v.data(), Dtype::bf16, kTokens, kHeadsKv, kDim),
                           .out = make_tensor(out.data(), Dtype::bf16, kTokens, kHeadsQ, kDim),
                           .recipe = {.grad_element = Dtype::e4m3, .smooth_k = true},  // and its other defaults
                           .seq_q = seq,
                           .seq_k = seq,
                           .mask = {.causal = true},
                           .stats = &stats};
  std::vector<Line> saved = allocate(mxflash::operator_saved(fwd));
  std::vector<Line> workspace = allocate(mxflash::operator_fwd_workspace(fwd));
  fwd.saved = saved.data(), fwd.saved_size = saved.size() * sizeof(Line);
  fwd.workspace = workspace.data(), fwd.workspace_size = workspace.size() * sizeof(Line);
  if (failed(mxflash::operator_fwd(fwd))) return 1;

  mxflash::OperatorBwd bwd{.fwd = fwd,  // the same shapes, mask and recipe, and what it saved
                           .dout = make_tensor(dout.data(), Dtype::bf16, kTokens, kHeadsQ, kDim),
                           .dq = make_tensor(dq.data(), Dtype::bf16, kTokens, kHeadsQ, kDim),
                           .dk = make_tensor(dk.data(), Dtype::bf16, kTokens, kHeadsKv, kDim),
                           .dv = make_tensor(dv.data(), Dtype::bf16, kTokens, kHeadsKv, kDim)};
  std::vector<Line> bwd_workspace = allocate(mxflash::operator_bwd_workspace(bwd));
  bwd.workspace = bwd_workspace.data(), bwd.workspace_size = bwd_workspace.size() * sizeof(Line);
  if (failed(mxflash::operator_bwd(bwd))) return 1;

  std::printf("rms: out %.4f, dq %.4f, dk %.4f, dv %.4f\n", rms(out), rms(dq), rms(dk), rms(dv));
  std::printf("kept for the backward: %zu bytes; q, k, v in BF16: %zu\n", fwd.saved_size,
              2 * (q.size() + k.size() + v.size()));
  std::printf("largest |q| after rotation: %.3f; elements of dout that became zero: %lld of %lld\n",
              double(stats.q.amax), static_cast<long long>(stats.dout.flushed),
              static_cast<long long>(stats.dout.total));
  // The sequence of one token sees only itself: out is v, for each of the heads that share it.
  const float error = to_float(out[100 * kHeadsQ * kDim]) - to_float(v[100 * kHeadsKv * kDim]);
  std::printf("out - v in the sequence of one token: %g\n", double(error));
  return error == 0 ? 0 : 1;
}
