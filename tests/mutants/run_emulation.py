"""Builds mutants of what kernels promise the proxy, and a carrier that they drive; runs the emulation's tests on each, and says who
was caught.

    python tests/mutants/run_emulation.py              all
    python tests/mutants/run_emulation.py signal       those whose names have one of these words

A mutant is of one of the emulation's modules in build/dev, in which the files that depend on the mutant's own are compiled again. Exit code
1 if one survives, or no longer applies.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import run

TARGETS = {"_nvshmem": "pplx_emulated_carrier", "_cuda": "pplx_emulation"}
WORK = run.ROOT / "build" / "mutants-emulation"
COPIED = ("proxy", "src", "tests/emulation")
TESTS = "tests/emulation/test_emulation.py"
LIMIT = 300.0

CARRIER, PUTS, NETWORK = "src/cuda/carrier.cuh", "src/cuda/puts.cpp", "tests/emulation/network.cpp"
REMOTE, ROUNDS = "src/cuda/remote.cuh", "src/cuda/remote_rounds.cuh"


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    why: str
    tests: str  # for pytest -k
    module: str = "_nvshmem"


SHAPES, NEAR, RESET = "random_shapes_by_kernels", "near_peers_are_mapped", "test_reset and nvshmem"
PROXY = "test_random_shapes and tcp"
PIECES = "test_pieces_by_kernels"
RESET_PIECES = "test_pieces_after_a_reset and nvshmem"
LATE_PIECE, WRONG_PIECE = "a_piece_that_lands_after_its_generation", "a_piece_that_is_not_the_next"
HOOKS = "test_hooks_of_pieces and mapped and not resident and not graph"
DEALT = "bulk_copies_of_sums or test_bulk_copies_of_many_chunks or test_long_rows_of_many"
REPLICAS, MIXED = "test_replicas_in_pieces and 2-2-mapped", "replicas_of_which_one_has_many and ragged-2-mapped"

MUTANTS = [
    Mutant(
        "signal before data",
        NETWORK,
        "    pieces.insert(pieces.begin(), Piece{0, 0});",
        "    pieces.insert(pieces.end(), Piece{0, 0});",
        "a carrier whose signal overtakes its data would pass every test",
        SHAPES,
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
        "    return carrier::left(k, peer, context_of(k, step, op)) && (",
        "    return true || (",
        "a carrier that still reads a block sends the next step's rows",
        SHAPES,
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
        "pieces: signal before data",
        NETWORK,
        "    pieces.insert(pieces.begin(), Piece{0, 0});",
        "    pieces.insert(pieces.end(), Piece{0, 0});",
        "a carrier whose signal overtakes its data would pass every test",
        PIECES,
    ),
    Mutant(
        "pieces: a credit is given too early",
        "src/cuda/rounds.cuh",
        "  if (first) more += kAllParts - units + ",
        "  if (first) more += kAllParts - units + (units > 1 ? 1 : 0) + ",
        "a place is written while its last rows are read",
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
        "src/cuda/passed_rounds.cuh",
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
        "hooks: a row of a round is counted before it is placed",
        "src/cuda/receive_rounds.cuh",
        "  place_copies(a, r, arrived, quantised(k.c.wire) && part == k.parts - 1);\n",
        "  if (kHooks) count_placed(a, r.place, a.hooks.part_units), __nanosleep(100000);\n"
        "  place_copies(a, r, arrived, quantised(k.c.wire) && part == k.parts - 1);\n",
        "a block's word is raised while its last row is being stored",
        HOOKS,
        "_cuda",
    ),
    Mutant(
        "hooks: a row of many tokens is counted before it is placed",
        "src/cuda/many_recv.cuh",
        "    bulk_await_stored<1>();\n    count(before_);\n",
        "    bulk_await_stored<1>();\n    count(last_);\n",
        "a block's word is raised before the bulk copy of its last row",
        HOOKS,
        "_cuda",
    ),
    Mutant(
        "hooks: few tokens wait for the rows of the first round alone",
        "src/cuda/ready_rounds.cuh",
        "    if (!run.is_header && !written.are_written",
        "    if (!run.is_header && run.round == 0 && !written.are_written",
        "later rounds send rows that nobody has written",
        HOOKS,
        "_cuda",
    ),
    Mutant(
        "hooks: many tokens wait for the rows of the first round alone",
        "src/cuda/many_combine.cuh",
        "      if (!run.is_header && !rows.are_written",
        "      if (!run.is_header && run.round == 0 && !rows.are_written",
        "later rounds send rows that nobody has written",
        HOOKS,
        "_cuda",
    ),
    Mutant(
        "hooks: the receive half of a combine does not wait for rows",
        "src/cuda/launch.cpp",
        "  a.ready = {outputs.ready, outputs.ready_value};\n",
        "  a.ready = {given.ready, given.ready_value};\n",
        "it sends rows of later rounds that nobody has written",
        "written_behind_the_send_half",
        "_cuda",
    ),
    Mutant(
        "hooks: words of the last step stay",
        "src/cuda/hooks.cu",
        "  if (at < count) words[at] = 0;\n",
        "  if (at < count && count == 0) words[at] = 0;\n",
        "memory that had words has those of an earlier step, which are raised",
        HOOKS,
        "_cuda",
    ),
    Mutant(
        "hooks: padding between experts is not counted in rounds",
        "src/cuda/rounds_heard.cuh",
        "zero_padding<kHooks>(",
        "zero_padding<false>(",
        "a block with padding is never raised",
        HOOKS,
        "_cuda",
    ),
    Mutant(
        "replicas: rows are of the first tokens",
        "src/cuda/many_send.cuh",
        "      const std::uint64_t given = token_of<!kPieces>(k_, plan_.bounds[chunk_ % 2].first + token_);\n",
        "      const std::uint64_t given = plan_.bounds[chunk_ % 2].first + token_;\n",
        "all replicas send the tokens of the first, under the names of their own",
        REPLICAS,
        "_cuda",
    ),
    Mutant(
        "replicas: ids are of the first tokens",
        "src/cuda/round_plan.cuh",
        "    loaded.load<true>(a_, chunk);\n",
        "    loaded.load<false>(a_, chunk);\n",
        "tokens go where others were to go",
        REPLICAS,
        "_cuda",
    ),
    Mutant(
        "replicas: a plan keeps the weights of its own tokens alone",
        "src/cuda/many_replicas.cuh",
        "    if (a.weights != nullptr) a.plan.weights[i] = a.weights[i];\n",
        "    if (a.weights != nullptr && k.slice.has(k.top_k.divide(i))) a.plan.weights[i] = a.weights[i];\n",
        "a caller who asks a plan for its weights gets what the memory held",
        "test_plans_of_replicas_in_pieces",
        "_cuda",
    ),
    Mutant(
        "replicas: ids of the last chunk are not compared",
        "src/cuda/many_plan.cuh",
        "    if (k.slice.of > 1) digest_chunk(a, number);\n",
        "    if (k.slice.of > 1 && number + 1 < a.chunks) digest_chunk(a, number);\n",
        "a replica that passes other ids there goes unnoticed",
        "test_replicas_apart_in_pieces and ids and mapped",
        "_cuda",
    ),
    Mutant(
        "replicas: digests add up over steps",
        "src/cuda/many_plan.cuh",
        "    if (threadIdx.x == 0) *a.pieces.digest = 0;\n",
        "    if (threadIdx.x == 0) *a.pieces.digest += 0;\n",
        "one that counts afresh, since it has few tokens, is said to differ",
        MIXED,
        "_cuda",
    ),
    Mutant(
        "replicas: the tokens of all decide on the kernel of a dispatch",
        "src/cuda/launch.cpp",
        "  if (a.own < common_.word_rows) return false;",
        "  if (a.tokens < common_.word_rows) return false;",
        "its combine, which goes by a rank's own, waits for rows of another kind",
        MIXED,
        "_cuda",
    ),
    Mutant(
        "replicas: theirs are taken before all own are added up",
        "src/cuda/combine_many_pieces.cu",
        "    const bool good = a.recv && combiner.receive_rounds();\n",
        "    if (!kPlain && a.recv && k.slice.of > 1) combiner.take_from_replicas();\n"
        "    const bool good = a.recv && combiner.receive_rounds();\n",
        "replicas wait for each other",
        REPLICAS,
        "_cuda",
    ),
    Mutant(
        "replicas: headers of finished rows are not looked at",
        "src/cuda/combine_many_pieces.cu",
        "    if (!kPlain && a.recv && k.slice.of > 1) receive_slice_headers(a, step);\n",
        "",
        "one that accumulates beside one that does not goes unnoticed",
        "test_replicas_apart_in_pieces and accumulate and mapped",
        "_cuda",
    ),
    Mutant(
        "replicas: a token's floats stay where they came",
        "src/cuda/many_combine.cuh",
        "take_tail<true>(a_, step_, token, n, row, rank);",
        "take_tail<false>(a_, step_, token, n, row, rank);",
        "the others wait for them",
        "test_gradients_of_replicas_in_pieces and recipe and mapped",
        "_cuda",
    ),
    Mutant(
        "replicas: the last tile of a finished row is not taken",
        "src/cuda/many_combine.cuh",
        "    const std::uint32_t strips = (k_.row_bytes + kSumTileBytes - 1) / kSumTileBytes, units",
        "    const std::uint32_t strips = max(1u, k_.row_bytes / kSumTileBytes), units",
        "the end of long rows is what the output held",
        "test_long_rows_of_replicas_in_pieces",
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


def commands(module: str) -> tuple[list[tuple[Path, list[str]]], list[str]]:
    """How each object of the module is compiled, by source; and how they are linked."""
    compiled = []
    for entry in json.loads((run.BUILD / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        if "-o" in words and f"{TARGETS[module]}.dir/" in words[words.index("-o") + 1]:
            compiled.append((Path(entry["file"]), words))
    first = compiled[0][1]
    compiler = first[: next(i for i, word in enumerate(first) if word.startswith("-"))]
    return compiled, [*(word for word in compiler if not word.endswith("ccache")), "-shared"]


def depends(source: Path, file: Path, root: Path) -> bool:
    """Whether a source includes a file, directly or not, or is it."""
    seen, todo = set[Path](), [source.resolve()]
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', at.read_text(), re.M):
            places = [folder / name for folder in (at.parent, root, root / "src", root / "tests")]
            todo += [place.resolve() for place in places if place.is_file()]
    # The carrier's header is named by a macro.
    return file.resolve() in seen


def build(mutant: Mutant, folder: Path) -> None:
    """The three modules of tests/emulation, of which one has the mutant."""
    for name in COPIED:
        shutil.copytree(run.ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / mutant.file
    file.write_text(file.read_text().replace(mutant.old, mutant.new))
    compiled, link = commands(mutant.module)
    objects: list[Path] = []
    for number, (source, words) in enumerate(compiled):
        own = folder / source.relative_to(run.ROOT)
        at = words.index("-o") + 1
        if not depends(own, file, folder):
            objects.append(run.BUILD / words[at])
            continue
        objects.append(folder / f"{number}.o")
        # Warnings are the tree's own; what it was configured with stays where it is.
        changed = [word if "/build/" in word or ".venv" in word else word.replace(str(run.ROOT), str(folder)) for word in words]
        changed[at] = str(objects[-1])
        run.checked(changed)
    for module in (run.BUILD / "tests" / "emulation").glob("*.so"):
        if not module.name.startswith(f"{mutant.module}."):
            (folder / module.name).symlink_to(module)
            continue
        run.checked([*link, *map(str, objects), "-latomic", "-ldl", "-o", str(folder / module.name)])


def main(words: list[str]) -> int:
    problems = [
        f"{m.name}: its old text stands in {m.file} {n} times, must be once"
        for m in MUTANTS
        if (n := (run.ROOT / m.file).read_text().count(m.old)) != 1
    ]
    if problems:
        print("\n".join(problems))
        return 1
    run.checked(["cmake", "--build", str(run.BUILD), "--target", "pplx_emulation"])
    survivors, tried, begun = 0, 0, time.monotonic()
    for mutant in MUTANTS:
        if words and not any(word.lower() in mutant.name.lower() for word in words):
            continue
        shutil.rmtree(WORK, ignore_errors=True)
        started = time.monotonic()
        build(mutant, WORK)
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", TESTS, "-k", mutant.tests]
        code, output = run.call(["env", f"PPLX_TEST_EMULATION={WORK}", *pytest], LIMIT, run.ROOT)
        caught = code in (None, 1)
        lines = [line.removeprefix("E").strip() for line in output.splitlines()]
        said = [line for line in lines if re.match(r"a put |outcomes.Failed|\S*Error: ", line)] or ["it hangs"]
        survivors += not caught
        tried += 1
        verdict = said[-1][:110] if caught else f"passes (exit {code}), though {mutant.why}"
        print(f"{'caught' if caught else 'SURVIVES':9} {mutant.name} ({time.monotonic() - started:.0f} s): {verdict}", flush=True)
    shutil.rmtree(WORK, ignore_errors=True)
    print(f"{tried - survivors} of {tried} mutants caught in {time.monotonic() - begun:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except run.Broken as problem:
        print(problem)
        sys.exit(2)
