"""Cases of several AllToAlls on one Communicator, or several threads, when a rank dies: see test_reset.py."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cases import DTYPES, Case
from failure_cases import Survivor
from harness import until
from outcomes import must, raised
from rank_cases import open_all_to_all

import pplx_comm as pc
from pplx_comm.device import steps
from pplx_comm.wiring.carriers import Carriers, ProxyCarrier


@contextlib.contextmanager
def several(me: Any, case: Case, count: int, **changes: Any) -> Iterator[list[pc.AllToAll]]:
    """AllToAlls of different shapes."""
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(open_all_to_all(me, _of(case, number), **changes)) for number in range(count)]


def _of(case: Case, number: int) -> Case:
    return replace(case, seed=case.seed + number, hidden=case.hidden + 64 * number)


def _die(path: str) -> None:
    Path(path).write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(me: Any) -> None:
    """A failure of which no rank dies, latched on every rank."""
    if me.rank == 0:
        me.comm.control.abort("the test fails this generation")
    until("the failure is here", lambda: me.comm.failure is not None)


def _good_steps(me: Any, case: Case, all_to_alls: list[pc.AllToAll], alive: list[bool], count: int = 2) -> None:
    """Steps of all in turn, compared with a reference."""
    survivors = [Survivor(me, _of(case, number), a2a, alive) for number, a2a in enumerate(all_to_alls)]
    for _ in range(count):
        for survivor in survivors:
            survivor.step()
    for a2a in all_to_alls:
        a2a.check()


def each_as_its_call_raises(me: Any, case: Case, victim: int, path: str) -> int:
    """Two AllToAlls step in turn. A survivor resets an AllToAll whose call raises, and no other. Returns the number of resets."""
    alive, resets = [True] * me.world_size, 0
    with several(me, case, 2) as both:
        _good_steps(me, case, both, alive)
        me.comm.barrier()
        if me.rank == victim:
            _die(path)
        alive[victim] = False
        good = 0
        while good < 4:
            must(resets < 5, "two AllToAlls never recover: after", good, "good steps")
            survivors = [
                Survivor(me, replace(_of(case, number), seed=resets + number), a2a, alive) for number, a2a in enumerate(both)
            ]
            for survivor in survivors * 2:
                try:
                    survivor.step()
                    good += 1
                except pc.PeerError:
                    good, resets = 0, resets + 1
                    must(survivor.a2a.reset() == [rank for rank in range(me.world_size) if alive[rank]], "the survivors")
                    break
        me.comm.barrier()
    return resets


def in_opposite_orders(me: Any, case: Case) -> None:
    """Rank 0 resets a then b, the others b then a."""
    with several(me, case, 2, timeout=2.0) as both:
        _good_steps(me, case, both, [True] * me.world_size, 1)
        with contextlib.suppress(pc.PeerError):  # a rank that is further on raises it
            me.comm.barrier()
        _fail(me)
        for a2a in both if me.rank == 0 else both[::-1]:
            must(a2a.reset() == list(range(me.world_size)), "the survivors")
        _good_steps(me, case, both, [True] * me.world_size)


def threads_reset(me: Any, case: Case, how: str, count: int = 3) -> None:
    """`count` threads of every rank call reset() together: of one AllToAll, each of its own, or of the Communicator."""
    with several(me, case, count) as all_to_alls:
        _good_steps(me, case, all_to_alls, [True] * me.world_size, 1)
        with contextlib.suppress(pc.PeerError):
            me.comm.barrier()
        _fail(me)
        calls: list[Callable[[], list[int]]] = {
            "of one": lambda: [all_to_alls[0].reset] * count,
            "each its own": lambda: [a2a.reset for a2a in all_to_alls],
            "of the communicator": lambda: [me.comm.reset] * count,
        }[how]()
        told = _together([lambda call=call: raised(lambda: must(call() == [*range(me.world_size)], "survivors")) for call in calls])
        must(all(not each["type"] for each in told), "every thread hears of all survivors:", told)
        for a2a in all_to_alls:  # the others are this thread's, if all reset one
            must(a2a.reset() == [*range(me.world_size)], "survivors")
        _good_steps(me, case, all_to_alls, [True] * me.world_size)


def _together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Returns the calls' results, each called in a thread of its own."""
    results: list[Any] = [None] * len(calls)
    ready = threading.Barrier(len(calls))

    def run(number: int) -> None:
        ready.wait()
        results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def lanes(me: Any, case: Case, victim: int, path: str, count: int = 2) -> None:
    """A thread for each AllToAll, none of which knows of the others: it steps, and resets when its own call raises."""
    alive = [True] * me.world_size
    left = [rank for rank in range(me.world_size) if rank != victim]
    with several(me, case, count) as all_to_alls:
        running = threading.Barrier(count + 1)

        def lane(number: int) -> str:
            a2a = all_to_alls[number]
            Survivor(me, _of(case, number), a2a, alive).step()
            running.wait()
            told = raised(lambda: [Survivor(me, _of(case, number), a2a, alive).step() for _ in range(10**6)])
            if not told.get("is_peer"):
                return f"lane {number}: {told}"
            now = a2a.reset()
            if now != left:
                return f"lane {number}: the survivors are {now}"
            survivor = Survivor(me, _of(case, number), a2a, [rank in left for rank in range(me.world_size)])
            return str(raised(lambda: [survivor.step() for _ in range(4)]).get("type"))

        if me.rank == victim:

            def die() -> str:
                running.wait()
                _die(path)
                return ""
        else:

            def die() -> str:
                running.wait()
                return ""

        told = _together([*(lambda number=number: lane(number) for number in range(count)), die])
        must(not any(told), "every lane recovers:", told)
        me.comm.barrier()


def between_calls(me: Any, case: Case) -> None:
    """One thread's AllToAll is reset by the thread of another one, while its thread is in no call, with a step open. It hears of it;
    its own reset() changes nothing of what the first thread has begun since."""
    everyone = list(range(me.world_size))
    with several(me, case, 2) as (one, other):
        _good_steps(me, case, [one], [True] * me.world_size, 1)
        steps = Survivor(me, _of(case, 1), other, [True] * me.world_size)

        def in_its_thread(call: Callable[[], Any]) -> Any:
            return _together([lambda: raised(call)])[0]

        opened: list[Any] = []
        told = in_its_thread(lambda: opened.append(steps.send().wait()))
        must(told["message"] == "returned None", "a first step:", told)
        with contextlib.suppress(pc.PeerError):
            me.comm.barrier()
        _fail(me)
        must(one.reset() == everyone, "the survivors")
        generation = me.comm.control.generation
        d = Survivor(me, _of(case, 0), one, [True] * me.world_size).send()
        for call in (steps.send, opened[0].release, other.check, steps.send):
            told = in_its_thread(call)
            must(told.get("is_peer") and "the test fails" in told["message"], "the other thread hears of it:", told)
        must(other.reset() == everyone, "the same survivors")
        d.wait()
        d.release()
        _good_steps(me, case, [one, other], [True] * me.world_size)
        must(me.comm.control.generation == generation, "no new generation")
        with contextlib.suppress(pc.PeerError):
            me.comm.barrier()
        _fail(me)
        must(me.comm.reset() == everyone, "the survivors")
        _good_steps(me, case, [one, other], [True] * me.world_size)


def before_its_first_step(me: Any, case: Case) -> None:
    """A reset of the first AllToAll recovers the second one, too, in which this rank's only thread has not begun a step."""
    with several(me, case, 2) as (one, other):
        _good_steps(me, case, [one], [True] * me.world_size, 1)
        if me.rank == 0:
            Survivor(me, _of(case, 1), other, [True] * me.world_size).send()
        with contextlib.suppress(pc.PeerError):
            me.comm.barrier()
        _fail(me)
        (other if me.rank == 0 else one).reset()
        _good_steps(me, case, [one, other], [True] * me.world_size)


def open_on_some(me: Any, case: Case) -> list[Any]:
    """Rank 1 has closed the second AllToAll, the others have not. reset() says so everywhere, and works when all have."""
    with several(me, case, 2) as (one, other):
        _good_steps(me, case, [one, other], [True] * me.world_size, 1)
        with contextlib.suppress(pc.PeerError):
            me.comm.barrier()
        if me.rank == 1:
            other.close()
        _fail(me)
        told = [raised(me.comm.reset), raised(one.check), me.comm.failure.message]
        other.close()
        must(me.comm.reset() == list(range(me.world_size)), "the survivors")
        _good_steps(me, case, [one], [True] * me.world_size)
        return told


def closed_meanwhile(me: Any, case: Case, before: str) -> None:
    """All ranks close the second of three AllToAlls while reset() resets the first. It is left out."""
    with several(me, case, 3) as (first, second, third):
        with contextlib.suppress(pc.PeerError):  # a rank that is further on raises it
            me.comm.barrier()
        _fail(me)
        call = getattr(first._steps, before)
        setattr(first._steps, before, lambda *arguments: (second.close(), call(*arguments)))
        must(me.comm.reset() == list(range(me.world_size)), "the survivors")
        _good_steps(me, case, [first], [True] * me.world_size)
        _good_steps(me, _of(case, 2), [third], [True] * me.world_size)
        me.comm.barrier()


def closed_while_it_is_rewired(me: Any, case: Case) -> list[Any]:
    """Rank 1 closes the second of three AllToAlls when its memory is just registered. All hear of it. The next reset() is good."""
    with several(me, case, 3) as (first, second, third):
        with contextlib.suppress(pc.PeerError):
            me.comm.barrier()
        register = ProxyCarrier.register

        def register_and_close(carrier: ProxyCarrier, carried: Any) -> Any:
            regions = register(carrier, carried)
            if carried is second._steps.session.wiring.exchange:
                second.close()
            return regions

        if me.rank == 1:
            ProxyCarrier.register = register_and_close  # type: ignore[method-assign]
        _fail(me)
        told = [raised(me.comm.reset), raised(third.check)]
        ProxyCarrier.register = register  # type: ignore[method-assign]
        second.close()
        must(me.comm.reset() == list(range(me.world_size)), "the survivors")
        _good_steps(me, case, [first], [True] * me.world_size)
        _good_steps(me, _of(case, 2), [third], [True] * me.world_size)
        used = [(carrier.users, generation) for (_, generation, *_), carrier in Carriers.of(me.comm.control).proxies.items()]
        must(used == [(2, me.comm.control.generation)], "carriers by users and generation:", used)
        me.comm.barrier()
        return told


def nothing_failed(me: Any, case: Case) -> None:
    """reset() changes nothing, on one rank or on all."""
    with several(me, case, 2) as both:
        _good_steps(me, case, both, [True] * me.world_size, 1)
        everyone, generation = list(range(me.world_size)), me.comm.control.generation
        if me.rank != 1:
            must(me.comm.reset() == both[1].reset() == everyone, "the survivors")
        _good_steps(me, case, both, [True] * me.world_size, 1)
        me.comm.barrier()
        must(me.comm.control.generation == generation, "no new generation")


def late_thread(me: Any, case: Case) -> None:
    """A thread that was told of the failure calls reset() when another one has reset, and begun a step, which goes on."""
    with several(me, case, 2) as (one, other):
        with contextlib.suppress(pc.PeerError):  # a rank that is further on raises it
            me.comm.barrier()
        _fail(me)
        told, begun = threading.Event(), threading.Event()
        found: list[Any] = []

        def come_late() -> None:
            found.append(raised(other.check).get("is_peer"))
            told.set()
            begun.wait()
            found.append(me.comm.reset())

        thread = threading.Thread(target=come_late)
        thread.start()
        told.wait()
        everyone = me.comm.reset()
        generation = me.comm.control.generation
        d = Survivor(me, _of(case, 0), one, [True] * me.world_size).send()
        begun.set()
        thread.join()
        must(found == [True, everyone], "the late thread hears the same:", found)
        d.wait()
        d.release()
        me.comm.barrier()
        must(me.comm.control.generation == generation, "no new generation")


def late_callback(me: Any, case: Case) -> None:
    """A callback calls reset() when another thread has reset, and begun a step, which goes on."""
    with several(me, case, 1) as (a2a,):
        with contextlib.suppress(pc.PeerError):
            me.comm.barrier()
        begun, done = threading.Event(), threading.Event()
        found: list[Any] = []

        def callback(_: Any) -> None:
            begun.wait()
            found.append(me.comm.reset())
            done.set()

        remove = me.comm.on_failure(callback)
        _fail(me)
        everyone = me.comm.reset()
        generation = me.comm.control.generation
        d = Survivor(me, case, a2a, [True] * me.world_size).send()
        begun.set()
        must(done.wait(20) and found == [everyone], "the callback hears the same:", found)
        remove()
        d.wait()
        d.release()
        me.comm.barrier()
        must(me.comm.control.generation == generation, "no new generation")


def own_error(me: Any, case: Case) -> dict[str, Any]:
    """Rank 1's own code raises between dispatch and combine, and it calls reset(). The others wait for its combine."""
    with several(me, case, 2) as both:
        return _own_error(me, case, both)


def _own_error(me: Any, case: Case, all_to_alls: list[pc.AllToAll]) -> dict[str, Any]:
    survivor = Survivor(me, _of(case, 0), all_to_alls[0], [True] * me.world_size)
    if me.rank == 1:
        survivor.send().wait()
        told = {}
    else:
        told = raised(survivor.step)
    must(me.comm.reset() == list(range(me.world_size)), "the survivors")
    _good_steps(me, case, all_to_alls, [True] * me.world_size)
    return told


def with_a_notice(me: Any, case: Case) -> dict[str, Any]:
    """Rank 1's own code raises with a step open, when no call has said yet that rows of the step before did not fit."""
    case = replace(case, layout="padded", rows=1, in_flight=2)
    with several(me, case, 1) as (a2a,):
        x, ids = torch.ones(4, case.hidden, dtype=DTYPES[case.dtype]), torch.full((4, case.top_k), 3, dtype=torch.int32)  # rank 1's
        first = a2a.dispatch_send(x, ids)
        a2a.dispatch_send(x, ids)
        told = raised(first.wait if me.rank == 1 else first.release)
        must(me.comm.reset() == list(range(me.world_size)), "the survivors")
        a2a.check()
        me.comm.barrier()
        return told


def after_an_unsaid_failure(me: Any, case: Case) -> dict[str, Any]:
    """reset() finds a failure in rank 1's memory that no call has raised. The next reset() of that thread gives up its open step."""
    with several(me, case, 1) as (a2a,):
        with contextlib.suppress(pc.PeerError):
            me.comm.barrier()
        if me.rank == 1:
            a2a._steps.device.core.fail("abort", 1, 1, 0, "a word that no call has read")
        else:
            until("rank 1 has told of it", lambda: me.comm.failure is not None)
        must(me.comm.reset() == list(range(me.world_size)), "the survivors")
        return _own_error(me, case, [a2a])


def one_more_dies(me: Any, case: Case, dying: int, place: str, path: str) -> dict[str, Any]:
    """The last rank dies, and `dying` while comm.reset() resets the second AllToAll. The next comm.reset() is good."""
    alive, first = [True] * me.world_size, me.world_size - 1
    with several(me, case, 2) as both:
        _good_steps(me, case, both, alive, 1)
        with contextlib.suppress(pc.PeerError):
            me.comm.barrier()
        if me.rank == first:
            _die(path)
        until("the death is known", lambda: me.comm.failure is not None)
        if me.rank == dying:
            rewire, seen = steps.rewire, []

            def rewire_one(*arguments: Any) -> None:
                seen.append(arguments)
                if len(seen) == 2:
                    _die(path)
                rewire(*arguments)

            if place == "second":
                steps.rewire = rewire_one
            else:
                exchange = me.comm.control.all_gather
                me.comm.control.all_gather = lambda payload, tag, *rest: (
                    _die(path) if tag == place else exchange(payload, tag, *rest)
                )
        told = raised(me.comm.reset)
        told["later"] = [raised(a2a.check) for a2a in both]
        alive = [rank not in (dying, first) for rank in range(me.world_size)]
        must(me.comm.reset() == [rank for rank in range(me.world_size) if alive[rank]], "the survivors")
        _good_steps(me, case, both, alive)
        me.comm.barrier()
        return told


def closed_and_kept(me: Any, case: Case) -> str:
    """Nine AllToAlls, each closed before the next, and all of them referenced. Then eight that are open, and one too many."""
    kept = []
    for _ in range(9):
        kept.append(open_all_to_all(me, case))
        kept[-1].close()
    with several(me, case, 8):
        return str(raised(lambda: open_all_to_all(me, case))["message"])
