"""Messages that declare their fields: sent and read alike, and refused where anything differs."""

import dataclasses
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import pytest
from helpers.fuzzing.messages import READS, Read
from jaxtyping import Float32, Int64, UInt64

from securevfl.core.errors import ProtocolError
from securevfl.transport import message as message_module
from securevfl.transport.message import (
    DeclaredMessage,
    Leave,
    Message,
    StarKind,
    require_empty,
    wire,
)

DECLARED = [read for read in READS if isinstance(read.example, DeclaredMessage)]
FIGURES = [
    pytest.param(read, name, id=f"{type(read.example).__name__}-{name}")
    for read in DECLARED
    for name in read.example.to_message().meta
]
ARRAYS = [
    pytest.param(read, name, id=f"{type(read.example).__name__}-{name}")
    for read in DECLARED
    for name in read.example.to_message().tensors
]


def received(message: Message) -> Message:
    """Return a message as the star hands it out."""
    copies = {name: array.copy() for name, array in message.tensors.items()}
    return replace(message, sender="bank", tensors=copies)


@pytest.mark.parametrize("read", DECLARED, ids=lambda read: type(read.example).__name__)
def test_a_message_is_read_as_it_was_sent(read) -> None:
    """To the last bit, round number and 64-bit words included."""
    sent = read.example.to_message()
    again = type(read.example).from_message(received(sent), **read.knows).to_message()
    assert again.digest() == sent.digest()


@pytest.mark.parametrize(("read", "name"), FIGURES)
@pytest.mark.parametrize("value", [None, [], {}, "?", 1.5, True, 7], ids=repr)
def test_a_figure_of_another_type_is_refused(read, name, value) -> None:
    """Absent ones too; a truth value is no number."""
    sent = read.example.to_message()
    if type(value) is type(sent.meta[name]):
        pytest.skip("of the right type")
    meta = {**sent.meta, name: value}
    if value is None:
        del meta[name]
    with pytest.raises(ProtocolError, match=f"bank: .*{name}"):
        type(read.example).from_message(received(replace(sent, meta=meta)), **read.knows)


@pytest.mark.parametrize(("read", "name"), ARRAYS)
@pytest.mark.parametrize("harm", ["deeper", "other type", "missing"])
def test_an_array_of_another_shape_or_type_is_refused(read, name, harm) -> None:
    """By name, before it is used."""
    sent = read.example.to_message()
    array = sent.tensors[name]
    other = np.float64 if array.dtype != np.float64 else np.int64
    harmed = {"deeper": array[..., None], "other type": array.astype(other)}
    tensors = {**sent.tensors, name: harmed.get(harm)}
    if harm == "missing":
        del tensors[name]
    with pytest.raises(ProtocolError, match=f"bank: .*{name}"):
        type(read.example).from_message(received(replace(sent, tensors=tensors)), **read.knows)


def read_anyhow(read, message: Message) -> None:
    """Read a message as it is read on its way; one that holds nothing is read on arrival."""
    require_empty(message)
    if read.example.KIND is not StarKind.LEAVE:
        type(read.example).from_message(message, **read.knows)


@pytest.mark.parametrize(
    "read", [*READS, Read(Leave(), {})], ids=lambda read: type(read.example).__name__
)
@pytest.mark.parametrize("what", ["figure", "array"])
@pytest.mark.parametrize("name", ["zzz", "round_number", "public:zzz", "head:zzz", "number:99"])
def test_what_a_message_never_has_is_refused(read, what, name) -> None:
    """Of every kind, by a name of its own, and of the sender."""
    sent = received(read.example.to_message())
    if what == "figure":
        more = replace(sent, meta={**sent.meta, name: 1})
    else:
        more = replace(sent, tensors={**sent.tensors, name: np.zeros(1, dtype=np.int64)})
    with pytest.raises(ProtocolError, match=f"bank: .* has '{name}', which is none"):
        read_anyhow(read, more)


@pytest.mark.parametrize("read", DECLARED, ids=lambda read: type(read.example).__name__)
def test_a_figure_and_an_array_share_no_name(read) -> None:
    """An array by the name of a figure would be one that nobody reads."""
    sent = received(read.example.to_message())
    arrays = dict.fromkeys(sent.meta, np.zeros(1, dtype=np.int64))
    figures = dict.fromkeys(sent.tensors, 1)
    for more in (
        replace(sent, tensors={**sent.tensors, **arrays}),
        replace(sent, meta={**sent.meta, **figures}),
    ):
        if more.meta.keys() & more.tensors.keys():
            with pytest.raises(ProtocolError, match="which is none of its fields"):
                type(read.example).from_message(more, **read.knows)


def test_messages_that_hold_nothing_are_read_on_arrival() -> None:
    """Their receivers wait for the kind alone, in many places."""
    bare = {kind.name for kind, holds in message_module._HOLDS.items() if not holds}
    holding = {read.example.KIND.name for read in READS if dataclasses.fields(read.example)}
    assert bare >= {"DONE", "READY", "LEAVE", "CLASS_MEANS_DONE", "COMPUTING_DONE"}
    assert bare == {read.example.KIND.name for read in READS} - holding | {"LEAVE"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Everything(DeclaredMessage):
    """A message with every rule there is."""

    KIND: ClassVar = StarKind.SEALED
    WAY: ClassVar = "nobody to nobody"

    round_number: int = 3
    count: int = wire(least=1, most="limit")
    share: float = wire(least=0, most=1)
    word: Literal["a", "b"]
    rank: int = wire(among="due")
    key: bytes = wire(length=2)
    rows: Int64[np.ndarray, " some_rows"] = wire(name="r", below="table")
    values: Float32[np.ndarray, "some_rows width"]
    words: UInt64[np.ndarray, " _words"]


KNOWN = {"limit": 5, "due": (1, 2), "table": 10, "width": 2}


def everything(**changed) -> Message:
    fields = {
        "count": 5,
        "share": 0.5,
        "word": "a",
        "rank": 2,
        "key": b"xy",
        "rows": np.array([0, 9]),
        "values": np.ones((2, 2), dtype=np.float32),
        "words": np.array([2**64 - 1], dtype=np.uint64),
    }
    return received(Everything(**fields | changed).to_message())


def test_every_rule_lets_its_bounds_pass() -> None:
    """And the message has the form that its fields declare."""
    message = everything()
    found = Everything.from_message(message, **KNOWN)
    assert (found.count, found.word, found.key, found.words.tolist()) == (
        5,
        "a",
        b"xy",
        [2**64 - 1],
    )
    assert message.round_number == found.round_number == 3
    assert set(message.tensors) == {"key", "r", "values", "words"}
    Everything.from_message(everything(words=np.zeros(0, dtype=np.uint64)), **KNOWN)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"count": 6}, "count must be at least 1 and at most 5, got 6"),
        ({"count": 0}, "count must be at least 1"),
        ({"share": float("nan")}, "share must be finite"),
        ({"share": -0.1}, "share must be at least 0"),
        ({"word": "c"}, "word must be one of a, b, got 'c'"),
        ({"rank": 3}, "rank = 3 is not due"),
        ({"key": b"xyz"}, r"key must have shape \[2\]"),
        ({"rows": np.array([0, 10])}, "r must lie in 0 to 9"),
        ({"rows": np.array([-1, 0])}, "r must lie in 0 to 9"),
        ({"values": np.ones((3, 2), dtype=np.float32)}, r"values must have shape \[2, 2\]"),
        ({"values": np.full((2, 2), np.nan, dtype=np.float32)}, "NaN"),
        (
            {"rows": np.zeros(0, dtype=np.int64), "values": np.ones((0, 2), dtype=np.float32)},
            "r must not be empty",
        ),
    ],
    ids=repr,
)
def test_a_value_outside_its_bounds_is_refused(changed, words) -> None:
    """One line that names sender, field, rule and value."""
    sent = everything()
    fields = {**sent.meta, **{k: v for k, v in changed.items() if k in sent.meta}}
    arrays = dict(sent.tensors)
    for name, value in changed.items():
        key = "r" if name == "rows" else name
        if key in arrays:
            raw = isinstance(value, bytes)
            arrays[key] = np.frombuffer(value, dtype=np.uint8) if raw else value
    with pytest.raises(ProtocolError, match=f"bank: SEALED of round 3: .*{words}"):
        Everything.from_message(replace(sent, meta=fields, tensors=arrays), **KNOWN)


def test_a_length_that_the_reader_does_not_pass_is_a_mistake_of_the_program() -> None:
    """A check that is forgotten is no check that passes."""
    with pytest.raises(KeyError):
        Everything.from_message(everything(), limit=5, due=(1, 2), table=10)
