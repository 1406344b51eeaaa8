// The backend lists of all operations, for people and for other languages.
#include <mxflash/backend.h>

#include "attention/attention.h"
#include "gemm/gemm.h"
#include "quantize/quantize.h"
#include "rmsnorm/rmsnorm.h"
#include "runtime/cpu_isa.h"
#include "runtime/dispatch.h"

namespace mxflash {

namespace {

// Calls visit(list) with the list of one operation.
template <class Visit>
auto visit_list(Operation op, Visit visit) -> decltype(visit(quantize_list())) {
  switch (op) {
    case Operation::quantize: return visit(quantize_list());
    case Operation::dequantize: return visit(dequantize_list());
    case Operation::convert_scales: return visit(convert_scales_list());
    case Operation::attention_fwd: return visit(attention_fwd_list());
    case Operation::attention_bwd: return visit(attention_bwd_list());
    case Operation::rmsnorm_quantize: return visit(rmsnorm_quantize_list());
    case Operation::gemm_quantize: return visit(gemm_quantize_list());
    case Operation::write_image: return visit(write_image_list());
    case Operation::rmsnorm_bwd: return visit(rmsnorm_bwd_list());
  }
  return {};
}

}  // namespace

const char* operation_name(Operation op) {
  switch (op) {
    case Operation::quantize: return "quantize";
    case Operation::dequantize: return "dequantize";
    case Operation::convert_scales: return "convert_scales";
    case Operation::attention_fwd: return "attention_fwd";
    case Operation::attention_bwd: return "attention_bwd";
    case Operation::rmsnorm_quantize: return "rmsnorm_quantize";
    case Operation::gemm_quantize: return "gemm_quantize";
    case Operation::write_image: return "write_image";
    case Operation::rmsnorm_bwd: return "rmsnorm_bwd";
  }
  return "invalid";
}

int32_t num_backends(Operation op) {
  return visit_list(op, [](auto list) { return int32_t(list.size()); });
}

BackendInfo backend_info(Operation op, int32_t index) {
  return visit_list(op, [index]<class Args>(std::span<const Impl<Args>* const> list) -> BackendInfo {
    if (index < 0 || size_t(index) >= list.size()) return {};
    const Impl<Args>& impl = *list[size_t(index)];
    return {impl.name, impl.target, impl.available()};
  });
}

const char* cpu_isa() { return cpu_isa_name(cpu_isa_in_use()); }

const char* available_cpu_isa(int32_t index) {
  for (int32_t i = kNumCpuIsas - 1; i >= 0 && index >= 0; --i) {
    if (has_cpu_isa(CpuIsa(i)) && index-- == 0) return cpu_isa_name(CpuIsa(i));
  }
  return nullptr;
}

const char* version() { return MXFLASH_VERSION; }

}  // namespace mxflash
