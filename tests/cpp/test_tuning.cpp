// From how many tokens on steps go by the large kernels, by GPU and shape.
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

}  // namespace

int main() {
  check_lines();
  check_table();
}
