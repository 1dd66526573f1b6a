"""Published end-to-end times of pplx-garden: 256 experts, top-8, hidden 7168, FP8 there and bfloat16 back, microseconds."""

from __future__ import annotations

from dataclasses import dataclass

README = "pplx-garden, docs/fabric-lib.md, p50"
README_PREFILL = "pplx-garden, docs/fabric-lib.md, prefill"
AWS = "awsome-distributed-ai, pplx-garden benchmark on p5en"
P5 = "another team's run of pplx-garden on p5"
B200 = "whn09/pplx-garden-benchmark on p6-b200, 288 experts, p50"


@dataclass(frozen=True)
class Point:
    fabric: str
    ranks: int
    tokens: int
    dispatch_us: float
    combine_us: float | None
    source: str
    experts: int = 256


# The sums of dispatch and combine that this project measures itself against: the paper's bars for EFA.
REFERENCE_SUMS = {16: 459.0, 32: 582.0, 64: 692.0}

DECODE = (
    Point("efa-p5en", 16, 128, 214.8, 241.5, README),
    Point("efa-p5en", 32, 128, 229.1, 335.0, README),
    Point("efa-p5en", 64, 128, 266.7, 391.2, README),
    Point("cx7", 16, 128, 110.2, 185.5, README),
    Point("cx7", 32, 128, 153.9, 266.3, README),
    Point("cx7", 64, 128, 187.5, 309.1, README),
)
# Not in the paper: another team's run at twice the ranks, and instances whose costs were never published.
BEYOND = (
    Point("efa-p5en", 128, 128, 424.5, 588.5, AWS),
    Point("efa-p6", 16, 128, 145.0, 221.0, B200, experts=288),
    Point("efa-p5", 16, 128, 397.0, 517.0, P5),
)
# Others whose GPUs post to a ConnectX-7 of 400 Gbit/s themselves (IBGDA), 128 tokens. DeepEP's low-latency kernels send a row for
# each expert, where ours go to a rank once. pplx-kernels sends so, too; its times fall as ranks are added, so something else than
# the network takes them, and the model has nothing to say of it.
DEEPEP = "DeepEP V1 low latency, H100, measured by pplx-garden"
DEEPEP_README = "DeepEP V1 low latency, H800, its README"
PPLX_KERNELS = "pplx-kernels, IBGDA, its README"
BY_DEEPEP = (
    Point("cx7", 16, 128, 123.9, 203.0, DEEPEP),
    Point("cx7", 32, 128, 159.1, 285.0, DEEPEP),
    Point("cx7", 64, 128, 177.9, 325.0, DEEPEP),
    Point("cx7", 16, 128, 118.0, 195.0, DEEPEP_README),
    Point("cx7", 32, 128, 155.0, 273.0, DEEPEP_README),
    Point("cx7", 64, 128, 173.0, 314.0, DEEPEP_README),
    Point("cx7", 128, 128, 192.0, 369.0, DEEPEP_README),
    Point("cx7", 256, 128, 194.0, 360.0, DEEPEP_README),
)
# Its normal mode crosses the network once per node. The README has GB/s at 4096 tokens: (token, node) pairs, its own node's among
# them, by the bytes of a row. The choices of its test lie in 4 nodes at most, which limits EP64 alone.
DEEPEP_NORMAL = "DeepEP V1 normal, H800, its README"
DEEPEP_NORMAL_GB = {16: (43.0, 43.0), 32: (58.0, 57.0), 64: (51.0, 50.0)}
# Choices in any node. Its dispatches are left out: the same table has 1,810 us at EP8, where the kernels take 502 on an H200.
DEEPEP_COMBINE = "DeepEP V1 normal, H100, measured by pplx-garden"
DEEPEP_COMBINE_US = {16: 1863.9, 32: 3565.4, 64: 5922.7}
MORI_EP16 = (76.0, 122.0)  # its README: MI300X and ConnectX-7, 128 tokens, kernels that cross once per node
BY_GPUS = (
    *BY_DEEPEP,
    Point("cx7", 16, 128, 622.4, 668.1, PPLX_KERNELS),
    Point("cx7", 32, 128, 427.6, 481.4, PPLX_KERNELS),
    Point("cx7", 64, 128, 317.4, 529.9, PPLX_KERNELS),
    Point("cx7", 128, 128, 307.7, 593.9, PPLX_KERNELS),
)
# The combine of ConnectX at EP16 is printed as 1062.2, a fifth of what the link allows: a misprint, left out.
PREFILL = (
    Point("efa-p5en", 16, 4096, 3196.7, 5379.1, README_PREFILL),
    Point("efa-p5en", 32, 4096, 4619.0, 8271.5, README_PREFILL),
    Point("efa-p5en", 64, 4096, 5334.3, 9779.3, README_PREFILL),
    Point("cx7", 16, 4096, 2734.8, None, README_PREFILL),
    Point("cx7", 32, 4096, 4011.8, 7526.8, README_PREFILL),
    Point("cx7", 64, 4096, 4665.2, 8771.1, README_PREFILL),
)
