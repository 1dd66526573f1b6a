"""Makes device="cuda" run on a CPU, for the ranks of tests/emulation.

pplx_comm._cuda is the one that tests/emulation builds, and the tensors are the CPU's, which is its GPU. Each call waits for what it
launched, and raises what went wrong with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import chaos_cases
import copies
import failure_cases
import gpu_cases
import open_step_cases
import outcomes
import pieces_cases
import placement_cases
import rank_cases
import torch
import training_cases
from cases import Case
from cases import in_pieces as in_pieces_of

import bench
from pplx_comm import _core, accounts, all_to_all, dump
from pplx_comm.device import cuda
from pplx_comm.device.session import Session
from pplx_comm.device.steps import Steps
from pplx_comm.gpus import cuda_module
from pplx_comm.wiring import config, nvshmem
from pplx_comm.wiring.compare import agree

_opened = rank_cases.open_all_to_all
_LAUNCHING = ("dispatch", "dispatch_recv", "combine", "combine_recv", "release")
_synchronize: Any = None


class EmulatedStreams(open_step_cases.Streams):
    """Those of tests/emulation/streams.h. PyTorch knows nothing of them: what kernels work on must be kept until settle()."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._all = library, [0]
        self._library.pplx_emulation_stream.restype = ctypes.c_void_p
        self.current = 0
        self.capturing = False

    def new(self) -> int:
        self._all.append(self._library.pplx_emulation_stream())
        return self._all[-1]

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def wait(self, stream: int, other: int) -> None:
        assert self._library.pplx_emulation_wait(ctypes.c_void_p(stream), ctypes.c_void_p(other)) == 0

    def after_copies(self, stream: int) -> None:
        pass

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert to.shape == source.shape and to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous()
        self._library.pplx_emulation_copy(
            ctypes.c_void_p(self.current), ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(source.data_ptr()),
            ctypes.c_size_t(to.nbytes),
        )  # fmt: skip

    @contextlib.contextmanager
    def capture(self, stream: int) -> Iterator[list[int]]:
        captured = list[int]()
        graph = ctypes.c_void_p()
        self._library.pplx_emulation_begin_capture(ctypes.c_void_p(stream))
        self.capturing = True
        with self.on(stream):
            yield captured
        self.capturing = False
        error = self._library.pplx_emulation_end_capture(ctypes.c_void_p(stream), ctypes.byref(graph))
        assert error == 0 and graph.value, f"the capture failed: {error}"
        captured.append(graph.value)

    def replay(self, graph: int, stream: int) -> None:
        self._library.pplx_emulation_replay(ctypes.c_void_p(stream), ctypes.c_void_p(graph))

    def settle(self) -> None:
        for stream in self._all:
            self._library.pplx_emulation_synchronize(ctypes.c_void_p(stream))


def _waiting(launch: Any, streams: EmulatedStreams) -> Any:
    """On the default stream its kernel has ended when it returns: PyTorch reuses a CPU tensor's memory at once, not behind a
    stream's work."""

    def waited(core: Any, *args: Any) -> Any:
        result = launch(core, *args)
        if streams.current == 0:
            _synchronize()
        return result

    return waited


def _checking(call: Any, streams: EmulatedStreams) -> Any:
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        result = call(self, *args, **options)
        if streams.current == 0 and isinstance(self.device, cuda.Cuda):
            self.check("check")
        return result

    return checked


def near(rank: int, world: int) -> set[int]:
    """Reads PPLX_EMULATION_NEAR: the peers that a rank's stores reach by the stand-in. "odd": those whose number is odd where its own is
    even, and the other way. "one way": all, but for odd ranks, whose stores reach no peer. "across": only those of the other half.
    Not set: no peer of two ranks, else "odd"."""
    others = set(range(world)) - {rank}
    return {
        "none": set[int](),
        "all": others,
        "odd": {peer for peer in others if peer % 2 != rank % 2},
        "one way": set[int]() if rank % 2 else others,
        "across": {peer for peer in others if peer * 2 // world != rank * 2 // world},
    }[os.environ.get("PPLX_EMULATION_NEAR", "odd" if world > 2 else "none")]


class StandIn(nvshmem.Library):
    """In NVSHMEM's place: memory that the ranks map, and tests/emulation/network.cpp, which refuses puts to peers that stores reach."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library

    def start(
        self, control: Any, gpu: int, nbytes: int, given: Any, timeout: float, mapped: list[int], looks: bool,
        queue: int = nvshmem.QUEUE,
    ) -> nvshmem.Reach:  # fmt: skip
        mine = {"near": sorted(near(control.rank, control.world_size)) if looks else [], "mapped": mapped}
        answers = agree(control, "emulation: reach", mine, timeout)
        reaches = ([set(answer[name]) if answer else set() for answer in answers] for name in ("mapped", "near"))
        return nvshmem.Reach([*range(control.world_size)], *reaches)

    def segment(self, control: Any, gpu: int, nbytes: int, given: Any, reach: nvshmem.Reach, timeout: float) -> nvshmem.Segment:
        """Its memory was somebody else's before: it is full of ones."""
        answers = agree(control, "emulation: symmetric memory", {"nbytes": nbytes}, timeout)
        needed = max(answer["nbytes"] for answer in answers if answer is not None)
        memory = nvshmem.kernels().SharedMemory
        own = memory(0, needed, "symmetric memory")
        ctypes.memset(own.address, 1, needed)
        fds = [own.descriptor()]
        mapped = {control.rank: own}
        direct = reach.mapped[control.rank] | reach.near_of(control.rank) if reach.any_near else set()
        try:
            for rank, received in control.share_fds(fds, "emulation: symmetric memory").items():
                mapped[rank] = memory.from_descriptor(0, received[0], needed)
                os.close(received[0])
                if rank not in direct:
                    self._library.pplx_emulation_open_window(
                        ctypes.c_void_p(own.address), ctypes.c_uint64(needed), ctypes.c_uint32(rank),
                        ctypes.c_void_p(mapped[rank].address),
                    )  # fmt: skip
        finally:
            os.close(fds[0])

        def close(landed: bool) -> None:
            self._library.pplx_emulation_close_windows(ctypes.c_void_p(own.address))
            mapped.clear()

        return nvshmem.Segment(own.address, own.nbytes, reach.pes, {rank: mapped[rank].address for rank in direct}, None, close)


def use(module: str) -> None:
    """From now on device="cuda" is that."""
    global _synchronize
    if _synchronize is not None:
        return
    gpu_cases.use_module(module)
    [instruments] = Path(module).parent.glob("_instruments_cuda*.so")
    bench._instruments_cuda = gpu_cases.load_module("bench._instruments_cuda", str(instruments))
    library = ctypes.CDLL(module)
    streams = EmulatedStreams(library)
    [carrier] = Path(module).parent.glob("_nvshmem*.so")
    carried, carrier_library = gpu_cases.load_module("pplx_comm._nvshmem", str(carrier)), ctypes.CDLL(str(carrier))
    rebase = carried.Exchange.rebase

    def rebased(core: Any) -> None:
        carrier_library.pplx_emulation_forget_landed()
        rebase(core)

    carried.Exchange.rebase = rebased
    setattr(nvshmem, "kernels", lambda: carried)  # noqa: B010
    setattr(nvshmem, "library", StandIn(carrier_library))  # noqa: B010

    def synchronize() -> None:
        for each in (library, carrier_library):
            each.pplx_emulation_synchronize(ctypes.c_void_p(0))

    _synchronize = synchronize

    def on_cpu(*args: Any) -> Session:
        return replace(Session(*args), device=torch.device("cpu"))

    setattr(all_to_all, "Session", on_cpu)  # noqa: B010
    for exchange in (cuda_module().Exchange, carried.Exchange):
        for name in ("dispatch", "combine", "release"):
            setattr(exchange, name, _waiting(getattr(exchange, name), streams))
    for name in _LAUNCHING:
        setattr(Steps, name, _checking(getattr(Steps, name), streams))
    setattr(cuda, "raw_stream", lambda device: streams.current)  # noqa: B010
    setattr(cuda, "capturing", lambda: streams.capturing)  # noqa: B010
    setattr(open_step_cases, "streams", streams)  # noqa: B010
    setattr(open_step_cases, "gpu_of", lambda me: "cuda")  # noqa: B010
    setattr(gpu_cases, "gpu_of", lambda me: torch.device("cpu"))  # noqa: B010
    setattr(config, "device_index", lambda device: 0)  # noqa: B010
    setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())  # noqa: B010
    setattr(torch.cuda, "set_device", lambda device: None)  # noqa: B010
    setattr(torch.cuda, "current_device", lambda: 0)  # noqa: B010
    setattr(torch.cuda, "device_count", lambda: 1)  # noqa: B010
    setattr(copies, "reserve", lambda: None)  # noqa: B010
    setattr(gpu_cases, "settle", lambda *_: _synchronize())  # noqa: B010
    setattr(gpu_cases, "exchange", rank_cases.exchange)  # noqa: B010
    users = (rank_cases, failure_cases, chaos_cases, pieces_cases, training_cases, gpu_cases, placement_cases)
    for user in users:
        user.open_all_to_all = _open


def _open(me: Any, case: Case, **options: Any) -> Any:
    """Emulated thread blocks take their time on a busy machine, so where nothing waits for a step's timeout, which has 20 s on a
    GPU, it is long. Mutants are in a hurry."""
    timeout = options.get("timeout", 20.0)
    if timeout >= 20.0:
        timeout = float(os.environ.get("PPLX_TEST_EMULATED_TIMEOUT", 120.0))
    return _opened(me, case, **{**options, "timeout": timeout, "device": "cuda"})


def call(me: Any, module: str, name: str, *args: Any, **options: Any) -> Any:
    """A case of the other modules ("rank_cases:exchange")."""
    use(module)
    where, _, function = name.partition(":")
    return getattr(importlib.import_module(where), function)(me, *args, **options)


@contextlib.contextmanager
def _whole(tokens: int) -> Iterator[None]:
    """Only steps of at most `tokens` tokens a rank are never cut."""
    fresh = _core.Config

    def small() -> _core.Config:
        config = fresh()
        config.whole_tokens = tokens
        return config

    setattr(_core, "Config", small)  # noqa: B010
    try:
        yield
    finally:
        setattr(_core, "Config", fresh)  # noqa: B010


def in_pieces(me: Any, module: str, whole: int, name: str, case: Case, *args: Any, **options: Any) -> Any:
    """A case in pieces, of which only steps of `whole` tokens a rank are never cut."""
    use(module)
    with _whole(whole):
        return call(me, module, name, in_pieces_of(case, on_gpu=True), *args, **options)


def all_in_pieces(me: Any, module: str, whole: int, name: str, cases: list[Case], *args: Any) -> Any:
    """The same for several cases at once."""
    use(module)
    with _whole(whole):
        return call(me, module, name, [in_pieces_of(case, on_gpu=True) for case in cases], *args)


def by_large(me: Any, module: str, case: Case) -> list[int]:
    """How many of a case's dispatches and combines must have gone by the large kernels on this rank: they have."""
    use(module)
    with rank_cases.open_all_to_all(me, case) as a2a:
        runner = rank_cases.Runner(me, case, a2a)
        runner.run()
        stats = a2a.stats()
        steps = [step for step in runner.steps if len(step.tokens[me.rank].ids) > 0]
        combined = [step for step in steps if not step.released]
        dispatched = [step for step in steps if len(step.tokens[me.rank].ids) >= 2 * stats["large_tokens"]]
        for name, wanted in (("large_dispatches", len(dispatched)), ("large_combines", len(combined))):
            outcomes.must(stats[name] >= wanted, name, stats[name], "of", wanted)
        return [len(dispatched), len(combined)]


def explained(me: Any, module: str, case: Case) -> list[list[dict[str, Any]]]:
    """explain() of one token, and of max_tokens, which dump shows too."""
    use(module)
    with rank_cases.open_all_to_all(me, case) as a2a:
        outcomes.mistake(lambda: a2a.explain(case.max_tokens + 1), "more than")
        found = [a2a.explain(tokens) for tokens in (1, case.max_tokens)]
        said = "\n".join(dump.details(accounts.jobs([accounts.own()])[me.comm.control.job][me.rank]))
        for tokens, launch in ((1, found[0][0]), (case.max_tokens, found[1][1])):
            outcomes.must(f"{launch['call']} of {tokens} tokens: {launch['kernel']}, " in said, said)
        return found


def across_by_large(me: Any, module: str, case: Case, apart: list[tuple[int, int]]) -> list[int]:
    """A case of which all dispatches and combines go by the large kernels on this rank, whose remote peers it returns. apart: see
    gpu_cases.unreachable; all ranks are of one node then."""
    use(module)
    where = {"node_size": None} if apart else {}
    with gpu_cases.unreachable(me, apart), rank_cases.open_all_to_all(me, case, **where) as a2a:
        runner = rank_cases.Runner(me, case, a2a)
        runner.run()
        stats, combined = a2a.stats(), sum(not step.released for step in runner.steps)
        outcomes.must(
            stats["large_dispatches"] >= case.steps and stats["large_combines"] >= combined > 0, "by the large kernels:", stats
        )
        return list(a2a._steps.session.wiring.peers.remote)


def gdrcopy_is_used(me: Any, module: str, case: Case) -> bool:
    """A case, and whether its arrival words were where the library of that name could write."""
    use(module)
    ctypes.CDLL(os.environ["PPLX_TEST_GDRCOPY"])  # dlopen() finds what is loaded by its name
    rank_cases.exchange(me, case)
    with _open(me, case) as a2a:
        return bool(a2a._steps.device.core.arrivals_on_gpu)
