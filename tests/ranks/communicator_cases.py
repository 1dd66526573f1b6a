"""Cases of test_communicator.py, test_launchers.py and test_rendezvous.py."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from typing import Any

from harness import Member, until

_kept: list[Any] = []


def _told(problem: BaseException) -> dict[str, Any]:
    return {
        "kind": type(problem).__name__,
        "message": str(problem),
        "peer": getattr(problem, "peer", None),
        "phase": getattr(problem, "phase", None),
        "seen": getattr(problem, "seen", None),
    }


def _raised(call: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns what `call` raises, and after how many seconds."""
    from outcomes import Starved

    from pplx_comm.errors import Error

    starved, began = Starved(), time.monotonic()
    try:
        value = call(*args, **kwargs)
    except Error as problem:
        return {**_told(problem), "seconds": time.monotonic() - began, "starved": starved.seconds()}
    raise AssertionError(f"nothing was raised, it returned {value!r}")


def _open_fds() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def meet(me: Member, timeout: float = 20, node_size: int | None = None, rounds: int = 3) -> dict[str, Any]:
    """Start, do some collectives, and say how the world looks."""
    with me.communicator(timeout=timeout, node_size=node_size) as comm:
        for number in range(rounds):
            comm.barrier()
            got = comm.control.all_gather({"rank": comm.rank, "number": number}, "meet")
            assert got == [{"rank": rank, "number": number} for rank in range(comm.world_size)], got
        tcp = sorted(rank for rank, connection in comm.control._mesh.connections.items() if connection.is_tcp)
        return {
            "rank": comm.rank,
            "pids": [entry["pid"] for entry in comm.control.all_gather({"pid": os.getpid()}, "pids")],
            "node_of": comm.control.node_of,
            "node": [comm.node_rank, comm.node_size, comm.local_rank, comm.host_rank],
            "same": [comm.control.same_node(rank) for rank in range(comm.world_size)],
            "tcp": tcp,
        }


def meet_at(me: Member, hosts: list[str]) -> dict[str, Any]:
    """As `meet`, where rank 0's name has these addresses."""
    from pplx_comm.control import rendezvous

    rendezvous.resolve = lambda host: hosts  # type: ignore[assignment]
    return meet(me)


def meet_with_few_descriptors(me: Member, limit: int) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    me.say("ready")
    return meet(me, timeout=10)


def fail_to_meet(me: Member, timeout: float = 2, node_size: int | None = None) -> dict[str, Any]:
    return _raised(me.communicator, timeout=timeout, node_size=node_size)


def meet_or_fail(me: Member, timeout: float = 3, node_size: int | None = None) -> dict[str, Any]:
    from pplx_comm.errors import Error

    try:
        return meet(me, timeout, node_size)
    except Error as problem:
        return _told(problem)


def many_starts(me: Member, times: int) -> int:
    """One after the other at one address, with nothing in between."""
    for number in range(times):
        with me.communicator() as comm:
            assert comm.control.all_gather({"number": number}, "start") == [{"number": number}] * comm.world_size
    return times


def share_files(me: Member, count: int) -> dict[str, Any]:
    """Each rank maps all others' memory, writes there, and reads what the others wrote."""
    from pplx_comm.control import memfd

    with me.communicator() as comm:
        before = len(_open_fds())
        comm.barrier()
        fds = [memfd.allocate(4096, "a test") for _ in range(count)]
        theirs = comm.control.share_fds(fds, "files")
        assert sorted(theirs) == [rank for rank in range(comm.world_size) if rank != comm.rank and comm.control.same_node(rank)]
        for rank, received in theirs.items():
            assert len(received) == count
            for number, fd in enumerate(received):
                assert not os.get_inheritable(fd)
                with mmap.mmap(fd, 4096) as page:
                    page[16 * comm.rank : 16 * comm.rank + 8] = (number * 100 + rank).to_bytes(8, "little")
                os.close(fd)
        comm.barrier()
        for number, fd in enumerate(fds):
            with mmap.mmap(fd, 4096) as page:
                for rank in theirs:
                    assert page[16 * rank : 16 * rank + 8] == (number * 100 + comm.rank).to_bytes(8, "little")
            os.close(fd)
        empty = comm.control.share_fds([], "nothing")
        assert empty == {rank: [] for rank in theirs}, empty
        # Different numbers from different ranks, and a bad descriptor on one rank, which all must hear of.
        uneven = comm.control.share_fds([0] * comm.rank, "uneven")
        assert {rank: len(received) for rank, received in uneven.items()} == {rank: rank for rank in theirs}
        for received in uneven.values():
            for fd in received:
                os.close(fd)
        bad = _raised(comm.control.share_fds, [987654] if comm.rank == 1 else [0], "bad")
        assert "rank 1 cannot send" in bad["message"], bad
        comm.barrier()
        assert len(_open_fds()) == before, (_open_fds(), before)
        comm.barrier()
        return {"ok": True}


def out_of_fds(me: Member) -> dict[str, Any]:
    """Rank 1 has no descriptors left to receive into."""
    from pplx_comm.errors import Error

    with me.communicator() as comm:
        if comm.rank == 1:
            used = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        comm.barrier()
        try:  # not _raised(), which opens files: once rank 0's descriptors are here, rank 1 can open none
            value = comm.control.share_fds([0] * 8 if comm.rank == 0 else [], "too many", timeout=10)
        except Error as problem:
            return _told(problem)
        raise AssertionError(f"nothing was raised, it returned {value!r}")


def threads(me: Member, count: int, rounds: int) -> int:
    """Barriers and exchanges from many threads at once, each tag its own sequence."""
    with me.communicator() as comm:
        problems: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for turn in range(rounds):
                    comm.barrier()
                    got = comm.control.all_gather({"turn": turn, "number": number}, f"thread {number}")
                    assert got == [{"turn": turn, "number": number}] * comm.world_size, got
            except BaseException as problem:
                problems.append(problem)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for problem in problems:
            raise problem
    return count


def big_exchange(me: Member, nbytes: int) -> int:
    """More than any socket buffer takes."""
    with me.communicator(node_size=1) as comm:
        got = comm.control.all_gather({"text": str(comm.rank) * nbytes}, "big")
        for rank, entry in enumerate(got):
            assert entry is not None
            assert entry["text"] == str(rank) * nbytes
    return nbytes


def wait_for_death(me: Member, node_size: int | None, victim: int) -> dict[str, Any]:
    """Says when the callback came, by the machine's clock, and what is raised then."""
    comm = me.communicator(node_size=node_size)
    heard: list[Any] = []
    came = threading.Event()

    def callback(failure: Any) -> None:
        heard.append((time.monotonic(), failure))
        came.set()

    comm.on_failure(callback)
    comm.barrier()
    me.say("ready")
    if comm.rank == victim:
        me.hear()
    barrier = _raised(comm.barrier, timeout=20)
    assert came.wait(5)
    at, failure = next(entry for entry in heard if entry[1].kind == "death")
    later = _raised(comm.barrier, timeout=20)
    known: list[Any] = []
    comm.on_failure(known.append)
    until("it is told what has happened", lambda: "death" in [failure.kind for failure in known])
    began = time.monotonic()
    comm.close()
    return {
        "at": at,
        "kind": failure.kind,
        "rank": failure.rank,
        "calls": len([1 for _, failure in heard if failure.kind == "death"]),
        "barrier": barrier,
        "later": later,
        "known": [failure.rank for failure in known if failure.kind == "death"],
        "close_seconds": time.monotonic() - began,
    }


def leave_early(me: Member, how: str) -> dict[str, Any]:
    """Rank 1 ends in the given way while the others wait in a barrier."""
    comm = me.communicator(node_size=2)
    heard: list[Any] = []
    comm.on_failure(heard.append)
    comm.barrier()
    if comm.rank == 1:
        me.say("leaves")
        if how != "drop":
            _kept.append(comm)
        if how == "close":
            comm.close()
            comm.close()
            return _raised(comm.barrier)
        if how == "drop":
            del comm
            gc.collect()
            for thread in threading.enumerate():
                if thread.name.startswith("pplx_comm"):
                    thread.join(5)
            os._exit(0)
        if how == "raise":
            raise RuntimeError("a user's\nmistake")
        if how == "os._exit":
            os._exit(3)
        sys.exit(0)
    result = _raised(comm.barrier, timeout=20)
    # The waiting thread may learn it before the control thread has told all ranks.
    until("rank 1 is dead and the callback was called", lambda: not comm.control.alive()[1] and bool(heard))
    result["alive"] = comm.control.alive()
    result["failure"] = comm.failure.kind if comm.failure else None
    result["heard"] = [[failure.kind, failure.rank] for failure in heard]
    if how != "os._exit":
        # The others still reach each other.
        from pplx_comm.communicator import Communicator

        assert isinstance(comm, Communicator)
        assert comm.control.agree_survivors(10) == [0, 2, 3]
        assert comm.control.all_gather({}, "after") == [{}, None, {}, {}]
    comm.close()
    return result


def leave_after_barrier(me: Member, rounds: int) -> int:
    """The first rank out of the last barrier closes at once; no other rank may fail for that."""
    for number in range(rounds):
        comm = me.communicator(node_size=1 + number % 2)
        comm.barrier()
        comm.close()
    return rounds


def wrong_order(me: Member) -> dict[str, Any]:
    """Time is up when all have called, and for all together: what each sees of the others depends on no clock."""
    from pplx_comm.control import collectives as _collectives

    comm = me.communicator()
    comm.barrier()
    mesh, others = comm.control._mesh, {0, 1, 2} - {me.rank}
    told: list[dict[str, Any]] = []
    waiter = threading.Thread(
        target=lambda: told.append(_raised(comm.control.all_gather, {}, "this" if me.rank == 0 else "that", timeout=60))
    )
    waiter.start()
    until(
        "the others have called",
        lambda: {rank for rank, call in list(mesh.inbox._last.items()) if call.tag in ("this", "that")} == others,
    )
    me.say("waits")
    me.hear()
    _collectives.remaining = lambda deadline: 0.0  # type: ignore[assignment]
    with mesh.condition:
        mesh.condition.notify_all()
    waiter.join()
    me.say("told")
    me.hear()  # a rank that left earlier would be named for leaving
    comm.close()
    return told[0]


def stopped(me: Member, seconds: float) -> dict[str, Any]:
    """Rank 1 is stopped by the test for a while. No rank may take that for its death."""
    with me.communicator(node_size=1) as comm:
        comm.barrier()
        me.say("ready")
        if comm.rank == 0:
            timeout = _raised(comm.barrier, timeout=seconds)
            me.say("waited", timeout)
        else:
            me.hear()
            comm.barrier()
        comm.control.all_gather({}, "again", timeout=10)
        return {"failure": comm.failure is not None}


def abort(me: Member) -> dict[str, Any]:
    """Rank 2 aborts, then rank 3 does; each rank keeps the first that it heard, and it ends their waits."""
    comm = me.communicator(node_size=2)
    heard: list[Any] = []
    forgotten: list[Any] = []
    comm.on_failure(heard.append)
    comm.on_failure(forgotten.append)()
    comm.barrier()
    me.say("ready")
    if comm.rank == 2:
        me.hear()
        comm.control.abort("rank 2 waited for rank 0", peer=0, phase="combine_recv", step=7)
        comm.control.abort("a second one")
    waited = _raised(comm.barrier, timeout=20)
    assert not forgotten
    until("the callback was called", lambda: bool(heard))  # the waiting thread may wake before
    assert [failure.kind for failure in heard] == ["abort"], heard
    raised = _raised(comm.control.raise_if_failed)
    survivors = comm.control.agree_survivors(10)
    assert comm.failure is None
    comm.barrier(10)
    me.say("again")
    if comm.rank == 3:
        me.hear()
        comm.control.abort("once more", kind="timeout")
    again = _raised(comm.barrier, timeout=20)
    until("the callback was called again", lambda: "timeout" in [failure.kind for failure in heard])
    comm.close()
    return {
        "waited": waited,
        "raised": raised,
        "failure": [heard[0].kind, heard[0].rank, heard[0].peer, heard[0].phase, heard[0].step],
        "survivors": survivors,
        "again": again,
        "calls": [failure.kind for failure in heard if failure.kind != "closed"],
        "generation": comm.control.generation,
    }


def abort_with_nonsense(me: Member) -> dict[str, Any]:
    """Rank 1 passes on what it found in a damaged word."""
    comm = me.communicator()

    def until_told(timeout: float) -> None:
        comm.barrier(timeout)  # a rank may hear of it before it has left this one
        if comm.rank == 1:
            comm.control.abort("a damaged word\0\ud800" + "x" * 10000, peer=4711, phase="\ud800" * 5000, step=7)
        comm.barrier(timeout)

    told = _raised(until_told, timeout=20)
    failure = comm.failure
    survivors = comm.control.agree_survivors(20)
    comm.close()
    return {**told, "failure": [failure.kind, failure.rank, failure.peer, failure.step], "survivors": survivors}


def bad_timeouts(me: Member, timeouts: list[Any]) -> list[list[str]]:
    """Returns the error of each, from every entry that takes one; the Communicator stays as good as before."""
    from pplx_comm.communicator import Communicator

    with me.communicator() as comm:
        comm.barrier()
        entries = [
            lambda timeout: Communicator.from_env(timeout=timeout),
            comm.barrier,
            lambda timeout: comm.agree(True, timeout),
            lambda timeout: comm.control.all_gather({}, "bad", timeout),
            lambda timeout: comm.control.share_fds([], "bad", timeout),
            comm.control.agree_survivors,
        ]
        told = [
            [_raised(entry, float(timeout) if timeout != "5" else timeout)["message"] for entry in entries] for timeout in timeouts
        ]
        comm.barrier()
    return told


def survivors(me: Member, seed: int, doomed: list[int]) -> dict[str, Any]:
    """The doomed die at random moments of the agreement and around it; the others must agree each time they ask."""
    comm = me.communicator(node_size=1 + seed % 3)
    rng = random.Random(f"{seed} {comm.rank}")
    comm.barrier()
    if comm.rank in doomed:
        threading.Timer(rng.random() * 0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    answers = []
    from pplx_comm.errors import PeerError

    deadline = time.monotonic() + 20
    while True:
        time.sleep(rng.random() * 0.01)
        agreed = comm.control.agree_survivors(20)
        answers.append(agreed)
        try:
            got = comm.control.all_gather({"answers": answers[-1]}, "compare", timeout=20)
        except PeerError:
            assert time.monotonic() < deadline
            continue
        lists = [entry["answers"] for entry in got if entry is not None]
        assert lists == [agreed] * len(agreed), (agreed, got)
        if not set(agreed) & set(doomed):
            break
        # The doomed are still among us: wait for their death to be noticed, then agree anew.
        with contextlib.suppress(PeerError):
            comm.control.all_gather({}, "idle" if comm.rank not in doomed else "never", timeout=20)
    comm.barrier(10)
    generation = comm.control.generation
    comm.close()
    return {"agreed": agreed, "generation": generation}


def agree_late(me: Member) -> dict[str, Any]:
    """Rank 0 gives up before rank 1 comes; when it asks again, the agreement that the others reached is its own."""
    with me.communicator() as comm:
        comm.barrier()
        first = None
        if comm.rank == 0:
            first = _raised(comm.control.agree_survivors, 0.3)
            me.say("gave up")
        else:
            me.hear()
        agreed = comm.control.agree_survivors(10, after=0)
        comm.barrier(10)
        return {"agreed": agreed, "first": first}


def fork_child(me: Member) -> dict[str, Any]:
    """A forked child holds nothing of the Communicator and may not use it; its end changes nothing for the parent."""
    comm = me.communicator(node_size=1 if me.world_size > 2 else None)
    comm.barrier()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        text = "nothing raised"
        try:
            comm.barrier(5)
        except Exception as problem:
            text = f"{type(problem).__name__}: {problem}"
        sockets = sum(name.startswith(("socket:", "anon_inode:[eventpoll]", "anon_inode:[eventfd]")) for name in _open_fds())
        comm.close()
        os.write(writer, f"{sockets}|{text}".encode())
        os.close(writer)
        # An exit that runs everything which a process runs at its end.
        sys.exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        count, _, text = pipe.read().partition("|")
    _, status = os.waitpid(pid, 0)
    comm.barrier(10)
    comm.close()
    return {"sockets": int(count), "text": text, "status": status}


def die_with_child(me: Member) -> dict[str, Any]:
    """Rank 1 forks a child that lives on, and is killed: the others must notice."""
    comm = me.communicator(node_size=2)
    heard: list[Any] = []
    came = threading.Event()

    def callback(failure: Any) -> None:
        heard.append(time.monotonic())
        came.set()

    comm.on_failure(callback)
    comm.barrier()
    if comm.rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        me.say("child", child)
        me.hear()  # until it is killed
    me.say("child", None)
    result = _raised(comm.barrier, timeout=20)
    assert came.wait(5)
    comm.close()
    return {**result, "at": heard[0]}


def interrupted(me: Member) -> float:
    """Ctrl-C on rank 0, in the middle of a barrier that would last a minute."""
    with me.communicator() as comm:
        comm.barrier()
        if comm.rank == 1:
            me.hear()
            return 0.0
        began = time.monotonic()
        try:
            me.say("ready")
            comm.barrier(60)
        except KeyboardInterrupt:
            return time.monotonic() - began
        raise AssertionError("the barrier was not interrupted")


def cycles(me: Member, times: int) -> dict[str, Any]:
    """Open and close again and again: what stays behind."""
    node_size = [None, 1, 2]

    def measure() -> tuple[int, int, int]:
        gc.collect()
        rss = int(open("/proc/self/statm").read().split()[1]) * 4096
        return len(_open_fds()), threading.active_count(), rss

    def once(number: int) -> None:
        comm = me.communicator(node_size=node_size[number % 3])
        comm.barrier()
        if number % 7 == 3:
            del comm  # the garbage collector's way
        else:
            comm.close()

    alone = threading.active_count()
    for number in range(12):
        once(number)
    # A dropped Communicator closes in its own thread.
    until("all are closed", lambda: threading.active_count() == alone)
    before = measure()
    for number in range(times):
        once(number)
    deadline = time.monotonic() + 20
    while measure()[:2] != before[:2] and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"before": before, "after": measure(), "fds": _open_fds()}


def held_up(me: Member) -> float:
    """A failure callback that does not return must not hold up close()."""
    comm = me.communicator()
    release = threading.Event()
    held = threading.Event()

    def callback(_: Any) -> None:
        held.set()
        release.wait(30)

    comm.on_failure(callback)
    comm.barrier()
    me.say("ready")
    if comm.rank == 1:
        me.hear()
        return 0.0
    assert held.wait(20)
    began = time.monotonic()
    comm.close()
    seconds = time.monotonic() - began
    release.set()
    return seconds


def waits_in_a_callback(me: Member) -> list[Any]:
    """Rank 1 is killed. Callbacks of the others agree on the survivors and meet them, as any thread may."""
    comm = me.communicator()
    told: list[Any] = []
    done = threading.Event()

    def callback(failure: Any) -> None:
        if failure.kind == "death":
            told.append(comm.reset(timeout=20))
            comm.barrier()
            done.set()

    comm.on_failure(callback)
    comm.barrier()
    me.say("ready")
    if comm.rank == 1:
        me.hear()
    assert done.wait(60)
    comm.close()
    return told


def close_beside_stopped(me: Member) -> float:
    """close() while the peer is stopped and does not read what is in the way of the goodbye."""
    comm = me.communicator(node_size=1)
    comm.barrier()
    me.say("ready")
    if comm.rank == 1:
        me.hear()
        return 0.0
    me.hear()
    with contextlib.suppress(Exception):
        comm.control.all_gather({"text": "x" * (30 << 20)}, "too much", timeout=0.2)
    began = time.monotonic()
    comm.close()
    return time.monotonic() - began


def on_close(me: Member) -> list[str]:
    """Called once, in order, whatever one of them raises."""
    called: list[str] = []
    comm = me.communicator()

    def second() -> None:
        called.append("second")
        raise RuntimeError("ignored")

    comm.control.on_close(lambda: called.append("first"))
    comm.control.on_close(second)
    comm.control.on_close(lambda: called.append("third"))
    comm.close()
    comm.close()
    return called


def weak_callback(me: Member) -> bool:
    """An object that listens for failures is not kept alive by that."""

    class Listener:
        def hear(self, failure: Any) -> None:
            raise AssertionError("called after its end")

    import weakref

    with me.communicator() as comm:
        listener = Listener()
        comm.on_failure(listener.hear)
        gone = weakref.ref(listener)
        del listener
        gc.collect()
        comm.control.abort("no rank hears this")
        return gone() is None


def _unacknowledged(sock: socket.socket) -> int:
    return int.from_bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[24:28], sys.byteorder)


def lost_cable(me: Member) -> dict[str, Any]:
    """Rank 2's network goes away without a word."""
    comm = me.communicator()
    heard: list[Any] = []
    came = threading.Event()

    def callback(failure: Any) -> None:
        heard.append([failure.kind, failure.rank, time.monotonic(), failure.message])
        came.set()

    comm.on_failure(callback)
    comm.barrier()
    # On an idle link nothing but the kernel's probes can tell.
    tcp = [each.sock for each in comm.control._mesh.connections.values() if each.is_tcp]
    until("everything was acknowledged", lambda: not any(map(_unacknowledged, tcp)))
    me.say("ready", comm.control.node_of)
    assert came.wait(20)
    # Only the two sides can agree among themselves.
    survivors = comm.control.agree_survivors(20)
    comm.close()
    return {"heard": heard[0], "survivors": survivors}


def wait_seconds(me: Member) -> dict[str, Any]:
    return _raised(me.communicator, timeout=2 if me.rank == 1 else 30)


def half_way(me: Member) -> dict[str, Any]:
    """Comes to rank 0 and no further, until told."""
    from pplx_comm.control.launch import detect
    from pplx_comm.control.rendezvous import meet

    bootstrap = meet(detect(os.environ), 20, os.environ)
    me.say("met")
    me.hear()
    return _raised(bootstrap.allgather, {})


def cut_link(me: Member) -> dict[str, Any]:
    """Only the connection between 0 and 1 breaks: rank 2 cannot see that, and must hear of it."""
    comm = me.communicator()
    comm.barrier()
    me.say("ready")
    if comm.rank == 0:
        me.hear()
        comm.control._mesh.connections[1].sock.shutdown(socket.SHUT_RDWR)
    # Rank 2 may still get through the first one.
    waited = _raised(lambda: [comm.barrier(20) for _ in range(3)])
    from pplx_comm.errors import PeerError

    survivors, excluded = None, None
    try:
        survivors = comm.control.agree_survivors(20)
    except PeerError as problem:
        excluded = _told(problem)
    me.say("agreed")
    me.hear()
    comm.close()
    return {"waited": waited, "survivors": survivors, "excluded": excluded}


def leave_with_a_reason(me: Member) -> dict[str, Any]:
    """Rank 1's abort is lost on its way, and it leaves: the goodbye tells why."""
    comm = me.communicator()
    comm.barrier()
    if comm.rank == 1:
        comm.control._mesh._spread = lambda failure: None
        comm.control.abort("the first cause", phase="dispatch_recv")
        comm.close()
        return {}
    told = _raised(comm.barrier, timeout=20)
    comm.close()
    return told


def reset_beside_a_wait(me: Member) -> dict[str, Any]:
    """One thread waits in a collective while another calls reset: the wait ends, and says why."""
    with me.communicator() as comm:
        told: list[dict[str, Any]] = []
        waiter = threading.Thread(target=lambda: told.append(_raised(comm.control.all_gather, {}, f"of {comm.rank}", timeout=20)))
        waiter.start()
        until("the other thread waits", lambda: f"of {comm.rank}" in comm.control._mesh.inbox._counts)
        comm.control.agree_survivors(20)
        waiter.join()
        comm.barrier(20)
        return told[0]
