#ifdef PPLX_HAVE_LIBFABRIC_HEADERS

#include "completions.h"

#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>

#include <algorithm>

namespace pplx::libfabric {
namespace {

constexpr int kReadAtOnce = 64;
constexpr std::size_t kErrorsKept = 64;

}  // namespace

void Completions::remember(const Completion& completion, std::string text) {
  if (errors_.size() == kErrorsKept) errors_.pop_front();
  errors_.push_back({completion.endpoint, completion.has_context, completion.context, std::move(text)});
}

void Completions::fail_write(int endpoint, std::uint64_t context, int error, std::string text) {
  Completion completion;
  completion.kind = Completion::Kind::Failed;
  completion.endpoint = endpoint;
  completion.context = context;
  completion.error = error;
  remember(completion, std::move(text));
  ready_.push_back(completion);
}

// False if the completion belongs to no write of ours and brings no immediate.
bool Completions::take(Endpoint& endpoint, int index, const fi_cq_data_entry& entry, Completion& out) {
  out = Completion{};
  out.endpoint = index;
  // FI_WRITE tells the sides apart. FI_REMOTE_CQ_DATA does not (sockets sets it on both), nor FI_RMA (rxm of 1.17 sets it on
  // neither).
  if ((entry.flags & FI_WRITE) != 0) {
    auto* operation = static_cast<Operation*>(entry.op_context);
    const bool forgotten = operation->forgotten;
    out.kind = Completion::Kind::Sent;
    out.context = operation->context;
    if (!forgotten) --endpoint.under_way;
    endpoint.operations.give_back(operation);
    return !forgotten;
  }
  if (!endpoint.receives.empty() && entry.op_context >= endpoint.receives.data() && entry.op_context <= &endpoint.receives.back())
    post_receive(endpoint, provider_, scratch_, entry.op_context);
  if ((entry.flags & FI_REMOTE_CQ_DATA) == 0) return false;   // nothing that a peer of ours sends
  out.kind = Completion::Kind::Arrived;
  out.has_context = false;
  out.immediate = static_cast<std::uint32_t>(entry.data);
  return true;
}

int Completions::read_errors(Endpoint& endpoint, int index, Completion* out, int capacity) {
  int written = 0;
  while (written < capacity) {
    // The library fills in fields that these headers may not know: fi_cq_err_entry grew in 1.20.
    union {
      fi_cq_err_entry entry;
      char room[256];
    } error{};
    const ssize_t result = fi_cq_readerr(endpoint.cq.get(), &error.entry, 0);
    if (result == -FI_EAGAIN || result == 0) break;
    if (result < 0) provider_.fail("fi_cq_readerr", endpoint.name, result);
    char room[256] = {};
    const char* words = fi_cq_strerror(endpoint.cq.get(), error.entry.prov_errno, error.entry.err_data, room, sizeof(room));
    std::string text = std::string(provider_.library->strerror(error.entry.err)) + " (" + std::to_string(error.entry.err) + ")";
    if (words != nullptr && *words != '\0' && text.rfind(words, 0) != 0) text += std::string(", provider says '") + words + "'";
    text += " [" + endpoint.name + ", " + provider_.full_name() + "]";
    if (error.entry.err == FI_EOVERRUN)
      throw FabricError("completion queue of " + endpoint.name + " overran, completions are lost: " + text);

    Completion completion;
    completion.kind = Completion::Kind::Failed;
    completion.endpoint = index;
    completion.error = error.entry.err;
    Operation* operation = endpoint.operations.find(error.entry.op_context);
    completion.has_context = operation != nullptr;
    if (operation != nullptr) {
      const bool forgotten = operation->forgotten;
      completion.context = operation->context;
      text = "write to peer " + std::to_string(operation->peer) + ": " + text;
      if (!forgotten) --endpoint.under_way;
      endpoint.operations.give_back(operation);
      if (forgotten) continue;
    }
    remember(completion, std::move(text));
    out[written++] = completion;
  }
  return written;
}

int Completions::read(Endpoint& endpoint, int index, Completion* out, int capacity) {
  fi_cq_data_entry entries[kReadAtOnce];
  const ssize_t result = fi_cq_read(endpoint.cq.get(), entries, static_cast<std::size_t>(std::min(kReadAtOnce, capacity)));
  if (result == -FI_EAGAIN) return 0;
  if (result == -FI_EAVAIL) return read_errors(endpoint, index, out, capacity);
  if (result < 0) provider_.fail("fi_cq_read", endpoint.name, result);
  int written = 0;
  for (ssize_t entry = 0; entry < result; ++entry) written += take(endpoint, index, entries[entry], out[written]);
  return written;
}

int Completions::failed_before(Completion* out, int capacity) {
  int written = 0;
  while (written < capacity && !ready_.empty()) {
    out[written++] = ready_.front();
    ready_.pop_front();
  }
  return written;
}

std::string Completions::text_of(const Completion& failed) const {
  for (auto error = errors_.rbegin(); error != errors_.rend(); ++error) {
    if (error->endpoint == failed.endpoint && error->has_context == failed.has_context &&
        (!failed.has_context || error->context == failed.context))
      return error->text;
  }
  return {};
}

}  // namespace pplx::libfabric

#endif
