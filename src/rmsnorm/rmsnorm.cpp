// Argument rules and backend lists of rmsnorm_quantize and rmsnorm_bwd.
#include "rmsnorm/rmsnorm.h"

#include <cmath>

#include "runtime/check.h"
#include "runtime/cuda_backend.h"

namespace mxflash {

#if !MXFLASH_CUDA
const Impl<RmsnormQuantize> kRmsnormQuantizeSm100 = not_built<RmsnormQuantize>(kSm100);
const Impl<RmsnormQuantize> kRmsnormQuantizeSm90 = not_built<RmsnormQuantize>(kSm90);
const Impl<RmsnormBwd> kRmsnormBwdSm100 = not_built<RmsnormBwd>(kSm100);
const Impl<RmsnormBwd> kRmsnormBwdSm90 = not_built<RmsnormBwd>(kSm90);
#endif

namespace {

constexpr const char *kFwd = "rmsnorm_quantize", *kBwd = "rmsnorm_bwd";
const Impl<RmsnormQuantize>* const kFwdList[] = {&kRmsnormQuantizeSm100, &kRmsnormQuantizeSm90, &kRmsnormQuantizeCpu,
                                                 &kRmsnormQuantizeRef};
const Impl<RmsnormBwd>* const kBwdList[] = {&kRmsnormBwdSm100, &kRmsnormBwdSm90, &kRmsnormBwdCpu, &kRmsnormBwdRef};

// The tensor that says what the others must be like: the input of a forward, h of a backward.
struct Rows {
  const Tensor& tensor;
  const char *rows, *dim;  // "in.shape[0]", "in.shape[1]"
};

Status check_rows(const TensorRule& rule, const Tensor& t) {
  MXFLASH_TRY(check_tensor(rule, t, 2, DtypeSet::floats));
  if (t.shape[1] >= 1) return {};
  return invalid("%s: %s.shape[1] must be >= 1, got %d", rule.op, rule.name, int(t.shape[1]));
}

// Of tensors that have passed the check of their kind.
Status check_matrix(const TensorRule& rule, const Tensor& t, const Rows& like) {
  MXFLASH_TRY(check_extent(rule, "shape[0]", t.shape[0], like.tensor.shape[0], like.rows));
  MXFLASH_TRY(check_extent(rule, "shape[1]", t.shape[1], like.tensor.shape[1], like.dim));
  return check_same_device(rule, t, like.tensor.device);
}
Status check_floats(const TensorRule& rule, const Tensor& t, const Rows& like) {
  MXFLASH_TRY(check_tensor(rule, t, 2, DtypeSet::floats));
  return check_matrix(rule, t, like);
}
Status check_mx(const TensorRule& rule, const MxTensor& t, const Jagged& seq, const Rows& like) {
  if (t.data.rank != 2) return invalid("%s: %s.data.rank must be 2, got %d", rule.op, rule.name, t.data.rank);
  MXFLASH_TRY(check_mx_tensor(rule, t, seq));
  return check_matrix(rule, t.data, like);
}

// A vector over the rows or over the columns.
Status check_rstd(const TensorRule& rule, const Tensor& t, const Rows& like) {
  MXFLASH_TRY(check_tensor(rule, t, 1, DtypeSet::f32));
  MXFLASH_TRY(check_extent(rule, "shape[0]", t.shape[0], like.tensor.shape[0], like.rows));
  return check_same_device(rule, t, like.tensor.device);
}
Status check_weight(const TensorRule& rule, const Tensor& t, const Rows& like) {
  MXFLASH_TRY(check_tensor(rule, t, 1, DtypeSet::floats));
  MXFLASH_TRY(check_extent(rule, "shape[0]", t.shape[0], like.tensor.shape[1], like.dim));
  return check_same_device(rule, t, like.tensor.device);
}

Status check(const RmsnormQuantize& a) {
  const Rows in{a.in, "in.shape[0]", "in.shape[1]"};
  MXFLASH_TRY(check_rows({kFwd, "in"}, a.in));
  MXFLASH_TRY(check_jagged(kFwd, "seq", a.seq, a.in.shape[0], a.in.device));
  MXFLASH_TRY(check_weight({kFwd, "weight"}, a.weight, in));
  if (a.residual) MXFLASH_TRY(check_floats({kFwd, "residual", true}, a.residual, in));
  MXFLASH_TRY(check_mx({kFwd, "out", true}, a.out, a.seq, in));
  if (a.y) {
    MXFLASH_TRY(check_tensor({kFwd, "y", true}, a.y, 2, DtypeSet::bf16));
    MXFLASH_TRY(check_matrix({kFwd, "y"}, a.y, in));
  }
  if (a.rstd) MXFLASH_TRY(check_rstd({kFwd, "rstd", true}, a.rstd, in));
  if (!std::isfinite(a.eps) || a.eps < 0) {
    return invalid("%s: eps must be finite and >= 0, got %g", kFwd, double(a.eps));
  }
  return check_rule(kFwd, a.rule);
}

Status check(const RmsnormBwd& a) {
  const Rows h{a.h, "h.shape[0]", "h.shape[1]"};
  MXFLASH_TRY(check_rows({kBwd, "h"}, a.h));
  MXFLASH_TRY(check_jagged(kBwd, "seq", a.seq, a.h.shape[0], a.h.device));
  MXFLASH_TRY(check_capacity({kBwd, "h"}, as_heads(a.h), a.seq));
  MXFLASH_TRY(check_weight({kBwd, "weight"}, a.weight, h));
  MXFLASH_TRY(check_rstd({kBwd, "rstd"}, a.rstd, h));
  // A tensor without rows may be without data.
  const bool floats = a.dy || (a.dy.rank != 0 && !a.dy_mx), mx = a.dy_mx || (a.dy_mx.data.rank != 0 && !a.dy);
  if (floats == mx) {
    return invalid("%s: one of dy and dy_mx must be given, got %s", kBwd, floats ? "both" : "neither");
  }
  if (floats) MXFLASH_TRY(check_floats({kBwd, "dy"}, a.dy, h));
  if (mx) MXFLASH_TRY(check_mx({kBwd, "dy_mx"}, a.dy_mx, a.seq, h));
  if (a.dh) MXFLASH_TRY(check_floats({kBwd, "dh"}, a.dh, h));
  MXFLASH_TRY(check_floats({kBwd, "dx", true}, a.dx, h));
  if (a.dh && a.dx.data == a.dh.data) {
    if (a.dx.dtype != a.dh.dtype) {
      return invalid("%s: dx.dtype must be that of dh = %s if they are one tensor, got %s", kBwd,
                     dtype_name(a.dh.dtype), dtype_name(a.dx.dtype));
    }
    MXFLASH_TRY(check_extent({kBwd, "dx"}, "stride[0]", a.dx.stride[0], a.dh.stride[0], "dh.stride[0], one tensor"));
  }
  MXFLASH_TRY(check_weight({kBwd, "dw", true}, a.dw, h));
  if (a.dw.dtype == Dtype::f32 || a.dw.dtype == a.weight.dtype) return {};
  return invalid("%s: dw.dtype must be f32 or that of weight = %s, got %s", kBwd, dtype_name(a.weight.dtype),
                 dtype_name(a.dw.dtype));
}

size_t impl_workspace(const Impl<RmsnormBwd>* impl, const RmsnormBwd& args) {
  return impl && impl->workspace ? impl->workspace(args) : 0;
}

}  // namespace

ImplList<RmsnormQuantize> rmsnorm_quantize_list() { return kFwdList; }
ImplList<RmsnormBwd> rmsnorm_bwd_list() { return kBwdList; }

Status rmsnorm_quantize(const RmsnormQuantize& args, Stream stream) {
  MXFLASH_TRY(check(args));
  return dispatch<RmsnormQuantize>(kFwd, kFwdList, args, args.in.device, stream);
}

size_t rmsnorm_bwd_workspace(const RmsnormBwd& args) {
  RmsnormBwd a = args;
  for (Tensor* t : {&a.h, &a.weight, &a.rstd, &a.dy, &a.dx, &a.dw}) assume_data(*t);
  assume_data(a.dy_mx);
  // Not where dx is: without data they are two tensors.
  if (!a.dh.data && a.dh.rank > 0) a.dh.data = static_cast<std::byte*>(somewhere()) + kWorkspaceAlign;
  if (!check(a).ok()) return 0;
  return impl_workspace(choose<RmsnormBwd>(kBwd, kBwdList, a, a.h.device).impl, a);
}

Status rmsnorm_bwd(const RmsnormBwd& args, Stream stream) {
  MXFLASH_TRY(check(args));
  const Choice<RmsnormBwd> choice = choose<RmsnormBwd>(kBwd, kBwdList, args, args.h.device);
  if (!choice.impl) return choice.status;
  const size_t need = impl_workspace(choice.impl, args);
  MXFLASH_TRY(check_workspace(kBwd, "workspace", args.workspace, args.workspace_size, need));
  return choice.impl->run(args, stream);
}

}  // namespace mxflash
