// Two threads and a word between them: what was written before the release store is read after the acquire load. On x86 this cannot
// fail by running; built with ThreadSanitizer, as it is by cpp-tsan and by tests/mutants, it fails when an order is missing.
#include <thread>
#include <vector>

#include "../../src/host/atomic.h"
#include "../../src/protocol/arrival.h"
#include "check.h"

using namespace pplx;

int main() {
  constexpr std::uint32_t kSteps = 2000;
  // Each way has a block and a word: the second proves that the first was read, so that it may be written again.
  // Whole words: TSAN keeps four accesses of each eight bytes, and forgets those to their single bytes.
  std::vector<std::uint64_t> there(32), back(32);
  std::uint64_t arrived_there = 0, arrived_back = 0, abort = 0;
  std::uint32_t reason = 0;
  const auto wait = [](const std::uint64_t* word, std::uint32_t step) {
    while (!arrived(load_acquire(word), 1, step)) std::this_thread::yield();
  };
  std::thread peer([&] {
    for (std::uint32_t step = 1; step <= kSteps; ++step) {
      wait(&arrived_there, step);
      for (const std::uint64_t word : there) CHECK_EQ(word, step);
      for (std::uint64_t& word : back) word = step + 1;
      store_release(&arrived_back, arrival_word(1, step));
    }
    reason = 7;
    CHECK(store_if_zero(&abort, 1));
  });
  for (std::uint32_t step = 1; step <= kSteps; ++step) {
    for (std::uint64_t& word : there) word = step;
    store_release(&arrived_there, arrival_word(1, step));
    wait(&arrived_back, step);
    for (const std::uint64_t word : back) CHECK_EQ(word, step + 1);
  }
  while (load_acquire(&abort) == 0) std::this_thread::yield();
  CHECK_EQ(reason, 7u);
  peer.join();
  CHECK(!store_if_zero(&abort, 2));
}
