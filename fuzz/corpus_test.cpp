// Feeds every file of fuzz/corpus to its fuzz target, without libFuzzer: what fuzzing once found stays mended under any
// compiler. A finding aborts; the last file named is the input.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

// LLVMFuzzerTestOneInput of npy_fuzz.cpp and safetensors_fuzz.cpp, renamed by the build.
extern "C" int fuzz_npy(const uint8_t* data, size_t size);
extern "C" int fuzz_safetensors(const uint8_t* data, size_t size);

namespace {

// How many files there were.
int replay(const std::filesystem::path& folder, int (*target)(const uint8_t*, size_t)) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    // Exactly as long as the input, so that AddressSanitizer sees a read beyond it.
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    std::printf("%s, %zu bytes\n", entry.path().c_str(), bytes.size());
    std::fflush(stdout);
    target(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    ++count;
  }
  return count;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: fuzz_corpus_test CORPUS\n");
    return 2;
  }
  const std::filesystem::path corpus = argv[1];
  const bool any_npy = replay(corpus / "npy", fuzz_npy) > 0;
  const bool any_safetensors = replay(corpus / "safetensors", fuzz_safetensors) > 0;
  return any_npy && any_safetensors ? 0 : 1;
}
