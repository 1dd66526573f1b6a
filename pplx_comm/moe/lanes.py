"""Where the step of a pass runs while its products do: on a stream beside the current one, or in a thread beside this one.

What a lane is given runs in order. `kept` holds what its work reads until the current stream has waited for it.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from pplx_comm.all_to_all import AllToAll
from pplx_comm.handles import Combined, Combining, Dispatched

Call = Callable[[], Any]


class Lane(Protocol):
    groups_before_combine: int
    """Of groups of experts, how many are computed before combine begins: at most all but the last one."""
    kept: list[Any]

    def send(self, dispatch: Callable[[], Dispatched], dispatch_send: Callable[[], Dispatched], whole: bool) -> Dispatched:
        """The send half of a dispatch, or all of it, behind what the current stream does so far."""
        ...

    def receive(self, a2a: AllToAll, d: Dispatched) -> None:
        """The receive half, where it is left. The current stream, or thread, does not wait for it."""
        ...

    def combine(self, combine: Call, produce: Call, begun: Call) -> None:
        """A combine that waits for words which `produce`, on the current stream, raises. begun: waits until producers run."""
        ...

    def wait(self) -> None:
        """The current stream waits for all so far: the rows of the dispatch, say."""
        ...

    def result(self) -> Combining | Combined | None:
        """What combine returned, before join() on a GPU."""
        ...

    def join(self) -> None:
        """The current stream waits for all that was given, which ends the lane."""
        ...

    def give_up(self, failed: bool) -> None:
        """After an error on this side. failed: the step has failed, too, and its own error is raised."""
        ...


def lane_of(device: torch.device) -> Lane:
    return StreamLane(device) if device.type == "cuda" else ThreadLane()


_streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


class StreamLane:
    groups_before_combine = sys.maxsize  # combine takes multiprocessors while it waits

    def __init__(self, device: torch.device) -> None:
        here = torch.cuda.current_stream(device)
        key = device, here.cuda_stream
        # One for each stream: what was freed beside a stream is used again behind it. A step's thread blocks come before those
        # of products.
        if key not in _streams:
            _streams[key] = torch.cuda.Stream(device, priority=-1)
        self._stream, self._device = _streams[key], device
        self.kept: list[Any] = []
        self._result: Any = None

    def send(self, dispatch: Callable[[], Dispatched], dispatch_send: Callable[[], Dispatched], whole: bool) -> Dispatched:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return dispatch() if whole else dispatch_send()

    def receive(self, a2a: AllToAll, d: Dispatched) -> None:
        with torch.cuda.stream(self._stream):
            a2a.dispatch_recv(d)

    def combine(self, combine: Call, produce: Call, begun: Call) -> None:
        before = torch.cuda.current_stream(self._device).record_event()
        produce()  # first: a launch may make the host wait for the GPU, where combine would wait for that launch
        self._stream.wait_event(before)
        with torch.cuda.stream(self._stream):
            begun()
            self._result = combine()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def result(self) -> Combining | Combined | None:
        result: Combining | Combined | None = self._result
        return result

    def join(self) -> None:
        self.wait()
        self.kept.clear()

    def give_up(self, failed: bool) -> None:
        self.join()


class ThreadLane:
    groups_before_combine = 0

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self._jobs: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._received = threading.Event()

    def send(self, dispatch: Callable[[], Dispatched], dispatch_send: Callable[[], Dispatched], whole: bool) -> Dispatched:
        return dispatch_send()

    def receive(self, a2a: AllToAll, d: Dispatched) -> None:
        begun = threading.Event()
        inference = torch.is_inference_mode_enabled()

        def run() -> None:
            begun.set()
            with torch.inference_mode(inference), torch.no_grad():
                try:
                    a2a.dispatch_recv(d)
                    self._received.set()
                    for job in iter(self._jobs.get, None):
                        self._result = job()
                except BaseException as error:
                    self._error = error
                finally:
                    self._received.set()

        # Nobody waits for it at the end of the process: its own waits end.
        self._thread = threading.Thread(target=run, name="pplx_comm moe", daemon=True)
        self._thread.start()
        begun.wait()
        while not (d.received or d.receiving.locked() or self._received.is_set()):
            time.sleep(0)  # else this thread would receive when it asks for a group's rows, and nothing would run beside that

    def combine(self, combine: Call, produce: Call, begun: Call) -> None:
        self._jobs.put(combine)
        produce()

    def wait(self) -> None:
        self._received.wait()
        if self._error is not None:
            self._end()

    def result(self) -> Combining | Combined | None:
        self._end()
        result: Combining | Combined | None = self._result
        return result

    def join(self) -> None:
        self.kept.clear()

    def give_up(self, failed: bool) -> None:
        self._jobs.put(None)
        if failed:
            self._end()

    def _end(self) -> None:
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
