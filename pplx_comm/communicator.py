"""The ranks of a job: which rank this is, which of them share a node, and which are alive."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from pplx_comm import desk, metrics, trace
from pplx_comm.control.assemble import assemble
from pplx_comm.control.deadlines import DEFAULT_TIMEOUT, checked_timeout
from pplx_comm.control.failure import Failure
from pplx_comm.control.launch import detect
from pplx_comm.control.plane import ControlPlane
from pplx_comm.control.recovery import Recovery
from pplx_comm.control.rendezvous import Alone, Bootstrap, Gathered, meet
from pplx_comm.errors import Error
from pplx_comm.log import log, name_rank
from pplx_comm.settings import whole_environment

_starting = threading.Lock()
"""Two starts of one process would be two ranks of one number at one address."""


class Communicator:
    """Make one with `from_mpi`, `from_torch` or `from_env`, on all ranks together.

    rank, world_size: as the launcher or group numbers them.
    node_rank, node_size, local_rank: this rank's node, how many ranks it has, and this rank's place among them. Ranks share a
        node when they can map each other's memory, or as the argument `node_size` says.
    host_rank: this rank's place among the ranks of its machine, whatever `node_size` says: the GPU to take.
    control, recovery: the connections to the other ranks, and the AllToAlls with their reset, for the library's own use.

    Usable from several threads. Close it, or use it as a context manager; the end of the process closes it too.
    """

    def __init__(self, bootstrap: Bootstrap, *, node_size: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        timeout = checked_timeout(timeout)
        assembly = assemble(bootstrap, node_size, timeout)
        node_of = assembly.node_of
        self.control = ControlPlane(assembly.mesh, node_of, timeout, one_network=assembly.one_network)
        self.recovery = Recovery(self.control)
        self.rank = bootstrap.rank
        self.world_size = bootstrap.world_size
        self.host_rank = assembly.host_rank
        self.node_rank = node_of[self.rank]
        self.node_size = node_of.count(self.node_rank)
        self.local_rank = node_of[: self.rank].count(self.node_rank)
        name_rank(self.rank)
        log.info("rank %d of %d: node %d, with %d ranks", self.rank, self.world_size, self.node_rank, self.node_size)
        self._failures: Counter[str] = Counter({"death": 0, "abort": 0, "timeout": 0, "closed": 0})
        self.control.on_failure(self._note)
        self.control.on_close(metrics.watch(self))
        self.control.on_close(desk.watch(self))
        self.control.on_close(trace.watch(self))

    @classmethod
    def from_mpi(cls, comm: Any = None, *, node_size: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> Communicator:
        """Makes one over an mpi4py communicator, MPI.COMM_WORLD by default. MPI is used during this call only."""
        if comm is None:
            from mpi4py import MPI

            comm = MPI.COMM_WORLD
        return cls(Gathered(comm.Get_rank(), comm.Get_size(), comm.allgather), node_size=node_size, timeout=timeout)

    @classmethod
    def from_torch(cls, group: Any = None, *, node_size: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> Communicator:
        """Makes one over a torch.distributed process group of any backend, the default group if None. It is used during this call
        only.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            raise Error("torch.distributed is not initialised: call init_process_group first, or use Communicator.from_env()")
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise Error("this process is not in the group: only its members may call from_torch(group)")

        def gather_text(text: str) -> list[Any]:
            texts: list[Any] = [None] * world_size
            dist.all_gather_object(texts, text, group=group)
            return texts

        return cls(Gathered(rank, world_size, gather_text), node_size=node_size, timeout=timeout)

    @classmethod
    def from_env(cls, *, node_size: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> Communicator:
        """Reads rank and world size from torchrun, Open MPI, MPICH, Slurm, or RANK and WORLD_SIZE. None of them: one rank.

        Where rank 0 listens: PPLX_COMM_ADDR=host:port; else, if all ranks are on this host, an abstract unix socket
        named after the job; else MASTER_ADDR or SLURM_LAUNCH_NODE_IPADDR, with PPLX_COMM_PORT. Between hosts
        PPLX_COMM_SECRET must be set. `timeout`: seconds for all ranks to come, and for later waits that name none.

        A rank that died or was left out returns this way: its new process starts as at first, the others call this again, and
        all meet anew. Their old Communicator keeps working, so this call may wait in a thread of its own while steps go on
        without the rank. `agree` on the old one says when all have the new one. A rank must be restarted with the
        variables that it had; where the launcher's process is all that names the job (mpich), also set PPLX_COMM_JOB on all ranks
        from the start.
        """
        timeout = checked_timeout(timeout)
        with _starting:
            launch = detect(whole_environment())
            bootstrap = Alone() if launch.world_size == 1 else meet(launch, timeout, whole_environment())
            try:
                return cls(bootstrap, node_size=node_size, timeout=timeout)
            finally:
                bootstrap.close()

    def barrier(self, timeout: float | None = None) -> None:
        """Waits until every rank is here. Raises PeerError if one died or left, StepTimeout naming the ranks that did not come."""
        self.control.all_gather(None, "barrier", timeout)

    def agree(self, ready: bool, timeout: float | None = None) -> bool:
        """Collective over the ranks that are left. Returns True if all of them are ready.

        Serves actions that all ranks must take in the same step, such as the move to a new Communicator (see `from_env`).
        """
        answers = self.control.all_gather({"ready": bool(ready)}, "agree", timeout)
        return all(answer["ready"] for answer in answers if answer is not None)

    @contextmanager
    def busy(self, what: str = "busy") -> Iterator[None]:
        """`with comm.busy("compiling"):` tells the other ranks that this one lives and comes later, so that they do not blame it.

        Until then, and for a whole `timeout` after it, no rank's wait is given up. The limit is half an hour, since a busy rank may
        hang. A death is noticed all the same. May be nested, and entered by several threads.
        """
        with self.control.busy(what):
            yield

    def reset(self, timeout: float | None = None) -> list[int]:
        """After a failure: the survivors agree on the ranks that are left, and all open AllToAlls go on from a fresh first step.
        Returns the ranks that are left.

        Collective over the survivors: call it where a PeerError is caught. All survivors must have the same AllToAlls open. The
        experts of the other ranks answer nothing. Handles and plans from before are invalid; CUDA graphs must be captured again.
        If no rank died, as after a timeout, and all ranks come, they all go on.

        Each thread that caught the failure may call it: one of them resets, the others wait, and all get the same ranks. Meanwhile
        calls of other threads raise the failure. With no failure since the last reset, it changes nothing. Exception: if this rank
        has begun steps that it cannot end, since its own code raised, it gives them up; that is a failure on all ranks. With
        device="cuda" it waits until the work on the streams of earlier calls has ended.

        timeout: seconds for the other living ranks to call reset, from when none is busy. A rank that is stopped or stuck
            elsewhere is then left out like a dead one, and hears of it at its next call. None: three times the AllToAlls' timeout,
            at least 30 s.

        To take a rank back, all ranks make a new Communicator and new AllToAlls on it: see `from_env`.
        """
        return self.recovery.reset(timeout)

    def on_failure(self, callback: Callable[[Failure], None]) -> Callable[[], None]:
        """Calls back once for the first failure of each generation, at once if there is one, and once for each rank that closes in
        good order. Returns what ends it.

        A Failure has a `kind` ("death", "abort", "timeout" or "closed"), the `rank` that failed or reports, the `peer` that it
        blames, `phase`, `step` and `message`. `peer`, `phase` and `step` may be None.

        callback: runs in a thread for callbacks, one at a time, and may call anything, `reset` too. A bound method is held
            weakly.
        """
        return self.control.on_failure(callback, apart=True)

    def stats(self) -> dict[str, Any]:
        """The counters of this rank, also after close().

        job: a name that all ranks of this Communicator have, and no other one.
        rank, world_size: of this Communicator.
        node: `node_rank`.
        generation: how often the ranks that are left have agreed, by reset().
        alive: the ranks that neither died nor left, as far as this one knows.
        failures: how often each kind of Failure was heard of.
        proxies: what `AllToAll.stats` has as `proxy`, for each set of proxies that AllToAlls share. A proxy that stands still is
            waited for no longer than a tenth of a second: its counters are then those that it told last.
        all_to_alls: what `AllToAll.stats` returns, for each that is not yet garbage; `proxy` as it was told last.
        """
        return {
            "job": self.control.job,
            "rank": self.rank,
            "node": self.node_rank,
            "world_size": self.world_size,
            "generation": self.control.generation,
            "alive": [rank for rank, alive in enumerate(self.control.alive()) if alive],
            "failures": dict(self._failures),
            "proxies": self.recovery.proxies(),
            "all_to_alls": self.recovery.stats(),
        }

    def _note(self, failure: Failure) -> None:
        self._failures[failure.kind] += 1
        log.info("%s", failure.message)

    @property
    def failure(self) -> Failure | None:
        """The first death or abort since the start or the last reset()."""
        return self.control.failure

    def close(self) -> None:
        """Leaves the job. Idempotent. Does not wait for peers; returns within 2 s."""
        self.control.close("close() was called")

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self.control.close("close() was called" if kind is None else f"{kind.__name__}: {problem}")

    def __repr__(self) -> str:
        return (
            f"Communicator(rank={self.rank}, world_size={self.world_size}, node_rank={self.node_rank}, node_size={self.node_size})"
        )
