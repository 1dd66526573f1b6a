# Written by `make stubs` from the built modules. Change the bindings, not this file.
"""
The CUDA half of pplx_comm. Import pplx_comm._core first.
"""
from __future__ import annotations
import collections.abc
import pplx_comm._core
import typing
__all__: list[str] = ['Exchange', 'ExpertOutputs', 'HostHeap', 'Launch', 'Outputs', 'PlanLayout', 'Result', 'SharedMemory', 'StreamEvent', 'Tokens', 'clear', 'count_routing', 'device_count', 'driver_version', 'gdrcopy_refusal', 'large_tokens', 'leave_blank', 'output_layout', 'pci_address', 'plan_layout', 'read_trace', 'runtime_version', 'start_trace', 'stop_trace', 'write_ordering']
class Launch:
    """
    The halves to launch and their stream; addresses of the plan and of the dispatch's results.
    """
    def __init__(self, *, stream: int, halves: int, plan: int, buffer: int, hooks: int = 0) -> None:
        ...
class Tokens:
    """
    Inputs of a dispatch: addresses, 0 for none, and strides in bytes. A receive half takes count and totals, in pieces all.
    """
    def __init__(self, *, count: int, x: int = 0, stride: int = 0, ids: int = 0, wide_ids: bool = False, weights: int = 0, scales: int = 0, scale_row_stride: int = 0, scale_stride: int = 0, unread: bool = False, totals: int = 0) -> None:
        ...
class Outputs:
    """
    Addresses of received rows that lie in memory of their own.
    """
    def __init__(self, *, x: int, scales: int = 0, weights: int) -> None:
        ...
class ExpertOutputs:
    """
    Inputs of a combine: addresses, 0 for none, and a stride in bytes. A receive half takes uses_weights alone, in pieces all.
    """
    def __init__(self, *, expert_out: int = 0, stride: int = 0, rows: int = 0, weighted: bool, uses_weights: bool, weights: int = 0, tail: int = 0, tail_rows: int = 0) -> None:
        ...
class Result:
    """
    Outputs of a combine: addresses, 0 for none, and a stride in bytes.
    """
    def __init__(self, *, tokens: int, y: int, stride: int, accumulate: bool, has_tail: bool = False, tail: int = 0) -> None:
        ...
class HostHeap(pplx_comm._core.Carried):
    """
    Blocks that the proxy moves, and their words.
    """
    def descriptor(self) -> int:
        """
        With node_ranks: a file descriptor of the blocks; the caller closes it.
        """
    @property
    def blocks_nbytes(self) -> int:
        """
        Bytes of the blocks in GPU memory; 0: they are in host memory.
        """
    @property
    def pinned_bytes(self) -> int:
        """
        Bytes of host memory.
        """
class SharedMemory:
    """
    Device memory that the ranks of a node map.
    """
    @staticmethod
    def from_descriptor(device: int, fd: int, nbytes: int) -> SharedMemory:
        ...
    @staticmethod
    def from_host(device: int, fd: int, own: HostHeap) -> SharedMemory:
        """
        Blocks of a mate's proxy in host memory, as this rank's lie there.
        """
    @staticmethod
    def from_ipc(device: int, handle: bytes, nbytes: int) -> SharedMemory:
        ...
    @staticmethod
    def lent(device: int, address: int, nbytes: int) -> SharedMemory:
        """
        Memory that a carrier has mapped, and keeps.
        """
    def __init__(self, device: int, nbytes: int, what: str) -> None:
        ...
    def descriptor(self) -> int:
        """
        A file descriptor of it; the caller closes it.
        """
    def ipc_handle(self) -> bytes:
        ...
    @property
    def address(self) -> int:
        ...
    @property
    def has_descriptor(self) -> bool:
        ...
    @property
    def nbytes(self) -> int:
        ...
class StreamEvent:
    """
    A place in a stream, which others wait for.
    """
    def __init__(self, device: int) -> None:
        ...
    def record(self, device: int, stream: int) -> None:
        ...
    def wait(self, device: int, stream: int) -> None:
        ...
class Exchange:
    def __init__(self, config: pplx_comm._core.Config, own: SharedMemory, peers: collections.abc.Mapping[int, SharedMemory], nodes: collections.abc.Sequence[int], remote: collections.abc.Mapping[int, int], proxied: bool, blocks_on_gpu: bool, gdrcopy: bool, device: int, timeout: float, num_sms: int, large_tokens: int, sending_share: int, counts: bool) -> None:
        ...
    def await_experts(self, launch: Launch, first: int, count: int) -> None:
        """
        Whatever is launched behind it on that stream has the rows of these experts.
        """
    def begins(self, steps: int) -> list[int]:
        """
        When the dispatch and the combine of each of the latest steps began, in ns by the GPU's clock.
        """
    def clear_hooks(self, words: int, stream: int) -> None:
        """
        Before the dispatch that they are of.
        """
    def combine(self, launch: Launch, outputs: ExpertOutputs, result: Result) -> None:
        ...
    @typing.overload
    def dispatch(self, launch: Launch, tokens: Tokens) -> int:
        """
        Returns the number of the step; -1 in a capture.
        """
    @typing.overload
    def dispatch(self, launch: Launch, tokens: Tokens, outputs: Outputs) -> int:
        ...
    def drain(self, stream: int, seconds: float) -> None:
        ...
    def ended(self, seconds: float) -> bool:
        """
        True if everything launched has ended by then.
        """
    def explain(self, tokens: int) -> list:
        """
        The launches of a step of this many tokens, and why.
        """
    def fail(self, reason: str, origin: int, peer: int, step: int, message: str) -> None:
        ...
    def follow(self, stream: int) -> None:
        """
        As one of its streams: graphs may have been replayed on it.
        """
    def lay_relays(self, areas: collections.abc.Mapping[int, SharedMemory], blocks: collections.abc.Mapping[int, SharedMemory]) -> None:
        ...
    def name_networks(self, by_peer: collections.abc.Sequence[str]) -> None:
        ...
    def note_kernels(self) -> None:
        """
        A timeline has the kernels that end from now on.
        """
    def peer_busy(self, peer: int, busy: bool) -> None:
        ...
    def peer_left(self, peer: int) -> None:
        ...
    def raise_trouble(self) -> None:
        ...
    def relay_bytes(self, mate: int) -> int:
        ...
    def release(self, launch: Launch, tokens: int) -> None:
        ...
    def reset(self, generation: int, alive: collections.abc.Sequence[bool]) -> None:
        ...
    def set_num_sms(self, num_sms: int) -> None:
        ...
    def stats(self) -> dict:
        """
        Without a wait for kernels that run.
        """
    def tell_kernels(self) -> None:
        """
        Adds those that have ended to what read_trace() returns.
        """
    def use_hooks(self) -> None:
        """
        Once, before the first step that has hooks.
        """
    def waits(self, combine: bool) -> tuple[int, int]:
        """
        Device memory of int64 numbers, and how many.
        """
    @property
    def arrivals_on_gpu(self) -> bool:
        """
        True if the proxy raises its words in GPU memory.
        """
    @property
    def generation(self) -> int:
        ...
    @property
    def host(self) -> HostHeap | None:
        """
        Memory that the proxy carries for; None inside a node.
        """
    @property
    def large_tokens(self) -> int:
        """
        Combines of this many tokens or more are large, where any are.
        """
    @property
    def memory(self) -> SharedMemory:
        """
        Memory that peers write into.
        """
    @property
    def network_peers(self) -> list[int]:
        """
        With which this rank exchanges blocks by its proxy.
        """
    @property
    def open_steps(self) -> int:
        ...
    @property
    def teller(self) -> pplx_comm._core.Teller:
        ...
class PlanLayout:
    """
    Offsets of the parts of a plan that Python reads: bytes from its start.
    """
    @property
    def nbytes(self) -> int:
        """
        Size of a plan for any number of tokens.
        """
    @property
    def rows(self) -> int:
        ...
    @property
    def weights(self) -> int:
        ...
def clear(heap: SharedMemory) -> None:
    """
    Makes it as it is when it is new.
    """
def count_routing(ids: int, wide_ids: bool, tokens: int, top_k: int, ranks: int, nodes: int, experts: int, goes: int, counts: int, device: int, stream: int) -> None:
    """
    Device memory: goes: bool [tokens, ranks]; counts: int32 of tokens by rank, tokens by node, choices by expert.
    """
def device_count() -> int:
    """
    CUDA devices that this process sees; 0 without a driver.
    """
def driver_version() -> int:
    """
    The CUDA version of the driver (13000 is 13.0); 0 without one.
    """
def gdrcopy_refusal(device: int) -> str | None:
    """
    Why arrival words cannot lie in that GPU's memory; None: they can.
    """
def large_tokens(config: pplx_comm._core.Config, device: int, num_sms: int) -> int:
    """
    The number of tokens from which combines should be large on this GPU. num_sms: 0: all.
    """
def leave_blank(config: pplx_comm._core.Config, heap: SharedMemory) -> None:
    """
    Makes the places of the rows that come back as peers must find them.
    """
def output_layout(config: pplx_comm._core.Config) -> pplx_comm._core.OutputLayout:
    """
    Offsets of the tensors that a dispatch fills in its buffer. Everything that its combine reads comes before x, scale and weights.
    """
def pci_address(device: int) -> str:
    """
    PCI address of that GPU.
    """
def plan_layout(config: pplx_comm._core.Config) -> PlanLayout:
    ...
def read_trace() -> bytes:
    ...
def runtime_version() -> int:
    """
    The CUDA version that this module was built with.
    """
def start_trace(spans: int) -> None:
    """
    This module keeps its latest spans from now on. The first call says how many.
    """
def stop_trace() -> None:
    ...
def write_ordering(pci: str) -> int | None:
    """
    Ordering of a NIC's writes, as the GPU at that PCI address sees them; None: NICs do not reach it.
    """
