// Forward calls for backend sm100 without the chip: operands with a random scale in every block, everything outside of
// the sequences poisoned, and a judge in float64 that knows the recipe. Simulation and emulation share it.
#pragma once

#include <mxflash/attention.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/mask.h"
#include "kit/cases.h"
#include "kit/random.h"
#include "mx/e8m0.h"
#include "mx/float16.h"
#include "mx/scale_layout.h"

namespace mxflash::sm100_test {

struct ForwardCase {
  kit::AttentionCase shape;
  Dtype out_dtype = Dtype::f32;
  MxBlock token_block = MxBlock::square32, value_block = MxBlock::square32;
  ScaleLayout layout = ScaleLayout::linear;
  Dtype element = Dtype::e4m3;
  int32_t out_slack = 0;  // more elements between heads of out: 8 keep its rows aligned, 1 does not
  bool v_mean = false;
  bool equal_lengths = false;  // without cu_seqlens
  int32_t nan_value = -1;      // this key of sequence 0 has a NaN in v, channel nan_channel
  int32_t nan_key = -1;        // the blocks of k with this key of sequence 0 have scale 255
  int32_t nan_channel = 3;
};

// clang-format off
inline std::vector<ForwardCase> forward_cases() {
  constexpr Mask kCausal{.causal = true};
  const auto jagged = std::vector<int32_t>{0, 1, 31, 33, 129};
  return {
      {.shape = {.name = "dense", .lens_q = {256}, .lens_k = {384}, .head_dim = 128, .head_dim_v = 128},
       .equal_lengths = true},
      {.shape = {.name = "equal_batch", .lens_q = {130, 130, 130}, .lens_k = {200, 200, 200}, .num_heads_q = 2,
                 .num_heads_kv = 1, .mask = kCausal},
       .equal_lengths = true},
      {.shape = {.name = "causal", .lens_q = {512}, .lens_k = {512}, .head_dim = 128, .head_dim_v = 128,
                 .mask = kCausal}},
      {.shape = {.name = "tails", .lens_q = {300}, .lens_k = {417}, .head_dim = 128, .head_dim_v = 128}},
      {.shape = {.name = "causal_tails", .lens_q = {97}, .lens_k = {97}, .num_heads_q = 2, .num_heads_kv = 2,
                 .head_dim = 128, .head_dim_v = 128, .mask = kCausal},
       .out_dtype = Dtype::bf16},
      {.shape = {.name = "jagged", .lens_q = jagged, .lens_k = jagged, .num_heads_q = 2, .num_heads_kv = 2,
                 .head_dim = 128, .head_dim_v = 128, .slack_q = 5, .slack_k = 9}},
      {.shape = {.name = "jagged_causal_gqa", .lens_q = {1, 33, 0, 129, 31}, .lens_k = {31, 129, 33, 260, 0},
                 .num_heads_q = 4, .num_heads_kv = 1, .head_dim = 128, .head_dim_v = 128, .mask = kCausal},
       .out_dtype = Dtype::f16},
      {.shape = {.name = "more_queries_than_keys", .lens_q = {353}, .lens_k = {97}, .head_dim = 128,
                 .head_dim_v = 128, .mask = kCausal},
       .v_mean = true},
      {.shape = {.name = "shared_q", .lens_q = {70}, .lens_k = {129, 0, 33, 200}, .num_heads_q = 2, .num_heads_kv = 1,
                 .head_dim = 128, .head_dim_v = 128, .shared_q = true},
       .out_dtype = Dtype::bf16, .out_slack = 3},
      {.shape = {.name = "window", .lens_q = {300}, .lens_k = {500}, .head_dim = 128, .head_dim_v = 128,
                 .mask = {.window_left = 90, .window_right = 20}}},
      {.shape = {.name = "narrow_window", .lens_q = {400}, .lens_k = {400}, .head_dim = 128, .head_dim_v = 128,
                 .mask = {.window_left = 0, .window_right = 0}},
       .out_slack = 1},
      {.shape = {.name = "dense_d64", .lens_q = {256}, .lens_k = {300}, .num_heads_q = 2, .num_heads_kv = 2}},
      {.shape = {.name = "jagged_causal_d64", .lens_q = jagged, .lens_k = jagged, .num_heads_q = 2, .num_heads_kv = 1,
                 .mask = kCausal},
       .out_dtype = Dtype::bf16},
      {.shape = {.name = "d96_48", .lens_q = {130}, .lens_k = {200}, .head_dim = 96, .head_dim_v = 48}},
      {.shape = {.name = "rows_and_columns", .lens_q = {130, 40}, .lens_k = {150, 40}, .head_dim = 128,
                 .head_dim_v = 128},
       .token_block = MxBlock::row32, .value_block = MxBlock::col32},
      {.shape = {.name = "atoms", .lens_q = {130, 40}, .lens_k = {150, 300}, .head_dim = 128, .head_dim_v = 128,
                 .mask = kCausal},
       .token_block = MxBlock::row32, .value_block = MxBlock::col32, .layout = ScaleLayout::atom128x4},
      {.shape = {.name = "nan_value", .lens_q = {200}, .lens_k = {200}, .num_heads_q = 2, .num_heads_kv = 1,
                 .mask = kCausal},
       .out_dtype = Dtype::bf16, .v_mean = true, .nan_value = 131},
      {.shape = {.name = "nan_value_window", .lens_q = {40}, .lens_k = {140}, .head_dim = 128, .head_dim_v = 128,
                 .mask = {.window_left = 10, .window_right = 2}},
       .out_slack = 1, .nan_value = 130},
      {.shape = {.name = "nan_scale", .lens_q = {200}, .lens_k = {200}, .head_dim = 128, .head_dim_v = 128,
                 .mask = kCausal},
       .nan_key = 100},
      {.shape = {.name = "nan_scale_dense", .lens_q = {30}, .lens_k = {200}}, .nan_key = 100},
      {.shape = {.name = "e5m2", .lens_q = {130}, .lens_k = {150}, .num_heads_q = 1, .num_heads_kv = 1, .head_dim = 64,
                 .head_dim_v = 64},
       .element = Dtype::e5m2},
  };
}

// Head dimensions above 128: 192/128 and 256, and what is padded to them.
inline std::vector<ForwardCase> wide_cases() {
  constexpr Mask kCausal{.causal = true};
  const auto jagged = std::vector<int32_t>{0, 1, 31, 33, 129};
  return {
      {.shape = {.name = "d192_128", .lens_q = {256}, .lens_k = {384}, .head_dim = 192, .head_dim_v = 128},
       .equal_lengths = true},
      {.shape = {.name = "causal_tails_d192", .lens_q = {300}, .lens_k = {417}, .head_dim = 192, .head_dim_v = 128,
                 .mask = kCausal},
       .out_dtype = Dtype::bf16},
      {.shape = {.name = "jagged_causal_gqa_d192", .lens_q = jagged, .lens_k = {31, 129, 33, 260, 0},
                 .num_heads_q = 2, .num_heads_kv = 1, .head_dim = 192, .head_dim_v = 128, .mask = kCausal,
                 .slack_q = 5, .slack_k = 9},
       .out_dtype = Dtype::f16},
      {.shape = {.name = "shared_q_d176", .lens_q = {70}, .lens_k = {129, 0, 33}, .num_heads_q = 2, .num_heads_kv = 1,
                 .head_dim = 176, .head_dim_v = 48, .shared_q = true},
       .out_dtype = Dtype::bf16, .out_slack = 3},
      {.shape = {.name = "atoms_d192", .lens_q = {130, 40}, .lens_k = {150, 40}, .num_heads_q = 2, .num_heads_kv = 1,
                 .head_dim = 192, .head_dim_v = 128, .mask = {.window_left = 90, .window_right = 20}},
       .token_block = MxBlock::row32, .value_block = MxBlock::col32, .layout = ScaleLayout::atom128x4, .v_mean = true},
      {.shape = {.name = "e5m2_rows_d144", .lens_q = {40}, .lens_k = {150}, .head_dim = 144, .head_dim_v = 128},
       .token_block = MxBlock::row32, .value_block = MxBlock::col32, .element = Dtype::e5m2},
      {.shape = {.name = "nan_value_d192", .lens_q = {40}, .lens_k = {140}, .head_dim = 192, .head_dim_v = 128,
                 .mask = {.window_left = 10, .window_right = 2}},
       .out_slack = 1, .nan_value = 130},
      {.shape = {.name = "nan_key_d192", .lens_q = {40}, .lens_k = {140}, .head_dim = 192, .head_dim_v = 128,
                 .mask = kCausal},
       .nan_key = 139},
      {.shape = {.name = "d256", .lens_q = {256}, .lens_k = {384}, .head_dim = 256, .head_dim_v = 256},
       .equal_lengths = true},
      {.shape = {.name = "causal_tails_d256", .lens_q = {200}, .lens_k = {317}, .head_dim = 256, .head_dim_v = 256,
                 .mask = kCausal},
       .out_dtype = Dtype::bf16},
      {.shape = {.name = "jagged_causal_gqa_d256", .lens_q = jagged, .lens_k = {31, 129, 33, 260, 0},
                 .num_heads_q = 2, .num_heads_kv = 1, .head_dim = 256, .head_dim_v = 256, .mask = kCausal,
                 .slack_q = 5, .slack_k = 9},
       .out_dtype = Dtype::f16},
      {.shape = {.name = "shared_q_d224", .lens_q = {70}, .lens_k = {129, 0, 33}, .num_heads_q = 2, .num_heads_kv = 1,
                 .head_dim = 224, .head_dim_v = 208, .shared_q = true},
       .out_dtype = Dtype::bf16, .out_slack = 3},
      {.shape = {.name = "atoms_d256", .lens_q = {130, 40}, .lens_k = {150, 40}, .num_heads_q = 2, .num_heads_kv = 1,
                 .head_dim = 256, .head_dim_v = 256, .mask = {.window_left = 90, .window_right = 20}},
       .token_block = MxBlock::row32, .value_block = MxBlock::col32, .layout = ScaleLayout::atom128x4, .v_mean = true},
      {.shape = {.name = "e5m2_columns_d64_160", .lens_q = {40}, .lens_k = {150}, .head_dim = 64, .head_dim_v = 160},
       .token_block = MxBlock::row32, .value_block = MxBlock::col32, .element = Dtype::e5m2},
      {.shape = {.name = "atoms_d96_160", .lens_q = {40}, .lens_k = {150}, .num_heads_q = 2, .num_heads_kv = 2,
                 .head_dim = 96, .head_dim_v = 160},
       .token_block = MxBlock::row32, .value_block = MxBlock::col32, .layout = ScaleLayout::atom128x4},
      {.shape = {.name = "atoms_d208_64", .lens_q = {40}, .lens_k = {150}, .head_dim = 208, .head_dim_v = 64},
       .token_block = MxBlock::row32, .value_block = MxBlock::col32, .layout = ScaleLayout::atom128x4},
      {.shape = {.name = "nan_value_d256", .lens_q = {40}, .lens_k = {140}, .head_dim = 256, .head_dim_v = 256,
                 .mask = {.window_left = 10, .window_right = 2}},
       .out_dtype = Dtype::bf16, .nan_value = 130, .nan_channel = 200},
  };
}
// clang-format on

// Tokens outside of sequences hold 0x7F, scales of blocks without a token 0xFF.
class RandomOperand {
 public:
  RandomOperand(const std::vector<int32_t>& lens, int64_t tokens, int64_t heads, int64_t dim, const Jagged& seq,
                MxBlock block, ScaleLayout layout, Dtype element, int low, int high, kit::Random& random)
      : values(size_t(tokens * heads * dim), std::numeric_limits<double>::quiet_NaN()),
        payload(size_t(tokens * heads * dim) + 16, 0x7F),
        scale(size_t(scale_size(block, layout, tokens, heads, dim, seq)) + 16, 0xFF) {
    tensor = make_mx_tensor(payload.data(), scale.data(), element, block, layout, tokens, heads, dim, seq);
    const BlockShape shape = block_shape(block);
    const int64_t padded = padded_token_count(tokens, seq);
    for (int64_t b = 0; b < int64_t(lens.size()); ++b) {
      const Sequence s = sequence_at(tokens, seq, b);
      for (int64_t head = 0; head < heads; ++head) {
        for (int64_t t0 = 0; t0 < s.length; t0 += shape.rows) {
          for (int64_t c0 = 0; c0 < dim; c0 += shape.cols) {
            const auto byte = uint8_t(low + random.below(high - low + 1));
            const ScaleIndex at{head, (s.padded_start + t0) / shape.rows, c0 / shape.cols};
            scale[size_t(scale_offset(block, layout, padded, dim, at))] = byte;
            for (int64_t t = t0; t < std::min(t0 + shape.rows, s.length); ++t) {
              for (int64_t c = c0; c < std::min(c0 + shape.cols, dim); ++c) {
                const size_t i = size_t(((s.start + t) * heads + head) * dim + c);
                payload[i] = encode_fp8(float(random.normal()), fp8_format(element));
                values[i] = double(decode_fp8(payload[i], fp8_format(element))) * decode_e8m0_f64(byte);
              }
            }
          }
        }
      }
    }
  }

  void set_nan(int64_t token, int64_t channel) {
    const int64_t heads = tensor.data.shape[1], dim = tensor.data.shape[2];
    for (int64_t head = 0; head < heads; ++head) {
      payload[size_t((token * heads + head) * dim + channel)] = kFp8Nan;
      values[size_t((token * heads + head) * dim + channel)] = std::numeric_limits<double>::quiet_NaN();
    }
  }
  // square32, and a sequence that starts at token 0.
  void set_nan_scale(const Jagged& seq, int64_t token) {
    const int64_t heads = tensor.data.shape[1], dim = tensor.data.shape[2];
    const int64_t length = sequence_at(tensor.data.shape[0], seq, 0).length;
    const int64_t padded = padded_token_count(tensor.data.shape[0], seq);
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t c = 0; c < dim; ++c) {
        scale[size_t(scale_offset(tensor.block, tensor.layout, padded, dim, {head, token / 32, c / 32}))] = kE8m0Nan;
        for (int64_t t = token / 32 * 32; t < std::min(token / 32 * 32 + 32, length); ++t) {
          values[size_t((t * heads + head) * dim + c)] = std::numeric_limits<double>::quiet_NaN();
        }
      }
    }
  }

  std::vector<double> values;  // [tokens, heads, dim]
  std::vector<uint8_t> payload, scale;
  MxTensor tensor;
};

// A call with all its memory.
struct ForwardProblem {
  ForwardCase c;
  std::vector<int32_t> cu_q, cu_k;
  std::vector<RandomOperand> operands;  // q, k, v
  std::vector<float> mean;
  std::vector<uint8_t> out;  // bytes
  std::vector<float> lse;
  std::vector<uint8_t> row_exponent;
  AttentionFwd args;

  explicit ForwardProblem(const ForwardCase& of, uint64_t seed = 1) : c(of) {
    const kit::AttentionCase& s = c.shape;
    kit::Random random(seed);
    cu_q = kit::cu_seqlens(s.lens_q), cu_k = kit::cu_seqlens(s.lens_k);
    const auto longest = [](const std::vector<int32_t>& lens) { return *std::max_element(lens.begin(), lens.end()); };
    const int32_t batch = kit::batch(s);
    args.seq_k = c.equal_lengths ? Jagged{.batch = batch}
                                 : Jagged{.cu_seqlens = cu_k.data(), .batch = batch, .max_seqlen = longest(s.lens_k)};
    args.seq_q = s.shared_q        ? Jagged{}
                 : c.equal_lengths ? Jagged{.batch = batch}
                                   : Jagged{.cu_seqlens = cu_q.data(), .batch = batch, .max_seqlen = longest(s.lens_q)};
    operands.reserve(3);
    operands.emplace_back(s.lens_q, kit::total_q(s), s.num_heads_q, s.head_dim, args.seq_q, c.token_block, c.layout,
                          c.element, 124, 129, random);
    operands.emplace_back(s.lens_k, kit::total_k(s), s.num_heads_kv, s.head_dim, args.seq_k, c.token_block, c.layout,
                          c.element, 124, 129, random);
    operands.emplace_back(s.lens_k, kit::total_k(s), s.num_heads_kv, s.head_dim_v, args.seq_k, c.value_block, c.layout,
                          c.element, 122, 131, random);
    args.q = operands[0].tensor, args.k = operands[1].tensor, args.v = operands[2].tensor;
    if (c.nan_value >= 0) operands[2].set_nan(c.nan_value, c.nan_channel);
    if (c.nan_key >= 0) operands[1].set_nan_scale(args.seq_k, c.nan_key);
    const int64_t rows = kit::total_out(s);
    const int64_t size = c.out_dtype == Dtype::f32 ? 4 : 2;
    out.assign(size_t(rows * s.num_heads_q * (s.head_dim_v + c.out_slack) * size) + 16, 0xFF);  // NaN
    lse.assign(size_t(rows * s.num_heads_q), std::bit_cast<float>(0x7FC00001u));
    row_exponent.assign(size_t(rows * s.num_heads_q), 0xEE);
    args.out = make_tensor(out.data(), c.out_dtype, rows, s.num_heads_q, s.head_dim_v);
    args.out.stride[1] += c.out_slack;
    args.out.stride[0] = s.num_heads_q * args.out.stride[1];
    args.lse = make_tensor(lse.data(), Dtype::f32, s.num_heads_q, rows);
    args.row_exponent = make_tensor(row_exponent.data(), Dtype::u8, s.num_heads_q, rows);
    if (c.v_mean) {
      mean.resize(size_t(batch) * s.num_heads_kv * s.head_dim_v);
      kit::fill_normal(random, mean);
      args.v_mean = make_tensor(mean.data(), Dtype::f32, batch, s.num_heads_kv, s.head_dim_v);
    }
    args.mask = s.mask;
    args.shared_q = s.shared_q;
  }
  ForwardProblem(const ForwardProblem&) = delete;

  double out_at(int64_t row, int64_t head, int64_t channel) const {
    const int64_t i = row * args.out.stride[0] + head * args.out.stride[1] + channel;
    if (c.out_dtype == Dtype::f32) return double(reinterpret_cast<const float*>(out.data())[i]);
    const uint16_t bits = reinterpret_cast<const uint16_t*>(out.data())[i];
    return double(c.out_dtype == Dtype::bf16 ? decode_bf16(bits) : decode_f16(bits));
  }
};

// What the kernel may differ by from the recipe in float64, element by element.
struct Judge {
  static constexpr double kOffset = 8, kSlack = 0.8;
  static constexpr int kTile = 128;
  double p_error = 9.5e-5;      // of P before it is rounded, relative: the cubic's 7.5e-5, and fp32 scores
  double sum_error = 1e-5;      // of fp32 sums of products, relative to the sum of magnitudes
  double decision = 1e-4;       // of a maximum that is to move the reference or not, binades
  double worst = 0;             // error over bound
  int64_t rows = 0, loose = 0;  // rows whose reference could be either: any P may then be a step off

  // "" or what is wrong.
  std::string check(const ForwardProblem& problem);
};

inline double round_e4m3(double x) { return double(decode_fp8(encode_fp8(float(x), kE4m3), kE4m3)); }

inline std::string Judge::check(const ForwardProblem& problem) {
  const kit::AttentionCase& shape = problem.c.shape;
  const AttentionShape s = AttentionShape::of(problem.args);
  const double scale = double(float(s.softmax_scale * 1.44269504088896341));
  const double out_step = problem.c.out_dtype == Dtype::bf16 ? 0x1p-8 : problem.c.out_dtype == Dtype::f16 ? 0x1p-11 : 0;
  char text[200];
  const auto wrong = [&](const char* what, int64_t b, int64_t head, int64_t i, int64_t c, double got, double want,
                         double bound) {
    std::snprintf(text, sizeof text, "%s: %s of sequence %d, head %d, row %d, channel %d: %.9g, want %.9g +- %.3g",
                  shape.name, what, int(b), int(head), int(i), int(c), got, want, bound);
    return std::string(text);
  };
  std::vector<bool> covered(size_t(s.total_out), false);
  for (int64_t b = 0; b < s.batch; ++b) {
    const Sequence sq = s.query_sequence(b), sk = s.key_sequence(b), so = s.out_sequence(b);
    for (int64_t i = 0; i < sq.length; ++i) covered[size_t(so.start + i)] = true;
    for (int64_t head = 0; head < s.num_heads_q; ++head) {
      const int64_t kv_head = head / s.group;
      for (int64_t i = 0; i < sq.length; ++i) {
        ++rows;
        const double* q = &problem.operands[0].values[size_t(((sq.start + i) * s.num_heads_q + head) * s.head_dim)];
        const Range keys = visible_keys(problem.args.mask, i, i + 1, sq.length, sk.length);
        std::vector<double> score(size_t(keys.empty() ? 0 : keys.end - keys.first)), p(score.size()), step(p.size());
        for (size_t j = 0; j < score.size(); ++j) {
          const int64_t token = sk.start + keys.first + int64_t(j);
          const double* k = &problem.operands[1].values[size_t((token * s.num_heads_kv + kv_head) * s.head_dim)];
          double sum = 0;
          for (int64_t c = 0; c < s.head_dim; ++c) sum += q[c] * k[c];
          score[j] = sum * scale;
        }
        const int64_t row = so.start + i;
        const size_t at = size_t(head * s.total_out + row);
        if (std::any_of(score.begin(), score.end(), [](double x) { return std::isnan(x); })) {
          for (int64_t c = 0; c < s.head_dim_v; ++c) {
            const double got = problem.out_at(row, head, c);
            if (!std::isnan(got)) return wrong("out", b, head, i, c, got, NAN, 0);
          }
          if (!std::isnan(problem.lse[at])) return wrong("lse", b, head, i, 0, double(problem.lse[at]), NAN, 0);
          continue;
        }
        // The reference moves tile by tile.
        double reference = -INFINITY, top = -INFINITY, sum = 0, rounded = 0, rounded_step = 0;
        bool either = false;
        for (int64_t first = keys.first; first < keys.end;) {
          const int64_t end = std::min((first / kTile + 1) * kTile, keys.end);
          double tile_top = -INFINITY;
          for (int64_t j = first; j < end; ++j) tile_top = std::max(tile_top, score[size_t(j - keys.first)]);
          if (std::fabs(tile_top - reference - kSlack) < decision) either = true;
          if (tile_top - reference > kSlack) {
            const double factor = std::exp2(reference - tile_top);
            sum *= factor, rounded *= factor, rounded_step *= factor;
            for (int64_t j = keys.first; j < first; ++j)
              p[size_t(j - keys.first)] *= factor, step[size_t(j - keys.first)] *= factor;
            reference = tile_top;
          }
          top = std::max(top, tile_top);
          for (int64_t j = first; j < end; ++j) {
            const size_t at = size_t(j - keys.first);
            const double exact = std::exp2(score[at] - reference + kOffset);
            p[at] = round_e4m3(exact);
            step[at] = round_e4m3(exact * (1 + p_error)) - round_e4m3(exact * (1 - p_error));
            sum += exact, rounded += p[at], rounded_step += step[at];
          }
          first = end;
        }
        loose += either;
        if (either || problem.c.nan_value >= 0) {  // rows that are made once more do not round P
          for (size_t j = 0; j < p.size(); ++j) step[j] = std::max(p[j] / 8, std::exp2(-9.0)) * 2;
          rounded_step = 0;
          for (const double x : step) rounded_step += x;
        }
        for (int64_t c = 0; c < s.head_dim_v; ++c) {
          double total = 0, bound = 0, magnitude = 0;
          for (size_t j = 0; j < p.size(); ++j) {
            const int64_t token = sk.start + keys.first + int64_t(j);
            const double v = problem.operands[2].values[size_t((token * s.num_heads_kv + kv_head) * s.head_dim_v + c)];
            total += p[j] * v, bound += step[j] * std::fabs(v), magnitude += p[j] * std::fabs(v);
          }
          double want = 0;
          if (!p.empty()) {
            want = total / rounded;
            bound = (bound + std::fabs(want) * rounded_step + sum_error * magnitude) /
                    std::max(rounded - rounded_step, 1e-30);
            if (problem.c.v_mean) {
              const float mean = problem.mean[size_t((b * s.num_heads_kv + kv_head) * s.head_dim_v + c)];
              want += double(mean);
              bound += std::fabs(double(mean)) * 1e-6;
            }
            bound += (std::fabs(want) + bound) * out_step;
            if (problem.c.out_dtype == Dtype::f16) bound += 0x1p-25;
          }
          const double got = problem.out_at(row, head, c), error = std::fabs(got - want);
          if (std::isnan(want) && std::isnan(got)) continue;
          if (!(error <= bound)) return wrong("out", b, head, i, c, got, want, bound);
          if (bound > 0) worst = std::max(worst, error / bound);
        }
        const double got = double(problem.lse[at]);
        if (p.empty()) {
          if (got != -INFINITY) return wrong("lse", b, head, i, 0, got, -INFINITY, 0);
          if (problem.row_exponent[at] != 0)
            return wrong("row_exponent", b, head, i, 0, problem.row_exponent[at], 0, 0);
          continue;
        }
        const double log2_sum = std::log2(sum) - kOffset, lse = (reference + log2_sum) * std::log(2.0);
        const double lse_bound = p_error + 4e-7 * std::fabs(lse) + 2e-6;
        if (!(std::fabs(got - lse) <= lse_bound)) return wrong("lse", b, head, i, 0, got, lse, lse_bound);
        const double spare = reference + log2_sum - top, slack = 3e-4;
        const double low = std::max(0.0, std::floor(spare - slack)), high = std::max(0.0, std::floor(spare + slack));
        if (!(problem.row_exponent[at] >= low && problem.row_exponent[at] <= high)) {
          return wrong("row_exponent", b, head, i, 0, problem.row_exponent[at], low, high - low);
        }
      }
    }
  }
  // Rows of no sequence.
  for (int64_t row = 0; row < s.total_out; ++row) {
    if (covered[size_t(row)]) continue;
    for (int64_t head = 0; head < s.num_heads_q; ++head) {
      for (int64_t c = 0; c < s.head_dim_v; ++c) {
        const double got = problem.out_at(row, head, c);
        if (!(got == 0)) return wrong("out beside sequences", -1, head, row, c, got, 0, 0);
      }
      const double got = double(problem.lse[size_t(head * s.total_out + row)]);
      if (got != -INFINITY) return wrong("lse beside sequences", -1, head, row, 0, got, -INFINITY, 0);
    }
  }
  if (loose * 20 > rows + 40) return std::string(shape.name) + ": too many rows are judged loosely";
  return "";
}

}  // namespace mxflash::sm100_test
