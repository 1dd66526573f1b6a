"""How far the run is, on standard error: a bar on a terminal, a line per number of tokens elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

WIDTH = 30


class Progress:
    def __init__(self, tokens: Sequence[int], quiet: bool) -> None:
        self._tokens = tokens
        self._quiet = quiet
        self._bar = sys.stderr.isatty()
        self._shown = -1
        self._length = 0

    def show(self, tokens: int, what: str, fraction: float) -> None:
        """`fraction` of this number of tokens."""
        if self._quiet:
            return
        index = self._tokens.index(tokens)
        if self._bar:
            done = int(WIDTH * (index + fraction) / len(self._tokens))
            line = f"[{'#' * done}{'.' * (WIDTH - done)}] {tokens} tokens per rank: {what}"
            print(f"\r{line:<{self._length}}", end="", file=sys.stderr, flush=True)
            self._length = len(line)
        elif index != self._shown and fraction == 0.0:
            self._shown = index
            print(f"measuring {tokens} tokens per rank ({index + 1} of {len(self._tokens)})", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar and self._length:
            print(f"\r{'':<{self._length}}\r", end="", file=sys.stderr, flush=True)
