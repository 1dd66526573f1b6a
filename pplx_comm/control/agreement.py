"""How the survivors agree on the ranks that are left. Pure: messages in, messages out, no clock and no sockets.

Every rank proposes the set of ranks it believes alive. Sets only shrink: by a loss of its own, and by another's proposal
that lacks a rank. When every member of my set has proposed exactly my set, it is decided. A rank that decides, or hears a decision,
passes the decision on before it does anything else, and never proposes again. Messages from a rank that is no longer in my set
count for nothing; so a rank that others dropped cannot bring its old decision back in.

Why no member decides differently: if A decides V, every member of V has proposed V. A member that later decides
a smaller W without having heard A's decision must have dropped A, and needs each member of W to have proposed W, which
a rank that has heard A's decision never does, and one that has not will no longer hear. So A is not in W: it is dead,
or is told that it was dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Send = Callable[[str, frozenset[int]], None]
"""Send ("propose" or "decide", set) to every other rank of the current view."""


class Agreement:
    def __init__(self, rank: int, members: Iterable[int], send: Send) -> None:
        self.rank = rank
        self.view = frozenset(members)
        self.decided: frozenset[int] | None = None
        self.excluded_by: int | None = None
        self._send = send
        self._began = False
        self._proposals: dict[int, frozenset[int]] = {}

    def begin(self) -> bool:
        """This rank takes part from here on; what came before is counted now. False if it does already."""
        if self._began:
            return False
        self._began = True
        view = self.view
        for rank in sorted(self._proposals):
            if rank in self.view:
                self._shrink(self._proposals[rank], by=rank)
        if self.view == view:
            self._send("propose", self.view)
        self._decide_if_unanimous()
        return True

    def lost(self, rank: int) -> None:
        self._shrink(self.view - {rank}, by=self.rank)
        self._decide_if_unanimous()

    def receive(self, sender: int, what: str, ranks: frozenset[int]) -> None:
        if sender not in self.view or self.decided is not None:
            return
        if self.rank not in ranks:
            self.excluded_by = sender
            return
        if what == "decide":
            self._decide(ranks)
            return
        self._proposals[sender] = ranks
        if self._began:
            self._shrink(ranks, by=sender)
            self._decide_if_unanimous()

    def missing(self) -> list[int]:
        """Returns the members that have not taken part yet."""
        return sorted(rank for rank in self.view if rank != self.rank and rank not in self._proposals)

    def _shrink(self, ranks: frozenset[int], *, by: int) -> None:
        if self.decided is not None or self.view <= ranks:
            return
        self.view &= ranks
        if self._began:
            self._send("propose", self.view)

    def _decide_if_unanimous(self) -> None:
        if not self._began or self.decided is not None or self.excluded_by is not None:
            return
        if all(self._proposals.get(rank) == self.view for rank in self.view if rank != self.rank):
            self._decide(self.view)

    def _decide(self, ranks: frozenset[int]) -> None:
        self.decided = ranks
        self._send("decide", ranks)
