// Every backend that can run here passes `mxflash check`: the quick list, a test per case, and the command itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "cli_run.h"
#include "kit/verify.h"

namespace mxflash::kit {
namespace {

std::string all_failures(const Report& report) {
  std::string all;
  for (const std::string& failure : report.failures) all += failure + '\n';
  return all;
}

// ---- every backend ----------------------------------------------------------------------------------------------

struct BackendCase {
  std::string backend, unavailable;  // why it cannot run here
  AttentionCase problem;
  Dtype grad_element;
  CpuMath cpu_math;
};
void PrintTo(const BackendCase& c, std::ostream* os) { *os << c.backend << ' ' << c.problem.name; }

std::vector<BackendCase> backend_cases() {
  std::vector<BackendCase> cases;
  for (int32_t i = 0; i < num_backends(Operation::attention_fwd); ++i) {
    const BackendInfo b = backend_info(Operation::attention_fwd, i);
    for (const Dtype element : {Dtype::e4m3, Dtype::e5m2}) {
      for (const AttentionCase& c : check_cases(true)) {
        for (const CpuMath math : modes_of(b.name)) {
          cases.push_back({b.name, b.available.ok() ? "" : b.available.message, c, element, math});
        }
      }
    }
  }
  return cases;
}

class AttentionCheck : public testing::TestWithParam<BackendCase> {};

TEST_P(AttentionCheck, Passes) {
  const BackendCase& c = GetParam();
  if (!c.unavailable.empty()) GTEST_SKIP() << c.unavailable;
  VerifyOptions options = attention_backends(c.backend);
  options.grad_element = c.grad_element;
  options.cpu_math = c.cpu_math;
  const Report report = verify_attention(c.problem, options);
  if (!report.skipped.empty()) GTEST_SKIP() << report.skipped;
  EXPECT_TRUE(report.ok()) << all_failures(report);
}

INSTANTIATE_TEST_SUITE_P(Backends, AttentionCheck, testing::ValuesIn(backend_cases()), [](const auto& info) {
  const BackendCase& c = info.param;
  const std::string mode = c.cpu_math == CpuMath::automatic ? "" : std::string("_") + cpu_math_name(c.cpu_math);
  return c.backend + mode + "_" + c.problem.name + (c.grad_element == Dtype::e5m2 ? "_e5m2" : "");
});

TEST(QuantizerCheck, Passes) {
  for (const std::string& backend : available_backends(Operation::quantize)) {
    int reports = 0;
    verify_quantizers(backend, [&](const Report& report) {
      ++reports;
      EXPECT_TRUE(report.ok()) << backend << ' ' << report.name << ": " << all_failures(report);
    });
    EXPECT_GE(reports, 12);
  }
}

// ---- the command ------------------------------------------------------------------------------------------------

TEST(CheckCommand, PrintsOneObjectACheck) {
  const CliRun run = run_cli({"check", "--quick", "--json", "--backend", "ref"});
  ASSERT_EQ(run.exit_code, 0) << run.out << run.err;
  std::istringstream lines(run.out);
  size_t checks = 0;
  for (std::string line; std::getline(lines, line); ++checks) {
    const auto json = nlohmann::json::parse(line);
    EXPECT_EQ(json.at("status"), "ok") << line;
    EXPECT_EQ(json.at("backend"), "ref");
    if (json.at("check") != "dense_d64") continue;
    EXPECT_NEAR(json.at("tensors").at("out").at("sqnr_db").get<double>(), 25.6, 1);
    EXPECT_LT(json.at("tensors").at("dv").at("bound_share").get<double>(), 1);
  }
  EXPECT_GE(checks, check_cases(true).size() + 12);
}

TEST(CheckCommand, ChecksBothModesOfTheCpuBackend) {
  const CliRun run = run_cli({"check", "--quick", "--json", "--backend", "cpu"});
  ASSERT_EQ(run.exit_code, 0) << run.out << run.err;
  std::istringstream lines(run.out);
  std::map<std::string, double> dq_share;  // by mode
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line);
    if (json.at("check") != "dense_d64") continue;
    dq_share[json.at("mode")] = json.at("tensors").at("dq").at("bound_share").get<double>();
  }
  ASSERT_EQ(dq_share.size(), 2u);
  EXPECT_LT(dq_share.at("exact"), 1);
  EXPECT_LT(dq_share.at("fast"), 1);
}

TEST(CheckCommand, PrintsATableAndASummary) {
  const CliRun run = run_cli({"check", "--quick"});
  ASSERT_EQ(run.exit_code, 0) << run.out << run.err;
  EXPECT_NE(run.out.find("ok      causal_d64"), std::string::npos) << run.out;
  EXPECT_NE(run.out.find(" checks ok, 0 failed, 0 skipped"), std::string::npos) << run.out;
}

TEST(CheckCommand, ChecksNamedCasesAlone) {
  const CliRun run = run_cli({"check", "--quick", "--json", "--backend", "ref", "--only", "dense_d64,causal_d64"});
  ASSERT_EQ(run.exit_code, 0) << run.out << run.err;
  EXPECT_EQ(std::ranges::count(run.out, '\n'), 2) << run.out;
  const CliRun unknown = run_cli({"check", "--only", "dense"});
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_NE(unknown.err.find("--only must name attention cases"), std::string::npos) << unknown.err;
}

TEST(CheckCommand, RejectsABackendThatDoesNotExist) {
  const CliRun run = run_cli({"check", "--backend", "abacus"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(run.err,
            "mxflash: --backend (or MXFLASH_BACKEND) must be one of sm100, sm90, cpu, ref, sm90_bf16, got 'abacus'\n");
  EXPECT_EQ(run.out, "");
}

}  // namespace
}  // namespace mxflash::kit
