// The desk at which a process tells what it does, whatever its Python does: a thread that listens on an abstract unix socket,
// `@pplx_comm-dump.PID.NUMBER`, and answers the user that runs the process, and root.
#pragma once

#include <csignal>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "question.h"
#include "standing.h"

namespace pplx {

class Desk {
 public:
  // Returns this process's. It outlives all else, as its thread does.
  static Desk& of_process();

  // Answers a request, on the desk's thread, in time. A signal asks for "print".
  using Answer = std::function<std::string(const std::string& request)>;
  // Once; a later call changes nothing. `process`: JSON about it. False: no socket is to be had here.
  bool open(std::string process, Answer answer);
  // The signal asks too, beside what it did before.
  void listen_to(int signal);

  // `facts`: JSON of what does not change of it. Returns a number for remove().
  std::uint64_t add(std::string facts, std::shared_ptr<const Teller> teller);
  void remove(std::uint64_t number);

  // Returns the facts alone, in JSON: a look that disturbs nothing.
  std::string facts() const;
  // Returns all of it in JSON, and the process's threads. `stacks`: of Python's, as text. `held`: something else has Python's lock.
  std::string account(const std::string& stacks, bool held) const;

 private:
  struct Entry {
    std::string facts;
    std::shared_ptr<const Teller> teller;
    Question question;
  };
  void serve();
  void answer(int guest) const;
  std::string answer_in_time(const std::string& request) const;   // empty: there is none
  static void on_signal(int number, siginfo_t* info, void* context);

  mutable std::mutex mutex_;   // held over a fork, so never while something is told
  std::map<std::uint64_t, Entry> entries_;
  std::uint64_t next_ = 0;
  std::string process_;
  Answer answer_;
  int listener_ = -1, event_ = -1;
};

}  // namespace pplx
