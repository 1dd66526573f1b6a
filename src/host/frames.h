// The frames of all threads of this process, of C++ too. Each is interrupted by a signal, and writes them down.
#pragma once

#include <string>

namespace pplx {

// JSON: {"problem": text}, or {"threads": [[name, number, frames]...]}, a frame as text, the innermost first. frames: null where a
// thread does not answer in time: it blocks the signal, or the kernel does not let go of it.
std::string native_frames();

}  // namespace pplx
