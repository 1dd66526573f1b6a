// Python's view of the desk, and the desk's of Python.
#include <dlfcn.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "host/desk.h"
#include "host/frames.h"
#include "host/question.h"

namespace py = pybind11;

namespace pplx {
namespace {

constexpr std::chrono::seconds kLockTimeout{1}, kFramesTimeout{3}, kJobTimeout{8}, kPrintTimeout{1};
constexpr std::size_t kMostOfStacks = 256 * 1024;

PyInterpreterState* interpreter = nullptr;
std::atomic<bool> without_python{true};
// Never freed, since the desk's thread outlives the program's end. A child has its own.
struct Questions {
  Question lock, python, frames, print;
};
Questions* questions = nullptr;

// As faulthandler writes them, which needs no lock. It is no part of Python's interface: where it is not there, there are none.
using DumpThreads = const char* (*)(int, PyInterpreterState*, PyThreadState*);
DumpThreads dump_threads = nullptr;
std::string stacks() {
  if (dump_threads == nullptr || interpreter == nullptr) return "";
  const int fd = memfd_create("stacks", MFD_CLOEXEC);
  if (fd < 0) return "";
  dump_threads(fd, interpreter, nullptr);
  std::string text(std::min(kMostOfStacks, static_cast<std::size_t>(std::max<off_t>(0, lseek(fd, 0, SEEK_CUR)))), '\0');
  const ssize_t n = pread(fd, text.data(), text.size(), 0);
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(0, n)));
  close(fd);
  return text;
}

// Asks for what `f` returns. Nothing: it does not end in time.
std::optional<std::string> in_time(Question& question, std::function<std::string()> f, Question::Clock::duration limit) {
  const auto until = Question::Clock::now() + limit;
  if (!question.ask(std::move(f))) return std::nullopt;
  return question.answer(until);
}

// Does what in_time() does, with Python's lock.
std::optional<std::string> with_lock(Question& question, const std::function<std::string()>& f, Question::Clock::duration limit) {
  if (without_python) return std::nullopt;
  const auto locked = [f]() -> std::string {
    const py::gil_scoped_acquire lock;
    try {
      return f();
    } catch (py::error_already_set& problem) {
      problem.discard_as_unraisable("the answer at the desk");
      return "";
    }
  };
  return in_time(question, locked, limit);
}

// Gives an account of this process: any thread without Python's lock.
std::string account() {
  const std::optional<std::string> found = with_lock(questions->lock, stacks, kLockTimeout);
  return Desk::of_process().account(found ? *found : stacks(), !found && !without_python);
}

std::string answer(const py::function* of_python, const std::string& request) {
  if (request == "facts") return Desk::of_process().facts();
  if (request == "account") return account();
  if (request == "frames") {
    const auto found = in_time(questions->frames, native_frames, kFramesTimeout);
    return found.value_or("{\"problem\":\"a thread here holds a lock of the loader\"}");
  }
  const auto ask = [of_python, request] { return std::string(py::str((*of_python)(request))); };
  if (const std::optional<std::string> told = with_lock(questions->python, ask, kJobTimeout)) return *told;
  const std::string text = account();
  if (request == "print") {
    const auto print = [text] { return std::to_string(dprintf(STDERR_FILENO, "pplx_comm dump: %s\n", text.c_str())); };
    in_time(questions->print, print, kPrintTimeout);   // a pipe may have no reader
  }
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
        dump_threads = reinterpret_cast<DumpThreads>(dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads"));
        without_python = false;
        static pid_t opened = 0;
        if (std::exchange(opened, getpid()) != getpid()) questions = new Questions;
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
