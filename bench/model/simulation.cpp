#include "simulation.h"

#include <algorithm>

namespace pplx::model {

Simulation::Simulation(const FabricCosts& costs, std::uint32_t ranks) : costs_(costs), nics_(std::size_t{ranks} * costs.nics) {}

void Simulation::post(double when, const Message& message) {
  std::uint32_t id = static_cast<std::uint32_t>(messages_.size());
  if (free_.empty()) {
    messages_.push_back(message);
  } else {
    id = free_.back();
    free_.pop_back();
    messages_[id] = message;
  }
  Nic& nic = at(message.source, message.nic);
  ++nic.under_way;
  const double ready = std::max(when, nic.out_message_free);
  nic.out_message_free = ready + costs_.nic_message_us;
  nic.waiting.push_back({ready, id});
  if (nic.turning) return;
  nic.turning = true;
  add(ready, Kind::Turn, message.source * costs_.nics + message.nic);
}

void Simulation::wake(double when, std::uint32_t rank) { add(when, Kind::Wake, rank); }

double Simulation::run(Ranks& ranks) {
  double now = 0;
  while (!events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    now = event.at;
    switch (event.kind) {
      case Kind::Turn: turn(now, event.what); break;
      case Kind::FirstByte: first_byte(now, event.what); break;
      case Kind::Wake: ranks.woken(now, event.what); break;
      case Kind::Landed: {
        add(now + costs_.ack_us, Kind::Acknowledged, event.what);
        const Message message = messages_[event.what];   // a copy: what the rank does about it may post
        ranks.landed(now, message);
        break;
      }
      case Kind::Acknowledged: {
        const Message message = messages_[event.what];
        --at(message.source, message.nic).under_way;
        free_.push_back(event.what);
        ranks.acknowledged(now, message);
        break;
      }
    }
  }
  return now;
}

// The link is free: the next chunk of the next message.
void Simulation::turn(double now, std::uint32_t index) {
  Nic& nic = nics_[index];
  while (!nic.waiting.empty() && nic.waiting.front().at <= now &&
         (costs_.interleave == 0 || nic.active.size() < costs_.interleave)) {
    nic.active.push_back(nic.waiting.front().message);
    nic.waiting.pop_front();
  }
  if (nic.active.empty()) {
    nic.turning = !nic.waiting.empty();
    if (nic.turning) add(nic.waiting.front().at, Kind::Turn, index);
    return;
  }
  const std::uint32_t id = nic.active.front();
  nic.active.pop_front();
  Message& message = messages_[id];
  const std::uint64_t chunk = std::min<std::uint64_t>(costs_.chunk_bytes, message.bytes - message.out);
  message.out += chunk;
  if (message.out < message.bytes) nic.active.push_back(id);
  add(now + costs_.latency_us, Kind::FirstByte, id);
  add(now + static_cast<double>(chunk) / costs_.bytes_per_us, Kind::Turn, index);
}

// A chunk reaches the target's link, as soon as its first byte does: links are cut through, not stored and forwarded.
void Simulation::first_byte(double now, std::uint32_t id) {
  Message& message = messages_[id];
  Nic& nic = at(message.target, message.nic);
  const std::uint64_t chunk = std::min<std::uint64_t>(costs_.chunk_bytes, message.bytes - message.in);
  message.in += chunk;
  bytes_landed_ += chunk;
  nic.in_free = std::max(now, nic.in_free) + static_cast<double>(chunk) / costs_.bytes_per_us;
  if (message.in < message.bytes) return;
  const double landed = std::max(nic.in_free, nic.in_message_free);
  nic.in_message_free = landed + costs_.nic_message_us;
  add(landed, Kind::Landed, id);
}

}  // namespace pplx::model
