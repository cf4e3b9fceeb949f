"""Files that unpack to far more than they are: refused before their content is in memory."""

import hashlib
import io
import os
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from securevfl.core import files
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.files import require_unpackable
from securevfl.federation.checkpoint import DamagedError, read_state, write_state
from securevfl.linkage.stage.link_cache import _load

ZEROS = 64 * 2**20


@contextmanager
def little_memory(most: int = 2**22) -> Iterator[None]:
    """Fail if the block has more than 4 MiB in use at a time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def array_of(shape: tuple[int, ...], content: bytes) -> bytes:
    """Return a file of an array that says it has this shape."""
    buffer = io.BytesIO()
    about = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, about)  # type: ignore[no-untyped-call]
    return buffer.getvalue() + content


def archive_of(parts: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def with_overlap(data: bytes) -> bytes:
    """Return an archive whose directory names its one part a hundred times."""
    start = data.index(b"PK\x01\x02")
    end = data.index(b"PK\x05\x06")
    many = data[start:end] * 100
    tail = bytearray(data[end:])
    struct.pack_into("<HHL", tail, 8, 100, 100, len(many))
    return data[:start] + many + bytes(tail)


BOMBS: dict[str, Callable[[], bytes]] = {
    "zeros": lambda: archive_of(
        {"indices.npy": array_of((ZEROS,), bytes(ZEROS))}, zipfile.ZIP_DEFLATED
    ),
    "json": lambda: archive_of(
        {"figures.npy": array_of((ZEROS,), b" " * ZEROS)}, zipfile.ZIP_DEFLATED
    ),
    "header": lambda: archive_of({"figures.npy": array_of((2**36,), b"{}")}),
    "overlap": lambda: with_overlap(archive_of({"figures.npy": array_of((2**16,), bytes(2**16))})),
    "no archive": lambda: array_of((2**36,), b"{}"),
    "cut": lambda: archive_of({"figures.npy": array_of((2,), b"{}")})[:-30],
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_kept_links_are_refused_before_they_are_unpacked(bomb: str, tmp_path: Path) -> None:
    path = tmp_path / "links.npz"
    path.write_bytes(BOMBS[bomb]())
    with little_memory(), pytest.raises(DataError, match="is damaged or not a file of links"):
        _load(path, "key")
    with path.open("rb") as file, pytest.raises(ValueError, match=r"unpack|packed|larger|archive"):
        require_unpackable(file)


def test_figures_of_kept_links_are_short(tmp_path: Path) -> None:
    """Text is thirty times as large once it is read."""
    path = tmp_path / "links.npz"
    text = b'{"key": "key", "more": [' + b"0," * 2**20 + b"0]}"
    np.savez(path, figures=np.frombuffer(text, dtype=np.uint8))
    with little_memory(2**23), pytest.raises(DataError, match="is damaged"):
        _load(path, "key")


def test_a_state_that_is_packed_is_damaged(tmp_path: Path) -> None:
    """Its checksum says nothing of who wrote it, and this program packs none."""
    path = tmp_path / "run.pt"
    write_state(path, {"rows": torch.arange(1000)})
    assert len(read_state(path)["rows"]) == 1000
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    data = archive_of(parts, zipfile.ZIP_DEFLATED)
    path.write_bytes(data + hashlib.sha256(data).digest())

    with pytest.raises(DamagedError):
        read_state(path)


def test_what_is_packed_for_others_is_bounded_by_a_number() -> None:
    data = archive_of({"x.npy": array_of((2**16,), bytes(2**16))}, zipfile.ZIP_DEFLATED)
    require_unpackable(data, most=2**17)
    with pytest.raises(ValueError, match="would unpack to"):
        require_unpackable(data, most=2**16)


def test_text_is_refused_by_size(tmp_path: Path) -> None:
    """As is a device that has none and never ends."""
    path = tmp_path / "metrics.json"
    path.touch()
    os.truncate(path, 2**40)
    with little_memory(), pytest.raises(ConfigError, match="more than 67108864 bytes"):
        files.read_json(path)
    with pytest.raises(OSError, match="more than 1000 bytes"):
        files.read_text(Path("/dev/zero"), most=1000)
