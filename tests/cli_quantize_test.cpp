// `mxflash quantize`, and mistakes with it and with `mxflash attend`: each ends in exit code 2 and one line that names
// it.
#include <gtest/gtest.h>
#include <mxflash/quantize.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>

#include "cli_run.h"
#include "kit/compare.h"
#include "kit/runner.h"
#include "mx/float16.h"

namespace mxflash {
namespace {

using Json = nlohmann::json;

TEST(QuantizeCommand, WritesPayloadScalesAndMetadata) {
  const CliRun run =
      run_cli({"quantize", kExample, "--tensor", "k", "--cu-seqlens", "0,5,512", "-o", scratch("k.mx"), "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.err, "");
  const kit::SafetensorsFile file(scratch("k.mx"));
  EXPECT_EQ(file.entry("k").dtype, kit::FileDtype::f8_e4m3);
  EXPECT_EQ(file.entry("k").shape, (std::vector<int64_t>{512, 4, 128}));
  EXPECT_EQ(file.entry("k_scale").dtype, kit::FileDtype::f8_e8m0);
  EXPECT_EQ(file.entry("k_scale").shape, (std::vector<int64_t>{4, 768 / 32, 4}));  // 512 + 2 * 128 padded tokens
  EXPECT_EQ(file.metadata().at("block"), "square32");
  EXPECT_EQ(file.metadata().at("rule"), "rceil");
  EXPECT_EQ(file.metadata().at("element"), "e4m3");
  EXPECT_EQ(file.metadata().at("layout"), "linear");
  EXPECT_EQ(file.metadata().at("cu_seqlens"), "0,5,512");

  // What is in the file dequantizes to the input, as well as was printed.
  kit::HostTensor data = file.read("k"), scale = file.read("k_scale"),
                  source = kit::SafetensorsFile(kExample).read("k");
  const int32_t cu[]{0, 5, 512};
  const Jagged seq{.cu_seqlens = cu, .batch = 2, .max_seqlen = 507};
  const std::vector<float> got =
      kit::dequantize_to_floats(make_mx_tensor(data.bytes.data(), scale.bytes.data(), Dtype::e4m3, MxBlock::square32,
                                               ScaleLayout::linear, 512, 4, 128, seq),
                                seq);
  std::vector<double> exact(got.size());
  for (size_t i = 0; i < exact.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, source.bytes.data() + 2 * i, 2);
    exact[i] = double(decode_bf16(bits));
  }
  const Json json = run.json();
  EXPECT_DOUBLE_EQ(json.at("sqnr_db"), kit::compare(exact, got).sqnr_db);
  EXPECT_GT(json["sqnr_db"], 30);
  EXPECT_EQ(json.at("saturated"), 0);
  EXPECT_EQ(json.at("blocks"), 4 * 4 * (1 + 16));
  EXPECT_LT(json.at("scale_exponent").at("min"), json["scale_exponent"].at("max"));
  EXPECT_EQ(json.at("bytes").at("before"), 512 * 4 * 128 * 2);
  EXPECT_EQ(json["bytes"].at("after"), 512 * 4 * 128 + 768 / 32 * 4 * 4);
}

TEST(QuantizeCommand, TakesNpyAndRank2AndEveryOption) {
  const std::string npy = write_npy("rows.npy", normal_tensor("x", {40, 48}).tensor);
  for (const char* block : {"square32", "row32", "col32"}) {
    const CliRun run = run_cli({"quantize", npy, "--block", block, "--rule", "floor", "--element", "e5m2", "-o",
                                scratch("rows.mx"), "--json"});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    EXPECT_EQ(run.json()["shape"], Json({40, 48}));
    EXPECT_GT(run.json()["sqnr_db"], 20);
    const kit::SafetensorsFile file(scratch("rows.mx"));
    EXPECT_EQ(file.entry("rows").dtype, kit::FileDtype::f8_e5m2);
    EXPECT_TRUE(file.contains("rows_scale"));
  }
  const CliRun table = run_cli({"quantize", npy, "-o", scratch("rows.mx")});
  EXPECT_NE(table.out.find("SQNR"), std::string::npos) << table.out;
}

void expect_one_line(const std::vector<std::string>& args, const std::string& words) {
  const CliRun run = run_cli(args);
  EXPECT_EQ(run.exit_code, 2) << words;
  EXPECT_EQ(run.out, "") << words;
  EXPECT_EQ(run.err.rfind("mxflash: ", 0), 0u) << run.err;
  EXPECT_EQ(std::count(run.err.begin(), run.err.end(), '\n'), 1) << run.err;
  EXPECT_NE(run.err.find(words), std::string::npos) << words << " in " << run.err;
}

TEST(Mistakes, InTheFile) {
  const std::vector<int64_t> shape{8, 2, 64};
  const auto with_q = [&](const std::string& file, kit::NamedTensor q) {
    q.name = "q";
    return write_file(file, {q, normal_tensor("k", shape), normal_tensor("v", shape)});
  };
  expect_one_line({"attend", scratch("nowhere.safetensors")}, "No such file");
  expect_one_line({"attend", MXFLASH_SOURCE_DIR "/CMakeLists.txt"}, "no safetensors file");
  expect_one_line({"attend", scratch_directory().string()}, "directory");
  std::ofstream(scratch("cut.safetensors"), std::ios::binary) << file_text(kExample).substr(0, 100000);
  expect_one_line({"attend", scratch("cut.safetensors")}, "cut off");
  expect_one_line({"attend", write_operands("ok.safetensors", 8, 2, 64), "--q", "query"}, "it holds \"q\" \"k\"");
  kit::NamedTensor wrong{"q", {.dtype = kit::FileDtype::i32, .shape = shape, .bytes = std::vector<std::byte>(4096)}};
  expect_one_line({"attend", with_q("i32.safetensors", wrong)}, "got I32");
  wrong.tensor = {.dtype = kit::FileDtype::f8_e4m3, .shape = shape, .bytes = std::vector<std::byte>(1024)};
  expect_one_line({"attend", with_q("fp8.safetensors", wrong)}, "without their scales");
  expect_one_line({"attend", with_q("rank.safetensors", normal_tensor("q", {8, 64}))}, "got [8, 64]");
  expect_one_line({"attend", with_q("heads.safetensors", normal_tensor("q", {8, 3, 64}))}, "num_heads_q = 3");
  expect_one_line({"attend", with_q("dim.safetensors", normal_tensor("q", {8, 2, 32}))}, "same head_dim");
  expect_one_line({"attend", with_q("empty.safetensors", normal_tensor("q", {0, 2, 64}))}, "got [0, 2, 64]");
  expect_one_line({"attend", write_operands("d20.safetensors", 8, 2, 20)}, "head_dim must be a multiple of 8, got 20");
  const std::string no_dout = with_q("no_dout.safetensors", normal_tensor("q", shape));
  expect_one_line({"attend", no_dout, "--backward"}, "pass --dout NAME");
  expect_one_line({"attend", no_dout, "--backward", "--dout", "gradient"}, "\"gradient\"");
}

TEST(Mistakes, InTheOptions) {
  const std::string ok = write_operands("ok.safetensors", 8, 2, 64);
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
      {{"--block", "row16"}, "row16"},
      {{"--rule", "even"}, "even"},
      {{"--grad-element", "e3m4"}, "e3m4"},
      {{"--window", "3"}, "got \"3\""},
      {{"--window", "1,2,3"}, "1,2,3"},
      {{"--window", "1,9999999999"}, "9999999999"},
      {{"--cu-seqlens-q", "1,8", "--cu-seqlens-k", "0,8"}, "start with 0, got 1"},
      {{"--cu-seqlens-q", "0,5,3,8", "--cu-seqlens-k", "0,8"}, "got 3 after 5"},
      {{"--cu-seqlens-q", "0,9", "--cu-seqlens-k", "0,8"}, "8, got 9"},
      {{"--cu-seqlens", "0,9"}, "--cu-seqlens must end with the number of tokens, 8, got 9"},
      {{"--cu-seqlens", "0,8", "--cu-seqlens-q", "0,9"}, "--cu-seqlens-q must end"},
      {{"--cu-seqlens-k", "0,4294967304"}, "4294967304"},
      {{"--cu-seqlens-k", "0,x"}, "got \"x\""},
      {{"--cu-seqlens-k", "0,4,8"}, "got 1 and 2"},
      {{"--shared-q", "--cu-seqlens-q", "0,4,8"}, "one query sequence"},
      {{"--shared-q", "--cu-seqlens", "0,4,8"}, "got --cu-seqlens with 2"},
      {{"--shared-q", "--cu-seqlens-k", "0,4,8", "--backward"}, "shape of out, [16, 2, 64], got [8, 2, 64]"},
      {{"--softmax-scale", "nan"}, "got nan"},
      {{"--rotate-seed", "18446744073709551616"}, "18446744073709551616"},
      {{"--rotate-seed", "-1"}, "-1"},
      {{"--backend", "cuda"}, "'cuda'"},
      {{"--threads", "0"}, "0"},
      {{"--threads", "257"}, "257"},
      {{"-o", scratch("no_such_directory/x")}, "cannot be created"},
      {{"--report", scratch("no_such_directory/x")}, "cannot be created"},
      {{"-o", ""}, "--output: the name is empty"},
      {{"--report", ""}, "--report: the name is empty"},
      {{"--report", scratch("x.html"), "--no-compare"}, "--no-compare"},
      {{"--frobnicate"}, "--frobnicate"},
      {{"--frobnicate"}, "mxflash attend --help"},
  };
  for (const auto& [options, words] : cases) {
    std::vector<std::string> args{"attend", ok};
    args.insert(args.end(), options.begin(), options.end());
    expect_one_line(args, words);
  }
  expect_one_line({}, "subcommand");
  expect_one_line({"attend"}, ".npy");
  expect_one_line({"attend", scratch("q.npy")}, "--q");
  expect_one_line({"quantize", ok, "-o", scratch("x")}, "--tensor");
  expect_one_line({"quantize", ok, "--tensor", "q"}, "--output");
  expect_one_line({"quantize", ok, "--tensor", "q", "--block", "row32+col32", "-o", scratch("x")}, "row32+col32");
  expect_one_line({"quantize", ok, "--tensor", "q", "--cu-seqlens", "0,7", "-o", scratch("x")}, "8, got 7");
  expect_one_line({"quantize", ok, "--tensor", "q", "-o", scratch("no_such_directory/x")}, "cannot be created");
}

// With a backend that does not exist, computing anything would be the mistake that is named.
TEST(Mistakes, UnwritablePlacesAreFoundBeforeTheWork) {
  const std::string ok = write_operands("ok.safetensors", 8, 2, 64), nowhere = scratch("no_such_directory/x");
  setenv("MXFLASH_BACKEND", "no_such_backend", 1);
  expect_one_line({"attend", ok, "-o", nowhere}, "cannot be created");
  expect_one_line({"attend", ok, "--report", nowhere}, "cannot be created");
  expect_one_line({"quantize", ok, "--tensor", "q", "-o", nowhere}, "cannot be created");
  expect_one_line({"attend", ok, "-o", scratch("x")}, "no_such_backend");
  expect_one_line({"quantize", ok, "--tensor", "q", "-o", scratch("x")}, "no_such_backend");
  unsetenv("MXFLASH_BACKEND");
  for (const auto& entry : std::filesystem::directory_iterator(scratch_directory())) {
    EXPECT_EQ(entry.path().string().find(".tmp-"), std::string::npos) << entry.path();
  }
}

TEST(Mistakes, AnOutputThatWouldDestroyAFile) {
  const std::string ok = write_operands("ok.safetensors", 8, 2, 64), before = file_text(ok);
  const std::string words = "neither an input nor another output";
  std::filesystem::create_hard_link(ok, scratch("link.safetensors"));
  expect_one_line({"attend", ok, "-o", ok}, words);
  expect_one_line({"attend", ok, "--report", scratch("link.safetensors")}, words);
  expect_one_line({"attend", ok, "-o", scratch("both"), "--report", scratch("both")}, words);
  expect_one_line({"quantize", ok, "--tensor", "q", "-o", ok}, words);
  expect_one_line({"quantize", ok, "--tensor", "q", "-o", scratch("x.npy")}, ".safetensors");
  EXPECT_EQ(file_text(ok), before);
}

TEST(Mistakes, ResultsThatCannotBePrinted) {
  const std::string err = scratch("full.err");
  const auto exit_code = [&](const std::string& args) {
    const int status = std::system(("'" MXFLASH_CLI "' " + args + " > /dev/full 2> '" + err + "'").c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  const std::string ok = write_operands("ok.safetensors", 8, 2, 64);
  for (const std::string& args :
       {std::string("info"), std::string("info --json"), std::string("--version"), "attend '" + ok + "' --json",
        "quantize '" + ok + "' --tensor q -o '" + ok + ".mx'"}) {
    EXPECT_EQ(exit_code(args), 2) << args;
    const std::string text = file_text(err);
    EXPECT_NE(text.find("stdout"), std::string::npos) << args << ": " << text;
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << args << ": " << text;
  }
  EXPECT_EQ(exit_code("attend"), 2);
  EXPECT_EQ(file_text(err).find("stdout"), std::string::npos) << "one mistake, one line";
}

}  // namespace
}  // namespace mxflash
