#include "tools/bench_device.h"

#include <mxflash/rmsnorm.h>

#include <map>
#include <memory>
#include <utility>

#include "kit/random.h"
#include "kit/runner.h"
#include "mx/float16.h"

namespace mxflash::tools {

using kit::require_ok;

const Pool& pool(Source source) {
  static std::map<Source, Pool> pools;
  Pool& p = pools[source];
  if (!p.bits.empty()) return p;
  p.values.resize(kPoolSize);
  kit::Random random(3, uint64_t(source));
  kit::fill_normal(random, p.values);
  for (float& value : p.values) {
    p.bits.push_back(encode_bf16(value));
    value = decode_bf16(p.bits.back());
  }
  return p;
}

std::vector<DeviceWork> prepare_tokens(BenchOp op, const BenchShape& s, const std::string& backend, Memory& memory) {
  const std::vector<int32_t> lens = lens_q(s);
  const Jagged seq = memory.jagged(lens, s.jagged);
  const int64_t tokens = kit::sum_of(lens), heads = s.num_heads_q, dim = s.head_dim;
  const auto name = std::make_shared<std::string>(backend);
  const Stream stream = memory.stream();
  const Tensor x = memory.random_bf16(Source::q, tokens, heads, dim);
  const MxTensor mx = memory.mx(tokens, heads, dim, seq, true);
  const Quantize to_mx{.in = x, .out = mx, .seq = seq, .backend = name->c_str()};
  std::vector<DeviceWork> works;
  const auto add = [&](const char* mode, double bytes, std::function<Status()> run) {
    works.push_back({.mode = mode, .enqueue = [name, run] { require_ok(run()); }, .flops = 0, .bytes = bytes});
  };
  if (op == BenchOp::quantize) {
    add("square32", bytes_of(x) + bytes_of(mx), [=] { return quantize(to_mx, stream); });
    if (image_size(ImageRole::query, tokens, heads, dim, seq) == 0) return works;
    for (const auto& [mode, role] : {std::pair{"query_image", ImageRole::query}, {"value_image", ImageRole::value}}) {
      Quantize to_image = to_mx;
      to_image.out = memory.mx(tokens, heads, dim, seq, false);
      to_image.image = memory.image(role, tokens, heads, dim, seq);
      to_image.image_role = role;
      add(mode, bytes_of(x) + bytes_of(to_image.image), [=] { return quantize(to_image, stream); });
    }
  } else if (op == BenchOp::dequantize) {
    require_ok(quantize(to_mx, stream));
    const Dequantize back{.in = mx, .out = x, .seq = seq, .backend = name->c_str()};
    add("default", bytes_of(x) + bytes_of(mx), [=] { return dequantize(back, stream); });
  } else if (op == BenchOp::rmsnorm_quantize) {
    const int64_t hidden = s.hidden();
    MxTensor rows = memory.mx(tokens, 1, hidden, seq, true);
    Tensor flat = make_tensor(rows.data.data, Dtype::e4m3, tokens, hidden),
           in = make_tensor(x.data, Dtype::bf16, tokens, hidden);
    flat.device = in.device = rows.data.device;
    rows.data = flat;
    const RmsnormQuantize norm{.in = in,
                               .weight = memory.random_bf16(Source::weight, hidden),
                               .out = rows,
                               .rstd = memory.tensor(Dtype::f32, tokens),
                               .seq = seq,
                               .backend = name->c_str()};
    const double bytes = bytes_of(in) + bytes_of(norm.weight) + bytes_of(rows) + bytes_of(norm.rstd);
    add("default", bytes, [=] { return rmsnorm_quantize(norm, stream); });
  } else if (op == BenchOp::rmsnorm_bwd) {
    const int64_t hidden = s.hidden();
    const auto flat = [&](const Tensor& t) {
      Tensor rows = make_tensor(t.data, t.dtype, tokens, hidden);
      rows.device = t.device;
      return rows;
    };
    require_ok(quantize(to_mx, stream));
    MxTensor rows = memory.mx(tokens, 1, hidden, seq, true);  // not to_mx's: scales of one head are one behind another
    rows.data = flat(rows.data);
    RmsnormBwd norm{.h = flat(x),
                    .weight = memory.random_bf16(Source::weight, hidden),
                    .rstd = memory.tensor(Dtype::f32, tokens),
                    .dx = memory.tensor(Dtype::bf16, tokens, hidden),
                    .dw = memory.tensor(Dtype::f32, hidden),
                    .seq = seq,
                    .backend = name->c_str()};
    require_ok(rmsnorm_quantize(
        {.in = norm.h, .weight = norm.weight, .out = rows, .rstd = norm.rstd, .seq = seq, .backend = name->c_str()},
        stream));
    const double others =
        bytes_of(norm.h) + bytes_of(norm.weight) + bytes_of(norm.rstd) + bytes_of(norm.dx) + bytes_of(norm.dw);
    const auto add_bwd = [&](const char* mode, const Tensor& dy, const MxTensor& dy_mx, const Tensor& dh) {
      RmsnormBwd call = norm;
      call.dy = dy;
      call.dy_mx = dy_mx;
      call.dh = dh;
      call.workspace_size = rmsnorm_bwd_workspace(call);
      call.workspace = memory.buffer(call.workspace_size).data();
      const double bytes = others + (dy ? bytes_of(dy) : bytes_of(dy_mx)) + (dh ? bytes_of(dh) : 0);
      add(mode, bytes, [=] { return rmsnorm_bwd(call, stream); });
    };
    const Tensor dy = flat(memory.random_bf16(Source::k, tokens, heads, dim));
    add_bwd("from_bf16", dy, {}, {});
    add_bwd("from_bf16_dh", dy, {}, flat(memory.random_bf16(Source::v, tokens, heads, dim)));
    add_bwd("from_mxfp8", {}, rows, {});
  }
  return works;
}

}  // namespace mxflash::tools
