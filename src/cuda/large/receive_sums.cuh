// The receive half of a large combine. The dealer looks up several tokens at once, waits for their rows, and asks for row by row.
// The inputs of a token's part: first this rank's own rows, whose sum is rounded as a peer's is, then peers' rows, ranks ascending.
#pragma once

#include "../extras/nodes.cuh"
#include "adders.cuh"
#include "combine_kernel.cuh"

namespace pplx::cuda {

// Each team's dealer: one warp. kExtras: handles every combine; own rows come as peers' do.
template <bool kExtras>
class SumDealer : RowDealer {
 public:
  __device__ SumDealer(const CombineArguments& a, std::uint32_t step, CombineShared& s, DealtRows& ring, const RingMemory& memory)
      : RowDealer(a, step, s, ring, memory), end_(in_rounds() ? a.own : (a.own + gridDim.x - 1 - blockIdx.x) / gridDim.x),
        unread_last_(place_) {}

  // Until no token is left, or one fails.
  __device__ void deal() {
    const SpanTimer all(k_, Span::ReceivingSums);
    std::uint32_t first = take(), second = take();
    Looked next = look_up(first, load_entry(first));
    std::uint32_t later = load_entry(second);
    while (first < end_of(first)) {
      const Looked now = next;
      const std::uint32_t begin = first;
      first = second;
      second = take();
      next = look_up(first, later);
      later = load_entry(second);
      if (!deal_tokens(now, begin, min(together(), end_of(begin) - begin))) break;
    }
    if (in_rounds()) finish();
    tell(0, kNoMore);
  }

 private:
  // A lane's choice of a token.
  struct Looked {
    std::uint32_t entry = kNone;  // its row of a peer's block
    std::uint32_t places = 0;  // places of this rank's own row
    std::uint32_t place = kNone;  // one of them
    float weight = 1.0f;
  };

  __device__ bool in_rounds() const { return kExtras && k_.heap.in_pieces; }

  // Takes the next tokens that are looked up together, returns the first. In rounds blocks claim them in order, all of one round.
  __device__ std::uint32_t take() {
    if (!in_rounds()) return take_next(&s_.received, together());
    const std::uint32_t unit = claim(k_, a_.pieces, step_, Claim::CombineRecv), of_round = units_of(a_.pieces.tokens);
    return unit / of_round * a_.pieces.tokens + unit % of_round * together();
  }
  __device__ std::uint32_t units_of(std::uint32_t tokens) const { return (tokens + together() - 1) / together(); }
  // Returns where the tokens end that may be looked up with this one.
  __device__ std::uint32_t end_of(std::uint32_t first) const {
    return in_rounds() ? min(end_, (first / a_.pieces.tokens + 1) * a_.pieces.tokens) : end_;
  }
  __device__ std::uint32_t token(std::uint32_t nth) const { return in_rounds() ? nth : nth * gridDim.x + blockIdx.x; }

  __device__ std::uint32_t load_entry(std::uint32_t first) const {
    const std::uint32_t nth = first + (lane() >> k_.group_shift);
    if (choice() >= k_.c.top_k || nth >= end_of(first) || (kExtras && a_.release)) return kNone;
    return a_.plan.token_rows[std::uint64_t{token(nth)} * k_.c.top_k + choice()];
  }

  __device__ bool is_own(std::uint32_t entry) const {
    return !kExtras && a_.sums_own && entry != kNone && entry >> 20 == k_.c.rank;
  }

  __device__ Looked look_up(std::uint32_t first, std::uint32_t entry) const {
    Looked looked;
    looked.entry = entry;
    if constexpr (kExtras) {
      if (a_.by_node) entry = order_by_node(a_, entry);
      looked.entry = entry;
      if (!in_rounds() || entry == kNone) return looked;
      const std::uint32_t round = first / a_.pieces.tokens, rank = entry >> 20;
      looked.entry -= a_.pieces.begin_rows[round * k_.c.world + rank];
      if (!is_remote(k_, rank)) looked.entry += round % kPlaces * a_.pieces.tokens;
      return looked;
    }
    const bool compact = k_.c.layout == LayoutKind::Compact;
    const std::uint32_t own = __ballot_sync(~0u, is_own(entry)) & lanes_of(lane() >> k_.group_shift);
    const std::uint32_t number = __shfl_sync(~0u, entry, own == 0 ? 0 : __ffs(static_cast<int>(own)) - 1) & 0xfffffu;
    if (own == 0 || choice() >= (compact ? 1 : k_.c.top_k)) return looked;
    const std::uint32_t at = s_.rows_begin[k_.c.rank] + number;
    looked.places = compact ? 1 : a_.received.choices[at];
    looked.place = a_.received.out_row[compact ? at : std::uint64_t{at} * k_.c.top_k + choice()];
    if (!compact && a_.weighted) looked.weight = a_.received.weight[std::uint64_t{at} * k_.c.top_k + choice()];
    return looked;
  }

  // False: something failed.
  __device__ bool deal_tokens(Looked looked, std::uint32_t first, std::uint32_t tokens) {
    const std::uint32_t entry = looked.entry, rank = entry >> 20;
    const bool comes = entry != kNone && !is_own(entry);
    const std::uint32_t peers = __ballot_sync(~0u, comes), own = __ballot_sync(~0u, is_own(entry));
    const std::uint32_t number = entry & 0xfffffu;
    char* row = comes ? own_slot<!kExtras>(k_, set_of(k_.c, step_), Op::Combine, rank) + block_of(rank).row_at(number) : nullptr;
    if (in_rounds()) {
      if (!await_round_rows(row, rank, first / a_.pieces.tokens)) return false;
    } else {
      const SpanTimer waits(k_, Span::AwaitingSums);
      const bool there = !comes || (kExtras && is_remote(k_, rank)
                                        ? row_was_passed_on(k_, step_, Op::Combine, Phase::CombineRecv, rank, number)
                                        : wait<Match::Exact>(k_, row + k_.combine.arrival_at, Phase::CombineRecv, step_, rank));
      if (!all_of_warp(there)) return false;
    }
    mark_stage(k_, step_, Stage::Came);
    fence_copies();
    if (k_.c.layout != LayoutKind::Compact && choice() >= __popc(looked.places)) looked.place = kNone;
    looked.place = checked(looked.place);
    const std::uint32_t placed = __ballot_sync(~0u, looked.place != kNone);
    const std::uint32_t ends = kExtras && a_.by_node ? ends_of_nodes(a_, entry) : 0;
    const char* const own_row = expert_row(looked.place);
    const bool blank = number < k_.word_rows && !(kExtras && is_remote(k_, rank));  // a remote peer's rows do not show by themselves
    for (std::uint32_t i = 0; i < tokens && !(kExtras && a_.release); ++i) {
      const std::uint32_t lanes = lanes_of(i);
      if (kExtras && a_.has_tail) take_tail<false>(a_, step_, token(first + i), peers & lanes, row, rank);
      deal_token(token(first + i), placed & lanes, own & lanes, peers & lanes, own_row, looked.weight, row,
                 (blank ? kMakeBlank : 0) | (ends >> lane() & 1 ? kEndsNode : 0) | (has_codes(rank) ? kCodes : 0));
    }
    if (!in_rounds()) return true;
    finish();
    unread_ = first;
    unread_last_ = last_;
    return true;
  }

  // Waits until each lane's row of a round is here, if it has one. Counts all that was dealt before it blocks: peers wait for that.
  __device__ bool await_round_rows(char*& row, std::uint32_t rank, std::uint32_t round) {
    const SpanTimer waits(k_, Span::AwaitingSums);
    const bool remote = row != nullptr && is_remote(k_, rank);
    if (remote) row += k_.heap.piece_at(Op::Combine, round);
    const void* word = row + k_.combine.arrival_at;
    if (remote) word = remote_word(k_, a_.pieces, RemoteWord::Landed, step_, Op::Combine, rank);
    const bool here = row == nullptr || says_round(k_, word, step_, round, !remote);
    if (!__all_sync(~0u, here)) finish();
    fuzz_delay(k_, std::uint64_t{round} << 32 | step_);
    return all_of_warp(here || await_round(k_, word, Phase::CombineRecv, step_, rank, round, remote ? Says::Landed : Says::Row));
  }

  // Counts the tokens that were dealt last, once the adders have read their rows.
  __device__ void finish() {
    if (unread_ == kNone) return;
    const std::uint32_t round = unread_ / a_.pieces.tokens, begin = round * a_.pieces.tokens;
    if (!a_.release && !place_.is_past(unread_last_)) await_turn(ring_.used + unread_last_.at, unread_last_.turn);
    __syncwarp();  // a lane that looks later would miss the turn
    finish_unit(k_, a_.pieces, step_, Op::Combine, round, units_of(end_of(begin) - begin), unread_ == begin,
                rounds_of_own(a_.pieces, end_));
    unread_ = kNone;
  }

  // placed, own, peers: lanes with a place of an own row, the one with that row, and those with peers' rows. what: this lane's.
  __device__ void deal_token(std::uint32_t token, std::uint32_t placed, std::uint32_t own, std::uint32_t peers, const char* own_row,
                             float weight, char* row, std::uint32_t what) {
    DealtRow dealt;
    dealt.token = token;
    dealt.own = static_cast<std::uint8_t>(__popc(placed));
    dealt.peers = static_cast<std::uint8_t>(__popc(peers));
    dealt.before = static_cast<std::uint8_t>(__popc(peers & (own - 1)));
    dealt.what = own != 0 ? kHasOwn : 0;
    const bool is_peer = (peers >> lane() & 1) != 0;
    const auto of_peer = static_cast<std::uint8_t>(dealt.what | what);
    for (dealt.at = 0; dealt.at < k_.row_bytes; dealt.at += part_) {
      if ((placed | peers) == 0) add(0, dealt, nullptr, 0);
      const std::uint32_t bytes = min(part_, k_.row_bytes - dealt.at);
      dealt.row = const_cast<char*>(own_row) + dealt.at;
      dealt.weight = weight;
      for (std::uint32_t bits = placed; bits != 0; bits &= bits - 1) add(__ffs(static_cast<int>(bits)) - 1, dealt, dealt.row, bytes);
      if (is_peer) dealt.row = row + dealt.at;
      dealt.what = of_peer;
      for (std::uint32_t bits = peers; bits != 0; bits &= bits - 1) add_peer(__ffs(static_cast<int>(bits)) - 1, dealt, row, bytes);
      dealt.what = own != 0 ? kHasOwn : 0;
    }
  }

  __device__ bool has_codes(std::uint32_t rank) const { return kExtras && k_.c.combine_fp8 && is_remote(k_, rank); }
  __device__ const BlockLayout& block_of(std::uint32_t rank) const { return has_codes(rank) ? a_.relays.answer : k_.combine; }

  // Deals a part of a peer's row, which the lane `by` has: of codes with their scales.
  __device__ void add_peer(std::uint32_t by, const DealtRow& dealt, const char* row, std::uint32_t bytes) {
    if (!kExtras || !k_.c.combine_fp8) return add(by, dealt, dealt.row, bytes);
    add(by, dealt, [&](char* place, std::uint64_t* loaded) {
      if ((dealt.what & kCodes) == 0) {
        mbarrier_expect(loaded, bytes);
        return bulk_load(place, dealt.row, bytes, loaded);
      }
      const std::uint32_t each = dtype_bytes(k_.c.dtype), first = dealt.at / each;
      const std::uint32_t codes = bytes_of_codes(bytes / each), scales = bytes_of_scales(bytes / each);
      mbarrier_expect(loaded, codes + scales);
      bulk_load(place, row + first, codes, loaded);
      const char* const from = row + a_.relays.answer.scales_at + 4 * (first / scale_block(Wire::FP8));
      bulk_load(place + bytes_of_codes(part_ / each), from, scales, loaded);
    });
  }

  const std::uint32_t end_;  // this thread block's number of tokens; in rounds, all of them
  std::uint32_t unread_ = kNone;  // in rounds: the first of the tokens that were dealt last
  Ring unread_last_;  // and the place of their last part
};

// An adder: one of several warps.
template <typename T, typename Adders, bool kExtras = false>
class SumAdder : RowAdder<Adders> {
  using Base = RowAdder<Adders>;
  using Base::a_, Base::k_, Base::part_, Base::step_, Base::kVectors;
  using Base::at, Base::kApart, Base::leave, Base::look, Base::take;

 public:
  using Base::Base;

  __device__ void add_up() {
    const SpanTimer all(k_, Span::ReceivingSums);
    for (;;) {
      const DealtRow first = look();
      if ((first.what & kNoMore) != 0) return;
      add_part(first);
    }
  }

 private:
  __device__ void add_part(const DealtRow& first) {
    const std::uint32_t bytes = min(part_, k_.row_bytes - first.at), rows = first.peers + (first.what & kHasOwn);
    char* const y = a_.y + std::uint64_t{first.token} * a_.y_stride + first.at;
    const bool as_it_is = first.own <= 1 && first.own == (first.what & kHasOwn) && first.weight == 1.0f;
    if (first.own + first.peers == 0) leave();
    if (rows == 2 && as_it_is && !a_.accumulate && !(kExtras && k_.c.combine_fp8))
      add_two(bytes, y);
    else if (kExtras && a_.by_node)
      add_nodes(first.peers, bytes, y);
    else
      add_all(first, bytes, y);
    mark_stage(k_, step_, Stage::Added);
  }

  __device__ void add_two(std::uint32_t bytes, char* y) {
    uint4 v[kVectors], w[kVectors];
    take(bytes, v);
    take(bytes, w);
    const SpanTimer adds(k_, Span::AddingUp);
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (at(j) < bytes) store16(y + at(j), T::sum_of_two(v[j], w[j]));
  }

  __device__ void add_all(const DealtRow& first, std::uint32_t bytes, char* y) {
    uint4 own[kVectors], v[kVectors];
    const bool has_own = !kExtras && (first.what & kHasOwn) != 0;
    if (has_own) add_own(first.own, bytes, own);
    Sums<T, kVectors> sums;
    if (a_.accumulate) sums.load(y, at(0), bytes, kApart);
    for (std::uint32_t i = 0; i < first.peers; ++i) {
      if (has_own && i == first.before) sums.add_row(own);
      take(bytes, v);
      const SpanTimer adds(k_, Span::AddingUp);
      sums.add_row(v);
    }
    if (has_own && first.before == first.peers) sums.add_row(own);
    sums.store(y, at(0), bytes, store16, kApart);
  }

  __device__ void add_nodes(std::uint32_t rows, std::uint32_t bytes, char* y) {
    Sums<T, kVectors> sums, of_node;
    of_node.start(-0.0f);
    if (a_.accumulate) sums.load(y, at(0), bytes, kApart);
    for (; rows != 0; --rows) {
      const bool ends = (look().what & kEndsNode) != 0;
      Base::template add_next<T>(bytes, of_node);
      if (ends) add_node(sums, of_node);
    }
    sums.store(y, at(0), bytes, store16, kApart);
  }

  // The sum of own rows, rounded as the sum of a peer is before it is sent.
  __device__ void add_own(std::uint32_t rows, std::uint32_t bytes, uint4 (&own)[kVectors]) {
    Sums<T, kVectors> sums;
    if (rows != 0 && k_.c.layout == LayoutKind::Compact) sums.start(-0.0f);  // only copied: keeps its sign of zero
    Base::add_rows(rows, bytes, sums);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) own[j] = T::pack(sums.sum[j]);
  }
};

}  // namespace pplx::cuda
