// From partial results over ranges of keys to results: a row's weights are 2^(lse - largest lse) of its ranges.
//
// A CTA has some tokens of a head, a warp one row at a time, a lane channels lane + 32 n of kDim at most. Ranges are
// added in ascending order. Which of them a row has follows from lengths and mask alone, as where they were written.
#pragma once

#include "attention/attention_split.cuh"

namespace mxflash::combine {

constexpr int kWarps = 4;
constexpr int kMxTokens = 32;       // of a CTA: a block of quantization,
constexpr int kFewTokens = kWarps;  // or a row a warp where nothing is quantized
constexpr int kBlockRows = 64;      // of the kernel that wrote the partials

// Tokens of a CTA.
struct Tokens {
  int32_t sequence;
  int32_t first;   // in its sequence
  int32_t length;  // of the sequence
  int64_t start;   // of the sequence on the axis of out
};

// Blocks of sequences before b: a bound for any lengths, exact enough that none straddles two.
template <int kTokens>
__device__ int64_t first_block(const Combine& p, int64_t b) {
  return (p.seq_out.cu_seqlens[b] + int64_t(kTokens) * b) / kTokens;
}

template <int kTokens>
__device__ Tokens tokens_of(const Combine& p, int64_t block) {
  int64_t b = 0, first = 0;
  if (p.seq_out.cu_seqlens) {
    for (int64_t end = p.seq_out.batch; end - b > 1;) {
      const int64_t middle = (b + end) / 2;
      (first_block<kTokens>(p, middle) <= block ? b : end) = middle;
    }
    first = block - first_block<kTokens>(p, b);
  } else {
    const int64_t blocks = ceil_div(p.max_seqlen, kTokens);
    b = block / blocks;
    first = block % blocks;
  }
  const Sequence s = sequence_at(p.to.total_out, p.seq_out, b);
  return {int32_t(b), int32_t(first * kTokens), int32_t(s.length), s.start};
}

template <int kDim>
struct Row {
  float value[kDim / 32];  // without v_mean
  float lse, max;          // binades
};

template <int kDim>
__device__ Row<kDim> combine_row(const Combine& p, const Tokens& t, int32_t head, int32_t token) {
  const int lane = int(threadIdx.x) % 32;
  const int32_t row = token * p.pack + head % p.pack, rows = t.length * p.pack;
  const int32_t block = row / kBlockRows * kBlockRows;
  const auto seqlen_k = int32_t(sequence_at(p.total_k, p.seq_k, t.sequence).length);
  const TileRange tiles =
      tiles_of(visible_keys_of_rows(p.mask, p.pack, block, min(block + kBlockRows, rows), rows, seqlen_k));
  const int32_t splits = used_splits(tiles.count, p.partials.splits);
  const auto index = [&](int32_t split) { return p.partials.index(split, head / p.pack, t.start * p.pack + row); };
  Row<kDim> r{};
  r.lse = r.max = -INFINITY;
  bool nan = false;
  for (int32_t split = lane; split < splits; split += 32) {
    const PartialRow part = p.partials.row[index(split)];
    nan |= part.lse != part.lse;
    r.lse = fmaxf(r.lse, part.lse);
    r.max = fmaxf(r.max, part.max);
  }
  for (int step = 16; step > 0; step /= 2) {
    r.lse = fmaxf(r.lse, __shfl_xor_sync(~0u, r.lse, step));
    r.max = fmaxf(r.max, __shfl_xor_sync(~0u, r.max, step));
  }
  if (__any_sync(~0u, nan)) r.lse = __int_as_float(0x7FC00000);
  if (r.lse == -INFINITY) return r;
  float total = 0;
#pragma unroll 8
  for (int32_t split = 0; split < splits; ++split) {
    const int64_t at = index(split);
    const float weight = exp2f(p.partials.row[at].lse - r.lse);
    total += weight;
#pragma unroll
    for (int n = 0; n < kDim / 32; ++n) {
      const int c = lane + 32 * n;
      if (c < p.to.head_dim_v) r.value[n] = fmaf(weight, p.partials.out[at * p.partials.dim + c], r.value[n]);
    }
  }
#pragma unroll
  for (int n = 0; n < kDim / 32; ++n) r.value[n] /= total;
  r.lse += log2f(total);
  return r;
}

template <int kTokens, int kDim>
__global__ void __launch_bounds__(32 * kWarps) combine_kernel(const __grid_constant__ Combine p) {
  constexpr int kPitch = kDim + 1;  // of rows in shared memory
  __shared__ float values[kTokens == kMxTokens ? kTokens * kPitch : 1];
  const Tokens t = tokens_of<kTokens>(p, blockIdx.x);
  const int lane = int(threadIdx.x) % 32, head = int(blockIdx.y);
  const int32_t end = min(t.first + kTokens, t.length);
  for (int32_t token = t.first + int32_t(threadIdx.x) / 32; token < end; token += kWarps) {
    Row<kDim> r = combine_row<kDim>(p, t, head, token);
    const bool visible = r.lse != -INFINITY;
    const int64_t out_row = t.start + token;
    if (lane == 0) store_statistics(p.to, {out_row, head}, visible, r.lse, r.lse - r.max);
#pragma unroll
    for (int n = 0; n < kDim / 32; ++n) {
      const int c = lane + 32 * n;
      if (c >= p.to.head_dim_v) continue;
      if (p.to.v_mean && visible) r.value[n] += p.to.mean(t.sequence, head / p.group)[c];
      if (const Tensor& out = p.to.out) {
        store_element(out, out_row * out.stride[0] + head * out.stride[1] + c, r.value[n]);
      }
      if (kTokens == kMxTokens) values[(token - t.first) * kPitch + c] = r.value[n];
    }
  }
  if (kTokens != kMxTokens) return;
  __syncthreads();
  const int64_t padded = sequence_at(p.to.total_out, p.seq_out, t.sequence).padded_start + t.first;
  for (int c = int(threadIdx.x) / 32 * 32; c < p.to.head_dim_v && t.first < end; c += 32 * kWarps) {
    quantize_patch(p.to.out_mx, t.start + t.first, padded, end - t.first, head, c,
                   [&](int r) { return values[r * kPitch + c + lane]; });
  }
}

}  // namespace mxflash::combine
