"""The processes that the harness starts: `python -m harness nest FD` and `python -m harness rank FD`."""

from __future__ import annotations

import os
import socket
import sys
from multiprocessing.connection import Connection

from harness.environment import control_plane_only
from harness.member import serve
from harness.nest import keep


def main(what: str, fd: int) -> None:
    if what == "nest":
        keep(socket.socket(fileno=fd))
        return
    os.set_inheritable(fd, False)
    control_plane_only()
    serve(Connection(fd), int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


main(sys.argv[1], int(sys.argv[2]))
