// The specification of operand images (mx/operand_image.h) on the host: from an MX tensor to the bytes of its image.
#pragma once

#include <mxflash/quantize.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "mx/e8m0.h"
#include "mx/operand_image.h"
#include "runtime/mx_access.h"

namespace mxflash {

// A tile's scale is the least that holds its largest finite element (rule rceil). NaN elements stay NaN.
inline ImageStats image_of(const MxTensor& t, const Jagged& seq, ImageRole role, uint8_t* image) {
  const int64_t tokens = t.data.shape[0], heads = t.data.shape[1], dim = t.data.shape[2];
  const ImageShape shape = ImageShape::of(role, padded_token_count(tokens, seq), heads, dim);
  std::fill_n(image, shape.size(), uint8_t{0});
  ImageStats stats;
  const int64_t tile_tokens = image_scale_tokens(role);
  std::vector<double> x(size_t(tile_tokens * dim));
  for (int64_t b = 0; b < seq.batch; ++b) {
    const Sequence s = sequence_at(tokens, seq, b);
    for (int64_t head = 0; head < heads; ++head) {
      const MxReader reader(t, seq, s, head);
      for (int64_t first = 0; first < s.length; first += tile_tokens) {
        const int64_t rows = std::min(tile_tokens, s.length - first);
        reader.read(first, rows, x.data());
        float amax = 0;
        for (int64_t i = 0; i < rows * dim; ++i) {
          // MX reaches beyond fp32, whose largest value then stands for it: such elements saturate.
          const double magnitude = std::min(std::fabs(x[size_t(i)]), double(std::numeric_limits<float>::max()));
          if (std::isfinite(x[size_t(i)])) amax = std::fmax(amax, float(magnitude));
        }
        const uint8_t scale = scale_from_amax(magnitude_bits(amax), kE4m3, MxRule::rceil);
        const int64_t token = s.padded_start + first;
        image[shape.scale_offset(head, token)] = scale;
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < dim; ++c) {
            const double value = x[size_t(r * dim + c)];
            const uint8_t code = encode_fp8(float(value / decode_e8m0_f64(scale)), kE4m3);
            image[shape.offset(head, token + r, c)] = code;
            ++stats.total;
            stats.rounded += std::isfinite(value) && decode_mx(code, scale, kE4m3) != value;
          }
        }
      }
    }
  }
  return stats;
}

}  // namespace mxflash
