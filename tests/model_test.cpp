// `mxflash model`: units that are shared fairly, kernels counted by hand, published designs, and the command.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cli_run.h"
#include "tools/model_call.h"
#include "tools/model_published.h"

namespace mxflash::tools {
namespace {

using Json = nlohmann::json;

constexpr Kernel kKernels[] = {Kernel::forward, Kernel::dkdv, Kernel::dq};
constexpr double kJitter = 0.1;  // of the length of a step

Work of_unit(Unit unit, double cycles) {
  Work work;
  work[unit] = cycles;
  return work;
}

// ---- the pipeline

TEST(Pipeline, AnAgentTakesItsStepsInOrder) {
  Pipeline p(50);
  for (int i = 0; i < 100; ++i) p.add("a", {.name = "step", .index = i, .work = of_unit(Unit::tensor, 100)});
  p.run();
  EXPECT_NEAR(p.end("step", 99), 10000, 100 * 100 * kJitter / 2);
  EXPECT_LT(p.end("step", 3), p.end("step", 4));
}

TEST(Pipeline, AUnitIsSharedFairlyAndOthersAreNot) {
  Pipeline p(0);
  p.add("a", {.name = "a", .work = of_unit(Unit::smem, 1000)});
  p.add("b", {.name = "b", .work = of_unit(Unit::smem, 1000)});
  p.add("c", {.name = "c", .work = of_unit(Unit::mufu, 1000)});
  p.run();
  EXPECT_NEAR(std::max(p.end("a", 0), p.end("b", 0)), 2000, 2000 * kJitter);
  EXPECT_NEAR(p.end("c", 0), 1000, 1000 * kJitter);
}

TEST(Pipeline, HandOversAndLatenciesAddUp) {
  Pipeline p(50);
  p.add("a", {.name = "a", .work = of_unit(Unit::tensor, 100), .latency = 60});
  p.add("b", {.name = "b", .work = of_unit(Unit::mufu, 100), .waits = {{"a", 0}}});
  p.add("b", {.name = "c", .work = of_unit(Unit::mufu, 100), .waits = {{"a", 0}, {"b", 0}, {"a", -1}}});
  p.run();
  EXPECT_NEAR(p.end("b", 0) - p.end("a", 0), 60 + 50 + 100, 100 * kJitter);
  EXPECT_NEAR(p.end("c", 0) - p.end("b", 0), 100, 100 * kJitter) << "no hand-over to itself";
}

TEST(Pipeline, AWarpAloneTakesItsShareOfTheIssueSlots) {
  Pipeline p(0);
  p.add("a", {.name = "a", .work = of_unit(Unit::issue, 800), .share = 0.8});
  p.run();
  EXPECT_NEAR(p.end("a", 0), 1000, 1000 * kJitter);
}

TEST(Pipeline, SaysWhichStepsWaitForEachOther) {
  Pipeline p(0);
  p.add("a", {.name = "first", .waits = {{"second", 0}}});
  p.add("b", {.name = "second", .waits = {{"first", 0}}});
  try {
    p.run();
    FAIL();
  } catch (const std::logic_error& error) {
    EXPECT_NE(std::string(error.what()).find("first(0) second(0)"), std::string::npos) << error.what();
  }
  Pipeline unknown(0);
  unknown.add("a", {.name = "first", .waits = {{"third", 0}}});
  EXPECT_THROW(unknown.run(), std::logic_error);
}

// ---- instructions

TEST(Chip, InstructionsByHand) {
  const Chip chip;
  // A warp on each scheduler: ex2 at 16 a clock, FMNMX at 64, FFMA at 128, a pair in two clocks; a slot each.
  const Work work = work_of(chip, {{"MUFU", 10}, {"FMNMX3", 20}, {"FFMA", 30}, {"FFMA2", 40}, {"IMAD", 5}, {"BRA", 6}});
  EXPECT_EQ(work[Unit::mufu], 80);
  EXPECT_EQ(work[Unit::alu], 40);
  EXPECT_EQ(work[Unit::fma], 30 + 80 + 10);
  EXPECT_EQ(work[Unit::issue], 111);
  const Work moved = work_of(chip, {{"LDTM", 4}, {"LDTM.columns", 128}, {"STTM", 4}, {"STTM.columns", 32}});
  EXPECT_DOUBLE_EQ(moved[Unit::tmem], 128 * 128 * 4 / 512. + 32 * 128 * 4 / 512.);
  EXPECT_EQ(moved[Unit::issue], 8);
}

TEST(Chip, ProductsByHand) {
  const Work qk = matmul(Chip{}, 128, 128, 128, 2 * 128 * 128);
  EXPECT_DOUBLE_EQ(qk[Unit::tensor], 4 * 1.1 * 64);
  EXPECT_EQ(matmul(Chip{}, 128, 64, 128, 0)[Unit::tensor], 4 * 56) << "no MMA takes less";
  EXPECT_DOUBLE_EQ(qk[Unit::smem], 256 / 0.85);
}

// ---- the kernels as they were compiled (tools/sass_counts.py)

double count(const std::vector<Counts>& pieces, const std::string& opcode) {
  double n = 0;
  for (const Counts& piece : pieces) {
    if (const auto found = piece.find(opcode); found != piece.end()) n += found->second;
  }
  return n;
}

TEST(LoopCounts, AreThoseOfTheTilesOfTheModel) {
  for (const double dim : {64, 128}) {
    for (const Kernel kernel : kKernels) {
      SCOPED_TRACE(std::string(kernel_name(kernel)) + " " + std::to_string(int(dim)));
      const LoopCounts loop = loop_counts(kernel, int(dim));
      // MMAs are 32 deep. Two query tiles of the forward, S and PV; 64 streamed rows, S, dP over channels and the rest
      // over rows.
      const double mmas =
          kernel == Kernel::forward ? 2 * (dim / 32 + 4) : 2 * dim / 32 + (kernel == Kernel::dkdv ? 4 : 2);
      ASSERT_EQ(loop.mmas.size(), loop.mma.size());
      double issued = 0;
      for (size_t warp = 0; warp < loop.mma.size(); ++warp) {
        EXPECT_EQ(count(loop.mma[warp], "UTCQMMA"), loop.mmas[warp]);
        issued += loop.mmas[warp];
      }
      EXPECT_EQ(issued, mmas);
      // Scores (S; S and dP of 64 keys or rows) come in FP32, P (P and dS) leave in 8 bits.
      EXPECT_EQ(count(loop.compute, "LDTM.columns"), 128);
      EXPECT_EQ(count(loop.compute, "STTM.columns"), kernel == Kernel::dq ? 16 : 32);
      EXPECT_EQ(count(loop.compute, "LDL") + count(loop.compute, "STL"), 0);
      EXPECT_EQ(loop.compute.size(), loop.waits.size() + 1);
    }
  }
  // Of the forward with 192 channels and 128 of v, and with 256: one query tile, V in two parts.
  EXPECT_EQ(loop_counts(Kernel::forward, 192).mmas, (std::vector<double>{2 * 6, 2 * 4}));
  EXPECT_EQ(loop_counts(Kernel::forward, 256).mmas, (std::vector<double>{8, 2 * 4}));
  // Of the backward: S and dP of 6 and 4 K-steps, then of 8.
  EXPECT_EQ(loop_counts(Kernel::dkdv, 192).mmas, (std::vector<double>{6 + 4, 2 + 2}));
  EXPECT_EQ(loop_counts(Kernel::dq, 192).mmas, (std::vector<double>{6 + 4, 2}));
  EXPECT_EQ(loop_counts(Kernel::dv, 256).mmas, (std::vector<double>{8, 2}));
  EXPECT_EQ(loop_counts(Kernel::dk, 256).mmas, (std::vector<double>{8 + 8, 2}));
  EXPECT_EQ(loop_counts(Kernel::dq, 256).mmas, (std::vector<double>{8 + 8, 2}));
  // An exponential for every score but those that the polynomial computes.
  EXPECT_NEAR(count(loop_counts(Kernel::dkdv, 128).compute, "MUFU"), 64, 2);
  EXPECT_LE(count(loop_counts(Kernel::forward, 128).compute, "MUFU"), 128 + 2);
}

TEST(LoopCounts, AreThoseOfTheInstantiationThatTakesTheCall) {
  EXPECT_EQ(padded_dim(48, 64), 64);
  EXPECT_EQ(padded_dim(64, 80), 128);
  EXPECT_EQ(padded_dim(144, 128), 192);
  EXPECT_EQ(padded_dim(64, 144), 256);
  EXPECT_EQ(padded_dim(208, 64), 256);
}

TEST(KernelSpeed, BusyCyclesOfATileByHand) {
  const Chip chip;
  // MMAs of 128 x n x 32: n / 2 clocks by the rate, 1.1 times that, at least 56. PV has 16 columns more.
  EXPECT_NEAR(kernel_speed(chip, Kernel::forward, 128).busy[Unit::tensor], 1.1 * (256 + 288), 1e-6);
  EXPECT_NEAR(kernel_speed(chip, Kernel::dkdv, 128).busy[Unit::tensor], 2 * (8 * 56 + 4 * 1.1 * 64), 1e-6);
  EXPECT_NEAR(kernel_speed(chip, Kernel::dq, 128).busy[Unit::tensor], 2 * (8 * 56 + 2 * 1.1 * 64), 1e-6);
  EXPECT_NEAR(kernel_speed(chip, Kernel::dq, 64).busy[Unit::tensor], 2 * (4 * 56 + 2 * 56), 1e-6);
  const double n192 = 1.1 * 96, n256 = 1.1 * 128;
  EXPECT_NEAR(kernel_speed(chip, Kernel::dkdv, 192).busy[Unit::tensor], 2 * (10 * 56 + 2 * 1.1 * 64 + 2 * n192), 1e-6);
  EXPECT_NEAR(kernel_speed(chip, Kernel::dq, 192).busy[Unit::tensor], 2 * (10 * 56 + 2 * n192), 1e-6);
  EXPECT_NEAR(kernel_speed(chip, Kernel::dv, 256).busy[Unit::tensor], 2 * (8 * 56 + 2 * n256), 1e-6);
  EXPECT_NEAR(kernel_speed(chip, Kernel::dk, 256).busy[Unit::tensor], 2 * (16 * 56 + 2 * n256), 1e-6);
  EXPECT_NEAR(kernel_speed(chip, Kernel::dq, 256).busy[Unit::tensor], 2 * (16 * 56 + 2 * n256), 1e-6);
  EXPECT_NEAR(kernel_speed(chip, Kernel::forward, 192).busy[Unit::tensor], 1.1 * (6 * 64 + 4 * 72), 1e-6);
  EXPECT_NEAR(kernel_speed(chip, Kernel::forward, 256).busy[Unit::tensor], 1.1 * (8 * 64 + 4 * (64 + 72)), 1e-6);
  const double ex2 = count(loop_counts(Kernel::forward, 128).compute, "MUFU");
  EXPECT_NEAR(kernel_speed(chip, Kernel::forward, 128).busy[Unit::mufu], 8 * ex2, 1e-6);
}

TEST(KernelSpeed, NoUnitIsBusyForLongerThanATileTakes) {
  for (const Kernel kernel : kKernels) {
    for (const int dim : {64, 128}) {
      const KernelSpeed speed = kernel_speed(Chip{}, kernel, dim);
      for (const Unit unit : kUnits)
        EXPECT_LE(speed.busy[unit], 1.02 * speed.tile) << kernel_name(kernel) << unit_name(unit);
    }
  }
}

TEST(KernelSpeed, FasterUnitsAreNotSlower) {
  // Agents take their steps in order: what is faster can meet others at a worse moment.
  constexpr double kNoise = 1.05;
  const auto not_slower = [&](const char* what, double Chip::*rate, std::vector<double> values) {
    for (const Kernel kernel : kKernels) {
      double least = HUGE_VAL;
      for (const double value : values) {
        Chip chip;
        chip.*rate = value;
        const double cycles = kernel_speed(chip, kernel, 128).tile;
        EXPECT_LE(cycles, kNoise * least) << kernel_name(kernel) << ": " << what << " = " << value;
        least = std::min(least, cycles);
      }
    }
  };
  not_slower("tmem_read", &Chip::tmem_read, {64, 128, 228, 512});
  not_slower("smem_share", &Chip::smem_share, {0.5, 0.75, 0.85, 1});
  not_slower("mufu", &Chip::mufu, {8, 16, 32});
  not_slower("fp8_macs", &Chip::fp8_macs, {2048, 4096, 8192, 16384});
  not_slower("warp_share", &Chip::warp_share, {0.4, 0.6, 0.8, 1});
  not_slower("sync", &Chip::sync, {300, 150, 75, 25});
  Chip slow;
  slow.fp8_macs = 2048;
  EXPECT_GT(kernel_speed(slow, Kernel::dkdv, 128).tile, 4 * 1024);
}

// ---- published designs

TEST(Published, ComeOutWithinTheStatedErrors) {
  for (const Published& d : published_designs(Chip{})) {
    if (d.fitted) {
      EXPECT_NEAR(d.modelled / d.pflops, 1, 0.11) << d.name;
    }
  }
  // The work that publications count themselves: BF16, head_dim 128, backward.
  const std::vector<Published> designs = published_designs(Chip{});
  EXPECT_NEAR(designs[1].busy[Unit::tensor], 1.1 * 2560, 1e-6);
  EXPECT_NEAR(designs[1].busy[Unit::mufu], 1024, 1e-6);
}

// ---- calls

BenchShape square(int64_t batch, int64_t seqlen, bool causal = false) {
  return {.batch = batch,
          .seqlen_q = seqlen,
          .seqlen_k = seqlen,
          .num_heads_q = 16,
          .num_heads_kv = 16,
          .head_dim = 128,
          .head_dim_v = 128,
          .mask = {.causal = causal}};
}

TEST(ModelCall, TilesAndItemsByHand) {
  const ModelledCall fwd = model_call(Chip{}, BenchOp::attention_fwd, square(4, 4096));
  ASSERT_EQ(fwd.kernels.size(), 1u);
  EXPECT_EQ(fwd.kernels[0].items, 4 * 16 * 16);
  EXPECT_EQ(fwd.kernels[0].tiles, 4 * 16 * 32 * 32);
  const ModelledCall bwd = model_call(Chip{}, BenchOp::attention_bwd, square(1, 1000));
  ASSERT_EQ(bwd.kernels.size(), 3u);
  for (int kernel : {1, 2}) {
    EXPECT_EQ(bwd.kernels[kernel].items, 16 * 8);
    EXPECT_EQ(bwd.kernels[kernel].tiles, 16 * 8 * 8) << "the last tile of 64 is whole";
  }
}

TEST(ModelCall, MasksLeaveTilesOut) {
  // Causal: of 8 x 8 tiles 36 forward; in tiles of 64 moving rows, 8 * 9 of 8 * 16 are seen (in halves).
  EXPECT_EQ(model_call(Chip{}, BenchOp::attention_fwd, square(1, 1024, true)).kernels[0].tiles, 16 * 36);
  const ModelledCall bwd = model_call(Chip{}, BenchOp::attention_bwd, square(1, 1024, true));
  EXPECT_EQ(bwd.kernels[1].tiles, 16 * 36);
  EXPECT_EQ(bwd.kernels[2].tiles, 16 * 36);
  BenchShape window = square(1, 1024);
  window.mask = {.window_left = 127, .window_right = 0};
  EXPECT_EQ(model_call(Chip{}, BenchOp::attention_fwd, window).kernels[0].tiles, 16 * 15);
  EXPECT_EQ(model_call(Chip{}, BenchOp::attention_bwd, window).kernels[1].tiles, 16 * 15);
}

TEST(ModelCall, GroupsAndSharedQueries) {
  BenchShape gqa = square(1, 1024);
  gqa.num_heads_kv = 4;
  const ModelledCall bwd = model_call(Chip{}, BenchOp::attention_bwd, gqa);
  EXPECT_EQ(bwd.kernels[1].items, 4 * 8) << "a key head sums over its group";
  EXPECT_EQ(bwd.kernels[1].tiles, bwd.kernels[2].tiles);
  BenchShape shared = square(8, 512);
  shared.seqlen_q = 128;
  shared.shared_q = true;
  const ModelledCall many = model_call(Chip{}, BenchOp::attention_bwd, shared);
  EXPECT_EQ(many.kernels[1].items, 8 * 16 * 4);
  EXPECT_EQ(many.kernels[2].items, 16) << "a query block meets every key sequence";
  EXPECT_EQ(many.kernels[2].tiles, many.kernels[1].tiles);
}

TEST(ModelCall, TakesAtLeastWhatMemoryAndTheTensorCoreTake) {
  const Chip chip;
  for (const BenchOp op : {BenchOp::attention_fwd, BenchOp::attention_bwd}) {
    for (const BenchShape& shape : bench_shapes("llm")) {
      const ModelledCall call = model_call(chip, op, shape);
      EXPECT_LT(call.flops, call.us() * 1e-6 * 2 * chip.fp8_macs * chip.sms * chip.ghz * 1e9) << to_text(shape);
      for (const ModelledKernel& k : call.kernels) {
        EXPECT_GE(std::min({k.tiles_us, k.items_us, k.waves_us, k.memory_us}), -1e-9) << to_text(shape) << k.name;
        EXPECT_GT(k.launch_us, 0);
      }
    }
  }
  // One query against 64K keys: only reading counts.
  BenchShape decode = square(64, 65536);
  decode.seqlen_q = 1;
  const ModelledCall call = model_call(chip, BenchOp::attention_fwd, decode);
  EXPECT_GE(call.us(), 64 * 65536. * 16 * 256 / chip.hbm * 1e6);
}

// ---- tools/sass_counts.py, with a disassembler that prints what it is given

// A loop of two block-scaled MMAs, a wait whose retry stands behind the kernel, and an instruction that can be jumped
// over; a loop that computes, with a branch for masks, and one that only rescales.
std::string sass_of(const std::string& in_compute_loop) {
  std::string text = "code for sm_100a\n\t\tFunction : a_kernel\n";
  int address = 0;
  const auto line = [&](const std::string& instruction) {
    char at[32];
    std::snprintf(at, sizeof at, "        /*%04x*/   ", address);
    text += at + instruction + " ;  /* 0x0 */\n";
    address += 16;
  };
  const std::string mma = "UTCQMMA gdesc[UR6], gdesc[UR8], tmem[UR10], tmem[UR12], idesc[UR13], tmem[UR14], UPT";
  line("MOV R1, c[0x0][0x28]");
  line("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0");  // 0010: loop
  line("@!P0 BRA 0x90");
  line(mma);  // 0030
  line("@P1 BRA 0x60");
  line("UMOV UR1, UR2");
  line(mma);  // 0060
  line("@P2 BRA 0x10");
  line("BRA 0xc0");
  line("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0");  // 0090: retry
  line("@!P0 BRA 0x90");
  line("BRA 0x30");
  line("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R0");  // 00c0: loop
  line("LDTM.x32 R4, tmem[UR10]");
  line("BRA.U !UP0, 0x110");
  for (int i = 0; i < 2; ++i) line("FSEL R4, R4, -INF , P3");
  for (int i = 0; i < 20; ++i) line("MUFU.EX2 R4, R4");  // 0110
  line(in_compute_loop);
  line("STTM.x8 tmem[UR11], R4");
  line("@P2 BRA 0xc0");
  line("LDTM.x64 R4, tmem[UR10]");
  line("STTM.x64 tmem[UR10], R4");
  line("@P2 BRA 0x280");
  line("EXIT");
  return text;
}

CliRun sass_counts(const std::string& sass, const std::string& mmas) {
  const std::string file = scratch("kernel.sass"), tool = scratch("print"), counts = scratch("counts.json");
  std::ofstream(file) << sass;
  std::ofstream(tool) << "#!/bin/sh\ncat \"$2\"\n";
  std::filesystem::permissions(tool, std::filesystem::perms::owner_all);
  std::ofstream(counts) << R"({"it": {"symbol": "^a_kernel$", "mmas": [)" << mmas
                        << R"(], "waits": ["S"], "mma": [[{"BRA": 6}]], "compute": [{}, {"BRA": 25}]}})";
  const std::string out = scratch("sass_counts.out");
  const std::string command = "python3 " MXFLASH_SOURCE_DIR "/tools/sass_counts.py " + file + " --cuobjdump " + tool +
                              " --check " + counts + " > " + out + " 2>&1";
  const int status = std::system(command.c_str());
  return {.exit_code = WEXITSTATUS(status), .out = file_text(out), .err = {}};
}

TEST(SassCounts, CountsThePassOfAPlainTile) {
  if (std::system("python3 -c '' 2>/dev/null") != 0) GTEST_SKIP() << "no python3";
  const CliRun run = sass_counts(sass_of("F2FP R4, R4, R5"), "2");
  EXPECT_EQ(run.exit_code, 0) << run.out;
  EXPECT_EQ(run.out, "it: 2 block-scaled MMAs in 6 instructions; compute 26 instructions\n");
}

TEST(SassCounts, FailsForAnotherCountAndForRegistersInLocalMemory) {
  if (std::system("python3 -c '' 2>/dev/null") != 0) GTEST_SKIP() << "no python3";
  CliRun run = sass_counts(sass_of("F2FP R4, R4, R5"), "4");
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_NE(run.out.find("[2] block-scaled MMAs in a pass, must be [4]"), std::string::npos) << run.out;
  run = sass_counts(sass_of("STL [R1+0x10], R4"), "2");
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_NE(run.out.find("keep registers in local memory"), std::string::npos) << run.out;
  run = sass_counts(sass_of("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R0"), "2");
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_NE(run.out.find("2 waits in a pass of compute, the model knows S"), std::string::npos) << run.out;
}

// ---- the command

Json modelled(std::vector<std::string> args) {
  args.insert(args.begin(), {"model", "--json"});
  const CliRun run = run_cli(args);
  EXPECT_EQ(run.exit_code, 0) << run.err;
  return Json::parse(run.out.substr(0, run.out.find('\n')));
}

TEST(ModelCommand, PrintsAnObjectForEachCall) {
  const Json json = modelled({"--op", "attention_bwd", "--shape", "batch=2,seqlen_q=2048,num_heads_q=16,head_dim=128"});
  EXPECT_EQ(json["arch"], "sm100");
  EXPECT_EQ(json["op"], "attention_bwd");
  EXPECT_EQ(json["shape"]["seqlen_k"], 2048);
  double us = 0;
  for (const Json& kernel : json["kernels"]) us += kernel["us"].get<double>();
  EXPECT_NEAR(json["us"].get<double>(), us, 1e-6);
  EXPECT_NEAR(json["pflops"].get<double>(), 10. * 2 * 16 * 2048 * 2048 * 128 / us * 1e-9, 1e-6);
  EXPECT_LE(json["pflops_range"][0], json["pflops"]);
  EXPECT_GE(json["pflops_range"][1], json["pflops"]);
  EXPECT_GE(json["sensitivity"].size(), 10u);
  EXPECT_NEAR(json["kernels"][1]["busy_per_tile"]["mufu"].get<double>(), 1024, 40);
  for (const Json& kernel : json["kernels"]) {
    if (kernel["name"] == "pre") continue;
    EXPECT_TRUE(kernel["busy_per_tile"].contains(kernel["bound"].get<std::string>()));
  }
}

TEST(ModelCommand, TakesShapesAsBenchDoes) {
  const std::string file = scratch("model_shapes.jsonl");
  std::ofstream(file) << R"({"seqlen_q": 512, "head_dim": 64, "causal": true})"
                         "\n";
  const Json from_file = modelled({"--op", "attention_fwd", "--shapes", file});
  EXPECT_EQ(from_file, modelled({"--op", "attention_fwd", "--shape", "seqlen_q=512,head_dim=64,causal=true"}));
  EXPECT_EQ(from_file, modelled({"--op", "attention_fwd", "--shape", "seqlen_q=512,head_dim=64", "--causal"}));
  EXPECT_LT(modelled({"--op", "attention_fwd", "--shape", "seqlen_q=512,head_dim=64"})["pflops"].get<double>() / 2,
            from_file["pflops"].get<double>());
}

TEST(ModelCommand, PrintsTablesThatSayWhatTheyAre) {
  const CliRun run = run_cli({"model", "--shape", "seqlen_q=1024,num_heads_q=16,head_dim=128", "--calibrate"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  for (const char* text : {"never run", "attention_fwd b1 h16 1024x1024 d128", "attention_bwd", "PFLOP/s if",
                           "bound of a tile of dkdv", "clk/tile", "next ideas", "published", "LP-FA4"}) {
    EXPECT_NE(run.out.find(text), std::string::npos) << text << " in\n" << run.out;
  }
}

TEST(ModelCommand, SaysWhatMostOfTheTimeIsIfNotTiles) {
  const CliRun run = run_cli({"model", "--op", "attention_fwd", "--shape",
                              "seqlen_q=1,seqlen_k=65536,num_heads_q=32,num_heads_kv=8,head_dim=128"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.out.find("most of forward: SMs that wait for the last item"), std::string::npos) << run.out;
  EXPECT_NE(run.out.find("but 100% of the tiles are of items with 128 rows or fewer: "), std::string::npos) << run.out;
  EXPECT_EQ(run.out.find(" 0.00 PFLOP/s"), std::string::npos) << run.out;
}

TEST(ModelCommand, RefusesWithTheRuleAndTheValue) {
  const auto expect = [](std::vector<std::string> args, const std::string& rule) {
    args.insert(args.begin(), "model");
    const CliRun run = run_cli(args);
    EXPECT_EQ(run.exit_code, 2) << rule;
    EXPECT_EQ(run.out, "");
    EXPECT_NE(run.err.find(rule), std::string::npos) << run.err;
    EXPECT_EQ(std::ranges::count(run.err, '\n'), 1) << run.err;
  };
  expect({"--arch", "sm80"}, "--arch: sm80 not in {sm100}");
  expect({"--op", "attention_bwd", "--shapes", "decode"}, "none of these shapes is one of attention_bwd");
  expect({"--op", "quantize"}, "--op: quantize not in {attention_fwd,attention_bwd}");
  expect({"--shape", "seqlen_q=512"}, "head_dim is missing");
  expect({"--shape", "seqlen_q=512,head_dim"},
         "--shape must be KEY=VALUE,... with numbers, true or false, got \"head_dim\"");
  expect({"--shape", "seqlen_q=512,head_dim=x"}, "got \"head_dim=x\"");
  expect({"--shape", "seqlen_q=512,head_dim=64,depth=3"}, "unknown key \"depth\"");
  expect({"--shape", "seqlen_q=0,head_dim=64"}, "seqlen_q must be an integer from 1");
  expect({"--shape", "seqlen_q=512,head_dim=272"},
         "attention_fwd: sm100: head_dim must be a multiple of 16, at most 256, got 272");
  expect({"--op", "attention_bwd", "--shape", "seqlen_q=512,head_dim=64,head_dim_v=72"},
         "attention_bwd: sm100: head_dim_v must be a multiple of 16, at most 256, got 72");
  expect({"--shape", "seqlen_q=512,head_dim=64,seqlen_q=256"},
         "--shape must name a key once, got \"seqlen_q=256\" after another");
  expect({"--shape", ""}, "--shape must be KEY=VALUE,... with numbers, true or false, got \"\"");
  expect({"--shape", "seqlen_q=512,head_dim=64", "--shapes", "llm"}, "--shape and --shapes exclude each other");
  expect({"--shapes", "nowhere.json"}, "--shapes must be small");
}

}  // namespace
}  // namespace mxflash::tools
