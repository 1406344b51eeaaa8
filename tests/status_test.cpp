// Every rule of the API, violated once: the code, and the message with the rule and the offending value. And what holds
// for every error: one line of ASCII that begins with the operation, nothing written, a workspace query that gives 0.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <new>
#include <string>
#include <string_view>

#include "mxflash/backend.h"
#include "mxflash/gemm.h"
#include "mxflash/operator.h"
#include "mxflash/rmsnorm.h"
#include "runtime/check.h"
#include "status_check.h"

namespace mxflash {
namespace {

// ---- memory -------------------------------------------------------------------------------------------------------

// Inputs share zeros: valid as floats, payloads and scales.
alignas(64) uint8_t g_input[1 << 16];

// Outputs and workspaces are cut from poison, so that "nothing was written" is one comparison.
constexpr uint8_t kPoison = 0xA5;
alignas(64) uint8_t g_output[1 << 22];
size_t g_output_used = 0;

void reset_output() {
  std::memset(g_output, kPoison, g_output_used);
  g_output_used = 0;
}
void* take(size_t bytes) {
  void* piece = g_output + g_output_used;
  g_output_used += (bytes + 63) / 64 * 64;
  EXPECT_LE(g_output_used, sizeof g_output);
  return piece;
}
bool output_untouched() {
  size_t i = 0;
  while (i < g_output_used && g_output[i] == kPoison) ++i;
  return i == g_output_used;
}

template <class... Extent>
Tensor input(Dtype dtype, Extent... extent) {
  return make_tensor(g_input, dtype, extent...);
}
template <class... Extent>
Tensor output(Dtype dtype, Extent... extent) {
  Tensor t = make_tensor(nullptr, dtype, extent...);
  t.data = take(size_t(t.numel() * dtype_size(dtype)));
  return t;
}
MxTensor mx_input(int64_t tokens, int64_t heads, int64_t dim, MxBlock block = MxBlock::square32,
                  ScaleLayout layout = ScaleLayout::linear, Jagged seq = {}) {
  return make_mx_tensor(g_input, g_input, Dtype::e4m3, block, layout, tokens, heads, dim, seq);
}
MxTensor mx_output(int64_t tokens, int64_t heads, int64_t dim, MxBlock block = MxBlock::square32,
                   ScaleLayout layout = ScaleLayout::linear) {
  void* data = take(size_t(tokens * heads * dim));
  void* scale = take(size_t(scale_size(block, layout, tokens, heads, dim, {})));
  return make_mx_tensor(data, scale, Dtype::e4m3, block, layout, tokens, heads, dim, {});
}

// ---- the table's machinery ----------------------------------------------------------------------------------------

template <class Args>
struct Row {
  const char* message;  // what follows "<op>: ", as a pattern
  void (*spoil)(Args&);
  StatusCode code = StatusCode::invalid_argument;
};

template <class Args>
struct Call {
  const char* op;
  Args (*valid)();
  Status (*run)(const Args&, Stream);
  size_t (*workspace)(const Args&) = nullptr;
};

bool has_card() {
  for (int32_t i = 0; i < num_backends(Operation::quantize); ++i) {
    const BackendInfo info = backend_info(Operation::quantize, i);
    if (std::string_view(info.name).starts_with("sm") && info.available.ok()) return true;
  }
  return false;
}

template <class Args>
void expect_errors(const Call<Args>& call, std::initializer_list<Row<Args>> rows) {
  reset_output();
  const Args good = call.valid();
  const Status ok = call.run(good, nullptr);
  ASSERT_TRUE(ok.ok()) << ok.message;
  EXPECT_STREQ(ok.message, "");
  EXPECT_FALSE(output_untouched());
  for (const Row<Args>& row : rows) {
    SCOPED_TRACE(row.message);
    if (std::string_view(row.message).starts_with("sm90") && has_card())
      continue;  // it would take host memory for its own
    reset_output();
    Args args = call.valid();
    row.spoil(args);
    expect_status(call.run(args, nullptr), row.code, std::string(call.op) + ": " + row.message);
    EXPECT_TRUE(output_untouched());
    // Sizes follow from shapes alone, so that memory that is not there yet is no error there.
    bool about_memory = false;
    for (const char* part : {"workspace must", "saved must", "data must not be null"}) {
      about_memory |= std::string_view(row.message).find(part) != std::string_view::npos;
    }
    if (call.workspace && !about_memory) {
      EXPECT_EQ(call.workspace(args), 0u);
    }
  }
}

void move_to_cuda(Tensor& t) { t.device = {DeviceType::cuda, 0}; }
void move_to_cuda(MxTensor& t) { t.data.device = t.scale.device = {DeviceType::cuda, 0}; }
void to_cuda(auto&... tensors) { (move_to_cuda(tensors), ...); }
void misalign(Tensor& t) { t.data = static_cast<uint8_t*>(t.data) + 1; }

constexpr int64_t kHuge = int64_t(1) << 60;
constexpr int32_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr auto kUnavailable = StatusCode::unavailable;
constexpr auto kUnsupported = StatusCode::unsupported;
constexpr auto kTooSmall = StatusCode::workspace_too_small;

// Sequences that break a rule over 40 tokens (docs/reports.md, A43).
constexpr int32_t kCuFromOne[] = {1, 40}, kCuDecreasing[] = {0, 20, 10, 40}, kCuLong[] = {0, 20, 40};
constexpr int32_t kCuBeyond[] = {0, 20, 41}, kCuNegative[] = {0, -5, 40};
constexpr int32_t kCuShort[] = {0, 20, 30};
const int32_t* const kCuMisaligned = reinterpret_cast<const int32_t*>(g_input + 2);

// Tables: one line a row.
// clang-format off
#define SET(...) [](auto& a) { __VA_ARGS__; }

// ---- quantize: the rules of every tensor, MX tensor and sequence ---------------------------------------------------

Quantize valid_quantize() {
  return {.in = input(Dtype::f32, 40, 2, 64), .out = mx_output(40, 2, 64),
          .out_col = mx_output(40, 2, 64, MxBlock::col32), .smooth = true, .mean = output(Dtype::f32, 1, 2, 64)};
}
const Call<Quantize> kQuantize{"quantize", valid_quantize, quantize};

TEST(Status, TensorRules) {
  expect_errors<Quantize>(kQuantize, {
      {"in.rank must be 2 or 3, got 0", SET(a.in = {})},
      {"in.rank must be 2 or 3, got 4", SET(a.in.rank = 4)},
      {"in.rank must be 2 or 3, got -1", SET(a.in.rank = -1)},
      {"in.dtype must be f32, f16 or bf16, got e4m3", SET(a.in.dtype = Dtype::e4m3)},
      {"in.dtype must be f32, f16 or bf16, got none", SET(a.in.dtype = Dtype::none)},
      {"in.dtype must be f32, f16 or bf16, got the value 99", SET(a.in.dtype = Dtype(99))},
      {"in.device.type must be cpu or cuda, got the value 7", SET(a.in.device.type = DeviceType(7))},
      {"in.shape[0] must be >= 0, got -40", SET(a.in.shape[0] = -40)},
      {"in.shape[2] must be >= 0, got -9223372036854775808", SET(a.in.shape[2] = INT64_MIN)},
      {"in must have fewer than 2^56 elements, got shape [1152921504606846976, 2, 64]", SET(a.in.shape[0] = kHuge)},
      {"in must have fewer than 2^56 elements, got shape [1073741824, 1073741824, 64]",
       SET(a.in.shape[0] = a.in.shape[1] = 1 << 30)},
      {"in must have fewer than 2^56 elements, got shape [9223372036854775807, 9223372036854775807, 64]",
       SET(a.in.shape = {INT64_MAX, INT64_MAX, 64})},
      {"in must have fewer than 2^56 elements, got shape [0, 1099511627776, 1099511627776]",
       SET(a.in.shape = {0, int64_t(1) << 40, int64_t(1) << 40})},
      {"in.data must not be null for 5120 elements, got null", SET(a.in.data = nullptr)},
      {"in.stride[2] must be 1 (contiguous last dimension), got 2", SET(a.in.stride[2] = 2)},
      {"in.stride[2] must be 1 (contiguous last dimension), got -1", SET(a.in.stride[2] = -1)},
      {"mean.stride[2] must be 1 (contiguous last dimension), got 0", SET(a.mean.stride[2] = 0)},
      {"in.data must be aligned to 4 bytes (f32), got address 0x*", SET(misalign(a.in))},
      {"in.data must be aligned to 2 bytes (bf16), got address 0x*", SET(a.in.dtype = Dtype::bf16, misalign(a.in))},
      {"in must span fewer than 2^56 elements, got shape[0] 40, stride[0] 1152921504606846976",
       SET(a.in.stride[0] = kHuge)},
      {"in must span fewer than 2^56 elements, got shape[0] 40, stride[0] -9223372036854775808",
       SET(a.in.stride[0] = INT64_MIN)},
      {"out.rank must be that of in = 3, got 2", SET(a.out.data.rank = 2)},
      {"out.shape[0] must be that of in = 40, got 41", SET(a.out = mx_input(41, 2, 64))},
      {"out.shape[1] must be that of in = 2, got 3", SET(a.out = mx_input(40, 3, 64))},
      {"out.dtype must be e4m3 or e5m2, got bf16", SET(a.out.data.dtype = Dtype::bf16)},
      {"out must not overlap itself (shape[0] 40, stride[0] 0)", SET(a.out.data.stride[0] = 0)},
      {"out must not overlap itself (shape[0] 40, stride[0] 64)", SET(a.out.data.stride[0] = 64)},
      {"out must not overlap itself (shape[0] 40, stride[0] -64)", SET(a.out.data.stride[0] = -64)},
      {"out must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.out))},
      {"out_col.shape[2] must be that of in = 64, got 32", SET(a.out_col = mx_input(40, 2, 32))},
      {"out_col.dtype must be e4m3 or e5m2, got f32", SET(a.out_col.data.dtype = Dtype::f32)},
      {"rule must be rceil or floor, got 2", SET(a.rule = MxRule(2))},
      {"mean must be given, got a tensor without data", SET(a.mean = {})},
      {"mean.rank must be 3, got 2", SET(a.mean.rank = 2)},
      {"mean.dtype must be f32, got bf16", SET(a.mean.dtype = Dtype::bf16)},
      {"mean.shape[0] must be 1 (seq.batch), got 2", SET(a.mean = input(Dtype::f32, 2, 2, 64))},
      {"mean.heads must be 2 (in.heads), got 1", SET(a.mean = input(Dtype::f32, 1, 1, 64))},
      {"mean.dim must be 64 (in.dim), got 128", SET(a.mean = input(Dtype::f32, 1, 2, 128))},
      {"mean must not overlap itself (shape[0] 1, stride[0] 128)", SET(a.mean.stride[1] = 0)},
      {"mean.data must be aligned to 4 bytes (f32), got address 0x*", SET(misalign(a.mean))},
      {"mean must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.mean))},
      {"backend must be one of *ref, got 'fast'", SET(a.backend = "fast"), kUnavailable},
      {"backend must be one of *ref, got ''", SET(a.backend = ""), kUnavailable},
      {"backend must be one of *ref, got 'a?b\?\?'", SET(a.backend = "a\nb\xC3\xA4"), kUnavailable},
      {"backend must be one of *ref, got '0123456789012345678901234567890123456789'",
       SET(a.backend = "01234567890123456789012345678901234567890123456789"), kUnavailable},
      {"sm90: *CUDA*", SET(to_cuda(a.in, a.out, a.out_col, a.mean)), kUnavailable},
  });
}

TEST(Status, MxTensorRules) {
  expect_errors<Quantize>(kQuantize, {
      {"out.block must be square32, row32 or col32, got 3", SET(a.out.block = MxBlock(3))},
      {"out.block must be square32, row32 or col32, got -1", SET(a.out.block = MxBlock(-1))},
      {"out.layout must be linear or atom128x4, got 2", SET(a.out.layout = ScaleLayout(2))},
      {"out.layout must be linear for block square32, got atom128x4 (convert_scales expands it)",
       SET(a.out.layout = ScaleLayout::atom128x4)},
      {"out.scale.rank must be 3, got 4", SET(a.out.scale.rank = 4)},
      {"out.scale.rank must be 3, got 0", SET(a.out.scale = {})},
      {"out.scale.rank must be 4, got 3", SET(a.out.block = MxBlock::row32, a.out.layout = ScaleLayout::atom128x4)},
      {"out.scale.dtype must be e8m0 or u8, got e4m3", SET(a.out.scale.dtype = Dtype::e4m3)},
      {"out.scale.shape[1] must be 4 (scale_shape), got 2", SET(a.out.scale.shape[1] = 2)},
      {"out.scale.shape[1] must be 128 (scale_shape), got 4", SET(a.out.block = MxBlock::row32)},
      {"out.scale.shape[3] must be 512 (scale_shape), got 256",
       SET(a.out = mx_input(40, 2, 64, MxBlock::row32, ScaleLayout::atom128x4), a.out.scale.shape[3] = 256)},
      {"out.scale.stride[0] must be 8 (contiguous), got 16", SET(a.out.scale.stride[0] = 16)},
      {"out.scale.stride[2] must be 1 (contiguous), got -1", SET(a.out.scale.stride[2] = -1)},
      {"out.scale.data must not be null for 16 bytes, got null", SET(a.out.scale.data = nullptr)},
      {"out.scale must be on cpu:0 like its data, got cuda:0", SET(to_cuda(a.out.scale))},
      {"out must have fewer than 2^56 elements with padding, got 0 tokens, batch 2147483647, max_seqlen 0",
       SET(a.seq.batch = kInt32Max, a.in.shape = a.out.data.shape = {0, 1 << 20, 1 << 10})},
      {"out must have fewer than 2^56 elements with padding, got 40 tokens, batch 2, max_seqlen 2147483647",
       SET(a.seq = {kCuLong, 2, kInt32Max}; a.in.shape = a.out.data.shape = {40, 1 << 24, 1 << 24};
           a.in.stride = a.out.data.stride = {int64_t(1) << 48, 1 << 24, 1})},
  });
}

TEST(Status, SequenceRules) {
  expect_errors<Quantize>(kQuantize, {
      {"seq.batch must be >= 1, got 0", SET(a.seq.batch = 0)},
      {"seq.batch must be >= 1, got -3", SET(a.seq.batch = -3)},
      {"tokens must be a multiple of seq.batch = 3 without cu_seqlens, got 40", SET(a.seq.batch = 3)},
      {"seq.cu_seqlens must be aligned to 4 bytes, got address 0x*", SET(a.seq.cu_seqlens = kCuMisaligned)},
      {"seq.max_seqlen must be >= 0, got -1", SET(a.seq = {kCuLong, 2, -1})},
      {"seq.cu_seqlens[0] must be 0, got 1", SET(a.seq = {kCuFromOne, 1, 40})},
      {"seq.cu_seqlens must not decrease, got 10 after 20 at index 2", SET(a.seq = {kCuDecreasing, 3, 40})},
      {"seq.cu_seqlens must not decrease, got -5 after 0 at index 1", SET(a.seq = {kCuNegative, 2, 40})},
      {"seq.max_seqlen = 19 must bound every length, got 20 for sequence 0", SET(a.seq = {kCuLong, 2, 19})},
      {"seq.cu_seqlens[2] must be at most the tensor's tokens = 40, got 41", SET(a.seq = {kCuBeyond, 2, 40})},
      {"out.scale.shape[1] must be 8 (scale_shape), got 4", SET(a.seq.batch = 2)},
  });
}

// ---- dequantize, convert_scales ------------------------------------------------------------------------------------

Dequantize valid_dequantize() { return {.in = mx_input(40, 2, 64), .out = output(Dtype::f32, 40, 2, 64)}; }

TEST(Status, DequantizeRules) {
  expect_errors<Dequantize>({"dequantize", valid_dequantize, dequantize}, {
      {"in.data.rank must be 2 or 3, got 0", SET(a.in = {})},
      {"in.data.rank must be 2 or 3, got 1", SET(a.in.data.rank = 1)},
      {"in.dtype must be e4m3 or e5m2, got u8", SET(a.in.data.dtype = Dtype::u8)},
      {"in must have fewer than 2^56 elements, got shape [1152921504606846976, 2, 64]",
       SET(a.in.data.shape[0] = kHuge)},
      {"in.scale.shape[0] must be 2 (scale_shape), got 1", SET(a.in.scale.shape[0] = 1)},
      {"seq.batch must be >= 1, got -1", SET(a.seq.batch = -1)},
      {"seq.cu_seqlens[0] must be 0, got 1", SET(a.seq = {kCuFromOne, 1, 40})},
      {"out.rank must be that of in = 3, got 2", SET(a.out.rank = 2)},
      {"out.shape[0] must be that of in = 40, got 20", SET(a.out.shape[0] = 20)},
      {"out.dtype must be f32, f16 or bf16, got e5m2", SET(a.out.dtype = Dtype::e5m2)},
      {"out must not overlap itself (shape[0] 40, stride[0] 0)", SET(a.out.stride[0] = 0)},
      {"out.data must be aligned to 4 bytes (f32), got address 0x*", SET(misalign(a.out))},
      {"out must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.out))},
      {"backend must be one of *ref, got 'fast'", SET(a.backend = "fast"), kUnavailable},
      {"sm90: *CUDA*", SET(to_cuda(a.in, a.out)), kUnavailable},
  });
}

ConvertScales valid_convert_scales() {
  return {.in = mx_input(40, 2, 64), .out = mx_output(40, 2, 64, MxBlock::row32, ScaleLayout::atom128x4)};
}

TEST(Status, ConvertScalesRules) {
  expect_errors<ConvertScales>({"convert_scales", valid_convert_scales, convert_scales}, {
      {"in.data.rank must be 2 or 3, got 4", SET(a.in.data.rank = 4)},
      {"in.data must not be null for 5120 elements, got null", SET(a.in.data.data = nullptr)},
      {"seq.max_seqlen = 19 must bound every length, got 20 for sequence 0", SET(a.seq = {kCuLong, 2, 19})},
      {"out.rank must be that of in = 3, got 2", SET(a.out.data.rank = 2)},
      {"out.shape[2] must be that of in = 64, got 32", SET(a.out = mx_input(40, 2, 32))},
      {"out.layout must be linear for block square32, got atom128x4 (convert_scales expands it)",
       SET(a.out.block = MxBlock::square32)},
      {"out.scale.dtype must be e8m0 or u8, got bf16", SET(a.out.scale.dtype = Dtype::bf16)},
      {"out must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.out))},
      {"out.block must be that of in (1) unless in is square32, got 2",
       SET(a.in = mx_input(40, 2, 64, MxBlock::row32), a.out = mx_input(40, 2, 64, MxBlock::col32))},
      {"out.scale must not overlap in.scale at 0x*", SET(a.out.scale.data = g_input + 15)},
      {"backend must be one of *ref, got 'fast'", SET(a.backend = "fast"), kUnavailable},
      {"sm90: *CUDA*", SET(to_cuda(a.in, a.out)), kUnavailable},
  });
}

WriteImage valid_write_image() {
  return {.in = mx_input(40, 2, 64), .image = output(Dtype::u8, image_size(ImageRole::key, 40, 2, 64, {})),
          .role = ImageRole::key};
}

TEST(Status, WriteImageRules) {
  expect_errors<WriteImage>({"write_image", valid_write_image, write_image}, {
      {"in.data.rank must be 3, got 2", SET(a.in.data.rank = 2)},
      {"in.data must not be null for 5120 elements, got null", SET(a.in.data.data = nullptr)},
      {"in.dtype must be e4m3 or e5m2, got u8", SET(a.in.data.dtype = Dtype::u8)},
      {"seq.max_seqlen = 19 must bound every length, got 20 for sequence 0", SET(a.seq = {kCuLong, 2, 19})},
      {"image.data must not be null for 16386 elements, got null", SET(a.image.data = nullptr)},
      {"image.dtype must be u8, got f32", SET(a.image.dtype = Dtype::f32)},
      {"image.shape[0] must be 16386 (image_size), got 16387", SET(a.image.shape[0] = 16387)},
      {"image.data must be aligned to 16 bytes*", SET(misalign(a.image))},
      {"*role must be query, key or value, got 3", SET(a.role = ImageRole(3))},
      {"image must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.image))},
      {"backend must be one of *ref, got 'fast'", SET(a.backend = "fast"), kUnavailable},
      {"sm90: *CUDA*", SET(to_cuda(a.in, a.image)), kUnavailable},
  });
}

// ---- attention -----------------------------------------------------------------------------------------------------

AttentionFwd valid_fwd() {
  AttentionFwd a{.q = mx_input(40, 4, 64), .k = mx_input(40, 2, 64), .v = mx_input(40, 2, 32),
                 .out = output(Dtype::f32, 40, 4, 32), .lse = output(Dtype::f32, 4, 40),
                 .row_exponent = output(Dtype::u8, 4, 40), .v_mean = input(Dtype::f32, 1, 2, 32)};
  a.workspace_size = attention_fwd_workspace(a);
  a.workspace = take(a.workspace_size);
  return a;
}
const Call<AttentionFwd> kFwd{"attention_fwd", valid_fwd, attention_fwd, attention_fwd_workspace};

TEST(Status, AttentionOperandRules) {
  expect_errors<AttentionFwd>(kFwd, {
      {"q.data.rank must be 3 [tokens, heads, dim], got 0", SET(a.q = {})},
      {"k.data.rank must be 3 [tokens, heads, dim], got 2", SET(a.k.data.rank = 2)},
      {"v.data.rank must be 3 [tokens, heads, dim], got 4", SET(a.v.data.rank = 4)},
      {"seq_q.batch must be >= 1, got 0", SET(a.seq_q.batch = 0)},
      {"seq_k.batch must be >= 1, got -1", SET(a.seq_k.batch = -1)},
      {"seq_q.batch must equal seq_k.batch = 2, got 1", SET(a.seq_k.batch = 2)},
      {"seq_q.cu_seqlens[0] must be 0, got 1", SET(a.seq_q = {kCuFromOne, 1, 40})},
      {"seq_k.cu_seqlens must not decrease, got 10 after 20 at index 2", SET(a.seq_k = {kCuDecreasing, 3, 40})},
      {"seq_q.max_seqlen = 0 must bound every length, got 20 for sequence 0", SET(a.seq_q = {kCuLong, 2, 0})},
      {"seq_k.cu_seqlens[2] must be at most the tensor's tokens = 40, got 41", SET(a.seq_k = {kCuBeyond, 2, 40})},
      {"seq_q.batch must be 1 with shared_q, got 2", SET(a.shared_q = true, a.seq_q.batch = 2)},
      {"seq_q.cu_seqlens must be null with shared_q (one query sequence), got address 0x*",
       SET(a.shared_q = true, a.seq_q = {kCuShort, 1, 40})},
      {"out must have fewer than 2^56 elements with shared_q, got 1073741824 x 1099511627776 rows",
       SET(a.shared_q = true, a.seq_k.batch = 1 << 30, a.q = mx_input(int64_t(1) << 40, 4, 64);
           a.k = mx_input(0, 2, 64), a.v = mx_input(0, 2, 32))},
      {"q.dtype must be e4m3 or e5m2, got e8m0", SET(a.q.data.dtype = Dtype::e8m0)},
      {"q must have fewer than 2^56 elements, got shape [1152921504606846976, 4, 64]", SET(a.q.data.shape[0] = kHuge)},
      {"v.scale.shape[2] must be 1 (scale_shape), got 32", SET(a.v.scale.shape[2] = 32)},
      {"k must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.k))},
      {"head_dim must be a multiple of 8, got 20", SET(a.q = mx_input(40, 4, 20), a.k = mx_input(40, 2, 20))},
      {"head_dim must be between 8 and 256, got 264", SET(a.q = mx_input(40, 4, 264), a.k = mx_input(40, 2, 264))},
      {"head_dim must be between 8 and 256, got 0", SET(a.q = mx_input(40, 4, 0), a.k = mx_input(40, 2, 0))},
      {"head_dim_v must be a multiple of 8, got 33", SET(a.v = mx_input(40, 2, 33))},
      {"head_dim_v must be between 8 and 256, got 512", SET(a.v = mx_input(40, 2, 512))},
      {"k.head_dim must be 64 (that of q), got 32", SET(a.k = mx_input(40, 2, 32))},
      {"v.tokens must be 40 (that of k), got 41", SET(a.v = mx_input(41, 2, 32))},
      {"v.num_heads must be 2 (that of k), got 1", SET(a.v = mx_input(40, 1, 32))},
      {"num_heads_q must be >= 1, got 0", SET(a.q = mx_input(40, 0, 64))},
      {"num_heads_q = 4 must be a multiple of num_heads_kv, got 3",
       SET(a.k = mx_input(40, 3, 64), a.v = mx_input(40, 3, 32))},
      {"num_heads_q = 4 must be a multiple of num_heads_kv, got 0",
       SET(a.k = mx_input(40, 0, 64), a.v = mx_input(40, 0, 32))},
      {"softmax_scale must be finite (0 means 1/sqrt(head_dim)), got nan", SET(a.softmax_scale = kNan)},
      {"softmax_scale must be finite (0 means 1/sqrt(head_dim)), got -inf", SET(a.softmax_scale = -kInf)},
      {"cpu_math must be automatic, exact or fast, got 3", SET(a.cpu_math = CpuMath(3))},
      {"cpu_math must be automatic, exact or fast, got -1", SET(a.cpu_math = CpuMath(-1))},
      {"backend must be one of *ref, got 'fast'", SET(a.backend = "fast"), kUnavailable},
      {"sm90_bf16: *CUDA*", SET(to_cuda(a.q, a.k, a.v, a.out, a.lse, a.row_exponent, a.v_mean)), kUnavailable},
  });
}

TEST(Status, AttentionFwdOutputRules) {
  expect_errors<AttentionFwd>(kFwd, {
      {"out must be given, got a tensor without data", SET(a.out = {})},
      {"out.rank must be 3, got 2", SET(a.out.rank = 2)},
      {"out.dtype must be f32, f16 or bf16, got u8", SET(a.out.dtype = Dtype::u8)},
      {"out_mx.data.rank must be 3, got 2", SET(a.out_mx = mx_input(40, 4, 32), a.out_mx.data.rank = 2)},
      {"out_mx.num_heads must be 4 (from the operands), got 2", SET(a.out_mx = mx_input(40, 2, 32))},
      {"out_mx.dtype must be e4m3 or e5m2, got u8", SET(a.out_mx = mx_input(40, 4, 32), a.out_mx.data.dtype = Dtype::u8)},
      {"out_mx must be on cpu:0 like the other tensors, got cuda:0", SET(a.out_mx = mx_input(40, 4, 32), to_cuda(a.out_mx))},
      {"out.tokens must be 40 (from the operands), got 39", SET(a.out.shape[0] = 39)},
      {"out.tokens must be 80 (from the operands), got 40",
       SET(a.shared_q = true, a.seq_k.batch = 2, a.k = mx_input(40, 2, 64, {}, {}, a.seq_k);
           a.v = mx_input(40, 2, 32, {}, {}, a.seq_k))},
      {"out.num_heads must be 4 (from the operands), got 2", SET(a.out.shape[1] = 2)},
      {"out.dim must be 32 (from the operands), got 16", SET(a.out.shape[2] = 16)},
      {"out must not overlap itself (shape[0] 40, stride[0] 32)", SET(a.out.stride[0] = 32)},
      {"out.data must be aligned to 2 bytes (f16), got address 0x*", SET(a.out.dtype = Dtype::f16, misalign(a.out))},
      {"out must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.out))},
      {"lse.rank must be 2, got 3", SET(a.lse.rank = 3)},
      {"lse.dtype must be f32, got bf16", SET(a.lse.dtype = Dtype::bf16)},
      {"lse.shape[0] must be 4 (num_heads_q), got 40", SET(a.lse = input(Dtype::f32, 40, 4))},
      {"lse.shape[1] must be 40 (total_out), got 30", SET(a.lse.shape[1] = 30)},
      {"lse must not overlap itself (shape[0] 4, stride[0] 0)", SET(a.lse.stride[0] = 0)},
      {"lse must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.lse))},
      {"row_exponent.dtype must be u8, got e8m0", SET(a.row_exponent.dtype = Dtype::e8m0)},
      {"row_exponent.shape[1] must be 40 (total_out), got 39", SET(a.row_exponent.shape[1] = 39)},
      {"v_mean.rank must be 3, got 2", SET(a.v_mean.rank = 2)},
      {"v_mean.dtype must be f32, got f16", SET(a.v_mean.dtype = Dtype::f16)},
      {"v_mean.batch must be 1 (seq_k.batch), got 2", SET(a.v_mean = input(Dtype::f32, 2, 2, 32))},
      {"v_mean.num_heads must be 2 (from the operands), got 4", SET(a.v_mean = input(Dtype::f32, 1, 4, 32))},
      {"v_mean.dim must be 32 (from the operands), got 64", SET(a.v_mean = input(Dtype::f32, 1, 2, 64))},
      {"v_mean must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.v_mean))},
      {"workspace must have * bytes, got *", SET(a.workspace_size -= 1), kTooSmall},
      {"workspace must have * bytes, got 0", SET(a.workspace = nullptr), kTooSmall},
      {"workspace must be aligned to 64 bytes, got address 0x*",
       SET(a.workspace = static_cast<uint8_t*>(a.workspace) + 32)},
  });
}

AttentionBwd valid_bwd() {
  AttentionBwd a{.q = mx_input(40, 4, 64), .k = mx_input(40, 2, 64), .v = mx_input(40, 2, 32),
                 .dout = mx_input(40, 4, 32), .q_col = mx_input(40, 4, 64), .k_col = mx_input(40, 2, 64),
                 .dout_col = mx_input(40, 4, 32), .out = input(Dtype::f32, 40, 4, 32),
                 .lse = input(Dtype::f32, 4, 40), .row_exponent = input(Dtype::u8, 4, 40),
                 .v_mean = input(Dtype::f32, 1, 2, 32), .k_mean = input(Dtype::f32, 1, 2, 64),
                 .dlse = input(Dtype::f32, 4, 40),
                 .dq = output(Dtype::f32, 40, 4, 64), .dk = output(Dtype::bf16, 40, 2, 64),
                 .dv = output(Dtype::f16, 40, 2, 32), .dk_mx = mx_output(40, 2, 64), .dv_mx = mx_output(40, 2, 32)};
  a.workspace_size = attention_bwd_workspace(a);
  a.workspace = take(a.workspace_size);
  return a;
}

TEST(Status, AttentionBwdRules) {
  expect_errors<AttentionBwd>({"attention_bwd", valid_bwd, attention_bwd, attention_bwd_workspace}, {
      {"q.data.rank must be 3 [tokens, heads, dim], got 0", SET(a.q = {})},
      {"seq_k.cu_seqlens[0] must be 0, got 1", SET(a.seq_k = {kCuFromOne, 1, 40})},
      {"head_dim must be a multiple of 8, got 20", SET(a.q = mx_input(40, 4, 20), a.k = mx_input(40, 2, 20))},
      {"softmax_scale must be finite (0 means 1/sqrt(head_dim)), got inf", SET(a.softmax_scale = kInf)},
      {"cpu_math must be automatic, exact or fast, got 9", SET(a.cpu_math = CpuMath(9))},
      {"dout.data.rank must be 3, got 0", SET(a.dout = {})},
      {"dout.dtype must be e4m3 or e5m2, got f32", SET(a.dout.data.dtype = Dtype::f32)},
      {"dout.tokens must be 40 (from the operands), got 41", SET(a.dout = mx_input(41, 4, 32))},
      {"dout.num_heads must be 4 (from the operands), got 2", SET(a.dout = mx_input(40, 2, 32))},
      {"dout.dim must be 32 (from the operands), got 64", SET(a.dout = mx_input(40, 4, 64))},
      {"dout must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.dout))},
      {"q_col.data.rank must be 3, got 2", SET(a.q_col.data.rank = 2)},
      {"q_col.tokens must be 40 (from the operands), got 8", SET(a.q_col = mx_input(8, 4, 64))},
      {"k_col.num_heads must be 2 (from the operands), got 4", SET(a.k_col = mx_input(40, 4, 64))},
      {"dout_col.dim must be 32 (from the operands), got 8", SET(a.dout_col = mx_input(40, 4, 8))},
      {"out must be given, got a tensor without data", SET(a.out = {})},
      {"out.dim must be 32 (from the operands), got 64", SET(a.out = input(Dtype::f32, 40, 4, 64))},
      {"lse must be given, got a tensor without data", SET(a.lse = {})},
      {"lse.dtype must be f32, got f16", SET(a.lse.dtype = Dtype::f16)},
      {"row_exponent.shape[0] must be 4 (num_heads_q), got 2", SET(a.row_exponent.shape[0] = 2)},
      {"dlse.shape[1] must be 40 (total_out), got 4", SET(a.dlse = input(Dtype::f32, 4, 4))},
      {"v_mean.batch must be 1 (seq_k.batch), got 3", SET(a.v_mean = input(Dtype::f32, 3, 2, 32))},
      {"k_mean.rank must be 3, got 2", SET(a.k_mean.rank = 2)},
      {"k_mean.dtype must be f32, got bf16", SET(a.k_mean.dtype = Dtype::bf16)},
      {"k_mean.batch must be 1 (seq_k.batch), got 2", SET(a.k_mean = input(Dtype::f32, 2, 2, 64))},
      {"k_mean.num_heads must be 2 (from the operands), got 4", SET(a.k_mean = input(Dtype::f32, 1, 4, 64))},
      {"k_mean.dim must be 64 (from the operands), got 32", SET(a.k_mean = input(Dtype::f32, 1, 2, 32))},
      {"k_mean must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.k_mean))},
      {"dq must be given, got a tensor without data", SET(a.dq = {})},
      {"dq.dtype must be f32, f16 or bf16, got e4m3", SET(a.dq.dtype = Dtype::e4m3)},
      {"dq.tokens must be 40 (from the operands), got 20", SET(a.dq.shape[0] = 20)},
      {"dq must not overlap itself (shape[0] 40, stride[0] 0)", SET(a.dq.stride[0] = 0)},
      {"dk must be given, got a tensor without data", SET(a.dk = {}, a.dk_mx = {})},
      {"dk.num_heads must be 2 (from the operands), got 4", SET(a.dk = input(Dtype::f32, 40, 4, 64))},
      {"dk.data must be aligned to 2 bytes (bf16), got address 0x*", SET(misalign(a.dk))},
      {"dv must be given, got a tensor without data", SET(a.dv = {}, a.dv_mx = {})},
      {"dv.dim must be 32 (from the operands), got 64", SET(a.dv = input(Dtype::f32, 40, 2, 64))},
      {"dk_mx.data.rank must be 3, got 2", SET(a.dk_mx.data.rank = 2)},
      {"dk_mx must not overlap itself (shape[0] 40, stride[0] 0)", SET(a.dk_mx.data.stride[0] = 0)},
      {"dv_mx.dim must be 32 (from the operands), got 64", SET(a.dv_mx = mx_input(40, 2, 64))},
      {"dv_mx.scale.data must not be null for 8 bytes, got null", SET(a.dv_mx.scale.data = nullptr)},
      {"ds_dtype must be e4m3 or e5m2, got f32", SET(a.ds_dtype = Dtype::f32)},
      {"dq_accum must be f32 or f16, got bf16", SET(a.dq_accum = Dtype::bf16)},
      {"dq_accum must be f32 or f16, got the value -1", SET(a.dq_accum = Dtype(-1))},
      {"workspace must have * bytes, got 64", SET(a.workspace_size = 64), kTooSmall},
      {"workspace must have * bytes, got 0", SET(a.workspace = nullptr), kTooSmall},
      {"workspace must be aligned to 64 bytes, got address 0x*",
       SET(a.workspace = static_cast<uint8_t*>(a.workspace) + 8)},
      {"backend must be one of *ref, got 'fast'", SET(a.backend = "fast"), kUnavailable},
  });
}

// ---- rmsnorm_quantize, rmsnorm_bwd, gemm_quantize --------------------------------------------------------------------

RmsnormQuantize valid_rmsnorm() {
  return {.in = input(Dtype::bf16, 40, 96), .weight = input(Dtype::f32, 96), .residual = output(Dtype::bf16, 40, 96),
          .out = make_mx_tensor(take(40 * 96), take(12), Dtype::e4m3, {}, {}, 40, 1, 96, {}),
          .y = output(Dtype::bf16, 40, 96), .rstd = output(Dtype::f32, 40)};
}
RmsnormQuantize valid_rmsnorm_2d() {
  RmsnormQuantize a = valid_rmsnorm();
  a.out.data = make_tensor(a.out.data.data, Dtype::e4m3, 40, 96);
  return a;
}

TEST(Status, RmsnormQuantizeRules) {
  expect_errors<RmsnormQuantize>({"rmsnorm_quantize", valid_rmsnorm_2d, rmsnorm_quantize}, {
      {"in.rank must be 2, got 3", SET(a.in.rank = 3)},
      {"in.dtype must be f32, f16 or bf16, got u8", SET(a.in.dtype = Dtype::u8)},
      {"in.shape[1] must be >= 1, got 0", SET(a.in.shape[1] = 0)},
      {"in.data must be aligned to 2 bytes (bf16), got address 0x*", SET(misalign(a.in))},
      {"seq.batch must be >= 1, got 0", SET(a.seq.batch = 0)},
      {"weight must be given, got a tensor without data", SET(a.weight = {})},
      {"weight.rank must be 1, got 2", SET(a.weight.rank = 2)},
      {"weight.shape[0] must be 96 (in.shape[1]), got 95", SET(a.weight.shape[0] = 95)},
      {"weight must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.weight))},
      {"residual.dtype must be f32, f16 or bf16, got e4m3", SET(a.residual.dtype = Dtype::e4m3)},
      {"residual.shape[0] must be 40 (in.shape[0]), got 39", SET(a.residual.shape[0] = 39)},
      {"residual must not overlap itself (shape[0] 40, stride[0] 0)", SET(a.residual.stride[0] = 0)},
      {"out.data.rank must be 2, got 3", SET(a.out = mx_input(40, 1, 96))},
      {"out.shape[1] must be 96 (in.shape[1]), got 64",
       SET(a.out = mx_input(40, 1, 64), a.out.data = input(Dtype::e4m3, 40, 64))},
      {"out.layout must be linear for block square32, got atom128x4 (convert_scales expands it)",
       SET(a.out.layout = ScaleLayout::atom128x4)},
      {"y.dtype must be bf16, got f16", SET(a.y.dtype = Dtype::f16)},
      {"y.shape[1] must be 96 (in.shape[1]), got 64", SET(a.y.shape[1] = 64)},
      {"rstd.dtype must be f32, got bf16", SET(a.rstd.dtype = Dtype::bf16)},
      {"rstd.shape[0] must be 40 (in.shape[0]), got 1", SET(a.rstd.shape[0] = 1)},
      {"rstd must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.rstd))},
      {"eps must be finite and >= 0, got -1e-06", SET(a.eps = -1e-6f)},
      {"eps must be finite and >= 0, got nan", SET(a.eps = kNan)},
      {"eps must be finite and >= 0, got inf", SET(a.eps = kInf)},
      {"rule must be rceil or floor, got -1", SET(a.rule = MxRule(-1))},
      {"backend must be one of *ref, got 'fast'", SET(a.backend = "fast"), kUnavailable},
      {"sm90: *CUDA*", SET(to_cuda(a.in, a.weight, a.residual, a.out, a.y, a.rstd)), kUnavailable},
  });
}

RmsnormBwd valid_rmsnorm_bwd() {
  RmsnormBwd a{.h = input(Dtype::bf16, 40, 96), .weight = input(Dtype::bf16, 96), .rstd = input(Dtype::f32, 40),
               .dy = input(Dtype::f16, 40, 96), .dh = input(Dtype::bf16, 40, 96), .dx = output(Dtype::f32, 40, 96),
               .dw = output(Dtype::f32, 96)};
  a.workspace_size = rmsnorm_bwd_workspace(a);
  a.workspace = take(a.workspace_size);
  return a;
}
void give_mx(RmsnormBwd& a) {
  a.dy = {};
  a.dy_mx = mx_input(40, 1, 96);
  a.dy_mx.data = input(Dtype::e4m3, 40, 96);
}

TEST(Status, RmsnormBwdRules) {
  expect_errors<RmsnormBwd>({"rmsnorm_bwd", valid_rmsnorm_bwd, rmsnorm_bwd, rmsnorm_bwd_workspace}, {
      {"h must be given, got a tensor without data", SET(a.h = {})},
      {"h.rank must be 2, got 3", SET(a.h.rank = 3)},
      {"h.dtype must be f32, f16 or bf16, got u8", SET(a.h.dtype = Dtype::u8)},
      {"h.shape[1] must be >= 1, got 0", SET(a.h.shape[1] = 0)},
      {"seq.batch must be >= 1, got 0", SET(a.seq.batch = 0)},
      {"tokens must be a multiple of seq.batch = 7 without cu_seqlens, got 40", SET(a.seq.batch = 7)},
      {"weight must be given, got a tensor without data", SET(a.weight = {})},
      {"weight.shape[0] must be 96 (h.shape[1]), got 95", SET(a.weight.shape[0] = 95)},
      {"rstd must be given, got a tensor without data", SET(a.rstd = {})},
      {"rstd.dtype must be f32, got bf16", SET(a.rstd.dtype = Dtype::bf16)},
      {"rstd.shape[0] must be 40 (h.shape[0]), got 39", SET(a.rstd.shape[0] = 39)},
      {"one of dy and dy_mx must be given, got neither", SET(a.dy = {})},
      {"one of dy and dy_mx must be given, got both", SET(a.dy_mx = mx_input(40, 1, 96))},
      {"dy.rank must be 2, got 1", SET(a.dy.rank = 1)},
      {"dy.shape[0] must be 40 (h.shape[0]), got 41", SET(a.dy = input(Dtype::f16, 41, 96))},
      {"dy must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.dy))},
      {"dy_mx.data.rank must be 2, got 3", SET(a.dy = {}, a.dy_mx = mx_input(40, 1, 96))},
      {"dy_mx.scale.shape[2] must be 3 (scale_shape), got 2", SET(give_mx(a), a.dy_mx.scale.shape[2] = 2)},
      {"dy_mx.shape[1] must be 96 (h.shape[1]), got 64",
       SET(a.dy = {}, a.dy_mx = mx_input(40, 1, 64), a.dy_mx.data = input(Dtype::e4m3, 40, 64))},
      {"dh.dtype must be f32, f16 or bf16, got e5m2", SET(a.dh.dtype = Dtype::e5m2)},
      {"dh.shape[1] must be 96 (h.shape[1]), got 64", SET(a.dh = input(Dtype::bf16, 40, 64))},
      {"dx must be given, got a tensor without data", SET(a.dx = {})},
      {"dx must not overlap itself (shape[0] 40, stride[0] 0)", SET(a.dx.stride[0] = 0)},
      {"dx.dtype must be that of dh = bf16 if they are one tensor, got f32", SET(a.dh.data = a.dx.data)},
      {"dx.stride[0] must be 48 (dh.stride[0], one tensor), got 96",
       SET(a.dh = a.dx, a.dh.stride[0] = 48)},
      {"dw must be given, got a tensor without data", SET(a.dw = {})},
      {"dw.shape[0] must be 96 (h.shape[1]), got 95", SET(a.dw.shape[0] = 95)},
      {"dw.dtype must be f32 or that of weight = bf16, got f16", SET(a.dw.dtype = Dtype::f16)},
      {"workspace must have * bytes, got 0", SET(a.workspace = nullptr), kTooSmall},
      {"workspace must have * bytes, got *", SET(a.workspace_size -= 1), kTooSmall},
      {"workspace must be aligned to 64 bytes, got address 0x*",
       SET(a.workspace = static_cast<uint8_t*>(a.workspace) + 32)},
      {"backend must be one of *ref, got 'fast'", SET(a.backend = "fast"), kUnavailable},
      {"sm90: *CUDA*", SET(to_cuda(a.h, a.weight, a.rstd, a.dy, a.dh, a.dx, a.dw)), kUnavailable},
  });
}

GemmQuantize valid_gemm() {
  return {.a = input(Dtype::bf16, 40, 24), .b = input(Dtype::f32, 64, 24), .out = mx_output(40, 2, 32),
          .c = output(Dtype::f32, 40, 2, 32)};
}

TEST(Status, GemmQuantizeRules) {
  expect_errors<GemmQuantize>({"gemm_quantize", valid_gemm, gemm_quantize}, {
      {"a must be given, got a tensor without data", SET(a.a = {})},
      {"a.rank must be 2, got 3", SET(a.a.rank = 3)},
      {"b.rank must be 2, got 1", SET(a.b.rank = 1)},
      {"b.dtype must be f32, f16 or bf16, got e4m3", SET(a.b.dtype = Dtype::e4m3)},
      {"b.shape[1] must be 24 (a.shape[1]), got 23", SET(a.b.shape[1] = 23)},
      {"b must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.b))},
      {"tokens must be a multiple of seq.batch = 7 without cu_seqlens, got 40", SET(a.seq.batch = 7)},
      {"out.data.rank must be 2 or 3, got 4", SET(a.out.data.rank = 4)},
      {"out.shape[0] must be 40 (a.shape[0]), got 41", SET(a.out = mx_input(41, 2, 32))},
      {"out.columns must be 64 (b.shape[0]), got 96", SET(a.out = mx_input(40, 3, 32))},
      {"out must have fewer than 2^56 elements, got shape [0, 4294967296, 4294967296]",
       SET(a.a.shape[0] = 0, a.out.data.shape = {0, int64_t(1) << 32, int64_t(1) << 32})},
      {"out must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.out))},
      {"c.rank must be 3, got 2", SET(a.c.rank = 2)},
      {"c.dtype must be f32, f16 or bf16, got u8", SET(a.c.dtype = Dtype::u8)},
      {"c.shape[0] must be 40 (a.shape[0]), got 39", SET(a.c.shape[0] = 39)},
      {"c.columns must be 64 (b.shape[0]), got 32", SET(a.c.shape[1] = 1)},
      {"c.shape[2] must be 32 (that of out), got 64", SET(a.c = input(Dtype::f32, 40, 1, 64))},
      {"c must not overlap itself (shape[0] 40, stride[0] 63)", SET(a.c.stride[0] = 63)},
      {"rule must be rceil or floor, got 3", SET(a.rule = MxRule(3))},
      {"backend must be one of *ref, got 'fast'", SET(a.backend = "fast"), kUnavailable},
      {"no backend for tensors on cuda:0, got only *ref", SET(to_cuda(a.a, a.b, a.out, a.c)), kUnavailable},
  });
}

// ---- operator ------------------------------------------------------------------------------------------------------

// Two payloads a tensor, so that the forward has its own piece of workspace.
constexpr Recipe kTwoPayloads{.block = MxBlock::row32, .block_col = MxBlock::col32};

OperatorFwd valid_operator_fwd() {
  OperatorFwd a{.q = input(Dtype::bf16, 40, 4, 64), .k = input(Dtype::bf16, 40, 2, 64),
                .v = input(Dtype::f32, 40, 2, 32), .out = output(Dtype::bf16, 40, 4, 32),
                .lse = output(Dtype::f32, 4, 40), .recipe = kTwoPayloads};
  a.stats = new (take(sizeof(OperatorStats))) OperatorStats;
  std::memset(static_cast<void*>(a.stats), kPoison, sizeof(OperatorStats));
  a.saved_size = operator_saved(a), a.saved = take(a.saved_size);
  a.workspace_size = operator_fwd_workspace(a), a.workspace = take(a.workspace_size);
  return a;
}

TEST(Status, OperatorFwdRules) {
  expect_errors<OperatorFwd>({"operator_fwd", valid_operator_fwd, operator_fwd, operator_fwd_workspace}, {
      {"q must be given, got a tensor without data", SET(a.q = {})},
      {"q.dtype must be f32, f16 or bf16, got e4m3", SET(a.q.dtype = Dtype::e4m3)},
      {"q.data must be aligned to 2 bytes (bf16), got address 0x*", SET(misalign(a.q))},
      {"q must have fewer than 2^56 elements, got shape [1152921504606846976, 4, 64]", SET(a.q.shape[0] = kHuge)},
      {"q must have fewer than 2^56 elements with padding, got 0 tokens, batch 2147483647, max_seqlen 0",
       SET(a.seq_q.batch = kInt32Max, a.q.shape = {0, 1 << 20, 1 << 10})},
      {"out must have fewer than 2^56 elements with shared_q, got 1073741824 x 1099511627776 rows",
       SET(a.shared_q = true, a.seq_k.batch = 1 << 30, a.q = input(Dtype::bf16, int64_t(1) << 40, 4, 64);
           a.k.shape[0] = a.v.shape[0] = 0)},
      {"k.rank must be 3, got 2", SET(a.k.rank = 2)},
      {"k must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.k))},
      {"v.stride[2] must be 1 (contiguous last dimension), got 3", SET(a.v.stride[2] = 3)},
      {"seq_q.cu_seqlens[0] must be 0, got 1", SET(a.seq_q = {kCuFromOne, 1, 40})},
      {"seq_k.batch must be >= 1, got -7", SET(a.seq_k.batch = -7)},
      {"seq_q.batch must equal seq_k.batch = 2, got 1", SET(a.seq_k.batch = 2)},
      {"seq_q.batch must be 1 with shared_q, got 2", SET(a.shared_q = true, a.seq_q.batch = 2)},
      {"recipe.element must be e4m3 or e5m2, got bf16", SET(a.recipe.element = Dtype::bf16)},
      {"recipe.grad_element must be e4m3 or e5m2, got none", SET(a.recipe.grad_element = Dtype::none)},
      {"rule must be rceil or floor, got 5", SET(a.recipe.rule = MxRule(5))},
      {"recipe.block must be square32, row32 or col32, got 4", SET(a.recipe.block = MxBlock(4))},
      {"recipe.block_col must be square32, row32 or col32, got -2", SET(a.recipe.block_col = MxBlock(-2))},
      {"head_dim must be a multiple of 8, got 20", SET(a.q.shape[2] = a.k.shape[2] = 20)},
      {"head_dim must be between 8 and 256, got 264",
       SET(a.q = input(Dtype::bf16, 40, 4, 264), a.k = input(Dtype::bf16, 40, 2, 264))},
      {"k.head_dim must be 64 (that of q), got 32", SET(a.k.shape[2] = 32)},
      {"v.tokens must be 40 (that of k), got 20", SET(a.v.shape[0] = 20)},
      {"num_heads_q = 4 must be a multiple of num_heads_kv, got 3",
       SET(a.k = input(Dtype::bf16, 40, 3, 64), a.v = input(Dtype::f32, 40, 3, 32))},
      {"softmax_scale must be finite (0 means 1/sqrt(head_dim)), got nan", SET(a.softmax_scale = kNan)},
      {"cpu_math must be automatic, exact or fast, got 4", SET(a.cpu_math = CpuMath(4))},
      {"out must be given, got a tensor without data", SET(a.out = {})},
      {"out.dim must be 32 (from the operands), got 16", SET(a.out.shape[2] = 16)},
      {"lse.rank must be 2, got 1", SET(a.lse.rank = 1)},
      {"lse.dtype must be f32, got bf16", SET(a.lse.dtype = Dtype::bf16)},
      {"lse.shape[1] must be 40 (total_out), got 39", SET(a.lse.shape[1] = 39)},
      {"saved must have * bytes, got *", SET(a.saved_size -= 1), kTooSmall},
      {"saved must be aligned to 64 bytes, got address 0x*", SET(a.saved = static_cast<uint8_t*>(a.saved) + 4)},
      {"workspace must have * bytes, got *", SET(a.workspace_size -= 1), kTooSmall},
      {"workspace must have * bytes, got 0", SET(a.workspace = nullptr), kTooSmall},
      {"workspace must be aligned to 64 bytes, got address 0x*",
       SET(a.workspace = static_cast<uint8_t*>(a.workspace) + 4)},
      {"backend must be one of *ref, got 'fast'", SET(a.backend = "fast"), kUnavailable},
      {"lse must be on cuda:0 like the other tensors, got cpu:0", SET(to_cuda(a.q, a.k, a.v))},
  });
}

OperatorBwd valid_operator_bwd() {
  OperatorFwd fwd = valid_operator_fwd();
  fwd.out = input(Dtype::bf16, 40, 4, 32);
  fwd.saved = g_input;
  EXPECT_LE(fwd.saved_size, sizeof g_input);
  OperatorBwd a{.fwd = fwd, .dout = input(Dtype::f32, 40, 4, 32), .dlse = input(Dtype::f32, 4, 40),
                .dq = output(Dtype::bf16, 40, 4, 64), .dk = output(Dtype::bf16, 40, 2, 64),
                .dv = output(Dtype::f32, 40, 2, 32)};
  a.workspace_size = operator_bwd_workspace(a), a.workspace = take(a.workspace_size);
  return a;
}

TEST(Status, OperatorBwdRules) {
  expect_errors<OperatorBwd>({"operator_bwd", valid_operator_bwd, operator_bwd, operator_bwd_workspace}, {
      {"q must be given, got a tensor without data", SET(a.fwd = {})},
      {"q.rank must be 3, got 2", SET(a.fwd.q.rank = 2)},
      {"recipe.block must be square32, row32 or col32, got 4", SET(a.fwd.recipe.block = MxBlock(4))},
      {"dout must be given, got a tensor without data", SET(a.dout = {})},
      {"dout.dtype must be f32, f16 or bf16, got e4m3", SET(a.dout.dtype = Dtype::e4m3)},
      {"dout.tokens must be 40 (total_out), got 41", SET(a.dout.shape[0] = 41)},
      // Its MX copy would be larger than the workspace, which was sized for the right one.
      {"dout.num_heads must be 4 (from the operands), got 4000", SET(a.dout.shape[1] = 4000, a.dout.stride[0] = 0)},
      {"dout.dim must be 32 (from the operands), got 16", SET(a.dout.shape[2] = 16)},
      {"dout must have fewer than 2^56 elements, got shape [40, 1152921504606846976, 32]",
       SET(a.dout.shape[1] = kHuge)},
      {"dout must be on cpu:0 like the other tensors, got cuda:0", SET(to_cuda(a.dout))},
      {"dlse.dtype must be f32, got bf16", SET(a.dlse.dtype = Dtype::bf16)},
      {"dlse.shape[1] must be 40 (total_out), got 1", SET(a.dlse.shape[1] = 1)},
      {"out.tokens must be 40 (from the operands), got 39", SET(a.fwd.out.shape[0] = 39)},
      {"dq must be given, got a tensor without data", SET(a.dq = {})},
      {"dq.dim must be 64 (from the operands), got 32", SET(a.dq.shape[2] = 32)},
      {"dk must be given, got a tensor without data", SET(a.dk = {})},
      {"dv.stride[2] must be 1 (contiguous last dimension), got 2", SET(a.dv.stride[2] = 2)},
      {"dk_mx.dim must be 64 (from the operands), got 32", SET(a.dk_mx = mx_input(40, 2, 32))},
      {"dq_accum must be f32 or f16, got e5m2", SET(a.dq_accum = Dtype::e5m2)},
      {"cpu_math must be automatic, exact or fast, got 5", SET(a.fwd.cpu_math = CpuMath(5))},
      {"fwd.saved must have * bytes, got 0", SET(a.fwd.saved_size = 0), kTooSmall},
      {"fwd.saved must have * bytes, got 0", SET(a.fwd.saved = nullptr), kTooSmall},
      {"workspace must have * bytes, got *", SET(a.workspace_size -= 1), kTooSmall},
      {"workspace must be aligned to 64 bytes, got address 0x*",
       SET(a.workspace = static_cast<uint8_t*>(a.workspace) + 16)},
      {"backend must be one of *ref, got 'fast'", SET(a.fwd.backend = "fast"), kUnavailable},
  });
}
#undef SET
// clang-format on

// The backward promises to read the shapes of q, k, v only.
TEST(Status, OperatorBwdNeedsNoDataOfQkv) {
  reset_output();
  OperatorBwd a = valid_operator_bwd();
  a.fwd.q.data = a.fwd.k.data = a.fwd.v.data = nullptr;
  EXPECT_EQ(operator_bwd_workspace(a), a.workspace_size);
  const Status s = operator_bwd(a);
  EXPECT_TRUE(s.ok()) << s.message;
  a.fwd.saved_size -= 1;
  expect_status(operator_bwd(a), kTooSmall, "operator_bwd: fwd.saved must have * bytes, got *");
}

// The rules must not refuse what the headers promise.
TEST(Status, AcceptsAnyValidStrides) {
  reset_output();
  Quantize a = valid_quantize();
  a.in.stride = {0, 0, 0};  // an expanded scalar
  EXPECT_TRUE(quantize(a).ok());
  a.in.stride = {0, 0, 1};  // an expanded row
  EXPECT_TRUE(quantize(a).ok());
  a.in.data = g_input + 39 * 512;
  a.in.stride = {-128, 64, 1};  // flipped
  EXPECT_TRUE(quantize(a).ok());
  a.out.data.data = static_cast<uint8_t*>(a.out.data.data) + 39 * 128;  // flipped output: no two elements meet
  a.out.data.stride = {-128, 64, 1};
  EXPECT_TRUE(quantize(a).ok());
  a.in.stride = {INT64_MIN, 64, 1};  // of a dimension with one element: any
  a.in.shape[0] = 1;
  a.out = mx_output(1, 2, 64);
  a.out.data.stride[0] = INT64_MIN;
  a.out_col = {};
  const Status s = quantize(a);
  EXPECT_TRUE(s.ok()) << s.message;
}

TEST(Status, AcceptsEmptyTensorsWithoutMemory) {
  const MxTensor none = make_mx_tensor(nullptr, nullptr, Dtype::e4m3, {}, {}, 0, 2, 64, {});
  EXPECT_TRUE(quantize({.in = make_tensor(nullptr, Dtype::f32, 0, 2, 64), .out = none}).ok());
  EXPECT_TRUE(dequantize({.in = none, .out = make_tensor(nullptr, Dtype::f32, 0, 2, 64)}).ok());
}

// ---- the environment -----------------------------------------------------------------------------------------------

TEST(Status, EnvironmentForcesABackend) {
  reset_output();
  const Quantize a = valid_quantize();
  const AttentionFwd f = valid_fwd();
  AttentionFwd forced = f;
  forced.backend = "ref";  // the call's own word counts more than the environment
  const size_t workspace = forced.workspace_size = attention_fwd_workspace(forced);
  forced.workspace = std::memset(take(workspace), kPoison, workspace);
  {
    const Environment environment("nonsense");
    expect_status(quantize(a), kUnavailable, "quantize: backend must be one of *ref, got 'nonsense'");
    expect_status(attention_fwd(f), kUnavailable, "attention_fwd: backend must be one of *ref, got 'nonsense'");
    EXPECT_EQ(attention_fwd_workspace(f), 0u);
    EXPECT_TRUE(output_untouched());
    EXPECT_EQ(attention_fwd_workspace(forced), workspace);
    EXPECT_TRUE(attention_fwd(forced).ok());
  }
  const Environment environment("");  // as if unset
  EXPECT_TRUE(quantize(a).ok());
}

// ---- messages -----------------------------------------------------------------------------------------------------

TEST(Status, LongTextIsCutWithDots) {
  const std::string text(1000, 'x');
  const Status s = make_status(StatusCode::device_error, "%s", text.c_str());
  EXPECT_EQ(s.code, StatusCode::device_error);
  EXPECT_EQ(std::string(s.message), text.substr(0, sizeof s.message - 4) + "...");
  const std::string fits(sizeof s.message - 1, 'y');
  EXPECT_EQ(std::string(make_status(StatusCode::device_error, "%s", fits.c_str()).message), fits);
}

TEST(Status, TextIsOneLineOfAscii) {
  EXPECT_STREQ(make_status(StatusCode::device_error, "%s", "a\nb\tc\x1b[1m \xff~").message, "a?b?c?[1m ?~");
}

TEST(Status, WorkspaceRuleNamesBothSizes) {
  alignas(64) uint8_t memory[128];
  EXPECT_TRUE(check_workspace("op", "workspace", nullptr, 0, 0).ok());
  EXPECT_TRUE(check_workspace("op", "workspace", memory, 128, 128).ok());
  expect_status(check_workspace("op", "workspace", memory, 127, 128), kTooSmall,
                "op: workspace must have 128 bytes, got 127");
  expect_status(check_workspace("op", "workspace", nullptr, 128, 128), kTooSmall,
                "op: workspace must have 128 bytes, got 0");
}

}  // namespace
}  // namespace mxflash

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  mxflash::set_num_threads(1);  // small workspaces
  unsetenv("MXFLASH_BACKEND");
  return RUN_ALL_TESTS();
}
