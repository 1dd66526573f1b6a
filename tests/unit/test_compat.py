"""python -m pplx_comm compat: a package of this library in the place of another one's, and only where it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pplx_comm.cli import main
from pplx_comm.compat import command

ROOT = Path(__file__).resolve().parents[2]
SHOWN = "import sys, importlib.util as u; print([u.find_spec(sys.argv[1]).origin, *sys.argv[2:]])"


def _compat(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pplx_comm", "compat", *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("package", sorted(command.SUITES))
def test_run(package: str) -> None:
    """The command's own process finds the package, with its arguments as they are; the provider is named once."""
    done = _compat("run", package, "--", sys.executable, "-c", SHOWN, package, "--", "-x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str([str(command.SHADOW / package / package / "__init__.py"), "--", "-x"])]
    assert done.stderr.count(f"stands for {package} in: ") == 1
    others = [other for other in command.SUITES if other != package]
    assert all(str(command.SHADOW / other) not in command.search_path(package) for other in others)


def test_run_without_a_command() -> None:
    assert _compat("run", "deep_ep", "--", "/nothing/there").returncode == 127
    assert "give a command behind --" in _compat("run", "deep_ep").stderr


def test_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", "path", "deep_ep"]) == 0
    folders = capsys.readouterr().out.strip().split(os.pathsep)
    assert folders[0] == str(command.SHADOW / "deep_ep") and Path(folders[0], "deep_ep", "__init__.py").is_file()


def test_names_of_deep_ep() -> None:
    """Frameworks find the names that they look for, and none that would make them take another version."""
    wanted = "Buffer, Config, EventOverlap, topk_idx_t, __version__"
    code = f"from deep_ep import {wanted}; from deep_ep.utils import EventHandle, EventOverlap; import deep_ep; print(dir(deep_ep))"
    env = command.environment("deep_ep")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "ElasticBuffer" not in done.stdout and "HybridEPBuffer" not in done.stdout and "Buffer" in done.stdout


def test_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkout's own tests: each has passed, failed, or is refused, and the exit code says if one failed."""
    (tmp_path / "tests").mkdir()
    shows = "import sys, helper"
    (tmp_path / "tests" / "helper.py").write_text("")
    low, intranode = (tmp_path / "tests" / f"test_{name}.py" for name in ("low_latency", "intranode"))
    low.write_text(f"{shows}\nassert sys.argv[1:3] == ['--num-processes', '3'], sys.argv\n")
    intranode.write_text(f"{shows}\nraise SystemExit('Error: Buffer: {command.REFUSAL} x: use y')\n")
    assert main(["compat", "test", "deep_ep", "--source", str(tmp_path), "--processes", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "passed   tests/test_low_latency.py --num-processes 3 --num-experts 256"
    assert lines[1].startswith("refused  tests/test_intranode.py --num-processes 3: ") and lines[1].endswith("use y")
    assert all(line.startswith("refused  ") for line in lines[2:]) and len(lines) > 2
    low.write_text("raise SystemExit('it is broken')\n")
    intranode.unlink()
    assert main(["compat", "test", "deep_ep", "--source", str(tmp_path), "--verbose"]) == 1
    printed = capsys.readouterr()
    assert printed.err == "it is broken\n"
    lines = printed.out.splitlines()
    assert lines[0].startswith("failed   tests/test_low_latency.py") and lines[0].endswith(": it is broken")
    assert lines[1].startswith("failed   tests/test_intranode.py") and lines[1].endswith("is not there")


def test_verdicts_of_pytest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkout's other modules of the package are found, and stand-ins of what its tests import in vain."""
    for package, test, code in (
        (
            "pplx_garden",
            "tests/p2p_all_to_all/test_p2p_all_to_all.py",
            "from pplx_garden.distributed import group; assert group == 7",
        ),
        ("pplx_kernels", "tests/test_all_to_all.py", "import nvshmem.core as core; assert core.direct.init_status() == 2"),
    ):
        (tmp_path / test).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / test).write_text(f"def test_one():\n    {code}\n")
        (tmp_path / "python" / "pplx_garden" / "distributed").mkdir(parents=True, exist_ok=True)
        (tmp_path / "python" / "pplx_garden" / "__init__.py").write_text("")
        (tmp_path / "python" / "pplx_garden" / "distributed" / "__init__.py").write_text("group = 7\n")
        assert main(["compat", "test", package, "--source", str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"passed   {test}: 1 passed") and lines[1].startswith("refused  tests/")
