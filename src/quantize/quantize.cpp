// Argument rules and backend lists of quantize, dequantize, convert_scales and write_image.
#include "quantize/quantize.h"

#include <cinttypes>

#include "runtime/check.h"
#include "runtime/cuda_backend.h"

namespace mxflash {

#if !MXFLASH_CUDA
const Impl<Quantize> kQuantizeSm100 = not_built<Quantize>(kSm100), kQuantizeSm90 = not_built<Quantize>(kSm90);
const Impl<Dequantize> kDequantizeSm100 = not_built<Dequantize>(kSm100);
const Impl<Dequantize> kDequantizeSm90 = not_built<Dequantize>(kSm90);
const Impl<ConvertScales> kConvertScalesSm100 = not_built<ConvertScales>(kSm100);
const Impl<ConvertScales> kConvertScalesSm90 = not_built<ConvertScales>(kSm90);
const Impl<WriteImage> kWriteImageSm90 = not_built<WriteImage>(kSm90);
#endif

namespace {

const Impl<Quantize>* const kQuantizeList[] = {&kQuantizeSm100, &kQuantizeSm90, &kQuantizeCpu, &kQuantizeRef};
const Impl<Dequantize>* const kDequantizeList[] = {&kDequantizeSm100, &kDequantizeSm90, &kDequantizeCpu,
                                                   &kDequantizeRef};
const Impl<ConvertScales>* const kConvertScalesList[] = {&kConvertScalesSm100, &kConvertScalesSm90, &kConvertScalesCpu,
                                                         &kConvertScalesRef};
const Impl<WriteImage>* const kWriteImageList[] = {&kWriteImageSm90, &kWriteImageRef};

Status check_same_shape(const char* op, const char* name, const Tensor& got, const char* like, const Tensor& want) {
  if (got.rank != want.rank) {
    return invalid("%s: %s.rank must be that of %s = %d, got %d", op, name, like, want.rank, got.rank);
  }
  for (int i = 0; i < want.rank; ++i) {
    if (got.shape[size_t(i)] != want.shape[size_t(i)]) {
      return invalid("%s: %s.shape[%d] must be that of %s = %" PRId64 ", got %" PRId64, op, name, i, like,
                     want.shape[size_t(i)], got.shape[size_t(i)]);
    }
  }
  return {};
}

Status check_mx_output(const char* op, const char* name, const MxTensor& out, const Tensor& in, const Jagged& seq) {
  MXFLASH_TRY(check_same_shape(op, name, out.data, "in", in));
  MXFLASH_TRY(check_mx_tensor({op, name, true}, out, seq));
  return check_same_device({op, name}, out.data, in.device);
}

Status check(const Quantize& a) {
  constexpr const char* op = "quantize";
  if (a.in.rank != 2 && a.in.rank != 3) return invalid("%s: in.rank must be 2 or 3, got %d", op, a.in.rank);
  MXFLASH_TRY(check_tensor({.op = op, .name = "in", .may_broadcast = true}, a.in, a.in.rank, DtypeSet::floats));
  MXFLASH_TRY(check_jagged(op, "seq", a.seq, a.in.shape[0], a.in.device));
  MxTensor out = a.out;
  if (a.image) assume_data(out);
  MXFLASH_TRY(check_mx_output(op, "out", out, a.in, a.seq));
  if (a.image) MXFLASH_TRY(check_image({op, "image", true}, a.image, a.image_role, as_heads(a.in), a.seq));
  if (a.out_col) MXFLASH_TRY(check_mx_output(op, "out_col", a.out_col, a.in, a.seq));
  MXFLASH_TRY(check_rule(op, a.rule));
  if (a.smooth) {
    const Tensor in = as_heads(a.in);
    const TensorRule rule{op, "mean", true};
    MXFLASH_TRY(check_tensor(rule, a.mean, a.in.rank, DtypeSet::f32));
    const Tensor mean = as_heads(a.mean);
    MXFLASH_TRY(check_extent(rule, "shape[0]", mean.shape[0], a.seq.batch, "seq.batch"));
    MXFLASH_TRY(check_extent(rule, "heads", mean.shape[1], in.shape[1], "in.heads"));
    MXFLASH_TRY(check_extent(rule, "dim", mean.shape[2], in.shape[2], "in.dim"));
    MXFLASH_TRY(check_same_device(rule, a.mean, a.in.device));
  }
  return {};
}

Status check(const Dequantize& a) {
  constexpr const char* op = "dequantize";
  MXFLASH_TRY(check_jagged(op, "seq", a.seq, a.in.data.shape[0], a.in.data.device));
  MXFLASH_TRY(check_mx_tensor({op, "in"}, a.in, a.seq));
  MXFLASH_TRY(check_same_shape(op, "out", a.out, "in", a.in.data));
  MXFLASH_TRY(check_tensor({op, "out", true}, a.out, a.in.data.rank, DtypeSet::floats));
  return check_same_device({op, "out"}, a.out, a.in.data.device);
}

Status check(const ConvertScales& a) {
  constexpr const char* op = "convert_scales";
  MXFLASH_TRY(check_jagged(op, "seq", a.seq, a.in.data.shape[0], a.in.data.device));
  MXFLASH_TRY(check_mx_tensor({op, "in"}, a.in, a.seq));
  MXFLASH_TRY(check_same_shape(op, "out", a.out.data, "in", a.in.data));
  MXFLASH_TRY(check_mx_tensor({op, "out"}, a.out, a.seq));
  MXFLASH_TRY(check_same_device({op, "out"}, a.out.data, a.in.data.device));
  if (a.in.block != a.out.block && a.in.block != MxBlock::square32) {
    return invalid("%s: out.block must be that of in (%d) unless in is square32, got %d", op, int(a.in.block),
                   int(a.out.block));
  }
  const auto in = reinterpret_cast<uintptr_t>(a.in.scale.data), out = reinterpret_cast<uintptr_t>(a.out.scale.data);
  if (in < out + uintptr_t(a.out.scale.numel()) && out < in + uintptr_t(a.in.scale.numel())) {
    return invalid("%s: out.scale must not overlap in.scale at %p, got address %p", op, a.in.scale.data,
                   a.out.scale.data);
  }
  return {};
}

Status check(const WriteImage& a) {
  constexpr const char* op = "write_image";
  if (a.in.data.rank != 3) return invalid("%s: in.data.rank must be 3, got %d", op, a.in.data.rank);
  MXFLASH_TRY(check_jagged(op, "seq", a.seq, a.in.data.shape[0], a.in.data.device));
  MXFLASH_TRY(check_mx_tensor({op, "in"}, a.in, a.seq));
  return check_image({op, "image", true}, a.image, a.role, a.in.data, a.seq);
}

}  // namespace

ImplList<Quantize> quantize_list() { return kQuantizeList; }
ImplList<Dequantize> dequantize_list() { return kDequantizeList; }
ImplList<ConvertScales> convert_scales_list() { return kConvertScalesList; }
ImplList<WriteImage> write_image_list() { return kWriteImageList; }

Status quantize(const Quantize& args, Stream stream) {
  MXFLASH_TRY(check(args));
  return dispatch<Quantize>("quantize", kQuantizeList, args, args.in.device, stream);
}

Status quantize_all(std::span<const Quantize> all, Stream stream) {
  [[maybe_unused]] bool together = true;
  for (const Quantize& a : all) {
    MXFLASH_TRY(check(a));
    const Choice<Quantize> choice = choose<Quantize>("quantize", kQuantizeList, a, a.in.device);
    if (!choice.impl) return choice.status;
    together &= (choice.impl == &kQuantizeSm90 || choice.impl == &kQuantizeSm100) &&
                a.in.device.index == all[0].in.device.index;
  }
#if MXFLASH_CUDA
  if (together) return quantize_cuda(all, stream);
#endif
  for (const Quantize& a : all) MXFLASH_TRY(quantize(a, stream));
  return {};
}

Status dequantize(const Dequantize& args, Stream stream) {
  MXFLASH_TRY(check(args));
  return dispatch<Dequantize>("dequantize", kDequantizeList, args, args.in.data.device, stream);
}

Status convert_scales(const ConvertScales& args, Stream stream) {
  MXFLASH_TRY(check(args));
  return dispatch<ConvertScales>("convert_scales", kConvertScalesList, args, args.in.data.device, stream);
}

Status write_image(const WriteImage& args, Stream stream) {
  MXFLASH_TRY(check(args));
  return dispatch<WriteImage>("write_image", kWriteImageList, args, args.in.data.device, stream);
}

}  // namespace mxflash
