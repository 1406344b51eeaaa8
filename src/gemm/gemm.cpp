// Argument rules and backend list of gemm_quantize.
#include "gemm/gemm.h"

#include <cinttypes>

#include "runtime/check.h"

namespace mxflash {
namespace {

constexpr const char* op = "gemm_quantize";
const Impl<GemmQuantize>* const kList[] = {&kGemmQuantizeCpu, &kGemmQuantizeRef};

// [m, n] or [m, heads, dim] with heads * dim == n.
Status check_result(const TensorRule& rule, const Tensor& t, const Tensor& a, const Tensor& b) {
  MXFLASH_TRY(check_extent(rule, "shape[0]", t.shape[0], a.shape[0], "a.shape[0]"));
  const int64_t columns = t.rank == 3 ? t.shape[1] * t.shape[2] : t.shape[1];
  MXFLASH_TRY(check_extent(rule, "columns", columns, b.shape[0], "b.shape[0]"));
  return check_same_device(rule, t, a.device);
}

Status check(const GemmQuantize& a) {
  MXFLASH_TRY(check_tensor({op, "a"}, a.a, 2, DtypeSet::floats));
  MXFLASH_TRY(check_tensor({op, "b"}, a.b, 2, DtypeSet::floats));
  MXFLASH_TRY(check_extent({op, "b"}, "shape[1]", a.b.shape[1], a.a.shape[1], "a.shape[1]"));
  MXFLASH_TRY(check_same_device({op, "b"}, a.b, a.a.device));
  MXFLASH_TRY(check_jagged(op, "seq", a.seq, a.a.shape[0], a.a.device));
  MXFLASH_TRY(check_mx_tensor({op, "out", true}, a.out, a.seq));
  MXFLASH_TRY(check_result({op, "out"}, a.out.data, a.a, a.b));
  if (a.c) {
    MXFLASH_TRY(check_tensor({op, "c", true}, a.c, a.out.data.rank, DtypeSet::floats));
    MXFLASH_TRY(check_result({op, "c"}, a.c, a.a, a.b));
    if (a.c.rank == 3)
      MXFLASH_TRY(check_extent({op, "c"}, "shape[2]", a.c.shape[2], a.out.data.shape[2], "that of out"));
  }
  return check_rule(op, a.rule);
}

}  // namespace

ImplList<GemmQuantize> gemm_quantize_list() { return kList; }

Status gemm_quantize(const GemmQuantize& args, Stream stream) {
  MXFLASH_TRY(check(args));
  return dispatch<GemmQuantize>(op, kList, args, args.a.device, stream);
}

}  // namespace mxflash
