"""DeepEP's two modes, each with its buffer and its settings, for a peer of bench/latency.py and a layer of bench/layer.py."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from bench.harness.world import World

MOST_LOW_LATENCY = 512
"""Tokens of a rank. DeepEP keeps that mode for decoding: its buffers grow with experts x tokens."""

SMS = 24
"""The normal mode's value in its own tests; the measured setting "all" means the same."""

DISPATCH_CHUNKS, COMBINE_CHUNKS = tuple(range(4, 33, 4)), tuple(range(2, 17, 2))
"""Tokens sent at once, as its own tests try them; the configuration that it comes with is tried too."""

CHUNKS_UNDER_WAY = 256
TUNING_CALLS = 5


class Closable(Protocol):
    def close(self) -> None: ...


Mode = TypeVar("Mode", bound=Closable)


class Modes(Generic[Mode]):
    """Holds the buffer of either mode, made when a size first asks for it."""

    def __init__(self, low_latency: Callable[[], Mode], normal: Callable[[], Mode]) -> None:
        self._makers = {True: low_latency, False: normal}
        self._made: dict[bool, Mode] = {}

    def at(self, tokens: int) -> Mode:
        few = is_low_latency(tokens)
        if few not in self._made:
            self._made[few] = self._makers[few]()
        return self._made[few]

    def close(self) -> None:
        for mode in self._made.values():
            mode.close()


def is_low_latency(tokens: int) -> bool:
    return tokens <= MOST_LOW_LATENCY


def rows_of_a_rank(tokens: int, world: int, multiple: int = 4) -> int:
    """num_max_dispatch_tokens_per_rank: that of all ranks together must be a multiple of 4, and may have to be one of more."""
    step = multiple // math.gcd(multiple, world)
    return -(-tokens // step) * step


class Sizes(Protocol):
    """Options that both benches have."""

    @property
    def experts(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...


class _Buffer:
    def __init__(self, library: Any, world: World, experts: int, buffer: Any) -> None:
        self._library, self._world, self._experts, self._buffer = library, world, experts, buffer

    def ids(self, ids: torch.Tensor) -> torch.Tensor:
        """In the type that it takes."""
        return ids.to(getattr(self._library, "topk_idx_t", torch.int64))

    def close(self) -> None:
        self._buffer.destroy()


class LowLatency(_Buffer):
    def __init__(self, library: Any, group: Any, world: World, sizes: Sizes, multiple: int = 4) -> None:
        """Makes room for the most tokens that any size of this mode has. multiple: see rows_of_a_rank."""
        most = max(rows_of_a_rank(n, world.size, multiple) for n in sizes.tokens if is_low_latency(n))
        # Its queues must hold two requests for each token; 1024 is its default.
        os.environ.setdefault("NVSHMEM_QP_DEPTH", str(max(1024, 1 << (2 * most + 1).bit_length())))
        size = library.Buffer.get_low_latency_rdma_size_hint(most, sizes.hidden, world.size, sizes.experts)
        buffer = library.Buffer(
            group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=max(1, sizes.experts // world.size),
            explicitly_destroy=True,
        )  # fmt: skip
        super().__init__(library, world, sizes.experts, buffer)
        self._hidden, self._multiple = sizes.hidden, multiple
        self.rows = 0
        """Rows of a rank, at the size that was prepared."""

    def prepare(self, tokens: int) -> None:
        rows = rows_of_a_rank(tokens, self._world.size, self._multiple)
        if rows != self.rows:  # its words lie elsewhere now
            self._buffer.clean_low_latency_buffer(rows, self._hidden, self._experts)
            self.rows = rows

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, **wire: bool) -> tuple[Any, torch.Tensor, Any]:
        """Rows, of fp8 with their scales; how many each expert has; and the handle."""
        rows, counts, handle, _, _ = self._buffer.low_latency_dispatch(x, ids, self.rows, self._experts, **wire)
        return rows, counts, handle

    def combine(self, answers: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: Any) -> torch.Tensor:
        y: torch.Tensor = self._buffer.low_latency_combine(answers, ids, weights, handle)[0]
        return y


class Normal(_Buffer):
    def __init__(self, library: Any, group: Any, world: World, experts: int, row: int, num_sms: Sequence[int]) -> None:
        """Makes room for rows of `row` bytes, and for each number of multiprocessors that is tried."""
        configs = [config for sms in num_sms for of_phase in _configs(library, world, sms) for config in of_phase]
        nvlink, rdma = (
            max(getattr(config, name)(row, world.size) for config in configs)
            for name in ("get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint")
        )
        buffer = library.Buffer(group, nvlink, 0 if world.together else rdma, explicitly_destroy=True)
        super().__init__(library, world, experts, buffer)
        self.has_worst = world.together and "num_worst_tokens" in inspect.signature(buffer.dispatch).parameters
        """True if it can return the largest possible number of rows, so that counts stay on the device."""

    def tune(
        self,
        sms: int,
        dispatch: Callable[[], tuple[Any, Any]],
        answers: Callable[[torch.Tensor], torch.Tensor],
        x: Any,
        time: Callable[[Callable[[], None]], float],
    ) -> None:
        """Collective. dispatch: of x, as it will be called; returns rows and a handle, with which each configuration is tried."""
        configs = _configs(self._library, self._world, sms)
        self._dispatch_config, self._combine_config = (of_phase[0] for of_phase in configs)
        rows, handle = dispatch()
        back, buffer = answers(rows), self._buffer
        self._dispatch_config = self._best(configs[0], lambda c: buffer.dispatch(x, handle=handle, config=c), time)
        self._combine_config = self._best(configs[1], lambda c: buffer.combine(back, handle, config=c), time)

    def _best(self, configs: Sequence[Any], call: Callable[[Any], Any], time: Callable[[Callable[[], None]], float]) -> Any:
        """On every rank the same: what the slowest rank is fastest with."""
        if len(configs) == 1:
            return configs[0]
        times = []
        for config in configs:

            def calls(config: Any = config) -> None:
                for _ in range(TUNING_CALLS):
                    call(config)

            calls()
            self._world.barrier()
            times.append(time(calls))
        slowest = [max(of_ranks) for of_ranks in zip(*self._world.gather(times, "tuning of deep_ep"), strict=True)]
        return configs[slowest.index(min(slowest))]

    def dispatch(self, x: Any, ids: torch.Tensor, weights: torch.Tensor, **options: int) -> tuple[Any, ...]:
        """Rows, those of fp8 with their scales; local ids or -1; weights; how many rows each expert has; and the handle."""
        per_rank, per_node, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(ids, self._experts)
        *received, _ = self._buffer.dispatch(
            x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, topk_idx=ids, topk_weights=weights, config=self._dispatch_config, **options,
        )  # fmt: skip
        return tuple(received)

    def combine(self, answers: torch.Tensor, handle: Any, weights: torch.Tensor | None = None) -> torch.Tensor:
        more = {} if weights is None else {"topk_weights": weights}
        y: torch.Tensor = self._buffer.combine(answers, handle, config=self._combine_config, **more)[0]
        return y


def _configs(library: Any, world: World, sms: int) -> list[list[Any]]:
    """To try, for dispatch and for combine, with that many multiprocessors from now on."""
    library.Buffer.set_num_sms(sms)
    own = library.Buffer.get_dispatch_config(world.size), library.Buffer.get_combine_config(world.size)
    configs: list[list[Any]] = [[own[0]], [own[1]]]
    if world.together:  # how to tune it across nodes is another matter
        for of_phase, chunks in zip(configs, (DISPATCH_CHUNKS, COMBINE_CHUNKS), strict=True):
            of_phase += [library.Config(sms, chunk, CHUNKS_UNDER_WAY) for chunk in chunks]
    return configs
