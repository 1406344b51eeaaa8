// Attention on MXFP8 operands that you quantized yourself, or that a fused RMSNorm or GEMM wrote: causal, GQA 8:2.
//
// q and k get blocks of 32 channels (row32), because q.k sums over channels; v gets blocks of 32 tokens (col32),
// because P.v sums over tokens. With square32 one copy would serve both, and the backward as well.
#include <mxflash/attention.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

using mxflash::Dtype;
using mxflash::make_tensor;
using mxflash::MxBlock;

// Every call returns a Status: a code, and a line with the rule that was broken and the value that broke it.
bool failed(const mxflash::Status& status) {
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message);
  return !status.ok();
}

// An MX tensor and its memory. The size of the scales depends on block, layout and sequences; scale_size knows it.
struct Operand {
  std::vector<uint8_t> payload, scale;
  mxflash::MxTensor view;
  Operand(MxBlock block, int64_t tokens, int64_t heads, int64_t dim)
      : payload(tokens * heads * dim),
        scale(mxflash::scale_size(block, mxflash::ScaleLayout::linear, tokens, heads, dim, {})),
        view(mxflash::make_mx_tensor(payload.data(), scale.data(), Dtype::e4m3, block, mxflash::ScaleLayout::linear,
                                     tokens, heads, dim, {})) {}
};

std::vector<float> made_up(int64_t n, uint32_t seed) {
  std::vector<float> x(n);
  for (float& value : x) value = float((seed = seed * 1664525 + 1013904223) >> 8) / float(1 << 23) - 1.0f;
  return x;
}

}  // namespace

int main() {
  constexpr int64_t kTokens = 200, kHeadsQ = 8, kHeadsKv = 2, kDim = 128;
  std::vector<float> q = made_up(kTokens * kHeadsQ * kDim, 1), k = made_up(kTokens * kHeadsKv * kDim, 2);
  std::vector<float> v = made_up(kTokens * kHeadsKv * kDim, 3), v_mx(v.size());
  std::vector<float> out(q.size()), lse(kHeadsQ * kTokens);

  Operand q8(MxBlock::row32, kTokens, kHeadsQ, kDim), k8(MxBlock::row32, kTokens, kHeadsKv, kDim);
  Operand v8(MxBlock::col32, kTokens, kHeadsKv, kDim);
  const auto view = [](std::vector<float>& x, int64_t heads) {
    return make_tensor(x.data(), Dtype::f32, kTokens, heads, kDim);
  };
  mxflash::QuantizeStats stats;
  if (failed(mxflash::quantize({.in = view(q, kHeadsQ), .out = q8.view, .stats = &stats}))) return 1;
  if (failed(mxflash::quantize({.in = view(k, kHeadsKv), .out = k8.view}))) return 1;
  if (failed(mxflash::quantize({.in = view(v, kHeadsKv), .out = v8.view}))) return 1;
  std::printf("q: largest %.3f, %lld of %lld elements became zero; %zu + %zu bytes instead of %zu in BF16\n",
              double(stats.amax), static_cast<long long>(stats.flushed), static_cast<long long>(stats.total),
              q8.payload.size(), q8.scale.size(), 2 * q.size());

  mxflash::AttentionFwd attention{.q = q8.view,
                                  .k = k8.view,
                                  .v = v8.view,
                                  .out = view(out, kHeadsQ),
                                  .lse = make_tensor(lse.data(), Dtype::f32, kHeadsQ, kTokens),
                                  .mask = {.causal = true}};
  // Workspaces are yours, aligned to 64 bytes.
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> workspace((mxflash::attention_fwd_workspace(attention) + 63) / 64);
  attention.workspace = workspace.data();
  attention.workspace_size = workspace.size() * sizeof(Line);
  if (failed(mxflash::attention_fwd(attention))) return 1;

  // The first query sees one key: its out is v as MXFP8 holds it. Heads 0..3 share kv head 0, heads 4..7 kv head 1.
  if (failed(mxflash::dequantize({.in = v8.view, .out = view(v_mx, kHeadsKv)}))) return 1;
  float worst = 0;
  for (int64_t head = 0; head < kHeadsQ; ++head) {
    for (int64_t c = 0; c < kDim; ++c) {
      worst = std::fmax(worst, std::fabs(out[head * kDim + c] - v_mx[head / (kHeadsQ / kHeadsKv) * kDim + c]));
    }
  }
  std::printf("row 0: largest |out - v| %g; lse of head 0: first row %.4f, last row %.4f\n", double(worst),
              double(lse[0]), double(lse[kTokens - 1]));
  return worst == 0 ? 0 : 1;
}
