// Reading and writing MX tensors for reference backends: any block, any layout, jagged or not.
#pragma once

#include <mxflash/quantize.h>

#include <cmath>
#include <cstring>

#include "mx/e8m0.h"
#include "mx/scale_layout.h"
#include "runtime/check.h"
#include "runtime/tensor_access.h"

namespace mxflash {

// Reads one sequence of one head of an MX tensor as fp64, where payload * scale is exact.
class MxReader {
 public:
  MxReader(const MxTensor& t, const Jagged& seq, const Sequence& s, int64_t head)
      : tensor_(t),
        sequence_(s),
        head_(head),
        dim_(t.data.shape[2]),
        padded_(padded_token_count(t.data.shape[0], seq)),
        shape_(block_shape(t.block)) {
    for (int code = 0; code < 256; ++code) value_[code] = decode_fp8(uint8_t(code), fp8_format(t.data.dtype));
  }

  // Tokens first .. first + count - 1 of the sequence into dst [count][dim].
  void read(int64_t first, int64_t count, double* dst) const {
    const auto* payload = static_cast<const uint8_t*>(tensor_.data.data);
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* row = payload + row_offset(tensor_.data, sequence_.start + first + i, head_);
      for (int64_t c0 = 0; c0 < dim_; c0 += shape_.cols) {
        const double scale = decode_e8m0_f64(scale_byte(first + i, c0));
        const int64_t end = c0 + shape_.cols < dim_ ? c0 + shape_.cols : dim_;
        for (int64_t c = c0; c < end; ++c) dst[i * dim_ + c] = double(value_[row[c]]) * scale;
      }
    }
  }

 private:
  uint8_t scale_byte(int64_t token, int64_t channel) const {
    const ScaleIndex i{head_, (sequence_.padded_start + token) / shape_.rows, channel / shape_.cols};
    return static_cast<const uint8_t*>(
        tensor_.scale.data)[scale_offset(tensor_.block, tensor_.layout, padded_, dim_, i)];
  }

  const MxTensor& tensor_;
  Sequence sequence_;
  int64_t head_, dim_, padded_;
  BlockShape shape_;
  float value_[256];
};

// Quantizes fp32 values into one sequence of one head.
class MxWriter {
 public:
  MxWriter(const MxTensor& t, const Jagged& seq, const Sequence& s, int64_t head, MxRule rule)
      : tensor_(t),
        sequence_(s),
        head_(head),
        padded_(padded_token_count(t.data.shape[0], seq)),
        shape_(block_shape(t.block)),
        format_(fp8_format(t.data.dtype)),
        rule_(rule) {}

  // x [rows][cols] with this row stride: tokens first_token .. of the sequence, channels first_channel .. . Both must
  // start at a multiple of 32, and end at one or at the tensor's edge, so that every block is seen whole.
  void write(int64_t first_token, int64_t rows, int64_t first_channel, int64_t cols, const float* x, int64_t stride,
             QuantizeStats* stats = nullptr) const {
    for (int64_t r = 0; r < rows; r += shape_.rows) {
      for (int64_t c = 0; c < cols; c += shape_.cols) {
        const int64_t block_rows = shape_.rows < rows - r ? shape_.rows : rows - r;
        const int64_t block_cols = shape_.cols < cols - c ? shape_.cols : cols - c;
        write_block(first_token + r, block_rows, first_channel + c, block_cols, x + r * stride + c, stride, stats);
      }
    }
  }

 private:
  void write_block(int64_t token, int64_t rows, int64_t channel, int64_t cols, const float* x, int64_t stride,
                   QuantizeStats* stats) const {
    const uint8_t scale = scale_from_amax(block_amax_bits(x, stride, rows, cols), format_, rule_);
    const ScaleIndex i{head_, (sequence_.padded_start + token) / shape_.rows, channel / shape_.cols};
    static_cast<uint8_t*>(
        tensor_.scale.data)[scale_offset(tensor_.block, tensor_.layout, padded_, tensor_.data.shape[2], i)] = scale;
    for (int64_t r = 0; r < rows; ++r) {
      uint8_t* payload = static_cast<uint8_t*>(tensor_.data.data) +
                         row_offset(tensor_.data, sequence_.start + token + r, head_) + channel;
      for (int64_t c = 0; c < cols; ++c) {
        payload[c] = encode_mx(x[r * stride + c], scale, format_);
        if (stats) count(x[r * stride + c], scale, payload[c], *stats);
      }
    }
  }

  void count(float x, uint8_t scale, uint8_t payload, QuantizeStats& stats) const {
    ++stats.total;
    const uint32_t magnitude = magnitude_bits(x);
    if (magnitude >= 0x7F800000) {
      ++stats.nonfinite;
      return;
    }
    stats.amax = std::fmax(stats.amax, std::bit_cast<float>(magnitude));
    if (scale == kE8m0Nan) return;
    const double limit = double(std::bit_cast<float>(format_.max_bits)) * decode_e8m0_f64(scale);
    stats.saturated += double(std::bit_cast<float>(magnitude)) > limit;
    stats.flushed += magnitude != 0 && (payload & 0x7F) == 0;
  }

  const MxTensor& tensor_;
  Sequence sequence_;
  int64_t head_, padded_;
  BlockShape shape_;
  Fp8Format format_;
  MxRule rule_;
};

inline void clear_scales(const MxTensor& t) {
  if (const int64_t n = t.scale.numel(); n > 0) std::memset(t.scale.data, 0, size_t(n));
}

// Zeroes the payload of rows that belong to no sequence.
inline void clear_slack_payload(const MxTensor& t, const Jagged& seq) {
  if (!seq.cu_seqlens) return;
  for (int64_t token = seq.cu_seqlens[seq.batch]; token < t.data.shape[0]; ++token) {
    for (int64_t head = 0; head < t.data.shape[1]; ++head) {
      std::memset(static_cast<uint8_t*>(t.data.data) + row_offset(t.data, token, head), 0, size_t(t.data.shape[2]));
    }
  }
}

// Zero scales and slack rows: what no block covers is defined too. Call before writing blocks.
inline void clear_uncovered(const MxTensor& t, const Jagged& seq) {
  clear_scales(t);
  clear_slack_payload(t, seq);
}

// An MX tensor of rank 2 as [rows, 1, dim].
inline MxTensor as_heads(const MxTensor& t) {
  MxTensor r = t;
  r.data = as_heads(t.data);
  return r;
}

}  // namespace mxflash
