"""Stand-ins for what SGLang imports and only GPUs have, so that its own modules can be imported on a machine without one.

SGLang's modules name kernels in decorators and annotations and at the top of files, although the code that is tested here runs none
of
them: triton's and torchvision's wheels are for CUDA or weigh a gigabyte, and the others do not load without a driver. Nothing of
SGLang itself is replaced. A call of a stand-in other than as a decorator returns another one, which is no tensor: a test that came
to a kernel would fail.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

ABSENT = ("sgl_kernel", "torchvision", "triton")


class Anything:
    """A name in a module that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self._name}.{name}")

    def __call__(self, *given: Any, **_: Any) -> Any:
        """As a decorator, with arguments or without, it leaves alone what it decorates."""
        return given[0] if len(given) == 1 and callable(given[0]) and not isinstance(given[0], Anything) else self

    def __getitem__(self, _: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: Sequence[Any]) -> tuple[()]:
        return ()


class Module(types.ModuleType):
    __path__: Sequence[str] = ()
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    # torch asks once whether triton is there, and must hear no.
    import torch

    torch.compile(lambda x: x)
    sys.meta_path.insert(0, Finder())
