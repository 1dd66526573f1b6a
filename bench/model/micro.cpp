#include "micro.h"

#include "writer.h"

namespace pplx::model {
namespace {

// The source's thread; the target's has nothing to do.
struct Source final : Ranks {
  Source(const FabricCosts& fabric) : simulation(fabric, 2), writer(simulation, 0) {}
  void landed(double, const Message&) override {}
  void acknowledged(double now, const Message& message) override { writer.completed(now, message, false); }
  void woken(double now, std::uint32_t) override {
    for (const Writer::Read& read : writer.step(now)) done = read.at;
  }
  double run(double submit_us, WriteList list) {
    writer.submit(submit_us, std::move(list));
    simulation.run(*this);
    return done;
  }

  Simulation simulation;
  Writer writer;
  double done = 0;
};

Message to_other(std::uint32_t nic, std::uint64_t bytes) {
  Message m;
  m.target = 1;
  m.nic = nic;
  m.bytes = bytes;
  return m;
}

}  // namespace

double single_write_us(const FabricCosts& fabric, double submit_us, std::uint64_t bytes) {
  WriteList list(fabric.nics);
  for (std::uint32_t nic = 0; nic < fabric.nics; ++nic) list[nic].push_back(to_other(nic, bytes / fabric.nics));
  return Source(fabric).run(submit_us, std::move(list));
}

double paged_writes_us(const FabricCosts& fabric, double submit_us, std::uint64_t bytes, std::uint32_t pages) {
  WriteList list(fabric.nics);
  for (std::uint32_t page = 0; page < pages; ++page) {
    const auto nic = static_cast<std::uint32_t>(std::uint64_t{page} * fabric.nics / pages);
    list[nic].push_back(to_other(nic, bytes));
  }
  return Source(fabric).run(submit_us, std::move(list));
}

}  // namespace pplx::model
