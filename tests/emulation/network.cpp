#include "emulation/network.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

namespace emulation {
namespace {

using Clock = std::chrono::steady_clock;

struct Piece {
  std::uint64_t at, bytes;
};
struct Window {
  const char* own;              // memory of this rank
  std::uint64_t bytes;
  std::uint32_t peer;
  char* theirs;                 // the peer's, laid out alike
};
// PPLX_EMULATION_CUT. "lost=0-2@40": the 40th put of rank 0 to rank 2 and all behind it do not land, which is rank 0's error as
// soon as the first was to. "unheard=0-2@40": they land, and it is an error once a rank asks whether they have left, which they
// never have.
constexpr std::uint64_t kCutError = 12;
class Cut {
 public:
  explicit Cut(const char* how) {
    char effect[8] = {};
    if (how != nullptr && std::sscanf(how, "%7[a-z]=%u-%u@%u", effect, &rank_, &peer_, &put_) == 4)
      loses_ = std::strcmp(effect, "lost") == 0;
  }
  // Asked once for each put.
  bool takes(const Put& of) { return of.rank == rank_ && of.peer == peer_ && ++posted_ >= put_; }
  bool loses() const { return loses_; }

 private:
  unsigned rank_ = ~0u, peer_ = 0, put_ = 0, posted_ = 0;
  bool loses_ = false;
};
struct Flight {
  Put put;
  const char* memory;           // the window's
  char *to, *signal;            // in the peer's memory
  std::vector<Piece> pieces;    // yet to be delivered, from the end; one without bytes is the signal
  Clock::time_point due;        // time of the next event
  bool landed = false, lost = false, unheard = false;
  unsigned counts = 1;
  unsigned asks = 0;            // how often a rank must still ask before it has left
};

class Network {
 public:
  static Network& instance() {
    static Network* const network = new Network;   // its thread outlives main()
    return *network;
  }

  void open_window(const char* own, std::uint64_t bytes, std::uint32_t peer, char* theirs) {
    const std::lock_guard<std::mutex> lock(mutex_);
    windows_.push_back({own, bytes, peer, theirs});
  }

  // The owner of the memory ends: nothing of it may be read or written any more. Flights still land, if peers live.
  void close_windows(const char* own) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_own = [&](const Flight& f) { return f.memory == own; };
    const auto flies = [&](const Flight& f) { return is_own(f) && !f.landed && !f.lost; };
    changed_.wait_for(lock, std::chrono::seconds(1), [&] { return std::none_of(flights_.begin(), flights_.end(), flies); });
    for (const Flight& f : flights_)
      if (is_own(f)) errors_.erase({f.put.own, f.put.peer});
    flights_.erase(std::remove_if(flights_.begin(), flights_.end(), is_own), flights_.end());
    windows_.erase(std::remove_if(windows_.begin(), windows_.end(), [&](const Window& w) { return w.own == own; }), windows_.end());
  }

  void post(const Put& put) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto has = [](const Window& w, const char* at) { return w.own <= at && at < w.own + w.bytes; };
    const auto window = std::find_if(windows_.begin(), windows_.end(), [&](const Window& w) {
      return w.peer == put.peer && has(w, put.signal) && (put.bytes == 0 || (has(w, put.from) && has(w, put.to)));
    });
    if (window == windows_.end()) refuse("a put to a rank that is not reached", put);
    for (const Flight& f : flights_)
      if (f.put.own == put.own && put.bytes != 0 && put.from < f.put.from + f.put.bytes && f.put.from < put.from + put.bytes)
        refuse("a put from where an earlier one has not left", put);
    const auto there = [&](const char* at) { return window->theirs + (at - window->own); };
    char* const to = put.bytes == 0 ? nullptr : there(put.to);
    Flight flight{put, window->own, to, there(put.signal), pieces_of(put.bytes), {}};
    flight.due = Clock::now() + delay();
    if (put.context == twice_context_ && ++of_context_ == twice_put_) flight.counts = 2;
    if (++posted_ == late_put_) flight.due += std::chrono::milliseconds(late_ms_);
    if (cut_.takes(put)) (cut_.loses() ? flight.lost : flight.unheard) = true;
    flight.asks = static_cast<unsigned>(random_() % 4);
    flights_.push_back(std::move(flight));
    changed_.notify_one();
  }

  // A reset has seen that all has landed. What is late is a put of the generation before: ranks post unequally many.
  void forget_landed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    late_put_ = 0;
    flights_.erase(std::remove_if(flights_.begin(), flights_.end(), [](const Flight& f) { return f.landed; }), flights_.end());
  }

  bool has_left(const char* own, std::uint32_t peer, std::uint32_t context) {
    const std::lock_guard<std::mutex> lock(mutex_);
    bool all = true;
    for (std::size_t i = flights_.size(); i-- > 0;) {
      Flight& f = flights_[i];
      if (f.put.own != own || f.put.peer != peer || f.put.context != context) continue;
      if (f.landed && f.asks == 0 && !f.unheard) {
        flights_.erase(flights_.begin() + static_cast<std::ptrdiff_t>(i));
        continue;
      }
      if (f.landed && f.unheard)
        errors_.insert({own, peer});
      else if (f.landed)
        --f.asks;
      all = false;
    }
    return all;
  }

  std::uint64_t error_of(const char* own, std::uint32_t peer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return errors_.count({own, peer}) != 0 ? kCutError : 0;
  }

 private:
  Network() {
    const char* const seed = std::getenv("PPLX_SEED");
    random_.seed(seed == nullptr ? 1 : std::strtoul(seed, nullptr, 0));
    if (const char* late = std::getenv("PPLX_EMULATION_LATE")) std::sscanf(late, "%u@%u", &late_ms_, &late_put_);
    if (const char* twice = std::getenv("PPLX_EMULATION_TWICE")) std::sscanf(twice, "%u@%u", &twice_context_, &twice_put_);
    std::thread([this] { serve(); }).detach();
  }

  [[noreturn]] static void refuse(const char* what, const Put& put) {
    std::fprintf(stderr, "%s: peer %u, context %u, %llu bytes\n", what, put.peer, put.context,
                 static_cast<unsigned long long>(put.bytes));
    std::abort();
  }

  // Mostly soon, sometimes after much else.
  std::chrono::microseconds delay() { return std::chrono::microseconds(random_() % 8 == 0 ? random_() % 3000 : random_() % 60); }

  // Cuts into at most five pieces, anywhere, shuffled.
  std::vector<Piece> pieces_of(std::uint64_t bytes) {
    std::vector<std::uint64_t> cuts{0, bytes};
    for (auto n = random_() % 5; n > 0 && bytes > 0; --n) cuts.push_back(random_() % bytes);
    std::sort(cuts.begin(), cuts.end());
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i)
      if (cuts[i] < cuts[i + 1]) pieces.push_back({cuts[i], cuts[i + 1] - cuts[i]});
    std::shuffle(pieces.begin(), pieces.end(), random_);
    pieces.insert(pieces.begin(), Piece{0, 0});  // the signal, when all else is there
    return pieces;
  }

  // Performs the due part of a flight.
  void go_on(std::size_t number) {
    Flight& flight = flights_[number];
    if (flight.lost) {
      errors_.insert({flight.put.own, flight.put.peer});
      flight.due = Clock::time_point::max();
      return;
    }
    const Piece piece = flight.pieces.back();
    flight.pieces.pop_back();
    if (piece.bytes > 0)
      std::memcpy(flight.to + piece.at, flight.put.from + piece.at, piece.bytes);
    else
      __atomic_fetch_add(reinterpret_cast<std::uint64_t*>(flight.signal), flight.counts, __ATOMIC_RELEASE);
    flight.landed = flight.pieces.empty();
    if (flight.landed) changed_.notify_all();
    flight.due = Clock::now() + (random_() % 2 == 0 ? std::chrono::microseconds(0) : delay());
    // No kernel asks whether a signal alone has left.
    if (flight.landed && flight.put.bytes == 0) flights_.erase(flights_.begin() + static_cast<std::ptrdiff_t>(number));
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const Clock::time_point now = Clock::now();
      std::vector<std::size_t> due;
      Clock::time_point next = Clock::time_point::max();
      for (std::size_t i = 0; i < flights_.size(); ++i) {
        if (flights_[i].landed) continue;
        next = std::min(next, flights_[i].due);
        if (flights_[i].due <= now) due.push_back(i);
      }
      if (!due.empty())
        go_on(due[random_() % due.size()]);
      else if (next == Clock::time_point::max())
        changed_.wait(lock);
      else
        changed_.wait_until(lock, next);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Window> windows_;
  std::vector<Flight> flights_;
  std::set<std::pair<const char*, std::uint32_t>> errors_;   // whose, and with which peer
  Cut cut_{std::getenv("PPLX_EMULATION_CUT")};
  std::minstd_rand random_;
  unsigned posted_ = 0, late_put_ = 0, late_ms_ = 0;   // "800@40": the 40th put begins to land so much later
  unsigned of_context_ = 0, twice_context_ = ~0u, twice_put_ = 0;   // "1@3": the third put of context 1 counts twice
};

}  // namespace

void post(const Put& put) { Network::instance().post(put); }
bool has_left(const char* own, std::uint32_t peer, std::uint32_t context) {
  return Network::instance().has_left(own, peer, context);
}
std::uint64_t error_of(const char* own, std::uint32_t peer) { return Network::instance().error_of(own, peer); }

}  // namespace emulation

namespace pplx::cuda {
void bind_carrier(pybind11::module_&) {}  // emulated.py has the host side
}  // namespace pplx::cuda

extern "C" {
__attribute__((visibility("default"))) void pplx_emulation_open_window(const char* own, std::uint64_t bytes, std::uint32_t peer,
                                                                       char* theirs) {
  emulation::Network::instance().open_window(own, bytes, peer, theirs);
}
__attribute__((visibility("default"))) void pplx_emulation_forget_landed() { emulation::Network::instance().forget_landed(); }
__attribute__((visibility("default"))) void pplx_emulation_close_windows(const char* own) {
  emulation::Network::instance().close_windows(own);
}
}
