// Reference quantizer: the specification of every payload and scale byte.
//
//   out = MX(rotate(in - mean)), each step in fp32, blocks per sequence and head (include/mxflash/quantize.h).
//
// Work is split into stripes of 32 tokens, the height of a block, so results do not depend on the thread count.
#include <algorithm>
#include <mutex>

#include "mx/rotation.h"
#include "quantize/quantize.h"
#include "runtime/mx_access.h"
#include "runtime/operand_image.h"
#include "runtime/parallel.h"
#include "runtime/ref_backend.h"

namespace mxflash {
namespace {

constexpr int64_t kStripe = kMxBlock;     // tokens
constexpr int64_t kChunk = kMaxRotation;  // channels at a time: whole rotation groups and whole blocks
constexpr int64_t kMeanPartial = 128;     // tokens of a partial sum; part of the contract

// mean[b, h, c0 .. c0 + cols - 1]; the order of the sum is part of the contract.
void sequence_mean(const Tensor& in, const Sequence& s, int64_t head, int64_t c0, int64_t cols, float* mean) {
  float total[kChunk] = {};
  for (int64_t first = 0; first < s.length; first += kMeanPartial) {
    float partial[kChunk] = {};
    const int64_t last = first + kMeanPartial < s.length ? first + kMeanPartial : s.length;
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = row_offset(in, s.start + i, head);
      for (int64_t c = 0; c < cols; ++c) partial[c] += load_float(in, row + (c0 + c) * in.stride[2]);
    }
    for (int64_t c = 0; c < cols; ++c) total[c] += partial[c];
  }
  for (int64_t c = 0; c < cols; ++c) mean[c] = s.length ? total[c] / float(s.length) : 0.0f;
}

Status quantize_ref(const Quantize& args, Stream) {
  const Tensor in = as_heads(args.in);
  const Tensor mean = as_heads(args.mean);
  const MxTensor out = as_heads(args.out), out_col = as_heads(args.out_col);
  const int64_t tokens = in.shape[0], heads = in.shape[1], dim = in.shape[2];
  const int32_t workers = num_threads();
  clear_uncovered(out, args.seq);
  if (out_col) clear_uncovered(out_col, args.seq);

  if (args.smooth) {
    parallel_for(args.seq.batch * heads, workers, [&](int64_t item, int32_t) {
      const int64_t b = item / heads, head = item % heads;
      float* row = static_cast<float*>(mean.data) + row_offset(mean, b, head);
      for (int64_t c0 = 0; c0 < dim; c0 += kChunk) {
        sequence_mean(in, sequence_at(tokens, args.seq, b), head, c0, std::min(kChunk, dim - c0), row + c0);
      }
    });
  }

  QuantizeStats sum;
  std::mutex sum_mutex;
  const int64_t stripes = ceil_div(longest_sequence(tokens, args.seq), kStripe);
  const int64_t group = rotation_group(dim);
  parallel_for(args.seq.batch * heads * stripes, workers, [&](int64_t item, int32_t) {
    const int64_t b = item / (heads * stripes), head = item / stripes % heads, first = item % stripes * kStripe;
    const Sequence s = sequence_at(tokens, args.seq, b);
    if (first >= s.length) return;
    const int64_t rows = std::min(kStripe, s.length - first);
    const MxWriter writer(out, args.seq, s, head, args.rule);
    const MxWriter col_writer(out_col ? out_col : out, args.seq, s, head, args.rule);
    QuantizeStats stats;
    float x[kStripe][kChunk];
    for (int64_t c0 = 0; c0 < dim; c0 += kChunk) {
      const int64_t cols = std::min(kChunk, dim - c0);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = row_offset(in, s.start + first + r, head);
        for (int64_t c = 0; c < cols; ++c) x[r][c] = load_float(in, row + (c0 + c) * in.stride[2]);
        if (args.smooth) {
          const float* m = static_cast<const float*>(mean.data) + row_offset(mean, b, head) + c0;
          for (int64_t c = 0; c < cols; ++c) x[r][c] -= m[c];
        }
        if (args.rotate) {
          for (int64_t c = 0; c < cols; c += group) rotate(x[r] + c, group, args.rotate_seed, c0 + c);
        }
      }
      writer.write(first, rows, c0, cols, x[0], kChunk, args.stats ? &stats : nullptr);
      if (out_col) col_writer.write(first, rows, c0, cols, x[0], kChunk);
    }
    if (args.stats) {
      const std::lock_guard lock(sum_mutex);
      sum.amax = std::max(sum.amax, stats.amax);
      sum.saturated += stats.saturated;
      sum.flushed += stats.flushed;
      sum.nonfinite += stats.nonfinite;
      sum.total += stats.total;
    }
  });
  if (args.stats) *args.stats = sum;
  if (args.image) image_of(out, args.seq, args.image_role, static_cast<uint8_t*>(args.image.data));
  return {};
}

// An image is a function of the rounded bytes, which this backend keeps nowhere else.
Status has_payload(const Quantize& args) {
  if (args.in.numel() == 0 || (args.out && args.out.scale)) return {};
  return unsupported("quantize: ref: out must have data and scale, got null");
}

Status dequantize_ref(const Dequantize& args, Stream) {
  const MxTensor in = as_heads(args.in);
  const Tensor out = as_heads(args.out);
  const int64_t tokens = out.shape[0], heads = out.shape[1], dim = out.shape[2];
  const int64_t padded = padded_token_count(tokens, args.seq);
  const BlockShape shape = block_shape(in.block);
  const Fp8Format format = fp8_format(in.data.dtype);
  const auto* scales = static_cast<const uint8_t*>(in.scale.data);
  parallel_for(args.seq.batch * heads, num_threads(), [&](int64_t item, int32_t) {
    const int64_t b = item / heads, head = item % heads;
    const Sequence s = sequence_at(tokens, args.seq, b);
    for (int64_t i = 0; i < s.length; ++i) {
      const auto* payload = static_cast<const uint8_t*>(in.data.data) + row_offset(in.data, s.start + i, head);
      const int64_t row = row_offset(out, s.start + i, head);
      for (int64_t c = 0; c < dim; ++c) {
        const ScaleIndex at{head, (s.padded_start + i) / shape.rows, c / shape.cols};
        const uint8_t scale = scales[scale_offset(in.block, in.layout, padded, dim, at)];
        store_float(out, row + c, float(decode_mx(payload[c], scale, format)));
      }
    }
  });
  clear_slack_rows(out, args.seq);
  return {};
}

Status write_image_ref(const WriteImage& args, Stream) {
  const ImageStats stats = image_of(args.in, args.seq, args.role, static_cast<uint8_t*>(args.image.data));
  if (args.stats) *args.stats = stats;
  return {};
}

}  // namespace

Status convert_scales_host(const ConvertScales& args, Stream) {
  const MxTensor in = as_heads(args.in), out = as_heads(args.out);
  const int64_t tokens = in.data.shape[0], heads = in.data.shape[1], dim = in.data.shape[2];
  const int64_t padded = padded_token_count(tokens, args.seq);
  const BlockShape from = block_shape(in.block), to = block_shape(out.block);
  const auto* src = static_cast<const uint8_t*>(in.scale.data);
  auto* dst = static_cast<uint8_t*>(out.scale.data);
  clear_scales(out);
  parallel_for(args.seq.batch * heads, num_threads(), [&](int64_t item, int32_t) {
    const int64_t b = item / heads, head = item % heads;
    const Sequence s = sequence_at(tokens, args.seq, b);
    for (int64_t i = 0; i < s.length; i += to.rows) {
      for (int64_t c = 0; c < dim; c += to.cols) {
        const ScaleIndex at_in{head, (s.padded_start + i) / from.rows, c / from.cols};
        const ScaleIndex at_out{head, (s.padded_start + i) / to.rows, c / to.cols};
        dst[scale_offset(out.block, out.layout, padded, dim, at_out)] =
            src[scale_offset(in.block, in.layout, padded, dim, at_in)];
      }
    }
  });
  return {};
}

const Impl<Quantize> kQuantizeRef = ref_backend<Quantize>(quantize_ref, nullptr, has_payload);
const Impl<Dequantize> kDequantizeRef = ref_backend<Dequantize>(dequantize_ref);
const Impl<ConvertScales> kConvertScalesRef = ref_backend<ConvertScales>(convert_scales_host);
const Impl<WriteImage> kWriteImageRef = ref_backend<WriteImage>(write_image_ref);

}  // namespace mxflash
