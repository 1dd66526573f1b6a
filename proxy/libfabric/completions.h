// The provider's completions in the form that the proxy wants, and the error texts of writes that failed.
#pragma once

#include <deque>
#include <string>

#include "endpoint.h"

namespace pplx::libfabric {

class Completions {
 public:
  // Both stay where they are.
  Completions(const Provider& provider, Scratch& scratch) : provider_(provider), scratch_(scratch) {}

  // Reports a write that failed without a completion from the provider.
  void fail_write(int endpoint, std::uint64_t context, int error, std::string text);
  // Both return how many completions they wrote to `out`. The proxy knows the endpoint as `index`.
  int read(Endpoint& endpoint, int index, Completion* out, int capacity);
  int failed_before(Completion* out, int capacity);
  std::string text_of(const Completion& failed) const;   // empty: forgotten

 private:
  struct ErrorText {
    int endpoint;
    bool has_context;
    std::uint64_t context;
    std::string text;
  };

  bool take(Endpoint& endpoint, int index, const fi_cq_data_entry& entry, Completion& out);
  int read_errors(Endpoint& endpoint, int index, Completion* out, int capacity);
  void remember(const Completion& completion, std::string text);

  const Provider& provider_;
  Scratch& scratch_;
  std::deque<Completion> ready_;   // from fail_write
  std::deque<ErrorText> errors_;
};

}  // namespace pplx::libfabric
