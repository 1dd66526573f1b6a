"""One control connection to one peer: frames and file descriptors, sent by any thread, read by the control thread."""

from __future__ import annotations

import array
import collections
import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from pplx_comm.control.deadlines import USER_TIMEOUT_SECONDS
from pplx_comm.control.frames import FrameError, FrameReader, Kind
from pplx_comm.control.inbox import close_fds

FDS_PER_FRAME = 128  # the kernel takes 253 in one message
READS_IN_A_ROW = 16  # then the other connections get their turn
ON_THE_MESH = frozenset(Kind) - frozenset(kind for kind in Kind if kind < Kind.GOODBYE)


class Connection:
    def __init__(self, rank: int, sock: socket.socket, want_write: Callable[[Connection], None]) -> None:
        sock.setblocking(False)
        self.rank = rank
        self.sock = sock
        self._want_write = want_write
        self.is_tcp = sock.family != socket.AF_UNIX
        self._lock = threading.RLock()
        self._queue: collections.deque[tuple[memoryview, list[int]]] = collections.deque()
        self._reader = FrameReader(ON_THE_MESH)
        self._received_fds: list[int] = []
        self._broken = False

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Never blocks and never fails: the rest follows when the socket takes it, and the reading side notices a broken
        connection.
        """
        copies = [os.dup(fd) for fd in fds]  # the caller may close its own as soon as this returns
        with self._lock:
            self._queue.append((memoryview(data), copies))
            if len(self._queue) > 1:
                return
            pending = self.flush()
        if pending:
            self._want_write(self)

    def flush(self) -> bool:
        """Write as much as the socket takes. True if something is left."""
        with self._lock:
            while self._queue:
                data, fds = self._queue[0]
                try:
                    if self._broken:
                        raise BrokenPipeError
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                    sent = (
                        self.sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
                        if not self.is_tcp
                        else self.sock.send(data, socket.MSG_NOSIGNAL)
                    )
                except (BlockingIOError, InterruptedError):
                    return True
                except OSError as problem:
                    if problem.errno == errno.ETOOMANYREFS:  # too many descriptors in flight
                        time.sleep(0.001)  # until the peer has read them: nothing announces that
                        return True
                    self._broken = True
                    self._drop_queue()
                    return False
                close_fds(fds)
                if sent == len(data):
                    self._queue.popleft()
                else:
                    self._queue[0] = data[sent:], []
            return False

    def receive(self) -> tuple[list[tuple[Kind, bytes, list[int]]], str | None]:
        """The frames that can be read now, and why the connection ended, if it did. FDS frames carry their descriptors.

        One read brings the descriptors of at most one message, and an FDS frame is one message: so when the frame is
        complete, the descriptors that have come are its own.
        """
        frames: list[tuple[Kind, bytes, list[int]]] = []
        for _ in range(READS_IN_A_ROW):
            try:
                data = self._read()
                if not data:
                    return frames, "its connection closed without a goodbye"
                for kind, payload in self._reader.feed(data):
                    fds: list[int] = []
                    if kind == Kind.FDS:
                        fds, self._received_fds = self._received_fds, []
                    frames.append((kind, payload, fds))
            except (BlockingIOError, InterruptedError):
                break
            except TimeoutError:
                return frames, f"its host has not acknowledged anything for {USER_TIMEOUT_SECONDS:g} s"
            except OSError as problem:
                return frames, f"its connection broke without a goodbye ({problem.strerror})"
            except FrameError as problem:
                return frames, f"it sent an invalid message ({problem})"
        return frames, None

    def _read(self) -> bytes:
        if self.is_tcp:
            return self.sock.recv(1 << 16)
        space = socket.CMSG_SPACE(FDS_PER_FRAME * 4)
        data, ancillary, _, _ = self.sock.recvmsg(1 << 16, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._received_fds += fds
        if len(self._received_fds) > FDS_PER_FRAME:
            raise FrameError("file descriptors that were not announced")
        return data

    def finish_sending(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with self._lock:
            self._broken = True
            self._drop_queue()
            close_fds(self._received_fds)
            self._received_fds = []
            self.sock.close()

    def close_in_child(self) -> None:
        """After fork, without the lock, which a thread that does not exist here may hold."""
        self.sock.close()
        for _, fds in self._queue:
            close_fds(fds)
        close_fds(self._received_fds)

    def _drop_queue(self) -> None:
        for _, fds in self._queue:
            close_fds(fds)
        self._queue.clear()
