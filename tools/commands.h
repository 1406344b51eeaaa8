// The subcommands of `mxflash`. Each add_* registers one with its options and callback.
//
// Exit codes: 0 success; 1 a check failed (throw CheckFailed); 2 bad usage or input (throw UsageError, or let
// kit::FileError and kit::StatusError pass): one line `mxflash: ...` on stderr that says what to do. Results go to
// stdout, progress to stderr.
#pragma once

#include <CLI/CLI.hpp>

#include <stdexcept>

namespace mxflash::tools {

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// For the name of a file to write: a shell gives "" for a variable that is not set.
inline const CLI::Validator kNotEmpty([](std::string& name) { return name.empty() ? "the name is empty" : ""; }, "");

// Something was computed and found wrong; the details have been printed already.
struct CheckFailed {};

void add_info(CLI::App& app);
void add_quantize(CLI::App& app);
void add_attend(CLI::App& app);
void add_check(CLI::App& app);
void add_bench(CLI::App& app);
void add_model(CLI::App& app);

}  // namespace mxflash::tools
