"""reset(): the survivors of a failure agree once, then all AllToAlls of a Communicator begin the next generation together.

A failure is the Communicator's, so its end is too: an AllToAll left behind would report the old failure to those that went on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from pplx_comm.control.deadlines import CONSTRUCTOR_SECONDS, checked_timeout
from pplx_comm.control.failure import Failure
from pplx_comm.control.plane import ControlPlane
from pplx_comm.errors import Error, PeerError
from pplx_comm.log import log


class Resettable(Protocol):
    """An AllToAll, as reset() sees it. The calls come in this order; `stop` to `renew` for all AllToAlls before the next one."""

    @property
    def open(self) -> bool:
        """False once close() has given everything back."""

    @property
    def number(self) -> int:
        """Identifies it: the same on all ranks, and no other open AllToAll's."""

    @property
    def what(self) -> str:
        """Names it in errors."""

    @property
    def patience(self) -> float:
        """Seconds to wait for other ranks, where reset() names none."""

    @property
    def open_steps(self) -> int:
        """Steps that this rank has begun and not ended."""

    def stats(self, fresh: bool) -> dict[str, Any]:
        """Its counters, after close() as they were then. fresh: waits for proxies to tell theirs."""

    @property
    def generation(self) -> int:
        """The Communicator's when it was made or last renewed."""

    @property
    def stopped(self) -> bool:
        """Between stop() and go_on()."""

    @property
    def called(self) -> bool:
        """True if this thread has begun a step, or no thread has."""

    def heard(self) -> int | None:
        """The generation of which a call of this thread raised a failure, since the thread last asked."""

    def notice(self) -> None:
        """Reports to all ranks a failure that this rank's memory tells of, and no call has raised yet. Logs a mistake."""

    def stop(self, failure: Failure) -> None:
        """Running calls end, and later ones raise `failure`, until go_on()."""

    def drain(self, seconds: float) -> None:
        """Waits until nothing of this rank stores into other ranks' memory."""

    def renew(self, generation: int, alive: list[bool]) -> None:
        """Forgets all steps and failures. Nothing is carried until rewire()."""

    def rewire(self, survivors: list[int]) -> None:
        """Collective over the survivors."""

    def fail(self, problem: BaseException) -> None:
        """Its calls raise: reset() has failed."""

    def go_on(self) -> None:
        """Its calls work again."""

    def close(self) -> None: ...


class Recovery:
    """The AllToAlls of one Communicator, and their reset."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._generation = control.generation
        """In which the AllToAlls work. The control plane is ahead of it between the agreement and the end of reset()."""
        self._lock = threading.Lock()
        self._owner: int | None = None
        """The thread that holds the lock."""
        live: weakref.WeakSet[Resettable] = weakref.WeakSet()
        self._live = live
        self.proxies: Callable[[], list[dict[str, Any]]] = list
        """Returns the counters of all carriers. The first AllToAll sets it."""

        def close_all() -> None:
            for each in list(live):
                each.close()

        control.on_close(close_all)

    def add(self, one: Resettable) -> None:
        self._live.add(one)

    def open(self) -> list[Resettable]:
        """In the order of their numbers."""
        return sorted((one for one in list(self._live) if one.open), key=lambda one: one.number)

    def stats(self) -> list[dict[str, Any]]:
        """Counters of all that are open, and of those that are closed and still referred to. Waits for no proxy."""
        found = []
        for one in list(self._live):
            with suppress(Error):  # closed meanwhile, or never whole
                found.append(one.stats(False))
        return sorted(found, key=lambda stats: int(stats["object"]))

    @contextmanager
    def alone(self, call: str) -> Iterator[None]:
        """One thread of this rank at a time: reset() and the constructors exchange messages under the same tags."""
        if self._owner == threading.get_ident():
            raise Error(f"{call}: this thread is inside AllToAll() or reset() of this Communicator: call it after that returns")
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    def reset(self, timeout: float | None, called_on: Resettable | None = None) -> list[int]:
        """See AllToAll.reset, and Communicator.reset, which is called on none of them.

        An AllToAll that only other threads have called is another thread's. It stays stopped, so that a thread that was between two
        calls comes to its `except` as well.
        """
        if timeout is not None and not checked_timeout(timeout, "reset: timeout"):
            raise Error(f"reset: timeout={timeout!r} must be a positive number of seconds")
        with self.alone("reset"):
            everything = self.open()
            heard = {one: one.heard() for one in everything}
            known = [one for one, told in heard.items() if called_on in (None, one) or told is not None or one.called]
            late = any(one.stopped or ((told := heard[one]) is not None and told < one.generation) for one in known)
            late = late or self._control.in_callback()  # it comes for a failure, which another thread may have ended
            failure = self._failure(everything, late)
            if failure is None:
                for one in known:
                    one.go_on()
                return self._control.members()
            patience = max((one.patience for one in everything), default=float(CONSTRUCTOR_SECONDS)) if timeout is None else timeout
            try:
                _each(everything, lambda one: one.stop(failure))
                _each(everything, lambda one: one.drain(patience))
                survivors = self._control.agree_survivors(patience, after=self._generation, leave_out=True)
                self._generation = self._control.generation
                self._begin(everything, survivors, patience)
                log.info("reset: generation %d, ranks %s", self._generation, survivors)
            except BaseException:
                known = everything  # all calls raise why
                raise
            finally:
                for one in known:
                    one.go_on()
            return survivors

    def _failure(self, everything: Sequence[Resettable], late: bool) -> Failure | None:
        """Returns what to recover from; None if there is nothing, or another thread of this rank has done it.

        Steps that are open here are a failure: this rank's own code raised. If the caller is `late`, another thread has begun them.
        """
        control = self._control
        if control.failure is None and control.generation == self._generation:
            _each(everything, lambda one: one.notice())
            alive = control.alive()
            for rank in control.members():
                if not alive[rank]:
                    control.abort(f"rank {control.rank} called reset() to go on without rank {rank}, which has left", peer=rank)
            left_open = [one.what for one in everything if one.open_steps]
            if left_open and not late:
                control.abort(
                    f"rank {control.rank} called reset(), and gave up its open steps of {', '.join(left_open)}", phase="reset"
                )
        if control.generation != self._generation:
            return Failure("abort", control.rank, phase="reset", message="the other ranks have agreed on the survivors")
        return control.failure

    def _begin(self, everything: Sequence[Resettable], survivors: list[int], patience: float) -> None:
        control = self._control
        try:
            alive = [rank in survivors for rank in range(control.world_size)]
            _each(everything, lambda one: one.renew(self._generation, alive))
            everything = [one for one in everything if one.open]
            self._compare(everything, patience)
            for one in everything:
                one.rewire(survivors)
            control.raise_if_failed()  # a failure that came before renew() was forgotten there
        except BaseException as problem:
            peer = problem.peer if isinstance(problem, PeerError) else None
            said = f"reset() failed on rank {control.rank}: {problem if isinstance(problem, Error) else repr(problem)}"
            control.abort(said, peer=peer, phase="reset", generation=self._generation)
            for one in everything:
                with suppress(Error):  # another thread has closed it
                    one.fail(problem)
            raise

    def _compare(self, everything: Sequence[Resettable], patience: float) -> None:
        """Raises, alike on all survivors, where they have different AllToAlls open."""
        answers = self._control.all_gather({"open": [[one.number, one.what] for one in everything]}, "reset: AllToAlls", patience)
        by_rank = {rank: dict(answer["open"]) for rank, answer in enumerate(answers) if answer is not None}
        for number, what in sorted({each for opened in by_rank.values() for each in opened.items()}):
            there = [rank for rank, opened in by_rank.items() if number in opened]
            if len(there) < len(by_rank):
                without = sorted(by_rank.keys() - there)
                # Ranks meet, so that no rank's abort overtakes another one's comparison.
                with suppress(PeerError):
                    self._control.all_gather(None, "reset: a difference", patience)
                raise Error(
                    f"reset: {what} is open on ranks {there} and not on ranks {without}, but ranks must open and close them alike. "
                    f"Close it on ranks {there}, then call reset() again on all ranks"
                )


def _each(everything: Sequence[Resettable], act: Callable[[Resettable], None]) -> None:
    """Leaves out those that other threads close meanwhile."""
    for one in everything:
        try:
            act(one)
        except Error:
            if one.open:
                raise
