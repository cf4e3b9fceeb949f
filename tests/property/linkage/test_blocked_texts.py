"""Blocking: which pairs are compared, and what is said about the others."""

import numpy as np
import pytest
from helpers.blocked import by_rules
from helpers.nearest import nearest_texts
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.links import NO_RECORD
from securevfl.linkage.metrics.metric import ComparedKeys
from securevfl.linkage.sampling import PoissonSampler, RoundLinker, eligible_pairs
from securevfl.stages.fuzzy_keys.edits import TextKeys


def people(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Names, and the same names with a letter changed."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    names = ["".join(rng.choice(letters, 12)) for _ in range(count)]
    changed = [f"{name[:5]}x{name[6:]}" for name in names]
    return names, changed


def test_what_blocking_loses_is_measured() -> None:
    """Near texts are found, strangers are not, and the figures say both."""
    rows, records = people(300, seed=0)
    keys = by_rules({"t": [*rows]}, {"t": [*records]}, ["left(t, 5)"], 2, rows_measured=300)
    links = keys.nearest(None, 2)
    exact = nearest_texts(rows, records, 2)

    assert keys.quality.rows_measured == 300
    assert keys.quality.recall_at_1 == (links.indices[:, 0] == np.arange(300)).mean() == 1
    assert keys.quality.recall_at_k == (links.distances <= exact.distances[:, 1:]).mean() < 1
    assert keys.quality.reduction_ratio > 0.9
    assert keys.swap_roles().quality == keys.quality
    assert "recall_at_k" in repr(keys)


def test_figures_come_from_as_many_rows_as_asked_for() -> None:
    """Evenly spread over the table, which may be shorter."""
    rows, records = people(50, seed=1)

    for asked, measured in ((7, 7), (70, 50)):
        keys = by_rules({"t": [*rows]}, {"t": [*records]}, ["t"], 1, rows_measured=asked)
        assert keys.quality.rows_measured == measured


def blocked(*, without: int | None = None) -> TextKeys:
    rng = np.random.default_rng(7)
    words = ["".join(rng.choice(list("abc"), rng.integers(1, 7))) for _ in range(100)]
    rows, records = words[:40], words[40:]
    if without is not None:
        del records[without]
    return by_rules({"t": [*rows]}, {"t": [*records]}, ["left(t, 2)", "right(t, 2)"], 3)


def test_the_cap_bounds_what_any_record_changes() -> None:
    """A record's candidates do not depend on other records: at most m rows change."""
    assert isinstance(blocked(), ComparedKeys)
    before = eligible_pairs(blocked(), cap=2).links(np.arange(40), 3).indices
    changed = []
    for removed in range(0, 60, 5):
        pairs = eligible_pairs(blocked(without=removed), cap=2)
        after = pairs.links(np.arange(40), 3).indices
        after = np.where(after >= removed, after + 1, after)
        changed.append((before != after).any(axis=1).sum())

    assert max(changed) <= 2
    assert sum(changed) > 0


def test_samples_are_linked_as_among_themselves() -> None:
    """Lists that are filtered each round equal a search of the sample, short rows included."""
    keys, rows = blocked(), np.arange(40)
    linker = RoundLinker(keys, 4, rate=0.5, method="list")
    sample = PoissonSampler(60, 0.3, insecure_seed=3).draw()
    links, expected = linker.link(rows, sample), keys.nearest(rows, 4, eligible=sample)

    assert np.array_equal(links.indices, expected.indices)
    assert np.array_equal(links.distances, expected.distances)


FIRST = st.lists(st.text(alphabet="ab", max_size=2), min_size=1, max_size=12)


@settings(deadline=None, max_examples=15)
@given(FIRST, FIRST, st.integers(1, 3), st.data())
def test_rules_find_what_they_say(
    rows: list[str], records: list[str], letters: int, data: st.DataObject
) -> None:
    """Chosen rows, also twice, among eligible records: those of equal first or last letters."""
    size = len(records)
    eligible = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    chosen = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5)), np.int64)
    rules = [f"left(t, {letters})", "right(t, 1), length(t)"]
    keys = by_rules({"t": [*rows]}, {"t": [*records]}, rules, 1)
    links = keys.nearest(chosen, size, eligible=eligible)
    back = keys.swap_roles().nearest(None, len(rows))

    def kept(one: str, other: str) -> bool:
        first = one[:letters] == other[:letters]
        return bool(one and other) and (first or (one[-1:], len(one)) == (other[-1:], len(other)))

    for place, row in enumerate(chosen):
        found = set(links.indices[place][links.present[place]].tolist())
        assert found == {
            number
            for number, record in enumerate(records)
            if eligible[number] and kept(rows[row], record)
        }
    for record, found_rows in enumerate(back.indices):
        expected = {row for row, text in enumerate(rows) if kept(text, records[record])}
        assert set(found_rows[found_rows >= 0].tolist()) == expected


def test_long_and_empty_texts() -> None:
    """10,000 letters are compared with few; an empty text is no candidate, not of an empty one."""
    rows, records = ["a" * 10_000, ""], ["a" * 9_000, "b" * 10_000, "", "Ame\u0301lie"]
    keys = by_rules({"t": [*rows]}, {"t": [*records]}, ["left(t, 2)"], 2)

    assert keys.nearest(None, 2).indices.tolist() == [[0, NO_RECORD], [NO_RECORD, NO_RECORD]]
    assert keys.nearest(None, 1, eligible=np.zeros(4, np.bool_)).indices.tolist() == [[-1], [-1]]


def test_impossible_settings_are_refused() -> None:
    """Each by name."""
    with pytest.raises(ConfigError, match="rows_measured must be at least 1"):
        by_rules({"t": ["a"]}, {"t": ["a"]}, ["t"], 1, rows_measured=0)
    with pytest.raises(DataError, match="K = 2 links"):
        by_rules({"t": ["a"]}, {"t": ["a"]}, ["t"], 2)
