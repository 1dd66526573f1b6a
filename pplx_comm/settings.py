"""Every environment variable of this library: its type, default and meaning, and the one function that reads it.

`read(Log)` is called when the package is imported, `read(Start)` and `read(Watching)` when a Communicator starts,
`read(Settings)` when an AllToAll is made, `read(Serving)` and `read(Sglang)` when vLLM or SGLang asks for its plug-in,
`read(Compat)` when a shadow package makes a Communicator; a variable that changes later changes nothing that stands. `foreign()`
reads the variables of other programs. What the launcher says (RANK, OMPI_COMM_WORLD_RANK, SLURM_PROCID, ...) is read in
control/launch.py, from `whole_environment()`.

`make docs` writes the table of docs/tuning.md from this file.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from pplx_comm.errors import Error

HOW_TO_SET_SECRET = "export PPLX_COMM_SECRET=$(openssl rand -hex 32)"
SHORTEST_SECRET = 16

T = TypeVar("T")


@dataclass(frozen=True)
class Variable:
    """Name, rule and meaning of a variable."""

    name: str
    parse: Callable[[str], Any]
    """Raises ValueError."""
    must: str
    """The rule for its value, for the error."""
    help: str
    default: str
    """In words."""
    hidden: bool = False
    """A secret: no message shows it."""
    keep_empty: bool = False
    """Set but empty is a value of its own; otherwise it means unset."""

    def value(self, text: str) -> Any:
        must = "text in UTF-8"
        try:
            text.encode()
            must = self.must
            return self.parse(text)
        except ValueError:
            shown = f"{self.name} has {len(text)} characters: it" if self.hidden else f"{self.name}={text!r}"
            raise Error(f"{shown} must be {must}") from None


def _variable(
    name: str, parse: Callable[[str], Any], must: str, help: str, *, value: Any = None, default: str = "", **more: bool
) -> Any:
    return field(default=value, metadata={"variable": Variable(name, parse, must, help, default, **more)})


def _text(text: str) -> str:
    return text


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise ValueError
        return int(text)

    return parse


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return parse


def _host_and_port(text: str) -> tuple[str, int | None]:
    """host, host:port, [v6], [v6]:port."""
    host, port = text, ""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host:
        raise ValueError
    return host, _whole(1, 65535)(port) if port else None


def _secret(text: str) -> bytes:
    if len(text) < SHORTEST_SECRET:
        raise ValueError
    return text.encode()


def _absolute(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1e6:
        raise ValueError
    return value


def _flag(text: str) -> bool:
    return bool(("0", "1").index(text))


def _signal(text: str) -> int:
    if text.removeprefix("SIG") not in ("USR1", "USR2", "QUIT", "WINCH"):
        raise ValueError
    return int(signal.Signals[f"SIG{text.removeprefix('SIG')}"])


def _c_integer(text: str) -> int:
    return int(text, 0)


def _level_and_file(text: str) -> tuple[str, str]:
    level, colon, path = text.partition(":")
    if level not in ("debug", "info", "warning") or bool(colon) != bool(path):
        raise ValueError
    return level, path


@dataclass(frozen=True)
class Log:
    """Settings of an import of the package."""

    log: tuple[str, str] | None = _variable(
        "PPLX_COMM_LOG", _level_and_file, "debug, info or warning, or one of them and :FILE",
        "Logs from that level on to stderr, or with `:FILE` to a file, where `%p` is the process and `%h` the host: each line with "
        "time and rank, from every process that imports the library", default="as Python's logging is set up",
    )  # fmt: skip


@dataclass(frozen=True)
class Watching:
    """Settings of a Communicator."""

    folder: str | None = _variable(
        "PPLX_COMM_METRICS", _absolute, "an absolute path",
        "Every Communicator keeps a file of its counters in that folder, for Prometheus (a node exporter's textfile collector)",
        default="none",
    )  # fmt: skip
    seconds: int = _variable(
        "PPLX_COMM_METRICS_SECONDS", _whole(1, 86400), "1 to 86400", "How often the file is written", value=10, default="10",
    )  # fmt: skip
    dump_signal: int | None = _variable(
        "PPLX_COMM_DUMP_SIGNAL", _signal, "USR1, USR2, QUIT or WINCH",
        "A process that gets this signal prints what it does and waits for, and its Python stacks; a handler that was there before "
        "follows, and the process goes on",
        default="none",
    )  # fmt: skip
    trace: str | None = _variable(
        "PPLX_COMM_TRACE", _absolute, "an absolute path",
        "Every Communicator writes a timeline to that file when it closes, for ui.perfetto.dev: %j is the job, %h the host",
        default="none",
    )  # fmt: skip


@dataclass(frozen=True)
class Start:
    """Settings of Communicator.from_env()."""

    address: tuple[str, int | None] | None = _variable(
        "PPLX_COMM_ADDR", _host_and_port, "host:port, with a port between 1 and 65535 and an IPv6 address in brackets",
        "host:port where rank 0 listens at start",
        default="MASTER_ADDR, or what Slurm says",
    )  # fmt: skip
    port: int | None = _variable(
        "PPLX_COMM_PORT", _whole(1, 65535), "a port, 1 to 65535", "The port beside MASTER_ADDR or Slurm's address",
        default="MASTER_PORT + 1, else 29713",
    )  # fmt: skip
    secret: bytes | None = _variable(
        "PPLX_COMM_SECRET", _secret,
        f"at least {SHORTEST_SECRET} long. On one host, then copied to all: {HOW_TO_SET_SECRET}",
        f"The shared secret of a job that spans hosts, at least {SHORTEST_SECRET} characters",
        default="none; on one host a key file of this user", hidden=True, keep_empty=True,
    )  # fmt: skip
    job: str | None = _variable(
        "PPLX_COMM_JOB", _text, "any text", "Tells jobs of one user on one host apart where the launcher does not",
        default="what the launcher says",
    )  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Settings of AllToAll()."""

    threads: int | None = _variable(
        "PPLX_COMM_THREADS", _whole(1, 1024), "1 to 1024", "CPU threads of a rank's phases",
        default="its share of the cores, 8 at most",
    )  # fmt: skip
    provider: str | None = _variable(
        "PPLX_COMM_PROVIDER", _text, "a libfabric provider", "The libfabric provider, where provider= names none",
        default="the best there is",
    )  # fmt: skip
    nics: tuple[str, ...] = _variable(
        "PPLX_COMM_NICS", _names, "names with commas between them",
        "The NICs (domains, or interfaces for tcp) of a rank, an endpoint each, where nics= names none",
        value=(), default="the nearest",
    )  # fmt: skip
    endpoints: int = _variable(
        "PPLX_COMM_ENDPOINTS", _whole(1, 16), "1 to 16", "Endpoints of a rank; large blocks are split over them",
        value=0, default="one for each NIC",
    )  # fmt: skip
    interface: str | None = _variable(
        "PPLX_COMM_IFACE", _text, "an interface or an address", "The interface or address for tcp, net and sockets",
        default="loopback if all ranks are on one host, else the default route's",
    )  # fmt: skip
    shard_bytes: int = _variable(
        "PPLX_COMM_SHARD_BYTES", _whole(1, 2**40), "1 to 2^40", "A block is split over endpoints above this size",
        value=256 * 1024, default="262144",
    )  # fmt: skip
    placement: str = _variable(
        "PPLX_COMM_PLACEMENT", _one_of("auto", "host", "device"), "'auto', 'host' or 'device'",
        "Where the blocks for other nodes lie, where placement= says nothing", value="auto", default="auto",
    )  # fmt: skip
    large_tokens: int = _variable(
        "PPLX_COMM_LARGE_TOKENS", _whole(1, 2**31), "1 to 2^31",
        "On GPUs, tokens from which a combine takes the large kernels, inside a node a dispatch from twice that; all ranks alike",
        value=0, default="by GPU, num_sms and shape: src/cuda/large/tuning.h",
    )  # fmt: skip
    sending_share: int = _variable(
        "PPLX_COMM_SENDING_SHARE", _whole(1, 100), "1 to 100",
        "Of the thread blocks of a dispatch of many tokens, in percent, those that send; the others receive from the start",
        value=0, default="by ranks, tokens and thread blocks: src/cuda/large/tuning.h",
    )  # fmt: skip
    part_bytes: int = _variable(
        "PPLX_COMM_PART_BYTES", _whole(1, 2**40), "1 to 2^40",
        "On GPUs, a block for another node leaves in up to eight parts of at least this size; the same on all ranks",
        value=64 * 1024, default="65536",
    )  # fmt: skip
    stats: bool = _variable(
        "PPLX_COMM_STATS", _flag, "0 or 1", "0 counts nothing for stats(), to see what that costs",
        value=True, default="1",
    )  # fmt: skip
    gdrcopy: bool = _variable(
        "PPLX_COMM_GDRCOPY", _flag, "0 or 1", "0 disables GDRCopy", value=True, default="1",
    )  # fmt: skip
    near: bool = _variable(
        "PPLX_COMM_NVSHMEM_NEAR", _flag, "0 or 1",
        "For tests: 0 makes transport='nvshmem' put blocks also to peers of other nodes whose memory stores reach",
        value=True, default="1",
    )  # fmt: skip
    libfabric: str | None = _variable(  # read again by proxy/libfabric/loader.cpp, which programs without Python use, too
        "PPLX_LIBFABRIC", _absolute, "an absolute path", "The libfabric.so.1 to use, an absolute path",
        default="the EFA installer's, the system's, a wheel's",
    )  # fmt: skip
    chaos: str | None = _variable(
        "PPLX_COMM_CHAOS", _text, "settings as docs/tuning.md lists them", "For tests: the network misbehaves, from a seed",
        default="off",
    )  # fmt: skip
    cuda_fuzz: int | None = _variable(  # read by src/cuda/host/exchange.cpp, in a build with PPLX_CUDA_FUZZ only
        "PPLX_COMM_CUDA_FUZZ", _c_integer, "an integer",
        "For tests, in a build with PPLX_CUDA_FUZZ: the seed of random delays in the kernels", default="off",
    )  # fmt: skip


@dataclass(frozen=True)
class Serving:
    """Settings of vLLM's plug-in."""

    alias: str | None = _variable(
        "PPLX_COMM_VLLM_ALIAS", _one_of("deepep_low_latency"), "'deepep_low_latency'",
        "vLLM: the all2all backend of vLLM's own that pplx_comm takes the place of", default="none",
    )  # fmt: skip
    format: str = _variable(
        "PPLX_COMM_VLLM_FORMAT", _one_of("standard", "batched"), "'standard' or 'batched'",
        "vLLM: what experts are given, rows by token or a batch per expert", value="standard", default="standard",
    )  # fmt: skip
    tensor_parallel: str = _variable(
        "PPLX_COMM_VLLM_TP", _one_of("sequence", "replicas"), "'sequence' or 'replicas'",
        "vLLM: ranks of one tensor parallel group hold the same tokens: each takes a part of them through the layer, or each sends "
        "a part and gets all results", value="sequence", default="sequence",
    )  # fmt: skip
    transport: str = _variable(
        "PPLX_COMM_VLLM_TRANSPORT", _one_of("auto", "mapped", "proxy"), "'auto', 'mapped' or 'proxy'",
        "vLLM: transport= of AllToAll", value="auto", default="auto",
    )  # fmt: skip
    timeout: float = _variable(
        "PPLX_COMM_VLLM_TIMEOUT", _seconds, "seconds, more than 0 and at most 1e6", "vLLM: timeout= of AllToAll, in seconds",
        value=100.0, default="100",
    )  # fmt: skip
    untested: bool = _variable(
        "PPLX_COMM_VLLM_UNTESTED", _flag, "0 or 1", "vLLM: 1 lets the plug-in go on with a version that it was not tested with",
        value=False, default="0",
    )  # fmt: skip


@dataclass(frozen=True)
class Sglang:
    """Settings of SGLang's plug-in."""

    max_tokens: int | None = _variable(
        "PPLX_COMM_SGLANG_MAX_TOKENS", _whole(1), "a positive integer",
        "SGLang, normal mode: the most tokens that a rank brings to a step", default="--chunked-prefill-size",
    )  # fmt: skip
    num_sms: int = _variable(
        "PPLX_COMM_SGLANG_NUM_SMS", _whole(1), "a positive integer",
        "SGLang, two-batch overlap: the SMs that dispatch and combine take, and DeepGEMM leaves to them in prefills",
        value=20, default="20",
    )  # fmt: skip
    transport: str = _variable(
        "PPLX_COMM_SGLANG_TRANSPORT", _one_of("auto", "mapped", "proxy"), "'auto', 'mapped' or 'proxy'",
        "SGLang: transport= of AllToAll", value="auto", default="auto",
    )  # fmt: skip
    timeout: float = _variable(
        "PPLX_COMM_SGLANG_TIMEOUT", _seconds, "seconds, more than 0 and at most 1e6", "SGLang: timeout= of AllToAll, in seconds",
        value=100.0, default="100",
    )  # fmt: skip
    untested: bool = _variable(
        "PPLX_COMM_SGLANG_UNTESTED", _flag, "0 or 1", "SGLang: 1 lets the plug-in go on with a version that it was not tested with",
        value=False, default="0",
    )  # fmt: skip


@dataclass(frozen=True)
class Compat:
    """Settings of the shadow packages."""

    max_tokens: int | None = _variable(
        "PPLX_COMM_COMPAT_MAX_TOKENS", _whole(1), "a positive integer",
        "`deep_ep`, normal mode: the most tokens that a rank brings to a dispatch",
        default="4096, or the most of the first dispatch",
    )  # fmt: skip
    node_size: int | None = _variable(
        "PPLX_COMM_COMPAT_NODE_SIZE", _whole(1), "a positive integer", "Shadow packages: node_size= of the Communicator",
        default="ranks that can map each other's memory",
    )  # fmt: skip
    transport: str = _variable(
        "PPLX_COMM_COMPAT_TRANSPORT", _one_of("auto", "mapped", "proxy"), "'auto', 'mapped' or 'proxy'",
        "Shadow packages: transport= of AllToAll", value="auto", default="auto",
    )  # fmt: skip
    timeout: float = _variable(
        "PPLX_COMM_COMPAT_TIMEOUT", _seconds, "seconds, more than 0 and at most 1e6",
        "Shadow packages: timeout= of AllToAll, in seconds", value=100.0, default="100",
    )  # fmt: skip


def read(kind: type[T], environ: Mapping[str, str] | None = None) -> T:
    """One of those classes from the environment; Error names the variable that is wrong, its value, and what it must be."""
    values = {}
    source = os.environ if environ is None else environ
    for own, variable in _variables(kind):
        text = source.get(variable.name)
        if text or (text is not None and variable.keep_empty):
            values[own.name] = variable.value(text)
    return kind(**values)


FOREIGN = {
    "CUDACXX": "CMake: the nvcc of a build",
    "CUDA_HOME": "the CUDA toolkit of a build",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "MPS: the part of a GPU's multiprocessors that this process gets",
    "CUDA_PATH": "the CUDA toolkit of a build",
    "LD_PRELOAD": "the linker: libraries loaded before all others",
    "NVSHMEM_CUMEM_GRANULARITY": "NVSHMEM: its heap grows by multiples of it",
    "NVSHMEM_IBGDA_NIC_HANDLER": "NVSHMEM: what rings the NIC's doorbells",
    "NVSHMEM_IB_ENABLE_IBGDA": "NVSHMEM: whether kernels post to the NIC",
    "NVSHMEM_QP_DEPTH": "NVSHMEM: the depth of its queues",
    "NVSHMEM_SYMMETRIC_SIZE": "NVSHMEM: the size of its heap",
    "SYSFS_PATH": "rdma-core: where /sys is",
    "TRITON_INTERPRET": "Triton: 1 runs kernels on the CPU",
}
"""Variables of other programs that this library looks at, by name."""


def foreign(name: str, default: str = "") -> str:
    """One of FOREIGN, as it is now."""
    assert name in FOREIGN, name
    return os.environ.get(name, default)


def whole_environment() -> Mapping[str, str]:
    """Returns the launcher's variables, and those that a child process inherits."""
    return os.environ


def in_force() -> dict[str, str]:
    """The variables that are set, by name, as text; secrets are not shown."""
    return {v.name: "..." if v.hidden else os.environ[v.name] for v in variables() if os.environ.get(v.name)}


def unknown() -> list[str]:
    """Variables that are named like this library's and are none of them: misspelt, or of another version."""
    known = {variable.name for variable in variables()}
    return sorted(name for name in os.environ if name.startswith("PPLX_COMM_") and name not in known)


def variables() -> list[Variable]:
    return [variable for kind in (Log, Watching, Start, Settings, Serving, Sglang, Compat) for _, variable in _variables(kind)]


def _variables(kind: type[Any]) -> Iterator[tuple[Field[Any], Variable]]:
    for own in fields(kind):
        yield own, own.metadata["variable"]


def table() -> str:
    """As Markdown."""
    rows = [f"| `{variable.name}` | {variable.help} | {variable.default} |" for variable in variables()]
    return "\n".join(["| variable | what it sets | default |", "|---|---|---|", *rows])
