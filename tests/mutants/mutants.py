"""Protocol bugs, one each, that the tests must catch. run.py builds and runs them; `make mutants`.

A mutant is one small change: `old`, which stands in `file` exactly once, becomes `new`. `why` says what would go wrong in the field,
`catch` which of CATCHERS must notice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Catcher:
    target: str  # CMake's name of it
    arguments: tuple[str, ...] = ()
    tsan: bool = False  # a test that includes all it needs, compiled by itself with ThreadSanitizer
    under: tuple[str, ...] = ()  # words for this Python, which start the program
    beside: tuple[str, ...] = ()  # arguments of another run, of which is told whether it would have caught it, too


def pairs(provider: str, contacts: int, *faults: str) -> Catcher:
    """Four ranks that write to each other over software NICs. A rank takes 0.06 s of a core for a round: one that
    takes 2 has lost something."""
    nics = ("--nics", "2", "--window", "64", "--receives", "1024", *faults)
    ranks, limit = "4", "2"
    return Catcher(
        "test_pairs",
        (provider, str(contacts), ranks, limit),
        under=("-m", "pplx_comm", "efa-soft", *nics, "--"),
        beside=("tcp", "1", ranks, limit),
    )


CATCHERS = {
    "sim": Catcher("pplx_sim", ("--seeds", "400", "--limit", "5")),
    "test_plan": Catcher("test_plan"),
    "test_proxy": Catcher("test_proxy"),
    "test_proxy_pieces": Catcher("test_proxy_pieces"),
    "test_headers": Catcher("test_headers"),
    "test_phase": Catcher("test_phase"),
    "test_pieces": Catcher("test_pieces"),
    "test_hooks": Catcher("test_hooks"),
    "test_aborts": Catcher("test_aborts"),
    "efa": pairs("efa", 6),
    "efa-direct": pairs("efa-direct", 2),
    "full queues": pairs("efa", 2, "--fail", "full,every=5"),
    # x86 orders stores by itself, so no run on it can show a release that is missing. TSAN does not look at the machine but at what
    # the program promises.
    "tsan": Catcher("test_atomic", tsan=True),
}


@dataclass(frozen=True)
class Planted:
    name: str
    file: str
    old: str
    new: str
    why: str


@dataclass(frozen=True)
class Mutant(Planted):
    catch: str = "sim"


ARRIVALS = "proxy/arrivals.h"
FABRIC = "proxy/libfabric/libfabric_fabric.cpp"
ENDPOINT = "proxy/libfabric/endpoint.cpp"
COMPLETIONS = "proxy/libfabric/completions.cpp"
REGISTRATION = "proxy/libfabric/registration.cpp"
PROXY = "proxy/proxy.cpp"
BLOCKS = "src/cpu/blocks.cpp"
FAILURES = "src/cpu/failures.cpp"
PEER_ORDER = "src/host/peer_order.h"
DISPATCH_SEND = "src/cpu/dispatch_send.cpp"
DISPATCH_RECV = "src/cpu/dispatch_recv.cpp"
NODES = "src/protocol/nodes.h"
VECTOR = "src/cpu/vector/kernels.cpp"
COMBINE_SEND = "src/cpu/combine_send.cpp"
COMBINE_RECV = "src/cpu/combine_recv.cpp"
PIECE_SENDING = "src/cpu/piece_sending.cpp"
RELAY_SUMS = "src/cpu/relay_sums.cpp"

MUTANTS = [
    # ---- shards and their completion
    Mutant(
        "arrival on the first shard",
        ARRIVALS,
        "complete_ = mask_ == full_mask(shards_);",
        "complete_ = true;",
        "rows are read before they are there: SRD brings the shards of a block in any order",
    ),
    Mutant(
        "arrival on the last shard",
        ARRIVALS,
        "complete_ = mask_ == full_mask(shards_);",
        "complete_ = complete_ || shard + 1 == shards_;",
        "right on every network that keeps order, wrong on SRD",
    ),
    Mutant(
        "each piece is an answer",
        PROXY,
        "  if (first) {\n    if (i.op == Op::Combine) --awaited_;\n",
        "  if (i.op == Op::Combine) --awaited_;\n  if (first) {\n",
        "a combine in pieces counts several times: the proxy thinks for ever that one is owed, and never sleeps",
        catch="test_proxy_pieces",
    ),
    Mutant(
        "the mask is not cleared",
        ARRIVALS,
        "      mask_ = 0;\n",
        "",
        "the next step is complete with its first shard",
    ),
    # ---- the proxy
    Mutant(
        "the step is not looked at",
        PROXY,
        "const bool open = !late && (i.op != Op::Combine || asked.begun) && same_step(step, i);",
        "const bool open = !late && (i.op != Op::Combine || asked.begun);",
        "an immediate of another step that uses the same set raises this one's word",
    ),
    Mutant(
        "replays are taken",
        PROXY,
        "const bool open = !late && (i.op != Op::Combine || asked.begun) && same_step(step, i);",
        "const bool open = !late && (i.op != Op::Combine || asked.begun) && ((step - i.step) & 0x1fu) < 16;",
        "an immediate of an earlier step, come late, opens this one",
    ),
    Mutant(
        "EAGAIN is dropped",
        PROXY,
        "        ++stats_.again;\n        return moved;",
        "        ++stats_.again;\n        ++out.posted;\n        return moved;",
        "a shard that the NIC had no room for never leaves",
    ),
    Mutant(
        "a full peer holds up the others",
        PROXY,
        "    moved |= post_shards(object, jobs[i], to_come);\n",
        "    if (!post_shards(object, jobs[i], to_come)) break;\n    moved = true;\n",
        "one slow peer stops the traffic to all",
        catch="test_proxy",
    ),
    Mutant(
        "sent with the first completion",
        PROXY,
        "  if (--out.unsent == 0) left(",
        "  if (out.unsent-- == out.shards) left(",
        "the send area is written again while the NIC still reads its other shards",
    ),
    Mutant(
        "the set is swapped",
        PROXY,
        "object.target_at(out.step, job.op, job.peer) + cut.at;",
        "object.target_at(out.step + 1, job.op, job.peer) + cut.at;",
        "with several steps in flight a block lands in another step's slot",
    ),
    Mutant(
        "shards leave a rest",
        PROXY,
        "out.shard_bytes = align_up((out.bytes + out.shards - 1) / out.shards, 64);",
        "out.shard_bytes = out.bytes / out.shards;",
        "the last bytes of a block that its shards do not divide never leave",
        catch="test_proxy",
    ),
    Mutant(
        "a block goes to the slot of the rank's own number",
        "proxy/proxy.h",
        "return o.targets[heap.word_index(o.config, set_of(o.config, step), op, peer)];",
        "return heap.remote_slot_at(set_of(o.config, step), op, o.config.rank);",
        "a GPU has slots for its remote peers alone: the block lands in another rank's, or behind them all",
        catch="test_proxy",
    ),
    Mutant(
        "one peer, one NIC",
        "proxy/proxy.h",
        "endpoints_) + out.piece + out.posted",
        "endpoints_) + out.posted",
        "a rank with one network peer has half of its bandwidth",
        catch="test_proxy_pieces",
    ),
    Mutant(
        "the generation of arrivals is forgotten",
        PROXY,
        "signal_of(i.op), i.source, object->o.generation, step);",
        "signal_of(i.op), i.source, 1, step);",
        "after a reset nothing ever arrives",
    ),
    Mutant(
        "completions of a closed AllToAll count",
        PROXY,
        "return object != nullptr && object->life == life_in(context) && ",
        "return object != nullptr && ",
        "memory is written again while it is read, when a new AllToAll takes an old one's number",
        catch="test_proxy",
    ),
    Mutant(
        "a failed write is blamed on no peer",
        PROXY,
        "  if (object->o.on_failure) object->o.on_failure(failure);\n",
        "",
        "a broken link is noticed by the timeout only",
    ),
    Mutant(
        "the last block is taken back",
        PROXY,
        "    n += load_mail<HostAtomics>(mailbox_entry(object->heap, object->o.memory, index)) != object->seen[index];\n",
        "    n += 0 * index;\n",
        "a rank that closes right after its last combine leaves its peers without it",
        catch="test_proxy",
    ),
    Mutant(
        "each rank splits its peers for itself",
        "proxy/proxy.h",
        "  return dealt(rank, peer, proxies);\n",
        "  return (peer - rank + 1024 * proxies) / 2 % proxies;\n",
        "with two proxies a block goes to a fabric whose proxy does not wait for it",
        catch="test_proxy",
    ),
    # ---- steps, generations, failure
    Mutant(
        "the generation is ignored",
        "src/protocol/arrival.h",
        "return static_cast<std::uint32_t>(word >> 32) == generation && step_reached(static_cast<std::uint32_t>(word), step);",
        "return word >> 32 != 0 && generation != 0 && step_reached(static_cast<std::uint32_t>(word), step);",
        "words of before a reset open the steps after it",
    ),
    Mutant(
        "steps do not wrap",
        "src/protocol/config.h",
        "return step_difference(seen, wanted) >= 0;",
        "return seen >= wanted;",
        "after 2^32 steps everything has arrived already",
    ),
    Mutant(
        "send blocks are reused before local completion",
        "src/protocol/mailbox.h",
        "return last == 0 || reached(sent, last);",
        "return last == 0 || sent != last + 1;",
        "the NIC sends rows of the next step as this one's",
    ),
    Mutant(
        "a header's step is not checked",
        BLOCKS,
        '  if (h.step != step) differs("step", h.step, step);\n',
        "",
        "a damaged or misplaced block is taken for this step's",
        catch="test_headers",
    ),
    Mutant(
        "a header's generation is not checked",
        BLOCKS,
        '  if (h.generation != generation_) differs("generation", h.generation, generation_);\n',
        "",
        "a block of before a reset is taken for one of after it",
    ),
    Mutant(
        "a header's rows are not checked",
        BLOCKS,
        "  if (h.rows > max_rows_of_block(config_))\n",
        "  if (h.rows > 2 * max_rows_of_block(config_))\n",
        "what a peer sends is used as an index outside of its slot",
        catch="test_headers",
    ),
    Mutant(
        "timeouts are ignored",
        FAILURES,
        "  if (!still && waited < patience + w.longer) return;\n",
        "  if (!still || waited >= 0) return;\n",
        "a rank that stands still stops all others for ever",
    ),
    Mutant(
        "a goodbye is ignored",
        FAILURES,
        "  if (goodbye >= 0 && now_() - goodbye > deadlines::kGoodbyeGrace.seconds)\n",
        "  if (goodbye >= 0 && now_() - goodbye > 1000 * deadlines::kGoodbyeGrace.seconds)\n",
        "a rank that left in good order is waited for until the timeout",
        catch="test_aborts",
    ),
    Mutant(
        "an abort is not forwarded",
        FAILURES,
        "    if (blocks_.mapped(peer) && blocks_.alive()[peer]) store_if_zero(blocks_.abort_of(peer), word);\n",
        "    if (peer == blocks_.config().rank) store_if_zero(blocks_.abort_of(peer), word);\n",
        "ranks of the node hear of a failure over the control connections only, if those still work",
        catch="test_aborts",
    ),
    Mutant(
        "a dead rank is waited for",
        PEER_ORDER,
        "    if (alive[peer]) order.push_back(peer);\n",
        "    order.push_back(peer);\n",
        "after a reset over the survivors every step times out",
    ),
    Mutant(
        "reset keeps old words",
        "src/protocol/mailbox.h",
        "  std::memset(memory + heap.mailbox, 0, kWordBytes * heap.mailbox_words(c));\n",
        "",
        "the new proxy takes blocks of before the reset out of the mailbox and sends them",
    ),
    # ---- the phases
    Mutant(
        "zero rows are not published",
        DISPATCH_SEND,
        "    b_.publish(step_, Op::Dispatch, peer, plan_.rows(peer), blocks_[group]);\n",
        "    if (plan_.rows(peer) > 0) b_.publish(step_, Op::Dispatch, peer, plan_.rows(peer), blocks_[group]);\n",
        "a rank that gets no token waits for ever",
    ),
    Mutant(
        "counts of another rank's experts",
        DISPATCH_SEND,
        "plan_.counts.data() + first_expert(c_, rank),\n",
        "plan_.counts.data() + first_expert(c_, c_.rank),\n",
        "the header's counts lead every row to a wrong place",
    ),
    Mutant(
        "rows are read with the header",
        DISPATCH_RECV,
        "stage == kHeaders && b_.mapped(peer) ? Signal::Header : Signal::Dispatch, peer);",
        "b_.mapped(peer) ? Signal::Header : Signal::Dispatch, peer);",
        "the header travels ahead of its rows; they are read before they are written",
        catch="test_headers",
    ),
    Mutant(
        "sources in the order of arrival",
        DISPATCH_RECV,
        "        cell = static_cast<std::uint32_t>(start + count);\n",
        "        cell = static_cast<std::uint32_t>(start + (s == c_.rank ? 0 : count));\n",
        "two sources' rows of one expert share a place",
    ),
    Mutant(
        "the weights are not waited for",
        COMBINE_SEND,
        "    return stage == kWeights || writer_.has_weights(peer);\n",
        "    return stage == kRows || writer_.has_weights(peer);\n",
        "weights= of this step are those of an earlier one",
    ),
    Mutant(
        "a weights block too many rows long",
        COMBINE_SEND,
        "    if (header.rows != expected)\n",
        "    if (header.rows < expected)\n",
        "weights of another plan are applied to these rows",
        catch="test_headers",
    ),
    Mutant(
        "combine does not wait",
        COMBINE_RECV,
        "      case kBlocks: return b_.has_arrived(step_, Signal::Combine, b_.targets()[group]);\n",
        "      case kBlocks: return group > 0 || b_.has_arrived(step_, Signal::Combine, b_.targets()[group]);\n",
        "rows of an earlier step are added to the output",
    ),
    Mutant(
        "combine takes any number of rows",
        COMBINE_RECV,
        "    if (header.rows != expected)\n",
        "    if (header.rows > c_.max_tokens)\n",
        "a peer that lost rows gives sums that lack them",
        catch="test_headers",
    ),
    # ---- sums by node
    Mutant(
        "a node's sum is not rounded",
        VECTOR,
        "        sum = sum + load_one<T>(store_one<T>(of_node));\n",
        "        sum = sum + of_node;\n",
        "the bits are others where a relay adds the rows up",
    ),
    Mutant(
        "a node's sum counts for the next one, too",
        VECTOR,
        "          of_node[i] = -Floats{};\n",
        "",
        "rows are added twice",
    ),
    Mutant(
        "rows of nodes in the order of ranks",
        COMBINE_RECV,
        "return std::pair(node_of(a), a) < std::pair(node_of(b), b);",
        "return a < b;",
        "a node whose ranks do not follow each other has several sums",
    ),
    Mutant(
        "two nodes count as one",
        BLOCKS,
        "  if (!groups_sums(memory_.nodes)) memory_.nodes.clear();\n",
        "  if (count_nodes(memory_.nodes) < 3 && config.node_ranks == 0) memory_.nodes.clear();\n",
        "the bits depend on what a rank takes for a node",
    ),
    # ---- relays
    Mutant(
        "the wrong mate's rows",
        RELAY_SUMS,
        "returned.push_back({bit, b_.relay_slot(set_, sources_[nth], mate) +",
        "returned.push_back({bit, b_.relay_slot(set_, sources_[nth], mates_[mates_.size() - 1 - returned.size()]) +",
        "a token gets the sums of another one",
    ),
    Mutant(
        "a relay adds in another order",
        RELAY_SUMS,
        "    for (std::uint32_t i = 0; i < mates_.size(); ++i) {\n",
        "    for (std::uint32_t i = static_cast<std::uint32_t>(mates_.size()); i-- > 0;) {\n",
        "the bits depend on which rank is the relay, or on which mate came first",
    ),
    Mutant(
        "a relay adds its own rows twice",
        RELAY_SUMS,
        "      returned[i].row += block_.row_bytes;\n",
        "      if (mates_[i] == c_.rank && n < kMaxNodeRanks) rows[n++] = returned[i].row;\n      returned[i].row += block_.row_bytes;\n",
        "what the relay's own experts made counts twice",
    ),
    Mutant(
        "a source without rows gets no answer",
        RELAY_SUMS,
        "    b_.publish(step_, Op::Combine, sources_[nth], rows(nth), answers_[nth]);\n",
        "    if (rows(nth) > 0) b_.publish(step_, Op::Combine, sources_[nth], rows(nth), answers_[nth]);\n",
        "a source that sends a node nothing waits for ever",
    ),
    Mutant(
        "a relay without tokens does not answer",
        COMBINE_RECV,
        "  if (config().node_ranks != 0) return std::make_unique<CombineRecvWithRelays>",
        "  if (config().node_ranks != 0 && open.input.plan->tokens > 0) return std::make_unique<CombineRecvWithRelays>",
        "other nodes' ranks wait for ever for one that has nothing to send",
    ),
    Mutant(
        "a relay closes its step before it has answered",
        COMBINE_RECV,
        "    return own_.poll() && answered;\n",
        "    return own_.poll() || answered;\n",
        "no call of the relay comes to send the answer, and its memory is written again",
    ),
    Mutant(
        "a relay answers when one mate has returned",
        RELAY_SUMS,
        "      if (!b_.has_returned(step_, sources_[nth], mate)) return false;\n    return true;\n",
        "      if (b_.has_returned(step_, sources_[nth], mate)) return true;\n    return false;\n",
        "rows of an earlier step are added",
    ),
    Mutant(
        "masks are read again to add up",
        RELAY_SUMS,
        "{ return received_->masks[nth][row]; }",
        "{\n    std::uint32_t now;\n    std::memcpy(&now, b_.own_slot(set_, Op::Dispatch, sources_[nth]) + masks_at(c_) + 4ull * row, 4);\n    return now;\n  }",
        "a source that writes its block again leads the relay outside of its memory",
        catch="test_headers",
    ),
    Mutant(
        "any mask is taken",
        DISPATCH_RECV,
        "      if ((masks[token] & ~living) != 0)\n",
        "      if (token > masks.size())\n",
        "a row for a rank that there is none of: no rank returns it",
        catch="test_headers",
    ),
    Mutant(
        "a row without a choice of this rank is taken",
        DISPATCH_RECV,
        "if (b_.relayed(peer) && (n = keep_own(peer, &head, entries)) == 0)\n",
        "if (b_.relayed(peer) && (n = keep_own(peer, &head, entries)) == 0 && head.token == ~0u)\n",
        "a damaged mask is not noticed, and the row's sum is none",
        catch="test_headers",
    ),
    Mutant(
        "a mate returns any number of rows",
        RELAY_SUMS,
        "    if (header.rows != expected)\n",
        "    if (header.rows < expected)\n",
        "rows of another plan are added to these",
        catch="test_headers",
    ),
    Mutant(
        "the tail of the wrong mate",
        RELAY_SUMS,
        "route_expert(entries[i++].place) / experts_per_rank(c_);",
        "route_expert(entries[0 * i++].place) / experts_per_rank(c_);",
        "the gradients of the router's weights are those of another choice",
    ),
    Mutant(
        "weights at the wrong position",
        COMBINE_SEND,
        "std::memcpy(sent + i++, of_row + k * sizeof(float), sizeof(float));",
        "std::memcpy(sent + i, of_row + i * sizeof(float), sizeof(float)), ++i;",
        "a choice on one rank of the node gets the weight of one on another",
    ),
    Mutant(
        "a relay's overflow bits are lost",
        RELAY_SUMS,
        "    header.overflowed = overflowed_[nth];\n",
        "",
        "a rank never hears that another one's buffer had no room for its rows",
    ),
    Mutant(
        "sources of a relay share a place",
        NODES,
        "    rails.nth[rank] = count[holder]++;\n",
        "    rails.nth[rank] = rails.number[rank];\n",
        "the rows for one source are overwritten by those for another, of the same number on its node",
        catch="test_plan",
    ),
    Mutant(
        "a source takes its own number for that at its relay",
        NODES,
        "rails.nth_there[rank] = sources_before_this(rank);\n",
        "rails.nth_there[rank] = rails.nth[rank];\n",
        "the rows for one source are overwritten by those for another, from a node of another size",
        catch="test_plan",
    ),
    Mutant(
        "answers of two nodes have one place",
        NODES,
        "    rails.other[rank] = its_node - (its_node > node);\n",
        "    rails.other[rank] = (its_node - (its_node > node)) / 2;\n",
        "the sums of one node are overwritten by those of another",
        catch="test_plan",
    ),
    Mutant(
        "a rail for each node",
        NODES,
        "  area.shared_bytes = area.relay_at = align_up(area.slot_at(0, Op::Dispatch, sources), page);\n",
        "  area.shared_bytes = area.relay_at = align_up(area.slot_at(0, Op::Dispatch, others), page);\n",
        "a relay that serves several sources of a node has their rows where its mates return theirs",
    ),
    Mutant(
        "the network may write what mates return",
        NODES,
        "  area.relay = relay_area(c, sources);\n",
        "  area.relay = relay_area(c, sources);\n  area.shared_bytes += area.relay.bytes;\n",
        "a source of another node changes sums of this one",
        catch="test_plan",
    ),
    Mutant(
        "one send block for all sources",
        NODES,
        "packed_bytes(block, sources, std::uint64_t{most} * sources)",
        "packed_bytes(block, 1, most)",
        "the answers to a relay's second source lie behind its memory",
        catch="test_plan",
    ),
    Mutant(
        "the last digit deals peers",
        "proxy/proxy.h",
        "for (std::uint32_t sum = rank + peer; count > 1 && sum > 0; sum /= count) digits += sum % count;",
        "digits = rank + peer;",
        "one of two NICs, and of two proxies, has all rails of a rank",
        catch="test_proxy",
    ),
    Mutant(
        "a row's number is that in the node's block",
        DISPATCH_RECV,
        "received_->row_of_node[received_->rows_begin[peer] + row] : row - begin;",
        "row : row - begin;",
        "rows that other ranks of the node want are taken for this rank's",
    ),
    Mutant(
        "the dead count in the choice of a relay",
        NODES,
        "    before[rank] = static_cast<std::uint32_t>(living[nodes[rank]].size());\n",
        "    before[rank] = rails.number[rank];\n",
        "after a reset one rank of a node serves several sources, and another one none",
        catch="test_plan",
    ),
    Mutant(
        "weights answer a dispatch",
        PROXY,
        "const std::uint32_t step = i.op == Op::Combine ? asked.step : current",
        "const std::uint32_t step = i.op != Op::Dispatch ? asked.step : current",
        "weights of a source that this rank sends nothing are dropped",
        catch="test_proxy",
    ),
    Mutant(
        "late weights are taken",
        PROXY,
        "const bool late = in.begun && step_difference(step, in.step) < 0;",
        "const bool late = false;",
        "what comes again takes back the weights of the step after it",
        catch="test_proxy",
    ),
    # ---- replicas
    Mutant(
        "every replica sends every token",
        "src/protocol/config.h",
        "{ return token % of == number; }",
        "{ return token % of == number || of > 1; }",
        "experts get each token as often as there are replicas, and slots overflow",
    ),
    Mutant(
        "no replica sends a dead one's tokens",
        "src/protocol/replicas.h",
        "    if (alive != nullptr && !(*alive)[r] && r != rank) continue;\n",
        "",
        "after a reset a part of the tokens gets no expert's output",
    ),
    Mutant(
        "slices of all steps in flight lie in one place",
        "src/protocol/heap.h",
        "    return slices + slice_bytes * (std::uint64_t{set} * c.replicas + rank % c.replicas);\n",
        "    return slices + slice_bytes * (std::uint64_t{0 * set} * c.replicas + rank % c.replicas);\n",
        "with several steps in flight a replica that is ahead overwrites what another has not read",
    ),
    Mutant(
        "a finished row is not waited for",
        COMBINE_RECV,
        "      case kSlices: return b_.has_arrived(step_, Signal::Slice, b_.replicas()[group]);\n",
        "      case kSlices: return group > 0 || b_.has_arrived(step_, Signal::Slice, b_.replicas()[group]);\n",
        "replicas return rows of an earlier step",
    ),
    Mutant(
        "finished rows without their tail",
        COMBINE_RECV,
        "        if (has_tail_ && out_.tail != nullptr) std::memcpy(row + block_.tail_at, tail_of(t), tail_bytes());\n",
        "",
        "the gradients of the router's weights are those of an earlier step, or none",
    ),
    Mutant(
        "a replica without tokens is silent",
        COMBINE_RECV,
        "        if (!released_ && (own_ > 0 || !b_.replicas().empty()))\n",
        "        if (!released_ && own_ > 0)\n",
        "fewer tokens than replicas: the others wait for ever for one that has nothing to finish",
    ),
    Mutant(
        "other tokens on a replica are not noticed",
        BLOCKS,
        "  if (h.tokens == plan.tokens && h.ids_digest == plan.ids_digest) return;\n",
        "  if (h.tokens == plan.tokens) return;\n",
        "replicas that were routed apart give wrong outputs, without a word",
        catch="test_headers",
    ),
    # ---- blocks in pieces
    Mutant(
        "a credit too early",
        DISPATCH_RECV,
        "          in.arrivals.have_read(pieces);\n",
        "          in.arrivals.have_read(pieces + 1);\n",
        "a piece is overwritten before it has been read",
    ),
    Mutant(
        "a credit for a piece that is half added",
        COMBINE_RECV,
        "      --in.rows_left[in.arrivals.shape().piece_of(row.row)];\n",
        "      in.rows_left[in.arrivals.shape().piece_of(row.row)] = 0;\n",
        "rows are overwritten that a later token needs",
    ),
    Mutant(
        "a place is written before its credit",
        PIECE_SENDING,
        "  if (piece >= kPlaces && b_.pieces_consumed(step_, op_, out.peer) + kPlaces <= piece) return false;\n",
        "",
        "pieces overtake their reader",
    ),
    Mutant(
        "a place is written before it has left",
        PIECE_SENDING,
        "  return b_.pieces_left(step_, op_, out.peer) + kPlaces > piece;\n",
        "  return true;\n",
        "a credit does not say that the NIC will not read the piece again",
    ),
    Mutant(
        "what has left is not counted from the first",
        PROXY,
        "    while (sender.left < sender.begun && object.out[object.out_index(word, sender.left)].unsent == 0) ++sender.left;\n",
        "    ++sender.left;\n",
        "the second of two pieces leaves first, and the first one's place is written again",
    ),
    Mutant(
        "the number of a piece is not looked at",
        PROXY,
        "i.piece : in.done + pieces_ahead(i.piece, in.done);\n",
        "i.piece : in.done;\n",
        "a piece that comes first, or comes again, is taken for the next one",
    ),
    Mutant(
        "a piece of long ago is taken",
        PROXY,
        "piece - in.done >= (object.heap.in_pieces ? kPlaces : 1)) {\n",
        "piece - in.done >= 8) {\n",
        "a repeated immediate empties the mask of a piece that is under way, which never completes",
    ),
    Mutant(
        "the first piece is not waited for",
        PROXY,
        "  while ((!in_parts || in.done < kMostParts) && in.masks[in.done % places].complete(step, in.done)) ++in.done;\n",
        "  in.done = piece + 1;\n",
        "two pieces are under way, and the second one comes first",
    ),
    Mutant(
        "a part goes before the mail has it",
        PROXY,
        "  if (part == std::min(mail.parts, sender.parts)) return std::nullopt;\n",
        "  if (part == sender.parts) return std::nullopt;\n",
        "rows travel that no kernel has stored yet",
        catch="test_proxy_pieces",
    ),
    Mutant(
        "a part goes to the end of its block",
        PROXY,
        "layout.bytes(std::min(sizes.begin(part + 1), mail.rows)) - at};\n",
        "layout.bytes(mail.rows) - at};\n",
        "rows of later parts travel before they are stored, and a late write puts old ones over new ones",
        catch="test_proxy_pieces",
    ),
    Mutant(
        "a block is free when what was told of has left",
        PROXY,
        "if (sender.left < std::max(sender.begun, sender.parts)) return;\n",
        "if (sender.left < sender.begun) return;\n",
        "the next step's rows are stored over those of the last part, which the network has yet to read",
        catch="test_proxy_pieces",
    ),
    Mutant(
        "a mail word counts one piece",
        BLOCKS,
        "rows = shape.end(count - 1);\n",
        "rows = shape.end(count - 1) - shape.begin(count - 1);\n",
        "the proxy takes the third piece for the first, which has gone",
    ),
    Mutant(
        "the last piece lacks a row",
        PROXY,
        "bytes(std::min(rows, its_rows))};",
        "bytes(std::min(rows, its_rows - (piece > 0)))};",
        "rows of an earlier piece are taken for the last ones",
    ),
    Mutant(
        "a credit counts twice",
        PROXY,
        "  sender.next_has_credit = false;\n",
        "",
        "credits that overtake each other free a piece that has not been read",
    ),
    Mutant(
        "the credit of another set",
        BLOCKS,
        "  const std::uint32_t set = set_of(config_, step);\n  std::uint64_t* const at",
        "  const std::uint32_t set = set_of(config_, step + 1);\n  std::uint64_t* const at",
        "with several steps in flight one waits for ever, and another one overtakes its reader",
    ),
    Mutant(
        "pieces and credits of before a reset count",
        "src/protocol/pieces.h",
        "word >> 48 == (generation & 0xffffu) && static_cast<std::uint32_t>(word) == step;",
        "static_cast<std::uint32_t>(word) == step && generation != 0;",
        "step numbers come again after a reset",
    ),
    Mutant(
        "tokens are added before their rows are here",
        COMBINE_RECV,
        "      if (!arrivals.has(arrivals.shape().piece_of(plan_.token_rows[ref_].row))) return false;\n",
        "      if (!arrivals.has(0)) return false;\n",
        "what lay in the place before is added up",
    ),
    Mutant(
        "a later header is taken for the first",
        BLOCKS,
        '  if (h.piece != 0) differs("piece", h.piece, 0);\n',
        "",
        "its counts are those of an earlier step",
        catch="test_pieces",
    ),
    Mutant(
        "a piece's header is not checked",
        BLOCKS,
        '  if (h.piece != piece) differs("piece", h.piece, piece);\n',
        "",
        "a damaged or misplaced piece is taken for this one",
        catch="test_pieces",
    ),
    Mutant(
        "steps in pieces are received in any order",
        "src/cpu/open_steps.h",
        "step_difference(open.step, step) < 0 && !(open.*begun))",
        "step_difference(open.step, step) < 0 && !(open.*begun) && open.released)",
        "ranks that receive in different orders wait for each other for ever",
        catch="test_pieces",
    ),
    # ---- memory order
    Mutant(
        "release is made relaxed",
        "src/host/atomic.h",
        "__atomic_store_n(word, value, __ATOMIC_RELEASE);",
        "__atomic_store_n(word, value, __ATOMIC_RELAXED);",
        "on ARM a word is seen before the rows that it announces",
        catch="tsan",
    ),
    Mutant(
        "acquire is made relaxed",
        "src/host/atomic.h",
        "__atomic_load_n(word, __ATOMIC_ACQUIRE);",
        "__atomic_load_n(word, __ATOMIC_RELAXED);",
        "on ARM rows are read before the word that announces them",
        catch="tsan",
    ),
    Mutant(
        "a block is published before its last rows",
        "src/cpu/phase.h",
        "if (group.done.fetch_add(1, std::memory_order_acq_rel) + 1 != group.claims) continue;",
        "if (group.done.fetch_add(1, std::memory_order_acq_rel) != 0) continue;",
        "another thread may still write rows of a block that is announced",
        catch="test_phase",
    ),
    # ---- the libfabric back end, as real providers punish it. Of each is told whether tcp does, too
    Mutant(
        "no local descriptor",
        FABRIC,
        "message.desc = &descriptor;",
        "message.desc = nullptr;",
        "a NIC reads nothing that it has no local key for",
        catch="efa-direct",
    ),
    Mutant(
        "the descriptor of another endpoint",
        FABRIC,
        "descriptor(write.source_offset, static_cast<std::size_t>(write.endpoint))",
        "descriptor(write.source_offset, 0)",
        "a local key is good on its own NIC alone",
        catch="efa",
    ),
    Mutant(
        "every write says that more come",
        FABRIC,
        "(more ? FI_MORE : 0)",
        "(write.immediate != 0 || more ? FI_MORE : 0)",
        "no doorbell rings, and the writes never begin",
        catch="efa-direct",
    ),
    Mutant(
        "FI_MORE on efa",
        ENDPOINT,
        'endpoint.rings_doorbells = provider.name == "efa-direct"',
        "endpoint.rings_doorbells = provider.is_efa()",
        "writes that the provider queues, for a handshake or a receive, keep it: no doorbell rings when they go out last",
        catch="efa",
    ),
    Mutant(
        "receives are not posted again",
        COMPLETIONS,
        "    post_receive(endpoint, provider_, scratch_, entry.op_context);",
        "    static_cast<void>(scratch_);",
        "after 512 immediates none arrives any more",
        catch="efa-direct",
    ),
    Mutant(
        "the key of another endpoint",
        FABRIC,
        "remote.key = target.key[static_cast<std::size_t>(write.endpoint) % peer.address.endpoints.size()];",
        "remote.key = target.key[static_cast<std::size_t>(write.endpoint + 1) % peer.address.endpoints.size()];",
        "a remote key is good on its own NIC alone",
        catch="efa",
    ),
    Mutant(
        "a key for each of our endpoints",
        FABRIC,
        "remote.key = target.key[static_cast<std::size_t>(write.endpoint) % peer.address.endpoints.size()];",
        "remote.key = target.key[static_cast<std::size_t>(write.endpoint)];",
        "a peer with fewer NICs has fewer keys",
        catch="efa-direct",
    ),
    Mutant(
        "an address behind the region",
        FABRIC,
        "remote.addr = target.base + write.target_offset;",
        "remote.addr = target.base + target.bytes + write.target_offset;",
        "what lies behind is somebody else's",
        catch="efa-direct",
    ),
    Mutant(
        "no device may write to it",
        REGISTRATION,
        "on_device, FI_RECV | FI_WRITE | FI_REMOTE_WRITE)",
        "on_device, FI_RECV | FI_WRITE)",
        "every write to it fails",
        catch="efa",
    ),
    Mutant(
        "a completion counts twice",
        COMPLETIONS,
        "    if (!forgotten) --endpoint.under_way;\n    endpoint.operations.give_back(operation);\n    return !forgotten;",
        "    if (!forgotten) endpoint.under_way -= 2;\n    endpoint.operations.give_back(operation);\n    return !forgotten;",
        "the endpoint seems full, or to have room that it has not",
        catch="efa-direct",
    ),
    Mutant(
        "a context is used again at once",
        FABRIC,
        "    ++endpoint.under_way;\n    return Post::Accepted;",
        "    ++endpoint.under_way;\n    endpoint.operations.give_back(operation);\n    return Post::Accepted;",
        "completions are taken for those of other writes",
        catch="efa",
    ),
    Mutant(
        "EAGAIN counts as sent",
        FABRIC,
        "  if (result == -FI_EAGAIN) return Post::Again;",
        "  if (result == -FI_EAGAIN) return Post::Accepted;",
        "a write is lost whenever the queue is full",
        catch="full queues",
    ),
    Mutant(
        "no doorbell for what fills the queue",
        FABRIC,
        "write.more && endpoint.rings_doorbells && endpoint.under_way + 2 <= endpoint.most_under_way;",
        "write.more && endpoint.rings_doorbells;",
        "the write that would ring waits for the completions of those it rings for",
        catch="efa-direct",
    ),
    Mutant(
        "only the endpoint that is written to is inserted",
        FABRIC,
        "if (other != mine % theirs && other % ours != mine) continue;",
        "if (other != mine % theirs) continue;",
        "a NIC drops what comes from a peer that it does not know",
        catch="efa-direct",
    ),
    Mutant(
        "no receives are posted",
        ENDPOINT,
        "& FI_RX_CQ_DATA) == 0) return;",
        "& FI_RX_CQ_DATA) != 0) return;",
        "an immediate that needs one never arrives",
        catch="efa-direct",
    ),
    Mutant(
        "hooks: blocks are raised a row too early",
        DISPATCH_RECV,
        "kRaised - rows[word]);",
        "kRaised - rows[word] + (rows[word] > 0 ? 1 : 0));",
        "a kernel that runs beside a dispatch reads a row that has not come",
        "test_hooks",
    ),
    Mutant(
        "hooks: the plan is raised before it is there",
        DISPATCH_RECV,
        "        place_experts();\n",
        "        if (out_.hooks != nullptr) add(0, kRaised);\n        place_experts();\n",
        "counts and offsets are read that are those of an earlier step",
        "test_hooks",
    ),
    Mutant(
        "hooks: only a row's first place is counted",
        DISPATCH_RECV,
        "n = compact ? 1 : count_choices(received_->choices[at]); i < n; ++i)",
        "n = 1; i < n; ++i)",
        "blocks are never raised where a token has two experts of a rank",
        "test_hooks",
    ),
]
