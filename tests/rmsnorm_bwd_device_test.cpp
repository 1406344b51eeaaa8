// rmsnorm_bwd on a CUDA card: dx and dw within the bound of fp32 around fp64, the same bytes in every run, graphs.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <mxflash/rmsnorm.h>

#include <memory>
#include <vector>

#include "captured_graph.h"
#include "kit/device_memory.h"
#include "on_card.h"
#include "rmsnorm_bwd_call.h"

namespace mxflash {
namespace {

class RmsnormBwdDevice : public OnAnyCard {};

constexpr MxBlock kBlocks[] = {MxBlock::square32, MxBlock::row32, MxBlock::col32};

// Every way to divide a row among warps, at its ends and between.
TEST_F(RmsnormBwdDevice, Dims) {
  for (const int64_t dim : {8,    16,   40,   256,  264,  512,  520,  1008,  1024,  1032,  2048,
                            2064, 3072, 4096, 4104, 5120, 8192, 8208, 10240, 16376, 16384, 16400}) {
    for (const Dtype dy : {Dtype::bf16, Dtype::e4m3}) {
      check_gradient({.rows = 75, .dim = dim, .dy = dy, .seed = uint64_t(dim)}, card_backend());
      check_gradient({.rows = 75, .dim = dim, .dy = dy, .dh = Dtype::bf16, .in_place = true, .seed = uint64_t(dim)},
                     card_backend());
      if (HasFailure()) return;
    }
  }
}

TEST_F(RmsnormBwdDevice, DimsWithoutVectors) {
  for (const int64_t dim : {1, 2, 7, 31, 33, 100, 1001, 4097}) {
    for (const MxBlock block : kBlocks) {
      check_gradient({.rows = 40, .dim = dim, .dy = Dtype::e5m2, .block = block, .seed = uint64_t(dim)},
                     card_backend());
    }
  }
}

TEST_F(RmsnormBwdDevice, Rows) {
  for (const int64_t rows : {0, 1, 2, 7, 8, 9, 33, 128, 129, 500}) {
    for (const int64_t dim : {64, 1024, 2048, 4096, 8192})
      check_gradient({.rows = rows, .dim = dim, .dx = Dtype::bf16}, card_backend());
  }
}

// More parts than a card runs at a time, so that CTAs take several, and the ring of stages goes round.
TEST_F(RmsnormBwdDevice, ManyRows) {
  for (const int64_t dim : {256, 1024, 2048, 4096, 8192, 16384}) {
    GradientCase c{.rows = (int64_t(7) << 20) / dim + 17, .dim = dim, .seed = uint64_t(dim)};
    check_gradient(c, card_backend());
    c.dh = Dtype::bf16;
    c.dy = Dtype::e4m3;
    c.block = MxBlock::row32;
    check_gradient(c, card_backend());
    if (HasFailure()) return;
  }
}

TEST_F(RmsnormBwdDevice, BlocksLayoutsAndSequences) {
  const std::vector<std::vector<int32_t>> all = {
      {}, {0, 300}, {0, 0, 0, 5, 5}, {0, 31, 63, 64, 200, 201, 300}, {0, 129, 129, 257}};
  for (const std::vector<int32_t>& cu : all) {
    for (const MxBlock block : kBlocks) {
      for (const ScaleLayout layout : {ScaleLayout::linear, ScaleLayout::atom128x4}) {
        if (block == MxBlock::square32 && layout == ScaleLayout::atom128x4) continue;
        for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
          check_gradient({.rows = 320,
                          .dim = 592,
                          .cu_seqlens = cu,
                          .batch = cu.empty() ? 4 : 1,
                          .dy = element,
                          .block = block,
                          .layout = layout},
                         card_backend());
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(RmsnormBwdDevice, RandomCalls) {
  for (uint64_t seed = 1; seed <= 150 && !HasFailure(); ++seed)
    check_gradient(random_gradient_case(seed), card_backend());
}

TEST_F(RmsnormBwdDevice, TwiceGivesTheSameBytes) {
  for (const Dtype dy : {Dtype::bf16, Dtype::e4m3, Dtype::f32}) {
    GradientCall call({.rows = 3000, .dim = 4096, .dy = dy});
    const GradientCall::Result first = call.run(card_backend());
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(call.run(card_backend()) == first);
  }
}

// Captured once, replayed with other lengths.
TEST_F(RmsnormBwdDevice, GraphsTakeOtherLengths) {
  constexpr int64_t kRows = 700, kDim = 1024;
  const std::vector<std::vector<int32_t>> lengths = {{0, 100, 400, 700}, {0, 0, 1, 33}, {0, 333, 333, 650}};
  const kit::DeviceStream stream;
  // Scales of sequences that have moved: any bytes are scales.
  GradientCall any({.rows = kRows, .dim = kDim, .cu_seqlens = lengths[0], .dy = Dtype::e4m3});
  RmsnormBwd host = any.args(card_backend()), device = host;
  std::vector<uint8_t> payload(size_t(kRows * kDim), 0x39), scale(size_t(host.dy_mx.scale.numel()), 126);
  for (size_t i = 0; i < scale.size(); ++i) scale[i] = uint8_t(124 + i % 7);
  host.dy_mx.data.data = payload.data();
  host.dy_mx.scale.data = scale.data();
  std::vector<uint16_t> h(size_t(kRows * kDim));
  std::vector<float> rstd(size_t(kRows), 0.75f), dw(static_cast<size_t>(kDim));
  for (size_t i = 0; i < h.size(); ++i) h[i] = uint16_t(0x3F00 + i % 251);
  host.h.data = h.data();
  host.rstd.data = rstd.data();
  std::vector<uint16_t> dx(h.size());

  const auto upload = [&](const void* from, size_t size) {
    auto buffer = std::make_unique<kit::DeviceBuffer>(size);
    buffer->upload(from, size, stream.get());
    return buffer;
  };
  const auto d_h = upload(h.data(), 2 * h.size()), d_rstd = upload(rstd.data(), 4 * rstd.size());
  const auto d_weight = upload(host.weight.data, size_t(kDim * dtype_size(host.weight.dtype)));
  const auto d_payload = upload(payload.data(), payload.size()), d_scale = upload(scale.data(), scale.size());
  const auto d_cu = upload(lengths[0].data(), 16);
  const kit::DeviceBuffer d_dx(2 * h.size()), d_dw(4 * dw.size());
  device = host;
  device.h.data = d_h->data();
  device.weight.data = d_weight->data();
  device.rstd.data = d_rstd->data();
  device.dy_mx.data.data = d_payload->data();
  device.dy_mx.scale.data = d_scale->data();
  device.dx = make_tensor(d_dx.data(), Dtype::bf16, kRows, kDim);
  device.dw = make_tensor(d_dw.data(), Dtype::f32, kDim);
  device.seq.cu_seqlens = static_cast<const int32_t*>(d_cu->data());
  for (Tensor* t :
       {&device.h, &device.weight, &device.rstd, &device.dy_mx.data, &device.dy_mx.scale, &device.dx, &device.dw}) {
    t->device.type = DeviceType::cuda;
  }
  device.workspace_size = rmsnorm_bwd_workspace(device);
  const kit::DeviceBuffer workspace(device.workspace_size);
  device.workspace = workspace.data();

  const CapturedGraph graph([&](Stream on) { kit::require_ok(rmsnorm_bwd(device, on)); });
  for (const std::vector<int32_t>& cu : lengths) {
    d_cu->upload(cu.data(), 16, stream.get());
    graph.replay();
    d_dx.download(dx.data(), 0, 2 * dx.size(), stream.get());
    d_dw.download(dw.data(), 0, 4 * dw.size(), stream.get());
    host.seq.cu_seqlens = cu.data();
    EXPECT_EQ(kit::judge(kit::exact_rmsnorm_bwd(host), make_tensor(dx.data(), Dtype::bf16, kRows, kDim),
                         make_tensor(dw.data(), Dtype::f32, kDim)),
              "");
  }
}

}  // namespace
}  // namespace mxflash
