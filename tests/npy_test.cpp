// The .npy reader: every version and dtype, every kind of broken or hostile file by name, and byte mutations.
#include "kit/npy.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>

namespace mxflash::kit {
namespace {

// The bytes of a .npy file. `length` stands in the header length field when it is not the true one.
std::string npy(int major, std::string_view header, std::string_view data, int64_t length = -1) {
  std::string file = "\x93NUMPY";
  file += {char(major), '\0'};
  const uint64_t size = length < 0 ? header.size() : uint64_t(length);
  for (int i = 0; i < (major == 1 ? 2 : 4); ++i) file += char(size >> (8 * i));
  return file.append(header).append(data);
}

std::string dict(std::string_view descr, std::string_view shape) {
  return "{'descr': '" + std::string(descr) + "', 'fortran_order': False, 'shape': " + std::string(shape) + ", }  \n";
}

HostTensor parse(std::string_view file) { return parse_npy(std::as_bytes(std::span(file)), "bad.npy"); }

void expect_error(const std::function<void()>& act, std::initializer_list<const char*> parts) {
  std::string message = "no FileError";
  try {
    act();
  } catch (const FileError& error) {
    message = error.what();
  }
  for (const char* part : parts) EXPECT_NE(message.find(part), std::string::npos) << message;
  EXPECT_EQ(message.find_first_of("\n\r"), std::string::npos) << message;
  EXPECT_LT(message.size(), 800u) << message;
}

void expect_rejected(std::string_view file, std::initializer_list<const char*> parts) {
  expect_error([&] { parse(file); }, parts);
  expect_error([&] { parse(file); }, {"bad.npy: ", "; "});
}

void expect_header_rejected(std::string_view header, std::initializer_list<const char*> parts) {
  expect_rejected(npy(1, header, "dddd"), parts);
}

TEST(Npy, ReadsEveryDtypeInEveryVersion) {
  int num_dtypes = 0;
  for (const FileDtypeInfo& info : kFileDtypes) {
    if (info.descr.empty()) continue;
    ++num_dtypes;
    for (const int major : {1, 2, 3}) {
      std::string data;
      for (int64_t i = 0; i < 6 * info.size; ++i) data += char(i * 37 + major);
      const HostTensor tensor = parse(npy(major, dict(info.descr, "(2, 3)"), data));
      EXPECT_EQ(tensor.dtype, info.dtype);
      EXPECT_EQ(tensor.shape, (std::vector<int64_t>{2, 3}));
      ASSERT_EQ(tensor.bytes.size(), data.size());
      EXPECT_TRUE(std::equal(data.begin(), data.end(), reinterpret_cast<const char*>(tensor.bytes.data())));
    }
  }
  EXPECT_EQ(num_dtypes, 12);
}

TEST(Npy, ReadsScalarsVectorsAndEmptyArrays) {
  EXPECT_EQ(parse(npy(1, dict("<f4", "()"), "abcd")).shape, std::vector<int64_t>{});
  EXPECT_EQ(parse(npy(1, dict("|u1", "(3,)"), "abc")).shape, std::vector<int64_t>{3});
  EXPECT_EQ(parse(npy(1, dict("|u1", "(1, 3,)"), "abc")).shape, (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(parse(npy(1, dict("<f8", "(4, 0)"), "")).numel(), 0);
}

TEST(Npy, ReadsOtherLegalLayoutsOfTheHeader) {
  EXPECT_EQ(parse(npy(1, "{\"shape\":(2,),\"descr\":\"|u1\",\"fortran_order\":False}", "ab")).numel(), 2);
  EXPECT_EQ(parse(npy(1, " { 'fortran_order' : False , 'shape' : ( 2 , ) , 'descr' : '|u1' } \n", "ab")).numel(), 2);
}

TEST(Npy, ReadsAFile) {
  // The exact bytes of numpy.save of numpy.array([[1, -1]], dtype='<i2').
  const std::string header =
      "{'descr': '<i2', 'fortran_order': False, 'shape': (1, 2), }" + std::string(58, ' ') + "\n";
  const std::string path = testing::TempDir() + "mxflash_" + std::to_string(::getpid()) + "_ReadsAFile.npy";
  std::ofstream(path, std::ios::binary) << npy(1, header, std::string("\x01\x00\xff\xff", 4));
  const HostTensor tensor = read_npy(path);
  EXPECT_EQ(std::filesystem::file_size(path), 128u + 4u);
  EXPECT_EQ(tensor.dtype, FileDtype::i16);
  EXPECT_EQ(tensor.bytes[2], std::byte(0xff));
  std::filesystem::remove(path);
}

TEST(NpyHostile, EveryTruncation) {
  const std::string good = npy(1, dict("<f4", "(2, 3)"), std::string(24, 'd'));
  EXPECT_NO_THROW(parse(good));
  for (size_t size = 0; size < good.size(); ++size) expect_rejected(std::string_view(good).substr(0, size), {});
  expect_rejected(good.substr(0, 7), {"at least 8 bytes, got 7"});
  expect_rejected(good.substr(0, 9), {"at least 10 bytes, got 9"});
  expect_rejected(good.substr(0, good.size() - 1), {"exactly the 24 bytes", "got 23 (cut off)"});
}
TEST(NpyHostile, WrongMagic) { expect_rejected("PK\x03\x04 not an array", {"must begin with \\x93NUMPY", "PK\\x03"}); }
TEST(NpyHostile, UnknownVersion) {
  expect_rejected(npy(4, dict("<f4", "()"), "dddd"), {"1.0, 2.0 or 3.0, got 4.0"});
  expect_rejected(npy(0, dict("<f4", "()"), "dddd"), {"got 0.0"});
  std::string file = npy(1, dict("<f4", "()"), "dddd");
  file[7] = 1;
  expect_rejected(file, {"got 1.1"});
}
TEST(NpyHostile, HeaderLengthPastTheEnd) {
  expect_rejected(npy(1, "{}", "", 3), {"must end within the file", "3 bytes with 2 left"});
  expect_rejected(npy(1, "{}", "", 65535), {"65535 bytes with 2 left"});
}
TEST(NpyHostile, HeaderLengthHuge) {
  expect_rejected(npy(2, "{}", "", 0xffffffff), {"at most 65535 bytes, got 4294967295"});
  expect_rejected(npy(3, "{}", "", 0x80000000), {"at most 65535 bytes, got 2147483648"});
}
TEST(NpyHostile, HeaderLengthZero) { expect_rejected(npy(1, "", "dddd"), {"have { at its byte 0, got its end"}); }
TEST(NpyHostile, BigEndian) {
  expect_header_rejected(dict(">f4", "()"), {"little-endian, got \">f4\"", "newbyteorder"});
}
TEST(NpyHostile, UnknownDtype) {
  expect_header_rejected(dict("<c8", "()"), {"got \"<c8\"", "convert it to one of <f8 <f4"});
  expect_header_rejected(dict("|O", "()"), {"got \"|O\""});
  expect_header_rejected(dict("<V2", "()"), {"got \"<V2\"", "bf16"});
  expect_header_rejected(dict("", "()"), {"got \"\""});
}
TEST(NpyHostile, StructuredDtype) {
  expect_header_rejected("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': ()}", {"got a structured one"});
}
TEST(NpyHostile, FortranOrder) {
  expect_header_rejected("{'descr': '<f4', 'fortran_order': True, 'shape': (1, 1), }",
                         {"fortran_order must be False (C order), got True", "ascontiguousarray"});
}
TEST(NpyHostile, MissingKeys) {
  expect_header_rejected("{}", {"got no descr"});
  expect_header_rejected("{'descr': '<f4', 'shape': ()}", {"got no fortran_order"});
  expect_header_rejected("{'descr': '<f4', 'fortran_order': False}", {"got no shape"});
}
TEST(NpyHostile, DuplicateKeys) {
  expect_header_rejected("{'descr': '<f4', 'descr': '<f4'}", {"once each, got key \"descr\""});
  expect_header_rejected("{'shape': (), 'shape': ()}", {"once each, got key \"shape\""});
  expect_header_rejected("{'fortran_order': False, 'fortran_order': False}", {"got key \"fortran_order\""});
}
TEST(NpyHostile, UnknownKey) { expect_header_rejected("{'order': False}", {"once each, got key \"order\""}); }
TEST(NpyHostile, NotADict) {
  expect_header_rejected("['descr']", {"have { at its byte 0"});
  expect_header_rejected("{'descr'}", {"have : at its byte 8"});
  expect_header_rejected("{'descr': '<f4' 'shape': ()}", {"have }"});
  expect_header_rejected("{,}", {"a key in quotes"});
  expect_header_rejected("{'descr': '<f4", {"close its strings", "got its end"});
  expect_header_rejected("{'de\\x73cr': '<f4'}", {"no escapes"});
  expect_header_rejected("{'descr': b'<f4'}", {"have a descr in quotes"});
  expect_header_rejected("{'fortran_order': 0}", {"True or False"});
  expect_header_rejected(dict("<f4", "()") + "__import__('os')", {"end after the dict"});
  expect_header_rejected(dict("<f4", "()") + '\0', {"end after the dict"});
}
TEST(NpyHostile, DeepNesting) {
  expect_header_rejected("{'shape': " + std::string(60'000, '('), {"non-negative integers"});
  expect_header_rejected(std::string(60'000, '{'), {"a key in quotes"});
}
TEST(NpyHostile, BadShapes) {
  expect_header_rejected(dict("<f4", "(1)"), {"comma after a tuple's only number"});
  expect_header_rejected(dict("<f4", "[1]"), {"have ("});
  expect_header_rejected(dict("<f4", "1"), {"have ("});
  expect_header_rejected(dict("<f4", "(,)"), {"non-negative integers"});
  expect_header_rejected(dict("<f4", "(1,,1)"), {"non-negative integers"});
  expect_header_rejected(dict("<f4", "(-1,)"), {"non-negative integers"});
  expect_header_rejected(dict("<f4", "(1.0,)"), {"comma after a tuple's only number"});
  expect_header_rejected(dict("<f4", "(1, 1.0)"), {"have )"});
  expect_header_rejected(dict("<f4", "(0x1,)"), {"comma"});
  expect_header_rejected(dict("<f4", "(01,)"), {"without leading zeros"});
  expect_header_rejected(dict("<f4", "(1, 1L)"), {"have )"});
  expect_header_rejected("{'shape': (1,", {"non-negative integers", "got its end"});
}
TEST(NpyHostile, ExtentBeyond63Bits) {
  expect_header_rejected(dict("<f4", "(9223372036854775808,)"), {"below 2^63, got \"9223372036854775808"});
  expect_header_rejected(dict("<f4", "(" + std::string(60'000, '9') + ",)"), {"below 2^63, got \"99999"});
}
TEST(NpyHostile, SizeOverflow) {
  expect_header_rejected(dict("<f4", "(9223372036854775807,)"), {"below 2^63 bytes"});
  expect_header_rejected(dict("|u1", "(4294967296, 4294967296)"), {"below 2^63 bytes"});
}
TEST(NpyHostile, ZeroExtentDoesNotExcuseOverflow) {
  expect_header_rejected(dict("|u1", "(0, 4294967296, 4294967296)"), {"below 2^63 bytes"});
  expect_header_rejected(dict("|u1", "(4294967296, 4294967296, 0)"), {"below 2^63 bytes"});
}
TEST(NpyHostile, RankAboveTheLimit) {
  std::string shape = "(1";
  for (int i = 1; i < 16; ++i) shape += ", 1";
  EXPECT_EQ(parse(npy(1, dict("<f4", shape + ")"), "dddd")).shape.size(), 16u);
  expect_header_rejected(dict("<f4", shape + ", 1)"), {"at most 16 dimensions"});
}
TEST(NpyHostile, ClaimedSizeIsNotAllocated) {
  expect_header_rejected(dict("|u1", "(9223372036854775807,)"), {"exactly the 9223372036854775807 bytes", "got 4"});
}
TEST(NpyHostile, TrailingBytes) {
  expect_rejected(npy(1, dict("<f4", "()"), "ddddd"), {"exactly the 4 bytes", "got 5 (trailing bytes)"});
}
TEST(NpyHostile, PathMissingOrDirectory) {
  expect_error([] { read_npy("/nonexistent/x.npy"); }, {"/nonexistent/x.npy: cannot be opened: No such file"});
  expect_error([] { read_npy(testing::TempDir()); }, {"must be a regular file, got a directory"});
}

// Either an array or a FileError of one line; anything else fails the test.
void parse_or_reject(std::string_view file) {
  try {
    const HostTensor tensor = parse(file);
    ASSERT_EQ(int64_t(tensor.bytes.size()), tensor.numel() * file_dtype_size(tensor.dtype));
  } catch (const FileError& error) {
    ASSERT_EQ(std::string_view(error.what()).find_first_of("\n\r"), std::string_view::npos) << error.what();
  }
}

TEST(NpyMutation, NeverCrashes) {
  const std::string python = "{}()[]:,'\"0123456789-<>|fiuTrueFalse\\ \n";
  std::mt19937 random(20240502);
  for (int iteration = 0; iteration < 6000; ++iteration) {
    std::string file = npy(1 + iteration % 3, dict("<f4", "(2, 3)"), std::string(24, 'd'));
    const uint32_t edits = 1 + random() % 4;
    for (uint32_t i = 0; i < edits && !file.empty(); ++i) {
      const size_t at = random() % file.size();
      switch (random() % 6) {
        case 0: file[at] = char(random()); break;
        case 1: file[at] = python[random() % python.size()]; break;
        case 2: file[at] = char(file[at] ^ (1 << (random() % 8))); break;
        case 3: file.erase(at, random() % 9); break;
        case 4: file.insert(at, 1, python[random() % python.size()]); break;
        case 5: file.resize(random() % 2 == 0 ? at : file.size() + 1); break;
      }
    }
    parse_or_reject(file);
    if (HasFatalFailure()) FAIL() << "iteration " << iteration;
  }
}

}  // namespace
}  // namespace mxflash::kit
