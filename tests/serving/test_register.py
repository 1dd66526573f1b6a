"""The plug-in is there when it is asked for, changes nothing when it is not, and refuses versions that were not tested."""

from __future__ import annotations

import pytest
from engines import HERE, SECONDS, Engines

pytestmark = pytest.mark.timeout(2 * SECONDS)
INERT = {
    "loaded": True,
    "kernels": False,
    "communicator": True,
    "default": "allgather_reducescatter",
    "default sequence": "True",
    "parsed other": "deepep_low_latency",
}


def test_names(run_afresh: Engines) -> None:
    plain = run_afresh.start([str(HERE / "registering.py")])
    set_otherwise = run_afresh.start([str(HERE / "registering.py")], PPLX_COMM_VLLM_TP="replicas", PPLX_COMM_VLLM_FORMAT="batched")
    another = run_afresh.start([str(HERE / "registering.py"), "0.99.0"])
    accepted = {"parsed": "pplx_comm", "ours": "pplx_comm"}
    assert plain.hears("REGISTERED") == INERT | accepted | {"ours sequence": "True", "ours batched": "False"}
    assert set_otherwise.hears("REGISTERED") == INERT | accepted | {"ours sequence": "False", "ours batched": "True"}
    refused = another.hears("REGISTERED")
    assert {name: refused[name] for name in INERT} == INERT
    for asked in ("ours", "ours sequence"):
        assert "0.99.0" in refused[asked] and "install a version that was tested" in refused[asked], refused
