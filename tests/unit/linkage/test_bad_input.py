"""Bad and unusual keys, the same for every way to compare them: one clear line, or right links."""

from collections.abc import Callable

import numpy as np
import pytest
from helpers.blocked import by_rules

from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.metric import ComparedKeys, Field, KeyRange
from securevfl.linkage.metrics.points import EarthKeys, EuclideanKeys
from securevfl.linkage.sampling import RoundLinker
from securevfl.linkage.spec import LinkageSecret
from securevfl.stages.bloom.codes import CodeKeys, TextCode, encode_keys
from securevfl.stages.encrypted_linkage.block_search import links_from_shares
from securevfl.stages.encrypted_linkage.shares import (
    deal,
    masked_keys,
    primary_share,
    secondary_share,
)
from securevfl.stages.fuzzy_keys.edits import TextKeys
from securevfl.stages.fuzzy_keys.mixed import MixedKeys

SECRET = LinkageSecret(b"s" * 32)
NAME = (Field(name="name", kind="text"),)


def coded(values: list[str]) -> np.ndarray:
    return encode_keys({"name": values}, {"name": TextCode(bits=256)}, SECRET)


def shared(mine: np.ndarray, theirs: np.ndarray, k: int) -> LinkTable:
    """The protocol of secret shares, on quantised keys."""
    first, second = deal(len(mine), len(theirs), mine.shape[1])
    one = primary_share(mine, first, masked_keys(theirs, second))
    other = secondary_share(theirs, second, masked_keys(mine, first))
    return links_from_shares(one, other, k, key_dim=mine.shape[1])


def blocked(mine: list[str], theirs: list[str], k: int) -> TextKeys:
    return by_rules({"name": [*mine]}, {"name": [*theirs]}, ["left(name, 1)"], k)


Make = Callable[[int, int], ComparedKeys]
"""Keys of so many rows and records, all alike."""

METRICS: dict[str, Make] = {
    "euclidean": lambda a, b: EuclideanKeys(primary=np.ones((a, 2)), records=np.ones((b, 2))),
    "earth": lambda a, b: EarthKeys.of(np.ones((a, 2)), np.ones((b, 2))),
    "text": lambda a, b: TextKeys.of(["anna"] * a, ["anna"] * b),
    "blocked": lambda a, b: blocked(["anna"] * a, ["anna"] * b, 1),
    "mixed": lambda a, b: MixedKeys.of({"name": ["anna"] * a}, {"name": ["anna"] * b}, NAME),
    "code": lambda a, b: CodeKeys(
        primary=np.ones((a, 8), dtype=np.uint8), records=np.ones((b, 8), dtype=np.uint8)
    ),
}


@pytest.mark.parametrize("name", METRICS)
def test_k_above_the_candidates_is_refused(name: str) -> None:
    """Before any round, too."""
    keys = METRICS[name](3, 4)
    with pytest.raises(DataError, match=r"K = 5 links .* only 4 records; lower"):
        keys.nearest(None, 5)
    with pytest.raises(DataError, match=r"K = 5 links"):
        RoundLinker(keys, 5, rate=0.5)
    with pytest.raises(ConfigError, match="k must be at least 1"):
        keys.nearest(None, 0)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_empty_tables_are_refused(name: str, sizes: tuple[int, int]) -> None:
    """At either party, when keys are made or linked."""
    with pytest.raises(DataError, match=r"empty|no rows|above 0"):
        METRICS[name](*sizes).nearest(None, 1)


@pytest.mark.parametrize("name", METRICS)
def test_duplicates_are_linked_by_record_number(name: str) -> None:
    """Equal keys tie at distance 0 (on earth, at less than a micrometre)."""
    links = METRICS[name](2, 50).nearest(None, 3)

    assert links.indices.tolist() == [[0, 1, 2]] * 2
    assert (links.distances < 1e-6).all()


def test_duplicates_tie_under_shares_too() -> None:
    """The coordinator keeps the same order."""
    links = shared(np.ones((2, 2), dtype=np.int64), np.ones((9, 2), dtype=np.int64), 3)

    assert links.indices.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_refused(value: float) -> None:
    """By every numeric metric, with the row."""
    good, bad = np.zeros((2, 2)), np.array([[0.0, 0.0], [0.0, value]])
    for keys in (EuclideanKeys, EarthKeys):
        with pytest.raises(DataError, match="keys of the secondary: row 2, dimension 2"):
            keys(primary=good, records=bad).nearest(None, 1)
    with pytest.raises(DataError, match="row 2, dimension 2 is"):
        KeyRange(low=(0.0, 0.0), high=(1.0, 1.0)).quantise(bad)


def test_other_dimensions_are_refused() -> None:
    """At two parties, and against the agreed range."""
    one, two = np.zeros((3, 1)), np.zeros((3, 2))
    with pytest.raises(DataError, match="primary's have 2 dimensions, the secondary's 1"):
        EuclideanKeys(primary=two, records=one)
    with pytest.raises(DataError, match="have 1 dimensions, the agreed range 2"):
        KeyRange(low=(0.0, 0.0), high=(1.0, 1.0)).quantise(one)
    with pytest.raises(DataError, match="64 bits, the secondary's 128"):
        CodeKeys(
            primary=np.ones((2, 8), dtype=np.uint8), records=np.ones((2, 16), dtype=np.uint8)
        ).nearest(None, 1)
    with pytest.raises(DataError, match="differ in size"):
        masked_keys(np.zeros((3, 2), dtype=np.int64), deal(3, 4, 1)[0])


SPELLINGS = ["Ame\u0301lie  STRASSE", "\uff21m\u00e9lie stra\u00dfe"]


def links_of_texts(name: str, mine: list[str], theirs: list[str], k: int) -> LinkTable:
    if name == "text":
        return TextKeys.of(mine, theirs).nearest(None, k)
    if name == "blocked":
        return blocked(mine, theirs, k).nearest(None, k)
    if name == "mixed":
        columns = {"name": mine}, {"name": theirs}
        return MixedKeys.of(columns[0], columns[1], NAME).nearest(None, k)
    return CodeKeys(primary=coded(mine), records=coded(theirs)).nearest(None, k)


@pytest.mark.parametrize("name", ["text", "blocked", "mixed", "code"])
def test_spellings_of_one_text_are_one(name: str) -> None:
    """Combining and full-width characters, case and blanks, under every metric of texts."""
    links = links_of_texts(name, SPELLINGS[:1], ["hans huber", SPELLINGS[1]], 1)

    assert links.indices.tolist() == [[1]]
    assert links.distances.tolist() == [[0]]


@pytest.mark.parametrize("name", ["text", "blocked", "mixed", "code"])
def test_texts_of_10_000_characters_are_linked(name: str) -> None:
    """The nearer one first; scripts without blanks as well."""
    rng = np.random.default_rng(0)
    letters = np.array([chr(0x4E00 + number) for number in range(400)])
    text = "".join(rng.choice(letters, 10_000))
    other = "".join(rng.choice(letters, 10_000))
    links = links_of_texts(name, [text], [other, text[:9_000], text], 2)

    assert links.indices.tolist() == [[2, 1]]


@pytest.mark.parametrize("value", [7, 1.5, b"anna"])
def test_mixed_types_are_refused(value: object) -> None:
    """With the row and the type; None is a missing field of mixed keys, and of nothing else.

    Every metric of texts reads them by ``checked_texts``, which a test of its own covers.
    """
    columns = {"name": ["anna"]}, {"name": ["anna", value]}
    message = f"row 2: must be text, got {type(value).__name__}"
    with pytest.raises(DataError, match=message):
        MixedKeys.of(columns[0], columns[1], NAME).nearest(None, 1)
    with pytest.raises(DataError, match=message):
        encode_keys(columns[1], {"name": TextCode(bits=256)}, SECRET)
