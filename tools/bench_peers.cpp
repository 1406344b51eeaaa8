#include "tools/bench_peers.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <thread>
#include <utility>

#include "kit/host_tensor.h"
#include "kit/text.h"
#include "peers_cuda_script.h"
#include "peers_script.h"
#include "tools/commands.h"

namespace mxflash::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kInstalledPython[] = "build/baselines/bin/python";
constexpr int kMaxPeerCrashes = 3;    // then no further process is started
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
pid_t start(const char* script, const std::string& python, int socket, int& failure) {
  int report[2];
  if (pipe2(report, O_CLOEXEC) != 0) {
    failure = errno;
    return -1;
  }
  const char* const argv[] = {python.c_str(), "-c", script, nullptr};
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

Json part(const Json& answer, const char* key) {
  return answer.contains(key) && answer[key].is_object() ? answer[key] : Json::object();
}

}  // namespace

PeerServer::PeerServer(PeerScript script, const std::string& python, int32_t threads) : python_(python) {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) throw PeerError("no socket for peers");
  socket_ = sockets[0];
  int failure = 0;
  child_ = start(script == PeerScript::cpu ? kPeersScript : kPeersCudaScript, python, sockets[1], failure);
  close(sockets[1]);
  if (failure != 0) fail(std::strerror(failure));
  hello_ = ask({{"cmd", "hello"}, {"threads", threads}});
  if (hello_.contains("failed")) fail(words(hello_["failed"]));
  if (!hello_.contains("peers") || !hello_["peers"].is_array()) fail("answers without peers");
}

PeerServer::~PeerServer() {
  if (socket_ >= 0) close(socket_);  // the end of its stdin is its end
  if (child_ <= 0) return;
  kill(child_, SIGKILL);
  waitpid(child_, nullptr, 0);
}

Json PeerServer::shape(BenchOp op, const BenchShape& s,
                       const std::function<void(const std::string& folder)>& write_operands) {
  const TemporaryFolder folder;
  if (write_operands) write_operands(folder.path());
  return ask({{"cmd", "shape"},
              {"op", operation_name(op)},
              {"backward", op == BenchOp::attention_bwd},
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

Json PeerServer::sample(const std::string& peer, double least_ms, int count) {
  return ask({{"cmd", "sample"}, {"peer", peer}, {"least_ms", least_ms}, {"count", count}});
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

Peers::Peers(PeerScript script, const std::string& python, int32_t threads)
    : script_(script), python_(python), threads_(threads) {
  const bool is_default = python.empty();
  const bool is_installed = script == PeerScript::cpu && std::filesystem::exists(kInstalledPython);
  if (is_default) python_ = is_installed ? kInstalledPython : kNoPeers;
  if (python_ == kNoPeers) return;
  try {
    start();
  } catch (const PeerError& error) {
    if (!is_default) throw UsageError(std::string("--peers must be a Python that runs, or none: ") + error.what());
    std::cerr << "mxflash: no peers: " << error.what() << '\n';
    python_ = kNoPeers;
  }
}

std::vector<Peer> Peers::for_shape(BenchOp op, const BenchShape& shape,
                                   const std::function<void(const std::string& folder)>& write_operands) {
  std::vector<Peer> peers;
  if (shape.mask.window_left >= 0 || shape.mask.window_right >= 0) {
    leave_out(op, "all", "a window");
    return peers;
  }
  try {
    if (!server_) start();
    const Json answer = server_->shape(op, shape, write_operands);
    const Json left_out = part(answer, "left_out"), able = part(answer, "peers");
    for (const auto& [name, why] : left_out.items()) leave_out(op, name, words(why));
    for (const auto& [name, peer] : able.items()) {
      const Json facts = part(able, name.c_str());
      peers.push_back({.name = name,
                       .error = facts.value("error", NAN),
                       .workspace_bytes = facts.value("workspace_bytes", NAN),
                       .saved_bytes = facts.value("saved_bytes", NAN)});
    }
    if (answer.contains("failed")) leave_out(op, "all", words(answer["failed"]));
  } catch (const PeerError& error) {
    crashed(op, "all", error);
  }
  return peers;
}

// Answers that are an object; null from the peer's first failure on.
std::function<Json(int)> Peers::asker(BenchOp op, const std::string& name, double least_ms) {
  return [this, op, name, least_ms, failed = false, crashes = crashes_](int count) mutable -> Json {
    if (failed || crashes != crashes_) return nullptr;
    try {
      Json answer = server_->sample(name, least_ms, count);
      const char* const key = count > 0 ? "samples" : "ms";
      if (answer.contains(key) && (count > 0 ? answer[key].is_array() : answer[key].is_number())) return answer[key];
      leave_out(op, name, answer.contains("failed") ? words(answer["failed"]) : "answers without a time");
    } catch (const PeerError& error) {
      crashed(op, name, error);
    }
    failed = true;
    return nullptr;
  };
}

std::function<double()> Peers::sampler(BenchOp op, const std::string& name, double least_ms) {
  return [ask = asker(op, name, least_ms)] {
    const Json ms = ask(0);
    return ms.is_number() ? ms.get<double>() : NAN;
  };
}

std::function<std::vector<double>(int)> Peers::device_sampler(BenchOp op, const std::string& name) {
  return [ask = asker(op, name, 0)](int count) {
    std::vector<double> samples;
    const Json answer = ask(count);
    for (const Json& ms : answer) {
      if (ms.is_number()) samples.push_back(ms.get<double>());
    }
    return samples;
  };
}

void Peers::leave_out(BenchOp op, const std::string& peer, const std::string& why) {
  const std::string text =
      std::string(operation_name(op)) + ": peer " + kit::one_line(peer) + " is left out: " + kit::one_line(why);
  if (said_.insert(text).second) std::cerr << "mxflash: " << text << '\n';
}

void Peers::start() {
  server_ = std::make_unique<PeerServer>(script_, python_, threads_);
  versions_ = part(server_->hello(), "versions");
  machine_ = part(server_->hello(), "machine");
  const Json left_out = part(server_->hello(), "left_out");
  for (const auto& [name, why] : left_out.items()) {
    if (said_.insert(name).second)
      std::cerr << "mxflash: no peer " << kit::one_line(name) << ": " << words(why) << '\n';
  }
}

void Peers::crashed(BenchOp op, const std::string& peer, const PeerError& error) {
  server_.reset();
  leave_out(op, peer, error.what());
  if (++crashes_ < kMaxPeerCrashes) return;
  std::cerr << "mxflash: no more peers after " << crashes_ << " failures of their process\n";
  python_ = kNoPeers;
}

}  // namespace mxflash::tools
