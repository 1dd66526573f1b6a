"""Blocks in shards over two real NICs of a rank: two hosts of two interfaces each, which are network namespaces and two veth pairs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import clean_environment, seed

from pplx_comm.wiring import libfabric

HERE = Path(__file__).resolve().parent


@pytest.fixture
def two_hosts() -> Iterator[list[tuple[list[str], list[str]]]]:
    """Yields for each host the command that runs something there, and its interfaces."""
    ip = shutil.which("ip", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if ip is None or os.geteuid() != 0:
        pytest.skip("needs root and ip")
    tag = uuid.uuid4().hex[:6]
    names = [f"pplx-{tag}-{side}" for side in "ab"]
    interfaces = [[f"p{tag}{side}{number}" for number in (0, 1)] for side in "ab"]
    commands = [["netns", "add", name] for name in names]
    for number in (0, 1):
        (a, b), link = names, [interfaces[side][number] for side in (0, 1)]
        commands.append(["link", "add", link[0], "netns", a, "type", "veth", "peer", "name", link[1], "netns", b])
        for side in (0, 1):
            commands.append(["-n", names[side], "address", "add", f"10.78.{number}.{side + 1}/24", "dev", link[side]])
            commands.append(["-n", names[side], "link", "set", link[side], "up"])
    commands += [["-n", name, "link", "set", "lo", "up"] for name in names]
    try:
        for command in commands:
            done = subprocess.run([ip, *command], capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"ip {' '.join(command)}: {done.stderr}")
        yield [([ip, "netns", "exec", name], mine) for name, mine in zip(names, interfaces, strict=True)]
    finally:
        for name in names:
            subprocess.run([ip, "netns", "delete", name], capture_output=True)


@pytest.mark.skipif(libfabric.status()["error"] is not None, reason="needs libfabric")
@pytest.mark.slow
def test_shards_over_two_interfaces(two_hosts: list[tuple[list[str], list[str]]]) -> None:
    common = {
        **clean_environment(), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "PPLX_SEED": str(seed()), "PPLX_COMM_SHARD_BYTES": "4096",
        "PPLX_COMM_ADDR": "10.78.0.1:29991", "PPLX_COMM_SECRET": uuid.uuid4().hex, "PPLX_COMM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [*there, sys.executable, str(HERE / "two_nics_rank.py")],
            env={**common, "RANK": str(rank), "INTERFACES": ",".join(interfaces)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, (there, interfaces) in enumerate(two_hosts)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    for rank, ((out, _), (_, interfaces)) in enumerate(zip(outputs, two_hosts, strict=True)):
        report = json.loads(out.splitlines()[-1])
        # The statistics name the NICs, and the kernel counted at least what they say on each.
        assert [one["nic"].split() for one in report["both"]] == [
            [name, f"10.78.{i}.{rank + 1}"] for i, name in enumerate(interfaces)
        ]
        sent = [one["bytes"] for one in report["both"]]
        assert min(sent) > 0.4 * sum(sent) > 100_000
        assert all(counted >= said for counted, said in zip(report["both_carried"], sent, strict=True))
        (second,) = report["second"]
        assert second["nic"].startswith(interfaces[1]) and second["bytes"] > 100_000
        assert report["second_carried"][1] >= second["bytes"] > 4 * report["second_carried"][0]
        assert "rank 0 and not on the others" in report["differ"]
        assert "no interface or address 'eth77'" in report["unknown"]
