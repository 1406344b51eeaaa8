// Bytes are exact, so these checks have no tolerance but for the fp32 sums of means and rotations.
//
// Two judges: the definition (kit/verify_bytes.h), and ref, for what the definition does not cover. Every operation
// also runs on another number of threads into memory filled with something else, which must not show.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>

#include "kit/call.h"
#include "kit/device_memory.h"
#include "kit/random.h"
#include "kit/text.h"
#include "kit/verify.h"
#include "kit/verify_bytes.h"
#include "mx/fp8.h"
#include "mx/rotation.h"
#include "mx/scale_layout.h"

namespace mxflash::kit {
namespace {

constexpr float kLargestInImage = 1e38f;

const char* block_name(MxBlock block) {
  return block == MxBlock::square32 ? "square32" : block == MxBlock::row32 ? "row32" : "col32";
}
const char* role_name(ImageRole role) {
  return role == ImageRole::query ? "query" : role == ImageRole::key ? "key" : "value";
}
const char* rule_name(MxRule rule) { return rule == MxRule::rceil ? "rceil" : "floor"; }

// Channels of one row, rotated by the definition of the Hadamard matrix: H_ij = (-1)^popcount(i & j) / sqrt(group).
std::vector<double> defined_rotation(const std::vector<double>& x, uint64_t seed) {
  const auto dim = int64_t(x.size()), group = rotation_group(dim);
  std::vector<double> y(x.size());
  for (int64_t i = 0; i < dim; ++i) {
    for (int64_t j = i / group * group; j < (i / group + 1) * group; ++j) {
      const bool minus = (std::popcount(uint64_t(i % group) & uint64_t(j % group)) % 2 == 1) != rotation_flips(seed, j);
      y[size_t(i)] += (minus ? -1 : 1) * x[size_t(j)] / std::sqrt(double(group));
    }
  }
  return y;
}

// Means, rotation and the second copy. The first two are fp32 sums of at most 288 terms, so the definition judges them
// to 2^-15 of the largest value; their bits are judged by ref.
std::string verify_smooth_rotate(const std::string& backend, const Place& p) {
  Random random(12, uint64_t(p.dim));
  std::vector<float> x(p.size());
  fill_normal(random, x);
  add_random_mean(random, x, p.heads * p.dim, 3);
  const Input in = make_input(x, Dtype::bf16);
  std::vector<float> mean(size_t(p.seq.batch * p.heads * p.dim));
  const auto run = [&](const char* name, uint8_t fill) {
    std::ranges::fill(mean, float(fill));
    OwnedMx t = make_output(p, Dtype::e4m3, MxBlock::row32, ScaleLayout::linear, fill);
    const OwnedMx col = make_output(p, Dtype::e4m3, MxBlock::col32, ScaleLayout::linear, fill);
    const Tensor mean_view = make_tensor(mean.data(), Dtype::f32, p.seq.batch, p.heads, p.dim);
    require_ok(call(Quantize{.in = in.view(p.tokens, p.heads, p.dim),
                             .out = t.view,
                             .out_col = col.view,
                             .seq = p.seq,
                             .smooth = true,
                             .mean = mean_view,
                             .rotate = true,
                             .backend = name}));
    // The copies hold the same values, so one carries the other's bytes along into the comparison.
    t.data.insert(t.data.end(), col.data.begin(), col.data.end());
    t.scale.insert(t.scale.end(), col.scale.begin(), col.scale.end());
    for (const float x : mean) {
      for (int byte = 0; byte < 4; ++byte) t.data.push_back(uint8_t(std::bit_cast<uint32_t>(x) >> 8 * byte));
    }
    return t;
  };
  std::string failure;
  OwnedMx t = run_thrice(backend, run, failure);
  if (!failure.empty()) return failure;
  t.view.data.data = t.data.data();
  t.view.scale.data = t.scale.data();
  const std::vector<float> got = ref_dequantize(t.view, p.seq);
  for (int64_t item = 0; item < p.seq.batch * p.heads; ++item) {
    const int64_t b = item / p.heads, head = item % p.heads;
    const Sequence s = sequence_at(p.tokens, p.seq, b);
    const auto at = [&](int64_t i) { return size_t(((s.start + i) * p.heads + head) * p.dim); };
    std::vector<double> exact_mean(size_t(p.dim));
    for (int64_t i = 0; i < s.length; ++i) {
      for (size_t c = 0; c < size_t(p.dim); ++c) exact_mean[c] += double(in.values[at(i) + c]) / double(s.length);
    }
    for (int64_t i = 0; i < s.length; ++i) {
      std::vector<double> row(size_t(p.dim));
      for (size_t c = 0; c < row.size(); ++c) row[c] = double(in.values[at(i) + c]) - exact_mean[c];
      const std::vector<double> want = defined_rotation(row, kDefaultRotateSeed);
      for (size_t c = 0; c < want.size(); ++c) {
        // E4M3: 2^-4 of the value, and half of the smallest step: 2^-10 of a scale below amax / 224.
        const size_t first = c / 32 * 32, end = std::min(first + 32, want.size());
        double amax = 0;
        for (size_t n = first; n < end; ++n) amax = std::max(amax, std::abs(want[n]));
        const double bound = std::max(0x1p-4 * std::abs(want[c]), 0x1p-10 * amax / 224) + 0x1p-15 * (amax + 10);
        if (std::abs(double(got[at(i) + c]) - want[c]) <= bound) continue;
        return text("element [%lld, %d, %d] must be within %.3g of %.6g, got %.6g", static_cast<long long>(s.start + i),
                    int(head), int(c), bound, want[c], double(got[at(i) + c]));
      }
    }
  }
  return "";
}

// Between all layouts and from square32: the values stay the same.
std::string verify_convert_scales(const std::string& backend, const Place& p) {
  Random random(13, uint64_t(p.dim));
  std::vector<float> x(p.size());
  fill_normal(random, x);
  scale_rows_lognormal(random, x, p.heads * p.dim, 2);
  for (const MxBlock from : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
    const OwnedMx t = ref_quantize(x, p.tokens, p.heads, p.dim, p.seq, Dtype::e4m3, from);
    const std::vector<float> want = ref_dequantize(t.view, p.seq);
    for (const MxBlock to : {MxBlock::row32, MxBlock::col32}) {
      if (from != MxBlock::square32 && from != to) continue;
      std::string failure;
      const auto convert = [&](const OwnedMx& in, ScaleLayout layout) {
        OwnedMx result = run_thrice(
            backend,
            [&](const char* name, uint8_t fill) {
              OwnedMx out = make_output(p, Dtype::e4m3, to, layout, fill);
              out.data = in.data;
              out.view.data.data = out.data.data();
              require_ok(call(ConvertScales{.in = in.view, .out = out.view, .seq = p.seq, .backend = name}));
              return out;
            },
            failure);
        if (failure.empty() && ref_dequantize(result.view, p.seq) != want) failure = "values change";
        return result;
      };
      const OwnedMx atoms = convert(t, ScaleLayout::atom128x4);
      convert(atoms, ScaleLayout::linear);
      if (!failure.empty()) return failure + text(" (%s to %s, dim %d)", block_name(from), block_name(to), int(p.dim));
    }
  }
  return "";
}

// The first failure of any place. What the backend cannot do in some places is noted; in none, it is skipped.
std::string in_all_places(Report& report, const std::function<std::string(const Place&)>& body) {
  size_t done = 0;
  std::string refusal;
  for (const Place& p : places()) {
    try {
      if (std::string failure = body(p); !failure.empty()) return failure;
      ++done;
    } catch (const StatusError& error) {
      if (error.code != StatusCode::unsupported) throw;
      refusal = error.what();
      if (std::ranges::count(report.notes, refusal) == 0) report.notes.push_back(refusal);
    }
  }
  if (done > 0) return "";
  report.notes.clear();
  report.skipped = refusal;
  return "";
}

// What the quantizer counts, against ref.
std::string verify_stats(const std::string& backend, const Place& p) {
  const Input in = make_input(hard_values(p), Dtype::f32);
  const auto run = [&](const char* name, MxRule rule) {
    const OwnedMx t = make_output(p, Dtype::e4m3, MxBlock::square32, ScaleLayout::linear, 0);
    QuantizeStats stats{.amax = -1, .saturated = -1, .flushed = -1, .nonfinite = -1, .total = -1};
    require_ok(call(Quantize{.in = in.view(p.tokens, p.heads, p.dim),
                             .out = t.view,
                             .seq = p.seq,
                             .rule = rule,
                             .stats = &stats,
                             .backend = name}));
    return stats;
  };
  for (const MxRule rule : {MxRule::rceil, MxRule::floor}) {
    const QuantizeStats got = run(backend.c_str(), rule), want = run("ref", rule);
    if (got.amax == want.amax && got.saturated == want.saturated && got.flushed == want.flushed &&
        got.nonfinite == want.nonfinite && got.total == want.total) {
      continue;
    }
    return text("stats (amax %g, %lld saturated, %lld flushed, %lld nonfinite of %lld) must be those of ref: ",
                double(got.amax), static_cast<long long>(got.saturated), static_cast<long long>(got.flushed),
                static_cast<long long>(got.nonfinite), static_cast<long long>(got.total)) +
           text("%g, %lld, %lld, %lld, %lld (%s, dim %d)", double(want.amax), static_cast<long long>(want.saturated),
                static_cast<long long>(want.flushed), static_cast<long long>(want.nonfinite),
                static_cast<long long>(want.total), rule_name(rule), int(p.dim));
  }
  return "";
}

bool has(Operation op, const std::string& backend) { return std::ranges::count(available_backends(op), backend) > 0; }

}  // namespace

std::string verify_quantize(const std::string& backend, const Place& p, Dtype in_dtype, MxBlock block, MxRule rule,
                            Dtype element) {
  const Input in = make_input(hard_values(p), in_dtype);
  const auto run = [&](const char* name, ScaleLayout layout, uint8_t fill) {
    OwnedMx t = make_output(p, element, block, layout, fill);
    const Tensor x = in.view(p.tokens, p.heads, p.dim);
    require_ok(call(Quantize{.in = x, .out = t.view, .seq = p.seq, .rule = rule, .backend = name}));
    return t;
  };
  std::string failure;
  const OwnedMx t = run_thrice(
      backend, [&](const char* name, uint8_t fill) { return run(name, ScaleLayout::linear, fill); }, failure);
  if (failure.empty()) failure = judge_bytes(t, in.values, p, rule);
  if (failure.empty() && block != MxBlock::square32) {
    failure = judge_bytes(run(backend.c_str(), ScaleLayout::atom128x4, 0xEE), in.values, p, rule);
    if (!failure.empty()) failure = "layout atom128x4: " + failure;
  }
  return failure.empty() ? "" : failure + text(" (dim %d, %s)", int(p.dim), dtype_name(in_dtype));
}

// Images, given with the bytes that they are made of and without, against the definition and against ref.
std::string verify_image(const std::string& backend, const Place& p, ImageRole role, MxBlock block) {
  const int64_t size = image_size(role, p.tokens, p.heads, p.dim, p.seq);
  if (size == 0) return "";
  // Elements are fp32 once more on their way into an image: none may round to 2^128.
  std::vector<float> values = hard_values(p);
  for (float& value : values) {
    if (std::isfinite(value)) value = std::clamp(value, -kLargestInImage, kLargestInImage);
  }
  const Input in = make_input(values, Dtype::bf16);
  const auto run = [&](const char* name, bool alone, uint8_t fill) {
    OwnedMx t = make_output(p, Dtype::e4m3, block, ScaleLayout::linear, fill);
    std::vector<uint8_t> image(static_cast<size_t>(size), fill);
    MxTensor out = t.view;
    if (alone) out.data.data = out.scale.data = nullptr;
    require_ok(call(Quantize{.in = in.view(p.tokens, p.heads, p.dim),
                             .out = out,
                             .seq = p.seq,
                             .image = make_tensor(image.data(), Dtype::u8, size),
                             .image_role = role,
                             .backend = name}));
    if (!alone) image.insert(image.end(), t.data.begin(), t.data.end());
    t.data = std::move(image);
    return t;
  };
  std::string failure;
  const OwnedMx both = run_thrice(
      backend, [&](const char* name, uint8_t fill) { return run(name, false, fill); }, failure);
  if (failure.empty() && is_device_backend(backend)) {
    const OwnedMx alone = run(backend.c_str(), true, 0xA7);
    if (!std::equal(alone.data.begin(), alone.data.end(), both.data.begin())) failure = "image alone differs";
  }
  if (failure.empty()) {
    OwnedMx t = make_output(p, Dtype::e4m3, block, ScaleLayout::linear, 0);
    std::copy(both.data.begin() + size, both.data.end(), t.data.begin());
    t.scale = both.scale;
    t.view.scale.data = t.scale.data();
    failure = judge_image(both.data, role, ref_dequantize(t.view, p.seq), p);
  }
  return failure.empty() ? "" : failure + text(" (dim %d)", int(p.dim));
}

// All payloads under all scales, into every float dtype.
std::string verify_dequantize(const std::string& backend) {
  OwnedMx t = make_owned_mx(Dtype::e4m3, MxBlock::row32, ScaleLayout::linear, 256, 1, 256, {});
  for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
    t.view.data.dtype = element;
    for (size_t i = 0; i < t.data.size(); ++i) t.data[i] = uint8_t(i);
    for (size_t i = 0; i < t.scale.size(); ++i) t.scale[i] = uint8_t(i / 8);
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
      std::vector<uint8_t> got(t.data.size() * size_t(dtype_size(dtype)));
      require_ok(call(Dequantize{
          .in = t.view, .out = make_tensor(got.data(), dtype, 256, 1, 256), .seq = {}, .backend = backend.c_str()}));
      std::vector<float> want(t.data.size());
      for (size_t i = 0; i < want.size(); ++i) {
        const double payload = double(decode_fp8(t.data[i], fp8_format(element)));
        want[i] = t.scale[i / 32] == 255 ? std::nanf("") : float(std::ldexp(payload, t.scale[i / 32] - 127));
      }
      const Input same = make_input(want, dtype);
      for (size_t i = 0; i < want.size(); ++i) {
        const float x = load(got, i, dtype);
        if (std::isnan(x) ? std::isnan(same.values[i]) : std::memcmp(&x, &same.values[i], sizeof x) == 0) continue;
        return text("payload 0x%02X with scale %d must be %.9g in %s, got %.9g", t.data[i], t.scale[i / 32],
                    double(same.values[i]), dtype_name(dtype), double(x));
      }
    }
  }
  return "";
}

void verify_quantizers(const std::string& backend, const std::function<void(const Report&)>& done) {
  const auto check = [&](Operation op, const std::string& variant, const std::function<std::string(Report&)>& body) {
    if (!has(op, backend)) return;
    const auto start = std::chrono::steady_clock::now();
    Report report{.name = operation_name(op) + variant, .backend = backend};
    try {
      if (const std::string failure = body(report); !failure.empty()) report.failures.push_back(failure);
    } catch (const StatusError& error) {
      if (error.code != StatusCode::unsupported) throw;
      report.skipped = error.what();
    }
    report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    done(report);
  };
  for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
    for (const MxRule rule : {MxRule::rceil, MxRule::floor}) {
      for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
        const std::string variant = text("_%s_%s_%s", block_name(block), rule_name(rule), dtype_name(element));
        check(Operation::quantize, variant, [&](Report& report) {
          return in_all_places(report, [&](const Place& p) {
            for (const Dtype in : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
              const std::string failure = verify_quantize(backend, p, in, block, rule, element);
              if (!failure.empty()) return failure;
            }
            return std::string();
          });
        });
      }
    }
  }
  using Body = std::string (*)(const std::string&, const Place&);
  const auto everywhere = [&](Body body) {
    return [&backend, body](Report& report) {
      return in_all_places(report, [&](const Place& p) { return body(backend, p); });
    };
  };
  check(Operation::quantize, "_smooth_rotate", everywhere(verify_smooth_rotate));
  check(Operation::quantize, "_stats", everywhere(verify_stats));
  for (const ImageRole role : {ImageRole::query, ImageRole::key, ImageRole::value}) {
    for (const MxBlock block : {MxBlock::square32, MxBlock::row32, MxBlock::col32}) {
      if (backend != "ref" && !is_device_backend(backend)) continue;  // others write none
      check(Operation::quantize, text("_image_%s_%s", role_name(role), block_name(block)), [&](Report& report) {
        return in_all_places(report, [&](const Place& p) { return verify_image(backend, p, role, block); });
      });
    }
  }
  check(Operation::dequantize, "", [&](Report&) { return verify_dequantize(backend); });
  check(Operation::convert_scales, "", everywhere(verify_convert_scales));
  check(Operation::rmsnorm_quantize, "", everywhere(verify_rmsnorm));
  check(Operation::rmsnorm_bwd, "", everywhere(verify_rmsnorm_bwd));
  check(Operation::gemm_quantize, "", [&](Report& report) {
    return in_all_places(report, [&](const Place& p) { return verify_gemm(backend, p, 96); });
  });
}

}  // namespace mxflash::kit
