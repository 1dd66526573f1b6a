// Python's view of the desk, and the desk's of Python.
#include <dlfcn.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "host/desk.h"
#include "host/frames.h"

namespace py = pybind11;

namespace pplx {
namespace {

using Seconds = std::chrono::duration<double>;
constexpr Seconds kLockTimeout{1.0}, kJobTimeout{8.0};
constexpr std::size_t kMostOfStacks = 256 * 1024;

PyInterpreterState* interpreter = nullptr;
std::atomic<bool> without_python{true}, python_is_asked{false};

// As faulthandler writes them, which needs no lock. It is no part of Python's interface: where it is not there, there are none.
std::string stacks() {
  using Dump = const char* (*)(int, PyInterpreterState*, PyThreadState*);
  static const auto dump = reinterpret_cast<Dump>(dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads"));
  if (dump == nullptr || interpreter == nullptr) return "";
  const int fd = memfd_create("stacks", MFD_CLOEXEC);
  if (fd < 0) return "";
  dump(fd, interpreter, nullptr);
  std::string text(std::min(kMostOfStacks, static_cast<std::size_t>(std::max<off_t>(0, lseek(fd, 0, SEEK_CUR)))), '\0');
  const ssize_t n = pread(fd, text.data(), text.size(), 0);
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(0, n)));
  close(fd);
  return text;
}

// Lets `f` run with Python's lock. Returns what it does; empty: the lock is not to be had in time.
std::string with_lock(std::function<std::string()> f, Seconds timeout) {
  struct Asked {
    std::mutex mutex;
    std::condition_variable done;
    std::string text;
  };
  if (without_python || python_is_asked.exchange(true)) return "";
  const auto asked = std::make_shared<Asked>();
  std::thread([asked, f = std::move(f)] {   // held up with the lock's holder, and no other
    std::string text;
    {
      const py::gil_scoped_acquire locked;
      try {
        text = f();
      } catch (py::error_already_set& problem) {
        problem.discard_as_unraisable("the answer at the desk");
      }
    }
    python_is_asked = false;
    const std::lock_guard<std::mutex> lock(asked->mutex);
    asked->text = text.empty() ? " " : text;
    asked->done.notify_all();
  }).detach();
  std::unique_lock<std::mutex> lock(asked->mutex);
  asked->done.wait_for(lock, timeout, [&] { return !asked->text.empty(); });
  return asked->text;
}

// Gives an account of this process: any thread without Python's lock.
std::string account() {
  const std::string found = with_lock(stacks, kLockTimeout);
  return Desk::of_process().account(found.empty() ? stacks() : found, found.empty() && !without_python);
}

std::string answer(const py::function* of_python, const std::string& request) {
  if (request == "facts") return Desk::of_process().facts();
  if (request == "account") return account();
  if (request == "frames") return native_frames();
  std::string text = with_lock([of_python, request] { return std::string(py::str((*of_python)(request))); }, kJobTimeout);
  if (!text.empty()) return text;
  text = account();
  if (request == "print") dprintf(STDERR_FILENO, "pplx_comm dump: %s\n", text.c_str());
  return text;
}

// Something that is told of as long as this is there.
class Told {
 public:
  explicit Told(std::string facts, std::shared_ptr<Teller> teller = nullptr)
      : number_(Desk::of_process().add(std::move(facts), std::move(teller))) {}
  ~Told() { end(); }
  Told(const Told&) = delete;
  Told& operator=(const Told&) = delete;
  void end() { Desk::of_process().remove(number_); }

 private:
  const std::uint64_t number_;
};

}  // namespace

void bind_desk(py::module_& m) {
  py::class_<Teller, std::shared_ptr<Teller>>(m, "Teller", "Tells at the desk where something stands.");
  py::class_<Told>(m, "Told", "An entry of what this process tells at its desk; facts: JSON.")
      .def(py::init<std::string>(), py::arg("facts"))
      .def(py::init<std::string, std::shared_ptr<Teller>>(), py::arg("facts"), py::arg("teller"))
      .def("end", &Told::end);
  m.def(
      "open_desk",
      [](std::string process, const py::function& asked) {
        interpreter = PyInterpreterState_Get();
        without_python = false;
        static const auto* const kept = new py::function(asked);   // the desk outlives the interpreter
        const auto by_python = [](const std::string& request) { return answer(kept, request); };
        return Desk::of_process().open(std::move(process), by_python);
      },
      py::arg("process"), py::arg("asked"),
      "Once for a process. asked: gets a request, and returns what the guest is to read; 'facts' and 'account' need it not. False: "
      "there is no socket.");
  m.def("leave_python_alone", [] { without_python = true; }, "At the end of the interpreter.");
  m.def("dump_on", [](int signal) { Desk::of_process().listen_to(signal); }, py::arg("signal"));
  m.def(
      "account",
      [] {
        const std::string found = stacks();
        const py::gil_scoped_release unlocked;
        const std::string all = Desk::of_process().account(found, false);
        const py::gil_scoped_acquire locked;
        return py::bytes(all);
      },
      "An account of this process, as JSON.");
}

}  // namespace pplx
