// The safetensors reader and writer: round trips, every kind of broken or hostile file by name, and byte mutations.
#include "kit/safetensors.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>

namespace mxflash::kit {
namespace {

using Bytes = std::vector<std::byte>;

Bytes to_bytes(std::string_view text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

Bytes with_length(uint64_t length, std::string_view rest) {
  Bytes file(8);
  for (size_t i = 0; i < 8; ++i) file[i] = std::byte(length >> (8 * i));
  const Bytes tail = to_bytes(rest);
  file.insert(file.end(), tail.begin(), tail.end());
  return file;
}

Bytes file_of(std::string_view header, size_t data_size) {
  return with_length(header.size(), std::string(header) + std::string(data_size, 'd'));
}

// A file of one tensor "x" whose entry has these fields.
Bytes file_of_x(const std::string& fields, size_t data_size) { return file_of("{\"x\":{" + fields + "}}", data_size); }

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const FileError& error) {
    return error.what();
  }
  return "no FileError";
}

void expect_error(const std::function<void()>& act, std::initializer_list<const char*> parts) {
  const std::string message = error_of(act);
  for (const char* part : parts) EXPECT_NE(message.find(part), std::string::npos) << message;
  EXPECT_EQ(message.find_first_of("\n\r"), std::string::npos) << message;
  EXPECT_LT(message.size(), 800u) << message;
}

void expect_rejected(const Bytes& file, std::initializer_list<const char*> parts) {
  expect_error([&] { SafetensorsFile::parse(file, "bad.safetensors"); }, parts);
  expect_error([&] { SafetensorsFile::parse(file, "bad.safetensors"); }, {"bad.safetensors: ", "; "});
}

std::string temp_path(const std::string& name) {
  const testing::TestInfo* test = testing::UnitTest::GetInstance()->current_test_info();
  return testing::TempDir() + "mxflash_" + std::to_string(::getpid()) + "_" + test->name() + "_" + name;
}

Bytes read_all(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  return to_bytes(text);
}

HostTensor random_tensor(FileDtype dtype, std::vector<int64_t> shape, uint32_t seed) {
  HostTensor tensor{dtype, std::move(shape), {}};
  tensor.bytes.resize(size_t(tensor.numel() * file_dtype_size(dtype)));
  std::mt19937 random(seed);
  for (std::byte& b : tensor.bytes) b = std::byte(random());
  return tensor;
}

void expect_equal(const HostTensor& got, const HostTensor& want) {
  EXPECT_EQ(got.dtype, want.dtype);
  EXPECT_EQ(got.shape, want.shape);
  EXPECT_EQ(got.bytes, want.bytes);
}

constexpr const char* kGoodFields = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";

TEST(HostTensor, DtypeTableIsIndexedByTheEnum) {
  for (size_t i = 0; i < kFileDtypes.size(); ++i) {
    const FileDtype dtype = kFileDtypes[i].dtype;
    EXPECT_EQ(size_t(dtype), i);
    EXPECT_EQ(file_dtype_from_name(file_dtype_name(dtype)), dtype);
    const Dtype library = to_library_dtype(dtype);
    if (library == Dtype::none) continue;
    EXPECT_EQ(to_file_dtype(library), dtype);
    EXPECT_EQ(dtype_size(library), file_dtype_size(dtype));
  }
  EXPECT_EQ(to_file_dtype(Dtype::none), std::nullopt);
  for (const Dtype library : {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::e4m3, Dtype::e5m2, Dtype::e8m0, Dtype::u8})
    EXPECT_TRUE(to_file_dtype(library).has_value()) << dtype_name(library);
}

TEST(HostTensor, NumelRejectsImpossibleShapes) {
  EXPECT_EQ((HostTensor{FileDtype::u8, {}, {}}.numel()), 1);
  EXPECT_EQ((HostTensor{FileDtype::u8, {3, 0, 5}, {}}.numel()), 0);
  EXPECT_THROW((HostTensor{FileDtype::u8, {-1}, {}}.numel()), std::length_error);
  EXPECT_THROW((HostTensor{FileDtype::u8, {int64_t{1} << 32, int64_t{1} << 31}, {}}.numel()), std::length_error);
}

TEST(HostTensor, MessagesAreOneLineWhateverTheyQuote) {
  const FileError error("a\nb", "got " + in_quotes("\x1b[31m\r\n\xff" + std::string(500, 'x')), "stop\there");
  const std::string message = error.what();
  EXPECT_EQ(message.find_first_of("\n\r\t\x1b\xff"), std::string::npos) << message;
  EXPECT_LT(message.size(), 200u);
}

TEST(Safetensors, RoundTripsEveryDtype) {
  std::vector<NamedTensor> tensors;
  for (const FileDtypeInfo& info : kFileDtypes)
    tensors.push_back({std::string(info.name), random_tensor(info.dtype, {3, 5}, uint32_t(tensors.size()))});
  const std::map<std::string, std::string> metadata{{"format", "pt"}, {"quote \" and \n", "gr\xc3\xbc\xc3\x9f"}};
  const std::string path = temp_path("all.safetensors");
  write_safetensors(path, tensors, metadata);

  const SafetensorsFile file(path);
  EXPECT_EQ(file.metadata(), metadata);
  ASSERT_EQ(file.entries().size(), tensors.size());
  const Bytes raw = read_all(path);
  const SafetensorsFile view = SafetensorsFile::parse(raw);
  const uint64_t data_start = raw.size() - [&] {
    size_t total = 0;
    for (const NamedTensor& named : tensors) total += named.tensor.bytes.size();
    return total;
  }();
  EXPECT_EQ(data_start % 8, 0u);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const SafetensorsEntry& entry = file.entries()[i];
    EXPECT_EQ(entry.name, tensors[i].name);
    EXPECT_EQ(entry.begin % uint64_t(file_dtype_size(entry.dtype)), 0u) << entry.name << " is not aligned";
    expect_equal(file.read(entry.name), tensors[i].tensor);
    expect_equal(view.read(entry.name), tensors[i].tensor);
  }
  std::filesystem::remove(path);
}

TEST(Safetensors, RoundTripsScalarsEmptyAndRank16) {
  const std::vector<NamedTensor> tensors{{"scalar", random_tensor(FileDtype::f64, {}, 1)},
                                         {"empty", random_tensor(FileDtype::f32, {4, 0, 2}, 2)},
                                         {"", random_tensor(FileDtype::u8, {1}, 3)},
                                         {"rank16", random_tensor(FileDtype::i16, std::vector<int64_t>(16, 1), 4)},
                                         {"line\nbreak \xe2\x82\xac", random_tensor(FileDtype::boolean, {7}, 5)}};
  const std::string path = temp_path("odd.safetensors");
  write_safetensors(path, tensors);
  const SafetensorsFile file(path);
  EXPECT_TRUE(file.metadata().empty());
  for (const auto& [name, tensor] : tensors) expect_equal(file.read(name), tensor);
  std::filesystem::remove(path);
}

TEST(Safetensors, RoundTripsNoTensors) {
  const std::string path = temp_path("none.safetensors");
  write_safetensors(path, {}, {{"only", "metadata"}});
  const SafetensorsFile file(path);
  EXPECT_TRUE(file.entries().empty());
  EXPECT_EQ(file.metadata().at("only"), "metadata");
  expect_error([&] { file.read("x"); }, {"tensor \"x\"", "the file is empty"});
  std::filesystem::remove(path);
}

TEST(Safetensors, ReadsWhatOthersWrite) {
  // Offsets not in the header's order, spaces after the header, an unaligned header, escapes in names.
  const Bytes file = file_of(
      "{ \"b\" : {\"shape\":[1,2],\"data_offsets\":[3,5],\"dtype\":\"U8\"},\n"
      "\"\\u0061\":{\"dtype\":\"F8_E4M3\",\"shape\":[3],\"data_offsets\":[0,3]},"
      "\"__metadata__\":{}}   ",
      5);
  const SafetensorsFile parsed = SafetensorsFile::parse(file);
  ASSERT_EQ(parsed.entries().size(), 2u);
  EXPECT_EQ(parsed.entries()[0].name, "b");
  EXPECT_EQ(parsed.entry("b").begin, 3u);
  EXPECT_EQ(parsed.read("a").shape, std::vector<int64_t>{3});
  EXPECT_TRUE(parsed.contains("a"));
  EXPECT_FALSE(parsed.contains("c"));
}

TEST(Safetensors, MissingTensorNamesWhatThereIs) {
  const Bytes bytes = file_of_x(kGoodFields, 8);
  const SafetensorsFile file = SafetensorsFile::parse(bytes);
  expect_error([&] { file.read("y"); }, {"must hold tensor \"y\"", "it holds \"x\""});
}

TEST(SafetensorsHostile, TooShortForALength) {
  expect_rejected({}, {"at least 8 bytes, got 0"});
  expect_rejected(Bytes(7), {"at least 8 bytes, got 7"});
}
TEST(SafetensorsHostile, HeaderLengthZero) {
  expect_rejected(with_length(0, "{}"), {"must begin with {, got nothing"});
}
TEST(SafetensorsHostile, HeaderLengthPastTheEnd) {
  expect_rejected(with_length(3, "{}"), {"must end within the file", "3 bytes with 2 left"});
}
TEST(SafetensorsHostile, HeaderLengthHuge) {
  expect_rejected(with_length(100'000'001, "{}"), {"at most 100000000 bytes, got 100000001"});
  expect_rejected(with_length(uint64_t{1} << 63, "{}"), {"got 9223372036854775808"});
  expect_rejected(with_length(~uint64_t{0}, "{}"), {"got 18446744073709551615"});
  expect_rejected(with_length(~uint64_t{0} - 7, "{}"), {"got 18446744073709551608"});
}
TEST(SafetensorsHostile, HeaderLengthAtTheCapButNotThere) {
  expect_rejected(with_length(100'000'000, "{}"), {"100000000 bytes with 2 left"});
}
TEST(SafetensorsHostile, HeaderCutOff) {
  const Bytes good = file_of_x(kGoodFields, 8);
  EXPECT_NO_THROW(SafetensorsFile::parse(good));
  for (size_t size = 0; size < good.size(); ++size) {
    const Bytes cut(good.begin(), good.begin() + int64_t(size));
    expect_rejected(cut, {});
  }
}
TEST(SafetensorsHostile, HeaderIsNoObject) {
  expect_rejected(file_of("[]", 0), {"must begin with {"});
  expect_rejected(file_of(" {}", 0), {"must begin with {"});
  expect_rejected(file_of("\xef\xbb\xbf{}", 0), {"must begin with {", "\\xef"});
}
TEST(SafetensorsHostile, HeaderIsNoJson) {
  expect_rejected(file_of("{", 0), {"valid JSON"});
  expect_rejected(file_of("{'x':1}", 0), {"valid JSON"});
  expect_rejected(file_of("{}{}", 0), {"valid JSON"});
  expect_rejected(file_of("{} x", 0), {"valid JSON"});
  expect_rejected(file_of("{/**/}", 0), {"valid JSON"});
}
TEST(SafetensorsHostile, ZeroByteHidesTheRestOfTheHeader) {
  expect_rejected(file_of(std::string_view("{}\0garbage", 10), 0), {"zero byte at its byte 2"});
}
TEST(SafetensorsHostile, InvalidUtf8) {
  expect_rejected(file_of("{\"\xff\":{}}", 0), {"valid JSON", "UTF-8", "\\xff"});
  expect_rejected(file_of("{\"\xc0\x80\":{}}", 0), {"UTF-8"});
  expect_rejected(file_of("{\"\xed\xa0\x80\":{}}", 0), {"UTF-8"});
  expect_rejected(file_of(R"({"\ud800":{}})", 0), {"valid JSON", "surrogate"});
}
TEST(SafetensorsHostile, DeepNesting) {
  for (const char* open : {"[", "{\"a\":"}) {
    std::string deep;
    for (int i = 0; i < 1'000'000; ++i) deep += open;
    expect_rejected(file_of("{\"x\":" + deep, 0), {"tensor \"x\""});
    expect_rejected(file_of("{\"x\":{\"shape\":" + deep, 0), {"tensor \"x\""});
    expect_rejected(file_of("{\"x\":{\"shape\":[" + deep, 0), {"extents must be integers", "got an"});
    expect_rejected(file_of("{\"__metadata__\":{\"k\":" + deep, 0), {"values of __metadata__ must be strings"});
  }
}
TEST(SafetensorsHostile, DuplicateKeys) {
  const std::string x = std::string("\"x\":{") + kGoodFields + "}";
  expect_rejected(file_of("{" + x + "," + x + "}", 8), {"unique, got \"x\" twice"});
  expect_rejected(file_of_x(std::string(kGoodFields) + R"(,"dtype":"F32")", 8), {"unique, got \"dtype\" twice"});
  expect_rejected(file_of_x(std::string(kGoodFields) + R"(,"shape":[2])", 8), {"unique, got \"shape\" twice"});
  expect_rejected(file_of(R"({"__metadata__":{},"__metadata__":{}})", 0), {"at most once"});
  expect_rejected(file_of(R"({"__metadata__":{"k":"1","k":"2"}})", 0), {"unique, got \"k\" twice"});
}
TEST(SafetensorsHostile, MissingKeys) {
  expect_rejected(file_of_x("", 0), {"must have a dtype"});
  expect_rejected(file_of_x(R"("dtype":"F32","data_offsets":[0,8])", 8), {"must have a shape"});
  expect_rejected(file_of_x(R"("dtype":"F32","shape":[2])", 8), {"must have data_offsets"});
}
TEST(SafetensorsHostile, UnknownKey) {
  expect_rejected(file_of_x(std::string(kGoodFields) + R"(,"strides":[1])", 8), {"only dtype, shape", "\"strides\""});
}
TEST(SafetensorsHostile, UnknownDtype) {
  expect_rejected(file_of_x(R"("dtype":"F4","shape":[2],"data_offsets":[0,1])", 1),
                  {"got \"F4\"", "convert it", "BF16"});
  expect_rejected(file_of_x(R"("dtype":"f32","shape":[2],"data_offsets":[0,8])", 8), {"got \"f32\""});
  expect_rejected(file_of_x(R"("dtype":"","shape":[2],"data_offsets":[0,8])", 8), {"got \"\""});
}
TEST(SafetensorsHostile, WrongTypes) {
  expect_rejected(file_of(R"({"x":null})", 0), {"tensor \"x\" must be an object, got null"});
  expect_rejected(file_of(R"({"x":[]})", 0), {"must be an object, got an array"});
  expect_rejected(file_of(R"({"__metadata__":"a"})", 0), {"__metadata__ must be an object of strings"});
  expect_rejected(file_of(R"({"__metadata__":{"k":1}})", 0), {"must be strings, got the number 1 for \"k\""});
  expect_rejected(file_of_x(R"("dtype":5)", 0), {"dtype must be a string, got the number 5"});
  expect_rejected(file_of_x(R"("dtype":{})", 0), {"dtype must be a string, got an object"});
  expect_rejected(file_of_x(R"("shape":"2")", 0), {"shape must be an array, got the string \"2\""});
  expect_rejected(file_of_x(R"("shape":{})", 0), {"shape must be an array, got an object"});
  expect_rejected(file_of_x(R"("shape":[true])", 0), {"extents must be integers", "got true"});
  expect_rejected(file_of_x(R"("data_offsets":false)", 0), {"data_offsets must be an array, got false"});
  expect_rejected(file_of_x(R"("data_offsets":["0",8])", 0), {"data_offsets must be integers", "got the string \"0\""});
}
TEST(SafetensorsHostile, NegativeNumbers) {
  expect_rejected(file_of_x(R"("shape":[-1])", 0), {"extents must be integers", "got the number -1"});
  expect_rejected(file_of_x(R"("shape":[-9223372036854775808])", 0), {"got the number -9223372036854775808"});
  expect_rejected(file_of_x(R"("data_offsets":[-8,0])", 0), {"data_offsets must be integers", "got the number -8"});
}
TEST(SafetensorsHostile, FractionalNumbers) {
  expect_rejected(file_of_x(R"("shape":[2.0])", 0), {"extents must be integers", "2.0"});
  expect_rejected(file_of_x(R"("data_offsets":[0,8e0])", 0), {"data_offsets must be integers", "8e0"});
  expect_rejected(file_of_x(R"("shape":[1e999])", 0), {"valid JSON"});
}
TEST(SafetensorsHostile, NumbersBeyond64Bits) {
  expect_rejected(file_of_x(R"("shape":[18446744073709551616])", 0), {"extents", "18446744073709551616"});
  expect_rejected(file_of_x(R"("shape":[9223372036854775808])", 0), {"below 2^63, got 9223372036854775808"});
}
TEST(SafetensorsHostile, WrongNumberOfOffsets) {
  expect_rejected(file_of_x(R"("data_offsets":[])", 0), {"2 numbers, got 0"});
  expect_rejected(file_of_x(R"("data_offsets":[0])", 0), {"2 numbers, got 1"});
  expect_rejected(file_of_x(R"("data_offsets":[0,4,8])", 0), {"2 numbers, got more"});
}
TEST(SafetensorsHostile, RankAboveTheLimit) {
  std::string shape = "1";
  for (int i = 1; i < 16; ++i) shape += ",1";
  const std::string rest = R"(],"dtype":"U8","data_offsets":[0,1])";
  const Bytes good = file_of_x("\"shape\":[" + shape + rest, 1);
  EXPECT_NO_THROW(SafetensorsFile::parse(good));
  expect_rejected(file_of_x("\"shape\":[" + shape + ",1" + rest, 1), {"at most 16 dimensions"});
}
TEST(SafetensorsHostile, SizeOverflow) {
  for (const char* shape : {"9223372036854775807", "4294967296,4294967296", "4611686018427387904",
                            "9223372036854775807,9223372036854775807,2", "2305843009213693952,4"})
    expect_rejected(file_of_x(std::string(R"("dtype":"F32","data_offsets":[0,0],"shape":[)") + shape + "]", 0),
                    {"below 2^63 bytes", shape == std::string_view("4611686018427387904") ? shape : ""});
}
TEST(SafetensorsHostile, ZeroExtentDoesNotExcuseOverflow) {
  for (const char* shape : {"0,4294967296,4294967296", "4294967296,4294967296,0", "4294967296,0,4294967296"})
    expect_rejected(file_of_x(std::string(R"("dtype":"F32","data_offsets":[0,0],"shape":[)") + shape + "]", 0),
                    {"below 2^63 bytes"});
  const Bytes good = file_of_x(R"("dtype":"F32","data_offsets":[0,0],"shape":[0,1024])", 0);
  EXPECT_TRUE(SafetensorsFile::parse(good).read("x").bytes.empty());
}
TEST(SafetensorsHostile, OffsetsPastTheEnd) {
  expect_rejected(file_of_x(kGoodFields, 7), {"stay within the 7 bytes of data, got [0, 8]", "cut off"});
  expect_rejected(
      file_of_x(R"("dtype":"U8","shape":[8],"data_offsets":[18446744073709551608,18446744073709551615])", 8),
      {"stay within the 8 bytes"});
  expect_rejected(file_of_x(R"("dtype":"U8","shape":[1000000000000],"data_offsets":[0,1000000000000])", 8),
                  {"stay within the 8 bytes"});
}
TEST(SafetensorsHostile, OffsetsDescend) {
  expect_rejected(file_of_x(R"("dtype":"U8","shape":[4],"data_offsets":[8,4])", 8), {"must ascend", "[8, 4]"});
}
TEST(SafetensorsHostile, OffsetsDisagreeWithShape) {
  expect_rejected(file_of_x(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])", 8), {"span the 12 bytes of F32 [3]"});
  expect_rejected(file_of_x(R"("dtype":"F32","shape":[],"data_offsets":[0,0])", 0), {"span the 4 bytes of F32 []"});
}
TEST(SafetensorsHostile, Overlap) {
  expect_rejected(file_of(R"({"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},)"
                          R"("b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
                          8),
                  {"tensor \"b\"", "not overlap", "begin at 5, got data_offsets [4, 8]"});
  expect_rejected(file_of(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                          R"("b":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})",
                          8),
                  {"not overlap"});
  expect_rejected(file_of(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                          R"("b":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}})",
                          8),
                  {"not overlap"});
}
TEST(SafetensorsHostile, Hole) {
  expect_rejected(file_of_x(R"("dtype":"U8","shape":[4],"data_offsets":[4,8])", 8), {"without a hole", "begin at 0"});
}
TEST(SafetensorsHostile, TrailingBytes) {
  expect_rejected(file_of_x(kGoodFields, 9), {"cover all 9 bytes", "trailing bytes after 8"});
  expect_rejected(file_of("{}", 1), {"cover all 1 bytes", "trailing bytes after 0"});
}
TEST(SafetensorsHostile, NamesCannotForgeMessages) {
  expect_rejected(file_of(R"({"a\n\u001b[2Jok\u2028":1})", 0), {"\"a\\x0a\\x1b[2Jok\\xe2\\x80\\xa8\""});
  expect_rejected(file_of("{\"" + std::string(100'000, 'n') + "\":1}", 0), {"nnn...\" must be an object"});
}

TEST(SafetensorsPath, Missing) {
  expect_error([] { SafetensorsFile{"/nonexistent/x.safetensors"}; },
               {"/nonexistent/x.safetensors: cannot be opened: No such file"});
  expect_error([] { SafetensorsFile{""}; }, {"cannot be opened"});
}
TEST(SafetensorsPath, Directory) {
  expect_error([] { SafetensorsFile{testing::TempDir()}; }, {"must be a regular file, got a directory"});
}
TEST(SafetensorsPath, DeviceOrPipe) {
  expect_error([] { SafetensorsFile{"/dev/zero"}; }, {"must be a regular file, got a device"});
  const std::string fifo = temp_path("fifo");
  std::filesystem::remove(fifo);
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  expect_error([&] { SafetensorsFile{fifo}; }, {"must be a regular file, got a device, pipe"});
  std::filesystem::remove(fifo);
}
TEST(SafetensorsPath, Unreadable) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may read every file";
  const std::string path = temp_path("secret.safetensors");
  write_safetensors(path, {});
  std::filesystem::permissions(path, std::filesystem::perms::none);
  expect_error([&] { SafetensorsFile{path}; }, {"cannot be opened: Permission denied"});
  std::filesystem::remove(path);
}
TEST(SafetensorsPath, ShrinksWhileRead) {
  const std::string path = temp_path("shrinks.safetensors");
  write_safetensors(path, {{"x", random_tensor(FileDtype::u8, {100}, 1)}});
  const SafetensorsFile file(path);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  expect_error([&] { file.read("x"); }, {"must not change while it is read"});
  std::filesystem::remove(path);
}

TEST(SafetensorsWrite, RejectsWhatNoReaderTakes) {
  const HostTensor good = random_tensor(FileDtype::f32, {2}, 1);
  const std::string path = temp_path("rejected.safetensors");
  const auto write = [&](const std::vector<NamedTensor>& tensors) { write_safetensors(path, tensors); };
  expect_error([&] { write({{"x", good}, {"x", good}}); }, {"must be unique", "\"x\""});
  expect_error([&] { write({{"__metadata__", good}}); }, {"not __metadata__"});
  expect_error([&] { write({{"x", {FileDtype::f32, {3}, good.bytes}}}); }, {"bytes of F32 [3], got 8"});
  expect_error([&] { write({{"x", {FileDtype::f32, {-2}, good.bytes}}}); }, {"bytes of F32 [-2], got 8"});
  expect_error([&] { write({{"x", {FileDtype::f32, std::vector<int64_t>(17, 1), good.bytes}}}); }, {"at most 16"});
  expect_error([&] { write({{"\xff", good}}); }, {"must be UTF-8"});
  expect_error([&] { write_safetensors(path, {}, {{"k", "\xff"}}); }, {"must be UTF-8"});
  EXPECT_FALSE(std::filesystem::exists(path));
}
TEST(SafetensorsWrite, ReplacesAFileAndLeavesNothingElse) {
  const std::string directory = temp_path("dir");
  std::filesystem::remove_all(directory);
  std::filesystem::create_directory(directory);
  const std::string path = directory + "/x.safetensors";
  std::filesystem::create_symlink("x.safetensors", directory + "/link");
  write_safetensors(path, {{"old", random_tensor(FileDtype::u8, {1000}, 1)}});
  write_safetensors(directory + "/link", {{"new", random_tensor(FileDtype::u8, {10}, 2)}});
  EXPECT_TRUE(SafetensorsFile(path).contains("new"));
  EXPECT_TRUE(std::filesystem::is_symlink(directory + "/link"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory), {}), 2);
  std::filesystem::remove_all(directory);
}
TEST(SafetensorsWrite, BadTargets) {
  expect_error([] { write_safetensors("/nonexistent/x.safetensors", {}); }, {"cannot be created: No such file"});
  expect_error([] { write_safetensors(testing::TempDir(), {}); }, {"got a directory or device"});
  expect_error([] { write_safetensors("/dev/null", {}); }, {"got a directory or device"});
}
TEST(SafetensorsWrite, FullDiskIsReportedAndCleanedUp) {
  const std::string directory = temp_path("limited");
  std::filesystem::remove_all(directory);
  std::filesystem::create_directory(directory);
  // A file size limit makes write() fail as a full disk does.
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const struct rlimit limit { 4096, before.rlim_max };
  const auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::string message = error_of([&] {
    write_safetensors(directory + "/x", {{"x", random_tensor(FileDtype::u8, {100'000}, 1)}});
  });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, old_handler);
  EXPECT_NE(message.find("/x: cannot be written: File too large"), std::string::npos) << message;
  EXPECT_TRUE(std::filesystem::is_empty(directory));
  std::filesystem::remove_all(directory);
}

// Either a file whose every tensor can be read, or a FileError of one line; anything else fails the test.
void parse_or_reject(const Bytes& file) {
  try {
    const SafetensorsFile parsed = SafetensorsFile::parse(file);
    for (const SafetensorsEntry& entry : parsed.entries()) {
      const HostTensor tensor = parsed.read(entry.name);
      ASSERT_EQ(int64_t(tensor.bytes.size()), tensor.numel() * file_dtype_size(tensor.dtype));
    }
  } catch (const FileError& error) {
    ASSERT_EQ(std::string_view(error.what()).find_first_of("\n\r"), std::string_view::npos) << error.what();
  }
}

TEST(SafetensorsMutation, NeverCrashes) {
  const std::string path = temp_path("seed.safetensors");
  write_safetensors(path,
                    {{"q", random_tensor(FileDtype::f8_e4m3, {2, 32}, 1)},
                     {"sfq", random_tensor(FileDtype::f8_e8m0, {2}, 2)},
                     {"lse", random_tensor(FileDtype::f32, {2, 1}, 3)}},
                    {{"format", "pt"}});
  const Bytes seed = read_all(path);
  std::filesystem::remove(path);
  const std::string_view json = "{}[]:,\"0123456789-.eE\\u \n\t";
  std::mt19937 random(20240501);
  for (int iteration = 0; iteration < 6000; ++iteration) {
    Bytes file = seed;
    const uint32_t edits = 1 + random() % 4;
    for (uint32_t i = 0; i < edits && !file.empty(); ++i) {
      const size_t at = random() % file.size();
      const auto here = file.begin() + int64_t(at);
      switch (random() % 6) {
        case 0: *here = std::byte(random()); break;
        case 1: *here = std::byte(json[random() % json.size()]); break;
        case 2: *here ^= std::byte(1u << (random() % 8)); break;
        case 3: file.erase(here, here + int64_t(random() % std::min<size_t>(file.size() - at, 9))); break;
        case 4: file.insert(here, std::byte(json[random() % json.size()])); break;
        case 5: file.resize(random() % 2 == 0 ? at : file.size() + 1); break;
      }
      // Keep the length true half of the time, or most mutants would die at the first check.
      if (random() % 2 == 0 && file.size() > 8) {
        const uint64_t length = file.size() - 8 - std::min<size_t>(file.size() - 8, 74);
        for (size_t j = 0; j < 8; ++j) file[j] = std::byte(length >> (8 * j));
      }
    }
    parse_or_reject(file);
    if (HasFatalFailure()) FAIL() << "iteration " << iteration;
  }
}

}  // namespace
}  // namespace mxflash::kit
