#include "tools/bench_peers.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "kit/host_tensor.h"
#include "kit/text.h"
#include "peers_script.h"

namespace mxflash::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kPatienceMs = 600'000;  // for one answer; a shape is computed some times by every peer

// A folder that disappears with its files.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_((std::filesystem::temp_directory_path() / "mxflash_bench_XXXXXX").string()) {
    if (!mkdtemp(path_.data())) throw std::runtime_error("cannot make a temporary folder " + path_);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Runs `python -c` the script with `socket` as its stdin and stdout. Between fork and exec only what is safe after a
// fork of a process with threads. Returns errno in `failure` if there is no such program.
pid_t start(const std::string& python, int socket, int& failure) {
  int report[2];
  if (pipe2(report, O_CLOEXEC) != 0) {
    failure = errno;
    return -1;
  }
  const char* const argv[] = {python.c_str(), "-c", kPeersScript, nullptr};
  const pid_t child = fork();
  if (child == 0) {
    if (dup2(socket, 0) == 0 && dup2(socket, 1) == 1) execvp(argv[0], const_cast<char* const*>(argv));
    const int error = errno;
    [[maybe_unused]] const ssize_t written = write(report[1], &error, sizeof error);
    _exit(127);
  }
  const int fork_error = errno;
  close(report[1]);
  failure = child < 0 ? fork_error : 0;
  if (child > 0 && read(report[0], &failure, sizeof failure) != sizeof failure) failure = 0;
  close(report[0]);
  return child;
}

}  // namespace

PeerServer::PeerServer(const std::string& python, int32_t threads) : python_(python) {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) throw PeerError("no socket for peers");
  socket_ = sockets[0];
  int failure = 0;
  child_ = start(python, sockets[1], failure);
  close(sockets[1]);
  if (failure != 0) fail(std::strerror(failure));
  hello_ = ask({{"cmd", "hello"}, {"threads", threads}});
  if (!hello_.contains("peers") || !hello_["peers"].is_array()) fail("answers without peers");
}

PeerServer::~PeerServer() {
  if (socket_ >= 0) close(socket_);  // the end of its stdin is its end
  if (child_ <= 0) return;
  kill(child_, SIGKILL);
  waitpid(child_, nullptr, 0);
}

Json PeerServer::shape(const BenchShape& s, bool backward,
                       const std::function<void(const std::string& folder)>& write_operands) {
  const TemporaryFolder folder;
  write_operands(folder.path());
  return ask({{"cmd", "shape"},
              {"backward", backward},
              {"folder", folder.path()},
              {"lens_q", lens_q(s)},
              {"lens_k", lens_k(s)},
              {"shared_q", s.shared_q},
              {"num_heads_q", s.num_heads_q},
              {"num_heads_kv", s.num_heads_kv},
              {"head_dim", s.head_dim},
              {"head_dim_v", s.head_dim_v},
              {"causal", s.mask.causal}});
}

Json PeerServer::sample(const std::string& peer, double least_ms) {
  return ask({{"cmd", "sample"}, {"peer", peer}, {"least_ms", least_ms}});
}

Json PeerServer::ask(const Json& request) {
  if (socket_ < 0) fail("has ended");
  const std::string line = request.dump() + "\n";
  for (size_t sent = 0; sent < line.size();) {
    const ssize_t n = send(socket_, line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
    if (n > 0) sent += size_t(n);
    if (n < 0 && errno != EINTR) break;  // it has ended; recv will say so
  }
  size_t end;
  while ((end = received_.find('\n')) == std::string::npos) {
    pollfd ready{.fd = socket_, .events = POLLIN, .revents = 0};
    const int polled = poll(&ready, 1, kPatienceMs);
    if (polled == 0) fail(kit::text("has not answered for %d s", kPatienceMs / 1000));
    if (polled < 0 && errno == EINTR) continue;
    char bytes[4096];
    const ssize_t n = recv(socket_, bytes, sizeof bytes, 0);
    if (n > 0) received_.append(bytes, size_t(n));
    if (n == 0 || (n < 0 && errno != EINTR)) fail("has ended");
  }
  Json answer = Json::parse(received_.substr(0, end), nullptr, false);
  received_.erase(0, end + 1);
  if (!answer.is_object()) fail("answers what is no JSON object");
  return answer;
}

// Adds how the process ended, if it did so by itself.
void PeerServer::fail(const std::string& what) {
  if (socket_ >= 0) close(std::exchange(socket_, -1));
  std::string how;
  if (child_ > 0) {
    int status = 0;
    pid_t ended = 0;
    for (int i = 0; i < 100 && ended == 0; ++i) {  // its sockets close some time before it can be waited for
      ended = waitpid(child_, &status, WNOHANG);
      if (ended == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (ended == 0) {
      kill(child_, SIGKILL);
      waitpid(child_, nullptr, 0);
    }
    child_ = -1;
    if (ended > 0 && WIFEXITED(status)) how = kit::text(" (exit code %d)", WEXITSTATUS(status));
    if (ended > 0 && WIFSIGNALED(status)) how = kit::text(" (signal %d)", WTERMSIG(status));
  }
  throw PeerError(kit::one_line(python_) + ": " + what + how);
}

}  // namespace mxflash::tools
