// Scale shapes and views: the public face of mx/scale_layout.h.
#include <mxflash/mx.h>

#include "mx/operand_image.h"
#include "mx/scale_layout.h"
#include "runtime/check.h"

namespace mxflash {

int64_t padded_tokens(int64_t tokens, const Jagged& seq) {
  return tokens >= 0 && tokens < kMaxElements && seq.batch >= 1 ? padded_token_count(tokens, seq) : 0;
}

std::array<int64_t, 4> scale_shape(MxBlock block, ScaleLayout layout, int64_t tokens, int64_t heads, int64_t dim,
                                   const Jagged& seq) {
  if (tokens < 0 || heads < 0 || dim < 0 || seq.batch < 1) return {};
  // Larger tensors are refused by every call; here they must only not overflow.
  if (!is_small_product({tokens, heads, dim}) || !is_small_product({heads, dim, kSeqAlign * seq.batch})) return {};
  const int64_t padded = padded_token_count(tokens, seq);
  if (layout == ScaleLayout::linear) {
    const ScaleGrid grid = scale_grid(block, padded, dim);
    return {heads, grid.rows, grid.cols, 0};
  }
  if (block == MxBlock::square32) return {};
  const AtomGrid grid = atom_grid(block, padded, dim);
  return {heads, ceil_div(grid.rows, kAtomRows), grid.atoms_across(), kAtomBytes};
}

int64_t scale_size(MxBlock block, ScaleLayout layout, int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq) {
  const auto s = scale_shape(block, layout, tokens, heads, dim, seq);
  return s[0] * s[1] * s[2] * (layout == ScaleLayout::linear ? 1 : s[3]);
}

int64_t image_size(ImageRole role, int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq) {
  if (tokens < 0 || heads < 0 || dim < 0 || dim > kMaxImageDim || seq.batch < 1) return 0;
  if (!is_small_product({tokens, heads, kMaxImageDim}) ||
      !is_small_product({heads, kMaxImageDim, kSeqAlign * seq.batch})) {
    return 0;
  }
  return ImageShape::of(role, padded_token_count(tokens, seq), heads, dim).size();
}

MxTensor make_mx_tensor(void* data, void* scale, Dtype element, MxBlock block, ScaleLayout layout, int64_t tokens,
                        int64_t heads, int64_t dim, const Jagged& seq) {
  const auto s = scale_shape(block, layout, tokens, heads, dim, seq);
  return {.data = make_tensor(data, element, tokens, heads, dim),
          .scale = layout == ScaleLayout::linear ? make_tensor(scale, Dtype::e8m0, s[0], s[1], s[2])
                                                 : make_tensor(scale, Dtype::e8m0, s[0], s[1], s[2], s[3]),
          .block = block,
          .layout = layout};
}

}  // namespace mxflash
