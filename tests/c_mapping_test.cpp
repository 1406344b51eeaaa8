// The C ABI maps every member of every struct. src/api/c_api.cpp is compiled into this program, on top of C++ functions
// that only remember what they were given: each leaf of a C struct gets a value of its own, and the C++ struct must
// show the same values under the same names. Structs are taken apart by structured bindings, so a new member does not
// compile until it is listed here.
#include <gtest/gtest.h>
#include <mxflash/mxflash_c.h>

#include <array>
#include <bit>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "mxflash/backend.h"
#include "mxflash/gemm.h"
#include "mxflash/operator.h"
#include "mxflash/rmsnorm.h"

namespace mxflash {
namespace {

// ---- the C++ functions ----------------------------------------------------------------------------------------------

template <class Args>
struct Captured {
  Args args{};
  Stream stream = nullptr;
  int calls = 0;
};
template <class Args>
Captured<Args>& captured() {
  static Captured<Args> instance;
  return instance;
}

template <class Args>
Status capture(const Args& args, Stream stream) {
  Captured<Args>& c = captured<Args>();
  c = {args, stream, c.calls + 1};
  return {StatusCode::device_error, "said by C++"};
}
template <class Args>
size_t capture_size(const Args& args, size_t size) {
  (void)capture(args, nullptr);
  return size;
}

int32_t g_threads = 0;
ParallelFor g_parallel_for = nullptr;
void* g_executor = nullptr;

}  // namespace

Status quantize(const Quantize& a, Stream s) { return capture(a, s); }
Status dequantize(const Dequantize& a, Stream s) { return capture(a, s); }
Status convert_scales(const ConvertScales& a, Stream s) { return capture(a, s); }
Status write_image(const WriteImage& a, Stream s) { return capture(a, s); }
Status attention_fwd(const AttentionFwd& a, Stream s) { return capture(a, s); }
Status attention_bwd(const AttentionBwd& a, Stream s) { return capture(a, s); }
Status rmsnorm_quantize(const RmsnormQuantize& a, Stream s) { return capture(a, s); }
Status rmsnorm_bwd(const RmsnormBwd& a, Stream s) { return capture(a, s); }
Status gemm_quantize(const GemmQuantize& a, Stream s) { return capture(a, s); }
Status operator_fwd(const OperatorFwd& a, Stream s) { return capture(a, s); }
Status operator_bwd(const OperatorBwd& a, Stream s) { return capture(a, s); }
size_t attention_fwd_workspace(const AttentionFwd& a) { return capture_size(a, 1001); }
size_t attention_bwd_workspace(const AttentionBwd& a) { return capture_size(a, 1002); }
size_t operator_saved(const OperatorFwd& a) { return capture_size(a, 1003); }
size_t operator_fwd_workspace(const OperatorFwd& a) { return capture_size(a, 1004); }
size_t operator_bwd_workspace(const OperatorBwd& a) { return capture_size(a, 1005); }
size_t rmsnorm_bwd_workspace(const RmsnormBwd& a) { return capture_size(a, 1006); }
CpuMath default_cpu_math() { return CpuMath(12); }
int32_t num_backends(Operation op) { return 100 + int32_t(op); }
BackendInfo backend_info(Operation op, int32_t index) {
  return {operation_name(op), index == 7 ? "seven" : "other", {StatusCode::unavailable, "not here"}};
}
const char* operation_name(Operation op) { return op == Operation::gemm_quantize ? "six" : "not six"; }
const char* cpu_isa() { return "the isa"; }
const char* available_cpu_isa(int32_t index) { return index == 5 ? "five" : "not five"; }
void set_num_threads(int32_t n) { g_threads = n; }
int32_t num_threads() { return g_threads + 1; }
void set_parallel_for(ParallelFor run, void* executor) {
  g_parallel_for = run;
  g_executor = executor;
}
bool has_parallel_for() { return g_parallel_for != nullptr; }
const char* version() { return "the version"; }

namespace {

// ---- taking structs apart -------------------------------------------------------------------------------------------

// Calls f(name, leaf) for every leaf of a struct. C and C++ structs have the same names.
template <class F>
struct Visitor {
  F f;

  // clang-format off
#define MEMBERS(...) auto& [__VA_ARGS__] = x; members(at, #__VA_ARGS__, __VA_ARGS__)
  template <class T> requires std::is_scalar_v<T>
  void each(const std::string& at, T& x) { f(at, x); }
  void each(const std::string& at, int64_t (&x)[4]) { for (int i = 0; i < 4; ++i) f(at + std::to_string(i), x[i]); }
  void each(const std::string& at, std::array<int64_t, 4>& x) {
    for (size_t i = 0; i < 4; ++i) f(at + std::to_string(i), x[i]);
  }
  void each(const std::string& at, Tensor& x) {
    auto& [data, dtype, device, rank, shape, stride] = x;
    auto& [type, index] = device;
    members(at, "data, dtype, device_type, device_index, rank, shape, stride", data, dtype, type, index, rank, shape,
            stride);
  }
  void each(const std::string& at, mxflash_tensor& x) {
    MEMBERS(data, dtype, device_type, device_index, rank, shape, stride);
  }
  void each(const std::string& at, MxTensor& x) { MEMBERS(data, scale, block, layout); }
  void each(const std::string& at, mxflash_mx_tensor& x) { MEMBERS(data, scale, block, layout); }
  void each(const std::string& at, Jagged& x) { MEMBERS(cu_seqlens, batch, max_seqlen); }
  void each(const std::string& at, mxflash_jagged& x) { MEMBERS(cu_seqlens, batch, max_seqlen); }
  void each(const std::string& at, Mask& x) { MEMBERS(causal, window_left, window_right); }
  void each(const std::string& at, mxflash_mask& x) { MEMBERS(causal, window_left, window_right); }
  void each(const std::string& at, Recipe& x) {
    MEMBERS(element, grad_element, rule, block, block_col, rotate_qk, smooth_k, smooth_v, rotate_seed);
  }
  void each(const std::string& at, mxflash_recipe& x) {
    MEMBERS(element, grad_element, rule, block, block_col, rotate_qk, smooth_k, smooth_v, rotate_seed);
  }

  void each(const std::string& at, Quantize& x) {
    MEMBERS(in, out, out_col, seq, rule, smooth, mean, rotate, rotate_seed, image, image_role, stats, backend);
  }
  void each(const std::string& at, mxflash_quantize_args& x) {
    MEMBERS(struct_size, in, out, out_col, seq, rule, smooth, mean, rotate, rotate_seed, image, image_role, stats, backend);
  }
  void each(const std::string& at, Dequantize& x) { MEMBERS(in, out, seq, backend); }
  void each(const std::string& at, mxflash_dequantize_args& x) { MEMBERS(struct_size, in, out, seq, backend); }
  void each(const std::string& at, ConvertScales& x) { MEMBERS(in, out, seq, backend); }
  void each(const std::string& at, mxflash_convert_scales_args& x) { MEMBERS(struct_size, in, out, seq, backend); }
  void each(const std::string& at, WriteImage& x) { MEMBERS(in, image, role, seq, stats, backend); }
  void each(const std::string& at, mxflash_write_image_args& x) { MEMBERS(struct_size, in, image, role, seq, stats, backend); }
  void each(const std::string& at, AttentionFwd& x) {
    MEMBERS(q, k, v, out, out_mx, lse, row_exponent, v_mean, q_image, k_image, v_image, seq_q, seq_k, mask, softmax_scale, shared_q, cpu_math, backend,
            workspace, workspace_size);
  }
  void each(const std::string& at, mxflash_attention_fwd_args& x) {
    MEMBERS(struct_size, q, k, v, out, out_mx, lse, row_exponent, v_mean, q_image, k_image, v_image, seq_q, seq_k, mask, softmax_scale, shared_q, cpu_math,
            backend, workspace, workspace_size);
  }
  void each(const std::string& at, AttentionBwd& x) {
    MEMBERS(q, k, v, dout, q_col, k_col, dout_col, out, lse, row_exponent, v_mean, k_mean, dlse, dq, dk, dv, dk_mx,
            dv_mx, ds_dtype, dq_accum, deterministic, rotate_qk, rotate_seed, seq_q, seq_k, mask, softmax_scale, shared_q, cpu_math,
            backend, workspace, workspace_size);
  }
  void each(const std::string& at, mxflash_attention_bwd_args& x) {
    MEMBERS(struct_size, q, k, v, dout, q_col, k_col, dout_col, out, lse, row_exponent, v_mean, k_mean, dlse, dq, dk,
            dv, dk_mx, dv_mx, ds_dtype, dq_accum, rotate_qk, deterministic, rotate_seed, seq_q, seq_k, mask, softmax_scale, shared_q,
            cpu_math, backend, workspace, workspace_size);
  }
  void each(const std::string& at, RmsnormQuantize& x) {
    MEMBERS(in, weight, residual, eps, out, y, rstd, seq, rule, backend);
  }
  void each(const std::string& at, mxflash_rmsnorm_quantize_args& x) {
    MEMBERS(struct_size, in, weight, residual, eps, out, y, rstd, seq, rule, backend);
  }
  void each(const std::string& at, RmsnormBwd& x) {
    MEMBERS(h, weight, rstd, dy, dy_mx, dh, dx, dw, seq, backend, workspace, workspace_size);
  }
  void each(const std::string& at, mxflash_rmsnorm_bwd_args& x) {
    MEMBERS(struct_size, h, weight, rstd, dy, dy_mx, dh, dx, dw, seq, backend, workspace, workspace_size);
  }
  void each(const std::string& at, GemmQuantize& x) { MEMBERS(a, b, out, c, seq, rule, backend); }
  void each(const std::string& at, mxflash_gemm_quantize_args& x) {
    MEMBERS(struct_size, a, b, out, c, seq, rule, backend);
  }
  void each(const std::string& at, OperatorFwd& x) {
    MEMBERS(q, k, v, out, lse, recipe, seq_q, seq_k, mask, softmax_scale, shared_q, stats, cpu_math, backend, saved,
            saved_size, workspace, workspace_size);
  }
  void each(const std::string& at, mxflash_operator_fwd_args& x) {
    MEMBERS(struct_size, q, k, v, out, lse, recipe, seq_q, seq_k, mask, softmax_scale, shared_q, stats, cpu_math,
            backend, saved, saved_size, workspace, workspace_size);
  }
  void each(const std::string& at, OperatorBwd& x) {
    MEMBERS(fwd, dout, dlse, dq, dk, dv, dk_mx, dv_mx, dq_accum, deterministic, workspace, workspace_size);
  }
  void each(const std::string& at, const mxflash_operator_fwd_args*& x) {
    each(at, *const_cast<mxflash_operator_fwd_args*>(x));
  }
  void each(const std::string& at, mxflash_operator_bwd_args& x) {
    MEMBERS(struct_size, fwd, dout, dlse, dq, dk, dv, dk_mx, dv_mx, dq_accum, deterministic, workspace, workspace_size);
  }
#undef MEMBERS
  // clang-format on

 private:
  // `names` is a list like "q, k, v".
  template <class... T>
  void members(const std::string& at, std::string_view names, T&... member) {
    const auto next = [&names] {
      const size_t end = std::min(names.find(','), names.size());
      const std::string name(names.substr(0, end));
      names.remove_prefix(std::min(names.find_first_not_of(", ", end), names.size()));
      return name;
    };
    (each(at + "." + next(), member), ...);
  }
};

template <class Struct, class F>
void visit(Struct& s, F f) {
  Visitor<F>{f}.each("", s);
}

// A pointer, number, enum or flag as 64 bits.
template <class T>
uint64_t bits(T x) {
  if constexpr (std::is_pointer_v<T>) return reinterpret_cast<uintptr_t>(x);
  if constexpr (std::is_same_v<T, float>) return std::bit_cast<uint32_t>(x);
  if constexpr (!std::is_pointer_v<T> && !std::is_same_v<T, float>) return uint64_t(x);
}

using Leaves = std::map<std::string, uint64_t>;

template <class Struct>
Leaves leaves(Struct& s) {
  Leaves all;
  visit(s, [&](const std::string& name, auto& leaf) {
    if (name.find("struct_size") == name.npos) all[name] = bits(leaf);
  });
  return all;
}

template <class Struct>
std::vector<std::string> flags() {
  Struct s{};
  std::vector<std::string> names;
  visit(s, [&]<class T>(const std::string& name, T&) {
    if (std::is_same_v<T, bool>) names.push_back(name);
  });
  return names;
}

// Every leaf but struct_size gets a value of its own, the wide ones beyond 32 bits.
template <class Struct>
void fill(Struct& s) {
  int32_t n = 1000;
  visit(s, [&]<class T>(const std::string& name, T& leaf) {
    if (name.find("struct_size") != name.npos) return;
    ++n;
    if constexpr (std::is_pointer_v<T>) {
      leaf = reinterpret_cast<T>(uintptr_t(n) * 64);
    } else if constexpr (sizeof(T) == 8) {
      leaf = T(n) + (T(1) << 40);
    } else {
      leaf = T(n);
    }
  });
}

// ---- the calls ------------------------------------------------------------------------------------------------------

template <class C, class Cpp>
struct Binding {
  const char* name;
  void (*init)(C*, size_t);
  mxflash_status (*run)(const C*, mxflash_stream);
};

// The struct with whatever it points at.
template <class C>
struct Owned {
  C args;
  mxflash_operator_fwd_args fwd;
  explicit Owned(void (*init)(C*, size_t)) {
    init(&args, sizeof args);
    mxflash_operator_fwd_args_init(&fwd);
    if constexpr (std::is_same_v<C, mxflash_operator_bwd_args>) args.fwd = &fwd;
  }
  Owned(const Owned&) = delete;
};

// `ask` calls C and is done when captured<Cpp>() has what C++ was given.
template <class Cpp, class C, class Ask>
void expect_leaves(C& args, const Ask& ask) {
  const std::vector<std::string> flag_names = flags<Cpp>();
  // One flag at a time, so that none can stand for another; first none.
  for (size_t round = 0; round <= flag_names.size(); ++round) {
    fill(args);
    visit(args, [&]<class T>(const std::string& name, T& leaf) {
      for (size_t i = 0; i < flag_names.size(); ++i) {
        if constexpr (std::is_same_v<T, int32_t>) {
          if (name == flag_names[i]) leaf = i + 1 == round ? 0x100 : 0;  // any value but 0 is true
        }
      }
    });
    Leaves want = leaves(args);
    for (const std::string& name : flag_names) want.at(name) = want.at(name) != 0;
    ask();
    const Leaves got = leaves(captured<Cpp>().args);
    EXPECT_EQ(got.size(), want.size());
    for (const auto& [name, value] : want) {
      ASSERT_TRUE(got.contains(name)) << name;
      EXPECT_EQ(got.at(name), value) << name << (round == 0 ? "" : ", with " + flag_names[round - 1]);
    }
  }
}

template <class Cpp, class C>
void expect_mapped(const Binding<C, Cpp>& b) {
  SCOPED_TRACE(b.name);
  const auto stream = reinterpret_cast<mxflash_stream>(uintptr_t(0x5550));
  Captured<Cpp>& got = captured<Cpp>();
  {
    Owned<C> defaults(b.init);
    EXPECT_EQ(b.run(&defaults.args, stream).code, MXFLASH_STATUS_DEVICE_ERROR);
    Cpp want{};
    EXPECT_EQ(leaves(got.args), leaves(want)) << "defaults";
  }
  Owned<C> owned(b.init);
  expect_leaves<Cpp>(owned.args, [&] {
    got = {};
    const mxflash_status s = b.run(&owned.args, stream);
    EXPECT_EQ(got.calls, 1);
    EXPECT_EQ(got.stream, stream);
    EXPECT_EQ(s.code, MXFLASH_STATUS_DEVICE_ERROR);
    EXPECT_STREQ(s.message, "said by C++");
  });

  got = {};
  const auto expect_refused = [&](const C* args, const std::string& message) {
    const mxflash_status s = b.run(args, stream);
    EXPECT_EQ(s.code, MXFLASH_STATUS_INVALID_ARGUMENT);
    EXPECT_TRUE(std::string_view(s.message).starts_with(b.name + message)) << s.message;
    EXPECT_EQ(got.calls, 0);
  };
  expect_refused(nullptr, ": args must not be null");
  for (const size_t wrong : {size_t(0), sizeof(C) - 8, sizeof(C) + 8}) {
    owned.args.struct_size = wrong;
    expect_refused(&owned.args, ": struct_size must be " + std::to_string(sizeof(C)) + " (mxflash_" + b.name +
                                    "_args_init sets it), got " + std::to_string(wrong));
  }
}

template <class Cpp, class C>
void expect_size_mapped(void (*init)(C*, size_t), size_t (*query)(const C*), size_t size) {
  Owned<C> owned(init);
  expect_leaves<Cpp>(owned.args, [&] {
    captured<Cpp>() = {};
    EXPECT_EQ(query(&owned.args), size);
    EXPECT_EQ(captured<Cpp>().calls, 1);
  });
  captured<Cpp>() = {};
  owned.args.struct_size = 0;
  EXPECT_EQ(query(&owned.args), 0u);
  EXPECT_EQ(query(nullptr), 0u);
  EXPECT_EQ(captured<Cpp>().calls, 0);
}

#define BINDING(Cpp, op) \
  Binding<mxflash_##op##_args, Cpp> { #op, mxflash_##op##_args_init_sized, mxflash_##op }

TEST(CMapping, EveryMemberOfEveryCall) {
  expect_mapped(BINDING(Quantize, quantize));
  expect_mapped(BINDING(Dequantize, dequantize));
  expect_mapped(BINDING(ConvertScales, convert_scales));
  expect_mapped(BINDING(WriteImage, write_image));
  expect_mapped(BINDING(AttentionFwd, attention_fwd));
  expect_mapped(BINDING(AttentionBwd, attention_bwd));
  expect_mapped(BINDING(RmsnormQuantize, rmsnorm_quantize));
  expect_mapped(BINDING(RmsnormBwd, rmsnorm_bwd));
  expect_mapped(BINDING(GemmQuantize, gemm_quantize));
  expect_mapped(BINDING(OperatorFwd, operator_fwd));
  expect_mapped(BINDING(OperatorBwd, operator_bwd));
}

TEST(CMapping, OperatorBwdRefusesAWrongForward) {
  Owned<mxflash_operator_bwd_args> owned(mxflash_operator_bwd_args_init_sized);
  captured<OperatorBwd>() = {};
  owned.fwd.struct_size = 8;
  EXPECT_EQ(mxflash_operator_bwd(&owned.args, nullptr).code, MXFLASH_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(mxflash_operator_bwd_workspace(&owned.args), 0u);
  owned.args.fwd = nullptr;
  EXPECT_EQ(mxflash_operator_bwd(&owned.args, nullptr).code, MXFLASH_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(mxflash_operator_bwd_workspace(&owned.args), 0u);
  EXPECT_EQ(captured<OperatorBwd>().calls, 0);
}

TEST(CMapping, EveryMemberOfEverySizeQuery) {
  expect_size_mapped<AttentionFwd>(mxflash_attention_fwd_args_init_sized, mxflash_attention_fwd_workspace, 1001);
  expect_size_mapped<AttentionBwd>(mxflash_attention_bwd_args_init_sized, mxflash_attention_bwd_workspace, 1002);
  expect_size_mapped<OperatorFwd>(mxflash_operator_fwd_args_init_sized, mxflash_operator_saved, 1003);
  expect_size_mapped<OperatorFwd>(mxflash_operator_fwd_args_init_sized, mxflash_operator_fwd_workspace, 1004);
  expect_size_mapped<OperatorBwd>(mxflash_operator_bwd_args_init_sized, mxflash_operator_bwd_workspace, 1005);
  expect_size_mapped<RmsnormBwd>(mxflash_rmsnorm_bwd_args_init_sized, mxflash_rmsnorm_bwd_workspace, 1006);
}

// ---- everything else ------------------------------------------------------------------------------------------------

TEST(CMapping, Backends) {
  for (int32_t op = 0; op < MXFLASH_NUM_OPERATIONS; ++op) {
    EXPECT_EQ(mxflash_num_backends(op), 100 + op);
    EXPECT_STREQ(mxflash_operation_name(op), op == MXFLASH_OP_GEMM_QUANTIZE ? "six" : "not six");
    const mxflash_backend b = mxflash_backend_info(op, 7);
    EXPECT_STREQ(b.name, mxflash_operation_name(op));
    EXPECT_STREQ(b.target, "seven");
    EXPECT_EQ(b.available.code, MXFLASH_STATUS_UNAVAILABLE);
    EXPECT_STREQ(b.available.message, "not here");
  }
  EXPECT_STREQ(mxflash_cpu_isa(), "the isa");
  EXPECT_STREQ(mxflash_available_cpu_isa(5), "five");
  mxflash_set_num_threads(41);
  EXPECT_EQ(mxflash_num_threads(), 42);
  EXPECT_EQ(mxflash_has_parallel_for(), 0);
  const auto nothing = [](void*, int32_t, mxflash_parallel_task, void*) {};
  mxflash_set_parallel_for(nothing, &g_threads);
  EXPECT_EQ(g_parallel_for, static_cast<mxflash_parallel_for>(nothing));
  EXPECT_EQ(g_executor, &g_threads);
  EXPECT_EQ(mxflash_has_parallel_for(), 1);
  EXPECT_EQ(mxflash_default_cpu_math(), 12);
  EXPECT_STREQ(mxflash_version(), "the version");
}

TEST(CMapping, Names) {
  for (int32_t i = -1; i < 9; ++i) {
    EXPECT_STREQ(mxflash_status_code_name(i), status_code_name(StatusCode(i)));
    EXPECT_STREQ(mxflash_dtype_name(i), dtype_name(Dtype(i)));
    EXPECT_EQ(mxflash_dtype_size(i), dtype_size(Dtype(i)));
    EXPECT_STREQ(mxflash_cpu_math_name(i), cpu_math_name(CpuMath(i)));
  }
}

TEST(CMapping, Layouts) {
  const int32_t cu[] = {0, 30, 40, 40};
  const Jagged seq{cu, 3, 30}, one{};
  const mxflash_jagged c_seq{cu, 3, 30};
  uint8_t data[1], scale[1];
  for (const auto& [c, cpp] : {std::pair(&c_seq, &seq), std::pair((const mxflash_jagged*)nullptr, &one)}) {
    EXPECT_EQ(mxflash_padded_tokens(200, c), padded_tokens(200, *cpp));
    for (const auto& [block, layout] :
         {std::pair(MxBlock::square32, ScaleLayout::linear), std::pair(MxBlock::row32, ScaleLayout::atom128x4),
          std::pair(MxBlock::col32, ScaleLayout::linear)}) {
      const int32_t b = int32_t(block), l = int32_t(layout);
      std::array<int64_t, 4> shape{};
      mxflash_scale_shape(b, l, 200, 3, 160, c, shape.data());
      EXPECT_EQ(shape, scale_shape(block, layout, 200, 3, 160, *cpp));
      EXPECT_EQ(mxflash_image_size(l, 200, 3, 96, c), image_size(ImageRole(layout), 200, 3, 96, *cpp));
      EXPECT_EQ(mxflash_scale_size(b, l, 200, 3, 160, c), scale_size(block, layout, 200, 3, 160, *cpp));
      mxflash_mx_tensor got = mxflash_make_mx_tensor(data, scale, MXFLASH_DTYPE_E5M2, b, l, 200, 3, 160, c);
      MxTensor want = make_mx_tensor(data, scale, Dtype::e5m2, block, layout, 200, 3, 160, *cpp);
      EXPECT_EQ(leaves(got), leaves(want));
    }
  }
  const int64_t shape[] = {2, 3, 5, 7};
  mxflash_tensor got = mxflash_make_tensor(data, MXFLASH_DTYPE_F16, 4, shape);
  Tensor want = make_tensor(data, Dtype::f16, 2, 3, 5, 7);
  EXPECT_EQ(leaves(got), leaves(want));
  for (const int32_t rank : {-1, 0, 5}) EXPECT_EQ(mxflash_make_tensor(data, MXFLASH_DTYPE_F16, rank, shape).rank, 0);
  EXPECT_EQ(mxflash_make_tensor(data, MXFLASH_DTYPE_F16, 2, nullptr).rank, 0);
}

}  // namespace
}  // namespace mxflash
