"""How sockets of the control plane listen, connect, notice a lost host, and tell the user at the other end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterable

from pplx_comm.control.deadlines import KEEPALIVE_SECONDS, USER_TIMEOUT_SECONDS

BRIDGES = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "lxc")


def remaining(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def listen_unix(name: str) -> socket.socket:
    """Abstract namespace: no file to leave behind, and it ends with the process."""
    return _listen(socket.AF_UNIX, b"\0" + name.encode())


def listen_tcp(host: str, port: int) -> socket.socket:
    """`host` is a literal address. IPv6's wildcard takes IPv4 too."""
    reuse = (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if ":" not in host:
        return _listen(socket.AF_INET, (host, port), reuse)
    return _listen(socket.AF_INET6, (host, port), reuse, (socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1))


def _listen(family: int, address: bytes | tuple[str, int], *options: tuple[int, int, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            listener.setsockopt(*option)
        listener.bind(address)
        listener.listen(4096)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def watch_for_loss(sock: socket.socket) -> None:
    """TCP only. The kernel probes an idle connection every second, and gives up 5 s after the last acknowledgement.

    Keepalive and not messages of our own: the peer's kernel answers for a process that is slow or stopped, nothing
    piles up in that process's receive buffer (a full one would trip TCP_USER_TIMEOUT), and no thread wakes up for it.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(KEEPALIVE_SECONDS))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(KEEPALIVE_SECONDS))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(USER_TIMEOUT_SECONDS / KEEPALIVE_SECONDS))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(USER_TIMEOUT_SECONDS * 1000))


def wrong_user(sock: socket.socket) -> str | None:
    """Names the user at the other end if it is not this one. Over AF_UNIX the kernel says which user connected or listens."""
    if sock.family != socket.AF_UNIX:
        return None
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        return f"the other end belongs to uid {uid}, this rank to uid {os.geteuid()}"
    return None


def resolve(host: str) -> list[str]:
    """Literal addresses of `host`, IPv4 first (gethostbyname-style clusters often have half-configured IPv6)."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def local_addresses() -> list[str]:
    """Addresses of this host that others might reach; those of bridges and containers last."""
    found: list[tuple[bool, str]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # an interface without an IPv4 address
            found.append((name.startswith(BRIDGES), socket.inet_ntoa(reply[20:24])))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        for line in table:
            address, _, _, scope, _, name = line.split()
            if scope == "00":
                found.append((name.startswith(BRIDGES), str(ipaddress.IPv6Address(int(address, 16)))))
    return [address for _, address in sorted(found, key=lambda entry: entry[0]) if not is_loopback(address)]


Address = str | tuple[str, int]
"""An abstract unix name, or (literal host, port)."""


def describe(address: Address) -> str:
    return f"unix:@{address}" if isinstance(address, str) else f"{address[0]}:{address[1]}"


def start_connect(address: Address) -> socket.socket:
    """Writable once it is connected, or has failed."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    code = sock.connect_ex(b"\0" + address.encode() if isinstance(address, str) else address)
    if code in (0, errno.EINPROGRESS):
        return sock
    sock.close()
    raise OSError(code, os.strerror(code))


def close_all(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.close()
