"""python -m pplx_comm dump: what each rank of a job does, and what it waits for."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from pplx_comm import accounts, desks
from pplx_comm.accounts import Rank
from pplx_comm.desks import Answer
from pplx_comm.errors import Error

MOST_RANKS = 1 << 17
"""The most ranks of all jobs in one answer: each gets a line."""
HELP = "what each rank does and waits for, while a job hangs"
DESCRIPTION = """\
Asks the processes of this host that have a Communicator, your own ones and for root all, and by their connections the ranks on
other hosts. They answer whatever they wait for, also where a call into C keeps Python from running. Says where the chain of waits
ends.
"""


def ask_elsewhere(job: str, ranks: dict[int, Rank], found: Iterable[Answer], until: float | None = None) -> None:
    """Adds the ranks on other hosts, by the first process of the job that asks them."""
    for one in found:
        if job not in desks.jobs_of(one.value):
            continue
        answer = desks.ask(one.desk, "job account", until=until)
        if answer is not None and isinstance(answer.value, list):  # else its Python is held up, and it told of itself
            others = desks.understood(answer, lambda of: _jobs(of.value))
            if others is not None:
                ranks.update({rank: of for rank, of in others.get(job, {}).items() if rank not in ranks})
                return


def _jobs(told: list[accounts.Account]) -> dict[str, dict[int, Rank]]:
    """The ranks of each job in an answer. Raises where one of them cannot be shown."""
    found = accounts.jobs(told)
    for job, ranks in found.items():
        for number, rank in ranks.items():
            if not (isinstance(job, str) and all(0 <= each < rank.world_size <= MOST_RANKS for each in (number, *rank.waits_for))):
                raise ValueError(f"rank {number} of {rank.world_size}")
            "\n".join([*accounts.table(ranks, [number]), *rank.doing(), *details(rank)])
    if sum(_world_size(ranks) for ranks in found.values()) > MOST_RANKS:
        raise ValueError(f"more than {MOST_RANKS} ranks")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pid", nargs="?", type=int, metavar="PID", help="one process of this host alone")
    parser.add_argument("--job", help="the first letters of its name, as `top` and the log have it")
    parser.add_argument("--stacks", action="store_true", help="all threads of all ranks, and the last steps")
    parser.add_argument(
        "--frames", action="store_true", help="C++ frames of this host's processes; interrupts each thread by a signal"
    )
    parser.add_argument("--json", action="store_true", help="what the processes said, a line each")


def main(given: argparse.Namespace) -> int:
    try:
        return _show(given)
    except Error as problem:
        raise SystemExit(f"dump: {problem}") from None


def _show(given: argparse.Namespace) -> int:
    told = desks.ask_all("account", given.pid, given.job)
    found = [one for one in told if desks.understood(one, lambda of: _jobs([of.value])) is not None]
    if not found and given.job is not None:
        there = sorted({job for one in desks.ask_all("facts") for job in desks.jobs_of(one.value)})
        raise Error(f"no job {given.job} has a process on this host; there are {', '.join(there) or 'none'}")
    if not found:
        asked = "no process of this host tells" if given.pid is None else f"process {given.pid} does not tell"
        raise Error(f"{asked} this user anything: a job's processes do while they have a Communicator")
    of_jobs = {job: ranks for job, ranks in accounts.jobs(one.value for one in found).items() if job.startswith(given.job or "")}
    partly = [] if given.pid is not None else [job for job, ranks in of_jobs.items() if len(ranks) < _world_size(ranks)]
    with ThreadPoolExecutor(max(1, len(partly))) as pool:  # a job that stalls takes no other one's time
        until = time.monotonic() + desks.PATIENCE
        list(pool.map(lambda job: ask_elsewhere(job, of_jobs[job], found, until), partly))
    if given.json:
        said = {rank.where: rank.account for ranks in of_jobs.values() for rank in ranks.values()}
        sys.stdout.writelines(json.dumps(account) + "\n" for account in said.values())
        return 0
    for job, ranks in of_jobs.items():
        if given.pid is None:
            print(accounts.whole(ranks, _world_size(ranks), job))
        else:
            print("\n".join([f"job {job}, of {_world_size(ranks)} ranks", *accounts.table(ranks, sorted(ranks))]))
        if given.stacks:
            print("\n".join(line for rank in ranks.values() for line in details(rank)))
        print()
    if given.frames:
        for one in desks.ask_all("frames", given.pid, given.job):
            print("\n".join(desks.understood(one, lambda of: list(_frames(of))) or []))
    return 0


def _frames(of: Answer) -> Iterator[str]:
    yield f"process {of.pid}{': ' + of.value['problem'] if 'problem' in of.value else ''}"
    for name, thread, frames in of.value.get("threads", []):
        yield f"  thread {thread}, {name}:{' does not answer' if frames is None else ''}"
        yield from (f"    {frame}" for frame in frames or [])


def _world_size(ranks: dict[int, Rank]) -> int:
    return next(iter(ranks.values())).world_size


def details(rank: Rank) -> Iterator[str]:
    """All that a rank says."""
    yield f"\nrank {rank.number}, {rank.where}: {rank.account['process'].get('command', '')}"
    for one in rank.all_to_alls:
        if "problem" in one:
            yield f"{one['what']}: {one['problem']}"
            continue
        yield f"{one['what']}, device={one['device']!r}, generation {one['generation']}, next step {one['next_step']}"
        for tokens, launches in one["launches"]:
            for launch in launches:
                grid = f"{launch['grid']} x {launch['block']} threads, {launch['shared_bytes']} bytes shared"
                yield f"  {launch['call']} of {tokens} tokens: {launch['kernel']}, {grid}: {launch['why']}"
        for name in ("dispatched", "combined"):
            yield f"  last step that came, {name}: " + " ".join("-" if step is None else str(step) for step in one[name])
        if one["last"]:
            yield "  last steps: " + ", ".join(f"{step} {accounts.seconds(us)}" for step, us in one["last"])
    for entry in rank.account["entries"]:
        if "proxy" in entry["facts"] and entry["told"] is not None:
            counts = ", ".join(f"{name} {value}" for name, value in entry["told"].items() if name != "stands_still")
            state = "STANDS STILL" if entry["told"]["stands_still"] else "takes turns"
            yield f"proxy over {entry['facts']['proxy']} ({', '.join(entry['facts']['nics'])}) {state}: {counts}"
    yield "threads: " + ", ".join(f"{name} {state} {ms / 1e3:.1f} s" for name, state, ms in rank.account["threads"])
    yield rank.account["stacks"].rstrip()
