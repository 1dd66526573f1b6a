"""Bugs of the CUDA kernels, one each, that tests/gpu/test_fuzz.py must catch. Builds and runs them, on a machine with GPUs.

    python tests/mutants/run_cuda.py                    all
    python tests/mutants/run_cuda.py release            those whose names have one of these words

All have a verdict, see tests/README.md. Soaks take three times the steps of test_fuzz.py alone. Mutants of hooks and of blocks in pieces are run_emulation.py's.

Works on copies of the sources in build/gpu-mutants, built side by side (each wants about 4 cores and 3 GiB), run one after the other.
Exit code 1 if one survives, or no longer applies, or if the tests fail without.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import run
from mutants import Mutant

ROOT = run.ROOT
WORK = ROOT / "build" / "gpu-mutants"
RUN_LIMIT = 900.0  # seconds
CORES_OF_A_BUILD = 4
TESTS = ROOT / "tests" / "gpu" / "test_fuzz.py"

DEVICE = "src/cuda/common/ptx.cuh"
WORDS = "src/cuda/common/wait.cuh"
DISPATCH_RECV = "src/cuda/decode/dispatch_recv.cuh"
RECEIVED_COUNTS = "src/cuda/plan/counts.cuh"
REPLICAS_AGREE = "src/cuda/remote/dispatch_extras.cuh"
ARRIVALS = "src/cuda/common/arrival.cuh"
CLAIMS = "src/cuda/common/step.cuh"
DISPATCH_SEND = "src/cuda/decode/dispatch_send.cuh"
COMBINE_RECV = "src/cuda/decode/combine_recv.cuh"
SLICES = "src/cuda/extras/replicas.cuh"
CLOSED = "src/cuda/common/step.cuh"
REMOTE = "src/cuda/remote/proxy.cuh"
COMBINE = "src/cuda/decode/combine_kernel.cuh"
EXCHANGE = "src/cuda/host/exchange.cpp"
SENT_SUMS = "src/cuda/large/send_sums.cuh"
DEALT_SUMS = "src/cuda/large/receive_sums.cuh"

MUTANTS = [
    Mutant(
        "the release is relaxed",
        DEVICE,
        "st.release.sys.global.u64",
        "st.relaxed.sys.global.u64",
        "an arrival word overtakes the row that it announces: they take different ways through the caches and links",
    ),
    Mutant(
        "the acquire is a plain load",
        DEVICE,
        "ld.acquire.sys.global.u64",
        "ld.global.u64",
        "a plain load may be served from L1, which never hears of what a peer wrote",
    ),
    Mutant(
        "a row is read before its word",
        DISPATCH_RECV,
        """    if (!all_of_warp(good)) return false;
    part.load(k, part.wanted);
    return true;
""",
        """    return all_of_warp(good);
""",
        "what a load that is not ordered behind its word may see: the row of an earlier step",
    ),
    Mutant(
        "a row of a dispatch is not looked at for blank",
        DISPATCH_RECV,
        "not_there |= (is_blank(payload[j]) ? 1u : 0u) << j;",
        "not_there |= (is_blank(payload[j]) ? 0u : 0u) << j;",
        "what has not come yet is placed as it is",
    ),
    Mutant(
        "a place of a dispatch is not made blank again",
        DISPATCH_RECV,
        "if (full || (wanted >> j & 1) != 0) make_blank(to + j * 512);",
        "if (j != 0 && (full || (wanted >> j & 1) != 0)) make_blank(to + j * 512);",
        "the row of an earlier step is taken for this one's",
    ),
    Mutant(
        "a row that looks blank gets no word",
        DISPATCH_SEND,
        "if (nth >= unit.rows(token) || (!unit.by_word[token][nth] && !unit.looks_blank[token])) continue;",
        "if (nth >= unit.rows(token) || !unit.by_word[token][nth]) continue;",
        "it is waited for in vain",
    ),
    Mutant(
        "rows beyond those that show get no word",
        DISPATCH_SEND,
        "unit.by_word[nth][place] = t.row[i] >= k.showing_rows;",
        "unit.by_word[nth][place] = false;",
        "they are waited for in vain",
    ),
    Mutant(
        "the tag of a route is not looked at",
        DISPATCH_RECV,
        "(is_tagged(k, route, step) ? 0u : 1u) << kRoute;",
        "(is_tagged(k, route, step) ? 0u : 0u) << kRoute;",
        "a row goes where one of an earlier step went",
    ),
    Mutant(
        "a share is sent by two",
        CLAIMS,
        "return atomicExch(shares_of(k, op) + share, step) != step;",
        "return atomicExch(shares_of(k, op) + share, step) != step + 1;",
        "a place that its reader has made blank is written again, and the next step finds it there",
    ),
    Mutant(
        "the step of a row is not looked at",
        WORDS,
        "match == Match::Exact ? word == arrival_word(k.generation, step)",
        "match == Match::Exact ? word != 0",
        "a row of an earlier step is taken for this one's",
    ),
    Mutant(
        "the step of a count is not looked at",
        ARRIVALS,
        "return vec16.w == tag_of(k.generation, step);",
        "return vec16.w != kBlank;",
        "rows are placed by the counts of an earlier step",
    ),
    Mutant(
        "a piece is not looked at for blank",
        ARRIVALS,
        "return v.w == kBlank;",
        "return v.w != v.w;",
        "what has not come yet is added as it is: NaNs",
    ),
    Mutant(
        "a piece is stored in halves",
        DEVICE,
        """  asm volatile("{\\n\\t.reg .b128 vec16;\\n\\tmov.b128 vec16, {%1, %2};\\n\\tst.relaxed.sys.global.b128 [%0], vec16;\\n\\t}" ::"l"(to),
               "l"(low), "l"(high)
               : "memory");
""",
        """  store_relaxed(to + 8, high);
  __nanosleep(500);
  store_relaxed(to, low);
""",
        "the half that says that the piece has come is there before the other",
    ),
    Mutant(
        "a place is not made blank again",
        COMBINE_RECV,
        "if (has(j)) make_blank(row[i] + begin + j * 512);",
        "if (has(j) && begin == kNone) make_blank(row[i] + begin + j * 512);",
        "the row of an earlier step is taken for this one's",
    ),
    Mutant(
        "a place is made blank before its row is read",
        COMBINE_RECV,
        "        strips.missing |= 1u << (i * kVectors + j);\n",
        """      {
        strips.missing |= 1u << (i * kVectors + j);
        make_blank(strips.row[i] + strips.begin + j * 512);
      }
""",
        "a row that came early is lost, and waited for in vain",
    ),
    Mutant(
        "what has come is read again",
        COMBINE_RECV,
        "      if (strips.row[i] == nullptr) continue;\n",
        """      if (strips.row[i] == nullptr) continue;
      for (int j = 0; j < kReceivedVectors; ++j)
        if (strips.has(j)) {
          make_blank(strips.row[i] + begin + j * 512);
          strips.v[i][j] = load_vec16(strips.row[i] + begin + j * 512);
        }
""",
        "a place that is blank already gives NaNs",
    ),
    Mutant(
        "only the first piece of a lane is waited for",
        COMBINE_RECV,
        "blank |= (is_blank(v[i][j]) ? 1u : 0u) << (i * kVectors + j);",
        "blank |= (j == 0 && is_blank(v[i][j]) ? 1u : 0u) << (i * kVectors + j);",
        "the other pieces of its strip travel on their own, and may come later",
    ),
    Mutant(
        "a run of sums is told of before it is stored",
        SENT_SUMS,
        "    if (threadIdx.x % 32 == 0) bulk_await_all_but<kPartsOut - 2>(but);\n",
        "",
        "the same, for sums",
    ),
    Mutant(
        "large rows leave no blanks",
        DEALT_SUMS,
        "(blank ? kMakeBlank : 0)",
        "0u",
        "a later step of few tokens takes them for its own",
    ),
    Mutant(
        "places are not blank at first",
        EXCHANGE,
        "set_now(heap.data() + from, 0xff, to - from, stream);",
        "set_now(heap.data() + from, 0, to - from, stream);",
        "the first rows of all are read before they come",
    ),
    Mutant(
        "a place of a replica's row is not made blank again",
        SLICES,
        "  arriving.make_places_blank();\n",
        "",
        "the finished row of an earlier step is taken for this one's",
    ),
    Mutant(
        "a replica's header is not compared",
        SLICES,
        "  if (h.flags != flags)\n",
        "  if (false)\n",
        "one that accumulates gets rows that others did not",
    ),
    Mutant(
        "replicas do not compare their ids",
        REPLICAS_AGREE,
        "same = same && own[i] == theirs[i];",
        "same = same && (i != 0 || own[i] == theirs[i]);",
        "a replica that passes other ids sends its slice of them, and no rank hears of it",
    ),
    Mutant(
        "the closed word is not obeyed",
        CLOSED,
        "at_once = !words.failed && may_take(k.c, words.by_set[set_of(k.c, step)], step);",
        "at_once = true;",
        "a step is written over one that is still open",
    ),
    Mutant(
        "this step's block is taken for the last one's",
        REMOTE,
        "last == arrival_word(k.generation, step) || is_seen_to_leave",
        "is_seen_to_leave",
        "a thread block that begins late sends nothing, and the step never ends",
    ),
    Mutant(
        "a step is closed too early",
        COMBINE,
        """    receive_combine<T, kMappedOnly, received_vectors(kSent)>(a, step, s);
    close_set(k, step);
  }
""",
        """    receive_combine<T, kMappedOnly, received_vectors(kSent)>(a, step, s);
  }
  if (a.send) close_set(k, step);
""",
        "a send half alone frees memory in which peers' rows are still waited for",
    ),
    Mutant(
        "a row is counted before it is placed",
        DISPATCH_RECV,
        """  place_copies(a, r, part, quantised(k.c.wire) && nth == k.parts - 1);
  if (nth == 0) place_words(a, r);
  if constexpr (kHooks) HookWords<kHooks>::count_placed(a, r.out_row, 1);
""",
        """  if constexpr (kHooks) HookWords<kHooks>::count_placed(a, r.out_row, 1);
  place_copies(a, r, part, quantised(k.c.wire) && nth == k.parts - 1);
  if (nth == 0) place_words(a, r);
""",
        "a kernel that waits for a block reads rows that are not there",
    ),
]


def nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def build_modules(sources: Path, build: Path, *targets: str, jobs: int = CORES_OF_A_BUILD) -> None:
    """Builds pplx_comm._cuda, ._nvshmem or both of these sources with PPLX_CUDA_FUZZ."""
    options = {
        "PPLX_CUDA": "ON",
        "PPLX_CUDA_FUZZ": "ON",
        "PPLX_NVSHMEM": "ON" if "_nvshmem" in targets else "OFF",
        "PPLX_IN_PLACE": "OFF",
        "PPLX_PYTHON_INTERPRETER": sys.executable,
        "CMAKE_CUDA_ARCHITECTURES": os.environ.get("PPLX_TEST_ARCHITECTURES", "native"),
    }
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = [
        "cmake",
        "-S",
        str(sources),
        "-B",
        str(build),
        *generator,
        *(f"-D{name}={value}" for name, value in options.items()),
    ]
    for command in (configure, ["cmake", "--build", str(build), "--target", *targets, "-j", str(jobs)]):
        subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def verdict(module: Path) -> tuple[bool, str]:
    """Returns True if the tests pass, else in which words they do not."""
    os.environ["PPLX_TEST_CUDA"] = str(module)
    os.environ["PPLX_TEST_VOLUME"] = "3"
    os.environ["PPLX_TEST_STEP_TIMEOUT"] = "4"  # lost data never comes, and every wait for it is a mutant's
    code, output = run.call([sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(TESTS)], RUN_LIMIT)
    if code is None:
        return False, f"hangs for {RUN_LIMIT:.0f} s"
    telling = [line.strip() for line in output.splitlines() if "Error" in line or "Timeout" in line or "differs" in line]
    if code not in (0, 1) or "skipped" in output.splitlines()[-1]:
        raise run.Broken(f"pytest did not run the tests:\n{output[-2000:]}")
    return code == 0, telling[-1] if telling else f"exit code {code}"


def prepare(number: int, mutant: Mutant | None) -> Path:
    """The module of a mutant, or of the tree as it is."""
    sources = WORK / str(number) / "sources"
    run.copy_sources(sources)
    if mutant is not None:
        file = sources / mutant.file
        file.write_text(file.read_text().replace(mutant.old, mutant.new))
    build = WORK / str(number) / "build"
    build_modules(sources, build, "_cuda")
    (module,) = build.glob("_cuda*.so")
    return module


def main(words: list[str]) -> int:
    mutants = run.named(MUTANTS, words)
    problems = run.check_list(MUTANTS, ROOT)
    if problems:
        print("\n".join(problems))
        return 1
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES_OF_A_BUILD)) as builders:
        modules = [builders.submit(prepare, number, mutant) for number, mutant in enumerate([None, *mutants])]
        passes, said = verdict(modules[0].result())
        print(f"{'passes' if passes else 'FAILS':9} test_fuzz.py on the tree as it is{'' if passes else ': ' + said}", flush=True)
        if not passes:
            builders.shutdown(cancel_futures=True)
            return 1
        survivors = 0
        for mutant, module in zip(mutants, modules[1:], strict=True):
            path = module.result()
            begun = time.monotonic()
            passes, said = verdict(path)
            survivors += passes
            outcome = f"test_fuzz.py passes, though {mutant.why}" if passes else said[:120]
            print(f"{'SURVIVES' if passes else 'caught':9} {mutant.name} ({time.monotonic() - begun:.0f} s): {outcome}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as problem:
        print(problem.output[-4000:])
        sys.exit(2)
    except run.Broken as problem:
        print(problem)
        sys.exit(2)
