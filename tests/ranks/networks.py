"""Two network namespaces joined by a cable: two hosts, as far as a network goes. Only root can make them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from types import TracebackType

import pytest

PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def require_namespaces() -> None:
    """Skips, and says why, where this machine does not let us; whatever fails after that is a failure."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for command in ("ip", "tc", "unshare"):
        if shutil.which(command, path=PATH) is None:
            pytest.skip(f"no {command} command here (tools/install_deps.sh installs iproute2 where it may)")
    tried = subprocess.run(["unshare", "-nm", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this machine permits no namespaces: {tried.stderr.strip()}")


def enter(name: str) -> None:
    """The calling thread, and those it starts from now on."""
    with open(f"/run/netns/{name}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"setns {name}")


class Networks:
    """names[0] at 10.213.6.1 and names[1] at 10.213.6.2. Gone at the end, whatever happens."""

    addresses = ("10.213.6.1", "10.213.6.2")

    def __init__(self) -> None:
        require_namespaces()
        self.names = [f"pplx-{os.getpid()}-{side}" for side in "ab"]

    def __enter__(self) -> Networks:
        a, b = self.names
        try:
            for name in self.names:
                self._ip("netns", "add", name)
                self._ip("-n", name, "link", "set", "lo", "up")
            self._ip("-n", a, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", b)
            for name, address in zip(self.names, self.addresses, strict=True):
                self._ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            self.mend()
        except BaseException:
            self._delete()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._delete()

    def cut(self) -> None:
        """One end goes down, which takes the carrier from the other. No end gets a reset: packets just do not arrive."""
        self._ip("-n", self.names[1], "link", "set", "eth0", "down")

    def mend(self) -> None:
        for name in self.names:
            self._ip("-n", name, "link", "set", "eth0", "up")

    def share(self, address: str) -> None:
        """Both hosts get it, on an interface that leads nowhere: as every host with docker has 172.17.0.1."""
        for name in self.names:
            self._ip("-n", name, "link", "add", "docker0", "type", "veth", "peer", "name", "docker1")
            self._ip("-n", name, "address", "add", f"{address}/16", "dev", "docker0")
            for end in ("docker0", "docker1"):
                self._ip("-n", name, "link", "set", end, "up")

    def ports(self, side: int, first: int, last: int) -> None:
        """Limits the ports that the kernel chooses from there."""
        setting = f"echo {first} {last} >/proc/sys/net/ipv4/ip_local_port_range"
        self._ip("netns", "exec", self.names[side], "sh", "-c", setting)

    def limit(self, rate: str) -> None:
        """Both ways; what waits longer than 400 ms is dropped, as a switch would."""
        for name in self.names:
            self._run(
                "tc",
                "-n",
                name,
                "qdisc",
                "replace",
                "dev",
                "eth0",
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "32kb",
                "latency",
                "400ms",
            )

    def _ip(self, *arguments: str) -> None:
        self._run("ip", *arguments)

    @staticmethod
    def _run(*command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": PATH}, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    def _delete(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, env={**os.environ, "PATH": PATH}, check=False)
