// Matrix products of tiles in any of three arithmetics, behind one name each:
//   fp32   multiply-adds
//   bf16   dot products of BF16 pairs: exact on MX operands, and used on no others (gemm_bf16.h)
//   fixed  dot products of int16 pairs in 14-bit block fixed point: both operands rounded (mx_tile.h)
// Operands are packed from fp32 tiles, multiplied as often as it takes, and never unpacked.
#pragma once

#include <cstdint>

#include "runtime/arena.h"
#include "simd/gemm_bf16.h"
#include "simd/micro_kernel.h"
#include "simd/mx_tile.h"

MXFLASH_ISA_BEGIN

enum class Arithmetic { fp32, bf16, fixed };

// Of products of two MX operands, and of products with P or dS. BF16 has too few bits for the latter: where k has a
// large mean, dS k is a small sum of large terms.
#if defined(MXFLASH_ISA_AVX512_BF16)
constexpr Arithmetic arithmetic_on_mx(bool) { return Arithmetic::bf16; }
#else
constexpr Arithmetic arithmetic_on_mx(bool fast) { return fast ? Arithmetic::fixed : Arithmetic::fp32; }
#endif
constexpr Arithmetic arithmetic_on_any(bool fast) { return fast ? Arithmetic::fixed : Arithmetic::fp32; }

// A of C = A B: rows of it are broadcast. [rows][depth], depth a multiple of kGroup.
struct Left {
  Arithmetic arithmetic;
  int64_t depth;
  float* f32;      // fp32
  int32_t* pairs;  // bf16, fixed: [rows][depth / 2]
  float* scale;    // fixed: [rows][depth / kGroup]

  Left(Arena& arena, Arithmetic kind, int64_t rows, int64_t row_depth)
      : arithmetic(kind),
        depth(row_depth),
        f32(arena.take<float>(kind == Arithmetic::fp32 ? rows * depth : 0)),
        pairs(arena.take<int32_t>(kind != Arithmetic::fp32 ? rows * depth / 2 : 0)),
        scale(arena.take<float>(kind == Arithmetic::fixed ? rows * depth / kGroup : 0)) {}
  // The operand from this row or this element of the depth on, a multiple of kGroup.
  Left from_row(int64_t row) const { return moved(row * depth); }
  Left from_depth(int64_t k) const { return moved(k); }

 private:
  Left moved(int64_t elements) const {
    Left l = *this;
    l.f32 += elements;
    l.pairs += elements / 2;
    l.scale += elements / kGroup;
    return l;
  }
};

// B of C = A B: panels [depth][kPanel], one after the other.
struct Right {
  Arithmetic arithmetic;
  int64_t depth;     // of a panel
  float factor = 1;  // of the product
  float* f32;        // fp32
  int32_t* pairs;    // bf16, fixed: [depth / 2][kPanel]
  float* scale;      // fixed: [depth / kGroup][kPanel]

  Right(Arena& arena, Arithmetic kind, int64_t panel_depth, int64_t panels = 1)
      : arithmetic(kind),
        depth(panel_depth),
        f32(arena.take<float>(kind == Arithmetic::fp32 ? panels * depth * kPanel : 0)),
        pairs(arena.take<int32_t>(kind != Arithmetic::fp32 ? panels * depth / 2 * kPanel : 0)),
        scale(arena.take<float>(kind == Arithmetic::fixed ? panels * depth / kGroup * kPanel : 0)) {}
  Right panel(int64_t p) const { return from_depth(p * depth); }
  Right from_depth(int64_t k) const {
    Right r = *this;
    r.f32 += k * kPanel;
    r.pairs += k / 2 * kPanel;
    r.scale += k / kGroup * kPanel;
    return r;
  }
};

// src [rows][stride] -> rows of `left`. fp32: src is left.f32 already.
inline void pack_left(const float* src, int64_t stride, int64_t rows, const Left& left) {
  switch (left.arithmetic) {
    case Arithmetic::fp32: break;
    case Arithmetic::fixed: fix_rows(src, stride, rows, left.depth / kGroup, left.pairs, left.scale); break;
    case Arithmetic::bf16:
#if defined(MXFLASH_ISA_AVX512_BF16)
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t k = 0; k < left.depth; k += kGroup) {
          store(left.pairs + (r * left.depth + k) / 2, pack_neighbours_bf16(src + r * stride + k));
        }
      }
#endif
      break;
  }
}

// The transpose of src [depth][stride]: its first `rows` columns become rows, its first `depth` rows, a multiple of
// kGroup, the elements of those.
inline void pack_left_transposed(const float* src, int64_t stride, int64_t depth, int64_t rows, const Left& left) {
  switch (left.arithmetic) {
    case Arithmetic::fp32: transpose_tile(src, stride, left.f32, left.depth, depth, rows); break;
    case Arithmetic::fixed: fix_columns(src, stride, depth, rows, left.depth / kGroup, left.pairs, left.scale); break;
    case Arithmetic::bf16: break;  // of no use: no product of two MX operands needs it
  }
}

// src [depth][kPanel], the first `lanes` of it -> one panel of `right`. fp32: src may be right.f32.
inline void pack_right(float* src, int64_t depth, int64_t lanes, const Right& right) {
  switch (right.arithmetic) {
    case Arithmetic::fp32:
      if (src == right.f32 && right.factor == 1) break;
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t l = 0; l < lanes; l += kLanes) {
          store(right.f32 + k * kPanel + l, mul(load(src + k * kPanel + l), broadcast(right.factor)));
        }
      }
      break;
    case Arithmetic::fixed: fix_panel(src, depth / kGroup, lanes, right.pairs, right.scale, right.factor); break;
    case Arithmetic::bf16:
#if defined(MXFLASH_ISA_AVX512_BF16)
      for (int64_t k = 0; k < depth; k += 2) {
        for (int64_t l = 0; l < lanes; l += kLanes) {
          const float* x = src + k * kPanel + l;
          store(right.pairs + k / 2 * kPanel + l, pack_bf16(load(x), load(x + kPanel)));
        }
      }
#endif
      break;
  }
}

// Where an operand that is decoded, and perhaps packed afterwards, is to be decoded to.
inline float* unpacked(const Right& right, float* otherwise) {
  return right.arithmetic == Arithmetic::fp32 ? right.f32 : otherwise;
}

// Decodes tokens of a head into the rows of `left`, or their transpose into its first `rows` rows, a group at a time:
// the fp32 form on the way, stage [kGroup][dim], stays in L1. What follows the tokens up to a whole group is zero. What
// is not finite becomes zero; bad[i], if asked for, tells that token i had it. Returns whether everything is finite.
inline bool decode_group(const MxHead& h, int64_t first, int64_t count, float* dst, int64_t dim, bool* bad) {
  const bool finite = decode_tokens(h, first, count, 1, dst, dim);
  bool here[kGroup] = {};
  if (!finite) clear_nonfinite(dst, dim, count, dim, here);
  for (int64_t i = 0; bad && !finite && i < count; ++i) bad[i] |= here[i];
  std::fill(dst + count * dim, dst + kGroup * dim, 0.0f);
  return finite;
}
inline bool decode_left(const MxHead& h, int64_t first, int64_t count, float* stage, const Left& left, bool* bad) {
  bool finite = true;
  for (int64_t i = 0; i < count; i += kGroup) {
    const Left group = left.from_row(i);
    float* dst = left.arithmetic == Arithmetic::fp32 ? group.f32 : stage;
    finite &= decode_group(h, first + i, std::min(kGroup, count - i), dst, left.depth, bad ? bad + i : nullptr);
    pack_left(dst, left.depth, kGroup, group);
  }
  return finite;
}
inline bool decode_left_transposed(const MxHead& h, int64_t first, int64_t count, float* stage, int64_t rows,
                                   const Left& left, bool* bad) {
  bool finite = true;
  for (int64_t i = 0; i < count; i += kGroup) {
    finite &= decode_group(h, first + i, std::min(kGroup, count - i), stage, rows, bad ? bad + i : nullptr);
    pack_left_transposed(stage, rows, kGroup, rows, left.from_depth(i));
  }
  return finite;
}

// C [rows][kPanel] = or += A B over the first `depth` elements; beyond it, up to the next multiple of kGroup, one of
// the operands is zero.
inline void multiply(const Left& a, const Right& b, int64_t depth, float* c, int64_t rows, int64_t lanes,
                     bool accumulate) {
  switch (a.arithmetic) {
    case Arithmetic::fp32: gemm(a.f32, a.depth, b.f32, depth, c, rows, lanes, accumulate); break;
    case Arithmetic::fixed:
      gemm_fixed({a.pairs, a.scale, a.depth / kGroup}, {b.pairs, b.scale}, ceil_div(depth, kGroup), c, rows, lanes,
                 accumulate);
      break;
    case Arithmetic::bf16:
#if defined(MXFLASH_ISA_AVX512_BF16)
      gemm_bf16(a.pairs, a.depth / 2, b.pairs, round_up(depth, 2), b.factor, c, rows, lanes, accumulate);
#endif
      break;
  }
}

MXFLASH_ISA_END
