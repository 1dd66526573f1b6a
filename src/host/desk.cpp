#include "desk.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>
#include <vector>

#include "signals.h"
#include "trace.h"

namespace pplx {
namespace {

constexpr timeval kGuestTimeout{1, 0};
constexpr std::size_t kLongestRequest = 16;
constexpr std::chrono::seconds kPatience{1};   // all that tell have it together

std::atomic<int> signalled{-1};       // the desk's event
struct sigaction before_signal[NSIG];

int listen_at(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::size_t length = std::min(name.size(), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, name.data(), length);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  if (fd >= 0 && bind(fd, reinterpret_cast<const sockaddr*>(&address), bytes) == 0 && listen(fd, 8) == 0) return fd;
  if (fd >= 0) close(fd);
  return -1;
}

// Processes of several containers may have one number.
std::string own_name() { return "pplx_comm-dump." + std::to_string(getpid()) + "." + std::to_string(std::random_device{}()); }

bool may_ask(int guest) {
  ucred who{};
  socklen_t length = sizeof who;
  return getsockopt(guest, SOL_SOCKET, SO_PEERCRED, &who, &length) == 0 && (who.uid == geteuid() || who.uid == 0);
}

std::string first_line(const std::filesystem::path& path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line;
}

// Names of the threads, their states as the kernel has them, and milliseconds that they ran.
std::string threads() {
  const auto ms = static_cast<unsigned long long>(1000 / sysconf(_SC_CLK_TCK));
  std::string all;
  std::error_code gone;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task", gone)) {
    const std::string stat = first_line(thread.path() / "stat");
    const std::size_t end = stat.rfind(')');
    if (end == std::string::npos) continue;
    std::istringstream fields(stat.substr(end + 1));
    std::string field, state;
    unsigned long long ran = 0;
    for (int i = 3; i <= 15 && fields >> field; ++i) {   // as proc(5) counts them
      if (i == 3) state = field;
      if (i >= 14) ran += ms * std::stoull(field);
    }
    all += std::string(all.empty() ? "" : ",") + "[" + json(first_line(thread.path() / "comm")) + "," + json(state) + "," +
           std::to_string(ran) + "]";
  }
  return "[" + all + "]";
}

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "";
}

}  // namespace

Desk& Desk::of_process() {
  static Desk* const desk = [] {
    // A child has neither the thread nor what the entries are of.
    pthread_atfork([] { of_process().mutex_.lock(); }, [] { of_process().mutex_.unlock(); },
                   [] {
                     Desk& desk = of_process();
                     signalled = -1;
                     for (int* fd : {&desk.listener_, &desk.event_}) {
                       if (*fd >= 0) close(*fd);
                       *fd = -1;
                     }
                     desk.mutex_.unlock();
                     desk.entries_.clear();
                   });
    return new Desk;
  }();
  return *desk;
}

bool Desk::open(std::string process, Answer answer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (listener_ >= 0) return true;
  if (event_ < 0) event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event_ < 0 || (listener_ = listen_at(own_name())) < 0) return false;
  process_ = std::move(process);
  answer_ = std::move(answer);
  const WithoutSignals none;
  std::thread thread([this] { serve(); });
  pthread_setname_np(thread.native_handle(), "pplx-desk");
  thread.detach();
  return true;
}

void Desk::listen_to(int signal) {
  const std::lock_guard<std::mutex> lock(mutex_);
  signalled = event_;
  struct sigaction own {};
  own.sa_sigaction = on_signal;
  own.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
  struct sigaction before {};
  if (sigaction(signal, nullptr, &before) != 0 || ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction == on_signal)) return;
  before_signal[signal] = before;
  sigaction(signal, &own, nullptr);
}

void Desk::on_signal(int number, siginfo_t* info, void* context) {
  const int error = errno;
  if (const int event = signalled; event >= 0) eventfd_write(event, 1);
  errno = error;
  const struct sigaction& before = before_signal[number];
  if ((before.sa_flags & SA_SIGINFO) != 0)
    before.sa_sigaction(number, info, context);
  else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
    before.sa_handler(number);
}

void Desk::serve() {
  pollfd fds[] = {{listener_, POLLIN, 0}, {event_, POLLIN, 0}};
  while (poll(fds, 2, -1) >= 0 || errno == EINTR) {
    if ((fds[0].revents & POLLIN) != 0) {
      const int guest = accept4(fds[0].fd, nullptr, nullptr, SOCK_CLOEXEC);
      if (guest < 0) {   // no descriptor is left: not again at once
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        continue;
      }
      if (may_ask(guest)) answer(guest);
      close(guest);
    }
    eventfd_t count = 0;
    if ((fds[1].revents & POLLIN) != 0 && eventfd_read(fds[1].fd, &count) == 0) answer_in_time("print");
  }
}

void Desk::answer(int guest) const {
  setsockopt(guest, SOL_SOCKET, SO_RCVTIMEO, &kGuestTimeout, sizeof kGuestTimeout);
  setsockopt(guest, SOL_SOCKET, SO_SNDTIMEO, &kGuestTimeout, sizeof kGuestTimeout);
  std::string request;
  char letter = 0;
  while (request.size() < kLongestRequest && recv(guest, &letter, 1, 0) == 1 && letter != '\n') request += letter;
  if (letter != '\n') return;
  const std::string text = answer_in_time(request);
  for (std::size_t sent = 0; sent < text.size();) {
    const ssize_t n = send(guest, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) return;
    sent += static_cast<std::size_t>(n);
  }
}

std::string Desk::answer_in_time(const std::string& request) const {
  try {
    return answer_(request);
  } catch (const std::exception&) {   // no memory, for example
    return "";
  }
}

std::uint64_t Desk::add(std::string facts, std::shared_ptr<const Teller> teller) {
  const std::lock_guard<std::mutex> lock(mutex_);
  entries_.emplace(next_, Entry{std::move(facts), std::move(teller), {}});
  return next_++;
}

void Desk::remove(std::uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  entries_.erase(number);
}

std::string Desk::facts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = [](const auto& numbered) { return "{\"facts\":" + numbered.second.facts + "}"; };
  return "{\"pid\":" + std::to_string(getpid()) + ",\"entries\":" + telling::list(entries_, entry) + "}";
}

std::string Desk::account(const std::string& stacks, bool held) const {
  std::vector<Entry> entries;
  std::string process;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    process = process_.empty() ? "{}" : process_;
    for (const auto& [number, entry] : entries_) entries.push_back(entry);
  }
  const auto problem = [](const char* what) { return "{\"problem\":" + json(what) + "}"; };
  for (Entry& entry : entries) {
    if (!entry.teller) continue;
    entry.question.ask([teller = entry.teller, problem] {
      try {
        return teller->tell();
      } catch (const std::exception& error) {   // a GPU that is lost
        return problem(error.what());
      }
    });
  }
  const auto until = Question::Clock::now() + kPatience;
  std::string all;
  for (Entry& entry : entries) {
    std::string told;
    if (entry.teller) told = entry.question.answer(until).value_or(problem("it does not tell: a call here does not end"));
    all += (all.empty() ? "" : ",") + std::string("{\"facts\":") + entry.facts + ",\"told\":" + (told.empty() ? "null" : told) + "}";
  }
  return "{\"pid\":" + std::to_string(getpid()) + ",\"host\":" + json(host_name()) + ",\"process\":" + process +
         ",\"now\":" + std::to_string(Trace::now() / 1000) + ",\"python_held\":" + telling::truth(held) + ",\"entries\":[" + all +
         "],\"threads\":" + threads() +
         ",\"stacks\":" + json(stacks) + "}";
}

}  // namespace pplx
