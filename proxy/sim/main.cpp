// sim: the production proxy and phases over a hostile network in memory. A seed determines a run, so a failure can be replayed.
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "world.h"

using namespace pplx::sim;

namespace {

constexpr const char* kUsage =
    "sim --seeds N [--first S] [--jobs J] [--at-least K]   N seeds from S (1) on, in J processes; fails if a kind of fault "
    "happened less than K times\n"
    "    --limit S                                         seconds of processor time that a seed may take (60): more is a hang\n"
    "sim --seed S [--log]                                  one seed, with every event\n"
    "sim --seed S --steady N [--late rank:R:US|nic:NODE:US|link:FROM:TO:US]\n"
    "                                                  N steps without trouble, in which this is late by US simulated "
    "microseconds; prints how long each rank waited for each other one, for pplx_comm/top.py\n"
    "sim --long N [--resume FILE] [--jobs J]               up to seed N, going on where FILE says\n";

struct Options {
  std::uint64_t first = 1, seeds = 200, at_least = 0;
  unsigned jobs = 1;
  unsigned limit = 60;          // not wall time, so that a stopped run may go on
  std::optional<std::uint64_t> one;
  bool log = false;
  std::uint64_t until = 0;      // --long
  std::string state;
  std::uint32_t steady = 0;     // steps
  Late late;
};

[[noreturn]] void usage(const std::string& problem) {
  std::fprintf(stderr, "%s\n%s", problem.c_str(), kUsage);
  std::exit(2);
}

Late parse_late(const std::string& text) {
  Late late;
  unsigned from = 0, to = 0;
  unsigned long long us = 0;
  int end = 0;
  const auto is = [&](const char* format, Late::What what, auto*... numbers) {
    late.what = what;
    end = 0;
    return std::sscanf(text.c_str(), format, numbers..., &end) == sizeof...(numbers) && text[end] == '\0' && end > 0;
  };
  if (!is("rank:%u:%llu%n", Late::What::Rank, &from, &us) && !is("nic:%u:%llu%n", Late::What::Nic, &from, &us) &&
      !is("link:%u:%u:%llu%n", Late::What::Link, &from, &to, &us))
    usage("--late " + text + " is none of rank:R:US, nic:NODE:US and link:FROM:TO:US");
  late.from = from;
  late.to = to;
  late.by = us * kMicrosecond;
  return late;
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--log") {
      o.log = true;
      continue;
    }
    if (name == "--help") {
      std::printf("%s", kUsage);
      std::exit(0);
    }
    if (i + 1 == argc) usage(name + " needs a value");
    const char* value = argv[++i];
    const auto number = [&] {
      char* end = nullptr;
      const std::uint64_t n = std::strtoull(value, &end, 0);
      if (end == value || *end != '\0') usage(name + " needs a number, not " + value);
      return n;
    };
    if (name == "--seeds") o.seeds = number();
    else if (name == "--first") o.first = number();
    else if (name == "--jobs") o.jobs = static_cast<unsigned>(number());
    else if (name == "--at-least") o.at_least = number();
    else if (name == "--limit") o.limit = static_cast<unsigned>(number());
    else if (name == "--seed") o.one = number();
    else if (name == "--steady") o.steady = static_cast<std::uint32_t>(number());
    else if (name == "--late") o.late = parse_late(value);
    else if (name == "--long") o.until = number();
    else if (name == "--resume") o.state = value;
    else usage("unknown option " + name);
  }
  if (o.jobs < 1) usage("--jobs needs at least 1");
  return o;
}

// Shared by the processes of a run.
struct Shared {
  std::atomic<std::uint64_t> next;   // the seed for the next free process
  struct Job {
    std::uint64_t seed;
    Totals totals;
  } jobs[64];
};

std::string replay(const char* program, std::uint64_t seed) {
  return std::string(program) + " --seed " + std::to_string(seed) + " --log";
}

constexpr unsigned kSecondsPerLine = 10;

// Waits until a child ends. Meanwhile prints how far the seeds are, and how long the others take.
// `waited`: tenths of a second.
pid_t await_child(int& status, std::uint64_t& waited, const Shared& shared, std::uint64_t first, std::uint64_t end) {
  for (;;) {
    const pid_t ended = waitpid(-1, &status, WNOHANG);
    if (ended != 0) return ended;
    usleep(100'000);
    const std::uint64_t begun = std::min<std::uint64_t>(shared.next, end) - first;
    if (++waited % (10 * kSecondsPerLine) != 0 || begun == 0) continue;
    std::printf("%llu of %llu seeds, %llu s left\n", static_cast<unsigned long long>(begun),
                static_cast<unsigned long long>(end - first),
                static_cast<unsigned long long>((end - first - begun) * waited / begun / 10));
    std::fflush(stdout);
  }
}

// After a failure of any kind, a crash included, prints the seed and the command that replays it.
bool run_seeds(const char* program, const Options& o, std::uint64_t first, std::uint64_t end, Totals& totals) {
  const unsigned jobs = o.jobs;
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    return false;
  }
  Shared& shared = *new (memory) Shared();
  shared.next = first;
  std::fflush(stdout);
  pid_t children[64];
  for (unsigned j = 0; j < jobs; ++j) {
    children[j] = fork();
    if (children[j] < 0) {
      std::perror("fork");
      std::exit(1);
    }
    if (children[j] > 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);   // no process waits for orphans
    for (std::uint64_t seed = shared.next++; seed < end; seed = shared.next++) {
      shared.jobs[j].seed = seed;
      const itimerval limit = {{0, 0}, {o.limit, 0}};
      setitimer(ITIMER_PROF, &limit, nullptr);
      try {
        World(seed, false, shared.jobs[j].totals).run();
      } catch (const std::exception& error) {
        std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), error.what());
        std::fflush(stdout);
        _exit(1);
      }
    }
    std::fflush(stdout);
    std::exit(0);
  }
  bool good = true;
  std::uint64_t waited = 0;
  for (unsigned left = jobs; left > 0; --left) {
    int status = 0;
    const pid_t ended = await_child(status, waited, shared, first, end);
    const auto j = static_cast<unsigned>(std::find(children, children + jobs, ended) - children);
    totals.add(shared.jobs[j].totals);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    good = false;
    shared.next = end;   // the others end with the seed that they are at
    const std::uint64_t seed = shared.jobs[j].seed;
    if (WIFSIGNALED(status))
      std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed),
                  WTERMSIG(status) == SIGPROF ? "hangs" : strsignal(WTERMSIG(status)));
    std::printf("seed %llu FAILED. Replay it: %s\n", static_cast<unsigned long long>(seed), replay(program, seed).c_str());
  }
  munmap(memory, sizeof(Shared));
  return good;
}

bool report(const Totals& t, std::uint64_t at_least) {
  bool enough = true;
  std::printf(
      "%llu seeds, %llu steps, %llu resets, %llu failures raised, %llu writes, %llu events, %llu bytes of outputs compared\n",
      static_cast<unsigned long long>(t.seeds), static_cast<unsigned long long>(t.steps), static_cast<unsigned long long>(t.resets),
      static_cast<unsigned long long>(t.failures), static_cast<unsigned long long>(t.writes),
      static_cast<unsigned long long>(t.events), static_cast<unsigned long long>(t.outputs));
  for (std::size_t i = 0; i < kFaults; ++i) {
    const bool few = t.faults[i] < at_least;
    enough &= !few;
    std::printf("  %-32s %12llu%s\n", name_of(static_cast<Fault>(i)), static_cast<unsigned long long>(t.faults[i]),
                few ? "   TOO FEW" : "");
  }
  if (!enough) std::printf("FAILED: a kind of fault happened less than %llu times\n", static_cast<unsigned long long>(at_least));
  return enough;
}

// ---- the long run: totals and the next seed, in a file that is replaced as a whole ----

constexpr std::uint64_t kChunk = 250;  // seeds of a process between two writes of the state

std::uint64_t read_state(const std::string& file, Totals& totals) {
  std::ifstream in(file);
  std::uint64_t next = 1;
  std::string word;
  if (!(in >> word >> next) || word != "next") return 1;
  in >> word >> totals.seeds >> word >> totals.steps >> word >> totals.resets >> word >> totals.failures >> word >> totals.writes >>
      word >> totals.events >> word >> totals.outputs;
  std::string line;
  std::getline(in, line);
  while (std::getline(in, line)) {
    const std::size_t colon = line.rfind(": ");   // names have colons of their own
    if (colon == std::string::npos) continue;
    for (std::size_t i = 0; i < kFaults; ++i)
      if (line.substr(0, colon) == name_of(static_cast<Fault>(i)))
        totals.faults[i] = std::strtoull(line.c_str() + colon + 2, nullptr, 10);
  }
  return next;
}

void write_state(const std::string& file, std::uint64_t next, const Totals& t) {
  std::ofstream out(file + ".new");
  out << "next " << next << "\nseeds " << t.seeds << "\nsteps " << t.steps << "\nresets " << t.resets << "\nfailures " << t.failures
      << "\nwrites " << t.writes << "\nevents " << t.events << "\noutputs " << t.outputs << "\n";
  for (std::size_t i = 0; i < kFaults; ++i) out << name_of(static_cast<Fault>(i)) << ": " << t.faults[i] << "\n";
  out.close();
  if (!out || std::rename((file + ".new").c_str(), file.c_str()) != 0) {
    std::perror(file.c_str());
    std::exit(1);
  }
}

int run_long(const char* program, const Options& o) {
  Totals totals;
  std::uint64_t next = o.state.empty() ? 1 : read_state(o.state, totals);
  std::printf("from seed %llu to %llu\n", static_cast<unsigned long long>(next), static_cast<unsigned long long>(o.until));
  while (next <= o.until) {
    const std::uint64_t end = std::min(o.until + 1, next + kChunk * o.jobs);
    if (!run_seeds(program, o, next, end, totals)) return 1;
    next = end;
    if (!o.state.empty()) write_state(o.state, next, totals);
  }
  return report(totals, 0) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  if (o.jobs > 64) usage("--jobs is at most 64");
  if (o.one) {
    Totals totals;
    World world(*o.one, o.log, totals);
    try {
      if (o.steady > 0) {
        std::printf("%s\n", world.run_steady(o.steady, o.late).c_str());
        return 0;
      }
      world.run();
    } catch (const std::exception& error) {
      std::printf("seed %llu: %s\n", static_cast<unsigned long long>(*o.one), error.what());
      return 1;
    }
    return report(totals, 0) ? 0 : 1;
  }
  if (o.until > 0) return run_long(argv[0], o);
  std::printf("seeds %llu to %llu\n", static_cast<unsigned long long>(o.first),
              static_cast<unsigned long long>(o.first + o.seeds - 1));
  Totals totals;
  const bool good = run_seeds(argv[0], o, o.first, o.first + o.seeds, totals);
  return report(totals, good ? o.at_least : 0) && good ? 0 : 1;
}
