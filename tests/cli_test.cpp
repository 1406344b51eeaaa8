// `mxflash attend`, run as a user runs it: what it prints, what it writes, how accurate it is on real operands. And
// what `mxflash info` says about backend `cpu`.
#include <gtest/gtest.h>
#include <mxflash/backend.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>

#include "cli_run.h"
#include "kit/compare.h"
#include "kit/runner.h"
#include "mx/float16.h"

namespace mxflash {
namespace {

using Json = nlohmann::json;

const std::vector<std::string> kResults{"out", "dq", "dk", "dv"};

std::string full_data(const std::string& name) {
  const char* directory = std::getenv("MXFLASH_DATA");
  return std::string(directory ? directory : MXFLASH_SOURCE_DIR "/../shared/data") + "/" + name;
}

// attend FILE --causal --backward --json ...; each distinct command runs once.
Json attend(const std::string& file, std::vector<std::string> options = {}) {
  static std::map<std::vector<std::string>, Json> done;
  options.insert(options.begin(), {"attend", file, "--causal", "--backward", "--json"});
  if (!done.contains(options)) {
    const CliRun run = run_cli(options);
    EXPECT_EQ(run.exit_code, 0) << run.err;
    done[options] = run.exit_code == 0 ? run.json() : Json();
  }
  return done[options];
}

double sqnr(const Json& json, const std::string& tensor) { return json.at("metrics").at(tensor).at("sqnr_db"); }
double error_db(const Json& json, const std::string& tensor) {
  return 10 * std::log10(json.at("metrics").at(tensor).at("error_energy").get<double>());
}

void expect_floors(const Json& json, const std::vector<double>& floors) {
  for (size_t i = 0; i < kResults.size(); ++i) EXPECT_GE(sqnr(json, kResults[i]), floors[i]) << kResults[i];
}

// ---- what is printed

TEST(Attend, PrintsOneJsonObject) {
  const CliRun run = run_cli({"attend", write_operands("small.safetensors", 40, 2, 32), "--backward", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.err, "") << "nothing takes two seconds here";
  EXPECT_EQ(std::count(run.out.begin(), run.out.end(), '\n'), 1);
  const Json json = run.json();
  for (const char* key : {"block", "rule", "element", "grad_element", "rotate_qk", "smooth_k", "smooth_v"}) {
    EXPECT_TRUE(json.at("recipe").contains(key)) << key;
  }
  EXPECT_EQ(json["recipe"]["block"], "square32");
  EXPECT_EQ(json["recipe"]["rotate_qk"], false);
  EXPECT_FALSE(json.at("backend").get<std::string>().empty());
  const Json shape{{"total_q", 40},
                   {"total_k", 40},
                   {"batch", 1},
                   {"num_heads_q", 2},
                   {"num_heads_kv", 2},
                   {"head_dim", 32},
                   {"head_dim_v", 32},
                   {"causal", false},
                   {"window", {-1, -1}},
                   {"shared_q", false},
                   {"softmax_scale", 1 / std::sqrt(32.0)}};
  EXPECT_EQ(json.at("shape"), shape);
  for (const char* tensor : {"out", "lse", "dq", "dk", "dv"}) {
    EXPECT_GT(sqnr(json, tensor), 20) << tensor;
    EXPECT_GT(json["metrics"][tensor].at("cosine"), 0.99) << tensor;
    EXPECT_GT(json["metrics"][tensor].at("max_abs_err"), 0) << tensor;
  }
  for (const char* tensor : {"q", "k", "v", "dout"}) {
    const Json& stats = json.at("quantization").at(tensor);
    EXPECT_GT(stats.at("amax"), 1) << tensor;
    EXPECT_EQ(stats.at("saturated"), 0) << tensor;
    EXPECT_LT(stats.at("flushed"), 10) << tensor;
    EXPECT_EQ(stats.at("total"), 40 * 2 * 32) << tensor;
  }
  for (const char* phase : {"fwd", "bwd", "oracle"}) EXPECT_GE(json.at("time_ms").at(phase), 0) << phase;
}

TEST(Attend, ForwardAloneAndNoCompareLeaveOutWhatTheyDoNotCompute) {
  const std::string file = write_operands("small.safetensors", 40, 2, 32);
  const Json forward = run_cli({"attend", file, "--json"}).json();
  EXPECT_EQ(forward["metrics"].size(), 2u);  // out, lse
  EXPECT_FALSE(forward["quantization"].contains("dout"));
  EXPECT_FALSE(forward["time_ms"].contains("bwd"));
  const Json blind = run_cli({"attend", file, "--json", "--no-compare"}).json();
  EXPECT_FALSE(blind.contains("metrics"));
  EXPECT_FALSE(blind["time_ms"].contains("oracle"));
}

TEST(Attend, PrintsATableWithTheWorstHead) {
  const CliRun run = run_cli({"attend", write_operands("small.safetensors", 40, 2, 32), "--backward"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  for (const char* text :
       {"SQNR dB", "worst head", "\nout ", "\nlse ", "\ndq ", "\ndk ", "\ndv ", "\ndout ", "RMS error"}) {
    EXPECT_NE(run.out.find(text), std::string::npos) << text << " in\n" << run.out;
  }
}

TEST(Attend, NanInAnOperandIsCountedAndStaysValidJson) {
  std::vector<kit::NamedTensor> x{normal_tensor("q", {40, 2, 32}), normal_tensor("k", {40, 2, 32}),
                                  normal_tensor("v", {40, 2, 32}), normal_tensor("dout", {40, 2, 32})};
  const float nan = std::nanf("");
  std::memcpy(x[0].tensor.bytes.data(), &nan, sizeof nan);
  const std::string file = write_file("nan.safetensors", x);
  const CliRun run = run_cli({"attend", file, "--backward", "--json", "--report", scratch("nan.html")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json json = run.json();
  EXPECT_GT(json["metrics"]["out"]["nonfinite_mismatch"], 0);
  EXPECT_EQ(sqnr(json, "out"), -kit::kMaxDb);
  EXPECT_EQ(json["quantization"]["q"]["nonfinite"], 1);
  EXPECT_EQ(run_cli({"attend", file, "--backward"}).exit_code, 0);
}

TEST(Attend, FiniteOperandsWhoseScoresOverflowAreSaidToBeThat) {
  std::vector<kit::NamedTensor> x{normal_tensor("q", {40, 2, 32}), normal_tensor("k", {40, 2, 32}),
                                  normal_tensor("v", {40, 2, 32})};
  for (kit::NamedTensor& t : x) {
    std::vector<float> values(t.tensor.bytes.size() / sizeof(float));
    std::memcpy(values.data(), t.tensor.bytes.data(), t.tensor.bytes.size());
    for (float& value : values) value *= 1e30f;
    std::memcpy(t.tensor.bytes.data(), values.data(), t.tensor.bytes.size());
  }
  const CliRun run = run_cli({"attend", write_file("huge.safetensors", x), "--backend", "cpu"});  // scores in fp32
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.out.find("all operands are finite"), std::string::npos) << run.out;
}

// ---- accuracy on real operands. Floors are 0.1 to 0.2 dB below what `ref` reaches.

TEST(AttendAccuracy, PlainRecipe) { expect_floors(attend(kExample), {27.0, 21.35, 23.4, 24.3}); }
TEST(AttendAccuracy, RotatedAndSmoothed) {
  expect_floors(attend(kExample, {"--rotate-qk", "--smooth-k"}), {29.95, 24.2, 25.8, 27.1});
}
TEST(AttendAccuracy, FloorIsLowerThanRceil) {
  for (const std::string& tensor : kResults) {
    EXPECT_LT(sqnr(attend(kExample, {"--rule", "floor"}), tensor), sqnr(attend(kExample), tensor) - 0.05) << tensor;
  }
  EXPECT_GT(attend(kExample, {"--rule", "floor"})["quantization"]["k"]["saturated"], 0);
}
TEST(AttendAccuracy, E5m2GradientsCostDecibels) {
  // Of dout, and of dv; dS stays E4M3.
  const Json json = attend(kExample, {"--backend", "ref", "--grad-element", "e5m2"});
  const Json e4m3 = attend(kExample, {"--backend", "ref"});
  EXPECT_EQ(sqnr(json, "out"), sqnr(e4m3, "out"));
  EXPECT_LT(sqnr(json, "dv"), sqnr(e4m3, "dv") - 1);
  EXPECT_GT(sqnr(json, "dq"), sqnr(e4m3, "dq") - 1);
}
TEST(AttendAccuracy, RowAndColumnBlocksEqualSquareBlocks) {
  const Json json = attend(kExample, {"--block", "row32+col32"});
  EXPECT_EQ(json["recipe"]["block"], "row32+col32");
  for (const std::string& tensor : kResults)
    EXPECT_NEAR(sqnr(json, tensor), sqnr(attend(kExample), tensor), 0.1) << tensor;
}

TEST(AttendAccuracy, SmoothVTakesAMeanOfVOutOfTheError) {
  const kit::SafetensorsFile source(kExample);
  std::vector<kit::NamedTensor> shifted;
  for (const char* name : {"q", "k", "v", "dout"}) shifted.push_back({name, source.read(name)});
  kit::HostTensor& v = shifted[2].tensor;
  std::vector<float> values(size_t(v.numel()));
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, v.bytes.data() + 2 * i, 2);
    values[i] = decode_bf16(bits) + 4;  // F32 holds the sum; BF16 would not
  }
  const auto bytes = std::as_bytes(std::span(values));
  v = {.dtype = kit::FileDtype::f32, .shape = v.shape, .bytes = {bytes.begin(), bytes.end()}};
  const std::string file = write_file("shifted.safetensors", shifted);
  for (const char* tensor : {"out", "dq", "dk"}) {
    const double unshifted = error_db(attend(kExample), tensor);
    EXPECT_NEAR(error_db(attend(file, {"--smooth-v"}), tensor), unshifted, 0.4) << tensor;
    EXPECT_GT(error_db(attend(file), tensor), unshifted + 1) << tensor;
  }
}

struct FullLayer {
  const char* file;
  std::vector<std::string> options;
  std::vector<double> floors;
};
class AttendFullLayer : public testing::TestWithParam<FullLayer> {};
TEST_P(AttendFullLayer, ReachesItsFloors) {
  const std::string file = full_data(GetParam().file);
  if (!std::filesystem::exists(file))
    GTEST_SKIP() << "no " << file << "; set MXFLASH_DATA to the directory that has it";
  expect_floors(attend(file, GetParam().options), GetParam().floors);
}
INSTANTIATE_TEST_SUITE_P(
    Gpt, AttendFullLayer,
    testing::Values(FullLayer{"gpt_layer1.safetensors", {}, {26.9, 20.7, 22.8, 24.3}},
                    FullLayer{"gpt_layer5.safetensors", {}, {28.0, 22.6, 24.0, 25.5}},
                    FullLayer{"gpt_layer1.safetensors", {"--rotate-qk", "--smooth-k"}, {29.4, 23.0, 25.1, 26.7}},
                    FullLayer{"gpt_layer5.safetensors", {"--rotate-qk", "--smooth-k"}, {29.2, 23.8, 24.9, 26.2}}),
    [](const auto& info) {
      return std::string(info.param.file, 10) + (info.param.options.empty() ? "_plain" : "_rotated_smoothed");
    });

// ---- options

TEST(Attend, WindowIsReadInBothSpellings) {
  const std::string file = write_operands("small.safetensors", 40, 2, 32);
  const Json joined = run_cli({"attend", file, "--window=-1,3", "--json"}).json();
  const Json apart = run_cli({"attend", file, "--window", "-1,3", "--json"}).json();
  EXPECT_EQ(joined["shape"]["window"], Json({-1, 3}));
  EXPECT_EQ(joined["metrics"], apart["metrics"]);
  EXPECT_NE(joined["metrics"], run_cli({"attend", file, "--json"}).json()["metrics"]);
}

TEST(Attend, OutputHoldsTheResultsOfTheOperator) {
  const std::string file = write_operands("small.safetensors", 40, 2, 32);
  const CliRun run = run_cli({"attend", file, "--backward", "--causal", "--rotate-qk", "--smooth-k", "--smooth-v",
                              "--softmax-scale", "0.25", "-o", scratch("results.safetensors")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const kit::SafetensorsFile in(file), out(scratch("results.safetensors"));
  const std::vector<float> q = read_f32(in, "q"), k = read_f32(in, "k"), v = read_f32(in, "v"),
                           dout = read_f32(in, "dout");
  const kit::FloatProblem problem{.num_heads_q = 2,
                                  .num_heads_kv = 2,
                                  .head_dim = 32,
                                  .head_dim_v = 32,
                                  .q = q,
                                  .k = k,
                                  .v = v,
                                  .dout = dout,
                                  .dlse = {},
                                  .cu_seqlens_q = {},
                                  .cu_seqlens_k = {},
                                  .mask = {.causal = true},
                                  .softmax_scale = 0.25f};
  const kit::FloatResult want = kit::run_operator(problem, {});
  EXPECT_EQ(read_f32(out, "out"), want.out);
  EXPECT_EQ(read_f32(out, "lse"), want.lse);
  EXPECT_EQ(read_f32(out, "dq"), want.dq);
  EXPECT_EQ(read_f32(out, "dk"), want.dk);
  EXPECT_EQ(read_f32(out, "dv"), want.dv);
  EXPECT_EQ(out.entry("out").shape, (std::vector<int64_t>{40, 2, 32}));
  EXPECT_EQ(out.entry("lse").shape, (std::vector<int64_t>{2, 40}));
  EXPECT_EQ(Json::parse(out.metadata().at("recipe")).at("smooth_v"), true);
}

TEST(Attend, ThreadsDoNotChangeABit) {
  const std::string file = write_operands("threads.safetensors", 100, 2, 64);
  const auto result = [&](const char* threads) {
    const CliRun run = run_cli({"attend", file, "--backward", "--threads", threads, "-o", scratch("threads.out")});
    EXPECT_EQ(run.exit_code, 0) << run.err;
    return file_text(scratch("threads.out"));
  };
  EXPECT_EQ(result("1"), result("3"));
}

TEST(Attend, SaysWhichBackendsThereAre) {
  const std::string file = write_operands("small.safetensors", 40, 2, 32);
  for (const char* name : {"sm90_bf61", "sm91", "sm"}) {  // like one of a card, but none
    const CliRun run = run_cli({"attend", file, "--backend", name});
    EXPECT_NE(run.exit_code, 0);
    EXPECT_NE(run.err.find("backend must be one of"), std::string::npos) << run.err;
    EXPECT_NE(run.err.find(std::string("got '") + name + "'"), std::string::npos) << run.err;
  }
  bool has_card = false;
  for (int32_t i = 0; i < num_backends(Operation::attention_fwd); ++i) {
    const BackendInfo info = backend_info(Operation::attention_fwd, i);
    has_card |= std::string_view(info.name) == "sm90" && info.available.ok();
  }
  if (has_card) return;
  const CliRun run = run_cli({"attend", file, "--backend", "sm90"});
  EXPECT_NE(run.exit_code, 0);
  EXPECT_NE(run.err.find("sm90: "), std::string::npos) << run.err;
  EXPECT_NE(run.err.find("CUDA"), std::string::npos) << run.err;
}

TEST(Attend, RotateSeedIsPartOfTheRecipe) {
  const std::string file = write_operands("small.safetensors", 40, 2, 32);
  const Json plain = attend(file, {"--rotate-qk"}), same = attend(file, {"--rotate-qk", "--rotate-seed", "24"});
  EXPECT_EQ(plain["recipe"]["rotate_seed"], kDefaultRotateSeed);
  EXPECT_EQ(plain["metrics"], same["metrics"]);
  const Json other = attend(file, {"--rotate-qk", "--rotate-seed", "18446744073709551615"});
  EXPECT_EQ(other["recipe"]["rotate_seed"], UINT64_MAX);
  EXPECT_NE(plain["metrics"]["dk"], other["metrics"]["dk"]);
  EXPECT_EQ(attend(file)["metrics"], attend(file, {"--rotate-seed", "25"})["metrics"]) << "nothing is rotated";
}

TEST(Attend, NpyOperandsEqualSafetensors) {
  const kit::SafetensorsFile file(write_operands("small.safetensors", 40, 2, 32));
  std::vector<std::string> args{"attend", "--json", "--backward"};
  for (const char* name : {"q", "k", "v", "dout"}) {
    args.insert(args.end(), {std::string("--") + name, write_npy(name + std::string(".npy"), file.read(name))});
  }
  const CliRun npy = run_cli(args);
  ASSERT_EQ(npy.exit_code, 0) << npy.err;
  EXPECT_EQ(npy.json()["metrics"],
            run_cli({"attend", scratch("small.safetensors"), "--backward", "--json"}).json()["metrics"]);
}

TEST(Attend, JaggedSequencesAreAttendedOneByOne) {
  const std::string file = write_operands("jagged.safetensors", 64, 2, 32);
  const CliRun run = run_cli({"attend", file, "--cu-seqlens-q", "0,40,40,64", "--cu-seqlens-k", "0,40,40,64",
                              "--causal", "--smooth-k", "--json", "-o", scratch("jagged.out")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.json()["shape"]["batch"], 3);
  EXPECT_GT(sqnr(run.json(), "out"), 24);
  // The last 24 tokens alone give the same bits.
  std::vector<kit::NamedTensor> tail;
  for (const char* name : {"q", "k", "v"}) {
    kit::HostTensor t = kit::SafetensorsFile(file).read(name);
    t.shape[0] = 24;
    t.bytes.erase(t.bytes.begin(), t.bytes.begin() + 40 * 2 * 32 * 4);
    tail.push_back({name, t});
  }
  const std::string tail_file = write_file("tail.safetensors", tail);
  ASSERT_EQ(run_cli({"attend", tail_file, "--causal", "--smooth-k", "-o", scratch("tail.out")}).exit_code, 0);
  const std::vector<float> all = read_f32(kit::SafetensorsFile(scratch("jagged.out")), "out");
  const std::vector<float> last = read_f32(kit::SafetensorsFile(scratch("tail.out")), "out");
  EXPECT_EQ(std::vector<float>(all.begin() + 40 * 2 * 32, all.end()), last);
}

TEST(Attend, SharedQueryAndGroupedHeads) {
  const std::string file =
      write_file("shared.safetensors", {normal_tensor("q", {20, 4, 32}), normal_tensor("k", {70, 2, 32}),
                                        normal_tensor("v", {70, 2, 64}), normal_tensor("dout", {60, 4, 64})});
  const CliRun run = run_cli({"attend", file, "--shared-q", "--cu-seqlens-k", "0,30,30,70", "--backward", "--json",
                              "-o", scratch("shared.out"), "--report", scratch("shared.html")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.json()["shape"]["batch"], 3);
  EXPECT_GT(sqnr(run.json(), "dq"), 20);
  const kit::SafetensorsFile out(scratch("shared.out"));
  EXPECT_EQ(out.entry("out").shape, (std::vector<int64_t>{60, 4, 64}));
  EXPECT_EQ(out.entry("lse").shape, (std::vector<int64_t>{4, 60}));
  EXPECT_EQ(out.entry("dq").shape, (std::vector<int64_t>{20, 4, 32}));
  EXPECT_EQ(out.entry("dv").shape, (std::vector<int64_t>{70, 2, 64}));
}

// ---- the report

TEST(Report, IsSelfContainedAndItsAdviceIsMeasured) {
  const std::string page = scratch("report.html");
  const CliRun run = run_cli({"attend", kExample, "--causal", "--backward", "--json", "--report", page});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const std::string html = file_text(page);
  EXPECT_NE(html.find("<svg"), std::string::npos);
  EXPECT_NE(html.find("Accuracy by query position"), std::string::npos);
  EXPECT_NE(html.find("Scales of the operands"), std::string::npos);
  EXPECT_NE(html.find("Saturated and flushed"), std::string::npos);
  for (const char* load : {"http", "src=", "href=", "url(", "@import", "<script", "<link", "nan", ">inf"}) {
    EXPECT_EQ(html.find(load), std::string::npos) << load;
  }
  // The gains on the page are those that the command itself measures.
  const Json plain = attend(kExample), smooth = attend(kExample, {"--smooth-k"});
  const size_t row = html.find("smooth_k on</th>");
  ASSERT_NE(row, std::string::npos);
  std::string cells = html.substr(row, html.find("</tr>", row) - row);
  EXPECT_NE(cells.find("smooth_k would gain"), std::string::npos) << cells;
  EXPECT_NE(cells.find("--smooth-k"), std::string::npos) << cells;
  for (const std::string& tensor : kResults) {
    char gain[32];
    std::snprintf(gain, sizeof gain, ">%+.2f</td>", sqnr(smooth, tensor) - sqnr(plain, tensor));
    EXPECT_NE(cells.find(gain), std::string::npos) << tensor << " " << gain << " in " << cells;
  }
}

// ---- info; its list of operations and backends is in bench_test.cpp

TEST(Info, SaysWhatTheCpuBackendUses) {
  const CliRun json = run_cli({"info", "--json"}), table = run_cli({"info"});
  ASSERT_EQ(json.exit_code, 0) << json.err;
  const Json info = json.json(), cpu = info.at("cpu");
  const auto isas = cpu.at("available_isas").get<std::vector<std::string>>();
  EXPECT_EQ(std::count(isas.begin(), isas.end(), cpu.at("isa")), 1);
  EXPECT_EQ(isas.back(), "portable");
  EXPECT_EQ(cpu.at("available_maths"), Json({"exact", "fast"}));
  EXPECT_TRUE(cpu.at("math") == "exact" || cpu.at("math") == "fast");
  EXPECT_EQ(cpu.at("executor"), false);
  for (const std::string& line : {"isa     " + cpu.at("isa").get<std::string>() + " (available: ",
                                  "math    " + cpu.at("math").get<std::string>() + " (available: exact fast;",
                                  "threads " + cpu.at("threads").dump() + ", the library's own\n"}) {
    EXPECT_NE(table.out.find(line), std::string::npos) << line << " in\n" << table.out;
  }
}

TEST(Info, TheEnvironmentForcesAnInstructionSet) {
  setenv("MXFLASH_CPU_ISA", "portable", 1);
  const Json portable = run_cli({"info", "--json"}).json();
  setenv("MXFLASH_CPU_ISA", "mmx", 1);
  const CliRun unknown = run_cli({"info", "--json"});
  unsetenv("MXFLASH_CPU_ISA");
  EXPECT_EQ(portable.at("cpu").at("isa"), "portable");
  EXPECT_EQ(portable.at("cpu").at("math"), "exact");
  ASSERT_EQ(unknown.exit_code, 0) << unknown.err;
  const Json listed = unknown.json();
  for (const Json& op : listed.at("operations")) {
    for (const Json& backend : op.at("backends")) {
      if (backend.at("name") != "cpu") continue;
      EXPECT_EQ(backend.at("available"), false);
      EXPECT_NE(backend.at("reason").get<std::string>().find("MXFLASH_CPU_ISA"), std::string::npos) << backend;
    }
  }
}

}  // namespace
}  // namespace mxflash
