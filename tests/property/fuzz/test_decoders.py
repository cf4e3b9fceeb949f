"""Every decoder of wire and file, given what nobody writes: the short form of tools/fuzz.py."""

import ast
import hashlib
import importlib.util
import io
import json
import os
import resource
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.frames import SESSION, feed, frame_bytes, new_reader
from helpers.fuzzing.engine import inputs
from helpers.fuzzing.files import SEALED, folder
from helpers.fuzzing.messages import READS
from helpers.fuzzing.target import Broken, Target, require_one_line
from helpers.fuzzing.targets import TARGETS

from securevfl import read_federation
from securevfl.core.errors import ConfigError, DataError, PrivacyError, ProtocolError
from securevfl.data.sources.settings import read_source
from securevfl.federation.checkpoint import DamagedError, read_state
from securevfl.federation.messages import Hello
from securevfl.federation.session.handshake import read_hello
from securevfl.linkage.stage.link_cache import LinkCache
from securevfl.testing import write_federation
from securevfl.transport.message import Message, StarKind

ROOT = Path(__file__).resolve().parents[3]
INPUTS = 300
OF_SLOW = 100
SLOW = frozenset({"ledger", "state", "model", "text-tables"})


@pytest.mark.parametrize("name", TARGETS)
def test_it_takes_or_refuses_in_one_line_whatever_it_is_given(name: str) -> None:
    """And takes at least one of the seeds that all others are made of."""
    target = TARGETS[name]
    for data in inputs(target, seed=20261122, count=OF_SLOW if name in SLOW else INPUTS):
        target.check(data)
    assert any(target.check(data) for data in target.seeds())


def test_every_message_that_is_read_is_fuzzed() -> None:
    """A new message that declares its fields, or reads them by hand, must be among them."""
    written = {
        f"{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}.{one.name}"
        for path in (ROOT / "securevfl").rglob("*.py")
        for one in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(one, ast.ClassDef)
        and (
            "DeclaredMessage" in {ast.unparse(base) for base in one.bases}
            or any(isinstance(m, ast.FunctionDef) and m.name == "from_message" for m in one.body)
        )
    }
    read = {f"{type(one.example).__module__}.{type(one.example).__name__}" for one in READS}
    assert {one for one in written - read if not one.endswith(".DeclaredMessage")} == set()


def test_the_tool_knows_every_target() -> None:
    spec = importlib.util.spec_from_file_location("fuzz_tool", ROOT / "tools/fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tuple(TARGETS) == tool.NAMES


def broken(read) -> str:
    target = Target(name="t", seeds=lambda: [b""], read=read, seconds=0.2, room=16 << 20)
    with pytest.raises(Broken) as found:
        target.check(b"x")
    return str(found.value)


def test_what_must_not_be_is_noticed() -> None:
    """Endless computing and memory that nobody announced, each on its own."""

    def endless(_data: bytes) -> None:
        while True:
            try:
                sum(range(1000))
            except Exception:
                continue

    def hungry(_data: bytes) -> None:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        bytearray(most * 1024)

    assert "computing" in broken(endless)
    assert "MiB for 1 bytes" in broken(hungry)
    for text in ("", "two\nlines", "\x1b[2J", "\ud800", "x" * 2001):
        with pytest.raises(Broken):
            require_one_line(text)


@pytest.mark.parametrize(
    "figures",
    [
        *('{"a":1e999}', '{"a":-1e999}', '{"a":NaN}', '{"a":9223372036854775808}'),
        *('{"a":1' + "0" * 4000 + "}", '{"a":' + "[" * 9 + "]" * 9 + "}"),
        '{"a":' + "[" * 900 + "]" * 900 + "}",
    ],
)
def test_figures_that_fail_where_they_are_used_are_refused_where_they_arrive(figures: str) -> None:
    """Printed by whoever stands higher on the stack, 900 lists in one another overflow it."""
    head = struct.pack("<H", 0) + figures.encode()
    raw = bytearray(frame_bytes(Message(kind=StarKind.LEAVE))[:52])
    struct.pack_into("<I", raw, 40, len(head))
    with pytest.raises(ProtocolError, match="a head that cannot be read"):
        feed(new_reader(), bytes(raw) + head)
    fits = b'{"a":[[[[[[[9223372036854775807]]]]]]]}'
    head = struct.pack("<H", 0) + fits
    struct.pack_into("<I", raw, 40, len(head))
    (message,) = feed(new_reader(), bytes(raw) + head)
    assert message.meta == json.loads(fits)


@pytest.mark.parametrize("lengths", [(2**32 - 1, 0), (1 << 18, 2**40), (2, 2**63), (19, 1 << 30)])
def test_nothing_is_set_aside_for_more_than_may_come(lengths: tuple[int, int]) -> None:
    """A header of 52 bytes takes 4 GiB or a tebibyte in no other reader than a careless one."""
    raw = bytearray(frame_bytes(Message(kind=StarKind.LEAVE), session=SESSION)[:52])
    struct.pack_into("<IQ", raw, 40, *lengths)
    reader = new_reader()
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="at most"):
            feed(reader, bytes(raw))
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


def test_a_source_file_of_many_levels_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bank.source.toml"
    path.write_text("file = " + "[" * 5000)
    with pytest.raises(DataError, match=r"^table: is nested too deeply to be settings$"):
        read_source(path, where="table")


def test_numbers_that_no_machine_has_are_refused_in_one_line(tmp_path: Path) -> None:
    """Of 400 digits in a federation file, and of 5,000, which Python does not even read."""
    path = tmp_path / "fed.toml"
    text = TARGETS["federation"].seeds()[0].decode()
    assert "learning_rate = 0.005" in text
    for digits, words in (
        (400, "training.learning_rate: must be below 1e308"),
        (5000, "is not TOML"),
    ):
        path.write_text(text.replace("0.005", "1" * digits))
        with pytest.raises(ConfigError, match=words):
            read_federation(path)


@pytest.mark.parametrize(
    "released", [[], [[0, 2**31]], [[9, 0]], [[-1, 8]], [[0, 9], [3, 3]], [[0]]]
)
def test_a_ledgers_ranges_are_as_many_rows_as_it_charges(released: list[list[int]]) -> None:
    """Whoever goes on with a run makes room for every row in them."""
    data = TARGETS["ledger"].seeds()[3][1:]
    lines = [json.loads(line) for line in data.splitlines()]
    (place, *_) = (number for number, line in enumerate(lines) if line["kind"] == "charge")
    assert lines[place]["rows"] == 10
    lines[place]["released"] = released
    altered = "\n".join(json.dumps(line) for line in lines).encode()
    with pytest.raises(PrivacyError, match=r"line 2: is not a ledger's line"):
        TARGETS["ledger"].read(bytes([SEALED]) + altered)


def test_what_others_say_of_their_file_is_no_text_for_a_terminal(tmp_path: Path) -> None:
    """The digest of a caller's file stands in the line that the operator reads."""
    config = read_federation(write_federation(tmp_path))
    hello = next(one for one in READS if isinstance(one.example, Hello))
    message = hello.example.to_message()
    for digest in ("\x1b[2J", "d" * 63, "D" * 64, "d" * 64 + "\n"):
        told = replace(message, meta={**message.meta, "digest": digest}, sender="rental")
        with pytest.raises(
            ProtocolError, match=r"^party 'rental' sent an invalid digest of its file$"
        ):
            read_hello(config, told)


class Program:
    """What a file must not bring to life."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_of_a_state_with_the_right_digest_is_executed(tmp_path: Path) -> None:
    """Whoever may write the folder can make the digest right too."""
    path, trace = tmp_path / "epoch-1.pt", tmp_path / "trace"
    for content in ({"state": Program(trace)}, Program(trace)):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        data = buffer.getvalue()
        path.write_bytes(data + hashlib.sha256(data).digest())
        with pytest.raises(DamagedError, match="is not a state that this program wrote"):
            read_state(path)
    assert not trace.exists()


def test_a_state_cannot_say_that_a_few_bytes_are_a_terabyte(tmp_path: Path) -> None:
    """A view of one number, as large as it likes; whoever computes with it would make it real."""
    path = tmp_path / "epoch-1.pt"
    for tensor in (torch.zeros(1).expand(2**40), torch.zeros(2).to_sparse()):
        buffer = io.BytesIO()
        torch.save({"state": {"list": [tensor]}}, buffer)
        data = buffer.getvalue()
        path.write_bytes(data + hashlib.sha256(data).digest())
        with pytest.raises(DamagedError, match="is not a state that this program wrote"):
            read_state(path)


def test_nothing_of_kept_links_is_executed(tmp_path: Path) -> None:
    path, trace = tmp_path / f"links-{'k' * 16}.npz", tmp_path / "trace"
    figures = np.frombuffer(json.dumps({"key": "k" * 64}).encode(), dtype=np.uint8)
    with path.open("wb") as file:
        np.savez(file, figures=figures, indices=np.array([Program(trace)], dtype=object))
    with pytest.raises(DataError, match="is damaged or not a file of links"):
        LinkCache(tmp_path).get("k" * 64, lambda: pytest.fail("made anew"))
    assert not trace.exists()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("indices", lambda array: array.astype(np.float64)),
        ("indices", lambda array: array - 5),
        ("distances", lambda array: array.astype(np.float32)),
        ("values", lambda array: array.astype(np.float64)),
        ("values", lambda array: array[:1]),
    ],
)
def test_links_of_other_types_are_refused(name: str, change) -> None:
    """Before, they were taken, and broke far from here."""
    _, seed = TARGETS["links"].seeds()
    with np.load(io.BytesIO(seed)) as archive:
        arrays = {one: archive[one] for one in archive.files}
    arrays[name] = change(arrays[name])
    path = folder() / f"links-{'k' * 16}.npz"
    with path.open("wb") as file:
        np.savez(file, **arrays)
    with pytest.raises(DataError, match="is damaged or not a file of links"):
        LinkCache(folder()).get("k" * 64, lambda: pytest.fail("made anew"))
