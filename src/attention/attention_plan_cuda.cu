// Sequences by falling length, without a sort: the place of a sequence is the number of those before it. A warp for
// each; it also counts the blocks of rows of those.
#include "attention/attention_plan.cuh"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

constexpr int kWarps = 8;

__device__ int32_t block_count(const RowBlocks& blocks, int32_t b) {
  const int32_t rows = (blocks.cu_seqlens[b + 1] - blocks.cu_seqlens[b]) * blocks.rows_per_token;
  return (rows + blocks.block_rows - 1) / blocks.block_rows;
}

__global__ void __launch_bounds__(32 * kWarps)
    order_kernel(AttentionPlan plan, const int32_t* cu_seqlens, int32_t batch, RowBlocks blocks) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *plan.counter = 0;
  const int32_t b = int32_t(blockIdx.x) * kWarps + int32_t(threadIdx.x) / 32;
  if (b >= batch) return;
  const int32_t length = cu_seqlens[b + 1] - cu_seqlens[b];
  int32_t before = 0, blocks_before = 0;
  for (int32_t i = int32_t(threadIdx.x) % 32; i < batch; i += 32) {
    const int32_t other = cu_seqlens[i + 1] - cu_seqlens[i];
    if (other < length || (other == length && i >= b)) continue;
    ++before;
    if (plan.first_block) blocks_before += block_count(blocks, i);
  }
  __syncwarp();
  before = __reduce_add_sync(~0u, before);
  blocks_before = __reduce_add_sync(~0u, blocks_before);
  if (threadIdx.x % 32 != 0) return;
  plan.order[before] = b;
  if (!plan.first_block) return;
  plan.first_block[before] = blocks_before;
  if (before + 1 == batch) plan.first_block[batch] = blocks_before + block_count(blocks, b);
}

}  // namespace

Status write_attention_plan(const AttentionPlan& plan, const Jagged& seq_k, const RowBlocks& blocks, Stream stream) {
  constexpr const char* what = "attention: plan";
  if (!plan.order) return cuda_status(cudaMemsetAsync(plan.counter, 0, sizeof *plan.counter, stream), what);
  const Launch at{what, dim3(uint32_t((seq_k.batch + kWarps - 1) / kWarps)), 32 * kWarps, 0, stream};
  return launch(at, order_kernel, plan, seq_k.cu_seqlens, seq_k.batch, blocks);
}

}  // namespace mxflash
