"""The key that ranks of one job share before they have spoken: PPLX_COMM_SECRET, or on loopback a private file of this
user.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from pplx_comm.errors import Error
from pplx_comm.settings import HOW_TO_SET_SECRET


def user_key(environ: Mapping[str, str]) -> bytes:
    """The key in this user's 0600 file, made at first use. Only for addresses that no other host can reach."""
    problems = []
    for folder in _folders(environ):
        try:
            _check_folder(folder)
            return _read_or_make(folder / "key")
        except OSError as problem:
            problems.append(f"{folder}: {problem.strerror or problem}")
    raise Error(
        f"no private place for this user's key ({'; '.join(problems)}). Set it by hand, the same on every rank: {HOW_TO_SET_SECRET}"
    )


def _folders(environ: Mapping[str, str]) -> list[Path]:
    folders = []
    if environ.get("XDG_RUNTIME_DIR"):
        folders.append(Path(environ["XDG_RUNTIME_DIR"]) / "pplx_comm")
    if environ.get("HOME"):
        folders.append(Path(environ["HOME"]) / ".cache" / "pplx_comm")
    return [*folders, Path(f"/tmp/pplx_comm-{os.geteuid()}")]


def _check_folder(folder: Path) -> None:
    """Raises unless the folder is ours, is no link, and is writable by no other user: one could swap the file under us."""
    if folder.parent.name == ".cache":
        folder.parent.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise Error(
            f"{folder} must be a directory that belongs to uid {os.geteuid()} and that only it can write: remove it, "
            f"or {HOW_TO_SET_SECRET}"
        )


def _read_or_make(path: Path) -> bytes:
    if not os.path.lexists(path):
        # Written whole beside the final name, then linked: the first writer wins, and readers never see half a key.
        fresh = path.with_name(f".{os.getpid()}-{secrets.token_hex(8)}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
        finally:
            os.unlink(fresh)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise Error(f"{path} must be a file of uid {os.geteuid()} with mode 0600: remove it, or {HOW_TO_SET_SECRET}")
        key = file.read(65)
    if len(key) != 64:
        raise Error(f"{path} does not hold a key: remove it, or {HOW_TO_SET_SECRET}")
    return key
