"""What happens to files: cut writes, flipped bits, something else under the same name."""

import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch


def _sealed(content: object) -> bytes:
    """Return a whole file of other content: its checksum is right."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getvalue()
    return data + hashlib.sha256(data).digest()


def _zip_of_text() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", "a")
    return buffer.getvalue()


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _checked(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


HARMS: Final[Mapping[str, Callable[[bytes], bytes | None]]] = {
    "deleted": lambda _data: None,
    "empty": lambda _data: b"",
    "truncated": lambda data: data[:-100],
    "half": lambda data: data[: len(data) // 2],
    "flipped": _flipped,
    "text": lambda _data: b"not a checkpoint",
    "pickle": lambda _data: _checked(b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00K\x01."),
    "program": lambda _data: _sealed({"state": {"f": print}}),
    "zip": lambda _data: _checked(_zip_of_text()),
    "list": lambda _data: _sealed([1, 2]),
    "keys": lambda _data: _sealed({"state": {}, "run": "1" * 32}),
    "types": lambda _data: _sealed(
        {"state": [], "run": 7, "settings_digest": None, "ledger_head": ""}
    ),
}
"""By name: what becomes of a file's bytes; None removes it."""


def damage(path: Path, harm: str) -> None:
    """Let a file come to harm."""
    data = HARMS[harm](path.read_bytes())
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
