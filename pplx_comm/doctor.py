"""Reports what this machine has, what is off and why, and the command that turns it on."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sysconfig
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import pplx_comm._core as _core
from pplx_comm._version import __version__
from pplx_comm.all_to_all import AllToAll
from pplx_comm.control import memfd
from pplx_comm.efasoft.machines import is_software, sysfs_here
from pplx_comm.errors import Error
from pplx_comm.layer_arguments import DTYPES, add_layer_arguments, layout_of
from pplx_comm.layouts import Padded
from pplx_comm.machine import machine, versions
from pplx_comm.settings import Settings, Start, foreign, in_force, read, unknown, whole_environment
from pplx_comm.wiring import ibgda, libfabric, nvshmem
from pplx_comm.wiring.config import make_config
from pplx_comm.wiring.memory import threads_of_a_rank
from pplx_comm.wiring.placement import placement

EFA_INSTALLER = (
    "curl -sO https://efa-installer.amazonaws.com/aws-efa-installer-latest.tar.gz && "
    "tar xf aws-efa-installer-latest.tar.gz && cd aws-efa-installer && sudo ./efa_installer.sh -y"
)
PROC = Path("/proc")
LEAST_CUDA = (12, 3)
"""cmake/cuda.cmake builds no module with an older nvcc."""


@dataclass(frozen=True)
class Finding:
    name: str
    on: bool | None
    """None: a fact, neither on nor off."""
    says: str
    turn_on: str | None = None
    """The command, or what there is to do when no command does it."""


def _processor(settings: Settings) -> list[Finding]:
    m = machine()
    cores = (
        f"{m['cores_allowed']} cores" if m["cores"] == m["cores_allowed"] else f"{m['cores_allowed']} of {m['cores']} cores allowed"
    )
    free, limit = memfd.available_bytes()
    thp = f"transparent huge pages: {m['transparent_hugepages']}, for shared memory: {m['transparent_hugepages_shmem']}"
    return [
        Finding("cpu", True, f"{m['cpu']}, {cores}, {m['isa']} kernels, Linux {m['kernel']}"),
        Finding("threads", None, f"{threads_of_a_rank(1, settings)} for a rank alone on this host (PPLX_COMM_THREADS sets it)"),
        Finding("memory", None, f"{_gib(free)} available ({limit}) of {_gib(m['memory_bytes'])}; {thp}"),
    ]


def _shared_memory() -> list[Finding]:
    findings = []
    try:
        os.close(memfd.allocate(4096, "a test of doctor"))
        findings.append(Finding("mapped", True, "ranks of one host share memory (memfd); the size of /dev/shm does not matter"))
    except Exception as problem:  # whatever the kernel objects to, it is the finding
        findings.append(
            Finding(
                "mapped",
                False,
                str(problem),
                "give this process more memory, or allow memfd_create in its seccomp profile",
            )
        )
    try:
        room = shutil.disk_usage("/dev/shm")
        findings.append(
            Finding(
                "/dev/shm",
                True,
                f"{_gib(room.free)} free of {_gib(room.total)}; only the provider shm puts files there",
            )
        )
    except OSError as problem:
        fix = "mount -t tmpfs tmpfs /dev/shm, or docker run --shm-size=1g"
        findings.append(Finding("/dev/shm", False, f"{problem.strerror}: the provider shm needs it", fix))
    return findings


def _python() -> list[Finding]:
    v = versions()
    findings = [Finding("torch", True, f"{v['torch']}, Python {v['python']}")]
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    findings.append(
        Finding("gloo", gloo, "a peer of the benchmark", None if gloo else "pip install torch with distributed support")
    )
    plots = importlib.util.find_spec("matplotlib") is not None
    findings.append(Finding("matplotlib", plots, "for the benchmark's plots", None if plots else "pip install matplotlib"))
    return findings


def _mpi() -> Finding:
    here = Path(sysconfig.get_path("scripts")) / "mpirun"
    mpirun = shutil.which("mpirun") or (str(here) if here.exists() else None)
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        library = " ".join(MPI.Get_library_version().replace("\0", "").strip().splitlines()[0].split())
    except (ImportError, RuntimeError) as problem:
        reason = f"mpi4py does not load: {problem}" if importlib.util.find_spec("mpi4py") else "no mpi4py"
        return Finding("mpi", False, f"{reason}; Communicator.from_env() needs none", "pip install mpi4py mpich")
    if mpirun is None:
        return Finding("mpi", False, f"mpi4py with {library}, but there is no mpirun in PATH", "pip install mpich")
    return Finding("mpi", True, f"{library}, {mpirun}")


def _fabric(settings: Settings) -> list[Finding]:
    status = libfabric.status()
    if not status["compiled_in"]:
        fix = "apt-get install libfabric-dev (or set PPLX_LIBFABRIC_INCLUDE), then make build"
        return [Finding("libfabric", False, "this build has no libfabric back end: no headers when it was made", fix)]
    if status["error"]:
        fix = "apt-get install libfabric1, or pip install mpich, or export PPLX_LIBFABRIC=/path/of/libfabric.so.1"
        return [Finding("libfabric", False, status["error"], fix)]
    findings = [Finding("libfabric", True, f"{status['version']}, {status['path']}")]
    for name, provider in status["providers"].items():
        if provider["available"]:
            nics = f"over {', '.join(provider['nics'])}" if provider["nics"] else "no NIC named"
            if any(is_software(nic) for nic in provider["nics"]):
                nics += ", a software device (pplx_comm efa-soft): for tests, its figures are no NIC's"
            findings.append(Finding(name, True, nics + (", device memory" if provider["device_memory"] else "")))
        else:
            findings.append(Finding(name, False, provider["why_not"], _provider_fix(name)))
    findings += _choices(settings)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if (sysfs_here() / "class/infiniband").is_dir() and limit != resource.RLIM_INFINITY:
        findings.append(
            Finding("locked memory", False, f"limited to {limit} bytes: RDMA NICs must pin memory", "ulimit -l unlimited")
        )
    return findings


GPU_CLASSES = ("0x0300", "0x0302")
"""PCI classes of display and 3D controllers, as sysfs writes them."""


def _gpu_addresses(sysfs: Path | None = None) -> list[str]:
    """NVIDIA's, in the order in which CUDA counts them with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    found, sysfs = [], sysfs or sysfs_here()
    for device in sorted((sysfs / "bus/pci/devices").glob("*")):
        with contextlib.suppress(OSError):
            kind, vendor = ((device / name).read_text().strip() for name in ("class", "vendor"))
            if vendor == "0x10de" and kind.startswith(GPU_CLASSES):
                found.append(device.name)
    return found


def _choices(settings: Settings) -> list[Finding]:
    """Lists the choices that ranks would make: one for each GPU, or one for this host."""
    localities = [libfabric.this_locality(gpu) for gpu in _gpu_addresses()] or [libfabric.this_locality()]
    findings = []
    for number, locality in enumerate(localities):
        name = f"NICs of GPU {number}" if locality.gpu else "NICs"
        try:
            taken = libfabric.choice(settings, localities, number)
        except _core.FabricError as problem:
            says = str(problem).splitlines()[0]
            return [Finding(name, False, says, "PPLX_COMM_NICS and PPLX_COMM_PROVIDER must name what this host has")]
        proxy = (
            f"its proxy on CPU {taken.cpu}" if taken.cpu >= 0 else "its proxy on any CPU (one of its own needs two for each rank)"
        )
        findings.append(Finding(name, None, f"{', '.join(taken.nics)} by {taken.provider} ({taken.why}); {proxy}"))
        if locality.gpu:
            findings.append(_placement(number, taken.provider, list(settings.nics) or None, localities))
    return findings


def _placement(number: int, provider: str, nics: list[str] | None, localities: list[libfabric.Locality]) -> Finding:
    """Where this GPU's blocks for other nodes would lie."""
    name = f"placement of GPU {number}"
    try:
        import pplx_comm._cuda as _cuda
    except ImportError:
        return Finding(name, None, "this build has no CUDA module, so remote blocks are the CPU device's, in host memory")
    ordering = _cuda.write_ordering(localities[number].gpu)
    refusal = libfabric.refuses_device_memory(provider, nics, localities, number)
    chosen = placement(ordering, provider, refusal)
    memory = "GPU memory" if chosen.where == "device" else "pinned host memory, which kernels write and read"
    refusal = _cuda.gdrcopy_refusal(number) if number < _cuda.device_count() else "this process does not see the GPU"
    words = "GPU memory, by GDRCopy" if refusal is None else f"pinned host memory ({refusal})"
    return Finding(name, None, f"remote blocks would lie in {memory}: {chosen.why}; what the proxy says, in {words}")


def _provider_fix(name: str) -> str | None:
    rdma = (sysfs_here() / "class/infiniband").is_dir()
    if name.startswith("efa"):
        return (
            EFA_INSTALLER
            if rdma
            else "needs an EFA NIC, then: " + EFA_INSTALLER + "; or software ones: python -m pplx_comm efa-soft"
        )
    if name.startswith("verbs"):
        install = "apt-get install rdma-core ibverbs-providers"
        return install if rdma else f"needs an RDMA NIC, then: {install}"
    if name == "tcp":
        return "provider='tcp' takes 'tcp;ofi_rxm' here; a newer libfabric has tcp itself: pip install mpich"
    if name == "shm":
        return "needs /dev/shm"
    return None


def _gpus() -> list[Finding]:
    try:
        import pplx_comm._cuda as _cuda
    except ImportError:
        return [_no_cuda_module()]
    driver, count = _cuda.driver_version(), _cuda.device_count()
    built = f"built with CUDA {_version(_cuda.runtime_version())}"
    if driver == 0:
        return [
            Finding(
                "cuda",
                False,
                f"{built}, but there is no NVIDIA driver",
                "needs a GPU and its driver: nvidia-smi must list it",
            )
        ]
    if count == 0:
        return [
            Finding(
                "cuda",
                False,
                f"{built}, driver for CUDA {_version(driver)}, no GPU visible",
                "check CUDA_VISIBLE_DEVICES and nvidia-smi",
            )
        ]
    return [Finding("cuda", None, f"{count} GPUs, {built}, driver for CUDA {_version(driver)}; device='cuda' uses them")]


def _no_cuda_module() -> Finding:
    """Finds the nvcc that a build would take now, in the order in which cmake/cuda.cmake looks."""
    build = "make build CMAKE_ARGS=-DPPLX_CUDA=ON"
    wanted = ".".join(map(str, LEAST_CUDA))
    folders = [os.path.join(folder, "bin") for name in ("CUDA_HOME", "CUDA_PATH") if (folder := foreign(name))]
    places = [
        foreign("CUDACXX"),
        *(os.path.join(folder, "nvcc") for folder in folders),
        "nvcc",
        "/usr/local/cuda/bin/nvcc",
    ]
    nvcc = next((found for place in places if place and (found := shutil.which(place))), None)
    if nvcc is None:
        says = "this build has no CUDA module, and there is no nvcc in PATH, CUDA_HOME or /usr/local/cuda"
        return Finding("cuda", False, says, f"install CUDA {wanted} or newer, put its nvcc in PATH, then {build}")
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    release = re.search(r"release (\d+)\.(\d+)", said)
    if release is None:
        return Finding(
            "cuda", False, f"this build has no CUDA module, and {nvcc} does not tell its version", f"CUDA {wanted}, then {build}"
        )
    version = int(release[1]), int(release[2])
    says = f"this build has no CUDA module; {nvcc} is CUDA {version[0]}.{version[1]}"
    if version < LEAST_CUDA:
        fix = f"install CUDA {wanted} or newer, put its nvcc in PATH or name it in CUDACXX, then {build}"
        return Finding("cuda", False, f"{says}, and {wanted} or newer is needed", fix)
    return Finding("cuda", False, says, build)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _nvshmem() -> list[Finding]:
    """Checks that transport='nvshmem' works here. A ConnectX's doorbell is rung as the host allows, with any NVSHMEM."""
    return [_nvshmem_module(), _ibgda(), _nvshmem_settings()]


def _nvshmem_module() -> Finding:
    if nvshmem.library_path() is None:
        return Finding("nvshmem", False, "NVSHMEM is not installed: transport='nvshmem' needs it", nvshmem.INSTALL)
    try:
        module = nvshmem.kernels()
    except Error as problem:
        return Finding("nvshmem", False, str(problem), nvshmem.BUILD)
    if module.device_count() == 0:
        says = f"built with NVSHMEM {module.version}, but this process sees no GPU"
        return Finding("nvshmem", False, says, "needs a GPU and its driver: nvidia-smi must list it")
    refused = nvshmem.try_alone(0, by_nic=False).refused
    return Finding("nvshmem", refused is None, refused or f"NVSHMEM {module.version} starts; transport='nvshmem' uses it")


def _ibgda() -> Finding:
    """Reports IBGDA by this host's files, and by a started NVSHMEM where that is possible."""
    expected = ibgda.verdict(sysfs_here(), PROC)
    if expected.rung_by is None or not _nvshmem_usable():
        return Finding("ibgda", expected.rung_by is not None, expected.says, expected.turn_on)
    alone = nvshmem.try_alone(0, by_nic=True)
    if alone.ibgda:
        return Finding("ibgda", True, f"{expected.says}; one PE alone has started with it", expected.turn_on)
    came = alone.refused or "one PE alone has started without it"
    says = f"no: {came}, though by its files this host could ({expected.says})"
    return Finding("ibgda", False, says, "NVSHMEM_DEBUG=INFO makes it say why")


def _nvshmem_usable() -> bool:
    try:
        return int(nvshmem.usable_kernels().device_count()) > 0
    except Error:
        return False


def _nvshmem_settings() -> Finding:
    chosen = {name: value for name, value in whole_environment().items() if name.startswith("NVSHMEM_")}
    shown = ", ".join(f"{name}={value}" for name, value in sorted(chosen.items()))
    # Queues that a GPU posts to take these from NVSHMEM alone, whatever the host's defaults are.
    priority = (
        f"traffic class {chosen.get('NVSHMEM_IB_TRAFFIC_CLASS', '0')}, service level {chosen.get('NVSHMEM_IB_SL', '0')} "
        "(NVSHMEM_IB_TRAFFIC_CLASS, NVSHMEM_IB_SL; the host's defaults do not count here)"
    )
    return Finding("nvshmem settings", None, f"{priority}; set: {shown or 'nothing of NVSHMEM'}")


def _environment() -> list[Finding]:
    shown = [f"{name}={value}" for name, value in in_force().items()]
    found = [Finding("environment", None, ", ".join(shown) or "no variable of this library is set")]
    for name in unknown():
        found.append(Finding("environment", False, f"{name} is set and is no variable of this library", f"unset {name}"))
    return found


def _settings() -> tuple[Settings, list[Finding]]:
    """Returns the settings, with defaults if some are wrong, and the findings about them."""
    try:
        read(Start)
        return read(Settings), []
    except Error as problem:
        return Settings(), [Finding("environment", False, str(problem), "set it right, or unset it")]


def _gib(nbytes: float) -> str:
    if nbytes < 2**20:
        return f"{nbytes / 2**10:.0f} KiB"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.2f} GiB"


def findings() -> list[Finding]:
    settings, wrong = _settings()
    machine_and_software = [*_processor(settings), *_shared_memory(), *_python(), _mpi()]
    return [*machine_and_software, *_fabric(settings), *_gpus(), *_nvshmem(), *_environment(), *wrong]


def memory(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Bytes of one rank, by number of tokens: what construction reserves, and what one dispatch returns at most."""
    layout, dtype = layout_of(arguments), DTYPES[arguments.dtype]
    rows: list[dict[str, Any]] = []
    for tokens in arguments.tokens:
        layer = {
            "num_experts": arguments.experts, "top_k": arguments.top_k, "hidden": arguments.hidden,
            "max_tokens_per_rank": tokens, "dtype": dtype, "wire": arguments.wire, "layout": layout,
            "in_flight": arguments.in_flight,
        }  # fmt: skip
        row: dict[str, Any] = {"max_tokens_per_rank": tokens, "error": None}
        try:
            c = make_config(arguments.ranks, 0, scale_layout="row", **layer)
            out_rows = c.local_experts * c.max_per_expert if isinstance(layout, Padded) else c.max_rows
            row["output_at_most"] = out_rows * (c.payload_bytes + c.scale_bytes)
            for name, remote in (("mapped", 0), ("proxy", arguments.ranks - 1)):
                row[name] = AllToAll.required_bytes(world_size=arguments.ranks, remote_peers=remote, **layer)
        except Error as problem:
            row["error"] = str(problem)
        rows.append(row)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_layer_arguments(parser)
    parser.add_argument("--ranks", type=int, default=8, help="ranks of the configuration (8)")
    parser.add_argument("--in-flight", type=int, default=1, help="steps open at once (1)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _text(found: list[Finding], needs: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    width = max(len(finding.name) for finding in found)
    lines = [f"pplx_comm {__version__}", ""]
    for finding in found:
        mark = {True: "on ", False: "off", None: "   "}[finding.on]
        head = f"  {mark}  {finding.name:<{width}}  "
        lines += textwrap.wrap(finding.says, 118, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
        if finding.turn_on:
            # One line, so that it can be copied.
            lines.append(f"{' ' * len(head)}-> {finding.turn_on}")
    a = arguments
    layer = f"hidden {a.hidden}, {a.experts} experts, top-{a.top_k}, {a.dtype}, wire {a.wire}"
    lines += ["", f"memory of one of {a.ranks} ranks: {layer}, {layout_of(a)}"]
    lines.append(f"  {'max tokens':>10}  {'mapped':>11}  {'all by proxy':>12}  one dispatch returns at most")
    for row in needs:
        if row["error"]:
            lines.append(f"  {row['max_tokens_per_rank']:>10}  {row['error']}")
            continue
        sizes = f"{_gib(row['mapped']):>11}  {_gib(row['proxy']):>12}  {_gib(row['output_at_most'])}"
        lines.append(f"  {row['max_tokens_per_rank']:>10}  {sizes}")
    lines.append("  (of what a dispatch returns, only rows that arrive take memory)")
    return "\n".join(lines)


def main(arguments: argparse.Namespace) -> int:
    found, needs = findings(), memory(arguments)
    if arguments.json:
        print(
            json.dumps(
                {"version": __version__, "findings": [asdict(finding) for finding in found], "memory_per_rank": needs},
                indent=1,
            )
        )
    else:
        print(_text(found, needs, arguments))
    return 0
