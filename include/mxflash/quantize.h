// Quantize to MXFP8, dequantize, and convert between scale layouts. Payload and scale bytes are bit-equal on every
// backend. docs/format.md defines them; docs/numerics.md says what the options are for.
#pragma once

#include <mxflash/mx.h>

namespace mxflash {

// Any seed is correct; SQNR of gradients moves by some tenths of a dB between seeds (docs/numerics.md).
inline constexpr uint64_t kDefaultRotateSeed = 24;

struct QuantizeStats {
  float amax = 0;         // largest finite |x| that was quantized (after smoothing and rotation)
  int64_t saturated = 0;  // finite elements beyond max_element * scale, clipped to it (rule floor only)
  int64_t flushed = 0;    // non-zero elements that became zero
  int64_t nonfinite = 0;  // NaN or Inf: each turns its whole block into NaN
  int64_t total = 0;
};

// out = MX(rotate(in - mean)). Each step is optional and widened to fp32.
//   smooth: mean[b, h, c] is the mean of `in` over the tokens of sequence b; it is subtracted and written to `mean`.
//           Order of the sum: tokens 128 i .. 128 i + 127 ascending in fp32, then those partial sums ascending, then a
//           division by the length.
//   rotate: channels are multiplied by random signs and a normalised Hadamard matrix, in groups of the largest power
//           of two that divides dim (at most 256). Orthogonal: q.k is unchanged in exact arithmetic.
struct Quantize {
  Tensor in;           // [tokens, heads, dim] or [rows, dim] f32, f16 or bf16; the last stride 1 or 0
  MxTensor out;        // same shape; e4m3 or e5m2
  MxTensor out_col{};  // optional second copy, e.g. col32 beside row32, from the same values
  Jagged seq{};
  MxRule rule = MxRule::rceil;
  bool smooth = false;
  Tensor mean{};  // f32 [batch, heads, dim] (or [batch, dim]); required with smooth
  bool rotate = false;
  uint64_t rotate_seed = kDefaultRotateSeed;
  // Optional: u8 [image_size(...)], the image of `out` for attention_fwd, from the same read of `in`. Then `out` may be
  // without data: its shape, dtype and block still say what is rounded.
  Tensor image{};
  ImageRole image_role = ImageRole::query;
  QuantizeStats* stats = nullptr;  // optional, of `out`; on the operands' device
  const char* backend = nullptr;
};
Status quantize(const Quantize& args, Stream stream = nullptr);

// out = payload * 2^(scale - 127). A value beyond the range of out's dtype becomes Inf.
struct Dequantize {
  MxTensor in;  // [tokens, heads, dim] or [rows, dim]
  Tensor out;   // same shape; f32, f16 or bf16
  Jagged seq{};
  const char* backend = nullptr;
};
Status dequantize(const Dequantize& args, Stream stream = nullptr);

// Copies the scales of `in` to those of `out`, between layouts and from square32 to row32 or col32 (each scale
// repeated), for GEMMs and attention kernels of other libraries. Payloads are neither read nor written: `out.data`
// describes the payload shape and may be `in.data`.
struct ConvertScales {
  MxTensor in;
  MxTensor out;
  Jagged seq{};
  const char* backend = nullptr;
};
Status convert_scales(const ConvertScales& args, Stream stream = nullptr);

// How many elements of an operand an image with one scale a tile cannot hold exactly.
struct ImageStats {
  int64_t rounded = 0;  // finite elements that change value
  int64_t total = 0;
};

// The operand image of `in`, as attention_fwd makes it for itself where none is given: for operands that serve many
// calls, such as a cache of keys and values, or to count what it rounds. Quantize::image writes the same bytes from the
// unquantized tensor.
struct WriteImage {
  MxTensor in;   // [tokens, heads, dim], dim <= 128
  Tensor image;  // u8 [image_size(...)]
  ImageRole role = ImageRole::query;
  Jagged seq{};
  ImageStats* stats = nullptr;  // optional; on the operands' device
  const char* backend = nullptr;
};
Status write_image(const WriteImage& args, Stream stream = nullptr);

}  // namespace mxflash
