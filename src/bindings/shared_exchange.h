// An Exchange together with the memory that it works in, which the proxy keeps alive with it.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/exchange.h"
#include "memory/mapping.h"

namespace pplx {

struct SharedExchange {
  SharedExchange(const Config& config, cpu::Exchange::Memory memory, std::vector<std::shared_ptr<Mapping>> mappings, unsigned threads,
                 double timeout)
      : mappings(std::move(mappings)), own(memory.own), exchange(config, std::move(memory), threads, timeout) {}

  std::vector<std::shared_ptr<Mapping>> mappings;   // this rank's first
  char* own;
  cpu::Exchange exchange;
};

}  // namespace pplx
