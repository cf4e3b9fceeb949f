"""Atomic file writes: a reader or a crash never sees half a file."""

import json
import os
import tempfile
from pathlib import Path

from securevfl.core.errors import ConfigError


def write_bytes(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write ``content`` to ``path`` through a synced temporary file in the same folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, content: str) -> None:
    """Write UTF-8 text atomically."""
    write_bytes(path, content.encode())


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON atomically; NaN and infinity are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def require_writable_folder(path: Path, *, what: str = "run folder") -> None:
    """Make ``path`` and prove that a file can be written in it.

    Raises:
        ConfigError: Naming the folder and the system's reason.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path, prefix=".write-test.")
        os.close(handle)
        Path(name).unlink()
    except OSError as error:
        raise ConfigError(
            f"{what} {path}: cannot be written ({error.strerror}); choose another with --out"
        ) from None
