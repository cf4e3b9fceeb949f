"""The record-side cap bounds what one record can change; other ways to cap do not."""

import math
from dataclasses import replace

import numpy as np
from helpers.linking import link_spec, round_linker
from helpers.nearest import nearest_records
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.dp.events import Unit
from securevfl.dp.sensitivity import linked_rows_sensitivity
from securevfl.linkage.links import NO_RECORD, LinkTable
from securevfl.linkage.metrics.points import EuclideanKeys
from securevfl.linkage.sampling import PoissonSampler, eligible_pairs, has_candidate
from securevfl.linkage.stage.candidates import source_of_metric


@st.composite
def keys(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Small tables in one or two dimensions, half of them on a coarse grid full of ties."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, records, dimensions = (draw(st.integers(1, most)) for most in (25, 25, 2))
    tables = [rng.normal(size=(count, dimensions)) for count in (rows, records)]
    if draw(st.booleans()):
        tables = [np.round(table) for table in tables]
    return tables[0], tables[1]


def capped_records(rows: np.ndarray, records: np.ndarray, k: int, *, cap: int) -> LinkTable:
    pairs = eligible_pairs(EuclideanKeys(primary=rows, records=records), cap=cap)
    return pairs.links(np.arange(len(rows)), k)


def linked_sets(links: LinkTable, removed: int | None = None) -> list[frozenset[int]]:
    """Each row's records, under the numbers they had before one was removed."""
    sets = []
    for row in links.indices:
        records = [int(record) for record in row if record != NO_RECORD]
        if removed is not None:
            records = [record + (record >= removed) for record in records]
        sets.append(frozenset(records))
    return sets


def rows_changed(before: list[frozenset[int]], after: list[frozenset[int]]) -> int:
    return sum(old != new for old, new in zip(before, after, strict=True))


def greedy_cap(rows: np.ndarray, records: np.ndarray, k: int, cap: int) -> list[frozenset[int]]:
    """Give rows their nearest records in turn, while a record has places left: the wrong way."""
    left = np.full(len(records), cap)
    sets = []
    for key in rows:
        distance = np.sqrt(((records - key) ** 2).sum(axis=1))
        best = [int(r) for r in np.lexsort((np.arange(len(records)), distance)) if left[r] > 0][:k]
        left[best] -= 1
        sets.append(frozenset(best))
    return sets


def surplus_dropped(
    rows: np.ndarray, records: np.ndarray, k: int, cap: int
) -> list[frozenset[int]]:
    """Top-K first, then keep each record's ``cap`` nearest rows: the other wrong way."""
    links = nearest_records(rows, records, k)
    sets = [set(row) for row in linked_sets(links)]
    for record in range(len(records)):
        users = [row for row in range(len(rows)) if record in sets[row]]
        users.sort(key=lambda row: (float(np.linalg.norm(rows[row] - records[record])), row))
        for row in users[cap:]:
            sets[row].discard(record)
    return [frozenset(row) for row in sets]


@settings(deadline=None, max_examples=150)
@given(keys(), st.integers(1, 6), st.integers(1, 6))
def test_removing_any_record_changes_at_most_cap_rows(
    pair: tuple[np.ndarray, np.ndarray], k: int, cap: int
) -> None:
    """Every record is removed in turn: at most m rows change, by one out and at most one in."""
    rows, records = pair
    before = linked_sets(capped_records(rows, records, k, cap=cap))
    for removed in range(len(records) if len(records) > 1 else 0):
        rest = np.delete(records, removed, axis=0)
        after = linked_sets(capped_records(rows, rest, k, cap=cap), removed)

        assert rows_changed(before, after) <= cap
        for old, new in zip(before, after, strict=True):
            assert old - new in (frozenset(), frozenset({removed}))
            assert len(new - old) <= len(old - new)


@settings(deadline=None, max_examples=60)
@given(keys(), st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_sampling_keeps_the_bound(
    pair: tuple[np.ndarray, np.ndarray], k: int, cap: int, seed: int
) -> None:
    """In a round's sample too: sampled links are the same with a record absent or not sampled."""
    rows, records = pair
    k = min(k, len(records))
    linker = round_linker(rows, records, k, rate=0.5, cap=cap)
    sample = PoissonSampler(len(records), 0.5, insecure_seed=seed).draw()
    everything = np.arange(len(rows))
    before = linked_sets(linker.link(everything, sample))
    for removed in np.flatnonzero(sample):
        without = sample.copy()
        without[removed] = False

        assert rows_changed(before, linked_sets(linker.link(everything, without))) <= cap


@settings(deadline=None, max_examples=60)
@given(keys(), st.integers(1, 6))
def test_a_cap_of_all_rows_is_no_cap(pair: tuple[np.ndarray, np.ndarray], k: int) -> None:
    """With m as large as the primary's table, links are the uncapped ones."""
    rows, records = pair
    k = min(k, len(records))
    capped, free = (
        capped_records(rows, records, k, cap=len(rows)),
        nearest_records(rows, records, k),
    )

    assert np.array_equal(capped.indices, free.indices)
    assert np.array_equal(capped.distances, free.distances)


@settings(deadline=None, max_examples=60)
@given(keys(), st.integers(1, 6), st.integers(1, 6))
def test_every_record_picks_its_nearest_rows(
    pair: tuple[np.ndarray, np.ndarray], k: int, cap: int
) -> None:
    """The readable twin: pick, then rank, in plain loops."""
    rows, records = pair
    picked: list[list[tuple[float, int]]] = [[] for _ in rows]
    for record, key in enumerate(records):
        distance = np.sqrt(((rows - key) ** 2).sum(axis=1))
        for row in sorted(range(len(rows)), key=lambda row: (distance[row], row))[:cap]:
            picked[row].append((float(distance[row]), record))
    links = capped_records(rows, records, k, cap=cap)

    for row, candidates in enumerate(picked):
        expected = [record for _, record in sorted(candidates)[:k]]
        assert [int(r) for r in links.indices[row] if r != NO_RECORD] == expected
    assert links.most_uses(len(records)) <= cap


def worst_change(way: str, *, cap: int, k: int) -> int:
    """Most rows that removing one record of a fixed table changes."""
    rng = np.random.default_rng(1)
    rows, records = rng.random((150, 2)), rng.random((60, 2))
    worst = 0
    for removed in range(len(records)):
        rest = np.delete(records, removed, axis=0)
        if way == "record-side":
            before = linked_sets(capped_records(rows, records, k, cap=cap))
            after = linked_sets(capped_records(rows, rest, k, cap=cap), removed)
        else:
            wrong = greedy_cap if way == "greedy" else surplus_dropped
            before = wrong(rows, records, k, cap)
            after = [
                frozenset(r + (r >= removed) for r in row) for row in wrong(rows, rest, k, cap)
            ]
        worst = max(worst, rows_changed(before, after))
    return worst


def test_the_wrong_ways_to_cap_exceed_it() -> None:
    """Negative controls: greedy and surplus-dropping caps of 4 change more rows."""
    assert worst_change("record-side", cap=4, k=3) <= 4
    assert worst_change("greedy", cap=4, k=3) > 4
    assert worst_change("surplus", cap=4, k=3) > 4


def test_pairs_are_kept_in_link_order() -> None:
    """Pairs of a row ascend by (distance, record), as links do."""
    rng = np.random.default_rng(2)
    rows, records = np.round(rng.normal(size=(20, 2))), np.round(rng.normal(size=(50, 2)))
    pairs = eligible_pairs(EuclideanKeys(primary=rows, records=records), cap=3)
    for row in range(20):
        part = slice(pairs.starts[row], pairs.starts[row + 1])
        ordered = sorted(zip(pairs.distances[part], pairs.records[part], strict=True))

        assert ordered == list(zip(pairs.distances[part], pairs.records[part], strict=True))
    assert len(pairs.records) == 150


@given(
    keys(),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["rows", "records"]),
    st.sampled_from([math.inf, 0.5, 0.0]),
    st.floats(0.2, 1.0),
    st.data(),
)
@settings(max_examples=80, deadline=None)
def test_a_record_moves_the_number_of_linked_rows_by_its_cap(
    tables: tuple[np.ndarray, np.ndarray],
    cap: int,
    k: int,
    by: str,
    limit: float,
    rate: float,
    data: st.DataObject,
) -> None:
    """Removed, it takes at most m rows away and adds none; exchanged, it moves them by m at most.

    However rows or records choose, whatever the sample holds, and however far a link may be.
    """
    rows, records = tables
    gone = data.draw(st.integers(0, len(records) - 1))

    def linked(records: np.ndarray) -> int:
        if not len(records):
            return 0
        spec = link_spec()
        choice = replace(
            spec.choice,
            neighbours=min(k, len(records)),
            by=by,
            links_per_record=cap,
            max_distance=limit,
            sampling_rate=rate,
            once=data.draw(st.booleans()),
        )
        metric = EuclideanKeys(primary=rows, records=records)
        source = source_of_metric(replace(spec, choice=choice), metric)
        return int(has_candidate(source, np.arange(len(rows))).sum())

    before, after = linked(records), linked(np.delete(records, gone, axis=0))
    moved = linked_rows_sensitivity(
        unit=Unit.SECONDARY_RECORD, links_per_record=cap, rows=len(rows)
    )
    assert 0 <= before - after <= moved
    other = records.copy()
    other[gone] = rows[data.draw(st.integers(0, len(rows) - 1))]
    assert abs(linked(other) - before) <= moved
