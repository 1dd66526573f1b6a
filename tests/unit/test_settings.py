"""The variables of the environment: each is read once, says what is wrong with it, and is documented."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pplx_comm import settings
from pplx_comm.errors import Error
from pplx_comm.settings import Settings, Start, read

ROOT = Path(__file__).resolve().parent.parent.parent


def test_defaults_and_empty_values() -> None:
    assert read(Start, {}) == Start()
    assert read(Settings, {variable.name: "" for variable in settings.variables() if not variable.hidden}) == Settings()


def test_values() -> None:
    assert read(Start, {"PPLX_COMM_ADDR": "[fe80::1]:99"}).address == ("fe80::1", 99)
    assert read(Start, {"PPLX_COMM_ADDR": "node0", "PPLX_COMM_PORT": "7"}) == Start(address=("node0", None), port=7)
    assert read(Settings, {"PPLX_COMM_NICS": " a, b,"}).nics == ("a", "b")
    assert not read(Settings, {"PPLX_COMM_GDRCOPY": "0"}).gdrcopy
    assert read(Settings, {"PPLX_COMM_SHARD_BYTES": "300", "PPLX_COMM_THREADS": "3"}) == Settings(shard_bytes=300, threads=3)
    assert read(Settings, {}).large_tokens == 0 and read(Settings, {"PPLX_COMM_LARGE_TOKENS": "512"}).large_tokens == 512


@pytest.mark.parametrize(
    ("kind", "name", "value", "must"),
    [
        (Start, "PPLX_COMM_ADDR", "h:port", "host:port"),
        (Start, "PPLX_COMM_ADDR", "h:0", "between 1 and 65535"),
        (Start, "PPLX_COMM_PORT", "65536", "1 to 65535"),
        (Start, "PPLX_COMM_JOB", "\udcff", "in UTF-8"),
        (Settings, "PPLX_COMM_IFACE", "eth\udcff", "in UTF-8"),
        (Settings, "PPLX_COMM_THREADS", "0", "1 to 1024"),
        (Settings, "PPLX_COMM_THREADS", "-1", "1 to 1024"),
        (Settings, "PPLX_COMM_THREADS", "100000", "1 to 1024"),
        (Settings, "PPLX_COMM_ENDPOINTS", "two", "1 to 16"),
        (Settings, "PPLX_COMM_ENDPOINTS", str(2**40), "1 to 16"),
        (Settings, "PPLX_COMM_LARGE_TOKENS", "0", "1 to"),
        (Settings, "PPLX_COMM_LARGE_TOKENS", str(2**64), "1 to"),
        (Settings, "PPLX_COMM_CUDA_FUZZ", "9" * 5000, "an integer"),
        (Settings, "PPLX_COMM_SENDING_SHARE", "101", "1 to 100"),
        (Settings, "PPLX_COMM_SHARD_BYTES", "1e6", "1 to"),
        (Settings, "PPLX_COMM_SHARD_BYTES", str(2**64), "1 to"),
        (Settings, "PPLX_COMM_PART_BYTES", "9" * 5000, "1 to"),
        (Settings, "PPLX_COMM_PLACEMENT", "gpu", "'auto', 'host' or 'device'"),
        (Settings, "PPLX_COMM_GDRCOPY", "no", "0 or 1"),
        (Settings, "PPLX_LIBFABRIC", "libfabric.so.1", "an absolute path"),
    ],
)
def test_what_is_wrong(kind: type, name: str, value: str, must: str) -> None:
    with pytest.raises(Error) as raised:
        read(kind, {name: value})
    assert f"{name}={value!r} must be" in str(raised.value) and must in str(raised.value)


def test_a_secret_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for secret, must in (("", "at least 16"), ("hunter2", "at least 16"), ("hunter2" * 3 + "\udcff", "in UTF-8")):
        with pytest.raises(Error, match=f"PPLX_COMM_SECRET has {len(secret)} characters: it must be .*{must}") as raised:
            read(Start, {"PPLX_COMM_SECRET": secret})
        assert "hunter2" not in str(raised.value)
    monkeypatch.setenv("PPLX_COMM_SECRET", "hunter2")
    assert settings.in_force()["PPLX_COMM_SECRET"] == "..."


def test_one_place() -> None:
    """No other file of the library looks at the environment for a variable of ours, but for those that settings.py names."""
    named = re.findall(r"read(?: again)? by (\S+\.cpp)", (ROOT / "pplx_comm" / "settings.py").read_text())
    assert len(named) == 2
    sources = [path for folder in ("pplx_comm", "src", "proxy") for path in (ROOT / folder).rglob("*") if path.is_file()]
    looks = re.compile(r"""(?:environ|getenv)\b[^\n]*"PPLX_""")
    readers = {
        str(path.relative_to(ROOT))
        for path in sources
        if path.suffix in (".py", ".cpp", ".cu", ".h", ".cuh") and looks.search(path.read_text()) is not None
    }
    assert readers == {*named, "pplx_comm/settings.py"}


def test_variables_of_others() -> None:
    """They are read here, too. wiring/nvshmem.py sets some for NVSHMEM while it starts."""
    readers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "pplx_comm").rglob("*.py")
        if re.search(r"\bos\.(environ|getenv)\b", path.read_text()) is not None
    }
    assert readers == {"pplx_comm/settings.py", "pplx_comm/wiring/nvshmem.py"}


def test_the_log(tmp_path: Path) -> None:
    """Its lines have a time and the process, then the rank. A wrong value says so where the package is imported."""
    code = "import logging, os, pplx_comm.log as l; l.log.info('one'); l.name_rank(3); l.log.debug('two'); l.log.warning('three')"

    def run(value: str, code: str = code) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PPLX_COMM_LOG": value}
        return subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=False)

    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
    assert re.fullmatch(stamp + r"pid \d+ pplx_comm INFO: one\n" + stamp + "rank 3 pplx_comm WARNING: three\n", run("info").stderr)
    said = run(f"debug:{tmp_path}/%p.log", code + "; print(os.getpid())")
    lines = (tmp_path / f"{int(said.stdout)}.log").read_text().splitlines()
    assert said.stderr == "" and [line.split(": ")[1] for line in lines] == ["one", "two", "three"]
    assert run("").stderr == "three\n"  # as Python's logging does
    for wrong in ("loud", "info:", ":file"):
        said = run(wrong)
        assert said.returncode == 1 and f"PPLX_COMM_LOG='{wrong}' must be debug, info or warning" in said.stderr, said.stderr
