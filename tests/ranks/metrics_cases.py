"""Functions that ranks run for test_metrics.py."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import prometheus_client
from cases import Case
from dump_cases import step
from harness import Member, until
from outcomes import must
from prometheus_client.parser import text_string_to_metric_families
from rank_cases import Runner, open_all_to_all

from pplx_comm import metrics
from pplx_comm.wiring.carriers import Carriers

"""How late a rank or a link is: far more than ranks wait for a core."""
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(families: Any) -> Samples:
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def a_file(me: Any, case: Case, folder: str) -> None:
    """PPLX_COMM_METRICS: the file has what a collector reads, comes anew, and is gone when the Communicator is closed."""
    comm = me.communicator()
    with open_all_to_all(Member(me.rank, me.world_size, comm=comm), case) as a2a:
        Runner(me, case, a2a).run()
        registry = prometheus_client.CollectorRegistry()
        registry.register(metrics.Collector(comm))

        def mine() -> list[Samples]:
            files = [path.read_text() for path in Path(folder).glob("*.prom")]
            found = [samples(text_string_to_metric_families(text)) for text in files]
            own = ("pplx_comm_world_size", frozenset({"pplx_job": comm.control.job, "rank": str(me.rank)}.items()))
            return [each for each in found if own in each]

        until("the file has all that was counted", lambda: mine() == [samples(registry.collect())])
        steps = {name[1]: value for name, value in samples(registry.collect()).items() if name[0] == "pplx_comm_steps_total"}
        must(list(steps.values()) == [case.steps], "steps", steps)
    comm.close()
    until("the files are gone", lambda: not list(Path(folder).iterdir()))


def no_such_folder(me: Any, case: Case) -> list[str]:
    """Steps go on; the log says it once."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pplx_comm").addHandler(handler)
    comm = me.communicator()
    with open_all_to_all(Member(me.rank, me.world_size, comm=comm), case) as a2a:
        Runner(me, case, a2a).run()
        until("the log has it", lambda: any("PPLX_COMM_METRICS" in line for line in heard))
    comm.close()
    return [line for line in heard if "PPLX_COMM_METRICS" in line]


class Asked:
    """A proxy that counts how often it is asked to tell its counters, and may stand still."""

    def __init__(self, proxy: Any) -> None:
        self.proxy, self.times, self.still = proxy, 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.proxy, name)

    def takes_turns(self, within: float) -> bool:
        return not self.still

    def stats(self, fresh: bool) -> Any:
        self.times += fresh
        return self.proxy.stats(fresh)


def of_several(me: Any, case: Case) -> None:
    """One AllToAll is closed and referred to, two share a proxy, and one has two proxies of that provider."""
    closed = open_all_to_all(me, case)
    Runner(me, case, closed).run()
    closed.close()
    two_proxies = replace(case, proxy_threads=2)
    with open_all_to_all(me, case) as one, open_all_to_all(me, case) as other, open_all_to_all(me, two_proxies) as two:
        for a2a in (one, other, two):
            Runner(me, case, a2a).run()
        must(closed.stats()["object"] == one.stats()["object"], "a number is used again")

        def told() -> Samples:
            found = [
                ((family.name + end, frozenset(labels.items())), value)
                for family in metrics.families(me.comm.stats())
                for end, labels, value in family.samples
            ]
            must(len(dict(found)) == len(found), "each sample once", found)
            return dict(found)

        def values(name: str) -> list[float]:
            return [value for sample, value in told().items() if sample[0] == name]

        me.comm.barrier()
        until("all steps are counted", lambda: values("pplx_comm_steps_total") == 3 * [case.steps])
        for what in ("bytes", "writes"):
            until(
                f"all {what}",
                lambda: sum(values(f"pplx_comm_network_{what}_total")) == sum(a2a.stats()["proxy"][what] for a2a in (one, two)),
            )
        proxies = [proxy for carrier in Carriers.of(me.comm.control).proxies.values() for proxy in carrier.proxies]
        for proxy in proxies:
            proxy.proxy = Asked(proxy.proxy)
        before = told()
        must([proxy.proxy.times for proxy in proxies] == [1, 1, 1], "each is asked once")
        for proxy in proxies:
            proxy.proxy.still = True
        must(told() == before, "what was told last", before)
        must([proxy.proxy.times for proxy in proxies] == [1, 1, 1], "none is asked that stands still")


def served(me: Any, case: Case) -> dict[str, Any]:
    """Serves its counters on a port that the test is told, and takes steps until it hears that this is enough."""
    registry = prometheus_client.CollectorRegistry()
    with open_all_to_all(me, case) as a2a:
        registry.register(metrics.Collector(me.comm))
        server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
        me.say("port", server.server_port)
        runner, turns = Runner(me, case, a2a), 0
        while me.comm.agree(not me.is_told()):
            runner.run()
            turns += 1
        me.hear()
        a2a.stats()  # waits for the proxy, if it has no core
        stats = me.comm.stats()
        me.say("stats", stats)
        me.hear()
        server.shutdown()
        server.server_close()
        thread.join()
    must(me.comm.stats()["all_to_alls"] == [{**each, "closed": True} for each in stats["all_to_alls"]], "stats after close")
    return {"turns": turns, **stats}


def told_of_steps(me: Any, case: Case, late: int | None, late_us: int, times: int, steps: int) -> list[dict[str, Any]]:
    """Returns the counters before, and `times` times after `steps` steps. `late` has other work before each of them."""
    with me.communicator(node_size=case.node_size) as comm, open_all_to_all(Member(me.rank, me.world_size, comm=comm), case) as a2a:
        step(a2a, case)
        told = [comm.stats()]
        for _ in range(times):
            for _ in range(steps):
                if me.rank == late:
                    time.sleep(late_us / 1e6)
                step(a2a, case)
            told.append(comm.stats())
        comm.barrier()
    return told


def with_a_late_rank(me: Any, case: Case, late: int) -> int:
    """Takes steps until it hears that this is enough; one rank comes late to each."""
    turns = 0
    with open_all_to_all(me, case) as a2a:
        if me.rank == 0:
            me.say("job", me.comm.stats()["job"])
        runner = Runner(me, case, a2a)
        while me.comm.agree(not me.is_told()):
            if me.rank == late:
                time.sleep(0.1)
            runner.run()
            turns += 1
        me.hear()
    return turns
