"""Writes pplx_comm/_core.pyi and pplx_comm/_cuda.pyi as the built modules give them; --check says whether they are that.

_cuda is the one that tests/emulation builds for a CPU: its bindings are those of nvcc's build, and it is there without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Written by `make stubs` from the built modules. Change the bindings, not this file.\n"


def _generate(module: str, path: str | None, folder: Path) -> str:
    """In a process of its own: a module is imported once."""
    command = [sys.executable, __file__, "--module", module, "--into", str(folder)]
    if path is not None:
        command += ["--path", path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    written: Path = folder / (module.replace(".", "/") + ".pyi")
    # An int is what the calls give, and all that a reader wants to know.
    text = written.read_text().replace("typing.SupportsInt | typing.SupportsIndex", "int")
    return HEADER + text.replace("typing.SupportsFloat | typing.SupportsIndex", "float")


def _write(module: str, path: str | None, folder: str) -> None:
    import pybind11_stubgen

    sys.path.insert(0, str(ROOT))
    import pplx_comm._core  # noqa: F401  (_cuda's signatures name its classes)

    if path is not None:
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    pybind11_stubgen.main([module, "--output-dir", folder, "--exit-code"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a stub is not what its module gives")
    parser.add_argument("--cuda", help="pplx_comm._cuda as tests/emulation builds it; without it only _core is looked at")
    parser.add_argument("--module", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.module:
        _write(arguments.module, arguments.path, arguments.into)
        return
    modules = {"pplx_comm._core": None} | ({"pplx_comm._cuda": arguments.cuda} if arguments.cuda else {})
    stale = []
    for module, path in modules.items():
        with tempfile.TemporaryDirectory() as folder:
            text = _generate(module, path, Path(folder))
        stub = ROOT / (module.replace(".", "/") + ".pyi")
        if not arguments.check:
            stub.write_text(text)
        elif stub.read_text() != text:
            stale.append(str(stub.relative_to(ROOT)))
    if stale:
        sys.exit(f"{' and '.join(stale)} differ from what the modules give: run `make stubs`")


if __name__ == "__main__":
    main()
