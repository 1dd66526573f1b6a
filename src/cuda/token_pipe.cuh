// How a dispatch of many tokens that quantises sends, inside a node: warps with roles, and rings in shared memory between them. The loader asks
// for tokens far ahead, by bulk copies; quantisers make rows of them, a team each of them together; the dealer looks tokens up, some at a time,
// a choice in each lane, and says where their rows go; storers take them there, by ordinary stores of all lanes, which wait for nothing; the
// teller raises the arrival words of all that has been stored, behind one fence. So the fence, the looking up and the way of tokens through
// memory stand behind nobody else's work, and the first rows are there before anything is planned. Where this launch receives, too, rows of
// this rank go to their places at once, as soon as these are known; before, they go the way of all others.
//
// None of them waits for a peer, but the dealer where it may keep no more own rows: for the counts, which wait for no row.
#pragma once

#include "carried_rows.cuh"
#include "dispatch_send.cuh"
#include "many_plan.cuh"
#include "payload.cuh"
#include "quantise.cuh"
#include "rows.cuh"

namespace pplx::cuda {

inline constexpr std::uint32_t kMostTokensIn = 12, kMostRowsOut = 12;
inline constexpr std::uint32_t kPartInBytes = kOfTeam * kQuantiserBytes, kTokensInBytes = kTokensIn * kPartInBytes;
inline constexpr std::uint32_t kRowOutBytes = 7424, kRowsOutBytes = kRowsOut * kRowOutBytes;  // 7168 codes and their scales
inline constexpr std::uint32_t kRingBytes = kTokensInBytes + kRowsOutBytes;

// Where a lane's part of a token goes.
struct SentRow {
  char* row = nullptr;  // at the peer, scales and all
  char *place = nullptr, *scales = nullptr;  // of the output, for a copy of this rank's own row
};

// What was dealt together: the lanes of a token are as many as a power of two.
struct Batch {
  std::uint32_t first, tokens;  // of this rank's; no tokens: there are no more
  SentRow rows[32];
};

struct SendRings {
  std::uint64_t loaded[kMostTokensIn], used[kMostTokensIn];  // turns: by the loader; by the team, or a storer
  std::uint64_t quantised[kMostRowsOut], stored[kMostRowsOut];  // by teams; by a storer
  std::uint64_t dealt[kBatches], there[kBatches], told[kBatches];  // by the dealer, all storers, the teller
  std::uint32_t parts;  // of tokens; known when there are no more
  KeptRows kept;
  Batch batches[kBatches];
};

// A place of a ring, which each warp goes through by itself.
class SendPlace {
 public:
  __device__ explicit SendPlace(std::uint32_t places) : places_(places) {}
  __device__ void next() {
    if (++at != places_) return;
    at = 0;
    ++turn;
  }
  // For who fills it: until it is free.
  __device__ void await_free(std::uint64_t* turns) const {
    if (turn != 0) await_turn(turns + at, turn - 1);
  }

  std::uint32_t at = 0, turn = 0;

 private:
  const std::uint32_t places_;
};

// How tokens of this launch are cut: into parts, which quantisers take to rows, or storers to where they go.
template <typename Mode>
struct SendShape {
  using Quantiser = TileQuantiser<kElementBytes<Mode>, kQuantiserBytes>;
  static constexpr bool kQuantises = true;
  static constexpr std::uint32_t kPass = Quantiser::kPassElements, kOfPart = kOfTeam * Quantiser::kPasses * kPass;  // elements

  __device__ explicit SendShape(const Common& k)
      : parts((k.c.hidden + kOfPart - 1) / kOfPart),
        of_quantiser((min(k.c.hidden, kOfPart) + kOfTeam * kPass - 1) / (kOfTeam * kPass) * kPass),
        part_bytes(min(k.c.hidden, kOfPart) * kElementBytes<Mode>),
        row_bytes(k.dispatch.scales_at + 16 * k.scale_pieces),
        room_out(min(kRowsOutBytes / row_bytes, kMostRowsOut)),
        teams(room_out >= kTeams * kStorers ? kTeams : 1),
        storers(teams == 1 ? 1 : kStorers),
        places_out(room_out / (teams * storers) * (teams * storers)),
        places_in(min(kTokensInBytes / part_bytes, kMostTokensIn) / teams * teams),
        early(places_in) {}
  __device__ std::uint32_t elements(const Common& k, std::uint32_t part) const { return min(k.c.hidden - part * kOfPart, kOfPart); }
  __device__ std::uint32_t bytes(const Common& k, std::uint32_t part) const { return elements(k, part) * kElementBytes<Mode>; }

  const std::uint32_t parts;  // of a token
  const std::uint32_t of_quantiser;  // elements of a part, of each of the team
  const std::uint32_t part_bytes, row_bytes;  // the most that a place has
  const std::uint32_t room_out;
  const std::uint32_t teams, storers;  // that there is room for
  // Each of a ring's places has the same team, and the same storer, in every turn: who has not seen one turn of a place would take it for the
  // next one.
  const std::uint32_t places_out, places_in;
  const std::uint32_t early;  // places that are free while chunks are counted
};
// Rows are tokens as they are, and stay where they came to.
template <>
struct SendShape<AsIs> {
  static constexpr bool kQuantises = false;
  static constexpr std::uint32_t storers = kStorers;

  __device__ explicit SendShape(const Common& k)
      : parts((k.payload_bytes + kPartInBytes - 1) / kPartInBytes),
        part_bytes(min(k.payload_bytes, kPartInBytes)),
        places_in(min(kRingBytes / part_bytes, kMostTokensIn) / storers * storers),
        early(min(kTokensInBytes / part_bytes, places_in)) {}
  __device__ std::uint32_t bytes(const Common& k, std::uint32_t part) const { return min(k.payload_bytes - part * part_bytes, part_bytes); }

  const std::uint32_t parts, part_bytes, places_in, early;
};
static_assert(kTokensIn >= kTeams && kMostTokensIn >= kTeams && kRowsOut >= kTeams * kStorers && kRingBytes >= kStorers * kPartInBytes);
// While a row leaves, another is made.
constexpr bool can_deal_sends(const Config& c) { return kRowsOutBytes / (dispatch_block(c).scales_at + 16 * ceil_div(c.hidden, 512)) >= 2; }

// By one warp, before the block meets for the first time.
template <typename Mode>
__device__ inline void init_rings(const Common& k, SendRings& s) {
  const std::uint32_t lane = threadIdx.x % 32;
  const SendShape<Mode> shape(k);
  if (lane < kMostTokensIn) {
    turns_init(s.loaded + lane, 1);
    turns_init(s.used + lane, shape.kQuantises ? kOfTeam : 1);
  }
  if (shape.kQuantises && lane < kMostRowsOut) {
    turns_init(s.quantised + lane, kOfTeam * shape.parts);
    turns_init(s.stored + lane, 1);
  }
  if (lane < kBatches) {
    turns_init(s.dealt + lane, 1);
    turns_init(s.there + lane, shape.storers);
    turns_init(s.told + lane, 1);
  }
  if (lane != 0) return;
  s.kept.known.close();
  s.kept.rows = s.kept.next = 0;
  s.parts = kNone;
}

// ---- the loader ----

template <typename Mode>
class TokenLoader {
 public:
  __device__ TokenLoader(const DispatchArguments& a, ManyPlan& plan, SendRings& rings, char* in)
      : a_(a), plan_(plan), rings_(rings), in_(in), shape_(a.common), place_(shape_.places_in) {}

  // What finds room of the first chunk, before anything is planned.
  __device__ void ask_early() {
    begin_chunk();
    while (asked_ < shape_.early && token_ < tokens_) ask();
  }
  // In place of load(): nobody wants what was asked for.
  __device__ void drop() {
    for (std::uint32_t i = 0; i < asked_; ++i) await_turn(rings_.loaded + i, 0);
  }
  __device__ void load() {
    if (chunk_ == 0) begin_chunk();
    for (; tokens_ != 0; begin_chunk())
      while (token_ < tokens_) ask();
    if constexpr (SendShape<Mode>::kQuantises) {
      if (threadIdx.x % 32 == 0) rings_.parts = asked_;
      for (std::uint32_t team = 0; team < shape_.teams; ++team) {
        place_.await_free(rings_.used);
        if (threadIdx.x % 32 == 0) turns_arrive(rings_.loaded + place_.at);
        place_.next();
      }
    }
  }

 private:
  __device__ void begin_chunk() {
    const std::uint32_t turn = chunk_ % 2;
    {
      const Spends waits(a_.common, Span::AwaitingPlan);
      await_turn(plan_.known + turn, chunk_ / 2);
    }
    first_ = plan_.bounds[turn].first;
    tokens_ = plan_.bounds[turn].tokens;
    token_ = 0;
    ++chunk_;
    __syncwarp();
    if (tokens_ != 0 && threadIdx.x % 32 == 0) turns_arrive(plan_.used + turn);
  }
  // For the next part.
  __device__ void ask() {
    {
      const Spends waits(a_.common, Span::AwaitingPlaceIn);
      place_.await_free(rings_.used);
    }
    if (threadIdx.x % 32 == 0) {
      std::uint64_t* const turns = rings_.loaded + place_.at;
      const std::uint32_t bytes = shape_.bytes(a_.common, part_);
      turns_expect(turns, bytes);
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
  ManyPlan& plan_;
  SendRings& rings_;
  char* const in_;
  const SendShape<Mode> shape_;
  SendPlace place_;
  std::uint32_t chunk_ = 0, first_ = 0, tokens_ = 0;  // chunks so far; tokens of the last one
  std::uint32_t token_ = 0, part_ = 0, asked_ = 0;  // the next one; all parts
};

// ---- quantisers ----

// By one of the block's: those of a team have neighbouring numbers.
template <typename Mode>
__device__ inline void quantise_tokens(const Common& k, SendRings& rings, const char* in, char* out, std::uint32_t number) {
  using Shape = SendShape<Mode>;
  const Spends all(k, Span::Sending);
  const Shape shape(k);
  const std::uint32_t team = number / kOfTeam;
  if (team >= shape.teams) return;
  SendPlace from(shape.places_in), to(shape.places_out);
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
    {
      const Spends waits(k, Span::AwaitingTile);
      await_turn(rings.loaded + from.at, from.turn);
    }
    if (n >= rings.parts) return;
    {
      const Spends waits(k, Span::AwaitingPlaceOut);
      to.await_free(rings.stored);
    }
    const std::uint32_t elements = shape.elements(k, part), first = number % kOfTeam * shape.of_quantiser;
    const auto arrive = [](std::uint64_t* turns) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) turns_arrive(turns);
    };
    if (first < elements) {
      const Spends quantises(k, Span::Quantising);
      const std::uint32_t at = part * Shape::kOfPart + first;
      char* const row = out + to.at * shape.row_bytes;
      Shape::Quantiser::quantise(k, in + from.at * shape.part_bytes + first * kElementBytes<Mode>, min(elements - first, shape.of_quantiser), row + at,
                                 row + k.dispatch.scales_at + at / 512 * 16, [&] { arrive(rings.used + from.at); });
    } else {
      arrive(rings.used + from.at);
    }
    arrive(rings.quantised + to.at);
    go_on(shape.teams);
  }
}

// ---- the dealer ----

// kHooks: this rank's own rows go the way of all others, since who receives counts them.
template <bool kHooks>
class TokenDealer {
 public:
  __device__ TokenDealer(const DispatchArguments& a, ManyPlan& plan, ReceiveShared& receive, const Experts& experts, char* const* rows_at,
                       SendRings& rings)
      : a_(a), k_(a.common), plan_(plan), receive_(receive), experts_(experts), rows_at_(rows_at), rings_(rings) {
    while (1u << shift_ < k_.c.top_k) ++shift_;
    together_ = min(32u >> shift_, kDealtTogether);
  }

  __device__ void deal() {
    const Spends all(k_, Span::Sending);
    for (std::uint32_t n = 0;; ++n) {
      const std::uint32_t turn = n % 2;
      {
        const Spends waits(k_, Span::AwaitingPlan);
        await_turn(plan_.planned + turn, n / 2);
      }
      const auto [first, tokens] = plan_.bounds[turn];
      if (tokens == 0) break;
      for (std::uint32_t at = 0; at < tokens; at += together_) deal_tokens(plan_.chunks[turn], first, at, min(together_, tokens - at));
      __syncwarp();
      if (lane() == 0) turns_arrive(plan_.used + turn);
    }
    if (!places_known_) end_kept();
    tell_storers(0, 0, {});
  }

 private:
  // A lane's choice of a token.
  struct Choice {
    PlannedToken<true> of;
    std::uint32_t entry = kNone;  // token_rows, as in PlanView
    char* row = nullptr;  // that the entry says, if it goes to a slot
  };

  __device__ std::uint32_t lane() const { return threadIdx.x % 32; }
  __device__ std::uint32_t choice() const { return lane() & ((1u << shift_) - 1); }
  __device__ std::uint32_t nth() const { return lane() >> shift_; }
  // All of this lane's token, in the lowest bits.
  __device__ std::uint32_t of_token(std::uint32_t lanes) const { return lanes >> (nth() << shift_) & (~0u >> (32 - (1u << shift_))); }

  // Tokens [at, at + tokens) of the chunk that begins with token `first` of this rank's.
  __device__ void deal_tokens(const PlannedChunk& chunk, std::uint32_t first, std::uint32_t at, std::uint32_t tokens) {
    const std::uint32_t own = first + at + nth();
    const bool there = nth() < tokens && choice() < k_.c.top_k;
    Choice c;
    if (there) {
      const std::uint32_t i = (at + nth()) * k_.c.top_k + choice();
      c.of.id = chunk.id[i];
      c.of.index = chunk.index[i];
      c.of.weight = chunk.weight[i];
      c.entry = chunk.row[i];
    }
    c.of.rank = c.of.id < 0 ? kNone : k_.per_rank.divide(static_cast<std::uint32_t>(c.of.id));
    const bool is_own = !kHooks && a_.recv && c.entry != kNone && c.entry >> 20 == k_.c.rank;
    const std::uint32_t owners = __ballot_sync(~0u, is_own);
    const bool placed = owners != 0 && places_own(is_own, owners, c.entry);
    if (c.entry != kNone && !(is_own && placed)) c.row = rows_at_[c.entry >> 20] + std::uint64_t{c.entry & 0xfffffu} * k_.dispatch.row_bytes;
    SentRow sent;
    sent.row = c.row;
    ArrivedRow mine;
    const bool has_own = placed && find_own(c, own, of_token(owners), mine);
    if (has_own && mine.place != kNone && (k_.c.layout == LayoutKind::Compact ? choice() == 0 : (mine.choices >> choice() & 1) != 0)) {
      sent.place = a_.out.x + std::uint64_t{mine.place} * k_.payload_bytes;
      if (quantised(k_.c.wire)) sent.scales = scale_place(a_, mine.place, mine.expert);
    }
    write_routes(c, own, there);
    tell_storers(first + at, tokens, sent);
    if (a_.ids != nullptr && there) keep(c, own);
    if (has_own) place_words(a_, mine, choice());
  }

  // Whether places of own rows are known. If not, those are kept for later.
  __device__ bool places_own(bool is_own, std::uint32_t owners, std::uint32_t entry) {
    if (places_known_) return true;
    const std::uint32_t n = __popc(owners);
    if (kept_ + n > kMostKeptRows) {
      const Spends waits(k_, Span::AwaitingPlacesOfOwn);
      receive_.rows_known.wait();
      await_places(k_, receive_);
      places_known_ = true;
    } else {
      places_known_ = __all_sync(~0u, receive_.rows_known.is_open() && (k_.c.layout == LayoutKind::Compact || receive_.placed.is_open()));
    }
    if (places_known_) {
      end_kept();
      return true;
    }
    if (is_own) rings_.kept.row[kept_ + __popc(owners & ((1u << lane()) - 1))] = entry & 0xfffffu;
    kept_ += n;
    return false;
  }
  __device__ void end_kept() {
    if (lane() == 0) rings_.kept.rows = kept_;
    rings_.kept.known.open();
  }

  // This lane's choice of its token's own row, if there is one. owners: the token's lane that has its number.
  __device__ bool find_own(const Choice& c, std::uint32_t own, std::uint32_t owners, ArrivedRow& r) const {
    const std::uint32_t owner = owners == 0 ? 0 : __ffs(static_cast<int>(owners)) - 1;
    const std::uint32_t number = __shfl_sync(~0u, c.entry, static_cast<int>((nth() << shift_) + owner));
    if (!receive_.good || !await_places(k_, receive_)) return false;
    const bool here = owners != 0 && c.of.id >= 0 && c.of.rank == k_.c.rank;
    r.source = k_.c.rank;
    r.at = receive_.rows_begin[k_.c.rank] + (number & 0xfffffu);
    r.token = own;
    r.weight = c.of.weight;
    r.choices = of_token(__ballot_sync(~0u, here));
    const std::uint32_t place = here ? route_place(static_cast<std::uint32_t>(c.of.id) - first_expert_of(k_, k_.c.rank), c.of.index) : kNowhere;
    const bool good = owners == 0 || find_place(a_, here, place, experts_, r);
    if (!good) fail(k_, {AbortReason::Protocol, Phase::DispatchRecv, k_.c.rank, r.source, plan_.step}, r.at, r.choices);
    return all_of_warp(good) && owners != 0;
  }

  __device__ void write_routes(const Choice& c, std::uint32_t own, bool there) const {
    const Spends routes(k_, Span::WritingRoutes);
    for (std::uint32_t i = 0; __any_sync(~0u, c.entry != kNone && choice() >= i); ++i) {
      const int of = static_cast<int>((nth() << shift_) + i);
      char* const row = of_lane(c.row, of);
      const std::uint32_t rank = __shfl_sync(~0u, c.entry, of) >> 20;
      if (!there || row == nullptr) continue;
      const std::uint32_t expert = static_cast<std::uint32_t>(c.of.id) - first_expert_of(k_, rank);
      linger(k_, std::uint64_t{own} << 32 | i);
      store_tagged(k_, row + k_.dispatch.route_at + 16 * choice(), plan_.step, c.of.rank == rank ? route_place(expert, c.of.index) : kNowhere,
                   __float_as_uint(c.of.weight), own);
    }
  }

  // What further dispatches, and this one's combine, need to know.
  __device__ void keep(const Choice& c, std::uint32_t own) const {
    const std::uint64_t at = std::uint64_t{own} * k_.c.top_k + choice();
    a_.plan.ids[at] = c.of.id;
    a_.plan.index[at] = c.of.index;
    a_.plan.token_rows[at] = c.entry;
    if (a_.weights != nullptr) a_.plan.weights[at] = c.of.weight;
  }

  __device__ void tell_storers(std::uint32_t first, std::uint32_t tokens, const SentRow& sent) {
    Batch& batch = rings_.batches[place_.at];
    {
      const Spends waits(k_, Span::AwaitingPlaceOut);
      place_.await_free(rings_.told);
    }
    batch.rows[lane()] = sent;
    if (lane() == 0) {
      batch.first = first;
      batch.tokens = tokens;
    }
    __syncwarp();
    if (lane() == 0) turns_arrive(rings_.dealt + place_.at);
    place_.next();
  }

  const DispatchArguments& a_;
  const Common& k_;
  ManyPlan& plan_;
  ReceiveShared& receive_;
  const Experts& experts_;
  char* const* const rows_at_;  // where this rank's rows begin at each peer
  SendRings& rings_;
  SendPlace place_{kBatches};
  std::uint32_t shift_ = 0, together_ = 1;  // tokens
  std::uint32_t kept_ = 0;  // own rows
  bool places_known_ = false;
};

// ---- storers ----

// By one of the block's, each of which takes every other place of the ring that rows leave from: that of rows, or of parts of tokens as they are.
template <typename Mode>
class RowStorer {
  using Shape = SendShape<Mode>;

 public:
  // ring: of rows, or of tokens.
  __device__ RowStorer(const DispatchArguments& a, SendRings& rings, const char* ring, std::uint32_t number)
      : a_(a), k_(a.common), rings_(rings), ring_(ring), number_(number), shape_(k_), place_(places(shape_)) {
    while (1u << shift_ < k_.c.top_k) ++shift_;
  }

  __device__ void store() {
    const Spends all(k_, Span::Sending);
    if (number_ >= shape_.storers) return;
    for (SendPlace at(kBatches);; at.next()) {
      {
        const Spends waits(k_, Span::AwaitingPlan);
        await_turn(rings_.dealt + at.at, at.turn);
      }
      const Batch& batch = rings_.batches[at.at];
      const std::uint32_t tokens = batch.tokens;
      for (std::uint32_t i = 0; i < tokens; ++i)
        if constexpr (Shape::kQuantises)
          store_next(batch, i, 0, shape_.row_bytes);
        else
          for (std::uint32_t part = 0; part < shape_.parts; ++part) store_next(batch, i, part * shape_.part_bytes, shape_.bytes(k_, part));
      __syncwarp();
      if (threadIdx.x % 32 == 0) turns_arrive(rings_.there + at.at);
      if (tokens == 0) return;
    }
  }

 private:
  static constexpr std::uint32_t kVectors = 8;  // sixteen bytes each, of a lane: a row of 7168 codes and their scales goes twice as many

  __device__ static std::uint32_t places(const Shape& shape) {
    if constexpr (Shape::kQuantises)
      return shape.places_out;
    else
      return shape.places_in;
  }
  __device__ std::uint32_t place_bytes() const {
    if constexpr (Shape::kQuantises)
      return shape_.row_bytes;
    else
      return shape_.part_bytes;
  }
  __device__ std::uint64_t* filled() const { return (Shape::kQuantises ? rings_.quantised : rings_.loaded) + place_.at; }
  __device__ std::uint64_t* emptied() const { return (Shape::kQuantises ? rings_.stored : rings_.used) + place_.at; }

  // The next place, if it is this storer's: `bytes` of the batch's nth token's row, from `first` on.
  __device__ void store_next(const Batch& batch, std::uint32_t nth, std::uint32_t first, std::uint32_t bytes) {
    if (place_.at % shape_.storers == number_) store_place(batch, nth, first, bytes);
    place_.next();
  }

  __device__ void store_place(const Batch& batch, std::uint32_t nth, std::uint32_t first, std::uint32_t bytes) const {
    const std::uint32_t lane = threadIdx.x % 32;
    SentRow sent;
    if (lane >> shift_ == 0) sent = batch.rows[(nth << shift_) + lane];
    const std::uint32_t rows = __ballot_sync(~0u, sent.row != nullptr), copies = __ballot_sync(~0u, sent.place != nullptr);
    const char* const from = ring_ + place_.at * place_bytes();
    if constexpr (!Shape::kQuantises)
      if (a_.scales != nullptr && first == 0) store_given_scales(sent, rows, copies, batch.first + nth);
    {
      const Spends waits(k_, Span::AwaitingTile);
      await_turn(filled(), place_.turn);
    }
    linger(k_, place_.at);
    const Spends stores(k_, Span::StoringTiles);
    if (sent.row != nullptr) sent.row += first;
    if (sent.place != nullptr) sent.place += first;
#pragma unroll 1
    for (std::uint32_t begin = 0; begin < bytes; begin += kVectors * 512) {
      const std::uint32_t at = begin + 16 * lane;
      uint4 v[kVectors];
#pragma unroll
      for (std::uint32_t j = 0; j < kVectors; ++j)
        if (at + 512 * j < bytes) v[j] = *reinterpret_cast<const uint4*>(from + at + 512 * j);
      store_part(sent.row, rows, at, bytes, v);
      store_part(sent.place, copies, at, Shape::kQuantises ? k_.payload_bytes : bytes, v);
    }
    if constexpr (Shape::kQuantises)
      for (std::uint32_t nth_piece = lane; copies != 0 && nth_piece - lane < k_.scale_pieces; nth_piece += 32) {
        uint4 piece = make_uint4(0, 0, 0, 0);
        if (nth_piece < k_.scale_pieces) piece = *reinterpret_cast<const uint4*>(from + k_.dispatch.scales_at + 16 * nth_piece);
        place_scales(sent.scales, copies, piece, nth_piece);
      }
    __syncwarp();
    if (lane == 0) turns_arrive(emptied());
  }

  // To the place that each of `lanes` has, as far as there is room.
  __device__ static void store_part(char* mine, std::uint32_t lanes, std::uint32_t at, std::uint32_t room, const uint4 (&v)[kVectors]) {
#pragma unroll 1
    for (; lanes != 0; lanes &= lanes - 1) {
      char* const to = known_global(of_lane(mine, __ffs(static_cast<int>(lanes)) - 1)) + at;
#pragma unroll
      for (std::uint32_t j = 0; j < kVectors; ++j)
        if (at + 512 * j < room) store16(to + 512 * j, v[j]);
    }
  }

  // This lane's piece, the nth of a row's if there are as many, to each copy of the own row.
  __device__ void place_scales(char* mine, std::uint32_t copies, const uint4& piece, std::uint32_t nth) const {
#pragma unroll 1
    for (; copies != 0; copies &= copies - 1) place_scale(a_, of_lane(mine, __ffs(static_cast<int>(copies)) - 1), piece, nth);
  }

  // Those that the caller gave for a token.
  __device__ void store_given_scales(const SentRow& sent, std::uint32_t rows, std::uint32_t copies, std::uint32_t token) const {
#pragma unroll 1
    for (std::uint32_t begin = 0; begin < k_.scale_pieces; begin += 32) {
      const std::uint32_t at = begin + threadIdx.x % 32;
      const uint4 piece = given_piece_of_scales(a_, token, at);
#pragma unroll 1
      for (std::uint32_t bits = rows; bits != 0; bits &= bits - 1) {
        char* const to = known_global(of_lane(sent.row, __ffs(static_cast<int>(bits)) - 1)) + k_.dispatch.scales_at + 16 * at;
        if (at < k_.scale_pieces) store16(to, piece);
      }
      place_scales(sent.scales, copies, piece, at);
    }
  }

  const DispatchArguments& a_;
  const Common& k_;
  SendRings& rings_;
  const char* const ring_;
  const std::uint32_t number_;
  const Shape shape_;
  SendPlace place_;
  std::uint32_t shift_ = 0;
};

// ---- the teller ----

// One fence for all that is there: what other warps have stored, this one has seen them tell of.
__device__ inline void tell_of_rows(const Common& k, std::uint32_t step, SendRings& rings) {
  for (std::uint32_t told = 0;;) {
    const auto is_there = [&](std::uint32_t n) { return turn_is_over_now(rings.there + n % kBatches, n / kBatches & 1); };
    {
      const Spends waits(k, Span::AwaitingTile);
      await_turn(rings.there + told % kBatches, told / kBatches);
    }
    std::uint32_t end = told + 1;
    while (end - told < kBatches && __all_sync(~0u, is_there(end))) ++end;
    const Spends tells(k, Span::Telling);
    fence_system();
    for (; told != end; ++told) {
      const Batch& batch = rings.batches[told % kBatches];
      if (batch.tokens == 0) return;
      char* const row = batch.rows[threadIdx.x % 32].row;
      if (row != nullptr) {
        linger(k, std::uint64_t{step} << 32 | told);
        store_relaxed(row + k.dispatch.arrival_at, arrival_word(k.generation, step));
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) turns_arrive(rings.told + told % kBatches);
    }
    note(k, Stage::Published);
  }
}

}  // namespace pplx::cuda
