"""Ranks that have a process group of gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Crew, Crews
from harness.crew import Environment


class GlooCrews(Crews):
    """folder: makes a new one, in which the ranks of a crew meet."""

    def __init__(self, world_size: int, folder: Callable[[str], Path], env: Environment) -> None:
        super().__init__(world_size, env)
        self._folder = folder

    @property
    def now(self) -> Crew:
        before, crew = self._crew, super().now
        if crew is not before:
            crew.run("gloo:start", str(self._folder("gloo") / "store"))
        return crew


def start(me: Any, store: str) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=me.rank, world_size=me.world_size)
