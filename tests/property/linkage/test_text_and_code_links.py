"""Links by edits, by mixed fields and by bits equal plain loops."""

from importlib.util import find_spec

import numpy as np
import pytest
from helpers.nearest import nearest_codes, nearest_mixed, nearest_texts
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.linkage.links import NO_RECORD, LinkTable
from securevfl.linkage.metrics.metric import Field
from securevfl.linkage.text import normalise_text

WORDS = st.text(alphabet="abcé ß", max_size=6)


def edits(one: str, other: str) -> int:
    """The textbook table of edit distances (Wagner and Fischer 1974)."""
    above = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, theirs in enumerate(other, 1):
            row.append(min(row[-1] + 1, above[j] + 1, above[j - 1] + (letter != theirs)))
        above = row
    return above[-1]


def ranked(distances: np.ndarray, k: int, chosen: np.ndarray) -> list[list[int]]:
    """Each row's first k chosen records by (distance, number)."""
    return [sorted(chosen.tolist(), key=lambda r, row=row: (row[r], r))[:k] for row in distances]


def present(links: LinkTable) -> list[list[int]]:
    return [[int(record) for record in row if record != NO_RECORD] for row in links.indices]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(WORDS, min_size=1, max_size=12), st.lists(WORDS, min_size=1, max_size=12), st.data()
)
def test_texts_are_linked_by_the_fewest_edits(
    rows: list[str], records: list[str], data: st.DataObject
) -> None:
    """After normalising, with ties by record number, for any eligible records."""
    k = data.draw(st.integers(1, len(records)))
    size = len(records)
    eligible = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    distances = np.array(
        [[edits(normalise_text(one), normalise_text(other)) for other in records] for one in rows]
    )
    links = nearest_texts(rows, records, k, eligible=eligible)

    assert present(links) == ranked(distances, k, np.flatnonzero(eligible))
    for row in range(len(rows)):
        linked = links.indices[row][links.present[row]]
        assert np.array_equal(links.distances[row][links.present[row]], distances[row][linked])


NAMES = st.one_of(st.none(), WORDS)
YEARS = st.one_of(st.just(float("nan")), st.floats(1900, 2030))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(NAMES, YEARS), min_size=1, max_size=8),
    st.lists(st.tuples(NAMES, YEARS), min_size=1, max_size=8),
    st.floats(0, 1),
)
def test_mixed_distances_equal_a_loop_over_pairs(
    rows: list[tuple[str | None, float]], records: list[tuple[str | None, float]], missing: float
) -> None:
    """Weighted mean of one field's edits and another's difference, gaps included."""

    def distance(one: tuple[str | None, float], other: tuple[str | None, float]) -> float:
        name = born = missing
        a, b = (normalise_text(text or "") for text in (one[0], other[0]))
        if a and b:  # a blank name is a missing one
            name = 1 - edits(a, b) / max(len(a), len(b))
        if one[1] == one[1] and other[1] == other[1]:
            born = max(0.0, 1 - abs(one[1] - other[1]) / 20)
        return (3 * (1 - name) + (1 - born)) / 4

    def columns(table: list[tuple[str | None, float]]) -> dict[str, object]:
        return {"name": [name for name, _ in table], "born": np.array([born for _, born in table])}

    fields = [
        Field(name="name", kind="text", weight=3.0),
        Field(name="born", kind="number", scale=20.0),
    ]
    links = nearest_mixed(
        columns(rows), columns(records), fields, len(records), missing_similarity=missing
    )
    for row, one in enumerate(rows):
        expected = sorted(distance(one, other) for other in records)
        assert links.distances[row] == pytest.approx(expected, abs=1e-12)
        for slot, record in enumerate(links.indices[row]):
            assert links.distances[row, slot] == pytest.approx(distance(one, records[record]))


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 20),
    st.integers(1, 60),
    st.integers(1, 20),
    st.sampled_from([0.5, 0.02]),
    st.data(),
)
def test_codes_are_linked_by_the_fewest_bits(
    seed: int, rows: int, records: int, length: int, density: float, data: st.DataObject
) -> None:
    """Numpy and faiss agree with a loop; few ones make many ties."""
    rng = np.random.default_rng(seed)
    mine, theirs = (
        np.packbits(rng.random((count, 8 * length)) < density, axis=1) for count in (rows, records)
    )
    k = data.draw(st.integers(1, records))
    eligible = rng.random(records) < 0.7
    distances = np.array([[int(np.bitwise_count(a ^ b).sum()) for b in theirs] for a in mine])
    expected = ranked(distances, k, np.flatnonzero(eligible))

    backends = ["numpy"] + (["faiss"] if find_spec("faiss") else [])
    for backend in backends:
        links = nearest_codes(mine, theirs, k, eligible=eligible, backend=backend)
        assert present(links) == expected
        assert (links.distances[~links.present] == np.inf).all()


def test_many_records_are_compared_in_strips() -> None:
    """Nothing is lost or counted twice where one strip of records ends and the next begins."""
    rng = np.random.default_rng(1)
    mine, theirs = (rng.integers(0, 256, (count, 9), dtype=np.uint8) for count in (6, 20_000))
    distances = np.bitwise_count(mine[:, None] ^ theirs[None]).sum(axis=2, dtype=np.int64)
    links = nearest_codes(mine, theirs, 40, backend="numpy")

    assert present(links) == ranked(distances, 40, np.arange(20_000))


@pytest.mark.skipif(find_spec("faiss") is None, reason="faiss is an optional dependency")
def test_faiss_breaks_ties_by_record_number_too() -> None:
    """With 256 different codes among 20,000 records nearly every distance ties."""
    rng = np.random.default_rng(2)
    mine, theirs = (rng.integers(0, 256, (count, 1), dtype=np.uint8) for count in (50, 20_000))

    assert_links_equal(
        nearest_codes(mine, theirs, 7, backend="faiss"),
        nearest_codes(mine, theirs, 7, backend="numpy"),
    )


def assert_links_equal(one: LinkTable, other: LinkTable) -> None:
    assert np.array_equal(one.indices, other.indices)
    assert np.array_equal(one.distances, other.distances)
