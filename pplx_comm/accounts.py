"""Accounts that processes give of themselves, to find out why a job hangs: src/host/desk.h has how they give them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pplx_comm._core as _core

Account = dict[str, Any]
"""A process's."""

_FRAME = re.compile(r'^File "(?:.*/)?(.*?)", line (\d+) in (.*)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*:\n((?: .*\n?)*)", re.MULTILINE)
FRAMES = 8
"""The most of a stack that a verdict shows."""


def own() -> Account:
    account: Account = json.loads(_core.account().decode(errors="replace"))
    return account


@dataclass
class Step:
    """A step that is open on a rank, or a collective call that it is in."""

    number: int | None
    """None: a call."""
    at: str
    """The call that it is in, or the last that ended."""
    running: bool
    us: int | None
    """Since that call began, or ended. None: on a GPU where nothing is counted, or whose kernel has not begun."""
    peers: list[int]
    """The ranks that it waits for."""
    what: str
    """The part of their work that it waits for."""

    def __str__(self) -> str:
        since = "" if self.us is None else f" for {seconds(self.us)}" if self.running else f" {seconds(self.us)} ago"
        return f"{'in' if self.running else 'after'} {self.at}{since}"

    @property
    def name(self) -> str:
        return "it" if self.number is None else f"step {self.number}"


@dataclass
class Rank:
    """A rank of a job, as its process says."""

    number: int
    world_size: int
    account: Account
    steps: list[Step] = field(default_factory=list)
    all_to_alls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def waits_for(self) -> set[int]:
        return {peer for step in self.steps for peer in step.peers}

    @property
    def where(self) -> str:
        return f"{self.account['host']}:{self.account['pid']}"

    @property
    def main(self) -> list[str]:
        """Frames of the main thread, the innermost first."""
        main = self.account["process"].get("main")
        return next((frames for thread, frames in stacks(self.account) if thread == main), [])

    @property
    def place(self) -> str:
        """The main thread's innermost function that is of no installed package."""
        frames = [frame for frame in self.main if "/lib/python3" not in frame] or self.main
        found = _FRAME.match(frames[0]) if frames else None
        return "{2} ({0}:{1})".format(*found.groups()) if found else ""

    @property
    def silent(self) -> bool:
        """An AllToAll does not tell where it stands."""
        return any("problem" in one for one in self.all_to_alls)

    def doing(self) -> list[str]:
        """Lines for a rank that others wait for, or that does not tell what it waits for."""
        nothing = "an AllToAll does not tell" if self.silent else "it is in no step"
        said = [f"{step.name} is {step}" for step in self.steps] or [nothing]
        if self.account["python_held"]:
            said.append("no Python runs: a call into C keeps the interpreter's lock")
        said += [f"{proxy} stands still, inside of the provider or without a core" for proxy in self.stuck_proxies()]
        return [", ".join(said) + "; its main thread:", *(f"  {frame}" for frame in self.main[:FRAMES])]

    def stuck_proxies(self) -> Iterator[str]:
        for entry in self.account["entries"]:
            if "proxy" in entry["facts"] and (entry["told"] or {}).get("stands_still"):
                yield f"its proxy over {entry['facts']['proxy']}"


def stacks(account: Account) -> list[tuple[str, list[str]]]:
    """Python's threads and their frames, the innermost first."""
    found = _THREAD.findall(account["stacks"])
    return [(thread, [line.strip()[:1000] for line in frames.splitlines()]) for thread, frames in found]


def jobs(accounts: Iterable[Account]) -> dict[str, dict[int, Rank]]:
    """The ranks of each job."""
    found: dict[str, dict[int, Rank]] = {}
    for account in accounts:
        for entry in account["entries"]:
            facts, told = entry["facts"], entry["told"]
            if "job" not in facts:
                continue
            rank = found.setdefault(facts["job"], {}).setdefault(facts["rank"], Rank(facts["rank"], facts["world_size"], account))
            if "call" in facts:
                rank.steps.append(Step(None, facts["call"], True, account["now"] - facts["begun"], facts["peers"], "the same call"))
            if told is None:
                continue
            rank.all_to_alls.append({**facts, **told})
            rank.steps += [
                Step(step["step"], step["at"], step["running"], step["us"], step["peers"], step["what"])
                for step in told.get("open", [])
            ]
    return found


def table(ranks: dict[int, Rank], numbers: Iterable[int]) -> list[str]:
    """A line for each of those ranks, or for each of its open steps."""
    lines = [f"{'rank':>4}  {'process':<20} {'step':>10}  {'':<34} waits for"]
    for number in numbers:
        if number not in ranks:
            lines.append(f"{number:>4}  does not answer")
            continue
        rank = ranks[number]
        for step in rank.steps:
            waits = f"{_ranks(step.peers)}: {step.what}" if step.peers else ""
            lines.append(
                f"{number:>4}  {rank.where:<20} {'-' if step.number is None else step.number:>10}  {step!s:<34} {waits}".rstrip()
            )
        if not rank.steps:
            state = "does not tell" if rank.silent else "in no step"
            lines.append(f"{number:>4}  {rank.where:<20} {'-':>10}  {state}, but in {rank.place}".removesuffix(", but in "))
    return lines


def verdicts(ranks: dict[int, Rank], world_size: int) -> list[str]:
    """Sentences for the ranks at which the chain of waits ends, and what they do."""
    waiting = {number: rank.waits_for for number, rank in ranks.items()}
    awaited = set().union(*waiting.values()) if waiting else set()
    said = []
    for number in sorted(awaited):
        if waiting.get(number):
            continue
        by = _ranks(sorted(other for other, peers in waiting.items() if number in peers))
        verb = "waits" if by.startswith("rank ") else "wait"
        if number in ranks:
            first, *rest = ranks[number].doing()
            its = "may wait for any other" if ranks[number].silent else "waits for none"
            said += [f"{by} {verb} for rank {number}, which {its}: {first}", *rest]
        else:
            said.append(f"{by} {verb} for rank {number}, which does not answer: it is stopped, dead or cut off")
    if said:
        return said
    if awaited:
        chain = _cycle(waiting)
        steps = "; ".join(f"rank {one} is in {_towards(ranks[one], other)}" for one, other in itertools.pairwise(chain))
        return [f"ranks {' -> '.join(map(str, chain))} wait for each other: {steps}"]
    gone = sorted(set(range(world_size)) - ranks.keys())
    said = [f"{_ranks(gone)} {'does' if len(gone) == 1 else 'do'} not answer"] if gone else []
    for number in sorted(number for number, rank in ranks.items() if rank.silent):
        first, *rest = ranks[number].doing()
        said += [f"rank {number}: {first}", *rest]
    return said or ["no rank waits for another one"]


def first_lines(number: int, account: Account | None, job: str) -> str:
    """Returns a rank's account of itself, for the text of an exception that blames it."""
    if account is None:
        return f"Rank {number} does not say what it does: it is stopped or cut off, or its Python is held up."
    rank = jobs([account]).get(job, {}).get(number)
    if rank is None:
        return f"Rank {number} says that it has left the job."
    waits = f"waits for {_ranks(sorted(rank.waits_for))}: " if rank.waits_for else ""
    first, *rest = rank.doing()
    return "\n".join([f"Rank {number} says: {waits}{first}", *rest])


def whole(ranks: dict[int, Rank], world_size: int, job: str) -> str:
    return "\n".join([f"job {job}: {world_size} ranks", *table(ranks, range(world_size)), "", *verdicts(ranks, world_size)])


def _towards(rank: Rank, peer: int) -> str:
    step = next(step for step in rank.steps if peer in step.peers)
    return step.at if step.number is None else f"{step.at} of {step.name}"


def _cycle(waiting: dict[int, set[int]]) -> list[int]:
    """Every rank that is waited for waits itself, so a walk comes back."""
    path = [min(number for number, peers in waiting.items() if peers)]
    while True:
        following = min(waiting[path[-1]])
        if following in path:
            return [*path[path.index(following) :], following]
        path.append(following)


def _ranks(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}" if numbers else "no rank"


def seconds(us: int) -> str:
    if us < 1000:
        return f"{us} us"
    return f"{us / 1e6:.1f} s" if us >= 100_000 else f"{us / 1e3:.1f} ms"
