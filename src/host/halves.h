// Which halves of a dispatch or a combine a call does.
#pragma once

namespace pplx {

enum Halves : unsigned { kSend = 1, kRecv = 2 };

}  // namespace pplx
