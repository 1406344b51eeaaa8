#include "simd_test_kernel.h"

#include "simd/vector.h"

MXFLASH_ISA_BEGIN
namespace {

// The entries of the table: an expression of the operands for each vector.
#define MXFLASH_FLOAT(name, ...)                                                         \
  void name##_floats([[maybe_unused]] const float* pa, [[maybe_unused]] const float* pb, \
                     [[maybe_unused]] const float* pc, float* out, int64_t n) {          \
    for (int64_t l = 0; l < n; l += kLanes) {                                            \
      [[maybe_unused]] const F32 a = load(pa + l), b = load(pb + l), c = load(pc + l);   \
      store(out + l, __VA_ARGS__);                                                       \
    }                                                                                    \
  }
#define MXFLASH_INT(name, ...)                                                             \
  void name##_ints([[maybe_unused]] const int32_t* pa, [[maybe_unused]] const int32_t* pb, \
                   [[maybe_unused]] const int32_t* pc, int32_t* out, int64_t n) {          \
    for (int64_t l = 0; l < n; l += kLanes) {                                              \
      [[maybe_unused]] const I32 a = load(pa + l), b = load(pb + l), c = load(pc + l);     \
      store(out + l, __VA_ARGS__);                                                         \
    }                                                                                      \
  }
#define MXFLASH_CONVERT(name, In, Out, ...)              \
  void name##_array(const In* in, Out* out, int64_t n) { \
    for (int64_t l = 0; l < n; l += kLanes) __VA_ARGS__; \
  }

MXFLASH_FLOAT(add, add(a, b))
MXFLASH_FLOAT(sub, sub(a, b))
MXFLASH_FLOAT(mul, mul(a, b))
MXFLASH_FLOAT(div, div(a, b))
MXFLASH_FLOAT(sqrt, sqrt(a))
MXFLASH_FLOAT(fma, fma(a, b, c))
MXFLASH_FLOAT(max, max(a, b))
MXFLASH_FLOAT(min, min(a, b))
MXFLASH_FLOAT(abs, abs(a))
MXFLASH_FLOAT(exp2, exp2(a))
MXFLASH_FLOAT(less, select(less(a, b), broadcast(1.0f), broadcast(0.0f)))
MXFLASH_FLOAT(reduce_add, broadcast(reduce_add(a)))
MXFLASH_FLOAT(reduce_max, broadcast(reduce_max(a)))

MXFLASH_INT(add, add(a, b))
MXFLASH_INT(sub, sub(a, b))
MXFLASH_INT(bit_and, bit_and(a, b))
MXFLASH_INT(bit_or, bit_or(a, b))
MXFLASH_INT(max, max(a, b))
MXFLASH_INT(shift_left_1, shift_left<1>(a))
MXFLASH_INT(shift_left_31, shift_left<31>(a))
MXFLASH_INT(shift_right_1, shift_right<1>(a))
MXFLASH_INT(shift_right_31, shift_right<31>(a))
MXFLASH_INT(less, select(less(a, b), broadcast(1), broadcast(0)))
MXFLASH_INT(equal, select(equal(a, b), broadcast(1), broadcast(0)))
MXFLASH_INT(reduce_max, broadcast(reduce_max(a)))
MXFLASH_INT(broadcast, broadcast(pa[l]))
MXFLASH_INT(iota, iota())
MXFLASH_INT(pack_int16, pack_int16(a, b))
MXFLASH_INT(dot16, dot16(a, b, c))
MXFLASH_INT(positive_and_equal, select(mask_and(less(broadcast(0), a), equal(a, b)), b, c))
MXFLASH_INT(any_equal, broadcast(int32_t(any(equal(a, b)))))

void float_select(const int32_t* mask, const float* if_set, const float* if_clear, float* out, int64_t n) {
  for (int64_t l = 0; l < n; l += kLanes) {
    store(out + l, select(less(load(mask + l), broadcast(0)), load(if_set + l), load(if_clear + l)));
  }
}

MXFLASH_CONVERT(float_broadcast, float, float, store(out + l, broadcast(in[l])))
MXFLASH_CONVERT(as_float, int32_t, float, store(out + l, as_float(load(in + l))))
MXFLASH_CONVERT(as_int, float, int32_t, store(out + l, as_int(load(in + l))))
MXFLASH_CONVERT(to_float, int32_t, float, store(out + l, to_float(load(in + l))))
MXFLASH_CONVERT(round_to_int, float, int32_t, store(out + l, round_to_int(load(in + l))))
MXFLASH_CONVERT(load_bf16, uint16_t, float, store(out + l, load_bf16(in + l)))
MXFLASH_CONVERT(load_f16, uint16_t, float, store(out + l, load_f16(in + l)))
MXFLASH_CONVERT(load_e4m3, uint8_t, float, store(out + l, load_e4m3(in + l)))
MXFLASH_CONVERT(load_e5m2, uint8_t, float, store(out + l, load_e5m2(in + l)))
MXFLASH_CONVERT(load_e8m0, uint8_t, float, store(out + l, load_e8m0(in + l)))
MXFLASH_CONVERT(store_bf16, float, uint16_t, store_bf16(out + l, load(in + l)))
MXFLASH_CONVERT(store_f16, float, uint16_t, store_f16(out + l, load(in + l)))
MXFLASH_CONVERT(store_int16, int32_t, int16_t, store_int16(out + l, load(in + l)))

void transpose_block(const float* src, int64_t src_stride, float* dst, int64_t dst_stride) {
  transpose(src, src_stride, dst, dst_stride);
}

}  // namespace

constexpr SimdTestKernels kSimdTest = {
    .lanes = kLanes,
    .add = add_floats,
    .sub = sub_floats,
    .mul = mul_floats,
    .div = div_floats,
    .sqrt = sqrt_floats,
    .fma = fma_floats,
    .max = max_floats,
    .min = min_floats,
    .abs = abs_floats,
    .exp2 = exp2_floats,
    .less = less_floats,
    .reduce_add = reduce_add_floats,
    .reduce_max = reduce_max_floats,
    .int_add = add_ints,
    .int_sub = sub_ints,
    .bit_and = bit_and_ints,
    .bit_or = bit_or_ints,
    .int_max = max_ints,
    .shift_left_1 = shift_left_1_ints,
    .shift_left_31 = shift_left_31_ints,
    .shift_right_1 = shift_right_1_ints,
    .shift_right_31 = shift_right_31_ints,
    .int_less = less_ints,
    .int_equal = equal_ints,
    .int_reduce_max = reduce_max_ints,
    .broadcast = broadcast_ints,
    .iota = iota_ints,
    .pack_int16 = pack_int16_ints,
    .dot16 = dot16_ints,
    .positive_and_equal = positive_and_equal_ints,
    .any_equal = any_equal_ints,
    .float_select = float_select,
    .float_broadcast = float_broadcast_array,
    .as_float = as_float_array,
    .as_int = as_int_array,
    .to_float = to_float_array,
    .round_to_int = round_to_int_array,
    .load_bf16 = load_bf16_array,
    .load_f16 = load_f16_array,
    .load_e4m3 = load_e4m3_array,
    .load_e5m2 = load_e5m2_array,
    .load_e8m0 = load_e8m0_array,
    .store_bf16 = store_bf16_array,
    .store_f16 = store_f16_array,
    .store_int16 = store_int16_array,
    .transpose = transpose_block,
};

MXFLASH_ISA_END
