// The dealer of a dispatch of many tokens (large/load.cuh): the warp that knows where rows go, and writes their routes.
#pragma once

#include "../plan/token_plan.cuh"
#include "../plan/output_rows.cuh"
#include "load.cuh"

namespace pplx::cuda {

// kHooks, kRounds: this rank's own rows go the way of all others, since the receiver counts them.
template <bool kHooks, bool kRounds>
class TokenDealer {
 public:
  __device__ TokenDealer(const DispatchArguments& a, LargePlan& plan, ReceiveShared& receive, const Experts& experts, char* const* rows_at,
                       SendRings& rings)
      : a_(a), k_(a.common), plan_(plan), receive_(receive), experts_(experts), rows_at_(rows_at), rings_(rings) {
    together_ = min(32u >> k_.group_shift, kTokensTogether);
    if (k_.living == 1) return;
    while (together_ > 1 && 2 * together_ > a.under_way) together_ /= 2;
    under_way_ = min(a.under_way / together_, kBatches);
  }

  __device__ void deal() {
    const SpanTimer all(k_, Span::Sending);
    for (std::uint32_t n = 0;; ++n) {
      const std::uint32_t turn = n % 2;
      await_turn(k_, Span::AwaitingPlan, plan_.planned + turn, n / 2);
      const auto [first, tokens] = plan_.bounds[turn];
      if (tokens == 0) break;
      if constexpr (kRounds) {
        begin_round(first / a_.pieces.tokens);
        rows_of_chunk_ = rows_at_ + turn * kMaxPeers;
      }
      for (std::uint32_t at = 0; at < tokens; at += together_) deal_tokens(plan_.chunks[turn], first, at, min(together_, tokens - at));
      mbarrier_arrive_of_warp(plan_.used + turn);
    }
    if (!kRounds && !places_known_) end_kept();
    tell_storers(0, 0, {}, kNone);
  }

 private:
  // A lane's choice of a token.
  struct Choice {
    PlannedToken<true> of;
    std::uint32_t entry = kNone;  // token_rows, as in PlanView
    char* row = nullptr;  // that the entry says, if it goes to a slot
  };

  __device__ std::uint32_t lane() const { return threadIdx.x % 32; }
  __device__ std::uint32_t choice() const { return lane() & ((1u << k_.group_shift) - 1); }
  __device__ std::uint32_t nth() const { return lane() >> k_.group_shift; }
  // All of this lane's token, in the lowest bits.
  __device__ std::uint32_t of_token(std::uint32_t lanes) const { return lanes >> (nth() << k_.group_shift) & (~0u >> (32 - (1u << k_.group_shift))); }

  // Waits for room at all peers.
  __device__ void begin_round(std::uint32_t round) {
    if (round == round_) return;
    round_ = round;
    const SpanTimer waits(k_, Span::AwaitingPlan);
    bool good = has_room_;
    for (std::uint32_t i = lane(); has_room_ && i < k_.living; i += 32)
      good = await_room(k_, a_.pieces, Phase::DispatchSend, plan_.step, Op::Dispatch, k_.order[i], round) && good;
    has_room_ = all_of_warp(good);
  }

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
    const bool is_own = !kHooks && !kRounds && a_.recv && c.entry != kNone && c.entry >> 20 == k_.c.rank;
    const std::uint32_t owners = __ballot_sync(~0u, is_own);
    const bool placed = owners != 0 && places_own(is_own, owners, c.entry);
    const bool in_slot = c.entry != kNone && (!kRounds || has_room_) && !(is_own && placed);
    if (in_slot) c.row = (kRounds ? rows_of_chunk_ : rows_at_)[c.entry >> 20] + std::uint64_t{c.entry & 0xfffffu} * k_.dispatch.row_bytes;
    SentRow sent;
    sent.row = c.row;
    ArrivedRow mine;
    const bool has_own = placed && find_own(c, own, of_token(owners), mine);
    if (has_own && mine.out_row != kNone && (k_.c.layout == LayoutKind::Compact ? choice() == 0 : (mine.choices >> choice() & 1) != 0)) {
      sent.place = a_.out.x + std::uint64_t{mine.out_row} * k_.payload_bytes;
      if (quantised(k_.c.wire)) sent.scales = scale_place(a_, mine.out_row, mine.expert);
    }
    write_routes(c, own, there);
    tell_storers(first + at, tokens, sent, in_slot ? c.entry : kNone);
    if (!kRounds && a_.ids != nullptr && there)
      keep_choice(a_, std::uint64_t{own} * k_.c.top_k + choice(), c.of.id, c.of.index, c.entry, c.of.weight);
    if (has_own) place_words(a_, mine, choice());
  }

  // True if places of own rows are known. If not, those are kept for later.
  __device__ bool places_own(bool is_own, std::uint32_t owners, std::uint32_t entry) {
    if (places_known_) return true;
    const std::uint32_t n = __popc(owners);
    if (kept_ + n > kMostKeptRows) {
      const SpanTimer waits(k_, Span::AwaitingPlacesOfOwn);
      receive_.rows_known.wait();
      await_places(k_, receive_);
      places_known_ = true;
    } else {
      places_known_ = __all_sync(~0u, receive_.rows_known.is_set() && (k_.c.layout == LayoutKind::Compact || receive_.placed.is_set()));
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
    rings_.kept.known.set();
  }

  // This lane's choice of its token's own row, if there is one. owners: the token's lane that has its number.
  __device__ bool find_own(const Choice& c, std::uint32_t own, std::uint32_t owners, ArrivedRow& r) const {
    const std::uint32_t owner = owners == 0 ? 0 : __ffs(static_cast<int>(owners)) - 1;
    const std::uint32_t number = __shfl_sync(~0u, c.entry, static_cast<int>((nth() << k_.group_shift) + owner));
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
    const SpanTimer routes(k_, Span::WritingRoutes);
    for (std::uint32_t i = 0; __any_sync(~0u, c.entry != kNone && choice() >= i); ++i) {
      const int of = static_cast<int>((nth() << k_.group_shift) + i);
      char* const row = of_lane(c.row, of);
      const std::uint32_t rank = __shfl_sync(~0u, c.entry, of) >> 20;
      if (!there || row == nullptr) continue;
      char* const to = row + k_.dispatch.route_at + 16 * choice();
      fuzz_delay(k_, std::uint64_t{own} << 32 | i);
      if (kHooks && is_relayed(k_, rank)) {
        const std::uint32_t its_rank = c.of.id >= 0 && a_.relays.rep[c.of.rank] == rank ? c.of.rank : kNone;
        store_vec16(to, make_uint4(place_at(c, its_rank), __float_as_uint(c.of.weight), own, its_rank));
      } else {
        store_tagged(k_, to, plan_.step, place_at(c, rank), __float_as_uint(c.of.weight), own);
      }
    }
  }

  // The place of this lane's choice at a rank.
  __device__ std::uint32_t place_at(const Choice& c, std::uint32_t rank) const {
    if (c.of.rank != rank || rank == kNone) return kNowhere;
    return route_place(static_cast<std::uint32_t>(c.of.id) - first_expert_of(k_, rank), c.of.index);
  }

  // entry: of this lane's row that goes to a slot.
  __device__ void tell_storers(std::uint32_t first, std::uint32_t tokens, const SentRow& sent, std::uint32_t entry) {
    const bool is_far = kHooks && entry != kNone && is_remote(k_, entry >> 20);
    const std::uint32_t words = kHooks ? __ballot_sync(~0u, entry != kNone && !is_far) : 0;
    const std::uint32_t oldest = dealt_ - under_way_;
    if (dealt_ >= under_way_) await_turn(k_, Span::AwaitingPlaceOut, rings_.told + oldest % kBatches, oldest / kBatches);
    const std::uint32_t at = dealt_++ % kBatches;
    Batch& batch = rings_.batches[at];
    batch.rows[lane()] = sent;
    if constexpr (kHooks && !kRounds) batch.far[lane()] = is_far ? entry : kNone;
    if (lane() == 0) {
      batch.first = first;
      batch.tokens = tokens;
      if constexpr (kHooks) batch.words = words;
      if constexpr (kRounds) batch.sent = has_room_;
    }
    mbarrier_arrive_of_warp(rings_.dealt + at);
  }

  const DispatchArguments& a_;
  const Common& k_;
  LargePlan& plan_;
  ReceiveShared& receive_;
  const Experts& experts_;
  char* const* const rows_at_;  // where this rank's rows begin at each peer; in rounds those of two chunks
  char* const* rows_of_chunk_ = nullptr;
  SendRings& rings_;
  std::uint32_t together_ = 1;  // tokens
  std::uint32_t dealt_ = 0, under_way_ = kBatches;  // batches; `under_way_`: the most that peers have not been told of
  std::uint32_t kept_ = 0;  // own rows
  bool places_known_ = false;
  std::uint32_t round_ = 0;
  bool has_room_ = true;  // there is room for that round; else something failed
};

}  // namespace pplx::cuda
