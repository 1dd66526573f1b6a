// The loader and the quantisers of a large dispatch, and the rings in shared memory between its warps (docs/design.md, Roles).
//
// The dealer is the one sending warp that waits for peers: for counts, where it may keep no more own rows, and in rounds for room.
// Meanwhile the other warps store what it has dealt before, and tell peers of it.
#pragma once

#include "receive.cuh"
#include "../plan/chunk_plan.cuh"
#include "../decode/payload.cuh"
#include "quantise.cuh"
#include "ring.cuh"

namespace pplx::cuda {

inline constexpr std::uint32_t kMostTokensIn = 12, kMostRowsOut = 12;
inline constexpr std::uint32_t kPartInBytes = kOfTeam * kQuantiserBytes, kTokensInBytes = kTokensIn * kPartInBytes;
inline constexpr std::uint32_t kRowOutBytes = 7424, kRowsOutBytes = kRowsOut * kRowOutBytes;  // 7168 codes and their scales
inline constexpr std::uint32_t kRingBytes = kTokensInBytes + kRowsOutBytes;

// Where a lane's part of a token goes.
struct SentRow {
  char* row = nullptr;  // at the peer, scales and all
  char *place = nullptr, *scales = nullptr;  // places in the output, for a copy of this rank's own row
};

// Tokens that are dealt together. The lanes of a token are a power of two.
struct Batch {
  std::uint32_t first, tokens;  // this rank's tokens; tokens 0: there are no more
  std::uint32_t words;  // in a general kernel: lanes whose rows have arrival words
  bool sent;  // in rounds: there was room
  SentRow rows[32];
  std::uint32_t far[32];  // rows of remote peers' whole blocks, as in PlanView, or kNone
};

struct SendRings {
  std::uint64_t loaded[kMostTokensIn], used[kMostTokensIn];  // turns: by the loader; by the team, or a storer
  std::uint64_t quantised[kMostRowsOut], stored[kMostRowsOut];  // arrivals of teams, and of a storer
  std::uint64_t dealt[kBatches], there[kBatches], told[kBatches];  // arrivals of the dealer, all storers, the teller
  std::uint32_t parts;  // all parts of tokens; known when there are no more
  std::uint32_t next_told;  // the first batch that no warp tells of yet; kNone: there is none any more
  KeptRows kept;
  Batch batches[kBatches];
};

// How tokens of this launch are cut: into parts, which quantisers take to rows, or storers to where they go.
template <typename Mode>
struct SendShape {
  using Quantiser = TileQuantiser<kElementBytes<Mode>, kQuantiserBytes>;
  static constexpr std::uint32_t kPass = Quantiser::kPassElements, kOfPart = kOfTeam * Quantiser::kPasses * kPass;  // elements, a byte each

  __device__ explicit SendShape(const Common& k)
      : parts((k.payload_bytes + kOfPart - 1) / kOfPart),
        of_quantiser((min(k.payload_bytes, kOfPart) + kOfTeam * kPass - 1) / (kOfTeam * kPass) * kPass),
        part_bytes(min(k.payload_bytes, kOfPart) * kElementBytes<Mode>),
        row_bytes(k.dispatch.scales_at + 16 * k.scale_vec16s),
        pitch(static_cast<std::uint32_t>(align_up(row_bytes, kLine))),
        room_out(min(kRowsOutBytes / pitch, kMostRowsOut)),
        teams(room_out >= kTeams * kStorers ? kTeams : 1),
        storers(teams == 1 ? 1 : kStorers),
        places_out(room_out / (teams * storers) * (teams * storers)),
        places_in(min(kTokensInBytes / part_bytes, kMostTokensIn) / teams * teams),
        early(places_in) {}
  __device__ std::uint32_t elements(const Common& k, std::uint32_t part) const { return min(k.payload_bytes - part * kOfPart, kOfPart); }
  __device__ std::uint32_t bytes(const Common& k, std::uint32_t part) const { return elements(k, part) * kElementBytes<Mode>; }

  const std::uint32_t parts;  // a token's parts
  const std::uint32_t of_quantiser;  // elements of a part, of each of the team
  const std::uint32_t part_bytes, row_bytes, pitch;  // the most that a place has; places of rows begin at lines
  const std::uint32_t room_out;
  const std::uint32_t teams, storers;  // that there is room for
  // Each place has the same team, and the same storer, in every turn: a warp that has not seen one turn would take it for the next one.
  const std::uint32_t places_out, places_in;
  const std::uint32_t early;  // places that are free while chunks are counted
};
// Rows are tokens as they are, and stay where they came to.
template <>
struct SendShape<AsIs> {
  static constexpr std::uint32_t storers = kStorers;

  __device__ explicit SendShape(const Common& k)
      : parts((k.payload_bytes + kPartInBytes - 1) / kPartInBytes),
        part_bytes(min(k.payload_bytes, kPartInBytes)),
        places_in(min(kRingBytes / part_bytes, kMostTokensIn) / storers * storers),
        early(min(kTokensInBytes / part_bytes, places_in)),
        pitch(part_bytes),
        places_out(places_in) {}
  __device__ std::uint32_t bytes(const Common& k, std::uint32_t part) const { return min(k.payload_bytes - part * part_bytes, part_bytes); }

  const std::uint32_t parts, part_bytes, places_in, early, pitch, places_out;
};
static_assert(kTokensIn >= kTeams && kMostTokensIn >= kTeams && kRowsOut >= kTeams * kStorers && kRingBytes >= kStorers * kPartInBytes);
// While a row leaves, another is made.
constexpr bool can_deal_sends(const Config& c) { return kRowsOutBytes / align_up(dispatch_block(c).scales_at + 16 * ceil_div(c.hidden, 512), kLine) >= 2; }

// Initialises the rings, by one warp, before the first `__syncthreads`.
template <typename Mode>
__device__ inline void init_rings(const Common& k, SendRings& s) {
  const std::uint32_t lane = threadIdx.x % 32;
  const SendShape<Mode> shape(k);
  if (lane < kMostTokensIn) {
    mbarrier_init(s.loaded + lane, 1);
    mbarrier_init(s.used + lane, kQuantises<Mode> ? kOfTeam : 1);
  }
  if (kQuantises<Mode> && lane < kMostRowsOut) {
    mbarrier_init(s.quantised + lane, kOfTeam * shape.parts);
    mbarrier_init(s.stored + lane, 1);
  }
  if (lane < kBatches) {
    mbarrier_init(s.dealt + lane, 1);
    mbarrier_init(s.there + lane, shape.storers);
    mbarrier_init(s.told + lane, 1);
  }
  fence_mbarriers();
  if (lane != 0) return;
  s.kept.known.init();
  s.kept.rows = s.kept.next = 0;
  s.parts = kNone;
  s.next_told = 0;
}

// ---- the loader ----

template <typename Mode>
class TokenLoader {
 public:
  __device__ TokenLoader(const DispatchArguments& a, LargePlan& plan, SendRings& rings, char* in)
      : a_(a), plan_(plan), rings_(rings), in_(in), shape_(a.common), place_(shape_.places_in) {}

  // Asks for the tokens of the first chunk that find room, before anything is planned.
  __device__ void ask_early() {
    begin_chunk();
    while (asked_ < shape_.early && token_ < tokens_) ask();
  }
  // Drains prefetches after a refused step, in place of load().
  __device__ void drop() {
    for (std::uint32_t i = 0; i < asked_; ++i) await_turn(rings_.loaded + i, 0);
  }
  __device__ void load() {
    if (chunk_ == 0) begin_chunk();
    for (; tokens_ != 0; begin_chunk())
      while (token_ < tokens_) ask();
    if constexpr (kQuantises<Mode>) {
      if (threadIdx.x % 32 == 0) rings_.parts = asked_;
      for (std::uint32_t team = 0; team < shape_.teams; ++team) {
        place_.await_free(a_.common, Span::AwaitingPlaceIn, rings_.used);
        if (threadIdx.x % 32 == 0) mbarrier_arrive(rings_.loaded + place_.at);
        place_.next();
      }
    }
  }

 private:
  __device__ void begin_chunk() {
    const std::uint32_t turn = chunk_ % 2;
    await_turn(a_.common, Span::AwaitingPlan, plan_.known + turn, chunk_ / 2);
    first_ = plan_.bounds[turn].first;
    tokens_ = plan_.bounds[turn].tokens;
    token_ = 0;
    ++chunk_;
    __syncwarp();
    if (tokens_ != 0 && threadIdx.x % 32 == 0) mbarrier_arrive(plan_.used + turn);
  }
  // Asks for the next part.
  __device__ void ask() {
    place_.await_free(a_.common, Span::AwaitingPlaceIn, rings_.used);
    if (threadIdx.x % 32 == 0) {
      std::uint64_t* const turns = rings_.loaded + place_.at;
      const std::uint32_t bytes = shape_.bytes(a_.common, part_);
      mbarrier_expect(turns, bytes);
      const std::uint64_t token = first_ + token_;
      bulk_load(in_ + place_.at * shape_.part_bytes, a_.x + token * a_.x_stride + part_ * shape_.part_bytes, bytes, turns);
    }
    ++asked_;
    place_.next();
    if (++part_ < shape_.parts) return;
    part_ = 0;
    ++token_;
  }

  const DispatchArguments& a_;
  LargePlan& plan_;
  SendRings& rings_;
  char* const in_;
  const SendShape<Mode> shape_;
  Ring place_;
  std::uint32_t chunk_ = 0, first_ = 0, tokens_ = 0;  // chunks so far; tokens of the last one
  std::uint32_t token_ = 0, part_ = 0, asked_ = 0;  // the next one; all parts
};

// ---- quantisers ----

// A quantiser: those of a team have neighbouring numbers.
template <typename Mode>
__device__ inline void quantise_tokens(const Common& k, SendRings& rings, const char* in, char* out, std::uint32_t number) {
  using Shape = SendShape<Mode>;
  const SpanTimer all(k, Span::Sending);
  const Shape shape(k);
  const std::uint32_t team = number / kOfTeam;
  if (team >= shape.teams) return;
  Ring from(shape.places_in), to(shape.places_out);
  std::uint32_t part = 0;
  const auto go_on = [&](std::uint32_t parts) {
    for (std::uint32_t i = 0; i < parts; ++i) {
      from.next();
      if (++part < shape.parts) continue;
      part = 0;
      to.next();
    }
  };
  go_on(team);
  for (std::uint32_t n = team;; n += shape.teams) {
    await_turn(k, Span::AwaitingTile, rings.loaded + from.at, from.turn);
    if (n >= rings.parts) return;
    to.await_free(k, Span::AwaitingPlaceOut, rings.stored);
    const std::uint32_t elements = shape.elements(k, part), first = number % kOfTeam * shape.of_quantiser;
    if (first < elements) {
      const SpanTimer quantises(k, Span::Quantising);
      const std::uint32_t at = part * Shape::kOfPart + first;
      const char* const tile = in + from.at * shape.part_bytes + first * kElementBytes<Mode>;
      char *const row = out + to.at * shape.pitch, *const scales = row + k.dispatch.scales_at + at / 512 * 16;
      Shape::Quantiser::quantise(k, tile, min(elements - first, shape.of_quantiser), row + at, scales,
                                 [&] { mbarrier_arrive_of_warp(rings.used + from.at); });
    } else {
      mbarrier_arrive_of_warp(rings.used + from.at);
    }
    fence_shared_copies();
    mbarrier_arrive_of_warp(rings.quantised + to.at);
    go_on(shape.teams);
  }
}

}  // namespace pplx::cuda
