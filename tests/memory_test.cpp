// What docs/hopper.md says of memory: bytes kept between forward and backward, and the workspace of the sm90 backward.
// Sizes come from shapes alone, so none of this needs a card.
#include <gtest/gtest.h>
#include <mxflash/operator.h>

#if MXFLASH_CUDA
#include "attention/attention_bwd_sm90.cuh"
#endif

namespace mxflash {
namespace {

struct Shape {
  int64_t batch, seqlen, heads_q, heads_kv, dim;
  int64_t tokens() const { return batch * seqlen; }
  Jagged seq() const { return {.batch = int32_t(batch)}; }
};

// Whole tiles, so that padding adds nothing.
constexpr Shape kShapes[] = {{16, 1024, 16, 16, 128},
                             {4, 4096, 16, 16, 128},
                             {4, 4096, 16, 2, 128},
                             {4, 4096, 32, 32, 64},
                             {1, 16384, 16, 16, 128}};

OperatorFwd operator_of(const Shape& s, Recipe recipe = {}) {
  const auto tensor = [&](int64_t heads) { return make_tensor(nullptr, Dtype::bf16, s.tokens(), heads, s.dim); };
  return {.q = tensor(s.heads_q),
          .k = tensor(s.heads_kv),
          .v = tensor(s.heads_kv),
          .out = tensor(s.heads_q),
          .recipe = recipe,
          .seq_q = s.seq(),
          .seq_k = s.seq()};
}

// A byte an element of q, k and v, a scale for 32 x 32 of them, and lse and row_exponent of each row.
int64_t documented_saved(const Shape& s) {
  const int64_t elements = s.tokens() * (s.heads_q + 2 * s.heads_kv) * s.dim;
  return elements + elements / 1024 + 5 * s.tokens() * s.heads_q;
}

TEST(Memory, BetweenForwardAndBackwardIsAsDocumented) {
  constexpr Recipe kPlain{.rotate_qk = false, .smooth_k = false, .smooth_v = false};
  for (const Shape& s : kShapes) {
    EXPECT_EQ(operator_saved(operator_of(s, kPlain)), size_t(documented_saved(s)));
    const int64_t means = 2 * 4 * s.batch * s.heads_kv * s.dim;
    EXPECT_EQ(operator_saved(operator_of(s)), size_t(documented_saved(s) + means));
    // Two payloads keep q and k twice, each with a scale for 32 elements.
    const Recipe two{.block = MxBlock::row32, .block_col = MxBlock::col32, .smooth_k = false, .smooth_v = false};
    const int64_t elements = s.tokens() * (2 * s.heads_q + 3 * s.heads_kv) * s.dim;
    EXPECT_EQ(operator_saved(operator_of(s, two)), size_t(elements + elements / 32 + 5 * s.tokens() * s.heads_q));
  }
}

// With out, which both keep: 0.63 of BF16 attention with a key head for each query head, 0.70 with one for four.
TEST(Memory, OfBf16AttentionIsAsDocumented) {
  const auto share = [](const Shape& s) {
    const double out = 2.0 * double(s.tokens() * s.heads_q * s.dim);
    const double bf16 =
        2.0 * double(s.tokens() * (s.heads_q + 2 * s.heads_kv) * s.dim) + 4.0 * double(s.tokens() * s.heads_q);
    return (double(operator_saved(operator_of(s))) + out) / (bf16 + out);
  };
  EXPECT_NEAR(share({4, 4096, 16, 16, 128}), 0.63, 0.005);
  EXPECT_NEAR(share({4, 4096, 16, 4, 128}), 0.70, 0.005);
  EXPECT_NEAR(share({4, 4096, 32, 32, 64}), 0.63, 0.005);
}

#if MXFLASH_CUDA  // what the library has of a card
// A row of a query head: Q, Q^T, dO, dO^T, its dq sum, and 12.3 bytes of statistics. A key of a key head: K, V, K^T.
// What an SM empties its sums into, where a key meets more than 2048 rows. Tables and counters are small.
TEST(Memory, WorkspaceOfTheSm90BackwardIsAsDocumented) {
  for (const Shape& s : kShapes) {
    for (const Dtype accum : {Dtype::f32, Dtype::f16}) {
      const auto mx = [&](int64_t heads) {
        return make_mx_tensor(nullptr, nullptr, Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, s.tokens(), heads,
                              s.dim, s.seq());
      };
      const AttentionBwd args{.q = mx(s.heads_q),
                              .k = mx(s.heads_kv),
                              .v = mx(s.heads_kv),
                              .dout = mx(s.heads_q),
                              .out = {},
                              .lse = {},
                              .dq = {},
                              .dq_accum = accum,
                              .seq_q = s.seq(),
                              .seq_k = s.seq()};
      size_t size = 0;
      bwd_sm90::Call(args, nullptr, &size);
      const int64_t sum = accum == Dtype::f16 ? 2 : 4;
      const double documented = double(s.tokens()) * (double(s.heads_q) * (double((4 + sum) * s.dim) + 12.3) +
                                                      double(s.heads_kv * 3 * s.dim));
      const bool empties = s.seqlen * s.heads_q / s.heads_kv > 2048;
      const double sums = empties ? double(multiprocessor_count() * 1024 * s.dim) : 0;
      EXPECT_GE(double(size), 0.998 * documented + sums) << s.seqlen << ' ' << s.dim << ' ' << dtype_name(accum);
      EXPECT_LE(double(size), 1.002 * documented + sums + (1 << 20))
          << s.seqlen << ' ' << s.dim << ' ' << dtype_name(accum);
    }
  }
}
#endif

}  // namespace
}  // namespace mxflash
