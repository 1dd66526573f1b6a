// How a generation of the simulation ends: in order, or in trouble.
#pragma once

#include <cstdint>
#include <string>

namespace pplx::sim {

enum class Trouble : std::uint8_t { None, Kill, Vanish, Leave, FailWrite, FailSomewhere, FailPost, Overrun, Corrupt };

inline const char* name_of(Trouble trouble) {
  switch (trouble) {
    case Trouble::Kill: return "kill";
    case Trouble::Vanish: return "vanish";
    case Trouble::Leave: return "leave";
    case Trouble::FailWrite: return "failed write";
    case Trouble::FailSomewhere: return "failure without a write";
    case Trouble::FailPost: return "failed post";
    case Trouble::Overrun: return "overrun";
    case Trouble::Corrupt: return "corrupt header";
    case Trouble::None: break;
  }
  return "no trouble";
}

// Strikes with a later write: see Network::set_trap().
inline bool is_trap(Trouble trouble) { return trouble >= Trouble::FailWrite; }

inline std::string rank_text(std::uint32_t rank) { return "rank " + std::to_string(rank); }

}  // namespace pplx::sim
