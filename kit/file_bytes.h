// Where the file readers get their bytes and the writers put them: positional reads from a regular file or a buffer,
// and a file that appears under its name only when it is complete. Every failure is a FileError.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "kit/host_tensor.h"

namespace mxflash::kit {

inline std::string errno_text(int error) { return std::generic_category().message(error); }

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }

  int get() const { return fd_; }
  int close() { return ::close(std::exchange(fd_, -1)); }

 private:
  int fd_ = -1;
};

class InputBytes {
 public:
  static InputBytes open(const std::string& path) {
    InputBytes input;
    input.label_ = path;
    // O_NONBLOCK: opening a FIFO that nobody writes to must fail below, not hang here.
    input.file_ = FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (input.file_.get() < 0)
      throw FileError(path, "cannot be opened: " + errno_text(errno), "check the path and its permissions");
    struct stat info {};
    if (::fstat(input.file_.get(), &info) != 0)
      throw FileError(path, "cannot be inspected: " + errno_text(errno), "check the path and its permissions");
    if (S_ISDIR(info.st_mode)) throw FileError(path, "must be a regular file, got a directory", "name a file in it");
    if (!S_ISREG(info.st_mode))
      throw FileError(path, "must be a regular file, got a device, pipe or socket", "save it to a file first");
    input.size_ = uint64_t(info.st_size);
    return input;
  }

  static InputBytes view(std::span<const std::byte> bytes, std::string label) {
    InputBytes input;
    input.label_ = std::move(label);
    input.buffer_ = bytes;
    input.size_ = bytes.size();
    return input;
  }

  const std::string& label() const { return label_; }
  uint64_t size() const { return size_; }

  // The caller has checked that [offset, offset + count) lies within size(), so that no claimed size is ever allocated.
  std::vector<std::byte> read(uint64_t offset, uint64_t count) const {
    std::vector<std::byte> out;
    try {
      out.resize(count);
    } catch (const std::exception&) {  // bad_alloc or length_error
      throw FileError(label_,
                      "needs " + std::to_string(count) + " bytes of memory at once, which is more than there is",
                      "split the file into smaller tensors");
    }
    if (file_.get() < 0) {
      if (count > 0) std::memcpy(out.data(), buffer_.data() + offset, count);
    } else {
      read_file(offset, out);
    }
    return out;
  }

 private:
  void read_file(uint64_t offset, std::span<std::byte> out) const {
    while (!out.empty()) {
      const ssize_t got = ::pread(file_.get(), out.data(), out.size(), off_t(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0)
        throw FileError(label_, "cannot be read at byte " + std::to_string(offset) + ": " + errno_text(errno),
                        "check the disk and try again");
      if (got == 0)
        throw FileError(label_, "must not change while it is read, but it now ends at byte " + std::to_string(offset),
                        "wait until it is written completely");
      out = out.subspan(size_t(got));
      offset += uint64_t(got);
    }
  }

  std::string label_;
  uint64_t size_ = 0;
  FileDescriptor file_;  // none for a buffer
  std::span<const std::byte> buffer_;
};

// Writes to a temporary file beside `path`; commit() gives it its name. Without commit() nothing remains.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path) : path_(path) {
    // Through a symbolic link the file it points to is replaced, not the link. Only a regular file may be replaced.
    std::error_code ignored;
    const std::filesystem::path resolved = std::filesystem::weakly_canonical(path, ignored);
    target_ = resolved.empty() ? path : resolved.string();
    struct stat info {};
    if (::stat(target_.c_str(), &info) == 0 && !S_ISREG(info.st_mode))
      throw FileError(path, "must be a regular file or a new name, got a directory or device", "choose another name");
    for (int attempt = 0; attempt < kMaxAttempts && file_.get() < 0; ++attempt) {
      temporary_ = target_ + ".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(attempt);
      file_ = FileDescriptor(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
      if (file_.get() < 0 && errno != EEXIST) break;
    }
    if (file_.get() < 0) fail("cannot be created", errno);
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile() {
    if (!committed_) ::unlink(temporary_.c_str());
  }

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t put = ::write(file_.get(), bytes.data(), bytes.size());
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) fail("cannot be written", errno);
      bytes = bytes.subspan(size_t(put));
    }
  }

  void commit() {
    if (::fsync(file_.get()) != 0) fail("cannot be written to disk", errno);
    if (file_.close() != 0) fail("cannot be closed", errno);
    if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot be renamed into place", errno);
    committed_ = true;
  }

 private:
  static constexpr int kMaxAttempts = 100;

  [[noreturn]] void fail(const std::string& what, int error) const {
    throw FileError(path_, what + ": " + errno_text(error), "check the directory, its permissions and the free space");
  }

  std::string path_;
  std::string target_;
  std::string temporary_;
  FileDescriptor file_;
  bool committed_ = false;
};

}  // namespace mxflash::kit
