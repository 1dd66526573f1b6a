"""The fabrics: published microbenchmarks, and the costs that follow from them. One set per fabric, for every figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from types import MappingProxyType

from bench.model import _model

# "Table n": of the paper on pplx-garden's fabric-lib (arXiv 2510.27656), as quoted by two readers each.
KIB = 1024
# Per write, the scatters of Table 9 cost the same at EP8, 16, 32 and 64 if they go to all other ranks, as the route exchange does.
SCATTER_WRITES = 63
# Its benchmark hands a request to a thread: enqueue, dequeue, then up to the first write. Table 8, EP64, p50.
SUBMIT_US = 0.120 + 0.855 + 0.441


@dataclass(frozen=True)
class Microbenchmarks:
    """Published figures of one GPU's NICs."""

    what: str
    nics: int
    single_write: dict[int, float]  # KiB: Gbit/s, one write at a time. Table 2.
    paged_write: dict[int, tuple[float, float]]  # KiB: Gbit/s, million writes/s, many at once. Table 2.
    scatter_us: float  # posting a scatter at EP64, p50. Tables 8 and 9.


EFA_P5EN = Microbenchmarks(
    what="AWS p5en: EFA, 2 x 200 Gbit/s a GPU",
    nics=2,
    single_write={64: 16, 256: 54, 1024: 145, 32768: 336},
    paged_write={1: (17, 2.11), 8: (138, 2.10), 16: (274, 2.08), 64: (364, 0.69)},
    scatter_us=27.886,
)
CX7 = Microbenchmarks(
    what="ConnectX-7: 1 x 400 Gbit/s a GPU, verbs posted by the host",
    nics=1,
    single_write={64: 44, 256: 116, 1024: 245, 32768: 378},
    paged_write={1: (91, 11.10), 8: (320, 4.89), 16: (367, 2.80), 64: (370, 0.71)},
    scatter_us=8.502,
)


@dataclass(frozen=True)
class Parameter:
    name: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Fabric:
    name: str
    what: str
    parameters: tuple[Parameter, ...]
    microbenchmarks: Microbenchmarks | None  # that its costs come from; None: another's were scaled

    def value(self, name: str) -> float:
        return next(p.value for p in self.parameters if p.name == name)

    def costs(self, changed: Mapping[str, float] = MappingProxyType({})) -> _model.FabricCosts:
        """Costs for the simulation; `changed` varies a parameter."""
        c = _model.FabricCosts()
        values = {p.name: p.value for p in self.parameters} | dict(changed)
        c.nics = int(values.pop("nics"))
        c.bytes_per_us = values.pop("gbit_per_nic") * 1e9 / 8 / 1e6
        c.ack_us = values.get("latency_us", 0.0)
        for name in ("depth", "interleave", "chunk_bytes"):
            if name in values:
                setattr(c, name, int(values.pop(name)))
        for name, value in values.items():
            if not hasattr(c, name):
                raise ValueError(f"a fabric has no {name}")
            setattr(c, name, value)
        return c


COMPLETION_US = 1 / EFA_P5EN.paged_write[1][1] - EFA_P5EN.scatter_us / SCATTER_WRITES
POLL_US = 0.05


def _derived(name: str, m: Microbenchmarks) -> Fabric:
    best = max(max(m.single_write.values()), max(gbit for gbit, _ in m.paged_write.values()))
    post = m.scatter_us / SCATTER_WRITES
    # Time of a small single write beyond its bytes: the way there and back, and the host's part.
    beyond = [kib * KIB * 8 / gbit / 1e3 - kib * KIB * 8 / best / 1e3 for kib, gbit in m.single_write.items() if kib <= 1024]
    latency = (mean(beyond) - SUBMIT_US - m.nics * post - POLL_US - COMPLETION_US) / 2
    return Fabric(
        name=name,
        what=m.what,
        microbenchmarks=m,
        parameters=(
            Parameter("nics", m.nics, "", "the instance"),
            Parameter("gbit_per_nic", best / m.nics, "Gbit/s", "best bandwidth of Table 2, over the NICs"),
            Parameter(
                "latency_us",
                latency,
                "us",
                "single writes up to 1 MiB, Table 2: half of what they take beyond their bytes and the host's part (Table 8); "
                "the acknowledgement takes as long",
            ),
            Parameter("post_us", post, "us", f"{m.scatter_us} us for a scatter at EP64, Tables 8 and 9, over its 63 writes"),
            Parameter(
                "completion_us", COMPLETION_US, "us", "EFA: paged 1 KiB writes, Table 2, less the post; the same for ConnectX"
            ),
            Parameter(
                "nic_message_us",
                m.nics / m.paged_write[1][1],
                "us",
                "paged 1 KiB writes, Table 2: a NIC is at least as fast as the host that fed it",
            ),
            Parameter("poll_us", POLL_US, "us", "assumed: an empty completion queue is a read of cached memory"),
            Parameter("depth", 4096, "writes", "the proxy's limit of writes in flight on an endpoint"),
            Parameter("interleave", 0, "", "assumed: a NIC sends all that it has by turns"),
        ),
    )


def _scaled(p5en: Fabric, name: str, what: str, nics: int, gbit: Parameter) -> Fabric:
    """Other NICs of which nothing smaller than the bandwidth was published, so the rest is p5en's."""
    changed = {"nics": Parameter("nics", nics, "", "the instance"), "gbit_per_nic": gbit}
    parameters = tuple(
        changed.get(p.name, Parameter(p.name, p.value, p.unit, "assumed: as on p5en" if p.name != "depth" else p.source))
        for p in p5en.parameters
    )
    return Fabric(name=name, what=what, parameters=parameters, microbenchmarks=None)


_P5EN, _CX7 = _derived("efa-p5en", EFA_P5EN), _derived("cx7", CX7)
_P5_GBIT = Parameter("gbit_per_nic", 3108 / 32, "Gbit/s", "3108 of 3200 Gbit/s over 32 NICs, published by pplx-garden's author")
_P6_GBIT = Parameter(
    "gbit_per_nic", _P5EN.value("gbit_per_nic") * 2, "Gbit/s", "assumed: the share of 400 Gbit/s that p5en gets of 200"
)
FABRICS: dict[str, Fabric] = {
    fabric.name: fabric
    for fabric in (
        _P5EN,
        _CX7,
        _scaled(_P5EN, "efa-p6", "AWS p6-b200: EFA, 1 x 400 Gbit/s a GPU", 1, _P6_GBIT),
        _scaled(_P5EN, "efa-p5", "AWS p5: EFA of the generation before, 4 x 100 Gbit/s a GPU", 4, _P5_GBIT),
    )
}
