// The libfabric back end as a proxy uses it, between processes that all write to all others: every write arrives once and whole,
// every write is reported sent once, whatever the order.
//
//   test_pairs [PROVIDER [CONTACTS [RANKS [SECONDS]]]]      tcp, once, 4 ranks, at most 15 s of a core for a rank's round
//
// Of more contacts only the first has more than one round.
//
// The planted bugs of tests/mutants are caught by it over efa and efa-direct, on software NICs.
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "proxy/libfabric/libfabric_fabric.h"
#include "proxy/libfabric/loader.h"

namespace {

using namespace pplx;

int ranks = 4;
constexpr int kWrites = 24;             // from a rank to each other one, in a round
constexpr std::size_t kPiece = 7168;
constexpr int kRounds = 12;             // more immediates than a provider gets receives posted at once
constexpr int kBurst = 1500;            // writes of 8 bytes to each, faster than any queue
double limit = 15;                      // seconds of a core that a rank takes for a round

// All ranks send bytes to the test's own process, which sends all ranks all of them.
struct Meeting {
  int fd;
  void put(const Blob& blob) const {
    const std::uint32_t size = static_cast<std::uint32_t>(blob.size());
    CHECK(write(fd, &size, sizeof(size)) == sizeof(size));
    // Nothing after an empty one's size: its reader may be gone.
    CHECK(size == 0 || write(fd, blob.data(), size) == static_cast<ssize_t>(size));
  }
  bool take(Blob& blob) const {
    std::uint32_t size = 0;
    if (recv(fd, &size, sizeof(size), MSG_WAITALL) != sizeof(size)) return false;
    blob.resize(size);
    return size == 0 || recv(fd, blob.data(), size, MSG_WAITALL) == static_cast<ssize_t>(size);
  }
  std::vector<Blob> all(const Blob& mine) const {
    put(mine);
    std::vector<Blob> blobs(static_cast<std::size_t>(ranks));
    for (Blob& blob : blobs)
      if (!take(blob)) check::fail(__FILE__, __LINE__, "another rank failed");
    return blobs;
  }
};

// The time for which this thread has had a core. A rank that waits polls all the time, so with a core to itself that is the time
// that passes; on a busy machine it leaves out how long others had the core.
double cpu_seconds() {
  timespec t{};
  CHECK_EQ(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t), 0);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

std::uint8_t byte_of(int from, int to, int round, std::size_t at) {
  return static_cast<std::uint8_t>(from * 131 + to * 31 + round * 17 + static_cast<int>(at * 7 + at / 251));
}

class Rank {
 public:
  Rank(int rank, const std::string& provider, const Meeting& meeting) : rank_(rank), meeting_(meeting) {
    libfabric::Options options;
    options.provider = provider;
    options.endpoints = 1 + rank % 2;   // some have one, some two
    source_.resize(static_cast<std::size_t>(ranks) * kWrites * kPiece);
    target_.resize(static_cast<std::size_t>(ranks) * kWrites * kPiece);
    fabric_ = std::make_unique<LibfabricFabric>(options);
    source_region_ = fabric_->register_memory(source_.data(), source_.size(), 0);
    target_region_ = fabric_->register_memory(target_.data(), target_.size(), target_.size());
    const std::vector<Blob> addresses = meeting.all(fabric_->address()), regions = meeting.all(target_region_.description);
    remote_.resize(static_cast<std::size_t>(ranks));
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == rank) continue;
      fabric_->insert_peer(peer, addresses[static_cast<std::size_t>(peer)]);
      remote_[static_cast<std::size_t>(peer)] = fabric_->import_region(peer, regions[static_cast<std::size_t>(peer)]);
    }
    meeting.all({});
  }

  // `count` writes of `bytes` to every other rank, all of which are there at the end, and all of which are reported.
  void round(int number, int count, std::size_t bytes) {
    for (int to = 0; to < ranks; ++to)
      for (std::size_t at = 0; at < static_cast<std::size_t>(count) * bytes && at < kWrites * kPiece; ++at)
        source_[offset(to) + at] = byte_of(rank_, to, number, at);
    sent_.assign(static_cast<std::size_t>(ranks * count), 0);
    arrived_.assign(static_cast<std::size_t>(ranks * count), 0);
    what_ = "round " + std::to_string(number) + " of " + std::to_string(count) + " writes of " + std::to_string(bytes) +
            " bytes over " + fabric_->name();
    left_ = 2 * (ranks - 1) * count;
    const double begin = cpu_seconds();
    const int endpoints = fabric_->endpoints();
    for (int i = 0; i < count; ++i)
      for (int turn = 1; turn < ranks; ++turn) {
        const int to = (rank_ + turn) % ranks, last = i + endpoints >= count;
        Write w;
        w.endpoint = i % endpoints;
        w.peer = to;
        w.source = &source_region_;
        w.target = &remote_[static_cast<std::size_t>(to)];
        w.source_offset = offset(to) + static_cast<std::size_t>(i % kWrites) * bytes;
        w.target_offset = offset(rank_) + static_cast<std::size_t>(i % kWrites) * bytes;
        w.bytes = bytes;
        w.immediate = static_cast<std::uint32_t>(number) << 24 | static_cast<std::uint32_t>(rank_) << 20 |
                      static_cast<std::uint32_t>(i);
        w.context = static_cast<std::uint64_t>(to * count + i);
        w.more = !(last && turn == ranks - 1);   // one doorbell for each endpoint, of the last write
        while (fabric_->write(w) == Post::Again) look(number, begin);
      }
    while (left_ > 0) look(number, begin);
    for (int from = 0; from < ranks; ++from)
      for (std::size_t at = 0; from != rank_ && count == kWrites && at < static_cast<std::size_t>(count) * bytes; ++at)
        if (target_[offset(from) + at] != byte_of(from, rank_, number, at))
          check::fail(__FILE__, __LINE__,
                      what_ + ": byte " + std::to_string(at) + " from rank " + std::to_string(from) + " is wrong");
    meeting_.all({});
  }

 private:
  static std::size_t offset(int rank) { return static_cast<std::size_t>(rank) * kWrites * kPiece; }

  void look(int number, double begin) {
    Completion done[64];
    const int n = fabric_->poll(done, 64);
    for (int i = 0; i < n; ++i) {
      if (done[i].kind == Completion::Kind::Failed)
        check::fail(__FILE__, __LINE__, what_ + ": " + fabric_->describe_error(done[i]));
      std::size_t at = static_cast<std::size_t>(done[i].context);
      if (done[i].kind == Completion::Kind::Arrived) {
        const std::uint32_t immediate = done[i].immediate, from = immediate >> 20 & 0xf;
        if (immediate >> 24 != static_cast<std::uint32_t>(number) || from >= static_cast<std::uint32_t>(ranks))
          check::fail(__FILE__, __LINE__, what_ + ": immediate " + std::to_string(immediate) + " belongs to no write");
        at = from * (arrived_.size() / static_cast<std::size_t>(ranks)) + (immediate & 0xfffff);
      }
      std::vector<int>& seen = done[i].kind == Completion::Kind::Arrived ? arrived_ : sent_;
      if (at >= seen.size() || seen[at]++ != 0)
        check::fail(__FILE__, __LINE__, what_ + ": a completion came twice, or belongs to no write");
      --left_;
    }
    if (cpu_seconds() - begin > limit)
      check::fail(__FILE__, __LINE__, what_ + ": " + std::to_string(left_) + " completions are missing");
  }

  const int rank_;
  const Meeting& meeting_;
  std::vector<std::uint8_t> source_, target_;
  std::unique_ptr<LibfabricFabric> fabric_;
  LocalRegion source_region_, target_region_;
  std::vector<RemoteRegion> remote_;
  std::vector<int> sent_, arrived_;
  std::string what_;
  int left_ = 0;
};

int run_rank(int number, const std::string& provider, int contacts, const Meeting& meeting) {
  try {
    for (int contact = 0; contact < contacts; ++contact) {
      Rank rank(number, provider, meeting);
      for (int round = 0; round < (contact == 0 && ranks == 4 ? kRounds : 1); ++round) rank.round(round, kWrites, kPiece);
      if (contact == 0 && ranks == 4) rank.round(kRounds, kBurst, 8);
      if (contact == 0 && ranks == 4) rank.round(kRounds + 1, kWrites, kPiece);
    }
  } catch (const std::exception& error) {
    check::fail(__FILE__, __LINE__, error.what());
  }
  return 0;
}

// Ends with the first rank that fails.
int run(const std::string& provider, int contacts) {
  std::vector<Meeting> meetings;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < ranks; ++rank) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      for (const Meeting& other : meetings) close(other.fd);
      close(ends[0]);
      std::exit(run_rank(rank, provider, contacts, {ends[1]}));
    }
    close(ends[1]);
    meetings.push_back({ends[0]});
    pids.push_back(pid);
  }
  std::vector<Blob> blobs(static_cast<std::size_t>(ranks));
  const auto all_came = [&] {
    for (std::size_t rank = 0; rank < meetings.size(); ++rank)
      if (!meetings[rank].take(blobs[rank])) return false;
    return true;
  };
  while (all_came())
    for (const Meeting& meeting : meetings)
      for (const Blob& blob : blobs) meeting.put(blob);
  for (const Meeting& meeting : meetings) close(meeting.fd);
  int failed = 0;
  for (const pid_t pid : pids) {
    int status = 0;
    waitpid(pid, &status, 0);
    failed += status != 0;
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  if (!libfabric::compiled_in()) {
    std::printf("skipped: built without libfabric headers\n");
    return 0;
  }
  if (argc > 3) ranks = std::atoi(argv[3]);
  if (argc > 4) limit = std::atof(argv[4]);
  return run(argc > 1 ? argv[1] : "tcp", argc > 2 ? std::atoi(argv[2]) : 1);
}
