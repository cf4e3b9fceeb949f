"""Inputs made of others: bytes altered at random, and trees of JSON or TOML in one place."""

import json
import math
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

_WHOLE: Final = (0, 1, -1, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1)
_NUMBERS: Final = (
    *(b"0", b"-1", b"1", b"1e999", b"-1e999", b"1e308", b"5e-324", b"0.1", b"NaN", b"Infinity"),
    *(b"9223372036854775807", b"9223372036854775808", b"4294967296", b"1" + b"0" * 400),
)
_NUMBER: Final = re.compile(rb"-?\d+(\.\d+)?")
_DEEP: Final = re.compile(r'"@@deep(\d+)@@"')
_MOST_BYTES: Final = 1 << 16

ODD: Final[tuple[Any, ...]] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        255,
        2**31,
        2**40,
        2**63 - 1,
        2**63,
        10**12,
        10**400,
        10**4200,
    ),
    *(0.0, -0.0, 0.5, 1e-300, 1e300, math.inf, -math.inf, math.nan),
    *(
        "",
        "a",
        "a\nb",
        "\x1b[2J",
        "\u202e",
        "x" * 300,
        "1",
        "none",
        "../../x",
        "/dev/zero",
        "é\x85",
    ),
    *([], {}, [0], [[]], [""], [None], {"": 0}, [1, 2, 3], ["a", "b"], {"a": {"b": 1}}),
    "@@inf@@",
    *("@@deep500@@", "@@deep930@@", "@@deep980@@", "@@deep5000@@", "@@deep100000@@"),
)
"""What may stand where something else was meant. ``@@deepN@@`` becomes N lists in one another."""


def havoc(data: bytes, random: Random, words: Sequence[bytes] = ()) -> bytes:
    """Alter up to eight places of an input."""
    made = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        random.choice(_CHANGES)(made, random, words)
    return bytes(made[:_MOST_BYTES])


def altered_tree(tree: Any, random: Random) -> Any:
    """Return a copy of a tree of lists and mappings with one place altered."""
    copy = _copied(tree)
    places: list[tuple[Any, Any]] = []
    _walk(copy, places)
    if not places:
        return random.choice(ODD)
    for _ in range(random.choice((1, 1, 1, 2))):
        _alter(places, random)
    return copy


def as_json(tree: Any) -> bytes:
    """Return a tree as JSON, with what Python's own reader takes beyond it."""
    return deepened(json.dumps(tree)).encode()


def deepened(text: str) -> str:
    """Put lists in one another where ``@@deepN@@`` stands, and what overflows for ``@@inf@@``."""
    text = text.replace('"@@inf@@"', "1e999")
    return _DEEP.sub(lambda found: "[" * int(found[1]) + "]" * int(found[1]), text)


def _alter(places: list[tuple[Any, Any]], random: Random) -> None:
    holder, key = random.choice(places)
    try:
        match random.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.extend(_copied(holder[key]) for _ in range(random.choice((1, 2, 50))))
            case 1:
                holder[random.choice(("", "more", "x\ny", "kind"))] = holder.pop(key)
            case 2:
                other, place = random.choice(places)
                holder[key] = _copied(other[place])
            case 3 if isinstance(holder[key], bool | int | float):
                holder[key] = random.choice(
                    (-holder[key], holder[key] + 1, holder[key] * 1e9, float(holder[key]))
                )
            case 3 if isinstance(holder[key], str):
                holder[key] = havoc(holder[key].encode(), random).decode(errors="replace")
            case _:
                holder[key] = _copied(random.choice(ODD))
    except (KeyError, IndexError, OverflowError):
        pass  # an earlier change took the place away


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list | tuple) else tree


def _walk(tree: Any, places: list[tuple[Any, Any]]) -> None:
    if isinstance(tree, dict | list):
        keys: Any = list(tree) if isinstance(tree, dict) else range(len(tree))
        for key in keys:
            places.append((tree, key))
            _walk(tree[key], places)


def _flip(made: bytearray, random: Random, _words: Sequence[bytes]) -> None:
    if made:
        made[random.randrange(len(made))] ^= 1 << random.randrange(8)


def _set(made: bytearray, random: Random, _words: Sequence[bytes]) -> None:
    if made:
        made[random.randrange(len(made))] = random.choice((0, 1, 10, 34, 91, 127, 128, 255))


def _number(made: bytearray, random: Random, _words: Sequence[bytes]) -> None:
    size = random.choice((1, 2, 4, 8))
    value = random.choice(_WHOLE) % (1 << 8 * size)
    start = random.randrange(len(made) + 1)
    made[start : start + size] = value.to_bytes(size, random.choice(("little", "big")))


def _written_number(made: bytearray, random: Random, words: Sequence[bytes]) -> None:
    found = list(_NUMBER.finditer(bytes(made)))
    if not found:
        _number(made, random, words)
        return
    place = random.choice(found)
    made[place.start() : place.end()] = random.choice(_NUMBERS)


def _cut(made: bytearray, random: Random, _words: Sequence[bytes]) -> None:
    start = random.randrange(len(made) + 1)
    del made[start : start + random.choice((1, 1, 4, 32, len(made)))]


def _double(made: bytearray, random: Random, _words: Sequence[bytes]) -> None:
    start = random.randrange(len(made) + 1)
    piece = made[start : start + random.choice((1, 8, 64))] * random.choice((1, 2, 100))
    made[start:start] = piece[:4096]


def _noise(made: bytearray, random: Random, _words: Sequence[bytes]) -> None:
    start = random.randrange(len(made) + 1)
    made[start:start] = random.randbytes(random.choice((1, 4, 16)))


def _word(made: bytearray, random: Random, words: Sequence[bytes]) -> None:
    word = random.choice(words) if words else random.choice(_NUMBERS)
    start = random.randrange(len(made) + 1)
    made[start : start + random.choice((0, len(word)))] = word


_CHANGES: Final[tuple[Callable[[bytearray, Random, Sequence[bytes]], None], ...]] = (
    *(_flip, _set, _number, _written_number, _cut, _double, _noise, _word),
)
