// The C ABI: every call converts its struct to the C++ one, member by member, and calls the C++ function. Nothing else
// happens here, and nothing allocates.
#include <mxflash/mxflash_c.h>

#include <mxflash/attention.h>
#include <mxflash/backend.h>
#include <mxflash/gemm.h>
#include <mxflash/operator.h>
#include <mxflash/quantize.h>
#include <mxflash/rmsnorm.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

#include "runtime/status.h"

namespace mxflash {
namespace {

// ---- enums: the same values ---------------------------------------------------------------------------------------

#define SAME_VALUE(c_constant, value) static_assert(c_constant == int32_t(value))
SAME_VALUE(MXFLASH_DTYPE_NONE, Dtype::none);
SAME_VALUE(MXFLASH_DTYPE_F32, Dtype::f32);
SAME_VALUE(MXFLASH_DTYPE_F16, Dtype::f16);
SAME_VALUE(MXFLASH_DTYPE_BF16, Dtype::bf16);
SAME_VALUE(MXFLASH_DTYPE_E4M3, Dtype::e4m3);
SAME_VALUE(MXFLASH_DTYPE_E5M2, Dtype::e5m2);
SAME_VALUE(MXFLASH_DTYPE_E8M0, Dtype::e8m0);
SAME_VALUE(MXFLASH_DTYPE_U8, Dtype::u8);
SAME_VALUE(MXFLASH_DEVICE_CPU, DeviceType::cpu);
SAME_VALUE(MXFLASH_DEVICE_CUDA, DeviceType::cuda);
SAME_VALUE(MXFLASH_STATUS_OK, StatusCode::ok);
SAME_VALUE(MXFLASH_STATUS_INVALID_ARGUMENT, StatusCode::invalid_argument);
SAME_VALUE(MXFLASH_STATUS_UNSUPPORTED, StatusCode::unsupported);
SAME_VALUE(MXFLASH_STATUS_UNAVAILABLE, StatusCode::unavailable);
SAME_VALUE(MXFLASH_STATUS_WORKSPACE_TOO_SMALL, StatusCode::workspace_too_small);
SAME_VALUE(MXFLASH_STATUS_DEVICE_ERROR, StatusCode::device_error);
SAME_VALUE(MXFLASH_BLOCK_SQUARE32, MxBlock::square32);
SAME_VALUE(MXFLASH_BLOCK_ROW32, MxBlock::row32);
SAME_VALUE(MXFLASH_BLOCK_COL32, MxBlock::col32);
SAME_VALUE(MXFLASH_RULE_RCEIL, MxRule::rceil);
SAME_VALUE(MXFLASH_RULE_FLOOR, MxRule::floor);
SAME_VALUE(MXFLASH_LAYOUT_LINEAR, ScaleLayout::linear);
SAME_VALUE(MXFLASH_LAYOUT_ATOM128X4, ScaleLayout::atom128x4);
SAME_VALUE(MXFLASH_IMAGE_QUERY, ImageRole::query);
SAME_VALUE(MXFLASH_IMAGE_KEY, ImageRole::key);
SAME_VALUE(MXFLASH_IMAGE_VALUE, ImageRole::value);
SAME_VALUE(MXFLASH_CPU_MATH_AUTOMATIC, CpuMath::automatic);
SAME_VALUE(MXFLASH_CPU_MATH_EXACT, CpuMath::exact);
SAME_VALUE(MXFLASH_CPU_MATH_FAST, CpuMath::fast);
SAME_VALUE(MXFLASH_OP_QUANTIZE, Operation::quantize);
SAME_VALUE(MXFLASH_OP_DEQUANTIZE, Operation::dequantize);
SAME_VALUE(MXFLASH_OP_CONVERT_SCALES, Operation::convert_scales);
SAME_VALUE(MXFLASH_OP_ATTENTION_FWD, Operation::attention_fwd);
SAME_VALUE(MXFLASH_OP_ATTENTION_BWD, Operation::attention_bwd);
SAME_VALUE(MXFLASH_OP_RMSNORM_QUANTIZE, Operation::rmsnorm_quantize);
SAME_VALUE(MXFLASH_OP_GEMM_QUANTIZE, Operation::gemm_quantize);
SAME_VALUE(MXFLASH_OP_WRITE_IMAGE, Operation::write_image);
SAME_VALUE(MXFLASH_OP_RMSNORM_BWD, Operation::rmsnorm_bwd);
SAME_VALUE(MXFLASH_NUM_OPERATIONS, kNumOperations);
#undef SAME_VALUE

// Statistics may be in device memory, so they are not copied: the two structs are the same bytes.
#define SAME_OFFSET(c_type, type, member) static_assert(offsetof(c_type, member) == offsetof(type, member))
static_assert(sizeof(mxflash_quantize_stats) == sizeof(QuantizeStats));
SAME_OFFSET(mxflash_quantize_stats, QuantizeStats, amax);
SAME_OFFSET(mxflash_quantize_stats, QuantizeStats, saturated);
SAME_OFFSET(mxflash_quantize_stats, QuantizeStats, flushed);
SAME_OFFSET(mxflash_quantize_stats, QuantizeStats, nonfinite);
SAME_OFFSET(mxflash_quantize_stats, QuantizeStats, total);
static_assert(sizeof(mxflash_image_stats) == sizeof(ImageStats));
SAME_OFFSET(mxflash_image_stats, ImageStats, rounded);
SAME_OFFSET(mxflash_image_stats, ImageStats, total);
static_assert(sizeof(mxflash_operator_stats) == sizeof(OperatorStats));
SAME_OFFSET(mxflash_operator_stats, OperatorStats, q);
SAME_OFFSET(mxflash_operator_stats, OperatorStats, k);
SAME_OFFSET(mxflash_operator_stats, OperatorStats, v);
SAME_OFFSET(mxflash_operator_stats, OperatorStats, dout);
#undef SAME_OFFSET

// ---- C++ to C -----------------------------------------------------------------------------------------------------

mxflash_status to_c(const Status& s) {
  mxflash_status c{.code = int32_t(s.code), .message = {}};
  static_assert(sizeof c.message == sizeof s.message);
  std::memcpy(c.message, s.message, sizeof c.message);
  return c;
}

mxflash_tensor to_c(const Tensor& t) {
  mxflash_tensor c{};
  c.data = t.data;
  c.dtype = int32_t(t.dtype);
  c.device_type = int32_t(t.device.type);
  c.device_index = t.device.index;
  c.rank = t.rank;
  std::copy_n(t.shape.data(), 4, c.shape);
  std::copy_n(t.stride.data(), 4, c.stride);
  return c;
}

mxflash_mx_tensor to_c(const MxTensor& t) {
  return {.data = to_c(t.data), .scale = to_c(t.scale), .block = int32_t(t.block), .layout = int32_t(t.layout)};
}

mxflash_jagged to_c(const Jagged& s) {
  return {.cu_seqlens = s.cu_seqlens, .batch = s.batch, .max_seqlen = s.max_seqlen};
}

mxflash_mask to_c(const Mask& m) {
  return {.causal = m.causal, .window_left = m.window_left, .window_right = m.window_right};
}

mxflash_recipe to_c(const Recipe& r) {
  return {.element = int32_t(r.element),
          .grad_element = int32_t(r.grad_element),
          .rule = int32_t(r.rule),
          .block = int32_t(r.block),
          .block_col = int32_t(r.block_col),
          .rotate_qk = r.rotate_qk,
          .smooth_k = r.smooth_k,
          .smooth_v = r.smooth_v,
          .rotate_seed = r.rotate_seed};
}

// The C++ defaults of an all-zero struct.
void set_defaults(mxflash_quantize_args& c) {
  const Quantize d{};
  c.seq = to_c(d.seq);
  c.rule = int32_t(d.rule);
  c.smooth = d.smooth;
  c.rotate = d.rotate;
  c.rotate_seed = d.rotate_seed;
  c.image_role = int32_t(d.image_role);
}
void set_defaults(mxflash_dequantize_args& c) { c.seq = to_c(Dequantize{}.seq); }
void set_defaults(mxflash_convert_scales_args& c) { c.seq = to_c(ConvertScales{}.seq); }
void set_defaults(mxflash_write_image_args& c) {
  const WriteImage d{};
  c.role = int32_t(d.role);
  c.seq = to_c(d.seq);
}
void set_defaults(mxflash_rmsnorm_quantize_args& c) {
  const RmsnormQuantize d{};
  c.eps = d.eps;
  c.seq = to_c(d.seq);
  c.rule = int32_t(d.rule);
}
void set_defaults(mxflash_rmsnorm_bwd_args& c) { c.seq = to_c(RmsnormBwd{}.seq); }
void set_defaults(mxflash_gemm_quantize_args& c) {
  const GemmQuantize d{};
  c.seq = to_c(d.seq);
  c.rule = int32_t(d.rule);
}

// Of the three calls that attend.
template <class C, class Args>
void set_attention_defaults(C& c, const Args& d) {
  c.seq_q = to_c(d.seq_q);
  c.seq_k = to_c(d.seq_k);
  c.mask = to_c(d.mask);
  c.softmax_scale = d.softmax_scale;
  c.shared_q = d.shared_q;
  c.cpu_math = int32_t(d.cpu_math);
}
void set_defaults(mxflash_attention_fwd_args& c) { set_attention_defaults(c, AttentionFwd{}); }
void set_defaults(mxflash_attention_bwd_args& c) {
  const AttentionBwd d{};
  set_attention_defaults(c, d);
  c.ds_dtype = int32_t(d.ds_dtype);
  c.dq_accum = int32_t(d.dq_accum);
  c.deterministic = d.deterministic;
  c.rotate_qk = d.rotate_qk;
  c.rotate_seed = d.rotate_seed;
}
void set_defaults(mxflash_operator_fwd_args& c) {
  const OperatorFwd d{};
  set_attention_defaults(c, d);
  c.recipe = to_c(d.recipe);
}
void set_defaults(mxflash_operator_bwd_args& c) {
  const OperatorBwd d{};
  c.dq_accum = int32_t(d.dq_accum);
  c.deterministic = d.deterministic;
}

template <class C>
void init(C* args, size_t struct_size) {
  if (!args) return;
  C c{};
  set_defaults(c);
  c.struct_size = struct_size;
  std::memcpy(args, &c, std::min(struct_size, sizeof c));
}

// ---- C to C++ -----------------------------------------------------------------------------------------------------

Tensor from_c(const mxflash_tensor& c) {
  return {.data = c.data,
          .dtype = Dtype(c.dtype),
          .device = {DeviceType(c.device_type), c.device_index},
          .rank = c.rank,
          .shape = std::to_array(c.shape),
          .stride = std::to_array(c.stride)};
}

MxTensor from_c(const mxflash_mx_tensor& c) {
  return {.data = from_c(c.data), .scale = from_c(c.scale), .block = MxBlock(c.block), .layout = ScaleLayout(c.layout)};
}

Jagged from_c(const mxflash_jagged& c) {
  return {.cu_seqlens = c.cu_seqlens, .batch = c.batch, .max_seqlen = c.max_seqlen};
}
Jagged from_c(const mxflash_jagged* c) { return c ? from_c(*c) : Jagged{}; }

Mask from_c(const mxflash_mask& c) {
  return {.causal = c.causal != 0, .window_left = c.window_left, .window_right = c.window_right};
}

Recipe from_c(const mxflash_recipe& c) {
  return {.element = Dtype(c.element),
          .grad_element = Dtype(c.grad_element),
          .rule = MxRule(c.rule),
          .block = MxBlock(c.block),
          .block_col = MxBlock(c.block_col),
          .rotate_qk = c.rotate_qk != 0,
          .smooth_k = c.smooth_k != 0,
          .smooth_v = c.smooth_v != 0,
          .rotate_seed = c.rotate_seed};
}

Quantize from_c(const mxflash_quantize_args& c) {
  return {.in = from_c(c.in),
          .out = from_c(c.out),
          .out_col = from_c(c.out_col),
          .seq = from_c(c.seq),
          .rule = MxRule(c.rule),
          .smooth = c.smooth != 0,
          .mean = from_c(c.mean),
          .rotate = c.rotate != 0,
          .rotate_seed = c.rotate_seed,
          .image = from_c(c.image),
          .image_role = ImageRole(c.image_role),
          .stats = reinterpret_cast<QuantizeStats*>(c.stats),
          .backend = c.backend};
}

Dequantize from_c(const mxflash_dequantize_args& c) {
  return {.in = from_c(c.in), .out = from_c(c.out), .seq = from_c(c.seq), .backend = c.backend};
}

ConvertScales from_c(const mxflash_convert_scales_args& c) {
  return {.in = from_c(c.in), .out = from_c(c.out), .seq = from_c(c.seq), .backend = c.backend};
}

WriteImage from_c(const mxflash_write_image_args& c) {
  return {.in = from_c(c.in),
          .image = from_c(c.image),
          .role = ImageRole(c.role),
          .seq = from_c(c.seq),
          .stats = reinterpret_cast<ImageStats*>(c.stats),
          .backend = c.backend};
}

AttentionFwd from_c(const mxflash_attention_fwd_args& c) {
  return {.q = from_c(c.q),
          .k = from_c(c.k),
          .v = from_c(c.v),
          .out = from_c(c.out),
          .out_mx = from_c(c.out_mx),
          .lse = from_c(c.lse),
          .row_exponent = from_c(c.row_exponent),
          .v_mean = from_c(c.v_mean),
          .q_image = from_c(c.q_image),
          .k_image = from_c(c.k_image),
          .v_image = from_c(c.v_image),
          .seq_q = from_c(c.seq_q),
          .seq_k = from_c(c.seq_k),
          .mask = from_c(c.mask),
          .softmax_scale = c.softmax_scale,
          .shared_q = c.shared_q != 0,
          .cpu_math = CpuMath(c.cpu_math),
          .backend = c.backend,
          .workspace = c.workspace,
          .workspace_size = c.workspace_size};
}

AttentionBwd from_c(const mxflash_attention_bwd_args& c) {
  return {.q = from_c(c.q),
          .k = from_c(c.k),
          .v = from_c(c.v),
          .dout = from_c(c.dout),
          .q_col = from_c(c.q_col),
          .k_col = from_c(c.k_col),
          .dout_col = from_c(c.dout_col),
          .out = from_c(c.out),
          .lse = from_c(c.lse),
          .row_exponent = from_c(c.row_exponent),
          .v_mean = from_c(c.v_mean),
          .k_mean = from_c(c.k_mean),
          .dlse = from_c(c.dlse),
          .dq = from_c(c.dq),
          .dk = from_c(c.dk),
          .dv = from_c(c.dv),
          .dk_mx = from_c(c.dk_mx),
          .dv_mx = from_c(c.dv_mx),
          .ds_dtype = Dtype(c.ds_dtype),
          .dq_accum = Dtype(c.dq_accum),
          .deterministic = c.deterministic != 0,
          .rotate_qk = c.rotate_qk != 0,
          .rotate_seed = c.rotate_seed,
          .seq_q = from_c(c.seq_q),
          .seq_k = from_c(c.seq_k),
          .mask = from_c(c.mask),
          .softmax_scale = c.softmax_scale,
          .shared_q = c.shared_q != 0,
          .cpu_math = CpuMath(c.cpu_math),
          .backend = c.backend,
          .workspace = c.workspace,
          .workspace_size = c.workspace_size};
}

RmsnormQuantize from_c(const mxflash_rmsnorm_quantize_args& c) {
  return {.in = from_c(c.in),
          .weight = from_c(c.weight),
          .residual = from_c(c.residual),
          .eps = c.eps,
          .out = from_c(c.out),
          .y = from_c(c.y),
          .rstd = from_c(c.rstd),
          .seq = from_c(c.seq),
          .rule = MxRule(c.rule),
          .backend = c.backend};
}

RmsnormBwd from_c(const mxflash_rmsnorm_bwd_args& c) {
  return {.h = from_c(c.h),
          .weight = from_c(c.weight),
          .rstd = from_c(c.rstd),
          .dy = from_c(c.dy),
          .dy_mx = from_c(c.dy_mx),
          .dh = from_c(c.dh),
          .dx = from_c(c.dx),
          .dw = from_c(c.dw),
          .seq = from_c(c.seq),
          .backend = c.backend,
          .workspace = c.workspace,
          .workspace_size = c.workspace_size};
}

GemmQuantize from_c(const mxflash_gemm_quantize_args& c) {
  return {.a = from_c(c.a),
          .b = from_c(c.b),
          .out = from_c(c.out),
          .c = from_c(c.c),
          .seq = from_c(c.seq),
          .rule = MxRule(c.rule),
          .backend = c.backend};
}

OperatorFwd from_c(const mxflash_operator_fwd_args& c) {
  return {.q = from_c(c.q),
          .k = from_c(c.k),
          .v = from_c(c.v),
          .out = from_c(c.out),
          .lse = from_c(c.lse),
          .recipe = from_c(c.recipe),
          .seq_q = from_c(c.seq_q),
          .seq_k = from_c(c.seq_k),
          .mask = from_c(c.mask),
          .softmax_scale = c.softmax_scale,
          .shared_q = c.shared_q != 0,
          .stats = reinterpret_cast<OperatorStats*>(c.stats),
          .cpu_math = CpuMath(c.cpu_math),
          .backend = c.backend,
          .saved = c.saved,
          .saved_size = c.saved_size,
          .workspace = c.workspace,
          .workspace_size = c.workspace_size};
}

OperatorBwd from_c(const mxflash_operator_bwd_args& c) {
  return {.fwd = from_c(*c.fwd),
          .dout = from_c(c.dout),
          .dlse = from_c(c.dlse),
          .dq = from_c(c.dq),
          .dk = from_c(c.dk),
          .dv = from_c(c.dv),
          .dk_mx = from_c(c.dk_mx),
          .dv_mx = from_c(c.dv_mx),
          .dq_accum = Dtype(c.dq_accum),
          .deterministic = c.deterministic != 0,
          .workspace = c.workspace,
          .workspace_size = c.workspace_size};
}

// ---- calls --------------------------------------------------------------------------------------------------------

template <class C>
Status check_struct(const char* op, const C* args) {
  if (!args) return invalid("%s: args must not be null, got null", op);
  if (args->struct_size == sizeof(C)) return {};
  return invalid("%s: struct_size must be %zu (mxflash_%s_args_init sets it), got %zu", op, sizeof(C), op,
                 args->struct_size);
}

Status check_args(const mxflash_quantize_args* c) { return check_struct("quantize", c); }
Status check_args(const mxflash_dequantize_args* c) { return check_struct("dequantize", c); }
Status check_args(const mxflash_convert_scales_args* c) { return check_struct("convert_scales", c); }
Status check_args(const mxflash_write_image_args* c) { return check_struct("write_image", c); }
Status check_args(const mxflash_attention_fwd_args* c) { return check_struct("attention_fwd", c); }
Status check_args(const mxflash_attention_bwd_args* c) { return check_struct("attention_bwd", c); }
Status check_args(const mxflash_rmsnorm_quantize_args* c) { return check_struct("rmsnorm_quantize", c); }
Status check_args(const mxflash_rmsnorm_bwd_args* c) { return check_struct("rmsnorm_bwd", c); }
Status check_args(const mxflash_gemm_quantize_args* c) { return check_struct("gemm_quantize", c); }
Status check_args(const mxflash_operator_fwd_args* c) { return check_struct("operator_fwd", c); }
Status check_args(const mxflash_operator_bwd_args* c) {
  MXFLASH_TRY(check_struct("operator_bwd", c));
  if (!c->fwd) return invalid("%s: fwd must not be null, got null", "operator_bwd");
  return check_args(c->fwd);
}

template <class C>
using Cpp = decltype(from_c(std::declval<const C&>()));

template <class C>
mxflash_status call(Status (*run)(const Cpp<C>&, Stream), const C* args, mxflash_stream stream) {
  if (const Status s = check_args(args); !s.ok()) return to_c(s);
  return to_c(run(from_c(*args), stream));
}

template <class C>
size_t size(size_t (*query)(const Cpp<C>&), const C* args) {
  return check_args(args).ok() ? query(from_c(*args)) : 0;
}

}  // namespace
}  // namespace mxflash

namespace m = mxflash;

extern "C" {

const char* mxflash_status_code_name(int32_t code) { return m::status_code_name(m::StatusCode(code)); }
const char* mxflash_dtype_name(int32_t dtype) { return m::dtype_name(m::Dtype(dtype)); }
int64_t mxflash_dtype_size(int32_t dtype) { return m::dtype_size(m::Dtype(dtype)); }

mxflash_tensor mxflash_make_tensor(void* data, int32_t dtype, int32_t rank, const int64_t* shape) {
  mxflash_tensor t{};
  if (rank < 1 || rank > 4 || !shape) return t;
  t.data = data;
  t.dtype = dtype;
  t.rank = rank;
  uint64_t step = 1;  // unsigned: a shape that overflows is the checks' business, not undefined behaviour
  for (int32_t i = rank - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = int64_t(step);
    step *= uint64_t(shape[i]);
  }
  return t;
}

void mxflash_scale_shape(int32_t block, int32_t layout, int64_t tokens, int64_t heads, int64_t dim,
                         const mxflash_jagged* seq, int64_t shape[4]) {
  const auto s = m::scale_shape(m::MxBlock(block), m::ScaleLayout(layout), tokens, heads, dim, m::from_c(seq));
  std::copy_n(s.data(), 4, shape);
}
int64_t mxflash_scale_size(int32_t block, int32_t layout, int64_t tokens, int64_t heads, int64_t dim,
                           const mxflash_jagged* seq) {
  return m::scale_size(m::MxBlock(block), m::ScaleLayout(layout), tokens, heads, dim, m::from_c(seq));
}
int64_t mxflash_image_size(int32_t role, int64_t tokens, int64_t heads, int64_t dim, const mxflash_jagged* seq) {
  return m::image_size(m::ImageRole(role), tokens, heads, dim, m::from_c(seq));
}
int64_t mxflash_padded_tokens(int64_t tokens, const mxflash_jagged* seq) {
  return m::padded_tokens(tokens, m::from_c(seq));
}
mxflash_mx_tensor mxflash_make_mx_tensor(void* data, void* scale, int32_t dtype, int32_t block, int32_t layout,
                                         int64_t tokens, int64_t heads, int64_t dim, const mxflash_jagged* seq) {
  return m::to_c(m::make_mx_tensor(data, scale, m::Dtype(dtype), m::MxBlock(block), m::ScaleLayout(layout), tokens,
                                   heads, dim, m::from_c(seq)));
}

const char* mxflash_operation_name(int32_t op) { return m::operation_name(m::Operation(op)); }
int32_t mxflash_num_backends(int32_t op) { return m::num_backends(m::Operation(op)); }
mxflash_backend mxflash_backend_info(int32_t op, int32_t index) {
  const m::BackendInfo info = m::backend_info(m::Operation(op), index);
  return {.name = info.name, .target = info.target, .available = m::to_c(info.available)};
}
const char* mxflash_cpu_isa(void) { return m::cpu_isa(); }
const char* mxflash_available_cpu_isa(int32_t index) { return m::available_cpu_isa(index); }
void mxflash_set_num_threads(int32_t n) { m::set_num_threads(n); }
int32_t mxflash_num_threads(void) { return m::num_threads(); }
void mxflash_set_parallel_for(mxflash_parallel_for run, void* executor) { m::set_parallel_for(run, executor); }
int32_t mxflash_has_parallel_for(void) { return m::has_parallel_for(); }
const char* mxflash_cpu_math_name(int32_t cpu_math) { return m::cpu_math_name(m::CpuMath(cpu_math)); }
int32_t mxflash_default_cpu_math(void) { return int32_t(m::default_cpu_math()); }
const char* mxflash_version(void) { return m::version(); }

#define MXFLASH_DEFINE(op)                                                                                           \
  void mxflash_##op##_args_init_sized(mxflash_##op##_args* args, size_t struct_size) { m::init(args, struct_size); } \
  mxflash_status mxflash_##op(const mxflash_##op##_args* args, mxflash_stream stream) {                              \
    return m::call(m::op, args, stream);                                                                             \
  }
MXFLASH_DEFINE(quantize)
MXFLASH_DEFINE(dequantize)
MXFLASH_DEFINE(convert_scales)
MXFLASH_DEFINE(write_image)
MXFLASH_DEFINE(attention_fwd)
MXFLASH_DEFINE(attention_bwd)
MXFLASH_DEFINE(rmsnorm_quantize)
MXFLASH_DEFINE(rmsnorm_bwd)
MXFLASH_DEFINE(gemm_quantize)
MXFLASH_DEFINE(operator_fwd)
MXFLASH_DEFINE(operator_bwd)
#undef MXFLASH_DEFINE

size_t mxflash_attention_fwd_workspace(const mxflash_attention_fwd_args* args) {
  return m::size(m::attention_fwd_workspace, args);
}
size_t mxflash_attention_bwd_workspace(const mxflash_attention_bwd_args* args) {
  return m::size(m::attention_bwd_workspace, args);
}
size_t mxflash_rmsnorm_bwd_workspace(const mxflash_rmsnorm_bwd_args* args) {
  return m::size(m::rmsnorm_bwd_workspace, args);
}
size_t mxflash_operator_saved(const mxflash_operator_fwd_args* args) { return m::size(m::operator_saved, args); }
size_t mxflash_operator_fwd_workspace(const mxflash_operator_fwd_args* args) {
  return m::size(m::operator_fwd_workspace, args);
}
size_t mxflash_operator_bwd_workspace(const mxflash_operator_bwd_args* args) {
  return m::size(m::operator_bwd_workspace, args);
}

}  // extern "C"
