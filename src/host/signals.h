// The library's threads and signals.
#pragma once

#include <csignal>

#include <pthread.h>

namespace pplx {

// The one signal that the library's own threads get: frames.h asks them by it where they are.
inline int frames_signal() { return SIGRTMAX; }

// Threads that begin while it is there get no other one: signals belong to the program's own threads.
class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, frames_signal());
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace pplx
