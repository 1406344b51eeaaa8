// The attention cases that tests, `mxflash check` and the benches share: regular (what people run), irregular (sizes
// that no tile divides), corner (empty, fully masked, or a row of docs/reports.md: A30, A35, A37, A40, A42, A43, A50).
// Each is small enough for the float64 oracle to take well below a second; the quick ones take a few seconds together.
#pragma once

#include <cstdint>
#include <ostream>
#include <string_view>
#include <vector>

#include "mxflash/attention.h"

namespace mxflash::kit {

// What q, k, v and dout look like; everything is N(0, 1) but for what is said. kit/operands.h makes them.
enum class Distribution : int32_t {
  normal = 0,
  outlier_channels,    // the first 4 channels of q and k times 6
  attention_sink,      // key 0 of every sequence draws every query, and its v is small
  peaky,               // q times 4
  constant,            // all logits equal: q and k share constants in half of the channels, q is 0 in the others
  wide_row_gradients,  // each row of dout times its own e^(2 N)
  mean_v,              // v plus a per-head, per-channel mean of 4 N
  negative_logits,     // every logit near -1000 / sqrt(head_dim), so that lse is very negative
};
inline constexpr int32_t kNumDistributions = 8;

constexpr const char* distribution_name(Distribution distribution) {
  switch (distribution) {
    case Distribution::normal: return "normal";
    case Distribution::outlier_channels: return "outlier_channels";
    case Distribution::attention_sink: return "attention_sink";
    case Distribution::peaky: return "peaky";
    case Distribution::constant: return "constant";
    case Distribution::wide_row_gradients: return "wide_row_gradients";
    case Distribution::mean_v: return "mean_v";
    case Distribution::negative_logits: return "negative_logits";
  }
  return "invalid";
}

struct AttentionCase {
  const char* name = "";                    // unique; letters, digits and underscores, so that it can name a test
  std::vector<int32_t> lens_q{}, lens_k{};  // one length a sequence; with shared_q lens_q has one entry
  int32_t num_heads_q = 1, num_heads_kv = 1;
  int32_t head_dim = 64, head_dim_v = 64;
  Mask mask{};
  bool shared_q = false;
  Distribution distribution = Distribution::normal;
  int32_t slack_q = 0, slack_k = 0;  // tokens after the last sequence; operands there are NaN
  bool with_dlse = false;            // a gradient reaches lse
  bool quick = false;
};

inline int64_t sum_of(const std::vector<int32_t>& lens) {
  int64_t sum = 0;
  for (int32_t len : lens) sum += len;
  return sum;
}
inline int32_t batch(const AttentionCase& c) { return int32_t(c.lens_k.size()); }
inline int64_t total_q(const AttentionCase& c) { return sum_of(c.lens_q) + c.slack_q; }
inline int64_t total_k(const AttentionCase& c) { return sum_of(c.lens_k) + c.slack_k; }
inline int64_t total_out(const AttentionCase& c) { return c.shared_q ? batch(c) * total_q(c) : total_q(c); }

// {0, lens[0], lens[0] + lens[1], ...}
inline std::vector<int32_t> cu_seqlens(const std::vector<int32_t>& lens) {
  std::vector<int32_t> cu{0};
  for (int32_t len : lens) cu.push_back(cu.back() + len);
  return cu;
}

// So that GoogleTest prints a case by its name.
inline void PrintTo(const AttentionCase& c, std::ostream* os) { *os << c.name; }

// Tables, not code: one or two lines a case.
// clang-format off
inline const std::vector<AttentionCase>& regular_cases() {
  constexpr Mask kCausal{.causal = true};
  static const std::vector<AttentionCase> cases = {
      {.name = "dense_d64", .lens_q = {256}, .lens_k = {256}, .num_heads_q = 2, .num_heads_kv = 2, .quick = true},
      {.name = "dense_d128", .lens_q = {256}, .lens_k = {256}, .num_heads_q = 2, .num_heads_kv = 2, .head_dim = 128,
       .head_dim_v = 128, .quick = true},
      {.name = "dense_batch_d128", .lens_q = {128, 128, 128}, .lens_k = {128, 128, 128}, .num_heads_q = 2,
       .num_heads_kv = 2, .head_dim = 128, .head_dim_v = 128},
      {.name = "causal_d64", .lens_q = {256}, .lens_k = {256}, .num_heads_q = 2, .num_heads_kv = 2, .mask = kCausal,
       .quick = true},
      {.name = "causal_d128", .lens_q = {256}, .lens_k = {256}, .num_heads_q = 2, .num_heads_kv = 2, .head_dim = 128,
       .head_dim_v = 128, .mask = kCausal, .quick = true},
      {.name = "causal_long_d128", .lens_q = {1024}, .lens_k = {1024}, .head_dim = 128, .head_dim_v = 128,
       .mask = kCausal},
      {.name = "dlse_d64", .lens_q = {128}, .lens_k = {128}, .num_heads_q = 2, .num_heads_kv = 2, .with_dlse = true,
       .quick = true},
      {.name = "gqa_8_2_d128", .lens_q = {128}, .lens_k = {128}, .num_heads_q = 8, .num_heads_kv = 2, .head_dim = 128,
       .head_dim_v = 128},
      {.name = "gqa_8_1_causal_d64", .lens_q = {128}, .lens_k = {128}, .num_heads_q = 8, .num_heads_kv = 1,
       .mask = kCausal, .quick = true},
      {.name = "mqa_cross_d128", .lens_q = {64}, .lens_k = {256}, .num_heads_q = 4, .num_heads_kv = 1, .head_dim = 128,
       .head_dim_v = 128},
      {.name = "cross_short_q_d128", .lens_q = {64}, .lens_k = {512}, .num_heads_q = 2, .num_heads_kv = 2,
       .head_dim = 128, .head_dim_v = 128},
      {.name = "cross_long_q_d64", .lens_q = {512}, .lens_k = {64}, .num_heads_q = 2, .num_heads_kv = 2},
      {.name = "cross_causal_d128", .lens_q = {128}, .lens_k = {384}, .num_heads_q = 2, .num_heads_kv = 2,
       .head_dim = 128, .head_dim_v = 128, .mask = kCausal},
      {.name = "window_left_d128", .lens_q = {384}, .lens_k = {384}, .head_dim = 128, .head_dim_v = 128,
       .mask = {.causal = true, .window_left = 127}},
      {.name = "shared_q_d128", .lens_q = {128}, .lens_k = {128, 128, 128}, .num_heads_q = 2, .num_heads_kv = 2,
       .head_dim = 128, .head_dim_v = 128, .shared_q = true},
      {.name = "outlier_channels_d128", .lens_q = {256}, .lens_k = {256}, .head_dim = 128, .head_dim_v = 128,
       .distribution = Distribution::outlier_channels, .quick = true},
      {.name = "attention_sink_d128", .lens_q = {256}, .lens_k = {256}, .head_dim = 128, .head_dim_v = 128,
       .mask = kCausal, .distribution = Distribution::attention_sink, .quick = true},
      {.name = "peaky_d128", .lens_q = {256}, .lens_k = {256}, .head_dim = 128, .head_dim_v = 128,
       .distribution = Distribution::peaky, .quick = true},
      {.name = "constant_d128", .lens_q = {256}, .lens_k = {1024}, .head_dim = 128, .head_dim_v = 128,
       .distribution = Distribution::constant},
      {.name = "wide_row_gradients_d128", .lens_q = {256}, .lens_k = {256}, .head_dim = 128, .head_dim_v = 128,
       .distribution = Distribution::wide_row_gradients, .quick = true},
      {.name = "mean_v_d128", .lens_q = {256}, .lens_k = {256}, .head_dim = 128, .head_dim_v = 128,
       .distribution = Distribution::mean_v, .quick = true},
      {.name = "negative_logits_d128", .lens_q = {256}, .lens_k = {256}, .head_dim = 128, .head_dim_v = 128,
       .distribution = Distribution::negative_logits, .quick = true},
  };
  return cases;
}

inline const std::vector<AttentionCase>& irregular_cases() {
  constexpr Mask kCausal{.causal = true};
  static const std::vector<AttentionCase> cases = {
      {.name = "tail_97_causal_d128", .lens_q = {97}, .lens_k = {97}, .num_heads_q = 2, .num_heads_kv = 2,
       .head_dim = 128, .head_dim_v = 128, .mask = kCausal, .quick = true},
      {.name = "tail_31_d64", .lens_q = {31}, .lens_k = {31}, .quick = true},
      {.name = "tail_33_d64", .lens_q = {33}, .lens_k = {33}, .quick = true},
      {.name = "tail_129_d128", .lens_q = {129}, .lens_k = {129}, .head_dim = 128, .head_dim_v = 128, .quick = true},
      {.name = "tail_193_causal_d64", .lens_q = {193}, .lens_k = {193}, .mask = kCausal},
      {.name = "cross_33_161_gqa_causal_d128", .lens_q = {33}, .lens_k = {161}, .num_heads_q = 8, .num_heads_kv = 2,
       .head_dim = 128, .head_dim_v = 128, .mask = kCausal},
      {.name = "cross_161_33_d64", .lens_q = {161}, .lens_k = {33}, .num_heads_q = 2, .num_heads_kv = 1},
      {.name = "more_queries_than_keys_causal_d64", .lens_q = {161}, .lens_k = {70}, .num_heads_q = 2,
       .num_heads_kv = 2, .mask = kCausal, .with_dlse = true, .quick = true},
      {.name = "jagged_d64", .lens_q = {0, 1, 31, 33, 129}, .lens_k = {0, 1, 31, 33, 129}, .num_heads_q = 2,
       .num_heads_kv = 2, .quick = true},
      {.name = "jagged_causal_gqa_d128", .lens_q = {40, 1, 77}, .lens_k = {40, 129, 77}, .num_heads_q = 4,
       .num_heads_kv = 1, .head_dim = 128, .head_dim_v = 128, .mask = kCausal},
      {.name = "jagged_cross_d64", .lens_q = {1, 0, 65, 3, 128, 31}, .lens_k = {1, 7, 33, 0, 128, 200},
       .num_heads_q = 2, .num_heads_kv = 2, .with_dlse = true},
      {.name = "jagged_window_d128", .lens_q = {129, 33, 200}, .lens_k = {129, 65, 100}, .head_dim = 128,
       .head_dim_v = 128, .mask = {.window_left = 17, .window_right = 5}},
      {.name = "jagged_slack_d64", .lens_q = {144, 288, 12}, .lens_k = {144, 288, 12}, .slack_q = 2, .slack_k = 37},
      {.name = "shared_q_jagged_d64", .lens_q = {65}, .lens_k = {64, 0, 1, 200, 33}, .num_heads_q = 2,
       .num_heads_kv = 2, .shared_q = true, .quick = true},
      {.name = "shared_q_jagged_causal_gqa_d128", .lens_q = {40}, .lens_k = {97, 0, 40, 20}, .num_heads_q = 4,
       .num_heads_kv = 2, .head_dim = 128, .head_dim_v = 128, .mask = kCausal, .shared_q = true, .with_dlse = true},
      {.name = "head_dim_8", .lens_q = {100}, .lens_k = {100}, .head_dim = 8, .head_dim_v = 8, .quick = true},
      {.name = "head_dim_40", .lens_q = {100}, .lens_k = {100}, .head_dim = 40, .head_dim_v = 40, .mask = kCausal,
       .quick = true},
      {.name = "head_dim_72", .lens_q = {100}, .lens_k = {100}, .head_dim = 72, .head_dim_v = 72},
      {.name = "head_dim_80", .lens_q = {100}, .lens_k = {130}, .head_dim = 80, .head_dim_v = 80},
      {.name = "head_dim_96_window", .lens_q = {130}, .lens_k = {130}, .num_heads_q = 2, .num_heads_kv = 1,
       .head_dim = 96, .head_dim_v = 96, .mask = {.window_left = 17, .window_right = 5}},
      {.name = "head_dim_64_128", .lens_q = {200}, .lens_k = {330}, .head_dim = 64, .head_dim_v = 128,
       .mask = {.causal = true}},
      {.name = "head_dim_128_64", .lens_q = {200}, .lens_k = {330}, .head_dim = 128, .head_dim_v = 64},
      {.name = "head_dim_40_96", .lens_q = {130}, .lens_k = {300}, .head_dim = 40, .head_dim_v = 96},
      {.name = "window_700_long", .lens_q = {1500}, .lens_k = {1500}, .mask = {.window_left = 700, .window_right = 40}},
      {.name = "head_dim_192_128", .lens_q = {129}, .lens_k = {129}, .num_heads_q = 2, .num_heads_kv = 2,
       .head_dim = 192, .head_dim_v = 128, .mask = kCausal, .quick = true},
      {.name = "head_dim_64_256", .lens_q = {65}, .lens_k = {97}, .head_dim = 64, .head_dim_v = 256},
      {.name = "head_dim_256_jagged", .lens_q = {70, 129}, .lens_k = {70, 129}, .head_dim = 256, .head_dim_v = 256},
      {.name = "outlier_channels_jagged_d64", .lens_q = {97, 160}, .lens_k = {97, 160}, .mask = kCausal,
       .distribution = Distribution::outlier_channels},
      {.name = "attention_sink_jagged_d64", .lens_q = {97, 160}, .lens_k = {97, 160},
       .distribution = Distribution::attention_sink},
      {.name = "mean_v_jagged_d64", .lens_q = {97, 33, 160}, .lens_k = {97, 33, 160},
       .distribution = Distribution::mean_v},
      {.name = "wide_row_gradients_causal_d64", .lens_q = {193}, .lens_k = {193}, .mask = kCausal,
       .distribution = Distribution::wide_row_gradients},
  };
  return cases;
}

inline const std::vector<AttentionCase>& corner_cases() {
  constexpr Mask kCausal{.causal = true};
  static const std::vector<AttentionCase> cases = {
      {.name = "length_1_d64", .lens_q = {1}, .lens_k = {1}, .quick = true},
      {.name = "one_query_d128", .lens_q = {1}, .lens_k = {193}, .head_dim = 128, .head_dim_v = 128, .mask = kCausal,
       .quick = true},
      {.name = "one_key_d64", .lens_q = {97}, .lens_k = {1}, .quick = true},
      {.name = "no_query_d64", .lens_q = {0}, .lens_k = {40}, .quick = true},
      {.name = "no_key_d64", .lens_q = {40}, .lens_k = {0}, .with_dlse = true, .quick = true},
      {.name = "nothing_d64", .lens_q = {0}, .lens_k = {0}, .quick = true},
      {.name = "no_key_in_some_d64", .lens_q = {1, 2, 1, 2}, .lens_k = {0, 2, 0, 2}, .quick = true},
      {.name = "empty_sequences_first_d64", .lens_q = {0, 0, 1023}, .lens_k = {0, 1, 2045}},
      {.name = "sequences_of_one_64_d128", .lens_q = std::vector<int32_t>(64, 1), .lens_k = std::vector<int32_t>(64, 1),
       .num_heads_q = 2, .num_heads_kv = 2, .head_dim = 128, .head_dim_v = 128, .quick = true},
      {.name = "many_queries_one_key_causal_d32", .lens_q = {76, 34, 146}, .lens_k = {1, 1, 1}, .head_dim = 32,
       .head_dim_v = 32, .mask = kCausal, .quick = true},
      {.name = "causal_3_2_d64", .lens_q = {3}, .lens_k = {2}, .mask = kCausal, .with_dlse = true, .quick = true},
      {.name = "window_3_1", .lens_q = {129}, .lens_k = {129}, .mask = {.window_left = 3, .window_right = 1},
       .quick = true},
      {.name = "window_0_0", .lens_q = {129}, .lens_k = {129}, .mask = {.window_left = 0, .window_right = 0},
       .quick = true},
      {.name = "window_open_0", .lens_q = {129}, .lens_k = {129}, .mask = {.window_left = -1, .window_right = 0},
       .quick = true},
      {.name = "window_0_open", .lens_q = {129}, .lens_k = {129}, .mask = {.window_left = 0, .window_right = -1},
       .quick = true},
      {.name = "window_128_0", .lens_q = {129}, .lens_k = {129}, .mask = {.window_left = 128, .window_right = 0},
       .quick = true},
      {.name = "window_17_5", .lens_q = {129}, .lens_k = {129}, .mask = {.window_left = 17, .window_right = 5},
       .quick = true},
      {.name = "window_17_5_causal", .lens_q = {129}, .lens_k = {129},
       .mask = {.causal = true, .window_left = 17, .window_right = 5}},
      {.name = "window_3_1_cross", .lens_q = {129}, .lens_k = {40}, .mask = {.window_left = 3, .window_right = 1}},
      {.name = "window_3_1_cross_long_k", .lens_q = {40}, .lens_k = {129},
       .mask = {.window_left = 3, .window_right = 1}},
      {.name = "half_tile_negative_logits_d64", .lens_q = {704}, .lens_k = {704},
       .distribution = Distribution::negative_logits},
      {.name = "constant_long_d64", .lens_q = {8}, .lens_k = {16384}, .distribution = Distribution::constant},
      {.name = "queries_70000_d64", .lens_q = {70000}, .lens_k = {3}},
      {.name = "shared_q_no_key_d64", .lens_q = {33}, .lens_k = {0, 0}, .shared_q = true, .quick = true},
      {.name = "shared_q_one_token_d64", .lens_q = {1}, .lens_k = {129, 1, 31}, .num_heads_q = 8, .num_heads_kv = 1,
       .shared_q = true, .quick = true},
  };
  return cases;
}

// clang-format on

// The three lists, in this order.
inline std::vector<AttentionCase> attention_cases(bool quick_only = false) {
  std::vector<AttentionCase> result;
  for (const auto* list : {&regular_cases(), &irregular_cases(), &corner_cases()}) {
    for (const AttentionCase& c : *list) {
      if (c.quick || !quick_only) result.push_back(c);
    }
  }
  return result;
}

// Null if there is none of that name.
inline const AttentionCase* find_case(std::string_view name) {
  for (const auto* list : {&regular_cases(), &irregular_cases(), &corner_cases()}) {
    for (const AttentionCase& c : *list) {
      if (name == c.name) return &c;
    }
  }
  return nullptr;
}

}  // namespace mxflash::kit
