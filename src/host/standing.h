// Snapshots that say why something hangs, as JSON, which pplx_comm/accounts.py reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace pplx {

// A launch, and the facts that chose its kernel.
struct ExplainedLaunch {
  std::string call, kernel;
  std::uint32_t grid = 0, block = 0, smem = 0;
  std::string why;
};

// An AllToAll.
struct Standing {
  struct Open {
    std::uint32_t step = 0;
    std::string at;                        // the call that it is in, or the last one
    bool running = false;                  // in that call
    double seconds = -1;                   // since it began, or ended; below 0: unknown
    std::vector<std::uint32_t> peers;      // the ranks that it waits for
    std::string what;                      // the block, for example, that is to come from them
  };
  struct Ended {
    std::uint32_t step = 0;
    double seconds = 0;                    // from its dispatch on
  };
  const char* device = "";
  std::uint32_t generation = 0, next_step = 0;
  std::vector<Open> open;
  std::vector<std::int64_t> heard[2];      // the last step whose dispatch came, and whose combine, indexed by source; below 0: none
  std::vector<Ended> last;                 // the latest at the end
  std::vector<std::pair<std::uint32_t, std::vector<ExplainedLaunch>>> launches;   // the tokens of a step, and its launches
};

// A proxy.
struct ProxyStanding {
  bool stands_still = false;
  std::uint64_t turns = 0, writes = 0, bytes = 0, again = 0, errors = 0, dropped = 0, deepest = 0;
};

namespace telling {

template <typename List, typename F>
std::string list(const List& values, const F& of) {
  std::string all;
  for (const auto& value : values) all += (all.empty() ? "" : ",") + of(value);
  return "[" + all + "]";
}
// Below 0 it is unknown.
inline std::string number(std::int64_t n) { return n < 0 ? "null" : std::to_string(n); }
// Not as a fraction: a locale may write that with a comma.
inline std::string microseconds(double seconds) { return number(seconds < 0 ? -1 : static_cast<std::int64_t>(seconds * 1e6)); }
inline std::string truth(bool b) { return b ? "true" : "false"; }

}  // namespace telling

inline std::string json(const std::string& text) {
  std::string all = "\"";
  for (const char c : text) {
    char escaped[8];
    if (c == '"' || c == '\\')
      (all += '\\') += c;
    else if (static_cast<unsigned char>(c) >= ' ')
      all += c;
    else
      all.append(escaped, static_cast<std::size_t>(std::snprintf(escaped, sizeof escaped, "\\u%04x", c)));
  }
  return all + '"';
}

inline std::string json(const Standing& s) {
  using namespace telling;
  const auto open = [](const Standing::Open& o) {
    return "{\"step\":" + number(o.step) + ",\"at\":" + json(o.at) + ",\"running\":" + truth(o.running) +
           ",\"us\":" + microseconds(o.seconds) + ",\"peers\":" + list(o.peers, number) + ",\"what\":" + json(o.what) + "}";
  };
  const auto ended = [](const Standing::Ended& e) { return "[" + number(e.step) + "," + microseconds(e.seconds) + "]"; };
  const auto launch = [](const ExplainedLaunch& l) {
    return "{\"call\":" + json(l.call) + ",\"kernel\":" + json(l.kernel) + ",\"grid\":" + number(l.grid) + ",\"block\":" + number(l.block) +
           ",\"shared_bytes\":" + number(l.smem) + ",\"why\":" + json(l.why) + "}";
  };
  const auto step = [&](const auto& of) { return "[" + number(of.first) + "," + list(of.second, launch) + "]"; };
  return "{\"device\":" + json(s.device) + ",\"generation\":" + number(s.generation) + ",\"next_step\":" + number(s.next_step) +
         ",\"open\":" + list(s.open, open) + ",\"dispatched\":" + list(s.heard[0], number) + ",\"combined\":" + list(s.heard[1], number) +
         ",\"last\":" + list(s.last, ended) + ",\"launches\":" + list(s.launches, step) + "}";
}

inline std::string json(const ProxyStanding& s) {
  std::string all = "{\"stands_still\":" + telling::truth(s.stands_still);
  const std::pair<const char*, std::uint64_t> counts[] = {{"turns", s.turns},   {"writes", s.writes},   {"bytes", s.bytes},
                                                          {"again", s.again},   {"errors", s.errors},   {"dropped", s.dropped},
                                                          {"deepest", s.deepest}};
  for (const auto& [name, count] : counts) all += std::string(",\"") + name + "\":" + std::to_string(count);
  return all + "}";
}

// Tells in JSON where something stands. Any thread may ask; it waits for nothing that may not come.
class Teller {
 public:
  virtual ~Teller() = default;
  virtual std::string tell() const = 0;       // empty: it is gone
};
template <typename T>
class TellerOf final : public Teller {
 public:
  explicit TellerOf(std::weak_ptr<T> of) : of_(std::move(of)) {}
  std::string tell() const override {
    const std::shared_ptr<T> one = of_.lock();
    return one ? json(one->standing()) : "";
  }

 private:
  const std::weak_ptr<T> of_;
};

}  // namespace pplx
