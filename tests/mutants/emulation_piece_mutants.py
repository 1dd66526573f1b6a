"""Bugs of blocks in pieces, and of their hooks. run_emulation.py plants them."""

from __future__ import annotations

from emulation_mutants import CARRIER, ERROR, NETWORK, PUTS, Mutant

ROUNDS = "src/cuda/rounds/remote.cuh"

PIECES = "test_pieces_by_kernels"
RESET_PIECES = "test_pieces_after_a_reset and nvshmem"
LATE_PIECE, WRONG_PIECE = "a_piece_that_lands_after_its_generation", "a_piece_that_is_not_the_next"
HOOKS = "test_hooks_of_pieces and mapped and not resident and not graph"

MUTANTS = [
    Mutant(
        "pieces: signal before data",
        NETWORK,
        "    pieces.insert(pieces.begin(), Piece{0, 0});",
        "    pieces.insert(pieces.end(), Piece{0, 0});",
        "a carrier whose signal overtakes its data would pass every test",
        PIECES,
    ),
    Mutant(
        "pieces: a credit is given too early",
        "src/cuda/rounds/rounds.cuh",
        "  if (first) more += kAllParts - units + ",
        "  if (first) more += kAllParts - units + (units > 1 ? 1 : 0) + ",
        "a place is written while its last rows are read",
        PIECES,
    ),
    Mutant(
        "pieces: rows count as read while they are on their way to shared memory",
        "src/cuda/large/receive_sums.cuh",
        "    if (!a_.release && !place_.is_past(unread_last_)) await_turn(",
        "    if (a_.release) await_turn(",
        "the same",
        PIECES,
    ),
    Mutant(
        "pieces: rows that have been read stay uncounted",
        "src/cuda/large/receive_sums.cuh",
        "    if (!__all_sync(~0u, good)) {\n      finish();\n",
        "    if (!__all_sync(~0u, good)) {\n",
        "peers wait for room, and this rank for their rows",
        PIECES,
    ),
    Mutant(
        "pieces: a round is stored before there is room",
        "src/cuda/large/send_sums.cuh",
        "      good = make_room(k_, p, step_, run) && ",
        "      good = ",
        "rows that are not read yet are overwritten",
        PIECES,
    ),
    Mutant(
        "pieces: a piece is put before its last row",
        ROUNDS,
        "if (!count_parts(k, p, step, Op::Combine, peer, round, more, kAllParts + kRoundBefore)) return;\n",
        "if (!count_parts(k, p, step, Op::Combine, peer, round, more, kAllParts - (round > 1 ? 1 : 0) + kRoundBefore)) return;\n",
        "its last row, or its header, is stored while the network reads the piece",
        PIECES,
    ),
    Mutant(
        "pieces: written again before the network has read them",
        CARRIER,
        " && carrier::left(k, peer, context_of(k, step, op, n % kPlaces))) ++n;\n",
        ") ++n;\n",
        "a credit says that the peer has read, not that nothing reads the sender's memory any more",
        PIECES,
    ),
    Mutant(
        "pieces: both places are asked whether one has left",
        CARRIER,
        "context_of(k, step, op, n % kPlaces))) ++n;\n",
        "context_of(k, step, op, (n + 1) % kPlaces))) ++n;\n",
        "the place that is written next is not the one that was asked about",
        PIECES,
    ),
    Mutant(
        "pieces: the second place is not waited for at the end of a step",
        CARRIER,
        "(!k.heap.in_pieces || carrier::left(k, peer, context_of(k, step, op, 1)))",
        "(!k.heap.in_pieces || true)",
        "the set's next step stores where the network still reads",
        PIECES,
    ),
    Mutant(
        "pieces: places share a signal",
        CARRIER,
        "layout.bytes(rows), piece_signal_of(k, step, op, place, k.c.rank));\n",
        "layout.bytes(rows), piece_signal_of(k, step, op, 0, k.c.rank));\n",
        "a count says how many have landed, not which",
        PIECES,
    ),
    Mutant(
        "pieces: a piece is believed with the one before",
        CARRIER,
        "n % kPlaces, peer, (n - known) / kPlaces)) ++n;\n",
        "0, peer, (n - known) / kPlaces)) ++n;\n",
        "rows of the second place are read before they come",
        PIECES,
    ),
    Mutant(
        "pieces: credits of dispatch and combine are one",
        "src/protocol/signals.h",
        "heap.count_at(c, nth == kCreditSignal ? heap.consumed : heap.pieces, set, op, source);",
        "heap.count_at(c, nth == kCreditSignal ? heap.consumed : heap.pieces, set, nth == kCreditSignal ? Op::Dispatch : op, source);",
        "what was read of one opens places of the other",
        PIECES,
    ),
    Mutant(
        "pieces: a piece's number is not looked at",
        "src/cuda/remote/pass_on_rounds.cuh",
        "  if (h.piece == piece && h.pieces == pieces && h.begin == of.begin && h.end == of.end) return true;\n",
        "  if (h.pieces == pieces) return true;\n",
        "an earlier piece of the same step is taken for this one",
        WRONG_PIECE,
    ),
    Mutant(
        "pieces: the second place's count is not rebased at reset",
        PUTS,
        "counts->base[set][op][part][source] = signals[number];\n",
        "counts->base[set][op][part][source] = part == 1 ? 0 * signals[number] : signals[number];\n",
        "pieces of the new generation are read before they come",
        RESET_PIECES,
    ),
    Mutant(
        "pieces: credits are not rebased at reset",
        PUTS,
        "counts->base[set][op][part][source] = signals[number];\n",
        "counts->base[set][op][part][source] = part == kCreditSignal ? 0 * signals[number] : signals[number];\n",
        "credits of the old generation open places of the new one",
        RESET_PIECES,
    ),
    Mutant(
        "pieces: a reset does not wait for credits that are under way",
        CARRIER,
        "  ++*of_signal(k.puts->posted, k, step, op, kCreditSignal, peer);\n",
        "",
        "one that lands later counts in the new generation, or the reset waits for what was never posted",
        LATE_PIECE,
    ),
    Mutant(
        "pieces: errors are not looked at",
        "src/cuda/remote/pass_on_rounds.cuh",
        "      look_for_carrier_errors(k, step, phase);\n",
        "",
        "a broken link is only seen by its silence, when the timeout is over",
        f"{ERROR} and pieces",
    ),
    Mutant(
        "hooks: a row of many tokens is counted before it is placed",
        "src/cuda/large/receive.cuh",
        "#pragma unroll 1\n    for (std::uint32_t begin = 0; begin < k_.payload_bytes;",
        "    if constexpr (kHooks) HookWords<kHooks>::count_placed(a_, r.out_row, a_.hooks.row_units), __nanosleep(100000);\n"
        "#pragma unroll 1\n    for (std::uint32_t begin = 0; begin < k_.payload_bytes;",
        "a block's word is raised while its last row is being stored",
        "test_hooks_of_large_steps",
        "_cuda",
    ),
    Mutant(
        "hooks: a row of many tokens in pieces is counted before it is placed",
        "src/cuda/rounds/large_recv.cuh",
        "    bulk_await_stored<1>();\n    count(before_);\n",
        "    bulk_await_stored<1>();\n    count(last_);\n",
        "a block's word is raised before the bulk copy of its last row",
        HOOKS,
        "_cuda",
    ),
    Mutant(
        "hooks: words of the last step stay",
        "src/cuda/extras/hooks.cu",
        "  if (at < count) words[at] = 0;\n",
        "  if (at < count && count == 0) words[at] = 0;\n",
        "memory that had words has those of an earlier step, which are raised",
        HOOKS,
        "_cuda",
    ),
    Mutant(
        "hooks: padding between experts is not counted in rounds",
        "src/cuda/rounds/large_recv.cuh",
        "zero_padding<kHooks>(",
        "zero_padding<false>(",
        "a block with padding is never raised",
        HOOKS,
        "_cuda",
    ),
]
