"""Agreements: every rank goes on, or every rank raises the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pplx_comm.control.plane import ControlPlane
from pplx_comm.errors import Error, PeerError, StepTimeout

T = TypeVar("T")
Answers = list[dict[str, Any] | None]
"""One answer a rank; None for dead ranks."""


class Attempts:
    """Runs parts that may fail on one rank only. The next agreement tells all ranks of the first error."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error

    def run(self, what: Callable[[], T]) -> T | None:
        """None where it fails, or where something has failed before."""
        if self.error is not None:
            return None
        try:
            return what()
        except Exception as error:  # whatever it is, the other ranks must hear of it rather than wait
            self.error = f"{error}" if isinstance(error, Error) else f"{type(error).__name__}: {error}"
            return None


def agree(
    control: ControlPlane, tag: str, payload: dict[str, Any], timeout: float | None = None, making: str = "AllToAll"
) -> Answers:
    """Exchanges payloads; if any rank reports an error, all raise it. timeout: None is the Communicator's."""
    answers = control.all_gather(payload, tag, timeout)
    raise_first(control, answers, making)
    return answers


def raise_first(control: ControlPlane, answers: Answers, making: str = "AllToAll") -> None:
    """The error of the first rank that reports one, on all ranks."""
    for rank, answer in enumerate(answers):
        if answer is not None and answer.get("error"):
            text = answer["error"]
            if rank == control.rank:
                raise Error(text)
            raise PeerError(f"rank {rank} could not make its {making}: {text}", peer=rank, phase=f"{making}()")


def raised_by_all(problem: BaseException) -> bool:
    """True if the other ranks raise too, without being told: the error comes from an agreement, or from a failure that has
    latched."""
    return isinstance(problem, Error) and not isinstance(problem, StepTimeout)


def plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """As JSON carries them."""
    return {name: value if isinstance(value, (int, float, str, type(None))) else repr(value) for name, value in arguments.items()}


def compare(answers: Answers, making: str = "AllToAll") -> None:
    """Raises, alike on all ranks, where `compared` differs."""
    alive = [(rank, answer) for rank, answer in enumerate(answers) if answer is not None]
    fields = dict.fromkeys(key for _, answer in alive for key in answer["compared"])
    differing = []
    for name in fields:
        by_value: dict[str, list[int]] = {}
        for rank, answer in alive:
            by_value.setdefault(repr(answer["compared"].get(name)), []).append(rank)
        if len(by_value) > 1:
            differing.append(f"{name} is " + ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items()))
    if differing:
        raise Error(f"{making}() must be called alike on all ranks, but " + "; ".join(differing))


def name_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
