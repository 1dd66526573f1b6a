"""Tensors that own an object: it lives as long as any reference to their memory, and can be found by what is in it."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import weakref
from typing import Any

import torch

from pplx_comm.errors import Error


@functools.cache
def _memory_type(nbytes: int) -> Any:
    return type("Memory", (ctypes.Array,), {"_type_": ctypes.c_char, "_length_": nbytes})


class Held:
    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._found: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def keep(self, what: object, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, int64, as a tensor that owns `what`. Its first element is what it is found by."""
        memory = _memory_type(tensor.nbytes).from_buffer(tensor.numpy())
        memory.what = what
        kept = torch.frombuffer(memory, dtype=torch.int64)
        with self._lock:
            number = next(self._numbers)
            self._found[number] = memory
        kept[0] = number
        return kept

    def of(self, tensor: torch.Tensor) -> Any:
        memory = self._found.get(int(tensor.view(torch.int64)[0]))
        if memory is None:
            raise Error("combine: what this dispatch left for its combine is gone")
        return memory.what
