"""Memory of an AllToAll that experts write to and peers fetch from, lent for as long as somebody holds it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pplx_comm._cuda as _cuda

_use_count: Any = torch._C._storage_Use_Count


class LentMemory:
    """Bytes of an AllToAll's memory, which live as long as a tensor of them."""

    def __init__(self, memory: _cuda.SharedMemory, at: int, nbytes: int) -> None:
        self._memory = memory
        self.at = memory.address + at, nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address, nbytes = self.at
        return {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}

    def tensor(self, device: torch.device) -> torch.Tensor:
        return torch.as_tensor(self, device=device)


class Lent:
    """What a dispatch is lent: memory for what experts make of its rows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._storage = tensor, tensor.untyped_storage()
        self._idle = self._uses()
        self.stream: int | None = None
        self.dispatch = 0
        """The number of the one that was lent it last, on that stream."""
        self.captured = False

    def _uses(self) -> int:
        return int(_use_count(self._storage._cdata))

    @property
    def free(self) -> bool:
        """Whether no tensor lies there but this one's own."""
        return self._uses() == self._idle

    def tensor(self) -> torch.Tensor:
        """Whoever holds it, or a view of it, keeps the memory."""
        return self._tensor.detach()


class Lender:
    """The buffers of an AllToAll. One is lent again behind the work that used it, on the same stream, as torch's own memory is: who
    works on another one keeps the tensor until that has ended. And at least in_flight dispatches later: peers have closed the step
    then in which they fetched. What a graph was captured with, eager dispatches do not get any more.
    """

    def __init__(self, buffers: list[Lent], in_flight: int) -> None:
        self._buffers, self._in_flight = deque(buffers), in_flight
        self.dispatches = 0
        """Launches, with lent memory or without."""
        self.lent = 0

    def lend(self, stream: int, capturing: bool) -> Lent | None:
        """For the next dispatch: the one that was lent least recently of those that may be."""
        number = self.dispatches + 1
        for buffer in self._buffers:
            here = capturing or (not buffer.captured and buffer.stream in (None, stream))
            late = buffer.dispatch == 0 or number - buffer.dispatch >= self._in_flight
            if here and late and buffer.free:
                self._buffers.remove(buffer)
                self._buffers.append(buffer)
                buffer.stream, buffer.dispatch, buffer.captured = stream, number, buffer.captured or capturing
                self.lent += 1
                return buffer
        return None
