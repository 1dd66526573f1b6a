# Written by `make stubs` from the built modules. Change the bindings, not this file.
"""
The host half of pplx_comm: the CPU device, the proxy and the fabric.
"""
from __future__ import annotations
import collections.abc
import typing
__all__: list[str] = ['BOTH', 'Carried', 'Config', 'Dtype', 'Exchange', 'ExpertOutputs', 'FIRST_STEP_FACTOR', 'Fabric', 'FabricError', 'HOOK_ROWS', 'HookLayout', 'LayoutKind', 'LocalRegion', 'Mapping', 'OutputBuffer', 'OutputLayout', 'OutputPart', 'OutputPool', 'Outputs', 'Plan', 'Proxy', 'RAISED', 'RECV', 'Received', 'RemoteRegion', 'Result', 'SEND', 'Teller', 'Tokens', 'Told', 'Wire', 'account', 'chaos', 'cleanup_dead_peer', 'deadlines', 'dump_on', 'hook_layout', 'isa', 'leave_python_alone', 'libfabric_status', 'open_desk', 'output_layout', 'pick_cpus', 'pick_nics', 'proxy_of', 'read_trace', 'start_trace', 'stop_trace']
class Dtype:
    """
    Members:
    
      BFLOAT16
    
      FLOAT16
    
      FLOAT32
    """
    BFLOAT16: typing.ClassVar[Dtype]
    FLOAT16: typing.ClassVar[Dtype]
    FLOAT32: typing.ClassVar[Dtype]
    __members__: typing.ClassVar[dict[str, Dtype]]
    @typing.overload
    def __eq__(self, other: Dtype) -> bool:
        ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool:
        ...
    def __getstate__(self) -> int:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: int) -> None:
        ...
    def __int__(self) -> int:
        ...
    @typing.overload
    def __ne__(self, other: Dtype) -> bool:
        ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: int) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class Wire:
    """
    Members:
    
      NATIVE
    
      FP8
    
      FP8_UE8M0
    
      MXFP8
    """
    FP8: typing.ClassVar[Wire]
    FP8_UE8M0: typing.ClassVar[Wire]
    MXFP8: typing.ClassVar[Wire]
    NATIVE: typing.ClassVar[Wire]
    __members__: typing.ClassVar[dict[str, Wire]]
    @typing.overload
    def __eq__(self, other: Wire) -> bool:
        ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool:
        ...
    def __getstate__(self) -> int:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: int) -> None:
        ...
    def __int__(self) -> int:
        ...
    @typing.overload
    def __ne__(self, other: Wire) -> bool:
        ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: int) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class LayoutKind:
    """
    Members:
    
      RAGGED
    
      PADDED
    
      COMPACT
    """
    COMPACT: typing.ClassVar[LayoutKind]
    PADDED: typing.ClassVar[LayoutKind]
    RAGGED: typing.ClassVar[LayoutKind]
    __members__: typing.ClassVar[dict[str, LayoutKind]]
    @typing.overload
    def __eq__(self, other: LayoutKind) -> bool:
        ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool:
        ...
    def __getstate__(self) -> int:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: int) -> None:
        ...
    def __int__(self) -> int:
        ...
    @typing.overload
    def __ne__(self, other: LayoutKind) -> bool:
        ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: int) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class Config:
    combine_fp8: bool
    dtype: Dtype
    layout: LayoutKind
    on_gpu: bool
    scale_tma: bool
    wire: Wire
    zero_pad: bool
    def __init__(self) -> None:
        ...
    def header_bytes(self, arg0: int) -> int:
        """
        Bytes of a block's header, by op.
        """
    def row_bytes(self, arg0: int) -> int:
        """
        Bytes of a row on the wire, by op.
        """
    @property
    def align(self) -> int:
        ...
    @align.setter
    def align(self, arg0: int) -> None:
        ...
    @property
    def experts_per_rank(self) -> int:
        ...
    @property
    def first_step(self) -> int:
        ...
    @first_step.setter
    def first_step(self, arg0: int) -> None:
        ...
    @property
    def heap_bytes(self) -> int:
        ...
    @property
    def hidden(self) -> int:
        ...
    @hidden.setter
    def hidden(self, arg0: int) -> None:
        ...
    @property
    def in_flight(self) -> int:
        ...
    @in_flight.setter
    def in_flight(self, arg0: int) -> None:
        ...
    @property
    def in_pieces(self) -> bool:
        """
        True if blocks may go in pieces.
        """
    @property
    def invalid(self) -> str:
        ...
    @property
    def least_slot_bytes(self) -> int:
        """
        The least slot_bytes for steps that never go in pieces.
        """
    @property
    def local_experts(self) -> int:
        ...
    @property
    def mapped_bytes(self) -> int:
        """
        Size of the part that mapped peers write into; on GPUs a memory of its own.
        """
    @property
    def mapped_first(self) -> int:
        ...
    @mapped_first.setter
    def mapped_first(self, arg0: int) -> None:
        ...
    @property
    def mapped_slots(self) -> int:
        ...
    @mapped_slots.setter
    def mapped_slots(self, arg0: int) -> None:
        ...
    @property
    def max_per_expert(self) -> int:
        ...
    @max_per_expert.setter
    def max_per_expert(self, arg0: int) -> None:
        ...
    @property
    def max_rows(self) -> int:
        ...
    @max_rows.setter
    def max_rows(self, arg0: int) -> None:
        ...
    @property
    def max_tokens(self) -> int:
        ...
    @max_tokens.setter
    def max_tokens(self, arg0: int) -> None:
        ...
    @property
    def node_ranks(self) -> int:
        ...
    @node_ranks.setter
    def node_ranks(self, arg0: int) -> None:
        ...
    @property
    def num_experts(self) -> int:
        ...
    @num_experts.setter
    def num_experts(self, arg0: int) -> None:
        ...
    @property
    def object(self) -> int:
        ...
    @object.setter
    def object(self, arg0: int) -> None:
        ...
    @property
    def part_bytes(self) -> int:
        ...
    @part_bytes.setter
    def part_bytes(self, arg0: int) -> None:
        ...
    @property
    def payload_bytes(self) -> int:
        """
        Bytes of a row without its scales.
        """
    @property
    def rank(self) -> int:
        ...
    @rank.setter
    def rank(self, arg0: int) -> None:
        ...
    @property
    def relay_bytes(self) -> int:
        """
        With node_ranks: size of this rank's rails, where nodes are of one size.
        """
    @property
    def remote_peers(self) -> int:
        ...
    @remote_peers.setter
    def remote_peers(self, arg0: int) -> None:
        ...
    @property
    def remote_slots(self) -> int:
        ...
    @remote_slots.setter
    def remote_slots(self, arg0: int) -> None:
        ...
    @property
    def replicas(self) -> int:
        ...
    @replicas.setter
    def replicas(self, arg0: int) -> None:
        ...
    @property
    def scale_block(self) -> int:
        """
        Elements that share a scale.
        """
    @property
    def scale_bytes(self) -> int:
        """
        Bytes of a row's scales.
        """
    @property
    def scales_per_row(self) -> int:
        ...
    @property
    def slot_bytes(self) -> int:
        ...
    @slot_bytes.setter
    def slot_bytes(self, arg0: int) -> None:
        ...
    @property
    def top_k(self) -> int:
        ...
    @top_k.setter
    def top_k(self, arg0: int) -> None:
        ...
    @property
    def whole_slot_bytes(self) -> int:
        """
        The least slot_bytes with which all blocks are whole.
        """
    @property
    def whole_tokens(self) -> int:
        ...
    @whole_tokens.setter
    def whole_tokens(self, arg0: int) -> None:
        ...
    @property
    def world(self) -> int:
        ...
    @world.setter
    def world(self, arg0: int) -> None:
        ...
class Plan:
    """
    The destinations of each row, and the place of each choice.
    """
    def rows(self, rank: int) -> int:
        ...
    @property
    def counts(self) -> list[int]:
        ...
    @property
    def ids(self) -> list[int]:
        ...
    @property
    def index(self) -> list[int]:
        ...
    @property
    def row_token(self) -> list[int]:
        ...
    @property
    def rows_begin(self) -> list[int]:
        ...
    @property
    def token_begin(self) -> list[int]:
        ...
    @property
    def token_rows(self) -> list[tuple[int, int]]:
        ...
    @property
    def tokens(self) -> int:
        ...
class OutputPart:
    """
    A tensor that a dispatch fills.
    """
    @property
    def at(self) -> int:
        """
        Bytes from the start of the buffer that has it.
        """
    @property
    def dtype(self) -> str:
        """
        As torch calls it.
        """
    @property
    def nbytes(self) -> int:
        ...
    @property
    def shape(self) -> list[int]:
        ...
    @property
    def strides(self) -> list[int]:
        """
        Elements.
        """
class OutputLayout:
    """
    The tensors that a dispatch fills, and the buffer that has them.
    """
    @property
    def nbytes(self) -> int:
        """
        Size of the buffer.
        """
    @property
    def parts(self) -> dict[str, OutputPart]:
        """
        Tensors by name; only those that this layout and wire have.
        """
class HookLayout:
    """
    Offsets of the words of a dispatch's hooks, in words from their start. The first one is `planned`.
    """
    @property
    def arrived(self) -> int:
        ...
    @property
    def count(self) -> int:
        """
        Words of `arrived`.
        """
    @property
    def words(self) -> int:
        """
        All of them.
        """
class Teller:
    """
    Tells at the desk where something stands.
    """
class Told:
    """
    An entry of what this process tells at its desk; facts: JSON.
    """
    @typing.overload
    def __init__(self, facts: str) -> None:
        ...
    @typing.overload
    def __init__(self, facts: str, teller: Teller) -> None:
        ...
    def end(self) -> None:
        ...
class Tokens:
    """
    Inputs of a dispatch: addresses, 0 for none, and strides in bytes.
    """
    def __init__(self, *, x: int, stride: int, scales: int = 0, scale_row_stride: int = 0, scale_stride: int = 0, weights: int = 0, keep_own_rows: bool = False) -> None:
        ...
class Outputs:
    """
    Outputs of a dispatch: addresses of x, of scale, and of the buffer of output_layout().
    """
    def __init__(self, *, x: int, scales: int = 0, small: int, hooks: int = 0) -> None:
        ...
class ExpertOutputs:
    """
    Inputs of a combine: addresses, 0 for none, and strides in bytes.
    """
    def __init__(self, *, expert_out: int, stride: int, weighted: bool, uses_weights: bool = False, weights: int = 0, has_tail: bool = False, tail: int = 0) -> None:
        ...
class Result:
    """
    Outputs of a combine: addresses, 0 for none, and a stride in bytes.
    """
    def __init__(self, *, y: int, stride: int, accumulate: bool, tail: int = 0) -> None:
        ...
class Mapping:
    def __init__(self, fd: int, nbytes: int, touched: bool = True) -> None:
        ...
    @property
    def address(self) -> int:
        ...
    @property
    def nbytes(self) -> int:
        ...
class OutputBuffer:
    pass
class OutputPool:
    def __init__(self) -> None:
        ...
    def close(self) -> None:
        ...
    def take(self, nbytes: int) -> OutputBuffer:
        ...
class Received:
    def rows(self, source: int) -> int:
        ...
    @property
    def generation(self) -> int:
        ...
    @property
    def needed_rows(self) -> int:
        ...
    @property
    def overflowed(self) -> bool:
        ...
class Carried:
    """
    An AllToAll as its proxy sees it.
    """
class Exchange(Carried):
    def __init__(self, config: Config, own: Mapping, peers: collections.abc.Mapping[int, Mapping], nodes: collections.abc.Sequence[int], threads: int, timeout: float, counts: bool) -> None:
        ...
    def check_order(self, step: int) -> None:
        """
        Raises if dispatch_recv may not receive this step yet.
        """
    def close(self) -> None:
        """
        Ends the calls that other threads wait in.
        """
    def combine_recv(self, step: int, result: Result) -> None:
        ...
    def combine_send(self, step: int, received: Received, plan: Plan, outputs: ExpertOutputs) -> None:
        ...
    def dispatch_recv(self, step: int, outputs: Outputs) -> Received:
        ...
    def dispatch_send(self, plan: Plan, tokens: Tokens) -> int:
        """
        Returns the number of the step.
        """
    def fail(self, reason: str, origin: int, peer: int, step: int, message: str) -> None:
        ...
    def lay_relays(self, rails: collections.abc.Mapping[int, Mapping]) -> None:
        """
        Memory by rank, anew in each generation.
        """
    def make_plan(self, ids: int, wide: bool, tokens: int) -> Plan:
        ...
    def name_networks(self, by_peer: collections.abc.Sequence[str]) -> None:
        ...
    def peer_busy(self, peer: int, busy: bool) -> None:
        ...
    def peer_left(self, peer: int) -> None:
        ...
    def raise_trouble(self) -> None:
        ...
    def relay_bytes(self, rank: int) -> int:
        """
        Bytes of the rails of a rank of this node that this rank maps.
        """
    def release(self, step: int) -> None:
        ...
    def reset(self, generation: int, alive: collections.abc.Sequence[bool]) -> None:
        ...
    def stats(self) -> dict:
        ...
    @property
    def generation(self) -> int:
        ...
    @property
    def network_peers(self) -> list[int]:
        """
        Living ranks with which this one exchanges blocks over the network.
        """
    @property
    def next_step(self) -> int:
        ...
    @property
    def open_steps(self) -> int:
        ...
    @property
    def teller(self) -> Teller:
        ...
class FabricError(RuntimeError):
    pass
class LocalRegion:
    @property
    def base(self) -> int:
        ...
    @property
    def description(self) -> bytes:
        ...
    @property
    def id(self) -> int:
        ...
    @property
    def nbytes(self) -> int:
        ...
class RemoteRegion:
    @property
    def nbytes(self) -> int:
        ...
class Fabric:
    """
    One-sided writes with immediates over libfabric. One thread at a time.
    """
    def __init__(self, provider: str = 'auto', options: dict = {}) -> None:
        ...
    def abandon(self) -> None:
        """
        In place of close(), when the thread that drives it hangs: only its files in /dev/shm go.
        """
    def address(self) -> bytes:
        ...
    def close(self) -> None:
        """
        Never waits for a peer. Nothing but close() may follow.
        """
    def endpoint_name(self, endpoint: int) -> str:
        ...
    def import_region(self, peer: int, description: bytes) -> RemoteRegion:
        ...
    def insert_peer(self, peer: int, address: bytes) -> None:
        ...
    def poll(self) -> list[tuple[str, int, str]]:
        """
        Up to 64 completions, for tests: (kind, immediate or context, text of a failure). A proxy does this by itself.
        """
    def register_memory(self, base: int, nbytes: int, *, shared_bytes: int) -> LocalRegion:
        """
        Peers may write into the first `shared_bytes`. The memory must stay until unregister_memory or close.
        """
    def remove_peer(self, peer: int) -> None:
        ...
    def unregister_memory(self, region: LocalRegion) -> None:
        ...
    @property
    def endpoints(self) -> int:
        ...
    @property
    def max_write_bytes(self) -> int:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def provider(self) -> str:
        ...
    @property
    def proxy_cpu(self) -> int:
        ...
    @property
    def shm_names(self) -> list[str]:
        ...
    @property
    def why(self) -> str:
        """
        These NICs and no others.
        """
class Proxy:
    """
    The thread that drives the fabric, one per Communicator and provider.
    """
    def __init__(self, fabric: Fabric, shard_bytes: int, cpu: int) -> None:
        ...
    def attach(self, carried: Carried, region: LocalRegion, descriptions: collections.abc.Mapping[int, bytes]) -> None:
        ...
    def close(self, timeout: float = 1.0) -> bool:
        """
        False if the thread hangs in the provider and was left behind.
        """
    def detach(self, carried: Carried, region: LocalRegion, timeout: float) -> None:
        ...
    def insert_peer(self, peer: int, address: bytes) -> None:
        ...
    def register_memory(self, carried: Carried) -> LocalRegion:
        ...
    def stats(self, fresh: bool) -> dict:
        ...
    def takes_turns(self, within: float) -> bool:
        """
        False if it hangs in the provider, or gets no core, for that many seconds.
        """
    @property
    def teller(self) -> Teller:
        ...
def account() -> bytes:
    """
    An account of this process, as JSON.
    """
def chaos(fabric: Fabric, options: str, rank: int) -> Fabric:
    """
    The same fabric, misbehaving; see proxy/chaos.h. ValueError for options that are wrong.
    """
def cleanup_dead_peer(address: bytes) -> int:
    """
    Removes what a killed process left in /dev/shm; how many files. Of a living process, none.
    """
def deadlines() -> list:
    """
    Name, seconds and meaning of every deadline of C++ code.
    """
def dump_on(signal: int) -> None:
    ...
def hook_layout(config: Config) -> HookLayout:
    ...
def isa() -> str:
    """
    The instruction set that the CPU device uses.
    """
def leave_python_alone() -> None:
    """
    At the end of the interpreter.
    """
def libfabric_status(wheels: collections.abc.Sequence[str] = []) -> dict:
    """
    Returns what libfabric offers on this machine: path, version, error, and for each provider available, nics, device_memory, why_not.
    """
def open_desk(process: str, asked: collections.abc.Callable) -> bool:
    """
    Once for a process. asked: gets a request, and returns what the guest is to read; 'facts' and 'account' need it not. False: there is no socket.
    """
def output_layout(config: Config) -> OutputLayout:
    """
    On the CPU device: x and scale have memory of their own, all that is small lies in one buffer.
    """
def pick_cpus(localities: collections.abc.Sequence[tuple[str, collections.abc.Sequence[int]]], near: collections.abc.Sequence[collections.abc.Sequence[int]], proxies: int) -> list[int]:
    """
    The CPUs of all processes' first proxies, then of their second ones; -1: any.
    """
def pick_nics(names: collections.abc.Sequence[str], localities: collections.abc.Sequence[tuple[str, collections.abc.Sequence[int]]], sysfs: str = '/sys') -> list[tuple[list[str], str, int]]:
    """
    Processes of a host are (PCI address of its GPU or "", its CPUs). Returns for each the NICs of these names that it takes, why, and the CPU of its proxy.
    """
def proxy_of(rank: int, peer: int, proxies: int) -> int:
    """
    Index of the proxy that carries to and from that peer.
    """
def read_trace() -> bytes:
    ...
def start_trace(spans: int) -> None:
    """
    This module keeps its latest spans from now on. The first call says how many.
    """
def stop_trace() -> None:
    ...
BOTH: int = 3
FIRST_STEP_FACTOR: int = 3
HOOK_ROWS: int = 128
RAISED: int = 2147483648
RECV: int = 2
SEND: int = 1
