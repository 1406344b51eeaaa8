#include "kit/verify_bytes.h"

#include <mxflash/backend.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "kit/cases.h"
#include "kit/random.h"
#include "kit/text.h"
#include "mx/float16.h"
#include "mx/fp8.h"
#include "mx/scale_layout.h"

namespace mxflash::kit {
namespace {

uint8_t defined_scale(const std::vector<double>& block, const Fp8Format& f, MxRule rule) {
  const double max_element = double(std::bit_cast<float>(f.max_bits));
  double amax = 0;
  for (const double x : block) {
    if (!std::isfinite(x)) return 255;
    amax = std::max(amax, std::abs(x));
  }
  if (amax == 0) return 0;
  int e = -127;
  if (rule == MxRule::floor) {
    e = std::max(e, std::ilogb(amax) - f.max_exponent);
  } else {
    while (amax > std::ldexp(max_element, e)) ++e;
  }
  return uint8_t(e + 127);
}

// The nearest code, the even one of two that are equally near; codes of one sign are in the order of their values.
uint8_t defined_payload(double x, uint8_t scale, const Fp8Format& f) {
  if (scale == 255) return kFp8Nan;
  const double y = std::ldexp(std::abs(x), 127 - scale);
  uint8_t code = 0;
  while (code < f.max_code) {
    const double middle = (double(decode_fp8(code, f)) + double(decode_fp8(uint8_t(code + 1), f))) / 2;
    if (y < middle || (y == middle && code % 2 == 0)) break;
    ++code;
  }
  return uint8_t(code | (std::signbit(x) ? 0x80 : 0));
}

}  // namespace

Place::Place(const std::vector<int32_t>& seqlens, int32_t slack_tokens, int64_t num_heads, int64_t head_dim)
    : lens(seqlens),
      cu(cu_seqlens(lens)),
      slack(slack_tokens),
      tokens(cu.back() + slack),
      heads(num_heads),
      dim(head_dim) {
  if (lens.size() == 1 && slack == 0) return;  // the default: one sequence of all tokens
  seq = {.cu_seqlens = cu.data(), .batch = int32_t(lens.size()), .max_seqlen = *std::ranges::max_element(lens)};
}

const std::list<Place>& places() {
  static const std::list<Place> all = [] {
    std::list<Place> list;
    list.emplace_back(std::vector{64}, 0, 2, 128);
    list.emplace_back(std::vector{0, 1, 31, 33, 129, 32}, 0, 2, 64);
    list.emplace_back(std::vector{97, 160}, 37, 1, 40);
    list.emplace_back(std::vector{100}, 0, 1, 8);
    list.emplace_back(std::vector{65}, 3, 3, 256);
    list.emplace_back(std::vector{33, 2}, 1, 1, 328);
    return list;
  }();
  return all;
}

float load(const std::vector<uint8_t>& bytes, size_t i, Dtype dtype) {
  float x = 0;
  uint16_t half = 0;
  if (dtype == Dtype::f32) {
    std::memcpy(&x, &bytes[4 * i], sizeof x);
    return x;
  }
  std::memcpy(&half, &bytes[2 * i], sizeof half);
  return dtype == Dtype::bf16 ? decode_bf16(half) : decode_f16(half);
}
Input make_input(std::vector<float> x, Dtype dtype) {
  Input in{.values = std::move(x), .bytes = {}, .dtype = dtype};
  in.bytes.resize(in.values.size() * size_t(dtype_size(dtype)));
  for (size_t i = 0; i < in.values.size(); ++i) {
    const uint16_t half = dtype == Dtype::bf16 ? encode_bf16(in.values[i]) : encode_f16(in.values[i]);
    if (dtype == Dtype::f32) std::memcpy(&in.bytes[4 * i], &in.values[i], 4);
    if (dtype != Dtype::f32) std::memcpy(&in.bytes[2 * i], &half, 2);
    in.values[i] = load(in.bytes, i, dtype);
  }
  return in;
}

std::vector<float> hard_values(const Place& p) {
  const int64_t row = p.heads * p.dim;
  Random random(11, uint64_t(p.dim));
  std::vector<float> x(p.size());
  fill_normal(random, x);
  scale_rows_lognormal(random, x, row, 2);
  for (int64_t t = 0; t < p.tokens; ++t) {
    float* values = x.data() + t * row;
    for (int64_t c = 0; c < row; ++c) {
      switch (t / 32 % 8) {
        case 1: values[c] = c / 32 % 2 ? 0.0f : -0.0f; break;
        case 2: values[c] *= 1e-41f; break;
        case 3: values[c] *= 1e37f; break;
        case 4: values[c] = float(c % 64 - 32) * 0.125f; break;  // exact values and ties
        default: break;
      }
    }
    if (t % 61 == 60) values[t % row] = t % 2 ? std::numeric_limits<float>::infinity() : std::nanf("");
  }
  return x;
}

std::string judge_bytes(const OwnedMx& t, const std::vector<float>& x, const Place& p, MxRule rule) {
  const Fp8Format format = fp8_format(t.view.data.dtype);
  const BlockShape block = block_shape(t.view.block);
  const int64_t padded = padded_token_count(p.tokens, p.seq);
  std::vector<size_t> at;
  std::vector<double> values;
  const auto judge_block = [&](const Sequence& s, int64_t head, int64_t i, int64_t c) -> std::string {
    at.clear();
    values.clear();
    for (int64_t r = i; r < std::min(i + block.rows, s.length); ++r) {
      for (int64_t col = c; col < std::min(c + block.cols, p.dim); ++col) {
        at.push_back(size_t(((s.start + r) * p.heads + head) * p.dim + col));
        values.push_back(double(x[at.back()]));
      }
    }
    const ScaleIndex index{head, (s.padded_start + i) / block.rows, c / block.cols};
    const uint8_t got = t.scale[size_t(scale_offset(t.view.block, t.view.layout, padded, p.dim, index))];
    const uint8_t want = defined_scale(values, format, rule);
    const long long token = s.start + i;
    if (got != want)
      return text("scale of block [%lld, %d, %d] must be %d, got %d", token, int(head), int(c), want, got);
    for (size_t n = 0; n < at.size(); ++n) {
      const uint8_t payload = defined_payload(values[n], want, format);
      if (t.data[at[n]] == payload) continue;
      return text("element %d of block [%lld, %d, %d], %.9g with scale %d, must be 0x%02X, got 0x%02X", int(n), token,
                  int(head), int(c), values[n], want, payload, t.data[at[n]]);
    }
    return "";
  };
  for (int64_t item = 0; item < p.seq.batch * p.heads; ++item) {
    const Sequence s = sequence_at(p.tokens, p.seq, item / p.heads);
    for (int64_t i = 0; i < s.length; i += block.rows) {
      for (int64_t c = 0; c < p.dim; c += block.cols) {
        if (std::string failure = judge_block(s, item % p.heads, i, c); !failure.empty()) return failure;
      }
    }
  }
  return "";
}

bool equal(const OwnedMx& a, const OwnedMx& b) { return a.data == b.data && a.scale == b.scale; }

OwnedMx make_output(const Place& p, Dtype element, MxBlock block, ScaleLayout layout, uint8_t fill) {
  OwnedMx t = make_owned_mx(element, block, layout, p.tokens, p.heads, p.dim, p.seq);
  std::ranges::fill(t.data, fill);
  std::ranges::fill(t.scale, fill);
  return t;
}

OwnedMx run_twice(const std::function<OwnedMx(uint8_t)>& run, std::string& failure) {
  const int32_t threads = num_threads();
  OwnedMx first = run(0x00);
  set_num_threads(threads > 1 ? 1 : 2);
  const OwnedMx second = run(0xEE);
  set_num_threads(threads);
  if (failure.empty() && !equal(first, second)) {
    failure = "depends on the number of threads, or on what the output held before";
  }
  return first;
}

OwnedMx run_thrice(const std::string& backend, const std::function<OwnedMx(const char*, uint8_t)>& run,
                   std::string& failure) {
  OwnedMx first = run_twice([&](uint8_t fill) { return run(backend.c_str(), fill); }, failure);
  if (failure.empty() && !equal(first, run("ref", 0x55))) failure = "bytes differ from those of ref";
  return first;
}

}  // namespace mxflash::kit
