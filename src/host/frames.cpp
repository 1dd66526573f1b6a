#include "frames.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <execinfo.h>
#include <fcntl.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "signals.h"
#include "standing.h"

namespace pplx {
namespace {

constexpr int kMostFrames = 64, kOfTheSignal = 2;   // the innermost are the handler's and its return
constexpr time_t kPatienceSeconds = 1;   // all threads have them together

// A question to one thread. It stays if there is no answer in time: the answer may come later.
struct Look {
  sem_t done;
  int count = 0;
  void* at[kMostFrames];
};

void on_signal(int, siginfo_t* info, void*) {
  if (info->si_code != SI_QUEUE || info->si_pid != getpid() || info->si_ptr == nullptr) return;
  const int error = errno;
  Look& look = *static_cast<Look*>(info->si_ptr);
  look.count = backtrace(look.at, kMostFrames);
  sem_post(&look.done);
  errno = error;
}

// False: the signal is another's.
bool install() {
  struct sigaction own {}, before {};
  own.sa_sigaction = on_signal;
  own.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
  if (sigaction(frames_signal(), nullptr, &before) != 0) return false;
  if ((before.sa_flags & SA_SIGINFO) != 0) return before.sa_sigaction == on_signal;
  void* first[1];
  backtrace(first, 1);   // loads its library, which a handler must not
  return before.sa_handler == SIG_DFL && sigaction(frames_signal(), &own, nullptr) == 0;
}

// The function at an offset of a file, by the symbols that only the file has; empty: it has none there.
std::string symbol_of(const char* file, std::uint64_t offset) {
  const int fd = open(file, O_RDONLY | O_CLOEXEC);
  struct stat of {};
  if (fd < 0) return "";
  const auto size = fstat(fd, &of) == 0 ? static_cast<std::size_t>(of.st_size) : 0;
  void* const memory = size < sizeof(Elf64_Ehdr) ? MAP_FAILED : mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) return "";
  const char* const begin = static_cast<const char*>(memory);
  const auto* const head = reinterpret_cast<const Elf64_Ehdr*>(begin);
  std::string name;
  const auto within = [&](std::uint64_t at, std::uint64_t bytes) { return at <= size && bytes <= size - at; };
  if (within(head->e_shoff, std::uint64_t{head->e_shnum} * sizeof(Elf64_Shdr))) {
    const auto* const sections = reinterpret_cast<const Elf64_Shdr*>(begin + head->e_shoff);
    for (const Elf64_Shdr* s = sections; s < sections + head->e_shnum && name.empty(); ++s) {
      if (s->sh_type != SHT_SYMTAB || s->sh_link >= head->e_shnum || !within(s->sh_offset, s->sh_size)) continue;
      const Elf64_Shdr& names = sections[s->sh_link];
      const auto* const symbols = reinterpret_cast<const Elf64_Sym*>(begin + s->sh_offset);
      for (const Elf64_Sym* each = symbols; each < symbols + s->sh_size / sizeof *each; ++each) {
        if (ELF64_ST_TYPE(each->st_info) != STT_FUNC || offset - each->st_value >= each->st_size) continue;
        if (within(names.sh_offset + each->st_name, 1)) name = begin + names.sh_offset + each->st_name;
        break;
      }
    }
  }
  munmap(memory, size);
  return name;
}

std::string readable(const std::string& symbol) {
  int wrong = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &wrong), std::free);
  return wrong == 0 ? text.get() : symbol;
}

std::string frame_of(const void* at) {
  char text[64];
  Dl_info of{};
  if (dladdr(at, &of) == 0 || of.dli_fname == nullptr) {
    std::snprintf(text, sizeof text, "%p", at);
    return text;
  }
  const auto offset = static_cast<std::uint64_t>(static_cast<const char*>(at) - static_cast<const char*>(of.dli_fbase));
  const std::string symbol = of.dli_sname != nullptr ? of.dli_sname : symbol_of(of.dli_fname, offset);
  std::snprintf(text, sizeof text, "+0x%llx", static_cast<unsigned long long>(offset));
  return (symbol.empty() ? "" : readable(symbol) + " in ") + std::filesystem::path(of.dli_fname).filename().string() + text;
}

// None: the thread is gone.
Look* ask(pid_t thread) {
  auto look = std::make_unique<Look>();
  sem_init(&look->done, 0, 0);
  siginfo_t info{};
  info.si_code = SI_QUEUE;
  info.si_pid = getpid();
  info.si_ptr = look.get();
  return syscall(SYS_rt_tgsigqueueinfo, getpid(), thread, frames_signal(), &info) == 0 ? look.release() : nullptr;
}

// JSON of the frames that a thread answers; "null": it does not.
std::string answer_of(Look* asked, const timespec& until) {
  if (asked == nullptr) return "null";
  while (sem_timedwait(&asked->done, &until) != 0)
    if (errno != EINTR) return "null";
  const std::unique_ptr<Look> look(asked);
  std::vector<std::string> frames;
  for (int i = kOfTheSignal; i < look->count; ++i) {
    const int before = i > kOfTheSignal ? 1 : 0;   // where a call returns to may be another function's
    frames.push_back(frame_of(static_cast<const char*>(look->at[i]) - before));
  }
  return telling::list(frames, [](const std::string& frame) { return json(frame); });
}

}  // namespace

std::string native_frames() {
  if (!install()) return "{\"problem\":" + json("signal " + std::to_string(frames_signal()) + " has another use in this process") + "}";
  struct Asked {
    pid_t thread;
    std::string name;
    Look* look;
  };
  std::vector<Asked> threads;   // all at once: many may not answer
  std::error_code gone;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task", gone)) {
    std::string name;
    std::getline(std::ifstream(thread.path() / "comm"), name);
    const pid_t number = std::stoi(thread.path().filename());
    threads.push_back({number, name, ask(number)});
  }
  timespec until{};
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += kPatienceSeconds;
  const auto told = [&](const Asked& each) {
    return "[" + json(each.name) + "," + std::to_string(each.thread) + "," + answer_of(each.look, until) + "]";
  };
  return "{\"threads\":" + telling::list(threads, told) + "}";
}

}  // namespace pplx
