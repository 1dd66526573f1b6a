// The ring of spans: it keeps the latest, whole, since it was started.
#include <thread>
#include <vector>

#include "../../src/host/trace.h"
#include "check.h"

using namespace pplx;

int main() {
  Trace trace;
  trace.add({1, 2});
  CHECK(trace.read().empty());
  trace.start(4);
  for (std::uint32_t i = 0; i < 10; ++i) trace.add({i, i, 0, 0, Traced::Posted, 0, i});
  std::vector<TraceSpan> spans = trace.read();
  CHECK_EQ(spans.size(), 4u);
  for (std::uint32_t i = 0; i < 4; ++i) CHECK_EQ(spans[i].step, 6 + i);
  trace.stop();
  trace.add({99, 99});
  CHECK_EQ(trace.read().back().step, 9u);
  trace.start(100);   // the ring that is there
  CHECK(trace.read().empty());
  trace.add({5, 6});
  CHECK_EQ(trace.read().size(), 1u);
}
