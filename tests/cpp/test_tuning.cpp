// From how many tokens on steps go by the large kernels, by GPU and shape, and how those cut a step.
#include "../../src/cuda/large/tuning.h"
#include "check.h"

using namespace pplx::cuda;

namespace {

constexpr LargeTokens kLines[] = {{{132, 24, 8192, 4}, 1500}, {{132, 132, 8192, 4}, 700}, {{148, 148, 8192, 4}, 900},
                                 {{148, 148, 8192, 4, true}, 4000}};

// The first line that holds, none of whose bounds is exceeded.
void check_lines() {
  CHECK_EQ(large_tokens(kLines, {132, 8, 4096, 2}), 1500u);
  CHECK_EQ(large_tokens(kLines, {132, 24, 8192, 4}), 1500u);
  CHECK_EQ(large_tokens(kLines, {132, 25, 8192, 4}), 700u);
  CHECK_EQ(large_tokens(kLines, {148, 24, 8192, 4}), 900u);
  CHECK_EQ(large_tokens(kLines, {148, 24, 8192, 4, true}), 4000u);
  for (const StepShape& beyond : {StepShape{132, 132, 8208, 4}, StepShape{132, 132, 8192, 5}, StepShape{114, 24, 8192, 4},
                                  StepShape{132, 24, 8192, 4, true}, StepShape{}})
    CHECK_EQ(large_tokens(kLines, beyond), kLargeTokensElsewhere);
}

// A line that an earlier one hides says nothing; of one whose launches have more multiprocessors than the GPU, nothing was
// measured.
void check_table() {
  for (const LargeTokens& line : kLargeTokens) {
    CHECK(line.tokens > 0 && line.most.sms > 0 && line.most.sms <= line.most.gpu_sms && line.most.row_bytes % 16 == 0 &&
          line.most.world > 0);
    for (const LargeTokens& before : kLargeTokens) {
      if (&before == &line) break;
      const StepShape &a = before.most, &b = line.most;
      CHECK(a.gpu_sms != b.gpu_sms || a.sums != b.sums || a.sms < b.sms || a.row_bytes < b.row_bytes || a.world < b.world);
    }
    CHECK_EQ(large_tokens(line.most), line.tokens);
  }
  CHECK_EQ(large_tokens(StepShape{}), kLargeTokensElsewhere);
}

// A dispatch of few tokens: one unit a thread block while it is short, then two, then units of eight.
void check_units() {
  CHECK_EQ(tokens_per_unit(0, 132), 1u);
  CHECK_EQ(tokens_per_unit(128, 132), 1u);
  CHECK_EQ(tokens_per_unit(256, 132), 2u);
  CHECK_EQ(tokens_per_unit(512, 132), 2u);
  CHECK_EQ(tokens_per_unit(1024, 132), 4u);
  CHECK_EQ(tokens_per_unit(128, 24), 6u);
  CHECK_EQ(tokens_per_unit(192, 24), 8u);
  CHECK_EQ(tokens_per_unit(256, 24), 6u);
  CHECK_EQ(tokens_per_unit(4096, 24), 8u);
}

// Few tokens are spread over all thread blocks; no step has more chunks than memory is made for.
void check_chunks() {
  for (std::uint32_t tokens = 1; tokens <= 4096; ++tokens)
    for (const std::uint32_t blocks : {1u, 3u, 66u, 132u})
      for (const std::uint32_t top_k : {1u, 8u, 32u}) {
        const std::uint32_t chunk = tokens_of_chunk(tokens, top_k, blocks), chunks = (tokens + chunk - 1) / chunk;
        CHECK(chunk <= kMostTokensOfChunk && chunk * top_k <= kMostChoicesOfChunk);
        CHECK(chunk >= kFewTokensOfChunk || 2 * chunks > std::min(tokens, blocks));
        CHECK(chunk >= kFewTokensOfChunk || chunks <= blocks);
      }
}

// 4 MiB of rows of 7,552 bytes, of 66 thread blocks, 8 of few: one row a token with two ranks, 2.7 with four, 4.6 with eight.
void check_tokens_on_their_way() {
  CHECK_EQ(tokens_on_their_way(66, 7552, 2, 8), 8u);
  CHECK_EQ(tokens_on_their_way(66, 7552, 4, 8), 3u);
  CHECK_EQ(tokens_on_their_way(66, 7552, 8, 8), 2u);
  CHECK_EQ(tokens_on_their_way(24, 7552, 8, 8), 10u);
}

void check_sending_blocks() {
  CHECK_EQ(sending_blocks(132, {0, 2, 4096, false}), 66u);
  CHECK_EQ(sending_blocks(24, {0, 2, 4096, false}), 24u);
  CHECK_EQ(sending_blocks(132, {0, 4, 4096, false}), 44u);
  CHECK_EQ(sending_blocks(24, {0, 4, 4096, false}), 12u);
  CHECK_EQ(sending_blocks(24, {0, 4, 767, false}), 24u);
  CHECK_EQ(sending_blocks(8, {0, 4, 4096, false}), 8u);
  CHECK_EQ(sending_blocks(24, {0, 4, 4096, true}), 24u);
  CHECK_EQ(sending_blocks(132, {0, 4, 4096, true}), 66u);
  CHECK_EQ(sending_blocks(24, {75, 4, 4096, false}), 18u);
}

}  // namespace

int main() {
  check_lines();
  check_table();
  check_units();
  check_chunks();
  check_tokens_on_their_way();
  check_sending_blocks();
}
