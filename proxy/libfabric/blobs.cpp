#include "blobs.h"

namespace pplx::libfabric {
namespace {

constexpr std::uint32_t kAddressMark = 0x31415850;   // "PXA1"
constexpr std::uint32_t kRegionMark = 0x31525850;    // "PXR1"

class Writer {
 public:
  explicit Writer(std::uint32_t mark) { number(mark); }
  template <class Number>
  void number(Number value) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&value);
    blob_.insert(blob_.end(), bytes, bytes + sizeof(value));
  }
  template <class Bytes>
  void bytes(const Bytes& value) {
    number(static_cast<std::uint32_t>(value.size()));
    blob_.insert(blob_.end(), value.begin(), value.end());
  }
  Blob take() { return std::move(blob_); }

 private:
  Blob blob_;
};

class Reader {
 public:
  Reader(const Blob& blob, std::uint32_t mark, const char* what) : blob_(blob), what_(what) {
    if (number<std::uint32_t>() != mark) fail();
  }
  template <class Number>
  Number number() {
    Number value;
    std::memcpy(&value, take(sizeof(value)), sizeof(value));
    return value;
  }
  template <class Bytes>
  Bytes bytes() {
    const auto size = number<std::uint32_t>();
    const std::uint8_t* data = take(size);
    return Bytes(data, data + size);
  }
  std::uint32_t count() {   // a count of things that are at most one per endpoint
    const auto value = number<std::uint32_t>();
    if (value > kMaxEndpoints) fail();
    return value;
  }
  void end() const {
    if (at_ != blob_.size()) fail();
  }

 private:
  const std::uint8_t* take(std::size_t size) {
    if (size > blob_.size() - at_) fail();
    const std::uint8_t* data = blob_.data() + at_;
    at_ += size;
    return data;
  }
  [[noreturn]] void fail() const {
    throw FabricError("this is not " + std::string(what_) + " of this version of pplx_comm's libfabric back end (" +
                      std::to_string(blob_.size()) + " bytes)");
  }
  const Blob& blob_;
  const char* what_;
  std::size_t at_ = 0;
};

void write_region(Writer& writer, const RegionDescription& description) {
  writer.number(description.base);
  writer.number(description.bytes);
  writer.number(static_cast<std::uint32_t>(description.keys.size()));
  for (const std::uint64_t key : description.keys) writer.number(key);
}

RegionDescription read_region(Reader& reader) {
  RegionDescription description;
  description.base = reader.number<std::uint64_t>();
  description.bytes = reader.number<std::uint64_t>();
  description.keys.resize(reader.count());
  for (std::uint64_t& key : description.keys) key = reader.number<std::uint64_t>();
  return description;
}

}  // namespace

Blob encode(const RegionDescription& description) {
  Writer writer(kRegionMark);
  write_region(writer, description);
  return writer.take();
}

RegionDescription decode_region(const Blob& blob) {
  Reader reader(blob, kRegionMark, "the description of a memory region");
  RegionDescription description = read_region(reader);
  reader.end();
  return description;
}

Blob encode(const Address& address) {
  Writer writer(kAddressMark);
  writer.bytes(address.provider);
  writer.bytes(address.host);
  writer.number(address.pid_namespace);
  writer.number(address.pid);
  writer.number(address.start_time);
  writer.number(static_cast<std::uint32_t>(address.endpoints.size()));
  for (const Blob& endpoint : address.endpoints) writer.bytes(endpoint);
  writer.number(static_cast<std::uint32_t>(address.shm_names.size()));
  for (const std::string& name : address.shm_names) writer.bytes(name);
  write_region(writer, address.scratch);
  return writer.take();
}

Address decode_address(const Blob& blob) {
  Reader reader(blob, kAddressMark, "an endpoint address");
  Address address;
  address.provider = reader.bytes<std::string>();
  address.host = reader.bytes<std::string>();
  address.pid_namespace = reader.number<std::uint64_t>();
  address.pid = reader.number<std::uint32_t>();
  address.start_time = reader.number<std::uint64_t>();
  address.endpoints.resize(reader.count());
  for (Blob& endpoint : address.endpoints) endpoint = reader.bytes<Blob>();
  address.shm_names.resize(reader.count());
  for (std::string& name : address.shm_names) name = reader.bytes<std::string>();
  address.scratch = read_region(reader);
  reader.end();
  return address;
}

}  // namespace pplx::libfabric
