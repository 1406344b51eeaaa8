// Queries of the heads of a group as rows of one block: from a query image to one of packed rows (key_split.h), where
// 64 rows share a scale as in any other.
#include "attention/attention_split.cuh"
#include "attention/key_split.h"
#include "mx/e8m0.h"
#include "mx/fp8.h"
#include "mx/operand_image.h"
#include "ptx/convert.cuh"
#include "runtime/launch.cuh"

namespace mxflash {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 16;  // channels

struct PackParams {
  const uint8_t* image;
  ImageShape shape;  // of image
  int64_t tokens;
  Jagged seq;
  int32_t pack;
  ImageShape packed_shape;
  uint8_t* packed;
};

// 64 packed rows of a key-value head: their largest scale becomes all of theirs.
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackParams p) {
  constexpr int kRows = 64;
  __shared__ uint8_t row_scale[kRows];
  const int64_t group_head = blockIdx.y, row0 = int64_t(blockIdx.x) * kRows;
  int64_t b = 0;
  for (int64_t end = p.seq.batch; end - b > 1;) {
    const int64_t middle = (b + end) / 2;
    (packed_sequence(p.tokens, p.seq, p.pack, middle).padded_start <= row0 ? b : end) = middle;
  }
  const Sequence rows = packed_sequence(p.tokens, p.seq, p.pack, b);
  const int64_t first = row0 - rows.padded_start, padded_start = sequence_at(p.tokens, p.seq, b).padded_start;
  const auto head_of = [&](int64_t row) { return group_head * p.pack + row % p.pack; };
  if (threadIdx.x < kRows) {
    const int64_t row = first + threadIdx.x;
    row_scale[threadIdx.x] =
        row < rows.length ? p.image[p.shape.scale_offset(head_of(row), padded_start + row / p.pack)] : uint8_t(0);
  }
  __syncthreads();
  uint32_t scale = 0;
  for (int i = 0; i < kRows; ++i) scale = max(scale, uint32_t(row_scale[i]));
  if (threadIdx.x == 0) p.packed[p.packed_shape.scale_offset(group_head, row0)] = uint8_t(scale);
  const int pieces = int(p.shape.dim) / kPiece;
  for (int id = int(threadIdx.x); id < kRows * pieces; id += kThreads) {
    const int i = id / pieces, channel = id % pieces * kPiece;
    const int64_t row = first + i;
    uint4 codes{};
    if (row < rows.length) {
      codes =
          *reinterpret_cast<const uint4*>(p.image + p.shape.offset(head_of(row), padded_start + row / p.pack, channel));
      const float factor = decode_e8m0(uint8_t(max(int(row_scale[i]) - int(scale) + kE8m0Bias, 0)));
      uint32_t* const word = &codes.x;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if (row_scale[i] == scale) break;
        float x[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) x[c] = decode_fp8(uint8_t(word[w] >> (8 * c)), e4m3_format()) * factor;
        word[w] = ptx::pack_e4m3(x[0], x[1], x[2], x[3]);
      }
    }
    *reinterpret_cast<uint4*>(p.packed + p.packed_shape.offset(group_head, row0 + i, channel)) = codes;
  }
}

}  // namespace

Status pack_query_image(const uint8_t* image, const ImageShape& shape, int64_t tokens, const Jagged& seq, int32_t pack,
                        uint8_t* packed, Stream stream) {
  const ImageShape to{ImageRole::query, shape.heads / pack, packed_padded_count(tokens, seq, pack), shape.dim};
  const Launch at{"attention_fwd: sm90: packed queries", dim3(uint32_t(to.scale_tiles()), uint32_t(to.heads)), kThreads,
                  0, stream};
  return launch(at, pack_kernel, PackParams{image, shape, tokens, seq, pack, to, packed});
}

}  // namespace mxflash
