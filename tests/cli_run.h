// Runs the built `mxflash` as a user would: its own process, real files.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "kit/random.h"
#include "kit/safetensors.h"

namespace mxflash {

// 512 tokens of 4 heads of a real layer.
inline const std::string kExample = MXFLASH_SOURCE_DIR "/examples/data/gpt_layer1_512.safetensors";

// A directory that disappears with the process.
inline const std::filesystem::path& scratch_directory() {
  struct Directory {
    std::filesystem::path path;
    Directory() {
      std::string name = testing::TempDir() + "mxflash_cli_XXXXXX";
      if (!mkdtemp(name.data())) std::abort();
      path = name;
    }
    ~Directory() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  };
  static const Directory directory;
  return directory.path;
}
inline std::string scratch(const std::string& name) { return (scratch_directory() / name).string(); }

inline std::string file_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

struct CliRun {
  int exit_code = -1;  // negative: ended by that signal
  std::string out, err;
  nlohmann::json json() const { return nlohmann::json::parse(out); }  // throws if it is not exactly one value
};

inline CliRun run_cli(std::vector<std::string> args) {
  const std::string out = scratch("stdout"), err = scratch("stderr");
  const pid_t child = fork();
  if (child == 0) {
    args.insert(args.begin(), MXFLASH_CLI);
    std::vector<char*> argv;
    for (std::string& arg : args) argv.push_back(arg.data());
    argv.push_back(nullptr);
    if (freopen(out.c_str(), "w", stdout) && freopen(err.c_str(), "w", stderr)) execv(argv[0], argv.data());
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return {.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status),
          .out = file_text(out),
          .err = file_text(err)};
}

// Operands for one call: a name and a shape each, N(0, 1) in F32.
inline kit::NamedTensor normal_tensor(const std::string& name, const std::vector<int64_t>& shape, uint64_t stream = 0) {
  kit::HostTensor t{.dtype = kit::FileDtype::f32, .shape = shape, .bytes = {}};
  std::vector<float> x(size_t(t.numel()));
  kit::Random random(7, stream ? stream : uint64_t(name.front()));
  kit::fill_normal(random, x);
  const auto bytes = std::as_bytes(std::span(x));
  t.bytes.assign(bytes.begin(), bytes.end());
  return {name, t};
}

inline std::string write_file(const std::string& name, const std::vector<kit::NamedTensor>& tensors) {
  kit::write_safetensors(scratch(name), tensors);
  return scratch(name);
}

// q, k, v and dout of one self-attention.
inline std::string write_operands(const std::string& name, int64_t tokens, int64_t heads, int64_t dim) {
  const std::vector<int64_t> shape{tokens, heads, dim};
  return write_file(name, {normal_tensor("q", shape), normal_tensor("k", shape), normal_tensor("v", shape),
                           normal_tensor("dout", shape)});
}

inline std::string write_npy(const std::string& name, const kit::HostTensor& t) {
  std::string extents;
  for (const int64_t extent : t.shape) extents += std::to_string(extent) + ", ";
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + extents + "), }";
  header.resize((header.size() + 10) / 64 * 64 + 64 - 10, ' ');
  header.back() = '\n';
  std::ofstream file(scratch(name), std::ios::binary);
  file << "\x93NUMPY\x01" << '\0' << char(header.size() & 255) << char(header.size() >> 8) << header;
  file.write(reinterpret_cast<const char*>(t.bytes.data()), std::streamsize(t.bytes.size()));
  return scratch(name);
}

inline std::vector<float> read_f32(const kit::SafetensorsFile& file, const std::string& name) {
  const kit::HostTensor t = file.read(name);
  EXPECT_EQ(t.dtype, kit::FileDtype::f32) << name;
  std::vector<float> x(size_t(t.numel()));
  if (!x.empty() && t.dtype == kit::FileDtype::f32) std::memcpy(x.data(), t.bytes.data(), t.bytes.size());
  return x;
}

}  // namespace mxflash
