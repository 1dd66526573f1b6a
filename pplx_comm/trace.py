"""A timeline of what ranks do, for ui.perfetto.dev: one file, all ranks on rank 0's clock.

    pplx_comm.trace.start()                  # on every rank
    ...                                      # steps
    pplx_comm.trace.write(comm, "job.pftrace")

PPLX_COMM_TRACE=FILE does both without a change to the program, when a Communicator begins and closes. Ranks of one host append to
one file; files of several hosts are joined by `cat`. A rank that cannot have the file at once writes one of its own beside it.

A rank has a track for each of its threads, with the phases of a step (on a GPU their launches) and the products of MoE layers; on
a GPU one for each set of an AllToAll, with its kernels, replays among them; one for each NIC, with the writes that it was given;
and one with what the network said: a write has left, or a peer's is here, where an arrow ends that comes from its post.

Where pplx_comm._cuda_stages is installed (`make wheel-stages`, or a build with -DPPLX_CUDA_STAGES=ON) and tracing starts before
the process's first AllToAll on a GPU, that module's kernels run, which take a little longer: of the latest 32 steps each stage has
a track, with a slice from the first warp that came there to the last.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np

import pplx_comm._core as _core
from pplx_comm import perfetto
from pplx_comm.control import deadlines
from pplx_comm.control.plane import ControlPlane
from pplx_comm.errors import Error
from pplx_comm.log import log
from pplx_comm.settings import Watching, read

SPANS = 1 << 16
"""The latest that a rank keeps, of each kind: 4 MB."""
_SPAN = np.dtype([
    ("begun", "u8"), ("ended", "u8"), ("flow", "u8"), ("bytes", "u8"),
    ("what", "u4"), ("object", "u4"), ("step", "u4"), ("peer", "u4"), ("lane", "u4"), ("op", "u4"),
])  # fmt: skip
_PHASES = {1: "dispatch_send", 2: "dispatch_recv", 3: "combine_send", 4: "combine_recv", 5: "weights"}
_POSTED, _SENT, _ARRIVED, _KERNEL, _STAGE = 6, 7, 8, 9, 10
_CUDA = ("pplx_comm._cuda", "pplx_comm._cuda_stages", "pplx_comm._nvshmem")
_OPS = ("dispatch", "combine", "weights")
_NO_STEP = 0xFFFFFFFF
_PROBES = 8
"""How often a rank asks for rank 0's clock: the quickest answer counts."""

P = ParamSpec("P")
R = TypeVar("R")


class Traced(Protocol):
    """A Communicator."""

    rank: int
    control: ControlPlane


class Kernels(Protocol):
    """An AllToAll on a GPU."""

    def note_kernels(self) -> None: ...

    def tell_kernels(self) -> None: ...


class _Call(NamedTuple):
    name: str
    begun: int
    ended: int
    thread: int


class _Calls:
    """Spans of Python code."""

    on = False
    modules: ClassVar[set[str]] = set()
    """Those that note spans."""
    on_gpus: ClassVar[weakref.WeakSet[Kernels]] = weakref.WeakSet()
    found: ClassVar[deque[_Call]] = deque(maxlen=SPANS)
    begun = 0.0
    """The time of start(), as files have it."""


def start() -> None:
    """This process notes what it does from now on: a step costs a microsecond more."""
    _Calls.found.clear()
    _Calls.begun = time.time() - 0.01  # the kernel's time of a file is that of its latest tick
    load_stages()
    _Calls.modules.clear()
    _start_modules()
    for one in list(_Calls.on_gpus):
        one.note_kernels()
    _Calls.on = True


def load_stages() -> bool:
    """This process takes the module whose kernels note their stages, if there is one. False: it has the other one already."""
    if "pplx_comm._cuda" not in sys.modules:
        with contextlib.suppress(ImportError):
            import pplx_comm._cuda_stages  # noqa: F401
    return "pplx_comm._cuda_stages" in sys.modules


def add(one: Kernels) -> None:
    """A timeline has its kernels, too."""
    _Calls.on_gpus.add(one)
    if _Calls.on:
        _start_modules()  # its module may have been loaded since
        one.note_kernels()


def drop(one: Kernels) -> None:
    """Before it closes."""
    _Calls.on_gpus.discard(one)
    one.tell_kernels()


def stop() -> None:
    """Notes no more. write() still has what was noted."""
    for one in list(_Calls.on_gpus):
        one.tell_kernels()
    _Calls.on = False
    for module in _modules():
        module.stop_trace()


def write(comm: Traced, path: str | os.PathLike[str]) -> float:
    """Appends what this rank has noted to the job's file. Not collective, but rank 0's Communicator must be open.

    A timeline that another job wrote before start() is replaced. Other files and links are left alone: an Error. The timeline goes
    to FILE.JOB.RANK if another process holds the file for 3 s, or another job has written it since start().

    Returns the error of this rank's clock, in seconds, at most half of the quickest answer's way.
    """
    packets = _Packets(comm, _clock(comm.control, deadlines.ASKED_JOB) or _UNKNOWN)
    _put(packets, comm, Path(path), deadlines.ASKED_JOB)
    return packets.error


def _put(packets: _Packets, comm: Traced, path: Path, seconds: float) -> Path:
    """Returns the file that has them."""
    for one in list(_Calls.on_gpus):
        one.tell_kernels()
    for module in _modules():
        packets.add_spans(np.frombuffer(module.read_trace(), _SPAN), module)
    packets.add_calls(list(_Calls.found))
    job, joined = comm.control.job, packets.joined()
    own = Path(f"{path}.{job}.{comm.rank}")
    try:
        if _append(path, job, joined, seconds):
            return path
        log.warning("another process holds %s, or it has another job's timeline (%%j names it): this rank's is in %s", path, own)
        if not _append(own, job, joined, 0):
            raise Error(f"another process holds {own}: the timeline of rank {comm.rank} is not written")
        return own
    except OSError as problem:
        raise Error(f"the timeline cannot be written to {path}: {problem.strerror}") from None


def watch(comm: Traced) -> Callable[[], None]:
    """Does what PPLX_COMM_TRACE says. Call what is returned before the Communicator closes."""
    comm.control.answer("clock", _answer)
    path = read(Watching).trace
    if path is None:
        return lambda: None
    if not _Calls.on:  # else the spans of an earlier Communicator go
        start()
    weak, named = weakref.ref(comm), Path(path.replace("%j", comm.control.job).replace("%h", socket.gethostname()))
    at_start: list[_Clock] = []  # rank 0 may have closed when this rank does, or be stopped
    threading.Thread(target=_ask_early, args=(comm.control, at_start), name="pplx_comm clock", daemon=True).start()

    def end() -> None:
        if (mine := weak()) is None:
            return
        clock = _clock(mine.control, deadlines.CLOSE_TIMELINE) or (at_start[0] if at_start else _UNKNOWN)
        packets = _Packets(mine, clock)
        try:
            file = _put(packets, mine, named, deadlines.TIMELINE_FILE)
        except Error as problem:
            log.warning("PPLX_COMM_TRACE: %s", problem)
        else:
            log.info("the timeline of rank %d is in %s; its clock is right within %.0f us", mine.rank, file, packets.error * 1e6)

    return end


def product(call: Callable[P, R]) -> Callable[P, R]:
    """A product of a MoE layer is in the timeline; on a GPU its launch is."""

    @functools.wraps(call)
    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _Calls.on:
            return call(*args, **kwargs)
        begun = time.monotonic_ns()
        try:
            return call(*args, **kwargs)
        finally:
            _Calls.found.append(_Call(f"product {call.__name__}", begun, time.monotonic_ns(), threading.get_native_id()))

    return traced


def _start_modules() -> None:
    for module in _modules():
        if module.__name__ not in _Calls.modules:
            _Calls.modules.add(module.__name__)
            module.start_trace(SPANS)


def _modules() -> list[Any]:
    """Those that are in use: a timeline loads none."""
    return [_core, *(sys.modules[name] for name in _CUDA if name in sys.modules)]


# ---- clocks --------------------------------------------------------------------------------------------------------------------


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _answer() -> dict[str, Any]:
    return {"boot": _boot(), "ns": time.monotonic_ns()}


class _Clock(NamedTuple):
    """offset: nanoseconds by which rank 0's clock is ahead of a rank's. error: seconds by which that may be wrong."""

    offset: int
    error: float


_UNKNOWN = _Clock(0, float("inf"))


def _clock(control: ControlPlane, seconds: float) -> _Clock | None:
    """None: rank 0 does not tell within `seconds`. Processes of a host have one clock."""
    if control.rank == 0:
        return _Clock(0, 0.0)
    quickest, offset = 1 << 62, 0
    until = time.monotonic() + seconds
    for _ in range(_PROBES):
        asked = time.monotonic_ns()
        with contextlib.suppress(Error):  # this rank is closing
            answer = control.ask([0], "clock", max(until - time.monotonic(), 0)).get(0)
            took = time.monotonic_ns() - asked
            if answer is None:
                break
            if answer["boot"] == _boot():
                return _Clock(0, 0.0)
            if took < quickest:
                quickest, offset = took, int(answer["ns"]) - (asked + took // 2)
    return None if quickest == 1 << 62 else _Clock(offset, quickest / 2e9)


def _ask_early(control: ControlPlane, found: list[_Clock]) -> None:
    """Rank 0 may not be there yet."""
    for _ in range(_PROBES):
        clock = _clock(control, deadlines.ASKED_JOB)
        if clock is not None:
            found.append(clock)
            return


# ---- the file ------------------------------------------------------------------------------------------------------------------


class _Packets:
    """Those of one rank."""

    def __init__(self, comm: Traced, clock: _Clock) -> None:
        self._offset, self.error = clock
        self._writer = comm.rank + 1
        self._root = (comm.rank + 1) << 40
        self._tracks: dict[str, int] = {}
        self._found: list[tuple[tuple[int, int, int], bytes]] = []
        within = "" if self.error == 0 else ", on its own clock" if clock is _UNKNOWN else f", within {self.error * 1e6:.0f} us"
        name = f"rank {comm.rank} on {socket.gethostname()}{within}"
        self._heads = [perfetto.process(self._writer, self._root, os.getpid(), name)]

    def joined(self) -> bytes:
        """In the order of time, in which what begins or ends at one instant still nests."""
        return b"".join([*self._heads, *(packet for _, packet in sorted(self._found, key=lambda each: each[0]))])

    def add_spans(self, spans: np.ndarray[Any, Any], module: Any) -> None:
        launches = "" if module is _core else "launch "
        for span in spans:
            begun, ended, what, peer = int(span["begun"]), int(span["ended"]), int(span["what"]), int(span["peer"])
            said: list[tuple[str, int | str]] = [("all_to_all", int(span["object"]))]
            if int(span["step"]) != _NO_STEP:
                said.append(("step", int(span["step"])))
            if what in _PHASES:
                self._slice(f"thread {span['lane']}", launches + _PHASES[what], begun, ended, 0, said)
                continue
            if what == _KERNEL:
                of_set = f"GPU, AllToAll {span['object']}, set {span['lane']}"
                self._slice(of_set, "kernel " + _PHASES[int(span["op"])], begun, ended, 0, said)
                continue
            if what == _STAGE:
                stage = module.stages[span["op"]]
                self._slice(f"AllToAll {span['object']}, set {span['lane']}: {stage}", stage, begun, ended, 0, said)
                continue
            op = _OPS[span["op"]]
            said.append(("peer", peer))
            if what == _POSTED:
                said.append(("bytes", int(span["bytes"])))
                self._slice(f"NIC {span['lane']}", f"{op} to rank {peer}", begun, ended, int(span["flow"]), said)
            else:
                name = f"{op} to rank {peer} has left" if what == _SENT else f"{op} of rank {peer} is here"
                self._add("network", begun, (1, 0), perfetto.INSTANT, name, int(span["flow"]), said)

    def add_calls(self, calls: list[_Call]) -> None:
        for call in calls:
            self._slice(f"thread {call.thread}", call.name, call.begun, call.ended, 0, [])

    def _slice(self, track: str, name: str, begun: int, ended: int, flow: int, said: list[tuple[str, int | str]]) -> None:
        ended = max(ended, begun + 1)
        self._add(track, begun, (1, -ended), perfetto.BEGIN, name, flow, said)
        self._add(track, ended, (0, -begun), perfetto.END)

    def _add(
        self, track: str, ns: int, order: tuple[int, int], kind: int, name: str = "", flow: int = 0,
        said: Sequence[tuple[str, int | str]] = (),
    ) -> None:  # fmt: skip
        number = self._tracks.get(track)
        if number is None:
            number = self._tracks[track] = self._root + len(self._tracks) + 1
            self._heads.append(perfetto.track(self._writer, number, self._root, track))
        ns += self._offset
        self._found.append(((ns, *order), perfetto.event(self._writer, number, ns, kind, name, flow, said)))


def _append(path: Path, job: str, packets: bytes, seconds: float) -> bool:
    """Appends to the job's file, which has its head once more behind each rank's packets: what follows the last one is torn.
    False: another process holds the file for `seconds`, or another job has written it since start()."""
    head = perfetto.process(1 << 20, 1 << 60, 0, f"job {job}")
    of_any_job = len(head.partition(job.encode())[0])
    with open(path, "a+b", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)) as file:
        if not _locked(file, seconds):  # until it is closed
            return False
        begin, whole = os.pread(file.fileno(), len(head), 0), 0
        if begin == head:
            whole = file.seek(0, os.SEEK_END)
            if os.pread(file.fileno(), len(head), whole - len(head)) != head:  # a rank was killed while it wrote
                file.seek(0)
                whole = file.readall().rfind(head) + len(head)
        elif begin and begin[:of_any_job] != head[:of_any_job]:
            raise Error(f"{path} has something else than a timeline, and is left as it is: give another name")
        elif begin and os.fstat(file.fileno()).st_mtime >= _Calls.begun:
            return False
        file.truncate(whole)
        rest = memoryview((b"" if whole else head) + packets + head)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            file.truncate(whole)
            raise
    return True


def _locked(file: IO[bytes], seconds: float) -> bool:
    """Polls, since flock() takes no deadline."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.002)  # nothing announces that another process lets go
        else:
            return True
