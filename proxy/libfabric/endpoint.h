// One endpoint on one NIC, with all that libfabric opens for it, and the writes in flight on it.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "../fabric.h"
#include "providers.h"

namespace pplx::libfabric {

// The provider that every call goes to; it throws the errors of calls.
struct Provider {
  const Library* library = nullptr;
  std::string name;

  bool is_efa() const { return name == "efa" || name == "efa-direct"; }
  std::string full_name() const { return name + " (libfabric " + version_text(library->version) + ")"; }
  [[noreturn]] void fail(const std::string& call, const std::string& object, std::int64_t result) const;
  void check(std::int64_t result, const char* call, const std::string& object) const {
    if (result != 0) fail(call, object, result);
  }
};

struct CloseFid {
  template <class Object>
  void operator()(Object* object) const {
    fi_close(&object->fid);
  }
};
template <class Object>
using Handle = std::unique_ptr<Object, CloseFid>;

// A write in flight, which the provider gets as its context. Providers with FI_CONTEXT2 write into the first member.
struct Operation {
  fi_context2 provider_use;
  std::uint64_t context;
  int peer;
  bool under_way;
  bool forgotten;      // its peer was removed: reported already
};

class Operations {
 public:
  Operation* take() {
    if (free_.empty()) {
      all_.emplace_back();
      return &all_.back();
    }
    Operation* operation = free_.back();
    free_.pop_back();
    return operation;
  }
  void give_back(Operation* operation) {
    operation->under_way = false;
    free_.push_back(operation);
  }
  // Error entries of some providers carry contexts that are not ours.
  Operation* find(void* context) {
    for (Operation& operation : all_) {
      if (&operation == context && operation.under_way) return &operation;
    }
    return nullptr;
  }
  std::deque<Operation>& all() { return all_; }

 private:
  std::deque<Operation> all_;          // a deque: addresses stay
  std::vector<Operation*> free_;
};

// The order of members is the order of opening; they close the other way round.
struct Endpoint {
  std::string name;
  Info info;
  std::string shm_name;
  Operations operations;
  std::size_t under_way = 0;
  std::size_t most_under_way = 0;
  bool rings_doorbells = false;                // a device: writes can share one
  std::uint64_t write_flags = FI_REMOTE_CQ_DATA | FI_COMPLETION;
  std::vector<fi_context2> receives;
  void* scratch_descriptor = nullptr;
  Handle<fid_fabric> fabric;
  Handle<fid_domain> domain;
  Handle<fid_cq> cq;
  Handle<fid_av> av;
  Handle<fid_ep> ep;
};

// Memory for receives that a provider wants posted, and for writes that have no source or no target.
struct Scratch {
  alignas(64) std::uint8_t bytes[64] = {};
};

// `endpoint` has its name and info. `index`: which of this process's it is.
void open_endpoint(Endpoint& endpoint, const Provider& provider, int index, bool device_memory);
void post_receives(Endpoint& endpoint, const Provider& provider, Scratch& scratch);
void post_receive(Endpoint& endpoint, const Provider& provider, Scratch& scratch, void* context);
Blob address_of(const Endpoint& endpoint, const Provider& provider);

}  // namespace pplx::libfabric
