// Argument rules and backend list of rmsnorm_quantize.
#include "rmsnorm/rmsnorm.h"

#include <cmath>

#include "runtime/check.h"
#include "runtime/cuda_backend.h"

namespace mxflash {

#if !MXFLASH_CUDA
const Impl<RmsnormQuantize> kRmsnormQuantizeSm90 = not_built<RmsnormQuantize>(kSm90);
#endif

namespace {

constexpr const char* op = "rmsnorm_quantize";
const Impl<RmsnormQuantize>* const kList[] = {&kRmsnormQuantizeSm90, &kRmsnormQuantizeCpu, &kRmsnormQuantizeRef};

Status check_matrix(const TensorRule& rule, const Tensor& t, const Tensor& in) {
  MXFLASH_TRY(check_extent(rule, "shape[0]", t.shape[0], in.shape[0], "in.shape[0]"));
  MXFLASH_TRY(check_extent(rule, "shape[1]", t.shape[1], in.shape[1], "in.shape[1]"));
  return check_same_device(rule, t, in.device);
}

Status check(const RmsnormQuantize& a) {
  MXFLASH_TRY(check_tensor({op, "in"}, a.in, 2, DtypeSet::floats));
  if (a.in.shape[1] < 1) return invalid("%s: in.shape[1] must be >= 1, got %d", op, int(a.in.shape[1]));
  MXFLASH_TRY(check_jagged(op, "seq", a.seq, a.in.shape[0], a.in.device));
  MXFLASH_TRY(check_tensor({op, "weight"}, a.weight, 1, DtypeSet::floats));
  MXFLASH_TRY(check_extent({op, "weight"}, "shape[0]", a.weight.shape[0], a.in.shape[1], "in.shape[1]"));
  MXFLASH_TRY(check_same_device({op, "weight"}, a.weight, a.in.device));
  if (a.residual) {
    MXFLASH_TRY(check_tensor({op, "residual", true}, a.residual, 2, DtypeSet::floats));
    MXFLASH_TRY(check_matrix({op, "residual"}, a.residual, a.in));
  }
  if (a.out.data.rank != 2) return invalid("%s: out.data.rank must be 2, got %d", op, a.out.data.rank);
  MXFLASH_TRY(check_mx_tensor({op, "out", true}, a.out, a.seq));
  MXFLASH_TRY(check_matrix({op, "out"}, a.out.data, a.in));
  if (a.y) {
    MXFLASH_TRY(check_tensor({op, "y", true}, a.y, 2, DtypeSet::bf16));
    MXFLASH_TRY(check_matrix({op, "y"}, a.y, a.in));
  }
  if (a.rstd) {
    MXFLASH_TRY(check_tensor({op, "rstd", true}, a.rstd, 1, DtypeSet::f32));
    MXFLASH_TRY(check_extent({op, "rstd"}, "shape[0]", a.rstd.shape[0], a.in.shape[0], "in.shape[0]"));
    MXFLASH_TRY(check_same_device({op, "rstd"}, a.rstd, a.in.device));
  }
  if (!std::isfinite(a.eps) || a.eps < 0) return invalid("%s: eps must be finite and >= 0, got %g", op, double(a.eps));
  return check_rule(op, a.rule);
}

}  // namespace

ImplList<RmsnormQuantize> rmsnorm_quantize_list() { return kList; }

Status rmsnorm_quantize(const RmsnormQuantize& args, Stream stream) {
  MXFLASH_TRY(check(args));
  return dispatch<RmsnormQuantize>(op, kList, args, args.in.device, stream);
}

}  // namespace mxflash
