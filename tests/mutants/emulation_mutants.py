"""Bugs of what kernels promise the proxy, of a carrier that they drive, and of the sums of many tokens: whole blocks.

run_emulation.py plants them. The other list is emulation_piece_mutants.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from mutants import Planted

CARRIER, PUTS, NETWORK = "src/cuda/carrier.cuh", "src/cuda/puts.cpp", "tests/emulation/network.cpp"
REMOTE = "src/cuda/remote.cuh"


@dataclass(frozen=True)
class Mutant(Planted):
    tests: str  # for pytest -k
    module: str = "_nvshmem"
    is_core: bool = False  # `make mutants` plants it, too
    kernels: tuple[str, ...] = ()  # the sources that the tests run, of those that have it; none: all


SHAPES, NEAR, RESET = "random_shapes_by_kernels", "near_peers_are_mapped", "test_reset and nvshmem"
ERROR = "a_carrier_with_an_error"
WHOLE = ("dispatch.cu", "combine.cu")
PROXY = "test_random_shapes and tcp"
DEALT = "bulk_copies_of_sums or test_bulk_copies_of_many_chunks or test_long_rows_of_many"

MUTANTS = [
    Mutant(
        "signal before data",
        NETWORK,
        "    pieces.insert(pieces.begin(), Piece{0, 0});",
        "    pieces.insert(pieces.end(), Piece{0, 0});",
        "a carrier whose signal overtakes its data would pass every test",
        SHAPES,
        is_core=True,
    ),
    Mutant(
        "a block goes before its last row",
        REMOTE,
        "lacking = (sizes.begin(last + 1) - rows) * each;",
        "lacking = (sizes.begin(last + 1) - rows) * each + (rows > 0 ? 1 : 0);",
        "the block is put while its last row, or strip, is being stored",
        SHAPES,
    ),
    Mutant(
        "a heap that was another's is not cleared",
        "src/cuda/exchange.cpp",
        "cudaMemsetAsync(heap.data(), 0, heap.bytes(), stream)",
        "cudaMemsetAsync(heap.data(), 0, 0 * heap.bytes(), stream)",
        "what an earlier AllToAll left in symmetric memory opens steps of this one",
        NEAR,
    ),
    Mutant(
        "weights count as combine does",
        "src/protocol/signals.h",
        "signal_of(op), source) :",
        "signal_of(op == Op::Weights ? Op::Combine : op), source) :",
        "weights open a combine that is not there",
        SHAPES,
    ),
    Mutant(
        "signal of the wrong set",
        CARRIER,
        "end - begin, signal_of(k, step, op, part, k.c.rank));\n",
        "end - begin, signal_of(k, step + 1, op, part, k.c.rank));\n",
        "with steps in flight one opens another one's rows",
        SHAPES,
        is_core=True,
        kernels=WHOLE,
    ),
    Mutant(
        "signal of the wrong peer",
        CARRIER,
        "end - begin, signal_of(k, step, op, part, k.c.rank));\n",
        "end - begin, signal_of(k, step, op, part, peer));\n",
        "the block of one source opens another one's place",
        SHAPES,
    ),
    Mutant(
        "count not rebased at reset",
        PUTS,
        "counts->base[set][op][part][source] = signals[number];\n",
        "counts->base[set][op][part][source] = part == 0 ? 0 * signals[number] : signals[number];\n",
        "what the old generation counted opens the first steps of the new one",
        RESET,
        is_core=True,
    ),
    Mutant(
        "a later part's count not rebased at reset",
        PUTS,
        "counts->base[set][op][part][source] = signals[number];\n",
        "counts->base[set][op][part][source] = part != 0 ? 0 * signals[number] : signals[number];\n",
        "rows of the new generation are read before they come",
        RESET,
    ),
    Mutant(
        "parts share a signal",
        CARRIER,
        "end - begin, signal_of(k, step, op, part, k.c.rank));\n",
        "end - begin, signal_of(k, step, op, part != 0 ? 1 : 0, k.c.rank));\n",
        "a count says how many have landed, not which",
        SHAPES,
    ),
    Mutant(
        "a later part's turn is not over",
        CARRIER,
        "  *put.turns = put.turn;\n  return true;\n",
        "  return true;\n",
        "the next step reads its rows before they come",
        SHAPES,
    ),
    Mutant(
        "a part is taken for the one before",
        REMOTE,
        "later_part_landed(k, step, op, peer, came)",
        "later_part_landed(k, step, op, peer, max(came, 2u) - 1)",
        "its own rows may still be under way",
        SHAPES,
    ),
    Mutant(
        "a part is put a row short",
        REMOTE,
        "min(rows, parts_of(k, op).begin(part + 1));\n",
        "min(rows, parts_of(k, op).begin(part + 1) - (part == 1 ? 1 : 0));\n",
        "its last row never comes",
        SHAPES,
    ),
    Mutant(
        "data overwritten before it left",
        CARRIER,
        "    if (carrier::left(k, peer, context_of(k, step, op)) && (",
        "    if (true || (",
        "a carrier that still reads a block sends the next step's rows",
        SHAPES,
        is_core=True,
        kernels=WHOLE,
    ),
    Mutant(
        "sets share their send blocks",
        "src/cuda/words.cuh",
        "k.heap.spaced_send_at(k.c, set, op, ",
        "k.heap.spaced_send_at(k.c, 0 * set, op, ",
        "a step in flight sends another one's rows",
        SHAPES,
    ),
    Mutant(
        "every step is its set's first",
        "src/protocol/signals.h",
        " / c.in_flight + 1;\n",
        " / c.in_flight * 0 + 1;\n",
        "headers of earlier steps open this one",
        SHAPES,
    ),
    Mutant(
        "errors are not looked at",
        CARRIER,
        "  if (const std::uint64_t error = carrier::error(k))\n",
        "  if (const std::uint64_t error = 0 * carrier::error(k))\n",
        "a broken link is only seen by its silence, when the timeout is over",
        f"{ERROR} and lost",
    ),
    Mutant(
        "errors are not looked at while blocks leave",
        CARRIER,
        "    look_for_carrier_errors(k, step, phase, peer);\n    return false;\n  });\n}\n",
        "    return false;\n  });\n}\n",
        "who waits for a block to leave waits for its timeout",
        f"{ERROR} and unheard and whole",
    ),
    Mutant(
        "part not waited for",
        REMOTE,
        "parts_of(k, op).part_of(row) + 1) != 0;\n",
        "parts_of(k, op).part_of(row / 2) + 1) != 0;\n",
        "rows are read while the network writes them",
        PROXY,
        "_cuda",
    ),
    Mutant(
        "part behind a gap is told of",
        REMOTE,
        "return __ffs(static_cast<int>(~(word & (kTelling - 1)))) - 1;",
        "return __popc(word & (kTelling - 1));",
        "the proxy sends rows that are not stored yet",
        PROXY,
        "_cuda",
    ),
    Mutant(
        "part completed meanwhile is forgotten",
        REMOTE,
        "    seen = now & ~kTelling;\n  }",
        "    return;\n  }",
        "who told of the parts before did not look again, and nobody else does",
        PROXY,
        "_cuda",
    ),
    Mutant(
        "two threads tell of parts",
        REMOTE,
        "  if ((seen & kTelling) != 0) return;\n",
        "",
        "the mail of fewer parts is stored over that of more",
        PROXY,
        "_cuda",
    ),
    Mutant(
        "part goes without its header",
        REMOTE,
        "* each + (part == 0 ? 1 : 0);\n",
        "* each;\n",
        "a peer reads the header of an earlier step",
        PROXY,
        "_cuda",
    ),
    Mutant(
        "last part lacks rows",
        REMOTE,
        "  if (last > 0 && lacking > 0) count_part(k, step, op, peer, last, lacking, each, RowsOfBlock(rows));\n",
        "",
        "a block that does not fill its last part never leaves",
        PROXY,
        "_cuda",
    ),
    Mutant(
        "all parts are passed on with the first",
        REMOTE,
        "pieces_word(k.generation, step, came));\n",
        "pieces_word(k.generation, step, all));\n",
        "other thread blocks read rows that have not come",
        PROXY,
        "_cuda",
    ),
    Mutant(
        "dealt: a place of the ring is taken while adders read it",
        "src/cuda/dealt_sums.cuh",
        "    if (place_.turn != 0) await_turn(ring_.used",
        "    if (place_.turn > 1u << 30) await_turn(ring_.used",
        "rows that come are added up in place of those that were there",
        DEALT,
        "_cuda",
    ),
    Mutant(
        "dealt: rows are asked for before they have come",
        "src/cuda/dealt_sums.cuh",
        "      const bool wanted = by_word && ",
        "      const bool wanted = false && by_word && ",
        "what lay there is added up",
        DEALT,
        "_cuda",
    ),
    Mutant(
        "dealt: the sum of own rows comes first",
        "src/cuda/dealt_sums.cuh",
        "static_cast<std::uint8_t>(__popc(peers & (own - 1)))",
        "std::uint8_t{0}",
        "three rows are rounded in another order",
        DEALT,
        "_cuda",
    ),
    Mutant(
        "dealt: a token without rows stays in the ring",
        "src/cuda/dealt_sums.cuh",
        "    if (first.own + first.peers == 0) leave();\n",
        "",
        "adders look at it for ever",
        DEALT,
        "_cuda",
    ),
    Mutant(
        "dealt: places are not made blank again",
        "src/cuda/dealt_sums.cuh",
        "(blank ? kMakeBlank : 0)",
        "(blank ? 0 : 0)",
        "a later step of few tokens takes their rows for its own",
        "test_bulk_copies_and_steps_of_few_in_turn",
        "_cuda",
    ),
    Mutant(
        "dealt: rows that show are taken for rows with words",
        "src/cuda/dealt_sums.cuh",
        "      if ((show & lanes) != 0)\n",
        "      if ((show & lanes) == ~0u)\n",
        "nobody waits for them",
        DEALT,
        "_cuda",
    ),
    Mutant(
        "dealt: two rows keep their sign of zero",
        "src/cuda/number.cuh",
        "__hadd2_rn(__hadd2_rn(x, y), zeros)",
        "__hadd2_rn(x, y)",
        "-0 and -0 are -0, where a sum begins with 0",
        DEALT,
        "_cuda",
    ),
    Mutant(
        "copies: a part's place is asked for while it leaves",
        "src/cuda/many_combine.cuh",
        "          bulk_await_stored<1>();  // the place",
        "          bulk_await_stored<3>();  // the place",
        "the peer gets what comes next",
        DEALT,
        "_cuda",
    ),
    Mutant(
        "copies: tiles come to memory that has not left",
        "src/cuda/many_combine.cuh",
        "    copies_ = copies;\n    if (threadIdx.x % 32 == 0) bulk_await_stored<0>();\n",
        "    copies_ = copies;\n",
        "the last parts of a run are overwritten by what is added up for the next one",
        "beside_rows_that_show",
        "_cuda",
    ),
]
