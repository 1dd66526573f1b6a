// Names the halves of a dispatch or a combine that a call does.
#pragma once

namespace pplx {

enum Halves : unsigned { kSend = 1, kRecv = 2 };

}  // namespace pplx
