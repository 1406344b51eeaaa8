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
#include "mx/operand_image.h"

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

// Sequence b of a place, with its first row on the padded token axis; padded_rows is the length of that axis.
struct PlacedSequence {
  int64_t start, length, padded_start;
};
PlacedSequence sequence(const Place& p, int64_t b) {
  const int64_t start = p.cu[size_t(b)], length = p.cu[size_t(b) + 1] - start;
  return {start, length, p.seq.cu_seqlens ? (start + 128 * b) / 128 * 128 : 0};
}
int64_t padded_rows(const Place& p) {
  if (!p.seq.cu_seqlens) return (p.tokens + 127) / 128 * 128;
  return (p.tokens + 128 * p.seq.batch) / 128 * 128;
}

// Where the scale of the block at (padded row, channel) lies: docs/format.md, once more.
size_t defined_scale_offset(const MxTensor& t, const Place& p, int64_t head, int64_t row, int64_t channel) {
  const int64_t rows = padded_rows(p), cols = (p.dim + 31) / 32;
  if (t.layout == ScaleLayout::linear) {
    if (t.block == MxBlock::row32) return size_t((head * rows + row) * cols + channel / 32);
    if (t.block == MxBlock::col32) return size_t((head * rows / 32 + row / 32) * p.dim + channel);
    return size_t((head * rows / 32 + row / 32) * cols + channel / 32);
  }
  // Atoms of 128 rows x 4 blocks, 512 bytes; col32 has channels as rows, and blocks along the tokens.
  const bool transposed = t.block == MxBlock::col32;
  const int64_t r = transposed ? channel : row, block = transposed ? row / 32 : channel / 32;
  const int64_t down = transposed ? (p.dim + 127) / 128 : rows / 128, across = transposed ? rows / 128 : (cols + 3) / 4;
  const int64_t atom = (head * down + r / 128) * across + block / 4;
  return size_t(atom * 512 + r % 32 * 16 + r % 128 / 32 * 4 + block % 4);
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
  const int64_t block_rows = t.view.block == MxBlock::row32 ? 1 : 32,
                block_cols = t.view.block == MxBlock::col32 ? 1 : 32;
  std::vector<size_t> at;
  std::vector<double> values;
  const auto judge_block = [&](const PlacedSequence& s, int64_t head, int64_t i, int64_t c) -> std::string {
    at.clear();
    values.clear();
    for (int64_t r = i; r < std::min(i + block_rows, s.length); ++r) {
      for (int64_t col = c; col < std::min(c + block_cols, p.dim); ++col) {
        at.push_back(size_t(((s.start + r) * p.heads + head) * p.dim + col));
        values.push_back(double(x[at.back()]));
      }
    }
    const uint8_t got = t.scale[defined_scale_offset(t.view, p, head, s.padded_start + i, c)];
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
    const PlacedSequence s = sequence(p, item / p.heads);
    for (int64_t i = 0; i < s.length; i += block_rows) {
      for (int64_t c = 0; c < p.dim; c += block_cols) {
        if (std::string failure = judge_block(s, item % p.heads, i, c); !failure.empty()) return failure;
      }
    }
  }
  return "";
}

std::string judge_image(const std::vector<uint8_t>& image, ImageRole role, const std::vector<float>& x,
                        const Place& p) {
  const ImageShape shape = ImageShape::of(role, padded_rows(p), p.heads, p.dim);
  const Fp8Format format = fp8_format(Dtype::e4m3);
  const int64_t tile = image_scale_tokens(role);
  std::vector<uint8_t> want(static_cast<size_t>(shape.size()));
  for (int64_t item = 0; item < p.seq.batch * p.heads; ++item) {
    const PlacedSequence s = sequence(p, item / p.heads);
    const int64_t head = item % p.heads;
    for (int64_t first = 0; first < s.length; first += tile) {
      std::vector<double> finite;
      const auto for_each = [&](auto body) {
        for (int64_t i = first; i < std::min(first + tile, s.length); ++i) {
          for (int64_t c = 0; c < p.dim; ++c) {
            body(i, c, double(x[size_t(((s.start + i) * p.heads + head) * p.dim + c)]));
          }
        }
      };
      for_each([&](int64_t, int64_t, double value) {
        if (std::isfinite(value)) finite.push_back(value);
      });
      const uint8_t scale = defined_scale(finite, format, MxRule::rceil);
      want[size_t(shape.scale_offset(head, s.padded_start + first))] = scale;
      for_each([&](int64_t i, int64_t c, double value) {
        uint8_t& byte = want[size_t(shape.offset(head, s.padded_start + i, c))];
        byte = std::isfinite(value) ? defined_payload(value, scale, format) : kFp8Nan;
      });
    }
  }
  for (size_t i = 0; i < want.size(); ++i) {
    if (image[i] == want[i]) continue;
    return text("byte %lld of the image must be 0x%02X, got 0x%02X", static_cast<long long>(i), want[i], image[i]);
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
