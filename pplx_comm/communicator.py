"""The ranks of a job and what they need of each other besides data: who is who, who shares a node, who is alive."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from pplx_comm._assemble import assemble
from pplx_comm._callbacks import Callback
from pplx_comm._collectives import exchange, share_fds
from pplx_comm._failure import Failure
from pplx_comm._launch import detect
from pplx_comm._mesh import Mesh
from pplx_comm._rendezvous import Alone, Bootstrap, Gathered, meet
from pplx_comm.errors import Error

DEFAULT_TIMEOUT = 300.0

_starting = threading.Lock()
"""Two starts of one process would be two ranks of one number at one address."""


class Communicator:
    """Make one with `from_mpi`, `from_torch` or `from_env`, on all ranks together.

    rank, world_size: as the launcher or group numbers them.
    node_rank, node_size, local_rank: this rank's node, how many ranks it has, and this rank's place among them. Ranks
    share a
        node when they can map each other's memory, or as the argument `node_size` says.
    host_rank: this rank's place among the ranks of its machine, whatever `node_size` says: the GPU to take.

    Usable from several threads. Close it, or use it as a context manager; the end of the process closes it too.
    """

    def __init__(self, bootstrap: Bootstrap, *, node_size: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        assembly = assemble(bootstrap, node_size, timeout)
        self._mesh: Mesh = assembly.mesh
        self._node_of = assembly.node_of
        self._timeout = timeout
        self.rank = bootstrap.rank
        self.world_size = bootstrap.world_size
        self.host_rank = assembly.host_rank
        self.node_rank = self._node_of[self.rank]
        self.node_size = self._node_of.count(self.node_rank)
        self.local_rank = self._node_of[: self.rank].count(self.node_rank)
        weakref.finalize(self, self._mesh.abandon, "it was dropped without close()").atexit = False

    @classmethod
    def from_mpi(cls, comm: Any = None, *, node_size: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> Communicator:
        """Over an mpi4py communicator, MPI.COMM_WORLD by default. MPI is used during this call only."""
        if comm is None:
            from mpi4py import MPI

            comm = MPI.COMM_WORLD
        return cls(Gathered(comm.Get_rank(), comm.Get_size(), comm.allgather), node_size=node_size, timeout=timeout)

    @classmethod
    def from_torch(cls, group: Any = None, *, node_size: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> Communicator:
        """Over a torch.distributed process group of any backend, the default group if None. It is used during this call
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
        """From what torchrun, Open MPI, MPICH, Slurm, or RANK and WORLD_SIZE say. With none of them: a world of one.

        Where rank 0 listens: PPLX_COMM_ADDR=host:port; else, if all ranks are on this host, an abstract unix socket
        named after the job; else MASTER_ADDR or SLURM_LAUNCH_NODE_IPADDR, with PPLX_COMM_PORT. Between hosts
        PPLX_COMM_SECRET must be set. `timeout`: seconds for all ranks to come, and for later waits that name none.

        A rank that died or was left out comes back this way: its new process starts as at first, the others call this
        again, and all meet anew. Their old Communicator works on meanwhile, so this may wait in a thread of its own while
        the steps go on without the rank; `agree` on the old one says when everybody has the new one. Whoever restarts a
        rank must give it the variables that it had; where the launcher's process is all that names the job (mpich), also
        set PPLX_COMM_JOB on all ranks from the start.
        """
        with _starting:
            launch = detect(os.environ)
            bootstrap = Alone() if launch.world_size == 1 else meet(launch, timeout, os.environ)
            try:
                return cls(bootstrap, node_size=node_size, timeout=timeout)
            finally:
                bootstrap.close()

    def barrier(self, timeout: float | None = None) -> None:
        """Until every rank is here. PeerError if one died or left, StepTimeout naming those that did not come."""
        exchange(self._mesh, None, "barrier", self._seconds(timeout))

    def agree(self, ready: bool, timeout: float | None = None) -> bool:
        """Collective over the ranks that are left: whether every one of them is ready.

        For what must happen on all ranks in the same step, such as the move to a new Communicator (see `from_env`).
        """
        answers = exchange(self._mesh, {"ready": bool(ready)}, "agree", self._seconds(timeout))
        return all(answer["ready"] for answer in answers if answer is not None)

    def close(self) -> None:
        """Idempotent, waits for nobody, 2 s at most."""
        self._mesh.close("close() was called")

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._mesh.close("close() was called" if kind is None else f"{kind.__name__}: {problem}")

    def __repr__(self) -> str:
        return (
            f"Communicator(rank={self.rank}, world_size={self.world_size}, node_rank={self.node_rank}, node_size={self.node_size})"
        )

    # For AllToAll

    @property
    def failure(self) -> Failure | None:
        """The first death or abort since the start or the last `_agree_survivors`."""
        self._mesh.check_owner()
        return self._mesh.failure

    @property
    def _generation(self) -> int:
        return self._mesh.generation

    @property
    def _peek_alive(self) -> list[bool]:
        """By rank: neither dead nor gone, as far as this rank knows now."""
        self._mesh.check_owner()
        return self._mesh.alive()

    def _raise_if_failed(self) -> None:
        self._mesh.check_owner()
        self._mesh.raise_if_failed()

    def _same_node(self, rank: int) -> bool:
        return self._node_of[rank] == self.node_rank

    def _exchange(self, payload: dict[str, Any], tag: str, timeout: float | None = None) -> list[dict[str, Any] | None]:
        """Collective: everybody's JSON-able payload, by rank; None for ranks that `_agree_survivors` found dead.

        Calls are matched by tag and by how often the tag was used. A failure latched here or anywhere ends it with that
        cause.
        """
        return exchange(self._mesh, payload, tag, self._seconds(timeout))

    def _share_fds(self, fds: Sequence[int], tag: str, timeout: float | None = None) -> dict[int, list[int]]:
        """Collective among the live ranks of this node: theirs by rank, this rank not among them. The caller closes all
        of them.

        The caller keeps its own and may close them as soon as this returns. Raises on all of the node or on none.
        """
        peers = [rank for rank in range(self.world_size) if rank != self.rank and self._same_node(rank)]
        return share_fds(self._mesh, fds, tag, peers, self._seconds(timeout))

    def _abort(self, info: dict[str, Any]) -> None:
        """Latch the first failure here and at every peer. Never blocks. info: kind, rank, peer, phase, step, message,
        all optional.
        """
        self._mesh.check_owner()
        rank = info.get("rank", self.rank)
        phase = info.get("phase")
        message = info.get("message") or f"rank {rank} aborted{f' in {phase}' if phase else ''}"
        self._mesh.abort(Failure(info.get("kind", "abort"), rank, info.get("peer"), phase, info.get("step"), message))

    def _on_failure(self, callback: Callback) -> Callable[[], None]:
        """Call back once for the first failure of each generation, and once for each rank that leaves cleanly (kind
        "closed").

        At once if it has happened already. Runs in the control thread, or in the thread that aborts or registers. A
        bound method is held weakly. Returns what unregisters it.
        """
        return self._mesh.on_failure(callback)

    def _on_close(self, callback: Callable[[], None]) -> None:
        """Call once when this Communicator closes, by any way but fork, before it says goodbye; in order of
        registration.
        """
        self._mesh.on_close(callback)

    def _agree_survivors(self, timeout: float | None = None, *, leave_out: bool = False) -> list[int]:
        """Collective over the survivors: the same list on each. Clears the failure and opens the next generation.

        leave_out: a rank that lives and does not come within `timeout` is out, too; else that is a StepTimeout.
        """
        return self._mesh.agree_survivors(self._seconds(timeout), leave_out)

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout
