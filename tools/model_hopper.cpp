// The sm90 forward as a pipeline: the method of `mxflash model` on a card that is at hand.
#include "tools/model_published.h"

namespace mxflash::tools {
namespace {

// What bench and nvidia-smi said of an H200 in one run of 900 launches, b1 h16 16384x16384 d128, power limited.
constexpr double kMeasuredPflops = 0.876, kMeasuredGhz = 1.82;
constexpr double kGemmShare = 0.70;  // of its nominal FP8 rate, that a product of 8192^3 reaches there (docs/hopper.md)

constexpr int kTiles = 60, kFirst = 20, kLast = 50, kGroups = 3, kStages = 2;

// Three consumers of 64 rows each; per tile of 128 keys S = Q K^T, then, 32 keys at a time, exponentials and O += P V.
// Instructions as in the SASS of Config<3, 128, 128>, a pass without masks: 499, of which 50 issue S, 290 are the
// maximum and the first quarter of exponentials, and about 50 each of the other quarters.
double cycles_of_a_tile(const Chip& chip) {
  const Counts issue{{"UMOV", 50}};
  const Counts maximum{{"FMNMX", 76}, {"FMUL", 71}, {"MUFU", 18}, {"FFMA", 16},
                       {"FADD", 19},  {"F2FP", 8},  {"SHFL", 4},  {"BRA", 78}};
  const Counts quarter{{"MUFU", 16}, {"FFMA", 16}, {"FADD", 19}, {"F2FP", 8}};
  // Every fourth tile out goes to a copy in shared memory: 4 bytes of 64 x 136, read and written.
  Work promotion;
  promotion[Unit::smem] = 2 * 4 * 64 * 136 / 4. / (chip.smem_bytes * chip.smem_share);
  promotion[Unit::issue] = 40;
  Pipeline pipeline(chip.sync);
  for (int g = 0; g < kTiles; ++g) {
    for (int w = 0; w < kGroups; ++w) {
      const std::string id = std::to_string(w), consumer = "consumer " + id, wgmma = "wgmma " + id;
      pipeline.add("load", {.name = "load " + id,
                            .index = g,
                            .work = smem_fill(chip, 2. * 128 * 128 / kGroups),
                            .waits = {{"PV3 " + id, g - kStages}},
                            .latency = chip.load_latency});
      pipeline.add(wgmma, {.name = "S " + id,
                           .index = g,
                           .work = matmul(chip, 64, 128, 128, 64 * 128 + 128 * 128),
                           .waits = {{"out " + id, g - 1}, {"load 0", g}, {"load 1", g}, {"load 2", g}},
                           .latency = chip.mma_latency / 2});
      const auto compute = [&](const std::string& name, const Work& work, const std::string& wait, int of) {
        pipeline.add(consumer, {.name = name + " " + id,
                                .index = g,
                                .work = work,
                                .waits = {{wait + " " + id, of}},
                                .share = chip.warp_share});
      };
      compute("issue", work_of(chip, issue), "out", g - 1);
      for (int q = 0; q < 4; ++q) {
        const std::string p = "P" + std::to_string(q);
        compute(p, work_of(chip, q == 0 ? maximum : quarter), "S", g);
        pipeline.add(wgmma, {.name = "PV" + std::to_string(q) + " " + id,
                             .index = g,
                             .work = matmul(chip, 64, 136, 32, 136 * 32),
                             .waits = {{p + " " + id, g}},
                             .latency = chip.mma_latency / 2});
      }
      compute("out", promotion, "PV3", g);
    }
  }
  pipeline.run();
  return (pipeline.end("out 0", kLast) - pipeline.end("out 0", kFirst)) / (kGroups * (kLast - kFirst));
}

}  // namespace

std::vector<Published> measured_designs() {
  std::vector<Published> designs;
  for (const double share : {1., kGemmShare}) {
    Chip h200;
    h200.sms = 132;
    h200.ghz = kMeasuredGhz;
    h200.fp8_macs = 4096 * share;
    h200.mma_floor = 0;
    h200.mma_factor = 1;
    const double cycles = cycles_of_a_tile(h200);
    designs.push_back(
        {.name = share == 1 ? "sm90 forward, H200" : "the same, FP8 at the rate of a GEMM",
         .pflops = kMeasuredPflops,
         .modelled = pflops(h200, 2 * cycles, 2),
         .cycles = 2 * cycles,
         .busy = {},
         .remark = share == 1 ? "measured" : "measured; a GEMM reaches 0.70 of the nominal rate on that card"});
  }
  return designs;
}

}  // namespace mxflash::tools
