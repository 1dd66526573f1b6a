"""NVSHMEM in this process: its module, its start, and symmetric memory for AllToAlls. See docs/carriers.md.

NVSHMEM is one for a process, ends the process where it dislikes what it finds, and waits for ever for a rank that has died.
So it is tried in a process of its own first, its collective calls run in a thread that is left behind when time is over, and
nothing of it is ever given back: what an AllToAll had, a later one takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

import pplx_comm._core as _core
from pplx_comm.control import deadlines
from pplx_comm.control.plane import ControlPlane
from pplx_comm.errors import Error
from pplx_comm.settings import foreign, whole_environment
from pplx_comm.wiring import ibgda
from pplx_comm.wiring.compare import Answers, Attempts, agree, name_ranks, raise_first
from pplx_comm.wiring.nvshmem_heap import GRANULE, OWN_BYTES, check_growth, failed_to_grow, lost_heap, too_small

T = TypeVar("T")

INSTALL = "pip install nvidia-nvshmem-cu13==3.4.5 nvshmem4py-cu13"
BUILD = "make build CMAKE_ARGS=-DPPLX_NVSHMEM=ON, on a machine without a GPU CMAKE_ARGS='-DPPLX_CUDA=ON -DPPLX_NVSHMEM=ON'"
LIBRARY = "libnvshmem_host.so.3"
_PLACE = 4096

MOST_IN_FLIGHT_WITH_PARTS = 2
"""Steps: with more of them blocks go whole, since each part is a put."""
QUEUE = 880
"""Requests of a peer's queue that have not been answered, of eight AllToAlls: 17 puts of three requests for each of two steps in
flight, or 3 puts for each of eight; and room."""
_DEPTH = 1024
"""NVSHMEM_QP_DEPTH where the environment does not set it."""

MODULE_PROBE = (
    "import sys; from pplx_comm.wiring import nvshmem as n; k = n.kernels(); gpu = int(sys.argv[1]);"
    " k.init(gpu, k.unique_id(), 0, 1); there = k.allocate(gpu, 4096); print('IBGDA' if k.runs_ibgda(gpu) else 'no IBGDA');"
    " sys.exit(0 if there else 3)"
)


def library_path() -> Path | None:
    """Returns the wheel's library, whose file has no unversioned name."""
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        return None
    places = [Path(place) / "lib" / LIBRARY for place in (spec.submodule_search_locations or [])] if spec else []
    return next((path for path in places if path.exists()), None)


def kernels() -> Any:
    """pplx_comm._nvshmem, or an Error that says what is missing."""
    path = library_path()
    if path is None and LIBRARY not in Path("/proc/self/maps").read_text():
        raise Error(f"transport='nvshmem' needs NVSHMEM, which is not installed: {INSTALL}")
    try:
        if path is not None:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # found by its name then, wherever the module lies
        import pplx_comm._core  # first: the module's types are made of its  # noqa: F401
        import pplx_comm._nvshmem as _nvshmem
    except (ImportError, OSError) as problem:
        raise Error(
            f"transport='nvshmem': this build has no module for it ({problem}). Rebuild with nvcc on PATH and "
            f"nvidia-nvshmem-cu13==3.4.5 installed: {BUILD}"
        ) from None
    return _nvshmem


def usable_kernels() -> Any:
    """kernels(), or an Error where NVSHMEM would end the process for want of a GPU."""
    module = kernels()
    if module.device_count() == 0:
        raise Error("device='cuda': this process sees no GPU")
    return module


@dataclass(frozen=True)
class Reach:
    """Reachability that all ranks know, by rank. Entries of dead or left-out ranks are undefined."""

    pes: list[int]
    mapped: list[set[int]]  # ranks of the same node
    near: list[set[int]]  # ranks that its GPU's stores reach by NVSHMEM, as it says

    def _both_near(self, a: int, b: int) -> bool:
        return a in self.near[b] and b in self.near[a]

    def near_of(self, rank: int) -> set[int]:
        """Returns the ranks of other nodes whose memory it maps all the same. A rank's peers find its memory in one place: so where
        some of a node cannot reach each other by NVSHMEM, none of them has any."""
        ranks = range(len(self.pes))
        if not all(self._both_near(a, b) for a in ranks for b in self.mapped[a]):
            return set()
        return {peer for peer in ranks if self._both_near(rank, peer)} - self.mapped[rank]

    @property
    def any_near(self) -> bool:
        return any(self.near_of(rank) for rank in range(len(self.pes)))


@dataclass
class Segment:
    """Symmetric memory of one AllToAll."""

    address: int
    nbytes: int
    pes: list[int]  # see Reach
    near: dict[int, int] = field(default_factory=dict)  # where this GPU's stores reach that of other ranks
    number: int | None = None  # index among those that this module has made; None: the caller's own memory
    close: Callable[[bool], None] = lambda _: None
    """True: nothing is in flight any more, so that another AllToAll may have it."""


@dataclass
class _Made:
    """Memory that this process has taken from NVSHMEM. All PEs have made the same, in the same order."""

    address: int
    nbytes: int
    free: bool = False


@dataclass(frozen=True)
class Alone:
    """Result of one PE in a process of its own."""

    refused: str | None
    """Why it does not start."""
    ibgda: bool = False
    """True if it posts to a NIC itself."""


@dataclass
class Library:
    """The process's view of NVSHMEM."""

    attached: bool = False
    lost: str | None = None
    """Why it is not to be used any more."""
    probed: dict[tuple[int, bool], Alone] = field(default_factory=dict)
    """(GPU, whether IBGDA was asked for) -> result."""
    made: list[_Made] = field(default_factory=list)
    depth: int = _DEPTH
    """Depth of its queues, if NVSHMEM_QP_DEPTH does not say."""
    place: int | None = None
    """An address of symmetric memory, to ask which ranks stores reach before an AllToAll's size is known."""

    def start(
        self,
        control: ControlPlane,
        gpu: int,
        nbytes: int,
        given: torch.Tensor | None,
        timeout: float,
        mapped: list[int],
        looks: bool,
        queue: int = QUEUE,
    ) -> Reach:
        """Collective over the living ranks. nbytes: what this rank may need at most. mapped: its peers of the node. looks: whether
        it wants to know which ranks its stores reach. queue: see queue_of()."""
        attempts = Attempts()
        module = attempts.run(usable_kernels)
        begun = attempts.run(lambda: bool(module.is_initialized()))  # type: ignore[union-attr]
        if begun is False:
            self.depth = _depth_for(queue)
        attempts.run(lambda: _check_queue(self.depth, queue))
        connectx = ibgda.has_connectx()
        if begun is False:
            attempts.run(lambda: self._probe(gpu, connectx and not control.one_network))
        if self.lost is not None:
            attempts.error = attempts.error or self.lost
        mine = {"error": attempts.error, "begun": begun, "nbytes": nbytes, "given": given is not None, "connectx": connectx}
        answers = agree(control, "AllToAll: NVSHMEM", mine, timeout)
        _check_alike(answers)
        assert module is not None
        needed = max(answer["nbytes"] for answer in answers if answer is not None)
        if not begun:
            self._begin(control, module, gpu, needed, answers, timeout)
        elif not self.attached:
            attempts.run(lambda: self._in_time(lambda: module.attach(gpu), timeout, "nvshmem_init of a second module"))
            self.attached = attempts.error is None
        pe = attempts.run(lambda: int(module.my_pe()))
        # Here and below: others may just be giving up on a call of NVSHMEM's.
        answers = agree(control, "AllToAll: PEs", {"error": attempts.error, "pe": pe}, 2 * timeout)
        pes = _by_rank(answers)
        alive = [rank for rank, answer in enumerate(answers) if answer is not None]
        if given is None and self.place is None:
            _check_all_are_here(module, alive, needed)
            self.place = self._allocate(control, module, gpu, _PLACE, timeout)
        place = self.place if given is None else given.data_ptr()
        others = [rank for rank in alive if rank != control.rank]
        reached = attempts.run(lambda: {rank for rank in others if module.reached_at(place, pes[rank])}) or set()
        attempts.run(lambda: _check_far(module, gpu, [rank for rank in others if rank not in reached and rank not in mapped]))
        near = sorted(reached) if looks else []
        answers = agree(control, "AllToAll: reach", {"error": attempts.error, "near": near, "mapped": mapped}, timeout)
        return Reach(pes, *([set(answer[name]) if answer else set() for answer in answers] for name in ("mapped", "near")))

    def segment(
        self, control: ControlPlane, gpu: int, nbytes: int, given: torch.Tensor | None, reach: Reach, timeout: float
    ) -> Segment:
        """Collective over the living, after start(). nbytes: what this rank needs; all get as much as the largest."""
        attempts = Attempts()
        module = usable_kernels()
        free = [[number, made.nbytes] for number, made in enumerate(self.made) if made.free]
        answers = agree(control, "AllToAll: free memory", {"nbytes": nbytes, "free": free}, timeout)
        needed = max(answer["nbytes"] for answer in answers if answer is not None)
        if given is not None:
            attempts.run(lambda: _check_given(given, gpu, needed))
            segment = self._given(given, reach.pes)
        else:
            segment = self._take(control, module, gpu, needed, answers, reach.pes, timeout)
        others = reach.mapped[control.rank] | reach.near_of(control.rank) if reach.any_near else set()
        segment.near = attempts.run(lambda: {rank: module.reached_at(segment.address, reach.pes[rank]) for rank in others}) or {}
        lost = [rank for rank, address in segment.near.items() if address == 0]
        if lost:
            attempts.error = attempts.error or f"transport='nvshmem': NVSHMEM maps some memory of {name_ranks(lost)}, and not all"
        agree(control, "AllToAll: symmetric memory", {"error": attempts.error}, timeout)
        return segment

    def _probe(self, gpu: int, by_nic: bool) -> None:
        """In a process of its own, which NVSHMEM may end."""
        if (gpu, by_nic) not in self.probed:
            self.probed[gpu, by_nic] = try_alone(gpu, by_nic=by_nic)
        refused = self.probed[gpu, by_nic].refused
        if refused is not None:
            raise Error(f"transport='nvshmem': NVSHMEM does not start on this host: {refused}")

    def _begin(self, control: ControlPlane, module: Any, gpu: int, nbytes: int, answers: Answers, timeout: float) -> None:
        """Collective. The PEs are the living ranks, in their order."""
        alive = [rank for rank, answer in enumerate(answers) if answer is not None]
        attempts = Attempts()
        unique = attempts.run(lambda: module.unique_id().hex()) if control.rank == alive[0] else None
        told = agree(control, "AllToAll: NVSHMEM id", {"error": attempts.error, "id": unique}, timeout)
        identity = bytes.fromhex(told[alive[0]]["id"])  # type: ignore[index]
        by_nic = not control.one_network and _all_have_connectx(answers)
        with _environment(variables(nbytes, by_nic=by_nic, depth=self.depth)):
            attempts.run(
                lambda: self._in_time(
                    lambda: module.init(gpu, identity, alive.index(control.rank), len(alive)), timeout, "nvshmem_init"
                )
            )
        self.attached = attempts.error is None
        agree(control, "AllToAll: NVSHMEM begun", {"error": attempts.error}, 2 * timeout)

    def _take(
        self, control: ControlPlane, module: Any, gpu: int, nbytes: int, answers: Answers, pes: list[int], timeout: float
    ) -> Segment:
        """Collective: memory that all have free, or new."""
        common = set.intersection(
            *({number for number, size in answer["free"] if size >= nbytes} for answer in answers if answer is not None)
        )
        number = min(common) if common else len(self.made)
        if not common:
            _check_all_are_here(module, [rank for rank, answer in enumerate(answers) if answer is not None], nbytes)
            size = -(-nbytes // GRANULE) * GRANULE
            self.made.append(_Made(self._allocate(control, module, gpu, size, timeout), size))
        made = self.made[number]
        made.free = False

        def close(landed: bool) -> None:
            made.free = landed

        return Segment(made.address, made.nbytes, pes, {}, number, close)

    def _allocate(self, control: ControlPlane, module: Any, gpu: int, size: int, timeout: float) -> int:
        """Collective over all PEs."""
        attempts = Attempts()
        room = attempts.run(lambda: module.room(gpu))
        answers = agree(control, "AllToAll: room for NVSHMEM", {"error": attempts.error, "room": room}, timeout)
        rooms = {rank: answer["room"] for rank, answer in enumerate(answers) if answer is not None}
        grows = any(room["grows"] for room in rooms.values())
        if grows:
            check_growth(rooms, size, sum(made.nbytes for made in self.made))
        address = attempts.run(lambda: self._in_time(lambda: int(module.allocate(gpu, size)), timeout, "nvshmem_malloc"))
        if address == 0:
            attempts.error = failed_to_grow(size) if grows else too_small(size)
        answers = control.all_gather({"error": attempts.error}, "AllToAll: NVSHMEM memory", 2 * timeout)
        errors = [answer["error"] for answer in answers if answer is not None and answer["error"]]
        if errors and (grows or address != 0):  # else nothing was taken on any rank
            self.lost = self.lost or lost_heap(errors[0])
        raise_first(control, answers)
        assert address is not None
        return address

    @staticmethod
    def _given(given: torch.Tensor, pes: list[int]) -> Segment:
        return Segment(given.data_ptr(), given.numel() * given.element_size(), pes)

    def _in_time(self, call: Callable[[], T], seconds: float, name: str) -> T:
        try:
            return in_time(call, seconds, name)
        except TimeoutError as late:
            self.lost = str(late)
            raise Error(self.lost) from None


def in_time(call: Callable[[], T], seconds: float, name: str) -> T:
    """Runs a call that may never return, in a thread: after `seconds` it raises, and the thread stays behind."""
    result: list[T] = []
    problem: list[BaseException] = []

    def work() -> None:
        try:
            result.append(call())
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if problem:
        raise problem[0]
    if not result:
        raise TimeoutError(
            f"transport='nvshmem': {name} has not come back within {seconds:.0f} s: a rank has died, or cannot be reached. This "
            "process goes on, but cannot use NVSHMEM any more"
        )
    return result[0]


def _check_far(module: Any, gpu: int, far: list[int]) -> None:
    """far: ranks that only a NIC reaches. NVSHMEM goes on where its IBGDA does not start, and gives puts to a host thread."""
    if far and not module.runs_ibgda(gpu):
        raise Error(
            f"transport='nvshmem': only a NIC reaches {name_ranks(far)}, and NVSHMEM's IBGDA does not run on this rank; puts of "
            "kernels would wait for ever for an NVSHMEM host thread. `python -m pplx_comm doctor` says what is missing, and "
            "NVSHMEM_DEBUG=INFO why it did not start; an NVSHMEM that something else starts needs NVSHMEM_IB_ENABLE_IBGDA=1 "
            f"(here: {foreign('NVSHMEM_IB_ENABLE_IBGDA', 'not set')}). Or take transport='auto'"
        )


def try_alone(gpu: int, *, by_nic: bool) -> Alone:
    """How one PE fares on that GPU. by_nic: with IBGDA."""
    environment = {**whole_environment(), **variables(GRANULE, by_nic=by_nic)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", MODULE_PROBE, str(gpu)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=deadlines.PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Alone(f"one PE alone did not come up within {deadlines.PROBE_SECONDS:.0f} s")
    if done.returncode == 0:
        return Alone(None, ibgda="IBGDA" in done.stdout.splitlines())
    said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()
    return Alone(f"one PE alone ended with status {done.returncode}: {' | '.join(said[-3:])}")


def variables(nbytes: int, *, by_nic: bool, depth: int = _DEPTH) -> dict[str, str]:
    """NVSHMEM's own, for one that we start. What the caller has set stays. by_nic: there are hosts, each with a ConnectX."""
    wanted = {
        "NVSHMEM_SYMMETRIC_SIZE": str(max(1 << 30, -(-(nbytes + OWN_BYTES) // GRANULE) * GRANULE)),
        "NVSHMEM_DISABLE_NVLS": "1",  # multicast: nothing here uses it, and it fails on hosts that say they have it
    }
    if by_nic:
        # Its doorbells by the GPU where the driver lets it, else by a host thread without GDRCopy.
        wanted |= {"NVSHMEM_IB_ENABLE_IBGDA": "1", "NVSHMEM_IBGDA_NIC_HANDLER": "auto"}
        if depth != _DEPTH:
            wanted["NVSHMEM_QP_DEPTH"] = str(depth)
    else:
        wanted["NVSHMEM_REMOTE_TRANSPORT"] = "none"
    return {name: value for name, value in wanted.items() if name not in whole_environment()}


def _all_have_connectx(answers: Answers) -> bool:
    """Alike on all ranks: whether IBGDA is to be started. Raises where only some could."""
    some, others = ([rank for rank, a in enumerate(answers) if a is not None and a["connectx"] is has] for has in (True, False))
    if some and others:
        raise Error(
            f"transport='nvshmem': no ConnectX (mlx5) in /sys/class/infiniband of {name_ranks(others)}, but of {name_ranks(some)}: "
            "across hosts all need one, for kernels post to it (in a container: --device /dev/infiniband)"
        )
    return bool(some)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets variables for NVSHMEM alone, which reads them once."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


def _check_alike(answers: Answers) -> None:
    for name, text in (("begun", "have an NVSHMEM that something else has begun"), ("given", "were given symmetric_memory=")):
        some = [rank for rank, answer in enumerate(answers) if answer is not None and answer[name]]
        others = [rank for rank, answer in enumerate(answers) if answer is not None and not answer[name]]
        if some and others:
            raise Error(f"transport='nvshmem': {name_ranks(some)} {text}, but {name_ranks(others)} not: all must, or none")
    if any(answer is not None and answer["given"] and not answer["begun"] for answer in answers):
        raise Error("symmetric_memory= must come from an NVSHMEM that is initialised: this process has none")


def _by_rank(answers: Answers) -> list[int]:
    pes = [-1 if answer is None else int(answer["pe"]) for answer in answers]
    living = [pe for pe in pes if pe >= 0]
    if len(set(living)) != len(living):
        raise Error(f"transport='nvshmem': ranks have the same PE (by rank: {pes}); each needs an NVSHMEM of its own")
    return [max(pe, 0) for pe in pes]


def _check_all_are_here(module: Any, alive: list[int], nbytes: int) -> None:
    """Raises, alike on all ranks, where an allocation would wait for others."""
    pes = int(module.n_pes())
    if len(alive) < pes:
        raise Error(
            f"transport='nvshmem': this NVSHMEM has {pes} PEs and {len(alive)} ranks are here, so no "
            f"symmetric memory can be made: all PEs must take part in that. Allocate {nbytes} bytes on all PEs "
            "(nvshmem.core.tensor) and pass them as symmetric_memory=; where PEs have died, start all of them again"
        )


def queue_of(config: _core.Config) -> int:
    """Returns the queue depth that eight such AllToAlls need. In pieces at most 9 posts of three requests have not been answered,
    for
    each step in flight: two pieces and two credits of a dispatch, the same of a combine, and weights."""
    return max(QUEUE, 8 * 9 * 3 * config.in_flight + 64) if config.in_pieces else QUEUE


def _depth_for(queue: int) -> int:
    depth = _DEPTH
    while depth < queue:
        depth *= 2
    return depth


def _check_queue(depth: int, queue: int) -> None:
    named = foreign("NVSHMEM_QP_DEPTH")
    has = int(named) if named.isdecimal() else depth
    if has < queue:
        raise Error(
            f"transport='nvshmem': NVSHMEM_QP_DEPTH={has} must be at least {queue} when NVSHMEM starts: a put would wait inside "
            "NVSHMEM"
        )


def _check_given(given: torch.Tensor, gpu: int, nbytes: int) -> None:
    has = given.numel() * given.element_size()
    if given.device != torch.device("cuda", gpu) or not given.is_contiguous():
        raise Error(f"symmetric_memory= must be a contiguous tensor on cuda:{gpu}, not on {given.device}")
    if given.data_ptr() % 64:
        raise Error("symmetric_memory= must begin at a multiple of 64 bytes")
    if has < nbytes:
        raise Error(f"symmetric_memory= has {has} bytes, but this AllToAll needs {nbytes}")


library = Library()
"""One a process, as NVSHMEM is."""
